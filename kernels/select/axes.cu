// Selection of blocks by AXIS in INT4, in one launch.
//
//   x[h, j] = scale·q_h·mean_j + ln(2·cosh(scale·q_h·axis_j)) · s[j] = Σ_h softmax_j(x[h, j]) · the exact top k of s
//
// Bytes: the summaries, once: 1.25·D of a block and KV head, .6 µs for 128K tokens of 8 heads. The rest is latency.
//
// Cut: a cluster of CTAs for each list, neighbouring blocks for each CTA. A warp copies 16 blocks at a time to shared memory, those after
// them meanwhile, and multiplies them with up to 16 heads on the tensor cores. A code c stands there as 16 + c, exact in bfloat16, a query
// as a sum of one to three such numbers; scales and minima follow in float32, 32 channels at a time:
//
//   Σ_c q_c·(min + scale·code_c) = scale·Σ_c q_c·(16 + code_c) + (min − 16·scale)·Σ_c q_c
//
// Products stay in shared memory. Of each CHUNK of blocks and head the largest, and the sum of 2^(product − largest), go to all CTAs of the
// cluster: chunks are of one size, so sums depend neither on the cluster nor on the batch.
//
//   queries ─ products ─ largest and sums ─ cluster ─ weights, keys ─ cluster ─ the first CTA selects
//
// On entry: one query position for each list; up to 8 · TILES heads; D a multiple of 64, at most 256; rows of summaries are single runs of
// 16-byte units.
//
// targets: compute_90

#include "common/cluster.cuh"
#include "select/rows.cuh"

constexpr uint32 BLOCKS = 16;                   // of a warp, at a time
constexpr uint32 CHUNK = 64;                    // blocks
constexpr uint32 GROUP = 32, MOST_GROUPS = 8;  // channels that share a scale; such groups of a part
constexpr uint32 HEADS = 8;                     // of a tile
constexpr uint32 MOST_TURNS = 2, MOST_CTAS = 16;
constexpr float LOG2_E = 1.44269504f;

