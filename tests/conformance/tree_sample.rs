//! vwd_verify_tree from logits, mostly by rules that sample: which nodes are accepted, what is distributed how, and what it does not depend on.

mod ends;
mod scene;

use crate::Case;
use crate::draws::{Count, draws};
use crate::sampling::{
    self, PLAIN, Settings, Turns, WARMEST, assert_drawn_from, distribution, few_tokens, forbid, likeliest, logits,
    steep, uniform,
};
use crate::support::trees::*;
use crate::support::*;
use ends::Ends;
pub use scene::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    tree_sample_agrees_with_the_formula,
    tree_sample_is_exact_for_every_small_tree,
    tree_sample_is_exact_where_siblings_are_tested_alike,
    tree_sample_commits_tokens_as_often_as_they_are_likely,
    tree_sample_of_a_chain_is_verify_sample,
    tree_sample_commits_the_same_text_whatever_was_drafted,
    tree_sample_of_a_request_depends_on_no_other,
    tree_sample_commits_the_same_tokens_as_on_the_cpu,
    tree_sample_takes_large_vocabularies_and_trees,
    tree_sample_tries_many_siblings,
    tree_sample_refuses_at_several_nodes_of_long_rows,
    tree_sample_tells_what_cannot_be_drawn,
    tree_sample_never_accepts_what_the_target_excludes,
    tree_sample_tells_of_weights_that_leave_nothing_or_are_none,
];

fn tree_sample_agrees_with_the_formula(backend: &Backend) {
    let (mut sure, mut all) = (0, 0);
    rounds(100, |rng| {
        let (batch, nodes) = (rng.size(0..=6), rng.pick(&[1, 2, 3, 6, 12, 40]));
        let vocabulary = rng.pick(&[1, 2, 3, 7, 8, 50, 129]);
        let scene = random(rng, batch, nodes, vocabulary);
        sure += scene.check(backend, Some(rng));
        all += batch;
    });
    assert!(sure * 10 >= all * 8, "the formulas are sure of {sure} of {all} requests");
}

// --- distributions ---------------------------------------------------------------------------------------------------------

/// Every tree of so many nodes whose links are sound.
fn all_trees(nodes: usize) -> Vec<Vec<i64>> {
    (1..nodes).fold(vec![vec![-1]], |trees, c| {
        trees.iter().flat_map(|tree| (0..c as i64).map(move |parent| [tree.clone(), vec![parent]].concat())).collect()
    })
}

/// Distributions of the target and of the drafter after each text.
struct Models {
    vocabulary: usize,
    seed: u64,
}

impl Models {
    fn row(&self, text: &[usize], is_draft: bool) -> Vec<f64> {
        let code = text.iter().fold(1, |code, &token| code * (self.vocabulary + 1) as u64 + token as u64 + 1);
        let mut rng = Rng::new(self.seed * 1_000_003 + code * 2 + is_draft as u64);
        (0..self.vocabulary).map(|_| F32.round(rng.normal())).collect()
    }

    fn p(&self, text: &[usize], is_draft: bool) -> Vec<f64> {
        distribution(&self.row(text, is_draft), false, &PLAIN).ok().flatten().expect("finite logits")
    }
}

/// The distribution of the first two tokens of a text that is verified by a tree, [first][second]: the sum over all drafts and over all that
/// may be accepted. A text of one token goes on as the target would have it.
fn two_tokens(models: &Models, parents: &[i64], rule: u32) -> Vec<Vec<f64>> {
    let n = models.vocabulary;
    let mut found = vec![vec![0.0; n]; n];
    let children = |v: usize| (v + 1..parents.len()).filter(|&c| parents[c] == v as i64).collect::<Vec<_>>();
    // The tokens of the root's children, with how likely they are; then those of theirs. Deeper nodes do not matter.
    for (tokens, likely) in drafts(&models.p(&[], true), children(0).len(), rule) {
        for (outcome, first, part) in outcomes(&models.p(&[], false), &models.p(&[], true), &tokens, rule) {
            let p = models.p(&[first], false);
            let second = match outcome.map(|n| children(children(0)[n])) {
                Some(grandchildren) if !grandchildren.is_empty() => {
                    let q = models.p(&[first], true);
                    let mut sum = vec![0.0; n];
                    for (tokens, likely) in drafts(&q, grandchildren.len(), rule) {
                        outcomes(&p, &q, &tokens, rule).iter().for_each(|&(_, y, part)| sum[y] += likely * part);
                    }
                    sum
                }
                _ => p,
            };
            (0..n).for_each(|y| found[first][y] += likely * part * second[y]);
        }
    }
    found
}

