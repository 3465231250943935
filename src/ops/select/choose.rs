//! Which kernels select. Conditions are pure functions of sizes and of what the device has; `cuda/` plans and launches.

use super::cuda::axis_cluster::AxisClusterPlan;
use super::cuda::axis_tiles::{AxisForm, CtaShare};
use super::cuda::axis_two_launches::AxisTwoLaunchesPlan;
use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Kernels that select blocks. A forced variant concerns calls of its own method alone.
    pub enum BlocksVariant: "select_blocks" {
        /// MINMAX: the cluster's first CTA selects; blocks are loaded before lengths are known.
        MinMaxDecode = "minmax_decode",
        /// MINMAX in every form.
        MinMaxGeneral = "minmax_general",
        /// MEAN_SOFTMAX and MEAN_DOT: one launch multiplies windows, one weighs and selects.
        Means = "means",
        /// AXIS: one launch multiplies tiles on all multiprocessors, one weighs and selects by a cluster for each list.
        AxisTwoLaunches = "axis_two_launches",
        /// AXIS: a cluster makes each list in one launch.
        AxisCluster = "axis_cluster",
        /// AXIS in every form, by the kernels of the MEAN methods.
        AxisGeneral = "axis_general",
        /// LABEL_MASS: products stay in the shared memory of a cluster.
        LabelsCluster = "labels_cluster",
        /// LABEL_MASS in every form.
        LabelsGeneral = "labels_general",
    }
}

variants! {
    /// Kernels that select tokens.
    pub enum TokensVariant: "select_tokens" {
        /// Products stay in the shared memory of a cluster.
        LabelsCluster = "labels_cluster",
        /// Every form.
        LabelsGeneral = "labels_general",
    }
}

variants! {
    /// What selects from the scores of minmax_decode, minmax_general, means and axis_general.
    pub enum TopVariant: "select_top" {
        /// A second launch, by a cluster for each list.
        TopCluster = "top_cluster",
        /// The first CTA of the cluster that scores the list, in the same launch.
        FirstCta = "first_cta",
        /// A second launch, by a CTA for each list.
        TopCta = "top_cta",
    }
}

/// The methods that VWD_SELECT_* name, as far as they have kernels of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    MinMax,
    Means,
    Axis,
    Labels,
}

impl BlocksVariant {
    pub fn method(self) -> Method {
        match self {
            BlocksVariant::MinMaxDecode | BlocksVariant::MinMaxGeneral => Method::MinMax,
            BlocksVariant::Means => Method::Means,
            BlocksVariant::AxisTwoLaunches | BlocksVariant::AxisCluster | BlocksVariant::AxisGeneral => Method::Axis,
            BlocksVariant::LabelsCluster | BlocksVariant::LabelsGeneral => Method::Labels,
        }
    }

    /// `forced`, if it is a variant of the call's method.
    pub fn forced_for(forced: Option<BlocksVariant>, method: Method) -> Option<BlocksVariant> {
        forced.filter(|variant| variant.method() == method)
    }
}

const OTHER_METHOD: Fit = Fit::Cannot("the call has another method");

/// The most channels that minmax_decode takes.
pub const DECODE_DIM: usize = 128;

/// What the variants of MINMAX depend on.
pub struct MinMaxShape {
    pub dim: usize,
    pub positions: usize,
    /// Bits of a summary's element.
    pub bits: usize,
    /// Channels lie side by side in rows of 16-byte units.
    pub adjacent: bool,
}

pub fn minmax(variant: BlocksVariant, shape: &MinMaxShape) -> Fit {
    match variant {
        BlocksVariant::MinMaxDecode => Fit::Takes
            .unless(shape.dim > DECODE_DIM, "D exceeds 128")
            .unless(shape.positions != 1, "there are several query positions")
            .unless(shape.bits != 16, "summaries have no 16-bit elements")
            .unless(!shape.adjacent, "channels do not lie side by side in rows of 16-byte units"),
        BlocksVariant::MinMaxGeneral => Fit::Takes,
        _ => OTHER_METHOD,
    }
}

/// Multiprocessors that two launches are worth for a list.
const LIST_MULTIPROCESSORS: usize = 4;
/// Blocks of a list of which one CTA finds the best later than a second kernel does.
const MANY_BLOCKS: usize = 8192;

