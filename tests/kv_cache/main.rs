//! The tiered KV cache: what lists resolve to holds the tokens that were appended, after any operations in any order.

mod coded;
mod edges;
mod model;
mod shares;
#[path = "../support/mod.rs"]
mod support;

use model::{Checked, SHAPES, assert_met};
use support::*;

/// A million operations, a tenth as many of each shape that is coded, where a check codes what it expects; every byte that a list leads
/// to is compared. `VANWARD_CACHE_OPERATIONS`: so many instead, where each costs more.
#[test]
fn cache_holds_what_was_appended_after_a_million_operations() {
    let given: Option<usize> = std::env::var("VANWARD_CACHE_OPERATIONS").ok().and_then(|n| n.parse().ok());
    let operations = given.unwrap_or(1_000_000) / SHAPES.iter().filter(|shape| !shape.coded).count();
    for shape in &SHAPES {
        rounds(1, |rng| {
            let backend = Backend::cpu(1);
            let mut checked = Checked::new(shape, &backend);
            for _ in 0..if shape.coded { operations / 10 } else { operations } {
                checked.step(rng);
            }
            let stats = checked.finish();
            if given.is_none() {
                assert_met(&stats);
            }
        });
    }
}
