//! vwd_select_blocks and vwd_select_tokens, over summaries that the test makes itself.
//!
//! Scores are compared with the formula. The selection is then exact with respect to the scores that the call wrote: no
//! tolerance can hide a wrong top-k.

use crate::Case;
use crate::index::Place;
use crate::support::paged::random_lens;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    select_minmax_agrees_with_the_formula,
    select_mean_softmax_agrees_with_the_formula,
    select_mean_dot_agrees_with_the_formula,
    select_label_mass_agrees_with_the_formula,
    select_gives_ties_to_the_lower_block,
    select_ranks_nan_last,
    select_handles_many_blocks,
    select_tokens_agrees_with_the_formula,
    select_tokens_gives_ties_to_the_lower_token,
];

/// One call's sizes, queries and lengths.
struct Scene<'b> {
    batch: usize,
    kv_heads: usize,
    group: usize,
    dim: usize,
    /// Tokens of a block, and of the longest sequence.
    block: usize,
    capacity: usize,
    q: Tensor<'b>,
    queries: Array<f64>,
    lens: Tensor<'b>,
    len_values: Array<i64>,
    scale: f32,
}

impl<'b> Scene<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng) -> Scene<'b> {
        let (batch, kv_heads, group) = (rng.size(1..=3), rng.size(1..=3), rng.size(1..=5));
        let (dim, block) = (rng.pick(&[16, 24, 64, 128, 256]), rng.pick(&[1, 8, 16, 24, 64]));
        let capacity = rng.size(0..=40 * block);
        Scene::new(backend, rng, [batch, kv_heads, group, dim], block, capacity)
    }

    fn new(backend: &'b Backend, rng: &mut Rng, sizes: [usize; 4], block: usize, capacity: usize) -> Scene<'b> {
        let [batch, kv_heads, group, dim] = sizes;
        let dtype = rng.pick(&[F32, F16, BF16]);
        let queries = rng.normals(&[batch, kv_heads * group, dim]).map(|&x| dtype.round(x));
        let len_values = random_lens(rng, batch, capacity);
        Scene {
            batch,
            kv_heads,
            group,
            dim,
            block,
            capacity,
            q: Tensor::floats(backend, dtype, &queries, &Layout::random(rng, 3)),
            queries,
            lens: Tensor::ints(backend, I32, &len_values, &Layout::random(rng, 1)),
            len_values,
            scale: rng.pick(&[0.0, 0.0, 0.3]),
        }
    }

    fn len(&self, i: usize) -> usize {
        self.len_values[[i]].clamp(0, self.capacity as i64) as usize
    }

    fn blocks(&self, i: usize) -> usize {
        self.len(i).div_ceil(self.block)
    }

    fn queries_of(&self, i: usize, g: usize) -> Vec<&[f64]> {
        (0..self.group).map(|h| self.queries.row([i, g * self.group + h])).collect()
    }

    /// The longest sequence that an index holds: lengths are clamped to it.
    fn hold(&mut self, tokens: usize) {
        self.capacity = tokens;
    }

    fn scale(&self) -> f64 {
        if self.scale == 0.0 { 1.0 / (self.dim as f64).sqrt() } else { self.scale as f64 }
    }
}

/// What a call may choose: budgets, forced blocks, capacity of the result.
struct Choice<'b> {
    k: usize,
    init: usize,
    local: usize,
    budgets: Option<(Tensor<'b>, Array<i64>)>,
    cap: usize,
}

impl<'b> Choice<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, batch: usize, most: usize) -> Choice<'b> {
        let (init, local) = (rng.size(0..=2), rng.size(0..=3));
        let k = rng.size(0..=most);
        let cap = k.max(init + local) + rng.size(0..=3);
        let budgets = rng.one_in(2).then(|| {
            let values = Array::from_fn(&[batch], |_| rng.int(-2..=cap as i64 + 3));
            (Tensor::ints(backend, I32, &values, &Layout::random(rng, 1)), values)
        });
        Choice { k, init, local, budgets, cap }
    }

    fn budget(&self, i: usize) -> usize {
        self.budgets.as_ref().map_or(self.k, |(_, values)| values[[i]].clamp(0, self.cap as i64) as usize)
    }

    fn budgets_c(&self) -> vwd_tensor {
        self.budgets.as_ref().map_or(absent(), |(tensor, _)| tensor.c())
    }
}

