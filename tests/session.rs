//! The session: creation and release, threads, the last error, pinned memory, and what happens without a GPU.

mod support;

use std::ffi::{CStr, c_char, c_void};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::*;
use vanward::abi::*;
use vanward::capi::boundary::boundary;
use vanward::capi::*;

// --- creation and release --------------------------------------------------------------------------------------------

#[test]
fn session_refuses_options_that_make_no_sense() {
    let refuse = |options: &vwd_session_options, name: &str| match Session::create(options) {
        Ok(_) => panic!("{name} was accepted"),
        Err((status, text)) => {
            assert_eq!(status, VWD_ERROR_INVALID_ARGUMENT, "{text}");
            assert!(text.starts_with(name) && text.contains("; expected "), "{text}");
        }
    };
    let cpu = || vwd_session_options { device: VWD_DEVICE_CPU, ..args() };
    for device in [3, 255, u32::MAX] {
        refuse(&vwd_session_options { device, ..args() }, "options.device: ");
    }
    for device_id in [-1, i32::MIN] {
        refuse(&vwd_session_options { device_id, ..cpu() }, "options.device_id: ");
    }
    refuse(&vwd_session_options { threads: 1025, ..cpu() }, "options.threads: ");
    refuse(&vwd_session_options { threads: u32::MAX, ..cpu() }, "options.threads: ");
    refuse(&vwd_session_options { flags: 1, ..cpu() }, "options.flags: ");
    for struct_size in [0, 4, size_of::<vwd_session_options>() as u32 - 4, u32::MAX] {
        refuse(&vwd_session_options { struct_size, ..cpu() }, "options.struct_size: ");
    }
}

#[test]
fn failed_creation_leaves_the_out_parameter_alone() {
    let options = vwd_session_options { device: 99, ..args() };
    let mut session = 0x40 as *mut vwd_session;
    // SAFETY: both pointers are valid; what the second holds is not followed.
    let status = unsafe { vwd_session_create(&options, &mut session) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["options.device"]);
    assert_eq!(session, 0x40 as *mut vwd_session);
    // SAFETY: NULL is an error, not undefined.
    let status = unsafe { vwd_session_create(std::ptr::null(), std::ptr::null_mut()) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["session: NULL"]);
}

#[test]
fn releasing_null_is_a_no_op() {
    // SAFETY: the contract allows NULL.
    unsafe { vwd_session_release(std::ptr::null_mut()) };
}

#[test]
fn null_session_is_an_argument_error() {
    let null = std::ptr::null();
    let (mut details, mut pointer, mut stream) = (args(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: NULL handles are errors, the other pointers are valid.
    unsafe {
        let names_session = |status| assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["session: NULL; expected "]);
        names_session(vwd_session_info(null, &mut details));
        names_session(vwd_session_reserve(null, std::ptr::null_mut(), 1));
        names_session(vwd_session_forget_stream(null, std::ptr::null_mut()));
        names_session(vwd_session_stream(null, VWD_STREAM_SELECT, &mut stream));
        names_session(vwd_pinned_alloc(null, 1, &mut pointer));
        names_session(vwd_pinned_free(null, std::ptr::null_mut(), std::ptr::null_mut()));
    }
}

#[test]
fn info_tells_what_the_session_runs_on() {
    let details = Session::cpu(3).details();
    assert_eq!((details.device, details.threads, details.driver_version, details.kernels), (VWD_DEVICE_CPU, 3, 0, 0));
    assert_eq!(details.device_name[..4], [b'C' as c_char, b'P' as c_char, b'U' as c_char, 0]);
    let options = vwd_session_options { device: VWD_DEVICE_CPU, ..args() };
    let all = std::thread::available_parallelism().unwrap().get() as u32;
    assert_eq!(Session::create(&options).unwrap().details().threads, all);
}

#[test]
fn info_checks_the_size_of_what_it_fills() {
    let session = Session::cpu(1);
    // SAFETY: the pointers are valid or NULL.
    unsafe {
        assert_fails(vwd_session_info(session.raw(), std::ptr::null_mut()), VWD_ERROR_INVALID_ARGUMENT, &["details"]);
        let mut details: vwd_session_details = args();
        details.struct_size -= 8;
        details.threads = 77;
        let status = vwd_session_info(session.raw(), &mut details);
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["details.struct_size"]);
        assert_eq!(details.threads, 77, "written in spite of the error");
    }
}

