//! Repair in one launch: for each pair a cluster of CTAs, which finds what was missed, attends to it and joins all.

use super::{Kept, Request, job, params};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::attention::device::{self, Kernels, Pairs, RepairParams, THREADS, WARPS};
use crate::ops::views::State;
use crate::runtime::cuda::layout::{is_near, log2_ceil};
use crate::runtime::cuda::{Enqueue, Facts, Grid, Kernel, Kind};

pub struct AtOnce {
    params: RepairParams,
    kernel: Kernel,
    grid: Grid,
}

/// Tiles that a team asks for at a time: more pay, where there is room.
const STAGES: [u32; 2] = [2, 1];

impl AtOnce {
    /// `None` where no kernel takes the tensors, or they need more shared memory than there is.
    pub fn new(facts: &Facts, kernels: &Kernels, r: &Request) -> Result<Option<AtOnce>> {
        if kernels.cluster_sizes.is_empty() || !is_common(r.kept) {
            return Ok(None);
        }
        let job = job(r);
        // As many CTAs as have a multiprocessor each.
        let ctas = |size: u32| device::lists(&job).saturating_mul(size as usize);
        let fits = |&size: &u32| ctas(size) <= facts.multiprocessors as usize;
        let size = kernels.cluster_sizes.iter().copied().rfind(fits).unwrap_or(1);
        for stages in STAGES {
            let Some(pairs) = device::pairs(facts, &job, stages)? else { return Ok(None) };
            let Some(&kernel) = kernels.repair_of(pairs.engine) else { return Ok(None) };
            let mut params = params(r, pairs.params);
            let shared = lay_out(&mut params, r, &pairs, size);
            if shared > device::most_shared(facts) as usize {
                continue;
            }
            let kind = if size == 1 { Kind::Dependent } else { Kind::DependentClusters(size) };
            let grid = Grid { ctas: pairs.params.pairs * size, threads: THREADS, kind };
            return Ok(Some(AtOnce { params, kernel: kernel.sharing(shared as u32), grid }));
        }
        Ok(None)
    }

    pub fn run(&self, enqueue: &Enqueue) -> Result<()> {
        // SAFETY: RepairParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
        unsafe { enqueue.launch(&self.kernel, self.grid, [(&raw const self.params).cast()]) }
    }
}

/// Rows of acc begin and end on 16 bytes, and strides of partials fit in 32 bits.
fn is_common(kept: &Kept) -> bool {
    let is_near = |t: &Tensor, d: usize| t.dim(d) <= 1 || is_near(t.byte_stride(d));
    match kept {
        Kept::Superset(State { acc, .. }) => device::is_copied_by_16(acc),
        Kept::Exact(State { acc, m, l }) => {
            let groups = m.rank() - 1;
            device::is_copied_by_16(acc) && [acc, m, l].into_iter().all(|t| is_near(t, groups))
        }
    }
}

/// Lays shared memory out behind the tiles: states that a CTA has joined, what its cluster sends it, lists. Returns all of it.
fn lay_out(params: &mut RepairParams, r: &Request, pairs: &Pairs, size: u32) -> usize {
    let (rows, dim) = (pairs.rows, params.to.value_dim);
    let turns = (WARPS >> log2_ceil(rows).min(WARPS.ilog2())).max(1);
    params.kept_offset = pairs.shared.next_multiple_of(16);
    params.received_offset = (params.kept_offset + turns * rows * (dim + 2) * 4).next_multiple_of(16);
    params.lists_offset = params.received_offset + 16 * (rows * dim / 2).next_power_of_two().max(size);
    let entries = r.selected.cap().saturating_mul(4).saturating_add(r.predicted.cap());
    entries.saturating_mul(size_of::<i32>()).saturating_add(params.lists_offset as usize)
}