pub struct ListTensors<'b> {
    pub ids: Tensor<'b>,
    pub counts: Tensor<'b>,
}

impl<'b> ListTensors<'b> {
    pub fn poisoned(backend: &'b Backend, rng: &mut Rng, shape: [usize; 3]) -> ListTensors<'b> {
        ListTensors {
            ids: Tensor::poisoned(backend, I32, &shape, &Layout::random(rng, 3)),
            counts: Tensor::poisoned(backend, I32, &shape[..2], &Layout::random(rng, 2)),
        }
    }

    pub fn of(backend: &'b Backend, rng: &mut Rng, list: &oracle::List) -> ListTensors<'b> {
        ListTensors {
            ids: Tensor::ints(backend, I32, &list.ids, &Layout::random(rng, 3)),
            counts: Tensor::ints(backend, I32, &list.counts, &Layout::random(rng, 2)),
        }
    }

    pub fn c(&self) -> vwd_block_list {
        vwd_block_list { ids: self.ids.c(), counts: self.counts.c(), slots: absent() }
    }

    /// Checks that the list is exactly this.
    pub fn check(&self, expected: impl Fn(usize, usize) -> Vec<usize>) {
        let (ids, counts) = (self.ids.read_ints(), self.counts.read_ints());
        for i in 0..ids.shape[0] {
            for g in 0..ids.shape[1] {
                let expected: Vec<i64> = expected(i, g).iter().map(|&id| id as i64).collect();
                assert_eq!(counts[[i, g]], expected.len() as i64, "count of sequence {i}, head {g}");
                assert_eq!(ids.row([i, g])[..expected.len()], expected, "ids of sequence {i}, head {g}");
            }
        }
        self.check_written();
    }

    pub fn check_written(&self) {
        let counts = self.counts.read_ints();
        self.ids.assert_written("ids", |at| (at[2] as i64) < counts[[at[0], at[1]]]);
        self.counts.assert_written("counts", |_| true);
    }
}

/// Ascending ids among `n` blocks, with what callers get wrong: repeated ids, ids that do not exist, counts out of range.
pub fn random_list(
    rng: &mut Rng,
    batch: usize,
    kv_heads: usize,
    cap: usize,
    n: impl Fn(usize) -> usize,
) -> oracle::List {
    let mut list =
        oracle::List { ids: Array::filled(&[batch, kv_heads, cap], -7), counts: Array::filled(&[batch, kv_heads], 0) };
    for i in 0..batch {
        for g in 0..kv_heads {
            let n = n(i);
            let count = if rng.one_in(5) { 0 } else { rng.size(0..=n.min(cap)) };
            let mut ids: Vec<i64> = rng.subset(n, count).into_iter().map(|id| id as i64).collect();
            if rng.one_in(4) && !ids.is_empty() && ids.len() < cap {
                ids.push(rng.pick(&ids));
            }
            if rng.one_in(4) && ids.len() < cap {
                ids.push(rng.pick(&[-1, n as i64, n as i64 + 9, i32::MAX as i64, i32::MIN as i64]));
            }
            ids.sort_unstable();
            list.counts[[i, g]] = match ids.len() {
                0 => -rng.int(0..=2),
                len if len == cap => len as i64 + rng.int(0..=2),
                len => len as i64,
            };
            (0..ids.len()).for_each(|j| list.ids[[i, g, j]] = ids[j]);
        }
    }
    list
}

/// Runs the call with scores and without; checks scores (value, tolerance) and the selection.
fn check_blocks(
    backend: &Backend,
    rng: &mut Rng,
    scene: &Scene,
    choice: &Choice,
    args: vwd_select_blocks_args,
    expected: impl Fn(usize, usize) -> Vec<(f64, f64)>,
) {
    let (batch, heads) = (scene.batch, scene.kv_heads);
    let most = (0..batch).map(|i| scene.blocks(i)).max().unwrap_or(0) + rng.size(0..=2);
    let scores = Tensor::poisoned(backend, F32, &[batch, heads, most], &Layout::random(rng, 3));
    let [with, without] = [0, 1].map(|_| ListTensors::poisoned(backend, rng, [batch, heads, choice.cap]));
    let common = vwd_select_blocks_args {
        block_size: scene.block as u32,
        k: choice.k as u32,
        init_blocks: choice.init as u32,
        local_blocks: choice.local as u32,
        scale: scene.scale,
        q: scene.q.c(),
        seq_lens: scene.lens.c(),
        budgets: choice.budgets_c(),
        ..args
    };
    for args in [
        vwd_select_blocks_args { selected: with.c(), scores: scores.c(), ..common },
        vwd_select_blocks_args { selected: without.c(), ..common },
    ] {
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_blocks(backend.session(), &args, backend.stream()) });
    }
    let got = scores.read_floats();
    for i in 0..batch {
        for g in 0..heads {
            let want = expected(i, g);
            assert_eq!(want.len(), scene.blocks(i));
            for (j, &(want, tolerance)) in want.iter().enumerate() {
                let got = got[[i, g, j]];
                let close = got == want || (got - want).abs() <= tolerance;
                assert!(close, "score of block {j} of sequence {i}, head {g}: {got}, expected {want} ± {tolerance:e}");
            }
        }
    }
    scores.assert_written("scores", |at| at[2] < scene.blocks(at[0]));
    for list in [&with, &without] {
        list.check(|i, g| {
            let n = scene.blocks(i);
            let count = oracle::selection_size(n, choice.budget(i), choice.init, choice.local);
            oracle::top_k(&got.row([i, g])[..n], count, choice.init, choice.local)
        });
    }
    scene.q.assert_untouched("q");
    scene.lens.assert_untouched("seq_lens");
}

