//! Calibration of the predictor against a search by sorting.
//!
//! Scores are small whole numbers and factors are powers of two, as in `predictor`.

use super::predictor::{EXACT, UNSEEN};
use crate::Case;
use crate::support::oracle::top_k;
use crate::support::{Array, Backend, F32, I32, Layout, Rng, Tensor, args, assert_ok, rounds};
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    calibration_finds_the_point_with_the_highest_hit_rate,
    calibration_grid_smooths_noise_and_keeps_what_is_certain,
    calibration_does_not_depend_on_the_scores_offset_and_scale,
    calibration_has_the_same_bits_on_every_backend,
    calibration_takes_every_third_row_by_its_stride,
    calibration_takes_rows_past_what_registers_hold,
    calibration_rates_the_lists_of_other_scores_by_histories_of_two_steps,
];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] = cases![
    calibration_does_not_depend_on_the_number_of_threads,
    calibration_needs_memory_for_the_blocks_that_exist_alone,
];

struct History {
    /// [N, T, Hk, nb]
    scores: Array<f64>,
    /// [N, T]
    counts: Array<i64>,
    k: usize,
    init: usize,
    local: usize,
    ratio: f32,
}

impl History {
    fn calibrate(&self, backend: &Backend, grid: &[vwd_holt], layout: &Layout) -> (vwd_holt, f64) {
        let scores = Tensor::floats(backend, F32, &self.scores, layout);
        let counts = Tensor::ints(backend, I32, &self.counts, &Layout::default());
        let args = vwd_predictor_calibrate_args {
            k: self.k as u32,
            init_blocks: self.init as u32,
            local_blocks: self.local as u32,
            ratio: self.ratio,
            grid_count: grid.len() as u32,
            grid: if grid.is_empty() { std::ptr::null() } else { grid.as_ptr() },
            scores: scores.c(),
            block_counts: counts.c(),
            ..args()
        };
        let (mut best, mut rate) = (EXACT[4], f64::NAN);
        // SAFETY: everything is alive during the call.
        assert_ok(unsafe { vwd_predictor_calibrate(backend.session(), &args, &mut best, &mut rate) });
        (best, rate)
    }

    /// The hit rate of a point, by the definition in the header.
    fn hit_rate(&self, holt: &vwd_holt) -> f64 {
        let [histories, steps, heads, most] = self.scores.shape[..] else { panic!("rank 4") };
        let (mut hits, mut counted) = (0.0, 0);
        for row in 0..histories * heads {
            let (h, g) = (row / heads, row % heads);
            let mut states = vec![UNSEEN; most];
            for t in 0..steps {
                let n = self.counts[[h, t]].clamp(0, most as i64) as usize;
                let scores = &self.scores.row([h, t, g])[..n];
                let ranked: Vec<f64> = scores.iter().map(|&s| if s.is_nan() { f64::NEG_INFINITY } else { s }).collect();
                let size = |k: usize| k.max(self.init + self.local).min(n);
                let chosen = top_k(&ranked, size(self.k), self.init, self.local);
                let free = |j: usize| j >= self.init && j + self.local < n && scores[j].is_finite();
                let left_out = (0..n).filter(|j| free(*j) && !chosen.contains(j)).map(|j| scores[j]);
                let cut = left_out.fold(f64::NEG_INFINITY, f64::max);
                let weight = |j: usize| if free(j) { (scores[j] - cut).max(0.0) } else { 0.0 };
                let total: f64 = (0..n).map(weight).sum();
                if t > 0 && cut.is_finite() && total > 0.0 {
                    let forecast: Vec<f64> = states[..n].iter().map(|state| state.forecast(holt)).collect();
                    let wider = (self.k as f64 * self.ratio.max(1.0) as f64).ceil() as usize;
                    let predicted = top_k(&forecast, size(wider), self.init, self.local);
                    hits += predicted.iter().map(|&j| weight(j)).sum::<f64>() / total;
                    counted += 1;
                }
                for (state, &score) in states.iter_mut().zip(scores) {
                    *state = state.after(score, holt);
                }
            }
        }
        if counted == 0 { 0.0 } else { hits / counted as f64 }
    }
}

