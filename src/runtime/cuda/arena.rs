//! Scratch memory on the device: one arena a stream. Calls on one stream follow each other, so each starts at the arena's
//! beginning; nothing is allocated after session creation but by `vwd_session_reserve`.

use super::driver::check;
use crate::core::status::{Code, Error, Result};
use cudarc::driver::sys::{self, CUdeviceptr, CUstream};
use parking_lot::Mutex;

pub struct Arenas {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    bound: Vec<(usize, Arena)>,
    free: Vec<Arena>,
    /// Replaced by larger ones; kept because captured graphs may point there.
    retired: Vec<Arena>,
    peak: usize,
}

#[derive(Clone, Copy)]
struct Arena {
    base: CUdeviceptr,
    bytes: usize,
}

impl Arena {
    fn alloc(bytes: usize) -> Result<Arena> {
        let mut base = 0;
        // SAFETY: the context is current. Kernels count on zeroed scratch, and leave it zeroed where they count.
        unsafe {
            check(sys::cuMemAlloc_v2(&mut base, bytes), "cuMemAlloc")
                .map_err(|e| Error::new(e.code, format!("{bytes} bytes of scratch: {}", e.message)))?;
            let arena = Arena { base, bytes };
            check(sys::cuMemsetD8_v2(base, 0, bytes), "cuMemsetD8").inspect_err(|_| arena.free())?;
            Ok(arena)
        }
    }

    /// The context is current.
    fn free(self) {
        // SAFETY: allocated above, freed once.
        let _ = unsafe { sys::cuMemFree_v2(self.base) };
    }
}

impl Arenas {
    /// The context is current.
    pub fn create(count: usize, bytes: usize) -> Result<Arenas> {
        let arenas = Arenas { state: Mutex::default() };
        for _ in 0..count {
            let made = Arena::alloc(bytes);
            match made {
                Ok(arena) => arenas.state.lock().free.push(arena),
                Err(error) => {
                    arenas.release();
                    return Err(error);
                }
            }
        }
        // Room for every stream that has no reserve of its own: binding allocates nothing.
        arenas.state.lock().bound.reserve(count);
        Ok(arenas)
    }

    /// The beginning of the stream's arena, if it holds `bytes`.
    pub fn scratch(&self, stream: CUstream, bytes: usize) -> Result<CUdeviceptr> {
        let mut state = self.state.lock();
        let key = stream as usize;
        let arena = match state.bound.iter().find(|(bound, _)| *bound == key) {
            Some((_, arena)) => *arena,
            None => {
                let streams = state.bound.len();
                let arena = state.free.pop().ok_or_else(|| {
                    let text = format!(
                        "no scratch arena is left for stream {stream:p}: {streams} streams hold one; raise stream_count \
                         or call vwd_session_reserve for this stream with at least {bytes} bytes"
                    );
                    Error::new(Code::OutOfScratch, text)
                })?;
                state.bound.push((key, arena));
                arena
            }
        };
        if bytes > arena.bytes {
            let text = format!(
                "the call needs {bytes} bytes of scratch and stream {stream:p} has {}; call vwd_session_reserve for it",
                arena.bytes
            );
            return Err(Error::new(Code::OutOfScratch, text));
        }
        state.peak = state.peak.max(bytes);
        Ok(arena.base)
    }

    /// Gives the stream an arena of at least `bytes`. The context is current.
    pub fn reserve(&self, stream: CUstream, bytes: usize) -> Result<()> {
        let mut state = self.state.lock();
        let key = stream as usize;
        let at = state.bound.iter().position(|(bound, _)| *bound == key);
        if at.is_some_and(|at| state.bound[at].1.bytes >= bytes) {
            return Ok(());
        }
        let arena = Arena::alloc(bytes.max(1))?;
        match at {
            Some(at) => {
                let old = std::mem::replace(&mut state.bound[at].1, arena);
                state.retired.push(old);
            }
            None => state.bound.push((key, arena)),
        }
        Ok(())
    }

    /// Bytes held, and the most that one call has used.
    pub fn usage(&self) -> (u64, u64) {
        let state = self.state.lock();
        let all = state.bound.iter().map(|(_, arena)| arena).chain(&state.free).chain(&state.retired);
        (all.map(|arena| arena.bytes as u64).sum(), state.peak as u64)
    }

    /// Frees everything. The context is current.
    pub fn release(&self) {
        let state = std::mem::take(&mut *self.state.lock());
        let bound = state.bound.into_iter().map(|(_, arena)| arena);
        bound.chain(state.free).chain(state.retired).for_each(Arena::free);
    }
}
