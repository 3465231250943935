// What repair has to do with each block of the selected list.
//
//   SUPERSET  missed = selected ∖ predicted              start = the predicted state
//   EXACT     missed = selected ∖ those kept by partials  start = Σ partials of predicted ∩ selected
//
// A partial of several blocks serves if all of them are selected; otherwise those selected are attended to again.
#pragma once

#include "attention/attention.cuh"

// The first place in an ascending list that holds `id`; `count` if none does.
__device__ inline uint32 find(const int32 *list, uint32 count, int32 id) {
    uint32 at = 0;
#pragma unroll 1
    for (uint32 step = count ? 1u << (31 - __clz(count)) : 0; step; step /= 2)
        if (at + step <= count && list[at + step - 1] < id) at += step;
    return at < count && list[at] == id ? at : count;
}

// Lengths and counts of a pair, read once for a CTA: its threads then agree on them, whatever happens to the caller's meanwhile.
struct Reading {
    int32 length, queries;
    uint32 predicted, selected;

    __device__ static Reading load(const RepairParams &p, const Pair &pair) {
        const Reach reach = Reach::load(p.to, pair);
        const int32 predicted = as<int32>(p.predicted_counts.at(pair.seq, pair.position, pair.head));
        return {reach.length, reach.queries, uint32(clamped(predicted, p.predicted_cap)), count_of(p.to, pair)};
    }
    __device__ Reach reach(const RepairParams &p, const Pair &pair) const { return Reach::of(p.to, pair, length, queries); }
};

// Of a pair, in shared memory.
struct Lists {
    const int32 *predicted, *selected;
    uint32 predicted_count, count;
    uint32 blocks;  // that begin inside what its rows may see

    // Entry `j` names such a block, for the first time.
    __device__ bool is_block(const int32 *list, uint32 j) const { return uint32(list[j]) < blocks && (j == 0 || list[j - 1] != list[j]); }
};

__device__ inline uint32 blocks_of(const AttentionParams &p, const Reach &reach) { return p.block.divide(reach.end + p.block.value - 1); }

enum class Part : uint32 { NOTHING, ATTEND, JOIN };

// The part of a selected block in the result; the first block that shares a partial stands for it.
__device__ inline Part part_of(const RepairParams &p, const Lists &lists, uint32 j, bool &is_missed, int32 &partial) {
    if (j >= lists.count || !lists.is_block(lists.selected, j)) return Part::NOTHING;
    const uint32 at = find(lists.predicted, lists.predicted_count, lists.selected[j]);
    is_missed = at == lists.predicted_count;
    if (is_missed) return Part::ATTEND;
    if (!p.exact) return Part::NOTHING;
    partial = p.entries.divide(at);
    if (p.entries.value == 1) return Part::JOIN;
    const uint32 first = partial * p.entries.value, last = min(first + p.entries.value, lists.predicted_count);
    bool is_first = true;
    for (uint32 other = first; other < last; other++) {
        if (other == at || !lists.is_block(lists.predicted, other)) continue;
        if (find(lists.selected, lists.count, lists.predicted[other]) == lists.count) return Part::ATTEND;
        is_first &= other > at;
    }
    return is_first ? Part::JOIN : Part::NOTHING;
}

// Entries of the selected list to attend to, partials that serve, and blocks that were not predicted.
struct Found {
    uint32 attended, joined, missed;
};

// Goes through the selected list, all threads of the CTA together: `attend(j, at, asked)` for each entry to attend to, `join(partial, at)`
// for each partial that serves, `at` counting from 0 in the order of the list. asked = ask(j) is asked for before the search.
template <typename Ask, typename Attend, typename Join>
__device__ inline Found find_parts(const RepairParams &p, const Lists &lists, Ask ask, Attend attend, Join join) {
    // Of each warp: 10 bits for each of the three.
    __shared__ uint32 sums[WARPS];
    constexpr uint32 BITS = 10, MASK = (1 << BITS) - 1;
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, lower = (1u << lane) - 1;
    Found found{};
#pragma unroll 1
    for (uint32 begin = 0; begin < lists.count; begin += THREADS) {
        const uint32 j = begin + threadIdx.x;
        const int32 asked = j < lists.count ? ask(j) : 0;
        bool is_missed = false;
        int32 partial = 0;
        const Part part = part_of(p, lists, j, is_missed, partial);
        const uint32 attends = __ballot_sync(FULL_WARP, part == Part::ATTEND), joins = __ballot_sync(FULL_WARP, part == Part::JOIN);
        const uint32 misses = __ballot_sync(FULL_WARP, is_missed);
        if (lane == 0) sums[warp] = __popc(attends) | __popc(joins) << BITS | __popc(misses) << 2 * BITS;
        __syncthreads();
        uint32 before = 0, all = 0;
#pragma unroll
        for (uint32 w = 0; w < WARPS; w++) {
            before += w < warp ? sums[w] : 0;
            all += sums[w];
        }
        if (part == Part::ATTEND) attend(j, found.attended + (before & MASK) + __popc(attends & lower), asked);
        if (part == Part::JOIN) join(partial, found.joined + (before >> BITS & MASK) + __popc(joins & lower));
        found.attended += all & MASK;
        found.joined += all >> BITS & MASK;
        found.missed += all >> 2 * BITS;
        __syncthreads();
    }
    return found;
}
