// Matrix products by a warpgroup, four warps that begin at a multiple of four (compute capability 9.0 alone): wgmma.
//
// Operands lie in shared memory in slabs of 128 bytes, which are 64 elements of 16 bits: row r of a slab at 128 · r, and of its eight runs
// of 16 bytes run n in place n ^ r % 8. Slabs begin on multiples of 1024.
#pragma once

#include "common/barrier.cuh"

constexpr uint32 SLAB_WIDTH = 128, SLAB_ELEMENTS = SLAB_WIDTH / 2;

// Where run `n` of a row lies in a slab.
__device__ inline uint32 place_in_slab(uint32 row, uint32 n) { return row * SLAB_WIDTH + (n ^ (row & 7)) * 16; }

// An operand. Its rows are those of the product (or, of the second, its columns), or with `slab_step` bytes from slab to slab what is
// summed over.
__device__ inline uint64 operand(uint32 address, uint32 slab_step = 0) {
    // In a cluster the upper bits of an address name the CTA; an operand is in this one, at the lower 18 bits.
    constexpr uint32 WITHIN_CTA = 0x3ffff;
    constexpr uint64 SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = uint64(8 * SLAB_WIDTH >> 4) << 32;
    return SWIZZLE_128 | EIGHT_ROWS | uint64(slab_step >> 4) << 16 | (address & WITHIN_CTA) >> 4;
}
// By 16 elements along a slab, and by 16 rows.
constexpr uint64 ALONG_SLAB = 32 >> 4, ALONG_ROWS = 16 * SLAB_WIDTH >> 4;

// A thread's part of a sum of 64 rows: of its rows lane / 4 and 8 more of its warp's 16, two neighbouring columns of each eight.
#define VWD_EIGHT(c, n) "+f"(c[n]), "+f"(c[n + 1]), "+f"(c[n + 2]), "+f"(c[n + 3]), "+f"(c[n + 4]), "+f"(c[n + 5]), "+f"(c[n + 6]), "+f"(c[n + 7])
#define VWD_32(c, n) VWD_EIGHT(c, n), VWD_EIGHT(c, n + 8), VWD_EIGHT(c, n + 16), VWD_EIGHT(c, n + 24)
#define VWD_16(c) VWD_EIGHT(c, 0), VWD_EIGHT(c, 8)
#define VWD_64(c) VWD_32(c, 0), VWD_32(c, 32)
#define VWD_128(c) VWD_64(c), VWD_32(c, 64), VWD_32(c, 96)

// Between other uses of sums and products that add to them; and back, when at most PENDING of the groups begun are not done.
__device__ inline void begin_products(float (&c)[4]) { asm volatile("wgmma.fence.sync.aligned;" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])::"memory"); }
__device__ inline void begin_products(float (&c)[16]) { asm volatile("wgmma.fence.sync.aligned;" : VWD_16(c)::"memory"); }
__device__ inline void begin_products(float (&c)[32]) { asm volatile("wgmma.fence.sync.aligned;" : VWD_32(c, 0)::"memory"); }
__device__ inline void begin_products(float (&c)[64]) { asm volatile("wgmma.fence.sync.aligned;" : VWD_64(c)::"memory"); }
__device__ inline void begin_products(float (&c)[128]) { asm volatile("wgmma.fence.sync.aligned;" : VWD_128(c)::"memory"); }
__device__ inline void begin_products(float (&c)[2][64]) { asm volatile("wgmma.fence.sync.aligned;" : VWD_64(c[0]), VWD_64(c[1])::"memory"); }
__device__ inline void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <uint32 PENDING> __device__ inline void wait_products(float (&c)[4]) {
    asm volatile("wgmma.wait_group.sync.aligned %4;" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "n"(PENDING) : "memory");
}
template <uint32 PENDING> __device__ inline void wait_products(float (&c)[16]) {
    asm volatile("wgmma.wait_group.sync.aligned %16;" : VWD_16(c) : "n"(PENDING) : "memory");
}
template <uint32 PENDING> __device__ inline void wait_products(float (&c)[32]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : VWD_32(c, 0) : "n"(PENDING) : "memory");
}
template <uint32 PENDING> __device__ inline void wait_products(float (&c)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned %64;" : VWD_64(c) : "n"(PENDING) : "memory");
}
template <uint32 PENDING> __device__ inline void wait_products(float (&c)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned %128;" : VWD_128(c) : "n"(PENDING) : "memory");
}
template <uint32 PENDING> __device__ inline void wait_products(float (&c)[2][64]) {
    asm volatile("wgmma.wait_group.sync.aligned %128;" : VWD_64(c[0]), VWD_64(c[1]) : "n"(PENDING) : "memory");
}

