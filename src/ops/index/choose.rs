//! Which kernels summarise blocks by AXIS. Every other kind of index has one kernel for each width of a key's elements.

use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Kernels that find the mean and the axis of each block.
    pub enum Variant: "index_axis" {
        /// A block's keys stay in registers.
        Registers = "registers",
        /// Each pass reads the keys again.
        Wide = "wide",
    }
}

/// Tokens of a block, and channels of a key, that stay in registers.
const REGISTER_TOKENS: usize = 64;
const REGISTER_CHANNELS: usize = 256;

pub fn axis(variant: Variant, block_size: usize, dim: usize) -> Fit {
    match variant {
        Variant::Registers => Fit::Takes
            .unless(block_size > REGISTER_TOKENS, "blocks have more than 64 tokens")
            .unless(dim > REGISTER_CHANNELS, "D exceeds 256"),
        Variant::Wide => Fit::Takes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{VariantList, check_docs, choose};

    #[test]
    fn docs_name_the_variants() {
        check_docs("index-select", VariantList::of::<Variant>());
    }

    #[test]
    fn keys_stay_in_registers_as_long_as_they_fit() {
        let chosen = |size, dim| choose(None, |variant| axis(variant, size, dim)).unwrap();
        assert_eq!([chosen(1, 16), chosen(64, 256)], [Variant::Registers; 2]);
        assert_eq!([chosen(65, 128), chosen(64, 264)], [Variant::Wide; 2]);
    }
}
