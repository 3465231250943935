//! How a block lies in source and target alike: runs of bytes, and the dimensions along which they repeat.

use super::super::GatherRequest;
use crate::core::tensor::MAX_RANK;

pub const MOST_DIMS: usize = MAX_RANK - 1;

/// `extent` of what is inside it, so many bytes apart.
#[derive(Clone, Copy)]
pub struct Dim {
    pub extent: u64,
    pub source: i64,
    pub target: i64,
}

pub struct Form {
    /// Bytes.
    pub run: u64,
    /// Innermost first; those past `used` have an extent of 1.
    pub dims: [Dim; MOST_DIMS],
    pub used: usize,
    /// Power of two, at most 16, of which every address and stride is a multiple.
    pub unit: u64,
}

impl Form {
    pub fn of(r: &GatherRequest) -> Form {
        const NONE: Dim = Dim { extent: 1, source: 0, target: 0 };
        let mut form = Form { run: r.target.dtype.bytes() as u64, dims: [NONE; MOST_DIMS], used: 0, unit: 0 };
        for d in (0..r.block_dims()).rev() {
            let (extent, [source, target]) = (r.target.dim(d + 1) as u64, r.block_strides(d));
            let last = form.dims[form.used.max(1) - 1];
            let spans = |run: i64, of: i64| run.wrapping_mul(last.extent as i64) == of;
            if extent == 1 {
                continue;
            }
            if form.used == 0 && source == form.run as i64 && target == form.run as i64 {
                form.run *= extent;
            } else if form.used > 0 && spans(last.source, source) && spans(last.target, target) {
                form.dims[form.used - 1].extent *= extent;
            } else {
                form.dims[form.used] = Dim { extent, source, target };
                form.used += 1;
            }
        }
        form.unit = form.widest_unit(r);
        form
    }

    fn widest_unit(&self, r: &GatherRequest) -> u64 {
        // The stride of a dimension of one block, or of one head, is never taken.
        let step = |t: &crate::core::tensor::Tensor, d: usize| if t.dim(d) > 1 { t.byte_stride(d) } else { 0 };
        let blocks = step(&r.source, 0) | step(&r.target, 0) | if r.per_head() { step(&r.source, 1) } else { 0 };
        let inside = self.dims.iter().fold(0, |bits, dim| bits | dim.source | dim.target);
        let addresses = r.source.data() as i64 | r.target.data() as i64;
        1 << (blocks | inside | addresses | self.run as i64).trailing_zeros().min(4)
    }

    /// Bytes of a block.
    pub fn bytes(&self) -> u64 {
        self.runs().saturating_mul(self.run)
    }

    /// Runs of a block.
    pub fn runs(&self) -> u64 {
        self.dims.iter().map(|dim| dim.extent).product()
    }

    /// Where run `n` lies in a block of the source and of the target.
    pub fn offsets(&self, mut n: u64) -> [i64; 2] {
        let mut at = [0; 2];
        for dim in &self.dims[..self.used] {
            let i = (n % dim.extent) as i64;
            n /= dim.extent;
            at = [at[0] + i * dim.source, at[1] + i * dim.target];
        }
        at
    }
}
