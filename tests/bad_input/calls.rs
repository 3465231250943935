//! Every call, described once.

use crate::support::*;
use crate::table::{Call, Role};
use std::ffi::c_void;
use std::mem::offset_of;
use vanward::abi::*;
use vanward::capi::*;

type Describe = fn(&Backend) -> Call<'_>;

pub const ALL: &[(&str, Describe)] = &[
    ("vwd_verify", verify),
    ("vwd_pack", pack),
    ("vwd_verify_pack", verify_pack),
    ("vwd_index_update of MINMAX", |b| index_update(b, VWD_INDEX_MINMAX, false)),
    ("vwd_index_update of MEAN", |b| index_update(b, VWD_INDEX_MEAN, false)),
    ("vwd_index_update of LABEL", |b| index_update(b, VWD_INDEX_LABEL, false)),
    ("vwd_index_update of AXIS", |b| index_update(b, VWD_INDEX_AXIS, false)),
    ("vwd_index_update of MINMAX of FP8", |b| index_update(b, VWD_INDEX_MINMAX, true)),
    ("vwd_index_update of LABEL of FP8", |b| index_update(b, VWD_INDEX_LABEL, true)),
    ("vwd_channel_importance", channel_importance),
    ("vwd_select_blocks by MINMAX", |b| select_blocks(b, VWD_SELECT_MINMAX, Rows::One)),
    ("vwd_select_blocks by MEAN_SOFTMAX", |b| select_blocks(b, VWD_SELECT_MEAN_SOFTMAX, Rows::One)),
    ("vwd_select_blocks by MEAN_DOT", |b| select_blocks(b, VWD_SELECT_MEAN_DOT, Rows::One)),
    ("vwd_select_blocks by LABEL_MASS", |b| select_blocks(b, VWD_SELECT_LABEL_MASS, Rows::One)),
    ("vwd_select_blocks by AXIS", |b| select_blocks(b, VWD_SELECT_AXIS, Rows::One)),
    ("vwd_select_blocks for rows that share lists", |b| select_blocks(b, VWD_SELECT_MINMAX, Rows::Shared)),
    ("vwd_select_blocks for rows with lists of their own", |b| select_blocks(b, VWD_SELECT_LABEL_MASS, Rows::Own)),
    ("vwd_select_tokens", |b| select_tokens(b, Rows::One)),
    ("vwd_select_tokens for rows with lists of their own", |b| select_tokens(b, Rows::Own)),
    ("vwd_topk", topk),
    ("vwd_attention over a list", |b| attention(b, true)),
    ("vwd_attention over everything", |b| attention(b, false)),
    ("vwd_attention of rows over FP8", attention_of_rows),
    ("vwd_attention over slots", attention_over_slots),
    ("vwd_merge_states", |b| merge_states(b, STATE)),
    ("vwd_merge_states of rows", |b| merge_states(b, STATE_OF_ROWS)),
    ("vwd_repair to a superset", |b| repair(b, VWD_REPAIR_SUPERSET)),
    ("vwd_repair exactly", |b| repair(b, VWD_REPAIR_EXACT)),
    ("vwd_repair of rows", repair_of_rows),
    ("vwd_gather_blocks", gather_blocks),
    ("vwd_gather_blocks of lists per KV head", gather_blocks_per_head),
    ("vwd_kv_cache_append", kv_cache_append),
    ("vwd_kv_cache_append with scales", kv_cache_append_scales),
    ("vwd_kv_cache_resolve", |b| kv_cache_resolve(b, Rows::One)),
    ("vwd_kv_cache_resolve of rows with lists of their own", |b| kv_cache_resolve(b, Rows::Own)),
    ("vwd_predictor_reset", predictor_reset),
    ("vwd_predictor_predict", predictor_predict),
    ("vwd_predictor_update", predictor_update),
    ("vwd_predictor_calibrate", predictor_calibrate),
    ("vwd_forecast_accumulate", forecast_accumulate),
    ("vwd_forecast_project", forecast_project),
];

/// Values that no flags field takes.
const FLAGS: &[u32] = &[1, 1 << 31, u32::MAX];

/// Values that no factor takes.
const NO_NUMBER: &[f32] = &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// Values that no scale takes.
const NO_SCALE: &[f32] = &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0];

/// Sizes that the families share; small, and such that none can be taken for another.
const SIZES: &[(&str, usize)] = &[
    ("B", 3),
    ("Hk", 2),
    ("Hq", 4),
    ("D", 16),
    ("pages", 6),
    ("P", 8),
    ("max_pages", 2),
    ("r", 10),
    ("r/2", 5),
    ("4·⌈D/32⌉", 4),
    ("index_pages", 7),
    ("rows", 9),
    ("cap", 5),
    ("cap2", 7),
    ("nb", 11),
    ("Q", 13),
    ("Dv", 24),
    ("1", 1),
];

// --- verify and pack -------------------------------------------------------------------------------------------------

fn verify(backend: &Backend) -> Call<'_> {
    let sizes = [("B", 3), ("γ", 4), ("γ+1", 5)];
    let mut call = Call::new::<vwd_verify_args>(backend, "vwd_verify", &sizes, vwd_verify);
    call.scalar("flags", offset_of!(vwd_verify_args, flags), 0, FLAGS);
    call.input("draft", offset_of!(vwd_verify_args, draft), I32, "B γ");
    call.input("target", offset_of!(vwd_verify_args, target), I32, "B γ+1");
    call.input("draft_lens", offset_of!(vwd_verify_args, draft_lens), I32, "B").optional();
    call.output("accepted", offset_of!(vwd_verify_args, accepted), I32, "B");
    call.output("next_token", offset_of!(vwd_verify_args, next_token), I32, "B");
    call.output("mismatch", offset_of!(vwd_verify_args, mismatch), I32, "B").optional();
    call.output("committed", offset_of!(vwd_verify_args, committed), I32, "B γ+1").optional();
    call
}

/// rows and packed, two of each.
fn pack_arrays(call: &mut Call, count: usize, rows_at: usize, packed_at: usize) {
    let rows = Box::leak(Box::new([absent(); 2])).as_mut_ptr();
    let packed = Box::leak(Box::new([absent(); 2])).as_mut_ptr();
    call.scalar("tensor_count", count, 2, &[0]);
    call.array("rows", rows_at, rows);
    call.array("packed", packed_at, packed);
    call.field("rows[0]", rows, Role::In, F16, "B γ D").any_dtype();
    call.field("rows[1]", rows.wrapping_add(1), Role::In, F32, "B γ Hk E").any_dtype();
    call.field("packed[0]", packed, Role::Out, F16, "cap? D").any_dtype();
    call.field("packed[1]", packed.wrapping_add(1), Role::Out, F32, "cap? Hk E").any_dtype();
}

