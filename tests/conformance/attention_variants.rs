//! Every variant of attention and repair, forced, on shapes that it takes and in layouts that its kernels take: against the formula.
//! Several variants take the same shapes, and so are compared with each other.

use crate::Case;
use crate::attention_model::*;
use crate::attention_rows::{Prediction, agrees, partials_agree};
use crate::attention_tree::{
    of_64_channels as tree_of_64_channels, of_128_channels, of_256_channels as tree_of_256_channels,
};
use crate::support::*;
use std::ops::RangeInclusive;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    attention_by_decode128_agrees_with_the_formula,
    attention_by_decode128_finds_each_token_by_its_page,
    attention_by_decode64_agrees_with_the_formula,
    attention_by_decode256_agrees_with_the_formula,
    attention_by_verify128_agrees_with_the_formula,
    attention_by_verify128_short_agrees_with_the_formula,
    attention_by_verify64_agrees_with_the_formula,
    attention_by_verify64_short_agrees_with_the_formula,
    attention_by_verify256_agrees_with_the_formula,
    attention_by_int4_128_agrees_with_the_formula,
    attention_by_int4_128_over_slots_of_both_kinds_agrees_with_the_formula,
    attention_by_int4_128_caps_the_scores_of_tokens_alone,
    attention_by_int4_verify128_agrees_with_the_formula,
    attention_by_int4_verify128_over_slots_of_both_kinds_agrees_with_the_formula,
    attention_by_int4_mma_agrees_with_the_formula,
    attention_by_int4_mma_over_slots_of_both_kinds_agrees_with_the_formula,
    attention_by_mla16_agrees_with_the_formula,
    attention_by_mla64_agrees_with_the_formula,
    attention_by_mma_agrees_with_the_formula,
    attention_by_general_agrees_with_the_formula,
    attention_to_float32_queries_is_that_to_rounded_ones_on_tensor_cores,
    repair_by_decode128_agrees_with_the_formula,
    repair_by_decode128_of_many_rows_agrees_with_the_formula,
    repair_by_verify128_agrees_with_the_formula,
    repair_by_verify128_of_more_lists_than_clusters_agrees_with_the_formula,
    repair_by_one_launch_agrees_with_the_formula,
    repair_by_two_launches_agrees_with_the_formula,
    partials_of_more_blocks_than_a_list_has_are_one_state,
    keys_that_are_nan_spoil_the_rows_that_see_them,
    repair_keeps_what_keys_that_are_nan_spoil,
    rows_past_q_lens_are_zero_where_tokens_are_nan,
    tokens_of_a_tree_that_no_row_sees_may_be_nan,
];

pub const ANY: RangeInclusive<u32> = 0..=u32::MAX;
pub const HOPPER_AND_LATER: RangeInclusive<u32> = 90..=u32::MAX;
pub const HOPPER: RangeInclusive<u32> = 90..=90;

type SpecOf = fn(&mut Rng) -> Spec;

/// Attention, and where partials fit the variant, partials, over `count` specs that it takes.
fn attend(
    backend: &Backend,
    variant: &str,
    capabilities: RangeInclusive<u32>,
    count: u64,
    spec: impl Fn(&mut Rng) -> Spec,
    has_partials: bool,
) {
    let Some(backend) = backend.forcing(&format!("attention={variant}"), capabilities) else { return };
    rounds(count, |rng| {
        let spec = Spec { aligned: true, ..spec(rng) };
        if has_partials && rng.one_in(3) {
            let group = rng.pick(&[1, 1, 2, 5]);
            partials_agree(&backend, rng, spec, group);
        } else {
            agrees(&backend, rng, spec);
        }
    });
}

/// Heads of 128 channels in whole tiles, short enough that no kernel for them is expected to be slower.
fn in_whole_tiles(rng: &mut Rng) -> Spec {
    Spec::in_whole_tiles(rng)
}

/// The same where pages end within tiles.
fn in_paged_tiles(rng: &mut Rng) -> Spec {
    let (page, block) = rng.pick(&[(1, 16), (1, 64), (2, 48), (8, 16), (24, 48), (3, 48)]);
    Spec { page, block, slots: false, ..Spec::in_whole_tiles(rng) }
}

