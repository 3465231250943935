//! Launch of the kernels of kernels/predictor.

use super::choose::{self, PREDICT_THREADS, Variant};
use super::{PredictRequest, ResetRequest, State, UpdateRequest};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::topk::Clusters;
use crate::runtime::cuda::layout::{kernel_constants, kernel_struct};
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::views::{address, byte_stride, has_aligned_rows, saturated};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, Modules, Source, source};

pub struct Kernels {
    reset: Kernel,
    update: Kernel,
    predict_short: Kernel,
    predict_long: Kernel,
    pub(super) calibrate_targets: Kernel,
    pub(super) calibrate_rate: Kernel,
    clusters: Clusters,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] =
        &[source!("predictor/predictor", compute_80, compute_90), source!("predictor/calibrate", compute_80)];
    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let kernel = |name| modules.kernel("predictor/predictor", name);
        let predict_long = kernel("predictor_predict_long")?;
        Ok(Kernels {
            reset: kernel("predictor_reset")?,
            update: kernel("predictor_update")?,
            predict_short: kernel("predictor_predict_short")?,
            clusters: Clusters::new(&predict_long, modules.facts(), PREDICT_THREADS),
            predict_long,
            calibrate_targets: modules.kernel("predictor/calibrate", "calibrate_targets")?,
            calibrate_rate: modules.kernel("predictor/calibrate", "calibrate_rate")?,
        })
    }
}

kernel_struct! {
    /// Mirrors Rows of kernels/predictor/params.cuh. Strides are in bytes.
    #[derive(Clone, Copy)]
    struct RowParams {
        data: *mut u8,
        seq: i64,
        head: i64,
        block: i64,
    }
}

kernel_struct! {
    /// Mirrors State of kernels/predictor/params.cuh.
    #[derive(Clone, Copy)]
    struct StateParams {
        level: RowParams,
        trend: RowParams,
        sequences: u32,
        kv_heads: u32,
        max_blocks: u32,
    }
}

kernel_struct! {
    /// Mirrors ResetParams of kernels/predictor/params.cuh.
    struct ResetParams {
        state: StateParams,
        rows: *const u8,
        rows_entry: i64,
        listed: u64,
    }
}

kernel_struct! {
    /// Mirrors Blocks of kernels/predictor/params.cuh.
    #[derive(Clone, Copy)]
    struct BlockParams {
        seq_lens: *const u8,
        sequences: *const u8,
        seq_lens_seq: i64,
        sequences_seq: i64,
        size: u32,
    }
}

kernel_struct! {
    /// Mirrors UpdateParams of kernels/predictor/params.cuh.
    struct UpdateParams {
        state: StateParams,
        blocks: BlockParams,
        scores: RowParams,
        slices: u32,
        alpha: f32,
        beta: f32,
    }
}

kernel_struct! {
    /// Mirrors PredictParams of kernels/predictor/params.cuh.
    struct PredictParams {
        state: StateParams,
        blocks: BlockParams,
        scores: RowParams,
        budgets: *const u8,
        ids: *mut u8,
        counts: *mut u8,
        budgets_seq: i64,
        ids_seq: i64,
        ids_head: i64,
        ids_entry: i64,
        counts_seq: i64,
        counts_head: i64,
        ratio: f64,
        k: u32,
        cap: u32,
        init: u32,
        local: u32,
        gamma: f32,
        adjacent: u32,
    }
}

kernel_constants! {
    /// Threads of a CTA that resets or updates.
    const THREADS: u32 = 256;
}

/// CTAs of a multiprocessor that wait for memory side by side.
const RESIDENT_CTAS: usize = 8;

impl RowParams {
    fn new(t: Option<&Tensor>) -> RowParams {
        RowParams { data: address(t), seq: byte_stride(t, 0), head: byte_stride(t, 1), block: byte_stride(t, 2) }
    }
}

impl StateParams {
    fn new(state: &State) -> StateParams {
        StateParams {
            level: RowParams::new(Some(&state.level)),
            trend: RowParams::new(Some(&state.trend)),
            sequences: saturated(state.sequences()),
            kv_heads: saturated(state.kv_heads()),
            max_blocks: saturated(state.max_blocks()),
        }
    }
}

impl BlockParams {
    fn new(blocks: &super::Blocks) -> BlockParams {
        let (seq_lens, sequences) = (Some(&blocks.seq_lens), blocks.sequences.as_ref());
        BlockParams {
            seq_lens: address(seq_lens),
            sequences: address(sequences),
            seq_lens_seq: byte_stride(seq_lens, 0),
            sequences_seq: byte_stride(sequences, 0),
            size: saturated(blocks.size),
        }
    }
}

/// Whether blocks of any row lie side by side, a multiple of four, and the first is aligned to 16 bytes.
fn has_adjacent_fours(t: &Tensor) -> bool {
    t.stride(2) == 1 && t.dim(2).is_multiple_of(4) && has_aligned_rows(t, 16)
}

