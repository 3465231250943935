//! Vanward: an embeddable C-ABI runtime for the decode step of large language models.
//!
//! The product is the C library `libvanward` with its header `vanward.h`, which C, C++, Go and Python programs use. As a Rust
//! crate it offers the same: [`capi`] has every function, under its C name and `unsafe`, [`abi`] their structs and constants,
//! and [`core`] what both share. There is no safe Rust interface.
//!
//! Behind the boundary, `ops` holds one folder per family of calls (contract, checks, CPU reference, CUDA launch), `kv` the
//! tiered cache, `decode` the predictors, `runtime` the session and what it owns. See `docs/architecture.md`.

#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

// Their comments are the header's, where brackets hold shapes.
#[allow(rustdoc::broken_intra_doc_links)]
pub mod abi;
#[allow(rustdoc::broken_intra_doc_links)]
pub mod capi;
pub mod core;
mod decode;
mod kv;
mod ops;
mod runtime;
