//! vwd_tree_prepare and vwd_verify_tree.

use crate::Case;
use crate::support::trees::*;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    tree_has_the_form_that_walks_to_the_root_find,
    tree_of_children_and_siblings_is_that_of_their_parents,
    tree_of_broken_chains_ends_where_they_break,
    tree_takes_sizes_up_to_1024_nodes,
    verify_tree_walks_to_the_token_that_the_target_says,
    verify_tree_takes_the_first_of_equal_siblings,
    verify_tree_of_a_chain_is_verify,
    verify_tree_takes_sizes_up_to_1024_nodes,
    verify_tree_accepts_no_more_than_the_path_holds,
    verify_tree_finds_the_largest_logit,
    verify_tree_finds_the_largest_logit_of_many_nodes,
    verify_tree_finds_the_largest_logit_of_long_rows,
    verify_tree_by_each_variant_walks_alike,
    verify_tree_reads_what_the_call_before_it_wrote,
];

// --- the form ----------------------------------------------------------------------------------------------------------

/// Counts of nodes: full, some, none, and some that have to be clamped.
fn random_counts(rng: &mut Rng, batch: usize, n: usize) -> Array<i64> {
    Array::from_fn(&[batch], |_| match rng.size(0..=7) {
        0 => 0,
        1 => -rng.int(1..=3),
        2 => n as i64 + rng.int(1..=9),
        3 => 1,
        4 => n as i64,
        _ => rng.int(0..=n as i64),
    })
}

/// The number of nodes of each sequence, clamped, and the status of clamping.
fn clamped(counts: Option<&Array<i64>>, i: usize, n: usize) -> (usize, i64) {
    let given = counts.map_or(n as i64, |counts| counts[[i]]);
    (given.clamp(0, n as i64) as usize, if given > n as i64 { VWD_TREE_CLAMPED as i64 } else { 0 })
}

/// How links of a batch are given: [B, N] each.
enum Links {
    Parents(Array<i64>),
    Chains(Array<i64>, Array<i64>),
}

impl Links {
    fn tensors(&self) -> [&Array<i64>; 2] {
        match self {
            Links::Parents(parents) => [parents; 2],
            Links::Chains(first, next) => [first, next],
        }
    }
}

/// Whether 32 bits do not hold all numbers.
fn is_wide(tensors: [&Array<i64>; 2]) -> bool {
    tensors.into_iter().flat_map(|t| &t.data).any(|&x| i32::try_from(x).is_err())
}

