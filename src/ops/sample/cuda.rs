//! Launches of the kernels of kernels/sample/sample.cu.

use super::{Acceptance, Request};
use crate::abi::{VWD_SAMPLE_DRAFT_PROBABILITIES, VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_TEMPERATURE_LAST};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::draw::{Form, SEGMENT};
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{NO_DIM, View, element_code, has_aligned_rows};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Modules, Parts, Source, source};

pub struct Kernels {
    segments: Kernel,
    rows: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("sample/sample", compute_80, compute_90)];

    fn find(modules: &Modules) -> Result<Kernels> {
        let kernel = |name| modules.kernel("sample/sample", name);
        Ok(Kernels { segments: kernel("sample_segments")?, rows: kernel("sample_rows")? })
    }
}

kernel_struct! {
    /// Mirrors SampleParams of kernels/sample/params.cuh.
    struct SampleParams {
        target: View<3>,
        draft_rows: View<3>,
        draft: View<2>,
        stop: View<2>,
        committed: View<2>,
        logprobs: View<2>,
        target_begin: View<1>,
        draft_lens: View<1>,
        draft_map: View<1>,
        temperature: View<1>,
        top_k: View<1>,
        top_p: View<1>,
        min_p: View<1>,
        seeds: View<1>,
        positions: View<1>,
        ignore_stop: View<1>,
        remaining: View<1>,
        min_remaining: View<1>,
        next_token: View<1>,
        accepted: View<1>,
        committed_len: View<1>,
        finish: View<1>,
        status: View<1>,
        segments: *mut u8,
        rows: *mut u8,
        counters: *mut u8,
        target_rows: i64,
        per_request: Divisor,
        per_row: Divisor,
        first: u32,
        gamma: u32,
        tokens: u32,
        draft_tokens: u32,
        stops: u32,
        rule: u32,
        flags: u32,
        wide: u32,
        target_type: u32,
        draft_type: u32,
        target_adjacent: u32,
        draft_adjacent: u32,
        is_flat: u32,
    }
}

/// Threads of a CTA: DRAW_THREADS of kernels/common/draw.cuh.
const THREADS: u32 = 256;
/// Bytes of what a CTA leaves in scratch for a segment, and for a row.
const RECORD_BYTES: usize = 32;
/// Scratch of one launch: a session's own arenas have as much.
const MOST_SCRATCH: usize = 12 << 20;
/// Rows of a call.
const MOST_ROWS: usize = 1 << 24;

/// How a call is cut into launches.
#[derive(Debug, PartialEq)]
struct Cut {
    /// Requests of a launch.
    requests: usize,
    /// Rows of a request, its draft's included.
    per_request: usize,
    /// Segments of a row.
    per_row: usize,
}

impl Cut {
    /// `batch` is not 0.
    fn new(batch: usize, per_request: usize, tokens: usize) -> Cut {
        let per_row = tokens.div_ceil(SEGMENT);
        let bytes = per_request * (per_row + 1) * RECORD_BYTES;
        Cut { requests: batch.min(Enqueue::COUNTERS).min((MOST_SCRATCH / bytes).max(1)), per_request, per_row }
    }

    /// Scratch of a launch, and where in it the records of rows begin.
    fn scratch(&self) -> (Parts, usize) {
        let mut parts = Parts::default();
        let rows = self.requests * self.per_request;
        parts.take(&[rows, self.per_row, RECORD_BYTES]);
        let rows_at = parts.take(&[rows, RECORD_BYTES]);
        (parts, rows_at)
    }
}

/// How a call is cut; `None` if there is nothing to do.
fn cut(r: &Request) -> Result<Option<Cut>> {
    let per_request = r.gamma + 1 + if r.draft_rows.is_some() { r.gamma } else { 0 };
    if r.batch.saturating_mul(per_request) >= MOST_ROWS {
        let text = format!("target: {} requests of {per_request} rows; CUDA takes fewer than 2^24 rows", r.batch);
        return Err(Error::unsupported(text));
    }
    Ok((r.batch > 0).then(|| Cut::new(r.batch, per_request, r.tokens().max(r.draft_tokens()))))
}

/// Bytes of scratch that `run` takes from its stream's arena.
pub fn scratch(r: &Request) -> Result<usize> {
    Ok(cut(r)?.map_or(0, |cut| cut.scratch().0.bytes))
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    let Some(cut) = cut(r)? else { return Ok(()) };
    let (parts, rows_at) = cut.scratch();
    let segments = enqueue.scratch(parts.bytes)?;
    let mut params = params(r, &cut);
    params.segments = segments as *mut u8;
    params.rows = (segments + rows_at as u64) as *mut u8;
    params.counters = enqueue.counters()? as *mut u8;
    let kernels: &Kernels = enqueue.kernels();
    for first in (0..r.batch).step_by(cut.requests) {
        params.first = first as u32;
        let rows = (cut.requests.min(r.batch - first) * cut.per_request) as u32;
        let grid = |ctas| Grid { ctas, threads: THREADS, kind: enqueue.dependent_kind() };
        // SAFETY: SampleParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
        // kernels wait before they touch anything.
        unsafe {
            enqueue.launch(&kernels.segments, grid(rows * cut.per_row as u32), [(&raw const params).cast()])?;
            enqueue.launch(&kernels.rows, grid(rows), [(&raw const params).cast()])?;
        }
    }
    Ok(())
}

