//! Launches of the kernels of kernels/sample/.

use super::choose::{self, Shape, Variant};
use super::{Acceptance, Request};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::draw::device::{
    self, ClusterKernel, Cut, Last, Launched, Leaves, STREAM_BYTES, SamplingParams, Segments, reads_weights, wide,
};
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::views::{NO_DIM, View, has_aligned_rows};
use crate::runtime::cuda::{self, Enqueue, Kernel, Modules, Source, source};

pub struct Kernels {
    /// Do all in one launch, without filters and with them.
    cluster: Option<[ClusterKernel; 2]>,
    segments: Kernel,
    /// Takes weights, and sums for log-probabilities.
    segments_any: Kernel,
    /// On devices with bulk copies.
    streamed: Option<Streamed>,
    /// Without filters and with them; the second of each takes what `segments_any` takes, draft rows and rejection.
    rows: [Kernel; 2],
    rows_filtered: [Kernel; 2],
    /// Where top-p is the only filter (see `has_top_p_alone`), on devices of compute capability 9.0 and later.
    rows_top_p: Option<Kernel>,
    /// Draws where a draft token was refused; the second takes what is said of `takes_any_residual`.
    residual: [Kernel; 2],
}

/// Kernels whose warps stream the segments of all rows.
struct Streamed {
    /// Does all in one launch.
    whole: Kernel,
    segments: Kernel,
    segments_any: Kernel,
}

/// CTAs of each kernel of `residual` that a multiprocessor has registers for.
const RESIDUAL_CTAS: [usize; 2] = [3, 2];

/// Shared memory of a CTA that decides rows which have no filter but top-p.
const TOP_P_BYTES: u32 = 104 << 10;

/// Rows with filters of each multiprocessor, which decides two at once, from which on it pays to skip those past the end of a walk.
const SKIPPED_ROWS: usize = 4;

/// Rows of a request that one warp can end.
const MOST_WARP_ROWS: usize = 32;

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[
        source!("sample/sample", compute_80, compute_90),
        source!("sample/top_p", compute_90),
        source!("sample/residual", compute_80, compute_90),
        source!("sample/streamed", compute_90),
        source!("sample/cluster", compute_90),
        source!("sample/cluster_filtered", compute_90),
    ];
    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let kernel = |name| modules.kernel("sample/sample", name);
        let residual = |name| modules.kernel("sample/residual", name);
        let streaming = |name| -> Result<Kernel> {
            let kernel = modules.kernel("sample/streamed", name)?;
            kernel.allow_shared(STREAM_BYTES)?;
            Ok(kernel.sharing(STREAM_BYTES))
        };
        let streamed = match modules.has("sample/streamed") {
            true => Some(Streamed {
                whole: streaming("sample_streamed")?,
                segments: streaming("sample_segments_streamed")?,
                segments_any: streaming("sample_segments_streamed_any")?,
            }),
            false => None,
        };
        let cluster = match modules.has("sample/cluster") {
            true => {
                let plain = modules.kernel("sample/cluster", "sample_cluster")?;
                let filtered = modules.kernel("sample/cluster_filtered", "sample_cluster_filtered")?;
                let facts = modules.facts();
                Some([ClusterKernel::new(plain, false, facts)?, ClusterKernel::new(filtered, true, facts)?])
            }
            false => None,
        };
        let rows_top_p = match modules.has("sample/top_p") {
            true => {
                let kernel = modules.kernel("sample/top_p", "sample_rows_top_p")?;
                kernel.allow_shared(TOP_P_BYTES)?;
                Some(kernel.sharing(TOP_P_BYTES))
            }
            false => None,
        };
        Ok(Kernels {
            cluster,
            streamed,
            segments: kernel("sample_segments")?,
            segments_any: kernel("sample_segments_any")?,
            rows: [kernel("sample_rows")?, kernel("sample_rows_any")?],
            rows_filtered: [kernel("sample_rows_filtered")?, kernel("sample_rows_filtered_any")?],
            rows_top_p,
            residual: [residual("sample_residual")?, residual("sample_residual_any")?],
        })
    }
}

