// Repair in one launch of up to 64 rows, query positions times query heads of a KV head, with 16-bit keys and values of 128 channels (repair
// variant verify128). It serves the verification of drafts. Missed tokens are attended to as by verify128.cuh, whose tiles, products and join it has.
//
// Runs for more rows than repair_decode128.cuh takes, on compute capability 9.0 itself: src/ops/attention/device/choose.rs. Bytes: both lists, keys
// and values of what is attended to, once, and a state of 130 floats for each row and each partial that serves. A cluster of CTAs takes a work item:
//
//   all       lists ── search ── what is missed and what serves
//   copies    a warpgroup ── missed tokens, in a ring in shared memory
//   products  two warpgroups ── kept states of the rows that this CTA joins, all partials ── products with the tokens that have come meanwhile
//   join      both warpgroups in shared memory ── the cluster, each CTA a part of the rows, to which it adds what was kept
//
// While kept states are joined, their sums lie in the last stages of the ring. Orders follow from the lists, so that a repeated call gives the same
// bits.
#pragma once

#include "attention/repair_cluster.cuh"
#include "attention/verify128.cuh"

// The lists take the place of the stages before KEPT_STAGE until those are filled.
constexpr uint32 KEPT_STAGE = STAGES - GROUPS, COMPUTE_WARPS = COMPUTE_THREADS / WARP;
// Rows whose kept states are joined at once: one sum of each warp for each of them.
constexpr uint32 KEPT_ROWS = COMPUTE_WARPS;
static_assert(KEPT_STAGE * STAGE_BYTES == 98304, "of src/ops/repair/cuda/verify128.rs");
static_assert(KEPT_ROWS * COMPUTE_WARPS * ROW_PITCH * sizeof(float) <= GROUPS * STAGE_BYTES);

// The warps that compute join the kept states of the rows that this CTA joins, four channels a lane.
struct VerifyKept : VerifyJob {
    static constexpr uint32 STATES_AT_ONCE = 16;  // that a warp requests before it joins them

    const RepairParams &r;
    const int32 *partials;  // those that serve, from here backwards
    uint32 count;
    uint32 number;  // of the warp, of both warpgroups

    // Joins states `first`, `first` + `step`, … of those that serve a row.
    __device__ JoinedFour join_states(uint32 row, uint32 first, uint32 step) const {
        const KeptRow from(r, item, row);
        int32 begin;
        uint32 seen;
        reach.row(p, from.position, begin, seen);
        // A row that sees nothing starts from nothing, whatever was kept.
        const uint32 states = seen ? count : 0;
        JoinedFour joined;
#pragma unroll 1
        for (uint32 n = first; n < states; n += STATES_AT_ONCE * step) {
            // Loads without a branch between them do not wait for each other. Past the last state, the first of these is loaded again.
            float4 acc[STATES_AT_ONCE];
            float m[STATES_AT_ONCE], l[STATES_AT_ONCE];
#pragma unroll
            for (uint32 i = 0; i < STATES_AT_ONCE; i++) {
                const uint32 state = n + i * step < states ? n + i * step : n, partial = r.exact ? *(partials - state) : 0;
                acc[i] = as<float4>(from.acc + offset(partial, int32(r.kept.acc.step[3])));
                m[i] = as<float>(from.m + offset(partial, int32(r.kept.m.step[3])));
                l[i] = as<float>(from.l + offset(partial, int32(r.kept.l.step[3])));
            }
#pragma unroll
            for (uint32 i = 0; i < STATES_AT_ONCE; i++) m[i] = n + i * step < states && l[i] != 0.0f ? m[i] * LOG2_E : minus_infinity();
            joined.add(acc, m, l);
        }
        return joined;
    }
    __device__ void store(float *to, const JoinedFour &joined) const {
        *reinterpret_cast<float4 *>(to + lane * 4) = joined.acc;
        if (lane == 0) *reinterpret_cast<float2 *>(to + VERIFY_CHANNELS) = float2{joined.m, joined.l};
    }
    // Joins the states of each row to one, where VerifyJoin::send expects it, and gives the last stages up.
    __device__ void run() const {
        const uint32 share = VerifyShared::share_rows(p), rows = rows_of(p, item), begin = min(rank * share, rows), end = min(begin + share, rows);
        float *const sums = received_from(rank, share), *const parts = reinterpret_cast<float *>(shared + KEPT_STAGE * STAGE_BYTES);
        if (!r.exact) {
            // One state a row.
            for (uint32 row = begin + number; row < end; row += COMPUTE_WARPS) store(sums + (row - begin) * ROW_PITCH, join_states(row, 0, 1));
        } else {
#pragma unroll 1
            for (uint32 first = begin; first < end; first += KEPT_ROWS) {
                const uint32 last = min(first + KEPT_ROWS, end);
#pragma unroll 1
                for (uint32 row = first; row < last; row++)
                    store(parts + ((row - first) * COMPUTE_WARPS + number) * ROW_PITCH, join_states(row, number, COMPUTE_WARPS));
                sync_some(1, COMPUTE_THREADS);
                if (first + number < last) {
                    JoinedFour joined;
                    VerifyJoin::add_rows<COMPUTE_WARPS>(joined, parts + number * COMPUTE_WARPS * ROW_PITCH, ROW_PITCH, lane);
                    store(sums + (first + number - begin) * ROW_PITCH, joined);
                }
                sync_some(1, COMPUTE_THREADS);
            }
        }
        arrive(s.empty[KEPT_STAGE + number / 4]);
    }
};

