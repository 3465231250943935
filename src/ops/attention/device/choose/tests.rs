use super::*;
use crate::runtime::cuda::variants::{VariantList, check_docs, choose};

const H200: Device = Device {
    multiprocessors: 132,
    shared_bytes: 227 << 10,
    runs_decode128: true,
    runs_verify128: true,
    runs_verify_short: true,
    runs_mla16: true,
    runs_mla64: true,
    runs_int4_128: true,
    runs_int4_verify128: true,
};
pub const SIZES: Sizes = Sizes {
    element: Some(Element::F16),
    dim: 128,
    value_dim: 128,
    kv_heads: 8,
    rows: 4,
    lists: 8,
    sequence_lists: 8,
    invariant_batch: 0,
    list_tokens: 2048,
    window_tokens: u64::MAX,
    units: 128,
    unit_tiles: 1,
};
const NOTHING: Options = Options {
    positions: false,
    q_lens: false,
    lists: true,
    own_lists: false,
    slots: false,
    window: false,
    soft_cap: false,
    sinks: false,
    partials: false,
    start: false,
    scales_per_token: false,
    values_are_keys: false,
    wide_queries: false,
    is_far: false,
    far_pages: false,
    rows_of_16_bytes: true,
    near_strides: true,
    whole_tiles: true,
    paged_tiles: false,
    tree: false,
    int4: None,
};
const MLA: Sizes = Sizes { dim: 576, value_dim: 512, kv_heads: 1, rows: 16, lists: 4, ..SIZES };
const LATENTS: Options = Options { values_are_keys: true, ..NOTHING };

fn chosen(device: &Device, sizes: &Sizes, options: &Options) -> Variant {
    choose(None, |variant| fit(variant, device, sizes, options)).unwrap()
}

#[test]
fn batch_invariant_sessions_choose_by_the_batch_that_they_are_made_for() {
    let of = |lists, invariant_batch, list_tokens, has_lists| {
        let sizes = Sizes { lists, invariant_batch, list_tokens, units: list_tokens / 16, ..SIZES };
        chosen(&H200, &sizes, &Options { lists: has_lists, ..NOTHING })
    };
    // Lists of several sequences that are longer than 12K tokens may differ in length.
    assert_eq!([8, 800].map(|lists| of(lists, 0, 16 << 10, true)), [Variant::Decode128, Variant::Verify128]);
    assert_eq!([8, 800].map(|lists| of(lists, 1, 16 << 10, true)), [Variant::Decode128; 2]);
    assert_eq!([8, 800].map(|lists| of(lists, 2, 16 << 10, true)), [Variant::Mma; 2]);
    // One kernel takes all tokens of any number of rows, and of any length.
    for rows in [1, 4, 36, 64, 80] {
        for list_tokens in [1 << 10, 1 << 13, 1 << 17] {
            let sizes = Sizes { rows, invariant_batch: 4, list_tokens, units: list_tokens / 16, ..SIZES };
            assert_eq!(chosen(&H200, &sizes, &Options { lists: false, ..NOTHING }), Variant::Verify128);
        }
    }
}

#[test]
fn heads_of_128_channels_in_whole_tiles_take_decode128() {
    let of = |sizes: Sizes, options: Options| chosen(&H200, &sizes, &options);
    assert_eq!(of(SIZES, NOTHING), Variant::Decode128);
    assert_eq!(of(Sizes { element: Some(Element::Fp8), rows: 16, ..SIZES }, NOTHING), Variant::Decode128);
    let all = Options { positions: true, q_lens: true, window: true, soft_cap: true, sinks: true, ..NOTHING };
    assert_eq!(of(SIZES, Options { slots: true, own_lists: true, partials: true, ..all }), Variant::Decode128);
    assert_eq!(of(Sizes { rows: 17, ..SIZES }, NOTHING), Variant::Verify128Short);
    assert_eq!(of(Sizes { rows: 17, list_tokens: 1 << 15, ..SIZES }, NOTHING), Variant::Verify128);
    assert_eq!(of(Sizes { rows: 17, element: Some(Element::Fp8), ..SIZES }, NOTHING), Variant::Mma);
    assert_eq!(of(Sizes { rows: 17, ..SIZES }, Options { partials: true, ..NOTHING }), Variant::Mma);
    assert_eq!(of(Sizes { dim: 120, ..SIZES }, NOTHING), Variant::Mma);
    assert_eq!(of(SIZES, Options { whole_tiles: false, ..NOTHING }), Variant::Mma);
    assert_eq!(of(SIZES, Options { whole_tiles: false, paged_tiles: true, ..NOTHING }), Variant::Decode128);
    assert_eq!(of(SIZES, Options { scales_per_token: true, ..NOTHING }), Variant::Mma);
    assert_eq!(of(SIZES, Options { rows_of_16_bytes: false, ..NOTHING }), Variant::General);
    assert_eq!(of(Sizes { element: None, ..SIZES }, NOTHING), Variant::General);
}

