// Attention to latents (MLA): keys of up to 576 channels whose first, up to 512, are the values, for 16 rows at a time, by a cluster of
// CTAs for each pair.
//
//   warps 2t and 2t + 1 ── tile t of the step's four: half of its rows, and of the channels of K·Qᵀ, each
//   sums of the halves, in shared memory ── every warp: the weights of all tiles ── its 64 channels of acc
//
// A step is 64 tokens; tiles of the next are on their way meanwhile. CTAs join as in exchange.cuh, a state from each.
#pragma once

#include "attention/exchange.cuh"

constexpr uint32 LATENT_TILES = 4, LOG_LATENT_TILES = 2, LATENT_ROWS = 16;

template <typename Type>
struct Latent {
    using Engine = MmaEngine<Type, 576, 512, LATENT_ROWS / WARP_ROWS>;
    static constexpr uint32 BLOCKS = Engine::ROW_BLOCKS, PITCH = Engine::PITCH, PARTS = WARPS / LATENT_TILES;
    static constexpr uint32 K_STEPS = Engine::K_STEPS / PARTS, V_STEPS = 512 / WARPS / 16;

    const AttentionParams &p;
    Engine &engine;
    float4 *sums;  // of products: [tile][block][part][lane]
    uint32 query[BLOCKS][K_STEPS][2];
    float acc[BLOCKS][V_STEPS][4];

    __device__ Latent(const AttentionParams &p, char *shared, Engine &engine)
        : p(p), engine(engine), sums(reinterpret_cast<float4 *>(shared + p.totals_offset)), acc{} {}

