//! Selection of KV blocks, and of tokens inside them.

use super::boundary::{computing, handle, out, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_select_blocks_args, vwd_select_tokens_args, vwd_status, vwd_stream};
use crate::core::status::Error;
use crate::ops::select;
use std::mem::MaybeUninit;

/// Scores the blocks of every sequence and selects the exact top k per sequence and KV head; ties go to the lower block.
///
/// Scores s[i, g, j] of block j, with h over the G query heads of KV head g:
///   MINMAX        Σ_h Σ_c max(q_hc, 0)·key_max_c + min(q_hc, 0)·key_min_c
///   MEAN_SOFTMAX  max over the windows w that overlap j of Σ_h softmax_w(scale·q_h·means_w)
///   MEAN_DOT      max over the windows w that overlap j of q_g·means_w
///   LABEL_MASS    Σ_h Σ_{t in j} softmax_t(scale·q̃_h·k̃_t) over the tokens t of all candidates, q̃ and k̃ on the label's
///                 channels; 0 for a candidate without labels, −inf for a block that is no candidate
///   AXIS          Σ_h softmax_j(scale·q_h·mean_j + ln(2·cosh(scale·q_h·axis_j))) over the blocks
/// A score that would be NaN is −inf, and so is the score of a block without a summary (MEAN: without a complete window for
/// which the index has a row). In a softmax a window, token or block (AXIS) that has no summary, or whose product is not
/// finite, weighs nothing; such a window is −inf for MEAN_DOT, and such a block scores −inf for AXIS. If any of the G query
/// heads holds a NaN, every block scores −inf.
/// min(n_i, max(budget, forced)) blocks of the n_i = ⌈len/block_size⌉ are selected: the forced blocks (the first init_blocks
/// and the last local_blocks), then the best. So k counts the forced blocks. n_i and the forced blocks follow from seq_lens
/// alone, whatever the sizes of index and scores. −0 and +0 are equal.
///
/// Query positions: row r of sequence i is at token position p = seq_lens[i] − q_lens[i] + r, because seq_lens counts the rows
/// themselves. It does not see blocks that begin past p (they score −inf), nor windows and labels that reach past p. If each
/// row has its own list, len is p + 1. If the rows share a list, a block's score is the largest of its scores for the rows.
/// Rows from q_lens[i] on are not read, their lists are empty, and so is a shared list without rows.
///
/// args->method                             One of VWD_SELECT_*; index.kind must be the kind that the method reads.
/// args->block_size                         S, tokens of a block; MINMAX, AXIS: equal to index.block_size.
/// args->k                                  Budget of every list. k and init_blocks + local_blocks fit in selected's cap. At
///                                          least 1 where there are neither budgets nor forced blocks, unless cap is 0.
/// args->scale                              Factor on q·k, above 0; 0 means 1/√D. MINMAX and MEAN_DOT ignore it.
/// args->index                              As filled by `vwd_index_update`.
/// args->q           [B, (Q,) Hq, D]        float32, float16 or bfloat16; D a multiple of 8, 16 … 576. MEAN_DOT: Hq is Hk,
///                                          one Forecast vector per KV head.
/// args->q_lens      [B]                    int32, optional: rows of each sequence; absent: Q. Clamped to 0 … Q.
/// args->seq_lens    [B]                    int32. Clamped to 0 and above.
/// args->budgets     [B]                    int32, optional: k of each sequence's lists; clamped to 0 … cap.
/// args->candidates  [B, (Q,) Hk, cap2]     LABEL_MASS: the blocks to weigh, of selected's rank. Other methods: absent.
/// args->selected    [B, (Q,) Hk, cap]      Out, ascending. Q only if q has it: each row's own lists, otherwise shared ones.
/// args->scores      [B, (Q,) Hk, max_blocks]  float32, out, optional. Scores of the blocks below min(n_i, max_blocks), for
///                                          each of selected's lists; the other columns are not written.
/// args->status      [B, (Q,) Hk]           uint32, out, optional: VWD_SELECT_* bits of each of selected's lists; 0 for rows from
///                                          q_lens[i] on.
/// args->log_mass    [B, (Q,) Hq]           float32, out, optional, AXIS alone: for each row and query head the natural logarithm of
///                                          Σ_j S·e^(scale·q·μ_j)·cosh(0.7·scale·q·axis_j), with μ_j = mean_j + index.axis_centre,
///                                          over the blocks j that are whole for the row ((j + 1)·S ≤ p + 1), have a summary and
///                                          are not in the row's list: an estimate of Σ e^s over the tokens that the list leaves
///                                          out, for `vwd_attention`. −inf where there are none, for rows from q_lens[i] on, and for
///                                          all heads of a group of which one holds a NaN; blocks whose product is not finite weigh
///                                          nothing. The index has the centre with which it was made. Neither list nor scores change.
/// Lists have no slots.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
/// once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
/// borrowed until the stream passes this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
/// UNSUPPORTED (CUDA: more than 32 positions share a list, and other limits in docs/abi.md), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_select_blocks(
    session: *const vwd_session,
    args: *const vwd_select_blocks_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_select_blocks", || {
        let (mut buffer, mut index_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        // SAFETY: the C contract of args->index.
        let index = unsafe { versioned(args.index, "index", &mut index_room)? };
        // Looked at where it is made: it is large to move.
        let request = select::Request::of_blocks(session, args, index);
        select::blocks(session, request.as_ref().map_err(Error::clone)?, stream)
    })
}

