// Parameters of the index kernels: UpdateParams, and what axis.cuh and importance.cu add or have instead.
#pragma once

#include "index/keys.cuh"

// Layers that may share a launch.
constexpr uint32 MOST_LAYERS = 32;
struct Layers {
    LayerShift shift[MOST_LAYERS];
};

// What kernels/index/update.cuh reads. Addresses are the first layer's.
struct UpdateParams {
    Keys keys;
    Place place;
    Summary first, second, third;  // MINMAX: max, min · MEAN: means · LABEL: codes, scales, minima
    const char *channels;
    int64 channels_head, channels_channel;
    uint32 dtype;          // element type of the summaries
    uint32 size, stride;  // MINMAX: tokens of a block · MEAN: tokens of a window, and from one to the next
    uint32 kept;          // LABEL: kept channels
    uint32 lanes, split, slices;
    uint32 batch;
    Divisor size_of, stride_of, heads_of, slices_of, batch_of;  // size, stride, keys.kv_heads, slices, batch
};

// What kernels/index/axis.cuh adds. update.first: means and axes; update.second: for INT4, scales and minima.
struct AxisParams {
    UpdateParams update;
    const char *weights, *centre;  // may be null
    int64 weights_head, weights_channel, centre_head, centre_channel;
};

// A tensor [tokens, heads, D] that kernels/index/importance.cu reads.
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
