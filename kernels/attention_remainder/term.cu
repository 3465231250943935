// Joins what a list leaves out to the states that attention has written, and writes its results again.
//
//   t = mean_v + ½·scale·covarianceᵀ·q · m' = max(m, log_mass) · l' = l·e^(m−m') + e^(log_mass−m') · acc' = acc·e^(m−m') + t·e^(log_mass−m')
//   out = acc' / (l' + e^(sink − m')) · lse = m' + ln l'
//
// Bytes: the covariance of each sequence and KV head once for every four rows that read it, the states once each way.
//
// Two launches. attention_term: a CTA has four query heads of a KV head of one position and 32 channels of values; its warps take every eighth channel of
// keys, and their sums join in shared memory. It writes acc and out, and reads m and l as they were. attention_term_sums: a thread has a
// row; it writes m, l and lse. Rows without a term are not touched.
//
// targets: compute_80

#include "attention/join.cuh"

constexpr uint32 HEADS = 4, MOST_DIM = 576, STRIP = WARP;
constexpr uint32 AHEAD = 16;  // elements of the covariance that a thread has under way

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
    uint32 strips;          // groups of 32 channels of values
    float scale;            // ½·scale
    uint32 units;           // B · Q · Hk
    uint32 unused;
};
#include "attention_remainder/layout.cuh"

// A sequence's KV head at a position, and the row of its means; −1: the position has no term.
struct Unit {
    uint32 seq, position, head;
    int32 row;

    __device__ Unit(const TermParams &p, uint32 n) {
        const uint32 above = p.to.kv_heads.divide(n);
        head = n - above * p.to.kv_heads.value, seq = above / p.to.positions, position = above % p.to.positions;
        const int32 queries = p.to.q_lens.data ? clamped(as<int32>(p.to.q_lens.at(seq)), p.to.positions) : int32(p.to.positions);
        row = p.rows.data ? as<int32>(p.rows.at(seq)) : int32(seq);
        if (int32(position) >= queries || row < 0 || uint32(row) >= p.count || as<int32>(p.tokens.at(row, head)) <= 0) row = -1;
    }
};

// A row's m' in natural logarithms, its l', and what acc and t are multiplied by.
struct Weights {
    float m, l, keep, take;
    bool exist;

    __device__ Weights(const TermParams &p, const Unit &unit, uint32 query_head) : m(0.0f), l(0.0f), keep(1.0f), take(0.0f) {
        const float log_mass = as<float>(p.log_mass.at(unit.seq, unit.position, query_head));
        const float sum = as<float>(p.l.at(unit.seq, unit.position, query_head)), most = as<float>(p.m.at(unit.seq, unit.position, query_head));
        exist = fabsf(log_mass) < -minus_infinity();
        if (!exist) return;
        const float of_list = sum == 0.0f ? minus_infinity() : most;
        m = fmaxf(of_list, log_mass);
        // Only the difference is scaled, as in merge.cu.
        keep = of_list == minus_infinity() ? 0.0f : exp2_fast((of_list - m) * LOG2_E);
        take = exp2_fast((log_mass - m) * LOG2_E);
        l = sum * keep + take;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) attention_term(const __grid_constant__ TermParams p) {
    __shared__ float q[HEADS][MOST_DIM], sums[WARPS][HEADS][STRIP];
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, begin = blockIdx.x % p.strips * STRIP;
    const uint32 four = blockIdx.x / p.strips, first = four % p.fours * HEADS, group = p.to.group.value;
    const Unit unit(p, four / p.fours);
    if (unit.row < 0) return;
    const uint32 heads = min(HEADS, group - first), query_head = unit.head * group + first;
    for (uint32 n = threadIdx.x; n < HEADS * p.to.dim; n += THREADS) {
        const uint32 h = n / p.to.dim, c = n - h * p.to.dim;
        q[h][c] = h < heads ? load_query(p.to.q.at(unit.seq, unit.position, query_head + h, c), p.to.q_type) * p.scale : 0.0f;
    }
    __syncthreads();
    float sum[HEADS] = {};
    if (begin + lane < p.to.value_dim) {
        for (uint32 first_key = warp; first_key < p.to.dim; first_key += AHEAD * WARPS) {
            const char *const from = p.covariance.at(unit.row, unit.head, first_key, begin + lane);
            float x[AHEAD];
#pragma unroll
            for (uint32 n = 0; n < AHEAD; n++) x[n] = first_key + n * WARPS < p.to.dim ? as<float>(from + n * WARPS * p.covariance.step[2]) : 0.0f;
#pragma unroll
            for (uint32 n = 0; n < AHEAD; n++) {
                if (first_key + n * WARPS >= p.to.dim) break;
#pragma unroll
                for (uint32 h = 0; h < HEADS; h++) sum[h] = fmaf(x[n], q[h][first_key + n * WARPS], sum[h]);
            }
        }
    }
#pragma unroll
    for (uint32 h = 0; h < HEADS; h++) sums[warp][h][lane] = sum[h];
    __syncthreads();
    // A thread has two channels of a head.
    const uint32 h = threadIdx.x / (STRIP / 2), within = threadIdx.x % (STRIP / 2) * 2, channel = begin + within;
    if (h >= heads || channel >= p.to.value_dim) return;
    const Weights weights(p, unit, query_head + h);
    if (!weights.exist) return;
    float2 t{as<float>(p.mean_v.at(unit.row, unit.head, channel)), as<float>(p.mean_v.at(unit.row, unit.head, channel + 1))};
#pragma unroll
    for (uint32 w = 0; w < WARPS; w++) t.x += sums[w][h][within], t.y += sums[w][h][within + 1];
    const char *const before = p.to.state.acc.at(unit.seq, unit.position, query_head + h, 0, channel);
    const float2 acc{as<float>(before) * weights.keep + t.x * weights.take,
                     as<float>(before + p.to.state.acc.step[4]) * weights.keep + t.y * weights.take};
    write_results(p.to, {unit.seq, unit.position, unit.head, 0}, first + h, channel, acc, weights.m * LOG2_E, weights.l);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_term_sums(const __grid_constant__ TermParams p) {
    const uint32 n = blockIdx.x * THREADS + threadIdx.x, of = p.to.group.divide(n);
    if (of >= p.units) return;
    const Unit unit(p, of);
    if (unit.row < 0) return;
    const uint32 query_head = unit.head * p.to.group.value + n - of * p.to.group.value;
    const Weights weights(p, unit, query_head);
    if (!weights.exist) return;
    as<float>(p.m.at(unit.seq, unit.position, query_head)) = weights.m;
    as<float>(p.l.at(unit.seq, unit.position, query_head)) = weights.l;
    if (p.lse.data) as<float>(p.lse.at(unit.seq, unit.position, query_head)) = weights.m + logf(weights.l);
}
