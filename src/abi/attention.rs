//! Attention over a selection, joining of states, and repair of a wrong prediction.

use super::{Versioned, vwd_block_list, vwd_tensor};
use std::mem::offset_of;

/// Keys and values of one layer in INT4, in blocks of S tokens, as `vwd_kv_quantize` writes them: (D + Dv) / 2 + 2 bytes a token and
/// KV head, and the mean key of each block.
///
/// Tokens exact_tokens … coded_lens[i]−1 of sequence i are read here, all others from k and v of `vwd_paged_kv`. Where a list has slots, these
/// say which blocks are coded: slots from the number of pages of k in `vwd_paged_kv` on name the pages here, counted from there. A page here
/// is then one block of one KV head (P = S, Hk = 1), means are [pages, 1, 1, D], and exact_tokens, page_table, coded_lens and mean_table are 0
/// or absent; `vwd_kv_cache_view` gives such pages. With c the code of a
/// channel, 0 … 15, and H the Hadamard matrix (Sylvester's, times 1/√n) of the largest power of two n that divides the number of
/// channels, repeated along the diagonal:
///   key = mean + weights∘(H·(k_scale·(c − 7.5))), value = H·(v_scale·(c − 7.5)).
///
/// flags         Must be 0.
/// block_size    Tokens of a block, S: a multiple of 16, 16 … 128. Lists of a call have the same block size. With a page_table, S
///               divides P or P divides S.
/// exact_tokens  Tokens at the beginning of each sequence that are not coded; a multiple of S.
/// k             [pages, P, Hk, D/2]     uint8: channel 2i in the low four bits, 2i+1 in the high ones. D a multiple of 16, 64 … 256.
/// v             [pages, P, Hk, Dv/2]    uint8, likewise.
/// k_scale       [pages, P, Hk]          float8_e4m3fn.
/// v_scale       [pages, P, Hk]          float8_e4m3fn.
/// page_table    [B, max_pages]          int32, optional: as in `vwd_paged_kv`, of these pages. A page of coded tokens outside
///                                       0 … pages−1 holds no tokens.
/// coded_lens    [B]                     int32. Clamped to 0 … seq_lens[i] and the capacity of the pages, and rounded down to whole
///                                       blocks.
/// means         [mean_pages, rows, Hk, D]  float32, float16 or bfloat16: the mean key of each block. Block j of sequence i is row
///                                       j % rows of page mean_table[i, j / rows], or row j of page i where mean_table is absent.
/// mean_table    [B, max_mean_pages]     int32, optional. The mean of a block that has no row is 0.
/// weights       [Hk, D]                 float32, Hk as lists have it, optional (absent: 1), from `vwd_kv_weights`. One that is not a finite number above 0
///                                       counts as 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_int4_kv {
    pub struct_size: u32,
    pub flags: u32,
    pub block_size: u32,
    pub exact_tokens: u32,
    pub k: vwd_tensor,
    pub v: vwd_tensor,
    pub k_scale: vwd_tensor,
    pub v_scale: vwd_tensor,
    pub page_table: vwd_tensor,
    pub coded_lens: vwd_tensor,
    pub means: vwd_tensor,
    pub mean_table: vwd_tensor,
    pub weights: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_int4_kv {}

/// Paged keys and values of one layer.
///
/// flags       Must be 0.
/// k           [pages, P, Hk, D]   float32, float16, bfloat16, float8_e4m3fn or float8_e5m2. D a multiple of 8, 16 … 576.
/// v           [pages, P, Hk, Dv]  dtype of k; Dv likewise. May be a view of k's memory (MLA: its first 512 channels).
/// page_table  [B, max_pages]      int32, optional. Page p of sequence i is page_table[i, p]. Absent: sequence i has page i
///                                 and no other, so that k is [B, T, Hk, D]; for lists with slots see `vwd_block_list`. A
///                                 page outside 0 … pages−1 holds no tokens.
/// seq_lens    [B]                 int32. Tokens of each sequence, clamped to 0 … the capacity of its pages; with slots there
///                                 is no upper bound.
/// k_scale     [1], [Hk] or [pages, P, Hk]  float32, optional (absent: 1); FP8 only. Key = stored value · scale.
/// v_scale     [1], [Hk] or [pages, P, Hk]  float32, optional (absent: 1); FP8 only. Value = stored value · scale.
/// int4        Optional (NULL: none), with k and v of 16 or 32 bits: the tokens that are coded in INT4. Only `vwd_attention` and
///             `vwd_repair` read it. The other tokens are read from k and v, whose pages of coded tokens may be −1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_paged_kv {
    pub struct_size: u32,
    pub flags: u32,
    pub k: vwd_tensor,
    pub v: vwd_tensor,
    pub page_table: vwd_tensor,
    pub seq_lens: vwd_tensor,
    pub k_scale: vwd_tensor,
    pub v_scale: vwd_tensor,
    pub int4: *const vwd_int4_kv,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_paged_kv {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_paged_kv, int4), size_of::<Self>()];
}

