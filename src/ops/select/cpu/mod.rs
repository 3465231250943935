//! Selection on the CPU, in two parallel steps: tasks of a chunk each compute products of queries and summaries, then
//! one task per list turns them into scores and picks the best. Scratch is sized by the summaries that there are, not by
//! the lengths of sequences: what has no summary is a run of −inf.

mod axis;
mod labels;
mod mass;
mod means;
mod minmax;
mod summary;

use super::{List, Queries, Request};
use crate::abi::{VWD_SELECT_CLAMPED, VWD_SELECT_NAN};
use crate::core::status::Result;
use crate::ops::index::Kind;
use crate::ops::simd::{self, Kernel, LANES, Lanes, Row};
use crate::ops::topk::{Run, select_top_of};
use crate::ops::views::{adjacent, spare};
use crate::runtime::cpu::{Cpu, Rows, Scratch};
use crate::with_float;
use std::marker::PhantomData;
use std::ops::Range;

/// Blocks, windows or tokens of one task.
const CHUNK: usize = 128;

/// Query heads are taken four at a time: products of one summary and four heads.
type Quad = [f32; 4];

pub fn blocks(cpu: &Cpu, r: &Request) -> Result<()> {
    if is_empty(r) {
        finish_empty(r);
        return Ok(());
    }
    match &r.queries.index.kind {
        Kind::MinMax { max, min, .. } => minmax::blocks(cpu, r, max, min),
        Kind::Mean { windows, means } => means::blocks(cpu, r, windows, means),
        Kind::Label(labels) => labels::blocks(cpu, r, labels),
        Kind::Axis(axes) => axis::blocks(cpu, r, axes),
    }
}

pub fn tokens(cpu: &Cpu, r: &Request) -> Result<()> {
    if is_empty(r) {
        finish_empty(r);
        return Ok(());
    }
    match &r.queries.index.kind {
        Kind::Label(labels) => labels::tokens(cpu, r, labels),
        _ => unreachable!("the kind was checked"),
    }
}

/// Nobody asks. Other extents may then be anything.
fn is_empty(r: &Request) -> bool {
    r.queries.batch() * r.queries.positions.count() == 0
}

fn finish_empty(r: &Request) {
    // SAFETY: the lists exist and are this thread's, and the caller keeps the tensors valid.
    (0..r.lists()).for_each(|n| unsafe { finish(r, &r.list(n), &[], &[], 0) });
}

/// Selects from the scores of one list's blocks, of which runs follow, and writes the results. `seen` are bits of the
/// status.
///
/// # Safety
/// The tensors are valid, and no other task writes the results of this list.
unsafe fn finish(r: &Request, list: &List, scores: &[f32], runs: &[Run], seen: u32) {
    let [i, position, g] = list.at;
    let blocks = scores.len() + runs.iter().map(|run| run.count).sum::<usize>();
    // SAFETY: the list's results are this task's; at most cap blocks are selected, and no more scores are written than there
    // is room for.
    unsafe {
        let (budget, mut clamped) = r.quota.of(i);
        let mut place = 0;
        let count = select_top_of(scores, runs, budget, |block| {
            r.selected.set_id(list.at, place, block as i32);
            place += 1;
        });
        r.selected.set_count(list.at, count);
        if let Some(out) = &r.scores {
            let room = out.dim(out.rank() - 1);
            let of_runs = runs.iter().flat_map(|run| std::iter::repeat_n(run.score, run.count));
            for (j, score) in scores.iter().copied().chain(of_runs).take(room).enumerate() {
                if r.selected.is_own() { out.set([i, position, g, j], score) } else { out.set([i, g, j], score) }
            }
            clamped |= blocks > room;
        }
        set_status(r, list, seen, clamped);
    }
}

/// Writes the status of a list, if it is wanted. `clamped` says that something was besides lengths and candidates.
///
/// # Safety
/// As for [`finish`].
unsafe fn set_status(r: &Request, list: &List, seen: u32, clamped: bool) {
    let Some(status) = &r.status else { return };
    let [i, position, g] = list.at;
    let is_outside = |x: i32, most: usize| x < 0 || x as usize > most;
    // SAFETY: the list is inside status, q_lens and candidates, whose leading dimensions are those of the lists.
    unsafe {
        let positions = &r.queries.positions;
        let clamped = clamped
            || r.queries.seq_lens.get::<i32, 1>([i]) < 0
            || positions.lens.is_some_and(|lens| is_outside(lens.get([i]), positions.count()))
            || r.candidates.is_some_and(|candidates| {
                let counts = &candidates.counts;
                let count = if candidates.is_own() { counts.get([i, position, g]) } else { counts.get([i, g]) };
                is_outside(count, candidates.cap())
            });
        let value = seen | if clamped { VWD_SELECT_CLAMPED } else { 0 };
        if r.selected.is_own() { status.set([i, position, g], value) } else { status.set([i, g], value) }
    }
}

