// The exact top k of rows of scores: vwd_topk.
//
//   ids of row r: the k entries that come first by (larger score, lower index); ascending, or in that order
//
// Bytes: every score once, every id and value once. A row of 131072 float32 scores has 524 KB; eight of them take 1 µs.
//
// Which variant runs when (src/ops/topk/choose.rs):
//   short      rows of up to 8192 scores: a CTA has a row in half of the registers, so that a multiprocessor has two rows
//   prefilter  long rows of which few are wanted, where there is scratch: prefilter.cu leaves up to 16384 entries, which a CTA has in registers
//   cluster    all other rows: a CTA has up to 16384 scores in registers, and a cluster of 2, 4 or 8 CTAs takes longer rows. Scores beyond the
//              cluster's registers and shared memory are read once a pass, up to five times
//
//   request scores or entries ─ bounds ─ bins ─ places ─ ids, values
//                                                 └ best first: sort ┘
//
// On entry: the grid is a multiple of the cluster; `room` has places for the selected scores, a power of two where they are sorted.
#pragma once

#include "topk/row.cuh"

// An item for each selected score, after an index for each key in registers where keys are the prefilter's entries; or chunks of a cluster's
// keys.
extern __shared__ uint4 room[];

// Key and index as one number that is larger for what comes first.
__device__ inline uint64 item_of(uint32 key, uint32 j) { return uint64(key) << 32 | ~j; }

// Sorts `count` items, the largest first; all threads of a CTA take part.
template <uint32 THREADS> __device__ inline void sort_items(uint64 *item, uint32 count) {
    uint32 size = 2;
    while (size < count) size *= 2;
    for (uint32 i = count + threadIdx.x; i < size; i += THREADS) item[i] = 0;
    __syncthreads();
    for (uint32 run = 2; run <= size; run *= 2) {
        for (uint32 apart = run / 2; apart > 0; apart /= 2) {
            for (uint32 t = threadIdx.x; t < size / 2; t += THREADS) {
                const uint32 low = 2 * t - (t & (apart - 1)), high = low + apart;
                const uint64 a = item[low], b = item[high];
                if ((a < b) == ((low & run) == 0)) item[low] = b, item[high] = a;
            }
            __syncthreads();
        }
    }
}

template <uint32 BYTES, bool IS_ORDERED, uint32 THREADS> __device__ inline void write_items(const Row &row, uint64 *item) {
    if (IS_ORDERED) sort_items<THREADS>(item, row.wanted);
#pragma unroll 1
    for (uint32 i = threadIdx.x; i < row.wanted; i += THREADS) row.write<BYTES>(i, ~uint32(item[i]), uint32(item[i] >> 32));
}

// Selects from the keys in registers; index(j) is the index of key j.
template <uint32 BYTES, bool IS_ORDERED, uint32 THREADS, typename Index>
__device__ inline void select(const Row &row, CtaTopK<THREADS> &top, uint32 present, uint64 *item, const Index &index) {
    top.find_threshold(row.wanted, present);
    top.take([&](uint32 place, uint32 j, uint32 key) { item[place] = item_of(key, index(j)); });
    __syncthreads();
    write_items<BYTES, IS_ORDERED, THREADS>(row, item);
}

template <uint32 BYTES, bool IS_ORDERED> __device__ inline void select_short(const TopKParams &p) {
    __shared__ CtaTopKShared<SHORT> shared;
    allow_next_kernel();
    open(shared);
    wait_for_previous_kernel();
    const Row row(p, blockIdx.x);
    if (threadIdx.x == 0) row.write_count();
    if (row.wanted == 0) return;
    CtaTopK<SHORT> top(shared, row.len);
    row.load<BYTES>(top.first, top.end(), top.x);
    select<BYTES, IS_ORDERED>(row, top, row.len, reinterpret_cast<uint64 *>(room), [](uint32 j) { return j; });
}

// The entries that the prefilter kept of a row, slice after slice; each slice begins with a whole quad.
struct Entries {
    struct Shared {
        uint32 first[MOST_SLICES];           // places of earlier slices
        uint32 places[WARP], present[WARP];  // sums over each warp's slices
    };
    const Row &row;
    Shared &shared;
    uint32 places, present;  // places is 0 where the scores themselves are needed

