// Selection of blocks by the mean keys of windows, in two launches.
//
//   MEAN_DOT (SparDA)         s[w] = q·mean[w]
//   MEAN_SOFTMAX (InfLLM-v2)  s[w] = Σ_h softmax_w(scale·q_h·mean[w])
//   score[j] = max over the query positions and the windows w that overlap block j of s[w] · the exact top k of the scores, ascending
//
// Bytes: the mean keys, once; beside them a float32 product for each window and head, written and read in the L2 cache.
//
// Cut: score_means gives each CTA of a row chunks of windows; a group of lanes holds a mean key and multiplies it with all heads, which lie
// in shared memory (as many at a time as fit). Of each chunk and head it keeps the largest product and the sum of e^(product − largest). In
// weigh_means a thread takes a window and raises the scores of the blocks that it overlaps. Chunks are of one size, so sums do not depend
// on the grid. The CTA that arrives last selects.
//
// On entry: D is a multiple of 8; heads ≤ MOST_HEADS; lanes · 8 ≥ D or lanes = 32; SelectParams.place and held are those of windows and of
// blocks: capacity counts windows, held_row blocks.
//
// targets: compute_80, compute_90

#include "select/lanes.cuh"
#include "select/rows.cuh"

constexpr uint32 CHUNK = 128, WARP_WINDOWS = CHUNK / TOPK_WARPS;
constexpr uint32 STAGED = 4096, STAGED_HEADS = 32;  // channels and heads in shared memory
constexpr uint32 MOST_HEADS = 1024;                 // of all positions of a row

// Windows that are full once there are so many tokens, as far as the index has room.
__device__ inline uint32 windows(const MeanParams &p, int32 tokens) {
    return tokens < 0 || uint32(tokens) < p.size ? 0 : min((uint32(tokens) - p.size) / p.stride + 1, p.select.place.capacity);
}
// Blocks that any of so many windows overlaps.
__device__ inline uint32 reached(const MeanParams &p, const Row &row, uint32 windows) {
    return windows == 0 ? 0 : min(((windows - 1) * p.stride + p.size - 1) / p.select.block_size + 1, row.n);
}

// Sum and largest of e^x, so that sums of several can be joined.
struct Sum {
    float most, sum;

    __device__ void join(const Sum &other) {
        const float larger = fmaxf(most, other.most);
        if (larger == minus_infinity()) return;
        sum = sum * __expf(most - larger) + other.sum * __expf(other.most - larger), most = larger;
    }
    __device__ void join_lanes() {
#pragma unroll
        for (uint32 bit = 1; bit < WARP; bit *= 2) join({__shfl_xor_sync(FULL_WARP, most, bit), __shfl_xor_sync(FULL_WARP, sum, bit)});
    }
};

// The products of a warp's windows of a chunk with the heads in shared memory, `first_head` and later ones of the row.
template <uint32 BYTES, uint32 COUNT>
__device__ inline uint32 multiply(const MeanParams &p, const Row &row, uint32 chunk, uint32 count, uint32 first_head, uint32 heads, const float *q,
                                  float (*staged)[CHUNK]) {
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, step = WARP / p.lanes, within = lane & (p.lanes - 1), channel = within * 8;
    const uint32 begin = chunk * CHUNK + threadIdx.x / WARP * WARP_WINDOWS, last = min(begin + WARP_WINDOWS, count);
    float *products = p.products + (uint64(row.number) * p.heads + first_head) * s.place.capacity;
    uint32 saw = 0;
    Summaries<BYTES, COUNT> means;
    for (uint32 base = begin; base < last; base += COUNT * step) {
        const auto load = [&](uint32 c) { means.load(s.place, p.means, row.seq, row.head, base + lane / p.lanes, step, last, c, s.dim); };
        load(channel);
        const uint32 own = own_of<COUNT>(lane), w = base + lane / p.lanes + own * step;
        const bool exists = means.exist >> own & 1, is_mine = within < COUNT && w < last;
        for (uint32 h = 0; h < heads; h++) {
            float x[COUNT];
#pragma unroll
            for (uint32 n = 0; n < COUNT; n++) x[n] = 0.0f;
            for (uint32 c = channel; c < s.dim; c += p.lanes * 8) {
                if (c > channel || (h > 0 && s.dim > p.lanes * 8)) load(c);
                means.multiply(reinterpret_cast<const float4 *>(q + h * s.dim + c), p.dtype, x);
            }
            const float sum = add_lanes(x, p.lanes);
            if (!is_mine) continue;
            const bool sees = exists && w < windows(p, row.position(row.first + (first_head + h) / s.group) + 1);
            const float product = sees && fabsf(sum) < -minus_infinity() ? sum : minus_infinity();
            if (sees && sum != sum) saw |= SAW_NAN;
            products[uint64(h) * s.place.capacity + w] = product;
            staged[h][w - chunk * CHUNK] = product;
        }
        if (is_mine && !exists) saw |= NO_SUMMARY;
    }
    return saw;
}

