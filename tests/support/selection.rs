//! Every way to select, over one ragged batch: indices of all kinds, and lists by all methods.

use super::*;
use vanward::abi::*;
use vanward::capi::*;

/// Sequences, one page each, and what the contents of device-side inputs are.
pub struct Scene {
    pub lists: Lists,
    /// The type of keys and queries.
    pub dtype: DType,
    /// [B, T, Hk, D], and [B, Hq, D] or [B, Q, Hq, D]
    pub keys: Array<f64>,
    pub queries: Array<f64>,
    pub lens: Array<i64>,
    /// Query positions of each sequence.
    pub rows: Array<i64>,
    /// The page table of the summaries, [B, pages]; a page has ROWS of them.
    pub table: Array<i64>,
    pub channels: Array<i64>,
    pub candidates: oracle::List,
}

/// What has a list of its own.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Lists {
    /// A sequence, which has one position.
    Sequence,
    /// A sequence, whose positions share it.
    Shared,
    /// A position.
    Own,
}

impl Lists {
    pub const ALL: [Lists; 3] = [Lists::Sequence, Lists::Shared, Lists::Own];
}

const BATCH: usize = 3;
const HEADS: usize = 2;
const GROUP: usize = 3;
const ROWS: usize = 50;
const BLOCK: usize = 4;
const CAP: usize = 40;
const WANTED: usize = 30;
const POSITIONS: usize = 3;

impl Scene {
    /// `tokens` is a multiple of ROWS.
    pub fn random(rng: &mut Rng, lists: Lists, dtype: DType, dim: usize, tokens: usize) -> Scene {
        let pages = tokens / ROWS;
        let list = |rng: &mut Rng| rng.subset(tokens / BLOCK, CAP).into_iter().map(|id| id as i64).collect::<Vec<_>>();
        let positions: &[usize] = if lists == Lists::Sequence { &[] } else { &[POSITIONS] };
        let lead = [&[BATCH][..], if lists == Lists::Own { positions } else { &[] }, &[HEADS][..]].concat();
        let count = lead.iter().product();
        let mut scene = Scene {
            lists,
            dtype,
            keys: rng.normals(&[BATCH, tokens, HEADS, dim]),
            queries: rng.normals(&[&[BATCH][..], positions, &[HEADS * GROUP, dim][..]].concat()),
            lens: Array::filled(&[BATCH], 0),
            rows: Array::filled(&[BATCH], 0),
            table: Array::from_fn(&[BATCH, pages], |at| (at[0] * pages + at[1]) as i64),
            channels: Array::from_fn(&[HEADS, 16], |at| 2 * at[1] as i64),
            candidates: oracle::List {
                ids: Array::new(&[&lead[..], &[CAP]].concat(), (0..count).flat_map(|_| list(rng)).collect()),
                counts: Array::filled(&lead, CAP as i64),
            },
        };
        (scene.lens, scene.rows) = (scene.random_lens(rng), scene.random_rows(rng));
        scene
    }

    pub fn tokens(&self) -> usize {
        self.keys.shape[1]
    }

    pub fn random_lens(&self, rng: &mut Rng) -> Array<i64> {
        Array::from_fn(&[BATCH], |_| rng.int(0..=self.tokens() as i64))
    }

    pub fn random_rows(&self, rng: &mut Rng) -> Array<i64> {
        Array::from_fn(&[BATCH], |_| rng.int(0..=self.positions() as i64))
    }

    fn positions(&self) -> usize {
        if self.lists == Lists::Sequence { 1 } else { POSITIONS }
    }

    /// These sequences, in this order.
    pub fn take(&self, sequences: &[usize]) -> Scene {
        fn take<T: Clone>(a: &Array<T>, sequences: &[usize]) -> Array<T> {
            let data = sequences.iter().flat_map(|&i| a.row([i]).to_vec()).collect();
            Array::new(&[&[sequences.len()], &a.shape[1..]].concat(), data)
        }
        Scene {
            lists: self.lists,
            dtype: self.dtype,
            keys: take(&self.keys, sequences),
            queries: take(&self.queries, sequences),
            lens: take(&self.lens, sequences),
            rows: take(&self.rows, sequences),
            table: take(&self.table, sequences),
            channels: self.channels.clone(),
            candidates: oracle::List {
                ids: take(&self.candidates.ids, sequences),
                counts: take(&self.candidates.counts, sequences),
            },
        }
    }

