//! Prediction of the next step's blocks from the scores of past steps (PRR: Wang et al. 2026).

use super::{Versioned, vwd_block_list, vwd_tensor};
use std::mem::offset_of;

/// Smoothed scores of one layer, in the caller's memory. `vwd_predictor_reset` fills a sequence's rows before its first step.
/// The struct is final: it does not grow.
///
/// level  [N, Hk, max_blocks]  float32, of N sequences. L; not finite until the block has had a finite score.
/// trend  [N, Hk, max_blocks]  float32. T.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_predictor_state {
    pub level: vwd_tensor,
    pub trend: vwd_tensor,
}

/// Smoothing factors. {1, 0, 0} predicts the previous step's scores again; {0, 0, 0} means {1, 0, 0}. The struct is final:
/// it does not grow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_holt {
    /// Weight of the newest score in the level, in 0 … 1.
    pub alpha: f32,
    /// Weight of the newest change in the trend, in 0 … 1.
    pub beta: f32,
    /// Factor on the trend, finite.
    pub gamma: f32,
}

/// Arguments of `vwd_predictor_reset`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_predictor_reset_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub state: vwd_predictor_state,
    pub rows: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_predictor_reset_args {}

/// Arguments of `vwd_predictor_predict`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_predictor_predict_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub block_size: u32,
    pub k: u32,
    pub init_blocks: u32,
    pub local_blocks: u32,
    pub ratio: f32,
    pub holt: vwd_holt,
    pub state: vwd_predictor_state,
    pub seq_lens: vwd_tensor,
    pub budgets: vwd_tensor,
    pub predicted: vwd_block_list,
    pub scores: vwd_tensor,
    pub sequences: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_predictor_predict_args {
    const KNOWN_SIZES: &'static [usize] =
        &[offset_of!(vwd_predictor_predict_args, sequences), size_of::<vwd_predictor_predict_args>()];
}

/// Arguments of `vwd_predictor_update`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_predictor_update_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub block_size: u32,
    pub holt: vwd_holt,
    pub state: vwd_predictor_state,
    pub seq_lens: vwd_tensor,
    pub scores: vwd_tensor,
    pub sequences: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_predictor_update_args {
    const KNOWN_SIZES: &'static [usize] =
        &[offset_of!(vwd_predictor_update_args, sequences), size_of::<vwd_predictor_update_args>()];
}

/// Arguments of `vwd_predictor_calibrate`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_predictor_calibrate_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub k: u32,
    pub init_blocks: u32,
    pub local_blocks: u32,
    pub ratio: f32,
    /// Length of the array grid.
    pub grid_count: u32,
    pub grid: *const vwd_holt,
    pub scores: vwd_tensor,
    pub block_counts: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_predictor_calibrate_args {}
