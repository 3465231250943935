// The pairs of blocks that a gather copies: entries of lists on the device, or offsets that the launch passes.
#pragma once

#include "common/types.cuh"

// One list [n], or lists [B, Hk, cap], each of which copies blocks of one KV head. Strides are in bytes.
struct Lists {
    const char *source_ids, *target_ids, *counts;
    int64 source_seq, source_head, source_entry, target_seq, target_head, target_entry, count_seq, count_head;
    int64 source_block, source_block_head, target_block;
    Divisor cap, heads;
    uint32 entries, sources, targets;

    // An upper bound of the entries: entries from here on copy nothing.
    __device__ uint32 end() const {
        if (entries > cap.value || !counts) return entries;
        return min(uint32(max(as<int32>(counts), 0)), entries);
    }
    // Finds the offsets of the entry's blocks; false if the entry copies nothing. All three loads start together.
    __device__ bool find(uint32 entry, int64 &from, int64 &to) const {
        const uint32 list = cap.divide(entry), j = entry - list * cap.value;
        const uint32 i = heads.divide(list), g = list - i * heads.value;
        const int32 count = counts ? as<int32>(counts + i * count_seq + g * count_head) : int32(cap.value);
        const uint32 source = as<int32>(source_ids + i * source_seq + g * source_head + j * source_entry);
        const uint32 target = target_ids ? as<int32>(target_ids + i * target_seq + g * target_head + j * target_entry) : entry;
        from = source * source_block + g * source_block_head;
        to = target * target_block;
        return (int32(j) < count) & (source < sources) & (target < targets);
    }
};

struct Offsets {
    int64 from, to;
};

// The offsets of entries that the host looked up.
struct Given {
    static constexpr uint32 MOST = 1000;
    Offsets of[MOST];
    uint32 entries;

    __device__ uint32 end() const { return entries; }
    __device__ bool find(uint32 entry, int64 &from, int64 &to) const {
        from = of[entry].from, to = of[entry].to;
        return true;
    }
};
