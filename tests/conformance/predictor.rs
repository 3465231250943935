//! The predictor against Holt's formulas.
//!
//! Scores are small whole numbers and factors are powers of two, so that every ŝ is exact in single precision: the oracle
//! and the library must then agree to the bit, and ties are frequent.

use crate::Case;
use crate::support::oracle::{self, top_k};
use crate::support::{
    Array, Backend, F32, I32, Layout, Rng, Tensor, absent, args, array, assert_fails, assert_ok, boundless, rounds,
};
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    predictor_predicts_what_holts_formulas_predict,
    predictor_reset_forgets_the_listed_sequences_and_no_others,
    predictor_ratio_in_float32_makes_no_extra_block,
    predictor_state_that_is_not_finite_does_not_stay,
    predictor_factors_of_zero_mean_the_previous_scores,
    predictor_refuses_a_list_with_slots,
    predictor_takes_long_rows_and_large_batches,
    predictor_state_stays_with_its_sequence_while_rows_move,
];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] = cases![
    predictor_results_do_not_depend_on_the_number_of_threads,
    predictor_calls_end_at_once_where_there_is_nothing_to_do,
];

/// Level and trend, −inf and 0 while unseen.
#[derive(Clone, Copy)]
pub struct Holt(f64, f64);

pub const UNSEEN: Holt = Holt(f64::NEG_INFINITY, 0.0);

impl Holt {
    pub fn forecast(self, factors: &vwd_holt) -> f64 {
        oracle::holt_predict(exactly(factors), (self.0, self.1))
    }

    pub fn after(self, score: f64, factors: &vwd_holt) -> Holt {
        let (level, trend) = oracle::holt_update(exactly(factors), (self.0, self.1), score);
        Holt(level, trend)
    }
}

fn exactly(factors: &vwd_holt) -> oracle::Holt {
    oracle::Holt { alpha: factors.alpha as f64, beta: factors.beta as f64, gamma: factors.gamma as f64 }
}

pub const EXACT: [vwd_holt; 5] = [
    vwd_holt { alpha: 1.0, beta: 0.0, gamma: 0.0 },
    vwd_holt { alpha: 0.5, beta: 0.5, gamma: 0.5 },
    vwd_holt { alpha: 0.5, beta: 0.0, gamma: 1.0 },
    vwd_holt { alpha: 0.25, beta: 1.0, gamma: 2.0 },
    vwd_holt { alpha: 1.0, beta: 0.5, gamma: -0.5 },
];

/// A layer's predictor in the library.
struct Layer<'b> {
    backend: &'b Backend,
    level: Tensor<'b>,
    trend: Tensor<'b>,
    holt: vwd_holt,
    block_size: u32,
}

