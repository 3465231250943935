// Parameters of the kernels that code keys and values in INT4.
#pragma once

#include "common/elements.cuh"
#include "common/view.cuh"

constexpr uint32 MOST_CHANNELS = 256, MOST_WEIGHTS = 576, MOST_TOKENS = 128, MOST_LAYERS = 48;

// The tensors that a layer has of its own.
struct LayerData {
    char *k, *v, *codes_k, *codes_v, *k_scale, *v_scale, *means, *weights;  // weights may be null
};

// Strides in bytes, those of every layer. A table that is null gives sequence i page i and no other.
struct QuantizeParams {
    View<2> table, coded_table, mean_table;  // [B, pages of a sequence] int32
    View<1> seq_lens, begin, coded_lens;     // [B] int32; begin may be null
    int64 k[4], v[4];                        // [pages, P, Hk, D]
    int64 codes_k[4], codes_v[4];            // [pages, P, Hk, D/2] uint8
    int64 k_scale[3], v_scale[3];            // [pages, P, Hk] e4m3
    int64 means[4];                          // [pages, rows, Hk, D]
    int64 weights[2];                        // [Hk, D] float32
    uint32 pages, page_size;                 // in the tensors, and tokens of one
    uint32 coded_pages, coded_page_size;
    uint32 mean_pages, mean_rows, mean_columns;
    uint32 capacity;                         // tokens that both caches have room for
    uint32 batch, heads, dim, value_dim, block, exact;
    uint32 dtype, mean_type;                 // element types of keys and values, and of means
    uint32 slices;                           // CTAs of a layer, sequence and KV head
    float factor, value_factor;              // of a rotated key and value
    uint32 unused;
    LayerData layer[MOST_LAYERS];
};

// A sample [T, heads, D].
struct Sample {
    const char *data;
    int64 step[3];
};

struct WeightsParams {
    Sample q, k;
    char *weights;              // [Hk, D] float32
    int64 weights_step[2];
    uint32 q_tokens, k_tokens, group, dim, block, dtype;
    float asked, tokens;        // query rows of a KV head, and key rows
};

#include "quantize/layout.cuh"

// The page of the tensor that is page p of a sequence; below 0 where there is none.
__device__ inline int32 find_page(const View<2> &table, uint32 seq, uint32 p, uint32 pages) {
    if (!table) return p == 0 && seq < pages ? int32(seq) : -1;
    const int32 page = as<int32>(table.at(seq, p));
    return page >= 0 && uint32(page) < pages ? page : -1;
}

// A weight as it counts: 1 where it is not a finite number above 0.
__device__ inline float weight_of(float w) { return w > 0.0f && w <= 3.402823466e38f ? w : 1.0f; }

// The blocks of a sequence that are to be coded.
struct Blocks {
    uint32 first, last;

    __device__ Blocks(const QuantizeParams &p, uint32 seq) {
        const uint32 tokens = min(uint32(max(as<int32>(p.seq_lens.at(seq)), 0)), p.capacity);
        const uint32 begin = max(p.begin ? uint32(max(as<int32>(p.begin.at(seq)), 0)) : 0, p.exact);
        first = begin / p.block + (begin % p.block > 0), last = tokens / p.block;
    }
    __device__ void store_length(const QuantizeParams &p, uint32 seq) const { as<int32>(p.coded_lens.at(seq)) = int32(last * p.block); }
};
