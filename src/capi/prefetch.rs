//! Transfer of KV blocks from pinned host memory.

use super::boundary::{boundary, handle, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_gather_blocks_args, vwd_status, vwd_stream};
use crate::ops::prefetch;
use std::mem::MaybeUninit;

/// Copies listed blocks: target[target_ids[j]] = source[source_ids[j]] for j below count; with lists per KV head
/// target[target_ids[i, g, j]] = source[source_ids[i, g, j], g] for j below count[i, g].
///
/// An entry with an id outside its tensor (such as −1) is skipped. target_ids are distinct.
///
/// args->engine      One of VWD_GATHER_*. A CPU session copies with its threads, whatever the value.
/// args->source      [N, …] or, with lists per KV head, [N, Hk, …]. Any dtype. CPU session: CPU or pinned memory. CUDA
///                   session: pinned host memory (device_type 3) or the session's device.
/// args->target      [M, …]  Out; dtype of source and the shape of its blocks; on the session's device.
/// args->source_ids  [n] or [B, Hk, cap]  int32.
/// args->target_ids  Shape of source_ids; int32, optional (absent: 0 … n−1, counted over all lists in order).
/// args->count       [1] or [B, Hk]  int32, optional (absent: n, or cap). Clamped to 0 … n.
///
/// CUDA session: all lists lie on its device, and are read when the stream reaches the copy, or all lie in host memory
/// (device_type 1 or 3), and are read during the call; a captured call keeps the entries that they held then.
/// VWD_GATHER_COPY_ENGINE takes lists in host memory only.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point. target must not overlap source.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^30 pieces of 4 KiB or more), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_gather_blocks(
    session: *const vwd_session,
    args: *const vwd_gather_blocks_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_gather_blocks", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        prefetch::gather(session, &prefetch::GatherRequest::from_c(session, args)?, stream)
    })
}
