//! The running softmax of up to eight query heads: Σ e^(s−m) v, max s and Σ e^(s−m), and how two of them join.
//!
//! Eight heads are one vector. Every function here treats a head apart from its neighbours, so that its bits depend on its
//! own query and rows alone.

use super::attend_coded::{self, Asked, Target};
use super::coded::{CodedQueries, CodedRows, MEANS};
use super::scores::{Scores, Softmax, score_rows};
use super::span::{HEADS, Span};
use super::tile::{Ahead, TILE, Tile};
use super::weigh::weigh_rows;
use crate::ops::attention::Seen;
use crate::ops::simd::{Kernel, LANES, Lanes, Row, dispatch, dispatch_wide};
use crate::ops::views::State;
use std::ops::Range;

/// In memory of the caller's.
pub struct Partial<'w> {
    pub m: &'w mut [f32; HEADS],
    pub l: &'w mut [f32; HEADS],
    /// Head h from h·Dv on.
    pub acc: &'w mut [f32],
}

/// Queries of a span, times the scale, and which tokens each may see.
pub struct Queries<'w> {
    /// Head h from h·D on.
    pub values: &'w mut [f32],
    pub seen: [Seen<'w>; HEADS],
    /// The soft cap of scores, where there is one.
    pub cap: Option<f32>,
    /// Dv
    pub value_dim: usize,
    /// As they are multiplied with codes, where tokens may be coded.
    pub coded: Option<CodedQueries<'w>>,
}

/// Memory for what one tile needs.
pub struct Room<'w> {
    scores: Scores,
    /// Sums of codes, where tokens may be coded.
    sums: &'w mut [i32],
}

