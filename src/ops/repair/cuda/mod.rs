//! Repair on CUDA: one launch where a kernel takes the tensors (see `at_once`), two elsewhere.

mod at_once;
mod in_two;

use super::{Kept, Request};
use crate::core::status::Result;
use crate::ops::attention::device::{self, Job, RepairParams, StateView};
use crate::runtime::cuda::views::View;
use crate::runtime::cuda::{Cuda, Enqueue};
use in_two::InTwo;

pub fn scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    match at_once::plan(cuda.facts(), cuda.kernels(), r, &mut RepairParams::none())? {
        Some(_) => Ok(0),
        None => Ok(InTwo::new(cuda.facts(), r)?.map_or(0, |repair| repair.scratch(r))),
    }
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    let mut params = RepairParams::none();
    match at_once::plan(enqueue.facts(), enqueue.kernels(), r, &mut params)? {
        // SAFETY: RepairParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
        Some((kernel, grid)) => unsafe { enqueue.launch(&kernel, grid, [(&raw const params).cast()]) },
        None => in_two::run(enqueue, r),
    }
}

/// Attention to selected blocks.
fn job<'r>(r: &Request<'r>) -> Job<'r, 'r> {
    Job { problem: r.problem, list: Some(r.selected), bundle: r.bundle, partials: None, outputs: r.outputs }
}

/// What both ways tell their first kernel, beside what attention is told.
fn describe(r: &Request, params: &mut RepairParams) {
    (params.exact, params.kept) = match r.kept {
        Kept::Superset(state) => (0, StateView::of_state(state)),
        Kept::Exact(partials) => (1, StateView::of_partials(partials)),
    };
    params.predicted = View::by_position(&r.predicted.ids);
    params.predicted_counts = View::by_position(&r.predicted.counts);
    params.missed = r.missed_counts.map_or(View::ABSENT, View::by_position);
    params.predicted_capacity = r.predicted.cap() as u32;
    params.entries = device::bundle(r.bundle);
}
