// Addresses that a CTA computes before it waits for the previous kernel, so that its first reads follow the wait without arithmetic.
//
// For work items of one query position, in calls without q_lens (mla16, mla64).
#pragma once

#include "attention/attention.cuh"

// Keeps an address in a register from where it is computed.
template <typename T> __device__ inline void pin_address(T *&address) { asm volatile("" : "+l"(address)); }
// A word that is waited for where it is used: the compiler lets one of several ordinary loads under conditions wait for another.
__device__ inline int32 load_word(const char *address) {
    int32 x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

// Where a list has the entry of one of its tokens; NULL past its capacity.
struct Entry {
    const char *id = nullptr, *slot = nullptr;
    uint32 number = 0;

    __device__ Entry() {}
    __device__ Entry(const AttentionParams &p, const WorkItem &item, uint32 x) : number(p.block.divide(x)) {
        if (p.ids.data && number < p.list_capacity) {
            id = p.ids.at(item.seq, item.position, item.head, number);
            if (p.slots.data) slot = p.slots.at(item.seq, item.position, item.head, number);
        }
        pin_address(id);
        pin_address(slot);
    }
    __device__ Listed read(const AttentionParams &p) const {
        Listed listed;
        if (!id) return listed;
        listed.id = load_word(id);
        if (number) listed.previous = load_word(id - p.ids.step[3]);
        if (slot) listed.slot = load_word(slot);
        return listed;
    }
};

// Where the length of a work item's sequence and the count of its list stand.
struct Lengths {
    const char *tokens, *entries = nullptr;

    __device__ Lengths(const AttentionParams &p, const WorkItem &item) : tokens(p.seq_lens.at(item.seq)) {
        if (p.ids.data) entries = p.counts.at(item.seq, item.position, item.head);
        pin_address(tokens);
        pin_address(entries);
    }
    __device__ void read(const AttentionParams &p, const WorkItem &item, Reach &reach, uint32 &count) const {
        const int32 length = load_word(tokens), listed = entries ? load_word(entries) : 0;
        reach = Reach::of(p, item, clamped(length, p.token_capacity), int32(p.positions));
        count = clamped(listed, p.list_capacity);
    }
};

// Asks the L2 cache for what is read after the wait: each warp for its own entries, warp 0 for the lengths and the page table, too.
__device__ inline void prefetch_lists(const AttentionParams &p, const WorkItem &item, uint32 warp, const Entry &first, const Lengths &lengths) {
    constexpr uint32 ENTRIES = 128 / sizeof(int32);
    const uint32 lane = threadIdx.x % WARP;
    if (first.id) prefetch(first.id);
    if (warp) return;
    if (p.table.data && uint64(lane * ENTRIES) * p.page.value < p.token_capacity) prefetch(p.table.at(item.seq, lane * ENTRIES));
    if (lane == 0) prefetch(lengths.tokens);
    if (lane == 1 && lengths.entries) prefetch(lengths.entries);
}
