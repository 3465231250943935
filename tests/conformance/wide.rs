//! Sampling, trees and compaction where 32 bits do not hold a token, a position or the distance of two rows, and where logits are equal.

use crate::Case;
use crate::compact::Compactor;
use crate::sample::Scene;
use crate::sample_ends::filters_are_off;
use crate::sample_variants::by_variant;
use crate::sampling::{PLAIN, Settings};
use crate::support::*;
use crate::tree_sample::{self, RULES};
use half::f16;
use std::slice::from_ref;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    sample_ends_a_draft_at_what_is_no_token,
    sample_compares_stop_tokens_whole,
    sample_draws_by_all_bits_of_the_position,
    sample_takes_the_lowest_of_equal_logits,
    tree_sample_passes_over_what_is_no_token,
];
pub const VARIANTS: &[Case] = cases![sample_by_each_variant_looks_at_all_bits];
pub const ON_THE_CPU: &[Case] =
    cases![sampled_rows_may_lie_more_than_32_bits_apart, compacted_pages_may_lie_more_than_32_bits_apart];

/// Numbers that are no token of so many, whatever of their bits is looked at; those of 64 bits have `token` in their lower halves.
fn no_tokens(tokens: i64, token: i64, is_wide: bool) -> Vec<i64> {
    let narrow = [-1, tokens, i32::MAX as i64, i32::MIN as i64, -7];
    let wide = [token + (1 << 32), token - (1 << 32), token + (1 << 62), i64::MIN + token];
    if is_wide { [&narrow[..], &wide].concat() } else { narrow[..4].to_vec() }
}

/// Rules by which drafts are tried, with rows of drafts or without.
const TRIED: [(u32, bool); 4] = [
    (VWD_ACCEPT_GREEDY, false),
    (VWD_ACCEPT_COUPLED, false),
    (VWD_ACCEPT_REJECTION, false),
    (VWD_ACCEPT_REJECTION, true),
];

fn sample_ends_a_draft_at_what_is_no_token(backend: &Backend) {
    rounds(2, |rng| [7, 8].iter().for_each(|&tokens| ends_drafts(backend, rng, tokens, &TRIED)));
}

/// Such a request commits what it would without drafts, though the next draft token is one that its row prefers. Tokens of even batches have 32 bits.
fn ends_drafts(backend: &Backend, rng: &mut Rng, tokens: usize, rules: &[(u32, bool)]) {
    for &(rule, has_rows) in rules {
        for batch in [4, 9] {
            let row: Vec<f64> = (0..tokens).map(|_| F32.round(rng.normal())).collect();
            let scene = Scene {
                rule,
                draft: Array::filled(&[batch, 2], 0),
                target: Array::new(&[batch, 3, tokens], row.repeat(batch * 3)),
                draft_rows: has_rows.then(|| Array::new(&[batch, 2, tokens], row.repeat(batch * 2))),
                wants_logprobs: has_rows,
                ..Scene::plain(F32, Array::filled(&[batch, tokens], 0.0))
            };
            let plain = Scene { lens: Some(vec![0; batch]), ..scene.clone() }.run(backend, None);
            let id = |i: usize| no_tokens(tokens as i64, plain.next_token[i], batch == 9)[i];
            let ids: Vec<i64> = (0..batch).map(id).collect();
            let draft = Array::from_fn(&[batch, 2], |at| if at[1] == 0 { ids[at[0]] } else { plain.next_token[0] });
            let found = Scene { draft, ..scene }.run(backend, None);
            let what = format!("rule {rule}, rows {has_rows}, {ids:?}");
            assert_eq!((found.accepted, found.next_token), (vec![0; batch], plain.next_token), "{what}");
            assert_eq!((found.committed_len, found.status), (vec![1; batch], vec![0; batch]), "{what}");
        }
    }
}

fn sample_compares_stop_tokens_whole(backend: &Backend) {
    rounds(2, |rng| [5, 8].iter().for_each(|&tokens| compares_stop_tokens(backend, rng, tokens)));
}

