//! The bits that vwd_index_update writes, of keys in 32, 16 and 8 bits. Where the contract fixes every bit, the oracle
//! computes in single precision.

use crate::Case;
use crate::keys_to_blocks::{Sequences, StoredKeys, Summaries};
use crate::support::*;
use half::f16;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    index_minmax_holds_the_largest_and_smallest_key_and_ignores_nan,
    index_mean_is_the_sum_in_order_times_the_reciprocal,
    index_labels_round_to_nearest_even_against_the_stored_scale,
    index_of_float8_keys_is_that_of_their_scaled_values,
    index_extended_after_rollback_has_the_bits_of_one_built_at_once,
    index_of_several_layers_has_the_bits_of_single_updates,
];

const KINDS: [u32; 3] = [VWD_INDEX_MINMAX, VWD_INDEX_MEAN, VWD_INDEX_LABEL];

/// Equal as numbers, NaN to NaN.
#[track_caller]
pub fn assert_same(found: &[f64], expected: &[f64], what: &str) {
    let same = found.len() == expected.len()
        && found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
    assert!(same, "{what}: found {found:?}, expected {expected:?}");
}

fn index_minmax_holds_the_largest_and_smallest_key_and_ignores_nan(backend: &Backend) {
    rounds(25, |rng| {
        let mut s = Sequences::random(backend, rng);
        let special = [f64::NAN, 0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY];
        s.keys = s.keys.map(|&x| if rng.one_in(20) { rng.pick(&special) } else { x });
        check_minmax(rng, &s);
    });
}

fn check_minmax(rng: &mut Rng, s: &Sequences) {
    let index = Summaries::room(rng, s, VWD_INDEX_MINMAX);
    s.update(rng, &s.lens, None, &index);
    let (max, min) = (index.tensors[0].read_floats(), index.tensors[1].read_floats());
    for i in 0..s.batch() {
        for j in 0..index.count(s.len(i)) {
            let (page, row) = index.find(i, j);
            for g in 0..s.kv_heads {
                let end = s.len(i).min((j + 1) * index.block_size);
                let keys: Vec<_> = (j * index.block_size..end).filter_map(|t| s.key(i, t, g)).collect();
                for c in 0..s.dim {
                    let mut values: Vec<f64> = keys.iter().map(|k| k[c]).filter(|x| !x.is_nan()).collect();
                    values.sort_by(f64::total_cmp);
                    let largest = values.last().copied().unwrap_or(f64::NEG_INFINITY) + 0.0; // −0 + 0 is +0
                    let smallest = values.first().copied().unwrap_or(f64::INFINITY) + 0.0;
                    let found = [max[[page, row, g, c]], min[[page, row, g, c]]];
                    let expected = [s.dtype.round(largest), s.dtype.round(smallest)];
                    assert_same(&found, &expected, &format!("block {j} of {i}, head {g}, channel {c}"));
                }
            }
        }
    }
}

fn index_mean_is_the_sum_in_order_times_the_reciprocal(backend: &Backend) {
    rounds(25, |rng| {
        let s = Sequences::random(backend, rng);
        check_means(rng, &s);
    });
}

fn check_means(rng: &mut Rng, s: &Sequences) {
    let index = Summaries::room(rng, s, VWD_INDEX_MEAN);
    s.update(rng, &s.lens, None, &index);
    let means = index.tensors[0].read_floats();
    for i in 0..s.batch() {
        for w in 0..index.count(s.len(i)) {
            let (page, row) = index.find(i, w);
            for g in 0..s.kv_heads {
                let expected: Vec<f64> = (0..s.dim)
                    .map(|c| {
                        // Single precision on purpose: the contract fixes every bit.
                        let mut sum = 0f32;
                        for t in w * index.stride..w * index.stride + index.window {
                            sum += s.key(i, t, g).map_or(f32::NAN, |key| key[c] as f32);
                        }
                        s.dtype.round((sum * (1.0 / index.window as f32)) as f64)
                    })
                    .collect();
                assert_same(means.row([page, row, g]), &expected, &format!("window {w} of {i}, head {g}"));
            }
        }
    }
}

