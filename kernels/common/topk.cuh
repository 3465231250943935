// The exact top k of one row of scores, found by one CTA; and the order that all top-k mechanisms share.
//
// Order: the larger score comes first; of equal scores (−0 equals +0) the lower index comes first; a NaN in the row stands for no score.
//
// Each mechanism finds the threshold, the wanted-th largest score or key, by counting in bins, and then emits what is at or above it in the
// order of indices. They differ in where the row lies and in how many CTAs work on it:
//
//   mechanism         row lies in                     CTAs    limit                         passes       used by
//   TopK              anywhere (a functor)            1       —                             up to 6      select_top_cta, labels_general
//                                                                                                        (blocks), index_importance,
//                                                                                                        QuadTopK's leftovers
//   QuadTopK          registers, from shared memory   1       16384 scores                  1            minmax, means (RowSink)
//   CtaTopK           registers or shared memory      1       16 keys a thread in registers up to 4      topk (short, prefilter),
//                                                                                                        axis_cluster, predictor (short),
//                                                                                                        ClusterPrefilter's leftovers
//   ClusterTopK       registers, shared memory, or    1 – 8   —                             up to 5      topk (cluster), labels_general
//                     made again for each pass                                                           (tokens), predictor (long)
//   ClusterPrefilter  shared memory of all CTAs       2 – 8   256 wanted, else leftovers    1            axis_two_launches, select_top_cluster
//   ClusterThreshold  shared memory of all CTAs       1 – 8   scores ≥ 0                    1 – 4        labels_cluster
//   topk_prefilter_*  global memory                   512     row / 16 wanted               1, a sample  topk (prefilter), then CtaTopK
//
// QuadTopK saves MINMAX 5 % of its time at 8K to 128K tokens, and up to 14 % without groups, over CtaTopK in its place (H200): bins of equal
// width in score separate scores of both signs in one pass, where keys need two.
//
// TopK: the first 2048 bins have equal width. Scores of a usual spread fall into different bins, and the few that share the wanted-th
// score's bin are compared with each other. Where more than 128 share it, the next bins hold digits of a key that sorts as scores do,
// 11 bits a pass, so that three more passes suffice for any scores. A warp takes neighbouring scores: it finds the places of its selected
// scores from the counts of the warps before it, and ids come out ascending without a sort.
#pragma once

#include "common/eight.cuh"

constexpr uint32 TOPK_THREADS = 512, TOPK_WARPS = TOPK_THREADS / WARP;
constexpr uint32 TOPK_ROOM = 8192;
constexpr uint32 LOG_TOPK_BINS = 11, TOPK_BINS = 1 << LOG_TOPK_BINS;
constexpr uint32 CANDIDATES = 128;  // most scores of a bin that are compared with each other
static_assert(TOPK_BINS == 4 * TOPK_THREADS, "a thread owns four bins");

__device__ inline float absent_score() { return __uint_as_float(0x7fc00000); }

// A key that sorts as its score does; NaN has the key of −inf.
__device__ inline uint32 sort_key(float score) {
    const uint32 bits = __float_as_uint(score == score ? score + 0.0f : minus_infinity());  // −0 + 0 is +0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The score that has the key; −inf for key 0, which no score has.
__device__ inline float score_of(uint32 key) { return key == 0 ? minus_infinity() : __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); }

// Scores above `score` are selected, and of those that equal it the ones up to index `last`.
struct Threshold {
    float score;
    uint32 last;

    __device__ bool takes(float x, uint32 i) const { return x > score || (x == score && i <= last); }
};

struct TopKShared {
    alignas(16) uint32 bin[TOPK_BINS];
    float candidate[CANDIDATES];
    uint32 index[CANDIDATES];  // of each candidate
    uint32 per_warp[TOPK_WARPS], also_per_warp[TOPK_WARPS];
    uint32 chosen, rank, count, found;
    Threshold threshold;
};

