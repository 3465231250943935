//! Sessions that release themselves, and what is asserted about statuses and messages.

use super::args;
use std::ffi::{CStr, c_char, c_void};
use vanward::abi::*;
use vanward::capi::*;

pub struct Session(*mut vwd_session);

// SAFETY: a session may be used from many threads; that it may is part of what is tested.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    pub fn cpu(threads: u32) -> Session {
        let options = vwd_session_options { device: VWD_DEVICE_CPU, threads, ..args() };
        Session::create(&options).unwrap_or_else(|(status, text)| panic!("CPU session: {status}: {text}"))
    }

    /// The session, or the status and message of why there is none.
    pub fn create(options: &vwd_session_options) -> Result<Session, (vwd_status, String)> {
        let mut session = std::ptr::null_mut();
        // SAFETY: both pointers are valid.
        let status = unsafe { vwd_session_create(options, &mut session) };
        if status == VWD_OK { Ok(Session(session)) } else { Err((status, last_error())) }
    }

    pub fn raw(&self) -> *const vwd_session {
        self.0
    }

    /// What `vwd_session_info` tells.
    pub fn details(&self) -> vwd_session_details {
        let mut details = args();
        // SAFETY: both pointers are valid.
        assert_ok(unsafe { vwd_session_info(self.0, &mut details) });
        details
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: created by vwd_session_create, released once.
        unsafe { vwd_session_release(self.0) };
    }
}

/// What sessions log: level and text.
pub type Lines = Vec<(u32, String)>;

/// A log whose context is [`Lines`].
///
/// # Safety
/// The lines outlive the session, which one thread uses.
pub unsafe extern "C" fn collect(lines: *mut c_void, level: u32, text: *const c_char) {
    // SAFETY: the context is the test's lines, the text NUL-terminated.
    let (lines, text) = unsafe { (&mut *lines.cast::<Lines>(), CStr::from_ptr(text)) };
    lines.push((level, text.to_str().expect("UTF-8").to_owned()));
}

/// The message of this thread's last failed call, without the name of the call that it begins with.
pub fn last_error() -> String {
    let message = last_message();
    match message.split_once(": ") {
        Some((call, rest)) if call.starts_with("vwd_") => rest.to_owned(),
        _ => {
            assert_eq!(message, "", "it begins with the call's name");
            message
        }
    }
}

/// The whole message of this thread's last failed call; empty if none has failed.
pub fn last_message() -> String {
    // SAFETY: NULL with capacity 0, then a buffer of the size that was told.
    unsafe {
        let length = vwd_last_error(std::ptr::null_mut(), 0);
        let mut bytes = vec![0u8; length + 1];
        assert_eq!(vwd_last_error(bytes.as_mut_ptr().cast::<c_char>(), bytes.len()), length);
        assert_eq!(bytes.pop(), Some(0), "the message ends with NUL");
        String::from_utf8(bytes).expect("messages are UTF-8")
    }
}

#[track_caller]
pub fn assert_ok(status: vwd_status) {
    assert_eq!(status, VWD_OK, "{}", last_message());
}

/// The call failed with this status, and its message holds each of these pieces.
#[track_caller]
pub fn assert_fails(status: vwd_status, expected: vwd_status, pieces: &[&str]) {
    let text = last_error();
    assert_eq!(status, expected, "status; the last message is: {text}");
    for piece in pieces {
        assert!(text.contains(piece), "the message does not say {piece:?}: {text}");
    }
}