fn pack(backend: &Backend) -> Call<'_> {
    let sizes = [("B", 3), ("B+1", 4), ("γ", 4), ("cap", 12), ("D", 16), ("Hk", 2), ("E", 8)];
    let mut call = Call::new::<vwd_pack_args>(backend, "vwd_pack", &sizes, vwd_pack);
    call.scalar("flags", offset_of!(vwd_pack_args, flags), 0, FLAGS);
    let count = offset_of!(vwd_pack_args, tensor_count);
    pack_arrays(&mut call, count, offset_of!(vwd_pack_args, rows), offset_of!(vwd_pack_args, packed));
    call.input("accepted", offset_of!(vwd_pack_args, accepted), I32, "B").values(&[4, 0, 2]);
    call.output("offsets", offset_of!(vwd_pack_args, offsets), I32, "B+1");
    call
}

fn verify_pack(backend: &Backend) -> Call<'_> {
    let sizes = [("B", 3), ("B+1", 4), ("γ", 4), ("γ+1", 5), ("cap", 12), ("D", 16), ("Hk", 2), ("E", 8)];
    let mut call = Call::new::<vwd_verify_pack_args>(backend, "vwd_verify_pack", &sizes, vwd_verify_pack);
    call.scalar("flags", offset_of!(vwd_verify_pack_args, flags), 0, FLAGS);
    let count = offset_of!(vwd_verify_pack_args, tensor_count);
    pack_arrays(&mut call, count, offset_of!(vwd_verify_pack_args, rows), offset_of!(vwd_verify_pack_args, packed));
    call.input("draft", offset_of!(vwd_verify_pack_args, draft), I32, "B γ");
    call.input("target", offset_of!(vwd_verify_pack_args, target), I32, "B γ+1");
    call.input("draft_lens", offset_of!(vwd_verify_pack_args, draft_lens), I32, "B").optional();
    call.output("accepted", offset_of!(vwd_verify_pack_args, accepted), I32, "B");
    call.output("next_token", offset_of!(vwd_verify_pack_args, next_token), I32, "B");
    call.output("offsets", offset_of!(vwd_verify_pack_args, offsets), I32, "B+1");
    call.output("mismatch", offset_of!(vwd_verify_pack_args, mismatch), I32, "B").optional();
    call.output("committed", offset_of!(vwd_verify_pack_args, committed), I32, "B γ+1").optional();
    call
}

// --- index -----------------------------------------------------------------------------------------------------------

/// The vwd_index that the field at `at` points to; its summaries have this role.
fn index(call: &mut Call, at: usize, kind: u32, role: Role) {
    let base = call.nested::<vwd_index>(["index", "index.struct_size", "index.flags"], at);
    let other = if kind == VWD_INDEX_MEAN { VWD_INDEX_LABEL } else { VWD_INDEX_MEAN };
    let bad: &[u32] = if role == Role::In { &[0, 5, u32::MAX, other] } else { &[0, 5, u32::MAX] };
    call.scalar("index.kind", base + offset_of!(vwd_index, kind), kind, bad);
    call.input("index.table", base + offset_of!(vwd_index, table), I32, "B max_pages?").optional();
    let mut summary = |name, offset: usize, dtype, shape| {
        let at = call.address(base + offset);
        call.field(name, at, role, dtype, shape);
    };
    match kind {
        VWD_INDEX_MINMAX => {
            summary("index.key_max", offset_of!(vwd_index, key_max), F32, "index_pages rows Hk D");
            summary("index.key_min", offset_of!(vwd_index, key_min), F32, "index_pages rows Hk D");
            call.scalar("index.block_size", base + offset_of!(vwd_index, block_size), 8, &[0]);
        }
        VWD_INDEX_MEAN => {
            summary("index.means", offset_of!(vwd_index, means), F32, "index_pages? rows? Hk D");
        }
        VWD_INDEX_AXIS => {
            summary("index.axes", offset_of!(vwd_index, axes), U8, "index_pages rows Hk D");
            summary("index.axis_range", offset_of!(vwd_index, axis_range), F16, "index_pages rows Hk 4·⌈D/32⌉");
            let weights = base + offset_of!(vwd_index, axis_weights);
            call.input("index.axis_weights", weights, F32, "Hk D").optional();
            let centre = base + offset_of!(vwd_index, axis_centre);
            call.input("index.axis_centre", centre, F32, "Hk D").optional();
            call.scalar("index.block_size", base + offset_of!(vwd_index, block_size), 8, &[0]);
        }
        _ => {
            summary("index.labels", offset_of!(vwd_index, labels), U8, "index_pages rows Hk r/2");
            summary("index.label_scale", offset_of!(vwd_index, label_scale), F16, "index_pages rows Hk");
            summary("index.label_min", offset_of!(vwd_index, label_min), F16, "index_pages rows Hk");
            call.input("index.channels", base + offset_of!(vwd_index, channels), I32, "Hk r");
        }
    }
}

/// `float8`: of keys in FP8, with a scale for each token.
fn index_update(backend: &Backend, kind: u32, float8: bool) -> Call<'_> {
    let mut call = Call::new::<vwd_index_update_args>(backend, "vwd_index_update", SIZES, vwd_index_update);
    call.scalar("flags", offset_of!(vwd_index_update_args, flags), 0, FLAGS);
    let dtype = if float8 { F8E4M3 } else { F32 };
    call.input("k", offset_of!(vwd_index_update_args, k), dtype, "pages? P? Hk D");
    let scale = offset_of!(vwd_index_update_args, k_scale);
    if float8 {
        call.input("k_scale", scale, F32, "pages? P? Hk").optional();
    } else {
        call.refused("k_scale", scale);
    }
    call.input("page_table", offset_of!(vwd_index_update_args, page_table), I32, "B max_pages?").optional();
    call.input("seq_lens", offset_of!(vwd_index_update_args, seq_lens), I32, "B").values(&[16, 3, 9]);
    call.input("begin", offset_of!(vwd_index_update_args, begin), I32, "B").optional();
    index(&mut call, offset_of!(vwd_index_update_args, index), kind, Role::Out);
    call
}

fn channel_importance(backend: &Backend) -> Call<'_> {
    let name = "vwd_channel_importance";
    let mut call = Call::new::<vwd_channel_importance_args>(backend, name, SIZES, vwd_channel_importance);
    call.scalar("flags", offset_of!(vwd_channel_importance_args, flags), 0, FLAGS);
    call.input("q", offset_of!(vwd_channel_importance_args, q), F32, "pages? Hq D");
    call.input("k", offset_of!(vwd_channel_importance_args, k), F32, "P? Hk D");
    call.output("channels", offset_of!(vwd_channel_importance_args, channels), I32, "Hk r").optional();
    call.output("importance", offset_of!(vwd_channel_importance_args, importance), F32, "Hk D").optional();
    call.output("weights", offset_of!(vwd_channel_importance_args, weights), F32, "Hk D").optional();
    call.output("centre", offset_of!(vwd_channel_importance_args, centre), F32, "Hk D").optional();
    call
}

