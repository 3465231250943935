// Fixed-width names for kernels compiled by NVRTC, which has no <cstdint>, and what every kernel needs of the device.
#pragma once

using int32 = int;
using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr uint32 WARP = 32;
constexpr uint32 FULL_WARP = 0xffffffffu;

// The layout of tensors. Common tensors have strides that fit in 32 bits, adjoining tokens, and rows that are single runs of 16-byte units;
// nearly all are Common, and calls that take a microsecond have kernels for them alone. General is every other layout.
struct Common {
    using Stride = int32;
    static constexpr bool IS_GENERAL = false;
};
struct General {
    using Stride = int64;
    static constexpr bool IS_GENERAL = true;
};

// n / value for n < 2^31, as 2n · magic >> 32 >> shift.
struct Divisor {
    uint32 value, magic, shift;
    __device__ uint32 divide(uint32 n) const { return __umulhi(2 * n, magic) >> shift; }
};

// The binary logarithm of a power of two.
__device__ inline uint32 log2_of(uint32 n) { return __ffs(n) - 1; }

// i · stride, in bytes. An int32 stride takes one instruction, an int64 stride three.
__device__ inline int64 offset(uint32 i, int32 stride) {
    int64 bytes;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(bytes) : "r"(i), "r"(stride));
    return bytes;
}
__device__ inline int64 offset(uint32 i, int64 stride) { return i * stride; }

// The T at an address.
template <typename T> __device__ inline T &as(char *address) { return *reinterpret_cast<T *>(address); }
template <typename T> __device__ inline const T &as(const char *address) { return *reinterpret_cast<const T *>(address); }

// 2^x, except for the last bits.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The sum over the lanes of the warp up to and including this one.
__device__ inline uint32 warp_inclusive_sum(uint32 value) {
    const uint32 lane = threadIdx.x % WARP;
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) {
        const uint32 other = __shfl_up_sync(FULL_WARP, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Prefetches a line to the L2 cache.
__device__ inline void prefetch(const void *address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Loads a value that another kernel may be about to change.
__device__ inline int32 load_hint(const char *p) {
    int32 x;
    asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// Dependent launch (compute capability 9.0 and later; elsewhere nothing, and kernels run one after the other). A kernel that allows it
// lets the next one start once all its own CTAs have started; the next waits for its end before it reads its results or writes anything.
// Elsewhere an empty instruction stands there, so that the compiler makes the same of the rest: build.py keeps one PTX for both.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#else
    asm volatile("" ::: "memory");
#endif
}
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#else
    asm volatile("" ::: "memory");
#endif
}
