//! Selection in graphs: every method, of one query position and of several, again and again and over sequences that grow and
//! shrink.

use crate::Case;
use crate::graph::{Graph, Written};
use crate::support::selection::{Calls, Lists, Scene, Steps};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("selections_of_1000_replays_are_the_same_bits", selections_of_1000_replays_are_the_same_bits),
    ("selections_follow_500_steps_of_a_graph", selections_follow_500_steps_of_a_graph),
    ("summaries_follow_what_the_kernel_ahead_writes", summaries_follow_what_the_kernel_ahead_writes),
    ("updates_of_layers_that_are_alike_share_launches", updates_of_layers_that_are_alike_share_launches),
    ("selections_follow_what_the_kernel_ahead_writes", selections_follow_what_the_kernel_ahead_writes),
    ("long_selections_follow_what_the_kernel_ahead_writes", long_selections_follow_what_the_kernel_ahead_writes),
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
            for replay in 0..backend.times(1000) {
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
            for _ in 0..backend.times(500) {
                steps.step(rng, |_| graph.replay());
            }
        });
    }
}

/// 40 layers, one of which has summaries of another type.
fn updates_of_layers_that_are_alike_share_launches(backend: &Backend) {
    const LAYERS: usize = 40;
    let (tokens, heads, dim, plain) = (100usize, 2, 64, Layout::default());
    let [lens, begin] =
        [tokens, tokens - 1].map(|n| Tensor::ints(backend, I32, &Array::filled(&[1], n as i64), &plain));
    let zeros = |dtype, shape: &[usize]| Tensor::floats(backend, dtype, &Array::filled(shape, 0.0), &plain);
    let layers: Vec<[Tensor; 2]> = (0..LAYERS)
        .map(|n| {
            let axes = zeros(if n == 10 { F32 } else { BF16 }, &[1, tokens.div_ceil(16), heads, 2 * dim]);
            [zeros(BF16, &[1, tokens, heads, dim]), axes]
        })
        .collect();
    let updates: Vec<vwd_index_update_args> = layers
        .iter()
        .map(|[k, axes]| vwd_index_update_args {
            index: kept(vwd_index { kind: VWD_INDEX_AXIS, block_size: 16, axes: axes.c(), ..args() }),
            k: k.c(),
            seq_lens: lens.c(),
            begin: begin.c(),
            ..args()
        })
        .collect();
    let pointers: Vec<*const vwd_index_update_args> = updates.iter().map(|update| update as *const _).collect();
    for (range, launches) in [(0..1, 1), (0..10, 1), (0..LAYERS, 3), (11..LAYERS, 1), (9..12, 3), (0..0, 0)] {
        let some = &pointers[range.clone()];
        let graph = Graph::capture(backend.stream().cast(), || {
            let (session, stream) = (backend.session(), backend.stream());
            // SAFETY: the tensors outlive the graph.
            assert_ok(unsafe { vwd_index_update_layers(session, some.as_ptr(), some.len() as u32, stream) });
        });
        assert_eq!(graph.nodes, launches, "layers {range:?}");
        graph.replay();
    }
}

