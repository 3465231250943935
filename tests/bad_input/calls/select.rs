//! Summaries, selection and top k.

use super::*;

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
pub fn index_update(backend: &Backend, kind: u32, float8: bool) -> Call<'_> {
    let mut call = Call::new::<vwd_index_update_args>(backend, "vwd_index_update", SIZES, vwd_index_update);
    describe_update(&mut call, kind, float8);
    call
}

/// The second of two updates is the table's. The first one is right, and is not made where the second is wrong.
pub fn index_update_layers(backend: &Backend, kind: u32) -> Call<'_> {
    let tensor = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &Layout::default());
    let k = tensor(F32, &[1, 8, 2, 16]);
    let lens = Tensor::ints(backend, I32, &Array::new(&[1], vec![8]), &Layout::default());
    let summaries = [(); 2].map(|()| tensor(F32, &[1, 1, 2, 16]));
    let name = "vwd_index_update_layers";
    let handle = ("session", backend.session().cast());
    let mut call = Call::with::<vwd_index_update_args>(backend, name, SIZES, handle, move |session, second, stream| {
        let [key_max, key_min] = summaries.each_ref().map(Tensor::c);
        let index = vwd_index { kind: VWD_INDEX_MINMAX, block_size: 8, key_max, key_min, ..args() };
        let first = vwd_index_update_args { index: &index, k: k.c(), seq_lens: lens.c(), ..args() };
        let updates = [&raw const first, second.cast()];
        summaries.iter().for_each(Tensor::repoison);
        // SAFETY: the table passes a session (or NULL) and a second update (or less), as C might.
        let status = unsafe { vwd_index_update_layers(session.cast(), updates.as_ptr(), 2, stream) };
        if status != VWD_OK {
            summaries.iter().for_each(|summary| summary.assert_untouched("a summary of the first update"));
        }
        status
    });
    call.args_are_a_member("updates[1]");
    describe_update(&mut call, kind, false);
    call
}

fn describe_update(call: &mut Call, kind: u32, float8: bool) {
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
    index(call, offset_of!(vwd_index_update_args, index), kind, Role::Out);
}

pub fn channel_importance(backend: &Backend) -> Call<'_> {
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

pub fn select_blocks(backend: &Backend, method: u32, rows: Rows) -> Call<'_> {
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
    let log_mass = offset_of!(vwd_select_blocks_args, log_mass);
    match method {
        VWD_SELECT_AXIS => _ = call.output("log_mass", log_mass, F32, "B Hq").optional(),
        _ => call.refused("log_mass", log_mass),
    }
    call
}

pub fn select_tokens(backend: &Backend, rows: Rows) -> Call<'_> {
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

pub fn topk(backend: &Backend) -> Call<'_> {
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
