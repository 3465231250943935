//! A call allocates nothing, however many tensors it takes and wherever they lie.

use std::alloc::{GlobalAlloc, Layout as Size, System};
use std::cell::Cell;
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

mod support;
use support::calls::sampled_calls;
use support::*;

struct Counting;

thread_local! {
    /// Allocations of this thread alone, since tests run side by side.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, size: Size) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: forwarded to the caller.
        unsafe { System.alloc(size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, size: Size) {
        // SAFETY: forwarded to the caller.
        unsafe { System.dealloc(pointer, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn calls_allocate_nothing() {
    let backend = Backend::cpu(1);
    let tokens = |width| Tensor::ints(&backend, I32, &Array::filled(&[3, width], 7), &Layout::default());
    let place = |dtype, shape: &[usize]| Tensor::poisoned(&backend, dtype, shape, &Layout::default());
    let (draft, target) = (tokens(4), tokens(5));
    let (accepted, next_token, offsets) = (place(I32, &[3]), place(I32, &[3]), place(I64, &[4]));
    rounds(3, |rng| {
        for count in [1, 2, 64, 256] {
            // Tensors of one form or of several, in any order of addresses.
            let forms = rng.size(1..=3);
            let mut pairs: Vec<_> = (0..count)
                .map(|n| 8 + n % forms)
                .map(|width| (place(F16, &[3, 4, width]), place(F16, &[12, width])))
                .collect();
            rng.shuffle(&mut pairs);
            let (rows, packed): (Vec<_>, Vec<_>) = pairs.iter().map(|(rows, packed)| (rows.c(), packed.c())).unzip();
            let args = vwd_verify_pack_args {
                tensor_count: count as u32,
                rows: rows.as_ptr(),
                packed: packed.as_ptr(),
                draft: draft.c(),
                target: target.c(),
                accepted: accepted.c(),
                next_token: next_token.c(),
                offsets: offsets.c(),
                ..args()
            };
            let before = ALLOCATIONS.get();
            // SAFETY: the tensors outlive the call.
            let status = unsafe { vwd_verify_pack(backend.session(), &args, null_mut()) };
            let made = ALLOCATIONS.get() - before;
            assert_ok(status);
            assert_eq!(made, 0, "{count} tensors of {forms} forms");
        }
    });
}

/// Once the first call has made the stream's scratch.
#[test]
fn sampling_trees_and_compaction_allocate_nothing() {
    let backend = Backend::cpu(1);
    for (batch, gamma, vocabulary) in [(1, 0, 40), (2, 3, 8200), (20, 4, 304)] {
        for (name, call) in sampled_calls(&backend, batch, gamma, vocabulary) {
            assert_ok(call());
            let before = ALLOCATIONS.get();
            let status = call();
            let made = ALLOCATIONS.get() - before;
            assert_ok(status);
            assert_eq!(made, 0, "{name}, of {batch} × {gamma}");
        }
    }
}

#[test]
fn questions_to_a_budget_allocate_nothing() {
    let backend = Backend::cpu(1);
    let mut options = vwd_budget_options {
        query_heads: 2,
        kv_heads: 1,
        key_dim: 16,
        value_dim: 16,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        page_size: 4,
        block_size: 4,
        method: VWD_SELECT_MINMAX,
        k: 2,
        samples: 1,
        limit_bytes: 1 << 18,
        ..args()
    };
    (options.contexts[0], options.batches[0]) = (16, 1);
    let mut question = vwd_budget_question { context: 20, acceptance: 0.9, ..args() };
    (question.coverage_ratios[0], question.coverages[0]) = (1.5, 0.9);
    let (mut budget, mut answer) = (null_mut(), args());
    // SAFETY: the arguments are valid.
    unsafe {
        assert_ok(vwd_budget_profile(backend.session(), &options, null_mut(), &mut budget));
        let before = ALLOCATIONS.get();
        let status = vwd_budget_ask(budget, &question, &mut answer);
        let made = ALLOCATIONS.get() - before;
        assert_ok(status);
        assert_eq!(made, 0);
        vwd_budget_release(budget);
    }
}

/// However often a step resolves lists before the copies are made.
#[test]
fn steps_of_a_kv_cache_allocate_nothing() {
    const LISTS: usize = 2;
    const CAP: usize = 4;
    let backend = Backend::cpu(1);
    let mut cache = null_mut();
    // SAFETY: everything is valid.
    assert_ok(unsafe { vwd_kv_cache_create(backend.session(), &small_cache(), &mut cache) });
    for _ in 0..LISTS {
        let mut sequence = u32::MAX;
        // SAFETY: the cache lives.
        unsafe {
            assert_ok(vwd_kv_cache_add(cache, &mut sequence, null_mut()));
            assert_ok(vwd_kv_cache_extend(cache, sequence, 256, null_mut()));
        }
    }
    let ints = |values: Array<i64>| Tensor::ints(&backend, I32, &values, &Layout::default());
    let place = |dtype, shape: &[usize]| Tensor::poisoned(&backend, dtype, shape, &Layout::default());
    let (sequences, begin) = (ints(Array::from_fn(&[LISTS], |at| at[0] as i64)), place(I32, &[LISTS]));
    let (ids, slots) = (place(I32, &[LISTS, 1, CAP]), place(I32, &[LISTS, 1, CAP]));
    let counts = ints(Array::filled(&[LISTS, 1], CAP as i64));
    let rows = place(F32, &[LISTS, 8, 1, 16]);
    let append =
        vwd_kv_cache_append_args { sequences: sequences.c(), begin: begin.c(), k: rows.c(), v: rows.c(), ..args() };
    let wanted = vwd_block_list { ids: ids.c(), counts: counts.c(), slots: slots.c() };
    let resolve = vwd_kv_cache_resolve_args { sequences: sequences.c(), wanted, ..args() };
    for step in 0..32i64 {
        begin.refill_ints(&Array::filled(&[LISTS], step * 8));
        ids.refill_ints(&Array::from_fn(&[LISTS, 1, CAP], |at| (step * 2 - at[2] as i64 * 5).max(0)));
        let before = ALLOCATIONS.get();
        // SAFETY: the tensors outlive the calls.
        let statuses = unsafe {
            [
                vwd_kv_cache_append(cache, &append, null_mut()),
                vwd_kv_cache_resolve(cache, &resolve, null_mut()),
                if step % 8 == 6 { vwd_kv_cache_fetch(cache, 0, null_mut()) } else { VWD_OK },
                if step % 8 == 7 { vwd_kv_cache_wait(cache, 0, null_mut()) } else { VWD_OK },
            ]
        };
        let made = ALLOCATIONS.get() - before;
        assert_eq!((statuses, made), ([VWD_OK; 4], 0), "step {step}");
    }
    let mut stats = args();
    // SAFETY: the cache lives until it is released.
    unsafe {
        assert_ok(vwd_kv_cache_info(cache, &mut stats));
        vwd_kv_cache_release(cache);
    }
    let vwd_kv_cache_stats { misses, evictions, bytes_fetched, dropped_tokens, .. } = stats;
    assert!(misses > 0 && evictions > 0 && bytes_fetched > 0 && dropped_tokens == 0, "what was tested?");
}

/// Sparse rows, dense ones, and both in one step, once the first step has made the scratch.
#[test]
fn steps_of_a_decoder_allocate_nothing() {
    decode(vwd_decoder_options { policy: vwd_decoder_policy { method: VWD_SELECT_MINMAX, ..SELECTING }, ..args() });
    // Joined by the term for what lists leave out.
    decode(vwd_decoder_options {
        policy: vwd_decoder_policy { method: VWD_SELECT_AXIS, ..SELECTING },
        remainder: 1,
        ..args()
    });
}

fn decode(options: vwd_decoder_options) {
    const ROWS: usize = 2;
    let backend = Backend::cpu(1);
    let options = vwd_decoder_options {
        layers: 1,
        max_rows: ROWS as u32,
        query_heads: 2,
        kv_heads: 1,
        key_dim: 16,
        value_dim: 16,
        dtype_code: F16.code.into(),
        dtype_bits: F16.bits.into(),
        page_size: 16,
        block_size: 16,
        pages: 16,
        ..options
    };
    let mut decoder = null_mut();
    // SAFETY: everything is valid.
    assert_ok(unsafe { vwd_decoder_create(backend.session(), &options, &mut decoder) });
    let ints = |values: Array<i64>| Tensor::ints(&backend, I32, &values, &Layout::default());
    let zeros = |shape: &[usize]| Tensor::floats(&backend, F16, &Array::filled(shape, 0.0), &Layout::default());
    let table = ints(Array::from_fn(&[ROWS, 8], |at| (at[0] * 8 + at[1]) as i64));
    let (lens, modes) = (ints(Array::filled(&[ROWS], 100)), ints(Array::from_fn(&[ROWS], |at| at[0] as i64 + 1)));
    let (k, v, new) = (zeros(&[16, 16, 1, 16]), zeros(&[16, 16, 1, 16]), zeros(&[ROWS, 1, 16]));
    let (q, out) = (zeros(&[ROWS, 2, 16]), zeros(&[ROWS, 2, 16]));
    let attend = vwd_decoder_attend_args {
        k: k.c(),
        v: v.c(),
        new_k: new.c(),
        new_v: new.c(),
        q: q.c(),
        out: out.c(),
        ..args()
    };
    let (draft, target) = (ints(Array::filled(&[ROWS, 2], 7)), ints(Array::filled(&[ROWS, 3], 7)));
    let (accepted, next) = (ints(Array::filled(&[ROWS], 0)), ints(Array::filled(&[ROWS], 0)));
    let accept = vwd_decoder_accept_args {
        draft: draft.c(),
        target: target.c(),
        accepted: accepted.c(),
        next_token: next.c(),
        ..args()
    };
    for n in 0..9 {
        let mut step = vwd_decoder_step { page_table: table.c(), seq_lens: lens.c(), ..args() };
        match n % 3 {
            0 => step.modes = modes.c(),
            1 => step.mode = VWD_DECODER_SPARSE,
            _ => step.mode = VWD_DECODER_DENSE,
        }
        let before = ALLOCATIONS.get();
        // SAFETY: the tensors outlive the calls.
        let statuses = unsafe {
            [
                vwd_decoder_begin(decoder, &step, null_mut()),
                vwd_decoder_attend(decoder, &attend, null_mut()),
                vwd_decoder_accept(decoder, &accept, null_mut()),
            ]
        };
        let made = ALLOCATIONS.get() - before;
        assert_eq!(statuses, [VWD_OK; 3]);
        assert!(n < 3 || made == 0, "step {n}: {made} allocations");
    }
    // SAFETY: the last call is over.
    unsafe { vwd_decoder_release(decoder) };
}

const SELECTING: vwd_decoder_policy = vwd_decoder_policy { k: 2, local_blocks: 1, ..POLICY };

/// A dense layer.
const POLICY: vwd_decoder_policy = vwd_decoder_policy {
    method: 0,
    k: 0,
    init_blocks: 0,
    local_blocks: 0,
    dense_below: 0,
    window: 0,
    strategy: VWD_STRATEGY_SERIAL,
    predict: 0,
    ratio: 0.0,
    holt: vwd_holt { alpha: 0.0, beta: 0.0, gamma: 0.0 },
    reserved: [0; 4],
};