/// Heads of 128 channels in 16 bits with up to three times 64 rows a list, as drafts have them.
fn drafts(rng: &mut Rng) -> Spec {
    let spec = in_whole_tiles(rng);
    let rows =
        [(Some(5), 4), (Some(16), 4), (Some(9), 7), (Some(3), 1), (Some(8), 8), (Some(4), 40), (None, 1), (None, 16)];
    let (positions, group) = rng.pick(&rows);
    let (page, block) =
        if spec.slots { (spec.page, spec.block) } else { rng.pick(&[(64, 64), (16, 16), (64, 1), (96, 32), (1, 7)]) };
    let q_type = rng.pick(&[F16, BF16]);
    let lists = if positions.is_none() && spec.lists == Lists::Own { Lists::Shared } else { spec.lists };
    let scales = spec.scales.map(|_| Scales::Absent);
    let (batch, kv_heads) = rng.pick(&[(1, 1), (2, 2), (5, 7)]);
    let most = if batch > 2 { 100 } else { 700 };
    Spec {
        batch,
        kv_heads,
        most,
        positions,
        group,
        page,
        block,
        q_type,
        kv_type: q_type,
        lists,
        scales,
        q_lens: spec.q_lens && positions.is_some(),
        ..spec
    }
}

fn drafts_of_64_channels(rng: &mut Rng) -> Spec {
    Spec { dim: 64, value_dim: 64, ..drafts(rng) }
}

fn drafts_of_256_channels(rng: &mut Rng) -> Spec {
    Spec { dim: 256, value_dim: 256, ..drafts(rng) }
}

/// MLA without what its kernels leave to mma.
fn latents(rng: &mut Rng, groups: &[usize]) -> Spec {
    let (dim, value_dim) = rng.pick(&[(576, 512), (576, 512), (320, 256), (264, 16)]);
    let (page, block) = rng.pick(&[(64, 64), (64, 1), (16, 1), (64, 16)]);
    let q_type = rng.pick(&[F16, BF16]);
    let spec = Spec { kv_heads: 1, group: rng.pick(groups), dim, value_dim, page, block, most: 200, ..Spec::default() };
    let lists = rng.pick(&[Lists::Absent, Lists::Shared]);
    let sinks = rng.one_in(2);
    Spec { batch: rng.size(1..=3), q_type, kv_type: q_type, scale: Some(0.05), latent: true, lists, sinks, ..spec }
}

/// What tensor cores multiply, with any option: heads of 128 channels, latents, and others.
fn multiplied(rng: &mut Rng) -> Spec {
    match rng.size(0..=2) {
        0 => in_whole_tiles(rng),
        1 => latents(rng, &[1, 16, 40]).with_positions(rng).with_window(rng),
        _ => {
            let spec = Spec::random(rng);
            let (dim, value_dim) = rng.pick(&[(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)]);
            let q_type = if spec.q_type == F32 { F16 } else { spec.q_type };
            let is_fp8 = matches!(spec.kv_type, F8E4M3 | F8E5M2);
            let kv_type = if is_fp8 { spec.kv_type } else { q_type };
            Spec { dim, value_dim, scale: Some(0.1), q_type, kv_type, ..spec }
        }
    }
}

fn attention_by_decode128_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "decode128", HOPPER_AND_LATER, 24, in_whole_tiles, true);
}

fn attention_by_decode128_finds_each_token_by_its_page(backend: &Backend) {
    attend(backend, "decode128", HOPPER_AND_LATER, 24, in_paged_tiles, true);
}

/// Heads of so many channels, up to eight rows a list, in pages that tiles end with or not.
fn up_to_8_rows(rng: &mut Rng, channels: usize) -> Spec {
    let spec = if rng.one_in(3) { in_paged_tiles(rng) } else { in_whole_tiles(rng) };
    let rows = [(None, 1), (None, 4), (None, 5), (None, 8), (Some(2), 3), (Some(4), 2), (Some(8), 1)];
    let (positions, group) = rng.pick(&rows);
    let lists = if positions.is_none() && spec.lists == Lists::Own { Lists::Shared } else { spec.lists };
    let q_lens = spec.q_lens && positions.is_some();
    // Long enough for a warp to take its ring several times.
    let most = if spec.batch == 1 { rng.pick(&[300, 5000]) } else { spec.most };
    Spec { positions, group, lists, q_lens, most, dim: channels, value_dim: channels, ..spec }
}

