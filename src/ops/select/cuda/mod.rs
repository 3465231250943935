//! Kernels of kernels/select: which of them a call runs, and their launches, a file for each variant.

pub(super) mod axis_cluster;
pub(super) mod axis_tiles;
pub(super) mod axis_two_launches;
mod labels_cluster;
mod labels_general;
mod mass;
mod means;
mod minmax;
mod params;
mod rows;

use super::Request;
use super::choose::{self, AxisChoice, AxisDevice, BlocksVariant, Method, TokensVariant, TopVariant};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::index::{Axes, Kind, Labels, Windows};
use crate::runtime::cuda::variants::{self, Fit, Variant, VariantList};
use crate::runtime::cuda::{self, Cuda, Enqueue, Facts, Modules, Source, source};
use axis_cluster::AxisClusterKernels;
use axis_tiles::AxisForm;
use axis_two_launches::AxisTwoLaunchesKernels;
use labels_cluster::{LabelClusterKernels, LabelClusterPlan};
use labels_general::{LabelKernels, LabelPlan};
use mass::{MassKernels, MassPlan};
use means::{MeanKernels, MeanPlan, Summaries, blocks_as_windows};
use minmax::{MinMaxKernels, MinMaxPlan};
use rows::TopKernels;

pub struct Kernels {
    minmax: MinMaxKernels,
    means: MeanKernels,
    mass: MassKernels,
    /// Selection from scores in memory.
    top: TopKernels,
    labels_general: LabelKernels,
    // Devices without clusters have none of these.
    labels_cluster: Option<LabelClusterKernels>,
    axis_cluster: Option<AxisClusterKernels>,
    axis_two_launches: Option<AxisTwoLaunchesKernels>,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[
        source!("select/minmax", compute_80, compute_90),
        source!("select/means", compute_80, compute_90),
        source!("select/top_cta", compute_80, compute_90),
        source!("select/top_cluster", compute_90),
        source!("select/labels_general", compute_80, compute_90),
        source!("select/labels_cluster", compute_90),
        source!("select/axis_cluster", compute_90),
        source!("select/axis_two_launches", compute_90),
    ];
    const VARIANTS: &[VariantList] =
        &[VariantList::of::<BlocksVariant>(), VariantList::of::<TokensVariant>(), VariantList::of::<TopVariant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        Ok(Kernels {
            minmax: MinMaxKernels::find(modules)?,
            means: MeanKernels::find(modules)?,
            mass: MassKernels::find(modules)?,
            top: TopKernels::find(modules)?,
            labels_general: LabelKernels::find(modules)?,
            labels_cluster: LabelClusterKernels::find(modules)?,
            axis_cluster: AxisClusterKernels::find(modules)?,
            axis_two_launches: AxisTwoLaunchesKernels::find(modules)?,
        })
    }
}

/// The variants that a session's options force.
struct Forced {
    blocks: Option<BlocksVariant>,
    tokens: Option<TokensVariant>,
    top: Option<TopVariant>,
}

/// A call's variant, and the split of its work.
enum Plan<'r, 'a> {
    MinMax(MinMaxPlan, [&'r Tensor<'a>; 2]),
    Means(MeanPlan, &'r Windows, &'r Tensor<'a>),
    AxisGeneral(MeanPlan, &'r Axes<'a>),
    Axis(AxisChoice, &'r Axes<'a>),
    LabelsCluster(LabelClusterPlan, &'r Labels<'a>),
    LabelsGeneral(LabelPlan, &'r Labels<'a>),
}

impl<'r, 'a> Plan<'r, 'a> {
    fn of_blocks(kernels: &Kernels, facts: &Facts, forced: &Forced, r: &'r Request<'a>) -> Result<Plan<'r, 'a>> {
        let of = |method| BlocksVariant::forced_for(forced.blocks, method);
        let mean_plan = |windows: &Windows| MeanPlan::new(facts, &kernels.top, forced.top, r, windows);
        Ok(match &r.queries.index.kind {
            Kind::MinMax { max, min, .. } => {
                let forced = (of(Method::MinMax), forced.top);
                Plan::MinMax(MinMaxPlan::new(facts, &kernels.top, forced, r, [max, min])?, [max, min])
            }
            Kind::Mean { windows, means } => Plan::Means(mean_plan(windows)?, windows, means),
            Kind::Axis(axes) => {
                let device = match (&kernels.axis_cluster, &kernels.axis_two_launches) {
                    (Some(cluster), Some(two)) => {
                        let multiprocessors = facts.multiprocessors as usize;
                        Some(AxisDevice { cluster: &cluster.shares, select: &two.shares, multiprocessors })
                    }
                    _ => None,
                };
                let choose = |form| choose::axis(of(Method::Axis), device.as_ref(), form, r.lists());
                // One launch writes masses, too, where it has room for them.
                let both = match (&r.log_mass, AxisForm::new(r, axes)) {
                    (Some(_), Ok(form)) if form.is_common => choose(Ok(AxisForm { has_masses: true, ..form })).ok(),
                    _ => None,
                };
                let choice = match both {
                    Some(choice @ AxisChoice::Cluster(..)) => choice,
                    _ => choose(AxisForm::new(r, axes))?,
                };
                match choice {
                    AxisChoice::General => Plan::AxisGeneral(mean_plan(&blocks_as_windows(axes))?, axes),
                    choice => Plan::Axis(choice, axes),
                }
            }
            Kind::Label(labels) => Plan::by_labels(kernels, of(Method::Labels), r, labels, true)?,
        })
    }

