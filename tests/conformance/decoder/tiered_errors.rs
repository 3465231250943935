//! What a decoder on a tiered cache refuses, by the name of the argument.

use super::plain::DIM;
use super::tiered::{Cache, HEADS, KV_HEADS, LAYERS, cache_options, create_on, decoder_options, policies, rows};
use super::*;

pub const CASES: &[Case] = cases![decoder_on_a_cache_errors_name_the_argument,];

fn list_of(ids: &Tensor, counts: &Tensor, slots: &Tensor) -> vwd_block_list {
    vwd_block_list { ids: ids.c(), counts: counts.c(), slots: slots.c() }
}

fn decoder_on_a_cache_errors_name_the_argument(backend: &Backend) {
    let cache = Cache::create(backend, &cache_options());
    let of_policies = policies();
    let good = decoder_options(&of_policies);
    let on = |options: &vwd_decoder_options, cache: &Cache, pieces: &[&str]| {
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_create_on_cache(backend.session(), options, cache.0, &mut decoder) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    let create = |options: vwd_decoder_options, pieces: &[&str]| on(&options, &cache, pieces);
    create(vwd_decoder_options { layers: 4, policy_count: 0, ..good }, &["options.layers", "4", "7, as the cache"]);
    create(vwd_decoder_options { kv_heads: 4, ..good }, &["options.kv_heads", "4", "2, as the cache"]);
    create(vwd_decoder_options { key_dim: 32, ..good }, &["options.key_dim", "32", "16, as the cache"]);
    create(vwd_decoder_options { dtype_bits: 16, ..good }, &["options.dtype_code", "float16", "float32, as the cache"]);
    let none = vwd_decoder_options { dtype_code: 0, dtype_bits: 0, ..good };
    create(none, &["options.dtype_code: code 0, 0 bits", "float32, as the cache"]);
    create(vwd_decoder_options { block_size: 16, ..good }, &["options.block_size", "16", "8, as the cache"]);
    create(vwd_decoder_options { page_size: 8, ..good }, &["options.page_size", "8", "0 on a cache"]);
    create(vwd_decoder_options { pages: 8, ..good }, &["options.pages", "8", "0 on a cache"]);
    let with_term = vwd_decoder_options { remainder: 1, max_draft: 1, ..good };
    create(vwd_decoder_options { remainder: 2, ..good }, &["options.remainder: 2", "0 or 1"]);
    create(
        vwd_decoder_options { max_draft: 0, ..with_term },
        &["options.max_positions: 8, and 7 drafts", "at most 9 together on a cache with options.remainder"],
    );
    create(vwd_decoder_options { max_draft: 2, ..with_term }, &["options.max_positions: 8, and 2 drafts", "at most 9"]);
    create(with_term, &["options.policies[0].method: 1", "VWD_SELECT_AXIS"]);
    let axis = vwd_decoder_policy { method: VWD_SELECT_AXIS, ..POLICY };
    for (strategy, found) in [(VWD_STRATEGY_ASYNC_TLS, "3"), (VWD_STRATEGY_VANWARD, "5")] {
        let policy = vwd_decoder_policy { strategy, ..axis };
        create(
            vwd_decoder_options { policy_count: 0, policy, ..with_term },
            &["options.policy.strategy", found, "VWD_STRATEGY_SERIAL or SPARDA with options.remainder"],
        );
    }
    let (windowed, few) = (vwd_decoder_policy { window: 9, ..axis }, vwd_decoder_policy { k: 3, ..axis });
    create(
        vwd_decoder_options { policy_count: 0, policy: windowed, ..with_term },
        &["options.policy.window: 9", "0 with"],
    );
    drop(create_on(backend, &vwd_decoder_options { policy_count: 0, policy: few, ..with_term }, &cache));
    create(vwd_decoder_options { max_positions: 9, ..good }, &["options.max_positions", "9", "8 tokens of a block"]);
    create(vwd_decoder_options { max_rows: 6, ..good }, &["options.max_rows", "6", "5 sequences of the cache"]);
    create(vwd_decoder_options { max_rows: 4, ..good }, &["options.max_rows", "4 rows", "56 slots", "at most 42"]);
    create(vwd_decoder_options { max_sequences: 4, ..good }, &["options.max_sequences", "4", "5 sequences"]);
    let policy = |policy: vwd_decoder_policy, pieces: &[&str]| {
        create(vwd_decoder_options { policy_count: 0, policy, ..good }, pieces);
    };
    policy(vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, ..POLICY }, &["options.policy.strategy", "1", "VANWARD"]);
    policy(vwd_decoder_policy { strategy: 6, ..POLICY }, &["options.policy.strategy", "6", "VWD_STRATEGY_*"]);
    let past = vwd_decoder_policy { strategy: VWD_STRATEGY_ASYNC_TLS, ..POLICY };
    policy(vwd_decoder_policy { dense_below: 9, ..past }, &["options.policy.dense_below", "9", "0 for ASYNC_TLS"]);
    policy(vwd_decoder_policy { ratio: 1.5, ..past }, &["options.policy.ratio", "1.5", "ASYNC_TLS"]);
    policy(vwd_decoder_policy { predict: 1, ..past }, &["options.policy.predict", "1", "VANWARD"]);
    // SERIAL and SPARDA take the slots of one list of 3, and of 5 entries, ASYNC_TLS of lists of 4 and 3 entries.
    let few = Cache::create(backend, &vwd_kv_cache_options { slots: 29, ..cache_options() });
    for (strategy, rows, slots) in
        [(VWD_STRATEGY_SERIAL, 4, 24), (VWD_STRATEGY_SPARDA, 2, 20), (VWD_STRATEGY_ASYNC_TLS, 2, 28)]
    {
        let policy = vwd_decoder_policy { k: 3, strategy, ..POLICY };
        let options = vwd_decoder_options { policy_count: 0, policy, max_rows: rows, ..good };
        drop(create_on(backend, &options, &few));
        let (rows, slots) = (rows + 1, slots / rows * (rows + 1));
        let pieces = [&format!("{rows} rows"), &format!("{slots} slots"), "at most 29"];
        on(&vwd_decoder_options { max_rows: rows, ..options }, &few, &pieces);
    }

    let plain = Layout::default();

    // Without a cache its strategies are refused.
    let mut none = std::ptr::null_mut();
    let paged = vwd_decoder_options { page_size: 8, pages: 8, ..good };
    // SAFETY: the arguments are valid.
    let status = unsafe { vwd_decoder_create(backend.session(), &paged, &mut none) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["options.policies[1].strategy", "5", "without a cache"]);
    // SAFETY: as above.
    let status = unsafe { vwd_decoder_create_on_cache(backend.session(), &good, std::ptr::null(), &mut none) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["cache", "NULL"]);

    let resolve = |cap: usize| {
        let [ids, slots] = [0, 1].map(|_| Tensor::ints(backend, I32, &Array::filled(&[2, 2, cap], 0), &plain));
        let counts = Tensor::ints(backend, I32, &Array::filled(&[2, 2], 0), &plain);
        let (numbers, wanted) = (ints(backend, &[-1, -1]), list_of(&ids, &counts, &slots));
        let resolve = vwd_kv_cache_resolve_args { sequences: numbers.c(), wanted, ..args() };
        // SAFETY: the arguments are valid, and live until the stream has passed.
        let status = unsafe { vwd_kv_cache_resolve(cache.0, &resolve, backend.stream()) };
        backend.finish(VWD_OK);
        status
    };
    assert_ok(resolve(5));
    let decoder = create_on(backend, &good, &cache);
    // Its lists have up to 30 entries, which may be in use.
    assert_ok(resolve(3));
    let pieces = ["wanted.ids: 16 entries", "at most 12 in layer 0", "a decoder on the cache keep 30 slots"];
    assert_fails(resolve(4), VWD_ERROR_INVALID_ARGUMENT, &pieces);
    // The decoder keeps the cache alive.
    drop(cache);
    let (lens, table) =
        (ints(backend, &[9, 2]), Tensor::ints(backend, I32, &Array::filled(&[2, 2], 0), &Layout::default()));
    let step = vwd_decoder_step { seq_lens: lens.c(), ..args() };
    let refused = |step: vwd_decoder_step, pieces: &[&str]| {
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_begin(decoder.0, &step, backend.stream()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    refused(vwd_decoder_step { page_table: table.c(), ..step }, &["page_table", "given on a cache"]);
    decoder.begin(backend, &step);
    let floats = |heads: usize| rows(backend, [2, 1, heads], vec![0.5; 2 * heads * DIM]);
    let (q, new, out) = (floats(HEADS), floats(KV_HEADS), floats(HEADS));
    let attend = vwd_decoder_attend_args { new_k: new.c(), new_v: new.c(), q: q.c(), out: out.c(), ..args() };
    let fails = |args: vwd_decoder_attend_args, pieces: &[&str]| {
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_attend(decoder.0, &args, backend.stream()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    fails(vwd_decoder_attend_args { k: new.c(), ..attend }, &["k", "given on a cache"]);
    fails(vwd_decoder_attend_args { v: new.c(), ..attend }, &["v", "given on a cache"]);
    fails(vwd_decoder_attend_args { new_v: absent(), ..attend }, &["new_v", "NULL"]);
    fails(vwd_decoder_attend_args { new_k: q.c(), ..attend }, &["new_k", "Hk=2"]);
    fails(vwd_decoder_attend_args { layer: 7, ..attend }, &["layer", "7", "0 … 6"]);
    // Sequences that the cache does not have: nothing is written, and nothing attended.
    for layer in 0..LAYERS as u32 {
        decoder.attend(backend, &vwd_decoder_attend_args { layer, ..attend });
        assert!(out.read_floats().data.iter().all(|&x| x == 0.0), "attention of no sequence in layer {layer}");
    }
}
