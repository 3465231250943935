//! What predicts the next selection, in graphs: other contents, the driver's part, and maps that are fitted anew.

use crate::Case;
use crate::calls::{ALLOWED, Cupti};
use crate::graph::{Graph, check};
use crate::support::maps::{Forecast, Map};
use crate::support::*;
use cudarc::driver::sys;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("predictor_replays_a_graph_with_changed_contents", predictor_replays_a_graph_with_changed_contents),
    ("forecast_replays_a_graph_with_changed_contents", forecast_replays_a_graph_with_changed_contents),
    ("forecast_graphs_keep_the_map_that_they_were_captured_with", forecast_graphs_keep_their_map),
    ("predicting_calls_ask_the_driver_for_launches_alone", predicting_calls_ask_for_launches_alone),
];

const BLOCK: u32 = 16;

/// A layer's predictor with tensors of its own.
struct Predictor<'b> {
    backend: &'b Backend,
    level: Tensor<'b>,
    trend: Tensor<'b>,
    lens: Tensor<'b>,
    scores: Tensor<'b>,
    ids: Tensor<'b>,
    counts: Tensor<'b>,
}

impl<'b> Predictor<'b> {
    fn new(backend: &'b Backend, shape: [usize; 3], cap: usize) -> Predictor<'b> {
        let plain = Layout::default();
        let floats = |value| Tensor::floats(backend, F32, &Array::filled(&shape, value), &plain);
        let ints = |shape: &[usize]| Tensor::ints(backend, I32, &Array::filled(shape, 0), &plain);
        Predictor {
            backend,
            level: floats(f64::NEG_INFINITY),
            trend: floats(0.0),
            lens: ints(&shape[..1]),
            scores: floats(0.0),
            ids: ints(&[shape[0], shape[1], cap]),
            counts: ints(&shape[..2]),
        }
    }

    /// One step: what it predicted is known before the scores enter.
    fn enqueue(&self) {
        let (session, stream) = (self.backend.session(), self.backend.stream());
        let state = vwd_predictor_state { level: self.level.c(), trend: self.trend.c() };
        let holt = vwd_holt { alpha: 0.7, beta: 0.3, gamma: 0.6 };
        let predict = vwd_predictor_predict_args {
            block_size: BLOCK,
            k: 24,
            init_blocks: 1,
            local_blocks: 2,
            ratio: 1.25,
            holt,
            state,
            seq_lens: self.lens.c(),
            predicted: vwd_block_list { ids: self.ids.c(), counts: self.counts.c(), slots: absent() },
            ..args()
        };
        let (seq_lens, scores) = (self.lens.c(), self.scores.c());
        let update = vwd_predictor_update_args { block_size: BLOCK, holt, state, seq_lens, scores, ..args() };
        // SAFETY: the tensors outlive the stream's work.
        unsafe {
            assert_ok(vwd_predictor_predict(session, &predict, stream));
            assert_ok(vwd_predictor_update(session, &update, stream));
        }
    }
}

/// The CPU rounds as the kernels do: bits are compared.
fn predictor_replays_a_graph_with_changed_contents(backend: &Backend) {
    let (host, shape) = (Backend::cpu(1), [5, 3, 300]);
    rounds(1, |rng| {
        let [expected, found] = [&host, backend].map(|backend| Predictor::new(backend, shape, 40));
        let graph = Graph::capture(backend.stream().cast(), || found.enqueue());
        for step in 0..backend.times(200) {
            let lens = Array::from_fn(&[shape[0]], |_| rng.int(-1..=(shape[2] as i64 + 3) * BLOCK as i64));
            let scores = rng.normals(&shape).map(|x| F32.round(*x));
            for side in [&expected, &found] {
                side.lens.refill_ints(&lens);
                side.scores.refill_floats(&scores);
            }
            expected.enqueue();
            graph.replay();
            assert_eq!(found.counts.read_ints(), expected.counts.read_ints(), "step {step}");
            assert_eq!(found.ids.read_ints(), expected.ids.read_ints(), "step {step}");
            assert_eq!(found.level.read_raw(), expected.level.read_raw(), "step {step}");
            assert_eq!(found.trend.read_raw(), expected.trend.read_raw(), "step {step}");
        }
    });
}

/// Inputs and outputs of a projection.
struct Projection<'b> {
    backend: &'b Backend,
    x: Tensor<'b>,
    previous: Option<Tensor<'b>>,
    positions: Tensor<'b>,
    q: Tensor<'b>,
}

