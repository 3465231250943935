//! Scratch memory on the device: one arena a stream. Calls on one stream follow each other, so each starts at the arena's
//! beginning. An arena is made by `vwd_session_reserve`, or by the first call on a stream that needs one.

use super::driver::check;
use crate::core::status::{Code, Error, Result};
use crate::runtime::log::{Level, Log};
use cudarc::driver::sys::{self, CUdeviceptr, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters at the beginning of each arena, which are zero between calls: a kernel that counts leaves them so. What lies after
/// them is undefined.
pub const COUNTERS: usize = 1 << 16;
const COUNTER_BYTES: usize = COUNTERS * size_of::<u32>();

pub struct Arenas {
    /// Size of an arena that a call makes.
    default_bytes: usize,
    state: Mutex<State>,
    log: Log,
}

/// Parts of one call's scratch, one after the other.
#[derive(Default)]
pub struct Parts {
    pub bytes: usize,
}

impl Parts {
    /// Where a part begins whose size is a product.
    pub fn take(&mut self, size: &[usize]) -> usize {
        const ALIGNMENT: usize = 256;
        let begin = self.bytes;
        let bytes = size.iter().fold(1usize, |bytes, &n| bytes.saturating_mul(n));
        // Sums and products that overflow end at more bytes than any device has.
        self.bytes = begin.saturating_add(bytes).min(isize::MAX as usize).next_multiple_of(ALIGNMENT);
        begin
    }
}

/// Whom an arena serves: a stream, or one thread's use of the handle that means another stream to each thread.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Owner {
    stream: usize,
    thread: u64,
}

impl Owner {
    fn of(stream: CUstream) -> Owner {
        /// CU_STREAM_LEGACY is what NULL is.
        const LEGACY: usize = 1;
        const PER_THREAD: usize = 2;
        match stream as usize {
            LEGACY => Owner { stream: 0, thread: 0 },
            PER_THREAD => Owner { stream: PER_THREAD, thread: this_thread() },
            stream => Owner { stream, thread: 0 },
        }
    }
}

/// A number of this thread that no other one ever has; the system gives its own numbers, and a thread's addresses, again.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Relaxed);
    }
    NUMBER.with(|&number| number)
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Arena {
    base: CUdeviceptr,
    /// Bytes after the counters.
    bytes: usize,
}

impl Arena {
    /// An arena whose counters are zero once the stream gets there. The context is current.
    fn alloc(bytes: usize, stream: CUstream) -> Result<Arena> {
        let total = bytes.saturating_add(COUNTER_BYTES);
        let mut base = 0;
        // SAFETY: the context is current; the counters lie in what was allocated.
        unsafe {
            check(sys::cuMemAlloc_v2(&mut base, total), "cuMemAlloc")
                .map_err(|e| Error::new(e.code, format!("{bytes} bytes of scratch: {}", e.message)))?;
            let arena = Arena { base, bytes };
            let cleared = sys::cuMemsetD8Async(base, 0, COUNTER_BYTES, stream);
            check(cleared, "cuMemsetD8Async").inspect_err(|_| arena.free())?;
            Ok(arena)
        }
    }

    /// The context is current.
    fn free(self) {
        // SAFETY: allocated above, freed once.
        let _ = unsafe { sys::cuMemFree_v2(self.base) };
    }
}

/// Which owner has which arena.
#[derive(Default)]
struct State {
    bound: Vec<(Owner, Arena)>,
    /// Arenas that larger ones replaced; kept as long as their streams, whose captured graphs may point there.
    retired: Vec<(Owner, Arena)>,
    /// Arenas of streams that were forgotten.
    free: Vec<Arena>,
    peak: usize,
}

impl State {
    fn of(&self, owner: Owner) -> Option<Arena> {
        self.bound.iter().find(|(bound, _)| *bound == owner).map(|&(_, arena)| arena)
    }

    /// Gives the owner an arena and retires the one that it had.
    fn bind(&mut self, owner: Owner, arena: Arena) {
        match self.bound.iter_mut().find(|(bound, _)| *bound == owner) {
            Some((_, bound)) => {
                let old = std::mem::replace(bound, arena);
                self.retired.push((owner, old));
            }
            None => self.bound.push((owner, arena)),
        }
    }

