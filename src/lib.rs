//! Vanward: an embeddable C-ABI runtime for the decode step of large language models.
//!
//! The product is `libvanward` and its header `vanward.h`; [`capi`] declares every function of it. Behind the boundary,
//! [`ops`] holds one folder per family of calls (contract, checks, CPU reference, CUDA launch), [`decode`] the predictors,
//! [`runtime`] the session and what it owns, and [`core`] the types they share. See `docs/architecture.md`.

#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

pub mod abi;
pub mod capi;
pub mod core;
mod decode;
mod ops;
mod runtime;
