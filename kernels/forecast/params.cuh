// Parameters of the forecast's kernels. Strides are in bytes.
#pragma once

#include "common/types.cuh"

// Inputs of one kind: x [B, input_dim], or the queries at the token before [B, Hq, D], read as [B, Hq · D].
struct Inputs {
    const char *data;
    int64 row, head, channel;
    Divisor dim;      // inputs of a head
    uint32 count;     // inputs of a row
    uint32 dtype;
    uint32 share, slices;  // inputs of a slice, a multiple of 256 (the last slice may have fewer), and the number of slices
};

// Copies inputs of any layout to [B, width] in float32, zeros after the last.
struct PackParams {
    Inputs from;
    float *to;
    uint32 width;
};

struct ProjectParams {
    Inputs x, previous;  // every eight inputs from a multiple of eight on are adjacent, at a multiple of 16 bytes
    const float *first;   // [rows, columns]: the weights of the slices of x, then of the slices of previous. Low rank: `down`
    const float *bias;    // [rows]: the weights of the constant
    const float *second;  // [outputs, rank], rows `second_row` floats apart, a multiple of 32. Low rank only: `up`. Values past rank are 0
    float *products;      // scratch [slices, B, rows]: the products of each slice, which are still to be multiplied by factor and scale
    float *factors;       // scratch [slices, B]: the factor of a slice's products. Low rank: [slices, B, 2], factor and Σ x² of the slice
                          // divided by the factor's square
    double *scales;       // scratch [B]: 1 / rms of x, a factor of the products of x. Full rank only
    float *turns;         // scratch [B, pairs, 2]: cosine and sine of each pair, times the factor on rotated channels
    float *sums;          // scratch [B, rows]: the products summed over the slices. Low rank only
    const char *positions, *inv_freq;  // [B] int32, [pairs] float32 or null
    char *q;                           // [B, Hq, D]
    int64 positions_row, inv_freq_pair, q_row, q_head, q_channel;
    double log2_theta, attention_factor;
    uint32 batch, rows, columns, rank, second_row;
    uint32 q_heads, head_dim, q_type;
    uint32 pairs, interleaved;  // the pairs of a head's rotated channels, and whether a pair is two adjacent channels
    Divisor units;              // units of a head: its pairs, then its other channels two by two
    uint32 multiplying;         // CTAs of forecast_inputs_* that multiply; each of the other CTAs takes a row
    // Low rank: groups of 16 rows of the batch that the CTAs of forecast_inner_* and forecast_outputs_* take at once; √count of x.
    uint32 inner_groups, output_groups;
    float root_count;
};

#include "forecast/layout.cuh"
