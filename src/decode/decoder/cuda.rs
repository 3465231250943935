//! Launch of the kernels of kernels/decoder/decoder.cu.

use super::options::NEWEST;
use super::rows::{Append, Complete, Distribute, Modes, Observe, Past, Take, Tiers, steps};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::{kernel_constants, kernel_struct};
use crate::runtime::cuda::views::{address, byte_stride, saturated};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Modules, Source, source};
use std::ffi::c_void;

pub struct Kernels {
    distribute: Kernel,
    append: Kernel,
    take: Kernel,
    complete: Kernel,
    remember: Kernel,
    recall: Kernel,
    observe: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("decoder/decoder", compute_80, compute_90)];

    fn find(modules: &Modules) -> Result<Kernels> {
        let kernel = |name| modules.kernel("decoder/decoder", name);
        Ok(Kernels {
            distribute: kernel("decoder_distribute")?,
            append: kernel("decoder_append")?,
            take: kernel("decoder_take")?,
            complete: kernel("decoder_complete")?,
            remember: kernel("decoder_remember")?,
            recall: kernel("decoder_recall")?,
            observe: kernel("decoder_observe")?,
        })
    }
}

kernel_constants! {
    /// Threads of a CTA.
    const THREADS: u32 = 128;
}

kernel_struct! {
    /// Mirrors Entries of kernels/decoder/params.cuh: an int32 for each row. The stride is in bytes.
    #[derive(Clone, Copy)]
    struct EntryParams {
        data: *const u8,
        step: i64,
    }
}

kernel_struct! {
    /// Mirrors DistributeParams of kernels/decoder/params.cuh.
    struct DistributeParams {
        modes: EntryParams,
        seq_lens: EntryParams,
        q_lens: EntryParams,
        begin: EntryParams,
        thresholds: *const i32,
        lens: *mut i32,
        rows: *mut i32,
        from: *mut i32,
        places: *mut i32,
        stored: *mut i32,
        newest_ids: *mut i32,
        newest_counts: *mut i32,
        windows: *const i32,
        seen_ids: *mut i32,
        seen_counts: *mut i32,
        floors: *const i32,
        mode: i32,
        positions: i32,
        page_size: i32,
        batch: u32,
        classes: u32,
        max_rows: u32,
        shortest: u32,
        table_blocks: u32,
        newest: u32,
        window_count: u32,
        seen_cap: u32,
        unused: u32,
        sequences: EntryParams,
        counted_rows: *mut i32,
        counted_lens: *mut i32,
        counted_begin: *mut i32,
        sequence_count: u32,
        drafts: i32,
    }
}

kernel_struct! {
    /// Mirrors Copied of kernels/decoder/params.cuh. Strides are in bytes.
    #[derive(Clone, Copy)]
    struct CopiedParams {
        from: *const u8,
        to: *mut u8,
        from_steps: [i64; 4],
        to_steps: [i64; 4],
        bytes: u32,
        log_unit: u32,
    }
}

kernel_struct! {
    /// Mirrors AppendParams of kernels/decoder/params.cuh.
    struct AppendParams {
        parts: [CopiedParams; 2],
        seq_lens: EntryParams,
        table: *const u8,
        table_seq: i64,
        table_page: i64,
        rows: *const i32,
        capacity: u64,
        batch: u32,
        positions: u32,
        heads: u32,
        pages: u32,
        page_size: u32,
    }
}

kernel_struct! {
    /// Mirrors TakeParams of kernels/decoder/params.cuh.
    struct TakeParams {
        part: CopiedParams,
        lens: *const i32,
        batch: u32,
        positions: u32,
        heads: u32,
    }
}

kernel_struct! {
    /// Mirrors CompleteParams of kernels/decoder/params.cuh.
    struct CompleteParams {
        lens: *const i32,
        places: *const i32,
        ids: *mut i32,
        counts: *mut i32,
        lists: u32,
        heads: u32,
        capacity: u32,
        block_size: u32,
    }
}

kernel_struct! {
    /// Mirrors PastParams of kernels/decoder/params.cuh.
    struct PastParams {
        sequences: EntryParams,
        lens: *const i32,
        places: *const i32,
        ids: *mut i32,
        counts: *mut i32,
        past_ids: *mut i32,
        past_counts: *mut i32,
        lists: u32,
        heads: u32,
        capacity: u32,
        past_capacity: u32,
        block_size: u32,
        init: u32,
        count: u32,
    }
}

kernel_struct! {
    /// Mirrors ObserveParams of kernels/decoder/params.cuh.
    struct ObserveParams {
        sequences: EntryParams,
        accepted: EntryParams,
        draft_lens: EntryParams,
        hits: *mut f32,
        trials: *mut f32,
        acceptance: *mut f32,
        recommended: *mut i32,
        total_drafted: *mut i32,
        total_accepted: *mut i32,
        cost: f32,
        most: i32,
        gamma: i32,
        count: u32,
        rows: u32,
    }
}