// --- select ----------------------------------------------------------------------------------------------------------

/// The fields of the vwd_block_list at `base`.
fn list(call: &mut Call, names: [&'static str; 2], base: usize, role: Role, cap: &'static str) {
    let (ids, counts) = (offset_of!(vwd_block_list, ids), offset_of!(vwd_block_list, counts));
    let at = call.address(base + ids);
    call.field(names[0], at, role, I32, cap);
    let at = call.address(base + counts);
    call.field(names[1], at, role, I32, "B Hk");
}

/// Query positions of a selection.
#[derive(Clone, Copy, PartialEq)]
enum Rows {
    One,
    Shared,
    Own,
}

impl Rows {
    fn q(self, heads: &'static str) -> &'static str {
        match (self, heads) {
            (Rows::One, "Hk") => "B Hk D",
            (Rows::One, _) => "B Hq D",
            _ => "B Q? Hq D",
        }
    }

    /// The shapes of a tensor with a row for each list, ending with this.
    fn lists(self, last: &'static str) -> &'static str {
        let shapes = [("", "B Hk", "B Q Hk"), ("cap?", "B Hk cap?", "B Q Hk cap?"), ("cap", "B Hk cap", "B Q Hk cap")];
        let more = [("cap2?", "B Hk cap2?", "B Q Hk cap2?"), ("nb?", "B Hk nb?", "B Q Hk nb?")];
        let found = shapes.into_iter().chain(more).find(|shape| shape.0 == last).expect("a known shape");
        if self == Rows::Own { found.2 } else { found.1 }
    }
}

/// The fields of the vwd_block_list at `base`, and slots, which it must not have.
fn list_of(call: &mut Call, names: [&'static str; 3], base: usize, role: Role, rows: Rows, cap: &'static str) {
    let at = call.address(base + offset_of!(vwd_block_list, ids));
    call.field(names[0], at, role, I32, rows.lists(cap));
    let at = call.address(base + offset_of!(vwd_block_list, counts));
    call.field(names[1], at, role, I32, rows.lists(""));
    call.refused(names[2], base + offset_of!(vwd_block_list, slots));
}

fn select_blocks(backend: &Backend, method: u32, rows: Rows) -> Call<'_> {
    let mut call = Call::new::<vwd_select_blocks_args>(backend, "vwd_select_blocks", SIZES, vwd_select_blocks);
    call.has_scratch(vwd_select_blocks_scratch);
    let kind = match method {
        VWD_SELECT_MINMAX => VWD_INDEX_MINMAX,
        VWD_SELECT_LABEL_MASS => VWD_INDEX_LABEL,
        VWD_SELECT_AXIS => VWD_INDEX_AXIS,
        _ => VWD_INDEX_MEAN,
    };
    call.scalar("method", offset_of!(vwd_select_blocks_args, method), method, &[0, 6, u32::MAX]);
    let bad: &[u32] = if matches!(method, VWD_SELECT_MINMAX | VWD_SELECT_AXIS) { &[0, 4, 16] } else { &[0] };
    call.scalar("block_size", offset_of!(vwd_select_blocks_args, block_size), 8, bad);
    call.scalar("k", offset_of!(vwd_select_blocks_args, k), 5, &[6, u32::MAX]);
    call.scalar("init_blocks", offset_of!(vwd_select_blocks_args, init_blocks), 1, &[5, u32::MAX]);
    call.scalar("local_blocks", offset_of!(vwd_select_blocks_args, local_blocks), 1, &[]);
    let reads_scale = matches!(method, VWD_SELECT_MEAN_SOFTMAX | VWD_SELECT_LABEL_MASS | VWD_SELECT_AXIS);
    call.float("scale", offset_of!(vwd_select_blocks_args, scale), 0.5, if reads_scale { NO_SCALE } else { &[] });
    call.scalar("flags", offset_of!(vwd_select_blocks_args, flags), 0, FLAGS);
    let heads = if method == VWD_SELECT_MEAN_DOT { "Hk" } else { "Hq" };
    call.input("q", offset_of!(vwd_select_blocks_args, q), F32, rows.q(heads));
    call.input("q_lens", offset_of!(vwd_select_blocks_args, q_lens), I32, "B").optional();
    index(&mut call, offset_of!(vwd_select_blocks_args, index), kind, Role::In);
    call.input("seq_lens", offset_of!(vwd_select_blocks_args, seq_lens), I32, "B").values(&[80, 3, 31]);
    call.input("budgets", offset_of!(vwd_select_blocks_args, budgets), I32, "B").optional();
    if method == VWD_SELECT_LABEL_MASS {
        let names = ["candidates.ids", "candidates.counts", "candidates.slots"];
        list_of(&mut call, names, offset_of!(vwd_select_blocks_args, candidates), Role::In, rows, "cap2?");
    }
    let names = ["selected.ids", "selected.counts", "selected.slots"];
    list_of(&mut call, names, offset_of!(vwd_select_blocks_args, selected), Role::Out, rows, "cap?");
    call.output("scores", offset_of!(vwd_select_blocks_args, scores), F32, rows.lists("nb?")).optional();
    call.output("status", offset_of!(vwd_select_blocks_args, status), U32, rows.lists("")).optional();
    call
}

fn select_tokens(backend: &Backend, rows: Rows) -> Call<'_> {
    let mut call = Call::new::<vwd_select_tokens_args>(backend, "vwd_select_tokens", SIZES, vwd_select_tokens);
    call.has_scratch(vwd_select_tokens_scratch);
    call.scalar("flags", offset_of!(vwd_select_tokens_args, flags), 0, FLAGS);
    call.scalar("block_size", offset_of!(vwd_select_tokens_args, block_size), 8, &[0]);
    call.scalar("k", offset_of!(vwd_select_tokens_args, k), 5, &[6, u32::MAX]);
    call.scalar("init_tokens", offset_of!(vwd_select_tokens_args, init_tokens), 1, &[5, u32::MAX]);
    call.scalar("local_tokens", offset_of!(vwd_select_tokens_args, local_tokens), 1, &[]);
    call.float("scale", offset_of!(vwd_select_tokens_args, scale), 0.0, NO_SCALE);
    call.input("q", offset_of!(vwd_select_tokens_args, q), F32, rows.q("Hq"));
    call.input("q_lens", offset_of!(vwd_select_tokens_args, q_lens), I32, "B").optional();
    index(&mut call, offset_of!(vwd_select_tokens_args, index), VWD_INDEX_LABEL, Role::In);
    call.input("seq_lens", offset_of!(vwd_select_tokens_args, seq_lens), I32, "B").values(&[80, 3, 31]);
    call.input("budgets", offset_of!(vwd_select_tokens_args, budgets), I32, "B").optional();
    let names = ["candidates.ids", "candidates.counts", "candidates.slots"];
    list_of(&mut call, names, offset_of!(vwd_select_tokens_args, candidates), Role::In, rows, "cap2?");
    let names = ["selected.ids", "selected.counts", "selected.slots"];
    list_of(&mut call, names, offset_of!(vwd_select_tokens_args, selected), Role::Out, rows, "cap?");
    call.output("scores", offset_of!(vwd_select_tokens_args, scores), F32, rows.lists("cap")).optional();
    call.output("status", offset_of!(vwd_select_tokens_args, status), U32, rows.lists("")).optional();
    call
}

fn topk(backend: &Backend) -> Call<'_> {
    let sizes = [("R", 3), ("n", 11), ("cap", 5)];
    let mut call = Call::new::<vwd_topk_args>(backend, "vwd_topk", &sizes, vwd_topk);
    call.scalar("flags", offset_of!(vwd_topk_args, flags), 0, FLAGS);
    call.scalar("k", offset_of!(vwd_topk_args, k), 5, &[6, u32::MAX]);
    call.scalar("order", offset_of!(vwd_topk_args, order), VWD_TOPK_BEST_FIRST, &[2, u32::MAX]);
    call.input("scores", offset_of!(vwd_topk_args, scores), F32, "R n?");
    call.input("lens", offset_of!(vwd_topk_args, lens), I32, "R").optional();
    call.input("budgets", offset_of!(vwd_topk_args, budgets), I32, "R").optional();
    call.output("ids", offset_of!(vwd_topk_args, ids), I32, "R cap?");
    call.output("counts", offset_of!(vwd_topk_args, counts), I32, "R");
    call.output("values", offset_of!(vwd_topk_args, values), F32, "R cap").optional();
    call
}

// --- attention, repair, gather ---------------------------------------------------------------------------------------

/// The vwd_paged_kv that the field at `at` points to; gives its base.
fn paged_kv(call: &mut Call, at: usize, dtype: DType, [k, v]: [&'static str; 2]) -> usize {
    let base = call.nested::<vwd_paged_kv>(["kv", "kv.struct_size", "kv.flags"], at);
    call.input("kv.k", base + offset_of!(vwd_paged_kv, k), dtype, k);
    call.input("kv.v", base + offset_of!(vwd_paged_kv, v), dtype, v);
    call.input("kv.seq_lens", base + offset_of!(vwd_paged_kv, seq_lens), I32, "B").values(&[16, 3, 9]);
    base
}

fn page_table(call: &mut Call, kv: usize) {
    call.input("kv.page_table", kv + offset_of!(vwd_paged_kv, page_table), I32, "B max_pages?").optional();
}

const KV: [&str; 2] = ["pages P Hk D"; 2];
const KV_OF_ROWS: [&str; 2] = ["pages P Hk D", "pages P Hk Dv"];

/// Three float32 tensors of a state, or of partials, that lie one after the other.
fn state(call: &mut Call, names: [&'static str; 3], at: *mut vwd_tensor, role: Role, lead: [&'static str; 2]) {
    call.field(names[0], at, role, F32, lead[0]);
    call.field(names[1], at.wrapping_add(1), role, F32, lead[1]);
    call.field(names[2], at.wrapping_add(2), role, F32, lead[1]);
}

const STATE: [&str; 2] = ["B Hq D", "B Hq"];
const PARTIALS: [&str; 2] = ["B Hq cap D", "B Hq cap"];
const STATE_OF_ROWS: [&str; 2] = ["B Q Hq Dv", "B Q Hq"];
const PARTIALS_OF_ROWS: [&str; 2] = ["B Q Hq cap Dv", "B Q Hq cap"];

/// Values that no positive factor takes.
const NOT_POSITIVE: &[f32] = &[-1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

fn attention(backend: &Backend, over_list: bool) -> Call<'_> {
    let mut call = Call::new::<vwd_attention_args>(backend, "vwd_attention", SIZES, vwd_attention);
    call.has_scratch(vwd_attention_scratch);
    call.scalar("flags", offset_of!(vwd_attention_args, flags), 0, FLAGS);
    let (block_size, bad): (u32, &[u32]) = if over_list { (8, &[0, 3, 5, 12, u32::MAX]) } else { (0, &[8]) };
    call.scalar("block_size", offset_of!(vwd_attention_args, block_size), block_size, bad);
    call.float("scale", offset_of!(vwd_attention_args, scale), 0.0, NOT_POSITIVE);
    call.float("soft_cap", offset_of!(vwd_attention_args, soft_cap), 30.0, NOT_POSITIVE);
    call.input("q", offset_of!(vwd_attention_args, q), F16, "B Hq D");
    call.input("q_lens", offset_of!(vwd_attention_args, q_lens), I32, "B").optional().values(&[1, 0, 7]);
    call.input("sinks", offset_of!(vwd_attention_args, sinks), F32, "Hq").optional();
    let kv = paged_kv(&mut call, offset_of!(vwd_attention_args, kv), F16, KV);
    page_table(&mut call, kv);
    if over_list {
        let names = ["list.ids", "list.counts"];
        list(&mut call, names, offset_of!(vwd_attention_args, list), Role::In, "B Hk cap");
    }
    call.output("out", offset_of!(vwd_attention_args, out), F16, "B Hq D");
    call.output("lse", offset_of!(vwd_attention_args, lse), F32, "B Hq").optional();
    let at = call.address(offset_of!(vwd_attention_args, state));
    state(&mut call, ["state.acc", "state.m", "state.l"], at, Role::Out, STATE);
    if over_list {
        let at = call.address(offset_of!(vwd_attention_args, partials));
        state(&mut call, ["partials.acc", "partials.m", "partials.l"], at, Role::Out, PARTIALS);
    }
    call
}

/// With few enough rows for their partials to fit.
fn sizes_of_rows() -> Vec<(&'static str, usize)> {
    [SIZES, &[("Q", 2)]].concat()
}

/// Rows with lists of their own over FP8 whose values have a width of their own.
fn attention_of_rows(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_attention_args>(backend, "vwd_attention", &sizes_of_rows(), vwd_attention);
    call.has_scratch(vwd_attention_scratch);
    call.scalar("block_size", offset_of!(vwd_attention_args, block_size), 8, &[0, 3, 5, 12, u32::MAX]);
    // D and Dv differ, so that nothing stands for 0.
    call.float("scale", offset_of!(vwd_attention_args, scale), 0.5, &[0.0, -0.0, -1.0, f32::NAN, f32::INFINITY]);
    call.input("q", offset_of!(vwd_attention_args, q), F16, "B Q Hq D");
    call.input("q_lens", offset_of!(vwd_attention_args, q_lens), I32, "B").optional().values(&[1, -1, 7]);
    call.input("sinks", offset_of!(vwd_attention_args, sinks), F32, "Hq").optional();
    let kv = paged_kv(&mut call, offset_of!(vwd_attention_args, kv), F8E4M3, KV_OF_ROWS);
    page_table(&mut call, kv);
    call.input("kv.k_scale", kv + offset_of!(vwd_paged_kv, k_scale), F32, "pages P Hk").optional();
    call.input("kv.v_scale", kv + offset_of!(vwd_paged_kv, v_scale), F32, "pages P Hk").optional();
    let at = call.address(offset_of!(vwd_attention_args, list));
    call.field("list.ids", at, Role::In, I32, "B Q Hk cap");
    call.field("list.counts", at.wrapping_add(1), Role::In, I32, "B Q Hk");
    call.output("out", offset_of!(vwd_attention_args, out), F16, "B Q Hq Dv");
    call.output("lse", offset_of!(vwd_attention_args, lse), F32, "B Q Hq").optional();
    let at = call.address(offset_of!(vwd_attention_args, state));
    state(&mut call, ["state.acc", "state.m", "state.l"], at, Role::Out, STATE_OF_ROWS);
    let at = call.address(offset_of!(vwd_attention_args, partials));
    state(&mut call, ["partials.acc", "partials.m", "partials.l"], at, Role::Out, PARTIALS_OF_ROWS);
    call
}

fn attention_over_slots(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_attention_args>(backend, "vwd_attention", SIZES, vwd_attention);
    call.has_scratch(vwd_attention_scratch);
    call.scalar("block_size", offset_of!(vwd_attention_args, block_size), 4, &[0, 3, 16, u32::MAX]);
    call.input("q", offset_of!(vwd_attention_args, q), F16, "B Hq D");
    paged_kv(&mut call, offset_of!(vwd_attention_args, kv), F16, ["pages P 1 D"; 2]);
    let at = call.address(offset_of!(vwd_attention_args, list));
    call.field("list.ids", at, Role::In, I32, "B Hk cap");
    call.field("list.counts", at.wrapping_add(1), Role::In, I32, "B Hk");
    call.field("list.slots", at.wrapping_add(2), Role::In, I32, "B Hk cap").optional();
    call.output("out", offset_of!(vwd_attention_args, out), F16, "B Hq D");
    call
}

fn merge_states<'b>(backend: &'b Backend, shapes: [&'static str; 2]) -> Call<'b> {
    let mut call = Call::new::<vwd_merge_states_args>(backend, "vwd_merge_states", &sizes_of_rows(), vwd_merge_states);
    call.scalar("flags", offset_of!(vwd_merge_states_args, flags), 0, FLAGS);
    let inputs = Box::leak(Box::new([absent(); 6])).as_mut_ptr();
    call.scalar("input_count", offset_of!(vwd_merge_states_args, input_count), 2, &[0, 17, u32::MAX]);
    call.array("inputs", offset_of!(vwd_merge_states_args, inputs), inputs);
    state(&mut call, ["inputs[0].acc", "inputs[0].m", "inputs[0].l"], inputs, Role::In, shapes);
    let second = inputs.wrapping_add(3);
    state(&mut call, ["inputs[1].acc", "inputs[1].m", "inputs[1].l"], second, Role::In, shapes);
    call.input("sinks", offset_of!(vwd_merge_states_args, sinks), F32, "Hq").optional();
    call.output("out", offset_of!(vwd_merge_states_args, out), BF16, shapes[0]).optional();
    call.output("lse", offset_of!(vwd_merge_states_args, lse), F32, shapes[1]).optional();
    let at = call.address(offset_of!(vwd_merge_states_args, state));
    state(&mut call, ["state.acc", "state.m", "state.l"], at, Role::Out, shapes);
    call
}

fn repair(backend: &Backend, mode: u32) -> Call<'_> {
    let mut call = Call::new::<vwd_repair_args>(backend, "vwd_repair", SIZES, vwd_repair);
    call.has_scratch(vwd_repair_scratch);
    call.scalar("mode", offset_of!(vwd_repair_args, mode), mode, &[0, 3, u32::MAX]);
    call.scalar("block_size", offset_of!(vwd_repair_args, block_size), 8, &[0, 3, 5, 12, u32::MAX]);
    call.float("scale", offset_of!(vwd_repair_args, scale), 0.0, NOT_POSITIVE);
    call.float("soft_cap", offset_of!(vwd_repair_args, soft_cap), 30.0, NOT_POSITIVE);
    call.scalar("flags", offset_of!(vwd_repair_args, flags), 0, FLAGS);
    call.input("q", offset_of!(vwd_repair_args, q), F16, "B Hq D");
    call.input("q_lens", offset_of!(vwd_repair_args, q_lens), I32, "B").optional().values(&[1, 0, 7]);
    call.input("sinks", offset_of!(vwd_repair_args, sinks), F32, "Hq").optional();
    let kv = paged_kv(&mut call, offset_of!(vwd_repair_args, kv), F16, KV);
    page_table(&mut call, kv);
    let names = ["predicted.ids", "predicted.counts"];
    let ids = if mode == VWD_REPAIR_EXACT { "B Hk cap" } else { "B Hk cap?" };
    list(&mut call, names, offset_of!(vwd_repair_args, predicted), Role::In, ids);
    let names = ["selected.ids", "selected.counts"];
    list(&mut call, names, offset_of!(vwd_repair_args, selected), Role::In, "B Hk cap2?");
    if mode == VWD_REPAIR_SUPERSET {
        let at = call.address(offset_of!(vwd_repair_args, predicted_state));
        let names = ["predicted_state.acc", "predicted_state.m", "predicted_state.l"];
        state(&mut call, names, at, Role::In, STATE);
        call.may_overlap("state.acc", "predicted_state.acc");
        call.may_overlap("state.m", "predicted_state.m");
        call.may_overlap("state.l", "predicted_state.l");
    } else {
        let at = call.address(offset_of!(vwd_repair_args, predicted_partials));
        let names = ["predicted_partials.acc", "predicted_partials.m", "predicted_partials.l"];
        state(&mut call, names, at, Role::In, PARTIALS);
    }
    call.output("out", offset_of!(vwd_repair_args, out), F16, "B Hq D");
    call.output("lse", offset_of!(vwd_repair_args, lse), F32, "B Hq").optional();
    let at = call.address(offset_of!(vwd_repair_args, state));
    state(&mut call, ["state.acc", "state.m", "state.l"], at, Role::Out, STATE);
    call.output("missed_counts", offset_of!(vwd_repair_args, missed_counts), I32, "B Hk").optional();
    call
}

/// Rows with lists of their own, and a pool whose pages the selected list names.
fn repair_of_rows(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_repair_args>(backend, "vwd_repair", &sizes_of_rows(), vwd_repair);
    call.has_scratch(vwd_repair_scratch);
    call.scalar("mode", offset_of!(vwd_repair_args, mode), VWD_REPAIR_EXACT, &[0, 3, u32::MAX]);
    call.scalar("block_size", offset_of!(vwd_repair_args, block_size), 8, &[0, 3, 16, u32::MAX]);
    call.float("scale", offset_of!(vwd_repair_args, scale), 0.5, &[0.0, -1.0, f32::NAN]);
    call.input("q", offset_of!(vwd_repair_args, q), F16, "B Q Hq D");
    call.input("q_lens", offset_of!(vwd_repair_args, q_lens), I32, "B").optional().values(&[2, 0, 1]);
    let shapes = ["pages P 1 D", "pages P 1 Dv"];
    let kv = paged_kv(&mut call, offset_of!(vwd_repair_args, kv), F8E5M2, shapes);
    call.input("kv.v_scale", kv + offset_of!(vwd_paged_kv, v_scale), F32, "1").optional();
    let at = call.address(offset_of!(vwd_repair_args, predicted));
    call.field("predicted.ids", at, Role::In, I32, "B Q Hk cap");
    call.field("predicted.counts", at.wrapping_add(1), Role::In, I32, "B Q Hk");
    let at = call.address(offset_of!(vwd_repair_args, selected));
    call.field("selected.ids", at, Role::In, I32, "B Q Hk cap2");
    call.field("selected.counts", at.wrapping_add(1), Role::In, I32, "B Q Hk");
    call.field("selected.slots", at.wrapping_add(2), Role::In, I32, "B Q Hk cap2").optional();
    let at = call.address(offset_of!(vwd_repair_args, predicted_partials));
    let names = ["predicted_partials.acc", "predicted_partials.m", "predicted_partials.l"];
    state(&mut call, names, at, Role::In, PARTIALS_OF_ROWS);
    call.output("out", offset_of!(vwd_repair_args, out), F16, "B Q Hq Dv");
    call.output("missed_counts", offset_of!(vwd_repair_args, missed_counts), I32, "B Q Hk").optional();
    call
}

fn gather_blocks(backend: &Backend) -> Call<'_> {
    let sizes = [("N", 9), ("M", 7), ("E", 8), ("n", 5), ("1", 1)];
    let mut call = Call::new::<vwd_gather_blocks_args>(backend, "vwd_gather_blocks", &sizes, vwd_gather_blocks);
    call.scalar("flags", offset_of!(vwd_gather_blocks_args, flags), 0, FLAGS);
    call.scalar("engine", offset_of!(vwd_gather_blocks_args, engine), VWD_GATHER_AUTO, &[3, u32::MAX]);
    call.input("source", offset_of!(vwd_gather_blocks_args, source), F16, "N? E").any_dtype();
    call.output("target", offset_of!(vwd_gather_blocks_args, target), F16, "M? E").any_dtype();
    call.input("source_ids", offset_of!(vwd_gather_blocks_args, source_ids), I32, "n").values(&[8, 0, -1, 3, 3]);
    let targets = call.input("target_ids", offset_of!(vwd_gather_blocks_args, target_ids), I32, "n");
    targets.optional().values(&[0, 6, 5, 9, 1]);
    call.input("count", offset_of!(vwd_gather_blocks_args, count), I32, "1").optional().values(&[5]);
    call
}

fn gather_blocks_per_head(backend: &Backend) -> Call<'_> {
    let sizes = [("N", 9), ("M", 13), ("E", 8), ("B", 3), ("Hk", 2), ("cap", 5)];
    let mut call = Call::new::<vwd_gather_blocks_args>(backend, "vwd_gather_blocks", &sizes, vwd_gather_blocks);
    call.scalar("flags", offset_of!(vwd_gather_blocks_args, flags), 0, FLAGS);
    call.scalar("engine", offset_of!(vwd_gather_blocks_args, engine), VWD_GATHER_AUTO, &[3, u32::MAX]);
    call.input("source", offset_of!(vwd_gather_blocks_args, source), F16, "N? Hk E").any_dtype();
    call.output("target", offset_of!(vwd_gather_blocks_args, target), F16, "M? E").any_dtype();
    call.input("source_ids", offset_of!(vwd_gather_blocks_args, source_ids), I32, "B Hk cap").values(&[8, 0, -1, 3, 3]);
    let targets = call.input("target_ids", offset_of!(vwd_gather_blocks_args, target_ids), I32, "B Hk cap");
    targets.optional().values(&[0, 6, 5, 9, 1]);
    call.input("count", offset_of!(vwd_gather_blocks_args, count), I32, "B Hk").optional().values(&[5]);
    call
}

