// The parameters of the kernels of verify_tree/, mirrored by src/ops/verify_tree/cuda.rs. Strides are in bytes; tensors that are not given are
// null.
#pragma once

#include "common/trial.cuh"
#include "verify/end.cuh"

constexpr uint32 MOST_NODES = 1024;
constexpr uint32 WARP_NODES = 64;  // that a warp holds
// What path.cu takes at most: segments of a row, those of them that a CTA has, and CTAs of a cluster; and the threads of a CTA.
constexpr uint32 MOST_PATH_SEGMENTS = 64, MOST_CTA_PATH_SEGMENTS = 4, MOST_PATH_CTAS = 16, PATH_THREADS = 512;
// Bits of a tree's status: VWD_TREE_*.
constexpr uint32 BROKEN_LINK = 1u << 16, CLAMPED = 1u << 17, NODE_WITHOUT_TOKEN = 1u << 18;
constexpr int32 NONE = 0x7fffffff;

struct VerifyTreeParams {
    View<2> tokens, parents, target;  // [B, N] Token, int32, Token
    View<1> node_counts;              // [B] int32, or null: N
    View<1> accepted;                 // [B] int32
    View<2> path;                     // [B, M] int32
    View<1> next_token;               // [B] Token
    View<2> committed;                // [B, M] Token, or null
    View<1> status;                   // [B] uint32, or null
    uint32 nodes, places;             // N, M
    const uint64 *largest;            // [B, N, slices] in place of target, or null
    uint32 slices, log_slices;        // log_slices: ⌈log2 slices⌉
};

struct LargestParams {
    View<3> logits;         // [B, N, V]
    View<2> parents;        // [B, N] int32
    View<1> node_counts;    // [B] int32, or null: N
    uint64 *largest;        // [B, N, slices], out
    Divisor nodes, slices;
    uint32 tokens, slice;   // V, and tokens of a slice, a multiple of 8
    uint32 dtype;
    uint32 is_adjacent;     // rows begin on 16 bytes, and their elements are adjacent
    EndParams end;          // stops is 0 where there are none
};

enum Rule : uint32 { COUPLED, INDEPENDENT, DISTINCT };

struct SampledTreeParams {
    SamplingParams sampling;  // target [B, N, V]; draft_rows [B, N, Vd], what the children of each node were drawn from
    View<2> tokens, parents;  // [B, N] Token, int32
    View<1> node_counts;      // [B] int32, or null: N
    View<1> accepted;         // [B] int32
    View<2> path;             // [B, M] int32
    View<1> next_token;       // [B] Token
    View<2> committed;        // [B, M] Token, or null
    View<1> status;           // [B] uint32, or null
    uint32 nodes, places;     // N, M
    uint32 rule, token_bytes;
    EndParams end;
    uint32 has_end;
    uint32 unused;
};
#include "verify_tree/layout.cuh"