/// Code, scale and minimum as the contract has them, in single precision.
pub fn label(values: &[f32]) -> (Vec<u8>, f32, f32) {
    let numbers = || values.iter().copied().filter(|x| !x.is_nan());
    let (low, high) = (numbers().fold(f32::INFINITY, f32::min), numbers().fold(f32::NEG_INFINITY, f32::max));
    let low = low + 0.0; // −0 + 0 is +0
    let step = (high - low) / 15.0;
    let scale = f16::from_f32(if step > 0.0 { step.min(65504.0) } else { 0.0 }).to_f32();
    let min = if low > high { f32::NAN } else { f16::from_f32(low.clamp(-65504.0, 65504.0)).to_f32() };
    let code = |x: f32| {
        let code = ((x - min) / scale).round_ties_even();
        if scale == 0.0 || code.is_nan() { 0 } else { code.clamp(0.0, 15.0) as u8 }
    };
    (values.iter().map(|&x| code(x)).collect(), scale, min)
}

fn index_labels_round_to_nearest_even_against_the_stored_scale(backend: &Backend) {
    rounds(25, |rng| {
        let mut s = Sequences::random(backend, rng);
        let hard = rng.pick(&[0.0, 1e-8, 1.0, 3e4]);
        let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, 1e30];
        let dtype = s.dtype;
        s.keys = s.keys.map(|&x| dtype.round(if rng.one_in(30) { rng.pick(&special) } else { x * hard }));
        check_labels(rng, &s);
    });
}

fn check_labels(rng: &mut Rng, s: &Sequences) {
    let index = Summaries::room(rng, s, VWD_INDEX_LABEL);
    s.update(rng, &s.lens, None, &index);
    let [codes, scale, min] = &index.tensors[..] else { unreachable!() };
    let (codes, scale, min) = (codes.read_ints(), scale.read_floats(), min.read_floats());
    let channels = &index.channels.as_ref().unwrap().0;
    for i in 0..s.batch() {
        for t in 0..s.len(i) {
            let (page, row) = index.find(i, t);
            for g in 0..s.kv_heads {
                let key = s.key(i, t, g);
                let value = |&c: &i64| key.map_or(f32::NAN, |key| key[c as usize] as f32);
                let values: Vec<f32> = channels.row([g]).iter().map(value).collect();
                let (expected, want_scale, want_min) = label(&values);
                let found = codes.row([page, row, g]).iter().flat_map(|&b| [(b & 15) as u8, (b >> 4) as u8]);
                assert_eq!(found.collect::<Vec<_>>(), expected, "token {t} of {i}, head {g}: {values:?}");
                let found = [scale[[page, row, g]], min[[page, row, g]]];
                assert_same(&found, &[want_scale as f64, want_min as f64], "scale and minimum");
            }
        }
    }
}

fn index_of_float8_keys_is_that_of_their_scaled_values(backend: &Backend) {
    rounds(25, |rng| {
        let s = Sequences::quantised(backend, rng);
        check_minmax(rng, &s);
        check_means(rng, &s);
        check_labels(rng, &s);
    });
}

fn index_extended_after_rollback_has_the_bits_of_one_built_at_once(backend: &Backend) {
    check_rollback(backend, &KINDS);
}

pub fn check_rollback(backend: &Backend, kinds: &[u32]) {
    rounds(15, |rng| {
        let mut s = Sequences::random(backend, rng);
        for &kind in kinds {
            let index = Summaries::room(rng, &s, kind);
            let truth = s.keys.clone();
            let mut now: Vec<usize> = vec![0; s.batch()];
            while (0..s.batch()).any(|i| now[i] < s.len(i)) {
                // A draft runs ahead with other keys, part of it is refused, and the true tokens replace it.
                if rng.one_in(3) {
                    let ahead = |i: usize| if now[i] < s.len(i) { now[i] + rng.size(0..=9) } else { now[i] };
                    let ahead = Array::new(&[s.batch()], (0..s.batch()).map(ahead).map(|t| t as i64).collect());
                    s.keys = s.keys.map(|x| x + 1.0);
                    let begin = Array::from_fn(&[s.batch()], |at| now[at[0]] as i64);
                    s.update(rng, &ahead, Some(&begin), &index);
                    s.keys = truth.clone();
                }
                let begin = Array::from_fn(&[s.batch()], |at| now[at[0]] as i64);
                for (i, now) in now.iter_mut().enumerate() {
                    *now = s.len(i).min(*now + rng.pick(&[1, 1, 1, 2, 17]));
                }
                let end = Array::from_fn(&[s.batch()], |at| now[at[0]] as i64);
                s.update(rng, &end, Some(&begin), &index);
            }
            let at_once = index.twin(backend);
            s.update(rng, &s.lens, None, &at_once);
            let lens: Vec<usize> = (0..s.batch()).map(|i| s.len(i)).collect();
            for (stepped, built) in index.stored(&lens).iter().zip(&at_once.stored(&lens)) {
                assert_eq!(stepped, built, "kind {kind}");
            }
        }
    });
}

