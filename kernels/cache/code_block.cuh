// Coding of a whole block of a tail in INT4.
#pragma once

#include "cache/params.cuh"
#include "quantize/code.cuh"

constexpr uint32 THREADS = 128, WARPS = THREADS / WARP, MOST_CHANNELS = 256;

__device__ inline uint32 element_bytes(uint32 type) { return type == FLOAT32 ? 4 : 2; }

struct Shared {
    float mean[MOST_CHANNELS];
    float row[WARPS][MOST_CHANNELS];
};

// Codes a block from a run of a tail. All threads of a CTA call it.
__device__ inline void code_block(const Cache &cache, const Coding &coding, Shared &s, const float *weights, const char *from, char *to) {
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, bytes = element_bytes(coding.dtype), tokens = cache.size.value;
    for (uint32 c = threadIdx.x; c < coding.dim; c += THREADS) {
        float sum = 0.0f;
        for (uint32 t = 0; t < tokens; t++) sum = __fadd_rn(sum, load_query(from + cache.parts[0] + t * cache.token[0] + c * bytes, coding.dtype));
        char *const mean = to + coding.mean + c * bytes;
        store_number(mean, coding.dtype, __fdiv_rn(sum, float(tokens)));
        s.mean[c] = load_query(mean, coding.dtype);
    }
    __syncthreads();
    float *const row = s.row[warp];
    for (uint32 t = warp; t < tokens; t += WARPS) {
#pragma unroll 1
        for (uint32 part = 0; part < 2; part++) {
            const uint32 dim = part ? coding.value_dim : coding.dim;
            const char *const token = from + cache.parts[part] + t * cache.token[part];
            for (uint32 c = lane; c < dim; c += WARP) {
                const float x = load_query(token + c * bytes, coding.dtype);
                row[c] = part ? x : __fdiv_rn(__fsub_rn(x, s.mean[c]), weights[c]);
            }
            code_row(row, dim, part ? coding.value_factor : coding.factor, to + coding.parts[part] + t * (dim / 2), 1, to + coding.parts[part + 2] + t);
        }
    }
    __syncthreads();
}