/// Lengths and pages change in the kernel just ahead: what is guessed before it ends is often wrong. The summaries are those of an update for
/// which all was there.
fn summaries_follow_what_the_kernel_ahead_writes(backend: &Backend) {
    const BATCH: usize = 3;
    const HEADS: usize = 2;
    const DIM: usize = 64;
    const PAGE: usize = 64;
    const PAGES: usize = 6;
    const TOKENS: i64 = (PAGES * PAGE) as i64;
    rounds(1, |rng| {
        let plain = Layout::default();
        let k = Tensor::floats(backend, BF16, &rng.normals(&[BATCH * PAGES, PAGE, HEADS, DIM]), &plain);
        let [lens, begin] = [(); 2].map(|_| Tensor::ints(backend, I32, &Array::filled(&[BATCH], 0), &plain));
        let table = Tensor::ints(backend, I32, &Array::filled(&[BATCH, PAGES], 0), &plain);
        let ahead = [&lens, &begin, &table].map(|of| Written::new(backend, of));
        let summaries = || {
            let of = |width| {
                Tensor::floats(backend, BF16, &Array::filled(&[BATCH, PAGES * PAGE / 32, HEADS, width], 0.0), &plain)
            };
            [of(DIM), of(DIM), of(DIM), of(2 * DIM)]
        };
        let update = |[max, min, means, axes]: &[Tensor; 4], ahead: &[Written]| {
            let indices = [
                vwd_index { kind: VWD_INDEX_MINMAX, block_size: 32, key_max: max.c(), key_min: min.c(), ..args() },
                vwd_index { kind: VWD_INDEX_MEAN, window: 32, stride: 16, means: means.c(), ..args() },
                vwd_index { kind: VWD_INDEX_AXIS, block_size: 32, axes: axes.c(), ..args() },
            ];
            for index in indices {
                ahead.iter().for_each(Written::enqueue);
                let args = vwd_index_update_args {
                    index: kept(index),
                    k: k.c(),
                    page_table: table.c(),
                    seq_lens: lens.c(),
                    begin: begin.c(),
                    ..args()
                };
                // SAFETY: the tensors outlive the graph.
                assert_ok(unsafe { vwd_index_update(backend.session(), &args, backend.stream()) });
            }
        };
        let (replayed, called) = (summaries(), summaries());
        let graph = Graph::capture(backend.stream().cast(), || update(&replayed, &ahead));
        let mut tokens = [1i64; BATCH];
        let mut pages: Vec<i64> = (0..(BATCH * PAGES) as i64).collect();
        rng.shuffle(&mut pages);
        for step in 0..backend.times(300) {
            let before = tokens;
            tokens = tokens.map(|len| if rng.one_in(8) { rng.int(0..=TOKENS) } else { (len + 1).min(TOKENS) });
            if rng.one_in(4) {
                rng.shuffle(&mut pages);
            }
            for (written, numbers) in ahead.iter().zip([&tokens[..], &before[..], &pages[..]]) {
                written.set(numbers);
            }
            graph.replay();
            update(&called, &[]);
            backend.finish(0);
            for (a, b) in replayed.iter().zip(&called) {
                assert_eq!(a.read_memory(), b.read_memory(), "step {step}, tokens {before:?} to {tokens:?}");
            }
        }
    });
}

/// So do selections follow the lengths.
fn selections_follow_what_the_kernel_ahead_writes(backend: &Backend) {
    for (lists, (dtype, dim)) in Lists::ALL.into_iter().zip(FORMS) {
        rounds(1, |rng| {
            let scene = Scene::random(rng, lists, dtype, dim, 4000);
            let [replayed, called] = [(); 2].map(|_| Calls::new(&scene, backend));
            let ahead = Written::new(backend, &replayed.lens);
            for calls in [&replayed, &called] {
                calls.update(None, |call| call());
                calls.select(|call| call());
            }
            backend.finish(0);
            let graph = Graph::capture(backend.stream().cast(), || {
                replayed.select(|call| {
                    ahead.enqueue();
                    call();
                });
            });
            for step in 0..backend.times(100) {
                let lens = scene.lens.map(|&len| if rng.one_in(4) { rng.int(0..=len) } else { len });
                ahead.set(&lens.data);
                called.lens.refill_ints(&lens);
                for calls in [&replayed, &called] {
                    calls.clear();
                }
                graph.replay();
                called.select(|call| call());
                backend.finish(0);
                assert!(replayed.read() == called.read(), "{lists:?}, {dtype:?}, step {step}, lens {:?}", lens.data);
            }
        });
    }
}

