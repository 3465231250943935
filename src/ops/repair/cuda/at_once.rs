//! Repair in one launch: for each pair a cluster of CTAs, which finds what was missed, attends to it and joins all.

use super::{Kept, Request, job, params};
use crate::core::status::Result;
use crate::ops::attention::device::{self, Kernels, Pairs, RepairParams, THREADS, WARPS};
use crate::runtime::cuda::layout::log2_ceil;
use crate::runtime::cuda::{Enqueue, Facts, Grid, Kernel, Kind};

pub struct AtOnce {
    params: RepairParams,
    kernel: Kernel,
    grid: Grid,
}

/// How a cluster is made: its most CTAs, tiles that a team asks for at a time, and the CTAs that share a multiprocessor.
/// The largest clusters fill the device only where two CTAs share one.
const WAYS: [(u32, u32, u32); 3] = [(16, 1, 2), (8, 2, 1), (8, 1, 1)];

impl AtOnce {
    /// `None` where no kernel takes the tensors, or they need more shared memory than there is.
    pub fn new(facts: &Facts, kernels: &Kernels, r: &Request) -> Result<Option<AtOnce>> {
        let (Kept::Superset(kept) | Kept::Exact(kept)) = r.kept;
        if kernels.cluster_sizes.is_empty() || !device::is_copied_by_16(&kept.acc) {
            return Ok(None);
        }
        let job = job(r);
        let lists = device::lists(&job);
        let fitting = |most: u32| {
            let fits =
                |size: u32| size <= most && lists.saturating_mul(size as usize) <= facts.multiprocessors as usize;
            kernels.cluster_sizes.iter().copied().rfind(|&size| fits(size)).unwrap_or(1)
        };
        for (most, stages, sharing) in WAYS {
            let size = fitting(most);
            if sharing > 1 && size < most {
                continue;
            }
            let Some(pairs) = device::pairs(facts, &job, stages)? else { return Ok(None) };
            let Some(&kernel) = kernels.repair_of(pairs.engine) else { return Ok(None) };
            let mut params = params(r, pairs.params);
            let shared = lay_out(&mut params, r, &pairs, size);
            if shared > device::most_shared(facts) as usize / sharing as usize {
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

/// Lays shared memory out behind the tiles: states that a CTA has joined, what its cluster sends it, lists. Returns all of it.
fn lay_out(params: &mut RepairParams, r: &Request, pairs: &Pairs, size: u32) -> usize {
    let (rows, dim) = (pairs.rows, params.to.value_dim);
    let turns = (WARPS >> log2_ceil(rows).min(WARPS.ilog2())).max(1);
    params.kept_offset = pairs.shared.next_multiple_of(16);
    params.received_offset = (params.kept_offset + turns * rows * (dim + 2) * 4).next_multiple_of(16);
    let received = if size > 1 { 16 * (rows * dim / 2).next_power_of_two().max(size) } else { 0 };
    params.lists_offset = params.received_offset + received;
    let entries = r.selected.cap().saturating_mul(4).saturating_add(r.predicted.cap());
    entries.saturating_mul(size_of::<i32>()).saturating_add(params.lists_offset as usize)
}
