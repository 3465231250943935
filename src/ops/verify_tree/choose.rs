//! Which kernel walks a tree greedily, from the number of nodes and from where the target's tokens come.

use crate::runtime::cuda::layout::kernel_constants;
use crate::runtime::cuda::variants::{Fit, variants};

kernel_constants! {
    /// Nodes that a warp holds.
    pub const WARP_NODES: usize = 64;
}

variants! {
    /// Kernels that walk greedily.
    pub enum Variant: "verify_tree" {
        /// A warp for each tree.
        Warp = "warp",
        /// A CTA for each tree.
        Cta = "cta",
    }
}

pub fn fit(variant: Variant, nodes: usize, has_logits: bool) -> Fit {
    match variant {
        Variant::Warp => Fit::Takes
            .unless(nodes > WARP_NODES, "trees have more than 64 nodes")
            .unless(has_logits, "the target's tokens are those of the largest logits"),
        Variant::Cta => Fit::Takes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    #[test]
    fn warps_walk_trees_of_up_to_64_nodes_by_given_tokens() {
        let chosen = |nodes, has_logits| choose(None, |variant| fit(variant, nodes, has_logits)).unwrap();
        assert_eq!([1, 64].map(|nodes| chosen(nodes, false)), [Variant::Warp; 2]);
        assert_eq!([chosen(65, false), chosen(1, true)], [Variant::Cta; 2]);
    }

    #[test]
    fn docs_name_the_variants() {
        variants::check_docs("trees", VariantList::of::<Variant>());
    }
}
