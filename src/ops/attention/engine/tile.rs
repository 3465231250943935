//! The tokens that are attended together.

use crate::core::dtype::{DType, Float};
use crate::core::tensor::Tensor;
use crate::ops::attention::Seen;
use crate::ops::simd::{Row, fetch};
use crate::ops::views::{PagedKv, Scale};
use crate::with_key;
use std::ops::Range;

/// Tokens of a tile; fewer where they have to be copied first.
pub const TILE: usize = 64;
const COPIED: usize = 16;

/// What is attended together: some tokens, or a partial that was kept.
pub struct Tile<'w, T> {
    keys: [*const T; TILE],
    values: [*const T; TILE],
    /// Where each token stands in its sequence.
    tokens: [u32; TILE],
    /// The first and one past the last of those places; empty at first, with no place in it.
    reach: Range<usize>,
    len: usize,
    /// Its number in its entry group: tiles of a entry group are cut at multiples of their size, whether the tokens are there or not.
    pub number: usize,
    pub kept: Option<usize>,
    /// The entry group that ends with this tile.
    pub closes: Option<usize>,
    copies: Option<&'w mut [f32]>,
}

/// Grows to what is added to it.
pub const NOWHERE: Range<usize> = Range { start: usize::MAX, end: 0 };

/// Rows have to be copied, as float32: those of FP8, and those whose channels do not follow each other.
pub fn must_copy(kv: &PagedKv) -> bool {
    kv.k.dtype.is_float8() || kv.k.stride(3) != 1 || kv.v.stride(3) != 1
}

/// The element type of the rows of tiles.
pub fn element(kv: &PagedKv) -> DType {
    if must_copy(kv) { DType::F32 } else { kv.k.dtype }
}

impl<'w, T: Row> Tile<'w, T> {
    /// Floats of memory for copies that one takes.
    pub fn floats(kv: &PagedKv) -> usize {
        if must_copy(kv) { COPIED * (kv.k.dim(3) + kv.v.dim(3)) } else { 0 }
    }

    /// `copies` is as long as [`Tile::floats`] says; T is what [`element`] says.
    pub fn new(copies: &'w mut [f32]) -> Tile<'w, T> {
        Tile {
            keys: [std::ptr::null(); TILE],
            values: [std::ptr::null(); TILE],
            tokens: [0; TILE],
            reach: NOWHERE,
            len: 0,
            number: 0,
            kept: None,
            closes: None,
            copies: (!copies.is_empty()).then_some(copies),
        }
    }

    pub fn clear(&mut self) {
        (self.len, self.number, self.kept, self.closes) = (0, 0, None, None);
        self.reach = NOWHERE;
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Tokens for which there are places.
    pub fn size(&self) -> usize {
        if self.copies.is_some() { COPIED } else { TILE }
    }

    /// Keys and values.
    #[inline(always)]
    pub fn rows(&self) -> [&[*const T]; 2] {
        [&self.keys[..self.len], &self.values[..self.len]]
    }

    /// The keys, of `dim` channels, to be fetched.
    pub fn keys_ahead(&self, dim: usize) -> Ahead<'_, T> {
        Ahead::new(&self.keys[..self.len], dim)
    }

    /// The values, of `dim` channels, to be fetched.
    pub fn values_ahead(&self, dim: usize) -> Ahead<'_, T> {
        Ahead::new(&self.values[..self.len], dim)
    }

    /// Whether a row that sees these tokens surely sees the whole tile.
    #[inline(always)]
    pub fn is_seen(&self, seen: &Seen) -> bool {
        let range = seen.range();
        range.start <= self.reach.start && self.reach.end <= range.end && seen.row_among(self.reach.end).is_none()
    }

    /// What a row that sees these tokens sees of this tile: rows of which this is equal see the same.
    pub fn among(&self, seen: &Seen) -> (Range<usize>, Option<usize>) {
        let range = seen.range();
        let range = range.start.max(self.reach.start)..range.end.min(self.reach.end);
        if range.is_empty() { (0..0, None) } else { (range.clone(), seen.row_among(range.end)) }
    }

    /// The tokens of this tile that are among these.
    ///
    /// # Safety
    /// The op's caller keeps the tensors valid.
    pub unsafe fn part(&self, seen: &Seen) -> Part<T> {
        let mut part = Part { keys: [std::ptr::null(); TILE], values: [std::ptr::null(); TILE], len: 0 };
        let range = seen.range();
        // SAFETY: says the caller.
        let is_seen = |token: usize| range.contains(&token) && unsafe { seen.has(token) };
        for n in (0..self.len).filter(|&n| is_seen(self.tokens[n] as usize)) {
            part.keys[part.len] = self.keys[n];
            part.values[part.len] = self.values[n];
            part.len += 1;
        }
        part
    }

