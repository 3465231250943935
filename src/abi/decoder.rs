//! Decoder: the attention of decode steps, layer by layer, on the engine's own paged keys and values.

use super::{Versioned, vwd_budget, vwd_holt, vwd_rope, vwd_tensor};
use std::mem::offset_of;

/// The row takes no part in the step: nothing of it is written or read.
pub const VWD_DECODER_SKIP: u32 = 0;
/// The row attends a selection of its blocks. Drafts of tokens are made so.
pub const VWD_DECODER_SPARSE: u32 = 1;
/// The row attends all its tokens. Drafts are verified so, and the text is then that of dense attention.
pub const VWD_DECODER_DENSE: u32 = 2;

/// Strategy of a layer: selection, then attention over what it selected.
pub const VWD_STRATEGY_SERIAL: u32 = 0;
/// Attention over a predicted list while the selection runs, and exact repair of what was predicted wrong (PRR: Wang et al. 2026).
/// Results are those of SERIAL: bit for bit on a CPU session, to the tolerance of `vwd_repair` on CUDA.
pub const VWD_STRATEGY_PRR: u32 = 1;
/// Attention over the list that `vwd_decoder_foresee` made, as it is.
pub const VWD_STRATEGY_FORESEEN: u32 = 2;

/// Strategies of a decoder on a tiered cache (`vwd_decoder_create_on_cache`), beside SERIAL, which fetches what it selected.
///
/// Attention over the list that the sequence's last sparse step selected, and over the block of the new token, while this step's selection
/// is made and fetched for the next one (AsyncTLS: Hu et al. 2026).
pub const VWD_STRATEGY_ASYNC_TLS: u32 = 3;
/// Attention over the list that `vwd_decoder_foresee` made and began to fetch, as it is (SparDA: Fu et al. 2026): FORESEEN on a cache.
pub const VWD_STRATEGY_SPARDA: u32 = 4;
/// A predicted list is fetched ahead; of the selected list attention reads what is resident while what was missed travels, and repair adds
/// the missed and the late; in a step of one row attention reads these in host memory itself, where its kernel can. Results are those of
/// SERIAL: bit for bit on a CPU session and where slots hold codes, else to the tolerance of `vwd_repair`, whatever was predicted and however
/// late copies are.
pub const VWD_STRATEGY_VANWARD: u32 = 5;

/// PRR and VANWARD predict from the scores of past steps.
pub const VWD_PREDICT_SCORES: u32 = 0;
/// PRR and VANWARD take the list that `vwd_decoder_foresee` made.
pub const VWD_PREDICT_FORESEEN: u32 = 1;

/// How a layer's sparse rows attend. The struct keeps its size: what is added takes the place of `reserved`, and zero means what
/// was before.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_decoder_policy {
    /// VWD_SELECT_MINMAX or VWD_SELECT_AXIS; 0: the layer is dense, and keeps no summaries.
    pub method: u32,
    /// Budget of a list, forced blocks included; at least 1 unless the layer is dense.
    pub k: u32,
    /// Blocks that are always selected: the first and the last ones. The token of a step is in the last one.
    pub init_blocks: u32,
    pub local_blocks: u32,
    /// Rows of fewer tokens are dense. A row whose list would have all its blocks is dense in any case, except on a cache, where its blocks
    /// may lie in slots. 0 for ASYNC_TLS.
    pub dense_below: u32,
    /// Tokens that a position sees, itself included; 0: all.
    pub window: u32,
    /// VWD_STRATEGY_*.
    pub strategy: u32,
    /// VWD_PREDICT_*: where the prediction of PRR or VANWARD comes from. 0 for other strategies.
    pub predict: u32,
    /// Length of a predicted or foreseen list as a multiple of k, at least 1; 0 means 1.25. 0 for SERIAL and ASYNC_TLS.
    pub ratio: f32,
    /// Smoothing of scores, for VWD_PREDICT_SCORES; zeros mean {1, 0, 0}, the scores of the previous step.
    pub holt: vwd_holt,
    /// Must be 0.
    pub reserved: [u32; 4],
}

