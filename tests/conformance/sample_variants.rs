//! vwd_verify_sample by each of its variants, forced: the same tokens as on the CPU, to the bit.

use crate::Case;
use crate::sample::{
    Scene, depends_on_no_other, filters_flat_rows, is_emulated, random, random_filtered, random_plain,
};
use crate::sampling::{PLAIN, Settings};
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    sample_by_each_variant_commits_the_same_tokens_as_on_the_cpu,
    sample_filters_flat_rows_by_each_variant_as_on_the_cpu,
    sample_by_top_p_alone_commits_the_same_tokens_as_on_the_cpu,
    sample_finds_bounds_of_top_p_that_a_part_of_the_row_misleads_about,
    sample_finds_bounds_of_top_p_where_masses_are_all_but_equal,
    sample_by_each_variant_accepts_more_drafts_than_a_warp_has_lanes,
    sample_of_a_request_depends_on_no_other_by_each_variant,
    sample_of_a_request_depends_on_no_other_among_many,
];

/// Sessions that take each variant, where the device has it.
pub fn by_variant(backend: &Backend) -> impl Iterator<Item = (&'static str, Backend)> {
    [("sample=cluster", 90), ("sample=half_cluster", 90), ("sample=streamed", 90), ("sample=loaded", 80)]
        .into_iter()
        .filter_map(|(variant, least)| Some((variant, backend.forcing(variant, least..=u32::MAX)?)))
}

fn has_clusters(variant: &str) -> bool {
    variant.ends_with("cluster")
}

fn sample_by_each_variant_commits_the_same_tokens_as_on_the_cpu(backend: &Backend) {
    let cpu = Backend::cpu(2);
    for (variant, forced) in by_variant(backend) {
        rounds(16, |rng| {
            let scene = if has_clusters(variant) || rng.one_in(2) { plain(rng) } else { aligned(rng) };
            scene.run(&forced, None).assert_same(scene.run(&cpu, None));
        });
        if has_clusters(variant) {
            // So long that a CTA has four segments, or eight.
            rounds(2, |rng| {
                let scene = random_plain(rng, 1, 1, 135_176);
                scene.run(&forced, None).assert_same(scene.run(&cpu, None));
            });
        }
        forced.assert_ran(variant);
    }
}

/// Greedy rows of 64 drafts: one request accepts all, the others all up to one past the first 32.
fn sample_by_each_variant_accepts_more_drafts_than_a_warp_has_lanes(backend: &Backend) {
    let cpu = Backend::cpu(2);
    let gamma = 64;
    for (variant, forced) in by_variant(backend) {
        rounds(1, |rng| {
            let mut scene = random_plain(rng, 3, gamma, 264);
            scene.settings = vec![Settings { temperature: 0.0, ..PLAIN }; 3];
            (scene.lens, scene.remaining, scene.stop) = (None, None, None);
            let largest = |i: usize, r: usize| {
                let row = scene.target.row([i, r]);
                row.iter().enumerate().fold(0, |best, (token, x)| if *x > row[best] { token } else { best }) as i64
            };
            let mut draft = Array::from_fn(&[3, gamma], |at| largest(at[0], at[1]));
            let refused = [gamma, 32, rng.size(33..=gamma - 1)];
            for (i, &r) in refused.iter().enumerate().skip(1) {
                draft.data[i * gamma + r] = (draft.data[i * gamma + r] + 1) % 264;
            }
            scene.draft = draft;
            let found = scene.run(&forced, None);
            assert_eq!(found.accepted, refused.map(|r| r as i64));
            found.assert_same(scene.run(&cpu, None));
        });
        forced.assert_ran(variant);
    }
}

/// Rows of which the filters' bounds are found among few candidates, and others that are searched for them.
fn sample_filters_flat_rows_by_each_variant_as_on_the_cpu(backend: &Backend) {
    let cpu = Backend::cpu(2);
    for (variant, forced) in by_variant(backend) {
        filters_flat_rows(&forced, false, &[5000, 12_000, 40_000]);
        if has_clusters(variant) {
            // So long that a CTA has four segments, or eight.
            rounds(2, |rng| {
                let scene = random_filtered(rng, 1, 1, 135_176);
                scene.run(&forced, None).assert_same(scene.run(&cpu, None));
            });
        }
        forced.assert_ran(variant);
    }
}

