//! Slots that differ by layer, and how they are shared out.

use crate::model::{Cache, NO_STREAM, tensor};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

const LAYERS: usize = 4;
const BLOCKS: usize = 64;
const DIM: usize = 16;
/// Entries of a list.
const CAP: usize = 8;
const STEPS: usize = 200;
/// Each layer's lists name blocks of a part of the context, so many of them.
const NAMED: [usize; LAYERS] = [10, 14, 20, 44];
const SLOTS: [u32; LAYERS] = [24; LAYERS];
const LEAST: u32 = 2 * CAP as u32;

fn options(slots: &[u32; LAYERS]) -> vwd_kv_cache_options {
    vwd_kv_cache_options {
        layers: LAYERS as u32,
        kv_heads: 1,
        block_size: 1,
        key_dim: DIM as u32,
        value_dim: DIM as u32,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        max_sequences: 1,
        max_blocks: BLOCKS as u32,
        host_blocks: BLOCKS as u32,
        layer_slots: slots.as_ptr(),
        ..args()
    }
}

fn stats(cache: &Cache, layer: usize) -> vwd_kv_cache_stats {
    let mut stats = args();
    // SAFETY: both are valid.
    assert_ok(unsafe { vwd_kv_cache_layer_info(cache.raw, layer as u32, &mut stats) });
    stats
}

/// Lists of every layer and step; a cache with these slots resolves and fetches them. Returns the first key of each entry, and the counters of each layer.
fn replay(
    backend: &Backend,
    slots: &[u32; LAYERS],
    trace: &[[Vec<i32>; LAYERS]],
) -> (Vec<f32>, [vwd_kv_cache_stats; LAYERS]) {
    let cache = Cache::on(backend, &options(slots));
    let sequence = cache.add().expect("room");
    assert_ok(cache.extend(sequence, BLOCKS));
    let (numbers, begin) = ([sequence as i32], [0i32]);
    let numbers = tensor(&numbers, I32, &[1]);
    let rows: Vec<f32> = (0..BLOCKS * DIM).map(|n| (n / DIM) as f32).collect();
    let k = tensor(&rows, F32, &[1, BLOCKS, 1, DIM]);
    let begin = tensor(&begin, I32, &[1]);
    for layer in 0..LAYERS as u32 {
        assert_ok(cache.append(&vwd_kv_cache_append_args { layer, sequences: numbers, begin, k, v: k, ..args() }));
    }
    let views = [0, 1, 2, 3].map(|layer| cache.view(layer));
    for (view, &slots) in views.iter().zip(slots) {
        assert_eq!(view.k.shape[0], slots as i64 + 3, "with those of the tail");
    }
    let mut keys = vec![];
    for step in trace {
        for (layer, ids) in step.iter().enumerate() {
            let (slots, counts) = (vec![-7i32; CAP], [CAP as i32]);
            let wanted = vwd_block_list {
                ids: tensor(ids, I32, &[1, 1, CAP]),
                counts: tensor(&counts, I32, &[1, 1]),
                slots: tensor(&slots, I32, &[1, 1, CAP]),
            };
            let call = vwd_kv_cache_resolve_args { layer: layer as u32, sequences: numbers, wanted, ..args() };
            assert_ok(cache.resolve(&call));
            assert_ok(cache.wait(layer));
            let k = &views[layer].k;
            keys.extend(std::hint::black_box(slots).iter().map(|&slot| {
                assert!((slot as i64) < k.shape[0]);
                // SAFETY: inside the view.
                unsafe { k.data.cast::<f32>().offset((slot as i64 * k.strides[0]) as isize).read() }
            }));
        }
    }
    (keys, [0, 1, 2, 3].map(|layer| stats(&cache, layer)))
}