// Scores in shared memory, aligned to 16 bytes, with room for a multiple of four.
struct SharedScores {
    const float *score;
    uint32 count;

    __device__ float at(uint32 i) const { return score[i]; }
    // Scores i … i + 3, where i is a multiple of four; past the last score the value is undefined.
    __device__ float4 four(uint32 i) const { return *reinterpret_cast<const float4 *>(score + i); }
};

__device__ inline float nan_to_least(float x) { return x == x ? x : minus_infinity(); }

// The scores make(0) … make(count−1). They are cached in shared memory where they fit, and otherwise made again for each pass.
template <typename Make> struct ComputedScores {
    const Make &make;
    float *const cache;
    const uint32 count;
    const bool is_cached;

    // Called by all threads of the CTA. `cache` has room for `room` scores.
    __device__ ComputedScores(float *cache, uint32 room, uint32 count, const Make &make) : make(make), cache(cache), count(count), is_cached(count <= room) {
        if (!is_cached) return;
        constexpr uint32 AT_ONCE = 8;  // loads that a thread has in flight
#pragma unroll 1
        for (uint32 i = threadIdx.x; i < count; i += AT_ONCE * TOPK_THREADS) {
            float x[AT_ONCE];
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) x[n] = i + n * TOPK_THREADS < count ? make(i + n * TOPK_THREADS) : 0.0f;
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++)
                if (i + n * TOPK_THREADS < count) cache[i + n * TOPK_THREADS] = nan_to_least(x[n]);
        }
        __syncthreads();
    }
    __device__ float at(uint32 i) const { return is_cached ? cache[i] : nan_to_least(make(i)); }
    __device__ float one(uint32 i) const { return i < count ? nan_to_least(make(i)) : 0.0f; }
    __device__ float4 four(uint32 i) const { return is_cached ? SharedScores{cache, count}.four(i) : make_float4(one(i), one(i + 1), one(i + 2), one(i + 3)); }
};

// Bins of equal width in score from `low` on, or of 2^shift keys each from key `base` on.
struct Bins {
    float scale, offset;
    uint32 base, shift, count;
    bool is_by_score;

    __device__ Bins(float low, float high) : base(0), shift(32), count(TOPK_BINS), is_by_score(true) {
        scale = fminf(__fdividef(TOPK_BINS - 1, high - low), __uint_as_float(0x7f7fffff));
        offset = -low * scale;
    }
    // The bin of x; a larger score never has an earlier bin. A result of `count` or more means that x has none.
    __device__ uint32 of(float x) const {
        if (is_by_score) return min(__float2uint_rz(fmaf(x, scale, offset)), TOPK_BINS - 1);
        return x == x ? sort_key(x) - base >> shift : ~0u;
    }
    // Where x lies among bins by score: bin n holds positions from n to n + 1, and the last bin all that is beyond.
    __device__ float position(float x) const { return fmaxf(fmaf(x, scale, offset), 0.0f); }
    // Narrows to bins of the next digit of those keys that are in bin `chosen`.
    __device__ void narrow(uint32 chosen) {
        if (!is_by_score) base += chosen << shift;
        const uint32 bits = min(shift, LOG_TOPK_BINS);
        shift -= bits, count = 1u << bits, is_by_score = false;
    }
};

// Bins from the least to the largest finite score of the CTA, given those of each thread. All threads of the CTA take part.
__device__ inline Bins score_range(TopKShared &shared, float low, float high) {
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32 least = __reduce_min_sync(FULL_WARP, sort_key(low)), most = __reduce_max_sync(FULL_WARP, sort_key(high));
    if (lane == 0) shared.per_warp[warp] = least, shared.also_per_warp[warp] = most;
    __syncthreads();
    low = score_of(__reduce_min_sync(FULL_WARP, shared.per_warp[lane % TOPK_WARPS]));
    return Bins(low, score_of(__reduce_max_sync(FULL_WARP, shared.also_per_warp[lane % TOPK_WARPS])));
}

