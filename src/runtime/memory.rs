//! Memory where a session computes.

use super::Session;
use crate::core::status::{Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

/// Zeros at first; given back on drop. It keeps the session alive.
pub struct Memory {
    session: Arc<Session>,
    data: *mut u8,
    bytes: usize,
}

// SAFETY: an allocation whose owner orders what uses it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// The alignment in bytes.
    pub const ALIGNMENT: usize = 256;

    /// `bytes` is above 0; `purpose` is what a message says that they are for.
    pub fn alloc(session: &Arc<Session>, bytes: usize, purpose: &str) -> Result<Memory> {
        let data = match session.cuda() {
            None => {
                // SAFETY: the layout is not empty.
                let data = unsafe { alloc_zeroed(Memory::layout(bytes)) };
                if data.is_null() {
                    return Err(Error::out_of_memory(bytes, purpose));
                }
                data
            }
            Some(cuda) => cuda.alloc(bytes)? as *mut u8,
        };
        let memory = Memory { session: session.clone(), data, bytes };
        if let Some(cuda) = session.cuda() {
            // SAFETY: the memory was allocated above.
            cuda.with_copy_stream(|stream| unsafe { stream.fill(data as u64, 0, bytes) })?;
        }
        Ok(memory)
    }

    /// Sets bytes from an offset on, where there is room for them; nothing else uses that part meanwhile.
    pub fn fill(&self, offset: usize, byte: u8, bytes: usize) -> Result<()> {
        assert!(offset + bytes <= self.bytes, "bytes inside the memory");
        match self.session.cuda() {
            None => {
                // SAFETY: inside the memory, which nothing else uses.
                unsafe { self.at::<u8>(offset).write_bytes(byte, bytes) };
                Ok(())
            }
            Some(cuda) => cuda.with_copy_stream(|stream| {
                // SAFETY: as above.
                unsafe { stream.fill(self.at::<u8>(offset) as u64, byte, bytes) }
            }),
        }
    }

    /// Writes values at an offset in bytes, where there is room for them; nothing else uses that part meanwhile.
    pub fn write<T: Copy>(&self, offset: usize, values: &[T]) -> Result<()> {
        assert!(offset + size_of_val(values) <= self.bytes, "values inside the memory");
        match self.session.cuda() {
            None => {
                // SAFETY: inside the memory, which nothing else uses.
                unsafe { self.at::<T>(offset).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
                Ok(())
            }
            // SAFETY: as above.
            Some(cuda) => cuda.with_copy_stream(|stream| unsafe { stream.write(self.at::<T>(offset) as u64, values) }),
        }
    }

    /// Reads values from an offset in bytes on, whatever their bits; nothing writes that part meanwhile.
    pub fn read<T: Copy>(&self, offset: usize, values: &mut [T]) -> Result<()> {
        assert!(offset + size_of_val(values) <= self.bytes, "values inside the memory");
        match self.session.cuda() {
            None => {
                // SAFETY: inside the memory, which nothing writes.
                unsafe { self.at::<T>(offset).copy_to_nonoverlapping(values.as_mut_ptr(), values.len()) };
                Ok(())
            }
            // SAFETY: as above.
            Some(cuda) => cuda.with_copy_stream(|stream| unsafe { stream.read(self.at::<T>(offset) as u64, values) }),
        }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, Memory::ALIGNMENT).expect("the size of memory")
    }

    pub fn at<T>(&self, offset: usize) -> *mut T {
        self.data.wrapping_add(offset).cast()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.session.cuda() {
            // SAFETY: allocated with this layout.
            None => unsafe { dealloc(self.data, Memory::layout(self.bytes)) },
            Some(cuda) => cuda.free(self.data as u64),
        }
    }
}
