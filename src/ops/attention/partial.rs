//! The running softmax of eight query heads: Σ e^(s−m) v, max s and Σ e^(s−m), and how two of them join.
//!
//! Eight heads are one vector. Every function here treats a head apart from its neighbours, so that its bits depend on its
//! own query and rows alone.

use crate::core::tensor::Tensor;
use crate::ops::simd::{LANES, Lanes, Row, dot_four, weigh_four};
use crate::ops::views::State;

/// Query heads that are attended together.
pub const HEADS: usize = LANES;
pub const MAX_DIM: usize = 256;
/// Rows that are attended together.
pub const TILE: usize = 64;
const COPIED: usize = 16;

pub struct Partial {
    pub m: [f32; HEADS],
    pub l: [f32; HEADS],
    /// Head h from h·D on.
    pub acc: [f32; HEADS * MAX_DIM],
}

/// The heads that a task handles, as rows of states and outputs.
#[derive(Clone, Copy)]
pub struct Span {
    /// Index in the leading dimension: a sequence, or a chunk.
    pub row: usize,
    /// First head, and number of heads, at most `HEADS`.
    pub first: usize,
    pub heads: usize,
    /// D
    pub dim: usize,
}

impl Partial {
    /// Nothing attended.
    pub const EMPTY: Partial = Partial { m: [f32::NEG_INFINITY; HEADS], l: [0.0; HEADS], acc: [0.0; HEADS * MAX_DIM] };

    /// Forgets what was attended.
    #[inline(always)]
    pub fn clear(&mut self, span: Span) {
        self.m = Partial::EMPTY.m;
        self.l = Partial::EMPTY.l;
        self.acc[..span.heads * span.dim].fill(0.0);
    }

    /// Where something was attended l is at least 1, or NaN.
    fn is_empty(&self, span: Span) -> bool {
        self.l[..span.heads].iter().all(|&l| l == 0.0)
    }

    /// Attends over at most `TILE` rows, which become all that this holds.
    ///
    /// # Safety
    /// Keys and values, as many of each, have D readable elements.
    #[inline(always)]
    pub unsafe fn attend<L: Lanes, T: Row>(
        &mut self,
        queries: &[f32; HEADS * MAX_DIM],
        span: Span,
        keys: &[*const T],
        values: &[*const T],
    ) {
        let four = 4 * span.dim;
        for quad in 0..span.heads.div_ceil(4) {
            // An odd row out is paired with one of no weight.
            let mut scores = [[f32::NEG_INFINITY; 4]; TILE];
            // SAFETY: forwarded to the caller; four heads of queries and of acc follow each other.
            unsafe { dot_four::<L, T>(keys, &queries[quad * four..(quad + 1) * four], &mut scores[..keys.len()]) };
            let padded = keys.len().next_multiple_of(2);
            let (m, l) = softmax::<L>(scores[..padded].as_flattened_mut());
            self.m[quad * 4..quad * 4 + 4].copy_from_slice(&m);
            self.l[quad * 4..quad * 4 + 4].copy_from_slice(&l);
            // SAFETY: as above.
            unsafe { weigh_four::<L, T>(values, &scores[..keys.len()], &mut self.acc[quad * four..(quad + 1) * four]) };
        }
    }

