//! The request of `vwd_kv_cache_append`: the keys and values of new tokens, which go to the tails of their sequences.

use super::KvCache;
use super::options::Options;
use crate::abi::{vwd_kv_cache_append_args, vwd_tensor};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Tensor};
use crate::ops::contents::{Number, Rule};
use crate::runtime::require_no_flags;
use std::ops::Range;

/// Checked arguments of `vwd_kv_cache_append`.
pub struct AppendRequest<'a> {
    pub layer: usize,
    /// [B]
    pub(super) sequences: Tensor<'a>,
    pub(super) begin: Tensor<'a>,
    pub(super) lens: Option<Tensor<'a>>,
    /// Keys [B, T, Hk, D], values [B, T, Hk, Dv], and the scales of both, [B, T, Hk].
    pub(super) parts: [Option<Tensor<'a>>; 4],
}

impl<'a> AppendRequest<'a> {
    pub fn from_c(cache: &KvCache, c: &'a vwd_kv_cache_append_args) -> Result<AppendRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let (checks, options) = (cache.session.checks(), &cache.options);
        let (layer, i32) = (cache.layer(c.layer)?, &[DType::I32]);
        let sequences = cache.check_sequences(&c.sequences)?;
        let batch = ("B", sequences.dim(0));
        let begin = checks.input("begin", &c.begin, i32, &[batch])?;
        let lens = checks.optional_input("lens", &c.lens, i32, &[batch])?;
        let (heads, [key, value]) = (("Hk", options.kv_heads), options.dims);
        let k = checks.input("k", &c.k, &[options.dtype], &[batch, ("T", ANY), heads, ("D", key)])?;
        let tokens = ("T", k.dim(1));
        let v = checks.input("v", &c.v, &[options.dtype], &[batch, tokens, heads, ("Dv", value)])?;
        let scale = |name: &'static str, t: &'a vwd_tensor| match options.token_scales {
            true => checks.input(name, t, &[DType::F32], &[batch, tokens, heads]).map(Some),
            false if t.data.is_null() => Ok(None),
            false => Err(Error::argument(name, "given", "none: the cache keeps no scales of tokens")),
        };
        let [k_scale, v_scale] = [scale("k_scale", &c.k_scale)?, scale("v_scale", &c.v_scale)?];
        Ok(AppendRequest { layer, sequences, begin, lens, parts: [Some(k), Some(v), k_scale, v_scale] })
    }

    /// What a session that checks contents reads. A row whose sequence is −1 appends nothing.
    pub(super) fn contents(&self, options: &Options) -> Vec<Rule<'a>> {
        let of_sequence = |rule: Rule<'a>| rule.where_positive(Number::of(self.sequences).plus(1));
        let most = Number::constant(self.most_tokens());
        let count = self.lens.map_or(most, |lens| Number::of(lens).at_most(self.most_tokens()));
        let room = options.max_blocks.saturating_mul(options.block_size);
        let scales = self.parts[2..].iter().flatten();
        let scales = scales.map(|t| of_sequence(Rule::factor(*t)).between(1, Number::constant(0), count));
        let rules = [
            Rule::within(self.sequences, -1, Number::constant(options.max_sequences)),
            Rule::distinct(self.sequences),
            of_sequence(Rule::up_to(self.begin, room)),
        ];
        let lens = self.lens.map(|lens| of_sequence(Rule::up_to(lens, self.most_tokens())));
        rules.into_iter().chain(lens).chain(scales).collect()
    }

    pub(super) fn batch(&self) -> usize {
        self.sequences.dim(0)
    }

    /// Whether the request has no token, however large its other extents are.
    pub(super) fn is_empty(&self) -> bool {
        self.parts[0].is_none_or(|k| k.is_empty())
    }

    pub(super) fn most_tokens(&self) -> usize {
        self.parts[0].map_or(0, |k| k.dim(1))
    }

    pub(super) fn parts(&self) -> [Option<&Tensor<'a>>; 4] {
        self.parts.each_ref().map(Option::as_ref)
    }

    /// # Safety
    /// The call's caller keeps the tensors valid, and they lie in host memory.
    pub(super) unsafe fn sequence(&self, i: usize) -> usize {
        // SAFETY: the caller keeps the tensors valid, in host memory, and i is one of their rows.
        usize::try_from(unsafe { self.sequences.get::<i32, 1>([i]) }).unwrap_or(usize::MAX)
    }

    /// The token positions of row `i`.
    ///
    /// # Safety
    /// The conditions of [`AppendRequest::sequence`] hold.
    pub(super) unsafe fn tokens(&self, i: usize) -> Range<i64> {
        let most = self.most_tokens() as i64;
        // SAFETY: the caller keeps the tensors valid, in host memory, and i is one of their rows.
        let (begin, len) = unsafe {
            (self.begin.get::<i32, 1>([i]) as i64, self.lens.map_or(most, |lens| lens.get::<i32, 1>([i]) as i64))
        };
        begin..begin + len.clamp(0, most)
    }
}
