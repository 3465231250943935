// What both forms of decode128.cuh share: pairs of coded tiles, how codes become float16, queries that are turned.
#pragma once

#include "attention/decode128_rows16.cuh"
#include "attention/decode128_rows8.cuh"
#include "attention_int4/params.cuh"
#include "common/parameters.cuh"

// Up to four coded tiles of one block, side by side in its page, in shared memory: they are attended to together. Each begins on a
// multiple of 128 bytes: copies to groups that began 16 bytes past one took longer.
struct alignas(128) CodedGroup {
    static constexpr uint32 TILES = 4, TOKENS = TILES * TILE, PITCH = 64;  // of a token
    int32 position[TOKENS];    // −1: no row sees the token
    uint32 scale[2][TOKENS];   // of keys, then of values: words that have the token's scale in a byte
    uint32 scale_bytes[WARP];  // of tokens n and n + 32: which bytes of the first and the second of two words they are, for __byte_perm
    char mean[256], keys[TOKENS * PITCH], values[TOKENS * PITCH];
    int32 block, unused[3];

    // Where 16 bytes of a token's values lie: eight tokens hit different banks.
    __device__ static uint32 value_at(uint32 token, uint32 chunk) { return token * PITCH + (chunk ^ token / 2 % 4) * 16; }
};
static_assert(sizeof(CodedGroup) == 9472);

// Bytes of an Int4Kept.
constexpr uint32 KEPT_BYTES = 576;

// Two codes c as float16, of eight: codes n and n + 4, or, where `codes` holds four codes of each of two tokens, code n of both. They stay where they
// lie in their byte, and are subnormal numbers, c · code_unit(n).
__device__ inline uint32 widen_codes(uint32 codes, uint32 n) { return (n / 2 ? codes >> 8 : codes) & (n % 2 ? 0x00f000f0 : 0x000f000f); }
__device__ constexpr float code_unit(uint32 n) { return n % 2 ? 0x1p-20f : 0x1p-24f; }
constexpr float CODE_OFFSET = 7.5f;
constexpr uint32 TWO_ONES = 0x3c003c00;  // of float16

// Queries that are weighted and turned, of a CTA: rows of words in the order in which lanes take them. Warps turn a row at a time.
struct TurnedQueries {
    static constexpr uint32 PITCH = 256 + 16;
    // Behind each row: a power of two that its products are multiplied by, CODE_OFFSET · Σ of the row in their unit, code_unit(1), and 1 / unit.
    struct Row {
        float unit, offset, inverse;
    };
    __device__ static Row row_of(const char *turned, uint32 row) {
        Row x;
        uint32 words[4];
        load_four_words(shared_address(turned) + row * PITCH + 256, words);
        x.unit = __uint_as_float(words[0]), x.offset = __uint_as_float(words[1]), x.inverse = __uint_as_float(words[2]);
        return x;
    }

    // `from` has ROWS rows of 128 channels of 16 bits, from_pitch bytes apart; w has the weights of the lane's four channels.
    template <uint32 ROWS>
    __device__ static void turn(const Int4Params &p, const float (&w)[4], const char *from, uint32 from_pitch, char *to) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll 1
        for (uint32 row = warp; row < ROWS; row += WARPS) {
            float x[4];
            read_and_turn(p, w, from + row * from_pitch, x);
            const float top = top_of(x);
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
            if (lane == 0) as<Row>(to + row * PITCH + 256) = {unit / code_unit(1), sum * (CODE_OFFSET * code_unit(1)), inverse * code_unit(1)};
        }
    }
    __device__ static void read_and_turn(const Int4Params &p, const float (&w)[4], const char *from, float (&x)[4]) {
        const uint32 lane = threadIdx.x % WARP;
        const uint2 words = as<uint2>(from + lane * 8);
        const bool is_half = p.to.q_type == FLOAT16;
#pragma unroll
        for (uint32 n = 0; n < 4; n++) {
            const uint32 word = n / 2 ? words.y : words.x, bits = n % 2 ? word >> 16 : word & 0xffff;
            x[n] = (is_half ? widen_float16(bits) : widen_bfloat16(bits)) * w[n];
        }
        turn_row(x, lane);
    }
    __device__ static float top_of(const float (&x)[4]) {
        float top = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
        for (uint32 step = 1; step < WARP; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
        return top;
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

// The scales of a token as float16: that of its key in the lower half, that of its value in the upper one.
__device__ inline uint32 scales_of_token(const CodedGroup &group, uint32 token) {
    uint32 both;
    const uint32 x = __byte_perm(group.scale[0][token], group.scale[1][token], group.scale_bytes[token % WARP]);
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t}" : "=r"(both) : "r"(x));
    return both;
}
constexpr float HADAMARD_128 = 0.08838834764831845f;  // 1 / √128
// Weights of values are multiplied by it, so that products of small ones are not lost in float16; the scale is at most 448.
constexpr float WEIGHT_UNIT = 64.0f;
// Multiplies the upper half of two float16 by WEIGHT_UNIT.
__device__ inline uint32 weight_unit_in(uint32 scales) {
    constexpr uint32 ONE_AND_UNIT = 0x54003c00;
    uint32 both;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(scales), "r"(ONE_AND_UNIT));
    return both;
}


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
