//! The plan of kernels/attention/plain.cuh and rows.cuh: for each list some CTAs, each with a multiprocessor of its own.

use super::params::Params;
use super::plan::{Element, Engine, FACTS_BYTES, Plan, Scratch, THREADS, TILE, WARP_ROWS, WARPS};
use crate::runtime::cuda::Facts;
use crate::runtime::cuda::layout::Divisor;

const CHANNELS: u32 = 128;
/// Shared memory that the kernels declare, rounded up.
const STATIC_SHARED: u32 = 5 << 10;
/// Longer lists of many sequences differ in length, and are better cut by what there is to do.
const MOST_TOKENS: u64 = 12 << 10;
/// Of a list.
const MOST_CTAS: u32 = 16;
/// Lists of fewer tokens in all leave half of the multiprocessors to the kernel that follows, which then is there before they end.
const FEW_TOKENS: u64 = 64 << 10;

/// Rows of a list that a kernel is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rows {
    UpTo4,
    UpTo8,
    UpTo16,
}

impl Rows {
    fn of(rows: u32) -> Option<Rows> {
        match rows {
            0..=4 => Some(Rows::UpTo4),
            5..=8 => Some(Rows::UpTo8),
            9..=16 => Some(Rows::UpTo16),
            _ => None,
        }
    }

    fn count(self) -> u32 {
        4 << self as u32
    }
}

/// `None` where the kernel does not take these tensors, or would not be the faster. `tokens` is the length of a full list, `units`
/// the number of its units.
pub fn plan(facts: &Facts, params: &Params, element: Element, lists: usize, tokens: u64, units: u64) -> Option<Plan> {
    let rows = Rows::of(params.rows)?;
    let has_list = !params.ids.data.is_null();
    let is_taken = params.dim == CHANNELS
        && params.value_dim == CHANNELS
        && 1 << params.log_granule == TILE
        && params.scales_per_token == 0
        && [params.k, params.v].iter().all(|kv| has_short_steps(&kv.step[..2]))
        && has_short_steps(&params.table.step);
    let pairs = u32::try_from(lists).ok().filter(|&pairs| pairs < 1 << 20)?;
    // Of one sequence all are as long.
    let may_differ = pairs > params.kv_heads.value;
    let is_uneven =
        may_differ && (tokens > MOST_TOKENS || (!has_list && pairs > facts.multiprocessors / MOST_CTAS * 2));
    if !is_taken || is_uneven {
        return None;
    }
    let has_partials = !params.partials.acc.data.is_null();
    // States that are kept are written the faster the more write them.
    let few = match (has_partials, rows) {
        (false, _) => FEW_TOKENS,
        (true, Rows::UpTo4) => FEW_TOKENS / 2,
        (true, _) => FEW_TOKENS / 4,
    };
    let share = if pairs as u64 * tokens <= few { facts.multiprocessors / 2 } else { facts.multiprocessors };
    let ctas = (share / pairs.max(1)).clamp(1, MOST_CTAS);
    let sharing = if has_partials { sharing(params.unit_tiles.value, units, ctas) } else { Some(1) };
    let tile_bytes = TILE * (CHANNELS * element.bytes() + 16);
    let (warp_bytes, cta_bytes) = (warp_bytes(rows, sharing.is_none()), cta_bytes(rows));
    let ring = |stages: u32| WARPS * stages * (FACTS_BYTES + 2 * tile_bytes);
    let shared = |stages: u32| ring(stages) + cta_bytes + WARPS * warp_bytes;
    let stages = stages(element, rows).iter().copied().find(|&stages| shared(stages) <= most_shared(facts))?;
    let (ring, shared) = (ring(stages), shared(stages));
    let sharing = sharing.unwrap_or(1);
    let params = Params {
        work_items: pairs,
        ctas: Divisor::new(ctas),
        most_units: units as u32,
        unit_tiles: Divisor::new(params.unit_tiles.value / sharing),
        log_share: sharing.ilog2(),
        log_members: (rows == Rows::UpTo16) as u32,
        warp_rows: rows.count(),
        stages,
        v_offset: tile_bytes,
        q_offset: ring,
        q_pitch: warp_bytes,
        ..*params
    };
    let states = if ctas > 1 { pairs * ctas * state_bytes(rows) } else { 0 };
    Some(Plan {
        params,
        engine: Engine::Plain(element, rows),
        ctas: pairs * ctas,
        threads: THREADS,
        cluster: None,
        joining: 0,
        shared,
        is_cut_apart: false,
        scratch: Scratch::of_states(states as usize),
    })
}

/// Dynamic shared memory that a kernel can have.
pub fn most_shared(facts: &Facts) -> u32 {
    facts.shared_bytes - STATIC_SHARED
}

fn has_short_steps(steps: &[i64]) -> bool {
    steps.iter().all(|&step| i32::try_from(step).is_ok())
}

/// Warps that share a unit of so many tiles, none of which has a second unit; `None` where there are more units than warps.
fn sharing(unit_tiles: u32, units: u64, ctas: u32) -> Option<u32> {
    let has_one = |&warps: &u32| unit_tiles.is_multiple_of(warps) && units <= (WARPS / warps * ctas) as u64;
    (0..=WARPS.ilog2()).map(|log| 1 << log).rfind(has_one)
}

/// Of a ring; the first that there is room for.
fn stages(element: Element, rows: Rows) -> &'static [u32] {
    match (element, rows) {
        (Element::Fp8, _) => &[4],
        (_, Rows::UpTo16) => &[3, 2],
        _ => &[2],
    }
}

fn query_bytes(rows: Rows) -> u32 {
    rows.count() * (CHANNELS * 2 + 16)
}

/// Of all warps: queries, where there are many.
fn cta_bytes(rows: Rows) -> u32 {
    if rows == Rows::UpTo16 { query_bytes(rows) } else { 0 }
}

/// Of each warp: queries; or, once those are in registers, the state of its units where it has several.
fn warp_bytes(rows: Rows, adds_up: bool) -> u32 {
    let queries = if rows == Rows::UpTo16 { 0 } else { query_bytes(rows) };
    let state = rows.count().next_multiple_of(WARP_ROWS) * CHANNELS * size_of::<f32>() as u32;
    if adds_up { queries.max(state) } else { queries }
}

/// What a CTA leaves for the others of its list: acc, m and l of each row, m and l once a warp.
fn state_bytes(rows: Rows) -> u32 {
    rows.count() * (CHANNELS + 2 * WARPS) * size_of::<f32>() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warps_share_a_unit_as_long_as_none_has_a_second() {
        // Blocks of 64 tokens, by eight CTAs a list.
        for (tokens, warps) in [(512, Some(4)), (1024, Some(4)), (2048, Some(2)), (4096, Some(1)), (8192, None)] {
            assert_eq!(sharing(4, tokens / 64, 8), warps, "{tokens} tokens");
        }
        assert_eq!(sharing(3, 1, 16), Some(1));
        assert_eq!(sharing(16, 1, 1), Some(8));
    }
}