/// All tokens that siblings may be, and how likely.
fn drafts(q: &[f64], count: usize, rule: u32) -> Vec<(Vec<usize>, f64)> {
    (0..count).fold(vec![(vec![], 1.0)], |drafts, _| {
        let longer = drafts.iter().flat_map(|(tokens, likely)| {
            let mut turns = Turns::new(q, Some(q), rule == VWD_WALK_DISTINCT);
            tokens.iter().for_each(|&c| turns.refuse(c));
            let q = turns.q.expect("it is given");
            let next: Vec<_> = (0..q.len()).map(|c| ([tokens.clone(), vec![c]].concat(), likely * q[c])).collect();
            next.into_iter().filter(|&(_, likely)| likely > 0.0)
        });
        longer.collect()
    })
}

/// What a node comes to: the sibling that is accepted, the token, and how likely that is.
fn outcomes(p: &[f64], q: &[f64], tokens: &[usize], rule: u32) -> Vec<(Option<usize>, usize, f64)> {
    let (mut found, mut left) = (vec![], 1.0);
    let mut turns = Turns::new(p, Some(q), rule == VWD_WALK_DISTINCT);
    for (n, &c) in tokens.iter().enumerate() {
        let accepted = turns.acceptance(c);
        found.push((Some(n), c, left * accepted));
        left *= 1.0 - accepted;
        turns.refuse(c);
    }
    found.extend(turns.r.iter().enumerate().map(|(y, r)| (None, y, left * r)));
    found
}

/// Over all drafts and all that may be accepted the formulas give the target's distribution, and the library follows the formulas.
fn tree_sample_is_exact_for_every_small_tree(backend: &Backend) {
    let models = Models { vocabulary: 3, seed: 5 };
    let trees: Vec<Vec<i64>> = (1..=6).flat_map(all_trees).collect();
    assert_eq!(trees.len(), 1 + 1 + 2 + 6 + 24 + 120);
    for (n, parents) in trees.iter().enumerate() {
        for rule in [VWD_WALK_INDEPENDENT, VWD_WALK_DISTINCT] {
            let most = (0..parents.len()).map(|v| parents.iter().filter(|&&p| p == v as i64).count()).max();
            if rule == VWD_WALK_DISTINCT && most > Some(models.vocabulary) {
                continue;
            }
            let found = two_tokens(&models, parents, rule);
            for (x, found) in found.iter().enumerate() {
                for (y, found) in found.iter().enumerate() {
                    let exact = models.p(&[], false)[x] * models.p(&[x], false)[y];
                    assert!((found - exact).abs() < 1e-12, "{parents:?}, rule {rule}: {x} {y}");
                }
            }
        }
        if backend.times(100) < 100 && n % 10 != 3 {
            continue;
        }
        // Drafts of these models, in the library.
        rounds(1, |rng| {
            let batch = 24;
            for rule in RULES {
                let nodes = parents.len();
                let mut scene = Scene::plain(rule, parents, Array::filled(&[batch, nodes, 3], 0.0));
                scene.seeds.iter_mut().for_each(|seed| *seed += (n * batch) as i64);
                scene.draft_rows = Some(Array::filled(&[batch, nodes, 3], 0.0));
                let paths = ancestries(parents);
                // A node's rows follow from its text, so that tokens are drawn from the root on.
                for (v, path) in paths.iter().enumerate() {
                    let path = path.as_ref().expect("sound links");
                    for i in 0..batch {
                        let text: Vec<usize> =
                            path[1..].iter().map(|&c| scene.tokens[[i, c]].max(0) as usize).collect();
                        for (j, (p, q)) in models.row(&text, false).iter().zip(models.row(&text, true)).enumerate() {
                            scene.target[[i, v, j]] = *p;
                            scene.draft_rows.as_mut().expect("given")[[i, v, j]] = q;
                        }
                    }
                }
                scene.draft(rng);
                assert!(scene.check(backend, None) * 10 >= batch * 9);
            }
        });
    }
}

