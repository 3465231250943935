// Holt's smoothing of one block's scores. Products and sums are rounded one by one, as on the CPU.
#pragma once

#include "common/topk.cuh"

__device__ inline bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7f800000); }

// ŝ of a block.
__device__ inline float forecast(float level, float trend, float gamma) {
    return is_finite(level) ? __fadd_rn(level, __fmul_rn(gamma, trend)) : minus_infinity();
}

// L' and T' of a block; keep is 1 − alpha, follow 1 − beta.
__device__ inline void smooth(float &level, float &trend, float score, float alpha, float keep, float beta, float follow) {
    const float next = __fadd_rn(__fmul_rn(alpha, score), __fmul_rn(keep, level));
    const float slope = __fadd_rn(__fmul_rn(beta, __fsub_rn(next, level)), __fmul_rn(follow, trend));
    const bool known = is_finite(level) && is_finite(trend) && is_finite(score);
    level = known ? next : score, trend = known ? slope : 0.0f;
}
