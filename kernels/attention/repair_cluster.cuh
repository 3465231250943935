// What the kernels that repair in one launch share: which CTA and warp of a work item's cluster does what.
#pragma once

#include "attention/mma.cuh"
#include "attention/repair_lists.cuh"
#include "common/cluster.cuh"

// Counts the bytes that are still to come, once.
struct Arrival : Barrier {
    // Sends to the same place in another CTA of the cluster, whose Arrival counts the bytes.
    __device__ void send(void *to, uint32 rank, float4 x) {
        asm volatile("{\n\t.reg .b32 there, barrier;\n\t"
                     "mapa.shared::cluster.u32 there, %0, %2;\n\t"
                     "mapa.shared::cluster.u32 barrier, %1, %2;\n\t"
                     "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [barrier];\n\t}" ::"r"(
                         shared_address(to)),
                     "r"(shared_address(this)), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
    }
};

__device__ inline uint32 log2_ceil(uint32 n) { return n <= 1 ? 0 : 32 - __clz(n - 1); }

// This CTA of a work item's cluster, which is of 2^log_ctas CTAs.
struct ClusterCta {
    uint32 rank, log_ctas;
    __device__ ClusterCta() : rank(cluster_rank()), log_ctas(__ffs(cluster_ctas()) - 1) {}
};

// Which warp joins which kept states, of a CTA and of its cluster. Rows are dealt out to the warps. Warps that are left over take turns at a row's
// states; where 2^most_log_turns turns are enough, further warps have none.
struct KeptShare {
    uint32 rows, log_rows, most_log_turns, warp;
    __device__ explicit KeptShare(uint32 rows, uint32 most_log_turns = LOG_WARPS)
        : rows(rows), log_rows(min(log2_ceil(rows), LOG_WARPS)), most_log_turns(most_log_turns), warp(threadIdx.x / WARP) {}
    __device__ uint32 log_turns() const { return min(LOG_WARPS - log_rows, most_log_turns); }
    __device__ uint32 turn() const { return warp >> log_rows; }
    __device__ uint32 row() const { return warp & ((1 << log_rows) - 1); }
};
static_assert(WARPS == 1 << LOG_WARPS);

constexpr uint32 LANE_CHANNELS = 4, VECTOR_CHANNELS = LANE_CHANNELS * WARP;
constexpr uint32 AT_ONCE = 8;  // states that a warp requests before it joins them

// Where a row's kept states lie; acc at the lane's channels. Lanes without channels read the first ones.
struct KeptRow {
    const char *acc, *m, *l;
    uint32 position;

    __device__ KeptRow(const RepairParams &r, const WorkItem &item, uint32 row) {
        const auto [query_position, head] = place_of_row(r.to, item, first_row(r.to, item) + row);
        position = query_position;
        const uint32 channel = threadIdx.x % WARP * LANE_CHANNELS;
        acc = r.kept.acc.at(item.seq, position, head) + (channel < r.to.value_dim ? channel : 0) * sizeof(float);
        m = r.kept.m.at(item.seq, position, head);
        l = r.kept.l.at(item.seq, position, head);
    }
};

// The blocks to attend to: a CTA's list, in shared memory.
struct Missed {
    const int32 *ids, *pages;  // of each block: its number, and the page of its first token
    uint32 count;

    // Where the granule of `tokens` tokens lies that begins with token x, counted along the list.
    __device__ Place place_of(const AttentionParams &p, const WorkItem &item, const Reach &reach, uint32 x, uint32 tokens = 1) const {
        const uint32 e = p.block.divide(x);
        if (e >= count) return {-1, 0, 0};
        const int32 position = ids[e] * int32(p.block.value) + int32(x - e * p.block.value);
        if (position >= reach.end || position + int32(tokens) <= reach.begin) return {-1, 0, 0};
        if (!p.slots.data && !p.table.data) return {position, int32(item.seq), position};
        const uint32 number = p.page.divide(position);
        const bool of_block = p.slots.data || p.block.value <= p.page.value;
        const int32 page = of_block ? pages[e] : as<int32>(p.table.at(item.seq, number));
        if (uint32(page) >= p.pages) return {-1, 0, 0};
        return {position, page, position - int32(number * p.page.value)};
    }
};
