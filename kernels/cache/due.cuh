// What a fetch has to bring: the runs whose slots were given and not filled yet, and how these are marked when they are there.
//
// The first CTA to begin searches the slots that the clock's hand has passed for slots whose run has not been copied yet, and publishes the list.
// The last CTA to end records where the next search begins.
//
// A resolve may give slots away at the same time, and its writes may be seen in any order. The content of a slot is one word, so a search
// sees it before or after the resolve, and the run is copied once in either case. A search may see the hand where that resolve leaves it but
// not yet the slots that the resolve gives. So the next search begins at the position that the hand had before that resolve: earlier resolves
// have ended, and all their writes are seen.
#pragma once

#include "cache/params.cuh"

__device__ inline ToCopy load(const ToCopy *at) { return {__ldcg(&at->slot), __ldcg(&at->host_run), __ldcg(&at->since)}; }

// Writes the slots whose run has not been copied yet to `to_copy`; returns their number. All threads of a CTA call it.
template <uint32 THREADS> __device__ inline uint32 search(const FetchParams &p) {
    constexpr uint32 AT_ONCE = 16;
    __shared__ uint64 begin, end;
    __shared__ uint32 found;
    const Layer &layer = p.layer;
    Clock &clock = *layer.clock;
    const uint32 lane = threadIdx.x % WARP, below = (1u << lane) - 1, slots = p.layer.slots;
    if (threadIdx.x == 0) {
        const uint64 before = load_volatile(&clock.before);
        begin = load_volatile(&clock.searched), end = load_volatile(&clock.passed), found = 0;
        clock.searching = min(before, end);
        __threadfence();  // after this, all writes of the resolves up to `before` are seen
    }
    __syncthreads();
    const uint32 span = min(end - begin, uint64(slots)), hand = begin % slots;
    const auto slot_at = [&](uint32 n) { return hand + n - (hand + n >= slots ? slots : 0); };
    for (uint32 first = threadIdx.x; first < span + lane; first += AT_ONCE * THREADS) {
        uint64 holds[AT_ONCE];
        uint32 due[AT_ONCE], count = 0, at = 0;  // due: the lanes whose slot is due
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            const uint32 n = first + k * THREADS;
            holds[k] = n < span ? load_volatile(layer.holds + slot_at(n)) : NO_HOME;
        }
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            due[k] = __ballot_sync(FULL_WARP, !unpack(holds[k]).is_resident());
            count += __popc(due[k]);
        }
        if (count == 0) continue;
        if (lane == 0) at = atomicAdd(&found, count);
        at = __shfl_sync(FULL_WARP, at, 0);
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            const Home content = unpack(holds[k]);
            if (due[k] >> lane & 1) layer.to_copy[at + __popc(due[k] & below)] = {slot_at(first + k * THREADS), content.slot, content.since};
            at += __popc(due[k]);
        }
    }
    __syncthreads();
    return found;
}

// False where a fetch that follows the last resolve of its layer has nothing to copy: the hand has passed no slot since the last search, and all CTAs
// see that, since nothing moves it meanwhile. Then the CTA ends.
__device__ inline bool may_be_due(const FetchParams &p) {
    wait_for_previous_kernel();
    allow_next_kernel();
    return !p.is_in_order || p.layer.clock->searched != p.layer.clock->passed;
}

// The number of runs to copy, in `to_copy`, the same for all CTAs of this launch. All threads of a CTA call it.
template <uint32 THREADS> __device__ inline uint32 find_due(const FetchParams &p) {
    __shared__ uint32 due, is_first;
    Clock &clock = *p.layer.clock;
    if (threadIdx.x == 0) is_first = atomicAdd(&clock.tickets, 1u) == 0;
    __syncthreads();
    if (is_first) {
        const uint32 found = search<THREADS>(p);
        if (threadIdx.x == 0) {
            clock.due = found;
            __threadfence();
            atomicExch(&clock.is_set, 1u);
        }
        return found;
    }
    if (threadIdx.x == 0) {
        while (!load_volatile(&clock.is_set)) {}
        __threadfence();
        due = load_volatile(&clock.due);
    }
    __syncthreads();
    return due;
}

// A run is in its slot from now on. One thread calls it, after what brought the run.
__device__ inline void mark(const Layer &layer, const ToCopy &copy) {
    const uint64 home = pack({copy.slot, copy.since}), content = pack({copy.host_run, copy.since});
    // A resolve that gives the slot at the same time may not have written the home yet: then the next fetch finds the slot again.
    if (atomicCAS(layer.homes + copy.host_run, home, home | RESIDENT) == home) atomicCAS(layer.holds + copy.slot, content, content | RESIDENT);
}

// Ends a fetch of so many runs. All threads of each CTA call it.
__device__ inline void end_fetch(const FetchParams &p, uint32 due) {
    Clock &clock = *p.layer.clock;
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&clock.left, 1u) + 1 < gridDim.x) return;
    __threadfence();  // after what the other CTAs did
    clock.totals.fetched += due * p.cache.run;
    clock.totals.waits += p.is_wait && due;
    clock.searched = load_volatile(&clock.searching);
    clock.tickets = clock.is_set = clock.left = 0;
}
