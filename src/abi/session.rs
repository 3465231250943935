//! Versions and the session.

use super::Versioned;
use std::ffi::{c_char, c_void};
use std::mem::offset_of;

/// Number in the soname. It changes only when a compiled program would break.
pub const VWD_ABI_VERSION: u32 = 0;

/// CUDA where a driver and a device are present, else CPU.
pub const VWD_DEVICE_AUTO: u32 = 0;
/// The CPU backend, which is the reference; it computes on the session's own threads or on the caller's.
pub const VWD_DEVICE_CPU: u32 = 1;
/// One CUDA device.
pub const VWD_DEVICE_CUDA: u32 = 2;

/// The session's stream for selection; of high priority.
pub const VWD_STREAM_SELECT: u32 = 0;
/// The session's stream for speculative attention; of high priority.
pub const VWD_STREAM_SPECULATE: u32 = 1;
/// The session's stream for transfers from host memory; of low priority.
pub const VWD_STREAM_PREFETCH: u32 = 2;
/// The session's stream for transfers to host memory; of low priority.
pub const VWD_STREAM_WRITE_BACK: u32 = 3;

/// Runs task `index` of a CPU call's work, which `work` stands for. Never unwinds.
pub type vwd_task = Option<unsafe extern "C" fn(work: *mut c_void, index: u64)>;

/// Runs tasks on the caller's threads: calls task(work, 0) … task(work, tasks − 1), each once, in any order and on any
/// threads, and returns when all have returned. Several threads call it at once if they use the session at once; no task
/// calls it. Does not unwind.
pub type vwd_parallel_for =
    Option<unsafe extern "C" fn(parallel_context: *mut c_void, tasks: u64, task: vwd_task, work: *mut c_void)>;

/// What an engine should know: a session falls back to the CPU, or a driver refuses machine code and compiles PTX.
pub const VWD_LOG_WARNING: u32 = 1;
/// What a session does once: its creation, scratch arenas, the first use of each kernel variant.
pub const VWD_LOG_INFO: u32 = 2;
/// Also each kernel module that is loaded.
pub const VWD_LOG_DEBUG: u32 = 3;

/// The caller's log: takes one line without a line break, NUL-terminated UTF-8 that is valid during the call. `level` is one
/// of VWD_LOG_*. Called on the thread that calls the library, by several threads at once where the session is. Does not call
/// into the library and does not unwind.
pub type vwd_log = Option<unsafe extern "C" fn(log_context: *mut c_void, level: u32, text: *const c_char)>;

/// Each call reads the contents of its tensors before it runs, and fails where they break its contract.
pub const VWD_CHECK_CONTENTS: u32 = 1;
/// Calls check what the host can see of their arguments, and no contents.
pub const VWD_CHECK_NOTHING: u32 = 2;

