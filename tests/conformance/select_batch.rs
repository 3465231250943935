//! Every method of selection over one ragged batch, of one query position and of several: the same bits for each sequence
//! alone, and nothing worse than skipped entries when tables, channels and lists name nothing.

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![select_survives_hostile_tables_channels_and_lists];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] = cases![
    select_bits_do_not_depend_on_threads_or_on_the_batch,
    index_and_select_need_less_than_48_kib_of_the_callers_stack,
];

/// Sequences, one page each, and what the contents of device-side inputs are.
struct Scene {
    lists: Lists,
    /// [B, T, Hk, D], and [B, Hq, D] or [B, Q, Hq, D]
    keys: Array<f64>,
    queries: Array<f64>,
    lens: Array<i64>,
    /// Query positions of each sequence.
    rows: Array<i64>,
    /// Of the summaries, [B, pages]; one page holds ROWS of them.
    table: Array<i64>,
    channels: Array<i64>,
    candidates: oracle::List,
}

/// What has a list of its own.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Lists {
    /// A sequence, which has one position.
    Sequence,
    /// A sequence, whose positions share it.
    Shared,
    /// A position.
    Own,
}

const ROWS: usize = 50;
const BLOCK: usize = 4;
const CAP: usize = 40;
const POSITIONS: usize = 3;

impl Scene {
    fn random(rng: &mut Rng, lists: Lists, dim: usize) -> Scene {
        let (batch, tokens, heads, pages) = (3, 700, 2, 700 / ROWS);
        let list = |rng: &mut Rng| rng.subset(tokens / BLOCK, CAP).into_iter().map(|id| id as i64).collect::<Vec<_>>();
        let positions: &[usize] = if lists == Lists::Sequence { &[] } else { &[POSITIONS] };
        let lead = [&[batch][..], if lists == Lists::Own { positions } else { &[] }, &[heads][..]].concat();
        let count = lead.iter().product();
        Scene {
            lists,
            keys: rng.normals(&[batch, tokens, heads, dim]),
            queries: rng.normals(&[&[batch][..], positions, &[heads * 3, dim][..]].concat()),
            lens: Array::from_fn(&[batch], |_| rng.int(0..=tokens as i64)),
            rows: Array::from_fn(&[batch], |_| rng.int(0..=positions.iter().product::<usize>() as i64)),
            table: Array::from_fn(&[batch, pages], |at| (at[0] * pages + at[1]) as i64),
            channels: Array::from_fn(&[heads, 16], |at| 2 * at[1] as i64),
            candidates: oracle::List {
                ids: Array::new(&[&lead[..], &[CAP]].concat(), (0..count).flat_map(|_| list(rng)).collect()),
                counts: Array::filled(&lead, CAP as i64),
            },
        }
    }

    /// Sequence `i` alone.
    fn alone(&self, i: usize) -> Scene {
        fn take<T: Clone>(a: &Array<T>, i: usize) -> Array<T> {
            Array::new(&[&[1], &a.shape[1..]].concat(), a.row([i]).to_vec())
        }
        Scene {
            lists: self.lists,
            keys: take(&self.keys, i),
            queries: take(&self.queries, i),
            lens: take(&self.lens, i),
            rows: take(&self.rows, i),
            table: take(&self.table, i),
            channels: self.channels.clone(),
            candidates: oracle::List { ids: take(&self.candidates.ids, i), counts: take(&self.candidates.counts, i) },
        }
    }

    /// Tokens that list `n`, of those of every KV head in the order of their counts, is for.
    fn seen(&self, n: usize) -> i64 {
        let heads = self.keys.shape[2];
        let per_sequence = if self.lists == Lists::Own { POSITIONS } else { 1 };
        let (i, r) = (n / (heads * per_sequence), (n / heads % per_sequence) as i64);
        let len = self.lens[[i]].max(0);
        let most = if self.lists == Lists::Sequence { 1 } else { POSITIONS as i64 };
        let rows = self.rows[[i]].clamp(0, most);
        match self.lists {
            Lists::Own if r < rows => (len - rows + r + 1).max(0),
            Lists::Sequence | Lists::Shared if rows > 0 => len,
            _ => 0,
        }
    }

    /// Ids, counts and scores of every method of vwd_select_blocks, then of vwd_select_tokens.
    fn select(&self, backend: &Backend) -> Vec<[Array<Vec<u8>>; 3]> {
        self.select_within(backend, |call| call())
    }

