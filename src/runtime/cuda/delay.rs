//! Random delays of what overlaps, in a session that is to show that its results do not depend on time: where a side stream branches
//! off, both it and the caller's stream wait, each for a time of its own.

use super::{Enqueue, Grid, Kernel, Kernels, Kind, Modules, Source, source};
use crate::core::status::Result;
use cudarc::driver::sys::CUstream;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

pub struct DelayKernels {
    delay: Kernel,
}

impl Kernels for DelayKernels {
    const SOURCES: &[Source] = &[source!("runtime/delay", compute_80)];

    fn find(modules: &Modules) -> Result<DelayKernels> {
        Ok(DelayKernels { delay: modules.kernel("runtime/delay", "delay")? })
    }
}

/// A launch of the kernel that waits.
pub struct Delay<'k> {
    pub kernel: &'k Kernel,
    most: u32,
    seed: u32,
}

/// Launches so far: each has a seed of its own.
static LAUNCHES: AtomicU32 = AtomicU32::new(0);

impl Delay<'_> {
    pub const GRID: Grid = Grid { ctas: 1, threads: 1, kind: Kind::Plain };

    pub fn params(&self) -> [*const c_void; 2] {
        [(&raw const self.most).cast(), (&raw const self.seed).cast()]
    }
}

impl Enqueue<'_> {
    /// What a stream that is to be delayed launches; none in a session that delays nothing.
    pub fn delay(&self) -> Option<Delay<'_>> {
        let most = self.cuda.delay_nanoseconds?;
        let seed = LAUNCHES.fetch_add(1, Relaxed).wrapping_mul(0x9e37_79b9);
        Some(Delay { kernel: &self.kernels::<DelayKernels>().delay, most, seed })
    }

    /// Delays what is enqueued on a stream from now on, in a session that delays.
    pub fn delay_stream(&self, stream: CUstream) -> Result<()> {
        let Some(delay) = self.delay() else { return Ok(()) };
        // SAFETY: the kernel's parameters; the context is current, and the stream lives.
        unsafe { delay.kernel.launch(Delay::GRID, stream, delay.params()) }
    }
}
