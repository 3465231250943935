// The exact top k of the keys that a CTA has in its registers, sixteen for each thread.
//
// Order is that of topk.cuh. Keys are counted in bins of equal width between the least and the largest at hand, which tells scores of a usual
// spread apart at once; what shares the bin of the wanted-th is counted again, 11 bits finer, until all of a bin is wanted or it is one key.
//
// Counting costs most. So keys that cannot be among the wanted are not counted: where that many threads have keys, or quads, the wanted-th of
// their largest bounds the wanted-th of all from below, and little else is above it.
#pragma once

#include "common/cluster_topk.cuh"

template <uint32 THREADS> struct CtaTopKShared {
    alignas(16) uint32 bin[BINS];  // 0 but while counting
    uint32 of_warp[THREADS / WARP], also_of_warp[THREADS / WARP];
    uint32 chosen, rank, count;
};

// Before all else; a barrier of the CTA follows before keys are counted.
template <uint32 THREADS> __device__ void open(CtaTopKShared<THREADS> &shared) {
    for (uint32 i = threadIdx.x; i < BINS / 4; i += THREADS) reinterpret_cast<uint4 *>(shared.bin)[i] = make_uint4(0, 0, 0, 0);
}

// Of 2^shift keys each, from `base` on. All threads take part in each step.
template <uint32 THREADS> struct KeyBins {
    static constexpr uint32 WARPS = THREADS / WARP, GROUP = BINS / WARPS, OWN = GROUP / WARP;
    static_assert(WARPS <= WARP && OWN % 2 == 0);
    CtaTopKShared<THREADS> &shared;
    const uint32 warp, lane;
    uint32 base, shift, bins;

    __device__ explicit KeyBins(CtaTopKShared<THREADS> &shared) : shared(shared), warp(threadIdx.x / WARP), lane(threadIdx.x % WARP), base(0), shift(0), bins(BINS) {}

    __device__ void spread(uint32 low, uint32 high) {
        const uint32 bits = 32 - __clz(high - low);
        base = low, shift = bits > LOG_BINS ? bits - LOG_BINS : 0, bins = BINS;
    }
    // From the least to the largest of what the threads have; the largest is returned.
    __device__ uint32 spread_over(uint32 least, uint32 most) {
        least = __reduce_min_sync(FULL_WARP, least), most = __reduce_max_sync(FULL_WARP, most);
        if (lane == 0) shared.of_warp[warp] = least, shared.also_of_warp[warp] = most;
        __syncthreads();
        least = __reduce_min_sync(FULL_WARP, shared.of_warp[lane % WARPS]), most = __reduce_max_sync(FULL_WARP, shared.also_of_warp[lane % WARPS]);
        spread(least, most);
        return most;
    }
    __device__ void count(uint32 key) {
        if (key >= base && (key - base >> shift) < bins) atomicAdd(&shared.bin[key - base >> shift], 1u);
    }
    // The bin of the wanted-th largest that was counted: shared.chosen. It is the rank-th of the `count` there. A warp has a group of bins.
    __device__ void choose(uint32 wanted) {
        __syncthreads();
        const uint32 first = warp * GROUP + (WARP - 1 - lane) * OWN;  // from the top: lane 0 has the last
        uint32 own[OWN], sum = 0;
#pragma unroll
        for (uint32 i = 0; i < OWN; i++) own[i] = shared.bin[first + i], sum += own[i], shared.bin[first + i] = 0;
        const uint32 through = warp_inclusive_sum(sum);
        if (lane == WARP - 1) shared.of_warp[warp] = through;
        __syncthreads();
        uint32 above = __reduce_add_sync(FULL_WARP, lane > warp && lane < WARPS ? shared.of_warp[lane % WARPS] : 0) + through - sum;
        if (above < wanted && wanted <= above + sum) {
#pragma unroll
            for (uint32 i = OWN; i-- > 0;) {
                if (above < wanted && wanted <= above + own[i]) shared.chosen = first + i, shared.rank = wanted - above, shared.count = own[i];
                above += own[i];
            }
        }
        __syncthreads();
    }
    // Into the bin that was chosen.
    __device__ void narrow() {
        base += shared.chosen << shift;
        bins = 1u << min(shift, LOG_BINS), shift -= min(shift, LOG_BINS);
    }
};

