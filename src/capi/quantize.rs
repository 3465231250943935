//! Coding of keys and values in INT4.

use super::boundary::{computing, handle, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_kv_quantize_args, vwd_kv_weights_args, vwd_status, vwd_stream};
use crate::ops::quantize;
use std::mem::MaybeUninit;

/// Codes whole blocks of keys and values in INT4, for some layers at once: from k and v of each layer's `vwd_paged_kv` to its int4.
///
/// Sequence i has n_i tokens: seq_lens[i], but no more than the pages of either cache have room for. Block j of sequence i is coded if
/// max(begin[i], exact_tokens) ≤ j·S and (j + 1)·S ≤ n_i, and if all its tokens have pages in both caches. For each KV head, in
/// float32 and in this order:
///   mean = Σ_t k_t in the order of the tokens, divided by S and rounded to the dtype of means; 0 for a block that has no row;
///   y = H·((k_t − mean) / weights) for keys, y = H·v_t for values: butterflies (a + b, a − b) over channels 1, 2, 4 … apart, then
///   times the rounded 1/√n;
///   scale = the e4m3 number nearest to max|y| / 7.5 (ties to even), 2⁻⁹ at least where y is not 0, and 448 at most;
///   code = 8 + clamp(⌊y / scale⌋, −8, 7), and 8 where the scale is 0.
/// A row y that holds a number that is not finite has the scale NaN and codes 0: rows that see the token are NaN, as with keys that
/// are not coded. Such a key makes the mean of its block NaN, or infinite, and so all keys of the block NaN. coded_lens[i] becomes
/// ⌊n_i / S⌋·S.
///
/// A block has the same bits however often it is coded, in whatever order and on whatever device. The codes of a block are those of
/// the exact keys, so that exact pages may be given up only when their block is coded.
///
/// args->layer_count         1 … 48.
/// args->layers [layer_count]  Host array of pointers. Each layer has int4, and k of 16 or 32 bits; see there. All layers have the
///                           shapes, strides, dtypes and numbers of the first one and the same page tables, lengths and coded_lens:
///                           they differ in the addresses of k, v, int4->k, v, k_scale, v_scale, means and weights alone. Layers do
///                           not share what is written, and no page of int4 is that of two places in its table: which would stay is open.
/// args->begin  [B]          int32, optional (absent: 0). Blocks that begin before it are not coded.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; the structs only during the call.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: more than 2^31 − 1 lists, or tokens), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_quantize(
    session: *const vwd_session,
    args: *const vwd_kv_quantize_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_kv_quantize", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session, args and layers.
        unsafe {
            let (session, args) = (handle(session, "session")?, versioned(args, "args", &mut buffer)?);
            quantize::Request::with(session, args, |request| quantize::run(session, request, stream))
        }
    })
}

/// Finds the weights of `vwd_int4_kv` from a sample of queries and keys: √(σ_c / q̄_c) for each channel c of a KV head, divided by
/// its mean over the channels.
///
/// σ_c is the spread of channel c about its block's mean, the root of the mean square over all tokens of k; q̄_c the mean of |q_c| over
/// the tokens of q and the G query heads of the KV head. Blocks are S tokens of k, the last one perhaps fewer. A channel whose
/// quotient is not a finite number above 0 has weight 1 and does not enter the mean. In float32, sums in the order of the tokens
/// and, for q̄, of the heads before.
///
/// args->block_size            S, 1 at least.
/// args->q        [Tq, Hq, D]  float32, float16 or bfloat16; D a multiple of 8, 16 … 576. Sample of post-RoPE queries.
/// args->k        [Tk, Hk, D]  dtype of q. Sample of post-RoPE keys: tokens that follow each other.
/// args->weights  [Hk, D]      float32, out.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: more than 2^31 − 1 lists, or tokens), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_weights(
    session: *const vwd_session,
    args: *const vwd_kv_weights_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_kv_weights", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        quantize::weights(session, &quantize::WeightsRequest::from_c(session, args)?, stream)
    })
}
