//! A decoder of nine layers, which differ in strategy, method and k, against a dictionary of each sequence's tokens and plain formulas.
//!
//! Keys and queries are whole numbers, so that scores by MINMAX, and with them every list, are exact. Lists by AXIS are those of a selection from
//! summaries that are made anew of all tokens.
//!
//! 100,000 random operations are made, or as many as `VANWARD_DECODER_OPERATIONS` says, a third of them with each dtype; `make long-random` makes
//! a million, in a quarter of a minute where the library is optimised. What is drawn counts as one: a join, a leave, a fork, a rollback, a preemption,
//! the return of a sequence that was preempted, a step, or a round of drafts. Each row of a step, those of a round's and of a return's steps among them,
//! counts as one more in each of the nine layers, and each row whose drafts are verified as one more. So a step of three rows is 28 operations, and
//! most of a run's operations are a row's attention in a layer, which is compared with the formulas or with the serial layer.

use super::acceptance::{COST, Verdicts};
use super::plain::*;
use super::*;
use std::collections::HashMap;
use vanward::capi::*;

pub const ON_THE_CPU: &[Case] = cases![decoder_holds_to_a_dictionary_after_many_operations];

const HEADS: usize = 2;
const MAX_PAGES: usize = 16;
const PAGES: usize = 100;
const ROWS: usize = 4;
const NUMBERS: usize = 6;
/// γ + 1: verified drafts reach into three blocks.
const POSITIONS: usize = 11;

const SERIAL: usize = 0;
const BY_SCORES: usize = 1;
const PRR_FORESEEN: usize = 2;
const FORESEEN: usize = 3;
const DENSE: usize = 4;
/// FORESEEN with longer lists.
const LONGER: usize = 5;
const BY_AXES: usize = 6;
const AXES_BY_SCORES: usize = 7;
/// A list of the first block, the last one and one more.
const SHORTEST: usize = 8;
const LAYERS: usize = 9;

/// The blocks of a layer's lists.
const K: [usize; LAYERS] = [4, 4, 4, 4, 0, 6, 5, 5, 3];

/// The blocks of a list that is foreseen: ⌈1.25·k⌉.
fn ahead(layer: usize) -> usize {
    (5 * K[layer]).div_ceil(4)
}

fn is_foreseen_in(layer: usize) -> bool {
    matches!(layer, FORESEEN | LONGER)
}

fn is_by_axes(layer: usize) -> bool {
    matches!(layer, BY_AXES | AXES_BY_SCORES)
}

/// Sequences that were preempted at most.
const WAITING: usize = 3;

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
    dtype: DType,
    decoder: Decoder,
    /// [PAGES, BLOCK, 1, DIM] of each layer.
    keys: Vec<Numbers>,
    values: Vec<Numbers>,
    users: Vec<usize>,
    sequences: Vec<Sequence>,
    /// What every sequence holds, by its number.
    dictionary: HashMap<usize, Vec<Token>>,
    /// What the engine keeps of sequences that were preempted.
    waiting: Vec<Vec<Token>>,
    verdicts: Verdicts,
    operations: usize,
}

