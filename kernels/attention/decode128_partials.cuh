// The states of units that decode128.cuh writes to the caller's partials.
//
// A warp that has several units adds up their states in shared memory (UnitTotal) and writes each one when it ends. Where 2^log_share warps
// share a unit, the state of the unit is known once the warps have joined, and each of these warps writes some of its rows (write_unit).
#pragma once

#include "attention/decode128_tiles.cuh"

// The total of all units of one warp, in shared memory, in the order in which the warp's lanes keep acc in registers.
template <typename Compute>
struct UnitTotal {
    static constexpr uint32 BLOCKS = Compute::ROW_BLOCKS, ACC = Compute::ACC;
    float *acc;
    float m[BLOCKS][2], l[BLOCKS][2];

    // `memory` is the warp's own.
    __device__ explicit UnitTotal(char *memory) : acc(reinterpret_cast<float *>(memory) + threadIdx.x % WARP) {}
    __device__ void clear() {
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
            m[b][0] = m[b][1] = minus_infinity();
            l[b][0] = l[b][1] = 0.0f;
        }
#pragma unroll
        for (uint32 n = 0; n < BLOCKS * ACC; n++) acc[n * WARP] = 0.0f;
    }
    // Joins the unit in `compute` to the total; INTO_COMPUTE: the result replaces the unit instead of the total.
    template <bool INTO_COMPUTE>
    __device__ void add(Compute &compute) {
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
            float keep[2], take[2];
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const float top = fmaxf(m[b][i], compute.m[b][i]);
                keep[i] = weight(m[b][i], top);
                take[i] = weight(compute.m[b][i], top);
                m[b][i] = top;
                l[b][i] = l[b][i] * keep[i] + compute.l[b][i] * take[i];
            }
#pragma unroll
            for (uint32 n = 0; n < ACC; n++) {
                float &sum = acc[(b * ACC + n) * WARP], &one = compute.acc[b][n / 4][n % 4];
                const float joined = sum * keep[Compute::row_of(n % 4)] + one * take[Compute::row_of(n % 4)];
                (INTO_COMPUTE ? one : sum) = joined;
            }
            if constexpr (INTO_COMPUTE) {
#pragma unroll
                for (uint32 i = 0; i < 2; i++) {
                    compute.m[b][i] = m[b][i];
                    compute.l[b][i] = l[b][i];
                }
            }
        }
    }
};

// Channels that lie side by side in a lane are written at once where they do in the caller's tensor too, and are aligned there.
template <typename Channels>
__device__ inline bool lies_packed(const View<5> &acc, const char *row) {
    return acc.step[4] == sizeof(float) && uint64(row) % sizeof(Channels) == 0;
}
template <bool IS_PACKED, typename Channels>
__device__ inline void write_channels(const View<5> &acc, char *row, uint32 channel, const Channels &x) {
    if constexpr (IS_PACKED) {
        as<Channels>(row + channel * sizeof(float)) = x;
    } else {
        const float *const for_each_channel = reinterpret_cast<const float *>(&x);
#pragma unroll
        for (uint32 n = 0; n < sizeof(Channels) / sizeof(float); n++) as<float>(row + (channel + n) * acc.step[4]) = for_each_channel[n];
    }
}

// Writes the state of one unit, of all rows, to the caller's partials.
template <typename Compute>
__device__ inline void write_partial(const AttentionParams &p, const WorkItem &item, const Compute &compute, uint32 number) {
    using Channels = typename Compute::Channels;
    const uint32 rows = rows_of(p, item);
#pragma unroll
    for (uint32 b = 0; b < Compute::ROW_BLOCKS; b++) {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const uint32 row = b * WARP_ROWS + compute.row(i);
            if (row >= rows) continue;
            const auto [position, head] = place_of_row(p, item, first_row(p, item) + row);
            char *const to = p.partials.acc.at(item.seq, position, head, number);
            const float l = compute.l[b][i];
            const auto write = [&](uint32 channel, const Channels &x) { write_channels<true>(p.partials.acc, to, channel, unless_empty(x, l)); };
            const auto write_apart = [&](uint32 channel, const Channels &x) { write_channels<false>(p.partials.acc, to, channel, unless_empty(x, l)); };
            if (lies_packed<Channels>(p.partials.acc, to)) compute.for_each_channel(b, i, write);
            else compute.for_each_channel(b, i, write_apart);
            if (!compute.writes_sums()) continue;
            as<float>(p.partials.m.at(item.seq, position, head, number)) = compute.m[b][i] * LN_2;
            as<float>(p.partials.l.at(item.seq, position, head, number)) = compute.l[b][i];
        }
    }
}

