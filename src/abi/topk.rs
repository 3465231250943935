//! The top k of rows of scores.

use super::{Versioned, vwd_tensor};

/// The selected ids ascend.
pub const VWD_TOPK_ASCENDING: u32 = 0;
/// The best score comes first.
pub const VWD_TOPK_BEST_FIRST: u32 = 1;

/// Arguments of `vwd_topk`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_topk_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub k: u32,
    pub order: u32,
    pub scores: vwd_tensor,
    pub lens: vwd_tensor,
    pub budgets: vwd_tensor,
    pub ids: vwd_tensor,
    pub counts: vwd_tensor,
    pub values: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_topk_args {}
