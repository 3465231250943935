// Selection from scores in memory: CTA r makes row r. It follows minmax, means or axis_general.
//
// Bytes: a row's scores, from the L2 cache, once; a row of more than 8192 scores is read once a pass, up to six times.
//
// On entry: scratch_scores and cta_status were written by the kernel before.
//
// targets: compute_80, compute_90

#include "select/rows.cuh"

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) select_top_cta(const __grid_constant__ SelectParams p) {
    __shared__ TopKShared shared;
    __shared__ alignas(16) float room[TOPK_ROOM];
    __shared__ uint32 seen;
    allow_next_kernel();
    if (threadIdx.x == 0) seen = 0;
    __syncthreads();
    wait_for_previous_kernel();
    const Row row(p, blockIdx.x);
    for (uint32 slice = threadIdx.x; slice < p.slices; slice += TOPK_THREADS) {
        const uint32 saw = __ldcg(&p.cta_status[row.number * p.slices + slice]);
        if (saw) atomicOr(&seen, saw);
    }
    __syncthreads();
    const Quota quota(p, row, budget_of(p, row.seq));
    const float *scratch_scores = p.scratch_scores + uint64(row.number) * p.scored_blocks + quota.init;
    finish(p, row, quota, seen, [&](const Emit &emit) {
        const auto make = [&](uint32 i) { return __ldcg(scratch_scores + i); };
        const uint32 count = quota.end - quota.init;
        const ComputedScores<decltype(make)> scores(room, TOPK_ROOM, count, make);
        TopK<ComputedScores<decltype(make)>> top(shared, scores, count);
        top.take(top.find_threshold(quota.of_stored), [&](uint32 place, uint32 i) { emit(place, quota.init + i); });
    });
}