/// Counts of what requests like the scene's commit, each with drafts of its own: by first token, and then by the first two tokens if there are more than one node's.
fn committed(backend: &Backend, scene: &Scene, rng: &mut Rng) -> Vec<u64> {
    let (vocabulary, drafter) = (scene.vocabulary(), scene.drafter());
    let count = Count {
        draws: draws(backend, 40_000, 100),
        positions: scene.nodes(),
        seed: rng.int(0..=i64::MAX) as u64,
        draft: &|rng, tokens| tokens.extend(drafter(rng)),
        bins: vocabulary * (1 + vocabulary),
        tally: &|committed, counts| {
            let first = committed[0] as usize;
            counts[first] += 1;
            if committed[1] >= 0 {
                counts[vocabulary * (1 + first) + committed[1] as usize] += 1;
            }
        },
    };
    count.of(backend, &|backend, batch| Box::new(scene.repeated(batch).place(backend, None)))
}

/// Two siblings from q = (.5, .5) where p = (.9, .1). A large engine tests each by min(1, p/q), so that the second is tested as if the first
/// had not been refused.
fn tree_sample_is_exact_where_siblings_are_tested_alike(backend: &Backend) {
    let (p, q) = ([0.9, 0.1], [0.5, 0.5]);
    let (mut alike, mut exact) = ([0.0; 2], [0.0; 2]);
    for (tokens, likely) in drafts(&q, 2, VWD_WALK_INDEPENDENT) {
        for (_, y, part) in outcomes(&p, &q, &tokens, VWD_WALK_INDEPENDENT) {
            exact[y] += likely * part;
        }
        let mut left = likely;
        for &c in &tokens {
            let accepted = f64::min(1.0, p[c] / q[c]);
            alike[c] += left * accepted;
            left *= 1.0 - accepted;
        }
        // What is left is drawn from norm(max(p − q, 0)), which is the first token.
        alike[0] += left;
    }
    assert!((exact[0] - 0.9).abs() < 1e-12 && (alike[0] - 0.86).abs() < 1e-12, "{exact:?} {alike:?}");

    let mut scene = Scene::plain(VWD_WALK_INDEPENDENT, &[-1, 0, 0], Array::new(&[1, 3, 2], [p; 3].concat()));
    scene.target = scene.target.map(|&x| F32.round(x));
    scene.flags = VWD_SAMPLE_TARGET_PROBABILITIES | VWD_SAMPLE_DRAFT_PROBABILITIES;
    scene.draft_rows = Some(Array::new(&[1, 3, 2], [q; 3].concat()));
    rounds(1, |rng| {
        assert_drawn_from(&committed(backend, &scene, rng)[..2], &p, "two siblings");
    });
}

/// Of a tree of two depths: the first token, and the second after each first one. Children of one row are often refused. The last requests
/// may not begin with a stop token.
fn tree_sample_commits_tokens_as_often_as_they_are_likely(backend: &Backend) {
    const PARENTS: [i64; 9] = [-1, 0, 0, 0, 1, 1, 2, 2, 3];
    rounds(1, |rng| {
        let root = [2.0, 1.0, 1.0, 0.0, -1.0, f64::NEG_INFINITY];
        // The same row for all children of the root, so that the second token does not depend on the first.
        let below = [0.0, 1.5, -0.5, 0.3, 1.0, 0.2];
        let other = [0.0, 1.0, 2.5, 1.0, 0.5, 0.0];
        let one_hot = [f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0, f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0];
        let filtered = Settings { temperature: F32.round(0.7), top_k: 4, top_p: F32.round(0.9), ..PLAIN };
        let free = [(Some(other), PLAIN), (Some(other), filtered), (Some(one_hot), PLAIN), (None, PLAIN)];
        let stops = [1, 3];
        let all = free.map(|(q, settings)| (q, settings, 0)).into_iter().chain([(Some(other), filtered, 1)]);
        for (q, settings, least) in all {
            for rule in RULES {
                let target = Array::from_fn(&[1, 9, 6], |at| if at[1] == 0 { root[at[2]] } else { below[at[2]] });
                let mut scene = Scene::plain(rule, &PARENTS, target);
                scene.settings = vec![settings];
                scene.draft_rows = q.map(|q| Array::from_fn(&[1, 9, 6], |at| q[at[2]]));
                scene.tokens = Array::new(&[1, 9], vec![0, 0, 1, 3, 1, 4, 0, 1, 2]);
                let (stop, min_remaining) = (Some(Array::new(&[2], stops.to_vec())), Some(vec![least]));
                scene.ends = (least > 0).then(|| Ends { stop, min_remaining, ..Ends::default() });
                let counts = committed(backend, &scene, rng);
                let what = format!("rule {rule}, {q:?}, {settings:?}, {least} without stop");
                let of = |row: &[f64]| distribution(row, false, &settings).ok().flatten().expect("sure");
                let mut first_row = root;
                forbid(&mut first_row, &stops[..if least > 0 { 2 } else { 0 }], false);
                assert_drawn_from(&counts[..6], &of(&first_row), &what);
                for (first, counts) in counts[6..].chunks(6).enumerate() {
                    assert_drawn_from(counts, &of(&below), &format!("{what}, after {first}"));
                }
            }
        }
    });
}

