// The exact top k of scores that lie in the shared memory of a cluster's CTAs, neighbouring scores in each CTA. All CTAs find the threshold
// together, and each lists its own selected scores.
//
// Scores are finite and not negative, so that their bits sort as the scores do. Each CTA counts its scores in BINS bins and sends the counts
// to all CTAs. Each CTA then knows the wanted-th largest score's bin, and how many selected scores earlier CTAs have. The scores of that
// bin go to all CTAs, and each CTA compares them for itself. Where they are more than MOST_COMPARED, they are first counted again in finer
// bins, until they are few enough, all of them are wanted, or they are equal. Of equal scores the first ones are selected. Warps take
// neighbouring scores, so that places ascend.
//
// Counts and scores travel together with their arrival (st.async). In each round every CTA awaits what all others send, and all CTAs go
// through the same number of rounds.
#pragma once

#include "common/cluster.cuh"

template <uint32 THREADS> struct ClusterThresholdShared {
    static constexpr uint32 WARPS = THREADS / WARP, BINS = THREADS, MOST_CTAS = 8, MOST_COMPARED = 2 * WARP;
    alignas(16) uint32 bin[BINS];                 // of this CTA's scores; 0 except while they are counted
    alignas(16) uint16 bins[2][MOST_CTAS][BINS];  // of each CTA's scores; two, as one may still be read while the other arrives
    alignas(16) uint32 candidate[MOST_COMPARED];  // bits of the scores in the chosen bin, those of earlier CTAs first
    uint32 per_warp[WARPS], above[2 * WARPS], equal[2 * WARPS];  // counts of each warp's scores, and of its bins in earlier CTAs
    uint32 chosen, rank, count, earlier;  // the chosen bin, the threshold's rank in it, its scores, and those of them that earlier CTAs have
    uint32 listed;                        // how many of this CTA's candidates are sent
    Barrier counted[2], sent;             // arrival of counts, and of candidates

    // Called before the cluster starts.
    __device__ void open() {
        bin[threadIdx.x] = 0;
        if (threadIdx.x < MOST_COMPARED) candidate[threadIdx.x] = 0;  // below all scores that arrive
        if (threadIdx.x == 0) listed = 0, counted[0].open(1), counted[1].open(1), sent.open(1);
    }
};

