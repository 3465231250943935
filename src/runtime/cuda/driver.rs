//! The gate to the driver. cudarc panics when libcuda is absent, so everything asks here first.

use crate::core::status::{Code, Error, Result};
use cudarc::driver::sys::{self, CUresult};
use once_cell::sync::OnceCell;
use std::ffi::CStr;

/// Opens libcuda and initialises it, once for the process; a failure is tried again by the next session.
pub fn open() -> Result<()> {
    static DRIVER: OnceCell<()> = OnceCell::new();
    DRIVER.get_or_try_init(|| {
        // SAFETY: looks for the library by name.
        if !unsafe { sys::is_culib_present() } {
            let text = "no CUDA driver: libcuda.so.1 was not found (a CPU session needs none)";
            return Err(Error::new(Code::Unavailable, text));
        }
        // SAFETY: the library is present.
        check(unsafe { sys::cuInit(0) }, "cuInit").map_err(|e| e.with_code(Code::Unavailable))
    })?;
    Ok(())
}

/// Turns a driver's answer into a result; `call` names what was asked.
#[inline]
pub fn check(result: CUresult, call: &str) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(result, call)) }
}

#[cold]
fn failure(result: CUresult, call: &str) -> Error {
    let code = if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY { Code::OutOfMemory } else { Code::Driver };
    let mut text = std::ptr::null();
    // SAFETY: the driver is open; it writes a static string or NULL.
    let words = unsafe {
        let _ = sys::cuGetErrorString(result, &mut text);
        if text.is_null() { "unknown error".into() } else { CStr::from_ptr(text).to_string_lossy() }
    };
    Error::new(code, format!("{call}: {words} (CUDA error {})", result as u32))
}

/// Devices that the process may use.
pub fn device_count() -> Result<i32> {
    let mut count = 0;
    // SAFETY: the driver is open.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount")?;
    Ok(count)
}