/// Makes the call with all outputs, and compares them with the trees that `expected` tells: parents of the first nodes, and whether a
/// link was broken.
fn check_form(
    backend: &Backend,
    rng: &mut Rng,
    links: &Links,
    counts: Option<&Array<i64>>,
    expected: impl Fn(usize, usize) -> (Vec<i64>, bool),
) {
    let (Links::Parents(shape) | Links::Chains(shape, _)) = links;
    let (batch, n) = (shape.shape[0], shape.shape[1]);
    let ints = |rng: &mut Rng, dtype, values: &Array<i64>| {
        Tensor::ints(backend, dtype, values, &Layout::random(rng, values.shape.len()))
    };
    let link = if is_wide(links.tensors()) { I64 } else { rng.pick(&[I32, I64]) };
    let (parents, chains) = match links {
        Links::Parents(parents) => (Some(ints(rng, I32, parents)), None),
        Links::Chains(first, next) => (None, Some([ints(rng, link, first), ints(rng, link, next)])),
    };
    let node_counts = counts.map(|counts| ints(rng, I32, counts));
    let position = rng.pick(&[I32, I64]);
    let most = if position == I64 { 1 << 40 } else { 1 << 20 };
    let base_values = Array::from_fn(&[batch], |_| rng.int(0..=most));
    let bases = ints(rng, position, &base_values);
    let row = |rng: &mut Rng, dtype| Tensor::poisoned(backend, dtype, &[batch, n], &Layout::random(rng, 2));
    let (tree_parents, depths, ranks) = (row(rng, I32), row(rng, I32), row(rng, I32));
    let positions = row(rng, position);
    let words = n.div_ceil(32);
    let mask = Tensor::poisoned(backend, U32, &[batch, n, words], &Layout::random(rng, 3));
    let status = Tensor::poisoned(backend, U32, &[batch], &Layout::random(rng, 1));
    let given = |t: Option<&Tensor>| t.map_or(absent(), Tensor::c);
    let args = vwd_tree_prepare_args {
        parents: given(parents.as_ref()),
        first_child: given(chains.as_ref().map(|chains| &chains[0])),
        next_sibling: given(chains.as_ref().map(|chains| &chains[1])),
        node_counts: given(node_counts.as_ref()),
        bases: bases.c(),
        tree_parents: tree_parents.c(),
        depths: depths.c(),
        positions: positions.c(),
        ranks: ranks.c(),
        mask: mask.c(),
        status: status.c(),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_tree_prepare(backend.session(), &args, backend.stream()) });
    let (got_parents, got_depths, got_ranks) = (tree_parents.read_ints(), depths.read_ints(), ranks.read_ints());
    let (got_positions, got_status) = (positions.read_ints(), status.read_raw());
    let got_mask = mask.read_raw();
    for i in 0..batch {
        let (count, clamp) = clamped(counts, i, n);
        let (tree, broken) = expected(i, count);
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        let bits = if broken { VWD_TREE_BROKEN_LINK as i64 } else { 0 } | clamp;
        assert_eq!(word(&got_status[[i]]) as i64, bits, "status of {i}");
        let paths = ancestries(&tree);
        for c in 0..n {
            let path = paths.get(c).cloned().flatten();
            let parent = path.as_ref().filter(|path| path.len() > 1).map(|path| path[path.len() - 2]);
            let depth = path.as_ref().map_or(-1, |path| path.len() as i64 - 1);
            let siblings = |parent: usize| (parent + 1..c).filter(|&b| tree[b] == parent as i64).count() as i64;
            let rank = path.as_ref().map_or(-1, |_| parent.map_or(0, siblings));
            assert_eq!(got_parents[[i, c]], parent.map_or(-1, |p| p as i64), "parent of {i}, {c}");
            assert_eq!(got_depths[[i, c]], depth, "depth of {i}, {c}");
            assert_eq!(got_ranks[[i, c]], rank, "rank of {i}, {c}");
            assert_eq!(got_positions[[i, c]], base_values[[i]] + depth.max(0), "position of {i}, {c}");
            let seen = path.unwrap_or(vec![c]);
            for w in 0..words {
                let bits = (0..32).filter(|b| seen.contains(&(w * 32 + b))).fold(0u32, |bits, b| bits | 1 << b);
                assert_eq!(word(&got_mask[[i, c, w]]), bits, "word {w} of the mask of {i}, {c}");
            }
        }
    }
    for (t, name) in
        [(&tree_parents, "tree_parents"), (&depths, "depths"), (&positions, "positions"), (&ranks, "ranks")]
    {
        t.assert_written(name, |_| true);
    }
    mask.assert_written("mask", |_| true);
    status.assert_written("status", |_| true);
    for t in parents.iter().chain(chains.iter().flatten()).chain(&node_counts).chain([&bases]) {
        t.assert_untouched("an input");
    }
}

fn parents_of(rng: &mut Rng, batch: usize, n: usize, breaks: bool) -> Array<i64> {
    let rows: Vec<Vec<i64>> = (0..batch)
        .map(|_| {
            let mut parents = random_parents(rng, n);
            if breaks && rng.one_in(2) {
                break_some(rng, &mut parents);
            }
            parents
        })
        .collect();
    Array::new(&[batch, n], rows.concat())
}

