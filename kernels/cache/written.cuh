// How a launch ends that codes the pages of the tails that became whole.
#pragma once

#include "cache/params.cuh"

// The last CTA to end leaves no page to write. All threads of each CTA call it.
__device__ inline void end_coding(Clock &clock) {
    __syncthreads();  // all threads have read how many pages there are
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&clock.written, 1u) + 1 < gridDim.x) return;
    __threadfence();  // after what the other CTAs did
    clock.full = clock.written = 0;
}
