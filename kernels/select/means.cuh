// Selection of blocks by the mean keys of windows, or by those of the blocks with an axis, in two launches.
//
//   MEAN_DOT (SparDA)         s[w] = q·mean[w]
//   MEAN_SOFTMAX (InfLLM-v2)  s[w] = Σ_h softmax_w(scale·q_h·mean[w])
//   AXIS                      s[w] = Σ_h softmax_w(scale·q_h·mean[w] + ln(2·cosh(scale·q_h·axis[w]))), a window being a block
//   score[j] = max over the query positions and the windows w that overlap block j of s[w] · the exact top k of the scores, ascending
//
// Which kernels run when: select_means_score_* for the MEAN methods, and select_axis_general_score_* for AXIS where neither axis_cluster nor
// axis_two_launches takes the call; the number is the bits of an element. select_means_weigh follows each of them.
//
// Bytes: the summaries, once; and a float32 product for each window and head, written and read in the L2 cache.
//
// Split: the scoring kernel gives each CTA of a row chunks of windows. A group of lanes has a mean key and multiplies it with all heads, which
// lie in shared memory (as many at a time as fit). Each chunk and head has a partial: the largest product and the sum of
// e^(product − largest). Chunks have one size, so that sums do not depend on the grid. In select_means_weigh a CTA of a row's cluster takes
// neighbouring blocks; a thread takes a window and raises the scores of the blocks that it overlaps. The first CTA selects. For AXIS a lane
// has 32 channels, a group of INT4; half of a block's lanes have the mean, the others the axis.
//
// On entry: D is a multiple of 8; heads ≤ MOST_HEADS; lanes · 8 ≥ D or lanes = 32 (AXIS: lanes · 16 ≥ D or lanes = 32, at least 8; INT4 is
// adjacent only where D is a multiple of 32; size is 1 and stride a block's tokens); SelectParams.place.capacity counts windows and
// SelectParams.scored_blocks blocks.
#pragma once

#include "select/lanes.cuh"
#include "select/rows.cuh"

constexpr uint32 SCORING_THREADS = 512, SCORING_WARPS = SCORING_THREADS / WARP;
constexpr uint32 CHUNK = 128, WARP_WINDOWS = CHUNK / SCORING_WARPS;
constexpr uint32 STAGED = 4096, STAGED_HEADS = 32;  // channels and heads in shared memory
constexpr uint32 MOST_HEADS = 1024;                 // most query heads of a row, of all its positions
constexpr uint32 TILE = 1024;                       // blocks whose scores a CTA raises at a time

// The windows that are full once there are `tokens` tokens, as far as the index has room.
__device__ inline uint32 windows(const MeanParams &p, int32 tokens) {
    return tokens < 0 || uint32(tokens) < p.size ? 0 : min((uint32(tokens) - p.size) / p.stride + 1, p.select.place.capacity);
}

// The largest x, and Σ e^(x − largest), of some numbers; two such sums can be joined.
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

// How many windows the query position of a head sees, while heads are counted up.
struct Seen {
    const MeanParams &p;
    const Row &row;
    uint32 position, left;  // left: heads of this position that are still to come
    uint32 windows;

    __device__ Seen(const MeanParams &p, const Row &row, uint32 head)
        : p(p), row(row), position(head / p.select.group), left((position + 1) * p.select.group - head),
          windows(::windows(p, row.position(row.first + position) + 1)) {}
    __device__ void next() {
        if (--left > 0) return;
        position++, left = p.select.group;
        if (row.first + position < row.last) windows = ::windows(p, row.position(row.first + position) + 1);
    }
};

// Brings a warp's windows of a chunk to the L2 cache, four lanes a window; there are `count` windows in all.
template <uint32 BYTES> __device__ inline void prefetch_tiles(const MeanParams &p, uint32 seq, uint32 head, uint32 chunk, uint32 count) {
    constexpr uint32 LANES = WARP / WARP_WINDOWS, LINE = 64;
    const uint32 lane = threadIdx.x % WARP, w = chunk * CHUNK + threadIdx.x / WARP * WARP_WINDOWS + lane / LANES;
    if (w >= count || p.select.place.table || !p.adjacent) return;
    const char *at = p.means.at(seq, w, head);
    for (uint32 byte = lane % LANES * LINE; byte < p.select.dim * BYTES; byte += LANES * LINE) prefetch(at + byte);
}

