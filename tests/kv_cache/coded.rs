//! A cache whose blocks are coded in INT4: attention over its slots, and what it saves.

use crate::model::{Cache, NO_STREAM, tensor};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

const BLOCK: usize = 16;
const DIM: usize = 64;
const HEADS: usize = 2;
const TOKENS: usize = 7 * BLOCK + 5;
const BLOCKS: usize = TOKENS.div_ceil(BLOCK);

fn options() -> vwd_kv_cache_options {
    vwd_kv_cache_options {
        layers: 1,
        kv_heads: HEADS as u32,
        block_size: BLOCK as u32,
        key_dim: DIM as u32,
        value_dim: DIM as u32,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        max_sequences: 2,
        max_blocks: BLOCKS as u32,
        host_blocks: 2 * BLOCKS as u32,
        slots: 64,
        coding: VWD_CODING_INT4,
        ..args()
    }
}

fn decoded() -> vwd_kv_cache_options {
    vwd_kv_cache_options { slot_coding: VWD_SLOTS_DECODED, ..options() }
}

struct Engine {
    backend: Backend,
    cache: Cache,
    q: Vec<f32>,
    rows: Vec<f32>,
    weights: Vec<f32>,
}

impl Engine {
    fn new(rng: &mut Rng) -> Engine {
        Engine::of(rng, options())
    }

    fn of(rng: &mut Rng, options: vwd_kv_cache_options) -> Engine {
        let backend = Backend::cpu(1);
        let weights: Vec<f32> = (0..HEADS * DIM).map(|_| 0.5 + rng.unit() as f32).collect();
        let cache = Cache::on(&backend, &vwd_kv_cache_options { weights: weights.as_ptr(), ..options });
        let mut normals = |count: usize| (0..count).map(|_| rng.normal() as f32).collect();
        Engine { cache, backend, q: normals(2 * HEADS * DIM), rows: normals(TOKENS * HEADS * DIM), weights }
    }

    /// Appends tokens, as many at a time.
    fn append(&self, sequence: u32, tokens: std::ops::Range<usize>, at_a_time: usize) {
        for begin in tokens.clone().step_by(at_a_time) {
            let count = at_a_time.min(tokens.end - begin);
            let rows = &self.rows[begin * HEADS * DIM..(begin + count) * HEADS * DIM];
            let k = tensor(rows, F32, &[1, count, HEADS, DIM]);
            let (numbers, begins) = ([sequence as i32], [begin as i32]);
            let (sequences, begin) = (tensor(&numbers, I32, &[1]), tensor(&begins, I32, &[1]));
            assert_ok(self.cache.append(&vwd_kv_cache_append_args { sequences, begin, k, v: k, ..args() }));
        }
    }

    /// Attention to all blocks of a sequence of that many tokens, in the slots of the cache.
    fn over_slots(&self, sequence: u32, tokens: usize) -> (Vec<f32>, Vec<i32>) {
        let blocks = tokens.div_ceil(BLOCK);
        let ids = (0..blocks as i32).collect::<Vec<i32>>().repeat(HEADS);
        let (counts, slots, numbers) = ([blocks as i32; HEADS], vec![-1i32; HEADS * blocks], [sequence as i32]);
        let shape = [1, HEADS, blocks];
        let list = vwd_block_list {
            ids: tensor(&ids, I32, &shape),
            counts: tensor(&counts, I32, &[1, HEADS]),
            slots: tensor(&slots, I32, &shape),
        };
        let call = vwd_kv_cache_resolve_args { sequences: tensor(&numbers, I32, &[1]), wanted: list, ..args() };
        assert_ok(self.cache.resolve(&call));
        assert_ok(self.cache.wait(0));
        let (int4, lens) = (self.int4(), [tokens as i32]);
        let view = self.cache.view(0);
        let int4 = if int4.k.data.is_null() { std::ptr::null() } else { &raw const int4 };
        let kv = vwd_paged_kv { k: view.k, v: view.v, seq_lens: tensor(&lens, I32, &[1]), int4, ..args() };
        (self.attend(&kv, list), std::hint::black_box(slots))
    }

    /// The codes in the slots of the cache.
    fn int4(&self) -> vwd_int4_kv {
        let view = self.cache.view(0);
        vwd_int4_kv {
            block_size: BLOCK as u32,
            k: view.int4_k,
            v: view.int4_v,
            k_scale: view.int4_k_scale,
            v_scale: view.int4_v_scale,
            means: view.int4_means,
            weights: view.weights,
            ..args()
        }
    }

