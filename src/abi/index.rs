//! Summaries of keys, from which blocks and tokens are selected.

use super::{Versioned, vwd_tensor};
use std::mem::offset_of;

/// Per block, KV head and channel: largest and smallest key (Quest: Tang et al. 2024, section 3).
pub const VWD_INDEX_MINMAX: u32 = 1;
/// Mean key of each window of `window` tokens, one window every `stride` tokens (InfLLM-v2: Zhao et al. 2025). A window
/// exists once it is full.
pub const VWD_INDEX_MEAN: u32 = 2;
/// Per token and KV head: the label, r chosen channels of the key in INT4 (Double Sparsity: Yang et al. 2024).
pub const VWD_INDEX_LABEL: u32 = 3;
/// Per block and KV head: the mean key, and one axis along which the keys spread, scaled to their spread.
pub const VWD_INDEX_AXIS: u32 = 4;

/// Summaries of the keys of one layer, in the caller's memory. Fields that `kind` does not name stay zero.
///
/// Every tensor is [pages, rows, Hk, …]: summary j of sequence i is row j % rows of page table[i, j / rows], or of page i
/// where `table` is absent. A summary is a block (MINMAX, AXIS), a window (MEAN) or a token (LABEL). A page outside the
/// tensor, and a row past the table, hold no summary.
///
/// flags        Must be 0.
/// kind         One of VWD_INDEX_*.
/// block_size   MINMAX, AXIS: tokens of a block, S.
/// window       MEAN: tokens of a window; 0 means 32.
/// stride       MEAN: tokens from one window to the next; 0 means 16.
/// table        [B, max_index_pages]     int32, optional.
/// key_max      [pages, rows, Hk, D]     MINMAX; the keys' dtype (for FP8 keys: float32, float16 or bfloat16).
/// key_min      [pages, rows, Hk, D]     MINMAX; dtype of key_max.
/// means        [pages, rows, Hk, D]     MEAN; float32, float16 or bfloat16.
/// labels       [pages, rows, Hk, r/2]   LABEL; uint8. Channel 2i in the low four bits, 2i+1 in the high ones.
/// label_scale  [pages, rows, Hk]        LABEL; float16. Key ≈ label_min + label_scale · code.
/// label_min    [pages, rows, Hk]        LABEL; float16.
/// channels     [Hk, r]                  LABEL; int32, from `vwd_channel_importance`. r even, 2 … D.
/// axes         [pages, rows, Hk, 2·D]   AXIS; float32, float16 or bfloat16: the mean key less axis_centre, then the axis.
///           or [pages, rows, Hk, D]     AXIS; uint8: the same in INT4, value 2i in the low four bits, 2i+1 in the high ones.
/// axis_range   [pages, rows, Hk, 4·⌈D/32⌉]  AXIS in INT4 only; float16: scale and minimum of each group of 32 channels (the
///                                       last group may have fewer): first the pairs of all groups of the mean, then those of
///                                       all groups of the axis.
/// axis_weights [Hk, D]                  AXIS; float32, optional: the weight of each channel, see `vwd_channel_importance`.
///                                       Only `vwd_index_update` reads it. Absent: 1.
/// axis_centre  [Hk, D]                  AXIS; float32, optional: any constant near the mean key. `vwd_index_update` reads it, and
///                                       `vwd_select_blocks` for log_mass alone. Absent: 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_index {
    pub struct_size: u32,
    pub flags: u32,
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
    pub axes: vwd_tensor,
    pub axis_range: vwd_tensor,
    pub axis_weights: vwd_tensor,
    pub axis_centre: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_index {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_index, axes), size_of::<vwd_index>()];
}

/// Arguments of `vwd_index_update`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_index_update_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub index: *const vwd_index,
    pub k: vwd_tensor,
    pub k_scale: vwd_tensor,
    pub page_table: vwd_tensor,
    pub seq_lens: vwd_tensor,
    pub begin: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_index_update_args {}

/// Arguments of `vwd_channel_importance`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_channel_importance_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub q: vwd_tensor,
    pub k: vwd_tensor,
    pub channels: vwd_tensor,
    pub importance: vwd_tensor,
    pub weights: vwd_tensor,
    pub centre: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_channel_importance_args {
    const KNOWN_SIZES: &'static [usize] =
        &[offset_of!(vwd_channel_importance_args, weights), size_of::<vwd_channel_importance_args>()];
}
