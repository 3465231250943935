//! A decoder on a tiered cache, a layer for each strategy, against a dictionary of each sequence's tokens and plain formulas.
//!
//! Keys and queries are whole numbers, so that scores, and with them every list, are exact. The cache has the slots that ASYNC_TLS
//! takes, those of two lists, and no more, so that blocks come and go all the time. `VANWARD_DECODER_OPERATIONS` sets how many random operations are made, counted as in
//! model.rs.

use super::acceptance::{COST, Verdicts};
use super::model::operations;
use super::plain::{BLOCK, DIM, Part, SCALE, Token, Vector, attention, list};
use super::*;
use crate::support::trees::Masks;

pub const CASES: &[Case] = cases![decoder_on_a_cache_attends_what_each_strategy_promises,];

pub(super) const KV_HEADS: usize = 2;
pub(super) const HEADS: usize = 4;
const GROUP: usize = HEADS / KV_HEADS;
const MAX_BLOCKS: usize = 24;
const ROWS: usize = 3;
const NUMBERS: usize = 5;
const K: usize = 3;
/// ⌈1.25·K⌉
const AHEAD: usize = 4;

const SERIAL: usize = 0;
const BY_SCORES: usize = 1;
const FORESEEN: usize = 2;
const SPARDA: usize = 3;
const ASYNC_TLS: usize = 4;
/// SERIAL, and dense below `SHORT_OF` tokens.
const SHORT: usize = 5;
const DENSE: usize = 6;
pub(super) const LAYERS: usize = 7;
const SHORT_OF: usize = 40;

pub(super) fn policies() -> [vwd_decoder_policy; LAYERS] {
    let serial = vwd_decoder_policy { k: K as u32, ..POLICY };
    let vanward = vwd_decoder_policy { strategy: VWD_STRATEGY_VANWARD, ..serial };
    [
        serial,
        vanward,
        vwd_decoder_policy { predict: VWD_PREDICT_FORESEEN, ..vanward },
        vwd_decoder_policy { strategy: VWD_STRATEGY_SPARDA, ..serial },
        vwd_decoder_policy { strategy: VWD_STRATEGY_ASYNC_TLS, ..serial },
        vwd_decoder_policy { dense_below: SHORT_OF as u32, ..serial },
        vwd_decoder_policy { method: 0, k: 0, ..POLICY },
    ]
}

/// The slots that ASYNC_TLS takes for so many rows: the list of the step before, with the new token's block, and a selected one.
fn slots_of(rows: usize) -> u32 {
    (rows * KV_HEADS * (2 * K + 1)) as u32
}

pub(super) fn cache_options() -> vwd_kv_cache_options {
    vwd_kv_cache_options {
        layers: LAYERS as u32,
        kv_heads: KV_HEADS as u32,
        block_size: BLOCK as u32,
        key_dim: DIM as u32,
        value_dim: DIM as u32,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        max_sequences: NUMBERS as u32,
        max_blocks: MAX_BLOCKS as u32,
        host_blocks: (NUMBERS * MAX_BLOCKS) as u32,
        slots: slots_of(ROWS),
        ..args()
    }
}

pub(super) fn decoder_options(policies: &[vwd_decoder_policy]) -> vwd_decoder_options {
    vwd_decoder_options {
        layers: LAYERS as u32,
        max_rows: ROWS as u32,
        max_positions: BLOCK as u32,
        draft_cost: COST as f32,
        query_heads: HEADS as u32,
        kv_heads: KV_HEADS as u32,
        key_dim: DIM as u32,
        value_dim: DIM as u32,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        block_size: BLOCK as u32,
        scale: SCALE as f32,
        policy_count: LAYERS as u32,
        policies: policies.as_ptr(),
        ..args()
    }
}

pub struct Cache(pub *mut vwd_kv_cache);

impl Cache {
    pub fn create(backend: &Backend, options: &vwd_kv_cache_options) -> Cache {
        let mut cache = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_kv_cache_create(backend.session(), options, &mut cache) });
        Cache(cache)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: created once, and its calls have ended.
        unsafe { vwd_kv_cache_release(self.0) }
    }
}