// --- what it equals and does not depend on -----------------------------------------------------------------------------------

fn tree_sample_of_a_chain_is_verify_sample(backend: &Backend) {
    rounds(40, |rng| {
        let (batch, nodes) = (rng.size(1..=4), rng.size(1..=6));
        let vocabulary = rng.pick(&[2, 9, 300, 5000]);
        let mut scene = random(rng, batch, nodes, vocabulary);
        scene.parents = Array::from_fn(&[batch, nodes], |at| at[1] as i64 - 1);
        scene.counts = rng.one_in(2).then(|| (0..batch).map(|_| rng.int(1..=nodes as i64)).collect());
        scene.places = nodes;
        scene.draft(rng);
        match rng.size(0..=3) {
            0 => {}
            1 => scene.ends = Some(Ends::random(rng, &scene)),
            _ => scene.ends = Some(Ends::on_the_way(rng, &scene, backend)),
        }
        let (mut found, expected) = (scene.run(backend, None), scene.run_as_chain(backend));
        for i in 0..batch {
            let end = scene.ends.as_ref().map(|ends| ends.of(i));
            // The status of a tree is that of the whole walk, where a chain ends with the cut.
            if end.is_some_and(|end| end.remaining.is_some_and(|n| n <= 0)) || expected.finish[i] != 0 {
                assert_eq!(expected.status[i] & !found.status[i], 0, "status of {i}, rule {}", scene.rule);
                found.status[i] = expected.status[i];
            }
        }
        if scene.ends.is_none() {
            (found.committed_len, found.finish) = (expected.committed_len.clone(), expected.finish.clone());
        }
        assert_eq!(found, expected, "rule {}", scene.rule);
    });
}

/// By COUPLED, and greedily, a text is that of plain sampling, by any tree. Its stop token would come sooner if it could.
fn tree_sample_commits_the_same_text_whatever_was_drafted(backend: &Backend) {
    const LENGTH: usize = 20;
    rounds(4, |rng| {
        let vocabulary = rng.pick(&[3, 60, 5000]);
        let dtype = rng.pick(&[F32, BF16]);
        // The row that decides a position, whatever precedes.
        let rows = logits(rng, &[LENGTH + 16, vocabulary], dtype);
        let settings = Settings { temperature: F32.round(rng.pick(&[0.0, 0.8])), top_p: F32.round(0.9), ..PLAIN };
        let seed = rng.int(0..=1 << 40);
        let (early, first) = (rng.size(0..=5), rng.size(6..=12));
        let rule = if settings.is_greedy() { rng.pick(&[VWD_WALK_COUPLED, VWD_WALK_GREEDY]) } else { VWD_WALK_COUPLED };
        // Without nodes it is that of plain sampling. `stop` comes with the position before which it is forbidden.
        let mut text = |nodes: usize, stop: Option<(i64, usize)>| {
            let (mut text, mut most, mut finish): (Vec<i64>, _, _) = (vec![], 0, 0);
            while finish == 0 {
                let parents = random_parents(rng, nodes.max(1));
                let depths: Vec<usize> =
                    ancestries(&parents).iter().map(|path| path.as_ref().expect("sound").len() - 1).collect();
                let at = text.len();
                let row = |v: usize| rows.row([at + depths[v].min(15)]).to_vec();
                let target = Array::new(&[1, parents.len(), vocabulary], (0..parents.len()).flat_map(row).collect());
                let mut scene = Scene::plain(rule, &parents, target);
                scene.tokens = Array::from_fn(&[1, parents.len()], |node| match rng.one_in(3) {
                    true => rng.int(-1..=2),
                    // What its position draws, mostly.
                    false => {
                        let row = rows.row([(at + depths[node[1]] + LENGTH + 15) % (LENGTH + 16)]);
                        let p = distribution(row, false, &settings).ok().flatten();
                        let u = uniform(seed, (at + depths[node[1]]) as i64 - 1, 1, 0);
                        let draw = |p: Vec<f64>| sampling::draw(&p, u).ok();
                        p.and_then(draw).unwrap_or(likeliest(row)) as i64
                    }
                });
                (scene.dtype, scene.places) = (dtype, parents.len().min(14));
                (scene.settings, scene.seeds, scene.positions) = (vec![settings], vec![seed], vec![at as i64]);
                scene.ends = Some(Ends {
                    stop: stop.map(|(stop, _)| Array::filled(&[1], stop)),
                    min_remaining: stop.map(|(_, first)| vec![first as i64 - at as i64]),
                    remaining: Some(vec![(LENGTH - at) as i64]),
                    ..Ends::default()
                });
                let found = if nodes > 0 { scene.run(backend, None) } else { scene.run_as_chain(backend) };
                (most, finish) = (most.max(found.accepted[0]), found.finish[0]);
                text.extend(found.committed.data.iter().filter(|&&token| token >= 0));
            }
            (text, most)
        };
        let (free, _) = text(0, None);
        for stop in [None, Some((free[early], first))] {
            let (plain, _) = text(0, stop);
            assert_eq!(plain == free, stop.is_none(), "a text that is kept from ending is another");
            let mut accepted = 0;
            for nodes in [1, 2, 5, 12] {
                let (found, most) = text(nodes, stop);
                assert_eq!(found, plain, "{nodes} nodes, {stop:?}");
                accepted += most;
            }
            assert!(accepted > 0, "some drafts are accepted");
        }
    });
}

