//! Projection by a forecast (stream of 4096 to 32 heads of 128 channels), whole and of rank 128, without and with memory,
//! beside a plain read of the same bytes by as many threads; and the fit of one map of a small model (576 to 9 heads of 64)
//! on 2048 tokens. Projections take several layers in turn, which together are far larger than the caches.

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
use support::{Rng, Session, absent, args, assert_ok, packed};

#[derive(Clone, Copy)]
struct Shape {
    input: usize,
    heads: usize,
    dim: usize,
    memory: bool,
}

impl Shape {
    fn outputs(&self) -> usize {
        self.heads * self.dim
    }

    fn inputs(&self) -> usize {
        self.input + 1 + if self.memory { self.outputs() } else { 0 }
    }

    fn flags(&self) -> u32 {
        if self.memory { VWD_FORECAST_MEMORY } else { 0 }
    }

    /// Rows and columns of a map's tensors.
    fn parts(&self, rank: Option<usize>) -> Vec<(&'static str, usize, usize)> {
        match rank {
            None => vec![("weight", self.outputs(), self.inputs())],
            Some(rank) => vec![("down", rank, self.inputs()), ("up", self.outputs(), rank)],
        }
    }
}

const LARGE: Shape = Shape { input: 4096, heads: 32, dim: 128, memory: false };
const SMALL: Shape = Shape { input: 576, heads: 9, dim: 64, memory: false };
/// The maps of all layers together.
const MAP_BYTES: usize = 256 << 20;
const TOKENS: usize = 2048;
const RANK: usize = 128;

fn noise(count: usize) -> Vec<f32> {
    let mut rng = Rng::new(0);
    (0..count).map(|_| rng.unit() as f32 - 0.5).collect()
}

/// Loads maps of random values, whole or of a rank, as a training script would have written them.
fn load(session: &Session, shape: &Shape, layers: usize, rank: Option<usize>) -> *mut vwd_forecast {
    let mut header = serde_json::json!({ "__metadata__": {
        "format": "vanward.forecast", "version": "2", "flags": shape.flags().to_string(), "layers": layers.to_string(),
        "input_dim": shape.input.to_string(), "q_heads": shape.heads.to_string(), "head_dim": shape.dim.to_string(),
    }});
    let mut end = 0;
    for layer in 0..layers {
        for (part, rows, columns) in shape.parts(rank) {
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

/// A read of the maps, then projections of each of these batches with them.
fn project(criterion: &mut Criterion, session: &Session, shape: Shape, rank: Option<usize>, batches: &[usize]) {
    let whole = rank.map_or("whole".to_string(), |rank| format!("rank {rank}"));
    let name = if shape.memory { format!("{whole} with memory") } else { whole };
    let values: usize = shape.parts(rank).iter().map(|(_, rows, columns)| rows * columns).sum();
    let layers = MAP_BYTES / (values * 4) + 1;
    let readers =
        rayon::ThreadPoolBuilder::new().num_threads(session.details().threads as usize).build().expect("threads");
    let memory = noise(layers * values);
    let read = measure(criterion, &format!("read {name}"), values * 4, &|turn| {
        let part = &memory[turn % layers * values..][..values];
        let sum = |part: &[f32]| part.iter().fold(0, |sum, value| sum ^ value.to_bits());
        black_box(readers.install(|| part.par_chunks(64 << 10).map(sum).reduce(|| 0, |a, b| a ^ b)));
    });
    drop(memory);
    let forecast = load(session, &shape, layers, rank);
    for &batch in batches {
        let (x, positions) = (noise(batch * shape.input), vec![4000i32; batch]);
        let (previous, q) = (noise(batch * shape.outputs()), vec![0f32; batch * shape.outputs()]);
        let queries = [batch, shape.heads, shape.dim];
        let projected = measure(criterion, &format!("project {name}, batch {batch}"), values * 4, &|turn| {
            let call = vwd_forecast_project_args {
                layer: (turn % layers) as u32,
                x: packed(&x, 2, &[batch, shape.input]),
                previous: if shape.memory { packed(&previous, 2, &queries) } else { absent() },
                positions: packed(&positions, 0, &[batch]),
                q: packed(&q, 2, &queries),
                ..args()
            };
            // SAFETY: everything is alive.
            assert_ok(unsafe { vwd_forecast_project(forecast, &call, std::ptr::null_mut()) });
        });
        println!(
            "{name}, batch {batch}: read {:?}, project {:?}: {:.0} % of the read's bandwidth",
            Duration::from_secs_f64(read),
            Duration::from_secs_f64(projected),
            100.0 * read / projected
        );
    }
    // SAFETY: made by load, released once.
    unsafe { vwd_forecast_release(forecast) };
}

fn fit(session: &Session, shape: Shape) {
    let options = vwd_forecast_options {
        flags: shape.flags(),
        layers: 1,
        input_dim: shape.input as u32,
        q_heads: shape.heads as u32,
        head_dim: shape.dim as u32,
        ..args()
    };
    let (x, q) = (noise(TOKENS * shape.input), noise((TOKENS + 1) * shape.outputs()));
    let queries = |first: usize| packed(&q[first * shape.outputs()..], 2, &[TOKENS, shape.heads, shape.dim]);
    let call = vwd_forecast_accumulate_args {
        x: packed(&x, 2, &[TOKENS, shape.input]),
        previous: if shape.memory { queries(0) } else { absent() },
        q: queries(1),
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
            let memory = shape.memory;
            println!("fit, rank {rank}, memory {memory}: accumulate {TOKENS} tokens {accumulated:?}, solve {solved:?}");
        }
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let session = Session::cpu(0);
    for memory in [false, true] {
        fit(&session, Shape { memory, ..SMALL });
        let large = Shape { memory, ..LARGE };
        project(&mut criterion, &session, large, None, if memory { &[1] } else { &[1, 8] });
        project(&mut criterion, &session, large, Some(RANK), &[1]);
    }
}
