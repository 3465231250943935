//! Keys and values in INT4: attention over them, coding, weights.

use crate::calls::FLOATS;
use crate::case::{Case, Place, Role, of};
use crate::content::Content;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

/// Sizes of a layer.
struct Layer {
    batch: i64,
    kv_heads: i64,
    dims: [i64; 2],
    block: i64,
}

impl Layer {
    fn draw(case: &mut Case) -> Layer {
        let (batch, kv_heads) = (case.extent(1..=3), case.extent(1..=3));
        let dims = [(); 2].map(|()| case.rng.pick(&[64, 64, 80, 128, 256]));
        Layer { batch, kv_heads, dims, block: case.rng.pick(&[16, 32, 48, 64]) }
    }

    /// A number of pages, tokens of one, and a table at this place, or none. Pages that are written are in one place of it.
    fn pages(&self, case: &mut Case, table: Place, size: i64, is_written: bool) -> [i64; 2] {
        let (count, most, has_table) = (case.extent(1..=6), case.extent(1..=4), !case.rng.one_in(4));
        let count = if has_table { count } else { self.batch.saturating_add(count) };
        let content = if is_written { Content::Distinct(count) } else { Content::Indices(count) };
        let table = case.input(table, I32, &[self.batch, most], content);
        case.optional(has_table, table);
        [count, case.extent(size as usize..=size as usize)]
    }

    /// The struct at `home` with its codes in this role; gives the tokens that a sequence may have.
    fn describe(&self, case: &mut Case, home: Place, role: Role) -> i64 {
        type Kv = vwd_paged_kv;
        type Int4 = vwd_int4_kv;
        let Layer { batch, kv_heads, dims: [dim, value_dim], block } = *self;
        let (kv, is_written) = (case.nested::<Kv>(home), matches!(role, Role::Out));
        let size = case.rng.pick(&[block, 2 * block, 16]);
        let [pages, page] = self.pages(case, of!(kv, Kv, page_table), size, false);
        let tokens = page.saturating_mul(4);
        let dtype = case.rng.pick(&FLOATS);
        case.input(of!(kv, Kv, k), dtype, &[pages, page, kv_heads, dim], Content::Floats);
        case.input(of!(kv, Kv, v), dtype, &[pages, page, kv_heads, value_dim], Content::Floats);
        case.input(of!(kv, Kv, seq_lens), I32, &[batch], Content::Counts(tokens));
        let int4 = case.nested::<Int4>(of!(kv, Kv, int4));
        case.number(of!(int4, Int4, block_size), block as u32);
        let exact = case.rng.pick(&[0, 1, 2]) * block as u32;
        case.number(of!(int4, Int4, exact_tokens), exact);
        let size = case.rng.pick(&[block, 2 * block]);
        let [pages, page] = self.pages(case, of!(int4, Int4, page_table), size, is_written);
        let codes = |dim: i64| [pages, page, kv_heads, dim / 2];
        case.tensor(of!(int4, Int4, k), role, U8, &codes(dim), Content::Bytes);
        case.tensor(of!(int4, Int4, v), role, U8, &codes(value_dim), Content::Bytes);
        for scale in [of!(int4, Int4, k_scale), of!(int4, Int4, v_scale)] {
            case.tensor(scale, role, F8E4M3, &[pages, page, kv_heads], Content::Bytes);
        }
        case.tensor(of!(int4, Int4, coded_lens), role, I32, &[batch], Content::Counts(tokens));
        let rows = case.rng.pick(&[1, 3, 8]);
        let [pages, rows] = self.pages(case, of!(int4, Int4, mean_table), rows, is_written);
        let dtype = case.rng.pick(&FLOATS);
        case.tensor(of!(int4, Int4, means), role, dtype, &[pages, rows, kv_heads, dim], Content::Floats);
        case.maybe_input(of!(int4, Int4, weights), F32, &[kv_heads, dim], Content::Floats);
        tokens
    }
}

pub fn attention(case: &mut Case) {
    type Args = vwd_attention_args;
    let args = case.call_with_scratch::<Args>(vwd_attention, vwd_attention_scratch);
    let layer = Layer::draw(case);
    layer.describe(case, of!(args, Args, kv), Role::In);
    let heads = layer.kv_heads.saturating_mul(case.rng.pick(&[1, 2, 4, 9]));
    let dtype = case.rng.pick(&FLOATS);
    case.real(of!(args, Args, scale), 0.1);
    let window = case.rng.pick(&[0, 0, 1, 40]);
    case.number(of!(args, Args, window), window);
    case.input(of!(args, Args, q), dtype, &[layer.batch, heads, layer.dims[0]], Content::Floats);
    case.output(of!(args, Args, out), dtype, &[layer.batch, heads, layer.dims[1]]);
    case.maybe_output(of!(args, Args, lse), F32, &[layer.batch, heads]);
}

pub fn quantize(case: &mut Case) {
    type Args = vwd_kv_quantize_args;
    let args = case.call::<Args>(vwd_kv_quantize);
    let layer = Layer::draw(case);
    case.length(of!(args, Args, layer_count), 1, 48);
    let layers = case.array::<*const vwd_paged_kv>(of!(args, Args, layers), 1);
    let tokens = layer.describe(case, layers[0].clone(), Role::Out);
    case.maybe_input(of!(args, Args, begin), I32, &[layer.batch], Content::Counts(tokens));
}

pub fn weights(case: &mut Case) {
    type Args = vwd_kv_weights_args;
    let args = case.call::<Args>(vwd_kv_weights);
    let layer = Layer::draw(case);
    let block = case.rng.pick(&[1, 16, 64, u32::MAX]);
    case.number(of!(args, Args, block_size), block);
    let (dtype, dim) = (case.rng.pick(&FLOATS), case.rng.pick(&[16, 24, 64, 576]));
    let (queries, keys) = (case.extent(0..=9), case.extent(0..=40));
    let heads = layer.kv_heads.saturating_mul(2);
    case.input(of!(args, Args, q), dtype, &[queries, heads, dim], Content::Floats);
    case.input(of!(args, Args, k), dtype, &[keys, layer.kv_heads, dim], Content::Floats);
    case.output(of!(args, Args, weights), F32, &[layer.kv_heads, dim]);
}
