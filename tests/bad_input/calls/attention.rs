//! Attention, merging, repair, gather.

use super::*;

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

pub const STATE: [&str; 2] = ["B Hq D", "B Hq"];
const PARTIALS: [&str; 2] = ["B Hq cap D", "B Hq cap"];
pub const STATE_OF_ROWS: [&str; 2] = ["B Q Hq Dv", "B Q Hq"];
const PARTIALS_OF_ROWS: [&str; 2] = ["B Q Hq cap Dv", "B Q Hq cap"];

/// Values that no positive factor takes.
const NOT_POSITIVE: &[f32] = &[-1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

pub fn attention(backend: &Backend, over_list: bool) -> Call<'_> {
    let mut call = Call::new::<vwd_attention_args>(backend, "vwd_attention", SIZES, vwd_attention);
    call.has_scratch(vwd_attention_scratch);
    call.scalar("flags", offset_of!(vwd_attention_args, flags), 0, FLAGS_BUT_KEEP_ROWS);
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
    [SIZES, &[("Q", 2), ("⌈Q/32⌉", 1)]].concat()
}

/// Rows with lists of their own over FP8 whose values have a width of their own.
pub fn attention_of_rows(backend: &Backend) -> Call<'_> {
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
    let tree = offset_of!(vwd_attention_args, tree);
    call.input("tree", tree, U32, "B Q ⌈Q/32⌉").optional();
    call
}

/// The vwd_remainder that the field at `at` points to; what the sums are of has this role.
fn remainder(call: &mut Call, at: usize, role: Role) {
    let base = call.nested::<vwd_remainder>(["remainder", "remainder.struct_size", "remainder.flags"], at);
    let mut field = |name, offset: usize, dtype, shape| {
        let at = call.address(base + offset);
        call.field(name, at, role, dtype, shape);
    };
    field("remainder.tokens", offset_of!(vwd_remainder, tokens), I32, "N? Hk");
    field("remainder.mean_k", offset_of!(vwd_remainder, mean_k), F32, "N? Hk D");
    field("remainder.mean_v", offset_of!(vwd_remainder, mean_v), F32, "N? Hk D");
    field("remainder.covariance", offset_of!(vwd_remainder, covariance), F32, "N? Hk D D");
    call.input("remainder.rows", base + offset_of!(vwd_remainder, rows), I32, "B").optional().values(&[2, 0, 1]);
}

fn sizes_with_sums() -> Vec<(&'static str, usize)> {
    [SIZES, &[("N", 4)]].concat()
}

/// What the list leaves out is one more term.
pub fn attention_with_a_remainder(backend: &Backend) -> Call<'_> {
    let mut call = Call::new::<vwd_attention_args>(backend, "vwd_attention", &sizes_with_sums(), vwd_attention);
    call.has_scratch(vwd_attention_scratch);
    call.is_new_to_its_struct();
    call.scalar("block_size", offset_of!(vwd_attention_args, block_size), 8, &[0, 3, u32::MAX]);
    call.float("scale", offset_of!(vwd_attention_args, scale), 0.0, NOT_POSITIVE);
    call.float("soft_cap", offset_of!(vwd_attention_args, soft_cap), 0.0, &[30.0, f32::NAN]);
    call.scalar("window", offset_of!(vwd_attention_args, window), 0, &[1, u32::MAX]);
    call.input("q", offset_of!(vwd_attention_args, q), F16, "B Hq D");
    let kv = paged_kv(&mut call, offset_of!(vwd_attention_args, kv), F16, KV);
    page_table(&mut call, kv);
    list(&mut call, ["list.ids", "list.counts"], offset_of!(vwd_attention_args, list), Role::In, "B Hk cap?");
    call.output("out", offset_of!(vwd_attention_args, out), F16, "B Hq D");
    let at = call.address(offset_of!(vwd_attention_args, state));
    state(&mut call, ["state.acc", "state.m", "state.l"], at, Role::Out, STATE);
    remainder(&mut call, offset_of!(vwd_attention_args, remainder), Role::In);
    call.input("log_mass", offset_of!(vwd_attention_args, log_mass), F32, "B Hq");
    call
}

pub fn remainder_update(backend: &Backend) -> Call<'_> {
    type Args = vwd_remainder_update_args;
    let mut call = Call::new::<Args>(backend, "vwd_remainder_update", &sizes_with_sums(), vwd_remainder_update);
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.scalar("block_size", offset_of!(Args, block_size), 4, &[0, 3, 4097, u32::MAX]);
    let kv = paged_kv(&mut call, offset_of!(Args, kv), F16, KV);
    page_table(&mut call, kv);
    call.input("begin", offset_of!(Args, begin), I32, "B").optional();
    remainder(&mut call, offset_of!(Args, remainder), Role::Out);
    call
}

pub fn attention_over_slots(backend: &Backend) -> Call<'_> {
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

pub fn merge_states<'b>(backend: &'b Backend, shapes: [&'static str; 2]) -> Call<'b> {
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

pub fn repair(backend: &Backend, mode: u32) -> Call<'_> {
    let mut call = Call::new::<vwd_repair_args>(backend, "vwd_repair", SIZES, vwd_repair);
    call.has_scratch(vwd_repair_scratch);
    call.scalar("mode", offset_of!(vwd_repair_args, mode), mode, &[0, 3, u32::MAX]);
    call.scalar("block_size", offset_of!(vwd_repair_args, block_size), 8, &[0, 3, 5, 12, u32::MAX]);
    call.float("scale", offset_of!(vwd_repair_args, scale), 0.0, NOT_POSITIVE);
    call.float("soft_cap", offset_of!(vwd_repair_args, soft_cap), 30.0, NOT_POSITIVE);
    call.scalar("flags", offset_of!(vwd_repair_args, flags), 0, FLAGS_BUT_KEEP_ROWS);
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
pub fn repair_of_rows(backend: &Backend) -> Call<'_> {
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
    let tree = offset_of!(vwd_repair_args, tree);
    call.input("tree", tree, U32, "B Q ⌈Q/32⌉").optional();
    call
}

pub fn gather_blocks(backend: &Backend) -> Call<'_> {
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

pub fn gather_blocks_per_head(backend: &Backend) -> Call<'_> {
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
