//! Launch of the kernels of kernels/select/axis_cluster.cuh: AXIS in INT4, in one launch. And what those for long lists share with them.

use super::{MOST_TOKENS, SelectParams, THREADS, grid, sharing};
use crate::core::status::Result;
use crate::ops::index::Axes;
use crate::ops::select::Request;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{Summary, has_aligned_rows};
use crate::runtime::cuda::{Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules};

/// They need clusters.
pub struct AxesKernels {
    kernels: TileKernels,
    /// As the first of these, where each CTA has a multiprocessor of its own.
    few: Kernel,
    /// Where two CTAs share a multiprocessor, and where each has its own.
    pub shares: [Share; 2],
}

/// A kernel for each form of kernels/select/axis_tiles.cuh.
pub struct TileKernels {
    /// Of D = 128 and up to 4, 8 and 16 heads.
    common: [Kernel; 3],
    /// Of every D, up to 4 and 16 heads.
    others: [Kernel; 2],
}

impl TileKernels {
    /// `common` and `others` are their names. `declared`: what they declare of shared memory, at most.
    pub fn find(
        modules: &Modules,
        source: &str,
        [common, others]: [&[&'static str]; 2],
        declared: u32,
    ) -> Result<TileKernels> {
        let kernel = |name| TileKernels::kernel(modules, source, name, declared);
        Ok(TileKernels {
            common: [kernel(common[0])?, kernel(common[1])?, kernel(common[2])?],
            others: [kernel(others[0])?, kernel(others[1])?],
        })
    }

    fn kernel(modules: &Modules, source: &str, name: &'static str, declared: u32) -> Result<Kernel> {
        let kernel = modules.kernel(source, name)?;
        kernel.allow_shared(modules.facts().shared_bytes - declared)?;
        kernel.allow_large_clusters()?;
        Ok(kernel)
    }

    pub fn all(&self) -> impl Iterator<Item = &Kernel> {
        self.common.iter().chain(&self.others)
    }

    pub fn of(&self, form: &Form) -> &Kernel {
        match form.is_common {
            true => &self.common[form.quartets.ilog2() as usize],
            false => &self.others[(form.quartets > 1) as usize],
        }
    }
}

/// What a CTA can have of a multiprocessor.
pub struct Share {
    /// Dynamic shared memory.
    pub bytes: usize,
    /// Clusters of 1, 2, … CTAs that run at once.
    pub clusters: [usize; MOST_CTAS],
}

impl Share {
    /// Where two CTAs of the first kernel share a multiprocessor, and where each of the second has its own.
    pub fn both(modules: &Modules, kernels: [&Kernel; 2], declared: u32) -> [Share; 2] {
        let most = modules.facts().shared_bytes;
        let share = |kernel: &Kernel, bytes: u32| {
            let active = |n| kernel.sharing(bytes).active_clusters(n as u32 + 1, THREADS) as usize;
            Share { bytes: bytes as usize, clusters: std::array::from_fn(active) }
        };
        let half = (most + RESERVED) / 2 - RESERVED - declared;
        [share(kernels[0], half), share(kernels[1], most - declared)]
    }
}

impl AxesKernels {
    pub fn find(modules: &Modules) -> Result<Option<AxesKernels>> {
        if !modules.has("select/axis_cluster") {
            return Ok(None);
        }
        let common = ["select_axis_cluster_4_128", "select_axis_cluster_8_128", "select_axis_cluster_16_128"];
        let others = ["select_axis_cluster_4", "select_axis_cluster_16"];
        let kernels = TileKernels::find(modules, "select/axis_cluster", [&common, &others], STATIC_SHARED)?;
        let few = TileKernels::kernel(modules, "select/axis_cluster", "select_axis_cluster_alone_128", STATIC_SHARED)?;
        let shares = Share::both(modules, [&kernels.common[0], &few], STATIC_SHARED);
        Ok(Some(AxesKernels { kernels, few, shares }))
    }
}

kernel_struct! {
    /// Mirrors AxisTileParams of kernels/select/params.cuh.
    pub struct AxisTileParams {
        select: SelectParams,
        axes: Summary,
        range: Summary,
        stages: u32,
        most_tiles: u32,
        products: u32,
        partials: u32,
        queries: u32,
        keys: u32,
    }
}

/// Shared memory that the kernels declare, at most, and what the driver takes of it for each CTA.
const STATIC_SHARED: u32 = 2304;
pub const RESERVED: u32 = 1 << 10;
/// D of the common form.
const COMMON_DIM: usize = 128;
/// MOST_HEADS and MOST_STAGES of kernels/select/axis_tiles.cuh, MOST_CTAS of kernels/select/axis_cluster.cuh.
const MOST_HEADS: usize = 16;
pub const MOST_STAGES: usize = 3;
const MOST_CTAS: usize = 16;
/// BLOCKS of kernels/select/tiles.cuh: of a tile.
pub const BLOCKS: usize = 16;
pub const WARPS: usize = THREADS as usize / 32;
/// What finds the best of the keys, at most: it takes the place of products.
pub const TOP_SHARED: usize = 9 << 10;
/// What rows of blocks on their way have in front of the next one, but for the common form.
const GAP: usize = 16;

/// What kernels/select/axis_tiles.cuh makes of a request.
pub struct Form {
    is_common: bool,
    /// Heads by the four: QUARTETS of the kernel.
    pub quartets: usize,
    /// Blocks of a list for which the index has room, and their tiles.
    pub stored: usize,
    pub most_tiles: usize,
    /// Shared memory of a CTA's tiles on their way, one for each warp, and of queries.
    pub stage_bytes: usize,
    pub query_bytes: usize,
}

impl Form {
    /// `None` for a form that the kernels do not have.
    pub fn new(r: &Request, axes: &Axes) -> Option<Form> {
        let (range, heads) = (axes.range.as_ref()?, r.queries.heads);
        let has_form =
            heads.dim.is_multiple_of(64) && heads.dim <= 256 && heads.group() <= MOST_HEADS && sharing(r) == 1;
        if !has_form || ![&axes.axes, range].into_iter().all(|t| has_aligned_rows(t, 16)) {
            return None;
        }
        let is_common = heads.dim == COMMON_DIM;
        let quartets = match heads.group() {
            ..=4 => 1,
            ..=8 if is_common => 2,
            _ => 4,
        };
        // COLUMNS of the kernel.
        let columns = quartets + usize::div_ceil(quartets, 2);
        let gap = if is_common { 0 } else { GAP };
        let stored = r.queries.index.capacity().min(MOST_TOKENS.div_ceil(r.queries.block_size));
        Some(Form {
            is_common,
            quartets,
            stored,
            most_tiles: stored.div_ceil(BLOCKS),
            stage_bytes: WARPS * BLOCKS * (heads.dim + heads.dim / 4 + 2 * gap),
            query_bytes: heads.dim / 32 * columns * 32 * 8,
        })
    }
}

/// How the work is cut, and where its most_tiles of shared memory begin.
#[derive(Clone, Copy)]
pub struct AxesPlan {
    most_tiles: usize,
    ctas: usize,
    stages: usize,
    products: usize,
    partials: usize,
    queries: usize,
    /// 0: keys have no room of their own.
    keys: usize,
    bytes: usize,
    /// Each CTA a multiprocessor.
    has_own: bool,
}

impl AxesPlan {
    /// Of so many lists. `None` where shared memory is short.
    pub fn new(shares: &[Share; 2], lists: usize, form: &Form) -> Option<AxesPlan> {
        let can_share = form.quartets < 4;
        let [half, whole] = shares;
        let shares = &shares[if can_share { 0 } else { 1 }..];
        let fits = |plan: &AxesPlan, share: &Share| plan.bytes <= share.bytes && share.clusters[plan.ctas - 1] > 0;
        let at_once =
            |plan: &AxesPlan| shares.iter().find(|share| fits(plan, share)).map_or(0, |s| s.clusters[plan.ctas - 1]);
        let of = |ctas| (1..=MOST_STAGES).rev().map(move |stages| AxesPlan::of(form, ctas, stages));
        // CTAs that run at once and have work: those that leave the busiest multiprocessor the fewest tiles, which take somewhat
        // longer where a warp's come one after the other. One more CTA takes a quarter of the time of a tile, and that of three is lost
        // where clusters are larger than every device has them.
        let useful = form.most_tiles.clamp(1, MOST_CTAS);
        let all_at_once = (1..=useful).flat_map(of).filter(|plan| lists <= at_once(plan));
        let has_own = |plan: &AxesPlan| lists <= whole.clusters[plan.ctas - 1];
        let time = |plan: &AxesPlan| {
            let tiles = plan.most_tiles.div_ceil(plan.ctas) * if has_own(plan) { 1 } else { 2 };
            let of_tile = if plan.stages >= plan.rounds().min(2) { 4 } else { 5 };
            tiles * of_tile + plan.ctas + if plan.ctas > LARGEST_CLUSTER as usize { 12 } else { 0 }
        };
        let best = all_at_once.filter(|plan| plan.stages <= plan.rounds().max(1)).min_by_key(time);
        // Where there are more lists, or shared memory is short: few CTAs for each, and these side by side.
        let in_waves = || shares.iter().find_map(|share| (1..=MOST_CTAS).flat_map(of).find(|plan| fits(plan, share)));
        let mut plan = best.or_else(in_waves)?;
        // CTAs that can have a multiprocessor each are kept from sharing one. Then there is room for keys, too, but for long lists.
        plan.has_own = has_own(&plan);
        if plan.has_own {
            let with_keys = plan.bytes + plan.most_tiles * BLOCKS * size_of::<u32>();
            if with_keys <= whole.bytes {
                (plan.keys, plan.bytes) = (plan.bytes, with_keys);
            }
            plan.bytes = plan.bytes.max(half.bytes + RESERVED as usize);
        }
        (lists <= i32::MAX as usize / plan.ctas).then_some(plan)
    }

    fn of(form: &Form, ctas: usize, stages: usize) -> AxesPlan {
        let &Form { quartets, most_tiles, .. } = form;
        let partials = stages * form.stage_bytes;
        let queries = partials.saturating_add(most_tiles.saturating_mul(4 * quartets * 2 * size_of::<f32>()));
        let keys = most_tiles.saturating_mul(BLOCKS * size_of::<u32>());
        let products = queries.saturating_add(form.query_bytes).max(keys);
        let of_products = most_tiles.div_ceil(ctas).saturating_mul(BLOCKS * 4 * quartets * size_of::<f32>());
        let bytes = products.saturating_add(of_products.max(TOP_SHARED));
        AxesPlan { most_tiles, ctas, stages, products, partials, queries, keys: 0, bytes, has_own: false }
    }

    /// Tiles of a warp.
    fn rounds(&self) -> usize {
        self.most_tiles.div_ceil(self.ctas).div_ceil(WARPS)
    }
}

impl AxisTileParams {
    /// Of so many CTAs for each list, and so many tiles of a warp on their way. Queries follow these.
    pub fn new(r: &Request, axes: &Axes, form: &Form, ctas: usize, stages: usize) -> AxisTileParams {
        let mut select = SelectParams::new(r);
        (select.place.capacity, select.slices) = (form.stored as u32, ctas as u32);
        select.by_slices = Divisor::new(ctas as u32);
        AxisTileParams {
            select,
            axes: Summary::new(Some(&axes.axes)),
            range: Summary::new(axes.range.as_ref()),
            stages: stages as u32,
            most_tiles: form.most_tiles as u32,
            products: 0,
            partials: 0,
            queries: (stages * form.stage_bytes) as u32,
            keys: 0,
        }
    }
}

pub fn select(
    enqueue: &Enqueue,
    kernels: &AxesKernels,
    r: &Request,
    axes: &Axes,
    form: &Form,
    plan: &AxesPlan,
) -> Result<()> {
    let params = AxisTileParams {
        products: plan.products as u32,
        partials: plan.partials as u32,
        queries: plan.queries as u32,
        keys: plan.keys as u32,
        ..AxisTileParams::new(r, axes, form, plan.ctas, plan.stages)
    };
    let is_few = plan.has_own && form.is_common && form.quartets == 1;
    let kernel = if is_few { kernels.few } else { *kernels.kernels.of(form) }.sharing(plan.bytes as u32);
    let all = Grid { kind: Kind::DependentClusters(plan.ctas as u32), ..grid(enqueue, r.lists() * plan.ctas) };
    // SAFETY: AxisTileParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything, but for bringing summaries to the L2 cache.
    unsafe { enqueue.launch(&kernel, all, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an H200. Its clusters of more than eight CTAs are few, and seven have as much room as eight.
    fn shares() -> [Share; 2] {
        let clusters = |of: [usize; 9], others: usize| std::array::from_fn(|n| of.get(n).copied().unwrap_or(others));
        let half = Share { bytes: 112 << 10, clusters: clusters([264, 132, 79, 62, 44, 34, 30, 30, 18], 14) };
        [half, Share { bytes: 224 << 10, clusters: clusters([132, 66, 44, 30, 22, 17, 15, 15, 9], 7) }]
    }

    fn plan(lists: usize, blocks: usize) -> AxesPlan {
        let most_tiles = blocks.div_ceil(BLOCKS);
        let stage_bytes = WARPS * BLOCKS * (COMMON_DIM + COMMON_DIM / 4);
        let form = Form { is_common: true, quartets: 1, stored: blocks, most_tiles, stage_bytes, query_bytes: 2 << 10 };
        AxesPlan::new(&shares(), lists, &form).unwrap()
    }

    #[test]
    fn few_lists_have_many_ctas_of_their_own_and_room_for_keys() {
        for (blocks, ctas) in [(1, 1), (128, 4), (512, 8), (2048, 8), (4096, 8)] {
            let plan = plan(8, blocks);
            assert_eq!(plan.ctas, ctas, "{blocks} blocks");
            assert!(plan.keys > 0 && plan.bytes > shares()[0].bytes, "{blocks} blocks");
            assert!(
                plan.keys + blocks * size_of::<u32>() <= plan.bytes && plan.bytes <= shares()[1].bytes,
                "{blocks} blocks"
            );
        }
    }

    #[test]
    fn many_lists_share_multiprocessors_and_keys_the_room() {
        for (lists, ctas) in [(64, 2), (100, 1), (264, 1), (10_000, 1)] {
            let plan = plan(lists, 2048);
            assert_eq!(plan.ctas, ctas, "{lists} lists");
            assert_eq!(plan.keys > 0, lists <= 132, "{lists} lists");
        }
    }
}
