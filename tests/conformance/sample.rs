//! vwd_verify_sample: which tokens are committed, and what it does not depend on.

mod scene;

use crate::Case;
use crate::sampling::{self, PLAIN, Settings};
use crate::sampling::{
    WARMEST, any_draft_rows, any_map, any_settings, distribution, few_tokens, logits, steep, uniform,
};
use crate::support::*;
pub use scene::Scene;
use scene::column;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    sample_agrees_with_the_formula,
    sample_commits_the_same_text_whatever_was_drafted,
    sample_of_a_request_depends_on_no_other,
    sample_commits_the_same_tokens_as_on_the_cpu,
    sample_draws_what_refusals_leave_as_on_the_cpu,
    sample_filters_flat_rows_as_on_the_cpu,
    sample_takes_large_vocabularies,
    sample_takes_one_row_a_request,
    sample_without_drafts_draws_the_same_by_every_rule,
];

/// Everything at random. Drafts are what the target finds likely, so that some are accepted.
pub fn random(rng: &mut Rng, batch: usize, gamma: usize, tokens: usize) -> Scene {
    let dtype = rng.pick(&[F32, F16, BF16]);
    let target = logits(rng, &[batch, gamma + 1, tokens], dtype);
    let rule = rng.pick(&[VWD_ACCEPT_AUTO, VWD_ACCEPT_COUPLED, VWD_ACCEPT_REJECTION, VWD_ACCEPT_GREEDY]);
    let has_rows = gamma > 0 && rng.one_in(2);
    let temperature_last = rng.one_in(4);
    let mut settings: Vec<Settings> = (0..batch).map(|_| any_settings(rng, temperature_last)).collect();
    if rng.one_in(3) {
        settings.iter_mut().for_each(|s| *s = Settings { temperature: s.temperature, temperature_last, ..PLAIN });
    }
    let columns = if rng.one_in(2) { tokens } else { rng.size(1..=tokens) };
    let map = (has_rows && rng.one_in(2)).then(|| any_map(rng, tokens, columns));
    let is_weights = [rng.one_in(4), rng.one_in(3)];
    let target = if is_weights[0] { target.map(|&x| dtype.round((x / 2.0).exp())) } else { target };
    let (draft_dtype, draft_rows) = any_draft_rows(rng, &[batch, gamma, columns], is_weights[1]);
    let draft_rows = has_rows.then_some(draft_rows);
    let mut optional =
        |of: &mut dyn FnMut(&mut Rng) -> i64| rng.one_in(2).then(|| (0..batch).map(|_| of(rng)).collect::<Vec<i64>>());
    let lens = optional(&mut |rng| rng.int(-1..=gamma as i64 + 1));
    let remaining = optional(&mut |rng| rng.int(-1..=gamma as i64 + 2));
    let min_remaining = optional(&mut |rng| rng.int(-1..=3));
    let ignore_stop = optional(&mut |rng| rng.int(0..=1));
    let seeds = (0..batch).map(|_| rng.int(i64::MIN..=i64::MAX)).collect();
    let positions = (0..batch).map(|_| rng.int(0..=1 << 20)).collect();
    let stop = rng.one_in(2).then(|| Array::from_fn(&[batch, 3], |_| rng.int(-1..=tokens as i64)));
    let mut scene = Scene {
        rule,
        flags: is_weights[0] as u32 * VWD_SAMPLE_TARGET_PROBABILITIES
            + is_weights[1] as u32 * VWD_SAMPLE_DRAFT_PROBABILITIES,
        dtype,
        draft: Array::filled(&[batch, gamma], -1),
        lens,
        target,
        target_gap: 0,
        wants_logprobs: true,
        begin: None,
        draft_rows,
        draft_dtype,
        map,
        settings,
        seeds,
        positions,
        stop,
        ignore_stop,
        remaining,
        min_remaining,
    };
    for i in 0..batch {
        for r in 0..gamma {
            let p = distribution(scene.target.row([i, r]), is_weights[0], &PLAIN)
                .ok()
                .flatten()
                .expect("there is something");
            // Now and then what this position's number draws, what the draft's row prefers, or no token.
            let preferred = scene.draft_rows.as_ref().map(|rows| {
                let row = rows.row([i, r]);
                let column = (0..columns).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("some");
                scene.map.as_ref().map_or(column as i64, |map| map[column])
            });
            scene.draft[[i, r]] = match rng.size(0..=9) {
                7.. if preferred.is_some() => preferred.expect("it is"),
                0 => rng.pick(&[-1, tokens as i64, i32::MAX as i64]),
                1..4 => sampling::draw(&p, uniform(scene.seeds[i], scene.positions[i] + r as i64, 1, 0))
                    .map_or(0, |j| j as i64),
                _ => sampling::draw(&p, rng.unit()).map_or(0, |j| j as i64),
            };
        }
    }
    scene
}

