//! Strategies: PRR gives what SERIAL gives whatever was predicted, FORESEEN attends the list that was foreseen, and both are dense
//! attention where a list has all blocks.

use super::*;
use crate::support::maps::Map;

pub const CASES: &[Case] = cases![
    decoder_gives_the_same_by_every_exact_strategy_however_wrong_the_prediction,
    decoder_attends_the_foreseen_list_where_one_was_foreseen,
    decoder_foresees_from_the_residual_stream_what_it_foresees_from_its_queries,
    decoder_by_any_strategy_equals_dense_attention_where_lists_have_all_blocks,
    decoder_remembers_scores_by_sequence_and_forgets_them_on_reset,
    decoder_is_serial_by_every_strategy_in_steps_of_several_positions,
    decoder_foresee_errors_name_the_argument,
];

pub(super) const SEQUENCES: usize = 8;

pub(super) const PRR: vwd_decoder_policy = vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, ..POLICY };
pub(super) const PRR_FORESEEN: vwd_decoder_policy = vwd_decoder_policy { predict: VWD_PREDICT_FORESEEN, ..PRR };
pub(super) const FORESEEN: vwd_decoder_policy = vwd_decoder_policy { strategy: VWD_STRATEGY_FORESEEN, ..POLICY };

impl Decoder {
    pub(super) fn foresee(&self, backend: &Backend, forecast: *const vwd_forecast, args: &vwd_decoder_foresee_args) {
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_decoder_foresee(self.0, forecast, args, backend.stream()) });
    }

    /// [rows, Hk] of the only layer.
    fn counts(&self, backend: &Backend, t: vwd_tensor, rows: usize, heads: usize) -> Vec<u32> {
        let mut bytes = vec![0; rows * heads * 4];
        backend.read(t.data as usize, &mut bytes);
        bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn missed(&self, backend: &Backend, rows: usize, heads: usize) -> Vec<u32> {
        self.counts(backend, self.details().missed, rows, heads)
    }

    fn reset(&self, backend: &Backend, numbers: &[i64]) {
        let sequences = ints(backend, numbers);
        let args = vwd_decoder_reset_args { sequences: sequences.c(), ..args() };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_decoder_reset(self.0, &args, backend.stream()) });
    }
}

/// What was foreseen of the queries to come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Foresight {
    Right,
    /// The opposite.
    Wrong,
    Alternating,
}

/// Sequences of an engine, each with a number, which step by step get a token each.
pub(super) struct Run<'b> {
    backend: &'b Backend,
    pub(super) engine: Engine<'b>,
    numbers: Vec<usize>,
    /// How queries change from step to step: not at all, all of them, or back and forth.
    queries: Foresight,
    /// A row whose last block lost tokens, or was copied, gives `begin`: what is foreseen by AXIS weighs the summary of that block, which
    /// is made anew only where the row attends.
    is_last_block_weighed: bool,
    steps: usize,
}

/// A step of one position, and its tensors.
pub(super) struct Ragged<'b> {
    pub(super) modes: Vec<u32>,
    pub(super) counts: Vec<usize>,
    pub(super) tokens: Vec<usize>,
    /// Rows with tokens that the decoder has not summarised.
    pub(super) is_new: Vec<bool>,
    has_begin: bool,
    pub(super) table: Tensor<'b>,
    pub(super) lens: Tensor<'b>,
    q_lens: Tensor<'b>,
    begin: Tensor<'b>,
    mode_tensor: Tensor<'b>,
    sequences: Tensor<'b>,
    new_k: Tensor<'b>,
    new_v: Tensor<'b>,
    pub(super) q: Tensor<'b>,
    pub(super) opposite: Tensor<'b>,
}

impl<'b> Ragged<'b> {
    pub(super) fn step(&self) -> vwd_decoder_step {
        let mut step = vwd_decoder_step {
            page_table: self.table.c(),
            seq_lens: self.lens.c(),
            q_lens: self.q_lens.c(),
            modes: self.mode_tensor.c(),
            sequences: self.sequences.c(),
            ..args()
        };
        if self.has_begin {
            step.begin = self.begin.c();
        }
        step
    }

