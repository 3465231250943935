// Parameters of the forecast's kernels. Strides are in bytes.
#pragma once

#include "common/types.cuh"

// Inputs of one kind: x [B, input_dim], or the queries at the token before [B, Hq, D], read as [B, Hq · D].
struct Inputs {
    const char *data;
    int64 row, head, channel;
    Divisor dim;      // inputs of a head
    uint32 count;     // of a row
    uint32 dtype;
    uint32 share, slices;  // inputs of a slice, a multiple of 256; those of the last may be fewer
};

// Copies inputs of any layout to [B, width] in float32, zeros after the last.
struct PackParams {
    Inputs from;
    float *to;
    uint32 width;
};

struct ProjectParams {
    Inputs x, previous;  // eight from a multiple of eight on lie side by side, at a multiple of 16 bytes
    // A map: `first` [rows, columns] of both kinds' slices, one after the other, and `bias` [rows], of the constant. A map that is cut has
    // `second` [outputs, rank], too. Rows of `second` are `second_row` floats apart, a multiple of 32; what is past rank or count is 0.
    const float *first, *bias, *second;
    // Scratch: products of each slice [slices, B, rows], which lack a factor [slices, B], and those of x the row's scale [B] = 1 / rms; the
    // cosine and sine of each pair [B, pairs, 2], times the factor on rotated channels. Of a map that is cut `factors` are [slices, B, 2]: beside
    // each factor Σ x² of the slice, which lacks its square; there are no scales, but the slices' sums [B, rows].
    float *products, *factors;
    double *scales;
    float *turns, *sums;
    const char *positions, *inv_freq;
    char *q;
    int64 positions_row, inv_freq_pair, q_row, q_head, q_channel;
    double log2_theta, attention_factor;
    uint32 batch, rows, columns, rank, second_row;
    uint32 q_heads, head_dim, q_type;
    uint32 pairs, interleaved;  // of a head's channels that rotate
    Divisor units;              // of a head: its pairs, and the channels after them, two by two
    uint32 multiplying;         // CTAs of forecast_inputs_* that multiply; the others take a row
    // Cut: groups of 16 rows of the batch that the CTAs of forecast_inner_* and forecast_outputs_* take at once; √count of x.
    uint32 inner_groups, output_groups;
    float root_count;
};

#include "forecast/layout.cuh"
