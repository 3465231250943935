//! What is refused, what is counted, and what the slots are for.

use crate::model::{self, NO_STREAM, Shape, tensor};
use crate::support::*;
use std::ffi::c_void;
use vanward::abi::*;
use vanward::capi::*;

const SHAPE: Shape = Shape {
    layers: 2,
    heads: 2,
    block: 4,
    dims: [16, 16],
    dtype: F32,
    scales: false,
    coded: false,
    decoded: false,
    sequences: 3,
    blocks: 8,
    slots: &[16],
};
const RUN: u64 = 2 * 4 * 16 * 4;

/// A cache with a session of its own.
struct Cache {
    // Before the session: fields drop in order.
    cache: model::Cache,
    session: Backend,
}

impl Cache {
    fn new(options: &vwd_kv_cache_options) -> Cache {
        let session = Backend::cpu(1);
        Cache { cache: model::Cache::on(&session, options), session }
    }
}

impl std::ops::Deref for Cache {
    type Target = model::Cache;
    fn deref(&self) -> &model::Cache {
        &self.cache
    }
}

fn options() -> vwd_kv_cache_options {
    SHAPE.options()
}

fn capacity(options: &vwd_kv_cache_options) -> vwd_kv_cache_sizes {
    let mut sizes = args();
    // SAFETY: both are valid.
    assert_ok(unsafe { vwd_kv_cache_capacity(options, &mut sizes) });
    sizes
}

/// Appends tokens whose keys and values are `value` + their number, to one sequence and every layer.
fn append(cache: &Cache, sequence: u32, begin: usize, count: usize, value: f32) {
    // SAFETY: the cache lives.
    assert_ok(unsafe { vwd_kv_cache_extend(cache.raw, sequence, (begin + count) as u64, NO_STREAM) });
    let rows: Vec<f32> = (0..count * 2 * 16).map(|n| value + (begin + n / 32) as f32).collect();
    for layer in 0..2 {
        assert_ok(append_rows(cache, layer, &[sequence as i32], begin as i32, &rows));
    }
}

fn append_rows(cache: &Cache, layer: u32, sequences: &[i32], begin: i32, rows: &[f32]) -> vwd_status {
    let batch = sequences.len();
    let rows = tensor(rows, F32, &[batch, rows.len() / 32 / batch, 2, 16]);
    let begin = vec![begin; batch];
    let call = vwd_kv_cache_append_args {
        layer,
        sequences: tensor(sequences, I32, &[batch]),
        begin: tensor(&begin, I32, &[batch]),
        k: rows,
        v: rows,
        ..args()
    };
    // SAFETY: everything is valid.
    unsafe { vwd_kv_cache_append(cache.raw, &call, NO_STREAM) }
}

/// Slots of the same blocks for both KV heads of layer 0, and how many were missed.
fn resolve(cache: &Cache, sequences: &[u32], ids: &[i32]) -> (Vec<i32>, i32) {
    let (batch, cap) = (sequences.len(), ids.len());
    let numbers: Vec<i32> = sequences.iter().map(|&n| n as i32).collect();
    let ids = ids.repeat(2 * batch);
    let (slots, counts, missed) = (vec![-7i32; ids.len()], vec![cap as i32; 2 * batch], vec![-7i32; 2 * batch]);
    let call = vwd_kv_cache_resolve_args {
        sequences: tensor(&numbers, I32, &[batch]),
        wanted: vwd_block_list {
            ids: tensor(&ids, I32, &[batch, 2, cap]),
            counts: tensor(&counts, I32, &[batch, 2]),
            slots: tensor(&slots, I32, &[batch, 2, cap]),
        },
        missed_counts: tensor(&missed, I32, &[batch, 2]),
        ..args()
    };
    // SAFETY: everything is valid.
    assert_ok(unsafe { vwd_kv_cache_resolve(cache.raw, &call, NO_STREAM) });
    (std::hint::black_box(slots), std::hint::black_box(missed).iter().sum())
}

fn fetch(cache: &Cache) {
    // SAFETY: the cache lives.
    assert_ok(unsafe { vwd_kv_cache_fetch(cache.raw, 0, NO_STREAM) });
}

/// The first key of a slot.
fn key(cache: &Cache, slot: i32) -> f32 {
    let view = cache.view(0);
    // SAFETY: inside the view.
    unsafe { view.k.data.cast::<f32>().offset((slot as i64 * view.k.strides[0]) as isize).read() }
}

