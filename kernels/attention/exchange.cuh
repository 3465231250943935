// How the CTAs of a cluster join what their warps have attended to (compute capability 9.0), without a way through device memory.
//
//   every warp sends its state, cut by channels, to the CTAs (st.async, counted by a barrier in their shared memory)
//   each CTA joins what it received, in an order that no time decides, and writes the results of its channels
#pragma once

#include "attention/mma.cuh"

// What a warp sends to a CTA: acc [channels][rows] of the CTA's channels, m and l [rows].
struct Exchange {
    const AttentionParams &p;
    char *shared;
    uint64 *arrived;  // mbarrier
    uint32 rows, log_states, log_ctas, rank, log_octets;
    uint32 owned;     // octets of channels that this CTA joins
    uint32 record;    // floats

    __device__ Exchange(const AttentionParams &p, char *shared, uint64 *arrived, uint32 rows, uint32 log_states)
        : p(p), shared(shared), arrived(arrived), rows(rows), log_states(log_states), log_ctas(__ffs(cluster_ctas()) - 1), rank(cluster_rank()),
          log_octets(p.log_octets) {
        owned = min(max(int32(p.value_dim / 8) - int32(rank << log_octets), 0), 1 << log_octets);
        record = ((8 << log_octets) + 2) * rows;
        if (threadIdx.x == 0) {
            const uint32 bytes = owned ? (owned * 8 + 2) * rows * sizeof(float) << (log_ctas + log_states) : 0;
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
                         "fence.mbarrier_init.release.cluster;\n\t"
                         "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)), "r"(bytes) : "memory");
        }
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
    // Waits until every CTA of the cluster can be sent to.
    __device__ void open() const { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
    // Of a CTA of the cluster and a state of it.
    __device__ float *received(uint32 cta, uint32 state) const { return reinterpret_cast<float *>(shared + p.q_offset) + ((cta << log_states) + state) * record; }

    __device__ static uint32 address_in(uint32 cta, uint32 address) {
        uint32 there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
        return there;
    }
    __device__ static void send(uint32 to, uint32 barrier, float x, float y) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                     "r"(__float_as_uint(x)), "r"(__float_as_uint(y)), "r"(barrier) : "memory");
    }
    // Joins what has come, first the states of one number from all CTAs, then those of all numbers. A unit is a channel and four rows; its
    // states are shared among the lanes that are more than there are units.
    __device__ void join(const Pair &pair) const {
        if (owned == 0) return;
        asm volatile("{\n\t.reg .pred done;\n"
                     "again:\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n\t"
                     "@!done bra again;\n\t}" ::"r"(shared_address(arrived)) : "memory");
        const uint32 units = rows << (1 + log_octets), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const uint32 log_across = min(__ffs(units) - 1, 5), across = 1 << log_across;
        // All that has come was attended to: this takes the place of tiles.
        float *const acc_of_states = reinterpret_cast<float *>(shared), *const sums_of_states = acc_of_states + (units * 4 << log_states);
        const uint32 state = warp & ((1 << log_states) - 1), begin = (warp >> log_states) << log_across;
        const uint32 pitch = blockDim.x / WARP >> log_states << log_across;
        for (uint32 unit = begin + (lane & (across - 1)); unit < units; unit += pitch) {
            float acc[4], m[4], l[4];
            join_states(state, lane >> log_across, WARP >> log_across, unit, acc, m, l);
            for (uint32 step = across; step < WARP; step *= 2) join_lanes(step, acc, m, l);
            if (lane >= across) continue;
            *reinterpret_cast<float4 *>(acc_of_states + (state * units + unit) * 4) = {acc[0], acc[1], acc[2], acc[3]};
            if (unit >= rows / 4) continue;
            *reinterpret_cast<float4 *>(sums_of_states + state * 2 * rows + unit * 4) = {m[0], m[1], m[2], m[3]};
            *reinterpret_cast<float4 *>(sums_of_states + state * 2 * rows + rows + unit * 4) = {l[0], l[1], l[2], l[3]};
        }
        __syncthreads();
        const uint32 all = rows_of(p, pair) << (2 + log_octets), states = 1 << log_states;
        for (uint32 n = threadIdx.x; n < all; n += blockDim.x) {
            const uint32 row = n >> (2 + log_octets), channel = (n & ((4 << log_octets) - 1)) * 2;
            if (channel >= owned * 8) continue;
            const float *const from = acc_of_states + channel * rows + row, *const sums = sums_of_states + row;
            float2 acc[WARPS];
            float m[WARPS], l[WARPS];
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) {
                if (w >= states) continue;
                acc[w] = {from[w * units * 4], from[w * units * 4 + rows]};
                m[w] = sums[w * 2 * rows];
                l[w] = sums[w * 2 * rows + rows];
            }
            Joined joined;
            joined.add(acc, m, l, states);
            const uint32 of_pair = first_row(p, pair) + row, of_head = (rank << log_octets) * 8 + channel;
            if (p.start.acc.data) join_start(p, pair, of_pair, of_head, joined);
            write_results(p, pair, of_pair, of_head, joined.acc, joined.m, joined.l);
        }
    }
    // Joins the states `state` of CTAs `first`, `first` + `step` and so on.
    __device__ void join_states(uint32 state, uint32 first, uint32 step, uint32 unit, float (&acc)[4], float (&m)[4], float (&l)[4]) const {
        constexpr uint32 AT_ONCE = 4;
        const uint32 ctas = 1 << log_ctas, quad = unit & (rows / 4 - 1);
#pragma unroll
        for (uint32 i = 0; i < 4; i++) {
            acc[i] = l[i] = 0.0f;
            m[i] = minus_infinity();
        }
#pragma unroll 1
        for (uint32 begin = first; begin < ctas; begin += step * AT_ONCE) {
            float one[AT_ONCE][4], one_m[AT_ONCE][4], one_l[AT_ONCE][4];
#pragma unroll
            for (uint32 k = 0; k < AT_ONCE; k++) {
                const bool exists = begin + k * step < ctas;
                const float *const from = received(exists ? begin + k * step : begin, state), *const sums = from + (8 << log_octets) * rows + quad * 4;
                read_four(one[k], from + unit * 4);
                read_four(one_m[k], sums);
                read_four(one_l[k], sums + rows);
#pragma unroll
                for (uint32 i = 0; i < 4; i++)
                    if (!exists) one_m[k][i] = minus_infinity();
            }
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                float top = m[i];
#pragma unroll
                for (uint32 k = 0; k < AT_ONCE; k++) top = fmaxf(top, one_m[k][i]);
                const float keep = weight(m[i], top);
                acc[i] *= keep;
                l[i] *= keep;
                m[i] = top;
#pragma unroll
                for (uint32 k = 0; k < AT_ONCE; k++) {
                    const float take = weight(one_m[k][i], top);
                    acc[i] += take * one[k][i];
                    l[i] += take * one_l[k][i];
                }
            }
        }
    }
    // With the lane `step` further; both lanes get the same bits.
    __device__ static void join_lanes(uint32 step, float (&acc)[4], float (&m)[4], float (&l)[4]) {
#pragma unroll
        for (uint32 i = 0; i < 4; i++) {
            const float top = fmaxf(m[i], __shfl_xor_sync(FULL_WARP, m[i], step)), own = weight(m[i], top);
            m[i] = top;
            acc[i] *= own;
            l[i] *= own;
            acc[i] += __shfl_xor_sync(FULL_WARP, acc[i], step);
            l[i] += __shfl_xor_sync(FULL_WARP, l[i], step);
        }
    }
    __device__ static void read_four(float (&to)[4], const float *from) {
        const float4 x = *reinterpret_cast<const float4 *>(from);
        to[0] = x.x;
        to[1] = x.y;
        to[2] = x.z;
        to[3] = x.w;
    }
};