/// What a cache and a decoder on it have in common.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub layers: usize,
    /// The heads of queries, and of keys and values.
    pub heads: [usize; 2],
    pub dims: [usize; 2],
    pub dtype: DType,
    pub block: usize,
}

impl Sizes {
    pub fn cache(&self) -> vwd_kv_cache_options {
        vwd_kv_cache_options {
            layers: self.layers as u32,
            kv_heads: self.heads[1] as u32,
            block_size: self.block as u32,
            key_dim: self.dims[0] as u32,
            value_dim: self.dims[1] as u32,
            dtype_code: self.dtype.code as u32,
            dtype_bits: self.dtype.bits as u32,
            ..args()
        }
    }

    /// With a policy for each layer.
    pub fn decoder(&self, policies: &[vwd_decoder_policy]) -> vwd_decoder_options {
        assert_eq!(policies.len(), self.layers);
        vwd_decoder_options {
            layers: self.layers as u32,
            max_positions: self.block as u32,
            query_heads: self.heads[0] as u32,
            kv_heads: self.heads[1] as u32,
            key_dim: self.dims[0] as u32,
            value_dim: self.dims[1] as u32,
            dtype_code: self.dtype.code as u32,
            dtype_bits: self.dtype.bits as u32,
            block_size: self.block as u32,
            scale: 0.1,
            policy_count: self.layers as u32,
            policies: policies.as_ptr(),
            ..args()
        }
    }
}

pub fn create_on(backend: &Backend, options: &vwd_decoder_options, cache: &Cache) -> Decoder {
    let mut decoder = std::ptr::null_mut();
    // SAFETY: the arguments are valid.
    assert_ok(unsafe { vwd_decoder_create_on_cache(backend.session(), options, cache.0, &mut decoder) });
    Decoder(decoder)
}

/// A sequence of the engine; `tokens` of each KV head.
#[derive(Clone)]
struct Sequence {
    number: u32,
    tokens: [Vec<Token>; KV_HEADS],
    /// Where the next append may begin at the earliest.
    floor: usize,
    /// Since it joined, was forked or truncated, it has had no step.
    is_new: bool,
    /// The root of a tree that was compacted since its last step.
    since: Option<usize>,
    /// What its last sparse step selected.
    past: [Vec<usize>; KV_HEADS],
}

impl Sequence {
    fn len(&self) -> usize {
        self.tokens[0].len()
    }
}

struct World<'b> {
    backend: &'b Backend,
    /// The most of a step.
    rows: usize,
    decoder: Decoder,
    // After the decoder, which keeps it alive in any case.
    cache: Cache,
    sequences: Vec<Sequence>,
    verdicts: Verdicts,
    operations: usize,
    /// Sums of the decoder's counts by layer: missed and repaired, and fetched.
    missed: [u64; LAYERS],
    fetched: [u64; LAYERS],
    /// Tokens of accepted nodes that moved.
    moved: usize,
}

/// [B, Q, heads, DIM]
pub(super) fn rows<'b>(backend: &'b Backend, extents: [usize; 3], data: Vec<f32>) -> Tensor<'b> {
    let [batch, positions, heads] = extents;
    let values = data.into_iter().map(|x| x as f64).collect();
    Tensor::floats(backend, F32, &Array::new(&[batch, positions, heads, DIM], values), &Layout::default())
}

fn random(rng: &mut Rng, most: i64) -> Vector {
    std::array::from_fn(|_| rng.int(-most..=most) as f32)
}

/// Why a step is made.
#[derive(Clone, Copy, PartialEq)]
enum Purpose {
    /// It writes tokens, and attends nothing.
    Prompt,
    Chains,
    /// The tokens of rows are chains, or the nodes of trees, whose paths are accepted after it.
    Any,
}

/// What a step's rows attend with: queries [B][Q][HEADS].
type Queries = Vec<Vec<Vec<Vector>>>;

