//! The options of a decoder.

use crate::abi::{VWD_SELECT_AXIS, VWD_SELECT_MINMAX, vwd_decoder_options, vwd_decoder_policy, vwd_tensor};
use crate::core::allocate::collected;
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Checks;
use crate::ops::views::scale_or_default;
use crate::runtime::require_no_flags;

/// How a layer's sparse rows attend.
#[derive(Clone, Copy)]
pub struct Policy {
    pub method: Method,
    pub k: u32,
    pub init: u32,
    pub local: u32,
    pub window: u32,
    /// Rows of up to so many tokens are dense.
    pub threshold: i32,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Method {
    Dense,
    MinMax,
    Axis,
}

pub struct Options {
    pub layers: Vec<Policy>,
    pub max_rows: usize,
    pub max_positions: usize,
    pub max_sequences: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    /// D and Dv, the numbers of channels of a key and of a value.
    pub dims: [usize; 2],
    pub dtype: DType,
    pub page_size: usize,
    pub pages: usize,
    pub block_size: usize,
    pub scale: f32,
    pub soft_cap: f32,
    pub max_draft: usize,
    pub draft_cost: f32,
    /// Weights and centre of AXIS, [layers, Hk, D] or absent.
    pub learned: [vwd_tensor; 2],
}

impl Options {
    /// # Safety
    /// `policies` has `policy_count` elements.
    pub unsafe fn from_c(checks: &Checks, c: &vwd_decoder_options) -> Result<Options> {
        require_no_flags("options.flags", c.flags)?;
        let counts = [
            ("options.layers", c.layers),
            ("options.max_rows", c.max_rows),
            ("options.query_heads", c.query_heads),
            ("options.kv_heads", c.kv_heads),
            ("options.page_size", c.page_size),
            ("options.pages", c.pages),
            ("options.block_size", c.block_size),
        ];
        for (name, n) in counts {
            if n == 0 {
                return Err(Error::argument(name, 0, "at least 1"));
            }
        }
        for (name, dim) in [("options.key_dim", c.key_dim), ("options.value_dim", c.value_dim)] {
            if !(16..=576).contains(&dim) || dim % 8 != 0 {
                return Err(Error::argument(name, dim, "a multiple of 8 in 16 … 576"));
            }
        }
        if !c.query_heads.is_multiple_of(c.kv_heads) {
            let expected = format!("a multiple of the {} KV heads", c.kv_heads);
            return Err(Error::argument("options.query_heads", c.query_heads, expected));
        }
        if !c.page_size.is_multiple_of(c.block_size) && !c.block_size.is_multiple_of(c.page_size) {
            let expected = format!("a divisor or a multiple of the page size {}", c.page_size);
            return Err(Error::argument("options.block_size", c.block_size, expected));
        }
        if c.scale == 0.0 && c.key_dim != c.value_dim {
            let expected = format!("the scale of q·k, since D={} and Dv={} differ", c.key_dim, c.value_dim);
            return Err(Error::argument("options.scale", c.scale, expected));
        }
        let scale = scale_or_default(c.scale, c.key_dim as usize)
            .map_err(|_| Error::argument("options.scale", c.scale, "a finite number above 0, or 0 for 1/√D"))?;
        if !(c.soft_cap.is_finite() && c.soft_cap >= 0.0) {
            return Err(Error::argument("options.soft_cap", c.soft_cap, "a finite number above 0, or 0 for none"));
        }
        if !(c.draft_cost.is_finite() && c.draft_cost >= 0.0) {
            return Err(Error::argument("options.draft_cost", c.draft_cost, "a finite number above 0, or 0 for 0.5"));
        }
        let max_positions = c.max_positions.max(1);
        if c.max_draft >= max_positions && c.max_draft > 0 {
            let expected = format!("less than max_positions, {max_positions}");
            return Err(Error::argument("options.max_draft", c.max_draft, expected));
        }
        // SAFETY: the caller vouches for the array.
        let layers = unsafe { policies(c)? };
        let dtype = dtype(c)?;
        let options = Options {
            layers,
            max_rows: c.max_rows as usize,
            max_positions: max_positions as usize,
            max_sequences: if c.max_sequences == 0 { c.max_rows } else { c.max_sequences } as usize,
            query_heads: c.query_heads as usize,
            kv_heads: c.kv_heads as usize,
            dims: [c.key_dim as usize, c.value_dim as usize],
            dtype,
            page_size: c.page_size as usize,
            pages: c.pages as usize,
            block_size: c.block_size as usize,
            scale,
            soft_cap: c.soft_cap,
            max_draft: if c.max_draft == 0 { max_positions - 1 } else { c.max_draft } as usize,
            draft_cost: if c.draft_cost == 0.0 { 0.5 } else { c.draft_cost },
            learned: [c.axis_weights, c.axis_centre],
        };
        options.check_sizes()?;
        let shape = [("layers", c.layers as usize), ("Hk", options.kv_heads), ("D", options.dims[0])];
        for (name, t) in [("options.axis_weights", &c.axis_weights), ("options.axis_centre", &c.axis_centre)] {
            checks.optional_input(name, t, &[DType::F32], &shape)?;
        }
        Ok(options)
    }

