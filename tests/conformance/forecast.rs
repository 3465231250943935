//! vwd_forecast_project, with maps that the test makes itself and hands over in a file.

use crate::Case;
use crate::support::*;
use std::ffi::CString;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    forecast_projects_what_the_formula_projects,
    forecast_of_low_rank_projects_what_the_formula_projects,
    forecast_with_memory_projects_what_the_formula_projects,
    forecast_projects_a_row_of_zeros_to_the_constant,
];

/// A map W [q_heads·head_dim, inputs] as up [outputs, r] · down [r, inputs], or whole.
struct Map {
    heads: usize,
    dim: usize,
    input_dim: usize,
    memory: bool,
    factors: Vec<(&'static str, Array<f64>)>,
}

impl Map {
    fn random(rng: &mut Rng, rank: Option<usize>, memory: bool) -> Map {
        let (heads, dim, input_dim) = (rng.size(1..=6), rng.pick(&[8, 16, 40, 64]), rng.pick(&[2, 63, 199, 576]));
        let inputs = input_dim + if memory { heads * dim } else { 0 } + 1;
        let mut factor =
            |rows: usize, columns: usize| rng.normals(&[rows, columns]).map(|x| F32.round(x / (columns as f64).sqrt()));
        let factors = match rank {
            None => vec![("weight", factor(heads * dim, inputs))],
            Some(rank) => vec![("down", factor(rank, inputs)), ("up", factor(heads * dim, rank))],
        };
        Map { heads, dim, input_dim, memory, factors }
    }

