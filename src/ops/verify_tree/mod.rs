//! Verification of draft trees.
//!
//! The walk begins at the root. At node v with the target's token a(v) it goes on to the lowest child c with tokens[c] = a(v) ≥ 0; where there
//! is none, or M − 1 nodes are accepted, it ends. path = the nodes of the walk, committed = a of them, next_token = a of the last. `verify::End`
//! cuts what is committed.
//!
//! - Greedily a(v) is given, or the lowest token of the largest logit of v; so it is for greedy requests of every rule.
//! - COUPLED draws a(v) from p, the distribution that `ops::draw` makes of v's logits, by the random number of purpose DRAW at position
//!   positions[i] + depth(v).
//! - INDEPENDENT and DISTINCT try the children of v in turn (`draw::rejection`): one that is accepted gives a(v) and is the next node; else a(v)
//!   is drawn, and the walk ends. A child's index among the random numbers of purpose ACCEPT is the number of its lower siblings. Children
//!   whose tokens are none of the vocabulary are passed over. A node where M − 1 nodes are accepted tries none, and a(v) is drawn from p.
//!
//! Where depth(v) is below min_remaining, stop tokens are dropped from v's logits before all else.

mod choose;
mod cpu;
mod cuda;

pub(super) use cuda::Kernels;

use super::contents::{self, Rule};
use super::draw;
use super::draw::request::{GivenSampling, Sampling, Sizes};
use super::tree::{self, count_rules};
use super::verify::{End, GivenEnd};
use crate::abi::{
    VWD_WALK_COUPLED, VWD_WALK_DISTINCT, VWD_WALK_GREEDY, VWD_WALK_INDEPENDENT, vwd_stream, vwd_verify_tree_args,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::runtime::{On, Session};

/// Where the target's token after each node comes from.
#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant, reason = "one lives on the stack for the time of a call")]
pub enum Target<'a> {
    /// [B, N], the tokens themselves.
    Tokens(Tensor<'a>),
    /// [B, N, V], of which the largest is the token.
    Logits(Tensor<'a>),
    /// [B, N, V], from which tokens are sampled.
    Sampled(Tensor<'a>, Choice, Sampling<'a>),
}

/// How a sampled walk finds the next node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Coupled,
    Independent,
    Distinct,
}

/// Checked arguments; shapes as in `vwd_verify_tree`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// [B, N]
    pub tokens: Tensor<'a>,
    /// [B, N]
    pub parents: Tensor<'a>,
    /// [B]
    pub node_counts: Option<Tensor<'a>>,
    pub target: Target<'a>,
    /// [B]
    pub accepted: Tensor<'a>,
    /// [B, M]
    pub path: Tensor<'a>,
    /// [B]
    pub next_token: Tensor<'a>,
    /// [B, M]
    pub committed: Option<Tensor<'a>>,
    /// [B]
    pub status: Option<Tensor<'a>>,
    pub end: Option<End<'a>>,
}

impl<'a> Target<'a> {
    fn from_c(checks: &Checks, c: &'a vwd_verify_tree_args, tokens: &Tensor) -> Result<Target<'a>> {
        let (batch, nodes) = (("B", tokens.dim(0)), ("N", tokens.dim(1)));
        let choice = match c.walk {
            VWD_WALK_GREEDY => None,
            VWD_WALK_COUPLED => Some(Choice::Coupled),
            VWD_WALK_INDEPENDENT => Some(Choice::Independent),
            VWD_WALK_DISTINCT => Some(Choice::Distinct),
            other => return Err(Error::argument("walk", other, "a VWD_WALK_* value (0 to 3)")),
        };
        if choice.is_none() && c.flags != 0 {
            return Err(Error::argument("flags", c.flags, "0 for VWD_WALK_GREEDY"));
        }
        if given(&c.logits).is_none() && choice.is_none() {
            if given(&c.target).is_none() && batch.1 > 0 {
                return Err(Error::argument("target", "absent, and so is logits", "one of the two"));
            }
            checks.same_dtype("target", &c.target, tokens)?;
            return Ok(Target::Tokens(checks.input("target", &c.target, &[tokens.dtype], &[batch, nodes])?));
        }
        if given(&c.target).is_some() {
            let found = if choice.is_some() { "given to a walk that samples" } else { "given beside logits" };
            return Err(Error::argument("target", found, "logits alone, or target alone for VWD_WALK_GREEDY"));
        }
        let logits = checks.input("logits", &c.logits, DType::FLOATS, &[batch, nodes, ("V", ANY)])?;
        let (found, most) = (logits.dim(2), if choice.is_some() { draw::MOST_TOKENS } else { MOST_TOKENS });
        if !(1..=most).contains(&found) {
            let expected = format!("1 to {most}{}", if choice.is_some() { " for a walk that samples" } else { "" });
            return Err(Error::argument("logits", format!("a vocabulary of {found} tokens"), expected));
        }
        let Some(choice) = choice else { return Ok(Target::Logits(logits)) };
        let sampling = GivenSampling {
            flags: c.flags,
            draft_rows: &c.draft_rows,
            draft_map: &c.draft_map,
            temperature: &c.temperature,
            top_k: &c.top_k,
            top_p: &c.top_p,
            min_p: &c.min_p,
            seeds: &c.seeds,
            positions: &c.positions,
            greedy: "walk is VWD_WALK_GREEDY",
        };
        let sizes = Sizes { batch: batch.1, draft_rows: nodes, tokens: found };
        Ok(Target::Sampled(logits, choice, Sampling::check(checks, &sizes, false, &sampling)?))
    }

    fn tensor(&self) -> &Tensor<'a> {
        match self {
            Target::Tokens(t) | Target::Logits(t) | Target::Sampled(t, ..) => t,
        }
    }

