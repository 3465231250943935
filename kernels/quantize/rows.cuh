// Coding of a block in INT4 whose rows have 64 or 128 channels of 16 bits: the bits of quantize/code.cuh, some ten times faster. Instructions
// bound it.
//
// The rows of a part of the block, of its keys or of its values, are in shared memory. LANES neighbouring lanes have a row, each a span of its channels
// in registers, so that only the last butterflies cross lanes. Before that the keys' threads sum the channels of all keys, two a thread.
//
//   keys     sums of channels ─ mean ─ row − mean, over weights ─ butterflies ─ largest ─ codes
//   values   row ─ butterflies ─ largest ─ codes
#pragma once

#include "common/copies.cuh"
#include "quantize/code.cuh"

// How rows of CHANNELS channels lie, of which LANES lanes have a span each. Spans are 16 bytes further apart than they are long, so that eight lanes, which
// load 16 bytes each, meet every bank.
template <uint32 CHANNELS, uint32 LANES_OF_ROW> struct Rows {
    static constexpr uint32 DIM = CHANNELS, LANES = LANES_OF_ROW, SPAN = DIM / LANES, SPAN_PITCH = SPAN * 2 + 16, PITCH = LANES * SPAN_PITCH;
    static constexpr uint32 PIECES = DIM * 2 / 16, OF_SPAN = SPAN * 2 / 16;  // copies of 16 bytes that bring a row, and a span of it

    // Where a copy puts a piece of row t of a part.
    __device__ static uint32 place(uint32 t, uint32 piece) { return t * PITCH + piece / OF_SPAN * SPAN_PITCH + piece % OF_SPAN * 16; }
};

// What the keys of a KV head have in common, by spans; a gap keeps these in different banks.
template <class R> struct KeyChannels {
    float mean[R::LANES][R::SPAN + 4], weight[R::LANES][R::SPAN + 4], reciprocal[R::LANES][R::SPAN + 4];

    __device__ void set_weight(uint32 c, float w) {
        weight[c / R::SPAN][c % R::SPAN] = w;
        reciprocal[c / R::SPAN][c % R::SPAN] = __frcp_rn(w);
    }
};

// Weights, means and 16-bit keys are moderate if all that a quotient of a key less its mean by a weight goes through is a normal number or 0: if
// weights are from 2^-30 to 2^30, and means and keys from 2^-63 to 2^65, or 0.
__device__ inline bool is_moderate_weight(float w) { return w >= 9.31322575e-10f && w <= 1073741824.0f; }
__device__ inline bool is_moderate(float x) { return x == 0.0f || (fabsf(x) >= 1.08420217e-19f && fabsf(x) < 3.68934881e19f); }

// The quotient of moderate numbers, rounded to nearest; the divisor's reciprocal is rounded to nearest, too.
__device__ inline float divide_moderate(float x, float by, float reciprocal) {
    float q = __fmul_rn(x, reciprocal);
    q = __fmaf_rn(__fmaf_rn(-q, by, x), reciprocal, q);
    return __fmaf_rn(__fmaf_rn(-q, by, x), reciprocal, q);
}

// The larger one, or NaN where one is NaN.
__device__ inline float largest(float a, float b) {
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

// Butterflies of SPAN numbers, from the first that is given, at the distances from BEGIN and below END.
template <uint32 SPAN, uint32 BEGIN, uint32 END> __device__ inline void turn_span(float *x) {
#pragma unroll
    for (uint32 distance = BEGIN; distance < END; distance *= 2) {
#pragma unroll
        for (uint32 pair = 0; pair < SPAN / 2; pair++) {
            const uint32 low = (pair & ~(distance - 1)) * 2 + (pair & (distance - 1)), high = low + distance;
            const float a = x[low], b = x[high];
            x[low] = __fadd_rn(a, b);
            x[high] = __fsub_rn(a, b);
        }
    }
}

// How a row is coded: its scale, and its reciprocal in two parts.
struct RowScale {
    uint8 bits;
    float scale, reciprocal, rest;

    // `most` is the row's largest number, without the factor.
    __device__ RowScale(float most, float factor) {
        most = __fmul_rn(most, factor);
        bits = most <= 3.402823466e38f ? scale_of(most) : SCALE_NAN;
        scale = widen_float8(bits, true);
        // The reciprocal of the scale, rounded towards 0, and what it lacks: with a scale of four significant bits the floor of a product by both is
        // that of the rounded quotient (src/ops/quantize/cuda.rs tests it). Where the scale is 0, so are all numbers.
        reciprocal = bits == 0 ? 0.0f : __frcp_rz(scale);
        rest = __fmul_rn(__fmaf_rn(-reciprocal, scale, 1.0f), reciprocal);
    }

    // Codes 32 numbers of the row.
    __device__ void code(float (&y)[32], char *codes) const {
        if (bits < 8 || bits == 0x7e) {
            // A scale this small or large may be less than the largest number over 8.
#pragma unroll
            for (uint32 c = 0; c < 32; c++) y[c] = fminf(fmaxf(y[c], -8.0f * scale), 7.5f * scale);
        }
        uint32 words[4];
#pragma unroll
        for (uint32 n = 0; n < 4; n++) {
            // Floors are added to 2^23 + 2^22, rounded down; four of them, one 16 times the other, are the lowest bits of a sum.
            uint32 halves[2];
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                constexpr float ZERO = 12582912.0f;
                float sum = ZERO;
#pragma unroll
                for (uint32 i = 4; i-- > 0;) {
                    const float z = y[8 * n + 4 * half + i], q = __fmaf_rn(z, reciprocal, __fmul_rn(z, rest));
                    if (i < 3) sum = __fmaf_rn(sum, 16.0f, -15.0f * ZERO);
                    sum = __fadd_rd(q, sum);
                }
                halves[half] = __float_as_uint(sum) + 0x8888;
            }
            words[n] = bits == SCALE_NAN ? 0 : __byte_perm(halves[0], halves[1], 0x5410);
        }
        *reinterpret_cast<uint4 *>(codes) = {words[0], words[1], words[2], words[3]};
    }
};

