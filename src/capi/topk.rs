//! The top k of rows of scores.

use super::boundary::{computing, handle, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_status, vwd_stream, vwd_topk_args};
use crate::ops::topk;
use std::mem::MaybeUninit;

/// Selects the exact top k of each row of scores; ties go to the lower index.
///
/// Row r has lens[r] scores, ordered by descending score and, among equal scores, by ascending index. The first
/// counts[r] = min(k, lens[r]) are selected. −0 and +0 are equal, and NaN counts as −inf: a NaN or −inf is selected only if
/// there are too few other scores. The result is the same on every backend, device and run.
///
/// args->k                  Budget of every row, at most cap; at least 1 where there are no budgets, unless cap is 0.
/// args->order              VWD_TOPK_ASCENDING: by index. VWD_TOPK_BEST_FIRST: in the order above.
/// args->scores   [R, n]    float32, float16 or bfloat16.
/// args->lens     [R]       int32, optional: scores of each row; absent: n. Clamped to 0 … n.
/// args->budgets  [R]       int32, optional: k of each row; clamped to 0 … cap.
/// args->ids      [R, cap]  int32, out. Columns from counts[r] on are not written, in values likewise.
/// args->counts   [R]       int32, out.
/// args->values   [R, cap]  dtype of scores, out, optional: the selected scores as they are stored, NaN included.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
/// once its scratch is there; may be captured. On CUDA a stream whose arena is too small, or that has none when it is captured, takes
/// long rows by a slower kernel without scratch. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until
/// the stream passes this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY (scratch of a CPU session), UNSUPPORTED (CUDA:
/// VWD_TOPK_BEST_FIRST of more than 4096), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_topk(
    session: *const vwd_session,
    args: *const vwd_topk_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_topk", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        topk::run(session, &topk::Request::from_c(session, args)?, stream)
    })
}