// A warp has neighbouring keys, STEP for each of its quads.
template <uint32 THREADS> struct CtaTopK {
    static constexpr uint32 WARPS = THREADS / WARP, MOST = WARPS * CHUNK;
    KeyBins<THREADS> bins;
    const uint32 count, span, first;  // keys of all, of a warp; this lane's first
    uint32 x[QUADS][4];                // from each of first + n · STEP on; 0 where there is none
    uint32 base, shift, ties;          // keys above the bin are in, and the first `ties` of those in it

    __device__ CtaTopK(CtaTopKShared<THREADS> &shared, uint32 count)
        : bins(shared), count(count), span(span_of(count, WARPS)), first(bins.warp * span + 4 * bins.lane), base(0), shift(0), ties(0) {}

    // This warp's keys end here.
    __device__ uint32 end() const { return min((bins.warp + 1) * span, count); }

    // Use(key) of each that this thread has; some are 0.
    template <typename Use> __device__ void each(const Use &use) const {
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            if (n * STEP >= span) break;
#pragma unroll
            for (uint32 i = 0; i < 4; i++) use(x[n][i]);
        }
    }

    // Below the `wanted` best of `present` keys, of which each quad has one at least. One at least is wanted.
    __device__ void cut(uint32 wanted, uint32 present) {
        if (wanted >= present) {
            __syncthreads();
            return;
        }
        const bool by_lane = span > STEP && 2 * wanted <= count / (span / WARP), by_quad = span > STEP && !by_lane && 2 * wanted <= count / 4;
        uint32 of_quad[QUADS], least = ~0u, most = 0;
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            of_quad[n] = max(max(x[n][0], x[n][1]), max(x[n][2], x[n][3]));
            most = max(most, of_quad[n]), least = min(least, of_quad[n] - 1);  // 0 is the last
        }
        if (by_lane) least = most - 1;
        if (!by_lane && !by_quad) each([&](uint32 key) { least = min(least, key - 1); });
        const uint32 largest = bins.spread_over(max(least, least + 1), most);  // ~0 of a thread without keys stays
        if (by_lane || by_quad) {
            if (by_lane) bins.count(most);
#pragma unroll
            for (uint32 n = 0; n < QUADS; n++)
                if (by_quad) bins.count(of_quad[n]);
            bins.choose(wanted);
            bins.spread(bins.base + (bins.shared.chosen << bins.shift), largest);
        }
#pragma unroll 1
        for (;;) {
            each([&](uint32 key) { bins.count(key); });
            bins.choose(wanted);
            wanted = bins.shared.rank;
            if (bins.shared.count == wanted || bins.shift == 0) break;
            bins.narrow();
        }
        base = bins.base + (bins.shared.chosen << bins.shift), shift = bins.shift, ties = wanted;
    }

    // Of a key: 1 where it is above the cut, 1 << 16 where it is at it.
    __device__ uint32 classify(uint32 key) const { return key < base ? 0 : key - base >> shift ? 1 : 1 << 16; }

    // emit(place, j, key), ascending, for each that is in.
    template <typename Emit> __device__ void take(const Emit &emit) {
        const uint32 warp = bins.warp, lane = bins.lane;
        uint32 both = 0;
        each([&](uint32 key) { both += classify(key); });
        const uint32 own = both;
        uint32 above = __reduce_add_sync(FULL_WARP, both & 0xffff), equal = __reduce_add_sync(FULL_WARP, both >> 16);
        if (lane == 0) bins.shared.of_warp[warp] = above, bins.shared.also_of_warp[warp] = equal;
        __syncthreads();
        if (!__any_sync(FULL_WARP, own)) return;
        above = __reduce_add_sync(FULL_WARP, lane < warp ? bins.shared.of_warp[lane % WARPS] : 0);
        equal = __reduce_add_sync(FULL_WARP, lane < warp ? bins.shared.also_of_warp[lane % WARPS] : 0);
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            if (n * STEP >= span) break;
            uint32 of[4], sum = 0;
#pragma unroll
            for (uint32 i = 0; i < 4; i++) of[i] = classify(x[n][i]), sum += of[i];
            if (!__any_sync(FULL_WARP, sum)) continue;
            const uint32 through = warp_inclusive_sum(sum);
            // Those that are in have neighbouring places.
            uint32 earlier = equal + (through - sum >> 16), place = above + (through - sum & 0xffff) + min(earlier, ties);
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                if (of[i] == 1 || (of[i] > 1 && earlier < ties)) emit(place++, first + n * STEP + i, x[n][i]);
                earlier += of[i] >> 16;
            }
            const uint32 all = __shfl_sync(FULL_WARP, through, WARP - 1);
            above += all & 0xffff, equal += all >> 16;
        }
    }
};