    /// Tokens that list `n`, of those of every KV head in the order of their counts, is for.
    fn seen(&self, n: usize) -> i64 {
        let per_sequence = if self.lists == Lists::Own { POSITIONS } else { 1 };
        let (i, r) = (n / (HEADS * per_sequence), (n / HEADS % per_sequence) as i64);
        let len = self.lens[[i]].max(0);
        let rows = self.rows[[i]].clamp(0, self.positions() as i64);
        match self.lists {
            Lists::Own if r < rows => (len - rows + r + 1).max(0),
            Lists::Sequence | Lists::Shared if rows > 0 => len,
            _ => 0,
        }
    }

    /// Ids, counts and scores of every way to select, from indices built at once.
    pub fn select(&self, backend: &Backend) -> Vec<[Array<Bytes>; 3]> {
        self.select_within(backend, |call| call())
    }

    /// The same, each call made by `within`.
    pub fn select_within(&self, backend: &Backend, within: impl Fn(&mut dyn FnMut())) -> Vec<[Array<Bytes>; 3]> {
        let calls = Calls::new(self, backend);
        calls.update(None, &within);
        calls.select(&within);
        backend.finish(0);
        calls.check(self);
        calls.read()
    }
}

/// The tensors of a scene where a backend computes, and the calls on them. A call is made by `within`, and is over when the
/// stream is.
pub struct Calls<'b> {
    backend: &'b Backend,
    k: Tensor<'b>,
    q: Tensor<'b>,
    /// In place of queries: one for each KV head.
    forecast: Tensor<'b>,
    pub lens: Tensor<'b>,
    pub rows: Tensor<'b>,
    candidates: [Tensor<'b>; 2],
    indices: Vec<Index<'b>>,
    ways: Vec<Way<'b>>,
}

/// An index, and what it points to.
struct Index<'b> {
    c: vwd_index,
    _tensors: Vec<Tensor<'b>>,
}

/// A method of vwd_select_blocks, or none for vwd_select_tokens; a place among the indices; ids, counts and scores.
struct Way<'b> {
    method: Option<u32>,
    index: usize,
    out: [Tensor<'b>; 3],
}

