// The exact top k of one row of keys, by one CTA.
//
// Order: larger first; equal scores (−0 and +0 are equal) by the lower index; NaN ranks as −inf. Scores become keys that sort as they do. The
// wanted-th largest key is found by counting: 2048 bins over the range that the keys span, then over the bin in which it lies, and so on. Each
// pass narrows 2^32 possible keys by 2^11, so three suffice whatever the scores are; scores of usual spread need one or two.
//
// Keys stay in shared memory, 8192 of them; those of a longer row are made of the scores again for each pass. A warp takes neighbouring keys, so
// that the places of the chosen follow from what the warps before it found, and ids come out ascending without a sort. Code is kept short:
// a CTA runs it once, and fetching it costs as much as running it.
#pragma once

#include "common/eight.cuh"

constexpr uint32 TOPK_THREADS = 512, TOPK_WARPS = TOPK_THREADS / WARP;
constexpr uint32 TOPK_HELD = 8192;
constexpr uint32 LOG_BINS = 11, BINS = 1 << LOG_BINS;
static_assert(BINS == 4 * TOPK_THREADS, "a thread owns four bins");

__device__ inline uint32 sort_key(float score) {
    const uint32 bits = __float_as_uint(score == score ? score + 0.0f : minus_infinity());  // −0 + 0 is +0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Of key 0, which no score has: −inf.
__device__ inline float score_of(uint32 key) { return key == 0 ? minus_infinity() : __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); }

// Keys above `key` are in, and the first `ties` of those that equal it.
struct Cut {
    uint32 key, ties;
};

struct TopKShared {
    alignas(16) uint32 bin[BINS];
    alignas(16) uint32 key[TOPK_HELD];
    uint32 of_warp[TOPK_WARPS], also_of_warp[TOPK_WARPS], present_in_warp[TOPK_WARPS];
    uint32 chosen, rank, count;
};

// Of begin … end−1, of which key(j) says the key; 0: it is not there. All threads of the CTA take part.
template <typename Key> struct TopK {
    TopKShared &shared;
    const Key &make;
    const uint32 begin, count, thread, warp, lane;
    uint32 present, least, most;  // how many keys there are, the smallest and the largest

    __device__ TopK(TopKShared &shared, uint32 begin, uint32 end, const Key &key)
        : shared(shared), make(key), begin(begin), count(end - begin), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP) {
        reinterpret_cast<uint4 *>(shared.bin)[thread] = make_uint4(0, 0, 0, 0);
        present = 0, least = ~0u, most = 0;
        constexpr uint32 AT_ONCE = 8;  // on their way together
#pragma unroll 1
        for (uint32 first = thread; first < count; first += AT_ONCE * TOPK_THREADS) {
            uint32 x[AT_ONCE];
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) x[n] = first + n * TOPK_THREADS < count ? make(begin + first + n * TOPK_THREADS) : 0;
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                const uint32 i = first + n * TOPK_THREADS;
                if (i < count && count <= TOPK_HELD) shared.key[i] = x[n];
                present += x[n] != 0, least = min(least, x[n] - 1), most = max(most, x[n]);  // one that is not there is past all
            }
        }
        if (thread < -count % 4 && count <= TOPK_HELD) shared.key[count + thread] = 0;
        present = __reduce_add_sync(FULL_WARP, present);
        least = __reduce_min_sync(FULL_WARP, least), most = __reduce_max_sync(FULL_WARP, most);
        if (lane == 0) shared.of_warp[warp] = least, shared.also_of_warp[warp] = most, shared.present_in_warp[warp] = present;
        __syncthreads();
        present = __reduce_add_sync(FULL_WARP, lane < TOPK_WARPS ? shared.present_in_warp[lane % TOPK_WARPS] : 0);
        least = __reduce_min_sync(FULL_WARP, shared.of_warp[lane % TOPK_WARPS]) + 1;
        most = __reduce_max_sync(FULL_WARP, shared.also_of_warp[lane % TOPK_WARPS]);
    }

    // Keys i … i + 3, for i a multiple of four; 0 past the end.
    __device__ void four(uint32 i, uint32 (&x)[4]) const {
        if (count <= TOPK_HELD) {
            const uint4 keys = *reinterpret_cast<const uint4 *>(shared.key + i);
            x[0] = keys.x, x[1] = keys.y, x[2] = keys.z, x[3] = keys.w;
        } else {
#pragma unroll
            for (uint32 n = 0; n < 4; n++) x[n] = i + n < count ? make(begin + i + n) : 0;
        }
    }

    // Σ of[w] over the warps before this one.
    __device__ uint32 sum_before(const uint32 (&of)[TOPK_WARPS]) const {
        return __reduce_add_sync(FULL_WARP, lane < warp ? of[lane % TOPK_WARPS] : 0);
    }

    // The bin of the wanted-th largest of the keys base … base + (bins << shift) − 1: `chosen`. It is the rank-th largest of the `count` keys
    // there. All bins are 0 before and after.
    __device__ void choose_bin(uint32 base, uint32 shift, uint32 bins, uint32 wanted) {
#pragma unroll 1
        for (uint32 i = 4 * thread; i < count; i += 4 * TOPK_THREADS) {
            uint32 x[4];
            four(i, x);
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const uint32 place = x[n] - base >> shift;
                if (place < bins) atomicAdd(&shared.bin[place], 1u);
            }
        }
        __syncthreads();
        uint4 &mine = reinterpret_cast<uint4 *>(shared.bin)[TOPK_THREADS - 1 - thread];  // from the top
        const uint4 counts = mine;
        const uint32 sum = counts.x + counts.y + counts.z + counts.w;
        uint32 through = sum;
