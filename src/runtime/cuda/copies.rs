//! Copies that the copy engines do: many in one call where the driver has that (CUDA 12.8), else one by one.

use super::driver::check;
use crate::core::status::Result;
use cudarc::driver::sys::{self, CUdeviceptr, CUresult, CUstream};
use std::ffi::c_void;

/// cuMemcpyBatchAsync as CUDA 12.8 has it.
type BatchAsync = unsafe extern "C" fn(
    targets: *const CUdeviceptr,
    sources: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    attributes: *const Attributes,
    attribute_indices: *const usize,
    attribute_count: usize,
    failed: *mut usize,
    stream: CUstream,
) -> CUresult;

/// CUmemcpyAttributes.
#[repr(C)]
struct Attributes {
    source_access: u32,
    /// Type and id; no hint is given.
    source_hint: [i32; 2],
    target_hint: [i32; 2],
    flags: u32,
}

/// CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there.
const IN_STREAM_ORDER: Attributes = Attributes { source_access: 1, source_hint: [0; 2], target_hint: [0; 2], flags: 0 };

pub struct Copies {
    batch: Option<BatchAsync>,
}

impl Copies {
    /// Asks the driver, which is open, what it has.
    pub fn find() -> Copies {
        const CUDA_12_8: i32 = 12080;
        let (mut address, mut found) = (std::ptr::null_mut::<c_void>(), unknown());
        // SAFETY: the name is NUL-terminated, and both results have a place.
        let result = unsafe {
            let name = c"cuMemcpyBatchAsync".as_ptr();
            sys::cuGetProcAddress_v2(name, &mut address, CUDA_12_8, 0, &mut found)
        };
        // SAFETY: what the driver gives under that name and version has this type; NULL is None.
        let batch = unsafe { std::mem::transmute::<*mut c_void, Option<BatchAsync>>(address) };
        Copies { batch: batch.filter(|_| result == CUresult::CUDA_SUCCESS) }
    }

    /// Whether many copies take one call on this stream: not the legacy default stream, and not in a capture.
    pub fn are_batched(&self, stream: CUstream, is_capturing: bool) -> bool {
        const LEGACY: usize = 1;
        self.batch.is_some() && !is_capturing && stream as usize > LEGACY
    }

    /// Enqueues copies of `bytes` each.
    ///
    /// # Safety
    /// Source and target of each are memory that the device reaches, valid until the stream has passed; the context is current.
    pub unsafe fn enqueue(
        &self,
        targets: &[CUdeviceptr],
        sources: &[CUdeviceptr],
        bytes: usize,
        stream: CUstream,
        batched: bool,
    ) -> Result<()> {
        assert!(targets.len() == sources.len() && targets.len() <= MOST_COPIES);
        if let (Some(batch), true) = (self.batch, batched && targets.len() > 1) {
            let (sizes, mut failed) = ([bytes; MOST_COPIES], 0);
            // SAFETY: as many of each as are counted, and one attribute from copy 0 on; the caller vouches for the memory.
            let result = unsafe {
                let (to, from, count) = (targets.as_ptr(), sources.as_ptr(), targets.len());
                batch(to, from, sizes.as_ptr(), count, &IN_STREAM_ORDER, &0, 1, &mut failed, stream)
            };
            return check(result, "cuMemcpyBatchAsync");
        }
        for (&target, &source) in targets.iter().zip(sources) {
            // SAFETY: as above.
            check(unsafe { sys::cuMemcpyAsync(target, source, bytes, stream) }, "cuMemcpyAsync")?;
        }
        Ok(())
    }
}

fn unknown() -> sys::CUdriverProcAddressQueryResult {
    sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
}

/// The most copies that one call enqueues.
pub const MOST_COPIES: usize = 512;
