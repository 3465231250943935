//! vwd_topk against a plain sort: which scores are selected, where they stand, and that nothing else is written.

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    topk_agrees_with_a_plain_sort,
    topk_is_exact_whatever_the_distribution,
    topk_takes_long_rows_and_many,
    topk_of_long_rows_is_exact_whatever_the_distribution,
    topk_of_1024_ragged_rows_is_exact,
    topk_is_the_same_every_time,
];

/// Scores and what is asked of them.
pub struct Scene {
    pub dtype: DType,
    /// [R, n]
    pub scores: Array<f64>,
    pub lens: Option<Array<i64>>,
    pub budgets: Option<Array<i64>>,
    pub k: usize,
    pub cap: usize,
    pub best_first: bool,
}

impl Scene {
    fn plain(scores: Array<f64>, k: usize) -> Scene {
        Scene { dtype: F32, scores, lens: None, budgets: None, k, cap: k, best_first: false }
    }

    /// What row r selects, in order: by the definition.
    fn expected(&self, r: usize) -> Vec<usize> {
        let (n, row) = (self.scores.shape[1], self.scores.row([r]));
        let clamp = |given: i64, most: usize| given.clamp(0, most as i64) as usize;
        let len = self.lens.as_ref().map_or(n, |lens| clamp(lens[[r]], n));
        let k = self.budgets.as_ref().map_or(self.k, |budgets| clamp(budgets[[r]], self.cap));
        let value = |j: usize| if row[j].is_nan() { f64::NEG_INFINITY } else { row[j] };
        let mut order: Vec<usize> = (0..len).collect();
        order.sort_by(|&a, &b| value(b).partial_cmp(&value(a)).expect("no NaN").then(a.cmp(&b)));
        order.truncate(k);
        if !self.best_first {
            order.sort_unstable();
        }
        order
    }

    /// Runs it in these layouts of scores and results, and compares every row.
    pub fn check(&self, backend: &Backend, [scores_at, results_at]: [&Layout; 2]) {
        let (rows, plain) = (self.scores.shape[0], Layout::default());
        let ints = |a: &Array<i64>| Tensor::ints(backend, I32, a, &plain);
        let scores = Tensor::floats(backend, self.dtype, &self.scores, scores_at);
        let (lens, budgets) = (self.lens.as_ref().map(ints), self.budgets.as_ref().map(ints));
        let ids = Tensor::poisoned(backend, I32, &[rows, self.cap], results_at);
        let values = Tensor::poisoned(backend, self.dtype, &[rows, self.cap], results_at);
        let counts = Tensor::poisoned(backend, I32, &[rows], &plain);
        let call = vwd_topk_args {
            k: self.k as u32,
            order: if self.best_first { VWD_TOPK_BEST_FIRST } else { VWD_TOPK_ASCENDING },
            scores: scores.c(),
            lens: lens.as_ref().map_or(absent(), Tensor::c),
            budgets: budgets.as_ref().map_or(absent(), Tensor::c),
            ids: ids.c(),
            counts: counts.c(),
            values: values.c(),
            ..args()
        };
        // SAFETY: the tensors are alive.
        backend.finish(unsafe { vwd_topk(backend.session(), &call, backend.stream()) });
        let expected: Vec<Vec<usize>> = (0..rows).map(|r| self.expected(r)).collect();
        let (found, taken, stored) = (ids.read_ints(), values.read_raw(), scores.read_raw());
        assert_eq!(counts.read_ints().data, expected.iter().map(|row| row.len() as i64).collect::<Vec<_>>(), "counts");
        for (r, expected) in expected.iter().enumerate() {
            let ids: Vec<usize> = found.row([r])[..expected.len()].iter().map(|&id| id as usize).collect();
            assert!(ids == *expected, "row {r} of {rows}: {}", difference(&ids, expected));
            for (place, &j) in expected.iter().enumerate() {
                assert_eq!(taken.row([r])[place], stored.row([r])[j], "value {place} of row {r}");
            }
        }
        ids.assert_written("ids", |at| at[1] < expected[at[0]].len());
        values.assert_written("values", |at| at[1] < expected[at[0]].len());
    }
}

