// Tiles of blocks in shared memory, and integer products of INT4 codes with queries on the tensor cores.
#pragma once

#include "common/copies.cuh"

constexpr uint32 BLOCKS = 16;  // blocks of a tile

// Loads from shared memory take addresses of 32 bits.
__device__ inline uint32 load_word(uint32 at) {
    uint32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ inline uint2 load_two(uint32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory");
    return x;
}
// Loads four matrices of 8 rows of 16 bytes; 8 lanes give the addresses of each. Lane l gets word l % 4 of row l / 4 of each matrix.
__device__ inline void load_rows(uint32 at, uint32 (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
// sum += a·b: 16 blocks by 32 channels times 32 channels by 8 columns.
__device__ inline void multiply_add(int32 (&sum)[4], const uint32 (&a)[4], const uint2 &b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
__device__ inline float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
