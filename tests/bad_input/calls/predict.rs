//! Predictor and forecast.

use super::*;

const ONE: i32 = 0x3f80_0000; // 1.0f32

/// The fields of the vwd_predictor_state at `base`.
fn predictor_state(call: &mut Call, base: usize, role: Role) {
    for (name, offset) in [
        ("state.level", offset_of!(vwd_predictor_state, level)),
        ("state.trend", offset_of!(vwd_predictor_state, trend)),
    ] {
        let at = call.address(base + offset);
        call.field(name, at, role, F32, "B Hk nb").values(&[ONE; 66]);
    }
}

pub fn predictor_reset(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_predictor_reset_args>(backend, "vwd_predictor_reset", SIZES, vwd_predictor_reset);
    call.scalar("flags", offset_of!(vwd_predictor_reset_args, flags), 0, FLAGS);
    predictor_state(&mut call, offset_of!(vwd_predictor_reset_args, state), Role::Out);
    call.input("rows", offset_of!(vwd_predictor_reset_args, rows), I32, "cap?").optional().values(&[0, 2, -1, 9, 2]);
    call
}

pub fn predictor_predict(backend: &Backend) -> Call<'_> {
    let name = "vwd_predictor_predict";
    let mut call = Call::new::<vwd_predictor_predict_args>(backend, name, SIZES, vwd_predictor_predict);
    call.scalar("block_size", offset_of!(vwd_predictor_predict_args, block_size), 8, &[0]);
    call.scalar("k", offset_of!(vwd_predictor_predict_args, k), 4, &[5, u32::MAX]);
    call.scalar("init_blocks", offset_of!(vwd_predictor_predict_args, init_blocks), 1, &[5, u32::MAX]);
    call.scalar("local_blocks", offset_of!(vwd_predictor_predict_args, local_blocks), 1, &[]);
    call.float("ratio", offset_of!(vwd_predictor_predict_args, ratio), 1.25, &[0.5, -1.0, f32::NAN, f32::INFINITY]);
    let gamma = offset_of!(vwd_predictor_predict_args, holt) + offset_of!(vwd_holt, gamma);
    call.float("holt.gamma", gamma, 0.5, NO_NUMBER);
    call.scalar("flags", offset_of!(vwd_predictor_predict_args, flags), 0, FLAGS);
    predictor_state(&mut call, offset_of!(vwd_predictor_predict_args, state), Role::In);
    call.input("seq_lens", offset_of!(vwd_predictor_predict_args, seq_lens), I32, "B").values(&[80, 3, 31]);
    call.input("budgets", offset_of!(vwd_predictor_predict_args, budgets), I32, "B").optional();
    let names = ["predicted.ids", "predicted.counts"];
    list(&mut call, names, offset_of!(vwd_predictor_predict_args, predicted), Role::Out, "B Hk cap?");
    call.output("scores", offset_of!(vwd_predictor_predict_args, scores), F32, "B Hk nb").optional();
    call
}

pub fn predictor_update(backend: &Backend) -> Call<'_> {
    let name = "vwd_predictor_update";
    let mut call = Call::new::<vwd_predictor_update_args>(backend, name, SIZES, vwd_predictor_update);
    call.scalar("block_size", offset_of!(vwd_predictor_update_args, block_size), 8, &[0]);
    let holt = offset_of!(vwd_predictor_update_args, holt);
    call.float("holt.alpha", holt + offset_of!(vwd_holt, alpha), 0.5, &[-0.1, 1.1, f32::NAN]);
    call.float("holt.beta", holt + offset_of!(vwd_holt, beta), 0.5, &[-0.1, 1.1, f32::NAN]);
    call.scalar("flags", offset_of!(vwd_predictor_update_args, flags), 0, FLAGS);
    predictor_state(&mut call, offset_of!(vwd_predictor_update_args, state), Role::Out);
    call.input("seq_lens", offset_of!(vwd_predictor_update_args, seq_lens), I32, "B").values(&[80, 3, 31]);
    call.input("scores", offset_of!(vwd_predictor_update_args, scores), F32, "B Hk nb");
    call
}

pub fn predictor_calibrate(backend: &Backend) -> Call<'_> {
    let handle = ("session", backend.session().cast());
    // SAFETY: the table passes a session (or NULL) and arguments (or less), as C might.
    let invoke = |session: *const c_void, args: *const c_void, _| unsafe {
        let (mut best, mut rate) = (vwd_holt { alpha: -7.0, beta: -7.0, gamma: -7.0 }, -7.0);
        let status = vwd_predictor_calibrate(session.cast(), args.cast(), &mut best, &mut rate);
        assert_eq!(status == VWD_OK, best.alpha != -7.0 && rate != -7.0, "written if and only if accepted");
        status
    };
    let name = "vwd_predictor_calibrate";
    let mut call = Call::with::<vwd_predictor_calibrate_args>(backend, name, SIZES, handle, invoke);
    call.scalar("flags", offset_of!(vwd_predictor_calibrate_args, flags), 0, FLAGS);
    call.takes_no_stream();
    call.scalar("k", offset_of!(vwd_predictor_calibrate_args, k), 4, &[]);
    call.float("ratio", offset_of!(vwd_predictor_calibrate_args, ratio), 1.25, &[0.5, -1.0, f32::NAN, f32::INFINITY]);
    let grid = Box::leak(Box::new([vwd_holt { alpha: 1.0, beta: 0.5, gamma: 0.0 }; 2]));
    call.scalar("grid_count", offset_of!(vwd_predictor_calibrate_args, grid_count), 2, &[0]);
    call.array("grid", offset_of!(vwd_predictor_calibrate_args, grid), grid.as_ptr());
    call.input("scores", offset_of!(vwd_predictor_calibrate_args, scores), F32, "B pages Hk? nb?");
    call.input("block_counts", offset_of!(vwd_predictor_calibrate_args, block_counts), I32, "B pages").values(&[9; 18]);
    call
}

