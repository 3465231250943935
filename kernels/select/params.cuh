// Parameters of the selecting kernels.
#pragma once

#include "common/place.cuh"

// Strides are in bytes. A position's stride is 0 where all positions share a list.
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
    // Where a kernel follows: scores [rows, scored_blocks], and what each CTA saw [rows, slices].
    float *scratch_scores;
    uint32 *cta_status;
    uint32 scored_blocks;  // blocks of a row that have a score
    uint32 batch, positions, lists, kv_heads, group, dim, q_type;  // lists: of a sequence and KV head; 1 or `positions`
    uint32 block_size, k, capacity, init, local, max_blocks;
    uint32 slices;  // CTAs of a row; a cluster, if no kernel follows
    float scale;
    Divisor by_slices, by_heads, by_lists, by_block;
};

// Of kernels/select/minmax.cu.
struct MinMaxParams {
    SelectParams select;
    Summary max, min;
    uint32 dtype, lanes, adjacent;  // lanes of a block: 8, 16 or 32
};

// Of kernels/select/means.cu.
struct MeanParams {
    SelectParams select;
    Summary means, range;  // AXIS: axes, and in INT4 their scales and minima
    float *products;   // [rows, heads, windows]
    float *partials;   // [rows, heads, chunks, 2]
    uint32 *seen;      // [rows, scoring], by the CTAs of score_means; then [rows], the positions whose query holds a NaN
    uint32 heads, chunks, scoring;
    uint32 size, stride;  // tokens of a window, and from one to the next
    uint32 softmax, is_axis, dtype, lanes, adjacent;
};

// Of kernels/select/axes.cu. products, partials, queries: where they begin in dynamic shared memory
struct AxisTileParams {
    SelectParams select;
    Summary axes, range;
    uint32 stages;   // tiles of a warp on their way
    uint32 most_tiles;   // tiles of a row for which the index has room
    uint32 products, partials, queries;
    uint32 keys;    // in the first CTA; 0: in the place of what is no longer needed
};

// Of kernels/select/long_axes.cu, whose first kernel has `slices` CTAs for a list. keys, room: where they begin in dynamic shared memory of
// the second
struct AxisTwoLaunchesParams {
    AxisTileParams axes;
    float *products;   // [lists, blocks, heads by the four]
    float2 *partials;  // [lists, heads by the four, tiles]
    uint32 *seen;      // [lists, slices, warps]
    uint32 keys, room;
};

// Of kernels/select/labels.cu.
struct LabelParams {
    SelectParams select;
    Summary codes, scales, minima;
    List candidates;
    const char *channels;
    int64 channels_head, channels_channel;
    float *products;   // [lists, heads, candidate_tokens]
    float2 *partials;  // [lists, heads, chunks]
    uint32 *seen;      // [CTAs]
    int32 *blocks;     // [CTAs, candidates_capacity]; null where they fit in shared memory
    uint32 candidates_capacity, candidate_tokens, chunks, heads, kept;
    uint32 adjacent;
    uint32 shared_scores;  // scores of blocks that fit in shared memory
};

// Of kernels/select/held_labels.cu. products, partials, queries: where they begin in dynamic shared memory
struct LabelClusterParams {
    LabelParams labels;
    Divisor by_units;           // of all CTAs of a list: each has whole units
    uint32 unit, unit_blocks;   // tokens of a unit, and its blocks
    uint32 pitch;               // of a token's products
    uint32 tiles, lanes;        // of four heads; lanes that add up a block
    uint32 products, partials, queries;
};

#include "select/layout.cuh"
