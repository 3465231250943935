//! Budget: measured times of a shape on a device, and how much speculation they pay for.

use super::Versioned;

/// A budget: the times of selection, attention of guesses, repair, verification and a decoder's strategies for one shape on one device.
/// Opaque.
pub struct vwd_budget {
    _private: [u8; 0],
}

/// Options of `vwd_budget_profile` and `vwd_budget_load`: a layer's shape, and the grid that is measured. A size without a default must
/// be at least 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_budget_options {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Hq and Hk; Hq is a multiple of Hk.
    pub query_heads: u32,
    pub kv_heads: u32,
    /// D and Dv: channels of a key and of a value, multiples of 8 in 16 … 576.
    pub key_dim: u32,
    pub value_dim: u32,
    /// DLPack's code and bits of keys and values: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2. Queries and outputs have
    /// the same, or float16 where that is FP8.
    pub dtype_code: u32,
    pub dtype_bits: u32,
    /// P, tokens of a page.
    pub page_size: u32,
    /// S, tokens of a block: S divides P or P divides S.
    pub block_size: u32,
    /// VWD_SELECT_MINMAX or VWD_SELECT_AXIS.
    pub method: u32,
    /// Budget of a list, forced blocks included.
    pub k: u32,
    /// Blocks that are always selected: the first and the last ones.
    pub init_blocks: u32,
    pub local_blocks: u32,
    /// VWD_REPAIR_SUPERSET or VWD_REPAIR_EXACT; 0 means EXACT.
    pub repair_mode: u32,
    /// Entries of a list that share a partial, for EXACT; 0 means 1.
    pub partial_blocks: u32,
    /// Largest number of drafts that one step verifies, γ; every γ from 0 on is measured. At most 31; 0 means 7.
    pub max_draft: u32,
    /// Tokens of a sequence, ascending; 0 ends the list. None given: 2048, 8192, 32768, 131072.
    pub contexts: [u32; 16],
    /// Numbers of sequences, ascending; 0 ends the list. None given: 1, 4.
    pub batches: [u32; 8],
    /// Ratios r of guessed to selected blocks, ascending from 1, at most 16; 0 ends the list. None given: 1, 1.25, 1.5, 2.
    pub ratios: [f32; 8],
    /// Times that each call is timed; the median counts. At most 1000; 0 means 5.
    pub samples: u32,
    /// Most bytes of memory that the profile takes where the session computes, its stream's scratch arena apart; 0 means 4 GiB.
    pub limit_bytes: u64,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_budget_options {}

/// What `vwd_budget_ask` is asked. Zero means the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_budget_question {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Tokens of a sequence, at least 1. Where sequences differ, their mean.
    pub context: u32,
    /// Number of sequences; 0 means 1.
    pub batch: u32,
    /// p, the probability that a drafted token is accepted, 0 … 1, as `vwd_decoder_info` estimates it; 0: not known, and SELF is not
    /// judged.
    pub acceptance: f32,
    /// Largest γ that is considered; 0 means the largest of the profile, which it does not exceed.
    pub max_draft: u32,
    /// Microseconds of a layer apart from attention, selection and repair (projections, MLP) in a step of one position a sequence; 0
    /// compares attention alone.
    pub rest_us: f32,
    /// Microseconds that each further position a sequence adds to that.
    pub rest_position_us: f32,
    /// What a gain must exceed 1 by to pay; 0 means 0.02.
    pub margin: f32,
    /// Ratios at which coverage is known, ascending from 1 on; 0 ends the list. None given: PRR is not judged.
    pub coverage_ratios: [f32; 8],
    /// The share of the selected blocks that guesses of each of these ratios cover, 0 … 1; linear between ratios, constant past
    /// them.
    pub coverages: [f32; 8],
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_budget_question {}

/// Bit of an answer's `pays`: steps over a selection (SERIAL: select, then attend) are faster than dense ones.
pub const VWD_BUDGET_SPARSE: u32 = 1;
/// Bit of an answer's `pays`: attention of guesses during selection, then repair, is faster than SERIAL.
pub const VWD_BUDGET_PRR: u32 = 2;
/// Bit of an answer's `pays`: drafts by sparse steps that a dense step verifies are faster than dense steps.
pub const VWD_BUDGET_SELF: u32 = 4;

/// What `vwd_budget_ask` answers. Times are microseconds of one layer, gains are ratios of speeds: 1.5 is half as many tokens more in
/// the same time. Gains are those of the best choice even where it does not pay; 0 where the strategy was not judged.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_budget_answer {
    pub struct_size: u32,
    /// The strategies that pay, VWD_BUDGET_* joined; 0: dense steps are the fastest.
    pub pays: u32,
    /// 1: context or batch lies outside the measured grid, and times are extrapolated. Else 0.
    pub extrapolated: u32,
    /// The γ that gives most tokens in the time; 0 where SELF does not pay.
    pub gamma: u32,
    /// The largest ratio of guesses whose attention takes no longer than selection, and so stays off the critical path; 0 if that
    /// of k guesses takes longer.
    pub hidden_ratio: f32,
    /// The ratio at which PRR is fastest; 0 where PRR does not pay.
    pub ratio: f32,
    /// Speed of SERIAL against dense steps.
    pub sparse_gain: f32,
    /// Speed of PRR against SERIAL.
    pub prr_gain: f32,
    /// Tokens in the time of SELF against dense steps.
    pub self_gain: f32,
    /// The coverage from which on PRR at the hidden ratio (at 1, if there is none) is not slower than SERIAL; infinite if none is
    /// enough.
    pub break_even_coverage: f32,
    /// The acceptance from which on SELF is not slower than dense steps; infinite if none is enough.
    pub break_even_acceptance: f32,
    /// Selection, and attention of one position over k blocks.
    pub select_us: f32,
    pub attend_us: f32,
    /// Attention of guesses with what repair needs, and repair, at PRR's best ratio; 0 where PRR was not judged.
    pub guess_us: f32,
    pub repair_us: f32,
    /// Dense attention of one position, and of γ + 1 for SELF's best γ; the latter is 0 where SELF was not judged.
    pub dense_us: f32,
    pub verify_us: f32,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_budget_answer {}
