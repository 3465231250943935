//! Launch of the kernels of kernels/select.

mod axes;
mod held_labels;
mod labels;
mod long_axes;
mod rows;

use super::{BlockList, Request};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::index::{self, Axes, Kind, Labels, Windows};
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{Place, Summary, address, byte_stride, element_code, has_aligned_rows, saturated};
use crate::runtime::cuda::{self, Cuda, Enqueue, Facts, Grid, Kernel, Modules, Source, source};
use axes::{AxesKernels, AxesPlan, Form};
use held_labels::HeldLabelPlan;
use long_axes::{LongAxesKernels, LongAxesPlan};
use rows::{RowKernel, RowPlan, TopKernels};

pub struct Kernels {
    /// 16 bits, one query position, D up to COMMON_DIM, channels side by side.
    minmax_common: RowKernel,
    minmax_16: RowKernel,
    minmax_32: RowKernel,
    means_16: Kernel,
    means_32: Kernel,
    axes_4: Kernel,
    axes_16: Kernel,
    axes_32: Kernel,
    weigh_means: RowKernel,
    /// Selection from scores in memory.
    top: TopKernels,
    labels: labels::LabelKernels,
    /// Labels of lists that fit in a cluster.
    held_labels: Option<held_labels::HeldLabelKernels>,
    /// AXIS in INT4, in one launch, and from long lists in two.
    axes: Option<AxesKernels>,
    long_axes: Option<LongAxesKernels>,
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

    fn find(modules: &Modules) -> Result<Kernels> {
        let minmax = |name, declared| RowKernel::find(modules, "select/minmax", name, declared, true);
        let means = |name| modules.kernel("select/means", name);
        Ok(Kernels {
            minmax_common: minmax("select_minmax_decode", COMMON)?,
            minmax_16: minmax("select_minmax_16", GENERAL)?,
            minmax_32: minmax("select_minmax_32", GENERAL)?,
            means_16: means("select_means_score_16")?,
            means_32: means("select_means_score_32")?,
            axes_4: means("select_axis_general_score_4")?,
            axes_16: means("select_axis_general_score_16")?,
            axes_32: means("select_axis_general_score_32")?,
            weigh_means: RowKernel::find(modules, "select/means", "select_means_weigh", MEANS, false)?,
            top: TopKernels::find(modules)?,
            labels: labels::LabelKernels::find(modules)?,
            held_labels: held_labels::HeldLabelKernels::find(modules)?,
            axes: AxesKernels::find(modules)?,
            long_axes: LongAxesKernels::find(modules)?,
        })
    }
}

kernel_struct! {
    /// Mirrors List of kernels/select/params.cuh. Strides are in bytes; a position's is 0 where positions share a list.
    #[derive(Clone, Copy)]
    struct ListParams {
        ids: *mut u8,
        counts: *mut u8,
        ids_seq: i64,
        ids_pos: i64,
        ids_head: i64,
        ids_entry: i64,
        counts_seq: i64,
        counts_pos: i64,
        counts_head: i64,
    }
}

kernel_struct! {
    /// Mirrors SelectParams of kernels/select/params.cuh. Strides are in bytes.
    #[derive(Clone, Copy)]
    struct SelectParams {
        q: *const u8,
        q_lens: *const u8,
        seq_lens: *const u8,
        budgets: *const u8,
        scores: *mut u8,
        status: *mut u8,
        q_seq: i64,
        q_pos: i64,
        q_head: i64,
        q_channel: i64,
        q_lens_seq: i64,
        seq_lens_seq: i64,
        budgets_seq: i64,
        scores_seq: i64,
        scores_pos: i64,
        scores_head: i64,
        scores_block: i64,
        status_seq: i64,
        status_pos: i64,
        status_head: i64,
        selected: ListParams,
        place: Place,
        scratch_scores: *mut u8,
        cta_status: *mut u8,
        scored_blocks: u32,
        batch: u32,
        positions: u32,
        lists: u32,
        kv_heads: u32,
        group: u32,
        dim: u32,
        q_type: u32,
        block_size: u32,
        k: u32,
        capacity: u32,
        init: u32,
        local: u32,
        max_blocks: u32,
        slices: u32,
        scale: f32,
        by_slices: Divisor,
        by_heads: Divisor,
        by_lists: Divisor,
        by_block: Divisor,
    }
}

kernel_struct! {
    /// Mirrors MinMaxParams of kernels/select/params.cuh.
    struct MinMaxParams {
        select: SelectParams,
        max: Summary,
        min: Summary,
        dtype: u32,
        lanes: u32,
        adjacent: u32,
    }
}

