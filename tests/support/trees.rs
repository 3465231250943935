//! Random draft trees, and what their form says.

use super::array::Array;
use super::backend::Backend;
use super::rng::Rng;
use super::tensor::{Layout, Tensor, U32};

/// Parents of a tree of `n` nodes: bushy, slender or a chain.
pub fn random_parents(rng: &mut Rng, n: usize) -> Vec<i64> {
    let reach = rng.pick(&[1, 2, 5, n.max(1)]);
    (0..n).map(|c| if c == 0 { -1 } else { rng.size(c.saturating_sub(reach)..=c - 1) as i64 }).collect()
}

/// Breaks some links: parents that are no lower node.
pub fn break_some(rng: &mut Rng, parents: &mut [i64]) {
    let n = parents.len() as i64;
    for (c, parent) in parents.iter_mut().enumerate() {
        if rng.one_in(6) {
            *parent = rng.pick(&[-1, -7, c as i64, c as i64 + 1, n, i32::MAX as i64, i32::MIN as i64]);
        }
    }
}

/// The nodes from the root to each node, both included; none for a node that the root does not reach.
pub fn ancestries(parents: &[i64]) -> Vec<Option<Vec<usize>>> {
    let mut found: Vec<Option<Vec<usize>>> = vec![];
    for (c, &parent) in parents.iter().enumerate() {
        let above = match parent {
            _ if c == 0 => Some(vec![]),
            parent if (0..c as i64).contains(&parent) => found[parent as usize].clone(),
            _ => None,
        };
        found.push(above.map(|path| [path, vec![c]].concat()));
    }
    found
}

/// Whether a node other than the root has no link that it may have.
pub fn is_broken(parents: &[i64]) -> bool {
    parents.iter().enumerate().skip(1).any(|(c, parent)| !(0..c as i64).contains(parent))
}

/// First children and next siblings of a tree whose links are all sound.
pub fn children_and_siblings(parents: &[i64]) -> (Vec<i64>, Vec<i64>) {
    let n = parents.len();
    let next_of = |parent: i64, after: usize| (after + 1..n).find(|&c| parents[c] == parent).map_or(-1, |c| c as i64);
    let first = (0..n).map(|v| next_of(v as i64, v)).collect();
    (first, (0..n).map(|c| if c == 0 { -1 } else { next_of(parents[c], c) }).collect())
}

/// Parents that chains of children say: of several nodes that link a node the lowest; and whether a link was broken.
pub fn parents_of_chains(first: &[i64], next: &[i64]) -> (Vec<i64>, bool) {
    let n = first.len();
    let (mut parents, mut broken) = (vec![-1; n], false);
    for (v, &child) in first.iter().enumerate() {
        let (mut before, mut c) = (v as i64, child);
        while c > before && c < n as i64 {
            broken |= parents[c as usize] >= 0;
            parents[c as usize] = if parents[c as usize] < 0 { v as i64 } else { parents[c as usize] };
            (before, c) = (c, next[c as usize]);
        }
        broken |= c >= 0;
    }
    (parents, broken)
}

/// What the rows of each sequence see of each other: [B][Q] nodes up to the row, itself among them.
#[derive(Clone)]
pub struct Masks(Vec<Vec<Vec<usize>>>);

impl Masks {
    /// The masks of random trees of `rows` nodes.
    pub fn random(rng: &mut Rng, batch: usize, rows: usize) -> Masks {
        let of_tree = |rng: &mut Rng| {
            let paths = ancestries(&random_parents(rng, rows));
            paths.into_iter().map(|path| path.expect("a sound tree")).collect()
        };
        Masks((0..batch).map(|_| of_tree(rng)).collect())
    }

    /// The masks of chains, which rows without a mask are.
    pub fn chains(batch: usize, rows: usize) -> Masks {
        Masks(vec![(0..rows).map(|r| (0..=r).collect()).collect(); batch])
    }

    /// What a row sees of the others: the nodes from the root to it.
    pub fn path(&self, i: usize, r: usize) -> &[usize] {
        &self.0[i][r]
    }

    /// Whether row `r` of `rows` sees token `t` of a sequence of `len`, in a window unless that is 0.
    pub fn sees(&self, [i, r, t]: [usize; 3], len: usize, rows: usize, window: usize) -> bool {
        let (root, nodes) = (len as i64 - rows as i64, |r: usize| &self.0[i][r]);
        let position = |r: usize| root + nodes(r).len() as i64 - 1;
        let node = usize::try_from(t as i64 - root).ok();
        let is_there = r < rows && t < len && node.is_none_or(|node| nodes(r).contains(&node));
        is_there && (window == 0 || node.map_or(t as i64, position) > position(r) - window as i64)
    }

    /// Words [B, Q, ⌈Q/32⌉], with any bits for later rows, which do not matter.
    pub fn place<'b>(&self, backend: &'b Backend, rng: &mut Rng) -> Tensor<'b> {
        let rows = self.0.first().map_or(0, Vec::len);
        let shape = [self.0.len(), rows, rows.div_ceil(32)];
        let words = Array::from_fn(&shape, |at| {
            let is_set = |node: usize| self.0[at[0]][at[1]].contains(&node);
            (0..32).fold(0u32, |word, bit| {
                let node = at[2] * 32 + bit;
                let set = if node > at[1] { rng.one_in(2) } else { is_set(node) };
                word | (set as u32) << bit
            })
        });
        let bytes: Vec<u8> = words.data.iter().flat_map(|word| word.to_le_bytes()).collect();
        Tensor::raw(backend, U32, &shape, &bytes, &Layout::random(rng, 3))
    }
}
