//! Memory that is there in name only, memory that cannot be written, and how much of its stack a call touches.

use super::backend::Backend;
use cudarc::driver::sys;
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

/// Memory where the session computes, which can be read alone: a write ends the process on the CPU, and is an illegal address on CUDA.
pub enum ReadOnly {
    Host(Mapping),
    Cuda { address: sys::CUdeviceptr, bytes: usize },
}

impl ReadOnly {
    pub fn new(backend: &Backend, bytes: usize) -> ReadOnly {
        if !backend.is_cuda() {
            let mapping = Mapping::new(bytes);
            // SAFETY: mapped by new.
            assert_eq!(unsafe { libc::mprotect(mapping.start, mapping.bytes, libc::PROT_READ) }, 0);
            return ReadOnly::Host(mapping);
        }
        // SAFETY: plain data, valid when zero; pointers to what the functions read and write.
        unsafe {
            backend.enter();
            let location =
                sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, ..std::mem::zeroed() };
            let of = sys::CUmemAllocationProp {
                type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
                location,
                ..std::mem::zeroed()
            };
            let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
            let (mut granule, mut address, mut memory) = (0, 0, 0);
            sys::cuMemGetAllocationGranularity(&mut granule, &of, least).result().expect("its granularity");
            let bytes = bytes.next_multiple_of(granule);
            sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0).result().expect("addresses");
            sys::cuMemCreate(&mut memory, bytes, &of, 0).result().expect("memory");
            sys::cuMemMap(address, bytes, 0, memory, 0).result().expect("a mapping");
            sys::cuMemRelease(memory).result().expect("the mapping keeps it");
            let access =
                sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ };
            sys::cuMemSetAccess(address, bytes, &access, 1).result().expect("access to read");
            ReadOnly::Cuda { address, bytes }
        }
    }

    pub fn start(&self) -> *mut c_void {
        match self {
            ReadOnly::Host(mapping) => mapping.start,
            ReadOnly::Cuda { address, .. } => *address as *mut c_void,
        }
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        if let ReadOnly::Cuda { address, bytes } = *self {
            // SAFETY: mapped by new; a failure here would hide the test's own.
            unsafe {
                let _ = sys::cuMemUnmap(address, bytes);
                let _ = sys::cuMemAddressFree(address, bytes);
            }
        }
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
