//! Calls of a forecast: its options, what it is fitted to, what it projects.

use crate::calls::FLOATS;
use crate::case::{Answer, Case, Place, of};
use crate::content::Content;
use crate::support::*;
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

// --- forecasts -------------------------------------------------------------------------------------------------------

pub struct Forecast(pub *mut vwd_forecast);

impl Drop for Forecast {
    fn drop(&mut self) {
        // SAFETY: created or loaded, and released once.
        unsafe { vwd_forecast_release(self.0) };
    }
}

impl Forecast {
    pub fn create(session: &Session, options: &vwd_forecast_options) -> Result<Forecast, vwd_status> {
        let mut forecast = null_mut();
        // SAFETY: all pointers are valid.
        match unsafe { vwd_forecast_create(session.raw(), options, &mut forecast) } {
            VWD_OK => Ok(Forecast(forecast)),
            status => Err(status),
        }
    }

    pub fn details(&self) -> vwd_forecast_details {
        let mut details = args();
        // SAFETY: the handle is live, and details has a place.
        assert_ok(unsafe { vwd_forecast_info(self.0, &mut details) });
        details
    }

    /// Adds tokens that a seed stands for to the sums of a layer. They are whole, and so the same however numbers are
    /// rounded.
    pub fn accumulate(&self, layer: u32, seed: u64) {
        const TOKENS: usize = 24;
        let (details, host) = (self.details(), Backend::cpu(1));
        let mut rng = Rng::new(seed);
        let mut floats = |shape: &[usize]| Tensor::floats(&host, F32, &rng.whole(shape, 4), &Layout::default());
        let queries = [TOKENS, details.q_heads as usize, details.head_dim as usize];
        let (x, q, previous) = (floats(&[TOKENS, details.input_dim as usize]), floats(&queries), floats(&queries));
        let previous = if details.flags & VWD_FORECAST_MEMORY != 0 { previous.c() } else { absent() };
        let args = vwd_forecast_accumulate_args { layer, x: x.c(), previous, q: q.c(), ..args() };
        // SAFETY: the tensors are valid.
        assert_ok(unsafe { vwd_forecast_accumulate(self.0, &args) });
    }

    pub fn solve(&self, rank: u32) -> vwd_status {
        // SAFETY: the handle is live.
        unsafe { vwd_forecast_solve(self.0, rank) }
    }

    /// The bytes that a layer projects of what a seed stands for.
    pub fn project(&self, layer: u32, seed: u64) -> Vec<u8> {
        const TOKENS: usize = 3;
        let (details, host) = (self.details(), Backend::cpu(1));
        let mut rng = Rng::new(seed);
        let mut floats = |shape: &[usize]| Tensor::floats(&host, F32, &rng.whole(shape, 4), &Layout::default());
        let queries = [TOKENS, details.q_heads as usize, details.head_dim as usize];
        let (x, previous) = (floats(&[TOKENS, details.input_dim as usize]), floats(&queries));
        let positions = Tensor::ints(&host, I32, &Array::new(&[TOKENS], vec![0, 1, 4096]), &Layout::default());
        let q = Tensor::poisoned(&host, F32, &queries, &Layout::default());
        let previous = if details.flags & VWD_FORECAST_MEMORY != 0 { previous.c() } else { absent() };
        let args =
            vwd_forecast_project_args { layer, x: x.c(), previous, positions: positions.c(), q: q.c(), ..args() };
        // SAFETY: the tensors are valid.
        assert_ok(unsafe { vwd_forecast_project(self.0, &args, null_mut()) });
        q.read_memory()
    }
}

// --- calls -----------------------------------------------------------------------------------------------------------

pub fn create(case: &mut Case) {
    let options = case.options::<vwd_forecast_options>("options", |session, options| {
        let mut forecast = null_mut();
        // SAFETY: the options are what the case describes, and the handle has a place.
        let status = unsafe { vwd_forecast_create(session.raw(), options.cast(), &mut forecast) };
        if status != VWD_OK {
            assert!(forecast.is_null(), "written in spite of an error");
            return (status, vec![]);
        }
        let details = Forecast(forecast).details();
        let numbers = [details.layers, details.input_dim, details.q_heads, details.head_dim, details.flags];
        (status, numbers.iter().flat_map(|n| n.to_le_bytes()).collect())
    });
    let sizes: [u32; 4] = std::array::from_fn(|_| case.rng.size(1..=64) as u32);
    case.number(of!(options, vwd_forecast_options, layers), sizes[0]);
    case.number(of!(options, vwd_forecast_options, input_dim), sizes[1]);
    case.number(of!(options, vwd_forecast_options, q_heads), sizes[2]);
    case.number(of!(options, vwd_forecast_options, head_dim), sizes[3]);
    let ridge = case.rng.pick(&[0.0, 1e-3, 1.0]);
    case.real(of!(options, vwd_forecast_options, ridge), ridge);
}

