//! The public structs as Rust lays them out. A test fails when one of the header, or a field, is missing here.

use std::mem::{offset_of, size_of};
use vanward::abi::*;

pub struct Struct {
    pub name: &'static str,
    pub size: usize,
    pub fields: Vec<Field>,
}

pub struct Field {
    pub name: &'static str,
    pub size: usize,
    pub offset: usize,
}

fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! structs {
    ($($name:ident { $($field:ident),* $(,)? })*) => {
        vec![$(Struct {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: vec![$(Field {
                name: stringify!($field),
                size: size_of_field(|s: &$name| &s.$field),
                offset: offset_of!($name, $field),
            }),*],
        }),*]
    };
}

pub fn all() -> Vec<Struct> {
    structs! {
        vwd_session_options { struct_size, flags, device, device_id, threads, scratch_bytes, pinned_limit, parallel_for, parallel_context }
        vwd_session_details { struct_size, device, device_id, threads, driver_version, compute_capability, multiprocessors, kernels, load_microseconds, scratch_bytes, scratch_peak, pinned_in_use, pinned_peak, pinned_cached, device_name }
        vwd_tensor { data, device_type, device_id, dtype_code, dtype_bits, lanes, ndim, shape, strides }
        vwd_block_list { ids, counts, slots }
        vwd_verify_args { struct_size, flags, draft, target, draft_lens, accepted, next_token, mismatch, committed }
        vwd_pack_args { struct_size, flags, tensor_count, rows, packed, accepted, offsets }
        vwd_verify_pack_args { struct_size, flags, tensor_count, rows, packed, draft, target, draft_lens, accepted, next_token, offsets, mismatch, committed }
        vwd_index { struct_size, flags, kind, block_size, window, stride, table, key_max, key_min, means, labels, label_scale, label_min, channels }
        vwd_index_update_args { struct_size, flags, index, k, k_scale, page_table, seq_lens, begin }
        vwd_channel_importance_args { struct_size, flags, q, k, channels, importance }
        vwd_select_blocks_args { struct_size, flags, method, block_size, k, init_blocks, local_blocks, scale, index, q, q_lens, seq_lens, budgets, candidates, selected, scores, status }
        vwd_select_tokens_args { struct_size, flags, block_size, k, init_tokens, local_tokens, scale, index, q, q_lens, seq_lens, budgets, candidates, selected, scores, status }
        vwd_paged_kv { struct_size, flags, k, v, page_table, seq_lens, k_scale, v_scale }
        vwd_attention_state { acc, m, l }
        vwd_attention_partials { acc, m, l }
        vwd_attention_args { struct_size, flags, block_size, partial_blocks, scale, soft_cap, window, kv, q, q_lens, list, sinks, out, lse, state, partials }
        vwd_merge_states_args { struct_size, flags, input_count, inputs, sinks, out, lse, state }
        vwd_repair_args { struct_size, flags, mode, block_size, partial_blocks, scale, soft_cap, window, kv, q, q_lens, predicted, selected, predicted_state, predicted_partials, sinks, out, lse, state, missed_counts }
        vwd_gather_blocks_args { struct_size, flags, engine, source, target, source_ids, target_ids, count }
        vwd_predictor_state { level, trend }
        vwd_holt { alpha, beta, gamma }
        vwd_predictor_reset_args { struct_size, flags, state, rows }
        vwd_predictor_predict_args { struct_size, flags, block_size, k, init_blocks, local_blocks, ratio, holt, state, seq_lens, budgets, predicted, scores }
        vwd_predictor_update_args { struct_size, flags, block_size, holt, state, seq_lens, scores }
        vwd_predictor_calibrate_args { struct_size, flags, k, init_blocks, local_blocks, ratio, grid_count, grid, scores, block_counts }
        vwd_forecast_options { struct_size, flags, layers, input_dim, q_heads, head_dim, ridge }
        vwd_forecast_details { struct_size, flags, layers, input_dim, q_heads, head_dim, ridge, solved, rank, map_bytes, sum_bytes }
        vwd_rope { struct_size, flags, style, rotary_dim, theta, attention_factor, inv_freq }
        vwd_forecast_accumulate_args { struct_size, flags, layer, x, previous, q }
        vwd_forecast_project_args { struct_size, flags, layer, rope, x, previous, positions, q }
    }
}
