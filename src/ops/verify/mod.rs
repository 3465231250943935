//! Greedy verification of draft tokens.
//!
//! k_i = first j < len_i with draft[i, j] ≠ target[i, j] or draft[i, j] < 0, else len_i. Committed are t_{i,j} = target[i, j] for j ≤ k_i, cut
//! as `end` says: accepted are those of j < k_i, and the next token is that of j = k_i.
//!
//! Drafts of different lengths may lie one after the other: draft[i, j] is then element end_{i−1} + j, and so is target[i, j] for j below the
//! draft's length; after the whole draft comes the bonus token of its own.

mod choose;
mod cpu;
mod cuda;
mod end;

// `vwd_verify_pack` verifies too.
pub(super) use choose::TILE_TOKENS;
pub(super) use cpu::run as on_cpu;
pub(super) use cuda::{ByToken, EndParams, Kernels, Params, run_before, tiles};

pub use end::{End, GivenEnd, integer};

use super::contents::{self, Rule};
use crate::abi::{vwd_stream, vwd_tensor, vwd_verify_args, vwd_verify_pack_args};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::runtime::{On, Session, require_no_flags};

/// Checked arguments; shapes as in `vwd_verify`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// [B, γ], or [N] where drafts lie one after the other.
    pub draft: Tensor<'a>,
    /// [B, γ+1], or [N]
    pub target: Tensor<'a>,
    pub flat: Option<Flat<'a>>,
    /// [B]
    pub draft_lens: Option<Tensor<'a>>,
    /// [B]
    pub accepted: Tensor<'a>,
    /// [B]
    pub next_token: Tensor<'a>,
    /// [B]
    pub mismatch: Option<Tensor<'a>>,
    /// [B, γ+1]
    pub committed: Option<Tensor<'a>>,
    pub end: Option<End<'a>>,
    batch: usize,
    gamma: usize,
}

/// What drafts that lie one after the other have beside their tokens.
#[derive(Clone, Copy)]
pub struct Flat<'a> {
    /// [B]
    pub ends: Tensor<'a>,
    /// [B]
    pub bonus: Tensor<'a>,
}

/// The tensors of a verification, from the arguments of `vwd_verify` or of `vwd_verify_pack`.
pub struct Given<'a> {
    draft: &'a vwd_tensor,
    target: &'a vwd_tensor,
    draft_lens: &'a vwd_tensor,
    accepted: &'a vwd_tensor,
    next_token: &'a vwd_tensor,
    mismatch: &'a vwd_tensor,
    committed: &'a vwd_tensor,
    end: GivenEnd<'a>,
    /// draft_ends and bonus.
    flat: Option<[&'a vwd_tensor; 2]>,
}

macro_rules! given_by {
    ($($args:ty, $flat:expr);*) => {$(
        impl<'a> From<&'a $args> for Given<'a> {
            #[inline(always)]
            fn from(c: &'a $args) -> Given<'a> {
                let flat: fn(&'a $args) -> Option<[&'a vwd_tensor; 2]> = $flat;
                Given {
                    draft: &c.draft,
                    target: &c.target,
                    draft_lens: &c.draft_lens,
                    accepted: &c.accepted,
                    next_token: &c.next_token,
                    mismatch: &c.mismatch,
                    committed: &c.committed,
                    end: GivenEnd::from(c),
                    flat: flat(c),
                }
            }
        }
    )*};
}
given_by!(vwd_verify_args, |c| Some([&c.draft_ends, &c.bonus]); vwd_verify_pack_args, |_| None);

impl<'a> Request<'a> {
    #[inline(always)]
    pub fn from_c(session: &Session, c: &'a vwd_verify_args) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        let request = Request::unchecked_overlap(&session.checks(), &Given::from(c))?;
        request.check_overlap()?;
        Ok(request)
    }

