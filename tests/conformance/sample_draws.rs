//! vwd_verify_sample: how often each token is drawn, with log-probabilities and by the kernels that know none.

use crate::Case;
use crate::sample::{Scene, is_emulated};
use crate::sampling::{self, PLAIN, Settings, assert_drawn_from, by_threads, distribution};
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    sample_draws_each_token_as_often_as_it_is_likely,
    sample_draws_each_token_as_often_without_log_probabilities,
    sample_draws_each_token_as_often_as_its_rounded_logit_says,
    sample_draws_positions_independently,
];
pub const VARIANTS: &[Case] = cases![sample_by_each_variant_draws_each_token_as_often_as_it_is_likely];

/// How often each distribution is drawn from: VANWARD_DRAWS times where that is given, as `make draws` does.
fn draws(backend: &Backend, usually: usize, emulated: usize) -> usize {
    let given = std::env::var("VANWARD_DRAWS").ok().map(|text| text.parse().expect("VANWARD_DRAWS"));
    given.unwrap_or(if is_emulated(backend) { emulated } else { usually })
}

/// Counts of the first committed tokens of `draws` requests that share rows.
fn count(backend: &Backend, scene: &Scene, draws: usize, mut draft: impl FnMut() -> Vec<i64>) -> Vec<Vec<i64>> {
    const AT_ONCE: usize = 1000;
    let (gamma, tokens) = (scene.gamma(), scene.tokens());
    let chunks = (0..draws).step_by(AT_ONCE).map(|first| {
        let drafts: Vec<_> = (first..draws.min(first + AT_ONCE)).map(|_| draft()).collect();
        (first, drafts)
    });
    let run = |backend: &Backend, (first, drafts): (usize, Vec<Vec<i64>>)| {
        let batch = drafts.len();
        let repeat = |rows: &Array<f64>| {
            let data = (0..batch).flat_map(|_| rows.data.clone()).collect();
            Array::new(&[&[batch], &rows.shape[1..]].concat(), data)
        };
        let many = Scene {
            draft: Array::new(&[batch, gamma], drafts.concat()),
            target: repeat(&Array::new(&[1, gamma + 1, tokens], scene.target.data.clone())),
            draft_rows: scene.draft_rows.as_ref().map(repeat),
            settings: vec![scene.settings[0]; batch],
            // The same seed at every position, or a seed for each request.
            seeds: (0..batch).map(|i| if first % 2000 == 0 { 42 } else { (first + i) as i64 }).collect(),
            positions: (0..batch)
                .map(|i| if first % 2000 == 0 { (first + i) as i64 * (gamma as i64 + 1) } else { 7 })
                .collect(),
            ..scene.clone()
        };
        let found = many.run(backend, None);
        (0..batch).map(|i| found.committed.row([i]).to_vec()).collect::<Vec<_>>()
    };
    by_threads(backend, chunks.collect(), run).concat()
}

fn frequencies(tokens: usize, drawn: impl Iterator<Item = i64>) -> Vec<u64> {
    let mut counts = vec![0; tokens];
    drawn.for_each(|token| counts[token as usize] += 1);
    counts
}

fn sample_draws_each_token_as_often_as_it_is_likely(backend: &Backend) {
    let draws = draws(backend, 40_000, 100);
    rounds(1, |rng| {
        let likely: Vec<f64> =
            (0..9).map(|j| [2.0, 1.0, 1.0, 0.0, -1.0, 3.0, -2.0, 0.5, f64::NEG_INFINITY][j]).collect();
        let elsewhere: Vec<f64> = (0..9).map(|j| if j < 4 { -30.0 } else { 0.3 * j as f64 }).collect();
        let one_hot: Vec<f64> = (0..9).map(|j| if j == 4 { 0.0 } else { f64::NEG_INFINITY }).collect();
        let two = vec![0.3, -0.4];
        let long: Vec<f64> = (0..4500).map(|j| if j % 300 == 0 { (j % 7) as f64 } else { -9.0 }).collect();
        let last = Settings { temperature: 2.0, temperature_last: true, top_p: 0.8, ..PLAIN };
        let filters = [
            PLAIN,
            Settings { temperature: 0.6, ..PLAIN },
            Settings { top_k: 3, ..PLAIN },
            Settings { top_p: 0.7, ..PLAIN },
            Settings { min_p: 0.2, temperature: 1.7, ..PLAIN },
            last,
        ];
        // Plain sampling.
        for (row, settings) in
            filters.map(|s| (&likely, s)).into_iter().chain([(&two, PLAIN), (&one_hot, PLAIN), (&long, PLAIN)])
        {
            let mut scene = Scene::plain(F32, Array::new(&[1, row.len()], row.clone()));
            scene.settings = vec![settings];
            let all = count(backend, &scene, if row.len() > 99 { draws / 10 } else { draws }, Vec::new);
            let p = distribution(row, false, &settings).ok().flatten().expect("sure");
            assert_drawn_from(&frequencies(row.len(), all.iter().map(|c| c[0])), &p, &format!("{settings:?}"));
        }
        // Verification, of drafts drawn from q by other random numbers.
        let no_rows: [(&Vec<f64>, &Vec<f64>); 3] = [(&likely, &likely), (&likely, &elsewhere), (&likely, &one_hot)];
        for (target, draft) in no_rows {
            for (rule, has_rows) in
                [(VWD_ACCEPT_COUPLED, false), (VWD_ACCEPT_REJECTION, false), (VWD_ACCEPT_REJECTION, true)]
            {
                for settings in [PLAIN, filters[3]] {
                    let mut scene = Scene::plain(F32, Array::new(&[1, 9], target.clone()));
                    let q = distribution(draft, false, &settings).ok().flatten().expect("sure");
                    scene.rule = rule;
                    scene.settings = vec![settings];
                    scene.draft = Array::new(&[1, 1], vec![0]);
                    scene.target = Array::new(&[1, 2, 9], [target.clone(), target.clone()].concat());
                    scene.draft_rows = has_rows.then(|| Array::new(&[1, 1, 9], draft.clone()));
                    let all =
                        count(backend, &scene, draws, || vec![sampling::draw(&q, rng.unit()).map_or(4, |j| j as i64)]);
                    let p = distribution(target, false, &settings).ok().flatten().expect("sure");
                    let what = format!("rule {rule}, rows {has_rows}, {settings:?}");
                    assert_drawn_from(&frequencies(9, all.iter().map(|c| c[0])), &p, &what);
                }
            }
        }
    });
}

