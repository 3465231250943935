//! Contexts, streams, sessions and memory of the CUDA backend.

use crate::Case;
use crate::graph::{Graph, check};
use crate::support::*;
use cudarc::driver::sys;
use std::ffi::c_void;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("calls_leave_the_current_context_as_it_was", calls_leave_the_current_context_as_it_was),
    ("threads_share_a_session_on_streams_of_their_own", threads_share_a_session_on_streams_of_their_own),
    ("session_streams_are_distinct_and_usable", session_streams_are_distinct_and_usable),
    ("info_tells_the_device_and_the_kernels", info_tells_the_device_and_the_kernels),
    ("kernels_load_without_the_drivers_compiler", kernels_load_without_the_drivers_compiler),
    ("released_sessions_give_their_memory_back", released_sessions_give_their_memory_back),
    ("reserve_beyond_the_device_is_an_error_that_changes_nothing", reserve_beyond_the_device_is_an_error),
    ("arenas_are_made_on_demand_and_forgotten_ones_used_again", arenas_are_made_on_demand),
    ("per_thread_default_streams_have_arenas_of_their_own", per_thread_default_streams_have_arenas_of_their_own),
    ("reserve_leaves_a_capture_alone", reserve_leaves_a_capture_alone),
    ("pinned_memory_and_handles_leave_a_capture_alone", pinned_memory_and_handles_leave_a_capture_alone),
    ("scratch_that_is_missing_or_too_small_is_an_error", scratch_that_is_missing_or_too_small_is_an_error),
    ("topk_is_the_same_without_scratch", topk_is_the_same_without_scratch),
    ("device_that_does_not_exist_is_unavailable", device_that_does_not_exist_is_unavailable),
    ("host_tensors_are_refused", host_tensors_are_refused),
    ("strides_beyond_32_bits_are_followed", strides_beyond_32_bits_are_followed),
    ("pinned_memory_is_reused_after_its_stream_has_passed", pinned_memory_is_reused_after_its_stream_has_passed),
    ("session_logs_kernels_arenas_and_variants", session_logs_kernels_arenas_and_variants),
    ("sessions_that_check_contents_refuse_a_capture", sessions_that_check_contents_refuse_a_capture),
    ("pinned_limit_is_an_error_that_changes_nothing", pinned_limit_is_an_error_that_changes_nothing),
];

/// A verification whose result is known, on any stream.
struct Known<'b> {
    draft: Tensor<'b>,
    target: Tensor<'b>,
    accepted: Tensor<'b>,
    next_token: Tensor<'b>,
}

impl<'b> Known<'b> {
    fn new(backend: &'b Backend) -> Known<'b> {
        let plain = Layout::default();
        Known {
            draft: Tensor::ints(backend, I32, &Array::new(&[2, 3], vec![5, 6, 7, 8, 9, 10]), &plain),
            target: Tensor::ints(backend, I32, &Array::new(&[2, 4], vec![5, 6, 0, 1, 8, 9, 10, 11]), &plain),
            accepted: Tensor::poisoned(backend, I32, &[2], &plain),
            next_token: Tensor::poisoned(backend, I32, &[2], &plain),
        }
    }

    fn args(&self) -> vwd_verify_args {
        vwd_verify_args {
            draft: self.draft.c(),
            target: self.target.c(),
            accepted: self.accepted.c(),
            next_token: self.next_token.c(),
            ..args()
        }
    }

    fn enqueue(&self, session: *const vwd_session, stream: vwd_stream) {
        // SAFETY: the tensors outlive the call and the stream's work.
        assert_ok(unsafe { vwd_verify(session, &self.args(), stream) });
    }

    fn check(&self) {
        assert_eq!(self.accepted.read_ints().data, [2, 3]);
        assert_eq!(self.next_token.read_ints().data, [0, 11]);
    }
}

fn synchronize(stream: vwd_stream) {
    // SAFETY: the stream lives; its context is current.
    unsafe { check(sys::cuStreamSynchronize(stream.cast())) };
}

fn calls_leave_the_current_context_as_it_was(backend: &Backend) {
    let known = Known::new(backend);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let current = || {
                let mut context = std::ptr::null_mut();
                // SAFETY: the driver is open.
                unsafe { check(sys::cuCtxGetCurrent(&mut context)) };
                context
            };
            assert!(current().is_null(), "a new thread has no context");
            known.enqueue(backend.session(), backend.stream());
            assert!(current().is_null(), "the call left its context behind");
        });
    });
    backend.finish(0);
    known.check();
}

