//! The host memory of a layer, pinned where a device reads it.

use crate::core::status::Result;
use crate::runtime::Session;
use std::sync::Arc;

/// Pinned memory from a session's pool, given back on drop: by then no stream uses it.
pub struct Pinned {
    session: Arc<Session>,
    data: *mut u8,
}

// SAFETY: the memory is an allocation that nothing else uses.
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
        self.session.pinned_free_unused(self.data.cast());
    }
}
