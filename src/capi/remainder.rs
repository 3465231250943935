//! What a selection leaves out, as one more term of attention.

use super::boundary::{computing, handle, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_remainder_update_args, vwd_status, vwd_stream};
use crate::ops::remainder;
use std::mem::MaybeUninit;

/// Extends the means and the covariance of `vwd_remainder` by the blocks of each sequence that became whole.
///
/// Blocks 1, 2 … of a sequence are taken in this order, each once, when all its S tokens are below seq_lens[i]: tokens[n, g] of the
/// sequence's row n says how many were. A token without a page ends the call for its sequence. For each KV head, with c tokens counted:
///   w = S / (c + S); δ = (1/S)·Σ_t (k_t − mean_k) and ε = (1/S)·Σ_t (v_t − mean_v) over the block;
///   covariance += w·((1/S)·Σ_t (k_t − mean_k)(v_t − mean_v)ᵀ − covariance) − w²·δ·εᵀ, mean_k += w·δ, mean_v += w·ε;
///   the first block counts with its own means as mean_k and mean_v, and with a covariance of 0.
/// Every operation is rounded to float32 in one fixed order: a sequence has the same bits however the calls cut it, and on every device.
///
/// Counted blocks cannot be taken out. Where begin[i] is before the end of what was counted, or seq_lens[i] is, the row is made anew
/// from the keys and values of all its blocks, whose pages must still be there; so it is where the engine sets tokens to 0. An engine
/// that calls it with lengths that it never takes back, as after verification, never pays for that.
///
/// args->block_size            S, 1 … 4096. With a page_table, S divides P or P divides S.
/// args->kv                    Keys and values of 8, 16 or 32 bits, their pages and lengths. What int4 codes is not read: extend before
///                             exact pages are given up.
/// args->begin     [B]         int32, optional: tokens from begin[i] on are new or were replaced. Absent: nothing that was counted was.
/// args->remainder             tokens, mean_k, mean_v and covariance, in and out. No two sequences have the same row.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; the structs only during the call.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: more than 2^31 − 1 lists), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_remainder_update(
    session: *const vwd_session,
    args: *const vwd_remainder_update_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_remainder_update", || {
        let (mut buffer, mut kv, mut room) = (MaybeUninit::uninit(), MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        // SAFETY: the C contract of args->kv and args->remainder.
        let (kv, c) =
            unsafe { (versioned(args.kv, "kv", &mut kv)?, versioned(args.remainder, "remainder", &mut room)?) };
        remainder::update(session, &remainder::Request::from_c(session, args, kv, c)?, stream)
    })
}
