//! The C ABI: `extern "C"` and nothing else. Each function unpacks its arguments, calls the library and turns the result
//! into a status. Doc comments here become the comments of `include/vanward.h`.
#![allow(non_camel_case_types)]
// What makes a call safe is its contract in C's words, which is the comment itself.
#![allow(clippy::missing_safety_doc)]

pub mod attention;
pub mod boundary;
pub mod forecast;
pub mod index;
pub mod predictor;
pub mod prefetch;
pub mod select;
pub mod session;
pub mod verify;