// Writes the state of a unit that 2^log_sharing warps share to the caller's partials; each of these warps writes some of the rows. It reads
// what the warps have left in shared memory for the join, which has read it by then. COUNT rows are under way at once.
template <uint32 COUNT, typename Join>
__device__ inline void write_rows(const AttentionParams &p, const WorkItem &item, const Join &join, uint32 log_share, uint32 unit) {
    const uint32 sharing = 1 << log_share, first = join.warp >> log_share << log_share, rows = rows_of(p, item);
#pragma unroll 1
    for (uint32 begin = join.warp - first; begin < rows; begin += COUNT * sharing) {
        uint32 row[COUNT];
        char *to[COUNT];
        float top[COUNT], sum[COUNT] = {}, acc[COUNT][Join::LANE_CHANNELS] = {};
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            row[i] = min(begin + i * sharing, rows - 1);
            const auto [position, head] = place_of_row(p, item, first_row(p, item) + row[i]);
            to[i] = p.partials.acc.at(item.seq, position, head, unit);
            top[i] = join.m_of(first, row[i]);
        }
#pragma unroll 1
        for (uint32 w = 1; w < sharing; w++) {
#pragma unroll
            for (uint32 i = 0; i < COUNT; i++) top[i] = fmaxf(top[i], join.m_of(first + w, row[i]));
        }
#pragma unroll 1
        for (uint32 w = first; w < first + sharing; w++) {
#pragma unroll
            for (uint32 i = 0; i < COUNT; i++) {
                const float take = weight(join.m_of(w, row[i]), top[i]);
                sum[i] = fmaf(join.l_of(w, row[i]), take, sum[i]);
#pragma unroll
                for (uint32 n = 0; n < Join::LANE_CHANNELS; n++) acc[i][n] = fmaf(join.acc_of(w, row[i], n), take, acc[i][n]);
            }
        }
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            if (begin + i * sharing >= rows) break;
#pragma unroll
            for (uint32 n = 0; n < Join::LANE_CHANNELS; n++) acc[i][n] = unless_empty(acc[i][n], sum[i]);
            if constexpr (Join::BY_ROW) {
                if (lies_packed<float4>(p.partials.acc, to[i])) {
                    write_channels<true>(p.partials.acc, to[i], join.lane * 4, float4{acc[i][0], acc[i][1], acc[i][2], acc[i][3]});
                    continue;
                }
            }
#pragma unroll
            for (uint32 n = 0; n < Join::LANE_CHANNELS; n++)
                write_channels<false>(p.partials.acc, to[i], Join::BY_ROW ? join.lane * 4 + n : join.lane + n * WARP, acc[i][n]);
        }
        // Each lane writes m and l of one row.
        const uint32 lane_row = begin + join.lane * sharing;
        if (join.lane >= COUNT || lane_row >= rows) continue;
        float lane_m = 0.0f, lane_l = 0.0f;
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            // Selected lane by lane: an index would put the arrays in local memory.
            const uint32 one_top = pin_in_register(__float_as_uint(top[i])), one_sum = pin_in_register(__float_as_uint(sum[i]));
            lane_m = join.lane == i ? __uint_as_float(one_top) : lane_m;
            lane_l = join.lane == i ? __uint_as_float(one_sum) : lane_l;
        }
        const auto [position, head] = place_of_row(p, item, first_row(p, item) + lane_row);
        as<float>(p.partials.m.at(item.seq, position, head, unit)) = lane_m * LN_2;
        as<float>(p.partials.l.at(item.seq, position, head, unit)) = lane_l;
    }
}
template <typename Join>
__device__ inline void write_unit(const AttentionParams &p, const WorkItem &item, const Join &join, uint32 log_share, uint32 units) {
    const uint32 unit = (join.warp >> log_share) * join.ctas + join.rank, of_warp = rows_of(p, item) >> log_share;
    if (unit >= units) return;
    if (of_warp > 2) write_rows<4>(p, item, join, log_share, unit);
    else if (of_warp == 2) write_rows<2>(p, item, join, log_share, unit);
    else write_rows<1>(p, item, join, log_share, unit);
}
