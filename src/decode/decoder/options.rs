//! The options of a decoder.

use crate::abi::{
    VWD_PREDICT_FORESEEN, VWD_PREDICT_SCORES, VWD_SELECT_AXIS, VWD_SELECT_MINMAX, VWD_STRATEGY_ASYNC_TLS,
    VWD_STRATEGY_FORESEEN, VWD_STRATEGY_PRR, VWD_STRATEGY_SERIAL, VWD_STRATEGY_SPARDA, VWD_STRATEGY_VANWARD,
    vwd_decoder_options, vwd_decoder_policy, vwd_holt, vwd_tensor,
};
use crate::core::allocate::collected;
use crate::core::array::array;
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{Checks, Device};
use crate::decode::predictor::{Ratio, check_holt};
use crate::kv;
use crate::ops::option_checks::{check_blocks, check_heads, key_dims, key_dtype, require_counts};
use crate::ops::remainder;
use crate::ops::views::scale_or_default;
use crate::runtime::require_no_flags;

/// The last blocks of a sequence on a tiered cache, which dense rows read from slots: host memory may not have them yet. A step's tokens lie in
/// them, since they are no more than a block has.
pub const NEWEST: usize = 2;

/// PRR takes blocks of at least so many tokens, and on CUDA values of at most so many channels.
const LEAST_REPAIRED_BLOCK: u32 = 8;
const MOST_REPAIRED_CHANNELS: u32 = 256;

/// Whether layers of PRR take the shape.
pub fn takes_prr(block_size: usize, value_dim: usize, on_cuda: bool) -> bool {
    block_size >= LEAST_REPAIRED_BLOCK as usize && (!on_cuda || value_dim <= MOST_REPAIRED_CHANNELS as usize)
}

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
    /// The same where a budget makes the layer SERIAL.
    pub serial_threshold: i32,
    pub strategy: Strategy,
    /// Budget of a predicted list, its forced blocks included; 0 where the strategy has none.
    pub predicted: u32,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Strategy {
    Serial,
    /// PRR, or on a cache VANWARD, whose predictions come from the scores of past steps.
    PrrByScores {
        alpha: f32,
        beta: f32,
        gamma: f32,
    },
    /// PRR, or on a cache VANWARD, whose predictions are foreseen.
    PrrForeseen,
    /// FORESEEN, or on a cache SPARDA.
    Foreseen,
    AsyncTls,
}

impl Strategy {
    /// Whether `vwd_decoder_foresee` makes lists for it.
    pub fn foresees(self) -> bool {
        matches!(self, Strategy::PrrForeseen | Strategy::Foreseen)
    }

    pub fn repairs(self) -> bool {
        matches!(self, Strategy::PrrForeseen | Strategy::PrrByScores { .. })
    }

    /// Whether scores are remembered.
    pub fn remembers(self) -> bool {
        matches!(self, Strategy::PrrByScores { .. })
    }

    /// Whether lists are remembered.
    pub fn remembers_lists(self) -> bool {
        self == Strategy::AsyncTls
    }

    /// Whether some of a layer's work runs on a branch.
    pub fn branches(self) -> bool {
        self != Strategy::Serial
    }

    /// Whether a layer on a cache resolves a list while it attends the one that it resolved before.
    pub fn resolves_beside_attention(self) -> bool {
        self == Strategy::AsyncTls
    }
}

impl Policy {
    /// How many last blocks a list made ahead always has: at least one, whatever the policy says.
    pub fn local_ahead(&self) -> u32 {
        self.local.max(1)
    }

    /// The most blocks that a selected list has.
    pub fn selected_capacity(&self) -> usize {
        self.k.max(self.init.saturating_add(self.local)) as usize
    }

    /// The most blocks that a list made ahead has when it is made.
    pub fn predicted_blocks(&self) -> usize {
        self.predicted.max(self.init.saturating_add(self.local_ahead())) as usize
    }

    /// The capacity of a list made ahead. What is foreseen, or of the step before, gets the block of the step's own token in addition,
    /// where that is new.
    pub fn predicted_capacity(&self) -> usize {
        self.predicted_blocks() + (self.strategy.foresees() || self.strategy.remembers_lists()) as usize
    }
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
    /// Blocks of a sequence of which scores are remembered.
    pub max_blocks: usize,
    /// Blocks of a row of the tables of a cache; 0 without a cache.
    pub table_blocks: usize,
    /// Weights and centre of AXIS, [layers, Hk, D] or absent.
    pub learned: [vwd_tensor; 2],
    /// The share of the selected blocks that predicted lists are taken to have, where a budget decides.
    pub coverage: f32,
    /// Whether sparse rows attend what their list leaves out, as one term.
    pub has_term: bool,
}

