// The mass of the blocks that a list leaves out, in two launches after the one that selects by AXIS.
//
//   log_mass = ln Σ_j S·e^(scale·q·(mean_j + centre))·cosh(0.7·scale·q·axis_j), over the whole blocks j with a summary that are not listed
//
// Bytes: the summaries once more, mostly from the L2 cache, and a partial of each chunk and head.
//
// Split: as in means.cuh. select_mass_*: the CTAs of a list share its chunks, each of which has a partial of every head, the largest product and
// the sum of e^(product − largest). Chunks have one size, so that sums do not depend on the grid. select_mass_join: a warp joins the chunks of
// a head of a position and adds what all blocks have in common.
//
// On entry: as for score<BYTES, true> of means.cuh; MeanParams.size and stride are a block's tokens.
#pragma once

#include "select/means.cuh"

template <uint32 BYTES> __device__ inline void add_masses(const MassParams &mass) {
    __shared__ float4 q[STAGED / 4];
    __shared__ float staged[STAGED_HEADS][CHUNK];
    __shared__ uint32 nan, listed[CHUNK / 32];
    allow_next_kernel();
    wait_for_previous_kernel();
    const MeanParams &p = mass.means;
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, slice = blockIdx.x % p.scoring, number = blockIdx.x / p.scoring;
    const Row row(s, number);
    const uint32 count = windows(p, row.tokens), heads = (row.last - row.first) * s.group;
    const List &list = s.selected;
    const char *ids = list.ids + row.seq * list.ids_seq + row.list * list.ids_pos + row.head * list.ids_head;
    const uint32 entries = as<uint32>(list.counts + row.seq * list.counts_seq + row.list * list.counts_pos + row.head * list.counts_head);
    if (threadIdx.x == 0) nan = 0;
    const uint32 at_once = min(STAGED / s.dim, STAGED_HEADS);
    for (uint32 first = 0; first < heads; first += at_once) {
        const uint32 here = min(at_once, heads - first);
        __syncthreads();
        for (uint32 t = threadIdx.x; t < here * s.dim; t += SCORING_THREADS) {
            const uint32 h = first + t / s.dim, c = t % s.dim, position = h / s.group;
            const char *at = s.q + row.seq * s.q_seq + (row.first + position) * s.q_pos + (row.head * s.group + h % s.group) * s.q_head + c * s.q_channel;
            const float x = load_query(at, s.q_type) * s.scale;
            reinterpret_cast<float *>(q)[t] = x;
            if (x != x) atomicOr(&nan, 1u << position);
        }
        for (uint32 chunk = slice; chunk * CHUNK < count; chunk += p.scoring) {
            if (threadIdx.x < CHUNK / 32) listed[threadIdx.x] = 0;
            __syncthreads();
            for (uint32 n = threadIdx.x; n < entries; n += SCORING_THREADS) {
                const uint32 j = as<uint32>(ids + n * list.ids_entry);
                if (j / CHUNK == chunk) atomicOr(&listed[j % CHUNK / 32], 1u << j % 32);
            }
            __syncthreads();
            multiply_axes<BYTES, true>(p, row, chunk, count, first, here, reinterpret_cast<const float *>(q), staged, listed);
            __syncthreads();
            for (uint32 h = threadIdx.x / WARP; h < here; h += SCORING_WARPS) {
                Sum sum = {minus_infinity(), 0.0f};
                for (uint32 w = lane; w < min(CHUNK, count - chunk * CHUNK); w += WARP) sum.join({staged[h][w], 1.0f});
                sum.join_lanes();
                float2 *to = reinterpret_cast<float2 *>(p.partials) + (uint64(row.number) * p.heads + first + h) * p.chunks + chunk;
                if (lane == 0) *to = make_float2(sum.most, sum.sum);
            }
            __syncthreads();
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && slice == 0) p.seen[row.number] = nan;
}

extern "C" __global__ void __launch_bounds__(SCORING_THREADS) select_mass_join(const __grid_constant__ MassParams mass) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const MeanParams &p = mass.means;
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, n = blockIdx.x * SCORING_WARPS + threadIdx.x / WARP;
    if (n >= mass.warps) return;
    const uint32 above = n / mass.query_heads, h = n - above * mass.query_heads, seq = above / s.positions, position = above - seq * s.positions;
    const uint32 head = h / s.group, list = s.lists == 1 ? 0 : position;
    const Row row(s, (seq * s.lists + list) * s.kv_heads + head);
    float value = minus_infinity();
    if (position < row.queries) {
        const uint32 of_list = (position - row.first) * s.group + h % s.group, count = windows(p, row.position(position) + 1);
        const float2 *from = reinterpret_cast<const float2 *>(p.partials) + (uint64(row.number) * p.heads + of_list) * p.chunks;
        Sum sum = {minus_infinity(), 0.0f};
        for (uint32 chunk = lane; chunk * CHUNK < count; chunk += WARP) {
            const float2 part = __ldcg(from + chunk);
            sum.join({part.x, part.y});
        }
        sum.join_lanes();
        float common = 0.0f;
        const char *query = s.q + seq * s.q_seq + position * s.q_pos + h * s.q_head;
        const char *centre = mass.centre + head * mass.centre_head;
        for (uint32 c = lane; c < s.dim && mass.centre; c += WARP)
            common = fmaf(load_query(query + c * s.q_channel, s.q_type) * s.scale, as<float>(centre + c * mass.centre_channel), common);
        for (uint32 bit = 1; bit < WARP; bit *= 2) common += __shfl_xor_sync(FULL_WARP, common, bit);
        const bool is_nan = __ldcg(p.seen + row.number) >> (position - row.first) & 1;
        if (sum.sum > 0.0f && !is_nan) value = sum.most + logf(sum.sum) + common + logf(0.5f * float(s.block_size));
    }
    if (lane == 0) as<float>(mass.log_mass + seq * mass.mass_seq + position * mass.mass_pos + h * mass.mass_head) = value;
}
