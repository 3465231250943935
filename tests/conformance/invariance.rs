//! Every sequence of a call has the bits that it has in a call of any other sequences beside it: attention and repair in batch-invariant sessions, and
//! selection by axes, with what it leaves out, in every session.

use crate::Case;
use crate::attention_model::*;
use crate::attention_rows::{Prediction, agrees};
use crate::axis::Axes;
use crate::select::{Choice, ListTensors, Scene};
use crate::support::*;
use std::ops::Range;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    invariant_attention_agrees_with_the_formula,
    invariant_attention_does_not_depend_on_the_batch,
    invariant_attention_of_a_position_does_not_depend_on_the_others,
    invariant_repair_does_not_depend_on_the_batch,
    invariant_attention_to_more_lists_than_are_counted_is_refused,
    selection_by_axes_does_not_depend_on_the_batch,
];

/// Numbers of sequences that sessions are made for.
const MADE_FOR: [u64; 4] = [1, 2, 16, 400];

/// Lists so long that they are split.
fn long(rng: &mut Rng) -> Spec {
    let spec = match rng.size(0..=5) {
        0 => Spec { most: rng.pick(&[300, 2600]), ..Spec::plain(rng) },
        1 => latents(rng),
        2 => {
            let dim = rng.pick(&[128, 128, 64, 96, 256]);
            let scales = [Scales::Absent; 2];
            Spec { int4: true, dim, value_dim: dim, slots: false, scales, ..in_16_bits(rng) }
        }
        _ => in_16_bits(rng),
    };
    Spec {
        batch: rng.size(3..=6),
        q_lens: rng.one_in(3) && spec.positions.is_some(),
        poisoned: false,
        aligned: true,
        ..spec
    }
}

fn in_16_bits(rng: &mut Rng) -> Spec {
    let kv_type = rng.pick(&[F16, BF16]);
    let rows = [(None, 1), (None, 4), (None, 12), (Some(3), 4), (Some(9), 4), (Some(9), 8)];
    let (positions, group) = rng.pick(&rows);
    let (page, block) = rng.pick(&[(64, 64), (64, 16), (16, 32)]);
    let dim = rng.pick(&[128, 128, 64, 256]);
    Spec {
        positions,
        kv_heads: rng.size(1..=2),
        group,
        dim,
        value_dim: dim,
        page,
        block,
        most: rng.pick(&[700, 2600, 5000]),
        q_type: kv_type,
        kv_type,
        lists: rng.pick(&[Lists::Absent, Lists::Absent, Lists::Shared]),
        ..Spec::default()
    }
}

fn latents(rng: &mut Rng) -> Spec {
    let kv_type = rng.pick(&[F16, BF16]);
    Spec {
        kv_heads: 1,
        group: rng.pick(&[16, 64]),
        dim: 576,
        value_dim: 512,
        page: 64,
        block: 64,
        most: 1100,
        q_type: kv_type,
        kv_type,
        lists: rng.pick(&[Lists::Absent, Lists::Shared]),
        scale: Some(0.05),
        latent: true,
        ..Spec::default()
    }
}

/// Those sequences of a tensor whose first dimension they are.
fn take(t: &mut vwd_tensor, sequences: &Range<usize>) {
    if t.ndim > 0 && !t.data.is_null() {
        let step = t.strides[0] * (t.dtype_bits / 8) as i64;
        t.data = t.data.wrapping_byte_offset(step as isize * sequences.start as isize);
        t.shape[0] = sequences.len() as i64;
    }
}

/// The tensors of sequences in both calls. A macro, as their fields are alike and their types are not.
macro_rules! take_call {
    ($call:expr, $sequences:expr, [$($field:ident).+]) => { take(&mut $call.$($field).+, $sequences) };
    ($call:expr, $sequences:expr, $($field:tt),+) => {{ $(take_call!($call, $sequences, $field);)+ }};
}

fn take_kv(kv: *const vwd_paged_kv, sequences: &Range<usize>) -> *const vwd_paged_kv {
    // SAFETY: calls of this file have keys and values, which outlive them.
    let mut kv = unsafe { *kv };
    take_call!(kv, sequences, [page_table], [seq_lens]);
    if !kv.int4.is_null() {
        // SAFETY: as above.
        let mut int4 = unsafe { *kv.int4 };
        take_call!(int4, sequences, [page_table], [coded_lens], [mean_table]);
        // Without a table a page is a sequence's.
        if int4.page_table.ndim == 0 && kv.page_table.ndim > 0 {
            take_call!(int4, sequences, [k], [v], [k_scale], [v_scale]);
        }
        if int4.mean_table.ndim == 0 && kv.page_table.ndim > 0 {
            take(&mut int4.means, sequences);
        }
        kv.int4 = kept(int4);
    }
    kept(kv)
}

fn take_attention(mut call: vwd_attention_args, sequences: &Range<usize>) -> vwd_attention_args {
    call.kv = take_kv(call.kv, sequences);
    take_call!(
        call,
        sequences,
        [q],
        [q_lens],
        [list.ids],
        [list.counts],
        [list.slots],
        [out],
        [lse],
        [state.acc],
        [state.m],
        [state.l],
        [partials.acc],
        [partials.m],
        [partials.l],
        [tree]
    );
    call
}

