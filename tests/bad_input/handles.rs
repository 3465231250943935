//! Handles, paths and out parameters of the calls that take no tensors.

use crate::support::*;
use std::ptr::{null, null_mut};
use vanward::abi::Versioned;
use vanward::abi::*;
use vanward::capi::*;

/// The call was refused because of this argument.
#[track_caller]
fn refused(name: &str, status: vwd_status) {
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["; expected "]);
    assert!(last_error().starts_with(&format!("{name}: ")), "{name}: {}", last_error());
}

pub fn forecast_calls_refuse_what_is_missing() {
    let session = Session::cpu(1);
    let options = vwd_forecast_options { layers: 1, input_dim: 4, q_heads: 1, head_dim: 4, ..args() };
    let untouched = 0x40 as *mut vwd_forecast;
    let mut forecast = untouched;
    // SAFETY: every pointer is valid or NULL.
    unsafe {
        refused("session", vwd_forecast_create(null(), &options, &mut forecast));
        refused("options", vwd_forecast_create(session.raw(), null(), &mut forecast));
        refused("forecast", vwd_forecast_create(session.raw(), &options, null_mut()));
        refused("session", vwd_forecast_load(null(), c"maps".as_ptr(), &mut forecast));
        refused("path", vwd_forecast_load(session.raw(), null(), &mut forecast));
        refused("path", vwd_forecast_load(session.raw(), c"\xff".as_ptr(), &mut forecast));
        refused("forecast", vwd_forecast_load(session.raw(), c"maps".as_ptr(), null_mut()));
        let missing = vwd_forecast_load(session.raw(), c"/no/such/folder/maps".as_ptr(), &mut forecast);
        assert_fails(missing, VWD_ERROR_IO, &["/no/such/folder/maps"]);
        assert_eq!(forecast, untouched, "written in spite of an error");

        refused("forecast", vwd_forecast_info(null(), &mut args()));
        refused("forecast", vwd_forecast_solve(null(), 0));
        refused("forecast", vwd_forecast_save(null(), c"maps".as_ptr()));
        vwd_forecast_release(null_mut());

        assert_ok(vwd_forecast_create(session.raw(), &options, &mut forecast));
        refused("details", vwd_forecast_info(forecast, null_mut()));
        refused("path", vwd_forecast_save(forecast, null()));
        refused("forecast", vwd_forecast_solve(forecast, 0));
        refused("rank", vwd_forecast_solve(forecast, 6));
        refused("forecast", vwd_forecast_save(forecast, c"maps".as_ptr()));
        vwd_forecast_release(forecast);
    }
}

pub fn calibration_needs_a_place_for_its_result_alone() {
    let backend = Backend::cpu(1);
    let scores = Tensor::floats(&backend, F32, &Rng::new(1).normals(&[1, 3, 1, 4]), &Layout::default());
    let counts = Tensor::ints(&backend, I32, &Array::filled(&[1, 3], 4), &Layout::default());
    let args = vwd_predictor_calibrate_args { k: 2, scores: scores.c(), block_counts: counts.c(), ..args() };
    let mut holt = vwd_holt { alpha: -7.0, beta: -7.0, gamma: -7.0 };
    // SAFETY: every pointer is valid or NULL.
    unsafe {
        let mut rate = -7.0;
        refused("holt", vwd_predictor_calibrate(backend.session(), &args, null_mut(), &mut rate));
        assert_eq!(rate, -7.0);
        assert_ok(vwd_predictor_calibrate(backend.session(), &args, &mut holt, null_mut()));
    }
    assert_ne!(holt.alpha, -7.0);
}

/// The structs that are no arguments of an op follow the same rules.
pub fn structs_of_other_sizes_are_refused() {
    let session = Session::cpu(1);
    let options = || vwd_forecast_options { layers: 1, input_dim: 4, q_heads: 1, head_dim: 4, ..args() };
    let mut forecast = null_mut();
    // SAFETY: every pointer is valid, and every struct_size is within what it points to.
    unsafe {
        assert_ok(vwd_forecast_create(session.raw(), &options(), &mut forecast));
        for size in sizes_that_no_version_had::<vwd_forecast_options>() {
            let options = vwd_forecast_options { struct_size: size, ..options() };
            refused("options.struct_size", vwd_forecast_create(session.raw(), &options, &mut null_mut()));
        }
        for size in sizes_that_no_version_had::<vwd_forecast_details>() {
            let mut details = vwd_forecast_details { struct_size: size, ..args() };
            refused("details.struct_size", vwd_forecast_info(forecast, &mut details));
        }
        for size in sizes_that_no_version_had::<vwd_session_details>() {
            let mut details = vwd_session_details { struct_size: size, ..args() };
            refused("details.struct_size", vwd_session_info(session.raw(), &mut details));
        }
        vwd_forecast_release(forecast);
        for size in sizes_that_no_version_had::<vwd_kv_cache_options>() {
            let options = vwd_kv_cache_options { struct_size: size, ..args() };
            refused("options.struct_size", vwd_kv_cache_capacity(&options, &mut args()));
            refused("options.struct_size", vwd_kv_cache_create(session.raw(), &options, &mut null_mut()));
        }
        for size in sizes_that_no_version_had::<vwd_kv_cache_share_args>() {
            let args = vwd_kv_cache_share_args { struct_size: size, ..args() };
            refused("args.struct_size", vwd_kv_cache_share_slots(&args));
        }
        // A later version's struct is filled as far as this one knows it.
        let mut later = (args::<vwd_session_details>(), [0u8; 32]);
        later.0.struct_size += 32;
        let size = later.0.struct_size;
        assert_ok(vwd_session_info(session.raw(), (&raw mut later).cast()));
        assert_eq!((later.0.struct_size, later.0.threads, later.1), (size, 1, [0; 32]));
    }
}

fn sizes_that_no_version_had<T: Versioned>() -> impl Iterator<Item = u32> {
    let full = size_of::<T>() as u32;
    let sizes = [0, 1, 4, full - 4, full - 1, (1 << 16) + 8, u32::MAX];
    sizes.into_iter().filter(|&size| !T::KNOWN_SIZES.contains(&(size as usize)))
}