// --- tiered KV cache -------------------------------------------------------------------------------------------------

/// A cache with three sequences of two layers, which have room for two blocks.
struct KvCache(*mut vwd_kv_cache);

impl KvCache {
    fn new(backend: &Backend, dtype: DType) -> KvCache {
        let options = vwd_kv_cache_options {
            layers: 2,
            kv_heads: 2,
            block_size: 4,
            key_dim: 16,
            value_dim: 24,
            dtype_code: dtype.code as u32,
            dtype_bits: dtype.bits as u32,
            token_scales: (dtype == F8E4M3) as u32,
            max_sequences: 3,
            max_blocks: 2,
            host_blocks: 6,
            slots: 1000,
            ..args()
        };
        let mut cache = std::ptr::null_mut();
        // SAFETY: everything is valid.
        unsafe {
            assert_ok(vwd_kv_cache_create(backend.session(), &options, &mut cache));
            for _ in 0..3 {
                let mut sequence = 0;
                assert_ok(vwd_kv_cache_add(cache, &mut sequence, std::ptr::null_mut()));
                assert_ok(vwd_kv_cache_extend(cache, sequence, 8, std::ptr::null_mut()));
            }
        }
        KvCache(cache)
    }

    /// A call on it.
    fn call<'b, T: Versioned + 'static>(
        self,
        backend: &'b Backend,
        name: &'static str,
        function: unsafe extern "C" fn(*const vwd_kv_cache, *const T, vwd_stream) -> vwd_status,
    ) -> Call<'b> {
        let handle = ("cache", self.0.cast_const().cast());
        Call::with::<T>(backend, name, SIZES, handle, move |handle, args, stream| {
            let _alive = &self;
            // SAFETY: the table passes a cache (or NULL) and arguments (or less), as C might.
            unsafe { function(handle.cast(), args.cast(), stream) }
        })
    }
}

