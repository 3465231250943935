//! Launches of the kernels of kernels/select/means.cuh: the MEAN methods, and AXIS in every form.

use super::params::{MOST_HEADS, MOST_TOKENS, SelectParams, THREADS, check_sharing, grid, scratch, sharing};
use super::rows::{RowKernel, RowPlan, TopKernels};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::index::{self, Axes, Windows};
use crate::ops::select::Request;
use crate::ops::select::choose::{RowShape, TopVariant};
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::views::{Summary, element_code, has_aligned_rows};
use crate::runtime::cuda::{self, Enqueue, Facts, Kernel, Modules};

pub struct MeanKernels {
    means_16: Kernel,
    means_32: Kernel,
    axes_4: Kernel,
    axes_16: Kernel,
    axes_32: Kernel,
    weigh: RowKernel,
}

impl MeanKernels {
    pub fn find(modules: &Modules) -> Result<MeanKernels> {
        let score = |name| modules.kernel("select/means", name);
        Ok(MeanKernels {
            means_16: score("select_means_score_16")?,
            means_32: score("select_means_score_32")?,
            axes_4: score("select_axis_general_score_4")?,
            axes_16: score("select_axis_general_score_16")?,
            axes_32: score("select_axis_general_score_32")?,
            weigh: RowKernel::find(modules, "select/means", "select_means_weigh", WEIGH_SHARED, false)?,
        })
    }
}

kernel_struct! {
    /// Mirrors MeanParams of kernels/select/params.cuh.
    pub struct MeanParams {
        pub select: SelectParams,
        pub means: Summary,
        pub range: Summary,
        pub products: *mut u8,
        pub partials: *mut u8,
        pub seen: *mut u8,
        pub heads: u32,
        pub chunks: u32,
        pub scoring: u32,
        pub size: u32,
        pub stride: u32,
        pub softmax: u32,
        pub is_axis: u32,
        pub dtype: u32,
        pub lanes: u32,
        pub adjacent: u32,
    }
}

/// CHUNK of kernels/select/means.cuh.
pub const CHUNK_WINDOWS: usize = 128;
/// Shared memory that select_means_weigh declares, or more.
const WEIGH_SHARED: usize = 24 << 10;
/// Channels of a lane.
const LANE_CHANNELS: usize = 8;

impl MeanParams {
    /// Without scratch, windows and a split.
    pub fn of(select: SelectParams, summaries: &Summaries) -> MeanParams {
        MeanParams {
            select,
            means: Summary::new(Some(summaries.first)),
            range: Summary::new(summaries.range),
            products: std::ptr::null_mut(),
            partials: std::ptr::null_mut(),
            seen: std::ptr::null_mut(),
            heads: 0,
            chunks: 0,
            scoring: 1,
            size: 1,
            stride: 1,
            softmax: 0,
            is_axis: summaries.is_axis as u32,
            // INT4 has none.
            dtype: if summaries.range.is_some() { 0 } else { element_code(summaries.first.dtype) },
            lanes: summaries.lanes as u32,
            adjacent: summaries.adjacent as u32,
        }
    }
}

/// Blocks as windows: one overlaps itself alone, and is there from its first token on.
pub fn blocks_as_windows(axes: &Axes) -> Windows {
    Windows { size: 1, stride: axes.block_size }
}

/// What score_means and score_axes read.
pub struct Summaries<'a> {
    first: &'a Tensor<'a>,
    /// Scales and minima of INT4.
    range: Option<&'a Tensor<'a>>,
    is_axis: bool,
    /// Lanes that read a summary.
    lanes: usize,
    adjacent: bool,
}

impl<'a> Summaries<'a> {
    pub fn of_means(r: &Request, means: &'a Tensor<'a>) -> Summaries<'a> {
        let lanes = (r.queries.heads.dim / LANE_CHANNELS).next_power_of_two().clamp(4, 32);
        let adjacent = has_aligned_rows(means, 16);
        Summaries { first: means, range: None, is_axis: false, lanes, adjacent }
    }

    /// Half of the lanes for the means, the others for the axes.
    pub fn of_axes(r: &Request, axes: &'a Axes<'a>) -> Summaries<'a> {
        let dim = r.queries.heads.dim;
        let lanes = 2 * dim.div_ceil(index::GROUP).next_power_of_two().clamp(4, 16);
        let has_aligned_range = |range: &Tensor| dim.is_multiple_of(index::GROUP) && has_aligned_rows(range, 4);
        let adjacent = has_aligned_rows(&axes.axes, 16) && axes.range.as_ref().is_none_or(has_aligned_range);
        Summaries { first: &axes.axes, range: axes.range.as_ref(), is_axis: true, lanes, adjacent }
    }

    fn scoring<'k>(&self, kernels: &'k MeanKernels) -> &'k Kernel {
        match (self.is_axis, self.first.dtype.bits) {
            (false, 16) => &kernels.means_16,
            (false, _) => &kernels.means_32,
            (true, 8) => &kernels.axes_4,
            (true, 16) => &kernels.axes_16,
            (true, _) => &kernels.axes_32,
        }
    }
}

