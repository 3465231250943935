//! Transfer of KV blocks from pinned host memory.

use super::boundary::{Versioned, boundary, handle, versioned};
use super::session::vwd_session;
use super::types::{vwd_status, vwd_stream, vwd_tensor};
use crate::ops::prefetch;
use std::mem::MaybeUninit;

/// The library picks the engine from the block size and count.
pub const VWD_GATHER_AUTO: u32 = 0;
/// A kernel with few thread blocks reads the mapped host memory; lists may be in device memory.
pub const VWD_GATHER_KERNEL: u32 = 1;
/// The copy engine; lists must be in host memory.
pub const VWD_GATHER_COPY_ENGINE: u32 = 2;

/// Arguments of `vwd_gather_blocks`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_gather_blocks_args {
    pub struct_size: u32,
    pub engine: u32,
    pub source: vwd_tensor,
    pub target: vwd_tensor,
    pub source_ids: vwd_tensor,
    pub target_ids: vwd_tensor,
    pub count: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_gather_blocks_args {}

/// Copies listed blocks: target[target_ids[j]] = source[source_ids[j]] for j below count.
///
/// A pair with an id outside its tensor (−1, say) is skipped. target_ids are distinct.
///
/// args->engine                One of VWD_GATHER_*. A CPU session copies with its threads, whatever the engine.
/// args->source      [N, …]    Any dtype. CPU session: CPU or pinned memory. CUDA session: pinned host memory (device_type
///                             3) or the session's device.
/// args->target      [M, …]    Out; dtype and trailing shape of source; on the session's device.
/// args->source_ids  [n]       int32.
/// args->target_ids  [n]       int32, optional (absent: 0 … n−1).
/// args->count       [1]       int32, optional (absent: n). Clamped to 0 … n.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point. target must not overlap source.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_gather_blocks(
    session: *const vwd_session,
    args: *const vwd_gather_blocks_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary(|| {
        let mut room = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut room)?) };
        prefetch::gather(session, &prefetch::GatherRequest::from_c(session, args)?, stream)
    })
}
