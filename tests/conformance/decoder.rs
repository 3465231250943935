//! The decoder: its steps are the calls that they are composed of, drafts verified densely give the text of dense attention, and
//! what was accepted is counted. What the strategies promise is in decoder/strategies.rs.

pub mod model;
pub mod strategies;

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    decoder_equals_the_calls_that_it_is_composed_of_while_sequences_come_go_and_fork,
    decoder_with_a_budget_that_covers_everything_equals_dense_attention_bit_for_bit,
    decoder_gives_the_text_of_dense_attention_from_verified_drafts,
    decoder_counts_what_was_accepted_and_recommends_a_draft_length,
    decoder_errors_name_the_argument,
];

pub struct Decoder(*mut vwd_decoder);

impl Decoder {
    fn create(backend: &Backend, options: &vwd_decoder_options) -> Decoder {
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_create(backend.session(), options, &mut decoder) });
        Decoder(decoder)
    }

    fn begin(&self, backend: &Backend, step: &vwd_decoder_step) {
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_decoder_begin(self.0, step, backend.stream()) });
    }

    fn attend(&self, backend: &Backend, args: &vwd_decoder_attend_args) {
        let mut bytes = 0;
        // SAFETY: the arguments are valid.
        unsafe {
            assert_ok(vwd_decoder_attend_scratch(self.0, args, &mut bytes));
            assert_ok(vwd_session_reserve(backend.session().cast_mut(), backend.stream(), bytes));
            backend.finish(vwd_decoder_attend(self.0, args, backend.stream()));
        }
    }

    fn details(&self) -> vwd_decoder_details {
        let mut details = args();
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_decoder_info(self.0, &mut details) });
        details
    }

    fn read(&self, backend: &Backend, t: vwd_tensor) -> Vec<u32> {
        let mut bytes = vec![0; t.shape[0] as usize * 4];
        backend.read(t.data as usize, &mut bytes);
        bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: created once, and its calls have ended.
        unsafe { vwd_decoder_release(self.0) }
    }
}

fn ints<'b>(backend: &'b Backend, values: &[i64]) -> Tensor<'b> {
    Tensor::ints(backend, I32, &Array::new(&[values.len()], values.to_vec()), &Layout::default())
}

/// A layer of an engine: pages, and the sequences in them.
#[derive(Clone, Copy)]
struct Shape {
    heads: [usize; 2],
    dim: usize,
    value_dim: usize,
    dtype: DType,
    page: usize,
    block: usize,
    pages: usize,
    max_pages: usize,
    rows: usize,
    positions: usize,
}

impl Shape {
    fn options(&self, policy: vwd_decoder_policy) -> vwd_decoder_options {
        vwd_decoder_options {
            layers: 1,
            max_rows: self.rows as u32,
            max_positions: self.positions as u32,
            query_heads: self.heads[0] as u32,
            kv_heads: self.heads[1] as u32,
            key_dim: self.dim as u32,
            value_dim: self.value_dim as u32,
            dtype_code: self.dtype.code as u32,
            dtype_bits: self.dtype.bits as u32,
            page_size: self.page as u32,
            pages: self.pages as u32,
            block_size: self.block as u32,
            scale: 0.25,
            policy,
            ..args()
        }
    }
}

#[derive(Clone)]
struct Sequence {
    pages: Vec<usize>,
    len: usize,
    /// The first token that the decoder has not summarised.
    begin: Option<usize>,
}

struct Engine<'b> {
    backend: &'b Backend,
    layout: Layout,
    shape: Shape,
    k: Tensor<'b>,
    v: Tensor<'b>,
    /// What k and v hold.
    keys: Array<f64>,
    values: Array<f64>,
    users: Vec<usize>,
    sequences: Vec<Sequence>,
}

impl<'b> Engine<'b> {
    fn new(backend: &'b Backend, rng: &mut Rng, shape: Shape) -> Engine<'b> {
        let extents = |dim| [shape.pages, shape.page, shape.heads[1], dim];
        let random = |rng: &mut Rng, dim| rng.normals(&extents(dim)).map(|&x| shape.dtype.round(x));
        let (keys, values) = (random(rng, shape.dim), random(rng, shape.value_dim));
        let layout = if rng.one_in(2) { Layout::ordered(&[0, 2, 1, 3]) } else { Layout::default() };
        let k = Tensor::floats(backend, shape.dtype, &keys, &layout);
        let v = Tensor::floats(backend, shape.dtype, &values, &layout);
        Engine { backend, layout, shape, k, v, keys, values, users: vec![0; shape.pages], sequences: vec![] }
    }

    /// A page for each token below `len`; whether there were enough.
    fn grow(&mut self, sequence: usize, len: usize) -> bool {
        while self.sequences[sequence].pages.len() * self.shape.page < len {
            let Some(free) = self.users.iter().position(|&users| users == 0) else { return false };
            self.users[free] = 1;
            self.sequences[sequence].pages.push(free);
        }
        self.sequences[sequence].pages.len() <= self.shape.max_pages
    }

    fn join(&mut self, len: usize) {
        self.sequences.push(Sequence { pages: vec![], len: 0, begin: Some(0) });
        let last = self.sequences.len() - 1;
        // The prompt is what the pages held: the engine has written it.
        if self.grow(last, len) { self.sequences[last].len = len } else { self.leave(last) }
    }

    fn leave(&mut self, sequence: usize) {
        for page in self.sequences.remove(sequence).pages {
            self.users[page] -= 1;
        }
    }

    /// Shares whole pages and whole blocks; copies the rest.
    fn fork(&mut self, parent: usize) {
        let Sequence { pages, len, begin } = self.sequences[parent].clone();
        // Only one sequence summarises the tokens of a shared page.
        if begin.is_some() {
            return;
        }
        let whole = len / self.shape.page.max(self.shape.block) * self.shape.page.max(self.shape.block);
        let shared = whole / self.shape.page;
        pages[..shared].iter().for_each(|&page| self.users[page] += 1);
        self.sequences.push(Sequence { pages: pages[..shared].to_vec(), len, begin });
        let child = self.sequences.len() - 1;
        if !self.grow(child, len) {
            return self.leave(child);
        }
        let copies: Vec<_> =
            (shared..self.sequences[child].pages.len()).map(|n| (pages[n], self.sequences[child].pages[n])).collect();
        for values in [&mut self.keys, &mut self.values] {
            let size = values.data.len() / self.shape.pages;
            for &(from, to) in &copies {
                values.data.copy_within(from * size..(from + 1) * size, to * size);
            }
        }
        self.k = Tensor::floats(self.backend, self.shape.dtype, &self.keys, &self.layout);
        self.v = Tensor::floats(self.backend, self.shape.dtype, &self.values, &self.layout);
    }

    fn table(&self, rows: &[usize]) -> Array<i64> {
        Array::from_fn(&[rows.len(), self.shape.max_pages], |at| {
            self.sequences[rows[at[0]]].pages.get(at[1]).map_or(-1, |&page| page as i64)
        })
    }
}

const POLICY: vwd_decoder_policy = vwd_decoder_policy {
    method: VWD_SELECT_MINMAX,
    k: 4,
    init_blocks: 1,
    local_blocks: 1,
    dense_below: 0,
    window: 0,
    strategy: VWD_STRATEGY_SERIAL,
    predict: 0,
    ratio: 0.0,
    holt: vwd_holt { alpha: 0.0, beta: 0.0, gamma: 0.0 },
    reserved: [0; 4],
};

/// Attention of a step by the calls themselves, with summaries that are built anew. Blocks are selected by `wanted`, and attended by `q`. `is_ahead`: blocks are
/// selected from the tokens before the step, and the block of its token is added.
struct Composed<'b> {
    out: Tensor<'b>,
    is_dense: Vec<bool>,
}