fn index_of_several_layers_has_the_bits_of_single_updates(backend: &Backend) {
    rounds(12, |rng| {
        let of_float8 = rng.one_in(3);
        let mut s = if of_float8 { Sequences::quantised(backend, rng) } else { Sequences::random(backend, rng) };
        // More layers than a launch takes, where they are small.
        let count = if s.keys.data.len() < 5000 { rng.pick(&[3, 35]) } else { rng.size(1..=3) };
        let begin = Array::from_fn(&[s.batch()], |at| rng.pick(&[0, s.lens[[at[0]]].max(1) - 1]));
        let [lens, begin] = [&s.lens, &begin].map(|a| Tensor::ints(backend, I32, a, &Layout::random(rng, 1)));
        let page_table = Tensor::ints(backend, I32, &s.table, &Layout::random(rng, 2));
        let (tight, kind) = (Layout::default(), rng.pick(&[KINDS[0], KINDS[1], KINDS[2], VWD_INDEX_AXIS]));
        let first = Summaries::room(rng, &s, kind);
        let mut layers = vec![];
        for _ in 0..count {
            // Most layers are alike; where another one stands between them, they are not all in one launch.
            let is_alike = !rng.one_in(4);
            let index = if is_alike { first.twin(backend) } else { Summaries::room(rng, &s, kind) };
            let layout = if is_alike { tight.clone() } else { Layout::random(rng, 4) };
            if !of_float8 {
                s.keys = s.keys.map(|&x| s.dtype.round(x * 1.5 - 0.25));
            }
            layers.push((index.twin(backend), s.stored_keys(rng, &layout), index, is_alike));
        }
        let updates = |together: bool| {
            let update = |(index, keys, alone, is_alike): &(Summaries, StoredKeys, Summaries, bool)| {
                let index = if together { index.c() } else { alone.c() };
                let table = if *is_alike { first.c().table } else { index.table };
                vwd_index_update_args {
                    k: keys.given,
                    k_scale: keys.scale.as_ref().map_or(absent(), Tensor::c),
                    page_table: page_table.c(),
                    seq_lens: lens.c(),
                    begin: begin.c(),
                    index: kept(vwd_index { table, ..index }),
                    ..args()
                }
            };
            layers.iter().map(update).collect::<Vec<_>>()
        };
        for update in updates(false) {
            // SAFETY: the tensors are valid.
            backend.finish(unsafe { vwd_index_update(backend.session(), &update, backend.stream()) });
        }
        let together = updates(true);
        let pointers: Vec<_> = together.iter().map(|update| update as *const vwd_index_update_args).collect();
        let (session, stream) = (backend.session(), backend.stream());
        // SAFETY: the tensors are valid.
        backend.finish(unsafe { vwd_index_update_layers(session, pointers.as_ptr(), count as u32, stream) });
        for (n, (index, keys, alone, _)) in layers.iter().enumerate() {
            keys.k.assert_untouched("k");
            let raw = |index: &Summaries| index.tensors.iter().map(Tensor::read_raw).collect::<Vec<_>>();
            for (found, expected) in raw(index).iter().zip(raw(alone)) {
                assert!(found.data == expected.data, "kind {kind}, layer {n} of {count}");
            }
        }
    });
}