// --- MINMAX ----------------------------------------------------------------------------------------------------------

struct MinMax<'b> {
    place: Place<'b>,
    max: Tensor<'b>,
    min: Tensor<'b>,
}

impl<'b> MinMax<'b> {
    /// Maxima and minima from this source of keys.
    fn new(
        backend: &'b Backend,
        rng: &mut Rng,
        scene: &mut Scene,
        keys: impl Fn(&mut Rng, &[usize]) -> Array<f64>,
    ) -> Self {
        let place = Place::random(backend, rng, scene.batch, scene.capacity.div_ceil(scene.block));
        scene.hold(place.capacity() * scene.block);
        let extents = [place.pages, place.rows, scene.kv_heads, scene.dim];
        let (a, b) = (keys(rng, &extents), keys(rng, &extents));
        let of =
            |f: fn(f64, f64) -> f64| Array::new(&extents, a.data.iter().zip(&b.data).map(|(&a, &b)| f(a, b)).collect());
        let dtype = rng.pick(&[F32, F16, BF16]);
        MinMax {
            max: Tensor::floats(backend, dtype, &of(f64::max), &Layout::random(rng, 4)),
            min: Tensor::floats(backend, dtype, &of(f64::min), &Layout::random(rng, 4)),
            place,
        }
    }