/// Whether two launches are expected to make lists by AXIS sooner than one.
pub fn two_launches_pay(lists: usize, stored: usize, multiprocessors: usize) -> bool {
    lists * LIST_MULTIPROCESSORS <= multiprocessors && stored >= MANY_BLOCKS
}

/// What the device has for the variants of AXIS in INT4; absent on devices without clusters.
pub struct AxisDevice<'a> {
    /// What a CTA of axis_cluster can have, and one that selects of axis_two_launches: beside another CTA of a multiprocessor, and
    /// by itself.
    pub cluster: &'a [CtaShare; 2],
    pub select: &'a [CtaShare; 2],
    pub multiprocessors: usize,
}

/// The chosen variant's plan.
pub enum AxisChoice {
    TwoLaunches(AxisForm, AxisTwoLaunchesPlan),
    Cluster(AxisForm, AxisClusterPlan),
    General,
}

/// Chooses for `lists` lists of a form. `form` says why the kernels for INT4 do not have it.
pub fn axis(
    forced: Option<BlocksVariant>,
    device: Option<&AxisDevice>,
    form: Result<AxisForm, &'static str>,
    lists: usize,
) -> crate::core::status::Result<AxisChoice> {
    use BlocksVariant::{AxisCluster, AxisGeneral, AxisTwoLaunches};
    let has_room = |plan: bool| Fit::Takes.unless(!plan, "shared memory or clusters of the device do not suffice");
    let on = |plan: &dyn Fn(&AxisDevice, &AxisForm) -> Fit| match (device, &form) {
        (None, _) => Fit::Cannot("the device has no clusters"),
        (_, Err(reason)) => Fit::Cannot(reason),
        (Some(device), Ok(form)) => plan(device, form),
    };
    let (two, one) = (std::cell::OnceCell::new(), std::cell::OnceCell::new());
    let fit = |variant| match variant {
        AxisTwoLaunches => on(&|device, form| {
            // The plan is made only where it is needed: axis_general takes every call.
            if forced.is_none() && !two_launches_pay(lists, form.stored, device.multiprocessors) {
                return Fit::Slower;
            }
            let plan = two.get_or_init(|| AxisTwoLaunchesPlan::new(device.select, device.multiprocessors, lists, form));
            has_room(plan.is_some())
        }),
        AxisCluster => on(&|device, form| {
            has_room(one.get_or_init(|| AxisClusterPlan::new(device.cluster, lists, form)).is_some())
        }),
        AxisGeneral => Fit::Takes,
        _ => OTHER_METHOD,
    };
    let chosen = crate::runtime::cuda::variants::choose(forced, fit)?;
    Ok(match (chosen, form, two.into_inner().flatten(), one.into_inner().flatten()) {
        (AxisTwoLaunches, Ok(form), Some(plan), _) => AxisChoice::TwoLaunches(form, plan),
        (AxisCluster, Ok(form), _, Some(plan)) => AxisChoice::Cluster(form, plan),
        _ => AxisChoice::General,
    })
}

impl AxisChoice {
    pub fn variant(&self) -> BlocksVariant {
        match self {
            AxisChoice::TwoLaunches(..) => BlocksVariant::AxisTwoLaunches,
            AxisChoice::Cluster(..) => BlocksVariant::AxisCluster,
            AxisChoice::General => BlocksVariant::AxisGeneral,
        }
    }
}

/// Scores of which the first CTA of a cluster would find the best later than a kernel that follows.
const LONG_ROW: usize = 8192;
/// CTAs of a cluster that selects from a row's scores (kernels/select/top_cluster.cu), and the most blocks that may be wanted before
/// all scores go to its first CTA (MOST_WANTED of kernels/common/cluster_prefilter.cuh).
pub const TOP_CTAS: usize = 8;
const MOST_WANTED: usize = 256;

/// What the way from scores to selected blocks depends on.
pub struct RowShape {
    pub rows: usize,
    /// Blocks of a row that have a score.
    pub stored: usize,
    /// The most blocks that are selected of a row.
    pub wanted: usize,
    /// CTAs that are worth it for a row.
    pub most_ctas: usize,
    /// A second launch by clusters may pay: the scoring kernel waits for bytes alone.
    pub waits_for_bytes: bool,
}