#[test]
fn cpu_session_has_no_streams() {
    let session = Session::cpu(1);
    for role in [VWD_STREAM_SELECT, VWD_STREAM_SPECULATE, VWD_STREAM_PREFETCH, VWD_STREAM_WRITE_BACK] {
        let mut stream = 0x40 as vwd_stream;
        // SAFETY: the pointers are valid.
        assert_ok(unsafe { vwd_session_stream(session.raw(), role, &mut stream) });
        assert!(stream.is_null());
    }
    let mut stream = 0x40 as vwd_stream;
    // SAFETY: the pointers are valid or NULL.
    unsafe {
        assert_fails(vwd_session_stream(session.raw(), 4, &mut stream), VWD_ERROR_INVALID_ARGUMENT, &["role: 4"]);
        assert_fails(
            vwd_session_stream(session.raw(), 0, std::ptr::null_mut()),
            VWD_ERROR_INVALID_ARGUMENT,
            &["stream"],
        );
        assert_ok(vwd_session_reserve(session.raw(), std::ptr::null_mut(), 1 << 40));
        assert_fails(vwd_session_reserve(session.raw(), stream, 1), VWD_ERROR_INVALID_ARGUMENT, &["stream"]);
        assert_ok(vwd_session_forget_stream(session.raw(), std::ptr::null_mut()));
        assert_fails(vwd_session_forget_stream(session.raw(), stream), VWD_ERROR_INVALID_ARGUMENT, &["stream"]);
    }
    assert_eq!(stream, 0x40 as vwd_stream);
}

#[test]
fn forecast_may_be_released_after_its_session() {
    let session = Session::cpu(2);
    let options = vwd_forecast_options { layers: 1, input_dim: 4, q_heads: 1, head_dim: 4, ..args() };
    let mut forecast = std::ptr::null_mut();
    // SAFETY: the pointers are valid.
    assert_ok(unsafe { vwd_forecast_create(session.raw(), &options, &mut forecast) });
    drop(session);
    let mut details: vwd_forecast_details = args();
    // SAFETY: the forecast keeps its session alive; released once.
    unsafe {
        assert_ok(vwd_forecast_info(forecast, &mut details));
        vwd_forecast_release(forecast);
        vwd_forecast_release(std::ptr::null_mut());
    }
    assert_eq!((details.layers, details.solved), (1, 0));
}

// --- the last error --------------------------------------------------------------------------------------------------

/// Makes this thread's last error mention `device`.
fn fail(device: u32) {
    let options = vwd_session_options { device, ..args() };
    assert!(Session::create(&options).is_err());
}