/// A forecast with memory and one solved map of two.
struct Forecast(*mut vwd_forecast);

impl Forecast {
    fn solved(backend: &Backend) -> Forecast {
        let flags = VWD_FORECAST_MEMORY;
        let options = vwd_forecast_options { flags, layers: 2, input_dim: 6, q_heads: 2, head_dim: 8, ..args() };
        let (x, q) = (Rng::new(1).normals(&[40, 6]), Rng::new(2).normals(&[40, 2, 8]));
        let host = Backend::cpu(1);
        let (x, q) =
            (Tensor::floats(&host, F32, &x, &Layout::default()), Tensor::floats(&host, F32, &q, &Layout::default()));
        let text = vwd_forecast_accumulate_args { layer: 0, x: x.c(), previous: q.c(), q: q.c(), ..args() };
        let mut forecast = std::ptr::null_mut();
        // SAFETY: every pointer is valid.
        unsafe {
            assert_ok(vwd_forecast_create(backend.session(), &options, &mut forecast));
            assert_ok(vwd_forecast_accumulate(forecast, &text));
            assert_ok(vwd_forecast_solve(forecast, 0));
        }
        Forecast(forecast)
    }
}

impl Drop for Forecast {
    fn drop(&mut self) {
        // SAFETY: created above, released once.
        unsafe { vwd_forecast_release(self.0) };
    }
}

const FORECAST_SIZES: &[(&str, usize)] = &[("N", 5), ("input", 6), ("heads", 2), ("dim", 8), ("half", 2)];

pub fn forecast_accumulate(backend: &Backend) -> Call<'_> {
    let forecast = Forecast::solved(backend);
    let handle = ("forecast", forecast.0.cast_const().cast());
    let invoke = move |handle: *const c_void, args: *const c_void, _| {
        let _alive = &forecast;
        // SAFETY: the table passes a forecast (or NULL) and arguments (or less), as C might.
        unsafe { vwd_forecast_accumulate(handle.cast(), args.cast()) }
    };
    let name = "vwd_forecast_accumulate";
    let mut call = Call::with::<vwd_forecast_accumulate_args>(backend, name, FORECAST_SIZES, handle, invoke);
    call.scalar("flags", offset_of!(vwd_forecast_accumulate_args, flags), 0, FLAGS);
    call.takes_no_stream();
    call.scalar("layer", offset_of!(vwd_forecast_accumulate_args, layer), 0, &[2, u32::MAX]);
    call.input("x", offset_of!(vwd_forecast_accumulate_args, x), F32, "N input").values(&[ONE; 30]);
    call.input("previous", offset_of!(vwd_forecast_accumulate_args, previous), F32, "N heads dim").values(&[ONE; 80]);
    call.input("q", offset_of!(vwd_forecast_accumulate_args, q), F32, "N heads dim").values(&[ONE; 80]);
    call
}

pub fn forecast_project(backend: &Backend) -> Call<'_> {
    let forecast = Forecast::solved(backend);
    let handle = ("forecast", forecast.0.cast_const().cast());
    let invoke = move |handle: *const c_void, args: *const c_void, stream| {
        let _alive = &forecast;
        // SAFETY: the table passes a forecast (or NULL) and arguments (or less), as C might.
        unsafe { vwd_forecast_project(handle.cast(), args.cast(), stream) }
    };
    let name = "vwd_forecast_project";
    let mut call = Call::with::<vwd_forecast_project_args>(backend, name, FORECAST_SIZES, handle, invoke);
    call.scalar("flags", offset_of!(vwd_forecast_project_args, flags), 0, FLAGS);
    // Map 1 is not solved.
    call.scalar("layer", offset_of!(vwd_forecast_project_args, layer), 0, &[1, 2, u32::MAX]);
    let names = ["rope", "rope.struct_size", "rope.flags"];
    let rope = call.nested::<vwd_rope>(names, offset_of!(vwd_forecast_project_args, rope));
    call.may_be_null("rope");
    call.scalar("rope.style", rope + offset_of!(vwd_rope, style), VWD_ROPE_HALVES, &[2, u32::MAX]);
    call.scalar("rope.rotary_dim", rope + offset_of!(vwd_rope, rotary_dim), 4, &[3, 10, u32::MAX]);
    call.float("rope.theta", rope + offset_of!(vwd_rope, theta), 0.0, &[-1.0, f32::NAN, f32::INFINITY]);
    call.float("rope.attention_factor", rope + offset_of!(vwd_rope, attention_factor), 0.0, NO_NUMBER);
    call.input("rope.inv_freq", rope + offset_of!(vwd_rope, inv_freq), F32, "half").optional();
    call.input("x", offset_of!(vwd_forecast_project_args, x), F32, "N input");
    call.input("previous", offset_of!(vwd_forecast_project_args, previous), F32, "N heads dim");
    call.input("positions", offset_of!(vwd_forecast_project_args, positions), I32, "N");
    call.output("q", offset_of!(vwd_forecast_project_args, q), F32, "N heads dim");
    call
}