impl<'b> Layer<'b> {
    fn new(backend: &'b Backend, shape: &[usize], layouts: [&Layout; 2], holt: vwd_holt) -> Layer<'b> {
        let [level, trend] = layouts.map(|layout| Tensor::poisoned(backend, F32, shape, layout));
        let layer = Layer { backend, level, trend, holt, block_size: 4 };
        layer.reset(absent());
        layer
    }

    fn state(&self) -> vwd_predictor_state {
        vwd_predictor_state { level: self.level.c(), trend: self.trend.c() }
    }

    fn reset(&self, rows: vwd_tensor) {
        let args = vwd_predictor_reset_args { state: self.state(), rows, ..args() };
        // SAFETY: the session and the tensors are alive.
        self.backend.finish(unsafe { vwd_predictor_reset(self.backend.session(), &args, self.backend.stream()) });
    }

    fn update(&self, lens: &[i64], scores: &Array<f64>) {
        let lens = Tensor::ints(self.backend, I32, &Array::new(&[lens.len()], lens.to_vec()), &Layout::default());
        let scores = Tensor::floats(self.backend, F32, scores, &Layout::default());
        let args = vwd_predictor_update_args {
            block_size: self.block_size,
            holt: self.holt,
            state: self.state(),
            seq_lens: lens.c(),
            scores: scores.c(),
            ..args()
        };
        // SAFETY: as above.
        self.backend.finish(unsafe { vwd_predictor_update(self.backend.session(), &args, self.backend.stream()) });
    }

    /// ids per (sequence, KV head), and scores.
    fn predict(&self, p: &Prediction, cap: usize) -> (Vec<Vec<i64>>, Array<f64>) {
        let shape = &self.level.shape;
        let (batch, heads) = (shape[0], shape[1]);
        let plain = Layout::default();
        let lens = Tensor::ints(self.backend, I32, &Array::new(&[batch], p.lens.clone()), &plain);
        let budgets = p.budgets.clone().map(|b| Tensor::ints(self.backend, I32, &Array::new(&[batch], b), &plain));
        let ids = Tensor::poisoned(self.backend, I32, &[batch, heads, cap], &plain);
        let counts = Tensor::poisoned(self.backend, I32, &[batch, heads], &plain);
        let scores = Tensor::poisoned(self.backend, F32, shape, &plain);
        let args = vwd_predictor_predict_args {
            block_size: self.block_size,
            k: p.k,
            init_blocks: p.init,
            local_blocks: p.local,
            ratio: p.ratio,
            holt: self.holt,
            state: self.state(),
            seq_lens: lens.c(),
            budgets: budgets.as_ref().map_or(absent(), Tensor::c),
            predicted: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
            scores: scores.c(),
            ..args()
        };
        // SAFETY: as above.
        self.backend.finish(unsafe { vwd_predictor_predict(self.backend.session(), &args, self.backend.stream()) });
        let (listed, counts) = (ids.read_ints(), counts.read_ints());
        ids.assert_written("ids", |at| (at[2] as i64) < counts[[at[0], at[1]]]);
        let blocks: Vec<usize> = p.lens.iter().map(|&len| self.blocks(len)).collect();
        scores.assert_written("scores", |at| at[2] < blocks[at[0]]);
        let lists =
            (0..batch * heads).map(|row| listed.row([row / heads, row % heads])[..counts.data[row] as usize].to_vec());
        (lists.collect(), scores.read_floats())
    }

    fn blocks(&self, len: i64) -> usize {
        (len.max(0) as usize).div_ceil(self.block_size as usize).min(self.level.shape[2])
    }
}

/// Against a predictor whose rows do not move: row i of a step is sequence `numbers[i]`, and rows without one have forced blocks alone.
fn predictor_state_stays_with_its_sequence_while_rows_move(backend: &Backend) {
    const SEQUENCES: usize = 6;
    rounds(10, |rng| {
        // Short rows, and such as several CTAs take.
        let blocks = rng.pick(&[10, 30, 9000]);
        let (heads, holt, plain) = (rng.size(1..=2), rng.pick(&EXACT), Layout::default());
        let [still, moving] = [0; 2].map(|_| Layer::new(backend, &[SEQUENCES, heads, blocks], [&plain; 2], holt));
        for _ in 0..4 {
            let lens: Vec<i64> = (0..SEQUENCES).map(|_| rng.int(1..=4 * blocks as i64)).collect();
            let prediction =
                Prediction { lens: lens.clone(), k: 5, init: 1, local: 1, ratio: 1.5, ..Prediction::default() };
            let (expected, _) = still.predict(&prediction, 12);
            let mut numbers: Vec<i64> = (-1..SEQUENCES as i64 + 1).collect();
            rng.shuffle(&mut numbers);
            numbers.truncate(rng.size(1..=numbers.len()));
            let of = |number: i64| usize::try_from(number).ok().filter(|&n| n < SEQUENCES);
            let rows = numbers.len();
            let row_lens: Vec<i64> = numbers.iter().map(|&n| of(n).map_or(20, |n| lens[n])).collect();
            let ints =
                |values: &[i64]| Tensor::ints(backend, I32, &Array::new(&[values.len()], values.to_vec()), &plain);
            let (len_tensor, sequences) = (ints(&row_lens), ints(&numbers));
            let ids = Tensor::poisoned(backend, I32, &[rows, heads, 12], &plain);
            let counts = Tensor::poisoned(backend, I32, &[rows, heads], &plain);
            let predict = vwd_predictor_predict_args {
                block_size: 4,
                k: 5,
                init_blocks: 1,
                local_blocks: 1,
                ratio: 1.5,
                holt,
                state: moving.state(),
                seq_lens: len_tensor.c(),
                predicted: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
                sequences: sequences.c(),
                ..args()
            };
            let scores = rng.whole(&[SEQUENCES, heads, blocks], 9);
            let of_rows = Array::from_fn(&[rows, heads, blocks], |at| {
                of(numbers[at[0]]).map_or(f64::NAN, |n| scores[[n, at[1], at[2]]])
            });
            let row_scores = Tensor::floats(backend, F32, &of_rows, &plain);
            let update = vwd_predictor_update_args {
                block_size: 4,
                holt,
                state: moving.state(),
                seq_lens: len_tensor.c(),
                scores: row_scores.c(),
                sequences: sequences.c(),
                ..args()
            };
            // SAFETY: the session and the tensors are alive.
            unsafe {
                backend.finish(vwd_predictor_predict(backend.session(), &predict, backend.stream()));
                backend.finish(vwd_predictor_update(backend.session(), &update, backend.stream()));
            }
            let (ids, counts) = (ids.read_ints(), counts.read_ints());
            for (i, &number) in numbers.iter().enumerate() {
                for g in 0..heads {
                    let found = &ids.row([i, g])[..counts[[i, g]] as usize];
                    match of(number) {
                        Some(n) => assert_eq!(found, expected[n * heads + g], "row {i} is sequence {n}"),
                        None => assert_eq!(found, forced(row_lens[i], blocks), "row {i} is no sequence"),
                    }
                }
            }
            // Sequences without a row do not move on.
            let seen: Vec<i64> =
                (0..SEQUENCES).map(|n| if numbers.contains(&(n as i64)) { lens[n] } else { 0 }).collect();
            still.update(&seen, &scores);
        }
    });
}

/// The first and the last block of so many tokens, of which a row has up to `most`.
fn forced(tokens: i64, most: usize) -> Vec<i64> {
    let last = (tokens as usize).div_ceil(4).min(most) as i64 - 1;
    if last == 0 { vec![0] } else { vec![0, last] }
}

#[derive(Clone, Default)]
struct Prediction {
    lens: Vec<i64>,
    budgets: Option<Vec<i64>>,
    k: u32,
    init: u32,
    local: u32,
    ratio: f32,
}

fn predictor_predicts_what_holts_formulas_predict(backend: &Backend) {
    rounds(60, |rng| {
        let shape = [rng.size(0..=3), rng.size(1..=3), rng.size(0..=40)];
        let [batch, heads, _] = shape;
        let holt = rng.pick(&EXACT);
        let layouts = [Layout::random(rng, 3), Layout::random(rng, 3)];
        let layer = Layer::new(backend, &shape, [&layouts[0], &layouts[1]], holt);
        let mut states = Array::filled(&shape, UNSEEN);
        let mut lens: Vec<i64> = (0..batch).map(|_| rng.int(-2..=60)).collect();
        for _ in 0..4 {
            let mut p = Prediction {
                lens: lens.clone(),
                budgets: rng.one_in(2).then(|| (0..batch).map(|_| rng.int(-3..=50)).collect()),
                k: rng.size(0..=12) as u32,
                init: rng.size(0..=2) as u32,
                local: rng.size(0..=3) as u32,
                ratio: rng.pick(&[0.0, 1.0, 1.25, 1.5, 2.0]),
            };
            if p.budgets.is_none() && p.init + p.local == 0 {
                p.k = p.k.max(1);
            }
            let cap = 24;
            let (lists, scores) = layer.predict(&p, cap);
            for (row, list) in lists.iter().enumerate() {
                let (i, g) = (row / heads, row % heads);
                let n = layer.blocks(lens[i]);
                let want: Vec<f64> = states.row([i, g])[..n].iter().map(|state| state.forecast(&holt)).collect();
                assert_eq!(scores.row([i, g])[..n], want, "ŝ of ({i}, {g})");
                let k = p.budgets.as_ref().map_or(p.k as i64, |budgets| budgets[i]).max(0);
                let ratio = if p.ratio == 0.0 { 1.0 } else { p.ratio as f64 };
                let k = oracle::predicted_size(ratio, k as usize).min(cap).max((p.init + p.local) as usize).min(n);
                let ids: Vec<i64> =
                    top_k(&want, k, p.init as usize, p.local as usize).iter().map(|&j| j as i64).collect();
                assert_eq!(*list, ids, "P̂ of ({i}, {g}) with {holt:?}", holt = (holt.alpha, holt.beta, holt.gamma));
            }
            let mut scores = rng.whole(&shape, 8);
            for score in &mut scores.data {
                if rng.one_in(12) {
                    *score = rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
                }
            }
            layer.update(&lens, &scores);
            for at in array::indices(&shape) {
                let at = [at[0], at[1], at[2]];
                if at[2] < layer.blocks(lens[at[0]]) {
                    states[at] = states[at].after(scores[at], &holt);
                }
            }
            lens.iter_mut().for_each(|len| *len += rng.int(0..=9));
        }
        assert_same(&layer.level.read_floats(), &states.map(|s| s.0));
        assert_same(&layer.trend.read_floats(), &states.map(|s| s.1));
    });
}

/// Equal, where NaN equals NaN.
#[track_caller]
fn assert_same(found: &Array<f64>, expected: &Array<f64>) {
    for (at, (a, b)) in found.data.iter().zip(&expected.data).enumerate() {
        assert!(a == b || (a.is_nan() && b.is_nan()), "element {at}: {a}, expected {b}");
    }
}

/// Rows past what a CTA holds, and more rows than a device has multiprocessors; scores of few values, of normal ones, and none.
fn predictor_takes_long_rows_and_large_batches(backend: &Backend) {
    let shapes = [[1, 3, 20_000], [1, 1, 8193], [256, 2, 70], [3, 7, 2048]];
    for (shape, cap) in shapes.into_iter().zip([2100, 8200, 60, 600]) {
        rounds(2, |rng| {
            let holt = EXACT[1];
            let layer = Layer::new(backend, &shape, [&Layout::default(), &Layout::default()], holt);
            let most = 4 * shape[2] as i64;
            let lens: Vec<i64> = (0..shape[0]).map(|i| if i == 0 { most } else { rng.int(0..=most + 9) }).collect();
            let mut states = Array::filled(&shape, UNSEEN);
            for scores in
                [rng.whole(&shape, 2), rng.normals(&shape).map(|x| (x * 1024.0).round()), rng.whole(&shape, 2)]
            {
                layer.update(&lens, &scores);
                for at in array::indices(&shape) {
                    let at = [at[0], at[1], at[2]];
                    if at[2] < layer.blocks(lens[at[0]]) {
                        states[at] = states[at].after(scores[at], &holt);
                    }
                }
                let k = rng.size(cap / 2..=cap) as u32;
                let p = Prediction { lens: lens.clone(), k, init: 1, local: 2, ..Prediction::default() };
                let (lists, _) = layer.predict(&p, cap);
                for (row, list) in lists.iter().enumerate() {
                    let (i, g) = (row / shape[1], row % shape[1]);
                    let n = layer.blocks(lens[i]);
                    let want: Vec<f64> = states.row([i, g])[..n].iter().map(|state| state.forecast(&holt)).collect();
                    let ids = top_k(&want, (k as usize).max(3).min(n), 1, 2);
                    assert!(list.iter().map(|&j| j as usize).eq(ids), "P̂ of ({i}, {g}), {n} blocks, k {k}");
                }
            }
        });
    }
}

fn predictor_reset_forgets_the_listed_sequences_and_no_others(backend: &Backend) {
    let shape = [4, 2, 5];
    let layer = Layer::new(backend, &shape, [&Layout::default(), &Layout::default()], EXACT[0]);
    let scores = Array::filled(&shape, 3.0);
    layer.update(&[20; 4], &scores);
    let rows = Array::new(&[6], vec![2, -1, 4, 0, 2, i32::MIN as i64]);
    let rows = Tensor::ints(backend, I32, &rows, &Layout::default());
    layer.reset(rows.c());
    let want = Array::from_fn(&shape, |at| if at[0] == 0 || at[0] == 2 { f64::NEG_INFINITY } else { 3.0 });
    assert_eq!(layer.level.read_floats(), want);
    assert_eq!(layer.trend.read_floats(), Array::filled(&shape, 0.0));
    layer.reset(absent());
    assert_eq!(layer.level.read_floats(), Array::filled(&shape, f64::NEG_INFINITY));
}

fn predictor_ratio_in_float32_makes_no_extra_block(backend: &Backend) {
    let shape = [1, 1, 100];
    let layer = Layer::new(backend, &shape, [&Layout::default(), &Layout::default()], EXACT[0]);
    for (ratio, k, count) in [(1.1, 10, 11), (1.25, 64, 80), (1.2, 5, 6), (1.3, 10, 13), (1.0001, 10, 11), (0.0, 7, 7)]
    {
        let p = Prediction { lens: vec![400], k, ratio, ..Prediction::default() };
        assert_eq!(layer.predict(&p, 90).0[0].len(), count, "⌈{ratio} · {k}⌉");
    }
}

fn predictor_state_that_is_not_finite_does_not_stay(backend: &Backend) {
    let shape = [1, 1, 3];
    let holt = vwd_holt { alpha: 1.0, beta: 1.0, gamma: 1.0 };
    let layer = Layer::new(backend, &shape, [&Layout::default(), &Layout::default()], holt);
    // From −MAX to MAX the trend of block 0 overflows.
    for first in [0.0, -f32::MAX as f64, f32::MAX as f64, 4.0] {
        layer.update(&[12], &Array::new(&shape, vec![first, 1.0, f64::NAN]));
    }
    assert_eq!(layer.level.read_floats().data[..2], [4.0, 1.0]);
    assert_eq!(layer.trend.read_floats().data[..2], [0.0, 0.0]);
    layer.update(&[12], &Array::new(&shape, vec![4.0, 1.0, 2.0]));
    assert_eq!(layer.level.read_floats().data[2], 2.0);
}

fn predictor_factors_of_zero_mean_the_previous_scores(backend: &Backend) {
    let shape = [1, 1, 2];
    let zero = vwd_holt { alpha: 0.0, beta: 0.0, gamma: 0.0 };
    let layer = Layer::new(backend, &shape, [&Layout::default(), &Layout::default()], zero);
    for step in [3.0, 5.0] {
        layer.update(&[8], &Array::filled(&shape, step));
    }
    assert_eq!(layer.level.read_floats().data, [5.0, 5.0]);
}

fn predictor_refuses_a_list_with_slots(backend: &Backend) {
    let layer = Layer::new(backend, &[1, 1, 3], [&Layout::default(), &Layout::default()], EXACT[0]);
    let plain = Layout::default();
    let lens = Tensor::ints(backend, I32, &Array::filled(&[1], 12), &plain);
    let ids = Tensor::poisoned(backend, I32, &[1, 1, 2], &plain);
    let counts = Tensor::poisoned(backend, I32, &[1, 1], &plain);
    let slots = Tensor::poisoned(backend, I32, &[1, 1, 2], &plain);
    let args = vwd_predictor_predict_args {
        block_size: 4,
        k: 1,
        state: layer.state(),
        seq_lens: lens.c(),
        predicted: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: slots.c() },
        ..args()
    };
    // SAFETY: everything is alive during the call.
    let status = unsafe { vwd_predictor_predict(backend.session(), &args, backend.stream()) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["predicted.slots"]);
    for t in [&ids, &counts, &slots] {
        t.assert_untouched("predicted");
    }
}

