//! The decoder: its steps are the calls that they are composed of. Each file of decoder/ says at its head what else is tested; those named
//! tiered or coded are about decoders on a tiered cache.

pub mod acceptance;
pub mod batches;
pub mod coded;
pub mod coded_calls;
pub mod coded_term;
pub mod coded_trees;
pub mod drafts;
pub mod errors;
pub mod fallback;
pub mod foreseen;
pub mod model;
pub mod own_drafts;
pub mod plain;
pub mod smoothed;
pub mod strategies;
pub mod term;
pub mod tiered;
pub mod tiered_errors;
pub mod tiered_far;
pub mod tiered_slots;
pub mod tiered_types;
pub mod trees;

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    decoder_equals_the_calls_that_it_is_composed_of_while_sequences_come_go_and_fork,
    decoder_with_a_budget_that_covers_everything_equals_dense_attention_bit_for_bit,
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
#[derive(Clone, Copy, Debug)]
pub struct Shape {
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
/// selected from the tokens before the step, and the block of its token is added. `counted`: attention is joined by the term for what lists leave out, of sums that are
/// made anew of so many tokens of each row.
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
    counted: Option<&[usize]>,
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
    let log_mass = rows(F32, &[batch, shape.positions, shape.heads[0]]);
    let sums_of = |channels: &[usize]| rows(F32, &[&[batch, heads], channels].concat());
    let sums = [sums_of(&[shape.dim]), sums_of(&[shape.value_dim]), sums_of(&[shape.dim, shape.value_dim])];
    let counted_heads = Tensor::ints(backend, I32, &Array::filled(&[batch, heads], 0), &Layout::default());
    let counted_lens = counted.map(|n| ints(backend, &n.iter().map(|&n| n as i64).collect::<Vec<_>>()));
    let remainder = vwd_remainder {
        tokens: counted_heads.c(),
        mean_k: sums[0].c(),
        mean_v: sums[1].c(),
        covariance: sums[2].c(),
        ..args()
    };
    let select = vwd_select_blocks_args {
        log_mass: if counted.is_some() { log_mass.c() } else { absent() },
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
    let mut sparse =
        vwd_attention_args { block_size: shape.block as u32, q_lens: sparse_lens.c(), list, out: out.c(), ..attention };
    let state = [rows(F32, &extents), rows(F32, &extents[..3]), rows(F32, &extents[..3])];
    if counted.is_some() {
        let [acc, m, l] = state.each_ref().map(Tensor::c);
        (sparse.remainder, sparse.log_mass) = (&remainder, log_mass.c());
        sparse.state = vwd_attention_state { acc, m, l };
    }
    let dense = vwd_attention_args { q_lens: dense_lens.c(), out: dense_out.c(), ..attention };
    // SAFETY: the arguments are valid.
    unsafe {
        let (session, stream) = (backend.session(), backend.stream());
        // What the decoder's calls take may be less.
        assert_ok(vwd_session_reserve(session.cast_mut(), stream, 1 << 20));
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
        if let Some(lens) = &counted_lens {
            let kv = vwd_paged_kv { seq_lens: lens.c(), ..kv };
            let block_size = shape.block as u32;
            let update = vwd_remainder_update_args { block_size, kv: &kv, remainder: &remainder, ..args() };
            backend.finish(vwd_remainder_update(session, &update, stream));
        }
        backend.finish(vwd_attention(session, &sparse, stream));
        backend.finish(vwd_attention(session, &dense, stream));
    }
    let (sparse_values, dense_values) = (out.read_floats(), dense_out.read_floats());
    let joined = Array::from_fn(&extents, |at| {
        let at: [usize; 4] = at[..].try_into().unwrap();
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
    if shape.positions > 1 {
        // Nothing is foreseen of several positions, whatever the strategy; the call is allowed.
        let queries = rng.normals(&[rows.len(), shape.heads[0], shape.dim]);
        let q = Tensor::floats(backend, shape.dtype, &queries, &Layout::default());
        let args = vwd_decoder_foresee_args { q: q.c(), ..args() };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_decoder_foresee(decoder.0, std::ptr::null(), &args, backend.stream()) });
    }
    decoder.attend(backend, &attend);
    assert_same("keys in their pages", &engine.k, &engine.keys);
    assert_same("values in their pages", &engine.v, &engine.values);
    let composed =
        compose(backend, engine, policy, [&table, &lens], &modes, &counts, &tokens, [&q, &q], false, None, q_type);
    let about = format!("modes {modes:?}, positions {counts:?} of {tokens:?}");
    assert_same(&about, &out, &composed.out.read_floats());
    check_dense_rows(engine, &table_values, policy, &modes, &composed.is_dense, &counts, &tokens, &queries, &out);
}

/// Compares bits, but for the sign of zeros, and names the first element that differs.
fn assert_same(about: &str, found: &Tensor, expected: &Array<f64>) {
    let found = found.read_floats();
    for at in indices(&expected.shape) {
        let at: [usize; 4] = at[..].try_into().unwrap();
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
