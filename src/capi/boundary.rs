//! The one place where a call crosses from C: catches panics, records the message, picks the status, and reads
//! versioned structs.

use super::types::{VWD_OK, vwd_status};
use crate::core::status::{Code, Error, Result};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
    /// Set while this thread runs library code, so that its panics print nothing.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static PANIC_PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of one C function.
#[inline]
pub fn boundary(body: impl FnOnce() -> Result<()>) -> vwd_status {
    install_quiet_hook();
    let outer = INSIDE.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(body));
    INSIDE.set(outer);
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

/// Marks a thread that the library owns.
pub fn enter_library_thread() {
    install_quiet_hook();
    INSIDE.set(true);
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
    let place = PANIC_PLACE.with_borrow_mut(std::mem::take);
    format!("internal error: {what}{place}; please report it")
}

/// A library prints nothing: panics inside it become messages, all others go to the hook that was there before.
fn install_quiet_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !INSIDE.get() {
                return previous(info);
            }
            let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
            PANIC_PLACE.with_borrow_mut(|text| *text = place);
        }));
    });
}

/// A C struct that starts with `uint32_t struct_size` and may grow at its end.
///
/// # Safety
/// `repr(C)`, `struct_size: u32` first, and all-zero bytes are a valid value.
pub unsafe trait Versioned: Copy {
    /// Sizes at which earlier callers may have compiled it, this one's included, ascending.
    const KNOWN_SIZES: &'static [usize] = &[size_of::<Self>()];
}

/// Reads a versioned struct where it lies; an earlier, smaller one is completed with zeros in `room`. A later, larger one
/// is fine if what it adds is zero.
///
/// # Safety
/// `source` is NULL or points to at least `struct_size` readable bytes, which nothing changes during the call.
#[inline(always)]
pub unsafe fn versioned<'a, T: Versioned>(source: *const T, name: &str, room: &'a mut MaybeUninit<T>) -> Result<&'a T> {
    if source.is_null() {
        return Err(Error::argument(name, "NULL", "a pointer to its struct"));
    }
    if !source.is_aligned() {
        return Err(Error::argument(name, format!("{source:p} is misaligned"), "alignment to 8 bytes"));
    }
    // SAFETY: not NULL and aligned; every versioned struct starts with its size, which states what is readable.
    unsafe {
        let size = source.cast::<u32>().read() as usize;
        if size < size_of::<T>() {
            return complete(source, size, name, room);
        }
        if size > size_of::<T>() {
            require_zeros_after(source, size, name)?;
        }
        Ok(&*source)
    }
}

/// The struct of an earlier caller, the rest zero.
///
/// # Safety
/// `source` points to `size` readable bytes, fewer than T has.
#[cold]
unsafe fn complete<'a, T: Versioned>(
    source: *const T,
    size: usize,
    name: &str,
    room: &'a mut MaybeUninit<T>,
) -> Result<&'a T> {
    if !T::KNOWN_SIZES.contains(&size) {
        let known: Vec<String> = T::KNOWN_SIZES.iter().map(usize::to_string).collect();
        let expected = format!("{} (initialise with the _INIT macro)", known.join(" or "));
        return Err(Error::argument(&format!("{name}.struct_size"), size, expected));
    }
    // SAFETY: T accepts all-zero bytes, and size bytes are readable from source.
    unsafe {
        *room = MaybeUninit::zeroed();
        std::ptr::copy_nonoverlapping(source.cast::<u8>(), room.as_mut_ptr().cast::<u8>(), size);
        Ok(room.assume_init_ref())
    }
}

/// A later caller may not have set what this version does not know.
///
/// # Safety
/// `source` points to `size` readable bytes, more than T has.
#[cold]
unsafe fn require_zeros_after<T: Versioned>(source: *const T, size: usize, name: &str) -> Result<()> {
    const LARGEST: usize = 1 << 16;
    let full = size_of::<T>();
    if size > LARGEST {
        let expected = format!("at most {LARGEST} (initialise with the _INIT macro)");
        return Err(Error::argument(&format!("{name}.struct_size"), size, expected));
    }
    // SAFETY: the caller states that struct_size bytes are readable.
    let extra = unsafe { std::slice::from_raw_parts(source.cast::<u8>().add(full), size - full) };
    if extra.iter().any(|&byte| byte != 0) {
        let found = format!("{size} bytes with fields set that this version does not know");
        return Err(Error::argument(name, found, format!("{full} bytes, or zeros after them")));
    }
    Ok(())
}

/// Writes a versioned result no further than the caller's `struct_size`, which stays as it was.
///
/// # Safety
/// `target` is NULL or points to at least `struct_size` writable bytes.
pub unsafe fn write_versioned<T: Versioned>(target: *mut T, value: &T, name: &str) -> Result<()> {
    let mut room = MaybeUninit::uninit();
    // SAFETY: forwarded to the caller; versioned checks the pointer.
    let size = unsafe {
        versioned(target.cast_const(), name, &mut room)?;
        target.cast::<u32>().read() as usize
    };
    let head = size_of::<u32>();
    // SAFETY: both hold at least min(size, full) bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(
            (&raw const *value).cast::<u8>().add(head),
            target.cast::<u8>().add(head),
            size.min(size_of::<T>()) - head,
        );
    }
    Ok(())
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