// Multiplies a warp's windows of a chunk with the heads in shared memory, which are the row's heads from `first_head` on.
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
        float wide[COUNT][8];  // widened once for all heads
        const auto load = [&](uint32 c) {
            means.load(s.place, p.means, row.seq, row.head, base + lane / p.lanes, step, last, c, s.dim);
            means.widen(p.dtype, wide);
        };
        load(channel);
        const uint32 own = own_of<COUNT>(lane), w = base + lane / p.lanes + own * step;
        const bool exists = means.exist >> own & 1, is_mine = within < COUNT && w < last;
        Seen seen(p, row, first_head);
        for (uint32 h = 0; h < heads; h++, seen.next()) {
            float x[COUNT];
#pragma unroll
            for (uint32 n = 0; n < COUNT; n++) x[n] = 0.0f;
            for (uint32 c = channel; c < s.dim; c += p.lanes * 8) {
                if (c > channel || (h > 0 && s.dim > p.lanes * 8)) load(c);
                means.multiply(wide, reinterpret_cast<const float4 *>(q + h * s.dim + c), x);
            }
            const float sum = add_lanes(x, p.lanes);
            if (!is_mine) continue;
            const bool sees = exists && w < seen.windows;
            const float product = sees && fabsf(sum) < -minus_infinity() ? sum : minus_infinity();
            if (sees && sum != sum) saw |= SAW_NAN;
            products[uint64(h) * s.place.capacity + w] = product;
            staged[h][w - chunk * CHUNK] = product;
        }
        if (is_mine && !exists) saw |= NO_SUMMARY;
    }
    return saw;
}

// A lane's 32 channels, from c on, of a mean or an axis: INT4 codes with scale and minimum, or the address of its elements.
template <uint32 BYTES> struct AxisPart {
    static constexpr bool IS_INT4 = BYTES == 0;
    const char *at;
    uint4 codes;
    float scale, min;

    __device__ void load(const MeanParams &p, const char *axes, const char *range, uint32 part, uint32 c) {
        const uint32 dim = p.select.dim;
        at = axes + (part * dim + c) * p.means.channel, scale = 1.0f, min = 0.0f;
        if constexpr (IS_INT4) {
            at = axes + (part * dim + c) / 2 * p.means.channel;
            const uint32 group = 2 * (part * ((dim + 31) / 32) + c / 32);
            if (p.adjacent) {
                codes = as<uint4>(at);
                const uint32 both = as<uint32>(range + group * 2);
                scale = widen_float16(both & 0xffff), min = widen_float16(both >> 16);
            } else {
                uint32 word[4] = {};
                for (uint32 n = 0; n < 16; n++)
                    if (c + 2 * n < dim) word[n / 4] |= uint32(as<uint8>(at + n * p.means.channel)) << n % 4 * 8;
                codes = make_uint4(word[0], word[1], word[2], word[3]);
                scale = widen_float16(as<uint16>(range + group * p.range.channel)), min = widen_float16(as<uint16>(range + (group + 1) * p.range.channel));
            }
        }
    }
    // Unpacks the lane's channels 8n … 8n + 7.
    __device__ void unpack(const MeanParams &p, uint32 n, float (&x)[8]) const {
        if constexpr (IS_INT4) {
            const uint32 word = n == 0 ? codes.x : n == 1 ? codes.y : n == 2 ? codes.z : codes.w;
#pragma unroll
            for (uint32 i = 0; i < 8; i++) x[i] = float(word >> 4 * i & 15);
        } else {
            Eight<BYTES> eight;
            const char *from = at + 8 * n * p.means.channel;
            if (p.adjacent)
                eight.load(from);
            else
                eight.gather(from, p.means.channel);
            eight.widen(x, p.dtype);
        }
    }
};

// ln(2·cosh x)
__device__ inline float ln_2cosh(float x) { return fabsf(x) + __logf(1.0f + __expf(-2.0f * fabsf(x))); }