    /// Frees the owner's arenas for the next owner that needs one.
    fn forget(&mut self, owner: Owner) {
        let State { bound, retired, free, .. } = self;
        for list in [bound, retired] {
            free.extend(list.extract_if(.., |(of, _)| *of == owner).map(|(_, arena)| arena));
        }
    }

    /// The smallest arena of at least so many bytes that was let go.
    fn take_free(&mut self, bytes: usize) -> Option<Arena> {
        let fits = self.free.iter().enumerate().filter(|(_, arena)| arena.bytes >= bytes);
        let (at, _) = fits.min_by_key(|(_, arena)| arena.bytes)?;
        Some(self.free.swap_remove(at))
    }

    /// An arena that was let go, or a new one. The context is current, and the stream is not capturing.
    fn give(&mut self, owner: Owner, stream: CUstream, bytes: usize) -> Result<Arena> {
        let arena = match self.take_free(bytes) {
            Some(arena) => arena,
            None => Arena::alloc(bytes, stream).or_else(|error| {
                // The device may be short because of arenas that nobody has.
                if self.free.is_empty() {
                    return Err(error);
                }
                self.free.drain(..).for_each(Arena::free);
                Arena::alloc(bytes, stream)
            })?,
        };
        self.bind(owner, arena);
        Ok(arena)
    }

    fn all(&self) -> impl Iterator<Item = Arena> {
        let owned = self.bound.iter().chain(&self.retired).map(|&(_, arena)| arena);
        owned.chain(self.free.iter().copied())
    }
}

impl Arenas {
    pub fn new(default_bytes: usize, log: Log) -> Arenas {
        Arenas { default_bytes, state: Mutex::default(), log }
    }

    /// Where `bytes` bytes of the stream's arena begin. Makes the arena if the stream has none. The context is current.
    pub fn scratch(&self, stream: CUstream, bytes: usize) -> Result<CUdeviceptr> {
        Ok(self.arena(stream, bytes)?.base + COUNTER_BYTES as CUdeviceptr)
    }

    /// The stream's counters, [`COUNTERS`] times 32 bits. Otherwise as [`Arenas::scratch`].
    pub fn counters(&self, stream: CUstream) -> Result<CUdeviceptr> {
        Ok(self.arena(stream, 0)?.base)
    }

    #[inline]
    fn arena(&self, stream: CUstream, bytes: usize) -> Result<Arena> {
        let mut state = self.state.lock();
        let owner = Owner::of(stream);
        let (arena, is_new) = match state.of(owner) {
            Some(arena) if arena.bytes >= bytes => (arena, false),
            Some(arena) => {
                let found = format!("an arena of {}", arena.bytes);
                return Err(out_of_scratch(stream, bytes, &found, ""));
            }
            None if is_capturing(stream)? => {
                let found = "no arena and is capturing a graph";
                return Err(out_of_scratch(stream, bytes, found, " before the capture"));
            }
            None => {
                let _allocating = Allocating::enter()?;
                let arena = state.give(owner, stream, bytes.max(self.default_bytes))?;
                // The engine's callback runs while nothing is locked.
                (arena, true)
            }
        };
        state.peak = state.peak.max(bytes);
        drop(state);
        if is_new {
            self.log_given(stream, arena, None);
        }
        Ok(arena)
    }

    /// Gives the stream an arena of at least `bytes`, 0 meaning the default, that is ready on return. The context is current.
    pub fn reserve(&self, stream: CUstream, bytes: usize) -> Result<()> {
        let mut state = self.state.lock();
        let bytes = if bytes == 0 { self.default_bytes } else { bytes };
        let owner = Owner::of(stream);
        let before = state.of(owner);
        if before.is_some_and(|arena| arena.bytes >= bytes) {
            return Ok(());
        }
        if is_capturing(stream)? {
            return Err(Error::argument("stream", format!("{stream:p} is capturing a graph"), "one that is not"));
        }
        let _allocating = Allocating::enter()?;
        let arena = state.give(owner, stream, bytes)?;
        drop(state);
        self.log_given(stream, arena, before);
        // SAFETY: the context is current; the stream is the caller's and not capturing.
        check(unsafe { sys::cuStreamSynchronize(stream) }, "cuStreamSynchronize")
    }