fn draw_options(case: &mut Case) -> vwd_forecast_options {
    vwd_forecast_options {
        flags: case.rng.pick(&[0, 0, VWD_FORECAST_MEMORY]),
        layers: 2,
        input_dim: case.rng.size(1..=12) as u32,
        q_heads: case.rng.size(1..=3) as u32,
        head_dim: case.rng.size(1..=9) as u32,
        ..args()
    }
}

/// A forecast per session of which layer 0 is fitted, and what a call on it answers.
fn on_forecast(
    session: &Session,
    options: &vwd_forecast_options,
    rank: u32,
    call: impl FnOnce(&Forecast) -> Answer,
) -> Answer {
    match Forecast::create(session, options) {
        Ok(forecast) => {
            forecast.accumulate(0, 1);
            assert_ok(forecast.solve(rank));
            call(&forecast)
        }
        Err(status) => (status, vec![]),
    }
}

pub fn accumulate(case: &mut Case) {
    type Args = vwd_forecast_accumulate_args;
    let options = draw_options(case);
    let args = case.call_with::<Args>(move |session, args| {
        on_forecast(session, &options, 0, |forecast| {
            // SAFETY: the arguments are what the case describes.
            let status = unsafe { vwd_forecast_accumulate(forecast.0, args.cast()) };
            let details = forecast.details();
            if status != VWD_OK {
                assert_eq!(details.sum_bytes, 0, "sums in spite of an error");
                return (status, vec![]);
            }
            // What was added shows in what is projected.
            forecast.accumulate(0, 2);
            forecast.accumulate(1, 3);
            assert_ok(forecast.solve(0));
            (status, [forecast.project(0, 4), forecast.project(1, 5)].concat())
        })
    });
    let layer = case.rng.size(0..=1) as u32;
    case.number(of!(args, Args, layer), layer);
    let (tokens, queries) = (case.extent(1..=20), [options.q_heads as i64, options.head_dim as i64]);
    let dtypes: [DType; 3] = std::array::from_fn(|_| case.rng.pick(&FLOATS));
    case.input(of!(args, Args, x), dtypes[0], &[tokens, options.input_dim as i64], Content::Finite);
    let shape = [tokens, queries[0], queries[1]];
    let previous = case.input(of!(args, Args, previous), dtypes[1], &shape, Content::Finite);
    case.optional(options.flags == VWD_FORECAST_MEMORY, previous);
    case.input(of!(args, Args, q), dtypes[2], &shape, Content::Finite);
}

pub fn project(case: &mut Case) {
    type Args = vwd_forecast_project_args;
    let options = draw_options(case);
    let (inputs, outputs) = (options.input_dim, options.q_heads * options.head_dim);
    let rank = case.rng.size(0..=inputs.min(outputs) as usize) as u32;
    let args = case.call_with::<Args>(move |session, args| {
        on_forecast(session, &options, rank, |forecast| {
            // SAFETY: the arguments are what the case describes.
            (unsafe { vwd_forecast_project(forecast.0, args.cast(), null_mut()) }, vec![])
        })
    });
    // Layer 1 has no map.
    case.number(of!(args, Args, layer), 0);
    rope(case, of!(args, Args, rope), options.head_dim);
    let (tokens, queries) = (case.extent(1..=6), [options.q_heads as i64, options.head_dim as i64]);
    let dtypes: [DType; 3] = std::array::from_fn(|_| case.rng.pick(&FLOATS));
    case.input(of!(args, Args, x), dtypes[0], &[tokens, options.input_dim as i64], Content::Floats);
    let shape = [tokens, queries[0], queries[1]];
    let previous = case.input(of!(args, Args, previous), dtypes[1], &shape, Content::Floats);
    case.optional(options.flags == VWD_FORECAST_MEMORY, previous);
    case.input(of!(args, Args, positions), I32, &[tokens], Content::Counts(1 << 20));
    case.output(of!(args, Args, q), dtypes[2], &shape);
}

fn rope(case: &mut Case, home: Place, head_dim: u32) {
    let rope = case.nested::<vwd_rope>(home);
    if case.rng.one_in(3) {
        case.leave_out();
    }
    let style = case.rng.pick(&[VWD_ROPE_HALVES, VWD_ROPE_INTERLEAVED]);
    case.number(of!(rope, vwd_rope, style), style);
    let dim = case.rng.size(0..=head_dim as usize / 2) as u32 * 2;
    case.number(of!(rope, vwd_rope, rotary_dim), dim);
    let (theta, factor) = (case.rng.pick(&[0.0, 1.0, 5e5, 1e-30]), case.rng.pick(&[0.0, 1.0, 1.5, -2.0]));
    case.real(of!(rope, vwd_rope, theta), theta);
    case.real(of!(rope, vwd_rope, attention_factor), factor);
    let pairs = if dim == 0 { head_dim / 2 } else { dim / 2 };
    case.maybe_input(of!(rope, vwd_rope, inv_freq), F32, &[pairs as i64], Content::Floats);
}
