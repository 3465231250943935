//! What a decoder knows ahead of a step: predictors of the coming selection.

pub mod forecast;
pub mod predictor;
