//! The tiered KV cache on CUDA: copies beside the stream, and steps in a graph.

use crate::Case;
use crate::graph::{Graph, check};
use crate::model::{Arena, Cache, Checked, SHAPES, assert_met};
use crate::support::*;
use cudarc::driver::sys;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    (
        "kv_cache_holds_what_was_appended_after_a_hundred_thousand_operations",
        kv_cache_holds_what_was_appended_after_a_hundred_thousand_operations,
    ),
    ("kv_cache_step_replays_a_graph_with_other_tokens", kv_cache_step_replays_a_graph_with_other_tokens),
    (
        "kv_cache_block_that_leaves_the_tail_is_resident_in_the_same_replay",
        kv_cache_block_that_leaves_the_tail_is_resident_in_the_same_replay,
    ),
    ("kv_cache_in_int4_replays_an_append_with_other_tokens", kv_cache_in_int4_replays_an_append_with_other_tokens),
    ("kv_cache_is_released_with_copies_under_way", kv_cache_is_released_with_copies_under_way),
    ("kv_cache_beyond_the_device_is_an_error_that_keeps_nothing", kv_cache_beyond_the_device_is_an_error),
];

/// `VANWARD_CACHE_OPERATIONS`: so many instead, where each costs more.
fn kv_cache_holds_what_was_appended_after_a_hundred_thousand_operations(backend: &Backend) {
    let given: Option<usize> = std::env::var("VANWARD_CACHE_OPERATIONS").ok().and_then(|n| n.parse().ok());
    let operations = given.unwrap_or(100_000) / SHAPES.len();
    for shape in &SHAPES {
        rounds(1, |rng| {
            let mut checked = Checked::new(shape, backend);
            for _ in 0..operations {
                checked.step(rng);
            }
            let stats = checked.finish();
            if given.is_none() {
                assert_met(&stats);
            }
        });
    }
}

const HEADS: usize = 2;
const BLOCK: usize = 4;
const DIM: usize = 16;
const SEQUENCES: usize = 3;
const BLOCKS: usize = 40;
const CAP: usize = 4;

fn options() -> vwd_kv_cache_options {
    vwd_kv_cache_options {
        layers: 2,
        kv_heads: HEADS as u32,
        block_size: BLOCK as u32,
        key_dim: DIM as u32,
        value_dim: DIM as u32,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        max_sequences: SEQUENCES as u32,
        max_blocks: BLOCKS as u32,
        host_blocks: (SEQUENCES * BLOCKS) as u32,
        slots: (2 * SEQUENCES * HEADS * CAP + 8) as u32,
        hold: 2,
        ..args()
    }
}

/// What a token's keys are, all alike.
fn key(layer: usize, sequence: usize, token: usize, head: usize) -> f32 {
    (token * 100 + sequence * 10 + layer * 2 + head) as f32
}

/// A sequence of each number, with room for all its blocks.
fn begun(backend: &Backend) -> Cache {
    let cache = Cache::on(backend, &options());
    for n in 0..SEQUENCES as u32 {
        assert_eq!(cache.add(), Ok(n));
        assert_ok(cache.extend(n, BLOCKS * BLOCK));
    }
    backend.finish(VWD_OK);
    cache
}

