//! vwd_verify_sample: where requests end, what cannot be drawn, and what is never accepted.

use crate::Case;
use crate::sample::{Scene, is_emulated};
use crate::sampling::{self, PLAIN, Settings, uniform};
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    sample_cuts_at_stops_and_lengths,
    sample_tells_what_cannot_be_drawn,
    sample_accepts_by_probability_at_the_ends,
    sample_tells_of_weights_that_leave_nothing_or_are_none,
    sample_never_accepts_what_the_target_excludes,
    sample_takes_filters_that_are_no_numbers_as_off,
];

/// Every index of a stop token, every budget and every minimum, against a loop over tokens.
fn sample_cuts_at_stops_and_lengths(backend: &Backend) {
    rounds(1, |rng| {
        let tokens = 12;
        for gamma in 0..=if is_emulated(backend) { 2 } else { 4 } {
            let combinations: Vec<[i64; 4]> = (0..=gamma as i64 + 1)
                .flat_map(|at| {
                    (-1..=gamma as i64 + 2).flat_map(move |left| {
                        let kinds = move |least| (0..2).map(move |kind| [at, left, least, kind]);
                        (0..=gamma as i64 + 1).flat_map(kinds)
                    })
                })
                .collect();
            let batch = combinations.len();
            // Greedy rows that prefer token r + 2 and then token 1; drafts that are all accepted, or but for the last.
            let target = Array::from_fn(&[batch, gamma + 1, tokens], |at| match at[2] {
                token if token == at[1] + 2 => 5.0,
                1 => 4.0,
                _ => rng.unit(),
            });
            let of = |n: usize| Some(combinations.iter().map(|c| c[n]).collect::<Vec<i64>>());
            let scene = Scene {
                rule: VWD_ACCEPT_GREEDY,
                draft: Array::from_fn(&[batch, gamma], |at| match combinations[at[0]][3] {
                    1 if at[1] + 1 == gamma => 0,
                    _ => at[1] as i64 + 2,
                }),
                target: target.map(|&x| F32.round(x)),
                settings: vec![PLAIN; batch],
                seeds: vec![0; batch],
                positions: vec![0; batch],
                stop: Some(Array::from_fn(&[batch, 2], |at| if at[1] == 0 { combinations[at[0]][0] + 2 } else { -1 })),
                remaining: of(1),
                min_remaining: of(2),
                ..Scene::plain(F32, Array::filled(&[batch, tokens], 0.0))
            };
            assert_eq!(scene.check(backend, None), batch);
        }
    });
}

fn sample_tells_what_cannot_be_drawn(backend: &Backend) {
    let (none, infinite, nan) = (f64::NEG_INFINITY, f64::INFINITY, f64::NAN);
    let rows = [
        [none, none, none, none, none],
        [nan, nan, none, nan, none],
        [nan, 1.0, 2.0, none, 0.0],
        [infinite, 1.0, nan, infinite, 3.0],
        [-3e38, 3e38, -0.0, 0.0, none],
        [none, none, none, none, -3e38],
        [65504.0, -65504.0, 65504.0, none, none],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ];
    for temperature in [1.0, 0.0, 1e-6, 1e4, 1e-5, f64::INFINITY, nan] {
        for filters in [PLAIN, Settings { top_k: 2, top_p: F32.round(0.6), min_p: F32.round(0.1), ..PLAIN }] {
            let mut scene =
                Scene::plain(F32, Array::new(&[8, 5], rows.concat().iter().map(|&x| F32.round(x)).collect()));
            scene.settings = vec![Settings { temperature: F32.round(temperature), ..filters }; 8];
            let found = scene.run(backend, None);
            let what = format!("temperature {temperature}, {filters:?}");
            assert_eq!(found.status, [2, 3, 1, 1, 0, 0, 0, 0], "{what}");
            assert_eq!(found.next_token[..2], [-1, -1], "{what}");
            assert_eq!(found.committed_len, [0, 0, 1, 1, 1, 1, 1, 1], "{what}");
            assert!([0, 3].contains(&found.next_token[3]), "{what}: only infinite logits are drawn");
            // At an infinite temperature all finite logits are alike.
            let is_flat = temperature.is_infinite();
            let is_likely = found.next_token[5] == 4 && (is_flat || [0, 2].contains(&found.next_token[6]));
            assert!(is_likely, "{what}: {:?}", found.next_token);
            let is_greedy = temperature.is_nan() || (F32.round(temperature) as f32) < 1e-5;
            if is_greedy {
                assert_eq!(found.next_token[2..], [2, 0, 1, 4, 0, 0], "{what}: the lowest of the largest");
            }
        }
    }
    // A row in the middle ends the walk; so does one that target does not have.
    let mut scene = Scene::plain(F32, Array::filled(&[2, 4], 0.0));
    scene.rule = VWD_ACCEPT_GREEDY;
    scene.draft = Array::filled(&[2, 2], 3);
    let row = |best: usize| Array::from_fn(&[4], |at| if at[0] == best { 1.0 } else { 0.0 }).data;
    scene.target = Array::new(&[2, 3, 4], [row(3), vec![nan; 4], row(3), row(3), row(3), row(1)].concat());
    let found = scene.run(backend, None);
    assert_eq!(found.committed.data, [3, -1, -1, 3, 3, 1]);
    assert_eq!((found.status, found.accepted, found.next_token), (vec![3, 0], vec![1, 2], vec![-1, 1]));
    scene.begin = Some(vec![5, i64::MIN]);
    let found = scene.run(backend, None);
    assert_eq!((found.committed.data, found.status), (vec![1, -1, -1, -1, -1, -1], vec![0, 8]));
    scene.begin = Some(vec![3, 4]);
    let found = scene.run(backend, None);
    assert_eq!((found.committed.data, found.status), (vec![3, 3, 1, 3, 1, -1], vec![0, 0]));
    scene.begin = Some(vec![i64::MAX, 4]);
    scene.draft = Array::new(&[2, 2], vec![0, 0, 3, 1]);
    let found = scene.run(backend, None);
    assert_eq!((found.committed.data, found.status), (vec![-1, -1, -1, 3, 1, -1], vec![8, 8]));
}

