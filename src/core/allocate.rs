//! Vectors whose length a caller chose: an allocation that fails is an error, not an abort.

use super::status::{Error, Result};

/// `len` default values: zeros, for numbers.
pub fn zeros<T: Clone + Default>(len: usize, purpose: &str) -> Result<Vec<T>> {
    filled(T::default(), len, purpose)
}

pub fn filled<T: Clone>(value: T, len: usize, purpose: &str) -> Result<Vec<T>> {
    let mut values = reserved(len, purpose)?;
    values.resize(len, value);
    Ok(values)
}

/// The values of an iterator, in memory reserved by the length that it states.
pub fn collected<T>(values: impl ExactSizeIterator<Item = T>, purpose: &str) -> Result<Vec<T>> {
    let mut collected = reserved(values.len(), purpose)?;
    collected.extend(values);
    Ok(collected)
}

/// An empty vector with capacity for `len` values.
pub fn reserved<T>(len: usize, purpose: &str) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| Error::out_of_memory(len.saturating_mul(size_of::<T>()), purpose))?;
    Ok(values)
}