template <uint32 BYTES> __device__ inline void score_means(const MeanParams &p) {
    __shared__ float4 q[STAGED / 4];
    __shared__ float staged[STAGED_HEADS][CHUNK];
    __shared__ uint32 nan, seen;
    allow_next_kernel();
    wait_for_previous_kernel();
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, slice = blockIdx.x % p.scoring;
    const Row row(s, blockIdx.x / p.scoring);
    const uint32 count = windows(p, row.tokens), heads = (row.last - row.first) * s.group;
    uint32 *keys = reinterpret_cast<uint32 *>(s.held) + uint64(row.number) * s.held_row;
    for (uint32 j = slice * TOPK_THREADS + threadIdx.x; j < reached(p, row, count); j += p.scoring * TOPK_THREADS) keys[j] = 0;
    if (threadIdx.x == 0) nan = seen = 0;
    const uint32 at_once = min(STAGED / s.dim, STAGED_HEADS);
    uint32 saw = 0;
    for (uint32 first = 0; first < heads; first += at_once) {
        const uint32 here = min(at_once, heads - first);
        __syncthreads();
        for (uint32 t = threadIdx.x; t < here * s.dim; t += TOPK_THREADS) {
            const uint32 h = first + t / s.dim, c = t % s.dim, position = h / s.group;
            const char *at = s.q + row.seq * s.q_seq + (row.first + position) * s.q_pos + (row.head * s.group + h % s.group) * s.q_head + c * s.q_channel;
            const float x = load_query(at, s.q_type) * s.scale;
            reinterpret_cast<float *>(q)[t] = x;
            if (x != x) atomicOr(&nan, 1u << position);
        }
        __syncthreads();
        for (uint32 chunk = slice; chunk * CHUNK < count; chunk += p.scoring) {
            const float *staged_q = reinterpret_cast<const float *>(q);
            saw |= p.adjacent ? multiply<BYTES, 8 / BYTES>(p, row, chunk, count, first, here, staged_q, staged)
                              : multiply<BYTES, 1>(p, row, chunk, count, first, here, staged_q, staged);
            __syncthreads();
            for (uint32 h = threadIdx.x / WARP; h < here && p.softmax; h += TOPK_WARPS) {
                Sum sum = {minus_infinity(), 0.0f};
                for (uint32 w = lane; w < min(CHUNK, count - chunk * CHUNK); w += WARP) sum.join({staged[h][w], 1.0f});
                sum.join_lanes();
                float2 *to = reinterpret_cast<float2 *>(p.partials) + (uint64(row.number) * p.heads + first + h) * p.chunks + chunk;
                if (lane == 0) *to = make_float2(sum.most, sum.sum);
            }
            __syncthreads();
        }
    }
    if (saw) atomicOr(&seen, saw);
    __syncthreads();
    if (threadIdx.x != 0) return;
    p.seen[blockIdx.x] = seen | (nan ? SAW_NAN : 0);
    if (slice == 0) p.seen[gridDim.x + row.number] = nan;
}

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) score_means_16(const __grid_constant__ MeanParams p) { score_means<2>(p); }
extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) score_means_32(const __grid_constant__ MeanParams p) { score_means<4>(p); }

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) weigh_means(const __grid_constant__ MeanParams p) {
    __shared__ union {
        float2 of_head[MOST_HEADS];  // the largest product, and what weights are multiplied by
        TopKShared top;
    } shared;
    __shared__ uint32 seen;
    allow_next_kernel();
    wait_for_previous_kernel();
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, slice = blockIdx.x % s.slices;
    const Row row(s, blockIdx.x / s.slices);
    const uint32 count = windows(p, row.tokens), heads = (row.last - row.first) * s.group, blocks = reached(p, row, count);
    const uint32 active = max(min((count + TOPK_THREADS - 1) / TOPK_THREADS, s.slices), 1u);
    if (slice >= active) return;
    if (threadIdx.x == 0) seen = 0;
    for (uint32 h = threadIdx.x / WARP; h < heads && p.softmax; h += TOPK_WARPS) {
        const float2 *from = reinterpret_cast<const float2 *>(p.partials) + (uint64(row.number) * p.heads + h) * p.chunks;
        Sum sum = {minus_infinity(), 0.0f};
        for (uint32 chunk = lane; chunk * CHUNK < count; chunk += WARP) {
            const float2 part = __ldcg(from + chunk);
            sum.join({part.x, part.y});
        }
        sum.join_lanes();
        if (lane == 0) shared.of_head[h] = sum.sum > 0.0f ? make_float2(sum.most, 1.0f / sum.sum) : make_float2(0.0f, 0.0f);
    }
    __syncthreads();
    const uint32 nan = __ldcg(p.seen + gridDim.x / s.slices * p.scoring + row.number);
    uint32 *keys = reinterpret_cast<uint32 *>(s.held) + uint64(row.number) * s.held_row;
    for (uint32 w = slice * TOPK_THREADS + threadIdx.x; w < count; w += active * TOPK_THREADS) {
        uint32 best = 0;
        for (uint32 query = row.first; query < row.last; query++) {
            const uint32 position = query - row.first, first = position * s.group;
            if (nan >> position & 1 || w >= windows(p, row.position(query) + 1)) continue;
            const float *products = p.products + (uint64(row.number) * p.heads + first) * s.place.capacity + w;
            float mass = 0.0f;
#pragma unroll 4
            for (uint32 h = 0; h < s.group; h++) {
                const float product = __ldcg(products + uint64(h) * s.place.capacity);
                mass = p.softmax ? mass + __expf(product - shared.of_head[first + h].x) * shared.of_head[first + h].y : product;
            }
            best = max(best, sort_key(mass));
        }
        const uint32 begin = w * p.stride, last = min((begin + p.size - 1) / s.block_size, blocks - 1);
        for (uint32 j = begin / s.block_size; best > 0 && j <= last; j++) atomicMax(keys + j, best);
    }
    for (uint32 n = threadIdx.x; slice == 0 && n < p.scoring; n += TOPK_THREADS) {
        const uint32 saw = __ldcg(p.seen + row.number * p.scoring + n);
        if (saw) atomicOr(&seen, saw);
    }
    if (!is_last(s, row.number, active, seen)) return;
    const auto score = [&](uint32 j) { return score_of(__ldcg(keys + j)); };
    if (s.scores) {
        char *scores = s.scores + row.seq * s.scores_seq + row.list * s.scores_pos + row.head * s.scores_head;
        for (uint32 j = threadIdx.x; j < min(blocks, s.max_blocks); j += TOPK_THREADS) as<float>(scores + j * s.scores_block) = score(j);
    }
    // A full window for which the index has no room.
    const bool misses = row.tokens >= p.size && (row.tokens - p.size) / p.stride + 1 > s.place.capacity;
    finish(s, row, blocks, seen | (misses ? NO_SUMMARY : 0), shared.top, score);
}
