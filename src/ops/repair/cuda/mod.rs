//! Repair on CUDA: which variant runs, and what all of them tell their first kernel. `attention/device/choose.rs` says when each does.

mod decode128;
mod one_launch;
mod two_launches;
mod verify128;

use super::{Kept, Request};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::attention::device::{
    self, Element, Entry, Job, Kernels, Options, RepairParams, RepairSizes, RepairVariant, Sizes, StateView, WorkItems,
    describe, fit_repair, is_copied_by_16, work_items,
};
use crate::ops::views::State;
use crate::runtime::cuda::layout::{Divisor, is_near};
use crate::runtime::cuda::variants::choose;
use crate::runtime::cuda::views::{View, address};
use crate::runtime::cuda::{Cuda, Enqueue, Facts, Grid, Kernel, Kind};
use two_launches::TwoLaunches;

/// A variant with what it launches.
#[allow(clippy::large_enum_variant)] // lives on the stack of one call
enum Plan {
    OneLaunch(RepairVariant, Kernel, Grid),
    TwoLaunches(TwoLaunches),
}

pub fn scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    let plan = plan(cuda.facts(), cuda.kernels(), cuda.forced(), r, &mut RepairParams::none())?;
    Ok(match plan {
        Some(Plan::TwoLaunches(repair)) => repair.scratch(r),
        Some(Plan::OneLaunch(..)) | None => 0,
    })
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    let mut params = RepairParams::none();
    match plan(enqueue.facts(), enqueue.kernels(), enqueue.forced(), r, &mut params)? {
        None => Ok(()),
        Some(Plan::OneLaunch(variant, kernel, grid)) => {
            enqueue.ran(variant);
            // SAFETY: RepairParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
            unsafe { enqueue.launch(&kernel, grid, [(&raw const params).cast()]) }
        }
        Some(Plan::TwoLaunches(repair)) => {
            enqueue.ran(RepairVariant::TwoLaunches);
            two_launches::run(enqueue, r, repair)
        }
    }
}

/// The plan of a call; `None` where there is nothing to do. The parameters of one launch, which are large, are written where they
/// are to lie.
fn plan(
    facts: &Facts,
    kernels: &Kernels,
    forced: Option<RepairVariant>,
    r: &Request,
    to: &mut RepairParams,
) -> Result<Option<Plan>> {
    let job = job(r);
    let Some(params) = describe(&job)? else { return Ok(None) };
    let (sizes, options) = (Sizes::of(&job, &params, kernels.invariant_batch), Options::of(&job, &params));
    // As many CTAs as have a multiprocessor each.
    let fits = |&size: &u32| sizes.split_lists().saturating_mul(size as u64) <= facts.multiprocessors as u64;
    let cluster = kernels.cluster_sizes.iter().copied().rfind(fits).unwrap_or(1);
    let items = |element, stages| {
        work_items(facts.shared_bytes, &params, &sizes, Entry::Mma(element, device::Width::W128), stages)
    };
    let most_shared = device::most_shared(facts);
    // Both kernels of one launch are for what tensor cores multiply, in heads of up to 128 channels.
    let is_narrow = device::Width::of(sizes.dim, sizes.value_dim) == Some(device::Width::W128);
    let element = sizes.element.filter(|_| is_narrow && options.rows_of_16_bytes && !kernels.cluster_sizes.is_empty());
    let rings = match element {
        None => None,
        Some(element) => one_launch::STAGES
            .into_iter()
            .map(|stages| items(element, stages))
            .find(|items| items.as_ref().map_or(true, |items| one_launch::fits(items, r, cluster, most_shared)))
            .transpose()?,
    };
    let decode128_items = sizes.split_lists().saturating_mul(decode128::row_blocks(&sizes).into());
    let small_cluster = match decode128::row_blocks(&sizes) {
        1 => cluster_that_leaves_room(facts, kernels, sizes.split_lists(), cluster),
        _ => largest_cluster(kernels, decode128_items),
    };
    let repair = RepairSizes {
        list_entries: r.selected.cap().max(r.predicted.cap()),
        entries_per_partial: r.entries_per_partial,
        blocks: params.token_capacity.div_ceil(params.block.value),
        near_states: are_near(r.kept),
        has_clusters: !kernels.cluster_sizes.is_empty(),
        runs_verify128: kernels.verify_clusters.is_some(),
        exact: matches!(r.kept, Kept::Exact(_)),
        multiprocessors: facts.multiprocessors,
        decode128_items,
        decode128_fits: element.is_some_and(|of| decode128::shared(of, sizes.rows, small_cluster) <= most_shared),
        verify128_fits: verify128::fits(r, most_shared),
        one_launch_fits: rings.is_some(),
    };
    let variant = choose(forced, |variant| fit_repair(variant, &sizes, &options, &repair))?;
    if variant == RepairVariant::TwoLaunches {
        return Ok(TwoLaunches::new(facts, kernels, r)?.map(Plan::TwoLaunches));
    }
    let element = element.unwrap_or(Element::F16);
    let kernel = kernels.repair_of(variant, element);
    let (shared, size) = match (variant, rings) {
        (RepairVariant::Verify128, _) => {
            let clusters = kernels.verify_clusters.expect("it is chosen where it runs");
            let size = clusters.of_repair(device::verify128_items(&sizes));
            to.to = device::describe_verify128(&params, &sizes, size);
            describe_repair(r, to);
            (verify128::lay_out(to, r), size)
        }
        (RepairVariant::Decode128, _) => {
            to.to = items(element, one_launch::STAGES[0])?.params;
            describe_repair(r, to);
            (decode128::lay_out(to, &sizes, element, small_cluster), small_cluster)
        }
        (_, Some(rings)) => {
            to.to = rings.params;
            describe_repair(r, to);
            to.counts = address(r.known_misses);
            (one_launch::lay_out(to, r, &rings, cluster) as u32, cluster)
        }
        (_, None) => unreachable!("one launch is chosen where it fits"),
    };
    let is_verify128 = variant == RepairVariant::Verify128;
    let threads = if is_verify128 { device::VERIFY128_THREADS } else { device::THREADS };
    let kind = if size == 1 && !is_verify128 { Kind::Dependent } else { Kind::DependentClusters(size) };
    let grid = Grid { ctas: to.to.work_items * size, threads, kind };
    Ok(Some(Plan::OneLaunch(variant, kernel.sharing(shared), grid)))
}

