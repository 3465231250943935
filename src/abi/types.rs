//! Types that every family of calls shares.

use std::ffi::c_void;

/// Result of a call: VWD_OK, or the reason why it did nothing. `vwd_last_error` gives the message.
pub type vwd_status = i32;

/// The call is done (CPU session) or enqueued (CUDA session).
pub const VWD_OK: vwd_status = 0;
/// An argument breaks the contract; the message names it, what was found and what was expected.
pub const VWD_ERROR_INVALID_ARGUMENT: vwd_status = 1;
/// There is no driver, or no such device.
pub const VWD_ERROR_UNAVAILABLE: vwd_status = 2;
/// The arguments are valid, but this build or backend cannot do what they ask for.
pub const VWD_ERROR_UNSUPPORTED: vwd_status = 3;
/// Host or device memory could not be allocated.
pub const VWD_ERROR_OUT_OF_MEMORY: vwd_status = 4;
/// The stream's scratch arena is too small; the message says how much is needed. See `vwd_session_reserve`.
pub const VWD_ERROR_OUT_OF_SCRATCH: vwd_status = 5;
/// The CUDA driver returned an error; the message quotes it.
pub const VWD_ERROR_DRIVER: vwd_status = 6;
/// A file could not be read or written, or is not of the expected format.
pub const VWD_ERROR_IO: vwd_status = 7;
/// The library has a defect.
pub const VWD_ERROR_INTERNAL: vwd_status = 8;

/// A `CUstream` (or `cudaStream_t`), or NULL for the default stream. CPU sessions take NULL.
pub type vwd_stream = *mut c_void;

/// A strided view of the caller's memory, in DLPack's codes (`vanward_dlpack.h` converts). The struct is final: it does not
/// grow.
///
/// data         Address of element [0, …, 0], aligned to the element size. NULL marks an optional tensor as absent; a required
///              tensor may have NULL if it has no elements.
/// device_type  1 CPU, 2 CUDA, 3 pinned host memory (accepted wherever CPU is).
/// device_id    CUDA ordinal; ignored for CPU.
/// dtype_code   0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 float8_e4m3fn, 12 float8_e5m2.
/// dtype_bits   Bits of one element, whole bytes.
/// lanes        0 or 1.
/// ndim         0 … 5.
/// shape        Extents; entries past ndim are ignored.
/// strides      In elements, of any sign; 0 is allowed in inputs. They express the layout (NHD, HND, paged, contiguous).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_tensor {
    pub data: *mut c_void,
    pub device_type: i32,
    pub device_id: i32,
    pub dtype_code: u8,
    pub dtype_bits: u8,
    pub lanes: u16,
    pub ndim: i32,
    pub shape: [i64; 5],
    pub strides: [i64; 5],
}

// SAFETY: an address and numbers; code that dereferences the address vouches for it.
unsafe impl Send for vwd_tensor {}
// SAFETY: as above.
unsafe impl Sync for vwd_tensor {}

/// A list of blocks (of tokens, if block_size is 1) per sequence and KV head. The struct is final: it does not grow.
///
/// With query positions (q of rank 4) the positions of a sequence share a list, or each position has its own list.
///
/// ids     [B, Hk, cap] or [B, Q, Hk, cap]  int32, ascending. In an input, negative ids, ids past the sequence and repeated ids are
///                                          skipped.
/// counts  [B, Hk] or [B, Q, Hk]            int32; clamped to 0 … cap. Entries of ids at or past the count are neither read
///                                          nor written.
/// slots   [B, Hk, cap] or [B, Q, Hk, cap]  int32, optional, and only in inputs of `vwd_attention` and `vwd_repair`: the page
///                                          in which each entry lies, in place of the page table. k and v are then a pool
///                                          [slots, P, 1, D] whose pages hold P consecutive tokens of one KV head; S divides
///                                          P, and an entry's tokens start at row id·S mod P. An entry whose slot is −1 or
///                                          any other number outside the pool adds nothing. With `vwd_int4_kv` slots go on with its
///                                          pages after those of the pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_block_list {
    pub ids: vwd_tensor,
    pub counts: vwd_tensor,
    pub slots: vwd_tensor,
}
