//! Repair in one launch: for each pair a cluster of CTAs, which finds what was missed, attends to it and joins all.

use super::{Kept, Request, describe, job};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::attention::device::{self, FACTS_BYTES, Kernels, Pairs, RepairParams, THREADS, TILE, WARP_ROWS, WARPS};
use crate::ops::views::State;
use crate::runtime::cuda::layout::{Divisor, is_near, log2_ceil};
use crate::runtime::cuda::{Facts, Grid, Kernel, Kind};

/// Tiles that a team asks for at a time: more pay, where there is room.
const STAGES: [u32; 2] = [2, 1];

/// Writes the parameters, which are large, where they are to lie. `None` where no kernel takes the tensors, or they need more shared
/// memory than there is.
pub fn plan(facts: &Facts, kernels: &Kernels, r: &Request, to: &mut RepairParams) -> Result<Option<(Kernel, Grid)>> {
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
        let grid = |size: u32| {
            let kind = if size == 1 { Kind::Dependent } else { Kind::DependentClusters(size) };
            Grid { ctas: pairs.params.work_items * size, threads: THREADS, kind }
        };
        to.to = pairs.params;
        describe(r, to);
        let beside = size_beside_another(facts, kernels, pairs.params.work_items, size);
        if let Some(kernel) = plain(facts, kernels, r, &pairs, beside, to) {
            return Ok(Some((kernel, grid(beside))));
        }
        let Some(&kernel) = kernels.repair_of(pairs.engine) else { return Ok(None) };
        let shared = lay_out(to, r, &pairs, size);
        if shared <= device::most_shared(facts) as usize {
            return Ok(Some((kernel.sharing(shared as u32), grid(size))));
        }
    }
    Ok(None)
}

/// Where there are multiprocessors for the CTAs of two launches, the next one's should start beside this one's. But clusters lie within
/// parts of the device, which need not be of the same size: one cluster that waits for another's end is later than all the rest, while
/// clusters of a CTA less may all find room.
fn size_beside_another(facts: &Facts, kernels: &Kernels, pairs: u32, size: u32) -> u32 {
    let both = pairs.saturating_mul(2);
    if both.saturating_mul(size) > facts.multiprocessors {
        return size;
    }
    (size / 2 + 1..=size).rfind(|&size| kernels.active_clusters[size as usize - 1] >= both).unwrap_or(size)
}

/// Of kernels/attention/repair_plain.cuh: channels, entries of a list, blocks of a sequence, and bytes beside tiles.
const CHANNELS: u32 = 128;
const MOST_ENTRIES: usize = THREADS as usize;
const MOST_BLOCKS: u32 = 8192;
const PLAIN_BYTES: u32 = 5744;

/// The kernel of the common case, where it takes the tensors, with its shared memory laid out.
fn plain(
    facts: &Facts,
    kernels: &Kernels,
    r: &Request,
    pairs: &Pairs,
    size: u32,
    params: &mut RepairParams,
) -> Option<Kernel> {
    let (kernel, bytes) = kernels.repair_plain_of(pairs.engine)?;
    let to = &pairs.params;
    let (selected, predicted) = (r.selected.cap(), r.predicted.cap());
    let is_taken = (to.dim, to.value_dim) == (CHANNELS, CHANNELS)
        && to.rows <= WARP_ROWS
        && 1 << to.log_granule == TILE
        && to.scales_per_token == 0
        && r.bundle == 1
        && selected.max(predicted) <= MOST_ENTRIES
        && to.token_capacity.div_ceil(to.block.value) <= MOST_BLOCKS
        && [&to.k.step[..2], &to.v.step[..2], &to.table.step[..]].iter().all(|steps| steps.iter().all(|&s| is_near(s)));
    if !is_taken {
        return None;
    }
    let tile_bytes = TILE * (CHANNELS * bytes + 16);
    let stages = if bytes == 1 { 4 } else { 3 };
    let ring = WARPS * stages * (FACTS_BYTES + 2 * tile_bytes);
    let lists = ring + WARP_ROWS * (CHANNELS * 2 + 16);
    let received = lists + PLAIN_BYTES.next_multiple_of(16);
    let of_cta = (to.rows * CHANNELS / 2).next_power_of_two().div_ceil(size);
    let shared = received + 16 * of_cta * size;
    if shared > device::most_shared(facts) {
        return None;
    }
    params.to.q_offset = ring;
    params.to.ctas = Divisor::new(size);
    (params.lists_offset, params.received_offset) = (lists, received);
    Some(kernel.sharing(shared))
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
