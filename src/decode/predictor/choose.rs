//! Which kernel predicts, from the number of blocks alone.

use crate::runtime::cuda::layout::kernel_constants;
use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Kernels that predict for one sequence and KV head.
    pub enum Variant: "predictor" {
        /// One CTA, which keeps all blocks of the state in registers.
        OneCta = "one_cta",
        /// A cluster of up to eight CTAs, which reads the blocks that its registers do not hold once more for each pass.
        Cluster = "cluster",
    }
}

kernel_constants! {
    /// Threads of a CTA that predicts.
    pub const PREDICT_THREADS: u32 = 512;
    /// Blocks that one CTA keeps in registers.
    const ONE_CTA_BLOCKS: usize = 8192 => "CtaTopK<PREDICT_THREADS>::MOST";
}

/// `blocks` is the capacity of the state: max_blocks.
pub fn fit(variant: Variant, blocks: usize) -> Fit {
    match variant {
        Variant::OneCta => Fit::Takes.unless(blocks > ONE_CTA_BLOCKS, "the state has more than 8192 blocks"),
        Variant::Cluster if blocks <= ONE_CTA_BLOCKS => Fit::Slower,
        Variant::Cluster => Fit::Takes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    #[test]
    fn one_cta_predicts_as_long_as_its_registers_hold_all_blocks() {
        let chosen = |blocks| choose(None, |variant| fit(variant, blocks)).unwrap();
        assert_eq!(
            [1, 8192, 8193, 1 << 20].map(chosen),
            [Variant::OneCta, Variant::OneCta, Variant::Cluster, Variant::Cluster]
        );
    }

    #[test]
    fn docs_name_the_variants() {
        variants::check_docs("predictor", VariantList::of::<Variant>());
    }
}
