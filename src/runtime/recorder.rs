//! Work that is given to a stream again and again: on CUDA captured once, as an engine captures its steps, and launched as a graph.

use super::cuda::{Branch, Graph};
use super::{On, Session};
use crate::abi::vwd_stream;
use crate::core::status::Result;
use std::sync::Arc;

/// Captures on a stream of its own: not every stream can be captured.
pub struct Recorder {
    session: Arc<Session>,
    /// Absent on the CPU, and in a session whose checks of contents wait for the device.
    branch: Option<Branch>,
}

/// Work of a recorder.
pub struct Recording {
    session: Arc<Session>,
    graph: Option<Graph>,
}

impl Recorder {
    /// `scratch`: bytes that the calls of recorded work take.
    pub fn create(session: &Arc<Session>, scratch: u64) -> Result<Recorder> {
        let branch = match session.cuda() {
            Some(cuda) if !session.checks_contents() => Some(cuda.branch(0)?),
            _ => None,
        };
        let recorder = Recorder { session: session.clone(), branch };
        recorder.reserve(scratch)?;
        Ok(recorder)
    }

    /// Makes the scratch of recorded work large enough.
    pub fn reserve(&self, scratch: u64) -> Result<()> {
        self.branch.as_ref().map_or(Ok(()), |branch| self.session.reserve(branch.stream(), scratch))
    }

    /// Records what `work` enqueues on the stream that it is given.
    pub fn record(&self, work: impl FnOnce(vwd_stream) -> Result<()>) -> Result<Recording> {
        let graph = match &self.branch {
            Some(branch) => match self.session.on(branch.stream())? {
                On::Cuda(enqueue) => Some(Graph::capture(&enqueue, || work(branch.stream()))?),
                On::Cpu(_) => None,
            },
            None => None,
        };
        Ok(Recording { session: self.session.clone(), graph })
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let (Some(cuda), Some(branch)) = (self.session.cuda(), &mut self.branch) {
            cuda.release_branch(branch);
        }
    }
}

impl Recording {
    /// Launches what was recorded, or has `work` enqueue it.
    pub fn run(&self, stream: vwd_stream, work: impl FnOnce(vwd_stream) -> Result<()>) -> Result<()> {
        match (&self.graph, self.session.on(stream)?) {
            (Some(graph), On::Cuda(enqueue)) => graph.launch(&enqueue),
            _ => work(stream),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Launches have passed: whoever timed them waited for them.
        if let (Some(graph), Some(cuda)) = (&mut self.graph, self.session.cuda()) {
            cuda.release_graph(graph);
        }
    }
}