    /// The same over pages, of which the tokens `coded` are coded by `vwd_kv_quantize`.
    fn over_pages(&self, tokens: usize, coded: usize) -> Vec<f32> {
        let (mut lens, coded_lens) = ([coded as i32], [0i32]);
        let codes = [(); 2].map(|()| vec![0u8; TOKENS * HEADS * DIM / 2]);
        let scales = [(); 2].map(|()| vec![0u8; TOKENS * HEADS]);
        let means = vec![0f32; BLOCKS * HEADS * DIM];
        let int4 = vwd_int4_kv {
            block_size: BLOCK as u32,
            exact_tokens: BLOCK as u32,
            k: tensor(&codes[0], U8, &[1, TOKENS, HEADS, DIM / 2]),
            v: tensor(&codes[1], U8, &[1, TOKENS, HEADS, DIM / 2]),
            k_scale: tensor(&scales[0], F8E4M3, &[1, TOKENS, HEADS]),
            v_scale: tensor(&scales[1], F8E4M3, &[1, TOKENS, HEADS]),
            means: tensor(&means, F32, &[1, BLOCKS, HEADS, DIM]),
            coded_lens: tensor(&coded_lens, I32, &[1]),
            weights: tensor(&self.weights, F32, &[HEADS, DIM]),
            ..args()
        };
        let k = tensor(&self.rows, F32, &[1, TOKENS, HEADS, DIM]);
        let kv = vwd_paged_kv { k, v: k, seq_lens: tensor(&lens, I32, &[1]), int4: &int4, ..args() };
        let layers = [&raw const kv];
        let call = vwd_kv_quantize_args { layer_count: 1, layers: layers.as_ptr(), ..args() };
        // SAFETY: everything is valid.
        assert_ok(unsafe { vwd_kv_quantize(self.backend.session(), &call, NO_STREAM) });
        lens[0] = tokens as i32;
        let kv = vwd_paged_kv { seq_lens: tensor(&lens, I32, &[1]), ..kv };
        let blocks = tokens.div_ceil(BLOCK);
        let (ids, counts) = ((0..blocks as i32).collect::<Vec<i32>>().repeat(HEADS), [blocks as i32; HEADS]);
        let list = vwd_block_list {
            ids: tensor(&ids, I32, &[1, HEADS, blocks]),
            counts: tensor(&counts, I32, &[1, HEADS]),
            slots: absent(),
        };
        self.attend(&kv, list)
    }

    fn attend(&self, kv: &vwd_paged_kv, list: vwd_block_list) -> Vec<f32> {
        let out = vec![0f32; 2 * HEADS * DIM];
        let call = vwd_attention_args {
            block_size: BLOCK as u32,
            kv,
            q: tensor(&self.q, F32, &[1, 2 * HEADS, DIM]),
            list,
            out: tensor(&out, F32, &[1, 2 * HEADS, DIM]),
            ..args()
        };
        // SAFETY: everything is valid.
        assert_ok(unsafe { vwd_attention(self.backend.session(), &call, NO_STREAM) });
        std::hint::black_box(out)
    }
}

/// Bit for bit: the first block and the two newest are exact, and those between are what `vwd_kv_quantize` makes of them.
#[test]
fn attention_over_slots_of_a_coded_cache_is_attention_over_the_same_codes() {
    rounds(2, |rng| {
        let engine = Engine::new(rng);
        let sequence = engine.cache.add().expect("room");
        assert_ok(engine.cache.extend(sequence, TOKENS));
        engine.append(sequence, 0..TOKENS, rng.pick(&[1, 7, BLOCK, 40, TOKENS]));
        let (found, slots) = engine.over_slots(sequence, TOKENS);
        assert_eq!(found, engine.over_pages(TOKENS, (BLOCKS - 2) * BLOCK));
        let exact = engine.cache.view(0).k.shape[0] as i32;
        for (n, slot) in slots.iter().enumerate() {
            assert_eq!(*slot < exact, [0, BLOCKS - 2, BLOCKS - 1].contains(&(n % BLOCKS)), "block {n}: {slot}");
        }
        assert_ne!(found, engine.over_pages(TOKENS, BLOCK), "as exact as without codes");
    });
}

