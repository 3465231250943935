//! A decoder on a tiered cache, in every type of keys and by both kinds of summaries, against one on pages that has the same tokens: SERIAL
//! and VANWARD give what SERIAL gives there, by any factors of its prediction, SPARDA what FORESEEN gives, and dense steps what dense steps give.
//! Where a forecast foresees, one decoder has its handle and the other one its queries. Some steps verify trees, of which a path is accepted.
//! The other decoder has its own cases.

use super::strategies::without_positions;
use super::tiered::{Cache, Sizes, create_on};
use super::*;
use crate::compact::Compactor;
use crate::support::maps::{Forecast, Map};
use crate::support::trees::Masks;

pub const CASES: &[Case] = cases![decoder_on_a_cache_agrees_with_one_on_pages_in_every_type,];

const K: usize = 4;
/// ⌈1.25·K⌉ and the block of the new token.
const AHEAD: usize = 6;
const ROWS: usize = 2;
const MAX_BLOCKS: usize = 24;
const POSITIONS: usize = 3;
/// Nodes of a tree: more than a block of 8 has left, and fewer than a block has.
const NODES: usize = 7;
const LAYERS: usize = 4;

/// The strategy of each layer and the source of its prediction, on the cache and on pages.
const STRATEGIES: [[(u32, u32); 2]; LAYERS] = [
    [(VWD_STRATEGY_SERIAL, 0), (VWD_STRATEGY_SERIAL, 0)],
    [(VWD_STRATEGY_VANWARD, VWD_PREDICT_SCORES), (VWD_STRATEGY_SERIAL, 0)],
    [(VWD_STRATEGY_VANWARD, VWD_PREDICT_FORESEEN), (VWD_STRATEGY_SERIAL, 0)],
    [(VWD_STRATEGY_SPARDA, 0), (VWD_STRATEGY_FORESEEN, 0)],
];

/// Where scales of FP8 keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scales {
    None,
    OfLayer,
    OfTokens,
}

/// Factors of Holt's smoothing; the first ones mean those of the scores of the step before.
const FACTORS: [[f32; 3]; 4] = [[0.0; 3], [0.6, 0.3, 0.5], [0.25, 0.0, 0.0], [1.0, 1.0, 1.0]];

#[derive(Clone, Copy, Debug)]
struct Kinds {
    dtype: DType,
    method: u32,
    scales: Scales,
    heads: [usize; 2],
    dims: [usize; 2],
    block: usize,
    window: u32,
    soft_cap: f32,
    factors: [f32; 3],
}

