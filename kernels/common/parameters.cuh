// Parameters lie in constant memory, where a kernel finds them cold.
#pragma once

#include "common/types.cuh"

// Asks for all lines at once, so that nothing waits for one after another. The words are to be used, late.
template <typename Params>
__device__ inline uint32 request_parameters(const Params &p) {
    constexpr uint32 LINE = 64;
    return threadIdx.x < sizeof(p) / LINE ? reinterpret_cast<const uint32 *>(&p)[threadIdx.x * (LINE / 4)] : 0;
}
// The same, used at once: words go to shared memory, where nothing reads them.
template <typename Params>
__device__ inline void request_parameters(const Params &p, uint32 (&words)[WARP]) {
    const uint32 word = request_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(uint32(__cvta_generic_to_shared(words + threadIdx.x))), "r"(word) : "memory");
}

// Keeps x in a register from here on: the compiler does not compute it again later.
template <typename T> __device__ inline T pin_in_register(T x) {
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
    return x;
}
