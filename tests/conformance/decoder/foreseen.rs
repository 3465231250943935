//! Foresight from one vector for each KV head, as a forecast may give it, instead of one for each query head; and from a layer's own queries.

use super::strategies::{FORESEEN, Foresight, PRR_FORESEEN, Run, assert_alike, create, shape, without_positions};
use super::*;

pub const CASES: &[Case] = cases![
    decoder_foresees_from_one_vector_for_each_kv_head,
    decoder_foresees_from_its_own_queries_what_serial_selects,
];

/// FORESEEN attends to the list that the vectors select, the one that they select as the queries of all heads of their groups; PRR repairs
/// whatever they select.
fn decoder_foresees_from_one_vector_for_each_kv_head(backend: &Backend) {
    let steps = backend.times(30);
    rounds(3, |rng| {
        // Two heads that score alike score twice as much: the order of blocks is the same, to the bit.
        let shape = Shape { heads: rng.pick(&[[2, 1], [4, 2], [6, 3]]), ..shape(rng) };
        let method = rng.pick(&[VWD_SELECT_MINMAX, VWD_SELECT_AXIS]);
        let k = rng.size(2..=4) as u32;
        let sizes = |policy| vwd_decoder_policy { method, k, ..policy };
        let by_vectors = create(backend, &shape, sizes(FORESEEN));
        let by_queries = create(backend, &shape, sizes(FORESEEN));
        let repaired = create(backend, &shape, sizes(PRR_FORESEEN));
        let serial = create(backend, &shape, sizes(POLICY));
        let all = [&by_vectors, &by_queries, &repaired, &serial];
        let mut run = Run::new(backend, rng, shape, Foresight::Wrong);
        run.weigh_last_blocks(method == VWD_SELECT_AXIS);
        let longer = vwd_decoder_policy { k: (5 * k).div_ceil(4), ..sizes(POLICY) };
        let covered = longer.k as usize * shape.block;
        let dense_where_foreseen = vwd_decoder_policy { dense_below: covered as u32 + 1, ..sizes(POLICY) };
        let mut differ = 0;
        for step in 0..steps {
            let ragged = run.ragged(rng, &all);
            let [query_heads, kv_heads] = shape.heads;
            let group = query_heads / kv_heads;
            let vectors = rng.normals(&[ragged.modes.len(), 1, kv_heads, shape.dim]).map(|&x| shape.dtype.round(x));
            let repeated = Array::from_fn(&[ragged.modes.len(), 1, query_heads, shape.dim], |at| {
                vectors[[at[0], 0, at[2] / group, at[3]]]
            });
            let [vectors, repeated] =
                [vectors, repeated].map(|values| Tensor::floats(backend, shape.dtype, &values, &Layout::default()));
            let attend = |decoder: &Decoder, q: Option<&Tensor>| {
                decoder.begin(backend, &ragged.step());
                if let Some(q) = q {
                    let args = vwd_decoder_foresee_args { q: without_positions(q), ..args() };
                    decoder.foresee(backend, std::ptr::null(), &args);
                }
                ragged.attend(&run, decoder)
            };
            let about = |what: &str| {
                format!(
                    "{shape:?}, method {method}, k {k}, step {step}, {what}; modes {:?} of {:?} tokens",
                    ragged.modes, ragged.tokens
                )
            };
            let found = attend(&by_vectors, Some(&vectors));
            let of = |policy, wanted, is_ahead| {
                let tensors = [&ragged.table, &ragged.lens];
                let strategies::Ragged { modes, counts, tokens, q, .. } = &ragged;
                compose(backend, &run.engine, policy, tensors, modes, counts, tokens, [wanted, q], is_ahead, None, F32)
                    .out
                    .read_floats()
            };
            let (ahead, late) = (of(&longer, &vectors, true), of(&dense_where_foreseen, &ragged.q, false));
            let expected = Array::from_fn(&ahead.shape, |at| {
                let at: [usize; 4] = at[..].try_into().unwrap();
                if ragged.is_new[at[0]] { late[at] } else { ahead[at] }
            });
            assert_alike(&about("foreseen"), backend, &shape, &found, &expected);
            let found = found.read_floats();
            assert_same(&about("as queries of all heads"), &attend(&by_queries, Some(&repeated)), &found);
            let expected = attend(&serial, None).read_floats();
            assert_alike(&about("repaired"), backend, &shape, &attend(&repaired, Some(&vectors)), &expected);
            differ += (found.data != expected.data) as usize;
        }
        assert!(differ > 0, "every list was that of the layer's own queries");
    });
}

/// An engine that has a layer's queries before its keys may foresee by them: by MINMAX, with lists of k blocks, that gives SERIAL's results, but where
/// the step's token begins a block, by which the foreseen list is longer.
fn decoder_foresees_from_its_own_queries_what_serial_selects(backend: &Backend) {
    let steps = backend.times(30);
    rounds(3, |rng| {
        let shape = Shape { page: 8, block: 8, pages: 256, max_pages: 40, ..shape(rng) };
        let k = rng.size(2..=3) as u32;
        let mut compared = 0;
        let sizes = |policy| vwd_decoder_policy { method: VWD_SELECT_MINMAX, k, local_blocks: 1, ..policy };
        let foreseen = create(backend, &shape, vwd_decoder_policy { ratio: 1.0, ..sizes(FORESEEN) });
        let serial = create(backend, &shape, sizes(POLICY));
        let mut run = Run::new(backend, rng, shape, Foresight::Wrong);
        for step in 0..steps {
            let ragged = run.ragged(rng, &[&foreseen, &serial]);
            let attend = |decoder: &Decoder, is_ahead: bool| {
                decoder.begin(backend, &ragged.step());
                if is_ahead {
                    let args = vwd_decoder_foresee_args { q: without_positions(&ragged.q), ..args() };
                    decoder.foresee(backend, std::ptr::null(), &args);
                }
                ragged.attend(&run, decoder)
            };
            let (found, serial) = (attend(&foreseen, true), attend(&serial, false).read_floats());
            let whole = found.read_floats();
            let begins_block = |row: usize| (ragged.tokens[row] - 1).is_multiple_of(shape.block);
            let expected = Array::from_fn(&serial.shape, |at| {
                let at: [usize; 4] = at[..].try_into().unwrap();
                if begins_block(at[0]) { whole[at] } else { serial[at] }
            });
            let is_sparse = |row: usize| !begins_block(row) && ragged.tokens[row] > k as usize * shape.block;
            compared += (0..ragged.modes.len()).filter(|&row| is_sparse(row)).count();
            assert_alike(&format!("{shape:?}, k {k}, step {step}"), backend, &shape, &found, &expected);
        }
        assert!(compared > 0, "no row was sparse");
    });
}