/// Two decoders with the same tokens, and the pages of one of them.
struct Pair<'b> {
    backend: &'b Backend,
    kinds: Kinds,
    on_cache: Decoder,
    on_pages: Decoder,
    cache: Cache,
    /// [pages, S, Hk, channels]: every layer has the same tokens. Row i has `MAX_BLOCKS` pages.
    pages: [Tensor<'b>; 2],
    /// [pages, S, Hk], and what it holds.
    token_scales: [(Tensor<'b>, Array<f64>); 2],
    /// What foresees, if not the test itself.
    forecast: Option<(Map, Forecast)>,
    /// [1]: slots know no heads.
    layer_scales: [Tensor<'b>; 2],
    numbers: [i64; ROWS],
    len: usize,
    /// The root of a tree that was compacted since the last step.
    since: Option<usize>,
}

impl<'b> Pair<'b> {
    fn new(backend: &'b Backend, rng: &mut Rng, kinds: Kinds) -> Pair<'b> {
        let Kinds { dtype, method, scales, heads, dims, block, window, soft_cap, factors: [alpha, beta, gamma] } =
            kinds;
        let sizes = Sizes { layers: LAYERS, heads, dims, dtype, block };
        let policies = [0, 1].map(|side| {
            STRATEGIES.map(|of| {
                let (strategy, predict) = of[side];
                let predicts = strategy == VWD_STRATEGY_VANWARD && predict == VWD_PREDICT_SCORES;
                let holt = if predicts { vwd_holt { alpha, beta, gamma } } else { POLICY.holt };
                vwd_decoder_policy { method, k: K as u32, strategy, predict, window, holt, ..POLICY }
            })
        });
        let options =
            |side: usize| vwd_decoder_options { max_rows: ROWS as u32, soft_cap, ..sizes.decoder(&policies[side]) };
        let cache = Cache::create(
            backend,
            &vwd_kv_cache_options {
                token_scales: (scales == Scales::OfTokens) as u32,
                max_sequences: ROWS as u32,
                max_blocks: MAX_BLOCKS as u32,
                host_blocks: (ROWS * MAX_BLOCKS) as u32,
                slots: (ROWS * heads[1] * (AHEAD + K)) as u32,
                ..sizes.cache()
            },
        );
        let mut numbers = [0; ROWS].map(|_| {
            let mut number = u32::MAX;
            // SAFETY: the arguments are valid.
            assert_ok(unsafe { vwd_kv_cache_add(cache.0, &mut number, backend.stream()) });
            number as i64
        });
        rng.shuffle(&mut numbers);
        let paged = vwd_decoder_options { page_size: block as u32, pages: (ROWS * MAX_BLOCKS) as u32, ..options(1) };
        let plain = Layout::default();
        let rows = [ROWS * MAX_BLOCKS, block, heads[1]];
        let has_forecast = rng.one_in(2);
        let forecast = has_forecast.then(|| {
            let (of_heads, rank, memory) = (rng.pick(&heads), rng.pick(&[None, Some(8)]), rng.one_in(2));
            let map = Map::random(rng, [of_heads, dims[0], 40], rank, memory);
            let forecast = map.load(backend);
            (map, forecast)
        });
        Pair {
            backend,
            kinds,
            forecast,
            on_cache: create_on(backend, &options(0), &cache),
            on_pages: Decoder::create(backend, &paged),
            cache,
            pages: dims.map(|dim| {
                Tensor::floats(backend, dtype, &Array::filled(&[rows[0], rows[1], rows[2], dim], 0.0), &plain)
            }),
            token_scales: [0; 2].map(|_| {
                let ones = Array::filled(&rows, 1.0);
                (Tensor::floats(backend, F32, &ones, &plain), ones)
            }),
            layer_scales: [0; 2].map(|_| {
                let values = Array::from_fn(&[1], |_| 0.5 + rng.unit());
                Tensor::floats(backend, F32, &values, &plain)
            }),
            numbers,
            len: 0,
            since: None,
        }
    }

    /// `positions` new tokens for each row, which may be nodes of trees, and where `q_type` is given their attention in every layer.
    fn step(
        &mut self,
        rng: &mut Rng,
        positions: usize,
        mode: u32,
        q_type: Option<DType>,
        begins: bool,
        masks: Option<&Masks>,
    ) -> Vec<[Array<f64>; 2]> {
        let Kinds { dtype, scales, heads: [heads, kv_heads], dims, block, .. } = self.kinds;
        let (backend, plain, first) = (self.backend, Layout::default(), self.len);
        self.len += positions;
        for number in self.numbers {
            // SAFETY: the cache lives.
            let status = unsafe { vwd_kv_cache_extend(self.cache.0, number as u32, self.len as u64, backend.stream()) };
            assert_ok(status);
        }
        let new =
            dims.map(|dim| Tensor::floats(backend, dtype, &rng.normals(&[ROWS, positions, kv_heads, dim]), &plain));
        let new_scales = [0, 1].map(|n| {
            let values = Array::from_fn(&[ROWS, positions, kv_heads], |_| 0.5 + rng.unit());
            let (t, pages) = &mut self.token_scales[n];
            for at in indices(&values.shape) {
                let [i, r, g] = [at[0], at[1], at[2]];
                let token = first + r;
                pages[[i * MAX_BLOCKS + token / block, token % block, g]] = values[[i, r, g]];
            }
            t.refill_floats(pages);
            Tensor::floats(backend, F32, &values, &plain)
        });
        let lens = ints(backend, &[self.len as i64; ROWS]);
        let since = self.since.take();
        let begin = ints(backend, &[since.map_or(first as i64 - 1, |since| since as i64); ROWS]);
        let (table, words) = (self.table(), masks.map(|masks| masks.place(backend, rng)));
        let numbers = ints(backend, &self.numbers);
        let mut step = vwd_decoder_step { mode, positions: positions as u32, seq_lens: lens.c(), ..args() };
        if begins || since.is_some() {
            step.begin = begin.c();
        }
        step.tree = words.as_ref().map_or(absent(), Tensor::c);
        self.on_cache.begin(backend, &vwd_decoder_step { sequences: numbers.c(), ..step });
        self.on_pages.begin(backend, &vwd_decoder_step { page_table: table.c(), ..step });
        let mut found = vec![];
        for layer in 0..LAYERS as u32 {
            let mut attend = vwd_decoder_attend_args { layer, new_k: new[0].c(), new_v: new[1].c(), ..args() };
            let mut paged = vwd_decoder_attend_args { k: self.pages[0].c(), v: self.pages[1].c(), ..attend };
            match scales {
                Scales::None => {}
                Scales::OfLayer => {
                    for args in [&mut attend, &mut paged] {
                        (args.k_scale, args.v_scale) = (self.layer_scales[0].c(), self.layer_scales[1].c());
                    }
                }
                Scales::OfTokens => {
                    (attend.k_scale, attend.v_scale) = (new_scales[0].c(), new_scales[1].c());
                    (paged.k_scale, paged.v_scale) = (self.token_scales[0].0.c(), self.token_scales[1].0.c());
                }
            }
            let Some(q_type) = q_type else {
                self.on_cache.attend(backend, &attend);
                self.on_pages.attend(backend, &paged);
                continue;
            };
            let values = rng.normals(&[ROWS, positions, heads, dims[0]]);
            let q = Tensor::floats(backend, q_type, &values, &plain);
            // What a forecast reads stays until the layer has been attended.
            let mut read = None;
            if positions == 1 {
                let guess = Array { data: values.data.iter().map(|x| x + 0.5 * rng.normal()).collect(), ..values };
                let guess = Tensor::floats(backend, q_type, &guess, &plain);
                match &self.forecast {
                    Some((map, forecast)) => read = Some(self.foresee_by(rng, map, forecast, layer, first)),
                    None => {
                        let foresee = vwd_decoder_foresee_args { layer, q: without_positions(&guess), ..args() };
                        let none = std::ptr::null();
                        for decoder in [&self.on_cache, &self.on_pages] {
                            decoder.foresee(backend, none, &foresee);
                        }
                    }
                }
            }
            let sinks = Tensor::floats(backend, F32, &rng.normals(&[heads]), &plain);
            if rng.one_in(2) {
                (attend.sinks, paged.sinks) = (sinks.c(), sinks.c());
            }
            let outs = [0; 2].map(|_| Tensor::poisoned(backend, F32, &[ROWS, positions, heads, dims[1]], &plain));
            self.on_cache.attend(backend, &vwd_decoder_attend_args { q: q.c(), out: outs[0].c(), ..attend });
            self.on_pages.attend(backend, &vwd_decoder_attend_args { q: q.c(), out: outs[1].c(), ..paged });
            found.push(outs.each_ref().map(Tensor::read_floats));
            drop(read);
        }
        found
    }

    /// One of the decoders has the forecast and what it reads, the other one the queries that it gives for the token at `place`. Returns what
    /// the forecast reads.
    fn foresee_by(&self, rng: &mut Rng, map: &Map, forecast: &Forecast, layer: u32, place: usize) -> [Tensor<'b>; 2] {
        let (backend, plain, heads) = (self.backend, Layout::default(), [ROWS, map.heads, map.dim]);
        let x = Tensor::floats(backend, rng.pick(&[F32, F16]), &rng.normals(&[ROWS, map.input_dim]), &plain);
        let queries = Tensor::floats(backend, F32, &rng.normals(&heads), &plain);
        let previous = if map.memory { queries.c() } else { absent() };
        let (style, theta) = (rng.pick(&[VWD_ROPE_HALVES, VWD_ROPE_INTERLEAVED]), 500.0);
        let rope = vwd_rope { style, theta, ..args() };
        let dtype = if self.kinds.dtype.bits == 16 { self.kinds.dtype } else { F32 };
        let (q, positions) = (Tensor::poisoned(backend, dtype, &heads, &plain), ints(backend, &[place as i64; ROWS]));
        let project =
            vwd_forecast_project_args { rope: &rope, x: x.c(), previous, positions: positions.c(), q: q.c(), ..args() };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_forecast_project(forecast.0, &project, backend.stream()) });
        let by_stream = vwd_decoder_foresee_args { layer, rope: &rope, x: x.c(), previous, ..args() };
        let by_queries = vwd_decoder_foresee_args { layer, q: q.c(), ..args() };
        let mut decoders = [&self.on_cache, &self.on_pages];
        rng.shuffle(&mut decoders);
        decoders[0].foresee(backend, forecast.0, &by_stream);
        decoders[1].foresee(backend, std::ptr::null(), &by_queries);
        [x, queries]
    }

    fn table(&self) -> Tensor<'b> {
        let table = Array::from_fn(&[ROWS, MAX_BLOCKS], |at| (at[0] * MAX_BLOCKS + at[1]) as i64);
        Tensor::ints(self.backend, I32, &table, &Layout::default())
    }

    /// Accepts a path of as many nodes in each row's tree: in the cache, in the pages, and in what scales the pages have. The number of tokens
    /// that moved.
    fn accept(&mut self, rng: &mut Rng, base: usize, masks: &Masks) -> usize {
        let (backend, block) = (self.backend, self.kinds.block);
        let of_depth = |i: usize, depth: usize| (0..NODES).filter(move |&n| masks.path(i, n).len() == depth + 1);
        let deepest = |i: usize| (0..NODES).map(|n| masks.path(i, n).len() - 1).max().unwrap();
        let depth = rng.size(0..=(0..ROWS).map(deepest).min().unwrap());
        let paths = [0, 1].map(|i| {
            let nodes: Vec<usize> = of_depth(i, depth).collect();
            masks.path(i, rng.pick(&nodes))
        });
        let path = Array::from_fn(&[ROWS, NODES], |at| paths[at[0]].get(at[1]).map_or(-1, |&node| node as i64));
        let path = Tensor::ints(backend, I32, &path, &Layout::default());
        let (bases, numbers, table) = (ints(backend, &[base as i64; ROWS]), ints(backend, &self.numbers), self.table());
        let in_cache = vwd_kv_cache_compact_args { sequences: numbers.c(), bases: bases.c(), path: path.c(), ..args() };
        let in_pages = vwd_compact_args { page_table: table.c(), bases: bases.c(), path: path.c(), ..args() };
        let compactor = Compactor::new(backend, &self.pages.each_ref().map(Tensor::c));
        // SAFETY: the arguments are valid.
        unsafe {
            assert_ok(vwd_kv_cache_compact(self.cache.0, &in_cache, backend.stream()));
            backend.finish(vwd_compact(compactor.0, &in_pages, backend.stream()));
        }
        for (_, scales) in &mut self.token_scales {
            let place = |i: usize, g: usize, token: usize| [i * MAX_BLOCKS + token / block, token % block, g];
            for (i, path) in paths.iter().enumerate() {
                for g in 0..scales.shape[2] {
                    for (j, node) in path.iter().enumerate() {
                        scales[place(i, g, base + j)] = scales[place(i, g, base + node)];
                    }
                }
            }
        }
        (self.len, self.since) = (base + depth + 1, Some(base));
        paths.iter().flat_map(|path| path.iter().enumerate()).filter(|&(j, &node)| j != node).count()
    }
}

fn decoder_on_a_cache_agrees_with_one_on_pages_in_every_type(backend: &Backend) {
    let (mut misses, mut evictions, mut moved) = (0, 0, 0);
    rounds(backend.times(20).max(10) as u64, |rng| {
        let dtype = rng.pick(&[F32, F16, BF16, F8E4M3, F8E5M2]);
        let is_byte = dtype.bits == 8;
        let kinds = Kinds {
            dtype,
            method: rng.pick(&[VWD_SELECT_MINMAX, VWD_SELECT_AXIS]),
            scales: if is_byte { rng.pick(&[Scales::None, Scales::OfLayer, Scales::OfTokens]) } else { Scales::None },
            heads: rng.pick(&[[2, 1], [4, 2], [8, 2]]),
            dims: rng.pick(&[[64, 64], [128, 128], [64, 128]]),
            block: rng.pick(&[8, 16]),
            window: rng.pick(&[0, 0, 50]),
            soft_cap: rng.pick(&[0.0, 0.0, 3.0]),
            factors: rng.pick(&FACTORS),
        };
        let mut pair = Pair::new(backend, rng, kinds);
        // Longer than any list: a row on pages would be dense.
        let prompt = rng.size(AHEAD + 2..=MAX_BLOCKS - 7) * kinds.block;
        while pair.len < prompt {
            let positions = rng.size(1..=kinds.block);
            pair.step(rng, positions, VWD_DECODER_SPARSE, None, false, None);
        }
        let q_type = if is_byte { rng.pick(&[F16, BF16]) } else { dtype };
        // Weights are rounded to 16 bits on CUDA, and sums have another order.
        let tolerance: f64 = match (backend.is_cuda(), dtype) {
            (false, _) => 0.0,
            (true, dtype) if dtype == F32 => 2e-5,
            (true, _) => 2e-2,
        };
        for n in 0..14 {
            let masks = rng.one_in(3).then(|| Masks::random(rng, ROWS, NODES));
            let positions = if masks.is_some() { NODES } else { rng.pick(&[1, 1, 1, POSITIONS]) };
            let mode = if n > 0 && rng.one_in(3) { VWD_DECODER_DENSE } else { VWD_DECODER_SPARSE };
            let base = pair.len;
            if base + positions > MAX_BLOCKS * kinds.block {
                break;
            }
            let layers = pair.step(rng, positions, mode, Some(q_type), n == 0, masks.as_ref());
            for (layer, [found, expected]) in layers.into_iter().enumerate() {
                for at in indices(&expected.shape) {
                    let at: [usize; 4] = at[..].try_into().unwrap();
                    let (x, y) = (found[at], expected[at]);
                    assert!(
                        (x - y).abs() <= tolerance,
                        "{kinds:?}, step {n}, mode {mode}, {} tokens, {positions} new ones, trees {}, forecast {}, \
                         layer {layer}: {x} at {at:?}, on pages {y}",
                        pair.len,
                        masks.is_some(),
                        pair.forecast.is_some()
                    );
                }
            }
            if let Some(masks) = &masks {
                moved += pair.accept(rng, base, masks);
            }
        }
        let mut stats: vwd_kv_cache_stats = args();
        // SAFETY: both are valid.
        assert_ok(unsafe { vwd_kv_cache_info(pair.cache.0, &mut stats) });
        assert_eq!(stats.dropped_tokens, 0, "{kinds:?}");
        (misses, evictions) = (misses + stats.misses, evictions + stats.evictions);
    });
    assert!(misses > 0 && evictions > 0, "{misses} misses, {evictions} blocks left their slots");
    assert!(moved > 0, "no token of a tree moved");
}