    /// Adds `count` tokens of the sequence, `first` and those after it, which lie from (page, row, KV head) on.
    ///
    /// # Safety
    /// The tensors are valid, these rows are inside the page, and there is room.
    #[inline(always)]
    pub unsafe fn push(&mut self, kv: &PagedKv, first: usize, count: usize, place: [usize; 3]) {
        if self.copies.is_some() {
            // SAFETY: as the caller says.
            unsafe { self.push_copies(kv, count, place) };
        } else {
            let places = self.len..self.len + count;
            fill(&mut self.keys[places.clone()], kv.k.at(place), kv.k.stride(1));
            fill(&mut self.values[places], kv.v.at(place), kv.v.stride(1));
        }
        for (n, token) in self.tokens[self.len..self.len + count].iter_mut().enumerate() {
            *token = (first + n) as u32;
        }
        self.reach = self.reach.start.min(first)..self.reach.end.max(first + count);
        self.len += count;
    }

    /// # Safety
    /// As for [`Tile::push`], and T is f32.
    #[inline(never)]
    unsafe fn push_copies(&mut self, kv: &PagedKv, count: usize, [page, row, head]: [usize; 3]) {
        let Some(copies) = &mut self.copies else { return };
        let dims = kv.k.dim(3) + kv.v.dim(3);
        for n in 0..count {
            let (key, value) = copies[(self.len + n) * dims..][..dims].split_at_mut(kv.k.dim(3));
            // SAFETY: the token is inside the tensors and their scales.
            unsafe {
                copy_row(&kv.k, &kv.k_scale, [page, row + n, head], key);
                copy_row(&kv.v, &kv.v_scale, [page, row + n, head], value);
            }
            (self.keys[self.len + n], self.values[self.len + n]) = (key.as_ptr().cast(), value.as_ptr().cast());
        }
    }
}

/// The addresses of rows that are `stride` elements apart.
#[inline(always)]
fn fill<T>(rows: &mut [*const T], first: *const T, stride: isize) {
    let mut next = first;
    for row in rows {
        *row = next;
        next = next.wrapping_offset(stride);
    }
}

/// Rows that are fetched into the cache while others are attended to, some at a time.
#[derive(Clone, Copy)]
pub struct Ahead<'a, T> {
    rows: &'a [*const T],
    /// Elements of a row.
    dim: usize,
    /// Rows that one of several equal shares has.
    share: usize,
}

impl<'a, T> Ahead<'a, T> {
    /// Rows of `dim` elements.
    pub fn new(rows: &'a [*const T], dim: usize) -> Ahead<'a, T> {
        Ahead { rows, dim, share: 0 }
    }

    pub fn nothing() -> Ahead<'a, T> {
        Ahead::new(&[], 0)
    }

    /// Fetches the next `count` rows.
    #[inline(always)]
    pub fn fetch(&mut self, count: usize) {
        if !self.rows.is_empty() {
            let (now, later) = self.rows.split_at(count.min(self.rows.len()));
            for &row in now {
                fetch(row, self.dim);
            }
            self.rows = later;
        }
    }

    /// Shares out the rows among `shares` calls of [`Ahead::fetch_share`].
    #[inline(always)]
    pub fn share_out(&mut self, shares: usize) {
        self.share = self.rows.len().div_ceil(shares.max(1));
    }

    #[inline(always)]
    pub fn fetch_share(&mut self) {
        self.fetch(self.share);
    }
}

/// Some tokens of a tile.
pub struct Part<T> {
    keys: [*const T; TILE],
    values: [*const T; TILE],
    len: usize,
}

impl<T> Part<T> {
    pub fn rows(&self) -> [&[*const T]; 2] {
        [&self.keys[..self.len], &self.values[..self.len]]
    }
}

/// Copies the row of a token, as what its stored values stand for.
///
/// # Safety
/// The tensors are valid and hold the token.
#[inline(never)]
unsafe fn copy_row(t: &Tensor, scale: &Option<Scale>, place: [usize; 3], to: &mut [f32]) {
    // SAFETY: the token is inside the tensor.
    let scale = scale.as_ref().map_or(1.0, |scale| unsafe { scale.of(place) });
    with_key!(t.dtype, T => {
        let row = t.row::<T, 3>(place);
        for (d, x) in to.iter_mut().enumerate() {
            // SAFETY: `to` is as long as the row.
            *x = unsafe { row.get(d) }.to_f32() * scale;
        }
    })
}
