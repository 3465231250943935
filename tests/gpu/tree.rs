//! A captured step of a draft tree, replayed with other contents.

use crate::Case;
use crate::graph::{Graph, Written};
use crate::runtime::{cuda_session, reserve, session_stream};
use crate::support::trees::random_parents;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("verified_trees_are_compacted_by_a_graph_with_changed_contents", verified_trees_are_compacted_by_a_graph),
    ("sampled_trees_are_verified_by_a_graph_with_changed_seeds", sampled_trees_are_verified_by_a_graph),
    ("walks_follow_what_the_kernel_ahead_writes", walks_follow_what_the_kernel_ahead_writes),
    ("scratch_of_trees_is_what_a_capture_needs", scratch_of_trees_is_what_a_capture_needs),
];

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

/// Each replay does what the CPU does with the seeds, positions, temperatures and trees that are there then.
fn sampled_trees_are_verified_by_a_graph(backend: &Backend) {
    const TOKENS: usize = 300;
    let cpu = Backend::cpu(1);
    rounds(1, |rng| {
        for walk in [VWD_WALK_COUPLED, VWD_WALK_INDEPENDENT, VWD_WALK_DISTINCT] {
            let [here, there] = [backend, &cpu].map(|backend| Sampled::new(backend, walk, TOKENS));
            // A stream cannot be given scratch while it captures.
            // SAFETY: the session lives.
            assert_ok(unsafe { vwd_session_reserve(backend.session(), backend.stream(), 0) });
            // SAFETY: the tensors outlive the graph.
            let graph = Graph::capture(backend.stream().cast(), || assert_ok(unsafe { here.call(backend) }));
            let mut paths = std::collections::BTreeSet::new();
            for replay in 0..backend.times(400) {
                let tree = Array::new(&[BATCH, NODES], (0..BATCH).flat_map(|_| random_parents(rng, NODES)).collect());
                let tokens = Array::from_fn(&[BATCH, NODES], |_| rng.int(-1..=3));
                let seeds = Array::from_fn(&[BATCH], |_| rng.int(0..=i64::MAX));
                let positions = Array::from_fn(&[BATCH], |_| rng.int(0..=1 << 40));
                // A few tokens have most of the mass.
                let mut rows =
                    || Array::from_fn(&[BATCH, NODES, TOKENS], |at| rng.unit() + if at[2] < 4 { 5.0 } else { 0.0 });
                let (logits, draft_rows) = (rows(), rows());
                let temperature = Array::from_fn(&[BATCH], |_| rng.pick(&[0.0, 0.5, 1.0]));
                for sampled in [&here, &there] {
                    sampled.parents.refill_ints(&tree);
                    sampled.tokens.refill_ints(&tokens);
                    sampled.seeds.refill_ints(&seeds);
                    sampled.positions.refill_ints(&positions);
                    sampled.logits.refill_floats(&logits);
                    sampled.draft_rows.refill_floats(&draft_rows);
                    sampled.temperature.refill_floats(&temperature);
                }
                graph.replay();
                // SAFETY: the tensors live.
                assert_ok(unsafe { there.call(&cpu) });
                let found = here.path.read_ints();
                assert_eq!(found, there.path.read_ints(), "path, replay {replay} of walk {walk}");
                assert_eq!(here.committed.read_ints(), there.committed.read_ints(), "committed, replay {replay}");
                paths.insert(found.data);
            }
            assert!(paths.len() > 2, "replays of walk {walk} differ");
        }
    });
}

