//! Prediction from smoothed scores, by any factors: PRR on pages and VANWARD on a tiered cache miss what their selection has and the calls of
//! the predictor, which are given the same scores, did not predict.
//!
//! Keys and queries are whole numbers, so that scores are exact.

use super::plain::{BLOCK, DIM, SCALE, Token, Vector, list, scores};
use super::tiered::{Cache, Sizes, create_on};
use super::*;

pub const CASES: &[Case] = cases![decoder_predicts_from_its_scores_what_the_predictor_predicts];

const ROWS: usize = 3;
const HEADS: usize = 2;
const MAX_BLOCKS: usize = 40;
const PROMPT: usize = 24;
const K: usize = 5;
/// Factors, and the length of the predicted list as a multiple of k.
const WAYS: [([f32; 3], f32); LAYERS - 1] =
    [([0.0; 3], 0.0), ([0.5, 0.0, 0.0], 1.0), ([0.6, 0.3, 0.5], 0.0), ([0.9, 1.0, 1.0], 1.6)];
const LAYERS: usize = 5;
const MOST: usize = 8;

/// The predictor of a layer, outside of a decoder.
struct Predictor<'b> {
    backend: &'b Backend,
    holt: vwd_holt,
    k: usize,
    level: Tensor<'b>,
    trend: Tensor<'b>,
}

impl<'b> Predictor<'b> {
    fn new(backend: &'b Backend, ([alpha, beta, gamma], ratio): ([f32; 3], f32)) -> Predictor<'b> {
        let [level, trend] = [0; 2].map(|_| Tensor::poisoned(backend, F32, &[ROWS, 1, MAX_BLOCKS], &Layout::default()));
        let ratio = if ratio == 0.0 { 1.25 } else { ratio as f64 };
        let k = (ratio * K as f64 * (1.0 - 1e-6)).ceil() as usize;
        let predictor = Predictor { backend, holt: vwd_holt { alpha, beta, gamma }, k, level, trend };
        let reset = vwd_predictor_reset_args { state: predictor.state(), ..args() };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_predictor_reset(backend.session(), &reset, backend.stream()) });
        predictor
    }

    fn state(&self) -> vwd_predictor_state {
        vwd_predictor_state { level: self.level.c(), trend: self.trend.c() }
    }

    /// The blocks predicted of rows of so many tokens; none of rows without tokens.
    fn predict(&self, tokens: &Tensor) -> Vec<Vec<usize>> {
        let (backend, plain) = (self.backend, Layout::default());
        let (ids, counts) = (
            Tensor::poisoned(backend, I32, &[ROWS, 1, MOST], &plain),
            Tensor::poisoned(backend, I32, &[ROWS, 1], &plain),
        );
        let predict = vwd_predictor_predict_args {
            block_size: BLOCK as u32,
            k: self.k as u32,
            init_blocks: 1,
            local_blocks: 1,
            holt: self.holt,
            state: self.state(),
            seq_lens: tokens.c(),
            predicted: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
            ..args()
        };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_predictor_predict(backend.session(), &predict, backend.stream()) });
        let (ids, counts) = (ids.read_ints(), counts.read_ints());
        (0..ROWS).map(|i| (0..counts.data[i] as usize).map(|n| ids[[i, 0, n]] as usize).collect()).collect()
    }

    fn update(&self, tokens: &Tensor, scores: &Tensor) {
        let update = vwd_predictor_update_args {
            block_size: BLOCK as u32,
            holt: self.holt,
            state: self.state(),
            seq_lens: tokens.c(),
            scores: scores.c(),
            ..args()
        };
        // SAFETY: the arguments are valid.
        self.backend.finish(unsafe { vwd_predictor_update(self.backend.session(), &update, self.backend.stream()) });
    }
}

fn vector(rng: &mut Rng, most: i64) -> Vector {
    std::array::from_fn(|_| rng.int(-most..=most) as f32)
}

