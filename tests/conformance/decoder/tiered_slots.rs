//! The slots of a list that is read while the next one gets its own, in a cache that has no more than both take.
//!
//! Keys tell groups of blocks apart, and each step's query selects a whole group, the next step's another one. So ASYNC_TLS attends what was
//! selected before while all blocks of the new list but the forced ones take slots. It sees keys that its query knows nothing of: its result is the
//! mean of their values.

use super::plain::{BLOCK, DIM, Vector};
use super::tiered::{Cache, Sizes, create_on};
use super::*;

pub const CASES: &[Case] = cases![decoder_on_a_cache_keeps_the_slots_of_the_list_that_it_reads];

/// Blocks of a group, and groups; block 0 is in none of them, nor are those after the last group.
const GROUP: usize = 8;
const GROUPS: usize = 9;
/// A group, the first block and the newest one.
const K: usize = GROUP + 2;
const PROMPT: usize = 1 + GROUP * GROUPS;
const STEPS: usize = 40;
const MAX_BLOCKS: usize = PROMPT + STEPS / BLOCK + 1;

/// The block's group, if it has one.
fn group(block: usize) -> Option<usize> {
    (1..PROMPT).contains(&block).then(|| (block - 1) / GROUP)
}

fn one_hot(group: Option<usize>) -> Vector {
    std::array::from_fn(|c| (group == Some(c)) as u8 as f32)
}

/// [1, Q, 1, DIM]
fn rows<'b>(backend: &'b Backend, values: &[Vector]) -> Tensor<'b> {
    let data = values.iter().flatten().map(|&x| x as f64).collect();
    Tensor::floats(backend, F32, &Array::new(&[1, values.len(), 1, DIM], data), &Layout::default())
}

fn decoder_on_a_cache_keeps_the_slots_of_the_list_that_it_reads(backend: &Backend) {
    rounds(2, |rng| {
        let sizes = Sizes { layers: 1, heads: [1, 1], dims: [DIM; 2], dtype: F32, block: BLOCK };
        let policies = [vwd_decoder_policy { k: K as u32, strategy: VWD_STRATEGY_ASYNC_TLS, ..POLICY }];
        let cache = Cache::create(
            backend,
            &vwd_kv_cache_options {
                max_sequences: 1,
                max_blocks: MAX_BLOCKS as u32,
                host_blocks: MAX_BLOCKS as u32,
                slots: (2 * K + 1) as u32,
                hold: rng.pick(&[1, 2]),
                ..sizes.cache()
            },
        );
        let options = vwd_decoder_options { max_rows: 1, ..sizes.decoder(&policies) };
        let decoder = create_on(backend, &options, &cache);
        let mut number = u32::MAX;
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_kv_cache_add(cache.0, &mut number, backend.stream()) });
        let tokens = (MAX_BLOCKS * BLOCK) as u64;
        // SAFETY: the cache lives.
        assert_ok(unsafe { vwd_kv_cache_extend(cache.0, number, tokens, backend.stream()) });
        let numbers = ints(backend, &[number as i64]);
        let mut values: Vec<Vector> = vec![];
        let mut step = |new: usize, q: Option<usize>, is_first: bool| -> (Option<Array<f64>>, Vec<Vector>) {
            let begin = values.len();
            values.extend((0..new).map(|_| -> Vector { std::array::from_fn(|_| rng.int(-4..=4) as f32) }));
            let keys: Vec<Vector> = (begin..values.len()).map(|n| one_hot(group(n / BLOCK)).map(|x| 8.0 * x)).collect();
            let (new_k, new_v) = (rows(backend, &keys), rows(backend, &values[begin..]));
            let (lens, from) = (ints(backend, &[values.len() as i64]), ints(backend, &[begin as i64]));
            let mut of_step = vwd_decoder_step {
                mode: VWD_DECODER_SPARSE,
                positions: new as u32,
                sequences: numbers.c(),
                seq_lens: lens.c(),
                ..args()
            };
            if is_first {
                of_step.begin = from.c();
            }
            decoder.begin(backend, &of_step);
            let out = Tensor::poisoned(backend, F32, &[1, new, 1, DIM], &Layout::default());
            let q = q.map(|q| rows(backend, &[one_hot(Some(q))]));
            let attend = vwd_decoder_attend_args { new_k: new_k.c(), new_v: new_v.c(), ..args() };
            let attend = q.as_ref().map_or(attend, |q| vwd_decoder_attend_args { q: q.c(), out: out.c(), ..attend });
            decoder.attend(backend, &attend);
            (q.is_some().then(|| out.read_floats()), values.clone())
        };
        for _ in 0..PROMPT {
            step(BLOCK, None, false);
        }
        let mut before: Option<(usize, usize)> = None;
        for t in 0..STEPS {
            let of_step = t * 4 % GROUPS;
            let (out, values) = step(1, Some(of_step), t == 0);
            let newest = (values.len() - 1) / BLOCK;
            if let Some((past, newest_then)) = before {
                let is_listed =
                    |block: usize| block == 0 || group(block) == Some(past) || block == newest_then || block == newest;
                let read: Vec<_> =
                    values.iter().enumerate().filter(|(n, _)| is_listed(n / BLOCK)).map(|(_, value)| value).collect();
                let out = out.expect("a step with queries");
                for c in 0..DIM {
                    let expected = read.iter().map(|value| value[c] as f64).sum::<f64>() / read.len() as f64;
                    let x = out[[0, 0, 0, c]];
                    // float32 of a mean of values up to 4.
                    assert!((x - expected).abs() < 2e-5, "step {t}, channel {c}: {x}, expected {expected}");
                }
            }
            before = Some((of_step, newest));
        }
    });
}
