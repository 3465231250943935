//! The calls, one folder per family. Each has `mod.rs` (contract, checks, dispatch), `cpu.rs` (the reference and the
//! embedded default) and, where it runs on CUDA, `cuda.rs` (the launch). Nobody else imports a backend.

pub mod attention;
pub mod compact;
pub mod contents;
pub mod draw;
pub mod index;
pub mod int4;
pub mod option_checks;
pub mod pack;
pub mod prefetch;
pub mod quantize;
pub mod remainder;
pub mod repair;
pub mod sample;
pub mod select;
pub mod simd;
pub mod topk;
pub mod tree;
pub mod verify;
pub mod verify_tree;
pub mod views;

use crate::runtime::cuda::Family;

/// Every family that has kernels.
pub const FAMILIES: &[Family] = &[
    Family::of::<verify::Kernels>(),
    Family::of::<pack::Kernels>(),
    Family::of::<sample::Kernels>(),
    Family::of::<index::Kernels>(),
    Family::of::<select::Kernels>(),
    Family::of::<topk::Kernels>(),
    Family::of::<attention::device::Kernels>(),
    Family::of::<prefetch::Kernels>(),
    Family::of::<contents::Kernels>(),
    Family::of::<tree::Kernels>(),
    Family::of::<verify_tree::Kernels>(),
    Family::of::<compact::Kernels>(),
    Family::of::<quantize::Kernels>(),
    Family::of::<remainder::Kernels>(),
];
