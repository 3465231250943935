//! What the term is for: where keys and values are alike in a text's blocks, attention over a selection with it is closer to dense
//! attention than without.

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![attention_with_a_remainder_is_closer_to_dense_attention];

const DIM: usize = 64;
const BLOCK: usize = 16;
const BLOCKS: usize = 65;
const HEADS: usize = 2;
const GROUP: usize = 4;

/// Tokens of a text: topics of some blocks, about which keys vary, and values that go with keys and have a mean.
fn text(rng: &mut Rng) -> [Array<f64>; 2] {
    let tokens = BLOCK * BLOCKS;
    let topics = rng.normals(&[BLOCKS.div_ceil(4), HEADS, DIM]);
    let own = rng.normals(&[tokens, HEADS, DIM]);
    let keys = Array::from_fn(&[1, tokens, HEADS, DIM], |at| {
        F32.round(topics[[at[1] / (4 * BLOCK), at[2], at[3]]] + 0.5 * own[[at[1], at[2], at[3]]])
    });
    let (map, common, noise) =
        (rng.normals(&[HEADS, DIM, DIM]), rng.normals(&[HEADS, DIM]), rng.normals(&[tokens, HEADS, DIM]));
    let values = Array::from_fn(&[1, tokens, HEADS, DIM], |at| {
        let (t, g, d) = (at[1], at[2], at[3]);
        let along: f64 = (0..DIM).map(|c| map[[g, c, d]] * keys[[0, t, g, c]]).sum();
        F32.round(0.1 * along + 0.7 * common[[g, d]] + noise[[t, g, d]])
    });
    [keys, values]
}

fn attention_with_a_remainder_is_closer_to_dense_attention(backend: &Backend) {
    rounds(4, |rng| {
        let tokens = BLOCK * BLOCKS;
        let [keys, values] = text(rng);
        let float = |values: &Array<f64>| Tensor::floats(backend, F32, values, &Layout::default());
        let room = |shape: &[usize]| Tensor::poisoned(backend, F32, shape, &Layout::default());
        let (k, v) = (float(&keys), float(&values));
        let lens = Tensor::ints(backend, I32, &Array::filled(&[1], tokens as i64), &Layout::default());
        let q = float(&rng.normals(&[1, HEADS * GROUP, DIM]).map(|&x| 0.6 * x));
        let kv = || kept(vwd_paged_kv { k: k.c(), v: v.c(), seq_lens: lens.c(), ..args() });
        let axes = room(&[1, BLOCKS, HEADS, 2 * DIM]);
        let centre = float(&rng.normals(&[HEADS, DIM]));
        let index = kept(vwd_index {
            kind: VWD_INDEX_AXIS,
            block_size: BLOCK as u32,
            axes: axes.c(),
            axis_centre: centre.c(),
            ..args()
        });
        let update = vwd_index_update_args { k: k.c(), seq_lens: lens.c(), index, ..args() };
        let counted = Tensor::ints(backend, I32, &Array::filled(&[1, HEADS], 0), &Layout::default());
        let means = [(); 2].map(|()| room(&[1, HEADS, DIM]));
        let covariance = room(&[1, HEADS, DIM, DIM]);
        let zeros = float(&Array::filled(&[1, HEADS, DIM, DIM], 0.0));
        let remainder = |covariance: &Tensor| {
            kept(vwd_remainder {
                tokens: counted.c(),
                mean_k: means[0].c(),
                mean_v: means[1].c(),
                covariance: covariance.c(),
                ..args()
            })
        };
        let extend = vwd_remainder_update_args {
            block_size: BLOCK as u32,
            kv: kv(),
            remainder: remainder(&covariance),
            ..args()
        };
        let cap = 12;
        let [ids, counts] =
            [&[1, HEADS, cap][..], &[1, HEADS]].map(|s| Tensor::poisoned(backend, I32, s, &Layout::default()));
        let list = vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() };
        let log_mass = room(&[1, HEADS * GROUP]);
        let select = vwd_select_blocks_args {
            method: VWD_SELECT_AXIS,
            block_size: BLOCK as u32,
            k: cap as u32,
            init_blocks: 1,
            local_blocks: 1,
            index,
            q: q.c(),
            seq_lens: lens.c(),
            selected: list,
            log_mass: log_mass.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the calls.
        unsafe {
            backend.finish(vwd_index_update(backend.session(), &update, backend.stream()));
            backend.finish(vwd_remainder_update(backend.session(), &extend, backend.stream()));
            backend.finish(vwd_select_blocks(backend.session(), &select, backend.stream()));
        }
        let attend = |list: Option<vwd_block_list>, of: Option<&Tensor>| {
            let out = room(&[1, HEADS * GROUP, DIM]);
            let state = [room(&[1, HEADS * GROUP, DIM]), room(&[1, HEADS * GROUP]), room(&[1, HEADS * GROUP])];
            let call = vwd_attention_args {
                block_size: if list.is_some() { BLOCK as u32 } else { 0 },
                kv: kv(),
                q: q.c(),
                list: list.unwrap_or(vwd_block_list { ids: absent(), counts: absent(), slots: absent() }),
                out: out.c(),
                state: vwd_attention_state { acc: state[0].c(), m: state[1].c(), l: state[2].c() },
                remainder: of.map_or(std::ptr::null(), remainder),
                log_mass: of.map_or(absent(), |_| log_mass.c()),
                ..args()
            };
            // SAFETY: the tensors outlive the call.
            backend.finish(unsafe { vwd_attention(backend.session(), &call, backend.stream()) });
            out.read_floats()
        };
        let dense = attend(None, None);
        let error = |out: Array<f64>| {
            let square = |x: f64| x * x;
            let apart: f64 = out.data.iter().zip(&dense.data).map(|(a, b)| square(a - b)).sum();
            (apart / dense.data.iter().map(|&x| square(x)).sum::<f64>()).sqrt()
        };
        let without = error(attend(Some(list), None));
        let of_mean = error(attend(Some(list), Some(&zeros)));
        let with = error(attend(Some(list), Some(&covariance)));
        println!("relative errors: {without:.3} without, {of_mean:.3} with mean_v alone, {with:.3} with the term");
        // In a text in a few dozen the term gains nothing over mean_v.
        assert!(
            with < 0.5 * without && with < 1.05 * of_mean,
            "{without} without, {of_mean} with mean_v alone, {with} with"
        );
    });
}
