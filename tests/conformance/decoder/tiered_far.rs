//! VANWARD in steps of one row: what is not resident of the selection is read in host memory, where it lies, and has a slot from the next fetch on. A
//! layer of SERIAL with the same tokens has the same bits.

use super::strategies::without_positions;
use super::tiered::{Cache, Sizes, create_on};
use super::*;

pub const CASES: &[Case] = cases![decoder_on_a_cache_reads_what_one_row_misses_where_it_lies];

const SERIAL: u32 = 0;
const VANWARD: u32 = 1;
const K: usize = 4;
/// ⌈1.25·K⌉ and the block of the new token.
const AHEAD: usize = 6;
const BLOCK: usize = 16;
const DIM: usize = 128;
const MAX_BLOCKS: usize = 24;
const STEPS: usize = 12;

fn stats(cache: &Cache, layer: u32) -> vwd_kv_cache_stats {
    let mut stats = args();
    // SAFETY: both are valid.
    assert_ok(unsafe { vwd_kv_cache_layer_info(cache.0, layer, &mut stats) });
    stats
}

/// The sum over the lists of VANWARD's layer.
fn of_vanward(backend: &Backend, t: vwd_tensor, lists: usize) -> u64 {
    let mut bytes = vec![0; 2 * lists * 4];
    backend.read(t.data as usize, &mut bytes);
    bytes.chunks(4).skip(lists).map(|word| u32::from_le_bytes(word.try_into().unwrap()) as u64).sum()
}

fn decoder_on_a_cache_reads_what_one_row_misses_where_it_lies(backend: &Backend) {
    let mut read_far = 0;
    // Blocks that are read keep their slots, or few do.
    for slots in [MAX_BLOCKS, AHEAD] {
        rounds(2, |rng| read_far += missed_of(backend, rng, slots));
    }
    assert!(read_far > 0);
}

/// How many blocks of VANWARD's layer were not resident in some steps, with so many slots for each row and KV head.
fn missed_of(backend: &Backend, rng: &mut Rng, slots: usize) -> u64 {
    let (dtype, rows, heads) = (rng.pick(&[F16, BF16]), 1, rng.pick(&[[4, 1], [8, 2], [16, 2], [32, 8]]));
    let sizes = Sizes { layers: 2, heads, dims: [DIM; 2], dtype, block: BLOCK };
    let serial = vwd_decoder_policy { k: K as u32, ..POLICY };
    let vanward = vwd_decoder_policy { strategy: VWD_STRATEGY_VANWARD, predict: VWD_PREDICT_FORESEEN, ..serial };
    let cache = Cache::create(
        backend,
        &vwd_kv_cache_options {
            max_sequences: rows as u32,
            max_blocks: MAX_BLOCKS as u32,
            host_blocks: (rows * MAX_BLOCKS) as u32,
            slots: (rows * heads[1] * slots) as u32,
            ..sizes.cache()
        },
    );
    let policies = [serial, vanward];
    let options = vwd_decoder_options { max_rows: rows as u32, ..sizes.decoder(&policies) };
    let decoder = create_on(backend, &options, &cache);
    let numbers: Vec<i64> = (0..rows)
        .map(|_| {
            let mut number = u32::MAX;
            // SAFETY: the cache lives.
            assert_ok(unsafe { vwd_kv_cache_add(cache.0, &mut number, backend.stream()) });
            number as i64
        })
        .collect();
    let of_numbers = ints(backend, &numbers);
    let plain = Layout::default();
    let normals = |rng: &mut Rng, extents: [usize; 4]| Tensor::floats(backend, dtype, &rng.normals(&extents), &plain);
    let mut len = 0;
    let begin = |len: usize, new: usize| {
        for &number in &numbers {
            // SAFETY: the cache lives.
            assert_ok(unsafe { vwd_kv_cache_extend(cache.0, number as u32, len as u64, backend.stream()) });
        }
        let lens = ints(backend, &vec![len as i64; rows]);
        let step = vwd_decoder_step { mode: VWD_DECODER_SPARSE, positions: new as u32, ..args() };
        decoder.begin(backend, &vwd_decoder_step { sequences: of_numbers.c(), seq_lens: lens.c(), ..step });
        lens
    };
    while len < 20 * BLOCK {
        len += BLOCK;
        let _lens = begin(len, BLOCK);
        let [k, v] = [0; 2].map(|_| normals(rng, [rows, BLOCK, heads[1], DIM]));
        for layer in [SERIAL, VANWARD] {
            let args = vwd_decoder_attend_args { layer, new_k: k.c(), new_v: v.c(), ..args() };
            decoder.attend(backend, &args);
        }
    }
    let mut missed = 0;
    let mut of_step = |rng: &mut Rng, q: &Tensor| {
        len += 1;
        let _lens = begin(len, 1);
        let [k, v] = [0; 2].map(|_| normals(rng, [rows, 1, heads[1], DIM]));
        let guess = normals(rng, [rows, 1, heads[0], DIM]);
        let foresee = vwd_decoder_foresee_args { layer: VANWARD, q: without_positions(&guess), ..args() };
        decoder.foresee(backend, std::ptr::null(), &foresee);
        let outs = [SERIAL, VANWARD].map(|layer| {
            let out = Tensor::poisoned(backend, dtype, &[rows, 1, heads[0], DIM], &plain);
            let (new_k, new_v, q) = (k.c(), v.c(), q.c());
            decoder.attend(backend, &vwd_decoder_attend_args { layer, new_k, new_v, q, out: out.c(), ..args() });
            out.read_floats().data
        });
        assert!(outs[0] == outs[1], "{dtype:?}, {rows} rows of {heads:?} heads, {len} tokens: not SERIAL's bits");
        let details = decoder.details();
        let [not_resident, of_call] =
            [details.fetched, details.missed].map(|t| of_vanward(backend, t, rows * heads[1]));
        assert_eq!(not_resident, of_call, "{len} tokens");
        of_call
    };
    for _ in 0..STEPS {
        let q = normals(rng, [rows, 1, heads[0], DIM]);
        missed += of_step(rng, &q);
    }
    if slots == MAX_BLOCKS {
        let q = normals(rng, [rows, 1, heads[0], DIM]);
        missed += of_step(rng, &q);
        assert_eq!(of_step(rng, &q), 0, "what was read the step before has slots since");
        // SAFETY: the cache lives.
        backend.finish(unsafe { vwd_kv_cache_wait(cache.0, VANWARD, backend.stream()) });
        let most = (rows * heads[1] * MAX_BLOCKS * 2 * BLOCK * DIM * dtype.bytes()) as u64;
        assert!(stats(&cache, VANWARD).bytes_fetched <= most, "no block has a slot twice");
    }
    missed
}
