//! A decoder's steps in graphs: each strategy, captured once and replayed while contexts grow and sequences come and go, gives what it
//! gives when its calls are enqueued one by one.

use crate::graph::Graph;
use crate::support::budget::{Budget, always, forced, never};
use crate::support::*;
use crate::{Case, MOST_DELAY};
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("decoder_replays_a_step_of_each_strategy", decoder_replays_a_step_of_each_strategy),
    ("decoder_replays_what_its_budget_decided_at_the_capture", decoder_replays_what_its_budget_decided_at_the_capture),
    (
        "decoder_gives_the_same_bits_whenever_its_side_streams_run",
        decoder_gives_the_same_bits_whenever_its_side_streams_run,
    ),
];

const LAYERS: usize = 2;
const ROWS: usize = 3;
const HEADS: [usize; 2] = [4, 1];
const DIM: usize = 128;
const PAGE: usize = 16;
const MAX_PAGES: usize = 24;

struct Decoder(*mut vwd_decoder);

impl Decoder {
    fn create(backend: &Backend, (strategy, predict, remainder): Way, budget: *const vwd_budget) -> Decoder {
        let policy = vwd_decoder_policy {
            method: VWD_SELECT_AXIS,
            k: 4,
            init_blocks: 1,
            local_blocks: 1,
            dense_below: 0,
            window: 0,
            strategy,
            predict,
            ratio: 0.0,
            holt: vwd_holt { alpha: 0.0, beta: 0.0, gamma: 0.0 },
            reserved: [0; 4],
        };
        let options = vwd_decoder_options {
            layers: LAYERS as u32,
            max_rows: ROWS as u32,
            query_heads: HEADS[0] as u32,
            kv_heads: HEADS[1] as u32,
            key_dim: DIM as u32,
            value_dim: DIM as u32,
            dtype_code: F16.code as u32,
            dtype_bits: F16.bits as u32,
            page_size: PAGE as u32,
            pages: (ROWS * MAX_PAGES) as u32,
            block_size: PAGE as u32,
            max_tokens: (MAX_PAGES * PAGE) as u32,
            policy,
            budget,
            remainder,
            ..args()
        };
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_create(backend.session(), &options, &mut decoder) });
        Decoder(decoder)
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: created once; its calls and graphs have ended.
        unsafe { vwd_decoder_release(self.0) }
    }
}

