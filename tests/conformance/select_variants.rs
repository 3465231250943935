//! Every variant of selection, top-k and index updates, forced, on shapes that it takes and in layouts that its kernels take: against
//! the formula. A call that a forced variant cannot take is refused. Several variants take the same shapes, and so are compared with
//! each other.

use crate::Case;
use crate::axis::{Axes, check_bits_of};
use crate::keys_to_blocks::{Sequences, Summaries};
use crate::select::{Choice, ListTensors, MinMax, Scene, check_blocks, check_mean_softmax, none};
use crate::select_labels::{Candidates, Labels, check_mass, check_tokens};
use crate::support::*;
use crate::topk;
use std::ops::RangeInclusive;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    select_by_minmax_decode_agrees_with_the_formula,
    select_by_minmax_general_agrees_with_the_formula,
    select_by_means_agrees_with_the_formula,
    select_by_axis_two_launches_agrees_with_the_formula,
    select_by_axis_cluster_agrees_with_the_formula,
    select_by_axis_cluster_of_many_lists_agrees_with_the_formula,
    select_by_axis_general_agrees_with_the_formula,
    select_by_labels_cluster_agrees_with_the_formula,
    select_by_labels_general_agrees_with_the_formula,
    select_from_scores_by_each_variant_agrees_with_the_formula,
    select_refuses_what_a_forced_variant_cannot_take,
    topk_by_short_agrees_with_a_plain_sort,
    topk_by_prefilter_agrees_with_a_plain_sort,
    topk_by_cluster_agrees_with_a_plain_sort,
    index_axis_by_registers_has_the_bits_of_its_contract,
    index_axis_by_wide_has_the_bits_of_its_contract,
];

const ANY: RangeInclusive<u32> = 0..=u32::MAX;
const HOPPER_AND_LATER: RangeInclusive<u32> = 90..=u32::MAX;

/// `case` so many times in a session that forces variants, "select_blocks=means,select_top=top_cta": these run, and no others.
fn force(
    backend: &Backend,
    forced: &str,
    capabilities: RangeInclusive<u32>,
    count: u64,
    case: impl Fn(&Backend, &mut Rng),
) {
    let Some(backend) = backend.forcing(forced, capabilities) else { return };
    rounds(count, |rng| case(&backend, rng));
    backend.assert_ran(forced);
}

/// Ragged sequences, some of them empty, the last block rarely whole; one query position for each list.
fn scene<'b>(backend: &'b Backend, rng: &mut Rng, group: usize, dim: usize, blocks: usize) -> Scene<'b> {
    let (batch, kv_heads, block) = (rng.pick(&[1, 1, 3]), rng.pick(&[1, 2]), rng.pick(&[1, 16, 64]));
    let capacity = (block * blocks).saturating_sub(rng.size(0..=block - 1));
    let positions = rng.one_in(3).then(|| rng.size(1..=3));
    Scene::with_positions(backend, rng, [batch, kv_heads, group, dim], block, capacity, positions).with_own_lists()
}

fn aligned() -> [Layout; 2] {
    [Layout::default(), Layout::default()]
}

// --- MINMAX ----------------------------------------------------------------------------------------------------------

/// One query position, and keys of up to 128 channels in 16 bits.
fn check_minmax(backend: &Backend, rng: &mut Rng, blocks: usize) {
    let sizes = [rng.pick(&[1, 3]), rng.pick(&[1, 2]), rng.pick(&[1, 4, 7]), rng.pick(&[16, 24, 64, 128])];
    let (block, positions) = (rng.pick(&[1, 16, 64]), rng.one_in(3).then_some(1));
    let capacity = (block * blocks).saturating_sub(rng.size(0..=block - 1));
    let scene = Scene::with_positions(backend, rng, sizes, block, capacity, positions);
    let choice = Choice::random(backend, rng, scene.batch, 40);
    let dtype = rng.pick(&[F16, BF16]);
    let summaries = MinMax::placed(backend, rng, &scene, dtype, aligned(), |rng, extents| rng.normals(extents));
    check_blocks(backend, rng, &scene, &choice, summaries.args(&scene), summaries.scores(&scene), none);
}

fn select_by_minmax_decode_agrees_with_the_formula(backend: &Backend) {
    force(backend, "select_blocks=minmax_decode", ANY, 12, |backend, rng| {
        let blocks = rng.pick(&[0, 1, 40, 300]);
        check_minmax(backend, rng, blocks);
    });
}

fn select_by_minmax_general_agrees_with_the_formula(backend: &Backend) {
    force(backend, "select_blocks=minmax_general", ANY, 12, |backend, rng| {
        let blocks = rng.pick(&[0, 1, 40, 300]);
        check_minmax(backend, rng, blocks);
    });
}

// --- MEAN ------------------------------------------------------------------------------------------------------------

fn select_by_means_agrees_with_the_formula(backend: &Backend) {
    force(backend, "select_blocks=means", ANY, 12, |backend, rng| {
        let scene = Scene::random(backend, rng);
        check_mean_softmax(backend, rng, &scene);
    });
}

