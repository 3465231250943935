//! A layer with every argument that attention and repair take: query positions, lists, windows, caps, sinks, values of a
//! width of their own, FP8 with scales, slots. What a row should see and give is written here from the contract.

mod placed;

use crate::support::int4::{self, Int4};
use crate::support::trees::Masks;
use crate::support::*;
pub use placed::*;

/// Error of a result computed in f32: scores of a few units carry some 2⁻²⁰ each, and weights as much, relative to values
/// of a few units. A result of 16 bits adds half its spacing.
pub const TOLERANCE: f64 = 4e-5;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lists {
    /// None: every token.
    Absent,
    /// One for the positions of a sequence.
    Shared,
    /// One for each position.
    Own,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales {
    Absent,
    One,
    PerHead,
    PerToken,
}

/// What a call is about. The default is what attention was before it took anything else.
#[derive(Clone, Debug)]
pub struct Spec {
    pub batch: usize,
    /// Q; of rank 3 where absent.
    pub positions: Option<usize>,
    /// Rows are nodes of a draft tree.
    pub tree: bool,
    /// Rows of each sequence; absent: Q.
    pub q_lens: bool,
    /// Results of rows past q_lens stay as they are.
    pub keep_rows: bool,
    pub kv_heads: usize,
    pub group: usize,
    pub dim: usize,
    pub value_dim: usize,
    pub page: usize,
    pub block: usize,
    /// Most tokens of a sequence.
    pub most: usize,
    pub q_type: DType,
    pub kv_type: DType,
    pub lists: Lists,
    pub slots: bool,
    pub scale: Option<f64>,
    pub cap: Option<f64>,
    pub window: usize,
    pub sinks: bool,
    pub scales: [Scales; 2],
    /// What no row sees is NaN, scales included.
    pub poisoned: bool,
    /// Keys of some runs of tokens are NaN, all that a warp or a CTA attends to among them.
    pub nan_keys: bool,
    /// Tensors lie where every kernel takes them: rows are whole, and begin on 16 bytes.
    pub aligned: bool,
    /// MLA: the values are the first channels of the keys.
    pub latent: bool,
    /// Some tokens are coded in INT4, in blocks of `block`.
    pub int4: bool,
}

impl Default for Spec {
    fn default() -> Spec {
        Spec {
            batch: 2,
            positions: None,
            tree: false,
            q_lens: false,
            keep_rows: false,
            kv_heads: 2,
            group: 4,
            dim: 64,
            value_dim: 64,
            page: 16,
            block: 16,
            most: 300,
            q_type: F16,
            kv_type: F16,
            lists: Lists::Shared,
            slots: false,
            scale: None,
            cap: None,
            window: 0,
            sinks: false,
            scales: [Scales::Absent; 2],
            poisoned: true,
            nan_keys: false,
            aligned: false,
            latent: false,
            int4: false,
        }
    }
}

impl Spec {
    /// Any sizes, and none of what is new.
    pub fn plain(rng: &mut Rng) -> Spec {
        // 9/3, 28/4, 40/8 and 128/1 are heads of models.
        let heads = [(1, 1), (2, 3), (3, 3), (4, 7), (8, 5), (2, 16), (1, 128), (2, 4)];
        let (kv_heads, group) = rng.pick(&heads);
        let pages = [(1, 1), (2, 4), (61, 61), (64, 16), (16, 64), (576, 64), (8, 8), (32, 1), (16, 2)];
        let (page, block) = rng.pick(&pages);
        let dim = rng.pick(&[16, 24, 64, 80, 128]);
        Spec {
            batch: rng.size(1..=3),
            kv_heads,
            group,
            dim,
            value_dim: dim,
            page,
            block,
            most: rng.pick(&[40, 300]),
            q_type: rng.pick(&[F32, F16, BF16]),
            kv_type: rng.pick(&[F32, F16, BF16]),
            lists: rng.pick(&[Lists::Absent, Lists::Shared]),
            poisoned: rng.one_in(2),
            ..Spec::default()
        }
    }

    /// 16-bit queries, 128 channels, blocks and pages of whole tiles of 16 tokens; else anything.
    pub fn in_whole_tiles(rng: &mut Rng) -> Spec {
        let spec = Spec::random(rng);
        let (positions, group) = rng.pick(&[(None, 1), (None, 4), (None, 7), (None, 16), (Some(2), 3), (Some(4), 4)]);
        let (batch, kv_heads) = rng.pick(&[(1, 1), (2, 2), (2, 9), (5, 7), (9, 8)]);
        let (page, block) = rng.pick(&[(16, 16), (64, 16), (64, 64), (16, 48), (96, 32)]);
        let scales = spec.scales.map(|scale| if scale == Scales::PerToken { Scales::Absent } else { scale });
        let q_type = if spec.q_type == F32 { F16 } else { spec.q_type };
        let lists = match (positions, spec.lists) {
            (None, Lists::Own) => Lists::Shared,
            (_, lists) => lists,
        };
        Spec {
            batch,
            positions,
            kv_heads,
            group,
            dim: 128,
            value_dim: 128,
            page,
            block: if spec.slots { 16 } else { block },
            most: if batch > 2 { 40 } else { 300 },
            kv_type: if matches!(spec.kv_type, F8E4M3 | F8E5M2) { spec.kv_type } else { q_type },
            q_type,
            lists,
            scales,
            ..spec
        }
    }

    pub fn with_positions(self, rng: &mut Rng) -> Spec {
        let lists = rng.pick(&[Lists::Absent, Lists::Shared, Lists::Own]);
        let (positions, q_lens, keep_rows) = (rng.pick(&[1, 2, 3, 4, 4, 7]), rng.one_in(2), rng.one_in(2));
        Spec { positions: Some(positions), q_lens, keep_rows, lists, ..self }
    }

    pub fn with_window(self, rng: &mut Rng) -> Spec {
        Spec { window: rng.pick(&[1, 2, 5, 16, 33, 64, 100, 128, 5000]), ..self }
    }

    pub fn with_cap(self, rng: &mut Rng) -> Spec {
        Spec { cap: Some(rng.pick(&[1e-3, 0.5, 2.0, 30.0, 1e4])), ..self }
    }

    pub fn with_sinks(self) -> Spec {
        Spec { sinks: true, ..self }
    }

    pub fn with_value_dim(self, rng: &mut Rng) -> Spec {
        let (dim, value_dim) = rng.pick(&[(24, 16), (64, 128), (192, 128), (576, 512), (576, 576), (16, 72)]);
        Spec { dim, value_dim, scale: Some(rng.pick(&[0.05, 0.1])), ..self }
    }

    /// Partials of heads wider than 256 do not fit the shared memory of a GPU where many rows share them.
    pub fn with_partials(self, backend: &Backend) -> Spec {
        let most = if backend.is_cuda() { 256 } else { usize::MAX };
        Spec { dim: self.dim.min(most), value_dim: self.value_dim.min(most), ..self }
    }

    pub fn with_fp8(self, rng: &mut Rng) -> Spec {
        let mut scales = || rng.pick(&[Scales::Absent, Scales::One, Scales::PerHead, Scales::PerToken]);
        let scales = [scales(), scales()];
        Spec { kv_type: rng.pick(&[F8E4M3, F8E5M2]), scales, ..self }
    }

    /// Lists that say where their entries lie.
    pub fn with_slots(self, rng: &mut Rng) -> Spec {
        let (page, block) = rng.pick(&[(16, 16), (64, 16), (8, 1), (32, 4), (64, 64)]);
        let lists = if self.lists == Lists::Absent { Lists::Shared } else { self.lists };
        Spec { slots: true, page, block, lists, ..self }
    }

    /// Each argument by chance.
    pub fn random(rng: &mut Rng) -> Spec {
        let mut spec = Spec::plain(rng);
        if rng.one_in(2) {
            spec = spec.with_positions(rng);
        }
        if rng.one_in(2) {
            spec = spec.with_window(rng);
        }
        if rng.one_in(3) {
            spec = spec.with_cap(rng);
        }
        if rng.one_in(2) {
            spec = spec.with_sinks();
        }
        if rng.one_in(4) {
            spec = spec.with_value_dim(rng);
        }
        if rng.one_in(2) {
            spec = spec.with_fp8(rng);
        }
        if rng.one_in(3) {
            spec = spec.with_slots(rng);
        }
        spec
    }

    /// A layout of keys or values.
    fn kv_layout(&self, rng: &mut Rng, rank: usize) -> Layout {
        match self.aligned {
            true => Layout::random_aligned(rng, rank),
            false if rng.one_in(4) => Layout::random(rng, rank),
            false => Layout::random_rows(rng, rank),
        }
    }

    /// A layout of queries or results.
    fn layout(&self, rng: &mut Rng, rank: usize) -> Layout {
        if self.aligned { Layout::random_aligned(rng, rank) } else { Layout::random(rng, rank) }
    }

    pub fn rows(&self) -> usize {
        self.positions.unwrap_or(1)
    }

    pub fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    fn lists_per_head(&self) -> usize {
        if self.lists == Lists::Own { self.rows() } else { 1 }
    }

    /// [B, Q, ..], without Q in a call of rank 3.
    pub fn shape(&self, rest: &[usize]) -> Vec<usize> {
        [&[self.batch], self.positions.as_slice(), rest].concat()
    }

    /// [B, Q, Hk, ..], without Q where lists are shared.
    pub fn list_shape(&self, rest: &[usize]) -> Vec<usize> {
        let own = self.positions.filter(|_| self.lists == Lists::Own);
        [&[self.batch], own.as_slice(), &[self.kv_heads], rest].concat()
    }
}

/// Block ids of each list, [B, lists, Hk]; entries may be out of range, but not repeated.
pub type Ids = Array<Vec<i64>>;

/// Values as the library sees them, already rounded to their types.
pub struct Model {
    pub spec: Spec,
    /// [B, Q, Hq, D]
    pub q: Array<f64>,
    /// As they are stored, [pages, P, Hk, D] and [.., Dv].
    pub k: Array<f64>,
    pub v: Array<f64>,
    /// [pages, P, Hk] each, whatever the shape in which they are given.
    pub scales: [Array<f64>; 2],
    /// [B, max_pages]
    pub table: Array<i64>,
    /// [B, Hk, runs of a page]: where each lies in the pool.
    pub slots: Array<i64>,
    pub lens: Vec<i64>,
    pub q_lens: Vec<i64>,
    pub sinks: Vec<f64>,
    /// What rows see of each other.
    pub masks: Masks,
    pub int4: Option<Int4>,
}

impl Model {
    pub fn random(rng: &mut Rng, spec: Spec) -> Model {
        let max_pages = spec.most.div_ceil(spec.page);
        let runs = spec.batch * max_pages * if spec.slots { spec.kv_heads } else { 1 };
        let pages = runs + 2;
        let mut order: Vec<i64> = (0..pages as i64).collect();
        rng.shuffle(&mut order);
        let kv_heads = if spec.slots { 1 } else { spec.kv_heads };
        let tokens = [pages, spec.page, kv_heads];
        let stored = |rng: &mut Rng, dim| rng.normals(&[&tokens[..], &[dim]].concat()).map(|&x| spec.kv_type.round(x));
        let lens = (0..spec.batch).map(|_| match rng.size(0..=5) {
            0 => rng.int(0..=4),
            1 => spec.most as i64,
            _ => rng.int(0..=spec.most as i64),
        });
        let lens = lens.collect();
        let q_lens = (0..spec.batch).map(|_| rng.int(-1..=spec.rows() as i64 + 1)).collect();
        let sinks = (0..spec.heads()).map(|_| rng.pick(&[-3.0, 0.0, 2.0, 90.0, f64::INFINITY, f64::NEG_INFINITY]));
        let sinks = sinks.collect();
        let scales = spec.scales.map(|kind| scales(rng, kind, &tokens));
        let masks = match spec.tree {
            true => Masks::random(rng, spec.batch, spec.rows()),
            false => Masks::chains(spec.batch, spec.rows()),
        };
        let sizes = int4::Sizes {
            batch: spec.batch,
            kv_heads: if spec.slots { spec.kv_heads } else { kv_heads },
            dims: [spec.dim, spec.value_dim],
            block: spec.block,
            most: spec.most,
            in_tiles: spec.aligned.then_some(spec.kv_type),
            in_slots: spec.slots,
        };
        let int4 = spec.int4.then(|| Int4::random(rng, sizes));
        let coded_pages = int4.as_ref().map_or(0, |int4| int4.codes[0].shape[0]);
        let mut coded_order: Vec<i64> = (0..coded_pages as i64).map(|page| pages as i64 + page).collect();
        rng.shuffle(&mut coded_order);
        // Kernels on tensor cores round queries of float32 to the type of the keys.
        let query_type = if spec.kv_type.bits == 16 && spec.q_type == F32 { spec.kv_type } else { spec.q_type };
        let mut model = Model {
            int4,
            q: rng.normals(&[spec.batch, spec.rows(), spec.heads(), spec.dim]).map(|&x| query_type.round(x)),
            k: stored(rng, spec.dim),
            v: stored(rng, spec.value_dim),
            scales,
            table: Array::from_fn(&[spec.batch, max_pages], |at| order[(at[0] * max_pages + at[1]) % order.len()]),
            slots: Array::from_fn(&[spec.batch, spec.kv_heads, max_pages], |at| {
                let n = (at[0] * spec.kv_heads + at[1]) * max_pages + at[2];
                // Two of three blocks are coded.
                if n.is_multiple_of(3) || coded_pages == 0 {
                    order[n % order.len()]
                } else {
                    coded_order[n % coded_pages]
                }
            }),
            lens,
            q_lens,
            sinks,
            masks,
            spec,
        };
        if model.spec.latent {
            let shape = model.v.shape.clone();
            model.v = Array::from_fn(&shape, |at| model.k[[at[0], at[1], at[2], at[3]]]);
        }
        // A page or slot that is not there holds nothing.
        for page in model.table.data.iter_mut().chain(&mut model.slots.data) {
            if rng.one_in(12) {
                *page = rng.pick(&[-1, i32::MIN as i64, i32::MAX as i64, (pages + coded_pages) as i64]);
            }
        }
        if model.spec.nan_keys {
            model.spoil_keys(rng);
        }
        model
    }

    /// Whole tiles of some heads, of a block or several.
    fn spoil_keys(&mut self, rng: &mut Rng) {
        for at in array::indices(&[self.spec.batch, self.spec.kv_heads]) {
            let (i, g, len) = (at[0], at[1], self.len(at[0]));
            let begin = rng.size(0..=len / 64) * 64;
            let count = rng.pick(&[0, 64, 64, 64, 128, len]);
            for t in begin..(begin + count).min(len) {
                let Some([page, row, head]) = self.place(i, g, t) else { continue };
                self.k[[page, row, head, t % self.spec.dim]] = f64::NAN;
            }
        }
    }

    /// [`TOLERANCE`], and what is added where queries are rounded to 16 bits of their largest number, so that codes are multiplied in whole
    /// numbers: D products with numbers of a few units, each off by up to 2⁻¹⁶ of some four units.
    pub fn tolerance(&self) -> f64 {
        if self.spec.int4 { 5e-4 } else { TOLERANCE }
    }

    /// What a GPU adds to the error of acc, relative to l: its weights may have 16 bits, and values are a few units, times
    /// their scale.
    pub fn weight_rounding(&self, is_cuda: bool) -> f64 {
        let weights = match self.spec.kv_type {
            _ if !is_cuda => return 0.0,
            F32 => return 0.0,
            BF16 => BF16,
            _ => F16,
        };
        let scale = self.scales[1]
            .data
            .iter()
            .fold(1.0, |most: f64, scale| if scale.is_finite() { most.max(scale.abs()) } else { most });
        4.0 * scale * weights.rounding(1.0)
    }

    /// What a GPU adds to the error of scores: queries that meet codes are rounded to float16, each channel on its own. The root of
    /// the sum of the squares of these errors, with the largest code and scale for all.
    pub fn score_rounding(&self, is_cuda: bool) -> f64 {
        let Some(int4) = self.int4.as_ref().filter(|_| is_cuda) else { return 0.0 };
        let most = |x: f64, y: f64| if y.is_finite() { x.max(y) } else { x };
        let scale = int4.scales[0].data.iter().copied().fold(0.0, most);
        let weight = int4.weights.iter().flat_map(|weights| &weights.data).copied().fold(1.0, most);
        let squares = self.q.data.chunks(self.spec.dim).map(|q| q.iter().map(|x| x * x).sum::<f64>());
        let query = squares.fold(0.0, most).sqrt();
        self.spec.scale.unwrap_or(1.0) * query * weight * scale * 7.5 * F16.rounding(1.0)
    }

    pub fn len(&self, i: usize) -> usize {
        let most = if self.spec.slots { i64::MAX } else { (self.table.shape[1] * self.spec.page) as i64 };
        self.lens[i].clamp(0, most) as usize
    }

    /// Rows that a sequence has.
    pub fn rows(&self, i: usize) -> usize {
        let rows = self.spec.rows();
        if self.spec.q_lens { self.q_lens[i].clamp(0, rows as i64) as usize } else { rows }
    }

    /// Whether a row's results stay as they are.
    pub fn keeps(&self, i: usize, r: usize) -> bool {
        self.spec.keep_rows && r >= self.rows(i)
    }

    /// A share of the blocks of each list, ascending, and some that are not there.
    pub fn ids(&self, rng: &mut Rng, share: f64) -> Ids {
        let spec = &self.spec;
        Array::from_fn(&[spec.batch, spec.lists_per_head(), spec.kv_heads], |at| {
            let n = self.len(at[0]).div_ceil(spec.block);
            let mut ids: Vec<i64> =
                rng.subset(n, (share * n as f64).round() as usize).into_iter().map(|id| id as i64).collect();
            if rng.one_in(3) {
                ids.push(n as i64 + rng.int(0..=3));
            }
            if rng.one_in(6) {
                ids.insert(0, -1);
            }
            ids
        })
    }

    /// The list of row `r`.
    pub fn list<'i>(&self, ids: &'i Ids, i: usize, r: usize, g: usize) -> &'i [i64] {
        &ids[[i, if self.spec.lists == Lists::Own { r } else { 0 }, g]]
    }

    /// The tokens of some blocks that row `r` sees.
    pub fn tokens(&self, i: usize, r: usize, blocks: &[i64]) -> Vec<usize> {
        let (size, len, rows) = (self.spec.block, self.len(i), self.rows(i));
        let blocks = blocks.iter().filter_map(|&id| usize::try_from(id).ok());
        let sees = |t: &usize| self.masks.sees([i, r, *t], len, rows, self.spec.window);
        blocks.flat_map(|id| id * size..(id + 1) * size).filter(sees).collect()
    }

    /// (page, row, head) of a token.
    pub fn place(&self, i: usize, g: usize, t: usize) -> Option<[usize; 3]> {
        let (p, row) = (t / self.spec.page, t % self.spec.page);
        let (page, head) = match self.spec.slots {
            true => (*self.slots.row([i, g]).get(p)?, 0),
            false => (*self.table.row([i]).get(p)?, g),
        };
        (0..self.k.shape[0] as i64).contains(&page).then_some([page as usize, row, head])
    }

    /// (page, row, head) of a token among those that are coded: `None` where it is not, `Some(None)` where no page holds it.
    pub fn coded_place(&self, i: usize, g: usize, t: usize) -> Option<Option<[usize; 3]>> {
        let int4 = self.int4.as_ref()?;
        if !int4.in_slots {
            return int4.coded(i, self.len(i)).contains(&t).then(|| int4.place(i, g, t));
        }
        let slot = self.slots.row([i, g]).get(t / self.spec.page)?;
        let page = usize::try_from(*slot).ok()?.checked_sub(self.k.shape[0])?;
        Some((page < int4.codes[0].shape[0]).then_some([page, t % int4.block, 0]))
    }

    /// Key and value of a token; none where no page holds it.
    pub fn token(&self, i: usize, g: usize, t: usize) -> Option<[Vec<f64>; 2]> {
        if let Some((int4, place)) = self.int4.as_ref().zip(self.coded_place(i, g, t)) {
            let [page, row, _] = place?;
            return if int4.in_slots { Some(int4.token_in_slot([page, row], g)) } else { int4.token(i, g, t) };
        }
        let at = self.place(i, g, t)?;
        let row = |of: &Array<f64>, scale: &Array<f64>| of.row(at).iter().map(|x| x * scale[at]).collect();
        Some([row(&self.k, &self.scales[0]), row(&self.v, &self.scales[1])])
    }

    /// The formula, for row `r` and query head `h` over these blocks.
    pub fn expected(&self, i: usize, r: usize, h: usize, blocks: &[i64]) -> oracle::State {
        let (spec, g) = (&self.spec, h / self.spec.group);
        let tokens: Vec<_> = self.tokens(i, r, blocks).iter().filter_map(|&t| self.token(i, g, t)).collect();
        let [keys, values] = [0, 1].map(|n| tokens.iter().map(|token| token[n].as_slice()).collect::<Vec<_>>());
        let scale = spec.scale.unwrap_or(1.0 / (spec.dim as f64).sqrt());
        oracle::capped_attention(self.q.row([i, r, h]), &keys, &values, spec.value_dim, scale, spec.cap)
    }

    /// The same layer for row `r` alone, whose sequence ends with it; for a call of rank 3.
    pub fn row(&self, r: usize) -> Model {
        let spec = Spec { positions: None, q_lens: false, ..self.spec.clone() };
        let rows = self.spec.rows();
        Model {
            q: Array::from_fn(&[spec.batch, 1, spec.heads(), spec.dim], |at| self.q[[at[0], r, at[2], at[3]]]),
            k: self.k.clone(),
            v: self.v.clone(),
            scales: self.scales.clone(),
            table: self.table.clone(),
            slots: self.slots.clone(),
            lens: (0..spec.batch).map(|i| (self.len(i) + r + 1) as i64 - rows as i64).collect(),
            q_lens: self.q_lens.clone(),
            sinks: self.sinks.clone(),
            masks: Masks::chains(spec.batch, 1),
            int4: self.int4.clone(),
            spec,
        }
    }

    /// Every block that there is, where a call has no list.
    pub fn everything(&self) -> Ids {
        let spec = &self.spec;
        Array::from_fn(&[spec.batch, 1, spec.kv_heads], |at| (0..self.len(at[0]).div_ceil(spec.block) as i64).collect())
    }

    /// Makes NaN what no row sees over these lists.
    pub fn poison(&mut self, lists: &[&Ids]) {
        let mut used = Array::filled(&self.k.shape[..3], false);
        let mut coded = vec![];
        for at in array::indices(&[self.spec.batch, self.spec.rows(), self.spec.kv_heads]) {
            let [i, r, g] = [at[0], at[1], at[2]];
            for ids in lists {
                for t in self.tokens(i, r, self.list(ids, i, r, g)) {
                    match (self.coded_place(i, g, t), self.place(i, g, t)) {
                        (Some(place), _) => coded.extend(place),
                        (None, Some(place)) => used[place] = true,
                        (None, None) => {}
                    }
                }
            }
        }
        if let Some(int4) = &mut self.int4 {
            let used = int4::used(int4, coded.into_iter());
            int4.poison(&used);
        }
        for at in array::indices(&used.shape) {
            let place = [at[0], at[1], at[2]];
            if !used[place] {
                (0..self.spec.dim).for_each(|d| self.k[[at[0], at[1], at[2], d]] = f64::NAN);
                (0..self.spec.value_dim).for_each(|d| self.v[[at[0], at[1], at[2], d]] = f64::NAN);
                for (scales, kind) in self.scales.iter_mut().zip(self.spec.scales) {
                    if kind == Scales::PerToken {
                        scales[place] = f64::NAN;
                    }
                }
            }
        }
    }
}

fn scales(rng: &mut Rng, kind: Scales, tokens: &[usize; 3]) -> Array<f64> {
    let mut value = || F32.round(rng.pick(&[0.25, 0.7, 1.0, 1.9]));
    let (one, heads) = (value(), (0..tokens[2]).map(|_| value()).collect::<Vec<f64>>());
    Array::from_fn(tokens, |at| match kind {
        Scales::Absent => 1.0,
        Scales::One => one,
        Scales::PerHead => heads[at[2]],
        Scales::PerToken => value(),
    })
}
