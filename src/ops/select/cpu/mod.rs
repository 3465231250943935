//! Selection on the CPU, in two parallel steps: tasks of a chunk each compute products of queries and summaries, then
//! one task per sequence and KV head turns them into scores and picks the best.

mod labels;
mod means;
mod minmax;

use super::{BlocksRequest, Method, Queries};
use crate::core::status::Result;
use crate::ops::simd::{self, Kernel, LANES, Lanes, Row};
use crate::ops::topk::select_top;
use crate::ops::views::{adjacent, spare};
use crate::runtime::cpu::Cpu;
use crate::with_float;
use std::marker::PhantomData;

pub use labels::tokens;

/// Blocks, windows or tokens of one task.
const CHUNK: usize = 128;

/// Query heads are taken four at a time: products of one summary and four heads.
type Quad = [f32; 4];

pub fn blocks(cpu: &Cpu, r: &BlocksRequest) -> Result<()> {
    match &r.method {
        Method::MinMax { max, min } => minmax::blocks(cpu, r, max, min),
        Method::Mean { windows, means, softmax } => means::blocks(cpu, r, windows, means, *softmax),
        Method::LabelMass { labels, candidates } => labels::blocks(cpu, r, labels, candidates),
    }
}

/// Selects from the scores of one sequence and KV head, one for each block, and writes the results.
///
/// # Safety
/// The tensors are valid, and no other task writes the results of (i, g).
unsafe fn finish(r: &BlocksRequest, i: usize, g: usize, scores: &[f32]) {
    // SAFETY: forwarded to the caller; at most cap blocks are selected, and scores has max_blocks places.
    unsafe {
        let mut place = 0;
        let count = select_top(scores, r.quota.of(i), |block| {
            r.selected.ids.set([i, g, place], block as i32);
            place += 1;
        });
        r.selected.counts.set([i, g], count as i32);
        if let Some(out) = &r.scores {
            for (j, &score) in scores.iter().enumerate() {
                out.set([i, g, j], score);
            }
        }
    }
}

/// Query heads as f32 times `scale`: out[(i·Hq + h)·D + d].
fn widen_queries(cpu: &Cpu, queries: &Queries, out: &mut [f32]) {
    let Queries { q, heads, scale, .. } = queries;
    with_float!(q.dtype, T => cpu.parallel_chunks(out, heads.dim, heads.dim * size_of::<f32>(), |task, out| {
        let mut spare = spare();
        // SAFETY: the sequence and the head are inside q, which is valid.
        let row = unsafe { adjacent::<T, 2>(q, [task / heads.q, task % heads.q], &mut spare) };
        simd::dispatch(Widen { row, scale: *scale, out, element: PhantomData });
    }));
}

struct Widen<'a, T> {
    row: *const T,
    scale: f32,
    out: &'a mut [f32],
    element: PhantomData<T>,
}

impl<T: Row> Kernel for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        // SAFETY: row and out have D elements.
        unsafe { simd::widen::<L, T>(self.row, self.scale, self.out) }
    }
}

/// Adds up softmax over the heads of a group: mass[p] = Σ_h softmax_p(products of h).
///
/// `products` lie as [chunk][quad][CHUNK]; −inf weighs nothing, and where all do, so do all masses.
struct Softmax<'a> {
    products: &'a mut [Quad],
    group: usize,
    mass: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let quads = self.group.div_ceil(4);
        self.mass.fill(0.0);
        for quad in 0..quads {
            let mut max = L::splat(f32::NEG_INFINITY);
            for cell in self.products.chunks_exact_mut(CHUNK).skip(quad).step_by(quads) {
                for pair in cell.as_flattened().chunks_exact(LANES) {
                    max = L::from_array(pair.try_into().expect("eight")).max(max);
                }
            }
            let max = both_halves::<L>(max, |a, b| {
                let max = if a > b { a } else { b };
                if max == f32::NEG_INFINITY { 0.0 } else { max }
            });
            let mut sum = L::splat(0.0);
            for cell in self.products.chunks_exact_mut(CHUNK).skip(quad).step_by(quads) {
                // A sum for each chunk first: short sums lose less.
                let mut part = L::splat(0.0);
                for pair in cell.as_flattened_mut().chunks_exact_mut(LANES) {
                    let weights = L::from_array((&*pair).try_into().expect("eight")).sub(max).exp();
                    part = part.add(weights);
                    pair.copy_from_slice(&weights.to_array());
                }
                sum = sum.add(part);
            }
            let heads = (self.group - 4 * quad).min(4);
            let sums = both_halves::<L>(sum, |a, b| a + b).to_array();
            let share: Quad = std::array::from_fn(|h| if h < heads && sums[h] > 0.0 { 1.0 / sums[h] } else { 0.0 });
            let cells = self.products.chunks_exact_mut(CHUNK).skip(quad).step_by(quads);
            for (cell, mass) in cells.zip(self.mass.chunks_mut(CHUNK)) {
                for (mass, w) in mass.iter_mut().zip(cell) {
                    *mass += (w[0] * share[0] + w[1] * share[1]) + (w[2] * share[2] + w[3] * share[3]);
                }
            }
        }
    }
}

/// Joins the first four lanes with the last four, and puts the results in both.
#[inline(always)]
fn both_halves<L: Lanes>(x: L, join: impl Fn(f32, f32) -> f32) -> L {
    let x = x.to_array();
    L::from_array(&std::array::from_fn(|lane| join(x[lane % 4], x[lane % 4 + 4])))
}

/// A product as softmax reads it: what is not finite weighs nothing.
#[inline(always)]
fn weighable(product: f32) -> f32 {
    if product.is_finite() { product } else { f32::NEG_INFINITY }
}