/// Options of `vwd_decoder_create`. A size without a default must be at least 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_decoder_options {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layers: u32,
    /// Largest number of rows of a step, B.
    pub max_rows: u32,
    /// Largest number of positions of a row in a step, Q: γ + 1 to verify γ drafts; 0 means 1.
    pub max_positions: u32,
    /// Largest number of sequences of which drafts and scores are remembered; 0 means max_rows, or on a cache the cache's number, which
    /// is also the least.
    pub max_sequences: u32,
    /// Hq and Hk; Hq is a multiple of Hk.
    pub query_heads: u32,
    pub kv_heads: u32,
    /// D and Dv: channels of a key and of a value, multiples of 8 in 16 … 576.
    pub key_dim: u32,
    pub value_dim: u32,
    /// DLPack's code and bits of keys and values: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
    pub dtype_code: u32,
    pub dtype_bits: u32,
    /// P, tokens of a page, and the number of pages of a layer's cache. 0 on a tiered cache.
    pub page_size: u32,
    pub pages: u32,
    /// S, tokens of a block: S divides P or P divides S. On a tiered cache that of the cache.
    pub block_size: u32,
    /// Factor on q·k, above 0; 0 means 1/√D, and is not allowed if D ≠ Dv.
    pub scale: f32,
    /// c: s becomes c·tanh(s / c). 0: no soft cap.
    pub soft_cap: f32,
    /// Largest number of tokens that is recommended to draft; 0 means max_positions − 1.
    pub max_draft: u32,
    /// The time of one drafting step as a part of the time of one verifying step, above 0; 0 means 0.5. It decides how many
    /// tokens are recommended.
    pub draft_cost: f32,
    /// Largest number of tokens of a sequence of which PRR remembers scores; 0 means those of all pages. What lies beyond is not
    /// predicted.
    pub max_tokens: u32,
    /// The policy of layers that `policies` does not name.
    pub policy: vwd_decoder_policy,
    /// Length of the array policies: 0, or the number of layers.
    pub policy_count: u32,
    pub policies: *const vwd_decoder_policy,
    /// [layers, Hk, D]  float32, optional: `axis_weights` and `axis_centre` of each layer's index. They must stay valid as long
    /// as the decoder.
    pub axis_weights: vwd_tensor,
    pub axis_centre: vwd_tensor,
    /// Optional: where it is given, a layer attends by PRR or FORESEEN only in steps in which that pays by the budget's times, and by
    /// SERIAL in the others; `vwd_decoder_begin` says when. Of the session's device and of the shape of the layers with these
    /// strategies. Kept alive by the decoder; may be released first. NULL: strategies always run. Not on a tiered cache.
    pub budget: *const vwd_budget,
    /// The share of the selected blocks that PRR's predicted lists have, 0 … 1, where the budget decides: 1 − missed / selected of
    /// `vwd_decoder_info`, or what `vwd_predictor_calibrate` finds. 0: nothing is known, and PRR runs only if it is faster with every
    /// prediction wrong. 0 without a budget.
    pub coverage: f32,
    /// 1: sparse rows attend what their list leaves out, too, as one term: `remainder` of `vwd_attention`, whose means and covariance the
    /// decoder keeps by sequence number. Sparse layers are then AXIS by SERIAL or FORESEEN, without soft cap and window. On a tiered cache
    /// SPARDA takes the place of FORESEEN, and max_positions and max_draft are at most S + 1 together.
    pub remainder: u32,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_decoder_options {
    const KNOWN_SIZES: &'static [usize] = &[offset_of!(vwd_decoder_options, budget), size_of::<Self>()];
}