// --- AXIS ------------------------------------------------------------------------------------------------------------

fn check_int4(backend: &Backend, rng: &mut Rng, scene: &Scene) {
    let most = rng.pick(&[2, 40, 300]);
    let choice = Choice::random(backend, rng, scene.batch, most);
    let kinds = rng.pick(&[1, usize::MAX, usize::MAX]);
    let axes = Axes::int4(backend, rng, scene, kinds, aligned());
    check_blocks(backend, rng, scene, &choice, axes.args(scene), axes.scores(scene), none);
}

/// INT4 in every form of kernels/select/axis_tiles.cuh: heads by the four, 128 channels and others.
fn check_axis(backend: &Backend, rng: &mut Rng) {
    for (group, dim) in [(1, 128), (4, 128), (7, 128), (8, 128), (9, 128), (16, 128), (3, 64), (16, 192), (5, 256)] {
        let blocks = rng.pick(&[0, 1, 16, 17, 120, 700]);
        let scene = scene(backend, rng, group, dim, blocks);
        check_int4(backend, rng, &scene);
    }
}

fn select_by_axis_two_launches_agrees_with_the_formula(backend: &Backend) {
    force(backend, "select_blocks=axis_two_launches", HOPPER_AND_LATER, 2, check_axis);
}

fn select_by_axis_cluster_agrees_with_the_formula(backend: &Backend) {
    force(backend, "select_blocks=axis_cluster", HOPPER_AND_LATER, 2, check_axis);
}

/// More lists than there are multiprocessors, which two CTAs share.
fn select_by_axis_cluster_of_many_lists_agrees_with_the_formula(backend: &Backend) {
    force(backend, "select_blocks=axis_cluster", HOPPER_AND_LATER, 1, |backend, rng| {
        let scene = Scene::with_positions(backend, rng, [20, 8, 4, 128], 16, 16 * 20 - 3, None);
        check_int4(backend, rng, &scene);
    });
}

fn select_by_axis_general_agrees_with_the_formula(backend: &Backend) {
    force(backend, "select_blocks=axis_general", ANY, 1, check_axis);
    force(backend, "select_blocks=axis_general", ANY, 8, |backend, rng| {
        let scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let axes = Axes::random(backend, rng, &scene);
        check_blocks(backend, rng, &scene, &choice, axes.args(&scene), axes.scores(&scene), none);
    });
}

// --- LABEL_MASS ------------------------------------------------------------------------------------------------------

/// Labels in whole units, and lists whose share of a CTA ends with a block.
fn check_labels(backend: &Backend, rng: &mut Rng) {
    let kept = rng.pick(&[32, 64, 128]);
    let (group, dim, block) = (rng.pick(&[1, 4, 9, 16]), rng.pick(&[kept, 2 * kept]), rng.pick(&[1, 7, 16, 24, 64]));
    let (batch, kv_heads, capacity) = (rng.pick(&[1, 3]), rng.pick(&[1, 2]), rng.pick(&[1, 63, 512, 1100]));
    let positions = rng.one_in(3).then(|| rng.size(1..=2));
    let scene = Scene::with_positions(backend, rng, [batch, kv_heads, group, dim], block, capacity, positions);
    let scene = scene.with_own_lists();
    let labels = Labels::of(backend, rng, &scene, kept, &Layout::default());
    let blocks = capacity.div_ceil(block);
    let cap = rng.pick(&[0, 3, blocks, blocks + 3]);
    let candidates = Candidates::random(backend, rng, &scene, cap);
    let [tokens, blocks] = [60, 20].map(|most| Choice::random(backend, rng, scene.batch, most));
    check_tokens(backend, rng, &scene, &tokens, &labels, &candidates);
    check_mass(backend, rng, &scene, &blocks, &labels, &candidates);
}

fn select_by_labels_cluster_agrees_with_the_formula(backend: &Backend) {
    let forced = "select_blocks=labels_cluster,select_tokens=labels_cluster";
    force(backend, forced, HOPPER_AND_LATER, 10, check_labels);
}

fn select_by_labels_general_agrees_with_the_formula(backend: &Backend) {
    force(backend, "select_blocks=labels_general,select_tokens=labels_general", ANY, 10, check_labels);
}

// --- from scores to blocks -------------------------------------------------------------------------------------------

/// The scores of the variants that leave selection to another one.
fn select_from_scores_by_each_variant_agrees_with_the_formula(backend: &Backend) {
    for (top, capabilities) in [("top_cluster", HOPPER_AND_LATER), ("first_cta", ANY), ("top_cta", ANY)] {
        let top = |scoring: &str| format!("select_blocks={scoring},select_top={top}");
        for scoring in ["minmax_decode", "minmax_general"] {
            force(backend, &top(scoring), capabilities.clone(), 4, |backend, rng| {
                let blocks = rng.pick(&[0, 1, 300, 3000]);
                check_minmax(backend, rng, blocks);
            });
        }
        force(backend, &top("means"), capabilities.clone(), 4, |backend, rng| {
            let scene = Scene::random(backend, rng);
            check_mean_softmax(backend, rng, &scene);
        });
        force(backend, &top("axis_general"), capabilities, 4, |backend, rng| {
            let blocks = rng.pick(&[1, 120]);
            let scene = scene(backend, rng, 4, 128, blocks);
            check_int4(backend, rng, &scene);
        });
    }
}