    /// The same, each call made by `within`.
    fn select_within(&self, backend: &Backend, within: impl Fn(&mut dyn FnMut())) -> Vec<[Array<Vec<u8>>; 3]> {
        let plain = Layout::default();
        let floats = |a: &Array<f64>| Tensor::floats(backend, F32, a, &plain);
        let ints = |a: &Array<i64>| Tensor::ints(backend, I32, a, &plain);
        let &[_, tokens, heads, dim] = &self.keys.shape[..] else { unreachable!() };
        let (k, q, lens, rows) = (floats(&self.keys), floats(&self.queries), ints(&self.lens), ints(&self.rows));
        let of_each_group = self.queries.data.chunks(3 * dim).flat_map(|group| group[..dim].to_vec()).collect();
        let shape = [&self.queries.shape[..self.queries.shape.len() - 2], &[heads, dim]].concat();
        let forecast = floats(&Array::new(&shape, of_each_group));
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
            within(&mut || backend.finish(unsafe { vwd_index_update(backend.session(), &args, backend.stream()) }));
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
            let lead = &self.candidates.counts.shape[..];
            let (ids, counts) = (zeros(&[lead, &[CAP]].concat()), zeros(lead));
            let most = if method.is_some() { tokens / BLOCK } else { CAP };
            let scores = floats(&Array::filled(&[lead, &[most]].concat(), 0.0));
            let selected = vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() };
            let (k, block_size, q_lens, seq_lens) = (30, BLOCK as u32, rows.c(), lens.c());
            // SAFETY: the tensors are valid.
            let call = || unsafe {
                match method {
                    Some((method, index, candidates, q)) => {
                        let (q, scores) = (q.c(), scores.c());
                        let forced = vwd_select_blocks_args { init_blocks: 1, local_blocks: 2, ..args() };
                        let args = vwd_select_blocks_args {
                            method,
                            block_size,
                            k,
                            q,
                            q_lens,
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
                            q_lens,
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
            };
            within(&mut || backend.finish(call()));
            // The lists, as the contract promises them whatever the inputs hold.
            let (list, count) = (ids.read_ints(), counts.read_ints());
            for (number, (list, &count)) in list.data.chunks(CAP).zip(&count.data).enumerate() {
                let seen = self.seen(number);
                let n = if method.is_some() { (seen as usize).div_ceil(BLOCK) as i64 } else { seen };
                let list = &list[..count as usize];
                assert!(list.is_sorted_by(|a, b| a < b) && list.iter().all(|id| (0..n).contains(id)), "{list:?}");
                assert!(method.is_none() || list.len() as i64 == n.min(30), "{} of {n} blocks", list.len());
            }
            [ids.read_raw(), counts.read_raw(), scores.read_raw()]
        };
        methods.into_iter().map(run).collect()
    }
}

fn select_bits_do_not_depend_on_threads_or_on_the_batch(_: &Backend) {
    let backends = [1, 2, 5].map(Backend::cpu);
    for lists in [Lists::Sequence, Lists::Shared, Lists::Own] {
        rounds(3, |rng| {
            let scene = Scene::random(rng, lists, 32);
            let together = scene.select(&backends[0]);
            assert!(together == scene.select(&backends[1]), "{lists:?}, 2 threads");
            assert!(together == scene.select(&backends[2]), "{lists:?}, 5 threads");
            for i in 0..3 {
                for (alone, together) in scene.alone(i).select(&backends[1]).iter().zip(&together) {
                    for (alone, together) in alone.iter().zip(together) {
                        assert_eq!(alone.row([0]), together.row([i]), "{lists:?}, sequence {i} alone");
                    }
                }
            }
        });
    }
}

fn select_survives_hostile_tables_channels_and_lists(backend: &Backend) {
    for lists in [Lists::Sequence, Lists::Shared, Lists::Own] {
        rounds(6, |rng| {
            let mut scene = Scene::random(rng, lists, 32);
            let wrong = [-1, 42, 10_000, i32::MAX as i64, i32::MIN as i64];
            let mut spoil = |a: &mut Array<i64>| *a = a.map(|&x| if rng.one_in(3) { rng.pick(&wrong) } else { x });
            spoil(&mut scene.table);
            spoil(&mut scene.channels);
            spoil(&mut scene.lens);
            spoil(&mut scene.rows);
            // Not even ascending any more.
            spoil(&mut scene.candidates.ids);
            spoil(&mut scene.candidates.counts);
            scene.select(backend);
        });
    }
}

/// The largest heads, on a session whose work the caller does.
fn index_and_select_need_less_than_48_kib_of_the_callers_stack(_: &Backend) {
    let backend = Backend::cpu(1);
    let measured = |call: &mut dyn FnMut()| {
        let used = stack_of(call);
        assert!(used < STACK, "a call used {used} bytes");
    };
    for lists in [Lists::Sequence, Lists::Shared, Lists::Own] {
        Scene::random(&mut Rng::new(13), lists, 576).select_within(&backend, measured);
    }
    let sample = |heads| Tensor::poisoned(&backend, BF16, &[4, heads, 576], &Layout::default());
    let (q, k) = (sample(6), sample(2));
    let channels = Tensor::poisoned(&backend, I32, &[2, 16], &Layout::default());
    let call = vwd_channel_importance_args { q: q.c(), k: k.c(), channels: channels.c(), ..args() };
    // SAFETY: the tensors are valid.
    measured(&mut || backend.finish(unsafe { vwd_channel_importance(backend.session(), &call, backend.stream()) }));
}
