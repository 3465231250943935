//! The session and what it owns.

mod callers_threads;
pub mod cpu;
pub mod cuda;
pub mod fork;
pub mod host;
pub mod log;
mod memory;
mod placed;
mod recorder;
mod timer;

use crate::abi::{
    VWD_CHECK_CONTENTS, VWD_CHECK_NOTHING, VWD_DEVICE_AUTO, VWD_DEVICE_CPU, VWD_DEVICE_CUDA, VWD_STREAM_PREFETCH,
    VWD_STREAM_SELECT, VWD_STREAM_SPECULATE, VWD_STREAM_WRITE_BACK, vwd_session_details, vwd_session_options,
    vwd_stream,
};
use crate::core::instructions::{INSTRUCTIONS_VARIABLE, Instructions};
use crate::core::status::{Code, Error, Result};
use crate::core::tensor::{Checks, Device};
use crate::core::text::text;
use callers_threads::ParallelFor;
use cpu::Cpu;
use cuda::variants::{self, Forced, VariantList};
use cuda::{Cuda, Enqueue, Family, Role};
use log::{Level, Log};
pub use memory::Memory;
pub use placed::Placed;
pub use recorder::{Recorder, Recording};
use std::ffi::c_void;
pub use timer::Timer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Auto,
    Cpu,
    Cuda,
}

/// Options of a session, defaults filled in.
#[derive(Clone, Debug)]
pub struct Options {
    pub device: Choice,
    pub device_id: i32,
    pub threads: usize,
    /// The caller's threads, in place of threads of the session.
    pub parallel_for: Option<ParallelFor>,
    pub scratch_bytes: usize,
    pub pinned_limit: u64,
    pub log: Log,
    /// Variants of kernels that are forced, as `vwd_session_options` has them.
    pub variants: Option<String>,
    /// Whether calls check contents; absent: as the environment says.
    pub checks_contents: Option<bool>,
    /// Most microseconds of random delays of what overlaps; absent: as the environment says.
    pub delay: Option<u32>,
    /// The number of sequences for which CUDA's attention is planned whatever a call has; 0: for each call.
    pub invariant_batch: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            device: Choice::Auto,
            device_id: 0,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            parallel_for: None,
            scratch_bytes: 16 << 20,
            pinned_limit: u64::MAX,
            log: Log::NONE,
            variants: None,
            checks_contents: None,
            delay: None,
            invariant_batch: 0,
        }
    }
}

