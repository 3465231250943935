//! AXIS: Σ_h softmax_j(scale·q_h·mean_j + ln(2·cosh(scale·q_h·axis_j))). For keys mean ± axis, half of them each, this is
//! the mass that they have. log_mass, of the blocks that a list leaves out, is in mass.rs.

use super::mass::{self, Left};
use super::summary::{MOST, Order, unpack};
use super::{CHUNK, Cells, Chunk, Quad, Request, Softmax, Wide, finish, weighable};
use crate::abi::{VWD_SELECT_NAN, VWD_SELECT_NO_SUMMARY};
use crate::core::status::Result;
use crate::ops::index::Axes;
use crate::ops::simd::{self, Kernel, Lanes};
use crate::ops::topk::Run;
use crate::runtime::cpu::{Cpu, Rows};

/// Blocks that are unpacked together.
const STEP: usize = 4;

pub fn blocks(cpu: &Cpu, r: &Request, axes: &Axes) -> Result<()> {
    let queries = &r.queries;
    let (batch, heads) = (queries.batch(), queries.heads);
    let quads = heads.group().div_ceil(4);
    // Blocks for which the index has room.
    let stored = |tokens: usize| tokens.div_ceil(queries.block_size).min(queries.index.capacity());
    // SAFETY: i is below the batch size, and the caller keeps the tensors valid.
    let of = |i| stored(unsafe { queries.len(i) });
    let chunks = (0..batch).map(of).max().unwrap_or(0).div_ceil(CHUNK);
    let scratch = cpu.scratch();
    let wide = Wide::new(cpu, &scratch, queries)?;
    let rows = wide.nan.len();
    let order = Order::of(axes, heads.dim);
    // [rows][quads · 4][order.len()]: groups padded with heads of zeros.
    let grouped = scratch.slice(rows * quads * 4 * order.len(), 0f32)?;
    for (to, from) in grouped.chunks_exact_mut(quads * 4 * order.len()).zip(wide.values.chunks_exact(wide.row_len)) {
        for (to, from) in to.chunks_exact_mut(order.len()).zip(from.chunks_exact(heads.dim)) {
            from.iter().enumerate().for_each(|(c, &x)| to[order.place(c)] = x);
        }
    }
    // [rows][chunks][quads][CHUNK]
    let products = scratch.slice(rows * chunks * quads * CHUNK, [f32::NEG_INFINITY; 4])?;
    let seen = scratch.slice(r.lists() * chunks, 0u32)?;
    let cells = Cells { products: Rows::new(products, quads * CHUNK), seen: Rows::new(seen, 1), chunks };
    let bytes = CHUNK * heads.kv * 2 * heads.dim * size_of::<f32>();
    cpu.parallel(batch * chunks, bytes, |task| {
        let (i, chunk) = (task / chunks, task % chunks);
        let some = chunk * CHUNK..of(i).min((chunk + 1) * CHUNK);
        let at = Chunk { r, i, some, cells: &cells };
        simd::dispatch(Products { at, axes, order, wide: &wide, grouped });
    });
    let products = Rows::new(products, chunks * quads * CHUNK);
    let masses = Rows::new(scratch.slice(rows * chunks * CHUNK, 0f32)?, chunks * CHUNK);
    let counts = Rows::new(scratch.slice(rows * chunks * CHUNK, false)?, chunks * CHUNK);
    let best = Rows::new(scratch.slice(r.lists() * chunks * CHUNK, f32::NEG_INFINITY)?, chunks * CHUNK);
    cpu.parallel(r.lists(), chunks * quads * CHUNK * size_of::<Quad>(), |n| {
        // SAFETY: each task has rows and results of its own; positions have one list each, or share it.
        unsafe {
            let list = r.list(n);
            let (all, here) = (list.tokens.div_ceil(queries.block_size), stored(list.tokens));
            let best = best.row(n);
            for (position, row) in wide.sound(&list) {
                let sees = stored(queries.positions.seen(list.at[0], position, queries.len(list.at[0])));
                let products = &mut products.row(row)[..sees.div_ceil(CHUNK) * quads * CHUNK];
                let (mass, counts) = (masses.row(row), counts.row(row));
                Weighing { products, group: heads.group(), mass, counts }.raise(&mut best[..sees]);
            }
            let mut status = seen[n * chunks..][..chunks].iter().fold(wide.seen(&list), |bits, seen| bits | seen);
            if all > here {
                status |= VWD_SELECT_NO_SUMMARY;
            }
            let rest = Run { score: f32::NEG_INFINITY, count: all - here };
            finish(r, &list, &best[..here], &[rest], status);
        }
    });
    match &r.log_mass {
        Some(out) => mass::write(cpu, &scratch, Left { r, axes, order, wide: &wide, grouped }, out),
        None => Ok(()),
    }
}

