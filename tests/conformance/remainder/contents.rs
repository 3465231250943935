//! What a session that checks contents says of rows, lengths and centres.

use crate::Case;
use crate::contents::{Input, check};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![contents_of_a_remainder_are_checked, contents_of_a_centre_are_checked];

fn contents_of_a_remainder_are_checked(backend: &Backend) {
    let room = |shape: &[usize]| Tensor::floats(backend, F32, &Array::filled(shape, 1.0), &Layout::default());
    let (k, v) = (room(&[4, 8, 1, 16]), room(&[4, 8, 1, 16]));
    let table = Input::ints(backend, &[2, 2], &[0, 3, 1, -1]);
    let lens = Input::ints(backend, &[2], &[16, 5]);
    let begin = Input::ints(backend, &[2], &[8, 0]);
    let rows = Input::ints(backend, &[2], &[2, -1]);
    let tokens = Input::ints(backend, &[3, 1], &[0, 0, 4]);
    let means = [room(&[3, 1, 16]), room(&[3, 1, 16])];
    let covariance = room(&[3, 1, 16, 16]);
    let kv = kept(vwd_paged_kv { k: k.c(), v: v.c(), page_table: table.c(), seq_lens: lens.c(), ..args() });
    let remainder = kept(vwd_remainder {
        rows: rows.c(),
        tokens: tokens.c(),
        mean_k: means[0].c(),
        mean_v: means[1].c(),
        covariance: covariance.c(),
        ..args()
    });
    let q = room(&[2, 2, 16]);
    let ids = Input::ints(backend, &[2, 1, 2], &[0, 3, 1, 0]);
    let counts = Input::ints(backend, &[2, 1], &[2, 1]);
    let log_mass = Input::floats(backend, &[2, 2], &[0.5, f64::NEG_INFINITY, f64::NAN, 1.0]);
    let out = Tensor::poisoned(backend, F32, &[2, 2, 16], &Layout::default());
    let state = [&[2, 2, 16][..], &[2, 2], &[2, 2]].map(|s| Tensor::poisoned(backend, F32, s, &Layout::default()));
    let attention = vwd_attention_args {
        block_size: 4,
        kv,
        q: q.c(),
        list: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
        out: out.c(),
        state: vwd_attention_state { acc: state[0].c(), m: state[1].c(), l: state[2].c() },
        remainder,
        log_mass: log_mass.c(),
        ..args()
    };
    let wrong = [
        (&rows, 0, 3.0, "remainder.rows[0]: 3; expected −1 or 0 to 2"),
        (&rows, 1, -2.0, "remainder.rows[1]: −2; expected −1 or 0 to 2"),
    ];
    let [acc, m, l] = &state;
    // SAFETY: the tensors outlive the calls.
    check(backend, &[&out, acc, m, l], &wrong, |session, stream| unsafe { vwd_attention(session, &attention, stream) });
    let update = vwd_remainder_update_args { block_size: 4, kv, begin: begin.c(), remainder, ..args() };
    let wrong = [
        (&lens, 0, 17.0, "kv.seq_lens[0]: 17; expected 0 to 16"),
        (&begin, 1, 6.0, "begin[1]: 6; expected 0 to 5"),
        (&table, 1, 4.0, "kv.page_table[0, 1]: 4; expected −1 or 0 to 3"),
        (&rows, 0, 3.0, "remainder.rows[0]: 3; expected −1 or 0 to 2"),
        (&rows, 1, 2.0, "remainder.rows[1]: 2; expected a number that [0] does not have, too"),
    ];
    let checked = backend.checking();
    for (input, at, value, message) in wrong {
        // SAFETY: as above.
        let refused = || unsafe { vwd_remainder_update(checked.session(), &update, backend.stream()) };
        assert_eq!(input.with(at, value, refused), VWD_ERROR_INVALID_ARGUMENT, "{message}");
        assert_eq!(last_error(), message);
    }
    // SAFETY: as above.
    backend.finish(unsafe { vwd_remainder_update(checked.session(), &update, backend.stream()) });
    assert_eq!(tokens.tensor.read_ints().data, [0, 0, 12], "three blocks behind the first");
}

fn contents_of_a_centre_are_checked(backend: &Backend) {
    let axes = Tensor::floats(backend, F32, &Array::filled(&[1, 3, 1, 32], 0.25), &Layout::default());
    let centre = Input::floats(backend, &[1, 16], &[0.5; 16]);
    let (q, lens) = (Input::floats(backend, &[1, 1, 16], &[1.0; 16]), Input::ints(backend, &[1], &[12]));
    let [ids, counts] = [&[1, 1, 1][..], &[1, 1]].map(|s| Tensor::poisoned(backend, I32, s, &Layout::default()));
    let log_mass = Tensor::poisoned(backend, F32, &[1, 1], &Layout::default());
    let index = vwd_index { kind: VWD_INDEX_AXIS, block_size: 4, axes: axes.c(), axis_centre: centre.c(), ..args() };
    let call = vwd_select_blocks_args {
        method: VWD_SELECT_AXIS,
        block_size: 4,
        k: 1,
        index: kept(index),
        q: q.c(),
        seq_lens: lens.c(),
        selected: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
        log_mass: log_mass.c(),
        ..args()
    };
    let wrong = [(&centre, 3, f64::NAN, "index.axis_centre[0, 3]: NaN; expected a finite number")];
    check(backend, &[&ids, &counts, &log_mass], &wrong, |session, stream| {
        // SAFETY: the tensors outlive the call.
        unsafe { vwd_select_blocks(session, &call, stream) }
    });
}