fn maybe_counts(rng: &mut Rng, batch: usize, n: usize) -> Option<Array<i64>> {
    rng.one_in(2).then(|| random_counts(rng, batch, n))
}

fn tree_has_the_form_that_walks_to_the_root_find(backend: &Backend) {
    rounds(30, |rng| {
        let (batch, n) = (rng.size(0..=9), rng.size(1..=40));
        let parents = parents_of(rng, batch, n, true);
        let counts = maybe_counts(rng, batch, n);
        check_form(backend, rng, &Links::Parents(parents.clone()), counts.as_ref(), |i, count| {
            let tree = parents.row([i])[..count].to_vec();
            let broken = is_broken(&tree);
            (tree, broken)
        });
    });
}

fn tree_of_children_and_siblings_is_that_of_their_parents(backend: &Backend) {
    rounds(20, |rng| {
        let (batch, n) = (rng.size(1..=6), rng.size(1..=40));
        let parents = parents_of(rng, batch, n, false);
        let (first, next): (Vec<_>, Vec<_>) = (0..batch).map(|i| children_and_siblings(parents.row([i]))).unzip();
        let [first, next] = [first, next].map(|rows| Array::new(&[batch, n], rows.concat()));
        check_form(backend, rng, &Links::Chains(first, next), None, |i, _| (parents.row([i]).to_vec(), false));
    });
}

/// Links of any numbers: loops, nodes that are linked twice, and ends past the tree, of some of which the lower 32 bits name a node.
fn tree_of_broken_chains_ends_where_they_break(backend: &Backend) {
    rounds(30, |rng| {
        let (batch, n) = (rng.size(1..=6), rng.size(1..=20));
        let wild = rng.one_in(2);
        let mut links = || {
            Array::from_fn(&[batch, n], |_| match rng.size(0..=3) {
                0 => -1,
                1 if wild => {
                    rng.pick(&[i32::MAX as i64, i32::MIN as i64, n as i64, 1 << 32 | 1, (1 << 32) + n as i64 - 1])
                }
                _ => rng.int(0..=n as i64),
            })
        };
        let (first, next) = (links(), links());
        let counts = maybe_counts(rng, batch, n);
        let chains = Links::Chains(first.clone(), next.clone());
        check_form(backend, rng, &chains, counts.as_ref(), |i, count| {
            let (tree, broken) = parents_of_chains(&first.row([i])[..count], &next.row([i])[..count]);
            let lost = is_broken(&tree);
            (tree, broken || lost)
        });
    });
}

fn tree_takes_sizes_up_to_1024_nodes(backend: &Backend) {
    rounds(1, |rng| {
        for n in [1, 2, 31, 32, 33, 64, 128, 129, 1024] {
            let batch = if n > 200 { 1 } else { 3 };
            let parents = parents_of(rng, batch, n, false);
            check_form(backend, rng, &Links::Parents(parents.clone()), None, |i, _| (parents.row([i]).to_vec(), false));
        }
    });
}

// --- verification ------------------------------------------------------------------------------------------------------

/// Trees of tokens of a small vocabulary, so that drafts meet the target.
struct Drafts {
    tokens: Array<i64>,
    parents: Array<i64>,
    target: Array<i64>,
    counts: Option<Array<i64>>,
}

impl Drafts {
    fn random(rng: &mut Rng, batch: usize, n: usize) -> Drafts {
        let vocabulary = rng.pick(&[2, 3, 6]);
        // Some tokens differ in their upper half alone.
        let wide = rng.one_in(4);
        let mut token = |_: &[usize]| match rng.one_in(30) {
            true => -rng.int(1..=3),
            false => rng.int(0..=vocabulary - 1) + if wide && rng.one_in(4) { 1 << 32 } else { 0 },
        };
        let (tokens, target) = (Array::from_fn(&[batch, n], &mut token), Array::from_fn(&[batch, n], &mut token));
        let (parents, counts) = (parents_of(rng, batch, n, true), maybe_counts(rng, batch, n));
        Drafts { tokens, parents, target, counts }
    }