#[allow(clippy::too_many_arguments)]
fn compose<'b>(
    backend: &'b Backend,
    engine: &Engine,
    policy: &vwd_decoder_policy,
    [table, lens]: [&Tensor; 2],
    modes: &[u32],
    counts: &[usize],
    tokens: &[usize],
    [wanted, q]: [&Tensor; 2],
    is_ahead: bool,
    out_type: DType,
) -> Composed<'b> {
    let shape = &engine.shape;
    let (batch, heads) = (modes.len(), shape.heads[1]);
    let blocks = (shape.max_pages * shape.page).div_ceil(shape.block);
    let covered = policy.k.max(policy.init_blocks + policy.local_blocks) as usize * shape.block;
    let threshold = covered.max((policy.dense_below as usize).saturating_sub(1));
    let is_dense: Vec<bool> = (0..batch).map(|i| modes[i] == VWD_DECODER_DENSE || tokens[i] <= threshold).collect();
    let of = |dense: bool| {
        let taken = |i: usize| modes[i] != VWD_DECODER_SKIP && is_dense[i] == dense;
        ints(backend, &(0..batch).map(|i| if taken(i) { counts[i] as i64 } else { 0 }).collect::<Vec<_>>())
    };
    let (sparse_lens, dense_lens) = (of(false), of(true));
    let rows = |dtype, extents: &[usize]| Tensor::poisoned(backend, dtype, extents, &Layout::default());
    let summary = |channels, dtype| rows(dtype, &[batch, blocks, heads, channels]);
    let mut index = vwd_index { block_size: shape.block as u32, ..args() };
    let is_axis = policy.method == VWD_SELECT_AXIS;
    let (first, second) = match is_axis {
        false => (summary(shape.dim, shape.dtype), summary(shape.dim, shape.dtype)),
        true => (summary(shape.dim, U8), summary(4 * shape.dim.div_ceil(32), F16)),
    };
    if is_axis {
        (index.kind, index.axes, index.axis_range) = (VWD_INDEX_AXIS, first.c(), second.c());
    } else {
        (index.kind, index.key_max, index.key_min) = (VWD_INDEX_MINMAX, first.c(), second.c());
    }
    let before =
        ints(backend, &(0..batch).map(|i| (tokens[i] - counts[i] * is_ahead as usize) as i64).collect::<Vec<_>>());
    let update =
        vwd_index_update_args { index: &index, k: engine.k.c(), page_table: table.c(), seq_lens: before.c(), ..args() };
    let cap = policy.k.max(policy.init_blocks + policy.local_blocks) as usize + is_ahead as usize;
    let (ids, list_counts) = (rows(I32, &[batch, heads, cap]), rows(I32, &[batch, heads]));
    let list = vwd_block_list { ids: ids.c(), counts: list_counts.c(), slots: absent() };
    let select = vwd_select_blocks_args {
        method: policy.method,
        block_size: shape.block as u32,
        k: policy.k,
        init_blocks: policy.init_blocks,
        local_blocks: policy.local_blocks,
        scale: 0.25,
        index: &index,
        q: wanted.c(),
        q_lens: sparse_lens.c(),
        seq_lens: before.c(),
        selected: list,
        ..args()
    };
    let kv = vwd_paged_kv { k: engine.k.c(), v: engine.v.c(), page_table: table.c(), seq_lens: lens.c(), ..args() };
    let extents = [batch, shape.positions, shape.heads[0], shape.value_dim];
    let [out, dense_out] = [rows(out_type, &extents), rows(out_type, &extents)];
    let attention = vwd_attention_args { scale: 0.25, window: policy.window, kv: &kv, q: q.c(), ..args() };
    let sparse =
        vwd_attention_args { block_size: shape.block as u32, q_lens: sparse_lens.c(), list, out: out.c(), ..attention };
    let dense = vwd_attention_args { q_lens: dense_lens.c(), out: dense_out.c(), ..attention };
    // SAFETY: the arguments are valid.
    unsafe {
        let (session, stream) = (backend.session(), backend.stream());
        backend.finish(vwd_index_update(session, &update, stream));
        backend.finish(vwd_select_blocks(session, &select, stream));
        if is_ahead {
            let (mut all, mut numbers) = (ids.read_ints(), list_counts.read_ints());
            for at in indices(&numbers.shape) {
                let (at, block) = ([at[0], at[1]], (tokens[at[0]].max(1) - 1) / shape.block);
                let n = numbers[at] as usize;
                if n > 0 && all[[at[0], at[1], n - 1]] < block as i64 {
                    all[[at[0], at[1], n]] = block as i64;
                    numbers[at] += 1;
                }
            }
            ids.refill_ints(&all);
            list_counts.refill_ints(&numbers);
        }
        backend.finish(vwd_attention(session, &sparse, stream));
        backend.finish(vwd_attention(session, &dense, stream));
    }
    let (sparse_values, dense_values) = (out.read_floats(), dense_out.read_floats());
    let joined = Array::from_fn(&extents, |at| {
        let at: [usize; 4] = at.try_into().unwrap();
        if is_dense[at[0]] { dense_values[at] } else { sparse_values[at] }
    });
    out.refill_floats(&joined);
    Composed { out, is_dense }
}

