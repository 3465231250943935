//! vwd_attention, vwd_repair and vwd_merge_states with everything that they take beside lists: each alone and all together.

use crate::Case;
use crate::attention_model::*;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    attention_of_several_positions_agrees_with_the_formula,
    attention_within_a_window_agrees_with_the_formula,
    attention_with_capped_scores_agrees_with_the_formula,
    attention_with_sinks_agrees_with_the_formula,
    attention_with_values_of_their_own_width_agrees_with_the_formula,
    attention_over_fp8_agrees_with_the_formula,
    attention_over_slots_agrees_with_the_formula,
    attention_with_everything_at_once_agrees_with_the_formula,
    attention_partials_of_rows_are_the_states_of_their_groups,
    attention_in_whole_tiles_agrees_with_the_formula,
    attention_partials_in_whole_tiles_are_the_states_of_their_groups,
    four_positions_give_what_four_calls_give,
    a_shared_list_gives_what_lists_that_repeat_it_give,
    repair_superset_of_rows_covers_predicted_and_selected_blocks,
    repair_exact_of_rows_covers_the_selected_blocks_alone,
    repair_of_many_positions_of_any_share_missed_agrees_with_the_formula,
    repair_exact_of_rows_attends_again_groups_with_a_block_predicted_in_vain,
    merge_of_rows_with_a_sink_is_attention_with_that_sink,
    merge_keeps_its_precision_where_maxima_are_large,
];

/// A call over random lists, checked against the formula.
pub fn agrees(backend: &Backend, rng: &mut Rng, spec: Spec) {
    let mut model = Model::random(rng, spec);
    let share = rng.pick(&[0.0, 0.3, 0.8, 1.0]);
    let ids = if model.spec.lists == Lists::Absent { model.everything() } else { model.ids(rng, share) };
    if model.spec.poisoned {
        model.poison(&[&ids]);
    }
    let placed = Placed::new(backend, rng, &model);
    let list = (model.spec.lists != Lists::Absent).then(|| PlacedList::new(backend, rng, &model, &ids));
    let results = Results::new(backend, rng, &model.spec);
    placed.attend(&placed.attention(list.as_ref(), &results));
    results.check(&model, |i, r, g| model.list(&ids, i, r, g).to_vec());
}

fn attention_of_several_positions_agrees_with_the_formula(backend: &Backend) {
    rounds(25, |rng| {
        let spec = Spec::plain(rng).with_positions(rng);
        agrees(backend, rng, spec);
    });
}

fn attention_within_a_window_agrees_with_the_formula(backend: &Backend) {
    rounds(25, |rng| {
        let mut spec = Spec::plain(rng).with_window(rng);
        if rng.one_in(2) {
            spec = Spec { positions: Some(4), ..spec };
        }
        agrees(backend, rng, spec);
    });
}

fn attention_with_capped_scores_agrees_with_the_formula(backend: &Backend) {
    rounds(20, |rng| {
        let spec = Spec::plain(rng).with_cap(rng);
        agrees(backend, rng, spec);
    });
}

fn attention_with_sinks_agrees_with_the_formula(backend: &Backend) {
    rounds(20, |rng| {
        let spec = Spec::plain(rng).with_sinks();
        agrees(backend, rng, spec);
    });
}

fn attention_with_values_of_their_own_width_agrees_with_the_formula(backend: &Backend) {
    rounds(20, |rng| {
        let spec = Spec { most: 100, ..Spec::plain(rng).with_value_dim(rng) };
        agrees(backend, rng, spec);
    });
}

fn attention_over_fp8_agrees_with_the_formula(backend: &Backend) {
    rounds(25, |rng| {
        let spec = Spec::plain(rng).with_fp8(rng);
        agrees(backend, rng, spec);
    });
}

fn attention_over_slots_agrees_with_the_formula(backend: &Backend) {
    rounds(25, |rng| {
        let mut spec = Spec::plain(rng).with_slots(rng);
        if rng.one_in(2) {
            spec = spec.with_positions(rng).with_slots(rng);
        }
        agrees(backend, rng, spec);
    });
}