fn difference(found: &[usize], expected: &[usize]) -> String {
    let at = found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(found.len().min(expected.len()));
    format!("place {at} of {}: {:?} for {:?}", expected.len(), found.get(at), expected.get(at))
}

const SPECIAL: [f64; 8] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1e-45, -1e-45, 1.0];

fn topk_agrees_with_a_plain_sort(backend: &Backend) {
    let plain = Layout::default();
    rounds(60, |rng| {
        let (rows, n) = (rng.size(0..=5), rng.pick(&[0, 1, 3, 31, 128, 129, 700, 3000]));
        let (dtype, cap) = (rng.pick(&[F32, F16, BF16]), rng.pick(&[0, 1, 7, 128, 600]));
        // Few values: ties everywhere; or many; or all that is odd.
        let kind = rng.size(0..=2);
        let scores = Array::from_fn(&[rows, n], |_| match kind {
            0 => rng.int(-3..=3) as f64,
            1 => rng.normal(),
            _ => rng.pick(&SPECIAL),
        });
        let ragged = |rng: &mut Rng, most: usize| {
            rng.one_in(2).then(|| Array::from_fn(&[rows], |_| rng.int(-2..=most as i64 + 2)))
        };
        let (lens, budgets) = (ragged(rng, n), ragged(rng, cap));
        let (k, best_first) = (rng.size(cap.min(budgets.is_none().into())..=cap), rng.one_in(2));
        let scores = scores.map(|&x| dtype.round(x));
        let layouts = if rng.one_in(2) {
            [Layout::random(rng, 2), Layout::random(rng, 2)]
        } else {
            [plain.clone(), plain.clone()]
        };
        Scene { dtype, scores, lens, budgets, k, cap, best_first }.check(backend, layouts.each_ref());
    });
}

/// What defeats counting by digits where it is not exact: one bin for all, a bin for few, all of the best in one place.
fn topk_is_exact_whatever_the_distribution(backend: &Backend) {
    let plain = Layout::default();
    rounds(2, |rng| {
        for n in [1000, 5000, 20_000] {
            let mut bits = |least: u32, count: i64| {
                Array::from_fn(&[1, n], |_| f32::from_bits(least + rng.int(0..=count - 1) as u32) as f64)
            };
            let (denormal, near_one) = (bits(0, 1 << 22), bits(1f32.to_bits(), 3000));
            let (tiny, negative) = (bits(0, 3), bits((-7f32).to_bits(), 100));
            let best_at = |begin: usize| {
                Array::from_fn(&[1, n], |at| if at[1] / 300 == begin { 2.0 } else { at[1] as f64 / -1e9 })
            };
            let constant = Array::filled(&[1, n], -2.5);
            let rising = Array::from_fn(&[1, n], |at| at[1] as f64);
            let falling = rising.map(|&x| -x);
            let nothing = Array::filled(&[1, n], f64::NAN);
            let zeros = Array::from_fn(&[1, n], |at| if at[1] % 2 == 0 { -0.0 } else { 0.0 });
            let all =
                [denormal, near_one, tiny, negative, best_at(0), best_at(2), constant, rising, falling, nothing, zeros];
            for (number, scores) in all.into_iter().enumerate() {
                for k in [1, 128, 299, n - 1, n] {
                    println!("distribution {number}, {k} of {n}");
                    let scene = Scene::plain(scores.clone(), k);
                    scene.check(backend, [&plain, &plain]);
                    if k <= 4096 {
                        Scene { best_first: true, ..scene }.check(backend, [&plain, &plain]);
                    }
                }
            }
        }
    });
}

/// Rows that take a cluster, beyond its registers and beyond its shared memory; and more rows than run at once.
fn topk_takes_long_rows_and_many(backend: &Backend) {
    let plain = Layout::default();
    rounds(1, |rng| {
        for (rows, n, k) in
            [(2, 40_000, 2048), (3, 140_000, 128), (1, 500_000, 4096), (40, 70_000, 2048), (300, 900, 64)]
        {
            let lens = (rows > 1).then(|| Array::from_fn(&[rows], |at| if at[0] == 0 { n } else { rng.int(0..=n) }));
            for best_first in [false, true] {
                let dtype = if best_first { F32 } else { rng.pick(&[F32, BF16]) };
                let scores = rng.normals(&[rows, n as usize]).map(|&x| dtype.round(x));
                let scene = Scene { dtype, lens: lens.clone(), best_first, ..Scene::plain(scores, k) };
                scene.check(backend, [&plain, &plain]);
            }
        }
    });
}

