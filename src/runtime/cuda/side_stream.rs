//! The side stream: kernels that run while the caller's stream goes on, ordered by events. While the caller's stream is captured they
//! become nodes of its graph that branch off that stream, so that the capture reaches no other stream and needs no join.

use super::arena::{Allocating, is_capturing};
use super::delay::Delay;
use super::driver::check;
use super::{Cuda, Enqueue, Grid, Kernel};
use crate::core::allocate::reserved;
use crate::core::status::{Error, Result};
use cudarc::driver::sys::{self, CUevent, CUgraph, CUgraphNode, CUresult, CUstream, CUstreamCaptureStatus};
use std::ffi::c_void;

/// A side stream, and for each of several uses of it an event after the last kernel of that use.
pub struct SideStream {
    stream: CUstream,
    /// Marks where the caller's stream is when a kernel branches off.
    branch: CUevent,
    ends: Vec<End>,
    /// The last node of all uses.
    last: Option<Node>,
}

struct End {
    event: CUevent,
    node: Option<Node>,
}

/// A kernel in a graph that is being captured.
#[derive(Clone, Copy)]
struct Node {
    capture: u64,
    raw: CUgraphNode,
}

// SAFETY: handles may be used from any thread; the driver locks.
unsafe impl Send for SideStream {}

/// A capture under way on some stream.
struct Capture {
    id: u64,
    graph: CUgraph,
    /// What the stream's next node would come after; the driver's, valid until the stream's next call.
    before: *const CUgraphNode,
    count: usize,
}

impl Capture {
    /// The context is current.
    fn of(stream: CUstream) -> Result<Option<Capture>> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut capture = Capture { id: 0, graph: std::ptr::null_mut(), before: std::ptr::null(), count: 0 };
        let Capture { id, graph, before, count } = &mut capture;
        // SAFETY: the context is current, the stream is the caller's, and every result has a place.
        let result = unsafe { sys::cuStreamGetCaptureInfo_v2(stream, &mut status, id, graph, before, count) };
        check(result, "cuStreamGetCaptureInfo")?;
        Ok((status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE).then_some(capture))
    }

    fn before(&self) -> &[CUgraphNode] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: so many nodes, and no call was made on the stream since.
        unsafe { std::slice::from_raw_parts(self.before, self.count) }
    }

    /// Makes the capture's next node come after this one, if it is of this capture.
    fn join(&self, enqueue: &Enqueue, node: Option<Node>) -> Result<()> {
        let Some(node) = node.filter(|node| node.capture == self.id && !self.before().contains(&node.raw)) else {
            return Ok(());
        };
        let add = sys::CUstreamUpdateCaptureDependencies_flags_enum::CU_STREAM_ADD_CAPTURE_DEPENDENCIES as u32;
        let mut node = node.raw;
        // SAFETY: the stream captures the graph that the node is in.
        let updated = unsafe { sys::cuStreamUpdateCaptureDependencies(enqueue.stream, &mut node, 1, add) };
        check(updated, "cuStreamUpdateCaptureDependencies")
    }
}

impl SideStream {
    /// The context is current.
    pub fn create(uses: usize) -> Result<SideStream> {
        let _allocating = Allocating::enter()?;
        let ends = reserved(uses, "the events of a stream")?;
        let mut side = SideStream { stream: std::ptr::null_mut(), branch: std::ptr::null_mut(), ends, last: None };
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current.
        check(unsafe { sys::cuStreamCreate(&mut side.stream, flags) }, "cuStreamCreate")?;
        // If one of these fails, `release` gives back what was made.
        let made = event(&mut side.branch).and_then(|()| {
            (0..uses).try_for_each(|_| {
                let mut end = End { event: std::ptr::null_mut(), node: None };
                event(&mut end.event)?;
                side.ends.push(end);
                Ok(())
            })
        });
        if let Err(error) = made {
            side.release();
            return Err(error);
        }
        Ok(side)
    }

