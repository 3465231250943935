//! vwd_attention and vwd_repair over keys and values in INT4, against the formula in double precision.

use crate::Case;
use crate::attention_model::*;
use crate::attention_rows::{Prediction, agrees, partials_agree};
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    attention_over_int4_agrees_with_the_formula,
    attention_over_int4_with_every_option_agrees_with_the_formula,
    attention_over_slots_of_both_kinds_agrees_with_the_formula,
    attention_partials_over_int4_are_the_states_of_their_groups,
    repair_over_int4_covers_what_it_should,
    repair_exact_over_int4_is_attention_over_the_selected_blocks,
];

/// Sizes that INT4 takes, 16-bit or 32-bit tokens beside it, whole lists and dense.
pub fn plain(rng: &mut Rng) -> Spec {
    let (kv_heads, group) = rng.pick(&[(1, 1), (2, 3), (2, 4), (1, 8), (1, 12)]);
    let dim = rng.pick(&[64, 80, 96, 112, 128, 128, 128, 144, 192, 256]);
    let block: usize = rng.pick(&[16, 32, 48, 64, 64, 128]);
    let page: usize = rng.pick(&[block, 2 * block, block / 2, 16]);
    let page = if block.is_multiple_of(page) || page.is_multiple_of(block) { page } else { block };
    Spec {
        batch: rng.size(1..=3),
        kv_heads,
        group,
        dim,
        value_dim: if rng.one_in(4) { rng.pick(&[64, 80, 128, 256]) } else { dim },
        scale: Some(0.09),
        page,
        block,
        most: rng.pick(&[40, 300, 700]),
        q_type: rng.pick(&[F32, F16, BF16]),
        kv_type: rng.pick(&[F32, F16, BF16]),
        lists: rng.pick(&[Lists::Absent, Lists::Shared]),
        poisoned: rng.one_in(2),
        int4: true,
        ..Spec::default()
    }
}

/// Lists that say where their entries lie, exact or coded.
pub fn in_slots(spec: Spec) -> Spec {
    let lists = if spec.lists == Lists::Absent { Lists::Shared } else { spec.lists };
    Spec { slots: true, page: spec.block, lists, ..spec }
}

pub fn with_options(rng: &mut Rng) -> Spec {
    let mut spec = plain(rng);
    if rng.one_in(2) {
        spec = spec.with_positions(rng);
        spec.tree = rng.one_in(3);
    }
    if rng.one_in(2) {
        spec = spec.with_window(rng);
    }
    if rng.one_in(3) {
        spec = spec.with_cap(rng);
    }
    if rng.one_in(2) {
        spec = spec.with_sinks();
    }
    spec
}

fn attention_over_int4_agrees_with_the_formula(backend: &Backend) {
    rounds(30, |rng| {
        let spec = plain(rng);
        agrees(backend, rng, spec);
    });
}

fn attention_over_int4_with_every_option_agrees_with_the_formula(backend: &Backend) {
    rounds(40, |rng| {
        let spec = with_options(rng);
        agrees(backend, rng, spec);
    });
}

fn attention_over_slots_of_both_kinds_agrees_with_the_formula(backend: &Backend) {
    rounds(40, |rng| {
        let spec = with_options(rng);
        agrees(backend, rng, in_slots(spec));
    });
}

fn attention_partials_over_int4_are_the_states_of_their_groups(backend: &Backend) {
    rounds(20, |rng| {
        let group = rng.pick(&[1, 1, 2, 5]);
        let spec = Spec { most: 300, ..with_options(rng) };
        let spec = if rng.one_in(3) { in_slots(spec) } else { spec };
        partials_agree(backend, rng, spec, group);
    });
}

fn listed(rng: &mut Rng) -> Spec {
    let spec = Spec { most: 400, ..with_options(rng) };
    let spec = if rng.one_in(3) { in_slots(spec) } else { spec };
    if spec.lists == Lists::Absent { Spec { lists: Lists::Shared, ..spec } } else { spec }
}

fn repair_over_int4_covers_what_it_should(backend: &Backend) {
    rounds(20, |rng| {
        let spec = listed(rng);
        let case = Prediction::of(backend, rng, spec);
        let first = Results::new(backend, rng, &case.model.spec);
        case.placed.attend(&case.attention(0, &first));
        let results = Results::new(backend, rng, &case.model.spec);
        let mut call = case.repair(VWD_REPAIR_SUPERSET, &results);
        call.predicted_state = state_of(&first.state);
        case.placed.call_repair(&call);
        case.check(false, &results);
    });
}

/// Bit for bit on the CPU, where each entry has a partial.
fn repair_exact_over_int4_is_attention_over_the_selected_blocks(backend: &Backend) {
    rounds(20, |rng| {
        let (spec, group) = (listed(rng), rng.pick(&[1, 1, 2, 5]));
        let case = Prediction::of(backend, rng, spec);
        let spec = &case.model.spec;
        let first = Results::new(backend, rng, spec);
        let kept = partials(backend, rng, spec, case.lists[0].cap.div_ceil(group));
        let call = vwd_attention_args {
            partial_blocks: group as u32,
            partials: partials_of(&kept),
            ..case.attention(0, &first)
        };
        case.placed.attend(&call);
        let seed = rng.int(0..=i64::MAX) as u64;
        let results = Results::new(backend, &mut Rng::new(seed), spec);
        let mut call = case.repair(VWD_REPAIR_EXACT, &results);
        (call.partial_blocks, call.predicted_partials) = (group as u32, partials_of(&kept));
        case.placed.call_repair(&call);
        case.check(true, &results);
        if group == 1 && !backend.is_cuda() {
            let direct = Results::new(backend, &mut Rng::new(seed), spec);
            case.placed.attend(&case.attention(1, &direct));
            assert_eq!(results.bits(), direct.bits(), "{spec:?}");
        }
    });
}