/// Appends a token to every sequence of both layers, resolves lists of its blocks and waits for them: in a graph, whose replays
/// read what lies in the same tensors then.
fn kv_cache_step_replays_a_graph_with_other_tokens(backend: &Backend) {
    let (cache, arena) = (begun(backend), Arena::new(backend));
    let lists = SEQUENCES * HEADS;
    let sequences = arena.place(&std::array::from_fn::<i32, SEQUENCES, _>(|n| n as i32));
    let begin = arena.place(&[0i32; SEQUENCES]);
    let rows = [(); 2].map(|()| arena.place(&[0f32; SEQUENCES * HEADS * DIM]));
    let ids = arena.place(&vec![0i32; lists * CAP]);
    let counts = arena.place(&vec![CAP as i32; lists]);
    let slots = [(); 2].map(|()| arena.place(&vec![-7i32; lists * CAP]));
    let numbers = sequences.tensor(I32, &[SEQUENCES]);
    let graph = Graph::capture(backend.stream().cast(), || {
        for layer in 0..2 {
            let k = rows[layer].tensor(F32, &[SEQUENCES, 1, HEADS, DIM]);
            let begin = begin.tensor(I32, &[SEQUENCES]);
            assert_ok(cache.append(&vwd_kv_cache_append_args {
                layer: layer as u32,
                sequences: numbers,
                begin,
                k,
                v: k,
                ..args()
            }));
            let wanted = vwd_block_list {
                ids: ids.tensor(I32, &[SEQUENCES, HEADS, CAP]),
                counts: counts.tensor(I32, &[SEQUENCES, HEADS]),
                slots: slots[layer].tensor(I32, &[SEQUENCES, HEADS, CAP]),
            };
            let call = vwd_kv_cache_resolve_args { layer: layer as u32, sequences: numbers, wanted, ..args() };
            assert_ok(cache.resolve(&call));
            assert_ok(cache.fetch(layer));
        }
        (0..2).for_each(|layer| assert_ok(cache.wait(layer)));
    });
    let views = [0, 1].map(|layer| cache.view(layer));
    let run = views[0].k.strides[0] as usize;
    let total = views[0].k.shape[0] as usize;
    rounds(1, |rng| {
        for token in 0..BLOCKS * BLOCK {
            begin.write(&[token as i32; SEQUENCES]);
            for (layer, rows) in rows.iter().enumerate() {
                let of = |n: usize| key(layer, n / DIM / HEADS, token, n / DIM % HEADS);
                rows.write(&(0..SEQUENCES * HEADS * DIM).map(of).collect::<Vec<_>>());
            }
            let named: Vec<i32> = (0..lists * CAP).map(|_| rng.int(0..=(token / BLOCK) as i64) as i32).collect();
            ids.write(&named);
            graph.replay();
            for layer in 0..2 {
                let mut pool = vec![0u8; total * run * 4];
                backend.read(views[layer].k.data as usize, &mut pool);
                for (n, (&slot, &id)) in slots[layer].read().iter().zip(&named).enumerate() {
                    let (sequence, head) = (n / CAP / HEADS, n / CAP % HEADS);
                    for t in 0..BLOCK.min(token + 1 - id as usize * BLOCK) {
                        let at = (slot as usize * run + t * DIM) * 4;
                        let found = f32::from_le_bytes(pool[at..at + 4].try_into().expect("four bytes"));
                        let expected = key(layer, sequence, id as usize * BLOCK + t, head);
                        assert_eq!(found, expected, "after token {token}: block {id} in slot {slot}");
                    }
                }
            }
        }
    });
    let stats = cache.stats();
    assert_eq!(stats.dropped_tokens, 0);
    assert!(stats.misses > 0 && stats.bytes_fetched > 0 && stats.bytes_written_back > 0, "what was tested?");
}