fn attention_with_everything_at_once_agrees_with_the_formula(backend: &Backend) {
    rounds(60, |rng| {
        let spec = Spec::random(rng);
        agrees(backend, rng, spec);
    });
}

// --- positions -------------------------------------------------------------------------------------------------------

/// Each row of a call of Q positions is the call of Q = 1 at the row's length, bit for bit on the CPU.
fn four_positions_give_what_four_calls_give(backend: &Backend) {
    rounds(15, |rng| {
        let spec = Spec { positions: Some(4), lists: rng.pick(&[Lists::Absent, Lists::Shared]), ..Spec::random(rng) };
        let spec = if spec.slots { Spec { lists: Lists::Shared, ..spec } } else { spec };
        let model = Model::random(rng, Spec { q_lens: false, poisoned: false, ..spec });
        let ids = if model.spec.lists == Lists::Absent { model.everything() } else { model.ids(rng, 0.6) };
        let seed = rng.int(0..=i64::MAX) as u64;
        let run = |model: &Model| {
            let rng = &mut Rng::new(seed);
            let list = (model.spec.lists != Lists::Absent).then(|| PlacedList::new(backend, rng, model, &ids));
            let placed = Placed::new(backend, &mut Rng::new(seed), model);
            let results = Results::new(backend, rng, &model.spec);
            placed.attend(&placed.attention(list.as_ref(), &results));
            [&results.out, &results.lse].map(|t| (t.read_raw().data, t.read_floats().data))
        };
        let together = run(&model);
        for r in 0..4 {
            let row = model.row(r);
            for (n, (alone, together)) in run(&row).iter().zip(&together).enumerate() {
                let of_row = if n == 0 { model.spec.heads() * model.spec.value_dim } else { model.spec.heads() };
                for i in 0..model.spec.batch {
                    let (at, from) = (i * of_row..(i + 1) * of_row, (i * 4 + r) * of_row);
                    let want = from..from + of_row;
                    if backend.is_cuda() {
                        for (a, b) in alone.1[at].iter().zip(&together.1[want]) {
                            let same = TOLERANCE + 2.0 * model.weight_rounding(true);
                            close(*a, *b, same + model.spec.q_type.rounding(*b), &format!("row {r}"));
                        }
                    } else {
                        assert_eq!(alone.0[at], together.0[want], "row {r} of {:?}", model.spec);
                    }
                }
            }
        }
    });
}

fn a_shared_list_gives_what_lists_that_repeat_it_give(backend: &Backend) {
    rounds(15, |rng| {
        let spec = Spec::random(rng).with_positions(rng);
        let shared = Model::random(rng, Spec { lists: Lists::Shared, ..spec });
        let ids = shared.ids(rng, 0.5);
        let spec = &shared.spec;
        let repeated = Array::from_fn(&[spec.batch, spec.rows(), spec.kv_heads], |at| ids[[at[0], 0, at[2]]].clone());
        let placed = Placed::new(backend, rng, &shared);
        let results = Results::new(backend, rng, spec);
        placed.attend(&placed.attention(Some(&PlacedList::new(backend, rng, &shared, &ids)), &results));
        let own = Model { spec: Spec { lists: Lists::Own, ..spec.clone() }, ..shared };
        let list = PlacedList::new(backend, rng, &own, &repeated);
        let again = Results::new(backend, rng, &own.spec);
        placed.attend(&placed.attention(Some(&list), &again));
        again.check(&own, |i, r, g| own.list(&repeated, i, r, g).to_vec());
        if !backend.is_cuda() {
            assert_eq!(results.bits(), again.bits());
        }
    });
}

// --- partials, repair, merging ---------------------------------------------------------------------------------------

fn attention_partials_of_rows_are_the_states_of_their_groups(backend: &Backend) {
    rounds(20, |rng| {
        let group = rng.pick(&[1, 1, 2, 5]);
        let spec = Spec { most: 150, ..Spec::random(rng).with_partials(backend) };
        partials_agree(backend, rng, spec, group);
    });
}

