//! What the launches of sampling calls share: the parameters of kernels/common/sampling.cuh, and how a call is cut.

use super::request::Sampling;
use super::{Form, SEGMENT};
use crate::abi::{VWD_SAMPLE_DRAFT_PROBABILITIES, VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_TEMPERATURE_LAST};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::{Divisor, kernel_constants, kernel_struct};
use crate::runtime::cuda::views::{View, element_code, has_aligned_rows};
use crate::runtime::cuda::{Enqueue, Facts, Grid, Kernel, Kind, Parts};

kernel_struct! {
    /// Mirrors SamplingParams of kernels/common/sampling.cuh.
    pub struct SamplingParams {
        target: View<3>,
        draft_rows: View<3>,
        draft_map: View<1>,
        temperature: View<1>,
        top_k: View<1>,
        top_p: View<1>,
        min_p: View<1>,
        seeds: View<1>,
        positions: View<1>,
        segments: *mut u8,
        rows: *mut u8,
        groups: *mut u8,
        rest: *mut u8,
        refused: *mut u8,
        counters: *mut u8,
        per_request: Divisor,
        per_row: Divisor,
        per_row_ctas: Divisor,
        rest_ctas: Divisor,
        launch_rows: u32,
        first: u32,
        tokens: u32,
        draft_tokens: u32,
        flags: u32,
        position_bytes: u32,
        target_type: u32,
        draft_type: u32,
        target_adjacent: u32,
        draft_adjacent: u32,
        is_greedy: u32,
        segments_at_once: u32,
    }
}

kernel_constants! {
    /// Shared memory of a CTA that streams segments, and its warps.
    pub const STREAM_BYTES: u32 = 192 << 10;
    pub const STREAM_WARPS: u32 = 12;
    /// CTAs of the largest cluster that takes a row, if the device can form it, segments that each of them has at most, and segments of a row.
    const MOST_ROW_CTAS: u32 = 16;
    const MOST_CTA_SEGMENTS: usize = 8;
    const MOST_ROW_SEGMENTS: usize = 64;
}

/// Shared memory that a CTA of a cluster declares. Segments lie behind it.
const CLUSTER_SHARED: u32 = 10880;
/// Shared memory behind the segments where rows have filters: a CTA of fewer segments than [`MOST_CTA_SEGMENTS`] searches for their bounds in it.
const SEARCH_BYTES: u32 = 16384;
/// How many CTAs of clusters a multiprocessor may be given room for, so that no more lie on one than need to. One is not among them: the CTAs of a launch
/// that begins early would find no room next to it.
const SPREADS: [u32; 3] = [2, 3, 4];
/// Shared memory that the device keeps of each CTA's.
const KEPT_SHARED: u32 = 1024;
/// Threads of a CTA: DRAW_THREADS of kernels/common/draw.cuh, and SEGMENT_THREADS of kernels/common/sampling.cuh.
pub const THREADS: u32 = 256;
const SEGMENT_THREADS: u32 = 256;
/// CTAs of SEGMENT_THREADS on a multiprocessor at once.
const CTAS_AT_ONCE: usize = 4;
/// The most segments that one CTA takes: its start is then a small part of its time.
const MOST_SEGMENTS_A_CTA: usize = 4;
/// Segments that a CTA of a cluster has at once, where rows are few and where they are more, and the most CTAs of four multiprocessors for each,
/// where a number has 16 bits and where it has 32. With more of them it pays to stream segments, or to record them in a launch of their own.
const CLUSTER_SEGMENTS: [usize; 2] = [2, MOST_ROW_SEGMENTS / MOST_ROW_CTAS as usize];
const CLUSTER_CTAS_16: [usize; 2] = [16, 20];
const CLUSTER_CTAS_32: [usize; 2] = [4, 8];
/// The same where rows have filters, and top-k is one of them. From the last of these on, half clusters take rows of 16 bits while all of them run at once.
const TOP_K_CTAS_16: [usize; 2] = [8, 9];
const TOP_K_CTAS_32: [usize; 2] = [8, 8];
/// The same where top-k is none of them: thousands of tokens may stay, among which a cluster finds a bound sooner than one CTA does.
const FILTERED_CTAS_16: [usize; 2] = [8, 25];
const FILTERED_CTAS_32: [usize; 2] = [8, 12];
/// The same where top-p is the only filter, and a kernel for that alone decides rows that clusters do not take.
const TOP_P_CTAS_16: [usize; 2] = [8, 14];
const TOP_P_CTAS_32: [usize; 2] = [8, 8];
/// Segments of a CTA that sums what a refusal leaves, at most.
const MOST_REST_SEGMENTS: usize = 16;
/// Bytes of what a CTA leaves in scratch for a segment, and for a row.
const RECORD_BYTES: usize = 32;
/// Groups of a segment: GROUPS of kernels/common/filter.cuh.
const GROUPS: usize = SEGMENT / 256;
/// Bytes of what a segment has left where a draft token was refused.
const REST_BYTES: usize = 16;
/// Scratch of one launch: a session's own arenas have as much.
const MOST_SCRATCH: usize = 12 << 20;
/// Rows of a call.
const MOST_ROWS: usize = 1 << 24;

