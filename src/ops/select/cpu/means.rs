//! MEAN_SOFTMAX and MEAN_DOT: products of queries and mean keys, and of each block the best window that overlaps it.

use super::{CHUNK, Cells, Chunk, Quad, Request, Softmax, Wide, finish, weighable};
use crate::abi::{VWD_SELECT_NAN, VWD_SELECT_NO_SUMMARY};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::index::Windows;
use crate::ops::simd::{self, Kernel, Lanes, Row};
use crate::ops::topk::Run;
use crate::ops::views::{adjacent, spare};
use crate::runtime::cpu::{Cpu, Rows};
use crate::with_float;
use std::marker::PhantomData;

/// Windows whose rows are looked up together.
const STEP: usize = 8;

pub fn blocks(cpu: &Cpu, r: &Request, windows: &Windows, means: &Tensor) -> Result<()> {
    let queries = &r.queries;
    let (batch, heads) = (queries.batch(), queries.heads);
    let quads = heads.group().div_ceil(4);
    // Full windows for which the index has room.
    let stored = |tokens: usize| windows.full(tokens).min(queries.index.capacity());
    // SAFETY: i is below the batch size, and the caller keeps the tensors valid.
    let of = |i| stored(unsafe { queries.len(i) });
    let most = (0..batch).map(of).max().unwrap_or(0);
    let chunks = most.div_ceil(CHUNK);
    let scratch = cpu.scratch();
    let wide = Wide::new(cpu, &scratch, queries)?;
    let rows = wide.nan.len();
    // [rows][quads · 4][D]: groups padded with heads of zeros.
    let grouped = scratch.slice(rows * quads * 4 * heads.dim, 0f32)?;
    for (to, from) in grouped.chunks_exact_mut(quads * 4 * heads.dim).zip(wide.values.chunks_exact(wide.row_len)) {
        to[..wide.row_len].copy_from_slice(from);
    }
    // [rows][chunks][quads][CHUNK]
    let products = scratch.slice(rows * chunks * quads * CHUNK, [f32::NEG_INFINITY; 4])?;
    let seen = scratch.slice(r.lists() * chunks, 0u32)?;
    let cells = Cells { products: Rows::new(products, quads * CHUNK), seen: Rows::new(seen, 1), chunks };
    let bytes = CHUNK * heads.kv * heads.dim * means.dtype.bytes();
    with_float!(means.dtype, T => cpu.parallel(batch * chunks, bytes, |task| {
        let (i, chunk) = (task / chunks, task % chunks);
        let some = chunk * CHUNK..of(i).min((chunk + 1) * CHUNK);
        let at = Chunk { r, i, some, cells: &cells };
        simd::dispatch(Products::<T> { at, windows, means, wide: &wide, grouped, element: PhantomData });
    }));
    let products = Rows::new(products, chunks * quads * CHUNK);
    let masses = Rows::new(scratch.slice(rows * chunks * CHUNK, 0f32)?, chunks * CHUNK);
    let best = Rows::new(scratch.slice(r.lists() * most, f32::NEG_INFINITY)?, most);
    let runs = Rows::new(scratch.slice(r.lists() * most_runs(most), NOTHING)?, most_runs(most));
    cpu.parallel(r.lists(), chunks * quads * CHUNK * size_of::<Quad>(), |n| {
        // SAFETY: each task has rows and results of its own; positions have one list each, or share it.
        unsafe {
            let list = r.list(n);
            let best = &mut best.row(n)[..stored(list.tokens)];
            for (position, row) in wide.sound(&list) {
                let sees = stored(queries.positions.seen(list.at[0], position, queries.len(list.at[0])));
                let products = &mut products.row(row)[..sees.div_ceil(CHUNK) * quads * CHUNK];
                let mass = masses.row(row);
                if r.softmax {
                    simd::dispatch(Softmax { products, group: heads.group(), mass });
                } else {
                    mass.iter_mut().zip(products).for_each(|(mass, product)| *mass = product[0]);
                }
                best[..sees].iter_mut().zip(mass).for_each(|(best, mass)| *best = best.max(*mass));
            }
            let mut status = seen[n * chunks..][..chunks].iter().fold(wide.seen(&list), |bits, seen| bits | seen);
            if windows.full(list.tokens) > best.len() {
                status |= VWD_SELECT_NO_SUMMARY;
            }
            let runs = runs.row(n);
            let count = pool(windows, best, queries.block_size, list.tokens.div_ceil(queries.block_size), runs);
            finish(r, &list, &[], &runs[..count], status);
        }
    });
    Ok(())
}

const NOTHING: Run = Run { score: f32::NEG_INFINITY, count: 0 };

/// How often the windows that overlap a block change from block to block, and once more.
fn most_runs(windows: usize) -> usize {
    2 * windows + 1
}

