//! vwd_select_blocks over summaries that the test makes itself, for one query position or several, with lists that these
//! share or lists of their own. Labels are in select_labels.rs.
//!
//! Scores are compared with the formula. The selection is then exact with respect to the scores that the call wrote: no
//! tolerance can hide a wrong top-k.

use crate::Case;
use crate::index::Place;
use crate::support::paged::random_lens;
use crate::support::*;
use std::ops::Range;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    select_minmax_agrees_with_the_formula,
    select_mean_softmax_agrees_with_the_formula,
    select_mean_dot_agrees_with_the_formula,
    select_gives_ties_to_the_lower_block,
    select_ranks_nan_last,
    select_handles_many_blocks,
];

/// One call's sizes, queries and lengths.
pub struct Scene<'b> {
    pub batch: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub dim: usize,
    /// Tokens of a block, and of the longest sequence but for some that are longer.
    pub block: usize,
    pub capacity: usize,
    /// Q, if q has a dimension for it, and whether every position has a list of its own.
    pub positions: Option<usize>,
    pub own: bool,
    pub q: Tensor<'b>,
    /// [B, Q, Hq, D]
    pub queries: Array<f64>,
    q_lens: Option<(Tensor<'b>, Array<i64>)>,
    pub lens: Tensor<'b>,
    pub len_values: Array<i64>,
    pub scale: f32,
}

impl<'b> Scene<'b> {
    pub fn random(backend: &'b Backend, rng: &mut Rng) -> Scene<'b> {
        let (batch, kv_heads, group) = (rng.size(1..=3), rng.size(1..=3), rng.size(1..=5));
        let (dim, block) = (rng.pick(&[16, 24, 64, 128, 256, 576]), rng.pick(&[1, 8, 16, 24, 64]));
        let capacity = rng.size(0..=40 * block);
        Scene::new(backend, rng, [batch, kv_heads, group, dim], block, capacity)
    }

    /// With several positions half of the time.
    pub fn new(backend: &'b Backend, rng: &mut Rng, sizes: [usize; 4], block: usize, capacity: usize) -> Scene<'b> {
        let positions = rng.one_in(2).then(|| rng.size(1..=4));
        Scene::with_positions(backend, rng, sizes, block, capacity, positions)
    }

    pub fn with_positions(
        backend: &'b Backend,
        rng: &mut Rng,
        sizes: [usize; 4],
        block: usize,
        capacity: usize,
        positions: Option<usize>,
    ) -> Scene<'b> {
        let [batch, kv_heads, group, dim] = sizes;
        let dtype = rng.pick(&[F32, F16, BF16]);
        let count = positions.unwrap_or(1);
        let queries = rng.normals(&[batch, count, kv_heads * group, dim]).map(|&x| dtype.round(x));
        let len_values = random_lens(rng, batch, capacity);
        let q_lens = rng.one_in(2).then(|| {
            let values = Array::from_fn(&[batch], |_| rng.int(-1..=count as i64 + 1));
            (Tensor::ints(backend, I32, &values, &Layout::random(rng, 1)), values)
        });
        let scene = Scene {
            batch,
            kv_heads,
            group,
            dim,
            block,
            capacity,
            positions,
            own: positions.is_some() && rng.one_in(2),
            q: Tensor::poisoned(backend, F32, &[0], &Layout::default()),
            queries,
            q_lens,
            lens: Tensor::ints(backend, I32, &len_values, &Layout::random(rng, 1)),
            len_values,
            scale: rng.pick(&[0.0, 0.0, 0.3]),
        };
        let mut queries = scene.queries.clone();
        for i in 0..batch {
            for r in 0..count {
                // A NaN now and then; rows that are not there hold anything.
                if rng.one_in(10) || r >= scene.q_len(i) {
                    let at = [i, r, rng.size(0..=kv_heads * group - 1), rng.size(0..=dim - 1)];
                    queries[at] = f64::NAN;
                }
            }
        }
        scene.with_queries(backend, rng, dtype, queries)
    }

    /// The same with other queries [B, Q, Hq, D].
    pub fn with_queries(self, backend: &'b Backend, rng: &mut Rng, dtype: DType, queries: Array<f64>) -> Scene<'b> {
        let [batch, _, heads, dim] = queries.shape[..] else { unreachable!() };
        let shape = match self.positions {
            Some(count) => vec![batch, count, heads, dim],
            None => vec![batch, heads, dim],
        };
        let q = Array::new(&shape, queries.data.clone());
        Scene { q: Tensor::floats(backend, dtype, &q, &Layout::random(rng, shape.len())), queries, ..self }
    }

    /// Every position has a list of its own, if there are positions.
    pub fn with_own_lists(self) -> Scene<'b> {
        Scene { own: self.positions.is_some(), ..self }
    }

    /// Positions share their list.
    pub fn with_shared_lists(self) -> Scene<'b> {
        Scene { own: false, ..self }
    }

