// What the kernels that repair in one launch share: who of a pair's cluster does what.
#pragma once

#include "attention/mma.cuh"
#include "attention/repair.cuh"
#include "common/cluster.cuh"

// Counts the bytes that are still to come, once.
struct Arrival : Barrier {
    // To the same place in another CTA of the cluster, whose arrival counts it.
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

// A CTA of a pair's cluster, where those are a power of two.
struct Member {
    uint32 rank, log_ctas;
    __device__ Member() : rank(cluster_rank()), log_ctas(__ffs(cluster_ctas()) - 1) {}
};

// Of a CTA, and of its cluster: which warp joins which states that were kept. Rows go round the warps; warps that are left over take turns
// at a row, or, where 2^most_log_turns turns are enough, have none.
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
constexpr uint32 AT_ONCE = 8;  // states that a warp asks for before it joins them

// Where a row has its kept states, of acc the lane's channels; the first ones for lanes without.
struct KeptRow {
    const char *acc, *m, *l;
    uint32 position;

    __device__ KeptRow(const RepairParams &r, const Pair &pair, uint32 row) {
        const auto [its_position, head] = place_of_row(r.to, pair, first_row(r.to, pair) + row);
        position = its_position;
        const uint32 channel = threadIdx.x % WARP * LANE_CHANNELS;
        acc = r.kept.acc.at(pair.seq, position, head) + (channel < r.to.value_dim ? channel : 0) * sizeof(float);
        m = r.kept.m.at(pair.seq, position, head);
        l = r.kept.l.at(pair.seq, position, head);
    }
};
