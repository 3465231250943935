//! Calls of sampling, trees and compaction, with all that they take, to be made again and again.

use super::array::Array;
use super::backend::Backend;
use super::session::assert_ok;
use super::tensor::{F16, F32, I32, I64, Layout, Tensor, U32};
use super::{DType, absent, args};
use vanward::abi::*;
use vanward::capi::*;

/// A call with its name.
pub type Call<'b> = (String, Box<dyn Fn() -> vwd_status + 'b>);

/// Tensors of a call.
struct Maker<'b>(&'b Backend);

impl<'b> Maker<'b> {
    fn ints(&self, dtype: DType, shape: &[usize], value: impl Fn(&[usize]) -> i64) -> Tensor<'b> {
        Tensor::ints(self.0, dtype, &Array::from_fn(shape, value), &Layout::default())
    }

    fn floats(&self, dtype: DType, shape: &[usize], value: impl Fn(&[usize]) -> f64) -> Tensor<'b> {
        Tensor::floats(self.0, dtype, &Array::from_fn(shape, value), &Layout::default())
    }

    fn out(&self, shape: &[usize]) -> Tensor<'b> {
        Tensor::poisoned(self.0, I32, shape, &Layout::default())
    }
}

/// Every rule of vwd_verify_sample and walk of vwd_verify_tree, with rows of drafts and filters and without, and vwd_compact: of so many requests with
/// so many drafts, or trees with as many nodes below the root.
pub fn sampled_calls(backend: &Backend, batch: usize, gamma: usize, vocabulary: usize) -> Vec<Call<'_>> {
    let mut calls = vec![];
    for has_filters in [false, true] {
        for (rule, has_rows) in [
            (VWD_ACCEPT_GREEDY, false),
            (VWD_ACCEPT_COUPLED, false),
            (VWD_ACCEPT_REJECTION, false),
            (VWD_ACCEPT_REJECTION, true),
        ] {
            calls.push(sample(backend, [batch, gamma, vocabulary], rule, has_rows, has_filters));
        }
        for (walk, has_rows) in [
            (VWD_WALK_GREEDY, false),
            (VWD_WALK_COUPLED, false),
            (VWD_WALK_INDEPENDENT, true),
            (VWD_WALK_DISTINCT, true),
        ] {
            calls.push(tree(backend, [batch, gamma + 1, vocabulary], walk, has_rows, has_filters));
        }
    }
    calls.push(compact(backend, batch, gamma + 1));
    calls
}

fn sample(backend: &Backend, sizes: [usize; 3], rule: u32, has_rows: bool, has_filters: bool) -> Call<'_> {
    let ([batch, gamma, vocabulary], make) = (sizes, Maker(backend));
    let draft = make.ints(I32, &[batch, gamma], |at| ((at[0] + at[1]) % vocabulary) as i64);
    let [target, rows] = [gamma + 1, gamma]
        .map(|rows| make.floats(F32, &[batch, rows, vocabulary], |at| ((at[0] + at[1] * 5 + at[2] * 7) % 11) as f64));
    let temperature = make.floats(F32, &[batch], |_| 1.0);
    let (top_k, top_p) = (make.ints(I32, &[batch], |_| 5), make.floats(F32, &[batch], |_| 0.875));
    let (seeds, positions) = (make.ints(I64, &[batch], |at| at[0] as i64), make.ints(I32, &[batch], |_| 100));
    let [next_token, accepted, status] = [(); 3].map(|()| make.out(&[batch]));
    let committed = make.out(&[batch, gamma + 1]);
    let given = |is_given: bool, t: &Tensor| if is_given { t.c() } else { absent() };
    let args = vwd_verify_sample_args {
        rule,
        draft: draft.c(),
        target: target.c(),
        draft_rows: given(has_rows && gamma > 0, &rows),
        temperature: temperature.c(),
        top_k: given(has_filters, &top_k),
        top_p: given(has_filters, &top_p),
        seeds: seeds.c(),
        positions: positions.c(),
        next_token: next_token.c(),
        accepted: accepted.c(),
        committed: committed.c(),
        status: status.c(),
        ..args()
    };
    let kept =
        [draft, target, rows, temperature, top_k, top_p, seeds, positions, next_token, accepted, status, committed];
    let call = move || {
        let _ = &kept;
        // SAFETY: the tensors outlive the call.
        unsafe { vwd_verify_sample(backend.session(), &args, backend.stream()) }
    };
    (format!("vwd_verify_sample by rule {rule}, rows {has_rows}, filters {has_filters}"), Box::new(call))
}