fn of_64_channels(rng: &mut Rng) -> Spec {
    up_to_8_rows(rng, 64)
}

fn of_256_channels(rng: &mut Rng) -> Spec {
    let spec = up_to_8_rows(rng, 256);
    Spec { kv_type: spec.q_type, scales: [Scales::Absent; 2], ..spec }
}

fn attention_by_decode64_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "decode64", HOPPER_AND_LATER, 30, of_64_channels, true);
}

fn attention_by_decode256_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "decode256", HOPPER_AND_LATER, 20, of_256_channels, true);
}

fn attention_by_verify128_agrees_with_the_formula(backend: &Backend) {
    attend_to_drafts(backend, "verify128", drafts);
}

fn attention_by_verify64_agrees_with_the_formula(backend: &Backend) {
    attend_to_drafts(backend, "verify64", drafts_of_64_channels);
}

fn attention_by_verify256_agrees_with_the_formula(backend: &Backend) {
    attend_to_drafts(backend, "verify256", drafts_of_256_channels);
}

fn attend_to_drafts(backend: &Backend, variant: &str, drafts: SpecOf) {
    attend(backend, variant, HOPPER, 20, drafts, false);
    // So many lists that each has one CTA, and so long that it takes its ring several times.
    let many = |rng: &mut Rng| {
        let (page, block) = rng.pick(&[(64, 64), (16, 16)]);
        let spec = Spec { batch: 9, kv_heads: 8, most: 1000, positions: Some(3), group: 1, page, block, ..drafts(rng) };
        Spec { lists: rng.pick(&[Lists::Absent, Lists::Shared]), slots: false, window: 0, ..spec }
    };
    attend(backend, variant, HOPPER, 2, many, false);
}

fn attention_by_verify128_short_agrees_with_the_formula(backend: &Backend) {
    attend_to_short_lists(backend, "verify128_short", drafts);
}

fn attention_by_verify64_short_agrees_with_the_formula(backend: &Backend) {
    attend_to_short_lists(backend, "verify64_short", drafts_of_64_channels);
}

fn attend_to_short_lists(backend: &Backend, variant: &str, drafts: SpecOf) {
    attend(backend, variant, HOPPER, 20, drafts, false);
    // So long that a CTA takes its ring several times.
    let long = |rng: &mut Rng| Spec { batch: 1, kv_heads: 2, most: 9000, ..drafts(rng) };
    attend(backend, variant, HOPPER, 2, long, false);
}

/// Heads of 128 channels in whole tiles, of which some tokens are coded.
pub fn in_int4(rng: &mut Rng) -> Spec {
    let block: usize = rng.pick(&[16, 32, 48, 64, 64, 128]);
    let page: usize = rng.pick(&[block, 2 * block, 16, 64]);
    let page = if block.is_multiple_of(page) || page.is_multiple_of(block) { page } else { block };
    let q_type = rng.pick(&[F16, BF16]);
    let (kv_heads, group) = rng.pick(&[(1, 1), (2, 4), (3, 3), (1, 8), (2, 7), (1, 6), (2, 12), (1, 16), (1, 20)]);
    // Up to 16 rows a list, or drafts that are verified.
    let positions = match rng.size(0..=5) {
        0 | 1 if group <= 8 => Some(16 / group.max(4)),
        2 => Some(rng.pick(&[5, 9])),
        _ => None,
    };
    let lists = rng.pick(&[Lists::Absent, Lists::Shared, if positions.is_some() { Lists::Own } else { Lists::Shared }]);
    Spec {
        batch: rng.size(1..=3),
        kv_heads,
        group,
        positions,
        q_lens: positions.is_some() && rng.one_in(2),
        dim: 128,
        value_dim: 128,
        scale: Some(0.09),
        page,
        block,
        most: rng.pick(&[40, 300, 700, 3000]),
        q_type,
        kv_type: q_type,
        lists,
        cap: rng.one_in(3).then(|| rng.pick(&[0.7, 5.0])),
        window: if rng.one_in(3) { rng.pick(&[1, 20, 100]) } else { 0 },
        sinks: rng.one_in(2),
        poisoned: rng.one_in(2),
        int4: true,
        ..Spec::default()
    }
}