fn queries(rng: &mut Rng, batch: usize, positions: usize) -> Queries {
    let head = |rng: &mut Rng| (0..HEADS).map(|_| random(rng, 2)).collect();
    (0..batch).map(|_| (0..positions).map(|_| head(rng)).collect()).collect()
}

fn flat(queries: &Queries) -> Vec<f32> {
    queries.iter().flatten().flatten().flatten().copied().collect()
}

impl<'b> World<'b> {
    fn new(backend: &'b Backend, rows: usize, hold: u32) -> World<'b> {
        let cache = Cache::create(backend, &vwd_kv_cache_options { hold, slots: slots_of(rows), ..cache_options() });
        let of_policies = policies();
        let options = vwd_decoder_options { max_rows: rows as u32, ..decoder_options(&of_policies) };
        let decoder = create_on(backend, &options, &cache);
        let verdicts = Verdicts::new(NUMBERS, BLOCK - 1);
        let [missed, fetched] = [[0; LAYERS]; 2];
        World { backend, rows, decoder, cache, sequences: vec![], verdicts, operations: 0, missed, fetched, moved: 0 }
    }

    fn reset(&mut self, number: u32) {
        self.verdicts.forget(number as usize);
        let sequences = ints(self.backend, &[number as i64]);
        let args = vwd_decoder_reset_args { sequences: sequences.c(), ..args() };
        // SAFETY: the arguments are valid.
        self.backend.finish(unsafe { vwd_decoder_reset(self.decoder.0, &args, self.backend.stream()) });
    }

    fn extend(&self, number: u32, tokens: usize) {
        // SAFETY: the cache lives.
        assert_ok(unsafe { vwd_kv_cache_extend(self.cache.0, number, tokens as u64, self.backend.stream()) });
    }

    fn join(&mut self, rng: &mut Rng) {
        let mut number = u32::MAX;
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_kv_cache_add(self.cache.0, &mut number, self.backend.stream()) });
        self.reset(number);
        let tokens = [(); KV_HEADS].map(|()| vec![]);
        self.sequences.push(Sequence { number, tokens, floor: 0, is_new: true, since: None, past: Default::default() });
        let (row, len) = (self.sequences.len() - 1, rng.size(1..=MAX_BLOCKS * BLOCK - 20));
        // The prompt, up to a block at a time.
        for first in (0..len).step_by(BLOCK) {
            let (modes, counts) = ([rng.pick(&[VWD_DECODER_SPARSE, VWD_DECODER_DENSE])], [(len - first).min(BLOCK)]);
            let part = Part { rows: &[row], modes: &modes, counts: &counts, positions: BLOCK };
            self.step(rng, &part, Purpose::Prompt);
        }
    }

    fn leave(&mut self, sequence: usize) {
        let Sequence { number, .. } = self.sequences.remove(sequence);
        // SAFETY: the cache lives.
        assert_ok(unsafe { vwd_kv_cache_free(self.cache.0, number, self.backend.stream()) });
    }

    /// Summarises the tokens that a compaction moved: a step without tokens.
    fn settle(&mut self, sequence: usize) {
        let s = &mut self.sequences[sequence];
        let Some(since) = s.since.take() else { return };
        let (backend, one) = (self.backend, |n: i64| ints(self.backend, &[n]));
        let [numbers, lens, none, begin] = [s.number as i64, s.len() as i64, 0, since as i64].map(one);
        let step = vwd_decoder_step {
            seq_lens: lens.c(),
            q_lens: none.c(),
            begin: begin.c(),
            sequences: numbers.c(),
            ..args()
        };
        self.decoder.begin(backend, &step);
        for layer in 0..LAYERS as u32 {
            self.decoder.attend(backend, &vwd_decoder_attend_args { layer, ..args() });
        }
    }

    fn fork(&mut self, rng: &mut Rng, parent: usize) {
        self.settle(parent);
        let Sequence { number, tokens, .. } = self.sequences[parent].clone();
        let len = rng.size(1..=tokens[0].len());
        let mut child = u32::MAX;
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_kv_cache_fork(self.cache.0, number, len as u64, &mut child, self.backend.stream()) });
        self.reset(child);
        // The parent writes to shared blocks no more.
        self.sequences[parent].floor = self.sequences[parent].floor.max(len);
        let (tokens, past) = (tokens.map(|tokens| tokens[..len].to_vec()), Default::default());
        self.sequences.push(Sequence { number: child, tokens, floor: len, is_new: true, since: None, past });
    }

    fn roll_back(&mut self, rng: &mut Rng, sequence: usize) {
        let to = self.sequences[sequence].len().saturating_sub(rng.size(1..=20)).max(1);
        self.cut(rng, sequence, to);
    }

    /// The last tokens are taken back: by the next append, or by a truncation.
    fn cut(&mut self, rng: &mut Rng, sequence: usize, to: usize) {
        let s = &mut self.sequences[sequence];
        let by_append = to >= s.floor && !s.is_new && rng.one_in(2);
        if !by_append {
            self.settle(sequence);
            let s = &mut self.sequences[sequence];
            // SAFETY: the cache lives.
            assert_ok(unsafe { vwd_kv_cache_truncate(self.cache.0, s.number, to as u64, self.backend.stream()) });
            (s.floor, s.is_new) = (to, true);
        }
        let s = &mut self.sequences[sequence];
        s.tokens.iter_mut().for_each(|tokens| tokens.truncate(to));
    }

    /// Accepts a path of each row's tree, from the root to any node: the tokens of the other nodes go. Or none, and all stay where they are.
    fn accept(&mut self, rng: &mut Rng, taken: &[usize], before: &[usize], counts: &[usize], masks: &Masks) {
        let (backend, batch, places) = (self.backend, taken.len(), BLOCK);
        let paths: Vec<&[usize]> = (0..batch)
            .map(|i| if counts[i] == 0 || rng.one_in(8) { &[] } else { masks.path(i, rng.size(0..=counts[i] - 1)) })
            .collect();
        // Where a path ends, it says itself, or the number of accepted nodes.
        let by_count: Vec<bool> = paths.iter().map(|path| !path.is_empty() && rng.one_in(2)).collect();
        let accepted: Vec<i64> =
            (0..batch).map(|i| if by_count[i] { paths[i].len() as i64 - 1 } else { places as i64 - 1 }).collect();
        let node = |at: &[usize]| match paths[at[0]].get(at[1]) {
            Some(&node) => node as i64,
            None if by_count[at[0]] => BLOCK as i64 + at[1] as i64,
            None => -1,
        };
        let path = Array::from_fn(&[batch, places], node);
        let path = Tensor::ints(backend, I32, &path, &Layout::random(rng, 2));
        let numbers = ints(backend, &taken.iter().map(|&n| self.sequences[n].number as i64).collect::<Vec<_>>());
        let bases = Array::new(&[batch], before.iter().map(|&base| base as i64).collect());
        let bases = Tensor::ints(backend, rng.pick(&[I32, I64]), &bases, &Layout::default());
        let accepted = ints(backend, &accepted);
        let compact = vwd_kv_cache_compact_args {
            sequences: numbers.c(),
            bases: bases.c(),
            path: path.c(),
            accepted: accepted.c(),
            ..args()
        };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_kv_cache_compact(self.cache.0, &compact, backend.stream()) });
        for (i, &n) in taken.iter().enumerate().filter(|&(i, _)| !paths[i].is_empty()) {
            let s = &mut self.sequences[n];
            for tokens in &mut s.tokens {
                let kept: Vec<Token> = paths[i].iter().map(|node| tokens[before[i] + node]).collect();
                tokens.truncate(before[i]);
                tokens.extend(kept);
            }
            s.since = Some(before[i]);
            self.moved += paths[i].iter().enumerate().filter(|&(j, &node)| j != node).count();
        }
    }

    /// Some sequences draft, by sparse steps of a position each or without the decoder. A dense step verifies, which writes other keys and values
    /// than the drafting steps did, and what is rejected is taken back.
    fn round(&mut self, rng: &mut Rng, taken: &[usize]) {
        let gammas: Vec<usize> = taken.iter().map(|_| rng.size(0..=BLOCK - 1)).collect();
        let own: Vec<bool> = taken.iter().map(|_| !rng.one_in(3)).collect();
        let before: Vec<usize> = taken.iter().map(|&n| self.sequences[n].len()).collect();
        let drafts = (0..taken.len()).filter(|&i| own[i]).map(|i| gammas[i]).max().unwrap_or(0);
        for n in 0..drafts {
            let is_drafting = |i: usize| own[i] && n < gammas[i];
            let modes: Vec<u32> =
                (0..taken.len()).map(|i| if is_drafting(i) { VWD_DECODER_SPARSE } else { VWD_DECODER_SKIP }).collect();
            let part = Part { rows: taken, modes: &modes, counts: &vec![1; taken.len()], positions: 1 };
            self.step(rng, &part, Purpose::Chains);
        }
        for (&n, &len) in taken.iter().zip(&before) {
            self.sequences[n].tokens.iter_mut().for_each(|tokens| tokens.truncate(len));
        }
        let counts: Vec<usize> = gammas.iter().map(|gamma| gamma + 1).collect();
        let positions = rng.pick(&[BLOCK, *counts.iter().max().expect("a row")]);
        let part = Part { rows: taken, modes: &vec![VWD_DECODER_DENSE; taken.len()], counts: &counts, positions };
        self.step(rng, &part, Purpose::Chains);
        let numbers: Vec<usize> = taken.iter().map(|&n| self.sequences[n].number as usize).collect();
        let accepted = self.verdicts.accept(self.backend, rng, &self.decoder, &numbers, &gammas);
        for (i, &n) in taken.iter().enumerate().filter(|&(i, _)| accepted[i] < gammas[i]) {
            self.cut(rng, n, before[i] + accepted[i] + 1);
        }
        self.operations += taken.len();
    }

    /// Those of a step with several positions may be the nodes of trees.
    fn step(&mut self, rng: &mut Rng, part: &Part, purpose: Purpose) {
        let &Part { rows: taken, modes, positions, .. } = part;
        let (backend, batch, attends) = (self.backend, taken.len(), purpose != Purpose::Prompt);
        // One mode for all rows saves launches.
        let is_one = modes[0] != VWD_DECODER_SKIP && modes.iter().all(|&mode| mode == modes[0]) && rng.one_in(2);
        let q = queries(rng, batch, positions);
        let is_foreseen = !rng.one_in(5);
        let guess = if rng.one_in(3) { queries(rng, batch, positions) } else { q.clone() };
        let new: Vec<Token> =
            (0..batch * positions * KV_HEADS).map(|_| Token { key: random(rng, 2), value: random(rng, 4) }).collect();
        let has_trees = positions > 1 && purpose == Purpose::Any && rng.one_in(2);
        let masks = has_trees.then(|| Masks::random(rng, batch, positions));
        let q_lens = ints(backend, &part.counts.iter().map(|&n| n as i64).collect::<Vec<_>>());
        let counts: Vec<usize> = (0..batch).map(|i| part.count(i)).collect();
        let (mut before, mut lens, mut is_new, mut since) = (vec![], vec![], vec![], vec![]);
        for (i, &sequence) in taken.iter().enumerate() {
            let s = &self.sequences[sequence];
            let count = counts[i];
            before.push(s.len());
            is_new.push(s.is_new);
            since.push(s.since);
            lens.push(s.len() + count);
            self.extend(s.number, s.len() + count);
            let s = &mut self.sequences[sequence];
            for (n, token) in new[i * positions * KV_HEADS..].iter().take(count * KV_HEADS).enumerate() {
                s.tokens[n % KV_HEADS].push(*token);
            }
            // The two newest blocks may be written again.
            s.floor = s.floor.max((s.len().div_ceil(BLOCK).max(2) - 2) * BLOCK);
            s.is_new &= !attends || count == 0;
            s.since = s.since.filter(|_| count == 0);
        }
        let has_begin = attends && (!rng.one_in(3) || since.iter().any(Option::is_some));
        let numbers = ints(backend, &taken.iter().map(|&n| self.sequences[n].number as i64).collect::<Vec<_>>());
        let seq_lens = ints(backend, &lens.iter().map(|&n| n as i64).collect::<Vec<_>>());
        let mode_tensor = ints(backend, &modes.iter().map(|&mode| mode as i64).collect::<Vec<_>>());
        // Where a row is skipped, or has no tokens, the next step summarises again what moved.
        let begins: Vec<i64> = (0..batch)
            .map(|i| {
                let of_new = if is_new[i] { before[i] as i64 - 1 } else { i32::MAX as i64 };
                since[i].map_or(of_new, |since| of_new.min(since as i64))
            })
            .collect();
        let begin = ints(backend, &begins);
        let mut step = vwd_decoder_step {
            positions: positions as u32,
            seq_lens: seq_lens.c(),
            q_lens: q_lens.c(),
            modes: mode_tensor.c(),
            sequences: numbers.c(),
            ..args()
        };
        if has_begin {
            step.begin = begin.c();
        }
        let words = masks.as_ref().map(|masks| masks.place(backend, rng));
        if let Some(words) = &words {
            step.tree = words.c();
        }
        if is_one {
            (step.mode, step.modes) = (modes[0], absent());
        }
        let of = |part: fn(&Token) -> Vector| new.iter().flat_map(part).collect::<Vec<f32>>();
        let new_k = rows(backend, [batch, positions, KV_HEADS], of(|token| token.key));
        let new_v = rows(backend, [batch, positions, KV_HEADS], of(|token| token.value));
        let [q_tensor, guess_tensor] = [&q, &guess].map(|of| rows(backend, [batch, positions, HEADS], flat(of)));
        let outs =
            [(); LAYERS].map(|()| Tensor::poisoned(backend, F32, &[batch, positions, HEADS, DIM], &Layout::default()));
        let foresee = |layer: usize| {
            if !attends || !is_foreseen || layer >= LAYERS || positions > 1 {
                return;
            }
            let q = super::strategies::without_positions(&guess_tensor);
            let args = vwd_decoder_foresee_args { layer: layer as u32, q, ..args() };
            // SAFETY: the arguments are valid.
            assert_ok(unsafe { vwd_decoder_foresee(self.decoder.0, std::ptr::null(), &args, backend.stream()) });
        };
        // SAFETY: the arguments are valid. Nothing waits before the step's end: copies have their own pace.
        unsafe {
            assert_ok(vwd_decoder_begin(self.decoder.0, &step, backend.stream()));
            foresee(0);
            for (layer, out) in outs.iter().enumerate() {
                foresee(layer + 1);
                let mut attend =
                    vwd_decoder_attend_args { layer: layer as u32, new_k: new_k.c(), new_v: new_v.c(), ..args() };
                if attends {
                    (attend.q, attend.out) = (q_tensor.c(), out.c());
                }
                let mut bytes = 0;
                assert_ok(vwd_decoder_attend_scratch(self.decoder.0, &attend, &mut bytes));
                assert_ok(vwd_session_reserve(backend.session().cast_mut(), backend.stream(), bytes));
                assert_ok(vwd_decoder_attend(self.decoder.0, &attend, backend.stream()));
            }
            backend.finish(VWD_OK);
        }
        if !attends {
            return;
        }
        self.count(batch);
        let found = outs.each_ref().map(Tensor::read_floats);
        let about = |layer: usize, i: usize| {
            format!(
                "layer {layer}, row {i} of {batch}: modes {modes:?}, {counts:?} of {lens:?} tokens, new {is_new:?}, \
                 begin {has_begin}, foreseen {is_foreseen}"
            )
        };
        // A step of several positions is SERIAL in every layer.
        let serial = if positions > 1 { &[BY_SCORES, FORESEEN, SPARDA, ASYNC_TLS][..] } else { &[BY_SCORES, FORESEEN] };
        let is_dense = |layer: usize, i: usize| {
            modes[i] == VWD_DECODER_DENSE || layer == DENSE || (layer == SHORT && lens[i] < SHORT_OF)
        };
        for &layer in serial {
            for at in indices(&found[SERIAL].shape) {
                let at: [usize; 4] = at[..].try_into().unwrap();
                let (x, y) = (found[layer][at], found[SERIAL][at]);
                // Sums have another order on CUDA.
                let is_same = if backend.is_cuda() { (x - y).abs() < 2e-5 } else { x == y };
                assert!(is_same, "{}: {x} at {at:?}, serial {y}", about(layer, at[0]));
            }
        }
        for (i, &sequence) in taken.iter().enumerate() {
            let is_taken = modes[i] != VWD_DECODER_SKIP && counts[i] > 0;
            let mut chosen: [Vec<usize>; KV_HEADS] = Default::default();
            for g in 0..KV_HEADS {
                let s = &self.sequences[sequence];
                let tokens = &s.tokens[g];
                let of_head = |queries: &Queries, count: usize| -> Vec<Vec<Vector>> {
                    queries[i][..count].iter().map(|q| q[g * GROUP..][..GROUP].to_vec()).collect()
                };
                let selected = if is_taken { list(tokens, &of_head(&q, counts[i]), K) } else { vec![] };
                let starts = has_begin && begins[i] < before[i] as i64;
                let own = before[i] / BLOCK;
                let lists = |layer: usize| match layer {
                    _ if !is_taken => vec![],
                    _ if is_dense(layer, i) => (0..lens[i].div_ceil(BLOCK)).collect(),
                    SPARDA if positions == 1 && is_foreseen && !starts => {
                        let mut blocks = list(&tokens[..before[i]], &of_head(&guess, 1), AHEAD);
                        blocks.extend(Some(own).filter(|block| !blocks.contains(block)));
                        blocks
                    }
                    ASYNC_TLS if positions == 1 && !starts => {
                        let past = if s.past[g].is_empty() { vec![0] } else { s.past[g].clone() };
                        past.into_iter().filter(|&block| block < own).chain([own]).collect()
                    }
                    _ => selected.clone(),
                };
                for layer in [SERIAL, SPARDA, ASYNC_TLS, SHORT, DENSE] {
                    let blocks = lists(layer);
                    for r in 0..positions {
                        let seen: Vec<(usize, Token)> = match &masks {
                            _ if !is_taken || r >= counts[i] => vec![],
                            None => tokens[..before[i] + r + 1].iter().copied().enumerate().collect(),
                            Some(masks) => {
                                let nodes = masks.path(i, r).iter().map(|node| before[i] + node);
                                (0..before[i]).chain(nodes).map(|t| (t, tokens[t])).collect()
                            }
                        };
                        for h in g * GROUP..(g + 1) * GROUP {
                            let expected = match seen.is_empty() {
                                true => [0.0; DIM],
                                false => {
                                    let in_list = |t: &usize| blocks.contains(&(t / BLOCK));
                                    let listed = seen.iter().filter(|(t, _)| in_list(t)).map(|&(_, token)| token);
                                    let listed: Vec<Token> = listed.collect();
                                    attention(&listed, 0..listed.len().div_ceil(BLOCK), &q[i][r][h])
                                }
                            };
                            for (c, expected) in expected.into_iter().enumerate() {
                                let x = found[layer][[i, r, h, c]];
                                // float32 of values up to 4.
                                assert!(
                                    (x - expected).abs() < 2e-5,
                                    "{}, position {r}, head {h}, blocks {blocks:?}: {x}, expected {expected}",
                                    about(layer, i)
                                );
                            }
                        }
                    }
                }
                chosen[g] = selected;
            }
            if is_taken && modes[i] == VWD_DECODER_SPARSE {
                self.sequences[sequence].past = chosen;
            }
        }
        self.operations += batch * LAYERS;
        if let Some(masks) = &masks {
            self.accept(rng, taken, &before, &counts, masks);
        }
    }

    /// Adds up the decoder's counts.
    fn count(&mut self, batch: usize) {
        let details = self.decoder.details();
        for (t, sums) in [(details.missed, &mut self.missed), (details.fetched, &mut self.fetched)] {
            assert_eq!(t.shape[..3], [LAYERS as i64, self.rows as i64, KV_HEADS as i64]);
            let mut bytes = vec![0; LAYERS * self.rows * KV_HEADS * 4];
            self.backend.read(t.data as usize, &mut bytes);
            for (layer, of_layer) in bytes.chunks(self.rows * KV_HEADS * 4).enumerate() {
                let words = of_layer.chunks(4).take(batch * KV_HEADS);
                sums[layer] += words.map(|word| u32::from_le_bytes(word.try_into().unwrap()) as u64).sum::<u64>();
            }
        }
    }

    fn operate(&mut self, rng: &mut Rng) {
        self.operations += 1;
        let count = self.sequences.len();
        match rng.size(0..=19) {
            0 if count > 1 => self.leave(rng.size(0..=count - 1)),
            1 | 2 if count > 0 && count < NUMBERS => {
                let parent = rng.size(0..=count - 1);
                self.fork(rng, parent)
            }
            3 | 4 if count > 0 => {
                let sequence = rng.size(0..=count - 1);
                self.roll_back(rng, sequence)
            }
            5 if count < NUMBERS => self.join(rng),
            _ if count == 0 => self.join(rng),
            which => {
                let mut taken: Vec<usize> = (0..count).collect();
                rng.shuffle(&mut taken);
                taken.truncate(rng.size(1..=self.rows));
                let positions = if which == 6 || rng.one_in(4) { rng.pick(&[3, BLOCK]) } else { 1 };
                let room = if which == 6 { BLOCK } else { positions };
                taken.retain(|&n| self.sequences[n].len() + room <= MAX_BLOCKS * BLOCK);
                if taken.is_empty() {
                    return self.leave(0);
                }
                if which == 6 {
                    return self.round(rng, &taken);
                }
                let mode = |rng: &mut Rng| match rng.size(0..=15) {
                    0 | 1 => VWD_DECODER_SKIP,
                    2..=5 => VWD_DECODER_DENSE,
                    _ => VWD_DECODER_SPARSE,
                };
                let modes: Vec<u32> = taken.iter().map(|_| mode(rng)).collect();
                let is_one = rng.one_in(6);
                let modes = if is_one { vec![modes[0].max(VWD_DECODER_SPARSE); taken.len()] } else { modes };
                let counts: Vec<usize> = taken.iter().map(|_| rng.size(positions.min(2) - 1..=positions)).collect();
                let counts = if positions == 1 { vec![1; taken.len()] } else { counts };
                self.step(rng, &Part { rows: &taken, modes: &modes, counts: &counts, positions }, Purpose::Any);
            }
        }
    }
}