/// p = 0 is refused however small u is, q = 0 among them, and q = 0 is accepted however large u is where p has the token.
fn sample_accepts_by_probability_at_the_ends(backend: &Backend) {
    let small = (0..).find(|&seed| uniform(seed, 100, 0, 0) < 1e-5).expect("one of 10^5");
    let large = (0..).find(|&seed| uniform(seed, 100, 0, 0) > 1.0 - 1e-5).expect("one of 10^5");
    let mut scene = Scene::plain(F32, Array::filled(&[4, 3], 0.0));
    scene.rule = VWD_ACCEPT_REJECTION;
    scene.flags = VWD_SAMPLE_TARGET_PROBABILITIES | VWD_SAMPLE_DRAFT_PROBABILITIES;
    scene.draft = Array::new(&[4, 1], vec![0, 0, 1, 2]);
    let row = [0.0, 0.25, 0.75];
    scene.target = Array::new(&[4, 2, 3], [row; 8].concat());
    // Equal distributions are accepted always; the last has no token where the target has more.
    scene.draft_rows = Some(Array::new(&[4, 1, 3], [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0], row].concat()));
    scene.seeds = vec![small, large, large, large];
    let found = scene.run(backend, None);
    assert_eq!(found.accepted, [0, 0, 1, 1]);
    assert!(found.next_token.iter().all(|token| [1, 2].contains(token)), "{:?}", found.next_token);
    assert_eq!(found.status, [0; 4]);
}

/// Drafts that are as likely as the target would have them, but for a token that neither gives: nothing is left that is likelier in the target.
/// Next to them, negative probabilities in a row of either.
fn sample_tells_of_weights_that_leave_nothing_or_are_none(backend: &Backend) {
    let mut scene = Scene::plain(F32, Array::filled(&[4, 3], 0.0));
    scene.rule = VWD_ACCEPT_REJECTION;
    scene.flags = VWD_SAMPLE_TARGET_PROBABILITIES | VWD_SAMPLE_DRAFT_PROBABILITIES;
    scene.draft = Array::new(&[4, 1], vec![2, 2, 0, 0]);
    let row = [0.25, 0.75, 0.0];
    let target = [row, row, [-0.5, 0.0, 0.5], row];
    scene.target = Array::from_fn(&[4, 2, 3], |at| target[at[0]][at[2]]);
    scene.draft_rows = Some(Array::new(&[4, 1, 3], [row, [0.5, 0.5, 0.0], row, [0.25, -0.25, 0.0]].concat()));
    let found = scene.run(backend, None);
    let (nothing, negative) = (VWD_SAMPLE_NO_RESIDUAL as i64, VWD_SAMPLE_NAN as i64);
    assert_eq!(found.status, [nothing, 0, negative, negative]);
    // What is drawn without a residual is what the target's row gives; a negative weight is none.
    let drawn = sampling::draw(&row, uniform(scene.seeds[0], 100, 1, 0)).expect("sure") as i64;
    assert_eq!((found.next_token[0], found.next_token[1], found.next_token[2]), (drawn, 1, 2));
    // The row of drafts gives token 0 all, the target gives it a quarter.
    let accepted = uniform(scene.seeds[3], 100, 0, 0) < 0.25;
    assert_eq!(found.accepted, [0, 0, 0, accepted as i64]);
}