impl<'b> World<'b> {
    fn new(backend: &'b Backend, dtype: DType, seed: u64) -> World<'b> {
        let policies: [vwd_decoder_policy; LAYERS] = std::array::from_fn(|layer| {
            let exact = vwd_decoder_policy { k: K[layer] as u32, ..POLICY };
            let by_axes = vwd_decoder_policy { method: VWD_SELECT_AXIS, ..exact };
            match layer {
                BY_SCORES => vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, ..exact },
                PRR_FORESEEN => {
                    vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, predict: VWD_PREDICT_FORESEEN, ..exact }
                }
                FORESEEN | LONGER => vwd_decoder_policy { strategy: VWD_STRATEGY_FORESEEN, ..exact },
                DENSE => vwd_decoder_policy { method: 0, ..exact },
                BY_AXES => by_axes,
                AXES_BY_SCORES => vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, ..by_axes },
                _ => exact,
            }
        });
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
            dtype_code: dtype.code as u32,
            dtype_bits: dtype.bits as u32,
            page_size: BLOCK as u32,
            pages: PAGES as u32,
            block_size: BLOCK as u32,
            scale: SCALE as f32,
            max_tokens: (MAX_PAGES * BLOCK) as u32,
            policy_count: LAYERS as u32,
            policies: policies.as_ptr(),
            ..args()
        };
        let cache = || (0..LAYERS).map(|_| Numbers::new(dtype, &vec![f32::NAN; PAGES * BLOCK * DIM])).collect();
        World {
            backend,
            rng: Rng::new(seed),
            dtype,
            decoder: Decoder::create(backend, &options),
            keys: cache(),
            values: cache(),
            users: vec![0; PAGES],
            sequences: vec![],
            dictionary: HashMap::new(),
            waiting: vec![],
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
            self.keys[layer].set(at, &token.key);
            self.values[layer].set(at, &token.value);
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
        let len = self.rng.size(1..=100);
        let tokens = (0..len).map(|_| self.token()).collect();
        self.begin_with(tokens);
    }

    /// A sequence of tokens that the engine writes.
    fn begin_with(&mut self, tokens: Vec<Token>) {
        let sequence = self.begin_empty(true);
        assert!(self.grow(sequence, tokens.len()), "there are pages for all sequences");
        for (t, token) in tokens.iter().enumerate() {
            self.write(self.sequences[sequence].pages[t / BLOCK], t % BLOCK, token);
        }
        self.dictionary.insert(self.sequences[sequence].number, tokens);
    }

    fn begin_empty(&mut self, is_new: bool) -> usize {
        let number = self.free_number();
        self.sequences.push(Sequence { number, pages: vec![], is_new });
        self.dictionary.insert(number, vec![]);
        self.reset(number);
        self.sequences.len() - 1
    }

    /// A sequence gives its pages and its number back. The engine keeps its tokens.
    fn preempt(&mut self, sequence: usize) {
        self.waiting.push(self.dictionary[&self.sequences[sequence].number].clone());
        self.leave(sequence);
    }

    /// A sequence that was preempted begins anew, in any pages and with any number: the engine writes what it kept, or takes it through the decoder
    /// as a prompt, some positions a step.
    fn return_one(&mut self) {
        let waiting = self.rng.size(0..=self.waiting.len() - 1);
        let tokens = self.waiting.remove(waiting);
        if self.rng.one_in(2) {
            return self.begin_with(tokens);
        }
        let sequence = self.begin_empty(false);
        let mut rest = &tokens[..];
        while !rest.is_empty() {
            let positions = self.rng.size(1..=POSITIONS);
            let (part, later) = rest.split_at(positions.min(rest.len()));
            let modes = [self.rng.pick(&[VWD_DECODER_SPARSE, VWD_DECODER_DENSE])];
            let step = Part { rows: &[sequence], modes: &modes, counts: &[part.len()], positions };
            self.take_of(&step, Some(part));
            rest = later;
        }
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
        self.take_of(part, None);
    }

    /// The same, of these tokens of the only row.
    fn take_of(&mut self, part: &Part, given: Option<&[Token]>) {
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
                let token = given.and_then(|tokens| tokens.get(r).copied()).unwrap_or_else(|| self.token());
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
            page_table: packed(&table, 0, &[batch, MAX_PAGES]),
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
        let extents = |heads: usize| match has_positions {
            true => vec![batch, positions, heads, DIM],
            false => vec![batch, heads, DIM],
        };
        let rows_of = |data: &[f32], heads: usize| floats(data, &extents(heads));
        let [new_k, new_v] = [new_k, new_v].map(|new| Numbers::new(self.dtype, &new));
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
                k: self.keys[layer].c(&[PAGES, BLOCK, 1, DIM]),
                v: self.values[layer].c(&[PAGES, BLOCK, 1, DIM]),
                new_k: new_k.c(&extents(1)),
                new_v: new_v.c(&extents(1)),
                q: rows_of(&q_data, HEADS),
                out: rows_of(&out, HEADS),
                ..args()
            };
            // SAFETY: as above.
            assert_ok(unsafe { vwd_decoder_attend(self.decoder.0, &attend, std::ptr::null_mut()) });
            outs.push(out);
        }
        for (layer, serial) in [(BY_SCORES, SERIAL), (PRR_FORESEEN, SERIAL), (AXES_BY_SCORES, BY_AXES)] {
            assert!(
                outs[layer] == outs[serial],
                "layer {layer} differs from the serial one after {} operations",
                self.operations
            );
        }
        let by_axes = self.lists_by_axes(part, &table, &before, &q_data);
        for (i, &sequence) in rows.iter().enumerate() {
            self.operations += LAYERS;
            let (tokens, count) = (&self.dictionary[&self.sequences[sequence].number], part.count(i));
            let all: Vec<usize> = (0..tokens.len().div_ceil(BLOCK)).collect();
            let lists = |layer: usize| -> Vec<usize> {
                let most = if is_foreseen_in(layer) { ahead(layer) } else { K[layer] };
                if layer == DENSE || modes[i] == VWD_DECODER_DENSE || all.len() <= most {
                    return all.clone();
                }
                if is_by_axes(layer) {
                    return by_axes[i].clone();
                }
                // A step of several positions is SERIAL in every layer.
                if !is_foreseen_in(layer) || !is_foreseen || is_new[i] || positions > 1 {
                    return list(tokens, &q[i][..count], K[layer]);
                }
                let mut blocks = list(&tokens[..before[i]], &guessed[i], ahead(layer));
                blocks.extend(Some(before[i] / BLOCK).filter(|block| !blocks.contains(block)));
                blocks
            };
            for layer in [SERIAL, FORESEEN, DENSE, LONGER, BY_AXES, SHORTEST] {
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

    /// What each row of a step selects by AXIS, from summaries that are made anew.
    fn lists_by_axes(&self, part: &Part, table: &[i32], before: &[usize], q: &[f32]) -> Vec<Vec<usize>> {
        let batch = part.rows.len();
        let counts: Vec<i32> = (0..batch).map(|i| part.count(i) as i32).collect();
        let lens: Vec<i32> = (0..batch).map(|i| before[i] as i32 + counts[i]).collect();
        let (axes, range) = (vec![0u8; batch * MAX_PAGES * DIM], Numbers::new(F16, &vec![0.0; batch * MAX_PAGES * 4]));
        let index = vwd_index {
            kind: VWD_INDEX_AXIS,
            block_size: BLOCK as u32,
            axes: packed(&axes, 1, &[batch, MAX_PAGES, 1, DIM]),
            axis_range: range.c(&[batch, MAX_PAGES, 1, 4]),
            ..args()
        };
        let update = vwd_index_update_args {
            index: &index,
            k: self.keys[BY_AXES].c(&[PAGES, BLOCK, 1, DIM]),
            page_table: packed(table, 0, &[batch, MAX_PAGES]),
            seq_lens: numbers(&lens),
            ..args()
        };
        let (ids, found) = (vec![-1i32; batch * K[BY_AXES]], vec![0i32; batch]);
        let selected = vwd_block_list {
            ids: packed(&ids, 0, &[batch, 1, K[BY_AXES]]),
            counts: packed(&found, 0, &[batch, 1]),
            slots: absent(),
        };
        let select = vwd_select_blocks_args {
            method: VWD_SELECT_AXIS,
            block_size: BLOCK as u32,
            k: K[BY_AXES] as u32,
            init_blocks: 1,
            local_blocks: 1,
            scale: SCALE as f32,
            index: &index,
            q: floats(q, &[batch, part.positions, HEADS, DIM]),
            q_lens: numbers(&counts),
            seq_lens: numbers(&lens),
            selected,
            ..args()
        };
        // SAFETY: the arguments are valid.
        unsafe {
            assert_ok(vwd_index_update(self.backend.session(), &update, std::ptr::null_mut()));
            assert_ok(vwd_select_blocks(self.backend.session(), &select, std::ptr::null_mut()));
        }
        let of = |i: usize| ids[i * K[BY_AXES]..][..found[i] as usize].iter().map(|&id| id as usize).collect();
        (0..batch).map(of).collect()
    }

    fn operate(&mut self) {
        self.operations += 1;
        let count = self.sequences.len();
        let any = |rng: &mut Rng| rng.size(0..=count - 1);
        match self.rng.size(0..=21) {
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
            8 if self.waiting.len() < WAITING => {
                let sequence = any(&mut self.rng);
                self.preempt(sequence);
            }
            9 if !self.waiting.is_empty() && count < NUMBERS => self.return_one(),
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
        for dtype in [F32, F16, BF16] {
            let mut world = World::new(&backend, dtype, rng.int(0..=i64::MAX) as u64);
            while world.operations < wanted.div_ceil(3) {
                world.operate();
            }
        }
    });
}
