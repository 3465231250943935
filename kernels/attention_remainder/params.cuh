// Parameters of this folder's kernels, mirrored in src/ops/attention/device/term.rs.
#pragma once

#include "attention/attention.cuh"

constexpr uint32 TERM_THREADS = 128;
constexpr uint32 HEADS = 4, STRIP = 64;
constexpr uint32 TERM_ROW_BYTES = 128 * sizeof(float);  // of a covariance's row, or of a mean

struct TermParams {
    AttentionParams to;     // q, lengths, sizes, acc and out; every position has a list of its own
    View<1> rows;           // [B]; NULL: sequence i has row i
    View<2> tokens;         // [N, Hk]
    View<3> mean_v;         // [N, Hk, Dv]
    View<4> covariance;     // [N, Hk, D, Dv]
    View<3> log_mass;       // [B, Q, Hq]
    View<3> m, l, lse;      // [B, Q, Hq]; lse may be NULL
    uint32 count;           // N
    uint32 fours;           // groups of four query heads of a KV head
    uint32 strips;          // groups of 64 channels of values
    float scale;            // ½·scale
    uint32 adjacent;        // four channels of a covariance can be copied at once
    uint32 unused;
};
// Parameters of decode128.cu.
struct ListTermParams {
    AttentionParams to;
    View<1> rows;        // [B]; NULL: sequence i has row i
    View<2> tokens;      // [N, Hk]
    View<3> mean_v;      // [N, Hk, 128]
    View<4> covariance;  // [N, Hk, 128, 128]
    View<3> log_mass;    // [B, Q, Hq]
    uint32 count;        // N
    uint32 keys;         // key channels of a warp
    uint32 offset;       // shared memory from here on holds rows of covariances, those of a warp together, and a mean
    float scale;         // ½·scale
};
#include "attention_remainder/layout.cuh"