/// What a device has for it.
pub struct RowDevice {
    pub multiprocessors: usize,
    pub has_clusters: bool,
    /// Scores for which the scoring kernel's CTA has room.
    pub most_scores: usize,
    /// The scores of a row fit in the shared memory of the cluster of top_cluster, which the device can form.
    pub top_cluster_fits: bool,
}

pub fn top(variant: TopVariant, row: &RowShape, device: &RowDevice) -> Fit {
    match variant {
        TopVariant::TopCluster => {
            let pays = row.waits_for_bytes
                && row.stored >= LONG_ROW
                && row.rows * TOP_CTAS <= device.multiprocessors
                && row.wanted <= MOST_WANTED;
            let fit = if pays { Fit::Takes } else { Fit::Slower };
            fit.unless(!device.top_cluster_fits, "a row's scores do not fit in a cluster that the device can form")
        }
        TopVariant::FirstCta => {
            // Without clusters, a CTA for each row must fill the device.
            let is_alone = !device.has_clusters && row.rows < device.multiprocessors && row.most_ctas > 1;
            let fit = if is_alone { Fit::Slower } else { Fit::Takes };
            fit.unless(row.stored > device.most_scores, "a row's scores do not fit in the shared memory of a CTA")
        }
        TopVariant::TopCta => Fit::Takes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{VariantList, check_docs, choose};

    #[test]
    fn docs_name_the_variants() {
        check_docs("index-select", VariantList::of::<BlocksVariant>());
        check_docs("index-select", VariantList::of::<TokensVariant>());
        check_docs("index-select", VariantList::of::<TopVariant>());
    }

    #[test]
    fn minmax_of_one_position_and_short_keys_takes_the_decode_kernel() {
        let shape = |dim, positions, bits, adjacent| MinMaxShape { dim, positions, bits, adjacent };
        let chosen = |shape: MinMaxShape| choose(None, |variant| minmax(variant, &shape)).unwrap();
        assert_eq!(chosen(shape(128, 1, 16, true)), BlocksVariant::MinMaxDecode);
        for other in [shape(136, 1, 16, true), shape(128, 2, 16, true), shape(64, 1, 32, true), shape(64, 1, 16, false)]
        {
            assert_eq!(chosen(other), BlocksVariant::MinMaxGeneral);
        }
    }

    #[test]
    fn forced_variant_of_another_method_leaves_a_call_alone() {
        let forced = |method| BlocksVariant::forced_for(Some(BlocksVariant::AxisGeneral), method);
        assert_eq!((forced(Method::Axis), forced(Method::MinMax)), (Some(BlocksVariant::AxisGeneral), None));
    }

    #[test]
    fn few_long_lists_take_two_launches_on_an_h200() {
        let pay = |lists, stored| two_launches_pay(lists, stored, 132);
        assert_eq!([pay(8, 8192), pay(33, 8192), pay(34, 8192), pay(8, 8191)], [true, true, false, false]);
    }

    #[test]
    fn few_long_rows_are_selected_from_by_clusters_of_their_own_on_an_h200() {
        let device = |has_clusters, top_cluster_fits| RowDevice {
            multiprocessors: 132,
            has_clusters,
            most_scores: 54_000,
            top_cluster_fits,
        };
        let row = |rows, stored, wanted| RowShape { rows, stored, wanted, most_ctas: 32, waits_for_bytes: true };
        let chosen = |row: RowShape, device: RowDevice| choose(None, |variant| top(variant, &row, &device)).unwrap();
        let h200 = |row| chosen(row, device(true, true));
        assert_eq!([h200(row(8, 8192, 64)), h200(row(16, 8192, 256))], [TopVariant::TopCluster; 2]);
        for other in [row(8, 8191, 64), row(17, 8192, 64), row(8, 8192, 257)] {
            assert_eq!(h200(other), TopVariant::FirstCta);
        }
        assert_eq!(h200(row(100, 60_000, 64)), TopVariant::TopCta, "they do not fit in one CTA");
        let a100 = |rows| chosen(row(rows, 2048, 64), device(false, false));
        assert_eq!([a100(8), a100(132)], [TopVariant::TopCta, TopVariant::FirstCta]);
    }
}