impl Drop for KvCache {
    fn drop(&mut self) {
        // SAFETY: created above, released once.
        unsafe { vwd_kv_cache_release(self.0) };
    }
}

fn kv_cache_append(backend: &Backend) -> Call<'_> {
    let mut call = kv_cache_append_of(backend, F16);
    call.refused("k_scale", offset_of!(vwd_kv_cache_append_args, k_scale));
    call.refused("v_scale", offset_of!(vwd_kv_cache_append_args, v_scale));
    call
}

fn kv_cache_append_scales(backend: &Backend) -> Call<'_> {
    let mut call = kv_cache_append_of(backend, F8E4M3);
    call.input("k_scale", offset_of!(vwd_kv_cache_append_args, k_scale), F32, "B Q Hk");
    call.input("v_scale", offset_of!(vwd_kv_cache_append_args, v_scale), F32, "B Q Hk");
    call
}

fn kv_cache_append_of(backend: &Backend, dtype: DType) -> Call<'_> {
    type Args = vwd_kv_cache_append_args;
    let cache = KvCache::new(backend, dtype);
    let mut call = cache.call::<Args>(backend, "vwd_kv_cache_append", vwd_kv_cache_append);
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.scalar("layer", offset_of!(Args, layer), 1, &[2, u32::MAX]);
    call.input("sequences", offset_of!(Args, sequences), I32, "B").values(&[2, 0, 1]);
    call.input("begin", offset_of!(Args, begin), I32, "B").values(&[0, 0, 0]);
    call.input("lens", offset_of!(Args, lens), I32, "B").optional().values(&[8, 3, 0]);
    call.input("k", offset_of!(Args, k), dtype, "B Q Hk D");
    call.input("v", offset_of!(Args, v), dtype, "B Q Hk Dv");
    call
}