/// For each of `blocks` blocks, the best score of the windows that overlap it, −inf without any. Blocks with the same windows
/// are one run; returns how many runs there are.
fn pool(windows: &Windows, scores: &[f32], block_size: usize, blocks: usize, runs: &mut [Run]) -> usize {
    let (mut count, mut j) = (0, 0);
    while j < blocks {
        let over = windows.overlapping(j * block_size, (j + 1) * block_size);
        let (first, end) = (over.start.min(scores.len()), over.end.min(scores.len()));
        let score = scores[first.min(end)..end].iter().fold(f32::NEG_INFINITY, |best, &x| best.max(x));
        // The first block that reaches into another window, and the first that begins past the first of these.
        let next = match scores.len() - end {
            0 => blocks,
            _ if block_size >= windows.stride => j + 1,
            _ => (end * windows.stride) / block_size,
        };
        let past = match scores.len() - first {
            0 => blocks,
            _ if next == j + 1 => next,
            _ => (first * windows.stride + windows.size).div_ceil(block_size),
        };
        let next = next.min(past).min(blocks);
        runs[count] = Run { score, count: next - j };
        (count, j) = (count + 1, next);
    }
    count
}

/// Products of some windows of one sequence with the heads of all its positions.
struct Products<'a, T> {
    at: Chunk<'a>,
    windows: &'a Windows,
    means: &'a Tensor<'a>,
    wide: &'a Wide<'a>,
    grouped: &'a [f32],
    element: PhantomData<T>,
}

/// The rows of some windows in `means`.
struct Found<T> {
    rows: [*const T; STEP],
    /// Where in the chunk they belong, and the first position that sees them: both ascend.
    places: [usize; STEP],
    seen_from: [usize; STEP],
    count: usize,
}

impl<T: Row> Kernel for Products<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Chunk { r: Request { queries, .. }, i, ref some, .. } = self.at;
        // SAFETY: the caller keeps q_lens valid.
        let positions = unsafe { queries.positions.len(i) };
        let mut spares = [const { spare::<T>() }; STEP];
        for first in some.clone().step_by(STEP) {
            let windows = first..some.end.min(first + STEP);
            for g in 0..queries.heads.kv {
                let mut found =
                    Found { rows: [std::ptr::null(); STEP], places: [0; STEP], seen_from: [0; STEP], count: 0 };
                for j in windows.clone() {
                    let n = found.count;
                    // SAFETY: the caller keeps the tensors valid; the row is inside means.
                    unsafe {
                        let seeing = queries.seeing(i, j * self.windows.stride + self.windows.size - 1);
                        let Some([page, row]) = queries.index.row(i, j) else {
                            self.at.mark(seeing, g, VWD_SELECT_NO_SUMMARY);
                            continue;
                        };
                        found.rows[n] = adjacent(self.means, [page, row, g], &mut spares[n]);
                        (found.places[n], found.seen_from[n]) = (j % CHUNK, seeing.start);
                    }
                    found.count += 1;
                }
                // The first position that sees any of the windows found.
                let least = if found.count > 0 { found.seen_from[0] } else { positions };
                (least..positions).for_each(|r| self.multiply::<L>(&found, g, r));
            }
        }
    }
}

impl<T: Row> Products<'_, T> {
    /// Products of those windows that position `r` sees with its heads of group `g`.
    #[inline(always)]
    fn multiply<L: Lanes>(&self, found: &Found<T>, g: usize, r: usize) {
        let heads = self.at.r.queries.heads;
        let (dim, quads) = (heads.dim, heads.group().div_ceil(4));
        let row = self.wide.number(self.at.i, r, g);
        if self.wide.nan[row] {
            return;
        }
        let count = found.seen_from[..found.count].partition_point(|&from| from <= r);
        let (rows, places) = (&found.rows[..count], &found.places[..count]);
        let queries = &self.grouped[row * quads * 4 * dim..][..quads * 4 * dim];
        // SAFETY: the earlier reference to the cell was that of an earlier call.
        let cell = unsafe { self.at.products(row) };
        let mut is_nan = false;
        for (quad, queries) in queries.chunks_exact(4 * dim).enumerate() {
            let mut products = [[0.0; 4]; STEP];
            // SAFETY: every row has D elements.
            unsafe {
                if heads.group() == 1 {
                    for (product, &row) in products.iter_mut().zip(rows) {
                        product[0] = simd::dot::<L, T>(row, &queries[..dim]);
                    }
                } else {
                    simd::dot_four::<L, T>(rows, queries, &mut products[..count]);
                }
            }
            let heads = (heads.group() - 4 * quad).min(4);
            for (&place, product) in places.iter().zip(products) {
                is_nan |= product[..heads].iter().fold(false, |nan, x| nan | x.is_nan());
                cell[quad * CHUNK + place] = product.map(weighable);
            }
        }
        if is_nan {
            self.at.mark(r..r + 1, g, VWD_SELECT_NAN);
        }
    }
}
