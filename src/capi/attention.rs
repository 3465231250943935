//! Attention over a selection, joining of states, and repair of a wrong prediction.

use super::boundary::{Versioned, boundary, handle, versioned};
use super::session::vwd_session;
use super::types::{
    vwd_attention_partials, vwd_attention_state, vwd_block_list, vwd_paged_kv, vwd_status, vwd_stream, vwd_tensor,
};
use crate::ops::{attention, repair};
use std::mem::MaybeUninit;

/// Arguments of `vwd_attention`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_attention_args {
    pub struct_size: u32,
    pub block_size: u32,
    pub partial_blocks: u32,
    pub scale: f32,
    pub q: vwd_tensor,
    pub kv: vwd_paged_kv,
    pub list: vwd_block_list,
    pub out: vwd_tensor,
    pub lse: vwd_tensor,
    pub state: vwd_attention_state,
    pub partials: vwd_attention_partials,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_attention_args {}

/// Arguments of `vwd_merge_states`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_merge_states_args {
    pub struct_size: u32,
    /// Length of the array inputs.
    pub input_count: u32,
    pub inputs: *const vwd_attention_state,
    pub out: vwd_tensor,
    pub lse: vwd_tensor,
    pub state: vwd_attention_state,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_merge_states_args {}

/// The result covers predicted ∪ selected blocks (PRR): what was predicted in vain stays in.
pub const VWD_REPAIR_SUPERSET: u32 = 1;
/// The result covers the selected blocks alone.
pub const VWD_REPAIR_EXACT: u32 = 2;

/// Arguments of `vwd_repair`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_repair_args {
    pub struct_size: u32,
    pub mode: u32,
    pub block_size: u32,
    pub partial_blocks: u32,
    pub scale: f32,
    /// Must be 0.
    pub flags: u32,
    pub q: vwd_tensor,
    pub kv: vwd_paged_kv,
    pub predicted: vwd_block_list,
    pub selected: vwd_block_list,
    pub predicted_state: vwd_attention_state,
    pub predicted_partials: vwd_attention_partials,
    pub out: vwd_tensor,
    pub lse: vwd_tensor,
    pub state: vwd_attention_state,
    pub missed_counts: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_repair_args {}

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
    boundary(|| {
        let mut room = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut room)?) };
        attention::run(session, &attention::Request::from_c(session, args)?, stream)
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
    boundary(|| {
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
    boundary(|| {
        let mut room = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut room)?) };
        repair::run(session, &repair::Request::from_c(session, args)?, stream)
    })
}
