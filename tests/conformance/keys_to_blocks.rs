//! From keys to a selection: vwd_index_update over ragged sequences, some of whose pages name nothing, and the calls that
//! read what it wrote. What it writes is in index_bits.rs.

use crate::Case;
use crate::support::*;
use std::collections::BTreeSet;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    select_ranks_blocks_by_the_bound_of_their_keys,
    select_ranks_blocks_by_the_windows_that_overlap_them,
    select_ranks_candidates_by_the_mass_of_their_labels,
    select_tokens_takes_the_best_of_the_candidates_and_those_forced,
];

// --- sequences: keys in pages ----------------------------------------------------------------------------------------

/// Ragged sequences of random keys in scattered pages; some page table entries name no page.
pub struct Sequences<'b> {
    pub backend: &'b Backend,
    pub dtype: DType,
    pub kv_heads: usize,
    pub dim: usize,
    pub page_size: usize,
    pub pages: usize,
    pub table: Array<i64>,
    pub lens: Array<i64>,
    pub keys: Array<f64>,
    /// What the keys are stored as, if not as what they are.
    pub float8: Option<Float8>,
}

/// Keys in memory.
pub struct StoredKeys<'b> {
    pub k: Tensor<'b>,
    /// k with its dtype.
    pub given: vwd_tensor,
    pub scale: Option<Tensor<'b>>,
}

/// Keys in 8 bits.
pub struct Float8 {
    /// DLPack's: float8_e4m3fn or float8_e5m2.
    code: u8,
    bytes: Array<i64>,
    /// [1], [Hk] or [pages, P, Hk]; absent: 1.
    scale: Option<Array<f64>>,
}

/// The value of a float8 by its definition.
fn decode(code: u8, byte: i64) -> f64 {
    let (mantissa_bits, bias) = if code == 10 { (3, 7) } else { (2, 15) };
    let sign = if byte & 128 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = ((byte & 127) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1));
    let fraction = mantissa as f64 / 2f64.powi(mantissa_bits);
    match (code, exponent, mantissa) {
        (10, 15, 7) => f64::NAN,
        (12, 31, 0) => sign * f64::INFINITY,
        (12, 31, _) => f64::NAN,
        (_, 0, _) => sign * fraction * 2f64.powi(1 - bias),
        _ => sign * (1.0 + fraction) * 2f64.powi(exponent as i32 - bias),
    }
}

