// Joins what a list leaves out to the states that attention has written, and writes its results again, where attention does not join it itself
// (decode128.cuh).
//
//   t = mean_v + ½·scale·covarianceᵀ·q · m' = max(m, log_mass) · l' = l·e^(m−m') + e^(log_mass−m') · acc' = acc·e^(m−m') + t·e^(log_mass−m')
//   out = acc' / (l' + e^(sink − m')) · lse = m' + ln l'
//
// Bytes: the covariance of each sequence and KV head once for every four rows that read it, the states once each way.
//
// A cluster has four query heads of a KV head of one position, and its CTAs take strips of 64 channels of values. A strip of 128 key channels lies in
// shared memory, where 16 lanes have a key channel; their sums join there. The kernel starts beside attention: CTAs are small enough to lie
// beside those of decode128. Everything but writing is done twice, before attention has ended and after, so that then the covariance is in the L2
// cache, the instructions are in theirs, and all that is read is one round trip. What the first pass reads may be changing; nothing of it is used but
// the row of means, as a guess. The first CTA writes m, l and lse once all of the cluster have read them. Rows without a term are not touched.
//
// targets: compute_80, compute_90

#include "attention/join.cuh"
#include "attention_remainder/params.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/parameters.cuh"

constexpr uint32 TERM_WARPS = TERM_THREADS / WARP, KEYS = 128;
constexpr uint32 QUADS = STRIP / 4, LANES = TERM_THREADS / QUADS;  // lanes of a key channel, key channels at a time
#if __CUDA_ARCH__ >= 900
constexpr uint32 PASSES = 2;
#else
constexpr uint32 PASSES = 1;  // the kernel starts once attention has ended
#endif

// Four query heads of a sequence's KV head at a position.
struct Unit {
    uint32 seq, position, head, first, heads;

    __device__ Unit(const TermParams &p, uint32 number) {
        const uint32 n = number / p.fours, above = p.to.kv_heads.divide(n);
        head = n - above * p.to.kv_heads.value, seq = above / p.to.positions, position = above - seq * p.to.positions;
        first = (number - n * p.fours) * HEADS, heads = min(HEADS, p.to.group.value - first);
    }
    __device__ uint32 query_head(const TermParams &p, uint32 h) const { return head * p.to.group.value + first + h; }
};

__device__ inline bool is_row(const TermParams &p, int32 row) { return row >= 0 && uint32(row) < p.count; }

// Loads what another kernel may have written since this one started: not from the L1 cache.
__device__ inline float load_float(const char *p) { return __ldcg(reinterpret_cast<const float *>(p)); }
__device__ inline int32 load_int(const char *p) { return __ldcg(reinterpret_cast<const int32 *>(p)); }

struct TermShared {
    float4 rows[KEYS][QUADS];               // of the covariance; what does not exist is 0
    float4 q[KEYS];                         // of the heads, times ½·scale
    float2 sums[TERM_WARPS][HEADS][STRIP / 2];
};

