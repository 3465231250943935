//! The CUDA backend's resources: the primary context, the kernels, scratch arenas, the pinned pool and the session's own
//! streams. What a call needs is made at session creation, but for the scratch arena of its stream.

mod arena;
mod branch;
mod context;
mod copies;
mod delay;
mod driver;
mod family;
mod graph;
mod interval;
pub mod layout;
mod memory;
mod module;
mod pinned;
mod reports;
mod side_stream;
pub mod tensor_map;
pub mod variants;
pub mod views;

pub use arena::Parts;
pub use branch::Branch;
pub use copies::MOST_COPIES;
pub(crate) use family::source;
pub use family::{Family, Kernels, Modules, Source, Target};
pub use graph::Graph;
pub use interval::Interval;
pub use memory::CopyStream;
pub use module::{Grid, Image, Kernel, Kind};
pub use side_stream::SideStream;

use super::Options;
use super::log::{Level, Log};
use crate::abi::{VWD_DEVICE_CUDA, vwd_session_details, vwd_stream};
use crate::core::status::{Code, Error, Result};
use crate::core::text::fixed_text;
use arena::{Allocating, Arenas};
use context::{Context, Entered};
use copies::Copies;
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUdeviceptr, CUstream};
use delay::DelayKernels;
use driver::check;
use family::Loaded;
use module::Form;
use pinned::PinnedPool;
use reports::Reports;
use std::ffi::{CStr, c_char, c_void};
use std::time::Instant;
use variants::{Forced, Ran, Variant};

pub struct Cuda {
    kernels: Loaded,
    arenas: Arenas,
    pinned: PinnedPool,
    copies: Copies,
    /// In a session that checks contents.
    reports: Option<Reports>,
    /// Most of a random delay, in a session that delays what overlaps.
    delay_nanoseconds: Option<u32>,
    streams: [CUstream; Role::COUNT],
    facts: Facts,
    forced: Forced,
    ran: Ran,
    log: Log,
    // The last field, so that it is released after all that lives in it.
    context: Context,
}

// SAFETY: stream handles may be used from any thread; the driver locks.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

/// What launches are sized by.
#[derive(Clone, Copy)]
pub struct Facts {
    pub multiprocessors: u32,
    /// 90 for compute capability 9.0.
    pub capability: u32,
    /// Shared memory that a CTA can have.
    pub shared_bytes: u32,
    /// 0, or the number of sequences for which attention is planned whatever a call has: `invariant_batch` in the session's options.
    pub invariant_batch: u32,
    driver_version: u32,
    load_microseconds: u64,
    name: [c_char; 64],
}

/// The session's own streams, for work that overlaps the caller's.
#[derive(Clone, Copy)]
pub enum Role {
    Select,
    Speculate,
    Prefetch,
    WriteBack,
}

impl Role {
    const COUNT: usize = 4;
    const ALL: [Role; Role::COUNT] = [Role::Select, Role::Speculate, Role::Prefetch, Role::WriteBack];

    /// Selection and speculation are waited for; transfers yield to them.
    fn is_urgent(self) -> bool {
        matches!(self, Role::Select | Role::Speculate)
    }
}

/// The kernels that a session loads beside its families if it delays what overlaps.
const DELAYS: &[Family] = &[Family::of::<DelayKernels>()];

/// CTAs of the largest cluster that every device of compute capability 9.0 and later can form.
pub const LARGEST_CLUSTER: u32 = 8;

impl Cuda {
    /// `checks`: whether calls wait for reports. `delay_nanoseconds`: most of the random delays of what overlaps, 0 for none.
    pub fn open(
        options: &Options,
        families: &[Family],
        forced: Forced,
        checks: bool,
        delay_nanoseconds: u32,
    ) -> Result<Cuda> {
        let delay_nanoseconds = Some(delay_nanoseconds).filter(|&most| most > 0);
        let families = &[families, if delay_nanoseconds.is_some() { DELAYS } else { &[] }].concat();
        let context = Context::retain(options.device_id)?;
        let entered = context.enter()?;
        let allocating = Allocating::enter()?;
        let mut facts = Facts { invariant_batch: options.invariant_batch, ..Facts::read(&context)? };
        let started = Instant::now();
        let kernels = Loaded::load(families, &context, &facts)?;
        facts.load_microseconds = started.elapsed().as_micros() as u64;
        let (log, ran) = (options.log, Ran::new(kernels.variants()));
        log_creation(&log, &context, &facts, &kernels);
        let streams = create_streams()?;
        let reports = checks.then(Reports::alloc).transpose().inspect_err(|_| destroy_streams(&streams))?;
        drop((allocating, entered));
        let (arenas, pinned) = (Arenas::new(options.scratch_bytes, log), PinnedPool::new(options.pinned_limit));
        let copies = Copies::find();
        Ok(Cuda {
            kernels,
            arenas,
            pinned,
            copies,
            reports,
            delay_nanoseconds,
            streams,
            facts,
            forced,
            ran,
            log,
            context,
        })
    }