    // Called by all threads.
    __device__ Entries(const Row &row, Shared &shared) : row(row), shared(shared), places(0), present(0) {
        const uint32 slices = row.p.slices, slice = threadIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (slices == 0) return;
        uint32 kept_counts = 0;
        if (slice < slices) kept_counts = __ldcg(reinterpret_cast<const uint32 *>(row.p.kept_counts) + uint64(row.number) * slices + slice);
        const bool are_too_many = kept_counts == TOO_MANY;
        if (are_too_many) kept_counts = 0;
        const uint32 own = (kept_counts + 3) / 4 * 4, through = warp_inclusive_sum(own);
        kept_counts = __reduce_add_sync(FULL_WARP, kept_counts);
        if (lane == WARP - 1) shared.places[warp] = through, shared.present[warp] = kept_counts;
        if (__syncthreads_or(are_too_many)) return;
        const uint32 per_warp = shared.places[lane], before = __reduce_add_sync(FULL_WARP, lane < warp ? per_warp : 0);
        const uint32 all = __reduce_add_sync(FULL_WARP, per_warp), there = __reduce_add_sync(FULL_WARP, shared.present[lane]);
        if (slice < slices) shared.first[slice] = before + through - own;
        __syncthreads();
        if (there >= row.wanted && all <= CtaTopK<LONG>::MOST) places = all, present = there;
    }
    // Loads keys and indices of the quad at place i.
    __device__ void load(uint32 i, uint32 (&key)[4], uint4 &index) const {
        uint32 slice = 0;
#pragma unroll
        for (uint32 step = MOST_SLICES / 2; step > 0; step /= 2)
            if (slice + step < row.p.slices && shared.first[slice + step] <= i) slice += step;
        const uint64 at = (uint64(row.number) * row.p.slices + slice) * MOST_KEPT + (i - shared.first[slice]);
        const uint4 *from = reinterpret_cast<const uint4 *>(row.p.kept_entries + at * 8);
        const uint4 low = __ldcg(from), high = __ldcg(from + 1);
        key[0] = low.x, key[1] = low.z, key[2] = high.x, key[3] = high.z;
        index = make_uint4(low.y, low.w, high.y, high.w);
    }
};

template <uint32 BYTES, bool IS_ORDERED> __device__ inline void select_long(const TopKParams &p) {
    __shared__ union {
        ClusterTopKShared<LONG> cluster;
        CtaTopKShared<LONG> one_cta;
    } shared;  // both begin with bins that are 0 after open(); only one is used
    __shared__ Entries::Shared slices;
    constexpr uint32 LONG_QUADS = CtaTopK<LONG>::MOST / 4;
    allow_next_kernel();
    open(shared.cluster);
    wait_for_previous_kernel();
    const uint32 ctas = cluster_ctas();
    const Row row(p, blockIdx.x / ctas);
    if (cluster_rank() == 0 && threadIdx.x == 0) row.write_count();
    if (row.wanted == 0) return;
    const bool is_short = p.one_cta && row.len <= CtaTopK<LONG>::MOST;
    const Entries entries(row, slices);
    if (is_short || entries.places > 0) {
        if (cluster_rank() != 0) return;
        CtaTopK<LONG> top(shared.one_cta, is_short ? row.len : entries.places);
        if (is_short) {
            row.load<BYTES>(top.first, top.end(), top.x);
        } else {
#pragma unroll
            for (uint32 n = 0; n < QUADS; n++) {
                const uint32 i = top.first + n * STEP;
                top.x[n][0] = top.x[n][1] = top.x[n][2] = top.x[n][3] = 0;
                if (i < top.end()) entries.load(i, top.x[n], room[i / 4]);
            }
        }
        const uint32 *index = reinterpret_cast<const uint32 *>(room);
        uint64 *item = reinterpret_cast<uint64 *>(room + (is_short ? 0 : LONG_QUADS));
        select<BYTES, IS_ORDERED>(row, top, is_short ? row.len : entries.present, item, [&](uint32 j) { return is_short ? j : index[j]; });
        return;
    }
    const auto quads = [&](uint32 i, uint32 end, uint32 (&x)[QUADS][4]) { row.load<BYTES>(i, end, x); };
    ClusterTopK<LONG, decltype(quads)> top(shared.cluster, room, p.chunks, row.len, quads);
    top.find_threshold(row.wanted, BYTES == 4 ? 3 : 2);
    if (!IS_ORDERED) {
        if (ctas > 1) cluster_arrive();
        top.take([&](uint32 place, uint32 j) { row.write<BYTES>(place, j, UNKNOWN); });
        if (ctas > 1) cluster_wait();  // other CTAs may still read this CTA's counts
        return;
    }
    top.take([&](uint32 place, uint32 j) { row.id(place) = j; });
    if (ctas > 1) cluster_arrive(), cluster_wait();
    __syncthreads();
    if (cluster_rank() != 0) return;
    uint64 *item = reinterpret_cast<uint64 *>(room);
    for (uint32 i = threadIdx.x; i < row.wanted; i += LONG) {
        const uint32 j = __ldcg(&row.id(i));
        item[i] = item_of(sort_key(row.widen<BYTES>(row.stored<BYTES>(j))), j);
    }
    write_items<BYTES, true, LONG>(row, item);
}
