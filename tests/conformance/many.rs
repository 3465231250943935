//! Sampling and walks of any number of requests, among them more than one launch of CUDA takes: it has counters of requests and of their rows.

use crate::Case;
use crate::sample::{self, is_emulated};
use crate::support::*;
use crate::tree_sample;
use vanward::abi::*;

pub const CASES: &[Case] = cases![sample_handles_every_batch_size, tree_sample_handles_every_batch_size];

/// Counters of a launch.
const COUNTERS: usize = 1 << 16;

/// Of so many requests with so many rows each: those that the CPU takes in a second, those that an emulated device does, or all.
fn sizes(backend: &Backend, few: &[(usize, usize)], two_launches: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let more = match (backend.is_cuda(), is_emulated(backend)) {
        (false, _) => &[],
        (true, true) => &two_launches[..1],
        (true, false) => two_launches,
    };
    [few, more].concat()
}

/// On the CPU what the formulas say, and on CUDA to the bit what the CPU says. A request without drafts has a row, one with a draft two.
fn sample_handles_every_batch_size(backend: &Backend) {
    let cpu = Backend::cpu(2);
    let two_launches = [(COUNTERS / 2 + 1, 0), (COUNTERS / 2, 0), (COUNTERS / 3 + 7, 1)];
    rounds(1, |rng| {
        for (batch, gamma) in sizes(backend, &[(1, 0), (33, 2), (1024, 0), (1025, 1)], &two_launches) {
            let scene = sample::random(rng, batch, gamma, 8);
            if backend.is_cuda() {
                scene.run(backend, None).assert_same(scene.run(&cpu, None));
            } else {
                let sure = scene.check(backend, None);
                assert!(sure * 10 >= batch * 8, "the formulas are sure of {sure} of {batch} requests");
            }
        }
    });
}

/// The same of trees of three nodes, each with a row and at most another of drafts.
fn tree_sample_handles_every_batch_size(backend: &Backend) {
    let cpu = Backend::cpu(2);
    let two_launches = [(COUNTERS / 7 + 1, 3), (COUNTERS / 4 + 1, 3), (COUNTERS / 2, 3)];
    rounds(1, |rng| {
        for (batch, nodes) in sizes(backend, &[(1, 3), (31, 3), (257, 3)], &two_launches) {
            let mut scene = tree_sample::random(rng, batch, nodes, 8);
            if batch > 1000 {
                scene.rule = rng.pick(&[VWD_WALK_INDEPENDENT, VWD_WALK_DISTINCT]);
                scene.draft_rows = Some(scene.draft_rows.unwrap_or_else(|| scene.target.clone()));
                // A filter has CUDA sum the rows of all nodes before the walk.
                scene.settings[0].top_k = 3;
                scene.draft(rng);
            }
            if backend.is_cuda() {
                assert_eq!(scene.run(backend, None), scene.run(&cpu, None), "{batch} trees by rule {}", scene.rule);
            } else {
                let sure = scene.check(backend, None);
                assert!(sure * 2 >= batch || batch == 1, "the formulas are sure of {sure} of {batch} requests");
            }
        }
    });
}