fn kv_cache_resolve(backend: &Backend, rows: Rows) -> Call<'_> {
    type Args = vwd_kv_cache_resolve_args;
    let cache = KvCache::new(backend, F16);
    let mut call = cache.call::<Args>(backend, "vwd_kv_cache_resolve", vwd_kv_cache_resolve);
    let [ids, counts] = if matches!(rows, Rows::Own) { ["B Q Hk cap", "B Q Hk"] } else { ["B Hk cap", "B Hk"] };
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.scalar("layer", offset_of!(Args, layer), 1, &[2, u32::MAX]);
    call.input("sequences", offset_of!(Args, sequences), I32, "B").values(&[2, 0, 1]);
    let (wanted, resident) = (offset_of!(Args, wanted), offset_of!(Args, resident));
    call.input("wanted.ids", wanted + offset_of!(vwd_block_list, ids), I32, ids);
    call.input("wanted.counts", wanted + offset_of!(vwd_block_list, counts), I32, counts);
    call.output("wanted.slots", wanted + offset_of!(vwd_block_list, slots), I32, ids);
    call.output("resident.ids", resident + offset_of!(vwd_block_list, ids), I32, ids);
    call.output("resident.counts", resident + offset_of!(vwd_block_list, counts), I32, counts);
    call.output("resident.slots", resident + offset_of!(vwd_block_list, slots), I32, ids);
    call.output("missed_counts", offset_of!(Args, missed_counts), I32, counts).optional();
    call
}