kernel_struct! {
    /// Mirrors SampleParams of kernels/sample/params.cuh.
    struct SampleParams {
        sampling: SamplingParams,
        draft: View<2>,
        stop: View<2>,
        committed: View<2>,
        logprobs: View<2>,
        target_begin: View<1>,
        draft_lens: View<1>,
        ignore_stop: View<1>,
        remaining: View<1>,
        min_remaining: View<1>,
        next_token: View<1>,
        accepted: View<1>,
        committed_len: View<1>,
        finish: View<1>,
        status: View<1>,
        target_rows: i64,
        gamma: u32,
        stops: u32,
        rule: u32,
        wide: u32,
        is_flat: u32,
        skips_rows: u32,
    }
}

/// Whether rejection sampling may refuse draft tokens, of which there are some.
fn refuses(r: &Request) -> bool {
    r.rule == Acceptance::Rejection
}

/// Whether rows are logits whose tokens are greedy or coupled, and nothing else is wanted of them.
fn is_plain(r: &Request) -> bool {
    !is_any(r) && r.sampling.draft_rows.is_none() && !refuses(r)
}

/// Whether rows may have no filter but top-p, and the kernel for that takes them: nothing but tokens is wanted, rows begin on 16 bytes, and no tokens are
/// forbidden in them.
fn has_top_p_alone(r: &Request) -> bool {
    let s = &r.sampling;
    let forbids = r.end.stop.is_some() && r.end.min_remaining.is_some();
    let is_alone = s.top_p.is_some() && s.top_k.is_none() && s.min_p.is_none();
    is_alone && is_plain(r) && !forbids && has_aligned_rows(&r.target, 16)
}

/// Whether segments are summed as weights, or for log-probabilities.
fn is_any(r: &Request) -> bool {
    reads_weights(&r.sampling) || r.logprobs.is_some()
}

/// Whether what a refusal leaves may be of more than logits with filters by a bound: of weights, of rows that tokens are forbidden in or left out of by
/// min-p, or of a draft with a map.
fn takes_any_residual(r: &Request) -> bool {
    let s = &r.sampling;
    reads_weights(s)
        || s.draft_map.is_some()
        || s.min_p.is_some()
        || r.end.stop.is_some() && r.end.min_remaining.is_some()
}

/// Whether warps that stream rows can decide them, and end requests, if no row has filters.
fn warps_can_end(r: &Request) -> bool {
    is_plain(r) && r.gamma < MOST_WARP_ROWS
}

/// Whether CTAs that decide rows with filters take first rows of requests first, and skip rows past the end of a walk. Of fewer rows most begin before any end is
/// known. By rejection a later CTA reads what rows gave.
fn skips_rows(r: &Request, cut: &Cut, multiprocessors: u32) -> bool {
    r.gamma > 0 && cut.has_filters() && !refuses(r) && cut.rows() > SKIPPED_ROWS * multiprocessors as usize
}

fn cut(r: &Request) -> Result<Option<Cut>> {
    let leaves = Leaves { rest: refuses(r), sums: warps_can_end(r) };
    let per_request = r.gamma + 1 + if r.sampling.draft_rows.is_some() { r.gamma } else { 0 };
    Cut::of("target", r.batch, per_request, r.tokens().max(r.sampling.draft_tokens()), &r.sampling, leaves)
}

