//! The tokens that are attended together.

use super::coded::{Coded, CodedRows, MEANS};
use crate::core::dtype::{DType, Float};
use crate::core::float8::F8E4M3;
use crate::core::tensor::Tensor;
use crate::ops::attention::{Problem, Seen};
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
    /// Whether its rows are codes.
    pub is_coded: bool,
    /// Scales of coded tokens, and which mean is theirs.
    coding: Coding,
    /// The blocks whose means lie one after the other in `means`, and how many there are.
    blocks: [usize; MEANS],
    means_len: usize,
    means: &'w mut [f32],
}

/// Scales of coded tokens: of keys and of values; and which of the tile's means is that of their block.
struct Coding {
    scales: [[f32; TILE]; 2],
    mean_of: [u8; TILE],
}

impl Coding {
    const NONE: Coding = Coding { scales: [[0.0; TILE]; 2], mean_of: [0; TILE] };
}

/// Grows to what is added to it.
pub const NOWHERE: Range<usize> = Range { start: usize::MAX, end: 0 };

/// Rows have to be copied: those of FP8 as float32, and those whose channels, or codes, do not follow each other.
pub fn must_copy(problem: &Problem) -> bool {
    let PagedKv { k, v, .. } = &problem.kv;
    let is_apart = |t: &Tensor| t.stride(3) != 1;
    k.dtype.is_float8()
        || is_apart(k)
        || is_apart(v)
        || problem.int4.is_some_and(|int4| is_apart(&int4.k) || is_apart(&int4.v))
}

/// The element type of the rows of tiles.
pub fn element(problem: &Problem) -> DType {
    if must_copy(problem) { DType::F32 } else { problem.kv.k.dtype }
}

impl<'w, T: Row> Tile<'w, T> {
    /// Floats of memory for copies that one takes.
    pub fn floats(problem: &Problem) -> usize {
        let PagedKv { k, v, .. } = &problem.kv;
        if must_copy(problem) { COPIED * (k.dim(3) + v.dim(3)) } else { 0 }
    }

    /// Floats of memory for means that one takes.
    pub fn floats_of_means(problem: &Problem) -> usize {
        if problem.int4.is_some() { MEANS * problem.kv.k.dim(3) } else { 0 }
    }

