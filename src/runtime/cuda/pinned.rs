//! The pinned pool: host memory that every device can reach, in size classes, handed out again once the stream that used
//! it last has passed.

use super::arena::Allocating;
use super::driver::check;
use crate::core::status::{Code, Error, Result};
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_void;

pub struct PinnedPool {
    limit: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Handed out, by address.
    used: HashMap<usize, Piece>,
    /// Given back; each may still be in use by its stream.
    idle: Vec<Piece>,
    usage: Usage,
}

/// Bytes by their size class.
#[derive(Clone, Copy, Default)]
pub struct Usage {
    pub in_use: u64,
    pub peak: u64,
    pub cached: u64,
}

struct Piece {
    address: *mut c_void,
    bytes: u64,
    /// Recorded when the piece is given back.
    last_use: CUevent,
}

// SAFETY: an address and an event handle; the driver locks.
unsafe impl Send for Piece {}

/// Smallest class: one page of the device's memory management would be wasted on less.
const SMALLEST: u64 = 4096;

/// Largest class: what is larger, such as the host memory of a KV cache, is rarely asked for twice.
const LARGEST: u64 = 64 << 20;

/// Powers of two and the halves between them: at most a third is unused. Beyond the largest, whole pieces of the system's memory.
fn size_class(bytes: u64) -> Option<u64> {
    const PIECE: u64 = 2 << 20;
    if bytes > LARGEST {
        return bytes.checked_next_multiple_of(PIECE).filter(|&n| n <= 1 << 62);
    }
    let above = bytes.max(SMALLEST).checked_next_power_of_two().filter(|&n| n <= 1 << 62)?;
    let between = above / 4 * 3;
    Some(if between >= bytes.max(SMALLEST) { between } else { above })
}

impl PinnedPool {
    pub fn new(limit: u64) -> PinnedPool {
        PinnedPool { limit, state: Mutex::default() }
    }

    /// The context is current.
    pub fn alloc(&self, bytes: u64) -> Result<*mut c_void> {
        let class = match size_class(bytes) {
            Some(class) if bytes > 0 => class,
            _ => return Err(Error::argument("bytes", bytes, "1 to 2^62")),
        };
        let _allocating = Allocating::enter()?;
        let mut state = self.state.lock();
        let in_use = state.usage.in_use;
        if in_use + class > self.limit {
            let text = format!(
                "pinned memory: {bytes} bytes (class {class}) on top of {in_use} in use exceed the limit of {}",
                self.limit
            );
            return Err(Error::new(Code::OutOfMemory, text));
        }
        let piece = match state.take_idle(class) {
            Some(piece) => piece,
            None => Piece::alloc(class).or_else(|error| {
                // The system may be short because of what the pool keeps.
                if state.trim() { Piece::alloc(class) } else { Err(error) }
            })?,
        };
        let address = piece.address;
        state.used.insert(address as usize, piece);
        state.usage.in_use += class;
        state.usage.peak = state.usage.peak.max(state.usage.in_use);
        Ok(address)
    }

    /// The context is current.
    pub fn free(&self, pointer: *mut c_void, stream: CUstream) -> Result<()> {
        if pointer.is_null() {
            return Ok(());
        }
        let mut state = self.state.lock();
        let Some(piece) = state.used.get(&(pointer as usize)) else {
            let expected = "a pointer from vwd_pinned_alloc of this session";
            return Err(Error::argument("pointer", format!("{pointer:p}"), expected));
        };
        // SAFETY: the event lives as long as the piece; the stream is the caller's.
        check(unsafe { sys::cuEventRecord(piece.last_use, stream) }, "cuEventRecord")?;
        state.give_back(pointer);
        Ok(())
    }

    /// Takes memory back that no stream uses any more.
    pub fn free_unused(&self, pointer: *mut c_void) {
        self.state.lock().give_back(pointer);
    }

    pub fn usage(&self) -> Usage {
        self.state.lock().usage
    }

    /// Frees everything. The context is current and its streams have passed.
    pub fn release(&self) {
        let state = std::mem::take(&mut *self.state.lock());
        state.used.into_values().chain(state.idle).for_each(Piece::free);
    }
}

impl State {
    fn give_back(&mut self, pointer: *mut c_void) {
        let Some(piece) = self.used.remove(&(pointer as usize)) else { return };
        self.usage.in_use -= piece.bytes;
        self.usage.cached += piece.bytes;
        self.idle.push(piece);
    }

    /// A piece of this class whose last use is over.
    fn take_idle(&mut self, class: u64) -> Option<Piece> {
        let at = self.idle.iter().position(|piece| piece.bytes == class && piece.is_passed())?;
        self.usage.cached -= class;
        Some(self.idle.swap_remove(at))
    }

    /// Frees the idle pieces whose last use is over; true when there were any.
    fn trim(&mut self) -> bool {
        let before = self.idle.len();
        let (passed, busy): (Vec<_>, Vec<_>) = std::mem::take(&mut self.idle).into_iter().partition(Piece::is_passed);
        self.idle = busy;
        for piece in passed {
            self.usage.cached -= piece.bytes;
            piece.free();
        }
        self.idle.len() < before
    }
}

impl Piece {
    fn alloc(bytes: u64) -> Result<Piece> {
        let (mut address, mut last_use) = (std::ptr::null_mut(), std::ptr::null_mut());
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current.
        unsafe {
            check(sys::cuMemHostAlloc(&mut address, bytes as usize, flags), "cuMemHostAlloc")
                .map_err(|e| Error::new(e.code, format!("{bytes} bytes of pinned memory: {}", e.message)))?;
            let event = sys::cuEventCreate(&mut last_use, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32);
            check(event, "cuEventCreate").inspect_err(|_| {
                let _ = sys::cuMemFreeHost(address);
            })?;
        }
        Ok(Piece { address, bytes, last_use })
    }

    fn is_passed(&self) -> bool {
        // SAFETY: the event lives as long as the piece.
        unsafe { sys::cuEventQuery(self.last_use) == CUresult::CUDA_SUCCESS }
    }

    fn free(self) {
        // SAFETY: made together in alloc, released once.
        unsafe {
            let _ = sys::cuEventDestroy_v2(self.last_use);
            let _ = sys::cuMemFreeHost(self.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_hold_what_is_asked_and_waste_at_most_a_third() {
        for bytes in (1..200_000u64).step_by(37).chain([1 << 20, (1 << 20) + 1, 3 << 40, (3 << 40) + 1]) {
            let class = size_class(bytes).unwrap();
            assert!(class >= bytes, "{bytes} → {class}");
            assert!(class == SMALLEST || class * 2 <= bytes * 3 + 2, "{bytes} → {class}");
        }
        assert_eq!(size_class(u64::MAX), None);
        assert_eq!((size_class((64 << 20) + 1), size_class(5 << 30)), (Some(66 << 20), Some(5 << 30)));
    }
}
