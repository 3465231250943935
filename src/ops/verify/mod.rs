//! Greedy verification of draft tokens.
//!
//! k_i = first j < len_i with draft[i, j] ≠ target[i, j] or draft[i, j] < 0, else len_i; next_token[i] = target[i, k_i].

mod choose;
mod cpu;
mod cuda;
mod end;

// `vwd_verify_pack` verifies too.
pub(super) use choose::TILE_TOKENS;
pub(super) use cpu::run as on_cpu;
pub(super) use cuda::{ByToken, Kernels, Params, run as enqueue, tiles};

pub use end::{End, GivenEnd, integer};

use super::contents::{self, Rule};
use crate::abi::{vwd_stream, vwd_tensor, vwd_verify_args, vwd_verify_pack_args};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor};
use crate::runtime::{On, Session, require_no_flags};

/// Checked arguments; shapes as in `vwd_verify`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// [B, γ]
    pub draft: Tensor<'a>,
    /// [B, γ+1]
    pub target: Tensor<'a>,
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
}

macro_rules! given_by {
    ($($args:ty),*) => {$(
        impl<'a> From<&'a $args> for Given<'a> {
            #[inline(always)]
            fn from(c: &'a $args) -> Given<'a> {
                Given {
                    draft: &c.draft,
                    target: &c.target,
                    draft_lens: &c.draft_lens,
                    accepted: &c.accepted,
                    next_token: &c.next_token,
                    mismatch: &c.mismatch,
                    committed: &c.committed,
                }
            }
        }
    )*};
}
given_by!(vwd_verify_args, vwd_verify_pack_args);

impl<'a> Request<'a> {
    #[inline(always)]
    pub fn from_c(session: &Session, c: &'a vwd_verify_args) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        let request = Request::unchecked_overlap(&session.checks(), &Given::from(c))?;
        overlap::reject(&request.outputs(), &request.inputs())?;
        Ok(request)
    }

    /// Makes all checks except for overlap, which the caller checks over all tensors of its call.
    #[inline(always)]
    pub fn unchecked_overlap(checks: &Checks, c: &Given<'a>) -> Result<Request<'a>> {
        let draft = checks.input("draft", c.draft, DType::TOKENS, &[("B", ANY), ("γ", ANY)])?;
        let (batch, gamma) = (draft.dim(0), draft.dim(1));
        if gamma > i32::MAX as usize {
            return Err(Error::argument("draft", format!("{gamma} tokens a row"), "at most 2^31 − 1"));
        }
        let row = [("B", batch), ("γ+1", gamma + 1)];
        let column = [("B", batch)];
        let (token, count) = (&[draft.dtype], &[DType::I32]);
        let flags = &[DType::I32, DType::U8, DType::BOOL];
        let target = checks.input("target", c.target, token, &row)?;
        let draft_lens = checks.optional_input("draft_lens", c.draft_lens, count, &column)?;
        let accepted = checks.output("accepted", c.accepted, count, &column)?;
        let next_token = checks.output("next_token", c.next_token, token, &column)?;
        let mismatch = checks.optional_output("mismatch", c.mismatch, flags, &column)?;
        let committed = checks.optional_output("committed", c.committed, token, &row)?;
        Ok(Request { draft, target, draft_lens, accepted, next_token, mismatch, committed })
    }

    pub fn outputs(&self) -> [Option<&Tensor<'a>>; 4] {
        [Some(&self.accepted), Some(&self.next_token), self.mismatch.as_ref(), self.committed.as_ref()]
    }

    pub fn inputs(&self) -> [Option<&Tensor<'a>>; 3] {
        [Some(&self.draft), Some(&self.target), self.draft_lens.as_ref()]
    }

    /// What a session that checks contents reads.
    pub fn contents(&self) -> Vec<Rule<'a>> {
        self.draft_lens.map(|lens| Rule::up_to(lens, self.gamma())).into_iter().collect()
    }

    pub fn batch(&self) -> usize {
        self.draft.dim(0)
    }

    pub fn gamma(&self) -> usize {
        self.draft.dim(1)
    }
}

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
