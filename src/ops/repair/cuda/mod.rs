//! Repair on CUDA: one launch where a kernel takes the tensors (see `at_once`), two elsewhere.

mod at_once;
mod in_two;

use super::{Kept, Request};
use crate::core::status::Result;
use crate::ops::attention::device::{self, Job, Params, RepairParams, StateView, View};
use crate::runtime::cuda::{Cuda, Enqueue};
use at_once::AtOnce;
use in_two::InTwo;

pub fn scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    match AtOnce::new(cuda.facts(), cuda.kernels(), r)? {
        Some(_) => Ok(0),
        None => Ok(InTwo::new(cuda.facts(), r)?.map_or(0, |repair| repair.scratch(r))),
    }
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    match AtOnce::new(enqueue.facts(), enqueue.kernels(), r)? {
        Some(repair) => repair.run(enqueue),
        None => in_two::run(enqueue, r),
    }
}

/// Attention to selected blocks.
fn job<'r>(r: &Request<'r>) -> Job<'r, 'r> {
    Job { problem: r.problem, list: Some(r.selected), bundle: r.bundle, partials: None, outputs: r.outputs }
}

/// What both ways tell their first kernel.
fn params(r: &Request, to: Params) -> RepairParams {
    let (exact, kept) = match r.kept {
        Kept::Superset(state) => (0, StateView::of_state(state)),
        Kept::Exact(partials) => (1, StateView::of_partials(partials)),
    };
    RepairParams {
        to,
        predicted: View::by_position(&r.predicted.ids),
        predicted_counts: View::by_position(&r.predicted.counts),
        missed: r.missed_counts.map_or(View::ABSENT, View::by_position),
        kept,
        exact,
        predicted_cap: r.predicted.cap() as u32,
        entries: device::bundle(r.bundle),
        ..RepairParams::none()
    }
}
