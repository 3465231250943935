//! The C ABI's plain data: every struct and constant of `vanward.h`, in the order in which the header has them.
//!
//! This is the lowest layer: every other module imports it, and it imports none. Functions are in `capi`, one file per
//! family. Doc comments become the header's comments.
#![allow(non_camel_case_types)]

mod attention;
mod budget;
mod decoder;
mod forecast;
mod index;
mod kv;
mod predictor;
mod prefetch;
mod quantize;
mod remainder;
mod sample;
mod select;
mod session;
mod topk;
mod tree;
mod types;
mod verify;

pub use attention::*;
pub use budget::*;
pub use decoder::*;
pub use forecast::*;
pub use index::*;
pub use kv::*;
pub use predictor::*;
pub use prefetch::*;
pub use quantize::*;
pub use remainder::*;
pub use sample::*;
pub use select::*;
pub use session::*;
pub use topk::*;
pub use tree::*;
pub use types::*;
pub use verify::*;

/// A C struct that starts with `uint32_t struct_size` and may grow at its end.
///
/// # Safety
/// `repr(C)`, `struct_size: u32` first, and all-zero bytes are a valid value.
pub unsafe trait Versioned: Copy {
    /// The sizes of the struct in all versions, this one included, ascending.
    const KNOWN_SIZES: &'static [usize] = &[size_of::<Self>()];
}