// The sum of of[w] over the warps w before this one.
__device__ inline uint32 sum_before(const uint32 (&of)[TOPK_WARPS]) {
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return __reduce_add_sync(FULL_WARP, lane < warp ? of[lane % TOPK_WARPS] : 0);
}

// Finds the bin of the wanted-th largest counted score (shared.chosen), and that this score is the rank-th largest of the `count` in the
// bin. All bins are 0 afterwards.
__device__ inline void choose_bin(TopKShared &shared, uint32 wanted) {
    const uint32 thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    __syncthreads();
    uint4 &mine = reinterpret_cast<uint4 *>(shared.bin)[TOPK_THREADS - 1 - thread];  // thread 0 has the last bins
    const uint4 counts = mine;
    const uint32 sum = counts.x + counts.y + counts.z + counts.w;
    const uint32 through = warp_inclusive_sum(sum);
    if (lane == WARP - 1) shared.per_warp[warp] = through;
    mine = make_uint4(0, 0, 0, 0);
    __syncthreads();
    uint32 above = sum_before(shared.per_warp) + through - sum;
    if (above < wanted && wanted <= above + sum) {
        uint32 bin = TOPK_BINS - 1 - 4 * thread, here = counts.w;
        if (above + here < wanted) above += here, bin--, here = counts.z;
        if (above + here < wanted) above += here, bin--, here = counts.y;
        if (above + here < wanted) above += here, bin--, here = counts.x;
        shared.chosen = bin, shared.rank = wanted - above, shared.count = here;
    }
    __syncthreads();
}

