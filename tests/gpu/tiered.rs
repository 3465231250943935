//! Steps of a decoder on a tiered cache in graphs: each strategy, captured once and replayed while contexts grow and sequences come, go,
//! fork and lose their last tokens, gives what it gives when its calls are enqueued one by one.

use crate::decoder::{foresee, overwrite};
use crate::graph::Graph;
use crate::model::Cache;
use crate::support::maps::{Forecast, Map};
use crate::support::*;
use crate::{Case, MOST_DELAY};
use std::cell::Cell;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("decoder_on_a_cache_replays_a_step_of_each_strategy", decoder_on_a_cache_replays_a_step_of_each_strategy),
    (
        "decoder_on_a_cache_in_int4_replays_a_step_of_each_strategy",
        decoder_on_a_cache_in_int4_replays_a_step_of_each_strategy,
    ),
    (
        "decoder_on_a_cache_with_decoded_slots_replays_a_step_of_each_strategy",
        decoder_on_a_cache_with_decoded_slots_replays_a_step_of_each_strategy,
    ),
    (
        "decoder_on_a_cache_in_int4_replays_steps_that_join_the_term_for_what_lists_leave_out",
        decoder_on_a_cache_in_int4_replays_steps_that_join_the_term_for_what_lists_leave_out,
    ),
    (
        "decoder_on_a_cache_gives_the_same_whenever_its_copies_run",
        decoder_on_a_cache_gives_the_same_whenever_its_copies_run,
    ),
];

const LAYERS: usize = 3;
const ROWS: usize = 3;
const HEADS: [usize; 2] = [4, 1];
const DIM: usize = 128;
const BLOCK: usize = 16;
const MAX_BLOCKS: usize = 24;
const K: usize = 4;
/// ⌈1.25·K⌉ and the block of the new token.
const AHEAD: usize = 6;
/// Channels of the residual stream that a forecast reads.
const INPUT: usize = 96;

/// What the decoders of a comparison do.
#[derive(Clone, Copy)]
struct Strategy {
    name: &'static str,
    policies: [vwd_decoder_policy; LAYERS],
    /// A forecast makes the foreseen queries.
    by_forecast: bool,
    /// The term for what lists leave out joins.
    has_term: bool,
}

fn policy(strategy: u32, predict: u32) -> vwd_decoder_policy {
    vwd_decoder_policy {
        method: VWD_SELECT_AXIS,
        k: K as u32,
        init_blocks: 1,
        local_blocks: 1,
        dense_below: 0,
        window: 0,
        strategy,
        predict,
        ratio: 0.0,
        holt: vwd_holt { alpha: 0.0, beta: 0.0, gamma: 0.0 },
        reserved: [0; 4],
    }
}

fn strategies() -> Vec<Strategy> {
    let serial = policy(VWD_STRATEGY_SERIAL, 0);
    let past = policy(VWD_STRATEGY_ASYNC_TLS, 0);
    let sparda = policy(VWD_STRATEGY_SPARDA, 0);
    let by_scores = policy(VWD_STRATEGY_VANWARD, VWD_PREDICT_SCORES);
    let foreseen = policy(VWD_STRATEGY_VANWARD, VWD_PREDICT_FORESEEN);
    let dense = vwd_decoder_policy { method: 0, k: 0, init_blocks: 0, local_blocks: 0, ..serial };
    let short = vwd_decoder_policy { dense_below: (ROOM * 3 / 4) as u32, ..serial };
    let given = [
        ("SERIAL", [serial; LAYERS]),
        ("ASYNC_TLS", [past; LAYERS]),
        ("SPARDA", [sparda; LAYERS]),
        ("VANWARD by scores", [by_scores; LAYERS]),
        ("VANWARD foreseen", [foreseen; LAYERS]),
        ("mixed", [foreseen, past, by_scores]),
        ("dense layers", [dense, short, by_scores]),
    ];
    let by_forecast = ("SPARDA by a forecast", [sparda; LAYERS]);
    let of = |(name, policies), by_forecast| Strategy { name, policies, by_forecast, has_term: false };
    given.into_iter().map(|given| of(given, false)).chain([of(by_forecast, true)]).collect()
}

