//! Verification of draft trees on the CPU: each request walks its tree, and no row is read that is not on the path.

use super::{Choice, End, Request, Target};
use crate::abi::{VWD_SAMPLE_NAN, VWD_SAMPLE_NO_RESIDUAL, VWD_TREE_BROKEN_LINK, VWD_TREE_CLAMPED, VWD_TREE_NO_TOKEN};
use crate::core::along::Along;
use crate::core::dtype::{DType, Float, Token};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::draw::rejection::{DraftRow, Outcome, read, try_in_turn};
use crate::ops::draw::request::Sampling;
use crate::ops::draw::{Distribution, Purpose, Scale, first_largest, forbid, uniform};
use crate::runtime::cpu::Cpu;
use crate::with_float;

pub fn run(cpu: &Cpu, request: &Request) -> Result<()> {
    match request.tokens.dtype {
        DType::I32 => sequences::<i32>(cpu, request),
        _ => sequences::<i64>(cpu, request),
    }
}

fn sequences<T: Token + TryFrom<i64> + Into<i64>>(cpu: &Cpu, r: &Request) -> Result<()> {
    let (vocabulary, floats) = match &r.target {
        Target::Tokens(_) => (1, 0),
        Target::Logits(logits) => (logits.dim(2) * logits.dtype.bytes(), 0),
        // A row, and where children are tried the residual and the row that they were drawn from.
        Target::Sampled(logits, Choice::Coupled, _) => (logits.dim(2) * size_of::<f32>(), logits.dim(2)),
        Target::Sampled(logits, _, s) => (logits.dim(2) * size_of::<f32>(), 2 * logits.dim(2) + s.draft_tokens()),
    };
    let bytes = r.nodes() * (4 + size_of::<T>()) + r.places() * vocabulary;
    cpu.in_shares(&cpu.scratch(), r.batch(), floats, bytes, |i, memory| {
        // SAFETY: shapes were checked; each sequence's outputs belong to one task.
        unsafe { Walk::<T>::new(r, i).run(memory) }
    })
}

/// The walk through the tree of a sequence.
struct Walk<'r, T> {
    r: &'r Request<'r>,
    i: usize,
    tokens: Along<T>,
    parents: Along<i32>,
    /// Nodes of the tree.
    count: usize,
    status: u32,
}

/// What a node decides: the target's token, and the child that has it.
type Decision<T> = (T, Option<usize>);