// Rotates a row, of which LANES neighbouring lanes have a span each, and stores its codes and scale; place(codes, scale) says where. Eight
// neighbours each are turned.
template <uint32 LANES, uint32 SPAN, class Place> __device__ inline void code_spans(float (&x)[SPAN], float factor, Place place) {
    const uint32 span = threadIdx.x % LANES;
    turn_span<SPAN, 8, SPAN>(x);
#pragma unroll
    for (uint32 distance = 1; distance < LANES; distance *= 2) {
        const float sign = span & distance ? -1.0f : 1.0f;
#pragma unroll
        for (uint32 c = 0; c < SPAN; c++) x[c] = __fmaf_rn(x[c], sign, __shfl_xor_sync(FULL_WARP, x[c], distance));
    }
    float most = 0.0f;
#pragma unroll
    for (uint32 c = 0; c < SPAN; c++) most = largest(most, fabsf(x[c]));
#pragma unroll
    for (uint32 distance = 1; distance < LANES; distance *= 2) most = largest(most, __shfl_xor_sync(FULL_WARP, most, distance));
    const RowScale row(most, factor);
    char *codes, *scale_place;
    place(codes, scale_place);
    if (span == 0) as<uint8>(scale_place) = row.bits;
#pragma unroll
    for (uint32 c = 0; c < SPAN; c += 32) {
        float y[32];
#pragma unroll
        for (uint32 n = 0; n < 32; n++) y[n] = __fmul_rn(x[c + n], factor);
        row.code(y, codes + (span * SPAN + c) / 2);
    }
}

// Loads a span of 16-bit numbers, less their means and over their weights, if keys have such, and turns eight neighbours each.
template <ElementType TYPE, bool IS_KEY, bool HAS_WEIGHTS, uint32 SPAN>
__device__ inline void load_span(const char *from, const float *means, const float *weights, const float *reciprocals, float (&x)[SPAN]) {
#pragma unroll
    for (uint32 n = 0; n < SPAN; n += 8) {
        const uint4 piece = *reinterpret_cast<const uint4 *>(from + n * 2);
        const uint32 pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (uint32 c = 0; c < 8; c++) {
            const uint32 pair = pairs[c / 2];
            if (TYPE == BFLOAT16) x[n + c] = __uint_as_float(c % 2 ? pair & 0xffff0000 : pair << 16);
            else x[n + c] = widen_float16(c % 2 ? pair >> 16 : pair & 0xffff);
            if (IS_KEY) x[n + c] = __fsub_rn(x[n + c], means[n + c]);
            if (HAS_WEIGHTS) x[n + c] = divide_moderate(x[n + c], weights[n + c], reciprocals[n + c]);
        }
        turn_span<8, 1, 8>(x + n);
    }
}