/// Its place, the batch and other trees change not one bit.
fn tree_sample_of_a_request_depends_on_no_other(backend: &Backend) {
    rounds(8, |rng| {
        let vocabulary = rng.pick(&[9, 300]);
        let scene = random(rng, 5, 7, vocabulary);
        let all = scene.run(backend, None);
        for i in 0..5 {
            let found = scene.alone(i).run(backend, None);
            assert_eq!(found.committed.data, all.committed.row([i]), "request {i}");
            assert_eq!(found.path.data, all.path.row([i]), "request {i}");
            assert_eq!(found.status[0], all.status[i], "request {i}");
        }
    });
}

/// To the bit, margins or not.
fn tree_sample_commits_the_same_tokens_as_on_the_cpu(backend: &Backend) {
    let cpu = Backend::cpu(2);
    rounds(24, |rng| {
        let (batch, nodes) = (rng.size(1..=3), rng.pick(&[1, 4, 9, 20]));
        let vocabulary = rng.pick(&[3, 200, 4100, 9000]);
        let mut scene = random(rng, batch, nodes, vocabulary);
        // Draft rows much like the target's have small residuals, where a bit matters.
        let columns = scene.draft_rows.as_ref().map_or(0, |rows| rows.shape[2]);
        if scene.flags == 0 && columns == vocabulary && scene.map.is_none() && rng.one_in(2) {
            let dtype = scene.draft_dtype;
            let near = scene.target.data.iter().map(|x| dtype.round(x + 0.1 * rng.normal())).collect();
            scene.draft_rows = Some(Array::new(&scene.target.shape, near));
            scene.draft(rng);
        }
        if rng.one_in(2) {
            scene.ends = Some(Ends::on_the_way(rng, &scene, &cpu));
        }
        assert_eq!(scene.run(backend, None), scene.run(&cpu, None), "rule {}", scene.rule);
    });
}