/// The same, with slots that name blocks of both kinds.
pub fn in_int4_slots(rng: &mut Rng) -> Spec {
    let spec = in_int4(rng);
    let lists = if spec.lists == Lists::Absent { Lists::Shared } else { spec.lists };
    Spec { slots: true, page: spec.block, lists, ..spec }
}

fn attention_by_int4_128_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "int4_128", HOPPER_AND_LATER, 30, in_int4, false);
}

fn attention_by_int4_128_over_slots_of_both_kinds_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "int4_128", HOPPER_AND_LATER, 30, in_int4_slots, false);
}

/// A warp attends up to four tiles at a time; blocks of one tile leave the others without tokens, whatever scores are capped at.
fn attention_by_int4_128_caps_the_scores_of_tokens_alone(backend: &Backend) {
    for (group, positions) in [(4, None), (7, None), (12, None), (4, Some(9))] {
        let capped = |rng: &mut Rng| {
            let (page, block) = rng.pick(&[(16, 16), (48, 48)]);
            let spec =
                Spec { batch: 1, kv_heads: 2, group, positions, q_lens: false, page, block, most: 500, ..in_int4(rng) };
            Spec { lists: Lists::Absent, cap: Some(0.7), window: 0, ..spec }
        };
        attend(backend, "int4_128", HOPPER_AND_LATER, 6, capped, false);
    }
}

/// As many rows as a verification of drafts has, chains and trees, of each type of queries that is taken.
pub fn int4_drafts(rng: &mut Rng) -> Spec {
    let spec = in_int4(rng);
    let q_type = if rng.one_in(4) { F32 } else { spec.q_type };
    let positions = rng.pick(&[1, 5, 9, 16, 17, 40]);
    Spec { q_type, positions: Some(positions), tree: rng.one_in(3), group: rng.pick(&[1, 4, 7]), ..spec }
}

fn attention_by_int4_verify128_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "int4_verify128", HOPPER, 40, int4_drafts, false);
    // Sequences of so many stages that several are noted together.
    let long = |rng: &mut Rng| Spec { batch: 1, kv_heads: 1, most: 40_000, lists: Lists::Absent, ..int4_drafts(rng) };
    attend(backend, "int4_verify128", HOPPER, 1, long, false);
}

fn attention_by_int4_verify128_over_slots_of_both_kinds_agrees_with_the_formula(backend: &Backend) {
    let in_slots = |rng: &mut Rng| Spec { q_type: F16, kv_type: F16, ..in_int4_slots(rng) };
    attend(backend, "int4_verify128", HOPPER, 30, in_slots, false);
}

/// Heads of any width that INT4 takes, as few and as many rows as a CTA has warps for, and queries of each type that is taken.
pub fn in_int4_of_any_width(rng: &mut Rng) -> Spec {
    let spec = if rng.one_in(3) { int4_drafts(rng) } else { in_int4(rng) };
    let widths =
        [(64, 64), (64, 64), (80, 80), (96, 96), (112, 64), (128, 128), (144, 144), (192, 128), (256, 256), (128, 256)];
    let (dim, value_dim) = rng.pick(&widths);
    let most = rng.pick(&[40, 300, 700, 2000]);
    Spec { dim, value_dim, batch: spec.batch.min(2), most, tree: false, ..spec }
}

fn attention_by_int4_mma_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "int4_mma", ANY, 40, in_int4_of_any_width, true);
    // So long that a warp takes its ring several times, and finds several times where tokens lie.
    let long = |rng: &mut Rng| {
        let (dim, rows) = rng.pick(&[(64, 1), (128, 4), (256, 1)]);
        let positions = Some(rows * 16);
        let spec =
            Spec { batch: 1, kv_heads: 1, group: 4, positions, dim, value_dim: dim, ..in_int4_of_any_width(rng) };
        Spec { most: 6000, lists: Lists::Absent, window: 0, q_lens: false, ..spec }
    };
    attend(backend, "int4_mma", ANY, 2, long, false);
}

