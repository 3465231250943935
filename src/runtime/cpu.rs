//! The CPU backend's resources: threads, the session's own or the caller's, and scratch memory that calls reuse.

use super::Options;
use super::callers_threads::ParallelFor;
use super::host::HostMemory;
use super::log::Level;
use crate::abi::{VWD_DEVICE_CPU, vwd_session_details};
use crate::core::floats::Floats;
use crate::core::quiet;
use crate::core::status::{Code, Error, Result};
use crate::core::text::fixed_text;
use bumpalo::Bump;
use parking_lot::Mutex;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::thread::JoinHandle;

pub struct Cpu {
    workers: Workers,
    scratch: Mutex<Vec<Bump>>,
    pub host: HostMemory,
}

/// Who does a call's work.
enum Workers {
    /// The caller.
    None,
    /// The session's threads, while the caller waits.
    Own(Pool),
    /// The caller's threads.
    Callers(ParallelFor),
}

/// Less work than this is done by the caller: waking a worker takes some microseconds.
const INLINE_BYTES: usize = 64 << 10;
/// Work that is worth one call of an engine's task: several small tasks are one.
const SHARE_BYTES: usize = 16 << 10;

impl Cpu {
    pub fn start(options: &Options) -> Result<Cpu> {
        let workers = match options.parallel_for {
            Some(threads) => Workers::Callers(threads),
            None if options.threads > 1 => Workers::Own(Pool::start(options.threads)?),
            None => Workers::None,
        };
        let cpu = Cpu { workers, scratch: Mutex::new(Vec::new()), host: HostMemory::new(options.pinned_limit) };
        options.log.write(Level::Info, || match cpu.threads() {
            0 => "session on the CPU, threads of the caller".to_owned(),
            threads => format!("session on the CPU, threads: {threads}"),
        });
        Ok(cpu)
    }

    /// Runs `task(0) … task(tasks−1)` and waits for all. The order is free, so tasks share nothing they write.
    pub fn parallel(&self, tasks: usize, bytes_per_task: usize, task: impl Fn(usize) + Sync + Send) {
        let is_small = tasks < 2 || tasks.saturating_mul(bytes_per_task) < INLINE_BYTES;
        match &self.workers {
            Workers::Own(pool) if !is_small => {
                pool.threads.install(|| (0..tasks).into_par_iter().for_each(task));
            }
            Workers::Callers(threads) if !is_small => {
                let each = (SHARE_BYTES / bytes_per_task).max(1);
                threads.run(tasks.div_ceil(each), &|share| {
                    let first = share * each;
                    (first..tasks.min(first + each)).for_each(&task);
                });
            }
            _ => (0..tasks).for_each(task),
        }
    }

    /// Runs tasks, each with `floats` of memory that only it uses while it runs. Tasks of one share take turns with it.
    pub fn in_shares(
        &self,
        scratch: &Scratch,
        tasks: usize,
        floats: usize,
        bytes_per_task: usize,
        task: impl Fn(usize, &mut [f32]) + Sync + Send,
    ) -> Result<()> {
        let shares = tasks.min(self.shares());
        let memory = Rows::new(scratch.slice(shares * floats, 0f32)?, floats);
        let bytes = bytes_per_task.saturating_mul(tasks.div_ceil(shares.max(1)));
        self.parallel(shares, bytes, |share| {
            // SAFETY: the share's row; its tasks run one after the other.
            (share..tasks).step_by(shares).for_each(|n| task(n, unsafe { memory.row(share) }));
        });
        Ok(())
    }

    /// Runs `task(i, chunk i of data)` for every chunk of `size` elements (the last may be shorter) and waits for all.
    pub fn parallel_chunks<T: Send>(
        &self,
        data: &mut [T],
        size: usize,
        bytes_per_task: usize,
        task: impl Fn(usize, &mut [T]) + Sync + Send,
    ) {
        if data.is_empty() {
            return;
        }
        let (len, rows) = (data.len(), Rows::new(data, size));
        // SAFETY: each chunk is one task's alone.
        self.parallel(len.div_ceil(size), bytes_per_task, |i| task(i, unsafe { rows.row(i) }));
    }

