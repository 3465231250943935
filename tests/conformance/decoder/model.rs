//! A decoder of five layers, one for each way to attend, against a dictionary of each sequence's tokens and plain formulas.
//!
//! Keys and queries are whole numbers, so that scores, and with them every list, are exact.
//!
//! 100,000 random operations are made, or as many as `VANWARD_DECODER_OPERATIONS` says; a million take half a minute where the library is
//! optimised. What is drawn counts as one: a join, a leave, a fork, a rollback, a step, or a round of drafts. Each row of a step, those of a round's
//! steps among them, counts as one more in each of the five layers, and each row whose drafts are verified as one more. So a step of three rows
//! is 16 operations, and most of a run's operations are a row's attention in a layer, which is compared with the formulas or with the serial layer.

use super::acceptance::{COST, Verdicts};
use super::*;
use std::collections::HashMap;
use vanward::capi::*;

pub const ON_THE_CPU: &[Case] = cases![decoder_holds_to_a_dictionary_after_many_operations];

const HEADS: usize = 2;
pub const DIM: usize = 16;
pub const BLOCK: usize = 8;
const MAX_PAGES: usize = 16;
const PAGES: usize = 100;
const ROWS: usize = 4;
const NUMBERS: usize = 6;
const K: usize = 4;
/// ⌈1.25·K⌉
const AHEAD: usize = 5;
/// γ + 1: verified drafts reach into three blocks.
const POSITIONS: usize = 11;
pub const SCALE: f64 = 0.25;

const SERIAL: usize = 0;
const BY_SCORES: usize = 1;
const PRR_FORESEEN: usize = 2;
const FORESEEN: usize = 3;
const DENSE: usize = 4;
const LAYERS: usize = 5;

pub type Vector = [f32; DIM];

#[derive(Clone, Copy)]
pub struct Token {
    pub key: Vector,
    pub value: Vector,
}

/// The engine's side of a sequence.
#[derive(Clone)]
struct Sequence {
    number: usize,
    pages: Vec<usize>,
    /// Tokens that the engine wrote itself and the decoder has not summarised.
    is_new: bool,
}

struct World<'b> {
    backend: &'b Backend,
    rng: Rng,
    decoder: Decoder,
    /// [PAGES, BLOCK, 1, DIM] of each layer.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    users: Vec<usize>,
    sequences: Vec<Sequence>,
    /// What every sequence holds, by its number.
    dictionary: HashMap<usize, Vec<Token>>,
    verdicts: Verdicts,
    operations: usize,
}

/// The rows of a step, their modes, and as many tokens of each as `counts` says.
pub struct Part<'a> {
    pub rows: &'a [usize],
    pub modes: &'a [u32],
    pub counts: &'a [usize],
    pub positions: usize,
}

impl Part<'_> {
    /// The tokens that a row writes in the step.
    pub fn count(&self, i: usize) -> usize {
        if self.modes[i] == VWD_DECODER_SKIP { 0 } else { self.counts[i] }
    }
}

fn tensor<T>(data: &[T], code: u8, extents: &[usize]) -> vwd_tensor {
    let (mut shape, mut strides, mut step) = ([0; 5], [0; 5], 1);
    for d in (0..extents.len()).rev() {
        (shape[d], strides[d]) = (extents[d] as i64, step);
        step *= extents[d] as i64;
    }
    vwd_tensor {
        data: data.as_ptr().cast_mut().cast(),
        device_type: 1,
        dtype_code: code,
        dtype_bits: 32,
        lanes: 1,
        ndim: extents.len() as i32,
        shape,
        strides,
        ..absent()
    }
}

fn numbers(data: &[i32]) -> vwd_tensor {
    tensor(data, 0, &[data.len()])
}

fn floats(data: &[f32], extents: &[usize]) -> vwd_tensor {
    tensor(data, 2, extents)
}

fn dot(a: &Vector, b: &Vector) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b) as f64).sum()
}

