//! Host memory that a CPU session hands out in place of pinned memory.

use crate::core::status::{Code, Error, Result};
use parking_lot::Mutex;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::c_void;

pub const ALIGNMENT: usize = 4096;

pub struct HostMemory {
    limit: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pieces: HashMap<usize, Layout>,
    usage: Usage,
}

#[derive(Clone, Copy, Default)]
pub struct Usage {
    pub in_use: u64,
    pub peak: u64,
}

impl HostMemory {
    pub fn new(limit: u64) -> HostMemory {
        HostMemory { limit, state: Mutex::default() }
    }

    pub fn alloc(&self, bytes: u64) -> Result<*mut c_void> {
        let layout = usize::try_from(bytes).ok().and_then(|n| Layout::from_size_align(n, ALIGNMENT).ok());
        let layout = match layout {
            Some(layout) if layout.size() > 0 => layout,
            _ => return Err(Error::argument("bytes", bytes, "1 to 2^63 − 4096")),
        };
        let mut state = self.state.lock();
        let in_use = state.usage.in_use;
        if in_use.checked_add(bytes).is_none_or(|total| total > self.limit) {
            let text =
                format!("pinned memory: {bytes} bytes on top of {in_use} in use exceed the limit of {}", self.limit);
            return Err(Error::new(Code::OutOfMemory, text));
        }
        // SAFETY: the layout's size is not zero.
        let pointer = unsafe { alloc(layout) };
        if pointer.is_null() {
            return Err(Error::out_of_memory(layout.size(), "vwd_pinned_alloc"));
        }
        state.pieces.insert(pointer as usize, layout);
        state.usage.in_use += bytes;
        state.usage.peak = state.usage.peak.max(state.usage.in_use);
        Ok(pointer.cast())
    }

    pub fn free(&self, pointer: *mut c_void) -> Result<()> {
        if pointer.is_null() {
            return Ok(());
        }
        let mut state = self.state.lock();
        let Some(layout) = state.pieces.remove(&(pointer as usize)) else {
            let expected = "a pointer from vwd_pinned_alloc of this session";
            return Err(Error::argument("pointer", format!("{pointer:p}"), expected));
        };
        state.usage.in_use -= layout.size() as u64;
        // SAFETY: allocated above with this layout, removed from the table just now.
        unsafe { dealloc(pointer.cast(), layout) };
        Ok(())
    }

    pub fn usage(&self) -> Usage {
        self.state.lock().usage
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        for (pointer, layout) in self.state.get_mut().pieces.drain() {
            // SAFETY: allocated by alloc with this layout and not freed since.
            unsafe { dealloc(pointer as *mut u8, layout) };
        }
    }
}