// `present` of the scores are no NaN. All threads of the CTA take part.
template <typename Scores> struct TopK {
    TopKShared &shared;
    const Scores &scores;
    const uint32 present, thread, warp, lane;
    const uint32 first, last;  // first … last−1 are this warp's scores

    __device__ TopK(TopKShared &shared, const Scores &scores, uint32 present)
        : shared(shared), scores(scores), present(present), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP),
          first(min(warp * span(), scores.count)), last(min(first + span(), scores.count)) {}

    __device__ uint32 span() const { return (scores.count + TOPK_THREADS - 1) / TOPK_THREADS * WARP; }

    // Calls use(score, index) for each of this thread's scores, and with a NaN for up to three places past the last.
    template <typename Use> __device__ void each(const Use &use) const {
        constexpr uint32 AT_ONCE = 2, STEP = 4 * TOPK_THREADS;  // quads that a thread reads before it uses any
#pragma unroll 1
        for (uint32 base = 4 * thread; base < scores.count; base += AT_ONCE * STEP) {
            float4 four[AT_ONCE];
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++)
                if (base + n * STEP < scores.count) four[n] = scores.four(base + n * STEP);
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                const uint32 i = base + n * STEP;
                if (i >= scores.count) break;
                if (i + 1 >= scores.count) four[n].y = absent_score();
                if (i + 2 >= scores.count) four[n].z = absent_score();
                if (i + 3 >= scores.count) four[n].w = absent_score();
                use(four[n].x, i), use(four[n].y, i + 1), use(four[n].z, i + 2), use(four[n].w, i + 3);
            }
        }
    }

    // Bins over the range of the finite scores.
    __device__ Bins find_range() const {
        reinterpret_cast<uint4 *>(shared.bin)[thread] = make_uint4(0, 0, 0, 0);
        if (thread == 0) shared.found = 0;
        const float infinity = -minus_infinity();
        float low = infinity, high = -infinity;
        each([&](float x, uint32) { low = fminf(low, x > -infinity ? x : infinity), high = fmaxf(high, x); });
        return score_range(shared, low, high);
    }

    // All bins are 0 before and afterwards.
    __device__ void choose_bin(const Bins &bins, uint32 wanted) {
        each([&](float x, uint32) {
            const uint32 bin = bins.of(x);
            if (bin < bins.count) atomicAdd(&shared.bin[bin], 1u);
        });
        ::choose_bin(shared, wanted);
    }

    // Finds the threshold by comparing the scores of the chosen bin with each other.
    __device__ Threshold threshold_in_bin(const Bins &bins) {
        const uint32 chosen = shared.chosen, rank = shared.rank;
        each([&](float x, uint32 i) {
            if (bins.of(x) != chosen || x != x) return;
            const uint32 n = atomicAdd(&shared.found, 1u);
            shared.candidate[n] = x, shared.index[n] = i;
        });
        __syncthreads();
        const uint32 found = shared.found;
        if (thread < found) {
            const float mine = shared.candidate[thread];
            const uint32 index = shared.index[thread];
            uint32 before = 0;
#pragma unroll 4
            for (uint32 n = 0; n < found; n++) {
                const float x = shared.candidate[n];
                before += x > mine || (x == mine && shared.index[n] < index);
            }
            if (before == rank - 1) shared.threshold = {mine, index};
        }
        __syncthreads();
        return shared.threshold;
    }

    // Finds the threshold that ends with the ties-th of the scores that equal `score`.
    __device__ Threshold threshold_in_ties(float score, uint32 ties) {
        uint32 equal = 0;
#pragma unroll 1
        for (uint32 i = first + lane; i < last; i += WARP) equal += scores.at(i) == score;
        equal = __reduce_add_sync(FULL_WARP, equal);
        if (lane == 0) shared.per_warp[warp] = equal;
        __syncthreads();
        uint32 before = sum_before(shared.per_warp);
#pragma unroll 1
        for (uint32 i = first + lane; i - lane < last && before < ties; i += WARP) {
            const bool is_equal = i < last && scores.at(i) == score;
            const uint32 mask = __ballot_sync(FULL_WARP, is_equal);
            if (is_equal && before + __popc(mask & ((1u << lane) - 1)) == ties - 1) shared.threshold = {score, i};
            before += __popc(mask);
        }
        __syncthreads();
        return shared.threshold;
    }

    __device__ Threshold find_threshold(uint32 wanted) {
        if (wanted == 0) return {absent_score(), 0};
        if (wanted >= present) return {minus_infinity(), ~0u};
        Bins bins = find_range();
#pragma unroll 1
        for (;;) {
            choose_bin(bins, wanted);
            if (shared.count <= CANDIDATES) return threshold_in_bin(bins);
            if (!bins.is_by_score) wanted = shared.rank;
            if (bins.shift == 0) return threshold_in_ties(score_of(bins.base + shared.chosen), wanted);
            bins.narrow(shared.chosen);
        }
    }

    // Calls emit(place, i) for each selected score, ascending.
    template <typename Emit> __device__ void take(const Threshold &threshold, const Emit &emit) {
        constexpr uint32 AT_ONCE = 4;
        uint32 place = 0;
#pragma unroll 4
        for (uint32 i = first + lane; i < last; i += WARP) place += threshold.takes(scores.at(i), i);
        place = __reduce_add_sync(FULL_WARP, place);
        __syncthreads();  // per_warp is read by all before it is written again
        if (lane == 0) shared.per_warp[warp] = place;
        __syncthreads();
        place = sum_before(shared.per_warp);
#pragma unroll 1
        for (uint32 base = first; base < last; base += AT_ONCE * WARP) {
            bool is_in[AT_ONCE];
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                const uint32 i = base + n * WARP + lane;
                is_in[n] = i < last && threshold.takes(scores.at(i), i);
            }
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                const uint32 mask = __ballot_sync(FULL_WARP, is_in[n]);
                if (is_in[n]) emit(place + __popc(mask & ((1u << lane) - 1)), base + n * WARP + lane);
                place += __popc(mask);
            }
        }
    }
};
