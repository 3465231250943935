//! Shared memory of kernels/attention/repair_one_launch.cu: for each work item a cluster of CTAs, which finds what was missed,
//! attends to it and joins all.

use super::{Request, WorkItems};
use crate::ops::attention::device::{RepairParams, WARPS};
use crate::runtime::cuda::layout::log2_ceil;

/// Stages of a team's ring: two pay, where there is room.
pub const STAGES: [u32; 2] = [2, 1];

/// Where states that a CTA has joined begin, what its cluster sends it, and lists.
fn offsets(items: &WorkItems, cluster: u32) -> [u32; 3] {
    let (rows, dim) = (items.rows, items.params.value_dim);
    let turns = (WARPS >> log2_ceil(rows).min(WARPS.ilog2())).max(1);
    let kept = items.shared.next_multiple_of(16);
    let received = (kept + turns * rows * (dim + 2) * 4).next_multiple_of(16);
    [kept, received, received + 16 * (rows * dim / 2).next_power_of_two().max(cluster)]
}

/// Dynamic shared memory of a CTA.
fn shared(items: &WorkItems, r: &Request, cluster: u32) -> usize {
    let entries = r.selected.cap().saturating_mul(4).saturating_add(r.predicted.cap());
    entries.saturating_mul(size_of::<i32>()).saturating_add(offsets(items, cluster)[2] as usize)
}

pub fn fits(items: &WorkItems, r: &Request, cluster: u32, most: u32) -> bool {
    shared(items, r, cluster) <= most as usize
}

/// Lays shared memory out behind the tiles, and returns how much it takes.
pub fn lay_out(params: &mut RepairParams, r: &Request, items: &WorkItems, cluster: u32) -> usize {
    [params.kept_offset, params.received_offset, params.lists_offset] = offsets(items, cluster);
    shared(items, r, cluster)
}
