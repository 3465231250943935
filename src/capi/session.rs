//! Versions, the last error, and the session.

use super::boundary::{Handle, boundary, computing, handle, out, release, versioned, with_last_error, write_versioned};
use crate::abi::{VWD_ABI_VERSION, vwd_session_details, vwd_session_options, vwd_status, vwd_stream};
use crate::runtime::fork::Process;
use crate::runtime::{Options, Session};
use crate::{decode, kv, ops};
use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::Arc;

/// A session: the device that calls run on, its scratch memory and its threads or streams. Opaque.
pub struct vwd_session(pub(crate) Arc<Session>, Process);

impl Handle for vwd_session {
    #[inline]
    fn maker(&self) -> Process {
        self.1
    }
}

impl Deref for vwd_session {
    type Target = Session;
    fn deref(&self) -> &Session {
        &self.0
    }
}

/// Version of the library, "0.1.0". Static, never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn vwd_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Version of the ABI that the library implements; compare with VWD_ABI_VERSION of the header.
#[unsafe(no_mangle)]
pub extern "C" fn vwd_abi_version() -> u32 {
    VWD_ABI_VERSION
}

/// Copies the message of this thread's last failed call, NUL-terminated and truncated to cap bytes at the end of a character.
/// It reads "call: argument: what was found; what was expected".
///
/// buf  May be NULL when cap is 0.
/// Returns the length of the whole message without the NUL; 0 when no call has failed. A call that succeeds leaves the
/// message as it was. Destructors that run when the thread's own data are gone, such as those of a process's static objects, may call
/// the library, too: their failures have a status and no message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_last_error(buf: *mut c_char, cap: usize) -> usize {
    with_last_error(|text| {
        if !buf.is_null() && cap > 0 {
            let length = text.floor_char_boundary(cap - 1);
            // SAFETY: length < cap bytes fit in buf, and the NUL after them.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buf, length);
                buf.add(length).write(0);
            }
        }
        text.len()
    })
}

/// Creates a session.
///
/// options  NULL means all defaults: device AUTO.
/// session  Out. Release with `vwd_session_release`.
///
/// Threads of a CPU session run where the calling thread may, and where options.threads is 0 there are as many as it may use cores.
///
/// Blocks and allocates: starts the threads, or loads the kernels; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT, UNAVAILABLE (CUDA without driver or device; the message says why), OUT_OF_MEMORY, DRIVER
/// (the message holds the JIT log), INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_session_create(
    options: *const vwd_session_options,
    session: *mut *mut vwd_session,
) -> vwd_status {
    computing("vwd_session_create", || {
        // SAFETY: the C contract of session.
        let session = unsafe { out(session, "session")? };
        let mut buffer = MaybeUninit::uninit();
        let options = if options.is_null() {
            Options::default()
        } else {
            // SAFETY: the C contract of options and of what they point to.
            unsafe { Options::from_c(versioned(options, "options", &mut buffer)?)? }
        };
        let maker = Process::this()?;
        let created = Arc::new(Session::create(&options, &[ops::FAMILIES, kv::FAMILIES, decode::FAMILIES].concat())?);
        session.write(Box::into_raw(Box::new(vwd_session(created, maker))));
        Ok(())
    })
}

/// Releases a session, with the streams and pinned memory that it handed out; NULL is a no-op. Its calls have returned,
/// streams have passed them, and nothing uses the session afterwards except the handles that were made with it (forecasts,
/// caches, decoders, compactors), which keep the parts of it that they need: threads, streams, and parallel_for and log of the
/// options with their contexts, which stay valid until the last handle is released. Blocks until its threads have ended, if no handle
/// keeps them; not for capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_session_release(session: *mut vwd_session) {
    // SAFETY: the C contract of session.
    unsafe { release(session) }
}

/// Tells which device the session runs on and how much memory it holds.
///
/// details  Out; its struct_size is set by the caller.
///
/// Does not block on the device. Thread-safe. Errors: INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_session_info(
    session: *const vwd_session,
    details: *mut vwd_session_details,
) -> vwd_status {
    boundary("vwd_session_info", || {
        // SAFETY: the C contract of the arguments.
        unsafe { write_versioned(details, &handle(session, "session")?.details(), "details") }
    })
}

