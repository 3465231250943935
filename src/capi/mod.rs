//! The C ABI: `extern "C"` and nothing else. Each function unpacks its arguments, calls the library and turns the result
//! into a status. Doc comments here become the comments of `include/vanward.h`.
#![allow(non_camel_case_types)]
// The doc comment of each function is its contract in C's terms, so a section # Safety would repeat it.
#![allow(clippy::missing_safety_doc)]

mod attention;
pub mod boundary;
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
pub use verify::*;
