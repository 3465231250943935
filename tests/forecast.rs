//! The forecast against plain double-precision linear algebra: Gaussian elimination for the fit, a Jacobi SVD for the cut,
//! complex numbers for the rotary embedding.

#[path = "support/mod.rs"]
mod support;

use serde_json::{Value, json};
use std::ffi::CString;
use std::path::{Path, PathBuf};
use support::{
    Array, BF16, Backend, DType, F16, F32, I32, Layout, Rng, Tensor, args, assert_fails, assert_ok, kept, last_error,
    rounds,
};
use vanward::abi::*;
use vanward::capi::*;

// --- the library -----------------------------------------------------------------------------------------------------

#[derive(Clone, Copy)]
struct Shape {
    layers: u32,
    input: usize,
    heads: usize,
    dim: usize,
}

struct Forecast<'b> {
    backend: &'b Backend,
    shape: Shape,
    raw: *mut vwd_forecast,
}

// SAFETY: a forecast may be used from many threads; that it may is part of what is tested.
unsafe impl Sync for Forecast<'_> {}

impl Drop for Forecast<'_> {
    fn drop(&mut self) {
        // SAFETY: made by create or load, released once.
        unsafe { vwd_forecast_release(self.raw) };
    }
}

impl<'b> Forecast<'b> {
    fn new(backend: &'b Backend, shape: Shape, ridge: f32) -> Forecast<'b> {
        let options = vwd_forecast_options {
            layers: shape.layers,
            input_dim: shape.input as u32,
            q_heads: shape.heads as u32,
            head_dim: shape.dim as u32,
            ridge,
            ..args()
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: everything is alive.
        assert_ok(unsafe { vwd_forecast_create(backend.session(), &options, &mut raw) });
        Forecast { backend, shape, raw }
    }

    fn load(backend: &'b Backend, shape: Shape, path: &Path) -> Result<Forecast<'b>, vwd_status> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: everything is alive.
        let status = unsafe { vwd_forecast_load(backend.session(), c_path(path).as_ptr(), &mut raw) };
        if status == VWD_OK { Ok(Forecast { backend, shape, raw }) } else { Err(status) }
    }

    fn save(&self, path: &Path) -> vwd_status {
        // SAFETY: everything is alive.
        unsafe { vwd_forecast_save(self.raw, c_path(path).as_ptr()) }
    }

    fn accumulate_tensors(&self, layer: u32, x: &Tensor, q: &Tensor) -> vwd_status {
        let args = vwd_forecast_accumulate_args { layer, x: x.c(), q: q.c(), ..args() };
        // SAFETY: everything is alive.
        unsafe { vwd_forecast_accumulate(self.raw, &args) }
    }

    fn accumulate(&self, layer: u32, text: &Activations) {
        let x = Tensor::floats(self.backend, F32, &text.x, &Layout::default());
        let q = Tensor::floats(self.backend, F32, &text.q, &Layout::default());
        assert_ok(self.accumulate_tensors(layer, &x, &q));
    }

    fn solve(&self, rank: u32) -> vwd_status {
        // SAFETY: the handle is alive.
        unsafe { vwd_forecast_solve(self.raw, rank) }
    }

    fn details(&self) -> vwd_forecast_details {
        let mut details = args();
        // SAFETY: both are alive.
        assert_ok(unsafe { vwd_forecast_info(self.raw, &mut details) });
        details
    }

    /// Projects float32 rows.
    fn project(&self, layer: u32, x: &Array<f64>, positions: &[i64], rope: vwd_rope) -> Array<f64> {
        let x = Tensor::floats(self.backend, F32, x, &Layout::default());
        let q = self.output(F32, positions.len(), &Layout::default());
        assert_ok(self.project_tensors(layer, &x, positions, rope, &q));
        q.read_floats()
    }

    fn output(&self, dtype: DType, batch: usize, layout: &Layout) -> Tensor<'b> {
        Tensor::poisoned(self.backend, dtype, &[batch, self.shape.heads, self.shape.dim], layout)
    }

    fn project_tensors(&self, layer: u32, x: &Tensor, positions: &[i64], rope: vwd_rope, q: &Tensor) -> vwd_status {
        let positions = Array::new(&[positions.len()], positions.to_vec());
        let positions = Tensor::ints(self.backend, I32, &positions, &Layout::default());
        let args = vwd_forecast_project_args {
            layer,
            rope: kept(rope),
            x: x.c(),
            positions: positions.c(),
            q: q.c(),
            ..args()
        };
        // SAFETY: everything is alive.
        unsafe { vwd_forecast_project(self.raw, &args, self.backend.stream()) }
    }

    /// Rows at position 0, which are not rotated.
    fn outputs(&self, layer: u32, x: &Array<f64>) -> Array<f64> {
        self.project(layer, x, &vec![0; x.shape[0]], no_rope())
    }
}

fn no_rope() -> vwd_rope {
    args()
}

fn c_path(path: &Path) -> CString {
    CString::new(path.to_str().expect("UTF-8")).expect("no NUL")
}

/// A folder of its own, gone with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder for the test");
        Folder(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

// --- the oracle ------------------------------------------------------------------------------------------------------

/// x [N, input] and q [N, heads, dim], rounded to float32.
#[derive(Clone)]
struct Activations {
    x: Array<f64>,
    q: Array<f64>,
}

impl Activations {
    fn random(rng: &mut Rng, shape: &Shape, tokens: usize) -> Activations {
        let x = rng.normals(&[tokens, shape.input]).map(|v| F32.round(3.0 * v + 0.5));
        let q = rng.normals(&[tokens, shape.heads, shape.dim]).map(|&v| F32.round(v));
        Activations { x, q }
    }

    fn part(&self, from: usize, to: usize) -> Activations {
        let cut = |a: &Array<f64>| {
            let mut shape = a.shape.clone();
            shape[0] = to - from;
            Array::new(&shape, (from..to).flat_map(|i| a.row([i]).to_vec()).collect())
        };
        Activations { x: cut(&self.x), q: cut(&self.q) }
    }
}

/// x / rms(x) and 1.
fn hat(x: &[f64]) -> Vec<f64> {
    let rms = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt();
    x.iter().map(|v| if rms == 0.0 { 0.0 } else { v / rms }).chain([1.0]).collect()
}

/// W [inputs][outputs] = (X̂ᵀX̂ + λ·mean(diag)·I)⁻¹ X̂ᵀQ by Gaussian elimination with pivoting.
fn ridge(text: &Activations, lambda: f64) -> Vec<Vec<f64>> {
    let n = text.x.shape[1] + 1;
    let rows: Vec<Vec<f64>> = (0..text.x.shape[0]).map(|i| hat(text.x.row([i]))).collect();
    let mut system: Vec<Vec<f64>> = (0..n)
        .map(|a| {
            let gram = (0..n).map(|b| rows.iter().map(|x| x[a] * x[b]).sum());
            let outputs = text.q.row([0]).len();
            let cross = (0..outputs).map(|c| rows.iter().zip(0..).map(|(x, i)| x[a] * text.q.row([i])[c]).sum());
            gram.chain(cross).collect()
        })
        .collect();
    let mean = (0..n).map(|i| system[i][i]).sum::<f64>() / n as f64;
    (0..n).for_each(|i| system[i][i] += lambda * mean);
    for column in 0..n {
        let pivot = (column..n).max_by(|&a, &b| system[a][column].abs().total_cmp(&system[b][column].abs())).unwrap();
        system.swap(column, pivot);
        let lead = system[column].clone();
        for (i, row) in system.iter_mut().enumerate() {
            let factor = row[column] / lead[column];
            if i != column {
                row.iter_mut().zip(&lead).for_each(|(value, lead)| *value -= factor * lead);
            }
        }
    }
    (0..n).map(|i| system[i][n..].iter().map(|value| value / system[i][i]).collect()).collect()
}

/// Outputs of W for a row, and Σ|w·x̂|, to which a float32 product's error is relative.
fn apply(w: &[Vec<f64>], x: &[f64]) -> Vec<(f64, f64)> {
    let x = hat(x);
    let sum = |c: usize, f: fn(f64) -> f64| x.iter().zip(w).map(|(x, row)| f(x * row[c])).sum::<f64>();
    (0..w[0].len()).map(|c| (sum(c, |v| v), sum(c, f64::abs))).collect()
}

/// Squared singular values, largest first, by one-sided Jacobi rotations of the columns.
fn squared_singular_values(mut columns: Vec<Vec<f64>>) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    for _ in 0..60 {
        for i in 0..columns.len() {
            for j in i + 1..columns.len() {
                let (a, b, c) =
                    (dot(&columns[i], &columns[i]), dot(&columns[j], &columns[j]), dot(&columns[i], &columns[j]));
                if c.abs() <= 1e-15 * (a * b).sqrt() {
                    continue;
                }
                let zeta = (b - a) / (2.0 * c);
                let t = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                let cos = 1.0 / (1.0 + t * t).sqrt();
                let (left, right) = columns.split_at_mut(j);
                for (x, y) in left[i].iter_mut().zip(&mut right[0]) {
                    (*x, *y) = (cos * (*x - t * *y), cos * (*y + t * *x));
                }
            }
        }
    }
    let mut squares: Vec<f64> = columns.iter().map(|column| dot(column, column)).collect();
    squares.sort_by(|a, b| b.total_cmp(a));
    squares
}

// --- the fit ---------------------------------------------------------------------------------------------------------

#[test]
fn solves_the_ridge_system() {
    let backend = Backend::cpu(2);
    rounds(12, |rng| {
        // 57 and more inputs, and 65 and more outputs, take more than one panel; 300 tokens more than one chunk.
        let shape = Shape { layers: 2, input: rng.size(1..=80), heads: rng.size(1..=3), dim: 2 * rng.size(1..=20) };
        let ridge_option = rng.pick(&[0.0, 1e-3, 0.1, 2.0]);
        let lambda = if ridge_option == 0.0 { 1e-3 } else { ridge_option as f64 };
        let forecast = Forecast::new(&backend, shape, ridge_option);
        // Fewer tokens than inputs, too: the ridge makes the system regular.
        let count = rng.size(1..=300);
        let text = Activations::random(rng, &shape, count);
        forecast.accumulate(1, &text);
        assert_ok(forecast.solve(0));
        let w = ridge(&text, lambda);
        let fresh = Activations::random(rng, &shape, 5);
        let found = forecast.outputs(1, &fresh.x);
        for i in 0..5 {
            for (&q, (want, size)) in found.row([i]).iter().zip(apply(&w, fresh.x.row([i]))) {
                // Rounding of W, x̂ and of a sum of up to 81/8 vectors in float32.
                assert!((q - want).abs() <= 1e-6 * size + 1e-9, "{q}, expected {want}");
            }
        }
    });
}

#[test]
fn recovers_a_linear_map() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(1);
    let shape = Shape { layers: 1, input: 40, heads: 3, dim: 8 };
    let truth = rng.normals(&[41, 24]);
    let text = |rng: &mut Rng, tokens: usize| {
        let x = rng.normals(&[tokens, 40]).map(|v| F32.round(*v));
        let q = Array::from_fn(&[tokens, 3, 8], |at| {
            let x = hat(x.row([at[0]]));
            F32.round((0..41).map(|i| x[i] * truth[[i, at[1] * 8 + at[2]]]).sum())
        });
        Activations { x, q }
    };
    let forecast = Forecast::new(&backend, shape, 1e-7);
    forecast.accumulate(0, &text(&mut rng, 400));
    assert_ok(forecast.solve(0));
    let fresh = text(&mut rng, 20);
    let found = forecast.outputs(0, &fresh.x);
    for (found, want) in found.data.iter().zip(&fresh.q.data) {
        // The ridge shrinks by 1e-7 over the smallest eigenvalue, which is above 0.3 times the mean; float32 does the rest.
        assert!((found - want).abs() < 2e-5, "{found}, expected {want}");
    }
}