    /// A chain that is accepted to its end, each of whose nodes after the root has so many siblings of the same token, of which the lowest goes on.
    fn accepted(n: usize, siblings: usize) -> Drafts {
        let tokens = Array::filled(&[2, n], 5);
        let parents = Array::from_fn(&[2, n], |at| {
            let level = at[1].div_ceil(siblings);
            [-1, 0].get(level).copied().unwrap_or_else(|| ((level - 2) * siblings + 1) as i64)
        });
        Drafts { tokens: tokens.clone(), parents, target: tokens, counts: None }
    }

    /// The nodes of the walk, and whether a link is broken.
    fn walk(&self, i: usize, places: usize) -> (Vec<usize>, i64) {
        let (count, clamp) = clamped(self.counts.as_ref(), i, self.tokens.shape[1]);
        let parents = &self.parents.row([i])[..count];
        let mut path = if count > 0 { vec![0] } else { vec![] };
        while let Some(&node) = path.last().filter(|_| path.len() < places) {
            let wanted = self.target[[i, node]];
            let is_next =
                |&c: &usize| c > node && parents[c] == node as i64 && self.tokens[[i, c]] == wanted && wanted >= 0;
            let Some(next) = (0..count).find(is_next) else { break };
            path.push(next);
        }
        (path, clamp | if is_broken(parents) { VWD_TREE_BROKEN_LINK as i64 } else { 0 })
    }
}

fn check_verify(backend: &Backend, rng: &mut Rng, drafts: &Drafts, places: usize) {
    let batch = drafts.tokens.shape[0];
    let dtype = if is_wide([&drafts.tokens, &drafts.target]) { I64 } else { rng.pick(&[I32, I64]) };
    let ints = |rng: &mut Rng, dtype, values: &Array<i64>| {
        Tensor::ints(backend, dtype, values, &Layout::random(rng, values.shape.len()))
    };
    let (tokens, target) = (ints(rng, dtype, &drafts.tokens), ints(rng, dtype, &drafts.target));
    let parents = ints(rng, I32, &drafts.parents);
    let counts = drafts.counts.as_ref().map(|counts| ints(rng, I32, counts));
    let column = |rng: &mut Rng, dtype| Tensor::poisoned(backend, dtype, &[batch], &Layout::random(rng, 1));
    let row = |rng: &mut Rng, dtype| Tensor::poisoned(backend, dtype, &[batch, places], &Layout::random(rng, 2));
    let (accepted, next_token, path) = (column(rng, I32), column(rng, dtype), row(rng, I32));
    let committed = rng.one_in(2).then(|| row(rng, dtype));
    let status = rng.one_in(2).then(|| column(rng, U32));
    let given = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
    let args = vwd_verify_tree_args {
        tokens: tokens.c(),
        parents: parents.c(),
        node_counts: given(&counts),
        target: target.c(),
        accepted: accepted.c(),
        path: path.c(),
        next_token: next_token.c(),
        committed: given(&committed),
        status: given(&status),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_verify_tree(backend.session(), &args, backend.stream()) });
    let (got_accepted, got_path, got_next) = (accepted.read_ints(), path.read_ints(), next_token.read_ints());
    for i in 0..batch {
        let (walk, bits) = drafts.walk(i, places);
        let at = |j: usize| walk.get(j).copied();
        assert_eq!(got_accepted[[i]], walk.len().max(1) as i64 - 1, "accepted of {i}");
        assert_eq!(got_next[[i]], walk.last().map_or(-1, |&node| drafts.target[[i, node]]), "next_token of {i}");
        for j in 0..places {
            assert_eq!(got_path[[i, j]], at(j).map_or(-1, |node| node as i64), "path of {i}, {j}");
            if let Some(committed) = &committed {
                let token = at(j).map_or(-1, |node| drafts.target[[i, node]]);
                assert_eq!(committed.read_ints()[[i, j]], token, "committed of {i}, {j}");
            }
        }
        if let Some(status) = &status {
            assert_eq!(status.read_raw()[[i]], (bits as u32).to_le_bytes(), "status of {i}");
        }
    }
    let outputs = [&accepted, &path, &next_token].into_iter().chain(&committed).chain(&status);
    outputs.for_each(|t| t.assert_written("an output", |_| true));
    [&tokens, &target, &parents].into_iter().chain(&counts).for_each(|t| t.assert_untouched("an input"));
}