/// The same rows in one run, in which the requests have them in any order, as many as they draft tokens. Rows of no request hold NaN. Now and
/// then a request would have rows that the run does not have.
pub fn ragged(rng: &mut Rng, mut scene: Scene) -> Scene {
    let (batch, gamma, tokens) = (scene.batch(), scene.gamma(), scene.tokens());
    let mut order: Vec<usize> = (0..batch).collect();
    rng.shuffle(&mut order);
    let mut rows = Array::filled(&[batch, gamma + 1, tokens], f64::NAN);
    let (mut begin, mut next) = (vec![0; batch], 0);
    for i in order {
        let given = scene.lens.as_ref().map_or(gamma, |lens| lens[i].clamp(0, gamma as i64) as usize);
        begin[i] = next as i64;
        for r in 0..=given {
            rows.data[next * tokens..][..tokens].copy_from_slice(scene.target.row([i, r]));
            next += 1;
        }
        if rng.one_in(9) {
            let past = (batch * (gamma + 1)) as i64;
            begin[i] = rng.pick(&[-1, past - 1, past, i32::MIN as i64, i64::MIN, i64::MAX - 1]);
        }
    }
    (scene.target, scene.begin) = (rows, Some(begin));
    scene
}

/// Rows of logits without filters, whose tokens are greedy or coupled, and no log-probabilities.
pub fn random_plain(rng: &mut Rng, batch: usize, gamma: usize, tokens: usize) -> Scene {
    let mut scene = loop {
        let scene = random(rng, batch, gamma, tokens);
        if scene.flags == 0 && scene.draft_rows.is_none() {
            break scene;
        }
    };
    if gamma > 0 {
        scene.rule = rng.pick(&[VWD_ACCEPT_AUTO, VWD_ACCEPT_COUPLED, VWD_ACCEPT_GREEDY]);
    }
    scene.settings.iter_mut().for_each(|s| *s = Settings { temperature: s.temperature, ..PLAIN });
    scene.wants_logprobs = false;
    scene
}

/// The same where most requests have filters.
pub fn random_filtered(rng: &mut Rng, batch: usize, gamma: usize, tokens: usize) -> Scene {
    let mut scene = random_plain(rng, batch, gamma, tokens);
    let temperature_last = rng.one_in(4);
    for settings in &mut scene.settings {
        let of_any = any_settings(rng, temperature_last);
        *settings = if rng.one_in(4) { Settings { temperature_last, ..*settings } } else { of_any };
    }
    scene
}

fn sample_agrees_with_the_formula(backend: &Backend) {
    let (mut sure, mut all) = (0, 0);
    rounds(80, |rng| {
        let (batch, gamma) = (rng.size(0..=6), rng.pick(&[0, 1, 2, 3, 5, 8, 64]));
        let tokens = rng.pick(&[1, 2, 7, 8, 50, 129]);
        let mut scene = random(rng, batch, gamma, tokens);
        if rng.one_in(3) {
            scene = ragged(rng, scene);
        }
        sure += scene.check(backend, Some(rng));
        all += batch;
    });
    assert!(sure * 10 >= all * 9, "the formulas are sure of {sure} of {all} requests");
}

/// Segments are of 4096 tokens: several, a short one, one of a single token, rows at any address. A few tokens have nearly all mass, as in a
/// model's rows, and the formulas are sure of every request.
fn sample_takes_large_vocabularies(backend: &Backend) {
    let mut sizes = vec![(2, 1, 4097), (1, 2, 8192), (2, 2, 12_001), (1, 0, 70_000), (3, 1, 151_936)];
    sizes.extend((!is_emulated(backend)).then_some((4, 1, 1 << 20)));
    rounds(1, |rng| {
        for &(batch, gamma, tokens) in &sizes {
            for rule in [VWD_ACCEPT_COUPLED, VWD_ACCEPT_REJECTION] {
                let scene = Scene { rule, ..random_steep(rng, batch, gamma, tokens) };
                let sure = scene.check(backend, (tokens < 9000).then_some(&mut *rng));
                assert_eq!(sure, batch, "requests of which the formulas are sure, {tokens} tokens, rule {rule}");
            }
        }
    });
}

