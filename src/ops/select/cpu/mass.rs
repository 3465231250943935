//! log_mass: ln Σ_j S·e^(scale·q·mean_j)·cosh(0.7·scale·q·axis_j) over the blocks that a list leaves out.
//!
//! A task has a row of queries, and adds up its blocks in chunks of a fixed number: no bit depends on threads.

use super::summary::{MOST, Order, unpack};
use super::{CHUNK, Quad, Queries, Request, Wide, both_halves, weighable};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::index::Axes;
use crate::ops::simd::{self, Kernel, LANES, Lanes};
use crate::runtime::cpu::{Cpu, Scratch};

/// The axis is shortened to this: at the length that selects best, blocks that are left out weigh too much.
const AXIS_LENGTH: f32 = 0.7;
/// Blocks that are unpacked together.
const STEP: usize = 4;

/// What a call has selected, and its queries.
#[derive(Clone, Copy)]
pub struct Left<'a> {
    pub r: &'a Request<'a>,
    pub axes: &'a Axes<'a>,
    pub order: Order,
    pub wide: &'a Wide<'a>,
    /// [rows][quads · 4][order.len()]
    pub grouped: &'a [f32],
}

/// Writes the masses [B, (Q,) Hq] of all rows.
pub fn write(cpu: &Cpu, scratch: &Scratch, left: Left, out: &Tensor) -> Result<()> {
    let queries = &left.r.queries;
    let (rows, heads) = (queries.positions.count(), queries.heads);
    let quads = heads.group().div_ceil(4);
    let bytes = queries.index.capacity().saturating_mul(heads.dim);
    let floats = 4 * quads * (CHUNK + 2);
    cpu.in_shares(scratch, queries.batch() * rows * heads.kv, floats, bytes, |task, memory| {
        let at = [task / heads.kv / rows, task / heads.kv % rows, task % heads.kv];
        let (memory, _) = memory.as_chunks_mut();
        let (products, totals) = memory.split_at_mut(quads * CHUNK);
        simd::dispatch(Masses { left, at, products, totals });
        for (n, [quad, most]) in totals.as_chunks().0.iter().enumerate() {
            for (h, (sum, most)) in (4 * n..heads.group().min(4 * n + 4)).zip(quad.iter().zip(most)) {
                // SAFETY: the op's caller keeps the tensors valid; the heads are this task's.
                unsafe { left.set(out, at, h, most + sum.ln()) };
            }
        }
    })
}

impl Left<'_> {
    /// Writes the mass of head `h` of a group, whose largest product and sum are those of `log`, less what all blocks have in common.
    ///
    /// # Safety
    /// The tensors are valid and have such a row, which is this task's.
    unsafe fn set(&self, out: &Tensor, [i, r, g]: [usize; 3], h: usize, log: f32) {
        let Queries { positions, heads, block_size, .. } = &self.r.queries;
        let query = &self.wide.row(self.wide.number(i, r, g))[h * heads.dim..][..heads.dim];
        // SAFETY: says the caller.
        unsafe {
            let centre = self.axes.centre.map_or(0.0, |centre| {
                query.iter().enumerate().map(|(c, q)| q * centre.get::<f32, 2>([g, c])).sum::<f32>()
            });
            let value = log + centre + (*block_size as f32 / 2.0).ln();
            let head = g * heads.group() + h;
            // Without a block log is −inf, whatever the centre gives.
            let value = if log == f32::NEG_INFINITY { log } else { value };
            if positions.dimension().is_some() { out.set([i, r, head], value) } else { out.set([i, head], value) }
        }
    }
}

/// Sums Σ_j e^(scale·q·mean_j)·2·cosh(0.7·scale·q·axis_j) of one row of queries.
struct Masses<'a> {
    left: Left<'a>,
    at: [usize; 3],
    /// [quads][CHUNK]
    products: &'a mut [Quad],
    /// [quads][2]: sums relative to the largest product, and that.
    totals: &'a mut [Quad],
}