impl Options {
    /// # Safety
    /// `parallel_for` and `log` are absent, or do what their contracts say as long as the session lives; `variants` is NULL or
    /// NUL-terminated.
    pub unsafe fn from_c(c: &vwd_session_options) -> Result<Options> {
        const MOST_THREADS: u32 = 1024;
        const MOST_INVARIANT_BATCH: u32 = 1 << 16;
        let mut options = Options { device_id: c.device_id, ..Options::default() };
        options.device = match c.device {
            VWD_DEVICE_AUTO => Choice::Auto,
            VWD_DEVICE_CPU => Choice::Cpu,
            VWD_DEVICE_CUDA => Choice::Cuda,
            other => return Err(Error::argument("options.device", other, "a VWD_DEVICE_* value (0 to 2)")),
        };
        if c.device_id < 0 {
            return Err(Error::argument("options.device_id", c.device_id, "a CUDA ordinal, 0 or above"));
        }
        if c.threads > MOST_THREADS {
            return Err(Error::argument("options.threads", c.threads, format!("at most {MOST_THREADS}")));
        }
        require_no_flags("options.flags", c.flags)?;
        if c.threads != 0 {
            options.threads = c.threads as usize;
        }
        if let Some(call) = c.parallel_for {
            if c.threads != 0 {
                return Err(Error::argument(
                    "options.threads",
                    c.threads,
                    "0 beside parallel_for, whose threads do the work",
                ));
            }
            // SAFETY: the caller says that it keeps its contract as long as the session, which alone uses it, lives.
            options.parallel_for = Some(unsafe { ParallelFor::new(call, c.parallel_context) });
        } else if !c.parallel_context.is_null() {
            let found = format!("{:p} without parallel_for", c.parallel_context);
            return Err(Error::argument("options.parallel_context", found, "NULL"));
        }
        if c.scratch_bytes != 0 {
            options.scratch_bytes = c.scratch_bytes as usize;
        }
        if c.pinned_limit != 0 {
            options.pinned_limit = c.pinned_limit;
        }
        let level = Level::of(c.log_level, environment(log::LEVEL_VARIABLE).filter(|_| c.log.is_some()).as_deref())?;
        if let Some(call) = c.log {
            // SAFETY: the caller says that it keeps its contract as long as the session, which alone uses it, lives.
            options.log = unsafe { Log::new(call, c.log_context, level) };
        } else if !c.log_context.is_null() {
            let found = format!("{:p} without log", c.log_context);
            return Err(Error::argument("options.log_context", found, "NULL"));
        }
        if !c.variants.is_null() {
            // SAFETY: not NULL, NUL-terminated by the contract.
            options.variants = Some(unsafe { text(c.variants, "options.variants") }?.to_owned());
        }
        options.checks_contents = match u32::try_from(c.check) {
            Ok(0) => None,
            Ok(VWD_CHECK_CONTENTS) => Some(true),
            Ok(VWD_CHECK_NOTHING) => Some(false),
            _ => return Err(Error::argument("options.check", c.check, "a VWD_CHECK_* value (0 to 2)")),
        };
        options.delay = match c.delay_microseconds {
            0 => None,
            microseconds => {
                let found = || Error::argument("options.delay_microseconds", microseconds, at_most(MOST_DELAY));
                Some(u32::try_from(microseconds).ok().filter(|&given| given <= MOST_DELAY).ok_or_else(found)?)
            }
        };
        options.invariant_batch =
            u32::try_from(c.invariant_batch).ok().filter(|&batch| batch <= MOST_INVARIANT_BATCH).ok_or_else(|| {
                let expected = format!("0, or sequences, at most {MOST_INVARIANT_BATCH}");
                Error::argument("options.invariant_batch", c.invariant_batch, expected)
            })?;
        Ok(options)
    }
}

/// Whether calls check contents: what the options say, or else the environment, `named`.
fn checks_contents(option: Option<bool>, named: Option<&str>) -> Result<bool> {
    match (option, named) {
        (Some(checks), _) => Ok(checks),
        (None, None | Some("" | "0")) => Ok(false),
        (None, Some("1")) => Ok(true),
        (None, Some(other)) => Err(Error::argument(CHECK_VARIABLE, format!("{other:?}"), "0 or 1")),
    }
}

/// Most nanoseconds of random delays, 0 for none: what the options say, or else the environment, `named`, in microseconds.
fn delay_nanoseconds(option: Option<u32>, named: Option<&str>) -> Result<u32> {
    let microseconds = match (option, named) {
        (Some(microseconds), _) => microseconds,
        (None, None | Some("")) => 0,
        (None, Some(named)) => {
            let number = named.parse().ok().filter(|&number| number <= MOST_DELAY);
            number.ok_or_else(|| Error::argument(DELAY_VARIABLE, format!("{named:?}"), at_most(MOST_DELAY)))?
        }
    };
    Ok(microseconds * 1000)
}

fn at_most(microseconds: u32) -> String {
    format!("microseconds, at most {microseconds}")
}

/// The largest delay, in microseconds.
const MOST_DELAY: u32 = 1_000_000;

/// The environment variable that states how long delays are where the options do not.
const DELAY_VARIABLE: &str = "VANWARD_DELAY";

/// The environment variable that states whether contents are checked where the options do not.
const CHECK_VARIABLE: &str = "VANWARD_CHECK";

/// A variable of the environment. Sessions read theirs when they are created, and never later.
fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Flags that no version has defined yet.
pub fn require_no_flags(name: &str, flags: u32) -> Result<()> {
    if flags == 0 { Ok(()) } else { Err(Error::argument(name, flags, "0")) }
}

/// Flags other than those that the call knows, of which VWD_ATTENTION_KEEP_ROWS is the only one so far.
pub fn require_flags(name: &str, flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        _ => Err(Error::argument(name, flags, format!("0 or VWD_ATTENTION_KEEP_ROWS, {known}"))),
    }
}

