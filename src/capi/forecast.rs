//! Forecast: the queries of layer l+1 from the residual stream that enters layer l, fitted in closed form.

use super::boundary::{Handle, computing, handle, optional_versioned, out, release, versioned, write_versioned};
use super::session::vwd_session;
use crate::abi::{
    vwd_forecast_accumulate_args, vwd_forecast_details, vwd_forecast_options, vwd_forecast_project_args, vwd_status,
    vwd_stream,
};
use crate::core::text::text;
use crate::decode::forecast::{self, Forecast};
use crate::runtime::fork::Process;
use std::ffi::c_char;
use std::mem::MaybeUninit;

/// A forecast: linear maps, one per layer, from the residual stream to the next layer's queries. Opaque.
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
/// options   Required: layers, input_dim, q_heads and head_dim have no default. flags: 0 or VWD_FORECAST_MEMORY.
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
    computing("vwd_forecast_create", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        let (session, options, forecast) = unsafe {
            (handle(session, "session")?, versioned(options, "options", &mut buffer)?, out(forecast, "forecast")?)
        };
        let created = Forecast::create(&session.0, &forecast::Options::from_c(options)?)?;
        forecast.write(Box::into_raw(Box::new(vwd_forecast(created, session.maker()))));
        Ok(())
    })
}

/// Releases a forecast; NULL is a no-op. No call on it may be in progress; on a CUDA session streams have passed its
/// projections, those of `vwd_decoder_foresee` as is said there, and no graph that holds one runs again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_release(forecast: *mut vwd_forecast) {
    // SAFETY: the C contract of forecast.
    unsafe { release(forecast) }
}

/// Fills `details`, whose struct_size the caller has set, with the forecast's shape, maps and sums. Waits for an accumulate or
/// solve in progress. Thread-safe. Errors: INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_info(
    forecast: *const vwd_forecast,
    details: *mut vwd_forecast_details,
) -> vwd_status {
    computing("vwd_forecast_info", || {
        // SAFETY: the C contract of the arguments.
        unsafe { write_versioned(details, &handle(forecast, "forecast")?.0.details(), "details") }
    })
}

/// Adds activations to the sums X̂ᵀX̂ and X̂ᵀQ of one map, whose inputs are X̂ = [x / rms(x), 1] or, with
/// VWD_FORECAST_MEMORY, [x / rms(x), previous, 1].
///
/// args->layer                            0 … layers−1.
/// args->x         [N, input_dim]         float32, float16 or bfloat16. Residual stream that enters the layer, per token.
/// args->previous  [N, q_heads, head_dim] float32, float16 or bfloat16. Given with VWD_FORECAST_MEMORY and only then: row n is
///                                        q at the token before token n; zeros for the first token of a sequence. May be
///                                        the memory of q, one row earlier.
/// args->q         [N, q_heads, head_dim] float32, float16 or bfloat16. Pre-RoPE queries of the layer that is forecast.
///
/// Activations come in any number of calls, with any N. Blocks until done and may allocate; not for capture. Thread-safe;
/// calls on one forecast wait for each other. Tensors are borrowed during the call and are CPU tensors on any session.
/// Errors: INVALID_ARGUMENT (the message names the argument; a value that is not finite), OUT_OF_MEMORY, INTERNAL. After an
/// error the sums are as they were.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_accumulate(
    forecast: *const vwd_forecast,
    args: *const vwd_forecast_accumulate_args,
) -> vwd_status {
    computing("vwd_forecast_accumulate", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        let (forecast, args) = unsafe { (handle(forecast, "forecast")?, versioned(args, "args", &mut buffer)?) };
        forecast.0.accumulate(&forecast::AccumulateRequest::from_c(&forecast.0, args)?)
    })
}