fn decoder_equals_the_calls_that_it_is_composed_of_while_sequences_come_go_and_fork(backend: &Backend) {
    rounds(backend.times(30) as u64, |rng| {
        let (page, block) = rng.pick(&[(16, 16), (64, 16), (16, 32), (8, 8), (4, 16)]);
        let heads = rng.pick(&[[2, 1], [4, 2], [8, 2], [3, 3]]);
        let shape = Shape {
            heads,
            dim: rng.pick(&[16, 64, 128]),
            value_dim: rng.pick(&[16, 64]),
            dtype: rng.pick(&[F32, F16, BF16]),
            page,
            block,
            pages: 1024usize.div_ceil(page),
            max_pages: 320usize.div_ceil(page),
            rows: 4,
            positions: rng.size(1..=5),
        };
        let policy = vwd_decoder_policy {
            method: rng.pick(&[VWD_SELECT_MINMAX, VWD_SELECT_AXIS]),
            k: rng.size(1..=5) as u32,
            dense_below: rng.pick(&[0, 100]),
            window: rng.pick(&[0, 0, 50]),
            ..POLICY
        };
        let decoder = Decoder::create(backend, &shape.options(policy));
        let mut engine = Engine::new(backend, rng, shape);
        for _ in 0..backend.times(12).max(6) {
            step(backend, rng, &decoder, &mut engine, &policy);
        }
    });
}

fn step(backend: &Backend, rng: &mut Rng, decoder: &Decoder, engine: &mut Engine, policy: &vwd_decoder_policy) {
    let shape = engine.shape;
    if engine.sequences.len() > 1 && rng.one_in(5) {
        let gone = rng.size(0..=engine.sequences.len() - 1);
        engine.leave(gone);
    }
    if engine.sequences.len() < 5 {
        engine.join(rng.size(1..=250));
    }
    if !engine.sequences.is_empty() && engine.sequences.len() < 6 && rng.one_in(3) {
        let parent = rng.size(0..=engine.sequences.len() - 1);
        engine.fork(parent);
    }
    let mut rows: Vec<usize> = (0..engine.sequences.len()).collect();
    rng.shuffle(&mut rows);
    rows.truncate(rng.size(1..=shape.rows));
    let mut counts: Vec<usize> = rows.iter().map(|_| rng.size(0..=shape.positions)).collect();
    for (&sequence, count) in rows.iter().zip(&mut counts) {
        // Tokens are written to pages of the sequence's own: forks copied what is not whole.
        let len = engine.sequences[sequence].len;
        if len + *count > shape.max_pages * shape.page || !engine.grow(sequence, len + *count) {
            *count = 0;
        }
    }
    let each = !rng.one_in(3);
    let one = rng.pick(&[VWD_DECODER_SPARSE, VWD_DECODER_DENSE]);
    let modes: Vec<u32> = rows.iter().map(|_| if each { rng.size(0..=2) as u32 } else { one }).collect();
    let extents = |dim| [rows.len(), shape.positions, shape.heads[1], dim];
    let random = |rng: &mut Rng, dim| rng.normals(&extents(dim)).map(|&x| shape.dtype.round(x));
    let (new_keys, new_values) = (random(rng, shape.dim), random(rng, shape.value_dim));
    let layout = Layout::random(rng, 4);
    let new_k = Tensor::floats(backend, shape.dtype, &new_keys, &layout);
    let new_v = Tensor::floats(backend, shape.dtype, &new_values, &Layout::default());
    let (mut tokens, mut begins) = (vec![], vec![]);
    for (i, &sequence) in rows.iter().enumerate() {
        let s = &mut engine.sequences[sequence];
        let is_taken = modes[i] != VWD_DECODER_SKIP;
        let first = s.len;
        begins.push(s.begin.map_or(i32::MAX as i64, |begin| begin as i64));
        tokens.push(first + counts[i]);
        if !is_taken {
            continue;
        }
        // Half of the tokens stay: the others are drafts that are rejected, and written again.
        s.len = first + if rng.one_in(2) { counts[i] } else { counts[i].min(1) };
        s.begin = None;
        for r in 0..counts[i] {
            let (page, row) = (s.pages[(first + r) / shape.page], (first + r) % shape.page);
            for g in 0..shape.heads[1] {
                for c in 0..shape.dim {
                    engine.keys[[page, row, g, c]] = new_keys[[i, r, g, c]];
                }
                for c in 0..shape.value_dim {
                    engine.values[[page, row, g, c]] = new_values[[i, r, g, c]];
                }
            }
        }
    }
    let q_type = rng.pick(&[shape.dtype, F32]);
    let queries = rng.normals(&[rows.len(), shape.positions, shape.heads[0], shape.dim]).map(|&x| q_type.round(x));
    let q = Tensor::floats(backend, q_type, &queries, &Layout::random_rows(rng, 4));
    let out_extents = [rows.len(), shape.positions, shape.heads[0], shape.value_dim];
    let out = Tensor::poisoned(backend, q_type, &out_extents, &Layout::random(rng, 4));
    let table_values = engine.table(&rows);
    let table = Tensor::ints(backend, I32, &table_values, &Layout::random(rng, 2));
    let lens = ints(backend, &tokens.iter().map(|&n| n as i64).collect::<Vec<_>>());
    let q_lens = ints(backend, &counts.iter().map(|&n| n as i64).collect::<Vec<_>>());
    let begin = ints(backend, &begins);
    let mode_tensor = ints(backend, &modes.iter().map(|&mode| mode as i64).collect::<Vec<_>>());
    let mut step = vwd_decoder_step {
        mode: one,
        positions: shape.positions as u32,
        page_table: table.c(),
        seq_lens: lens.c(),
        q_lens: q_lens.c(),
        begin: begin.c(),
        ..args()
    };
    if each {
        (step.mode, step.modes) = (0, mode_tensor.c());
    }
    let attend = vwd_decoder_attend_args {
        k: engine.k.c(),
        v: engine.v.c(),
        new_k: new_k.c(),
        new_v: new_v.c(),
        q: q.c(),
        out: out.c(),
        ..args()
    };
    decoder.begin(backend, &step);
    decoder.attend(backend, &attend);
    assert_same("keys in their pages", &engine.k, &engine.keys);
    assert_same("values in their pages", &engine.v, &engine.values);
    let composed = compose(backend, engine, policy, [&table, &lens], &modes, &counts, &tokens, [&q, &q], false, q_type);
    let about = format!("modes {modes:?}, positions {counts:?} of {tokens:?}");
    assert_same(&about, &out, &composed.out.read_floats());
    check_dense_rows(engine, &table_values, policy, &modes, &composed.is_dense, &counts, &tokens, &queries, &out);
}

