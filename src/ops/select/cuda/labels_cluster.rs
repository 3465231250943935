//! Launch of the kernels of kernels/select/labels_cluster.cuh: LABEL_MASS and selection of tokens, of lists that fit in a cluster.

use super::labels_general::{LabelParams, given, places};
use super::params::{SelectParams, THREADS, grid, sharing};
use crate::core::status::Result;
use crate::ops::index::Labels;
use crate::ops::select::Request;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::has_aligned_rows;
use crate::runtime::cuda::{Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules};

/// Kept channels for which there are kernels.
const KEPT: [usize; 3] = [32, 64, 128];

/// The kernels, which need clusters.
pub struct LabelClusterKernels {
    /// Kernels for each number of kept channels.
    tokens: [Kernel; KEPT.len()],
    blocks: [Kernel; KEPT.len()],
    /// Clusters of 1, 2, … CTAs that run at once.
    clusters: [usize; 4],
    /// Dynamic shared memory that a CTA can have.
    shared: usize,
}

impl LabelClusterKernels {
    pub fn find(modules: &Modules) -> Result<Option<LabelClusterKernels>> {
        if !modules.has("select/labels_cluster") {
            return Ok(None);
        }
        let shared = modules.facts().shared_bytes - STATIC_SHARED;
        let kernel = |name| {
            let kernel = modules.kernel("select/labels_cluster", name)?;
            kernel.allow_shared(shared)?;
            Ok(kernel)
        };
        let tokens = [
            kernel("select_labels_cluster_tokens_32")?,
            kernel("select_labels_cluster_tokens_64")?,
            kernel("select_labels_cluster_tokens_128")?,
        ];
        let blocks = [
            kernel("select_labels_cluster_blocks_32")?,
            kernel("select_labels_cluster_blocks_64")?,
            kernel("select_labels_cluster_blocks_128")?,
        ];
        let sizes = [1, 2, 4, LARGEST_CLUSTER];
        let clusters = sizes.map(|size| tokens[0].sharing(shared).active_clusters(size, THREADS) as usize);
        Ok(Some(LabelClusterKernels { tokens, blocks, clusters, shared: shared as usize }))
    }
}

kernel_struct! {
    /// Mirrors LabelClusterParams of kernels/select/params.cuh.
    pub struct LabelClusterParams {
        labels: LabelParams,
        by_units: Divisor,
        unit: u32,
        unit_blocks: u32,
        pitch: u32,
        tiles: u32,
        lanes: u32,
        products: u32,
        partials: u32,
        queries: u32,
    }
}

/// Shared memory that the kernels declare, at most.
const STATIC_SHARED: u32 = 37 << 10;
/// TOKENS of kernels/select/labels_cluster.cuh: of a warp, at a time.
const TOKENS: usize = 64;
/// Tokens that are worth a CTA.
const CTA_TOKENS: usize = TOKENS * THREADS as usize / 32;
/// HEADS and MOST_HEADS of kernels/select/labels_cluster.cuh: of a tile, of a list.
const HEADS: usize = 4;
const MOST_HEADS: usize = 16;
/// Bytes of a channel of a query there: three digits, the last one twice.
const DIGITS: usize = 4;
/// SHARED_CANDIDATES of kernels/select/labels_cluster.cuh.
const SHARED_CANDIDATES: usize = 2048;
/// The largest share of a list that must stay in one CTA.
const MOST_UNIT: usize = 512;

/// The split of a call's work, and where its parts of shared memory begin.
#[derive(Clone, Copy)]
pub struct LabelClusterPlan {
    of_blocks: bool,
    kernel: usize,
    ctas: usize,
    unit: usize,
    pitch: usize,
    tiles: usize,
    products: usize,
    partials: usize,
    queries: usize,
    bytes: usize,
}