/// Segments are of 4096 tokens, columns of a draft's row among them; walks are of many nodes. In long rows a few tokens have nearly all mass, and the
/// formulas are sure of every request.
fn tree_sample_takes_large_vocabularies_and_trees(backend: &Backend) {
    let (mut sure, mut all) = (0, 0);
    let is_emulated = backend.times(1000) < 1000;
    let most = if is_emulated { 64 } else { 1024 };
    let mut long = vec![(2, 8, 4097), (1, 5, 12_001), (1, 3, 151_936)];
    long.extend((!is_emulated).then_some((1, 3, 1 << 20)));
    rounds(1, |rng| {
        for rule in RULES {
            for &(batch, nodes, vocabulary) in &long {
                let scene = random_steep(rng, rule, batch, nodes, vocabulary);
                let sure = scene.check(backend, None);
                assert_eq!(sure, batch, "requests of which the formulas are sure, {vocabulary} tokens, rule {rule}");
            }
            for (batch, nodes, vocabulary) in [(1, most, 5), (2, 64, 40)] {
                let mut scene = random(rng, batch, nodes, vocabulary);
                scene.rule = rule;
                scene.draft(rng);
                sure += scene.check(backend, None);
                all += batch;
            }
        }
        // A chain whose every node is accepted: what was drawn from is what decides, and has one token.
        let hot = Array::from_fn(&[1, most, 5], |at| if at[2] == at[1] % 5 { 0.0 } else { f64::NEG_INFINITY });
        let chain: Vec<i64> = (-1..most as i64 - 1).collect();
        for rule in RULES {
            let mut scene = Scene::plain(rule, &chain, hot.clone());
            scene.draft_rows = Some(hot.clone());
            scene.tokens = Array::from_fn(&[1, most], |at| (at[1] as i64 + 4) % 5);
            assert_eq!(scene.run(backend, None).accepted, [most as i64 - 1]);
        }
    });
    assert!(sure * 2 >= all, "the formulas are sure of {sure} of {all} requests");
}

/// Anything at random, but for rows in which a few tokens have nearly all mass, and those are drafted.
fn random_steep(rng: &mut Rng, rule: u32, batch: usize, nodes: usize, vocabulary: usize) -> Scene {
    let few = few_tokens(rng, vocabulary);
    let mut scene = Scene { rule, ends: None, ..random(rng, batch, nodes, 9) };
    let [of_target, of_draft] =
        [VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_DRAFT_PROBABILITIES].map(|flag| scene.flags & flag != 0);
    scene.target = steep(rng, &[batch, nodes, vocabulary], &few, of_target, scene.dtype);
    scene.settings.iter_mut().for_each(|s| s.temperature = s.temperature.min(WARMEST));
    scene.tokens = scene.tokens.map(|&x| few.get(x as usize).map_or(x, |&token| token as i64));
    scene.map = None;
    scene.draft_rows =
        scene.draft_rows.map(|_| steep(rng, &[batch, nodes, vocabulary], &few, of_draft, scene.draft_dtype));
    scene.draft(rng);
    scene
}

/// A root with many children, most of which are refused: duplicates, tokens that are none, and ones that were certain.
fn tree_sample_tries_many_siblings(backend: &Backend) {
    let cpu = Backend::cpu(1);
    let (mut sure, mut all) = (0, 0);
    rounds(12, |rng| {
        let vocabulary = rng.pick(&[8, 60, 4200]);
        let nodes = rng.size(5..=if backend.times(1000) < 1000 { 9 } else { 40 });
        let mut parents = vec![0; nodes];
        parents[0] = -1;
        let target = Array::from_fn(&[4, nodes, vocabulary], |_| F32.round(rng.normal()));
        let mut scene = Scene::plain(rng.pick(&RULES[1..]), &parents, target);
        // The target wants what the drafter does not.
        scene.draft_rows = (!rng.one_in(4)).then(|| scene.target.map(|x| F32.round(-x * rng.pick(&[0.5, 1.0, 8.0]))));
        scene.tokens = Array::from_fn(&[4, nodes], |_| rng.int(-1..=vocabulary as i64));
        if rng.one_in(2) {
            scene.draft(rng);
        }
        sure += scene.check(backend, None);
        all += 4;
        assert_eq!(scene.run(backend, None), scene.run(&cpu, None), "rule {}", scene.rule);
    });
    assert!(sure * 2 >= all, "the formulas are sure of {sure} of {all} requests");
}