/// Compares bits, but for the sign of zeros, and names the first element that differs.
fn assert_same(about: &str, found: &Tensor, expected: &Array<f64>) {
    let found = found.read_floats();
    for at in indices(&expected.shape) {
        let at: [usize; 4] = at.try_into().unwrap();
        assert!(found[at] == expected[at], "{about}: {} at {at:?}, expected {}", found[at], expected[at]);
    }
}

/// Against plain formulas in double precision.
#[allow(clippy::too_many_arguments)]
fn check_dense_rows(
    engine: &Engine,
    table: &Array<i64>,
    policy: &vwd_decoder_policy,
    modes: &[u32],
    is_dense: &[bool],
    counts: &[usize],
    tokens: &[usize],
    queries: &Array<f64>,
    out: &Tensor,
) {
    let (shape, found) = (&engine.shape, out.read_floats());
    for i in (0..modes.len()).filter(|&i| modes[i] != VWD_DECODER_SKIP && is_dense[i]) {
        for r in 0..counts[i] {
            for h in 0..shape.heads[0] {
                let g = h / (shape.heads[0] / shape.heads[1]);
                let seen = oracle::seen(tokens[i], counts[i], r, policy.window as usize);
                let places: Vec<[usize; 3]> =
                    seen.map(|t| [table[[i, t / shape.page]] as usize, t % shape.page, g]).collect();
                let rows = |of: &'_ Array<f64>| places.iter().map(|&at| of.row(at).to_vec()).collect::<Vec<_>>();
                let (keys, values) = (rows(&engine.keys), rows(&engine.values));
                let refs = |rows: &'_ [Vec<f64>]| rows.iter().map(|row| row.as_slice().to_vec()).collect::<Vec<_>>();
                let (keys, values) = (refs(&keys), refs(&values));
                let (keys, values): (Vec<&[f64]>, Vec<&[f64]>) =
                    (keys.iter().map(Vec::as_slice).collect(), values.iter().map(Vec::as_slice).collect());
                let q = queries.row([i, r, h]);
                let state = oracle::capped_attention(q, &keys, &values, shape.value_dim, 0.25, None);
                for (c, &expected) in state.out().iter().enumerate() {
                    let x = found[[i, r, h, c]];
                    // As in the cases of attention; weights of 16-bit kernels are rounded to the values' type.
                    let tolerance = 4e-5 + 2.0 * shape.dtype.epsilon() + out_rounding(out, expected);
                    assert!((x - expected).abs() <= tolerance, "row {i}, position {r}: {x}, expected {expected}");
                }
            }
        }
    }
}

fn out_rounding(out: &Tensor, x: f64) -> f64 {
    DType { code: out.c().dtype_code, bits: out.c().dtype_bits }.rounding(x)
}

