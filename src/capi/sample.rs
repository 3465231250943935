//! Verification of sampled draft tokens, and sampling.

use super::boundary::{computing, handle, out, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_status, vwd_stream, vwd_verify_sample_args};
use crate::ops::sample;
use std::mem::MaybeUninit;

/// Samples one token of each request, after verifying the tokens that a drafter guessed for it.
///
/// Row r of request i is what the target says of its token at position positions[i] + r; rows 0 … γ follow the draft tokens. Rows
/// decide in order. A row that accepts draft token r hands over to row r + 1; the first that refuses, or has no draft token,
/// gives the next token. With γ = 0 this is plain sampling.
///
/// Greedy rows (temperature below 10^−5, negative or NaN, or VWD_ACCEPT_GREEDY) take the lowest token of the largest logit and use no
/// random number. VWD_ACCEPT_COUPLED draws what plain sampling with this seed draws at this position, whatever was drafted: drafts change
/// the time that a text takes and not the text, as in Daliri et al. 2024. There Gumbel noise of each token couples draft and target; here
/// each position has one random number. VWD_ACCEPT_REJECTION accepts token x iff u·q(x) < p(x), and else draws from max(p − q, 0)
/// (Leviathan et al. 2023, Chen et al. 2023); without draft_rows q is 1 at the draft token.
///
/// p is made of a row in this order: stop tokens that min_remaining forbids are dropped; temperature; min_p keeps tokens at least min_p
/// times as likely as the likeliest (Nguyen et al. 2024); top_k keeps the k likeliest (Fan et al. 2018); top_p keeps the fewest likeliest
/// that have top_p of the mass that is left (Holtzman et al. 2020). Ties at a bound stay, and at least one token does. +inf logits share
/// all mass. NaN cannot be drawn. A row from which no token can be drawn ends the request: acceptance stops before it, and there is no next
/// token.
///
/// Random numbers are Philox4x32-10 (Salmon et al. 2011) of (seed, position, purpose): nothing depends on the request's place in the batch,
/// the size of the batch, the number of draft tokens or the device. A draw is defined to the bit (docs/verify-sample.md), so the CPU and
/// CUDA commit the same tokens for rows of the same bits; only logprobs may differ, by 10^−6·(1 + |ln p|).
///
/// Committed are the accepted draft tokens and the next token, cut after the first stop token and at remaining tokens. A
/// stop token within the budget gives VWD_FINISH_STOP, a cut at the budget VWD_FINISH_LENGTH. Where the cut drops the next token
/// it is −1.
///
/// args->rule                      A VWD_ACCEPT_* value.
/// args->draft         [B, γ]      int32 or int64, optional (absent: γ = 0); γ ≤ 64. Tokens of the target's vocabulary, also where draft_map
///                                 is given; one outside 0 … V−1 ends its draft.
/// args->draft_lens    [B]         int32, optional (absent: every draft is γ long). Values outside 0 … γ are clamped.
/// args->target        [B, γ+1, V] float32, float16 or bfloat16; 1 ≤ V ≤ 2^20. Or [N, V]: rows of all requests one after the other;
///                                 rows past a request's draft_lens are not read, so requests may have as many as they draft.
/// args->target_begin  [B]         int32 or int64, for target [N, V]: row 0 of each request. A row outside 0 … N−1 ends the request.
///                                 Without it, row i is that of request i, and γ = 0.
/// args->draft_rows    [B, γ, Vd]  float32, float16 or bfloat16, optional; Vd ≤ 2^20, and Vd ≤ V without draft_map. What each draft token was
///                                 drawn from: q is made of it as p is, by the request's temperature and filters, but keeps stop tokens; with
///                                 VWD_SAMPLE_DRAFT_PROBABILITIES it is what the row holds, scaled to sum to 1. Only VWD_ACCEPT_REJECTION reads it.
/// args->draft_map     [Vd]        int32, ascending, optional: the target's token for each column of draft_rows; absent: the same number.
///                                 Columns with numbers outside 0 … V−1 stand for no token, and keep their part of q. Not read without draft_rows.
/// args->temperature   [B]         float32, optional (absent: 1). Probabilities have had theirs: it tells only which are greedy.
/// args->top_k         [B]         int32, optional. 0 or below, and V or above: off.
/// args->top_p         [B]         float32, optional. 1 or above, or NaN: off; 0 or below keeps the likeliest.
/// args->min_p         [B]         float32, optional. 0 or below, or NaN: off; 1 or above keeps the likeliest.
/// args->seeds         [B]         uint64 or int64. Not read by VWD_ACCEPT_GREEDY, for which it may be absent; positions likewise.
/// args->positions     [B]         int32 or int64: the position of the token that row 0 decides.
/// args->stop          [S] or [B, S] int32 or int64, optional: stop tokens of all requests or of each. Negative ones match nothing.
/// args->ignore_stop   [B]         uint8 or bool, optional: not 0 where stop tokens are tokens like others.
/// args->remaining     [B]         int32, optional: the most tokens to commit. 0 or below: nothing is decided, as for a finished request or
///                                 a row of padding.
/// args->min_remaining [B]         int32, optional: so many rows cannot commit stop tokens.
/// args->next_token    [B]         int32 or int64, the dtype of draft if it is given, out; −1: none.
/// args->accepted      [B]         int32, out, optional: accepted draft tokens that are committed.
/// args->committed     [B, γ+1]    dtype of next_token, out, optional; −1 past the end.
/// args->committed_len [B]         int32, out, optional.
/// args->finish        [B]         uint8, out, optional: a VWD_FINISH_* value.
/// args->status        [B]         uint32 or int32, out, optional: bits VWD_SAMPLE_NAN, VWD_SAMPLE_NO_TOKEN, VWD_SAMPLE_NO_RESIDUAL,
///                                 VWD_SAMPLE_NO_ROW, of the rows that committed, and of the one that could not; 0 with
///                                 nothing remaining.
/// args->logprobs      [B, γ+1]    float32, out, optional: ln p of each committed token at temperature 1 and without filters, where p
///                                 leaves out forbidden stop tokens; 0 past the end.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
/// once its scratch is there; may be captured: seeds, positions and all else are read when the graph runs. Thread-safe; calls on one
/// stream are ordered by the caller. Tensors are borrowed until the stream passes this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY, OUT_OF_SCRATCH, UNSUPPORTED (CUDA: 2^24 rows or more),
/// DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_verify_sample(
    session: *const vwd_session,
    args: *const vwd_verify_sample_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_verify_sample", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        sample::run(session, &sample::Request::from_c(session, args)?, stream)
    })
}

/// Tells how many bytes of scratch `vwd_verify_sample` with these arguments needs in its stream's arena: 0 on a CPU session.
///
/// Call it for `vwd_session_reserve`, before a graph is captured. The number follows from shapes, strides, dtypes and scalars,
/// never from the contents of tensors, which need not be written yet. The arguments are checked as in the call.
///
/// bytes  Out.
///
/// Enqueues nothing. Thread-safe. Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_verify_sample_scratch(
    session: *const vwd_session,
    args: *const vwd_verify_sample_args,
    bytes: *mut u64,
) -> vwd_status {
    computing("vwd_verify_sample_scratch", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session, args and bytes.
        let (session, args, bytes) =
            unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?, out(bytes, "bytes")?) };
        bytes.write(sample::scratch(session, &sample::Request::from_c(session, args)?)?);
        Ok(())
    })
}
