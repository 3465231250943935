//! Transfer of KV blocks from pinned host memory.

use super::{Versioned, vwd_tensor};

/// The library picks the kernel or the copy engine by the size and number of blocks; for lists in device memory it picks the
/// kernel.
pub const VWD_GATHER_AUTO: u32 = 0;
/// A kernel with few thread blocks reads the mapped host memory.
pub const VWD_GATHER_KERNEL: u32 = 1;
/// The copy engine; lists must be in host memory.
pub const VWD_GATHER_COPY_ENGINE: u32 = 2;

/// Arguments of `vwd_gather_blocks`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_gather_blocks_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub engine: u32,
    pub source: vwd_tensor,
    pub target: vwd_tensor,
    pub source_ids: vwd_tensor,
    pub target_ids: vwd_tensor,
    pub count: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_gather_blocks_args {}
