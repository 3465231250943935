//! The request of `vwd_kv_cache_compact`: the accepted tokens of draft trees, which move inside the tails of their sequences.

use super::KvCache;
use super::options::Options;
use crate::abi::vwd_kv_cache_compact_args;
use crate::core::dtype::DType;
use crate::core::status::Result;
use crate::core::tensor::{ANY, Tensor};
use crate::ops::contents::{Number, Rule};
use crate::runtime::require_no_flags;
use std::ops::Range;

/// Checked arguments of `vwd_kv_cache_compact`.
pub struct CompactRequest<'a> {
    /// [B]
    pub sequences: Tensor<'a>,
    /// [B]
    pub bases: Tensor<'a>,
    /// [B, M]
    pub path: Tensor<'a>,
    /// [B]
    pub accepted: Option<Tensor<'a>>,
}

/// The tokens of a path: `base` … `base` + `len` − 1 once they have moved. Those from `base` + `moved` on come from other places.
#[derive(Clone, Copy)]
pub struct Moves {
    pub base: usize,
    pub len: usize,
    pub moved: usize,
}

impl Moves {
    /// The blocks of this size that are whole afterwards and have tokens that moved.
    pub fn whole_blocks(&self, size: usize) -> Range<usize> {
        (self.base + self.moved) / size..(self.base + self.len) / size
    }
}

impl<'a> CompactRequest<'a> {
    pub fn from_c(cache: &KvCache, c: &'a vwd_kv_cache_compact_args) -> Result<CompactRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let (checks, i32) = (cache.session.checks(), &[DType::I32]);
        let sequences = cache.check_sequences(&c.sequences)?;
        let batch = ("B", sequences.dim(0));
        let bases = checks.input("bases", &c.bases, DType::TOKENS, &[batch])?;
        let path = checks.input("path", &c.path, i32, &[batch, ("M", ANY)])?;
        let accepted = checks.optional_input("accepted", &c.accepted, i32, &[batch])?;
        Ok(CompactRequest { sequences, bases, path, accepted })
    }

    /// What a session that checks contents reads. A row whose sequence is −1 moves nothing.
    pub fn contents(&self, options: &Options) -> Vec<Rule<'a>> {
        let of_sequence = |rule: Rule<'a>| rule.where_positive(Number::of(self.sequences).plus(1));
        let room = options.max_blocks.saturating_mul(options.block_size);
        let rules =
            [Rule::within(self.sequences, -1, Number::constant(options.max_sequences)), Rule::distinct(self.sequences)];
        // Rules are about int32; a base of 64 bits that is no token moves nothing.
        let bases = (self.bases.dtype == DType::I32).then(|| of_sequence(Rule::up_to(self.bases, room)));
        let most = self.places().saturating_sub(1);
        let accepted = self.accepted.map(|accepted| of_sequence(Rule::up_to(accepted, most)));
        rules.into_iter().chain(bases).chain(accepted).collect()
    }

    pub fn batch(&self) -> usize {
        self.sequences.dim(0)
    }

    /// M.
    pub fn places(&self) -> usize {
        self.path.dim(1)
    }

    /// # Safety
    /// The call's caller keeps the tensors valid, and they lie in host memory.
    pub unsafe fn sequence(&self, i: usize) -> usize {
        // SAFETY: the caller keeps the tensors valid, in host memory, and i is one of their rows.
        usize::try_from(unsafe { self.sequences.get::<i32, 1>([i]) }).unwrap_or(usize::MAX)
    }

    /// # Safety
    /// The conditions of [`CompactRequest::sequence`] hold, and the path has a place `j`.
    pub unsafe fn node(&self, i: usize, j: usize) -> i64 {
        // SAFETY: says the caller.
        unsafe { self.path.get::<i32, 2>([i, j]) as i64 }
    }

    /// The tokens of row `i` that move inside these: from the first in the tail on, up to the last that the layer has. `None` without a path.
    ///
    /// # Safety
    /// The conditions of [`CompactRequest::sequence`] hold.
    pub unsafe fn moves(&self, i: usize, tokens: Range<i64>) -> Option<Moves> {
        // SAFETY: the caller keeps the tensors valid, in host memory, and i is one of their rows; j is below M.
        unsafe {
            let base = match self.bases.dtype {
                DType::I32 => self.bases.get::<i32, 1>([i]) as i64,
                _ => self.bases.get::<i64, 1>([i]),
            };
            if !tokens.contains(&base) {
                return None;
            }
            let last = self.accepted.map_or(i64::MAX, |accepted| accepted.get::<i32, 1>([i]) as i64);
            let (mut len, mut moved, mut before) = (0, None, -1);
            while len < self.places() && len as i64 <= last {
                let node = self.node(i, len);
                if node <= before || base + node >= tokens.end {
                    break;
                }
                if node != len as i64 {
                    moved = moved.or(Some(len));
                }
                before = node;
                len += 1;
            }
            (len > 0).then(|| Moves { base: base as usize, len, moved: moved.unwrap_or(len) })
        }
    }
}
