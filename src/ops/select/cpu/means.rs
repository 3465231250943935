//! MEAN_SOFTMAX and MEAN_DOT: products of queries and mean keys, and of each block the best window that overlaps it.

use super::{BlocksRequest, CHUNK, Quad, Softmax, finish, weighable, widen_queries};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::index::Windows;
use crate::ops::simd::{self, Kernel, Lanes, Row};
use crate::ops::views::{adjacent, spare};
use crate::runtime::cpu::{Cpu, Rows};
use crate::with_float;
use std::marker::PhantomData;
use std::ops::Range;

/// Windows whose rows are looked up together.
const STEP: usize = 8;

pub fn blocks(cpu: &Cpu, r: &BlocksRequest, windows: &Windows, means: &Tensor, softmax: bool) -> Result<()> {
    let queries = &r.queries;
    let (batch, heads) = (queries.batch(), queries.heads);
    let quads = heads.group().div_ceil(4);
    // SAFETY: i is below the batch size, and the caller keeps the tensors valid.
    let (full, blocks) = (|i| windows.full(unsafe { queries.len(i) }), |i| unsafe { r.blocks(i) });
    let chunks = (0..batch).map(full).max().unwrap_or(0).div_ceil(CHUNK);
    let most_blocks = (0..batch).map(blocks).max().unwrap_or(0);
    let scratch = cpu.scratch();
    let wide = scratch.slice(batch * heads.q * heads.dim, 0f32)?;
    widen_queries(cpu, queries, wide);
    // [B·Hk][quads · 4][D]: groups padded with heads of zeros.
    let grouped = scratch.slice(batch * heads.kv * quads * 4 * heads.dim, 0f32)?;
    let group_len = heads.group() * heads.dim;
    for (to, from) in grouped.chunks_exact_mut(quads * 4 * heads.dim).zip(wide.chunks_exact(group_len)) {
        to[..group_len].copy_from_slice(from);
    }
    // [B·Hk][chunks][quads][CHUNK]
    let products = scratch.slice(batch * heads.kv * chunks * quads * CHUNK, [f32::NEG_INFINITY; 4])?;
    let cells = Rows::new(products, quads * CHUNK);
    let bytes = CHUNK * heads.kv * heads.dim * means.dtype.bytes();
    with_float!(means.dtype, T => cpu.parallel(batch * chunks, bytes, |task| {
        let (i, chunk) = (task / chunks, task % chunks);
        let windows = chunk * CHUNK..full(i).min((chunk + 1) * CHUNK);
        let first_cell = i * heads.kv * chunks + chunk;
        simd::dispatch(Products::<T> {
            r, means, grouped, i, windows, cells: &cells, first_cell, chunks, element: PhantomData,
        });
    }));
    let products = Rows::new(products, chunks * quads * CHUNK);
    let masses = Rows::new(scratch.slice(batch * heads.kv * chunks * CHUNK, 0f32)?, chunks * CHUNK);
    let scores = Rows::new(scratch.slice(batch * heads.kv * most_blocks, 0f32)?, most_blocks);
    cpu.parallel(batch * heads.kv, chunks * quads * CHUNK * size_of::<Quad>(), |task| {
        let (i, g) = (task / heads.kv, task % heads.kv);
        // SAFETY: each task has rows and results of its own.
        unsafe {
            let (products, of_window) = (products.row(task), masses.row(task));
            if softmax {
                simd::dispatch(Softmax { products, group: heads.group(), mass: of_window });
            } else {
                for (score, product) in of_window.iter_mut().zip(products) {
                    *score = product[0];
                }
            }
            let scores = &mut scores.row(task)[..blocks(i)];
            for (j, score) in scores.iter_mut().enumerate() {
                let begin = j * queries.block_size;
                let overlapping = windows.overlapping(begin, begin + queries.block_size);
                let overlapping = overlapping.start..overlapping.end.min(full(i));
                *score = of_window[overlapping].iter().fold(f32::NEG_INFINITY, |best, &x| best.max(x));
            }
            finish(r, i, g, scores);
        }
    });
    Ok(())
}

/// Products of some windows of one sequence with all heads; those of KV head g go to cell first_cell + g·chunks.
struct Products<'a, T> {
    r: &'a BlocksRequest<'a>,
    means: &'a Tensor<'a>,
    grouped: &'a [f32],
    i: usize,
    windows: Range<usize>,
    cells: &'a Rows<'a, Quad>,
    first_cell: usize,
    chunks: usize,
    element: PhantomData<T>,
}

impl<T: Row> Kernel for Products<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let heads = self.r.queries.heads;
        let dim = heads.dim;
        let quads = heads.group().div_ceil(4);
        let mut spares = [const { spare::<T>() }; STEP];
        for first in self.windows.clone().step_by(STEP) {
            for g in 0..heads.kv {
                let mut rows = [std::ptr::null(); STEP];
                let mut places = [0; STEP];
                let mut found = 0;
                for j in first..self.windows.end.min(first + STEP) {
                    // SAFETY: the caller keeps the tensors valid; the row is inside means.
                    unsafe {
                        let Some([page, row]) = self.r.queries.index.row(self.i, j) else { continue };
                        rows[found] = adjacent(self.means, [page, row, g], &mut spares[found]);
                    }
                    places[found] = j % CHUNK;
                    found += 1;
                }
                let queries = &self.grouped[(self.i * heads.kv + g) * quads * 4 * dim..][..quads * 4 * dim];
                // SAFETY: the cell belongs to this task.
                let cell = unsafe { self.cells.row(self.first_cell + g * self.chunks) };
                for (quad, queries) in queries.chunks_exact(4 * dim).enumerate() {
                    let mut products = [[0.0; 4]; STEP];
                    // SAFETY: every row has D elements.
                    unsafe {
                        if heads.group() == 1 {
                            for (product, &row) in products.iter_mut().zip(&rows[..found]) {
                                product[0] = simd::dot::<L, T>(row, &queries[..dim]);
                            }
                        } else {
                            simd::dot_four::<L, T>(&rows[..found], queries, &mut products[..found]);
                        }
                    }
                    for (&place, product) in places[..found].iter().zip(products) {
                        cell[quad * CHUNK + place] = product.map(weighable);
                    }
                }
            }
        }
    }
}
