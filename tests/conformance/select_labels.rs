//! LABEL_MASS of vwd_select_blocks, and vwd_select_tokens, over labels that the test makes itself.

use crate::Case;
use crate::index::Place;
use crate::select::{Choice, ListTensors, Scene, Scored, check_blocks};
use crate::support::*;
use std::collections::BTreeSet;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    select_label_mass_agrees_with_the_formula,
    select_tokens_agrees_with_the_formula,
    select_by_labels_agrees_with_the_formula_where_shares_of_a_list_end,
    select_by_labels_takes_all_of_a_list_and_nothing_of_it,
    select_tokens_gives_ties_to_the_lower_token,
];

/// Ascending candidates of every list, with what callers get wrong: repeated ids, ids that do not exist, counts out of
/// range.
pub struct Candidates<'b> {
    /// [B, lists, Hk, cap] and [B, lists, Hk]
    ids: Array<i64>,
    counts: Array<i64>,
    tensors: ListTensors<'b>,
}

impl<'b> Candidates<'b> {
    pub fn random(backend: &'b Backend, rng: &mut Rng, scene: &Scene<'b>, cap: usize) -> Candidates<'b> {
        let shape = [scene.batch, scene.per_head(), scene.kv_heads];
        let mut ids = Array::filled(&[&shape[..], &[cap]].concat(), -7);
        let mut counts = Array::filled(&shape, 0);
        for at @ [i, l, g] in scene.lists() {
            let n = scene.blocks(i, l);
            let count = if rng.one_in(5) { 0 } else { rng.size(0..=n.min(cap)) };
            let mut list: Vec<i64> = rng.subset(n, count).into_iter().map(|id| id as i64).collect();
            if rng.one_in(4) && !list.is_empty() && list.len() < cap {
                list.push(rng.pick(&list));
            }
            if rng.one_in(4) && list.len() < cap {
                list.push(rng.pick(&[-1, n as i64, n as i64 + 9, i32::MAX as i64, i32::MIN as i64]));
            }
            list.sort_unstable();
            counts[at] = match list.len() {
                0 => -rng.int(0..=2),
                len if len == cap => len as i64 + rng.int(0..=2),
                len => len as i64,
            };
            (0..list.len()).for_each(|j| ids[[i, l, g, j]] = list[j]);
        }
        let tensor = |rng: &mut Rng, a: &Array<i64>, last: &[usize]| {
            let shape = scene.rows(last);
            Tensor::ints(backend, I32, &Array::new(&shape, a.data.clone()), &Layout::random(rng, shape.len()))
        };
        let tensors = ListTensors { ids: tensor(rng, &ids, &[cap]), counts: tensor(rng, &counts, &[]) };
        Candidates { ids, counts, tensors }
    }

    /// Those of a list that exist.
    fn blocks(&self, scene: &Scene, at: [usize; 3]) -> BTreeSet<usize> {
        let ids = self.ids.row(at);
        let count = self.counts[at].clamp(0, ids.len() as i64) as usize;
        let n = scene.blocks(at[0], at[1]) as i64;
        ids[..count].iter().filter(|&&id| (0..n).contains(&id)).map(|&id| id as usize).collect()
    }

    fn tokens(&self, scene: &Scene, at: [usize; 3]) -> Vec<usize> {
        oracle::tokens(&self.blocks(scene, at), scene.block, scene.tokens(at[0], at[1]))
    }

    /// The bit of a status that follows from the count.
    fn status(&self, at: [usize; 3]) -> i64 {
        let cap = *self.ids.shape.last().unwrap() as i64;
        !(0..=cap).contains(&self.counts[at]) as i64 * VWD_SELECT_CLAMPED as i64
    }
}

pub struct Labels<'b> {
    place: Place<'b>,
    codes: Tensor<'b>,
    scale: Tensor<'b>,
    min: Tensor<'b>,
    channels: Tensor<'b>,
    channel_values: Array<i64>,
}

