//! What one call through the C ABI costs: greedy verification of 32 sequences of 128 drafts, of one sequence of one draft
//! (a call that does next to nothing), of an argument that is refused, of selection for a batch of no sequences, which
//! makes its checks and returns, and the checks of attention and of repair.

use criterion::{Criterion, criterion_group, criterion_main};
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

#[path = "../tests/support/mod.rs"]
mod support;
use support::{Array, Backend, F16, F32, I32, Layout, Tensor, absent, args};

/// Tensors of a batch whose drafts are all right.
struct Verify<'b> {
    tokens: [Tensor<'b>; 2],
    results: [Tensor<'b>; 2],
}

impl<'b> Verify<'b> {
    fn new(backend: &'b Backend, batch: usize, gamma: usize) -> Verify<'b> {
        let tokens =
            |width| Tensor::ints(backend, I32, &Array::from_fn(&[batch, width], |at| at[1] as i64), &Layout::default());
        let result = || Tensor::poisoned(backend, I32, &[batch], &Layout::default());
        Verify { tokens: [tokens(gamma), tokens(gamma + 1)], results: [result(), result()] }
    }

    fn args(&self) -> vwd_verify_args {
        let ([draft, target], [accepted, next_token]) = (&self.tokens, &self.results);
        let (draft, target) = (draft.c(), target.c());
        vwd_verify_args { draft, target, accepted: accepted.c(), next_token: next_token.c(), ..args() }
    }
}

/// Selection of blocks by largest and smallest key, of a batch without sequences.
struct Select<'b> {
    q: Tensor<'b>,
    lens: Tensor<'b>,
    bounds: [Tensor<'b>; 2],
    list: [Tensor<'b>; 2],
    scores: Tensor<'b>,
}

impl<'b> Select<'b> {
    fn new(backend: &'b Backend) -> Select<'b> {
        let (kv_heads, dim) = (8, 128);
        let tensor = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &Layout::default());
        Select {
            q: tensor(F16, &[0, 4 * kv_heads, dim]),
            lens: tensor(I32, &[0]),
            bounds: [(); 2].map(|_| tensor(F16, &[1, 2, kv_heads, dim])),
            list: [tensor(I32, &[0, kv_heads, 128]), tensor(I32, &[0, kv_heads])],
            scores: tensor(F32, &[0, kv_heads, 2048]),
        }
    }

    fn index(&self) -> vwd_index {
        let [max, min] = &self.bounds;
        vwd_index { kind: VWD_INDEX_MINMAX, block_size: 64, key_max: max.c(), key_min: min.c(), ..args() }
    }

    fn args(&self, index: &vwd_index) -> vwd_select_blocks_args {
        let [ids, counts] = &self.list;
        vwd_select_blocks_args {
            method: VWD_SELECT_MINMAX,
            block_size: 64,
            k: 128,
            init_blocks: 1,
            local_blocks: 2,
            index,
            q: self.q.c(),
            seq_lens: self.lens.c(),
            selected: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
            scores: self.scores.c(),
            ..args()
        }
    }
}

fn calls(criterion: &mut Criterion) {
    let backend = Backend::cpu(0);
    // SAFETY: the session and the tensors of each call are alive.
    let verify = |call: &vwd_verify_args| unsafe { vwd_verify(backend.session(), call, null_mut()) };
    let mut group = criterion.benchmark_group("call");

    let many = Verify::new(&backend, 32, 128);
    let call = many.args();
    group.bench_function("verify_32x128", |b| b.iter(|| assert_eq!(verify(&call), VWD_OK)));

    let one = Verify::new(&backend, 1, 1);
    let call = one.args();
    group.bench_function("verify_1x1", |b| b.iter(|| assert_eq!(verify(&call), VWD_OK)));

    let refused = vwd_verify_args { flags: 1, ..call };
    group.bench_function("refused", |b| b.iter(|| assert_eq!(verify(&refused), VWD_ERROR_INVALID_ARGUMENT)));

    let none = Select::new(&backend);
    let index = none.index();
    let call = none.args(&index);
    // SAFETY: the session, the index and the tensors are alive.
    let select = || unsafe { vwd_select_blocks(backend.session(), &call, null_mut()) };
    group.bench_function("select_blocks_0", |b| b.iter(|| assert_eq!(select(), VWD_OK)));
}

/// The checks of attention and repair over plain tensors: to tell the scratch of a call takes no more.
fn checks(criterion: &mut Criterion) {
    let backend = Backend::cpu(0);
    let tensor = |dtype, shape: &[usize]| Tensor::poisoned(&backend, dtype, shape, &Layout::default());
    let (q, out, cache) = (tensor(F16, &[8, 32, 128]), tensor(F16, &[8, 32, 128]), tensor(F16, &[64, 16, 8, 128]));
    let (v, table, lens) = (tensor(F16, &[64, 16, 8, 128]), tensor(I32, &[8, 64]), tensor(I32, &[8]));
    let lists = [(); 2].map(|()| (tensor(I32, &[8, 8, 16]), tensor(I32, &[8, 8])));
    let [predicted, selected] =
        lists.each_ref().map(|(ids, counts)| vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() });
    let (acc, m, l) = (tensor(F32, &[8, 32, 16, 128]), tensor(F32, &[8, 32, 16]), tensor(F32, &[8, 32, 16]));
    let kv = vwd_paged_kv { k: cache.c(), v: v.c(), page_table: table.c(), seq_lens: lens.c(), ..args() };
    let attention = vwd_attention_args { block_size: 16, kv: &kv, q: q.c(), list: selected, out: out.c(), ..args() };
    let partials = vwd_attention_partials { acc: acc.c(), m: m.c(), l: l.c() };
    let repair = vwd_repair_args {
        mode: VWD_REPAIR_EXACT,
        block_size: 16,
        kv: &kv,
        q: q.c(),
        predicted,
        selected,
        predicted_partials: partials,
        out: out.c(),
        ..args()
    };
    let mut bytes = 0;
    let mut group = criterion.benchmark_group("checks");
    // SAFETY: the session and the tensors of each call are alive.
    group.bench_function("attention", |b| {
        b.iter(|| assert_eq!(unsafe { vwd_attention_scratch(backend.session(), &attention, &mut bytes) }, VWD_OK))
    });
    // SAFETY: as above.
    group.bench_function("repair", |b| {
        b.iter(|| assert_eq!(unsafe { vwd_repair_scratch(backend.session(), &repair, &mut bytes) }, VWD_OK))
    });
}

criterion_group!(benches, calls, checks);
criterion_main!(benches);
