//! What every Rust test stands on: tensors in any layout, backends, sessions, seeds, assertions, and the oracle.
//!
//! Nothing here calls the library except through its C functions, and the oracle does not call it at all.
#![allow(dead_code, unused_imports)] // each test target uses a part

pub mod array;
pub mod backend;
pub mod budget;
pub mod calls;
pub mod int4;
pub mod maps;
pub mod memory;
pub mod oracle;
pub mod paged;
pub mod rng;
pub mod selection;
pub mod session;
pub mod tensor;
pub mod trees;

pub use array::{Array, indices};
pub use backend::{Backend, Place};
pub use memory::{Mapping, ReadOnly, STACK, stack_of};
pub use paged::Paged;
pub use rng::{Rng, rounds};
pub use session::{Lines, Session, assert_fails, assert_ok, collect, last_error, last_message};
pub use tensor::{
    BF16, BOOL, Bytes, DType, F8E4M3, F8E5M2, F16, F32, I32, I64, Layout, Tensor, U8, U32, U64, absent, boundless,
    packed, strided,
};

use vanward::abi::{Versioned, vwd_kv_cache_options};

/// A struct that arguments point to, kept for good.
pub fn kept<T>(value: T) -> *const T {
    Box::leak(Box::new(value))
}

/// An argument struct with its size set and all else zero, as the `_INIT` macros of the header make it.
pub fn args<T: Versioned>() -> T {
    // SAFETY: all-zero bytes are a valid `Versioned` struct, which starts with its `u32` size.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<u32>().write(size_of::<T>() as u32);
        value
    }
}

/// A cache of one layer with one KV head, for two sequences.
pub fn small_cache() -> vwd_kv_cache_options {
    vwd_kv_cache_options {
        layers: 1,
        kv_heads: 1,
        block_size: 4,
        key_dim: 16,
        value_dim: 16,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        max_sequences: 2,
        max_blocks: 64,
        host_blocks: 128,
        slots: 16,
        ..args()
    }
}