impl<'r, T: Token + TryFrom<i64> + Into<i64>> Walk<'r, T> {
    /// # Safety
    /// There is a sequence `i`, the tensors are valid, tokens are of type `T`, and no other task handles this sequence; so for all that
    /// follows.
    unsafe fn new(r: &'r Request<'r>, i: usize) -> Walk<'r, T> {
        let n = r.nodes();
        // SAFETY: every index is inside the checked shapes.
        let given = r.node_counts.map_or(n as i32, |counts| unsafe { counts.get::<i32, 1>([i]) });
        let count = (given.max(0) as usize).min(n);
        let (tokens, parents) = (r.tokens.row::<T, 1>([i]), r.parents.row::<i32, 1>([i]));
        let mut status = if given > n as i32 { VWD_TREE_CLAMPED } else { 0 };
        // SAFETY: as above.
        if (1..count).any(|c| !(0..c as i32).contains(&unsafe { parents.get(c) })) {
            status |= VWD_TREE_BROKEN_LINK;
        }
        Walk { r, i, tokens, parents, count, status }
    }

    /// # Safety
    /// As for [`Walk::new`]; `memory` is what `sequences` says.
    unsafe fn run(mut self, memory: &mut [f32]) {
        let (r, i) = (self.r, self.i);
        let path = r.path.row::<i32, 1>([i]);
        let committed = r.committed.map(|committed| committed.row::<T, 1>([i]));
        let (mut written, mut next) = (0, T::NONE);
        let mut node = Some(0).filter(|_| self.count > 0);
        // SAFETY: nodes are below N, places below M.
        unsafe {
            while let Some(v) = node {
                (next, node) = self.decide(v, written, memory);
                path.set(written, v as i32);
                if let Some(committed) = committed {
                    committed.set(written, next);
                }
                written += 1;
            }
            for place in written..r.places() {
                path.set(place, -1);
                if let Some(committed) = committed {
                    committed.set(place, T::NONE);
                }
            }
            r.accepted.set([i], written.max(1) as i32 - 1);
            r.next_token.set([i], next);
            if let Some(word) = r.status {
                word.set([i], self.status);
            }
            if let Some(end) = &r.end {
                end_walk::<T>(r, end, i);
            }
        }
    }

    /// The children of a node, each with its token; none where the path has no place for them.
    fn children(&self, node: usize, depth: usize) -> impl Iterator<Item = (usize, T)> + Clone + use<T> {
        let (tokens, parents) = (self.tokens, self.parents);
        let end = if depth + 1 < self.r.places() { self.count } else { 0 };
        // SAFETY: nodes are below N.
        let is_child = move |&c: &usize| unsafe { parents.get(c) } as i64 == node as i64;
        // SAFETY: as above.
        (node + 1..end).filter(is_child).map(move |c| (c, unsafe { tokens.get(c) }))
    }

    /// # Safety
    /// As for [`Walk::new`].
    unsafe fn decide(&mut self, node: usize, depth: usize, memory: &mut [f32]) -> Decision<T> {
        // SAFETY: forwarded to the caller; target tokens have the type of tokens.
        let token = unsafe {
            match &self.r.target {
                Target::Tokens(tokens) => tokens.get([self.i, node]),
                Target::Logits(logits) => {
                    let (at, tokens) = ([self.i, node], logits.dim(2));
                    let is_allowed = |token: usize| !self.forbidden(depth).any(|stop| stop == token as i64);
                    let (best, all_numbers) =
                        with_float!(logits.dtype, L => largest(logits.row::<L, 2>(at), tokens, is_allowed));
                    self.status |= if all_numbers { 0 } else { VWD_SAMPLE_NAN };
                    self.token_or_none(best)
                }
                Target::Sampled(logits, choice, s) => return self.sample(logits, *choice, s, [node, depth], memory),
            }
        };
        (token, self.child_with(node, depth, token))
    }

    /// The stop tokens that a node of this depth cannot give.
    ///
    /// # Safety
    /// As for [`Walk::new`].
    unsafe fn forbidden(&self, depth: usize) -> impl Iterator<Item = i64> {
        let end = self.r.end.as_ref();
        // SAFETY: forwarded to the caller.
        end.map(|end| unsafe { end.forbidden(self.i, depth) }).into_iter().flatten()
    }

    /// The token that a row gives, if any.
    fn token_or_none(&mut self, token: Option<usize>) -> T {
        self.status |= if token.is_none() { VWD_TREE_NO_TOKEN } else { 0 };
        token.and_then(|token| T::try_from(token as i64).ok()).unwrap_or(T::NONE)
    }

    /// The lowest child of a node with the target's token.
    fn child_with(&self, node: usize, depth: usize, token: T) -> Option<usize> {
        let found = self.children(node, depth).find(|&(_, other)| other == token && !token.is_negative());
        found.map(|(c, _)| c)
    }

    /// # Safety
    /// As for [`Walk::new`].
    unsafe fn sample(
        &mut self,
        logits: &Tensor,
        choice: Choice,
        s: &Sampling,
        [node, depth]: [usize; 2],
        memory: &mut [f32],
    ) -> Decision<T> {
        let (row, rest) = memory.split_at_mut(logits.dim(2));
        // SAFETY: forwarded to the caller.
        let (settings, (seed, position), all_numbers) = unsafe {
            let along = |node| [self.i, node];
            let all = with_float!(logits.dtype, L => read(logits.row::<L, 2>(along(node)), s.target_form, row));
            forbid(row, s.target_form, self.forbidden(depth));
            (s.settings(self.i), s.noise(self.i), all)
        };
        self.status |= if all_numbers { 0 } else { VWD_SAMPLE_NAN };
        let likeliest = first_largest(row, s.target_form);
        if likeliest.is_none() || settings.is_greedy() {
            let token = self.token_or_none(likeliest);
            return (token, self.child_with(node, depth, token));
        }
        let scale = Scale::new(s.target_form, settings.temperature);
        settings.filter(row, scale);
        let p = Distribution::new(row, scale);
        let number = |purpose, index| uniform(seed, position.wrapping_add(depth as i64), purpose, index);
        if choice == Choice::Coupled {
            let token = self.token_or_none(Some(p.draw(number(Purpose::Draw, 0))));
            return (token, self.child_with(node, depth, token));
        }
        let (residual, draft_row) = rest.split_at_mut(logits.dim(2));
        let vocabulary = logits.dim(2);
        let tried = self.children(node, depth).enumerate().filter_map(move |(rank, (c, token))| {
            let token = usize::try_from(token.into()).ok().filter(|&token| token < vocabulary)?;
            Some((rank as u32, token, c))
        });
        let q = match tried.clone().next() {
            // SAFETY: forwarded to the caller.
            Some(_) => unsafe { DraftRow::read(s, [self.i, node], draft_row) },
            None => None,
        };
        self.status |= if q.as_ref().is_none_or(|(_, all_numbers)| *all_numbers) { 0 } else { VWD_SAMPLE_NAN };
        let in_turn = tried.clone().map(|(rank, token, _)| (rank, token));
        match try_in_turn(&p, q.map(|(q, _)| q), choice == Choice::Distinct, in_turn, number, residual) {
            Outcome::Accepted(n) => {
                let (_, token, c) = tried.clone().nth(n).expect("one of those that were tried");
                (self.token_or_none(Some(token)), Some(c))
            }
            Outcome::Drawn(token) => (self.token_or_none(Some(token)), None),
            Outcome::DrawnWithoutResidual(token) => {
                self.status |= VWD_SAMPLE_NO_RESIDUAL;
                (self.token_or_none(Some(token)), None)
            }
        }
    }
}

