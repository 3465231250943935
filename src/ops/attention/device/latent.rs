//! The plan of kernels/attention/latent.cuh: for each list and 16 of its rows some clusters of CTAs.

use super::params::Params;
use super::plan::{Element, Engine, Plan, Scratch, THREADS, TILE, values_are_keys};
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::{Kernel, LARGEST_CLUSTER};

const ROWS: u32 = 16;
const ROW_BYTES: u32 = 576 * 2 + 16;
const VALUE_OCTETS: u32 = 512 / 8;
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

    /// CTAs of a cluster, and clusters for each of so many pairs, which have `tiles` at most. All run at once, or there is a CTA for
    /// each pair.
    fn cut(&self, pairs: u32, tiles: u32) -> (u32, u32) {
        let cuts = (1..4).rev().flat_map(|log| {
            let (ctas, most) = (1 << log, self.0[log] / pairs.max(1));
            let counts =
                [1, most.min(JOINED_AT_ONCE), most].into_iter().filter(move |&count| count > 0 && count <= most);
            counts.map(move |count| {
                // No more than have a tile less each for it.
                let tiles_of_cta = tiles.div_ceil(ctas * count);
                (ctas, tiles.div_ceil(ctas * tiles_of_cta))
            })
        });
        cuts.chain([(1, 1)]).min_by_key(|&(ctas, clusters)| cost(tiles, ctas, clusters)).unwrap_or((1, 1))
    }
}

/// Of a cut, in units of the time that a CTA takes for a tile. Clusters of fewer CTAs have wider slices, which several join one
/// after the other: some 2 µs, and another for each round trip.
fn cost(tiles: u32, ctas: u32, clusters: u32) -> u32 {
    let join = 4 + 2 * (LARGEST_CLUSTER / ctas) * clusters.div_ceil(JOINED_AT_ONCE);
    tiles.div_ceil(ctas * clusters) + if clusters > 1 { join } else { 0 }
}

/// What the kernels for latents are proven for: a position a sequence, neither window nor cap.
pub fn are_latents(params: &Params, element: Element) -> bool {
    let is_plain = params.positions == 1 && params.q_lens.data.is_null();
    is_plain
        && params.window == 0
        && params.soft_cap == 0.0
        && values_are_keys(params)
        && params.partials.acc.data.is_null()
        && element != Element::Fp8
}

/// `None` where the kernel does not take these tensors. `tokens` is the length of a full list.
pub fn plan(clusters: &Clusters, params: &Params, element: Element, lists: usize, tokens: u64) -> Option<Plan> {
    let row_blocks = params.rows.div_ceil(ROWS);
    let (pairs, tiles) = (lists as u64 * row_blocks as u64, tokens.max(1).div_ceil(TILE as u64));
    if !are_latents(params, element) || pairs * tiles >= 1 << 27 {
        return None;
    }
    let pairs = pairs as u32;
    let (ctas, clusters) = clusters.cut(pairs, tiles as u32);
    let octets = VALUE_OCTETS / ctas;
    let params = Params {
        work_items: pairs,
        row_blocks: Divisor::new(row_blocks),
        ctas: Divisor::new(ctas * clusters),
        log_members: (ROWS / 8).ilog2(),
        log_share: octets.ilog2(),
        ..*params
    };
    let slice_bytes = (octets * 8 + 2) * ROWS * size_of::<f32>() as u32;
    let slices = if clusters > 1 { pairs * ctas * clusters } else { 0 };
    Some(Plan {
        params,
        engine: Engine::Latent(element),
        ctas: pairs * ctas * clusters,
        threads: THREADS,
        cluster: Some(ctas),
        joining: 0,
        shared: SHARED,
        is_cut_apart: false,
        scratch: Scratch::of_states((slices * slice_bytes) as usize),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an H200.
    const CLUSTERS: Clusters = Clusters([132, 66, 30, 15]);

    #[test]
    fn lists_are_cut_as_was_fastest_where_measured() {
        let of_2048_tokens = |pairs| CLUSTERS.cut(pairs, 128);
        let fastest = [(1, (8, 8)), (4, (8, 3)), (8, (8, 1)), (16, (2, 4)), (32, (2, 2)), (64, (2, 1)), (128, (1, 1))];
        for (pairs, cut) in fastest {
            assert_eq!(of_2048_tokens(pairs), cut, "{pairs} lists");
        }
    }

    #[test]
    fn every_cut_runs_at_once_and_has_no_cta_without_a_tile() {
        for pairs in [0, 1, 2, 3, 7, 15, 16, 30, 31, 65, 66, 67, 132] {
            for tiles in [1, 2, 7, 8, 9, 64, 128, 8192] {
                let (ctas, clusters) = CLUSTERS.cut(pairs, tiles);
                assert!(pairs * clusters <= CLUSTERS.0[ctas.ilog2() as usize], "{pairs} lists of {tiles} tiles");
                assert!(clusters == 1 || ctas * (clusters - 1) < tiles, "{pairs} lists of {tiles} tiles");
            }
        }
        assert_eq!(CLUSTERS.cut(133, 128), (1, 1));
    }
}