/// Up to 16 rows of 128 channels over whole tiles have a kernel of their own on CUDA, whose cut follows from how many lists
/// there are: some, and more than are cut into the most parts.
fn attention_in_whole_tiles_agrees_with_the_formula(backend: &Backend) {
    rounds(40, |rng| {
        let spec = Spec::in_whole_tiles(rng);
        agrees(backend, rng, spec);
    });
}

fn attention_partials_in_whole_tiles_are_the_states_of_their_groups(backend: &Backend) {
    rounds(20, |rng| {
        let group = rng.pick(&[1, 1, 2, 5]);
        let spec = Spec::in_whole_tiles(rng);
        partials_agree(backend, rng, spec, group);
    });
    // More tiles in a partial than a warp looks up at once.
    let rng = &mut Rng::new(8);
    let spec = Spec { batch: 1, kv_heads: 1, page: 64, block: 1024, most: 1500, ..Spec::in_whole_tiles(rng) };
    partials_agree(backend, rng, Spec { slots: false, ..spec }, 1);
}

pub fn partials_agree(backend: &Backend, rng: &mut Rng, mut spec: Spec, group: usize) {
    if spec.lists == Lists::Absent {
        spec.lists = Lists::Shared;
    }
    let model = Model::random(rng, Spec { poisoned: false, ..spec });
    let ids = model.ids(rng, 0.5);
    let list = PlacedList::new(backend, rng, &model, &ids);
    let placed = Placed::new(backend, rng, &model);
    let results = Results::new(backend, rng, &model.spec);
    let kept = partials(backend, rng, &model.spec, list.cap.div_ceil(group));
    placed.attend(&vwd_attention_args {
        partial_blocks: group as u32,
        partials: partials_of(&kept),
        ..placed.attention(Some(&list), &results)
    });
    results.check(&model, |i, r, g| model.list(&ids, i, r, g).to_vec());
    let (spec, groups) = (&model.spec, list.cap.div_ceil(group));
    let full = [spec.batch, spec.rows(), spec.heads(), groups];
    let [m, l] = [&kept[1], &kept[2]].map(|t| Array::new(&full, t.read_floats().data));
    let acc = Array::new(&[&full[..], &[spec.value_dim]].concat(), kept[0].read_floats().data);
    let count = |i: usize, r: usize, h: usize| model.list(&ids, i, r, h / spec.group).len();
    for at in array::indices(&full) {
        let at = [at[0], at[1], at[2], at[3]];
        let [i, r, h, n] = at;
        if n < count(i, r, h).div_ceil(group) {
            let list = model.list(&ids, i, r, h / spec.group);
            let want = model.expected(i, r, h, &list[n * group..list.len().min((n + 1) * group)]);
            let (tolerance, score) = (model.tolerance(), model.score_rounding(backend.is_cuda()));
            close(m[at], want.m, tolerance + score, "m");
            close(l[at], want.l, (tolerance + 2.0 * score) * want.l, "l");
            let of_acc = tolerance + 4.0 * score + model.weight_rounding(backend.is_cuda());
            close(acc.row(at)[0], want.acc[0], of_acc * want.l, "acc");
        }
    }
    let ranked = spec.positions.is_some();
    for t in &kept {
        t.assert_written("partials", |at| {
            let (r, h, n) = if ranked { (at[1], at[2], at[3]) } else { (0, at[1], at[2]) };
            n < count(at[0], r, h).div_ceil(group)
        });
    }
}

/// A prediction and what turned out to be right.
pub struct Prediction<'b> {
    pub model: Model,
    pub placed: Placed<'b>,
    ids: [Ids; 2],
    pub lists: [PlacedList<'b>; 2],
    missed: Tensor<'b>,
}