/// What a decoder keeps, filled by `vwd_decoder_info`. The tensors are views of its memory, valid as long as the decoder; calls on
/// streams write them.
///
/// draft_lens  [max_sequences]  int32. The number of tokens that is recommended to draft next, 0 … max_draft.
/// acceptance  [max_sequences]  float32. The estimated probability that a drafted token is accepted.
/// drafted     [max_sequences]  int32. Tokens drafted and verified since the sequence was reset.
/// accepted    [max_sequences]  int32. Tokens of these that were accepted.
/// selected    [layers, max_rows, Hk]  int32. Blocks that the layer's last selection chose for each row of its step.
/// predicted   [layers, max_rows, Hk]  int32. Blocks of the layer's last predicted or foreseen list; of VANWARD by scores the one for the next step.
/// missed      [layers, max_rows, Hk]  int32. Blocks that the layer's last repair attended: selected, and on the engine's pages not predicted,
///                                     on a cache not resident. On a cache also those that attention read in host memory instead.
/// fetched     [layers, max_rows, Hk]  int32. On a cache: blocks of the layer's last list that were not resident when they were asked
///                                     for: of the foreseen list for SPARDA, else of the selected one. Absent without a cache.
/// Rows that were not sparse have 0.
///
/// fallback_layers  With a budget: layers of PRR and FORESEEN that `vwd_decoder_begin` made SERIAL in the last step. Else 0.
/// fallbacks        The same of all steps together. Replays of a captured step are not counted: the host does not see them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_decoder_details {
    pub struct_size: u32,
    pub flags: u32,
    /// Bytes that the decoder has allocated where the session computes.
    pub bytes: u64,
    pub draft_lens: vwd_tensor,
    pub acceptance: vwd_tensor,
    pub drafted: vwd_tensor,
    pub accepted: vwd_tensor,
    pub selected: vwd_tensor,
    pub predicted: vwd_tensor,
    pub missed: vwd_tensor,
    pub fetched: vwd_tensor,
    pub fallback_layers: u64,
    pub fallbacks: u64,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_decoder_details {
    const KNOWN_SIZES: &'static [usize] = &[
        offset_of!(vwd_decoder_details, fetched),
        offset_of!(vwd_decoder_details, fallback_layers),
        size_of::<Self>(),
    ];
}

/// A step of `vwd_decoder_begin`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_decoder_step {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub mode: u32,
    pub positions: u32,
    pub shortest: u32,
    pub page_table: vwd_tensor,
    pub seq_lens: vwd_tensor,
    pub q_lens: vwd_tensor,
    pub begin: vwd_tensor,
    pub modes: vwd_tensor,
    pub sequences: vwd_tensor,
    pub longest: u32,
    /// Must be 0.
    pub reserved: u32,
    pub tree: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_decoder_step {
    const KNOWN_SIZES: &'static [usize] =
        &[offset_of!(vwd_decoder_step, longest), offset_of!(vwd_decoder_step, tree), size_of::<Self>()];
}

/// Arguments of `vwd_decoder_foresee`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_decoder_foresee_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layer: u32,
    pub map: u32,
    pub rope: *const vwd_rope,
    pub x: vwd_tensor,
    pub previous: vwd_tensor,
    pub q: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_decoder_foresee_args {}

/// Arguments of `vwd_decoder_attend`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_decoder_attend_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layer: u32,
    pub k: vwd_tensor,
    pub v: vwd_tensor,
    pub k_scale: vwd_tensor,
    pub v_scale: vwd_tensor,
    pub new_k: vwd_tensor,
    pub new_v: vwd_tensor,
    pub q: vwd_tensor,
    pub sinks: vwd_tensor,
    pub out: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_decoder_attend_args {}

/// Arguments of `vwd_decoder_accept`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_decoder_accept_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub draft: vwd_tensor,
    pub target: vwd_tensor,
    pub draft_lens: vwd_tensor,
    pub sequences: vwd_tensor,
    pub accepted: vwd_tensor,
    pub next_token: vwd_tensor,
    pub committed: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_decoder_accept_args {}

/// Arguments of `vwd_decoder_reset`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_decoder_reset_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub sequences: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_decoder_reset_args {}
