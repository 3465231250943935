//! What a decoder knows ahead of a step: predictors of the coming selection.

pub mod forecast;
pub mod predictor;

use crate::runtime::cuda::Family;

/// Every family of this floor that has kernels.
pub const FAMILIES: &[Family] = &[Family::of::<predictor::Kernels>(), Family::of::<forecast::Kernels>()];