#[test]
fn queries_of_float32_take_what_rounds_them() {
    let wide = Options { wide_queries: true, ..NOTHING };
    assert_eq!(chosen(&H200, &SIZES, &wide), Variant::Decode128);
    assert_eq!(chosen(&H200, &Sizes { rows: 64, ..SIZES }, &wide), Variant::Verify128Short);
    assert_eq!(chosen(&H200, &Sizes { dim: 64, value_dim: 64, ..SIZES }, &wide), Variant::Decode64);
    assert_eq!(chosen(&H200, &Sizes { dim: 80, value_dim: 80, ..SIZES }, &wide), Variant::Mma);
    assert_eq!(chosen(&H200, &MLA, &Options { wide_queries: true, ..LATENTS }), Variant::Mma);
}

#[test]
fn keys_in_host_memory_take_verify128() {
    let far = Options { is_far: true, ..NOTHING };
    assert_eq!(chosen(&H200, &SIZES, &far), Variant::Verify128);
    assert_eq!(chosen(&H200, &Sizes { element: Some(Element::Fp8), ..SIZES }, &far), Variant::Decode128);
}

#[test]
fn tokens_in_int4_take_kernels_of_their_own_or_general() {
    let int4 = Int4 { rows_of_16_bytes: true, codes_of_8_bytes: true, means_are_as_keys: true, near_strides: true };
    let coded = |int4| Options { int4: Some(int4), ..NOTHING };
    let of = |sizes: Sizes, options: Options| chosen(&H200, &sizes, &options);
    assert_eq!(of(SIZES, coded(int4)), Variant::Int4_128);
    let a100 = Device { runs_int4_verify128: false, ..H200 };
    for (rows, variant) in [(16, Variant::Int4_128), (17, Variant::Int4Verify128), (640, Variant::Int4Verify128)] {
        let sizes = Sizes { rows, element: Some(Element::Bf16), list_tokens: 1 << 20, ..SIZES };
        assert_eq!(of(sizes, coded(int4)), variant);
        assert_eq!(chosen(&a100, &sizes, &coded(int4)), Variant::Int4_128);
    }
    let short = Sizes { rows: 36, lists: 8, list_tokens: 4 << 10, ..SIZES };
    assert_eq!(of(short, coded(int4)), Variant::Int4_128);
    assert_eq!(of(Sizes { lists: 9, ..short }, coded(int4)), Variant::Int4Verify128);
    assert_eq!(of(Sizes { rows: 49, ..short }, coded(int4)), Variant::Int4Verify128);
    for options in [
        coded(Int4 { near_strides: false, ..int4 }),
        Options { near_strides: false, ..coded(int4) },
        Options { wide_queries: true, ..coded(int4) },
        Options { tree: true, positions: true, ..coded(int4) },
    ] {
        assert_eq!(of(SIZES, options), Variant::Int4Verify128, "{options:?}");
    }
    let all = Options {
        positions: true,
        q_lens: true,
        own_lists: true,
        window: true,
        soft_cap: true,
        sinks: true,
        ..coded(int4)
    };
    assert_eq!(of(SIZES, Options { start: true, lists: false, ..all }), Variant::Int4_128);
    let of_width = |dim, value_dim| Sizes { dim, value_dim, ..SIZES };
    for sizes in [of_width(64, 64), of_width(80, 128), Sizes { rows: 640, ..of_width(256, 256) }] {
        assert_eq!(of(sizes, coded(int4)), Variant::Int4Mma, "{sizes:?}");
        assert_eq!(
            of(sizes, Options { wide_queries: true, partials: true, ..coded(int4) }),
            Variant::Int4Mma,
            "{sizes:?}"
        );
        assert_eq!(of(sizes, Options { tree: true, positions: true, ..coded(int4) }), Variant::General, "{sizes:?}");
    }
    let none = Device { runs_int4_128: false, runs_int4_verify128: false, ..H200 };
    for device in [H200, none] {
        for options in [
            coded(Int4 { rows_of_16_bytes: false, ..int4 }),
            Options { partials: true, ..coded(int4) },
            Options { partials: true, ..coded(Int4 { near_strides: false, ..int4 }) },
        ] {
            assert_eq!(chosen(&device, &SIZES, &options), Variant::Int4Mma, "{options:?}");
        }
        assert_eq!(chosen(&device, &Sizes { element: None, ..SIZES }, &coded(int4)), Variant::General);
        for options in [
            coded(Int4 { rows_of_16_bytes: false, codes_of_8_bytes: false, ..int4 }),
            coded(Int4 { means_are_as_keys: false, ..int4 }),
            Options { rows_of_16_bytes: false, ..coded(int4) },
            Options { whole_tiles: false, ..coded(int4) },
        ] {
            assert_eq!(chosen(&device, &SIZES, &options), Variant::General, "{options:?}");
        }
    }
    for rows in [1, 17] {
        assert_eq!(chosen(&none, &Sizes { rows, ..SIZES }, &coded(int4)), Variant::Int4Mma);
    }
    // Shared memory for states of all warps, and tiles.
    let small = Device { shared_bytes: 99 << 10, ..none };
    let of_small = |partials| chosen(&small, &of_width(256, 256), &Options { partials, ..coded(int4) });
    assert_eq!([false, true].map(of_small), [Variant::Int4Mma, Variant::General]);
    // More lists than int4_128 counts.
    assert_eq!(of(Sizes { lists: 1 << 20, units: 1, list_tokens: 16, ..SIZES }, coded(int4)), Variant::Int4Mma);
    let repair = choose(None, |variant| fit_repair(variant, &SIZES, &coded(int4), &REPAIR)).unwrap();
    assert_eq!(repair, RepairVariant::TwoLaunches);
}

