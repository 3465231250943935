//! Verification of draft tokens and packing of accepted rows.

use super::{Versioned, vwd_tensor};
use std::mem::offset_of;

/// The request goes on.
pub const VWD_FINISH_NONE: u8 = 0;
/// The last committed token is a stop token.
pub const VWD_FINISH_STOP: u8 = 1;
/// As many tokens were committed as remained.
pub const VWD_FINISH_LENGTH: u8 = 2;

/// Arguments of `vwd_verify`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_verify_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub draft: vwd_tensor,
    pub target: vwd_tensor,
    pub draft_lens: vwd_tensor,
    pub accepted: vwd_tensor,
    pub next_token: vwd_tensor,
    pub mismatch: vwd_tensor,
    pub committed: vwd_tensor,
    pub stop: vwd_tensor,
    pub ignore_stop: vwd_tensor,
    pub remaining: vwd_tensor,
    pub min_remaining: vwd_tensor,
    pub committed_len: vwd_tensor,
    pub finish: vwd_tensor,
    pub draft_ends: vwd_tensor,
    pub bonus: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_verify_args {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_verify_args, stop), size_of::<Self>()];
}

/// Arguments of `vwd_pack`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_pack_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Length of the arrays rows and packed.
    pub tensor_count: u32,
    pub rows: *const vwd_tensor,
    pub packed: *const vwd_tensor,
    pub accepted: vwd_tensor,
    pub offsets: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_pack_args {}

/// Arguments of `vwd_verify_pack`: the arguments of `vwd_verify` and of `vwd_pack`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_verify_pack_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Length of the arrays rows and packed.
    pub tensor_count: u32,
    pub rows: *const vwd_tensor,
    pub packed: *const vwd_tensor,
    pub draft: vwd_tensor,
    pub target: vwd_tensor,
    pub draft_lens: vwd_tensor,
    pub accepted: vwd_tensor,
    pub next_token: vwd_tensor,
    pub offsets: vwd_tensor,
    pub mismatch: vwd_tensor,
    pub committed: vwd_tensor,
    pub stop: vwd_tensor,
    pub ignore_stop: vwd_tensor,
    pub remaining: vwd_tensor,
    pub min_remaining: vwd_tensor,
    pub committed_len: vwd_tensor,
    pub finish: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_verify_pack_args {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_verify_pack_args, stop), size_of::<Self>()];
}