    /// All sequences of this length and with all positions.
    pub fn with_lens(self, backend: &'b Backend, len: i64) -> Scene<'b> {
        let len_values = Array::filled(&[self.batch], len);
        let lens = Tensor::ints(backend, I32, &len_values, &Layout::default());
        Scene { lens, len_values, q_lens: None, ..self }
    }

    pub fn len(&self, i: usize) -> usize {
        self.len_values[[i]].max(0) as usize
    }

    pub fn q_len(&self, i: usize) -> usize {
        let count = self.positions.unwrap_or(1);
        self.q_lens.as_ref().map_or(count, |(_, values)| values[[i]].clamp(0, count as i64) as usize)
    }

    /// Tokens that position r sees: those up to its own.
    pub fn sees(&self, i: usize, r: usize) -> usize {
        let position = self.len(i) as i64 - self.q_len(i) as i64 + r as i64;
        if r < self.q_len(i) { (position + 1).max(0) as usize } else { 0 }
    }

    /// Lists of a sequence and KV head.
    pub fn per_head(&self) -> usize {
        if self.own { self.positions.unwrap() } else { 1 }
    }

    /// The positions that list l is for. Those whose queries hold a NaN ask for nothing.
    pub fn positions(&self, i: usize, l: usize) -> Range<usize> {
        if self.own { l.min(self.q_len(i))..(l + 1).min(self.q_len(i)) } else { 0..self.q_len(i) }
    }

    /// Tokens of which list l chooses.
    pub fn tokens(&self, i: usize, l: usize) -> usize {
        self.positions(i, l).map(|r| self.sees(i, r)).max().unwrap_or(0)
    }

    pub fn blocks(&self, i: usize, l: usize) -> usize {
        self.tokens(i, l).div_ceil(self.block)
    }

    pub fn queries_of(&self, i: usize, r: usize, g: usize) -> Vec<&[f64]> {
        (0..self.group).map(|h| self.queries.row([i, r, g * self.group + h])).collect()
    }

    pub fn is_nan(&self, i: usize, r: usize, g: usize) -> bool {
        self.queries_of(i, r, g).iter().any(|q| q.iter().any(|x| x.is_nan()))
    }

    /// The bits of a status that follow from queries and lengths.
    pub fn status(&self, i: usize, l: usize, g: usize) -> i64 {
        let nan = self.positions(i, l).any(|r| self.is_nan(i, r, g));
        let count = self.positions.unwrap_or(1) as i64;
        let clamped =
            self.len_values[[i]] < 0 || self.q_lens.as_ref().is_some_and(|(_, v)| !(0..=count).contains(&v[[i]]));
        (nan as i64 * VWD_SELECT_NAN as i64) | (clamped as i64 * VWD_SELECT_CLAMPED as i64)
    }

    pub fn q_lens_c(&self) -> vwd_tensor {
        self.q_lens.as_ref().map_or(absent(), |(tensor, _)| tensor.c())
    }

    pub fn scale(&self) -> f64 {
        if self.scale == 0.0 { 1.0 / (self.dim as f64).sqrt() } else { self.scale as f64 }
    }

    /// The shape of a tensor with a row for each list.
    pub fn rows(&self, last: &[usize]) -> Vec<usize> {
        match self.own {
            true => [&[self.batch, self.per_head(), self.kv_heads], last].concat(),
            false => [&[self.batch, self.kv_heads], last].concat(),
        }
    }

    /// Sequence, list and KV head of an index of such a tensor.
    pub fn list_at(&self, at: &[usize]) -> [usize; 3] {
        if self.own { [at[0], at[1], at[2]] } else { [at[0], 0, at[1]] }
    }

    /// Every list, by sequence, list of the sequence and KV head.
    pub fn lists(&self) -> impl Iterator<Item = [usize; 3]> {
        indices(&[self.batch, self.per_head(), self.kv_heads]).map(|at| [at[0], at[1], at[2]])
    }

    pub fn output(&self, backend: &'b Backend, rng: &mut Rng, dtype: DType, last: &[usize]) -> Tensor<'b> {
        let shape = self.rows(last);
        Tensor::poisoned(backend, dtype, &shape, &Layout::random(rng, shape.len()))
    }

    /// What such a tensor holds, as [B, lists, Hk, ..].
    pub fn read<T: Clone>(&self, array: Array<T>) -> Array<T> {
        let last = &array.shape[self.rows(&[]).len()..];
        Array::new(&[&[self.batch, self.per_head(), self.kv_heads], last].concat(), array.data)
    }
}

/// What a call may choose: budgets, forced blocks, capacity of the result.
pub struct Choice<'b> {
    pub k: usize,
    pub init: usize,
    pub local: usize,
    budgets: Option<(Tensor<'b>, Array<i64>)>,
    pub cap: usize,
}

impl<'b> Choice<'b> {
    pub fn random(backend: &'b Backend, rng: &mut Rng, batch: usize, most: usize) -> Choice<'b> {
        let (init, local) = (rng.size(0..=2), rng.size(0..=3));
        let has_budgets = rng.one_in(2);
        let needs_some = !has_budgets && init + local == 0;
        let k = rng.size(needs_some.into()..=most.max(1));
        let cap = k.max(init + local) + rng.size(0..=3);
        let budgets = has_budgets.then(|| {
            let values = Array::from_fn(&[batch], |_| rng.int(-2..=cap as i64 + 3));
            (Tensor::ints(backend, I32, &values, &Layout::random(rng, 1)), values)
        });
        Choice { k, init, local, budgets, cap }
    }

    /// So many, none of them forced.
    pub fn plain(k: usize) -> Choice<'b> {
        Choice { k, init: 0, local: 0, budgets: None, cap: k }
    }

    pub fn budget(&self, i: usize) -> usize {
        self.budgets.as_ref().map_or(self.k, |(_, values)| values[[i]].clamp(0, self.cap as i64) as usize)
    }

    /// The bit of a status that follows from the budget.
    pub fn status(&self, i: usize) -> i64 {
        let clamped = self.budgets.as_ref().is_some_and(|(_, v)| !(0..=self.cap as i64).contains(&v[[i]]));
        clamped as i64 * VWD_SELECT_CLAMPED as i64
    }

    pub fn budgets_c(&self) -> vwd_tensor {
        self.budgets.as_ref().map_or(absent(), |(tensor, _)| tensor.c())
    }
}

pub struct ListTensors<'b> {
    pub ids: Tensor<'b>,
    pub counts: Tensor<'b>,
}

impl<'b> ListTensors<'b> {
    pub fn poisoned(backend: &'b Backend, rng: &mut Rng, scene: &Scene<'b>, cap: usize) -> ListTensors<'b> {
        let (ids, counts) = (scene.output(backend, rng, I32, &[cap]), scene.output(backend, rng, I32, &[]));
        ListTensors { ids, counts }
    }