// Asks the L2 cache for lengths, counts, lists and pages, of which each warp of the first ones has some lines.
__device__ inline void prefetch_lists(const RepairParams &r, const WorkItem &item) {
    constexpr uint32 ENTRIES = 128 / sizeof(int32);
    const AttentionParams &p = r.to;
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = lane * ENTRIES;
    if (warp == 0 && first < p.list_capacity) prefetch(p.ids.at(item.seq, item.position, item.head, first));
    if (warp == 1 && first < r.predicted_capacity) prefetch(r.predicted.at(item.seq, item.position, item.head, first));
    if (warp == 2 && p.table.data && uint64(first) * p.page.value < p.token_capacity) prefetch(p.table.at(item.seq, first));
    if (warp != 3) return;
    if (lane == 0) prefetch(p.seq_lens.at(item.seq));
    if (lane == 1) prefetch(p.counts.at(item.seq, item.position, item.head));
    if (lane == 2) prefetch(r.predicted_counts.at(item.seq, item.position, item.head));
}

template <typename Type, bool IS_BFLOAT16>
__device__ inline void repair_verify128(const RepairParams &r) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ VerifyShared s;
    __shared__ uint32 words[WARP];
    __shared__ WorkItemLengths lengths;
    const AttentionParams &p = r.to;
    request_parameters(r, words);
    s.open(p, STAGE_TILES);
    const uint32 rank = cluster_rank(), ctas = cluster_ctas(), item_number = p.ctas.divide(blockIdx.x);
    const WorkItem item = work_item_of(p, item_number);
    allow_next_kernel();
    prefetch_lists(r, item);
    wait_for_previous_kernel();

    // Both lists lie in the ring until tiles do. What is found lies behind all else: missed blocks from the front, partials that serve from the end.
    int32 *const predicted = reinterpret_cast<int32 *>(shared), *const selected = predicted + r.predicted_capacity;
    int32 *const missed = reinterpret_cast<int32 *>(shared + r.lists_offset), *const pages = missed + p.list_capacity, *const partials = pages - 1;
    if (threadIdx.x == VERIFY_THREADS - 1) lengths = WorkItemLengths::load(r, item);
#pragma unroll 1
    for (uint32 j = threadIdx.x; j < max(r.predicted_capacity, p.list_capacity); j += VERIFY_THREADS) {
        if (j < r.predicted_capacity) predicted[j] = as<int32>(r.predicted.at(item.seq, item.position, item.head, j));
        if (j < p.list_capacity) selected[j] = as<int32>(p.ids.at(item.seq, item.position, item.head, j));
    }
    __syncthreads();
    const Reach reach = lengths.reach(r, item);
    const Lists lists{predicted, selected, lengths.predicted, lengths.selected, blocks_of(p, reach)};
    const auto page = [&](uint32 j) {
        if (p.slots.data) return as<int32>(p.slots.at(item.seq, item.position, item.head, j));
        const uint32 id = selected[j];
        return p.table.data && id < lists.blocks ? as<int32>(p.table.at(item.seq, p.page.divide(id * p.block.value))) : 0;
    };
    const Found found = find_parts<VERIFY_THREADS>(
        r, lists, page,
        [&](uint32 j, uint32 at, int32 page) {
            missed[at] = selected[j];
            pages[at] = page;
        },
        [&](int32 partial, uint32 at) { *(partials - at) = partial; });
    if (r.missed.data && rank == 0 && item.row_block == 0 && threadIdx.x == 0)
        as<int32>(r.missed.at(item.seq, item.position, item.head)) = found.missed;

    // One chunk, of all missed blocks.
    CtaShare cta_share{item_number, lengths.length, lengths.queries, found.attended, 0, 1};
    cta_share.take((found.attended * p.block.value + TILE - 1) / TILE);
    const VerifyJob job{p, cta_share, item, reach, s, shared, shared + RECEIVED_OFFSET, threadIdx.x % WARP, threadIdx.x / WARP % 4, rank, ctas};
    const uint32 group = threadIdx.x / GROUP_THREADS;
    if (group == GROUPS) {
        give_registers<COPY_REGISTERS<ChainRows>>();
        VerifyCopies<ChainRows> copies{job};
        cluster_started();
        const Missed list{missed, pages, found.attended};
        copies.run([&](uint32 x) { return list.place_of(p, item, reach, x, 1 << p.log_granule); }, KEPT_STAGE);
    } else {
        take_registers<ChainRows::REGISTERS>();
        VerifyProducts<Type, IS_BFLOAT16, ChainRows> products{job, group, ChainRows(job)};
        cluster_started();
        products.request_queries();
        VerifyKept{job, r, partials, r.exact ? found.joined : 1, threadIdx.x / WARP}.run();
        products.run(KEPT_STAGE);
        VerifyJoin{job, threadIdx.x}.join<true>();
    }
}

#define REPAIR_VERIFY128_KERNEL(name, ...)                                                                                          \
    extern "C" __global__ void __launch_bounds__(VERIFY_THREADS, 1) name(const __grid_constant__ RepairParams p) {                  \
        repair_verify128<__VA_ARGS__>(p);                                                                                           \
    }