fn threads_share_a_session_on_streams_of_their_own(backend: &Backend) {
    // Not a Send type, but the library says that its sessions are shared.
    let session = backend.session() as usize;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                let known = Known::new(backend);
                let mut stream = std::ptr::null_mut();
                // SAFETY: placing the tensors made the context current.
                unsafe { check(sys::cuStreamCreate(&mut stream, 1)) };
                for _ in 0..200 {
                    known.enqueue(session as *const vwd_session, stream.cast());
                }
                synchronize(stream.cast());
                known.check();
                // SAFETY: idle, destroyed once.
                unsafe { check(sys::cuStreamDestroy_v2(stream)) };
            });
        }
    });
}

fn session_streams_are_distinct_and_usable(backend: &Backend) {
    let mut streams = Vec::new();
    for role in [VWD_STREAM_SELECT, VWD_STREAM_SPECULATE, VWD_STREAM_PREFETCH, VWD_STREAM_WRITE_BACK] {
        let mut stream: vwd_stream = std::ptr::null_mut();
        // SAFETY: valid arguments.
        assert_ok(unsafe { vwd_session_stream(backend.session(), role, &mut stream) });
        assert!(!stream.is_null() && !streams.contains(&stream));
        streams.push(stream);
        let known = Known::new(backend);
        known.enqueue(backend.session(), stream);
        synchronize(stream);
        known.check();
    }
}

fn info_tells_the_device_and_the_kernels(_: &Backend) {
    let details = cuda_session(args()).details();
    assert_eq!(details.device, VWD_DEVICE_CUDA);
    assert!(details.compute_capability >= 80 && details.multiprocessors > 0 && details.kernels > 0);
    assert!(details.driver_version >= 12040 && details.load_microseconds > 0);
    assert_eq!((details.scratch_bytes, details.scratch_peak), (0, 0), "no arena is made before it is needed");
    assert!(details.device_name[0] != 0);
}

/// Machine code is there for compute capability 8.x and 9.0. `run` empties the driver's cache for this case.
fn kernels_load_without_the_drivers_compiler(_: &Backend) {
    let details = cuda_session(args()).details();
    if details.compute_capability < 100 {
        assert!(details.load_microseconds < 1_500_000, "took {} µs", details.load_microseconds);
    }
}

pub fn cuda_session(options: vwd_session_options) -> Session {
    Session::create(&vwd_session_options { device: VWD_DEVICE_CUDA, ..options })
        .unwrap_or_else(|(_, text)| panic!("{text}"))
}

fn released_sessions_give_their_memory_back(backend: &Backend) {
    let free = || {
        backend.finish(0);
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current.
        unsafe { check(sys::cuMemGetInfo_v2(&mut free, &mut total)) };
        free
    };
    let cycle = || {
        let session = cuda_session(args());
        let known = Known::new(backend);
        known.enqueue(session.raw(), backend.stream());
        backend.finish(0);
        known.check();
    };
    cycle(); // the driver keeps some of what the first one needed
    let before = free();
    (0..10).for_each(|_| cycle());
    assert!(free() + (8 << 20) > before, "{} bytes are gone", before - free());
}