#[test]
fn streaming_in_pieces_equals_accumulating_at_once() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(2);
    let shape = Shape { layers: 1, input: 30, heads: 2, dim: 6 };
    let text = Activations::random(&mut rng, &shape, 700);
    let (whole, pieces) = (Forecast::new(&backend, shape, 0.0), Forecast::new(&backend, shape, 0.0));
    whole.accumulate(0, &text);
    for (from, to) in [(0, 1), (1, 1), (1, 256), (256, 300), (300, 700)] {
        pieces.accumulate(0, &text.part(from, to));
    }
    let fresh = Activations::random(&mut rng, &shape, 9);
    let [a, b] = [&whole, &pieces].map(|forecast| {
        assert_ok(forecast.solve(0));
        forecast.outputs(0, &fresh.x)
    });
    for (a, b) in a.data.iter().zip(&b.data) {
        // The sums differ in the last bits of double precision; W may round the other way in float32.
        assert!((a - b).abs() <= 1e-6 * (1.0 + a.abs()), "{a} and {b}");
    }
}

#[test]
fn cut_to_a_rank_is_as_near_as_the_singular_values_allow() {
    let backend = Backend::cpu(2);
    rounds(6, |rng| {
        let shape = Shape { layers: 1, input: rng.size(3..=24), heads: 2, dim: 2 * rng.size(1..=5) };
        let text = Activations::random(rng, &shape, 60);
        let w = ridge(&text, 1e-3);
        let fitted: Vec<Vec<f64>> = (0..60).map(|i| apply(&w, text.x.row([i])).iter().map(|v| v.0).collect()).collect();
        let outputs = 2 * shape.dim;
        let columns = (0..outputs).map(|c| fitted.iter().map(|row| row[c]).collect()).collect();
        let squares = squared_singular_values(columns);
        let most = (shape.input + 1).min(outputs);
        let total: f64 = squares.iter().sum();
        for rank in 1..=most {
            let forecast = Forecast::new(&backend, shape, 0.0);
            forecast.accumulate(0, &text);
            assert_ok(forecast.solve(rank as u32));
            let found = forecast.outputs(0, &text.x);
            let error: f64 = (0..60).map(|i| distance(found.row([i]), &fitted[i])).sum();
            let least: f64 = squares[rank..].iter().sum();
            // Float32 outputs are off by about 1e-6 of their size, and the error is a square.
            assert!((error - least).abs() <= 1e-5 * total, "rank {rank}: {error}, at best {least} of {total}");
            assert_eq!(forecast.details().rank, rank as u32);
        }
    });
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum()
}

