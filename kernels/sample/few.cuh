// The filters of a row of which few candidates are at hand: the same bits as of filter.cuh, by fewer steps.
//
// Each thread has a strip of the row. Its numbers from a guess on are the candidates; some lanes for each of them find how many candidates, and what mass, are
// not below it. The bounds of top-k and of top-p are then the largest candidates that have what is wanted. What they keep is summed by a thread for each
// strip, and a warp draws from that.
#pragma once

#include "common/sampling.cuh"

// What stays of strips, where the CTA had its segments.
struct FewShared {
    static constexpr uint32 MOST = DRAW_THREADS;  // strips, and candidates
    float number[STRIP][MOST];  // without what is dropped
    uint64 sum[MOST];
    uint32 first[MOST];         // the first token of each strip
};

struct Few {
    // What is cleared early.
    struct Words {
        static constexpr uint32 SEGMENTS = MOST_ROW_SEGMENTS;
        alignas(16) uint32 key[FewShared::MOST];  // of candidates; 0 past the last one
        uint32 largest[SEGMENTS];                 // keys of what stays, 0 where nothing does
        uint32 low[SEGMENTS], high[SEGMENTS];     // sums: the lowest 24 bits and the others, as a CTA adds words faster than 64 bits
        uint64 mass[DRAW_WARPS];
        uint32 bound[2][DRAW_WARPS];
        uint32 count;

        // A barrier follows before any thread uses them.
        __device__ void clear() {
            key[threadIdx.x] = 0;
            if (threadIdx.x < SEGMENTS) largest[threadIdx.x] = low[threadIdx.x] = high[threadIdx.x] = 0;
            if (threadIdx.x == 0) count = 0;
        }
    };

    FewShared &shared;  // until decide() the segments are there
    Words &words;
    uint64 *has;        // the mass of each candidate, and 2^52 for itself
    Kept &kept;
    Scale scale;
    uint32 k;
    float p;

    // Notes the candidates, the numbers from the key `from` on that min-p keeps, and says how many there are. Each thread has a strip, or none.
    __device__ uint32 collect(uint32 from, bool has_strip, const float (&x)[STRIP]) {
        take_candidates(from, has_strip, x);
        __syncthreads();
        return words.count;
    }
    // Gives `found` its bound, its total, and its token by a random number, which thread 0 then knows. `count` candidates, of which there is room for all, are k or
    // more, or all that stay; x is the thread's strip, which begins with token `first`. Strips ascend with threads.
    __device__ void decide(const Source &source, SegmentRecord *records, uint64 number, uint32 count, bool has_strip, float (&x)[STRIP], uint32 first,
                           RowRecord &found) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        find_bound(count);
        found.bound = kept.bound;
        // What stays of the strip.
        uint32 best = 0;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) {
            if (kept.drops(x[e])) x[e] = minus_infinity();
            shared.number[e][threadIdx.x] = x[e];
            best = max(best, key_of(x[e]));
        }
        const uint32 s = first / SEGMENT;
        const bool stays = has_strip && best > key_of(minus_infinity());
        if (stays) atomicMax(&words.largest[s], best);
        shared.first[threadIdx.x] = first;
        __syncthreads();
        const uint64 sum = stays ? scale.sum(x, number_of(words.largest[s])) : 0;
        shared.sum[threadIdx.x] = sum;
        if (stays) {
            atomicAdd(&words.low[s], uint32(sum) & 0xffffff);
            atomicAdd(&words.high[s], uint32(sum >> 24));
        }
        __syncthreads();
        if (warp) return;
        for (uint32 n = lane; n < source.segments(); n += WARP) {
            const uint32 key = words.largest[n];
            records[n] = {key ? number_of(key) : minus_infinity(), 0, (uint64(words.high[n]) << 24) + words.low[n], 0, 0};
        }
        __syncwarp();
        LaneShare own;
        const RowRecord row = sum_row(source, record_of_lane(records, source.segments()), records, false, false, own);
        found.total = row.total;
        const Drawn drawn = find_segment(source, records, {row.largest, row.total}, own, number);
        found.token = draw(drawn);
    }