// Sums the channels of all `tokens` keys at `rows`, in their order; thread is one of `threads`. store_mean(c, sum) gives the mean of channel c as it is
// stored. Whether what this thread saw is moderate, where weights divide it. Barriers are left to the caller.
template <class R, class StoreMean>
__device__ inline bool find_means(const char *rows, uint32 tokens, uint32 type, bool has_weights, uint32 thread, uint32 threads, KeyChannels<R> &channels,
                                  StoreMean store_mean) {
    bool all_moderate = true;
#pragma unroll 1
    for (uint32 c = thread * 2; c < R::DIM; c += threads * 2) {
        const char *const keys = rows + c / R::SPAN * R::SPAN_PITCH + c % R::SPAN * 2, *pair = keys;
        float low = 0.0f, high = 0.0f;
        const auto add = [&](float first, float second) {
            low = __fadd_rn(low, first);
            high = __fadd_rn(high, second);
        };
        uint32 seen = 0;
#pragma unroll 1
        for (uint32 t = 0; t < tokens; t += 16, pair += 16 * R::PITCH) {
            uint32 bits[16];
#pragma unroll
            for (uint32 n = 0; n < 16; n++) bits[n] = as<uint32>(pair + n * R::PITCH);
            if (type == BFLOAT16) {
#pragma unroll
                for (uint32 n = 0; n < 16; n++) {
                    add(__uint_as_float(bits[n] << 16), __uint_as_float(bits[n] & 0xffff0000));
                    // Numbers of either sign that are moderate and not 0 leave the second highest bit of their half 0.
                    seen |= bits[n] - 0x20002000;
                }
            } else {
#pragma unroll
                for (uint32 n = 0; n < 16; n++) add(widen_float16(bits[n] & 0xffff), widen_float16(bits[n] >> 16));
            }
        }
        const float means[2] = {store_mean(c, low), store_mean(c + 1, high)};
        channels.mean[c / R::SPAN][c % R::SPAN] = means[0];
        channels.mean[c / R::SPAN][c % R::SPAN + 1] = means[1];
        if (!has_weights) continue;
#pragma unroll
        for (uint32 n = 0; n < 2; n++) all_moderate &= is_moderate(means[n]) && is_moderate_weight(channels.weight[c / R::SPAN][c % R::SPAN + n]);
        if (seen & 0x40004000) {
#pragma unroll 1
            for (uint32 t = 0; t < tokens; t++) {
                const uint32 bits = as<uint32>(keys + t * R::PITCH);
                all_moderate &= is_moderate(widen_bfloat16(bits & 0xffff)) && is_moderate(widen_bfloat16(bits >> 16));
            }
        }
    }
    return all_moderate;
}

// Codes the row at `row`, of which this lane has the span that is given; place(codes, scale) says where its codes go, and its scale. Keys need their means.
template <class R, class Place>
__device__ inline void code_row(const char *row, uint32 span, uint32 type, bool is_key, bool has_weights, float factor, const KeyChannels<R> &channels,
                                Place place) {
    float x[R::SPAN];
    row += span * R::SPAN_PITCH;
    const float *const mean = channels.mean[span], *const weight = channels.weight[span], *const reciprocal = channels.reciprocal[span];
    if (type == BFLOAT16) {
        if (!is_key) load_span<BFLOAT16, false, false>(row, mean, weight, reciprocal, x);
        else if (!has_weights) load_span<BFLOAT16, true, false>(row, mean, weight, reciprocal, x);
        else load_span<BFLOAT16, true, true>(row, mean, weight, reciprocal, x);
    } else {
        if (!is_key) load_span<FLOAT16, false, false>(row, mean, weight, reciprocal, x);
        else if (!has_weights) load_span<FLOAT16, true, false>(row, mean, weight, reciprocal, x);
        else load_span<FLOAT16, true, true>(row, mean, weight, reciprocal, x);
    }
    code_spans<R::LANES>(x, factor, place);
}

// Codes all keys of a block, one after the other, where weights divide numbers that are not moderate. A warp calls it; reciprocals are room for it in
// between. place(t, codes, scale) says where the codes of row t go, and its scale.
template <class R, class Place>
__device__ inline void code_extreme_keys(const char *rows, uint32 tokens, uint32 type, float factor, KeyChannels<R> &channels, Place place) {
    const uint32 lane = threadIdx.x % WARP;
    float *const x = channels.reciprocal[0];
    static_assert(sizeof channels.reciprocal >= R::DIM * sizeof(float));
#pragma unroll 1
    for (uint32 t = 0; t < tokens; t++) {
#pragma unroll 1
        for (uint32 c = lane; c < R::DIM; c += WARP) {
            const float key = load_query(rows + t * R::PITCH + c / R::SPAN * R::SPAN_PITCH + c % R::SPAN * 2, type);
            x[c] = __fdiv_rn(__fsub_rn(key, channels.mean[c / R::SPAN][c % R::SPAN]), channels.weight[c / R::SPAN][c % R::SPAN]);
        }
        char *codes, *scale;
        place(t, codes, scale);
        code_row(x, R::DIM, factor, codes, 1, scale);
    }
#pragma unroll 1
    for (uint32 c = lane; c < R::DIM; c += WARP) channels.set_weight(c, channels.weight[c / R::SPAN][c % R::SPAN]);
}