#[test]
fn solve_replaces_the_maps_that_have_sums_and_leaves_the_others() {
    let backend = Backend::cpu(1);
    let mut rng = Rng::new(4);
    let shape = Shape { layers: 2, input: 5, heads: 1, dim: 4 };
    let forecast = Forecast::new(&backend, shape, 0.0);
    assert_fails(forecast.solve(0), VWD_ERROR_INVALID_ARGUMENT, &["no map has sums"]);
    let texts = [(); 3].map(|()| Activations::random(&mut rng, &shape, 20));
    forecast.accumulate(0, &texts[0]);
    assert_eq!(forecast.details().sum_bytes, 8 * 6 * (6 + 4));
    assert_ok(forecast.solve(0));
    assert_eq!((forecast.details().solved, forecast.details().sum_bytes), (1, 0));
    let first = forecast.outputs(0, &texts[0].x);
    forecast.accumulate(1, &texts[1]);
    assert_ok(forecast.solve(2));
    assert_eq!(forecast.outputs(0, &texts[0].x), first);
    assert_eq!((forecast.details().solved, forecast.details().rank), (2, 2));
    // A map is fitted anew from sums that started at zero.
    forecast.accumulate(0, &texts[2]);
    assert_eq!(forecast.outputs(0, &texts[0].x), first, "until it is solved the old map is in use");
    assert_ok(forecast.solve(0));
    let fresh = Forecast::new(&backend, shape, 0.0);
    fresh.accumulate(0, &texts[2]);
    assert_ok(fresh.solve(0));
    assert_eq!(forecast.outputs(0, &texts[0].x), fresh.outputs(0, &texts[0].x));
}