#[test]
fn last_error_belongs_to_its_thread() {
    fail(1000);
    let threads: Vec<_> = (0..8)
        .map(|n| {
            std::thread::spawn(move || {
                assert_eq!(last_message(), "", "a new thread has no error");
                for round in 0..100 {
                    fail(n * 1000 + round + 5);
                    assert!(last_error().contains(&format!("options.device: {};", n * 1000 + round + 5)));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(last_error().contains("options.device: 1000;"));
}

#[test]
fn success_leaves_the_last_error_as_it_was() {
    fail(7);
    let text = last_error();
    Session::cpu(1).details();
    assert_eq!(last_error(), text);
}

#[test]
fn last_error_is_cut_at_a_character() {
    // The message names γ, which takes two bytes.
    let backend = Backend::cpu(1);
    let draft = Tensor::poisoned(&backend, I32, &[2, 3], &Layout::default());
    let args = vwd_verify_args { draft: draft.c(), target: draft.c(), ..args() };
    // SAFETY: the tensors are valid.
    let status = unsafe { vwd_verify(backend.session(), &args, std::ptr::null_mut()) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["target: shape [2, 3]; expected [B=2, γ+1=4]"]);
    let whole = last_message();
    assert!(whole.starts_with("vwd_verify: target: "), "{whole}");
    for cap in 0..whole.len() + 3 {
        let mut bytes = vec![0xeeu8; whole.len() + 8];
        // SAFETY: the buffer holds more than cap bytes.
        assert_eq!(unsafe { vwd_last_error(bytes.as_mut_ptr().cast(), cap) }, whole.len());
        assert!(bytes[cap..].iter().all(|&b| b == 0xee), "wrote past {cap} bytes");
        if cap > 0 {
            let end = bytes.iter().position(|&b| b == 0).expect("NUL-terminated");
            let text = std::str::from_utf8(&bytes[..end]).expect("cut at a character");
            assert!(whole.starts_with(text) && end + 3 > cap.min(whole.len() + 1), "cap {cap}: {text}");
        }
    }
    // SAFETY: a NULL buffer is only measured.
    assert_eq!(unsafe { vwd_last_error(std::ptr::null_mut(), 100) }, whole.len());
}

// --- pinned memory ---------------------------------------------------------------------------------------------------

fn pinned_alloc(session: &Session, bytes: u64) -> Result<*mut c_void, vwd_status> {
    let mut pointer = std::ptr::null_mut();
    // SAFETY: the pointers are valid.
    match unsafe { vwd_pinned_alloc(session.raw(), bytes, &mut pointer) } {
        VWD_OK => Ok(pointer),
        status => Err(status),
    }
}

fn pinned_free(session: &Session, pointer: *mut c_void) -> vwd_status {
    // SAFETY: any pointer may be given: one that is not the session's is an error.
    unsafe { vwd_pinned_free(session.raw(), pointer, std::ptr::null_mut()) }
}

#[test]
fn pinned_memory_is_aligned_writable_and_counted() {
    let session = Session::cpu(1);
    let sizes = [1u64, 7, 4096, 100_000];
    let pointers = sizes.map(|bytes| pinned_alloc(&session, bytes).unwrap());
    for (&pointer, &bytes) in pointers.iter().zip(&sizes) {
        assert_eq!(pointer as usize % 4096, 0);
        // SAFETY: the memory has this size.
        unsafe { pointer.cast::<u8>().write_bytes(0xab, bytes as usize) };
    }
    let total: u64 = sizes.iter().sum();
    assert_eq!(session.details().pinned_in_use, total);
    pointers.iter().for_each(|&pointer| assert_ok(pinned_free(&session, pointer)));
    let details = session.details();
    assert_eq!((details.pinned_in_use, details.pinned_peak), (0, total));
}

#[test]
fn session_logs_its_creation_as_far_as_the_level_says() {
    let mut lines = Lines::new();
    let log_context = (&raw mut lines).cast();
    let log = Some(collect as _);
    let options = vwd_session_options { device: VWD_DEVICE_CPU, threads: 2, log, log_context, ..args() };
    drop(Session::create(&vwd_session_options { log_level: VWD_LOG_WARNING, ..options }).unwrap());
    let options = vwd_session_options { check: VWD_CHECK_NOTHING as u64, ..options };
    drop(Session::create(&vwd_session_options { log_level: VWD_LOG_DEBUG, ..options }).unwrap());
    let session = (VWD_LOG_INFO, "session on the CPU, threads: 2".to_owned());
    assert_eq!(std::mem::take(&mut lines).as_slice(), std::slice::from_ref(&session));
    drop(Session::create(&vwd_session_options { check: VWD_CHECK_CONTENTS as u64, ..options }).unwrap());
    let checks = (VWD_LOG_INFO, "each call checks the contents of its tensors first".to_owned());
    assert_eq!(lines, [session, checks]);
}

/// A warning where there is no device, and none where there is.
#[test]
fn session_logs_why_it_falls_back_to_the_cpu() {
    let reason = Session::create(&vwd_session_options { device: VWD_DEVICE_CUDA, ..args() }).err();
    let mut lines = Lines::new();
    let (log, log_context) = (Some(collect as _), (&raw mut lines).cast());
    let options = vwd_session_options { log, log_context, log_level: VWD_LOG_WARNING, ..args() };
    drop(Session::create(&options).expect("a session"));
    let expected = reason.map(|(_, text)| (VWD_LOG_WARNING, format!("the session computes on the CPU: {text}")));
    assert_eq!(lines, Lines::from_iter(expected));
}

#[test]
fn session_refuses_a_log_that_makes_no_sense() {
    let refuse = |options: vwd_session_options, text: &str| {
        let (status, found) = Session::create(&options).err().expect("refused");
        assert_eq!((status, found.starts_with(text)), (VWD_ERROR_INVALID_ARGUMENT, true), "{found}");
    };
    let cpu = || vwd_session_options { device: VWD_DEVICE_CPU, ..args() };
    refuse(vwd_session_options { log_level: 4, ..cpu() }, "options.log_level: 4; expected ");
    refuse(vwd_session_options { log_context: 8 as *mut c_void, ..cpu() }, "options.log_context: ");
}

#[test]
fn session_refuses_a_check_that_there_is_not() {
    let (status, found) =
        Session::create(&vwd_session_options { device: VWD_DEVICE_CPU, check: 3, ..args() }).err().expect("refused");
    assert_eq!(
        (status, found.as_str()),
        (VWD_ERROR_INVALID_ARGUMENT, "options.check: 3; expected a VWD_CHECK_* value (0 to 2)")
    );
}

#[test]
fn session_refuses_delays_of_more_than_a_second() {
    let create = |delay_microseconds| {
        Session::create(&vwd_session_options { device: VWD_DEVICE_CPU, delay_microseconds, ..args() })
    };
    assert!(create(0).is_ok() && create(1_000_000).is_ok());
    for wrong in [1_000_001, u64::MAX] {
        let expected = format!("options.delay_microseconds: {wrong}; expected microseconds, at most 1000000");
        assert_eq!(create(wrong).err().expect("refused"), (VWD_ERROR_INVALID_ARGUMENT, expected));
    }
}

#[test]
fn session_refuses_invariant_batches_of_more_than_65536() {
    let create =
        |invariant_batch| Session::create(&vwd_session_options { device: VWD_DEVICE_CPU, invariant_batch, ..args() });
    assert!(create(1).is_ok() && create(65536).is_ok());
    for wrong in [65537, u64::MAX] {
        let expected = format!("options.invariant_batch: {wrong}; expected 0, or sequences, at most 65536");
        assert_eq!(create(wrong).err().expect("refused"), (VWD_ERROR_INVALID_ARGUMENT, expected));
    }
}

#[test]
fn session_refuses_variants_that_no_family_has() {
    let create = |text: &CStr| {
        Session::create(&vwd_session_options { device: VWD_DEVICE_CPU, variants: text.as_ptr(), ..args() })
    };
    assert!(create(c"").is_ok() && create(c"predictor=cluster").is_ok());
    for (text, words) in [
        (c"predictor", "options.variants: \"predictor\"; expected entries family=variant"),
        (c"predicter=cluster", "options.variants: \"predicter=cluster\"; expected one of the families "),
        (
            c"predictor=clusters",
            "options.variants: \"predictor=clusters\"; expected one of the variants of predictor: one_cta, cluster",
        ),
    ] {
        let (status, found) = create(text).err().expect("refused");
        assert_eq!((status, found.starts_with(words)), (VWD_ERROR_INVALID_ARGUMENT, true), "{found}");
    }
}

#[test]
fn pinned_limit_is_an_error_that_changes_nothing() {
    let options = vwd_session_options { device: VWD_DEVICE_CPU, pinned_limit: 10_000, ..args() };
    let session = Session::create(&options).unwrap();
    let first = pinned_alloc(&session, 6_000).unwrap();
    for bytes in [4_001, u64::MAX - 6_000] {
        let mut pointer = 0x40 as *mut c_void;
        // SAFETY: the pointers are valid.
        let status = unsafe { vwd_pinned_alloc(session.raw(), bytes, &mut pointer) };
        assert!(matches!(status, VWD_ERROR_OUT_OF_MEMORY | VWD_ERROR_INVALID_ARGUMENT), "{status}: {}", last_error());
        assert_eq!(pointer, 0x40 as *mut c_void);
    }
    assert_eq!(session.details().pinned_in_use, 6_000);
    let second = pinned_alloc(&session, 4_000).unwrap();
    assert_eq!(pinned_alloc(&session, 1), Err(VWD_ERROR_OUT_OF_MEMORY));
    assert!(last_error().contains("10000"), "says the limit: {}", last_error());
    assert_ok(pinned_free(&session, first));
    assert_ok(pinned_free(&session, second));
    assert_ok(pinned_free(&session, pinned_alloc(&session, 10_000).unwrap()));
}

#[test]
fn pinned_memory_refuses_nonsense() {
    let (session, other) = (Session::cpu(1), Session::cpu(1));
    assert_ok(pinned_free(&session, std::ptr::null_mut()));
    for bytes in [0, u64::MAX, 1 << 63] {
        assert_eq!(pinned_alloc(&session, bytes), Err(VWD_ERROR_INVALID_ARGUMENT));
        assert!(last_error().starts_with("bytes: "), "{}", last_error());
    }
    // SAFETY: NULL is an error.
    let status = unsafe { vwd_pinned_alloc(session.raw(), 1, std::ptr::null_mut()) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["pointer: NULL"]);
    let pointer = pinned_alloc(&session, 64).unwrap();
    let refused = |session, pointer| {
        assert_fails(pinned_free(session, pointer), VWD_ERROR_INVALID_ARGUMENT, &["pointer: ", "; expected "]);
    };
    refused(&other, pointer);
    refused(&session, pointer.wrapping_byte_add(8));
    assert_ok(pinned_free(&session, pointer));
    refused(&session, pointer);
}

#[test]
fn pinned_memory_is_shared_by_threads() {
    let session = Session::cpu(1);
    std::thread::scope(|scope| {
        for n in 0..4u8 {
            let session = &session;
            scope.spawn(move || {
                for round in 0..200u64 {
                    let bytes = 1 + round * 37;
                    let pointer = pinned_alloc(session, bytes).unwrap();
                    // SAFETY: this thread's own memory of this size.
                    let memory = unsafe { std::slice::from_raw_parts_mut(pointer.cast::<u8>(), bytes as usize) };
                    memory.fill(n);
                    std::thread::yield_now();
                    assert!(memory.iter().all(|&b| b == n));
                    assert_ok(pinned_free(session, pointer));
                }
            });
        }
    });
    assert_eq!(session.details().pinned_in_use, 0);
}

// --- in a process of its own -----------------------------------------------------------------------------------------

/// Runs `body` alone in a new process, which runs the calling test again; what that wrote to standard error. None in the
/// new process itself.
fn alone(test: &str, body: impl FnOnce()) -> Option<String> {
    const MARK: &str = "VANWARD_TEST_ALONE";
    if std::env::var_os(MARK).is_some() {
        body();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(MARK, "1").args([test, "--exact", "--nocapture", "--test-threads=1"]).stdin(Stdio::null());
    let result = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&result.stdout), String::from_utf8_lossy(&result.stderr));
    assert!(result.status.success() && out.contains("1 passed"), "{test}: {out}{err}");
    Some(err.into_owned())
}

#[test]
fn asking_for_cuda_without_a_driver_is_unavailable_and_prints_nothing() {
    let printed = alone("asking_for_cuda_without_a_driver_is_unavailable_and_prints_nothing", || {
        let cuda = Session::create(&vwd_session_options { device: VWD_DEVICE_CUDA, ..args() });
        if let Err((status, text)) = &cuda {
            assert_eq!(*status, VWD_ERROR_UNAVAILABLE, "{text}");
            assert!(text.contains("driver") || text.contains("device"), "the reason: {text}");
        }
        // With a driver, too, a device that is not there must not take the process down.
        let far = Session::create(&vwd_session_options { device: VWD_DEVICE_CUDA, device_id: 1000, ..args() });
        assert_eq!(far.map(|_| ()).unwrap_err().0, VWD_ERROR_UNAVAILABLE);
        let auto = Session::create(&args()).unwrap_or_else(|(_, text)| panic!("AUTO falls back: {text}"));
        let expected = if cuda.is_ok() { VWD_DEVICE_CUDA } else { VWD_DEVICE_CPU };
        assert_eq!(auto.details().device, expected);
    });
    assert_eq!(printed.unwrap_or_default(), "");
}

#[test]
fn panic_inside_becomes_a_status_and_prints_nothing() {
    let printed = alone("panic_inside_becomes_a_status_and_prints_nothing", || {
        let status = boundary("vwd_call", || panic!("seven is not {}", 8));
        assert_fails(status, VWD_ERROR_INTERNAL, &["seven is not 8", "tests/session.rs"]);
        assert_eq!(boundary("vwd_call", || std::panic::panic_any(5)), VWD_ERROR_INTERNAL);
        assert_eq!(boundary("vwd_call", || Ok(())), VWD_OK);
    });
    assert_eq!(printed.unwrap_or_default(), "");
}

#[test]
fn panic_of_the_caller_is_shown_as_before() {
    let printed = alone("panic_of_the_caller_is_shown_as_before", || {
        drop(Session::cpu(2));
        assert!(std::thread::spawn(|| panic!("of the caller's own")).join().is_err());
    });
    assert!(printed.is_none_or(|text| text.contains("of the caller's own")));
}

#[test]
fn released_sessions_leave_no_threads() {
    alone("released_sessions_leave_no_threads", || {
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        let before = threads();
        // A thread that was waited for may still be listed for a moment.
        let settle = || {
            let deadline = Instant::now() + Duration::from_secs(2);
            while threads() != before && Instant::now() < deadline {
                std::thread::yield_now();
            }
            threads()
        };
        for round in 0..100 {
            let session = Session::cpu(1 + round % 7);
            assert_eq!(session.details().threads, 1 + round % 7);
            drop(session);
            assert_eq!(settle(), before, "round {round}");
        }
        let sessions: Vec<Session> = (0..20).map(|_| Session::cpu(3)).collect();
        drop(sessions);
        assert_eq!(settle(), before);
    });
}

// --- after fork ------------------------------------------------------------------------------------------------------

/// Runs `body` in a child of this process, which must end well within some seconds.
fn in_child(body: impl FnOnce() + std::panic::UnwindSafe) {
    // SAFETY: the child runs the body and ends; this process waits for it.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(std::panic::catch_unwind(body).is_err() as i32);
        }
        assert!(child > 0, "fork");
        let (mut status, deadline) = (0, Instant::now() + Duration::from_secs(30));
        while libc::waitpid(child, &mut status, libc::WNOHANG) == 0 {
            if Instant::now() > deadline {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &mut status, 0);
                panic!("the child hangs");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child failed: {status:#x}");
    }
}

/// Verifies so many rows that a session's threads share the work.
fn verify_many(backend: &Backend) -> vwd_status {
    const ROWS: usize = 20_000;
    let tokens = |width| Tensor::ints(backend, I32, &Array::filled(&[ROWS, width], 7), &Layout::default());
    let result = || Tensor::poisoned(backend, I32, &[ROWS], &Layout::default());
    let (draft, target, accepted, next_token) = (tokens(4), tokens(5), result(), result());
    let arguments = vwd_verify_args {
        draft: draft.c(),
        target: target.c(),
        accepted: accepted.c(),
        next_token: next_token.c(),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    let status = unsafe { vwd_verify(backend.session(), &arguments, std::ptr::null_mut()) };
    assert!(status != VWD_OK || accepted.read_ints().data.iter().all(|&k| k == 4));
    status
}

#[test]
fn child_gets_errors_from_what_its_parent_made_and_may_make_its_own() {
    alone("child_gets_errors_from_what_its_parent_made_and_may_make_its_own", || {
        let backend = Backend::cpu(4);
        assert_ok(verify_many(&backend));
        let options = vwd_forecast_options { layers: 1, input_dim: 4, q_heads: 1, head_dim: 4, ..args() };
        let mut forecast = std::ptr::null_mut();
        // SAFETY: the pointers are valid.
        assert_ok(unsafe { vwd_forecast_create(backend.session(), &options, &mut forecast) });
        let (mut cache, mut sequence) = (std::ptr::null_mut(), 77);
        // SAFETY: the pointers are valid.
        unsafe {
            assert_ok(vwd_kv_cache_create(backend.session(), &small_cache(), &mut cache));
            assert_ok(vwd_kv_cache_add(cache, &mut sequence, std::ptr::null_mut()));
        }
        let (session, forecast, cache) = (backend.session() as usize, forecast as usize, cache as usize);
        let shared = std::panic::AssertUnwindSafe(&backend);
        let refused = move || {
            let refused = |status, name: &str| {
                let words =
                    format!("{name}: made before this process was forked; expected a handle made in this process");
                assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &[&words]);
            };
            let (session, forecast) = (session as *const vwd_session, forecast as *mut vwd_forecast);
            let (cache, stream) = (cache as *mut vwd_kv_cache, std::ptr::null_mut());
            refused(verify_many(&shared), "session");
            // SAFETY: the parent's handles, which live here as memory.
            unsafe {
                refused(vwd_session_info(session, &mut args()), "session");
                refused(vwd_forecast_info(forecast, &mut args()), "forecast");
                refused(vwd_forecast_create(session, &options, &mut std::ptr::null_mut()), "session");
                refused(vwd_kv_cache_info(cache, &mut args()), "cache");
                refused(vwd_kv_cache_add(cache, &mut 77, stream), "cache");
                refused(vwd_kv_cache_append(cache, &args(), stream), "cache");
                refused(vwd_kv_cache_resolve(cache, &args(), stream), "cache");
                refused(vwd_kv_cache_fetch(cache, 0, stream), "cache");
                refused(vwd_kv_cache_wait(cache, 0, stream), "cache");
                refused(vwd_kv_cache_free(cache, sequence, stream), "cache");
                refused(vwd_kv_cache_create(session, &small_cache(), &mut std::ptr::null_mut()), "session");
                vwd_kv_cache_release(cache);
                vwd_forecast_release(forecast);
                vwd_session_release(session.cast_mut());
            }
        };
        in_child(move || {
            refused();
            // A session of its own works, and is not its child's.
            let own = Backend::cpu(4);
            assert_ok(verify_many(&own));
            let shared = std::panic::AssertUnwindSafe(&own);
            in_child(move || {
                assert_eq!(verify_many(&shared), VWD_ERROR_INVALID_ARGUMENT);
                refused();
            });
            assert_ok(verify_many(&own));
        });
        assert_ok(verify_many(&backend));
        // SAFETY: released once in this process.
        unsafe {
            let cache = cache as *mut vwd_kv_cache;
            assert_ok(vwd_kv_cache_free(cache, sequence, std::ptr::null_mut()));
            vwd_kv_cache_release(cache);
            vwd_forecast_release(forecast as *mut vwd_forecast);
        }
        assert_eq!(backend.details().pinned_in_use, 0, "the children have released nothing of it");
    });
}
