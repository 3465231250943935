// Parameters of the kernels of index.
#pragma once

#include "index/keys.cuh"

// Of kernels/index/update.cu.
struct UpdateParams {
    Keys keys;
    Place place;
    Summary first, second, third;  // MINMAX: max, min · MEAN: means · LABEL: codes, scales, minima
    const char *channels;
    int64 channels_head, channels_channel;
    uint32 dtype;          // of the summaries
    uint32 size, stride;  // MINMAX: tokens of a block · MEAN: tokens of a window, and from one to the next
    uint32 kept;          // LABEL: channels
    uint32 lanes, split, slices;
    Divisor size_of, stride_of, heads_of, slices_of;  // size, stride, keys.kv_heads, slices
};

// Of kernels/index/axis.cu. first: means and axes · second: in INT4, scales and minima
struct AxisParams {
    UpdateParams update;
    const char *weights, *centre;  // may be null
    int64 weights_head, weights_channel, centre_head, centre_channel;
};

// Of kernels/index/importance.cu: a tensor [tokens, heads, D].
struct Sample {
    const char *data;
    int64 token, head, channel;
    uint32 tokens;
};
struct ImportanceParams {
    Sample q, k;
    char *channels, *importance, *weights, *centre;  // each may be null
    int64 channels_head, channels_place, importance_head, importance_channel;
    int64 weights_head, weights_channel, centre_head, centre_channel;
    uint32 group, dim, dtype, kept;
};

#include "index/layout.cuh"
