//! The plan of mma.cuh and general.cu of kernels/attention/ and kernels/attention_int4/: units of all lists are split evenly among the CTAs of the device.

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
/// The largest D and Dv that the kernels of int4_mma take.
const INT4_CHANNELS: [u32; 3] = [64, 128, 256];
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
    let has_partials = !params.partials.acc.data.is_null();
    let shared = share(&mut params, entry, has_partials, most_shared(shared_bytes), most_stages)?;
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

/// The kernel of int4_mma for a call that int4_mma takes.
pub fn int4_entry(sizes: &Sizes) -> Option<Entry> {
    let widest = sizes.dim.max(sizes.value_dim);
    Some(Entry::Int4Mma(sizes.element?, INT4_CHANNELS.into_iter().find(|&channels| widest <= channels)?))
}

/// Whether shared memory has room for a call that int4_mma takes.
pub fn int4_fits(shared_bytes: u32, sizes: &Sizes, has_partials: bool) -> bool {
    let Some(entry) = int4_entry(sizes) else { return false };
    let mut params = Params { rows: sizes.rows, dim: sizes.dim, value_dim: sizes.value_dim, ..Params::none() };
    share(&mut params, entry, has_partials, most_shared(shared_bytes), MOST_STAGES).is_ok()
}

/// What a kernel on tensor cores has in shared memory.
struct Room {
    /// Channels of a key or value, and bytes of one.
    channels: u32,
    bytes: u32,
    /// Forms of each query: int4_mma has it as it is, and turned.
    queries: u32,
}

impl Room {
    fn of(entry: Entry) -> Option<Room> {
        match entry {
            Entry::Mma(element, width) => Some(Room { channels: width.channels(), bytes: element.bytes(), queries: 1 }),
            Entry::Int4Mma(element, channels) => Some(Room { channels, bytes: element.bytes(), queries: 2 }),
            _ => None,
        }
    }
}

/// The plan of mma or int4_mma, or of a kernel that general runs.
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
fn share(params: &mut Params, entry: Entry, has_partials: bool, most: u32, most_stages: u32) -> Result<u32> {
    params.warp_rows = params.rows.min(WARP_ROWS);
    let warp_acc = params.warp_rows * (params.value_dim + 4) * size_of::<f32>() as u32;
    // With partials: the state of one unit, and the total of all, of every warp.
    let totals = if has_partials { 2 * WARPS * warp_acc } else { 0 };
    // general shares no tile: a warp's rows are enough for a CTA.
    let room = Room::of(entry);
    let members = if room.is_some() { params.rows.div_ceil(WARP_ROWS).min(WARPS) } else { 1 };
    let enough = members.next_power_of_two().ilog2();
    // int4_mma takes fewer rows at a time where shared memory has no room for all.
    let fewest = if matches!(entry, Entry::Int4Mma(..)) { 0 } else { enough };
    for log_members in (enough..=WARPS.ilog2()).chain((fewest..enough).rev()) {
        let members = 1 << log_members;
        let (stages, stage_bytes, q_pitch, sums) = if let Some(room) = &room {
            let tile = TILE * (room.channels * room.bytes + 16);
            // Coded values are never the first channels of the keys.
            let are_keys = matches!(entry, Entry::Mma(..)) && values_are_keys(params);
            params.v_offset = if are_keys { 0 } else { tile };
            let q_pitch = room.queries * (room.channels * 2 + 16);
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
