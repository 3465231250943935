//! Device memory that outlives the call that fills it.

use super::arena::Allocating;
use super::driver::check;
use crate::core::status::{Error, Result};
use cudarc::driver::sys::{self, CUdeviceptr, CUstream};

/// Memory with these values, which are there on return, whatever is captured meanwhile. The context is current.
pub fn upload(values: &[f32]) -> Result<CUdeviceptr> {
    let _allocating = Allocating::enter()?;
    let bytes = size_of_val(values);
    let mut address = 0;
    // SAFETY: the context is current.
    unsafe { check(sys::cuMemAlloc_v2(&mut address, bytes.max(1)), "cuMemAlloc") }
        .map_err(|e| Error::new(e.code, format!("{bytes} bytes on the device: {}", e.message)))?;
    fill(address, values).inspect_err(|_| free(address))?;
    Ok(address)
}

/// On a stream of its own, which no capture knows.
fn fill(address: CUdeviceptr, values: &[f32]) -> Result<()> {
    let mut stream: CUstream = std::ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the context is current; the memory was allocated for these values, which outlive the copy: it has ended on return.
    unsafe {
        check(sys::cuStreamCreate(&mut stream, flags), "cuStreamCreate")?;
        let copied = sys::cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), size_of_val(values), stream);
        let copied = check(copied, "cuMemcpyHtoDAsync")
            .and_then(|()| check(sys::cuStreamSynchronize(stream), "cuStreamSynchronize"));
        let _ = sys::cuStreamDestroy_v2(stream);
        copied
    }
}

/// The context is current, and nothing uses the memory any more.
pub fn free(address: CUdeviceptr) {
    let _allocating = Allocating::enter();
    // SAFETY: allocated by `upload`, freed once.
    let _ = unsafe { sys::cuMemFree_v2(address) };
}
