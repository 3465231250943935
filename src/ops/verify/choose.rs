//! Which kernel verifies, from the length of rows, the form of the tensors and what ends a request.

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
        /// A warp for each row, of any length and strides, also of drafts that lie one after the other.
        Rows = "rows",
    }
}

/// What the choice depends on.
#[derive(Clone, Copy)]
pub struct Shape {
    /// γ, the most draft tokens of a row.
    pub gamma: usize,
    /// The form of the tensors is the common one (see kernels/common/types.cuh).
    pub is_common: bool,
    /// Drafts lie one after the other.
    pub is_flat: bool,
    /// Stop tokens or lengths are given, or results that tell of them.
    pub has_end: bool,
}

pub fn fit(variant: Variant, s: Shape) -> Fit {
    const TOO_LONG: &str = "rows have more than 128 draft tokens";
    const FLAT: &str = "drafts lie one after the other";
    const ENDS: &str = "it knows no stop tokens and lengths";
    match variant {
        Variant::Common => Fit::Takes
            .unless(!s.is_common, "tokens are not adjacent, or a stride exceeds 32 bits")
            .unless(s.gamma > TILE_TOKENS, TOO_LONG)
            .unless(s.is_flat, FLAT),
        Variant::General => {
            Fit::Takes.unless(s.gamma > TILE_TOKENS, TOO_LONG).unless(s.is_flat, FLAT).unless(s.has_end, ENDS)
        }
        Variant::Long => if s.gamma <= TILE_TOKENS { Fit::Slower } else { Fit::Takes }
            .unless(s.is_flat, FLAT)
            .unless(s.has_end, ENDS),
        Variant::Rows if s.is_flat || s.has_end => Fit::Takes,
        Variant::Rows => Fit::Slower,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    fn chosen(shape: Shape) -> Variant {
        choose(None, |variant| fit(variant, shape)).unwrap()
    }

    #[test]
    fn rows_of_up_to_128_tokens_are_tiles_and_longer_ones_a_cta_each() {
        let chosen = |gamma, is_common| chosen(Shape { gamma, is_common, is_flat: false, has_end: false });
        assert_eq!([1, 128].map(|gamma| chosen(gamma, true)), [Variant::Common; 2]);
        assert_eq!([1, 128].map(|gamma| chosen(gamma, false)), [Variant::General; 2]);
        assert_eq!([true, false].map(|is_common| chosen(129, is_common)), [Variant::Long; 2]);
    }

    #[test]
    fn only_rows_take_every_form_of_drafts_and_ends() {
        let of = |gamma, is_common, is_flat, has_end| chosen(Shape { gamma, is_common, is_flat, has_end });
        assert_eq!([1, 128].map(|gamma| of(gamma, true, false, true)), [Variant::Common; 2]);
        assert_eq!([of(129, true, false, true), of(8, false, false, true)], [Variant::Rows; 2]);
        assert_eq!([true, false].map(|has_end| of(8, true, true, has_end)), [Variant::Rows; 2]);
    }

    #[test]
    fn docs_name_the_variants() {
        variants::check_docs("verify-pack", VariantList::of::<Variant>());
    }
}
