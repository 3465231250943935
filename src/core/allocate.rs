//! Vectors whose length a caller chose: where memory does not suffice they are an error, not an abort.

use super::status::{Error, Result};

/// Zeros.
pub fn zeros<T: Clone + Default>(len: usize, purpose: &str) -> Result<Vec<T>> {
    filled(T::default(), len, purpose)
}

pub fn filled<T: Clone>(value: T, len: usize, purpose: &str) -> Result<Vec<T>> {
    let mut values = reserved(len, purpose)?;
    values.resize(len, value);
    Ok(values)
}

/// As many values as the iterator says that it has.
pub fn collected<T>(values: impl ExactSizeIterator<Item = T>, purpose: &str) -> Result<Vec<T>> {
    let mut collected = reserved(values.len(), purpose)?;
    collected.extend(values);
    Ok(collected)
}

/// Empty, with room for so many.
pub fn reserved<T>(len: usize, purpose: &str) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| Error::out_of_memory(len.saturating_mul(size_of::<T>()), purpose))?;
    Ok(values)
}