fn reserve_beyond_the_device_is_an_error(backend: &Backend) {
    // SAFETY: a live session.
    let status = unsafe { vwd_session_reserve(backend.session(), backend.stream(), 1 << 50) };
    assert_eq!(status, VWD_ERROR_OUT_OF_MEMORY, "{}", last_error());
    assert!(last_error().contains(&(1u64 << 50).to_string()), "{}", last_error());
    let known = Known::new(backend);
    known.enqueue(backend.session(), backend.stream());
    backend.finish(0);
    known.check();
    // SAFETY: a live session.
    assert_ok(unsafe { vwd_session_reserve(backend.session(), backend.stream(), 32 << 20) });
}

pub fn reserve(session: &Session, stream: vwd_stream, bytes: u64) {
    // SAFETY: a live session and stream.
    assert_ok(unsafe { vwd_session_reserve(session.raw(), stream, bytes) });
}

fn forget(session: &Session, stream: vwd_stream) {
    // SAFETY: a live session; nothing of it runs on the stream.
    assert_ok(unsafe { vwd_session_forget_stream(session.raw(), stream) });
}

fn arenas_are_made_on_demand(backend: &Backend) {
    let (session, stream) = (cuda_session(args()), backend.stream());
    let held = || session.details().scratch_bytes;
    reserve(&session, stream, 1 << 20);
    let first = held();
    assert!(first >= 1 << 20, "{first}");
    reserve(&session, stream, 1 << 10);
    assert_eq!(held(), first, "what is there is enough");
    reserve(&session, stream, 2 << 20);
    let both = held();
    assert!(both >= first + (2 << 20), "a graph may use the smaller one");
    forget(&session, stream);
    forget(&session, stream);
    reserve(&session, std::ptr::null_mut(), 2 << 20);
    reserve(&session, stream, 1 << 20);
    assert_eq!(held(), both, "both are used again");
    reserve(&session, session_stream(&session), 0);
    assert!(held() >= both + (16 << 20), "0 means options.scratch_bytes");
}

pub fn session_stream(session: &Session) -> vwd_stream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: valid arguments.
    assert_ok(unsafe { vwd_session_stream(session.raw(), VWD_STREAM_SPECULATE, &mut stream) });
    stream
}

fn per_thread_default_streams_have_arenas_of_their_own(_: &Backend) {
    const PER_THREAD: vwd_stream = std::ptr::without_provenance_mut(2);
    let session = cuda_session(args());
    let held = || session.details().scratch_bytes;
    reserve(&session, PER_THREAD, 1 << 20);
    let one = held();
    reserve(&session, PER_THREAD, 1 << 20);
    assert_eq!(held(), one);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            reserve(&session, PER_THREAD, 1 << 20);
            assert_eq!(held(), 2 * one);
            forget(&session, PER_THREAD);
        });
    });
    reserve(&session, PER_THREAD, 1 << 20);
    assert_eq!(held(), 2 * one, "this thread has kept its own");
}

fn reserve_leaves_a_capture_alone(backend: &Backend) {
    let (session, known) = (cuda_session(args()), Known::new(backend));
    let (stream, other) = (backend.stream(), session_stream(&session));
    let graph = Graph::capture(stream.cast(), || {
        known.enqueue(session.raw(), stream);
        // SAFETY: live sessions and streams.
        unsafe {
            let status = vwd_session_reserve(session.raw(), stream, 1 << 20);
            assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["stream: ", "is capturing a graph; expected"]);
            assert_ok(vwd_session_reserve(session.raw(), other, 1 << 20));
        }
    });
    graph.replay();
    known.check();
}

