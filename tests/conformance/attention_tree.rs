//! vwd_attention and vwd_repair of draft trees.

use crate::Case;
use crate::attention_model::*;
use crate::attention_rows::{Prediction, agrees};
use crate::support::trees::Masks;
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    attention_of_a_tree_agrees_with_the_formula,
    attention_of_a_tree_within_a_window_goes_by_depth,
    attention_of_a_tree_of_many_nodes_agrees_with_the_formula,
    attention_of_a_chain_given_as_a_tree_is_attention_without,
    attention_of_a_tree_by_verify128_agrees_with_the_formula,
    attention_of_a_chain_given_as_a_tree_by_verify128_is_attention_without,
    repair_superset_of_a_tree_covers_predicted_and_selected_blocks,
    repair_exact_of_a_tree_covers_the_selected_blocks_alone,
    repair_of_a_tree_in_two_launches_attends_by_verify128,
];

/// Any call of some positions.
fn random(rng: &mut Rng) -> Spec {
    let spec = Spec::random(rng).with_positions(rng);
    let spec = if spec.slots { spec.with_slots(rng) } else { spec };
    Spec { tree: true, most: spec.most.min(200), ..spec }
}

fn attention_of_a_tree_agrees_with_the_formula(backend: &Backend) {
    rounds(40, |rng| {
        let spec = random(rng);
        agrees(backend, rng, spec);
    });
}

/// Windows below the number of nodes, some below the depth.
fn attention_of_a_tree_within_a_window_goes_by_depth(backend: &Backend) {
    rounds(20, |rng| {
        let (rows, window) = (rng.size(4..=12), rng.size(1..=14));
        let spec = Spec { positions: Some(rows), kv_heads: 1, group: 2, most: 60, ..random(rng) };
        agrees(backend, rng, Spec { window, ..spec });
    });
}

/// Masks of several words.
fn attention_of_a_tree_of_many_nodes_agrees_with_the_formula(backend: &Backend) {
    rounds(4, |rng| {
        let spec = Spec { positions: Some(rng.pick(&[32, 33, 64, 100])), batch: 2, most: 180, ..random(rng) };
        agrees(backend, rng, Spec { kv_heads: 1, group: 2, dim: 16, value_dim: 16, ..spec });
    });
}

/// Heads of 128 channels in 16 bits: trees of up to three work items of 64 rows, masks of several words, windows below and above the depth.
fn of_128_channels(rng: &mut Rng) -> Spec {
    let (positions, group) = rng.pick(&[(2, 1), (5, 4), (16, 4), (9, 7), (8, 8), (33, 2), (64, 2), (100, 1)]);
    let (page, block) = rng.pick(&[(64, 64), (16, 16), (64, 1), (96, 32), (1, 7)]);
    let kv_type = rng.pick(&[F16, BF16]);
    let q_type = rng.pick(&[kv_type, kv_type, F32]);
    let window = if rng.one_in(3) { rng.pick(&[1, 3, 20, 130]) } else { 0 };
    let spec = Spec { page, block, ..Spec::in_whole_tiles(rng) };
    let spec = if spec.slots { spec.with_slots(rng) } else { spec };
    Spec {
        batch: rng.size(1..=3),
        kv_heads: rng.size(1..=3),
        positions: Some(positions),
        q_lens: rng.one_in(2),
        group,
        most: rng.pick(&[110, 300, 700]),
        kv_type,
        q_type,
        scales: [Scales::Absent; 2],
        window,
        tree: true,
        aligned: true,
        ..spec
    }
}

fn attention_of_a_tree_by_verify128_agrees_with_the_formula(backend: &Backend) {
    let Some(backend) = backend.forcing("attention=verify128", 90..=90) else { return };
    rounds(25, |rng| {
        let spec = of_128_channels(rng);
        agrees(&backend, rng, spec);
    });
}