fn verify_tree_walks_to_the_token_that_the_target_says(backend: &Backend) {
    rounds(60, |rng| {
        let (batch, n) = (rng.size(0..=9), rng.size(1..=40));
        let drafts = Drafts::random(rng, batch, n);
        check_verify(backend, rng, &drafts, n);
    });
}

fn verify_tree_takes_the_first_of_equal_siblings(backend: &Backend) {
    rounds(1, |rng| {
        // Two children with the target's token, of which the second goes on.
        let row = |values: &[i64]| Array::new(&[1, 4], values.to_vec());
        let (tokens, parents) = (row(&[0, 7, 7, 8]), row(&[-1, 0, 0, 2]));
        let drafts = Drafts { tokens, parents, target: row(&[7, 5, 8, 9]), counts: None };
        assert_eq!(drafts.walk(0, 4).0, [0, 1]);
        check_verify(backend, rng, &drafts, 4);
    });
}

fn verify_tree_of_a_chain_is_verify(backend: &Backend) {
    rounds(10, |rng| {
        let (batch, n) = (rng.size(1..=9), rng.size(1..=20));
        let target = Array::from_fn(&[batch, n], |_| rng.int(0..=2));
        let draft = Array::from_fn(&[batch, n - 1], |at| match rng.one_in(4) {
            true => rng.int(-1..=2),
            false => target[[at[0], at[1]]],
        });
        let tokens = Array::from_fn(&[batch, n], |at| if at[1] == 0 { 99 } else { draft[[at[0], at[1] - 1]] });
        let parents = Array::from_fn(&[batch, n], |at| at[1] as i64 - 1);
        let expected = oracle::verify(&draft, &target, None);
        let place = |values: &Array<i64>| Tensor::ints(backend, I32, values, &Layout::default());
        let (tokens, parents, target) = (place(&tokens), place(&parents), place(&target));
        let out = |shape: &[usize]| Tensor::poisoned(backend, I32, shape, &Layout::default());
        let (accepted, path, next_token, committed) =
            (out(&[batch]), out(&[batch, n]), out(&[batch]), out(&[batch, n]));
        let args = vwd_verify_tree_args {
            tokens: tokens.c(),
            parents: parents.c(),
            target: target.c(),
            accepted: accepted.c(),
            path: path.c(),
            next_token: next_token.c(),
            committed: committed.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_verify_tree(backend.session(), &args, backend.stream()) });
        assert_eq!(accepted.read_ints().data, expected.accepted);
        assert_eq!(next_token.read_ints().data, expected.next_token);
        assert_eq!(committed.read_ints(), expected.committed);
    });
}

fn verify_tree_takes_sizes_up_to_1024_nodes(backend: &Backend) {
    rounds(1, |rng| {
        for n in [1, 2, 3, 32, 33, 34, 63, 64, 65, 128, 257, 1024] {
            let drafts = Drafts::random(rng, 3, n);
            let places = n + rng.size(0..=3);
            check_verify(backend, rng, &drafts, places);
            check_verify(backend, rng, &Drafts::accepted(n, 1), n);
        }
    });
}

