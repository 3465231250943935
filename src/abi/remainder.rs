//! What a selection leaves out, as one more term of attention.

use super::{Versioned, vwd_paged_kv, vwd_remainder, vwd_tensor};

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
