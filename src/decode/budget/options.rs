//! The shape and the grid of a profile.

use super::ask::ascending;
use super::table::{Grid, MOST_DRAFT};
use crate::abi::{VWD_REPAIR_EXACT, VWD_REPAIR_SUPERSET, VWD_SELECT_AXIS, VWD_SELECT_MINMAX, vwd_budget_options};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::decode::predictor::Ratio;
use crate::ops::option_checks::{check_blocks, check_heads, key_dims, key_dtype, require_counts};
use crate::runtime::require_no_flags;

/// What a profile is of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub query_heads: usize,
    pub kv_heads: usize,
    /// D and Dv, the numbers of channels of a key and of a value.
    pub dims: [usize; 2],
    pub dtype: DType,
    pub page_size: usize,
    pub block_size: usize,
    /// VWD_SELECT_MINMAX or VWD_SELECT_AXIS.
    pub method: u32,
    pub k: usize,
    pub init_blocks: usize,
    pub local_blocks: usize,
    /// VWD_REPAIR_SUPERSET or VWD_REPAIR_EXACT.
    pub repair_mode: u32,
    pub partial_blocks: usize,
}

impl Shape {
    /// The fields as options and files name them.
    pub fn fields(&self) -> [(&'static str, String); 13] {
        [
            ("query_heads", self.query_heads.to_string()),
            ("kv_heads", self.kv_heads.to_string()),
            ("key_dim", self.dims[0].to_string()),
            ("value_dim", self.dims[1].to_string()),
            ("dtype", self.dtype.to_string()),
            ("page_size", self.page_size.to_string()),
            ("block_size", self.block_size.to_string()),
            ("method", self.method.to_string()),
            ("k", self.k.to_string()),
            ("init_blocks", self.init_blocks.to_string()),
            ("local_blocks", self.local_blocks.to_string()),
            ("repair_mode", self.repair_mode.to_string()),
            ("partial_blocks", self.partial_blocks.to_string()),
        ]
    }

    /// The dtype of queries and outputs.
    pub fn query_dtype(&self) -> DType {
        if self.dtype.is_float8() { DType::F16 } else { self.dtype }
    }

    /// The scale of q·k.
    pub fn scale(&self) -> f32 {
        1.0 / (self.dims[0] as f32).sqrt()
    }

    /// The number of tokens of a group: as few as have whole pages and whole blocks.
    pub fn group_tokens(&self) -> usize {
        self.page_size.max(self.block_size)
    }

    /// The number of guesses of a ratio of the grid, ⌈r·k⌉, as a decoder makes them.
    pub fn guesses(&self, ratio: f32) -> usize {
        Ratio::from_c(ratio).map_or(self.k, |ratio| ratio.of(self.k))
    }
}

pub struct Options {
    pub shape: Shape,
    pub grid: Grid,
    pub samples: usize,
    pub limit_bytes: usize,
}

/// Shares of the selected blocks that repair is measured with.
const SHARES: [f32; 4] = [0.0, 0.125, 0.5, 1.0];

impl Options {
    pub fn from_c(c: &vwd_budget_options) -> Result<Options> {
        require_no_flags("options.flags", c.flags)?;
        let grid = grid(c)?;
        let samples = if c.samples == 0 { 5 } else { c.samples as usize };
        if samples > 1000 {
            return Err(Error::argument("options.samples", samples, "at most 1000"));
        }
        // More than any machine has: sizes that do not fit in 63 bits stay above it.
        const LARGEST_LIMIT: u64 = 1 << 62;
        let limit_bytes = if c.limit_bytes == 0 { 4 << 30 } else { c.limit_bytes.min(LARGEST_LIMIT) as usize };
        Ok(Options { shape: shape(c)?, grid, samples, limit_bytes })
    }
}

fn shape(c: &vwd_budget_options) -> Result<Shape> {
    require_counts(&[
        ("options.query_heads", c.query_heads),
        ("options.kv_heads", c.kv_heads),
        ("options.page_size", c.page_size),
        ("options.block_size", c.block_size),
        ("options.k", c.k),
    ])?;
    let dims = key_dims(c.key_dim, c.value_dim)?;
    let dtype = key_dtype(c.dtype_code, c.dtype_bits)?;
    // Up to here all sizes of the measured calls fit in 32 bits.
    const MOST: u32 = 1 << 16;
    for (name, n) in [
        ("options.query_heads", c.query_heads),
        ("options.page_size", c.page_size),
        ("options.block_size", c.block_size),
        ("options.k", c.k),
    ] {
        if n > MOST {
            return Err(Error::argument(name, n, format!("at most {MOST}")));
        }
    }
    check_heads([c.query_heads, c.kv_heads])?;
    check_blocks(c.block_size, c.page_size)?;
    if !matches!(c.method, VWD_SELECT_MINMAX | VWD_SELECT_AXIS) {
        let expected = "VWD_SELECT_MINMAX (1) or VWD_SELECT_AXIS (5)";
        return Err(Error::argument("options.method", c.method, expected));
    }
    let forced = c.init_blocks.saturating_add(c.local_blocks);
    if forced > c.k {
        let expected = format!("at most options.k, {}", c.k);
        return Err(Error::argument("options.init_blocks + options.local_blocks", forced, expected));
    }
    let repair_mode = match c.repair_mode {
        0 => VWD_REPAIR_EXACT,
        VWD_REPAIR_SUPERSET | VWD_REPAIR_EXACT => c.repair_mode,
        other => return Err(Error::argument("options.repair_mode", other, "a VWD_REPAIR_* value (1 or 2), or 0")),
    };
    Ok(Shape {
        query_heads: c.query_heads as usize,
        kv_heads: c.kv_heads as usize,
        dims,
        dtype,
        page_size: c.page_size as usize,
        block_size: c.block_size as usize,
        method: c.method,
        k: c.k as usize,
        init_blocks: c.init_blocks as usize,
        local_blocks: c.local_blocks as usize,
        repair_mode,
        partial_blocks: c.partial_blocks.max(1) as usize,
    })
}

fn grid(c: &vwd_budget_options) -> Result<Grid> {
    const CONTEXTS: [f32; 4] = [2048.0, 8192.0, 32768.0, 131072.0];
    const BATCHES: [f32; 2] = [1.0, 4.0];
    const RATIOS: [f32; 4] = [1.0, 1.25, 1.5, 2.0];
    const LONGEST: u32 = 1 << 24;
    const LARGEST_BATCH: u32 = 4096;
    const LARGEST_RATIO: f32 = 16.0;
    /// Pages are numbered in 31 bits.
    const MOST_TOKENS: f64 = 1073741824.0;
    let max_draft = if c.max_draft == 0 { 7 } else { c.max_draft as usize };
    if max_draft > MOST_DRAFT {
        return Err(Error::argument("options.max_draft", max_draft, format!("at most {MOST_DRAFT}")));
    }
    // Checked as whole numbers: larger ones have others in float32.
    let whole = |name: &str, values: &[u32], most: u32, default: &[f32]| {
        if let Some(n) = values.iter().position(|&value| value > most) {
            return Err(Error::argument(&format!("{name}[{n}]"), values[n], format!("at most {most}")));
        }
        axis(name, &values.iter().map(|&value| value as f32).collect::<Vec<_>>(), default)
    };
    let contexts = whole("options.contexts", &c.contexts, LONGEST, &CONTEXTS)?;
    let batches = whole("options.batches", &c.batches, LARGEST_BATCH, &BATCHES)?;
    if let (Some(context), Some(batch)) = (contexts.last(), batches.last())
        && *context as f64 * *batch as f64 > MOST_TOKENS
    {
        let found = format!("{batch} sequences of {context} tokens");
        return Err(Error::argument("options.batches", found, format!("at most {MOST_TOKENS} tokens")));
    }
    let ratios = axis("options.ratios", &c.ratios, &RATIOS)?;
    if ratios[0] != 1.0 {
        return Err(Error::argument("options.ratios[0]", ratios[0], "1, as many guesses as blocks are selected"));
    }
    if let Some(n) = ratios.iter().position(|&ratio| ratio > LARGEST_RATIO) {
        let expected = format!("at most {LARGEST_RATIO}");
        return Err(Error::argument(&format!("options.ratios[{n}]"), ratios[n], expected));
    }
    Ok(Grid { contexts, batches, ratios, shares: SHARES.to_vec(), max_draft })
}

/// An axis as options give it, or its default.
fn axis(name: &str, values: &[f32], default: &[f32]) -> Result<Vec<f32>> {
    let given = ascending(name, values, 1.0)?;
    Ok(if given.is_empty() { default.to_vec() } else { given.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::versioned::zeroed;

    #[test]
    fn guesses_are_as_many_as_a_decoder_makes() {
        let (heads, dims, dtype) = ([2, 1], [16; 2], DType::F32);
        let c = vwd_budget_options {
            query_heads: heads[0],
            kv_heads: heads[1],
            key_dim: dims[0],
            value_dim: dims[1],
            dtype_code: dtype.code.into(),
            dtype_bits: dtype.bits.into(),
            page_size: 16,
            block_size: 16,
            method: VWD_SELECT_MINMAX,
            k: 10,
            ..zeroed()
        };
        let shape = Options::from_c(&c).expect("valid options").shape;
        // In float32 1.1 is a little above, and 1.25 and 16 are what they are.
        assert_eq!([1.0, 1.1, 1.25, 16.0].map(|ratio| shape.guesses(ratio)), [10, 11, 13, 160]);
    }
}