    fn sampling(&self) -> Option<&Sampling<'a>> {
        match self {
            Target::Sampled(_, _, sampling) => Some(sampling),
            _ => None,
        }
    }
}

/// The largest vocabulary.
const MOST_TOKENS: usize = i32::MAX as usize;

impl<'a> Request<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_verify_tree_args) -> Result<Request<'a>> {
        let checks = session.checks();
        let tokens = tree::nodes(&checks, "tokens", &c.tokens, DType::TOKENS)?;
        let (batch, nodes) = (("B", tokens.dim(0)), ("N", tokens.dim(1)));
        let (number, token) = (&[DType::I32], &[tokens.dtype]);
        let parents = checks.input("parents", &c.parents, number, &[batch, nodes])?;
        let node_counts = checks.optional_input("node_counts", &c.node_counts, number, &[batch])?;
        let target = Target::from_c(&checks, c, &tokens)?;
        let accepted = checks.output("accepted", &c.accepted, number, &[batch])?;
        let path = checks.output("path", &c.path, number, &[batch, ("M", ANY)])?;
        if !(1..=i32::MAX as usize).contains(&path.dim(1)) {
            return Err(Error::argument("path", format!("{} places a row", path.dim(1)), "1 to 2^31 − 1"));
        }
        checks.same_dtype("next_token", &c.next_token, &tokens)?;
        checks.same_dtype("committed", &c.committed, &tokens)?;
        let next_token = checks.output("next_token", &c.next_token, token, &[batch])?;
        let committed = checks.optional_output("committed", &c.committed, token, &[batch, ("M", path.dim(1))])?;
        let status = checks.optional_output("status", &c.status, &[DType::U32], &[batch])?;
        let end = End::check_given(&checks, tokens.dim(0), &GivenEnd::from(c))?;
        let mut request =
            Request { tokens, parents, node_counts, target, accepted, path, next_token, committed, status, end };
        let own = [&request.tokens, &request.parents, request.target.tensor()].map(Some);
        let [tokens, parents, target] = own;
        let [rows, map, temperature, top_k, top_p, min_p, seeds, positions] =
            request.target.sampling().map_or([None; 8], Sampling::inputs);
        let counts = request.node_counts.as_ref();
        let inputs = [tokens, parents, target, counts, rows, map, temperature, top_k, top_p, min_p, seeds, positions];
        overlap::reject(&request.outputs(), &inputs)?;
        if let Some(end) = &request.end {
            let ([accepted, path, next_token, committed, status], ends) = (request.outputs(), end.outputs());
            overlap::reject(&ends, &inputs)?;
            overlap::reject(&[accepted, path, next_token, committed, status, ends[0], ends[1]], &end.inputs())?;
        }
        // VWD_WALK_COUPLED does not read draft_rows; they were checked above, since no output may overlap them.
        if let Target::Sampled(_, Choice::Coupled, sampling) = &mut request.target {
            sampling.draft_rows = None;
        }
        Ok(request)
    }

    fn outputs(&self) -> [Option<&Tensor<'a>>; 5] {
        let [accepted, path, next_token] = [&self.accepted, &self.path, &self.next_token].map(Some);
        [accepted, path, next_token, self.committed.as_ref(), self.status.as_ref()]
    }

    /// What a session that checks contents reads.
    fn contents(&self) -> Vec<Rule<'a>> {
        let mut rules = count_rules(self.node_counts, self.nodes());
        rules.extend(self.target.sampling().into_iter().flat_map(Sampling::contents).flatten());
        rules
    }

    pub fn batch(&self) -> usize {
        self.tokens.dim(0)
    }

    /// N.
    pub fn nodes(&self) -> usize {
        self.tokens.dim(1)
    }

    /// M.
    pub fn places(&self) -> usize {
        self.path.dim(1)
    }
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
    session.scratch_bytes(|cuda| cuda::scratch(cuda, request))
}