kernel_struct! {
    /// Mirrors MeanParams of kernels/select/params.cuh.
    struct MeanParams {
        select: SelectParams,
        means: Summary,
        range: Summary,
        products: *mut u8,
        partials: *mut u8,
        seen: *mut u8,
        heads: u32,
        chunks: u32,
        scoring: u32,
        size: u32,
        stride: u32,
        softmax: u32,
        is_axis: u32,
        dtype: u32,
        lanes: u32,
        adjacent: u32,
    }
}

/// SCORING_THREADS of kernels/select/means.cuh, and THREADS of kernels/select/labels_general.cuh.
const THREADS: u32 = 512;
/// CHUNK of kernels/select/means.cuh.
const CHUNK_WINDOWS: usize = 128;
/// MOST_HEADS of kernels/select/means.cuh: of all positions of a list.
const MOST_HEADS: usize = 1024;
/// Tokens of the longest sequence.
const MOST_TOKENS: usize = i32::MAX as usize;
/// CHUNK of kernels/select/minmax.cuh: blocks that are worth a CTA.
const CHUNK: usize = 64;
/// Shared memory that the kernels declare, or more.
const COMMON: usize = 13 << 10;
const GENERAL: usize = 48 << 10;
const MEANS: usize = 24 << 10;
/// The longest row that the common form takes.
const COMMON_DIM: usize = 128;
/// MOST_FOLDED of kernels/select/minmax.cuh: positions · D of a shared list.
const MOST_FOLDED: usize = 8 * 576;
/// Positions of a shared list: bits of a word.
const MOST_SHARING: usize = 32;
/// Channels of a lane.
const LANE_CHANNELS: usize = 8;

pub fn blocks(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if r.lists() == 0 {
        return Ok(());
    }
    let (facts, kernels) = (enqueue.facts(), enqueue.kernels::<Kernels>());
    match &r.queries.index.kind {
        Kind::MinMax { max, min, .. } => {
            minmax(enqueue, r, &MinMaxPlan::new(facts, &kernels.top, r, max, min)?, max, min)
        }
        Kind::Mean { windows, means } => {
            mean(enqueue, r, &MeanPlan::new(facts, r, windows)?, windows, &Summaries::of_means(r, means))
        }
        Kind::Axis(axes) => match AxisPlan::new(kernels, facts, r, axes)? {
            AxisPlan::OneLaunch(kernels, form, plan) => axes::select(enqueue, kernels, r, axes, &form, &plan),
            AxisPlan::TwoLaunches(kernels, form, plan) => long_axes::select(enqueue, kernels, r, axes, &form, &plan),
            AxisPlan::General(plan) => mean(enqueue, r, &plan, &blocks_as_windows(axes), &Summaries::of_axes(r, axes)),
        },
        Kind::Label(labels) => by_labels(enqueue, r, labels, true),
    }
}

/// What `blocks` takes of its stream's arena.
pub fn blocks_scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    if r.lists() == 0 {
        return Ok(0);
    }
    let (facts, kernels) = (cuda.facts(), cuda.kernels::<Kernels>());
    Ok(match &r.queries.index.kind {
        Kind::MinMax { max, min, .. } => MinMaxPlan::new(facts, &kernels.top, r, max, min)?.bytes,
        Kind::Mean { windows, .. } => MeanPlan::new(facts, r, windows)?.bytes,
        Kind::Label(labels) => label_scratch(cuda, r, labels, true)?,
        Kind::Axis(axes) => match AxisPlan::new(kernels, facts, r, axes)? {
            AxisPlan::OneLaunch(..) => 0,
            AxisPlan::TwoLaunches(_, _, plan) => plan.bytes,
            AxisPlan::General(plan) => plan.bytes,
        },
    })
}

pub fn tokens(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if r.lists() == 0 {
        return Ok(());
    }
    match &r.queries.index.kind {
        Kind::Label(labels) => by_labels(enqueue, r, labels, false),
        _ => unreachable!("the kind was checked"),
    }
}

/// What `tokens` takes of its stream's arena.
pub fn tokens_scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    match &r.queries.index.kind {
        _ if r.lists() == 0 => Ok(0),
        Kind::Label(labels) => label_scratch(cuda, r, labels, false),
        _ => unreachable!("the kind was checked"),
    }
}

/// Selection of blocks, or of tokens.
fn by_labels(enqueue: &Enqueue, r: &Request, labels: &Labels, of_blocks: bool) -> Result<()> {
    let kernels = enqueue.kernels::<Kernels>().held_labels.as_ref();
    match (kernels, HeldLabelPlan::new(kernels, r, labels, of_blocks)) {
        (Some(kernels), Some(plan)) => held_labels::select(enqueue, kernels, r, labels, &plan),
        _ => labels::select(enqueue, r, labels, of_blocks),
    }
}