impl Options {
    /// # Safety
    /// `policies` has `policy_count` elements.
    pub unsafe fn from_c(checks: &Checks, c: &vwd_decoder_options, cache: Option<&kv::Options>) -> Result<Options> {
        require_no_flags("options.flags", c.flags)?;
        let c = &match cache {
            Some(cache) => on_cache(c, cache)?,
            None => *c,
        };
        require_counts(&[
            ("options.layers", c.layers),
            ("options.max_rows", c.max_rows),
            ("options.query_heads", c.query_heads),
            ("options.kv_heads", c.kv_heads),
            ("options.page_size", c.page_size),
            ("options.pages", c.pages),
            ("options.block_size", c.block_size),
        ])?;
        let (dims, scale) = heads_and_blocks(c)?;
        check_numbers(c, cache.is_some())?;
        // Before the policies of so many layers are made.
        small("options.layers", &[("rows", c.max_rows as usize), ("layers", c.layers as usize)])?;
        // SAFETY: the caller vouches for the array.
        let layers = unsafe { policies(c, cache.is_some())? };
        let dtype = key_dtype(c.dtype_code, c.dtype_bits)?;
        if layers.iter().any(|policy| policy.strategy.repairs()) {
            check_repair(c, cache.is_some(), checks.device != Device::Cpu)?;
        }
        let max_positions = c.max_positions.max(1);
        let tokens = match c.max_tokens {
            0 => c.page_size as usize * c.pages as usize,
            tokens => tokens as usize,
        };
        let options = Options {
            layers,
            max_rows: c.max_rows as usize,
            max_positions: max_positions as usize,
            max_sequences: if c.max_sequences == 0 { c.max_rows } else { c.max_sequences } as usize,
            query_heads: c.query_heads as usize,
            kv_heads: c.kv_heads as usize,
            dims,
            dtype,
            page_size: c.page_size as usize,
            pages: c.pages as usize,
            block_size: c.block_size as usize,
            scale,
            soft_cap: c.soft_cap,
            max_draft: if c.max_draft == 0 { max_positions - 1 } else { c.max_draft } as usize,
            draft_cost: if c.draft_cost == 0.0 { 0.5 } else { c.draft_cost },
            max_blocks: tokens.div_ceil(c.block_size as usize),
            table_blocks: cache.map_or(0, |cache| cache.max_blocks),
            learned: [c.axis_weights, c.axis_centre],
            coverage: c.coverage,
            has_term: has_term(c)?,
        };
        if options.has_term {
            options.check_term(c.policy_count > 0)?;
        }
        options.check_sizes()?;
        if let Some(cache) = cache {
            options.check_slots(cache)?;
        }
        let shape = [("layers", c.layers as usize), ("Hk", options.kv_heads), ("D", options.dims[0])];
        for (name, t) in [("options.axis_weights", &c.axis_weights), ("options.axis_centre", &c.axis_centre)] {
            checks.optional_input(name, t, &[DType::F32], &shape)?;
        }
        Ok(options)
    }

    /// Checks that numbers of rows, heads and list entries fit in 32 bits, with room for their kernels' launches.
    fn check_sizes(&self) -> Result<()> {
        let [rows, heads] = [("rows", self.max_rows), ("KV heads", self.kv_heads)];
        let positions = ("positions", self.max_positions);
        small("options.max_positions", &[rows, positions, ("query heads", self.query_heads)])?;
        small("options.policy.k", &[rows, heads, ("blocks of a list", self.capacity())])?;
        small("options.policy.ratio", &[rows, heads, ("blocks of a list made ahead", self.predicted_capacity())])?;
        let sequences = ("sequences", self.max_sequences);
        small("options.max_sequences", &[sequences])?;
        if self.layers.iter().any(|policy| policy.strategy.remembers()) {
            let blocks = ("blocks of a sequence", self.max_blocks);
            small("options.max_tokens", &[rows, heads, blocks])?;
            small("options.max_tokens", &[sequences, heads, blocks])?;
        }
        small("options.pages", &[("pages", self.pages)])
    }