fn sample_draws_each_token_as_often_without_log_probabilities(backend: &Backend) {
    let draws = draws(backend, 10_000, 100);
    rounds(1, |rng| draws_as_likely(backend, rng, draws));
}

/// Filters or none of them: the kernels of each variant.
fn sample_by_each_variant_draws_each_token_as_often_as_it_is_likely(backend: &Backend) {
    let variants =
        [("sample=cluster", 90), ("sample=half_cluster", 90), ("sample=streamed", 90), ("sample=loaded", 80)];
    let draws = draws(backend, 10_000, 50);
    for (variant, least) in variants {
        let Some(forced) = backend.forcing(variant, least..=u32::MAX) else { continue };
        rounds(1, |rng| match variant {
            "sample=cluster" | "sample=half_cluster" => {
                FILTERS.iter().for_each(|&filter| plain_draws_as_likely(&forced, rng, draws, filter))
            }
            _ => draws_as_likely(&forced, rng, draws),
        });
        forced.assert_ran(variant);
    }
}

/// A filter at a time, and all at once.
const FILTERS: [Settings; 7] = [
    PLAIN,
    Settings { temperature: 0.625, ..PLAIN },
    Settings { top_k: 3, ..PLAIN },
    Settings { top_p: 0.75, ..PLAIN },
    Settings { min_p: 0.25, temperature: 1.5, ..PLAIN },
    Settings { temperature: 2.0, temperature_last: true, top_p: 0.875, ..PLAIN },
    Settings { temperature: 1.25, top_k: 5, top_p: 0.875, min_p: 0.0625, ..PLAIN },
];
/// Rows of 48 bytes, which bulk copies can bring, of target and of draft.
const LIKELY: [f64; 12] = [2.0, 1.0, 1.0, 0.0, -1.0, 3.0, -2.0, 0.5, f64::NEG_INFINITY, 0.25, 1.5, -0.5];
const DRAFTED: [f64; 12] = [-9.0, -9.0, 1.0, 0.5, 0.0, 1.0, 0.5, 1.5, 1.0, 0.5, f64::NEG_INFINITY, -0.5];

/// One row, or a draft token that is tried before the second, whose draft says nothing of how it was found.
fn plain_draws_as_likely(backend: &Backend, rng: &mut Rng, draws: usize, settings: Settings) {
    for gamma in [0, 1] {
        let scene = drafted(VWD_ACCEPT_COUPLED, false, gamma, settings);
        drawn_as_likely(backend, rng, draws, &scene);
    }
}

/// Under each of the filters: one row, and a draft token by each rule, with its row and without.
fn draws_as_likely(backend: &Backend, rng: &mut Rng, draws: usize) {
    for settings in FILTERS {
        plain_draws_as_likely(backend, rng, draws, settings);
        for has_rows in [false, true] {
            let scene = drafted(VWD_ACCEPT_REJECTION, has_rows, 1, settings);
            drawn_as_likely(backend, rng, draws, &scene);
        }
        // A drafter that knows a third of the tokens.
        let mut scene = drafted(VWD_ACCEPT_REJECTION, true, 1, settings);
        scene.map = Some(vec![1, 3, 7, 9]);
        scene.draft_rows = Some(Array::new(&[1, 1, 4], DRAFTED[..4].to_vec()).map(|x| x.max(-1.0)));
        drawn_as_likely(backend, rng, draws, &scene);
    }
}