// The first bins hold 2^shift bit patterns each, from `base` on; the first and the last bin also hold all that is beyond.
template <uint32 THREADS> struct ClusterThreshold {
    using Shared = ClusterThresholdShared<THREADS>;
    static constexpr uint32 WARPS = Shared::WARPS, BINS = Shared::BINS, MOST_CTAS = Shared::MOST_CTAS, EIGHTS = BINS / 8;
    static constexpr uint32 LOG_BINS = 9, FIRST_SHIFT = 18, INFINITE = 0x7f800000;
    static_assert(BINS == 1 << LOG_BINS);
    static_assert(THREADS == MOST_CTAS * EIGHTS, "a thread sends eight bins to a CTA");
    static_assert(2 * WARPS == WARP);
    Shared &shared;
    float *const scores;            // this CTA's scores, from number `begin` on
    const uint32 cta, ctas, begin, end;  // this CTA has scores begin … end−1 of the cluster
    const uint32 from, to;          // scores from … to−1 may be selected
    const uint32 warp, lane, first, last;  // first … last−1 are this warp's scores
    uint32 base, shift;
    uint32 low, high, ties;             // scores with bits of `high` or more are selected, and the first `ties` of those from `low` on
    uint32 above_before, equal_before;  // this thread's part of the counts of both in earlier CTAs

    // The wanted-th largest score is at most 2^log_most. Each of the sixteen powers of two below it has 32 bins.
    __device__ ClusterThreshold(Shared &shared, float *scores, uint32 cta, uint32 ctas, uint32 begin, uint32 end, uint32 from, uint32 to,
                          int32 log_most)
        : shared(shared), scores(scores), cta(cta), ctas(ctas), begin(begin), end(end), from(from), to(to), warp(threadIdx.x / WARP),
          lane(threadIdx.x % WARP), first(begin + min(warp * span(), end - begin)), last(min(first + span(), end)),
          base((log_most + 127 << 23) - (BINS << FIRST_SHIFT)), shift(FIRST_SHIFT), low(0), high(INFINITE), ties(0), above_before(0),
          equal_before(0) {}

    // How many scores a warp has.
    __device__ uint32 span() const { return (end - begin + THREADS - 1) / THREADS * WARP; }
    __device__ float score(uint32 i) const { return scores[i - begin]; }

    // Counts score i if it may be selected.
    __device__ void count(uint32 i, float score) const {
        const uint32 bits = __float_as_uint(score);
        const int32 bin = min(max(int32(bits - base) >> shift, 0), int32(BINS - 1));
        if (is_counted(i, bits)) atomicAdd(&shared.bin[bin], 1u);
    }
    __device__ void put(uint32 i, float score) const {
        scores[i - begin] = score;
        count(i, score);
    }

    // Whether score i is among those that are counted.
    __device__ bool is_counted(uint32 i, uint32 bits) const { return from <= i && i < to && low <= bits && bits < high; }

    // Sends this CTA's counts to all CTAs, and awaits theirs.
    __device__ void exchange(uint32 round) const {
        __syncthreads();
        const uint32 peer = threadIdx.x / EIGHTS, eight = threadIdx.x % EIGHTS;
        Barrier &counted = shared.counted[round & 1];
        if (peer < ctas) {
            const uint4 *own = reinterpret_cast<const uint4 *>(shared.bin) + 2 * eight, low = own[0], high = own[1];
            const uint4 of = make_uint4(low.x | low.y << 16, low.z | low.w << 16, high.x | high.y << 16, high.z | high.w << 16);
            send_four(peer, &shared.bins[round & 1][cta][8 * eight], of, counted);
        }
        if (threadIdx.x == 0) counted.expect(ctas * BINS * 2);
        counted.wait(round / 2);
    }
    // Finds the bin of the wanted-th largest counted score (shared.chosen); the score is the rank-th largest of the `count` in it.
    __device__ void choose(uint32 round, uint32 wanted) {
        uint32 own = 0, earlier = 0;
#pragma unroll
        for (uint32 c = 0; c < MOST_CTAS; c++) {
            const uint32 of = c < ctas ? shared.bins[round & 1][c][threadIdx.x] : 0;
            own += of, earlier += c < cta ? of : 0;
        }
        uint32 through = own;  // sum of this bin and the later ones
#pragma unroll
        for (uint32 step = 1; step < WARP; step *= 2) {
            const uint32 other = __shfl_down_sync(FULL_WARP, through, step);
            if (lane + step < WARP) through += other;
        }
        if (lane == 0) shared.per_warp[warp] = through;
        __syncthreads();
        shared.bin[threadIdx.x] = 0;  // all threads have sent their bins
        const uint32 above = __reduce_add_sync(FULL_WARP, lane > warp && lane < WARPS ? shared.per_warp[lane % WARPS] : 0) + through - own;
        if (above < wanted && wanted <= above + own)
            shared.chosen = threadIdx.x, shared.rank = wanted - above, shared.count = own, shared.earlier = earlier;
        __syncthreads();
        above_before += threadIdx.x > shared.chosen ? earlier : 0;
        equal_before = threadIdx.x == shared.chosen ? earlier : 0;
    }
    // The scores of the chosen bin go to all CTAs; the `ties`-th largest of them is the last that is selected. Each warp finds it.
    __device__ void compare() {
        const uint32 candidate = shared.count, before = shared.earlier;
        if (threadIdx.x == 0) shared.sent.expect(candidate * 4);
#pragma unroll 1
        for (uint32 i = first + lane; i - lane < last; i += WARP) {
            const uint32 bits = i < last ? __float_as_uint(score(i)) : 0;
            uint32 mask = __ballot_sync(FULL_WARP, i < last && is_counted(i, bits)), place = before;
            if (mask == 0) continue;
            if (lane == 0) place += atomicAdd(&shared.listed, uint32(__popc(mask)));
            place = __shfl_sync(FULL_WARP, place, 0);
            for (; mask != 0; mask &= mask - 1, place++) {
                const uint32 one = __shfl_sync(FULL_WARP, bits, __ffs(mask) - 1);
                if (lane < ctas) send_word(lane, &shared.candidate[place], one, shared.sent);
            }
        }
        shared.sent.wait(0);
        const uint32 own[2] = {shared.candidate[lane], shared.candidate[WARP + lane]};  // 0 where there is no candidate
        uint32 larger[2] = {0, candidate <= WARP ? candidate : 0};  // a lane mostly has one candidate
#pragma unroll 1
        for (uint32 i = 0; i < candidate; i += 8) {
            uint32 of[8];
#pragma unroll
            for (uint32 n = 0; n < 8; n += 4) {
                const uint4 four = *reinterpret_cast<const uint4 *>(&shared.candidate[i + n]);
                of[n] = four.x, of[n + 1] = four.y, of[n + 2] = four.z, of[n + 3] = four.w;
            }
#pragma unroll
            for (uint32 n = 0; n < 8; n++) larger[0] += of[n] > own[0];
            if (candidate <= WARP) continue;
#pragma unroll
            for (uint32 n = 0; n < 8; n++) larger[1] += of[n] > own[1];
        }
        // A candidate is selected if fewer than `ties` are larger; the least of the selected ones is the threshold.
        const bool is_in[2] = {larger[0] < ties, larger[1] < ties};
        low = __reduce_min_sync(FULL_WARP, min(is_in[0] ? own[0] : INFINITE, is_in[1] ? own[1] : INFINITE)), high = low + 1;
        ties -= __reduce_max_sync(FULL_WARP, max(is_in[0] ? larger[0] : 0, is_in[1] ? larger[1] : 0));
        // Each thread counts one candidate of earlier CTAs.
        const uint32 mine = threadIdx.x < before ? shared.candidate[threadIdx.x] : 0;
        above_before += mine >= high, equal_before = threadIdx.x < before && mine == low;
    }
    // Finds the threshold of the best `wanted` of scores from … to−1, which are counted.
    __device__ void find(uint32 wanted) {
        if (wanted == 0 || wanted >= to - from) {
            __syncthreads();  // all scores are written
            if (wanted == 0) return;
            high = 0;
            if (threadIdx.x == 0) above_before = min(max(begin, from), to) - from;
            return;
        }
        ties = wanted;
#pragma unroll 1
        for (uint32 round = 0;; round++) {
            exchange(round);
            choose(round, ties);
            const uint32 chosen = shared.chosen, bottom = base + (chosen << shift);
            ties = shared.rank;
            if (chosen > 0) low = bottom;
            if (chosen < BINS - 1) high = min(high, bottom + (1u << shift));
            if (shared.count == ties || high - low == 1) break;
            if (shared.count <= Shared::MOST_COMPARED) return compare();
            base = low, shift = max(int32(32 - LOG_BINS - __clz(high - low - 1)), 0);
#pragma unroll 2
            for (uint32 i = first + lane; i < last; i += WARP) count(i, score(i));
        }
    }
    // Calls emit(place, i), ascending, for each of this CTA's selected scores.
    template <typename Emit> __device__ void take(const Emit &emit) const {
        const auto is_above = [&](uint32 i, uint32 bits) { return from <= i && i < to && bits >= high; };
        uint32 above = 0, equal = 0;
#pragma unroll 2
        for (uint32 i = first + lane; i < last; i += WARP) {
            const uint32 bits = __float_as_uint(score(i));
            above += is_above(i, bits), equal += is_counted(i, bits);
        }
        above = __reduce_add_sync(FULL_WARP, above), equal = __reduce_add_sync(FULL_WARP, equal);
        const uint32 before = __reduce_add_sync(FULL_WARP, above_before), also_before = __reduce_add_sync(FULL_WARP, equal_before);
        if (lane == 0) {
            shared.above[warp] = above, shared.equal[warp] = equal;
            shared.above[WARPS + warp] = before, shared.equal[WARPS + warp] = also_before;
        }
        __syncthreads();
        if (above + equal == 0) return;
        const bool is_earlier = lane < warp || lane >= WARPS;
        above = __reduce_add_sync(FULL_WARP, is_earlier ? shared.above[lane] : 0);
        equal = __reduce_add_sync(FULL_WARP, is_earlier ? shared.equal[lane] : 0);
        const uint32 lanes_before = (1u << lane) - 1;
#pragma unroll 2
        for (uint32 i = first + lane; i - lane < last; i += WARP) {
            const uint32 bits = i < last ? __float_as_uint(score(i)) : 0;
            const bool is_in = i < last && is_above(i, bits), is_tied = i < last && is_counted(i, bits);
            const uint32 all_in = __ballot_sync(FULL_WARP, is_in), all_tied = __ballot_sync(FULL_WARP, is_tied);
            const uint32 earlier = equal + __popc(all_tied & lanes_before);
            const uint32 place = above + __popc(all_in & lanes_before) + min(earlier, ties);
            if (is_in || (is_tied && earlier < ties)) emit(place, i);
            above += __popc(all_in), equal += __popc(all_tied);
        }
    }
};