/// Slots of float32 that are decoded as blocks arrive: the same attention, but for the rounding of float32 sums, which scores of about 10 magnify.
#[test]
fn attention_over_slots_that_are_decoded_is_attention_over_the_same_codes() {
    rounds(2, |rng| {
        let engine = Engine::of(rng, decoded());
        let sequence = engine.cache.add().expect("room");
        assert_ok(engine.cache.extend(sequence, TOKENS));
        engine.append(sequence, 0..TOKENS, rng.pick(&[1, 7, BLOCK, 40, TOKENS]));
        let (found, _) = engine.over_slots(sequence, TOKENS);
        let furthest = |expected: &[f32]| found.iter().zip(expected).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        let (codes, exact) = (engine.over_pages(TOKENS, (BLOCKS - 2) * BLOCK), engine.over_pages(TOKENS, BLOCK));
        let [from_codes, from_exact] = [codes, exact].map(|expected| furthest(&expected));
        assert!(from_codes < 1e-4, "{from_codes} from attention over codes");
        assert!(from_exact > 1e-3, "{from_exact} from attention over what was appended");
    });
}

/// Its fork reads the same codes, and the first block from a page of its own: the parent's may be written anew.
#[test]
fn fork_of_a_coded_cache_keeps_its_first_block() {
    rounds(2, |rng| {
        let engine = Engine::new(rng);
        let parent = engine.cache.add().expect("room");
        assert_ok(engine.cache.extend(parent, TOKENS));
        engine.append(parent, 0..TOKENS, BLOCK);
        let tokens = 4 * BLOCK;
        let fork = engine.cache.fork(parent, tokens).expect("room");
        engine.cache.free(parent);
        let other = Engine::new(rng);
        let next = engine.cache.add().expect("room");
        assert_eq!(next, parent);
        assert_ok(engine.cache.extend(next, BLOCK));
        let begin = [0];
        let k = tensor(&other.rows[..BLOCK * HEADS * DIM], F32, &[1, BLOCK, HEADS, DIM]);
        let (sequences, begin) = (tensor(&[next as i32], I32, &[1]), tensor(&begin, I32, &[1]));
        assert_ok(engine.cache.append(&vwd_kv_cache_append_args { sequences, begin, k, v: k, ..args() }));
        assert_eq!(engine.over_slots(fork, tokens).0, engine.over_pages(tokens, tokens));
    });
}

/// Slots say what is coded, and nothing else does.
#[test]
fn codes_beside_slots_that_make_no_sense_are_refused() {
    rounds(1, |rng| {
        let engine = Engine::new(rng);
        let (ids, counts, lens, none) = ([0i32; HEADS], [1i32; HEADS], [1i32], [0i32]);
        let ints = |values: &[i32], shape: &[usize]| tensor(values, I32, shape);
        let refused = |backend: &Backend, slot: i32, change: &dyn Fn(&mut vwd_int4_kv), pieces: &[&str]| {
            let (slots, mut int4, view) = ([slot; HEADS], engine.int4(), engine.cache.view(0));
            change(&mut int4);
            let kv = vwd_paged_kv { k: view.k, v: view.v, seq_lens: ints(&lens, &[1]), int4: &int4, ..args() };
            let out = vec![0f32; HEADS * DIM];
            let shape = [1, HEADS, 1];
            let call = vwd_attention_args {
                block_size: int4.block_size,
                kv: &kv,
                q: tensor(&engine.q[..HEADS * DIM], F32, &[1, HEADS, DIM]),
                list: vwd_block_list {
                    ids: ints(&ids, &shape),
                    counts: ints(&counts, &[1, HEADS]),
                    slots: ints(&slots, &shape),
                },
                out: tensor(&out, F32, &[1, HEADS, DIM]),
                ..args()
            };
            // SAFETY: everything is valid.
            assert_fails(
                unsafe { vwd_attention(backend.session(), &call, NO_STREAM) },
                VWD_ERROR_INVALID_ARGUMENT,
                pieces,
            );
        };
        let b = &engine.backend;
        refused(b, 0, &|c| c.coded_lens = ints(&none, &[1]), &["kv.int4.coded_lens: given beside the slots"]);
        refused(b, 0, &|c| c.page_table = ints(&none, &[1, 1]), &["kv.int4.page_table: given beside the slots"]);
        refused(b, 0, &|c| c.mean_table = ints(&none, &[1, 1]), &["kv.int4.mean_table: given beside the slots"]);
        refused(b, 0, &|c| c.exact_tokens = BLOCK as u32, &["kv.int4.exact_tokens: 16", "0 beside the slots"]);
        refused(b, 0, &|c| c.means.shape[0] -= 1, &["kv.int4.means"]);
        refused(b, 0, &|c| c.weights.shape[0] = 1, &["kv.int4.weights", "of the 2 KV heads of the lists"]);
        type Field = fn(&mut vwd_int4_kv) -> &mut vwd_tensor;
        let fields: [Field; 4] = [|c| &mut c.k, |c| &mut c.v, |c| &mut c.k_scale, |c| &mut c.v_scale];
        for t in fields {
            refused(b, 0, &|c| t(c).shape[2] = 2, &["kv.int4."]);
        }
        let half = |c: &mut vwd_int4_kv| {
            for t in [&mut c.k, &mut c.v, &mut c.k_scale, &mut c.v_scale] {
                t.shape[1] = 8;
            }
        };
        refused(b, 0, &half, &["kv.int4.k: slots of 8 tokens"]);
        // A session that checks contents knows how many slots there are of both kinds.
        let (checking, view) = (engine.backend.checking(), engine.cache.view(0));
        let past = (view.k.shape[0] + view.int4_k.shape[0]) as i32;
        refused(&checking, past, &|_| {}, &["list.slots", &past.to_string()]);
    });
}