fn random_history(rng: &mut Rng) -> History {
    let shape = [rng.size(0..=2), rng.size(0..=12), rng.size(1..=3), rng.size(0..=30)];
    let mut scores = rng.whole(&shape, 6);
    for score in &mut scores.data {
        if rng.one_in(20) {
            *score = rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
        }
    }
    let counts = Array::from_fn(&shape[..2], |_| rng.int(-1..=35));
    let ratio = rng.pick(&[0.0, 1.0, 1.25, 1.5]);
    History { scores, counts, k: rng.size(0..=9), init: rng.size(0..=1), local: rng.size(0..=2), ratio }
}

fn calibration_finds_the_point_with_the_highest_hit_rate(backend: &Backend) {
    rounds(60, |rng| {
        let history = random_history(rng);
        let count = rng.size(1..=12);
        let grid: Vec<vwd_holt> = (0..count).map(|_| rng.pick(&EXACT)).collect();
        let layout = Layout::random(rng, 4);
        let (best, rate) = history.calibrate(backend, &grid, &layout);
        let rates: Vec<f64> = grid.iter().map(|point| history.hit_rate(point)).collect();
        let highest = rates.iter().copied().fold(0.0, f64::max);
        // Shares are added in another order here.
        assert!((rate - highest).abs() < 1e-12, "{rate}, expected {highest} of {rates:?}");
        let same = |point: &vwd_holt| (point.alpha, point.beta, point.gamma) == (best.alpha, best.beta, best.gamma);
        let chosen = grid.iter().position(same).expect("one of the grid");
        // Points that are equal but for that order may go either way; where none hits anything, the first is chosen.
        assert!(rates[chosen] > highest - 1e-12, "chose {chosen} of {rates:?}");
        assert!(highest > 0.0 || chosen == 0, "chose {chosen} of points that hit nothing");
    });
}

fn series(rng: &mut Rng, steps: usize, value: impl Fn(&mut Rng, usize, usize) -> f64) -> History {
    let scores = Array::from_fn(&[1, steps, 2, 64], |at| value(rng, at[1], at[3]));
    History { scores, counts: Array::filled(&[1, steps], 64), k: 8, init: 1, local: 1, ratio: 1.0 }
}

fn calibration_grid_smooths_noise_and_keeps_what_is_certain(backend: &Backend) {
    let mut rng = Rng::new(7);
    let steady = series(&mut rng, 20, |_, _, j| (j * j % 61) as f64);
    let (best, rate) = steady.calibrate(backend, &[], &Layout::default());
    assert_eq!((best.alpha, best.beta, best.gamma, rate), (1.0, 0.0, 0.0, 1.0), "ties go to the first point");
    let noisy = series(&mut rng, 60, |rng, _, j| (j * j % 61) as f64 + 30.0 * rng.normal());
    let (best, rate) = noisy.calibrate(backend, &[], &Layout::default());
    assert!(best.alpha < 0.5, "noise is smoothed, but alpha is {}", best.alpha);
    assert!(rate > noisy.hit_rate(&EXACT[0]) + 0.05);
}

fn calibration_does_not_depend_on_the_scores_offset_and_scale(backend: &Backend) {
    let mut rng = Rng::new(3);
    let grid: Vec<vwd_holt> = EXACT.to_vec();
    let mut history = series(&mut rng, 30, |rng, _, j| (j * j % 61 + rng.size(0..=20)) as f64);
    let (best, rate) = history.calibrate(backend, &grid, &Layout::default());
    assert!(rate > 0.0 && rate < 1.0);
    for (scale, offset) in [(1024.0, 0.0), (1.0 / 64.0, 0.0), (1.0, -4096.0), (8.0, 512.0)] {
        let moved = history.scores.map(|s| s * scale + offset);
        let original = std::mem::replace(&mut history.scores, moved);
        let (again, same) = history.calibrate(backend, &grid, &Layout::default());
        assert_eq!((again.alpha, again.beta, again.gamma, same), (best.alpha, best.beta, best.gamma, rate));
        history.scores = original;
    }
}

