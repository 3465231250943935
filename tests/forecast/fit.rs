//! The fit.

use crate::*;

#[test]
fn solves_the_ridge_system() {
    let backend = Backend::cpu(2);
    rounds(24, |rng| {
        // 65 and more inputs or outputs take more than one panel; 300 tokens more than one chunk.
        let (input, heads, dim) = (rng.size(1..=80), rng.size(1..=3), 2 * rng.size(1..=20));
        let shape = Shape { layers: 2, input, heads, dim, memory: rng.one_in(2) };
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
        let found = forecast.outputs(1, &fresh);
        for i in 0..5 {
            for (&q, (want, size)) in found.row([i]).iter().zip(apply(&w, &fresh.inputs(i))) {
                // Rounding of W, x̂ and of a sum of up to 201/8 vectors in float32.
                assert!((q - want).abs() <= 1e-6 * size + 1e-9, "{q}, expected {want}");
            }
        }
    });
}

#[test]
fn recovers_a_linear_map() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(1);
    let shape = Shape { layers: 1, input: 40, heads: 3, dim: 8, memory: false };
    let truth = rng.normals(&[41, 24]);
    let text = |rng: &mut Rng, tokens: usize| {
        let mut text = Activations::of(rng.normals(&[tokens, 40]).map(|v| F32.round(*v)));
        text.q = Array::from_fn(&[tokens, 3, 8], |at| {
            let x = text.inputs(at[0]);
            F32.round((0..41).map(|i| x[i] * truth[[i, at[1] * 8 + at[2]]]).sum())
        });
        text
    };
    let forecast = Forecast::new(&backend, shape, 1e-7);
    forecast.accumulate(0, &text(&mut rng, 400));
    assert_ok(forecast.solve(0));
    let fresh = text(&mut rng, 20);
    let found = forecast.outputs(0, &fresh);
    for (found, want) in found.data.iter().zip(&fresh.q.data) {
        // The ridge shrinks by 1e-7 over the smallest eigenvalue, which is above 0.3 times the mean; float32 does the rest.
        assert!((found - want).abs() < 2e-5, "{found}, expected {want}");
    }
}

#[test]
fn streaming_in_pieces_equals_accumulating_at_once() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(2);
    let shape = Shape { layers: 1, input: 30, heads: 2, dim: 6, memory: true };
    let text = Activations::random(&mut rng, &shape, 700);
    let (whole, pieces) = (Forecast::new(&backend, shape, 0.0), Forecast::new(&backend, shape, 0.0));
    whole.accumulate(0, &text);
    for (from, to) in [(0, 1), (1, 1), (1, 256), (256, 300), (300, 700)] {
        pieces.accumulate(0, &text.part(from, to));
    }
    let fresh = Activations::random(&mut rng, &shape, 9);
    let [a, b] = [&whole, &pieces].map(|forecast| {
        assert_ok(forecast.solve(0));
        forecast.outputs(0, &fresh)
    });
    for (a, b) in a.data.iter().zip(&b.data) {
        // The sums differ in the last bits of double precision; W may round the other way in float32.
        assert!((a - b).abs() <= 1e-6 * (1.0 + a.abs()), "{a} and {b}");
    }
}

