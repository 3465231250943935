//! Coding of keys and values in INT4.

use super::{Versioned, vwd_paged_kv, vwd_tensor};

/// Arguments of `vwd_kv_quantize`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_quantize_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layer_count: u32,
    pub layers: *const *const vwd_paged_kv,
    pub begin: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_quantize_args {}

/// Arguments of `vwd_kv_weights`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_weights_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub block_size: u32,
    pub q: vwd_tensor,
    pub k: vwd_tensor,
    pub weights: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_weights_args {}
