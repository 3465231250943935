// The exact top k of rows of scores: vwd_topk.
//
//   ids of row r: the k entries that come first by (larger score, lower index); ascending, or in that order
//
// Bytes: every score once, every id and value once. A row of 131072 float32 scores has 524 KB; eight of them take 1 µs. Rows longer than the
// registers of a cluster (131072 scores for eight CTAs) are read once a pass, up to five times, from the L2 cache.
//
// Cut: a cluster of 1, 2, 4 or 8 CTAs for each row; a warp takes neighbouring scores.
//
//   request scores and length ─ count the first digit as they arrive ─ read the cluster's counts ─ next digit … ─ places ─ ids, values
//                                                                                     best first: ─ ids to CTA 0 ─ sort ─┘
//
// On entry: the grid is a multiple of the cluster; best first, cap ≤ MOST_SORTED.
//
// targets: compute_80, compute_90

#include "common/cluster_topk.cuh"
#include "topk/params.cuh"

constexpr uint32 THREADS = 1024, MOST_SORTED = 4096;

// Neighbouring scores.
template <uint32 BYTES> struct alignas(4 * BYTES) Four {
    uint32 word[BYTES];
    __device__ uint32 bits(uint32 n) const { return BYTES == 4 ? word[n] : word[n / 2] >> n % 2 * 16 & 0xffff; }
};

extern __shared__ uint4 room[];  // TopKParams.chunks times a key for each register of the CTA that holds one

struct Row {
    const TopKParams &p;
    const uint32 number;
    const char *scores;
    uint32 len, wanted;

    __device__ Row(const TopKParams &p, uint32 number) : p(p), number(number), scores(p.scores + number * p.scores_row) {
        int32 given = p.n, k = p.k;
        if (p.lens) given = as<int32>(p.lens + number * p.lens_row);
        if (p.budgets) k = as<int32>(p.budgets + number * p.budgets_row);
        len = min(uint32(max(given, 0)), p.n), wanted = min(min(uint32(max(k, 0)), p.cap), len);
    }
    // Keys from each of first + n · STEP on; 0 from `end` on.
    template <uint32 BYTES> __device__ void load(uint32 first, uint32 end, uint32 (&x)[QUADS][4]) const {
        Four<BYTES> four[QUADS];
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++)
            if (p.adjacent && first + n * STEP + 4 <= end) four[n] = as<Four<BYTES>>(scores + BYTES * uint64(first + n * STEP));
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            const uint32 i = first + n * STEP;
#pragma unroll
            for (uint32 m = 0; m < 4; m++) {
                x[n][m] = 0;
                if (p.adjacent && i + 4 <= end)
                    x[n][m] = sort_key(widen<BYTES>(four[n].bits(m)));
                else if (i + m < end)
                    x[n][m] = sort_key(widen<BYTES>(stored<BYTES>(i + m)));
            }
        }
    }
    template <uint32 BYTES> __device__ uint32 stored(uint32 j) const {
        const char *from = scores + j * p.scores_entry;
        return BYTES == 4 ? as<uint32>(from) : as<uint16>(from);
    }
    template <uint32 BYTES> __device__ float widen(uint32 bits) const {
        if (BYTES == 4) return __uint_as_float(bits);
        return p.dtype == BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits);
    }
    __device__ int32 &id(uint32 place) const { return as<int32>(p.ids + number * p.ids_row + place * p.ids_entry); }
    // The value is the score as it is stored.
    template <uint32 BYTES> __device__ void write(uint32 place, uint32 j) const {
        id(place) = j;
        if (!p.values) return;
        char *to = p.values + number * p.values_row + place * p.values_entry;
        if (BYTES == 4)
            as<uint32>(to) = stored<4>(j);
        else
            as<uint16>(to) = stored<2>(j);
    }
    __device__ void write_count() const { as<int32>(p.counts + number * p.counts_row) = wanted; }
};

template <uint32 BYTES> __device__ inline void ascending(const TopKParams &p) {
    __shared__ ClusterTopKShared<THREADS> shared;
    allow_next_kernel();
    open(shared);
    wait_for_previous_kernel();
    const uint32 ctas = cluster_ctas();
    const Row row(p, blockIdx.x / ctas);
    if (cluster_rank() == 0 && threadIdx.x == 0) row.write_count();
    if (row.wanted == 0) return;
    const auto quads = [&](uint32 i, uint32 end, uint32 (&x)[QUADS][4]) { row.load<BYTES>(i, end, x); };
    ClusterTopK<THREADS, decltype(quads)> top(shared, room, p.chunks, row.len, quads);
    top.cut(row.wanted, BYTES == 4 ? 3 : 2);
    if (ctas > 1) cluster_arrive();
    top.take([&](uint32 place, uint32 j) { row.write<BYTES>(place, j); });
    if (ctas > 1) cluster_wait();  // others may still read this CTA's counts
}

// Score and index as one number that is larger for what comes first.
__device__ inline uint64 item_of(uint32 key, uint32 j) { return uint64(key) << 32 | ~j; }

// Sorts `count` items, the largest first; all threads of a CTA take part.
__device__ inline void sort_items(uint64 *item, uint32 count) {
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

template <uint32 BYTES> __device__ inline void best_first(const TopKParams &p) {
    __shared__ union {
        ClusterTopKShared<THREADS> top;
        uint64 item[MOST_SORTED];
    } shared;
    allow_next_kernel();
    open(shared.top);
    wait_for_previous_kernel();
    const uint32 ctas = cluster_ctas();
    const Row row(p, blockIdx.x / ctas);
    if (cluster_rank() == 0 && threadIdx.x == 0) row.write_count();
    if (row.wanted == 0) return;
    const auto quads = [&](uint32 i, uint32 end, uint32 (&x)[QUADS][4]) { row.load<BYTES>(i, end, x); };
    ClusterTopK<THREADS, decltype(quads)> top(shared.top, room, p.chunks, row.len, quads);
    top.cut(row.wanted, BYTES == 4 ? 3 : 2);
    top.take([&](uint32 place, uint32 j) { row.id(place) = j; });
    if (ctas > 1) cluster_arrive(), cluster_wait();
    __syncthreads();
    if (cluster_rank() != 0) return;
    for (uint32 i = threadIdx.x; i < row.wanted; i += THREADS) {
        const uint32 j = __ldcg(&row.id(i));
        shared.item[i] = item_of(sort_key(row.widen<BYTES>(row.stored<BYTES>(j))), j);
    }
    sort_items(shared.item, row.wanted);
    for (uint32 i = threadIdx.x; i < row.wanted; i += THREADS) row.write<BYTES>(i, ~uint32(shared.item[i]));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) topk_ascending_16(const __grid_constant__ TopKParams p) { ascending<2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) topk_ascending_32(const __grid_constant__ TopKParams p) { ascending<4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) topk_best_first_16(const __grid_constant__ TopKParams p) { best_first<2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) topk_best_first_32(const __grid_constant__ TopKParams p) { best_first<4>(p); }
