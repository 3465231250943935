//! The plan of kernels/attention/mla64.cuh: for each list and 64 of its rows some CTAs, each with a multiprocessor of its own.

use super::params::Params;
use super::plan::{Entry, Plan, Scratch, Sizes};
use crate::runtime::cuda::layout::Divisor;

/// Rows of a work item.
pub const ROWS: u32 = 64;
/// Fewer rows are better taken 16 at a time.
pub const FEWEST_ROWS: u32 = 33;
const THREADS: u32 = 512;
/// Tokens of a tile.
const TOKENS: u32 = 64;
const SLAB_BYTES: u32 = 128;
/// CTAs that join the states of a list, and states that a warp of one adds up at once.
const JOINING: u32 = 64;
const JOINED_AT_ONCE: u32 = 4;
/// Two tiles, queries, weights.
const SHARED: u32 = 9 * 2 * TOKENS * SLAB_BYTES + 9 * ROWS * SLAB_BYTES + ROWS * SLAB_BYTES;
/// What a CTA leaves for the kernel that joins.
const STATE_BYTES: u32 = ROWS * (512 + 2) * size_of::<f32>() as u32;
/// States that fit the arena that a session makes unasked.
const MOST_STATES: u32 = (16 << 20) / STATE_BYTES;

/// CTAs for each of so many work items, which have `tiles` at most.
fn split(multiprocessors: u32, items: u32, tiles: u32) -> u32 {
    // More would save little beside what joining them takes.
    let counts = [2, 3, 4, 5, 6, 7, 8, 11, 16, 22, 32, 43, 64].map(|ctas| tiles.div_ceil(tiles.div_ceil(ctas)));
    let counts = counts.into_iter().filter(|&ctas| items.saturating_mul(ctas) <= MOST_STATES);
    std::iter::once(1).chain(counts).min_by_key(|&ctas| cost(multiprocessors, items, tiles, ctas)).unwrap_or(1)
}

/// The cost of a split, in hundredths of the time that a CTA takes for a tile, some 1.5 µs. A CTA begins and ends in the time of two; so does the
/// kernel that joins, and 28 states are written and read in that of one.
fn cost(multiprocessors: u32, items: u32, tiles: u32, ctas: u32) -> u64 {
    let all = items as u64 * ctas as u64;
    let waves = all.div_ceil(multiprocessors.max(1) as u64);
    waves * (200 + 100 * tiles.div_ceil(ctas) as u64) + if ctas > 1 { 200 + all * 100 / 28 } else { 0 }
}

/// Threads of a CTA that joins so many states.
pub fn joining_threads(states: u32) -> u32 {
    32 * states.div_ceil(JOINED_AT_ONCE).next_power_of_two().min(4)
}

/// The plan of a call that fits.
pub fn plan(multiprocessors: u32, params: &Params, sizes: &Sizes) -> Option<Plan> {
    let row_blocks = params.rows.div_ceil(ROWS);
    let (items, tiles) = (sizes.lists as u32 * row_blocks, sizes.list_tokens.max(1).div_ceil(TOKENS as u64));
    let split_items = sizes.split_lists().saturating_mul(row_blocks.into()).min(u32::MAX.into()) as u32;
    let ctas = split(multiprocessors, split_items, tiles as u32);
    let params = Params {
        work_items: items,
        row_blocks: Divisor::new(row_blocks),
        ctas: Divisor::new(ctas),
        log_members: (ROWS / 8).ilog2(),
        ..*params
    };
    let states = if ctas > 1 { items as usize * ctas as usize } else { 0 };
    Some(Plan {
        params,
        entry: Entry::Mla64(sizes.element?),
        ctas: items * ctas,
        threads: THREADS,
        cluster: None,
        joining: if ctas > 1 { items * JOINING } else { 0 },
        shared: SHARED,
        is_split_first: false,
        in_boxes: false,
        scratch: Scratch::of_states(states * STATE_BYTES as usize),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Multiprocessors of an H200.
    const MULTIPROCESSORS: u32 = 132;

    #[test]
    fn lists_are_split_while_there_are_multiprocessors_for_more() {
        for (pairs, ctas) in [(2, 16), (16, 7), (32, 3), (64, 1), (128, 1)] {
            assert_eq!(split(MULTIPROCESSORS, pairs, 32), ctas, "{pairs} lists");
        }
    }

    #[test]
    fn every_cta_has_a_tile_and_every_state_a_place() {
        for pairs in [1, 2, 3, 7, 16, 63, 64, 65, 127, 128, 133, 1000] {
            for tiles in [1, 2, 3, 7, 8, 9, 32, 64, 2048, 1 << 20] {
                let ctas = split(MULTIPROCESSORS, pairs, tiles);
                assert!(ctas <= 64 && tiles.div_ceil(ctas) * (ctas - 1) < tiles, "{pairs} lists of {tiles} tiles");
                assert!(ctas == 1 || pairs * ctas * STATE_BYTES <= 16 << 20, "{pairs} lists of {tiles} tiles");
            }
        }
    }
}
