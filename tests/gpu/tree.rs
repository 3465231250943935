//! A captured step of a draft tree, replayed with other contents.

use crate::Case;
use crate::graph::Graph;
use crate::support::trees::random_parents;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] =
    &[("verified_trees_are_compacted_by_a_graph_with_changed_contents", verified_trees_are_compacted_by_a_graph)];

const BATCH: usize = 3;
const NODES: usize = 12;
const TOKENS: usize = 3000;
const BASE: usize = 5;

/// The nodes that logits and tokens lead to.
fn walk(parents: &[i64], tokens: &[i64], best: &[i64]) -> Vec<usize> {
    let mut path = vec![0];
    while let Some(next) = (0..NODES).find(|&c| {
        let node = path[path.len() - 1];
        c > node && parents[c] == node as i64 && tokens[c] == best[node]
    }) {
        path.push(next);
    }
    path
}

fn verified_trees_are_compacted_by_a_graph(backend: &Backend) {
    rounds(1, |rng| {
        let plain = Layout::default();
        let ints = |shape: &[usize]| Tensor::ints(backend, I32, &Array::filled(shape, 0), &plain);
        let (tokens, parents) = (ints(&[BATCH, NODES]), ints(&[BATCH, NODES]));
        let logits = Tensor::floats(backend, F16, &Array::filled(&[BATCH, NODES, TOKENS], 0.0), &plain);
        let (accepted, path, next_token) = (ints(&[BATCH]), ints(&[BATCH, NODES]), ints(&[BATCH]));
        let bases = Tensor::ints(backend, I32, &Array::filled(&[BATCH], BASE as i64), &plain);
        // Without a table sequence i has page i.
        let rows = Array::from_fn(&[BATCH, BASE + NODES], |at| (at[0] * 100 + at[1]) as i64);
        let cache = Tensor::ints(backend, I32, &rows, &plain);
        let caches = [cache.c()];
        let options = vwd_compactor_options { cache_count: 1, caches: caches.as_ptr(), ..args() };
        let mut compactor = std::ptr::null_mut();
        // SAFETY: the pointers are valid.
        assert_ok(unsafe { vwd_compactor_create(backend.session(), &options, &mut compactor) });
        let verify = vwd_verify_tree_args {
            tokens: tokens.c(),
            parents: parents.c(),
            logits: logits.c(),
            accepted: accepted.c(),
            path: path.c(),
            next_token: next_token.c(),
            ..args()
        };
        let compact = vwd_compact_args { bases: bases.c(), path: path.c(), ..args() };
        // A stream cannot be given scratch while it captures.
        // SAFETY: the session lives.
        assert_ok(unsafe { vwd_session_reserve(backend.session(), backend.stream(), 0) });
        let graph = Graph::capture(backend.stream().cast(), || {
            // SAFETY: the tensors outlive the graph.
            unsafe {
                assert_ok(vwd_verify_tree(backend.session(), &verify, backend.stream()));
                assert_ok(vwd_compact(compactor, &compact, backend.stream()));
            }
        });
        for replay in 0..backend.times(200) {
            let tree = Array::new(&[BATCH, NODES], (0..BATCH).flat_map(|_| random_parents(rng, NODES)).collect());
            let best = Array::from_fn(&[BATCH, NODES], |_| rng.int(0..=TOKENS as i64 - 1));
            let drafted = Array::from_fn(&[BATCH, NODES], |at| match tree[[at[0], at[1]]] {
                parent if parent >= 0 && !rng.one_in(3) => best[[at[0], parent as usize]],
                _ => rng.int(0..=TOKENS as i64 - 1),
            });
            let mut numbers = Array::filled(&[BATCH, NODES, TOKENS], -1.0);
            for at in indices(&[BATCH, NODES]) {
                numbers[[at[0], at[1], best[[at[0], at[1]]] as usize]] = 2.0;
            }
            tokens.refill_ints(&drafted);
            parents.refill_ints(&tree);
            logits.refill_floats(&numbers);
            cache.refill_ints(&rows);
            graph.replay();
            for i in 0..BATCH {
                let walk = walk(tree.row([i]), drafted.row([i]), best.row([i]));
                let last = walk[walk.len() - 1];
                assert_eq!(accepted.read_ints()[[i]], walk.len() as i64 - 1, "accepted, replay {replay}");
                assert_eq!(next_token.read_ints()[[i]], best[[i, last]], "next_token, replay {replay}");
                let mut moved = rows.row([i]).to_vec();
                walk.iter().enumerate().for_each(|(j, &node)| moved[BASE + j] = rows[[i, BASE + node]]);
                assert_eq!(cache.read_ints().row([i]), moved, "rows, replay {replay}");
            }
        }
        // SAFETY: created above; the graph does not run again.
        unsafe { vwd_compactor_release(compactor) };
    });
}
