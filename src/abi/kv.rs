//! Tiered KV cache: all keys and values in host memory, the blocks in use in slots on the device.

use super::{Versioned, vwd_block_list, vwd_tensor};
use std::ffi::c_void;
use std::mem::offset_of;

/// Reports how much of an allocation is done: `done` of `total` bytes; the last call has done = total. Does not unwind.
pub type vwd_progress = Option<unsafe extern "C" fn(progress_context: *mut c_void, done: u64, total: u64)>;

/// `coding` of `vwd_kv_cache_options`: blocks lie as they were appended.
pub const VWD_CODING_EXACT: u32 = 0;
/// `coding` of `vwd_kv_cache_options`: blocks are coded in INT4 once they are whole, as `vwd_kv_quantize` codes them, and lie so on the host
/// and, if `slot_coding` does not decode them, in slots. The first block of a sequence and those in its tail lie as they were appended.
pub const VWD_CODING_INT4: u32 = 1;

/// `slot_coding` of `vwd_kv_cache_options`: a block lies in the slot that it is fetched into as on the host.
pub const VWD_SLOTS_AS_STORED: u32 = 0;
/// `slot_coding` of `vwd_kv_cache_options`: codes are decoded as they arrive. All slots hold keys and values of the cache's dtype, which are
/// attended as those of a cache that codes nothing.
pub const VWD_SLOTS_DECODED: u32 = 1;

/// Options of `vwd_kv_cache_create`. A size without a default must be at least 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_cache_options {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layers: u32,
    /// Hk; 1 for MLA rows.
    pub kv_heads: u32,
    /// S, tokens of a block.
    pub block_size: u32,
    /// D and Dv: channels of a key and of a value, multiples of 8 in 16 … 576.
    pub key_dim: u32,
    pub value_dim: u32,
    /// DLPack's code and bits of keys and values: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
    pub dtype_code: u32,
    pub dtype_bits: u32,
    /// 1: each token has scales of its own for each KV head, which the cache keeps; FP8 only. 0: the cache keeps no scales.
    pub token_scales: u32,
    /// Largest number of sequences at once. Sequences are numbered from 0 to one less than this.
    pub max_sequences: u32,
    /// Largest number of blocks of a sequence.
    pub max_blocks: u32,
    /// Number of blocks in host memory, each for all layers and KV heads.
    pub host_blocks: u32,
    /// Number of slots of a layer that blocks are fetched into; a slot holds one block of one KV head. 0 with layer_slots.
    pub slots: u32,
    /// A block that one of the last `hold` resolves of a layer named stays in its slot; 0 means 2. At most the slots of a layer. A decoder on
    /// the cache says itself which of its lists stay.
    pub hold: u32,
    /// Called while memory is allocated; may be NULL.
    pub progress: vwd_progress,
    /// First argument of progress.
    pub progress_context: *mut c_void,
    /// The slots of each layer, `layers` numbers of at least 1 in host memory; may be NULL: every layer has `slots`. Read during the
    /// call. `vwd_kv_cache_share_slots` shares a number of slots out.
    pub layer_slots: *const u32,
    /// VWD_CODING_EXACT or VWD_CODING_INT4. INT4: block_size a multiple of 16 up to 128, key_dim and value_dim multiples of 16 in
    /// 64 … 256, keys and values of 16 or 32 bits.
    pub coding: u32,
    /// With VWD_CODING_INT4: the weights of key channels, [layers, Hk, D] in host memory, from `vwd_kv_weights`; may be NULL: 1. One
    /// that is not a finite number above 0 counts as 1. Read during the call.
    pub weights: *const f32,
    /// VWD_SLOTS_AS_STORED, or with VWD_CODING_INT4 VWD_SLOTS_DECODED.
    pub slot_coding: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_cache_options {
    const KNOWN_SIZES: &'static [usize] = &[
        offset_of!(vwd_kv_cache_options, layer_slots),
        offset_of!(vwd_kv_cache_options, coding),
        offset_of!(vwd_kv_cache_options, slot_coding),
        size_of::<Self>(),
    ];
}

/// The memory that a cache takes, filled by `vwd_kv_cache_capacity` before the cache is created.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_cache_sizes {
    pub struct_size: u32,
    pub flags: u32,
    /// Bytes of a run in host memory: the keys, values and scales of one block of one KV head of one layer, one after the other. With
    /// VWD_CODING_INT4 their codes, and the mean key.
    pub run_bytes: u64,
    /// Bytes of pinned host memory, from the session.
    pub host_bytes: u64,
    /// Bytes of device memory, bookkeeping included.
    pub device_bytes: u64,
    /// Number of all slots of a layer: first the slots of the tails, then `slots` of the options, or the fewest of layer_slots.
    pub total_slots: u64,
    /// Largest selection that a resolve of any layer may name: the entries of all lists of a call together.
    pub largest_selection: u64,
    /// Bytes of a slot that blocks are fetched into: run_bytes, or with VWD_SLOTS_DECODED those of the keys and values that codes stand for.
    pub slot_bytes: u64,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_cache_sizes {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_kv_cache_sizes, slot_bytes), size_of::<Self>()];
}

