//! vwd_attention and vwd_repair of draft trees.

use crate::Case;
use crate::attention_model::*;
use crate::attention_rows::{Prediction, agrees};
use crate::support::trees::{Masks, ancestries, random_parents};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::vwd_attention;

pub const CASES: &[Case] = cases![
    attention_of_a_tree_agrees_with_the_formula,
    attention_of_a_tree_within_a_window_goes_by_depth,
    attention_of_a_tree_of_many_nodes_agrees_with_the_formula,
    attention_of_a_chain_given_as_a_tree_is_attention_without,
    attention_of_a_tree_by_verify128_agrees_with_the_formula,
    attention_of_a_tree_by_verify128_short_agrees_with_the_formula,
    attention_of_a_tree_by_verify64_agrees_with_the_formula,
    attention_of_a_tree_by_verify64_short_agrees_with_the_formula,
    attention_of_a_tree_by_verify256_agrees_with_the_formula,
    attention_of_a_chain_given_as_a_tree_by_verify128_is_attention_without,
    attention_of_a_node_within_a_tile_is_that_of_its_path_alone,
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
pub fn of_128_channels(rng: &mut Rng) -> Spec {
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

pub fn of_64_channels(rng: &mut Rng) -> Spec {
    Spec { dim: 64, value_dim: 64, ..of_128_channels(rng) }
}

pub fn of_256_channels(rng: &mut Rng) -> Spec {
    Spec { dim: 256, value_dim: 256, ..of_128_channels(rng) }
}

fn attention_of_a_tree_by_verify128_agrees_with_the_formula(backend: &Backend) {
    attend_by(backend, "verify128", of_128_channels);
}

fn attention_of_a_tree_by_verify128_short_agrees_with_the_formula(backend: &Backend) {
    attend_by(backend, "verify128_short", of_128_channels);
}

fn attention_of_a_tree_by_verify64_agrees_with_the_formula(backend: &Backend) {
    attend_by(backend, "verify64", of_64_channels);
}

fn attention_of_a_tree_by_verify64_short_agrees_with_the_formula(backend: &Backend) {
    attend_by(backend, "verify64_short", of_64_channels);
}

fn attention_of_a_tree_by_verify256_agrees_with_the_formula(backend: &Backend) {
    attend_by(backend, "verify256", of_256_channels);
}

fn attend_by(backend: &Backend, variant: &str, spec: fn(&mut Rng) -> Spec) {
    let Some(backend) = backend.forcing(&format!("attention={variant}"), 90..=90) else { return };
    rounds(25, |rng| {
        let spec = spec(rng);
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

/// Tokens that the CPU attends together: docs/trees.md promises bits for trees that lie in one such tile.
const TILE: usize = 64;

/// On the CPU the bits are those of a sequence that has the path's tokens and no others; on CUDA two kernels give them.
fn attention_of_a_node_within_a_tile_is_that_of_its_path_alone(backend: &Backend) {
    rounds(12, |rng| {
        let (heads, dim, page, nodes) =
            (rng.pick(&[[3, 1], [4, 4], [6, 2]]), rng.pick(&[16, 64]), 16, rng.size(2..=20));
        let base = rng.size(0..=9) * TILE + rng.size(0..=TILE - nodes);
        let paths: Vec<Vec<usize>> =
            ancestries(&random_parents(rng, nodes)).into_iter().map(|path| path.expect("a sound tree")).collect();
        let layout = Layout::default();
        let kv_type = rng.pick(&[F16, BF16, F32]);
        // Kernels on tensor cores round queries to the type of the keys, and weights to that of the values.
        let q = rng.normals(&[1, nodes, heads[0], dim]).map(|&x| kv_type.round(x));
        let tolerance = if backend.is_cuda() { 1e-4 + 2.0 * kv_type.epsilon() } else { 0.0 };
        let rows = [(); 2].map(|()| rng.normals(&[base + nodes, heads[1], dim]));
        // The tokens that a sequence has, by their rows, and the queries at its end.
        let attend = |tokens: &[usize], queries: &[usize], tree: Option<&Tensor>| {
            let pages = tokens.len().div_ceil(page);
            let [k, v] = rows.each_ref().map(|rows| {
                let row = |at: &[usize]| tokens.get(at[0] * page + at[1]).map_or(0.0, |&t| rows[[t, at[2], at[3]]]);
                Tensor::floats(backend, kv_type, &Array::from_fn(&[pages, page, heads[1], dim], row), &layout)
            });
            let of_queries =
                Array::from_fn(&[1, queries.len(), heads[0], dim], |at| q[[0, queries[at[1]], at[2], at[3]]]);
            let q = Tensor::floats(backend, F32, &of_queries, &layout);
            let table = Tensor::ints(backend, I32, &Array::from_fn(&[1, pages], |at| at[1] as i64), &layout);
            let lens = Tensor::ints(backend, I32, &Array::new(&[1], vec![tokens.len() as i64]), &layout);
            let out = Tensor::poisoned(backend, F32, &[1, queries.len(), heads[0], dim], &layout);
            let kv = vwd_paged_kv { k: k.c(), v: v.c(), page_table: table.c(), seq_lens: lens.c(), ..args() };
            let tree = tree.map_or(absent(), Tensor::c);
            let call = vwd_attention_args { kv: &kv, q: q.c(), out: out.c(), tree, ..args() };
            // SAFETY: the arguments are valid.
            backend.finish(unsafe { vwd_attention(backend.session(), &call, backend.stream()) });
            out.read_floats()
        };
        let words: Vec<u8> =
            paths.iter().flat_map(|path| path.iter().fold(0u32, |word, n| word | 1 << n).to_le_bytes()).collect();
        let words = Tensor::raw(backend, U32, &[1, nodes, 1], &words, &layout);
        let tokens: Vec<usize> = (0..base + nodes).collect();
        let tree = attend(&tokens, &(0..nodes).collect::<Vec<_>>(), Some(&words));
        for (n, path) in paths.iter().enumerate() {
            let alone: Vec<usize> = (0..base).chain(path.iter().map(|node| base + node)).collect();
            let alone = attend(&alone, &[n], None);
            for (h, d) in (0..heads[0]).flat_map(|h| (0..dim).map(move |d| (h, d))) {
                let (found, wanted) = (tree[[0, n, h, d]], alone[[0, 0, h, d]]);
                let alike = found.to_bits() == wanted.to_bits() || (found - wanted).abs() < tolerance;
                assert!(alike, "node {n} of {paths:?} at {base}, {kv_type:?}: {found}, not {wanted}");
            }
        }
    });
}
