//! The forecast against plain double-precision linear algebra: Gaussian elimination for the fit, a Jacobi SVD for the cut,
//! complex numbers for the rotary embedding.

mod files;
mod fit;
mod paths;
mod projection;
#[path = "../support/mod.rs"]
mod support;

use std::ffi::CString;
use std::path::{Path, PathBuf};
use support::{
    Array, BF16, Backend, DType, F16, F32, I32, Layout, Rng, Tensor, absent, args, assert_fails, assert_ok, kept,
    last_error, rounds,
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
    memory: bool,
}

impl Shape {
    /// Inputs of a map.
    fn inputs(&self) -> usize {
        self.input + 1 + if self.memory { self.outputs() } else { 0 }
    }

    fn outputs(&self) -> usize {
        self.heads * self.dim
    }

    /// The largest rank of a map.
    fn rank(&self) -> usize {
        self.inputs().min(self.outputs())
    }
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
            flags: if shape.memory { VWD_FORECAST_MEMORY } else { 0 },
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

    fn accumulate_tensors(&self, layer: u32, x: &Tensor, previous: Option<&Tensor>, q: &Tensor) -> vwd_status {
        let previous = previous.map_or(absent(), Tensor::c);
        let args = vwd_forecast_accumulate_args { layer, x: x.c(), previous, q: q.c(), ..args() };
        // SAFETY: everything is alive.
        unsafe { vwd_forecast_accumulate(self.raw, &args) }
    }

    fn try_accumulate(&self, layer: u32, text: &Activations) -> vwd_status {
        let [x, q] = [&text.x, &text.q].map(|values| Tensor::floats(self.backend, F32, values, &Layout::default()));
        let previous = text.previous.as_ref().map(|q| Tensor::floats(self.backend, F32, q, &Layout::default()));
        self.accumulate_tensors(layer, &x, previous.as_ref(), &q)
    }

    fn accumulate(&self, layer: u32, text: &Activations) {
        assert_ok(self.try_accumulate(layer, text));
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
    fn project(&self, layer: u32, text: &Activations, positions: &[i64], rope: vwd_rope) -> Array<f64> {
        let x = Tensor::floats(self.backend, F32, &text.x, &Layout::default());
        let previous = text.previous.as_ref().map(|q| Tensor::floats(self.backend, F32, q, &Layout::default()));
        let q = self.output(F32, positions.len(), &Layout::default());
        assert_ok(self.project_tensors(layer, &x, previous.as_ref(), positions, rope, &q));
        q.read_floats()
    }

    fn output(&self, dtype: DType, batch: usize, layout: &Layout) -> Tensor<'b> {
        Tensor::poisoned(self.backend, dtype, &[batch, self.shape.heads, self.shape.dim], layout)
    }

    fn project_tensors(
        &self,
        layer: u32,
        x: &Tensor,
        previous: Option<&Tensor>,
        positions: &[i64],
        rope: vwd_rope,
        q: &Tensor,
    ) -> vwd_status {
        let positions = Array::new(&[positions.len()], positions.to_vec());
        let positions = Tensor::ints(self.backend, I32, &positions, &Layout::default());
        let args = vwd_forecast_project_args {
            layer,
            rope: kept(rope),
            x: x.c(),
            previous: previous.map_or(absent(), Tensor::c),
            positions: positions.c(),
            q: q.c(),
            ..args()
        };
        // SAFETY: everything is alive.
        unsafe { vwd_forecast_project(self.raw, &args, self.backend.stream()) }
    }

    /// Rows at position 0, which are not rotated.
    fn outputs(&self, layer: u32, text: &Activations) -> Array<f64> {
        self.project(layer, text, &vec![0; text.x.shape[0]], no_rope())
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

fn fitted<'b>(backend: &'b Backend, rng: &mut Rng, shape: Shape, rank: u32) -> Forecast<'b> {
    let forecast = Forecast::new(backend, shape, 0.0);
    for layer in 0..shape.layers {
        forecast.accumulate(layer, &Activations::random(rng, &shape, 50));
    }
    assert_ok(forecast.solve(rank));
    forecast
}

// --- the oracle ------------------------------------------------------------------------------------------------------

/// x [N, input], previous (with memory) and q [N, heads, dim], rounded to float32.
#[derive(Clone)]
struct Activations {
    x: Array<f64>,
    previous: Option<Array<f64>>,
    q: Array<f64>,
}

impl Activations {
    /// The queries at the token before are of another scale than x̂.
    fn random(rng: &mut Rng, shape: &Shape, tokens: usize) -> Activations {
        let x = rng.normals(&[tokens, shape.input]).map(|v| F32.round(3.0 * v + 0.5));
        let mut queries = |scale: f64| rng.normals(&[tokens, shape.heads, shape.dim]).map(|v| F32.round(scale * v));
        let q = queries(1.0);
        Activations { x, previous: shape.memory.then(|| queries(12.0)), q }
    }

    /// Inputs alone, without memory.
    fn of(x: Array<f64>) -> Activations {
        let q = Array::filled(&[x.shape[0], 0, 0], 0.0);
        Activations { x, previous: None, q }
    }

    fn part(&self, from: usize, to: usize) -> Activations {
        let cut = |a: &Array<f64>| {
            let mut shape = a.shape.clone();
            shape[0] = to - from;
            Array::new(&shape, (from..to).flat_map(|i| a.row([i]).to_vec()).collect())
        };
        Activations { x: cut(&self.x), previous: self.previous.as_ref().map(cut), q: cut(&self.q) }
    }

    /// What a map reads of token `i`: x / rms(x), the queries at the token before, and 1.
    fn inputs(&self, i: usize) -> Vec<f64> {
        let x = self.x.row([i]);
        let rms = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt();
        let previous = self.previous.as_ref().map_or(&[][..], |q| q.row([i]));
        x.iter().map(|v| if rms == 0.0 { 0.0 } else { v / rms }).chain(previous.iter().copied()).chain([1.0]).collect()
    }
}

/// W [inputs][outputs] = (X̂ᵀX̂ + λ·M)⁻¹ X̂ᵀQ by Gaussian elimination with pivoting.
fn ridge(text: &Activations, lambda: f64) -> Vec<Vec<f64>> {
    let rows: Vec<Vec<f64>> = (0..text.x.shape[0]).map(|i| text.inputs(i)).collect();
    let n = rows[0].len();
    let mut system: Vec<Vec<f64>> = (0..n)
        .map(|a| {
            let gram = (0..n).map(|b| rows.iter().map(|x| x[a] * x[b]).sum());
            let outputs = text.q.row([0]).len();
            let cross = (0..outputs).map(|c| rows.iter().zip(0..).map(|(x, i)| x[a] * text.q.row([i])[c]).sum());
            gram.chain(cross).collect()
        })
        .collect();
    // The mean of the diagonal, over the queries at the token before and over all others apart.
    let is_query = |i: usize| (text.x.shape[1]..n - 1).contains(&i);
    for kind in [false, true] {
        let members: Vec<usize> = (0..n).filter(|&i| is_query(i) == kind).collect();
        let mean = members.iter().map(|&i| system[i][i]).sum::<f64>() / members.len() as f64;
        members.iter().for_each(|&i| system[i][i] += lambda * mean);
    }
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

/// Outputs of W for a row of inputs, and Σ|w·x|, to which a float32 product's error is relative.
fn apply(w: &[Vec<f64>], inputs: &[f64]) -> Vec<(f64, f64)> {
    let sum = |c: usize, f: fn(f64) -> f64| inputs.iter().zip(w).map(|(x, row)| f(x * row[c])).sum::<f64>();
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