/// Those that have the term for what lists leave out.
fn strategies_with_term() -> Vec<Strategy> {
    let (serial, sparda) = (policy(VWD_STRATEGY_SERIAL, 0), policy(VWD_STRATEGY_SPARDA, 0));
    let of = |name, policies| Strategy { name, policies, by_forecast: false, has_term: true };
    vec![of("SERIAL with the term", [serial; LAYERS]), of("SPARDA with the term", [sparda, serial, sparda])]
}

struct Decoder(*mut vwd_decoder);

impl Decoder {
    fn create(backend: &Backend, strategy: &Strategy, cache: &Cache) -> Decoder {
        let Strategy { policies, has_term, .. } = strategy;
        let options = vwd_decoder_options {
            layers: LAYERS as u32,
            max_rows: ROWS as u32,
            max_positions: BLOCK as u32,
            query_heads: HEADS[0] as u32,
            kv_heads: HEADS[1] as u32,
            key_dim: DIM as u32,
            value_dim: DIM as u32,
            dtype_code: F16.code as u32,
            dtype_bits: F16.bits as u32,
            block_size: BLOCK as u32,
            policy_count: LAYERS as u32,
            policies: policies.as_ptr(),
            max_draft: *has_term as u32,
            remainder: *has_term as u32,
            ..args()
        };
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_create_on_cache(backend.session(), &options, cache.raw, &mut decoder) });
        Decoder(decoder)
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: created once; its calls and graphs have ended.
        unsafe { vwd_decoder_release(self.0) }
    }
}