/// Logits of 16 bits, which are multiples of a half where they are this large.
fn sample_draws_each_token_as_often_as_its_rounded_logit_says(backend: &Backend) {
    let draws = draws(backend, 10_000, 50);
    rounds(1, |rng| {
        for (dtype, up) in [(F16, 1000.0), (BF16, 100.0)] {
            for settings in [PLAIN, FILTERS[3]] {
                for (rule, has_rows, gamma) in
                    [(VWD_ACCEPT_COUPLED, false, 0), (VWD_ACCEPT_COUPLED, false, 1), (VWD_ACCEPT_REJECTION, true, 1)]
                {
                    let scene = drafted(rule, has_rows, gamma, settings);
                    let rounded = |rows: &Array<f64>| rows.map(|x| dtype.round(x + up + 0.3));
                    let draft_rows = scene.draft_rows.as_ref().map(rounded);
                    let scene =
                        Scene { dtype, draft_dtype: dtype, target: rounded(&scene.target), draft_rows, ..scene };
                    drawn_as_likely(backend, rng, draws, &scene);
                }
            }
        }
    });
}

/// A request whose tokens all have the distribution of LIKELY; nothing else is wanted of it.
fn drafted(rule: u32, has_rows: bool, gamma: usize, settings: Settings) -> Scene {
    Scene {
        rule,
        draft: Array::filled(&[1, gamma], 0),
        target: Array::new(&[1, gamma + 1, LIKELY.len()], LIKELY.repeat(gamma + 1)),
        draft_rows: has_rows.then(|| Array::new(&[1, gamma, DRAFTED.len()], DRAFTED.repeat(gamma))),
        settings: vec![settings],
        wants_logprobs: false,
        ..Scene::plain(F32, Array::new(&[1, LIKELY.len()], LIKELY.to_vec()))
    }
}

/// The first token of a request like [`drafted`], whose drafts are drawn as their rows say.
fn drawn_as_likely(backend: &Backend, rng: &mut Rng, draws: usize, scene: &Scene) {
    let (tokens, settings) = (scene.tokens(), scene.settings[0]);
    let p = distribution(scene.target.row([0, 0]), false, &settings).ok().flatten().expect("sure");
    let row = scene.draft_rows.as_ref().map_or(&DRAFTED[..], |rows| rows.row([0, 0]));
    let map = scene.map.clone().unwrap_or((0..tokens as i64).collect());
    let (q, _) = sampling::drafted(row, &map, tokens, false, &settings).expect("sure");
    let draft = |rng: &mut Rng| sampling::draw(&q, rng.unit()).map_or(7, |j| j as i64);
    let all = count(backend, scene, draws, || (0..scene.gamma()).map(|_| draft(rng)).collect());
    let (rows, map) = (scene.draft_rows.as_ref().map(|rows| rows.shape[2]), &scene.map);
    let what = format!(
        "rule {}, {:?}, {} drafts, rows of {rows:?}, map {map:?}, {settings:?}",
        scene.rule,
        scene.dtype,
        scene.gamma()
    );
    assert_drawn_from(&frequencies(tokens, all.iter().map(|c| c[0])), &p, &what);
}

/// One random number must not decide at two positions, or twice at one.
fn sample_draws_positions_independently(backend: &Backend) {
    let draws = draws(backend, 40_000, 100);
    rounds(1, |rng| {
        let rows = [[0.5, 0.0, -0.4], [0.0, 0.7, 0.1], [0.2, 0.2, 0.9]];
        let q = [0.4, 0.3, 0.3];
        for (rule, has_rows) in
            [(VWD_ACCEPT_COUPLED, false), (VWD_ACCEPT_REJECTION, false), (VWD_ACCEPT_REJECTION, true)]
        {
            let mut scene = Scene::plain(F32, Array::new(&[1, 3], rows[0].to_vec()));
            scene.rule = rule;
            scene.draft = Array::filled(&[1, 2], 0);
            scene.target = Array::new(&[1, 3, 3], rows.concat());
            scene.flags = VWD_SAMPLE_DRAFT_PROBABILITIES;
            scene.draft_rows = has_rows.then(|| Array::new(&[1, 2, 3], [q, q].concat()));
            let mut token = || sampling::draw(&q, rng.unit()).map_or(0, |j| j as i64);
            let all = count(backend, &scene, draws, || vec![token(), token()]);
            let p = rows.map(|row| distribution(&row, false, &PLAIN).ok().flatten().expect("sure"));
            for r in 1..3 {
                for before in 0..3 {
                    let here = all.iter().filter(|c| c[r] >= 0 && c[r - 1] == before).map(|c| c[r]);
                    assert_drawn_from(
                        &frequencies(3, here),
                        &p[r],
                        &format!("rule {rule}, position {r} after {before}"),
                    );
                }
            }
        }
    });
}