fn attention_by_int4_mma_over_slots_of_both_kinds_agrees_with_the_formula(backend: &Backend) {
    let in_slots = |rng: &mut Rng| {
        let spec = in_int4_of_any_width(rng);
        let lists = if spec.lists == Lists::Absent { Lists::Shared } else { spec.lists };
        Spec { slots: true, page: spec.block, lists, ..spec }
    };
    attend(backend, "int4_mma", ANY, 30, in_slots, true);
}

fn attention_by_mla16_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "mla16", HOPPER_AND_LATER, 8, |rng| latents(rng, &[1, 16, 40, 128]), false);
}

fn attention_by_mla64_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "mla64", HOPPER, 8, |rng| latents(rng, &[1, 16, 40, 128]), false);
}

fn attention_by_mma_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "mma", ANY, 16, |rng| Spec { most: 150, ..multiplied(rng) }, false);
    attend(backend, "mma", ANY, 8, in_whole_tiles, true);
}

fn attention_by_general_agrees_with_the_formula(backend: &Backend) {
    attend(backend, "general", ANY, 12, |rng| Spec { most: 80, ..multiplied(rng) }, false);
}

fn attention_to_float32_queries_is_that_to_rounded_ones_on_tensor_cores(backend: &Backend) {
    let of_any_width = |rng: &mut Rng| {
        let (dim, value_dim) = rng.pick(&[(64, 64), (80, 80), (192, 128), (256, 256)]);
        Spec { dim, value_dim, scale: Some(0.1), most: 150, ..in_whole_tiles(rng) }
    };
    type Of<'a> = &'a dyn Fn(&mut Rng) -> Spec;
    let variants: [(&str, _, Of); 7] = [
        ("decode128", HOPPER_AND_LATER, &in_whole_tiles),
        ("decode64", HOPPER_AND_LATER, &of_64_channels),
        ("decode256", HOPPER_AND_LATER, &of_256_channels),
        ("verify128", HOPPER, &drafts),
        ("verify64", HOPPER, &drafts_of_64_channels),
        ("verify256", HOPPER, &drafts_of_256_channels),
        ("mma", ANY, &of_any_width),
    ];
    for (variant, capabilities, spec) in variants {
        let Some(backend) = backend.forcing(&format!("attention={variant}"), capabilities) else { continue };
        rounds(8, |rng| {
            let kv_type = rng.pick(&[F16, BF16]);
            let scales = [Scales::Absent; 2];
            let spec = Spec { q_type: F32, kv_type, scales, aligned: true, ..spec(rng) };
            let mut model = Model::random(rng, spec);
            model.q = model.q.map(|x| F32.round(x * 1.001));
            let placed = Placed::new(&backend, rng, &model);
            let rounded = model.q.map(|&x| kv_type.round(x));
            let shape = model.spec.shape(&[model.spec.heads(), model.spec.dim]);
            let rounded = Tensor::floats(&backend, kv_type, &Array::new(&shape, rounded.data), &Layout::default());
            let list = (model.spec.lists != Lists::Absent).then(|| {
                let ids = model.ids(rng, 0.5);
                PlacedList::new(&backend, rng, &model, &ids)
            });
            let results = [0; 2].map(|_| Results::new(&backend, &mut Rng::new(5), &model.spec));
            let [wide, narrow] = results.each_ref().map(|results| placed.attention(list.as_ref(), results));
            placed.attend(&wide);
            placed.attend(&vwd_attention_args { q: rounded.c(), ..narrow });
            let [wide, narrow] = results.each_ref().map(Results::bits);
            assert!(wide == narrow, "{variant}: {:?}", model.spec);
        });
    }
    let wide = |rng: &mut Rng| {
        let spec = drafts(rng);
        Spec { q_type: F32, most: if spec.block < 16 { 150 } else { spec.most }, ..spec }
    };
    repair(backend, "verify128", HOPPER, 1, 4, wide);
}

