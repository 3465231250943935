//! Launch of the kernels of kernels/verify.cu.

use super::Request;
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::Enqueue;

/// Mirrors VerifyParams of kernels/verify.cuh. Strides are in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Params {
    draft: *const u8,
    target: *const u8,
    draft_seq: i64,
    draft_pos: i64,
    target_seq: i64,
    target_pos: i64,
    draft_slot: i64,
    target_slot: i64,
    batch: u32,
    gamma: u32,
    pub tiles: u32,
    log_lanes: u32,
    log_row_tiles: u32,
    tile_rows: u32,
    mismatch_bytes: u32,
    draft_lens: *const u8,
    draft_lens_seq: i64,
    accepted: *mut u8,
    accepted_seq: i64,
    next_token: *mut u8,
    next_token_seq: i64,
    mismatch: *mut u8,
    mismatch_seq: i64,
    committed: *mut u8,
    committed_seq: i64,
    committed_pos: i64,
}

/// Token slots of a lane, and what they cover in a tile: TOKEN_SLOTS of kernels/verify.cuh.
const LOG_SLOTS: u32 = 2;
const LOG_LANES: u32 = 5;
const THREADS: u32 = 128;
const LONG_THREADS: u32 = 256;

/// Stride of dimension `d` in bytes.
pub fn stride(t: &Tensor, d: usize) -> i64 {
    t.stride(d) as i64 * t.dtype.bytes() as i64
}

/// ⌈log2 n⌉; 0 for 0.
pub fn log2_ceil(n: u32) -> u32 {
    n.max(1).next_power_of_two().trailing_zeros()
}

impl Params {
    pub fn new(r: &Request) -> Result<Params> {
        const MOST_ROWS: usize = 1 << 29;
        const MOST_TOKENS: usize = (1 << 31) - 1;
        let (batch, gamma) = (r.batch(), r.gamma());
        if batch >= MOST_ROWS || batch.saturating_mul(gamma) > MOST_TOKENS {
            return Err(Error::unsupported(format!(
                "draft: {batch} rows of {gamma} tokens; CUDA takes up to 2^31 − 1"
            )));
        }
        let log_gamma = log2_ceil(gamma as u32);
        let long = log_gamma > LOG_LANES;
        let log_row_tiles = log_gamma.saturating_sub(LOG_LANES + LOG_SLOTS);
        let tile_rows = if long { 1 } else { 1 << (LOG_LANES - log_gamma) };
        let tiles = if long { (batch as u32) << log_row_tiles } else { (batch as u32).div_ceil(tile_rows) };
        let optional = |t: &Option<Tensor>| t.map_or(std::ptr::null_mut(), |t| t.data);
        let step = |t: &Option<Tensor>, d| t.as_ref().map_or(0, |t| stride(t, d));
        Ok(Params {
            draft: r.draft.data,
            target: r.target.data,
            draft_seq: stride(&r.draft, 0),
            draft_pos: stride(&r.draft, 1),
            target_seq: stride(&r.target, 0),
            target_pos: stride(&r.target, 1),
            draft_slot: stride(&r.draft, 1) << LOG_LANES,
            target_slot: stride(&r.target, 1) << LOG_LANES,
            batch: batch as u32,
            gamma: gamma as u32,
            tiles,
            log_lanes: log_gamma.min(LOG_LANES),
            log_row_tiles,
            tile_rows,
            mismatch_bytes: r.mismatch.map_or(0, |t| t.dtype.bytes() as u32),
            draft_lens: optional(&r.draft_lens),
            draft_lens_seq: step(&r.draft_lens, 0),
            accepted: r.accepted.data,
            accepted_seq: stride(&r.accepted, 0),
            next_token: r.next_token.data,
            next_token_seq: stride(&r.next_token, 0),
            mismatch: optional(&r.mismatch),
            mismatch_seq: step(&r.mismatch, 0),
            committed: optional(&r.committed),
            committed_seq: step(&r.committed, 0),
            committed_pos: step(&r.committed, 1),
        })
    }
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if r.batch() == 0 {
        return Ok(());
    }
    let params = Params::new(r)?;
    let wide = r.draft.dtype == DType::I64;
    let kernels = enqueue.kernels();
    let (kernel, ctas, threads) = if params.log_row_tiles > 0 {
        (if wide { &kernels.verify_long_i64 } else { &kernels.verify_long_i32 }, params.batch, LONG_THREADS)
    } else {
        let ctas = params.tiles.div_ceil(THREADS / 32);
        (if wide { &kernels.verify_i64 } else { &kernels.verify_i32 }, ctas, THREADS)
    };
    // SAFETY: Params is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe { enqueue.launch(kernel, ctas, threads, &params) }
}
