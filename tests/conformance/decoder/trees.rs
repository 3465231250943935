//! Draft trees in steps of the decoder: verified densely they give the text of dense attention, and leave the summaries of that text.

use super::drafts::{Decoding, Model, Part, VOCABULARY};
use super::*;
use crate::compact::Compactor;
use crate::support::trees::{ancestries, random_parents};

pub const CASES: &[Case] = cases![decoder_gives_the_text_of_dense_attention_from_verified_trees];

/// Nodes of a tree, and tokens of the text after the trees that are drafted sparsely.
const NODES: usize = 8;
const SPARSE: usize = 12;

/// What `vwd_verify_tree` says of each row, and the accepted rows moved: the tokens committed.
fn commit(
    backend: &Backend,
    own: &Decoding,
    bases: &[usize],
    parents: &[Vec<i64>],
    tokens: &[Vec<usize>],
    target: &[Vec<usize>],
) -> Vec<Vec<usize>> {
    let (rows, layout) = (tokens.len(), Layout::default());
    let padded = |of: &dyn Fn(usize, usize) -> i64| {
        Tensor::ints(backend, I32, &Array::from_fn(&[rows, NODES], |at| of(at[0], at[1])), &layout)
    };
    let at = |of: &[Vec<usize>], i: usize, n: usize| of[i].get(n).map_or(-1, |&t| t as i64);
    let parents = padded(&|i, n| parents[i].get(n).copied().unwrap_or(-1));
    let (drafts, target) = (padded(&|i, n| at(tokens, i, n)), padded(&|i, n| at(target, i, n)));
    let counts = ints(backend, &tokens.iter().map(|row| row.len() as i64).collect::<Vec<_>>());
    let bases = ints(backend, &bases.iter().map(|&base| base as i64).collect::<Vec<_>>());
    let [accepted, next] = [0; 2].map(|_| Tensor::poisoned(backend, I32, &[rows], &layout));
    let [path, committed] = [0; 2].map(|_| Tensor::poisoned(backend, I32, &[rows, NODES], &layout));
    let verify = vwd_verify_tree_args {
        tokens: drafts.c(),
        parents: parents.c(),
        node_counts: counts.c(),
        target: target.c(),
        accepted: accepted.c(),
        path: path.c(),
        next_token: next.c(),
        committed: committed.c(),
        ..args()
    };
    // SAFETY: the arguments are valid.
    backend.finish(unsafe { vwd_verify_tree(backend.session(), &verify, backend.stream()) });
    let caches: Vec<vwd_tensor> = own.caches.iter().flatten().map(Tensor::c).collect();
    let compactor = Compactor::new(backend, &caches);
    let compact = vwd_compact_args {
        page_table: own.table.c(),
        bases: bases.c(),
        path: path.c(),
        accepted: accepted.c(),
        ..args()
    };
    // SAFETY: as above.
    backend.finish(unsafe { vwd_compact(compactor.0, &compact, backend.stream()) });
    let (accepted, committed) = (accepted.read_ints(), committed.read_ints());
    let count = |i: usize| if tokens[i].is_empty() { 0 } else { accepted[[i]] as usize + 1 };
    (0..rows).map(|i| (0..count(i)).map(|n| committed[[i, n]] as usize).collect()).collect()
}

fn decoder_gives_the_text_of_dense_attention_from_verified_trees(backend: &Backend) {
    rounds(1, |rng| {
        let shape = Shape {
            heads: [4, 2],
            dim: 16,
            value_dim: 16,
            dtype: F32,
            page: 8,
            block: 8,
            pages: 3 * 40,
            max_pages: 40,
            rows: 3,
            positions: NODES,
        };
        let model = Model::new(rng, shape);
        let wanted = backend.times(150);
        let prompts: Vec<Vec<usize>> =
            (0..3).map(|i| (0..5 + 20 * i).map(|_| rng.size(0..=VOCABULARY - 1)).collect()).collect();
        let dense = Decoding::new(backend, &model);
        let expected = dense.dense_texts(&prompts, wanted + 2 * NODES);

        let own = Decoding::new(backend, &model);
        let mut texts: Vec<Vec<usize>> = own.prefill(&prompts).into_iter().map(|t| vec![t]).collect();
        let bases =
            |texts: &[Vec<usize>]| -> Vec<usize> { (0..3).map(|i| prompts[i].len() + texts[i].len() - 1).collect() };
        let mut since: Vec<i64> = bases(&texts).iter().map(|&base| base as i64).collect();
        let mut moved = 0;
        while texts.iter().any(|text| text.len() < wanted) {
            let base = bases(&texts);
            let parents: Vec<Vec<i64>> = texts
                .iter()
                .map(|text| {
                    let count = if text.len() < wanted { rng.size(1..=NODES) } else { 0 };
                    random_parents(rng, count)
                })
                .collect();
            let paths: Vec<Vec<Vec<usize>>> = parents
                .iter()
                .map(|parents| ancestries(parents).into_iter().map(|path| path.expect("a sound tree")).collect())
                .collect();
            let tokens: Vec<Vec<usize>> = (0..3)
                .map(|i| {
                    let of_node = |(n, path): (usize, &Vec<usize>)| match n {
                        0 => *texts[i].last().unwrap(),
                        _ if rng.one_in(3) => rng.size(0..=VOCABULARY - 1),
                        _ => expected[i][texts[i].len() - 1 + path.len() - 1],
                    };
                    paths[i].iter().enumerate().map(of_node).collect()
                })
                .collect();
            let mode = |tokens: &Vec<usize>| if tokens.is_empty() { VWD_DECODER_SKIP } else { VWD_DECODER_DENSE };
            let part = Part {
                modes: &tokens.iter().map(mode).collect::<Vec<_>>(),
                begin: &base,
                tokens: &tokens,
                paths: Some(&paths),
                since: Some(&since),
            };
            let target = own.step(&part);
            for i in (0..3).filter(|&i| !tokens[i].is_empty()) {
                since[i] = base[i] as i64;
            }
            let committed = commit(backend, &own, &base, &parents, &tokens, &target);
            moved += committed.iter().filter(|committed| committed.len() > 2).count();
            texts.iter_mut().zip(committed).for_each(|(text, committed)| text.extend(committed));
        }
        assert!(moved > 0, "no path of two nodes was accepted, so that nothing was tested");
        for (i, (text, expected)) in texts.iter().zip(&expected).enumerate() {
            assert_eq!(text[..], expected[..text.len()], "sequence {i}");
        }
        // Lists follow from summaries: those of the tokens that were moved, and of tokens that were written one by one.
        let mut since = Some(since);
        for n in 0..SPARSE {
            let begin = bases(&texts);
            let last: Vec<_> = texts.iter().map(|text| vec![*text.last().unwrap()]).collect();
            let part = Part {
                modes: &[VWD_DECODER_SPARSE; 3],
                begin: &begin,
                tokens: &last,
                paths: None,
                since: since.as_deref(),
            };
            let (found, wanted) = (own.hidden(&part), dense.hidden(&Part { since: None, ..part }));
            for (found, wanted) in found.iter().flatten().flatten().zip(wanted.iter().flatten().flatten()) {
                assert!((found - wanted).abs() < 1e-3, "sparse step {n}: {found}, not {wanted}");
            }
            let next = own.following(&found, &part);
            since = None;
            texts.iter_mut().zip(next).for_each(|(text, next)| text.extend(next));
        }
    });
}
