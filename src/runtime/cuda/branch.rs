//! A branch: a stream on which whole calls run while the caller's stream goes on. It begins at a fork of the caller's stream, and the
//! caller's stream waits for it at a join, both by events. While the caller's stream is captured, the fork makes the branch part of the same
//! capture, so that every use has to be joined before the capture ends.

use super::arena::Allocating;
use super::driver::check;
use super::side_stream::event;
use super::{Cuda, Enqueue};
use crate::abi::vwd_stream;
use crate::core::allocate::reserved;
use crate::core::status::Result;
use cudarc::driver::sys::{self, CUevent, CUstream};
use parking_lot::Mutex;

pub struct Branch {
    stream: CUstream,
    /// Marks where the caller's stream is at a fork.
    fork: CUevent,
    ends: Vec<End>,
}

/// The end of a use: an event, and the capture in which it was recorded last (`Some(None)`: in none).
struct End {
    event: CUevent,
    recorded: Mutex<Option<Option<u64>>>,
}

// SAFETY: handles may be used from any thread; the driver locks.
unsafe impl Send for Branch {}
// SAFETY: as above.
unsafe impl Sync for Branch {}

impl Branch {
    /// The context is current.
    fn create(uses: usize) -> Result<Branch> {
        let _allocating = Allocating::enter()?;
        let ends = reserved(uses, "the events of a branch")?;
        let mut branch = Branch { stream: std::ptr::null_mut(), fork: std::ptr::null_mut(), ends };
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current.
        check(unsafe { sys::cuStreamCreate(&mut branch.stream, flags) }, "cuStreamCreate")?;
        // If one of these fails, `release` gives back what was made.
        let made = event(&mut branch.fork).and_then(|()| {
            (0..uses).try_for_each(|_| {
                let mut end = End { event: std::ptr::null_mut(), recorded: Mutex::default() };
                event(&mut end.event)?;
                branch.ends.push(end);
                Ok(())
            })
        });
        if let Err(error) = made {
            branch.release();
            return Err(error);
        }
        Ok(branch)
    }

    /// The stream of the calls between a fork and its end.
    pub fn stream(&self) -> vwd_stream {
        self.stream.cast()
    }

    /// Makes what is enqueued on the branch from now on begin after what the caller's stream holds now.
    pub fn fork(&self, enqueue: &Enqueue) -> Result<()> {
        // SAFETY: the streams and the event live, and the context is current.
        unsafe {
            check(sys::cuEventRecord(self.fork, enqueue.stream), "cuEventRecord")?;
            check(sys::cuStreamWaitEvent(self.stream, self.fork, 0), "cuStreamWaitEvent")?;
        }
        enqueue.delay_stream(self.stream)?;
        enqueue.delay_stream(enqueue.stream)
    }

    /// Marks the end of a use: what the branch holds now. The branch was forked from the caller's stream.
    pub fn end(&self, enqueue: &Enqueue, use_index: usize) -> Result<()> {
        let End { event, recorded } = &self.ends[use_index];
        // SAFETY: the stream and the event live, and the context is current.
        check(unsafe { sys::cuEventRecord(*event, self.stream) }, "cuEventRecord")?;
        *recorded.lock() = Some(enqueue.capture()?);
        Ok(())
    }

    /// Makes the caller's stream wait for the last end of a use. False where that was recorded in another capture than the stream is in, or
    /// one of the two is in a capture and the other is not: there is nothing that the stream could wait for.
    pub fn join(&self, enqueue: &Enqueue, use_index: usize) -> Result<bool> {
        let End { event, recorded } = &self.ends[use_index];
        if *recorded.lock() != Some(enqueue.capture()?) {
            return Ok(false);
        }
        // SAFETY: the event and the caller's stream live, and the context is current.
        check(unsafe { sys::cuStreamWaitEvent(enqueue.stream, *event, 0) }, "cuStreamWaitEvent")?;
        Ok(true)
    }

    /// Waits until all is done, and gives the stream back. The context is current.
    fn release(&mut self) {
        let _allocating = Allocating::enter();
        // SAFETY: made by `create`, destroyed once; the stream has passed.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.stream);
            let events = self.ends.drain(..).map(|end| end.event).chain([self.fork]);
            for event in events.filter(|event| !event.is_null()) {
                let _ = sys::cuEventDestroy_v2(event);
            }
            let _ = sys::cuStreamDestroy_v2(self.stream);
        }
    }
}

impl Cuda {
    /// A branch of so many uses, with a scratch arena of the session's default size.
    pub fn branch(&self, uses: usize) -> Result<Branch> {
        let entered = self.context.enter()?;
        let mut branch = Branch::create(uses)?;
        drop(entered);
        if let Err(error) = self.reserve(branch.stream(), 0) {
            self.release_branch(&mut branch);
            return Err(error);
        }
        Ok(branch)
    }

    /// Waits until all of the branch is done.
    pub fn release_branch(&self, branch: &mut Branch) {
        if let Ok(_entered) = self.context.enter() {
            branch.release();
            self.arenas.forget(branch.stream);
        }
    }
}