/// Bytes of scratch that `run` takes from its stream's arena.
pub fn scratch(r: &Request) -> Result<usize> {
    Ok(cut(r)?.map_or(0, |cut| cut.scratch()))
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    let Some(cut) = cut(r)? else { return Ok(()) };
    let is_flat = r.target.rank() == 2;
    let target = View::new(&r.target, if is_flat { [NO_DIM, 0, 1] } else { [0, 1, 2] });
    let takes_any = takes_any_residual(r);
    let rest_ctas = cut.rest_ctas(enqueue.facts().multiprocessors, RESIDUAL_CTAS[takes_any as usize]);
    let mut params = params(r, cut.params(enqueue, &r.sampling, &r.target, target, rest_ctas)?);
    let kernels: &Kernels = enqueue.kernels();
    let multiprocessors = enqueue.facts().multiprocessors;
    let residual = Last { kernel: &kernels.residual[takes_any as usize], ctas: rest_ctas, is_cluster: false };
    let (is_any, is_plain) = (is_any(r), is_plain(r));
    let rows_top_p = kernels.rows_top_p.as_ref().filter(|_| has_top_p_alone(r));
    let stream = kernels.streamed.as_ref().zip(device::streamed_at_once(&r.target, &r.sampling));
    let cluster = kernels.cluster.as_ref().filter(|_| is_plain && has_aligned_rows(&r.target, 16));
    let number_bytes = r.target.dtype.bytes();
    let cluster = cluster.map(|of_clusters| &of_clusters[cut.has_filters() as usize]);
    let shape = Shape {
        segments: cut.segments(),
        streamed_at_once: stream.map(|(_, at_once)| at_once),
        clusters: cluster.and_then(|c| cut.clusters(c.largest, number_bytes, multiprocessors, rows_top_p.is_some())),
        half_clusters: cluster.and_then(|c| cut.half_clusters(c.half_clusters(number_bytes))),
        multiprocessors,
    };
    let variant = variants::choose(enqueue.forced(), |variant| choose::fit(variant, shape))?;
    enqueue.ran(variant);
    let clusters = match variant {
        Variant::Cluster => shape.clusters,
        Variant::HalfCluster => shape.half_clusters,
        Variant::Streamed | Variant::Loaded => None,
    };
    if let Some((of_clusters, clusters)) = cluster.zip(clusters) {
        let kernel = of_clusters.of(clusters, cut.rows(), number_bytes);
        // SAFETY: as below.
        return unsafe { cut.launch_clusters(enqueue, &kernel, clusters, &mut params, |params| &mut params.sampling) };
    }
    let is_whole = warps_can_end(r) && !cut.has_filters();
    let segments = match (variant, stream) {
        (Variant::Streamed, Some((streamed, at_once))) => {
            let segments = if is_any { &streamed.segments_any } else { &streamed.segments };
            Segments::Streamed(if is_whole { &streamed.whole } else { segments }, at_once)
        }
        _ => Segments::Loaded(if is_any { &kernels.segments_any } else { &kernels.segments }),
    };
    let decides = is_whole && matches!(segments, Segments::Streamed(..));
    let rows = if cut.has_filters() { &kernels.rows_filtered } else { &kernels.rows };
    let rows = rows_top_p.filter(|_| cut.has_filters()).unwrap_or(&rows[!is_plain as usize]);
    let launched = Launched { segments, rows: (!decides).then_some(rows), last: refuses(r).then_some(residual) };
    params.skips_rows = skips_rows(r, &cut, multiprocessors) as u32;
    // SAFETY: SampleParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything.
    unsafe { cut.launch(enqueue, launched, &mut params, |params| &mut params.sampling) }
}

fn params(r: &Request, sampling: SamplingParams) -> SampleParams {
    let column = |t: &Option<Tensor>| View::<1>::optional(t, |t| View::new(t, [0]));
    let rows = |t: &Option<Tensor>| View::<2>::optional(t, |t| View::new(t, [0, 1]));
    let is_flat = r.target.rank() == 2;
    SampleParams {
        sampling,
        draft: rows(&r.draft),
        stop: View::<2>::optional(&r.end.stop, |t| View::new(t, if t.rank() == 2 { [0, 1] } else { [NO_DIM, 0] })),
        committed: rows(&r.committed),
        logprobs: rows(&r.logprobs),
        target_begin: column(&r.target_begin),
        draft_lens: column(&r.draft_lens),
        ignore_stop: column(&r.end.ignore_stop),
        remaining: column(&r.end.remaining),
        min_remaining: column(&r.end.min_remaining),
        next_token: View::new(&r.next_token, [0]),
        accepted: column(&r.accepted),
        committed_len: column(&r.end.committed_len),
        finish: column(&r.end.finish),
        status: column(&r.status),
        target_rows: if is_flat { r.target.dim(0) as i64 } else { 0 },
        gamma: r.gamma as u32,
        stops: r.end.stop.map_or(0, |t| t.dim(t.rank() - 1) as u32),
        rule: match r.rule {
            Acceptance::Greedy => 0,
            Acceptance::Coupled => 1,
            Acceptance::Rejection => 2,
        },
        // In the order of the bits in kernels/sample/params.cuh.
        wide: wide([r.draft, Some(r.next_token), r.target_begin, r.end.stop]),
        is_flat: is_flat as u32,
        skips_rows: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            SamplingParams::layout("SamplingParams"),
            SampleParams::layout("SampleParams"),
            device::kernel_constants(),
        ];
        layout::check("sample", file!(), &structs);
    }
}
