//! Attention over a selection, joining of states, and repair of a wrong prediction.

use super::boundary::{computing, handle, out, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_attention_args, vwd_merge_states_args, vwd_repair_args, vwd_status, vwd_stream};
use crate::ops::{attention, repair};
use std::mem::MaybeUninit;

/// Decode attention of one query position per sequence over a list of blocks, a list of tokens, or everything.
///
/// out[i, h] = Σ_t softmax_t(scale·q_h·k_t) v_t over the tokens t of the list of KV head h / G that are below seq_lens[i].
/// Nothing to attend: out = 0, lse = −inf. Speculative attention is this call over a predicted list with state or
/// partials kept for `vwd_repair`. Several query positions of one sequence are several rows that share pages
/// (a page_table with stride 0) and differ in seq_lens.
///
/// args->block_size                Tokens of a block of the list, S; 1 for a list of tokens; 0 without a list. With a
///                                 page_table, S divides P or P divides S.
/// args->partial_blocks            Entries of the list that share one partial; 0 means 1.
/// args->scale                     Of q·k; 0 means 1/√D.
/// args->q         [B, Hq, D]      float32, float16 or bfloat16. Hq = G·Hk, any G ≥ 1.
/// args->kv                        Keys and values.
/// args->list      [B, Hk, cap]    Optional (ids and counts absent: every token).
/// args->out       [B, Hq, D]      dtype of q, or float32; out.
/// args->lse       [B, Hq]         float32, out, optional. Natural logarithm of Σ e^s.
/// args->state                     Out, optional (all three or none).
/// args->partials                  Out, optional (all three or none); needs a list. Entries past the count are not written.
///
/// On the CPU results do not depend on batch, neighbours or threads.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch of a CPU
/// session), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_attention(
    session: *const vwd_session,
    args: *const vwd_attention_args,
    stream: vwd_stream,
) -> vwd_status {
    computing(|| {
        let (mut room, mut kv_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut room)?) };
        // SAFETY: the C contract of args->kv.
        let kv = unsafe { versioned(args.kv, "kv", &mut kv_room)? };
        attention::run(session, &attention::Request::from_c(session, args, kv)?, stream)
    })
}

/// Tells how many bytes of scratch `vwd_attention` with these arguments needs in its stream's arena: 0 on a CPU session.
///
/// For `vwd_session_reserve`, before a graph is captured. Follows from what the host sees of the arguments, never from the
/// contents of tensors, which need not be there yet. The arguments are checked as in the call.
///
/// bytes  Out.
///
/// Enqueues nothing. Thread-safe. Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_attention_scratch(
    session: *const vwd_session,
    args: *const vwd_attention_args,
    bytes: *mut u64,
) -> vwd_status {
    computing(|| {
        let (mut room, mut kv_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session, args and bytes.
        let (session, args, bytes) =
            unsafe { (handle(session, "session")?, versioned(args, "args", &mut room)?, out(bytes, "bytes")?) };
        // SAFETY: the C contract of args->kv.
        let kv = unsafe { versioned(args.kv, "kv", &mut kv_room)? };
        bytes.write(attention::scratch(session, &attention::Request::from_c(session, args, kv)?)?);
        Ok(())
    })
}

/// Joins attention states over disjoint sets of tokens (Flash-Decoding: Dao et al. 2023).
///
/// m' = max_n m_n, l' = Σ_n l_n e^(m_n−m'), acc' = Σ_n acc_n e^(m_n−m'), out = acc'/l', lse = m' + ln l'. Empty states
/// are neutral; joined in the order given.
///
/// args->input_count        Number of states, 1 … 16.
/// args->inputs  [n]        Host array of states [B, Hq, D], [B, Hq], [B, Hq].
/// args->out     [B, Hq, D] float32, float16 or bfloat16, out, optional.
/// args->lse     [B, Hq]    float32, out, optional.
/// args->state              Out, optional (all three or none). At least one of out, lse and state is given.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; the array inputs only during the call. Outputs do not overlap inputs.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_merge_states(
    session: *const vwd_session,
    args: *const vwd_merge_states_args,
    stream: vwd_stream,
) -> vwd_status {
    computing(|| {
        let mut room = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut room)?) };
        // SAFETY: the C contract of inputs.
        attention::merge(session, &unsafe { attention::MergeRequest::from_c(session, args) }?, stream)
    })
}

/// Turns attention over predicted blocks into attention over the selected ones, at a cost that follows what was missed.
///
/// The missed set, selected ∖ predicted, is found here, attended and folded in. SUPERSET (PRR) starts from
/// predicted_state; its result covers predicted ∪ selected. EXACT joins the partials of predicted ∩ selected with the
/// missed blocks; a group of partial_blocks that holds a block predicted in vain is attended again. On the CPU, with
/// block_size ≥ 8 and partial_blocks ≤ 1, EXACT equals `vwd_attention` over selected bit for bit.
///
/// args->mode                                VWD_REPAIR_SUPERSET or VWD_REPAIR_EXACT.
/// args->block_size, partial_blocks, scale   As in the call of `vwd_attention` that made the state or partials.
/// args->q, kv                               Likewise.
/// args->predicted           [B, Hk, cap]    The list that was attended.
/// args->selected            [B, Hk, cap2]   The true list.
/// args->predicted_state                     SUPERSET: kept by `vwd_attention`. EXACT: absent.
/// args->predicted_partials                  EXACT: kept by `vwd_attention`. SUPERSET: absent.
/// args->out                 [B, Hq, D]      dtype of q, or float32; out.
/// args->lse                 [B, Hq]         float32, out, optional.
/// args->state                               Out, optional (all three or none); may be predicted_state itself.
/// args->missed_counts       [B, Hk]         int32, out, optional: size of selected ∖ predicted.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch of a CPU
/// session), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_repair(
    session: *const vwd_session,
    args: *const vwd_repair_args,
    stream: vwd_stream,
) -> vwd_status {
    computing(|| {
        let (mut room, mut kv_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut room)?) };
        // SAFETY: the C contract of args->kv.
        let kv = unsafe { versioned(args.kv, "kv", &mut kv_room)? };
        repair::run(session, &repair::Request::from_c(session, args, kv)?, stream)
    })
}

/// Tells how many bytes of scratch `vwd_repair` with these arguments needs in its stream's arena: 0 on a CPU session.
///
/// For `vwd_session_reserve`, before a graph is captured. Follows from what the host sees of the arguments, never from the
/// contents of tensors, which need not be there yet. The arguments are checked as in the call.
///
/// bytes  Out.
///
/// Enqueues nothing. Thread-safe. Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_repair_scratch(
    session: *const vwd_session,
    args: *const vwd_repair_args,
    bytes: *mut u64,
) -> vwd_status {
    computing(|| {
        let (mut room, mut kv_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session, args and bytes.
        let (session, args, bytes) =
            unsafe { (handle(session, "session")?, versioned(args, "args", &mut room)?, out(bytes, "bytes")?) };
        // SAFETY: the C contract of args->kv.
        let kv = unsafe { versioned(args.kv, "kv", &mut kv_room)? };
        bytes.write(repair::scratch(session, &repair::Request::from_c(session, args, kv)?)?);
        Ok(())
    })
}