fn trace(rng: &mut Rng) -> Vec<[Vec<i32>; LAYERS]> {
    let list = |rng: &mut Rng, named: usize| {
        let mut ids: Vec<i32> = (0..named as i32).collect();
        rng.shuffle(&mut ids);
        ids.truncate(CAP);
        ids
    };
    (0..STEPS).map(|_| NAMED.map(|named| list(rng, named))).collect()
}

fn share(total: u64, least: u32, slots: &[u32; LAYERS], misses: &[u64; LAYERS]) -> [u32; LAYERS] {
    let mut shares = [0; LAYERS];
    let call = vwd_kv_cache_share_args {
        layers: LAYERS as u32,
        least,
        total,
        slots: slots.as_ptr(),
        misses: misses.as_ptr(),
        shares: shares.as_mut_ptr(),
        ..args()
    };
    // SAFETY: everything is valid.
    assert_ok(unsafe { vwd_kv_cache_share_slots(&call) });
    shares
}

#[test]
fn slots_shared_by_misses_miss_less_in_the_same_memory_with_equal_results() {
    let backend = Backend::cpu(1);
    rounds(3, |rng| {
        let trace = trace(rng);
        let (expected, alike) = replay(&backend, &SLOTS, &trace);
        let total = SLOTS.iter().sum::<u32>();
        let shares = share(total as u64, LEAST, &SLOTS, &alike.map(|of| of.misses));
        assert_eq!(shares.iter().sum::<u32>(), total);
        let (found, shared) = replay(&backend, &shares, &trace);
        assert_eq!(found, expected);
        let sum = |of: &[vwd_kv_cache_stats; LAYERS], field: fn(&vwd_kv_cache_stats) -> u64| {
            of.iter().map(field).sum::<u64>()
        };
        // But for bookkeeping: five arrays of a layer, of an element for each slot, are aligned to 256 bytes.
        let [before, after] = [&alike, &shared].map(|of| sum(of, |of| of.device_bytes));
        assert!(before.abs_diff(after) <= LAYERS as u64 * 5 * 256, "{before} bytes, then {after}");
        let [before, after] = [&alike, &shared].map(|of| sum(of, |of| of.bytes_fetched));
        assert!(10 * after < 7 * before, "{before} bytes fetched, then {after} with {shares:?}");
        let [before, after] = [&alike, &shared].map(|of| sum(of, |of| of.misses));
        assert!(10 * after < 7 * before, "{before} misses, then {after} with {shares:?}");
    });
}

/// A list may take as many entries as its own layer has slots for.
#[test]
fn layer_with_fewer_slots_takes_smaller_lists() {
    let backend = Backend::cpu(1);
    let cache = Cache::on(&backend, &options(&[32, 16, 4, 20]));
    let mut sizes = vwd_kv_cache_sizes { ..args() };
    // SAFETY: both are valid.
    assert_ok(unsafe { vwd_kv_cache_capacity(&options(&[32, 16, 4, 20]), &mut sizes) });
    assert_eq!((sizes.largest_selection, sizes.total_slots), (2, 3 + 4));
    let parts: u64 = (0..LAYERS).map(|layer| stats(&cache, layer).device_bytes).sum();
    assert!(parts < sizes.device_bytes && sizes.device_bytes - parts < 4096, "{parts} of {}", sizes.device_bytes);
    let (ids, counts) = ([0i32; 16], [0i32]);
    let numbers = [-1i32];
    let resolve = |layer: u32, cap: usize| {
        let slots = [0i32; 16];
        let wanted = vwd_block_list {
            ids: tensor(&ids[..cap], I32, &[1, 1, cap]),
            counts: tensor(&counts, I32, &[1, 1]),
            slots: tensor(&slots[..cap], I32, &[1, 1, cap]),
        };
        let sequences = tensor(&numbers, I32, &[1]);
        cache.resolve(&vwd_kv_cache_resolve_args { layer, sequences, wanted, ..args() })
    };
    for (layer, most) in [(0, 16), (1, 8), (2, 2), (3, 10)] {
        assert_ok(resolve(layer, most));
        if most < 16 {
            let pieces = [format!("at most {most}"), format!("of layer {layer}")];
            assert_fails(resolve(layer, most + 1), VWD_ERROR_INVALID_ARGUMENT, &[&pieces[0], &pieces[1]]);
        }
    }
    // SAFETY: the cache lives, and there is a place.
    let status = unsafe { vwd_kv_cache_layer_info(cache.raw, 4, &mut args()) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["layer: 4", "0 … 3"]);
    // SAFETY: as above.
    assert_ok(unsafe { vwd_kv_cache_fetch(cache.raw, 0, NO_STREAM) });
}