    __device__ void ask_queries(const Pair &pair) {
        const uint32 rows = rows_of(p, pair);
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
            const uint32 n = b * WARP_ROWS + engine.lane / 4;
            const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + (n < rows ? n : 0));
            const char *const from = p.q.at(pair.seq, position, head) + engine.lane % 4 * 4;
#pragma unroll
            for (uint32 s = 0; s < K_STEPS; s++) {
#pragma unroll
                for (uint32 half = 0; half < 2; half++) {
                    const uint32 channel = (engine.member * K_STEPS + s) * 16 + half * 8;
                    query[b][s][half] = n < rows && channel < p.dim ? as<uint32>(from + channel * 2) : 0;
                }
            }
        }
    }
    __device__ const char *tile(uint32 t, uint32 at) const { return engine.shared + (t * p.stages + at) * p.stage_bytes; }

    // The warp's part of the products of its team's tile.
    __device__ void multiply(uint32 at) {
        const uint32 matrix = engine.lane / 8, line = engine.lane % 8;
        const uint32 keys = shared_address(tile(engine.team, at)) + sizeof(Facts) + (line + matrix % 2 * 8) * PITCH + matrix / 2 * 16;
        float c[BLOCKS][4] = {};
#pragma unroll
        for (uint32 s = 0; s < K_STEPS; s++) {
            uint32 k[4];
            load_matrices(k, keys + (engine.member * K_STEPS + s) * 32);
#pragma unroll
            for (uint32 b = 0; b < BLOCKS; b++) Type::multiply(c[b], k, query[b][s][0], query[b][s][1]);
        }
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) sums[((engine.team * BLOCKS + b) * PARTS + engine.member) * WARP + engine.lane] = {c[b][0], c[b][1], c[b][2], c[b][3]};
    }
    // The running softmax over the tiles, of all rows, and the warp's channels of acc.
    __device__ void attend(uint32 at) {
        const uint32 lane = engine.lane, matrix = lane / 8, line = lane % 8;
        uint32 weights[LATENT_TILES][BLOCKS][2];
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
            float c[LATENT_TILES][4], (&m)[2] = engine.m[b], (&l)[2] = engine.l[b], next[2] = {minus_infinity(), minus_infinity()};
            const float factor = p.soft_cap != 0.0f ? LOG2_E : p.scale * LOG2_E;
#pragma unroll
            for (uint32 t = 0; t < LATENT_TILES; t++) {
                float4 sum{};
#pragma unroll
                for (uint32 part = 0; part < PARTS; part++) {
                    const float4 one = sums[((t * BLOCKS + b) * PARTS + part) * WARP + lane];
                    sum = {sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w};
                }
                c[t][0] = sum.x;
                c[t][1] = sum.y;
                c[t][2] = sum.z;
                c[t][3] = sum.w;
                if (p.soft_cap != 0.0f) {
#pragma unroll
                    for (uint32 e = 0; e < 4; e++) c[t][e] = p.soft_cap * tanhf(c[t][e] * p.scale / p.soft_cap);
                }
                const Facts &facts = as<Facts>(tile(t, at));
                const int32 tokens[2] = {facts.position[lane / 4], facts.position[lane / 4 + 8]};
#pragma unroll
                for (uint32 e = 0; e < 4; e++) {
                    if (uint32(tokens[e / 2] - engine.first[b][e % 2]) >= engine.count[b][e % 2]) c[t][e] = minus_infinity();
                    next[e % 2] = fmaxf(next[e % 2], c[t][e]);
                }
            }
#pragma unroll
            for (uint32 step = 4; step < WARP; step *= 2) {
                next[0] = fmaxf(next[0], __shfl_xor_sync(FULL_WARP, next[0], step));
                next[1] = fmaxf(next[1], __shfl_xor_sync(FULL_WARP, next[1], step));
            }
            next[0] = fmaxf(m[0], next[0] * factor);
            next[1] = fmaxf(m[1], next[1] * factor);
            if (__any_sync(FULL_WARP, next[0] != m[0] || next[1] != m[1])) {
                const float keep[2] = {weight(m[0], next[0]), weight(m[1], next[1])};
#pragma unroll
                for (uint32 i = 0; i < 2; i++) {
                    l[i] *= keep[i];
                    m[i] = next[i];
                }
#pragma unroll
                for (uint32 n = 0; n < V_STEPS * 4; n++) acc[b][n / 4][n % 4] *= keep[n % 2];
            }
            const float shift[2] = {m[0] == minus_infinity() ? 0.0f : m[0], m[1] == minus_infinity() ? 0.0f : m[1]};
#pragma unroll
            for (uint32 t = 0; t < LATENT_TILES; t++) {
#pragma unroll
                for (uint32 e = 0; e < 4; e++) {
                    c[t][e] = exp2_fast(fmaf(c[t][e], factor, -shift[e % 2]));
                    l[e % 2] += c[t][e];
                }
                weights[t][b][0] = transpose(Type::pack(c[t][0], c[t][1]));
                weights[t][b][1] = transpose(Type::pack(c[t][2], c[t][3]));
            }
        }
#pragma unroll
        for (uint32 t = 0; t < LATENT_TILES; t++) {
            const uint32 values = shared_address(tile(t, at)) + sizeof(Facts) + (line + matrix / 2 * 8) * PITCH + engine.warp * V_STEPS * 32 + matrix % 2 * 16;
#pragma unroll
            for (uint32 j = 0; j < V_STEPS; j++) {
                uint32 v[4];
                load_transposed(v, values + j * 32);
#pragma unroll
                for (uint32 b = 0; b < BLOCKS; b++) Type::multiply(acc[b][j], v, weights[t][b][0], weights[t][b][1]);
            }
        }
    }
    // Every CTA has one state; its warps send their channels of it.
    __device__ void send(const Exchange &exchange) const {
        const uint32 mine = shared_address(exchange.received(exchange.rank, 0)) + engine.row(0) * sizeof(float), barrier = shared_address(exchange.arrived);
        const uint32 log_octets = exchange.log_octets;
#pragma unroll
        for (uint32 n = 0; n < V_STEPS * 2; n++) {
            const uint32 octet = engine.warp * V_STEPS * 2 + n, owner = octet >> log_octets, within = (octet - (owner << log_octets)) * 8 + engine.lane / 4;
            if (octet * 8 >= p.value_dim) continue;
            const uint32 there = Exchange::address_in(owner, barrier), to = there + (mine - barrier) + within * LATENT_ROWS * uint32(sizeof(float));
#pragma unroll
            for (uint32 b = 0; b < BLOCKS; b++)
                Exchange::send(to + b * WARP_ROWS * sizeof(float), there, acc[b][n / 2][n % 2 * 2], acc[b][n / 2][n % 2 * 2 + 1]);
        }
        if (engine.warp) return;
        for (uint32 owner = engine.lane / 4; owner >> exchange.log_ctas == 0 && owner << log_octets < p.value_dim / 8; owner += 8) {
            const uint32 there = Exchange::address_in(owner, barrier), to = there + (mine - barrier) + (8 << log_octets) * LATENT_ROWS * uint32(sizeof(float));
#pragma unroll
            for (uint32 b = 0; b < BLOCKS; b++) {
                Exchange::send(to + b * WARP_ROWS * sizeof(float), there, engine.m[b][0], engine.m[b][1]);
                Exchange::send(to + (LATENT_ROWS + b * WARP_ROWS) * sizeof(float), there, engine.l[b][0], engine.l[b][1]);
            }
        }
    }
};