/// Whether rows that a call reads are weights. Kernels of segments have a form for these, and one for rows of logits alone.
pub fn reads_weights(s: &Sampling) -> bool {
    s.target_form == Form::Weights || s.draft_rows.is_some() && s.draft_form == Form::Weights
}

/// Segments of these rows that a warp has at once where it streams them; `None` if they do not lie so that bulk copies can bring them.
pub fn streamed_at_once(target: &Tensor, s: &Sampling) -> Option<usize> {
    let mut rows = [Some(*target), s.draft_rows].into_iter().flatten();
    let has_wide = rows.clone().any(|t| t.dtype.bytes() == 4);
    rows.all(|t| has_aligned_rows(&t, 16)).then_some(if has_wide { 1 } else { 2 })
}

/// Shared memory of so many segments, of numbers of so many bytes.
fn stage_bytes(segments: usize, number_bytes: usize) -> u32 {
    (segments * SEGMENT * number_bytes) as u32
}

/// A kernel whose clusters take a row each.
pub struct ClusterKernel {
    kernel: Kernel,
    /// It is for rows with filters.
    filters: bool,
    /// CTAs of the largest cluster, up to [`MOST_ROW_CTAS`], that has up to four segments a CTA.
    pub largest: usize,
    half_16: HalfClusters,
    half_32: HalfClusters,
    spreads: [Spread; SPREADS.len()],
}

/// Shared memory of a CTA with which a multiprocessor has room for so many and no more, and how many clusters of n + 1 CTAs then run at once.
#[derive(Clone, Copy, Default)]
struct Spread {
    bytes: u32,
    at_once: [usize; MOST_ROW_CTAS as usize],
}

/// Shared memory of a CTA, at most so much, with which a multiprocessor has room for `ctas` of them and for no more.
fn spread_bytes(ctas: u32, shared_bytes: u32) -> u32 {
    ((shared_bytes + KEPT_SHARED) / (ctas + 1) - KEPT_SHARED).next_multiple_of(128)
}

/// The first shared memory with which so many clusters run at once.
fn spread(spreads: &[Spread], ctas: usize, clusters: usize) -> u32 {
    spreads.iter().find(|spread| spread.at_once[ctas - 1] >= clusters).map_or(0, |spread| spread.bytes)
}

/// Half clusters of n + 1 CTAs that run at once: each CTA has [`MOST_CTA_SEGMENTS`] segments.
pub type HalfClusters = [usize; MOST_ROW_SEGMENTS / MOST_CTA_SEGMENTS];

