//! Messages of calls that sample, verify and walk trees: where two arguments have to agree, or one may be given in several forms, they say which.

use crate::combinations::{assert_refused, leaked};
use crate::support::*;
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

pub fn verify_sample_says_what_its_arguments_follow_from() {
    let backend = &Backend::cpu(1);
    let leak = |dtype, shape: &[usize]| leaked(backend, dtype, shape);
    let call = vwd_verify_sample_args {
        draft: leak(I32, &[2, 3]),
        target: leak(F16, &[2, 4, 10]),
        draft_rows: leak(F16, &[2, 3, 8]),
        seeds: leak(U64, &[2]),
        positions: leak(I64, &[2]),
        next_token: leak(I32, &[2]),
        ..args()
    };
    let status = |call: vwd_verify_sample_args| {
        // SAFETY: the tensors live as long as the process.
        unsafe { vwd_verify_sample(backend.session(), &call, null_mut()) }
    };
    let refuses = |call, words: &str| {
        assert_refused(status(call), &[words]);
        assert!(last_error().ends_with(words), "{words:?} in {:?}", last_error());
    };
    let forgotten = vwd_verify_sample_args { draft: absent(), ..call };
    refuses(forgotten, "target: shape [2, 4, 10]; expected [B, γ+1 without draft=1, V]");
    let flat = vwd_verify_sample_args { target: leak(F16, &[8, 10]), ..call };
    refuses(flat, "target: shape [8, 10]; expected [B=2, γ+1=4, V], or target_begin beside [N, V]");
    let target = leak(F16, &[80]);
    refuses(
        vwd_verify_sample_args { target, ..call },
        "target: shape [80]; expected [B, γ+1, V], or [N, V] with target_begin",
    );
    let next_token = leak(I64, &[2]);
    refuses(
        vwd_verify_sample_args { next_token, ..call },
        "next_token: dtype int64; expected int32, the dtype of draft",
    );
    let committed = leak(I64, &[2, 4]);
    refuses(
        vwd_verify_sample_args { committed, ..call },
        "committed: dtype int64; expected int32, the dtype of next_token",
    );
    let rows = vwd_verify_sample_args { draft_rows: leak(F16, &[2, 3, 11]), ..call };
    refuses(rows, "draft_rows: 11 tokens a row; expected 1 to 10, as target has and draft_map is absent");
    let empty = vwd_verify_sample_args { draft_rows: leak(F16, &[2, 3, 0]), draft_map: leak(I32, &[10]), ..call };
    refuses(empty, "draft_rows: 0 tokens a row; expected 1 to 1048576");
    let draft_map = leak(I32, &[9]);
    refuses(vwd_verify_sample_args { draft_map, ..call }, "draft_map: shape [9]; expected [Vd of draft_rows=8]");
    let stop = leak(I32, &[2, 1, 3]);
    refuses(vwd_verify_sample_args { stop, ..call }, "stop: shape [2, 1, 3]; expected [S] or [B=2, S]");
    refuses(
        vwd_verify_sample_args { seeds: absent(), ..call },
        "seeds: data is NULL; expected a tensor, unless rule is VWD_ACCEPT_GREEDY",
    );
    let odd = vwd_tensor { data: call.seeds.data.wrapping_byte_add(4), ..call.seeds };
    assert_refused(status(vwd_verify_sample_args { seeds: odd, ..call }), &["seeds: data 0x", "a multiple of 8 bytes"]);
}

