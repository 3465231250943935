//! Verification of sampled draft tokens, and sampling.
//!
//! Row r of request i is a distribution p over V tokens, made of logits by the request's settings; `ops::draw` says how and how tokens
//! are drawn. With u and v the random numbers of purposes ACCEPT and DRAW at position positions[i] + r, x the draft token and q what it
//! was drawn from (1 at x where there is nothing):
//!
//! - a greedy row gives y = the lowest token of the largest logit, and accepts x iff x = y;
//! - COUPLED gives y = draw(p, v), and accepts x iff x = y;
//! - REJECTION accepts x iff u·q(x) < p(x), and else gives y = draw(max(p − q, 0), v), or draw(p, v) where that has no mass.
//!
//! The first row that does not accept, or has no draft token, ends the walk with y, which a row without draft token draws from p.
//! The committed tokens are cut after the first stop token and at `remaining`; no row after the cut is decided.

mod choose;
mod cpu;
mod cuda;

pub(super) use cuda::Kernels;

use super::contents::{self, Rule};
use super::draw::MOST_TOKENS;
use super::draw::request::{GivenSampling, Sampling, Sizes};
use super::verify::{End, GivenEnd};
use crate::abi::{
    VWD_ACCEPT_AUTO, VWD_ACCEPT_COUPLED, VWD_ACCEPT_GREEDY, VWD_ACCEPT_REJECTION, vwd_stream, vwd_verify_sample_args,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::runtime::{On, Session};

/// The longest draft.
pub const MOST_DRAFT: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    Greedy,
    Coupled,
    Rejection,
}

/// Checked arguments; shapes as in `vwd_verify_sample`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    rule: Acceptance,
    sampling: Sampling<'a>,
    batch: usize,
    gamma: usize,
    /// [B, γ]
    draft: Option<Tensor<'a>>,
    /// [B]
    draft_lens: Option<Tensor<'a>>,
    /// [B, γ+1, V] or [N, V]
    target: Tensor<'a>,
    /// [B]
    target_begin: Option<Tensor<'a>>,
    end: End<'a>,
    /// [B]
    next_token: Tensor<'a>,
    accepted: Option<Tensor<'a>>,
    /// [B, γ+1]
    committed: Option<Tensor<'a>>,
    /// [B]
    status: Option<Tensor<'a>>,
    /// [B, γ+1]
    logprobs: Option<Tensor<'a>>,
}

impl<'a> Request<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_verify_sample_args) -> Result<Request<'a>> {
        let has_rows = given(&c.draft_rows).is_some();
        let rule = match c.rule {
            VWD_ACCEPT_AUTO if has_rows => Acceptance::Rejection,
            VWD_ACCEPT_AUTO | VWD_ACCEPT_COUPLED => Acceptance::Coupled,
            VWD_ACCEPT_REJECTION => Acceptance::Rejection,
            VWD_ACCEPT_GREEDY => Acceptance::Greedy,
            other => return Err(Error::argument("rule", other, "a VWD_ACCEPT_* value (0 to 3)")),
        };
        let checks = session.checks();
        let (batch, gamma, draft, target, target_begin) = rows(&checks, c)?;
        // Where nothing can be rejected, a token is drawn as by coupling.
        let rule = if rule == Acceptance::Rejection && gamma == 0 { Acceptance::Coupled } else { rule };
        let (column, row) = ([("B", batch)], [("B", batch), ("γ+1", gamma + 1)]);
        let token =
            draft.map_or(DType::TOKENS, |draft| if draft.dtype == DType::I64 { &[DType::I64] } else { &[DType::I32] });
        if let Some(draft) = &draft {
            checks.same_dtype("next_token", &c.next_token, draft)?;
        }
        let next_token = checks.output("next_token", &c.next_token, token, &column)?;
        let given = GivenSampling {
            flags: c.flags,
            draft_rows: &c.draft_rows,
            draft_map: &c.draft_map,
            temperature: &c.temperature,
            top_k: &c.top_k,
            top_p: &c.top_p,
            min_p: &c.min_p,
            seeds: &c.seeds,
            positions: &c.positions,
            greedy: "rule is VWD_ACCEPT_GREEDY",
        };
        let sizes = Sizes { batch, draft_rows: ("γ", gamma), tokens: target.dim(target.rank() - 1) };
        let sampling = Sampling::check(&checks, &sizes, rule == Acceptance::Greedy, &given)?;
        checks.same_dtype("committed", &c.committed, &next_token)?;
        let mut request = Request {
            rule,
            sampling,
            batch,
            gamma,
            draft,
            draft_lens: checks.optional_input("draft_lens", &c.draft_lens, &[DType::I32], &column)?,
            target,
            target_begin,
            end: End::check(&checks, batch, &GivenEnd::from(c))?,
            next_token,
            accepted: checks.optional_output("accepted", &c.accepted, &[DType::I32], &column)?,
            committed: checks.optional_output("committed", &c.committed, &[next_token.dtype], &row)?,
            status: checks.optional_output("status", &c.status, &[DType::U32, DType::I32], &column)?,
            logprobs: checks.optional_output("logprobs", &c.logprobs, &[DType::F32], &row)?,
        };
        request.check_overlap()?;
        // Where they are not read they are still an input that no output may overlap.
        request.sampling.draft_rows = request.sampling.draft_rows.filter(|_| rule == Acceptance::Rejection);
        Ok(request)
    }

    fn check_overlap(&self) -> Result<()> {
        let [committed_len, finish] = self.end.outputs();
        let [stop, ignore_stop, remaining, min_remaining] = self.end.inputs();
        let outputs = [
            Some(&self.next_token),
            self.accepted.as_ref(),
            self.committed.as_ref(),
            committed_len,
            finish,
            self.status.as_ref(),
            self.logprobs.as_ref(),
        ];
        let [rows, map, temperature, top_k, top_p, min_p, seeds, positions] = self.sampling.inputs();
        let inputs = [
            self.draft.as_ref(),
            self.draft_lens.as_ref(),
            Some(&self.target),
            self.target_begin.as_ref(),
            rows,
            map,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            stop,
            ignore_stop,
            remaining,
            min_remaining,
        ];
        overlap::reject(&outputs, &inputs)
    }

    /// What a session that checks contents reads.
    fn contents(&self) -> Vec<Rule<'a>> {
        let lens = self.draft_lens.map(|lens| Rule::up_to(lens, self.gamma));
        lens.into_iter().chain(self.sampling.contents().into_iter().flatten()).collect()
    }

    /// V
    fn tokens(&self) -> usize {
        self.target.dim(self.target.rank() - 1)
    }
}

