//! Attention and joining of states on CUDA.

use super::device::{self, Job, Kernels, MAX_INPUTS, MergeParams, Params, Plan, StateView, THREADS, Variant};
use super::{MergeRequest, Request};
use crate::core::status::{Error, Result};
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::{Cuda, Enqueue};

fn job<'r>(r: &Request<'r>) -> Job<'r, 'r> {
    let Request { problem, list, entries_per_partial, outputs, partials, term, is_far, far_pages } = *r;
    Job { problem, list, entries_per_partial, partials, outputs, term, has_start: false, is_far, far_pages }
}

fn plan(kernels: &Kernels, forced: Option<Variant>, r: &Request) -> Result<Option<(Variant, Plan)>> {
    device::plan(kernels, forced, &job(r))
}

pub fn scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    Ok(plan(cuda.kernels(), cuda.forced(), r)?.map_or(0, |(_, plan)| plan.scratch()))
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    let Some((variant, mut plan)) = plan(enqueue.kernels(), enqueue.forced(), r)? else { return Ok(()) };
    enqueue.ran(variant);
    if plan.scratch() > 0 {
        plan.place(enqueue.scratch(plan.scratch())? as *mut u8, enqueue.counters()? as *mut u8);
    }
    // SAFETY: the op's caller keeps the tensors valid until the stream has passed.
    unsafe {
        device::launch(enqueue, &plan, r.problem, r.term)?;
        let Some(term) = r.term.filter(|_| !plan.has_term()) else { return Ok(()) };
        match device::describe(&job(r))? {
            Some(params) => device::join_term(enqueue, &params, r.problem.positions.batch(), term),
            None => Ok(()),
        }
    }
}

pub fn merge(enqueue: &Enqueue, r: &MergeRequest) -> Result<()> {
    let extents = &r.states.extents;
    let positions = extents.positions.unwrap_or(1);
    let rows = extents.batch * positions * extents.heads;
    if rows == 0 {
        return Ok(());
    }
    let count = |n: usize| u32::try_from(n).ok().filter(|&n| n < 1 << 31);
    let Some(rows) = count(rows) else {
        return Err(Error::unsupported(format!("{rows} rows of states; CUDA takes up to 2^31 − 1")));
    };
    let to = Params {
        work_items: rows,
        positions: positions as u32,
        value_dim: extents.dim as u32,
        own_lists: 1,
        group: Divisor::new(1),
        out_type: device::type_of_out(&r.outputs),
        ..device::results(&r.outputs)
    };
    let mut input = [StateView::ABSENT; MAX_INPUTS];
    let mut inputs = 0;
    for (view, state) in input.iter_mut().zip(r.states.iter()) {
        *view = StateView::of_state(state);
        inputs += 1;
    }
    let params = MergeParams { to, inputs, heads: extents.heads as u32, input };
    let kernels: &Kernels = enqueue.kernels();
    let grid = device::ordered_grid(rows.div_ceil(THREADS / 32));
    // SAFETY: MergeParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe { enqueue.launch(&kernels.merge, grid, [(&raw const params).cast()]) }
}
