//! A decoder of five layers, one for each way to attend, against a dictionary of each sequence's tokens and plain formulas.
//!
//! Keys and queries are whole numbers, so that scores, and with them every list, are exact. `VANWARD_DECODER_OPERATIONS` sets how many
//! random operations are made: a row's part in a layer of a step is one, and so is each join, leave, fork or rollback.

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

struct World {
    rng: Rng,
    decoder: *mut vwd_decoder,
    /// [PAGES, BLOCK, 1, DIM] of each layer.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    users: Vec<usize>,
    sequences: Vec<Sequence>,
    /// What every sequence holds, by its number.
    dictionary: HashMap<usize, Vec<Token>>,
    operations: usize,
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

/// The blocks of a list: the first, the last, and the best of the others by the largest product that a key could have.
pub fn list(tokens: &[Token], queries: &[Vector], k: usize) -> Vec<usize> {
    let score = |block: &[Token]| -> i64 {
        (0..DIM)
            .map(|c| {
                let keys = || block.iter().map(|token| token.key[c]);
                let (most, least) = (keys().fold(f32::MIN, f32::max), keys().fold(f32::MAX, f32::min));
                queries.iter().map(|q| (q[c].max(0.0) * most + q[c].min(0.0) * least) as i64).sum::<i64>()
            })
            .sum()
    };
    let last = tokens.len().div_ceil(BLOCK) - 1;
    let mut others: Vec<(i64, usize)> =
        tokens.chunks(BLOCK).map(score).zip(0..).filter(|&(_, block)| block != 0 && block != last).collect();
    others.sort_by_key(|&(score, block)| (-score, block));
    let forced = if last == 0 { vec![0] } else { vec![0, last] };
    let mut blocks: Vec<usize> = others.iter().map(|&(_, block)| block).take(k - forced.len()).chain(forced).collect();
    blocks.sort_unstable();
    blocks
}

pub fn attention(tokens: &[Token], blocks: impl Iterator<Item = usize>, q: &Vector) -> [f64; DIM] {
    let (mut sum, mut out) = (0.0, [0.0; DIM]);
    for token in blocks.flat_map(|block| tokens[block * BLOCK..].iter().take(BLOCK)) {
        let weight = (SCALE * dot(q, &token.key)).exp();
        sum += weight;
        out.iter_mut().zip(token.value).for_each(|(out, value)| *out += weight * value as f64);
    }
    out.map(|x| x / sum)
}

impl World {
    fn new(backend: &Backend, seed: u64) -> World {
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
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_create(backend.session(), &options, &mut decoder) });
        let cache = || vec![vec![f32::NAN; PAGES * BLOCK * DIM]; LAYERS];
        World {
            rng: Rng::new(seed),
            decoder,
            keys: cache(),
            values: cache(),
            users: vec![0; PAGES],
            sequences: vec![],
            dictionary: HashMap::new(),
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

    fn reset(&self, number: usize) {
        let number = [number as i32];
        let args = vwd_decoder_reset_args { sequences: numbers(&number), ..args() };
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_reset(self.decoder, &args, std::ptr::null_mut()) });
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