impl<'w> Room<'w> {
    pub fn new(sums: &'w mut [f32]) -> Room<'w> {
        // SAFETY: any bits are numbers of either type, which have one size and alignment.
        let sums = unsafe { std::slice::from_raw_parts_mut(sums.as_mut_ptr().cast(), sums.len()) };
        Room { scores: Scores([[0.0; TILE]; HEADS]), sums }
    }
}

impl<'w> Partial<'w> {
    /// Floats of memory that one takes.
    pub fn floats(heads: usize, value_dim: usize) -> usize {
        2 * HEADS + heads * value_dim
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

    /// Attends over a tile, whose rows become all that this holds. Meanwhile the rows `ahead` are fetched; `values_too`: and
    /// the values of this tile.
    ///
    /// # Safety
    /// The rows of the tile are valid.
    pub unsafe fn attend<T: Row>(
        &mut self,
        queries: &Queries,
        span: &Span,
        tile: &Tile<T>,
        (values_too, ahead): (bool, Ahead<T>),
        room: &mut Room,
    ) {
        let seen = &queries.seen[..span.heads];
        let mut means = [std::ptr::null(); MEANS];
        if seen.iter().all(|seen| tile.is_seen(seen)) {
            let values = if values_too { tile.values_ahead(queries.value_dim) } else { Ahead::nothing() };
            // SAFETY: the tile's rows have D and Dv channels.
            unsafe {
                match tile.is_coded {
                    true => self.attend_coded(queries, 0..span.heads, &tile.coded_rows(&mut means), ahead, room),
                    false => self.attend_rows(queries, 0..span.heads, tile.rows(), [values, ahead], &mut room.scores),
                }
            };
            return;
        }
        // Some see a part of the tile, or nothing.
        let mut h = 0;
        while h < seen.len() {
            let among = tile.among(&seen[h]);
            let alike = seen[h..].iter().take_while(|other| tile.among(other) == among).count();
            // SAFETY: as above; rows of a part are rows of the tile.
            unsafe {
                let part = tile.part(&seen[h]);
                if tile.is_coded {
                    let rows = tile.coded_rows_of_part(&part, &mut means);
                    self.attend_coded(queries, h..h + alike, &rows, Ahead::<T>::nothing(), room);
                } else {
                    let ahead = [Ahead::nothing(); 2];
                    self.attend_rows(queries, h..h + alike, part.rows(), ahead, &mut room.scores);
                }
            }
            h += alike;
        }
    }

    /// Some rows attend over these keys and values. The first `ahead` are fetched with the keys, the second with the values.
    ///
    /// # Safety
    /// There are at most 64 keys and as many values, of D and Dv channels; there are such rows.
    unsafe fn attend_rows<T: Row>(
        &mut self,
        queries: &Queries,
        rows: Range<usize>,
        [keys, values]: [&[*const T]; 2],
        ahead: [Ahead<T>; 2],
        Scores(scores): &mut Scores,
    ) {
        let (dim, value_dim) = (queries.values.len() / HEADS, queries.value_dim);
        let acc = &mut self.acc[rows.start * value_dim..rows.end * value_dim];
        let scores = &mut scores[..rows.len()];
        if keys.is_empty() {
            self.m[rows.clone()].fill(f32::NEG_INFINITY);
            self.l[rows].fill(0.0);
            acc.fill(0.0);
            return;
        }
        let (m, l) = (&mut self.m[rows.clone()], &mut self.l[rows.clone()]);
        let softmax = Softmax { scores: &mut *scores, len: keys.len(), cap: queries.cap, m, l };
        // SAFETY: there are as many queries as rows of scores and acc; keys and values are as the caller says.
        unsafe {
            score_rows(&queries.values[rows.start * dim..], dim, keys, softmax.scores, ahead[0]);
            dispatch_wide(softmax);
            weigh_rows(values, value_dim, scores, acc, ahead[1]);
        }
    }

    /// As [`Partial::attend_rows`], of coded tokens.
    ///
    /// # Safety
    /// As for [`Partial::attend_rows`].
    unsafe fn attend_coded<T: Row>(
        &mut self,
        queries: &Queries,
        rows: Range<usize>,
        tokens: &CodedRows,
        ahead: Ahead<T>,
        room: &mut Room,
    ) {
        let Queries { values, cap, value_dim, coded, .. } = queries;
        let (cap, value_dim) = (*cap, *value_dim);
        let acc = &mut self.acc[rows.start * value_dim..rows.end * value_dim];
        let (m, l) = (&mut self.m[rows.clone()], &mut self.l[rows.clone()]);
        let Some(coded) = coded else { return };
        if tokens.keys.is_empty() {
            m.fill(f32::NEG_INFINITY);
            l.fill(0.0);
            acc.fill(0.0);
            return;
        }
        let (asked, target) = (Asked { values, coded, cap, value_dim }, Target { m, l, acc });
        // SAFETY: as the caller says.
        unsafe { attend_coded::attend(&asked, rows, tokens, &mut room.scores, target, room.sums, ahead) };
    }

    /// Joins `other` to this: m' = max(m, mₒ), l' = l·e^(m−m') + lₒ·e^(mₒ−m'), and acc like l. Where `other` holds
    /// nothing, no bit changes.
    pub fn fold(&mut self, other: &Partial<'w>, span: &Span, value_dim: usize) {
        if !other.is_empty(span) {
            dispatch(Fold { mine: self, other, heads: span.heads, value_dim });
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

/// Joins one partial to another.
struct Fold<'p, 'w> {
    mine: &'p mut Partial<'w>,
    other: &'p Partial<'w>,
    heads: usize,
    value_dim: usize,
}

impl Kernel for Fold<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Fold { mine, other, heads, value_dim } = self;
        let (m, others) = (L::from_array(mine.m), L::from_array(other.m));
        let top = others.max(m);
        // Where nothing was attended, m − m' is −inf and not NaN.
        let shift = top.max(L::splat(f32::MIN));
        let [keep, take] = L::exp_each([m.sub(shift), others.sub(shift)]);
        let l = L::from_array(other.l).mul_add(take, L::from_array(mine.l).mul(keep));
        *mine.m = top.to_array();
        *mine.l = l.to_array();
        let (keep, take) = (keep.to_array(), take.to_array());
        for h in 0..heads {
            let (keep, take) = (L::splat(keep[h]), L::splat(take[h]));
            let range = h * value_dim..(h + 1) * value_dim;
            let (mine, other) = (mine.acc[range.clone()].chunks_exact_mut(LANES), other.acc[range].chunks_exact(LANES));
            for (mine, other) in mine.zip(other) {
                // SAFETY: both chunks have eight values.
                unsafe {
                    let kept = L::load(mine.as_ptr()).mul(keep);
                    L::load(other.as_ptr()).mul_add(take, kept).store(mine.as_mut_ptr());
                }
            }
        }
    }
}