/// Appends tokens to every sequence and resolves the block before the two newest. Copies of older blocks are under way meanwhile.
fn kv_cache_block_that_leaves_the_tail_is_resident_in_the_same_replay(backend: &Backend) {
    for tokens in [1, 3, BLOCK + 1] {
        let (cache, arena) = (begun(backend), Arena::new(backend));
        let lists = SEQUENCES * HEADS;
        let numbers = arena.place(&std::array::from_fn::<i32, SEQUENCES, _>(|n| n as i32)).tensor(I32, &[SEQUENCES]);
        let begin = arena.place(&[0i32; SEQUENCES]);
        let rows = arena.place(&vec![0f32; SEQUENCES * tokens * HEADS * DIM]);
        let [left, older] = [0; 2].map(|_| arena.place(&vec![-1i32; lists]));
        let [slots, of_older, missed] = [0; 3].map(|_| arena.place(&vec![-7i32; lists]));
        let counts = arena.place(&vec![1i32; lists]).tensor(I32, &[SEQUENCES, HEADS]);
        let graph = Graph::capture(backend.stream().cast(), || {
            let k = rows.tensor(F32, &[SEQUENCES, tokens, HEADS, DIM]);
            let begin = begin.tensor(I32, &[SEQUENCES]);
            assert_ok(cache.append(&vwd_kv_cache_append_args { sequences: numbers, begin, k, v: k, ..args() }));
            for (ids, slots, is_read) in [(&left, &slots, true), (&older, &of_older, false)] {
                let [ids, slots] = [ids, slots].map(|t| t.tensor(I32, &[SEQUENCES, HEADS, 1]));
                let wanted = vwd_block_list { ids, counts, slots };
                let missed_counts = if is_read { missed.tensor(I32, &[SEQUENCES, HEADS]) } else { absent() };
                assert_ok(cache.resolve(&vwd_kv_cache_resolve_args {
                    sequences: numbers,
                    wanted,
                    missed_counts,
                    ..args()
                }));
                // Nobody waits.
                assert_ok(cache.fetch(0));
            }
        });
        let view = cache.view(0);
        let (run, total) = (view.k.strides[0] as usize, view.k.shape[0] as usize);
        rounds(1, |rng| {
            for first in (0..BLOCKS * BLOCK - tokens).step_by(tokens) {
                begin.write(&[first as i32; SEQUENCES]);
                let of = |n: usize| {
                    let (sequence, token) = (n / DIM / HEADS / tokens, first + n / DIM / HEADS % tokens);
                    key(0, sequence, token, n / DIM % HEADS)
                };
                rows.write(&(0..SEQUENCES * tokens * HEADS * DIM).map(of).collect::<Vec<_>>());
                let id = ((first + tokens - 1) / BLOCK) as i32 - 2;
                left.write(&vec![id; lists]);
                older.write(&(0..lists).map(|_| rng.int(-1..=id.max(0) as i64 - 1) as i32).collect::<Vec<_>>());
                graph.replay();
                if id < 0 {
                    continue;
                }
                assert_eq!(missed.read(), vec![0; lists], "block {id}, {tokens} tokens at a time");
                let mut pool = vec![0u8; total * run * 4];
                backend.read(view.k.data as usize, &mut pool);
                for (n, &slot) in slots.read().iter().enumerate() {
                    for t in 0..BLOCK {
                        let at = (slot as usize * run + t * DIM) * 4;
                        let found = f32::from_le_bytes(pool[at..at + 4].try_into().expect("four bytes"));
                        let expected = key(0, n / HEADS, id as usize * BLOCK + t, n % HEADS);
                        assert_eq!(found, expected, "block {id} in slot {slot}");
                    }
                }
            }
        });
        assert!(cache.stats().evictions > 0, "what was tested?");
    }
}

/// A cache in INT4, of one layer, and the tensors of its calls.
struct Coded<'b> {
    cache: Cache,
    arena: Arena<'b>,
    view: vwd_kv_cache_layer,
    is_decoded: bool,
}

/// The slots of the tails of such a cache.
const CODED_TAILS: usize = 4 * SEQUENCES * HEADS;
const CODED_BLOCK: usize = 16;
const CODED_DIM: usize = 64;
const CODED_BLOCKS: usize = 12;