    pub fn c(&self) -> vwd_block_list {
        vwd_block_list { ids: self.ids.c(), counts: self.counts.c(), slots: absent() }
    }

    /// Checks that each list is exactly this.
    pub fn check(&self, scene: &Scene, expected: impl Fn([usize; 3]) -> Vec<usize>) {
        let (ids, counts) = (scene.read(self.ids.read_ints()), scene.read(self.counts.read_ints()));
        for at in scene.lists() {
            let expected: Vec<i64> = expected(at).iter().map(|&id| id as i64).collect();
            assert_eq!(counts[at], expected.len() as i64, "count of list {at:?}");
            assert_eq!(ids.row(at)[..expected.len()], expected, "ids of list {at:?}");
        }
        self.check_written(scene);
    }

    pub fn check_written(&self, scene: &Scene) {
        let counts = scene.read(self.counts.read_ints());
        self.ids.assert_written("ids", |at| (at[at.len() - 1] as i64) < counts[scene.list_at(at)]);
        self.counts.assert_written("counts", |_| true);
    }
}

/// What the formula gives for one position.
pub struct Scored {
    /// (score, tolerance) of each block that it sees.
    pub blocks: Vec<(f64, f64)>,
    /// Something that it sees has no summary.
    pub missing: bool,
}

/// Runs the call with scores, without, and with too few places for scores; checks scores, selection and status, to which
/// `also` adds what follows from a list's candidates.
pub fn check_blocks(
    backend: &Backend,
    rng: &mut Rng,
    scene: &Scene,
    choice: &Choice,
    args: vwd_select_blocks_args,
    expected: impl Fn(usize, usize, usize) -> Scored,
    also: impl Fn([usize; 3]) -> i64,
) {
    let most = scene.lists().map(|[i, l, _]| scene.blocks(i, l)).max().unwrap_or(0) + rng.size(0..=2);
    let few = rng.size(0..=most);
    let rooms = [Some(most), None, Some(few)];
    let scores = rooms.map(|room| room.map(|room| scene.output(backend, rng, F32, &[room])));
    let lists = rooms.map(|_| ListTensors::poisoned(backend, rng, scene, choice.cap));
    let status = rooms.map(|_| scene.output(backend, rng, U32, &[]));
    for n in 0..rooms.len() {
        let args = vwd_select_blocks_args {
            block_size: scene.block as u32,
            k: choice.k as u32,
            init_blocks: choice.init as u32,
            local_blocks: choice.local as u32,
            scale: scene.scale,
            q: scene.q.c(),
            q_lens: scene.q_lens_c(),
            seq_lens: scene.lens.c(),
            budgets: choice.budgets_c(),
            selected: lists[n].c(),
            scores: scores[n].as_ref().map_or(absent(), Tensor::c),
            status: status[n].c(),
            ..args
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_blocks(backend.session(), &args, backend.stream()) });
    }
    let got = scene.read(scores[0].as_ref().unwrap().read_floats());
    let status = status.map(|status| scene.read(status.read_ints()));
    for at @ [i, l, g] in scene.lists() {
        let n = scene.blocks(i, l);
        let mut want: Vec<(f64, f64)> = vec![(f64::NEG_INFINITY, 0.0); n];
        let mut expected_status = scene.status(i, l, g) | choice.status(i) | also(at);
        for r in scene.positions(i, l) {
            let scored = expected(i, r, g);
            assert_eq!(scored.blocks.len(), scene.sees(i, r).div_ceil(scene.block));
            expected_status |= scored.missing as i64 * VWD_SELECT_NO_SUMMARY as i64;
            for (best, one) in want.iter_mut().zip(scored.blocks).filter(|_| !scene.is_nan(i, r, g)) {
                *best = (best.0.max(one.0), best.1.max(one.1));
            }
        }
        for (j, &(want, tolerance)) in want.iter().enumerate() {
            let got = got.row(at)[j];
            let close = got == want || want.is_finite() && (got - want).abs() <= tolerance;
            assert!(close, "score of block {j} of list {at:?}: {got}, expected {want} ± {tolerance:e}");
        }
        for (run, room) in rooms.iter().enumerate() {
            let short = room.is_some_and(|room| room < n) as i64 * VWD_SELECT_CLAMPED as i64;
            assert_eq!(status[run][at], expected_status | short, "status of list {at:?}");
        }
    }
    let few = (scores[2].as_ref().unwrap(), few);
    for (scores, room) in [(scores[0].as_ref().unwrap(), most), few] {
        let written = scene.read(scores.read_floats());
        for at @ [i, l, _] in scene.lists() {
            let n = scene.blocks(i, l).min(room);
            assert_eq!(written.row(at)[..n], got.row(at)[..n], "scores with {room} places");
        }
        scores.assert_written("scores", |at| {
            let [i, l, _] = scene.list_at(at);
            at[at.len() - 1] < scene.blocks(i, l)
        });
    }
    for list in &lists {
        list.check(scene, |at @ [i, l, _]| {
            let n = scene.blocks(i, l);
            let count = oracle::selection_size(n, choice.budget(i), choice.init, choice.local);
            oracle::top_k(&got.row(at)[..n], count, choice.init, choice.local)
        });
    }
    scene.q.assert_untouched("q");
    scene.lens.assert_untouched("seq_lens");
}