#[test]
fn values_that_are_not_finite_are_refused_and_leave_the_sums_alone() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(5);
    let shape = Shape { layers: 1, input: 7, heads: 2, dim: 4 };
    let text = Activations::random(&mut rng, &shape, 300);
    let fit = |spoil: bool| {
        let forecast = Forecast::new(&backend, shape, 0.0);
        forecast.accumulate(0, &text);
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let (mut in_x, mut in_q) = (text.clone(), text.clone());
            in_x.x[[290, 6]] = bad;
            in_q.q[[299, 1, 3]] = bad;
            for (spoilt, name) in [(in_x, "x: row 290"), (in_q, "q: row 299")] {
                if spoil {
                    let x = Tensor::floats(&backend, F32, &spoilt.x, &Layout::default());
                    let q = Tensor::floats(&backend, F32, &spoilt.q, &Layout::default());
                    assert_fails(forecast.accumulate_tensors(0, &x, &q), VWD_ERROR_INVALID_ARGUMENT, &[name]);
                }
            }
        }
        assert_ok(forecast.solve(0));
        forecast.outputs(0, &text.x)
    };
    assert_eq!(fit(true), fit(false));
}

#[test]
fn a_system_without_a_solution_is_refused_and_keeps_its_sums() {
    let backend = Backend::cpu(1);
    let mut rng = Rng::new(6);
    let shape = Shape { layers: 1, input: 30, heads: 1, dim: 4 };
    let text = Activations::random(&mut rng, &shape, 3);
    let forecast = Forecast::new(&backend, shape, 1e-30);
    forecast.accumulate(0, &text);
    assert_fails(forecast.solve(0), VWD_ERROR_INVALID_ARGUMENT, &["options.ridge", "singular"]);
    assert_fails(forecast.solve(5), VWD_ERROR_INVALID_ARGUMENT, &["rank"]);
    assert_eq!(forecast.details().solved, 0);
    // Tokens enough make it regular.
    forecast.accumulate(0, &Activations::random(&mut rng, &shape, 100));
    assert_ok(forecast.solve(4));
    // W of queries near the largest float32, from an input that hardly varies, exceeds float32.
    let forecast = Forecast::new(&backend, shape, 1e-7);
    let mut text = Activations::random(&mut rng, &shape, 100);
    text.x.data.iter_mut().enumerate().for_each(|(i, x)| *x = F32.round(1.0 + 1e-4 * (*x + i as f64 % 30.0)));
    text.q.data.iter_mut().for_each(|q| *q = F32.round(q.signum() * 3e38));
    forecast.accumulate(0, &text);
    assert_fails(forecast.solve(0), VWD_ERROR_INVALID_ARGUMENT, &["float32"]);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut rng = Rng::new(8);
    let shape = Shape { layers: 3, input: 150, heads: 3, dim: 32 };
    let texts = [(); 3].map(|()| Activations::random(&mut rng, &shape, 300));
    let backends = [1, 3].map(Backend::cpu);
    for rank in [0, 17] {
        let [a, b] = backends.each_ref().map(|backend| {
            let forecast = Forecast::new(backend, shape, 0.0);
            (0..).zip(&texts).for_each(|(layer, text)| forecast.accumulate(layer, text));
            assert_ok(forecast.solve(rank));
            [0, 1, 2].map(|layer| forecast.outputs(layer, &texts[0].x))
        });
        assert_eq!(a, b);
    }
}

// --- the projection --------------------------------------------------------------------------------------------------

fn fitted<'b>(backend: &'b Backend, rng: &mut Rng, shape: Shape, rank: u32) -> Forecast<'b> {
    let forecast = Forecast::new(backend, shape, 0.0);
    for layer in 0..shape.layers {
        forecast.accumulate(layer, &Activations::random(rng, &shape, 50));
    }
    assert_ok(forecast.solve(rank));
    forecast
}

#[test]
fn rotates_as_complex_numbers_do() {
    let backend = Backend::cpu(2);
    rounds(40, |rng| {
        let shape = Shape { layers: 1, input: 6, heads: rng.size(1..=3), dim: rng.size(1..=40) };
        let forecast = fitted(&backend, rng, shape, 0);
        let rotary = 2 * rng.size(0..=shape.dim / 2);
        let own = (rotary > 0 && rng.one_in(2)).then(|| rng.normals(&[rotary / 2]).map(|&f| F32.round(f)));
        let own_tensor = own.as_ref().map(|f| Tensor::floats(&backend, F32, f, &Layout::random(&mut Rng::new(0), 1)));
        let style = rng.pick(&[VWD_ROPE_HALVES, VWD_ROPE_INTERLEAVED]);
        let rope = vwd_rope {
            style,
            rotary_dim: rotary as u32,
            theta: rng.pick(&[0.0, 10000.0, 500000.0]),
            attention_factor: rng.pick(&[0.0, 1.0, 1.25]),
            inv_freq: own_tensor.as_ref().map_or(support::absent(), Tensor::c),
            ..args()
        };
        // 0 means all channels, but for the last of an odd number.
        let rotary = if rotary == 0 { shape.dim / 2 * 2 } else { rotary };
        let positions = [0, 1, -3, 4095, 131_071, i32::MAX as i64];
        let text = Activations::random(rng, &shape, positions.len());
        let still = forecast.outputs(0, &text.x);
        let found = forecast.project(0, &text.x, &positions, rope);
        let theta = if rope.theta == 0.0 { 10000.0 } else { rope.theta as f64 };
        let factor = if rope.attention_factor == 0.0 { 1.0 } else { rope.attention_factor as f64 };
        for (i, &position) in positions.iter().enumerate() {
            for h in 0..shape.heads {
                let mut want = still.row([i, h]).to_vec();
                for c in 0..rotary / 2 {
                    let frequency = own.as_ref().map_or(theta.powf(-2.0 * c as f64 / rotary as f64), |f| f.data[c]);
                    let (sin, cos) = (position as f64 * frequency).sin_cos();
                    let (a, b) = if style == VWD_ROPE_HALVES { (c, c + rotary / 2) } else { (2 * c, 2 * c + 1) };
                    // (x + iy)·e^(iφ)
                    let (x, y) = (want[a], want[b]);
                    (want[a], want[b]) = (factor * (x * cos - y * sin), factor * (x * sin + y * cos));
                    let size = 1.25 * (x.abs() + y.abs());
                    for channel in [a, b] {
                        let error = (found[[i, h, channel]] - want[channel]).abs();
                        // cos, sin, two products and a sum in float32; 2^31 radians leave 2^-22 of an angle's fraction.
                        assert!(error <= 6e-7 * size, "position {position}, channel {channel}: off by {error}");
                    }
                }
                assert_eq!(found.row([i, h])[rotary..], want[rotary..], "channels past rotary_dim do not turn");
            }
        }
    });
}

