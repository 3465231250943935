// Accesses to words that several CTAs share, which order no others, and one that is ordered before all that follow.
#pragma once

#include "common/types.cuh"

__device__ inline uint32 add_relaxed(uint32 *counter, uint32 count) {
    uint32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count) : "memory");
    return before;
}
__device__ inline void store_relaxed(uint32 *word, uint32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(x) : "memory"); }
__device__ inline uint32 load_relaxed(const uint32 *word) {
    uint32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
// What others wrote before they added to the counter is visible afterwards.
__device__ inline uint32 load_acquire(const uint32 *counter) {
    uint32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    return x;
}