fn label_scratch(cuda: &Cuda, r: &Request, labels: &Labels, of_blocks: bool) -> Result<usize> {
    match HeldLabelPlan::new(cuda.kernels::<Kernels>().held_labels.as_ref(), r, labels, of_blocks) {
        Some(_) => Ok(0),
        None => Ok(labels::LabelPlan::new(r, of_blocks)?.bytes),
    }
}

fn check_sharing(r: &Request) -> Result<()> {
    if sharing(r) <= MOST_SHARING {
        return Ok(());
    }
    Err(Error::unsupported(format!("q: {} positions share a list; CUDA takes up to {MOST_SHARING}", sharing(r))))
}

/// Positions that a list is for.
fn sharing(r: &Request) -> usize {
    if r.selected.is_own() { 1 } else { r.queries.positions.count() }
}

/// The four dimensions of a tensor that has one for positions, or not: strides of sequence, position, head and entry.
fn strides(t: Option<&Tensor>, has_positions: bool) -> [i64; 4] {
    match has_positions {
        true => [0, 1, 2, 3].map(|d| byte_stride(t, d)),
        false => [byte_stride(t, 0), 0, byte_stride(t, 1), byte_stride(t, 2)],
    }
}

impl ListParams {
    fn new(list: &BlockList) -> ListParams {
        let [ids_seq, ids_pos, ids_head, ids_entry] = strides(Some(&list.ids), list.is_own());
        let [counts_seq, counts_pos, counts_head, _] = strides(Some(&list.counts), list.is_own());
        let (ids, counts) = (list.ids.data(), list.counts.data());
        ListParams { ids, counts, ids_seq, ids_pos, ids_head, ids_entry, counts_seq, counts_pos, counts_head }
    }
}

impl SelectParams {
    /// Without scratch.
    fn new(r: &Request) -> SelectParams {
        let (positions, heads) = (&r.queries.positions, r.queries.heads);
        let (scores, status, own) = (r.scores.as_ref(), r.status.as_ref(), r.selected.is_own());
        let [q_seq, q_pos, q_head, q_channel] = strides(Some(&positions.q), positions.dimension().is_some());
        let [scores_seq, scores_pos, scores_head, scores_block] = strides(scores, own);
        let [status_seq, status_pos, status_head, _] = strides(status, own);
        let (budget, block_size) = (r.quota.budget, saturated(r.queries.block_size));
        SelectParams {
            q: positions.q.data(),
            q_lens: address(positions.lens.as_ref()),
            seq_lens: r.queries.seq_lens.data(),
            budgets: address(r.quota.budgets.as_ref()),
            scores: address(scores),
            status: address(status),
            q_seq,
            q_pos,
            q_head,
            q_channel,
            q_lens_seq: byte_stride(positions.lens.as_ref(), 0),
            seq_lens_seq: r.queries.seq_lens.byte_stride(0),
            budgets_seq: byte_stride(r.quota.budgets.as_ref(), 0),
            scores_seq,
            scores_pos,
            scores_head,
            scores_block,
            status_seq,
            status_pos,
            status_head,
            selected: ListParams::new(&r.selected),
            place: r.queries.index.place(),
            scratch_scores: std::ptr::null_mut(),
            cta_status: std::ptr::null_mut(),
            scored_blocks: 0,
            batch: r.queries.batch() as u32,
            positions: positions.count() as u32,
            lists: r.selected.per_head() as u32,
            kv_heads: heads.kv as u32,
            group: heads.group() as u32,
            dim: heads.dim as u32,
            q_type: element_code(positions.q.dtype),
            block_size,
            k: saturated(budget.k),
            capacity: saturated(r.quota.cap),
            init: saturated(budget.init),
            local: saturated(budget.local),
            max_blocks: scores.map_or(0, |t| saturated(t.dim(t.rank() - 1))),
            slices: 1,
            scale: r.queries.scale,
            by_slices: Divisor::new(1),
            by_heads: Divisor::new(heads.kv as u32),
            by_lists: Divisor::new(r.selected.per_head() as u32),
            by_block: Divisor::new(block_size),
        }
    }
}

/// How the work of MINMAX is cut.
struct MinMaxPlan {
    is_common: bool,
    adjacent: bool,
    stored: usize,
    rows: RowPlan,
    bytes: usize,
}

