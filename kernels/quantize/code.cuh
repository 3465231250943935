// How a row is coded in INT4: every float32 operation is rounded on its own, in the order of src/ops/quantize/block.rs.
#pragma once

#include "common/elements.cuh"

constexpr uint8 SCALE_NAN = 0x7f;

// Stores a mean. There is one NaN on every machine.
__device__ inline void store_number(char *to, uint32 type, float x) {
    if (x == x) return store_element(to, type, x);
    if (type == FLOAT32) as<uint32>(to) = 0x7fc00000;
    else as<uint16>(to) = type == FLOAT16 ? 0x7e00 : 0x7fc0;
}
// What is loaded where x was stored.
__device__ inline float round_number(float x, uint32 type) {
    return type == FLOAT32 ? x : type == FLOAT16 ? widen_float16(narrow_float16(x)) : widen_bfloat16(narrow_bfloat16(x));
}

// The e4m3 number nearest to x, finite and not below 0: ties to even, 448 at most.
__device__ inline uint8 nearest_e4m3(float x) {
    const uint32 bits = __float_as_uint(x);
    if (x < 0.015625f) {
        // Adding 2^23 rounds to a whole number of the 2^-9 that subnormals are apart.
        return uint8(__float_as_uint(__fadd_rn(__fmul_rn(x, 512.0f), 8388608.0f)) & 0xf);
    }
    const uint32 code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return uint8(min(code, 0x7eu));
}

__device__ inline uint8 scale_of(float most) {
    const uint8 scale = nearest_e4m3(__fdiv_rn(most, 7.5f));
    return scale == 0 && most > 0.0f ? 1 : scale;
}

__device__ inline uint32 code_of(float y, float scale, uint8 scale_bits) {
    if (scale_bits == SCALE_NAN) return 0;
    if (scale_bits == 0) return 8;
    // The floor of what is clamped to −8 … 8: conversions round towards 0.
    const float q = fminf(fmaxf(__fdiv_rn(y, scale), -8.0f), 8.0f);
    const uint32 whole = __float2uint_rz(fabsf(q));
    return q < 0.0f ? 8 - whole - (float(whole) < -q) : min(8 + whole, 15u);
}

// Butterflies of the warp's row of `dim` numbers; the factor is left.
__device__ inline void butterflies(float *row, uint32 dim) {
    const uint32 lane = threadIdx.x % WARP, n = dim & (~dim + 1);
    for (uint32 distance = 1; distance < n; distance *= 2) {
        __syncwarp();
        for (uint32 pair = lane; pair < dim / 2; pair += WARP) {
            const uint32 low = (pair & ~(distance - 1)) * 2 + (pair & (distance - 1)), high = low + distance;
            const float a = row[low], b = row[high];
            row[low] = __fadd_rn(a, b);
            row[high] = __fsub_rn(a, b);
        }
    }
    __syncwarp();
}

// Rotates the warp's row of `dim` numbers, and stores its codes and scale.
__device__ inline void code_row(float *row, uint32 dim, float factor, char *codes, int64 codes_step, char *scale_place) {
    const uint32 lane = threadIdx.x % WARP;
    butterflies(row, dim);
    // Bits of numbers of one sign ascend with them, and those that are not finite are the largest.
    uint32 most = 0;
    for (uint32 c = lane; c < dim; c += WARP) {
        row[c] = __fmul_rn(row[c], factor);
        most = max(most, __float_as_uint(row[c]) & 0x7fffffff);
    }
    for (uint32 step = WARP / 2; step > 0; step /= 2) most = max(most, __shfl_xor_sync(FULL_WARP, most, step));
    __syncwarp();
    const uint8 bits = most < 0x7f800000 ? scale_of(__uint_as_float(most)) : SCALE_NAN;
    const float scale = widen_float8(bits, true);
    for (uint32 c = lane; c < dim / 2; c += WARP)
        as<uint8>(codes + c * codes_step) = uint8(code_of(row[2 * c], scale, bits) | code_of(row[2 * c + 1], scale, bits) << 4);
    if (lane == 0) as<uint8>(scale_place) = bits;
    __syncwarp();
}
