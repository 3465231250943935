//! Arrays in host memory that arguments point to.

use super::status::{Error, Result};

/// The array of `count` elements that an argument points to; a message calls them `what`.
///
/// # Safety
/// `first` is NULL or misaligned, or there are so many elements, which live as long as the result.
#[inline(always)]
pub unsafe fn array<'a, T>(name: &str, first: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    require_array(name, first, count, what)?;
    // SAFETY: not NULL, and aligned; the caller vouches for the elements.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// Refuses a pointer that no array of `count` elements can have.
#[inline(always)]
pub fn require_array<T>(name: &str, first: *const T, count: usize, what: &str) -> Result<()> {
    if first.is_null() || !first.is_aligned() { Err(no_array(name, first.cast(), count, what)) } else { Ok(()) }
}

#[cold]
fn no_array(name: &str, first: *const u8, count: usize, what: &str) -> Error {
    let found = if first.is_null() { "NULL".to_owned() } else { format!("{first:p} is misaligned") };
    Error::argument(name, found, format!("an array of {count} {what}"))
}
