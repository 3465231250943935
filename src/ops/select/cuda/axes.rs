//! Launch of the kernels of kernels/select/axes.cu: AXIS in INT4, in one launch.

use super::{MOST_TOKENS, SelectParams, THREADS, grid, sharing};
use crate::core::status::Result;
use crate::ops::index::{self, Axes, Summary};
use crate::ops::select::Request;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::{Enqueue, Grid, Kernel, Kind, Modules};

/// They need clusters.
pub struct AxesKernels {
    /// Of D = 128 and up to 4, 8 and 16 heads.
    common: [Kernel; 3],
    /// Of every D, up to 4 and 16 heads.
    others: [Kernel; 2],
    /// Clusters of 1, 2, … CTAs that run at once, where two CTAs share a multiprocessor, and where each has its own.
    shared: [Share; 2],
    multiprocessors: usize,
}

/// What a CTA can have of a multiprocessor.
struct Share {
    /// Dynamic shared memory.
    bytes: usize,
    clusters: [usize; MOST_CTAS],
}

impl AxesKernels {
    pub fn find(modules: &Modules) -> Result<Option<AxesKernels>> {
        if !modules.has("select/axes") {
            return Ok(None);
        }
        let most = modules.facts().shared_bytes;
        let kernel = |name| {
            let kernel = modules.kernel("select/axes", name)?;
            kernel.allow_shared(most - STATIC_SHARED)?;
            kernel.allow_large_clusters()?;
            Ok(kernel)
        };
        let common = [kernel("select_axes_4_128")?, kernel("select_axes_8_128")?, kernel("select_axes_16_128")?];
        let others = [kernel("select_axes_4")?, kernel("select_axes_16")?];
        let share = |kernel: Kernel, bytes: u32| {
            let active = |n| kernel.sharing(bytes).active_clusters(n as u32 + 1, THREADS) as usize;
            Share { bytes: bytes as usize, clusters: std::array::from_fn(active) }
        };
        let half = (most + RESERVED) / 2 - RESERVED - STATIC_SHARED;
        let shared = [share(common[0], half), share(common[2], most - STATIC_SHARED)];
        Ok(Some(AxesKernels { common, others, shared, multiprocessors: modules.facts().multiprocessors as usize }))
    }

    /// Where more than one CTA of the kernel has a place beside another, the first of the shares is open to it.
    fn kernel(&self, heads: usize, dim: usize) -> (&Kernel, bool) {
        match (dim == COMMON_DIM, heads) {
            (true, ..=4) => (&self.common[0], true),
            (true, ..=8) => (&self.common[1], true),
            (true, _) => (&self.common[2], false),
            (false, ..=4) => (&self.others[0], true),
            (false, _) => (&self.others[1], false),
        }
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
        products: u32,
        partials: u32,
        queries: u32,
    }
}

/// Shared memory that the kernels declare, at most, and what the driver takes of it for each CTA.
const STATIC_SHARED: u32 = 2304;
const RESERVED: u32 = 1 << 10;
/// Blocks that are worth a CTA.
const CTA_BLOCKS: usize = 128;
/// D of the common form.
const COMMON_DIM: usize = 128;
/// MOST_HEADS, MOST_CTAS and MOST_TURNS of kernels/select/axes.cu.
const MOST_HEADS: usize = 16;
const MOST_CTAS: usize = 16;
const MOST_TURNS: usize = 3;
/// BLOCKS of kernels/select/axes.cu: of a tile.
const BLOCKS: usize = 16;
const WARPS: usize = THREADS as usize / 32;
/// What finds the best of the keys, at most: it takes the place of products.
const TOP_SHARED: usize = 9 << 10;
/// What rows of blocks on their way have in front of the next one, but for the common form.
const GAP: usize = 16;