// Multiplies a warp's blocks of a chunk with the heads, as `multiply` does, with means and axes. For masses (mass.cuh) the axes are shorter, the
// blocks of which `skipped` has a bit have no product, and products stay in shared memory.
template <uint32 BYTES, bool IS_MASS = false>
__device__ inline uint32 multiply_axes(const MeanParams &p, const Row &row, uint32 chunk, uint32 count, uint32 first_head, uint32 heads, const float *q,
                                       float (*staged)[CHUNK], const uint32 *skipped = nullptr) {
    constexpr float LENGTH = IS_MASS ? 0.7f : 1.0f;
    constexpr uint32 BLOCKS = 2, TOGETHER = 4, OWN = BLOCKS * TOGETHER;  // blocks and heads of a lane at a time
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, half = p.lanes / 2, within = lane & (p.lanes - 1), part = within / half, step = WARP / p.lanes;
    const uint32 begin = chunk * CHUNK + threadIdx.x / WARP * WARP_WINDOWS, last = min(begin + WARP_WINDOWS, count);
    float *products = p.products + (uint64(row.number) * p.heads + first_head) * s.place.capacity;
    const uint32 n = within / TOGETHER % BLOCKS, h = within % TOGETHER;  // block and head whose product this lane stores
    uint32 saw = 0;
    for (uint32 base = begin; base < last; base += BLOCKS * step) {
        const char *axes[BLOCKS], *range[BLOCKS];
#pragma unroll
        for (uint32 m = 0; m < BLOCKS; m++) {
            const uint32 j = base + lane / p.lanes + m * step;
            uint32 page, in_page;
            bool exists = j < last && s.place.find(row.seq, j, page, in_page);
            if (IS_MASS && exists) exists = !(skipped[j % CHUNK / 32] >> j % 32 & 1);
            axes[m] = exists ? p.means.at(page, in_page, row.head) : nullptr;
            range[m] = exists && BYTES == 0 ? p.range.at(page, in_page, row.head) : nullptr;
        }
        for (uint32 head = 0; head < heads; head += TOGETHER) {
            float x[BLOCKS][TOGETHER] = {};
            for (uint32 c = (within & (half - 1)) * 32; c < s.dim; c += half * 32) {
                AxisPart<BYTES> parts[BLOCKS] = {};
#pragma unroll
                for (uint32 m = 0; m < BLOCKS; m++)
                    if (axes[m]) parts[m].load(p, axes[m], range[m], part, c);
                float sums[BLOCKS][TOGETHER] = {}, of_q[TOGETHER] = {};
#pragma unroll
                for (uint32 word = 0; word < 4; word++) {
                    if (c + 8 * word >= s.dim) break;
                    float of[BLOCKS][8] = {};
#pragma unroll
                    for (uint32 m = 0; m < BLOCKS; m++)
                        if (axes[m]) parts[m].unpack(p, word, of[m]);
#pragma unroll
                    for (uint32 i = 0; i < TOGETHER; i++) {
                        if (head + i >= heads) break;
                        const float4 *from = reinterpret_cast<const float4 *>(q + (head + i) * s.dim + c + 8 * word);
                        const float4 low = from[0], high = from[1];
                        const float query[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                        for (uint32 e = 0; e < 8; e++) {
                            of_q[i] += query[e];
#pragma unroll
                            for (uint32 m = 0; m < BLOCKS; m++) sums[m][i] = fmaf(of[m][e], query[e], sums[m][i]);
                        }
                    }
                }
#pragma unroll
                for (uint32 m = 0; m < BLOCKS; m++)
#pragma unroll
                    for (uint32 i = 0; i < TOGETHER; i++)
                        x[m][i] += BYTES == 0 ? fmaf(parts[m].scale, sums[m][i], parts[m].min * of_q[i]) : sums[m][i];
            }
            float mine = 0.0f;
#pragma unroll
            for (uint32 m = 0; m < BLOCKS; m++)
#pragma unroll
                for (uint32 i = 0; i < TOGETHER; i++) {
                    float sum = x[m][i];
                    for (uint32 bit = 1; bit < half; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
                    const float other = __shfl_xor_sync(FULL_WARP, sum, half);
                    const float product = part == 0 ? sum + ln_2cosh(LENGTH * other) : other + ln_2cosh(LENGTH * sum);
                    if (m == n && i == h) mine = product;
                }
            const uint32 w = base + lane / p.lanes + n * step;
            const bool exists = n == 0 ? axes[0] != nullptr : axes[1] != nullptr;
            if (within >= OWN || w >= last || head + h >= heads) continue;
            const bool sees = exists && w < windows(p, row.position(row.first + (first_head + head + h) / s.group) + 1);
            const float product = sees && fabsf(mine) < -minus_infinity() ? mine : minus_infinity();
            if (sees && mine != mine) saw |= SAW_NAN;
            if (!exists) saw |= NO_SUMMARY;
            if (!IS_MASS) products[uint64(head + h) * s.place.capacity + w] = product;
            staged[head + h][w - chunk * CHUNK] = product;
        }
    }
    return saw;
}

template <uint32 BYTES, bool IS_AXIS> __device__ inline void score(const MeanParams &p) {
    __shared__ float4 q[STAGED / 4];
    __shared__ float staged[STAGED_HEADS][CHUNK];
    __shared__ uint32 nan, seen;
    allow_next_kernel();
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, slice = blockIdx.x % p.scoring, number = blockIdx.x / p.scoring;
    if constexpr (!IS_AXIS) {
        // The length may be old, so it decides only what is prefetched.
        const uint32 of_heads = s.by_heads.divide(number), seq = s.by_lists.divide(of_heads);
        prefetch_tiles<BYTES>(p, seq, number - of_heads * s.kv_heads, slice, windows(p, load_hint(s.seq_lens + seq * s.seq_lens_seq)));
    }
    wait_for_previous_kernel();
    const Row row(s, number);
    const uint32 count = windows(p, row.tokens), heads = (row.last - row.first) * s.group;
    if (threadIdx.x == 0) nan = seen = 0;
    const uint32 at_once = min(STAGED / s.dim, STAGED_HEADS);
    uint32 saw = 0;
    for (uint32 first = 0; first < heads; first += at_once) {
        const uint32 here = min(at_once, heads - first);
        __syncthreads();
        for (uint32 t = threadIdx.x; t < here * s.dim; t += SCORING_THREADS) {
            const uint32 h = first + t / s.dim, c = t % s.dim, position = h / s.group;
            const char *at = s.q + row.seq * s.q_seq + (row.first + position) * s.q_pos + (row.head * s.group + h % s.group) * s.q_head + c * s.q_channel;
            const float x = load_query(at, s.q_type) * s.scale;
            reinterpret_cast<float *>(q)[t] = x;
            if (x != x) atomicOr(&nan, 1u << position);
        }
        __syncthreads();
        for (uint32 chunk = slice; chunk * CHUNK < count; chunk += p.scoring) {
            const float *staged_q = reinterpret_cast<const float *>(q);
            if constexpr (IS_AXIS) {
                saw |= multiply_axes<BYTES>(p, row, chunk, count, first, here, staged_q, staged);
            } else {
                prefetch_tiles<BYTES>(p, row.seq, row.head, chunk + p.scoring, count);
                saw |= p.adjacent ? multiply<BYTES, 8 / BYTES>(p, row, chunk, count, first, here, staged_q, staged)
                                  : multiply<BYTES, 1>(p, row, chunk, count, first, here, staged_q, staged);
            }
            __syncthreads();
            for (uint32 h = threadIdx.x / WARP; h < here && p.softmax; h += SCORING_WARPS) {
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

// The key of a window's score, the largest over the positions that see it; 0 if none does.
__device__ inline uint32 weigh_window(const MeanParams &p, const Row &row, uint32 w, uint32 nan, const float2 *head_weight) {
    const SelectParams &s = p.select;
    uint32 best = 0;
    for (uint32 query = row.first; query < row.last; query++) {
        const uint32 position = query - row.first, first = position * s.group;
        if (nan >> position & 1 || w >= windows(p, row.position(query) + 1)) continue;
        const float *products = p.products + (uint64(row.number) * p.heads + first) * s.place.capacity + w;
        float mass = 0.0f;
        bool counts = true;
#pragma unroll 4
        for (uint32 h = 0; h < s.group; h++) {
            const float product = __ldcg(products + uint64(h) * s.place.capacity);
            counts &= !p.is_axis || product > minus_infinity();
            mass = p.softmax ? mass + __expf(product - head_weight[first + h].x) * head_weight[first + h].y : product;
        }
        if (counts) best = max(best, sort_key(mass));
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 2) select_means_weigh(const __grid_constant__ MeanParams p) {
    __shared__ float2 head_weight[MOST_HEADS];  // the largest product, and the reciprocal of the sum
    __shared__ uint32 raised[TILE];         // keys of the tile's blocks
    __shared__ TopKShared top;
    __shared__ SinkShared shared;
    allow_next_kernel();
    const SelectParams &s = p.select;
    const RowSink sink(s, shared);
    sink.open();
    wait_for_previous_kernel();
    const uint32 lane = threadIdx.x % WARP;
    const Row row(s, sink.number);
    const Quota quota(s, row, budget_of(s, row.seq));
    const uint32 count = windows(p, row.tokens), heads = (row.last - row.first) * s.group;
    for (uint32 h = threadIdx.x / WARP; h < heads && p.softmax; h += TOPK_WARPS) {
        const float2 *from = reinterpret_cast<const float2 *>(p.partials) + (uint64(row.number) * p.heads + h) * p.chunks;
        Sum sum = {minus_infinity(), 0.0f};
        for (uint32 chunk = lane; chunk * CHUNK < count; chunk += WARP) {
            const float2 part = __ldcg(from + chunk);
            sum.join({part.x, part.y});
        }
        sum.join_lanes();
        if (lane == 0) head_weight[h] = sum.sum > 0.0f ? make_float2(sum.most, 1.0f / sum.sum) : make_float2(0.0f, 0.0f);
    }
    const uint32 nan = __ldcg(p.seen + s.by_slices.divide(gridDim.x) * p.scoring + row.number);
    __syncthreads();
    sink.join(quota);
    char *scores = s.scores + row.seq * s.scores_seq + row.list * s.scores_pos + row.head * s.scores_head;
    const uint32 share = (quota.stored + s.slices - 1) / s.slices, first = min(sink.slice * share, quota.stored), last = min(first + share, quota.stored);
    for (uint32 begin = first; begin < last; begin += TILE) {
        const uint32 end = min(begin + TILE, last);
        for (uint32 j = begin + threadIdx.x; j < end; j += TOPK_THREADS) raised[j - begin] = 0;
        __syncthreads();
        // The windows that overlap the tile.
        const uint64 token = uint64(begin) * s.block_size, past = uint64(end) * s.block_size;
        const uint32 from = token < p.size ? 0 : min(uint32((token - p.size) / p.stride) + 1, count), to = min((past + p.stride - 1) / p.stride, uint64(count));
        for (uint32 w = from + threadIdx.x; w < to; w += TOPK_THREADS) {
            const uint32 best = weigh_window(p, row, w, nan, head_weight);
            const uint32 window = w * p.stride, final = min((window + p.size - 1) / s.block_size, end - 1);
            for (uint32 j = max(window / s.block_size, begin); best > 0 && j <= final; j++) atomicMax(&raised[j - begin], best);
        }
        __syncthreads();
        for (uint32 j = begin + threadIdx.x; j < end; j += TOPK_THREADS) {
            const float score = score_of(raised[j - begin]);
            sink.put(quota, j, score);
            if (s.scores && j < s.max_blocks) as<float>(scores + j * s.scores_block) = score;
        }
    }
    // Whether there is a full window for which the index has no room.
    uint32 saw = row.tokens >= p.size && (row.tokens - p.size) / p.stride + 1 > s.place.capacity ? NO_SUMMARY : 0;
    for (uint32 n = threadIdx.x; sink.slice == 0 && n < p.scoring; n += TOPK_THREADS) saw |= __ldcg(p.seen + row.number * p.scoring + n);
    sink.report(saw);
    sink.finish(row, quota, top);
}