/// So many sequences times KV heads.
fn rows(sequences: usize, state: &State) -> Result<usize> {
    let rows = sequences.saturating_mul(state.kv_heads());
    if rows <= i32::MAX as usize {
        return Ok(rows);
    }
    let found = format!("state.level: {sequences} sequences of {} KV heads", state.kv_heads());
    Err(Error::unsupported(format!("{found}; CUDA takes up to 2^31 − 1 together")))
}

pub fn reset(enqueue: &Enqueue, r: &ResetRequest) -> Result<()> {
    let (rows, kernels): (_, &Kernels) = (r.rows.as_ref(), enqueue.kernels());
    let listed = rows.map_or(r.state.sequences(), |rows| rows.dim(0));
    if r.state.is_empty() || listed == 0 {
        return Ok(());
    }
    self::rows(r.state.sequences(), &r.state)?;
    let params = ResetParams {
        state: StateParams::new(&r.state),
        rows: address(rows),
        rows_entry: byte_stride(rows, 0),
        listed: listed as u64,
    };
    let resident = enqueue.facts().multiprocessors as usize * RESIDENT_CTAS;
    let ctas = listed.saturating_mul(r.state.kv_heads()).min(resident) as u32;
    let grid = Grid { ctas, threads: THREADS, kind: enqueue.dependent_kind() };
    // SAFETY: ResetParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernel waits before it touches anything.
    unsafe { enqueue.launch(&kernels.reset, grid, [(&raw const params).cast()]) }
}

pub fn update(enqueue: &Enqueue, r: &UpdateRequest) -> Result<()> {
    if r.state.is_empty() || r.blocks.batch() == 0 {
        return Ok(());
    }
    let (rows, kernels): (_, &Kernels) = (rows(r.blocks.batch(), &r.state)?, enqueue.kernels());
    let resident = enqueue.facts().multiprocessors as usize * RESIDENT_CTAS;
    let slices = (resident / rows).min(r.state.max_blocks().div_ceil(THREADS as usize)).max(1);
    let params = UpdateParams {
        state: StateParams::new(&r.state),
        blocks: BlockParams::new(&r.blocks),
        scores: RowParams::new(Some(&r.scores)),
        slices: slices as u32,
        alpha: r.holt.alpha,
        beta: r.holt.beta,
    };
    let grid = Grid { ctas: (rows * slices) as u32, threads: THREADS, kind: enqueue.dependent_kind() };
    // SAFETY: as in `reset`.
    unsafe { enqueue.launch(&kernels.update, grid, [(&raw const params).cast()]) }
}

pub fn predict(enqueue: &Enqueue, r: &PredictRequest) -> Result<()> {
    let (rows, kernels): (_, &Kernels) = (rows(r.blocks.batch(), &r.state)?, enqueue.kernels());
    if rows == 0 {
        return Ok(());
    }
    let (ids, counts, budgets) = (Some(&r.predicted.ids), Some(&r.predicted.counts), r.budgets.as_ref());
    let params = PredictParams {
        state: StateParams::new(&r.state),
        blocks: BlockParams::new(&r.blocks),
        scores: RowParams::new(r.scores.as_ref()),
        budgets: address(budgets),
        ids: address(ids),
        counts: address(counts),
        budgets_seq: byte_stride(budgets, 0),
        ids_seq: byte_stride(ids, 0),
        ids_head: byte_stride(ids, 1),
        ids_entry: byte_stride(ids, 2),
        counts_seq: byte_stride(counts, 0),
        counts_head: byte_stride(counts, 1),
        ratio: r.ratio.0,
        k: saturated(r.ratio.of(r.budget.k)),
        cap: saturated(r.predicted.cap()),
        init: saturated(r.budget.init),
        local: saturated(r.budget.local),
        gamma: r.gamma,
        adjacent: [r.state.level, r.state.trend].iter().all(has_adjacent_fours) as u32,
    };
    let blocks = r.state.max_blocks();
    let variant = variants::choose(enqueue.forced(), |variant| choose::fit(variant, blocks))?;
    let (kernel, ctas) = match variant {
        Variant::OneCta => (&kernels.predict_short, 1),
        Variant::Cluster => (&kernels.predict_long, kernels.clusters.ctas(rows, blocks)),
    };
    let kind = if ctas == 1 { enqueue.dependent_kind() } else { Kind::DependentClusters(ctas as u32) };
    let grid = Grid { ctas: (rows * ctas) as u32, threads: PREDICT_THREADS, kind };
    enqueue.ran(variant);
    // SAFETY: as in `reset`; before it waits the kernel reads lengths as a hint, which it compares afterwards.
    unsafe { enqueue.launch(kernel, grid, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            kernel_constants(),
            choose::kernel_constants(),
            RowParams::layout("Rows"),
            StateParams::layout("State"),
            ResetParams::layout("ResetParams"),
            BlockParams::layout("Blocks"),
            UpdateParams::layout("UpdateParams"),
            PredictParams::layout("PredictParams"),
        ];
        let structs = [&structs[..], &super::super::calibrate::cuda::layouts()].concat();
        layout::check("predictor", file!(), &structs);
    }
}
