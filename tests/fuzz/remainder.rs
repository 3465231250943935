//! What selections leave out: attention with it as a term, and the means and covariances that it is made of.

use crate::calls::FLOATS;
use crate::case::{Case, Place, Role, of};
use crate::content::Content;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

/// Sizes of a layer, and of rows of means.
struct Layer {
    batch: i64,
    kv_heads: i64,
    dims: [i64; 2],
    block: i64,
    rows: i64,
}

impl Layer {
    fn draw(case: &mut Case) -> Layer {
        let (batch, kv_heads) = (case.extent(1..=3), case.extent(1..=3));
        let dims = [(); 2].map(|()| case.rng.pick(&[16, 24, 64, 128]));
        let (block, rows) = (case.rng.pick(&[1, 4, 16, 32]), case.extent(3..=5));
        Layer { batch, kv_heads, dims, block, rows }
    }

    /// Keys and values; gives their dtype and the tokens that a sequence may have.
    fn keys(&self, case: &mut Case, home: Place) -> (DType, i64) {
        type Kv = vwd_paged_kv;
        let Layer { batch, kv_heads, dims: [dim, value_dim], block, .. } = *self;
        let (kv, dtype) = (case.nested::<Kv>(home), case.rng.pick(&FLOATS));
        let page = case.rng.pick(&[block, 2 * block]);
        let (count, most, has_table) = (case.extent(1..=6), case.extent(1..=5), !case.rng.one_in(4));
        let count = if has_table { count } else { batch.saturating_add(count) };
        let table = case.input(of!(kv, Kv, page_table), I32, &[batch, most], Content::Indices(count));
        case.optional(has_table, table);
        case.input(of!(kv, Kv, k), dtype, &[count, page, kv_heads, dim], Content::Floats);
        case.input(of!(kv, Kv, v), dtype, &[count, page, kv_heads, value_dim], Content::Floats);
        let tokens = page.saturating_mul(if has_table { most } else { 1 });
        case.input(of!(kv, Kv, seq_lens), I32, &[batch], Content::Counts(tokens));
        (dtype, tokens)
    }

    fn remainder(&self, case: &mut Case, home: Place, role: Role) {
        type Remainder = vwd_remainder;
        let Layer { batch, kv_heads, dims: [dim, value_dim], rows, .. } = *self;
        let to = case.nested::<Remainder>(home);
        // Sequences have rows of their own.
        let table = case.input(of!(to, Remainder, rows), I32, &[batch], Content::Distinct(rows));
        let has_table = case.rng.one_in(2);
        case.optional(has_table, table);
        case.tensor(of!(to, Remainder, tokens), role, I32, &[rows, kv_heads], Content::Counts(self.block * 3));
        case.tensor(of!(to, Remainder, mean_k), role, F32, &[rows, kv_heads, dim], Content::Floats);
        case.tensor(of!(to, Remainder, mean_v), role, F32, &[rows, kv_heads, value_dim], Content::Floats);
        case.tensor(of!(to, Remainder, covariance), role, F32, &[rows, kv_heads, dim, value_dim], Content::Floats);
    }
}

pub fn update(case: &mut Case) {
    type Args = vwd_remainder_update_args;
    let args = case.call::<Args>(vwd_remainder_update);
    let layer = Layer::draw(case);
    case.number(of!(args, Args, block_size), layer.block as u32);
    let (_, tokens) = layer.keys(case, of!(args, Args, kv));
    case.maybe_input(of!(args, Args, begin), I32, &[layer.batch], Content::Counts(tokens));
    layer.remainder(case, of!(args, Args, remainder), Role::Out);
}

pub fn attention(case: &mut Case) {
    type Args = vwd_attention_args;
    let args = case.call_with_scratch::<Args>(vwd_attention, vwd_attention_scratch);
    let layer = Layer::draw(case);
    let (dtype, tokens) = layer.keys(case, of!(args, Args, kv));
    let Layer { batch, kv_heads, dims: [dim, value_dim], block, .. } = layer;
    let heads = kv_heads.saturating_mul(case.rng.pick(&[1, 2, 4, 9]));
    case.number(of!(args, Args, block_size), block as u32);
    case.real(of!(args, Args, scale), 0.25);
    case.input(of!(args, Args, q), dtype, &[batch, heads, dim], Content::Floats);
    let (cap, blocks) = (case.extent(0..=6), tokens.saturating_add(block) / block);
    let list = of!(args, Args, list);
    case.input(of!(list, vwd_block_list, ids), I32, &[batch, kv_heads, cap], Content::Ascending(blocks));
    case.input(of!(list, vwd_block_list, counts), I32, &[batch, kv_heads], Content::Counts(cap));
    case.output(of!(args, Args, out), dtype, &[batch, heads, value_dim]);
    case.maybe_output(of!(args, Args, lse), F32, &[batch, heads]);
    let state = of!(args, Args, state);
    case.output(of!(state, vwd_attention_state, acc), F32, &[batch, heads, value_dim]);
    case.output(of!(state, vwd_attention_state, m), F32, &[batch, heads]);
    case.output(of!(state, vwd_attention_state, l), F32, &[batch, heads]);
    layer.remainder(case, of!(args, Args, remainder), Role::In);
    case.input(of!(args, Args, log_mass), F32, &[batch, heads], Content::Floats);
}
