// Eight neighbouring channels of a row, as they lie in memory and as float32. D is a multiple of 8, so no row has a tail.
#pragma once

#include "common/types.cuh"

// Types of elements, as the parameters of kernels name them.
enum ElementType : uint32 { FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000); }

__device__ inline float widen_float16(uint32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(uint16(bits)));
    return x;
}
__device__ inline float widen_bfloat16(uint32 bits) { return __uint_as_float(bits << 16); }
// e5m2 is the upper half of a float16. e4m3fn has the form of a float16 with four bits of exponent, of bias 7 instead of 15: a product by 2^8,
// exact for subnormals too.
__device__ inline float widen_float8(uint32 bits, bool is_e4m3) {
    const float x = widen_float16(is_e4m3 ? (bits & 0x80) << 8 | (bits & 0x7f) << 7 : bits << 8) * (is_e4m3 ? 256.0f : 1.0f);
    return is_e4m3 && (bits & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000) : x;
}

__device__ inline uint16 narrow_float16(float x) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ inline uint16 narrow_bfloat16(float x) {
    uint16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// One element of any type.
__device__ inline float load_element(const char *p, uint32 type) {
    switch (type) {
        case FLOAT32: return as<float>(p);
        case FLOAT16: return widen_float16(as<uint16>(p));
        case BFLOAT16: return widen_bfloat16(as<uint16>(p));
        default: return widen_float8(as<uint8>(p), type == FLOAT8_E4M3);
    }
}
// One of a query, which has 16 bits or more.
__device__ inline float load_query(const char *p, uint32 type) {
    if (type == FLOAT32) return as<float>(p);
    const uint32 bits = as<uint16>(p);
    return type == FLOAT16 ? widen_float16(bits) : widen_bfloat16(bits);
}
template <uint32 COUNT> __device__ inline void widen_queries(const uint32 (&bits)[COUNT], uint32 type, float (&x)[COUNT]) {
#pragma unroll
    for (uint32 n = 0; n < COUNT; n++) x[n] = type == FLOAT16 ? widen_float16(bits[n]) : type == BFLOAT16 ? widen_bfloat16(bits[n]) : __uint_as_float(bits[n]);
}
// COUNT of them, `stride` bytes apart, on their way together; 0 from the count-th on.
template <uint32 COUNT> __device__ inline void load_query_bits(const char *p, int64 stride, uint32 count, uint32 type, uint32 (&bits)[COUNT]) {
    if (type == FLOAT32) {
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) bits[n] = n < count ? as<uint32>(p + n * stride) : 0;
    } else {
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) bits[n] = n < count ? as<uint16>(p + n * stride) : 0;
    }
}
template <uint32 COUNT> __device__ inline void load_queries(const char *p, int64 stride, uint32 count, uint32 type, float (&x)[COUNT]) {
    uint32 bits[COUNT];
    load_query_bits(p, stride, count, type, bits);
    widen_queries(bits, type, x);
}
// Of each place that is read; 0 of another.
template <uint32 COUNT> __device__ inline void load_queries(const char *const (&p)[COUNT], const bool (&reads)[COUNT], uint32 type, float (&x)[COUNT]) {
    uint32 bits[COUNT];
    if (type == FLOAT32) {
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) bits[n] = reads[n] ? as<uint32>(p[n]) : 0;
    } else {
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) bits[n] = reads[n] ? as<uint16>(p[n]) : 0;
    }
    widen_queries(bits, type, x);
}
// Rounds to nearest, ties to even; not to 8 bits.
__device__ inline void store_element(char *p, uint32 type, float x) {
    if (type == FLOAT32)
        as<float>(p) = x;
    else
        as<uint16>(p) = type == FLOAT16 ? narrow_float16(x) : narrow_bfloat16(x);
}

// Eight neighbouring channels, `step` bytes apart.
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

// An element of BYTES, and nothing that follows is waited for first.
template <uint32 BYTES> __device__ inline uint32 ask_bits(const char *p) {
    uint32 bits;
    if constexpr (BYTES == 1) {
        asm volatile("ld.global.u8 %0, [%1];" : "=r"(bits) : "l"(p) : "memory");
    } else if constexpr (BYTES == 2) {
        asm volatile("ld.global.u16 %0, [%1];" : "=r"(bits) : "l"(p) : "memory");
    } else {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(p) : "memory");
    }
    return bits;
}

// Eight elements of BYTES each; which type of that width is known where they are widened.
template <uint32 BYTES> struct Eight {
    static constexpr uint32 WORDS = BYTES * 2;
    uint32 word[WORDS];

    __device__ void clear() {
#pragma unroll
        for (uint32 i = 0; i < WORDS; i++) word[i] = 0;
    }
    // They lie side by side; aligned to their size, or to 16 bytes. Not by __ldg: a dependent kernel starts before what it reads is written.
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
    // As load, and nothing that follows is waited for first.
    __device__ void ask(const char *p) {
        if constexpr (BYTES == 1) {
            asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(p) : "memory");
        } else {
#pragma unroll
            for (uint32 i = 0; i < WORDS; i += 4)
                asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(word[i]), "=r"(word[i + 1]), "=r"(word[i + 2]), "=r"(word[i + 3]) : "l"(p + 4 * i) : "memory");
        }
    }
    // They lie `stride` bytes apart.
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
