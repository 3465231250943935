//! Plain data that several families of calls share.

use crate::core::status::{Error, Result};
use std::ffi::{CStr, c_char, c_void};

/// Result of a call: VWD_OK, or why it did nothing. `vwd_last_error` has the words.
pub type vwd_status = i32;

/// Done (CPU session) or enqueued (CUDA session).
pub const VWD_OK: vwd_status = 0;
/// An argument breaks the contract; the message names it, what was found and what was expected.
pub const VWD_ERROR_INVALID_ARGUMENT: vwd_status = 1;
/// No driver, or no such device.
pub const VWD_ERROR_UNAVAILABLE: vwd_status = 2;
/// Valid, but this build or backend cannot do it.
pub const VWD_ERROR_UNSUPPORTED: vwd_status = 3;
/// Host or device memory could not be had.
pub const VWD_ERROR_OUT_OF_MEMORY: vwd_status = 4;
/// The stream's scratch arena is too small; the message says how much is needed. See `vwd_session_reserve`.
pub const VWD_ERROR_OUT_OF_SCRATCH: vwd_status = 5;
/// The CUDA driver refused; the message carries its words.
pub const VWD_ERROR_DRIVER: vwd_status = 6;
/// A file could not be read or written, or holds something else.
pub const VWD_ERROR_IO: vwd_status = 7;
/// A defect of this library.
pub const VWD_ERROR_INTERNAL: vwd_status = 8;

/// A `CUstream` (or `cudaStream_t`), or NULL for the default stream. CPU sessions take NULL.
pub type vwd_stream = *mut c_void;

/// A strided view of the caller's memory, in DLPack's codes (`vanward_dlpack.h` converts).
///
/// data         Address of element [0, …, 0]; NULL marks an optional tensor as absent. Aligned to the element size.
/// device_type  1 CPU, 2 CUDA, 3 pinned host memory (accepted wherever CPU is).
/// device_id    CUDA ordinal; ignored for CPU.
/// dtype_code   0 int, 1 uint, 2 float, 4 bfloat, 6 bool.
/// dtype_bits   Bits of one element.
/// lanes        0 or 1.
/// ndim         0 … 5.
/// shape        Extents; entries past ndim are ignored.
/// strides      In elements, any sign; they carry the layout (NHD, HND, paged, contiguous).
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

// SAFETY: an address and numbers; whoever follows the address vouches for it.
unsafe impl Send for vwd_tensor {}
// SAFETY: as above.
unsafe impl Sync for vwd_tensor {}

/// Paged keys and values of one layer.
///
/// k, v        [pages, P, Hk, D]  float32, float16 or bfloat16; the same dtype and shape; D a multiple of 8, 16 … 256.
/// page_table  [B, max_pages]     int32, optional. Page p of sequence i is page_table[i, p]. Absent: sequence i is page i
///                                alone, so that k is [B, T, Hk, D]. A page outside 0 … pages−1 holds no tokens.
/// seq_lens    [B]                int32. Tokens of each sequence; clamped to 0 … what its pages can hold.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_paged_kv {
    pub k: vwd_tensor,
    pub v: vwd_tensor,
    pub page_table: vwd_tensor,
    pub seq_lens: vwd_tensor,
}

/// A list of blocks (of tokens, where block_size is 1) per sequence and KV head.
///
/// ids     [B, Hk, cap]  int32, ascending. As input: ids past the sequence and repeated ids are skipped.
/// counts  [B, Hk]       int32; clamped to 0 … cap. Entries of ids at or past the count are neither read nor written.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_block_list {
    pub ids: vwd_tensor,
    pub counts: vwd_tensor,
}

/// Attention state per query head: out = acc / l, lse = m + ln l. Natural logarithms, s = scale·q·k.
/// Nothing attended: acc = 0, m = −inf, l = 0.
///
/// acc  [B, Hq, D]  float32. Σ e^(s−m) v
/// m    [B, Hq]     float32. max s
/// l    [B, Hq]     float32. Σ e^(s−m)
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_attention_state {
    pub acc: vwd_tensor,
    pub m: vwd_tensor,
    pub l: vwd_tensor,
}

/// Attention state per entry of a block list (per group of `partial_blocks` consecutive entries).
///
/// acc  [B, Hq, ⌈cap / partial_blocks⌉, D]  float32
/// m    [B, Hq, ⌈cap / partial_blocks⌉]     float32
/// l    [B, Hq, ⌈cap / partial_blocks⌉]     float32
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_attention_partials {
    pub acc: vwd_tensor,
    pub m: vwd_tensor,
    pub l: vwd_tensor,
}

/// Per block, KV head and channel: largest and smallest key (Quest: Tang et al. 2024, section 3).
pub const VWD_INDEX_MINMAX: u32 = 1;
/// Mean key of each window of `window` tokens every `stride` tokens (InfLLM-v2). A window exists once it is full.
pub const VWD_INDEX_MEAN: u32 = 2;
/// Per token and KV head: r chosen channels of the key in INT4 (Double Sparsity: Yang et al. 2024).
pub const VWD_INDEX_LABEL: u32 = 3;

/// Summaries of the keys of one layer, in the caller's memory. Fields that `kind` does not name stay zero.
///
/// Every tensor is [pages, rows, Hk, …]: summary j of sequence i is row j % rows of page table[i, j / rows], or of page i
/// where `table` is absent. A summary is a block (MINMAX), a window (MEAN) or a token (LABEL). A page outside the tensor,
/// and a row past the table, hold no summary.
///
/// kind         One of VWD_INDEX_*.
/// block_size   MINMAX: tokens of a block, S.
/// window       MEAN: tokens of a window; 0 means 32.
/// stride       MEAN: tokens from one window to the next; 0 means 16.
/// table        [B, max_index_pages]     int32, optional.
/// key_max      [pages, rows, Hk, D]     MINMAX; the keys' dtype.
/// key_min      [pages, rows, Hk, D]     MINMAX; the keys' dtype.
/// means        [pages, rows, Hk, D]     MEAN; float32, float16 or bfloat16.
/// labels       [pages, rows, Hk, r/2]   LABEL; uint8. Channel 2i in the low four bits, 2i+1 in the high ones.
/// label_scale  [pages, rows, Hk]        LABEL; float16. Key ≈ label_min + label_scale · code.
/// label_min    [pages, rows, Hk]        LABEL; float16.
/// channels     [Hk, r]                  LABEL; int32, from `vwd_channel_importance`. r even, 2 … D.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_index {
    pub kind: u32,
    pub block_size: u32,
    pub window: u32,
    pub stride: u32,
    pub table: vwd_tensor,
    pub key_max: vwd_tensor,
    pub key_min: vwd_tensor,
    pub means: vwd_tensor,
    pub labels: vwd_tensor,
    pub label_scale: vwd_tensor,
    pub label_min: vwd_tensor,
    pub channels: vwd_tensor,
}

/// A NUL-terminated UTF-8 string.
///
/// # Safety
/// `text` is NULL or NUL-terminated and outlives the result.
pub(super) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::argument(name, "NULL", "a NUL-terminated string"));
    }
    // SAFETY: not NULL, NUL-terminated by the contract.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| Error::argument(name, "bytes that are not UTF-8", "UTF-8 text"))
}
