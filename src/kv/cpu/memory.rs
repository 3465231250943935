//! Memory of the cache, given back on drop.

use crate::core::status::{Error, Result};
use crate::runtime::Session;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

/// Slots.
pub struct Pool {
    data: *mut u8,
    layout: Layout,
}

impl Pool {
    pub fn alloc(bytes: usize) -> Result<Pool> {
        const ALIGNMENT: usize = 4096;
        let none = || Error::out_of_memory(bytes, "slots of a KV cache");
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| none())?;
        // SAFETY: a cache has slots, and a slot has bytes.
        let data = unsafe { alloc_zeroed(layout) };
        if data.is_null() { Err(none()) } else { Ok(Pool { data, layout }) }
    }

    pub fn data(&self) -> *mut u8 {
        self.data
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.data, self.layout) }
    }
}

/// Pinned memory of a session.
pub struct Pinned {
    session: Arc<Session>,
    data: *mut u8,
}

// SAFETY: an allocation of its own.
unsafe impl Send for Pinned {}

impl Pinned {
    pub fn alloc(session: &Arc<Session>, bytes: u64) -> Result<Pinned> {
        Ok(Pinned { session: session.clone(), data: session.pinned_alloc(bytes)?.cast() })
    }

    pub fn data(&self) -> *mut u8 {
        self.data
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // It came from this session: nothing can be refused.
        let _ = self.session.pinned_free(self.data.cast(), std::ptr::null_mut());
    }
}