#[test]
fn long_lists_of_several_sequences_take_mma_or_of_many_rows_verify128() {
    let of =
        |lists, list_tokens| chosen(&H200, &Sizes { lists, list_tokens, units: list_tokens / 16, ..SIZES }, &NOTHING);
    // One sequence, then four, and eight.
    assert_eq!(of(8, 1 << 17), Variant::Decode128);
    assert_eq!(of(32, 12 << 10), Variant::Decode128);
    assert_eq!(of(32, (12 << 10) + 16), Variant::Mma);
    assert_eq!(of(64, (12 << 10) + 16), Variant::Verify128);
    let many = |rows| Sizes { lists: 16, list_tokens: 1 << 14, units: 1 << 10, rows, ..SIZES };
    assert_eq!(chosen(&H200, &many(8), &NOTHING), Variant::Mma);
    assert_eq!(chosen(&H200, &many(9), &NOTHING), Variant::Verify128);
    // With 64 channels verify64 takes few rows, too, unless the tokens of a tile are copied one by one.
    let narrow = |rows| Sizes { dim: 64, value_dim: 64, ..many(rows) };
    assert_eq!([4, 9].map(|rows| chosen(&H200, &narrow(rows), &NOTHING)), [Variant::Verify64; 2]);
    let single = Options { whole_tiles: false, ..NOTHING };
    assert_eq!([4, 9].map(|rows| chosen(&H200, &narrow(rows), &single)), [Variant::Mma, Variant::Verify64]);
}

