// attention_split: splits many work items into chunks, before mma or general attend to them. Runs where there are more than 32 work items.
//
// One CTA reads each work item's lengths and counts, and writes a CtaShare for every CTA of the attention that follows.
//
// targets: compute_80, compute_90

#include "attention/attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) attention_split(const __grid_constant__ AttentionParams p, CtaShare *cta_shares, uint32 ctas) {
    __shared__ uint32 sums[WARPS], more, slots;  // shares beyond the first of each work item; states that have to be stored
    allow_next_kernel();
    wait_for_previous_kernel();
    CtaShare cta_share{};
    uint32 total = 0;
    for (uint32 n = threadIdx.x; n < p.work_items; n += THREADS) total += describe_work_item(p, n, cta_share);
    total = __reduce_add_sync(FULL_WARP, total);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = total;
    if (threadIdx.x == 0) more = slots = 0;
    __syncthreads();
    total = 0;
    for (uint32 w = 0; w < WARPS; w++) total += sums[w];
    const uint32 chunk = chunk_units(p, total), room = ctas - p.work_items;
    for (uint32 n = threadIdx.x; n < p.work_items; n += THREADS) {
        // A work item is what this second reading says. Where readings have grown since they were summed, chunks get the room that is left.
        const uint32 units = describe_work_item(p, n, cta_share), wanted = chunks_of(units, chunk) - 1, at = wanted ? atomicAdd(&more, wanted) : 0;
        const uint32 beyond = min(wanted, room - min(at, room));
        cta_share.chunks = beyond + 1;
        cta_share.slot = beyond ? atomicAdd(&slots, cta_share.chunks) : 0;
        for (cta_share.chunk = 0; cta_share.chunk < cta_share.chunks; cta_share.chunk++) {
            cta_share.take(units);
            cta_shares[cta_share.chunk ? p.work_items + at + cta_share.chunk - 1 : n] = cta_share;
        }
    }
    __syncthreads();
    for (uint32 n = p.work_items + min(more, room) + threadIdx.x; n < ctas; n += THREADS) cta_shares[n] = CtaShare{};
}