fn take_repair(mut call: vwd_repair_args, sequences: &Range<usize>) -> vwd_repair_args {
    call.kv = take_kv(call.kv, sequences);
    take_call!(
        call,
        sequences,
        [q],
        [q_lens],
        [predicted.ids],
        [predicted.counts],
        [selected.ids],
        [selected.counts],
        [selected.slots],
        [missed_counts],
        [out],
        [lse],
        [state.acc],
        [state.m],
        [state.l],
        [predicted_state.acc],
        [predicted_state.m],
        [predicted_state.l],
        [predicted_partials.acc],
        [predicted_partials.m],
        [predicted_partials.l]
    );
    call
}

/// Runs of sequences of a batch: each alone, and with others before or after it.
fn companies(batch: usize) -> Vec<Range<usize>> {
    let alone = (0..batch).map(|i| i..i + 1);
    alone.chain([0..2, 1..batch, batch - 2..batch]).collect()
}

/// Compares the bits of what a call of all sequences writes with those of calls of some.
fn compare(spec: &Spec, run: impl Fn(&Range<usize>) -> Vec<Array<Bytes>>) {
    let together = run(&(0..spec.batch));
    for sequences in companies(spec.batch) {
        for (n, (some, all)) in run(&sequences).iter().zip(&together).enumerate() {
            for i in sequences.clone() {
                assert_eq!(some.row([i]), all.row([i]), "output {n} of sequence {i} in {sequences:?} of {spec:?}");
            }
        }
    }
}

fn invariant_attention_agrees_with_the_formula(backend: &Backend) {
    let backends = MADE_FOR.map(|batch| backend.invariant(batch));
    rounds(12, |rng| {
        let spec = Spec { batch: 2, ..long(rng) };
        agrees(&backends[rng.size(0..=3)], rng, spec);
    });
}

fn invariant_attention_does_not_depend_on_the_batch(backend: &Backend) {
    let backends = MADE_FOR.map(|batch| backend.invariant(batch));
    rounds(12, |rng| {
        let backend = &backends[rng.size(0..=3)];
        let spec = long(rng);
        let model = Model::random(rng, spec);
        let ids = model.ids(rng, 0.8);
        let placed = Placed::new(backend, rng, &model);
        let list = (model.spec.lists != Lists::Absent).then(|| PlacedList::new(backend, rng, &model, &ids));
        let has_partials = list.is_some() && model.spec.value_dim <= 256 && rng.one_in(2);
        let attend = |sequences: &Range<usize>| {
            let rng = &mut Rng::new(1);
            let results = Results::new(backend, rng, &model.spec);
            let mut call = placed.attention(list.as_ref(), &results);
            let groups = list.as_ref().map_or(1, |list| list.cap.max(1));
            let kept = has_partials.then(|| partials(backend, rng, &model.spec, groups));
            if let Some(kept) = &kept {
                call.partials = partials_of(kept);
            }
            placed.attend(&take_attention(call, sequences));
            let kept = kept.iter().flatten().map(Tensor::read_raw);
            results.bits().into_iter().chain(kept).collect()
        };
        compare(&model.spec, attend);
    });
}

/// Promised of all tokens, in heads of 64, 128 and 256 channels of 16 bits, and on CUDA of compute capability 9.0 itself.
fn invariant_attention_of_a_position_does_not_depend_on_the_others(backend: &Backend) {
    if backend.is_cuda() && backend.details().compute_capability != 90 {
        return;
    }
    let backends = MADE_FOR.map(|batch| backend.invariant(batch));
    rounds(6, |rng| {
        let backend = &backends[rng.size(0..=3)];
        let positions = rng.pick(&[2, 5, 9]);
        let spec = Spec { positions: Some(positions), batch: 2, lists: Lists::Absent, ..in_16_bits(rng) };
        let model = Model::random(rng, Spec { poisoned: false, aligned: true, ..spec });
        let attend = |rng: &mut Rng, model: &Model| {
            let (placed, results) = (Placed::new(backend, rng, model), Results::new(backend, rng, &model.spec));
            placed.attend(&placed.attention(None, &results));
            results.bits()
        };
        let together = attend(rng, &model);
        for r in 0..positions {
            for (n, (alone, together)) in attend(rng, &model.row(r)).iter().zip(&together).enumerate() {
                for i in 0..2 {
                    assert_eq!(alone.row([i]), together.row([i, r]), "output {n} of row {r} of {:?}", model.spec);
                }
            }
        }
    });
}

