//! The plan of kernels/attention/mla16.cuh: for each list and 16 of its rows some clusters of CTAs.

use super::params::Params;
use super::plan::{Entry, Plan, Scratch, Sizes, THREADS, TILE};
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::{Kernel, LARGEST_CLUSTER};

/// Rows of a work item.
pub const ROWS: u32 = 16;
const ROW_BYTES: u32 = 576 * 2 + 16;
/// Groups of 8 channels that values have.
const CHANNEL_GROUPS: u32 = 512 / 8;
/// The ring, the weights of a step; queries, and in their place the state of all rows and each CTA's maxima and sums.
const SHARED: u32 = 5 * 2 * TILE * ROW_BYTES
    + 2048
    + ROWS * 512 * size_of::<f32>() as u32
    + LARGEST_CLUSTER * 2 * ROWS * size_of::<f32>() as u32;
/// Clusters whose slices a CTA asks for at once.
const JOINED_AT_ONCE: u32 = 8;

/// How many clusters of 1, 2, 4 and 8 CTAs, one on a multiprocessor, run at once.
#[derive(Clone, Copy)]
pub struct Clusters([u32; 4]);

impl Clusters {
    /// The context is current.
    pub fn of(kernel: &Kernel) -> Clusters {
        let kernel = kernel.sharing(SHARED);
        Clusters([1, 2, 4, LARGEST_CLUSTER].map(|ctas| kernel.active_clusters(ctas, THREADS)))
    }

    pub fn exist(&self) -> bool {
        self.0.iter().all(|&clusters| clusters > 0)
    }

    /// CTAs of a cluster, and clusters for each of so many work items, which have `tiles` at most. All run at once, or there is a
    /// CTA for each work item.
    fn split(&self, items: u32, tiles: u32) -> (u32, u32) {
        let splits = (1..4).rev().flat_map(|log| {
            let (ctas, most) = (1 << log, self.0[log] / items.max(1));
            let counts =
                [1, most.min(JOINED_AT_ONCE), most].into_iter().filter(move |&count| count > 0 && count <= most);
            counts.map(move |count| {
                // No more than have a tile less each for it.
                let tiles_of_cta = tiles.div_ceil(ctas * count);
                (ctas, tiles.div_ceil(ctas * tiles_of_cta))
            })
        });
        splits.chain([(1, 1)]).min_by_key(|&(ctas, clusters)| cost(tiles, ctas, clusters)).unwrap_or((1, 1))
    }
}

/// The cost of a split, in units of the time that a CTA takes for a tile. Clusters of fewer CTAs have wider slices, which several
/// clusters join one after the other: some 2 µs, and another for each round trip.
fn cost(tiles: u32, ctas: u32, clusters: u32) -> u32 {
    let join = 4 + 2 * (LARGEST_CLUSTER / ctas) * clusters.div_ceil(JOINED_AT_ONCE);
    tiles.div_ceil(ctas * clusters) + if clusters > 1 { join } else { 0 }
}

/// The plan of a call that fits.
pub fn plan(clusters: &Clusters, params: &Params, sizes: &Sizes) -> Option<Plan> {
    let row_blocks = params.rows.div_ceil(ROWS);
    let (items, tiles) = (sizes.lists as u32 * row_blocks, sizes.list_tokens.max(1).div_ceil(TILE as u64));
    let split_items = sizes.split_lists().saturating_mul(row_blocks.into()).min(u32::MAX.into()) as u32;
    let (ctas, clusters) = clusters.split(split_items, tiles as u32);
    let groups = CHANNEL_GROUPS / ctas;
    let params = Params {
        work_items: items,
        row_blocks: Divisor::new(row_blocks),
        ctas: Divisor::new(ctas * clusters),
        log_members: (ROWS / 8).ilog2(),
        log_share: groups.ilog2(),
        ..*params
    };
    let slice_bytes = (groups * 8 + 2) * ROWS * size_of::<f32>() as u32;
    let slices = if clusters > 1 { items as usize * (ctas * clusters) as usize } else { 0 };
    Some(Plan {
        params,
        entry: Entry::Mla16(sizes.element?),
        ctas: items * ctas * clusters,
        threads: THREADS,
        cluster: Some(ctas),
        joining: 0,
        shared: SHARED,
        is_split_first: false,
        in_boxes: false,
        scratch: Scratch::of_states(slices * slice_bytes as usize),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clusters that an H200 runs at once.
    const CLUSTERS: Clusters = Clusters([132, 66, 30, 15]);

    #[test]
    fn lists_are_split_as_was_fastest_where_measured() {
        let of_2048_tokens = |pairs| CLUSTERS.split(pairs, 128);
        let fastest = [(1, (8, 8)), (4, (8, 3)), (8, (8, 1)), (16, (2, 4)), (32, (2, 2)), (64, (2, 1)), (128, (1, 1))];
        for (pairs, cut) in fastest {
            assert_eq!(of_2048_tokens(pairs), cut, "{pairs} lists");
        }
    }

    #[test]
    fn every_split_runs_at_once_and_has_no_cta_without_a_tile() {
        for pairs in [0, 1, 2, 3, 7, 15, 16, 30, 31, 65, 66, 67, 132] {
            for tiles in [1, 2, 7, 8, 9, 64, 128, 8192] {
                let (ctas, clusters) = CLUSTERS.split(pairs, tiles);
                assert!(pairs * clusters <= CLUSTERS.0[ctas.ilog2() as usize], "{pairs} lists of {tiles} tiles");
                assert!(clusters == 1 || ctas * (clusters - 1) < tiles, "{pairs} lists of {tiles} tiles");
            }
        }
        assert_eq!(CLUSTERS.split(133, 128), (1, 1));
    }
}
