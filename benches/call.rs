//! What one call through the C ABI costs: greedy verification of 32 sequences of 128 drafts, of one sequence of one draft
//! (a call that does next to nothing), and of an argument that is refused.

use criterion::{Criterion, criterion_group, criterion_main};
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

#[path = "../tests/support/mod.rs"]
mod support;
use support::{Array, Backend, I32, Layout, Tensor, args};

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
}

criterion_group!(benches, calls);
criterion_main!(benches);
