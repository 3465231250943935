//! Forecast: the queries of layer l+1 from the residual stream that enters layer l.

use super::{Versioned, vwd_tensor};

/// Flag of a forecast: its maps also read the forecast layer's pre-RoPE queries at the token before, which an inference
/// engine has from its last step and passes as `previous`.
pub const VWD_FORECAST_MEMORY: u32 = 1;

/// Options of `vwd_forecast_create`; zero means the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_forecast_options {
    pub struct_size: u32,
    /// 0 or VWD_FORECAST_MEMORY.
    pub flags: u32,
    /// Number of maps, at least 1. Map l reads the residual stream that enters layer l.
    pub layers: u32,
    /// Width of the residual stream.
    pub input_dim: u32,
    /// Query heads of the layer that is forecast.
    pub q_heads: u32,
    /// Head dimension.
    pub head_dim: u32,
    /// Ridge λ relative to the mean diagonal of X̂ᵀX̂ (with memory, to the mean of each kind of input); 0 means 1e−3.
    pub ridge: f32,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_forecast_options {}

/// The shape, maps and sums of a forecast, filled by `vwd_forecast_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_forecast_details {
    pub struct_size: u32,
    /// The flags of the options: 0 or VWD_FORECAST_MEMORY.
    pub flags: u32,
    pub layers: u32,
    pub input_dim: u32,
    pub q_heads: u32,
    pub head_dim: u32,
    pub ridge: f32,
    /// Number of maps that are solved or loaded.
    pub solved: u32,
    /// Largest rank of the solved maps of low rank; 0 if every map has full rank.
    pub rank: u32,
    /// Bytes of the solved maps.
    pub map_bytes: u64,
    /// Bytes of the sums that wait for `vwd_forecast_solve`.
    pub sum_bytes: u64,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_forecast_details {}

/// Channel pairs (c, c + rotary_dim/2), as in GPT-NeoX and Llama checkpoints of Hugging Face.
pub const VWD_ROPE_HALVES: u32 = 0;
/// Channel pairs (2c, 2c+1), as in GPT-J and GGUF files of Llama.
pub const VWD_ROPE_INTERLEAVED: u32 = 1;

/// Rotary position embedding (Su et al. 2021). Angle of pair c at position t: t·inv_freq[c].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_rope {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// VWD_ROPE_HALVES or VWD_ROPE_INTERLEAVED.
    pub style: u32,
    /// Number of leading channels that rotate, even; 0 means all (all but the last if head_dim is odd).
    pub rotary_dim: u32,
    /// Base of inv_freq[c] = theta^(−2c/rotary_dim); 0 means 10000.
    pub theta: f32,
    /// Factor on the rotated channels, at position 0, too (YaRN's attention factor); 0 means 1.
    pub attention_factor: f32,
    /// [rotary_dim/2] float32, optional: replaces the frequencies made from theta.
    pub inv_freq: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_rope {}

/// Arguments of `vwd_forecast_accumulate`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_forecast_accumulate_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layer: u32,
    pub x: vwd_tensor,
    pub previous: vwd_tensor,
    pub q: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_forecast_accumulate_args {}

/// Arguments of `vwd_forecast_project`; see there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vwd_forecast_project_args {
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    pub layer: u32,
    pub rope: *const vwd_rope,
    pub x: vwd_tensor,
    pub previous: vwd_tensor,
    pub positions: vwd_tensor,
    pub q: vwd_tensor,
}

// SAFETY: repr(C), struct_size first, plain data.
unsafe impl Versioned for vwd_forecast_project_args {}
