//! Launch of the kernels of kernels/predictor/calibrate.cu, on a stream of the call's own.

use super::super::cuda::Kernels;
use super::{Best, CalibrateRequest, best};
use crate::abi::vwd_holt;
use crate::core::allocate::zeros;
use crate::core::status::{Error, Result};
use crate::runtime::cuda::layout::{kernel_constants, kernel_struct};
use crate::runtime::cuda::views::saturated;
use crate::runtime::cuda::{Cuda, Grid, Kind};

kernel_struct! {
    /// Mirrors Target of kernels/predictor/params.cuh.
    struct Target {
        unit: f64,
        total: u64,
        best_left_out: f32,
        unused: u32,
    }
}

kernel_struct! {
    /// Mirrors Rating of kernels/predictor/params.cuh.
    #[derive(Clone, Copy, Default)]
    struct Rating {
        hits: f64,
        steps: u64,
    }
}

kernel_struct! {
    /// Mirrors CalibrateParams of kernels/predictor/params.cuh. Strides are in bytes.
    struct CalibrateParams {
        scores: *const u8,
        counts: *const u8,
        scores_history: i64,
        scores_step: i64,
        scores_head: i64,
        scores_block: i64,
        counts_history: i64,
        counts_step: i64,
        targets: *mut Target,
        grid: *const vwd_holt,
        ratings: *mut Rating,
        states: *mut f32,
        row: u64,
        runs: u32,
        steps: u32,
        heads: u32,
        blocks: u32,
        k: u32,
        predicted: u32,
        init: u32,
        local: u32,
    }
}

kernel_constants! {
    /// Threads of a CTA.
    const CALIBRATE_THREADS: u32 = 512;
}

/// Bytes of predictor states that a launch has, if one point's do not need more.
const STATE_BYTES: usize = 256 << 20;

/// Memory of the device during a call.
struct Bytes<'c>(&'c Cuda, u64);

impl Bytes<'_> {
    fn alloc(cuda: &Cuda, bytes: usize) -> Result<Bytes<'_>> {
        Ok(Bytes(cuda, cuda.alloc(bytes)?))
    }
}

impl Drop for Bytes<'_> {
    fn drop(&mut self) {
        self.0.free(self.1);
    }
}

pub fn search(cuda: &Cuda, r: &CalibrateRequest) -> Result<Best> {
    let (grid, runs, steps) = (&r.grid[..], r.runs(), r.scores.dim(1));
    let [blocks, targets] = [r.scores.dim(3), runs.saturating_mul(steps)];
    if targets > i32::MAX as usize || blocks > 1 << 30 {
        let found = format!("scores: {targets} rows of {blocks} blocks");
        return Err(Error::unsupported(format!("{found}; CUDA takes up to 2^31 − 1 rows, of 2^30 blocks")));
    }
    let row = blocks.next_multiple_of(4);
    let state_bytes = 2 * size_of::<f32>() * runs * row;
    // As many points at once as there is memory for.
    let at_once = (STATE_BYTES / state_bytes).min(i32::MAX as usize / runs).clamp(1, grid.len());
    let target_memory = Bytes::alloc(cuda, targets * size_of::<Target>())?;
    let rating_memory = Bytes::alloc(cuda, at_once * runs * size_of::<Rating>())?;
    let grid_memory = Bytes::alloc(cuda, size_of_val(grid))?;
    let states = Bytes::alloc(cuda, at_once * state_bytes)?;
    let mut ratings: Vec<Rating> = zeros(grid.len() * runs, "vwd_predictor_calibrate")?;
    cuda.with_copy_stream(|stream| {
        let (enqueue, kernels): (_, &Kernels) = (cuda.enqueue(stream.raw())?, cuda.kernels());
        // SAFETY: allocated for them.
        unsafe { stream.write(grid_memory.1, grid)? };
        let params = |first: usize| CalibrateParams {
            scores: r.scores.data(),
            counts: r.block_counts.data(),
            scores_history: r.scores.byte_stride(0),
            scores_step: r.scores.byte_stride(1),
            scores_head: r.scores.byte_stride(2),
            scores_block: r.scores.byte_stride(3),
            counts_history: r.block_counts.byte_stride(0),
            counts_step: r.block_counts.byte_stride(1),
            targets: target_memory.1 as *mut Target,
            grid: (grid_memory.1 as *const vwd_holt).wrapping_add(first),
            ratings: rating_memory.1 as *mut Rating,
            states: states.1 as *mut f32,
            row: row as u64,
            runs: runs as u32,
            steps: steps as u32,
            heads: r.scores.dim(2) as u32,
            blocks: blocks as u32,
            k: saturated(r.budget.k),
            predicted: saturated(r.wider().k),
            init: saturated(r.budget.init),
            local: saturated(r.budget.local),
        };
        let grid_of = |ctas: usize| Grid { ctas: ctas as u32, threads: CALIBRATE_THREADS, kind: Kind::Plain };
        let all = params(0);
        // SAFETY: CalibrateParams is the kernels' struct; the caller keeps the tensors valid during the call, and the memory is freed once
        // the stream has passed.
        unsafe { enqueue.launch(&kernels.calibrate_targets, grid_of(targets), [(&raw const all).cast()])? };
        for (n, ratings) in ratings.chunks_mut(at_once * runs).enumerate() {
            let params = params(n * at_once);
            // SAFETY: as above; the ratings are plain numbers.
            unsafe {
                enqueue.launch(&kernels.calibrate_rate, grid_of(ratings.len()), [(&raw const params).cast()])?;
                stream.read(rating_memory.1, ratings)?;
            }
        }
        Ok(())
    })?;
    Ok(best(grid, runs, |point, run| {
        let Rating { hits, steps } = ratings[point * runs + run];
        (hits, steps)
    }))
}

#[cfg(test)]
pub fn layouts() -> [String; 4] {
    [kernel_constants(), Target::layout("Target"), Rating::layout("Rating"), CalibrateParams::layout("CalibrateParams")]
}
