//! The tiered KV cache: what lists resolve to holds the tokens that were appended, after any operations in any order.

mod edges;
mod model;
#[path = "../support/mod.rs"]
mod support;

use model::{Checked, SHAPES, assert_met};
use support::*;

/// A million operations; every byte that a list leads to is compared.
#[test]
fn cache_holds_what_was_appended_after_a_million_operations() {
    for shape in &SHAPES {
        rounds(1, |rng| {
            let backend = Backend::cpu(1);
            let mut checked = Checked::new(shape, &backend);
            for _ in 0..250_000 {
                checked.step(rng);
            }
            assert_met(&checked.finish());
        });
    }
}
