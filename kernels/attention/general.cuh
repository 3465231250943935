// Attention in float32 to tensors of every type and stride, for general.cu and those of kernels/attention_tree/ and kernels/attention_int4/: one
// warp attends for eight rows to one token at a time, its lanes side by side along the channels.
#pragma once

#include "attention/attend_share.cuh"

constexpr uint32 MAX_DIM = 576, LANE_CHANNELS = MAX_DIM / WARP;

// FP8 is float16 once shifted. Shifted e4m3 lacks a factor of 2^8, and its NaN would be a number.
template <uint32 TYPE>
__device__ inline float read_element(const char *address) {
    if constexpr (TYPE == FLOAT32) {
        return as<float>(address);
    } else if constexpr (TYPE == BFLOAT16) {
        return __uint_as_float(uint32(as<uint16>(address)) << 16);
    } else {
        uint16 bits = TYPE == FLOAT16 ? as<uint16>(address) : uint16(as<uint8>(address)) << 8;
        if constexpr (TYPE == FLOAT8_E4M3) {
            if ((bits & 0x7f00) == 0x7f00) return __int_as_float(0x7fffffff);
            bits = (bits & 0x8000) | (bits & 0x7f00) >> 1;
        }
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return TYPE == FLOAT8_E4M3 ? x * 256.0f : x;
    }
}

template <uint32 TYPE>
__device__ inline void read_row(float (&row)[LANE_CHANNELS], const char *address, int64 step, uint32 dim) {
    const uint32 lane = threadIdx.x % WARP;
#pragma unroll
    for (uint32 i = 0; i < LANE_CHANNELS; i++) row[i] = lane + i * WARP < dim ? read_element<TYPE>(address + (lane + i * WARP) * step) : 0.0f;
}
__device__ inline void read_row(float (&row)[LANE_CHANNELS], uint32 type, const char *address, int64 step, uint32 dim) {
    switch (type) {
        case FLOAT32: return read_row<FLOAT32>(row, address, step, dim);
        case FLOAT16: return read_row<FLOAT16>(row, address, step, dim);
        case BFLOAT16: return read_row<BFLOAT16>(row, address, step, dim);
        case FLOAT8_E4M3: return read_row<FLOAT8_E4M3>(row, address, step, dim);
        default: return read_row<FLOAT8_E5M2>(row, address, step, dim);
    }
}

// What a reach may say otherwise. Whether a row sees a token within its reach: of a chain of rows always.
__device__ inline bool is_seen(const AttentionParams &, const Reach &, uint32, int32) { return true; }
// Where the granule of the lane lies.
__device__ inline Place find_granule(const AttentionParams &p, const Reach &reach, const WorkItem &item, uint32 entries, const Tiles &tiles, uint32 tile) {
    return tiles.find(p, item, reach, entries, tile);
}
// Reads a token's key, or its value.
__device__ inline void read_token(const AttentionParams &p, const Reach &, const WorkItem &item, bool is_value, const Place &token, float (&row)[LANE_CHANNELS]) {
    const View<4> &from = is_value ? p.v : p.k;
    read_row(row, p.kv_type, from.at(token.page, token.row, item.head), from.step[3], is_value ? p.value_dim : p.dim);
}

struct GeneralCompute {
    const AttentionParams &p;
    char *shared;
    uint32 lane, warp, team, member;
    WarpState state;  // in shared memory throughout

    __device__ GeneralCompute(const AttentionParams &p, char *shared, uint32 log_members) : p(p), shared(shared) {
        lane = threadIdx.x % WARP;
        warp = threadIdx.x / WARP;
        team = warp >> log_members;
        member = warp & ((1 << log_members) - 1);
        // A stage has acc of a team's rows, as acc_of() says; m and l of each warp lie behind the queries.
        const uint32 row_pitch = p.value_dim + 4, rows = p.warp_rows;
        float *const acc = reinterpret_cast<float *>(shared + team * p.stages * p.stage_bytes) + member * rows * row_pitch;
        float *const sums = reinterpret_cast<float *>(shared + p.q_offset + (WARP_ROWS << p.log_members) * p.q_pitch) + warp * 2 * WARP_ROWS;
        state = {{acc, row_pitch}, sums, sums + WARP_ROWS};
        clear();
    }
    __device__ void clear() { clear_state(p, state); }
    __device__ void finish() {}
    __device__ void store(const WarpState &to) {
        __syncwarp();
        for (uint32 n = lane; n < p.warp_rows * to.acc.row_pitch; n += WARP) to.acc.data[n] = state.acc.data[n];
        if (lane < WARP_ROWS) {
            to.m[lane] = state.m[lane];
            to.l[lane] = state.l[lane];
        }
        __syncwarp();
    }