/// Tells how many bytes of scratch `vwd_select_blocks` with these arguments needs in its stream's arena: 0 on a CPU session.
///
/// Call it for `vwd_session_reserve`, before a graph is captured. The number follows from shapes, strides, dtypes and scalars,
/// never from the contents of tensors, which need not be written yet. The arguments are checked as in the call.
///
/// bytes  Out.
///
/// Enqueues nothing. Thread-safe. Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_select_blocks_scratch(
    session: *const vwd_session,
    args: *const vwd_select_blocks_args,
    bytes: *mut u64,
) -> vwd_status {
    computing("vwd_select_blocks_scratch", || {
        let (mut buffer, mut index_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session, args and bytes.
        let (session, args, bytes) =
            unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?, out(bytes, "bytes")?) };
        // SAFETY: the C contract of args->index.
        let index = unsafe { versioned(args.index, "index", &mut index_room)? };
        bytes.write(select::blocks_scratch(session, &select::Request::of_blocks(session, args, index)?)?);
        Ok(())
    })
}

/// Selects the exact top k tokens inside candidate blocks by their INT4 labels (AsyncTLS: Hu et al. 2026, the second level).
///
/// α_t = mean over the G query heads of softmax_t(scale·q̃_h·k̃_t) over all tokens of the candidates; ties go to the lower
/// token. A token without a label, or whose product is not finite, has α = 0; if one of the G query heads holds a NaN, every
/// token has α = 0. The first init_tokens and the last local_tokens of a sequence are forced: they are always selected,
/// candidates or not, and follow from seq_lens alone. max(min(candidate tokens ∪ forced, budget), forced) tokens are selected
/// in all. So k counts the forced tokens. Query positions as for `vwd_select_blocks`: tokens past p weigh nothing, and if the
/// rows share a list α_t is the largest of its values for the rows.
///
/// args->block_size                      S, tokens of a candidate block.
/// args->k                               Budget of every list. k and init_tokens + local_tokens fit in selected's cap. At least
///                                       1 where there are neither budgets nor forced tokens, unless cap is 0.
/// args->scale                           Factor on q·k, above 0; 0 means 1/√D.
/// args->index                           kind LABEL.
/// args->q           [B, (Q,) Hq, D]     float32, float16 or bfloat16; D a multiple of 8, 16 … 576.
/// args->q_lens      [B]                 int32, optional: rows of each sequence; absent: Q. Clamped to 0 … Q.
/// args->seq_lens    [B]                 int32. Clamped to 0 and above.
/// args->budgets     [B]                 int32, optional: k of each sequence's lists; clamped to 0 … cap.
/// args->candidates  [B, (Q,) Hk, cap2]  Blocks to choose from, of selected's rank.
/// args->selected    [B, (Q,) Hk, cap]   Out, ascending token positions. Q only if q has it: each row's own lists.
/// args->scores      [B, (Q,) Hk, cap]   float32, out, optional. α of each selected token; 0 for a forced token that is in no
///                                       candidate block.
/// args->status      [B, (Q,) Hk]        uint32, out, optional: VWD_SELECT_* bits of each of selected's lists; 0 for rows from
///                                       q_lens[i] on.
/// Lists have no slots.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
/// once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
/// borrowed until the stream passes this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
/// UNSUPPORTED (CUDA: more than 32 positions share a list, and other limits in docs/abi.md), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_select_tokens(
    session: *const vwd_session,
    args: *const vwd_select_tokens_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_select_tokens", || {
        let (mut buffer, mut index_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        // SAFETY: the C contract of args->index.
        let index = unsafe { versioned(args.index, "index", &mut index_room)? };
        // Looked at where it is made: it is large to move.
        let request = select::Request::of_tokens(session, args, index);
        select::tokens(session, request.as_ref().map_err(Error::clone)?, stream)
    })
}

/// Tells how many bytes of scratch `vwd_select_tokens` with these arguments needs in its stream's arena: 0 on a CPU session.
///
/// Call it for `vwd_session_reserve`, before a graph is captured. The number follows from shapes, strides, dtypes and scalars,
/// never from the contents of tensors, which need not be written yet. The arguments are checked as in the call.
///
/// bytes  Out.
///
/// Enqueues nothing. Thread-safe. Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_select_tokens_scratch(
    session: *const vwd_session,
    args: *const vwd_select_tokens_args,
    bytes: *mut u64,
) -> vwd_status {
    computing("vwd_select_tokens_scratch", || {
        let (mut buffer, mut index_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session, args and bytes.
        let (session, args, bytes) =
            unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?, out(bytes, "bytes")?) };
        // SAFETY: the C contract of args->index.
        let index = unsafe { versioned(args.index, "index", &mut index_room)? };
        bytes.write(select::tokens_scratch(session, &select::Request::of_tokens(session, args, index)?)?);
        Ok(())
    })
}