/// Tokens that the target excludes: of drafts that have no token in common with the target, and of drafts that exclude the token, too, so that
/// u·q = p = 0. As probabilities, as logits, and where a filter of the request is what excludes them.
fn sample_never_accepts_what_the_target_excludes(backend: &Backend) {
    // The target may give tokens 0 and 1. Drafts give what it does, what it does not, or some of both.
    let drafted = [[0.75, 0.25, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], [0.25, 0.0, 0.75, 0.0]];
    let batch = 12;
    for (are_weights, top_k) in [(true, 0), (false, 0), (false, 2)] {
        let number = |x: f64| if are_weights { x } else { F32.round(x.ln()) };
        // What the filter drops has a logit.
        let excluded = if top_k > 0 { -3.0 } else { number(0.0) };
        let target = [number(0.5), number(0.5), excluded, excluded];
        let mut scene = Scene::plain(F32, Array::filled(&[batch, 4], 0.0));
        scene.rule = VWD_ACCEPT_REJECTION;
        let flags = VWD_SAMPLE_TARGET_PROBABILITIES | VWD_SAMPLE_DRAFT_PROBABILITIES;
        scene.flags = if are_weights { flags } else { 0 };
        scene.settings = vec![Settings { top_k, ..PLAIN }; batch];
        scene.target = Array::new(&[batch, 2, 4], target.repeat(2 * batch));
        scene.draft = Array::from_fn(&[batch, 1], |at| 2 + at[0] as i64 % 2);
        scene.draft_rows = Some(Array::from_fn(&[batch, 1, 4], |at| number(drafted[at[0] / 2 % 3][at[2]])));
        let found = scene.run(backend, None);
        let what = format!("weights {are_weights}, top_k {top_k}");
        assert_eq!(found.accepted, vec![0; batch], "{what}");
        assert!(found.next_token.iter().all(|token| [0, 1].contains(token)), "{what}: {:?}", found.next_token);
        assert_eq!(scene.check(backend, None), batch, "{what}");
    }
}

fn sample_takes_filters_that_are_no_numbers_as_off(backend: &Backend) {
    rounds(2, |rng| {
        for (rule, wants_logprobs) in
            [(VWD_ACCEPT_COUPLED, false), (VWD_ACCEPT_COUPLED, true), (VWD_ACCEPT_REJECTION, false)]
        {
            filters_are_off(backend, rng, rule, wants_logprobs);
        }
    });
}

/// top_p and min_p of NaN drop nothing, whatever other filters there are, and min_p above 1 keeps the likeliest alone, as 1 does.
pub fn filters_are_off(backend: &Backend, rng: &mut Rng, rule: u32, wants_logprobs: bool) {
    let (batch, tokens, nan) = (24, 40, f64::NAN);
    for temperature_last in [false, true] {
        let target = Array::from_fn(&[batch, 2, tokens], |_| F32.round(rng.pick(&[0.0, 0.0, 0.0, 3.0]) + rng.unit()));
        let scene = Scene {
            rule,
            wants_logprobs,
            target,
            draft: Array::from_fn(&[batch, 1], |_| rng.int(0..=tokens as i64 - 1)),
            ..Scene::plain(F32, Array::filled(&[batch, tokens], 0.0))
        };
        let plain = Settings { temperature: 2.0, temperature_last, ..PLAIN };
        let run = |of: &dyn Fn(usize) -> Settings| {
            Scene { settings: (0..batch).map(of).collect(), ..scene.clone() }.run(backend, None)
        };
        let found = run(&|i| match i % 3 {
            0 => Settings { top_p: nan, top_k: 5, ..plain },
            1 => Settings { min_p: nan, top_p: 0.75, ..plain },
            _ => Settings { min_p: 1.5, ..plain },
        });
        let expected = run(&|i| match i % 3 {
            0 => Settings { top_k: 5, ..plain },
            1 => Settings { top_p: 0.75, ..plain },
            _ => Settings { min_p: 1.0, ..plain },
        });
        assert_eq!(found, expected, "rule {rule}, temperature last {temperature_last}");
        // Some of what is drawn without filters they drop.
        assert_ne!(run(&|_| plain).next_token, found.next_token);
    }
}