    /// As a file, read by the library.
    fn load(&self, backend: &Backend) -> Forecast {
        let (mut tensors, mut data) = (String::new(), vec![]);
        for (name, values) in &self.factors {
            let (begin, [rows, columns]) = (data.len(), [values.shape[0], values.shape[1]]);
            data.extend(values.data.iter().flat_map(|&x| (x as f32).to_le_bytes()));
            let offsets = format!("[{begin},{}]", data.len());
            tensors +=
                &format!(r#","layer.0.{name}":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":{offsets}}}"#);
        }
        let Map { heads, dim, input_dim, memory, .. } = self;
        let flags = if *memory { VWD_FORECAST_MEMORY } else { 0 };
        let metadata = format!(
            r#""format":"vanward.forecast","version":"2","flags":"{flags}","layers":"1","input_dim":"{input_dim}","q_heads":"{heads}","head_dim":"{dim}""#
        );
        let header = format!(r#"{{"__metadata__":{{{metadata}}}{tensors}}}"#);
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        let thread = format!("{:?}", std::thread::current().id()).replace(['(', ')'], "");
        let path = std::env::temp_dir().join(format!("vanward-forecast-{}-{thread}", std::process::id()));
        std::fs::write(&path, file).expect("write to the temporary folder");
        let name = CString::new(path.to_str().expect("UTF-8")).unwrap();
        let mut forecast = std::ptr::null_mut();
        // SAFETY: the pointers are valid.
        let status = unsafe { vwd_forecast_load(backend.session(), name.as_ptr(), &mut forecast) };
        let _ = std::fs::remove_file(&path);
        assert_ok(status);
        Forecast(forecast)
    }

    /// W·[x̂, previous, 1] for one row, and the sum of the products' magnitudes of each output.
    fn apply(&self, x: &[f64], previous: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let mut values: Vec<f64> = x.iter().map(|x| if rms > 0.0 { x / rms } else { 0.0 }).collect();
        values.extend_from_slice(previous);
        values.push(1.0);
        let mut sizes: Vec<f64> = values.iter().map(|x| x.abs()).collect();
        for (_, factor) in &self.factors {
            let rows = 0..factor.shape[0];
            let absolute = |row: &[f64]| row.iter().map(|w| w.abs()).collect::<Vec<f64>>();
            (values, sizes) = (
                rows.clone().map(|row| oracle::dot(factor.row([row]), &values)).collect(),
                rows.map(|row| oracle::dot(&absolute(factor.row([row])), &sizes)).collect(),
            );
        }
        (values, sizes)
    }
}

struct Forecast(*mut vwd_forecast);

impl Drop for Forecast {
    fn drop(&mut self) {
        // SAFETY: loaded above, released once.
        unsafe { vwd_forecast_release(self.0) };
    }
}

fn check(backend: &Backend, rng: &mut Rng, map: &Map, x: &Array<f64>) {
    let batch = x.shape[0];
    let forecast = map.load(backend);
    let style = rng.pick(&[VWD_ROPE_HALVES, VWD_ROPE_INTERLEAVED]);
    let rotary = rng.pick(&[map.dim, map.dim, map.dim / 2, 2]);
    let factor = rng.pick(&[1.0, 1.25]);
    let own = rng.one_in(2).then(|| rng.normals(&[rotary / 2]).map(|&f| F32.round(f)));
    let own_tensor = own.as_ref().map(|own| Tensor::floats(backend, F32, own, &Layout::default()));
    let rope = vwd_rope {
        style,
        rotary_dim: rotary as u32,
        theta: 0.0,
        attention_factor: factor as f32,
        inv_freq: own_tensor.as_ref().map_or(absent(), Tensor::c),
        ..args()
    };
    let positions = Array::from_fn(&[batch], |_| rng.pick(&[0, 1, 77, 4095, 131_071]));
    let input = Tensor::floats(backend, rng.pick(&[F32, F16, BF16]), x, &Layout::random(rng, 2));
    let places = Tensor::ints(backend, I32, &positions, &Layout::random(rng, 1));
    let previous = map.memory.then(|| {
        let values = rng.normals(&[batch, map.heads, map.dim]).map(|q| 3.0 * q);
        Tensor::floats(backend, rng.pick(&[F32, F16, BF16]), &values, &Layout::random(rng, 3))
    });
    let dtype = rng.pick(&[F32, F16, BF16]);
    let q = Tensor::poisoned(backend, dtype, &[batch, map.heads, map.dim], &Layout::random(rng, 3));
    let args = vwd_forecast_project_args {
        rope: &rope,
        x: input.c(),
        previous: previous.as_ref().map_or(absent(), Tensor::c),
        positions: places.c(),
        q: q.c(),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_forecast_project(forecast.0, &args, backend.stream()) });
    let (got, x) = (q.read_floats(), input.read_floats());
    let past = previous.as_ref().map(Tensor::read_floats);
    let inputs = map.factors[0].1.shape[1];
    for i in 0..batch {
        let (values, sizes) = map.apply(x.row([i]), past.as_ref().map_or(&[], |q| q.row([i])));
        for h in 0..map.heads {
            let (mut want, sizes) = (values[h * map.dim..][..map.dim].to_vec(), &sizes[h * map.dim..][..map.dim]);
            // One rounding per product and sum, over the inputs and, at low rank, over the rank; RoPE adds a few.
            let mut tolerance: Vec<f64> = sizes.iter().map(|s| (inputs + 70) as f64 * F32.epsilon() * s).collect();
            for c in 0..rotary / 2 {
                let frequency = own.as_ref().map_or(10000f64.powf(-2.0 * c as f64 / rotary as f64), |own| own.data[c]);
                let (sin, cos) = (positions[[i]] as f64 * frequency).sin_cos();
                let (a, b) = if style == VWD_ROPE_HALVES { (c, c + rotary / 2) } else { (2 * c, 2 * c + 1) };
                let (x, y) = (want[a], want[b]);
                (want[a], want[b]) = (factor * (x * cos - y * sin), factor * (x * sin + y * cos));
                let both = factor * (tolerance[a] + tolerance[b]);
                (tolerance[a], tolerance[b]) = (both, both);
            }
            for c in 0..map.dim {
                let (got, want) = (got[[i, h, c]], want[c]);
                let tolerance = tolerance[c] + 2.0 * dtype.rounding(want);
                assert!((got - want).abs() <= tolerance, "q[{i}, {h}, {c}]: {got}, expected {want} ± {tolerance:e}");
            }
        }
    }
    q.assert_written("q", |_| true);
    input.assert_untouched("x");
    previous.iter().for_each(|previous| previous.assert_untouched("previous"));
}

fn forecast_projects_what_the_formula_projects(backend: &Backend) {
    rounds(25, |rng| {
        let map = Map::random(rng, None, false);
        let batch = rng.size(0..=9);
        let x = rng.normals(&[batch, map.input_dim]);
        check(backend, rng, &map, &x);
    });
}

fn forecast_of_low_rank_projects_what_the_formula_projects(backend: &Backend) {
    rounds(25, |rng| {
        let rank = rng.size(1..=3);
        let map = Map::random(rng, Some(rank), false);
        let batch = rng.size(0..=9);
        let x = rng.normals(&[batch, map.input_dim]);
        check(backend, rng, &map, &x);
    });
}

fn forecast_with_memory_projects_what_the_formula_projects(backend: &Backend) {
    rounds(25, |rng| {
        let rank = rng.one_in(2).then(|| rng.size(1..=3));
        let map = Map::random(rng, rank, true);
        let batch = rng.size(0..=9);
        let x = rng.normals(&[batch, map.input_dim]);
        check(backend, rng, &map, &x);
    });
}

fn forecast_projects_a_row_of_zeros_to_the_constant(backend: &Backend) {
    rounds(3, |rng| {
        let map = Map::random(rng, None, false);
        check(backend, rng, &map, &Array::filled(&[2, map.input_dim], 0.0));
    });
}