/// Each kernel takes small trees.
fn verify_tree_by_each_variant_walks_alike(backend: &Backend) {
    for variant in ["warp", "cta"] {
        let forced = format!("verify_tree={variant}");
        let backend = backend.forcing(&forced, 80..=999).expect("every device takes them");
        rounds(60, |rng| {
            let (batch, n) = (rng.size(1..=9), rng.size(1..=64));
            let drafts =
                if rng.one_in(4) { Drafts::accepted(n, rng.size(1..=3)) } else { Drafts::random(rng, batch, n) };
            let places = rng.pick(&[1, 2, n, n + 40]);
            check_verify(&backend, rng, &drafts, places);
        });
        backend.assert_ran(&forced);
    }
}

/// The accepted nodes of one call are the node counts of the next, with nothing that waits between them.
fn verify_tree_reads_what_the_call_before_it_wrote(backend: &Backend) {
    rounds(1, |rng| {
        for (n, has_logits) in [(12, false), (100, false), (12, true)] {
            let (batch, plain) = (40, Layout::default());
            let drafts = Drafts { counts: None, ..Drafts::random(rng, batch, n) };
            let narrow = |values: &Array<i64>| values.map(|&x| x as i32 as i64);
            let drafts = Drafts { tokens: narrow(&drafts.tokens), target: narrow(&drafts.target), ..drafts };
            let place = |values: &Array<i64>| Tensor::ints(backend, I32, values, &plain);
            let (tokens, parents, target) = (place(&drafts.tokens), place(&drafts.parents), place(&drafts.target));
            // A row without a logit has no token.
            let rows = Array::from_fn(&[batch, n, 6], |at| match drafts.target[[at[0], at[1]]] {
                token if token == at[2] as i64 => 1.0,
                _ => f64::NEG_INFINITY,
            });
            let logits = Tensor::floats(backend, F32, &rows, &plain);
            let out = |shape: &[usize]| Tensor::poisoned(backend, I32, shape, &plain);
            let results = [0, 1].map(|_| (out(&[batch]), out(&[batch, n]), out(&[batch])));
            let mut counts = absent();
            for (accepted, path, next_token) in &results {
                let args = vwd_verify_tree_args {
                    tokens: tokens.c(),
                    parents: parents.c(),
                    node_counts: counts,
                    target: if has_logits { absent() } else { target.c() },
                    logits: if has_logits { logits.c() } else { absent() },
                    accepted: accepted.c(),
                    path: path.c(),
                    next_token: next_token.c(),
                    ..args()
                };
                // SAFETY: the tensors outlive the calls.
                assert_ok(unsafe { vwd_verify_tree(backend.session(), &args, backend.stream()) });
                counts = accepted.c();
            }
            backend.finish(0);
            let [first, second] = results.map(|(accepted, path, _)| (accepted.read_ints(), path.read_ints()));
            let drafts = Drafts { counts: Some(first.0), ..drafts };
            for i in 0..batch {
                let (walk, _) = drafts.walk(i, n);
                assert_eq!(second.0[[i]], walk.len().max(1) as i64 - 1, "accepted of {i}");
                let path = (0..n).map(|j| walk.get(j).map_or(-1, |&node| node as i64)).collect::<Vec<_>>();
                assert_eq!(second.1.row([i]), path, "path of {i}");
            }
        }
    });
}

fn verify_tree_accepts_no_more_than_the_path_holds(backend: &Backend) {
    rounds(20, |rng| {
        let (batch, n) = (rng.size(1..=5), rng.size(1..=20));
        let drafts = Drafts::random(rng, batch, n);
        let places = rng.size(1..=4);
        check_verify(backend, rng, &drafts, places);
    });
}

fn verify_tree_finds_the_largest_logit(backend: &Backend) {
    rounds(30, |rng| {
        let (batch, n) = (rng.size(1..=4), rng.size(1..=12));
        let vocabulary = if rng.one_in(8) { rng.size(4000..=9000) } else { rng.size(1..=40) };
        let parents = parents_of(rng, batch, n, false);
        let is_aligned = rng.one_in(2);
        check_logits(backend, rng, &parents, vocabulary, is_aligned);
    });
}

