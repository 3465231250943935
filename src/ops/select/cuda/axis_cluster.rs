//! Launch of the kernels of kernels/select/axis_cluster.cuh: AXIS in INT4, in one launch.

use super::axis_tiles::{
    AxisForm, AxisTileParams, BLOCKS, CtaShare, MOST_CTAS, MOST_STAGES, RESERVED, TOP_SHARED, TileKernels, WARPS,
};
use super::params::{grid, strides};
use crate::core::status::Result;
use crate::ops::index::Axes;
use crate::ops::select::Request;
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::views::{address, byte_stride};
use crate::runtime::cuda::{Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules};

/// Shared memory that the kernels declare, at most.
const STATIC_SHARED: u32 = 2304;

/// The kernels, which need clusters.
pub struct AxisClusterKernels {
    kernels: TileKernels,
    /// For D = 128 and up to 4 heads, where each CTA is alone on its multiprocessor.
    alone_128: Kernel,
    /// For D = 128 and up to 4, 8 and 16 heads: kernels that write log_mass, too.
    masses: [Kernel; 3],
    /// What a CTA can have: where two share a multiprocessor, and where each has its own.
    pub shares: [CtaShare; 2],
}

impl AxisClusterKernels {
    pub fn find(modules: &Modules) -> Result<Option<AxisClusterKernels>> {
        if !modules.has("select/axis_cluster") {
            return Ok(None);
        }
        let common = ["select_axis_cluster_4_128", "select_axis_cluster_8_128", "select_axis_cluster_16_128"];
        let others = ["select_axis_cluster_4", "select_axis_cluster_16"];
        let kernels = TileKernels::find(modules, "select/axis_cluster", [&common, &others], STATIC_SHARED)?;
        let alone_128 =
            TileKernels::kernel(modules, "select/axis_cluster", "select_axis_cluster_alone_128", STATIC_SHARED)?;
        let mass = |name| TileKernels::kernel(modules, "select/axis_cluster", name, STATIC_SHARED);
        let masses =
            [mass("select_axis_mass_4_128")?, mass("select_axis_mass_8_128")?, mass("select_axis_mass_16_128")?];
        let shares = CtaShare::both(modules, [&kernels.common[0], &alone_128], STATIC_SHARED);
        Ok(Some(AxisClusterKernels { kernels, alone_128, masses, shares }))
    }
}

kernel_struct! {
    /// Mirrors AxisMassParams of kernels/select/params.cuh.
    pub struct AxisMassParams {
        axes: AxisTileParams,
        centre: *const u8,
        centre_head: i64,
        centre_channel: i64,
        log_mass: *mut u8,
        mass_seq: i64,
        mass_pos: i64,
        mass_head: i64,
        masses: u32,
        own_keys: u32,
        sums: u32,
        unused: u32,
    }
}

/// The split of the work, and where its parts of shared memory begin.
#[derive(Clone, Copy)]
pub struct AxisClusterPlan {
    most_tiles: usize,
    ctas: usize,
    stages: usize,
    products: usize,
    partials: usize,
    queries: usize,
    /// 0: keys have no room of their own.
    keys: usize,
    /// Where log_mass is wanted.
    masses: usize,
    own_keys: usize,
    sums: usize,
    bytes: usize,
    /// Each CTA has a multiprocessor to itself.
    is_alone: bool,
}

impl AxisClusterPlan {
    /// `None` where shared memory is short.
    pub fn new(shares: &[CtaShare; 2], lists: usize, form: &AxisForm) -> Option<AxisClusterPlan> {
        let can_share = form.quartets < 4;
        let [half, whole] = shares;
        let shares = &shares[if can_share { 0 } else { 1 }..];
        let fits =
            |plan: &AxisClusterPlan, share: &CtaShare| plan.bytes <= share.bytes && share.clusters[plan.ctas - 1] > 0;
        let at_once = |plan: &AxisClusterPlan| {
            shares.iter().find(|share| fits(plan, share)).map_or(0, |s| s.clusters[plan.ctas - 1])
        };
        let of = |ctas| (1..=MOST_STAGES).rev().map(move |stages| AxisClusterPlan::of(form, ctas, stages));
        // CTAs that run at once and have work: those that leave the busiest multiprocessor the fewest tiles, which take somewhat
        // longer where a warp's come one after the other. One more CTA takes a quarter of the time of a tile, and that of three is lost
        // where clusters are larger than every device has them.
        let useful = form.most_tiles.clamp(1, MOST_CTAS);
        let all_at_once = (1..=useful).flat_map(of).filter(|plan| lists <= at_once(plan));
        let is_alone = |plan: &AxisClusterPlan| lists <= whole.clusters[plan.ctas - 1];
        let time = |plan: &AxisClusterPlan| {
            let tiles = plan.most_tiles.div_ceil(plan.ctas) * if is_alone(plan) { 1 } else { 2 };
            let of_tile = if plan.stages >= plan.rounds().min(2) { 4 } else { 5 };
            tiles * of_tile + plan.ctas + if plan.ctas > LARGEST_CLUSTER as usize { 12 } else { 0 }
        };
        let best = all_at_once.filter(|plan| plan.stages <= plan.rounds().max(1)).min_by_key(time);
        // Where there are more lists, or shared memory is short: few CTAs for each, and these side by side.
        let in_waves = || shares.iter().find_map(|share| (1..=MOST_CTAS).flat_map(of).find(|plan| fits(plan, share)));
        let mut plan = best.or_else(in_waves)?;
        // CTAs that can have a multiprocessor each are kept from sharing one. Then there is room for keys, too, but for long lists.
        plan.is_alone = is_alone(&plan);
        if plan.is_alone {
            let with_keys = plan.bytes + plan.most_tiles * BLOCKS * size_of::<u32>();
            if with_keys <= whole.bytes {
                (plan.keys, plan.bytes) = (plan.bytes, with_keys);
            }
            plan.bytes = plan.bytes.max(half.bytes + RESERVED as usize);
        }
        (lists <= i32::MAX as usize / plan.ctas).then_some(plan)
    }

