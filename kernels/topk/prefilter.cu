// Keeps what can be among the best of long rows: the first of the two kernels of vwd_topk's variant `prefilter`.
//
// Bytes: every score once; each CTA also reads a sample of 32 KB from the L2 cache.
//
// Split: `slices` CTAs for each row. All CTAs of a row take the same sample of 8192 scores, two quads from each of 1024 places, and from it a
// key that more than the wanted scores reach in all likelihood. The scores that reach it, a few times as many as are wanted, are kept in
// the order of their indices. The kernel that follows (topk.cuh) counts whether they suffice, and reads the scores themselves where they
// do not.
//
//   request sample and first scores ─ bins of the largest of quads ─ key ─ scores that reach it ─ entries
//                                                                           └──── next scores ────┘
//
// On entry: slices ≤ MOST_SLICES.
//
// targets: compute_80, compute_90

#include "topk/row.cuh"

constexpr uint32 THREADS = PREFILTER_THREADS, WARPS = THREADS / WARP, AT_ONCE = WARPS * CHUNK, PLACES = QUADS * THREADS / 2;
static_assert(MOST_KEPT % 4 == 0 && AT_ONCE == SAMPLE);

// How many of the sample's quads are to reach the key; 0 where too many scores would be kept.
__device__ inline uint32 rank_of(const Row &row) {
    const float share = float(AT_ONCE) / float(row.len), expected = float(row.wanted) * share;
    const float rank = expected + 8.0f * sqrtf(expected) + 8.0f;
    return 16 * uint64(row.wanted) <= row.len && rank <= float(MOST_EXPECTED) * share ? uint32(rank) : 0;
}

template <uint32 BYTES> __device__ inline void prefilter(const TopKParams &p) {
    __shared__ CtaTopKShared<THREADS> shared;
    __shared__ uint32 per_warp[2][WARPS];
    allow_next_kernel();
    open(shared);
    wait_for_previous_kernel();
    const uint32 number = blockIdx.x / p.slices, slice = blockIdx.x - number * p.slices;
    const Row row(p, number);
    // Short rows fit in the registers of the kernel that follows.
    const uint32 rank = row.len > CtaTopK<1024>::MOST ? rank_of(row) : 0;
    uint32 &kept_counts = as<uint32>(p.kept_counts + blockIdx.x * 4ull);
    if (rank == 0) {
        if (threadIdx.x == 0) kept_counts = TOO_MANY;
        return;
    }
    KeyBins<THREADS> bins(shared);
    const uint32 span = ((row.len + p.slices - 1) / p.slices + 31) / 32 * 32;
    const uint32 begin = min(slice * span, row.len), end = min(begin + span, row.len), first = bins.warp * CHUNK + 4 * bins.lane;
    uint32 least;
    row.prefetch_scores<BYTES>(begin + first, end);
    {
        uint32 at[QUADS], sample[QUADS][4], of_quad[QUADS], low = ~0u, high = 0;
        const uint32 apart = row.len / PLACES & ~7u;
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) at[n] = (n * THREADS + threadIdx.x) / 2 * apart + threadIdx.x % 2 * 4;
        row.load<BYTES>(at, row.len, sample);
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            of_quad[n] = max(max(sample[n][0], sample[n][1]), max(sample[n][2], sample[n][3]));
            low = min(low, of_quad[n]), high = max(high, of_quad[n]);
        }
        bins.spread_over(low, high);
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) bins.count(of_quad[n]);
        bins.choose(rank);
        // Narrows a bin that many quads share.
#pragma unroll 1
        while (bins.shift > 0 && 8 * shared.count > rank) {
            const uint32 wanted = shared.rank;
            bins.narrow();
#pragma unroll
            for (uint32 n = 0; n < QUADS; n++) bins.count(of_quad[n]);
            bins.choose(wanted);
        }
        least = bins.base + (shared.chosen << bins.shift);
    }
    char *entries = p.kept_entries + blockIdx.x * uint64(MOST_KEPT * 8);
    const uint32 before = (1u << bins.lane) - 1;
    uint32 kept = 0;
#pragma unroll 1
    for (uint32 chunk = begin, turn = 0; chunk < end; chunk += AT_ONCE, turn ^= 1) {
        uint32 x[QUADS][4], own = 0;
        row.load<BYTES>(chunk + first, end, x);
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++)
#pragma unroll
            for (uint32 i = 0; i < 4; i++) own += x[n][i] >= least;
        own = __reduce_add_sync(FULL_WARP, own);
        if (bins.lane == 0) per_warp[turn][bins.warp] = own;
        __syncthreads();
        const uint32 other = bins.lane < WARPS ? per_warp[turn][bins.lane % WARPS] : 0;
        uint32 place = kept + __reduce_add_sync(FULL_WARP, bins.lane < bins.warp ? other : 0);
        kept += __reduce_add_sync(FULL_WARP, other);
        if (kept > MOST_KEPT) break;
        if (own == 0) continue;
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            uint32 mine = 0, all = 0;
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                const uint32 mask = __ballot_sync(FULL_WARP, x[n][i] >= least);
                mine += __popc(mask & before), all += __popc(mask);
            }
            mine += place, place += all;
#pragma unroll
            for (uint32 i = 0; i < 4; i++)
                if (x[n][i] >= least) as<uint2>(entries + mine++ * 8) = make_uint2(x[n][i], chunk + first + n * STEP + i);
        }
    }
    // Zeros fill up the last quad.
    if (kept <= MOST_KEPT && threadIdx.x < (0 - kept) % 4) as<uint2>(entries + (kept + threadIdx.x) * 8) = make_uint2(0, 0);
    if (threadIdx.x == 0) kept_counts = kept <= MOST_KEPT ? kept : TOO_MANY;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) topk_prefilter_16(const __grid_constant__ TopKParams p) { prefilter<2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) topk_prefilter_32(const __grid_constant__ TopKParams p) { prefilter<4>(p); }
