//! Where a test runs: a session, and memory that it can compute on.

use super::args;
use super::session::{Session, assert_ok};
use cudarc::driver::{result, sys};
use std::alloc::Layout;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use vanward::abi::*;
use vanward::capi::*;

pub struct Backend {
    // Before the device, whose context it uses: fields drop in order.
    session: Session,
    device: Device,
    /// Lines of the session's log, where a variant is forced.
    log: Option<Box<Mutex<Vec<String>>>>,
}

enum Device {
    Cpu,
    Cuda(Cuda),
}

/// The primary context of device 0 and a stream in it; both live until the process ends.
pub struct Cuda {
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: both handles may be used from any thread.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

/// A session's log, whose context is a `Mutex<Vec<String>>`.
unsafe extern "C" fn collect(lines: *mut c_void, _level: u32, text: *const c_char) {
    // SAFETY: the backend keeps the lines longer than the session; the text is NUL-terminated.
    let (lines, text) = unsafe { (&*lines.cast::<Mutex<Vec<String>>>(), CStr::from_ptr(text)) };
    lines.lock().unwrap().push(text.to_string_lossy().into_owned());
}

impl Backend {
    pub fn cpu(threads: u32) -> Backend {
        Backend::of(Session::cpu(threads))
    }

    /// The backend of a session on the CPU.
    pub fn of(session: Session) -> Backend {
        Backend { session, device: Device::Cpu, log: None }
    }

    /// CUDA device 0, or why it cannot be used.
    pub fn cuda() -> Result<Backend, String> {
        let options = vwd_session_options { device: VWD_DEVICE_CUDA, ..args() };
        let session = Session::create(&options).map_err(|(_, text)| text)?;
        // A session exists, so the driver does.
        let device = Cuda::open().map_err(|error| format!("the driver refused: {error:?}"))?;
        Ok(Backend { session, device: Device::Cuda(device), log: None })
    }

    /// The same device in a session that forces a variant, "attention=decode128"; on the CPU, which has no variants, another session.
    /// `None` where the device's compute capability is not among those that the variant needs.
    pub fn forcing(&self, variant: &str, capabilities: std::ops::RangeInclusive<u32>) -> Option<Backend> {
        if !self.is_cuda() {
            return Some(Backend::cpu(2));
        }
        if !capabilities.contains(&self.details().compute_capability) {
            return None;
        }
        let variants = std::ffi::CString::new(variant).expect("no NUL");
        let log = Box::new(Mutex::new(vec![]));
        let options = vwd_session_options {
            device: VWD_DEVICE_CUDA,
            variants: variants.as_ptr(),
            log: Some(collect),
            log_context: (&raw const *log).cast_mut().cast(),
            log_level: VWD_LOG_INFO,
            ..args()
        };
        let session = Session::create(&options).unwrap_or_else(|(status, text)| panic!("{variant}: {status}: {text}"));
        Some(Backend { session, device: Device::Cuda(Cuda::open().expect("a stream")), log: Some(log) })
    }

    /// Checks in the log of a session that forces variants that these ran, and no others of their families.
    pub fn assert_ran(&self, forced: &str) {
        let Some(log) = &self.log else { return };
        let lines = log.lock().unwrap();
        for (family, variant) in forced.split(',').map(|entry| entry.split_once('=').expect("family=variant")) {
            let begin = format!("first use of variant {family}=");
            let ran: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix(&begin)).collect();
            assert_eq!(ran, [variant], "variants of {family} that ran");
        }
    }

    /// The same device in a session that checks contents.
    pub fn checking(&self) -> Backend {
        let (device, threads) = if self.is_cuda() { (VWD_DEVICE_CUDA, 0) } else { (VWD_DEVICE_CPU, 2) };
        let options = vwd_session_options { device, threads, check: VWD_CHECK_CONTENTS as u64, ..args() };
        let session = Session::create(&options).unwrap_or_else(|(status, text)| panic!("{status}: {text}"));
        let device = if self.is_cuda() { Device::Cuda(Cuda::open().expect("a stream")) } else { Device::Cpu };
        Backend { session, device, log: None }
    }

    /// The same CUDA device in a session that delays what overlaps by random times of up to so long.
    pub fn delaying(&self, microseconds: u64) -> Backend {
        let options = vwd_session_options { device: VWD_DEVICE_CUDA, delay_microseconds: microseconds, ..args() };
        let session = Session::create(&options).unwrap_or_else(|(status, text)| panic!("{status}: {text}"));
        Backend { session, device: Device::Cuda(Cuda::open().expect("a stream")), log: None }
    }

