//! Versions and the session.

use super::Versioned;
use std::ffi::{c_char, c_void};

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
    /// process may use, 1 means that the caller does the work; at most 1024. Must be 0 if parallel_for is given.
    pub threads: u32,
    /// CUDA: bytes of the scratch arena that a call creates for its stream; 0 means 16 MiB. See `vwd_session_reserve`.
    pub scratch_bytes: u64,
    /// Largest number of bytes that `vwd_pinned_alloc` may have handed out at once; 0 means no limit.
    pub pinned_limit: u64,
    /// CPU: shares one call's work among the caller's threads; the session then has no threads. May be NULL.
    pub parallel_for: vwd_parallel_for,
    /// First argument of parallel_for; valid until the session is released.
    pub parallel_context: *mut c_void,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_session_options {}

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
