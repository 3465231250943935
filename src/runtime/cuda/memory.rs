//! Device memory that outlives the call that fills it.

use super::arena::Allocating;
use super::driver::check;
use crate::abi::vwd_stream;
use crate::core::status::{Error, Result};
use cudarc::driver::sys::{self, CUdeviceptr, CUstream};

/// Memory with these values, which are there on return, whatever is captured meanwhile. The context is current.
pub fn upload<T: Copy>(values: &[T]) -> Result<CUdeviceptr> {
    let address = alloc(size_of_val(values))?;
    // SAFETY: allocated for them.
    with_copy_stream(|stream| unsafe { stream.write(address, values) }).inspect_err(|_| free(address))?;
    Ok(address)
}

/// The context is current.
pub fn alloc(bytes: usize) -> Result<CUdeviceptr> {
    let _allocating = Allocating::enter()?;
    let mut address = 0;
    // SAFETY: the context is current.
    unsafe { check(sys::cuMemAlloc_v2(&mut address, bytes.max(1)), "cuMemAlloc") }
        .map_err(|e| Error::new(e.code, format!("{bytes} bytes on the device: {}", e.message)))?;
    Ok(address)
}

/// The context is current, and nothing uses the memory any more.
pub fn free(address: CUdeviceptr) {
    let _allocating = Allocating::enter();
    // SAFETY: allocated by `alloc`, freed once.
    let _ = unsafe { sys::cuMemFree_v2(address) };
}

/// A stream for some copies, and for kernels between them: no capture records it, and it waits for no other stream.
pub struct CopyStream {
    stream: CUstream,
}

/// The work is done on return. The context is current.
pub fn with_copy_stream(work: impl FnOnce(&CopyStream) -> Result<()>) -> Result<()> {
    let _allocating = Allocating::enter()?;
    let mut stream: CUstream = std::ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the context is current.
    check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "cuStreamCreate")?;
    let done = work(&CopyStream { stream });
    // SAFETY: created above, destroyed once; what it did has ended.
    unsafe {
        let passed = check(sys::cuStreamSynchronize(stream), "cuStreamSynchronize");
        let _ = sys::cuStreamDestroy_v2(stream);
        done.and(passed)
    }
}

impl CopyStream {
    /// For kernels between the copies.
    pub fn raw(&self) -> vwd_stream {
        self.stream.cast()
    }

    /// Copies values to the device's memory.
    ///
    /// # Safety
    /// There is room for them, which nothing else uses meanwhile.
    pub unsafe fn write<T: Copy>(&self, to: CUdeviceptr, values: &[T]) -> Result<()> {
        // SAFETY: the caller vouches for the memory; the values outlive the copy, which has ended when they are given back.
        unsafe {
            let bytes = size_of_val(values);
            check(sys::cuMemcpyHtoDAsync_v2(to, values.as_ptr().cast(), bytes, self.stream), "cuMemcpyHtoDAsync")?;
            check(sys::cuStreamSynchronize(self.stream), "cuStreamSynchronize")
        }
    }

    /// Copies values from the device's memory.
    ///
    /// # Safety
    /// There are so many of that type, whatever their bits.
    pub unsafe fn read<T: Copy>(&self, from: CUdeviceptr, values: &mut [T]) -> Result<()> {
        // SAFETY: as above.
        unsafe {
            let bytes = size_of_val(values);
            check(
                sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), from, bytes, self.stream),
                "cuMemcpyDtoHAsync",
            )?;
            check(sys::cuStreamSynchronize(self.stream), "cuStreamSynchronize")
        }
    }

    /// Sets bytes of the device's memory.
    ///
    /// # Safety
    /// As for [`CopyStream::write`].
    pub unsafe fn fill(&self, to: CUdeviceptr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller vouches for the memory.
        check(unsafe { sys::cuMemsetD8Async(to, byte, bytes, self.stream) }, "cuMemsetD8Async")
    }
}