/// What an engine makes and releases while another of its streams is captured, in the mode that forbids waits and allocations to every thread.
fn pinned_memory_and_handles_leave_a_capture_alone(backend: &Backend) {
    let (session, known, stream) = (cuda_session(args()), Known::new(backend), backend.stream());
    let cache = vwd_kv_cache_options {
        layers: 1,
        kv_heads: 1,
        block_size: 8,
        key_dim: 16,
        value_dim: 16,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        max_sequences: 1,
        max_blocks: 4,
        host_blocks: 4,
        slots: 4,
        ..args()
    };
    let with_cache = || {
        let mut made = std::ptr::null_mut();
        // SAFETY: valid arguments; released once.
        unsafe {
            assert_ok(vwd_kv_cache_create(session.raw(), &cache, &mut made));
            vwd_kv_cache_release(made);
        }
    };
    let with_pinned = |bytes| {
        let pointer = pinned(&session, bytes);
        // SAFETY: handed out above.
        assert_ok(unsafe { vwd_pinned_free(session.raw(), pointer, session_stream(&session)) });
    };
    // What is asked for in the capture was used before, or was not.
    with_pinned(4096);
    for is_blocking in [false, true] {
        let mut captured = std::ptr::null_mut();
        // SAFETY: the context is current.
        unsafe { check(sys::cuStreamCreate(&mut captured, !is_blocking as u32)) };
        let graph = Graph::capture(captured, || {
            known.enqueue(session.raw(), captured.cast());
            with_pinned(4096);
            with_pinned(1 << 20);
            with_cache();
            drop(cuda_session(vwd_session_options { check: VWD_CHECK_CONTENTS as u64, ..args() }));
        });
        graph.replay();
        known.check();
        drop(graph);
        // SAFETY: idle, destroyed once.
        unsafe { check(sys::cuStreamDestroy_v2(captured)) };
    }
    assert_eq!(session.details().pinned_in_use, 0);
    synchronize(stream);
}

/// Dense attention over sequences that are long enough for several CTAs each.
fn scratch_that_is_missing_or_too_small_is_an_error(backend: &Backend) {
    let (session, stream, plain) = (cuda_session(args()), backend.stream(), Layout::default());
    let ones = |shape: &[usize]| Tensor::floats(backend, F16, &Array::filled(shape, 1.0), &plain);
    let (q, k, v) = (ones(&[2, 4, 64]), ones(&[2, 8192, 2, 64]), ones(&[2, 8192, 2, 64]));
    let seq_lens = Tensor::ints(backend, I32, &Array::new(&[2], vec![8192, 77]), &plain);
    let out = Tensor::poisoned(backend, F16, &[2, 4, 64], &plain);
    let kv = vwd_paged_kv { k: k.c(), v: v.c(), seq_lens: seq_lens.c(), ..args() };
    let call = vwd_attention_args { kv: &kv, q: q.c(), out: out.c(), ..args() };
    // SAFETY: the tensors outlive the calls.
    let attend = || unsafe { vwd_attention(session.raw(), &call, stream) };
    let mut bytes = 0;
    // SAFETY: as above.
    assert_ok(unsafe { vwd_attention_scratch(session.raw(), &call, &mut bytes) });
    assert!(bytes > 256, "{bytes}");
    let refuse = |found: &str| {
        assert_fails(attend(), VWD_ERROR_OUT_OF_SCRATCH, &[&bytes.to_string(), found, "vwd_session_reserve"]);
    };
    Graph::capture(stream.cast(), || refuse("captur"));
    reserve(&session, stream, 256);
    refuse("scratch");
    backend.finish(0);
    out.assert_untouched("out");
    reserve(&session, stream, bytes);
    Graph::capture(stream.cast(), || assert_ok(attend())).replay();
    assert!(out.read_floats().data.iter().all(|&x| x == 1.0), "the mean of ones");
}

/// vwd_topk needs no scratch; where there is some it takes another way for long rows.
fn topk_is_the_same_without_scratch(backend: &Backend) {
    let (session, stream, plain) = (cuda_session(args()), backend.stream(), Layout::default());
    rounds(1, |rng| {
        let scores = Tensor::floats(backend, F32, &rng.normals(&[3, 40_000]), &plain);
        let select = || {
            let ids = Tensor::poisoned(backend, I32, &[3, 1000], &plain);
            let counts = Tensor::poisoned(backend, I32, &[3], &plain);
            let call = vwd_topk_args { k: 1000, scores: scores.c(), ids: ids.c(), counts: counts.c(), ..args() };
            // SAFETY: the tensors outlive the call and its replay.
            let enqueue = || assert_ok(unsafe { vwd_topk(session.raw(), &call, stream) });
            Graph::capture(stream.cast(), enqueue).replay();
            (ids.read_ints(), counts.read_ints())
        };
        let without = select();
        assert_eq!(session.details().scratch_bytes, 0);
        reserve(&session, stream, 16 << 20);
        assert!(select() == without);
        assert!(session.details().scratch_peak > 0);
    });
}

