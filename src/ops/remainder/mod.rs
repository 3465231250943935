//! What a selection leaves out: means and covariance of the keys and values of each sequence and KV head, extended by whole blocks.
//!
//! Blocks are merged in their order, each from differences to the means of those before, so that nothing large is subtracted from anything
//! large and the bits do not depend on how calls cut a sequence. Every operation is rounded on its own: every backend gives the same bits.

mod cpu;
mod cuda;

pub(crate) use cuda::Kernels;

use super::contents::{self, Number, Rule};
use super::views::{PagedKv, check_head_dim};
use crate::abi::{vwd_paged_kv, vwd_remainder, vwd_remainder_update_args, vwd_stream};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor};
use crate::runtime::{On, Session, require_no_flags};

/// The most tokens of a block.
pub const MOST_TOKENS: usize = 4096;

/// Means and covariances. Shapes as in `vwd_remainder`.
#[derive(Clone, Copy)]
pub struct Remainder<'a> {
    /// [B]
    pub rows: Option<Tensor<'a>>,
    /// [N, Hk]
    pub tokens: Tensor<'a>,
    /// [N, Hk, D]
    pub mean_k: Tensor<'a>,
    /// [N, Hk, Dv]
    pub mean_v: Tensor<'a>,
    /// [N, Hk, D, Dv]
    pub covariance: Tensor<'a>,
}

impl<'a> Remainder<'a> {
    /// Checks the remainder of `batch` sequences. `sizes`: KV heads, channels of a key, channels of a value.
    pub fn from_c(checks: &Checks, c: &'a vwd_remainder, batch: usize, sizes: [usize; 3]) -> Result<Remainder<'a>> {
        require_no_flags("remainder.flags", c.flags)?;
        let [heads, dim, value_dim] = [("Hk", sizes[0]), ("D", sizes[1]), ("Dv", sizes[2])];
        let rows = checks.optional_input("remainder.rows", &c.rows, &[DType::I32], &[("B", batch)])?;
        let tokens = checks.input("remainder.tokens", &c.tokens, &[DType::I32], &[("N", ANY), heads])?;
        let count = ("N", tokens.dim(0));
        if rows.is_none() && count.1 < batch {
            let found = format!("{} rows for {batch} sequences without remainder.rows", count.1);
            return Err(Error::argument("remainder.tokens", found, "one row a sequence"));
        }
        let floats = &[DType::F32];
        let mean_k = checks.input("remainder.mean_k", &c.mean_k, floats, &[count, heads, dim])?;
        let mean_v = checks.input("remainder.mean_v", &c.mean_v, floats, &[count, heads, value_dim])?;
        let shape = [count, heads, dim, value_dim];
        let covariance = checks.input("remainder.covariance", &c.covariance, floats, &shape)?;
        Ok(Remainder { rows, tokens, mean_k, mean_v, covariance })
    }

    pub fn tensors(&self) -> [Option<&Tensor<'a>>; 5] {
        let Remainder { rows, tokens, mean_k, mean_v, covariance } = self;
        [rows.as_ref(), Some(tokens), Some(mean_k), Some(mean_v), Some(covariance)]
    }

    /// What `vwd_remainder_update` writes.
    fn outputs(&self) -> [&Tensor<'a>; 4] {
        [&self.tokens, &self.mean_k, &self.mean_v, &self.covariance]
    }

    /// What a session that checks contents reads: rows, of which −1 is none. Rows of no sequence may hold anything.
    pub fn contents(&self) -> Option<Rule<'a>> {
        self.rows.map(|rows| Rule::within(rows, -1, Number::constant(self.tokens.dim(0))))
    }

    /// The row of sequence `i`.
    ///
    /// # Safety
    /// There is a sequence `i`, the op's caller keeps the tensors valid, and the session computes on the CPU.
    pub unsafe fn row(&self, i: usize) -> Option<usize> {
        let Some(rows) = &self.rows else { return Some(i) };
        // SAFETY: rows has an entry for each sequence.
        usize::try_from(unsafe { rows.get::<i32, 1>([i]) }).ok().filter(|&row| row < self.tokens.dim(0))
    }
}

/// Checked arguments of `vwd_remainder_update`.
pub struct Request<'a> {
    pub kv: PagedKv<'a>,
    /// [B]
    pub begin: Option<Tensor<'a>>,
    pub remainder: Remainder<'a>,
    /// Tokens of a block.
    pub block_size: usize,
    /// [B], of a decoder's own calls alone: blocks before this token are not there, whatever the page table says. They are passed over: sums that
    /// exist are taken to have their means, and others begin with the first block that is there.
    pub floors: Option<Tensor<'a>>,
}

impl<'a> Request<'a> {
    pub fn from_c(
        session: &Session,
        c: &'a vwd_remainder_update_args,
        kv: &'a vwd_paged_kv,
        remainder: &'a vwd_remainder,
    ) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = &session.checks();
        let kv = PagedKv::from_c(checks, kv, ANY, ANY, false)?;
        check_head_dim(&kv.k, kv.k.dim(3))?;
        if !(1..=MOST_TOKENS).contains(&(c.block_size as usize)) {
            return Err(Error::argument("block_size", c.block_size, format!("1 to {MOST_TOKENS}")));
        }
        kv.pages.check_block_size("block_size", c.block_size as usize)?;
        let batch = kv.pages.batch();
        let begin = checks.optional_input("begin", &c.begin, &[DType::I32], &[("B", batch)])?;
        let remainder = Remainder::from_c(checks, remainder, batch, [kv.k.dim(2), kv.k.dim(3), kv.value_dim()])?;
        for out in remainder.outputs() {
            out.writable()?;
        }
        let [k_scale, v_scale] = [&kv.k_scale, &kv.v_scale].map(|scale| scale.as_ref().map(|scale| &scale.0));
        let inputs = [
            Some(&kv.k),
            Some(&kv.v),
            kv.pages.table.as_ref(),
            Some(&kv.pages.seq_lens),
            k_scale,
            v_scale,
            begin.as_ref(),
            remainder.rows.as_ref(),
        ];
        overlap::reject(&remainder.outputs().map(Some), &inputs)?;
        Ok(Request { kv, begin, remainder, block_size: c.block_size as usize, floors: None })
    }

    /// What a session that checks contents reads.
    fn contents(&self) -> Vec<Rule<'a>> {
        let pages = &self.kv.pages;
        let mut rules = vec![contents::seq_lens(pages)];
        rules.extend(self.begin.map(|begin| Rule::within(begin, 0, Number::of(pages.seq_lens).plus(1))));
        rules.extend(contents::page_table(pages, self.begin));
        rules.extend([&self.kv.k_scale, &self.kv.v_scale].into_iter().filter_map(contents::scale));
        rules.extend(self.remainder.contents());
        rules.extend(self.remainder.rows.map(Rule::distinct));
        rules
    }
}

pub fn update(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.contents())?;
    match on {
        On::Cpu(cpu) => cpu::update(cpu, request),
        On::Cuda(enqueue) => cuda::update(&enqueue, request),
    }
}