/// Gives a stream a scratch arena of at least `bytes`, so that calls on it need not allocate.
///
/// A stream without an arena gets one on its first call that needs scratch, unless it is capturing a graph. The arena has
/// options.scratch_bytes, or the bytes that the call needs if those are more. This call creates the arena earlier, or
/// replaces a smaller arena, whose memory stays until the stream is forgotten, so that graphs captured with it remain
/// valid. A function with _scratch in its name, such as `vwd_attention_scratch`, tells how many bytes a call needs. On a CPU
/// session this is a no-op.
///
/// Graphs captured on one stream, and calls on it, use one arena: they must run one after the other, wherever they are
/// launched.
///
/// stream  The stream that calls are given, not capturing; the handle of the per-thread default stream means the stream of
///         the calling thread.
/// bytes   0 means options.scratch_bytes.
///
/// Blocks until the stream has passed what was enqueued before; allocates. Thread-safe.
/// Errors: INVALID_ARGUMENT, OUT_OF_MEMORY, DRIVER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_session_reserve(
    session: *const vwd_session,
    stream: vwd_stream,
    bytes: u64,
) -> vwd_status {
    boundary("vwd_session_reserve", || {
        // SAFETY: the C contract of session.
        unsafe { handle(session, "session")? }.reserve(stream, bytes)
    })
}

/// Takes a stream's scratch arenas back: the next stream that needs an arena gets them.
///
/// The stream has passed its last call on this session, and graphs captured on it are not launched again. A stream that the
/// session has not seen is not an error, and a forgotten stream may be used again. Call this before a stream is destroyed,
/// because a new stream may get the same handle. On a CPU session this is a no-op.
///
/// stream  The stream, as in `vwd_session_reserve`.
///
/// Does not block. Thread-safe. Errors: INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_session_forget_stream(session: *const vwd_session, stream: vwd_stream) -> vwd_status {
    boundary("vwd_session_forget_stream", || {
        // SAFETY: the C contract of session.
        unsafe { handle(session, "session")? }.forget_stream(stream)
    })
}

/// Gives one of the session's own non-blocking streams, for work that runs at the same time as the caller's. It is destroyed
/// with the session.
///
/// role    One of VWD_STREAM_*.
/// stream  Out; NULL on a CPU session.
///
/// Does not block. Thread-safe. Errors: INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_session_stream(
    session: *const vwd_session,
    role: u32,
    stream: *mut vwd_stream,
) -> vwd_status {
    boundary("vwd_session_stream", || {
        // SAFETY: the C contract of the arguments.
        let (session, stream) = unsafe { (handle(session, "session")?, out(stream, "stream")?) };
        stream.write(session.stream(role)?);
        Ok(())
    })
}

/// Takes host memory from the session's pool: pinned and mapped for every device on a CUDA session, pageable on a CPU
/// session; aligned to 4096 bytes, contents undefined.
///
/// bytes    At least 1.
/// pointer  Out. Give back with `vwd_pinned_free`; released with the session at the latest.
///
/// Allocates when the pool has no piece that fits; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT, OUT_OF_MEMORY (pinned_limit or the system's limit; memory that is handed out stays valid), DRIVER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_pinned_alloc(
    session: *const vwd_session,
    bytes: u64,
    pointer: *mut *mut c_void,
) -> vwd_status {
    boundary("vwd_pinned_alloc", || {
        // SAFETY: the C contract of the arguments.
        let (session, pointer) = unsafe { (handle(session, "session")?, out(pointer, "pointer")?) };
        pointer.write(session.pinned_alloc(bytes)?);
        Ok(())
    })
}

/// Gives memory back to the pool; NULL is a no-op. The pool hands it out again once `stream` has passed this point.
///
/// pointer  From `vwd_pinned_alloc` of this session, not yet given back.
/// stream   The stream that used it last; CPU sessions take NULL.
///
/// Does not block; not for capture. Thread-safe. Errors: INVALID_ARGUMENT, DRIVER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_pinned_free(
    session: *const vwd_session,
    pointer: *mut c_void,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_pinned_free", || {
        // SAFETY: the C contract of session.
        unsafe { handle(session, "session")? }.pinned_free(pointer, stream)
    })
}