impl<'b> Prediction<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, block_at_least: usize) -> Prediction<'b> {
        let mut spec = Spec { most: 200, ..Spec::random(rng) };
        while spec.block < block_at_least || spec.lists == Lists::Absent {
            spec = Spec { most: 200, ..Spec::random(rng) };
        }
        Prediction::of(backend, rng, spec)
    }

    pub fn of(backend: &'b Backend, rng: &mut Rng, spec: Spec) -> Prediction<'b> {
        let (share, keep) = (rng.pick(&[0.0, 0.3, 0.9]), rng.pick(&[0.0, 0.5, 0.9, 1.0]));
        Prediction::missing(backend, rng, spec, share, keep)
    }

    /// A prediction of a share of the blocks, of which a part is selected, beside others.
    pub fn missing(backend: &'b Backend, rng: &mut Rng, spec: Spec, share: f64, keep: f64) -> Prediction<'b> {
        let mut model = Model::random(rng, spec.with_partials(backend));
        let predicted = model.ids(rng, share);
        let other = model.ids(rng, share);
        let mut selected = predicted.clone();
        for (list, other) in selected.data.iter_mut().zip(&other.data) {
            list.retain(|_| rng.unit() < keep);
            list.extend(other.iter().filter(|_| rng.unit() > keep));
            list.sort_unstable();
            list.dedup();
        }
        if model.spec.poisoned {
            model.poison(&[&predicted, &selected]);
        }
        let lists = [&predicted, &selected].map(|ids| PlacedList::new(backend, rng, &model, ids));
        let shape = model.spec.list_shape(&[]);
        Prediction {
            placed: Placed::new(backend, rng, &model),
            missed: Tensor::poisoned(backend, I32, &shape, &Layout::random(rng, shape.len())),
            ids: [predicted, selected],
            lists,
            model,
        }
    }

    pub fn attention(&self, list: usize, results: &Results) -> vwd_attention_args {
        self.placed.attention(Some(&self.lists[list]), results)
    }

    pub fn repair(&self, mode: u32, results: &Results) -> vwd_repair_args {
        let [predicted, selected] = &self.lists;
        vwd_repair_args { missed_counts: self.missed.c(), ..self.placed.repair(mode, [predicted, selected], results) }
    }

    pub fn check(&self, exact: bool, results: &Results) {
        let model = &self.model;
        results.check(model, |i, r, g| {
            let [predicted, selected] = self.ids.each_ref().map(|ids| model.list(ids, i, r, g));
            let mut blocks = selected.to_vec();
            if !exact {
                blocks.extend(predicted.iter().filter(|id| !selected.contains(id)));
            }
            blocks
        });
        let missed = self.missed.read_ints();
        for (n, at) in array::indices(&self.ids[0].shape).enumerate() {
            let [i, r, g] = [at[0], at[1], at[2]];
            let [predicted, selected] = self.ids.each_ref().map(|ids| &ids[[i, r, g]]);
            // A shared list is for every token that the sequence has; an own one for what its position could see.
            let own = model.spec.lists == Lists::Own;
            let end = if own { oracle::seen(model.len(i), model.rows(i), r, 0).end } else { model.len(i) };
            let begins = |id: i64| id >= 0 && (id as usize * model.spec.block) < end;
            let want = selected.iter().filter(|&&id| begins(id) && !predicted.contains(&id)).count();
            assert_eq!(missed.data[n], want as i64, "missed_counts{at:?} of {:?}", model.spec);
        }
    }
}

fn repair_superset_of_rows_covers_predicted_and_selected_blocks(backend: &Backend) {
    rounds(25, |rng| {
        let case = Prediction::random(backend, rng, 1);
        let first = Results::new(backend, rng, &case.model.spec);
        case.placed.attend(&case.attention(0, &first));
        let in_place = rng.one_in(2);
        let mut results = Results::new(backend, rng, &case.model.spec);
        let mut call = case.repair(VWD_REPAIR_SUPERSET, &results);
        call.predicted_state = state_of(&first.state);
        if in_place {
            call.state = state_of(&first.state);
        }
        case.placed.call_repair(&call);
        if in_place {
            results.state = first.state;
        }
        case.check(false, &results);
    });
}

fn repair_exact_of_rows_covers_the_selected_blocks_alone(backend: &Backend) {
    rounds(40, |rng| {
        let case = Prediction::random(backend, rng, 8);
        check_exact(backend, rng, &case);
    });
}

/// EXACT from a partial for each block. Returns the results of attention to the predicted list.
fn check_exact<'b>(backend: &'b Backend, rng: &mut Rng, case: &Prediction<'b>) -> Results<'b> {
    let spec = &case.model.spec;
    let (first, repaired) = (Results::new(backend, rng, spec), Results::new(backend, rng, spec));
    let kept = partials(backend, rng, spec, case.lists[0].cap);
    case.placed.attend(&vwd_attention_args { partials: partials_of(&kept), ..case.attention(0, &first) });
    let call = case.repair(VWD_REPAIR_EXACT, &repaired);
    case.placed.call_repair(&vwd_repair_args { predicted_partials: partials_of(&kept), ..call });
    case.check(true, &repaired);
    // Bit for bit on the CPU only.
    if !backend.is_cuda() {
        let direct = Results::new(backend, rng, spec);
        case.placed.attend(&case.attention(1, &direct));
        assert_eq!(repaired.bits(), direct.bits(), "{spec:?}");
    }
    first
}

/// As drafts have them: rows of each number that fills a block of a kernel, or does not, of sequences of random lengths, of whose blocks nothing,
/// something or everything was predicted, and all, some or none of that was selected.
fn repair_of_many_positions_of_any_share_missed_agrees_with_the_formula(backend: &Backend) {
    rounds(4, |rng| {
        for dim in [64, 128, 256] {
            for (share, keep) in [(0.9, 1.0), (0.9, 0.95), (0.5, 0.5), (0.5, 0.0), (0.0, 0.5)] {
                // Partials of wide heads fit the shared memory of CUDA for few rows.
                let few = rng.pick(&[(2, 1), (2, 4), (8, 1)]);
                let many = (rng.pick(&[3, 4, 9, 16]), rng.pick(&[1, 4, 7]));
                let (positions, group) = if dim > 128 { few } else { many };
                let (page, block) = rng.pick(&[(64, 64), (16, 16), (64, 16)]);
                let (batch, kv_heads, positions) = (rng.pick(&[1, 2]), rng.pick(&[1, 3]), Some(positions));
                let kv_type = rng.pick(&[F16, BF16]);
                let (sinks, cap) = (rng.one_in(3), rng.one_in(4).then_some(5.0));
                let (window, q_lens) = (rng.pick(&[0, 0, 70]), rng.one_in(2));
                let (value_dim, lists, most) = (dim, Lists::Shared, 250);
                let shape =
                    Spec { batch, kv_heads, group, dim, value_dim, page, block, most, positions, ..Spec::default() };
                let spec = Spec { q_type: kv_type, kv_type, lists, sinks, cap, window, q_lens, aligned: true, ..shape };
                let case = Prediction::missing(backend, rng, spec, share, keep);
                let first = check_exact(backend, rng, &case);
                let superset = Results::new(backend, rng, &case.model.spec);
                let call = case.repair(VWD_REPAIR_SUPERSET, &superset);
                case.placed.call_repair(&vwd_repair_args { predicted_state: state_of(&first.state), ..call });
                case.check(false, &superset);
            }
        }
    });
}

fn repair_exact_of_rows_attends_again_groups_with_a_block_predicted_in_vain(backend: &Backend) {
    rounds(20, |rng| {
        let group = rng.pick(&[1, 2, 3, 64]);
        let case = Prediction::random(backend, rng, 1);
        let first = Results::new(backend, rng, &case.model.spec);
        let kept = partials(backend, rng, &case.model.spec, case.lists[0].cap.div_ceil(group));
        let partial_blocks = group as u32;
        let call = case.attention(0, &first);
        case.placed.attend(&vwd_attention_args { partial_blocks, partials: partials_of(&kept), ..call });
        let results = Results::new(backend, rng, &case.model.spec);
        let call = case.repair(VWD_REPAIR_EXACT, &results);
        case.placed.call_repair(&vwd_repair_args { partial_blocks, predicted_partials: partials_of(&kept), ..call });
        case.check(true, &results);
    });
}

/// Maxima of some hundreds that lie close together: the weights are made of their differences.
fn merge_keeps_its_precision_where_maxima_are_large(backend: &Backend) {
    rounds(10, |rng| {
        let (heads, dim, count) = (3, 64, 4);
        let plain = Layout::default();
        let mut floats = |shape: &[usize], number: &dyn Fn(&mut Rng) -> f64| {
            let values = Array::from_fn(shape, |_| number(rng) as f32 as f64);
            (Tensor::floats(backend, F32, &values, &plain), values)
        };
        let parts: Vec<_> = (0..count)
            .map(|_| {
                let acc = floats(&[1, heads, dim], &|rng| rng.normal());
                let m = floats(&[1, heads], &|rng| 700.0 + 3.0 * rng.normal());
                let l = floats(&[1, heads], &|rng| 1.0 + rng.normal().abs());
                (acc, m, l)
            })
            .collect();
        let state = |acc: &Tensor, m: &Tensor, l: &Tensor| vwd_attention_state { acc: acc.c(), m: m.c(), l: l.c() };
        let inputs: Vec<_> = parts.iter().map(|(acc, m, l)| state(&acc.0, &m.0, &l.0)).collect();
        let out = Tensor::poisoned(backend, F32, &[1, heads, dim], &plain);
        let call = vwd_merge_states_args { input_count: count, inputs: inputs.as_ptr(), out: out.c(), ..args() };
        // SAFETY: the tensors and the array are alive.
        backend.finish(unsafe { vwd_merge_states(backend.session(), &call, backend.stream()) });
        let found = out.read_floats();
        for h in 0..heads {
            let top = parts.iter().map(|(_, m, _)| m.1[[0, h]]).fold(f64::MIN, f64::max);
            let sum = |of: &dyn Fn(usize) -> f64| -> f64 {
                (0..count as usize).map(|n| of(n) * (parts[n].1.1[[0, h]] - top).exp()).sum()
            };
            let total = sum(&|n| parts[n].2.1[[0, h]]);
            for d in 0..dim {
                let want = sum(&|n| parts[n].0.1[[0, h, d]]) / total;
                let size = sum(&|n| parts[n].0.1[[0, h, d]].abs()) / total;
                close(found[[0, h, d]], want, 2e-6 * size, &format!("head {h}, channel {d}"));
            }
        }
    });
}

/// Parts of a list are attended without the sink, which the merge adds once.
fn merge_of_rows_with_a_sink_is_attention_with_that_sink(backend: &Backend) {
    rounds(15, |rng| {
        let spec = Spec { lists: Lists::Shared, most: 150, keep_rows: false, ..Spec::random(rng).with_sinks() };
        let model = Model::random(rng, Spec { poisoned: false, ..spec });
        let all = model.ids(rng, 0.8);
        let placed = Placed::new(backend, rng, &model);
        let count = rng.size(1..=16);
        let states: Vec<_> = (0..count)
            .map(|n| {
                let part =
                    all.map(|ids| ids.iter().copied().filter(|id| id.rem_euclid(count as i64) == n as i64).collect());
                let list = PlacedList::new(backend, rng, &model, &part);
                let results = Results::new(backend, rng, &model.spec);
                placed.attend(&placed.attention(Some(&list), &results));
                results
            })
            .collect();
        let inputs: Vec<_> = states.iter().map(|results| state_of(&results.state)).collect();
        let merged = Results::new(backend, rng, &model.spec);
        let call = vwd_merge_states_args {
            input_count: count as u32,
            inputs: inputs.as_ptr(),
            sinks: placed.attention(None, &merged).sinks,
            out: merged.out.c(),
            lse: merged.lse.c(),
            state: state_of(&merged.state),
            ..args()
        };
        // SAFETY: the tensors and the array are alive.
        backend.finish(unsafe { vwd_merge_states(backend.session(), &call, backend.stream()) });
        merged.check(&model, |i, r, g| model.list(&all, i, r, g).to_vec());
    });
}
