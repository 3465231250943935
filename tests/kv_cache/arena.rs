//! Memory for the tensors of calls, which the host and the device reach.

use super::tensor;
use crate::support::*;
use std::cell::Cell;
use std::ffi::c_void;
use vanward::abi::*;
use vanward::capi::*;

/// Memory that both the host and the session's device reach, for the tensors of one call after the other.
pub struct Arena<'b> {
    backend: &'b Backend,
    base: *mut c_void,
    used: Cell<usize>,
}

const ARENA_BYTES: usize = 1 << 22;

impl<'b> Arena<'b> {
    pub fn new(backend: &'b Backend) -> Arena<'b> {
        let mut base = std::ptr::null_mut();
        // SAFETY: the result has a place.
        assert_ok(unsafe { vwd_pinned_alloc(backend.session(), ARENA_BYTES as u64, &mut base) });
        Arena { backend, base, used: Cell::new(0) }
    }

    /// What was placed is no more; no call uses it.
    pub fn clear(&self) {
        self.used.set(0);
    }

    pub fn place<T: Copy>(&self, values: &[T]) -> Placed<T> {
        let at = self.used.get().next_multiple_of(64);
        self.used.set(at + size_of_val(values));
        assert!(self.used.get() <= ARENA_BYTES);
        let data = self.base.cast::<u8>().wrapping_add(at).cast::<T>();
        // SAFETY: inside the arena, and nobody else's.
        unsafe { data.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Placed { data, len: values.len(), device: self.backend.device() }
    }
}

impl Drop for Arena<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by this session; calls that used it have passed.
        unsafe { vwd_pinned_free(self.backend.session(), self.base, self.backend.stream()) };
    }
}

/// Values in an arena.
pub struct Placed<T> {
    data: *mut T,
    len: usize,
    device: (i32, i32),
}

impl<T: Copy> Placed<T> {
    pub fn tensor(&self, dtype: DType, shape: &[usize]) -> vwd_tensor {
        // SAFETY: placed in the arena, which outlives it here.
        let values = unsafe { std::slice::from_raw_parts(self.data, self.len) };
        let (device_type, device_id) = self.device;
        vwd_tensor { device_type, device_id, ..tensor(values, dtype, shape) }
    }

    /// As calls that have passed left them.
    pub fn read(&self) -> Vec<T> {
        // SAFETY: placed in the arena. No reference is kept across calls, which write behind the compiler's back.
        (0..self.len).map(|n| unsafe { self.data.add(n).read_volatile() }).collect()
    }

    #[allow(dead_code, reason = "of the tests in which calls are replayed")]
    pub fn write(&self, values: &[T]) {
        assert_eq!(values.len(), self.len);
        // SAFETY: as above.
        values.iter().enumerate().for_each(|(n, &value)| unsafe { self.data.add(n).write_volatile(value) });
    }
}
