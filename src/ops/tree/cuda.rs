//! Launch of the kernel of kernels/tree/tree.cu.

use super::{Links, MOST_NODES, Request};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::runtime::cuda::layout::{kernel_constants, kernel_struct};
use crate::runtime::cuda::views::View;
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, Modules, Source, source};

pub struct Kernels {
    prepare: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("tree/tree", compute_80)];

    fn find(modules: &Modules) -> Result<Kernels> {
        Ok(Kernels { prepare: modules.kernel("tree/tree", "tree_prepare")? })
    }
}

kernel_struct! {
    /// Mirrors TreeParams of kernels/tree/tree.cu.
    struct Params {
        parents: View<2>,
        first_child: View<2>,
        next_sibling: View<2>,
        node_counts: View<1>,
        bases: View<1>,
        tree_parents: View<2>,
        depths: View<2>,
        positions: View<2>,
        ranks: View<2>,
        mask: View<3>,
        status: View<1>,
        nodes: u32,
        link_bytes: u32,
        base_bytes: u32,
        unused: u32,
    }
}

kernel_constants! {
    const NODES: usize = MOST_NODES => "MOST_NODES";
}

const THREADS: u32 = 128;

/// Fails where a grid cannot have a CTA for each sequence.
fn check_batch(batch: usize) -> Result<()> {
    if batch <= i32::MAX as usize {
        return Ok(());
    }
    Err(Error::unsupported(format!("{batch} sequences; CUDA takes up to 2^31 − 1")))
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if r.batch() == 0 {
        return Ok(());
    }
    check_batch(r.batch())?;
    debug_assert!(r.nodes() <= NODES);
    let kernels: &Kernels = enqueue.kernels();
    let column = |t| View::optional(t, |t| View::new(t, [0]));
    let row = |t| View::optional(t, |t| View::new(t, [0, 1]));
    let (parents, first_child, next_sibling) = match &r.links {
        Links::Parents(parents) => (View::new(parents, [0, 1]), View::ABSENT, View::ABSENT),
        Links::Children { first, next } => (View::ABSENT, View::new(first, [0, 1]), View::new(next, [0, 1])),
    };
    let bytes = |dtype: DType| dtype.bytes() as u32;
    let params = Params {
        parents,
        first_child,
        next_sibling,
        node_counts: column(&r.node_counts),
        bases: column(&r.bases),
        tree_parents: row(&r.tree_parents),
        depths: row(&r.depths),
        positions: row(&r.positions),
        ranks: row(&r.ranks),
        mask: View::optional(&r.mask, |t| View::new(t, [0, 1, 2])),
        status: column(&r.status),
        nodes: r.nodes() as u32,
        link_bytes: bytes(r.links.first().dtype),
        base_bytes: r.bases.map_or(4, |bases| bytes(bases.dtype)),
        unused: 0,
    };
    let grid = Grid { ctas: r.batch() as u32, threads: THREADS, kind: Kind::Plain };
    // SAFETY: Params is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe { enqueue.launch(&kernels.prepare, grid, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        layout::check("tree", file!(), &[Params::layout("TreeParams"), kernel_constants()]);
    }
}