    fn args(&self, scene: &Scene) -> vwd_select_blocks_args {
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

    /// (score, tolerance) of every block.
    fn scores(&self, scene: &Scene) -> impl Fn(usize, usize) -> Vec<(f64, f64)> {
        let (max, min) = (self.max.read_floats(), self.min.read_floats());
        move |i, g| {
            let q = scene.queries_of(i, g);
            let block = |j| {
                let (page, row) = self.place.find(i, j).unwrap();
                let (max, min) = (max.row([page, row, g]), min.row([page, row, g]));
                let size = |q: &[f64]| (0..q.len()).map(|c| q[c].abs() * (max[c].abs() + min[c].abs())).sum::<f64>();
                let magnitude = q.iter().map(|q| size(q)).sum::<f64>();
                // A float32 sum of 2·D products of sums of G queries, in any order.
                let terms = 2 * scene.dim + scene.group + 2;
                (oracle::minmax_score(&q, max, min), terms as f64 * F32.epsilon() * magnitude)
            };
            (0..scene.blocks(i)).map(block).collect()
        }
    }
}

fn select_minmax_agrees_with_the_formula(backend: &Backend) {
    rounds(60, |rng| {
        let mut scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let summaries = MinMax::new(backend, rng, &mut scene, |rng, extents| rng.normals(extents));
        check_blocks(backend, rng, &scene, &choice, summaries.args(&scene), summaries.scores(&scene));
    });
}

/// Whole numbers make scores exact, a few of them make most scores equal.
fn select_gives_ties_to_the_lower_block(backend: &Backend) {
    rounds(20, |rng| {
        let (block, blocks) = (8, rng.size(1..=300));
        let mut scene = Scene::new(backend, rng, [1, 2, 2, 16], block, block * blocks);
        scene.queries = rng.whole(&scene.queries.shape.clone(), 1);
        scene.q = Tensor::floats(backend, F32, &scene.queries, &Layout::default());
        let most = rng.pick(&[0, 1, 1]);
        let choice = Choice::random(backend, rng, 1, blocks);
        let summaries = MinMax::new(backend, rng, &mut scene, |rng, extents| {
            // One number for all channels of a block, so that few scores are possible.
            let per_block = rng.whole(&extents[..3], most);
            Array::from_fn(extents, |at| per_block[[at[0], at[1], at[2]]])
        });
        let scores = summaries.scores(&scene);
        let exact = |i, g| scores(i, g).into_iter().map(|(score, _)| (score, 0.0)).collect();
        check_blocks(backend, rng, &scene, &choice, summaries.args(&scene), exact);
    });
}

fn select_ranks_nan_last(backend: &Backend) {
    rounds(5, |rng| {
        let block = 8;
        let mut scene = Scene::new(backend, rng, [1, 1, 1, 16], block, block * 50);
        scene.len_values = Array::new(&[1], vec![400]);
        scene.lens = Tensor::ints(backend, I32, &scene.len_values, &Layout::default());
        let summaries = MinMax::new(backend, rng, &mut scene, |rng, extents| {
            let mut keys = rng.normals(extents);
            for row in 0..extents[0] * extents[1] {
                if rng.one_in(3) {
                    keys.data[row * 16..][..16].fill(f64::NAN);
                }
            }
            keys
        });
        let selected = ListTensors::poisoned(backend, rng, [1, 1, 50]);
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
        let scores: Vec<f64> = summaries.scores(&scene)(0, 0).into_iter().map(|(score, _)| score).collect();
        let numbers = scores.iter().filter(|score| !score.is_nan()).count();
        selected.check_written();
        let chosen = selected.ids.read_ints();
        assert_eq!(selected.counts.read_ints()[[0, 0]], k as i64);
        let of_numbers = chosen.data[..k].iter().filter(|&&j| !scores[j as usize].is_nan()).count();
        assert_eq!(of_numbers, numbers.min(k), "numbers come before NaN");
    });
}

/// Enough blocks that the work is shared and that top-k is no longer small.
fn select_handles_many_blocks(backend: &Backend) {
    rounds(4, |rng| {
        let (block, blocks) = (16, rng.pick(&[2048, 4096, 5000]));
        let mut scene = Scene::new(backend, rng, [2, 2, 4, 64], block, block * blocks);
        let choice = Choice::random(backend, rng, 2, 512);
        let summaries = MinMax::new(backend, rng, &mut scene, |rng, extents| rng.normals(extents));
        check_blocks(backend, rng, &scene, &choice, summaries.args(&scene), summaries.scores(&scene));
    });
}

// --- MEAN ------------------------------------------------------------------------------------------------------------

struct Means<'b> {
    place: Place<'b>,
    means: Tensor<'b>,
    window: usize,
    stride: usize,
}

impl<'b> Means<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, scene: &mut Scene) -> Means<'b> {
        let (window, stride) = rng.pick(&[(32, 16), (32, 16), (16, 16), (8, 4), (5, 3), (4, 7)]);
        let place = Place::random(backend, rng, scene.batch, oracle::windows(scene.capacity, window, stride));
        scene.hold(place.capacity() * stride + window - 1);
        let values = rng.normals(&[place.pages, place.rows, scene.kv_heads, scene.dim]);
        let dtype = rng.pick(&[F32, F16, BF16]);
        let means = Tensor::floats(backend, dtype, &values, &Layout::random(rng, 4));
        Means { place, means, window, stride }
    }

    fn args(&self, method: u32) -> vwd_select_blocks_args {
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

    /// Block scores from window scores; the tolerance is `relative` of the score plus `absolute`.
    fn pooled(&self, scene: &Scene, scores: Vec<f64>, i: usize, relative: f64, absolute: f64) -> Vec<(f64, f64)> {
        let blocks = oracle::pool_windows(&scores, self.window, self.stride, scene.block, scene.blocks(i));
        blocks.into_iter().map(|score| (score, relative * score.abs() + absolute)).collect()
    }
}