/// Views of a layer's slots, filled by `vwd_kv_cache_view`. They are valid as long as the cache.
///
/// k, v         [total_slots, S, 1, D] and [total_slots, S, 1, Dv]  The pool that the slots of lists name. With VWD_CODING_INT4 and
///                        VWD_SLOTS_AS_STORED those of the tails alone, n slots; slots from n on name the pages of the codes.
/// k_scale, v_scale       [total_slots, S, 1]  float32; absent without token_scales.
/// tail_k, tail_v  [3·max_sequences, S, Hk, D] and [3·max_sequences, S, Hk, Dv]  The slots of the tails as pages of all KV heads,
///                        for vwd_index_update. With VWD_CODING_INT4 4·max_sequences: one more for a sequence's first block.
/// tail_k_scale, tail_v_scale  [3·max_sequences, S, Hk]
/// tail_table   [max_sequences, max_blocks]  int32; row n is sequence n, whatever row of a call it has. The page of tail_k that block n of
///                        a sequence is in while it is one of the two newest; of the first block with VWD_CODING_INT4 always.
/// int4_k, int4_v, int4_k_scale, int4_v_scale, int4_means  With VWD_CODING_INT4 and VWD_SLOTS_AS_STORED, else absent: what `vwd_int4_kv`
///                        takes beside the slots of lists, [slots, S, 1, …] and [slots, 1, 1, D]; means have the dtype of k.
/// weights  [Hk, D]       Those of `vwd_int4_kv`, with VWD_CODING_INT4; absent if the options had none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_cache_layer {
    pub struct_size: u32,
    pub flags: u32,
    pub k: vwd_tensor,
    pub v: vwd_tensor,
    pub k_scale: vwd_tensor,
    pub v_scale: vwd_tensor,
    pub tail_k: vwd_tensor,
    pub tail_v: vwd_tensor,
    pub tail_k_scale: vwd_tensor,
    pub tail_v_scale: vwd_tensor,
    pub tail_table: vwd_tensor,
    pub int4_k: vwd_tensor,
    pub int4_v: vwd_tensor,
    pub int4_k_scale: vwd_tensor,
    pub int4_v_scale: vwd_tensor,
    pub int4_means: vwd_tensor,
    pub weights: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_cache_layer {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_kv_cache_layer, int4_k), size_of::<Self>()];
}

/// Counters since the cache was created, filled by `vwd_kv_cache_info`; of one layer by `vwd_kv_cache_layer_info`. An entry is an entry of a list, a block a block of
/// one KV head of one layer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_cache_stats {
    pub struct_size: u32,
    pub flags: u32,
    pub sequences: u32,
    /// Blocks of host memory that sequences hold, and blocks of host memory that are free.
    pub blocks_in_use: u32,
    pub blocks_free: u32,
    pub host_bytes: u64,
    pub device_bytes: u64,
    /// Entries whose block was resident when they were resolved, blocks of tails included.
    pub hits: u64,
    /// Entries whose block was not resident: each asks for a copy, or waits for a copy that an earlier entry asked for.
    pub misses: u64,
    pub bytes_fetched: u64,
    pub bytes_written_back: u64,
    /// Blocks whose slot was given to another block.
    pub evictions: u64,
    /// Evicted blocks that were fetched and that no later resolve named.
    pub unused: u64,
    /// Waits during which copies were under way.
    pub waits: u64,
    /// Tokens that were dropped because they had no place: see `vwd_kv_cache_append`.
    pub dropped_tokens: u64,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_cache_stats {}

/// Arguments of `vwd_kv_cache_share_slots`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_cache_share_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layers: u32,
    pub least: u32,
    pub total: u64,
    pub slots: *const u32,
    pub misses: *const u64,
    pub shares: *mut u32,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_cache_share_args {}

/// Arguments of `vwd_kv_cache_append`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_cache_append_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layer: u32,
    pub sequences: vwd_tensor,
    pub begin: vwd_tensor,
    pub lens: vwd_tensor,
    pub k: vwd_tensor,
    pub v: vwd_tensor,
    pub k_scale: vwd_tensor,
    pub v_scale: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_cache_append_args {}

/// Arguments of `vwd_kv_cache_compact`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_cache_compact_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub sequences: vwd_tensor,
    pub bases: vwd_tensor,
    pub path: vwd_tensor,
    pub accepted: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_cache_compact_args {}

/// Arguments of `vwd_kv_cache_resolve`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_kv_cache_resolve_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layer: u32,
    pub sequences: vwd_tensor,
    pub wanted: vwd_block_list,
    pub resident: vwd_block_list,
    pub missed_counts: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_kv_cache_resolve_args {}
