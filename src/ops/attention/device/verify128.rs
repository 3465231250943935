//! The plan of kernels/attention/verify128.cuh: units of all lists are split evenly among clusters of CTAs.

use std::ops::RangeInclusive;

use super::mma::{CTA_SHARE_BYTES, FEW_ITEMS};
use super::params::Params;
use super::plan::{Entry, Plan, Scratch, Sizes};
use crate::runtime::cuda::Kernel;
use crate::runtime::cuda::layout::Divisor;

/// Rows of a work item.
pub const ROWS: u32 = 64;
/// Fewer rows are taken as fast by mma where decode128 does not take them.
pub const FEWEST_ROWS: u32 = 9;
/// Tokens of all lists of dense attention, and of each, where it is the fastest for fewer rows, too.
pub const DENSE_TOKENS: RangeInclusive<u64> = 1 << 19..=1 << 21;
pub const LONG_TOKENS: u64 = 4 << 10;
pub const CHANNELS: u32 = 128;
const THREADS: u32 = 384;
/// Units, of a tile each, of a stage.
const STAGE_UNITS: u32 = 4;
/// Stages of 64 tokens with keys and values; queries; the states of rows that a cluster sends, padded.
pub const SHARED: u32 =
    5 * 2 * 64 * CHANNELS * 2 + ROWS * CHANNELS * 2 + ROWS * (CHANNELS + 4) * size_of::<f32>() as u32;
/// Shorter lists are sooner done by larger clusters, whose CTAs join sooner.
const SHORT_TOKENS: u64 = 8 << 10;

/// How many clusters of 1, 2 and 4 CTAs, one on a multiprocessor, run at once.
#[derive(Clone, Copy, Debug)]
pub struct Clusters([u32; 3]);

impl Clusters {
    /// The context is current.
    pub fn of(kernel: &Kernel) -> Clusters {
        let kernel = kernel.sharing(SHARED);
        Clusters([1, 2, 4].map(|ctas| kernel.active_clusters(ctas, THREADS)))
    }

    pub fn exist(&self) -> bool {
        self.0.iter().all(|&clusters| clusters > 0)
    }

    /// CTAs of a cluster, and how many such clusters run at once. Where every work item has a cluster alone, there is least to join
    /// with the smallest; otherwise a cluster of two halves the number of states that go through scratch.
    fn choose(&self, items: u32, list_tokens: u64) -> (u32, u32) {
        let [single, pairs, fours] = self.0;
        if items > pairs {
            (1, single)
        } else if list_tokens <= SHORT_TOKENS && items.saturating_mul(3) <= fours {
            (4, fours)
        } else {
            (2, pairs)
        }
    }
}

/// The plan of a call that fits.
pub fn plan(clusters: &Clusters, params: &Params, sizes: &Sizes) -> Option<Plan> {
    let row_blocks = params.rows.div_ceil(ROWS);
    let items = sizes.lists as u32 * row_blocks;
    let (ctas, at_once) = clusters.choose(items, sizes.list_tokens);
    let are_few = items <= FEW_ITEMS;
    let target = at_once.saturating_sub(items).max(at_once / 2).max(1);
    let params = Params {
        work_items: items,
        row_blocks: Divisor::new(row_blocks),
        log_members: (ROWS / 8).ilog2(),
        target_chunks: Divisor::new(target),
        least_units: STAGE_UNITS * ctas,
        ..*params
    };
    let most_chunks = (sizes.units as u32).div_ceil(params.least_units).max(1);
    let chunks = (items + target).min(items.saturating_mul(most_chunks));
    let states = if are_few { chunks } else { 2 * target };
    let state_bytes = params.rows.next_multiple_of(2).min(ROWS) * (CHANNELS + 2) * size_of::<f32>() as u32;
    let shares = if are_few { 0 } else { chunks as usize * CTA_SHARE_BYTES };
    Some(Plan {
        params,
        entry: Entry::Verify128(sizes.element?),
        ctas: chunks * ctas,
        threads: THREADS,
        cluster: Some(ctas),
        joining: 0,
        shared: SHARED,
        is_split_first: !are_few,
        scratch: Scratch { shares: shares.next_multiple_of(256), states: states as usize * state_bytes as usize },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_are_of_the_size_that_was_fastest_where_measured() {
        // Those that an H200 runs at once.
        let clusters = Clusters([132, 66, 30]);
        for (items, tokens, ctas) in [
            (8, 4096, 4),
            (8, 8192, 4),
            (8, 1 << 15, 2),
            (8, 1 << 17, 2),
            (64, 4096, 2),
            (64, 1 << 17, 2),
            (128, 1 << 15, 1),
        ] {
            assert_eq!(clusters.choose(items, tokens).0, ctas, "{items} lists of {tokens} tokens");
        }
    }
}