    /// The same device in a batch-invariant session, made for so many sequences.
    pub fn invariant(&self, invariant_batch: u64) -> Backend {
        let (device, threads) = if self.is_cuda() { (VWD_DEVICE_CUDA, 0) } else { (VWD_DEVICE_CPU, 2) };
        // What the other sequences of a large batch leave in scratch.
        let options = vwd_session_options { device, threads, invariant_batch, scratch_bytes: 1 << 28, ..args() };
        let session = Session::create(&options).unwrap_or_else(|(status, text)| panic!("{status}: {text}"));
        let device = if self.is_cuda() { Device::Cuda(Cuda::open().expect("a stream")) } else { Device::Cpu };
        Backend { session, device, log: None }
    }

    /// The same CUDA device in a session whose streams have so many bytes of scratch at first.
    pub fn with_scratch(&self, scratch_bytes: u64) -> Backend {
        let options = vwd_session_options { device: VWD_DEVICE_CUDA, scratch_bytes, ..args() };
        let session = Session::create(&options).unwrap_or_else(|(status, text)| panic!("{status}: {text}"));
        Backend { session, device: Device::Cuda(Cuda::open().expect("a stream")), log: None }
    }

    pub fn is_cuda(&self) -> bool {
        matches!(self.device, Device::Cuda(_))
    }

    /// How often to do again what a GPU does so many times: an emulated device takes thousands of times as long, and a GPU on which a tool looks at
    /// every access, for which `VANWARD_FEW_REPLAYS=1` is set, hundreds of times.
    pub fn times(&self, on_a_gpu: usize) -> usize {
        let name = self.details().device_name;
        let is_emulated = name.iter().zip(b"emulated\0").all(|(&a, &b)| a as u8 == b);
        let is_slow = is_emulated || std::env::var_os("VANWARD_FEW_REPLAYS").is_some_and(|value| value == "1");
        if self.is_cuda() && is_slow { (on_a_gpu / 100).max(5).min(on_a_gpu) } else { on_a_gpu }
    }

    pub fn session(&self) -> *const vwd_session {
        self.session.raw()
    }

    pub fn stream(&self) -> vwd_stream {
        match &self.device {
            Device::Cpu => std::ptr::null_mut(),
            Device::Cuda(cuda) => cuda.stream.cast(),
        }
    }

    /// DLPack's device type and id of tensors that live here.
    pub fn device(&self) -> (i32, i32) {
        match self.device {
            Device::Cpu => (1, 0),
            Device::Cuda(_) => (2, 0),
        }
    }

    /// Makes the device's context current on this thread.
    pub fn enter(&self) {
        if let Device::Cuda(cuda) = &self.device {
            cuda.enter();
        }
    }

    /// The call was accepted; waits until it is done.
    #[track_caller]
    pub fn finish(&self, status: vwd_status) {
        assert_ok(status);
        if let Device::Cuda(cuda) = &self.device {
            cuda.enter();
            // SAFETY: the stream lives as long as the backend.
            unsafe { result::stream::synchronize(cuda.stream) }.expect("the kernels ran");
        }
    }

    /// Copies bytes from where the session computes.
    pub fn read(&self, address: usize, bytes: &mut [u8]) {
        match &self.device {
            // SAFETY: the caller names memory of the session's that has so many bytes.
            Device::Cpu => unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(address as *const u8, bytes.len()) },
            Device::Cuda(cuda) => {
                cuda.enter();
                // SAFETY: as above.
                unsafe { result::memcpy_dtoh_sync(bytes, address as sys::CUdeviceptr) }.expect("download");
            }
        }
    }

    /// What `vwd_session_info` tells.
    pub fn details(&self) -> vwd_session_details {
        self.session.details()
    }

    /// Copies bytes to memory of that kind; as [`Backend::place`].
    pub fn place_in(&self, place: Place, bytes: &[u8]) -> Memory<'_> {
        match place {
            Place::Session => self.place(bytes),
            Place::Host => Memory::host(bytes),
            Place::Pinned => Memory::pinned(&self.session, bytes),
        }
    }

    /// Copies bytes to where the session computes. Aligned to 64 bytes, and no longer than they are.
    pub fn place(&self, bytes: &[u8]) -> Memory<'_> {
        match &self.device {
            Device::Cpu => Memory::host(bytes),
            Device::Cuda(cuda) => {
                cuda.enter();
                // SAFETY: the context is current; the new memory holds all the bytes.
                unsafe {
                    let address = result::malloc_sync(bytes.len().max(1)).expect("device memory");
                    result::memcpy_htod_sync(address, bytes).expect("upload");
                    Memory::Cuda { cuda, address, length: bytes.len() }
                }
            }
        }
    }
}

