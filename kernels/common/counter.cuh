// Counters by which a CTA learns that it is the last of several.
#pragma once

#include "common/types.cuh"

// Adds one to a counter, behind all that this CTA has written; what others had written before they added is visible afterwards. Returns how many had.
__device__ inline uint32 count_up(uint32 *counter) {
    uint32 before;
    asm volatile("fence.acq_rel.gpu;\n\t"
                 "atom.relaxed.gpu.global.add.u32 %0, [%1], 1;\n\t"
                 "fence.acq_rel.gpu;"
                 : "=r"(before) : "l"(counter) : "memory");
    return before;
}
