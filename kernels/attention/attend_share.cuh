// The way of one CTA from its share to its results, in mma and general (Compute): find the share, attend to its tiles, write partials, join.
#pragma once

#include "attention/join.cuh"
#include "common/parameters.cuh"

// The state of a warp's eight rows, in shared memory.
struct WarpState {
    WarpAcc acc;
    float *m, *l;  // [WARP_ROWS]
};

__device__ inline void clear_state(const AttentionParams &p, const WarpState &state) {
    for (uint32 n = threadIdx.x % WARP; n < p.warp_rows * state.acc.row_pitch; n += WARP) state.acc.data[n] = 0.0f;
    if (threadIdx.x % WARP < WARP_ROWS) {
        state.m[threadIdx.x % WARP] = minus_infinity();
        state.l[threadIdx.x % WARP] = 0.0f;
    }
    __syncwarp();
}

// Writes the state of one unit, of a warp's rows, to the caller's partials, and joins it to the total of the units before.
__device__ inline void write_unit_and_add(const AttentionParams &p, const WorkItem &item, const WarpState &unit, const WarpState &total, uint32 member, uint32 number) {
    const uint32 lane = threadIdx.x % WARP, first = member * WARP_ROWS, all = rows_of(p, item);
#pragma unroll 1
    for (uint32 row = 0; row < WARP_ROWS && first + row < all; row++) {
        const auto [position, head] = place_of_row(p, item, first_row(p, item) + first + row);
        const float m = unit.m[row], l = unit.l[row], own = total.m[row], own_l = total.l[row], top = fmaxf(own, m);
        const float keep = weight(own, top), take = weight(m, top);
        char *const to = p.partials.acc.at(item.seq, position, head, number);
#pragma unroll 1
        for (uint32 d = lane; d < p.value_dim; d += WARP) {
            const float x = unless_empty(*unit.acc.at(row, d), l);
            as<float>(to + d * p.partials.acc.step[4]) = x;
            float *const sum = total.acc.at(row, d);
            *sum = *sum * keep + x * take;
        }
        __syncwarp();
        if (lane == 0) {
            as<float>(p.partials.m.at(item.seq, position, head, number)) = m * LN_2;
            as<float>(p.partials.l.at(item.seq, position, head, number)) = l;
            total.m[row] = top;
            total.l[row] = own_l * keep + l * take;
        }
        __syncwarp();
    }
}

template <typename Compute>
__device__ inline void attention(const AttentionParams &p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Sums sums, unit_sums;
    __shared__ uint32 words[THREADS];
    const uint32 word = request_parameters(p);
    allow_next_kernel();
    wait_for_previous_kernel();
    __shared__ CtaShare found;
    if (threadIdx.x < WARP) {
        const CtaShare own = share_of(p, blockIdx.x, gridDim.x);
        if (threadIdx.x == 0) found = own;
    }
    __syncthreads();
    const CtaShare cta_share = found;
    if (cta_share.chunks == 0) {
        if (threadIdx.x < WARP) clear_counters(p, threadIdx.x == 0 ? arrive_at_end(p) : 0);
        return;
    }
    const WorkItem item = work_item_of(p, cta_share.item);
    const Reach reach = Reach::of(p, item, cta_share.length, cta_share.queries);

    asm volatile("st.shared.u32 [%0], %1;" ::"r"(uint32(__cvta_generic_to_shared(words + threadIdx.x))), "r"(word) : "memory");
    Compute compute(p, shared, p.log_members);
    const uint32 warp = compute.warp;
    const WarpState state{acc_of(p, shared, warp), sums.m[warp], sums.l[warp]};
    if (p.partials.acc.data) clear_state(p, state);
    compute.run(cta_share, item, reach, [&](uint32 number, bool exists) {
        compute.finish();
        if (!p.partials.acc.data) return compute.store(state);
        if (!exists) return;
        const WarpState unit{acc_of(p, shared, warp + WARPS), unit_sums.m[warp], unit_sums.l[warp]};
        compute.store(unit);
        compute.clear();
        __syncwarp();
        write_unit_and_add(p, item, unit, state, compute.member, number);
    });
    join(p, cta_share, item, sums, shared);
}

#define ATTENTION_KERNEL(name, ...)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention<__VA_ARGS__>(p); }
