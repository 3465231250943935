// Parameters lie in constant memory, where a kernel finds them cold.
#pragma once

#include "common/types.cuh"

// Asks for all lines at once, so that nothing waits for one after another. The words are to be used, late.
template <typename Params>
__device__ inline uint32 request_parameters(const Params &p) {
    constexpr uint32 LINE = 64;
    return threadIdx.x < sizeof(p) / LINE ? reinterpret_cast<const uint32 *>(&p)[threadIdx.x * (LINE / 4)] : 0;
}

// Keeps x in a register from here on: the compiler does not compute it again later.
template <typename T> __device__ inline T pin_in_register(T x) {
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
    return x;
}