pub fn trees_say_what_their_arguments_follow_from() {
    let backend = &Backend::cpu(1);
    let leak = |dtype, shape: &[usize]| leaked(backend, dtype, shape);
    let call = vwd_verify_tree_args {
        tokens: leak(I32, &[2, 5]),
        parents: leak(I32, &[2, 5]),
        target: leak(I32, &[2, 5]),
        accepted: leak(I32, &[2]),
        path: leak(I32, &[2, 3]),
        next_token: leak(I32, &[2]),
        ..args()
    };
    let refuses = |call: vwd_verify_tree_args, words: &str| {
        // SAFETY: the tensors live as long as the process.
        assert_refused(unsafe { vwd_verify_tree(backend.session(), &call, null_mut()) }, &[words]);
        assert!(last_error().ends_with(words), "{words:?} in {:?}", last_error());
    };
    refuses(
        vwd_verify_tree_args { target: absent(), ..call },
        "target: absent, and so is logits; expected one of the two",
    );
    let flags = VWD_SAMPLE_TEMPERATURE_LAST;
    refuses(vwd_verify_tree_args { flags, ..call }, "flags: 4; expected 0 for VWD_WALK_GREEDY");
    let target = leak(I64, &[2, 5]);
    refuses(vwd_verify_tree_args { target, ..call }, "target: dtype int64; expected int32, the dtype of tokens");
    let next_token = leak(I64, &[2]);
    refuses(
        vwd_verify_tree_args { next_token, ..call },
        "next_token: dtype int64; expected int32, the dtype of tokens",
    );
    let committed = leak(I64, &[2, 3]);
    refuses(vwd_verify_tree_args { committed, ..call }, "committed: dtype int64; expected int32, the dtype of tokens");
    let sampled =
        vwd_verify_tree_args { walk: VWD_WALK_COUPLED, target: absent(), logits: leak(F16, &[2, 5, 9]), ..call };
    refuses(sampled, "seeds: data is NULL; expected a tensor, unless walk is VWD_WALK_GREEDY");

    let call = vwd_tree_prepare_args { parents: leak(I32, &[2, 5]), depths: leak(I32, &[2, 5]), ..args() };
    let refuses = |call: vwd_tree_prepare_args, words: &str| {
        // SAFETY: as above.
        assert_refused(unsafe { vwd_tree_prepare(backend.session(), &call, null_mut()) }, &[words]);
        assert!(last_error().ends_with(words), "{words:?} in {:?}", last_error());
    };
    refuses(
        vwd_tree_prepare_args { parents: absent(), ..call },
        "parents: absent, and so are first_child and next_sibling; expected parents, or both of the others",
    );
    let positions = vwd_tree_prepare_args { bases: leak(I32, &[2]), positions: leak(I64, &[2, 5]), ..call };
    refuses(positions, "positions: dtype int64; expected int32, the dtype of bases");
    let (first_child, next_sibling) = (leak(I64, &[2, 5]), leak(I32, &[2, 5]));
    refuses(
        vwd_tree_prepare_args { parents: absent(), first_child, next_sibling, ..call },
        "next_sibling: dtype int32; expected int64, the dtype of first_child",
    );
}

pub fn compact_names_the_argument_that_lies_in_a_cache() {
    let backend = &Backend::cpu(1);
    let leak = |dtype, shape: &[usize]| leaked(backend, dtype, shape);
    let caches = [leak(F16, &[2, 4, 8]), leak(I32, &[2, 4])];
    let options = vwd_compactor_options { cache_count: 2, caches: caches.as_ptr(), ..args() };
    let mut compactor = null_mut();
    // SAFETY: the pointers are valid; the caches live as long as the process.
    assert_ok(unsafe { vwd_compactor_create(backend.session(), &options, &mut compactor) });
    let call = vwd_compact_args { bases: leak(I32, &[2]), path: leak(I32, &[2, 3]), ..args() };
    let path = vwd_tensor { data: caches[1].data.wrapping_byte_add(4), ..call.path };
    for (call, name) in [
        (vwd_compact_args { path, ..call }, "path"),
        (vwd_compact_args { accepted: vwd_tensor { data: caches[1].data, ..call.bases }, ..call }, "accepted"),
    ] {
        // SAFETY: as above.
        let status = unsafe { vwd_compact(compactor, &call, null_mut()) };
        assert_refused(status, &[&format!("{name}: overlaps options.caches[1]; expected memory of its own")]);
    }
    // SAFETY: created once, released once.
    unsafe { vwd_compactor_release(compactor) };
}

pub fn verify_says_whose_dtype_is_expected() {
    let backend = &Backend::cpu(1);
    let leak = |dtype, shape: &[usize]| leaked(backend, dtype, shape);
    let call = vwd_verify_args {
        draft: leak(I32, &[2, 3]),
        target: leak(I32, &[2, 4]),
        accepted: leak(I32, &[2]),
        next_token: leak(I32, &[2]),
        ..args()
    };
    let refuses = |call: vwd_verify_args, name: &str| {
        // SAFETY: the tensors live as long as the process.
        let status = unsafe { vwd_verify(backend.session(), &call, null_mut()) };
        assert_refused(status, &[&format!("{name}: dtype int64; expected int32, the dtype of draft")]);
    };
    refuses(vwd_verify_args { target: leak(I64, &[2, 4]), ..call }, "target");
    refuses(vwd_verify_args { next_token: leak(I64, &[2]), ..call }, "next_token");
    refuses(vwd_verify_args { committed: leak(I64, &[2, 4]), ..call }, "committed");
    let flat = vwd_verify_args {
        draft: leak(I32, &[5]),
        target: leak(I32, &[5]),
        draft_ends: leak(I32, &[2]),
        bonus: leak(I32, &[2]),
        ..call
    };
    refuses(vwd_verify_args { target: leak(I64, &[5]), ..flat }, "target");
    refuses(vwd_verify_args { bonus: leak(I64, &[2]), ..flat }, "bonus");
}