impl<'b> Projection<'b> {
    fn new(backend: &'b Backend, map: &Map, batch: usize) -> Projection<'b> {
        let plain = Layout::default();
        let zeros = |shape: &[usize]| Tensor::floats(backend, F16, &Array::filled(shape, 0.0), &plain);
        Projection {
            backend,
            x: zeros(&[batch, map.input_dim]),
            previous: map.memory.then(|| zeros(&[batch, map.heads, map.dim])),
            positions: Tensor::ints(backend, I32, &Array::filled(&[batch], 0), &plain),
            q: Tensor::poisoned(backend, F32, &[batch, map.heads, map.dim], &plain),
        }
    }

    fn enqueue(&self, forecast: &Forecast) {
        let call = vwd_forecast_project_args {
            x: self.x.c(),
            previous: self.previous.as_ref().map_or(absent(), Tensor::c),
            positions: self.positions.c(),
            q: self.q.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the stream's work.
        assert_ok(unsafe { vwd_forecast_project(forecast.0, &call, self.backend.stream()) });
    }
}

fn reserve(backend: &Backend) {
    // SAFETY: a live session and stream.
    assert_ok(unsafe { vwd_session_reserve(backend.session(), backend.stream(), 0) });
}

fn forecast_replays_a_graph_with_changed_contents(backend: &Backend) {
    let host = Backend::cpu(1);
    reserve(backend);
    for (rank, memory, batch) in [(Some(40), true, 4), (None, false, 33), (Some(128), false, 1)] {
        rounds(1, |rng| {
            let map = Map::random(rng, [5, 64, 1300], rank, memory);
            let [(expected, there), (found, here)] =
                [&host, backend].map(|backend| (Projection::new(backend, &map, batch), map.load(backend)));
            let graph = Graph::capture(backend.stream().cast(), || found.enqueue(&here));
            for replay in 0..30 {
                let x = rng.normals(&[batch, 1300]);
                let previous = rng.normals(&[batch, 5, 64]);
                let positions = Array::from_fn(&[batch], |_| rng.int(0..=100_000));
                for side in [&expected, &found] {
                    side.x.refill_floats(&x);
                    side.previous.iter().for_each(|tensor| tensor.refill_floats(&previous));
                    side.positions.refill_ints(&positions);
                }
                expected.enqueue(&there);
                graph.replay();
                let (want, found) = (expected.q.read_floats(), found.q.read_floats());
                let size = want.data.iter().fold(0.0f64, |most, q| most.max(q.abs()));
                for (a, b) in found.data.iter().zip(&want.data) {
                    // Sums of some 1,600 products in another order, and rounding of what turns them.
                    assert!((a - b).abs() < 2e-5 * size, "replay {replay}: {a}, expected {b}");
                }
            }
        });
    }
}

fn forecast_graphs_keep_their_map(backend: &Backend) {
    let host = Backend::cpu(1);
    reserve(backend);
    let mut rng = Rng::new(3);
    let (plain, shape) = (Layout::default(), Map::random(&mut rng, [2, 32, 40], None, false));
    let options = vwd_forecast_options { layers: 1, input_dim: 40, q_heads: 2, head_dim: 32, ..args() };
    let mut raw = std::ptr::null_mut();
    // SAFETY: both pointers are valid.
    assert_ok(unsafe { vwd_forecast_create(backend.session(), &options, &mut raw) });
    let forecast = Forecast(raw);
    let fit = |rng: &mut Rng| {
        let (x, q) = (rng.normals(&[90, 40]), rng.normals(&[90, 2, 32]));
        let (x, q) = (Tensor::floats(&host, F32, &x, &plain), Tensor::floats(&host, F32, &q, &plain));
        let call = vwd_forecast_accumulate_args { x: x.c(), q: q.c(), ..args() };
        // SAFETY: the tensors outlive the call.
        unsafe {
            assert_ok(vwd_forecast_accumulate(forecast.0, &call));
            assert_ok(vwd_forecast_solve(forecast.0, 0));
        }
    };
    fit(&mut rng);
    let projection = Projection::new(backend, &shape, 3);
    projection.x.refill_floats(&rng.normals(&[3, 40]));
    let graph = Graph::capture(backend.stream().cast(), || projection.enqueue(&forecast));
    graph.replay();
    let old = projection.q.read_floats();
    // A fit allocates and copies, which leaves a capture alone.
    Graph::capture(backend.stream().cast(), || fit(&mut rng));
    projection.enqueue(&forecast);
    backend.finish(0);
    assert_ne!(projection.q.read_floats(), old, "the new map");
    graph.replay();
    assert_eq!(projection.q.read_floats(), old, "the old one");
    drop(graph);
    let free = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current.
        unsafe { check(sys::cuMemGetInfo_v2(&mut free, &mut total)) };
        free
    };
    let large = Map::random(&mut rng, [32, 128, 4096], None, false);
    let cycle = || {
        let _loaded = large.load(backend);
        free()
    };
    cycle();
    let before = free();
    assert!(cycle() + (60 << 20) < before, "a map of 67 MB is on the device");
    assert!(free() + (8 << 20) > before, "released forecasts give their memory back");
}

fn predicting_calls_ask_for_launches_alone(backend: &Backend) {
    let cupti = Cupti::open();
    reserve(backend);
    let mut rng = Rng::new(4);
    for (batch, rank) in [(1, Some(16)), (40, None)] {
        let predictor = Predictor::new(backend, [batch, 2, 100], 40);
        let map = Map::random(&mut rng, [3, 64, 304], rank, false);
        let (projection, forecast) = (Projection::new(backend, &map, batch), map.load(backend));
        let calls: [&dyn Fn(); 2] = [&|| predictor.enqueue(), &|| projection.enqueue(&forecast)];
        for call in calls {
            let seen = cupti.calls_of(call);
            assert_eq!(seen.iter().filter(|call| call.starts_with("cuLaunchKernel")).count(), 2, "{seen:?}");
            assert!(seen.iter().all(|asked| ALLOWED.contains(&asked.as_str())), "{seen:?}");
        }
        backend.finish(0);
    }
}