    /// The most entries that a resolve of a step names.
    pub fn longest_lists(&self) -> usize {
        self.max_rows * self.kv_heads * self.capacity().max(self.predicted_capacity()).max(NEWEST)
    }

    /// Checks that every resolve of a step finds slots for its lists, and that lists which are read beside each other keep theirs.
    fn check_slots(&self, cache: &kv::Options) -> Result<()> {
        let resolving = self.layers.iter().filter(|policy| policy.strategy.resolves_beside_attention());
        let beside = resolving.map(|policy| policy.predicted_capacity() + self.capacity()).max().unwrap_or(0);
        let entries = self.longest_lists().max(self.max_rows * self.kv_heads * beside);
        if entries > cache.slots {
            let found = format!("{} rows, whose lists take up to {entries} slots together", self.max_rows);
            let expected = format!("at most {} slots of a layer of the cache", cache.slots);
            return Err(Error::argument("options.max_rows", found, expected));
        }
        Ok(())
    }

    /// Whether sparse rows of a layer attend what their list leaves out, as one term.
    pub fn has_term_in(&self, policy: &Policy) -> bool {
        self.has_term && policy.method != Method::Dense
    }

    /// Checks that every sparse layer takes the term for what its lists leave out.
    fn check_term(&self, has_policies: bool) -> Result<()> {
        if self.soft_cap != 0.0 {
            return Err(Error::argument("options.soft_cap", self.soft_cap, "0 with options.remainder"));
        }
        if self.block_size > remainder::MOST_TOKENS {
            let expected = format!("at most {} with options.remainder", remainder::MOST_TOKENS);
            return Err(Error::argument("options.block_size", self.block_size, expected));
        }
        // On a cache a block is counted while it lies in the tail, which a block could leave uncounted by longer steps.
        if self.table_blocks > 0 && self.max_positions + self.max_draft > self.block_size + 1 {
            let found = format!("{}, and {} drafts", self.max_positions, self.max_draft);
            let expected = format!("at most {} together on a cache with options.remainder", self.block_size + 1);
            return Err(Error::argument("options.max_positions", found, expected));
        }
        for (n, policy) in self.layers.iter().enumerate().filter(|(_, policy)| policy.method != Method::Dense) {
            let name = if has_policies { format!("options.policies[{n}]") } else { "options.policy".into() };
            let refuse = |field: &str, found: &dyn ToString, expected: &str| {
                let expected = format!("{expected} with options.remainder");
                Err(Error::argument(&format!("{name}.{field}"), found.to_string(), expected))
            };
            if policy.method != Method::Axis {
                return refuse("method", &VWD_SELECT_MINMAX, "VWD_SELECT_AXIS, which says what lists leave out,");
            }
            if !matches!(policy.strategy, Strategy::Serial | Strategy::Foreseen) {
                let (found, foreseen) = match (self.table_blocks > 0, policy.strategy) {
                    (false, _) => (VWD_STRATEGY_PRR, "FORESEEN"),
                    (true, Strategy::AsyncTls) => (VWD_STRATEGY_ASYNC_TLS, "SPARDA"),
                    (true, _) => (VWD_STRATEGY_VANWARD, "SPARDA"),
                };
                return refuse("strategy", &found, &format!("VWD_STRATEGY_SERIAL or {foreseen}"));
            }
            if policy.window != 0 {
                return refuse("window", &policy.window, "0");
            }
        }
        Ok(())
    }

    /// The most blocks that a row reads through a window in host memory.
    pub fn most_seen_blocks(&self, window: usize) -> usize {
        if window == 0 { 0 } else { self.table_blocks.min((window + self.max_positions) / self.block_size + 1) }
    }

    /// The capacity of the lists.
    pub fn capacity(&self) -> usize {
        let sparse = self.layers.iter().filter(|p| p.method != Method::Dense);
        sparse.map(Policy::selected_capacity).max().unwrap_or(1)
    }

    /// The capacity of the longest list that a strategy makes ahead; 0 if none does.
    pub fn predicted_capacity(&self) -> usize {
        let ahead = self.layers.iter().filter(|p| p.strategy != Strategy::Serial);
        ahead.map(Policy::predicted_capacity).max().unwrap_or(0)
    }

