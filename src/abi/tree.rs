//! Draft trees: their form, their verification, and the compaction of the rows that were accepted.

use super::{Versioned, vwd_tensor};
use std::mem::offset_of;

/// Bit of a tree's status: a link named no node that it may name, a node was linked twice, or no link reached a node. That
/// node and its descendants are ignored.
pub const VWD_TREE_BROKEN_LINK: u32 = 1 << 16;
/// Bit of a tree's status: a node count exceeded N and was clamped.
pub const VWD_TREE_CLAMPED: u32 = 1 << 17;
/// Bit of a tree's status: the walk came to a node without a logit above −∞, but for those of forbidden tokens. It ends there, and next_token
/// is −1.
pub const VWD_TREE_NO_TOKEN: u32 = 1 << 18;

/// The walk follows the target's most likely tokens.
pub const VWD_WALK_GREEDY: u32 = 0;
/// The walk follows the tokens that plain sampling draws.
pub const VWD_WALK_COUPLED: u32 = 1;
/// Rejection sampling of siblings that were drawn independently (Miao et al. 2024).
pub const VWD_WALK_INDEPENDENT: u32 = 2;
/// Rejection sampling of siblings that were drawn without replacement (Jeon et al. 2024).
pub const VWD_WALK_DISTINCT: u32 = 3;

/// Arguments of `vwd_tree_prepare`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_tree_prepare_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub parents: vwd_tensor,
    pub first_child: vwd_tensor,
    pub next_sibling: vwd_tensor,
    pub node_counts: vwd_tensor,
    pub bases: vwd_tensor,
    pub tree_parents: vwd_tensor,
    pub depths: vwd_tensor,
    pub positions: vwd_tensor,
    pub ranks: vwd_tensor,
    pub mask: vwd_tensor,
    pub status: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_tree_prepare_args {}

/// Arguments of `vwd_verify_tree`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_verify_tree_args {
    pub struct_size: u32,
    /// Bits VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_DRAFT_PROBABILITIES, VWD_SAMPLE_TEMPERATURE_LAST; 0 for VWD_WALK_GREEDY.
    pub flags: u32,
    pub tokens: vwd_tensor,
    pub parents: vwd_tensor,
    pub node_counts: vwd_tensor,
    pub target: vwd_tensor,
    pub logits: vwd_tensor,
    pub accepted: vwd_tensor,
    pub path: vwd_tensor,
    pub next_token: vwd_tensor,
    pub committed: vwd_tensor,
    pub status: vwd_tensor,
    pub stop: vwd_tensor,
    pub ignore_stop: vwd_tensor,
    pub remaining: vwd_tensor,
    pub min_remaining: vwd_tensor,
    pub committed_len: vwd_tensor,
    pub finish: vwd_tensor,
    pub walk: u32,
    pub draft_rows: vwd_tensor,
    pub draft_map: vwd_tensor,
    pub temperature: vwd_tensor,
    pub top_k: vwd_tensor,
    pub top_p: vwd_tensor,
    pub min_p: vwd_tensor,
    pub seeds: vwd_tensor,
    pub positions: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_verify_tree_args {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_verify_tree_args, stop), size_of::<Self>()];
}

/// Options of `vwd_compactor_create`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_compactor_options {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Length of the array caches: 1 … 4096.
    pub cache_count: u32,
    /// Host array of tensors [pages, P, …] of any dtype and strides: what a model keeps for each token in pages that one table
    /// names, such as keys, values, latents and scales of every layer. pages and P are the same of all.
    pub caches: *const vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_compactor_options {}

/// Arguments of `vwd_compact`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_compact_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub page_table: vwd_tensor,
    pub bases: vwd_tensor,
    pub path: vwd_tensor,
    pub accepted: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_compact_args {}
