// What repair does with each block of the selected list.
//
//   SUPERSET  missed = selected ∖ predicted              start = the predicted state
//   EXACT     missed = selected ∖ those kept by partials  start = Σ partials of predicted ∩ selected
//
// A partial of several blocks serves if all of them are selected; otherwise those of its blocks that are selected are attended to again.
#pragma once

#include "attention/attention.cuh"

// The first place in an ascending list that has `id`; `count` if none has.
__device__ inline uint32 find(const int32 *list, uint32 count, int32 id) {
    uint32 at = 0;
#pragma unroll 1
    for (uint32 step = count ? 1u << (31 - __clz(count)) : 0; step; step /= 2)
        if (at + step <= count && list[at + step - 1] < id) at += step;
    return at < count && list[at] == id ? at : count;
}

// Lengths and counts of a work item, read once for a CTA: its threads agree on them even if the caller changes them meanwhile.
struct WorkItemLengths {
    int32 length, queries;
    uint32 predicted, selected;

    __device__ static WorkItemLengths load(const RepairParams &p, const WorkItem &item) {
        const Reach reach = Reach::load(p.to, item);
        const int32 predicted = as<int32>(p.predicted_counts.at(item.seq, item.position, item.head));
        return {reach.length, reach.queries, uint32(clamped(predicted, p.predicted_capacity)), count_of(p.to, item)};
    }
    __device__ Reach reach(const RepairParams &p, const WorkItem &item) const { return Reach::of(p.to, item, length, queries); }
};

// Both lists of a work item, in shared memory.
struct Lists {
    const int32 *predicted, *selected;
    uint32 predicted_count, count;
    uint32 blocks;  // blocks that begin inside what the item's rows may see

    // Whether entry j names such a block, and is the first to name it.
    __device__ bool is_block(const int32 *list, uint32 j) const { return uint32(list[j]) < blocks && (j == 0 || list[j - 1] != list[j]); }
};

__device__ inline uint32 blocks_of(const AttentionParams &p, const Reach &reach) { return p.block.divide(reach.end + p.block.value - 1); }

enum class Part : uint32 { NOTHING, ATTEND, JOIN };

// What part a selected block has in the result. The first block of a partial stands for the whole partial.
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

// Counts: entries of the selected list to attend to, partials that serve, and blocks that were not predicted.
struct Found {
    uint32 attended, joined, missed;
};

// Goes through the selected list with all COUNT threads of the CTA. Calls attend(j, at, requested) for each entry to attend to and join(partial, at) for
// each partial that serves, where `at` counts from 0 in the order of the list. requested = request(j) precedes the search.
template <uint32 COUNT = THREADS, typename Request, typename Attend, typename Join>
__device__ inline Found find_parts(const RepairParams &p, const Lists &lists, Request request, Attend attend, Join join) {
    // The counts of each warp, 10 bits for each of the three.
    __shared__ uint32 sums[COUNT / WARP];
    constexpr uint32 BITS = 10, MASK = (1 << BITS) - 1;
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, lower = (1u << lane) - 1;
    Found found{};
#pragma unroll 1
    for (uint32 begin = 0; begin < lists.count; begin += COUNT) {
        const uint32 j = begin + threadIdx.x;
        const int32 load_word = j < lists.count ? request(j) : 0;
        bool is_missed = false;
        int32 partial = 0;
        const Part part = part_of(p, lists, j, is_missed, partial);
        const uint32 attends = __ballot_sync(FULL_WARP, part == Part::ATTEND), joins = __ballot_sync(FULL_WARP, part == Part::JOIN);
        const uint32 misses = __ballot_sync(FULL_WARP, is_missed);
        if (lane == 0) sums[warp] = __popc(attends) | __popc(joins) << BITS | __popc(misses) << 2 * BITS;
        __syncthreads();
        uint32 before = 0, all = 0;
#pragma unroll
        for (uint32 w = 0; w < COUNT / WARP; w++) {
            before += w < warp ? sums[w] : 0;
            all += sums[w];
        }
        if (part == Part::ATTEND) attend(j, found.attended + (before & MASK) + __popc(attends & lower), load_word);
        if (part == Part::JOIN) join(partial, found.joined + (before >> BITS & MASK) + __popc(joins & lower));
        found.attended += all & MASK;
        found.joined += all >> BITS & MASK;
        found.missed += all >> 2 * BITS;
        __syncthreads();
    }
    return found;
}