fn decoder_with_a_budget_that_covers_everything_equals_dense_attention_bit_for_bit(backend: &Backend) {
    rounds(3, |rng| {
        let shape = Shape {
            heads: [4, 2],
            dim: 64,
            value_dim: 64,
            dtype: F16,
            page: 16,
            block: 16,
            pages: 32,
            max_pages: 8,
            rows: 2,
            positions: 2,
        };
        let mut engine = Engine::new(backend, rng, shape);
        engine.join(100);
        engine.join(7);
        let q = Tensor::floats(backend, F16, &rng.normals(&[2, 2, 4, 64]), &Layout::default());
        let (table, lens) =
            (Tensor::ints(backend, I32, &engine.table(&[0, 1]), &Layout::default()), ints(backend, &[100, 7]));
        let run = |mode, k| {
            let decoder = Decoder::create(backend, &shape.options(vwd_decoder_policy { k, ..POLICY }));
            let begin = ints(backend, &[0, 0]);
            let step = vwd_decoder_step {
                mode,
                positions: 2,
                page_table: table.c(),
                seq_lens: lens.c(),
                begin: begin.c(),
                ..args()
            };
            let out = Tensor::poisoned(backend, F16, &[2, 2, 4, 64], &Layout::default());
            decoder.begin(backend, &step);
            let attend = vwd_decoder_attend_args { k: engine.k.c(), v: engine.v.c(), q: q.c(), out: out.c(), ..args() };
            decoder.attend(backend, &attend);
            out.read_floats()
        };
        let dense = run(VWD_DECODER_DENSE, 3);
        assert_eq!(run(VWD_DECODER_SPARSE, 7), dense);
        assert_ne!(run(VWD_DECODER_SPARSE, 3), dense);
    });
}

/// A model of two layers whose weights are random: each token's text depends on all tokens before it.
struct Model {
    shape: Shape,
    /// [vocabulary, width]
    embedding: Array<f64>,
    /// [layers, width, out]: of queries, keys, values, and back.
    queries: Array<f64>,
    keys: Array<f64>,
    values: Array<f64>,
    back: Array<f64>,
}

const LAYERS: usize = 2;
const WIDTH: usize = 16;
const VOCABULARY: usize = 24;

fn times(x: &[f64], weights: &Array<f64>, layer: usize, out: usize) -> Vec<f64> {
    (0..out).map(|o| x.iter().enumerate().map(|(n, x)| x * weights[[layer, n, o]]).sum()).collect()
}

impl Model {
    fn new(rng: &mut Rng, shape: Shape) -> Model {
        let map = |rng: &mut Rng, from: usize, to: usize, gain: f64| {
            rng.normals(&[LAYERS, from, to]).map(|&x| x * gain / (from as f64).sqrt())
        };
        let (q, k, v) = (shape.heads[0] * shape.dim, shape.heads[1] * shape.dim, shape.heads[1] * shape.value_dim);
        Model {
            shape,
            embedding: rng.normals(&[VOCABULARY, WIDTH]),
            queries: map(rng, WIDTH, q, 1.5),
            keys: map(rng, WIDTH, k, 1.5),
            values: map(rng, WIDTH, v, 1.0),
            back: map(rng, shape.heads[0] * shape.value_dim, WIDTH, 2.0),
        }
    }
}

/// Sequences that decode side by side, with a decoder of their own.
struct Decoding<'b, 'm> {
    backend: &'b Backend,
    model: &'m Model,
    decoder: Decoder,
    caches: Vec<[Tensor<'b>; 2]>,
    table: Tensor<'b>,
}

impl<'b, 'm> Decoding<'b, 'm> {
    fn new(backend: &'b Backend, model: &'m Model) -> Decoding<'b, 'm> {
        let shape = &model.shape;
        let policy = vwd_decoder_policy { k: 3, ..POLICY };
        let options = vwd_decoder_options { layers: LAYERS as u32, ..shape.options(policy) };
        let cache = |dim| {
            let zeros = Array::filled(&[shape.pages, shape.page, shape.heads[1], dim], 0.0);
            Tensor::floats(backend, shape.dtype, &zeros, &Layout::default())
        };
        let table = Array::from_fn(&[shape.rows, shape.max_pages], |at| (at[1] * shape.rows + at[0]) as i64);
        Decoding {
            backend,
            model,
            decoder: Decoder::create(backend, &options),
            caches: (0..LAYERS).map(|_| [cache(shape.dim), cache(shape.value_dim)]).collect(),
            table: Tensor::ints(backend, I32, &table, &Layout::default()),
        }
    }