#[test]
fn capacity_is_what_a_cache_takes_of_its_session() {
    let (sizes, cache) = (capacity(&options()), Cache::new(&options()));
    assert_eq!(sizes.run_bytes, RUN);
    assert_eq!(sizes.host_bytes, 2 * 8 * 2 * RUN);
    assert_eq!(sizes.total_slots, 3 * 3 * 2 + 16);
    assert_eq!(sizes.largest_selection, 8);
    assert!(sizes.device_bytes >= 2 * sizes.total_slots * RUN);
    assert_eq!(cache.session.details().pinned_in_use, sizes.host_bytes);
    let stats = cache.stats();
    assert_eq!((stats.host_bytes, stats.device_bytes), (sizes.host_bytes, sizes.device_bytes));
}

#[test]
fn cache_that_cannot_have_its_memory_keeps_nothing() {
    let limited = vwd_session_options { device: VWD_DEVICE_CPU, threads: 1, pinned_limit: 1 << 10, ..args() };
    let session = Session::create(&limited).expect("a session");
    let mut cache = std::ptr::null_mut();
    // SAFETY: everything is valid.
    let status = unsafe { vwd_kv_cache_create(session.raw(), &options(), &mut cache) };
    assert_fails(status, VWD_ERROR_OUT_OF_MEMORY, &["pinned memory", "limit"]);
    assert!(cache.is_null());
    assert_eq!(session.details().pinned_in_use, 0);
}

