//! Keys and values in INT4: attention over them, coding, weights.

use super::*;

const SIZES: &[(&str, usize)] = &[
    ("B", 3),
    ("Hk", 2),
    ("Hq", 4),
    ("D", 64),
    ("D/2", 32),
    ("pages", 6),
    ("P", 8),
    ("max_pages", 2),
    ("coded_pages", 5),
    ("coded_P", 16),
    ("mean_pages", 7),
    ("rows", 1),
    ("max_mean_pages", 4),
    ("Tq", 9),
    ("Tk", 11),
];

const BLOCK_SIZES: &[u32] = &[0, 8, 24, 144, u32::MAX];

/// Names of the fields of a vwd_paged_kv with int4, in the order in which they are described.
struct Names {
    kv: [&'static str; 3],
    exact: [&'static str; 4],
    int4: [&'static str; 3],
    scalars: [&'static str; 2],
    /// k, v, k_scale, v_scale, means, coded_lens
    coded: [&'static str; 6],
    /// page_table, mean_table, weights
    inputs: [&'static str; 3],
}

const OF_KV: Names = Names {
    kv: ["kv", "kv.struct_size", "kv.flags"],
    exact: ["kv.k", "kv.v", "kv.seq_lens", "kv.page_table"],
    int4: ["kv.int4", "kv.int4.struct_size", "kv.int4.flags"],
    scalars: ["kv.int4.block_size", "kv.int4.exact_tokens"],
    coded: ["kv.int4.k", "kv.int4.v", "kv.int4.k_scale", "kv.int4.v_scale", "kv.int4.means", "kv.int4.coded_lens"],
    inputs: ["kv.int4.page_table", "kv.int4.mean_table", "kv.int4.weights"],
};

const OF_LAYER: Names = Names {
    kv: ["layers[0]", "layers[0].struct_size", "layers[0].flags"],
    exact: ["layers[0].k", "layers[0].v", "layers[0].seq_lens", "layers[0].page_table"],
    int4: ["layers[0].int4", "layers[0].int4.struct_size", "layers[0].int4.flags"],
    scalars: ["layers[0].int4.block_size", "layers[0].int4.exact_tokens"],
    coded: [
        "layers[0].int4.k",
        "layers[0].int4.v",
        "layers[0].int4.k_scale",
        "layers[0].int4.v_scale",
        "layers[0].int4.means",
        "layers[0].int4.coded_lens",
    ],
    inputs: ["layers[0].int4.page_table", "layers[0].int4.mean_table", "layers[0].int4.weights"],
};

/// The vwd_paged_kv that the pointer at `at` names, with what is coded in this role.
fn with_int4(call: &mut Call, at: usize, names: &Names, role: Role) {
    let base = call.nested::<vwd_paged_kv>(names.kv, at);
    let [k, v, seq_lens, page_table] = names.exact;
    call.input(k, base + offset_of!(vwd_paged_kv, k), F16, "pages P Hk D");
    call.input(v, base + offset_of!(vwd_paged_kv, v), F16, "pages P Hk D");
    call.input(seq_lens, base + offset_of!(vwd_paged_kv, seq_lens), I32, "B").values(&[16, 3, 9]);
    call.input(page_table, base + offset_of!(vwd_paged_kv, page_table), I32, "B max_pages?").optional();
    let base = call.nested::<vwd_int4_kv>(names.int4, base + offset_of!(vwd_paged_kv, int4));
    let [block_size, exact_tokens] = names.scalars;
    call.scalar(block_size, base + offset_of!(vwd_int4_kv, block_size), 16, BLOCK_SIZES);
    call.scalar(exact_tokens, base + offset_of!(vwd_int4_kv, exact_tokens), 0, &[1, 15, 24]);
    let [k, v, k_scale, v_scale, means, coded_lens] = names.coded;
    let mut coded = |name, offset: usize, dtype, shape| {
        let at = call.address(base + offset);
        call.field(name, at, role, dtype, shape);
    };
    coded(k, offset_of!(vwd_int4_kv, k), U8, "coded_pages coded_P Hk D/2");
    coded(v, offset_of!(vwd_int4_kv, v), U8, "coded_pages coded_P Hk D/2");
    coded(k_scale, offset_of!(vwd_int4_kv, k_scale), F8E4M3, "coded_pages coded_P Hk");
    coded(v_scale, offset_of!(vwd_int4_kv, v_scale), F8E4M3, "coded_pages coded_P Hk");
    coded(means, offset_of!(vwd_int4_kv, means), F16, "mean_pages? rows? Hk D");
    coded(coded_lens, offset_of!(vwd_int4_kv, coded_lens), I32, "B");
    let [page_table, mean_table, weights] = names.inputs;
    call.input(page_table, base + offset_of!(vwd_int4_kv, page_table), I32, "B max_pages?").optional();
    call.input(mean_table, base + offset_of!(vwd_int4_kv, mean_table), I32, "B max_mean_pages?").optional();
    call.input(weights, base + offset_of!(vwd_int4_kv, weights), F32, "Hk D").optional();
}

pub fn attention_over_int4(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_attention_args>(backend, "vwd_attention", SIZES, vwd_attention);
    call.has_scratch(vwd_attention_scratch);
    call.input("q", offset_of!(vwd_attention_args, q), F16, "B Hq D");
    with_int4(&mut call, offset_of!(vwd_attention_args, kv), &OF_KV, Role::In);
    call.may_be_null("kv.int4");
    call.output("out", offset_of!(vwd_attention_args, out), F16, "B Hq D");
    call
}

pub fn kv_quantize(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_kv_quantize_args>(backend, "vwd_kv_quantize", SIZES, vwd_kv_quantize);
    call.scalar("flags", offset_of!(vwd_kv_quantize_args, flags), 0, FLAGS);
    call.scalar("layer_count", offset_of!(vwd_kv_quantize_args, layer_count), 1, &[0, 49, u32::MAX]);
    let layers: *mut *const vwd_paged_kv = Box::leak(Box::new(std::ptr::null()));
    call.array("layers", offset_of!(vwd_kv_quantize_args, layers), layers.cast_const());
    let at = (layers as usize).wrapping_sub(call.address::<u8>(0) as usize);
    with_int4(&mut call, at, &OF_LAYER, Role::Out);
    call.input("begin", offset_of!(vwd_kv_quantize_args, begin), I32, "B").optional();
    call
}

pub fn kv_weights(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_kv_weights_args>(backend, "vwd_kv_weights", SIZES, vwd_kv_weights);
    call.scalar("flags", offset_of!(vwd_kv_weights_args, flags), 0, FLAGS);
    call.scalar("block_size", offset_of!(vwd_kv_weights_args, block_size), 16, &[0]);
    call.input("q", offset_of!(vwd_kv_weights_args, q), F16, "Tq? Hq D");
    call.input("k", offset_of!(vwd_kv_weights_args, k), F16, "Tk? Hk D");
    call.output("weights", offset_of!(vwd_kv_weights_args, weights), F32, "Hk D");
    call
}
