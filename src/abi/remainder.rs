//! What a selection leaves out, as one more term of attention.

use super::{Versioned, vwd_paged_kv, vwd_tensor};

/// Means and covariance of the keys and values of one layer, in the caller's memory: N rows of each tensor, one for each sequence, kept by
/// `vwd_remainder_update` and read by `vwd_attention`. All are over the tokens of whole blocks without the first block. A sequence is
/// copied, as for a fork, by copying its row of tokens, mean_k, mean_v and covariance.
///
/// flags       Must be 0.
/// rows        [B]               int32, optional: sequence i has row rows[i]. Absent: row i. Outside 0 … N−1: it has none.
/// tokens      [N, Hk]           int32: how many tokens the row is of. 0: none, whatever the other tensors hold. Zero it for a new sequence.
/// mean_k      [N, Hk, D]        float32.
/// mean_v      [N, Hk, Dv]       float32.
/// covariance  [N, Hk, D, Dv]    float32: the mean of (k − mean_k)·(v − mean_v)ᵀ.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_remainder {
    pub struct_size: u32,
    pub flags: u32,
    pub rows: vwd_tensor,
    pub tokens: vwd_tensor,
    pub mean_k: vwd_tensor,
    pub mean_v: vwd_tensor,
    pub covariance: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_remainder {}

/// Arguments of `vwd_remainder_update`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_remainder_update_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub block_size: u32,
    pub kv: *const vwd_paged_kv,
    pub begin: vwd_tensor,
    pub remainder: *const vwd_remainder,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_remainder_update_args {}
