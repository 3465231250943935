//! A decoder's steps in graphs: each strategy, captured once and replayed while contexts grow and sequences come, go, fork and lose their last
//! tokens, gives what it gives when its calls are enqueued one by one. So does a round of drafts: sparse steps, the dense step that verifies,
//! and the verdict.

mod engine;

use crate::graph::{Graph, check};
use crate::support::budget::{Budget, always, forced, never};
use crate::support::maps::{Forecast, Map};
use crate::support::*;
use crate::{Case, MOST_DELAY};
use cudarc::driver::sys;
use engine::Engine;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("decoder_replays_a_step_of_each_strategy", decoder_replays_a_step_of_each_strategy),
    ("decoder_replays_a_round_of_drafts", decoder_replays_a_round_of_drafts),
    ("decoder_replays_what_its_budget_decided_at_the_capture", decoder_replays_what_its_budget_decided_at_the_capture),
    ("decoder_makes_room_for_projections_beside_a_capture", decoder_makes_room_for_projections_beside_a_capture),
    (
        "decoder_that_fails_in_a_step_leaves_nothing_beside_the_stream",
        decoder_that_fails_in_a_step_leaves_nothing_beside_the_stream,
    ),
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
/// Sequences that there are at once; some wait while others have the rows of a step.
const NUMBERS: usize = 5;
const PAGES: usize = NUMBERS * MAX_PAGES;
/// Drafts of a round.
const GAMMA: usize = 3;
/// Channels of the residual stream that a forecast reads.
const INPUT: usize = 96;

/// Foresees a layer from given queries, or from the residual stream that a forecast reads.
pub fn foresee(backend: &Backend, decoder: *const vwd_decoder, layer: usize, from: &Tensor, by: Option<&Forecast>) {
    let (from, rope): (_, vwd_rope) = (from.c(), args());
    let mut foresee = vwd_decoder_foresee_args { layer: layer as u32, ..args() };
    let mut forecast = std::ptr::null();
    match by {
        None => foresee.q = from,
        Some(own) => (forecast, foresee.x, foresee.rope) = (own.0.cast_const(), from, &raw const rope),
    }
    // SAFETY: the caller keeps the tensors and the forecast until the stream's work is done.
    assert_ok(unsafe { vwd_decoder_foresee(decoder, forecast, &foresee, backend.stream()) });
}

/// Replaces what a packed tensor holds, on the caller's stream.
pub fn overwrite(backend: &Backend, tensor: &Tensor) {
    let bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.bits as usize / 8;
    // SAFETY: the tensor has so many bytes; the caller keeps it until the stream's work is done.
    check(unsafe { sys::cuMemsetD8Async(tensor.c().data as u64, 0x3c, bytes, backend.stream().cast()) });
}

struct Decoder(*mut vwd_decoder);