/// Without candidates.
pub fn none(_: [usize; 3]) -> i64 {
    0
}

// --- MINMAX ----------------------------------------------------------------------------------------------------------

pub struct MinMax<'b> {
    place: Place<'b>,
    max: Tensor<'b>,
    min: Tensor<'b>,
}

impl<'b> MinMax<'b> {
    /// Maxima and minima from this source of keys.
    pub fn new(
        backend: &'b Backend,
        rng: &mut Rng,
        scene: &Scene,
        keys: impl Fn(&mut Rng, &[usize]) -> Array<f64>,
    ) -> Self {
        let dtype = rng.pick(&[F32, F16, BF16]);
        let layouts = [Layout::random(rng, 4), Layout::random(rng, 4)];
        MinMax::placed(backend, rng, scene, dtype, layouts, keys)
    }

    /// The scene in memory, of this type and in these layouts.
    pub fn placed(
        backend: &'b Backend,
        rng: &mut Rng,
        scene: &Scene,
        dtype: DType,
        layouts: [Layout; 2],
        keys: impl Fn(&mut Rng, &[usize]) -> Array<f64>,
    ) -> Self {
        let place = Place::random(backend, rng, scene.batch, scene.capacity.div_ceil(scene.block));
        let extents = [place.pages, place.rows, scene.kv_heads, scene.dim];
        let (a, b) = (keys(rng, &extents), keys(rng, &extents));
        let of =
            |f: fn(f64, f64) -> f64| Array::new(&extents, a.data.iter().zip(&b.data).map(|(&a, &b)| f(a, b)).collect());
        MinMax {
            max: Tensor::floats(backend, dtype, &of(f64::max), &layouts[0]),
            min: Tensor::floats(backend, dtype, &of(f64::min), &layouts[1]),
            place,
        }
    }

