//! Captures under way, and the calls that they forbid: those that could wait for what is only written down.

use cudarc::driver::sys::CUstreamCaptureMode::{
    self, CU_STREAM_CAPTURE_MODE_GLOBAL as GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED as RELAXED,
};
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::{self, ThreadId};

/// A capture, from its beginning on.
pub struct UnderWay {
    /// Streams, that which began it first. Addresses, of streams that the caller keeps.
    pub streams: Vec<usize>,
    /// It was forbidden what was called, and gives no graph.
    pub is_broken: bool,
    mode: CUstreamCaptureMode,
    thread: ThreadId,
    /// The stream that began it waits for the legacy default stream, and that one for it.
    is_blocking: bool,
}

static ALL: Mutex<BTreeMap<u64, UnderWay>> = Mutex::new(BTreeMap::new());

thread_local! {
    static MODE: Cell<CUstreamCaptureMode> = const { Cell::new(GLOBAL) };
}

/// Makes the mode this thread's; returns the one that it had.
pub fn exchange_mode(mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    MODE.replace(mode)
}

pub fn begin(id: u64, stream: usize, mode: CUstreamCaptureMode, is_blocking: bool) {
    let thread = thread::current().id();
    ALL.lock().insert(id, UnderWay { streams: vec![stream], is_broken: false, mode, thread, is_blocking });
}

pub fn is_under_way(id: u64) -> bool {
    ALL.lock().contains_key(&id)
}

pub fn join(id: u64, stream: usize) {
    if let Some(capture) = ALL.lock().get_mut(&id) {
        capture.streams.push(stream);
    }
}

/// The capture, which is over; `None` where another stream began it.
pub fn end(id: u64, stream: usize) -> Option<UnderWay> {
    let mut all = ALL.lock();
    let began = all.get(&id).is_some_and(|capture| capture.streams.first() == Some(&stream));
    if began { all.remove(&id) } else { None }
}

/// Breaks the captures of these, and tells whether there are any.
fn break_all(are_met: impl Fn(&UnderWay) -> bool) -> bool {
    let mut all = ALL.lock();
    let mut met = false;
    for capture in all.values_mut().filter(|capture| are_met(capture)) {
        (capture.is_broken, met) = (true, true);
    }
    met
}

/// Whether the legacy default stream would have to wait for a capture.
pub fn has_blocking() -> bool {
    ALL.lock().values().any(|capture| capture.is_blocking)
}

/// Breaks captures that the legacy default stream would have to wait for.
pub fn break_blocking() -> bool {
    break_all(|capture| capture.is_blocking)
}

/// Functions that allocate, load, or wait, or ask whether they would have to.
const FORBIDDEN: &[&str] = &[
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemsetD8_v2",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
];

/// Whether a capture forbids this thread the function; that capture is broken then.
pub fn forbid(function: &str) -> bool {
    let (mode, thread) = (MODE.get(), thread::current().id());
    if mode == RELAXED || !FORBIDDEN.contains(&function) {
        return false;
    }
    break_all(|capture| match capture.mode {
        RELAXED => false,
        GLOBAL if mode == GLOBAL => true,
        _ => capture.thread == thread,
    })
}