/// Anything at random, but for rows in which a few tokens have nearly all mass; these are mostly what is drafted, and some of them stop.
fn random_steep(rng: &mut Rng, batch: usize, gamma: usize, tokens: usize) -> Scene {
    let mut scene = random(rng, batch, gamma, 9);
    let few = few_tokens(rng, tokens);
    let [of_target, of_draft] =
        [VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_DRAFT_PROBABILITIES].map(|flag| scene.flags & flag != 0);
    scene.target = steep(rng, &[batch, gamma + 1, tokens], &few, of_target, scene.dtype);
    scene.draft = scene.draft.map(|&x| few.get(x as usize).map_or(x, |&token| token as i64));
    scene.stop = scene.stop.map(|stop| stop.map(|&x| few.get(x as usize).map_or(x, |&token| token as i64)));
    scene.settings.iter_mut().for_each(|s| s.temperature = s.temperature.min(WARMEST));
    // One request at least is drawn.
    scene.settings[0].temperature = 1.0;
    if scene.draft_rows.is_some() {
        // Columns of every other token, and of the few that matter.
        let map = |rng: &mut Rng| {
            let odd = rng.size(0..=1);
            (0..tokens).filter(|&token| token % 2 == odd || few.contains(&token)).collect::<Vec<_>>()
        };
        let map = scene.map.is_some().then(|| map(rng));
        let columns = map.as_ref().map_or(tokens, Vec::len);
        let place = |token: &usize| map.as_ref().map_or(Ok(*token), |map| map.binary_search(token));
        let likely: Vec<usize> = few.iter().map(|token| place(token).expect("a column")).collect();
        scene.draft_rows = Some(steep(rng, &[batch, gamma, columns], &likely, of_draft, scene.draft_dtype));
        scene.map = map.map(|map| map.iter().map(|&token| token as i64).collect());
    }
    scene
}

pub fn is_emulated(backend: &Backend) -> bool {
    backend.times(1000) < 1000
}

/// By COUPLED and greedily, a text is the same in steps of one token and of many.
fn sample_commits_the_same_text_whatever_was_drafted(backend: &Backend) {
    const LENGTH: usize = 24;
    rounds(4, |rng| {
        let tokens = rng.pick(&[5, 60, 5000]);
        let dtype = rng.pick(&[F32, BF16]);
        // The row that decides a position, whatever precedes.
        let rows = logits(rng, &[LENGTH + 8, tokens], dtype);
        let settings =
            Settings { temperature: F32.round(rng.pick(&[0.0, 0.8])), top_p: F32.round(0.9), top_k: 20, ..PLAIN };
        let seed = rng.int(0..=1 << 40);
        let mut text = |gamma: usize| {
            let mut text: Vec<i64> = vec![];
            while text.len() < LENGTH {
                let (at, mut here) = (text.len(), vec![]);
                (0..=gamma).for_each(|r| here.extend_from_slice(rows.row([at + r])));
                let likely = |r: usize| {
                    let row = rows.row([at + r]);
                    (0..tokens).max_by(|&a, &b| row[a].partial_cmp(&row[b]).expect("no NaN")).expect("some") as i64
                };
                let scene = Scene {
                    draft: Array::from_fn(
                        &[1, gamma],
                        |at| if rng.one_in(3) { rng.int(-1..=4) } else { likely(at[1]) },
                    ),
                    target: Array::new(&[1, gamma + 1, tokens], here),
                    settings: vec![settings],
                    seeds: vec![seed],
                    positions: vec![at as i64],
                    ..Scene::plain(dtype, Array::filled(&[1, tokens], 0.0))
                };
                let found = scene.run(backend, None);
                text.extend(found.committed.data.iter().filter(|&&token| token >= 0));
            }
            text.truncate(LENGTH);
            text
        };
        let plain = text(0);
        for gamma in [1, 3, 7] {
            assert_eq!(text(gamma), plain, "{gamma} draft tokens");
        }
    });
}

/// Its place, the batch and the length of other drafts change not one bit.
fn sample_of_a_request_depends_on_no_other(backend: &Backend) {
    rounds(6, |rng| {
        let tokens = rng.pick(&[9, 300]);
        let scene = random(rng, 5, 3, tokens);
        depends_on_no_other(backend, &scene, &[0, 1, 2, 3, 4]);
    });
}