    /// The dtype of foreseen queries: that of the keys, if it has 16 bits.
    pub fn foreseen_dtype(&self) -> DType {
        if self.dtype.bits == 16 { self.dtype } else { DType::F32 }
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

/// Checks that numbers of things, multiplied, are at most 2^28.
fn small(name: &str, factors: &[(&str, usize)]) -> Result<()> {
    const MOST: usize = 1 << 28;
    if factors.iter().try_fold(1usize, |product, (_, n)| product.checked_mul(*n)).is_some_and(|n| n <= MOST) {
        return Ok(());
    }
    let found: Vec<String> = factors.iter().map(|(what, n)| format!("{n} {what}")).collect();
    let together = if factors.len() > 1 { ", multiplied" } else { "" };
    Err(Error::argument(name, found.join(" · "), format!("at most {MOST}{together}")))
}

/// D and Dv, and the factor on q·k, of options whose heads and blocks go together.
fn heads_and_blocks(c: &vwd_decoder_options) -> Result<([usize; 2], f32)> {
    let dims = key_dims(c.key_dim, c.value_dim)?;
    check_heads([c.query_heads, c.kv_heads])?;
    check_blocks(c.block_size, c.page_size)?;
    if c.scale == 0.0 && c.key_dim != c.value_dim {
        let expected = format!("the scale of q·k, since D={} and Dv={} differ", c.key_dim, c.value_dim);
        return Err(Error::argument("options.scale", c.scale, expected));
    }
    let scale = scale_or_default(c.scale, c.key_dim as usize)
        .map_err(|_| Error::argument("options.scale", c.scale, "a finite number above 0, or 0 for 1/√D"))?;
    Ok((dims, scale))
}

/// Checks the numbers that stand for themselves, and what a budget needs.
fn check_numbers(c: &vwd_decoder_options, on_cache: bool) -> Result<()> {
    if !(c.soft_cap.is_finite() && c.soft_cap >= 0.0) {
        return Err(Error::argument("options.soft_cap", c.soft_cap, "a finite number above 0, or 0 for none"));
    }
    if !(c.draft_cost.is_finite() && c.draft_cost >= 0.0) {
        return Err(Error::argument("options.draft_cost", c.draft_cost, "a finite number above 0, or 0 for 0.5"));
    }
    let has_budget = !c.budget.is_null();
    let (most, expected) = if has_budget { (1.0, "0 to 1") } else { (0.0, "0 without a budget") };
    if !(0.0..=most).contains(&c.coverage) {
        return Err(Error::argument("options.coverage", c.coverage, expected));
    }
    if has_budget && on_cache {
        return Err(Error::argument("options.budget", "given on a cache", "none: a budget has no times of copies"));
    }
    let max_positions = c.max_positions.max(1);
    if c.max_draft >= max_positions && c.max_draft > 0 {
        let expected = format!("less than max_positions, {max_positions}");
        return Err(Error::argument("options.max_draft", c.max_draft, expected));
    }
    Ok(())
}

/// Checks the shape for strategies that repair.
fn check_repair(c: &vwd_decoder_options, on_cache: bool, on_cuda: bool) -> Result<()> {
    let strategy = if on_cache { "VWD_STRATEGY_VANWARD" } else { "VWD_STRATEGY_PRR" };
    if c.block_size < LEAST_REPAIRED_BLOCK {
        let expected = format!("at least {LEAST_REPAIRED_BLOCK} for {strategy}");
        return Err(Error::argument("options.block_size", c.block_size, expected));
    }
    if on_cuda && c.value_dim > MOST_REPAIRED_CHANNELS {
        let expected = format!("at most {MOST_REPAIRED_CHANNELS} for {strategy} on CUDA");
        return Err(Error::argument("options.value_dim", c.value_dim, expected));
    }
    Ok(())
}

/// Whether sparse rows get the term for what their lists leave out.
fn has_term(c: &vwd_decoder_options) -> Result<bool> {
    match c.remainder {
        0 | 1 => Ok(c.remainder == 1),
        other => Err(Error::argument("options.remainder", other, "0 or 1")),
    }
}

/// The options of a decoder on a cache: its blocks are pages, each of one block, and a row's page table names them.
fn on_cache(c: &vwd_decoder_options, cache: &kv::Options) -> Result<vwd_decoder_options> {
    let dtype = key_dtype(c.dtype_code, c.dtype_bits);
    if !dtype.as_ref().is_ok_and(|&dtype| dtype == cache.dtype) {
        let found =
            dtype.map_or_else(|_| format!("code {}, {} bits", c.dtype_code, c.dtype_bits), |dtype| dtype.to_string());
        return Err(Error::argument("options.dtype_code", found, format!("{}, as the cache", cache.dtype)));
    }
    let same = [
        ("options.layers", c.layers, cache.layers),
        ("options.kv_heads", c.kv_heads, cache.kv_heads),
        ("options.key_dim", c.key_dim, cache.dims[0]),
        ("options.value_dim", c.value_dim, cache.dims[1]),
        ("options.block_size", c.block_size, cache.block_size),
    ];
    for (name, found, expected) in same {
        if found as usize != expected {
            return Err(Error::argument(name, found, format!("{expected}, as the cache")));
        }
    }
    for (name, found) in [("options.page_size", c.page_size), ("options.pages", c.pages)] {
        if found != 0 {
            return Err(Error::argument(name, found, "0 on a cache"));
        }
    }
    let sequences = cache.max_sequences as u32;
    if (c.max_sequences != 0 && c.max_sequences < sequences) || c.max_rows > sequences {
        let (name, found, expected) = match c.max_rows > sequences {
            true => ("options.max_rows", c.max_rows, "at most"),
            false => ("options.max_sequences", c.max_sequences, "0, or at least"),
        };
        return Err(Error::argument(name, found, format!("{expected} the {sequences} sequences of the cache")));
    }
    if c.max_positions as usize > cache.block_size {
        let expected = format!("at most the {} tokens of a block of the cache", cache.block_size);
        return Err(Error::argument("options.max_positions", c.max_positions, expected));
    }
    let tokens = (cache.max_blocks * cache.block_size) as u32;
    Ok(vwd_decoder_options {
        page_size: c.block_size,
        pages: cache.host_blocks as u32,
        max_sequences: c.max_sequences.max(sequences),
        max_tokens: if c.max_tokens == 0 { tokens } else { c.max_tokens.min(tokens) },
        ..*c
    })
}

/// The policies of all layers.
///
/// # Safety
/// `policies` has `policy_count` elements.
unsafe fn policies(c: &vwd_decoder_options, on_cache: bool) -> Result<Vec<Policy>> {
    let from_c = |name: &str, policy: &vwd_decoder_policy| {
        Policy::from_c(name, policy, c.block_size, on_cache, !c.budget.is_null())
    };
    const PURPOSE: &str = "the policies of a decoder";
    let layers = c.layers as usize;
    if c.policy_count == 0 {
        let policy = from_c("options.policy", &c.policy)?;
        return collected((0..layers).map(|_| policy), PURPOSE);
    }
    if c.policy_count != c.layers {
        let expected = format!("0, or the {layers} layers");
        return Err(Error::argument("options.policy_count", c.policy_count, expected));
    }
    // SAFETY: the caller says how many there are.
    let given = unsafe { array("options.policies", c.policies, layers, "policies")? };
    let checked: Result<Vec<Policy>> =
        given.iter().enumerate().map(|(n, policy)| from_c(&format!("options.policies[{n}]"), policy)).collect();
    checked
}

/// No row has so few tokens.
const NEVER_DENSE: i32 = -1;

impl Policy {
    fn from_c(name: &str, c: &vwd_decoder_policy, block_size: u32, on_cache: bool, has_budget: bool) -> Result<Policy> {
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
        let (strategy, predicted) = Policy::strategy(name, c, method, on_cache)?;
        let (k, init, local, window) = (c.k, c.init_blocks, c.local_blocks, c.window);
        let (threshold, serial_threshold) = (i32::MAX, i32::MAX);
        let policy = Policy { method, k, init, local, window, threshold, serial_threshold, strategy, predicted };
        if method == Method::Dense {
            return Ok(policy);
        }
        if on_cache {
            if c.dense_below != 0 && strategy.remembers_lists() {
                return Err(Error::argument(&format!("{name}.dense_below"), c.dense_below, "0 for ASYNC_TLS"));
            }
            // Slots are nearer than host memory, even to a list that has all blocks.
            let threshold = (c.dense_below as i64 - 1).clamp(NEVER_DENSE as i64, i32::MAX as i64) as i32;
            return Ok(Policy { threshold, serial_threshold: threshold, ..policy });
        }
        // Lists of so many blocks have all of them.
        let of_list = |blocks: usize| {
            let covered = blocks.saturating_mul(block_size as usize);
            covered.max(c.dense_below.saturating_sub(1) as usize).min(i32::MAX as usize) as i32
        };
        let serial = of_list(policy.selected_capacity());
        let threshold = match strategy {
            Strategy::Foreseen => of_list(policy.predicted_blocks()),
            _ => serial,
        };
        Ok(Policy { threshold, serial_threshold: if has_budget { serial } else { threshold }, ..policy })
    }

    /// The strategy, and the budget of its predicted lists.
    fn strategy(name: &str, c: &vwd_decoder_policy, method: Method, on_cache: bool) -> Result<(Strategy, u32)> {
        let refuse = |field: &str, found: &dyn ToString, expected: &str| {
            Err(Error::argument(&format!("{name}.{field}"), found.to_string(), expected))
        };
        let vwd_holt { alpha, beta, gamma } = c.holt;
        let has_holt = [alpha, beta, gamma] != [0.0; 3];
        if c.reserved != [0; 4] {
            return refuse("reserved", &format!("{:?}", c.reserved), "zeros");
        }
        let is_of_cache = c.strategy >= VWD_STRATEGY_ASYNC_TLS;
        if c.strategy > VWD_STRATEGY_VANWARD {
            return refuse("strategy", &c.strategy, "a VWD_STRATEGY_* value (0 to 5)");
        }
        if c.strategy != VWD_STRATEGY_SERIAL && is_of_cache != on_cache {
            let expected = match on_cache {
                true => "VWD_STRATEGY_SERIAL, ASYNC_TLS, SPARDA or VANWARD on a cache",
                false => "VWD_STRATEGY_SERIAL, PRR or FORESEEN without a cache",
            };
            return refuse("strategy", &c.strategy, expected);
        }
        let strategy = match (c.strategy, c.predict) {
            (VWD_STRATEGY_SERIAL, 0) => Strategy::Serial,
            (VWD_STRATEGY_ASYNC_TLS, 0) => Strategy::AsyncTls,
            (VWD_STRATEGY_PRR | VWD_STRATEGY_VANWARD, VWD_PREDICT_SCORES) => {
                let vwd_holt { alpha, beta, gamma } = check_holt(&format!("{name}.holt"), &c.holt)?;
                Strategy::PrrByScores { alpha, beta, gamma }
            }
            (VWD_STRATEGY_PRR | VWD_STRATEGY_VANWARD, VWD_PREDICT_FORESEEN) => Strategy::PrrForeseen,
            (VWD_STRATEGY_PRR | VWD_STRATEGY_VANWARD, predict) => {
                return refuse("predict", &predict, "a VWD_PREDICT_* value (0 or 1)");
            }
            (VWD_STRATEGY_FORESEEN | VWD_STRATEGY_SPARDA, 0) => Strategy::Foreseen,
            (_, predict) => return refuse("predict", &predict, "0 without VWD_STRATEGY_PRR or VANWARD"),
        };
        if has_holt && !strategy.remembers() {
            return refuse("holt", &format!("{alpha}, {beta}, {gamma}"), "zeros without VWD_PREDICT_SCORES");
        }
        if matches!(strategy, Strategy::Serial | Strategy::AsyncTls) {
            // The list of the step before is as long as a selected one.
            let predicted = if strategy == Strategy::AsyncTls { c.k } else { 0 };
            return match c.ratio {
                0.0 => Ok((strategy, predicted)),
                _ => refuse("ratio", &c.ratio, "0 for SERIAL and ASYNC_TLS"),
            };
        }
        if method == Method::Dense {
            return refuse("strategy", &c.strategy, "0 for a dense layer");
        }
        const DEFAULT: f32 = 1.25;
        let Ok(ratio) = Ratio::from_c(if c.ratio == 0.0 { DEFAULT } else { c.ratio }) else {
            return refuse("ratio", &c.ratio, "a finite number from 1, or 0 for 1.25");
        };
        match u32::try_from(ratio.of(c.k as usize)) {
            Ok(predicted) => Ok((strategy, predicted)),
            Err(_) => refuse("ratio", &c.ratio, "fewer than 2^32 predicted blocks"),
        }
    }
}