impl Kernel for Masses<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Masses { left, at: at @ [i, r, g], products, totals } = self;
        totals.as_chunks_mut().0.iter_mut().for_each(|total| *total = [[0.0; 4], [f32::NEG_INFINITY; 4]]);
        let (queries, row) = (&left.r.queries, left.wide.number(i, r, g));
        if left.wide.nan[row] {
            return;
        }
        // SAFETY: the op's caller keeps the tensors valid; there is such a list.
        unsafe {
            let seen = queries.positions.seen(i, r, queries.len(i));
            let blocks = (seen / queries.block_size).min(queries.index.capacity());
            let (mut next, listed) = (0, left.r.selected.count(at));
            for first in (0..blocks).step_by(CHUNK) {
                products.fill([f32::NEG_INFINITY; 4]);
                let mut few = Few { parts: [[[0.0; MOST]; 2]; STEP], places: [0; STEP], count: 0 };
                for j in first..blocks.min(first + CHUNK) {
                    while next < listed && (left.r.selected.id(at, next) as usize) < j {
                        next += 1;
                    }
                    let is_listed = next < listed && left.r.selected.id(at, next) as usize == j;
                    if let Some([page, in_page]) = queries.index.row(i, j).filter(|_| !is_listed) {
                        few.add::<L>(&left, [page, in_page, g], j - first);
                        if few.count == STEP {
                            few.multiply::<L>(&left, row, products);
                        }
                    }
                }
                few.multiply::<L>(&left, row, products);
                for (cell, total) in products.chunks_exact(CHUNK).zip(totals.as_chunks_mut().0) {
                    add_chunk::<L>(cell, total);
                }
            }
        }
    }
}

/// Adds the products of a chunk to sums and largest products.
#[inline(always)]
fn add_chunk<L: Lanes>(cell: &[Quad], total: &mut [Quad; 2]) {
    let [sums, most] = total;
    let pairs = || cell.as_flattened().chunks_exact(LANES).map(|pair| L::from_array(pair.try_into().expect("eight")));
    let largest = pairs().fold(L::splat(f32::NEG_INFINITY), |largest, pair| pair.max(largest));
    let largest = both_halves::<L>(largest, f32::max).to_array();
    let top: Quad = std::array::from_fn(|h| largest[h].max(most[h]));
    // Where nothing weighs, differences are −inf and not NaN.
    let shift: [f32; LANES] = std::array::from_fn(|n| top[n % 4].max(f32::MIN));
    let mut sum = L::splat(0.0);
    for pair in pairs() {
        sum = sum.add(pair.sub(L::from_array(&shift)).exp());
    }
    let sum = both_halves::<L>(sum, |a, b| a + b).to_array();
    let before = L::from_array(&std::array::from_fn(|n| most[n % 4] - shift[n])).exp().to_array();
    *sums = std::array::from_fn(|h| sums[h] * before[h] + sum[h]);
    *most = top;
}

/// Some blocks' means and axes, and where in the chunk they belong.
struct Few {
    parts: [[[f32; MOST]; 2]; STEP],
    places: [usize; STEP],
    count: usize,
}

impl Few {
    /// # Safety
    /// `at` is a row of the index, which is valid; there is room.
    #[inline(always)]
    unsafe fn add<L: Lanes>(&mut self, left: &Left, at: [usize; 3], place: usize) {
        for part in 0..2 {
            // SAFETY: says the caller.
            unsafe { unpack::<L>(left.axes, left.order, at, part, &mut self.parts[self.count][part]) };
        }
        self.places[self.count] = place;
        self.count += 1;
    }

    /// Products of these blocks with a row of queries; then there are none.
    #[inline(always)]
    fn multiply<L: Lanes>(&mut self, left: &Left, row: usize, to: &mut [Quad]) {
        let (count, len) = (std::mem::take(&mut self.count), left.order.len());
        let of_row = to.len() / CHUNK * 4 * len;
        let queries = &left.grouped[row * of_row..][..of_row];
        let parts: [*const f32; 2 * STEP] = std::array::from_fn(|n| self.parts[n / 2][n % 2].as_ptr());
        for (queries, cell) in queries.chunks_exact(4 * len).zip(to.chunks_exact_mut(CHUNK)) {
            let mut products = [[0.0; 4]; 2 * STEP];
            // SAFETY: every part has `len` values.
            unsafe { simd::dot_four::<L, f32>(&parts[..2 * count], queries, &mut products[..2 * count]) };
            for (n, &place) in self.places[..count].iter().enumerate() {
                let (mean, axis) = (products[2 * n], products[2 * n + 1]);
                let both = L::from_array(&std::array::from_fn(|h| AXIS_LENGTH * axis[h % 4])).ln_2cosh().to_array();
                cell[place] = std::array::from_fn(|h| weighable(mean[h] + both[h]));
            }
        }
    }
}