/// Options of `vwd_session_create`; zero means the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_session_options {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// One of VWD_DEVICE_*.
    pub device: u32,
    /// CUDA ordinal.
    pub device_id: i32,
    /// CPU: number of the session's threads that share one call's work while the caller waits; 0 means every core that the
    /// calling thread may use, 1 means that the caller does the work; at most 1024. Must be 0 if parallel_for is given.
    pub threads: u32,
    /// CUDA: bytes of the scratch arena that a call creates for its stream; 0 means 16 MiB. See `vwd_session_reserve`.
    pub scratch_bytes: u64,
    /// Largest number of bytes that `vwd_pinned_alloc` may have handed out at once; 0 means no limit.
    pub pinned_limit: u64,
    /// CPU: shares one call's work among the caller's threads; the session then has no threads. May be NULL.
    pub parallel_for: vwd_parallel_for,
    /// First argument of parallel_for; valid until the session and all handles that were made with it are released.
    pub parallel_context: *mut c_void,
    /// Called with lines of what the session does. May be NULL: the library itself prints nothing.
    pub log: vwd_log,
    /// First argument of log; valid until the session and all handles that were made with it are released.
    pub log_context: *mut c_void,
    /// The most detailed level that is logged, one of VWD_LOG_*; 0 means what the environment variable VANWARD_LOG says
    /// (warning, info or debug), or else VWD_LOG_INFO.
    pub log_level: u32,
    /// CUDA: variants of kernels that run whatever is chosen otherwise, for tests and measurements: "family=variant", several
    /// separated by commas, as the tables of docs/ name them. A call that its variant cannot do fails with UNSUPPORTED. NULL
    /// means what the environment variable VANWARD_VARIANTS says. Read during `vwd_session_create`.
    pub variants: *const c_char,
    /// One of VWD_CHECK_*, for development; 0 means what the environment variable VANWARD_CHECK says (1 or 0), or else
    /// VWD_CHECK_NOTHING. With VWD_CHECK_CONTENTS a call fails with INVALID_ARGUMENT at the first length, page, id, count, budget,
    /// sequence number or scale that it would clamp, skip or ignore; the message has the argument, the indices, the value and
    /// what was expected. -1 stands for no page, slot, block to copy or sequence. On CUDA such a call waits for its stream, and
    /// cannot be captured. docs/abi.md says what is checked.
    pub check: u64,
    /// CUDA, for tests: most microseconds, up to 1000000, of a random delay. Wherever a call has work on a stream of the library's own
    /// begin while the caller's stream goes on (a decoder's strategies, the copies of a tiered cache), both wait, each for a
    /// time of its own, also in each replay of a captured graph. What is computed is the same; only time is lost. 0 means what the
    /// environment variable VANWARD_DELAY says, or else no delay. A CPU session has no such streams.
    pub delay_microseconds: u64,
    /// CUDA: not 0 for a batch-invariant session, in which every sequence has the same bits in every batch: attention and repair choose
    /// kernels, and split lists, as for so many sequences, at most 65536, whatever a call has; calls of about so many take the least time.
    /// docs/attention-repair.md says what bits still depend on. 0: as is fastest for each call. A CPU session is batch-invariant always.
    pub invariant_batch: u64,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_session_options {
    const KNOWN_SIZES: &'static [usize] = &[
        offset_of!(vwd_session_options, log),
        offset_of!(vwd_session_options, check),
        offset_of!(vwd_session_options, delay_microseconds),
        offset_of!(vwd_session_options, invariant_batch),
        size_of::<vwd_session_options>(),
    ];
}

/// The device of a session and the memory that it holds, filled by `vwd_session_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_session_details {
    pub struct_size: u32,
    /// VWD_DEVICE_CPU or VWD_DEVICE_CUDA.
    pub device: u32,
    pub device_id: i32,
    /// CPU: number of the session's threads that share one call's work, 0 if they are the caller's. CUDA: 0.
    pub threads: u32,
    /// The driver's version as cuDriverGetVersion gives it, 12040 for 12.4; 0 on a CPU session.
    pub driver_version: u32,
    /// The device's compute capability, 90 for 9.0; 0 on a CPU session.
    pub compute_capability: u32,
    /// Number of the device's multiprocessors; 0 on a CPU session.
    pub multiprocessors: u32,
    /// Number of kernels loaded at creation; 0 on a CPU session.
    pub kernels: u32,
    /// Microseconds that loading the kernels took, compilation by the driver included.
    pub load_microseconds: u64,
    /// Bytes of scratch that the session holds now, and the largest number of bytes that calls have used of it.
    pub scratch_bytes: u64,
    pub scratch_peak: u64,
    /// Bytes of pinned memory handed out now, the largest number ever handed out, and bytes that the pool keeps for reuse.
    pub pinned_in_use: u64,
    pub pinned_peak: u64,
    pub pinned_cached: u64,
    /// Name of the device, NUL-terminated.
    pub device_name: [c_char; 64],
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_session_details {}
