// Parameters of the predictor's kernels. Strides are in bytes.
#pragma once

#include "common/cta_topk.cuh"
#include "predictor/holt.cuh"

constexpr uint32 THREADS = 256, PREDICT_THREADS = 512;  // threads of a CTA, and of a CTA of predictor_predict_*
constexpr uint32 CALIBRATE_THREADS = 512;               // threads of a CTA of calibrate_*

// A float32 value for each block: [N or B, Hk, max_blocks].
struct Rows {
    char *data;
    int64 seq, head, block;

    __device__ char *row(uint32 i, uint32 g) const { return data + i * seq + g * head; }
    __device__ float &at(uint32 i, uint32 g, uint32 j) const { return as<float>(row(i, g) + j * block); }
};

// The smoothed scores of N sequences.
struct State {
    Rows level, trend;
    uint32 sequences, kv_heads, max_blocks;
};

struct ResetParams {
    State state;
    const char *rows;  // [listed] int32, or null: every sequence
    int64 rows_entry;
    uint64 listed;
};

// The rows of a call: how many blocks each has, and which sequence of the state it is.
struct Blocks {
    const char *seq_lens, *sequences;  // [B] int32; sequences may be null: row i is sequence i
    int64 seq_lens_seq, sequences_seq;
    uint32 size;

    __device__ const char *len_of(uint32 i) const { return seq_lens + i * seq_lens_seq; }
    __device__ uint32 in(int32 given, const State &state) const {
        const uint32 len = max(given, 0);
        return min(len / size + (len % size != 0), state.max_blocks);
    }
    __device__ uint32 of(uint32 i, const State &state) const { return in(as<int32>(len_of(i)), state); }
    __device__ uint32 sequence(uint32 i) const { return sequences ? as<uint32>(sequences + i * sequences_seq) : i; }
};

struct UpdateParams {
    State state;
    Blocks blocks;
    Rows scores;
    uint32 slices;  // CTAs of a sequence and KV head
    float alpha, beta;
};

struct PredictParams {
    State state;
    Blocks blocks;
    Rows scores;          // null: no scores are written
    const char *budgets;  // [B] int32, or null: `k`
    char *ids, *counts;   // [B, Hk, cap] and [B, Hk] int32
    int64 budgets_seq;
    int64 ids_seq, ids_head, ids_entry;
    int64 counts_seq, counts_head;
    double ratio;
    uint32 k, cap, init, local;  // k is already multiplied by the ratio
    float gamma;
    uint32 adjacent;  // whether the blocks of a state's row are adjacent, a multiple of four, and every four of them are aligned
};

struct Holt {
    float alpha, beta, gamma;
};

// What the blocks of one step and head are worth: Σ (s − best_left_out) · unit over those above it; a total of 0 says nothing.
struct Target {
    double unit;
    uint64 total;
    float best_left_out;
    uint32 unused;
};

// Shares hit by a point along a history of a head, and steps that count.
struct Rating {
    double hits;
    uint64 steps;
};

struct CalibrateParams {
    const char *scores;  // [N, T, Hk, nb]
    const char *counts;  // [N, T] int32
    int64 scores_history, scores_step, scores_head, scores_block;
    int64 counts_history, counts_step;
    Target *targets;  // [N, T, Hk]
    const Holt *grid;
    Rating *ratings;  // [points, N · Hk]
    float *states;    // [points, N · Hk, 2, row]: level and trend
    uint64 row;       // nb up to a multiple of four
    uint32 runs;      // N · Hk
    uint32 steps, heads, blocks;
    uint32 k, predicted, init, local;  // k, and ⌈ratio · k⌉
};

#include "predictor/layout.cuh"