impl ClusterKernel {
    /// The context is current.
    pub fn new(kernel: Kernel, filters: bool, facts: &Facts) -> Result<ClusterKernel> {
        let most = stage_bytes(MOST_CTA_SEGMENTS, size_of::<f32>());
        kernel.allow_shared(most.min(facts.shared_bytes - CLUSTER_SHARED))?;
        kernel.allow_large_clusters()?;
        // Three CTAs take all the shared memory of a multiprocessor: with less of it, fewer of them would run at once.
        kernel.prefer_shared()?;
        let mut made = ClusterKernel {
            kernel,
            filters,
            largest: 0,
            half_16: Default::default(),
            half_32: Default::default(),
            spreads: Default::default(),
        };
        let at_once =
            |ctas, segments, number_bytes| made.sharing(segments, number_bytes).active_clusters(ctas, THREADS) as usize;
        let can_form = |ctas: &u32| at_once(*ctas, CLUSTER_SEGMENTS[1], size_of::<f32>()) > 0;
        let largest = (1..=MOST_ROW_CTAS).rev().find(can_form).unwrap_or(0) as usize;
        let half = |number_bytes| std::array::from_fn(|n| at_once(n as u32 + 1, MOST_CTA_SEGMENTS, number_bytes));
        let (half_16, half_32) = (half(size_of::<u16>()), half(size_of::<f32>()));
        (made.largest, made.half_16, made.half_32) = (largest, half_16, half_32);
        if !filters {
            made.spreads = SPREADS.map(|ctas| {
                let bytes = spread_bytes(ctas, facts.shared_bytes);
                let kernel = kernel.sharing(bytes);
                Spread {
                    bytes,
                    at_once: std::array::from_fn(|n| kernel.active_clusters(n as u32 + 1, THREADS) as usize),
                }
            });
        }
        Ok(made)
    }

    /// The kernel for so many rows of numbers of so many bytes, in each launch. CTAs are given more shared memory than they use where that keeps many of them
    /// from one multiprocessor while others have few: those of a launch that begins early come where the one before leaves room.
    pub fn of(&self, clusters: RowClusters, rows: usize, number_bytes: usize) -> Kernel {
        let kernel = self.sharing(clusters.segments, number_bytes);
        if self.filters {
            return kernel;
        }
        let bytes = stage_bytes(clusters.segments, number_bytes);
        kernel.sharing(bytes.max(spread(&self.spreads, clusters.ctas, rows)))
    }

    /// The kernel where a CTA has so many segments of numbers of so many bytes.
    fn sharing(&self, segments: usize, number_bytes: usize) -> Kernel {
        let searches = self.filters && segments < MOST_CTA_SEGMENTS;
        self.kernel.sharing(stage_bytes(segments, number_bytes) + if searches { SEARCH_BYTES } else { 0 })
    }

    /// Of numbers of so many bytes.
    pub fn half_clusters(&self, number_bytes: usize) -> &HalfClusters {
        if number_bytes == 2 { &self.half_16 } else { &self.half_32 }
    }
}

/// How a call is cut into launches.
#[derive(Debug, PartialEq)]
pub struct Cut {
    batch: usize,
    /// Requests of a launch.
    requests: usize,
    /// Rows of a request, its draft's included.
    per_request: usize,
    /// Segments of a row.
    per_row: usize,
    options: Options,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Options {
    filters: Filters,
    leaves: Leaves,
}

/// The filters that rows may have.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Filters {
    None,
    /// Top-p, min-p or both.
    ByProbability,
    /// Top-k, and what else there is.
    TopK,
}

/// What kernels leave in scratch for what follows, beside records.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Leaves {
    /// Sums of what segments have left where a draft token was refused.
    pub rest: bool,
    /// Sums of groups, for rows that have no filters and are taken in one launch.
    pub sums: bool,
}

/// Scratch of a launch: where what follows the records of segments begins.
struct Memory {
    parts: Parts,
    rows: usize,
    groups: usize,
    rest: usize,
    refused: usize,
}

/// The kernels of a call.
pub struct Launched<'a> {
    pub segments: Segments<'a>,
    /// `None` where the kernel of segments decides rows, too.
    pub rows: Option<&'a Kernel>,
    /// Tries draft tokens, or draws where they were refused, unless that is done by `rows`.
    pub last: Option<Last<'a>>,
}

/// The kernel that records segments.
pub enum Segments<'a> {
    /// CTAs of each row load them.
    Loaded(&'a Kernel),
    /// CTAs of [`STREAM_WARPS`], one on each multiprocessor, stream those of all rows. A warp has so many at once.
    Streamed(&'a Kernel, usize),
}

/// How clusters of CTAs take rows, each of them one in a single launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowClusters {
    pub ctas: usize,
    /// Segments that a CTA has at once.
    pub segments: usize,
    /// There are so few of them that this is the fastest way.
    pub are_few: bool,
}

