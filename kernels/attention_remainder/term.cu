// Joins what a list leaves out to the states that attention has written, and writes its results again.
//
//   t = mean_v + ½·scale·covarianceᵀ·q · m' = max(m, log_mass) · l' = l·e^(m−m') + e^(log_mass−m') · acc' = acc·e^(m−m') + t·e^(log_mass−m')
//   out = acc' / (l' + e^(sink − m')) · lse = m' + ln l'
//
// Bytes: the covariance of each sequence and KV head once for every four rows that read it, the states once each way.
//
// A cluster has four query heads of a KV head of one position, and its CTAs take strips of 16 channels of values. The kernel starts beside attention,
// and asks the L2 cache for its strips. Once attention has ended, all that a CTA reads is one round trip: four lanes have a key channel's
// 16 values, 64 channels at a time, and their sums join in the warp, then in shared memory. The first CTA writes m, l and lse once all of the
// cluster have read them. Rows without a term are not touched.
//
// Rows of means may be written by a kernel that still runs when they are asked for: what they say then is a guess, and is read again.
//
// targets: compute_80, compute_90

#include "attention/join.cuh"
#include "common/cluster.cuh"
#include "common/parameters.cuh"

constexpr uint32 HEADS = 4, STRIP = 16;
constexpr uint32 QUADS = STRIP / 4, KEYS = THREADS / QUADS;  // lanes of a key channel, key channels at a time
constexpr uint32 AHEAD = 2;                                  // key channels that a thread has under way

struct TermParams {
    AttentionParams to;     // q, lengths, sizes, acc and out; every position has a list of its own
    View<1> rows;           // [B]; NULL: sequence i has row i
    View<2> tokens;         // [N, Hk]
    View<3> mean_v;         // [N, Hk, Dv]
    View<4> covariance;     // [N, Hk, D, Dv]
    View<3> log_mass;       // [B, Q, Hq]
    View<3> m, l, lse;      // [B, Q, Hq]; lse may be NULL
    uint32 count;           // N
    uint32 fours;           // groups of four query heads of a KV head
    uint32 strips;          // groups of 16 channels of values
    float scale;            // ½·scale
    uint32 adjacent;        // four channels of a covariance can be loaded at once
    uint32 unused;
};
#include "attention_remainder/layout.cuh"

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

// Some channels of keys: their rows of a strip, and the queries. What does not exist is 0.
struct Chunk {
    float4 x[AHEAD];
    float q[AHEAD][HEADS];

    __device__ void load_rows(const TermParams &p, const Unit &unit, int32 row, uint32 channel, uint32 key) {
#pragma unroll
        for (uint32 n = 0; n < AHEAD; n++) {
            x[n] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (key + n * KEYS >= p.to.dim || channel >= p.to.value_dim || !is_row(p, row)) continue;
            const char *const from = p.covariance.at(row, unit.head, key + n * KEYS, channel);
            const int64 step = p.covariance.step[3];
            if (p.adjacent) x[n] = as<float4>(from);
            else x[n] = {as<float>(from), as<float>(from + step), as<float>(from + 2 * step), as<float>(from + 3 * step)};
        }
    }
    __device__ void load_queries(const TermParams &p, const Unit &unit, uint32 key) {
#pragma unroll
        for (uint32 n = 0; n < AHEAD; n++)
#pragma unroll
            for (uint32 h = 0; h < HEADS; h++) {
                const bool exists = h < unit.heads && key + n * KEYS < p.to.dim;
                q[n][h] = exists ? load_query(p.to.q.at(unit.seq, unit.position, unit.query_head(p, h), key + n * KEYS), p.to.q_type) : 0.0f;
            }
    }
    __device__ void add_to(float (&sum)[HEADS][4], float scale) const {
#pragma unroll
        for (uint32 n = 0; n < AHEAD; n++)
#pragma unroll
            for (uint32 h = 0; h < HEADS; h++) {
                const float factor = q[n][h] * scale;
                sum[h][0] = fmaf(x[n].x, factor, sum[h][0]), sum[h][1] = fmaf(x[n].y, factor, sum[h][1]);
                sum[h][2] = fmaf(x[n].z, factor, sum[h][2]), sum[h][3] = fmaf(x[n].w, factor, sum[h][3]);
            }
    }
};

// Adds the sums of the lanes that have the same four channels; each is left with a head and two channels.
__device__ inline float2 join_lanes(const float (&sum)[HEADS][4], uint32 lane) {
    const bool upper = lane & 16, odd = lane & 8, right = lane & 4;
    float two[2][4], one[4];
#pragma unroll
    for (uint32 h = 0; h < 2; h++)
#pragma unroll
        for (uint32 n = 0; n < 4; n++) {
            const float sent = upper ? sum[h][n] : sum[h + 2][n], kept = upper ? sum[h + 2][n] : sum[h][n];
            two[h][n] = kept + __shfl_xor_sync(FULL_WARP, sent, 16);
        }
#pragma unroll
    for (uint32 n = 0; n < 4; n++) {
        const float sent = odd ? two[0][n] : two[1][n], kept = odd ? two[1][n] : two[0][n];
        one[n] = kept + __shfl_xor_sync(FULL_WARP, sent, 8);
    }
    const float x = __shfl_xor_sync(FULL_WARP, right ? one[0] : one[2], 4), y = __shfl_xor_sync(FULL_WARP, right ? one[1] : one[3], 4);
    return {(right ? one[2] : one[0]) + x, (right ? one[3] : one[1]) + y};
}