    __device__ void load_queries(const WorkItem &item) {
        const uint32 rows = rows_of(p, item);
#pragma unroll 1
        for (uint32 row = warp; row < rows; row += WARPS) {
            const auto [position, head] = place_of_row(p, item, first_row(p, item) + row);
            float query[LANE_CHANNELS];
            read_row(query, p.q_type, p.q.at(item.seq, position, head), p.q.step[3], p.dim);
#pragma unroll
            for (uint32 i = 0; i < LANE_CHANNELS; i++)
                if (lane + i * WARP < p.dim) as<float>(shared + p.q_offset + row * p.q_pitch + (lane + i * WARP) * 4) = query[i];
        }
    }

    // Attends to one token: multiplies its key with every row of the warp, then adds its value. `reach` says which rows see it.
    template <typename RowsReach>
    __device__ void attend(const WorkItem &item, const RowsReach &reach, int32 position, int32 page, int32 row_in_page, uint32 rows) {
        const float k_scale = p.k_scale.data ? as<float>(p.k_scale.at(page, row_in_page, item.head)) : 1.0f;
        const float v_scale = p.v_scale.data ? as<float>(p.v_scale.at(page, row_in_page, item.head)) : 1.0f;
        float keep = 0.0f, take = 0.0f;  // factors of row `lane`
#pragma unroll 1
        for (uint32 is_value = 0; is_value < 2; is_value++) {
            float token[LANE_CHANNELS];
            read_token(p, reach, item, is_value, Place{position, page, row_in_page}, token);
#pragma unroll 1
            for (uint32 row = 0; row < rows; row++) {
                const uint32 n = member * WARP_ROWS + row;
                const uint32 query_position = place_of_row(p, item, first_row(p, item) + n).position;
                int32 first;
                uint32 count;
                reach.row(p, query_position, first, count);
                if (uint32(position - first) >= count || !is_seen(p, reach, query_position, position)) continue;
                if (is_value) {
                    const float row_keep = __shfl_sync(FULL_WARP, keep, row), row_take = __shfl_sync(FULL_WARP, take, row) * v_scale;
#pragma unroll
                    for (uint32 i = 0; i < LANE_CHANNELS; i++) {
                        if (lane + i * WARP >= p.value_dim) break;
                        float *const acc = state.acc.at(row, lane + i * WARP);
                        *acc = *acc * row_keep + row_take * token[i];
                    }
                    continue;
                }
                const float *query = reinterpret_cast<const float *>(shared + p.q_offset + n * p.q_pitch);
                float multiply_keys = 0.0f;
#pragma unroll
                for (uint32 i = 0; i < LANE_CHANNELS; i++) {
                    if (lane + i * WARP >= p.dim) break;
                    multiply_keys = fmaf(token[i], query[lane + i * WARP], multiply_keys);
                }
#pragma unroll
                for (uint32 step = 1; step < WARP; step *= 2) multiply_keys += __shfl_xor_sync(FULL_WARP, multiply_keys, step);
                multiply_keys *= p.scale * k_scale;
                if (p.soft_cap != 0.0f) multiply_keys = p.soft_cap * tanhf(multiply_keys / p.soft_cap);
                multiply_keys *= LOG2_E;
                if (lane == row) {
                    const float m = state.m[row], top = fmaxf(m, multiply_keys);
                    keep = weight(m, top);
                    take = exp2f(multiply_keys - (top == minus_infinity() ? 0.0f : top));
                    state.m[row] = top;
                    state.l[row] = state.l[row] * keep + take;
                }
                __syncwarp();
            }
        }
    }

    template <typename Close>
    __device__ void run(const CtaShare &cta_share, const WorkItem &item, const Reach &reach, Close close_unit) {
        run_with(cta_share, item, reach, close_unit);
    }
    template <typename RowsReach, typename Close>
    __device__ void run_with(const CtaShare &cta_share, const WorkItem &item, const RowsReach &reach, Close close_unit) {
        load_queries(item);
        __syncthreads();
        const uint32 before = member * WARP_ROWS, all = rows_of(p, item), rows = all > before ? min(all - before, WARP_ROWS) : 0;
        const uint32 unit_tiles = p.partials.acc.data ? p.unit_tiles.value : ~0u;
        const Tiles tiles(p, cta_share.begin + team, cta_share.end, LOG_WARPS - p.log_members);
        if (tiles.count == 0) close_unit(0, false);
        Place place;
        uint32 part = 0, unit = tiles.first;
        for (uint32 tile = 0; tile < tiles.count; tile++) {
            if (tiles.begins(p, tile)) place = find_granule(p, reach, item, cta_share.entries, tiles, tile);
#pragma unroll 1
            for (uint32 t = 0; t < TILE; t++) {
                const uint32 from = tiles.lane_of(p, tile, t), within = t & ((1 << p.log_granule) - 1);
                const int32 granule = __shfl_sync(FULL_WARP, place.position, from), page = __shfl_sync(FULL_WARP, place.page, from);
                const int32 row_in_page = __shfl_sync(FULL_WARP, place.row, from) + int32(within);
                if (is_reached(reach, granule, within)) attend(item, reach, granule + int32(within), page, row_in_page, rows);
            }
            if (tile + 1 == tiles.count || ++part == unit_tiles) {
                close_unit(unit, true);
                part = 0;
                unit += tiles.step;
            }
        }
    }
};
