//! Selection in graphs: every method, of one query position and of several, again and again and over sequences that grow and
//! shrink.

use crate::Case;
use crate::graph::Graph;
use crate::support::selection::{Calls, Lists, Scene, Steps};
use crate::support::*;

pub const CASES: &[Case] = &[
    ("selections_of_1000_replays_are_the_same_bits", selections_of_1000_replays_are_the_same_bits),
    ("selections_follow_500_steps_of_a_graph", selections_follow_500_steps_of_a_graph),
];

/// Forms for which there are kernels of their own, and one for which there are none.
const FORMS: [(DType, usize); 3] = [(BF16, 128), (F16, 64), (F32, 40)];

fn selections_of_1000_replays_are_the_same_bits(backend: &Backend) {
    for (lists, (dtype, dim)) in Lists::ALL.into_iter().zip(FORMS) {
        rounds(1, |rng| {
            let scene = Scene::random(rng, lists, dtype, dim, 4000);
            let calls = Calls::new(&scene, backend);
            let enqueue = || {
                calls.update(None, |call| call());
                calls.select(|call| call());
            };
            // Reserves the scratch, which cannot be had while capturing.
            enqueue();
            backend.finish(0);
            let first = calls.read();
            let graph = Graph::capture(backend.stream().cast(), enqueue);
            for replay in 0..1000 {
                calls.clear();
                graph.replay();
                assert!(calls.read() == first, "{lists:?}, {dtype:?}, replay {replay}");
            }
        });
    }
}

fn selections_follow_500_steps_of_a_graph(backend: &Backend) {
    for (lists, (dtype, dim)) in Lists::ALL.into_iter().zip(FORMS) {
        rounds(1, |rng| {
            let mut steps = Steps::new(backend, rng, lists, dtype, dim);
            let graph = Graph::capture(backend.stream().cast(), || steps.enqueue());
            for _ in 0..500 {
                steps.step(rng, |_| graph.replay());
            }
        });
    }
}