/// How the work is cut, and where its parts of shared memory begin.
#[derive(Clone, Copy)]
pub struct AxesPlan {
    stored: usize,
    parts: usize,
    ctas: usize,
    turns: usize,
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
            heads.dim.is_multiple_of(64) && heads.dim <= 256 && heads.group() <= MOST_HEADS && sharing(r) == 1;
        if !has_form || ![&axes.axes, range].into_iter().all(|t| index::has_aligned_rows(t, 16)) {
            return None;
        }
        let stored = r.queries.index.capacity().min(MOST_TOKENS.div_ceil(r.queries.block_size));
        let can_share = kernels.kernel(heads.group(), heads.dim).1;
        let shares = &kernels.shared[if can_share { 0 } else { 1 }..];
        let fits = |plan: &AxesPlan, share: &Share| plan.bytes <= share.bytes && share.clusters[plan.ctas - 1] > 0;
        let at_once =
            |plan: &AxesPlan| shares.iter().find(|share| fits(plan, share)).map_or(0, |s| s.clusters[plan.ctas - 1]);
        let of = |ctas| (1..=MOST_TURNS).rev().map(move |turns| AxesPlan::of(r, stored, ctas, turns));
        // CTAs that run at once and have work: those that leave the busiest multiprocessor the fewest tiles, which take somewhat
        // longer where a warp's come one after the other.
        let useful = stored.div_ceil(CTA_BLOCKS).clamp(1, MOST_CTAS);
        let all_at_once = (1..=useful).rev().flat_map(of).filter(|plan| r.lists() <= at_once(plan));
        let time = |plan: &AxesPlan| {
            let tiles = (r.lists() * plan.ctas).div_ceil(kernels.multiprocessors) * plan.parts.div_ceil(plan.ctas);
            tiles * if plan.turns >= plan.rounds().min(2) { 4 } else { 5 }
        };
        let best = all_at_once.filter(|plan| plan.turns <= plan.rounds().max(1)).min_by_key(time);
        // Where there are more lists, or shared memory is short: few CTAs for each, and these side by side.
        let in_waves = || shares.iter().find_map(|share| (1..=MOST_CTAS).flat_map(of).find(|plan| fits(plan, share)));
        let plan = best.or_else(in_waves)?;
        (r.lists() <= i32::MAX as usize / plan.ctas).then_some(plan)
    }

    fn of(r: &Request, stored: usize, ctas: usize, turns: usize) -> AxesPlan {
        let heads = r.queries.heads;
        // QUARTETS and COLUMNS of the kernel.
        let quartets = match heads.group() {
            ..=4 => 1,
            ..=8 if heads.dim == COMMON_DIM => 2,
            _ => 4,
        };
        let columns = quartets + usize::div_ceil(quartets, 2);
        let gap = if heads.dim == COMMON_DIM { 0 } else { GAP };
        let on_their_way = WARPS * turns * BLOCKS * (heads.dim + heads.dim / 4 + 2 * gap);
        let parts = stored.div_ceil(BLOCKS);
        let partials = on_their_way;
        let queries = partials.saturating_add(parts.saturating_mul(4 * quartets * 2 * size_of::<f32>()));
        let keys = parts.saturating_mul(BLOCKS * size_of::<u32>());
        let products = queries.saturating_add(heads.dim / 32 * columns * 32 * 8).max(keys);
        let of_products = parts.div_ceil(ctas).saturating_mul(BLOCKS * 4 * quartets * size_of::<f32>());
        let bytes = products.saturating_add(of_products.max(TOP_SHARED));
        AxesPlan { stored, parts, ctas, turns, products, partials, queries, bytes }
    }

    /// Tiles of a warp.
    fn rounds(&self) -> usize {
        self.parts.div_ceil(self.ctas).div_ceil(WARPS)
    }
}

pub fn select(enqueue: &Enqueue, kernels: &AxesKernels, r: &Request, axes: &Axes, plan: &AxesPlan) -> Result<()> {
    let mut select = SelectParams::new(r);
    (select.place.capacity, select.slices) = (plan.stored as u32, plan.ctas as u32);
    select.by_slices = Divisor::new(plan.ctas as u32);
    let params = AxesParams {
        select,
        axes: Summary::new(Some(&axes.axes)),
        range: Summary::new(axes.range.as_ref()),
        turns: plan.turns as u32,
        parts: plan.parts as u32,
        products: plan.products as u32,
        partials: plan.partials as u32,
        queries: plan.queries as u32,
    };
    let heads = r.queries.heads;
    let kernel = kernels.kernel(heads.group(), heads.dim).0.sharing(plan.bytes as u32);
    let all = Grid { kind: Kind::DependentClusters(plan.ctas as u32), ..grid(enqueue, r.lists() * plan.ctas) };
    // SAFETY: AxesParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything, but for bringing summaries to the L2 cache.
    unsafe { enqueue.launch(&kernel, all, [(&raw const params).cast()]) }
}
