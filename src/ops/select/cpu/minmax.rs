//! MINMAX: Σ_h Σ_c max(q_hc, 0)·max_c + min(q_hc, 0)·min_c. The sum over heads commutes with the sum over channels, so
//! the heads are added first and each block costs one dot product of length 2D. The scan reads the summaries in the
//! order in which they lie, for it is bound by memory, and each of them once for all positions.

use super::{CHUNK, Request, Wide, finish};
use crate::abi::{VWD_SELECT_NAN, VWD_SELECT_NO_SUMMARY};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::simd::{self, Kernel, LANES, Lanes, Row};
use crate::ops::topk::Run;
use crate::ops::views::{adjacent, spare};
use crate::runtime::cpu::{Cpu, Rows};
use crate::with_float;
use std::marker::PhantomData;
use std::ops::Range;

pub fn blocks(cpu: &Cpu, r: &Request, max: &Tensor, min: &Tensor) -> Result<()> {
    let queries = &r.queries;
    let (batch, dim) = (queries.batch(), queries.heads.dim);
    // Blocks for which the index has room: `of` a sequence, or of a list.
    let stored = |tokens: usize| tokens.div_ceil(queries.block_size).min(queries.index.capacity());
    // SAFETY: i is below the batch size, and the caller keeps the tensors valid.
    let of = |i| stored(unsafe { queries.len(i) });
    let chunks = (0..batch).map(of).max().unwrap_or(0).div_ceil(CHUNK);
    let scratch = cpu.scratch();
    let wide = Wide::new(cpu, &scratch, queries)?;
    // Each row [2D] has the sums over the group of the queries' positive parts, then those of the negative ones.
    let sums = scratch.slice(wide.nan.len() * 2 * dim, 0f32)?;
    cpu.parallel_chunks(sums, 2 * dim, wide.row_len * size_of::<f32>(), |n, sums| {
        let (positive, negative) = sums.split_at_mut(dim);
        for q in wide.row(n).chunks_exact(dim) {
            for c in 0..dim {
                positive[c] += q[c].max(0.0);
                negative[c] += q[c].min(0.0);
            }
        }
    });
    let scores = scratch.slice(r.lists() * chunks * CHUNK, f32::NEG_INFINITY)?;
    let seen = scratch.slice(r.lists() * chunks, 0u32)?;
    let cells = Cells { scores: Rows::new(scores, CHUNK), seen: Rows::new(seen, 1), chunks };
    let bytes = 2 * CHUNK * queries.heads.kv * dim * max.dtype.bytes();
    with_float!(max.dtype, T => cpu.parallel(batch * chunks, bytes, |task| {
        let (i, chunk) = (task / chunks, task % chunks);
        let blocks = chunk * CHUNK..of(i).min((chunk + 1) * CHUNK);
        let task = Bounds::<T> { r, max, min, wide: &wide, sums, i, blocks, cells: &cells, element: PhantomData };
        simd::dispatch(task);
    }));
    cpu.parallel(r.lists(), chunks * CHUNK * size_of::<f32>(), |n| {
        // SAFETY: each task has results of its own, and the caller keeps the tensors valid.
        unsafe {
            let list = r.list(n);
            let (all, here) = (list.tokens.div_ceil(queries.block_size), stored(list.tokens));
            let mut status = seen[n * chunks..][..chunks].iter().fold(wide.seen(&list), |bits, seen| bits | seen);
            if all > here {
                status |= VWD_SELECT_NO_SUMMARY;
            }
            let rest = Run { score: f32::NEG_INFINITY, count: all - here };
            finish(r, &list, &scores[n * chunks * CHUNK..][..here], &[rest], status);
        }
    });
    Ok(())
}

/// Scores of the blocks of each list, and what was seen on the way, a chunk at a time.
struct Cells<'a> {
    scores: Rows<'a, f32>,
    seen: Rows<'a, u32>,
    chunks: usize,
}

/// Scores some blocks of one sequence for all its lists.
struct Bounds<'a, T> {
    r: &'a Request<'a>,
    max: &'a Tensor<'a>,
    min: &'a Tensor<'a>,
    wide: &'a Wide<'a>,
    sums: &'a [f32],
    i: usize,
    blocks: Range<usize>,
    cells: &'a Cells<'a>,
    element: PhantomData<T>,
}

