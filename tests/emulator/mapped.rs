//! Memory that a program maps itself, and what its kernels may do there. A write to what can only be read ends the process by SIGSEGV.

use crate::captures;
use crate::cupti::tell;
use crate::device::with;
use crate::driver::{OK, R};
use crate::failures::fails;
use cudarc::driver::sys::*;
use std::ffi::{CStr, c_int, c_ulonglong, c_void};

const GRANULE: usize = 2 << 20;
const NONE: c_int = 0;
const READ: c_int = 1;
const READ_WRITE: c_int = 3;

unsafe extern "C" {
    fn mmap(at: *mut c_void, bytes: usize, access: c_int, flags: c_int, file: c_int, offset: i64) -> *mut c_void;
    fn mprotect(at: *mut c_void, bytes: usize, access: c_int) -> c_int;
    fn munmap(at: *mut c_void, bytes: usize) -> c_int;
}

fn status(done: bool) -> R {
    if done { OK } else { R::CUDA_ERROR_INVALID_VALUE }
}

driver! {
    fn cuMemGetAllocationGranularity(granularity: *mut usize, of: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags) {
        *granularity = GRANULE;
        OK
    }
    fn cuMemAddressReserve(address: *mut CUdeviceptr, bytes: usize, alignment: usize, at: CUdeviceptr, flags: c_ulonglong) {
        const PRIVATE_ANONYMOUS_NORESERVE: c_int = 0x4022;
        let found = mmap(std::ptr::null_mut(), bytes, NONE, PRIVATE_ANONYMOUS_NORESERVE, -1, 0);
        *address = found as CUdeviceptr;
        status(bytes.is_multiple_of(GRANULE) && found as isize != -1)
    }
    fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) { status(munmap(address as *mut c_void, bytes) == 0) }
    // Memory comes with the first byte that is touched.
    fn cuMemCreate(handle: *mut CUmemGenericAllocationHandle, bytes: usize, of: *const CUmemAllocationProp, flags: c_ulonglong) {
        *handle = bytes as CUmemGenericAllocationHandle;
        status(bytes > 0 && bytes.is_multiple_of(GRANULE))
    }
    fn cuMemRelease(handle: CUmemGenericAllocationHandle) { OK }
    fn cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong) {
        status(handle as usize == bytes && with(|device| device.register(address, bytes as u64)))
    }
    fn cuMemUnmap(address: CUdeviceptr, bytes: usize) { status(with(|device| device.unregister(address))) }
    fn cuMemSetAccess(address: CUdeviceptr, bytes: usize, of: *const CUmemAccessDesc, count: usize) {
        use CUmemAccess_flags_enum as Access;
        let access = match (*of).flags {
            Access::CU_MEM_ACCESS_FLAGS_PROT_READ => READ,
            Access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE => READ_WRITE,
            _ => NONE,
        };
        status(count == 1 && mprotect(address as *mut c_void, bytes, access) == 0)
    }
}
