//! Forecast: the queries of layer l+1 from the residual stream that enters layer l, fitted in closed form.

use super::boundary::{Handle, boundary, handle, optional_versioned, out, release, text, versioned, write_versioned};
use super::session::vwd_session;
use crate::abi::{
    vwd_forecast_accumulate_args, vwd_forecast_details, vwd_forecast_options, vwd_forecast_project_args, vwd_status,
    vwd_stream,
};
use crate::decode::forecast::{self, Forecast};
use crate::runtime::fork::Process;
use std::ffi::c_char;
use std::mem::MaybeUninit;

/// Linear maps, one per layer, that forecast the next layer's queries. Opaque.
pub struct vwd_forecast(pub(crate) Forecast, Process);

impl Handle for vwd_forecast {
    #[inline]
    fn maker(&self) -> Process {
        self.1
    }
}

/// Creates a forecast without maps: fit them with `vwd_forecast_accumulate` and `vwd_forecast_solve`.
///
/// session   Kept alive by the forecast; may be released first.
/// options   Required: layers, input_dim, q_heads and head_dim have no default.
/// forecast  Out. Release with `vwd_forecast_release`.
///
/// Blocks and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_create(
    session: *const vwd_session,
    options: *const vwd_forecast_options,
    forecast: *mut *mut vwd_forecast,
) -> vwd_status {
    boundary(|| {
        let mut room = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        let (session, options, forecast) = unsafe {
            (handle(session, "session")?, versioned(options, "options", &mut room)?, out(forecast, "forecast")?)
        };
        let created = Forecast::create(&session.0, &forecast::Options::from_c(options)?)?;
        forecast.write(Box::into_raw(Box::new(vwd_forecast(created, session.maker()))));
        Ok(())
    })
}

/// Releases a forecast; NULL is a no-op. No call on it may be in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_release(forecast: *mut vwd_forecast) {
    // SAFETY: the C contract of forecast.
    unsafe { release(forecast) }
}

/// Fills `details`, whose struct_size the caller has set. Waits for an accumulate or solve in progress. Thread-safe.
/// Errors: INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_info(
    forecast: *const vwd_forecast,
    details: *mut vwd_forecast_details,
) -> vwd_status {
    boundary(|| {
        // SAFETY: the C contract of the arguments.
        unsafe { write_versioned(details, &handle(forecast, "forecast")?.0.details(), "details") }
    })
}

/// Adds activations to the sums X̂ᵀX̂ and X̂ᵀQ of one map; x̂ = x / rms(x) with a constant 1 appended.
///
/// args->layer                     0 … layers−1.
/// args->x  [N, input_dim]         float32, float16 or bfloat16. Residual stream that enters the layer, per token.
/// args->q  [N, q_heads, head_dim] float32, float16 or bfloat16. Pre-RoPE queries of the layer that is forecast.
///
/// Streamed: any number of calls, any N. Blocks until done and may allocate; not for capture. Thread-safe; calls on one
/// forecast wait for each other. Tensors are borrowed during the call and are CPU tensors on any session.
/// Errors: INVALID_ARGUMENT (the message names the argument; a value that is not finite), OUT_OF_MEMORY, INTERNAL. After an
/// error the sums are as they were.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_accumulate(
    forecast: *const vwd_forecast,
    args: *const vwd_forecast_accumulate_args,
) -> vwd_status {
    boundary(|| {
        let mut room = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        let (forecast, args) = unsafe { (handle(forecast, "forecast")?, versioned(args, "args", &mut room)?) };
        forecast.0.accumulate(&forecast::AccumulateRequest::from_c(&forecast.0, args)?)
    })
}

/// Solves W = (X̂ᵀX̂ + λ·mean(diag)·I)⁻¹ X̂ᵀQ for every map that has sums, and frees the sums.
///
/// rank  0 keeps W whole; else W is replaced by the best approximation of that rank of the fitted outputs X̂W (SVD).
///
/// A map without sums is left as it is. Blocks until done and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (rank above min(input_dim + 1, q_heads·head_dim); no map has sums; a system that is singular for
/// want of ridge, or whose solution exceeds float32), OUT_OF_MEMORY, INTERNAL. After an error sums and maps are as they
/// were.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_solve(forecast: *const vwd_forecast, rank: u32) -> vwd_status {
    boundary(|| {
        // SAFETY: the C contract of forecast.
        unsafe { handle(forecast, "forecast")? }.0.solve(rank as usize)
    })
}

/// Writes the solved maps to a safetensors file (docs/forecast.md has the format). An existing file is replaced whole.
///
/// path  NUL-terminated UTF-8.
///
/// Blocks; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (path; a map is not solved), IO, OUT_OF_MEMORY, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_save(forecast: *const vwd_forecast, path: *const c_char) -> vwd_status {
    boundary(|| {
        // SAFETY: the C contract of forecast and path.
        let (forecast, path) = unsafe { (handle(forecast, "forecast")?, text(path, "path")?) };
        forecast.0.save(path)
    })
}

/// Reads maps that `vwd_forecast_save`, or a training script, wrote.
///
/// session   Kept alive by the forecast; may be released first.
/// path      NUL-terminated UTF-8.
/// forecast  Out. Release with `vwd_forecast_release`.
///
/// Blocks and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT, IO (the message says what does not fit the format), OUT_OF_MEMORY, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_load(
    session: *const vwd_session,
    path: *const c_char,
    forecast: *mut *mut vwd_forecast,
) -> vwd_status {
    boundary(|| {
        // SAFETY: the C contract of the arguments.
        let (session, path, forecast) =
            unsafe { (handle(session, "session")?, text(path, "path")?, out(forecast, "forecast")?) };
        let loaded = Forecast::load(&session.0, path)?;
        forecast.write(Box::into_raw(Box::new(vwd_forecast(loaded, session.maker()))));
        Ok(())
    })
}

/// Forecasts queries: q[i] = RoPE at positions[i] of W·x̂[i]. They go into `vwd_select_blocks` of the next layer.
///
/// args->layer                             0 … layers−1; its map is solved or loaded.
/// args->rope                              The model's rotary embedding. Angles are computed in double precision.
/// args->x          [B, input_dim]         float32, float16 or bfloat16.
/// args->positions  [B]                    int32; 0 leaves a row unrotated.
/// args->q          [B, q_heads, head_dim] float32, float16 or bfloat16, out.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch of a CPU
/// session), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_project(
    forecast: *const vwd_forecast,
    args: *const vwd_forecast_project_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary(|| {
        let (mut room, mut rope_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of the arguments.
        let (forecast, args) = unsafe { (handle(forecast, "forecast")?, versioned(args, "args", &mut room)?) };
        // SAFETY: the C contract of args->rope.
        let rope = unsafe { optional_versioned(args.rope, "rope", &mut rope_room)? };
        forecast.0.project(&forecast::ProjectRequest::from_c(&forecast.0, args, rope)?, stream)
    })
}