fn device_that_does_not_exist_is_unavailable(_: &Backend) {
    let options = vwd_session_options { device: VWD_DEVICE_CUDA, device_id: 4096, ..args() };
    let Err((status, text)) = Session::create(&options) else { panic!("device 4096 exists") };
    assert_eq!(status, VWD_ERROR_UNAVAILABLE);
    assert!(text.contains("4096"), "{text}");
}

fn host_tensors_are_refused(backend: &Backend) {
    let (host, known) = (Backend::cpu(1), Known::new(backend));
    let elsewhere = Known::new(&host);
    let arguments = vwd_verify_args { draft: elsewhere.draft.c(), ..known.args() };
    // SAFETY: the call is refused before it reads anything.
    let status = unsafe { vwd_verify(backend.session(), &arguments, backend.stream()) };
    assert_eq!(status, VWD_ERROR_INVALID_ARGUMENT);
    assert!(last_error().starts_with("draft: device_type 1"), "{}", last_error());
}

fn pinned(session: &Session, bytes: u64) -> *mut c_void {
    let mut pointer = std::ptr::null_mut();
    // SAFETY: valid arguments.
    assert_ok(unsafe { vwd_pinned_alloc(session.raw(), bytes, &mut pointer) });
    pointer
}

fn pinned_memory_is_reused_after_its_stream_has_passed(backend: &Backend) {
    const BYTES: u64 = 1 << 20;
    let (session, stream) = (cuda_session(args()), backend.stream());
    let first = pinned(&session, BYTES);
    // SAFETY: pinned_alloc gave that many bytes.
    unsafe { first.cast::<u8>().write_bytes(7, BYTES as usize) };
    let busy = Tensor::poisoned(backend, U8, &[256 << 20], &Layout::default());
    // SAFETY: the tensor has this length; the memory stays until the stream has passed.
    unsafe {
        for value in 0..100 {
            check(sys::cuMemsetD8Async(busy.c().data as u64, value, 256 << 20, stream.cast()));
        }
        check(sys::cuMemcpyHtoDAsync_v2(busy.c().data as u64, first, BYTES as usize, stream.cast()));
        assert_ok(vwd_pinned_free(session.raw(), first, stream));
    }
    let second = pinned(&session, BYTES);
    assert_ne!(first, second, "handed out while the stream still reads it");
    synchronize(stream);
    let third = pinned(&session, BYTES);
    assert_eq!(first, third, "kept for reuse");
    for pointer in [second, third] {
        // SAFETY: handed out above, given back once.
        assert_ok(unsafe { vwd_pinned_free(session.raw(), pointer, stream) });
    }
    let details = session.details();
    assert_eq!((details.pinned_in_use, details.pinned_peak, details.pinned_cached), (0, 2 * BYTES, 2 * BYTES));
}

fn pinned_limit_is_an_error_that_changes_nothing(backend: &Backend) {
    let session = cuda_session(vwd_session_options { pinned_limit: 3 << 20, ..args() });
    let first = pinned(&session, 2 << 20);
    let mut second = first;
    // SAFETY: valid arguments.
    let status = unsafe { vwd_pinned_alloc(session.raw(), 2 << 20, &mut second) };
    assert_eq!(status, VWD_ERROR_OUT_OF_MEMORY);
    assert_eq!(second, first, "written on failure");
    // SAFETY: handed out above.
    unsafe {
        first.cast::<u8>().write_bytes(1, 2 << 20);
        assert_ok(vwd_pinned_free(session.raw(), first, backend.stream()));
        assert_eq!(vwd_pinned_free(session.raw(), first, backend.stream()), VWD_ERROR_INVALID_ARGUMENT);
    }
}