/// The scores of blocks: the largest product that a key of the block could have. `queries` are those of the last tokens; each scores the blocks
/// that do not begin after it, and the best score of a block counts.
pub fn scores(tokens: &[Token], queries: &[Vec<Vector>]) -> Vec<i64> {
    let largest = |keys: &[Token], q: &Vector| -> i64 {
        let of_channel = |c: usize| {
            let keys = || keys.iter().map(|token| token.key[c]);
            let (most, least) = (keys().fold(f32::MIN, f32::max), keys().fold(f32::MAX, f32::min));
            (q[c].max(0.0) * most + q[c].min(0.0) * least) as i64
        };
        (0..DIM).map(of_channel).sum()
    };
    let first = tokens.len() - queries.len();
    let of_block = |(block, keys): (usize, &[Token])| {
        let seen = queries.iter().enumerate().filter(|(r, _)| block * BLOCK <= first + r);
        seen.map(|(_, queries)| queries.iter().map(|q| largest(keys, q)).sum()).max().expect("a query")
    };
    tokens.chunks(BLOCK).enumerate().map(of_block).collect()
}

/// The blocks of a list: the first, the last, and those of the others with the best scores.
pub fn list(tokens: &[Token], queries: &[Vec<Vector>], k: usize) -> Vec<usize> {
    let last = tokens.len().div_ceil(BLOCK) - 1;
    let scores = scores(tokens, queries).into_iter().zip(0..);
    let mut others: Vec<(i64, usize)> = scores.filter(|&(_, block)| block != 0 && block != last).collect();
    others.sort_by_key(|&(score, block)| (-score, block));
    let forced = if last == 0 { vec![0] } else { vec![0, last] };
    let mut blocks: Vec<usize> = others.iter().map(|&(_, block)| block).take(k - forced.len()).chain(forced).collect();
    blocks.sort_unstable();
    blocks
}

/// Attention over those of the tokens that lie in some blocks.
pub fn attention(tokens: &[Token], blocks: impl Iterator<Item = usize>, q: &Vector) -> [f64; DIM] {
    let (mut sum, mut out) = (0.0, [0.0; DIM]);
    for token in blocks.flat_map(|block| tokens.iter().skip(block * BLOCK).take(BLOCK)) {
        let weight = (SCALE * dot(q, &token.key)).exp();
        sum += weight;
        out.iter_mut().zip(token.value).for_each(|(out, value)| *out += weight * value as f64);
    }
    out.map(|x| x / sum)
}

