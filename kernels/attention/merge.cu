// Joins attention states over disjoint sets of tokens.
//
//   m' = max_n m[n] · l' = Σ_n l[n] e^(m[n]−m') · acc' = Σ_n acc[n] e^(m[n]−m') · out = acc' / (l' + e^(sink−m')) · lse = m' + ln l'
//
// Bytes: every state once, the results once. A warp takes a row, a query position and head of a sequence; its lanes the channels.
//
// targets: compute_80

#include "attention/join.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) merge_states(const __grid_constant__ MergeParams p) {
    const uint32 lane = threadIdx.x % WARP, n = blockIdx.x * WARPS + threadIdx.x / WARP;
    const uint32 rows = p.to.positions * p.heads, seq = n / rows, position = n % rows / p.heads, head = n % p.heads;
    if (n >= p.to.work_items) return;
    float m = minus_infinity(), l = 0.0f;
    if (lane < p.inputs) {
        l = as<float>(p.input[lane].l.at(seq, position, head));
        if (l != 0.0f) m = as<float>(p.input[lane].m.at(seq, position, head));
    }
    float top = m;
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
    // Only the difference is scaled: a maximum of some hundreds times log2 e loses the bits that its weight is made of.
    const float weighs = m == minus_infinity() ? 0.0f : exp2_fast((m - top) * LOG2_E);
    float sum = l * weighs;
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    for (uint32 first = 0; first < p.to.value_dim; first += 2 * WARP) {
        const uint32 channel = first + 2 * lane;
        float2 acc{0.0f, 0.0f};
#pragma unroll 4
        for (uint32 i = 0; i < p.inputs; i++) {
            const float one = __shfl_sync(FULL_WARP, weighs, i);
            if (one == 0.0f || channel >= p.to.value_dim) continue;
            const char *from = p.input[i].acc.at(seq, position, head, 0, channel);
            acc.x += one * as<float>(from);
            acc.y += one * as<float>(from + p.input[i].acc.step[4]);
        }
        if (channel < p.to.value_dim) write_results(p.to, {seq, position, head, 0}, 0, channel, acc, top * LOG2_E, sum);
    }
}