#[test]
fn shares_of_senseless_arguments_are_refused() {
    let (slots, misses) = ([4u32, 4], [1u64, 1]);
    let mut shares = [7u32; 2];
    let good = vwd_kv_cache_share_args {
        layers: 2,
        least: 1,
        total: 8,
        slots: slots.as_ptr(),
        misses: misses.as_ptr(),
        shares: shares.as_mut_ptr(),
        ..args()
    };
    let none = [4u32, 0];
    let refused = |with: &dyn Fn(&mut vwd_kv_cache_share_args), pieces: &[&str]| {
        let mut call = good;
        with(&mut call);
        // SAFETY: everything is valid, or NULL.
        assert_fails(unsafe { vwd_kv_cache_share_slots(&call) }, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    refused(&|call| call.flags = 1, &["flags"]);
    refused(&|call| call.layers = 0, &["layers: 0"]);
    refused(&|call| call.least = 0, &["least: 0"]);
    refused(&|call| call.total = 1, &["total: 1", "2 (least 1 for each of 2 layers)"]);
    refused(&|call| call.total = 1 << 32, &["total: 4294967296", "2^32"]);
    refused(&|call| (call.layers, call.least) = (u32::MAX, u32::MAX), &["total: 8"]);
    refused(&|call| call.slots = std::ptr::null(), &["slots: NULL", "2 numbers"]);
    refused(&|call| call.misses = std::ptr::null(), &["misses: NULL"]);
    refused(&|call| call.shares = std::ptr::null_mut(), &["shares: NULL"]);
    let at_odds = |call: &mut vwd_kv_cache_share_args| call.slots = call.slots.wrapping_byte_add(1);
    refused(&at_odds, &["slots: 0x", " is misaligned; expected an array of 2 numbers"]);
    refused(&|call| call.misses = call.misses.wrapping_byte_add(4), &["misses: 0x", "is misaligned"]);
    refused(&|call| call.shares = call.shares.wrapping_byte_add(2), &["shares: 0x", "is misaligned"]);
    refused(&|call| call.slots = none.as_ptr(), &["slots[1]: 0", "at least 1"]);
    assert_eq!(std::hint::black_box(shares), [7; 2], "written in spite of an error");
}

/// Any numbers, each the largest there is among them.
#[test]
fn shares_of_any_numbers_sum_to_the_total() {
    rounds(2000, |rng| {
        let number = |rng: &mut Rng, most: u64| match rng.size(0..=3) {
            0 => most,
            1 => 0,
            _ => {
                let bits = rng.size(0..=40);
                rng.int(0..=(most.min(1 << 40) >> bits) as i64) as u64
            }
        };
        let slots = [(); LAYERS].map(|()| (number(rng, u32::MAX as u64) as u32).max(1));
        let misses = [(); LAYERS].map(|()| number(rng, u64::MAX));
        let total = number(rng, u32::MAX as u64).max(LAYERS as u64);
        let least = (number(rng, total / LAYERS as u64) as u32).max(1);
        let shares = share(total, least, &slots, &misses);
        assert_eq!(shares.iter().map(|&n| n as u64).sum::<u64>(), total, "{shares:?}");
        assert!(shares.iter().all(|&share| share >= least), "{shares:?}, least {least}");
    });
}
