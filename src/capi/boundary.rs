//! The one place where a call crosses from C: catches panics, records the message, picks the status, and reads
//! handles, out parameters and text.

use crate::abi::{VWD_OK, vwd_status};
use crate::core::quiet;
use crate::core::status::{Code, Error, Result};
pub use crate::core::versioned::{optional_versioned, versioned, write_versioned};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of one C function.
#[inline]
pub fn boundary(body: impl FnOnce() -> Result<()>) -> vwd_status {
    let outer = quiet::enter();
    let outcome = catch_unwind(AssertUnwindSafe(body));
    quiet::leave(outer);
    let error = match outcome {
        Ok(Ok(())) => return VWD_OK,
        Ok(Err(error)) => error,
        Err(payload) => Error::new(Code::Internal, describe(payload.as_ref())),
    };
    LAST_ERROR.with_borrow_mut(|text| {
        text.clear();
        text.push_str(&error.message);
    });
    error.code as vwd_status
}

pub fn with_last_error<R>(read: impl FnOnce(&str) -> R) -> R {
    LAST_ERROR.with_borrow(|text| read(text))
}

fn describe(payload: &(dyn Any + Send)) -> String {
    let what = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("unknown");
    let place = quiet::panic_place();
    format!("internal error: {what}{place}; please report it")
}

/// The object behind a handle.
///
/// # Safety
/// `handle` is NULL or a live handle of its type.
pub unsafe fn handle<'a, T>(handle: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: forwarded to the caller.
    unsafe { handle.as_ref() }.ok_or_else(|| Error::argument(name, "NULL", "a live handle"))
}

/// Writes an out parameter.
///
/// # Safety
/// `target` is NULL or valid for a write.
pub unsafe fn out<T>(target: *mut T, name: &str) -> Result<&'static mut MaybeUninit<T>> {
    // SAFETY: forwarded to the caller.
    unsafe { target.cast::<MaybeUninit<T>>().as_mut() }
        .ok_or_else(|| Error::argument(name, "NULL", "a place for the result"))
}

/// A NUL-terminated UTF-8 string.
///
/// # Safety
/// `text` is NULL or NUL-terminated and outlives the result.
pub unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::argument(name, "NULL", "a NUL-terminated string"));
    }
    // SAFETY: not NULL, NUL-terminated by the contract.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| Error::argument(name, "bytes that are not UTF-8", "UTF-8 text"))
}
