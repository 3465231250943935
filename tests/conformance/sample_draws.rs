//! vwd_verify_sample: how often each token is drawn, with log-probabilities and by the kernels that know none.

use crate::Case;
use crate::draws::{Again, Count, asked, drawer, draws};
use crate::sample::{Scene, is_emulated};
use crate::sampling::{self, PLAIN, Settings, assert_drawn_from, distribution};
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    sample_draws_each_token_as_often_as_it_is_likely,
    sample_draws_each_token_as_often_without_log_probabilities,
    sample_draws_each_token_as_often_as_its_rounded_logit_says,
    sample_draws_each_token_of_long_rows_as_often_as_it_is_likely,
    sample_draws_positions_independently,
];
pub const VARIANTS: &[Case] = cases![
    sample_by_each_variant_draws_each_token_as_often_as_it_is_likely,
    sample_by_each_variant_draws_each_token_of_long_rows_as_often,
];

const EACH: [(&str, u32); 4] =
    [("sample=cluster", 90), ("sample=half_cluster", 90), ("sample=streamed", 90), ("sample=loaded", 80)];

/// So many requests like the first one.
fn place<'b>(scene: &Scene, backend: &'b Backend, batch: usize) -> Box<dyn Again + 'b> {
    let many = Scene {
        draft: Array::filled(&[batch, scene.gamma()], 0),
        settings: vec![scene.settings[0]; batch],
        seeds: vec![0; batch],
        positions: vec![0; batch],
        ..scene.clone()
    };
    Box::new(many.place(backend, None))
}

