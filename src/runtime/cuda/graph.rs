//! A graph: what a stream was given while it captured, launched as a whole.

use super::arena::Allocating;
use super::driver::check;
use super::{Cuda, Enqueue};
use crate::core::status::Result;
use cudarc::driver::sys::{self, CUgraphExec, CUstreamCaptureMode};

pub struct Graph {
    exec: CUgraphExec,
}

// SAFETY: handles may be used from any thread; the driver locks.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `work` enqueues on the stream, which is not capturing. What it branches off has to be joined.
    pub fn capture(enqueue: &Enqueue, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, and the context is current.
        check(unsafe { sys::cuStreamBeginCapture_v2(enqueue.stream, mode) }, "cuStreamBeginCapture")?;
        let done = work();
        // SAFETY: as above; the capture ends whatever happened.
        let ended = check(unsafe { sys::cuStreamEndCapture(enqueue.stream, &mut graph) }, "cuStreamEndCapture");
        // If this thread may not do so, cuGraphInstantiate fails where another stream of the thread captures, and its error says so.
        let _allocating = Allocating::enter();
        let made = done.and(ended).and_then(|()| {
            // SAFETY: the graph was captured.
            check(unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }, "cuGraphInstantiate")
        });
        if !graph.is_null() {
            // SAFETY: it is destroyed once, and what was made of it needs it no more.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        made?;
        Ok(Graph { exec })
    }

    pub fn launch(&self, enqueue: &Enqueue) -> Result<()> {
        // SAFETY: the graph and the stream live, and the context is current.
        check(unsafe { sys::cuGraphLaunch(self.exec, enqueue.stream) }, "cuGraphLaunch")
    }

    /// Launches have passed, and the context is current.
    fn release(&mut self) {
        let _allocating = Allocating::enter();
        // SAFETY: made by `capture`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

impl Cuda {
    /// As [`Graph::release`].
    pub fn release_graph(&self, graph: &mut Graph) {
        if let Ok(_entered) = self.context.enter() {
            graph.release();
        }
    }
}