pub struct Session {
    backend: Backend,
    checks_contents: bool,
}

enum Backend {
    Cpu(Cpu),
    Cuda(Box<Cuda>),
}

/// Where one call runs.
pub enum On<'s> {
    Cpu(&'s Cpu),
    /// The device's context is current until this is dropped.
    Cuda(Enqueue<'s>),
}

impl Session {
    /// `families`: the kernels of a CUDA session.
    pub fn create(options: &Options, families: &[Family]) -> Result<Session> {
        // A CPU session refuses unknown names too, and runs none of the variants.
        let forced = forced_variants(options, families)?;
        let checks_contents = checks_contents(options.checks_contents, environment(CHECK_VARIABLE).as_deref())?;
        let delay = delay_nanoseconds(options.delay, environment(DELAY_VARIABLE).as_deref())?;
        Instructions::limit(environment(INSTRUCTIONS_VARIABLE).as_deref())?;
        let cpu = || Cpu::start(options).map(Backend::Cpu);
        let cuda = || Ok(Backend::Cuda(Box::new(Cuda::open(options, families, forced, checks_contents, delay)?)));
        let backend = match options.device {
            Choice::Cpu => cpu(),
            Choice::Cuda => cuda(),
            Choice::Auto => match cuda() {
                Err(error) if error.code == Code::Unavailable => {
                    options.log.write(Level::Warning, || format!("the session computes on the CPU: {error}"));
                    cpu()
                }
                result => result,
            },
        }?;
        if checks_contents {
            options.log.write(Level::Info, || "each call checks the contents of its tensors first".to_owned());
        }
        Ok(Session { backend, checks_contents })
    }

    /// Whether calls check the contents of their tensors.
    #[inline(always)]
    pub fn checks_contents(&self) -> bool {
        self.checks_contents
    }

    pub fn device(&self) -> Device {
        match &self.backend {
            Backend::Cpu(_) => Device::Cpu,
            Backend::Cuda(cuda) => Device::Cuda(cuda.ordinal()),
        }
    }

    /// Checks of tensors that live where this session computes.
    pub fn checks(&self) -> Checks {
        Checks { device: self.device() }
    }

    /// Picks the backend of one call and, on CUDA, makes the context current.
    pub fn on(&self, stream: vwd_stream) -> Result<On<'_>> {
        match &self.backend {
            Backend::Cpu(cpu) => {
                require_no_stream(stream)?;
                Ok(On::Cpu(cpu))
            }
            Backend::Cuda(cuda) => Ok(On::Cuda(cuda.enqueue(stream)?)),
        }
    }

    /// What a CUDA session keeps of its device.
    pub fn cuda(&self) -> Option<&Cuda> {
        match &self.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda),
        }
    }

    pub fn details(&self) -> vwd_session_details {
        match &self.backend {
            Backend::Cpu(cpu) => cpu.details(),
            Backend::Cuda(cuda) => cuda.details(),
        }
    }

    /// What decides how long calls take: the device, or the processor and the threads that compute.
    pub fn description(&self) -> String {
        match &self.backend {
            Backend::Cpu(cpu) => cpu.description(),
            Backend::Cuda(cuda) => {
                let facts = cuda.facts();
                let (major, minor) = (facts.capability / 10, facts.capability % 10);
                let count = facts.multiprocessors;
                format!("{} (compute capability {major}.{minor}, {count} multiprocessors)", facts.name())
            }
        }
    }

    pub fn reserve(&self, stream: vwd_stream, bytes: u64) -> Result<()> {
        match &self.backend {
            Backend::Cpu(_) => require_no_stream(stream),
            Backend::Cuda(cuda) => cuda.reserve(stream, bytes),
        }
    }

    /// Lets go of what the session keeps for a stream.
    pub fn forget_stream(&self, stream: vwd_stream) -> Result<()> {
        match &self.backend {
            Backend::Cpu(_) => require_no_stream(stream),
            Backend::Cuda(cuda) => {
                cuda.forget_stream(stream);
                Ok(())
            }
        }
    }

    /// Bytes of scratch that a call needs of its stream's arena: none on the CPU; on CUDA what its launch takes.
    pub fn scratch_bytes(&self, on_cuda: impl FnOnce(&Cuda) -> Result<usize>) -> Result<u64> {
        match &self.backend {
            Backend::Cpu(_) => Ok(0),
            Backend::Cuda(cuda) => Ok(on_cuda(cuda)? as u64),
        }
    }

    /// The session's own stream of a role; NULL on the CPU.
    pub fn stream(&self, role: u32) -> Result<vwd_stream> {
        let role = match role {
            VWD_STREAM_SELECT => Role::Select,
            VWD_STREAM_SPECULATE => Role::Speculate,
            VWD_STREAM_PREFETCH => Role::Prefetch,
            VWD_STREAM_WRITE_BACK => Role::WriteBack,
            other => return Err(Error::argument("role", other, "a VWD_STREAM_* value (0 to 3)")),
        };
        Ok(match &self.backend {
            Backend::Cpu(_) => std::ptr::null_mut(),
            Backend::Cuda(cuda) => cuda.stream(role),
        })
    }

    pub fn pinned_alloc(&self, bytes: u64) -> Result<*mut c_void> {
        match &self.backend {
            Backend::Cpu(cpu) => cpu.host.alloc(bytes),
            Backend::Cuda(cuda) => cuda.pinned_alloc(bytes),
        }
    }

    pub fn pinned_free(&self, pointer: *mut c_void, stream: vwd_stream) -> Result<()> {
        match &self.backend {
            Backend::Cpu(cpu) => {
                require_no_stream(stream)?;
                cpu.host.free(pointer)
            }
            Backend::Cuda(cuda) => cuda.pinned_free(pointer, stream),
        }
    }

    /// As `pinned_free`, for memory that this session gave and no stream uses any more.
    pub fn pinned_free_unused(&self, pointer: *mut c_void) {
        match &self.backend {
            // The memory came from this session, so that this cannot fail.
            Backend::Cpu(cpu) => drop(cpu.host.free(pointer)),
            Backend::Cuda(cuda) => cuda.pinned_free_unused(pointer),
        }
    }
}