    /// Scratch memory for one call. Calls reuse what earlier ones grew, so a steady state allocates nothing.
    pub fn scratch(&self) -> Scratch<'_> {
        let bump = self.scratch.lock().pop().unwrap_or_default();
        Scratch { cpu: self, bump: Some(bump) }
    }

    /// Shares of a call's work that keep all threads busy: for work that needs memory of its own, which one share reuses.
    pub fn shares(&self) -> usize {
        const OF_A_THREAD: usize = 8;
        const OF_CALLERS_THREADS: usize = 256;
        match &self.workers {
            Workers::None => 1,
            Workers::Own(pool) => OF_A_THREAD * pool.handles.len(),
            Workers::Callers(_) => OF_CALLERS_THREADS,
        }
    }

    /// Threads of the session, or 1 where the caller does the work; 0 where `parallel_for` has the caller's threads do it.
    fn threads(&self) -> u32 {
        match &self.workers {
            Workers::None => 1,
            Workers::Own(pool) => pool.handles.len() as u32,
            Workers::Callers(_) => 0,
        }
    }

    /// The processor, as Linux calls it, and the threads that compute.
    pub fn description(&self) -> String {
        let about = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model =
            about.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
        let threads = match self.threads() {
            0 => "the caller's threads".to_owned(),
            count => format!("{count} threads"),
        };
        format!("{}, {threads}", model.unwrap_or("CPU").trim())
    }

    pub fn details(&self) -> vwd_session_details {
        let scratch_bytes = self.scratch.lock().iter().map(|b| b.allocated_bytes() as u64).sum();
        let host = self.host.usage();
        vwd_session_details {
            struct_size: size_of::<vwd_session_details>() as u32,
            device: VWD_DEVICE_CPU,
            device_id: 0,
            threads: self.threads(),
            driver_version: 0,
            compute_capability: 0,
            multiprocessors: 0,
            kernels: 0,
            load_microseconds: 0,
            scratch_bytes,
            scratch_peak: scratch_bytes,
            pinned_in_use: host.in_use,
            pinned_peak: host.peak,
            pinned_cached: 0,
            device_name: fixed_text("CPU"),
        }
    }
}

/// A rayon pool whose threads are joined on drop: when a session is released nothing of it runs on.
struct Pool {
    threads: ManuallyDrop<ThreadPool>,
    handles: Vec<JoinHandle<()>>,
}

impl Pool {
    fn start(threads: usize) -> Result<Pool> {
        let mut handles = Vec::with_capacity(threads);
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .spawn_handler(|thread| {
                let builder = std::thread::Builder::new().name(format!("vanward-{}", thread.index()));
                handles.push(builder.spawn(|| {
                    let _floats = Floats::enter();
                    quiet::enter();
                    thread.run();
                })?);
                Ok(())
            })
            .build();
        match pool {
            Ok(pool) => Ok(Pool { threads: ManuallyDrop::new(pool), handles }),
            Err(error) => Err(Error::new(Code::OutOfMemory, format!("could not start {threads} threads: {error}"))),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: dropped once, here; the pool tells its threads to end, so that they can be joined.
        unsafe { ManuallyDrop::drop(&mut self.threads) };
        for handle in self.handles.drain(..) {
            // A worker that panicked has told the caller whose task it ran.
            let _ = handle.join();
        }
    }
}

/// Memory for one call, given back on drop. Slices live as long as the borrow of this.
pub struct Scratch<'s> {
    cpu: &'s Cpu,
    bump: Option<Bump>,
}

impl Scratch<'_> {
    /// `len` copies of `value`.
    #[allow(clippy::mut_from_ref)] // a bump allocator: every call returns memory of its own
    pub fn slice<T: Copy>(&self, len: usize, value: T) -> Result<&mut [T]> {
        let bump = self.bump.as_ref().expect("present until drop");
        bump.try_alloc_slice_fill_copy(len, value)
            .map_err(|_| Error::out_of_memory(len.saturating_mul(size_of::<T>()), "scratch"))
    }
}

/// Equal rows of a slice that parallel tasks write, each its own; the last may be shorter.
pub struct Rows<'a, T> {
    first: *mut T,
    /// Elements of a row.
    len: usize,
    /// Elements of the slice.
    total: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: what is shared is an address; whoever takes a row vouches that it is theirs.
unsafe impl<T: Send> Sync for Rows<'_, T> {}
// SAFETY: a slice of what may be sent may be.
unsafe impl<T: Send> Send for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// Rows of `len` elements.
    pub fn new(slice: &'a mut [T], len: usize) -> Rows<'a, T> {
        Rows { first: slice.as_mut_ptr(), len, total: slice.len(), slice: PhantomData }
    }

    /// # Safety
    /// The row belongs to this task alone, and no earlier reference to it is used again.
    #[allow(clippy::mut_from_ref)] // rows do not overlap
    pub unsafe fn row(&self, r: usize) -> &mut [T] {
        let begin = r * self.len;
        assert!(begin < self.total || self.len == 0);
        // SAFETY: the row is inside the slice and, says the caller, nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(begin), self.len.min(self.total - begin)) }
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if let Some(mut bump) = self.bump.take() {
            bump.reset();
            self.cpu.scratch.lock().push(bump);
        }
    }
}