fn predictor_calls_end_at_once_where_there_is_nothing_to_do(backend: &Backend) {
    const HUGE: i64 = 1 << 60;
    let lens = Tensor::ints(backend, I32, &Array::filled(&[2], 12), &Layout::default());
    let mut rows = Tensor::ints(backend, I32, &Array::filled(&[1], 0), &Layout::default()).c();
    (rows.shape[0], rows.strides[0]) = (HUGE, 0);
    for shape in [[2, 1 << 50, 0], [2, 0, HUGE], [0, HUGE, 1 << 10], [0, HUGE, HUGE]] {
        let level = boundless(F32, &shape);
        let state = vwd_predictor_state { level, trend: level };
        let seq_lens = if shape[0] == 2 { lens.c() } else { boundless(I32, &[0]) };
        let update = vwd_predictor_update_args { block_size: 4, state, seq_lens, scores: level, ..args() };
        let calibrate = vwd_predictor_calibrate_args {
            k: 1,
            scores: boundless(F32, &[shape[0], 1, shape[1], shape[2]]),
            block_counts: boundless(I32, &[shape[0], 1]),
            ..args()
        };
        let (mut holt, mut rate) = (EXACT[4], f64::NAN);
        // SAFETY: everything is alive during the calls; none has an element to read but lens and rows.
        unsafe {
            for rows in [rows, absent(), boundless(I32, &[0])] {
                let reset = vwd_predictor_reset_args { state, rows, ..args() };
                assert_ok(vwd_predictor_reset(backend.session(), &reset, backend.stream()));
            }
            assert_ok(vwd_predictor_update(backend.session(), &update, backend.stream()));
            assert_ok(vwd_predictor_calibrate(backend.session(), &calibrate, &mut holt, &mut rate));
        }
        assert_eq!((holt.alpha, holt.beta, holt.gamma, rate), (1.0, 0.0, 0.0, 0.0));
    }
    // Without sequences or heads there is no count to write either.
    for shape in [[2, 0, HUGE], [0, HUGE, 1 << 10], [0, HUGE, HUGE]] {
        let level = boundless(F32, &shape);
        let args = vwd_predictor_predict_args {
            block_size: 4,
            k: 7,
            state: vwd_predictor_state { level, trend: level },
            seq_lens: if shape[0] == 2 { lens.c() } else { boundless(I32, &[0]) },
            predicted: vwd_block_list {
                ids: boundless(I32, &[shape[0], shape[1], 7]),
                counts: boundless(I32, &shape[..2]),
                slots: absent(),
            },
            ..args()
        };
        // SAFETY: as above.
        assert_ok(unsafe { vwd_predictor_predict(backend.session(), &args, backend.stream()) });
    }
}

fn predictor_results_do_not_depend_on_the_number_of_threads(_: &Backend) {
    let (one, three) = (Backend::cpu(1), Backend::cpu(3));
    let mut rng = Rng::new(11);
    // Large enough for the work to be shared.
    let shape = [8, 8, 512];
    let step = rng.normals(&shape);
    let [a, b] = [&one, &three].map(|backend| {
        let holt = vwd_holt { alpha: 0.7, beta: 0.3, gamma: 0.6 };
        let layer = Layer::new(backend, &shape, [&Layout::default(), &Layout::default()], holt);
        layer.update(&[2048; 8], &step);
        layer.update(&[2048; 8], &step.map(|s| s * 0.5));
        layer.predict(&Prediction { lens: vec![2048; 8], k: 64, ratio: 1.25, ..Prediction::default() }, 80)
    });
    assert_eq!(a, b);
}