    pub fn args(&self, scene: &Scene) -> vwd_select_blocks_args {
        let index = vwd_index {
            kind: VWD_INDEX_MINMAX,
            block_size: scene.block as u32,
            table: self.place.table_c(),
            key_max: self.max.c(),
            key_min: self.min.c(),
            ..args()
        };
        vwd_select_blocks_args { method: VWD_SELECT_MINMAX, index: kept(index), ..args() }
    }

    pub fn scores(&self, scene: &Scene) -> impl Fn(usize, usize, usize) -> Scored {
        let (max, min) = (self.max.read_floats(), self.min.read_floats());
        move |i, r, g| {
            let q = scene.queries_of(i, r, g);
            let block = |j| {
                let Some((page, row)) = self.place.find(i, j) else { return (f64::NEG_INFINITY, 0.0) };
                let (max, min) = (max.row([page, row, g]), min.row([page, row, g]));
                let size = |q: &[f64]| (0..q.len()).map(|c| q[c].abs() * (max[c].abs() + min[c].abs())).sum::<f64>();
                let magnitude = q.iter().map(|q| size(q)).sum::<f64>();
                // A float32 sum of 2·D products of sums of G queries, in any order.
                let terms = 2 * scene.dim + scene.group + 2;
                (oracle::minmax_score(&q, max, min), terms as f64 * F32.epsilon() * magnitude)
            };
            let blocks = 0..scene.sees(i, r).div_ceil(scene.block);
            let missing = blocks.clone().any(|j| self.place.find(i, j).is_none());
            Scored { blocks: blocks.map(block).collect(), missing }
        }
    }
}

fn select_minmax_agrees_with_the_formula(backend: &Backend) {
    rounds(80, |rng| {
        let scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let summaries = MinMax::new(backend, rng, &scene, |rng, extents| rng.normals(extents));
        check_blocks(backend, rng, &scene, &choice, summaries.args(&scene), summaries.scores(&scene), none);
    });
}

