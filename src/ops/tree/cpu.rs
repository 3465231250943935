//! The form of draft trees on the CPU: a task for each tree, one pass from the root on.

use super::{Links, MOST_NODES, Request};
use crate::abi::{VWD_TREE_BROKEN_LINK, VWD_TREE_CLAMPED};
use crate::core::dtype::DType;
use crate::core::tensor::Tensor;
use crate::runtime::cpu::Cpu;

const NONE: i32 = -1;

/// The tree of one sequence.
struct Tree {
    count: usize,
    /// The parent of each node; NONE for the root and for nodes that no sound link reaches.
    parents: [i32; MOST_NODES],
    /// NONE for ignored nodes.
    depths: [i32; MOST_NODES],
    status: u32,
}

pub fn run(cpu: &Cpu, r: &Request) {
    let bytes = r.nodes() * (8 + r.nodes().div_ceil(8));
    // SAFETY: shapes were checked; each tree's outputs belong to one task.
    cpu.parallel(r.batch(), bytes, |i| unsafe { write(r, i, &Tree::read(r, i)) });
}

impl Tree {
    /// # Safety
    /// There is a sequence `i`, and the op's caller keeps the tensors valid.
    unsafe fn read(r: &Request, i: usize) -> Tree {
        let n = r.nodes();
        // SAFETY: node_counts has an entry for each sequence.
        let given = r.node_counts.map_or(n as i32, |counts| unsafe { counts.get::<i32, 1>([i]) });
        let count = (given.max(0) as usize).min(n);
        let status = if given > n as i32 { VWD_TREE_CLAMPED } else { 0 };
        let mut tree = Tree { count, parents: [NONE; MOST_NODES], depths: [NONE; MOST_NODES], status };
        match r.links {
            // SAFETY: i is a sequence; parents are int32.
            Links::Parents(parents) => unsafe { tree.link_to_parents(&parents, i) },
            // SAFETY: i is a sequence; both are of the first one's dtype.
            Links::Children { first, next } => unsafe { tree.link_to_children([&first, &next], i) },
        }
        for c in 0..count {
            tree.depths[c] = match tree.parents[c] {
                _ if c == 0 => 0,
                NONE => NONE,
                parent if tree.depths[parent as usize] == NONE => NONE,
                parent => tree.depths[parent as usize] + 1,
            };
        }
        if tree.parents[1.min(count)..count].contains(&NONE) {
            tree.status |= VWD_TREE_BROKEN_LINK;
        }
        tree
    }

    /// # Safety
    /// As for [`Tree::read`].
    unsafe fn link_to_parents(&mut self, parents: &Tensor, i: usize) {
        for c in 1..self.count {
            // SAFETY: c is a node.
            let parent = unsafe { parents.get::<i32, 2>([i, c]) };
            if (0..c as i32).contains(&parent) {
                self.parents[c] = parent;
            }
        }
    }

    /// # Safety
    /// As for [`Tree::read`]; both tensors have the same type of integers.
    unsafe fn link_to_children(&mut self, [first, next]: [&Tensor; 2], i: usize) {
        let link = |t: &Tensor, v: usize| match t.dtype {
            // SAFETY: v is a node.
            DType::I32 => unsafe { t.get::<i32, 2>([i, v]) as i64 },
            // SAFETY: as above.
            _ => unsafe { t.get::<i64, 2>([i, v]) },
        };
        for v in 0..self.count {
            let (mut before, mut c) = (v, link(first, v));
            while (before as i64 + 1..self.count as i64).contains(&c) {
                let child = c as usize;
                if self.parents[child] == NONE {
                    self.parents[child] = v as i32;
                } else {
                    self.status |= VWD_TREE_BROKEN_LINK;
                }
                (before, c) = (child, link(next, child));
            }
            if c >= 0 {
                self.status |= VWD_TREE_BROKEN_LINK;
            }
        }
    }

    fn is_ignored(&self, c: usize) -> bool {
        self.depths[c] == NONE
    }
}

/// # Safety
/// There is a sequence `i`, the op's caller keeps the tensors valid, and no other task handles this sequence.
unsafe fn write(r: &Request, i: usize, tree: &Tree) {
    // SAFETY: c is a node, a word one of ⌈N/32⌉.
    unsafe {
        let base = r.bases.map(|bases| match bases.dtype {
            DType::I32 => bases.get::<i32, 1>([i]) as i64,
            _ => bases.get::<i64, 1>([i]),
        });
        let mut children = [0i32; MOST_NODES];
        for c in 0..r.nodes() {
            let parent = if tree.is_ignored(c) { NONE } else { tree.parents[c] };
            if let Some(parents) = r.tree_parents {
                parents.set([i, c], parent);
            }
            if let Some(depths) = r.depths {
                depths.set([i, c], tree.depths[c]);
            }
            if let (Some(positions), Some(base)) = (r.positions, base) {
                let position = base.wrapping_add(tree.depths[c].max(0) as i64);
                match positions.dtype {
                    DType::I32 => positions.set([i, c], position as i32),
                    _ => positions.set([i, c], position),
                }
            }
            let elder = usize::try_from(parent).ok().map(|parent| {
                children[parent] += 1;
                children[parent] - 1
            });
            if let Some(ranks) = r.ranks {
                ranks.set([i, c], if tree.is_ignored(c) { NONE } else { elder.unwrap_or(0) });
            }
            if let Some(mask) = r.mask {
                let words = mask.row::<u32, 2>([i, c]);
                (0..mask.dim(2)).for_each(|word| words.set(word, 0));
                let mut node = Some(c);
                while let Some(ancestor) = node {
                    words.set(ancestor / 32, words.get(ancestor / 32) | 1 << (ancestor % 32));
                    let is_inside = !tree.is_ignored(c);
                    node = usize::try_from(tree.parents[ancestor]).ok().filter(|_| is_inside);
                }
            }
        }
        if let Some(status) = r.status {
            status.set([i], tree.status);
        }
    }
}