    pub fn ordinal(&self) -> i32 {
        self.context.ordinal
    }

    pub fn enqueue(&self, stream: vwd_stream) -> Result<Enqueue<'_>> {
        Ok(Enqueue { cuda: self, stream: stream.cast(), _entered: self.context.enter()? })
    }

    pub fn stream(&self, role: Role) -> vwd_stream {
        self.streams[role as usize].cast()
    }

    pub fn reserve(&self, stream: vwd_stream, bytes: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        let bytes = usize::try_from(bytes).map_err(|_| Error::argument("bytes", bytes, "a size in memory"))?;
        self.arenas.reserve(stream.cast(), bytes)
    }

    pub fn forget_stream(&self, stream: vwd_stream) {
        self.arenas.forget(stream.cast());
    }

    /// The kernels of a family that the session was created with.
    pub fn kernels<K: Kernels>(&self) -> &K {
        self.kernels.of()
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The variant that the session's options force.
    #[inline]
    pub fn forced<V: Variant>(&self) -> Option<V> {
        self.forced.variant()
    }

    pub fn pinned_alloc(&self, bytes: u64) -> Result<*mut c_void> {
        let _entered = self.context.enter()?;
        self.pinned.alloc(bytes)
    }

    pub fn pinned_free(&self, pointer: *mut c_void, stream: vwd_stream) -> Result<()> {
        let _entered = self.context.enter()?;
        self.pinned.free(pointer, stream.cast())
    }

    pub fn pinned_free_unused(&self, pointer: *mut c_void) {
        self.pinned.free_unused(pointer);
    }

    /// Device memory with these values, which are there on return. Freed by [`Cuda::free`].
    pub fn upload<T: Copy>(&self, values: &[T]) -> Result<CUdeviceptr> {
        let _entered = self.context.enter()?;
        memory::upload(values)
    }

    /// Device memory, whose contents are undefined. Freed by [`Cuda::free`].
    pub fn alloc(&self, bytes: usize) -> Result<CUdeviceptr> {
        let _entered = self.context.enter()?;
        memory::alloc(bytes)
    }

    /// Runs some copies on a stream that no capture records, and waits for them and for no other stream.
    pub fn with_copy_stream(&self, work: impl FnOnce(&CopyStream) -> Result<()>) -> Result<()> {
        let _entered = self.context.enter()?;
        memory::with_copy_stream(work)
    }

    /// Nothing uses the memory any more.
    pub fn free(&self, address: CUdeviceptr) {
        if let Ok(_entered) = self.context.enter() {
            memory::free(address);
        }
    }

    pub fn details(&self) -> vwd_session_details {
        let (scratch_bytes, scratch_peak) = self.arenas.usage();
        let pinned = self.pinned.usage();
        vwd_session_details {
            struct_size: size_of::<vwd_session_details>() as u32,
            device: VWD_DEVICE_CUDA,
            device_id: self.ordinal(),
            threads: 0,
            driver_version: self.facts.driver_version,
            compute_capability: self.facts.capability,
            multiprocessors: self.facts.multiprocessors,
            kernels: self.kernels.count(),
            load_microseconds: self.facts.load_microseconds,
            scratch_bytes,
            scratch_peak,
            pinned_in_use: pinned.in_use,
            pinned_peak: pinned.peak,
            pinned_cached: pinned.cached,
            device_name: self.facts.name,
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return; // the process is ending, or the device is lost: there is nothing to give back
        };
        let _allocating = Allocating::enter();
        destroy_streams(&self.streams);
        self.arenas.release();
        self.pinned.release();
        self.reports.iter().for_each(Reports::release);
        self.kernels.release();
    }
}

/// The PTX in the library is of CUDA 12.4.
const OLDEST_DRIVER: i32 = 12040;

fn cuda_version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

impl Facts {
    /// A kernel can start while the one before it still runs, and CTAs can form clusters (in a process's share of a device
    /// perhaps none: [`Kernel::active_clusters`]).
    pub fn launches_dependents(&self) -> bool {
        self.capability >= 90
    }

