//! The running softmax of up to eight query heads: Σ e^(s−m) v, max s and Σ e^(s−m), and how two of them join.
//!
//! Eight heads are one vector. Every function here treats a head apart from its neighbours, so that its bits depend on its
//! own query and rows alone.

use super::span::Span;
use super::tile::{TILE, Tile};
use crate::ops::attention::Seen;
use crate::ops::simd::{LANES, Lanes, Row, dot_four, fetch, weigh_four};
use crate::ops::views::State;

/// Query heads that are attended together.
pub const HEADS: usize = LANES;

/// In memory of the caller's.
pub struct Partial<'w> {
    pub m: &'w mut [f32; HEADS],
    pub l: &'w mut [f32; HEADS],
    /// Head h from h·Dv on; heads come in fours.
    pub acc: &'w mut [f32],
}

/// Queries of a span, times the scale, and which tokens each may see.
pub struct Queries<'w> {
    /// Head h from h·D on; heads come in fours.
    pub values: &'w mut [f32],
    pub seen: [Seen<'w>; HEADS],
    /// Of scores, where there is one.
    pub cap: Option<f32>,
    /// Dv
    pub value_dim: usize,
}

impl<'w> Partial<'w> {
    /// Floats of memory that one takes.
    pub fn floats(heads: usize, value_dim: usize) -> usize {
        2 * HEADS + heads.next_multiple_of(4) * value_dim
    }

    /// What this memory holds.
    pub fn over(memory: &'w mut [f32]) -> Partial<'w> {
        let (m, rest) = memory.split_first_chunk_mut().expect("room for m");
        let (l, acc) = rest.split_first_chunk_mut().expect("room for l");
        Partial { m, l, acc }
    }

    /// Nothing attended, in this memory.
    pub fn empty(memory: &'w mut [f32]) -> Partial<'w> {
        let mut partial = Partial::over(memory);
        partial.clear();
        partial
    }

    /// Forgets what was attended.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.m.fill(f32::NEG_INFINITY);
        self.l.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Where something was attended l is at least 1, or NaN.
    pub fn is_empty(&self, span: &Span) -> bool {
        self.l[..span.heads].iter().all(|&l| l == 0.0)
    }

    /// Attends over a tile, whose rows become all that this holds. Meanwhile the rows `ahead` are fetched; `first`: and
    /// the values of this tile. `spare` has room for four heads.
    ///
    /// # Safety
    /// The rows of the tile are valid.
    #[inline(always)]
    pub unsafe fn attend<L: Lanes, T: Row>(
        &mut self,
        queries: &Queries,
        span: &Span,
        tile: &Tile<T>,
        (first, ahead): (bool, &[*const T]),
        spare: &mut [f32],
    ) {
        let quads = span.heads.div_ceil(4);
        for quad in 0..quads {
            let heads = quad * 4..span.heads.min(quad * 4 + 4);
            let all =
                queries.of_quad(quad, tile.rows(), (first && quad == 0, if quad + 1 == quads { ahead } else { &[] }));
            let acc = &mut self.acc[quad * 4 * queries.value_dim..][..4 * queries.value_dim];
            let seen = &queries.seen[heads.clone()];
            if seen.iter().all(|seen| tile.is_seen(seen)) {
                // SAFETY: the tile's rows have D and Dv channels; acc has four heads of Dv.
                let (m, l) = unsafe { all.attend::<L>(acc) };
                self.m[quad * 4..quad * 4 + 4].copy_from_slice(&m);
                self.l[quad * 4..quad * 4 + 4].copy_from_slice(&l);
                continue;
            }
            // Some see a part of the tile, or nothing.
            let mut h = 0;
            while h < seen.len() {
                let among = tile.among(&seen[h]);
                let alike = seen[h..].iter().take_while(|other| tile.among(other) == among).count();
                // SAFETY: as above; rows of a part are rows of the tile.
                let (m, l) = unsafe {
                    let part = tile.part(&seen[h]);
                    queries.of_quad(quad, part.rows(), (false, &[])).attend::<L>(spare)
                };
                let floats = h * queries.value_dim..(h + alike) * queries.value_dim;
                acc[floats.clone()].copy_from_slice(&spare[floats]);
                self.m[quad * 4 + h..][..alike].copy_from_slice(&m[h..h + alike]);
                self.l[quad * 4 + h..][..alike].copy_from_slice(&l[h..h + alike]);
                h += alike;
            }
        }
    }

    /// Joins `other` to this: m' = max(m, mₒ), l' = l·e^(m−m') + lₒ·e^(mₒ−m'), and acc like l. Where `other` holds
    /// nothing, no bit changes.
    #[inline(always)]
    pub fn fold<L: Lanes>(&mut self, other: &Partial, span: &Span, value_dim: usize) {
        if other.is_empty(span) {
            return;
        }
        let (mine, others) = (L::from_array(self.m), L::from_array(other.m));
        let m = others.max(mine);
        let shift = finite::<L>(m);
        let (keep, take) = (mine.sub(shift).exp(), others.sub(shift).exp());
        let l = L::from_array(other.l).mul_add(take, L::from_array(self.l).mul(keep));
        *self.m = m.to_array();
        *self.l = l.to_array();
        let (keep, take) = (keep.to_array(), take.to_array());
        for h in 0..span.heads {
            let (keep, take) = (L::splat(keep[h]), L::splat(take[h]));
            let range = h * value_dim..(h + 1) * value_dim;
            let (mine, other) = (self.acc[range.clone()].chunks_exact_mut(LANES), other.acc[range].chunks_exact(LANES));
            for (mine, other) in mine.zip(other) {
                // SAFETY: both chunks have eight values.
                unsafe {
                    let kept = L::load(mine.as_ptr()).mul(keep);
                    L::load(other.as_ptr()).mul_add(take, kept).store(mine.as_mut_ptr());
                }
            }
        }
    }

    /// Reads these heads of a state, or one of their partials.
    ///
    /// # Safety
    /// The tensors are valid and hold the span; there is a partial of that number.
    #[inline(always)]
    pub unsafe fn read(&mut self, from: &State, partial: Option<usize>, span: &Span, value_dim: usize) {
        for (h, acc) in self.acc.chunks_exact_mut(value_dim).take(span.heads).enumerate() {
            // SAFETY: the caller vouches for the tensors, and a head of acc has Dv values.
            unsafe {
                self.m[h] = span.at(&from.m, h, partial).read();
                self.l[h] = span.at(&from.l, h, partial).read();
                span.row_of(&from.acc, h, partial).read_into(acc);
            }
        }
    }

    /// Writes them.
    ///
    /// # Safety
    /// As for [`Partial::read`], and no other task touches these heads.
    #[inline(always)]
    pub unsafe fn write(&self, to: &State, partial: Option<usize>, span: &Span, value_dim: usize) {
        for (h, acc) in self.acc.chunks_exact(value_dim).take(span.heads).enumerate() {
            // SAFETY: as for read.
            unsafe {
                span.at(&to.m, h, partial).write(self.m[h]);
                span.at(&to.l, h, partial).write(self.l[h]);
                span.row_of(&to.acc, h, partial).write_from(acc);
            }
        }
    }
}

/// Four heads and the rows that they see.
struct Quad<'q, T> {
    queries: &'q [f32],
    cap: Option<f32>,
    keys: &'q [*const T],
    values: &'q [*const T],
    /// Fetch the values before they are needed, and these rows after that.
    fetch_values: bool,
    ahead: &'q [*const T],
}

impl Queries<'_> {
    #[inline(always)]
    fn of_quad<'q, T>(
        &'q self,
        quad: usize,
        [keys, values]: [&'q [*const T]; 2],
        (fetch_values, ahead): (bool, &'q [*const T]),
    ) -> Quad<'q, T> {
        let dim = self.values.len() / HEADS;
        let queries = &self.values[quad * 4 * dim..][..4 * dim];
        Quad { queries, cap: self.cap, keys, values, fetch_values, ahead }
    }
}