/// A slot has the bytes of an exact one, host memory and copies those of codes.
#[test]
fn slots_that_are_decoded_take_the_bytes_of_exact_ones() {
    let sizes = |options: &vwd_kv_cache_options| -> vwd_kv_cache_sizes {
        let mut sizes = args();
        // SAFETY: both are valid.
        assert_ok(unsafe { vwd_kv_cache_capacity(options, &mut sizes) });
        sizes
    };
    let exact = sizes(&vwd_kv_cache_options { coding: VWD_CODING_EXACT, ..options() });
    let [as_stored, decoded] = [options(), decoded()].map(|options| sizes(&options));
    assert_eq!((exact.slot_bytes, as_stored.slot_bytes), (exact.run_bytes, as_stored.run_bytes));
    assert_eq!((decoded.run_bytes, decoded.slot_bytes), (as_stored.run_bytes, exact.run_bytes));
    assert_eq!(decoded.host_bytes, as_stored.host_bytes);
    let more = options().slots as u64 * (exact.run_bytes - as_stored.run_bytes);
    assert_eq!(decoded.device_bytes, as_stored.device_bytes + more);

    rounds(1, |rng| {
        let engine = Engine::of(rng, self::decoded());
        let sequence = engine.cache.add().expect("room");
        assert_ok(engine.cache.extend(sequence, TOKENS));
        engine.append(sequence, 0..TOKENS, BLOCK);
        engine.over_slots(sequence, TOKENS);
        let stats = engine.cache.stats();
        assert_eq!((stats.host_bytes, stats.device_bytes), (decoded.host_bytes, decoded.device_bytes));
        assert_eq!(stats.bytes_fetched % decoded.run_bytes, 0);
        assert!(stats.bytes_fetched <= stats.misses * decoded.run_bytes);
    });
}

/// At 128 channels and blocks of 64 tokens, within the bytes of a cache that is not coded.
#[test]
fn coded_cache_has_three_and_a_half_times_the_tokens_in_the_same_memory() {
    let sizes = |options: &vwd_kv_cache_options| -> vwd_kv_cache_sizes {
        let mut sizes = args();
        // SAFETY: both are valid.
        assert_ok(unsafe { vwd_kv_cache_capacity(options, &mut sizes) });
        sizes
    };
    let exact = vwd_kv_cache_options {
        layers: 32,
        kv_heads: 8,
        block_size: 64,
        key_dim: 128,
        value_dim: 128,
        dtype_code: BF16.code as u32,
        dtype_bits: BF16.bits as u32,
        max_sequences: 4,
        max_blocks: 4096,
        host_blocks: 4096,
        slots: 4096,
        coding: VWD_CODING_EXACT,
        ..args()
    };
    let coded = vwd_kv_cache_options {
        max_blocks: 7 * 4096 / 2,
        host_blocks: 7 * 4096 / 2,
        slots: 7 * 4096 / 2,
        coding: VWD_CODING_INT4,
        ..exact
    };
    let [exact, coded] = [exact, coded].map(|options| sizes(&options));
    assert_eq!((exact.run_bytes, coded.run_bytes), (64 * 512, 64 * 130 + 256));
    assert!(coded.host_bytes <= exact.host_bytes, "{} of {}", coded.host_bytes, exact.host_bytes);
    assert!(coded.device_bytes <= exact.device_bytes, "{} of {}", coded.device_bytes, exact.device_bytes);
}
