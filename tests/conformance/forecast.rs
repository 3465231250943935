//! vwd_forecast_project, with maps that the test makes itself and hands over in a file.

use crate::Case;
use crate::support::maps::{Forecast, Map};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    forecast_projects_what_the_formula_projects,
    forecast_of_low_rank_projects_what_the_formula_projects,
    forecast_with_memory_projects_what_the_formula_projects,
    forecast_projects_a_row_of_zeros_to_the_constant,
    forecast_projects_large_maps_and_batches,
    forecast_bits_of_a_row_do_not_depend_on_the_batch,
    forecast_projects_rows_of_any_scale,
    forecast_by_each_variant_of_low_rank_has_the_same_bits,
];

/// Heads, channels and inputs of a small map.
fn small(rng: &mut Rng) -> [usize; 3] {
    [rng.size(1..=6), rng.pick(&[8, 16, 40, 64]), rng.pick(&[2, 63, 199, 576])]
}

fn check(backend: &Backend, rng: &mut Rng, map: &Map, x: &Array<f64>) {
    let batch = x.shape[0];
    let forecast = map.load(backend);
    let style = rng.pick(&[VWD_ROPE_HALVES, VWD_ROPE_INTERLEAVED]);
    let rotary = rng.pick(&[map.dim, map.dim, map.dim / 2, 2]) / 2 * 2;
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
        let shape = small(rng);
        let map = Map::random(rng, shape, None, false);
        let batch = rng.size(0..=9);
        let x = rng.normals(&[batch, map.input_dim]);
        check(backend, rng, &map, &x);
    });
}

fn forecast_of_low_rank_projects_what_the_formula_projects(backend: &Backend) {
    rounds(25, |rng| {
        let rank = rng.size(1..=3);
        let shape = small(rng);
        let map = Map::random(rng, shape, Some(rank), false);
        let batch = rng.size(0..=9);
        let x = rng.normals(&[batch, map.input_dim]);
        check(backend, rng, &map, &x);
    });
}

fn forecast_with_memory_projects_what_the_formula_projects(backend: &Backend) {
    rounds(25, |rng| {
        let rank = rng.one_in(2).then(|| rng.size(1..=3));
        let shape = small(rng);
        let map = Map::random(rng, shape, rank, true);
        let batch = rng.size(0..=9);
        let x = rng.normals(&[batch, map.input_dim]);
        check(backend, rng, &map, &x);
    });
}

fn forecast_projects_a_row_of_zeros_to_the_constant(backend: &Backend) {
    rounds(3, |rng| {
        let shape = small(rng);
        let map = Map::random(rng, shape, None, false);
        check(backend, rng, &map, &Array::filled(&[2, map.input_dim], 0.0));
    });
}

/// Odd numbers of heads, heads of 64 to 256 channels, several slices of inputs and groups of the rank, and batches that take several
/// CTAs.
fn forecast_projects_large_maps_and_batches(backend: &Backend) {
    let cases = [
        ([5, 128, 2500], Some(130), false, 17),
        ([3, 256, 1030], Some(300), false, 70),
        ([7, 96, 640], Some(64), true, 16),
        ([9, 64, 4096], Some(128), false, 3),
        ([33, 65, 300], None, false, 20),
        ([3, 64, 1500], None, true, 65),
        ([1, 80, 100], Some(16), false, 256),
    ];
    for (shape, rank, memory, batch) in cases {
        rounds(2, |rng| {
            let map = Map::random(rng, shape, rank, memory);
            let x = rng.normals(&[batch, map.input_dim]);
            check(backend, rng, &map, &x);
        });
    }
}

/// Rows of `x` and `previous`, through plain tensors of one type.
fn project(
    backend: &Backend,
    forecast: &Forecast,
    map: &Map,
    dtype: DType,
    x: &Array<f64>,
    previous: &Array<f64>,
) -> Array<f64> {
    let (plain, batch) = (Layout::default(), x.shape[0]);
    let rope = vwd_rope { theta: 0.0, ..args() };
    let positions = Tensor::ints(backend, I32, &Array::filled(&[batch], 5), &plain);
    let (x, previous) = (Tensor::floats(backend, dtype, x, &plain), Tensor::floats(backend, dtype, previous, &plain));
    let q = Tensor::poisoned(backend, F32, &[batch, map.heads, map.dim], &plain);
    let previous = if map.memory { previous.c() } else { absent() };
    let (x, positions) = (x.c(), positions.c());
    let args = vwd_forecast_project_args { rope: &rope, x, previous, positions, q: q.c(), ..args() };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_forecast_project(forecast.0, &args, backend.stream()) });
    q.read_floats()
}

