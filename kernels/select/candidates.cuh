// The candidate blocks of a list. Selection by labels takes their tokens, or the blocks themselves.
#pragma once

#include "select/rows.cuh"

// The blocks ascend, each stands once, and none begins past what the list's positions see.
struct Candidates {
    const int32 *block;
    uint32 count, size, tokens;  // tokens: how many the list sees
    Divisor by_size;

    // The number of entries whose blocks begin before token `begin`.
    __device__ uint32 entries_before(uint32 begin) const {
        uint32 low = 0, high = begin == 0 ? 0 : count;
        if (high > 0 && uint64(block[high - 1]) * size < begin) return high;  // the usual case
        while (low < high) {
            const uint32 middle = (low + high) / 2;
            if (uint64(block[middle]) * size < begin)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
    // The number of candidate tokens before token `end`. Only the last block can be partial.
    __device__ uint32 tokens_below(uint32 end) const {
        const uint32 entries = entries_before(end);
        if (entries == 0) return 0;
        return (entries - 1) * size + min(size, min(end, tokens) - block[entries - 1] * size);
    }
    __device__ uint32 token(uint32 at) const {
        const uint32 entry = by_size.divide(at);
        return block[entry] * size + (at - entry * size);
    }
    // The entry of block j; `count` if the block is no candidate.
    __device__ uint32 entry_of(uint32 j) const {
        const uint32 entry = entries_before(j * size);
        return entry < count && uint32(block[entry]) == j ? entry : count;
    }
};

// Writes the entries that are below `blocks` and above all entries before them, and returns how many they are. id_of(base) is this thread's
// entry among base … base + THREADS − 1, which is read before any of these is written. All threads of the CTA take part.
template <uint32 THREADS, typename Id>
__device__ uint32 keep_ascending(uint32 entries, uint32 blocks, const Id &id_of, int32 *to, int32 (&per_warp)[THREADS / WARP], int32 (&also_per_warp)[THREADS / WARP]) {
    constexpr uint32 WARPS = THREADS / WARP;
    const uint32 thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    int32 most = -1;
    uint32 count = 0;
    for (uint32 base = 0; base < entries; base += THREADS) {
        int32 id = -1;
        if (base + thread < entries) id = id_of(base);
        if (uint32(id) >= blocks) id = -1;
        int32 through = id;
#pragma unroll
        for (uint32 step = 1; step < WARP; step *= 2) {
            const int32 other = __shfl_up_sync(FULL_WARP, through, step);
            if (lane >= step) through = max(through, other);
        }
        int32 before = __shfl_up_sync(FULL_WARP, through, 1);
        if (lane == 0) before = -1;
        if (lane == WARP - 1) per_warp[warp] = through;
        __syncthreads();
        before = max(max(before, most), __reduce_max_sync(FULL_WARP, lane < warp ? per_warp[lane % WARPS] : -1));
        const uint32 mask = __ballot_sync(FULL_WARP, id > before);
        if (lane == 0) also_per_warp[warp] = __popc(mask);
        most = max(most, __reduce_max_sync(FULL_WARP, per_warp[lane % WARPS]));
        __syncthreads();
        const uint32 place = count + __reduce_add_sync(FULL_WARP, lane < warp ? also_per_warp[lane % WARPS] : 0) + __popc(mask & ((1u << lane) - 1));
        if (mask >> lane & 1) to[place] = id;
        count += __reduce_add_sync(FULL_WARP, lane < WARPS ? also_per_warp[lane % WARPS] : 0);
    }
    __syncthreads();
    return count;
}
