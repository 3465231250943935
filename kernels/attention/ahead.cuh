// Addresses that a CTA finds before it waits for the kernel before: what it reads first hangs on no arithmetic then.
//
// For pairs of one query position without lengths of their own.
#pragma once

#include "attention/attention.cuh"

// Keeps an address where it is computed; reads there.
template <typename T> __device__ inline void pin(T *&address) { asm volatile("" : "+l"(address)); }
__device__ inline int32 load_word(const char *address) {
    int32 x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

// Where a list tells of one of its tokens; nowhere past its capacity.
struct Entry {
    const char *id = nullptr, *slot = nullptr;
    uint32 number = 0;

    __device__ Entry() {}
    __device__ Entry(const AttentionParams &p, const Pair &pair, uint32 x) : number(p.block.divide(x)) {
        if (p.ids.data && number < p.cap) {
            id = p.ids.at(pair.seq, pair.position, pair.head, number);
            if (p.slots.data) slot = p.slots.at(pair.seq, pair.position, pair.head, number);
        }
        pin(id);
        pin(slot);
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

// Where the lengths of a pair's sequence and of its list stand.
struct Lengths {
    const char *tokens, *entries = nullptr;

    __device__ Lengths(const AttentionParams &p, const Pair &pair) : tokens(p.seq_lens.at(pair.seq)) {
        if (p.ids.data) entries = p.counts.at(pair.seq, pair.position, pair.head);
        pin(tokens);
        pin(entries);
    }
    __device__ void read(const AttentionParams &p, const Pair &pair, Reach &reach, uint32 &count) const {
        const int32 length = load_word(tokens), listed = entries ? load_word(entries) : 0;
        reach = Reach::of(p, pair, clamped(length, p.capacity), int32(p.positions));
        count = clamped(listed, p.cap);
    }
};

// Asks the L2 cache for what is read after the wait: by a warp for its own entries, by the first for the rest.
__device__ inline void announce_lists(const AttentionParams &p, const Pair &pair, uint32 warp, const Entry &first, const Lengths &lengths) {
    constexpr uint32 ENTRIES = 128 / sizeof(int32);
    const uint32 lane = threadIdx.x % WARP;
    if (first.id) prefetch(first.id);
    if (warp) return;
    if (p.table.data && uint64(lane * ENTRIES) * p.page.value < p.capacity) prefetch(p.table.at(pair.seq, lane * ENTRIES));
    if (lane == 0) prefetch(lengths.tokens);
    if (lane == 1 && lengths.entries) prefetch(lengths.entries);
}