/// Whole numbers make scores exact, a few of them make most scores equal.
fn select_gives_ties_to_the_lower_block(backend: &Backend) {
    rounds(24, |rng| {
        // Some are so long that more than one CTA selects.
        let (block, blocks) = (8, if rng.one_in(6) { rng.size(8192..=9000) } else { rng.size(1..=300) });
        let scene = Scene::new(backend, rng, [1, 2, 2, 16], block, block * blocks);
        let queries = rng.whole(&scene.queries.shape, 1);
        let scene = scene.with_queries(backend, rng, F32, queries);
        let most = rng.pick(&[0, 1, 1]);
        let choice = Choice::random(backend, rng, 1, blocks);
        let summaries = MinMax::new(backend, rng, &scene, |rng, extents| {
            // One number for all channels of a block, so that few scores are possible.
            let per_block = rng.whole(&extents[..3], most);
            Array::from_fn(extents, |at| per_block[[at[0], at[1], at[2]]])
        });
        let scores = summaries.scores(&scene);
        let exact = |i, r, g| {
            let scored = scores(i, r, g);
            Scored { blocks: scored.blocks.into_iter().map(|(score, _)| (score, 0.0)).collect(), ..scored }
        };
        check_blocks(backend, rng, &scene, &choice, summaries.args(&scene), exact, none);
    });
}

fn select_ranks_nan_last(backend: &Backend) {
    rounds(5, |rng| {
        let block = 8;
        let scene = Scene::with_positions(backend, rng, [1, 1, 1, 16], block, block * 50, None);
        let queries = rng.normals(&scene.queries.shape);
        let scene = scene.with_queries(backend, rng, F32, queries.map(|&x| F32.round(x))).with_lens(backend, 400);
        let summaries = MinMax::new(backend, rng, &scene, |rng, extents| {
            let mut keys = rng.normals(extents);
            for row in 0..extents[0] * extents[1] {
                if rng.one_in(3) {
                    keys.data[row * 16..][..16].fill(f64::NAN);
                }
            }
            keys
        });
        let selected = ListTensors::poisoned(backend, rng, &scene, 50);
        let k = rng.size(1..=50);
        let args = vwd_select_blocks_args {
            block_size: block as u32,
            k: k as u32,
            q: scene.q.c(),
            seq_lens: scene.lens.c(),
            selected: selected.c(),
            ..summaries.args(&scene)
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_blocks(backend.session(), &args, backend.stream()) });
        let scores: Vec<f64> = summaries.scores(&scene)(0, 0, 0).blocks.into_iter().map(|(score, _)| score).collect();
        let numbers = scores.iter().filter(|score| !score.is_nan()).count();
        selected.check_written(&scene);
        let chosen = selected.ids.read_ints();
        assert_eq!(selected.counts.read_ints()[[0, 0]], k as i64);
        let of_numbers = chosen.data[..k].iter().filter(|&&j| !scores[j as usize].is_nan()).count();
        assert_eq!(of_numbers, numbers.min(k), "numbers come before NaN");
    });
}

/// Enough blocks that the work is shared and that top-k is no longer small.
fn select_handles_many_blocks(backend: &Backend) {
    rounds(8, |rng| {
        let (block, blocks) = (16, rng.pick(&[2048, 4096, 5000, 9000, 17000]));
        let scene = Scene::new(backend, rng, [2, 2, 4, 64], block, block * blocks);
        let most = rng.pick(&[64, 200, 512, 5000]);
        let choice = Choice::random(backend, rng, 2, most);
        let summaries = MinMax::new(backend, rng, &scene, |rng, extents| rng.normals(extents));
        check_blocks(backend, rng, &scene, &choice, summaries.args(&scene), summaries.scores(&scene), none);
    });
}

// --- MEAN ------------------------------------------------------------------------------------------------------------

pub struct Means<'b> {
    place: Place<'b>,
    means: Tensor<'b>,
    window: usize,
    stride: usize,
}

