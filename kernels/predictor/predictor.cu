// Holt's smoothing of block scores, and the selection that it predicts.
//
//   update   L' = α·s + (1−α)·L, T' = β·(L'−L) + (1−β)·T
//   predict  the exact top k of ŝ = L + γ·T, ascending
//
// Bytes: 20 a block to update, 8 to predict; both are a launch and a round trip to memory. Products and sums are rounded one by one, as on the CPU.
//
// Cut: to update, `slices` CTAs for each sequence and KV head; to predict, one.
//
// targets: compute_80, compute_90

#include "common/topk.cuh"
#include "predictor/params.cuh"

constexpr uint32 THREADS = 256;

__device__ inline bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7f800000); }

extern "C" __global__ void __launch_bounds__(THREADS) predictor_reset(const __grid_constant__ ResetParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const State &s = p.state;
    for (uint64 task = blockIdx.x; task < p.listed * s.kv_heads; task += gridDim.x) {
        const uint64 n = task / s.kv_heads;
        const uint32 head = task - n * s.kv_heads;
        const uint32 seq = p.rows ? as<uint32>(p.rows + n * p.rows_entry) : uint32(n);
        if (seq >= s.batch) continue;
        for (uint32 j = threadIdx.x; j < s.max_blocks; j += THREADS) s.level.at(seq, head, j) = minus_infinity(), s.trend.at(seq, head, j) = 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) predictor_update(const __grid_constant__ UpdateParams p) {
    allow_next_kernel();
    const State &s = p.state;
    const uint32 row = blockIdx.x / p.slices, seq = row / s.kv_heads, head = row - seq * s.kv_heads;
    const float keep = __fsub_rn(1.0f, p.alpha), follow = __fsub_rn(1.0f, p.beta);
    wait_for_previous_kernel();
    const uint32 n = p.blocks.of(seq, s), step = p.slices * THREADS;
#pragma unroll 4
    for (uint32 j = (blockIdx.x - row * p.slices) * THREADS + threadIdx.x; j < n; j += step) {
        const float level = s.level.at(seq, head, j), trend = s.trend.at(seq, head, j), score = p.scores.at(seq, head, j);
        const float next = __fadd_rn(__fmul_rn(p.alpha, score), __fmul_rn(keep, level));
        const float slope = __fadd_rn(__fmul_rn(p.beta, __fsub_rn(next, level)), __fmul_rn(follow, trend));
        const bool known = is_finite(level) && is_finite(trend) && is_finite(score);
        s.level.at(seq, head, j) = known ? next : score, s.trend.at(seq, head, j) = known ? slope : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) predictor_predict(const __grid_constant__ PredictParams p) {
    __shared__ TopKShared shared;
    __shared__ alignas(16) float room[TOPK_HELD];
    allow_next_kernel();
    const State &s = p.state;
    const uint32 seq = blockIdx.x / s.kv_heads, head = blockIdx.x - seq * s.kv_heads, thread = threadIdx.x;
    wait_for_previous_kernel();
    const uint32 n = p.blocks.of(seq, s);
    uint32 k = p.k;
    if (p.budgets) k = min(ceil(p.ratio * max(as<int32>(p.budgets + seq * p.budgets_seq), 0) * (1.0 - 1e-6)), double(p.cap));
    const uint32 init = min(p.init, n), local = min(p.local, n - init), forced = init + local;
    const uint32 wanted = min(k > forced ? k - forced : 0, n - forced);

    const auto score = [&](uint32 j) {
        const float level = s.level.at(seq, head, j), trend = s.trend.at(seq, head, j);
        return is_finite(level) ? __fadd_rn(level, __fmul_rn(p.gamma, trend)) : minus_infinity();
    };
    char *ids = p.ids + seq * p.ids_seq + head * p.ids_head;
    const auto emit = [&](uint32 place, uint32 j) { as<int32>(ids + place * p.ids_entry) = j; };
    if (wanted > 0) {
        const auto make = [&](uint32 i) { return score(init + i); };
        const MadeScores<decltype(make)> scores(room, TOPK_HELD, n - forced, make);
        TopK<MadeScores<decltype(make)>> top(shared, scores, n - forced);
        top.take(top.cut(wanted), [&](uint32 place, uint32 i) { emit(init + place, init + i); });
    }
    for (uint32 j = thread; j < init; j += TOPK_THREADS) emit(j, j);
    for (uint32 j = thread; j < local; j += TOPK_THREADS) emit(init + wanted + j, n - local + j);
    if (thread == 0) as<int32>(p.counts + seq * p.counts_seq + head * p.counts_head) = forced + wanted;
    if (p.scores.data)
        for (uint32 j = thread; j < n; j += TOPK_THREADS) p.scores.at(seq, head, j) = score(j);
}