/// A kernel that follows those of segments and rows.
pub struct Last<'a> {
    pub kernel: &'a Kernel,
    /// CTAs of a request.
    pub ctas: usize,
    /// These CTAs form a cluster.
    pub is_cluster: bool,
}

impl Cut {
    /// A request has so many rows, of so many tokens at most; `None` if there is nothing to do. `name` is that of the target.
    pub fn of(
        name: &str,
        batch: usize,
        per_request: usize,
        tokens: usize,
        s: &Sampling,
        leaves: Leaves,
    ) -> Result<Option<Cut>> {
        if batch.saturating_mul(per_request) >= MOST_ROWS {
            let text = format!("{name}: {batch} requests of {per_request} rows; CUDA takes fewer than 2^24 rows");
            return Err(Error::unsupported(text));
        }
        let filters = match s {
            Sampling { is_greedy: true, .. } => Filters::None,
            Sampling { top_k: Some(_), .. } => Filters::TopK,
            Sampling { top_p: None, min_p: None, .. } => Filters::None,
            _ => Filters::ByProbability,
        };
        Ok((batch > 0).then(|| Cut::new(batch, per_request, tokens, Options { filters, leaves })))
    }

    fn new(batch: usize, per_request: usize, tokens: usize, options: Options) -> Cut {
        let mut cut = Cut { batch, requests: 1, per_request, per_row: tokens.div_ceil(SEGMENT), options };
        let of_row = cut.per_row * (RECORD_BYTES + cut.group_bytes()) + RECORD_BYTES;
        let bytes = per_request * of_row + cut.per_row * cut.rest_bytes();
        // A counter of each request, and one of each row.
        let counted = Enqueue::COUNTERS / (1 + per_request);
        cut.requests = batch.min(counted).min(MOST_SCRATCH / bytes).max(1);
        cut
    }

    /// Requests of a launch.
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// Segments of all rows.
    pub fn segments(&self) -> usize {
        self.batch.saturating_mul(self.per_request).saturating_mul(self.per_row)
    }

    /// Rows of a launch.
    pub fn rows(&self) -> usize {
        self.batch.min(self.requests) * self.per_request
    }

    /// Segments of a row.
    pub fn per_row(&self) -> usize {
        self.per_row
    }

    pub fn has_filters(&self) -> bool {
        self.options.filters != Filters::None
    }

    /// What a segment leaves of its groups takes so many bytes: their largest numbers, or their sums.
    fn group_bytes(&self) -> usize {
        let of_group = match self.options.leaves {
            _ if self.has_filters() => size_of::<u32>(),
            Leaves { sums: true, .. } => size_of::<u64>(),
            _ => 0,
        };
        GROUPS * of_group
    }

    fn rest_bytes(&self) -> usize {
        if self.options.leaves.rest { REST_BYTES } else { 0 }
    }

    /// Bytes of scratch of a launch.
    pub fn scratch(&self) -> usize {
        self.memory().parts.bytes
    }

    fn memory(&self) -> Memory {
        let mut parts = Parts::default();
        let rows = self.requests * self.per_request;
        parts.take(&[rows, self.per_row, RECORD_BYTES]);
        Memory {
            rows: parts.take(&[rows, RECORD_BYTES]),
            groups: parts.take(&[rows, self.per_row, self.group_bytes()]),
            rest: parts.take(&[self.requests, self.per_row, self.rest_bytes()]),
            refused: parts.take(&[self.requests, size_of::<u32>()]),
            parts,
        }
    }

    /// CTAs that take the segments of a row, so many that those of all rows take the least time: a CTA takes as long for its start as for half a
    /// segment.
    fn ctas_of_row(&self, multiprocessors: u32) -> usize {
        let (rows, at_once) = (self.requests * self.per_request, multiprocessors as usize * CTAS_AT_ONCE);
        let ctas = |segments: usize| self.per_row.div_ceil(segments);
        let time = |segments: &usize| (rows * ctas(*segments)).div_ceil(at_once) * (2 * segments + 1);
        ctas((1..=MOST_SEGMENTS_A_CTA).min_by_key(time).expect("one at least"))
    }