fn params(r: &Request, cut: &Cut) -> SampleParams {
    let column = |t: &Option<Tensor>| View::<1>::optional(t, |t| View::new(t, [0]));
    let rows = |t: &Option<Tensor>| View::<2>::optional(t, |t| View::new(t, [0, 1]));
    let is_flat = r.target.rank() == 2;
    // In the order of the bits in kernels/sample/params.cuh.
    let wide = [r.draft, Some(r.next_token), r.target_begin, r.positions, r.end.stop];
    let bit = |(n, t): (usize, &Option<Tensor>)| (t.is_some_and(|t| t.dtype == DType::I64) as u32) << n;
    let flags = [
        (VWD_SAMPLE_TARGET_PROBABILITIES, r.target_form == Form::Weights),
        (VWD_SAMPLE_DRAFT_PROBABILITIES, r.draft_form == Form::Weights),
        (VWD_SAMPLE_TEMPERATURE_LAST, r.temperature_last),
    ];
    SampleParams {
        target: View::new(&r.target, if is_flat { [NO_DIM, 0, 1] } else { [0, 1, 2] }),
        draft_rows: View::<3>::optional(&r.draft_rows, |t| View::new(t, [0, 1, 2])),
        draft: rows(&r.draft),
        stop: View::<2>::optional(&r.end.stop, |t| View::new(t, if t.rank() == 2 { [0, 1] } else { [NO_DIM, 0] })),
        committed: rows(&r.committed),
        logprobs: rows(&r.logprobs),
        target_begin: column(&r.target_begin),
        draft_lens: column(&r.draft_lens),
        draft_map: column(&r.draft_map),
        temperature: column(&r.temperature),
        top_k: column(&r.top_k),
        top_p: column(&r.top_p),
        min_p: column(&r.min_p),
        seeds: column(&r.seeds),
        positions: column(&r.positions),
        ignore_stop: column(&r.end.ignore_stop),
        remaining: column(&r.end.remaining),
        min_remaining: column(&r.end.min_remaining),
        next_token: View::new(&r.next_token, [0]),
        accepted: column(&r.accepted),
        committed_len: column(&r.end.committed_len),
        finish: column(&r.end.finish),
        status: column(&r.status),
        segments: std::ptr::null_mut(),
        rows: std::ptr::null_mut(),
        counters: std::ptr::null_mut(),
        target_rows: if is_flat { r.target.dim(0) as i64 } else { 0 },
        per_request: Divisor::new(cut.per_request as u32),
        per_row: Divisor::new(cut.per_row as u32),
        first: 0,
        gamma: r.gamma as u32,
        tokens: r.tokens() as u32,
        draft_tokens: r.draft_tokens() as u32,
        stops: r.end.stop.map_or(0, |t| t.dim(t.rank() - 1) as u32),
        rule: match r.rule {
            Acceptance::Greedy => 0,
            Acceptance::Coupled => 1,
            Acceptance::Rejection => 2,
        },
        flags: flags.iter().map(|&(flag, is_set)| if is_set { flag } else { 0 }).sum(),
        wide: wide.iter().enumerate().map(bit).sum(),
        target_type: element_code(r.target.dtype),
        draft_type: r.draft_rows.map_or(0, |t| element_code(t.dtype)),
        target_adjacent: has_aligned_rows(&r.target, 16) as u32,
        draft_adjacent: r.draft_rows.is_some_and(|t| has_aligned_rows(&t, 16)) as u32,
        is_flat: is_flat as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        layout::check("sample", file!(), &[SampleParams::layout("SampleParams")]);
    }

    #[test]
    fn calls_are_cut_where_scratch_or_counters_end() {
        assert_eq!(Cut::new(32, 6, 128_256), Cut { requests: 32, per_request: 6, per_row: 32 });
        assert_eq!(Cut::new(1 << 20, 1, 2), Cut { requests: Enqueue::COUNTERS, per_request: 1, per_row: 1 });
        let largest = Cut::new(100, 129, 1 << 20);
        assert!(largest.requests == 11 && largest.scratch().0.bytes <= MOST_SCRATCH + 512, "{largest:?}");
    }
}
