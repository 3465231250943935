// Element types: their codes, their values as float32, and how one element is loaded and stored.
#pragma once

#include "common/types.cuh"

// Element types, by the codes that the parameters of kernels carry.
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

// Loads one element of any type.
__device__ inline float load_element(const char *p, uint32 type) {
    switch (type) {
        case FLOAT32: return as<float>(p);
        case FLOAT16: return widen_float16(as<uint16>(p));
        case BFLOAT16: return widen_bfloat16(as<uint16>(p));
        default: return widen_float8(as<uint8>(p), type == FLOAT8_E4M3);
    }
}
// Loads one element of a query, which has 16 or 32 bits.
__device__ inline float load_query(const char *p, uint32 type) {
    if (type == FLOAT32) return as<float>(p);
    const uint32 bits = as<uint16>(p);
    return type == FLOAT16 ? widen_float16(bits) : widen_bfloat16(bits);
}
template <uint32 COUNT> __device__ inline void widen_queries(const uint32 (&bits)[COUNT], uint32 type, float (&x)[COUNT]) {
#pragma unroll
    for (uint32 n = 0; n < COUNT; n++) x[n] = type == FLOAT16 ? widen_float16(bits[n]) : type == BFLOAT16 ? widen_bfloat16(bits[n]) : __uint_as_float(bits[n]);
}
// Loads COUNT elements of a query, `stride` bytes apart, all in flight together. Elements from `count` on are 0.
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
// Loads the elements at p[n] where reads[n] is true; the others are 0.
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
// Rounds to nearest, ties to even. There is no form for 8 bits.
__device__ inline void store_element(char *p, uint32 type, float x) {
    if (type == FLOAT32)
        as<float>(p) = x;
    else
        as<uint16>(p) = type == FLOAT16 ? narrow_float16(x) : narrow_bfloat16(x);
}

// Loads an element of BYTES; the compiler moves no later wait before it.
template <uint32 BYTES> __device__ inline uint32 request_bits(const char *p) {
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
