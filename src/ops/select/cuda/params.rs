//! Parameters that all kernels of kernels/select share, and how their launches are sized.

use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::select::{BlockList, Request};
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{Place, address, byte_stride, element_code, saturated};
use crate::runtime::cuda::{Enqueue, Grid};

kernel_struct! {
    /// Mirrors List of kernels/select/params.cuh. Strides are in bytes; a position's is 0 where positions share a list.
    #[derive(Clone, Copy)]
    pub struct ListParams {
        pub ids: *mut u8,
        pub counts: *mut u8,
        pub ids_seq: i64,
        pub ids_pos: i64,
        pub ids_head: i64,
        pub ids_entry: i64,
        pub counts_seq: i64,
        pub counts_pos: i64,
        pub counts_head: i64,
    }
}

kernel_struct! {
    /// Mirrors SelectParams of kernels/select/params.cuh. Strides are in bytes.
    #[derive(Clone, Copy)]
    pub struct SelectParams {
        pub q: *const u8,
        pub q_lens: *const u8,
        pub seq_lens: *const u8,
        pub budgets: *const u8,
        pub scores: *mut u8,
        pub status: *mut u8,
        pub q_seq: i64,
        pub q_pos: i64,
        pub q_head: i64,
        pub q_channel: i64,
        pub q_lens_seq: i64,
        pub seq_lens_seq: i64,
        pub budgets_seq: i64,
        pub scores_seq: i64,
        pub scores_pos: i64,
        pub scores_head: i64,
        pub scores_block: i64,
        pub status_seq: i64,
        pub status_pos: i64,
        pub status_head: i64,
        pub selected: ListParams,
        pub place: Place,
        pub scratch_scores: *mut u8,
        pub cta_status: *mut u8,
        pub scored_blocks: u32,
        pub batch: u32,
        pub positions: u32,
        pub lists: u32,
        pub kv_heads: u32,
        pub group: u32,
        pub dim: u32,
        pub q_type: u32,
        pub block_size: u32,
        pub k: u32,
        pub capacity: u32,
        pub init: u32,
        pub local: u32,
        pub max_blocks: u32,
        pub slices: u32,
        pub scale: f32,
        pub by_slices: Divisor,
        pub by_heads: Divisor,
        pub by_lists: Divisor,
        pub by_block: Divisor,
    }
}

/// Threads of a CTA of every kernel.
pub const THREADS: u32 = 512;
/// Tokens of the longest sequence.
pub const MOST_TOKENS: usize = i32::MAX as usize;
/// MOST_HEADS of kernels/select/means.cuh and labels_general.cuh: query heads of a list, of all its positions.
pub const MOST_HEADS: usize = 1024;
/// Positions that can share a list: bits of a word.
const MOST_SHARING: usize = 32;

pub fn check_sharing(r: &Request) -> Result<()> {
    if sharing(r) <= MOST_SHARING {
        return Ok(());
    }
    Err(Error::unsupported(format!("q: {} positions share a list; CUDA takes up to {MOST_SHARING}", sharing(r))))
}

/// Positions that a list is for.
pub fn sharing(r: &Request) -> usize {
    if r.selected.is_own() { 1 } else { r.queries.positions.count() }
}

/// The four dimensions of a tensor that has one for positions, or not: strides of sequence, position, head and entry.
pub fn strides(t: Option<&Tensor>, has_positions: bool) -> [i64; 4] {
    match has_positions {
        true => [0, 1, 2, 3].map(|d| byte_stride(t, d)),
        false => [byte_stride(t, 0), 0, byte_stride(t, 1), byte_stride(t, 2)],
    }
}

impl ListParams {
    pub fn new(list: &BlockList) -> ListParams {
        let [ids_seq, ids_pos, ids_head, ids_entry] = strides(Some(&list.ids), list.is_own());
        let [counts_seq, counts_pos, counts_head, _] = strides(Some(&list.counts), list.is_own());
        let (ids, counts) = (list.ids.data(), list.counts.data());
        ListParams { ids, counts, ids_seq, ids_pos, ids_head, ids_entry, counts_seq, counts_pos, counts_head }
    }
}

impl SelectParams {
    /// Without scratch.
    pub fn new(r: &Request) -> SelectParams {
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

/// Where a call's scratch begins; it may need none.
pub fn scratch(enqueue: &Enqueue, bytes: usize) -> Result<usize> {
    if bytes == 0 { Ok(0) } else { Ok(enqueue.scratch(bytes)? as usize) }
}

pub fn grid(enqueue: &Enqueue, ctas: usize) -> Grid {
    Grid { ctas: ctas as u32, threads: THREADS, kind: enqueue.dependent_kind() }
}