template <typename Type>
__device__ inline void attention_latent(const AttentionParams &p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ alignas(8) uint64 arrived;
    __shared__ uint32 words[WARP], steps_of_cta;
    const uint32 word = ask_for_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    const Exchange exchange(p, shared, &arrived, LATENT_ROWS, 0);
    typename Latent<Type>::Engine engine(p, shared, LOG_WARPS - LOG_LATENT_TILES);
    Latent<Type> latent(p, shared, engine);
    const Pair pair = pair_of(p, blockIdx.x >> exchange.log_ctas);
    engine.zero_padding();
    allow_next_kernel();
    exchange.open();
    wait_for_previous_kernel();

    const Reach reach = Reach::load(p, pair);
    const uint32 entries = count_of(p, pair), units = units_of(p, reach, entries), log_step = exchange.log_ctas + LOG_LATENT_TILES;
    latent.ask_queries(pair);
    engine.read_reach(pair, reach, 0);
    const Tiles tiles(p, exchange.rank * LATENT_TILES + engine.team, units, log_step);
    const uint32 own_steps = Tiles(p, exchange.rank * LATENT_TILES, units, log_step).count, stages = p.stages;
    // Of one warp's reading: barriers stand between steps.
    if (threadIdx.x == 0) steps_of_cta = own_steps;
    // A team without a tile in the last step gets one of nothing.
    const auto load = [&](uint32 tile) {
        if (tile < own_steps) {
            if (tiles.begins(p, tile)) engine.note(pair, tiles.find(p, pair, reach, entries, tile));
            engine.load(tiles, pair, reach, tile, engine.stage(tile % stages));
        }
        end_copies();
    };
#pragma unroll 1
    for (uint32 step = 0; step + 1 < stages; step++) load(step);
    __syncthreads();
    const uint32 steps = steps_of_cta;
#pragma unroll 1
    for (uint32 step = 0; step < steps; step++) {
        wait_copies(stages - 2);
        __syncthreads();
        // The last step's tiles are done with.
        load(step + stages - 1);
        latent.multiply(step % stages);
        __syncthreads();
        latent.attend(step % stages);
    }
#pragma unroll
    for (uint32 b = 0; b < Latent<Type>::BLOCKS; b++) {
#pragma unroll
        for (uint32 step = 4; step < WARP; step *= 2) {
            engine.l[b][0] += __shfl_xor_sync(FULL_WARP, engine.l[b][0], step);
            engine.l[b][1] += __shfl_xor_sync(FULL_WARP, engine.l[b][1], step);
        }
    }
    latent.send(exchange);
    // What comes to a CTA is of one or two warps of each: the others may still read the tiles whose place the joining takes.
    __syncthreads();
    exchange.join(pair);
}

#define LATENT_KERNEL(name, ...)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention_latent<__VA_ARGS__>(p); }