// c += a · b: 16 channels of 64 rows and of 8 rows.
#define VWD_MULTIPLY_8(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type " {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a), "l"(b) : "memory")

// c = a · b, or c += a · b: 16 channels of 64 rows and of 64 rows.
#define VWD_MULTIPLY_64(type) \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.u32 adds, %34, 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
                 "}, %32, %33, adds, 1, 1, 0, 0;\n\t}" : VWD_32(c, 0) : "l"(a), "l"(b), "r"(uint32(adds)) : "memory")

// The same of 64 rows and of 32 rows.
#define VWD_MULTIPLY_32(type) \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.u32 adds, %18, 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
                 "}, %16, %17, adds, 1, 1, 0, 0;\n\t}" : VWD_16(c) : "l"(a), "l"(b), "r"(uint32(adds)) : "memory")

// The same of 64 rows, whose 16 channels are in registers, and of 64 rows in shared memory. The registers have the form of the sums, with two
// channels packed in a word.
#define VWD_MULTIPLY_REGISTERS_64(type) \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.u32 adds, %37, 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
                 "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n\t}" \
                 : VWD_32(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(uint32(adds)) : "memory")

// c += a · b: 16 channels of 64 rows, and 16 rows of 128 elements.
#define VWD_MULTIPLY_128(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
                 "}, %64, %65, 1, 1, 1, 0, 1;" : VWD_64(c) : "l"(a), "l"(b) : "memory")

// The same, with the 16 elements of each of the 64 rows in registers: in the form of the sums, two columns packed in a word.
#define VWD_MULTIPLY_REGISTERS_128(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;" : VWD_64(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory")

// The same of 256 elements.
#define VWD_MULTIPLY_REGISTERS_256(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;" : VWD_128(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory")

// The same of 64 elements.
#define VWD_MULTIPLY_REGISTERS_ROWS_64(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;" : VWD_32(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory")

template <bool IS_BFLOAT16> __device__ inline void multiply(float (&c)[4], uint64 a, uint64 b) {
    if constexpr (IS_BFLOAT16) VWD_MULTIPLY_8("bf16");
    else VWD_MULTIPLY_8("f16");
}
template <bool IS_BFLOAT16> __device__ inline void multiply(float (&c)[16], uint64 a, uint64 b, bool adds) {
    if constexpr (IS_BFLOAT16) VWD_MULTIPLY_32("bf16");
    else VWD_MULTIPLY_32("f16");
}
template <bool IS_BFLOAT16> __device__ inline void multiply(float (&c)[32], uint64 a, uint64 b, bool adds) {
    if constexpr (IS_BFLOAT16) VWD_MULTIPLY_64("bf16");
    else VWD_MULTIPLY_64("f16");
}
template <bool IS_BFLOAT16> __device__ inline void multiply(float (&c)[32], const uint32 (&a)[4], uint64 b, bool adds) {
    if constexpr (IS_BFLOAT16) VWD_MULTIPLY_REGISTERS_64("bf16");
    else VWD_MULTIPLY_REGISTERS_64("f16");
}
template <bool IS_BFLOAT16> __device__ inline void multiply(float (&c)[32], const uint32 (&a)[4], uint64 b) {
    if constexpr (IS_BFLOAT16) VWD_MULTIPLY_REGISTERS_ROWS_64("bf16");
    else VWD_MULTIPLY_REGISTERS_ROWS_64("f16");
}
template <bool IS_BFLOAT16> __device__ inline void multiply(float (&c)[64], uint64 a, uint64 b) {
    if constexpr (IS_BFLOAT16) VWD_MULTIPLY_128("bf16");
    else VWD_MULTIPLY_128("f16");
}
template <bool IS_BFLOAT16> __device__ inline void multiply(float (&c)[128], const uint32 (&a)[4], uint64 b) {
    if constexpr (IS_BFLOAT16) VWD_MULTIPLY_REGISTERS_256("bf16");
    else VWD_MULTIPLY_REGISTERS_256("f16");
}
template <bool IS_BFLOAT16> __device__ inline void multiply(float (&c)[64], const uint32 (&a)[4], uint64 b) {
    if constexpr (IS_BFLOAT16) VWD_MULTIPLY_REGISTERS_128("bf16");
    else VWD_MULTIPLY_REGISTERS_128("f16");
}

// A warpgroup's registers, a multiple of eight; the CTA's have to suffice.
template <uint32 COUNT> __device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <uint32 COUNT> __device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// A barrier of `threads` threads of the CTA, in whole warps; number 0 is that of __syncthreads.
__device__ inline void sync_some(uint32 number, uint32 threads) { asm volatile("barrier.sync.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
