//! Verification of draft trees.
//!
//! The walk begins at the root. At node v with the target's token a(v) it goes on to the lowest child c with tokens[c] = a(v) ≥ 0; where there
//! is none, or M − 1 nodes are accepted, it ends. path = the nodes of the walk, committed = a of them, next_token = a of the last. `verify::End`
//! cuts what is committed.

mod cpu;
mod cuda;

pub(super) use cuda::Kernels;

use super::contents;
use super::tree::{self, count_rules};
use super::verify::{End, GivenEnd};
use crate::abi::{vwd_stream, vwd_verify_tree_args};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::runtime::{On, Session, require_no_flags};

/// Where the target's token after each node comes from.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// [B, N], the tokens themselves.
    Tokens(Tensor<'a>),
    /// [B, N, V], of which the largest is the token.
    Logits(Tensor<'a>),
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
        let Some(logits) = given(&c.logits) else {
            return Ok(Target::Tokens(checks.input("target", &c.target, &[tokens.dtype], &[batch, nodes])?));
        };
        if given(&c.target).is_some() {
            return Err(Error::argument("target", "given beside logits", "one of the two"));
        }
        let logits = checks.input("logits", logits, DType::FLOATS, &[batch, nodes, ("V", ANY)])?;
        match logits.dim(2) {
            1..=MOST_TOKENS => Ok(Target::Logits(logits)),
            n => Err(Error::argument("logits", format!("a vocabulary of {n} tokens"), "1 to 2^31 − 1")),
        }
    }

    fn tensor(&self) -> &Tensor<'a> {
        match self {
            Target::Tokens(t) | Target::Logits(t) => t,
        }
    }
}

/// The largest vocabulary.
const MOST_TOKENS: usize = i32::MAX as usize;

impl<'a> Request<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_verify_tree_args) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
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
        let next_token = checks.output("next_token", &c.next_token, token, &[batch])?;
        let committed = checks.optional_output("committed", &c.committed, token, &[batch, ("M", path.dim(1))])?;
        let status = checks.optional_output("status", &c.status, &[DType::U32], &[batch])?;
        let end = End::check_given(&checks, tokens.dim(0), &GivenEnd::from(c))?;
        let request =
            Request { tokens, parents, node_counts, target, accepted, path, next_token, committed, status, end };
        let inputs = [Some(&request.tokens), Some(&request.parents), Some(request.target.tensor())];
        let [tokens, parents, target] = inputs;
        overlap::reject(&request.outputs(), &[tokens, parents, target, request.node_counts.as_ref()])?;
        if let Some(end) = &request.end {
            let ([accepted, path, next_token, committed, status], ends) = (request.outputs(), end.outputs());
            overlap::reject(&ends, &[tokens, parents, target, request.node_counts.as_ref()])?;
            overlap::reject(&[accepted, path, next_token, committed, status, ends[0], ends[1]], &end.inputs())?;
        }
        Ok(request)
    }

    fn outputs(&self) -> [Option<&Tensor<'a>>; 5] {
        let [accepted, path, next_token] = [&self.accepted, &self.path, &self.next_token].map(Some);
        [accepted, path, next_token, self.committed.as_ref(), self.status.as_ref()]
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
    contents::check(session, &on, || count_rules(request.node_counts, request.nodes()))?;
    match on {
        On::Cpu(cpu) => {
            cpu::run(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}