impl<'b> Labels<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, scene: &Scene) -> Labels<'b> {
        let kept = rng.pick(&[2, 8, scene.dim / 2, scene.dim]);
        let layout = Layout::random(rng, 4);
        Labels::of(backend, rng, scene, kept, &layout)
    }

    /// Labels of `kept` channels, whose codes lie as `layout` says.
    pub fn of(backend: &'b Backend, rng: &mut Rng, scene: &Scene, kept: usize, layout: &Layout) -> Labels<'b> {
        let place = Place::random(backend, rng, scene.batch, scene.capacity);
        let chosen = (0..scene.kv_heads).flat_map(|_| rng.subset(scene.dim, kept)).map(|c| c as i64).collect();
        let channel_values = Array::new(&[scene.kv_heads, kept], chosen);
        let rows = [place.pages, place.rows, scene.kv_heads];
        let codes = Array::from_fn(&[rows[0], rows[1], rows[2], kept / 2], |_| rng.int(0..=255));
        let scale = Array::from_fn(&rows, |_| 0.3 * rng.unit());
        Labels {
            codes: Tensor::ints(backend, U8, &codes, layout),
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

    /// The softmax mass, summed over the heads of a position's group, of each of these tokens: of those that it sees and
    /// that have a label. The others weigh nothing.
    fn mass(&self, scene: &Scene) -> impl Fn([usize; 3], &[usize]) -> Vec<f64> {
        let (codes, scale, min) = (self.codes.read_ints(), self.scale.read_floats(), self.min.read_floats());
        move |[i, r, g], tokens| {
            let channels = self.channel_values.row([g]);
            let label = |(page, row): (usize, usize)| {
                let code = |n: usize| (codes[[page, row, g, n / 2]] >> (4 * (n % 2)) & 15) as f64;
                (0..channels.len()).map(|n| min[[page, row, g]] + scale[[page, row, g]] * code(n)).collect()
            };
            let seen = (0..tokens.len()).filter(|&n| tokens[n] < scene.sees(i, r));
            let places: Vec<_> = seen.filter_map(|n| self.place.find(i, tokens[n]).map(|at| (n, at))).collect();
            let labels: Vec<Vec<f64>> = places.iter().map(|&(_, at)| label(at)).collect();
            let kept = |q: &[f64]| channels.iter().map(|&c| q[c as usize]).collect::<Vec<f64>>();
            let queries: Vec<Vec<f64>> = scene.queries_of(i, r, g).into_iter().map(kept).collect();
            let queries: Vec<&[f64]> = queries.iter().map(Vec::as_slice).collect();
            let mut mass = vec![0.0; tokens.len()];
            let of_places = oracle::label_mass(&queries, &labels, scene.scale());
            places.iter().zip(of_places).for_each(|(&(n, _), m)| mass[n] = m);
            mass
        }
    }

    fn is_missing(&self, i: usize, tokens: &[usize]) -> bool {
        tokens.iter().any(|&t| self.place.find(i, t).is_none())
    }
}

fn select_label_mass_agrees_with_the_formula(backend: &Backend) {
    rounds(80, |rng| {
        let scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let labels = Labels::random(backend, rng, &scene);
        let cap = rng.size(0..=30);
        let candidates = Candidates::random(backend, rng, &scene, cap);
        check_mass(backend, rng, &scene, &choice, &labels, &candidates);
    });
}

pub fn check_mass<'b>(
    backend: &'b Backend,
    rng: &mut Rng,
    scene: &Scene<'b>,
    choice: &Choice,
    labels: &Labels,
    candidates: &Candidates,
) {
    let mass = labels.mass(scene);
    let expected = |i, r, g| {
        let l = if scene.per_head() > 1 { r } else { 0 };
        let blocks = candidates.blocks(scene, [i, l, g]);
        let tokens = candidates.tokens(scene, [i, l, g]);
        let mass = mass([i, r, g], &tokens);
        let sum = |j: usize| tokens.iter().zip(&mass).filter(|(t, _)| *t / scene.block == j).map(|(_, m)| m).sum();
        // As for MEAN_SOFTMAX.
        let score = |j| if blocks.contains(&j) { sum(j) } else { f64::NEG_INFINITY };
        let blocks = (0..scene.sees(i, r).div_ceil(scene.block)).map(score);
        let blocks = blocks.map(|score: f64| (score, 2e-4 * score.abs() + 1e-7)).collect();
        Scored { blocks, missing: labels.is_missing(i, &tokens) }
    };
    let args = vwd_select_blocks_args {
        method: VWD_SELECT_LABEL_MASS,
        index: kept(labels.index()),
        candidates: candidates.tensors.c(),
        ..args()
    };
    check_blocks(backend, rng, scene, choice, args, expected, |at| candidates.status(at));
    candidates.tensors.ids.assert_untouched("candidates.ids");
}

// --- tokens ----------------------------------------------------------------------------------------------------------

fn select_tokens_agrees_with_the_formula(backend: &Backend) {
    rounds(100, |rng| {
        let scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 60);
        let labels = Labels::random(backend, rng, &scene);
        let cap = rng.size(0..=30);
        let candidates = Candidates::random(backend, rng, &scene, cap);
        check_tokens(backend, rng, &scene, &choice, &labels, &candidates);
    });
}