// --- predict ---------------------------------------------------------------------------------------------------------

const ONE: i32 = 0x3f80_0000; // 1.0f32

/// The fields of the vwd_predictor_state at `base`.
fn predictor_state(call: &mut Call, base: usize, role: Role) {
    for (name, offset) in [
        ("state.level", offset_of!(vwd_predictor_state, level)),
        ("state.trend", offset_of!(vwd_predictor_state, trend)),
    ] {
        let at = call.address(base + offset);
        call.field(name, at, role, F32, "B Hk nb").values(&[ONE; 66]);
    }
}

fn predictor_reset(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_predictor_reset_args>(backend, "vwd_predictor_reset", SIZES, vwd_predictor_reset);
    call.scalar("flags", offset_of!(vwd_predictor_reset_args, flags), 0, FLAGS);
    predictor_state(&mut call, offset_of!(vwd_predictor_reset_args, state), Role::Out);
    call.input("rows", offset_of!(vwd_predictor_reset_args, rows), I32, "cap?").optional().values(&[0, 2, -1, 9, 2]);
    call
}

fn predictor_predict(backend: &Backend) -> Call<'_> {
    let name = "vwd_predictor_predict";
    let mut call = Call::new::<vwd_predictor_predict_args>(backend, name, SIZES, vwd_predictor_predict);
    call.scalar("block_size", offset_of!(vwd_predictor_predict_args, block_size), 8, &[0]);
    call.scalar("k", offset_of!(vwd_predictor_predict_args, k), 4, &[5, u32::MAX]);
    call.scalar("init_blocks", offset_of!(vwd_predictor_predict_args, init_blocks), 1, &[5, u32::MAX]);
    call.scalar("local_blocks", offset_of!(vwd_predictor_predict_args, local_blocks), 1, &[]);
    call.float("ratio", offset_of!(vwd_predictor_predict_args, ratio), 1.25, &[0.5, -1.0, f32::NAN, f32::INFINITY]);
    let gamma = offset_of!(vwd_predictor_predict_args, holt) + offset_of!(vwd_holt, gamma);
    call.float("holt.gamma", gamma, 0.5, NO_NUMBER);
    call.scalar("flags", offset_of!(vwd_predictor_predict_args, flags), 0, FLAGS);
    predictor_state(&mut call, offset_of!(vwd_predictor_predict_args, state), Role::In);
    call.input("seq_lens", offset_of!(vwd_predictor_predict_args, seq_lens), I32, "B").values(&[80, 3, 31]);
    call.input("budgets", offset_of!(vwd_predictor_predict_args, budgets), I32, "B").optional();
    let names = ["predicted.ids", "predicted.counts"];
    list(&mut call, names, offset_of!(vwd_predictor_predict_args, predicted), Role::Out, "B Hk cap?");
    call.output("scores", offset_of!(vwd_predictor_predict_args, scores), F32, "B Hk nb").optional();
    call
}

fn predictor_update(backend: &Backend) -> Call<'_> {
    let name = "vwd_predictor_update";
    let mut call = Call::new::<vwd_predictor_update_args>(backend, name, SIZES, vwd_predictor_update);
    call.scalar("block_size", offset_of!(vwd_predictor_update_args, block_size), 8, &[0]);
    let holt = offset_of!(vwd_predictor_update_args, holt);
    call.float("holt.alpha", holt + offset_of!(vwd_holt, alpha), 0.5, &[-0.1, 1.1, f32::NAN]);
    call.float("holt.beta", holt + offset_of!(vwd_holt, beta), 0.5, &[-0.1, 1.1, f32::NAN]);
    call.scalar("flags", offset_of!(vwd_predictor_update_args, flags), 0, FLAGS);
    predictor_state(&mut call, offset_of!(vwd_predictor_update_args, state), Role::Out);
    call.input("seq_lens", offset_of!(vwd_predictor_update_args, seq_lens), I32, "B").values(&[80, 3, 31]);
    call.input("scores", offset_of!(vwd_predictor_update_args, scores), F32, "B Hk nb");
    call
}