/// Trees and the target's tokens change in the kernel just ahead. The results are those of a call for which all was there. By logits and by tokens,
/// of small trees and of large ones.
fn walks_follow_what_the_kernel_ahead_writes(backend: &Backend) {
    for (n, has_logits) in [(NODES, false), (100, false), (NODES, true)] {
        rounds(1, |rng| {
            let plain = Layout::default();
            let ints = |shape: &[usize]| Tensor::ints(backend, I32, &Array::filled(shape, 0), &plain);
            let given = [ints(&[BATCH, n]), ints(&[BATCH, n]), ints(&[BATCH]), ints(&[BATCH, n])];
            let [tokens, parents, counts, target] = &given;
            let rows = Array::from_fn(&[BATCH, n, TOKENS], |at| if at[2] < 4 { rng.unit() } else { 0.0 });
            let logits = Tensor::floats(backend, F32, &rows, &plain);
            let ahead: Vec<Written> = given.iter().map(|of| Written::new(backend, of)).collect();
            let results = [(); 2].map(|_| (ints(&[BATCH]), ints(&[BATCH, n]), ints(&[BATCH])));
            let walk = |(accepted, path, next_token): &(Tensor, Tensor, Tensor), ahead: &[Written]| {
                ahead.iter().for_each(Written::enqueue);
                let args = vwd_verify_tree_args {
                    tokens: tokens.c(),
                    parents: parents.c(),
                    node_counts: counts.c(),
                    target: if has_logits { absent() } else { target.c() },
                    logits: if has_logits { logits.c() } else { absent() },
                    accepted: accepted.c(),
                    path: path.c(),
                    next_token: next_token.c(),
                    ..args()
                };
                // SAFETY: the tensors outlive the graph.
                assert_ok(unsafe { vwd_verify_tree(backend.session(), &args, backend.stream()) });
            };
            // A stream cannot be given scratch while it captures.
            // SAFETY: the session lives.
            assert_ok(unsafe { vwd_session_reserve(backend.session(), backend.stream(), 0) });
            let [replayed, called] = &results;
            let graph = Graph::capture(backend.stream().cast(), || walk(replayed, &ahead));
            for step in 0..backend.times(300) {
                let mut token = || Array::from_fn(&[BATCH, n], |_| rng.int(0..=3)).data;
                let (tokens, target) = (token(), token());
                let parents = (0..BATCH).flat_map(|_| random_parents(rng, n)).collect();
                let counts = (0..BATCH).map(|_| rng.int(0..=n as i64)).collect();
                for (written, numbers) in ahead.iter().zip([tokens, parents, counts, target]) {
                    written.set(&numbers);
                }
                graph.replay();
                walk(called, &[]);
                backend.finish(0);
                for (a, b) in [(&replayed.0, &called.0), (&replayed.1, &called.1), (&replayed.2, &called.2)] {
                    assert_eq!(a.read_ints(), b.read_ints(), "step {step} of {n} nodes");
                }
            }
        });
    }
}

/// A stream that was given what is told captures the call and gives what the CPU gives; one without it names that many bytes.
fn scratch_of_trees_is_what_a_capture_needs(backend: &Backend) {
    const TOKENS: usize = 4100;
    let (cpu, mut rng) = (Backend::cpu(1), Rng::new(7));
    let tree = Array::new(&[BATCH, NODES], (0..BATCH).flat_map(|_| random_parents(&mut rng, NODES)).collect());
    let tokens = Array::from_fn(&[BATCH, NODES], |_| rng.int(0..=3));
    // A few tokens have most of the mass.
    let mut rows = |_| Array::from_fn(&[BATCH, NODES, TOKENS], |at| rng.unit() + if at[2] < 4 { 9.0 } else { 0.0 });
    let rows = [(); 2].map(&mut rows);
    for (walk, is_drawn) in [
        (VWD_WALK_GREEDY, false),
        (VWD_WALK_COUPLED, false),
        (VWD_WALK_INDEPENDENT, false),
        (VWD_WALK_INDEPENDENT, true),
        (VWD_WALK_DISTINCT, true),
    ] {
        let [here, there] = [backend, &cpu].map(|backend| {
            let sampled = Sampled { has_draft_rows: is_drawn, ..Sampled::new(backend, walk, TOKENS) };
            sampled.parents.refill_ints(&tree);
            sampled.tokens.refill_ints(&tokens);
            sampled.logits.refill_floats(&rows[0]);
            sampled.draft_rows.refill_floats(&rows[1]);
            sampled.temperature.refill_floats(&Array::filled(&[BATCH], 1.0));
            sampled
        });
        let session = cuda_session(args());
        let (stream, mut bytes) = (session_stream(&session), 0);
        // SAFETY: the session lives.
        assert_ok(unsafe { vwd_verify_tree_scratch(session.raw(), &here.args(), &mut bytes) });
        assert!(bytes > 0, "walk {walk}");
        // SAFETY: the tensors outlive the graphs.
        let call = || unsafe { vwd_verify_tree(session.raw(), &here.args(), stream) };
        let refuse = || assert_fails(call(), VWD_ERROR_OUT_OF_SCRATCH, &[&bytes.to_string(), "vwd_session_reserve"]);
        Graph::capture(stream.cast(), refuse);
        reserve(&session, stream, bytes - 1);
        Graph::capture(stream.cast(), refuse);
        reserve(&session, stream, bytes);
        Graph::capture(stream.cast(), || assert_ok(call())).replay();
        // SAFETY: the tensors live.
        assert_ok(unsafe { there.call(&cpu) });
        assert_eq!(here.path.read_ints(), there.path.read_ints(), "path of walk {walk}");
        assert_eq!(here.committed.read_ints(), there.committed.read_ints(), "committed by walk {walk}");
    }
}