// Requests a strip of the covariance's rows from `first` on.
__device__ inline void request_rows(const TermParams &p, const Unit &unit, int32 row, uint32 begin, uint32 first, TermShared &shared) {
    const uint32 quad = threadIdx.x % QUADS, channel = begin + quad * 4;
    const int64 step = p.covariance.step[3];
#pragma unroll 1
    for (uint32 k = threadIdx.x / QUADS; k < KEYS; k += LANES) {
        const bool exists = is_row(p, row) && first + k < p.to.dim && channel < p.to.value_dim;
        const char *const from = exists ? p.covariance.at(row, unit.head, first + k, channel) : p.covariance.data;
        if (p.adjacent) copy_16(shared_address(&shared.rows[k][quad]), from, exists);
        else if (!exists) shared.rows[k][quad] = {0.0f, 0.0f, 0.0f, 0.0f};
        else shared.rows[k][quad] = {load_float(from), load_float(from + step), load_float(from + 2 * step), load_float(from + 3 * step)};
    }
    end_copies();
}
__device__ inline void load_queries(const TermParams &p, const Unit &unit, uint32 first, TermShared &shared) {
    float x[HEADS * KEYS / TERM_THREADS];
#pragma unroll
    for (uint32 n = 0; n < HEADS * KEYS / TERM_THREADS; n++) {
        const uint32 at = threadIdx.x + n * TERM_THREADS, h = at / KEYS, key = first + at % KEYS;
        x[n] = 0.0f;
        if (h >= unit.heads || key >= p.to.dim) continue;
        const char *const from = p.to.q.at(unit.seq, unit.position, unit.query_head(p, h), key);
        if (p.to.q_type == FLOAT32) {
            x[n] = load_float(from);
        } else {
            const uint32 bits = __ldcg(reinterpret_cast<const uint16 *>(from));
            x[n] = p.to.q_type == FLOAT16 ? widen_float16(bits) : widen_bfloat16(bits);
        }
    }
#pragma unroll
    for (uint32 n = 0; n < HEADS * KEYS / TERM_THREADS; n++) {
        const uint32 at = threadIdx.x + n * TERM_THREADS;
        reinterpret_cast<float *>(shared.q)[at % KEYS * HEADS + at / KEYS] = x[n] * p.scale;
    }
}
// Adds the products of the lane's key channels.
__device__ inline void multiply(const TermShared &shared, float (&sum)[HEADS][4]) {
#pragma unroll 2
    for (uint32 k = threadIdx.x / QUADS; k < KEYS; k += LANES) {
        const float4 x = shared.rows[k][threadIdx.x % QUADS], of_heads = shared.q[k];
        const float q[HEADS] = {of_heads.x, of_heads.y, of_heads.z, of_heads.w};
#pragma unroll
        for (uint32 h = 0; h < HEADS; h++) {
            sum[h][0] = fmaf(x.x, q[h], sum[h][0]), sum[h][1] = fmaf(x.y, q[h], sum[h][1]);
            sum[h][2] = fmaf(x.z, q[h], sum[h][2]), sum[h][3] = fmaf(x.w, q[h], sum[h][3]);
        }
    }
}
// Two lanes of a warp have the same channels: each keeps the sums of two heads.
__device__ inline void store_sums(const float (&sum)[HEADS][4], TermShared &shared) {
    const uint32 lane = threadIdx.x % WARP, upper = lane / QUADS;
#pragma unroll
    for (uint32 h = 0; h < HEADS / 2; h++) {
        float x[4];
#pragma unroll
        for (uint32 n = 0; n < 4; n++) {
            const float sent = upper ? sum[h][n] : sum[h + 2][n], kept = upper ? sum[h + 2][n] : sum[h][n];
            x[n] = kept + __shfl_xor_sync(FULL_WARP, sent, QUADS);
        }
        float2 *const to = &shared.sums[threadIdx.x / WARP][h + 2 * upper][lane % QUADS * 2];
        to[0] = {x[0], x[1]}, to[1] = {x[2], x[3]};
    }
}

// What a row of attention has in its state, and what is joined to it.
struct RowSums {
    float log_mass, m, l;

    __device__ void load(const TermParams &p, const Unit &unit, uint32 head) {
        log_mass = load_float(p.log_mass.at(unit.seq, unit.position, head));
        m = load_float(p.m.at(unit.seq, unit.position, head)), l = load_float(p.l.at(unit.seq, unit.position, head));
    }
};

// A row's m' in natural logarithms, its l', and what acc and t are multiplied by.
struct Weights {
    float m, l, keep, take;
    bool exist;

    __device__ explicit Weights(const RowSums &row) : m(0.0f), l(0.0f), keep(1.0f), take(0.0f) {
        exist = fabsf(row.log_mass) < -minus_infinity();
        if (!exist) return;
        const float of_list = row.l == 0.0f ? minus_infinity() : row.m;
        m = fmaxf(of_list, row.log_mass);
        // Only the difference is scaled, as in merge.cu.
        keep = of_list == minus_infinity() ? 0.0f : exp2_fast((of_list - m) * LOG2_E);
        take = exp2_fast((row.log_mass - m) * LOG2_E);
        l = row.l * keep + take;
    }
};