impl<T: Row> Quad<'_, T> {
    /// Gives m and l of the four heads, and writes their acc.
    ///
    /// # Safety
    /// The rows are valid.
    #[inline(always)]
    unsafe fn attend<L: Lanes>(&self, acc: &mut [f32]) -> ([f32; 4], [f32; 4]) {
        // An odd row out is paired with one of no weight.
        let mut scores = [[f32::NEG_INFINITY; 4]; TILE];
        for (n, (keys, scores)) in self.keys.chunks(2).zip(scores[..self.keys.len()].chunks_mut(2)).enumerate() {
            if self.fetch_values {
                self.values[2 * n..][..keys.len()].iter().for_each(|&row| fetch(row, acc.len() / 4));
            }
            // SAFETY: each key has D channels, and `queries` four heads of D.
            unsafe { dot_four::<L, T>(keys, self.queries, scores) };
        }
        let rows = self.keys.len();
        if let Some(cap) = self.cap {
            cap_scores::<L>(scores[..rows.next_multiple_of(2)].as_flattened_mut(), cap);
            scores[rows..].fill([f32::NEG_INFINITY; 4]);
        }
        let sums = softmax::<L>(scores[..rows.next_multiple_of(2)].as_flattened_mut());
        // SAFETY: as above.
        unsafe { weigh_four::<L, T>(self.values, &scores[..rows], acc, self.ahead) };
        sums
    }
}

/// m where it is finite, so that s − m is −inf and not NaN where nothing has been attended.
#[inline(always)]
fn finite<L: Lanes>(m: L) -> L {
    m.max(L::splat(f32::MIN))
}

/// s becomes cap·tanh(s / cap).
#[inline(always)]
fn cap_scores<L: Lanes>(scores: &mut [f32], cap: f32) {
    let (cap, share) = (L::splat(cap), L::splat(1.0 / cap));
    for pair in scores.chunks_exact_mut(LANES) {
        // SAFETY: the chunk has eight values.
        unsafe { L::load(pair.as_ptr()).mul(share).tanh().mul(cap).store(pair.as_mut_ptr()) };
    }
}

/// Turns scores [rows][4], an even number of rows, into weights e^(s−m); gives m and Σ e^(s−m) of the four heads.
/// A NaN among the scores stays one and makes its sum NaN.
#[inline(always)]
fn softmax<L: Lanes>(scores: &mut [f32]) -> ([f32; 4], [f32; 4]) {
    let mut top = L::splat(f32::NEG_INFINITY);
    for pair in scores.chunks_exact(LANES) {
        // SAFETY: the chunk has eight values.
        top = unsafe { L::load(pair.as_ptr()) }.max(top);
    }
    let top = top.to_array();
    let m: [f32; 4] = std::array::from_fn(|j| top[j].max(top[j + 4]));
    let shift = finite(L::from_array(&std::array::from_fn(|j| m[j % 4])));
    let mut sum = L::splat(0.0);
    for pair in scores.chunks_exact_mut(LANES) {
        // SAFETY: as above.
        unsafe {
            let weight = L::load(pair.as_ptr()).sub(shift).exp();
            weight.store(pair.as_mut_ptr());
            sum = sum.add(weight);
        }
    }
    let sum = sum.to_array();
    (m, std::array::from_fn(|j| sum[j] + sum[j + 4]))
}