__device__ inline void copy_16(char *to, const char *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All copies but the `COUNT` that ended last are here.
template <uint32 COUNT> __device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory"); }

// sum += a·b: 16 blocks by 16 channels, these by 8 heads.
__device__ inline void multiply_add(float (&sum)[4], const uint32 (&a)[4], const uint2 &b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 16 + code of the n-th and the (n + 4)-th of eight codes, in bfloat16.
__device__ inline uint32 widen_codes(uint32 codes, uint32 n) {
    const uint32 at_bit_3 = n == 0 ? codes << 3 : codes >> 4 * n - 3;
    return at_bit_3 & 0x00780078 | 0x41804180;
}

// What lies in dynamic shared memory: blocks on their way, and when these are read the row's scores (in the first CTA); then products, partial
// sums of the whole row, and queries.
extern __shared__ uint4 axes_room[];

struct AxesShared {
    TopKShared top;
    float sum[MOST_GROUPS][2 * HEADS];  // of a query's channels
    float2 of_head[2 * HEADS];          // the largest product, and what weights are multiplied by
    uint32 exist[TOPK_WARPS][MOST_TURNS];    // blocks on their way that are there
    uint32 saw[MOST_CTAS * TOPK_WARPS];      // in the first CTA: each warp of the cluster
    uint32 nan;
};

template <uint32 TILES> struct Axes {
    const AxesParams &p;
    const SelectParams &s;
    AxesShared &shared;
    char *const room;
    const uint32 thread, warp, lane, heads, groups, slice;
    const uint32 row_bytes, range_bytes, turn_bytes;  // of blocks on their way: rows apart by four banks
    uint32 seq, head, list;
    uint32 first, count;  // this CTA's blocks

    __device__ Axes(const AxesParams &p, AxesShared &shared)
        : p(p), s(p.select), shared(shared), room(reinterpret_cast<char *>(axes_room)), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP),
          heads(p.select.group), groups(p.select.dim / GROUP), slice(blockIdx.x % p.select.slices), row_bytes(p.select.dim + 16),
          range_bytes(p.select.dim / 4 + 16), turn_bytes(BLOCKS * (row_bytes + range_bytes)), first(0), count(0) {
        const uint32 number = blockIdx.x / s.slices;
        head = number % s.kv_heads, list = number / s.kv_heads % s.lists, seq = number / (s.kv_heads * s.lists);
    }

    // Splits queries into numbers of bfloat16, laid out as lanes read them: [terms, groups, steps, tiles, lanes]. A thread takes eight channels.
    __device__ void stage_queries() {
        uint2 *to = reinterpret_cast<uint2 *>(room + p.queries);
        for (uint32 task = thread; task < groups * TILES * WARP; task += TOPK_THREADS) {
            const uint32 group = task / (TILES * WARP), tile = task / WARP % TILES, h = tile * HEADS + lane / 4;
            const char *at = s.q + seq * s.q_seq + list * s.q_pos + (head * heads + h) * s.q_head + (group * GROUP + lane % 4 * 8) * s.q_channel;
            float x[8], sum = 0.0f;
            bool is_nan = false;
#pragma unroll
            for (uint32 i = 0; i < 8; i++) x[i] = h < heads ? load_query(at + i * s.q_channel, s.q_type) : 0.0f;
#pragma unroll
            for (uint32 i = 0; i < 8; i++) sum += x[i], is_nan |= x[i] != x[i];
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            if (lane % 4 == 0) shared.sum[group][h] = sum;
            if (is_nan) shared.nan = 1;
#pragma unroll 1
            for (uint32 term = 0; term < p.terms; term++) {
                uint32 of[8];
#pragma unroll
                for (uint32 i = 0; i < 8; i++) {
                    of[i] = narrow_bfloat16(x[i]);
                    const float rest = x[i] - widen_bfloat16(of[i]);
                    x[i] = rest == rest ? rest : 0.0f;  // of infinity nothing is left
                }
#pragma unroll
                for (uint32 step = 0; step < 2; step++)
                    to[(((term * groups + group) * 2 + step) * TILES + tile) * WARP + lane] =
                        make_uint2(of[2 * step] | of[2 * step + 4] << 16, of[2 * step + 1] | of[2 * step + 5] << 16);
            }
        }
    }

    __device__ char *turn_of(uint32 turn) const { return room + (warp * p.turns + turn) * turn_bytes; }

    // Begins to copy the CTA's blocks `begin` … begin + 15. Two lanes have a block.
    __device__ void copy(uint32 turn, uint32 begin) const {
        const uint32 n = begin + lane / 2, half = lane % 2;
        uint32 page, row;
        const bool exists = n < count && s.place.find(seq, first + n, page, row);
        const uint32 mask = __ballot_sync(FULL_WARP, exists);
        if (lane == 0) shared.exist[warp][turn] = mask;
        if (exists) {
            const char *axes = p.axes.at(page, row, head) + half * 16, *range = p.range.at(page, row, head);
            char *to = turn_of(turn) + lane / 2 * row_bytes + half * 16;
            for (uint32 m = 0; m < s.dim; m += 32) copy_16(to + m, axes + m);
            to = turn_of(turn) + BLOCKS * row_bytes + lane / 2 * range_bytes;
            for (uint32 m = half * 16; m < s.dim / 4; m += 32) copy_16(to + m, range + m);
        }
        end_copies();
    }

    // Products of 16 blocks with the heads: lane l has blocks l/4 and l/4 + 8, of each tile heads 2·(l%4) and the one after.
    __device__ uint32 multiply(uint32 turn, uint32 begin) const {
        const uint32 mask = shared.exist[warp][turn];
        const char *codes = turn_of(turn) + lane / 4 * row_bytes + lane % 4 * 4;
        const char *range = turn_of(turn) + BLOCKS * row_bytes + lane / 4 * range_bytes;
        const uint2 *q = reinterpret_cast<const uint2 *>(room + p.queries) + lane;
        float x[2][2][2 * TILES] = {};  // [part][block][head]
#pragma unroll 2
        for (uint32 group = 0; group < groups; group++) {
            uint32 word[2][2];  // [part][block]
            float sums[2][TILES][4] = {};
#pragma unroll
            for (uint32 part = 0; part < 2; part++)
#pragma unroll
                for (uint32 block = 0; block < 2; block++)
                    word[part][block] = as<uint32>(codes + block * HEADS * row_bytes + part * s.dim / 2 + group * 16);
#pragma unroll
            for (uint32 step = 0; step < 2; step++) {
                uint32 a[2][4];
#pragma unroll
                for (uint32 part = 0; part < 2; part++)
#pragma unroll
                    for (uint32 i = 0; i < 4; i++) a[part][i] = widen_codes(word[part][i % 2], 2 * step + i / 2);
#pragma unroll 1
                for (uint32 term = 0; term < p.terms; term++)
#pragma unroll
                    for (uint32 tile = 0; tile < TILES; tile++) {
                        const uint2 b = q[(((term * groups + group) * 2 + step) * TILES + tile) * WARP];
                        multiply_add(sums[0][tile], a[0], b), multiply_add(sums[1][tile], a[1], b);
                    }
            }
#pragma unroll
            for (uint32 part = 0; part < 2; part++)
#pragma unroll
                for (uint32 block = 0; block < 2; block++) {
                    const uint32 both = as<uint32>(range + block * HEADS * range_bytes + (part * groups + group) * 4);
                    const float scale = widen_float16(both & 0xffff), least = fmaf(-16.0f, scale, widen_float16(both >> 16));
#pragma unroll
                    for (uint32 n = 0; n < 2 * TILES; n++)
                        x[part][block][n] = fmaf(scale, sums[part][n / 2][2 * block + n % 2],
                                                 fmaf(least, shared.sum[group][n / 2 * HEADS + lane % 4 * 2 + n % 2], x[part][block][n]));
                }
        }
        float *products = reinterpret_cast<float *>(room + p.products);
        const float scale = s.scale * LOG2_E;
        uint32 saw = 0;
#pragma unroll
        for (uint32 block = 0; block < 2; block++) {
            const uint32 n = begin + block * HEADS + lane / 4;
            const bool exists = mask >> (lane / 4 + block * HEADS) * 2 & 1;
            if (n >= count) continue;
            if (!exists) saw |= NO_SUMMARY;
#pragma unroll
            for (uint32 m = 0; m < 2 * TILES; m++) {
                const uint32 h = m / 2 * HEADS + lane % 4 * 2 + m % 2;
                if (h >= heads) continue;
                const float along = fabsf(scale * x[1][block][m]);
                float product = fmaf(scale, x[0][block][m], along + log2_of(1.0f + exp2_of(-2.0f * along)));
                if (exists && product != product) saw |= SAW_NAN;
                if (!exists || !(fabsf(product) < -minus_infinity())) product = minus_infinity();
                products[n * p.pitch + h] = product;
            }
        }
        return saw;
    }
    __device__ uint32 multiply_all() const {
        constexpr uint32 STEP = TOPK_WARPS * BLOCKS;
        uint32 saw = 0, turn = 0, next = warp * BLOCKS;
        for (uint32 n = 0; n + 1 < p.turns; n++, next += STEP) copy(n, next);
        for (uint32 begin = warp * BLOCKS; begin < count; begin += STEP, next += STEP) {
            __syncwarp();  // what the next copies overwrite is read
            copy((turn + p.turns - 1) % p.turns, next);
            if (p.turns > 1)
                wait_for_copies<1>();
            else
                wait_for_copies<0>();
            __syncwarp();
            saw |= multiply(turn, begin);
            turn = (turn + 1) % p.turns;
        }
        return saw;
    }

    // Of each chunk and head the largest product and the sum, to all CTAs.
    __device__ void share_sums() const {
        const float *products = reinterpret_cast<const float *>(room + p.products);
        const uint32 chunks = (count + CHUNK - 1) / CHUNK;
        for (uint32 task = warp; task < chunks * heads; task += TOPK_WARPS) {
            const uint32 chunk = task / heads, h = task % heads;
            float x[CHUNK / WARP], most = minus_infinity(), sum = 0.0f;
#pragma unroll
            for (uint32 i = 0; i < CHUNK / WARP; i++) {
                const uint32 n = chunk * CHUNK + i * WARP + lane;
                x[i] = n < count ? products[n * p.pitch + h] : minus_infinity();
                most = fmaxf(most, x[i]);
            }
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
#pragma unroll
            for (uint32 i = 0; i < CHUNK / WARP; i++) sum += most == minus_infinity() ? 0.0f : exp2_of(x[i] - most);
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            uint32 *at = reinterpret_cast<uint32 *>(room + p.partials) + ((first / CHUNK + chunk) * heads + h) * 2;
            if (lane < s.slices) store_word_to(lane, at, __float_as_uint(most)), store_word_to(lane, at + 1, __float_as_uint(sum));
        }
    }
    __device__ void weigh_heads(uint32 stored) const {
        const uint32 chunks = (stored + CHUNK - 1) / CHUNK;
        const float2 *partials = reinterpret_cast<const float2 *>(room + p.partials);
        for (uint32 h = warp; h < heads; h += TOPK_WARPS) {
            float most = minus_infinity(), sum = 0.0f;
            for (uint32 chunk = lane; chunk < chunks; chunk += WARP) most = fmaxf(most, partials[chunk * heads + h].x);
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
            for (uint32 chunk = lane; chunk < chunks && most > minus_infinity(); chunk += WARP) {
                const float2 part = partials[chunk * heads + h];
                sum = fmaf(part.y, exp2_of(part.x - most), sum);
            }
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            if (lane == 0) shared.of_head[h] = sum > 0.0f ? make_float2(most, 1.0f / sum) : make_float2(0.0f, 0.0f);
        }
    }

    // The score of the CTA's n-th block.
    __device__ float mass(uint32 n) const {
        const float *products = reinterpret_cast<const float *>(room + p.products) + n * p.pitch;
        float sum = 0.0f;
        bool counts = !shared.nan;
#pragma unroll 4
        for (uint32 h = 0; h < heads; h++) {
            const float product = products[h];
            counts &= product > minus_infinity();
            sum = fmaf(exp2_of(product - shared.of_head[h].x), shared.of_head[h].y, sum);
        }
        return counts ? sum : minus_infinity();
    }

    __device__ void run() {
        if (thread == 0) shared.nan = 0;
        cluster_arrive();
        wait_for_previous_kernel();
        const Lengths lengths(s, seq);
        __syncthreads();
        stage_queries();
        const Row row(s, blockIdx.x / s.slices, lengths);
        const uint32 stored = min(row.n, s.place.capacity), share = ((stored + CHUNK - 1) / CHUNK + s.slices - 1) / s.slices * CHUNK;
        first = min(slice * share, stored), count = min(share, stored - first);
        __syncthreads();
        uint32 saw = multiply_all();
        if (row.n > stored) saw |= NO_SUMMARY;
        if (shared.nan && row.first < row.last) saw |= SAW_NAN;
        __syncthreads();
        cluster_wait();  // all have started
        share_sums();
        synchronise();
        weigh_heads(stored);
        __syncthreads();
        uint32 *keys = reinterpret_cast<uint32 *>(room);
        char *scores = s.scores + seq * s.scores_seq + list * s.scores_pos + head * s.scores_head;
        for (uint32 n = thread; n < count; n += TOPK_THREADS) {
            const float score = mass(n);
            store_word_to(0, keys + first + n, __float_as_uint(score));
            if (s.scores && first + n < s.max_blocks) as<float>(scores + (first + n) * s.scores_block) = score;
        }
        saw = __reduce_or_sync(FULL_WARP, saw);
        if (lane == 0) store_word_to(0, &shared.saw[slice * TOPK_WARPS + warp], saw);
        synchronise();
        if (slice > 0) return;
        uint32 seen = 0;
        for (uint32 n = lane; n < s.slices * TOPK_WARPS; n += WARP) seen |= shared.saw[n];
        finish(s, row, stored, __reduce_or_sync(FULL_WARP, seen), shared.top, [&](uint32 j) { return __uint_as_float(keys[j]); });
    }
    // What was written to any shared memory of the cluster, all see.
    __device__ void synchronise() const {
        if (s.slices == 1) {
            __syncthreads();
        } else {
            cluster_arrive();
            cluster_wait();
        }
    }
};

template <uint32 TILES> __device__ inline void select_axes(const AxesParams &p) {
    __shared__ AxesShared shared;
    allow_next_kernel();
    Axes<TILES>(p, shared).run();
}

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) select_axes_8(const __grid_constant__ AxesParams p) { select_axes<1>(p); }
extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) select_axes_16(const __grid_constant__ AxesParams p) { select_axes<2>(p); }