/// The split of a call's work, and where its parts of scratch begin.
pub struct MeanPlan {
    heads: usize,
    stored: usize,
    chunks: usize,
    scoring: usize,
    pub weighing: RowPlan,
    products: usize,
    partials: usize,
    seen: usize,
    pub bytes: usize,
}

impl MeanPlan {
    pub fn new(
        facts: &Facts,
        kernels: &TopKernels,
        forced: Option<TopVariant>,
        r: &Request,
        windows: &Windows,
    ) -> Result<MeanPlan> {
        let (rows, block_size) = (r.lists(), r.queries.block_size);
        check_sharing(r)?;
        let heads = sharing(r) * r.queries.heads.group();
        if heads > MOST_HEADS {
            return Err(Error::unsupported(format!(
                "q: {heads} query heads for a list; CUDA takes up to {MOST_HEADS}"
            )));
        }
        let stored = r.queries.index.capacity().min(windows.full(MOST_TOKENS));
        let tokens = if stored == 0 { 0 } else { (stored - 1) * windows.stride + windows.size };
        // Blocks that any window overlaps.
        let reached = tokens.min(MOST_TOKENS).div_ceil(block_size);
        let chunks = stored.div_ceil(CHUNK_WINDOWS);
        let scoring = (facts.multiprocessors as usize / rows).min(chunks).max(1);
        let mut scratch = cuda::Parts::default();
        let most_ctas = stored.div_ceil(THREADS as usize).min(reached);
        let wanted = if r.quota.budgets.is_some() { r.quota.cap } else { r.quota.budget.k };
        let row = RowShape { rows, stored: reached, wanted, most_ctas, waits_for_bytes: false };
        let weighing = RowPlan::new(facts, kernels, forced, WEIGH_SHARED, row, &mut scratch)?;
        let products = scratch.take(&[rows, heads, stored, size_of::<f32>()]);
        let partials = scratch.take(&[rows, heads, chunks, 2 * size_of::<f32>()]);
        let seen = scratch.take(&[rows, scoring + 1, size_of::<u32>()]);
        let bytes = scratch.bytes;
        Ok(MeanPlan { heads, stored, chunks, scoring, weighing, products, partials, seen, bytes })
    }
}

pub fn select(
    enqueue: &Enqueue,
    kernels: &MeanKernels,
    top: &TopKernels,
    r: &Request,
    plan: &MeanPlan,
    windows: &Windows,
    summaries: &Summaries,
) -> Result<()> {
    let base = scratch(enqueue, plan.bytes)?;
    let mut select = SelectParams::new(r);
    select.place.capacity = plan.stored as u32;
    plan.weighing.fill(&mut select, &kernels.weigh, base);
    let params = MeanParams {
        products: (base + plan.products) as *mut u8,
        partials: (base + plan.partials) as *mut u8,
        seen: (base + plan.seen) as *mut u8,
        heads: plan.heads as u32,
        chunks: plan.chunks as u32,
        scoring: plan.scoring as u32,
        size: windows.size as u32,
        stride: windows.stride as u32,
        softmax: (r.softmax || summaries.is_axis) as u32,
        ..MeanParams::of(select, summaries)
    };
    let scores = summaries.scoring(kernels);
    let address = (&raw const params).cast();
    // SAFETY: the parameters are the kernels' structs; the op's caller keeps the tensors valid until the stream has passed,
    // and scratch is this call's. The kernels wait before they touch anything.
    unsafe {
        enqueue.launch(scores, grid(enqueue, r.lists() * plan.scoring), [address])?;
        plan.weighing.launch(enqueue, &kernels.weigh, top, &params.select, address)
    }
}