/// Device memory for one case.
struct Plot(sys::CUdeviceptr);

impl Plot {
    fn new(bytes: usize) -> Plot {
        let mut address = 0;
        // SAFETY: the context is current.
        unsafe { check(sys::cuMemAlloc_v2(&mut address, bytes)) };
        Plot(address)
    }

    fn write<T: Copy>(&self, at: usize, values: &[T]) {
        // SAFETY: the case writes inside of what it asked for.
        unsafe { check(sys::cuMemcpyHtoD_v2(self.0 + at as u64, values.as_ptr().cast(), size_of_val(values))) };
    }

    fn read<T: Copy + Default, const N: usize>(&self, at: usize) -> [T; N] {
        let mut values = [T::default(); N];
        // SAFETY: as above.
        unsafe { check(sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), self.0 + at as u64, size_of_val(&values))) };
        values
    }

    fn tensor(&self, backend: &Backend, at: usize, dtype: DType, shape: &[i64], strides: &[i64]) -> vwd_tensor {
        let mut t = absent();
        (t.device_type, t.device_id) = backend.device();
        t.data = (self.0 + at as u64) as *mut c_void;
        (t.dtype_code, t.dtype_bits, t.lanes, t.ndim) = (dtype.code, dtype.bits, 1, shape.len() as i32);
        t.shape[..shape.len()].copy_from_slice(shape);
        t.strides[..strides.len()].copy_from_slice(strides);
        t
    }
}

impl Drop for Plot {
    fn drop(&mut self) {
        // SAFETY: allocated once; the stream has passed.
        unsafe { check(sys::cuMemFree_v2(self.0)) };
    }
}

/// The second sequence of each input, and the second packed row, lie more than 2^31 bytes past the first.
fn strides_beyond_32_bits_are_followed(backend: &Backend) {
    const FAR: usize = (1 << 31) + 64;
    const ROWS: usize = 4096;
    const TARGET: usize = 64;
    let (inputs, packed) = (Plot::new(FAR + 2 * ROWS), Plot::new(FAR + 64));
    let results = Plot::new(4096);
    // One token of two is accepted in sequence 0, none in sequence 1; then all is shifted by one.
    for (accepted, draft) in [([1, 0], [[5, 9], [8, 7]]), ([0, 1], [[6, 9], [7, 1]])] {
        for (i, draft) in draft.iter().enumerate() {
            inputs.write(i * FAR, draft);
            inputs.write(i * FAR + TARGET, &[5 + 2 * i as i32, 3, 4]);
            inputs.write(i * FAR + ROWS, &[100 * i as u64, 1, 100 * i as u64 + 1, 2]);
        }
        let far = FAR as i64;
        let rows = [inputs.tensor(backend, ROWS, I64, &[2, 2, 2], &[far / 8, 2, 1])];
        let to = [packed.tensor(backend, 0, I64, &[2, 2], &[far / 8, 1])];
        let arguments = vwd_verify_pack_args {
            tensor_count: 1,
            rows: rows.as_ptr(),
            packed: to.as_ptr(),
            draft: inputs.tensor(backend, 0, I32, &[2, 2], &[far / 4, 1]),
            target: inputs.tensor(backend, TARGET, I32, &[2, 3], &[far / 4, 1]),
            accepted: results.tensor(backend, 0, I32, &[2], &[1]),
            next_token: results.tensor(backend, 64, I32, &[2], &[1]),
            offsets: results.tensor(backend, 128, I32, &[3], &[1]),
            ..args()
        };
        // SAFETY: the memory outlives the call.
        backend.finish(unsafe { vwd_verify_pack(backend.session(), &arguments, backend.stream()) });
        assert_eq!(results.read::<i32, 2>(0), accepted);
        assert_eq!(results.read::<i32, 3>(128), [0, accepted[0], 1]);
        let source = accepted.iter().position(|&k| k == 1).unwrap() as u64;
        assert_eq!(packed.read::<u64, 2>(0), [100 * source, 1]);
    }
    // Both rows of sequence 1, of which the second goes far.
    let rows = [inputs.tensor(backend, ROWS, I64, &[2, 2, 2], &[FAR as i64 / 8, 2, 1])];
    let to = [packed.tensor(backend, 0, I64, &[2, 2], &[FAR as i64 / 8, 1])];
    results.write(0, &[0, 2]);
    let arguments = vwd_pack_args {
        tensor_count: 1,
        rows: rows.as_ptr(),
        packed: to.as_ptr(),
        accepted: results.tensor(backend, 0, I32, &[2], &[1]),
        offsets: results.tensor(backend, 128, I32, &[3], &[1]),
        ..args()
    };
    // SAFETY: the memory outlives the call.
    backend.finish(unsafe { vwd_pack(backend.session(), &arguments, backend.stream()) });
    assert_eq!(packed.read::<u64, 2>(0), [100, 1]);
    assert_eq!(packed.read::<u64, 2>(FAR), [101, 2]);
}