    /// As the driver calls the device.
    pub fn name(&self) -> &str {
        // SAFETY: c_char is a byte, whatever its sign.
        let bytes = unsafe { std::slice::from_raw_parts(self.name.as_ptr().cast::<u8>(), self.name.len()) };
        CStr::from_bytes_until_nul(bytes).ok().and_then(|name| name.to_str().ok()).unwrap_or_default()
    }

    /// Fails where the driver or the device is too old for the kernels.
    fn read(context: &Context) -> Result<Facts> {
        let mut driver_version = 0;
        // SAFETY: the driver is open.
        check(unsafe { sys::cuDriverGetVersion(&mut driver_version) }, "cuDriverGetVersion")?;
        if driver_version < OLDEST_DRIVER {
            let (found, oldest) = (cuda_version(driver_version), cuda_version(OLDEST_DRIVER));
            let text = format!("the driver supports CUDA {found}; expected {oldest} or later (driver 550)");
            return Err(Error::new(Code::Unavailable, text));
        }
        let major = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            let text = format!("compute capability {major}.{minor} is too old; expected 8.0 or later");
            return Err(Error::new(Code::Unavailable, text));
        }
        Ok(Facts {
            multiprocessors: context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            capability: (major * 10 + minor) as u32,
            shared_bytes: context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
            invariant_batch: 0,
            driver_version: driver_version as u32,
            load_microseconds: 0,
            name: fixed_text(&context.name()?),
        })
    }
}

fn log_creation(log: &Log, context: &Context, facts: &Facts, kernels: &Loaded) {
    for module in kernels.modules() {
        log.write(Level::Debug, || {
            let (name, milliseconds) = (module.name(), module.loaded_in.as_secs_f64() * 1e3);
            let why =
                module.refused.as_ref().map_or(String::new(), |error| format!("; machine code was refused: {error}"));
            format!("kernels of {name} loaded from {} in {milliseconds:.1} ms{why}", module.form.name())
        });
    }
    let refused: Vec<&Error> = kernels.modules().iter().filter_map(|module| module.refused.as_ref()).collect();
    if let Some(text) = refusal(&refused, kernels.modules().len()) {
        log.write(Level::Warning, || text);
    }
    log.write(Level::Info, || {
        let of_code = kernels.modules().iter().filter(|module| module.form == Form::MachineCode).count();
        format!(
            "session on CUDA device {} ({}, compute capability {}.{}, {} multiprocessors, driver CUDA {}); {} kernels \
             loaded in {:.0} ms, {of_code} modules from machine code and {} from PTX",
            context.ordinal,
            facts.name(),
            facts.capability / 10,
            facts.capability % 10,
            facts.multiprocessors,
            cuda_version(facts.driver_version as i32),
            kernels.count(),
            facts.load_microseconds as f64 / 1e3,
            kernels.modules().len() - of_code,
        )
    });
}

/// What an engine should know where the driver refused machine code of some of its modules: the start took longer.
fn refusal(refused: &[&Error], modules: usize) -> Option<String> {
    let (first, count) = (refused.first()?, refused.len());
    Some(format!("machine code of {count} of {modules} kernel modules was refused, and their PTX compiled: {first}"))
}

/// The context is current.
fn create_streams() -> Result<[CUstream; Role::COUNT]> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: the context is current.
    check(unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }, "cuCtxGetStreamPriorityRange")?;
    let mut streams = [std::ptr::null_mut(); Role::COUNT];
    for role in Role::ALL {
        let priority = if role.is_urgent() { greatest } else { least };
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current.
        let made = unsafe { sys::cuStreamCreateWithPriority(&mut streams[role as usize], flags, priority) };
        check(made, "cuStreamCreateWithPriority").inspect_err(|_| {
            destroy_streams(&streams);
        })?;
    }
    Ok(streams)
}

/// Destroys the streams that were created, each of which may be destroyed once. The context is current.
fn destroy_streams(streams: &[CUstream]) {
    for &stream in streams.iter().filter(|stream| !stream.is_null()) {
        // SAFETY: says the caller.
        let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
    }
}

/// One call's place on the caller's stream; the context is current while it lives.
pub struct Enqueue<'s> {
    cuda: &'s Cuda,
    stream: CUstream,
    _entered: Entered<'s>,
}

