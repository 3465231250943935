//! Families that predict the selection of a decode step before the step: predictor and forecast.

pub mod forecast;
pub mod predictor;

use crate::runtime::cuda::Family;

/// Every family of this folder that has kernels.
pub const FAMILIES: &[Family] = &[Family::of::<predictor::Kernels>(), Family::of::<forecast::Kernels>()];
