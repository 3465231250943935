//! The form of a draft tree: depths, positions, order of siblings and mask bits, from parents or from first children and next
//! siblings.
//!
//! Node 0 is the root. A link from v to c is sound where 0 ≤ v < c < count: parents[c] = v; or c = first_child[v], or
//! c = next_sibling[b] of a child b < c of v. Of several sound links to a node that of the lowest v counts. A node belongs to
//! the tree where sound links lead from the root to it: depth(c) = depth(parent(c)) + 1. The others are ignored.

mod cpu;
mod cuda;

pub(super) use cuda::Kernels;

use super::contents::{self, Rule};
use crate::abi::{vwd_stream, vwd_tensor, vwd_tree_prepare_args};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::runtime::{On, Session, require_no_flags};

/// The most nodes of a tree.
pub const MOST_NODES: usize = 1024;

/// How links are given.
#[derive(Clone, Copy)]
pub enum Links<'a> {
    /// [B, N]
    Parents(Tensor<'a>),
    /// Both [B, N].
    Children { first: Tensor<'a>, next: Tensor<'a> },
}

/// Checked arguments; shapes as in `vwd_tree_prepare`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub links: Links<'a>,
    /// [B]
    pub node_counts: Option<Tensor<'a>>,
    /// [B]
    pub bases: Option<Tensor<'a>>,
    /// [B, N]
    pub tree_parents: Option<Tensor<'a>>,
    /// [B, N]
    pub depths: Option<Tensor<'a>>,
    /// [B, N]
    pub positions: Option<Tensor<'a>>,
    /// [B, N]
    pub ranks: Option<Tensor<'a>>,
    /// [B, N, ⌈N/32⌉]
    pub mask: Option<Tensor<'a>>,
    /// [B]
    pub status: Option<Tensor<'a>>,
}

/// Checks a tensor [B, N] of a tree's nodes.
pub fn nodes<'a>(checks: &Checks, name: &'static str, t: &'a vwd_tensor, dtypes: &[DType]) -> Result<Tensor<'a>> {
    let nodes = checks.input(name, t, dtypes, &[("B", ANY), ("N", ANY)])?;
    match nodes.dim(1) {
        1..=MOST_NODES => Ok(nodes),
        n => Err(Error::argument(name, format!("{n} nodes a tree"), format!("1 to {MOST_NODES}"))),
    }
}

impl<'a> Links<'a> {
    fn from_c(checks: &Checks, c: &'a vwd_tree_prepare_args) -> Result<Links<'a>> {
        if given(&c.first_child).is_none() && given(&c.next_sibling).is_none() {
            if given(&c.parents).is_none() && c.parents.ndim == 0 {
                let found = "absent, and so are first_child and next_sibling";
                return Err(Error::argument("parents", found, "parents, or both of the others"));
            }
            return Ok(Links::Parents(nodes(checks, "parents", &c.parents, &[DType::I32])?));
        }
        if given(&c.parents).is_some() {
            let expected = "none beside first_child and next_sibling, which say the same";
            return Err(Error::argument("parents", "given", expected));
        }
        let first = nodes(checks, "first_child", &c.first_child, DType::TOKENS)?;
        let shape = [("B", first.dim(0)), ("N", first.dim(1))];
        checks.same_dtype("next_sibling", &c.next_sibling, &first)?;
        Ok(Links::Children { first, next: checks.input("next_sibling", &c.next_sibling, &[first.dtype], &shape)? })
    }

    /// The one or two tensors.
    fn tensors(&self) -> [Option<&Tensor<'a>>; 2] {
        match self {
            Links::Parents(parents) => [Some(parents), None],
            Links::Children { first, next } => [Some(first), Some(next)],
        }
    }

    /// A tensor [B, N].
    fn first(&self) -> &Tensor<'a> {
        match self {
            Links::Parents(t) | Links::Children { first: t, .. } => t,
        }
    }
}

impl<'a> Request<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_tree_prepare_args) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        let links = Links::from_c(&checks, c)?;
        let (batch, n) = (links.first().dim(0), links.first().dim(1));
        let (column, row) = ([("B", batch)], [("B", batch), ("N", n)]);
        let node_counts = checks.optional_input("node_counts", &c.node_counts, &[DType::I32], &column)?;
        let bases = checks.optional_input("bases", &c.bases, DType::TOKENS, &column)?;
        let number = &[DType::I32];
        let tree_parents = checks.optional_output("tree_parents", &c.tree_parents, number, &row)?;
        let depths = checks.optional_output("depths", &c.depths, number, &row)?;
        if bases.is_some() != given(&c.positions).is_some() {
            let (name, other) = if bases.is_some() { ("positions", "bases") } else { ("bases", "positions") };
            return Err(Error::argument(name, format!("absent beside {other}"), "both or neither"));
        }
        let position = bases.map_or(DType::I32, |bases| bases.dtype);
        if let Some(bases) = &bases {
            checks.same_dtype("positions", &c.positions, bases)?;
        }
        let positions = checks.optional_output("positions", &c.positions, &[position], &row)?;
        let ranks = checks.optional_output("ranks", &c.ranks, number, &row)?;
        let words = [("B", batch), ("N", n), ("⌈N/32⌉", n.div_ceil(32))];
        let mask = checks.optional_output("mask", &c.mask, &[DType::U32], &words)?;
        let status = checks.optional_output("status", &c.status, &[DType::U32], &column)?;
        let request = Request { links, node_counts, bases, tree_parents, depths, positions, ranks, mask, status };
        if request.outputs().iter().all(Option::is_none) {
            let expected = "one of tree_parents, depths, positions, ranks, mask and status at least";
            return Err(Error::argument("args", "no output", expected));
        }
        let [first, second] = request.links.tensors();
        let inputs = [first, second, request.node_counts.as_ref(), request.bases.as_ref()];
        overlap::reject(&request.outputs(), &inputs)?;
        Ok(request)
    }

    fn outputs(&self) -> [Option<&Tensor<'a>>; 6] {
        let [parents, depths, positions] = [&self.tree_parents, &self.depths, &self.positions];
        [parents, depths, positions, &self.ranks, &self.mask, &self.status].map(Option::as_ref)
    }

    pub fn batch(&self) -> usize {
        self.links.first().dim(0)
    }

    /// N.
    pub fn nodes(&self) -> usize {
        self.links.first().dim(1)
    }
}

/// What a session that checks contents reads of counts of nodes.
pub fn count_rules<'a>(node_counts: Option<Tensor<'a>>, nodes: usize) -> Vec<Rule<'a>> {
    node_counts.map(|counts| Rule::up_to(counts, nodes)).into_iter().collect()
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
