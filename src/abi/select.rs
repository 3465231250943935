//! Selection of KV blocks, and of tokens inside them.

use super::{Versioned, vwd_block_list, vwd_index, vwd_tensor};
use std::mem::offset_of;

/// Upper bound of q·k over the block, from MINMAX (Quest: Tang et al. 2024, section 3).
pub const VWD_SELECT_MINMAX: u32 = 1;
/// Softmax mass of mean keys, from MEAN (InfLLM-v2: Zhao et al. 2025).
pub const VWD_SELECT_MEAN_SOFTMAX: u32 = 2;
/// Dot product of a Forecast vector and mean keys, from MEAN (SparDA: Fu et al. 2026).
pub const VWD_SELECT_MEAN_DOT: u32 = 3;
/// Softmax mass of each candidate block by its INT4 labels, from LABEL.
pub const VWD_SELECT_LABEL_MASS: u32 = 4;
/// Softmax mass of the block's mean key and axis, from AXIS.
pub const VWD_SELECT_AXIS: u32 = 5;

/// Bit of a list's status: a query of the list holds a NaN, or the product of a query and a summary is NaN. The blocks or
/// tokens concerned rank last.
pub const VWD_SELECT_NAN: u32 = 1;
/// Bit of a list's status: a block, complete window or candidate token that the list's queries see has no summary in the index.
pub const VWD_SELECT_NO_SUMMARY: u32 = 2;
/// Bit of a list's status: a length, number of rows, budget or count of candidates was out of range, or scores had fewer
/// columns than there are blocks.
pub const VWD_SELECT_CLAMPED: u32 = 4;

/// Arguments of `vwd_select_blocks`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_select_blocks_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub method: u32,
    pub block_size: u32,
    pub k: u32,
    pub init_blocks: u32,
    pub local_blocks: u32,
    pub scale: f32,
    pub index: *const vwd_index,
    pub q: vwd_tensor,
    pub q_lens: vwd_tensor,
    pub seq_lens: vwd_tensor,
    pub budgets: vwd_tensor,
    pub candidates: vwd_block_list,
    pub selected: vwd_block_list,
    pub scores: vwd_tensor,
    pub status: vwd_tensor,
    pub log_mass: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_select_blocks_args {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_select_blocks_args, log_mass), size_of::<Self>()];
}

/// Arguments of `vwd_select_tokens`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_select_tokens_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub block_size: u32,
    pub k: u32,
    pub init_tokens: u32,
    pub local_tokens: u32,
    pub scale: f32,
    pub index: *const vwd_index,
    pub q: vwd_tensor,
    pub q_lens: vwd_tensor,
    pub seq_lens: vwd_tensor,
    pub budgets: vwd_tensor,
    pub candidates: vwd_block_list,
    pub selected: vwd_block_list,
    pub scores: vwd_tensor,
    pub status: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_select_tokens_args {}