/// Solves W = (X̂ᵀX̂ + λ·M)⁻¹ X̂ᵀQ for every map that has sums, and frees the sums. M is mean(diag X̂ᵀX̂)·I. With memory M is
/// diagonal with one mean for x / rms(x) and the constant, and another for previous; if previous was always zero, the first
/// mean serves both.
///
/// rank  0 keeps W whole; else W is replaced by the best approximation of that rank of the fitted outputs X̂W (SVD).
///
/// A map without sums is left as it is. On a CUDA session the solved maps are also copied to the device. Maps that they replace
/// stay on the device until the forecast is released, for graphs that read them.
///
/// Blocks until done and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (rank above min(inputs, q_heads·head_dim), where inputs are input_dim + 1 and, with memory,
/// q_heads·head_dim more; no map has sums; a system is singular because the ridge is too small, or its solution exceeds
/// float32), OUT_OF_MEMORY, DRIVER, INTERNAL. After an error sums and maps are as they were.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_solve(forecast: *const vwd_forecast, rank: u32) -> vwd_status {
    computing("vwd_forecast_solve", || {
        // SAFETY: the C contract of forecast.
        unsafe { handle(forecast, "forecast")? }.0.solve(rank as usize)
    })
}

/// Writes the solved maps to a safetensors file (docs/forecast.md has the format). An existing file is replaced whole, by
/// renaming a new file in the same folder (`.vanward-….tmp`), and keeps its permissions. If path is a symbolic link, the file
/// that it names is replaced. A path that names anything but a regular file is refused. After an error the file is as it was.
///
/// path  NUL-terminated UTF-8.
///
/// Blocks; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (path; a map is not solved), IO (the message names path), OUT_OF_MEMORY, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_save(forecast: *const vwd_forecast, path: *const c_char) -> vwd_status {
    computing("vwd_forecast_save", || {
        // SAFETY: the C contract of forecast and path.
        let (forecast, path) = unsafe { (handle(forecast, "forecast")?, text(path, "path")?) };
        forecast.0.save(path)
    })
}

/// Reads maps that `vwd_forecast_save`, or a training script, wrote. The file says whether the maps have memory;
/// `vwd_forecast_info` tells it.
///
/// session   Kept alive by the forecast; may be released first.
/// path      NUL-terminated UTF-8.
/// forecast  Out. Release with `vwd_forecast_release`.
///
/// The header is checked against the format and the file's size before the maps are read. A path that names anything but
/// a regular file is refused without waiting for it. On a CUDA session the maps are also copied to the device.
///
/// Blocks and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT, IO (the message names path and says what does not fit the format), OUT_OF_MEMORY, DRIVER,
/// INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_load(
    session: *const vwd_session,
    path: *const c_char,
    forecast: *mut *mut vwd_forecast,
) -> vwd_status {
    computing("vwd_forecast_load", || {
        // SAFETY: the C contract of the arguments.
        let (session, path, forecast) =
            unsafe { (handle(session, "session")?, text(path, "path")?, out(forecast, "forecast")?) };
        let loaded = Forecast::load(&session.0, path)?;
        forecast.write(Box::into_raw(Box::new(vwd_forecast(loaded, session.maker()))));
        Ok(())
    })
}

/// Forecasts queries: q[i] = RoPE at positions[i] of W times row i of X̂ (see `vwd_forecast_accumulate`).
/// `vwd_select_blocks` of the next layer takes these queries.
///
/// args->layer                             0 … layers−1; its map is solved or loaded.
/// args->rope                              The model's rotary embedding; NULL means all defaults. Angles are computed in
///                                         double precision.
/// args->x          [B, input_dim]         float32, float16 or bfloat16.
/// args->previous   [B, q_heads, head_dim] float32, float16 or bfloat16. Given with VWD_FORECAST_MEMORY and only then: the
///                                         true pre-RoPE queries of the layer that is forecast at the token before; zeros
///                                         for the first token of a sequence.
/// args->positions  [B]                    int32; 0 leaves a row unrotated.
/// args->q          [B, q_heads, head_dim] float32, float16 or bfloat16, out.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
/// once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
/// borrowed until the stream passes this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
/// UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_forecast_project(
    forecast: *const vwd_forecast,
    args: *const vwd_forecast_project_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_forecast_project", || {
        let (mut buffer, mut rope_buffer) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of the arguments.
        let (forecast, args) = unsafe { (handle(forecast, "forecast")?, versioned(args, "args", &mut buffer)?) };
        // SAFETY: the C contract of args->rope.
        let rope = unsafe { optional_versioned(args.rope, "rope", &mut rope_buffer)? };
        forecast.0.project(&forecast::ProjectRequest::from_c(&forecast.0, args, rope)?, stream)
    })
}