/// Where there are multiprocessors for the CTAs of two launches, the next launch should start while this one runs. But clusters lie
/// within parts of the device, which need not be of the same size: one cluster that waits for another's end is later than all the
/// rest, while clusters of a CTA less may all find room.
fn cluster_that_leaves_room(facts: &Facts, kernels: &Kernels, lists: u64, size: u32) -> u32 {
    let both = lists.saturating_mul(2);
    if both.saturating_mul(size as u64) > facts.multiprocessors as u64 {
        return size;
    }
    (size / 2 + 1..=size).rfind(|&size| kernels.active_clusters[size as usize - 1] as u64 >= both).unwrap_or(size)
}

/// CTAs of the largest clusters of which one for each work item runs at once.
fn largest_cluster(kernels: &Kernels, items: u64) -> u32 {
    kernels.active_clusters.iter().rposition(|&clusters| u64::from(clusters) >= items).unwrap_or(0) as u32 + 1
}

/// Rows of acc begin and end on 16 bytes, and strides of partials fit in 32 bits.
fn are_near(kept: &Kept) -> bool {
    let is_near = |t: &Tensor, d: usize| t.dim(d) <= 1 || is_near(t.byte_stride(d));
    match kept {
        Kept::Superset(State { acc, .. }) => is_copied_by_16(acc),
        Kept::Exact(State { acc, m, l }) => {
            let partials = m.rank() - 1;
            is_copied_by_16(acc) && [acc, m, l].into_iter().all(|t| is_near(t, partials))
        }
    }
}

/// Attention to selected blocks.
fn job<'r>(r: &Request<'r>) -> Job<'r, 'r> {
    let Request { problem, selected, entries_per_partial, outputs, .. } = *r;
    Job {
        problem,
        list: Some(selected),
        entries_per_partial,
        partials: None,
        outputs,
        term: None,
        has_start: true,
        is_far: false,
        far_pages: None,
    }
}

/// What every variant tells its first kernel, apart from what attention is told.
fn describe_repair(r: &Request, params: &mut RepairParams) {
    (params.exact, params.kept) = match r.kept {
        Kept::Superset(state) => (0, StateView::of_state(state)),
        Kept::Exact(partials) => (1, StateView::of_partials(partials)),
    };
    params.predicted = View::by_position(&r.predicted.ids);
    params.predicted_counts = View::by_position(&r.predicted.counts);
    params.missed = r.missed_counts.map_or(View::ABSENT, View::by_position);
    params.predicted_capacity = r.predicted.cap() as u32;
    params.entries = Divisor::new(r.entries_per_partial as u32);
}