#[test]
fn dense_attention_to_very_many_tokens_takes_verify128() {
    let sizes = |lists, list_tokens| Sizes { lists, list_tokens, units: list_tokens / 16, ..SIZES };
    let dense = Options { lists: false, ..NOTHING };
    let of = |lists, list_tokens| chosen(&H200, &sizes(lists, list_tokens), &dense);
    // One sequence of 8 KV heads; then more of them.
    assert_eq!(of(8, 1 << 15), Variant::Decode128);
    assert_eq!(of(8, 1 << 17), Variant::Verify128);
    assert_eq!(of(8, 1 << 19), Variant::Verify128);
    assert_eq!(of(16, 1 << 15), Variant::Verify128);
    assert_eq!(of(64, 1 << 15), Variant::Verify128);
    assert_eq!(of(64, 1 << 17), Variant::Verify128);
    let long = sizes(8, 1 << 17);
    assert_eq!(chosen(&H200, &long, &NOTHING), Variant::Decode128);
    assert_eq!(chosen(&H200, &long, &Options { window: true, ..dense }), Variant::Decode128);
    assert_eq!(chosen(&H200, &Sizes { element: Some(Element::Fp8), ..long }, &dense), Variant::Decode128);
    let of_cells = |rows| {
        let options = Options { whole_tiles: false, paged_tiles: true, ..dense };
        chosen(&H200, &Sizes { rows, ..sizes(32, 1 << 15) }, &options)
    };
    assert_eq!((of_cells(8), of_cells(9)), (Variant::Mma, Variant::Verify128));
    assert_eq!(chosen(&Device { runs_verify128: false, ..H200 }, &long, &dense), Variant::Decode128);
}

#[test]
fn dense_attention_of_several_sequences_takes_what_is_fast_for_ragged_ones() {
    let dense = Options { lists: false, ..NOTHING };
    let of = |rows, lists, tokens: u64| {
        let sizes = Sizes { rows, lists, list_tokens: tokens, units: tokens / 16, ..SIZES };
        chosen(&H200, &sizes, &dense)
    };
    for (lists, tokens, variant) in [
        (32, 1 << 13, Variant::Decode128),
        (32, 1 << 14, Variant::Verify128),
        (64, 1 << 12, Variant::Decode128),
        (64, 1 << 13, Variant::Verify128),
        (96, 1 << 11, Variant::Decode128),
        (128, 1 << 12, Variant::Verify128Short),
        (136, 1 << 12, Variant::Decode128),
        (256, 1 << 12, Variant::Decode128),
        (256, 1 << 13, Variant::Verify128),
        (384, 1 << 13, Variant::Decode128),
        (384, 1 << 14, Variant::Verify128),
        (8192, 1 << 9, Variant::Decode128),
    ] {
        assert_eq!(of(4, lists, tokens), variant, "{lists} lists of {tokens} tokens");
    }
    // A window makes them alike, and lists of FP8 are sooner done.
    let long = Sizes { lists: 64, list_tokens: 1 << 17, units: 1 << 13, ..SIZES };
    let narrow = Sizes { window_tokens: 1025, ..long };
    assert_eq!(chosen(&H200, &narrow, &Options { window: true, ..dense }), Variant::Decode128);
    let wide = Sizes { window_tokens: 8193, ..long };
    assert_eq!(chosen(&H200, &wide, &Options { window: true, ..dense }), Variant::Mma);
    for (lists, tokens, variant) in [
        (32, 1 << 14, Variant::Decode128),
        (64, 1 << 13, Variant::Decode128),
        (64, 1 << 17, Variant::Mma),
        (256, 1 << 13, Variant::Decode128),
        (512, 1 << 14, Variant::Decode128),
    ] {
        let sizes = Sizes { element: Some(Element::Fp8), lists, list_tokens: tokens, units: tokens / 16, ..SIZES };
        assert_eq!(chosen(&H200, &sizes, &dense), variant, "{lists} lists of {tokens} tokens of FP8");
    }
    // Heads of other widths.
    for (dim, lists, tokens, variant) in [
        (64, 8, 1 << 15, Variant::Decode64),
        (64, 128, 1 << 17, Variant::Decode64),
        (64, 128, (1 << 18) + 16, Variant::Verify64),
        (256, 8, 1 << 17, Variant::Decode256),
        (256, 32, 1 << 14, Variant::Decode256),
        (256, 128, 1 << 14, Variant::Mma),
        (256, 512, 1 << 14, Variant::Decode256),
        (80, 8, 1 << 15, Variant::Mma),
    ] {
        let sizes = Sizes { dim, value_dim: dim, lists, list_tokens: tokens, units: tokens / 16, ..SIZES };
        assert_eq!(chosen(&H200, &sizes, &dense), variant, "{lists} lists of {tokens} tokens, {dim} channels");
        let of_nine_rows = match dim {
            64 => Variant::Verify64,
            256 => Variant::Verify256,
            _ => Variant::Mma,
        };
        assert_eq!(chosen(&H200, &Sizes { rows: 9, ..sizes }, &dense), of_nine_rows, "{dim} channels, nine rows");
    }
    // decode128 takes lists of more than eight rows, too, unless verify128_short has clusters for all of them.
    assert_eq!(of(16, 64, 1 << 11), Variant::Verify128Short);
    assert_eq!(of(16, 136, 1 << 11), Variant::Decode128);
}

