// One CTA's way from its list to its results, for any engine.
#pragma once

#include "attention/join.cuh"
#include "common/parameters.cuh"

// A warp's state in shared memory.
struct WarpState {
    WarpAcc acc;
    float *m, *l;  // of its rows
};

__device__ inline void clear_state(const AttentionParams &p, const WarpState &state) {
    for (uint32 n = threadIdx.x % WARP; n < p.kept_rows * state.acc.row_pitch; n += WARP) state.acc.data[n] = 0.0f;
    if (threadIdx.x % WARP < WARP_ROWS) {
        state.m[threadIdx.x % WARP] = minus_infinity();
        state.l[threadIdx.x % WARP] = 0.0f;
    }
    __syncwarp();
}

// A unit's state, of a warp's rows: writes it to the caller's partials, and joins it to those before.
__device__ inline void keep_apart(const AttentionParams &p, const Pair &pair, const WarpState &unit, const WarpState &total, uint32 member, uint32 number) {
    const uint32 lane = threadIdx.x % WARP, first = member * WARP_ROWS, all = rows_of(p, pair);
#pragma unroll 1
    for (uint32 row = 0; row < WARP_ROWS && first + row < all; row++) {
        const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + first + row);
        const float m = unit.m[row], l = unit.l[row], own = total.m[row], own_l = total.l[row], top = fmaxf(own, m);
        const float keep = weight(own, top), take = weight(m, top);
        char *const to = p.partials.acc.at(pair.seq, position, head, number);
#pragma unroll 1
        for (uint32 d = lane; d < p.value_dim; d += WARP) {
            const float x = *unit.acc.at(row, d);
            as<float>(to + d * p.partials.acc.step[4]) = x;
            float *const sum = total.acc.at(row, d);
            *sum = *sum * keep + x * take;
        }
        __syncwarp();
        if (lane == 0) {
            as<float>(p.partials.m.at(pair.seq, position, head, number)) = m * LN_2;
            as<float>(p.partials.l.at(pair.seq, position, head, number)) = l;
            total.m[row] = top;
            total.l[row] = own_l * keep + l * take;
        }
        __syncwarp();
    }
}

template <typename Engine>
__device__ inline void attention(const AttentionParams &p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Sums sums, unit_sums;
    __shared__ uint32 words[THREADS];
    const uint32 word = ask_for_parameters(p);
    allow_next_kernel();
    wait_for_previous_kernel();
    Item item;
    if (p.items) item = reinterpret_cast<const Item *>(p.items)[blockIdx.x];
    else item = find_item(p);
    if (item.chunks == 0) return;
    const Pair pair = pair_of(p, item.pair);
    const Reach reach = Reach::of(p, pair, item.length, item.queries);

    asm volatile("st.shared.u32 [%0], %1;" ::"r"(uint32(__cvta_generic_to_shared(words + threadIdx.x))), "r"(word) : "memory");
    Engine engine(p, shared, p.log_members);
    const uint32 warp = engine.warp;
    const WarpState state{acc_of(p, shared, warp), sums.m[warp], sums.l[warp]};
    if (p.partials.acc.data) clear_state(p, state);
    engine.run(item, pair, reach, [&](uint32 number, bool exists) {
        engine.finish();
        if (!p.partials.acc.data) return engine.store(state);
        if (!exists) return;
        const WarpState unit{acc_of(p, shared, warp + WARPS), unit_sums.m[warp], unit_sums.l[warp]};
        engine.store(unit);
        engine.clear();
        __syncwarp();
        keep_apart(p, pair, unit, state, engine.member, number);
    });
    join(p, item, pair, sums, shared);
}

#define ATTENTION_KERNEL(name, ...)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention<__VA_ARGS__>(p); }