/// Both modes of repair by a variant, over `count` specs that it takes.
fn repair(
    backend: &Backend,
    variant: &str,
    capabilities: RangeInclusive<u32>,
    group: usize,
    count: u64,
    spec: impl Fn(&mut Rng) -> Spec,
) {
    let Some(backend) = backend.forcing(&format!("repair={variant}"), capabilities) else { return };
    rounds(count, |rng| {
        let spec = spec(rng);
        let lists = if spec.lists == Lists::Absent { Lists::Shared } else { spec.lists };
        let case = Prediction::of(&backend, rng, Spec { aligned: true, lists, ..spec });
        let spec = &case.model.spec;
        let results = || Results::new(&backend, &mut Rng::new(5), spec);
        let first = results();
        let kept = partials(&backend, rng, spec, case.lists[0].cap.div_ceil(group));
        let call = vwd_attention_args {
            partial_blocks: group as u32,
            partials: partials_of(&kept),
            ..case.attention(0, &first)
        };
        case.placed.attend(&call);
        let exact = results();
        let call = case.repair(VWD_REPAIR_EXACT, &exact);
        let predicted_partials = partials_of(&kept);
        case.placed.call_repair(&vwd_repair_args { partial_blocks: group as u32, predicted_partials, ..call });
        case.check(true, &exact);
        let superset = results();
        let call = case.repair(VWD_REPAIR_SUPERSET, &superset);
        case.placed.call_repair(&vwd_repair_args { predicted_state: state_of(&first.state), ..call });
        case.check(false, &superset);
    });
}

/// Up to eight rows a list.
fn few_rows(rng: &mut Rng) -> Spec {
    let (positions, group) = rng.pick(&[(None, 1), (None, 4), (None, 7), (Some(2), 3), (Some(2), 4)]);
    let spec = in_whole_tiles(rng);
    let lists = if positions.is_none() && spec.lists == Lists::Own { Lists::Shared } else { spec.lists };
    // Slots have no end: with them a sequence could have more blocks than decode128 counts.
    Spec { positions, group, lists, q_lens: spec.q_lens && positions.is_some(), slots: false, most: 200, ..spec }
}

fn repair_by_decode128_agrees_with_the_formula(backend: &Backend) {
    repair(backend, "decode128", HOPPER_AND_LATER, 1, 10, few_rows);
}

/// More than eight rows a list: blocks of eight, the last of which may have fewer.
fn more_rows(rng: &mut Rng) -> Spec {
    let (positions, group) = rng.pick(&[
        (None, 12),
        (None, 40),
        (Some(3), 3),
        (Some(4), 4),
        (Some(9), 1),
        (Some(9), 4),
        (Some(5), 7),
        (Some(16), 4),
        (Some(3), 13),
    ]);
    let (batch, kv_heads) = rng.pick(&[(1, 1), (1, 8), (2, 2), (3, 23)]);
    let spec = in_whole_tiles(rng);
    let lists = if positions.is_none() && spec.lists == Lists::Own { Lists::Shared } else { spec.lists };
    let most = if batch > 2 { 60 } else { 300 };
    Spec {
        positions,
        group,
        batch,
        kv_heads,
        lists,
        q_lens: spec.q_lens && positions.is_some(),
        slots: false,
        most,
        ..spec
    }
}

fn repair_by_decode128_of_many_rows_agrees_with_the_formula(backend: &Backend) {
    repair(backend, "decode128", HOPPER_AND_LATER, 1, 10, more_rows);
}

fn repair_by_verify128_agrees_with_the_formula(backend: &Backend) {
    // Partials of single tokens are large.
    let short = |rng: &mut Rng| {
        let spec = drafts(rng);
        Spec { most: if spec.block < 16 { 150 } else { spec.most }, ..spec }
    };
    repair(backend, "verify128", HOPPER, 1, 12, short);
    repair(backend, "verify128", HOPPER, 3, 6, short);
}

/// Each list has one CTA, which attends to more tokens than its shared memory holds at once, for more rows than it has warps.
fn repair_by_verify128_of_more_lists_than_clusters_agrees_with_the_formula(backend: &Backend) {
    repair(backend, "verify128", HOPPER, 1, 4, |rng| {
        let positions = Some(rng.pick(&[3, 9]));
        let (page, block) = rng.pick(&[(64, 64), (16, 16)]);
        let spec = Spec { batch: 1, kv_heads: 67, most: 600, positions, group: 4, page, block, ..drafts(rng) };
        Spec { lists: Lists::Shared, slots: false, ..spec }
    });
}