/// Decoders with the same sequences, on a cache and on pages.
struct Pair<'b> {
    backend: &'b Backend,
    on_cache: Decoder,
    on_pages: Decoder,
    cache: Cache,
    /// Keys and values [pages, S, 1, DIM], the same ones in every layer; row i has `MAX_BLOCKS` pages.
    pages: [Tensor<'b>; 2],
    table: Tensor<'b>,
    numbers: Tensor<'b>,
}

impl<'b> Pair<'b> {
    /// `slots` of a layer of the cache.
    fn new(backend: &'b Backend, slots: usize) -> Pair<'b> {
        let sizes = Sizes { layers: LAYERS, heads: [HEADS, 1], dims: [DIM; 2], dtype: F32, block: BLOCK };
        let policies = |strategy: u32| -> Vec<vwd_decoder_policy> {
            let serial = vwd_decoder_policy { k: K as u32, ..POLICY };
            let by_scores = WAYS.map(|([alpha, beta, gamma], ratio)| vwd_decoder_policy {
                strategy,
                ratio,
                holt: vwd_holt { alpha, beta, gamma },
                ..serial
            });
            [serial].into_iter().chain(by_scores).collect()
        };
        let (vanward, prr) = (policies(VWD_STRATEGY_VANWARD), policies(VWD_STRATEGY_PRR));
        let options =
            |policies| vwd_decoder_options { max_rows: ROWS as u32, scale: SCALE as f32, ..sizes.decoder(policies) };
        let cache = Cache::create(
            backend,
            &vwd_kv_cache_options {
                max_sequences: ROWS as u32,
                max_blocks: MAX_BLOCKS as u32,
                host_blocks: (ROWS * MAX_BLOCKS) as u32,
                slots: slots as u32,
                ..sizes.cache()
            },
        );
        let numbers = [0; ROWS].map(|_| {
            let mut number = u32::MAX;
            // SAFETY: the arguments are valid.
            assert_ok(unsafe { vwd_kv_cache_add(cache.0, &mut number, backend.stream()) });
            number as i64
        });
        let paged = vwd_decoder_options { page_size: BLOCK as u32, pages: (ROWS * MAX_BLOCKS) as u32, ..options(&prr) };
        let zeros = Array::filled(&[ROWS * MAX_BLOCKS, BLOCK, 1, DIM], 0.0);
        let table = Array::from_fn(&[ROWS, MAX_BLOCKS], |at| (at[0] * MAX_BLOCKS + at[1]) as i64);
        Pair {
            backend,
            on_cache: create_on(backend, &options(&vanward), &cache),
            on_pages: Decoder::create(backend, &paged),
            cache,
            pages: [0; 2].map(|_| Tensor::floats(backend, F32, &zeros, &Layout::default())),
            table: Tensor::ints(backend, I32, &table, &Layout::default()),
            numbers: ints(backend, &numbers),
        }
    }

    /// `new` tokens of each row, [ROWS][positions], of which row i takes the first `counts[i]`; with queries their attention in each layer by both
    /// decoders.
    fn step(
        &self,
        modes: &[u32],
        lens: &[usize],
        counts: &[usize],
        new: &[Vec<Token>],
        q: Option<&[Vec<Vector>]>,
    ) -> Vec<[Array<f64>; 2]> {
        let (backend, positions) = (self.backend, new[0].len());
        let list = |values: &[usize]| ints(backend, &values.iter().map(|&n| n as i64).collect::<Vec<_>>());
        let (seq_lens, q_lens) = (list(lens), list(counts));
        let modes = ints(backend, &modes.iter().map(|&mode| mode as i64).collect::<Vec<_>>());
        let numbers = self.numbers.read_ints();
        for (&number, &len) in numbers.data.iter().zip(lens) {
            // SAFETY: the cache lives.
            let status = unsafe { vwd_kv_cache_extend(self.cache.0, number as u32, len as u64, backend.stream()) };
            assert_ok(status);
        }
        let rows = |heads: usize, values: Vec<f64>| {
            Tensor::floats(backend, F32, &Array::new(&[ROWS, positions, heads, DIM], values), &Layout::default())
        };
        let of = |part: fn(&Token) -> Vector| new.iter().flatten().flat_map(part).map(|x| x as f64).collect();
        let (new_k, new_v) = (rows(1, of(|token| token.key)), rows(1, of(|token| token.value)));
        let step = vwd_decoder_step {
            positions: positions as u32,
            seq_lens: seq_lens.c(),
            q_lens: q_lens.c(),
            modes: modes.c(),
            ..args()
        };
        self.on_cache.begin(backend, &vwd_decoder_step { sequences: self.numbers.c(), ..step });
        self.on_pages.begin(backend, &vwd_decoder_step { page_table: self.table.c(), ..step });
        let q = q.map(|q| rows(HEADS, q.iter().flatten().flatten().map(|&x| x as f64).collect()));
        let attend = |layer: usize| {
            let outs =
                [0; 2].map(|_| Tensor::poisoned(backend, F32, &[ROWS, positions, HEADS, DIM], &Layout::default()));
            let args = |n: usize| {
                let args =
                    vwd_decoder_attend_args { layer: layer as u32, new_k: new_k.c(), new_v: new_v.c(), ..args() };
                q.as_ref().map_or(args, |q| vwd_decoder_attend_args { q: q.c(), out: outs[n].c(), ..args })
            };
            self.on_cache.attend(backend, &args(0));
            let [k, v] = self.pages.each_ref().map(Tensor::c);
            self.on_pages.attend(backend, &vwd_decoder_attend_args { k, v, ..args(1) });
            q.as_ref().map(|_| outs.each_ref().map(Tensor::read_floats))
        };
        (0..LAYERS).filter_map(attend).collect()
    }

    /// [LAYERS, ROWS] of what the decoders count.
    fn counts(&self, of: fn(&vwd_decoder_details) -> vwd_tensor) -> [Vec<u32>; 2] {
        [&self.on_cache, &self.on_pages].map(|decoder| {
            let mut bytes = vec![0; LAYERS * ROWS * 4];
            self.backend.read(of(&decoder.details()).data as usize, &mut bytes);
            bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
        })
    }
}

fn decoder_predicts_from_its_scores_what_the_predictor_predicts(backend: &Backend) {
    let steps = backend.times(150).max(16);
    // Slots for all blocks, so that what was predicted is there; and for a predicted and a selected list of each row.
    for slots in [ROWS * MAX_BLOCKS, ROWS * (MOST + K)] {
        let has_all = slots == ROWS * MAX_BLOCKS;
        rounds(1, |rng| {
            let pair = Pair::new(backend, slots);
            let predictors = WAYS.map(|way| Predictor::new(backend, way));
            let token = |rng: &mut Rng| Token { key: vector(rng, 2), value: vector(rng, 4) };
            let mut tokens: [Vec<Token>; ROWS] = Default::default();
            // More blocks than the fewer slots.
            while tokens[0].len() < PROMPT * BLOCK {
                let new: Vec<Vec<Token>> = (0..ROWS).map(|_| (0..BLOCK).map(|_| token(rng)).collect()).collect();
                tokens.iter_mut().zip(&new).for_each(|(tokens, new)| tokens.extend(new));
                let lens = tokens.each_ref().map(Vec::len);
                pair.step(&[VWD_DECODER_SPARSE; ROWS], &lens, &[BLOCK; ROWS], &new, None);
            }
            let mut q: Vec<Vec<Vector>> = (0..ROWS).map(|_| (0..HEADS).map(|_| vector(rng, 2)).collect()).collect();
            let (mut missed, mut floors) = ([0; WAYS.len()], [(PROMPT - 2) * BLOCK; ROWS]);
            let mut missed_on_cache = 0;
            for step in 0..steps {
                // Queries keep most of their channels.
                for q in q.iter_mut().flatten() {
                    let c = rng.size(0..=DIM - 1);
                    q[c] = rng.int(-2..=2) as f32;
                }
                let modes: Vec<u32> =
                    (0..ROWS).map(|_| if rng.one_in(6) { rng.size(0..=2) as u32 } else { 1 }).collect();
                let new: Vec<Vec<Token>> = (0..ROWS).map(|_| vec![token(rng)]).collect();
                for i in (0..ROWS).filter(|&i| modes[i] != VWD_DECODER_SKIP) {
                    // Some tokens are taken back now and then, as far as the cache has kept their blocks in the tail.
                    let tokens = &mut tokens[i];
                    let back =
                        if tokens.len() == MAX_BLOCKS * BLOCK || rng.one_in(6) { rng.size(1..=BLOCK) } else { 0 };
                    tokens.truncate(floors[i].max(tokens.len() - back));
                    tokens.push(new[i][0]);
                    floors[i] = floors[i].max((tokens.len().div_ceil(BLOCK) - 2) * BLOCK);
                }
                let lens = tokens.each_ref().map(Vec::len);
                let is_sparse = |i: usize| modes[i] == VWD_DECODER_SPARSE;
                let seen: Vec<i64> = (0..ROWS).map(|i| if is_sparse(i) { lens[i] as i64 } else { 0 }).collect();
                let seen = ints(backend, &seen);
                let predicted = predictors.each_ref().map(|predictor| predictor.predict(&seen));
                let found = pair.step(&modes, &lens, &[1; ROWS], &new, Some(&q));
                let of_rows: Vec<Vec<i64>> = (0..ROWS).map(|i| scores(&tokens[i], &q[i..=i])).collect();
                let of_rows = Array::from_fn(&[ROWS, 1, MAX_BLOCKS], |at| {
                    of_rows[at[0]].get(at[2]).map_or(f64::NAN, |&score| score as f64)
                });
                let of_rows = Tensor::floats(backend, F32, &of_rows, &Layout::default());
                predictors.iter().for_each(|predictor| predictor.update(&seen, &of_rows));
                // What the cache fetches for the next step.
                let ahead = predictors.each_ref().map(|predictor| predictor.predict(&seen));
                let about = |layer: usize, i: usize| {
                    let way = WAYS[layer - 1];
                    format!(
                        "step {step}, factors and ratio {way:?}, row {i} of {lens:?} tokens, modes {modes:?}, {slots} slots"
                    )
                };
                let (counted, listed) =
                    (pair.counts(|details| details.missed), pair.counts(|details| details.predicted));
                for layer in 1..LAYERS {
                    for i in 0..ROWS {
                        let predicted = &predicted[layer - 1][i];
                        let selected = if is_sparse(i) { list(&tokens[i], &q[i..=i], K) } else { vec![] };
                        let expected = selected.iter().filter(|block| !predicted.contains(block)).count() as u32;
                        missed[layer - 1] += expected;
                        let [on_cache, on_pages] = counted.each_ref().map(|counts| counts[layer * ROWS + i]);
                        assert_eq!(on_pages, expected, "missed on pages, {}", about(layer, i));
                        assert!(
                            !has_all || on_cache <= expected,
                            "missed on the cache: {on_cache}, by prediction {expected}; {}",
                            about(layer, i)
                        );
                        assert!(
                            on_cache <= selected.len() as u32,
                            "missed on the cache: {on_cache}; {}",
                            about(layer, i)
                        );
                        missed_on_cache += on_cache;
                        let lists = [&ahead[layer - 1][i], predicted].map(|list| list.len() as u32);
                        assert_eq!(
                            listed.each_ref().map(|counts| counts[layer * ROWS + i]),
                            lists,
                            "predicted, {}",
                            about(layer, i)
                        );
                    }
                    for side in [0, 1] {
                        let serial = &found[0][side];
                        for at in indices(&serial.shape) {
                            let at: [usize; 4] = at[..].try_into().unwrap();
                            let (x, y) = (found[layer][side][at], serial[at]);
                            // Sums have another order on CUDA.
                            let is_same = if backend.is_cuda() { (x - y).abs() < 2e-5 } else { x == y };
                            assert!(is_same, "{x} at {at:?}, serial {y}; {}", about(layer, at[0]));
                        }
                    }
                }
            }
            let [least, most] = [missed.iter().min(), missed.iter().max()];
            assert!(steps < 100 || (least > Some(&0) && least < most), "all ways are alike: {missed:?}");
            assert!(has_all || missed_on_cache > 0, "the cache missed nothing");
        });
    }
}
