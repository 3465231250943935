//! A device's primary context: the one that the CUDA runtime uses too, so pointers from any library work.

use super::driver::{self, check};
use crate::core::status::{Code, Error, Result};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute_enum as Attribute};
use std::ffi::CStr;
use std::marker::PhantomData;

pub struct Context {
    pub ordinal: i32,
    device: CUdevice,
    raw: CUcontext,
}

// SAFETY: a context handle may be used from any thread; the driver locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn retain(ordinal: i32) -> Result<Context> {
        driver::open()?;
        let count = driver::device_count()?;
        if ordinal >= count {
            let text = format!("CUDA device {ordinal}: the driver has {count} (numbered from 0)");
            return Err(Error::new(Code::Unavailable, text));
        }
        let (mut device, mut raw) = (0, std::ptr::null_mut());
        // SAFETY: the driver is open and the ordinal exists.
        unsafe {
            check(sys::cuDeviceGet(&mut device, ordinal), "cuDeviceGet")?;
            check(sys::cuDevicePrimaryCtxRetain(&mut raw, device), "cuDevicePrimaryCtxRetain")?;
        }
        Ok(Context { ordinal, device, raw })
    }

    /// Makes the context current until the result is dropped; nothing to do where it is current already.
    pub fn enter(&self) -> Result<Entered<'_>> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver is open; the context is retained.
        let pushed = unsafe {
            check(sys::cuCtxGetCurrent(&mut current), "cuCtxGetCurrent")?;
            if current != self.raw {
                check(sys::cuCtxPushCurrent_v2(self.raw), "cuCtxPushCurrent")?;
            }
            current != self.raw
        };
        Ok(Entered { pushed, _context: PhantomData })
    }

    pub fn attribute(&self, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the device exists.
        check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) }, "cuDeviceGetAttribute")?;
        Ok(value)
    }

    pub fn name(&self) -> Result<String> {
        let mut text = [0; 256];
        // SAFETY: the buffer has the length that is passed; the driver terminates the text.
        unsafe {
            check(sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, self.device), "cuDeviceGetName")?;
            Ok(CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once. A failure leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// The context is current on this thread.
pub struct Entered<'c> {
    pushed: bool,
    // Tied to the thread, and no longer than the context.
    _context: PhantomData<(&'c Context, *mut ())>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pushed by enter on this thread.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