/// B, γ, and what they follow from: the drafts and the target's rows.
type Rows<'a> = (usize, usize, Option<Tensor<'a>>, Tensor<'a>, Option<Tensor<'a>>);

fn rows<'a>(checks: &Checks, c: &'a vwd_verify_sample_args) -> Result<Rows<'a>> {
    let draft = checks.optional_input("draft", &c.draft, DType::TOKENS, &[("B", ANY), ("γ", ANY)])?;
    // A draft without columns may have no memory.
    let has_columns = c.draft.ndim == 2 && c.draft.data.is_null();
    let draft = match draft {
        None if has_columns => Some(checks.input("draft", &c.draft, DType::TOKENS, &[("B", ANY), ("γ", ANY)])?),
        draft => draft,
    };
    let gamma = draft.map_or(0, |draft| draft.dim(1));
    if gamma > MOST_DRAFT {
        return Err(Error::argument("draft", format!("{gamma} tokens a row"), format!("at most {MOST_DRAFT}")));
    }
    if matches!(c.target.ndim, 0 | 1 | 4 | 5) && given(&c.target).is_some() {
        let shape = checks.required("target", &c.target)?.shape();
        return Err(Error::argument("target", format!("shape {shape:?}"), "[B, γ+1, V], or [N, V] with target_begin"));
    }
    let is_flat = c.target.ndim == 2;
    let target_begin = match is_flat {
        true => {
            let batch = draft.map_or(ANY, |draft| draft.dim(0));
            checks.optional_input("target_begin", &c.target_begin, DType::TOKENS, &[("B", batch)])?
        }
        false if given(&c.target_begin).is_some() => {
            let found = format!("given with a target of rank {}", c.target.ndim);
            return Err(Error::argument("target_begin", found, "a target [N, V]"));
        }
        false => None,
    };
    let given_batch = draft.map(|draft| draft.dim(0)).or(target_begin.map(|begin| begin.dim(0))).unwrap_or(ANY);
    let target = match (is_flat, target_begin) {
        (false, _) => {
            let rows = if draft.is_some() { "γ+1" } else { "γ+1 without draft" };
            checks.input("target", &c.target, DType::FLOATS, &[("B", given_batch), (rows, gamma + 1), ("V", ANY)])?
        }
        (true, Some(_)) => checks.input("target", &c.target, DType::FLOATS, &[("N", ANY), ("V", ANY)])?,
        (true, None) if gamma > 0 => {
            let expected = format!("[B={given_batch}, γ+1={}, V], or target_begin beside [N, V]", gamma + 1);
            return Err(Error::argument("target", format!("shape {:?}", &c.target.shape[..2]), expected));
        }
        (true, None) => checks.input("target", &c.target, DType::FLOATS, &[("B", given_batch), ("V", ANY)])?,
    };
    let tokens = target.dim(target.rank() - 1);
    if tokens == 0 || tokens > MOST_TOKENS {
        return Err(Error::argument("target", format!("{tokens} tokens a row"), "1 to 2^20"));
    }
    let batch = if given_batch == ANY { target.dim(0) } else { given_batch };
    Ok((batch, gamma, draft, target, target_begin))
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.contents())?;
    match on {
        On::Cpu(cpu) => cpu::run(cpu, request),
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}

/// Bytes of scratch that [`run`] takes from its stream's arena.
pub fn scratch(session: &Session, request: &Request) -> Result<u64> {
    session.scratch_bytes(|_| cuda::scratch(request))
}