fn predictor_calibrate(backend: &Backend) -> Call<'_> {
    let handle = ("session", backend.session().cast());
    // SAFETY: the table passes a session (or NULL) and arguments (or less), as C might.
    let invoke = |session: *const c_void, args: *const c_void, _| unsafe {
        let (mut best, mut rate) = (vwd_holt { alpha: -7.0, beta: -7.0, gamma: -7.0 }, -7.0);
        let status = vwd_predictor_calibrate(session.cast(), args.cast(), &mut best, &mut rate);
        assert_eq!(status == VWD_OK, best.alpha != -7.0 && rate != -7.0, "written if and only if accepted");
        status
    };
    let name = "vwd_predictor_calibrate";
    let mut call = Call::with::<vwd_predictor_calibrate_args>(backend, name, SIZES, handle, invoke);
    call.scalar("flags", offset_of!(vwd_predictor_calibrate_args, flags), 0, FLAGS);
    call.takes_no_stream();
    call.scalar("k", offset_of!(vwd_predictor_calibrate_args, k), 4, &[]);
    call.float("ratio", offset_of!(vwd_predictor_calibrate_args, ratio), 1.25, &[0.5, -1.0, f32::NAN, f32::INFINITY]);
    let grid = Box::leak(Box::new([vwd_holt { alpha: 1.0, beta: 0.5, gamma: 0.0 }; 2]));
    call.scalar("grid_count", offset_of!(vwd_predictor_calibrate_args, grid_count), 2, &[0]);
    call.array("grid", offset_of!(vwd_predictor_calibrate_args, grid), grid.as_ptr());
    call.input("scores", offset_of!(vwd_predictor_calibrate_args, scores), F32, "B pages Hk? nb?");
    call.input("block_counts", offset_of!(vwd_predictor_calibrate_args, block_counts), I32, "B pages").values(&[9; 18]);
    call
}

// --- forecast --------------------------------------------------------------------------------------------------------

/// A forecast with memory and one solved map of two.
struct Forecast(*mut vwd_forecast);

impl Forecast {
    fn solved(backend: &Backend) -> Forecast {
        let flags = VWD_FORECAST_MEMORY;
        let options = vwd_forecast_options { flags, layers: 2, input_dim: 6, q_heads: 2, head_dim: 8, ..args() };
        let (x, q) = (Rng::new(1).normals(&[40, 6]), Rng::new(2).normals(&[40, 2, 8]));
        let host = Backend::cpu(1);
        let (x, q) =
            (Tensor::floats(&host, F32, &x, &Layout::default()), Tensor::floats(&host, F32, &q, &Layout::default()));
        let text = vwd_forecast_accumulate_args { layer: 0, x: x.c(), previous: q.c(), q: q.c(), ..args() };
        let mut forecast = std::ptr::null_mut();
        // SAFETY: every pointer is valid.
        unsafe {
            assert_ok(vwd_forecast_create(backend.session(), &options, &mut forecast));
            assert_ok(vwd_forecast_accumulate(forecast, &text));
            assert_ok(vwd_forecast_solve(forecast, 0));
        }
        Forecast(forecast)
    }
}

impl Drop for Forecast {
    fn drop(&mut self) {
        // SAFETY: created above, released once.
        unsafe { vwd_forecast_release(self.0) };
    }
}

const FORECAST_SIZES: &[(&str, usize)] = &[("N", 5), ("input", 6), ("heads", 2), ("dim", 8), ("half", 2)];

fn forecast_accumulate(backend: &Backend) -> Call<'_> {
    let forecast = Forecast::solved(backend);
    let handle = ("forecast", forecast.0.cast_const().cast());
    let invoke = move |handle: *const c_void, args: *const c_void, _| {
        let _alive = &forecast;
        // SAFETY: the table passes a forecast (or NULL) and arguments (or less), as C might.
        unsafe { vwd_forecast_accumulate(handle.cast(), args.cast()) }
    };
    let name = "vwd_forecast_accumulate";
    let mut call = Call::with::<vwd_forecast_accumulate_args>(backend, name, FORECAST_SIZES, handle, invoke);
    call.scalar("flags", offset_of!(vwd_forecast_accumulate_args, flags), 0, FLAGS);
    call.takes_no_stream();
    call.scalar("layer", offset_of!(vwd_forecast_accumulate_args, layer), 0, &[2, u32::MAX]);
    call.input("x", offset_of!(vwd_forecast_accumulate_args, x), F32, "N input").values(&[ONE; 30]);
    call.input("previous", offset_of!(vwd_forecast_accumulate_args, previous), F32, "N heads dim").values(&[ONE; 80]);
    call.input("q", offset_of!(vwd_forecast_accumulate_args, q), F32, "N heads dim").values(&[ONE; 80]);
    call
}

fn forecast_project(backend: &Backend) -> Call<'_> {
    let forecast = Forecast::solved(backend);
    let handle = ("forecast", forecast.0.cast_const().cast());
    let invoke = move |handle: *const c_void, args: *const c_void, stream| {
        let _alive = &forecast;
        // SAFETY: the table passes a forecast (or NULL) and arguments (or less), as C might.
        unsafe { vwd_forecast_project(handle.cast(), args.cast(), stream) }
    };
    let name = "vwd_forecast_project";
    let mut call = Call::with::<vwd_forecast_project_args>(backend, name, FORECAST_SIZES, handle, invoke);
    call.scalar("flags", offset_of!(vwd_forecast_project_args, flags), 0, FLAGS);
    // Map 1 is not solved.
    call.scalar("layer", offset_of!(vwd_forecast_project_args, layer), 0, &[1, 2, u32::MAX]);
    let names = ["rope", "rope.struct_size", "rope.flags"];
    let rope = call.nested::<vwd_rope>(names, offset_of!(vwd_forecast_project_args, rope));
    call.may_be_null("rope");
    call.scalar("rope.style", rope + offset_of!(vwd_rope, style), VWD_ROPE_HALVES, &[2, u32::MAX]);
    call.scalar("rope.rotary_dim", rope + offset_of!(vwd_rope, rotary_dim), 4, &[3, 10, u32::MAX]);
    call.float("rope.theta", rope + offset_of!(vwd_rope, theta), 0.0, &[-1.0, f32::NAN, f32::INFINITY]);
    call.float("rope.attention_factor", rope + offset_of!(vwd_rope, attention_factor), 0.0, NO_NUMBER);
    call.input("rope.inv_freq", rope + offset_of!(vwd_rope, inv_freq), F32, "half").optional();
    call.input("x", offset_of!(vwd_forecast_project_args, x), F32, "N input");
    call.input("previous", offset_of!(vwd_forecast_project_args, previous), F32, "N heads dim");
    call.input("positions", offset_of!(vwd_forecast_project_args, positions), I32, "N");
    call.output("q", offset_of!(vwd_forecast_project_args, q), F32, "N heads dim");
    call
}
