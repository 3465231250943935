//! Structs of the C ABI that start with their size, so that later versions may add fields.

use super::status::{Error, Result};
use super::text::any_of;
use crate::abi::Versioned;
use std::mem::MaybeUninit;

/// Reads a versioned struct in place. An earlier, smaller struct is copied to `buffer` and completed with zeros. A later,
/// larger struct is accepted if the bytes that it adds are zero.
///
/// # Safety
/// `source` is NULL or points to at least `struct_size` readable bytes, which nothing changes during the call.
#[inline(always)]
pub unsafe fn versioned<'a, T: Versioned>(
    source: *const T,
    name: &str,
    buffer: &'a mut MaybeUninit<T>,
) -> Result<&'a T> {
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
            return complete(source, size, name, buffer);
        }
        if size > size_of::<T>() {
            require_zeros_after(source, size, name)?;
        }
        Ok(&*source)
    }
}

/// A struct with its size set and all else zero.
pub fn zeroed<T: Versioned>() -> T {
    // SAFETY: all-zero bytes are a valid `Versioned` struct, which starts with its `u32` size.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<u32>().write(size_of::<T>() as u32);
        value
    }
}

/// [`versioned`] where NULL stands for a struct of zeros.
///
/// # Safety
/// The conditions of [`versioned`] hold.
pub unsafe fn optional_versioned<'a, T: Versioned>(
    source: *const T,
    name: &str,
    buffer: &'a mut MaybeUninit<T>,
) -> Result<&'a T> {
    if source.is_null() {
        *buffer = MaybeUninit::zeroed();
        // SAFETY: T accepts all-zero bytes.
        return Ok(unsafe { buffer.assume_init_ref() });
    }
    // SAFETY: not NULL, and the caller keeps the other conditions.
    unsafe { versioned(source, name, buffer) }
}

/// Copies the struct of an earlier caller to `buffer`; fields that it lacks are zero.
///
/// # Safety
/// `source` points to `size` readable bytes, fewer than T has.
#[cold]
unsafe fn complete<'a, T: Versioned>(
    source: *const T,
    size: usize,
    name: &str,
    buffer: &'a mut MaybeUninit<T>,
) -> Result<&'a T> {
    if !T::KNOWN_SIZES.contains(&size) {
        let expected = format!("{} (initialise with the _INIT macro)", any_of(T::KNOWN_SIZES));
        return Err(Error::argument(&format!("{name}.struct_size"), size, expected));
    }
    // SAFETY: T accepts all-zero bytes, and size bytes are readable from source.
    unsafe {
        *buffer = MaybeUninit::zeroed();
        std::ptr::copy_nonoverlapping(source.cast::<u8>(), buffer.as_mut_ptr().cast::<u8>(), size);
        Ok(buffer.assume_init_ref())
    }
}

/// Refuses the struct of a later caller that has set a field which this version does not know.
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

/// Writes the fields of a versioned result that the caller's `struct_size` covers; `struct_size` itself is not changed.
///
/// # Safety
/// `target` is NULL or points to at least `struct_size` writable bytes.
pub unsafe fn write_versioned<T: Versioned>(target: *mut T, value: &T, name: &str) -> Result<()> {
    let mut buffer = MaybeUninit::uninit();
    // SAFETY: versioned checks that the pointer is not NULL and aligned; what is writable is readable.
    let size = unsafe {
        versioned(target.cast_const(), name, &mut buffer)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A struct whose earlier version lacks the field `third`.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        struct_size: u32,
        first: u32,
        second: u64,
        third: u64,
    }

    // SAFETY: repr(C), struct_size first, plain data.
    unsafe impl Versioned for Grown {
        const KNOWN_SIZES: &'static [usize] = &[16, 24];
    }

    /// The struct that [`versioned`] reads from a caller's struct of `struct_size` bytes.
    fn read(struct_size: u32) -> std::result::Result<Grown, String> {
        let (given, mut buffer) = (Grown { struct_size, first: 1, second: 2, third: 3 }, MaybeUninit::uninit());
        // SAFETY: all sizes of these tests are readable.
        unsafe { versioned(&given, "args", &mut buffer) }.copied().map_err(|error| error.to_string())
    }

    #[test]
    fn fields_that_an_earlier_caller_has_not_are_zero() {
        assert_eq!(read(24), Ok(Grown { struct_size: 24, first: 1, second: 2, third: 3 }));
        assert_eq!(read(16), Ok(Grown { struct_size: 16, first: 1, second: 2, third: 0 }));
    }

    #[test]
    fn sizes_of_no_version_are_refused() {
        for size in [0, 8, 12, 20, 23] {
            let text = read(size).unwrap_err();
            assert!(text.starts_with(&format!("args.struct_size: {size}; expected 16 or 24")), "{text}");
        }
    }
}