/// Attention state per query head: out = acc / l, lse = m + ln l. Natural logarithms, s = scale·q·k.
/// The state of no tokens, the empty state, is acc = 0, m = −inf, l = 0. The struct is final: it does not grow.
///
/// acc  [B, Hq, Dv] or [B, Q, Hq, Dv]  float32. Σ e^(s−m) v
/// m    [B, Hq] or [B, Q, Hq]          float32. max s
/// l    [B, Hq] or [B, Q, Hq]          float32. Σ e^(s−m)
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_attention_state {
    pub acc: vwd_tensor,
    pub m: vwd_tensor,
    pub l: vwd_tensor,
}

/// Partials: an attention state for each group of `partial_blocks` consecutive entries of a block list. The struct is final:
/// it does not grow.
///
/// acc  [B, Hq, groups, Dv] or [B, Q, Hq, groups, Dv]  float32; groups = ⌈cap / partial_blocks⌉
/// m    [B, Hq, groups] or [B, Q, Hq, groups]          float32
/// l    [B, Hq, groups] or [B, Q, Hq, groups]          float32
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_attention_partials {
    pub acc: vwd_tensor,
    pub m: vwd_tensor,
    pub l: vwd_tensor,
}

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

/// Flag of `vwd_attention` and `vwd_repair`: results of the rows from q_lens[i] on stay as they are, so that calls which take
/// different rows of a batch, prefill and decode, share their outputs.
pub const VWD_ATTENTION_KEEP_ROWS: u32 = 1;

/// Arguments of `vwd_attention`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_attention_args {
    pub struct_size: u32,
    /// 0 or VWD_ATTENTION_KEEP_ROWS.
    pub flags: u32,
    pub block_size: u32,
    pub partial_blocks: u32,
    pub scale: f32,
    pub soft_cap: f32,
    pub window: u32,
    pub kv: *const vwd_paged_kv,
    pub q: vwd_tensor,
    pub q_lens: vwd_tensor,
    pub list: vwd_block_list,
    pub sinks: vwd_tensor,
    pub out: vwd_tensor,
    pub lse: vwd_tensor,
    pub state: vwd_attention_state,
    pub partials: vwd_attention_partials,
    pub tree: vwd_tensor,
    pub remainder: *const vwd_remainder,
    pub log_mass: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_attention_args {
    const KNOWN_SIZES: &'static [usize] =
        &[offset_of!(vwd_attention_args, tree), offset_of!(vwd_attention_args, remainder), size_of::<Self>()];
}

/// Arguments of `vwd_merge_states`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_merge_states_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Length of the array inputs.
    pub input_count: u32,
    pub inputs: *const vwd_attention_state,
    pub sinks: vwd_tensor,
    pub out: vwd_tensor,
    pub lse: vwd_tensor,
    pub state: vwd_attention_state,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_merge_states_args {}

/// The result covers predicted ∪ selected blocks (PRR: Wang et al. 2026): blocks predicted in vain remain in it.
pub const VWD_REPAIR_SUPERSET: u32 = 1;
/// The result covers the selected blocks alone.
pub const VWD_REPAIR_EXACT: u32 = 2;

/// Arguments of `vwd_repair`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_repair_args {
    pub struct_size: u32,
    /// 0 or VWD_ATTENTION_KEEP_ROWS.
    pub flags: u32,
    pub mode: u32,
    pub block_size: u32,
    pub partial_blocks: u32,
    pub scale: f32,
    pub soft_cap: f32,
    pub window: u32,
    pub kv: *const vwd_paged_kv,
    pub q: vwd_tensor,
    pub q_lens: vwd_tensor,
    pub predicted: vwd_block_list,
    pub selected: vwd_block_list,
    pub predicted_state: vwd_attention_state,
    pub predicted_partials: vwd_attention_partials,
    pub sinks: vwd_tensor,
    pub out: vwd_tensor,
    pub lse: vwd_tensor,
    pub state: vwd_attention_state,
    pub missed_counts: vwd_tensor,
    pub tree: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_repair_args {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_repair_args, tree), size_of::<Self>()];
}