impl<'b> Calls<'b> {
    pub fn new(scene: &Scene, backend: &'b Backend) -> Calls<'b> {
        let plain = Layout::default();
        let floats = |a: &Array<f64>| Tensor::floats(backend, scene.dtype, &a.map(|&x| scene.dtype.round(x)), &plain);
        let ints = |a: &Array<i64>| Tensor::ints(backend, I32, a, &plain);
        let dim = scene.keys.shape[3];
        let of_each_group = scene.queries.data.chunks(GROUP * dim).flat_map(|group| group[..dim].to_vec()).collect();
        let shape = [&scene.queries.shape[..scene.queries.shape.len() - 2], &[HEADS, dim]].concat();
        let lead = &scene.candidates.counts.shape[..];
        let zeros = |dtype: DType, shape: &[usize]| {
            Tensor::raw(backend, dtype, shape, &vec![0; shape.iter().product::<usize>() * dtype.bytes()], &plain)
        };
        let way = |(method, index): (Option<u32>, usize)| {
            let most = if method.is_some() { scene.tokens() / BLOCK } else { CAP };
            let scores = zeros(F32, &[lead, &[most]].concat());
            Way { method, index, out: [zeros(I32, &[lead, &[CAP]].concat()), zeros(I32, lead), scores] }
        };
        let ways = [
            (Some(VWD_SELECT_MINMAX), 0),
            (Some(VWD_SELECT_MEAN_SOFTMAX), 1),
            (Some(VWD_SELECT_MEAN_DOT), 1),
            (Some(VWD_SELECT_LABEL_MASS), 2),
            (None, 2),
            (Some(VWD_SELECT_AXIS), 3),
            (Some(VWD_SELECT_AXIS), 4),
        ];
        Calls {
            backend,
            k: floats(&scene.keys),
            q: floats(&scene.queries),
            forecast: floats(&Array::new(&shape, of_each_group)),
            lens: ints(&scene.lens),
            rows: ints(&scene.rows),
            candidates: [ints(&scene.candidates.ids), ints(&scene.candidates.counts)],
            indices: Calls::indices(scene, backend),
            ways: ways.map(way).into(),
        }
    }

    /// MINMAX, MEAN, LABEL, AXIS in INT4 and as floats. They hold zeros, which a hostile table leaves there.
    fn indices(scene: &Scene, backend: &'b Backend) -> Vec<Index<'b>> {
        let (plain, dim) = (Layout::default(), scene.keys.shape[3]);
        let table = || Tensor::ints(backend, I32, &scene.table, &plain);
        let zeros = |dtype: DType, last: &[usize]| {
            let shape = [&[BATCH * scene.tokens() / ROWS, ROWS, HEADS], last].concat();
            Tensor::raw(backend, dtype, &shape, &vec![0; shape.iter().product::<usize>() * dtype.bytes()], &plain)
        };
        let index = |tensors: Vec<Tensor<'b>>, make: fn(&[Tensor]) -> vwd_index| Index {
            c: vwd_index { table: tensors[0].c(), ..make(&tensors[1..]) },
            _tensors: tensors,
        };
        let channels = Tensor::ints(backend, I32, &scene.channels, &plain);
        vec![
            index(vec![table(), zeros(scene.dtype, &[dim]), zeros(scene.dtype, &[dim])], |t| vwd_index {
                kind: VWD_INDEX_MINMAX,
                block_size: BLOCK as u32,
                key_max: t[0].c(),
                key_min: t[1].c(),
                ..args()
            }),
            index(vec![table(), zeros(scene.dtype, &[dim])], |t| vwd_index {
                kind: VWD_INDEX_MEAN,
                window: 8,
                stride: 4,
                means: t[0].c(),
                ..args()
            }),
            index(vec![table(), zeros(U8, &[8]), zeros(F16, &[]), zeros(F16, &[]), channels], |t| vwd_index {
                kind: VWD_INDEX_LABEL,
                labels: t[0].c(),
                label_scale: t[1].c(),
                label_min: t[2].c(),
                channels: t[3].c(),
                ..args()
            }),
            index(vec![table(), zeros(U8, &[dim]), zeros(F16, &[4 * dim.div_ceil(32)])], |t| vwd_index {
                kind: VWD_INDEX_AXIS,
                block_size: BLOCK as u32,
                axes: t[0].c(),
                axis_range: t[1].c(),
                ..args()
            }),
            index(vec![table(), zeros(scene.dtype, &[2 * dim])], |t| vwd_index {
                kind: VWD_INDEX_AXIS,
                block_size: BLOCK as u32,
                axes: t[0].c(),
                ..args()
            }),
        ]
    }

    /// Brings all indices up to date, from token `begin` of each sequence on.
    pub fn update(&self, begin: Option<&Tensor>, within: impl Fn(&mut dyn FnMut())) {
        let begin = begin.map_or(absent(), Tensor::c);
        for index in &self.indices {
            let args =
                vwd_index_update_args { k: self.k.c(), seq_lens: self.lens.c(), begin, index: kept(index.c), ..args() };
            // SAFETY: the tensors live as long as `self`, and it outlives what the stream does with them.
            within(&mut || {
                assert_ok(unsafe { vwd_index_update(self.backend.session(), &args, self.backend.stream()) })
            });
        }
    }

    /// Selects in every way.
    pub fn select(&self, within: impl Fn(&mut dyn FnMut())) {
        let [ids, counts] = self.candidates.each_ref().map(Tensor::c);
        let given = vwd_block_list { ids, counts, slots: absent() };
        let none = vwd_block_list { ids: absent(), counts: absent(), slots: absent() };
        let (block_size, k, q_lens, seq_lens) = (BLOCK as u32, WANTED as u32, self.rows.c(), self.lens.c());
        for way in &self.ways {
            let [ids, counts, scores] = way.out.each_ref().map(Tensor::c);
            let selected = vwd_block_list { ids, counts, slots: absent() };
            let index = kept(self.indices[way.index].c);
            let (session, stream) = (self.backend.session(), self.backend.stream());
            let call = || match way.method {
                Some(method) => {
                    let q = if method == VWD_SELECT_MEAN_DOT { &self.forecast } else { &self.q }.c();
                    let candidates = if method == VWD_SELECT_LABEL_MASS { given } else { none };
                    let forced = vwd_select_blocks_args { init_blocks: 1, local_blocks: 2, ..args() };
                    let lists = vwd_select_blocks_args { candidates, selected, scores, ..forced };
                    let args = vwd_select_blocks_args { method, block_size, k, index, q, q_lens, seq_lens, ..lists };
                    // SAFETY: as in `update`.
                    unsafe { vwd_select_blocks(session, &args, stream) }
                }
                None => {
                    let forced = vwd_select_tokens_args { init_tokens: 1, local_tokens: 2, ..args() };
                    let lists = vwd_select_tokens_args { candidates: given, selected, scores, ..forced };
                    let q = self.q.c();
                    let args = vwd_select_tokens_args { block_size, k, index, q, q_lens, seq_lens, ..lists };
                    // SAFETY: as in `update`.
                    unsafe { vwd_select_tokens(session, &args, stream) }
                }
            };
            within(&mut || assert_ok(call()));
        }
    }

    /// Ids, counts and scores of each way.
    pub fn read(&self) -> Vec<[Array<Bytes>; 3]> {
        self.ways.iter().map(|way| way.out.each_ref().map(Tensor::read_raw)).collect()
    }

    /// Makes ids, counts and scores what they were before any call.
    pub fn clear(&self) {
        self.ways.iter().flat_map(|way| &way.out).for_each(Tensor::repoison);
    }

    /// The lists, as the contract promises them whatever the inputs hold.
    pub fn check(&self, scene: &Scene) {
        for Way { method, out: [ids, counts, _], .. } in &self.ways {
            let (list, count) = (ids.read_ints(), counts.read_ints());
            for (number, (list, &count)) in list.data.chunks(CAP).zip(&count.data).enumerate() {
                let seen = scene.seen(number);
                let n = if method.is_some() { (seen as usize).div_ceil(BLOCK) as i64 } else { seen };
                let list = &list[..count as usize];
                assert!(list.is_sorted_by(|a, b| a < b) && list.iter().all(|id| (0..n).contains(id)), "{list:?}");
                assert!(method.is_none() || list.len() as i64 == n.min(WANTED as i64), "{} of {n} blocks", list.len());
            }
        }
    }
}

/// Sequences that grow and shrink from step to step, indices that follow them, and beside these others that are built at once.
pub struct Steps<'b> {
    backend: &'b Backend,
    scene: Scene,
    stepped: Calls<'b>,
    fresh: Calls<'b>,
    begin: Tensor<'b>,
}