    /// The next token after each of these tokens, which follow the first `begin` of each sequence.
    fn run(&self, modes: &[u32], begin: &[usize], tokens: &[Vec<usize>]) -> Vec<Vec<usize>> {
        let (backend, model, shape) = (self.backend, self.model, &self.model.shape);
        let (rows, positions) = (tokens.len(), tokens.iter().map(Vec::len).max().unwrap().max(1));
        let lens: Vec<i64> = (0..rows).map(|i| (begin[i] + tokens[i].len()) as i64).collect();
        let counts: Vec<i64> = tokens.iter().map(|tokens| tokens.len() as i64).collect();
        let [lens, counts, modes] = [
            ints(backend, &lens),
            ints(backend, &counts),
            ints(backend, &modes.iter().map(|&m| m as i64).collect::<Vec<_>>()),
        ];
        let step = vwd_decoder_step {
            positions: positions as u32,
            page_table: self.table.c(),
            seq_lens: lens.c(),
            q_lens: counts.c(),
            modes: modes.c(),
            ..args()
        };
        self.decoder.begin(backend, &step);
        let token = |i: usize, r: usize| tokens[i].get(r).copied();
        let mut hidden: Vec<Vec<Vec<f64>>> = (0..rows)
            .map(|i| {
                let of = |r| token(i, r).map_or(vec![0.0; WIDTH], |t| model.embedding.row([t]).to_vec());
                (0..positions).map(of).collect()
            })
            .collect();
        for layer in 0..LAYERS {
            let place = |weights: &Array<f64>, heads: usize, dim: usize| {
                let values = (0..rows * positions)
                    .flat_map(|n| {
                        let h = &hidden[n / positions][n % positions];
                        // The position enters as a phase, so that no two tokens are alike.
                        let t = (begin[n / positions] + n % positions) as f64;
                        let turned: Vec<f64> =
                            h.iter().enumerate().map(|(c, x)| x + (t * 0.3 + c as f64).sin()).collect();
                        times(&turned, weights, layer, heads * dim)
                    })
                    .map(|x| shape.dtype.round(x))
                    .collect();
                Tensor::floats(
                    backend,
                    shape.dtype,
                    &Array::new(&[rows, positions, heads, dim], values),
                    &Layout::default(),
                )
            };
            let q = place(&model.queries, shape.heads[0], shape.dim);
            let new_k = place(&model.keys, shape.heads[1], shape.dim);
            let new_v = place(&model.values, shape.heads[1], shape.value_dim);
            let extents = [rows, positions, shape.heads[0], shape.value_dim];
            let out = Tensor::poisoned(backend, F32, &extents, &Layout::default());
            let [k, v] = &self.caches[layer];
            let attend = vwd_decoder_attend_args {
                layer: layer as u32,
                k: k.c(),
                v: v.c(),
                new_k: new_k.c(),
                new_v: new_v.c(),
                q: q.c(),
                out: out.c(),
                ..args()
            };
            self.decoder.attend(backend, &attend);
            let out = out.read_floats();
            for (i, row) in hidden.iter_mut().enumerate() {
                for (r, h) in row.iter_mut().enumerate() {
                    let back = times(out.row([i, r]), &model.back, layer, WIDTH);
                    h.iter_mut().zip(back).for_each(|(h, b)| *h += b);
                }
            }
        }
        let next = |h: &[f64]| {
            let logit = |t: &usize| oracle::dot(model.embedding.row([*t]), h);
            (0..VOCABULARY).max_by(|a, b| logit(a).total_cmp(&logit(b))).unwrap()
        };
        (0..rows).map(|i| (0..tokens[i].len()).map(|r| next(&hidden[i][r])).collect()).collect()
    }
}

fn decoder_gives_the_text_of_dense_attention_from_verified_drafts(backend: &Backend) {
    const GAMMA: usize = 4;
    rounds(1, |rng| {
        let shape = Shape {
            heads: [4, 2],
            dim: 16,
            value_dim: 16,
            dtype: F32,
            page: 8,
            block: 8,
            pages: 3 * 48,
            max_pages: 48,
            rows: 3,
            positions: GAMMA + 1,
        };
        let model = Model::new(rng, shape);
        let wanted = backend.times(300);
        // Lengths differ; sparse rows begin to choose past 24 tokens.
        let prompts: Vec<Vec<usize>> =
            (0..shape.rows).map(|i| (0..5 + 20 * i).map(|_| rng.size(0..=VOCABULARY - 1)).collect()).collect();
        let prefill = |decoding: &Decoding| -> Vec<usize> {
            let longest = prompts.iter().map(Vec::len).max().unwrap();
            let mut next = vec![0; shape.rows];
            for at in (0..longest).step_by(GAMMA + 1) {
                let part = |p: &Vec<usize>| p[at.min(p.len())..(at + GAMMA + 1).min(p.len())].to_vec();
                let tokens: Vec<_> = prompts.iter().map(part).collect();
                let begin: Vec<_> = prompts.iter().map(|p| at.min(p.len())).collect();
                let found = decoding.run(&[VWD_DECODER_DENSE; 3], &begin, &tokens);
                for (i, found) in found.iter().enumerate() {
                    if let Some(&last) = found.last() {
                        next[i] = last;
                    }
                }
            }
            next
        };
        let dense = Decoding::new(backend, &model);
        let mut expected: Vec<Vec<usize>> = prefill(&dense).into_iter().map(|t| vec![t]).collect();
        for n in 0..wanted + GAMMA {
            let begin: Vec<_> = prompts.iter().map(|p| p.len() + n).collect();
            let last: Vec<_> = expected.iter().map(|text| vec![*text.last().unwrap()]).collect();
            let next = dense.run(&[VWD_DECODER_DENSE; 3], &begin, &last);
            expected.iter_mut().zip(next).for_each(|(text, next)| text.push(next[0]));
        }

        let own = Decoding::new(backend, &model);
        let mut texts: Vec<Vec<usize>> = prefill(&own).into_iter().map(|t| vec![t]).collect();
        while texts.iter().any(|text| text.len() < wanted) {
            let begin: Vec<_> = (0..3).map(|i| prompts[i].len() + texts[i].len() - 1).collect();
            let recommended = own.decoder.read(backend, own.decoder.details().draft_lens);
            let done = |i: usize| texts[i].len() >= wanted;
            let gamma: Vec<_> = (0..3).map(|i| if done(i) { 0 } else { recommended[i] as usize }).collect();
            // Row 2's drafts come from elsewhere, and are mostly wrong.
            let mut drafts: Vec<Vec<usize>> = vec![vec![]; 3];
            drafts[2] = (0..gamma[2]).map(|_| rng.size(0..=VOCABULARY - 1)).collect();
            for n in 0..gamma[0].max(gamma[1]) {
                let drafting = |i: usize| i < 2 && n < gamma[i];
                let modes: Vec<u32> =
                    (0..3).map(|i| if drafting(i) { VWD_DECODER_SPARSE } else { VWD_DECODER_SKIP }).collect();
                let last = |i: usize| *drafts[i].last().unwrap_or(texts[i].last().unwrap());
                let tokens: Vec<_> = (0..3).map(|i| if drafting(i) { vec![last(i)] } else { vec![] }).collect();
                let at: Vec<_> = begin.iter().map(|begin| begin + n).collect();
                let next = own.run(&modes, &at, &tokens);
                (0..2).filter(|&i| drafting(i)).for_each(|i| drafts[i].push(next[i][0]));
            }
            let modes: Vec<u32> = (0..3).map(|i| if done(i) { VWD_DECODER_SKIP } else { VWD_DECODER_DENSE }).collect();
            let tokens: Vec<Vec<usize>> = (0..3)
                .map(|i| if done(i) { vec![] } else { [&[*texts[i].last().unwrap()], &drafts[i][..]].concat() })
                .collect();
            let target = own.run(&modes, &begin, &tokens);
            let at = |rows: &[Vec<usize>], i: usize, n: usize| rows[i].get(n).map_or(-1, |&t| t as i64);
            let draft = Array::from_fn(&[3, GAMMA], |x| at(&drafts, x[0], x[1]));
            let target = Array::from_fn(&[3, GAMMA + 1], |x| at(&target, x[0], x[1]));
            let layout = Layout::default();
            let [draft, target] =
                [Tensor::ints(backend, I32, &draft, &layout), Tensor::ints(backend, I32, &target, &layout)];
            let lens = ints(backend, &drafts.iter().map(|d| d.len() as i64).collect::<Vec<_>>());
            let sequences = ints(backend, &(0..3).map(|i| if done(i) { -1 } else { i as i64 }).collect::<Vec<_>>());
            let [accepted, next] = [0; 2].map(|_| Tensor::poisoned(backend, I32, &[3], &layout));
            let committed = Tensor::poisoned(backend, I32, &[3, GAMMA + 1], &layout);
            let accept = vwd_decoder_accept_args {
                draft: draft.c(),
                target: target.c(),
                draft_lens: lens.c(),
                sequences: sequences.c(),
                accepted: accepted.c(),
                next_token: next.c(),
                committed: committed.c(),
                ..args()
            };
            // SAFETY: the arguments are valid.
            backend.finish(unsafe { vwd_decoder_accept(own.decoder.0, &accept, backend.stream()) });
            let (accepted, committed) = (accepted.read_ints(), committed.read_ints());
            for i in (0..3).filter(|&i| modes[i] == VWD_DECODER_DENSE) {
                texts[i].extend((0..=accepted[[i]] as usize).map(|n| committed[[i, n]] as usize));
            }
        }
        for (i, (text, expected)) in texts.iter().zip(&expected).enumerate() {
            assert_eq!(text[..wanted], expected[..wanted], "sequence {i}");
        }
        let accepted = own.decoder.read(backend, own.decoder.details().accepted);
        assert!(accepted[0] > 0, "no draft was accepted, so that nothing was tested: {accepted:?}");
    });
}

fn decoder_counts_what_was_accepted_and_recommends_a_draft_length(backend: &Backend) {
    let shape = Shape {
        heads: [1, 1],
        dim: 16,
        value_dim: 16,
        dtype: F32,
        page: 8,
        block: 8,
        pages: 1,
        max_pages: 1,
        rows: 2,
        positions: 5,
    };
    let options = vwd_decoder_options { max_sequences: 3, draft_cost: 0.25, ..shape.options(POLICY) };
    let decoder = Decoder::create(backend, &options);
    // Of p, by the formula in double precision.
    let recommended = |p: f64| {
        let rate = |gamma: i32| (0..=gamma).map(|j| p.powi(j)).sum::<f64>() / (1.0 + 0.25 * gamma as f64);
        (0..=4).rev().max_by(|&a, &b| rate(a).total_cmp(&rate(b))).unwrap() as u32
    };
    let mut known = [(0.0f64, 0.0f64, 0u32, 0u32); 3];
    let check = |known: &[(f64, f64, u32, u32); 3]| {
        let details = decoder.details();
        let read = |t| decoder.read(backend, t);
        let (lens, acceptance) = (read(details.draft_lens), read(details.acceptance));
        for (i, &(hits, trials, drafted, accepted)) in known.iter().enumerate() {
            let p = (hits + 1.6) / (trials + 2.0);
            let found = f32::from_bits(acceptance[i]) as f64;
            assert!((found - p).abs() < 1e-5, "sequence {i}: {found}, expected {p}");
            assert_eq!(lens[i], recommended(p), "sequence {i}, p = {p}");
            assert_eq!((read(details.drafted)[i], read(details.accepted)[i]), (drafted, accepted), "sequence {i}");
        }
    };
    check(&known);
    let layout = Layout::default();
    for n in 0..12i64 {
        // Row 0 is always right, row 1 always wrong, and in the end drafts nothing.
        let draft = Array::from_fn(&[2, 4], |at| at[1] as i64 + 10 * at[0] as i64);
        let target = Array::from_fn(&[2, 5], |at| at[1] as i64);
        let drafted = [4, if n < 6 { 3 } else { 0 }];
        let (draft, target) =
            (Tensor::ints(backend, I64, &draft, &layout), Tensor::ints(backend, I64, &target, &layout));
        let (lens, sequences) = (ints(backend, &drafted), ints(backend, &[2, 0]));
        let (accepted, next) = (ints(backend, &[9, 9]), Tensor::poisoned(backend, I64, &[2], &layout));
        let accept = vwd_decoder_accept_args {
            draft: draft.c(),
            target: target.c(),
            draft_lens: lens.c(),
            sequences: sequences.c(),
            accepted: accepted.c(),
            next_token: next.c(),
            ..args()
        };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_decoder_accept(decoder.0, &accept, backend.stream()) });
        assert_eq!(accepted.read_ints().data, [4, 0]);
        for (sequence, drafted, accepted) in [(2, 4, 4), (0, drafted[1], 0)] {
            let (hits, trials, all, right) = &mut known[sequence];
            *hits = *hits * 0.9 + accepted as f64;
            *trials = *trials * 0.9 + drafted.min(accepted + 1) as f64;
            (*all, *right) = (*all + drafted as u32, *right + accepted as u32);
        }
        check(&known);
    }
    let sequences = ints(backend, &[2, -1, 7]);
    let reset = vwd_decoder_reset_args { sequences: sequences.c(), ..args() };
    // SAFETY: the arguments are valid.
    backend.finish(unsafe { vwd_decoder_reset(decoder.0, &reset, backend.stream()) });
    known[2] = (0.0, 0.0, 0, 0);
    check(&known);
}