/// A decoder and the tensors of its steps. Those of a test get the same contents.
struct Side<'b> {
    about: String,
    backend: &'b Backend,
    decoder: Decoder,
    caches: Vec<[Tensor<'b>; 2]>,
    lens: Tensor<'b>,
    begin: Tensor<'b>,
    modes: Tensor<'b>,
    table: Tensor<'b>,
    /// Of each layer: keys, values, queries, foreseen queries, output.
    layers: Vec<[Tensor<'b>; 5]>,
}

impl<'b> Side<'b> {
    fn new(backend: &'b Backend, way: Way, budget: *const vwd_budget) -> Side<'b> {
        let plain = Layout::default();
        let zeros = |extents: &[usize]| Tensor::floats(backend, F16, &Array::filled(extents, 0.0), &plain);
        let ints = |extents: &[usize]| Tensor::ints(backend, I32, &Array::filled(extents, 0), &plain);
        let (rows, queries) = ([ROWS, HEADS[1], DIM], [ROWS, HEADS[0], DIM]);
        let side = Side {
            about: format!("strategy, prediction, remainder {way:?}, budget {}", !budget.is_null()),
            backend,
            decoder: Decoder::create(backend, way, budget),
            caches: (0..LAYERS).map(|_| [0; 2].map(|_| zeros(&[ROWS * MAX_PAGES, PAGE, HEADS[1], DIM]))).collect(),
            lens: ints(&[ROWS]),
            begin: ints(&[ROWS]),
            modes: ints(&[ROWS]),
            table: ints(&[ROWS, MAX_PAGES]),
            layers: (0..LAYERS)
                .map(|_| [zeros(&rows), zeros(&rows), zeros(&queries), zeros(&queries), zeros(&queries)])
                .collect(),
        };
        side.table.refill_ints(&Array::from_fn(&[ROWS, MAX_PAGES], |at| (at[0] * MAX_PAGES + at[1]) as i64));
        side
    }

    fn attend_args(&self, layer: usize) -> vwd_decoder_attend_args {
        let ([k, v], [new_k, new_v, q, _, out]) = (&self.caches[layer], &self.layers[layer]);
        vwd_decoder_attend_args {
            layer: layer as u32,
            k: k.c(),
            v: v.c(),
            new_k: new_k.c(),
            new_v: new_v.c(),
            q: q.c(),
            out: out.c(),
            ..args()
        }
    }

    fn begin(&self) {
        let step = vwd_decoder_step {
            page_table: self.table.c(),
            seq_lens: self.lens.c(),
            begin: self.begin.c(),
            modes: self.modes.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the stream's work.
        assert_ok(unsafe { vwd_decoder_begin(self.decoder.0, &step, self.backend.stream()) });
    }

    /// Makes room for what a step takes.
    fn reserve(&self) {
        self.begin();
        let mut bytes = 0;
        for layer in 0..LAYERS {
            let mut needed = 0;
            // SAFETY: the arguments are valid.
            assert_ok(unsafe { vwd_decoder_attend_scratch(self.decoder.0, &self.attend_args(layer), &mut needed) });
            bytes = needed.max(bytes);
        }
        // SAFETY: the session is alive.
        assert_ok(unsafe { vwd_session_reserve(self.backend.session().cast_mut(), self.backend.stream(), bytes) });
    }

    /// A step; each layer is foreseen where the layer before it begins.
    fn enqueue(&self) {
        let stream = self.backend.stream();
        self.begin();
        for layer in 0..LAYERS {
            for ahead in if layer == 0 { 0..2.min(LAYERS) } else { layer + 1..LAYERS.min(layer + 2) } {
                let foresee = vwd_decoder_foresee_args { layer: ahead as u32, q: self.layers[ahead][3].c(), ..args() };
                // SAFETY: the tensors outlive the stream's work.
                assert_ok(unsafe { vwd_decoder_foresee(self.decoder.0, std::ptr::null(), &foresee, stream) });
            }
            // SAFETY: as above.
            assert_ok(unsafe { vwd_decoder_attend(self.decoder.0, &self.attend_args(layer), stream) });
        }
    }
}

/// A strategy, what it predicts from, and whether attention is joined by the term for what lists leave out.
type Way = (u32, u32, u32);

const SERIAL: Way = (VWD_STRATEGY_SERIAL, 0, 0);
const STRATEGIES: [Way; 3] = [
    (VWD_STRATEGY_PRR, VWD_PREDICT_SCORES, 0),
    (VWD_STRATEGY_PRR, VWD_PREDICT_FORESEEN, 0),
    (VWD_STRATEGY_FORESEEN, 0, 0),
];
const WITH_REMAINDER: [Way; 2] = [(VWD_STRATEGY_SERIAL, 0, 1), (VWD_STRATEGY_FORESEEN, 0, 1)];

fn all() -> impl Iterator<Item = Way> {
    [SERIAL].into_iter().chain(STRATEGIES).chain(WITH_REMAINDER)
}

fn decoder_replays_a_step_of_each_strategy(backend: &Backend) {
    for way in all() {
        compare(backend.times(500), &[0; 2].map(|_| Side::new(backend, way, std::ptr::null())));
    }
}

/// Against steps without delays: steps with them, enqueued one by one and in a graph.
fn decoder_gives_the_same_bits_whenever_its_side_streams_run(backend: &Backend) {
    let delaying = backend.delaying(MOST_DELAY);
    assert_eq!(delaying.details().kernels, backend.details().kernels + 1, "the kernel that waits");
    for way in all() {
        let sides = [backend, &delaying, &delaying].map(|on| Side::new(on, way, std::ptr::null()));
        compare(backend.times(500), &sides);
    }
}

/// A budget of the decoder's layers.
fn budget(backend: &Backend, time: fn(&str, usize) -> Option<f32>) -> Budget {
    let mut options = vwd_budget_options {
        query_heads: HEADS[0] as u32,
        kv_heads: HEADS[1] as u32,
        key_dim: DIM as u32,
        value_dim: DIM as u32,
        dtype_code: F16.code as u32,
        dtype_bits: F16.bits as u32,
        page_size: PAGE as u32,
        block_size: PAGE as u32,
        method: VWD_SELECT_AXIS,
        k: 4,
        init_blocks: 1,
        local_blocks: 1,
        max_draft: 1,
        samples: 1,
        ..args()
    };
    (options.contexts[0], options.batches[0]) = ((MAX_PAGES * PAGE) as u32, ROWS as u32);
    options.ratios[..2].copy_from_slice(&[1.0, 2.0]);
    forced(backend, &options, time)
}

fn decoder_replays_what_its_budget_decided_at_the_capture(backend: &Backend) {
    let [never, always] = [never, always].map(|time: fn(&str, usize) -> Option<f32>| budget(backend, time));
    for way in STRATEGIES {
        let plain = |way| Side::new(backend, way, std::ptr::null());
        compare(backend.times(60), &[plain(SERIAL), Side::new(backend, way, never.0)]);
        compare(backend.times(60), &[plain(way), Side::new(backend, way, always.0)]);
    }
}

/// Steps of decoders whose calls are enqueued one by one, and of the last one, whose step is captured once, give the same.
fn compare(replays: usize, sides: &[Side]) {
    rounds(1, |rng| {
        sides.iter().for_each(Side::reserve);
        let (captured, eager) = sides.split_last().expect("decoders");
        let graph = Graph::capture(captured.backend.stream().cast(), || captured.enqueue());
        let mut lens = [0i64; ROWS];
        for replay in 0..replays {
            let (mut begin, mut modes) = ([i32::MAX as i64; ROWS], [VWD_DECODER_SPARSE as i64; ROWS]);
            for i in 0..ROWS {
                let is_full = lens[i] as usize == MAX_PAGES * PAGE;
                if lens[i] == 0 || is_full || rng.one_in(40) {
                    // Another sequence, whose prompt is what the pages hold.
                    lens[i] = rng.int(60..=(MAX_PAGES * PAGE - 20) as i64);
                    begin[i] = 0;
                }
                if rng.one_in(8) {
                    modes[i] = rng.int(0..=2);
                }
                // A row that is skipped is not summarised: it begins with the next step.
                if modes[i] == VWD_DECODER_SKIP as i64 && begin[i] == 0 {
                    modes[i] = VWD_DECODER_DENSE as i64;
                }
                lens[i] += (modes[i] != VWD_DECODER_SKIP as i64) as i64;
            }
            let ints = |values: &[i64]| Array::new(&[ROWS], values.to_vec());
            let contents: Vec<Vec<Array<f64>>> = sides[0]
                .layers
                .iter()
                .map(|layer| layer[..4].iter().map(|t| rng.normals(&t.read_floats().shape)).collect())
                .collect();
            for side in sides {
                side.lens.refill_ints(&ints(&lens));
                side.begin.refill_ints(&ints(&begin));
                side.modes.refill_ints(&ints(&modes));
                for (tensors, values) in side.layers.iter().zip(&contents) {
                    tensors.iter().zip(values).for_each(|(t, values)| t.refill_floats(values));
                }
            }
            eager.iter().for_each(Side::enqueue);
            graph.replay();
            for layer in 0..LAYERS {
                let outs: Vec<_> = sides.iter().map(|side| side.layers[layer][4].read_raw()).collect();
                for (n, found) in outs.iter().enumerate().skip(1) {
                    let about = format!("decoder {n}, {}; replay {replay}, layer {layer}; {lens:?}", sides[n].about);
                    assert!(*found == outs[0], "{about}");
                }
            }
        }
    });
}