/// A chain that is accepted to its end, with more parts of rows than a CTA looks at at once.
fn verify_tree_finds_the_largest_logit_of_many_nodes(backend: &Backend) {
    rounds(1, |rng| check_logits(backend, rng, &Array::from_fn(&[1, 263], |at| at[1] as i64 - 1), 4100, false));
}

/// One row that is given for every node of a chain: so many that a row is one part, which each thread of a CTA goes through in several steps.
fn verify_tree_finds_the_largest_logit_of_long_rows(backend: &Backend) {
    rounds(8, |rng| {
        let (n, dtype) = (if backend.is_cuda() { 528 } else { 2 }, rng.pick(&[F32, F16, BF16]));
        let vocabulary = if dtype == F32 { 20_003 } else { 40_003 };
        let mut row = vec![-1.0; vocabulary];
        let places: Vec<usize> = (0..rng.size(1..=3)).map(|_| rng.size(0..=vocabulary - 1)).collect();
        if rng.one_in(2) {
            row[rng.size(0..=vocabulary - 1)] = f64::NAN;
        }
        places.iter().for_each(|&place| row[place] = 2.0);
        let has_nan = row.iter().any(|x| x.is_nan());
        let largest = places.iter().min().copied().expect("there is one") as i64;
        let place = |dtype, values: &Array<i64>| Tensor::ints(backend, dtype, values, &Layout::default());
        let tokens = place(I32, &Array::filled(&[1, n], largest));
        let parents = place(I32, &Array::from_fn(&[1, n], |at| at[1] as i64 - 1));
        let row = Tensor::floats(backend, dtype, &Array::new(&[1, 1, vocabulary], row), &Layout::default());
        let mut logits = row.c();
        (logits.shape[1], logits.strides[0], logits.strides[1]) = (n as i64, 0, 0);
        let out = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &Layout::default());
        let (accepted, path, next_token) = (out(I32, &[1]), out(I32, &[1, n]), out(I32, &[1]));
        let status = out(U32, &[1]);
        let args = vwd_verify_tree_args {
            tokens: tokens.c(),
            parents: parents.c(),
            logits,
            accepted: accepted.c(),
            path: path.c(),
            next_token: next_token.c(),
            status: status.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_verify_tree(backend.session(), &args, backend.stream()) });
        assert_eq!((accepted.read_ints()[[0]], next_token.read_ints()[[0]]), (n as i64 - 1, largest), "{places:?}");
        assert_eq!(status.read_raw()[[0]], if has_nan { VWD_SAMPLE_NAN } else { 0 }.to_le_bytes());
    });
}