    fn of(form: &AxisForm, ctas: usize, stages: usize) -> AxisClusterPlan {
        let &AxisForm { quartets, most_tiles, .. } = form;
        let partials = stages * form.stage_bytes;
        let queries = partials.saturating_add(most_tiles.saturating_mul(4 * quartets * 2 * size_of::<f32>()));
        let keys = most_tiles.saturating_mul(BLOCKS * size_of::<u32>());
        // Partials of masses are joined after those of products, and may come while keys are still read.
        let sums = partials.max(keys);
        let end_of_sums = if form.has_masses { sums.saturating_add(queries - partials) } else { 0 };
        let products = queries.saturating_add(form.query_bytes).max(keys).max(end_of_sums);
        let of_products = most_tiles.div_ceil(ctas).saturating_mul(BLOCKS * 4 * quartets * size_of::<f32>());
        let masses = products.saturating_add(of_products.max(TOP_SHARED));
        let own_keys = masses.saturating_add(if form.has_masses { of_products } else { 0 });
        let of_keys = if form.has_masses { most_tiles.div_ceil(ctas) * BLOCKS * size_of::<u32>() } else { 0 };
        let bytes = own_keys.saturating_add(of_keys);
        let is_alone = false;
        AxisClusterPlan {
            most_tiles,
            ctas,
            stages,
            products,
            partials,
            queries,
            keys: 0,
            masses,
            own_keys,
            sums,
            bytes,
            is_alone,
        }
    }

    /// Tiles of a warp.
    fn rounds(&self) -> usize {
        self.most_tiles.div_ceil(self.ctas).div_ceil(WARPS)
    }
}

pub fn select(
    enqueue: &Enqueue,
    kernels: &AxisClusterKernels,
    r: &Request,
    axes: &Axes,
    form: &AxisForm,
    plan: &AxisClusterPlan,
) -> Result<()> {
    let axes_params = AxisTileParams {
        products: plan.products as u32,
        partials: plan.partials as u32,
        queries: plan.queries as u32,
        keys: plan.keys as u32,
        ..AxisTileParams::new(r, axes, form, plan.ctas, plan.stages)
    };
    let all = Grid { kind: Kind::DependentClusters(plan.ctas as u32), ..grid(enqueue, r.lists() * plan.ctas) };
    // SAFETY: the parameters are the kernels' structs; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything, but for bringing summaries to the L2 cache.
    let launch = |kernel: &Kernel, params| unsafe { enqueue.launch(&kernel.sharing(plan.bytes as u32), all, [params]) };
    if let (true, Some(out)) = (form.has_masses, &r.log_mass) {
        let [mass_seq, mass_pos, mass_head, _] = strides(Some(out), r.queries.positions.dimension().is_some());
        let centre = axes.centre.as_ref();
        let params = AxisMassParams {
            axes: axes_params,
            centre: address(centre),
            centre_head: byte_stride(centre, 0),
            centre_channel: byte_stride(centre, 1),
            log_mass: out.data(),
            mass_seq,
            mass_pos,
            mass_head,
            masses: plan.masses as u32,
            own_keys: plan.own_keys as u32,
            sums: plan.sums as u32,
            unused: 0,
        };
        return launch(&kernels.masses[form.quartets.ilog2() as usize], (&raw const params).cast());
    }
    let runs_alone_128 = plan.is_alone && form.is_common && form.quartets == 1;
    let kernel = if runs_alone_128 { &kernels.alone_128 } else { kernels.kernels.of(form) };
    launch(kernel, (&raw const axes_params).cast())
}

#[cfg(test)]
mod tests {
    use super::super::axis_tiles::COMMON_DIM;
    use super::*;

    /// The shares on an H200. Its clusters of more than eight CTAs are few, and seven have as much room as eight.
    fn shares() -> [CtaShare; 2] {
        let clusters = |of: [usize; 9], others: usize| std::array::from_fn(|n| of.get(n).copied().unwrap_or(others));
        let half = CtaShare { bytes: 112 << 10, clusters: clusters([264, 132, 79, 62, 44, 34, 30, 30, 18], 14) };
        [half, CtaShare { bytes: 224 << 10, clusters: clusters([132, 66, 44, 30, 22, 17, 15, 15, 9], 7) }]
    }

    fn plan(lists: usize, blocks: usize) -> AxisClusterPlan {
        let most_tiles = blocks.div_ceil(BLOCKS);
        let stage_bytes = WARPS * BLOCKS * (COMMON_DIM + COMMON_DIM / 4);
        let form = AxisForm {
            is_common: true,
            quartets: 1,
            stored: blocks,
            most_tiles,
            stage_bytes,
            query_bytes: 2 << 10,
            has_masses: false,
        };
        AxisClusterPlan::new(&shares(), lists, &form).unwrap()
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
