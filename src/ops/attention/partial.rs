//! The running softmax of eight query heads: Σ e^(s−m) v, max s and Σ e^(s−m), and how two of them join.
//!
//! Eight heads are one vector. Every function here treats a head apart from its neighbours, so that its bits depend on its
//! own query and rows alone.

use crate::core::tensor::Tensor;
use crate::ops::simd::{LANES, Lanes, Row, dot_four, fetch, weigh_four};
use crate::ops::views::{MAX_DIM, State};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// Query heads that are attended together.
pub const HEADS: usize = LANES;
/// Tokens that are attended together; fewer where they have to be copied first.
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
    pub fn is_empty(&self, span: Span) -> bool {
        self.l[..span.heads].iter().all(|&l| l == 0.0)
    }

    /// Attends over a tile, whose rows become all that this holds. The keys of the next tile are fetched meanwhile.
    ///
    /// # Safety
    /// The rows of the tile are valid.
    #[inline(always)]
    pub unsafe fn attend<L: Lanes, T: Row>(
        &mut self,
        queries: &[f32; HEADS * MAX_DIM],
        span: Span,
        tile: &Tile<T>,
        next: &Tile<T>,
    ) {
        let (keys, values) = (&tile.keys[..tile.len], &tile.values[..tile.len]);
        let four = 4 * span.dim;
        let quads = span.heads.div_ceil(4);
        for quad in 0..quads {
            let queries = &queries[quad * four..(quad + 1) * four];
            // An odd row out is paired with one of no weight.
            let mut scores = [[f32::NEG_INFINITY; 4]; TILE];
            for (n, (keys, scores)) in keys.chunks(2).zip(scores[..keys.len()].chunks_mut(2)).enumerate() {
                if quad == 0 {
                    values[2 * n..][..keys.len()].iter().for_each(|&row| fetch(row, span.dim));
                }
                // SAFETY: forwarded to the caller; four heads of queries follow each other.
                unsafe { dot_four::<L, T>(keys, queries, scores) };
            }
            let (m, l) = softmax::<L>(scores[..keys.len().next_multiple_of(2)].as_flattened_mut());
            self.m[quad * 4..quad * 4 + 4].copy_from_slice(&m);
            self.l[quad * 4..quad * 4 + 4].copy_from_slice(&l);
            let ahead = if quad + 1 == quads { &next.keys[..next.len] } else { &[] };
            let acc = &mut self.acc[quad * four..(quad + 1) * four];
            // SAFETY: as above.
            unsafe { weigh_four::<L, T>(values, &scores[..values.len()], acc, ahead) };
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

/// What is attended together: up to `TILE` tokens, or a partial that was kept.
pub struct Tile<'c, T> {
    keys: [*const T; TILE],
    values: [*const T; TILE],
    len: usize,
    pub kept: Option<usize>,
    /// The group that ends with this tile.
    pub closes: Option<usize>,
    /// Where channels do not follow each other, rows are copied here, fewer at a time.
    copies: Option<NonNull<Copies<T>>>,
    borrow: PhantomData<&'c mut Copies<T>>,
}

/// Memory for the rows of a tile that have to be copied: a key, its value, the next key …
pub type Copies<T> = [[T; MAX_DIM]; 2 * COPIED];

impl<'c, T: Row> Tile<'c, T> {
    /// For rows of these keys and values.
    pub fn new(k: &Tensor, v: &Tensor, copies: &'c mut MaybeUninit<Copies<T>>) -> Tile<'c, T> {
        let packed = k.stride(3) == 1 && v.stride(3) == 1;
        Tile {
            keys: [std::ptr::null(); TILE],
            values: [std::ptr::null(); TILE],
            len: 0,
            kept: None,
            closes: None,
            copies: (!packed).then_some(NonNull::from(copies).cast()),
            borrow: PhantomData,
        }
    }

    pub fn clear(&mut self) {
        (self.len, self.kept, self.closes) = (0, None, None);
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Tokens for which there is a place.
    pub fn room(&self) -> usize {
        if self.copies.is_some() { COPIED - self.len } else { TILE - self.len }
    }

    /// Adds the token at (page, row, KV head).
    ///
    /// # Safety
    /// The tensors are valid and hold this token; there is room.
    pub unsafe fn push(&mut self, k: &Tensor, v: &Tensor, token: [usize; 3]) {
        let (mut key, mut value) = (k.at::<T, 3>(token).cast_const(), v.at::<T, 3>(token).cast_const());
        if let Some(copies) = self.copies {
            // SAFETY: forwarded to the caller; a row of copies has room for D values.
            unsafe {
                let key_copy = copies.cast::<[T; MAX_DIM]>().add(2 * self.len).cast::<T>().as_ptr();
                let value_copy = key_copy.add(MAX_DIM);
                copy(key, k.stride(3), key_copy, 1, k.dim(3));
                copy(value, v.stride(3), value_copy, 1, v.dim(3));
                (key, value) = (key_copy, value_copy);
            }
        }
        self.keys[self.len] = key;
        self.values[self.len] = value;
        self.len += 1;
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