/// Top-p alone, for which some calls have a kernel of their own: rows of any length, and with anything in them.
fn sample_by_top_p_alone_commits_the_same_tokens_as_on_the_cpu(backend: &Backend) {
    let cpu = Backend::cpu(2);
    for (variant, forced) in by_variant(backend) {
        rounds(8, |rng| {
            let mut scene = plain(rng);
            for settings in &mut scene.settings {
                let top_p = F32.round(rng.pick(&[1.0, 0.99, 0.9, 0.3, 0.0]));
                *settings = Settings { top_k: 0, min_p: 0.0, top_p, ..*settings };
            }
            scene.run(&forced, None).assert_same(scene.run(&cpu, None));
        });
        forced.assert_ran(variant);
    }
}

/// Top-p alone, to the bit. Of long rows kernels look at a part first, to guess where the bound is; here the rest of the row is nothing like that part, or
/// has far more tokens that may stay. As in [`filters_flat_rows`] a draw tells of the bound where the temperature comes last.
fn sample_finds_bounds_of_top_p_that_a_part_of_the_row_misleads_about(backend: &Backend) {
    let cpu = Backend::cpu(2);
    for (variant, forced) in by_variant(backend) {
        for wants_logprobs in [false, true].into_iter().take(if has_clusters(variant) { 1 } else { 2 }) {
            rounds(1, |rng| {
                let dtype = rng.pick(&[F32, F16, BF16]);
                let short = rng.pick(&[16_008, 24_000, 40_000]);
                for (tokens, temperature_last) in [(short, true), (short, false), (rng.pick(&[72_000, 74_248]), true)] {
                    let rows: Vec<_> = MISLEADING.iter().map(|row| row(rng, tokens)).collect();
                    let settings: Vec<_> = (0..2 * rows.len())
                        .map(|n| Settings {
                            temperature: if temperature_last { 1e4 } else { 0.8 },
                            top_p: F32.round([0.3, 0.95][n % 2]),
                            temperature_last,
                            ..PLAIN
                        })
                        .collect();
                    let rows = rows.into_iter().flat_map(|row| [row.clone(), row]).flatten().map(|x| dtype.round(x));
                    let mut scene = Scene::plain(dtype, Array::new(&[settings.len(), tokens], rows.collect()));
                    scene.seeds = settings.iter().map(|_| rng.int(i64::MIN..=i64::MAX)).collect();
                    (scene.settings, scene.wants_logprobs) = (settings, wants_logprobs);
                    let (here, there) = (scene.run(&forced, None), scene.run(&cpu, None));
                    assert_eq!(here.committed.data, there.committed.data, "{dtype:?}, {tokens} tokens, {variant}");
                    assert_eq!(here.status, there.status);
                }
            });
        }
        forced.assert_ran(variant);
    }
}

/// A row's mass is half that of its likeliest tokens, or all but half: a sum that is off by a part in millions would tell another bound.
fn sample_finds_bounds_of_top_p_where_masses_are_all_but_equal(backend: &Backend) {
    let cpu = Backend::cpu(2);
    // Weights are 1, 1/2, and nothing.
    let temperature = F32.round(std::f64::consts::LOG2_E);
    let (half, step) = (0.5, f32::EPSILON as f64 / 2.0);
    for (variant, forced) in by_variant(backend) {
        rounds(1, |rng| {
            for dtype in [F32, F16, BF16] {
                let tokens = 16_000;
                let mut row: Vec<f64> = (0..tokens).map(|n| [0.0, -1.0, -60.0][(n / 2000 + 1).min(5) / 2]).collect();
                rng.shuffle(&mut row);
                let settings =
                    [half - step / 2.0, half, half + step].map(|top_p| Settings { temperature, top_p, ..PLAIN });
                let settings: Vec<_> = (0..24).map(|n| settings[n % 3]).collect();
                let mut scene = Scene::plain(dtype, Array::new(&[settings.len(), tokens], row.repeat(settings.len())));
                scene.seeds = settings.iter().map(|_| rng.int(i64::MIN..=i64::MAX)).collect();
                (scene.settings, scene.wants_logprobs) = (settings, false);
                let found = scene.run(&forced, None);
                let is_less_likely = |n: usize| row[found.committed.data[n] as usize] < 0.0;
                assert!((0..24).filter(|n| n % 3 != 2).all(|n| !is_less_likely(n)), "{dtype:?}, {variant}");
                assert!((0..24).any(is_less_likely), "{dtype:?}, {variant}");
                found.assert_same(scene.run(&cpu, None));
            }
        });
        forced.assert_ran(variant);
    }
}

