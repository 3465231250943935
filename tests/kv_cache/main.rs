//! The tiered KV cache: what lists resolve to holds the tokens that were appended, after any operations in any order.

mod edges;
mod model;
#[path = "../support/mod.rs"]
mod support;

use model::{Checked, Shape};
use support::*;

const SHAPES: [Shape; 4] = [
    Shape {
        layers: 2,
        heads: 2,
        block: 4,
        dims: [16, 16],
        dtype: BF16,
        scales: false,
        sequences: 6,
        blocks: 40,
        slots: 32,
    },
    Shape {
        layers: 1,
        heads: 3,
        block: 1,
        dims: [16, 24],
        dtype: F32,
        scales: false,
        sequences: 5,
        blocks: 60,
        slots: 40,
    },
    Shape {
        layers: 3,
        heads: 1,
        block: 5,
        dims: [24, 16],
        dtype: F8E4M3,
        scales: true,
        sequences: 9,
        blocks: 30,
        slots: 16,
    },
    Shape {
        layers: 1,
        heads: 1,
        block: 16,
        dims: [16, 16],
        dtype: F8E5M2,
        scales: false,
        sequences: 20,
        blocks: 64,
        slots: 8,
    },
];

/// A million operations; every byte that a list leads to is compared.
#[test]
fn cache_holds_what_was_appended_after_a_million_operations() {
    for shape in &SHAPES {
        rounds(1, |rng| {
            let mut checked = Checked::new(shape);
            for _ in 0..250_000 {
                checked.step(rng);
            }
            checked.finish();
        });
    }
}