fn decoder_on_a_cache_attends_what_each_strategy_promises(backend: &Backend) {
    const ROUNDS: usize = 2;
    // Sequences need some steps until their blocks have left the tails and the slots.
    let wanted = operations(ROUNDS * backend.times(40_000).max(1200)) / ROUNDS;
    rounds(ROUNDS as u64, |rng| {
        // A step of one row has all slots in use. The cache's own hold counts for resolves of the engine's alone.
        let mut world = World::new(backend, rng.pick(&[1, ROWS]), rng.pick(&[1, 2, 3]));
        // More blocks than slots: those that leave a tail have slots at first.
        (1..NUMBERS).for_each(|_| world.join(rng));
        while world.operations < wanted {
            world.operate(rng);
        }
        let World { missed, fetched, moved, .. } = &world;
        assert!(*moved > 0 || world.rows == 1, "no token of a tree moved");
        assert!(fetched[..DENSE].iter().all(|&n| n > 0), "a layer fetched nothing: {fetched:?}");
        assert!(missed[BY_SCORES] > 0 && missed[FORESEEN] > 0, "nothing was repaired: {missed:?}");
        assert!(missed[SERIAL] + missed[SPARDA] + missed[ASYNC_TLS] == 0, "repaired without repair: {missed:?}");
    });
}