/// Whether a token is in the part of a row that a kernel looks at first: 1024 strips of eight, evenly spaced.
fn is_looked_at(token: usize, tokens: usize) -> bool {
    let strips = tokens / 8;
    let first = (token / 8 * 1024).div_ceil(strips);
    first < 1024 && strips * first / 1024 == token / 8
}

/// Rows whose numbers are not those of the part that is looked at. The first ones have a few likely tokens in that part, and all others elsewhere,
/// so that a guess by that part is above the bound.
const MISLEADING: &[fn(&mut Rng, usize) -> Vec<f64>] = &[
    |rng, tokens| {
        unlike(tokens, || if rng.one_in(60) { 0.0 } else { -30.0 }, |token| if token % 256 < 8 { 0.0 } else { -1.5 })
    },
    |rng, tokens| {
        unlike(tokens, || if rng.one_in(60) { 0.0 } else { -30.0 }, |token| if token % 256 < 8 { 0.0 } else { -3.0 })
    },
    // Too many to list, of which the part has none: ties at the bound, or not.
    |rng, tokens| unlike(tokens, || if rng.one_in(400) { 0.0 } else { -30.0 }, |_| 0.0),
    |rng, tokens| {
        let noise: Vec<f64> = (0..tokens).map(|_| rng.normal()).collect();
        unlike(tokens, || if rng.one_in(400) { 4.0 } else { -30.0 }, |token| noise[token])
    },
    // The part has what stays, and the rest nothing.
    |rng, tokens| unlike(tokens, || rng.normal(), |_| f64::NEG_INFINITY),
    |_, tokens| vec![-1.5; tokens],
    |rng, tokens| (0..tokens).map(|token| if token == tokens / 3 { 1000.0 } else { rng.normal() }).collect(),
    |rng, tokens| (0..tokens).map(|_| if rng.one_in(50) { f64::NAN } else { rng.normal() * 3.0 }).collect(),
    |rng, tokens| (0..tokens).map(|token| if token < 5000 { rng.normal() * 3.0 } else { f64::NEG_INFINITY }).collect(),
    |rng, tokens| (0..tokens).map(|_| if rng.one_in(2) { 8.0 } else { -8.0 } + rng.normal()).collect(),
    |rng, tokens| (0..tokens).map(|_| (rng.normal() * 2.0).round()).collect(),
    |rng, tokens| (0..tokens).map(|_| if rng.one_in(tokens) { f64::INFINITY } else { rng.normal() }).collect(),
];

/// A row with numbers of its own where it is looked at first.
fn unlike(tokens: usize, mut looked_at: impl FnMut() -> f64, other: impl Fn(usize) -> f64) -> Vec<f64> {
    (0..tokens).map(|token| if is_looked_at(token, tokens) { looked_at() } else { other(token) }).collect()
}

/// Without log-probabilities, whose kernels are others: rows of several segments, and requests of several rows.
fn sample_of_a_request_depends_on_no_other_by_each_variant(backend: &Backend) {
    for (variant, forced) in by_variant(backend) {
        rounds(4, |rng| {
            let tokens = rng.pick(&[304, 8200, 20_008]);
            let scene = match has_clusters(variant) || rng.one_in(2) {
                true if rng.one_in(2) => random_filtered(rng, 5, 3, tokens),
                true => random_plain(rng, 5, 3, tokens),
                false => Scene { wants_logprobs: false, ..random_in_whole_words(rng, 5, 3, tokens) },
            };
            depends_on_no_other(&forced, &scene, &[0, 1, 2, 3, 4]);
        });
        forced.assert_ran(variant);
    }
}