fn invariant_repair_does_not_depend_on_the_batch(backend: &Backend) {
    let backends = MADE_FOR.map(|batch| backend.invariant(batch));
    rounds(8, |rng| {
        let backend = &backends[rng.size(0..=3)];
        let mut spec = long(rng);
        while spec.lists == Lists::Absent || spec.latent || spec.int4 {
            spec = long(rng);
        }
        // So many lists that repair has smaller clusters for all than for a few.
        let case = Prediction::of(backend, rng, Spec { batch: 5, kv_heads: 8, most: spec.most.min(600), ..spec });
        let spec = &case.model.spec;
        let exact = rng.one_in(2);
        let first = Results::new(backend, rng, spec);
        let kept = partials(backend, rng, spec, case.lists[0].cap);
        case.placed.attend(&vwd_attention_args { partials: partials_of(&kept), ..case.attention(0, &first) });
        let call = |results: &Results| {
            let call = case.repair(if exact { VWD_REPAIR_EXACT } else { VWD_REPAIR_SUPERSET }, results);
            match exact {
                true => vwd_repair_args { predicted_partials: partials_of(&kept), ..call },
                false => vwd_repair_args { predicted_state: state_of(&first.state), ..call },
            }
        };
        compare(spec, |sequences| {
            let results = Results::new(backend, &mut Rng::new(1), spec);
            case.placed.call_repair(&take_repair(call(&results), sequences));
            results.bits()
        });
    });
}

/// Each of these sequences is the same one.
fn invariant_attention_to_more_lists_than_are_counted_is_refused(backend: &Backend) {
    // Elsewhere other kernels run, which count less.
    if !backend.is_cuda() || backend.details().compute_capability != 90 {
        return;
    }
    let (backend, rng, batch) = (&backend.invariant(1), &mut Rng::new(1), 8200);
    let spec = Spec { batch: 1, kv_heads: 1, dim: 128, value_dim: 128, most: 40, aligned: true, ..Spec::default() };
    let model = Model::random(rng, spec);
    let (placed, ids) = (Placed::new(backend, rng, &model), model.ids(rng, 1.0));
    let (list, results) = (PlacedList::new(backend, rng, &model, &ids), Results::new(backend, rng, &model.spec));
    let out = Tensor::poisoned(backend, F16, &[batch, model.spec.heads(), 128], &Layout::default());
    let mut call = placed.attention(Some(&list), &results);
    // SAFETY: `placed` keeps it.
    let mut kv = unsafe { *call.kv };
    for t in [&mut kv.page_table, &mut kv.seq_lens, &mut call.q, &mut call.list.ids, &mut call.list.counts] {
        (t.shape[0], t.strides[0]) = (batch as i64, 0);
    }
    (call.kv, call.out, call.lse) = (kept(kv), out.c(), absent());
    call.state = vwd_attention_state { acc: absent(), m: absent(), l: absent() };
    // SAFETY: the tensors outlive the call.
    let status = unsafe { vwd_attention(backend.session(), &call, backend.stream()) };
    let text = "8200 sequences need 65600 counters in a session of invariant_batch 1; a stream has 65536";
    assert_fails(status, VWD_ERROR_UNSUPPORTED, &[text]);
    out.assert_written("out", |_| false);
}

/// So many lists that each has one CTA, where those of one sequence have several.
fn selection_by_axes_does_not_depend_on_the_batch(backend: &Backend) {
    rounds(4, |rng| {
        let (batch, kv_heads, blocks) = (35, 4, rng.pick(&[150, 700]));
        let scene = Scene::with_positions(backend, rng, [batch, kv_heads, 2, 128], 16, 16 * blocks, None);
        let choice = Choice::plain(rng.pick(&[20, 128]));
        let is_int4 = rng.one_in(2);
        let axes = Axes::new(backend, rng, &scene, is_int4, [Layout::default(), Layout::default()]);
        let select = |sequences: &Range<usize>| {
            let rng = &mut Rng::new(1);
            let lists = ListTensors::poisoned(backend, rng, &scene, choice.cap);
            let plain = |shape: &[usize]| Tensor::poisoned(backend, F32, shape, &Layout::default());
            let (scores, masses) = (plain(&[batch, kv_heads, blocks]), plain(&[batch, kv_heads * 2]));
            let mut call = axes.args(&scene);
            // SAFETY: the test keeps the index for good.
            let mut index = unsafe { *call.index };
            match index.table.ndim {
                // A page for each sequence.
                0 => take_call!(index, sequences, [axes], [axis_range]),
                _ => take(&mut index.table, sequences),
            }
            call = vwd_select_blocks_args {
                block_size: 16,
                k: choice.k as u32,
                scale: scene.scale,
                index: kept(index),
                q: scene.q.c(),
                seq_lens: scene.lens.c(),
                selected: lists.c(),
                scores: scores.c(),
                log_mass: masses.c(),
                ..call
            };
            take_call!(call, sequences, [q], [seq_lens], [selected.ids], [selected.counts], [scores], [log_mass]);
            // SAFETY: the tensors outlive the call.
            backend.finish(unsafe { vwd_select_blocks(backend.session(), &call, backend.stream()) });
            [&lists.ids, &lists.counts, &scores, &masses].map(Tensor::read_raw)
        };
        let together = select(&(0..batch));
        for sequences in [0..1, 7..8, 30..35] {
            for (n, (some, all)) in select(&sequences).iter().zip(&together).enumerate() {
                for i in sequences.clone() {
                    assert_eq!(
                        some.row([i]),
                        all.row([i]),
                        "output {n} of sequence {i} in {sequences:?}, INT4 {is_int4}"
                    );
                }
            }
        }
    });
}
