// Parameters of the gather's kernels.
#pragma once

#include "prefetch/pairs.cuh"

// Blocks that are one run of bytes in both tensors: `pieces` of `piece` bytes, the last of `last`.
struct BulkParams {
    const char *source;
    char *target;
    Divisor pieces;
    uint32 piece, last;
    uint32 stages;  // stages of a warp, a piece each
};

// Blocks of any form: `units` units of 2^log_unit bytes in runs, which repeat along up to four dimensions, innermost first.
struct Nested {
    Divisor extent;
    int64 source, target;  // strides in bytes
};
struct VectorParams {
    const char *source;
    char *target;
    Divisor tiles;  // tiles of a block
    uint32 units, log_unit;
    uint32 log_lanes;  // lanes that share a tile
    uint32 dims;
    Divisor run;  // units of a run
    Nested dim[4];
};