fn select_mean_softmax_agrees_with_the_formula(backend: &Backend) {
    rounds(60, |rng| {
        let mut scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let summaries = Means::random(backend, rng, &mut scene);
        let means = summaries.means.read_floats();
        let expected = |i, g| {
            let rows = (0..oracle::windows(scene.len(i), summaries.window, summaries.stride))
                .map(|w| summaries.place.find(i, w).unwrap())
                .map(|(page, row)| means.row([page, row, g]))
                .collect::<Vec<_>>();
            let scores = oracle::mean_softmax(&scene.queries_of(i, g), &rows, scene.scale());
            // A logit of size 10 has an error near 1e−5 after D products in float32, and e^x doubles as its relative error.
            summaries.pooled(&scene, scores, i, 1e-4, 1e-7)
        };
        check_blocks(backend, rng, &scene, &choice, summaries.args(VWD_SELECT_MEAN_SOFTMAX), expected);
    });
}

fn select_mean_dot_agrees_with_the_formula(backend: &Backend) {
    rounds(60, |rng| {
        let mut sizes = Scene::random(backend, rng);
        sizes.group = 1;
        let mut scene =
            Scene::new(backend, rng, [sizes.batch, sizes.kv_heads, 1, sizes.dim], sizes.block, sizes.capacity);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let summaries = Means::random(backend, rng, &mut scene);
        let means = summaries.means.read_floats();
        let expected = |i, g| {
            let q = scene.queries.row([i, g]);
            let rows = (0..oracle::windows(scene.len(i), summaries.window, summaries.stride))
                .map(|w| summaries.place.find(i, w).unwrap())
                .map(|(page, row)| means.row([page, row, g]));
            let scores = rows.map(|mean| oracle::dot(q, mean)).collect();
            // D products of normal numbers: |q·k| summed is about D, each addition rounds once.
            summaries.pooled(&scene, scores, i, 0.0, (scene.dim * scene.dim) as f64 * F32.epsilon())
        };
        check_blocks(backend, rng, &scene, &choice, summaries.args(VWD_SELECT_MEAN_DOT), expected);
    });
}

// --- LABEL -----------------------------------------------------------------------------------------------------------

struct Labels<'b> {
    place: Place<'b>,
    codes: Tensor<'b>,
    scale: Tensor<'b>,
    min: Tensor<'b>,
    channels: Tensor<'b>,
    channel_values: Array<i64>,
}

impl<'b> Labels<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, scene: &mut Scene) -> Labels<'b> {
        let kept = rng.pick(&[2, 8, scene.dim / 2, scene.dim]);
        let place = Place::random(backend, rng, scene.batch, scene.capacity);
        scene.hold(place.capacity());
        let chosen = (0..scene.kv_heads).flat_map(|_| rng.subset(scene.dim, kept)).map(|c| c as i64).collect();
        let channel_values = Array::new(&[scene.kv_heads, kept], chosen);
        let rows = [place.pages, place.rows, scene.kv_heads];
        let codes = Array::from_fn(&[rows[0], rows[1], rows[2], kept / 2], |_| rng.int(0..=255));
        let scale = Array::from_fn(&rows, |_| 0.3 * rng.unit());
        Labels {
            codes: Tensor::ints(backend, U8, &codes, &Layout::random(rng, 4)),
            scale: Tensor::floats(backend, F16, &scale, &Layout::random(rng, 3)),
            min: Tensor::floats(backend, F16, &rng.normals(&rows).map(|x| x - 2.0), &Layout::random(rng, 3)),
            channels: Tensor::ints(backend, I32, &channel_values, &Layout::random(rng, 2)),
            channel_values,
            place,
        }
    }

    fn index(&self) -> vwd_index {
        vwd_index {
            kind: VWD_INDEX_LABEL,
            table: self.place.table_c(),
            labels: self.codes.c(),
            label_scale: self.scale.c(),
            label_min: self.min.c(),
            channels: self.channels.c(),
            ..args()
        }
    }

    /// The softmax mass, summed over the group's heads, of each of these tokens.
    fn mass(&self, scene: &Scene) -> impl Fn(usize, usize, &[usize]) -> Vec<f64> {
        let (codes, scale, min) = (self.codes.read_ints(), self.scale.read_floats(), self.min.read_floats());
        move |i, g, tokens| {
            let channels = self.channel_values.row([g]);
            let label = |&t: &usize| {
                let (page, row) = self.place.find(i, t).unwrap();
                let code = |n: usize| (codes[[page, row, g, n / 2]] >> (4 * (n % 2)) & 15) as f64;
                (0..channels.len()).map(|n| min[[page, row, g]] + scale[[page, row, g]] * code(n)).collect()
            };
            let labels: Vec<Vec<f64>> = tokens.iter().map(label).collect();
            let kept = |q: &[f64]| channels.iter().map(|&c| q[c as usize]).collect::<Vec<f64>>();
            let queries: Vec<Vec<f64>> = scene.queries_of(i, g).into_iter().map(kept).collect();
            let queries: Vec<&[f64]> = queries.iter().map(Vec::as_slice).collect();
            oracle::label_mass(&queries, &labels, scene.scale())
        }
    }
}