/// Scores that are no whole numbers, so that a rate has bits to differ in; each point by itself, as the rate of the best one is told.
fn calibration_has_the_same_bits_on_every_backend(backend: &Backend) {
    let host = Backend::cpu(2);
    rounds(8, |rng| {
        let (steps, heads, blocks) = (rng.size(2..=9), rng.size(1..=3), rng.pick(&[1, 7, 64, 601]));
        // Scores that go on from step to step, of few values or of many, and some that are none.
        let is_coarse = rng.one_in(2);
        let base = rng.normals(&[2, 1, heads, blocks]);
        let noise = rng.normals(&[2, steps, heads, blocks]);
        let mut scores = Array::from_fn(&noise.shape, |at| {
            let score = 3.0 * base[[at[0], 0, at[2], at[3]]] + noise[[at[0], at[1], at[2], at[3]]];
            if is_coarse { score.round() } else { score }
        });
        for score in &mut scores.data {
            if rng.one_in(40) {
                *score = rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1e30]);
            }
        }
        let counts = Array::from_fn(&[2, steps], |_| rng.int(blocks as i64 / 2..=blocks as i64 + 1));
        let k = rng.size(0..=blocks / 2);
        let history =
            History { scores, counts, k, init: 1, local: rng.size(0..=2), ratio: rng.pick(&[1.0, 1.25, 2.0]) };
        for _ in 0..4 {
            let [alpha, beta, gamma] = [0; 3].map(|_| rng.size(1..=16) as f32 / 16.0);
            let point = [vwd_holt { alpha, beta, gamma }];
            let [(_, expected), (_, found)] =
                [&host, backend].map(|backend| history.calibrate(backend, &point, &Layout::default()));
            assert_eq!(found.to_bits(), expected.to_bits(), "{found}, on the CPU {expected}; {alpha}, {beta}, {gamma}");
        }
        let [expected, found] = [&host, backend].map(|backend| history.calibrate(backend, &[], &Layout::default()));
        let of = |best: (vwd_holt, f64)| (best.0.alpha, best.0.beta, best.0.gamma, best.1);
        assert_eq!(of(found), of(expected), "the built-in grid");
    });
}

fn calibration_takes_every_third_row_by_its_stride(backend: &Backend) {
    let mut rng = Rng::new(5);
    let all = series(&mut rng, 30, |rng, t, j| (j * j % 61) as f64 + t as f64 / 8.0 * rng.normal());
    let scores = Array::from_fn(&[1, 10, 2, 64], |at| all.scores[[0, 3 * at[1], at[2], at[3]]]);
    let third = History { scores, counts: Array::filled(&[1, 10], 64), ..all };
    let (expected, rate) = third.calibrate(backend, &[], &Layout::default());
    let rows = Tensor::floats(backend, F32, &all.scores, &Layout::default());
    let counts = Tensor::ints(backend, I32, &third.counts, &Layout::default());
    let mut scores = rows.c();
    (scores.shape[1], scores.strides[1]) = (10, 3 * scores.strides[1]);
    let args = vwd_predictor_calibrate_args {
        k: third.k as u32,
        init_blocks: third.init as u32,
        local_blocks: third.local as u32,
        ratio: third.ratio,
        scores,
        block_counts: counts.c(),
        ..args()
    };
    let (mut best, mut found) = (EXACT[4], f64::NAN);
    // SAFETY: everything is alive during the call.
    assert_ok(unsafe { vwd_predictor_calibrate(backend.session(), &args, &mut best, &mut found) });
    assert_eq!((best.alpha, best.beta, best.gamma, found), (expected.alpha, expected.beta, expected.gamma, rate));
    assert!(rate > 0.0 && rate < 1.0, "{rate}");
}

fn calibration_takes_rows_past_what_registers_hold(backend: &Backend) {
    let mut rng = Rng::new(9);
    let shape = [1, 3, 1, 9001];
    let scores = Array::from_fn(&shape, |at| ((at[3] * at[3]) % 509) as f64 + rng.size(0..=99) as f64);
    let history = History { scores, counts: Array::filled(&[1, 3], 9001), k: 300, init: 3, local: 2, ratio: 1.25 };
    for point in &EXACT[..3] {
        let (_, rate) = history.calibrate(backend, std::slice::from_ref(point), &Layout::default());
        let expected = history.hit_rate(point);
        assert!((rate - expected).abs() < 1e-12 && expected > 0.0 && expected < 1.0, "{rate}, expected {expected}");
    }
}