impl<'b> World<'b> {
    fn new(backend: &'b Backend, seed: u64) -> World<'b> {
        let exact = vwd_decoder_policy { k: K as u32, ..POLICY };
        let policies = [
            exact,
            vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, ..exact },
            vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, predict: VWD_PREDICT_FORESEEN, ..exact },
            vwd_decoder_policy { strategy: VWD_STRATEGY_FORESEEN, ..exact },
            vwd_decoder_policy { method: 0, k: 0, ..POLICY },
        ];
        let options = vwd_decoder_options {
            layers: LAYERS as u32,
            max_rows: ROWS as u32,
            max_positions: POSITIONS as u32,
            draft_cost: COST as f32,
            max_sequences: NUMBERS as u32,
            query_heads: HEADS as u32,
            kv_heads: 1,
            key_dim: DIM as u32,
            value_dim: DIM as u32,
            dtype_code: F32.code as u32,
            dtype_bits: F32.bits as u32,
            page_size: BLOCK as u32,
            pages: PAGES as u32,
            block_size: BLOCK as u32,
            scale: SCALE as f32,
            max_tokens: (MAX_PAGES * BLOCK) as u32,
            policy_count: LAYERS as u32,
            policies: policies.as_ptr(),
            ..args()
        };
        let cache = || vec![vec![f32::NAN; PAGES * BLOCK * DIM]; LAYERS];
        World {
            backend,
            rng: Rng::new(seed),
            decoder: Decoder::create(backend, &options),
            keys: cache(),
            values: cache(),
            users: vec![0; PAGES],
            sequences: vec![],
            dictionary: HashMap::new(),
            verdicts: Verdicts::new(NUMBERS, POSITIONS - 1),
            operations: 0,
        }
    }

    fn vector(&mut self, most: i64) -> Vector {
        std::array::from_fn(|_| self.rng.int(-most..=most) as f32)
    }

    fn token(&mut self) -> Token {
        Token { key: self.vector(2), value: self.vector(4) }
    }

    fn len(&self, sequence: usize) -> usize {
        self.dictionary[&self.sequences[sequence].number].len()
    }

    /// Writes a token where it lies in every layer.
    fn write(&mut self, page: usize, row: usize, token: &Token) {
        let at = (page * BLOCK + row) * DIM;
        for layer in 0..LAYERS {
            self.keys[layer][at..at + DIM].copy_from_slice(&token.key);
            self.values[layer][at..at + DIM].copy_from_slice(&token.value);
        }
    }

    /// Pages for so many tokens of a sequence; whether there were enough.
    fn grow(&mut self, sequence: usize, len: usize) -> bool {
        while self.sequences[sequence].pages.len() * BLOCK < len {
            let Some(free) = self.users.iter().position(|&users| users == 0) else { return false };
            self.users[free] = 1;
            self.sequences[sequence].pages.push(free);
        }
        len <= MAX_PAGES * BLOCK
    }

    fn free_number(&self) -> usize {
        (0..NUMBERS).find(|number| !self.dictionary.contains_key(number)).expect("a free number")
    }

    fn reset(&mut self, number: usize) {
        self.verdicts.forget(number);
        let number = [number as i32];
        let args = vwd_decoder_reset_args { sequences: numbers(&number), ..args() };
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_reset(self.decoder.0, &args, std::ptr::null_mut()) });
    }

    fn join(&mut self) {
        let (number, len) = (self.free_number(), self.rng.size(1..=100));
        self.sequences.push(Sequence { number, pages: vec![], is_new: true });
        self.dictionary.insert(number, vec![]);
        let sequence = self.sequences.len() - 1;
        assert!(self.grow(sequence, len), "there are pages for all sequences");
        for t in 0..len {
            let token = self.token();
            self.write(self.sequences[sequence].pages[t / BLOCK], t % BLOCK, &token);
            self.dictionary.get_mut(&number).unwrap().push(token);
        }
        self.reset(number);
    }

    fn leave(&mut self, sequence: usize) {
        let Sequence { number, pages, .. } = self.sequences.remove(sequence);
        pages.into_iter().for_each(|page| self.users[page] -= 1);
        self.dictionary.remove(&number);
    }

    /// Shares whole pages; the last one is copied.
    fn fork(&mut self, parent: usize) {
        let Sequence { number, pages, is_new } = self.sequences[parent].clone();
        if is_new {
            return;
        }
        let (tokens, child) = (self.dictionary[&number].clone(), self.free_number());
        let whole = tokens.len() / BLOCK;
        pages[..whole].iter().for_each(|&page| self.users[page] += 1);
        self.sequences.push(Sequence { number: child, pages: pages[..whole].to_vec(), is_new: false });
        let sequence = self.sequences.len() - 1;
        assert!(self.grow(sequence, tokens.len()), "there are pages for all sequences");
        for (t, token) in tokens.iter().enumerate().skip(whole * BLOCK) {
            self.write(self.sequences[sequence].pages[whole], t % BLOCK, token);
        }
        self.dictionary.insert(child, tokens);
        self.reset(child);
    }

    fn roll_back(&mut self, sequence: usize) {
        let Sequence { number, pages, is_new } = &self.sequences[sequence];
        if *is_new {
            return;
        }
        let shared = pages.iter().filter(|&&page| self.users[page] > 1).count() * BLOCK;
        let (len, back) = (self.dictionary[number].len(), self.rng.size(1..=20));
        self.dictionary.get_mut(number).unwrap().truncate((len.saturating_sub(back)).max(shared).max(1).min(len));
    }

    /// Some rows that have room for so many tokens; without any a sequence leaves.
    fn some_rows(&mut self, tokens: usize) -> Vec<usize> {
        let mut rows: Vec<usize> = (0..self.sequences.len()).collect();
        self.rng.shuffle(&mut rows);
        rows.truncate(self.rng.size(1..=ROWS));
        rows.retain(|&sequence| self.len(sequence) + tokens <= MAX_PAGES * BLOCK);
        if rows.is_empty() {
            self.leave(0);
        }
        rows
    }

    /// Steps of one position or of several. Rows of the latter have any number of tokens.
    fn step(&mut self) {
        let positions = if self.rng.one_in(4) { self.rng.size(2..=POSITIONS) } else { 1 };
        let rows = self.some_rows(positions);
        let rng = &mut self.rng;
        let mode = |rng: &mut Rng| if rng.one_in(5) { rng.size(0..=2) as u32 } else { VWD_DECODER_SPARSE };
        let modes: Vec<u32> = rows.iter().map(|_| mode(rng)).collect();
        let least = if rng.one_in(8) { 0 } else { 1 };
        let counts: Vec<usize> = rows.iter().map(|_| rng.size(least..=positions)).collect();
        self.take(&Part { rows: &rows, modes: &modes, counts: &counts, positions });
    }

    /// Some sequences draft, by sparse steps of a position each or without the decoder. A dense step verifies, which writes other keys and values
    /// than the drafting steps did, and what is rejected is taken back.
    fn round(&mut self) {
        let rows = self.some_rows(POSITIONS);
        let gammas: Vec<usize> = rows.iter().map(|_| self.rng.size(0..=POSITIONS - 1)).collect();
        let own: Vec<bool> = rows.iter().map(|_| !self.rng.one_in(3)).collect();
        let before: Vec<usize> = rows.iter().map(|&sequence| self.len(sequence)).collect();
        let drafts = (0..rows.len()).filter(|&i| own[i]).map(|i| gammas[i]).max().unwrap_or(0);
        for n in 0..drafts {
            let is_drafting = |i: usize| own[i] && n < gammas[i];
            let modes: Vec<u32> =
                (0..rows.len()).map(|i| if is_drafting(i) { VWD_DECODER_SPARSE } else { VWD_DECODER_SKIP }).collect();
            self.take(&Part { rows: &rows, modes: &modes, counts: &vec![1; rows.len()], positions: 1 });
        }
        let counts: Vec<usize> = gammas.iter().map(|gamma| gamma + 1).collect();
        for (&sequence, &len) in rows.iter().zip(&before) {
            self.cut(sequence, len);
        }
        let positions = self.rng.pick(&[POSITIONS, *counts.iter().max().unwrap_or(&1)]);
        self.take(&Part { rows: &rows, modes: &vec![VWD_DECODER_DENSE; rows.len()], counts: &counts, positions });
        let numbers: Vec<usize> = rows.iter().map(|&sequence| self.sequences[sequence].number).collect();
        if rows.is_empty() {
            return;
        }
        let accepted = self.verdicts.accept(self.backend, &mut self.rng, &self.decoder, &numbers, &gammas);
        for (i, &sequence) in rows.iter().enumerate() {
            self.cut(sequence, before[i] + accepted[i] + 1);
        }
        self.operations += rows.len();
    }

    fn cut(&mut self, sequence: usize, len: usize) {
        self.dictionary.get_mut(&self.sequences[sequence].number).unwrap().truncate(len);
    }

    /// A step in every layer, and what it gives by the formulas.
    fn take(&mut self, part: &Part) {
        let &Part { rows, modes, positions, .. } = part;
        let batch = rows.len();
        if batch == 0 {
            return;
        }
        let (mut new_k, mut new_v, mut q, mut guessed) = (vec![], vec![], vec![], vec![]);
        let mut before = vec![];
        let (is_right, is_foreseen) = (self.rng.one_in(2), !self.rng.one_in(5));
        for (i, &sequence) in rows.iter().enumerate() {
            let (len, count) = (self.len(sequence), part.count(i));
            before.push(len);
            assert!(self.grow(sequence, len + count), "there are pages for all sequences");
            let mut of_row = vec![];
            for r in 0..positions {
                let token = self.token();
                new_k.extend(token.key);
                new_v.extend(token.value);
                of_row.push((0..HEADS).map(|_| self.vector(2)).collect::<Vec<Vector>>());
                if r < count {
                    // The decoder writes it.
                    self.dictionary.get_mut(&self.sequences[sequence].number).unwrap().push(token);
                }
            }
            let guess = (0..HEADS).map(|_| self.vector(2)).collect();
            guessed.push(vec![if is_right { of_row[0].clone() } else { guess }]);
            q.push(of_row);
        }
        let lens: Vec<i32> = (0..batch).map(|i| (before[i] + part.counts[i]) as i32).collect();
        let counts: Vec<i32> = part.counts.iter().map(|&count| count as i32).collect();
        let is_new: Vec<bool> = rows.iter().map(|&sequence| self.sequences[sequence].is_new).collect();
        let begin: Vec<i32> = is_new.iter().map(|&is_new| if is_new { 0 } else { i32::MAX }).collect();
        let ids: Vec<i32> = rows.iter().map(|&sequence| self.sequences[sequence].number as i32).collect();
        let each: Vec<i32> = modes.iter().map(|&mode| mode as i32).collect();
        let table: Vec<i32> = rows
            .iter()
            .flat_map(|&sequence| {
                let pages = &self.sequences[sequence].pages;
                (0..MAX_PAGES).map(|p| pages.get(p).map_or(-1, |&page| page as i32)).collect::<Vec<_>>()
            })
            .collect();
        let mut step = vwd_decoder_step {
            positions: positions as u32,
            page_table: tensor(&table, 0, &[batch, MAX_PAGES]),
            seq_lens: numbers(&lens),
            sequences: numbers(&ids),
            ..args()
        };
        if is_new.contains(&true) || self.rng.one_in(2) {
            step.begin = numbers(&begin);
        }
        if part.counts.iter().any(|&count| count < positions) || self.rng.one_in(2) {
            step.q_lens = numbers(&counts);
        }
        let is_one = modes[0] != VWD_DECODER_SKIP && modes.iter().all(|&mode| mode == modes[0]);
        match is_one && self.rng.one_in(2) {
            true => step.mode = modes[0],
            false => step.modes = numbers(&each),
        }
        let flat = |of: &[Vec<Vec<Vector>>]| of.iter().flatten().flatten().flatten().copied().collect::<Vec<f32>>();
        let (q_data, guess_data) = (flat(&q), flat(&guessed));
        let has_positions = positions > 1 || self.rng.one_in(4);
        let rows_of = |data: &[f32], heads: usize| match has_positions {
            true => floats(data, &[batch, positions, heads, DIM]),
            false => floats(data, &[batch, heads, DIM]),
        };
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_begin(self.decoder.0, &step, std::ptr::null_mut()) });
        let mut outs = vec![];
        for layer in 0..LAYERS {
            if is_foreseen {
                let queries = floats(&guess_data, &[batch, HEADS, DIM]);
                let foresee = vwd_decoder_foresee_args { layer: layer as u32, q: queries, ..args() };
                // SAFETY: as above.
                let status =
                    unsafe { vwd_decoder_foresee(self.decoder.0, std::ptr::null(), &foresee, std::ptr::null_mut()) };
                assert_ok(status);
            }
            let out = vec![f32::NAN; batch * positions * HEADS * DIM];
            let attend = vwd_decoder_attend_args {
                layer: layer as u32,
                k: floats(&self.keys[layer], &[PAGES, BLOCK, 1, DIM]),
                v: floats(&self.values[layer], &[PAGES, BLOCK, 1, DIM]),
                new_k: rows_of(&new_k, 1),
                new_v: rows_of(&new_v, 1),
                q: rows_of(&q_data, HEADS),
                out: rows_of(&out, HEADS),
                ..args()
            };
            // SAFETY: as above.
            assert_ok(unsafe { vwd_decoder_attend(self.decoder.0, &attend, std::ptr::null_mut()) });
            outs.push(out);
        }
        for layer in [BY_SCORES, PRR_FORESEEN] {
            assert!(
                outs[layer] == outs[SERIAL],
                "layer {layer} differs from the serial one after {} operations",
                self.operations
            );
        }
        for (i, &sequence) in rows.iter().enumerate() {
            self.operations += LAYERS;
            let (tokens, count) = (&self.dictionary[&self.sequences[sequence].number], part.count(i));
            let all: Vec<usize> = (0..tokens.len().div_ceil(BLOCK)).collect();
            let lists = |layer: usize| -> Vec<usize> {
                let most = if layer == FORESEEN { AHEAD } else { K };
                if layer == DENSE || modes[i] == VWD_DECODER_DENSE || all.len() <= most {
                    return all.clone();
                }
                // A step of several positions is SERIAL in every layer.
                if layer != FORESEEN || !is_foreseen || is_new[i] || positions > 1 {
                    return list(tokens, &q[i][..count], K);
                }
                let mut blocks = list(&tokens[..before[i]], &guessed[i], AHEAD);
                blocks.extend(Some(before[i] / BLOCK).filter(|block| !blocks.contains(block)));
                blocks
            };
            for layer in [SERIAL, FORESEEN, DENSE] {
                let blocks = if count == 0 { vec![] } else { lists(layer) };
                for (r, queries) in q[i].iter().enumerate() {
                    for (h, query) in queries.iter().enumerate() {
                        let found = &outs[layer][((i * positions + r) * HEADS + h) * DIM..][..DIM];
                        let expected = match r < count {
                            true => attention(&tokens[..before[i] + r + 1], blocks.iter().copied(), query),
                            false => [0.0; DIM],
                        };
                        for (c, (&x, expected)) in found.iter().zip(expected).enumerate() {
                            // float32 of values up to 4.
                            if (x as f64 - expected).abs() < 2e-5 {
                                continue;
                            }
                            let about =
                                format!("layer {layer}, row {i}, position {r} of {count}, head {h}, channel {c}");
                            let after = format!("after {} operations, blocks {blocks:?}", self.operations);
                            panic!("{about}: {x}, expected {expected}; modes {modes:?}, {after}");
                        }
                    }
                }
            }
        }
        for (&sequence, &mode) in rows.iter().zip(modes) {
            self.sequences[sequence].is_new &= mode == VWD_DECODER_SKIP;
        }
    }

    fn operate(&mut self) {
        self.operations += 1;
        let count = self.sequences.len();
        let any = |rng: &mut Rng| rng.size(0..=count - 1);
        match self.rng.size(0..=19) {
            0 if count > 1 => {
                let sequence = any(&mut self.rng);
                self.leave(sequence);
            }
            1 if count > 0 && count < NUMBERS => {
                let sequence = any(&mut self.rng);
                self.fork(sequence);
            }
            2 | 3 if count > 0 => {
                let sequence = any(&mut self.rng);
                self.roll_back(sequence);
            }
            4 | 5 if count < NUMBERS => self.join(),
            _ if count == 0 => self.join(),
            6 | 7 => self.round(),
            _ => self.step(),
        }
    }
}

/// How many random operations are to be made.
pub fn operations(otherwise: usize) -> usize {
    std::env::var("VANWARD_DECODER_OPERATIONS").map_or(otherwise, |text| text.parse().expect("a number"))
}

fn decoder_holds_to_a_dictionary_after_many_operations(_: &Backend) {
    let wanted = operations(100_000);
    // One thread: calls this small gain nothing from more.
    let backend = Backend::cpu(1);
    rounds(1, |rng| {
        let mut world = World::new(&backend, rng.int(0..=i64::MAX) as u64);
        while world.operations < wanted {
            world.operate();
        }
    });
}
