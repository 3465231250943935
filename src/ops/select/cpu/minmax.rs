//! MINMAX: Σ_h Σ_c max(q_hc, 0)·max_c + min(q_hc, 0)·min_c. The sum over heads commutes with the sum over channels, so
//! the heads are added first and each block costs one dot product of length 2D. The scan reads the summaries in the
//! order in which they lie, for it is bound by memory.

use super::{BlocksRequest, CHUNK, finish, widen_queries};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::simd::{self, Kernel, LANES, Lanes, Row};
use crate::ops::views::{adjacent, spare};
use crate::runtime::cpu::{Cpu, Rows};
use crate::with_float;
use std::marker::PhantomData;
use std::ops::Range;

pub fn blocks(cpu: &Cpu, r: &BlocksRequest, max: &Tensor, min: &Tensor) -> Result<()> {
    let queries = &r.queries;
    let (batch, heads) = (queries.batch(), queries.heads);
    // SAFETY: i is below the batch size, and the caller keeps the tensors valid.
    let blocks = |i| unsafe { r.blocks(i) };
    let chunks = (0..batch).map(blocks).max().unwrap_or(0).div_ceil(CHUNK);
    let scratch = cpu.scratch();
    let wide = scratch.slice(batch * heads.q * heads.dim, 0f32)?;
    widen_queries(cpu, queries, wide);
    // [B·Hk][2D]: the positive parts of a group, added up, then the negative ones.
    let sums = scratch.slice(batch * heads.kv * 2 * heads.dim, 0f32)?;
    for (sums, group) in sums.chunks_exact_mut(2 * heads.dim).zip(wide.chunks_exact(heads.group() * heads.dim)) {
        let (positive, negative) = sums.split_at_mut(heads.dim);
        for q in group.chunks_exact(heads.dim) {
            for c in 0..heads.dim {
                positive[c] += q[c].max(0.0);
                negative[c] += q[c].min(0.0);
            }
        }
    }
    let scores = scratch.slice(batch * heads.kv * chunks * CHUNK, f32::NEG_INFINITY)?;
    let cells = Rows::new(scores, CHUNK);
    let bytes = 2 * CHUNK * heads.kv * heads.dim * max.dtype.bytes();
    with_float!(max.dtype, T => cpu.parallel(batch * chunks, bytes, |task| {
        let (i, chunk) = (task / chunks, task % chunks);
        let blocks = chunk * CHUNK..blocks(i).min((chunk + 1) * CHUNK);
        let first_cell = i * heads.kv * chunks + chunk;
        let task = Bounds::<T> { r, max, min, sums, i, blocks, cells: &cells, first_cell, chunks, element: PhantomData };
        simd::dispatch(task);
    }));
    cpu.parallel(batch * heads.kv, chunks * CHUNK * size_of::<f32>(), |task| {
        let (i, g) = (task / heads.kv, task % heads.kv);
        // SAFETY: each task has results of its own.
        unsafe { finish(r, i, g, &scores[task * chunks * CHUNK..][..blocks(i)]) }
    });
    Ok(())
}

/// Scores some blocks of one sequence for all KV heads; those of head g go to cell first_cell + g·chunks.
struct Bounds<'a, T> {
    r: &'a BlocksRequest<'a>,
    max: &'a Tensor<'a>,
    min: &'a Tensor<'a>,
    sums: &'a [f32],
    i: usize,
    blocks: Range<usize>,
    cells: &'a Rows<'a, f32>,
    first_cell: usize,
    chunks: usize,
    element: PhantomData<T>,
}

impl<T: Row> Kernel for Bounds<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let heads = self.r.queries.heads;
        let mut rows = [None; CHUNK];
        for (row, j) in rows.iter_mut().zip(self.blocks.clone()) {
            // SAFETY: the caller keeps the table valid.
            *row = unsafe { self.r.queries.index.row(self.i, j) };
        }
        let rows = &rows[..self.blocks.len()];
        let by_block = self.max.stride(1).abs() >= self.max.stride(2).abs();
        let (outer, inner) = if by_block { (rows.len(), heads.kv) } else { (heads.kv, rows.len()) };
        // Lanes are added up for four products at once.
        let mut sums = [L::splat(0.0); 4];
        let mut places = [(0, 0); 4];
        let mut waiting = 0;
        for a in 0..outer {
            for b in 0..inner {
                let (j, g) = if by_block { (a, b) } else { (b, a) };
                let Some([page, row]) = rows[j] else { continue };
                // SAFETY: the row is inside both tensors.
                sums[waiting] = unsafe { self.bound([page, row, g]) };
                places[waiting] = (g, j);
                waiting += 1;
                if waiting == 4 {
                    self.store(L::sums(sums), &places[..waiting]);
                    waiting = 0;
                }
            }
        }
        self.store(L::sums(sums), &places[..waiting]);
    }
}

impl<T: Row> Bounds<'_, T> {
    /// The lanes of the product of one block and head, to be added up.
    ///
    /// # Safety
    /// `at` is a row of both tensors, which are valid and of dtype `T`.
    #[inline(always)]
    unsafe fn bound<L: Lanes>(&self, at: [usize; 3]) -> L {
        let dim = self.max.dim(3);
        let q = self.sums[(self.i * self.max.dim(2) + at[2]) * 2 * dim..][..2 * dim].as_ptr();
        let (mut upper, mut lower) = (L::splat(0.0), L::splat(0.0));
        // SAFETY: forwarded to the caller; q has 2D values.
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

    #[inline(always)]
    fn store(&self, scores: [f32; 4], places: &[(usize, usize)]) {
        for (&(g, j), score) in places.iter().zip(scores) {
            // SAFETY: the cell belongs to this task.
            unsafe {
                self.cells.row(self.first_cell + g * self.chunks)[j] =
                    if score.is_nan() { f32::NEG_INFINITY } else { score };
            }
        }
    }
}
