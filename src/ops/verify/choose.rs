//! Which kernel verifies, from the length of rows and the form of the tensors.

use crate::runtime::cuda::variants::{Fit, variants};

/// Tokens that a warp takes at once: rows of up to so many are one tile.
pub const TILE_TOKENS: usize = 128;

variants! {
    /// Kernels that verify.
    pub enum Variant: "verify" {
        /// A warp for a tile of whole rows, whose tokens are adjacent and whose strides fit in 32 bits.
        Common = "common",
        /// A warp for a tile of whole rows, of any strides.
        General = "general",
        /// A CTA for each row, of any length and strides.
        Long = "long",
    }
}

/// `gamma` is γ, the most draft tokens of a row. `is_common`: the form of the tensors is the common one (see
/// kernels/common/types.cuh).
pub fn fit(variant: Variant, gamma: usize, is_common: bool) -> Fit {
    const TOO_LONG: &str = "rows have more than 128 draft tokens";
    match variant {
        Variant::Common => Fit::Takes
            .unless(!is_common, "tokens are not adjacent, or a stride exceeds 32 bits")
            .unless(gamma > TILE_TOKENS, TOO_LONG),
        Variant::General => Fit::Takes.unless(gamma > TILE_TOKENS, TOO_LONG),
        Variant::Long if gamma <= TILE_TOKENS => Fit::Slower,
        Variant::Long => Fit::Takes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    #[test]
    fn rows_of_up_to_128_tokens_are_tiles_and_longer_ones_a_cta_each() {
        let chosen = |gamma, is_common| choose(None, |variant| fit(variant, gamma, is_common)).unwrap();
        assert_eq!([1, 128].map(|gamma| chosen(gamma, true)), [Variant::Common; 2]);
        assert_eq!([1, 128].map(|gamma| chosen(gamma, false)), [Variant::General; 2]);
        assert_eq!([true, false].map(|is_common| chosen(129, is_common)), [Variant::Long; 2]);
    }

    #[test]
    fn docs_name_the_variants() {
        variants::check_docs("verify-pack", VariantList::of::<Variant>());
    }
}