    #[cold]
    fn log_given(&self, stream: CUstream, arena: Arena, before: Option<Arena>) {
        self.log.write(Level::Info, || {
            let instead = before.map_or(String::new(), |before| format!(" instead of {}", before.bytes));
            format!("stream {stream:p} has a scratch arena of {} bytes{instead}", arena.bytes)
        });
    }

    pub fn forget(&self, stream: CUstream) {
        self.state.lock().forget(Owner::of(stream));
    }

    /// Bytes held, and the most that one call has used.
    pub fn usage(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.all().map(|arena| (arena.bytes + COUNTER_BYTES) as u64).sum(), state.peak as u64)
    }

    /// Frees everything. The context is current.
    pub fn release(&self) {
        let state = std::mem::take(&mut *self.state.lock());
        state.all().for_each(Arena::free);
    }
}

#[cold]
fn out_of_scratch(stream: CUstream, bytes: usize, found: &str, when: &str) -> Error {
    let text = format!(
        "the call needs {bytes} bytes of scratch and stream {stream:p} has {found}; call \
         vwd_session_reserve(session, {stream:p}, {bytes}){when}"
    );
    Error::new(Code::OutOfScratch, text)
}

/// The context is current.
pub fn is_capturing(stream: CUstream) -> Result<bool> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the context is current, and the stream is the caller's.
    check(unsafe { sys::cuStreamIsCapturing(stream, &mut status) }, "cuStreamIsCapturing")?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// While it lives this thread may allocate and wait, even though a graph is captured on some other stream in the mode that
/// forbids that to every thread.
pub(super) struct Allocating {
    before: CUstreamCaptureMode,
}

impl Allocating {
    pub(super) fn enter() -> Result<Allocating> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver is open; it exchanges the mode with this thread's.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        check(exchanged, "cuThreadExchangeStreamCaptureMode")?;
        Ok(Allocating { before: mode })
    }
}

impl Drop for Allocating {
    fn drop(&mut self) {
        // SAFETY: as above, on the same thread.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(handle: usize) -> CUstream {
        handle as CUstream
    }

    fn arena(bytes: usize) -> Arena {
        Arena { base: bytes as CUdeviceptr, bytes }
    }

    #[test]
    fn null_and_legacy_are_one_stream() {
        assert_eq!(Owner::of(stream(0)), Owner::of(stream(1)));
        assert_ne!(Owner::of(stream(0)), Owner::of(stream(0x7f00)));
    }

    #[test]
    fn threads_share_arenas_of_streams_but_not_of_the_per_thread_stream() {
        let owners = || [0, 2, 0x7f00].map(|handle| Owner::of(stream(handle)));
        let here = owners();
        assert_eq!(owners(), here);
        let there = std::thread::spawn(owners).join().unwrap();
        assert_eq!((there[0], there[2]), (here[0], here[2]));
        assert_ne!(there[1], here[1]);
    }

    #[test]
    fn replaced_arena_stays_with_its_stream_until_that_is_forgotten() {
        let (first, second) = (Owner::of(stream(0x100)), Owner::of(stream(0x200)));
        let mut state = State::default();
        state.bind(first, arena(10));
        state.bind(first, arena(20));
        state.bind(second, arena(30));
        assert_eq!((state.of(first), state.take_free(1)), (Some(arena(20)), None));
        state.forget(first);
        assert_eq!((state.of(first), state.of(second)), (None, Some(arena(30))));
        assert_eq!(state.take_free(11), Some(arena(20)), "the smallest that fits");
        assert_eq!((state.take_free(11), state.take_free(10)), (None, Some(arena(10))));
        assert_eq!(state.all().collect::<Vec<_>>(), [arena(30)]);
    }

    #[test]
    fn forgetting_a_stream_without_an_arena_changes_nothing() {
        let mut state = State::default();
        state.bind(Owner::of(stream(0x100)), arena(10));
        state.forget(Owner::of(stream(0x200)));
        assert_eq!(state.of(Owner::of(stream(0x100))), Some(arena(10)));
    }
}
