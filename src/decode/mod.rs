//! Decode steps: the decoder runs their attention, predictor and forecast predict their selection, and the budget says how much
//! prediction and drafting pays.

pub mod budget;
pub mod decoder;
pub mod forecast;
pub mod predictor;
mod tensor_file;

use crate::runtime::cuda::Family;

/// Every family of this folder that has kernels.
pub const FAMILIES: &[Family] =
    &[Family::of::<predictor::Kernels>(), Family::of::<forecast::Kernels>(), Family::of::<decoder::Kernels>()];