fn select_label_mass_agrees_with_the_formula(backend: &Backend) {
    rounds(60, |rng| {
        let mut scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let labels = Labels::random(backend, rng, &mut scene);
        let cap = rng.size(0..=30);
        let list = random_list(rng, scene.batch, scene.kv_heads, cap, |i| scene.blocks(i));
        let candidates = ListTensors::of(backend, rng, &list);
        let mass = labels.mass(&scene);
        let expected = |i, g| {
            let n = scene.blocks(i);
            let blocks = list.blocks(i, g, n);
            let tokens = oracle::tokens(&blocks, scene.block, scene.len(i));
            let mass = mass(i, g, &tokens);
            let sum = |j: usize| tokens.iter().zip(&mass).filter(|(t, _)| *t / scene.block == j).map(|(_, m)| m).sum();
            // As for MEAN_SOFTMAX.
            let score = |j| if blocks.contains(&j) { sum(j) } else { f64::NEG_INFINITY };
            (0..n).map(score).map(|score: f64| (score, 1e-4 * score.abs() + 1e-7)).collect()
        };
        let args = vwd_select_blocks_args {
            method: VWD_SELECT_LABEL_MASS,
            index: kept(labels.index()),
            candidates: candidates.c(),
            ..args()
        };
        check_blocks(backend, rng, &scene, &choice, args, expected);
        candidates.ids.assert_untouched("candidates.ids");
    });
}

// --- tokens ----------------------------------------------------------------------------------------------------------

fn select_tokens_agrees_with_the_formula(backend: &Backend) {
    rounds(80, |rng| {
        let mut scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 60);
        let labels = Labels::random(backend, rng, &mut scene);
        let cap = rng.size(0..=30);
        let list = random_list(rng, scene.batch, scene.kv_heads, cap, |i| scene.blocks(i));
        check_tokens(backend, rng, &scene, &choice, &labels, &list);
    });
}

