//! Every method of selection over one ragged batch: the same bits for each sequence alone, and nothing worse than skipped
//! entries when tables, channels and lists name nothing.

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![select_survives_hostile_tables_channels_and_lists];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] = cases![select_bits_do_not_depend_on_threads_or_on_the_batch];

/// Sequences, one page each, and what the contents of device-side inputs are.
struct Scene {
    /// [B, T, Hk, D] and [B, Hq, D]
    keys: Array<f64>,
    queries: Array<f64>,
    lens: Array<i64>,
    /// Of the summaries, [B, pages]; one page holds ROWS of them.
    table: Array<i64>,
    channels: Array<i64>,
    candidates: oracle::List,
}

const ROWS: usize = 50;
const BLOCK: usize = 4;
const CAP: usize = 40;

impl Scene {
    fn random(rng: &mut Rng) -> Scene {
        let (batch, tokens, heads, dim, pages) = (3, 700, 2, 32, 700 / ROWS);
        let list = |rng: &mut Rng| rng.subset(tokens / BLOCK, CAP).into_iter().map(|id| id as i64).collect::<Vec<_>>();
        Scene {
            keys: rng.normals(&[batch, tokens, heads, dim]),
            queries: rng.normals(&[batch, heads * 3, dim]),
            lens: Array::from_fn(&[batch], |_| rng.int(0..=tokens as i64)),
            table: Array::from_fn(&[batch, pages], |at| (at[0] * pages + at[1]) as i64),
            channels: Array::from_fn(&[heads, 16], |at| 2 * at[1] as i64),
            candidates: oracle::List {
                ids: Array::new(&[batch, heads, CAP], (0..batch * heads).flat_map(|_| list(rng)).collect()),
                counts: Array::filled(&[batch, heads], CAP as i64),
            },
        }
    }

    /// Sequence `i` alone.
    fn alone(&self, i: usize) -> Scene {
        fn take<T: Clone>(a: &Array<T>, i: usize) -> Array<T> {
            Array::new(&[&[1], &a.shape[1..]].concat(), a.row([i]).to_vec())
        }
        Scene {
            keys: take(&self.keys, i),
            queries: take(&self.queries, i),
            lens: take(&self.lens, i),
            table: take(&self.table, i),
            channels: self.channels.clone(),
            candidates: oracle::List { ids: take(&self.candidates.ids, i), counts: take(&self.candidates.counts, i) },
        }
    }

