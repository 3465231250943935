// Coding of a block in INT4 whose rows have 64 or 128 channels of 16 bits: the bits of quantize/code.cuh, some ten times faster. Instructions bound it.
//
// The rows of the block are in shared memory. Half of the threads have its keys, the other half its values; two or four lanes have a row, each 32
// of its channels in registers, so that only the last butterflies cross lanes. The keys' threads first sum the channels of all keys, one or two a
// thread, while the values' threads go on.
//
//   keys     sums of channels ─ mean ─ row − mean, over weights ─ butterflies ─ largest ─ codes
//   values   row ─ butterflies ─ largest ─ codes
#pragma once

#include "common/copies.cuh"
#include "quantize/code.cuh"

constexpr uint32 CODE_THREADS = 128, PART_THREADS = CODE_THREADS / 2;  // all, those of the keys or of the values
constexpr uint32 SPAN = 32, SPAN_PITCH = SPAN * 2 + 16;                // a lane's channels, and how far apart they lie in shared memory

// How rows of DIM channels lie. Spans are 16 bytes further apart than they are long, so that eight lanes, which load 16 bytes each, meet every
// bank.
template <uint32 DIM> struct Rows {
    static constexpr uint32 LANES = DIM / SPAN, PITCH = LANES * SPAN_PITCH;
    static constexpr uint32 AT_ONCE = PART_THREADS / LANES;
    static constexpr uint32 PIECES = DIM * 2 / 16, OF_SPAN = SPAN * 2 / 16;  // copies of 16 bytes that bring a row, and a span of it

    // Where a copy puts a piece of row t of a part.
    __device__ static uint32 place(uint32 part, uint32 t, uint32 tokens, uint32 piece) {
        return (part * tokens + t) * PITCH + piece / OF_SPAN * SPAN_PITCH + piece % OF_SPAN * 16;
    }
};

// What the keys of a KV head have in common, by spans; a gap keeps these in different banks.
template <uint32 DIM> struct KeyChannels {
    float mean[DIM / SPAN][SPAN + 4], weight[DIM / SPAN][SPAN + 4];
};