/// Each of some requests, alone, has the bits that it has among all.
pub fn depends_on_no_other(backend: &Backend, scene: &Scene, requests: &[usize]) {
    let [batch, rows, tokens] = scene.target.shape[..] else { panic!("[B, γ+1, V]") };
    let all = scene.run(backend, None);
    for &i in requests {
        let one = |values: &Option<Vec<i64>>| values.as_ref().map(|values| vec![values[i]]);
        let row = |of: &Array<i64>| Array::new(&[1, of.shape[1]], of.row([i]).to_vec());
        let draft_rows = |t: &Array<f64>| Array::new(&[1, t.shape[1], t.shape[2]], t.row([i]).to_vec());
        let alone = Scene {
            draft: row(&scene.draft),
            lens: one(&scene.lens),
            target: Array::new(&[1, rows, tokens], scene.target.row([i]).to_vec()),
            draft_rows: scene.draft_rows.as_ref().map(draft_rows),
            settings: vec![scene.settings[i]],
            seeds: vec![scene.seeds[i]],
            positions: vec![scene.positions[i]],
            stop: scene.stop.as_ref().map(row),
            ignore_stop: one(&scene.ignore_stop),
            remaining: one(&scene.remaining),
            min_remaining: one(&scene.min_remaining),
            ..scene.clone()
        };
        let (found, what) = (alone.run(backend, None), format!("request {i} of {batch}"));
        assert_eq!(found.committed.data, all.committed.row([i]), "{what}");
        assert_eq!(found.logprobs.data, all.logprobs.row([i]), "{what}");
        assert_eq!((found.status[0], found.finish[0]), (all.status[i], all.finish[i]), "{what}");
        assert_eq!((found.accepted[0], found.next_token[0]), (all.accepted[i], all.next_token[i]), "{what}");
    }
}

/// To the bit, margins or not.
fn sample_commits_the_same_tokens_as_on_the_cpu(backend: &Backend) {
    let cpu = Backend::cpu(2);
    rounds(12, |rng| {
        let (batch, gamma) = (rng.size(1..=4), rng.pick(&[0, 1, 4]));
        let tokens = rng.pick(&[3, 200, 4100, 9000]);
        let scene = random(rng, batch, gamma, tokens);
        let scene = if rng.one_in(3) { ragged(rng, scene) } else { scene };
        scene.run(backend, None).assert_same(scene.run(&cpu, None));
    });
}

/// Draft tokens that are refused, in rows of several segments, to the bit: of logits that filters leave by a bound, for which CUDA has a kernel, and by
/// min-p. The last has so many requests that a CTA takes several segments.
fn sample_draws_what_refusals_leave_as_on_the_cpu(backend: &Backend) {
    let cpu = Backend::cpu(2);
    let filtered = Settings { temperature: F32.round(0.7), top_k: 3000, top_p: F32.round(0.98), ..PLAIN };
    let by_weight = Settings { min_p: F32.round(0.01), ..PLAIN };
    rounds(1, |rng| {
        let all = [(F32, PLAIN, 2), (F16, filtered, 2), (BF16, by_weight, 2), (BF16, PLAIN, 140)];
        for (dtype, settings, batch) in all {
            let tokens = 2 * 4096 + rng.size(1..=99);
            let rows = Array::from_fn(&[2, tokens], |_| 2.0 * rng.normal());
            // Requests share rows, with their drafts in other order.
            let mut scene = Scene::plain(dtype, Array::filled(&[batch, 0], 0.0));
            scene.target = Array::from_fn(&[batch, 2, tokens], |at| dtype.round(rows[[at[1], at[2]]]));
            let near = Array::from_fn(&[tokens], |at| dtype.round(rows[[0, at[0]]] + rng.normal()));
            scene.draft_rows = Some(Array::from_fn(&[batch, 1, tokens], |at| near[[at[2]]]));
            scene.draft_dtype = dtype;
            // Of some tokens the one that the draft prefers to the target most.
            let more = |&token: &usize| near[[token]] - rows[[0, token]];
            scene.draft = Array::from_fn(&[batch, 1], |_| {
                let some: Vec<usize> = (0..8).map(|_| rng.size(0..=tokens - 1)).collect();
                some.into_iter().max_by(|a, b| more(a).total_cmp(&more(b))).expect("some") as i64
            });
            (scene.rule, scene.wants_logprobs) = (VWD_ACCEPT_REJECTION, false);
            scene.settings = vec![settings; batch];
            let found = scene.run(backend, None);
            assert!(found.accepted.iter().filter(|&&n| n == 0).count() * 2 >= batch, "{:?}", found.accepted);
            found.assert_same(scene.run(&cpu, None));
        }
    });
}