fn call<'b>(scene: &Scene<'b>, choice: &Choice, labels: &Labels, candidates: &Candidates) -> vwd_select_tokens_args {
    vwd_select_tokens_args {
        block_size: scene.block as u32,
        k: choice.k as u32,
        init_tokens: choice.init as u32,
        local_tokens: choice.local as u32,
        scale: scene.scale,
        q: scene.q.c(),
        q_lens: scene.q_lens_c(),
        index: kept(labels.index()),
        seq_lens: scene.lens.c(),
        budgets: choice.budgets_c(),
        candidates: candidates.tensors.c(),
        ..args()
    }
}

pub fn check_tokens<'b>(
    backend: &'b Backend,
    rng: &mut Rng,
    scene: &Scene<'b>,
    choice: &Choice,
    labels: &Labels,
    candidates: &Candidates,
) {
    let [with, without] = [0, 1].map(|_| ListTensors::poisoned(backend, rng, scene, choice.cap));
    let scores = scene.output(backend, rng, F32, &[choice.cap]);
    let status = scene.output(backend, rng, U32, &[]);
    let common = call(scene, choice, labels, candidates);
    for args in [
        vwd_select_tokens_args { selected: with.c(), scores: scores.c(), status: status.c(), ..common },
        vwd_select_tokens_args { selected: without.c(), ..common },
    ] {
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_tokens(backend.session(), &args, backend.stream()) });
    }
    let (ids, counts) = (scene.read(with.ids.read_ints()), scene.read(with.counts.read_ints()));
    let (got, status) = (scene.read(scores.read_floats()), scene.read(status.read_ints()));
    assert_eq!(counts, scene.read(without.counts.read_ints()));
    let alone = scene.read(without.ids.read_ints());
    let mass = labels.mass(scene);
    for at @ [i, l, g] in scene.lists() {
        let len = scene.tokens(i, l);
        let count = counts[at] as usize;
        let chosen = &ids.row(at)[..count];
        assert_eq!(chosen, &alone.row(at)[..count], "with scores and without");
        let tokens = candidates.tokens(scene, at);
        let mut alpha = vec![0.0; tokens.len()];
        for r in scene.positions(i, l).filter(|&r| !scene.is_nan(i, r, g)) {
            let of_position = mass([i, r, g], &tokens);
            alpha.iter_mut().zip(of_position).for_each(|(a, m)| *a = f64::max(*a, m / scene.group as f64));
        }
        let forced: Vec<usize> = (0..len).filter(|&t| t < choice.init || t + choice.local >= len).collect();
        let mut all: Vec<usize> = [&tokens[..], &forced[..]].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(count, all.len().min(choice.budget(i)).max(forced.len()), "count of list {at:?}");
        assert!(chosen.is_sorted_by(|a, b| a < b), "ascending: {chosen:?}");
        let is_chosen = |t: usize| chosen.contains(&(t as i64));
        assert!(chosen.iter().all(|&t| all.contains(&(t as usize))), "from the candidates: {chosen:?}");
        assert!(forced.iter().all(|&t| is_chosen(t)), "the forced ones: {chosen:?}");
        // The worst that was chosen is no worse than the best that was not, up to the error of a softmax in float32.
        let free = tokens.iter().zip(&alpha).filter(|(t, _)| !forced.contains(t));
        let (taken, left): (Vec<_>, Vec<_>) = free.partition(|(t, _)| is_chosen(**t));
        let worst = taken.iter().map(|(_, a)| **a).fold(f64::INFINITY, f64::min);
        let best = left.iter().map(|(_, a)| **a).fold(0.0, f64::max);
        assert!(worst >= best * (1.0 - 2e-4) - 1e-9, "chose a token of {worst}, left one of {best}");
        for (j, &t) in chosen.iter().enumerate() {
            let want = tokens.iter().position(|&token| token == t as usize).map_or(0.0, |n| alpha[n]);
            let got = got.row(at)[j];
            assert!((got - want).abs() <= 2e-4 * want + 1e-7, "score of token {t}: {got}, expected {want}");
        }
        let missing = labels.is_missing(i, &tokens) as i64 * VWD_SELECT_NO_SUMMARY as i64;
        let want = scene.status(i, l, g) | choice.status(i) | candidates.status(at) | missing;
        assert_eq!(status[at], want, "status of list {at:?}");
    }
    with.check_written(scene);
    without.check_written(scene);
    scores.assert_written("scores", |at| (at[at.len() - 1] as i64) < counts[scene.list_at(at)]);
    candidates.tensors.ids.assert_untouched("candidates.ids");
}