/// Arguments of a walk that samples, or of a greedy one from logits.
struct Sampled<'b> {
    walk: u32,
    has_draft_rows: bool,
    tokens: Tensor<'b>,
    parents: Tensor<'b>,
    logits: Tensor<'b>,
    draft_rows: Tensor<'b>,
    temperature: Tensor<'b>,
    seeds: Tensor<'b>,
    positions: Tensor<'b>,
    accepted: Tensor<'b>,
    path: Tensor<'b>,
    next_token: Tensor<'b>,
    committed: Tensor<'b>,
}

impl<'b> Sampled<'b> {
    fn new(backend: &'b Backend, walk: u32, tokens: usize) -> Sampled<'b> {
        let plain = Layout::default();
        let ints = |dtype, shape: &[usize]| Tensor::ints(backend, dtype, &Array::filled(shape, 0), &plain);
        let floats = |dtype, shape: &[usize]| Tensor::floats(backend, dtype, &Array::filled(shape, 0.0), &plain);
        Sampled {
            walk,
            has_draft_rows: true,
            tokens: ints(I32, &[BATCH, NODES]),
            parents: ints(I32, &[BATCH, NODES]),
            logits: floats(BF16, &[BATCH, NODES, tokens]),
            draft_rows: floats(F32, &[BATCH, NODES, tokens]),
            temperature: floats(F32, &[BATCH]),
            seeds: ints(I64, &[BATCH]),
            positions: ints(I64, &[BATCH]),
            accepted: ints(I32, &[BATCH]),
            path: ints(I32, &[BATCH, NODES]),
            next_token: ints(I32, &[BATCH]),
            committed: ints(I32, &[BATCH, NODES]),
        }
    }

    fn args(&self) -> vwd_verify_tree_args {
        vwd_verify_tree_args {
            walk: self.walk,
            tokens: self.tokens.c(),
            parents: self.parents.c(),
            logits: self.logits.c(),
            draft_rows: if self.has_draft_rows { self.draft_rows.c() } else { absent() },
            temperature: self.temperature.c(),
            seeds: self.seeds.c(),
            positions: self.positions.c(),
            accepted: self.accepted.c(),
            path: self.path.c(),
            next_token: self.next_token.c(),
            committed: self.committed.c(),
            ..args()
        }
    }

    /// # Safety
    /// The tensors live until the call, or a graph that holds it, is over.
    unsafe fn call(&self, backend: &Backend) -> vwd_status {
        // SAFETY: forwarded to the caller.
        unsafe { vwd_verify_tree(backend.session(), &self.args(), backend.stream()) }
    }
}
