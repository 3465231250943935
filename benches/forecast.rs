//! Projection of one token by a forecast (stream of 4096 to 32 heads of 128 channels), whole and of rank 128, beside a
//! plain read of the same bytes by as many threads; and the fit of one map of a small model (576 to 9 heads of 64) on 2048
//! tokens. Projections take several layers in turn, which together are far larger than the caches.

use criterion::{Criterion, Throughput};
use rayon::prelude::*;
use std::cell::Cell;
use std::ffi::CString;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};
use vanward::abi::*;
use vanward::capi::*;

#[path = "../tests/support/mod.rs"]
mod support;
use support::{Rng, Session, absent, args, assert_ok};

struct Shape {
    layers: usize,
    input: usize,
    heads: usize,
    dim: usize,
}

const LARGE: Shape = Shape { layers: 4, input: 4096, heads: 32, dim: 128 };
const SMALL: Shape = Shape { layers: 1, input: 576, heads: 9, dim: 64 };
const TOKENS: usize = 2048;
const RANK: usize = 128;

fn tensor<T>(data: &[T], code: u8, shape: &[usize]) -> vwd_tensor {
    let mut tensor = vwd_tensor {
        data: data.as_ptr().cast_mut().cast(),
        device_type: 1,
        dtype_code: code,
        dtype_bits: 8 * size_of::<T>() as u8,
        ndim: shape.len() as i32,
        ..absent()
    };
    for (d, &extent) in shape.iter().enumerate() {
        tensor.shape[d] = extent as i64;
        tensor.strides[d] = shape[d + 1..].iter().product::<usize>() as i64;
    }
    tensor
}

fn noise(count: usize) -> Vec<f32> {
    let mut rng = Rng::new(0);
    (0..count).map(|_| rng.unit() as f32 - 0.5).collect()
}

/// Loads maps of random values, whole or of a rank, as a training script would have written them.
fn load(session: &Session, rank: Option<usize>) -> *mut vwd_forecast {
    let Shape { layers, input, heads, dim } = LARGE;
    let mut header = serde_json::json!({ "__metadata__": {
        "format": "vanward.forecast", "version": "1", "layers": layers.to_string(), "input_dim": input.to_string(),
        "q_heads": heads.to_string(), "head_dim": dim.to_string(),
    }});
    let mut end = 0;
    for layer in 0..layers {
        let parts = match rank {
            None => vec![("weight", heads * dim, input + 1)],
            Some(rank) => vec![("down", rank, input + 1), ("up", heads * dim, rank)],
        };
        for (part, rows, columns) in parts {
            let start = end;
            end += rows * columns * 4;
            header[format!("layer.{layer}.{part}")] =
                serde_json::json!({ "dtype": "F32", "shape": [rows, columns], "data_offsets": [start, end] });
        }
    }
    let header = header.to_string();
    let values: Vec<u8> = noise(end / 4).into_iter().flat_map(f32::to_le_bytes).collect();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("forecast-{}.safetensors", std::process::id()));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &values].concat();
    std::fs::write(&path, bytes).expect("a file of maps");
    let mut forecast = std::ptr::null_mut();
    let c_path = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
    // SAFETY: everything is alive.
    assert_ok(unsafe { vwd_forecast_load(session.raw(), c_path.as_ptr(), &mut forecast) });
    std::fs::remove_file(&path).expect("the file of maps");
    forecast
}

/// Best mean of a sample, so that other programs on the machine disturb the ratios least.
fn measure(criterion: &mut Criterion, name: &str, bytes: usize, work: &dyn Fn(usize)) -> f64 {
    let (best, turn) = (Cell::new(f64::INFINITY), Cell::new(0));
    let mut group = criterion.benchmark_group("forecast");
    group.sample_size(20).throughput(Throughput::Bytes(bytes as u64));
    group.bench_function(name, |b| {
        b.iter_custom(|count| {
            let start = Instant::now();
            (0..count).for_each(|_| work(turn.replace(turn.get() + 1)));
            let time = start.elapsed();
            best.set(best.get().min(time.as_secs_f64() / count as f64));
            time
        })
    });
    group.finish();
    best.get()
}

fn project(criterion: &mut Criterion, session: &Session, rank: Option<usize>, batch: usize) {
    let Shape { layers, input, heads, dim } = LARGE;
    let name = rank.map_or("whole".to_string(), |rank| format!("rank {rank}"));
    let forecast = load(session, rank);
    let values = rank.map_or((input + 1) * heads * dim, |rank| rank * (input + 1 + heads * dim));
    let readers =
        rayon::ThreadPoolBuilder::new().num_threads(session.details().threads as usize).build().expect("threads");
    let memory = noise(layers * values);
    let read = measure(criterion, &format!("read {name}"), values * 4, &|turn| {
        let part = &memory[turn % layers * values..][..values];
        let sum = |part: &[f32]| part.iter().fold(0, |sum, value| sum ^ value.to_bits());
        black_box(readers.install(|| part.par_chunks(64 << 10).map(sum).reduce(|| 0, |a, b| a ^ b)));
    });
    let (x, positions, q) = (noise(batch * input), vec![4000i32; batch], vec![0f32; batch * heads * dim]);
    let projected = measure(criterion, &format!("project {name}, batch {batch}"), values * 4, &|turn| {
        let call = vwd_forecast_project_args {
            layer: (turn % layers) as u32,
            x: tensor(&x, 2, &[batch, input]),
            positions: tensor(&positions, 0, &[batch]),
            q: tensor(&q, 2, &[batch, heads, dim]),
            ..args()
        };
        // SAFETY: everything is alive.
        assert_ok(unsafe { vwd_forecast_project(forecast, &call, std::ptr::null_mut()) });
    });
    // SAFETY: made by load, released once.
    unsafe { vwd_forecast_release(forecast) };
    println!(
        "{name}, batch {batch}: read {:?}, project {:?}: {:.0} % of the read's bandwidth",
        Duration::from_secs_f64(read),
        Duration::from_secs_f64(projected),
        100.0 * read / projected
    );
}

fn fit(session: &Session) {
    let Shape { layers, input, heads, dim } = SMALL;
    let options = vwd_forecast_options {
        layers: layers as u32,
        input_dim: input as u32,
        q_heads: heads as u32,
        head_dim: dim as u32,
        ..args()
    };
    let (x, q) = (noise(TOKENS * input), noise(TOKENS * heads * dim));
    let call = vwd_forecast_accumulate_args {
        x: tensor(&x, 2, &[TOKENS, input]),
        q: tensor(&q, 2, &[TOKENS, heads, dim]),
        ..args()
    };
    for rank in [0, RANK as u32] {
        let mut forecast = std::ptr::null_mut();
        // SAFETY: everything is alive; the forecast is released once.
        unsafe {
            assert_ok(vwd_forecast_create(session.raw(), &options, &mut forecast));
            let start = Instant::now();
            assert_ok(vwd_forecast_accumulate(forecast, &call));
            let accumulated = start.elapsed();
            assert_ok(vwd_forecast_solve(forecast, rank));
            let solved = start.elapsed() - accumulated;
            vwd_forecast_release(forecast);
            println!("fit, rank {rank}: accumulate {TOKENS} tokens {accumulated:?}, solve {solved:?}");
        }
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let session = Session::cpu(0);
    fit(&session);
    project(&mut criterion, &session, None, 1);
    project(&mut criterion, &session, None, 8);
    project(&mut criterion, &session, Some(RANK), 1);
}
