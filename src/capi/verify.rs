//! Verification of draft tokens and packing of accepted rows.

use super::boundary::{boundary, handle, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_pack_args, vwd_status, vwd_stream, vwd_verify_args, vwd_verify_pack_args};
use crate::ops::{pack, verify};
use std::mem::MaybeUninit;

/// Greedy verification of draft tokens (Leviathan et al. 2023, batched).
///
/// For each sequence i, finds k_i, the number of leading draft tokens that equal the target's, and the token that follows
/// them, target[i, k_i]. A negative draft token never matches.
///
/// args->draft       [B, γ]    int32 or int64. Row i holds draft_lens[i] valid tokens.
/// args->target      [B, γ+1]  dtype of draft. The target's token at each position; position γ is the bonus token.
/// args->draft_lens  [B]       int32, optional (absent: every row is γ long). Values outside 0 … γ are clamped.
/// args->accepted    [B]       int32, out: k_i.
/// args->next_token  [B]       dtype of draft, out: target[i, k_i].
/// args->mismatch    [B]       int32, uint8 or bool, out, optional: 1 where a draft token was refused, else 0.
/// args->committed   [B, γ+1]  dtype of draft, out, optional: accepted tokens, the next token, then −1.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^29 sequences or 2^31
/// tokens or more), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_verify(
    session: *const vwd_session,
    args: *const vwd_verify_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_verify", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        verify::run(session, &verify::Request::from_c(session, args)?, stream)
    })
}

/// Packs the accepted rows of every sequence into one contiguous run, for several tensors at once.
///
/// offsets[i] = Σ_{j<i} accepted[j]; row t < accepted[i] of sequence i becomes row offsets[i] + t of packed. K and V of
/// every layer can go in one call.
///
/// args->tensor_count          Number of tensors to pack, 1 … 256.
/// args->rows      [n]         Host array of tensors [B, γ, …] of any dtype and strides. May differ in trailing shape.
/// args->packed    [n]         Host array of tensors [cap, …], out; dtype and trailing shape of the same entry of rows.
///                             Rows at or past cap are not written.
/// args->accepted  [B]         int32. Values outside 0 … γ are clamped.
/// args->offsets   [B+1]       int32 or int64, out. offsets[B] is the number of accepted rows, even where it exceeds cap.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; the arrays rows and packed only during the call. packed must not overlap rows.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^31 rows or more), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_pack(
    session: *const vwd_session,
    args: *const vwd_pack_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_pack", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        // SAFETY: the C contract of rows and packed.
        pack::run(session, &unsafe { pack::Request::from_c(session, args) }?, stream)
    })
}

/// `vwd_verify`, and `vwd_pack` of the rows that it accepts, in one call.
///
/// Arguments, results, blocking, thread safety and errors are those of the two calls; accepted is an output here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_verify_pack(
    session: *const vwd_session,
    args: *const vwd_verify_pack_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_verify_pack", || {
        let (mut buffer, mut place) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        // SAFETY: the C contract of rows and packed.
        pack::run_verified(session, unsafe { pack::VerifiedRequest::from_c(session, args, &mut place) }?, stream)
    })
}