/// The products of one row of queries with the blocks that it sees, and room for their masses.
struct Weighing<'a> {
    products: &'a mut [Quad],
    group: usize,
    mass: &'a mut [f32],
    counts: &'a mut [bool],
}

impl Weighing<'_> {
    /// Raises scores to the masses. A block that lacks a product has none.
    fn raise(self, best: &mut [f32]) {
        let Weighing { products, group, mass, counts } = self;
        let cells = products.chunks_exact(group.div_ceil(4) * CHUNK);
        for (cell, counts) in cells.zip(counts.chunks_mut(CHUNK)) {
            for (n, counts) in counts.iter_mut().enumerate() {
                let mut quads = cell[n..].iter().step_by(CHUNK);
                *counts = quads.all(|product| product.iter().all(|&x| x > f32::NEG_INFINITY));
            }
        }
        simd::dispatch(Softmax { products, group, mass });
        for ((best, &mass), &counts) in best.iter_mut().zip(&*mass).zip(&*counts) {
            *best = if counts { best.max(mass) } else { *best };
        }
    }
}

/// Products of some blocks of one sequence with the heads of all its positions.
struct Products<'a> {
    at: Chunk<'a>,
    axes: &'a Axes<'a>,
    order: Order,
    wide: &'a Wide<'a>,
    grouped: &'a [f32],
}

/// Some blocks' means and axes.
struct Unpacked {
    parts: [[[f32; MOST]; 2]; STEP],
    /// Where in the chunk they belong, and the first position that sees them: both ascend.
    places: [usize; STEP],
    seen_from: [usize; STEP],
    count: usize,
}

impl Kernel for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Chunk { r: Request { queries, .. }, i, ref some, .. } = self.at;
        // SAFETY: the caller keeps q_lens valid.
        let positions = unsafe { queries.positions.len(i) };
        let mut blocks =
            Unpacked { parts: [[[0.0; MOST]; 2]; STEP], places: [0; STEP], seen_from: [0; STEP], count: 0 };
        for first in some.clone().step_by(STEP) {
            for g in 0..queries.heads.kv {
                blocks.count = 0;
                for j in first..some.end.min(first + STEP) {
                    let n = blocks.count;
                    // SAFETY: the caller keeps the tensors valid; the row is inside them.
                    unsafe {
                        let seeing = queries.seeing(i, j * queries.block_size);
                        let Some([page, row]) = queries.index.row(i, j) else {
                            self.at.mark(seeing, g, VWD_SELECT_NO_SUMMARY);
                            continue;
                        };
                        for part in 0..2 {
                            unpack::<L>(self.axes, self.order, [page, row, g], part, &mut blocks.parts[n][part]);
                        }
                        (blocks.places[n], blocks.seen_from[n]) = (j % CHUNK, seeing.start);
                    }
                    blocks.count += 1;
                }
                let least = if blocks.count > 0 { blocks.seen_from[0] } else { positions };
                (least..positions).for_each(|r| self.multiply::<L>(&blocks, g, r));
            }
        }
    }
}

impl Products<'_> {
    /// Products of those blocks that position `r` sees with its heads of group `g`.
    #[inline(always)]
    fn multiply<L: Lanes>(&self, blocks: &Unpacked, g: usize, r: usize) {
        let (heads, len) = (self.at.r.queries.heads, self.order.len());
        let quads = heads.group().div_ceil(4);
        let row = self.wide.number(self.at.i, r, g);
        if self.wide.nan[row] {
            return;
        }
        let count = blocks.seen_from[..blocks.count].partition_point(|&from| from <= r);
        let parts: [*const f32; 2 * STEP] = std::array::from_fn(|n| blocks.parts[n / 2][n % 2].as_ptr());
        let queries = &self.grouped[row * quads * 4 * len..][..quads * 4 * len];
        // SAFETY: the earlier reference to the cell was that of an earlier call.
        let cell = unsafe { self.at.products(row) };
        let mut is_nan = false;
        for (quad, queries) in queries.chunks_exact(4 * len).enumerate() {
            let mut products = [[0.0; 4]; 2 * STEP];
            // SAFETY: every part has `len` values.
            unsafe { simd::dot_four::<L, f32>(&parts[..2 * count], queries, &mut products[..2 * count]) };
            let of_group = (heads.group() - 4 * quad).min(4);
            for n in 0..count {
                let (mean, axis) = (products[2 * n], products[2 * n + 1]);
                let both = L::from_array(&std::array::from_fn(|h| axis[h % 4])).ln_2cosh().to_array();
                let product: Quad = std::array::from_fn(|h| mean[h] + both[h]);
                is_nan |= product[..of_group].iter().any(|x| x.is_nan());
                cell[quad * CHUNK + blocks.places[n]] = product.map(weighable);
            }
        }
        if is_nan {
            self.at.mark(r..r + 1, g, VWD_SELECT_NAN);
        }
    }
}
