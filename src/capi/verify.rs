//! Verification of draft tokens and packing of accepted rows.

use super::boundary::{boundary, handle, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_pack_args, vwd_status, vwd_stream, vwd_verify_args, vwd_verify_pack_args};
use crate::ops::{pack, verify};
use std::mem::MaybeUninit;

/// Greedy verification of draft tokens (Leviathan et al. 2023, batched).
///
/// For each sequence i, finds k_i, the number of leading draft tokens that equal the target's, and the token that follows
/// them, target[i, k_i]. A negative draft token never matches. The accepted tokens and the next token are committed.
///
/// With stop tokens or lengths what is committed is cut after the first stop token and at remaining tokens, as in
/// vwd_verify_sample: a stop token within the budget gives VWD_FINISH_STOP, a cut at the budget VWD_FINISH_LENGTH. Where
/// the cut drops the next token it is −1, and no draft token was refused.
///
/// Drafts of different lengths may lie one after the other: with draft_ends, draft i is tokens draft_ends[i−1] (0 for the
/// first) up to but without draft_ends[i] of draft and target, and bonus[i] follows where all of it is accepted. The first γ
/// tokens of each are looked at, where γ + 1 is the length of a row of committed; without committed all of them are.
///
/// args->draft         [B, γ]    int32 or int64. Row i holds draft_lens[i] valid tokens. [N] with draft_ends.
/// args->target        [B, γ+1]  dtype of draft. The target's token at each position; position γ is the bonus token. [N] with
///                               draft_ends.
/// args->draft_lens    [B]       int32, optional (absent: every row is γ long). Values outside 0 … γ are clamped. Not with draft_ends.
/// args->accepted      [B]       int32, out: how many draft tokens are committed; k_i unless cut.
/// args->next_token    [B]       dtype of draft, out: target[i, k_i]; −1 where it is cut.
/// args->mismatch      [B]       int32, uint8 or bool, out, optional: 1 where a draft token was refused, else 0.
/// args->committed     [B, γ+1]  dtype of draft, out, optional: accepted tokens, the next token, then −1.
/// args->stop          [S] or [B, S] int32 or int64, optional: stop tokens of all requests or of each. Negative ones match nothing.
/// args->ignore_stop   [B]       uint8 or bool, optional: not 0 where stop tokens are tokens like others.
/// args->remaining     [B]       int32, optional: the most tokens to commit. 0 or below: nothing is committed.
/// args->min_remaining [B]       int32, optional: at so many positions stop tokens are tokens like others. The caller keeps
///                               them out of target.
/// args->committed_len [B]       int32, out, optional: tokens that are committed.
/// args->finish        [B]       uint8, out, optional: a VWD_FINISH_* value.
/// args->draft_ends    [B]       int32, optional: never descending, up to N. Values outside 0 … N are clamped, and a draft that
///                               would end before it begins is empty.
/// args->bonus         [B]       dtype of draft, with draft_ends alone: the target's token after the whole draft.
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
/// Arguments, results, blocking, thread safety and errors are those of the two calls; accepted is an output here. Rows of
/// tokens that a stop token or a length cuts off are not packed. Drafts are rows here: draft_ends and bonus are of vwd_verify alone.
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