/// A cache, its decoder, and the tensors of the steps. Those of a test get the same contents.
struct Side<'b> {
    backend: &'b Backend,
    decoder: Decoder,
    cache: Cache,
    sequences: Tensor<'b>,
    lens: Tensor<'b>,
    begin: Tensor<'b>,
    modes: Tensor<'b>,
    /// Tensors of each layer: keys, values, queries, foreseen queries or what the forecast reads, output.
    layers: Vec<[Tensor<'b>; 5]>,
    forecast: Option<Forecast>,
    /// Keys and values of a block of a prompt, with its sequence and length.
    prompt: [Tensor<'b>; 2],
    prompt_rows: [Tensor<'b>; 3],
}

impl<'b> Side<'b> {
    fn new(backend: &'b Backend, strategy: &Strategy, [coding, slot_coding]: [u32; 2]) -> Side<'b> {
        let by_forecast = strategy.by_forecast;
        let plain = Layout::default();
        let zeros = |dtype, extents: &[usize]| Tensor::floats(backend, dtype, &Array::filled(extents, 0.0), &plain);
        let ints = |extents: &[usize]| Tensor::ints(backend, I32, &Array::filled(extents, 0), &plain);
        let (rows, queries) = ([ROWS, HEADS[1], DIM], [ROWS, HEADS[0], DIM]);
        let cache = Cache::on(
            backend,
            &vwd_kv_cache_options {
                layers: LAYERS as u32,
                kv_heads: HEADS[1] as u32,
                block_size: BLOCK as u32,
                key_dim: DIM as u32,
                value_dim: DIM as u32,
                dtype_code: F16.code as u32,
                dtype_bits: F16.bits as u32,
                // A fork is there before the sequence that it takes the place of is gone.
                max_sequences: ROWS as u32 + 1,
                max_blocks: MAX_BLOCKS as u32,
                host_blocks: ((ROWS + 1) * MAX_BLOCKS) as u32,
                slots: (ROWS * HEADS[1] * (AHEAD + K)) as u32,
                coding,
                slot_coding,
                ..args()
            },
        );
        let foreseen: &[usize] = if by_forecast { &[ROWS, INPUT] } else { &queries };
        // The same map on all sides.
        let map = by_forecast.then(|| Map::random(&mut Rng::new(7), [HEADS[0], DIM, INPUT], Some(24), false));
        Side {
            backend,
            decoder: Decoder::create(backend, strategy, &cache),
            cache,
            sequences: ints(&[ROWS]),
            lens: ints(&[ROWS]),
            begin: ints(&[ROWS]),
            modes: ints(&[ROWS]),
            layers: (0..LAYERS)
                .map(|_| {
                    let [k, v] = [0; 2].map(|_| zeros(F16, &rows));
                    [k, v, zeros(F16, &queries), zeros(F16, foreseen), zeros(F32, &queries)]
                })
                .collect(),
            forecast: map.map(|map| map.load(backend)),
            prompt: [0; 2].map(|_| zeros(F16, &[1, BLOCK, HEADS[1], DIM])),
            prompt_rows: [0; 3].map(|_| ints(&[1])),
        }
    }

    fn begin(&self, step: &vwd_decoder_step) {
        // SAFETY: the tensors outlive the stream's work.
        assert_ok(unsafe { vwd_decoder_begin(self.decoder.0, step, self.backend.stream()) });
    }

    fn step(&self) -> vwd_decoder_step {
        vwd_decoder_step {
            seq_lens: self.lens.c(),
            begin: self.begin.c(),
            modes: self.modes.c(),
            sequences: self.sequences.c(),
            ..args()
        }
    }

    fn attend_args(&self, layer: usize) -> vwd_decoder_attend_args {
        let [new_k, new_v, q, _, out] = &self.layers[layer];
        vwd_decoder_attend_args {
            layer: layer as u32,
            new_k: new_k.c(),
            new_v: new_v.c(),
            q: q.c(),
            out: out.c(),
            ..args()
        }
    }

    fn attend(&self, args: &vwd_decoder_attend_args) {
        // SAFETY: the tensors outlive the stream's work.
        assert_ok(unsafe { vwd_decoder_attend(self.decoder.0, args, self.backend.stream()) });
    }

    /// Makes room for what a step takes.
    fn reserve(&self) {
        self.begin(&self.step());
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

    /// A step. Layer 1 is foreseen and attended first, without a layer between; layer 2 is foreseen before layer 0 is attended. What a forecast
    /// reads is overwritten as soon as it may be.
    fn enqueue(&self) {
        self.begin(&self.step());
        for (layer, foreseen) in [(1, vec![1]), (0, vec![0, 2]), (2, vec![])] {
            foreseen.iter().for_each(|&ahead| self.foresee(ahead));
            self.attend(&self.attend_args(layer));
            foreseen.iter().for_each(|&ahead| self.overwrite_residual(ahead));
        }
    }

    fn foresee(&self, layer: usize) {
        let from = &self.layers[layer][3];
        foresee(self.backend, self.decoder.0, layer, from, self.forecast.as_ref());
    }

    /// Replaces the residual stream from which a layer was foreseen, on the caller's stream.
    fn overwrite_residual(&self, layer: usize) {
        if self.forecast.is_some() {
            overwrite(self.backend, &self.layers[layer][3]);
        }
    }

    /// What is remembered of an earlier sequence of that number is forgotten.
    fn reset(&self, number: u32) {
        self.prompt_rows[0].refill_ints(&one(number as usize));
        let args = vwd_decoder_reset_args { sequences: self.prompt_rows[0].c(), ..args() };
        // SAFETY: the arguments are valid.
        self.backend.finish(unsafe { vwd_decoder_reset(self.decoder.0, &args, self.backend.stream()) });
    }

    /// A new sequence of some tokens. Every layer has the same ones.
    fn join(&self, tokens: &[[Array<f64>; 2]], len: usize) -> u32 {
        let number = self.cache.add().expect("a sequence");
        assert_ok(self.cache.extend(number, len));
        self.reset(number);
        let [sequence, lens, q_lens] = &self.prompt_rows;
        for (n, block) in tokens.iter().enumerate() {
            let count = BLOCK.min(len - n * BLOCK);
            self.prompt.iter().zip(block).for_each(|(t, values)| t.refill_floats(values));
            lens.refill_ints(&one(n * BLOCK + count));
            q_lens.refill_ints(&one(count));
            self.begin(&vwd_decoder_step {
                positions: BLOCK as u32,
                seq_lens: lens.c(),
                q_lens: q_lens.c(),
                sequences: sequence.c(),
                ..args()
            });
            let [new_k, new_v] = [0, 1].map(|n| self.prompt[n].c());
            for layer in 0..LAYERS as u32 {
                self.attend(&vwd_decoder_attend_args { layer, new_k, new_v, ..args() });
            }
            self.backend.finish(VWD_OK);
        }
        number
    }

    /// Copies that were begun outside of a graph have ended once the stream has passed.
    fn wait(&self) {
        (0..LAYERS).for_each(|layer| assert_ok(self.cache.wait(layer)));
    }
}

fn one(value: usize) -> Array<i64> {
    Array::new(&[1], vec![value as i64])
}

/// A row's sequence.
#[derive(Clone, Copy, Default)]
struct Row {
    number: u32,
    len: usize,
    /// Since it joined, was forked or truncated, it has had no step.
    is_new: bool,
}

const ROOM: usize = MAX_BLOCKS * BLOCK;

/// The host's calls before a step, on all sides.
fn between_steps(rng: &mut Rng, sides: &[Side], rows: &mut [Row; ROWS]) {
    let all = |call: &dyn Fn(&Side) -> u32| {
        let numbers: Vec<u32> = sides.iter().map(call).collect();
        assert!(numbers.iter().all(|&n| n == numbers[0]), "numbers of a sequence: {numbers:?}");
        numbers[0]
    };
    for i in 0..ROWS {
        let Row { number, len, .. } = rows[i];
        match rng.size(0..=59) {
            _ if len == 0 || len == ROOM => {}
            0 => {}
            1 | 2 => {
                let to = len - rng.size(1..=20.min(len - 1));
                sides.iter().for_each(|side| assert_ok(side.cache.truncate(number, to)));
                rows[i] = Row { len: to, is_new: true, ..rows[i] };
                continue;
            }
            3 => {
                let parent = rows[rng.size(0..=ROWS - 1)];
                if parent.len > 0 {
                    let kept = rng.size(1..=parent.len.min(ROOM - 1));
                    let child = all(&|side| {
                        let child = side.cache.fork(parent.number, kept).expect("a fork");
                        side.cache.free(number);
                        side.reset(child);
                        child
                    });
                    rows[i] = Row { number: child, len: kept, is_new: true };
                }
                continue;
            }
            _ => continue,
        }
        let len = rng.size(ROOM / 2..=ROOM - 20);
        let tokens: Vec<[Array<f64>; 2]> =
            (0..len.div_ceil(BLOCK)).map(|_| [0; 2].map(|_| rng.normals(&[1, BLOCK, HEADS[1], DIM]))).collect();
        let new = all(&|side| {
            if rows[i].len > 0 {
                side.cache.free(number);
            }
            side.join(&tokens, len)
        });
        rows[i] = Row { number: new, len, is_new: true };
    }
}

/// Values of about 1 in float32, from partials whose weights were rounded to float16; another order of their sums rounds others.
const REPAIRED: f64 = 4e-3;

/// Codings of a cache's blocks and of its slots.
const EXACT: [u32; 2] = [VWD_CODING_EXACT, VWD_SLOTS_AS_STORED];
const INT4: [u32; 2] = [VWD_CODING_INT4, VWD_SLOTS_AS_STORED];
const DECODED: [u32; 2] = [VWD_CODING_INT4, VWD_SLOTS_DECODED];

fn decoder_on_a_cache_replays_a_step_of_each_strategy(backend: &Backend) {
    compare(&[backend; 2], EXACT, 500, strategies());
}

/// On a cache whose blocks are coded as they become whole: graphs code what is there at their replay.
fn decoder_on_a_cache_in_int4_replays_a_step_of_each_strategy(backend: &Backend) {
    compare(&[backend; 2], INT4, 200, strategies());
}

/// What graphs count, and lists that name exact and coded blocks, change from one replay to the next.
fn decoder_on_a_cache_in_int4_replays_steps_that_join_the_term_for_what_lists_leave_out(backend: &Backend) {
    compare(&[backend; 2], INT4, 200, strategies_with_term());
}

/// On one whose slots hold what the codes stand for.
fn decoder_on_a_cache_with_decoded_slots_replays_a_step_of_each_strategy(backend: &Backend) {
    compare(&[backend; 2], DECODED, 200, strategies());
}

/// Against steps without delays: steps with them, enqueued one by one and in a graph. What has arrived when VANWARD attends it, and what
/// its repair adds, depends on time: its sums have another order then.
fn decoder_on_a_cache_gives_the_same_whenever_its_copies_run(backend: &Backend) {
    let delaying = backend.delaying(MOST_DELAY);
    compare(&[backend, &delaying, &delaying], EXACT, 500, strategies());
    compare(&[backend, &delaying, &delaying], DECODED, 200, strategies());
}

/// Steps of decoders whose calls are enqueued one by one, and of the last one, whose step is captured once, give the same. Where a term joins, so do
/// those of one more decoder, without a term, which has to give something else.
fn compare(backends: &[&Backend], coding: [u32; 2], replays: usize, strategies: Vec<Strategy>) {
    let (evicted, joined) = (Cell::new(0), Cell::new(0));
    for strategy in strategies {
        let Strategy { name, policies, by_forecast, has_term } = strategy;
        let plain = Strategy { has_term: false, ..strategy };
        rounds(1, |rng| {
            let without = has_term.then(|| Side::new(backends[0], &plain, coding));
            let first = without.is_some() as usize;
            let sides: Vec<Side> = without
                .into_iter()
                .chain(backends.iter().map(|&backend| Side::new(backend, &strategy, coding)))
                .collect();
            sides.iter().for_each(Side::reserve);
            let (captured, eager) = sides.split_last().expect("decoders");
            let graph = Graph::capture(captured.backend.stream().cast(), || captured.enqueue());
            let mut rows = [Row::default(); ROWS];
            for replay in 0..backends[0].times(replays).max(30) {
                between_steps(rng, &sides, &mut rows);
                let mut modes = [VWD_DECODER_SPARSE as i64; ROWS];
                let mut begin = [i32::MAX as i64; ROWS];
                for (i, row) in rows.iter_mut().enumerate() {
                    if row.is_new {
                        begin[i] = row.len as i64 - 1;
                    }
                    match rng.size(0..=15) {
                        0 | 1 => modes[i] = VWD_DECODER_SKIP as i64,
                        2..=4 => modes[i] = VWD_DECODER_DENSE as i64,
                        _ => {}
                    }
                    if modes[i] == VWD_DECODER_SKIP as i64 {
                        continue;
                    }
                    (row.len, row.is_new) = (row.len + 1, false);
                    sides.iter().for_each(|side| assert_ok(side.cache.extend(row.number, row.len)));
                }
                let ints = |of: &dyn Fn(usize) -> i64| Array::from_fn(&[ROWS], |at| of(at[0]));
                let foreseen = !by_forecast && rng.one_in(2);
                let contents: Vec<[Array<f64>; 4]> = captured
                    .layers
                    .iter()
                    .map(|layer| {
                        let mut values = [0, 1, 2, 3].map(|n| rng.normals(&layer[n].read_floats().shape));
                        if foreseen {
                            values[3] = values[2].clone();
                        }
                        values
                    })
                    .collect();
                for side in &sides {
                    side.sequences.refill_ints(&ints(&|i| rows[i].number as i64));
                    side.lens.refill_ints(&ints(&|i| rows[i].len as i64));
                    side.begin.refill_ints(&ints(&|i| begin[i]));
                    side.modes.refill_ints(&ints(&|i| modes[i]));
                    for (tensors, values) in side.layers.iter().zip(&contents) {
                        tensors.iter().zip(values).for_each(|(t, values)| t.refill_floats(values));
                    }
                }
                eager.iter().for_each(Side::enqueue);
                captured.wait();
                graph.replay();
                for (layer, policy) in policies.iter().enumerate() {
                    let outs: Vec<_> = sides.iter().map(|side| side.layers[layer][4].read_floats()).collect();
                    // The newest blocks of a dense row are added by repair.
                    let has_dense =
                        policy.method == 0 || policy.dense_below > 0 || modes.contains(&(VWD_DECODER_DENSE as i64));
                    let is_repaired = policy.strategy == VWD_STRATEGY_VANWARD || has_dense;
                    let tolerance = if is_repaired { REPAIRED } else { 0.0 };
                    if has_term && outs[0].data.iter().zip(&outs[1].data).any(|(x, y)| (x - y).abs() > REPAIRED) {
                        joined.set(joined.get() + 1);
                    }
                    for (n, found) in outs.iter().enumerate().skip(first + 1) {
                        for (x, y) in found.data.iter().zip(&outs[first].data) {
                            let lens = rows.map(|row| row.len);
                            let about =
                                format!("{name}, replay {replay}, layer {layer}, {lens:?} tokens, modes {modes:?}");
                            assert!((x - y).abs() <= tolerance, "decoder {n}, {about}: {x}, decoder {first} {y}");
                        }
                    }
                }
            }
            for side in &sides {
                let vwd_kv_cache_stats { misses, evictions, dropped_tokens, .. } = side.cache.stats();
                assert_eq!(dropped_tokens, 0, "{name}");
                assert!(misses > 0, "{name} missed nothing");
                evicted.set(evicted.get() + evictions);
            }
            assert_eq!(joined.take() > 0, has_term, "{name}: whether a term joined");
        });
    }
    assert!(evicted.get() > 0, "no block left its slot");
}
