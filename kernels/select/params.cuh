// Parameters of the selecting kernels: SelectParams, which all kernels read, and what each kernel's struct adds to it. Shapes stand beside
// pointers. B: sequences; Q: query positions; Hk: KV heads; G: query heads of a KV head; rows or lists: the lists that a call makes.
#pragma once

#include "common/place.cuh"

// A list of blocks or tokens: ids [B, Q, Hk, capacity], counts [B, Q, Hk]. Strides are in bytes. The stride of a position is 0 where all
// positions share a list.
struct List {
    char *ids, *counts;
    int64 ids_seq, ids_pos, ids_head, ids_entry;
    int64 counts_seq, counts_pos, counts_head;
};

struct SelectParams {
    const char *q, *q_lens, *seq_lens, *budgets;
    char *scores, *status;
    int64 q_seq, q_pos, q_head, q_channel;
    int64 q_lens_seq, seq_lens_seq, budgets_seq;
    int64 scores_seq, scores_pos, scores_head, scores_block;
    int64 status_seq, status_pos, status_head;
    List selected;
    Place place;
    // For the kernel that follows: the scores [rows, scored_blocks], and the status bits that each CTA saw [rows, slices].
    float *scratch_scores;
    uint32 *cta_status;
    uint32 scored_blocks;  // blocks of a row that have a score
    uint32 batch, positions, lists, kv_heads, group, dim, q_type;  // lists: how many a sequence and KV head has, 1 or `positions`
    uint32 block_size, k, capacity, init, local, max_blocks;
    uint32 slices;  // CTAs of a row; they are a cluster where no kernel follows
    float scale;
    Divisor by_slices, by_heads, by_lists, by_block;
};

// What kernels/select/minmax.cuh adds.
struct MinMaxParams {
    SelectParams select;
    Summary max, min;
    uint32 dtype, lanes, adjacent;  // lanes: how many share a block, 8, 16 or 32
};

// What kernels/select/means.cuh adds (means, axis_general).
struct MeanParams {
    SelectParams select;
    Summary means, range;  // for AXIS: means and axes, and for INT4 their scales and minima
    float *products;   // [rows, heads, windows]
    float *partials;   // [rows, heads, chunks, 2]
    uint32 *seen;      // [rows, scoring] status bits that each scoring CTA saw; then [rows] the positions whose query holds a NaN
    uint32 heads, chunks, scoring;
    uint32 size, stride;  // tokens of a window, and tokens between the begins of windows
    uint32 softmax, is_axis, dtype, lanes, adjacent;
};

// What kernels/select/mass.cuh adds. A window is a whole block; products and softmax are not read.
struct MassParams {
    MeanParams means;
    const char *centre;  // [Hk, D] float32; null: 0
    int64 centre_head, centre_channel;
    char *log_mass;      // [B, Q, Hq]
    int64 mass_seq, mass_pos, mass_head;
    uint32 query_heads, warps;  // Hq; B · Q · Hq
};

// What kernels/select/axis_cluster.cuh adds. products, partials, queries and keys are offsets in dynamic shared memory. axis_two_launches
// reads of them `queries` alone.
struct AxisTileParams {
    SelectParams select;
    Summary axes, range;
    uint32 stages;   // stages of a warp's ring of tiles
    uint32 most_tiles;   // tiles of a list for which the index has room
    uint32 products, partials, queries;
    uint32 keys;    // in the first CTA; 0: they take the place of what is no longer needed
};

// What the kernels of kernels/select/axis_cluster.cuh add that write log_mass.
struct AxisMassParams {
    AxisTileParams axes;
    const char *centre;  // [Hk, D] float32; null: 0
    int64 centre_head, centre_channel;
    char *log_mass;      // [B, Q, Hq]
    int64 mass_seq, mass_pos, mass_head;
    uint32 masses, own_keys, sums;  // offsets in dynamic shared memory
    uint32 unused;
};

// What kernels/select/axis_two_launches.cuh adds. Its first kernel has `slices` CTAs for a list; keys and room are offsets in the second
// kernel's dynamic shared memory.
struct AxisTwoLaunchesParams {
    AxisTileParams axes;
    float *products;   // [lists, blocks, G rounded up to a multiple of four]
    float2 *partials;  // [lists, G rounded up to a multiple of four, tiles]
    uint32 *seen;      // [lists, slices, warps] status bits
    uint32 keys, room;
};

// What kernels/select/labels_general.cuh adds.
struct LabelParams {
    SelectParams select;
    Summary codes, scales, minima;
    List candidates;
    const char *channels;
    int64 channels_head, channels_channel;
    float *products;   // [lists, heads, candidate_tokens]
    float2 *partials;  // [lists, heads, chunks]
    uint32 *seen;      // [CTAs] status bits
    int32 *blocks;     // [CTAs, candidates_capacity] candidates; null where they fit in shared memory
    uint32 candidates_capacity, candidate_tokens, chunks, heads, kept;
    uint32 adjacent;
    uint32 shared_scores;  // block scores for which shared memory has room; 0: they are read from scratch
};

// What kernels/select/labels_cluster.cuh adds. products, partials and queries are offsets in dynamic shared memory.
struct LabelClusterParams {
    LabelParams labels;
    Divisor by_units;           // divides by the tokens that all CTAs of a list take with one unit each
    uint32 unit, unit_blocks;   // the tokens that stay in one CTA, and their blocks
    uint32 pitch;               // floats from one token's products to the next token's
    uint32 tiles, lanes;        // tiles of four heads; lanes that add up a block's mass
    uint32 products, partials, queries;
};

#include "select/layout.cuh"