fn repair_by_one_launch_agrees_with_the_formula(backend: &Backend) {
    repair(backend, "one_launch", HOPPER_AND_LATER, 1, 10, few_rows);
    repair(backend, "one_launch", HOPPER_AND_LATER, 3, 10, |rng| Spec { most: 200, ..in_whole_tiles(rng) });
}

fn repair_by_two_launches_agrees_with_the_formula(backend: &Backend) {
    repair(backend, "two_launches", ANY, 1, 10, few_rows);
}

/// The list has a few entries; a partial of more blocks is the state of all of them.
fn partials_of_more_blocks_than_a_list_has_are_one_state(backend: &Backend) {
    for group in [1000, 100_000, 536_870_913, 2_147_483_649, u32::MAX as usize] {
        let rng = &mut Rng::new(group as u64);
        let spec = Spec { most: 100, batch: 2, kv_heads: 2, block: 16, page: 16, slots: false, ..in_whole_tiles(rng) };
        partials_agree(backend, rng, Spec { aligned: true, ..spec.clone() }, group);
        // A block that is longer than any sequence.
        let block = 4096;
        partials_agree(backend, rng, Spec { aligned: true, block, lists: Lists::Shared, ..spec }, group);
    }
}

/// Some runs of keys are NaN, of few heads.
fn with_nan_keys(spec: Spec) -> Spec {
    let (batch, kv_heads) = (spec.batch.min(2), spec.kv_heads.min(2));
    Spec { nan_keys: true, slots: false, window: 0, batch, kv_heads, most: 400, ..spec }
}

/// Where a warp, a CTA or a chunk has such keys alone, there is no maximum to say that it has any.
fn keys_that_are_nan_spoil_the_rows_that_see_them(backend: &Backend) {
    let variants: [(&str, RangeInclusive<u32>, SpecOf); 12] = [
        ("decode128", HOPPER_AND_LATER, in_whole_tiles),
        ("decode64", HOPPER_AND_LATER, of_64_channels),
        ("decode256", HOPPER_AND_LATER, of_256_channels),
        ("verify128", HOPPER, drafts),
        ("verify128_short", HOPPER, drafts),
        ("verify64", HOPPER, drafts_of_64_channels),
        ("verify64_short", HOPPER, drafts_of_64_channels),
        ("verify256", HOPPER, drafts_of_256_channels),
        ("mla16", HOPPER_AND_LATER, |rng| latents(rng, &[16])),
        ("mla64", HOPPER, |rng| latents(rng, &[16])),
        ("mma", ANY, in_whole_tiles),
        ("general", ANY, in_whole_tiles),
    ];
    for (variant, capabilities, spec) in variants {
        attend(backend, variant, capabilities, 3, |rng| with_nan_keys(spec(rng)), false);
    }
}

/// The same where a kept state is of such keys alone.
fn repair_keeps_what_keys_that_are_nan_spoil(backend: &Backend) {
    let variants: [(&str, RangeInclusive<u32>, SpecOf); 4] = [
        ("decode128", HOPPER_AND_LATER, few_rows),
        ("verify128", HOPPER, drafts),
        ("one_launch", HOPPER_AND_LATER, few_rows),
        ("two_launches", ANY, few_rows),
    ];
    for (variant, capabilities, spec) in variants {
        let in_blocks = |rng: &mut Rng| Spec { page: 64, block: 64, ..with_nan_keys(spec(rng)) };
        repair(backend, variant, capabilities, 1, 6, in_blocks);
    }
}

