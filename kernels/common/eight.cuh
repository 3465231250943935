// Eight neighbouring channels of a row, as they lie in memory and as float32. D is a multiple of 8, so no row has a tail.
#pragma once

#include "common/elements.cuh"

// Stores eight neighbouring channels, `step` bytes apart.
__device__ inline void store_eight(char *p, int64 step, uint32 type, const float (&x)[8]) {
    if (step != 2 || type == FLOAT32 || reinterpret_cast<uint64>(p) % 16) {
#pragma unroll
        for (uint32 i = 0; i < 8; i++) store_element(p + i * step, type, x[i]);
        return;
    }
    uint32 word[4];
#pragma unroll
    for (uint32 i = 0; i < 4; i++) {
        const float low = x[2 * i], high = x[2 * i + 1];
        word[i] = type == FLOAT16 ? narrow_float16(low) | narrow_float16(high) << 16 : narrow_bfloat16(low) | narrow_bfloat16(high) << 16;
    }
    as<uint4>(p) = make_uint4(word[0], word[1], word[2], word[3]);
}

// Eight elements of BYTES each. Which type of that width they have is said where they are widened.
template <uint32 BYTES> struct Eight {
    static constexpr uint32 WORDS = BYTES * 2;
    uint32 word[WORDS];

    __device__ void clear() {
#pragma unroll
        for (uint32 i = 0; i < WORDS; i++) word[i] = 0;
    }
    // Loads adjoining elements, aligned to their size or to 16 bytes. Does not use __ldg, as a dependent kernel starts before what it reads is
    // written.
    __device__ void load(const char *p) {
        if constexpr (BYTES == 1) {
            const uint2 x = as<uint2>(p);
            word[0] = x.x, word[1] = x.y;
        } else {
#pragma unroll
            for (uint32 i = 0; i < WORDS / 4; i++) {
                const uint4 x = reinterpret_cast<const uint4 *>(p)[i];
                word[4 * i] = x.x, word[4 * i + 1] = x.y, word[4 * i + 2] = x.z, word[4 * i + 3] = x.w;
            }
        }
    }
    // As load; the compiler moves no later wait before it.
    __device__ void request(const char *p) {
        if constexpr (BYTES == 1) {
            asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(p) : "memory");
        } else {
#pragma unroll
            for (uint32 i = 0; i < WORDS; i += 4)
                asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(word[i]), "=r"(word[i + 1]), "=r"(word[i + 2]), "=r"(word[i + 3]) : "l"(p + 4 * i) : "memory");
        }
    }
    // Loads elements that lie `stride` bytes apart.
    __device__ void gather(const char *p, int64 stride) {
        clear();
#pragma unroll
        for (uint32 c = 0; c < 8; c++) {
            const char *element = p + c * stride;
            uint32 bits;
            if constexpr (BYTES == 1)
                bits = as<uint8>(element);
            else if constexpr (BYTES == 2)
                bits = as<uint16>(element);
            else
                bits = as<uint32>(element);
            word[c * BYTES / 4] |= bits << c * BYTES % 4 * 8;
        }
    }
    __device__ void widen(float (&x)[8], uint32 type) const {
        if constexpr (BYTES == 4) {
#pragma unroll
            for (uint32 c = 0; c < 8; c++) x[c] = __uint_as_float(word[c]);
        } else if constexpr (BYTES == 2) {
            if (type == BFLOAT16) {
#pragma unroll
                for (uint32 c = 0; c < 8; c++) x[c] = __uint_as_float(c % 2 ? word[c / 2] & 0xffff0000u : word[c / 2] << 16);
            } else {
#pragma unroll
                for (uint32 c = 0; c < 8; c++) x[c] = widen_float16(word[c / 2] >> c % 2 * 16 & 0xffff);
            }
        } else {
#pragma unroll
            for (uint32 c = 0; c < 8; c++) x[c] = widen_float8(word[c / 4] >> c % 4 * 8 & 0xff, type == FLOAT8_E4M3);
        }
    }
};