#[test]
fn creation_tells_its_progress() {
    unsafe extern "C" fn tell(told: *mut c_void, done: u64, total: u64) {
        // SAFETY: the test passes a list.
        unsafe { &mut *told.cast::<Vec<(u64, u64)>>() }.push((done, total));
    }
    let (mut told, sizes) = (Vec::<(u64, u64)>::new(), capacity(&options()));
    let with = vwd_kv_cache_options { progress: Some(tell), progress_context: (&raw mut told).cast(), ..options() };
    drop(Cache::new(&with));
    let total = sizes.host_bytes + sizes.device_bytes;
    assert!(told.is_sorted() && told.iter().all(|told| told.1 == total));
    assert_eq!((told[0].0, told.last().expect("calls").0), (0, total));
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let refused = |with: fn(&mut vwd_kv_cache_options), pieces: &[&str]| {
        let mut options = options();
        with(&mut options);
        let mut sizes = args();
        // SAFETY: both are valid.
        assert_fails(unsafe { vwd_kv_cache_capacity(&options, &mut sizes) }, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    refused(|o| o.flags = 1, &["options.flags"]);
    refused(|o| o.layers = 0, &["options.layers: 0", "at least 1"]);
    refused(|o| o.kv_heads = 0, &["options.kv_heads"]);
    refused(|o| o.block_size = 0, &["options.block_size"]);
    refused(|o| o.max_sequences = 0, &["options.max_sequences"]);
    refused(|o| o.max_blocks = 0, &["options.max_blocks"]);
    refused(|o| o.host_blocks = 0, &["options.host_blocks"]);
    refused(|o| o.slots = 0, &["options.slots"]);
    refused(|o| o.layer_slots = [16, 8].as_ptr(), &["options.slots: 16", "0 with options.layer_slots"]);
    refused(|o| (o.slots, o.layer_slots) = (0, [16, 0].as_ptr()), &["options.layer_slots[1]: 0", "at least 1"]);
    refused(
        |o| (o.slots, o.layer_slots) = (0, [1, 16].as_ptr()),
        &["options.hold: 2", "the 1 of options.layer_slots[0]"],
    );
    refused(|o| (o.slots, o.layer_slots) = (0, [16, u32::MAX].as_ptr()), &["options.layer_slots[1]", "2^31"]);
    refused(|o| o.hold = 17, &["options.hold: 17", "at most the 16 of options.slots"]);
    refused(|o| o.key_dim = 20, &["options.key_dim: 20", "multiple of 8"]);
    refused(|o| o.value_dim = 584, &["options.value_dim: 584"]);
    refused(|o| o.dtype_bits = 64, &["options.dtype_code", "64 bits", "float32"]);
    refused(|o| o.dtype_code = 256 + 2, &["options.dtype_code"]);
    refused(|o| o.token_scales = 1, &["options.token_scales: 1 for float32", "FP8"]);
    refused(|o| o.token_scales = 2, &["options.token_scales: 2"]);
    refused(|o| o.coding = 2, &["options.coding: 2", "VWD_CODING_INT4"]);
    refused(|o| o.weights = [1.0].as_ptr(), &["options.weights: given", "VWD_CODING_INT4"]);
    let coded = |o: &mut vwd_kv_cache_options| {
        (o.coding, o.block_size, o.key_dim, o.value_dim) = (VWD_CODING_INT4, 16, 64, 64);
    };
    let mut sizes: vwd_kv_cache_sizes = args();
    let mut possible = options();
    coded(&mut possible);
    // SAFETY: both are valid.
    assert_ok(unsafe { vwd_kv_cache_capacity(&possible, &mut sizes) });
    refused(|o| (o.coding, o.block_size) = (VWD_CODING_INT4, 24), &["options.block_size: 24 with INT4", "16 to 128"]);
    refused(
        |o| (o.coding, o.block_size, o.key_dim) = (VWD_CODING_INT4, 16, 32),
        &["options.key_dim: 32 with INT4", "64 to 256"],
    );
    refused(
        |o| (o.coding, o.block_size, o.key_dim, o.value_dim) = (VWD_CODING_INT4, 16, 64, 72),
        &["options.value_dim: 72 with INT4"],
    );
    refused(
        |o| (o.coding, o.block_size, o.dtype_code, o.dtype_bits) = (VWD_CODING_INT4, 16, 10, 8),
        &["options.dtype_code: float8_e4m3fn with INT4", "bfloat16"],
    );
    possible.slot_coding = VWD_SLOTS_DECODED;
    // SAFETY: both are valid.
    assert_ok(unsafe { vwd_kv_cache_capacity(&possible, &mut sizes) });
    let exact = &["options.slot_coding: VWD_SLOTS_DECODED with VWD_CODING_EXACT", "VWD_CODING_INT4 beside it"];
    refused(|o| o.slot_coding = VWD_SLOTS_DECODED, exact);
    refused(|o| (o.slot_coding, o.dtype_code, o.dtype_bits) = (VWD_SLOTS_DECODED, 4, 16), exact);
    refused(|o| (o.slot_coding, o.dtype_code, o.dtype_bits) = (VWD_SLOTS_DECODED, 10, 8), exact);
    refused(|o| o.slot_coding = u32::MAX, &["options.slot_coding: 4294967295", "VWD_SLOTS_AS_STORED"]);
    refused(|o| (o.coding, o.slot_coding) = (2, VWD_SLOTS_DECODED), &["options.coding: 2", "VWD_CODING_INT4"]);
    refused(
        |o| {
            (o.coding, o.block_size, o.key_dim, o.value_dim) = (VWD_CODING_INT4, 16, 64, 64);
            o.slot_coding = 2;
        },
        &["options.slot_coding: 2", "VWD_SLOTS_AS_STORED or VWD_SLOTS_DECODED"],
    );
    refused(
        |o| (o.coding, o.block_size, o.slot_coding) = (VWD_CODING_INT4, 24, VWD_SLOTS_DECODED),
        &["options.block_size: 24 with INT4", "16 to 128"],
    );
    refused(|o| o.reserved = 1, &["options.reserved: 1"]);
    refused(|o| o.host_blocks = u32::MAX, &["options.host_blocks", "2^31"]);
    refused(|o| o.max_blocks = 1 << 30, &["options.max_blocks", "2^31"]);
    refused(|o| o.slots = u32::MAX, &["options.slots", "2^31"]);
    refused(
        |o| (o.max_sequences, o.max_blocks, o.kv_heads) = (1 << 20, 1 << 12, 1),
        &["options.max_sequences", "2^31"],
    );
    refused(
        |o| (o.layers, o.host_blocks, o.block_size, o.max_blocks) = (u32::MAX, 1 << 29, 1 << 30, 1),
        &["options", "2^63"],
    );
}

#[test]
fn calls_refuse_what_is_not_in_the_cache() {
    let cache = Cache::new(&options());
    let sequence = cache.add().expect("room");
    let (raw, absent_handle) = (cache.raw, std::ptr::null_mut());
    let mut fork = 77;
    // SAFETY: NULL is an error; everything else is valid.
    unsafe {
        let unknown = vwd_kv_cache_extend(raw, sequence + 1, 1, NO_STREAM);
        assert_fails(unknown, VWD_ERROR_INVALID_ARGUMENT, &["sequence: 1", "a sequence of this cache"]);
        let unknown = vwd_kv_cache_extend(raw, u32::MAX, 1, NO_STREAM);
        assert_fails(unknown, VWD_ERROR_INVALID_ARGUMENT, &["sequence: 4294967295"]);
        let too_many = vwd_kv_cache_extend(raw, sequence, 12 * 4 + 1, NO_STREAM);
        assert_fails(too_many, VWD_ERROR_INVALID_ARGUMENT, &["tokens: 49", "12 blocks of 4 tokens"]);
        let beyond = vwd_kv_cache_fork(raw, sequence, 1, &mut fork, NO_STREAM);
        assert_fails(beyond, VWD_ERROR_INVALID_ARGUMENT, &["tokens: 1", "at most 0"]);
        let beyond = vwd_kv_cache_truncate(raw, sequence, 1, NO_STREAM);
        assert_fails(beyond, VWD_ERROR_INVALID_ARGUMENT, &["tokens: 1"]);
        let nowhere = vwd_kv_cache_fork(raw, sequence, 0, std::ptr::null_mut(), NO_STREAM);
        assert_fails(nowhere, VWD_ERROR_INVALID_ARGUMENT, &["fork: NULL"]);
        let nowhere = vwd_kv_cache_add(raw, std::ptr::null_mut(), NO_STREAM);
        assert_fails(nowhere, VWD_ERROR_INVALID_ARGUMENT, &["sequence: NULL"]);
        assert_fails(vwd_kv_cache_fetch(raw, 2, NO_STREAM), VWD_ERROR_INVALID_ARGUMENT, &["layer: 2", "0 … 1"]);
        assert_fails(vwd_kv_cache_wait(raw, 9, NO_STREAM), VWD_ERROR_INVALID_ARGUMENT, &["layer: 9"]);
        let mut view = args();
        assert_fails(vwd_kv_cache_view(raw, 2, &mut view), VWD_ERROR_INVALID_ARGUMENT, &["layer: 2"]);
        let stream = std::ptr::dangling_mut();
        assert_fails(vwd_kv_cache_fetch(raw, 0, stream), VWD_ERROR_INVALID_ARGUMENT, &["stream", "NULL"]);
        assert_fails(vwd_kv_cache_free(absent_handle, 0, NO_STREAM), VWD_ERROR_INVALID_ARGUMENT, &["cache: NULL"]);
        assert_fails(vwd_kv_cache_free(raw, 2, NO_STREAM), VWD_ERROR_INVALID_ARGUMENT, &["sequence: 2"]);
        assert_ok(vwd_kv_cache_free(raw, sequence, NO_STREAM));
        assert_fails(vwd_kv_cache_free(raw, sequence, NO_STREAM), VWD_ERROR_INVALID_ARGUMENT, &["sequence: 0"]);
        vwd_kv_cache_release(absent_handle);
    }
    assert_eq!(fork, 77, "written in spite of an error");
}

#[test]
fn selection_beyond_the_slots_is_refused() {
    let cache = Cache::new(&options());
    let (ids, counts) = ([0i32; 10], [5i32; 2]);
    let list = |slots| vwd_block_list {
        ids: tensor(&ids, I32, &[1, 2, 5]),
        counts: tensor(&counts, I32, &[1, 2]),
        slots: if slots { tensor(&ids, I32, &[1, 2, 5]) } else { absent() },
    };
    let numbers = [0i32];
    let refused = |wanted, resident, pieces: &[&str]| {
        let sequences = tensor(&numbers, I32, &[1]);
        let call = vwd_kv_cache_resolve_args { sequences, wanted, resident, ..args() };
        // SAFETY: everything is valid.
        let status = unsafe { vwd_kv_cache_resolve(cache.raw, &call, NO_STREAM) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    let none = vwd_block_list { ids: absent(), counts: absent(), slots: absent() };
    refused(list(false), none, &["wanted.slots: data is NULL"]);
    refused(list(true), none, &["wanted.slots", "wanted.ids"]);
    let (apart, own) = ([0i32; 10], [0i32; 10]);
    let wanted = vwd_block_list { slots: tensor(&apart, I32, &[1, 2, 5]), ..list(false) };
    refused(wanted, none, &["wanted.ids: 10 entries", "at most 8", "slots 16 of layer 0", "hold 2"]);
    let resident = vwd_block_list { ids: tensor(&own, I32, &[1, 2, 5]), ..none };
    refused(wanted, resident, &["resident.counts"]);
}

#[test]
fn tokens_without_a_place_are_dropped_and_counted() {
    let cache = Cache::new(&options());
    let sequence = cache.add().expect("room");
    append(&cache, sequence, 0, 6, 100.0);
    let rows = vec![7.0f32; 2 * 32];
    // There is room for eight tokens. Past a gap in the newest block and after it; in place, past the room; from five on, so that there are
    // seven, past which eight is a gap; before the beginning; of no sequence.
    let rows_of_two = [(0, 7, 2), (0, 9, 2), (0, 6, 0), (0, 7, 1), (0, 5, 0), (0, 8, 2), (0, 7, 1), (0, -1, 1)];
    for (sequences, begin, dropped) in rows_of_two.into_iter().chain([(2, 0, 2), (-1, 0, 2), (i32::MAX, 0, 2)]) {
        let before = cache.stats().dropped_tokens;
        assert_ok(append_rows(&cache, 0, &[sequences], begin, &rows));
        assert_eq!(cache.stats().dropped_tokens - before, dropped, "sequence {sequences} from {begin}");
    }
}

#[test]
fn block_that_sequences_share_is_stored_and_fetched_once() {
    let cache = Cache::new(&options());
    let first = cache.add().expect("room");
    append(&cache, first, 0, 20, 100.0);
    let second = cache.fork(first, 18).expect("room");
    assert_eq!(cache.stats().blocks_in_use, 6, "five, and one for what follows the four whole blocks that are shared");
    let (slots, missed) = resolve(&cache, &[first, second], &[1, 0]);
    assert_eq!((missed, &slots[..4]), (8, &slots[4..]));
    fetch(&cache);
    assert_eq!(cache.stats().bytes_fetched, 4 * RUN);
    assert_eq!([key(&cache, slots[0]), key(&cache, slots[1])], [104.0, 100.0]);
    assert_eq!(resolve(&cache, &[second], &[0, 1]).1, 0, "both are there");
    let stats = cache.stats();
    assert_eq!((stats.hits, stats.misses, stats.waits, stats.evictions), (4, 8, 0, 0));
}

#[test]
fn missed_block_is_one_run_of_keys_and_values() {
    let cache = Cache::new(&options());
    let sequence = cache.add().expect("room");
    append(&cache, sequence, 0, 24, 100.0);
    let (slots, missed) = resolve(&cache, &[sequence], &[0]);
    fetch(&cache);
    assert_eq!((missed, cache.stats().bytes_fetched), (2, 2 * RUN), "of two KV heads");
    let vwd_kv_cache_layer { k, v, .. } = cache.view(0);
    assert_eq!(v.data as usize - k.data as usize, RUN as usize / 2, "values follow the keys of their block");
    for slot in slots {
        // SAFETY: inside the view.
        let run = unsafe {
            std::slice::from_raw_parts(k.data.cast::<f32>().add(slot as usize * RUN as usize / 4), 2 * 4 * 16)
        };
        let expected: Vec<f32> = [0, 1].iter().flat_map(|_| (0..4 * 16).map(|n| 100.0 + (n / 16) as f32)).collect();
        assert_eq!(run, expected, "slot {slot}");
    }
}

/// Sixteen slots take eight blocks of two KV heads.
#[test]
fn copy_for_a_slot_that_was_given_away_does_not_land() {
    let cache = Cache::new(&vwd_kv_cache_options { hold: 1, slots: 4, ..options() });
    let sequence = cache.add().expect("room");
    append(&cache, sequence, 0, 24, 100.0);
    assert_eq!(resolve(&cache, &[sequence], &[0, 1]).1, 4);
    let (slots, missed) = resolve(&cache, &[sequence], &[2, 3]);
    assert_eq!(missed, 4);
    fetch(&cache);
    assert_eq!(cache.stats().bytes_fetched, 4 * RUN, "those of the second list");
    assert_eq!([key(&cache, slots[0]), key(&cache, slots[1])], [108.0, 112.0]);
    assert_eq!(resolve(&cache, &[sequence], &[0, 1]).1, 4);
}

#[test]
fn what_the_last_resolves_named_keeps_its_slot() {
    let cache = Cache::new(&vwd_kv_cache_options { hold: 2, slots: 8, ..options() });
    let sequence = cache.add().expect("room");
    append(&cache, sequence, 0, 28, 100.0);
    let (first, _) = resolve(&cache, &[sequence], &[0, 1]);
    fetch(&cache);
    let (second, _) = resolve(&cache, &[sequence], &[2, 3]);
    fetch(&cache);
    assert!(second.iter().all(|slot| !first.contains(slot)));
    assert_eq!([key(&cache, first[0]), key(&cache, second[1])], [100.0, 112.0]);
}

/// Token by token, and several blocks at once.
#[test]
fn block_that_leaves_the_tail_is_resident_at_once() {
    let cache = Cache::new(&options());
    let [by_token, by_chunk] = [(); 2].map(|()| cache.add().expect("room"));
    for token in 0..16 {
        append(&cache, by_token, token, 1, 100.0);
        let left = (token / 4) as i32 - 2;
        if left >= 0 {
            let (slots, missed) = resolve(&cache, &[by_token], &[left]);
            assert_eq!((missed, key(&cache, slots[0])), (0, 100.0 + 4.0 * left as f32), "after token {token}");
        }
    }
    append(&cache, by_chunk, 0, 13, 500.0);
    let (slots, missed) = resolve(&cache, &[by_chunk], &[0, 1]);
    assert_eq!(
        (missed, key(&cache, slots[1])),
        (2, 504.0),
        "the last one has left the tail, the first never was there"
    );
    fetch(&cache);
    let stats = cache.stats();
    assert_eq!((stats.bytes_fetched, stats.misses, stats.evictions, stats.unused), (2 * RUN, 2, 0, 0));
}

#[test]
fn block_that_leaves_the_tail_takes_no_slot_that_a_list_may_name() {
    let cache = Cache::new(&vwd_kv_cache_options { hold: 1, slots: 4, ..options() });
    let sequence = cache.add().expect("room");
    append(&cache, sequence, 0, 16, 100.0);
    // One of those that are named has a slot since it left the tail.
    let (slots, missed) = resolve(&cache, &[sequence], &[0, 1]);
    assert_eq!(missed, 2);
    append(&cache, sequence, 16, 1, 100.0);
    fetch(&cache);
    assert_eq!([key(&cache, slots[0]), key(&cache, slots[1])], [100.0, 104.0]);
    assert_eq!(resolve(&cache, &[sequence], &[2]).1, 2, "all slots were named");
    append(&cache, sequence, 17, 4, 100.0);
    // Block 2 is still to be copied, blocks 0 and 1 are not named any more.
    let (slots, missed) = resolve(&cache, &[sequence], &[3]);
    assert_eq!((missed, key(&cache, slots[0])), (0, 112.0));
    assert_eq!(
        cache.stats().evictions,
        2 + 2 + 2,
        "by the second resolve and the last append; by that in the other layer"
    );
    // A resolve may give away what left the tail, so it finds as many slots as it is promised.
    let (slots, missed) = resolve(&cache, &[sequence], &[0, 1]);
    fetch(&cache);
    assert_eq!([key(&cache, slots[0]), key(&cache, slots[1])], [100.0, 104.0]);
    assert!(missed > 0);
}

#[test]
fn freed_sequence_leaves_nothing_that_a_later_one_reads() {
    let cache = Cache::new(&options());
    let first = cache.add().expect("room");
    append(&cache, first, 0, 24, 100.0);
    resolve(&cache, &[first], &[0, 1]);
    // SAFETY: the cache lives.
    assert_ok(unsafe { vwd_kv_cache_free(cache.raw, first, NO_STREAM) });
    let second = cache.add().expect("room");
    append(&cache, second, 0, 24, 500.0);
    fetch(&cache);
    assert_eq!(cache.stats().bytes_fetched, 0, "what was asked for is no more");
    let (slots, missed) = resolve(&cache, &[second], &[0, 1]);
    assert_eq!(missed, 4);
    fetch(&cache);
    assert_eq!([key(&cache, slots[0]), key(&cache, slots[1])], [500.0, 504.0]);
}

/// Attention over slots is attention over the tokens.
#[test]
fn attention_reads_what_lists_resolve_to() {
    const TOKENS: usize = 23;
    let cache = Cache::new(&options());
    let sequence = cache.add().expect("room");
    rounds(1, |rng| {
        let rows: Vec<f32> = (0..TOKENS * 2 * 16).map(|_| rng.normal() as f32).collect();
        // SAFETY: the cache lives.
        assert_ok(unsafe { vwd_kv_cache_extend(cache.raw, sequence, TOKENS as u64, NO_STREAM) });
        assert_ok(append_rows(&cache, 0, &[sequence as i32], 0, &rows));
        let (ids, blocks) = ([0i32, 2, 5].repeat(2), vec![3i32; 2]);
        let (slots, lens) = (resolve(&cache, &[sequence], &ids[..3]).0, [TOKENS as i32]);
        fetch(&cache);
        let view = cache.view(0);
        let q: Vec<f32> = (0..4 * 16).map(|_| rng.normal() as f32).collect();
        let attend = |kv: vwd_paged_kv, slots: vwd_tensor| -> Vec<f32> {
            let out = vec![0f32; 4 * 16];
            let list =
                vwd_block_list { ids: tensor(&ids, I32, &[1, 2, 3]), counts: tensor(&blocks, I32, &[1, 2]), slots };
            let call = vwd_attention_args {
                block_size: 4,
                kv: &kv,
                q: tensor(&q, F32, &[1, 4, 16]),
                list,
                out: tensor(&out, F32, &[1, 4, 16]),
                ..args()
            };
            // SAFETY: everything is valid.
            assert_ok(unsafe { vwd_attention(cache.session.session(), &call, NO_STREAM) });
            std::hint::black_box(out)
        };
        let seq_lens = tensor(&lens, I32, &[1]);
        let in_slots = vwd_paged_kv { k: view.k, v: view.v, seq_lens, ..args() };
        let plain = tensor(&rows, F32, &[1, TOKENS, 2, 16]);
        let whole = vwd_paged_kv { k: plain, v: plain, seq_lens, ..args() };
        let found = attend(in_slots, tensor(&slots, I32, &[1, 2, 3]));
        assert_eq!(found, attend(whole, absent()), "the same tokens in the same order");
    });
}

/// Summaries are kept up to date from the tails.
#[test]
fn index_of_new_tokens_is_built_from_the_tails() {
    let cache = Cache::new(&options());
    let sequence = cache.add().expect("room");
    let (high, low) = (vec![0f32; 6 * 2 * 16], vec![0f32; 6 * 2 * 16]);
    for token in 0..24usize {
        append(&cache, sequence, token, 1, 100.0);
        let view = cache.view(0);
        let (lens, begin) = ([token as i32 + 1], [token as i32]);
        let summaries = |of: &[f32]| tensor(of, F32, &[1, 6, 2, 16]);
        let index = vwd_index {
            kind: VWD_INDEX_MINMAX,
            block_size: 4,
            key_max: summaries(&high),
            key_min: summaries(&low),
            ..args()
        };
        let call = vwd_index_update_args {
            index: &index,
            k: view.tail_k,
            page_table: row(&view.tail_table, sequence),
            seq_lens: tensor(&lens, I32, &[1]),
            begin: tensor(&begin, I32, &[1]),
            ..args()
        };
        // SAFETY: everything is valid.
        assert_ok(unsafe { vwd_index_update(cache.session.session(), &call, NO_STREAM) });
    }
    let (high, low) = (std::hint::black_box(high), std::hint::black_box(low));
    for (n, (high, low)) in high.iter().zip(&low).enumerate() {
        let block = (n / 32) as f32;
        assert_eq!((*high, *low), (100.0 + 4.0 * block + 3.0, 100.0 + 4.0 * block));
    }
}

/// That row of a matrix, as a matrix.
fn row(t: &vwd_tensor, n: u32) -> vwd_tensor {
    let mut row = *t;
    row.shape[0] = 1;
    row.data = t.data.cast::<i32>().wrapping_offset((n as i64 * t.strides[0]) as isize).cast();
    row
}

fn compact(cache: &Cache, sequence: i32, base: i32, path: &[i32], accepted: Option<i32>) {
    let accepted = accepted.map(|accepted| [accepted]);
    let call = vwd_kv_cache_compact_args {
        sequences: tensor(&[sequence], I32, &[1]),
        bases: tensor(&[base], I32, &[1]),
        path: tensor(path, I32, &[1, path.len()]),
        accepted: accepted.as_ref().map_or(absent(), |accepted| tensor(accepted, I32, &[1])),
        ..args()
    };
    // SAFETY: everything is valid.
    assert_ok(unsafe { vwd_kv_cache_compact(cache.raw, &call, NO_STREAM) });
}

/// The keys of a block in its slot, the first channel of each token; both KV heads have the same.
fn keys(cache: &Cache, sequence: u32, block: i32) -> Vec<f32> {
    let (slots, _) = resolve(cache, &[sequence], &[block]);
    fetch(cache);
    let view = cache.view(0);
    let of = |slot: i32| -> Vec<f32> {
        let token = |t: i64| slot as i64 * view.k.strides[0] + t * view.k.strides[1];
        // SAFETY: inside the view.
        (0..4).map(|t| unsafe { view.k.data.cast::<f32>().offset(token(t) as isize).read() }).collect()
    };
    let [first, second] = [of(slots[0]), of(slots[1])];
    assert_eq!(first, second, "KV heads of block {block}");
    first
}

#[test]
fn accepted_nodes_follow_each_other_and_end_the_sequence() {
    let cache = Cache::new(&options());
    let sequence = cache.add().expect("a sequence");
    append(&cache, sequence, 0, 6, 0.0);
    // Five nodes from token 6 on, 100 … 104: they end block 1 and begin block 2.
    append(&cache, sequence, 6, 5, 94.0);
    let before = cache.stats().bytes_written_back;
    assert_eq!(before, 2 * 2 * 2 * RUN, "blocks 0 and 1");
    compact(&cache, sequence as i32, 6, &[0, 2, 4, 1], None);
    assert_eq!(cache.stats().bytes_written_back - before, 2 * 2 * RUN, "block 1 once more");
    assert_eq!(keys(&cache, sequence, 1), [4.0, 5.0, 100.0, 102.0]);
    assert_eq!(keys(&cache, sequence, 2)[0], 104.0);
    // The sequence has nine tokens: one behind a gap is dropped, the next one is not.
    append(&cache, sequence, 10, 1, 0.0);
    assert_eq!(cache.stats().dropped_tokens, 2);
    // Blocks 1 and 2 leave the tail.
    append(&cache, sequence, 9, 11, 0.0);
    assert_eq!(cache.stats().dropped_tokens, 2);
    let found = [0, 1, 2, 3, 4].map(|block| keys(&cache, sequence, block));
    let expected = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 100.0, 102.0], [104.0, 9.0, 10.0, 11.0]];
    assert_eq!(found[..3], expected);
    assert_eq!(found[3..], [[12.0, 13.0, 14.0, 15.0], [16.0, 17.0, 18.0, 19.0]]);
    // What lies in host memory is what was accepted, too.
    let fork = {
        let mut child = u32::MAX;
        // SAFETY: everything is valid.
        assert_ok(unsafe { vwd_kv_cache_fork(cache.raw, sequence, 7, &mut child, NO_STREAM) });
        child
    };
    assert_eq!(keys(&cache, fork, 1)[..3], [4.0, 5.0, 100.0]);
}

#[test]
fn path_that_moves_nothing_writes_nothing() {
    let cache = Cache::new(&options());
    let sequence = cache.add().expect("a sequence");
    append(&cache, sequence, 0, 14, 0.0);
    let written = cache.stats().bytes_written_back;
    let all = || [0, 1, 2, 3].map(|block| keys(&cache, sequence, block)).concat()[..14].to_vec();
    let before = all();
    let number = sequence as i32;
    // No row, no such sequence, no path; a root that has left the tail, or has not come yet.
    compact(&cache, -1, 8, &[0, 2], None);
    compact(&cache, number + 1, 8, &[0, 2], None);
    compact(&cache, number, 8, &[-1, 2], None);
    compact(&cache, number, 8, &[0, 2], Some(-1));
    compact(&cache, number, 7, &[0, 2], None);
    compact(&cache, number, 14, &[0, 1], None);
    compact(&cache, number, -2, &[0, 1], None);
    compact(&cache, number, i32::MAX, &[0, i32::MAX], None);
    assert_eq!(all(), before);
    // The sequence has 14 tokens still.
    append(&cache, sequence, 14, 1, 0.0);
    // A chain moves nothing, but ends the sequence; so does a path that leads to a node that there is not, or back.
    for (path, accepted, len) in [(vec![0, 1, 2, 3], None, 12), (vec![0, 1, 9], None, 10), (vec![0, 0], Some(1), 9)] {
        append(&cache, sequence, 8, 6, 0.0);
        compact(&cache, number, 8, &path, accepted);
        assert_eq!(all(), before, "{path:?}");
        let dropped = cache.stats().dropped_tokens;
        append(&cache, sequence, len + 1, 1, 0.0);
        assert_eq!(cache.stats().dropped_tokens, dropped + 2, "{path:?}: behind a gap");
    }
    assert_eq!(cache.stats().bytes_written_back - written, 3 * 2 * 2 * RUN, "block 2 by each append, and by no path");
}
