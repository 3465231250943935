// Selection from scores in memory, for few long rows: a cluster makes a row (cluster_prefilter.cuh). It follows minmax.
//
// Bytes: a row's scores, from the L2 cache, once.
//
// On entry: scratch_scores and cta_status were written by the kernel before; clusters have 2, 4 or 8 CTAs.
//
// targets: compute_90

#include "common/cluster_prefilter.cuh"
#include "select/rows.cuh"

struct TopClusterShared {
    ClusterPrefilterShared<TOPK_THREADS> prefilter;
    CtaTopKShared<TOPK_THREADS> top;
    Row row;
    Quota quota;
    uint32 seen;
};

// Dynamic shared memory holds the CTA's scores, whose place their keys take, and then what the first CTA receives.
extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 2) select_top_cluster(const __grid_constant__ SelectParams p, uint32 room) {
    __shared__ TopClusterShared shared;
    allow_next_kernel();
    const uint32 thread = threadIdx.x, ctas = cluster_ctas(), number = blockIdx.x >> log2_of(ctas);
    uint32 *const own = reinterpret_cast<uint32 *>(row_scores);
    ClusterPrefilter<TOPK_THREADS> prefilter(shared.prefilter, shared.top, own, own + room);
    prefilter.open();
    if (thread == 0) shared.seen = 0;
    // The length is read while the kernel before may still write it, so it decides only what is loaded early.
    const uint32 seq = p.by_lists.divide(p.by_heads.divide(number));
    const int32 tokens = load_hint(p.seq_lens + seq * p.seq_lens_seq);
    const uint32 expected = tokens <= 0 ? 0 : min(p.by_block.divide(tokens - 1) + 1, p.scored_blocks);
    // One thread computes the row early, and again if its inputs have changed.
    const bool computes = thread == TOPK_THREADS - 1;
    const auto compute = [&](const ListInputs &given) {
        shared.row = Row(p, number, given.lengths()), shared.quota = Quota(p, shared.row, given.budget);
    };
    ListInputs early, given;
    if (computes) early = ListInputs::hint(p, seq), compute(early);
    __syncwarp();
    cluster_started();
    wait_for_previous_kernel();
    const float *const scores = p.scratch_scores + uint64(number) * p.scored_blocks;
    // Each thread loads the scores that it reads itself.
    const auto load = [&](uint32 stored) {
        constexpr uint32 TOGETHER = 4;  // loads that a thread has in flight
        prefilter.divide((stored + 3) / 4 * 4);
        const uint32 end = prefilter.end();
#pragma unroll 1
        for (uint32 i = prefilter.warp * prefilter.span() + prefilter.lane; i < end; i += TOGETHER * WARP) {
            float x[TOGETHER] = {};
#pragma unroll
            for (uint32 m = 0; m < TOGETHER; m++)
                if (i + m * WARP < end && prefilter.first + i + m * WARP < stored) x[m] = __ldcg(scores + prefilter.first + i + m * WARP);
#pragma unroll
            for (uint32 m = 0; m < TOGETHER; m++)
                if (i + m * WARP < end) own[i + m * WARP] = __float_as_uint(x[m]);
        }
    };
    if (computes) given = ListInputs::of(p, seq);
    load(expected);
    if (computes && given != early) compute(given);
    __syncthreads();
    const Row &row = shared.row;
    const Quota &quota = shared.quota;
    if (quota.stored != expected) load(quota.stored);
    const uint32 init = pin_in_register(quota.init), end = pin_in_register(quota.end), wanted = pin_in_register(quota.of_stored);
    prefilter.each([&](uint32 i) {
        const uint32 j = prefilter.first + i;
        prefilter.put(i, j - init < end - init ? sort_key(__uint_as_float(own[i])) : 0);
    });
    Emit emit;
    // What does not depend on keys is written while these are in flight, mostly by the last CTA, which has the time.
    const auto write_others = [&] {
        emit = list_of(p, row).from(quota.init);
        if (prefilter.cta < ctas - 1) return;
        for (uint32 slice = thread; slice < p.slices; slice += TOPK_THREADS) {
            const uint32 saw = __ldcg(&p.cta_status[number * p.slices + slice]);
            if (saw) atomicOr(&shared.seen, saw);
        }
        write_forced(p, row, quota);
        __syncthreads();
        if (thread == 0 && p.status) as<uint32>(status_of(p, row)) = shared.seen | (quota.clamped ? CLAMPED : 0);
    };
    if (wanted == 0) return write_others();
    prefilter.take(wanted, end - init, [&](uint32 place, uint32 j) { emit(place, j); }, write_others);
}
