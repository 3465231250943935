//! What the launches of sampling calls share: the parameters of kernels/common/sampling.cuh, and how a call is cut.

use super::request::Sampling;
use super::{Form, SEGMENT};
use crate::abi::{VWD_SAMPLE_DRAFT_PROBABILITIES, VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_TEMPERATURE_LAST};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{View, element_code, has_aligned_rows};
use crate::runtime::cuda::{Enqueue, Grid, Kernel, Parts};

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
        counters: *mut u8,
        per_request: Divisor,
        per_row: Divisor,
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
pub struct Cut {
    batch: usize,
    /// Requests of a launch.
    requests: usize,
    /// Rows of a request, its draft's included.
    per_request: usize,
    /// Segments of a row.
    per_row: usize,
}

impl Cut {
    /// A request has so many rows, of so many tokens at most; `None` if there is nothing to do. `name` is that of the target.
    pub fn of(name: &str, batch: usize, per_request: usize, tokens: usize) -> Result<Option<Cut>> {
        if batch.saturating_mul(per_request) >= MOST_ROWS {
            let text = format!("{name}: {batch} requests of {per_request} rows; CUDA takes fewer than 2^24 rows");
            return Err(Error::unsupported(text));
        }
        Ok((batch > 0).then(|| Cut::new(batch, per_request, tokens)))
    }

    fn new(batch: usize, per_request: usize, tokens: usize) -> Cut {
        let per_row = tokens.div_ceil(SEGMENT);
        let bytes = per_request * (per_row + 1) * RECORD_BYTES;
        let requests = batch.min(Enqueue::COUNTERS).min((MOST_SCRATCH / bytes).max(1));
        Cut { batch, requests, per_request, per_row }
    }

    /// Bytes of scratch of a launch.
    pub fn scratch(&self) -> usize {
        self.parts().0.bytes
    }

    /// Scratch of a launch, and where in it the records of rows begin.
    fn parts(&self) -> (Parts, usize) {
        let mut parts = Parts::default();
        let rows = self.requests * self.per_request;
        parts.take(&[rows, self.per_row, RECORD_BYTES]);
        let rows_at = parts.take(&[rows, RECORD_BYTES]);
        (parts, rows_at)
    }

    /// The parameters of the launches, with their scratch. `target` is the view of what `tensor` is.
    pub fn params(&self, enqueue: &Enqueue, s: &Sampling, tensor: &Tensor, target: View<3>) -> Result<SamplingParams> {
        let column = |t: &Option<Tensor>| View::<1>::optional(t, |t| View::new(t, [0]));
        let (parts, rows_at) = self.parts();
        let segments = enqueue.scratch(parts.bytes)?;
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
            segments: segments as *mut u8,
            rows: (segments + rows_at as u64) as *mut u8,
            counters: enqueue.counters()? as *mut u8,
            per_request: Divisor::new(self.per_request as u32),
            per_row: Divisor::new(self.per_row as u32),
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
        })
    }

    /// Launches the kernels of segments and of rows for all requests. `sampling` gives what [`Cut::params`] has made inside `params`.
    ///
    /// # Safety
    /// `P` is the kernels' struct. The kernels wait before they touch anything, and the tensors stay valid until the stream has passed.
    pub unsafe fn launch<P>(
        &self,
        enqueue: &Enqueue,
        [segments, rows]: [&Kernel; 2],
        params: &mut P,
        sampling: impl Fn(&mut P) -> &mut SamplingParams,
    ) -> Result<()> {
        for first in (0..self.batch).step_by(self.requests) {
            sampling(params).first = first as u32;
            let count = (self.requests.min(self.batch - first) * self.per_request) as u32;
            let grid = |ctas| Grid { ctas, threads: THREADS, kind: enqueue.dependent_kind() };
            // SAFETY: forwarded to the caller.
            unsafe {
                enqueue.launch(segments, grid(count * self.per_row as u32), [(&raw const *params).cast()])?;
                enqueue.launch(rows, grid(count), [(&raw const *params).cast()])?;
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
    fn calls_are_cut_where_scratch_or_counters_end() {
        assert_eq!(Cut::new(32, 6, 128_256), Cut { batch: 32, requests: 32, per_request: 6, per_row: 32 });
        let many = Cut { batch: 1 << 20, requests: Enqueue::COUNTERS, per_request: 1, per_row: 1 };
        assert_eq!(Cut::new(1 << 20, 1, 2), many);
        let largest = Cut::new(100, 129, 1 << 20);
        assert!(largest.requests == 11 && largest.scratch() <= MOST_SCRATCH + 512, "{largest:?}");
    }
}
