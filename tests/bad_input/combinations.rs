//! Arguments of attention and repair of which each is fine, and which make no sense together.

use crate::support::*;
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

const SESSION_STREAM: vwd_stream = null_mut();

/// Tensors of every shape that the calls below take.
struct Memory<'b> {
    backend: &'b Backend,
    kv: vwd_paged_kv,
    q: Tensor<'b>,
    rows: Tensor<'b>,
    lists: [vwd_block_list; 2],
    out: [Tensor<'b>; 2],
    partials: vwd_attention_partials,
}

impl<'b> Memory<'b> {
    fn new(backend: &'b Backend) -> Memory<'b> {
        let leak = |dtype, shape: &[usize]| leaked(backend, dtype, shape);
        let list = |ids: &[usize], counts: &[usize]| vwd_block_list {
            ids: leak(I32, ids),
            counts: leak(I32, counts),
            slots: absent(),
        };
        let tensor = |shape: &[usize]| Tensor::poisoned(backend, F16, shape, &Layout::default());
        Memory {
            backend,
            kv: vwd_paged_kv {
                k: leak(F16, &[4, 16, 2, 64]),
                v: leak(F16, &[4, 16, 2, 64]),
                page_table: leak(I32, &[2, 3]),
                seq_lens: leak(I32, &[2]),
                ..args()
            },
            q: tensor(&[2, 4, 64]),
            rows: tensor(&[2, 3, 4, 64]),
            lists: [list(&[2, 2, 5], &[2, 2]), list(&[2, 3, 2, 5], &[2, 3, 2])],
            out: [tensor(&[2, 4, 64]), tensor(&[2, 3, 4, 64])],
            partials: vwd_attention_partials {
                acc: leak(F32, &[2, 4, 5, 64]),
                m: leak(F32, &[2, 4, 5]),
                l: leak(F32, &[2, 4, 5]),
            },
        }
    }

    fn attention(&self) -> vwd_attention_args {
        let (kv, list) = (kept(self.kv), self.lists[0]);
        vwd_attention_args { block_size: 16, kv, q: self.q.c(), list, out: self.out[0].c(), ..args() }
    }

    fn repair(&self) -> vwd_repair_args {
        vwd_repair_args {
            mode: VWD_REPAIR_EXACT,
            block_size: 16,
            kv: kept(self.kv),
            q: self.q.c(),
            predicted: self.lists[0],
            selected: self.lists[0],
            predicted_partials: self.partials,
            out: self.out[0].c(),
            ..args()
        }
    }

    /// The call is refused, with these words.
    #[track_caller]
    fn refuses(&self, call: &vwd_attention_args, words: &[&str]) {
        // SAFETY: the tensors live as long as the process.
        let status = unsafe { vwd_attention(self.backend.session(), call, SESSION_STREAM) };
        assert_refused(status, words);
    }

    #[track_caller]
    fn refuses_repair(&self, call: &vwd_repair_args, words: &[&str]) {
        // SAFETY: as above.
        let status = unsafe { vwd_repair(self.backend.session(), call, SESSION_STREAM) };
        assert_refused(status, words);
    }
}

#[track_caller]
pub fn assert_refused(status: vwd_status, words: &[&str]) {
    let text = last_error();
    assert_eq!(status, VWD_ERROR_INVALID_ARGUMENT, "{words:?}");
    assert!(text.starts_with(words[0]) && words.iter().all(|word| text.contains(word)), "{words:?} in {text:?}");
}

/// A tensor in memory that is kept for good.
pub fn leaked(backend: &Backend, dtype: DType, shape: &[usize]) -> vwd_tensor {
    let tensor = Tensor::poisoned(backend, dtype, shape, &Layout::default());
    let c = tensor.c();
    std::mem::forget(tensor);
    c
}

/// Where two arguments disagree, the message says from which one the expectation comes, or blames the one that disagrees with all others.
pub fn messages_say_where_expectations_come_from() {
    let backend = &Backend::cpu(1);
    let memory = Memory::new(backend);
    let call = memory.attention();
    // Three lengths, where q and the page table have two sequences.
    let lens = vwd_paged_kv { seq_lens: leaked(backend, I32, &[3]), ..memory.kv };
    memory.refuses(&vwd_attention_args { kv: kept(lens), ..call }, &["kv.seq_lens: shape [3]; expected [B of q=2]"]);
    let out = leaked(backend, U8, &[2, 4, 64]);
    memory.refuses(
        &vwd_attention_args { q: leaked(backend, F32, &[2, 4, 64]), out, ..call },
        &["out: dtype uint8; expected float32"],
    );
    assert!(last_error().ends_with("expected float32"), "{}", last_error());

    // k transposed: [pages, Hk, P, D].
    let index = |heads: usize| {
        let summaries = leaked(backend, F16, &[4, 1, heads, 64]);
        kept(vwd_index { kind: VWD_INDEX_MINMAX, block_size: 16, key_max: summaries, key_min: summaries, ..args() })
    };
    let update = vwd_index_update_args {
        index: index(2),
        k: leaked(backend, F16, &[4, 2, 16, 64]),
        page_table: leaked(backend, I32, &[2, 9]),
        seq_lens: leaked(backend, I32, &[2]),
        ..args()
    };
    // SAFETY: the tensors live as long as the process.
    let status = unsafe { vwd_index_update(backend.session(), &update, SESSION_STREAM) };
    assert_refused(status, &["index.key_max: 2 KV heads; expected the 16 of k, [pages, P, Hk, D] = [4, 2, 16, 64]"]);
    // q of other heads than the keys'.
    let selection = vwd_select_blocks_args {
        method: VWD_SELECT_MINMAX,
        block_size: 16,
        k: 1,
        index: index(2),
        q: leaked(backend, F16, &[2, 4, 32]),
        seq_lens: leaked(backend, I32, &[2]),
        ..args()
    };
    // SAFETY: as above.
    let status = unsafe { vwd_select_blocks(backend.session(), &selection, SESSION_STREAM) };
    assert_refused(status, &["index.key_max: shape [4, 1, 2, 64]; expected [pages, rows, Hk, D of q=32]"]);
    // A method that reads another kind of index.
    let by_axis = vwd_select_blocks_args { method: VWD_SELECT_AXIS, q: leaked(backend, F16, &[2, 4, 64]), ..selection };
    // SAFETY: as above.
    let status = unsafe { vwd_select_blocks(backend.session(), &by_axis, SESSION_STREAM) };
    assert_refused(status, &["index.kind: VWD_INDEX_MINMAX (1); expected VWD_INDEX_AXIS (4) for this method"]);
}

/// Nothing is written where one update is wrong, or where two write the same memory.
pub fn updates_of_layers_are_all_made_or_none() {
    let backend = &Backend::cpu(2);
    let lens = Tensor::ints(backend, I32, &Array::new(&[2], vec![16, 9]), &Layout::default());
    let tensor = |shape: &[usize]| Tensor::poisoned(backend, F32, shape, &Layout::default());
    let k = tensor(&[2, 16, 2, 64]);
    let summaries: [Tensor; 6] = std::array::from_fn(|_| tensor(&[2, 1, 2, 64]));
    let update = |key_max: &Tensor, key_min: &Tensor| {
        let (key_max, key_min) = (key_max.c(), key_min.c());
        let index = vwd_index { kind: VWD_INDEX_MINMAX, block_size: 16, key_max, key_min, ..args() };
        vwd_index_update_args { index: kept(index), k: k.c(), seq_lens: lens.c(), ..args() }
    };
    let [a, b, c, d, e, f] = &summaries;
    let right = [update(a, b), update(c, d), update(e, f)];
    let call = |updates: &[*const vwd_index_update_args]| {
        // SAFETY: the tensors live longer than the call.
        unsafe { vwd_index_update_layers(backend.session(), updates.as_ptr(), updates.len() as u32, SESSION_STREAM) }
    };
    let refuses = |updates: [&vwd_index_update_args; 3], words: &[&str]| {
        assert_refused(call(&updates.map(|update| &raw const *update)), words);
        summaries.iter().for_each(|summary| summary.assert_untouched("a summary"));
    };
    let [one, two, three] = &right;
    let (f16, fewer) = (leaked(backend, F16, &[2, 16, 2, 64]), leaked(backend, I32, &[1]));
    refuses([one, &vwd_index_update_args { k: f16, ..*two }, three], &["updates[1].index.key_max: ", "float16"]);
    let i32 = leaked(backend, I32, &[2, 16, 2, 64]);
    refuses([one, &vwd_index_update_args { k: i32, ..*two }, three], &["updates[1].k: dtype int32; expected "]);
    refuses([one, two, &vwd_index_update_args { k: absent(), ..*three }], &["updates[2].k: "]);
    refuses([one, two, &vwd_index_update_args { seq_lens: fewer, page_table: lens.c(), ..*three }], &["updates[2]."]);
    refuses([one, two, &vwd_index_update_args { struct_size: 12, ..*three }], &["updates[2].struct_size: 12"]);
    refuses([one, two, &vwd_index_update_args { index: std::ptr::null(), ..*three }], &["updates[2].index: NULL"]);
    // SAFETY: the struct is kept for good.
    let size = kept(vwd_index { struct_size: 4, ..unsafe { *two.index } });
    refuses([one, &vwd_index_update_args { index: size, ..*two }, three], &["updates[1].index.struct_size: 4"]);
    refuses(
        [one, two, one],
        &["updates[2].index: its summaries overlap those of updates[0].index; expected memory of its own"],
    );
    refuses([one, two, &update(e, c)], &["updates[2].index: its summaries overlap those of updates[1].index"]);
    refuses([one, &update(c, c), three], &["updates[1].index.key_m"]);

    assert_refused(call(&[one, std::ptr::null()]), &["updates[1]: NULL; expected "]);
    // SAFETY: what is wrong is found before an update is read.
    let status = |updates: *const *const vwd_index_update_args, count| unsafe {
        vwd_index_update_layers(backend.session(), updates, count, SESSION_STREAM)
    };
    assert_refused(status(std::ptr::null(), 1), &["updates: NULL; expected an array of 1 pointers"]);
    let array = [&raw const *one; 2];
    assert_refused(status(array.as_ptr().wrapping_byte_add(1), 1), &["updates: ", "an array of 1 pointers"]);
    for count in [257, 300, u32::MAX] {
        assert_refused(status(std::ptr::null(), count), &[&format!("count: {count}; expected 0 to 256")]);
    }
    summaries.iter().for_each(|summary| summary.assert_untouched("a summary"));
    assert_ok(status(std::ptr::null(), 0));
    assert_ok(status(array.as_ptr(), 0));
    summaries.iter().for_each(|summary| summary.assert_untouched("a summary"));
    assert_ok(call(&[one, two, three]));
    summaries.iter().for_each(|summary| summary.assert_written("a summary", |_| true));
}

/// A forgotten k would select nothing, without a word.
pub fn budgets_of_nothing_are_refused() {
    let backend = &Backend::cpu(1);
    let leak = |dtype, shape: &[usize]| leaked(backend, dtype, shape);
    let list =
        |cap: usize| vwd_block_list { ids: leak(I32, &[2, 1, cap]), counts: leak(I32, &[2, 1]), slots: absent() };
    let table = leak(I32, &[2, 3]);
    let summaries = leak(F16, &[6, 1, 1, 64]);
    let index =
        vwd_index { kind: VWD_INDEX_MINMAX, block_size: 16, table, key_max: summaries, key_min: summaries, ..args() };
    let blocks = vwd_select_blocks_args {
        method: VWD_SELECT_MINMAX,
        block_size: 16,
        index: kept(index),
        q: leak(F16, &[2, 1, 64]),
        seq_lens: leak(I32, &[2]),
        selected: list(3),
        ..args()
    };
    let select = |call: &vwd_select_blocks_args| {
        // SAFETY: the tensors live as long as the process.
        unsafe { vwd_select_blocks(backend.session(), call, SESSION_STREAM) }
    };
    let words = ["k: 0; expected at least 1 where there are no budgets, init_blocks or local_blocks"];
    assert_refused(select(&blocks), &words);
    for call in [
        vwd_select_blocks_args { k: 1, ..blocks },
        vwd_select_blocks_args { init_blocks: 1, ..blocks },
        vwd_select_blocks_args { local_blocks: 1, ..blocks },
        vwd_select_blocks_args { budgets: leak(I32, &[2]), ..blocks },
        vwd_select_blocks_args { selected: list(0), ..blocks },
    ] {
        assert_ok(select(&call));
    }
    let rows = vwd_topk_args { scores: leak(F32, &[2, 9]), ids: leak(I32, &[2, 3]), counts: leak(I32, &[2]), ..args() };
    // SAFETY: as above.
    let status = unsafe { vwd_topk(backend.session(), &rows, SESSION_STREAM) };
    assert_refused(status, &["k: 0; expected at least 1 where there are no budgets"]);
}

pub fn attention_refuses_what_makes_no_sense_together() {
    let backend = &Backend::cpu(1);
    let memory = Memory::new(backend);
    let call = memory.attention();
    let with = |kv: vwd_paged_kv| vwd_attention_args { kv: kept(kv), ..call };
    let scale = leaked(backend, F32, &[1]);
    memory.refuses(&with(vwd_paged_kv { k_scale: scale, ..memory.kv }), &["kv.k_scale: ", "float16", "FP8"]);
    memory.refuses(&with(vwd_paged_kv { v_scale: scale, ..memory.kv }), &["kv.v_scale: ", "float16", "FP8"]);
    let bytes = leaked(backend, U8, &[4, 16, 2, 64]);
    memory.refuses(&with(vwd_paged_kv { k: bytes, v: bytes, ..memory.kv }), &["kv.k: ", "uint8"]);
    let q = leaked(backend, F8E4M3, &[2, 4, 64]);
    memory.refuses(&vwd_attention_args { q, ..call }, &["q: ", "float8_e4m3fn"]);
    let v = leaked(backend, F16, &[4, 16, 2, 32]);
    memory.refuses(&with(vwd_paged_kv { v, ..memory.kv }), &["scale: 0", "D=64", "Dv=32"]);

    let everything =
        vwd_attention_args { list: vwd_block_list { ids: absent(), counts: absent(), slots: absent() }, ..call };
    memory.refuses(&everything, &["block_size: 16", "0 without a list"]);
    let partials = vwd_attention_args { block_size: 0, partials: memory.partials, ..everything };
    memory.refuses(&partials, &["partials: ", "without a list", "need"]);
    memory.refuses(&vwd_attention_args { list: memory.lists[1], ..call }, &["list.ids: ", "[B=2, Hk=2, cap]"]);
    let rows = vwd_attention_args { q: memory.rows.c(), ..call };
    memory.refuses(&rows, &["out: ", "[B=2, Q=3, Hq=4, Dv=64]"]);
}

pub fn slots_refuse_what_makes_no_sense_beside_them() {
    let backend = &Backend::cpu(1);
    let memory = Memory::new(backend);
    let pool = leaked(backend, F16, &[9, 16, 1, 64]);
    let in_pool = vwd_paged_kv { k: pool, v: pool, page_table: absent(), ..memory.kv };
    let list = vwd_block_list { slots: leaked(backend, I32, &[2, 2, 5]), ..memory.lists[0] };
    let call = vwd_attention_args { kv: kept(in_pool), list, ..memory.attention() };
    // SAFETY: the tensors live as long as the process.
    assert_ok(unsafe { vwd_attention(backend.session(), &call, SESSION_STREAM) });
    let with = |kv: vwd_paged_kv| vwd_attention_args { kv: kept(kv), ..call };
    let both = vwd_paged_kv { page_table: memory.kv.page_table, ..in_pool };
    memory.refuses(&with(both), &["kv.page_table: ", "slots", "one of the two"]);
    let two_heads = vwd_paged_kv { k: memory.kv.k, v: memory.kv.v, ..in_pool };
    memory.refuses(&with(two_heads), &["kv.k: ", "2 KV heads", "[slots, P, 1, D]"]);
    memory.refuses(&vwd_attention_args { block_size: 32, ..call }, &["block_size: 32", "16 tokens of a slot"]);
    let alone = vwd_block_list { ids: absent(), counts: absent(), ..list };
    memory.refuses(&vwd_attention_args { list: alone, ..call }, &["list.ids: "]);
    let repair = vwd_repair_args { predicted: list, selected: list, kv: kept(in_pool), ..memory.repair() };
    memory.refuses_repair(&repair, &["predicted.slots: ", "no slots"]);
}

pub fn repair_refuses_what_makes_no_sense_together() {
    let backend = &Backend::cpu(1);
    let memory = Memory::new(backend);
    let rows = vwd_repair_args { q: memory.rows.c(), out: memory.out[1].c(), ..memory.repair() };
    let mixed = vwd_repair_args { selected: memory.lists[1], ..rows };
    memory.refuses_repair(&mixed, &["predicted.ids: ", "rank of selected.ids"]);
    let mixed = vwd_repair_args { predicted: memory.lists[1], ..rows };
    memory.refuses_repair(&mixed, &["predicted.ids: ", "rank of selected.ids"]);
    let missing = vwd_repair_args {
        predicted_partials: vwd_attention_partials { acc: absent(), m: absent(), l: absent() },
        ..memory.repair()
    };
    memory.refuses_repair(&missing, &["predicted_partials: absent", "the partials of attention over predicted"]);
}

pub fn remainder_refuses_what_makes_no_sense_beside_it() {
    let backend = &Backend::cpu(1);
    let memory = Memory::new(backend);
    let leak = |dtype, shape: &[usize]| leaked(backend, dtype, shape);
    let remainder = vwd_remainder {
        tokens: leak(I32, &[2, 2]),
        mean_k: leak(F32, &[2, 2, 64]),
        mean_v: leak(F32, &[2, 2, 64]),
        covariance: leak(F32, &[2, 2, 64, 64]),
        ..args()
    };
    let state = vwd_attention_state { acc: leak(F32, &[2, 4, 64]), m: leak(F32, &[2, 4]), l: leak(F32, &[2, 4]) };
    let log_mass = leak(F32, &[2, 4]);
    let call = vwd_attention_args { remainder: kept(remainder), log_mass, state, ..memory.attention() };
    // SAFETY: the tensors live as long as the process.
    assert_ok(unsafe { vwd_attention(backend.session(), &call, SESSION_STREAM) });
    let none = vwd_attention_state { acc: absent(), m: absent(), l: absent() };
    memory.refuses(&vwd_attention_args { state: none, ..call }, &["state: absent", "remainder"]);
    memory.refuses(&vwd_attention_args { log_mass: absent(), ..call }, &["log_mass: absent", "remainder"]);
    memory.refuses(&vwd_attention_args { remainder: std::ptr::null(), ..call }, &["remainder: NULL", "log_mass"]);
    let list = vwd_block_list { ids: absent(), counts: absent(), slots: absent() };
    memory.refuses(&vwd_attention_args { list, block_size: 0, ..call }, &["remainder: ", "without a list"]);
    memory.refuses(&vwd_attention_args { partials: memory.partials, ..call }, &["partials: ", "remainder"]);
    memory.refuses(&vwd_attention_args { soft_cap: 30.0, ..call }, &["soft_cap: ", "remainder"]);
    memory.refuses(&vwd_attention_args { window: 9, ..call }, &["window: ", "remainder"]);
    let few = vwd_remainder { tokens: leak(I32, &[1, 2]), ..remainder };
    memory.refuses(&vwd_attention_args { remainder: kept(few), ..call }, &["remainder.tokens: 1 rows for 2 sequences"]);
    let other = vwd_remainder { mean_k: leak(F32, &[2, 2, 32]), ..remainder };
    memory.refuses(&vwd_attention_args { remainder: kept(other), ..call }, &["remainder.mean_k: ", "D=64"]);
}