impl EntryParams {
    fn new(t: Option<&Tensor>) -> EntryParams {
        EntryParams { data: address(t), step: byte_stride(t, 0) }
    }
}

impl CopiedParams {
    fn new(from: &Tensor, to: &Tensor) -> CopiedParams {
        let (element, channels) = (to.dtype.bytes(), to.dim(to.rank() - 1));
        let (from_steps, to_steps) = (steps(from), steps(to));
        let bytes = channels * element;
        let is_aligned = |t: &Tensor, steps: &[i64; 4]| {
            steps[3] == element as i64
                && (t.data() as usize).is_multiple_of(16)
                && steps[..3].iter().all(|step| step % 16 == 0)
        };
        let is_wide = bytes.is_multiple_of(16) && is_aligned(from, &from_steps) && is_aligned(to, &to_steps);
        let log_unit = if is_wide { 4 } else { element.trailing_zeros() };
        CopiedParams { from: from.data(), to: to.data(), from_steps, to_steps, bytes: bytes as u32, log_unit }
    }
}

/// CTAs for so many threads, and for so many warps.
fn by_thread(enqueue: &Enqueue, threads: usize) -> Grid {
    let ctas = threads.div_ceil(THREADS as usize).max(1) as u32;
    Grid { ctas, threads: THREADS, kind: enqueue.dependent_kind() }
}

fn by_warp(enqueue: &Enqueue, warps: usize) -> Grid {
    by_thread(enqueue, warps.saturating_mul(32))
}

/// # Safety
/// `params` is the kernel's struct, and what it names stays valid until the stream has passed.
unsafe fn launch<P>(enqueue: &Enqueue, kernel: &Kernel, grid: Grid, params: &P) -> Result<()> {
    // SAFETY: says the caller. The kernels wait before they touch anything.
    unsafe { enqueue.launch(kernel, grid, [(&raw const *params).cast::<c_void>()]) }
}

pub fn distribute(enqueue: &Enqueue, r: &Distribute) -> Result<()> {
    if r.batch() == 0 {
        return Ok(());
    }
    let (modes, mode) = match &r.modes {
        Modes::All(mode) => (None, *mode as i32),
        Modes::Each(modes) => (Some(modes), 0),
    };
    let nowhere = std::ptr::null_mut();
    let tiers = r.tiers.unwrap_or(Tiers::NONE);
    let counted = r.counted.as_ref();
    let params = DistributeParams {
        modes: EntryParams::new(modes),
        seq_lens: EntryParams::new(Some(&r.seq_lens)),
        q_lens: EntryParams::new(r.q_lens.as_ref()),
        begin: EntryParams::new(r.begin.as_ref()),
        thresholds: r.thresholds,
        lens: r.lens,
        rows: r.rows,
        from: r.from,
        places: r.places,
        stored: tiers.stored,
        newest_ids: tiers.newest_ids,
        newest_counts: tiers.newest_counts,
        windows: tiers.windows,
        seen_ids: tiers.seen_ids,
        seen_counts: tiers.seen_counts,
        floors: tiers.floors,
        mode,
        positions: r.positions as i32,
        page_size: saturated(r.page_size).min(i32::MAX as u32) as i32,
        batch: r.batch() as u32,
        classes: r.classes as u32,
        max_rows: r.max_rows as u32,
        shortest: r.shortest,
        table_blocks: saturated(tiers.table_blocks),
        newest: NEWEST as u32,
        window_count: tiers.window_count as u32,
        seen_cap: saturated(tiers.seen_cap),
        unused: 0,
        sequences: EntryParams::new(counted.and_then(|counted| counted.sequences.as_ref())),
        counted_rows: counted.map_or(nowhere, |counted| counted.rows),
        counted_lens: counted.map_or(nowhere, |counted| counted.lens),
        counted_begin: counted.map_or(nowhere, |counted| counted.begin),
        sequence_count: counted.map_or(0, |counted| counted.count as u32),
        drafts: counted.map_or(0, |counted| saturated(counted.drafts).min(i32::MAX as u32) as i32),
    };
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: DistributeParams is the kernel's struct; the call's caller keeps the tensors valid, and the decoder its memory.
    unsafe { launch(enqueue, &kernels.distribute, by_thread(enqueue, r.batch()), &params) }
}

