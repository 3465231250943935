//! Verification of sampled draft tokens, and sampling.

use super::{Versioned, vwd_tensor};

/// VWD_ACCEPT_REJECTION where draft_rows are given, VWD_ACCEPT_COUPLED where they are not.
pub const VWD_ACCEPT_AUTO: u32 = 0;
/// The token that plain sampling draws is committed; a draft token is accepted if it is that token, so that the text does not depend
/// on the drafter (Daliri et al. 2024).
pub const VWD_ACCEPT_COUPLED: u32 = 1;
/// Rejection sampling (Leviathan et al. 2023; Chen et al. 2023).
pub const VWD_ACCEPT_REJECTION: u32 = 2;
/// Every row is greedy, whatever its temperature.
pub const VWD_ACCEPT_GREEDY: u32 = 3;

/// Flag: target holds probabilities, or any multiple of them, instead of logits.
pub const VWD_SAMPLE_TARGET_PROBABILITIES: u32 = 1;
/// Flag: draft_rows holds probabilities, or any multiple of them, instead of logits.
pub const VWD_SAMPLE_DRAFT_PROBABILITIES: u32 = 2;
/// Flag: filters are computed at temperature 1, before the temperature is applied.
pub const VWD_SAMPLE_TEMPERATURE_LAST: u32 = 4;

/// Bit of a request's status: a row holds a NaN, or a negative probability. The token cannot be drawn.
pub const VWD_SAMPLE_NAN: u32 = 1;
/// Bit of a request's status: a row has no token that can be drawn.
pub const VWD_SAMPLE_NO_TOKEN: u32 = 2;
/// Bit of a request's status: a draft token was refused, and no token is likelier in the target than in the draft. The next token
/// is drawn from the target's row.
pub const VWD_SAMPLE_NO_RESIDUAL: u32 = 4;
/// Bit of a request's status: target has no such row, as target_begin would have it.
pub const VWD_SAMPLE_NO_ROW: u32 = 8;

/// Arguments of `vwd_verify_sample`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_verify_sample_args {
    pub struct_size: u32,
    /// Bits VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_DRAFT_PROBABILITIES, VWD_SAMPLE_TEMPERATURE_LAST.
    pub flags: u32,
    pub rule: u32,
    pub draft: vwd_tensor,
    pub draft_lens: vwd_tensor,
    pub target: vwd_tensor,
    pub target_begin: vwd_tensor,
    pub draft_rows: vwd_tensor,
    pub draft_map: vwd_tensor,
    pub temperature: vwd_tensor,
    pub top_k: vwd_tensor,
    pub top_p: vwd_tensor,
    pub min_p: vwd_tensor,
    pub seeds: vwd_tensor,
    pub positions: vwd_tensor,
    pub stop: vwd_tensor,
    pub ignore_stop: vwd_tensor,
    pub remaining: vwd_tensor,
    pub min_remaining: vwd_tensor,
    pub next_token: vwd_tensor,
    pub accepted: vwd_tensor,
    pub committed: vwd_tensor,
    pub committed_len: vwd_tensor,
    pub finish: vwd_tensor,
    pub status: vwd_tensor,
    pub logprobs: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_verify_sample_args {}