#[test]
fn latents_take_mla16_or_of_many_rows_mla64() {
    let of = |rows, options: Options| chosen(&H200, &Sizes { rows, ..MLA }, &options);
    assert_eq!(of(32, LATENTS), Variant::Mla16);
    assert_eq!(of(33, LATENTS), Variant::Mla64);
    for options in [
        NOTHING,
        Options { positions: true, ..LATENTS },
        Options { q_lens: true, ..LATENTS },
        Options { window: true, ..LATENTS },
        Options { soft_cap: true, ..LATENTS },
        Options { partials: true, ..LATENTS },
        Options { start: true, ..LATENTS },
    ] {
        assert_eq!(of(128, options), Variant::Mma, "{options:?}");
    }
    let later = Device { runs_mla64: false, ..H200 };
    assert_eq!(chosen(&later, &Sizes { rows: 128, ..MLA }, &LATENTS), Variant::Mla16);
}

#[test]
fn devices_before_hopper_take_mma() {
    let a100 = Device {
        multiprocessors: 108,
        shared_bytes: 163 << 10,
        runs_decode128: false,
        runs_verify128: false,
        runs_verify_short: false,
        runs_mla16: false,
        runs_mla64: false,
        runs_int4_128: false,
        runs_int4_verify128: false,
    };
    assert_eq!(chosen(&a100, &SIZES, &NOTHING), Variant::Mma);
    assert_eq!(chosen(&a100, &MLA, &LATENTS), Variant::Mma);
}

#[test]
fn draft_trees_take_verify128_or_general_and_repair_of_them_two_launches() {
    let tree = Options { positions: true, tree: true, ..NOTHING };
    for rows in [4, 16, 64, 200] {
        let long = Sizes { rows, list_tokens: 16 << 10, units: 1 << 10, ..SIZES };
        assert_eq!(chosen(&H200, &long, &tree), Variant::Verify128, "{rows}");
    }
    assert_eq!(chosen(&H200, &SIZES, &tree), Variant::Verify128Short);
    let narrow = Sizes { dim: 64, value_dim: 64, ..SIZES };
    assert_eq!(chosen(&H200, &narrow, &tree), Variant::Verify64Short);
    assert_eq!(chosen(&H200, &Sizes { list_tokens: 16 << 10, units: 1 << 10, ..narrow }, &tree), Variant::Verify64);
    let other = Sizes { dim: 80, value_dim: 80, ..SIZES };
    let a100 = Device { runs_decode128: false, runs_verify128: false, ..H200 };
    for (device, sizes, options) in
        [(&H200, other, tree), (&a100, SIZES, tree), (&H200, MLA, Options { tree: true, ..LATENTS })]
    {
        assert_eq!(chosen(device, &sizes, &options), Variant::General);
    }
    let repair = choose(None, |variant| fit_repair(variant, &SIZES, &tree, &REPAIR)).unwrap();
    assert_eq!(repair, RepairVariant::TwoLaunches);
}