impl<'b> Steps<'b> {
    pub fn new(backend: &'b Backend, rng: &mut Rng, lists: Lists, dtype: DType, dim: usize) -> Steps<'b> {
        let scene = Scene::random(rng, lists, dtype, dim, 1500);
        let (stepped, fresh) = (Calls::new(&scene, backend), Calls::new(&scene, backend));
        let begin = Tensor::ints(backend, I32, &Array::filled(&[BATCH], 0), &Layout::default());
        let steps = Steps { backend, scene, stepped, fresh, begin };
        steps.enqueue();
        backend.finish(0);
        steps
    }

    /// What a step does: brings the indices up to date, and selects in every way.
    pub fn enqueue(&self) {
        self.stepped.update(Some(&self.begin), |call| call());
        self.stepped.select(|call| call());
    }

    /// Appends tokens, takes some back (refused drafts) or replaces a sequence; then `run` does what `enqueue` does.
    pub fn step(&mut self, rng: &mut Rng, run: impl FnOnce(&Steps)) {
        let (before, most) = (self.scene.lens.clone(), self.scene.tokens() as i64);
        self.scene.lens = before.map(|&len| match rng.int(0..=19) {
            0 => rng.int(0..=most),
            1..=4 => (len - rng.int(0..=9)).max(0),
            _ => (len + rng.int(1..=4)).min(most),
        });
        self.scene.rows = self.scene.random_rows(rng);
        // What was taken back is replaced: the last token is new at least.
        self.begin.refill_ints(&Array::from_fn(&[BATCH], |at| before[[at[0]]].min(self.scene.lens[[at[0]]] - 1)));
        for calls in [&self.stepped, &self.fresh] {
            calls.lens.refill_ints(&self.scene.lens);
            calls.rows.refill_ints(&self.scene.rows);
            calls.clear();
        }
        run(self);
        self.fresh.update(None, |call| call());
        self.fresh.select(|call| call());
        self.backend.finish(0);
        self.fresh.check(&self.scene);
        for (way, (stepped, fresh)) in self.stepped.read().iter().zip(&self.fresh.read()).enumerate() {
            assert!(stepped == fresh, "{:?}, way {way}, lens {:?}", self.scene.lists, self.scene.lens);
        }
    }
}