    /// Makes all checks except for overlap, which the caller checks over all tensors of its call.
    #[inline(always)]
    pub fn unchecked_overlap(checks: &Checks, c: &Given<'a>) -> Result<Request<'a>> {
        let Drafts { draft, target, flat, batch, gamma } = match c.flat {
            Some([ends, bonus]) if is_listed(ends) => Drafts::flat(checks, c, ends, bonus)?,
            Some([_, bonus]) if given(bonus).is_some() => {
                return Err(Error::argument("bonus", "given without draft_ends", "draft_ends beside it"));
            }
            _ => Drafts::rows(checks, c)?,
        };
        let row = [("B", batch), ("γ+1", gamma + 1)];
        let column = [("B", batch)];
        let (token, count) = (&[draft.dtype], &[DType::I32]);
        let flags = &[DType::I32, DType::U8, DType::BOOL];
        let draft_lens = checks.optional_input("draft_lens", c.draft_lens, count, &column)?;
        let accepted = checks.output("accepted", c.accepted, count, &column)?;
        checks.same_dtype("next_token", c.next_token, &draft)?;
        checks.same_dtype("committed", c.committed, &draft)?;
        let next_token = checks.output("next_token", c.next_token, token, &column)?;
        let mismatch = checks.optional_output("mismatch", c.mismatch, flags, &column)?;
        let committed = checks.optional_output("committed", c.committed, token, &row)?;
        let end = End::check_given(checks, batch, &c.end)?;
        Ok(Request { draft, target, flat, draft_lens, accepted, next_token, mismatch, committed, end, batch, gamma })
    }

    #[inline(always)]
    fn check_overlap(&self) -> Result<()> {
        match (&self.flat, &self.end) {
            (None, None) => overlap::reject(&self.outputs(), &self.inputs()),
            (flat, end) => self.check_more_overlap(flat.as_ref(), end.as_ref()),
        }
    }

    #[inline(never)]
    fn check_more_overlap(&self, flat: Option<&Flat>, end: Option<&End>) -> Result<()> {
        let [accepted, next_token, mismatch, committed] = self.outputs();
        let [draft, target, draft_lens] = self.inputs();
        let [committed_len, finish] = end.map_or([None; 2], End::outputs);
        let [stop, ignore_stop, remaining, min_remaining] = end.map_or([None; 4], End::inputs);
        let outputs = [accepted, next_token, mismatch, committed, committed_len, finish];
        let of_drafts = [draft, target, draft_lens, flat.map(|flat| &flat.ends), flat.map(|flat| &flat.bonus)];
        overlap::reject(&outputs, &of_drafts)?;
        overlap::reject(&outputs, &[stop, ignore_stop, remaining, min_remaining])
    }

    /// The outputs but for those of `end`.
    pub fn outputs(&self) -> [Option<&Tensor<'a>>; 4] {
        [Some(&self.accepted), Some(&self.next_token), self.mismatch.as_ref(), self.committed.as_ref()]
    }

    /// The inputs but for those of `flat` and `end`.
    pub fn inputs(&self) -> [Option<&Tensor<'a>>; 3] {
        [Some(&self.draft), Some(&self.target), self.draft_lens.as_ref()]
    }

    /// What a session that checks contents reads.
    pub fn contents(&self) -> Vec<Rule<'a>> {
        let lens = self.draft_lens.map(|lens| Rule::up_to(lens, self.gamma));
        let ends = self.flat.map(|flat| [Rule::up_to(flat.ends, self.draft.dim(0)), Rule::not_descending(flat.ends)]);
        lens.into_iter().chain(ends.into_iter().flatten()).collect()
    }

    pub fn batch(&self) -> usize {
        self.batch
    }

    /// The most draft tokens of a request.
    pub fn gamma(&self) -> usize {
        self.gamma
    }
}

/// The tokens that are compared, and how many there are.
struct Drafts<'a> {
    draft: Tensor<'a>,
    target: Tensor<'a>,
    flat: Option<Flat<'a>>,
    batch: usize,
    gamma: usize,
}

/// Whether a tensor of one dimension is given, which may have no elements and no memory.
fn is_listed(t: &vwd_tensor) -> bool {
    t.ndim == 1 || given(t).is_some()
}

impl<'a> Drafts<'a> {
    #[inline(always)]
    fn rows(checks: &Checks, c: &Given<'a>) -> Result<Drafts<'a>> {
        let draft = checks.input("draft", c.draft, DType::TOKENS, &[("B", ANY), ("γ", ANY)])?;
        let (batch, gamma) = (draft.dim(0), draft.dim(1));
        if gamma > MOST_TOKENS {
            return Err(Error::argument("draft", format!("{gamma} tokens a row"), "at most 2^31 − 1"));
        }
        checks.same_dtype("target", c.target, &draft)?;
        let target = checks.input("target", c.target, &[draft.dtype], &[("B", batch), ("γ+1", gamma + 1)])?;
        Ok(Drafts { draft, target, flat: None, batch, gamma })
    }

    #[inline(never)]
    fn flat(checks: &Checks, c: &Given<'a>, ends: &'a vwd_tensor, bonus: &'a vwd_tensor) -> Result<Drafts<'a>> {
        let ends = checks.input("draft_ends", ends, &[DType::I32], &[("B", ANY)])?;
        let batch = ends.dim(0);
        let draft = checks.input("draft", c.draft, DType::TOKENS, &[("N", ANY)])?;
        let (tokens, token) = (draft.dim(0), &[draft.dtype]);
        if tokens > MOST_TOKENS {
            return Err(Error::argument("draft", format!("{tokens} tokens"), "at most 2^31 − 1"));
        }
        checks.same_dtype("target", c.target, &draft)?;
        checks.same_dtype("bonus", bonus, &draft)?;
        let target = checks.input("target", c.target, token, &[("N", tokens)])?;
        let bonus = checks.input("bonus", bonus, token, &[("B", batch)])?;
        if given(c.draft_lens).is_some() {
            return Err(Error::argument("draft_lens", "given beside draft_ends", "one of the two"));
        }
        let committed = checks.optional_output("committed", c.committed, token, &[("B", batch), ("M", ANY)])?;
        let gamma = match committed.map(|committed| committed.dim(1)) {
            Some(0) => return Err(Error::argument("committed", "0 tokens a row", "1 or more")),
            // A draft has no more than all drafts have.
            Some(places) => (places - 1).min(MOST_TOKENS),
            None => tokens,
        };
        Ok(Drafts { draft, target, flat: Some(Flat { ends, bonus }), batch, gamma })
    }
}

/// The most tokens of a row, and of all drafts that lie one after the other.
const MOST_TOKENS: usize = i32::MAX as usize;

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.contents())?;
    match on {
        On::Cpu(cpu) => {
            cpu::run(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}