#[test]
fn a_row_does_not_depend_on_its_batch_its_type_or_its_layout() {
    let backend = Backend::cpu(2);
    let lone = Backend::cpu(1);
    rounds(10, |rng| {
        let shape = Shape { layers: 1, input: rng.size(1..=90), heads: 3, dim: 2 * rng.size(1..=20) };
        let most = (shape.input + 1).min(3 * shape.dim) as u32;
        let rank = rng.pick(&[0, 1, most]);
        let forecast = fitted(&backend, rng, shape, rank);
        // Values that every type holds.
        let x = rng.whole(&[7, shape.input], 12);
        let positions: Vec<i64> = (0..7).map(|_| rng.int(0..=9000)).collect();
        let together = forecast.project(0, &x, &positions, no_rope());
        for i in 0..7 {
            let alone = Array::new(&[1, shape.input], x.row([i]).to_vec());
            let one = forecast.project(0, &alone, &positions[i..i + 1], no_rope());
            assert_eq!(one.data, together.row([i]), "row {i}");
        }
        for (input, output) in [(F16, BF16), (BF16, F16), (F32, F32)] {
            let x = Tensor::floats(&backend, input, &x, &Layout::random(rng, 2));
            let q = forecast.output(output, 7, &Layout::random(rng, 3));
            assert_ok(forecast.project_tensors(0, &x, &positions, no_rope(), &q));
            assert_eq!(q.read_floats(), together.map(|&v| output.round(v)));
            q.assert_written("q", |_| true);
        }
        let folder = Folder::new("threads");
        assert_ok(forecast.save(&folder.file("maps")));
        let other = Forecast::load(&lone, shape, &folder.file("maps")).expect("what was saved loads");
        assert_eq!(other.project(0, &x, &positions, no_rope()), together);
    });
}

#[test]
fn zero_tiny_and_wild_rows_are_projected() {
    let backend = Backend::cpu(1);
    let mut rng = Rng::new(9);
    let shape = Shape { layers: 1, input: 12, heads: 1, dim: 8 };
    let forecast = fitted(&backend, &mut rng, shape, 0);
    let row = rng.normals(&[12]);
    let scaled = |scale: f64| row.data.iter().map(|v| F32.round(v * scale)).collect::<Vec<_>>();
    let wild = (0..12).map(|c| if c == 3 { f64::NAN } else { 1.0 }).collect();
    let rows = [vec![0.0; 12], scaled(1.0), scaled(1e-36), scaled(1e37), wild, vec![f64::INFINITY; 12]];
    let found = forecast.outputs(0, &Array::new(&[6, 12], rows.concat()));
    // x = 0 leaves the constant's row of W: what 0 · x̂ leaves of any other row.
    assert!(found.row([0]).iter().all(|q| q.is_finite()));
    for i in [2, 3] {
        for (a, b) in found.row([i]).iter().zip(found.row([1])) {
            // Rounding of the tiny and huge inputs in float32; 1e-36 is not subnormal.
            assert!((a - b).abs() < 1e-5, "scale does not matter: {a} and {b}");
        }
    }
    assert!(found.row([4]).iter().all(|q| q.is_nan()) && found.row([5]).iter().all(|q| q.is_nan()));
    let nothing = forecast.outputs(0, &Array::filled(&[0, 12], 0.0));
    assert_eq!(nothing.shape, [0, 1, 8]);
}

#[test]
fn projections_run_while_maps_are_fitted_anew() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(10);
    let shape = Shape { layers: 2, input: 60, heads: 2, dim: 16 };
    let texts = [(); 2].map(|()| Activations::random(&mut rng, &shape, 80));
    let x = Activations::random(&mut rng, &shape, 3).x;
    let results = texts.each_ref().map(|text| {
        let forecast = Forecast::new(&backend, shape, 0.0);
        forecast.accumulate(0, text);
        assert_ok(forecast.solve(0));
        forecast.outputs(0, &x)
    });
    let forecast = Forecast::new(&backend, shape, 0.0);
    forecast.accumulate(0, &texts[0]);
    assert_ok(forecast.solve(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let found = forecast.outputs(0, &x);
                    assert!(results.contains(&found), "the old map or the new one, and nothing between");
                }
            });
        }
        scope.spawn(|| {
            for turn in 0..20 {
                forecast.accumulate(0, &texts[(turn + 1) % 2]);
                // Another thread may have solved it.
                forecast.solve(0);
            }
        });
        scope.spawn(|| {
            for _ in 0..20 {
                forecast.accumulate(1, &texts[0]);
                forecast.solve(0);
                assert!(forecast.details().solved >= 1);
            }
        });
    });
}