fn check_tokens(
    backend: &Backend,
    rng: &mut Rng,
    scene: &Scene,
    choice: &Choice,
    labels: &Labels,
    list: &oracle::List,
) {
    let candidates = ListTensors::of(backend, rng, list);
    let shape = [scene.batch, scene.kv_heads, choice.cap];
    let [with, without] = [0, 1].map(|_| ListTensors::poisoned(backend, rng, shape));
    let scores = Tensor::poisoned(backend, F32, &shape, &Layout::random(rng, 3));
    let common = vwd_select_tokens_args {
        block_size: scene.block as u32,
        k: choice.k as u32,
        init_tokens: choice.init as u32,
        local_tokens: choice.local as u32,
        scale: scene.scale,
        q: scene.q.c(),
        index: kept(labels.index()),
        seq_lens: scene.lens.c(),
        budgets: choice.budgets_c(),
        candidates: candidates.c(),
        ..args()
    };
    for args in [
        vwd_select_tokens_args { selected: with.c(), scores: scores.c(), ..common },
        vwd_select_tokens_args { selected: without.c(), ..common },
    ] {
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_tokens(backend.session(), &args, backend.stream()) });
    }
    let (ids, counts, got) = (with.ids.read_ints(), with.counts.read_ints(), scores.read_floats());
    assert_eq!(counts, without.counts.read_ints());
    let mass = labels.mass(scene);
    for i in 0..scene.batch {
        for g in 0..scene.kv_heads {
            let len = scene.len(i);
            let count = counts[[i, g]] as usize;
            let chosen = &ids.row([i, g])[..count];
            assert_eq!(chosen, &without.ids.read_ints().row([i, g])[..count], "with scores and without");
            let tokens = oracle::tokens(&list.blocks(i, g, scene.blocks(i)), scene.block, len);
            let alpha: Vec<f64> = mass(i, g, &tokens).into_iter().map(|m| m / scene.group as f64).collect();
            let forced: Vec<usize> = (0..len).filter(|&t| t < choice.init || t + choice.local >= len).collect();
            let mut all: Vec<usize> = [&tokens[..], &forced[..]].concat();
            all.sort_unstable();
            all.dedup();
            assert_eq!(count, all.len().min(choice.budget(i)).max(forced.len()), "count of sequence {i}, head {g}");
            assert!(chosen.is_sorted_by(|a, b| a < b), "ascending: {chosen:?}");
            let is_chosen = |t: usize| chosen.contains(&(t as i64));
            assert!(chosen.iter().all(|&t| all.contains(&(t as usize))), "from the candidates: {chosen:?}");
            assert!(forced.iter().all(|&t| is_chosen(t)), "the forced ones: {chosen:?}");
            // The worst that was chosen is no worse than the best that was not, up to the error of a softmax in float32.
            let free = tokens.iter().zip(&alpha).filter(|(t, _)| !forced.contains(t));
            let (taken, left): (Vec<_>, Vec<_>) = free.partition(|(t, _)| is_chosen(**t));
            let worst = taken.iter().map(|(_, a)| **a).fold(f64::INFINITY, f64::min);
            let best = left.iter().map(|(_, a)| **a).fold(0.0, f64::max);
            assert!(worst >= best * (1.0 - 1e-4) - 1e-9, "chose a token of {worst}, left one of {best}");
            for (j, &t) in chosen.iter().enumerate() {
                let want = tokens.iter().position(|&token| token == t as usize).map_or(0.0, |at| alpha[at]);
                let got = got[[i, g, j]];
                assert!((got - want).abs() <= 1e-4 * want + 1e-7, "score of token {t}: {got}, expected {want}");
            }
        }
    }
    with.check_written();
    without.check_written();
    scores.assert_written("scores", |at| (at[2] as i64) < counts[[at[0], at[1]]]);
    candidates.ids.assert_untouched("candidates.ids");
}

/// Labels that are all alike give every token the same share.
fn select_tokens_gives_ties_to_the_lower_token(backend: &Backend) {
    rounds(20, |rng| {
        let mut scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 60);
        let mut labels = Labels::random(backend, rng, &mut scene);
        let rows = labels.scale.shape.clone();
        labels.scale = Tensor::floats(backend, F16, &Array::filled(&rows, 0.0), &Layout::default());
        labels.min = Tensor::floats(backend, F16, &Array::filled(&rows, 0.5), &Layout::default());
        let list = random_list(rng, scene.batch, scene.kv_heads, 12, |i| scene.blocks(i));
        let candidates = ListTensors::of(backend, rng, &list);
        let selected = ListTensors::poisoned(backend, rng, [scene.batch, scene.kv_heads, choice.cap]);
        let args = vwd_select_tokens_args {
            block_size: scene.block as u32,
            k: choice.k as u32,
            init_tokens: choice.init as u32,
            local_tokens: choice.local as u32,
            q: scene.q.c(),
            index: kept(labels.index()),
            seq_lens: scene.lens.c(),
            budgets: choice.budgets_c(),
            candidates: candidates.c(),
            selected: selected.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_tokens(backend.session(), &args, backend.stream()) });
        selected.check(|i, g| {
            let len = scene.len(i);
            let tokens = oracle::tokens(&list.blocks(i, g, scene.blocks(i)), scene.block, len);
            let forced = |t: &usize| *t < choice.init || t + choice.local >= len;
            let mut chosen: Vec<usize> = (0..len).filter(forced).collect();
            let room = choice.budget(i).saturating_sub(chosen.len());
            chosen.extend(tokens.into_iter().filter(|t| !forced(t)).take(room));
            chosen.sort_unstable();
            chosen
        });
    });
}
