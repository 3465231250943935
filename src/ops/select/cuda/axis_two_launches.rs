//! Launches of the kernels of kernels/select/axis_two_launches.cuh: AXIS in INT4 from long lists, in two launches.

use super::axis_tiles::{
    AxisForm, AxisTileParams, BLOCKS, CtaShare, MOST_STAGES, RESERVED, TOP_SHARED, TileKernels, WARPS,
};
use super::params::{THREADS, grid, scratch};
use crate::core::status::Result;
use crate::ops::index::Axes;
use crate::ops::select::Request;
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, Modules};

/// The kernels, which need clusters.
pub struct AxisTwoLaunchesKernels {
    multiply: TileKernels,
    /// Kernels for up to 4, 8 and 16 heads.
    select: [Kernel; 3],
    /// What a CTA that selects can have: where two share a multiprocessor, and where each has its own.
    pub shares: [CtaShare; 2],
}

impl AxisTwoLaunchesKernels {
    pub fn find(modules: &Modules) -> Result<Option<AxisTwoLaunchesKernels>> {
        const SOURCE: &str = "select/axis_two_launches";
        if !modules.has(SOURCE) {
            return Ok(None);
        }
        let common = ["select_axis_multiply_4_128", "select_axis_multiply_8_128", "select_axis_multiply_16_128"];
        let others = ["select_axis_multiply_4", "select_axis_multiply_16"];
        let multiply = TileKernels::find(modules, SOURCE, [&common, &others], MULTIPLY_SHARED)?;
        let facts = modules.facts();
        let kernel = |name| {
            let kernel = modules.kernel(SOURCE, name)?;
            kernel.allow_shared(facts.shared_bytes - SELECT_SHARED)?;
            kernel.allow_large_clusters()?; // to ask about them
            Ok(kernel)
        };
        let select = [kernel("select_axis_weigh_4")?, kernel("select_axis_weigh_8")?, kernel("select_axis_weigh_16")?];
        multiply.all().chain(&select).try_for_each(Kernel::prefer_shared)?;
        let shares = CtaShare::both(modules, [&select[2], &select[2]], SELECT_SHARED);
        Ok(Some(AxisTwoLaunchesKernels { multiply, select, shares }))
    }
}

kernel_struct! {
    /// Mirrors AxisTwoLaunchesParams of kernels/select/params.cuh.
    pub struct AxisTwoLaunchesParams {
        axes: AxisTileParams,
        products: *mut u8,
        partials: *mut u8,
        seen: *mut u8,
        keys: u32,
        room: u32,
    }
}

/// Shared memory that the kernels declare, at most.
const MULTIPLY_SHARED: u32 = 1 << 10;
const SELECT_SHARED: u32 = 7 << 10;
/// CTAs of a list that select; the more, the better, but each is to have its place beside one that multiplies.
const CLUSTERS: [usize; 3] = [8, 4, 2];
/// TILES_AT_ONCE · WARP of kernels/select/axis_tiles.cuh.
const MOST_TILES: usize = 256 * 32;

/// The split of the work, and where its parts of shared memory and of scratch begin.
pub struct AxisTwoLaunchesPlan {
    /// CTAs of a list that multiply, and those that select.
    slices: usize,
    ctas: usize,
    stages: usize,
    keys: usize,
    room: usize,
    /// Shared memory of a CTA that multiplies, and of one that selects.
    multiply_bytes: usize,
    select_bytes: usize,
    products: usize,
    partials: usize,
    seen: usize,
    pub bytes: usize,
}