// --- shares of a list ------------------------------------------------------------------------------------------------

/// Lists of about as many tokens as one, two and more shares of it have, in labels whose rows are single runs.
fn select_by_labels_agrees_with_the_formula_where_shares_of_a_list_end(backend: &Backend) {
    rounds(40, |rng| {
        let (kept, block) = (rng.pick(&[32, 64, 128]), rng.pick(&[1, 7, 8, 16, 24, 64, 128]));
        let (dim, group) = (rng.pick(&[kept, 2 * kept]), rng.size(1..=10));
        let capacity = (rng.pick(&[1, 64, 128, 512, 1024, 2048]) + rng.size(0..=2)) - 1;
        let sizes = [rng.size(1..=2), rng.size(1..=2), group, dim];
        let scene = Scene::new(backend, rng, sizes, block, capacity);
        let labels = Labels::of(backend, rng, &scene, kept, &Layout::default());
        let most = capacity.div_ceil(block).max(1);
        let some = rng.size(0..=most);
        let cap = rng.pick(&[most, most + 3, some]);
        let candidates = Candidates::random(backend, rng, &scene, cap);
        let most = rng.pick(&[0, 40, capacity + 2]);
        let [tokens, blocks] = [0, 1].map(|_| Choice::random(backend, rng, scene.batch, most));
        check_tokens(backend, rng, &scene, &tokens, &labels, &candidates);
        check_mass(backend, rng, &scene, &blocks, &labels, &candidates);
    });
}

/// k of 0, of all candidates, and of one more and one less, each candidate once, without forced tokens.
fn select_by_labels_takes_all_of_a_list_and_nothing_of_it(backend: &Backend) {
    rounds(10, |rng| {
        let block = 16;
        let scene = Scene::with_positions(backend, rng, [2, 2, 4, 128], block, 1200, None);
        let labels = Labels::of(backend, rng, &scene, 64, &Layout::default());
        let candidates = Candidates::random(backend, rng, &scene, 1200 / block);
        let tokens = scene.lists().map(|at| candidates.tokens(&scene, at).len()).max().unwrap();
        for k in [0, 1, tokens.saturating_sub(1), tokens, tokens + 1] {
            let choice = Choice::plain(k);
            check_tokens(backend, rng, &scene, &choice, &labels, &candidates);
            check_mass(backend, rng, &scene, &Choice::plain(k.div_ceil(block)), &labels, &candidates);
        }
    });
}

/// Labels that are all alike give every token the same share.
fn select_tokens_gives_ties_to_the_lower_token(backend: &Backend) {
    rounds(20, |rng| {
        let sizes = Scene::random(backend, rng);
        let extents = [sizes.batch, sizes.kv_heads, sizes.group, sizes.dim];
        // One position: of several, the first would weigh the tokens that it sees more.
        let scene = Scene::with_positions(backend, rng, extents, sizes.block, sizes.capacity, None);
        let choice = Choice::random(backend, rng, scene.batch, 60);
        let mut labels = Labels::random(backend, rng, &scene);
        let rows = labels.scale.shape.clone();
        labels.scale = Tensor::floats(backend, F16, &Array::filled(&rows, 0.0), &Layout::default());
        labels.min = Tensor::floats(backend, F16, &Array::filled(&rows, 0.5), &Layout::default());
        let candidates = Candidates::random(backend, rng, &scene, 12);
        let selected = ListTensors::poisoned(backend, rng, &scene, choice.cap);
        let args = vwd_select_tokens_args { selected: selected.c(), ..call(&scene, &choice, &labels, &candidates) };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_tokens(backend.session(), &args, backend.stream()) });
        selected.check(&scene, |at @ [i, l, _]| {
            let len = scene.tokens(i, l);
            let tokens = candidates.tokens(&scene, at);
            let forced = |t: &usize| *t < choice.init || t + choice.local >= len;
            let mut chosen: Vec<usize> = (0..len).filter(forced).collect();
            let room = choice.budget(i).saturating_sub(chosen.len());
            chosen.extend(tokens.into_iter().filter(|t| !forced(t)).take(room));
            chosen.sort_unstable();
            chosen
        });
    });
}