/// Stop tokens of which the lower halves are what is committed neither end a request nor are forbidden to it.
fn compares_stop_tokens(backend: &Backend, rng: &mut Rng, tokens: usize) {
    for least in [0, 9] {
        let target = Array::from_fn(&[3, tokens], |_| F32.round(rng.normal()));
        let mut scene =
            Scene { min_remaining: Some(vec![least; 3]), wants_logprobs: false, ..Scene::plain(F32, target) };
        let plain = scene.run(backend, None);
        let wide = |at: &[usize]| plain.next_token[at[0]] + (1 << 32) * (at[1] as i64 - 1);
        scene.stop = Some(Array::from_fn(&[3, 3], |at| if at[1] == 1 { -1 } else { wide(at) }));
        let found = scene.run(backend, None);
        assert_eq!((&found.next_token, &found.finish), (&plain.next_token, &vec![0; 3]), "{least}");
        // Their whole numbers do.
        scene.stop = Some(Array::from_fn(&[3, 1], |at| plain.next_token[at[0]]));
        let found = scene.run(backend, None);
        if least == 0 {
            assert_eq!((&found.next_token, &found.finish), (&plain.next_token, &vec![1; 3]));
        } else {
            assert!((0..3).all(|i| found.next_token[i] != plain.next_token[i]), "{:?}", found.next_token);
        }
    }
}

/// By the formulas.
fn sample_draws_by_all_bits_of_the_position(backend: &Backend) {
    rounds(4, |rng| {
        for (rule, tokens) in [(VWD_ACCEPT_COUPLED, 30), (VWD_ACCEPT_COUPLED, 32), (VWD_ACCEPT_REJECTION, 30)] {
            let scene = far_positions(backend, rng, rule, tokens);
            let scene = Scene { wants_logprobs: true, ..scene };
            assert_eq!(scene.check(backend, None), scene.batch(), "rule {rule}");
        }
    });
}

/// Requests at positions above 2^32, and at those whose rows pass such a bound, or 0. Drafts are what is drawn there, so that later rows are come to.
fn far_positions(backend: &Backend, rng: &mut Rng, rule: u32, tokens: usize) -> Scene {
    let positions = [1 << 40, (1 << 32) - 1, -1, i64::MIN, i64::MAX - 2];
    let batch = positions.len();
    let mut scene = Scene {
        rule: VWD_ACCEPT_COUPLED,
        draft: Array::filled(&[batch, 2], 0),
        target: Array::from_fn(&[batch, 3, tokens], |_| F32.round(rng.normal())),
        positions: positions.to_vec(),
        wants_logprobs: false,
        ..Scene::plain(F32, Array::filled(&[batch, tokens], 0.0))
    };
    for r in 0..2 {
        let found = scene.run(backend, None);
        (0..batch).for_each(|i| scene.draft[[i, r]] = found.committed[[i, r]].max(0));
    }
    Scene { rule, ..scene }
}

fn sample_takes_the_lowest_of_equal_logits(backend: &Backend) {
    rounds(2, |rng| takes_the_lowest(backend, rng, &[9, 16, 4104, 9001]));
}

/// Numbers that the dtype makes equal, or zeros of either sign: of the largest the lowest token is taken by greedy requests, in one segment or another.
/// Sampled requests stand among them.
fn takes_the_lowest(backend: &Backend, rng: &mut Rng, lengths: &[usize]) {
    let batch = 5;
    for (dtype, apart) in [(F32, 1e-7), (F16, 0.004), (BF16, 0.1)] {
        for &tokens in lengths {
            let mut scene = Scene::plain(dtype, Array::filled(&[batch, tokens], 0.0));
            scene.target = Array::from_fn(&[batch, 2, tokens], |_| dtype.round(-1.0 - rng.unit()));
            scene.draft = Array::filled(&[batch, 1], 0);
            scene.wants_logprobs = false;
            let mut lowest = vec![];
            for i in 0..batch {
                for r in 0..2 {
                    let mut places = [(); 3].map(|()| rng.size(0..=tokens - 1));
                    places.sort();
                    for (n, &place) in places.iter().enumerate() {
                        // The last looks larger before it is rounded, or is the zero that is above 0.
                        let x = if i % 2 == 0 { 100.0 + apart * n as f64 } else { [-0.0, -0.0, 0.0][n] };
                        scene.target[[i, r, place]] = dtype.round(x);
                    }
                    lowest.push(places[0] as i64);
                    if r == 0 {
                        // Of two requests the last of them is drafted, which is refused unless all are one.
                        scene.draft[[i, 0]] = places[if i < 2 { 2 } else { 0 }] as i64;
                    }
                }
            }
            scene.settings =
                [0.0, 1e-6, 1.0, 0.0, 0.7].map(|t| Settings { temperature: F32.round(t), ..PLAIN }).to_vec();
            let greedy = Scene { rule: VWD_ACCEPT_GREEDY, ..scene.clone() }.run(backend, None);
            let mixed = Scene { rule: VWD_ACCEPT_COUPLED, ..scene.clone() }.run(backend, None);
            for (found, requests) in [(greedy, &[0, 1, 2, 3, 4][..]), (mixed, &[0, 1, 3])] {
                for &i in requests {
                    let is_accepted = scene.draft[[i, 0]] == lowest[2 * i];
                    let expected = [lowest[2 * i], if is_accepted { lowest[2 * i + 1] } else { -1 }];
                    assert_eq!(found.committed.row([i]), expected, "request {i} of {tokens} tokens in {dtype:?}");
                }
            }
        }
    }
}

