//! Text that crosses the C ABI.

use super::status::{Error, Result};
use std::ffi::{CStr, c_char};

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

/// What an argument may be, for a message: "a", "a or b", "a, b or c".
pub fn any_of<T: ToString>(values: impl IntoIterator<Item = T>) -> String {
    let mut names: Vec<String> = values.into_iter().map(|value| value.to_string()).collect();
    names.dedup();
    let last = names.pop().unwrap_or_default();
    if names.is_empty() { last } else { format!("{} or {last}", names.join(", ")) }
}

/// Copies a name into a fixed, NUL-terminated field; a longer one ends at a character that fits.
pub fn fixed_text<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    let end = text.floor_char_boundary(N - 1);
    for (to, from) in field.iter_mut().zip(&text.as_bytes()[..end]) {
        *to = *from as c_char;
    }
    field
}

#[cfg(test)]
mod tests {
    use super::any_of;

    #[test]
    fn alternatives_are_separated_by_commas_and_a_last_or() {
        assert_eq!(any_of(["a"]), "a");
        assert_eq!(any_of([56, 88]), "56 or 88");
        assert_eq!(any_of(["a", "b", "b", "c"]), "a, b or c");
    }
}