impl<'b> Coded<'b> {
    fn new(backend: &'b Backend, slot_coding: u32) -> Coded<'b> {
        let cache = Cache::on(
            backend,
            &vwd_kv_cache_options {
                layers: 1,
                block_size: CODED_BLOCK as u32,
                key_dim: CODED_DIM as u32,
                value_dim: CODED_DIM as u32,
                max_blocks: CODED_BLOCKS as u32,
                host_blocks: (SEQUENCES * CODED_BLOCKS) as u32,
                coding: VWD_CODING_INT4,
                slot_coding,
                ..options()
            },
        );
        for n in 0..SEQUENCES as u32 {
            assert_eq!(cache.add(), Ok(n));
            assert_ok(cache.extend(n, CODED_BLOCKS * CODED_BLOCK));
        }
        let is_decoded = slot_coding == VWD_SLOTS_DECODED;
        Coded { view: cache.view(0), cache, arena: Arena::new(backend), is_decoded }
    }

    /// What block `id` has in its slot: its first tokens if they lie there as keys and values, or its codes, scales and mean.
    fn read(&self, backend: &Backend, slot: usize, tokens: usize) -> Vec<u8> {
        let (view, exact) = (&self.view, CODED_TAILS);
        let mut found = vec![];
        let mut take = |t: &vwd_tensor, page: usize, bytes: usize| {
            let mut part = vec![0; bytes];
            let step = page * t.strides[0] as usize * (t.dtype_bits as usize / 8);
            backend.read(t.data as usize + step, &mut part);
            found.extend(part);
        };
        if self.is_decoded || slot < exact {
            [&view.k, &view.v].iter().for_each(|t| take(t, slot, tokens.min(CODED_BLOCK) * CODED_DIM * 4));
            return found;
        }
        [&view.int4_k, &view.int4_v].iter().for_each(|t| take(t, slot - exact, CODED_BLOCK * CODED_DIM / 2));
        [&view.int4_k_scale, &view.int4_v_scale].iter().for_each(|t| take(t, slot - exact, CODED_BLOCK));
        take(&view.int4_means, slot - exact, CODED_DIM * 4);
        found
    }
}

/// Appends tokens to every sequence of a cache in INT4 and resolves lists of its blocks, in a graph and one call after the other: slots hold the
/// same exact tokens, and the same codes or what these stand for.
fn kv_cache_in_int4_replays_an_append_with_other_tokens(backend: &Backend) {
    for slot_coding in [VWD_SLOTS_AS_STORED, VWD_SLOTS_DECODED] {
        replay_appends_with_other_tokens(backend, slot_coding);
    }
}

fn replay_appends_with_other_tokens(backend: &Backend, slot_coding: u32) {
    for tokens in [5, CODED_BLOCK, 2 * CODED_BLOCK + 3] {
        let sides = [(); 2].map(|()| Coded::new(backend, slot_coding));
        backend.finish(VWD_OK);
        let lists = SEQUENCES * HEADS;
        let placed = sides.each_ref().map(|side| {
            let words = |count: usize| side.arena.place(&vec![0i32; count]);
            let floats = side.arena.place(&vec![0f32; SEQUENCES * tokens * HEADS * CODED_DIM]);
            ([words(SEQUENCES), words(SEQUENCES), words(lists * CAP), words(lists), words(lists * CAP)], floats)
        });
        let enqueue = |n: usize| {
            let ([numbers, begin, ids, counts, slots], rows) = &placed[n];
            let (sequences, begin) = (numbers.tensor(I32, &[SEQUENCES]), begin.tensor(I32, &[SEQUENCES]));
            let k = rows.tensor(F32, &[SEQUENCES, tokens, HEADS, CODED_DIM]);
            let cache = &sides[n].cache;
            assert_ok(cache.append(&vwd_kv_cache_append_args { sequences, begin, k, v: k, ..args() }));
            let wanted = vwd_block_list {
                ids: ids.tensor(I32, &[SEQUENCES, HEADS, CAP]),
                counts: counts.tensor(I32, &[SEQUENCES, HEADS]),
                slots: slots.tensor(I32, &[SEQUENCES, HEADS, CAP]),
            };
            assert_ok(cache.resolve(&vwd_kv_cache_resolve_args { sequences, wanted, ..args() }));
            assert_ok(cache.fetch(0));
            assert_ok(cache.wait(0));
        };
        for ([numbers, _, _, counts, _], _) in &placed {
            numbers.write(&std::array::from_fn::<i32, SEQUENCES, _>(|n| n as i32));
            counts.write(&vec![CAP as i32; lists]);
        }
        let graph = Graph::capture(backend.stream().cast(), || enqueue(0));
        let mut coded = 0;
        rounds(1, |rng| {
            // Where tokens are more than a block, the next append writes the newest of them again.
            for first in (0..(CODED_BLOCKS - 3) * CODED_BLOCK).step_by(tokens.min(CODED_BLOCK)) {
                let values: Vec<f32> =
                    (0..SEQUENCES * tokens * HEADS * CODED_DIM).map(|_| rng.normal() as f32).collect();
                let newest = (first + tokens - 1) / CODED_BLOCK;
                let named: Vec<i32> = (0..lists * CAP).map(|_| rng.int(0..=newest as i64) as i32).collect();
                for ([_, begin, ids, ..], rows) in &placed {
                    begin.write(&[first as i32; SEQUENCES]);
                    ids.write(&named);
                    rows.write(&values);
                }
                graph.replay();
                enqueue(1);
                backend.finish(VWD_OK);
                let slots = [0, 1].map(|n| placed[n].0[4].read());
                for (n, &id) in named.iter().enumerate() {
                    let count = first + tokens - id as usize * CODED_BLOCK;
                    let [found, expected] =
                        [0, 1].map(|side| sides[side].read(backend, slots[side][n] as usize, count));
                    assert_eq!(found, expected, "block {id} of {} tokens, {tokens} at a time", first + tokens);
                    coded += (slots[0][n] as usize >= CODED_TAILS) as usize;
                }
            }
        });
        assert!(coded > 0, "no list named a block in INT4");
        for side in &sides {
            assert_eq!(side.cache.stats().dropped_tokens, 0);
        }
    }
}

fn kv_cache_is_released_with_copies_under_way(backend: &Backend) {
    for _ in 0..8 {
        let (cache, arena) = (begun(backend), Arena::new(backend));
        let tokens = BLOCKS * BLOCK;
        let rows = arena.place(&vec![1f32; tokens * HEADS * DIM]);
        let k = rows.tensor(F32, &[1, tokens, HEADS, DIM]);
        let (number, begin) = (arena.place(&[0i32]).tensor(I32, &[1]), arena.place(&[0i32]).tensor(I32, &[1]));
        let ids: Vec<i32> = (0..HEADS * CAP).map(|n| n as i32).collect();
        let wanted = vwd_block_list {
            ids: arena.place(&ids).tensor(I32, &[1, HEADS, CAP]),
            counts: arena.place(&[CAP as i32; HEADS]).tensor(I32, &[1, HEADS]),
            slots: arena.place(&ids).tensor(I32, &[1, HEADS, CAP]),
        };
        assert_ok(cache.append(&vwd_kv_cache_append_args { sequences: number, begin, k, v: k, ..args() }));
        assert_ok(cache.resolve(&vwd_kv_cache_resolve_args { sequences: number, wanted, ..args() }));
        backend.finish(cache.fetch(0));
        drop(cache);
    }
}

/// The first of two layers finds room, and the second does not.
fn kv_cache_beyond_the_device_is_an_error(backend: &Backend) {
    let free = || {
        backend.finish(VWD_OK);
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current.
        unsafe { check(sys::cuMemGetInfo_v2(&mut free, &mut total)) };
        free
    };
    // What the driver keeps of a first cache is not looked for.
    drop(begun(backend));
    let (before, pinned) = (free(), backend.details().pinned_in_use);
    let large = vwd_kv_cache_options {
        block_size: 256,
        key_dim: 256,
        value_dim: 256,
        max_blocks: 4,
        host_blocks: 4,
        ..options()
    };
    let run = 256 * 2 * 256 * F32.bytes();
    let refused = |slots: usize| {
        let mut cache = std::ptr::null_mut();
        let options = vwd_kv_cache_options { slots: slots as u32, ..large };
        // SAFETY: everything is valid.
        let status = unsafe { vwd_kv_cache_create(backend.session(), &options, &mut cache) };
        assert_fails(status, VWD_ERROR_OUT_OF_MEMORY, &["bytes on the device", "out of memory"]);
        assert!(cache.is_null(), "written on failure");
        assert_eq!(backend.details().pinned_in_use, pinned);
        assert!(free() + (8 << 20) > before, "{} bytes are gone", before - free());
    };
    refused(before / 10 * 6 / run);
    refused(2 * before / run);
    assert_eq!(begun(backend).stats().misses, 0, "a small one is made as before");
}
