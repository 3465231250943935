// Codes of INT4 and their products with queries on tensor cores.
#pragma once

#include "common/types.cuh"

// sum += a·b: 16 blocks or tokens by 16 channels, these by 8 heads.
__device__ inline void multiply_add(float (&sum)[4], const uint32 (&a)[4], const uint2 &b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
// 16 + code of the n-th and the (n + 4)-th of eight codes, in bfloat16.
__device__ inline uint32 widen_codes(uint32 codes, uint32 n) {
    const uint32 at_bit_3 = n == 0 ? codes << 3 : codes >> 4 * n - 3;
    uint32 widened;  // at_bit_3 & … | …: one instruction
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(widened) : "r"(at_bit_3), "r"(0x00780078), "r"(0x41804180));
    return widened;
}