/// What a sample of a row misjudges: equal scores, scores in order, the best in one place, few numbers, a period.
fn topk_of_long_rows_is_exact_whatever_the_distribution(backend: &Backend) {
    let plain = Layout::default();
    rounds(1, |rng| {
        let n = 50_000;
        let mut row =
            |make: &mut dyn FnMut(&mut Rng, usize) -> f64| Array::from_fn(&[1, n], |at| F32.round(make(rng, at[1])));
        let all = [
            row(&mut |_, _| -2.5),
            row(&mut |_, j| j as f64),
            row(&mut |_, j| -(j as f64)),
            row(&mut |rng, j| if j / 3000 == 9 { 9.0 + rng.normal() } else { rng.normal() }),
            row(&mut |rng, _| if rng.one_in(50) { rng.normal() } else { f64::NEG_INFINITY }),
            row(&mut |rng, _| rng.normal().max(0.0)),
            row(&mut |rng, _| rng.int(-3..=3) as f64),
            row(&mut |_, j| if j % 48 < 8 { 1.0 } else { j as f64 }),
            row(&mut |rng, _| rng.pick(&SPECIAL)),
        ];
        for (number, scores) in all.into_iter().enumerate() {
            for k in [1, 128, 2048, 3125, 3126, 20_000] {
                println!("distribution {number}, {k} of {n}");
                let scene = Scene::plain(scores.clone(), k);
                scene.check(backend, [&plain, &plain]);
                if k == 2048 {
                    Scene { best_first: true, ..scene }.check(backend, [&plain, &plain]);
                }
            }
        }
    });
}

fn topk_of_1024_ragged_rows_is_exact(backend: &Backend) {
    rounds(1, |rng| {
        let (rows, n, cap) = (1024, 2500, 300);
        let scores = Array::from_fn(&[rows, n], |at| match at[0] % 4 {
            0 => rng.normal() as f32 as f64,
            1 => rng.int(-9..=9) as f64,
            2 => f32::from_bits(rng.int(0..=u32::MAX as i64) as u32) as f64,
            _ => 1.0 + rng.unit() as f32 as f64 / 1e4,
        });
        // What is no number has many forms, of which one is read back.
        let scores = scores.map(|&x| F32.round(if x.is_nan() { f64::NAN } else { x }));
        let lens = Some(Array::from_fn(&[rows], |_| rng.int(-3..=n as i64 + 3)));
        let budgets = Some(Array::from_fn(&[rows], |_| rng.int(-3..=cap as i64 + 3)));
        for best_first in [false, true] {
            let (scores, lens, budgets) = (scores.clone(), lens.clone(), budgets.clone());
            let scene = Scene { dtype: F32, scores, lens, budgets, k: 0, cap, best_first };
            scene.check(backend, [&Layout::default(), &Layout::default()]);
        }
    });
}

/// A row's result depends neither on what ran before nor on its neighbours.
fn topk_is_the_same_every_time(backend: &Backend) {
    let plain = Layout::default();
    rounds(1, |rng| {
        let scores = rng.whole(&[9, 6000], 40);
        let tensor = Tensor::floats(backend, F32, &scores, &plain);
        let run = |t: vwd_tensor| {
            let rows = t.shape[0] as usize;
            let (ids, counts) =
                (Tensor::poisoned(backend, I32, &[rows, 500], &plain), Tensor::poisoned(backend, I32, &[rows], &plain));
            let call = vwd_topk_args { k: 500, scores: t, ids: ids.c(), counts: counts.c(), ..args() };
            // SAFETY: the tensors are alive.
            backend.finish(unsafe { vwd_topk(backend.session(), &call, backend.stream()) });
            ids.read_ints()
        };
        let first = run(tensor.c());
        for _ in 0..50 {
            assert!(run(tensor.c()) == first);
        }
        for r in 0..9 {
            let alone = Tensor::floats(backend, F32, &Array::new(&[1, 6000], scores.row([r]).to_vec()), &plain);
            assert_eq!(run(alone.c()).data, first.row([r]), "row {r} alone");
        }
    });
}