/// As many rows as a GPU has streamed; of one request alone they are so few that a cluster takes each.
fn sample_of_a_request_depends_on_no_other_among_many(backend: &Backend) {
    let (batch, tokens) = if is_emulated(backend) { (7, 4104) } else { (240, 8192) };
    rounds(1, |rng| {
        let scene = random_plain(rng, batch, 3, tokens);
        let target = scene.target.map(|&x| BF16.round(x));
        let scene =
            Scene { rule: VWD_ACCEPT_COUPLED, dtype: BF16, target, settings: vec![PLAIN; batch], lens: None, ..scene };
        depends_on_no_other(backend, &scene, &[0, batch / 2, batch - 1]);
    });
}

/// Anything at random whose rows lie as bulk copies need them: a segment or several, the last one of any length; some with numbers that
/// are none, and rows that nothing can be drawn from.
fn aligned(rng: &mut Rng) -> Scene {
    let (batch, gamma) = (rng.size(1..=5), rng.pick(&[0, 1, 4]));
    let is_flat = rng.one_in(3);
    let tokens = if is_flat { rng.pick(&[1, 7, 4097, 5003]) } else { rng.pick(&[8, 256, 4096, 4104, 12_296]) };
    let mut scene = random_in_whole_words(rng, batch, gamma, tokens);
    scene.wants_logprobs = rng.one_in(2);
    hostile(rng, scene, is_flat)
}

/// Anything at random whose rows of drafts, if there are any, begin and end on 16 bytes.
fn random_in_whole_words(rng: &mut Rng, batch: usize, gamma: usize, tokens: usize) -> Scene {
    loop {
        let scene = random(rng, batch, gamma, tokens);
        if scene.draft_rows.as_ref().is_none_or(|rows| (rows.shape[2] * scene.draft_dtype.bytes()).is_multiple_of(16)) {
            break scene;
        }
    }
}

/// What one launch takes: rows of a segment, and of so many that a cluster's CTAs have two, four or eight of them, the last one of any length. A warp cannot end
/// more than 32 rows of a request.
fn plain(rng: &mut Rng) -> Scene {
    let (batch, gamma) = (rng.size(1..=5), rng.pick(&[0, 1, 4, 31, 32]));
    let is_flat = rng.one_in(3);
    let few = if is_flat { [1, 7, 4097, 5003] } else { [8, 4096, 4104, 12_296] };
    let tokens = match rng.one_in(6) {
        true => rng.pick(&[131_072, 135_176]),
        false => rng.pick(&few),
    };
    let (batch, gamma) = if tokens > 100_000 { (1, gamma.min(1)) } else { (batch, gamma) };
    let tokens = if gamma > 4 { tokens.min(4104) } else { tokens };
    let scene = if rng.one_in(2) { random_plain } else { random_filtered }(rng, batch, gamma, tokens);
    hostile(rng, scene, is_flat)
}

/// The scene with its rows in one run if `is_flat`, numbers that are none, and rows that nothing can be drawn from.
fn hostile(rng: &mut Rng, mut scene: Scene, is_flat: bool) -> Scene {
    let [batch, rows, tokens] = scene.target.shape[..] else { unreachable!("[B, γ+1, V]") };
    if is_flat {
        scene.target_gap = tokens.next_multiple_of(8) - tokens;
        scene.begin = Some((0..batch as i64).map(|i| i * rows as i64).collect());
    }
    if rng.one_in(3) {
        scene.target.data.iter_mut().for_each(|x| *x = if rng.one_in(300) { f64::NAN } else { *x });
    }
    if rng.one_in(4) {
        let row = rng.size(0..=batch * rows - 1) * tokens;
        scene.target.data[row..row + tokens].fill(f64::NEG_INFINITY);
    }
    scene
}
