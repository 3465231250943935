//! Which query heads a task handles, and where they stand in tensors.

use crate::core::along::Along;
use crate::core::tensor::Tensor;
use crate::ops::simd::LANES;

/// The most rows of a span: what belongs to each of them alone is one vector.
pub const HEADS: usize = LANES;

/// Consecutive rows of a unit, at most eight. A unit is what reads one list: G query heads of one position, or of each of
/// the positions that share it, one position after the other.
#[derive(Clone, Copy)]
pub struct Span {
    pub sequence: usize,
    /// Those of the unit's first row.
    pub position: usize,
    pub head: usize,
    /// G
    pub group: usize,
    /// First row.
    pub first: usize,
    pub heads: usize,
    /// Tensors have a dimension for positions.
    pub ranked: bool,
}

impl Span {
    /// The position of row `n` of the span, and its query head.
    #[inline(always)]
    pub fn row(&self, n: usize) -> (usize, usize) {
        let row = self.first + n;
        (self.position + row / self.group, self.head + row % self.group)
    }

    /// Address of row `n` in a float32 tensor [B, (Q,) Hq, ..], or of one of its partials.
    #[inline(always)]
    pub fn at(&self, t: &Tensor, n: usize, partial: Option<usize>) -> *mut f32 {
        let (i, (r, h)) = (self.sequence, self.row(n));
        match (self.ranked, partial) {
            (false, None) => t.at([i, h]),
            (true, None) => t.at([i, r, h]),
            (false, Some(p)) => t.at([i, h, p]),
            (true, Some(p)) => t.at([i, r, h, p]),
        }
    }

    /// The elements of that row.
    #[inline(always)]
    pub fn row_of(&self, t: &Tensor, n: usize, partial: Option<usize>) -> Along<f32> {
        Along::new(self.at(t, n, partial), t.stride(t.rank() - 1))
    }
}
