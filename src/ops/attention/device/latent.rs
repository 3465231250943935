//! The plan of kernels/attention/latent.cuh: a cluster of CTAs for each list and 16 of its rows.

use super::params::Params;
use super::plan::{Element, Engine, FACTS_BYTES, Plan, Scratch, THREADS, TILE, values_are_keys};
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::{Kernel, LARGEST_CLUSTER};

const ROWS: u32 = 16;
const TILES: u32 = 4;
const STAGES: u32 = 2;
const KEY_CHANNELS: u32 = 576;
/// Products of a step: of eight warps, 16 rows and 16 tokens each.
const SUMS_BYTES: u32 = 8 * ROWS * TILE * size_of::<f32>() as u32;

/// How many clusters of 2, 4, 8 and 16 CTAs that fill a multiprocessor each run at once.
#[derive(Clone, Copy)]
pub struct Clusters([u32; 4]);

impl Clusters {
    /// The context is current.
    pub fn of(kernel: &Kernel) -> Clusters {
        const SHARED: u32 = 160 << 10;
        let kernel = kernel.sharing(SHARED);
        Clusters([2, 4, LARGEST_CLUSTER, 2 * LARGEST_CLUSTER].map(|ctas| kernel.active_clusters(ctas, THREADS)))
    }

    /// Not all devices have a cluster of 16.
    pub fn exist(&self) -> bool {
        self.0[..3].iter().all(|&clusters| clusters > 0)
    }

    /// CTAs of the largest that there are as many of as pairs, all at once.
    pub fn of_pairs(&self, pairs: u32) -> u32 {
        let fits = self.0.iter().rposition(|&clusters| pairs <= clusters);
        fits.map_or(1, |n| 2 << n)
    }
}

/// `None` where the kernel does not take these tensors. `tokens` is the length of a full list.
pub fn plan(clusters: &Clusters, params: &Params, element: Element, lists: usize, tokens: u64) -> Option<Plan> {
    // What it is proven for: a position a sequence, lists of whole tiles or none, neither window nor cap.
    let is_plain = params.positions == 1 && params.q_lens.data.is_null() && 1 << params.log_granule == TILE;
    let is_taken = is_plain
        && params.window == 0
        && params.soft_cap == 0.0
        && values_are_keys(params)
        && params.partials.acc.data.is_null()
        && element != Element::Fp8;
    let row_blocks = params.rows.div_ceil(ROWS);
    let pairs = lists as u64 * row_blocks as u64;
    if !is_taken || pairs * tokens.max(1).div_ceil(TILE as u64) >= 1 << 27 {
        return None;
    }
    let pairs = pairs as u32;
    let ctas = clusters.of_pairs(pairs);
    let octets = (params.value_dim / 8).div_ceil(ctas).next_power_of_two();
    let stage_bytes = FACTS_BYTES + TILE * (KEY_CHANNELS * 2 + 16);
    let ring = TILES * STAGES * stage_bytes;
    let received = ctas * (octets * 8 + 2) * ROWS * size_of::<f32>() as u32;
    let params = Params {
        pairs,
        row_blocks: Divisor::new(row_blocks),
        log_members: (ROWS / 8).ilog2(),
        kept_rows: ROWS,
        stages: STAGES,
        log_octets: octets.ilog2(),
        v_offset: 0,
        stage_bytes,
        q_offset: ring,
        totals_offset: ring + received,
        ..*params
    };
    Some(Plan {
        params,
        engine: Engine::Latent(element),
        ctas: pairs * ctas,
        threads: THREADS,
        cluster: Some(ctas),
        shared: ring + received + SUMS_BYTES,
        is_cut_apart: false,
        scratch: Scratch::default(),
    })
}