// --- what a variant cannot take --------------------------------------------------------------------------------------

/// The kernels of AXIS in INT4 and of a cluster's labels take one query position for each list: a forced one refuses a list that
/// several share, and writes nothing.
fn select_refuses_what_a_forced_variant_cannot_take(backend: &Backend) {
    if !backend.is_cuda() {
        return;
    }
    for variant in ["axis_two_launches", "axis_cluster"] {
        let Some(forced) = backend.forcing(&format!("select_blocks={variant}"), HOPPER_AND_LATER) else { continue };
        rounds(2, |rng| {
            let scene = Scene::with_positions(&forced, rng, [2, 1, 4, 128], 16, 320, Some(2)).with_shared_lists();
            let axes = Axes::int4(&forced, rng, &scene, usize::MAX, aligned());
            let lists = ListTensors::poisoned(&forced, rng, &scene, 4);
            let args = vwd_select_blocks_args {
                block_size: 16,
                k: 4,
                q: scene.q.c(),
                seq_lens: scene.lens.c(),
                selected: lists.c(),
                ..axes.args(&scene)
            };
            // SAFETY: the tensors outlive the call.
            let status = unsafe { vwd_select_blocks(forced.session(), &args, forced.stream()) };
            let choice = format!("variant select_blocks={variant} is forced");
            assert_fails(status, VWD_ERROR_UNSUPPORTED, &[&choice, "several query positions share a list"]);
            lists.ids.assert_untouched("ids");
            lists.counts.assert_untouched("counts");
        });
    }
}

// --- top-k -----------------------------------------------------------------------------------------------------------

/// Ragged rows with ties, in each type and order.
fn check_topk(backend: &Backend, rng: &mut Rng, rows: usize, n: usize, k: usize) {
    for best_first in [false, true] {
        for dtype in [F32, F16, BF16] {
            let ties = rng.one_in(3);
            let score = |_: &[usize]| dtype.round(if ties { rng.int(-3..=3) as f64 } else { rng.normal() });
            let scores = Array::from_fn(&[rows, n], score);
            // Empty ones, whole ones, and those between.
            let lens = Array::from_fn(&[rows], |at| [n as i64, 0, rng.int(0..=n as i64)][at[0] % 3]);
            let lens = rng.one_in(2).then_some(lens);
            let budgets = rng.one_in(2).then(|| Array::from_fn(&[rows], |_| rng.int(-1..=k as i64 + 1)));
            let scene = topk::Scene { dtype, scores, lens, budgets, k, cap: k, best_first };
            scene.check(backend, [&Layout::default(), &Layout::default()]);
        }
    }
}

fn topk_by_short_agrees_with_a_plain_sort(backend: &Backend) {
    force(backend, "topk=short", ANY, 3, |backend, rng| {
        let (rows, n) = (rng.pick(&[1, 4]), rng.pick(&[1, 129, 700, 8192]));
        let k = rng.size(1..=n.min(600));
        check_topk(backend, rng, rows, n, k);
    });
}

fn topk_by_prefilter_agrees_with_a_plain_sort(backend: &Backend) {
    force(backend, "topk=prefilter", ANY, 1, |backend, rng| {
        let (rows, k) = (rng.pick(&[1, 2]), rng.pick(&[1, 128, 1000]));
        check_topk(backend, rng, rows, 20_000, k);
    });
}

fn topk_by_cluster_agrees_with_a_plain_sort(backend: &Backend) {
    force(backend, "topk=cluster", ANY, 1, |backend, rng| {
        for (rows, n) in [(4, 700), (1, 9000), (2, 20_000)] {
            let k = rng.pick(&[1, 128, 600]);
            check_topk(backend, rng, rows, n, k);
        }
    });
}

// --- index -----------------------------------------------------------------------------------------------------------

fn check_index_axis(backend: &Backend, rng: &mut Rng, fits: impl Fn(&Sequences, &Summaries) -> bool) {
    let (s, index) = std::iter::from_fn(|| {
        let s = if rng.one_in(3) { Sequences::quantised(backend, rng) } else { Sequences::random(backend, rng) };
        let index = Summaries::room(rng, &s, VWD_INDEX_AXIS);
        Some((s, index))
    })
    .find(|(s, index)| fits(s, index))
    .expect("there are such sequences");
    check_bits_of(rng, &s, &index);
}

fn index_axis_by_registers_has_the_bits_of_its_contract(backend: &Backend) {
    force(backend, "index_axis=registers", ANY, 15, |backend, rng| {
        check_index_axis(backend, rng, |s, index| s.dim <= 256 && index.block_size <= 64);
    });
}

fn index_axis_by_wide_has_the_bits_of_its_contract(backend: &Backend) {
    force(backend, "index_axis=wide", ANY, 15, |backend, rng| check_index_axis(backend, rng, |_, _| true));
}