impl Enqueue<'_> {
    /// As [`Cuda::kernels`].
    pub fn kernels<K: Kernels>(&self) -> &K {
        self.cuda.kernels()
    }

    pub fn facts(&self) -> &Facts {
        self.cuda.facts()
    }

    /// As [`Cuda::forced`].
    #[inline]
    pub fn forced<V: Variant>(&self) -> Option<V> {
        self.cuda.forced()
    }

    /// Logs the first call that a variant does in this session.
    #[inline]
    pub fn ran<V: Variant>(&self, variant: V) {
        self.cuda.ran.note(variant, &self.cuda.log);
    }

    /// The launch kind of a kernel that waits for the kernel before it, and does nothing else before that: it starts early where the device can do
    /// that.
    pub fn dependent_kind(&self) -> Kind {
        if self.facts().launches_dependents() { Kind::Dependent } else { Kind::Plain }
    }

    /// Scratch for this call alone, aligned to 256 bytes. What it holds is undefined.
    pub fn scratch(&self, bytes: usize) -> Result<CUdeviceptr> {
        self.cuda.arenas.scratch(self.stream, bytes)
    }

    /// Counters of [`Enqueue::counters`].
    pub const COUNTERS: usize = arena::COUNTERS;

    /// Counters of 32 bits for this call alone: they are zero, and its last kernel leaves them so. A call with counters has to say that it needs at
    /// least a byte of scratch, so that its arena is there before a capture.
    pub fn counters(&self) -> Result<CUdeviceptr> {
        self.cuda.arenas.counters(self.stream)
    }

    /// Whether the copy engines take many copies of this call at once.
    pub fn copies_are_batched(&self) -> Result<bool> {
        Ok(self.cuda.copies.are_batched(self.stream, arena::is_capturing(self.stream)?))
    }

    /// Enqueues copies of `bytes` bytes each, at most [`MOST_COPIES`]. `batched`: [`Enqueue::copies_are_batched`].
    ///
    /// # Safety
    /// Source and target of each are memory that the device reaches, valid until the stream has passed.
    pub unsafe fn copy(
        &self,
        targets: &[CUdeviceptr],
        sources: &[CUdeviceptr],
        bytes: usize,
        batched: bool,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the memory; the context is current while this lives.
        unsafe { self.cuda.copies.enqueue(targets, sources, bytes, self.stream, batched) }
    }

    /// Returns what kernels report that `enqueue` enqueues on the caller's stream: each writes to one of `count` places in pinned memory. Waits for the
    /// stream, and so refuses one that is capturing. The session was created to check contents.
    pub fn wait_for_reports<T: Copy>(
        &self,
        count: usize,
        enqueue: impl FnOnce(*mut T) -> Result<()>,
    ) -> Result<Vec<T>> {
        if arena::is_capturing(self.stream)? {
            let expected = "one that is not: the session checks contents, for which each call waits";
            return Err(Error::argument("stream", format!("{:p} is capturing a graph", self.stream), expected));
        }
        let _waiting = Allocating::enter()?;
        let memory = self.cuda.reports.as_ref().expect("memory of a session that checks contents").lock();
        let reports = memory.places(count);
        let enqueued = enqueue(reports);
        // SAFETY: the stream is the caller's and not capturing; the places are as many, and written where all was enqueued.
        unsafe {
            check(sys::cuStreamSynchronize(self.stream), "cuStreamSynchronize")?;
            enqueued?;
            Ok(std::slice::from_raw_parts(reports, count).to_vec())
        }
    }

    /// Launches a kernel on the caller's stream.
    ///
    /// # Safety
    /// As for [`Kernel::launch`].
    pub unsafe fn launch<const N: usize>(&self, kernel: &Kernel, grid: Grid, params: [*const c_void; N]) -> Result<()> {
        // SAFETY: the context is current while this lives; the caller vouches for the parameters and what they point to.
        unsafe { kernel.launch(grid, self.stream, params) }
    }

    /// Writes zeros on the caller's stream.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are the device's, and valid until the stream has passed.
    pub unsafe fn fill_zero(&self, address: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the context is current while this lives; the caller vouches for the bytes.
        check(unsafe { sys::cuMemsetD8Async(address as CUdeviceptr, 0, bytes, self.stream) }, "cuMemsetD8Async")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_machine_code_is_told() {
        let error = Error::new(Code::Driver, "no kernel image");
        assert_eq!(refusal(&[], 64), None);
        let text = refusal(&[&error, &error], 64).unwrap();
        assert_eq!(text, "machine code of 2 of 64 kernel modules was refused, and their PTX compiled: no kernel image");
    }
}