extern "C" __global__ void __launch_bounds__(TERM_THREADS, PASSES == 2 ? 5 : 4) attention_term(const __grid_constant__ TermParams p) {
    __shared__ TermShared shared;
    __shared__ uint32 words[WARP];
    request_parameters(p, words);
    const uint32 ctas = cluster_ctas(), rank = cluster_rank();
    const Unit unit(p, blockIdx.x / ctas);
    // Each warp has a head, of which each thread has two channels.
    const uint32 h = threadIdx.x / WARP, within = threadIdx.x % WARP * 2, query_head = unit.query_head(p, h);
    allow_next_kernel();
    int32 row = -1;
    Weights weights(RowSums{minus_infinity(), 0.0f, 0.0f});
#pragma unroll 1
    for (uint32 pass = 1; pass <= PASSES; pass++) {
        const bool is_final = pass == PASSES;
        if (is_final) wait_for_previous_kernel();
#pragma unroll 1
        for (uint32 strip = rank; strip < p.strips; strip += ctas) {
            const uint32 begin = strip * STRIP, channel = begin + within;
            if (row >= 0) request_rows(p, unit, row, begin, 0, shared);
            load_queries(p, unit, 0, shared);
            const int32 row_now = p.rows.data ? load_int(p.rows.at(unit.seq)) : int32(unit.seq);
            const int32 queries = p.to.q_lens.data ? clamped(load_int(p.to.q_lens.at(unit.seq)), p.to.positions) : int32(p.to.positions);
            const bool has_channel = h < unit.heads && channel < p.to.value_dim;
            RowSums of_row{minus_infinity(), 0.0f, 0.0f};
            float2 acc{0.0f, 0.0f};
            if (has_channel) {
                of_row.load(p, unit, query_head);
                const char *const before = p.to.state.acc.at(unit.seq, unit.position, query_head, 0, channel);
                acc = {load_float(before), load_float(before + p.to.state.acc.step[4])};
            }
            if (row_now != row) {
                row = row_now;
                wait_copies<0>();
                request_rows(p, unit, row, begin, 0, shared);
            }
            const bool has_term = int32(unit.position) < queries && is_row(p, row) && load_int(p.tokens.at(row, unit.head)) > 0;
            // The cluster agrees.
            if (is_final && !has_term) return;
            float2 t{0.0f, 0.0f};
            if (has_channel && is_row(p, row)) {
                const char *const mean = p.mean_v.at(row, unit.head, channel);
                t = {load_float(mean), load_float(mean + p.mean_v.step[2])};
            }
            if (has_channel) weights = Weights(of_row);
            float sum[HEADS][4] = {};
#pragma unroll 1
            for (uint32 first = 0;;) {
                wait_copies<0>();
                __syncthreads();
                multiply(shared, sum);
                first += KEYS;
                if (first >= p.to.dim) break;
                __syncthreads();
                request_rows(p, unit, row, begin, first, shared);
                load_queries(p, unit, first, shared);
            }
            store_sums(sum, shared);
            __syncthreads();
            if (has_channel) {
#pragma unroll
                for (uint32 w = 0; w < TERM_WARPS; w++) t.x += shared.sums[w][h][within / 2].x, t.y += shared.sums[w][h][within / 2].y;
                acc = {acc.x * weights.keep + t.x * weights.take, acc.y * weights.keep + t.y * weights.take};
                if (is_final && weights.exist)
                    write_results(p.to, {unit.seq, unit.position, unit.head, 0}, unit.first + h, channel, acc, weights.m * LOG2_E, weights.l);
            }
            __syncthreads();
        }
    }
    cluster_arrive();
    cluster_wait();
    if (rank > 0 || h >= unit.heads || within > 0 || !weights.exist) return;
    as<float>(p.m.at(unit.seq, unit.position, query_head)) = weights.m;
    as<float>(p.l.at(unit.seq, unit.position, query_head)) = weights.l;
    if (p.lse.data) as<float>(p.lse.at(unit.seq, unit.position, query_head)) = weights.m + logf(weights.l);
}