// The larger one, or NaN where one is NaN.
__device__ inline float largest(float a, float b) {
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

// Rotates row t, of which LANES neighbouring lanes have a span each, and stores its codes and scale.
template <uint32 LANES, class Place> __device__ inline void code_spans(float (&x)[SPAN], float factor, uint32 t, Place place) {
    const uint32 span = threadIdx.x % LANES;
#pragma unroll
    for (uint32 distance = 1; distance < SPAN; distance *= 2) {
#pragma unroll
        for (uint32 pair = 0; pair < SPAN / 2; pair++) {
            const uint32 low = (pair & ~(distance - 1)) * 2 + (pair & (distance - 1)), high = low + distance;
            const float a = x[low], b = x[high];
            x[low] = __fadd_rn(a, b);
            x[high] = __fsub_rn(a, b);
        }
    }
#pragma unroll
    for (uint32 distance = 1; distance < LANES; distance *= 2) {
        const float sign = span & distance ? -1.0f : 1.0f;
#pragma unroll
        for (uint32 c = 0; c < SPAN; c++) x[c] = __fmaf_rn(x[c], sign, __shfl_xor_sync(FULL_WARP, x[c], distance));
    }
    float most = 0.0f;
#pragma unroll
    for (uint32 c = 0; c < SPAN; c++) {
        x[c] = __fmul_rn(x[c], factor);
        most = largest(most, fabsf(x[c]));
    }
#pragma unroll
    for (uint32 distance = 1; distance < LANES; distance *= 2) most = largest(most, __shfl_xor_sync(FULL_WARP, most, distance));
    const uint8 bits = most <= 3.402823466e38f ? scale_of(most) : SCALE_NAN;
    const float scale = widen_float8(bits, true);
    if (bits < 8 || bits == 0x7e) {
        // A scale this small or large may be less than the largest number over 8.
#pragma unroll
        for (uint32 c = 0; c < SPAN; c++) x[c] = fminf(fmaxf(x[c], -8.0f * scale), 7.5f * scale);
    }
    // The reciprocal of the scale, rounded towards 0, and what it lacks: with a scale of four significant bits the floor of a product by both is that
    // of the rounded quotient (src/ops/quantize/cuda.rs tests it). Adding 2^23 + 2^22 and rounding down leaves the floor in the lowest bits.
    const float reciprocal = __frcp_rz(scale), rest = __fmul_rn(__fmaf_rn(-reciprocal, scale, 1.0f), reciprocal);
    uint32 words[SPAN / 8];
#pragma unroll
    for (uint32 n = 0; n < SPAN / 8; n++) {
#pragma unroll
        for (uint32 i = 0; i < 8; i++) {
            const float y = x[8 * n + i], q = __fmaf_rn(y, reciprocal, __fmul_rn(y, rest));
            words[n] = __funnelshift_r(words[n], __float_as_uint(__fadd_rd(q, 12582912.0f + 8.0f)), 4);
        }
        words[n] = bits == SCALE_NAN ? 0 : bits == 0 ? 0x88888888 : words[n];
    }
    char *codes, *scale_place;
    place(t, codes, scale_place);
    *reinterpret_cast<uint4 *>(codes + span * (SPAN / 2)) = {words[0], words[1], words[2], words[3]};
    if (span == 0) as<uint8>(scale_place) = bits;
}

// Loads a span of 16-bit numbers.
__device__ inline void load_span(const char *from, uint32 type, float (&x)[SPAN]) {
    uint32 pairs[SPAN / 2];
#pragma unroll
    for (uint32 n = 0; n < SPAN / 8; n++) {
        const uint4 piece = reinterpret_cast<const uint4 *>(from)[n];
        pairs[4 * n] = piece.x, pairs[4 * n + 1] = piece.y, pairs[4 * n + 2] = piece.z, pairs[4 * n + 3] = piece.w;
    }
    if (type == BFLOAT16) {
#pragma unroll
        for (uint32 c = 0; c < SPAN; c++) x[c] = __uint_as_float(c % 2 ? pairs[c / 2] & 0xffff0000 : pairs[c / 2] << 16);
    } else {
#pragma unroll
        for (uint32 c = 0; c < SPAN; c++) x[c] = widen_float16(c % 2 ? pairs[c / 2] >> 16 : pairs[c / 2] & 0xffff);
    }
}

// Codes a block of `tokens` rows of each part at `rows`. All threads of the CTA call it once rows and weights are there. store_mean(c, sum) gives
// the mean of channel c as it is stored; place(t, codes, scale) says where the codes
// of row t of the thread's part go, and its scale.
template <uint32 DIM, class StoreMean, class Place>
__device__ inline void code_rows(const char *rows, uint32 tokens, uint32 type, bool has_weights, float factor, KeyChannels<DIM> &channels, StoreMean store_mean,
                                 Place place) {
    using R = Rows<DIM>;
    const uint32 part = threadIdx.x / PART_THREADS, span = threadIdx.x % R::LANES;
    if (part == 0) {
        for (uint32 c = threadIdx.x; c < DIM; c += PART_THREADS) {
            const char *const channel = rows + c / SPAN * SPAN_PITCH + c % SPAN * 2;
            float sum = 0.0f;
#pragma unroll 16
            for (uint32 t = 0; t < tokens; t++) {
                const uint32 bits = as<uint16>(channel + t * R::PITCH);
                sum = __fadd_rn(sum, type == BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits));
            }
            channels.mean[c / SPAN][c % SPAN] = store_mean(c, sum);
        }
        asm volatile("bar.sync 1, %0;" ::"n"(PART_THREADS) : "memory");
    }
    for (uint32 t = threadIdx.x % PART_THREADS / R::LANES; t < tokens; t += R::AT_ONCE) {
        float x[SPAN];
        load_span(rows + (part * tokens + t) * R::PITCH + span * SPAN_PITCH, type, x);
        if (part == 0) {
#pragma unroll
            for (uint32 c = 0; c < SPAN; c++) x[c] = __fsub_rn(x[c], channels.mean[span][c]);
            if (has_weights) {
#pragma unroll
                for (uint32 c = 0; c < SPAN; c++) x[c] = __fdiv_rn(x[c], channels.weight[span][c]);
            }
        }
        code_spans<R::LANES>(x, factor, t, place);
    }
}