/// Rows that begin on 16 bytes, without log-probabilities and rejection, which every variant takes.
fn sample_by_each_variant_looks_at_all_bits(backend: &Backend) {
    let cpu = Backend::cpu(1);
    for (variant, forced) in by_variant(backend) {
        rounds(1, |rng| {
            ends_drafts(&forced, rng, 8, &TRIED[..2]);
            compares_stop_tokens(&forced, rng, 8);
            takes_the_lowest(&forced, rng, &[16, 4104]);
            filters_are_off(&forced, rng, VWD_ACCEPT_COUPLED, false);
            let scene = far_positions(&forced, rng, VWD_ACCEPT_COUPLED, 32);
            scene.run(&forced, None).assert_same(scene.run(&cpu, None));
        });
        forced.assert_ran(variant);
    }
}

/// Children whose tokens are the target's in their lower halves alone, of which the first child that has the token is the third.
fn tree_sample_passes_over_what_is_no_token(backend: &Backend) {
    let (batch, none) = (3, f64::NEG_INFINITY);
    for rule in [VWD_WALK_GREEDY].into_iter().chain(RULES) {
        let target = Array::from_fn(&[batch, 6, 4], |at| if at[2] == at[0] { 0.0 } else { none });
        let mut scene = tree_sample::Scene::plain(rule, &[-1, 0, 0, 0, 0, 1], target);
        scene.tokens = Array::from_fn(&[batch, 6], |at| {
            let token = at[0] as i64;
            [0, token + (1 << 32), token - (1 << 32), token, token, token][at[1]]
        });
        let found = scene.run(backend, None);
        assert_eq!(found.accepted, vec![1; batch], "rule {rule}");
        (0..batch).for_each(|i| assert_eq!(found.path.row([i])[..3], [0, 3, -1], "rule {rule}"));
        assert_eq!(found.next_token, [0, 1, 2], "rule {rule}");
    }
}

/// Numbers of 16 bits in memory of which only what is touched exists. Where an offset that has lost its upper bits would point, there are zeros,
/// or nothing.
fn far(values: &Array<f64>, strides: [usize; 3]) -> (Mapping, vwd_tensor) {
    let place = |at: &[usize]| at.iter().zip(strides).map(|(n, stride)| n * stride).sum::<usize>();
    let [n, m, tokens] = values.shape[..] else { panic!("three dimensions") };
    let memory = Mapping::new((place(&[n - 1, m - 1, tokens - 1]) + 1) * size_of::<f16>());
    let c = vwd_tensor {
        data: memory.start,
        device_type: 1,
        dtype_code: F16.code,
        dtype_bits: F16.bits,
        lanes: 1,
        ndim: 3,
        shape: [n as i64, m as i64, tokens as i64, 0, 0],
        strides: [strides[0] as i64, strides[1] as i64, strides[2] as i64, 0, 0],
        ..absent()
    };
    for i in 0..n {
        for r in 0..m {
            for token in 0..tokens {
                let x = f16::from_f64(values[[i, r, token]]);
                // SAFETY: inside the mapping.
                unsafe { memory.start.cast::<f16>().add(place(&[i, r, token])).write(x) };
            }
        }
    }
    (memory, c)
}

