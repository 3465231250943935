//! The one place where a call crosses from C: catches panics, records the message, picks the status, and reads handles,
//! out parameters and text.

use crate::abi::{VWD_OK, vwd_status};
use crate::core::floats::Floats;
use crate::core::quiet;
use crate::core::status::{Code, Error, Result};
pub use crate::core::versioned::{optional_versioned, versioned, write_versioned};
use crate::runtime::fork::Process;
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of one C function, whose name its messages begin with.
#[inline]
pub fn boundary(call: &str, body: impl FnOnce() -> Result<()>) -> vwd_status {
    let outer = quiet::enter();
    let outcome = catch_unwind(AssertUnwindSafe(body));
    quiet::leave(outer);
    let error = match outcome {
        Ok(Ok(())) => return VWD_OK,
        Ok(Err(error)) => error,
        Err(payload) => {
            let text = quiet::describe(payload.as_ref());
            Error::new(Code::Internal, format!("internal error: {text}; please report it"))
        }
    };
    // A destructor of the caller's may call when the thread has destroyed the message: then the status alone tells.
    let _ = LAST_ERROR.try_with(|text| {
        let mut text = text.borrow_mut();
        text.clear();
        text.push_str(call);
        text.push_str(": ");
        text.push_str(&error.message);
    });
    error.code as vwd_status
}

/// [`boundary`] for a call that computes in floating point. Reading the floating-point environment costs some nanoseconds,
/// which other calls do not pay.
#[inline]
pub fn computing(call: &str, body: impl FnOnce() -> Result<()>) -> vwd_status {
    let _floats = Floats::enter();
    boundary(call, body)
}

/// Reads the message of this thread's last failed call; it is empty where the thread has destroyed it.
pub fn with_last_error<R>(read: impl Fn(&str) -> R) -> R {
    LAST_ERROR.try_with(|text| read(&text.borrow())).unwrap_or_else(|_| read(""))
}

/// The object that a handle points to.
pub trait Handle {
    fn maker(&self) -> Process;
}

/// The object behind a handle.
///
/// # Safety
/// `handle` is NULL or a live handle of its type.
#[inline]
pub unsafe fn handle<'a, T: Handle>(handle: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: NULL or live, says the caller.
    match unsafe { handle.as_ref() } {
        Some(object) if object.maker().is_this() => Ok(object),
        Some(_) => Err(Error::argument(name, "made before this process was forked", "a handle made in this process")),
        None => Err(Error::argument(name, "NULL", "a live handle")),
    }
}

/// Destroys the object behind a handle; NULL is a no-op. The object of a parent process stays as it is: after a fork there
/// are no threads to join, and no device to return memory to.
///
/// # Safety
/// `handle` is NULL, or came from `Box::into_raw` and is not used again.
pub unsafe fn release<T: Handle>(handle: *mut T) {
    // SAFETY: NULL or live, says the caller.
    if unsafe { handle.as_ref() }.is_some_and(|object| object.maker().is_this()) {
        boundary("release", || {
            // SAFETY: not NULL, and the caller owns it.
            drop(unsafe { Box::from_raw(handle) });
            Ok(())
        });
    }
}

/// Writes an out parameter.
///
/// # Safety
/// `target` is NULL or valid for a write.
pub unsafe fn out<T>(target: *mut T, name: &str) -> Result<&'static mut MaybeUninit<T>> {
    // SAFETY: NULL or valid for a write, says the caller; nothing reads the MaybeUninit.
    unsafe { target.cast::<MaybeUninit<T>>().as_mut() }
        .ok_or_else(|| Error::argument(name, "NULL", "a place for the result"))
}