impl MinMaxPlan {
    fn new(facts: &Facts, kernels: &TopKernels, r: &Request, max: &Tensor, min: &Tensor) -> Result<MinMaxPlan> {
        let dim = r.queries.heads.dim;
        check_sharing(r)?;
        if sharing(r) * dim > MOST_FOLDED {
            let found = format!("q: {} positions of {dim} channels share a list", sharing(r));
            return Err(Error::unsupported(format!("{found}; CUDA takes up to {MOST_FOLDED} channels of all")));
        }
        let adjacent = [max, min].into_iter().all(|t| has_aligned_rows(t, 16));
        let is_common = adjacent && max.dtype.bits == 16 && r.queries.positions.count() == 1 && dim <= COMMON_DIM;
        let stored = r.queries.index.capacity().min(MOST_TOKENS.div_ceil(r.queries.block_size));
        let declared = if is_common { COMMON } else { GENERAL };
        let mut scratch = cuda::Parts::default();
        let wanted = if r.quota.budgets.is_some() { r.quota.cap } else { r.quota.budget.k };
        let sieve = kernels.sieve(facts, r.lists(), stored, wanted);
        let rows = RowPlan::new(facts, declared, sieve, [r.lists(), stored, stored.div_ceil(CHUNK)], &mut scratch)?;
        Ok(MinMaxPlan { is_common, adjacent, stored, rows, bytes: scratch.bytes })
    }
}

fn minmax(enqueue: &Enqueue, r: &Request, plan: &MinMaxPlan, max: &Tensor, min: &Tensor) -> Result<()> {
    let kernels: &Kernels = enqueue.kernels();
    let kernel = match (plan.is_common, max.dtype.bits) {
        (true, _) => &kernels.minmax_common,
        (false, 16) => &kernels.minmax_16,
        (false, _) => &kernels.minmax_32,
    };
    let mut select = SelectParams::new(r);
    select.place.capacity = plan.stored as u32;
    plan.rows.fill(&mut select, kernel, scratch(enqueue, plan.bytes)?);
    let params = MinMaxParams {
        select,
        max: Summary::new(Some(max)),
        min: Summary::new(Some(min)),
        dtype: element_code(max.dtype),
        // A half of the lanes for each summary.
        lanes: 2 * (r.queries.heads.dim / LANE_CHANNELS).next_power_of_two().clamp(4, 16) as u32,
        adjacent: plan.adjacent as u32,
    };
    // SAFETY: the parameters are the kernels' structs; the op's caller keeps the tensors valid until the stream has passed,
    // and scratch is this call's. The kernels wait before they touch anything.
    unsafe { plan.rows.launch(enqueue, kernel, &kernels.top, &params.select, (&raw const params).cast()) }
}

/// The kernels of AXIS, and how its work is cut.
enum AxisPlan<'k> {
    OneLaunch(&'k AxesKernels, Form, AxesPlan),
    TwoLaunches(&'k LongAxesKernels, Form, LongAxesPlan),
    /// Blocks as windows.
    General(MeanPlan),
}

impl AxisPlan<'_> {
    fn new<'k>(kernels: &'k Kernels, facts: &Facts, r: &Request, axes: &Axes) -> Result<AxisPlan<'k>> {
        if let (Some(short), Some(long), Some(form)) = (&kernels.axes, &kernels.long_axes, Form::new(r, axes)) {
            if let Some(plan) = LongAxesPlan::new(long, r, &form) {
                return Ok(AxisPlan::TwoLaunches(long, form, plan));
            }
            if let Some(plan) = AxesPlan::new(&short.shares, r.lists(), &form) {
                return Ok(AxisPlan::OneLaunch(short, form, plan));
            }
        }
        Ok(AxisPlan::General(MeanPlan::new(facts, r, &blocks_as_windows(axes))?))
    }
}

/// Blocks as windows: one overlaps itself alone, and is there from its first token on.
fn blocks_as_windows(axes: &Axes) -> Windows {
    Windows { size: 1, stride: axes.block_size }
}

/// What score_means and score_axes read.
struct Summaries<'a> {
    first: &'a Tensor<'a>,
    /// Of INT4.
    range: Option<&'a Tensor<'a>>,
    is_axis: bool,
    /// Of a summary.
    lanes: usize,
    adjacent: bool,
}

