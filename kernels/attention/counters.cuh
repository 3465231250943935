// Counters by which a CTA learns that it is the last of several. All of them are zero before and after a launch.
//
// CTAs that find their shares themselves (find_share, fixed_share) disagree on the number of a work item's chunks where lengths or counts change during the
// launch, a caller's mistake. Counters would then end at other sums. So that later calls are right nevertheless, each CTA of such a launch also
// arrives at one more counter, and the last CTA of the launch makes all counters zero.
#pragma once

#include "attention/attention.cuh"
#include "common/counter.cuh"

// The counter of a work item's chunks, where it has several; in verify128 of those of each CTA of a cluster.
__device__ inline uint32 counter_of(const AttentionParams &p, const CtaShare &cta_share) { return p.octave_chunks ? cta_share.item : cta_share.slot; }
// That at which each CTA arrives, behind the others.
__device__ inline uint32 counter_of_end(const AttentionParams &p) { return p.octave_chunks ? p.work_items * max(p.ctas.value, 1u) : gridDim.x; }

// Arrives for this CTA, which counts nothing up any more. One thread calls it. Returns how many CTAs of the launch had arrived before.
__device__ inline uint32 arrive_at_end(const AttentionParams &p) {
    uint32 before = 0;
    if (!p.cta_shares) {
        asm volatile("fence.acq_rel.gpu;\n\t"
                     "atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before) : "l"(p.counters + counter_of_end(p)) : "memory");
    }
    return before;
}

// Makes the counters zero if this CTA was the last to arrive. A warp calls it, whose first lane has arrived and knows what was before.
__device__ inline void clear_counters(const AttentionParams &p, uint32 before) {
    if (p.cta_shares || __shfl_sync(FULL_WARP, before, 0) != gridDim.x - 1) return;
    __threadfence();
    uint4 *const counters = reinterpret_cast<uint4 *>(p.counters);
#pragma unroll
    for (uint32 n = 0; n < CLEARED_COUNTERS / 4; n += WARP) counters[n + threadIdx.x % WARP] = uint4{};
    if (!p.octave_chunks) return;
#pragma unroll 1
    for (uint32 n = CLEARED_COUNTERS / 4 + threadIdx.x % WARP; n * 4 <= counter_of_end(p); n += WARP) counters[n] = uint4{};
}
