//! What the options of caches, decoders and budgets state alike: numbers of heads, channels, blocks and tokens, and the dtype of keys.

use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::text::any_of;

/// The dtype of keys and values that options give by its code and bits.
pub fn key_dtype(code: u32, bits: u32) -> Result<DType> {
    let narrow = |n: u32| u8::try_from(n).ok();
    let found = narrow(code).zip(narrow(bits)).map(|(code, bits)| DType { code, bits });
    found
        .filter(|dtype| DType::KEYS.contains(dtype))
        .ok_or_else(|| Error::argument("options.dtype_code", format!("code {code}, {bits} bits"), any_of(DType::KEYS)))
}

/// D and Dv, the numbers of channels of keys and values that options give.
pub fn key_dims(key: u32, value: u32) -> Result<[usize; 2]> {
    for (name, dim) in [("options.key_dim", key), ("options.value_dim", value)] {
        if !(16..=576).contains(&dim) || dim % 8 != 0 {
            return Err(Error::argument(name, dim, "a multiple of 8 in 16 … 576"));
        }
    }
    Ok([key, value].map(|dim| dim as usize))
}

/// Checks Hq and Hk, neither 0, that options give.
pub fn check_heads([query, kv]: [u32; 2]) -> Result<()> {
    if query.is_multiple_of(kv) {
        return Ok(());
    }
    Err(Error::argument("options.query_heads", query, format!("a multiple of the {kv} KV heads")))
}

/// Checks that of a block and a page, both of sizes that options give and neither 0, one is a whole number of the other.
pub fn check_blocks(block_size: u32, page_size: u32) -> Result<()> {
    if page_size.is_multiple_of(block_size) || block_size.is_multiple_of(page_size) {
        return Ok(());
    }
    let expected = format!("a divisor or a multiple of the page size {page_size}");
    Err(Error::argument("options.block_size", block_size, expected))
}

/// Checks that numbers that options give, with their names, are not 0.
pub fn require_counts(counts: &[(&str, u32)]) -> Result<()> {
    match counts.iter().find(|(_, n)| *n == 0) {
        Some((name, _)) => Err(Error::argument(name, 0, "at least 1")),
        None => Ok(()),
    }
}