/// Rows of the target and of drafts: tokens are those of rows that lie side by side.
fn sampled_rows_may_lie_more_than_32_bits_apart(backend: &Backend) {
    rounds(2, |rng| {
        let (batch, gamma, tokens, plain) = (2, 2, 40, Layout::default());
        let [target, rows] = [gamma + 1, gamma + 1]
            .map(|rows| Array::from_fn(&[batch, rows, tokens], |_| F16.round(3.0 * rng.normal())));
        let near = [&target, &rows].map(|values| Tensor::floats(backend, F16, values, &plain));
        // A request's rows are so far apart that 32 bits with a sign do not hold it, and requests that none do.
        let strides = [(1 << 32) + 64, (1 << 31) + 4096, 1];
        let [(_of_target, far_target), (_of_rows, far_rows)] = [far(&target, strides), far(&rows, strides)];
        let far = [far_target, far_rows];
        let ints = |values: Vec<i64>, shape: &[usize]| Tensor::ints(backend, I64, &Array::new(shape, values), &plain);
        let (seeds, positions) = (ints(vec![3, rng.int(0..=999)], &[batch]), ints(vec![5, 900], &[batch]));
        let out = |shape: &[usize]| Tensor::poisoned(backend, I64, shape, &plain);
        let (session, stream) = (backend.session(), backend.stream());
        for rule in [VWD_ACCEPT_COUPLED, VWD_ACCEPT_REJECTION] {
            let mut draft = vec![0; batch * gamma];
            let by = |[target, rows]: [vwd_tensor; 2], draft: &[i64]| {
                let (next_token, committed) = (out(&[batch]), out(&[batch, gamma + 1]));
                let draft = ints(draft.to_vec(), &[batch, gamma]);
                let call = vwd_verify_sample_args {
                    rule,
                    draft: draft.c(),
                    target,
                    draft_rows: vwd_tensor { shape: [batch as i64, gamma as i64, tokens as i64, 0, 0], ..rows },
                    seeds: seeds.c(),
                    positions: positions.c(),
                    next_token: next_token.c(),
                    committed: committed.c(),
                    ..args()
                };
                // SAFETY: the tensors outlive the call.
                backend.finish(unsafe { vwd_verify_sample(session, &call, stream) });
                committed.read_ints()
            };
            // Drafts that the rows prefer.
            for (n, token) in draft.iter_mut().enumerate() {
                let row = target.row([n / gamma, n % gamma]);
                *token = (0..tokens).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("some") as i64;
            }
            assert_eq!(by(far, &draft), by(near.each_ref().map(Tensor::c), &draft), "rule {rule}");
            let tree = |[logits, rows]: [vwd_tensor; 2]| {
                let children = (0..batch).flat_map(|i| [0, draft[i * gamma], draft[i * gamma + 1]]).collect();
                let tokens = ints(children, &[batch, gamma + 1]);
                let parents = Tensor::ints(backend, I32, &Array::new(&[batch, 3], [-1, 0, 1].repeat(batch)), &plain);
                let (next_token, committed) = (out(&[batch]), out(&[batch, gamma + 1]));
                let [accepted, path] =
                    [&[batch][..], &[batch, gamma + 1]].map(|shape| Tensor::poisoned(backend, I32, shape, &plain));
                let call = vwd_verify_tree_args {
                    walk: if rule == VWD_ACCEPT_COUPLED { VWD_WALK_COUPLED } else { VWD_WALK_INDEPENDENT },
                    tokens: tokens.c(),
                    parents: parents.c(),
                    logits,
                    draft_rows: rows,
                    accepted: accepted.c(),
                    path: path.c(),
                    next_token: next_token.c(),
                    committed: committed.c(),
                    seeds: seeds.c(),
                    positions: positions.c(),
                    ..args()
                };
                // SAFETY: as above.
                backend.finish(unsafe { vwd_verify_tree(session, &call, stream) });
                committed.read_ints()
            };
            assert_eq!(tree(far), tree(near.each_ref().map(Tensor::c)), "tree, rule {rule}");
        }
    });
}

fn compacted_pages_may_lie_more_than_32_bits_apart(backend: &Backend) {
    let (of_page, of_row, plain) = ((1 << 32) + 64, 8, Layout::default());
    let values = Array::from_fn(&[3, 2, 4], |at| (at[0] * 100 + at[1] * 10 + at[2] + 1) as f64);
    let (memory, cache) = far(&values, [of_page, of_row, 1]);
    let compactor = Compactor::new(backend, from_ref(&cache));
    let ints =
        |values: &[i64], shape: &[usize]| Tensor::ints(backend, I32, &Array::new(shape, values.to_vec()), &plain);
    let (table, bases, path) = (ints(&[2, 0, 1], &[1, 3]), ints(&[1], &[1]), ints(&[0, 2, 4], &[1, 3]));
    let call = vwd_compact_args { page_table: table.c(), bases: bases.c(), path: path.c(), ..args() };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_compact(compactor.0, &call, backend.stream()) });
    // Tokens 0 … 5 lie in pages 2, 0 and 1; token 3 moves to 2, and token 5 to 3.
    let place = |token: usize| [[2, 0, 1][token / 2], token % 2];
    for (token, from) in [0, 1, 3, 5, 4, 5].into_iter().enumerate() {
        let ([page, row], [old_page, old_row]) = (place(token), place(from));
        for n in 0..4 {
            let at = page * of_page + row * of_row + n;
            // SAFETY: inside the mapping.
            let found = unsafe { memory.start.cast::<f16>().add(at).read() };
            assert_eq!(found.to_f64(), values[[old_page, old_row, n]], "token {token}");
        }
    }
}
