//! Whether `vwd_verify_pack` is one launch or two.

use super::MAX_SUMMED_BATCH;
use crate::ops::verify::TILE_TOKENS;
use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Ways to verify and pack.
    pub enum Variant: "verify_pack" {
        /// One launch, in which every cluster of CTAs (every CTA where there are no clusters) looks at all tokens.
        Fused = "fused",
        /// `vwd_verify` and `vwd_pack`, one after the other.
        TwoLaunches = "two_launches",
    }
}

/// What the choice depends on.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub batch: usize,
    pub gamma: usize,
    pub token_tiles: u32,
    /// Bytes of the largest row of a sequence and tensor.
    pub row_bytes: usize,
    pub has_clusters: bool,
    /// All tensors fit in one launch, and have the common form.
    pub is_one_launch: bool,
}

pub fn fit(variant: Variant, s: Sizes) -> Fit {
    // As measured on an H200 (benches/results).
    let most_tiles = if s.has_clusters { 256 } else { 32 };
    match variant {
        Variant::TwoLaunches => Fit::Takes,
        Variant::Fused => if s.token_tiles <= most_tiles && s.row_bytes <= 16 << 20 { Fit::Takes } else { Fit::Slower }
            .unless(s.batch > MAX_SUMMED_BATCH, "there are more than 1024 sequences")
            .unless(s.gamma > TILE_TOKENS, "rows have more than 128 draft tokens")
            .unless(!s.is_one_launch, "the tensors take several launches, or have not the common form"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    #[test]
    fn small_calls_are_one_launch() {
        let small =
            Sizes { batch: 64, gamma: 8, token_tiles: 16, row_bytes: 1 << 20, has_clusters: true, is_one_launch: true };
        let chosen = |sizes| choose(None, |variant| fit(variant, sizes)).unwrap();
        assert_eq!(chosen(small), Variant::Fused);
        assert_eq!(chosen(Sizes { token_tiles: 256, ..small }), Variant::Fused);
        for sizes in [
            Sizes { token_tiles: 257, ..small },
            Sizes { token_tiles: 33, has_clusters: false, ..small },
            Sizes { row_bytes: (16 << 20) + 1, ..small },
            Sizes { batch: 1025, ..small },
            Sizes { gamma: 129, ..small },
            Sizes { is_one_launch: false, ..small },
        ] {
            assert_eq!(chosen(sizes), Variant::TwoLaunches);
        }
    }

    #[test]
    fn docs_name_the_variants() {
        variants::check_docs("verify-pack", VariantList::of::<Variant>());
    }
}