/// Filters that keep few tokens or thousands, with ties at their bounds, to the bit. The temperature comes last and makes what stays alike,
/// so that a draw tells of the bound.
fn sample_filters_flat_rows_as_on_the_cpu(backend: &Backend) {
    filters_flat_rows(backend, true, &[5000, 12_001]);
}

pub fn filters_flat_rows(backend: &Backend, wants_logprobs: bool, lengths: &[usize]) {
    let cpu = Backend::cpu(2);
    let mut settings = vec![];
    for top_k in [0, 60, 1500, 4000] {
        for top_p in [1.0, 0.9, 0.3] {
            for min_p in [0.0, 0.02] {
                let (top_p, min_p) = (F32.round(top_p), F32.round(min_p));
                settings.push(Settings { temperature: 1e4, top_k, top_p, min_p, temperature_last: true });
            }
        }
    }
    rounds(2, |rng| {
        for dtype in [F32, F16, BF16] {
            let tokens = rng.pick(lengths);
            // Rows of any numbers, of few, of one, of some that weigh nothing, and with ones that take all.
            let row = |rng: &mut Rng, kind: usize| -> Vec<f64> {
                let spread = rng.pick(&[0.3, 2.0, 6.0]);
                let number = |rng: &mut Rng| match kind {
                    0 => rng.normal() * spread,
                    1 => (rng.normal() * spread).round(),
                    2 => -1.5,
                    3 if rng.one_in(2) => rng.pick(&[f64::NEG_INFINITY, -200.0]),
                    4 if rng.one_in(900) => f64::INFINITY,
                    _ => rng.normal(),
                };
                (0..tokens).map(|_| dtype.round(number(rng))).collect()
            };
            let kinds = settings.iter().map(|_| rng.pick(&[0, 0, 0, 1, 1, 2, 3, 4])).collect::<Vec<_>>();
            let rows = kinds.iter().flat_map(|&kind| row(rng, kind)).collect();
            let mut scene = Scene::plain(dtype, Array::new(&[settings.len(), tokens], rows));
            scene.wants_logprobs = wants_logprobs;
            scene.settings = settings.clone();
            scene.seeds = settings.iter().map(|_| rng.int(i64::MIN..=i64::MAX)).collect();
            let (here, there) = (scene.run(backend, None), scene.run(&cpu, None));
            assert_eq!(here.committed.data, there.committed.data, "{dtype:?}, rows of {kinds:?}");
            assert_eq!(here.status, there.status);
        }
    });
}

/// With and without filters, and however few rows there are.
fn sample_without_drafts_draws_the_same_by_every_rule(backend: &Backend) {
    rounds(4, |rng| {
        for batch in [1, 60] {
            let mut scene = random_plain(rng, batch, 0, 4104);
            let filtered = Settings { top_k: 20, ..PLAIN };
            scene.settings.iter_mut().for_each(|s| *s = if rng.one_in(2) { filtered } else { PLAIN });
            let expected = Scene { rule: VWD_ACCEPT_COUPLED, ..scene.clone() }.run(backend, None);
            for rule in [VWD_ACCEPT_AUTO, VWD_ACCEPT_REJECTION] {
                let found = Scene { rule, ..scene.clone() }.run(backend, None);
                assert_eq!((found.next_token, found.status), (expected.next_token.clone(), expected.status.clone()));
            }
        }
    });
}

fn sample_takes_one_row_a_request(backend: &Backend) {
    rounds(3, |rng| {
        let rows = logits(rng, &[5, 40], F32);
        let scene = Scene::plain(F32, rows.clone());
        let expected = scene.run(backend, None).next_token;
        let plain = Layout::default();
        let target = Tensor::floats(backend, F32, &rows, &plain);
        let ints = |values: &[i64]| Tensor::ints(backend, I64, &column(values), &plain);
        let (seeds, positions) = (ints(&scene.seeds), ints(&scene.positions));
        let next_token = Tensor::poisoned(backend, I32, &[5], &plain);
        let args = vwd_verify_sample_args {
            target: target.c(),
            seeds: seeds.c(),
            positions: positions.c(),
            next_token: next_token.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_verify_sample(backend.session(), &args, backend.stream()) });
        assert_eq!(next_token.read_ints().data, expected);
    });
}