#[test]
fn variant_that_was_slower_runs_where_it_is_forced() {
    let sizes = Sizes { rows: 4, ..MLA };
    let forced = |variant| choose(Some(variant), |variant| fit(variant, &H200, &sizes, &LATENTS));
    assert_eq!(forced(Variant::Mla64).unwrap(), Variant::Mla64);
    assert!(forced(Variant::Decode128).unwrap_err().to_string().contains("it takes heads of 128 channels"));
    assert!(forced(Variant::Decode64).unwrap_err().to_string().contains("it takes heads of 64 channels"));
    assert!(forced(Variant::Decode256).unwrap_err().to_string().contains("it takes heads of 256 channels"));
}

const REPAIR: RepairSizes = RepairSizes {
    list_entries: 40,
    entries_per_partial: 1,
    blocks: 2048,
    near_states: true,
    has_clusters: true,
    runs_verify128: true,
    exact: true,
    multiprocessors: 132,
    decode128_items: 8,
    decode128_fits: true,
    verify128_fits: true,
    one_launch_fits: true,
};

#[test]
fn repair_takes_one_launch_where_clusters_and_tensor_cores_do() {
    let of = |sizes: Sizes, options: Options, repair: RepairSizes| {
        choose(None, |variant| fit_repair(variant, &sizes, &options, &repair)).unwrap()
    };
    assert_eq!(of(SIZES, NOTHING, REPAIR), RepairVariant::Decode128);
    let longer = RepairSizes { list_entries: 257, ..REPAIR };
    assert_eq!(of(SIZES, NOTHING, longer), RepairVariant::OneLaunch);
    assert_eq!(of(Sizes { rows: 8, ..SIZES }, NOTHING, longer), RepairVariant::OneLaunch);
    for rows in [9, 64, 65] {
        let (drafts, repair) =
            (Sizes { rows, ..SIZES }, |exact, decode128_items| RepairSizes { exact, decode128_items, ..REPAIR });
        for (exact, most) in [(true, 132), (false, 66)] {
            assert_eq!(of(drafts, NOTHING, repair(exact, most)), RepairVariant::Decode128, "{rows} rows");
            assert_eq!(of(drafts, NOTHING, repair(exact, most + 1)), RepairVariant::Verify128, "{rows} rows");
        }
        assert_eq!(of(drafts, NOTHING, longer), RepairVariant::Verify128, "{rows} rows");
        let later = RepairSizes { runs_verify128: false, ..longer };
        assert_eq!(of(drafts, NOTHING, later), RepairVariant::OneLaunch, "{rows} rows");
        let full = RepairSizes { verify128_fits: false, ..longer };
        assert_eq!(of(drafts, NOTHING, full), RepairVariant::OneLaunch, "{rows} rows");
        let narrow = Sizes { element: Some(Element::Fp8), ..drafts };
        assert_eq!(of(narrow, NOTHING, REPAIR), RepairVariant::OneLaunch, "{rows} rows");
    }
    // Up to 8 rows, whatever the number of lists.
    assert_eq!(
        of(Sizes { rows: 8, ..SIZES }, NOTHING, RepairSizes { decode128_items: 5000, ..REPAIR }),
        RepairVariant::Decode128
    );
    assert_eq!(of(SIZES, Options { scales_per_token: true, ..NOTHING }, REPAIR), RepairVariant::OneLaunch);
    assert_eq!(of(MLA, LATENTS, REPAIR), RepairVariant::TwoLaunches);
    assert_eq!(of(SIZES, NOTHING, RepairSizes { has_clusters: false, ..REPAIR }), RepairVariant::TwoLaunches);
    assert_eq!(of(SIZES, NOTHING, RepairSizes { near_states: false, ..REPAIR }), RepairVariant::TwoLaunches);
}

#[test]
fn docs_name_the_variants() {
    check_docs("attention-repair", VariantList::of::<Variant>());
    check_docs("attention-repair", VariantList::of::<RepairVariant>());
}