impl LabelClusterPlan {
    /// Fails with the reason for a form that the kernels do not have: that depends on the lists, not on how many they are.
    pub fn new(
        kernels: Option<&LabelClusterKernels>,
        r: &Request,
        labels: &Labels,
        of_blocks: bool,
    ) -> std::result::Result<LabelClusterPlan, &'static str> {
        let (kernels, heads, block_size) =
            (kernels.ok_or("the device has no clusters")?, r.queries.heads, r.queries.block_size);
        let kernel =
            KEPT.iter().position(|&kept| kept == labels.kept()).ok_or("kept channels are none of 32, 64, 128")?;
        if sharing(r) != 1 {
            return Err("several query positions share a list");
        }
        if heads.group() > MOST_HEADS {
            return Err("a KV head has more than 16 query heads");
        }
        if given(r).cap() > SHARED_CANDIDATES {
            return Err("there may be more than 2048 candidates");
        }
        if !has_aligned_rows(&labels.codes, 16) {
            return Err("rows of codes are no runs of 16-byte units");
        }
        // Whole blocks, where they are selected, and whole chunks of tokens.
        let whole = |block_size: usize| block_size.checked_mul(TOKENS / divisor(block_size, TOKENS));
        let unit = if of_blocks { whole(block_size) } else { Some(TOKENS) };
        let unit =
            unit.filter(|&unit| unit <= MOST_UNIT).ok_or("blocks and chunks of 64 tokens rarely end together")?;
        let chunks = places(r).div_ceil(CTA_TOKENS);
        // As many CTAs as run at once and have work; more where shared memory is short.
        let enough =
            |n: usize| 1 << n >= chunks || kernels.clusters.get(n + 1).is_none_or(|&active| r.lists() > active);
        let least = (0..kernels.clusters.len()).find(|&n| enough(n)).unwrap_or(0);
        let sizes = (least..kernels.clusters.len()).filter(|&n| kernels.clusters[n] > 0);
        let mut plans = sizes.map(|n| LabelClusterPlan::of(r, labels, of_blocks, kernel, unit, 1 << n));
        let fits = |plan: &LabelClusterPlan| plan.bytes <= kernels.shared && r.lists() <= i32::MAX as usize / plan.ctas;
        plans.find(fits).ok_or("shared memory or clusters of the device do not suffice")
    }

    fn of(r: &Request, labels: &Labels, of_blocks: bool, kernel: usize, unit: usize, ctas: usize) -> LabelClusterPlan {
        let (heads, places) = (r.queries.heads, places(r));
        let tiles = heads.group().div_ceil(HEADS);
        let pitch = tiles * HEADS;
        let (chunks, share) = (places.div_ceil(TOKENS), places.div_ceil(ctas * unit) * unit);
        // A CTA's own: blocks for which the index has no room are all the last one's.
        let scores = if of_blocks { given(r).cap() } else { share };
        // Queries in float32 lie where scores come later.
        let products = scores.max(heads.group() * heads.dim).saturating_mul(size_of::<f32>()).next_multiple_of(16);
        let partials = products.saturating_add(share.saturating_mul(pitch * size_of::<f32>()));
        let of_chunks = chunks.saturating_mul(pitch * 2 * size_of::<f32>());
        let queries = partials.saturating_add(of_chunks);
        let bytes = queries.saturating_add(tiles * HEADS * labels.kept() * DIGITS);
        LabelClusterPlan { of_blocks, kernel, ctas, unit, pitch, tiles, products, partials, queries, bytes }
    }
}

/// The greatest that divides both.
fn divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { divisor(b, a % b) }
}

pub fn select(
    enqueue: &Enqueue,
    kernels: &LabelClusterKernels,
    r: &Request,
    labels: &Labels,
    plan: &LabelClusterPlan,
) -> Result<()> {
    let mut select = SelectParams::new(r);
    (select.slices, select.by_slices) = (plan.ctas as u32, Divisor::new(plan.ctas as u32));
    let block_size = r.queries.block_size;
    let params = LabelClusterParams {
        labels: LabelParams::new(select, r, labels),
        by_units: Divisor::new((plan.ctas * plan.unit) as u32),
        unit: plan.unit as u32,
        unit_blocks: if plan.of_blocks { (plan.unit / block_size) as u32 } else { 0 },
        pitch: plan.pitch as u32,
        tiles: plan.tiles as u32,
        // Two tokens each: then all blocks of 1024 tokens go at once.
        lanes: (block_size.next_power_of_two() / 2).clamp(1, 32) as u32,
        products: plan.products as u32,
        partials: plan.partials as u32,
        queries: plan.queries as u32,
    };
    let of_kept = if plan.of_blocks { &kernels.blocks } else { &kernels.tokens };
    let kernel = of_kept[plan.kernel].sharing(plan.bytes as u32);
    let all = Grid { kind: Kind::DependentClusters(plan.ctas as u32), ..grid(enqueue, r.lists() * plan.ctas) };
    // SAFETY: LabelClusterParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything.
    unsafe { enqueue.launch(&kernel, all, [(&raw const params).cast()]) }
}