impl<'a> Summaries<'a> {
    fn of_means(r: &Request, means: &'a Tensor<'a>) -> Summaries<'a> {
        let lanes = (r.queries.heads.dim / LANE_CHANNELS).next_power_of_two().clamp(4, 32);
        let adjacent = has_aligned_rows(means, 16);
        Summaries { first: means, range: None, is_axis: false, lanes, adjacent }
    }

    /// Half of the lanes for the means, the others for the axes.
    fn of_axes(r: &Request, axes: &'a Axes<'a>) -> Summaries<'a> {
        let dim = r.queries.heads.dim;
        let lanes = 2 * dim.div_ceil(index::GROUP).next_power_of_two().clamp(4, 16);
        let has_aligned_range = |range: &Tensor| dim.is_multiple_of(index::GROUP) && has_aligned_rows(range, 4);
        let adjacent = has_aligned_rows(&axes.axes, 16) && axes.range.as_ref().is_none_or(has_aligned_range);
        Summaries { first: &axes.axes, range: axes.range.as_ref(), is_axis: true, lanes, adjacent }
    }

    fn scoring<'k>(&self, kernels: &'k Kernels) -> &'k Kernel {
        match (self.is_axis, self.first.dtype.bits) {
            (false, 16) => &kernels.means_16,
            (false, _) => &kernels.means_32,
            (true, 8) => &kernels.axes_4,
            (true, 16) => &kernels.axes_16,
            (true, _) => &kernels.axes_32,
        }
    }
}

/// How the work of the MEAN methods and of AXIS is cut, and where its most_tiles of scratch begin.
struct MeanPlan {
    heads: usize,
    stored: usize,
    chunks: usize,
    scoring: usize,
    weighing: RowPlan,
    products: usize,
    partials: usize,
    seen: usize,
    bytes: usize,
}

impl MeanPlan {
    fn new(facts: &Facts, r: &Request, windows: &Windows) -> Result<MeanPlan> {
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
        let most = stored.div_ceil(rows::THREADS as usize).min(reached);
        let weighing = RowPlan::new(facts, MEANS, None, [rows, reached, most], &mut scratch)?;
        let products = scratch.take(&[rows, heads, stored, size_of::<f32>()]);
        let partials = scratch.take(&[rows, heads, chunks, 2 * size_of::<f32>()]);
        let seen = scratch.take(&[rows, scoring + 1, size_of::<u32>()]);
        let bytes = scratch.bytes;
        Ok(MeanPlan { heads, stored, chunks, scoring, weighing, products, partials, seen, bytes })
    }
}

fn mean(enqueue: &Enqueue, r: &Request, plan: &MeanPlan, windows: &Windows, summaries: &Summaries) -> Result<()> {
    let kernels: &Kernels = enqueue.kernels();
    let base = scratch(enqueue, plan.bytes)?;
    let mut select = SelectParams::new(r);
    select.place.capacity = plan.stored as u32;
    plan.weighing.fill(&mut select, &kernels.weigh_means, base);
    let params = MeanParams {
        select,
        means: Summary::new(Some(summaries.first)),
        range: Summary::new(summaries.range),
        products: (base + plan.products) as *mut u8,
        partials: (base + plan.partials) as *mut u8,
        seen: (base + plan.seen) as *mut u8,
        heads: plan.heads as u32,
        chunks: plan.chunks as u32,
        scoring: plan.scoring as u32,
        size: windows.size as u32,
        stride: windows.stride as u32,
        softmax: (r.softmax || summaries.is_axis) as u32,
        is_axis: summaries.is_axis as u32,
        // INT4 has none.
        dtype: if summaries.range.is_some() { 0 } else { element_code(summaries.first.dtype) },
        lanes: summaries.lanes as u32,
        adjacent: summaries.adjacent as u32,
    };
    let scores = summaries.scoring(kernels);
    let address = (&raw const params).cast();
    // SAFETY: as in `minmax`.
    unsafe {
        enqueue.launch(scores, grid(enqueue, r.lists() * plan.scoring), [address])?;
        plan.weighing.launch(enqueue, &kernels.weigh_means, &kernels.top, &params.select, address)
    }
}

/// Where a call's scratch begins; it may need none.
fn scratch(enqueue: &Enqueue, bytes: usize) -> Result<usize> {
    if bytes == 0 { Ok(0) } else { Ok(enqueue.scratch(bytes)? as usize) }
}

fn grid(enqueue: &Enqueue, ctas: usize) -> Grid {
    Grid { ctas: ctas as u32, threads: THREADS, kind: enqueue.dependent_kind() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            ListParams::layout("List"),
            SelectParams::layout("SelectParams"),
            MinMaxParams::layout("MinMaxParams"),
            MeanParams::layout("MeanParams"),
            axes::AxisTileParams::layout("AxisTileParams"),
            long_axes::AxisTwoLaunchesParams::layout("AxisTwoLaunchesParams"),
            labels::LabelParams::layout("LabelParams"),
            held_labels::LabelClusterParams::layout("LabelClusterParams"),
        ];
        layout::check("select", file!(), &structs);
    }
}