pub fn append(enqueue: &Enqueue, r: &Append) -> Result<()> {
    let heads = r.parts[0].0.dim(r.parts[0].0.rank() - 2);
    let warps = r.pages.batch() * r.positions * heads * 2;
    if warps == 0 {
        return Ok(());
    }
    let table = r.pages.table.as_ref();
    let params = AppendParams {
        parts: [0, 1].map(|n| CopiedParams::new(&r.parts[n].0, &r.parts[n].1)),
        seq_lens: EntryParams::new(Some(&r.pages.seq_lens)),
        table: address(table),
        table_seq: byte_stride(table, 0),
        table_page: byte_stride(table, 1),
        rows: r.rows,
        capacity: r.pages.capacity() as u64,
        batch: r.pages.batch() as u32,
        positions: r.positions as u32,
        heads: heads as u32,
        pages: saturated(r.pages.count),
        page_size: saturated(r.pages.size),
    };
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: as in `distribute`.
    unsafe { launch(enqueue, &kernels.append, by_warp(enqueue, warps), &params) }
}

pub fn take(enqueue: &Enqueue, r: &Take) -> Result<()> {
    let positions = if r.to.rank() == 4 { r.to.dim(1) } else { 1 };
    let (batch, heads) = (r.to.dim(0), r.to.dim(r.to.rank() - 2));
    let warps = batch * positions * heads;
    if warps == 0 {
        return Ok(());
    }
    let params = TakeParams {
        part: CopiedParams::new(&r.from, &r.to),
        lens: r.lens,
        batch: batch as u32,
        positions: positions as u32,
        heads: heads as u32,
    };
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: as in `distribute`.
    unsafe { launch(enqueue, &kernels.take, by_warp(enqueue, warps), &params) }
}

pub fn complete(enqueue: &Enqueue, r: &Complete) -> Result<()> {
    let lists = r.batch * r.heads;
    if lists == 0 {
        return Ok(());
    }
    let params = CompleteParams {
        lens: r.lens,
        places: r.places,
        ids: r.ids,
        counts: r.counts,
        lists: lists as u32,
        heads: r.heads as u32,
        capacity: r.capacity as u32,
        block_size: saturated(r.block_size),
    };
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: as in `distribute`.
    unsafe { launch(enqueue, &kernels.complete, by_thread(enqueue, lists), &params) }
}

impl PastParams {
    fn new(r: &Past) -> PastParams {
        PastParams {
            sequences: EntryParams::new(r.sequences.as_ref()),
            lens: r.lens,
            places: r.places,
            ids: r.ids,
            counts: r.counts,
            past_ids: r.past_ids,
            past_counts: r.past_counts,
            lists: (r.rows * r.heads) as u32,
            heads: r.heads as u32,
            capacity: r.capacity as u32,
            past_capacity: r.past_capacity as u32,
            block_size: saturated(r.block_size),
            init: r.init,
            count: r.count as u32,
        }
    }
}

pub fn remember(enqueue: &Enqueue, r: &Past) -> Result<()> {
    if r.rows == 0 {
        return Ok(());
    }
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: as in `distribute`.
    unsafe { launch(enqueue, &kernels.remember, by_warp(enqueue, r.rows * r.heads), &PastParams::new(r)) }
}

pub fn recall(enqueue: &Enqueue, r: &Past) -> Result<()> {
    if r.rows == 0 {
        return Ok(());
    }
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: as in `distribute`.
    unsafe { launch(enqueue, &kernels.recall, by_warp(enqueue, r.rows * r.heads), &PastParams::new(r)) }
}

pub fn observe(enqueue: &Enqueue, r: &Observe) -> Result<()> {
    if r.rows == 0 {
        return Ok(());
    }
    let d = &r.drafts;
    let params = ObserveParams {
        sequences: EntryParams::new(r.sequences.as_ref()),
        accepted: EntryParams::new(r.accepted.as_ref()),
        draft_lens: EntryParams::new(r.draft_lens.as_ref()),
        hits: d.hits,
        trials: d.trials,
        acceptance: d.acceptance,
        recommended: d.draft_lens,
        total_drafted: d.drafted,
        total_accepted: d.accepted,
        cost: d.cost,
        most: d.most as i32,
        gamma: r.gamma as i32,
        count: d.count as u32,
        rows: saturated(r.rows),
    };
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: as in `distribute`.
    unsafe { launch(enqueue, &kernels.observe, by_thread(enqueue, r.rows), &params) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            kernel_constants(),
            EntryParams::layout("Entries"),
            DistributeParams::layout("DistributeParams"),
            CopiedParams::layout("Copied"),
            AppendParams::layout("AppendParams"),
            TakeParams::layout("TakeParams"),
            CompleteParams::layout("CompleteParams"),
            PastParams::layout("PastParams"),
            ObserveParams::layout("ObserveParams"),
        ];
        layout::check("decoder", file!(), &structs);
    }
}