    /// Joins `other` to this: m' = max(m, mₒ), l' = l·e^(m−m') + lₒ·e^(mₒ−m'), and acc like l. Where `other` holds
    /// nothing, no bit changes.
    #[inline(always)]
    pub fn fold<L: Lanes>(&mut self, other: &Partial, span: Span) {
        if other.is_empty(span) {
            return;
        }
        let (mine, others) = (L::from_array(&self.m), L::from_array(&other.m));
        let m = others.max(mine);
        let shift = finite::<L>(m);
        let (keep, take) = (mine.sub(shift).exp(), others.sub(shift).exp());
        let l = L::from_array(&other.l).mul_add(take, L::from_array(&self.l).mul(keep));
        self.m = m.to_array();
        self.l = l.to_array();
        let (keep, take) = (keep.to_array(), take.to_array());
        for h in 0..span.heads {
            let (keep, take) = (L::splat(keep[h]), L::splat(take[h]));
            let range = h * span.dim..(h + 1) * span.dim;
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
    pub unsafe fn read(&mut self, from: &State, partial: Option<usize>, span: Span) {
        for h in 0..span.heads {
            let acc = &mut self.acc[h * span.dim..(h + 1) * span.dim];
            // SAFETY: forwarded to the caller.
            unsafe {
                self.m[h] = place(&from.m, span, h, partial).read();
                self.l[h] = place(&from.l, span, h, partial).read();
                copy(place(&from.acc, span, h, partial), channel_stride(&from.acc), acc.as_mut_ptr(), 1, span.dim);
            }
        }
    }

    /// Writes them.
    ///
    /// # Safety
    /// As for [`Partial::read`], and no other task touches these heads.
    #[inline(always)]
    pub unsafe fn write(&self, to: &State, partial: Option<usize>, span: Span) {
        for h in 0..span.heads {
            let acc = &self.acc[h * span.dim..(h + 1) * span.dim];
            // SAFETY: forwarded to the caller.
            unsafe {
                place(&to.m, span, h, partial).write(self.m[h]);
                place(&to.l, span, h, partial).write(self.l[h]);
                copy(acc.as_ptr(), 1, place(&to.acc, span, h, partial), channel_stride(&to.acc), span.dim);
            }
        }
    }
}

/// Address of head `h` of the span, or of one of its partials.
#[inline(always)]
fn place(t: &Tensor, span: Span, h: usize, partial: Option<usize>) -> *mut f32 {
    match partial {
        None => t.at([span.row, span.first + h]),
        Some(p) => t.at([span.row, span.first + h, p]),
    }
}

fn channel_stride(acc: &Tensor) -> isize {
    acc.stride(acc.rank() - 1)
}

/// Copies `count` elements that lie `from_step` apart to places that lie `to_step` apart.
///
/// # Safety
/// All are valid, and the two do not overlap.
#[inline(always)]
unsafe fn copy<T: Copy>(from: *const T, from_step: isize, to: *mut T, to_step: isize, count: usize) {
    // SAFETY: forwarded to the caller.
    unsafe {
        if from_step == 1 && to_step == 1 {
            return std::ptr::copy_nonoverlapping(from, to, count);
        }
        for n in 0..count as isize {
            to.offset(n * to_step).write(from.offset(n * from_step).read());
        }
    }
}

/// Keys and values of the tokens that wait to be attended together.
pub struct Rows<T> {
    k: Tensor,
    v: Tensor,
    keys: [*const T; TILE],
    values: [*const T; TILE],
    len: usize,
    /// Where channels do not follow each other, rows are copied here, fewer at a time.
    copies: Option<[[T; MAX_DIM]; 2 * COPIED]>,
}

impl<T: Row> Rows<T> {
    pub fn new(k: &Tensor, v: &Tensor) -> Rows<T> {
        let packed = k.stride(3) == 1 && v.stride(3) == 1;
        let copies = (!packed).then_some([[T::from_f32(0.0); MAX_DIM]; 2 * COPIED]);
        Rows { k: *k, v: *v, keys: [std::ptr::null(); TILE], values: [std::ptr::null(); TILE], len: 0, copies }
    }

    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.len == if self.copies.is_some() { COPIED } else { TILE }
    }

    /// Adds the token at (page, row, KV head).
    ///
    /// # Safety
    /// k and v are valid, hold this token, and this is not full.
    #[inline(always)]
    pub unsafe fn push(&mut self, token: [usize; 3]) {
        let (mut key, mut value) = (self.k.at::<T, 3>(token).cast_const(), self.v.at::<T, 3>(token).cast_const());
        if let Some(copies) = &mut self.copies {
            let (key_copy, value_copy) = (copies[2 * self.len].as_mut_ptr(), copies[2 * self.len + 1].as_mut_ptr());
            // SAFETY: forwarded to the caller; D is at most MAX_DIM.
            unsafe {
                copy(key, self.k.stride(3), key_copy, 1, self.k.dim(3));
                copy(value, self.v.stride(3), value_copy, 1, self.v.dim(3));
            }
            (key, value) = (key_copy, value_copy);
        }
        self.keys[self.len] = key;
        self.values[self.len] = value;
        self.len += 1;
    }

    /// Attends over what waits and joins it to `group`; `spare` is overwritten.
    ///
    /// # Safety
    /// The rows pushed are still valid, and this has not moved since.
    #[inline(always)]
    pub unsafe fn attend<L: Lanes>(
        &mut self,
        queries: &[f32; HEADS * MAX_DIM],
        span: Span,
        group: &mut Partial,
        spare: &mut Partial,
    ) {
        if self.len == 0 {
            return;
        }
        let first = group.is_empty(span);
        let target = if first { &mut *group } else { &mut *spare };
        // SAFETY: forwarded to the caller.
        unsafe { target.attend::<L, T>(queries, span, &self.keys[..self.len], &self.values[..self.len]) };
        if !first {
            group.fold::<L>(spare, span);
        }
        self.len = 0;
    }
}

/// m where it is finite, so that s − m is −inf and not NaN where nothing has been attended.
#[inline(always)]
fn finite<L: Lanes>(m: L) -> L {
    m.max(L::splat(f32::MIN))
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