/// Of each node's children two are refused and the third is accepted, but for the last node, whose only child is refused. Rows have more segments than CTAs of a cluster take at once. Filters, which leave
/// all tokens, have CUDA sum the rows of all nodes before the walk; without them one launch walks.
fn tree_sample_refuses_at_several_nodes_of_long_rows(backend: &Backend) {
    const PARENTS: [i64; 8] = [-1, 0, 0, 0, 3, 3, 3, 6];
    let cpu = Backend::cpu(2);
    rounds(1, |rng| {
        let filtered = Settings { min_p: 1e-30, ..PLAIN };
        for (rule, vocabulary, settings) in [
            (VWD_WALK_INDEPENDENT, 33 * 4096 + 5, filtered),
            (VWD_WALK_DISTINCT, 5 * 4096 + 9, filtered),
            (VWD_WALK_INDEPENDENT, 5 * 4096 + 9, PLAIN),
            (VWD_WALK_DISTINCT, 33 * 4096 + 5, PLAIN),
        ] {
            let target = Array::from_fn(&[1, PARENTS.len(), vocabulary], |_| F32.round(rng.normal()));
            let mut scene = Scene::plain(rule, &PARENTS, target);
            scene.draft_rows = Some(scene.target.map(|x| -x));
            scene.settings = vec![settings];
            for (child, &parent) in PARENTS.iter().enumerate().skip(1) {
                let row = scene.target.row([0, parent as usize]);
                // Children 3 and 6 have what the target wants most, the others what the drafter does.
                let mut order: Vec<usize> = (0..vocabulary).collect();
                let at = if child % 3 == 0 { vocabulary - 1 } else { child % 3 - 1 };
                order.select_nth_unstable_by(at, |&a, &b| row[a].total_cmp(&row[b]));
                scene.tokens[[0, child]] = order[at] as i64;
            }
            let found = scene.run(backend, None);
            assert_eq!(found.path.data[..4], [0, 3, 6, -1], "rule {rule}");
            assert_eq!(found, scene.run(&cpu, None), "rule {rule}");
        }
    });
}

fn tree_sample_tells_what_cannot_be_drawn(backend: &Backend) {
    let (none, infinite, nan) = (f64::NEG_INFINITY, f64::INFINITY, f64::NAN);
    let bits = |bits: u32| bits as i64;
    for rule in RULES {
        // Roots: nothing to draw, all NaN, some NaN, infinite ones.
        let rows = [[none; 4], [nan; 4], [nan, 1.0, 2.0, none], [infinite, 1.0, nan, infinite]];
        let target = Array::from_fn(&[4, 2, 4], |at| rows[at[0]][at[2]]);
        let scene = Scene::plain(rule, &[-1, 0], target);
        let found = scene.run(backend, None);
        let no_token = VWD_TREE_NO_TOKEN;
        let expected = [no_token, no_token | VWD_SAMPLE_NAN, VWD_SAMPLE_NAN, VWD_SAMPLE_NAN].map(bits);
        assert_eq!(found.status, expected, "rule {rule}");
        assert_eq!((found.next_token[0], found.committed[[0, 0]], found.path[[0, 0]]), (-1, -1, 0), "rule {rule}");
        assert_eq!(found.accepted[..2], [0, 0]);
        assert!([1, 2].contains(&found.next_token[2]) && [0, 3].contains(&found.committed[[3, 0]]), "rule {rule}");

        // A node on the path from which nothing can be drawn: what was accepted stands.
        let hot = |token: usize| Array::from_fn(&[4], |at| if at[0] == token { 0.0 } else { none }).data;
        let target = Array::new(&[1, 3, 4], [hot(2), vec![none; 4], hot(1)].concat());
        let mut scene = Scene::plain(rule, &[-1, 0, 1], target);
        scene.tokens = Array::new(&[1, 3], vec![0, 2, 1]);
        let found = scene.run(backend, None);
        assert_eq!((found.accepted[0], found.next_token[0], found.status[0]), (1, -1, bits(no_token)), "rule {rule}");
        assert_eq!((found.path.data, found.committed.data), (vec![0, 1, -1], vec![2, -1, -1]), "rule {rule}");

        // No nodes, a negative number of them, and too many; the path has one place.
        let mut scene = Scene::plain(rule, &[-1, 0], Array::filled(&[4, 2, 4], 0.0));
        (scene.counts, scene.places) = (Some(vec![0, -5, i32::MAX as i64, 1]), 1);
        let found = scene.run(backend, None);
        assert_eq!(found.status, [0, 0, bits(VWD_TREE_CLAMPED), 0], "rule {rule}");
        assert_eq!((&found.path.data[..], &found.accepted[..]), (&[-1, -1, 0, 0][..], &[0; 4][..]), "rule {rule}");
        assert_eq!(found.next_token[..2], [-1, -1]);
        assert!(found.next_token[2] >= 0 && found.next_token[2] == found.committed[[2, 0]]);

        // Parents that are −1, themselves or above: the first child alone is one.
        let mut scene =
            Scene::plain(rule, &[7, 0, -1, 3, 6, 2], Array::new(&[1, 6, 4], [(); 6].map(|()| hot(2)).concat()));
        scene.tokens = Array::filled(&[1, 6], 2);
        let found = scene.run(backend, None);
        assert_eq!((found.accepted[0], found.status[0]), (1, bits(VWD_TREE_BROKEN_LINK)), "rule {rule}");
        assert_eq!((found.path.data[..3].to_vec(), found.next_token[0]), (vec![0, 1, -1], 2), "rule {rule}");
    }
    // Rows of drafts: NaN, nothing at all, and only a token that the target does not give.
    for rule in RULES[1..].iter().copied() {
        let target = Array::from_fn(&[3, 3, 3], |at| if at[2] == 2 { none } else { at[2] as f64 });
        let mut scene = Scene::plain(rule, &[-1, 0, 0], target);
        let rows = [[nan, 0.0, 0.0], [none; 3], [none, none, 0.0]];
        scene.draft_rows = Some(Array::from_fn(&[3, 3, 3], |at| rows[at[0]][at[2]]));
        scene.tokens = Array::new(&[3, 3], [[9, 0, 1], [9, 0, 1], [9, 2, 2]].concat());
        let found = scene.run(backend, None);
        // What q cannot give but p can is accepted at once.
        assert_eq!(found.status, [bits(VWD_SAMPLE_NAN), 0, 0], "rule {rule}");
        assert_eq!((found.accepted[0], found.accepted[1], found.accepted[2]), (1, 1, 0), "rule {rule}");
        assert_eq!((&found.committed.row([0])[..1], &found.committed.row([1])[..1]), (&[0][..], &[0][..]));
        assert!([0, 1].contains(&found.next_token[2]), "rule {rule}");
    }
}

