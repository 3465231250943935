//! Joining what a list leaves out to the states of attention, and writing its results again.

use super::join::write_outputs;
use super::partial::Partial;
use super::span::{HEADS, Span};
use crate::core::dtype::Float;
use crate::core::status::Result;
use crate::ops::attention::term::Term;
use crate::ops::attention::{Outputs, Problem};
use crate::ops::simd::{Kernel, LANES, Lanes, dispatch};
use crate::ops::views::{adjacent, spare};
use crate::runtime::cpu::Cpu;
use crate::with_float;

/// Joins the term of each row that has one to its state, which attention has written.
pub fn join_term(cpu: &Cpu, problem: &Problem, term: &Term, outputs: &Outputs) -> Result<()> {
    let (positions, heads) = (&problem.positions, problem.heads);
    let (rows, dim, value_dim) = (positions.count(), heads.dim, problem.kv.value_dim());
    let Some(state) = &outputs.state else { return Ok(()) };
    let spans = heads.group().div_ceil(HEADS);
    let of_partial = Partial::floats(HEADS, value_dim);
    let bytes = dim * value_dim * size_of::<f32>();
    let tasks = positions.batch() * rows * heads.kv * spans;
    cpu.in_shares(&cpu.scratch(), tasks, 2 * of_partial + dim, bytes, |task, memory| {
        let (unit, first) = (task / spans, task % spans * HEADS);
        let (i, r, g) = (unit / heads.kv / rows, unit / heads.kv % rows, unit % heads.kv);
        let span = Span {
            sequence: i,
            position: r,
            head: g * heads.group(),
            group: heads.group(),
            first,
            heads: (heads.group() - first).min(HEADS),
            ranked: positions.dimension().is_some(),
        };
        let (total, memory) = memory.split_at_mut(of_partial);
        let (one, query) = memory.split_at_mut(of_partial);
        let (mut total, mut one) = (Partial::empty(total), Partial::empty(one));
        // SAFETY: the op's caller vouches for the tensors; the span is inside them, and this task's.
        unsafe {
            if r >= positions.len(i) || !fill(&mut one, problem, term, &span, query) {
                return;
            }
            total.read(state, None, &span, value_dim);
            total.fold(&one, &span, value_dim);
            write_outputs(&total, outputs, &span, value_dim);
        }
    })
}

/// Makes the states of the span's terms; false where there are none. Heads without a term keep the empty state.
///
/// # Safety
/// The tensors are valid and hold the span, whose row is one of its sequence; `query` has D elements.
unsafe fn fill(to: &mut Partial, problem: &Problem, term: &Term, span: &Span, query: &mut [f32]) -> bool {
    let (remainder, value_dim) = (&term.remainder, problem.kv.value_dim());
    let g = span.head / span.group;
    // SAFETY: says the caller; there is such a row.
    unsafe {
        let Some(row) = remainder.row(span.sequence) else { return false };
        if remainder.tokens.get::<i32, 2>([row, g]) <= 0 {
            return false;
        }
        for (n, acc) in to.acc.chunks_exact_mut(value_dim).take(span.heads).enumerate() {
            let log_mass = span.at(&term.log_mass, n, None).read();
            if !log_mass.is_finite() {
                continue;
            }
            (to.m[n], to.l[n]) = (log_mass, 1.0);
            read_query(problem, span, n, query);
            remainder.mean_v.row::<f32, 2>([row, g]).read_into(acc);
            for (c, &q) in query.iter().enumerate() {
                let mut spare = spare();
                let covariance = adjacent::<f32, 3>(&remainder.covariance, [row, g, c], &mut spare);
                dispatch(Add { row: covariance, factor: q, to: acc });
            }
        }
    }
    !to.is_empty(span)
}

/// A query of the span times ½·scale.
///
/// # Safety
/// As for [`fill`].
unsafe fn read_query(problem: &Problem, span: &Span, n: usize, query: &mut [f32]) {
    let (positions, (r, h)) = (&problem.positions, span.row(n));
    with_float!(positions.q.dtype, T => {
        let row = positions.q.along::<T, 3>(positions.q.rank() - 1, positions.place(span.sequence, r, h));
        // SAFETY: the row has D elements.
        query.iter_mut().enumerate().for_each(|(c, x)| *x = unsafe { row.get(c) }.to_f32() * (0.5 * problem.scale));
    });
}

/// Adds `factor` times a row.
struct Add<'a> {
    row: *const f32,
    factor: f32,
    to: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let factor = L::splat(self.factor);
        for d in (0..self.to.len()).step_by(LANES) {
            // SAFETY: the row is as long as `to`, which has a multiple of eight elements.
            unsafe {
                let to = self.to.as_mut_ptr().add(d);
                L::load(self.row.add(d)).fused(factor, L::load(to)).store(to);
            }
        }
    }
}
