//! Launch of the kernels of kernels/select/axes.cu: AXIS in INT4, in one launch.

use super::{MOST_TOKENS, SelectParams, THREADS, grid, sharing};
use crate::core::dtype::DType;
use crate::core::status::Result;
use crate::ops::index::{self, Axes, Summary};
use crate::ops::select::Request;
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::{Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules};

/// They need clusters.
pub struct AxesKernels {
    /// Of bfloat16 and of other queries, of one tile of heads and of two.
    bf16: [Kernel; 2],
    others: [Kernel; 2],
    /// Clusters of 1, 2, … CTAs that run at once.
    clusters: [usize; 5],
    /// Dynamic shared memory that a CTA can have.
    shared: usize,
}

impl AxesKernels {
    pub fn find(modules: &Modules) -> Result<Option<AxesKernels>> {
        if !modules.has("select/axes") {
            return Ok(None);
        }
        let shared = modules.facts().shared_bytes - STATIC_SHARED;
        let kernel = |name| {
            let kernel = modules.kernel("select/axes", name)?;
            kernel.allow_shared(shared)?;
            kernel.allow_large_clusters()?;
            Ok(kernel)
        };
        let bf16 = [kernel("select_axes_8_bf16")?, kernel("select_axes_16_bf16")?];
        let others = [kernel("select_axes_8")?, kernel("select_axes_16")?];
        let sizes = [1, 2, 4, LARGEST_CLUSTER, 2 * LARGEST_CLUSTER];
        let clusters = sizes.map(|size| others[1].sharing(shared).active_clusters(size, THREADS) as usize);
        Ok(Some(AxesKernels { bf16, others, clusters, shared: shared as usize }))
    }
}

kernel_struct! {
    /// Mirrors AxesParams of kernels/select/params.cuh.
    pub struct AxesParams {
        select: SelectParams,
        axes: Summary,
        range: Summary,
        turns: u32,
        parts: u32,
        pitch: u32,
        products: u32,
        partials: u32,
        queries: u32,
    }
}

/// Shared memory that the kernels declare, at most.
const STATIC_SHARED: u32 = 20 << 10;
/// Blocks that are worth a CTA.
const CTA_BLOCKS: usize = 64;
/// HEADS of kernels/select/axes.cu: of a tile.
const HEADS: usize = 8;
/// BLOCKS and MOST_TURNS of kernels/select/axes.cu: of a warp, on their way.
const BLOCKS: usize = 16;
const MOST_TURNS: usize = 2;
/// What rows of blocks on their way have in front of the next one.
const GAP: usize = 16;

/// How the work is cut, and where its parts of shared memory begin.
#[derive(Clone, Copy)]
pub struct AxesPlan {
    stored: usize,
    parts: usize,
    tiles: usize,
    terms: usize,
    ctas: usize,
    turns: usize,
    pitch: usize,
    products: usize,
    partials: usize,
    queries: usize,
    bytes: usize,
}

impl AxesPlan {
    /// `None` for a form that the kernels do not have.
    pub fn new(kernels: Option<&AxesKernels>, r: &Request, axes: &Axes) -> Option<AxesPlan> {
        let (kernels, range, heads) = (kernels?, axes.range.as_ref()?, r.queries.heads);
        let has_form =
            heads.dim.is_multiple_of(64) && heads.dim <= 256 && heads.group() <= 2 * HEADS && sharing(r) == 1;
        if !has_form || ![&axes.axes, range].into_iter().all(|t| index::has_aligned_rows(t, 16)) {
            return None;
        }
        let stored = r.queries.index.capacity().min(MOST_TOKENS.div_ceil(r.queries.block_size));
        let chunks = stored.div_ceil(CTA_BLOCKS);
        let sizes = (0..kernels.clusters.len()).filter(|&n| kernels.clusters[n] > 0);
        // As many CTAs as run at once and have work; more where shared memory is short.
        let enough =
            |n: usize| 1 << n >= chunks || kernels.clusters.get(n + 1).is_none_or(|&active| r.lists() > active);
        let least = (0..kernels.clusters.len()).find(|&n| enough(n))?;
        let plans = sizes
            .filter(|&n| n >= least)
            .flat_map(|n| (1..=MOST_TURNS).rev().map(move |turns| AxesPlan::of(r, stored, 1 << n, turns)));
        let fits = |plan: &AxesPlan| plan.bytes <= kernels.shared;
        plans.filter(fits).find(|plan| r.lists() <= i32::MAX as usize / plan.ctas)
    }

    fn of(r: &Request, stored: usize, ctas: usize, turns: usize) -> AxesPlan {
        let (heads, q) = (r.queries.heads, r.queries.positions.q.dtype);
        // TERMS of the kernels for bfloat16 and for others.
        let terms = if q == DType::BF16 { 1 } else { 3 };
        let (tiles, pitch) = (heads.group().div_ceil(HEADS), heads.group().next_multiple_of(4));
        let on_their_way = THREADS as usize / 32 * turns * BLOCKS * (heads.dim + heads.dim / 4 + 2 * GAP);
        let products = on_their_way.max(stored.saturating_mul(size_of::<f32>()).next_multiple_of(16));
        let parts = stored.div_ceil(BLOCKS);
        let share = parts.div_ceil(ctas) * BLOCKS;
        let partials = products.saturating_add(share.saturating_mul(pitch * size_of::<f32>()));
        let of_parts = parts.saturating_mul(heads.group() * 2 * size_of::<f32>()).next_multiple_of(16);
        let queries = partials.saturating_add(of_parts);
        let bytes = queries.saturating_add(terms * tiles * HEADS * heads.dim * 2);
        AxesPlan { stored, parts, tiles, terms, ctas, turns, pitch, products, partials, queries, bytes }
    }
}

pub fn select(enqueue: &Enqueue, kernels: &AxesKernels, r: &Request, axes: &Axes, plan: &AxesPlan) -> Result<()> {
    let mut select = SelectParams::new(r);
    (select.place.capacity, select.slices) = (plan.stored as u32, plan.ctas as u32);
    let params = AxesParams {
        select,
        axes: Summary::new(Some(&axes.axes)),
        range: Summary::new(axes.range.as_ref()),
        turns: plan.turns as u32,
        parts: plan.parts as u32,
        pitch: plan.pitch as u32,
        products: plan.products as u32,
        partials: plan.partials as u32,
        queries: plan.queries as u32,
    };
    let of_tiles = if plan.terms == 1 { &kernels.bf16 } else { &kernels.others };
    let kernel = of_tiles[plan.tiles - 1].sharing(plan.bytes as u32);
    let all = Grid { kind: Kind::DependentClusters(plan.ctas as u32), ..grid(enqueue, r.lists() * plan.ctas) };
    // SAFETY: AxesParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything.
    unsafe { enqueue.launch(&kernel, all, [(&raw const params).cast()]) }
}