/// Children whose token the target excludes, and whose row of drafts has none of it either, or that token alone; those and others in turn.
fn tree_sample_never_accepts_what_the_target_excludes(backend: &Backend) {
    let (none, batch) = (f64::NEG_INFINITY, 8);
    let drafted = [[0.0, 0.0, none, none], [none, none, 0.0, none], [none, none, 0.0, 0.0], [0.0, none, 0.0, none]];
    for rule in RULES {
        let target = Array::from_fn(&[batch, 4, 4], |at| if at[2] < 2 { 0.0 } else { none });
        let mut scene = Scene::plain(rule, &[-1, 0, 0, 0], target);
        scene.draft_rows = Some(Array::from_fn(&[batch, 4, 4], |at| drafted[at[0] % 4][at[2]]));
        scene.tokens = Array::new(&[batch, 4], [9, 2, 3, 2].repeat(batch));
        let found = scene.run(backend, None);
        assert_eq!(found.accepted, vec![0; batch], "rule {rule}");
        assert!(found.next_token.iter().all(|token| [0, 1].contains(token)), "rule {rule}: {:?}", found.next_token);
        assert!(scene.check(backend, None) > 0, "rule {rule}");
    }
}

/// A child that was refused where the drafts are as likely as the target would have them, and negative probabilities in a row of either.
fn tree_sample_tells_of_weights_that_leave_nothing_or_are_none(backend: &Backend) {
    let row = [0.25, 0.75, 0.0];
    let (target, drafted) = ([row, row, [-0.5, 0.0, 0.5], row], [row, [0.5, 0.5, 0.0], row, [0.0, -0.25, 0.25]]);
    for rule in [VWD_WALK_INDEPENDENT, VWD_WALK_DISTINCT] {
        let mut scene = Scene::plain(rule, &[-1, 0], Array::from_fn(&[4, 2, 3], |at| target[at[0]][at[2]]));
        scene.flags = VWD_SAMPLE_TARGET_PROBABILITIES | VWD_SAMPLE_DRAFT_PROBABILITIES;
        scene.draft_rows = Some(Array::from_fn(&[4, 2, 3], |at| drafted[at[0]][at[2]]));
        scene.tokens = Array::new(&[4, 2], [[9, 2], [9, 2], [9, 0], [9, 2]].concat());
        let found = scene.run(backend, None);
        let bits = [VWD_SAMPLE_NO_RESIDUAL, 0, VWD_SAMPLE_NAN, VWD_SAMPLE_NAN].map(i64::from);
        assert_eq!((&found.status[..], &found.accepted[..]), (&bits[..], &[0; 4][..]), "rule {rule}");
        let drawn = sampling::draw(&row, uniform(scene.seeds[0], 100, 1, 0)).expect("sure") as i64;
        assert_eq!((found.next_token[0], found.next_token[1], found.next_token[2]), (drawn, 1, 2), "rule {rule}");
    }
}
