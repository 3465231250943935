//! vwd_verify_tree where stop tokens and lengths cut what is committed: against the call without them, cut by a loop over single tokens. What
//! min_remaining forbids is dropped from the logits of that call.

use crate::Case;
use crate::support::oracle::End;
use crate::support::trees::*;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![verify_tree_cuts_at_stops_and_lengths, verify_tree_cuts_long_paths];

fn verify_tree_cuts_at_stops_and_lengths(backend: &Backend) {
    rounds(backend.times(200) as u64, |rng| {
        let (batch, n, dtype, has_logits) = (rng.size(0..=9), rng.size(1..=40), rng.pick(&[I32, I64]), rng.one_in(2));
        check(backend, rng, [batch, n], dtype, has_logits, Layout::random);
    });
}

fn verify_tree_cuts_long_paths(backend: &Backend) {
    rounds(1, |rng| {
        for (n, dtype) in [(64, I32), (64, I64), (300, I32), (300, I64)] {
            check(backend, rng, [2, n], dtype, false, |_, _| Layout::default());
        }
        check(backend, rng, [2, 1024], I32, true, |_, _| Layout::default());
    });
}

fn check(
    backend: &Backend,
    rng: &mut Rng,
    [batch, n]: [usize; 2],
    dtype: DType,
    has_logits: bool,
    layout: fn(&mut Rng, usize) -> Layout,
) {
    // Of few tokens, so that walks are long.
    let tokens = Array::from_fn(&[batch, n], |_| if rng.one_in(20) { -1 } else { rng.int(0..=1) });
    let parents: Vec<i64> = (0..batch)
        .flat_map(|_| {
            let mut parents = random_parents(rng, n);
            if rng.one_in(3) {
                break_some(rng, &mut parents);
            }
            parents
        })
        .collect();
    let places = rng.pick(&[1, 3, n, n + 2]);
    let ints = |rng: &mut Rng, dtype, values: &Array<i64>| {
        Tensor::ints(backend, dtype, values, &layout(rng, values.shape.len()))
    };
    let column = |values: &[i64]| Array::new(&[values.len()], values.to_vec());
    // A node without a logit has no token.
    let logits =
        Array::from_fn(&[batch, n, 3], |_| if rng.one_in(4) { f64::NEG_INFINITY } else { rng.int(0..=3) as f64 });
    let target = Array::from_fn(&[batch, n], |_| rng.int(0..=1));
    let (target, tokens) = (ints(rng, dtype, &target), ints(rng, dtype, &tokens));
    let parents_of = |i: usize| &parents[i * n..(i + 1) * n];
    let depths: Vec<Vec<Option<usize>>> = (0..batch)
        .map(|i| ancestries(parents_of(i)).iter().map(|path| path.as_ref().map(|path| path.len() - 1)).collect())
        .collect();
    let parents = ints(rng, I32, &Array::new(&[batch, n], parents));
    let counts: Vec<i64> = (0..batch).map(|_| if rng.one_in(5) { rng.int(-1..=1) } else { n as i64 }).collect();
    let counts = ints(rng, I32, &column(&counts));

    // Walks that sample end as greedy ones do.
    let walk =
        if has_logits { rng.pick(&[VWD_WALK_GREEDY, VWD_WALK_COUPLED, VWD_WALK_INDEPENDENT]) } else { VWD_WALK_GREEDY };
    let seeds: Vec<i64> = (0..batch).map(|_| rng.int(0..=1 << 40)).collect();
    let (seeds, positions) = (ints(rng, I64, &column(&seeds)), ints(rng, I32, &column(&vec![7; batch])));

    let stops = if rng.one_in(2) { vec![] } else { (0..rng.size(0..=3)).map(|_| rng.int(-1..=5)).collect() };
    let most: Option<Vec<i64>> = rng.one_in(2).then(|| (0..batch).map(|_| rng.int(-1..=places as i64 + 1)).collect());
    let least: Option<Vec<i64>> = rng.one_in(2).then(|| (0..batch).map(|_| rng.int(-1..=4)).collect());
    let ignored: Option<Vec<i64>> = rng.one_in(3).then(|| (0..batch).map(|_| rng.int(0..=1)).collect());
    let end = |i: usize| End {
        stop: if ignored.as_ref().is_some_and(|ignored| ignored[i] != 0) { vec![] } else { stops.clone() },
        remaining: most.as_ref().map(|most| most[i]),
        min_remaining: least.as_ref().map_or(0, |least| least[i]),
    };
    let allowed = Array::from_fn(&[batch, n, 3], |at| {
        let end = end(at[0]);
        let is_early = depths[at[0]][at[1]].is_some_and(|depth| (depth as i64) < end.min_remaining);
        if is_early && end.stop.contains(&(at[2] as i64)) { f64::NEG_INFINITY } else { logits[[at[0], at[1], at[2]]] }
    });
    let [logits, allowed] = [logits, allowed].map(|rows| Tensor::floats(backend, F32, &rows, &layout(rng, 3)));
    let ignore_stop = ignored.as_ref().map(|ignored| ints(rng, U8, &column(ignored)));
    let stop = ints(rng, I64, &column(&stops));
    let remaining = most.as_ref().map(|most| ints(rng, I32, &column(most)));
    let min_remaining = least.as_ref().map(|least| ints(rng, I32, &column(least)));

    let results = [0, 1].map(|_| {
        let mut out = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &layout(rng, shape.len()));
        (out(I32, &[batch]), out(I32, &[batch, places]), out(dtype, &[batch]), out(dtype, &[batch, places]))
    });
    let (committed_len, finish) = (
        Tensor::poisoned(backend, I32, &[batch], &layout(rng, 1)),
        Tensor::poisoned(backend, U8, &[batch], &layout(rng, 1)),
    );
    let given = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
    for (cuts, (accepted, path, next_token, committed)) in [false, true].into_iter().zip(&results) {
        let whole = vwd_verify_tree_args {
            tokens: tokens.c(),
            parents: parents.c(),
            node_counts: counts.c(),
            target: if has_logits { absent() } else { target.c() },
            logits: if has_logits { allowed.c() } else { absent() },
            accepted: accepted.c(),
            path: path.c(),
            next_token: next_token.c(),
            committed: committed.c(),
            walk,
            seeds: seeds.c(),
            positions: positions.c(),
            ..args()
        };
        let args = match cuts {
            false => whole,
            true => vwd_verify_tree_args {
                logits: if has_logits { logits.c() } else { absent() },
                stop: stop.c(),
                ignore_stop: given(&ignore_stop),
                remaining: given(&remaining),
                min_remaining: given(&min_remaining),
                committed_len: committed_len.c(),
                finish: finish.c(),
                ..whole
            },
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_verify_tree(backend.session(), &args, backend.stream()) });
    }
    let [whole, cut] = results.map(|(accepted, path, next_token, committed)| {
        accepted.assert_written("accepted", |_| true);
        (accepted.read_ints(), path.read_ints(), next_token.read_ints(), committed.read_ints())
    });
    let (committed_len, finish) = (committed_len.read_ints(), finish.read_ints());
    for i in 0..batch {
        let (k, next) = (whole.0[[i]] as usize, whole.2[[i]]);
        let is_tree = whole.1[[i, 0]] >= 0;
        let all = if is_tree { k + (!has_logits || next >= 0) as usize } else { 0 };
        let end = end(i);
        let (n, reason) = end.cut(&whole.3.row([i])[..all]);
        let nodes = if end.remaining.is_none_or(|most| most > 0) { k.min(n) + 1 } else { 0 };
        assert_eq!((committed_len[[i]], finish[[i]]), (n as i64, reason), "committed_len and finish of {i}");
        assert_eq!(cut.0[[i]], k.min(n) as i64, "accepted of {i}");
        assert_eq!(cut.2[[i]], if n > k { next } else { -1 }, "next_token of {i}");
        for j in 0..places {
            assert_eq!(cut.1[[i, j]], if j < nodes { whole.1[[i, j]] } else { -1 }, "path of {i}, {j}");
            assert_eq!(cut.3[[i, j]], if j < n { whole.3[[i, j]] } else { -1 }, "committed of {i}, {j}");
        }
    }
}