/// The queries as f32 times their scale.
struct Wide<'s> {
    /// For each sequence, position and KV head, in this order: [G][D].
    values: &'s [f32],
    row_len: usize,
    /// Which of these rows hold a NaN: for them all scores are −inf.
    nan: &'s [bool],
    kv: usize,
    positions: usize,
}

impl<'s> Wide<'s> {
    fn new(cpu: &Cpu, scratch: &'s Scratch, queries: &Queries) -> Result<Wide<'s>> {
        let Queries { positions, heads, .. } = queries;
        let rows = queries.batch() * positions.count() * heads.kv;
        let row_len = heads.group() * heads.dim;
        let values = scratch.slice(rows * row_len, 0f32)?;
        let nan = scratch.slice(rows, false)?;
        let flags = Rows::new(nan, 1);
        with_float!(positions.q.dtype, T => {
            cpu.parallel_chunks(values, row_len, row_len * size_of::<f32>(), |n, out| {
                let (i, r, g) = (n / (heads.kv * positions.count()), n / heads.kv % positions.count(), n % heads.kv);
                for (h, out) in out.chunks_exact_mut(heads.dim).enumerate() {
                    // SAFETY: the head is inside q, which is valid.
                    unsafe { widen::<T>(queries, [i, r, g * heads.group() + h], out) };
                }
                // SAFETY: each task has a flag of its own.
                unsafe { flags.row(n)[0] = out.iter().fold(false, |nan, x| nan | x.is_nan()) };
            });
        });
        Ok(Wide { values, row_len, nan, kv: heads.kv, positions: positions.count() })
    }

    /// Number of the row of (sequence, position, KV head).
    fn number(&self, i: usize, r: usize, g: usize) -> usize {
        (i * self.positions + r) * self.kv + g
    }

    fn row(&self, number: usize) -> &'s [f32] {
        &self.values[number * self.row_len..][..self.row_len]
    }

    /// The positions of a list whose queries are numbers, with the numbers of their rows.
    fn sound(&self, list: &List) -> impl Iterator<Item = (usize, usize)> {
        let [i, _, g] = list.at;
        list.positions.clone().map(move |r| (r, self.number(i, r, g))).filter(|&(_, row)| !self.nan[row])
    }

    /// What a list's queries add to its status.
    fn seen(&self, list: &List) -> u32 {
        let sound = self.sound(list).count();
        if sound < list.positions.len() { VWD_SELECT_NAN } else { 0 }
    }
}

/// # Safety
/// The sequence, position and head are inside q, which is valid and of dtype `T`; `out` has D places.
unsafe fn widen<T: Row>(queries: &Queries, [i, r, h]: [usize; 3], out: &mut [f32]) {
    let positions = &queries.positions;
    let mut spare = spare();
    // SAFETY: q has this head, of D ≤ MAX_DIM channels.
    let row = unsafe {
        match positions.dimension() {
            Some(_) => adjacent::<T, 3>(&positions.q, [i, r, h], &mut spare),
            None => adjacent::<T, 2>(&positions.q, [i, h], &mut spare),
        }
    };
    simd::dispatch(Widen { row, scale: queries.scale, out, element: PhantomData });
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

/// Products of each row of queries, and what was seen on the way for each list, a chunk at a time.
struct Cells<'a> {
    products: Rows<'a, Quad>,
    seen: Rows<'a, u32>,
    chunks: usize,
}

/// Some blocks or windows of one sequence, inside one chunk, and the cells that the task which has them writes.
struct Chunk<'a> {
    r: &'a Request<'a>,
    i: usize,
    some: Range<usize>,
    cells: &'a Cells<'a>,
}

impl Chunk<'_> {
    /// The products of a row of queries of this sequence.
    ///
    /// # Safety
    /// No earlier reference to them is used again.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // as Rows
    unsafe fn products(&self, row: usize) -> &mut [Quad] {
        // SAFETY: the cell belongs to the task that has this chunk; the rest is the caller's promise.
        unsafe { self.cells.products.row(row * self.cells.chunks + self.some.start / CHUNK) }
    }

    /// Adds to the status of these positions' lists.
    #[cold]
    fn mark(&self, positions: Range<usize>, g: usize, seen: u32) {
        for r in positions {
            let cell = self.r.list_of(self.i, r, g) * self.cells.chunks + self.some.start / CHUNK;
            // SAFETY: the cell belongs to the task that has this chunk.
            unsafe { self.cells.seen.row(cell)[0] |= seen };
        }
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