impl<T: Row> Kernel for Bounds<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let queries = &self.r.queries;
        let mut rows = [None; CHUNK];
        let mut seeing = [const { 0..0 }; CHUNK];
        for (n, j) in self.blocks.clone().enumerate() {
            // SAFETY: the caller keeps the table and the lengths valid.
            unsafe {
                rows[n] = queries.index.row(self.i, j);
                seeing[n] = queries.seeing(self.i, j * queries.block_size);
            }
            if rows[n].is_none() {
                self.miss(seeing[n].clone());
            }
        }
        let (count, kv) = (self.blocks.len(), queries.heads.kv);
        let by_block = self.max.stride(1).abs() >= self.max.stride(2).abs();
        let (outer, inner) = if by_block { (count, kv) } else { (kv, count) };
        // Lanes are added up for four products at once.
        let mut sums = [L::splat(0.0); 4];
        let mut places = [(0, 0); 4];
        let mut waiting = 0;
        for a in 0..outer {
            for b in 0..inner {
                let (n, g) = if by_block { (a, b) } else { (b, a) };
                let Some([page, row]) = rows[n] else { continue };
                for r in seeing[n].clone() {
                    let query = self.wide.number(self.i, r, g);
                    if self.wide.nan[query] {
                        continue;
                    }
                    // SAFETY: the row is inside both tensors.
                    sums[waiting] = unsafe { self.bound([page, row, g], query) };
                    places[waiting] = (self.r.list_of(self.i, r, g), n);
                    waiting += 1;
                    if waiting == 4 {
                        self.store(L::sums(sums), &places[..waiting]);
                        waiting = 0;
                    }
                }
            }
        }
        self.store(L::sums(sums), &places[..waiting]);
    }
}

impl<T: Row> Bounds<'_, T> {
    /// The lanes of the product of one block and head with a row of queries, to be added up.
    ///
    /// # Safety
    /// `at` is a row of both tensors, which are valid and of dtype `T`.
    #[inline(always)]
    unsafe fn bound<L: Lanes>(&self, at: [usize; 3], query: usize) -> L {
        let dim = self.max.dim(3);
        let q = self.sums[query * 2 * dim..][..2 * dim].as_ptr();
        let (mut upper, mut lower) = (L::splat(0.0), L::splat(0.0));
        // SAFETY: `at` names a row of D channels in both; q has 2D values.
        unsafe {
            let (mut max, mut min) = (spare::<T>(), spare::<T>());
            let (max, min) = (adjacent(self.max, at, &mut max), adjacent(self.min, at, &mut min));
            for c in (0..dim).step_by(LANES) {
                upper = T::load::<L>(max.add(c)).mul_add(L::load(q.add(c)), upper);
                lower = T::load::<L>(min.add(c)).mul_add(L::load(q.add(dim + c)), lower);
            }
        }
        upper.add(lower)
    }

    /// A list's score is the best of its positions'.
    #[inline(always)]
    fn store(&self, scores: [f32; 4], places: &[(usize, usize)]) {
        for (&(list, n), score) in places.iter().zip(scores) {
            let cell = list * self.cells.chunks + self.blocks.start / CHUNK;
            // SAFETY: the cell belongs to this task.
            unsafe {
                if score.is_nan() {
                    self.cells.seen.row(cell)[0] |= VWD_SELECT_NAN;
                    continue;
                }
                let best = &mut self.cells.scores.row(cell)[n];
                *best = if score > *best { score } else { *best };
            }
        }
    }

    /// A block that these positions see has no summary.
    #[cold]
    fn miss(&self, positions: Range<usize>) {
        for (r, g) in positions.flat_map(|r| (0..self.r.queries.heads.kv).map(move |g| (r, g))) {
            let cell = self.r.list_of(self.i, r, g) * self.cells.chunks + self.blocks.start / CHUNK;
            // SAFETY: the cell belongs to this task.
            unsafe { self.cells.seen.row(cell)[0] |= VWD_SELECT_NO_SUMMARY };
        }
    }
}
