// The exact top k of the keys that a CTA has in its registers or in its shared memory.
//
// The order is that of topk.cuh. Keys are counted in bins of equal width between the CTA's least and largest key, which separates scores of a
// usual spread in one pass. The keys that share the wanted-th key's bin are candidates: where they are at most 32 they are compared, one or
// two by each warp with all others; where they are more they are counted again in bins 11 bits finer, until all keys of a bin are wanted or
// a bin is one key.
//
// Counting costs most, so keys that cannot be selected are not counted: where enough threads, or quads, have keys, the wanted-th of their
// largest keys is a lower bound of the wanted-th of all keys, and few other keys reach it.
#pragma once

#include "common/cluster_topk.cuh"

template <uint32 THREADS> struct CtaTopKShared {
    alignas(16) uint32 bin[BINS];    // 0 except while keys are counted
    uint32 candidate[WARP], candidate_index[WARP];  // keys that share the threshold's bin, and their indices
    uint32 per_warp[THREADS / WARP], also_per_warp[THREADS / WARP];
    uint32 chosen, rank, count, found, key, last;
};

// Sets the bins to 0. Called first; a barrier of the CTA follows before keys are counted.
template <uint32 THREADS> __device__ void open(CtaTopKShared<THREADS> &shared) {
    for (uint32 i = threadIdx.x; i < BINS / 4; i += THREADS) reinterpret_cast<uint4 *>(shared.bin)[i] = make_uint4(0, 0, 0, 0);
}

// Bins of 2^shift keys each, from key `base` on. All threads take part in each step.
template <uint32 THREADS> struct KeyBins {
    static constexpr uint32 WARPS = THREADS / WARP, GROUP = BINS / WARPS, OWN = GROUP / WARP;
    static_assert(WARPS <= WARP && OWN % 2 == 0);
    struct alignas(4 * OWN) Own {
        uint32 bin[OWN];
    };
    CtaTopKShared<THREADS> &shared;
    const uint32 warp, lane;
    uint32 base, shift, bins;

    __device__ explicit KeyBins(CtaTopKShared<THREADS> &shared) : shared(shared), warp(threadIdx.x / WARP), lane(threadIdx.x % WARP), base(0), shift(0), bins(BINS) {}

    __device__ void spread(uint32 low, uint32 high) {
        const uint32 bits = 32 - __clz(high - low);
        base = low, shift = bits > LOG_BINS ? bits - LOG_BINS : 0, bins = BINS;
    }
    // Spreads the bins from the least to the largest key of all threads. Returns the largest.
    __device__ uint32 spread_over(uint32 least, uint32 most) {
        least = __reduce_min_sync(FULL_WARP, least), most = __reduce_max_sync(FULL_WARP, most);
        if (lane == 0) shared.per_warp[warp] = least, shared.also_per_warp[warp] = most;
        __syncthreads();
        least = __reduce_min_sync(FULL_WARP, shared.per_warp[lane % WARPS]), most = __reduce_max_sync(FULL_WARP, shared.also_per_warp[lane % WARPS]);
        spread(least, most);
        return most;
    }
    __device__ void count(uint32 key) {
        if (key >= base && (key - base >> shift) < bins) atomicAdd(&shared.bin[key - base >> shift], 1u);
    }
    // Finds the bin of the wanted-th largest counted key (shared.chosen); the key is the rank-th of the `count` keys in it. Each warp has a group
    // of bins.
    __device__ void choose(uint32 wanted) {
        __syncthreads();
        const uint32 first = warp * GROUP + (WARP - 1 - lane) * OWN;  // lane 0 has the warp's last bins
        Own &here = *reinterpret_cast<Own *>(shared.bin + first);
        const auto [own] = here;
        uint32 sum = 0;
        here = {};
#pragma unroll
        for (uint32 i = 0; i < OWN; i++) sum += own[i];
        const uint32 through = warp_inclusive_sum(sum);
        if (lane == WARP - 1) shared.per_warp[warp] = through;
        if (threadIdx.x == 0) shared.found = 0;
        __syncthreads();
        uint32 above = __reduce_add_sync(FULL_WARP, lane > warp && lane < WARPS ? shared.per_warp[lane % WARPS] : 0) + through - sum;
        if (above < wanted && wanted <= above + sum) {
#pragma unroll
            for (uint32 i = OWN; i-- > 0;) {
                if (above < wanted && wanted <= above + own[i]) shared.chosen = first + i, shared.rank = wanted - above, shared.count = own[i];
                above += own[i];
            }
        }
        __syncthreads();
    }
    // Narrows to the chosen bin.
    __device__ void narrow() {
        base += shared.chosen << shift;
        bins = 1u << min(shift, LOG_BINS), shift -= min(shift, LOG_BINS);
    }
};