fn decoder_errors_name_the_argument(backend: &Backend) {
    let shape = Shape {
        heads: [4, 2],
        dim: 16,
        value_dim: 16,
        dtype: F32,
        page: 8,
        block: 8,
        pages: 4,
        max_pages: 2,
        rows: 2,
        positions: 2,
    };
    let good = shape.options(POLICY);
    let create = |options: vwd_decoder_options, pieces: &[&str]| {
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_create(backend.session(), &options, &mut decoder) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    create(vwd_decoder_options { layers: 0, ..good }, &["options.layers", "0", "at least 1"]);
    create(vwd_decoder_options { block_size: 12, ..good }, &["options.block_size", "12", "page size 8"]);
    create(vwd_decoder_options { query_heads: 3, ..good }, &["options.query_heads", "3", "2 KV heads"]);
    create(vwd_decoder_options { max_draft: 2, ..good }, &["options.max_draft", "2", "max_positions, 2"]);
    create(vwd_decoder_options { policy_count: 3, ..good }, &["options.policy_count", "3", "1 layers"]);
    let policy = vwd_decoder_policy { method: VWD_SELECT_LABEL_MASS, ..POLICY };
    create(vwd_decoder_options { policy, ..good }, &["options.policy.method", "4"]);
    create(
        vwd_decoder_options { policy_count: 1, policies: &vwd_decoder_policy { k: 0, ..POLICY }, ..good },
        &["options.policies[0].k", "0"],
    );

    let policy = |policy: vwd_decoder_policy, pieces: &[&str]| create(vwd_decoder_options { policy, ..good }, pieces);
    let prr = vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, ..POLICY };
    policy(vwd_decoder_policy { strategy: 3, ..POLICY }, &["options.policy.strategy", "3", "VWD_STRATEGY_*"]);
    policy(vwd_decoder_policy { predict: 2, ..prr }, &["options.policy.predict", "2", "VWD_PREDICT_*"]);
    policy(vwd_decoder_policy { predict: 1, ..POLICY }, &["options.policy.predict", "1", "0 without VWD_STRATEGY_PRR"]);
    policy(vwd_decoder_policy { ratio: 0.5, ..prr }, &["options.policy.ratio", "0.5", "from 1"]);
    policy(vwd_decoder_policy { ratio: 2.0, ..POLICY }, &["options.policy.ratio", "2", "0 for SERIAL"]);
    policy(vwd_decoder_policy { reserved: [0, 0, 7, 0], ..POLICY }, &["options.policy.reserved", "7", "zeros"]);
    policy(vwd_decoder_policy { method: 0, k: 0, ..prr }, &["options.policy.strategy", "dense layer"]);
    let holt = vwd_holt { alpha: 1.5, beta: 0.0, gamma: 0.0 };
    policy(vwd_decoder_policy { holt, ..prr }, &["options.policy.holt.alpha", "1.5", "0 to 1"]);
    policy(vwd_decoder_policy { holt, ..POLICY }, &["options.policy.holt", "1.5", "VWD_PREDICT_SCORES"]);
    create(
        vwd_decoder_options { page_size: 4, block_size: 4, policy: prr, ..good },
        &["options.block_size", "4", "at least 8 for VWD_STRATEGY_PRR"],
    );

    let decoder = Decoder::create(backend, &good);
    let rng = &mut Rng::new(1);
    let engine = Engine::new(backend, rng, shape);
    let floats = |extents: &[usize]| Tensor::floats(backend, F32, &Array::filled(extents, 0.5), &Layout::default());
    let (q, new, out) = (floats(&[2, 2, 4, 16]), floats(&[2, 2, 2, 16]), floats(&[2, 2, 4, 16]));
    let attend = vwd_decoder_attend_args {
        k: engine.k.c(),
        v: engine.v.c(),
        new_k: new.c(),
        new_v: new.c(),
        q: q.c(),
        out: out.c(),
        ..args()
    };
    let fails = |args: vwd_decoder_attend_args, pieces: &[&str]| {
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_attend(decoder.0, &args, backend.stream()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
        assert_eq!(engine.k.read_floats(), engine.keys, "keys after an error");
    };
    fails(attend, &["decoder", "no step", "vwd_decoder_begin"]);
    let (lens, table) = (ints(backend, &[9, 2]), ints(backend, &[0, 1]));
    let two = Tensor::ints(backend, I32, &Array::new(&[2, 2], vec![0, 1, 2, 3]), &Layout::default());
    let step = vwd_decoder_step { positions: 2, seq_lens: lens.c(), page_table: two.c(), ..args() };
    let refused = |step: vwd_decoder_step, pieces: &[&str]| {
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_begin(decoder.0, &step, backend.stream()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    refused(vwd_decoder_step { positions: 3, ..step }, &["positions", "3", "max_positions, 2"]);
    refused(vwd_decoder_step { mode: 3, ..step }, &["mode", "3"]);
    refused(vwd_decoder_step { mode: 1, modes: lens.c(), ..step }, &["mode", "0 beside modes"]);
    refused(vwd_decoder_step { page_table: table.c(), ..step }, &["page_table", "shape [2]"]);
    decoder.begin(backend, &step);
    fails(vwd_decoder_attend_args { layer: 1, ..attend }, &["layer", "1", "0 … 0"]);
    fails(vwd_decoder_attend_args { new_v: absent(), ..attend }, &["new_v", "NULL"]);
    fails(vwd_decoder_attend_args { q: new.c(), ..attend }, &["q", "Hq=4"]);
    fails(vwd_decoder_attend_args { out: new.c(), ..attend }, &["out", "Hq=4"]);
    fails(vwd_decoder_attend_args { k: new.c(), ..attend }, &["k", "pages=4"]);
    fails(vwd_decoder_attend_args { sinks: lens.c(), ..attend }, &["sinks", "int32"]);
    decoder.attend(backend, &attend);
}
