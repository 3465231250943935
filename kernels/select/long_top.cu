// Selection from scores that another kernel has left, of rows that are few and long: a cluster makes a row, and its CTAs sieve it.
//
// Bytes: a row's scores, from the L2 cache, once.
//
// On entry: held and arrived are those of the kernel before; clusters of 1, 2, 4 or 8 CTAs.
//
// targets: compute_90

#include "common/sieve.cuh"
#include "select/rows.cuh"

struct LongTopShared {
    SieveShared<TOPK_THREADS> sieve;
    CtaTopKShared<TOPK_THREADS> top;
    Row row;
    Quota quota;
    uint32 seen;
};

// Dynamic shared memory: the CTA's scores, and then their keys; then what comes to the first CTA.
extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 2) select_long_top(const __grid_constant__ SelectParams p, uint32 room) {
    __shared__ LongTopShared shared;
    allow_next_kernel();
    const uint32 thread = threadIdx.x, ctas = cluster_ctas(), number = blockIdx.x >> log2_of(ctas);
    uint32 *const own = reinterpret_cast<uint32 *>(row_scores);
    Sieve<TOPK_THREADS> sieve(shared.sieve, shared.top, own, own + room);
    sieve.open();
    if (thread == 0) shared.seen = 0;
    // The length is read while the kernel before may still write it, so it decides nothing but what is asked for early.
    const int32 tokens = load_hint(p.seq_lens + p.by_lists.divide(p.by_heads.divide(number)) * p.seq_lens_seq);
    const uint32 expected = tokens <= 0 ? 0 : min(p.by_block.divide(tokens - 1) + 1, p.held_row);
    __syncwarp();
    cluster_started();
    wait_for_previous_kernel();
    const float *const scores = p.held + uint64(number) * p.held_row;
    const auto load = [&](uint32 stored) {
        sieve.divide((stored + 3) / 4 * 4);
        sieve.each([&](uint32 i) { own[i] = sieve.first + i < stored ? __float_as_uint(__ldcg(scores + sieve.first + i)) : 0; });
    };
    if (thread == TOPK_THREADS - 1) shared.row = Row(p, number), shared.quota = Quota(p, shared.row, budget_of(p, shared.row.seq));
    load(expected);
    __syncthreads();
    const Row &row = shared.row;
    const Quota &quota = shared.quota;
    if (quota.stored != expected) load(quota.stored);
    sieve.each([&](uint32 i) {
        const uint32 j = sieve.first + i;
        sieve.put(i, quota.init <= j && j < quota.end ? sort_key(__uint_as_float(own[i])) : 0);
    });
    // By the last CTA, which has the time.
    const auto write_others = [&] {
        if (sieve.cta < ctas - 1) return;
        for (uint32 slice = thread; slice < p.slices; slice += TOPK_THREADS) {
            const uint32 saw = __ldcg(&p.arrived[number * p.slices + slice]);
            if (saw) atomicOr(&shared.seen, saw);
        }
        write_forced(p, row, quota);
        __syncthreads();
        if (thread == 0 && p.status) as<uint32>(status_of(p, row)) = shared.seen | (quota.clamped ? CLAMPED : 0);
    };
    if (quota.of_stored == 0) return write_others();
    const Emit emit = list_of(p, row).from(quota.init);
    sieve.take(quota.of_stored, quota.end - quota.init, [&](uint32 place, uint32 j) { emit(place, j); }, write_others);
}
