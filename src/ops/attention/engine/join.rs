//! Joining of states in order, and what is written of the result.

use super::partial::Partial;
use super::span::{HEADS, Span};
use super::{Cut, Job};
use crate::core::dtype::Rounded;
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::attention::{Extents, Outputs, States};
use crate::ops::views::State;
use crate::runtime::cpu::{Cpu, Rows, Scratch};
use crate::with_float;

/// Joins the states of each unit's chunks and writes the results.
pub fn join_chunks(
    cpu: &Cpu,
    scratch: &Scratch,
    job: &Job,
    cut: &Cut,
    first_chunk: &[usize],
    states: &mut [f32],
) -> Result<()> {
    let of_unit = states.len().div_ceil(cut.units.max(1)) * size_of::<f32>();
    let states = Rows::new(states, cut.floats);
    cpu.in_shares(scratch, cut.units * cut.spans, 2 * cut.floats, of_unit, |task, memory| {
        let (n, s) = (task / cut.spans, task % cut.spans);
        // SAFETY: no other task takes the states of these chunks' span.
        let chunks = (first_chunk[n]..first_chunk[n + 1]).map(|c| unsafe { states.row(c * cut.spans + s) });
        let chunks = chunks.map(|memory| Source::Memory(Partial::over(memory)));
        let sources = job.start.into_iter().map(Source::Tensors).chain(chunks);
        join(sources, job.outputs, job.span(job.unit(n), s), cut.value_dim, memory);
    })
}

/// Joins the states of a caller and writes the results.
pub fn join_states(cpu: &Cpu, states: &States, outputs: &Outputs) -> Result<()> {
    let Extents { batch, positions, heads, dim } = states.extents;
    let (spans, floats) = (heads.div_ceil(HEADS), Partial::floats(heads.min(HEADS), dim));
    let bytes = states.iter().count() * floats * size_of::<f32>();
    let (ranked, positions) = (positions.is_some(), positions.unwrap_or(1));
    cpu.in_shares(&cpu.scratch(), batch * positions * spans, 2 * floats, bytes, |task, memory| {
        let (row, first) = (task / spans, task % spans * HEADS);
        let span = Span {
            sequence: row / positions,
            position: row % positions,
            head: 0,
            group: heads,
            first,
            heads: (heads - first).min(HEADS),
            ranked,
        };
        join(states.iter().map(Source::Tensors), outputs, span, dim, memory);
    })
}

/// Where a state is that is to be joined.
enum Source<'a> {
    Tensors(&'a State<'a>),
    Memory(Partial<'a>),
}

/// Joins the sources in order; `memory` has room for two partials.
fn join<'a>(
    sources: impl Iterator<Item = Source<'a>>,
    outputs: &Outputs,
    span: Span,
    dim: usize,
    memory: &'a mut [f32],
) {
    let (first, second) = memory.split_at_mut(memory.len() / 2);
    let (mut total, mut one) = (Partial::empty(first), Partial::empty(second));
    for source in sources {
        match source {
            Source::Memory(partial) => total.fold(&partial, &span, dim),
            Source::Tensors(state) => {
                // SAFETY: the op's caller vouches for the tensors; the span is inside them.
                unsafe { one.read(state, None, &span, dim) };
                total.fold(&one, &span, dim);
            }
        }
    }
    // SAFETY: as above, and these heads are this task's.
    unsafe { write_outputs(&total, outputs, &span, dim) };
}

/// # Safety
/// The outputs are valid and hold the span, which is this task's.
pub unsafe fn write_outputs(total: &Partial, outputs: &Outputs, span: &Span, dim: usize) {
    // SAFETY: the caller vouches for the outputs, of one shape, for sinks, one for each query head, and for q_lens, one for each sequence.
    unsafe {
        let span = &outputs.written(span);
        if let Some(state) = &outputs.state {
            total.write(state, None, span, dim);
        }
        for (n, acc) in total.acc.chunks_exact(dim).take(span.heads).enumerate() {
            let (m, l) = (total.m[n], total.l[n]);
            if let Some(lse) = &outputs.lse {
                span.at(lse, n, None).write(m + l.ln());
            }
            if let Some(out) = &outputs.out {
                let sink = outputs.sinks.map(|sinks| sinks.get::<f32, 1>([span.row(n).1]));
                write_row(out, span, n, acc, norm(m, l, sink));
            }
        }
    }
}

impl Outputs<'_> {
    /// The first rows of the span, whose results are written.
    ///
    /// # Safety
    /// `kept_past` is valid.
    unsafe fn written(&self, span: &Span) -> Span {
        let Some(lens) = &self.kept_past else { return *span };
        // SAFETY: there is such a sequence.
        let len = unsafe { lens.get::<i32, 1>([span.sequence]) }.max(0) as usize;
        let rows = len.saturating_sub(span.position).saturating_mul(span.group);
        Span { heads: rows.saturating_sub(span.first).min(span.heads), ..*span }
    }
}

/// What acc is multiplied by: 1 / (l + e^(sink − m)).
fn norm(m: f32, l: f32, sink: Option<f32>) -> f32 {
    match sink {
        _ if l == 0.0 => 0.0,
        None => 1.0 / l,
        Some(sink) if sink == f32::INFINITY => 0.0,
        Some(sink) => {
            // Relative to the larger of the two, of which neither then overflows.
            let top = m.max(sink);
            let scale = (m - top).exp();
            scale / (l * scale + (sink - top).exp())
        }
    }
}

/// # Safety
/// `out` is valid and holds row `n` of the span, which is this task's.
unsafe fn write_row(out: &Tensor, span: &Span, n: usize, acc: &[f32], norm: f32) {
    let (i, (r, h)) = (span.sequence, span.row(n));
    with_float!(out.dtype, T => {
        let row = if span.ranked { out.row::<T, 3>([i, r, h]) } else { out.row::<T, 2>([i, h]) };
        for (d, &x) in acc.iter().enumerate() {
            // SAFETY: the row has as many channels as acc.
            unsafe { row.set(d, T::from_f32(x * norm)) };
        }
    })
}