// What a row of attention has in its state, and what is joined to it.
struct RowSums {
    float log_mass, m, l;

    __device__ void load(const TermParams &p, const Unit &unit, uint32 head) {
        log_mass = as<float>(p.log_mass.at(unit.seq, unit.position, head));
        m = as<float>(p.m.at(unit.seq, unit.position, head)), l = as<float>(p.l.at(unit.seq, unit.position, head));
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

extern "C" __global__ void __launch_bounds__(THREADS) attention_term(const __grid_constant__ TermParams p) {
    __shared__ float2 sums[WARPS][HEADS][STRIP / 2];
    __shared__ uint32 words[WARP];
    const uint32 word = request_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    const uint32 ctas = cluster_ctas(), rank = cluster_rank(), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint32 key = threadIdx.x / QUADS, quad = threadIdx.x % QUADS * 4;
    const Unit unit(p, blockIdx.x / ctas);
    allow_next_kernel();
    int32 row = p.rows.data ? load_hint(p.rows.at(unit.seq)) : int32(unit.seq);
    if (is_row(p, row) && quad == 0)
        for (uint32 strip = rank; strip < p.strips; strip += ctas)
            for (uint32 k = key; k < p.to.dim; k += KEYS) prefetch(p.covariance.at(row, unit.head, k, strip * STRIP));
    wait_for_previous_kernel();
    Chunk chunk;
    chunk.load_rows(p, unit, row, rank * STRIP + quad, key);
    chunk.load_queries(p, unit, key);
    const int32 row_now = p.rows.data ? as<int32>(p.rows.at(unit.seq)) : int32(unit.seq);
    const int32 queries = p.to.q_lens.data ? clamped(as<int32>(p.to.q_lens.at(unit.seq)), p.to.positions) : int32(p.to.positions);
    // Each lane of the first warp has two channels of a head.
    const uint32 h = lane / (STRIP / 2), within = lane % (STRIP / 2) * 2, query_head = unit.query_head(p, h);
    RowSums row_sums{minus_infinity(), 0.0f, 0.0f};
    if (warp == 0 && h < unit.heads) row_sums.load(p, unit, query_head);
    if (row_now != row) {
        row = row_now;
        chunk.load_rows(p, unit, row, rank * STRIP + quad, key);
    }
    // The cluster agrees.
    if (int32(unit.position) >= queries || !is_row(p, row) || as<int32>(p.tokens.at(row, unit.head)) <= 0) return;
    const Weights weights(row_sums);
    for (uint32 strip = rank; strip < p.strips; strip += ctas) {
        const uint32 begin = strip * STRIP, channel = begin + within;
        const bool is_written = warp == 0 && weights.exist && channel < p.to.value_dim;
        float2 t{0.0f, 0.0f}, acc{0.0f, 0.0f};
        if (is_written) {
            const char *const before = p.to.state.acc.at(unit.seq, unit.position, query_head, 0, channel);
            acc = {as<float>(before), as<float>(before + p.to.state.acc.step[4])};
            t = {as<float>(p.mean_v.at(row, unit.head, channel)), as<float>(p.mean_v.at(row, unit.head, channel + 1))};
        }
        float sum[HEADS][4] = {};
        if (strip > rank) chunk.load_rows(p, unit, row, begin + quad, key), chunk.load_queries(p, unit, key);
        chunk.add_to(sum, p.scale);
        for (uint32 k = key + AHEAD * KEYS; k < p.to.dim; k += AHEAD * KEYS) {
            chunk.load_rows(p, unit, row, begin + quad, k), chunk.load_queries(p, unit, k);
            chunk.add_to(sum, p.scale);
        }
        const float2 joined = join_lanes(sum, lane);
        sums[warp][lane / 16 * 2 + lane / 8 % 2][quad / 2 + lane / 4 % 2] = joined;
        __syncthreads();
        if (is_written) {
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) t.x += sums[w][h][within / 2].x, t.y += sums[w][h][within / 2].y;
            acc = {acc.x * weights.keep + t.x * weights.take, acc.y * weights.keep + t.y * weights.take};
            write_results(p.to, {unit.seq, unit.position, unit.head, 0}, unit.first + h, channel, acc, weights.m * LOG2_E, weights.l);
        }
        __syncthreads();
    }
    cluster_arrive();
    cluster_wait();
    if (rank > 0 || warp > 0 || within > 0 || !weights.exist) return;
    as<float>(p.m.at(unit.seq, unit.position, query_head)) = weights.m;
    as<float>(p.l.at(unit.seq, unit.position, query_head)) = weights.l;
    if (p.lse.data) as<float>(p.lse.at(unit.seq, unit.position, query_head)) = weights.m + logf(weights.l);
}