    /// CTAs of a request that sum what a refusal leaves, chosen in the same way: a CTA takes as long for its start as for four segments. A
    /// multiprocessor has so many of them at once.
    pub fn rest_ctas(&self, multiprocessors: u32, at_once: usize) -> usize {
        let at_once = multiprocessors as usize * at_once;
        let ctas = |segments: usize| self.per_row.div_ceil(segments);
        let time = |segments: &usize| (self.requests * ctas(*segments)).div_ceil(at_once) * (segments + 4);
        ctas((1..=MOST_REST_SEGMENTS).min_by_key(time).expect("one at least"))
    }

    /// The parameters of the launches, with their scratch. `target` is the view of what `tensor` is; so many CTAs of a request sum what a refusal leaves.
    pub fn params(
        &self,
        enqueue: &Enqueue,
        s: &Sampling,
        tensor: &Tensor,
        target: View<3>,
        rest_ctas: usize,
    ) -> Result<SamplingParams> {
        let column = |t: &Option<Tensor>| View::<1>::optional(t, |t| View::new(t, [0]));
        let memory = self.memory();
        let scratch = enqueue.scratch(memory.parts.bytes)?;
        let at = |offset: usize| (scratch + offset as u64) as *mut u8;
        let flags = [
            (VWD_SAMPLE_TARGET_PROBABILITIES, s.target_form == Form::Weights),
            (VWD_SAMPLE_DRAFT_PROBABILITIES, s.draft_form == Form::Weights),
            (VWD_SAMPLE_TEMPERATURE_LAST, s.temperature_last),
        ];
        Ok(SamplingParams {
            target,
            draft_rows: View::<3>::optional(&s.draft_rows, |t| View::new(t, [0, 1, 2])),
            draft_map: column(&s.draft_map),
            temperature: column(&s.temperature),
            top_k: column(&s.top_k),
            top_p: column(&s.top_p),
            min_p: column(&s.min_p),
            seeds: column(&s.seeds),
            positions: column(&s.positions),
            segments: at(0),
            rows: at(memory.rows),
            groups: at(memory.groups),
            rest: at(memory.rest),
            refused: at(memory.refused),
            counters: enqueue.counters()? as *mut u8,
            per_request: Divisor::new(self.per_request as u32),
            per_row: Divisor::new(self.per_row as u32),
            per_row_ctas: Divisor::new(self.ctas_of_row(enqueue.facts().multiprocessors) as u32),
            rest_ctas: Divisor::new(rest_ctas as u32),
            launch_rows: 0,
            first: 0,
            tokens: tensor.dim(tensor.rank() - 1) as u32,
            draft_tokens: s.draft_tokens() as u32,
            flags: flags.iter().map(|&(flag, is_set)| if is_set { flag } else { 0 }).sum(),
            position_bytes: s.positions.map_or(4, |t| t.dtype.bytes() as u32),
            target_type: element_code(tensor.dtype),
            draft_type: s.draft_rows.map_or(0, |t| element_code(t.dtype)),
            target_adjacent: has_aligned_rows(tensor, 16) as u32,
            draft_adjacent: s.draft_rows.is_some_and(|t| has_aligned_rows(&t, 16)) as u32,
            is_greedy: s.is_greedy as u32,
            segments_at_once: 0,
        })
    }

