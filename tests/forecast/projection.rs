//! The projection.

use crate::*;

#[test]
fn rotates_as_complex_numbers_do() {
    let backend = Backend::cpu(2);
    rounds(40, |rng| {
        let shape = Shape { layers: 1, input: 6, heads: rng.size(1..=3), dim: rng.size(1..=40), memory: false };
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
            inv_freq: own_tensor.as_ref().map_or(absent(), Tensor::c),
            ..args()
        };
        // 0 means all channels, but for the last of an odd number.
        let rotary = if rotary == 0 { shape.dim / 2 * 2 } else { rotary };
        let positions = [0, 1, -3, 4095, 131_071, i32::MAX as i64];
        let text = Activations::random(rng, &shape, positions.len());
        let still = forecast.outputs(0, &text);
        let found = forecast.project(0, &text, &positions, rope);
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
        let (input, dim) = (rng.size(1..=90), 2 * rng.size(1..=20));
        let shape = Shape { layers: 1, input, heads: 3, dim, memory: rng.one_in(2) };
        let rank = rng.pick(&[0, 1, shape.rank() as u32]);
        let forecast = fitted(&backend, rng, shape, rank);
        // Values that every type holds.
        let mut text = Activations::of(rng.whole(&[7, shape.input], 12));
        text.previous = shape.memory.then(|| rng.whole(&[7, 3, shape.dim], 12));
        let positions: Vec<i64> = (0..7).map(|_| rng.int(0..=9000)).collect();
        let together = forecast.project(0, &text, &positions, no_rope());
        for i in 0..7 {
            let one = forecast.project(0, &text.part(i, i + 1), &positions[i..i + 1], no_rope());
            assert_eq!(one.data, together.row([i]), "row {i}");
        }
        for (input, output) in [(F16, BF16), (BF16, F16), (F32, F32)] {
            let x = Tensor::floats(&backend, input, &text.x, &Layout::random(rng, 2));
            let previous = text.previous.as_ref().map(|q| Tensor::floats(&backend, output, q, &Layout::random(rng, 3)));
            let q = forecast.output(output, 7, &Layout::random(rng, 3));
            assert_ok(forecast.project_tensors(0, &x, previous.as_ref(), &positions, no_rope(), &q));
            assert_eq!(q.read_floats(), together.map(|&v| output.round(v)));
            q.assert_written("q", |_| true);
        }
        let folder = Folder::new("threads");
        assert_ok(forecast.save(&folder.file("maps")));
        let other = Forecast::load(&lone, shape, &folder.file("maps")).expect("what was saved loads");
        assert_eq!(other.project(0, &text, &positions, no_rope()), together);
    });
}

#[test]
fn zero_tiny_and_wild_rows_are_projected() {
    let backend = Backend::cpu(1);
    let mut rng = Rng::new(9);
    let shape = Shape { layers: 1, input: 12, heads: 1, dim: 8, memory: false };
    let forecast = fitted(&backend, &mut rng, shape, 0);
    let row = rng.normals(&[12]);
    let scaled = |scale: f64| row.data.iter().map(|v| F32.round(v * scale)).collect::<Vec<_>>();
    let wild = (0..12).map(|c| if c == 3 { f64::NAN } else { 1.0 }).collect();
    let rows = [vec![0.0; 12], scaled(1.0), scaled(1e-36), scaled(1e37), wild, vec![f64::INFINITY; 12]];
    let found = forecast.outputs(0, &Activations::of(Array::new(&[6, 12], rows.concat())));
    // x = 0 leaves the constant's row of W: what 0 · x̂ leaves of any other row.
    assert!(found.row([0]).iter().all(|q| q.is_finite()));
    for i in [2, 3] {
        for (a, b) in found.row([i]).iter().zip(found.row([1])) {
            // Rounding of the tiny and huge inputs in float32; 1e-36 is not subnormal.
            assert!((a - b).abs() < 1e-5, "scale does not matter: {a} and {b}");
        }
    }
    assert!(found.row([4]).iter().all(|q| q.is_nan()) && found.row([5]).iter().all(|q| q.is_nan()));
    let nothing = forecast.outputs(0, &Activations::of(Array::filled(&[0, 12], 0.0)));
    assert_eq!(nothing.shape, [0, 1, 8]);
}

#[test]
fn projections_run_while_maps_are_fitted_anew() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(10);
    let shape = Shape { layers: 2, input: 60, heads: 2, dim: 16, memory: false };
    let texts = [(); 2].map(|()| Activations::random(&mut rng, &shape, 80));
    let x = Activations::random(&mut rng, &shape, 3);
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
    let shape = Shape { layers: 1, input: 4, heads: 1, dim: 2, memory: false };
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
    assert!(forecast.outputs(0, &text).data.iter().all(|q| q.is_finite()));
}

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
    create("options.flags: 2; expected 0 or VWD_FORECAST_MEMORY (1)", &|o| o.flags = 2);
    create("options.layers", &|o| o.layers = 0);
    create("options.layers", &|o| o.layers = u32::MAX);
    create("options.input_dim", &|o| o.input_dim = 0);
    create("options.input_dim", &|o| o.input_dim = u32::MAX);
    create("options.q_heads", &|o| (o.q_heads, o.head_dim) = (1 << 20, 1 << 20));
    create("options.head_dim", &|o| o.head_dim = 0);
    create("options.ridge", &|o| o.ridge = -1.0);
    create("options.ridge", &|o| o.ridge = f32::NAN);

    let mut rng = Rng::new(12);
    let shape = Shape { layers: 2, input: 6, heads: 2, dim: 5, memory: false };
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
    let shape = Shape { layers: 1, input: 1 << 20, heads: 1, dim: 2, memory: false };
    let forecast = Forecast::new(&backend, shape, 0.0);
    let x = Tensor::floats(&backend, F32, &Array::filled(&[1, 1 << 20], 1.0), &Layout::default());
    let q = Tensor::floats(&backend, F32, &Array::filled(&[1, 1, 2], 1.0), &Layout::default());
    assert_fails(forecast.accumulate_tensors(0, &x, None, &q), VWD_ERROR_OUT_OF_MEMORY, &["X̂ᵀX̂"]);
    assert_eq!(forecast.details().sum_bytes, 0);
}