/// Weights of such rows are zero, and zero times NaN is NaN.
fn rows_past_q_lens_are_zero_where_tokens_are_nan(backend: &Backend) {
    let latent = Spec { kv_heads: 1, group: 64, dim: 576, value_dim: 512, latent: true, page: 64, ..Spec::default() };
    let head = Spec { kv_heads: 2, group: 4, dim: 128, value_dim: 128, ..Spec::default() };
    for spec in [latent, Spec { group: 2, ..head.clone() }, head] {
        let rng = &mut Rng::new(9);
        let options = Spec { positions: Some(4), q_lens: true, sinks: true, window: 128, cap: Some(5.0), ..spec };
        let lists = Lists::Shared;
        let spec = Spec { batch: 1, block: 16, scale: Some(0.05), lists, poisoned: false, aligned: true, ..options };
        let (q_type, kv_type) = (BF16, BF16);
        let mut model = Model::random(rng, Spec { q_type, kv_type, ..spec });
        (model.lens, model.q_lens) = (vec![222], vec![2]);
        for t in [220, 221] {
            let Some([page, row, _]) = model.place(0, 0, t) else { panic!("another seed, please") };
            for g in 0..model.spec.kv_heads {
                model.k[[page, row, g, 3]] = f64::NAN;
                model.v[[page, row, g, 3]] = f64::NAN;
            }
        }
        let ids = Array::from_fn(&[1, 1, model.spec.kv_heads], |_| (0..14).collect());
        let placed = Placed::new(backend, rng, &model);
        let list = PlacedList::new(backend, rng, &model, &ids);
        let results = Results::new(backend, rng, &model.spec);
        let kept = partials(backend, rng, &model.spec, list.cap);
        let call = placed.attention(Some(&list), &results);
        placed.attend(&call);
        let is_zero = |t: &Tensor| {
            let all = t.read_floats();
            let of_row = all.data.len() / 4;
            assert!(all.data[2 * of_row..].iter().all(|&x| x == 0.0), "{:?}", model.spec);
        };
        is_zero(&results.out);
        is_zero(&results.state[0]);
        if !model.spec.latent {
            placed.attend(&vwd_attention_args { partials: partials_of(&kept), partial_blocks: 1, ..call });
            is_zero(&results.out);
            let acc = Array::new(&[4, 2 * model.spec.group, list.cap, 128], kept[0].read_floats().data);
            for at in array::indices(&[2, 2 * model.spec.group, 14, 128]) {
                assert_eq!(acc[[at[0] + 2, at[1], at[2], at[3]]], 0.0, "partial {at:?}");
            }
        }
    }
}

/// A list of one row of a tree may name tokens of other paths, and a window may hide some of its own: they are not multiplied by a weight of zero.
fn tokens_of_a_tree_that_no_row_sees_may_be_nan(backend: &Backend) {
    type Of = fn(&mut Rng) -> Spec;
    let variants: [(&str, RangeInclusive<u32>, Of); 7] = [
        ("general", ANY, of_128_channels),
        ("verify128", HOPPER, of_128_channels),
        ("verify128_short", HOPPER, of_128_channels),
        ("verify64", HOPPER, tree_of_64_channels),
        ("verify64_short", HOPPER, tree_of_64_channels),
        ("verify256", HOPPER, tree_of_256_channels),
        ("int4_verify128", HOPPER, int4_drafts),
    ];
    for (variant, capabilities, spec) in variants {
        let Some(forced) = backend.forcing(&format!("attention={variant}"), capabilities) else { continue };
        rounds(6, |rng| {
            let window = rng.pick(&[0, 0, 1, 3]);
            let spec = Spec { positions: Some(16), group: 4, batch: 2, kv_heads: 2, ..spec(rng) };
            let spec = Spec { tree: true, q_lens: false, window, slots: false, aligned: true, ..spec };
            let mut model = Model::random(rng, Spec { lists: Lists::Own, ..spec });
            let all = model.ids(rng, 1.0);
            // All tokens are in the last row's list, and none in the others'.
            let ids =
                Array::from_fn(&all.shape, |at| if at[1] == 15 { all[[at[0], at[1], at[2]]].clone() } else { vec![] });
            model.poison(&[&ids]);
            let placed = Placed::new(&forced, rng, &model);
            let list = PlacedList::new(&forced, rng, &model, &ids);
            let results = Results::new(&forced, rng, &model.spec);
            placed.attend(&placed.attention(Some(&list), &results));
            results.check(&model, |i, r, g| model.list(&ids, i, r, g).to_vec());
        });
    }
}