fn tree(backend: &Backend, sizes: [usize; 3], walk: u32, has_rows: bool, has_filters: bool) -> Call<'_> {
    let ([batch, nodes, vocabulary], make) = (sizes, Maker(backend));
    let tokens = make.ints(I32, &[batch, nodes], |at| ((at[0] + at[1]) % vocabulary) as i64);
    // Two children at most of each node.
    let parents = make.ints(I32, &[batch, nodes], |at| (at[1] as i64 + 1) / 2 - 1);
    let [logits, rows] = [0, 3].map(|shift| {
        make.floats(F32, &[batch, nodes, vocabulary], |at| ((at[0] + at[1] * 5 + at[2] * 7 + shift) % 11) as f64)
    });
    let temperature = make.floats(F32, &[batch], |_| 1.0);
    let (top_k, top_p) = (make.ints(I32, &[batch], |_| 5), make.floats(F32, &[batch], |_| 0.875));
    let (seeds, positions) = (make.ints(I64, &[batch], |at| at[0] as i64), make.ints(I32, &[batch], |_| 100));
    let [next_token, accepted] = [(); 2].map(|()| make.out(&[batch]));
    let status = Tensor::poisoned(backend, U32, &[batch], &Layout::default());
    let [path, committed] = [(); 2].map(|()| make.out(&[batch, nodes]));
    let given = |is_given: bool, t: &Tensor| if is_given { t.c() } else { absent() };
    let args = vwd_verify_tree_args {
        walk,
        tokens: tokens.c(),
        parents: parents.c(),
        logits: logits.c(),
        draft_rows: given(has_rows, &rows),
        temperature: temperature.c(),
        top_k: given(has_filters, &top_k),
        top_p: given(has_filters, &top_p),
        seeds: seeds.c(),
        positions: positions.c(),
        accepted: accepted.c(),
        path: path.c(),
        next_token: next_token.c(),
        committed: committed.c(),
        status: status.c(),
        ..args()
    };
    let inputs = [tokens, parents, logits, rows, temperature, top_k, top_p, seeds, positions];
    let outputs = [next_token, accepted, status, path, committed];
    let call = move || {
        let _ = (&inputs, &outputs);
        // SAFETY: the tensors outlive the call.
        unsafe { vwd_verify_tree(backend.session(), &args, backend.stream()) }
    };
    (format!("vwd_verify_tree by walk {walk}, rows {has_rows}, filters {has_filters}"), Box::new(call))
}

/// Every other node was accepted. Four caches, pages of four rows.
fn compact(backend: &Backend, batch: usize, nodes: usize) -> Call<'_> {
    struct Compactor(*mut vwd_compactor);
    impl Drop for Compactor {
        fn drop(&mut self) {
            // SAFETY: created once, released once.
            unsafe { vwd_compactor_release(self.0) };
        }
    }
    let make = Maker(backend);
    let pages = (2 * nodes).div_ceil(4);
    let caches = [(); 4].map(|()| make.floats(F16, &[batch * pages, 4, 2, 8], |at| at[1] as f64));
    let table = make.ints(I32, &[batch, pages], |at| (at[0] * pages + at[1]) as i64);
    let (bases, path) = (make.ints(I32, &[batch], |_| 1), make.ints(I32, &[batch, nodes], |at| 2 * at[1] as i64));
    let c = [0, 1, 2, 3].map(|n: usize| caches[n].c());
    let options = vwd_compactor_options { cache_count: c.len() as u32, caches: c.as_ptr(), ..args() };
    let mut compactor = std::ptr::null_mut();
    // SAFETY: the pointers are valid.
    assert_ok(unsafe { vwd_compactor_create(backend.session(), &options, &mut compactor) });
    let compactor = Compactor(compactor);
    let args = vwd_compact_args { page_table: table.c(), bases: bases.c(), path: path.c(), ..args() };
    let call = move || {
        let _ = (&compactor, &caches, &table, &bases, &path);
        // SAFETY: the tensors and the compactor outlive the call.
        unsafe { vwd_compact(compactor.0, &args, backend.stream()) }
    };
    ("vwd_compact".to_owned(), Box::new(call))
}
