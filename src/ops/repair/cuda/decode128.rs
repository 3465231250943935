//! Work items and shared memory of kernels/attention/repair_decode128.cuh.

use crate::ops::attention::device::{Element, Params, RepairParams, Sizes, TILE, TOKEN_INFO_BYTES, WARP_ROWS, WARPS};
use crate::runtime::cuda::layout::Divisor;

const CHANNELS: u32 = 128;
/// RepairDecode128Shared of the kernel, which asserts its size.
const LISTS_BYTES: u32 = 5744;

/// Work items of a list: each has up to 8 of its rows.
pub fn row_blocks(sizes: &Sizes) -> u32 {
    sizes.rows.div_ceil(WARP_ROWS)
}

/// Where queries, lists, and the states that the cluster sends begin, and where they end.
fn offsets(element: Element, rows: u32, cluster: u32) -> [u32; 4] {
    let tile_bytes = TILE * (CHANNELS * element.bytes() + 16);
    let stages = if element == Element::Fp8 { 4 } else { 3 };
    let queries = WARPS * stages * (TOKEN_INFO_BYTES + 2 * tile_bytes);
    let lists = queries + WARP_ROWS * (CHANNELS * 2 + 16);
    let received = lists + LISTS_BYTES.next_multiple_of(16);
    let of_cta = (rows.min(WARP_ROWS) * CHANNELS / 2).next_power_of_two().div_ceil(cluster);
    [queries, lists, received, received + 16 * of_cta * cluster]
}

/// Dynamic shared memory of a CTA.
pub fn shared(element: Element, rows: u32, cluster: u32) -> u32 {
    offsets(element, rows, cluster)[3]
}

/// Tells the kernel its work items, lays shared memory out, and returns how much it takes.
pub fn lay_out(params: &mut RepairParams, sizes: &Sizes, element: Element, cluster: u32) -> u32 {
    let [queries, lists, received, end] = offsets(element, sizes.rows, cluster);
    params.to = Params {
        work_items: sizes.lists as u32 * row_blocks(sizes),
        row_blocks: Divisor::new(row_blocks(sizes)),
        log_members: 0,
        q_offset: queries,
        ctas: Divisor::new(cluster),
        ..params.to
    };
    (params.lists_offset, params.received_offset) = (lists, received);
    end
}
