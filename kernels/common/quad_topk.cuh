// The exact top k of a row of scores in shared memory that is short enough for the registers of a CTA.
//
// Order and bins are those of topk.cuh. Each pass goes over registers, with five barriers in all: what a row waits for is latency, not
// work. Each warp compares for itself the scores that share the wanted-th largest score's bin. Where they are more than 32, the row is left
// to TopK.
#pragma once

#include "common/topk.cuh"

// A warp has QUADS · 4 · WARP neighbouring scores. A lane's quads are 4 · WARP scores apart.
template <uint32 QUADS> struct QuadTopK {
    static constexpr uint32 STEP = 4 * WARP, SPAN = QUADS * STEP, MOST = TOPK_WARPS * SPAN;
    static constexpr uint32 MOST_CANDIDATES = WARP;  // a lane compares one
    static_assert(MOST_CANDIDATES <= CANDIDATES);
    TopKShared &shared;
    const uint32 warp, lane, first;  // first: this lane's first score
    float x[QUADS][4];

    // Called by all threads of the CTA, as all that follows. There are at most MOST scores.
    __device__ QuadTopK(TopKShared &shared, const SharedScores &scores)
        : shared(shared), warp(threadIdx.x / WARP), lane(threadIdx.x % WARP), first(warp * SPAN + 4 * lane) {
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            const uint32 i = first + n * STEP, count = scores.count;
            const float4 four = i < count ? scores.four(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            x[n][0] = i < count ? four.x : absent_score(), x[n][1] = i + 1 < count ? four.y : absent_score();
            x[n][2] = i + 2 < count ? four.z : absent_score(), x[n][3] = i + 3 < count ? four.w : absent_score();
        }
    }

    // Calls use(n, i) for each of the lane's scores x[n][i].
    template <typename Use> __device__ static void each(const Use &use) {
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
#pragma unroll
            for (uint32 i = 0; i < 4; i++) use(n, i);
        }
    }

    // Calls emit(place, i), ascending, for each of the `wanted` largest scores; at least one is wanted, and not all. Bins were set to 0 before
    // the last barrier. Returns false, with bins at 0 again, where too many scores share a bin.
    template <typename Emit> __device__ bool take(uint32 wanted, const Emit &emit) {
        const Bins bins = range();
        each([&](uint32 n, uint32 i) {
            if (x[n][i] == x[n][i]) atomicAdd(&shared.bin[bins.of(x[n][i])], 1u);
        });
        choose_bin(shared, wanted);
        const uint32 chosen = shared.chosen, rank = shared.rank, candidates = shared.count;
        if (candidates > MOST_CANDIDATES) return false;
        // Floats compare as bins do, without a conversion.
        const float begin = chosen, end = chosen == TOPK_BINS - 1 ? absent_score() : begin + 1.0f;
        uint32 above = 0;
        each([&](uint32 n, uint32 i) {
            const float position = bins.position(x[n][i]);
            const bool is_above = position >= end;
            above += is_above;
            if (is_above || !(position >= begin) || x[n][i] != x[n][i]) return;
            const uint32 at = atomicAdd(&shared.found, 1u);
            shared.candidate[at] = x[n][i], shared.index[at] = first + n * STEP + i;
        });
        above = __reduce_add_sync(FULL_WARP, above);
        if (lane == 0) shared.per_warp[warp] = above;
        __syncthreads();
        uint32 place = sum_before(shared.per_warp);
        const Threshold threshold = threshold_in_bin(candidates, rank, place);
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            bool is_in[4];
            uint32 before = 0, all = 0;
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                is_in[i] = threshold.takes(x[n][i], first + n * STEP + i);
                const uint32 mask = __ballot_sync(FULL_WARP, is_in[i]);
                before += __popc(mask & ((1u << lane) - 1)), all += __popc(mask);
            }
            uint32 at = place + before;
#pragma unroll
            for (uint32 i = 0; i < 4; i++)
                if (is_in[i]) emit(at++, first + n * STEP + i);
            place += all;
        }
        return true;
    }

    // Bins over the range of the finite scores.
    __device__ Bins range() const {
        if (threadIdx.x == 0) shared.found = 0;
        const float infinity = -minus_infinity();
        float low = infinity, high = -infinity;
        each([&](uint32 n, uint32 i) { low = fminf(low, x[n][i] > -infinity ? x[n][i] : infinity), high = fmaxf(high, x[n][i]); });
        return score_range(shared, low, high);
    }
    // The threshold is the rank-th of the candidates. Adds the selected candidates of earlier warps to `place`.
    __device__ Threshold threshold_in_bin(uint32 candidates, uint32 rank, uint32 &place) const {
        const float mine = lane < candidates ? shared.candidate[lane] : absent_score();
        const uint32 index = lane < candidates ? shared.index[lane] : ~0u;
        uint32 before = 0;
#pragma unroll 1
        for (uint32 n = 0; n < candidates; n++) {
            const float other = shared.candidate[n];
            before += other > mine || (other == mine && shared.index[n] < index);
        }
        place += __popc(__ballot_sync(FULL_WARP, lane < candidates && before < rank && index < warp * SPAN));
        const uint32 last = __ffs(__ballot_sync(FULL_WARP, lane < candidates && before == rank - 1)) - 1;
        return {__shfl_sync(FULL_WARP, mine, last), __shfl_sync(FULL_WARP, index, last)};
    }
};