    /// The output of a decoder; it writes the same tokens as every other.
    pub(super) fn attend(&self, run: &Run<'b>, decoder: &Decoder) -> Tensor<'b> {
        let Shape { heads, value_dim, .. } = run.engine.shape;
        let extents = [self.modes.len(), 1, heads[0], value_dim];
        let out = Tensor::poisoned(run.backend, F32, &extents, &Layout::default());
        let attend = vwd_decoder_attend_args {
            k: run.engine.k.c(),
            v: run.engine.v.c(),
            new_k: self.new_k.c(),
            new_v: self.new_v.c(),
            q: self.q.c(),
            out: out.c(),
            ..args()
        };
        decoder.attend(run.backend, &attend);
        out
    }

    pub(super) fn foresee(&self, run: &Run, decoder: &Decoder, foresight: Foresight) {
        let is_right = match foresight {
            Foresight::Right => true,
            Foresight::Wrong => false,
            Foresight::Alternating => run.steps.is_multiple_of(2),
        };
        let q = without_positions(if is_right { &self.q } else { &self.opposite });
        decoder.foresee(run.backend, std::ptr::null(), &vwd_decoder_foresee_args { q, ..args() });
    }
}

/// [B, 1, heads, D] as [B, heads, D].
pub fn without_positions(t: &Tensor) -> vwd_tensor {
    let mut t = t.c();
    t.ndim = 3;
    t.shape = [t.shape[0], t.shape[2], t.shape[3], 0, 0];
    t.strides = [t.strides[0], t.strides[2], t.strides[3], 0, 0];
    t
}

impl<'b> Run<'b> {
    pub(super) fn new(backend: &'b Backend, rng: &mut Rng, shape: Shape, queries: Foresight) -> Run<'b> {
        let engine = Engine::new(backend, rng, shape);
        Run { backend, engine, numbers: vec![], queries, is_last_block_weighed: false, steps: 0 }
    }

    /// Rows whose last block lost tokens, or was copied, give `begin`.
    pub(super) fn weigh_last_blocks(&mut self, is_last_block_weighed: bool) {
        self.is_last_block_weighed = is_last_block_weighed;
    }

    fn leave(&mut self, sequence: usize) {
        self.engine.leave(sequence);
        self.numbers.remove(sequence);
    }

    /// Sequences that joined get the lowest free numbers.
    fn number(&mut self, decoders: &[&Decoder]) {
        while self.numbers.len() < self.engine.sequences.len() {
            let free = (0..SEQUENCES).find(|n| !self.numbers.contains(n)).expect("a free number");
            self.numbers.push(free);
            decoders.iter().for_each(|decoder| decoder.reset(self.backend, &[free as i64]));
        }
    }

    pub(super) fn ragged(&mut self, rng: &mut Rng, decoders: &[&Decoder]) -> Ragged<'b> {
        let (backend, shape) = (self.backend, self.engine.shape);
        self.steps += 1;
        if self.engine.sequences.len() > 1 && rng.one_in(12) {
            let gone = rng.size(0..=self.engine.sequences.len() - 1);
            self.leave(gone);
        }
        if self.engine.sequences.len() < 4 {
            self.engine.join(rng.size(1..=200));
        }
        self.number(decoders);
        if self.engine.sequences.len() < 6 && rng.one_in(8) {
            let parent = rng.size(0..=self.engine.sequences.len() - 1);
            self.engine.fork(parent);
            let is_new = self.numbers.len() < self.engine.sequences.len();
            let begins = is_new && (shape.page > shape.block || self.is_last_block_weighed);
            if let Some(child) = self.engine.sequences.last_mut().filter(|_| begins) {
                // The page that was copied has no summaries.
                child.begin = Some(child.len / shape.page * shape.page);
            }
            self.number(decoders);
        }
        let mut rows: Vec<usize> = (0..self.engine.sequences.len()).collect();
        rng.shuffle(&mut rows);
        rows.truncate(shape.rows);
        let mode = |rng: &mut Rng| if rng.one_in(6) { rng.size(0..=2) as u32 } else { VWD_DECODER_SPARSE };
        let modes: Vec<u32> = rows.iter().map(|_| mode(rng)).collect();
        let mut counts = vec![];
        let (mut tokens, mut begins, mut is_new) = (vec![], vec![], vec![]);
        let new_row =
            |rng: &mut Rng, dim| rng.normals(&[rows.len(), 1, shape.heads[1], dim]).map(|&x| shape.dtype.round(x));
        let (new_keys, new_values) = (new_row(rng, shape.dim), new_row(rng, shape.value_dim));
        for (i, &sequence) in rows.iter().enumerate() {
            // Some of the last tokens are taken back now and then.
            let back = if rng.one_in(10) { rng.size(0..=20) } else { 0 };
            let taken = modes[i] != VWD_DECODER_SKIP;
            let s = &mut self.engine.sequences[sequence];
            // Only what was summarised, and lies in pages of the sequence's own.
            let shared = s.pages.iter().filter(|&&page| self.engine.users[page] > 1).count() * shape.page;
            if s.begin.is_none() {
                let before = s.len;
                s.len = s.len.saturating_sub(back).max(shared.min(s.len));
                if self.is_last_block_weighed && s.len < before {
                    s.begin = Some(s.len / shape.block * shape.block);
                }
            }
            let len = s.len;
            let fits = len < shape.max_pages * shape.page && self.engine.grow(sequence, len + 1);
            let count = fits as usize;
            let s = &mut self.engine.sequences[sequence];
            begins.push(s.begin.map_or(i32::MAX as i64, |begin| begin as i64));
            is_new.push(taken && s.begin.is_some_and(|begin| begin < len));
            counts.push(count);
            tokens.push(len + count);
            if !taken {
                continue;
            }
            s.begin = None;
            s.len = len + count;
            if count == 1 {
                let (page, row) = (s.pages[len / shape.page], len % shape.page);
                for g in 0..shape.heads[1] {
                    for c in 0..shape.dim {
                        self.engine.keys[[page, row, g, c]] = new_keys[[i, 0, g, c]];
                    }
                    for c in 0..shape.value_dim {
                        self.engine.values[[page, row, g, c]] = new_values[[i, 0, g, c]];
                    }
                }
            }
        }
        let mut queries = rng.normals(&[rows.len(), 1, shape.heads[0], shape.dim]);
        for (i, &sequence) in rows.iter().enumerate() {
            // The queries of a sequence: the same at every step, or the opposite at every second one.
            let sign = match self.queries {
                Foresight::Wrong => continue,
                Foresight::Alternating if self.steps.is_multiple_of(2) => -1.0,
                _ => 1.0,
            };
            let mut own = Rng::new(self.numbers[sequence] as u64);
            let fixed = own.normals(&[shape.heads[0], shape.dim]);
            for h in 0..shape.heads[0] {
                for c in 0..shape.dim {
                    queries[[i, 0, h, c]] = sign * fixed[[h, c]];
                }
            }
        }
        let queries = queries.map(|&x| shape.dtype.round(x));
        let plain = Layout::default();
        let floats = |dtype, values: &Array<f64>| Tensor::floats(backend, dtype, values, &plain);
        let list = |values: Vec<i64>| ints(backend, &values);
        let has_begin = is_new.contains(&true) || rng.one_in(2);
        Ragged {
            table: Tensor::ints(backend, I32, &self.engine.table(&rows), &plain),
            lens: list(tokens.iter().map(|&n| n as i64).collect()),
            q_lens: list(counts.iter().map(|&n| n as i64).collect()),
            begin: list(begins),
            mode_tensor: list(modes.iter().map(|&mode| mode as i64).collect()),
            sequences: list(rows.iter().map(|&sequence| self.numbers[sequence] as i64).collect()),
            new_k: floats(shape.dtype, &new_keys),
            new_v: floats(shape.dtype, &new_values),
            q: floats(shape.dtype, &queries),
            opposite: floats(shape.dtype, &queries.map(|x| -x)),
            modes,
            counts,
            tokens,
            is_new,
            has_begin,
        }
    }
}

pub(super) fn shape(rng: &mut Rng) -> Shape {
    let (page, block) = rng.pick(&[(16, 16), (32, 16), (16, 32), (8, 8)]);
    Shape {
        heads: rng.pick(&[[2, 1], [4, 2], [3, 3]]),
        dim: rng.pick(&[16, 128]),
        value_dim: rng.pick(&[16, 128]),
        dtype: rng.pick(&[F32, F16]),
        page,
        block,
        pages: 2048usize.div_ceil(page),
        max_pages: 320usize.div_ceil(page),
        rows: 4,
        positions: 1,
    }
}

pub(super) fn create(backend: &Backend, shape: &Shape, policy: vwd_decoder_policy) -> Decoder {
    Decoder::create(
        backend,
        &vwd_decoder_options { max_sequences: SEQUENCES as u32, max_tokens: 320, ..shape.options(policy) },
    )
}

/// Bits on the CPU; on CUDA the order of sums differs between attention and repair.
pub(super) fn assert_alike(about: &str, backend: &Backend, shape: &Shape, found: &Tensor, expected: &Array<f64>) {
    if !backend.is_cuda() {
        return assert_same(about, found, expected);
    }
    let found = found.read_floats();
    // As in the cases of attention; weights of 16-bit kernels are rounded to the values' type.
    let tolerance = 8e-5 + 4.0 * shape.dtype.epsilon();
    for at in indices(&expected.shape) {
        let at: [usize; 4] = at[..].try_into().unwrap();
        let (x, y) = (found[at], expected[at]);
        assert!((x - y).abs() <= tolerance * (1.0 + y.abs()), "{about}: {x} at {at:?}, expected {y}");
    }
}

fn decoder_gives_the_same_by_every_exact_strategy_however_wrong_the_prediction(backend: &Backend) {
    use Foresight::{Alternating, Right, Wrong};
    let steps = backend.times(300);
    rounds(2, |rng| {
        for queries in [Right, Wrong, Alternating] {
            let shape = shape(rng);
            let method = rng.pick(&[VWD_SELECT_MINMAX, VWD_SELECT_AXIS]);
            let sizes = |policy: vwd_decoder_policy| vwd_decoder_policy { method, k: 3, ..policy };
            let holt = vwd_holt { alpha: 0.6, beta: 0.3, gamma: 0.5 };
            let serial = create(backend, &shape, sizes(POLICY));
            let by_scores = [sizes(PRR), vwd_decoder_policy { holt, ratio: 1.5, ..sizes(PRR) }]
                .map(|policy| create(backend, &shape, policy));
            let foreseen = [Right, Wrong, Alternating].map(|how| (create(backend, &shape, sizes(PRR_FORESEEN)), how));
            let mut run = Run::new(backend, rng, shape, queries);
            let all: Vec<&Decoder> =
                [&serial].into_iter().chain(&by_scores).chain(foreseen.iter().map(|(decoder, _)| decoder)).collect();
            let mut missed = [0u64; 5];
            for step in 0..steps {
                let ragged = run.ragged(rng, &all);
                all.iter().for_each(|decoder| decoder.begin(backend, &ragged.step()));
                let expected = ragged.attend(&run, &serial).read_floats();
                let about = |what: &str| {
                    let Ragged { modes, tokens, .. } = &ragged;
                    format!("step {step}, queries {queries:?}, {what}; modes {modes:?} of {tokens:?} tokens")
                };
                let rows = ragged.modes.len();
                for (n, decoder) in by_scores.iter().enumerate() {
                    let found = ragged.attend(&run, decoder);
                    assert_alike(&about("predicted by scores"), backend, &shape, &found, &expected);
                    missed[n] += decoder.missed(backend, rows, shape.heads[1]).iter().map(|&n| n as u64).sum::<u64>();
                }
                for (n, (decoder, how)) in foreseen.iter().enumerate() {
                    // Now and then a layer is not foreseen.
                    let is_foreseen = !rng.one_in(7);
                    if is_foreseen {
                        ragged.foresee(&run, decoder, *how);
                    }
                    let found = ragged.attend(&run, decoder);
                    assert_alike(&about(&format!("foreseen {how:?}")), backend, &shape, &found, &expected);
                    if is_foreseen {
                        for (i, missing) in
                            decoder.missed(backend, rows, shape.heads[1]).chunks(shape.heads[1]).enumerate()
                        {
                            let sum: u32 = missing.iter().sum();
                            missed[2 + n] += sum as u64;
                            // By AXIS the step's own token moves the weights of a group's heads.
                            let can_miss = *how != Right || ragged.is_new[i] || method == VWD_SELECT_AXIS;
                            assert!(can_miss || sum == 0, "{}: row {i} missed {missing:?}", about("foreseen right"));
                        }
                    }
                }
            }
            assert!(missed[3] > 0, "a wrong foresight missed nothing, so that nothing was repaired: {missed:?}");
            if queries == Wrong && steps > 100 {
                assert!(missed[0] > 0, "scores predicted random queries: {missed:?}");
            }
            if queries == Right && steps > 100 {
                assert!(
                    missed[0] < missed[3],
                    "scores predicted the same queries no better than their opposite: {missed:?}"
                );
            }
        }
    });
}

fn decoder_attends_the_foreseen_list_where_one_was_foreseen(backend: &Backend) {
    let steps = backend.times(60);
    rounds(3, |rng| {
        let shape = shape(rng);
        let method = rng.pick(&[VWD_SELECT_MINMAX, VWD_SELECT_AXIS]);
        let (k, local_blocks) = (rng.size(2..=4) as u32, rng.size(0..=1) as u32);
        let policy = vwd_decoder_policy { method, k, local_blocks, ..FORESEEN };
        let decoder = create(backend, &shape, policy);
        let mut run = Run::new(backend, rng, shape, Foresight::Wrong);
        run.is_last_block_weighed = method == VWD_SELECT_AXIS;
        // What is foreseen: 1.25·k blocks, the last one among them.
        let longer = vwd_decoder_policy { k: (5 * k).div_ceil(4), local_blocks: 1, ..policy };
        let covered = longer.k.max(longer.init_blocks + 1) as usize * shape.block;
        let serial = vwd_decoder_policy { dense_below: covered as u32 + 1, ..policy };
        for step in 0..steps {
            let ragged = run.ragged(rng, &[&decoder]);
            decoder.begin(backend, &ragged.step());
            let is_foreseen = !rng.one_in(4);
            if is_foreseen {
                ragged.foresee(&run, &decoder, Foresight::Wrong);
            }
            let out = ragged.attend(&run, &decoder);
            let of = |policy, wanted, is_ahead| {
                let tensors = [&ragged.table, &ragged.lens];
                let Ragged { modes, counts, tokens, q, .. } = &ragged;
                compose(backend, &run.engine, policy, tensors, modes, counts, tokens, [wanted, q], is_ahead, None, F32)
                    .out
                    .read_floats()
            };
            let (ahead, late) = (of(&longer, &ragged.opposite, true), of(&serial, &ragged.q, false));
            let expected = Array::from_fn(&ahead.shape, |at| {
                let at: [usize; 4] = at[..].try_into().unwrap();
                if is_foreseen && !ragged.is_new[at[0]] { ahead[at] } else { late[at] }
            });
            let Ragged { modes, tokens, is_new, .. } = &ragged;
            let about =
                format!("step {step}, foreseen {is_foreseen}; modes {modes:?} of {tokens:?} tokens, new {is_new:?}");
            assert_alike(&about, backend, &shape, &out, &expected);
        }
    });
}

fn decoder_foresees_from_the_residual_stream_what_it_foresees_from_its_queries(backend: &Backend) {
    let shape = Shape { heads: [4, 2], dim: 16, value_dim: 16, dtype: F32, ..shape(&mut Rng::new(0)) };
    rounds(2, |rng| {
        // Queries of all heads, or one vector for each KV head.
        for (memory, heads) in [(false, 4), (true, 4), (false, 2)] {
            let map = Map::random(rng, [heads, 16, 24], None, memory);
            let forecast = map.load(backend);
            let [by_stream, by_queries, repaired, serial] = [FORESEEN, FORESEEN, PRR_FORESEEN, POLICY]
                .map(|policy| create(backend, &shape, vwd_decoder_policy { k: 3, ..policy }));
            let mut run = Run::new(backend, rng, shape, Foresight::Wrong);
            let rope = vwd_rope { style: VWD_ROPE_INTERLEAVED, theta: 500.0, ..args() };
            for step in 0..backend.times(20) {
                let ragged = run.ragged(rng, &[]);
                let rows = ragged.modes.len();
                let plain = Layout::default();
                let x = Tensor::floats(backend, F16, &rng.normals(&[rows, map.input_dim]), &plain);
                let previous = Tensor::floats(backend, F32, &rng.normals(&[rows, heads, 16]), &plain);
                let previous = if memory { previous.c() } else { absent() };
                // The token of row i stands at position len − 1.
                let places: Vec<i64> = (0..rows)
                    .map(|i| (ragged.tokens[i] - if ragged.modes[i] == 0 { 0 } else { ragged.counts[i] }) as i64)
                    .collect();
                let positions = ints(backend, &places);
                let q = Tensor::poisoned(backend, F32, &[rows, heads, 16], &plain);
                let project = vwd_forecast_project_args {
                    layer: 0,
                    rope: &rope,
                    x: x.c(),
                    previous,
                    positions: positions.c(),
                    q: q.c(),
                    ..args()
                };
                // SAFETY: the arguments are valid.
                backend.finish(unsafe { vwd_forecast_project(forecast.0, &project, backend.stream()) });
                let stream = vwd_decoder_foresee_args { rope: &rope, x: x.c(), previous, ..args() };
                by_stream.begin(backend, &ragged.step());
                by_stream.foresee(backend, forecast.0, &stream);
                by_queries.begin(backend, &ragged.step());
                by_queries.foresee(backend, std::ptr::null(), &vwd_decoder_foresee_args { q: q.c(), ..args() });
                let expected = ragged.attend(&run, &by_queries).read_floats();
                assert_same(&format!("step {step}"), &ragged.attend(&run, &by_stream), &expected);
                serial.begin(backend, &ragged.step());
                let expected = ragged.attend(&run, &serial).read_floats();
                repaired.begin(backend, &ragged.step());
                repaired.foresee(backend, forecast.0, &stream);
                let found = ragged.attend(&run, &repaired);
                assert_alike(&format!("step {step}, repaired"), backend, &shape, &found, &expected);
            }
        }
    });
}

fn decoder_by_any_strategy_equals_dense_attention_where_lists_have_all_blocks(backend: &Backend) {
    rounds(3, |rng| {
        let shape = Shape { dtype: F16, dim: 64, value_dim: 64, ..shape(rng) };
        let mut run = Run::new(backend, rng, shape, Foresight::Wrong);
        let k = 320usize.div_ceil(shape.block) as u32;
        let decoders = [POLICY, PRR, PRR_FORESEEN, FORESEEN]
            .map(|policy| create(backend, &shape, vwd_decoder_policy { k, ..policy }));
        let dense = create(backend, &shape, vwd_decoder_policy { method: 0, ..POLICY });
        for step in 0..backend.times(30) {
            let ragged = run.ragged(rng, &[]);
            dense.begin(backend, &ragged.step());
            let expected = ragged.attend(&run, &dense).read_floats();
            for (n, decoder) in decoders.iter().enumerate() {
                decoder.begin(backend, &ragged.step());
                ragged.foresee(&run, decoder, Foresight::Wrong);
                assert_same(&format!("step {step}, policy {n}"), &ragged.attend(&run, decoder), &expected);
            }
        }
    });
}

/// Against the calls of SERIAL, to the bit, with rows that are dense where the strategy's own lists would have all their blocks.
fn decoder_is_serial_by_every_strategy_in_steps_of_several_positions(backend: &Backend) {
    rounds(2, |rng| {
        for policy in [PRR, PRR_FORESEEN, FORESEEN] {
            let method = rng.pick(&[VWD_SELECT_MINMAX, VWD_SELECT_AXIS]);
            let policy = vwd_decoder_policy { method, k: 4, ..policy };
            let shape = Shape { positions: rng.size(2..=5), ..shape(rng) };
            // FORESEEN's lists have ⌈1.25·4⌉ blocks.
            let listed = if policy.strategy == VWD_STRATEGY_FORESEEN { 5 } else { 4 };
            let dense_below = listed * shape.block as u32 + 1;
            let serial = vwd_decoder_policy { strategy: VWD_STRATEGY_SERIAL, predict: 0, dense_below, ..policy };
            let decoder = create(backend, &shape, policy);
            let mut engine = Engine::new(backend, rng, shape);
            for _ in 0..backend.times(12).max(6) {
                super::step(backend, rng, &decoder, &mut engine, &serial);
            }
            let predicted = decoder.details().predicted;
            let counts = decoder.counts(backend, predicted, shape.rows, shape.heads[1]);
            assert!(counts.iter().all(|&n| n == 0), "nothing was predicted: {counts:?}");
        }
    });
}

fn decoder_remembers_scores_by_sequence_and_forgets_them_on_reset(backend: &Backend) {
    let mut shown = 0;
    rounds(3, |rng| {
        let shape = Shape { heads: [2, 1], page: 16, block: 16, pages: 128, max_pages: 20, rows: 2, ..shape(rng) };
        let decoder = create(backend, &shape, vwd_decoder_policy { k: 4, ..PRR });
        let mut engine = Engine::new(backend, rng, shape);
        engine.join(250);
        engine.join(310);
        let queries = rng.normals(&[2, 2, shape.dim]).map(|&x| shape.dtype.round(x));
        // The number of blocks that each of these sequences, the rows of a step, missed.
        let step = |rows: [usize; 2], is_first: bool| {
            let lens = ints(backend, &rows.map(|sequence| engine.sequences[sequence].len as i64));
            let begin = ints(backend, &[0, 0]);
            let table = Tensor::ints(backend, I32, &engine.table(&rows), &Layout::default());
            let sequences = ints(backend, &rows.map(|sequence| [5, 3][sequence]));
            let of_rows = Array::from_fn(&[2, 2, shape.dim], |at| queries[[rows[at[0]], at[1], at[2]]]);
            let q = Tensor::floats(backend, shape.dtype, &of_rows, &Layout::default());
            let out = Tensor::poisoned(backend, F32, &[2, 2, shape.value_dim], &Layout::default());
            let begin = if is_first { begin.c() } else { absent() };
            let step = vwd_decoder_step {
                page_table: table.c(),
                seq_lens: lens.c(),
                begin,
                sequences: sequences.c(),
                ..args()
            };
            decoder.begin(backend, &step);
            let attend = vwd_decoder_attend_args { k: engine.k.c(), v: engine.v.c(), q: q.c(), out: out.c(), ..args() };
            decoder.attend(backend, &attend);
            decoder.missed(backend, 2, 1)
        };
        let first = step([0, 1], true);
        if first.contains(&0) {
            // Nothing was known, and by chance nothing missed.
            return;
        }
        shown += 1;
        assert_eq!(step([1, 0], false), [0, 0], "the same queries, in other rows");
        decoder.reset(backend, &[3, -1]);
        assert_eq!(step([0, 1], false), [0, first[1]], "after sequence 3 was forgotten");
        let details = decoder.details();
        assert_eq!(decoder.counts(backend, details.selected, 2, 1), [4, 4]);
        assert_eq!(decoder.counts(backend, details.predicted, 2, 1), [5, 5]);
    });
    assert!(shown > 0);
}

fn decoder_foresee_errors_name_the_argument(backend: &Backend) {
    let shape = Shape { heads: [4, 2], dim: 16, value_dim: 16, dtype: F32, rows: 2, ..shape(&mut Rng::new(0)) };
    let decoder = create(backend, &shape, FORESEEN);
    let rng = &mut Rng::new(1);
    let [forecast, narrow] = [4, 3].map(|heads| Map::random(rng, [heads, 16, 24], None, false).load(backend));
    let floats = |extents: &[usize]| Tensor::floats(backend, F32, &Array::filled(extents, 0.5), &Layout::default());
    let (q, x) = (floats(&[2, 4, 16]), floats(&[2, 24]));
    let fails = |forecast: *const vwd_forecast, args: vwd_decoder_foresee_args, pieces: &[&str]| {
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_foresee(decoder.0, forecast, &args, backend.stream()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    let none = std::ptr::null();
    let (by_queries, by_stream) =
        (vwd_decoder_foresee_args { q: q.c(), ..args() }, vwd_decoder_foresee_args { x: x.c(), ..args() });
    fails(none, by_queries, &["decoder", "no step", "vwd_decoder_begin"]);
    let lens = ints(backend, &[9, 2]);
    decoder.begin(backend, &vwd_decoder_step { seq_lens: lens.c(), ..args() });
    fails(none, vwd_decoder_foresee_args { layer: 1, ..by_queries }, &["layer", "1", "0 … 0"]);
    fails(none, vwd_decoder_foresee_args { flags: 1, ..by_queries }, &["flags", "1"]);
    fails(none, args(), &["q", "absent without a forecast"]);
    fails(forecast.0, by_queries, &["q", "given beside a forecast"]);
    fails(none, vwd_decoder_foresee_args { x: x.c(), ..by_queries }, &["x", "given without a forecast"]);
    let (three, wide) = (floats(&[2, 3, 16]), floats(&[2, 4, 24]));
    fails(none, vwd_decoder_foresee_args { q: three.c(), ..args() }, &["q", "3 heads", "Hq=4 or Hk=2"]);
    fails(none, vwd_decoder_foresee_args { q: wide.c(), ..args() }, &["q", "D=16"]);
    fails(narrow.0, by_stream, &["forecast", "3 heads of 16", "Hq=4 or Hk=2"]);
    fails(forecast.0, vwd_decoder_foresee_args { map: 1, ..by_stream }, &["map", "1", "0 to 0"]);
    fails(forecast.0, vwd_decoder_foresee_args { x: q.c(), ..args() }, &["x", "shape [2, 4, 16]"]);
    let (options, mut unsolved) =
        (vwd_forecast_options { layers: 1, input_dim: 24, q_heads: 4, head_dim: 16, ..args() }, std::ptr::null_mut());
    // SAFETY: everything is valid; released once.
    unsafe {
        assert_ok(vwd_forecast_create(backend.session(), &options, &mut unsolved));
        fails(unsolved, by_stream, &["map: 0 has no map", "solved or loaded"]);
        vwd_forecast_release(unsolved);
    }
    if backend.is_cuda() {
        let elsewhere = Map::random(rng, [4, 16, 24], None, false).load(&Backend::cpu(1));
        fails(elsewhere.0, by_stream, &["forecast: of a session on the CPU", "one of a session on CUDA device 0"]);
    }
    decoder.foresee(backend, none, &by_queries);
    decoder.foresee(backend, forecast.0, &by_stream);
    // Waits for what reads x and the forecast.
    decoder.begin(backend, &vwd_decoder_step { seq_lens: lens.c(), ..args() });
}
