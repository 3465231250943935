//! The plan of kernels/attention_int4/decode128.cuh, and the parameters of the kernels of that folder.
//!
//! Rows beyond 16 are a work item of their own, whose CTAs run beside those of the first ones and find codes in the L2 cache.

use super::decode128::{self, CHANNELS};
use super::params;
use super::plan::{Entry, Plan, Rows, Scratch, Sizes, THREADS, TILE, WARPS};
use crate::ops::attention::Tree;
use crate::ops::int4::Int4Kv;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{View, element_code};

/// A CodedGroup, and how many a warp has in flight.
const CODED_GROUP_BYTES: u32 = 9472;
const STAGES: u32 = 2;
/// Rows of queries in shared memory, and bytes from one to the next, or from one key to the next.
const QUERY_ROWS: u32 = 16;
const PITCH: u32 = CHANNELS * 2 + 16;
/// CTAs of a list, and those of up to eight rows that a multiprocessor has at a time.
const MOST_CTAS: u32 = 32;
const CTAS_AT_A_TIME: u32 = 1;
/// Tiles of a block that a warp takes one after the other, so that their mean is multiplied once: of long lists, and of short ones.
const UNIT_TILES: u32 = 4;
const SHORT_UNIT_TILES: u32 = 2;

/// What a warp knows of its tiles: Int4Kept.
const KEPT_BYTES: u32 = 576;

/// What each warp has: the ring, and what it knows of its tiles.
const WARP_BYTES: u32 = (STAGES * CODED_GROUP_BYTES + KEPT_BYTES).next_multiple_of(128);

/// Dynamic shared memory: what each warp has, queries, queries that are turned.
pub const fn shared(rows: Rows) -> u32 {
    WARPS * WARP_BYTES + (QUERY_ROWS + rows.count()) * PITCH
}

/// Rows of a work item.
fn rows(sizes: &Sizes) -> Rows {
    Rows::of(sizes.rows).unwrap_or(Rows::UpTo16)
}

/// Work items of a list.
pub fn row_blocks(sizes: &Sizes) -> u32 {
    sizes.rows.div_ceil(rows(sizes).count()).max(1)
}

/// Whether up to 48 rows are taken sooner 16 at a time, each by multiprocessors of its own, than all at once.
pub fn is_short(sizes: &Sizes) -> bool {
    sizes.rows <= 48 && sizes.split_lists().saturating_mul(sizes.list_tokens) <= 32 << 10
}

/// The plan of a call that fits.
pub fn plan(multiprocessors: u32, params: &params::Params, sizes: &Sizes, int4: &Int4Kv) -> Option<Plan> {
    let (element, rows) = (sizes.element?, rows(sizes));
    let at_a_time = if rows == Rows::UpTo16 { 1 } else { CTAS_AT_A_TIME };
    let row_blocks = row_blocks(sizes);
    let items = u32::try_from(sizes.lists * row_blocks as u64).ok()?;
    let block_tiles = int4.block_size as u32 / TILE;
    // As many CTAs as run at a time, as long as each of their warps has a unit.
    let units = sizes.units.div_ceil(SHORT_UNIT_TILES.min(block_tiles) as u64);
    let most = (units.div_ceil(WARPS as u64).clamp(1, MOST_CTAS as u64)) as u32;
    let split_items = sizes.split_lists().saturating_mul(row_blocks.into()).max(1);
    let ctas = (u64::from(multiprocessors * at_a_time) / split_items).clamp(1, most.into()) as u32;
    let is_long = sizes.units >= (ctas * WARPS * UNIT_TILES * 2) as u64;
    let together = if is_long { UNIT_TILES } else { SHORT_UNIT_TILES };
    let params = params::Params {
        work_items: items,
        row_blocks: Divisor::new(row_blocks),
        ctas: Divisor::new(ctas),
        most_units: sizes.units as u32,
        unit_tiles: Divisor::new(if block_tiles.is_multiple_of(together) { together } else { block_tiles.min(3) }),
        log_members: (rows == Rows::UpTo16) as u32,
        warp_rows: rows.count(),
        v_offset: TILE * PITCH,
        q_offset: WARPS * WARP_BYTES,
        ..*params
    };
    let states = if ctas > 1 { items as usize * (ctas * decode128::state_bytes(rows, CHANNELS)) as usize } else { 0 };
    Some(Plan {
        params,
        entry: Entry::Int4_128(element, rows),
        ctas: items * ctas,
        threads: THREADS,
        cluster: None,
        joining: 0,
        shared: shared(rows),
        is_split_first: false,
        in_boxes: false,
        scratch: Scratch::of_states(states),
    })
}

kernel_struct! {
    /// Mirrors Int4Params of kernels/attention_int4/params.cuh.
    pub struct Params {
        to: params::Params,
        exact_tokens: u32,
        token_capacity: u32,
        block: Divisor,
        page: Divisor,
        pages: u32,
        mean_rows: Divisor,
        mean_pages: u32,
        most_mean_pages: u32,
        mean_type: u32,
        coded_lens: View<1>,
        table: View<2>,
        k: View<4>,
        v: View<4>,
        k_scale: View<3>,
        v_scale: View<3>,
        means: View<4>,
        mean_table: View<2>,
        weights: View<2>,
        tree: View<3>,
    }
}

impl Params {
    pub fn new(to: &params::Params, int4: &Int4Kv, tree: &Option<Tree>) -> Params {
        let count = |n: usize| n.min(i32::MAX as usize) as u32;
        let Int4Kv { pages, means, mean_table, weights, .. } = int4;
        Params {
            to: *to,
            exact_tokens: count(int4.exact_tokens),
            token_capacity: count(pages.capacity()),
            block: Divisor::new(int4.block_size as u32),
            page: Divisor::new(count(pages.size.max(1))),
            pages: count(pages.count),
            mean_rows: Divisor::new(count(means.dim(1).max(1))),
            mean_pages: if means.dim(1) == 0 { 0 } else { count(means.dim(0)) },
            most_mean_pages: mean_table.map_or(1, |table| count(table.dim(1))),
            mean_type: element_code(means.dtype),
            coded_lens: View::new(&pages.seq_lens, [0]),
            table: View::optional(&pages.table, |t| View::new(t, [0, 1])),
            k: View::new(&int4.k, [0, 1, 2, 3]),
            v: View::new(&int4.v, [0, 1, 2, 3]),
            k_scale: View::new(&int4.k_scale, [0, 1, 2]),
            v_scale: View::new(&int4.v_scale, [0, 1, 2]),
            means: View::new(means, [0, 1, 2, 3]),
            mean_table: View::optional(mean_table, |t| View::new(t, [0, 1])),
            weights: View::optional(weights, |t| View::new(t, [0, 1])),
            tree: View::optional(&tree.map(|Tree(t)| t), |t| View::new(t, [0, 1, 2])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        layout::check("attention_int4", file!(), &[Params::layout("Int4Params")]);
    }
}