/// Nothing is forced but for what attends: it is the same variant.
fn repair_of_a_tree_in_two_launches_attends_by_verify128(backend: &Backend) {
    let Some(backend) = backend.forcing("attention=verify128", 90..=90) else { return };
    rounds(10, |rng| {
        let spec = of_128_channels(rng);
        let lists = if spec.lists == Lists::Absent { Lists::Own } else { spec.lists };
        let case = Prediction::of(&backend, rng, Spec { lists, ..spec });
        let [first, results] = [(); 2].map(|()| Results::new(&backend, rng, &case.model.spec));
        case.placed.attend(&case.attention(0, &first));
        let call = case.repair(VWD_REPAIR_SUPERSET, &results);
        case.placed.call_repair(&vwd_repair_args { predicted_state: state_of(&first.state), ..call });
        case.check(false, &results);
    });
}

fn attention_of_a_chain_given_as_a_tree_is_attention_without(backend: &Backend) {
    let Some(forcing) = backend.forcing("attention=general", 80..=u32::MAX) else { return };
    chain_is_attended_to_alike(&forcing, random);
}

fn attention_of_a_chain_given_as_a_tree_by_verify128_is_attention_without(backend: &Backend) {
    let Some(forcing) = backend.forcing("attention=verify128", 90..=90) else { return };
    chain_is_attended_to_alike(&forcing, of_128_channels);
}

fn chain_is_attended_to_alike(backend: &Backend, spec: impl Fn(&mut Rng) -> Spec) {
    rounds(15, |rng| {
        let spec = spec(rng);
        let mut model = Model::random(rng, spec);
        model.masks = Masks::chains(model.spec.batch, model.spec.rows());
        let ids = if model.spec.lists == Lists::Absent { model.everything() } else { model.ids(rng, 0.6) };
        let placed = Placed::new(backend, rng, &model);
        let list = (model.spec.lists != Lists::Absent).then(|| PlacedList::new(backend, rng, &model, &ids));
        let spec = Spec { keep_rows: false, ..model.spec.clone() };
        let [tree, chain] = [(); 2].map(|()| Results::new(backend, rng, &spec));
        placed.attend(&vwd_attention_args { flags: 0, ..placed.attention(list.as_ref(), &tree) });
        placed.attend(&vwd_attention_args { flags: 0, tree: absent(), ..placed.attention(list.as_ref(), &chain) });
        if backend.is_cuda() {
            // Two kernels: an assembler fuses products and sums in each as it likes.
            tree.assert_close(&chain, &model.spec);
        } else {
            assert_eq!(tree.bits(), chain.bits(), "{:?}", model.spec);
        }
    });
}

fn with_lists(rng: &mut Rng) -> Spec {
    let spec = random(rng);
    let lists = if spec.lists == Lists::Absent { Lists::Shared } else { spec.lists };
    Spec { lists, ..spec }
}

fn repair_superset_of_a_tree_covers_predicted_and_selected_blocks(backend: &Backend) {
    rounds(15, |rng| {
        let spec = with_lists(rng);
        let case = Prediction::of(backend, rng, spec);
        let [first, results] = [(); 2].map(|()| Results::new(backend, rng, &case.model.spec));
        case.placed.attend(&case.attention(0, &first));
        let call = case.repair(VWD_REPAIR_SUPERSET, &results);
        case.placed.call_repair(&vwd_repair_args { predicted_state: state_of(&first.state), ..call });
        case.check(false, &results);
    });
}

fn repair_exact_of_a_tree_covers_the_selected_blocks_alone(backend: &Backend) {
    rounds(15, |rng| {
        let spec = with_lists(rng);
        let case = Prediction::of(backend, rng, spec);
        let spec = &case.model.spec;
        let [first, results] = [(); 2].map(|()| Results::new(backend, rng, spec));
        let kept = partials(backend, rng, spec, case.lists[0].cap);
        case.placed.attend(&vwd_attention_args { partials: partials_of(&kept), ..case.attention(0, &first) });
        let call = case.repair(VWD_REPAIR_EXACT, &results);
        case.placed.call_repair(&vwd_repair_args { predicted_partials: partials_of(&kept), ..call });
        case.check(true, &results);
    });
}