impl<'b> Means<'b> {
    pub fn random(backend: &'b Backend, rng: &mut Rng, scene: &Scene) -> Means<'b> {
        let (window, stride) = rng.pick(&[(32, 16), (32, 16), (16, 16), (8, 4), (5, 3), (4, 7)]);
        let place = Place::random(backend, rng, scene.batch, oracle::windows(scene.capacity, window, stride));
        let values = rng.normals(&[place.pages, place.rows, scene.kv_heads, scene.dim]);
        let dtype = rng.pick(&[F32, F16, BF16]);
        let means = Tensor::floats(backend, dtype, &values, &Layout::random(rng, 4));
        Means { place, means, window, stride }
    }

    pub fn args(&self, method: u32) -> vwd_select_blocks_args {
        let default = (self.window, self.stride) == (32, 16);
        let index = vwd_index {
            kind: VWD_INDEX_MEAN,
            window: if default { 0 } else { self.window as u32 },
            stride: if default { 0 } else { self.stride as u32 },
            table: self.place.table_c(),
            means: self.means.c(),
            ..args()
        };
        vwd_select_blocks_args { method, index: kept(index), ..args() }
    }

    /// From the windows that are full for a position and have a mean, scored together by `score`. One whose page the index
    /// does not have is worth `without`, one for which it has no room −inf. The tolerance is `relative` of the score plus
    /// `absolute`.
    fn scores(
        &self,
        scene: &Scene,
        score: impl Fn(&[&[f64]], &[&[f64]]) -> Vec<f64>,
        without: f64,
        [relative, absolute]: [f64; 2],
    ) -> impl Fn(usize, usize, usize) -> Scored {
        let means = self.means.read_floats();
        move |i, r, g| {
            let full = oracle::windows(scene.sees(i, r), self.window, self.stride);
            let places: Vec<(usize, (usize, usize))> =
                (0..full).filter_map(|w| self.place.find(i, w).map(|at| (w, at))).collect();
            let rows: Vec<&[f64]> = places.iter().map(|&(_, (page, row))| means.row([page, row, g])).collect();
            let score_without = |w| if w < self.place.capacity() { without } else { f64::NEG_INFINITY };
            let mut scores: Vec<f64> = (0..full).map(score_without).collect();
            let of_rows = score(&scene.queries_of(i, r, g), &rows);
            places.iter().zip(of_rows).for_each(|(&(w, _), score)| scores[w] = score);
            let blocks = scene.sees(i, r).div_ceil(scene.block);
            let blocks = oracle::pool_windows(&scores, self.window, self.stride, scene.block, blocks);
            let missing = places.len() < full;
            Scored { blocks: blocks.into_iter().map(|s| (s, relative * s.abs() + absolute)).collect(), missing }
        }
    }
}

fn select_mean_softmax_agrees_with_the_formula(backend: &Backend) {
    rounds(80, |rng| {
        let scene = Scene::random(backend, rng);
        check_mean_softmax(backend, rng, &scene);
    });
}

pub fn check_mean_softmax(backend: &Backend, rng: &mut Rng, scene: &Scene) {
    let choice = Choice::random(backend, rng, scene.batch, 20);
    let summaries = Means::random(backend, rng, scene);
    let score = |q: &[&[f64]], means: &[&[f64]]| oracle::mean_softmax(q, means, scene.scale());
    // A logit of size 10 has an error near 1e−5 after D products in float32, and e^x doubles as its relative error.
    let expected = summaries.scores(scene, score, 0.0, [2e-4, 1e-7]);
    check_blocks(backend, rng, scene, &choice, summaries.args(VWD_SELECT_MEAN_SOFTMAX), expected, none);
}

fn select_mean_dot_agrees_with_the_formula(backend: &Backend) {
    rounds(80, |rng| {
        let sizes = Scene::random(backend, rng);
        let scene = Scene::new(backend, rng, [sizes.batch, sizes.kv_heads, 1, sizes.dim], sizes.block, sizes.capacity);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let summaries = Means::random(backend, rng, &scene);
        let score = |q: &[&[f64]], means: &[&[f64]]| means.iter().map(|mean| oracle::dot(q[0], mean)).collect();
        // D products of normal numbers: |q·k| summed is about D, each addition rounds once.
        let absolute = (scene.dim * scene.dim) as f64 * F32.epsilon();
        let expected = summaries.scores(&scene, score, f64::NEG_INFINITY, [0.0, absolute]);
        check_blocks(backend, rng, &scene, &choice, summaries.args(VWD_SELECT_MEAN_DOT), expected, none);
    });
}