#[test]
fn a_forecast_outlives_its_session() {
    let backend = Backend::cpu(2);
    let shape = Shape { layers: 1, input: 4, heads: 1, dim: 2 };
    let mut session = std::ptr::null_mut();
    let mut raw = std::ptr::null_mut();
    let options = vwd_forecast_options { layers: 1, input_dim: 4, q_heads: 1, head_dim: 2, ..args() };
    let session_options = vanward::abi::vwd_session_options { device: 1, threads: 2, ..args() };
    // SAFETY: everything is alive where it is used; the session is released once.
    unsafe {
        assert_ok(vanward::capi::vwd_session_create(&session_options, &mut session));
        assert_ok(vwd_forecast_create(session, &options, &mut raw));
        vanward::capi::vwd_session_release(session);
    }
    let forecast = Forecast { backend: &backend, shape, raw };
    let text = Activations::random(&mut Rng::new(1), &shape, 9);
    forecast.accumulate(0, &text);
    assert_ok(forecast.solve(0));
    assert!(forecast.outputs(0, &text.x).data.iter().all(|q| q.is_finite()));
}

// --- files -----------------------------------------------------------------------------------------------------------

#[test]
fn what_is_saved_loads_as_it_was() {
    let backend = Backend::cpu(2);
    let folder = Folder::new("round-trip");
    rounds(6, |rng| {
        let shape = Shape { layers: 3, input: rng.size(1..=40), heads: 2, dim: 2 * rng.size(1..=9) };
        let most = (shape.input + 1).min(2 * shape.dim) as u32;
        let rank = rng.pick(&[0, 1, most]);
        let forecast = fitted(&backend, rng, shape, rank);
        // One layer of another kind than the others.
        forecast.accumulate(1, &Activations::random(rng, &shape, 30));
        assert_ok(forecast.solve(if rank == 0 { most } else { 0 }));
        let (path, again) = (folder.file("maps.safetensors"), folder.file("again.safetensors"));
        assert_ok(forecast.save(&path));
        let loaded = Forecast::load(&backend, shape, &path).expect("what was saved loads");
        let x = Activations::random(rng, &shape, 4).x;
        for layer in 0..3 {
            assert_eq!(loaded.outputs(layer, &x), forecast.outputs(layer, &x));
        }
        let (a, b) = (loaded.details(), forecast.details());
        assert_eq!((a.layers, a.input_dim, a.q_heads, a.head_dim, a.rank), (3, b.input_dim, 2, b.head_dim, b.rank));
        assert_eq!((a.solved, a.map_bytes, a.ridge), (3, b.map_bytes, b.ridge));
        // A loaded forecast can be fitted further, and the same maps make the same file.
        assert_ok(loaded.save(&again));
        assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&again).unwrap());
        loaded.accumulate(0, &Activations::random(rng, &shape, 30));
        assert_ok(loaded.solve(0));
        assert_ne!(loaded.outputs(0, &x), forecast.outputs(0, &x));
    });
    let left: Vec<_> = std::fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "no temporary file stays: {left:?}");
}

#[test]
fn save_that_fails_leaves_what_was_there() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("save");
    let shape = Shape { layers: 2, input: 4, heads: 1, dim: 2 };
    let forecast = Forecast::new(&backend, shape, 0.0);
    forecast.accumulate(0, &Activations::random(&mut Rng::new(1), &shape, 9));
    assert_ok(forecast.solve(0));
    let path = folder.file("maps");
    std::fs::write(&path, "before").unwrap();
    assert_fails(forecast.save(&path), VWD_ERROR_INVALID_ARGUMENT, &["layer 1 has no map"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"before");
    forecast.accumulate(1, &Activations::random(&mut Rng::new(2), &shape, 9));
    assert_ok(forecast.solve(0));
    assert_fails(forecast.save(&folder.file("missing/maps")), VWD_ERROR_IO, &["missing/maps"]);
    std::fs::create_dir(folder.file("folder")).unwrap();
    assert_fails(forecast.save(&folder.file("folder")), VWD_ERROR_IO, &["folder"]);
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2, "no temporary file stays");
    assert_ok(forecast.save(&path));
    assert!(Forecast::load(&backend, shape, &path).is_ok());
}

/// A safetensors file from its parts.
fn safetensors(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// What a training script would write: [outputs, inputs] tensors of one layer, input_dim 2, one head of 2.
fn script_header(dtype: &str, bytes: usize) -> Value {
    json!({
        "__metadata__": {
            "format": "vanward.forecast", "version": "1",
            "layers": "1", "input_dim": "2", "q_heads": "1", "head_dim": "2",
        },
        "layer.0.weight": { "dtype": dtype, "shape": [2, 3], "data_offsets": [0, 6 * bytes] },
    })
}

#[test]
fn files_of_other_programs_load() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("script");
    let path = folder.file("maps");
    let shape = Shape { layers: 1, input: 2, heads: 1, dim: 2 };
    let weights = [1.0, 2.0, -0.5, 0.25, -4.0, 8.0];
    for (name, dtype) in [("F32", F32), ("F16", F16), ("BF16", BF16)] {
        let values = Tensor::floats(&backend, dtype, &Array::new(&[6], weights.to_vec()), &Layout::default());
        let data = values.read_raw().data.concat();
        std::fs::write(&path, safetensors(&script_header(name, dtype.bytes()), &data)).unwrap();
        let forecast = Forecast::load(&backend, shape, &path).unwrap_or_else(|_| panic!("{}", last_error()));
        // x̂ = (1, −1, 1)
        let q = forecast.outputs(0, &Array::new(&[1, 2], vec![3.0, -3.0]));
        assert_eq!(q.data, [1.0 - 2.0 - 0.5, 0.25 + 4.0 + 8.0], "{name}");
    }
}

