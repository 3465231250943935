//! Verification of draft trees on the CPU: one pass over the nodes, for a node's children come after it.

use super::{End, Request, Target};
use crate::abi::{VWD_TREE_BROKEN_LINK, VWD_TREE_CLAMPED, VWD_TREE_NO_TOKEN};
use crate::core::dtype::{DType, Float, Token};
use crate::core::tensor::Tensor;
use crate::runtime::cpu::Cpu;
use crate::with_float;

pub fn run(cpu: &Cpu, request: &Request) {
    match request.tokens.dtype {
        DType::I32 => sequences::<i32>(cpu, request),
        _ => sequences::<i64>(cpu, request),
    }
}

fn sequences<T: Token + TryFrom<i64> + Into<i64>>(cpu: &Cpu, r: &Request) {
    let vocabulary = match r.target {
        Target::Tokens(_) => 1,
        Target::Logits(logits) => logits.dim(2) * logits.dtype.bytes(),
    };
    let bytes = r.nodes() * (4 + size_of::<T>()) + r.places() * vocabulary;
    // SAFETY: shapes were checked; each sequence's outputs belong to one task.
    cpu.parallel(r.batch(), bytes, |i| unsafe { sequence::<T>(r, i) });
}

/// # Safety
/// There is a sequence `i`, the tensors are valid, tokens are of type `T`, and no other task handles this sequence.
unsafe fn sequence<T: Token + TryFrom<i64> + Into<i64>>(r: &Request, i: usize) {
    let n = r.nodes();
    // SAFETY: every index is inside the checked shapes: nodes are below N, places below M.
    unsafe {
        let given = r.node_counts.map_or(n as i32, |counts| counts.get::<i32, 1>([i]));
        let count = (given.max(0) as usize).min(n);
        let (tokens, parents) = (r.tokens.row::<T, 1>([i]), r.parents.row::<i32, 1>([i]));
        let path = r.path.row::<i32, 1>([i]);
        let committed = r.committed.map(|committed| committed.row::<T, 1>([i]));
        let mut status = if given > n as i32 { VWD_TREE_CLAMPED } else { 0 };
        let (mut node, mut accepted, mut next) = (0, 0, T::NONE);
        let visit = |place: usize, node: usize| {
            let token = target::<T>(&r.target, i, node);
            path.set(place, node as i32);
            if let Some(committed) = committed {
                committed.set(place, token);
            }
            token
        };
        if count > 0 {
            next = visit(0, 0);
        }
        for c in 1..count {
            let parent = parents.get(c);
            if !(0..c as i32).contains(&parent) {
                status |= VWD_TREE_BROKEN_LINK;
            } else if parent as usize == node && accepted + 1 < r.places() {
                let token = tokens.get(c);
                if token == next && !token.is_negative() {
                    (node, accepted) = (c, accepted + 1);
                    next = visit(accepted, c);
                }
            }
        }
        if count > 0 && next == T::NONE && matches!(r.target, Target::Logits(_)) {
            status |= VWD_TREE_NO_TOKEN;
        }
        let written = if count > 0 { accepted + 1 } else { 0 };
        for place in written..r.places() {
            path.set(place, -1);
            if let Some(committed) = committed {
                committed.set(place, T::NONE);
            }
        }
        r.accepted.set([i], accepted as i32);
        r.next_token.set([i], next);
        if let Some(word) = r.status {
            word.set([i], status);
        }
        if let Some(end) = &r.end {
            end_walk::<T>(r, end, i);
        }
    }
}

/// Cuts what a walk commits, once it is written. t_j is the token of the node after path[j], and the last t the next token.
///
/// # Safety
/// As for [`sequence`], which has written its results.
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

/// The target's token after a node.
///
/// # Safety
/// The tensors are valid and have this node of sequence `i`.
unsafe fn target<T: Token + TryFrom<i64>>(target: &Target, i: usize, node: usize) -> T {
    match target {
        // SAFETY: says the caller; target tokens have the type of tokens.
        Target::Tokens(tokens) => unsafe { tokens.get([i, node]) },
        Target::Logits(logits) => {
            // SAFETY: as above.
            let best = with_float!(logits.dtype, L => unsafe { largest::<L>(logits, i, node) });
            best.and_then(|token| T::try_from(token as i64).ok()).unwrap_or(T::NONE)
        }
    }
}

/// The largest logit of a node, of equal ones the lowest; none where no logit is a number above −∞.
///
/// # Safety
/// As for [`target`]; logits are of type `L`.
unsafe fn largest<L: Float>(logits: &Tensor, i: usize, node: usize) -> Option<usize> {
    let row = logits.row::<L, 2>([i, node]);
    let (mut best, mut at) = (f32::NEG_INFINITY, None);
    for token in 0..logits.dim(2) {
        // SAFETY: below V.
        let logit = unsafe { row.get(token) }.to_f32();
        // NaN is not larger than anything.
        if logit > best {
            (best, at) = (logit, Some(token));
        }
    }
    at
}