    /// Checks that numbers of rows, heads and list entries fit in 32 bits, with room for their kernels' launches.
    fn check_sizes(&self) -> Result<()> {
        const MOST: usize = 1 << 28;
        let product = |factors: &[usize]| factors.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
        let small = |name, factors: &[usize]| match product(factors) {
            Some(n) if n <= MOST => Ok(()),
            _ => Err(Error::argument(name, format!("{factors:?} together"), format!("at most {MOST}"))),
        };
        small("options.max_positions", &[self.max_rows, self.max_positions, self.query_heads])?;
        small("options.max_rows", &[self.max_rows, self.layers.len()])?;
        small("options.policy.k", &[self.max_rows, self.kv_heads, self.capacity()])?;
        small("options.max_sequences", &[self.max_sequences])?;
        small("options.pages", &[self.pages])
    }

    /// The capacity of the lists.
    pub fn capacity(&self) -> usize {
        let capacity = |policy: &Policy| policy.k.max(policy.init.saturating_add(policy.local)) as usize;
        self.layers.iter().filter(|p| p.method != Method::Dense).map(capacity).max().unwrap_or(1)
    }

    /// Blocks of a page that have summaries there: all that begin in it, or one where a block has several pages.
    pub fn blocks_per_page(&self) -> usize {
        (self.page_size / self.block_size).max(1)
    }

    /// Pages of a block; 1 where a page has several blocks.
    pub fn pages_per_block(&self) -> usize {
        (self.block_size / self.page_size).max(1)
    }
}

/// The policies of all layers.
///
/// # Safety
/// `policies` has `policy_count` elements.
unsafe fn policies(c: &vwd_decoder_options) -> Result<Vec<Policy>> {
    const PURPOSE: &str = "the policies of a decoder";
    let layers = c.layers as usize;
    if c.policy_count == 0 {
        let policy = Policy::from_c("options.policy", &c.policy, c.block_size)?;
        return collected((0..layers).map(|_| policy), PURPOSE);
    }
    if c.policy_count != c.layers {
        let expected = format!("0, or the {layers} layers");
        return Err(Error::argument("options.policy_count", c.policy_count, expected));
    }
    if c.policies.is_null() {
        return Err(Error::argument("options.policies", "NULL", format!("{layers} policies")));
    }
    // SAFETY: not NULL; the caller says how many there are.
    let given = unsafe { std::slice::from_raw_parts(c.policies, layers) };
    let checked: Result<Vec<Policy>> = given
        .iter()
        .enumerate()
        .map(|(n, policy)| Policy::from_c(&format!("options.policies[{n}]"), policy, c.block_size))
        .collect();
    checked
}

impl Policy {
    fn from_c(name: &str, c: &vwd_decoder_policy, block_size: u32) -> Result<Policy> {
        let method = match c.method {
            0 => Method::Dense,
            VWD_SELECT_MINMAX => Method::MinMax,
            VWD_SELECT_AXIS => Method::Axis,
            other => {
                let expected = "0 (dense), VWD_SELECT_MINMAX or VWD_SELECT_AXIS";
                return Err(Error::argument(&format!("{name}.method"), other, expected));
            }
        };
        if method != Method::Dense && c.k == 0 {
            return Err(Error::argument(&format!("{name}.k"), 0, "at least 1"));
        }
        // Lists of so many blocks have all of them.
        let covered = c.k.max(c.init_blocks.saturating_add(c.local_blocks)).saturating_mul(block_size);
        let threshold = match method {
            Method::Dense => i32::MAX,
            _ => covered.max(c.dense_below.saturating_sub(1)).min(i32::MAX as u32) as i32,
        };
        Ok(Policy { method, k: c.k, init: c.init_blocks, local: c.local_blocks, window: c.window, threshold })
    }
}

fn dtype(c: &vwd_decoder_options) -> Result<DType> {
    let narrow = |n: u32| u8::try_from(n).ok();
    let found = narrow(c.dtype_code).zip(narrow(c.dtype_bits)).map(|(code, bits)| DType { code, bits });
    found.filter(|dtype| DType::KEYS.contains(dtype)).ok_or_else(|| {
        let found = format!("code {}, {} bits", c.dtype_code, c.dtype_bits);
        let names: Vec<String> = DType::KEYS.iter().map(DType::to_string).collect();
        Error::argument("options.dtype_code", found, names.join(" or "))
    })
}