/// Cuts what a walk commits, once it is written. t_j is the token of the node after path[j], and the last t the next token.
///
/// # Safety
/// As for [`Walk::new`]; the walk has written its results.
unsafe fn end_walk<T: Token + Into<i64>>(r: &Request, end: &End, i: usize) {
    let (tokens, path) = (r.tokens.row::<T, 1>([i]), r.path.row::<i32, 1>([i]));
    // SAFETY: accepted is below M, and path holds nodes up to there.
    unsafe {
        let (k, next) = (r.accepted.get::<i32, 1>([i]) as usize, r.next_token.get::<T, 1>([i]));
        // A tree without nodes commits nothing; a node without a logit has no token.
        let has_next = matches!(r.target, Target::Tokens(_)) || !next.is_negative();
        let n = if path.get(0) < 0 { 0 } else { k + has_next as usize };
        let token = |j: usize| if j < k { tokens.get(path.get(j + 1) as usize) } else { next }.into();
        let (n, finish) = end.cut(i, n, token);
        let nodes = if end.remaining(i) > 0 { k.min(n) + 1 } else { 0 };
        (nodes..=k).for_each(|j| path.set(j, -1));
        if let Some(committed) = r.committed {
            (n..=k).for_each(|j| committed.set([i, j], T::NONE));
        }
        r.accepted.set([i], k.min(n) as i32);
        if n <= k {
            r.next_token.set([i], T::NONE);
        }
        end.write(i, n, finish);
    }
}

/// The largest logit of a row of so many tokens, of those that are allowed, and whether all logits are numbers; of equal ones the lowest. None
/// where no logit is a number above −∞.
///
/// # Safety
/// The row is valid and has so many elements.
unsafe fn largest<L: Float>(row: Along<L>, tokens: usize, is_allowed: impl Fn(usize) -> bool) -> (Option<usize>, bool) {
    let (mut best, mut at, mut all_numbers) = (f32::NEG_INFINITY, None, true);
    for token in 0..tokens {
        // SAFETY: the row has as many.
        let logit = unsafe { row.get(token) }.to_f32();
        all_numbers &= !logit.is_nan();
        // NaN is not larger than anything.
        if logit > best && is_allowed(token) {
            (best, at) = (logit, Some(token));
        }
    }
    (at, all_numbers)
}
