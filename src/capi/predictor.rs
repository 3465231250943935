//! Prediction of the next step's blocks from the scores of past steps (PRR: Wang et al. 2026).

use super::boundary::{computing, handle, out, versioned};
use super::session::vwd_session;
use crate::abi::{
    vwd_holt, vwd_predictor_calibrate_args, vwd_predictor_predict_args, vwd_predictor_reset_args,
    vwd_predictor_update_args, vwd_status, vwd_stream,
};
use crate::decode::predictor;
use std::mem::MaybeUninit;

/// Forgets the scores of some sequences: level = −inf, trend = 0.
///
/// args->state             Level and trend, out.
/// args->rows   [n]        int32, optional (absent: every sequence). Rows outside 0 … N−1 are skipped.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_predictor_reset(
    session: *const vwd_session,
    args: *const vwd_predictor_reset_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_predictor_reset", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        predictor::reset(session, &predictor::ResetRequest::from_c(session, args)?, stream)
    })
}

/// Predicts which blocks the coming selection will choose (PRR: Wang et al. 2026): the top ⌈ratio·k⌉ of
/// ŝ = level + gamma·trend.
///
/// Forced blocks, ties and counts are as in `vwd_select_blocks`; a block whose level is not finite has ŝ = −inf.
///
/// args->block_size                           S.
/// args->k                                    Budget of the selection that is predicted. k and ⌈ratio·k⌉ count the forced
///                                            blocks. Neither ⌈ratio·k⌉ nor init_blocks + local_blocks exceeds predicted's cap.
/// args->ratio                                r ≥ 1; 0 means 1. ⌈r·k⌉ forgives the float's rounding (one part in a million).
/// args->holt                                 Smoothing factors, of which gamma is read.
/// args->state                                Level and trend of N sequences, input.
/// args->seq_lens    [B]                      int32: lengths at the coming step; n_i = ⌈len/S⌉ is clamped to max_blocks.
/// args->budgets     [B]                      int32, optional: k of each sequence; ⌈r·k⌉ is clamped to 0 … cap.
/// args->predicted   [B, Hk, cap]             Out, ascending; without slots.
/// args->scores      [B, Hk, max_blocks]      float32, out, optional: ŝ of blocks below n_i.
/// args->sequences   [B]                      int32, optional (absent: row i is sequence i, and B is N): the sequence of the state
///                                            that each row is. Of one with another number forced blocks alone are
///                                            predicted.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
/// once its scratch is there, of which CUDA takes none; may be captured. Thread-safe; calls on one stream are ordered by the caller.
/// Tensors are borrowed until the stream passes this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY (scratch of a CPU session), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_predictor_predict(
    session: *const vwd_session,
    args: *const vwd_predictor_predict_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_predictor_predict", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        predictor::predict(session, &predictor::PredictRequest::from_c(session, args)?, stream)
    })
}

/// Folds the true scores of a step into the state (PRR, Holt 1957).
///
/// L' = alpha·s + (1−alpha)·L, T' = beta·(L'−L) + (1−beta)·T. A block whose level, trend or score is not finite starts again:
/// L' = s, T' = 0.
///
/// args->block_size                       S.
/// args->holt                             Smoothing factors, of which alpha and beta are read.
/// args->state                            Level and trend of N sequences, in and out.
/// args->seq_lens  [B]                    int32: lengths at this step; blocks at or past ⌈len/S⌉ do not change.
/// args->scores    [B, Hk, max_blocks]    float32, as `vwd_select_blocks` wrote them.
/// args->sequences [B]                    int32, optional (absent: row i is sequence i, and B is N): the sequence of the state that
///                                        each row is, distinct. A row with another number changes nothing.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_predictor_update(
    session: *const vwd_session,
    args: *const vwd_predictor_update_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_predictor_update", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        predictor::update(session, &predictor::UpdateRequest::from_c(session, args)?, stream)
    })
}

/// Picks the smoothing factors that would have predicted a history of score rows best (PRR: calibration on the prefill).
///
/// For every point of the grid the predictor runs through each history: it predicts step t from the steps before t, then
/// takes the scores of t. The share of step t that it hits is
///   Σ_{j in P̂} w_j / Σ_j w_j,  w_j = max(s_j − c, 0),
/// where P̂ is the predicted list and c the best score that the true selection of step t leaves out. A block weighs as much as
/// its score exceeds c, so that the share does not depend on the scores' offset and scale, and swapping blocks of equal score
/// costs nothing. Forced blocks and scores that are not finite do not count. The hit rate is the mean share over heads and
/// steps. The first step of a history is skipped, and so are steps whose selection leaves no block out or only takes scores
/// equal to c. Ties between points go to the earlier point.
///
/// Each w_j counts as a whole number of a unit that suits the step: a power of two of which the n scores that are not forced add up to
/// at most 2^63, so that what is dropped is below n² / 2^61 of a step's largest weight. The result has the same bits on every backend.
///
/// Scores from elsewhere, such as those of a forecast's queries, are rated on the same steps by histories of two: their row, and the true
/// one. With {1, 0, 0} for a grid the hit rate is that of the lists that those rows select.
///
/// args->k, init_blocks, local_blocks, ratio    As in `vwd_predictor_predict`.
/// args->grid          [grid_count]             Host array, optional (NULL: a built-in grid that starts with {1, 0, 0}).
/// args->scores        [N, T, Hk, nb]           float32. Score rows of N histories of T steps. Every second, or every tenth, row of more
///                                              is a stride of T.
/// args->block_counts  [N, T]                   int32. Blocks that exist at each step, clamped to 0 … nb.
/// holt                                         Out: the best point.
/// hit_rate                                     Out, may be NULL: hit rate of the best point, 0 … 1; 0 if every step is skipped.
///
/// On CUDA the call runs on a stream of its own: streams that write the tensors have passed. Its memory there is 24 bytes for each row of
/// scores, and 8 for each point, history, head and block, of as many points at once as 256 MiB hold, or of one.
///
/// Blocks until done and may allocate; not for capture. Thread-safe. Tensors are borrowed during the call.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY, UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_predictor_calibrate(
    session: *const vwd_session,
    args: *const vwd_predictor_calibrate_args,
    holt: *mut vwd_holt,
    hit_rate: *mut f64,
) -> vwd_status {
    computing("vwd_predictor_calibrate", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        // SAFETY: the C contract of holt.
        let holt = unsafe { out(holt, "holt")? };
        // SAFETY: the C contract of grid.
        let best = predictor::calibrate(session, &unsafe { predictor::CalibrateRequest::from_c(session, args) }?)?;
        holt.write(best.holt);
        // SAFETY: NULL or valid for a write.
        if let Some(hit_rate) = unsafe { hit_rate.as_mut() } {
            *hit_rate = best.hit_rate;
        }
        Ok(())
    })
}