impl Decoder {
    fn create(backend: &Backend, way: Way, budget: *const vwd_budget) -> Decoder {
        let Way { strategy, predict, remainder, .. } = way;
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
            max_positions: GAMMA as u32 + 1,
            max_sequences: NUMBERS as u32,
            query_heads: HEADS[0] as u32,
            kv_heads: HEADS[1] as u32,
            key_dim: DIM as u32,
            value_dim: DIM as u32,
            dtype_code: F16.code as u32,
            dtype_bits: F16.bits as u32,
            page_size: PAGE as u32,
            pages: PAGES as u32,
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

/// How a decoder's layers attend.
#[derive(Clone, Copy, Debug)]
struct Way {
    strategy: u32,
    predict: u32,
    /// 1: attention is joined by the term for what lists leave out.
    remainder: u32,
    /// Queries are foreseen by a forecast from the residual stream; without it they are given.
    by_forecast: bool,
    /// A step of one token a row, or a round: steps that draft, one that verifies, and the verdict.
    is_round: bool,
}

const SERIAL: Way =
    Way { strategy: VWD_STRATEGY_SERIAL, predict: 0, remainder: 0, by_forecast: false, is_round: false };
const BY_SCORES: Way = Way { strategy: VWD_STRATEGY_PRR, predict: VWD_PREDICT_SCORES, ..SERIAL };
const PRR_FORESEEN: Way = Way { strategy: VWD_STRATEGY_PRR, predict: VWD_PREDICT_FORESEEN, ..SERIAL };
const FORESEEN: Way = Way { strategy: VWD_STRATEGY_FORESEEN, ..SERIAL };
const STRATEGIES: [Way; 3] = [BY_SCORES, PRR_FORESEEN, FORESEEN];

fn all() -> impl Iterator<Item = Way> {
    let with_remainder = [SERIAL, FORESEEN].map(|way| Way { remainder: 1, ..way });
    let by_forecast = [PRR_FORESEEN, FORESEEN].map(|way| Way { by_forecast: true, ..way });
    [SERIAL].into_iter().chain(STRATEGIES).chain(with_remainder).chain(by_forecast)
}

/// The tensors of a step.
struct Step<'b> {
    positions: usize,
    /// [ROWS]: tokens of each row, those of the step, the first new one, and the mode.
    rows: [Tensor<'b>; 4],
    /// Tensors of each layer: keys, values, queries, what is foreseen from, output.
    layers: Vec<[Tensor<'b>; 5]>,
}

impl<'b> Step<'b> {
    fn new(backend: &'b Backend, positions: usize, by_forecast: bool) -> Step<'b> {
        let zeros = |extents: &[usize]| Tensor::floats(backend, F16, &Array::filled(extents, 0.0), &Layout::default());
        let (new, queries) = ([ROWS, positions, HEADS[1], DIM], [ROWS, positions, HEADS[0], DIM]);
        let foreseen = || if by_forecast { zeros(&[ROWS, INPUT]) } else { zeros(&[ROWS, HEADS[0], DIM]) };
        Step {
            positions,
            rows: [0; 4].map(|_| Tensor::ints(backend, I32, &Array::filled(&[ROWS], 0), &Layout::default())),
            layers: (0..LAYERS)
                .map(|_| [zeros(&new), zeros(&new), zeros(&queries), foreseen(), zeros(&queries)])
                .collect(),
        }
    }
}

/// Drafts of a round, and what is to be said of them.
struct Verdict<'b> {
    /// [ROWS, GAMMA], [ROWS, GAMMA + 1], [ROWS] and [ROWS].
    draft: Tensor<'b>,
    target: Tensor<'b>,
    lens: Tensor<'b>,
    sequences: Tensor<'b>,
    accepted: Tensor<'b>,
    next: Tensor<'b>,
    committed: Tensor<'b>,
}

impl<'b> Verdict<'b> {
    fn new(backend: &'b Backend) -> Verdict<'b> {
        let zeros = |extents: &[usize]| Tensor::ints(backend, I32, &Array::filled(extents, 0), &Layout::default());
        let tokens = || zeros(&[ROWS, GAMMA + 1]);
        let (draft, target, committed) = (zeros(&[ROWS, GAMMA]), tokens(), tokens());
        let [lens, sequences, accepted, next] = [0; 4].map(|_| zeros(&[ROWS]));
        Verdict { draft, target, lens, sequences, accepted, next, committed }
    }

    fn args(&self) -> vwd_decoder_accept_args {
        vwd_decoder_accept_args {
            draft: self.draft.c(),
            target: self.target.c(),
            draft_lens: self.lens.c(),
            sequences: self.sequences.c(),
            accepted: self.accepted.c(),
            next_token: self.next.c(),
            committed: self.committed.c(),
            ..args()
        }
    }
}

/// A decoder and the tensors of its steps. Those of a test get the same contents.
struct Side<'b> {
    about: String,
    backend: &'b Backend,
    decoder: Decoder,
    caches: Vec<[Tensor<'b>; 2]>,
    /// [ROWS, MAX_PAGES] and [ROWS].
    table: Tensor<'b>,
    sequences: Tensor<'b>,
    steps: Vec<Step<'b>>,
    /// After the steps of a round.
    verdict: Option<Verdict<'b>>,
    forecast: Option<Forecast>,
}

impl<'b> Side<'b> {
    fn new(backend: &'b Backend, way: Way, budget: *const vwd_budget) -> Side<'b> {
        let plain = Layout::default();
        let zeros = |extents: &[usize]| Tensor::floats(backend, F16, &Array::filled(extents, 0.0), &plain);
        let ints = |extents: &[usize]| Tensor::ints(backend, I32, &Array::filled(extents, -1), &plain);
        let positions = if way.is_round { [[1; GAMMA].to_vec(), vec![GAMMA + 1]].concat() } else { vec![1] };
        // The same map on all sides.
        let map = way.by_forecast.then(|| Map::random(&mut Rng::new(7), [HEADS[0], DIM, INPUT], Some(24), false));
        Side {
            about: format!("{way:?}, budget {}", !budget.is_null()),
            backend,
            decoder: Decoder::create(backend, way, budget),
            caches: (0..LAYERS).map(|_| [0; 2].map(|_| zeros(&[PAGES, PAGE, HEADS[1], DIM]))).collect(),
            table: ints(&[ROWS, MAX_PAGES]),
            sequences: ints(&[ROWS]),
            steps: positions.into_iter().map(|n| Step::new(backend, n, way.by_forecast)).collect(),
            verdict: way.is_round.then(|| Verdict::new(backend)),
            forecast: map.map(|map| map.load(backend)),
        }
    }

    fn attend_args(&self, step: &Step, layer: usize) -> vwd_decoder_attend_args {
        let ([k, v], [new_k, new_v, q, _, out]) = (&self.caches[layer], &step.layers[layer]);
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

    fn begin(&self, step: &Step) {
        let [lens, counts, begin, modes] = step.rows.each_ref().map(Tensor::c);
        let mut args = vwd_decoder_step {
            positions: step.positions as u32,
            page_table: self.table.c(),
            seq_lens: lens,
            begin,
            modes,
            sequences: self.sequences.c(),
            ..args()
        };
        if step.positions > 1 {
            args.q_lens = counts;
        }
        // SAFETY: the tensors outlive the stream's work.
        assert_ok(unsafe { vwd_decoder_begin(self.decoder.0, &args, self.backend.stream()) });
    }

    /// Makes room for what the steps take.
    fn reserve(&self) {
        let mut bytes = 0;
        for step in &self.steps {
            self.begin(step);
            for layer in 0..LAYERS {
                let mut needed = 0;
                let args = self.attend_args(step, layer);
                // SAFETY: the arguments are valid.
                assert_ok(unsafe { vwd_decoder_attend_scratch(self.decoder.0, &args, &mut needed) });
                bytes = needed.max(bytes);
            }
        }
        // SAFETY: the session is alive.
        assert_ok(unsafe { vwd_session_reserve(self.backend.session().cast_mut(), self.backend.stream(), bytes) });
    }

    /// The steps, and the verdict of a round.
    fn enqueue(&self) {
        self.steps.iter().for_each(|step| self.enqueue_step(step));
        if let Some(verdict) = &self.verdict {
            // SAFETY: the tensors outlive the stream's work.
            assert_ok(unsafe { vwd_decoder_accept(self.decoder.0, &verdict.args(), self.backend.stream()) });
        }
    }

    /// A step; each layer is foreseen where the layer before it begins. What a forecast reads is overwritten as soon as it may be.
    fn enqueue_step(&self, step: &Step) {
        let stream = self.backend.stream();
        self.begin(step);
        for layer in 0..LAYERS {
            for ahead in if layer == 0 { 0..2.min(LAYERS) } else { layer + 1..LAYERS.min(layer + 2) } {
                self.foresee(step, ahead);
                if ahead > 0 {
                    self.overwrite_residual(step, ahead - 1);
                }
            }
            // SAFETY: the tensors outlive the stream's work.
            assert_ok(unsafe { vwd_decoder_attend(self.decoder.0, &self.attend_args(step, layer), stream) });
            self.overwrite_residual(step, LAYERS.min(layer + 2) - 1);
        }
    }

    /// Replaces the residual stream from which a layer was foreseen, on the caller's stream.
    fn overwrite_residual(&self, step: &Step, layer: usize) {
        if self.forecast.is_some() {
            overwrite(self.backend, &step.layers[layer][3]);
        }
    }

    fn foresee(&self, step: &Step, layer: usize) {
        let from = &step.layers[layer][3];
        foresee(self.backend, self.decoder.0, layer, from, self.forecast.as_ref());
    }

    /// Gives the rows of a step their lengths, tokens, first new tokens and modes.
    fn place(&self, step: usize, rows: &[[i64; ROWS]; 4]) {
        for (t, values) in self.steps[step].rows.iter().zip(rows) {
            t.refill_ints(&Array::new(&[ROWS], values.to_vec()));
        }
    }
}

fn decoder_replays_a_step_of_each_strategy(backend: &Backend) {
    for way in all() {
        compare(backend.times(500), &[0; 2].map(|_| Side::new(backend, way, std::ptr::null())));
    }
}

/// Rounds by each strategy of the steps that draft, FORESEEN with a forecast in the graph.
fn drafting() -> impl Iterator<Item = Way> {
    let foreseen = Way { by_forecast: true, ..FORESEEN };
    let ways = [SERIAL, BY_SCORES, PRR_FORESEEN, foreseen, Way { remainder: 1, ..SERIAL }];
    ways.into_iter().map(|way| Way { is_round: true, ..way })
}

fn decoder_replays_a_round_of_drafts(backend: &Backend) {
    for way in drafting() {
        compare(backend.times(500), &[0; 2].map(|_| Side::new(backend, way, std::ptr::null())));
    }
}

/// Projections run on a stream of the decoder's own, whose scratch no call has reserved where the first of them is captured.
fn decoder_makes_room_for_projections_beside_a_capture(backend: &Backend) {
    let small = backend.with_scratch(1);
    let way = Way { by_forecast: true, ..FORESEEN };
    compare(backend.times(60), &[backend, &small].map(|on| Side::new(on, way, std::ptr::null())));
}

/// Against steps without delays: steps with them, enqueued one by one and in a graph; and so rounds of drafts, and decoders with a budget.
fn decoder_gives_the_same_bits_whenever_its_side_streams_run(backend: &Backend) {
    let delaying = backend.delaying(MOST_DELAY);
    assert_eq!(delaying.details().kernels, backend.details().kernels + 1, "the kernel that waits");
    let compare = |way: Way, budget: *const vwd_budget, replays: usize| {
        compare(replays, &[backend, &delaying, &delaying].map(|on| Side::new(on, way, budget)));
    };
    all().for_each(|way| compare(way, std::ptr::null(), backend.times(500)));
    let fewer = backend.times(200) / 2;
    // SERIAL has no side stream.
    let rounds = drafting().filter(|way| way.strategy != VWD_STRATEGY_SERIAL);
    rounds.for_each(|way| compare(way, std::ptr::null(), fewer));
    let always = budget(backend, always);
    STRATEGIES.into_iter().for_each(|way| compare(way, always.0, fewer));
}

/// What was foreseen of later layers is waited for by the stream on which a layer fails: a capture could not end otherwise, and what the
/// engine does to its sequences then would meet the selection that still runs. So is a step that another one replaces.
fn decoder_that_fails_in_a_step_leaves_nothing_beside_the_stream(backend: &Backend) {
    for by_forecast in [false, true] {
        fail_in_a_step(&Side::new(backend, Way { by_forecast, ..FORESEEN }, std::ptr::null()));
    }
}

fn fail_in_a_step(side: &Side) {
    let (step, stream) = (&side.steps[0], side.backend.stream());
    side.place(0, &[[100; ROWS], [1; ROWS], [99; ROWS], [VWD_DECODER_SPARSE as i64; ROWS]]);
    side.reserve();
    let graph = |enqueue: &dyn Fn()| Graph::capture(stream.cast(), enqueue).replay();
    // SAFETY: the tensors outlive the stream's work.
    let attend = |args: &vwd_decoder_attend_args| unsafe { vwd_decoder_attend(side.decoder.0, args, stream) };
    graph(&|| {
        side.begin(step);
        side.foresee(step, 1);
        let wrong = vwd_decoder_attend_args { new_v: absent(), ..side.attend_args(step, 0) };
        assert_fails(attend(&wrong), VWD_ERROR_INVALID_ARGUMENT, &["new_v: "]);
        side.overwrite_residual(step, 1);
    });
    graph(&|| {
        side.begin(step);
        side.foresee(step, 0);
        let args = vwd_decoder_foresee_args { layer: LAYERS as u32, ..args() };
        // SAFETY: as above.
        let status = unsafe { vwd_decoder_foresee(side.decoder.0, std::ptr::null(), &args, stream) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["layer: "]);
        side.overwrite_residual(step, 0);
    });
    graph(&|| {
        side.begin(step);
        side.foresee(step, 1);
        side.begin(step);
        side.overwrite_residual(step, 1);
    });
    // The step goes on where the call that failed is made again.
    graph(&|| {
        side.begin(step);
        (0..LAYERS).for_each(|layer| side.foresee(step, layer));
        // What the decoder keeps is told in a capture, too.
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_info(side.decoder.0, &mut args()) });
        assert_fails(
            attend(&vwd_decoder_attend_args { out: absent(), ..side.attend_args(step, 0) }),
            VWD_ERROR_INVALID_ARGUMENT,
            &["out: "],
        );
        (0..LAYERS).for_each(|layer| side.overwrite_residual(step, layer));
        (0..LAYERS).for_each(|layer| assert_ok(attend(&side.attend_args(step, layer))));
    });
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

/// Steps of decoders whose calls are enqueued one by one, and of the last one, whose step or round is captured once, give the same.
fn compare(replays: usize, sides: &[Side]) {
    rounds(1, |rng| {
        sides.iter().for_each(Side::reserve);
        // Prompts are what pages hold; the layers of all decoders have the same ones.
        let prompts = sides[0].caches[0].each_ref();
        prompts.iter().for_each(|cache| cache.refill_floats(&rng.normals(&cache.shape)));
        for caches in sides.iter().flat_map(|side| &side.caches) {
            caches.iter().zip(prompts).for_each(|(cache, prompts)| cache.copy_from(prompts));
        }
        let (captured, eager) = sides.split_last().expect("decoders");
        let graph = Graph::capture(captured.backend.stream().cast(), || captured.enqueue());
        let mut engine = Engine::new();
        let mut accepted = 0;
        for replay in 0..replays {
            engine.between_steps(rng, replay, sides);
            let is_taken = match sides[0].verdict {
                Some(_) => engine.round(rng, sides),
                None => {
                    engine.step(rng, sides);
                    [false; ROWS]
                }
            };
            for n in 0..sides[0].steps.len() {
                for layer in 0..LAYERS {
                    let of = |side: &Side| side.steps[n].layers[layer].each_ref().map(|t| t.shape.clone());
                    let contents: Vec<Array<f64>> =
                        of(&sides[0])[..4].iter().map(|extents| rng.normals(extents)).collect();
                    for side in sides {
                        side.steps[n].layers[layer]
                            .iter()
                            .zip(&contents)
                            .for_each(|(t, values)| t.refill_floats(values));
                    }
                }
            }
            eager.iter().for_each(Side::enqueue);
            graph.replay();
            let about =
                |n: usize| format!("decoder {n}, {}; replay {replay}, {:?} tokens", sides[n].about, engine.lens());
            for step in 0..sides[0].steps.len() {
                for layer in 0..LAYERS {
                    let out = |side: &Side| side.steps[step].layers[layer][4].read_raw();
                    let wanted = out(&sides[0]);
                    for (n, side) in sides.iter().enumerate().skip(1) {
                        assert!(out(side) == wanted, "{}, step {step}, layer {layer}", about(n));
                    }
                }
            }
            let verdicts: Vec<_> = sides.iter().filter_map(|side| side.verdict.as_ref().map(|of| (side, of))).collect();
            let said = |&(side, of): &(&Side, &Verdict)| {
                let words = |t: vwd_tensor| {
                    let mut bytes = vec![0; t.shape[0] as usize * 4];
                    side.backend.read(t.data as usize, &mut bytes);
                    bytes
                };
                let mut details: vwd_decoder_details = args();
                // SAFETY: the arguments are valid.
                assert_ok(unsafe { vwd_decoder_info(side.decoder.0, &mut details) });
                let vwd_decoder_details { draft_lens, acceptance, drafted, accepted, .. } = details;
                let tokens = [&of.accepted, &of.next, &of.committed].map(|t| t.read_ints().data);
                (tokens, [draft_lens, acceptance, drafted, accepted].map(words))
            };
            for (n, verdict) in verdicts.iter().enumerate().skip(1) {
                assert!(said(verdict) == said(&verdicts[0]), "{}, verdict", about(n));
            }
            if let Some((_, verdict)) = verdicts.first() {
                // What was rejected is written again in the next round.
                let of_rows = verdict.accepted.read_ints();
                for i in (0..ROWS).filter(|&i| is_taken[i]) {
                    engine.take(i, of_rows[[i]] as usize + 1);
                    accepted += of_rows[[i]];
                }
            }
        }
        assert!(sides[0].verdict.is_none() || accepted > 0, "no draft was accepted");
        assert!(engine.forks() > 0, "no sequence was forked");
    });
}