impl AxisTwoLaunchesPlan {
    /// `None` where shared memory or clusters of the device do not suffice. `shares`: what a CTA of the second kernel can have.
    pub fn new(
        shares: &[CtaShare; 2],
        multiprocessors: usize,
        lists: usize,
        form: &AxisForm,
    ) -> Option<AxisTwoLaunchesPlan> {
        let &AxisForm { quartets, most_tiles, .. } = form;
        if most_tiles > MOST_TILES {
            return None;
        }
        let slices = (multiprocessors / lists).min(most_tiles.div_ceil(WARPS)).max(1);
        let [half, whole] = shares;
        let clusters = [whole, half].into_iter().flat_map(|share| CLUSTERS.map(|ctas| (share, ctas)));
        let fits = |&(share, ctas): &(&CtaShare, usize)| {
            lists <= share.clusters[ctas - 1] && Self::select_room(form, ctas)[2] <= share.bytes
        };
        let (_, ctas) = clusters.into_iter().find(fits)?;
        let [keys, room, select_bytes] = Self::select_room(form, ctas);
        // As many stages as leave a multiprocessor room for a CTA of either kernel, if registers leave it and each warp still has two
        // stages. An index without room for a block still has one.
        let most = MOST_STAGES.min(most_tiles.div_ceil(slices).div_ceil(WARPS)).max(1);
        let of_both = whole.bytes - (MULTIPLY_SHARED + RESERVED) as usize;
        let multiply_bytes = |stages: usize| stages * form.stage_bytes + form.query_bytes;
        let fits = |stages: &usize, other: usize| multiply_bytes(*stages) + other <= of_both;
        let both_fit = (most.min(2)..=most).rev().find(|stages| quartets < 4 && fits(stages, select_bytes));
        let stages = both_fit.or_else(|| (1..=most).rev().find(|stages| fits(stages, 0)))?;
        let mut scratch = cuda::Parts::default();
        let products = scratch.take(&[lists, most_tiles, BLOCKS * 4 * quartets * size_of::<f32>()]);
        let partials = scratch.take(&[lists, most_tiles, 4 * quartets * 2 * size_of::<f32>()]);
        let seen = scratch.take(&[lists, slices, WARPS * size_of::<u32>()]);
        Some(AxisTwoLaunchesPlan {
            slices,
            ctas,
            stages,
            keys,
            room,
            // At least so much that no multiprocessor has room for two CTAs that multiply.
            multiply_bytes: multiply_bytes(stages).max(of_both.saturating_sub(select_bytes)),
            select_bytes,
            products,
            partials,
            seen,
            bytes: scratch.bytes,
        })
    }

    /// Where its keys begin in the shared memory of one of so many CTAs that select, where its room, and where that ends.
    fn select_room(form: &AxisForm, ctas: usize) -> [usize; 3] {
        let all = form.most_tiles * BLOCKS;
        // The share of divide() in kernels/common/cluster_prefilter.cuh.
        let share = all.div_ceil(ctas).next_multiple_of(32);
        let few = ctas * THREADS as usize * 2 * size_of::<u32>();
        let products = share * 4 * form.quartets * size_of::<f32>();
        let room = TOP_SHARED + share * size_of::<u32>();
        [TOP_SHARED, room, room + products.max(few).max(all * size_of::<u32>())]
    }
}

pub fn select(
    enqueue: &Enqueue,
    kernels: &AxisTwoLaunchesKernels,
    r: &Request,
    axes: &Axes,
    form: &AxisForm,
    plan: &AxisTwoLaunchesPlan,
) -> Result<()> {
    let base = scratch(enqueue, plan.bytes)?;
    let params = AxisTwoLaunchesParams {
        axes: AxisTileParams::new(r, axes, form, plan.slices, plan.stages),
        products: (base + plan.products) as *mut u8,
        partials: (base + plan.partials) as *mut u8,
        seen: (base + plan.seen) as *mut u8,
        keys: plan.keys as u32,
        room: plan.room as u32,
    };
    let multiply = kernels.multiply.of(form).sharing(plan.multiply_bytes as u32);
    let select = kernels.select[form.quartets.ilog2() as usize].sharing(plan.select_bytes as u32);
    let clusters = Grid { kind: Kind::DependentClusters(plan.ctas as u32), ..grid(enqueue, r.lists() * plan.ctas) };
    let params = (&raw const params).cast();
    // SAFETY: AxisTwoLaunchesParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed, and
    // scratch is this call's. The kernels wait before they touch anything, but for bringing summaries to the L2 cache.
    unsafe {
        enqueue.launch(&multiply, grid(enqueue, r.lists() * plan.slices), [params])?;
        enqueue.launch(&select, clusters, [params])
    }
}