#[test]
fn cut_to_a_rank_is_as_near_as_the_singular_values_allow() {
    let backend = Backend::cpu(2);
    rounds(12, |rng| {
        let (input, dim) = (rng.size(3..=24), 2 * rng.size(1..=5));
        let shape = Shape { layers: 1, input, heads: 2, dim, memory: rng.one_in(2) };
        let text = Activations::random(rng, &shape, 60);
        let w = ridge(&text, 1e-3);
        let fitted: Vec<Vec<f64>> = (0..60).map(|i| apply(&w, &text.inputs(i)).iter().map(|v| v.0).collect()).collect();
        let columns = (0..shape.outputs()).map(|c| fitted.iter().map(|row| row[c]).collect()).collect();
        let squares = squared_singular_values(columns);
        let total: f64 = squares.iter().sum();
        for rank in 1..=shape.rank() {
            let forecast = Forecast::new(&backend, shape, 0.0);
            forecast.accumulate(0, &text);
            assert_ok(forecast.solve(rank as u32));
            let found = forecast.outputs(0, &text);
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
    let shape = Shape { layers: 2, input: 5, heads: 1, dim: 4, memory: false };
    let forecast = Forecast::new(&backend, shape, 0.0);
    assert_fails(forecast.solve(0), VWD_ERROR_INVALID_ARGUMENT, &["no map has sums"]);
    let texts = [(); 3].map(|()| Activations::random(&mut rng, &shape, 20));
    forecast.accumulate(0, &texts[0]);
    assert_eq!(forecast.details().sum_bytes, 8 * 6 * (6 + 4));
    assert_ok(forecast.solve(0));
    assert_eq!((forecast.details().solved, forecast.details().sum_bytes), (1, 0));
    let first = forecast.outputs(0, &texts[0]);
    forecast.accumulate(1, &texts[1]);
    assert_ok(forecast.solve(2));
    assert_eq!(forecast.outputs(0, &texts[0]), first);
    assert_eq!((forecast.details().solved, forecast.details().rank), (2, 2));
    // A map is fitted anew from sums that started at zero.
    forecast.accumulate(0, &texts[2]);
    assert_eq!(forecast.outputs(0, &texts[0]), first, "until it is solved the old map is in use");
    assert_ok(forecast.solve(0));
    let fresh = Forecast::new(&backend, shape, 0.0);
    fresh.accumulate(0, &texts[2]);
    assert_ok(fresh.solve(0));
    assert_eq!(forecast.outputs(0, &texts[0]), fresh.outputs(0, &texts[0]));
}

#[test]
fn values_that_are_not_finite_are_refused_and_leave_the_sums_alone() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(5);
    let shape = Shape { layers: 1, input: 7, heads: 2, dim: 4, memory: true };
    let text = Activations::random(&mut rng, &shape, 300);
    let fit = |spoil: bool| {
        let forecast = Forecast::new(&backend, shape, 0.0);
        forecast.accumulate(0, &text);
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let [mut in_x, mut in_previous, mut in_q] = [(); 3].map(|()| text.clone());
            in_x.x[[290, 6]] = bad;
            in_previous.previous.as_mut().unwrap()[[5, 0, 1]] = bad;
            in_q.q[[299, 1, 3]] = bad;
            for (spoilt, name) in [(in_x, "x: row 290"), (in_previous, "previous: row 5"), (in_q, "q: row 299")] {
                if spoil {
                    assert_fails(forecast.try_accumulate(0, &spoilt), VWD_ERROR_INVALID_ARGUMENT, &[name]);
                }
            }
        }
        assert_ok(forecast.solve(0));
        forecast.outputs(0, &text)
    };
    assert_eq!(fit(true), fit(false));
}

#[test]
fn a_system_without_a_solution_is_refused_and_keeps_its_sums() {
    let backend = Backend::cpu(1);
    let mut rng = Rng::new(6);
    let shape = Shape { layers: 1, input: 30, heads: 1, dim: 4, memory: false };
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
    let shape = Shape { layers: 3, input: 150, heads: 3, dim: 32, memory: true };
    let texts = [(); 3].map(|()| Activations::random(&mut rng, &shape, 300));
    let backends = [1, 3].map(Backend::cpu);
    for rank in [0, 17] {
        let [a, b] = backends.each_ref().map(|backend| {
            let forecast = Forecast::new(backend, shape, 0.0);
            (0..).zip(&texts).for_each(|(layer, text)| forecast.accumulate(layer, text));
            assert_ok(forecast.solve(rank));
            [0, 1, 2].map(|layer| forecast.outputs(layer, &texts[0]))
        });
        assert_eq!(a, b);
    }
}

// --- memory ----------------------------------------------------------------------------------------------------------

#[test]
fn the_scale_of_the_queries_does_not_change_what_memory_is_worth() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(21);
    let shape = Shape { layers: 1, input: 9, heads: 2, dim: 5, memory: true };
    let (text, fresh) = (Activations::random(&mut rng, &shape, 40), Activations::random(&mut rng, &shape, 6));
    // A power of two, so that every product is the same but for its exponent.
    let scaled = |text: &Activations| {
        let larger = |q: &Array<f64>| q.map(|q| 1024.0 * q);
        Activations { x: text.x.clone(), previous: text.previous.as_ref().map(larger), q: larger(&text.q) }
    };
    let [plain, larger] = [(&text, &fresh), (&scaled(&text), &scaled(&fresh))].map(|(text, fresh)| {
        let forecast = Forecast::new(&backend, shape, 0.5);
        forecast.accumulate(0, text);
        assert_ok(forecast.solve(0));
        forecast.outputs(0, fresh)
    });
    for (a, b) in plain.data.iter().zip(&larger.data) {
        // λ = 0.5 shrinks W by a third: were it shared by both kinds of input, the outputs would differ by that much.
        assert!((1024.0 * a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{a} · 1024, but {b}");
    }
}

#[test]
fn memory_of_nothing_but_first_tokens_is_as_none() {
    let backend = Backend::cpu(1);
    let mut rng = Rng::new(22);
    let shape = Shape { layers: 1, input: 8, heads: 1, dim: 6, memory: false };
    let with = Shape { memory: true, ..shape };
    let plain = Activations::random(&mut rng, &shape, 30);
    let first = Activations { previous: Some(plain.q.map(|_| 0.0)), ..plain.clone() };
    let [a, b] = [(shape, &plain), (with, &first)].map(|(shape, text)| {
        let forecast = Forecast::new(&backend, shape, 0.0);
        forecast.accumulate(0, text);
        assert_ok(forecast.solve(0));
        forecast.outputs(0, text)
    });
    for (a, b) in a.data.iter().zip(&b.data) {
        // The same sums in another order.
        assert!((a - b).abs() <= 1e-6 * (1.0 + a.abs()), "{a} and {b}");
    }
}

#[test]
fn the_queries_of_a_run_of_text_serve_as_their_own_memory() {
    let backend = Backend::cpu(2);
    let mut rng = Rng::new(23);
    let shape = Shape { layers: 1, input: 6, heads: 2, dim: 4, memory: true };
    let q = rng.normals(&[21, 2, 4]).map(|&v| F32.round(v));
    let rows = |from: usize| Array::new(&[20, 2, 4], q.data[from * 8..(from + 20) * 8].to_vec());
    let x = rng.normals(&[20, 6]).map(|&v| F32.round(v));
    let text = Activations { x, previous: Some(rows(0)), q: rows(1) };
    let (apart, shared) = (Forecast::new(&backend, shape, 0.0), Forecast::new(&backend, shape, 0.0));
    apart.accumulate(0, &text);
    let (whole, x) = (
        Tensor::floats(&backend, F32, &q, &Layout::default()),
        Tensor::floats(&backend, F32, &text.x, &Layout::default()),
    );
    // Two views of one tensor, a row apart.
    let (mut previous, mut next) = (whole.c(), whole.c());
    (previous.shape[0], next.shape[0]) = (20, 20);
    next.data = next.data.wrapping_byte_add(8 * F32.bytes());
    let call = vwd_forecast_accumulate_args { x: x.c(), previous, q: next, ..args() };
    // SAFETY: everything is alive.
    assert_ok(unsafe { vwd_forecast_accumulate(shared.raw, &call) });
    let [a, b] = [&apart, &shared].map(|forecast| {
        assert_ok(forecast.solve(0));
        forecast.outputs(0, &text)
    });
    assert_eq!(a, b);
}

#[test]
fn memory_is_given_where_the_forecast_has_it_and_only_there() {
    let backend = Backend::cpu(1);
    let mut rng = Rng::new(24);
    for memory in [false, true] {
        let shape = Shape { layers: 1, input: 5, heads: 1, dim: 4, memory };
        let forecast = fitted(&backend, &mut rng, shape, 0);
        assert_eq!(forecast.details().flags, if memory { VWD_FORECAST_MEMORY } else { 0 });
        let wrong = Activations::random(&mut rng, &Shape { memory: !memory, ..shape }, 3);
        let why = if memory { "previous: data is NULL" } else { "previous: a tensor; expected none" };
        assert_fails(forecast.try_accumulate(0, &wrong), VWD_ERROR_INVALID_ARGUMENT, &[why]);
        let [x, q] = [&wrong.x, &wrong.q].map(|values| Tensor::floats(&backend, F32, values, &Layout::default()));
        let previous = (!memory).then_some(&q);
        let output = forecast.output(F32, 3, &Layout::default());
        let status = forecast.project_tensors(0, &x, previous, &[0; 3], no_rope(), &output);
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &[why]);
        output.assert_untouched("q");
    }
}