    /// Ids, counts and scores of every method of vwd_select_blocks, then of vwd_select_tokens.
    fn select(&self, backend: &Backend) -> Vec<[Array<Vec<u8>>; 3]> {
        let plain = Layout::default();
        let floats = |a: &Array<f64>| Tensor::floats(backend, F32, a, &plain);
        let ints = |a: &Array<i64>| Tensor::ints(backend, I32, a, &plain);
        let &[batch, tokens, heads, dim] = &self.keys.shape[..] else { unreachable!() };
        let (k, q, lens) = (floats(&self.keys), floats(&self.queries), ints(&self.lens));
        let forecast = Tensor::floats(
            backend,
            F32,
            &Array::new(
                &[batch, heads, dim],
                self.queries.data.chunks(3 * dim).flat_map(|group| group[..dim].to_vec()).collect(),
            ),
            &plain,
        );
        let (table, channels) = (ints(&self.table), ints(&self.channels));
        let (ids, counts) = (ints(&self.candidates.ids), ints(&self.candidates.counts));
        // Zeros where a hostile table leaves a summary out.
        let pages = 3 * tokens / ROWS;
        let zeros = |dtype: DType, last: &[usize]| {
            let shape = [&[pages, ROWS, heads], last].concat();
            Tensor::raw(backend, dtype, &shape, &vec![0; shape.iter().product::<usize>() * dtype.bytes()], &plain)
        };
        let (max, min, means) = (zeros(F32, &[dim]), zeros(F32, &[dim]), zeros(F32, &[dim]));
        let (codes, label_scale, label_min) = (zeros(U8, &[8]), zeros(F16, &[]), zeros(F16, &[]));
        let none = vwd_index { table: table.c(), ..args() };
        let (kind, block_size) = (VWD_INDEX_MINMAX, BLOCK as u32);
        let minmax = vwd_index { kind, block_size, key_max: max.c(), key_min: min.c(), ..none };
        let mean = vwd_index { kind: VWD_INDEX_MEAN, window: 8, stride: 4, means: means.c(), ..none };
        let label = vwd_index {
            kind: VWD_INDEX_LABEL,
            labels: codes.c(),
            label_scale: label_scale.c(),
            label_min: label_min.c(),
            channels: channels.c(),
            ..none
        };
        for index in [minmax, mean, label] {
            let args = vwd_index_update_args { k: k.c(), seq_lens: lens.c(), index: kept(index), ..args() };
            // SAFETY: the tensors are valid.
            backend.finish(unsafe { vwd_index_update(backend.session(), &args, backend.stream()) });
        }
        let candidates = vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() };
        let none = vwd_block_list { ids: absent(), counts: absent(), slots: absent() };
        let methods = [
            Some((VWD_SELECT_MINMAX, minmax, none, &q)),
            Some((VWD_SELECT_MEAN_SOFTMAX, mean, none, &q)),
            Some((VWD_SELECT_MEAN_DOT, mean, none, &forecast)),
            Some((VWD_SELECT_LABEL_MASS, label, candidates, &q)),
            None,
        ];
        let run = |method: Option<(u32, vwd_index, vwd_block_list, &Tensor)>| {
            let zeros = |shape: &[usize]| Tensor::ints(backend, I32, &Array::filled(shape, 0), &plain);
            let (ids, counts) = (zeros(&[batch, heads, CAP]), zeros(&[batch, heads]));
            let most = if method.is_some() { tokens / BLOCK } else { CAP };
            let scores = floats(&Array::filled(&[batch, heads, most], 0.0));
            let selected = vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() };
            let (k, block_size, seq_lens) = (30, BLOCK as u32, lens.c());
            // SAFETY: the tensors are valid.
            backend.finish(unsafe {
                match method {
                    Some((method, index, candidates, q)) => {
                        let (q, scores) = (q.c(), scores.c());
                        let forced = vwd_select_blocks_args { init_blocks: 1, local_blocks: 2, ..args() };
                        let args = vwd_select_blocks_args {
                            method,
                            block_size,
                            k,
                            q,
                            index: kept(index),
                            seq_lens,
                            candidates,
                            selected,
                            scores,
                            ..forced
                        };
                        vwd_select_blocks(backend.session(), &args, backend.stream())
                    }
                    None => {
                        let (q, scores, index) = (q.c(), scores.c(), label);
                        let forced = vwd_select_tokens_args { init_tokens: 1, local_tokens: 2, ..args() };
                        let args = vwd_select_tokens_args {
                            block_size,
                            k,
                            q,
                            index: kept(index),
                            seq_lens,
                            candidates,
                            selected,
                            scores,
                            ..forced
                        };
                        vwd_select_tokens(backend.session(), &args, backend.stream())
                    }
                }
            });
            // The lists, as the contract promises them whatever the inputs hold.
            let (list, count) = (ids.read_ints(), counts.read_ints());
            for i in 0..batch {
                let len = self.lens[[i]].max(0);
                let n = if method.is_some() { (len as usize).div_ceil(BLOCK) as i64 } else { len };
                for g in 0..heads {
                    let list = &list.row([i, g])[..count[[i, g]] as usize];
                    assert!(list.is_sorted_by(|a, b| a < b) && list.iter().all(|id| (0..n).contains(id)), "{list:?}");
                    assert!(method.is_none() || list.len() as i64 == n.min(30), "{} of {n} blocks", list.len());
                }
            }
            [ids.read_raw(), counts.read_raw(), scores.read_raw()]
        };
        methods.into_iter().map(run).collect()
    }
}

fn select_bits_do_not_depend_on_threads_or_on_the_batch(_: &Backend) {
    let backends = [1, 2, 5].map(Backend::cpu);
    rounds(3, |rng| {
        let scene = Scene::random(rng);
        let together = scene.select(&backends[0]);
        assert!(together == scene.select(&backends[1]), "2 threads");
        assert!(together == scene.select(&backends[2]), "5 threads");
        for i in 0..3 {
            for (alone, together) in scene.alone(i).select(&backends[1]).iter().zip(&together) {
                for (alone, together) in alone.iter().zip(together) {
                    assert_eq!(alone.row([0]), together.row([i]), "sequence {i} alone");
                }
            }
        }
    });
}

fn select_survives_hostile_tables_channels_and_lists(backend: &Backend) {
    rounds(6, |rng| {
        let mut scene = Scene::random(rng);
        let wrong = [-1, 42, 10_000, i32::MAX as i64, i32::MIN as i64];
        let mut spoil = |a: &mut Array<i64>| *a = a.map(|&x| if rng.one_in(3) { rng.pick(&wrong) } else { x });
        spoil(&mut scene.table);
        spoil(&mut scene.channels);
        spoil(&mut scene.lens);
        // Not even ascending any more.
        spoil(&mut scene.candidates.ids);
        spoil(&mut scene.candidates.counts);
        scene.select(backend);
    });
}