impl<'b> Sequences<'b> {
    pub fn random(backend: &'b Backend, rng: &mut Rng) -> Sequences<'b> {
        let dtype = rng.pick(&[F32, F16, BF16]);
        let (kv_heads, dim) = (rng.size(1..=3), rng.pick(&[16, 16, 24, 64, 128, 256, 576]));
        let page_size = rng.pick(&[1, 4, 16, 64]);
        let batch = rng.size(1..=3);
        let most = rng.pick(&[5, 40, 150]) / page_size + 1;
        let pages = batch * most + 2;
        let mut order: Vec<i64> = (0..pages as i64).collect();
        rng.shuffle(&mut order);
        let hostile = rng.one_in(3);
        let table = Array::from_fn(&[batch, most], |at| match order[at[0] * most + at[1]] {
            _ if hostile && rng.one_in(4) => rng.pick(&[-1, pages as i64, i32::MAX as i64, i32::MIN as i64]),
            page => page,
        });
        let capacity = (most * page_size) as i64;
        let lens = Array::from_fn(&[batch], |_| rng.int(-1..=capacity + 1));
        let keys = rng.normals(&[pages, page_size, kv_heads, dim]).map(|&x| dtype.round(x));
        Sequences { backend, dtype, kv_heads, dim, page_size, pages, table, lens, keys, float8: None }
    }

    /// Sequences whose keys are any bytes as FP8, with scales of any shape; `dtype` is that of summaries.
    pub fn quantised(backend: &'b Backend, rng: &mut Rng) -> Sequences<'b> {
        let s = Sequences::random(backend, rng);
        let code = rng.pick(&[10, 12]);
        let bytes = Array::from_fn(&s.keys.shape, |_| rng.int(0..=255));
        let shape = rng.pick(&[vec![], vec![1], vec![s.kv_heads], s.keys.shape[..3].to_vec()]);
        let scale = (!shape.is_empty()).then(|| Array::from_fn(&shape, |_| F32.round(0.001 + rng.unit())));
        let keys = Array::from_fn(&s.keys.shape, |at| {
            let scale = scale.as_ref().map_or(1.0, |scale| match scale.shape[..] {
                [1] => scale[[0]],
                [_] => scale[[at[2]]],
                _ => scale[[at[0], at[1], at[2]]],
            });
            // One rounding to single precision.
            F32.round(decode(code, bytes[[at[0], at[1], at[2], at[3]]]) * scale)
        });
        Sequences { keys, float8: Some(Float8 { code, bytes, scale }), ..s }
    }

    pub fn batch(&self) -> usize {
        self.table.shape[0]
    }

    pub fn capacity(&self) -> usize {
        self.table.shape[1] * self.page_size
    }

    pub fn len(&self, i: usize) -> usize {
        self.lens[[i]].clamp(0, self.capacity() as i64) as usize
    }

    pub fn key(&self, i: usize, t: usize, g: usize) -> Option<&[f64]> {
        let pages = oracle::Pages { table: Some(&self.table), pages: self.pages, size: self.page_size };
        let (page, slot) = pages.find(i, t)?;
        Some(self.keys.row([page, slot, g]))
    }

    /// The keys as a call takes them, laid out in some way, and their scales.
    pub fn stored_keys(&self, rng: &mut Rng, layout: &Layout) -> StoredKeys<'b> {
        match &self.float8 {
            None => {
                let k = Tensor::floats(self.backend, self.dtype, &self.keys, layout);
                StoredKeys { given: k.c(), k, scale: None }
            }
            Some(Float8 { code, bytes, scale }) => {
                let k = Tensor::ints(self.backend, U8, bytes, layout);
                let mut floats = |a| Tensor::floats(self.backend, F32, a, &Layout::random(rng, a.shape.len()));
                StoredKeys {
                    given: vwd_tensor { dtype_code: *code, ..k.c() },
                    k,
                    scale: scale.as_ref().map(&mut floats),
                }
            }
        }
    }

    pub fn update(&self, rng: &mut Rng, lens: &Array<i64>, begin: Option<&Array<i64>>, index: &Summaries) {
        let layout = Layout::random(rng, 4);
        let StoredKeys { k, given, scale } = self.stored_keys(rng, &layout);
        let table = Tensor::ints(self.backend, I32, &self.table, &Layout::random(rng, 2));
        let lens = Tensor::ints(self.backend, I32, lens, &Layout::random(rng, 1));
        let begin = begin.map(|begin| Tensor::ints(self.backend, I32, begin, &Layout::random(rng, 1)));
        let args = vwd_index_update_args {
            k: given,
            k_scale: scale.as_ref().map_or(absent(), Tensor::c),
            page_table: table.c(),
            seq_lens: lens.c(),
            begin: begin.as_ref().map_or(absent(), Tensor::c),
            index: kept(index.c()),
            ..args()
        };
        // SAFETY: the tensors are valid.
        self.backend.finish(unsafe { vwd_index_update(self.backend.session(), &args, self.backend.stream()) });
        k.assert_untouched("k");
    }
}

// --- summaries -------------------------------------------------------------------------------------------------------

pub struct Summaries<'b> {
    pub kind: u32,
    pub block_size: usize,
    pub window: usize,
    pub stride: usize,
    pub rows: usize,
    pub pages: usize,
    pub table: Option<(Array<i64>, Tensor<'b>)>,
    pub channels: Option<(Array<i64>, Tensor<'b>)>,
    /// AXIS: weights and centre, or neither.
    pub learned: Option<[(Array<f64>, Tensor<'b>); 2]>,
    /// key_max and key_min; means; labels, label_scale and label_min; axes and, in INT4, axis_range.
    pub tensors: Vec<Tensor<'b>>,
}

impl<'b> Summaries<'b> {
    /// Room for all that the sequences can hold; poisoned.
    pub fn room(rng: &mut Rng, s: &Sequences<'b>, kind: u32) -> Summaries<'b> {
        let block_size = rng.pick(&[s.page_size, s.page_size * 2, s.page_size.max(2) / 2, 16.max(s.page_size)]);
        let (window, stride) = rng.pick(&[(32, 16), (8, 4), (5, 3), (3, 7), (1, 1)]);
        let kept = rng.pick(&[2, 6, 8, 16, s.dim]).min(s.dim);
        let needed = match kind {
            VWD_INDEX_MINMAX | VWD_INDEX_AXIS => s.capacity().div_ceil(block_size),
            VWD_INDEX_MEAN => oracle::windows(s.capacity(), window, stride),
            _ => s.capacity(),
        };
        let paged = rng.one_in(2);
        let rows = if paged { rng.pick(&[1, 3, 16]) } else { needed };
        let per_sequence = if paged { needed.div_ceil(rows) } else { 1 };
        let pages = s.batch() * per_sequence + 1;
        let mut order: Vec<i64> = (0..pages as i64).collect();
        rng.shuffle(&mut order);
        let table = paged.then(|| {
            let table = Array::from_fn(&[s.batch(), per_sequence], |at| order[at[0] * per_sequence + at[1]]);
            let tensor = Tensor::ints(s.backend, I32, &table, &Layout::random(rng, 2));
            (table, tensor)
        });
        let channels = (kind == VWD_INDEX_LABEL).then(|| {
            let mut channels = Array::filled(&[s.kv_heads, kept], 0);
            for g in 0..s.kv_heads {
                for (n, c) in rng.subset(s.dim, kept).into_iter().enumerate() {
                    channels[[g, n]] = c as i64;
                }
            }
            let tensor = Tensor::ints(s.backend, I32, &channels, &Layout::random(rng, 2));
            (channels, tensor)
        });
        let is_int4 = rng.one_in(2);
        let learned = (kind == VWD_INDEX_AXIS && rng.one_in(2)).then(|| {
            let normal = [rng.normals(&[s.kv_heads, s.dim]), rng.normals(&[s.kv_heads, s.dim])];
            normal.map(|x| {
                let x = x.map(|&x| F32.round(x));
                let tensor = Tensor::floats(s.backend, F32, &x, &Layout::random(rng, 2));
                (x, tensor)
            })
        });
        let mut make = |dtype, last: &[usize]| {
            let shape = [&[pages, rows, s.kv_heads], last].concat();
            Tensor::poisoned(s.backend, dtype, &shape, &Layout::random(rng, shape.len()))
        };
        let tensors = match kind {
            VWD_INDEX_MINMAX => vec![make(s.dtype, &[s.dim]), make(s.dtype, &[s.dim])],
            VWD_INDEX_MEAN => vec![make(s.dtype, &[s.dim])],
            VWD_INDEX_AXIS if is_int4 => vec![make(U8, &[s.dim]), make(F16, &[4 * s.dim.div_ceil(32)])],
            VWD_INDEX_AXIS => vec![make(s.dtype, &[2 * s.dim])],
            _ => vec![make(U8, &[kept / 2]), make(F16, &[]), make(F16, &[])],
        };
        Summaries { kind, block_size, window, stride, rows, pages, table, channels, learned, tensors }
    }

    /// The same shapes in memory of their own.
    pub fn twin(&self, backend: &'b Backend) -> Summaries<'b> {
        let tensor = |t: &Tensor<'b>| Tensor::poisoned(backend, t.dtype, &t.shape, &Layout::default());
        let ints = |(a, _): &(Array<i64>, Tensor<'b>)| (a.clone(), Tensor::ints(backend, I32, a, &Layout::default()));
        let floats =
            |(a, _): &(Array<f64>, Tensor<'b>)| (a.clone(), Tensor::floats(backend, F32, a, &Layout::default()));
        Summaries {
            table: self.table.as_ref().map(ints),
            channels: self.channels.as_ref().map(ints),
            learned: self.learned.as_ref().map(|of| of.each_ref().map(floats)),
            tensors: self.tensors.iter().map(tensor).collect(),
            ..*self
        }
    }

    pub fn c(&self) -> vwd_index {
        let at = |kind, n: usize| if self.kind == kind { self.tensors[n].c() } else { absent() };
        let given = |t: &Option<(Array<i64>, Tensor)>| t.as_ref().map_or(absent(), |(_, t)| t.c());
        let learned = |n: usize| self.learned.as_ref().map_or(absent(), |of| of[n].1.c());
        let has_blocks = matches!(self.kind, VWD_INDEX_MINMAX | VWD_INDEX_AXIS);
        let is_int4 = self.tensors.len() == 2;
        vwd_index {
            kind: self.kind,
            block_size: if has_blocks { self.block_size as u32 } else { 0 },
            window: if self.kind == VWD_INDEX_MEAN { self.window as u32 } else { 0 },
            stride: if self.kind == VWD_INDEX_MEAN { self.stride as u32 } else { 0 },
            table: given(&self.table),
            key_max: at(VWD_INDEX_MINMAX, 0),
            key_min: at(VWD_INDEX_MINMAX, 1),
            means: at(VWD_INDEX_MEAN, 0),
            labels: at(VWD_INDEX_LABEL, 0),
            label_scale: at(VWD_INDEX_LABEL, 1),
            label_min: at(VWD_INDEX_LABEL, 2),
            channels: given(&self.channels),
            axes: at(VWD_INDEX_AXIS, 0),
            axis_range: if is_int4 { at(VWD_INDEX_AXIS, 1) } else { absent() },
            axis_weights: learned(0),
            axis_centre: learned(1),
            ..args()
        }
    }

    pub fn find(&self, i: usize, j: usize) -> (usize, usize) {
        let pages = oracle::Pages { table: self.table.as_ref().map(|(a, _)| a), pages: self.pages, size: self.rows };
        pages.find(i, j).expect("room for all")
    }

    pub fn count(&self, len: usize) -> usize {
        match self.kind {
            VWD_INDEX_MINMAX | VWD_INDEX_AXIS => len.div_ceil(self.block_size),
            VWD_INDEX_MEAN => oracle::windows(len, self.window, self.stride),
            _ => len,
        }
    }

    /// Every summary of sequences of these lengths, as (i, j, g, bytes).
    pub fn stored(&self, lens: &[usize]) -> Vec<(usize, usize, usize, Vec<u8>)> {
        let raw: Vec<Array<Bytes>> = self.tensors.iter().map(Tensor::read_raw).collect();
        let mut all = vec![];
        for (i, &len) in lens.iter().enumerate() {
            for j in 0..self.count(len) {
                let (page, row) = self.find(i, j);
                for g in 0..raw[0].shape[2] {
                    let bytes = raw.iter().flat_map(|t| t.row([page, row, g]).concat()).collect();
                    all.push((i, j, g, bytes));
                }
            }
        }
        all
    }
}

// --- selection -------------------------------------------------------------------------------------------------------

/// One selection: its arguments but the index, and random outputs.
struct Selection<'b> {
    q: Array<f64>,
    lens: Array<i64>,
    budgets: Option<Array<i64>>,
    candidates: Option<oracle::List>,
    k: usize,
    init: usize,
    local: usize,
    block_size: usize,
    scale: f32,
    ids: Tensor<'b>,
    counts: Tensor<'b>,
    scores: Tensor<'b>,
}

impl<'b> Selection<'b> {
    /// `most` things can be selected; with `scores` for each of them, or for each place of the result.
    fn random(
        rng: &mut Rng,
        s: &Sequences<'b>,
        most: usize,
        block_size: usize,
        scored_by_place: bool,
    ) -> Selection<'b> {
        let group = rng.pick(&[1, 2, 3, 8, 16]);
        let cap = rng.size(1..=most + 3);
        let init = rng.size(0..=2).min(cap);
        let local = rng.size(0..=(cap - init).min(3));
        let shape = [s.batch(), s.kv_heads];
        let scores = if scored_by_place { cap } else { most };
        let mut output =
            |dtype, shape: &[usize]| Tensor::poisoned(s.backend, dtype, shape, &Layout::random(rng, shape.len()));
        let ids = output(I32, &[s.batch(), s.kv_heads, cap]);
        let counts = output(I32, &shape);
        let scores = output(F32, &[s.batch(), s.kv_heads, scores]);
        let dtype = s.dtype;
        let budgets = rng.one_in(2).then(|| Array::from_fn(&[s.batch()], |_| rng.int(-1..=cap as i64 + 2)));
        let needs_some = budgets.is_none() && init + local == 0;
        Selection {
            q: rng.normals(&[s.batch(), s.kv_heads * group, s.dim]).map(|&x| dtype.round(x)),
            // The index may hold more than the pages do.
            lens: s.lens.map(|&len| len.min(s.capacity() as i64)),
            k: if needs_some { rng.size(cap.min(1)..=cap) } else { rng.size(0..=cap) },
            budgets,
            candidates: None,
            init,
            local,
            block_size,
            scale: rng.pick(&[0.0, 0.3]),
            ids,
            counts,
            scores,
        }
    }

    fn scale(&self) -> f64 {
        if self.scale == 0.0 { 1.0 / (self.q.shape[2] as f64).sqrt() } else { self.scale as f64 }
    }

    fn budget(&self, i: usize) -> usize {
        let cap = self.ids.shape[2] as i64;
        self.budgets.as_ref().map_or(self.k, |budgets| budgets[[i]].clamp(0, cap) as usize)
    }

    /// The query heads of KV head g.
    fn queries(&self, i: usize, g: usize) -> Vec<&[f64]> {
        let group = self.q.shape[1] / self.ids.shape[1];
        (g * group..(g + 1) * group).map(|h| self.q.row([i, h])).collect()
    }

    /// Candidate lists of blocks below `most`, with ids past the sequence and repeated ones.
    fn with_candidates(mut self, rng: &mut Rng, s: &Sequences, most: usize) -> Self {
        let cap = rng.size(0..=most + 3);
        let mut ids = Array::filled(&[s.batch(), s.kv_heads, cap], 0);
        for i in 0..s.batch() {
            for g in 0..s.kv_heads {
                let mut list: Vec<i64> = (0..cap).map(|_| rng.int(-1..=most as i64 + 1)).collect();
                list.sort_unstable();
                list.iter().enumerate().for_each(|(n, &id)| ids[[i, g, n]] = id);
            }
        }
        let counts = Array::from_fn(&[s.batch(), s.kv_heads], |_| rng.int(-1..=cap as i64 + 1));
        self.candidates = Some(oracle::List { ids, counts });
        self
    }

    fn run(&self, rng: &mut Rng, s: &Sequences<'b>, index: &Summaries, method: Option<u32>) {
        let backend = s.backend;
        let q = Tensor::floats(backend, s.dtype, &self.q, &Layout::random(rng, 3));
        let mut ints = |a: &Array<i64>| Tensor::ints(backend, I32, a, &Layout::random(rng, a.shape.len()));
        let lens = ints(&self.lens);
        let budgets = self.budgets.as_ref().map(&mut ints);
        let candidates = self.candidates.as_ref().map(|list| (ints(&list.ids), ints(&list.counts)));
        let list = |list: Option<(&Tensor, &Tensor)>| match list {
            Some((ids, counts)) => vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
            None => vwd_block_list { ids: absent(), counts: absent(), slots: absent() },
        };
        let candidates = list(candidates.as_ref().map(|(ids, counts)| (ids, counts)));
        let selected = list(Some((&self.ids, &self.counts)));
        let budgets = budgets.as_ref().map_or(absent(), Tensor::c);
        let (k, block_size, scale) = (self.k as u32, self.block_size as u32, self.scale);
        let (init, local) = (self.init as u32, self.local as u32);
        // SAFETY: the tensors are valid.
        let status = unsafe {
            match method {
                Some(method) => {
                    let (init_blocks, local_blocks) = (init, local);
                    let (q, index, seq_lens, scores) = (q.c(), index.c(), lens.c(), self.scores.c());
                    let args = vwd_select_blocks_args {
                        method,
                        block_size,
                        k,
                        init_blocks,
                        local_blocks,
                        scale,
                        q,
                        index: kept(index),
                        seq_lens,
                        budgets,
                        candidates,
                        selected,
                        scores,
                        ..args()
                    };
                    vwd_select_blocks(backend.session(), &args, backend.stream())
                }
                None => {
                    let (init_tokens, local_tokens) = (init, local);
                    let (q, index, seq_lens, scores) = (q.c(), index.c(), lens.c(), self.scores.c());
                    let args = vwd_select_tokens_args {
                        block_size,
                        k,
                        init_tokens,
                        local_tokens,
                        scale,
                        q,
                        index: kept(index),
                        seq_lens,
                        budgets,
                        candidates,
                        selected,
                        scores,
                        ..args()
                    };
                    vwd_select_tokens(backend.session(), &args, backend.stream())
                }
            }
        };
        backend.finish(status);
    }

    /// The list of (i, g), and that nothing after its count was written.
    fn selected(&self, i: usize, g: usize) -> Vec<usize> {
        let counts = self.counts.read_ints();
        self.ids.assert_written("ids", |at| (at[2] as i64) < counts[[at[0], at[1]]]);
        let ids = self.ids.read_ints();
        ids.row([i, g])[..counts[[i, g]] as usize].iter().map(|&id| id as usize).collect()
    }

    /// Scores are near those of the formula, and the list is exactly the top of the scores as they are.
    fn check_blocks(&self, i: usize, g: usize, expected: &[f64], tolerance: f64) {
        let n = expected.len();
        let scores = self.scores.read_floats();
        let scores = &scores.row([i, g])[..n];
        for (j, (found, want)) in scores.iter().zip(expected).enumerate() {
            let want = if want.is_nan() { &f64::NEG_INFINITY } else { want };
            let near = found == want || (found - want).abs() <= tolerance;
            assert!(near, "score {found} for {want}: sequence {i}, head {g}, block {j} of {n}");
        }
        let count = oracle::selection_size(n, self.budget(i), self.init, self.local);
        assert_eq!(self.selected(i, g), oracle::top_k(scores, count, self.init, self.local));
    }
}

fn select_ranks_blocks_by_the_bound_of_their_keys(backend: &Backend) {
    rounds(25, |rng| {
        let mut s = Sequences::random(backend, rng);
        let dtype = s.dtype;
        match rng.size(0..=3) {
            0 => s.keys = s.keys.map(|_| 1.0),                     // all equal
            1 => s.keys = s.keys.map(|x| dtype.round(x.signum())), // ties
            2 => s.keys = s.keys.map(|&x| if x > 2.0 { f64::NAN } else { x }),
            _ => {}
        }
        let index = Summaries::room(rng, &s, VWD_INDEX_MINMAX);
        s.update(rng, &s.lens, None, &index);
        let most = s.capacity().div_ceil(index.block_size);
        let call = Selection::random(rng, &s, most, index.block_size, false);
        call.run(rng, &s, &index, Some(VWD_SELECT_MINMAX));
        let (max, min) = (index.tensors[0].read_floats(), index.tensors[1].read_floats());
        for i in 0..s.batch() {
            for g in 0..s.kv_heads {
                let score = |j| {
                    let (page, row) = index.find(i, j);
                    oracle::minmax_score(&call.queries(i, g), max.row([page, row, g]), min.row([page, row, g]))
                };
                let expected: Vec<f64> = (0..s.len(i).div_ceil(index.block_size)).map(score).collect();
                // Sums of up to 2·16·256 normal products in f32.
                call.check_blocks(i, g, &expected, 2e-3);
            }
        }
        let n = |i: usize| s.len(i).div_ceil(index.block_size);
        call.scores.assert_written("scores", |at| at[2] < n(at[0]));
    });
}

fn select_ranks_blocks_by_the_windows_that_overlap_them(backend: &Backend) {
    rounds(40, |rng| {
        let mut s = Sequences::random(backend, rng);
        s.keys = s.keys.map(|&x| if rng.one_in(5000) { f64::NAN } else { x });
        let index = Summaries::room(rng, &s, VWD_INDEX_MEAN);
        s.update(rng, &s.lens, None, &index);
        let block_size = rng.pick(&[1, 16, 48, 64]);
        let most = s.capacity().div_ceil(block_size);
        let mut call = Selection::random(rng, &s, most, block_size, false);
        let softmax = rng.one_in(2);
        if !softmax {
            let dtype = s.dtype;
            call.q = rng.normals(&[s.batch(), s.kv_heads, s.dim]).map(|&x| dtype.round(x));
        }
        call.run(rng, &s, &index, Some(if softmax { VWD_SELECT_MEAN_SOFTMAX } else { VWD_SELECT_MEAN_DOT }));
        let means = index.tensors[0].read_floats();
        for i in 0..s.batch() {
            for g in 0..s.kv_heads {
                let row = |w| {
                    let (page, row) = index.find(i, w);
                    means.row([page, row, g])
                };
                let windows: Vec<&[f64]> = (0..index.count(s.len(i))).map(row).collect();
                // A NaN window weighs nothing.
                let whole: Vec<usize> =
                    (0..windows.len()).filter(|&w| !windows[w].iter().any(|x| x.is_nan())).collect();
                let kept: Vec<&[f64]> = whole.iter().map(|&w| windows[w]).collect();
                let mut scores = vec![if softmax { 0.0 } else { f64::NEG_INFINITY }; windows.len()];
                let of_kept = match softmax {
                    true => oracle::mean_softmax(&call.queries(i, g), &kept, call.scale()),
                    false => kept.iter().map(|mean| oracle::dot(call.queries(i, g)[0], mean)).collect(),
                };
                whole.iter().zip(of_kept).for_each(|(&w, score)| scores[w] = score);
                let blocks = s.len(i).div_ceil(block_size);
                let expected = oracle::pool_windows(&scores, index.window, index.stride, block_size, blocks);
                // exp amplifies the error of a product of 256 normal channels.
                call.check_blocks(i, g, &expected, 1e-3);
            }
        }
    });
}

/// Labels of some tokens as keys on the kept channels, and the queries on those channels.
fn labelled(
    index: &Summaries,
    call: &Selection,
    i: usize,
    g: usize,
    tokens: &[usize],
) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let [codes, scale, min] = &index.tensors[..] else { unreachable!() };
    let (codes, scale, min) = (codes.read_ints(), scale.read_floats(), min.read_floats());
    let key = |&t: &usize| {
        let (page, row) = index.find(i, t);
        let (scale, min) = (scale[[page, row, g]], min[[page, row, g]]);
        let codes = codes.row([page, row, g]).iter().flat_map(|&b| [b & 15, b >> 4]);
        codes.map(|code| min + scale * code as f64).collect()
    };
    let channels = index.channels.as_ref().unwrap().0.row([g]);
    let query = |q: &&[f64]| channels.iter().map(|&c| q[c as usize]).collect();
    (tokens.iter().map(key).collect(), call.queries(i, g).iter().map(query).collect())
}

/// Softmax mass of each token over all, summed over the heads; one without a page weighs nothing.
fn label_mass(index: &Summaries, call: &Selection, i: usize, g: usize, tokens: &[usize]) -> Vec<f64> {
    let (keys, queries) = labelled(index, call, i, g, tokens);
    let queries: Vec<&[f64]> = queries.iter().map(Vec::as_slice).collect();
    let weighs: Vec<usize> = (0..keys.len()).filter(|&n| !keys[n][0].is_nan()).collect();
    let kept: Vec<Vec<f64>> = weighs.iter().map(|&n| keys[n].clone()).collect();
    let mut mass = vec![0.0; keys.len()];
    for (&n, m) in weighs.iter().zip(oracle::label_mass(&queries, &kept, call.scale())) {
        mass[n] = m;
    }
    mass
}

fn select_ranks_candidates_by_the_mass_of_their_labels(backend: &Backend) {
    rounds(30, |rng| {
        let s = Sequences::random(backend, rng);
        let index = Summaries::room(rng, &s, VWD_INDEX_LABEL);
        s.update(rng, &s.lens, None, &index);
        let block_size = rng.pick(&[1, 16, 48, 64]);
        let most = s.capacity().div_ceil(block_size);
        let call = Selection::random(rng, &s, most, block_size, false).with_candidates(rng, &s, most);
        call.run(rng, &s, &index, Some(VWD_SELECT_LABEL_MASS));
        for i in 0..s.batch() {
            for g in 0..s.kv_heads {
                let n = s.len(i).div_ceil(block_size);
                let candidates = call.candidates.as_ref().unwrap().blocks(i, g, n);
                let tokens = oracle::tokens(&candidates, block_size, s.len(i));
                let mut expected = vec![f64::NEG_INFINITY; n];
                for (t, mass) in tokens.iter().zip(label_mass(&index, &call, i, g, &tokens)) {
                    expected[t / block_size] = expected[t / block_size].max(0.0) + mass;
                }
                // exp amplifies the error of a product of 256 normal channels; up to 16 heads.
                call.check_blocks(i, g, &expected, 2e-3);
            }
        }
    });
}

fn select_tokens_takes_the_best_of_the_candidates_and_those_forced(backend: &Backend) {
    rounds(30, |rng| {
        let s = Sequences::random(backend, rng);
        let index = Summaries::room(rng, &s, VWD_INDEX_LABEL);
        s.update(rng, &s.lens, None, &index);
        let block_size = rng.pick(&[1, 16, 48, 64]);
        let most = s.capacity().div_ceil(block_size);
        let call = Selection::random(rng, &s, s.capacity(), block_size, true).with_candidates(rng, &s, most);
        call.run(rng, &s, &index, None);
        for i in 0..s.batch() {
            for g in 0..s.kv_heads {
                let len = s.len(i);
                let candidates = call.candidates.as_ref().unwrap().blocks(i, g, len.div_ceil(block_size));
                let tokens = oracle::tokens(&candidates, block_size, len);
                let heads = call.queries(i, g).len() as f64;
                let alpha: Vec<f64> = label_mass(&index, &call, i, g, &tokens).iter().map(|m| m / heads).collect();
                let forced: BTreeSet<usize> = (0..len).filter(|&t| t < call.init || t + call.local >= len).collect();
                let all: BTreeSet<usize> = tokens.iter().copied().chain(forced.iter().copied()).collect();
                let count = forced.len().max(all.len().min(call.budget(i)));
                let selected = call.selected(i, g);
                assert_eq!(selected.len(), count);
                assert!(selected.is_sorted_by(|a, b| a < b), "{selected:?}");
                assert!(forced.iter().all(|t| selected.contains(t)), "{forced:?} in {selected:?}");
                let of = |t: usize| tokens.binary_search(&t).map_or(0.0, |n| alpha[n]);
                let scores = call.scores.read_floats();
                for (n, &t) in selected.iter().enumerate() {
                    assert!(all.contains(&t), "token {t} is no candidate");
                    // exp amplifies the error of a product of 256 normal channels.
                    assert!((scores[[i, g, n]] - of(t)).abs() <= 1e-3, "α of token {t}");
                }
                let free = |t: &&usize| !forced.contains(t);
                let worst = selected.iter().filter(free).map(|&t| of(t)).fold(f64::INFINITY, f64::min);
                let left = all.iter().filter(free).filter(|t| !selected.contains(t));
                left.for_each(|&t| assert!(of(t) <= worst + 1e-3, "token {t} is better than one selected"));
            }
        }
        let counts = call.counts.read_ints();
        call.scores.assert_written("scores", |at| (at[2] as i64) < counts[[at[0], at[1]]]);
    });
}