// Adds x to *p in shared memory. For atomicAdd the compiler would first add up the warp's values, which takes longer where few lanes take part.
__device__ inline uint32 add_in_one_lane(uint32 *p, uint32 x) {
    uint32 before;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(shared_address(p)), "r"(x) : "memory");
    return before;
}

// Each warp has neighbouring keys: COUNT quads a lane in registers, STEP keys apart, or for COUNT = 0 any number in shared memory.
template <uint32 THREADS, uint32 COUNT = QUADS> struct CtaTopK {
    static constexpr uint32 WARPS = THREADS / WARP, MOST = WARPS * COUNT * STEP, BATCH = COUNT == 0 || COUNT > 4 ? 4 : COUNT;
    using QuadBatch = uint32[BATCH][4];
    KeyBins<THREADS> bins;
    const uint32 count, span, first;  // keys of the CTA, keys of a warp, this lane's first key
    const uint32 *const shared_keys;  // keys in shared memory
    uint32 x[COUNT ? COUNT : 1][4];   // the quads from first + n · STEP on; 0 where there is no key
    uint32 key, last, place;          // keys above `key` are selected, and those that equal it before index `last`; earlier warps have `place` of them

    __device__ CtaTopK(CtaTopKShared<THREADS> &shared, uint32 count, const uint32 *shared_keys = nullptr)
        : bins(shared), count(count), span(span_of(count, WARPS)), first(bins.warp * span + 4 * bins.lane), shared_keys(shared_keys), key(0), last(0),
          place(0) {}

    // The end of this warp's keys.
    __device__ uint32 end() const { return min((bins.warp + 1) * span, count); }

    // Loads a quad from shared memory, where the number of keys is a multiple of four.
    __device__ void load_shared(uint32 n, uint32 (&four)[4]) const {
        uint4 keys = make_uint4(0, 0, 0, 0);
        if (first + n * STEP < end()) keys = *reinterpret_cast<const uint4 *>(shared_keys + first + n * STEP);
        four[0] = keys.x, four[1] = keys.y, four[2] = keys.z, four[3] = keys.w;
    }
    __device__ void load() {
        if constexpr (COUNT > 0) {
#pragma unroll
            for (uint32 n = 0; n < COUNT; n++) load_shared(n, x[n]);
        }
    }

    // Calls use(n, x) for each batch of quads; n is the number of its first.
    template <typename Use> __device__ void each_batch(const Use &use) const {
        if constexpr (COUNT > 0) {
#pragma unroll
            for (uint32 n = 0; n < COUNT; n += BATCH)
                if (n * STEP < span) use(n, reinterpret_cast<const QuadBatch &>(x[n]));
        } else {
#pragma unroll 1
            for (uint32 n = 0; n * STEP < span; n += BATCH) {
                QuadBatch candidate;
#pragma unroll
                for (uint32 m = 0; m < BATCH; m++) load_shared(n + m, candidate[m]);
                use(n, candidate);
            }
        }
    }
    // Calls use(quad, j) for each quad of this thread; its first key is key j of the CTA, and some of its keys may be 0.
    template <typename Use> __device__ void each_quad(const Use &use) const {
        each_batch([&](uint32 n, const QuadBatch &candidate) {
#pragma unroll
            for (uint32 m = 0; m < BATCH; m++) {
                if ((n + m) * STEP >= span) break;
                use(candidate[m], first + (n + m) * STEP);
            }
        });
    }
    // Calls use(key, j) for each key of this thread.
    template <typename Use> __device__ void each(const Use &use) const {
        each_quad([&](const uint32 (&quad)[4], uint32 j) {
#pragma unroll
            for (uint32 i = 0; i < 4; i++) use(quad[i], j + i);
        });
    }
    __device__ static uint32 largest(const uint32 (&quad)[4]) { return max(max(quad[0], quad[1]), max(quad[2], quad[3])); }

    // Finds the threshold of the `wanted` best of `present` keys, at least one. Keys adjoin except for gaps inside quads.
    __device__ void find_threshold(uint32 wanted, uint32 present) {
        CtaTopKShared<THREADS> &shared = bins.shared;
        uint32 low = 1, shift = 0, count = wanted;  // of the bin that holds the threshold
        if (wanted < present) {
            spread(wanted, present);
#pragma unroll 1
            for (;;) {
                each([&](uint32 key, uint32) { bins.count(key); });
                bins.choose(wanted);
                wanted = shared.rank, count = shared.count;
                if (count == wanted || count <= WARP || bins.shift == 0) break;
                bins.narrow();
            }
            low = bins.base + (shared.chosen << bins.shift), shift = bins.shift;
        }
        const bool are_all_in = count == wanted, are_compared = !are_all_in && count <= WARP;
        // Keys in the threshold's bin count as 1 << 16, unless all of them are selected.
        const uint32 high = are_all_in ? low - 1 : low + min((1u << shift) - 1, ~low);
        uint32 both = 0;
        each([&](uint32 key, uint32) { both += key > high ? 1 : key >= low ? 1 << 16 : 0; });
        const bool has_candidates = are_compared && both >> 16 != 0;
        uint32 n = 0;
        if (has_candidates) n = add_in_one_lane(&shared.found, both >> 16);
        both = __reduce_add_sync(FULL_WARP, both);
        if (bins.lane == 0) shared.per_warp[bins.warp] = both;
        if (has_candidates) {
            each([&](uint32 key, uint32 j) {
                if (key >= low && key <= high) shared.candidate[n] = key, shared.candidate_index[n++] = j;
            });
        }
        __syncthreads();
        const uint32 before = __reduce_add_sync(FULL_WARP, bins.lane < bins.warp ? shared.per_warp[bins.lane % WARPS] : 0);
        key = low - 1, last = 0, place = before & 0xffff;
        if (are_compared)
            compare(count, wanted);
        else if (!are_all_in)
            take_equal(low, before >> 16, both >> 16, wanted);
    }
    // Spreads the bins so that keys which cannot be selected are not counted, where that pays.
    __device__ void spread(uint32 wanted, uint32 present) {
        const bool by_lane = span > STEP && 2 * wanted * (span / WARP) <= present;
        const bool by_quad = span > STEP && !by_lane && 2 * wanted <= present / 4;
        uint32 least = ~0u, most = 0;
        each_quad([&](const uint32 (&quad)[4], uint32) {
            const uint32 largest = CtaTopK::largest(quad);
            most = max(most, largest);
            // Key 0, which stands for none, wraps round to the largest value.
            least = min(least, by_quad ? largest - 1 : min(min(quad[0] - 1, quad[1] - 1), min(quad[2] - 1, quad[3] - 1)));
        });
        if (by_lane) least = most - 1;
        const uint32 largest = bins.spread_over(max(least, least + 1), most);  // a thread without keys keeps ~0
        if (!by_lane && !by_quad) return;
        if (by_lane) bins.count(most);
        if (by_quad) each_quad([&](const uint32 (&quad)[4], uint32) { bins.count(CtaTopK::largest(quad)); });
        bins.choose(wanted);
        bins.spread(bins.base + (bins.shared.chosen << bins.shift), largest);
    }
    // The wanted-th candidate is the last that is selected. A warp takes every WARPS-th candidate and counts, with a lane for each candidate, how
    // many come before it.
    __device__ void compare(uint32 candidate, uint32 wanted) {
        CtaTopKShared<THREADS> &shared = bins.shared;
        const uint32 lane = bins.lane, mine = lane < candidate ? shared.candidate[lane] : 0, at = lane < candidate ? shared.candidate_index[lane] : ~0u;
        uint2 other[WARP / WARPS];
#pragma unroll
        for (uint32 n = 0; n < WARP / WARPS; n++)
            other[n] = make_uint2(shared.candidate[bins.warp + n * WARPS], shared.candidate_index[bins.warp + n * WARPS]);
#pragma unroll
        for (uint32 n = 0; n < WARP / WARPS; n++) {
            const uint32 before = __popc(__ballot_sync(FULL_WARP, mine > other[n].x - (at < other[n].y)));
            if (bins.warp + n * WARPS < candidate && before == wanted - 1 && lane == 0) shared.key = other[n].x, shared.last = other[n].y + 1;
        }
        __syncthreads();
        key = shared.key, last = shared.last;
        place += __popc(__ballot_sync(FULL_WARP, is_in(mine, at) & (at < bins.warp * span)));
    }
    // Whether x, the j-th key, is selected.
    __device__ bool is_in(uint32 x, uint32 j) const { return x > key - (j < last); }  // no key lies before index 0
    // Selects the first `wanted` of the keys that equal `low`, of which this warp has `own` and earlier warps `earlier`.
    __device__ void take_equal(uint32 low, uint32 earlier, uint32 own, uint32 wanted) {
        key = low, last = earlier + own <= wanted ? ~0u : 0, place += min(earlier, wanted);
        if (earlier >= wanted || last != 0) return;
        uint32 found = 0, left = wanted - earlier;
        each_quad([&](const uint32 (&quad)[4], uint32 j) {
            uint32 equal = 0;
#pragma unroll
            for (uint32 i = 0; i < 4; i++) equal += quad[i] == low;
            const uint32 through = warp_inclusive_sum(equal);
            uint32 rank = through - equal;
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                if (quad[i] != low) continue;
                if (++rank == left) found = j + i + 1;
            }
            left -= min(left, __shfl_sync(FULL_WARP, through, WARP - 1));
        });
        last = __reduce_max_sync(FULL_WARP, found);
    }

    // Calls emit(place, j, key), ascending, for each selected key.
    template <typename Emit> __device__ void take(const Emit &emit) const {
        uint32 next = place;
        each_batch([&](uint32 n, const QuadBatch &candidate) {
            // `numbers` packs four counts of selected keys, each at most 128 over the warp; a lane's keys have neighbouring places.
            uint32 in = 0, numbers = 0;
#pragma unroll
            for (uint32 m = 0; m < BATCH; m++) {
                const uint32 j = first + (n + m) * STEP;
                if ((n + m) * STEP >= span) break;
#pragma unroll
                for (uint32 i = 0; i < 4; i++)
                    if (is_in(candidate[m][i], j + i)) in |= 1 << 4 * m + i, numbers += 1 << 8 * m;
            }
            if (!__any_sync(FULL_WARP, in)) return;
            const uint32 through = warp_inclusive_sum(numbers), all = __shfl_sync(FULL_WARP, through, WARP - 1), before = through - numbers;
#pragma unroll
            for (uint32 m = 0; m < BATCH; m++) {
                if ((n + m) * STEP >= span) break;
                uint32 at = next + (before >> 8 * m & 0xff);
#pragma unroll
                for (uint32 i = 0; i < 4; i++)
                    if (in >> 4 * m + i & 1) emit(at++, first + (n + m) * STEP + i, candidate[m][i]);
                next += all >> 8 * m & 0xff;
            }
        });
    }
};
