// The parameters of the kernels of sample.cu, mirrored by src/ops/sample/cuda.rs. Strides are in bytes; tensors that are not given are null.
#pragma once

#include "common/draw.cuh"

template <uint32 N>
struct View {
    char *data;
    int64 step[N];

    __device__ char *at(int64 i) const { return data + i * step[0]; }
    __device__ char *at(int64 i, int64 j) const { return data + i * step[0] + j * step[N > 1]; }
};

enum Rule : uint32 { GREEDY, COUPLED, REJECTION };
// Bits of SampleParams::flags.
constexpr uint32 TARGET_WEIGHTS = 1, DRAFT_WEIGHTS = 2, TEMPERATURE_LAST = 4;
// Bits of SampleParams::wide: which integers have 64 bits.
constexpr uint32 WIDE_DRAFT = 1, WIDE_NEXT = 2, WIDE_BEGIN = 4, WIDE_POSITION = 8, WIDE_STOP = 16;
// Bits of a request's status: VWD_SAMPLE_*.
constexpr uint32 SAW_NAN = 1, NO_TOKEN = 2, NO_RESIDUAL = 4, NO_ROW = 8;
// Values of finish: VWD_FINISH_*.
constexpr uint32 GOES_ON = 0, STOPPED = 1, FULL = 2;

// What a segment's CTA finds, in scratch.
struct alignas(16) SegmentRecord {
    float largest;
    uint32 first;       // the lowest token with that number, and SAW_NAN << 31
    uint64 sum;         // at the request's temperature
    uint64 plain_sum;   // at temperature 1
    uint64 unused;
};

// What a row's CTA finds, in scratch.
struct alignas(16) RowRecord {
    float largest;
    float bound;        // numbers below it are dropped by top-k and top-p
    uint32 token;       // that the row gives where it is greedy or coupled
    uint32 status;
    uint64 total;       // of what filters keep, at the request's temperature
    uint64 plain_total; // of all, at temperature 1
};

struct SampleParams {
    View<3> target;            // [B, γ+1, V]; of [N, V] the first dimension has stride 0
    View<3> draft_rows;        // [B, γ, Vd]
    View<2> draft;             // [B, γ]
    View<2> stop;              // [B, S]
    View<2> committed;         // [B, γ+1]
    View<2> logprobs;          // [B, γ+1]
    View<1> target_begin, draft_lens, draft_map, temperature, top_k, top_p, min_p, seeds, positions;
    View<1> ignore_stop, remaining, min_remaining;
    View<1> next_token, accepted, committed_len, finish, status;
    SegmentRecord *segments;   // [rows, segments of a row]
    RowRecord *rows;
    uint32 *counters;          // one of each request of this launch, 0 on entry and at the end
    int64 target_rows;         // N
    Divisor per_request;       // rows of a request: γ + 1, and γ of its draft
    Divisor per_row;           // segments of a row
    uint32 first;              // request of this launch
    uint32 gamma, tokens, draft_tokens, stops;
    uint32 rule, flags, wide;
    uint32 target_type, draft_type, target_adjacent, draft_adjacent, is_flat;
};
#include "sample/layout.cuh"
