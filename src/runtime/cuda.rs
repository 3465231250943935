//! The CUDA backend's resources.

use super::Options;
use crate::capi::session::vwd_session_details;
use crate::capi::types::vwd_stream;
use crate::core::status::{Code, Error, Result};
use std::ffi::c_void;
use std::marker::PhantomData;

/// Not constructed yet: `open` says why.
pub enum Cuda {}

/// One call's place on a stream.
pub struct Enqueue<'s>(pub std::convert::Infallible, PhantomData<&'s Cuda>);

impl Cuda {
    pub fn open(_options: &Options) -> Result<Cuda> {
        // SAFETY: looks for the library by name, nothing more.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            let text = "no CUDA driver: libcuda.so.1 was not found (a CPU session needs none)";
            return Err(Error::new(Code::Unavailable, text));
        }
        Err(Error::new(Code::Unavailable, "this build has no CUDA kernels"))
    }

    pub fn ordinal(&self) -> i32 {
        match *self {}
    }

    pub fn enqueue(&self, _stream: vwd_stream) -> Result<Enqueue<'_>> {
        match *self {}
    }

    pub fn details(&self) -> vwd_session_details {
        match *self {}
    }

    pub fn reserve(&self, _stream: vwd_stream, _bytes: u64) -> Result<()> {
        match *self {}
    }

    pub fn pinned_alloc(&self, _bytes: u64) -> Result<*mut c_void> {
        match *self {}
    }

    pub fn pinned_free(&self, _pointer: *mut c_void, _stream: vwd_stream) -> Result<()> {
        match *self {}
    }
}