    fn of_tokens(kernels: &Kernels, forced: &Forced, r: &'r Request<'a>) -> Result<Plan<'r, 'a>> {
        match &r.queries.index.kind {
            Kind::Label(labels) => Plan::by_labels(kernels, forced.tokens, r, labels, false),
            _ => unreachable!("the kind was checked"),
        }
    }

    /// `V`: BlocksVariant or TokensVariant, whose variants for labels have the same names.
    fn by_labels<V: Variant>(
        kernels: &Kernels,
        forced: Option<V>,
        r: &'r Request<'a>,
        labels: &'r Labels<'a>,
        of_blocks: bool,
    ) -> Result<Plan<'r, 'a>> {
        let plan = std::cell::OnceCell::new();
        let fit = |variant: V| match variant.name() {
            "labels_cluster" => {
                let kernels = kernels.labels_cluster.as_ref();
                match plan.get_or_init(|| LabelClusterPlan::new(kernels, r, labels, of_blocks)) {
                    Ok(_) => Fit::Takes,
                    Err(reason) => Fit::Cannot(reason),
                }
            }
            "labels_general" => Fit::Takes,
            _ => Fit::Cannot("the call has another method"),
        };
        let chosen = variants::choose(forced, fit)?;
        Ok(match plan.into_inner() {
            Some(Ok(plan)) if chosen.name() == "labels_cluster" => Plan::LabelsCluster(plan, labels),
            _ => Plan::LabelsGeneral(LabelPlan::new(r, of_blocks)?, labels),
        })
    }

    /// Bytes of scratch that the call takes from its stream's arena.
    fn scratch_bytes(&self) -> usize {
        match self {
            Plan::MinMax(plan, _) => plan.bytes,
            Plan::Means(plan, ..) | Plan::AxisGeneral(plan, _) => plan.bytes,
            Plan::Axis(AxisChoice::TwoLaunches(_, plan), _) => plan.bytes,
            Plan::Axis(..) | Plan::LabelsCluster(..) => 0,
            Plan::LabelsGeneral(plan, _) => plan.bytes,
        }
    }

    /// Whether the launches that select write log_mass, too.
    fn writes_masses(&self) -> bool {
        matches!(self, Plan::Axis(AxisChoice::Cluster(form, _), _) if form.has_masses)
    }

    fn blocks_variant(&self) -> BlocksVariant {
        match self {
            Plan::MinMax(plan, _) => plan.variant,
            Plan::Means(..) => BlocksVariant::Means,
            Plan::AxisGeneral(..) => BlocksVariant::AxisGeneral,
            Plan::Axis(choice, _) => choice.variant(),
            Plan::LabelsCluster(..) => BlocksVariant::LabelsCluster,
            Plan::LabelsGeneral(..) => BlocksVariant::LabelsGeneral,
        }
    }