/// How often each token is the first that is committed, by requests like the scene's whose draft tokens are drawn from q.
fn first_tokens(backend: &Backend, rng: &mut Rng, scene: &Scene, draws: usize, q: &[f64]) -> Vec<u64> {
    let (gamma, draft) = (scene.gamma(), drawer(q));
    let count = Count {
        draws,
        positions: gamma + 1,
        seed: rng.int(0..=i64::MAX) as u64,
        draft: &|rng, tokens| tokens.extend((0..gamma).map(|_| draft(rng))),
        bins: scene.tokens(),
        tally: &|committed, counts| counts[committed[0] as usize] += 1,
    };
    count.of(backend, &|backend, batch| place(scene, backend, batch))
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
            let p = distribution(row, false, &settings).ok().flatten().expect("sure");
            let draws = if row.len() > 99 { draws / 10 } else { draws };
            let counts = first_tokens(backend, rng, &scene, draws, &p);
            assert_drawn_from(&counts, &p, &format!("{settings:?}"));
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
                    let p = distribution(target, false, &settings).ok().flatten().expect("sure");
                    let what = format!("rule {rule}, rows {has_rows}, {settings:?}");
                    assert_drawn_from(&first_tokens(backend, rng, &scene, draws, &q), &p, &what);
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
    let draws = draws(backend, 10_000, 50);
    for (variant, least) in EACH {
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
    let (rows, map) = (scene.draft_rows.as_ref().map(|rows| rows.shape[2]), &scene.map);
    let what = format!(
        "rule {}, {:?}, {} drafts, rows of {rows:?}, map {map:?}, {settings:?}",
        scene.rule,
        scene.dtype,
        scene.gamma()
    );
    assert_drawn_from(&first_tokens(backend, rng, scene, draws, &q), &p, &what);
}

/// Rows of two tokens and of as many as models have, under each of the filters; by rejection sampling the draft's rows are as long.
fn sample_draws_each_token_of_long_rows_as_often_as_it_is_likely(backend: &Backend) {
    rounds(1, |rng| {
        for tokens in [2, 4504, longest(backend)] {
            for settings in LONG_FILTERS {
                for dtype in [F32, BF16] {
                    long_rows_drawn_as_likely(backend, rng, dtype, tokens, false, settings);
                }
            }
            for settings in [PLAIN, FILTERS[1], FILTERS[3], FILTERS[6]] {
                long_rows_drawn_as_likely(backend, rng, BF16, tokens, true, settings);
            }
        }
    });
}

fn sample_by_each_variant_draws_each_token_of_long_rows_as_often(backend: &Backend) {
    for (variant, least) in EACH {
        let Some(forced) = backend.forcing(variant, least..=u32::MAX) else { continue };
        rounds(1, |rng| {
            for settings in LONG_FILTERS {
                long_rows_drawn_as_likely(&forced, rng, BF16, longest(&forced), false, settings);
            }
        });
        forced.assert_ran(variant);
    }
}

/// [`FILTERS`], and a top_k that thousands of tokens share a bound with.
const LONG_FILTERS: [Settings; 8] = {
    let mut filters = [Settings { top_k: 3000, ..PLAIN }; 8];
    let mut n = 0;
    while n < FILTERS.len() {
        filters[n] = FILTERS[n];
        n += 1;
    }
    filters
};

/// Tokens of a row: a model's on a GPU, and where many draws are asked for.
fn longest(backend: &Backend) -> usize {
    if backend.is_cuda() && !is_emulated(backend) || asked().is_some() { 151_936 } else { 8200 }
}

/// Multiples of a quarter, so that bounds of filters lie between tokens that are told apart, or thousands share them. Some 24 tokens have most of the
/// mass, the first and the last of the row among them.
fn long_row(rng: &mut Rng, tokens: usize) -> Vec<f64> {
    let mut row: Vec<f64> = (0..tokens).map(|_| (4.0 * rng.normal()).round() / 4.0).collect();
    let turn = rng.size(0..=23);
    for n in (0..24).filter(|_| tokens > 99) {
        row[n * (tokens - 1) / 23] = 6.0 + ((7 * n + turn) % 24) as f64 / 4.0;
    }
    row
}

/// The first token of requests without drafts, or with one that is drawn from another row.
fn long_rows_drawn_as_likely(
    backend: &Backend,
    rng: &mut Rng,
    dtype: DType,
    tokens: usize,
    has_rows: bool,
    settings: Settings,
) {
    // The CPU takes a second for some thousand rows of a model's.
    let draws = match backend.is_cuda() {
        true => draws(backend, 20_000, 8),
        false => draws(backend, 400, 8).div_ceil(1 + tokens / 2000),
    };
    let (row, drafted) = (long_row(rng, tokens), long_row(rng, tokens));
    let of = |row: &[f64]| distribution(row, false, &settings).ok().flatten().expect("sure");
    let p = of(&row);
    let q = if has_rows { of(&drafted) } else { p.clone() };
    let gamma = has_rows as usize;
    let scene = Scene {
        rule: if has_rows { VWD_ACCEPT_REJECTION } else { VWD_ACCEPT_COUPLED },
        draft: Array::filled(&[1, gamma], 0),
        target: Array::new(&[1, gamma + 1, tokens], row.repeat(gamma + 1)),
        draft_dtype: dtype,
        draft_rows: has_rows.then(|| Array::new(&[1, 1, tokens], drafted)),
        settings: vec![settings],
        wants_logprobs: false,
        ..Scene::plain(dtype, Array::new(&[1, tokens], row))
    };
    let what = format!("{tokens} tokens of {dtype:?}, {gamma} drafts, {settings:?}");
    assert_drawn_from(&first_tokens(backend, rng, &scene, draws, &q), &p, &what);
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
            let token = drawer(&q);
            // For each position after the first and each token of the one before.
            let count = Count {
                draws,
                positions: 3,
                seed: rng.int(0..=i64::MAX) as u64,
                draft: &|rng, tokens| tokens.extend([token(rng), token(rng)]),
                bins: 18,
                tally: &|committed, counts| {
                    for r in (1..3).filter(|&r| committed[r] >= 0) {
                        counts[((r - 1) * 3 + committed[r - 1] as usize) * 3 + committed[r] as usize] += 1;
                    }
                },
            };
            let counts = count.of(backend, &|backend, batch| place(&scene, backend, batch));
            let p = rows.map(|row| distribution(&row, false, &PLAIN).ok().flatten().expect("sure"));
            for (n, counts) in counts.chunks(3).enumerate() {
                let (r, before) = (n / 3 + 1, n % 3);
                assert_drawn_from(counts, &p[r], &format!("rule {rule}, position {r} after {before}"));
            }
        }
    });
}
