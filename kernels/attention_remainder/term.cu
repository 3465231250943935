// Joins what a list leaves out to the states that attention has written, and writes its results again.
//
//   t = mean_v + ½·scale·covarianceᵀ·q · m' = max(m, log_mass) · l' = l·e^(m−m') + e^(log_mass−m') · acc' = acc·e^(m−m') + t·e^(log_mass−m')
//   out = acc' / (l' + e^(sink − m')) · lse = m' + ln l'
//
// Bytes: the covariance of each sequence and KV head once for every four rows that read it, the states once each way.
//
// A CTA has four query heads of a KV head of one position. Its warps take every eighth channel of keys, their lanes the channels of values;
// sums of the warps join in shared memory. Rows without a term are not touched.
//
// targets: compute_80

#include "attention/join.cuh"

constexpr uint32 HEADS = 4, MOST_DIM = 576, COLUMNS = 4, STRIP = COLUMNS * WARP;

struct TermParams {
    AttentionParams to;     // q, lengths, outputs and sizes; every position has a list of its own
    View<1> rows;           // [B]; NULL: sequence i has row i
    View<2> tokens;         // [N, Hk]
    View<3> mean_v;         // [N, Hk, Dv]
    View<4> covariance;     // [N, Hk, D, Dv]
    View<3> log_mass;       // [B, Q, Hq]
    uint32 count;           // N
    uint32 fours;           // groups of four query heads of a KV head
    float scale;            // ½·scale
    uint32 unused;
};
#include "attention_remainder/layout.cuh"

struct Shared {
    float q[HEADS][MOST_DIM];
    float sums[WARPS][HEADS][STRIP];
    float m[HEADS], l[HEADS], keep[HEADS], take[HEADS];  // m in natural logarithms; take 0: no term
};

extern "C" __global__ void __launch_bounds__(THREADS) attention_term(const __grid_constant__ TermParams p) {
    __shared__ Shared s;
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint32 unit = blockIdx.x / p.fours, first = blockIdx.x % p.fours * HEADS, group = p.to.group.value;
    const uint32 row = p.to.kv_heads.divide(unit), head = unit - row * p.to.kv_heads.value;
    const uint32 seq = row / p.to.positions, position = row % p.to.positions;
    const WorkItem item{seq, position, head, 0};
    const int32 queries = p.to.q_lens.data ? clamped(as<int32>(p.to.q_lens.at(seq)), p.to.positions) : int32(p.to.positions);
    if (int32(position) >= queries) return;
    const int32 sums_row = p.rows.data ? as<int32>(p.rows.at(seq)) : int32(seq);
    if (sums_row < 0 || uint32(sums_row) >= p.count || as<int32>(p.tokens.at(sums_row, head)) <= 0) return;
    const uint32 heads = min(HEADS, group - first);
    bool has_term = false;
    if (threadIdx.x < HEADS) {
        const uint32 h = head * group + first + threadIdx.x;
        float keep = 1.0f, take = 0.0f, top = 0.0f, sum = 0.0f;
        const float log_mass = threadIdx.x < heads ? as<float>(p.log_mass.at(seq, position, h)) : minus_infinity();
        if (fabsf(log_mass) < -minus_infinity()) {
            const float l = as<float>(p.to.state.l.at(seq, position, h));
            const float m = l == 0.0f ? minus_infinity() : as<float>(p.to.state.m.at(seq, position, h));
            has_term = true;
            top = fmaxf(m, log_mass);
            // Only the difference is scaled, as in merge.cu.
            keep = m == minus_infinity() ? 0.0f : exp2_fast((m - top) * LOG2_E);
            take = exp2_fast((log_mass - top) * LOG2_E);
            sum = l * keep + take;
        }
        s.m[threadIdx.x] = top, s.l[threadIdx.x] = sum, s.keep[threadIdx.x] = keep;
        // A term may weigh too little for a float32 to say so.
        s.take[threadIdx.x] = has_term ? take : -1.0f;
    }
    if (!__syncthreads_or(has_term)) return;
    for (uint32 n = threadIdx.x; n < HEADS * p.to.dim; n += THREADS) {
        const uint32 h = n / p.to.dim, c = n - h * p.to.dim;
        s.q[h][c] = s.take[h] >= 0.0f ? load_query(p.to.q.at(seq, position, head * group + first + h, c), p.to.q_type) * p.scale : 0.0f;
    }
    __syncthreads();
    for (uint32 begin = 0; begin < p.to.value_dim; begin += STRIP) {
        float sum[HEADS][COLUMNS] = {};
        const char *from = p.covariance.at(sums_row, head, warp, begin + lane);
        const int64 column = WARP * p.covariance.step[3];
#pragma unroll 4
        for (uint32 c = warp; c < p.to.dim; c += WARPS, from += WARPS * p.covariance.step[2]) {
            float x[COLUMNS];
#pragma unroll
            for (uint32 n = 0; n < COLUMNS; n++) x[n] = begin + lane + n * WARP < p.to.value_dim ? as<float>(from + n * column) : 0.0f;
#pragma unroll
            for (uint32 h = 0; h < HEADS; h++)
#pragma unroll
                for (uint32 n = 0; n < COLUMNS; n++) sum[h][n] = fmaf(x[n], s.q[h][c], sum[h][n]);
        }
#pragma unroll
        for (uint32 h = 0; h < HEADS; h++)
#pragma unroll
            for (uint32 n = 0; n < COLUMNS; n++) s.sums[warp][h][lane + n * WARP] = sum[h][n];
        __syncthreads();
        const uint32 h = threadIdx.x / (STRIP / 2), within = threadIdx.x % (STRIP / 2) * 2, channel = begin + within;
        if (s.take[h] >= 0.0f && channel < p.to.value_dim) {
            float2 t{as<float>(p.mean_v.at(sums_row, head, channel)), as<float>(p.mean_v.at(sums_row, head, channel + 1))};
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) t.x += s.sums[w][h][within], t.y += s.sums[w][h][within + 1];
            const uint32 query_head = head * group + first + h;
            const char *const before = p.to.state.acc.at(seq, position, query_head, 0, channel);
            const float keep = s.keep[h], take = s.take[h];
            float2 acc{as<float>(before) * keep + t.x * take, as<float>(before + p.to.state.acc.step[4]) * keep + t.y * take};
            write_results(p.to, item, first + h, channel, acc, s.m[h] * LOG2_E, s.l[h]);
        }
        __syncthreads();
    }
}