    fn launch(&self, enqueue: &Enqueue, r: &Request) -> Result<()> {
        const FOUND: &str = "the variant has kernels";
        let kernels: &Kernels = enqueue.kernels();
        match self {
            Plan::MinMax(plan, bounds) => minmax::select(enqueue, &kernels.minmax, &kernels.top, r, plan, *bounds),
            Plan::Means(plan, windows, means) => {
                let summaries = Summaries::of_means(r, means);
                means::select(enqueue, &kernels.means, &kernels.top, r, plan, windows, &summaries)
            }
            Plan::AxisGeneral(plan, axes) => {
                let (windows, summaries) = (blocks_as_windows(axes), Summaries::of_axes(r, axes));
                means::select(enqueue, &kernels.means, &kernels.top, r, plan, &windows, &summaries)
            }
            Plan::Axis(AxisChoice::TwoLaunches(form, plan), axes) => {
                let kernels = kernels.axis_two_launches.as_ref().expect(FOUND);
                axis_two_launches::select(enqueue, kernels, r, axes, form, plan)
            }
            Plan::Axis(AxisChoice::Cluster(form, plan), axes) => {
                let kernels = kernels.axis_cluster.as_ref().expect(FOUND);
                axis_cluster::select(enqueue, kernels, r, axes, form, plan)
            }
            Plan::Axis(AxisChoice::General, _) => unreachable!("AxisGeneral has a plan of its own"),
            Plan::LabelsCluster(plan, labels) => {
                labels_cluster::select(enqueue, kernels.labels_cluster.as_ref().expect(FOUND), r, labels, plan)
            }
            Plan::LabelsGeneral(plan, labels) => {
                labels_general::select(enqueue, &kernels.labels_general, r, labels, plan)
            }
        }
    }
}

/// How the masses of what is left out are found, where they are wanted and the plan does not write them.
fn plan_mass<'r, 'a>(
    facts: &Facts,
    r: &'r Request<'a>,
    plan: &Plan,
) -> Result<Option<(MassPlan, &'r Axes<'a>, &'r Tensor<'a>)>> {
    match (&r.queries.index.kind, &r.log_mass) {
        (Kind::Axis(axes), Some(out)) if !plan.writes_masses() => Ok(Some((MassPlan::new(facts, r)?, axes, out))),
        _ => Ok(None),
    }
}

pub fn blocks(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if r.lists() == 0 {
        return Ok(());
    }
    let forced = Forced { blocks: enqueue.forced(), tokens: None, top: enqueue.forced() };
    let plan = Plan::of_blocks(enqueue.kernels(), enqueue.facts(), &forced, r)?;
    let mass = plan_mass(enqueue.facts(), r, &plan)?;
    if let Some((mass, ..)) = &mass {
        // One arena has room for either part.
        params::scratch(enqueue, mass.bytes.max(plan.scratch_bytes()))?;
    }
    plan.launch(enqueue, r)?;
    enqueue.ran(plan.blocks_variant());
    if let Some((plan, axes, out)) = mass {
        let kernels: &Kernels = enqueue.kernels();
        mass::write(enqueue, &kernels.mass, r, &plan, axes, out)?;
    }
    match &plan {
        Plan::MinMax(plan, _) => enqueue.ran(plan.rows.top()),
        Plan::Means(plan, ..) | Plan::AxisGeneral(plan, _) => enqueue.ran(plan.weighing.top()),
        _ => {}
    }
    Ok(())
}

/// Bytes of scratch that `blocks` takes from its stream's arena.
pub fn blocks_scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    if r.lists() == 0 {
        return Ok(0);
    }
    let forced = Forced { blocks: cuda.forced(), tokens: None, top: cuda.forced() };
    let plan = Plan::of_blocks(cuda.kernels(), cuda.facts(), &forced, r)?;
    let mass = plan_mass(cuda.facts(), r, &plan)?.map_or(0, |(plan, ..)| plan.bytes);
    Ok(plan.scratch_bytes().max(mass))
}

pub fn tokens(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if r.lists() == 0 {
        return Ok(());
    }
    let forced = Forced { blocks: None, tokens: enqueue.forced(), top: None };
    let plan = Plan::of_tokens(enqueue.kernels(), &forced, r)?;
    plan.launch(enqueue, r)?;
    enqueue.ran(match plan {
        Plan::LabelsCluster(..) => TokensVariant::LabelsCluster,
        _ => TokensVariant::LabelsGeneral,
    });
    Ok(())
}

/// Bytes of scratch that `tokens` takes from its stream's arena.
pub fn tokens_scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    if r.lists() == 0 {
        return Ok(0);
    }
    let forced = Forced { blocks: None, tokens: cuda.forced(), top: None };
    Ok(Plan::of_tokens(cuda.kernels(), &forced, r)?.scratch_bytes())
}

#[cfg(test)]
mod tests {
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            super::params::ListParams::layout("List"),
            super::params::SelectParams::layout("SelectParams"),
            super::minmax::MinMaxParams::layout("MinMaxParams"),
            super::means::MeanParams::layout("MeanParams"),
            super::mass::MassParams::layout("MassParams"),
            super::axis_tiles::AxisTileParams::layout("AxisTileParams"),
            super::axis_cluster::AxisMassParams::layout("AxisMassParams"),
            super::axis_two_launches::AxisTwoLaunchesParams::layout("AxisTwoLaunchesParams"),
            super::labels_general::LabelParams::layout("LabelParams"),
            super::labels_cluster::LabelClusterParams::layout("LabelClusterParams"),
        ];
        layout::check("select", file!(), &structs);
    }
}
