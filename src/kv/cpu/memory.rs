//! The slots of a layer, given back on drop.

use crate::core::status::{Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};

/// The memory of a layer's slots.
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