fn forecast_bits_of_a_row_do_not_depend_on_the_batch(backend: &Backend) {
    rounds(9, |rng| {
        let (rank, memory) = (rng.pick(&[None, Some(40), Some(150)]), rng.one_in(2));
        let dtype = rng.pick(&[F32, F16, BF16]);
        let map = Map::random(rng, [3, 64, 1100], rank, memory);
        let forecast = map.load(backend);
        let batch = 70;
        let (x, previous) = (rng.normals(&[batch, 1100]), rng.normals(&[batch, 3, 64]));
        let together = project(backend, &forecast, &map, dtype, &x, &previous);
        for (i, rows) in [(0, 1), (9, 1), (16, 1), (33, 1), (69, 1), (5, 4), (50, 16), (31, 17)] {
            let part = |a: &Array<f64>| {
                let values = (i..i + rows).flat_map(|i| a.row([i]).to_vec());
                Array::new(&[&[rows], &a.shape[1..]].concat(), values.collect())
            };
            let apart = project(backend, &forecast, &map, dtype, &part(&x), &part(&previous));
            assert_eq!(apart.data, part(&together).data, "{rows} rows from {i} on, of {dtype:?}");
        }
    });
}

/// Clusters or the launch that follows add up the slices of few rows, a launch of its own those of many.
fn forecast_by_each_variant_of_low_rank_has_the_same_bits(backend: &Backend) {
    for (variant, capabilities, batches) in
        [("cluster", 90..=u32::MAX, [1, 16]), ("slices", 0..=u32::MAX, [1, 16]), ("sums", 0..=u32::MAX, [17, 40])]
    {
        let choice = format!("forecast={variant}");
        let Some(forced) = backend.forcing(&choice, capabilities) else { continue };
        rounds(2, |rng| {
            let memory = rng.one_in(2);
            let map = Map::random(rng, [3, 64, 1024], Some(40), memory);
            let (forecast, usual) = (map.load(&forced), map.load(backend));
            for (batch, dtype) in [(batches[0], F32), (batches[1], F16), (batches[0], BF16)] {
                let (x, previous) = (rng.normals(&[batch, 1024]), rng.normals(&[batch, 3, 64]));
                let found = project(&forced, &forecast, &map, dtype, &x, &previous);
                let expected = project(backend, &usual, &map, dtype, &x, &previous);
                assert_eq!(found.data, expected.data, "{batch} rows of {dtype:?} by {variant}");
                check(&forced, rng, &map, &x);
            }
        });
        forced.assert_ran(&choice);
    }
}

/// From subnormal to almost infinite; and what is not finite stays in its row.
fn forecast_projects_rows_of_any_scale(backend: &Backend) {
    rounds(4, |rng| {
        let rank = rng.pick(&[None, Some(20)]);
        let map = Map::random(rng, [2, 32, 700], rank, false);
        let forecast = map.load(backend);
        let row = rng.normals(&[700]);
        let scaled = |scale: f64| row.data.iter().map(|v| F32.round(v * scale)).collect::<Vec<_>>();
        let mut mixed = scaled(1.0);
        mixed[..350].iter_mut().for_each(|v| *v *= 2f64.powi(60));
        let wild = |value: f64| (0..700).map(|c| if c == 333 { value } else { 1.0 }).collect::<Vec<_>>();
        let rows =
            [scaled(1.0), scaled(1e-36), scaled(1e37), scaled(1e-41), mixed, wild(f64::NAN), wild(f64::INFINITY)];
        let x = Array::new(&[7, 700], rows.concat());
        let found = project(backend, &forecast, &map, F32, &x, &Array::filled(&[7, 1, 1], 0.0));
        let size = found.row([0]).iter().fold(0.0f64, |most, q| most.max(q.abs()));
        // Rounded inputs, of which subnormal ones keep some 13 bits; sums of 700 products.
        for (i, tolerance) in [(1, 1e-5), (2, 1e-5), (3, 1e-3)] {
            for (a, b) in found.row([i]).iter().zip(found.row([0])) {
                assert!((a - b).abs() <= tolerance * size, "row {i}: {a}, expected {b}");
            }
        }
        let mixed = project(
            backend,
            &forecast,
            &map,
            F32,
            &Array::new(&[1, 700], x.row([4]).to_vec()),
            &Array::filled(&[1, 1, 1], 0.0),
        );
        assert_eq!(mixed.data, found.row([4]), "beside rows that are not finite");
        assert!(mixed.data.iter().all(|q| q.is_finite()));
        assert!(found.row([5]).iter().chain(found.row([6])).all(|q| q.is_nan()));
    });
}