fn session_logs_kernels_arenas_and_variants(backend: &Backend) {
    let mut lines = Lines::new();
    let (log, log_context) = (Some(collect as _), (&raw mut lines).cast());
    let session = cuda_session(vwd_session_options { log, log_context, log_level: VWD_LOG_DEBUG, ..args() });
    let (known, stream) = (Known::new(backend), backend.stream());
    known.enqueue(session.raw(), stream);
    known.enqueue(session.raw(), stream);
    reserve(&session, stream, 1 << 20);
    reserve(&session, stream, 2 << 20);
    drop(session);
    let count = |level: u32, words: &[&str]| {
        lines.iter().filter(|line| line.0 == level && words.iter().all(|words| line.1.contains(words))).count()
    };
    assert_eq!(count(VWD_LOG_INFO, &["session on CUDA device 0", "kernels loaded in"]), 1, "{lines:?}");
    assert_eq!(count(VWD_LOG_DEBUG, &["kernels of verify/verify loaded from"]), 1, "{lines:?}");
    assert_eq!(count(VWD_LOG_INFO, &["first use of variant verify=common"]), 1, "{lines:?}");
    assert_eq!(count(VWD_LOG_INFO, &["has a scratch arena of 1048576 bytes"]), 1, "{lines:?}");
    assert_eq!(count(VWD_LOG_INFO, &["has a scratch arena of 2097152 bytes instead of 1048576"]), 1, "{lines:?}");
}

fn sessions_that_check_contents_refuse_a_capture(backend: &Backend) {
    let (known, checked) = (Known::new(backend), backend.checking());
    let lens = Tensor::ints(backend, I32, &Array::new(&[2], vec![3, 2]), &Layout::default());
    let verify = |session| {
        let args = vwd_verify_args { draft_lens: lens.c(), ..known.args() };
        // SAFETY: the tensors are alive until the stream has passed.
        unsafe { vwd_verify(session, &args, backend.stream()) }
    };
    let graph = Graph::capture(backend.stream().cast(), || {
        let words = ["is capturing a graph; expected one that is not", "the session checks contents"];
        assert_fails(verify(checked.session()), VWD_ERROR_INVALID_ARGUMENT, &words);
        // The capture goes on.
        assert_ok(verify(backend.session()));
    });
    assert_eq!(known.accepted.read_ints().data, [POISONED; 2]);
    graph.replay();
    assert_eq!(known.accepted.read_ints().data, [2, 2]);
    backend.finish(verify(checked.session()));
}

/// What an int32 that no call wrote reads as.
const POISONED: i64 = 0xfbfb_fbfbu32 as i32 as i64;