/// The variants that the options force, or else the environment.
fn forced_variants(options: &Options, families: &[Family]) -> Result<Forced> {
    let lists: Vec<VariantList> = families.iter().flat_map(Family::variants).copied().collect();
    match &options.variants {
        Some(text) => Forced::parse("options.variants", text, &lists),
        None => Forced::parse(variants::VARIABLE, &environment(variants::VARIABLE).unwrap_or_default(), &lists),
    }
}

fn require_no_stream(stream: vwd_stream) -> Result<()> {
    if stream.is_null() {
        return Ok(());
    }
    Err(Error::argument("stream", format!("{stream:p} on a CPU session"), "NULL"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_states_whether_contents_are_checked_where_the_options_do_not() {
        for (option, named, expected) in [
            (None, None, false),
            (None, Some(""), false),
            (None, Some("0"), false),
            (None, Some("1"), true),
            (Some(false), Some("1"), false),
            (Some(true), Some("0"), true),
        ] {
            assert_eq!(checks_contents(option, named), Ok(expected), "{option:?}, {named:?}");
        }
        let text = checks_contents(None, Some("yes")).unwrap_err().to_string();
        assert_eq!(text, "VANWARD_CHECK: \"yes\"; expected 0 or 1");
    }

    #[test]
    fn environment_states_delays_where_the_options_do_not() {
        for (option, named, expected) in [
            (None, None, 0),
            (None, Some(""), 0),
            (None, Some("0"), 0),
            (None, Some("200"), 200_000),
            (Some(3), Some("200"), 3_000),
            (None, Some("1000000"), 1_000_000_000),
        ] {
            assert_eq!(delay_nanoseconds(option, named), Ok(expected), "{option:?}, {named:?}");
        }
        for wrong in ["1000001", "-1", "long"] {
            let text = delay_nanoseconds(None, Some(wrong)).unwrap_err().to_string();
            assert_eq!(text, format!("VANWARD_DELAY: {wrong:?}; expected microseconds, at most 1000000"));
        }
    }
}
