// Decodes a run of codes to keys and values as they lie in a tail: key = w·(H·y) + mean, value = H·y, y = s·(c − 7.5), rounded to their type. The
// bits are those of src/ops/quantize/block.rs, where every float32 operation is rounded on its own.
//
// A lane has 16 channels of a token, which are 8 bytes of codes. Codes become whole numbers 2c − 15 of float16, which butterflies add two at a time: in
// the lane, then with the lanes beside it. All sums are whole numbers of at most 15·n, n ≤ 256, those past 2048 even, so float16 has them, and
// their order does not matter. Half the scale has 4 bits, so that a sum's product with it is exact in float32: it is the sum of products that the host
// takes.
#pragma once

#include "cache/params.cuh"
#include "common/eight.cuh"

// Two numbers of float16 at a time.
__device__ inline uint32 add_halves(uint32 a, uint32 b) {
    uint32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}
__device__ inline uint32 subtract_halves(uint32 a, uint32 b) {
    uint32 difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

// Sums of codes in the order of channels: word 4·i + k has channels 8·i + k and 8·i + k + 4, of which the last sum and difference are left to do.
// All lanes of a warp call it; n / 16 lanes that follow each other have a row's channels that are rotated together.
__device__ inline void add_codes(uint2 codes, uint32 n, uint32 (&sums)[8]) {
    constexpr uint32 EXPONENT = 0x64006400, MIDDLE = 0x640f640f, SIGNS = 0x80008000;  // of 1024 + 2c, 1024 + 15
#pragma unroll
    for (uint32 i = 0; i < 8; i++) {
        const uint32 word = i / 4 ? codes.y : codes.x, k = i % 4, doubled = k ? word >> (4 * k - 1) : word << 1;
        sums[i] = subtract_halves((doubled & 0x001e001e) | EXPONENT, MIDDLE);
    }
#pragma unroll
    for (uint32 step = 1; step < 8; step *= 2) {
#pragma unroll
        for (uint32 i = 0; i < 8; i++) {
            if (i & step) continue;
            const uint32 a = sums[i], b = sums[i + step];
            sums[i] = add_halves(a, b), sums[i + step] = subtract_halves(a, b);
        }
    }
#pragma unroll 1
    for (uint32 step = 1; step < n / 16; step *= 2) {
        const uint32 turned = threadIdx.x & step ? SIGNS : 0;
#pragma unroll
        for (uint32 i = 0; i < 8; i++) sums[i] = add_halves(__shfl_xor_sync(FULL_WARP, sums[i], step), sums[i] ^ turned);
    }
}

// Stores eight channels of a type that has no fewer than 16 bits, where 16 bytes are aligned.
__device__ inline void store_channels(char *to, uint32 type, const float (&x)[8]) {
    if (type == FLOAT32) {
        as<float4>(to) = make_float4(x[0], x[1], x[2], x[3]), as<float4>(to + 16) = make_float4(x[4], x[5], x[6], x[7]);
        return;
    }
    uint32 word[4];
#pragma unroll
    for (uint32 i = 0; i < 4; i++) {
        if (type == FLOAT16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
        else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    }
    as<uint4>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}

// The CTA's THREADS threads call it. `codes` and `to` are runs, aligned to 16 bytes; `weights` are those of the KV head.
template <uint32 THREADS>
__device__ inline void decode_run(const Cache &cache, const Coding &coding, const float *weights, const char *codes, char *to) {
    const uint32 lane = threadIdx.x % WARP, type = coding.dtype, bytes = type == FLOAT32 ? 4 : 2;
#pragma unroll 1
    for (uint32 part = 0; part < 2; part++) {
        const uint32 dim = part ? coding.value_dim : coding.dim, chunks = dim / 16, items = cache.size.value * chunks;
        const uint32 reciprocal = (1u << 16) / chunks + 1;  // items are at most 2048, chunks 16
        const float factor = part ? coding.value_factor : coding.factor;
        const char *const from = codes + coding.parts[part];
        char *const rows = to + cache.parts[part];
#pragma unroll 1
        for (uint32 first = threadIdx.x - lane; first < items; first += THREADS) {
            const uint32 item = min(first + lane, items - 1), t = item * reciprocal >> 16, chunk = item - t * chunks;
            uint32 sums[8];
            add_codes(as<uint2>(from + item * 8), dim & (~dim + 1), sums);
            if (first + lane >= items) continue;
            const uint8 scale = as<uint8>(codes + coding.parts[part + 2] + t);
            const bool is_nan = (scale & 0x7f) == 0x7f;
            const float half = widen_float8(scale, true) * 0.5f;
            // Eight channels at a time, which takes fewer registers.
#pragma unroll 1
            for (uint32 i = 0; i < 2; i++) {
                const uint32 begin = chunk * 16 + i * 8;
                float x[8];
#pragma unroll
                for (uint32 k = 0; k < 4; k++) {
                    const float a = widen_float16(sums[k] & 0xffff), b = widen_float16(sums[k] >> 16);
                    x[k] = __fmul_rn(__fmul_rn(__fadd_rn(a, b), half), factor), x[k + 4] = __fmul_rn(__fmul_rn(__fsub_rn(a, b), half), factor);
                    sums[k] = sums[k + 4];
                }
                if (part == 0) {
                    float mean[8];
                    const char *const at = codes + coding.mean + begin * bytes;
                    if (type == FLOAT32) {
                        Eight<4> words;
                        words.load(at), words.widen(mean, type);
                    } else {
                        Eight<2> words;
                        words.load(at), words.widen(mean, type);
                    }
                    const float4 low = *reinterpret_cast<const float4 *>(weights + begin), high = *reinterpret_cast<const float4 *>(weights + begin + 4);
                    const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                    for (uint32 k = 0; k < 8; k++) x[k] = __fadd_rn(__fmul_rn(x[k], w[k]), mean[k]);
                }
                char *const place = rows + (item * 16 + i * 8) * bytes;
                store_channels(place, type, x);
                // There is one NaN on every machine. Only a scale makes any: what is finite has a finite mean.
                if (!is_nan) continue;
                const uint32 word = type == FLOAT32 ? 0x7fc00000 : type == FLOAT16 ? 0x7e007e00 : 0x7fc07fc0;
                as<uint4>(place) = make_uint4(word, word, word, word);
                if (type == FLOAT32) as<uint4>(place + 16) = make_uint4(word, word, word, word);
            }
        }
    }
}