impl Cuda {
    fn open() -> Result<Cuda, result::DriverError> {
        result::init()?;
        let device = result::device::get(0)?;
        // SAFETY: the device exists.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        let cuda = Cuda { context, stream: std::ptr::null_mut() };
        cuda.enter();
        // A blocking stream, which starts after the uploads: those go through the default stream and may still be on
        // their way when they return.
        let stream = result::stream::create(result::stream::StreamKind::Default)?;
        Ok(Cuda { stream, ..cuda })
    }

    /// Makes the context current on this thread.
    fn enter(&self) {
        // SAFETY: the context is retained until the process ends.
        unsafe { result::ctx::set_current(self.context) }.expect("the context is valid");
    }
}

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// Where the session computes.
    Session,
    Host,
    /// From `vwd_pinned_alloc`.
    Pinned,
}

impl Place {
    /// DLPack's device type and id.
    pub fn device(self, backend: &Backend) -> (i32, i32) {
        match self {
            Place::Session => backend.device(),
            Place::Host => (1, 0),
            Place::Pinned => (3, 0),
        }
    }
}

pub enum Memory<'b> {
    Host { data: *mut u8, layout: Layout, length: usize },
    Pinned { session: &'b Session, data: *mut u8, length: usize },
    Cuda { cuda: &'b Cuda, address: sys::CUdeviceptr, length: usize },
}

// SAFETY: an allocation of its own; tests read it only when no call writes it.
unsafe impl Send for Memory<'_> {}
// SAFETY: as above.
unsafe impl Sync for Memory<'_> {}

impl Memory<'_> {
    fn host(bytes: &[u8]) -> Memory<'static> {
        let layout = Layout::from_size_align(bytes.len().max(1), 64).unwrap();
        // SAFETY: the layout is not empty, and the new memory holds all the bytes.
        unsafe {
            let data = std::alloc::alloc(layout);
            assert!(!data.is_null());
            data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Memory::Host { data, layout, length: bytes.len() }
        }
    }

    fn pinned<'s>(session: &'s Session, bytes: &[u8]) -> Memory<'s> {
        let mut data = std::ptr::null_mut();
        // SAFETY: the result has a place, and the new memory holds all the bytes.
        unsafe {
            assert_ok(vwd_pinned_alloc(session.raw(), bytes.len().max(1) as u64, &mut data));
            data.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
        Memory::Pinned { session, data: data.cast(), length: bytes.len() }
    }

    pub fn address(&self) -> usize {
        match self {
            Memory::Host { data, .. } | Memory::Pinned { data, .. } => *data as usize,
            Memory::Cuda { address, .. } => *address as usize,
        }
    }

    /// Replaces the first bytes.
    pub fn write(&self, bytes: &[u8]) {
        match self {
            Memory::Host { data, length, .. } | Memory::Pinned { data, length, .. } => {
                assert!(bytes.len() <= *length);
                // SAFETY: they fit.
                unsafe { data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            }
            Memory::Cuda { cuda, address, length } => {
                assert!(bytes.len() <= *length);
                cuda.enter();
                // SAFETY: they fit.
                unsafe { result::memcpy_htod_sync(*address, bytes) }.expect("upload");
            }
        }
    }

    pub fn read(&self) -> Vec<u8> {
        match self {
            Memory::Host { data, length, .. } | Memory::Pinned { data, length, .. } => {
                // SAFETY: allocated with this length, and written as a whole.
                unsafe { std::slice::from_raw_parts(*data, *length) }.to_vec()
            }
            Memory::Cuda { cuda, address, length } => {
                cuda.enter();
                let mut bytes = vec![0; *length];
                // SAFETY: the allocation has this length.
                unsafe { result::memcpy_dtoh_sync(&mut bytes, *address) }.expect("download");
                bytes
            }
        }
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        match self {
            // SAFETY: allocated with this layout.
            Memory::Host { data, layout, .. } => unsafe { std::alloc::dealloc(*data, *layout) },
            // SAFETY: allocated by this session; calls that read it have passed.
            Memory::Pinned { session, data, .. } => unsafe {
                vwd_pinned_free(session.raw(), data.cast(), std::ptr::null_mut());
            },
            Memory::Cuda { cuda, address, .. } => {
                cuda.enter();
                // SAFETY: allocated by malloc_sync; a failure here would hide the test's own.
                let _ = unsafe { result::free_sync(*address) };
            }
        }
    }
}
