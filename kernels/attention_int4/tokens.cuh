// Where coded tokens lie, and how rows of any width are turned: for general.cu and mma.cuh.
#pragma once

#include "attention_int4/params.cuh"

// What rows see and which tokens are coded; Rows is Reach, for a chain of rows, or TreeReach.
template <typename Rows>
struct Int4Reach : Rows {
    const Int4Params &int4;
    int32 end_of_coded;

    // A place counts pages of codes after the others, as slots do.
    __device__ bool is_coded(const Place &place) const { return uint32(place.page) >= int4.to.pages; }
};

template <typename Rows>
__device__ inline Place find_granule(const AttentionParams &p, const Int4Reach<Rows> &reach, const WorkItem &item, uint32 entries, const Tiles &tiles, uint32 tile) {
    const uint32 x = tiles.token(p, tile);
    if (x == Tiles::NOWHERE) return {-1, 0, 0};
    int32 position = (reach.begin & ~int32(TILE - 1)) + int32(x), slot = 0;
    if (p.ids.data) {
        const Listed entry = listed(p, item, x);
        slot = entry.slot;
        const uint32 e = p.block.divide(x);
        if (e >= entries || entry.id < 0 || entry.id == entry.previous || int64(entry.id) * p.block.value >= reach.end) return {-1, 0, 0};
        position = entry.id * int32(p.block.value) + int32(x - e * p.block.value);
    }
    if (position >= reach.end || position + (1 << p.log_granule) <= reach.begin) return {-1, 0, 0};
    const bool in_slots = p.slots.data, is_coded = in_slots ? uint32(slot) >= p.pages : ::is_coded(reach.int4, position, reach.end_of_coded);
    const View<2> &table = is_coded ? reach.int4.table : p.table;
    const Divisor &size = is_coded ? reach.int4.page : p.page;
    const uint32 number = in_slots || table.data ? size.divide(position) : 0, coded_from = is_coded ? p.pages : 0;
    const uint32 page = in_slots ? slot - coded_from : table.data ? as<int32>(table.at(item.seq, number)) : item.seq;
    if (page >= (is_coded ? reach.int4.pages : p.pages)) return {-1, 0, 0};
    return {position, int32(coded_from + page), position - int32(number * size.value)};
}

// The mean of the block of a coded token, which lies in this page of codes; NULL where there is none.
__device__ inline const char *mean_of_token(const AttentionParams &p, const Int4Params &int4, const WorkItem &item, int32 position, uint32 coded_page) {
    const uint32 block = int4.block.divide(position), number = int4.mean_table.data ? int4.mean_rows.divide(block) : 0;
    const uint32 mean_row = p.slots.data ? 0 : block - number * int4.mean_rows.value;
    int32 page = p.slots.data ? int32(coded_page) : -1;
    if (!p.slots.data && number < int4.most_mean_pages && mean_row < int4.mean_rows.value) page = int4.mean_table.data ? as<int32>(int4.mean_table.at(item.seq, number)) : item.seq;
    return uint32(page) < int4.mean_pages ? int4.means.at(page, mean_row, item.head) : nullptr;
}

// Multiplies rows of `dim` channels by H. A lane has the channels lane, lane + 32 … in the first COUNT elements.
template <uint32 COUNT, uint32 SIZE>
__device__ inline void turn(float (&row)[SIZE], uint32 dim) {
    const uint32 lane = threadIdx.x % WARP, together = dim & (0 - dim);
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) {
        if (step >= together) break;
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            const float other = __shfl_xor_sync(FULL_WARP, row[i], step);
            row[i] = lane & step ? other - row[i] : row[i] + other;
        }
    }
#pragma unroll
    for (uint32 step = 1; step < COUNT; step *= 2) {
        if (step * WARP >= together) break;
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            if (i & step) continue;
            const float a = row[i], b = row[i + step];
            row[i] = a + b;
            row[i + step] = a - b;
        }
    }
    const float factor = 1.0f / sqrtf(together);
#pragma unroll
    for (uint32 i = 0; i < COUNT; i++) row[i] *= factor;
}