#pragma unroll
        for (uint32 step = 1; step < WARP; step *= 2) {
            const uint32 other = __shfl_up_sync(FULL_WARP, through, step);
            if (lane >= step) through += other;
        }
        if (lane == WARP - 1) shared.of_warp[warp] = through;
        mine = make_uint4(0, 0, 0, 0);
        __syncthreads();
        uint32 above = sum_before(shared.of_warp) + through - sum;
        if (above < wanted && wanted <= above + sum) {
            uint32 bin = BINS - 1 - 4 * thread, here = counts.w;
            if (above + here < wanted) above += here, bin--, here = counts.z;
            if (above + here < wanted) above += here, bin--, here = counts.y;
            if (above + here < wanted) above += here, bin--, here = counts.x;
            shared.chosen = bin, shared.rank = wanted - above, shared.count = here;
        }
        __syncthreads();
    }

    __device__ Cut cut(uint32 wanted) {
        if (wanted == 0) return {~0u, 0};
        if (wanted >= present) return {0, 0};
        const uint32 width = WARP - __clz(most - least);
        uint32 base = least, shift = width > LOG_BINS ? width - LOG_BINS : 0, bins = (most - base >> shift) + 1;
#pragma unroll 1
        while (bins > 1) {
            choose_bin(base, shift, bins, wanted);
            base += shared.chosen << shift, wanted = shared.rank;
            if (shared.count == wanted) return {base - 1, 0};  // all that are there
            bins = 1u << min(shift, LOG_BINS);
            shift -= min(shift, LOG_BINS);
        }
        return {base, wanted};
    }

    // emit(place, j), ascending, for each that is in.
    template <typename Emit> __device__ void take(const Cut &cut, const Emit &emit) {
        constexpr uint32 CHUNK = 4 * WARP;
        const uint32 span = (count + CHUNK * TOPK_WARPS - 1) / (CHUNK * TOPK_WARPS) * CHUNK, first = warp * span, last = min(first + span, count);
        uint32 above = 0, equal = 0, x[4];
#pragma unroll 1
        for (uint32 i = first + 4 * lane; i < last; i += CHUNK) {
            four(i, x);
#pragma unroll
            for (uint32 n = 0; n < 4; n++) above += x[n] > cut.key, equal += x[n] != 0 && x[n] == cut.key;
        }
        above = __reduce_add_sync(FULL_WARP, above), equal = __reduce_add_sync(FULL_WARP, equal);
        __syncthreads();  // what was there is read
        if (lane == 0) shared.of_warp[warp] = above, shared.also_of_warp[warp] = equal;
        __syncthreads();
        above = sum_before(shared.of_warp), equal = sum_before(shared.also_of_warp);
#pragma unroll 1
        for (uint32 chunk = first; chunk < last; chunk += CHUNK) {
            const uint32 i = chunk + 4 * lane;
            if (i < last)
                four(i, x);
            else
                x[0] = x[1] = x[2] = x[3] = 0;
            uint32 both = 0;  // above in the low half, equal in the high one
#pragma unroll
            for (uint32 n = 0; n < 4; n++) both += (x[n] > cut.key) + ((x[n] != 0 && x[n] == cut.key) << 16);
            uint32 through = both;
#pragma unroll
            for (uint32 step = 1; step < WARP; step *= 2) {
                const uint32 other = __shfl_up_sync(FULL_WARP, through, step);
                if (lane >= step) through += other;
            }
            uint32 above_before = above + (through - both & 0xffff), equal_before = equal + (through - both >> 16);
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const bool is_above = x[n] > cut.key, is_equal = x[n] != 0 && x[n] == cut.key;
                if (is_above || (is_equal && equal_before < cut.ties)) emit(above_before + min(equal_before, cut.ties), begin + i + n);
                above_before += is_above, equal_before += is_equal;
            }
            const uint32 all = __shfl_sync(FULL_WARP, through, WARP - 1);
            above += all & 0xffff, equal += all >> 16;
        }
    }
};
