//! Pinned memory in which kernels report to a call that waits for them.

use super::driver::check;
use crate::core::status::Result;
use cudarc::driver::sys;
use parking_lot::{Mutex, MutexGuard};
use std::ffi::c_void;

pub struct Reports {
    /// One call at a time uses it.
    memory: Mutex<Memory>,
}

pub struct Memory(*mut c_void);

// SAFETY: an address, which every thread may use.
unsafe impl Send for Memory {}

impl Reports {
    const BYTES: usize = 4096;

    /// The context is current.
    pub fn alloc() -> Result<Reports> {
        let mut address = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current.
        check(unsafe { sys::cuMemHostAlloc(&mut address, Reports::BYTES, flags) }, "cuMemHostAlloc")?;
        Ok(Reports { memory: Mutex::new(Memory(address)) })
    }

    pub fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock()
    }

    /// The context is current, and no call uses the memory any more.
    pub fn release(&self) {
        // SAFETY: allocated by `alloc`, freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.lock().0) };
    }
}

impl Memory {
    /// The address of the first of `count` reports.
    pub fn places<T>(&self, count: usize) -> *mut T {
        assert!(count <= Reports::BYTES / size_of::<T>(), "{count} reports");
        self.0.cast()
    }
}