    /// `copies` and `means` are as long as [`Tile::floats`] and [`Tile::floats_of_means`] say; T is what [`element`] says.
    pub fn new(copies: &'w mut [f32], means: &'w mut [f32]) -> Tile<'w, T> {
        Tile {
            is_coded: false,
            coding: Coding::NONE,
            blocks: [0; MEANS],
            means_len: 0,
            means,
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
        (self.is_coded, self.means_len) = (false, 0);
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

    /// The rows of coded tokens.
    pub fn coded_rows<'r>(&'r self, means: &'r mut [*const f32; MEANS]) -> CodedRows<'r> {
        self.coded_rows_of(&self.keys[..self.len], &self.values[..self.len], &self.coding, means)
    }

    /// The rows of a part of the coded tokens.
    pub fn coded_rows_of_part<'r>(&'r self, part: &'r Part<T>, means: &'r mut [*const f32; MEANS]) -> CodedRows<'r> {
        let [keys, values] = part.rows();
        self.coded_rows_of(keys, values, &part.coding, means)
    }

    fn coded_rows_of<'r>(
        &'r self,
        keys: &'r [*const T],
        values: &'r [*const T],
        coding: &'r Coding,
        means: &'r mut [*const f32; MEANS],
    ) -> CodedRows<'r> {
        // SAFETY: pointers to T and to bytes are alike.
        let bytes =
            |rows: &'r [*const T]| unsafe { std::slice::from_raw_parts(rows.as_ptr().cast::<*const u8>(), rows.len()) };
        let dim = self.means.len() / MEANS;
        means.iter_mut().zip(self.means.chunks_exact(dim)).for_each(|(to, mean)| *to = mean.as_ptr());
        let scales = coding.scales.each_ref().map(|scales| &scales[..keys.len()]);
        CodedRows {
            keys: bytes(keys),
            values: bytes(values),
            scales,
            mean_of: &coding.mean_of[..keys.len()],
            means: &means[..self.means_len],
        }
    }

    /// The keys, of `dim` channels, to be fetched.
    pub fn keys_ahead(&self, dim: usize) -> Ahead<'_, T> {
        Ahead::new(&self.keys[..self.len], self.elements(dim))
    }

    /// The values, of `dim` channels, to be fetched.
    pub fn values_ahead(&self, dim: usize) -> Ahead<'_, T> {
        Ahead::new(&self.values[..self.len], self.elements(dim))
    }

    /// The elements of T in the bytes of a row of `dim` channels.
    fn elements(&self, dim: usize) -> usize {
        if self.is_coded { (dim / 2).div_ceil(size_of::<T>()) } else { dim }
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
        let null = [std::ptr::null(); TILE];
        let mut part = Part { keys: null, values: null, len: 0, coding: Coding::NONE };
        let range = seen.range();
        // SAFETY: says the caller.
        let is_seen = |token: usize| range.contains(&token) && unsafe { seen.has(token) };
        for n in (0..self.len).filter(|&n| is_seen(self.tokens[n] as usize)) {
            part.keys[part.len] = self.keys[n];
            part.values[part.len] = self.values[n];
            if self.is_coded {
                (0..2).for_each(|kv| part.coding.scales[kv][part.len] = self.coding.scales[kv][n]);
                part.coding.mean_of[part.len] = self.coding.mean_of[n];
            }
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
        self.grow(first, count);
    }

    /// Adds `count` coded tokens of one block, `first` and those after it, which lie from (page, row) on.
    ///
    /// # Safety
    /// As for [`Tile::push`], and the tile has no other tokens than coded ones.
    #[inline(never)]
    pub unsafe fn push_coded(&mut self, coded: &Coded, first: usize, count: usize, [page, row]: [usize; 2]) {
        let Coded { int4, sequence, head, slot, .. } = *coded;
        let head = if slot.is_some() { 0 } else { head };
        self.is_coded = true;
        let block = first / int4.block_size;
        let known = self.blocks[..self.means_len].iter().position(|&other| other == block);
        let mean = known.unwrap_or_else(|| {
            let (mean, dim) = (self.means_len, self.means.len() / MEANS);
            // SAFETY: the mean has D channels; that of a slot has its page, and one row.
            unsafe {
                let place = slot.map(|page| [page, 0]).or_else(|| int4.mean_place(sequence, block));
                int4.read_mean(place, head, &mut self.means[mean * dim..][..dim]);
            }
            (self.blocks[mean], self.means_len) = (block, mean + 1);
            mean
        });
        let place = [page, row, head];
        let places = self.len..self.len + count;
        match &mut self.copies {
            None => {
                fill_bytes(&mut self.keys[places.clone()], int4.k.at::<u8, 3>(place), int4.k.stride(1));
                fill_bytes(&mut self.values[places.clone()], int4.v.at::<u8, 3>(place), int4.v.stride(1));
            }
            Some(copies) => {
                let (bytes, values) = (int4.k.dim(3), int4.v.dim(3));
                for n in 0..count {
                    let to = copies[(self.len + n) * 2 * (bytes + values)..].as_mut_ptr().cast::<u8>();
                    // SAFETY: the token is inside the tensors, and its copy is shorter than one in float32.
                    unsafe {
                        let place = [page, row + n, head];
                        (0..bytes).for_each(|d| to.add(d).write(int4.k.row::<u8, 3>(place).get(d)));
                        (0..values).for_each(|d| to.add(bytes + d).write(int4.v.row::<u8, 3>(place).get(d)));
                        self.keys[self.len + n] = to.cast_const().cast();
                        self.values[self.len + n] = to.add(bytes).cast_const().cast();
                    }
                }
            }
        }
        for (to, scales) in self.coding.scales.iter_mut().zip([&int4.k_scale, &int4.v_scale]) {
            let scales = scales.along::<F8E4M3, 3>(1, place);
            // SAFETY: the tokens are inside the tensors.
            to[places.clone()].iter_mut().enumerate().for_each(|(n, to)| *to = unsafe { scales.get(n) }.to_f32());
        }
        self.coding.mean_of[places].fill(mean as u8);
        self.grow(first, count);
    }

    #[inline(always)]
    fn grow(&mut self, first: usize, count: usize) {
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
    // Four addresses at a time: one after the other they would wait for each other.
    let mut next: [*const T; 4] = std::array::from_fn(|n| first.wrapping_offset(n as isize * stride));
    let mut fours = rows.chunks_exact_mut(4);
    for rows in &mut fours {
        rows.copy_from_slice(&next);
        next = next.map(|row| row.wrapping_offset(4 * stride));
    }
    fours.into_remainder().iter_mut().zip(next).for_each(|(row, next)| *row = next);
}

/// The addresses of rows of bytes that are `stride` bytes apart.
fn fill_bytes<T>(rows: &mut [*const T], first: *const u8, stride: isize) {
    let mut next = first;
    for row in rows {
        *row = next.cast();
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
    coding: Coding,
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
