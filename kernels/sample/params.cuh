// The parameters of the kernels of sample.cu, mirrored by src/ops/sample/cuda.rs. Strides are in bytes; tensors that are not given are null.
#pragma once

#include "common/trial.cuh"

enum Rule : uint32 { GREEDY, COUPLED, REJECTION };
// Bits of SampleParams::wide: which integers have 64 bits.
constexpr uint32 WIDE_DRAFT = 1, WIDE_NEXT = 2, WIDE_BEGIN = 4, WIDE_STOP = 8;
// Values of finish: VWD_FINISH_*.
constexpr uint32 GOES_ON = 0, STOPPED = 1, FULL = 2;

struct SampleParams {
    SamplingParams sampling;   // target [B, γ+1, V], or [N, V] with a first dimension of stride 0; draft_rows [B, γ, Vd]
    View<2> draft;             // [B, γ]
    View<2> stop;              // [B, S]
    View<2> committed;         // [B, γ+1]
    View<2> logprobs;          // [B, γ+1]
    View<1> target_begin, draft_lens, ignore_stop, remaining, min_remaining;
    View<1> next_token, accepted, committed_len, finish, status;
    int64 target_rows;         // N
    uint32 gamma, stops;
    uint32 rule, wide, is_flat;
    uint32 skips_rows;         // that lie past the end of a walk, where rows are decided by CTAs and have filters; not by REJECTION
};
#include "sample/layout.cuh"
