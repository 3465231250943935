// What both forms of decode128.cuh share: pairs of coded tiles, how codes become float16, queries that are turned.
#pragma once

#include "attention/decode128_rows16.cuh"
#include "attention/decode128_rows8.cuh"
#include "attention_int4/params.cuh"
#include "common/parameters.cuh"

// Two coded tiles in shared memory, which are attended to together.
struct CodedPair {
    static constexpr uint32 TOKENS = 2 * TILE, KEY_PITCH = 64, VALUE_PITCH = 80;  // of a token; values are read with other tokens side by side
    int32 position[TOKENS];                                                      // −1: no row sees the token
    // Of keys, then of values: a byte of a word, and by how many bits it is shifted.
    uint32 scale[2][WARP], scale_shift[2][WARP];
    int32 block[4];  // of each tile, whose mean is that of the block
    char mean[2][256], keys[TOKENS * KEY_PITCH], values[TOKENS * VALUE_PITCH];
};
static_assert(sizeof(CodedPair) == 5776);

// Bytes of an Int4Kept.
constexpr uint32 KEPT_BYTES = 576;

// Two codes c as float16, of eight: codes n and n + 4, or, where `codes` holds four codes of each of two tokens, code n of both. They stay where they
// lie in their byte, and are subnormal numbers, c · code_unit(n).
__device__ inline uint32 widen_codes(uint32 codes, uint32 n) { return (n / 2 ? codes >> 8 : codes) & (n % 2 ? 0x00f000f0 : 0x000f000f); }
__device__ constexpr float code_unit(uint32 n) { return n % 2 ? 0x1p-20f : 0x1p-24f; }
constexpr float CODE_OFFSET = 7.5f;
constexpr uint32 TWO_ONES = 0x3c003c00;  // of float16

// A row of codes is 64 bytes: what else is in its line of 128 is of another KV head, which reads it too where there are no lists.
__device__ inline void copy_codes(uint32 to, const char *from, bool whole_line) {
    if (whole_line) copy_16(to, from);
    else asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Queries that are weighted and turned, of a CTA: rows of words in the order in which lanes take them. Warps turn a row at a time.
struct TurnedQueries {
    static constexpr uint32 PITCH = 256 + 16;
    // Behind each row: what its products are multiplied by, and CODE_OFFSET · Σ of the row in their unit, code_unit(1).
    struct Row {
        float unit, offset;
    };
    __device__ static Row row_of(const char *turned, uint32 row) {
        Row x;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.unit), "=f"(x.offset) : "r"(shared_address(turned) + row * PITCH + 256) : "memory");
        return x;
    }

    // `from` has ROWS rows of 128 channels of 16 bits, from_pitch bytes apart; w has the weights of the lane's four channels.
    template <uint32 ROWS>
    __device__ static void turn(const Int4Params &p, const float (&w)[4], const char *from, uint32 from_pitch, char *to) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll 1
        for (uint32 row = warp; row < ROWS; row += WARPS) {
            const uint2 words = as<uint2>(from + row * from_pitch + lane * 8);
            const bool is_half = p.to.q_type == FLOAT16;
            float x[4];
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const uint32 word = n / 2 ? words.y : words.x, bits = n % 2 ? word >> 16 : word & 0xffff;
                x[n] = (is_half ? widen_float16(bits) : widen_bfloat16(bits)) * w[n];
            }
            turn_row(x, lane);
            float top = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
            for (uint32 step = 1; step < WARP; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
            const float unit = __uint_as_float(__float_as_uint(fmaxf(top, 0x1p-100f)) & 0x7f800000), inverse = 1.0f / unit;
            float sum = 0.0f;
            // Channels 8n … 8n + 7 of a quarter are four words, of codes i and i + 4. Those of even i make up for the smaller unit of their codes.
            char *const at = to + row * PITCH + lane / 8 * 64 + lane % 8 / 2 * 16 + lane % 2 * 2;
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const float ratio = code_unit(1) / code_unit(n);
                const uint16 bits = narrow_float16(x[n] * inverse * ratio);
                as<uint16>(at + n * 4) = bits;
                sum += widen_float16(bits) * (1.0f / ratio);
            }
#pragma unroll
            for (uint32 step = 1; step < WARP; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
            if (lane == 0) as<Row>(to + row * PITCH + 256) = {unit / code_unit(1), sum * (CODE_OFFSET * code_unit(1))};
        }
    }
    // Multiplies by H; a lane has channels 4·lane … 4·lane + 3.
    __device__ static void turn_row(float (&x)[4], uint32 lane) {
        const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
        x[0] = a + c, x[1] = b + d, x[2] = a - c, x[3] = b - d;
#pragma unroll
        for (uint32 step = 1; step < WARP; step *= 2) {
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const float other = __shfl_xor_sync(FULL_WARP, x[n], step);
                x[n] = lane & step ? other - x[n] : x[n] + other;
            }
        }
#pragma unroll
        for (uint32 n = 0; n < 4; n++) x[n] *= 0.08838834764831845f;  // 1 / √128
    }
};

// One warp's products and softmax over coded tiles; over others, what it derives from.

// The scale of a token, of whose word it is a byte.
__device__ inline float widen_e4m3(uint32 byte) {
    uint32 first, last;
    widen_fp8<false>(byte & 0xff, first, last);
    return widen_float16(first & 0xffff) * E4M3_UNIT;
}
constexpr float HADAMARD_128 = 0.08838834764831845f;  // 1 / √128
// Weights of values are multiplied by it, so that products of small ones are not lost in float16; the scale is at most 448.
constexpr float WEIGHT_UNIT = 64.0f;

template <uint32 COUNT>
__device__ inline void butterflies(float (&x)[COUNT], uint32 step) {
#pragma unroll
    for (uint32 n = 0; n < COUNT; n++) {
        if (n & step) continue;
        const float a = x[n], b = x[n + step];
        x[n] = a + b;
        x[n + step] = a - b;
    }
}
// A bit of x's index and a bit of the lane change places.
template <uint32 STEP, uint32 LANE, uint32 COUNT>
__device__ inline void exchange(float (&x)[COUNT], uint32 lane) {
    const bool is_upper = lane & LANE;
#pragma unroll
    for (uint32 n = 0; n < COUNT; n++) {
        if (n & STEP) continue;
        const float got = __shfl_xor_sync(FULL_WARP, is_upper ? x[n] : x[n + STEP], LANE);
        if (is_upper) x[n] = got;
        else x[n + STEP] = got;
    }
}