    /// How clusters of up to `largest` CTAs take rows of numbers of so many bytes; `None` where these are too long. `top_p_alone`: there is a kernel for the only
    /// filter that rows may have.
    pub fn clusters(
        &self,
        largest: usize,
        number_bytes: usize,
        multiprocessors: u32,
        top_p_alone: bool,
    ) -> Option<RowClusters> {
        let rows = self.rows();
        let most = match (number_bytes, self.options.filters) {
            (2, Filters::ByProbability) if top_p_alone => TOP_P_CTAS_16,
            (_, Filters::ByProbability) if top_p_alone => TOP_P_CTAS_32,
            (2, Filters::None) => CLUSTER_CTAS_16,
            (2, Filters::TopK) => TOP_K_CTAS_16,
            (2, Filters::ByProbability) => FILTERED_CTAS_16,
            (_, Filters::None) => CLUSTER_CTAS_32,
            (_, Filters::TopK) => TOP_K_CTAS_32,
            (_, Filters::ByProbability) => FILTERED_CTAS_32,
        };
        let clusters = CLUSTER_SEGMENTS.into_iter().zip(most).map(|(segments, most)| {
            let ctas = self.per_row.div_ceil(segments);
            RowClusters { ctas, segments, are_few: 4 * rows * ctas <= most * multiprocessors as usize }
        });
        let mut fitting = clusters.filter(|c| c.ctas <= largest);
        let first = fitting.next()?;
        if first.are_few { Some(first) } else { Some(fitting.next().unwrap_or(first)) }
    }

    /// How half clusters take rows, of which so many run at once; `None` where rows are too long, or the device has no such clusters.
    pub fn half_clusters(&self, at_once: &HalfClusters) -> Option<RowClusters> {
        let rows = self.rows();
        let ctas = self.per_row.div_ceil(MOST_CTA_SEGMENTS);
        let at_once = *at_once.get(ctas - 1).filter(|at_once| **at_once > 0)?;
        let are_few = self.options.filters == Filters::TopK && rows <= at_once;
        Some(RowClusters { ctas, segments: MOST_CTA_SEGMENTS, are_few })
    }

    /// Makes the parameters those of the launch that begins with a request; returns how many requests it has.
    fn begin_launch(&self, sampling: &mut SamplingParams, first: usize) -> usize {
        let requests = self.requests.min(self.batch - first);
        sampling.first = first as u32;
        sampling.launch_rows = (requests * self.per_request) as u32;
        requests
    }

    /// Launches a kernel whose clusters take a row each, for all requests.
    ///
    /// # Safety
    /// As for [`Cut::launch`].
    pub unsafe fn launch_clusters<P>(
        &self,
        enqueue: &Enqueue,
        kernel: &Kernel,
        clusters: RowClusters,
        params: &mut P,
        sampling: impl Fn(&mut P) -> &mut SamplingParams,
    ) -> Result<()> {
        sampling(params).per_row_ctas = Divisor::new(clusters.ctas as u32);
        sampling(params).segments_at_once = clusters.segments as u32;
        for first in (0..self.batch).step_by(self.requests) {
            let rows = self.begin_launch(sampling(params), first) * self.per_request;
            let kind = Kind::DependentClusters(clusters.ctas as u32);
            let grid = Grid { ctas: (rows * clusters.ctas) as u32, threads: THREADS, kind };
            // SAFETY: forwarded to the caller.
            unsafe { enqueue.launch(kernel, grid, [(&raw const *params).cast()])? };
        }
        Ok(())
    }

    /// Launches the kernels for all requests. `sampling` gives what [`Cut::params`] has made inside `params`.
    ///
    /// # Safety
    /// `P` is the kernels' struct. The kernels wait before they touch anything, and the tensors stay valid until the stream has passed.
    pub unsafe fn launch<P>(
        &self,
        enqueue: &Enqueue,
        kernels: Launched,
        params: &mut P,
        sampling: impl Fn(&mut P) -> &mut SamplingParams,
    ) -> Result<()> {
        let multiprocessors = enqueue.facts().multiprocessors;
        let per_row_ctas = self.ctas_of_row(multiprocessors);
        if let Segments::Streamed(_, at_once) = kernels.segments {
            sampling(params).segments_at_once = at_once as u32;
        }
        for first in (0..self.batch).step_by(self.requests) {
            let requests = self.begin_launch(sampling(params), first);
            let rows = requests * self.per_request;
            let launch = |kernel: &Kernel, ctas: usize, threads, kind| {
                let grid = Grid { ctas: ctas as u32, threads, kind };
                // SAFETY: forwarded to the caller.
                unsafe { enqueue.launch(kernel, grid, [(&raw const *params).cast()]) }
            };
            match kernels.segments {
                Segments::Loaded(kernel) => {
                    launch(kernel, rows * per_row_ctas, SEGMENT_THREADS, enqueue.dependent_kind())?
                }
                Segments::Streamed(kernel, _) => {
                    let ctas = (rows * self.per_row).div_ceil(STREAM_WARPS as usize).min(multiprocessors as usize);
                    launch(kernel, ctas, 32 * STREAM_WARPS, enqueue.dependent_kind())?;
                }
            }
            if let Some(kernel) = kernels.rows {
                launch(kernel, rows, THREADS, enqueue.dependent_kind())?;
            }
            if let Some(last) = &kernels.last {
                let clusters = last.is_cluster.then_some(Kind::DependentClusters(last.ctas as u32));
                launch(last.kernel, requests * last.ctas, THREADS, clusters.unwrap_or(enqueue.dependent_kind()))?;
            }
        }
        Ok(())
    }
}

