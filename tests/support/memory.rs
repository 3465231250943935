//! Memory that is there in name only, and how much of its stack a call touches.

use std::ffi::c_void;

/// Memory that exists once it is touched.
pub struct Mapping {
    pub start: *mut c_void,
    pub bytes: usize,
}

impl Mapping {
    pub fn new(bytes: usize) -> Mapping {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Mapping { start, bytes }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by new.
        unsafe { libc::munmap(self.start, self.bytes) };
    }
}

/// Bytes of the caller's stack that a call on a CPU session may use.
pub const STACK: usize = 48 << 10;

/// Bytes of stack that some work touches, beside what every thread does: it runs on a stack of a known colour.
pub fn stack_of(work: impl FnOnce()) -> usize {
    touched(work).saturating_sub(touched(|| ()))
}

fn touched<F: FnOnce()>(work: F) -> usize {
    const COLOUR: u8 = 0xa5;
    extern "C" fn start<F: FnOnce()>(work: *mut c_void) -> *mut c_void {
        // SAFETY: what the thread was given, for it alone.
        unsafe { (*work.cast::<Option<F>>()).take().expect("once")() };
        std::ptr::null_mut()
    }
    let stack = Mapping::new(1 << 20);
    let mut work = Some(work);
    // SAFETY: the thread ends before its stack and its work do.
    unsafe {
        stack.start.cast::<u8>().write_bytes(COLOUR, stack.bytes);
        let mut attributes = std::mem::zeroed();
        assert_eq!(libc::pthread_attr_init(&mut attributes), 0);
        assert_eq!(libc::pthread_attr_setstack(&mut attributes, stack.start, stack.bytes), 0);
        let mut thread = std::mem::zeroed();
        assert_eq!(libc::pthread_create(&mut thread, &attributes, start::<F>, (&raw mut work).cast()), 0);
        assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
        libc::pthread_attr_destroy(&mut attributes);
        let bytes = std::slice::from_raw_parts(stack.start.cast::<u8>(), stack.bytes);
        stack.bytes - bytes.iter().position(|&byte| byte != COLOUR).unwrap_or(stack.bytes)
    }
}
