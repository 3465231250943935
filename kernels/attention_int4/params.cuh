// Where keys and values in INT4 lie: what kernels of attention_int4/ are told beside AttentionParams.
#pragma once

#include "attention/attention.cuh"

struct Int4Params {
    AttentionParams to;  // k, v, table and pages are those of tokens that are not coded
    // Tokens exact_tokens … coded_lens[i] − 1 are coded, in whole blocks.
    uint32 exact_tokens;
    uint32 token_capacity;  // tokens that a sequence can have in these pages
    Divisor block, page;    // S, P
    uint32 pages;
    Divisor mean_rows;  // blocks of a page of means
    uint32 mean_pages, most_mean_pages;
    uint32 mean_type;
    View<1> coded_lens;
    View<2> table;             // [B, max_pages]; NULL: sequence i has page i
    View<4> k, v;              // [pages, P, Hk, D / 2], [pages, P, Hk, Dv / 2]
    View<3> k_scale, v_scale;  // [pages, P, Hk] e4m3
    View<4> means;             // [mean_pages, rows, Hk, D]
    View<2> mean_table;        // [B, most_mean_pages]; NULL: sequence i has page i
    View<2> weights;           // [Hk, D]; NULL: 1
    View<3> tree;              // [B, Q, ⌈Q/32⌉] uint32; NULL: rows are a chain. int4_128 takes none
};
#include "attention_int4/layout.cuh"

// The end of a sequence's coded tokens.
__device__ inline int32 coded_end(const Int4Params &p, int32 coded_len, int32 length) {
    const int32 end = min(clamped(coded_len, p.token_capacity), length);
    return p.block.divide(end) * p.block.value;
}
__device__ inline bool is_coded(const Int4Params &p, int32 position, int32 end) { return position >= int32(p.exact_tokens) && position < end; }

// What is not a number above 0 counts as 1.
__device__ inline float valid_weight(float x) { return x > 0.0f && x <= 3.402823466e38f ? x : 1.0f; }
__device__ inline float weight_of_channel(const Int4Params &p, uint32 head, uint32 channel) {
    return p.weights.data ? valid_weight(as<float>(p.weights.at(head, channel))) : 1.0f;
}