    fn step(&mut self) {
        let mut rows: Vec<usize> = (0..self.sequences.len()).collect();
        self.rng.shuffle(&mut rows);
        rows.truncate(self.rng.size(1..=ROWS));
        rows.retain(|&sequence| self.len(sequence) < MAX_PAGES * BLOCK);
        let batch = rows.len();
        if batch == 0 {
            return self.leave(0);
        }
        let modes: Vec<i32> =
            (0..batch).map(|_| if self.rng.one_in(5) { self.rng.int(0..=2) as i32 } else { 1 }).collect();
        let (mut new_k, mut new_v, mut q, mut guessed) = (vec![], vec![], vec![], vec![]);
        let mut before = vec![];
        let (is_right, is_foreseen) = (self.rng.one_in(2), !self.rng.one_in(5));
        for (i, &sequence) in rows.iter().enumerate() {
            let (token, len) = (self.token(), self.len(sequence));
            let queries: Vec<Vector> = (0..HEADS).map(|_| self.vector(2)).collect();
            let guess: Vec<Vector> = (0..HEADS).map(|_| self.vector(2)).collect();
            new_k.extend(token.key);
            new_v.extend(token.value);
            q.push(queries.clone());
            guessed.push(if is_right { queries } else { guess });
            before.push(len);
            if modes[i] == VWD_DECODER_SKIP as i32 {
                continue;
            }
            assert!(self.grow(sequence, len + 1), "there are pages for all sequences");
            // The decoder writes it.
            self.dictionary.get_mut(&self.sequences[sequence].number).unwrap().push(token);
        }
        let lens: Vec<i32> = before.iter().map(|&len| len as i32 + 1).collect();
        let is_new: Vec<bool> = rows.iter().map(|&sequence| self.sequences[sequence].is_new).collect();
        let begin: Vec<i32> = is_new.iter().map(|&is_new| if is_new { 0 } else { i32::MAX }).collect();
        let ids: Vec<i32> = rows.iter().map(|&sequence| self.sequences[sequence].number as i32).collect();
        let table: Vec<i32> = rows
            .iter()
            .flat_map(|&sequence| {
                let pages = &self.sequences[sequence].pages;
                (0..MAX_PAGES).map(|p| pages.get(p).map_or(-1, |&page| page as i32)).collect::<Vec<_>>()
            })
            .collect();
        let mut step = vwd_decoder_step {
            page_table: tensor(&table, 0, &[batch, MAX_PAGES]),
            seq_lens: numbers(&lens),
            modes: numbers(&modes),
            sequences: numbers(&ids),
            ..args()
        };
        if is_new.contains(&true) || self.rng.one_in(2) {
            step.begin = numbers(&begin);
        }
        let flat = |of: &[Vec<Vector>]| of.iter().flatten().flatten().copied().collect::<Vec<f32>>();
        let (q_data, guess_data) = (flat(&q), flat(&guessed));
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_begin(self.decoder, &step, std::ptr::null_mut()) });
        let mut outs = vec![];
        for layer in 0..LAYERS {
            if is_foreseen {
                let queries = floats(&guess_data, &[batch, HEADS, DIM]);
                let foresee = vwd_decoder_foresee_args { layer: layer as u32, q: queries, ..args() };
                // SAFETY: as above.
                let status =
                    unsafe { vwd_decoder_foresee(self.decoder, std::ptr::null(), &foresee, std::ptr::null_mut()) };
                assert_ok(status);
            }
            let out = vec![f32::NAN; batch * HEADS * DIM];
            let attend = vwd_decoder_attend_args {
                layer: layer as u32,
                k: floats(&self.keys[layer], &[PAGES, BLOCK, 1, DIM]),
                v: floats(&self.values[layer], &[PAGES, BLOCK, 1, DIM]),
                new_k: floats(&new_k, &[batch, 1, DIM]),
                new_v: floats(&new_v, &[batch, 1, DIM]),
                q: floats(&q_data, &[batch, HEADS, DIM]),
                out: floats(&out, &[batch, HEADS, DIM]),
                ..args()
            };
            // SAFETY: as above.
            assert_ok(unsafe { vwd_decoder_attend(self.decoder, &attend, std::ptr::null_mut()) });
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
            let tokens = &self.dictionary[&self.sequences[sequence].number];
            let all: Vec<usize> = (0..tokens.len().div_ceil(BLOCK)).collect();
            let is_skipped = modes[i] == VWD_DECODER_SKIP as i32;
            let lists = |layer: usize| -> Vec<usize> {
                let most = if layer == FORESEEN { AHEAD } else { K };
                if layer == DENSE || modes[i] == VWD_DECODER_DENSE as i32 || all.len() <= most {
                    return all.clone();
                }
                if layer != FORESEEN || !is_foreseen || is_new[i] {
                    return list(tokens, &q[i], K);
                }
                let mut blocks = list(&tokens[..before[i]], &guessed[i], AHEAD);
                blocks.extend(Some(before[i] / BLOCK).filter(|block| !blocks.contains(block)));
                blocks
            };
            for layer in [SERIAL, FORESEEN, DENSE] {
                let blocks = if is_skipped { vec![] } else { lists(layer) };
                for h in 0..HEADS {
                    let found = &outs[layer][(i * HEADS + h) * DIM..][..DIM];
                    let expected = match is_skipped {
                        true => [0.0; DIM],
                        false => attention(tokens, blocks.iter().copied(), &q[i][h]),
                    };
                    for (c, (&x, expected)) in found.iter().zip(expected).enumerate() {
                        // float32 of values up to 4.
                        let is_near = (x as f64 - expected).abs() < 2e-5;
                        let about = format!("layer {layer}, row {i}, head {h}, channel {c}, blocks {blocks:?}");
                        assert!(is_near, "{about}: {x}, expected {expected}; after {} operations", self.operations);
                    }
                }
            }
        }
        for (&sequence, &mode) in rows.iter().zip(&modes) {
            self.sequences[sequence].is_new &= mode == VWD_DECODER_SKIP as i32;
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
            _ => self.step(),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // SAFETY: created once, and its calls have ended.
        unsafe { vwd_decoder_release(self.decoder) }
    }
}

fn decoder_holds_to_a_dictionary_after_many_operations(_: &Backend) {
    let wanted = std::env::var("VANWARD_DECODER_OPERATIONS").map_or(100_000, |text| text.parse().expect("a number"));
    // One thread: calls this small gain nothing from more.
    let backend = Backend::cpu(1);
    rounds(1, |rng| {
        let mut world = World::new(&backend, rng.int(0..=i64::MAX) as u64);
        while world.operations < wanted {
            world.operate();
        }
    });
}