/// Which of these tensors hold int64, a bit each from the lowest on.
pub fn wide<const N: usize>(tensors: [Option<Tensor>; N]) -> u32 {
    let bit = |(n, t): (usize, Option<Tensor>)| (t.is_some_and(|t| t.dtype == DType::I64) as u32) << n;
    tensors.into_iter().enumerate().map(bit).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_take_rows_while_they_are_few() {
        let plain = Options { filters: Filters::None, leaves: Leaves::default() };
        let of = |batch, tokens, bytes| Cut::new(batch, 6, tokens, plain).clusters(16, bytes, 132, false);
        let expected = |ctas, segments, are_few| Some(RowClusters { ctas, segments, are_few });
        assert_eq!([1, 5].map(|batch| of(batch, 128_256, 2)), [expected(16, 2, true); 2]);
        assert_eq!([6, 13].map(|batch| of(batch, 128_256, 2)), [expected(8, 4, true); 2]);
        assert_eq!(of(14, 128_256, 2), expected(8, 4, false));
        assert_eq!([1, 5].map(|batch| of(batch, 128_256, 4)), [expected(16, 2, true), expected(8, 4, true)]);
        assert_eq!(of(6, 128_256, 4), expected(8, 4, false));
        assert_eq!([1, 11].map(|batch| of(batch, 151_936, 2)), [expected(10, 4, true); 2]);
        assert_eq!(of(12, 151_936, 2), expected(10, 4, false));
        assert_eq!(of(1, 1 << 20, 2), None);
        assert_eq!(of(1, 5, 2), expected(1, 2, true));
    }

    #[test]
    fn clusters_take_rows_with_filters_while_they_are_few() {
        let of_any = |filters, batch, bytes, top_p_alone| {
            let options = Options { filters, leaves: Leaves::default() };
            Cut::new(batch, 6, 128_256, options).clusters(16, bytes, 132, top_p_alone)
        };
        let of = |filters, batch, bytes| of_any(filters, batch, bytes, false);
        let expected = |ctas, segments, are_few| Some(RowClusters { ctas, segments, are_few });
        assert_eq!([1, 2].map(|batch| of(Filters::TopK, batch, 2)), [expected(16, 2, true); 2]);
        assert_eq!([3, 6].map(|batch| of(Filters::TopK, batch, 2)), [expected(8, 4, true); 2]);
        assert_eq!(of(Filters::TopK, 7, 2), expected(8, 4, false));
        assert_eq!(of(Filters::TopK, 2, 4), expected(16, 2, true));
        assert_eq!([3, 5].map(|batch| of(Filters::TopK, batch, 4)), [expected(8, 4, true); 2]);
        assert_eq!(of(Filters::TopK, 6, 4), expected(8, 4, false));
        for (bytes, most) in [(2, 17), (4, 8)] {
            assert_eq!([3, most].map(|batch| of(Filters::ByProbability, batch, bytes)), [expected(8, 4, true); 2]);
            assert_eq!(of(Filters::ByProbability, most + 1, bytes), expected(8, 4, false));
        }
        for (bytes, most) in [(2, 9), (4, 5)] {
            let with_top_p = |batch| of_any(Filters::ByProbability, batch, bytes, true);
            assert_eq!([3, most].map(with_top_p), [expected(8, 4, true); 2]);
            assert_eq!(with_top_p(most + 1), expected(8, 4, false));
        }
    }

    #[test]
    fn ctas_of_clusters_are_spread_while_all_run_at_once() {
        // As much as an H200 has. A CTA declares up to CLUSTER_SHARED more.
        const SHARED: u32 = 227 << 10;
        for ctas in SPREADS {
            let each = |declared: u32| spread_bytes(ctas, SHARED) + declared + KEPT_SHARED;
            assert!(ctas * each(CLUSTER_SHARED) <= SHARED + KEPT_SHARED, "{ctas} have no room");
            assert!((ctas + 1) * each(0) >= SHARED + KEPT_SHARED, "more than {ctas} have room");
        }
        let spreads = [(1, 32), (2, 48), (3, 64)].map(|(bytes, clusters)| {
            let mut at_once = [0; MOST_ROW_CTAS as usize];
            at_once[7] = clusters;
            Spread { bytes, at_once }
        });
        let expected = [(32, 1), (33, 2), (48, 2), (49, 3), (64, 3), (65, 0)];
        assert_eq!(expected.map(|(clusters, _)| spread(&spreads, 8, clusters)), expected.map(|(_, bytes)| bytes));
        assert_eq!(spread(&spreads, 16, 1), 0);
    }

    #[test]
    fn half_clusters_take_rows_with_top_k_while_all_run_at_once() {
        let at_once = [396, 198, 132, 98, 78, 64, 52, 48];
        let of = |filters, batch, tokens| {
            let options = Options { filters, leaves: Leaves::default() };
            Cut::new(batch, 6, tokens, options).half_clusters(&at_once)
        };
        let expected = |ctas, are_few| Some(RowClusters { ctas, segments: 8, are_few });
        assert_eq!([1, 7, 16].map(|batch| of(Filters::TopK, batch, 128_256)), [expected(4, true); 3]);
        assert_eq!(of(Filters::TopK, 17, 128_256), expected(4, false));
        assert_eq!([13, 14].map(|batch| of(Filters::TopK, batch, 151_936)), [expected(5, true), expected(5, false)]);
        assert_eq!([8, 9].map(|batch| of(Filters::TopK, batch, 262_144)), [expected(8, true), expected(8, false)]);
        assert_eq!(of(Filters::TopK, 1, 262_145), None);
        for filters in [Filters::None, Filters::ByProbability] {
            assert_eq!(of(filters, 1, 5), expected(1, false));
        }
        let top_k = Options { filters: Filters::TopK, leaves: Leaves::default() };
        assert_eq!(Cut::new(1, 6, 128_256, top_k).half_clusters(&[396, 198, 132, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn calls_are_cut_where_scratch_or_counters_end() {
        let plain = Options { filters: Filters::None, leaves: Leaves::default() };
        let cut = Cut::new(32, 6, 128_256, plain);
        assert_eq!([cut.requests, cut.per_request, cut.per_row, cut.ctas_of_row(132)], [32, 6, 32, 8]);
        assert_eq!(Cut::new(1, 6, 128_256, plain).ctas_of_row(132), 32);
        let rest_ctas = |batch, at_once| Cut::new(batch, 11, 128_256, plain).rest_ctas(132, at_once);
        assert_eq!([1, 8, 32, 128].map(|batch| rest_ctas(batch, 3)), [32, 32, 11, 3]);
        assert_eq!([1, 8, 32, 128].map(|batch| rest_ctas(batch, 2)), [32, 32, 8, 2]);
        assert_eq!(Cut::new(8, 6, 128_256, plain).ctas_of_row(132), 11);
        assert_eq!(Cut::new(1 << 20, 1, 2, plain).requests, Enqueue::COUNTERS / 2);
        let filtered = Options { filters: Filters::TopK, leaves: Leaves { rest: true, sums: false } };
        for (options, requests) in [(plain, 11), (filtered, 3)] {
            let largest = Cut::new(100, 129, 1 << 20, options);
            assert_eq!(largest.requests, requests);
            assert!(largest.scratch() <= MOST_SCRATCH + 2048, "{largest:?}");
        }
    }
}