fn calibration_does_not_depend_on_the_number_of_threads(_: &Backend) {
    let (one, three) = (Backend::cpu(1), Backend::cpu(3));
    let mut rng = Rng::new(11);
    // Large enough for the work to be shared.
    let scores = rng.normals(&[2, 40, 4, 300]);
    let history = History { scores, counts: Array::filled(&[2, 40], 300), k: 20, init: 1, local: 2, ratio: 1.25 };
    let [a, b] = [&one, &three].map(|backend| history.calibrate(backend, &[], &Layout::default()));
    assert_eq!((a.0.alpha, a.0.beta, a.0.gamma, a.1), (b.0.alpha, b.0.beta, b.0.gamma, b.1));
}

fn calibration_needs_memory_for_the_blocks_that_exist_alone(backend: &Backend) {
    // Every row of 2^40 blocks is one number, of which six are read.
    let one = Tensor::floats(backend, F32, &Array::filled(&[1], 1.0), &Layout::default());
    let mut scores = one.c();
    (scores.ndim, scores.shape, scores.strides) = (4, [1, 3, 2, 1 << 40, 0], [0; 5]);
    let counts = Tensor::ints(backend, I32, &Array::new(&[1, 3], vec![-1, 4, 6]), &Layout::default());
    let args = vwd_predictor_calibrate_args { k: 2, scores, block_counts: counts.c(), ..args() };
    let (mut holt, mut rate) = (EXACT[4], f64::NAN);
    // SAFETY: everything is alive during the call.
    assert_ok(unsafe { vwd_predictor_calibrate(backend.session(), &args, &mut holt, &mut rate) });
    assert_eq!(rate, 0.0, "blocks of equal score say nothing");
}

/// Rows of a forecast, and the true ones, in one buffer [2, T, Hk, nb] that is viewed as [T, 2, Hk, nb].
fn calibration_rates_the_lists_of_other_scores_by_histories_of_two_steps(backend: &Backend) {
    rounds(30, |rng| {
        let [steps, heads, blocks] = [rng.size(1..=9), rng.size(1..=3), rng.size(1..=30)];
        let (k, init, local) = (rng.size(1..=8), rng.size(0..=1), rng.size(0..=2));
        let rows = rng.whole(&[2, steps, heads, blocks], 6);
        let counts: Vec<i64> = (0..steps).map(|_| rng.int(0..=blocks as i64)).collect();

        // The mean share of the selection's weight that is in the list of the forecast's best ⌈1.5·k⌉.
        let (mut shares, mut counted) = (0.0, 0);
        for (t, g) in (0..steps * heads).map(|row| (row / heads, row % heads)) {
            let n = counts[t] as usize;
            let [guess, truth] = [0, 1].map(|source| &rows.row([source, t, g])[..n]);
            let list = |scores: &[f64], k: usize| top_k(scores, k.max(init + local).min(n), init, local);
            let (chosen, guessed) = (list(truth, k), list(guess, (3 * k).div_ceil(2)));
            let free = |j: &usize| *j >= init && *j + local < n;
            let cut =
                (0..n).filter(|j| free(j) && !chosen.contains(j)).map(|j| truth[j]).fold(f64::NEG_INFINITY, f64::max);
            let weight = |j: &usize| if free(j) { (truth[*j] - cut).max(0.0) } else { 0.0 };
            let total: f64 = chosen.iter().map(weight).sum();
            if cut.is_finite() && total > 0.0 {
                shares += guessed.iter().map(weight).sum::<f64>() / total;
                counted += 1;
            }
        }
        let expected = if counted == 0 { 0.0 } else { shares / counted as f64 };

        let buffer = Tensor::floats(backend, F32, &rows, &Layout::default());
        let counts = Tensor::ints(backend, I32, &Array::new(&[steps, 1], counts), &Layout::default());
        let (mut scores, mut block_counts) = (buffer.c(), counts.c());
        scores.shape.swap(0, 1);
        scores.strides.swap(0, 1);
        (block_counts.shape[1], block_counts.strides[1]) = (2, 0);
        let args = vwd_predictor_calibrate_args {
            k: k as u32,
            init_blocks: init as u32,
            local_blocks: local as u32,
            ratio: 1.5,
            grid_count: 1,
            grid: EXACT.as_ptr(),
            scores,
            block_counts,
            ..args()
        };
        let (mut holt, mut rate) = (EXACT[4], f64::NAN);
        // SAFETY: everything is alive during the call.
        assert_ok(unsafe { vwd_predictor_calibrate(backend.session(), &args, &mut holt, &mut rate) });
        assert!((rate - expected).abs() < 1e-12, "{rate}, expected {expected}");
    });
}