/// So do those from long lists by AXIS in INT4 and by MINMAX, which are two launches.
fn long_selections_follow_what_the_kernel_ahead_writes(backend: &Backend) {
    const BATCH: usize = 2;
    const HEADS: usize = 2;
    const DIM: usize = 128;
    const BLOCK: usize = 16;
    const BLOCKS: usize = 8200; // as many as take two launches
    const K: usize = 128;
    const TOKENS: i64 = (BLOCK * BLOCKS) as i64;
    rounds(1, |rng| {
        let plain = Layout::default();
        let rows = |last: usize| [BATCH, BLOCKS, HEADS, last];
        let axes = Tensor::ints(backend, U8, &Array::from_fn(&rows(DIM), |_| rng.int(0..=255)), &plain);
        let range =
            Array::from_fn(&rows(DIM / 8), |at| if at[3] % 2 == 0 { F16.round(0.05 * rng.unit()) } else { -0.375 });
        let range = Tensor::floats(backend, F16, &range, &plain);
        let bounds = [(); 2].map(|_| Tensor::floats(backend, BF16, &rng.normals(&rows(DIM)), &plain));
        let q = Tensor::floats(backend, BF16, &rng.normals(&[BATCH, 4 * HEADS, DIM]), &plain);
        let ints = |dtype, shape: &[usize]| Tensor::ints(backend, dtype, &Array::filled(shape, 0), &plain);
        let [lens, budgets] = [(); 2].map(|_| [(); 2].map(|_| ints(I32, &[BATCH])));
        let lists =
            [(); 2].map(|_| [ints(I32, &[BATCH, HEADS, K]), ints(I32, &[BATCH, HEADS]), ints(U32, &[BATCH, HEADS])]);
        let scores =
            [(); 2].map(|_| Tensor::floats(backend, F32, &Array::filled(&[BATCH, HEADS, BLOCKS], 0.0), &plain));
        let select = |method, n: usize| {
            let [ids, counts, status] = &lists[n];
            let by_axis = vwd_index { kind: VWD_INDEX_AXIS, axes: axes.c(), axis_range: range.c(), ..args() };
            let [key_max, key_min] = bounds.each_ref().map(Tensor::c);
            let by_bounds = vwd_index { kind: VWD_INDEX_MINMAX, key_max, key_min, ..args() };
            let index = if method == VWD_SELECT_AXIS { by_axis } else { by_bounds };
            let args = vwd_select_blocks_args {
                method,
                block_size: BLOCK as u32,
                k: K as u32,
                init_blocks: 1,
                local_blocks: 2,
                scale: 0.09,
                index: kept(vwd_index { block_size: BLOCK as u32, ..index }),
                q: q.c(),
                seq_lens: lens[n].c(),
                budgets: budgets[n].c(),
                selected: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
                scores: scores[n].c(),
                status: status.c(),
                ..args()
            };
            // SAFETY: the tensors outlive the graph.
            assert_ok(unsafe { vwd_select_blocks(backend.session(), &args, backend.stream()) });
        };
        for method in [VWD_SELECT_AXIS, VWD_SELECT_MINMAX] {
            // Reserves the scratch.
            select(method, 1);
            backend.finish(0);
            let ahead = [&lens[0], &budgets[0]].map(|of| Written::new(backend, of));
            let graph = Graph::capture(backend.stream().cast(), || {
                ahead.iter().for_each(Written::enqueue);
                select(method, 0);
            });
            let (mut tokens, mut k) = ([1i64; BATCH], [K as i64; BATCH]);
            for step in 0..backend.times(200) {
                tokens = tokens.map(|len| if rng.one_in(4) { rng.int(0..=TOKENS) } else { (len + 1).min(TOKENS) });
                k = k.map(|k| if rng.one_in(4) { rng.int(0..=K as i64 + 1) } else { k });
                for (n, now) in [tokens, k].iter().enumerate() {
                    ahead[n].set(now);
                    [&lens[1], &budgets[1]][n].refill_ints(&Array::new(&[BATCH], now.to_vec()));
                }
                lists.iter().flatten().for_each(|of| of.refill_ints(&of.read_ints().map(|_| 0)));
                scores.iter().for_each(|of| of.refill_floats(&of.read_floats().map(|_| 0.0)));
                graph.replay();
                select(method, 1);
                backend.finish(0);
                for (a, b) in lists[0].iter().zip(&lists[1]).chain([(&scores[0], &scores[1])]) {
                    assert!(a.read_memory() == b.read_memory(), "{method}, step {step}, tokens {tokens:?}, k {k:?}");
                }
            }
        }
    });
}