private:
    __device__ uint64 mass_of(float x) const { return __float2ull_rz(__fmul_rn(kept.scale.weight(x, kept.largest), ONE)); }

    __device__ void take_candidates(uint32 from, bool has_strip, const float (&x)[STRIP]) {
        const uint32 lane = threadIdx.x % WARP;
        if (!__any_sync(FULL_WARP, has_strip)) return;
        uint32 with[STRIP], all = 0, mine = 0;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) {
            const bool is_one = has_strip && key_of(x[e]) >= from && !kept.drops(x[e]);
            with[e] = __ballot_sync(FULL_WARP, is_one);
            all += __popc(with[e]), mine |= uint32(is_one) << e;
        }
        uint32 at = 0;
        if (lane == 0) at = atomicAdd(&words.count, all);
        at = __shfl_sync(FULL_WARP, at, 0);
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) {
            const uint32 place = at + __popc(with[e] & ((1u << lane) - 1));
            at += __popc(with[e]);
            if (!(mine >> e & 1) || place >= FewShared::MOST) continue;
            words.key[place] = key_of(x[e]);
            has[place] = mass_of(x[e]) + (uint64(1) << 52);
        }
    }
    // Sets the bound of top-k and top-p. What lanes find is the same in all warps.
    __device__ void find_bound(uint32 count) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        uint32 lanes = 1;
        while (lanes < WARP && count * lanes * 2 <= DRAW_THREADS) lanes *= 2;
        const uint32 own = threadIdx.x / lanes, mine = own < count ? words.key[own] : 0xffffffffu;
        uint64 not_below = 0;
#pragma unroll 1
        for (uint32 n = (threadIdx.x & (lanes - 1)) * 4; n < count; n += 4 * lanes) {
            const uint4 keys = *reinterpret_cast<const uint4 *>(words.key + n);
            const ulonglong2 low = *reinterpret_cast<const ulonglong2 *>(has + n), high = *reinterpret_cast<const ulonglong2 *>(has + n + 2);
            not_below += (keys.x >= mine ? low.x : 0) + (keys.y >= mine ? low.y : 0) + (keys.z >= mine ? high.x : 0) + (keys.w >= mine ? high.y : 0);
        }
#pragma unroll 1
        for (uint32 step = 1; step < lanes; step *= 2) not_below += __shfl_xor_sync(FULL_WARP, not_below, step);
        const uint64 mass = not_below & ((uint64(1) << 52) - 1);
        const bool has_top_k = k && k <= count;
        const uint32 wanted_count = has_top_k ? k : count;
        const auto largest = [&](uint32 turn, bool suffices) {
            const uint32 best = __reduce_max_sync(FULL_WARP, suffices ? mine : 0);
            const uint32 holder = __ffs(__ballot_sync(FULL_WARP, suffices && mine == best));
            const uint64 of_best = __shfl_sync(FULL_WARP, mass, holder ? holder - 1 : 0);
            if (lane == 0) words.bound[turn][warp] = best;
            if (lane == 0 && turn == 0) words.mass[warp] = of_best;
            __syncthreads();
            return words.bound[turn][lane % DRAW_WARPS];
        };
        const uint32 of_warp = largest(0, own < count && uint32(not_below >> 52) >= wanted_count);
        uint32 bound = __reduce_max_sync(FULL_WARP, of_warp);
        const uint32 holder = __ffs(__ballot_sync(FULL_WARP, of_warp == bound)) - 1;
        const uint64 all = words.mass[holder % DRAW_WARPS];
        if (p < 1.0f) {
            const uint64 wanted = min(max(__double2ull_rz(ceil(__dmul_rn(double(fmaxf(p, 0.0f)), double(all)))), uint64(1)), all);
            bound = __reduce_max_sync(FULL_WARP, largest(1, own < count && mass >= wanted));
        }
        if (has_top_k || p < 1.0f) kept.bound = number_of(bound);
    }
    // The token for a target below its segment's sum. Called by a warp.
    __device__ uint32 draw(const Drawn &drawn) const {
        const uint32 lane = threadIdx.x % WARP;
        uint64 target = drawn.target;
#pragma unroll 1
        for (uint32 base = 0; base < FewShared::MOST; base += WARP) {
            const uint32 n = base + lane;
            const uint64 own = shared.first[n] / SEGMENT == drawn.segment ? shared.sum[n] : 0, through = warp_sum_through(own);
            const uint32 beyond = __ballot_sync(FULL_WARP, target < through);
            if (!beyond) {
                target -= __shfl_sync(FULL_WARP, through, WARP - 1);
                continue;
            }
            const uint32 owner = __ffs(beyond) - 1;
            const uint64 left = target - __shfl_sync(FULL_WARP, through - own, owner);
            float x[STRIP];
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) x[e] = shared.number[e][base + owner];
            return shared.first[base + owner] + pick_token(x, scale, drawn.largest, left);
        }
        return drawn.segment * SEGMENT;
    }
};