    /// Launches a kernel of a use on the side stream. It begins after what the caller's stream holds now, and after every kernel that
    /// was launched on this side stream before.
    ///
    /// # Safety
    /// As for [`Kernel::launch`], until the use has been joined.
    pub unsafe fn launch<const N: usize>(
        &mut self,
        enqueue: &Enqueue,
        use_index: usize,
        kernel: &Kernel,
        grid: Grid,
        params: [*const c_void; N],
    ) -> Result<()> {
        if let Some(capture) = Capture::of(enqueue.stream)? {
            let last = self.last.filter(|node| node.capture == capture.id).map(|node| node.raw);
            let (mut nodes, mut count) = ([std::ptr::null_mut(); MOST_BEFORE], 0);
            for node in capture.before().iter().copied().chain(last) {
                // The driver refuses one that is named twice.
                if nodes[..count].contains(&node) {
                    continue;
                }
                let Some(place) = nodes.get_mut(count) else {
                    let found = format!("a stream whose next node comes after more than {MOST_BEFORE} others");
                    return Err(Error::argument("stream", found, "one that was joined"));
                };
                *place = node;
                count += 1;
            }
            let mut before = &nodes[..count];
            let delayed;
            if let Some(delay) = enqueue.delay() {
                // SAFETY: the graph is being captured, and the nodes are its own.
                delayed = [unsafe { delay.kernel.add_node(capture.graph, before, Delay::GRID, delay.params())? }];
                before = &delayed;
            }
            // SAFETY: as above; the caller vouches for the rest.
            let raw = unsafe { kernel.add_node(capture.graph, before, grid, params)? };
            let node = Some(Node { capture: capture.id, raw });
            (self.last, self.ends[use_index].node) = (node, node);
            return enqueue.delay_stream(enqueue.stream);
        }
        // SAFETY: the streams and events live, and the context is current; the caller vouches for the launch.
        unsafe {
            check(sys::cuEventRecord(self.branch, enqueue.stream), "cuEventRecord")?;
            check(sys::cuStreamWaitEvent(self.stream, self.branch, 0), "cuStreamWaitEvent")?;
            enqueue.delay_stream(self.stream)?;
            kernel.launch(grid, self.stream, params)?;
            check(sys::cuEventRecord(self.ends[use_index].event, self.stream), "cuEventRecord")?;
        }
        enqueue.delay_stream(enqueue.stream)
    }

    /// Makes the caller's stream wait for the last kernel of a use. In a capture it waits for the last one of that capture, if there is any.
    pub fn join(&self, enqueue: &Enqueue, use_index: usize) -> Result<()> {
        let End { event, node } = &self.ends[use_index];
        let Some(capture) = Capture::of(enqueue.stream)? else {
            // SAFETY: the event and the caller's stream live, and the context is current.
            return check(unsafe { sys::cuStreamWaitEvent(enqueue.stream, *event, 0) }, "cuStreamWaitEvent");
        };
        capture.join(enqueue, *node)
    }

    /// Makes the caller's stream wait for all that was launched so far. In a capture it waits for what was launched in that capture.
    pub fn join_all(&mut self, enqueue: &Enqueue) -> Result<()> {
        let Some(capture) = Capture::of(enqueue.stream)? else {
            // SAFETY: the streams and the event live, and the context is current. A wait is for what the event marked when it was called.
            return unsafe {
                check(sys::cuEventRecord(self.branch, self.stream), "cuEventRecord")?;
                check(sys::cuStreamWaitEvent(enqueue.stream, self.branch, 0), "cuStreamWaitEvent")
            };
        };
        capture.join(enqueue, self.last)
    }

    /// Whether the last kernel of a use still runs, as far as the host can tell without waiting.
    pub fn is_busy(&self, use_index: usize) -> bool {
        // Asking is forbidden, too, while some other stream captures in the strictest mode.
        let Ok(_allocating) = Allocating::enter() else { return false };
        // SAFETY: the event lives, and the context is current.
        unsafe { sys::cuEventQuery(self.ends[use_index].event) == CUresult::CUDA_ERROR_NOT_READY }
    }

    /// Waits until all is done, and gives the stream back. The context is current.
    pub fn release(&mut self) {
        let _allocating = Allocating::enter();
        // SAFETY: made by `create`, destroyed once; the stream has passed.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.stream);
            for event in self.ends.drain(..).map(|end| end.event).chain([self.branch]).filter(|event| !event.is_null())
            {
                let _ = sys::cuEventDestroy_v2(event);
            }
            let _ = sys::cuStreamDestroy_v2(self.stream);
        }
    }
}

/// Nodes that a kernel comes after: a stream that was forked and joined has a few.
const MOST_BEFORE: usize = 64;

/// The context is current.
pub(super) fn event(event: &mut CUevent) -> Result<()> {
    let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: the context is current.
    check(unsafe { sys::cuEventCreate(event, flags) }, "cuEventCreate")
}

impl Enqueue<'_> {
    pub fn is_capturing(&self) -> Result<bool> {
        is_capturing(self.stream)
    }

    /// The identity of the capture under way on the stream.
    pub fn capture(&self) -> Result<Option<u64>> {
        Ok(Capture::of(self.stream)?.map(|capture| capture.id))
    }
}

impl Cuda {
    /// As [`SideStream::create`].
    pub fn side_stream(&self, uses: usize) -> Result<SideStream> {
        let _entered = self.context.enter()?;
        SideStream::create(uses)
    }

    /// As [`SideStream::release`].
    pub fn release_side_stream(&self, side: &mut SideStream) {
        if let Ok(_entered) = self.context.enter() {
            side.release();
        }
    }
}
