//! vwd_verify_sample of many requests with filters, whose walks end at different rows: rows past an end, which a device may skip, have no part in what is
//! committed.

use crate::Case;
use crate::sample::{Scene, random_plain};
use crate::sampling::{self, PLAIN, Settings, distribution, uniform};
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![sample_with_filters_commits_the_same_whatever_is_past_the_ends];

const TOKENS: usize = 4104;
const GAMMA: usize = 5;

/// So many rows that a device of 132 multiprocessors skips some. Calls are repeated with other drafts: what one leaves in scratch, the next one finds.
fn sample_with_filters_commits_the_same_whatever_is_past_the_ends(backend: &Backend) {
    let cpu = Backend::cpu(2);
    for (variant, least, top_p_alone) in
        [("sample=loaded", 80, false), ("sample=streamed", 90, false), ("sample=streamed", 90, true)]
    {
        let Some(forced) = backend.forcing(variant, least..=u32::MAX) else { continue };
        rounds(1, |rng| {
            let batch = rng.size(89..=92);
            let mut scene = many(rng, batch);
            if top_p_alone {
                // The kernel for top-p alone runs where no log-probabilities are wanted.
                scene.wants_logprobs = false;
                scene.settings.iter_mut().for_each(|s| *s = Settings { top_k: 0, min_p: 0.0, ..*s });
            }
            let tokens = own_tokens(&scene);
            // Some stop within what they would commit.
            let stops = |i: usize, rng: &mut Rng| if rng.one_in(6) { tokens[[i, rng.size(0..=GAMMA - 1)]] } else { -1 };
            scene.stop = Some(Array::from_fn(&[batch, 2], |at| stops(at[0], rng)));
            let mut accepted = [0; GAMMA + 1];
            for _ in 0..2 {
                scene.draft = drafts(rng, &tokens);
                let found = scene.run(&forced, None);
                found.accepted.iter().for_each(|&n| accepted[n as usize] += 1);
                found.assert_same(scene.run(&cpu, None));
            }
            assert!(accepted.iter().all(|&n| n > 0), "requests that accept so many drafts: {accepted:?}");
        });
        forced.assert_ran(variant);
    }
}

/// Temperatures and filters of which each request has one.
fn settings() -> [Settings; 4] {
    let of = |temperature: f64| Settings { temperature: F32.round(temperature), ..PLAIN };
    [
        of(0.0),
        Settings { top_k: 20, ..of(0.7) },
        Settings { top_p: F32.round(0.9), ..of(1.0) },
        Settings { top_k: 300, top_p: F32.round(0.8), min_p: F32.round(0.01), ..of(1.0) },
    ]
}

/// Requests of the same rows, of two segments: some numbers of two of them are none, and from the last one at times nothing can be drawn.
fn many(rng: &mut Rng, batch: usize) -> Scene {
    let one = random_plain(rng, 1, GAMMA, TOKENS);
    let dtype = rng.pick(&[BF16, F16, F32]);
    let mut target = one.target.map(|&x| dtype.round(x));
    for r in [1, 4] {
        target[[0, r, rng.size(0..=TOKENS - 1)]] = f64::NAN;
    }
    if rng.one_in(2) {
        target.data[GAMMA * TOKENS..].fill(f64::NEG_INFINITY);
    }
    let few = |rng: &mut Rng| if rng.one_in(6) { rng.int(-1..=GAMMA as i64) } else { GAMMA as i64 + 1 };
    let mut optional = || rng.one_in(2).then(|| (0..batch).map(|_| few(rng)).collect::<Vec<i64>>());
    let (lens, remaining) = (optional(), optional());
    Scene {
        rule: VWD_ACCEPT_COUPLED,
        dtype,
        draft: Array::filled(&[batch, GAMMA], -1),
        lens,
        remaining,
        target,
        wants_logprobs: rng.one_in(2),
        settings: (0..batch).map(|i| settings()[i % 4]).collect(),
        seeds: (0..batch).map(|_| rng.int(i64::MIN..=i64::MAX)).collect(),
        positions: (0..batch).map(|_| rng.int(0..=1 << 20)).collect(),
        min_remaining: None,
        ignore_stop: None,
        ..one
    }
}

/// What each request commits in each of its rows but the last, by the formulas; token 0 where they are not sure.
fn own_tokens(scene: &Scene) -> Array<i64> {
    let of = |r: usize, settings: &Settings| {
        let (row, _) = sampling::clean(scene.target.row([0, r]), false);
        match settings.is_greedy() {
            true => (0..row.len()).map(|j| (j == sampling::likeliest(&row)) as u8 as f64).collect(),
            false => distribution(&row, false, settings).ok().flatten().unwrap_or(vec![1.0]),
        }
    };
    let kinds = &scene.settings[..4];
    let likely: Vec<Vec<Vec<f64>>> = (0..GAMMA).map(|r| kinds.iter().map(|s| of(r, s)).collect()).collect();
    Array::from_fn(&[scene.batch(), GAMMA], |at| {
        let [i, r] = at[..] else { unreachable!("[B, γ]") };
        let u = uniform(scene.seeds[i], scene.positions[i] + r as i64, 1, 0);
        sampling::draw(&likely[r][i % 4], u).map_or(0, |token| token as i64)
    })
}

/// Drafts of which some requests accept all, and others each with a likelihood of some .75: else another token, or none.
fn drafts(rng: &mut Rng, tokens: &Array<i64>) -> Array<i64> {
    let accepts_all: Vec<bool> = (0..tokens.shape[0]).map(|_| rng.one_in(5)).collect();
    Array::from_fn(&tokens.shape, |at| {
        let token = tokens[[at[0], at[1]]];
        match accepts_all[at[0]] || !rng.one_in(4) {
            true => token,
            false => rng.pick(&[-1, TOKENS as i64, (token + 1) % TOKENS as i64]),
        }
    })
}
