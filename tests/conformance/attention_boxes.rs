//! Attention by the kernels that copy whole tiles as boxes of tensors (verify128, verify128_short, verify64, verify64_short, verify256), in layouts that maps of tensors describe, in
//! layouts that they do not, where the kernels copy as they do without, and where a box ends past its page.

use crate::Case;
use crate::attention_model::*;
use crate::attention_variants::HOPPER;
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    attention_in_boxes_agrees_with_the_formula_in_any_order_of_dimensions,
    attention_in_boxes_agrees_with_the_formula_where_there_are_no_maps,
    attention_in_boxes_agrees_with_the_formula_where_a_box_ends_past_its_sequence,
    attention_in_boxes_agrees_with_the_formula_where_keys_and_values_are_interleaved,
];

/// Calls on drafts of up to 64 rows a list, chains and trees, by each kernel that copies boxes.
fn in_boxes(backend: &Backend, count: u64, case: impl Fn(&Backend, &mut Rng, Spec)) {
    let variants =
        [("verify128", 128), ("verify128_short", 128), ("verify64", 64), ("verify64_short", 64), ("verify256", 256)];
    for (variant, dim) in variants {
        let Some(backend) = backend.forcing(&format!("attention={variant}"), HOPPER) else { return };
        rounds(count, |rng| {
            let kv_type = rng.pick(&[F16, BF16]);
            // Pages of the last two end within tiles, which are not boxes then.
            let (page, block) = rng.pick(&[(16, 16), (64, 64), (64, 16), (16, 64), (8, 16), (24, 48)]);
            let (positions, group) = rng.pick(&[(9, 4), (5, 7), (16, 8)]);
            let spec = Spec {
                batch: 2,
                positions: Some(positions),
                tree: rng.one_in(3),
                kv_heads: 2,
                group,
                dim,
                value_dim: dim,
                page,
                block,
                most: rng.pick(&[100, 300]),
                q_type: kv_type,
                kv_type,
                lists: rng.pick(&[Lists::Absent, Lists::Shared, Lists::Own]),
                window: rng.pick(&[0, 0, 50]),
                aligned: true,
                ..Spec::default()
            };
            case(&backend, rng, spec);
        });
    }
}

/// Attends over random lists, with keys and values as `lay` lays them, and compares with the formula.
fn agrees<'b>(
    backend: &'b Backend,
    rng: &mut Rng,
    mut model: Model,
    lay: impl FnOnce(&mut Placed<'b>, &Model),
    kv: impl FnOnce(vwd_paged_kv) -> vwd_paged_kv,
) {
    let ids = if model.spec.lists == Lists::Absent { model.everything() } else { model.ids(rng, 0.8) };
    if model.spec.poisoned {
        model.poison(&[&ids]);
    }
    let mut placed = Placed::new(backend, rng, &model);
    lay(&mut placed, &model);
    let list = (model.spec.lists != Lists::Absent).then(|| PlacedList::new(backend, rng, &model, &ids));
    let results = Results::new(backend, rng, &model.spec);
    let kv = kv(placed.kv());
    placed.attend(&vwd_attention_args { kv: kept(kv), ..placed.attention(list.as_ref(), &results) });
    results.check(&model, |i, r, g| model.list(&ids, i, r, g).to_vec());
}

/// Lays keys and values in two layouts.
fn laid<'b>(backend: &'b Backend, [of_k, of_v]: [Layout; 2]) -> impl FnOnce(&mut Placed<'b>, &Model) {
    move |placed, model| {
        placed.k = Tensor::floats(backend, model.spec.kv_type, &model.k, &of_k);
        placed.v = Tensor::floats(backend, model.spec.kv_type, &model.v, &of_v);
    }
}

/// Steps from token to token are larger or smaller than those from head to head and from page to page; rows have gaps, or have none.
fn attention_in_boxes_agrees_with_the_formula_in_any_order_of_dimensions(backend: &Backend) {
    in_boxes(backend, 5, |backend, rng, spec| {
        let orders = [[0, 1, 2, 3], [0, 2, 1, 3], [1, 0, 2, 3], [2, 0, 1, 3], [2, 1, 0, 3]];
        let layouts = [0; 2].map(|_| Layout { gap: rng.pick(&[0, 8, 64]), ..Layout::ordered(&rng.pick(&orders)) });
        let model = Model::random(rng, spec);
        agrees(backend, rng, model, laid(backend, layouts), |kv| kv);
    });
}