#[test]
fn files_that_do_not_fit_the_format_are_refused_with_the_reason() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("hostile");
    let path = folder.file("maps");
    let shape = Shape { layers: 1, input: 2, heads: 1, dim: 2 };
    let refuse = |bytes: &[u8], pieces: &[&str]| {
        std::fs::write(&path, bytes).unwrap();
        let status = Forecast::load(&backend, shape, &path).map(|_| VWD_OK).unwrap_or_else(|status| status);
        assert_fails(status, VWD_ERROR_IO, &[&["maps: "], pieces].concat());
    };
    let data: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let whole = safetensors(&script_header("F32", 4), &data);
    std::fs::write(&path, &whole).unwrap();
    assert!(Forecast::load(&backend, shape, &path).is_ok());
    for length in [0, 4, 8, 20, whole.len() - 25, whole.len() - 24, whole.len() - 1] {
        refuse(&whole[..length], &[]);
    }
    refuse(&[&whole[..], &[0]].concat(), &["25 bytes of tensors; expected 24"]);
    for length in [u64::MAX, 1 << 63, 200_000_000, whole.len() as u64 - 7] {
        refuse(&[&length.to_le_bytes()[..], &whole[8..]].concat(), &["header"]);
    }
    refuse(&safetensors(&json!([1, 2]), &data), &["no safetensors header"]);
    let with = |place: &str, value: Value| {
        let mut header = script_header("F32", 4);
        *header.pointer_mut(place).expect("is there") = value;
        safetensors(&header, &data)
    };
    for (field, value, piece) in [
        ("format", "pt", "vanward.forecast"),
        ("version", "2", "version"),
        ("layers", "0", "layers"),
        ("layers", "4000000000", "layers"),
        ("layers", "99999999999999999999999", "layers"),
        ("layers", "2", "layer.1.weight"),
        ("input_dim", "-2", "input_dim"),
        ("input_dim", "3", "[2, 4]"),
        ("q_heads", "1048576", "q_heads"),
        ("head_dim", "two", "head_dim"),
    ] {
        refuse(&with(&format!("/__metadata__/{field}"), json!(value)), &[piece]);
    }
    refuse(&with("/__metadata__", json!({})), &["format"]);
    refuse(&with("/layer.0.weight/dtype", json!("I32")), &["layer.0.weight", "I32"]);
    refuse(&with("/layer.0.weight/dtype", json!("F4")), &[]);
    refuse(&with("/layer.0.weight/shape", json!([3, 2])), &["layer.0.weight", "[3, 2]", "[2, 3]"]);
    refuse(&with("/layer.0.weight/shape", json!([u64::MAX, u64::MAX])), &["overflow"]);
    refuse(&with("/layer.0.weight/data_offsets", json!([0, 28])), &[]);
    refuse(&with("/layer.0.weight/data_offsets", json!([24, 0])), &[]);
    let mut bad = data.clone();
    bad[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    refuse(&safetensors(&script_header("F32", 4), &bad), &["layer.0.weight", "not finite"]);
    let mut more = script_header("F32", 4);
    more["other"] = json!({ "dtype": "F32", "shape": [0], "data_offsets": [24, 24] });
    refuse(&safetensors(&more, &data), &["2 tensors"]);
    let mut cut = script_header("F32", 4);
    cut.as_object_mut().unwrap().remove("layer.0.weight");
    refuse(&safetensors(&cut, &[]), &["layer.0.weight"]);
    cut["layer.0.down"] = json!({ "dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12] });
    refuse(&safetensors(&cut, &data[..12]), &["layer.0.up"]);
    cut["layer.0.down"] = json!({ "dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24] });
    refuse(&safetensors(&cut, &data), &["layer.0.down", "rank"]);
    assert_eq!(Forecast::load(&backend, shape, &folder.file("none")).err(), Some(VWD_ERROR_IO));
    assert_eq!(Forecast::load(&backend, shape, &folder.0).err(), Some(VWD_ERROR_IO));
    assert!(last_error().contains("expected a regular file"));
}

#[test]
fn damaged_headers_never_do_worse_than_an_error() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("damaged");
    let path = folder.file("maps");
    let shape = Shape { layers: 1, input: 2, heads: 1, dim: 2 };
    let whole = safetensors(&script_header("F32", 4), &[0; 24]);
    rounds(300, |rng| {
        let mut bytes = whole.clone();
        for _ in 0..rng.size(1..=4) {
            let at = rng.size(0..=whole.len() - 25);
            bytes[at] = rng.pick(b"0192345678{}[]\",:.-eFBIx\0\xff");
        }
        std::fs::write(&path, &bytes).unwrap();
        let status = Forecast::load(&backend, shape, &path).map(|_| VWD_OK).unwrap_or_else(|status| status);
        assert!(status == VWD_OK || status == VWD_ERROR_IO, "{status}: {}", last_error());
    });
}

// --- errors ----------------------------------------------------------------------------------------------------------

#[test]
fn bad_arguments_are_named_and_nothing_is_written() {
    let backend = Backend::cpu(1);
    let good = vwd_forecast_options { layers: 2, input_dim: 6, q_heads: 2, head_dim: 5, ..args() };
    let create = |name: &str, change: &dyn Fn(&mut vwd_forecast_options)| {
        let mut options = good;
        change(&mut options);
        let mut raw = std::ptr::null_mut();
        // SAFETY: everything is alive.
        let status = unsafe { vwd_forecast_create(backend.session(), &options, &mut raw) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &[name]);
        assert!(raw.is_null());
    };
    create("options.layers", &|o| o.layers = 0);
    create("options.layers", &|o| o.layers = u32::MAX);
    create("options.input_dim", &|o| o.input_dim = 0);
    create("options.input_dim", &|o| o.input_dim = u32::MAX);
    create("options.q_heads", &|o| (o.q_heads, o.head_dim) = (1 << 20, 1 << 20));
    create("options.head_dim", &|o| o.head_dim = 0);
    create("options.ridge", &|o| o.ridge = -1.0);
    create("options.ridge", &|o| o.ridge = f32::NAN);

    let mut rng = Rng::new(12);
    let shape = Shape { layers: 2, input: 6, heads: 2, dim: 5 };
    let forecast = Forecast::new(&backend, shape, 0.0);
    forecast.accumulate(0, &Activations::random(&mut rng, &shape, 30));
    assert_ok(forecast.solve(0));
    let plain = Layout::default();
    let x = Tensor::floats(&backend, F32, &rng.normals(&[3, 6]), &plain);
    let positions = Tensor::ints(&backend, I32, &Array::filled(&[3], 7), &plain);
    let q = forecast.output(F32, 3, &plain);
    let rope = vwd_rope { rotary_dim: 4, ..no_rope() };
    let good = vwd_forecast_project_args { rope: kept(rope), x: x.c(), positions: positions.c(), q: q.c(), ..args() };
    let project = |name: &str, change: &dyn Fn(&mut vwd_forecast_project_args)| {
        let mut args = good;
        change(&mut args);
        // SAFETY: everything is alive.
        let status = unsafe { vwd_forecast_project(forecast.raw, &args, std::ptr::null_mut()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &[name]);
        q.assert_untouched("q");
    };
    project("layer", &|a| a.layer = 2);
    project("layer: 1 has no map", &|a| a.layer = 1);
    project("rope.style", &|a| a.rope = kept(vwd_rope { style: 2, ..rope }));
    project("rope.rotary_dim", &|a| a.rope = kept(vwd_rope { rotary_dim: 3, ..rope }));
    project("rope.rotary_dim", &|a| a.rope = kept(vwd_rope { rotary_dim: 6, ..rope }));
    project("rope.theta", &|a| a.rope = kept(vwd_rope { theta: -1.0, ..rope }));
    project("rope.theta", &|a| a.rope = kept(vwd_rope { theta: f32::NAN, ..rope }));
    project("rope.attention_factor", &|a| a.rope = kept(vwd_rope { attention_factor: f32::INFINITY, ..rope }));
    project("rope.inv_freq", &|a| a.rope = kept(vwd_rope { inv_freq: a.positions, ..rope }));
    project("x", &|a| a.x.shape[1] = 5);
    project("positions", &|a| a.positions.shape[0] = 2);
    project("q", &|a| a.q.shape[2] = 4);
    project("q", &|a| a.q.data = a.x.data);
    project("q", &|a| a.q.strides[0] = 0);

    let text = Activations::random(&mut rng, &shape, 3);
    let q = Tensor::floats(&backend, F32, &text.q, &plain);
    let good = vwd_forecast_accumulate_args { x: x.c(), q: q.c(), ..args() };
    let accumulate = |name: &str, change: &dyn Fn(&mut vwd_forecast_accumulate_args)| {
        let mut args = good;
        change(&mut args);
        // SAFETY: everything is alive.
        assert_fails(unsafe { vwd_forecast_accumulate(forecast.raw, &args) }, VWD_ERROR_INVALID_ARGUMENT, &[name]);
    };
    accumulate("layer", &|a| a.layer = 2);
    accumulate("x", &|a| a.x.dtype_bits = 64);
    accumulate("q", &|a| a.q.shape[0] = 2);
    accumulate("x", &|a| a.x.device_type = 2);
    assert_eq!(forecast.details().sum_bytes, 0);
}

#[test]
fn memory_that_cannot_be_had_is_an_error() {
    let backend = Backend::cpu(1);
    // X̂ᵀX̂ of the widest stream would take 8 TiB.
    let shape = Shape { layers: 1, input: 1 << 20, heads: 1, dim: 2 };
    let forecast = Forecast::new(&backend, shape, 0.0);
    let x = Tensor::floats(&backend, F32, &Array::filled(&[1, 1 << 20], 1.0), &Layout::default());
    let q = Tensor::floats(&backend, F32, &Array::filled(&[1, 1, 2], 1.0), &Layout::default());
    assert_fails(forecast.accumulate_tensors(0, &x, &q), VWD_ERROR_OUT_OF_MEMORY, &["X̂ᵀX̂"]);
    assert_eq!(forecast.details().sum_bytes, 0);
}