/// Half of the nodes, and all of a chain, have their parent's target token. `is_aligned`: rows begin on 16 bytes, and larger numbers lie behind their
/// ends; some trees have fewer nodes.
fn check_logits(backend: &Backend, rng: &mut Rng, parents: &Array<i64>, vocabulary: usize, is_aligned: bool) {
    let (batch, n) = (parents.shape[0], parents.shape[1]);
    let is_chain = n > 12;
    // Rows that can be loaded by 16 bytes.
    let vocabulary = if rng.one_in(2) { vocabulary.next_multiple_of(8) } else { vocabulary };
    let extent = if is_aligned { vocabulary.next_multiple_of(8) + rng.pick(&[0, 8]) } else { vocabulary };
    let dtype = rng.pick(&[F32, F16, BF16]);
    // Whole numbers: equal largest ones are everywhere. A row of few NaN has most of its tokens compared at once.
    let nan = rng.pick(&[0, 1, 1, vocabulary * n]);
    let logits = Array::from_fn(&[batch, n, extent], |at| match rng.size(0..=19) {
        _ if at[2] >= vocabulary => 9.0,
        0 if nan == 1 => f64::NAN,
        1 => f64::NEG_INFINITY,
        2 => -0.0,
        _ if nan > 1 && rng.size(0..=nan) == 0 => f64::NAN,
        _ => rng.int(-3..=3) as f64,
    });
    // Tokens that are forbidden at every depth.
    let stops: Vec<i64> = (0..rng.pick(&[0, 0, 3, 9])).map(|_| rng.int(0..=vocabulary as i64 - 1)).collect();
    let row = |i: usize, v: usize| logits.row([i, v])[..vocabulary].to_vec();
    let best = |i: usize, v: usize| {
        let mut row = row(i, v);
        stops.iter().for_each(|&token| row[token as usize] = f64::NAN);
        let most = row.iter().copied().filter(|x| !x.is_nan()).fold(f64::NEG_INFINITY, f64::max);
        row.iter().position(|&x| x == most && most > f64::NEG_INFINITY).map_or(-1, |token| token as i64)
    };
    let target = Array::from_fn(&[batch, n], |at| best(at[0], at[1]));
    let tokens = Array::from_fn(&[batch, n], |at| match parents[[at[0], at[1]]] {
        parent if parent >= 0 && (is_chain || rng.one_in(2)) => target[[at[0], parent as usize]],
        _ => rng.int(0..=vocabulary as i64 - 1),
    });
    let counts = if is_aligned { maybe_counts(rng, batch, n) } else { None };
    let drafts = Drafts { tokens, parents: parents.clone(), target, counts };
    let place = |dtype, values: &Array<i64>| Tensor::ints(backend, dtype, values, &Layout::default());
    let (tokens, parents) = (place(I64, &drafts.tokens), place(I32, &drafts.parents));
    let counts = drafts.counts.as_ref().map(|counts| place(I32, counts));
    let layout = if is_aligned { Layout::random_aligned(rng, 3) } else { Layout::random(rng, 3) };
    let rows = Tensor::floats(backend, dtype, &logits, &layout);
    let mut given_rows = rows.c();
    given_rows.shape[2] = vocabulary as i64;
    let out = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &Layout::default());
    let (accepted, path, next_token) = (out(I32, &[batch]), out(I32, &[batch, n]), out(I64, &[batch]));
    let status = out(U32, &[batch]);
    let stop = place(I64, &Array::new(&[stops.len()], stops.clone()));
    let min_remaining = place(I32, &Array::filled(&[batch], n as i64));
    let given = |tensor: &Tensor| if stops.is_empty() { absent() } else { tensor.c() };
    let args = vwd_verify_tree_args {
        stop: given(&stop),
        min_remaining: given(&min_remaining),
        tokens: tokens.c(),
        parents: parents.c(),
        node_counts: counts.as_ref().map_or(absent(), Tensor::c),
        status: status.c(),
        logits: given_rows,
        accepted: accepted.c(),
        path: path.c(),
        next_token: next_token.c(),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_verify_tree(backend.session(), &args, backend.stream()) });
    for i in 0..batch {
        let (walk, of_form) = drafts.walk(i, n);
        let next = walk.last().map_or(-1, |&last| drafts.target[[i, last]]);
        let has_nan = walk.iter().any(|&node| row(i, node).iter().any(|x| x.is_nan()));
        let none = if next < 0 && !walk.is_empty() { VWD_TREE_NO_TOKEN } else { 0 };
        let bits = of_form as u32 | none | if has_nan { VWD_SAMPLE_NAN } else { 0 };
        assert_eq!(status.read_raw()[[i]], bits.to_le_bytes(), "status of {i}");
        assert_eq!(accepted.read_ints()[[i]], walk.len().max(1) as i64 - 1);
        assert_eq!(next_token.read_ints()[[i]], next);
        let path = &path.read_ints().row([i])[..walk.len()].to_vec();
        assert_eq!(*path, walk.iter().map(|&node| node as i64).collect::<Vec<_>>());
    }
}
