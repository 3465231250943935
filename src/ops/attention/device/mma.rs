//! The plan of kernels/attention/mma.cuh and general.cu: units of all lists are split evenly among the CTAs of the device.

use super::chunks::{Chunks, Cut, FixedChunks};
use super::params::Params;
use super::plan::{
    Entry, Plan, Scratch, Sizes, THREADS, TILE, TOKEN_INFO_BYTES, WARP_ROWS, WARPS, Width, values_are_keys,
};
use crate::core::status::{Error, Result};
use crate::runtime::cuda::layout::Divisor;

/// Shared memory that the kernels declare, rounded up.
const STATIC_SHARED: u32 = 2304;
const MOST_STAGES: u32 = 8;
/// Units that the kernels count stay below.
const MOST_UNITS: u64 = 1 << 31;

/// Dynamic shared memory that a kernel can have.
pub fn most_shared(shared_bytes: u32) -> u32 {
    shared_bytes - STATIC_SHARED
}

/// The work items of a call, and what a CTA needs for one of them.
pub struct WorkItems {
    pub params: Params,
    /// Rows of a CTA.
    pub rows: u32,
    /// Dynamic shared memory.
    pub shared: u32,
}

/// Work items whose rings have at most `most_stages`.
pub fn work_items(
    shared_bytes: u32,
    params: &Params,
    sizes: &Sizes,
    entry: Entry,
    most_stages: u32,
) -> Result<WorkItems> {
    let mut params = *params;
    let shared = share(&mut params, entry, most_shared(shared_bytes), most_stages)?;
    let rows_of_cta = WARP_ROWS << params.log_members;
    let row_blocks = params.rows.div_ceil(rows_of_cta);
    let items = sizes.lists.saturating_mul(row_blocks as u64);
    if items.saturating_mul(sizes.units.max(1)) >= MOST_UNITS {
        let text = format!("{items} lists of up to {} tiles are more than the CUDA kernels count", sizes.units);
        return Err(Error::unsupported(text));
    }
    params.work_items = items as u32;
    params.row_blocks = Divisor::new(row_blocks);
    Ok(WorkItems { rows: params.rows.min(rows_of_cta), params, shared })
}

/// The kernel of mma for a call that mma takes.
pub fn entry(sizes: &Sizes) -> Option<Entry> {
    Some(Entry::Mma(sizes.element?, Width::of(sizes.dim, sizes.value_dim)?))
}

/// The plan of mma, or of a kernel that general runs.
pub fn plan(multiprocessors: u32, shared_bytes: u32, params: &Params, sizes: &Sizes, entry: Entry) -> Result<Plan> {
    let WorkItems { mut params, rows, shared } = work_items(shared_bytes, params, sizes, entry, MOST_STAGES)?;
    let more = multiprocessors.saturating_sub(params.work_items).max(multiprocessors / 2).max(1);
    let cut = if sizes.is_invariant() { Cut::At(FixedChunks::new(sizes, multiprocessors)) } else { Cut::Evenly(more) };
    let chunks = Chunks::plan(&mut params, sizes, 1, cut)?;
    let state_bytes = rows as usize * (params.value_dim as usize + 2) * size_of::<f32>();
    Ok(Plan {
        params,
        entry,
        ctas: chunks.count,
        threads: THREADS,
        cluster: None,
        joining: 0,
        shared,
        is_split_first: chunks.is_split_first,
        in_boxes: false,
        scratch: Scratch { shares: chunks.share_bytes(), states: chunks.states as usize * state_bytes },
    })
}

/// Lays shared memory out, and returns how much it takes.
fn share(params: &mut Params, entry: Entry, most: u32, most_stages: u32) -> Result<u32> {
    params.warp_rows = params.rows.min(WARP_ROWS);
    let warp_acc = params.warp_rows * (params.value_dim + 4) * size_of::<f32>() as u32;
    // With partials: the state of one unit, and the total of all, of every warp.
    let totals = if params.partials.acc.data.is_null() { 0 } else { 2 * WARPS * warp_acc };
    // general shares no tile: a warp's rows are enough for a CTA.
    let members = if matches!(entry, Entry::Mma(..)) { params.rows.div_ceil(WARP_ROWS).min(WARPS) } else { 1 };
    for log_members in members.next_power_of_two().ilog2()..=WARPS.ilog2() {
        let members = 1 << log_members;
        let (stages, stage_bytes, q_pitch, sums) = if let Entry::Mma(element, width) = entry {
            let tile = TILE * (width.channels() * element.bytes() + 16);
            params.v_offset = if values_are_keys(params) { 0 } else { tile };
            let q_pitch = width.channels() * 2 + 16;
            let rest = members * WARP_ROWS * q_pitch + totals;
            let of_team = most.saturating_sub(rest) / (WARPS / members);
            let mut stage = TOKEN_INFO_BYTES + tile + params.v_offset;
            // A team's results take the place of its tiles once it has attended to them.
            let stages = (of_team / stage).min(most_stages);
            stage = stage.max((members * warp_acc).div_ceil(stages.max(1)).next_multiple_of(16));
            ((of_team / stage).min(stages), stage, q_pitch, 0)
        } else {
            // A stage holds acc of a team; m and l of each warp's rows lie behind the queries.
            (1, members * warp_acc, (params.dim + 4) * 4, 2 * WARPS * WARP_ROWS * 4)
        };
        let tiles = (WARPS / members * stages * stage_bytes).next_multiple_of(16);
        params.log_members = log_members;
        (params.stages, params.stage_bytes, params.q_pitch, params.q_offset) = (stages, stage_bytes, q_pitch, tiles);
        params.totals_offset = (tiles + members * WARP_ROWS * q_pitch + sums).next_multiple_of(16);
        let shared = params.totals_offset + totals;
        if stages > 0 && stages * stage_bytes >= members * warp_acc && shared <= most {
            return Ok(shared);
        }
    }
    let what = if totals > 0 { " with partials" } else { "" };
    let (dim, value_dim) = (params.dim, params.value_dim);
    let text = format!(
        "attention{what} of heads of D={dim}, Dv={value_dim} needs more shared memory than the device's {most} bytes"
    );
    Err(Error::unsupported(text))
}