/// Steps that are negative or zero.
fn attention_in_boxes_agrees_with_the_formula_where_there_are_no_maps(backend: &Backend) {
    in_boxes(backend, 5, |backend, rng, spec| {
        let is_expanded = rng.one_in(2);
        let mut model = Model::random(rng, Spec { poisoned: !is_expanded, ..spec });
        let reversed = rng.pick(&[vec![0], vec![1], vec![2], vec![0, 1, 2]]);
        let (refused, plain) = match is_expanded {
            true => (Layout { expanded: vec![2], ..Layout::default() }, Layout::default()),
            false => (Layout { reversed, ..Layout::default() }, Layout::default()),
        };
        if is_expanded {
            let of_first_head = |of: &Array<f64>| Array::from_fn(&of.shape, |at| of[[at[0], at[1], 0, at[3]]]);
            (model.k, model.v) = (of_first_head(&model.k), of_first_head(&model.v));
        }
        // One of the two suffices to be refused.
        let layouts =
            rng.pick(&[[refused.clone(), refused.clone()], [refused.clone(), plain.clone()], [plain, refused]]);
        agrees(backend, rng, model, laid(backend, layouts), |kv| kv);
    });
}

/// Caches without a page table, of lengths that are no multiple of a tile, with maps and without. Nothing lies behind the last sequence.
fn attention_in_boxes_agrees_with_the_formula_where_a_box_ends_past_its_sequence(backend: &Backend) {
    in_boxes(backend, 5, |backend, rng, spec| {
        let most: usize = rng.pick(&[17, 40, 64, 100, 205]);
        let spec = Spec { page: most, most, block: rng.pick(&[16, 32]), ..spec };
        let mut model = Model::random(rng, spec);
        let batch = model.spec.batch;
        let own = |of: &Array<f64>| {
            let shape = [&[batch], &of.shape[1..]].concat();
            Array::from_fn(&shape, |at| of[[at[0], at[1], at[2], at[3]]])
        };
        (model.k, model.v) = (own(&model.k), own(&model.v));
        model.table = Array::from_fn(&[batch, 1], |at| at[0] as i64);
        model.lens[0] = most as i64;
        model.lens[batch - 1] = most as i64;
        let reversed = rng.pick(&[vec![], vec![2]]);
        let orders = [[0, 1, 2, 3], [0, 2, 1, 3]];
        let layouts = [0; 2].map(|_| Layout { reversed: reversed.clone(), ..Layout::ordered(&rng.pick(&orders)) });
        let contiguous = |kv| vwd_paged_kv { page_table: absent(), ..kv };
        agrees(backend, rng, model, laid(backend, layouts), contiguous);
    });
}

/// Lays keys, and behind them values, along dimension `d` of one tensor.
fn interleaved<'b>(backend: &'b Backend, d: usize) -> impl FnOnce(&mut Placed<'b>, &Model) {
    move |placed, model| {
        let count = model.k.shape[d];
        let mut shape = model.k.shape.clone();
        shape[d] *= 2;
        let both = Array::from_fn(&shape, |at| {
            let mut place = [at[0], at[1], at[2], at[3]];
            place[d] %= count;
            if at[d] < count { model.k[place] } else { model.v[place] }
        });
        placed.k = Tensor::floats(backend, model.spec.kv_type, &both, &Layout::default());
    }
}

/// One tensor [pages, P, Hk, 2, 128] or [pages, 2, P, Hk, 128].
fn attention_in_boxes_agrees_with_the_formula_where_keys_and_values_are_interleaved(backend: &Backend) {
    in_boxes(backend, 4, |backend, rng, spec| {
        let model = Model::random(rng, spec);
        let d = rng.pick(&[1, 3]);
        let count = model.k.shape[d];
        let parts = |kv: vwd_paged_kv| {
            let mut k = kv.k;
            k.shape[d] = count as i64;
            let elements = k.strides[d] as usize * count;
            let v = vwd_tensor { data: k.data.cast::<u16>().wrapping_add(elements).cast(), ..k };
            vwd_paged_kv { k, v, ..kv }
        };
        let lay = interleaved(backend, d);
        agrees(backend, rng, model, lay, parts);
    });
}
