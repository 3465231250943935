// How states become results. States of a CTA's warps join in shared memory; states of a work item's chunks join in the CTA that ends last, in
// the order of the chunks. Maxima are maxima of s · log2 e in the kernels, and natural logarithms in what they write.
#pragma once

#include "attention/counters.cuh"

// 2^(m − to); 0 where m is −∞, whatever `to` is.
__device__ inline float weight(float m, float to) { return m == minus_infinity() ? 0.0f : exp2_fast(m - to); }

// A row as the caller counts: a query position and a query head.
struct RowPlace {
    uint32 position, head;
};
__device__ inline RowPlace place_of_row(const AttentionParams &p, const WorkItem &item, uint32 row) {
    const uint32 position = p.own_lists ? item.position : p.group.divide(row);
    const uint32 within = p.own_lists ? row : row - position * p.group.value;
    return {position, item.head * p.group.value + within};
}
// The first row of a work item among those that read its list, and how many rows the item has.
__device__ inline uint32 first_row(const AttentionParams &p, const WorkItem &item) { return item.row_block * (WARP_ROWS << p.log_members); }
__device__ inline uint32 rows_of(const AttentionParams &p, const WorkItem &item) {
    return min(p.rows - first_row(p, item), WARP_ROWS << p.log_members);
}

// Whether results of a row of this query position are written.
__device__ inline bool is_written(const AttentionParams &p, const WorkItem &item, uint32 position) {
    return !p.kept_past.data || int32(position) < as<int32>(p.kept_past.at(item.seq));
}

__device__ inline void write_element(char *address, uint32 type, float x) {
    if (type == FLOAT32) {
        as<float>(address) = x;
    } else if (type == FLOAT16) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(as<uint16>(address)) : "f"(x));
    } else {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(as<uint16>(address)) : "f"(x));
    }
}

// The factor that turns a row's acc into `out`: 1 / l, or less where the head has a sink; 0 where the row sees nothing.
__device__ inline float norm_of(const AttentionParams &p, uint32 head, float m, float l) {
    float norm = l == 0.0f ? 0.0f : 1.0f / l;
    if (p.sinks.data && l != 0.0f) {
        const float sink = as<float>(p.sinks.at(head)) * LOG2_E, top = fmaxf(m, sink), keep = weight(m, top);
        norm = keep / (l * keep + (sink == top ? 1.0f : weight(sink, top)));
    }
    return norm;
}
// Writes two neighbouring channels of `out` at `to`.
__device__ inline void write_out(const AttentionParams &p, char *to, float2 acc, float norm) {
    write_element(to, p.out_type, acc.x * norm);
    write_element(to + p.out.step[3], p.out_type, acc.y * norm);
}
// Writes two channels of a row's state; with channel 0 also the row's lse, m and l.
__device__ inline void write_state(const AttentionParams &p, const WorkItem &item, const RowPlace &place, uint32 channel, float2 acc, float m, float l) {
    const auto [position, head] = place;
    if (p.state.acc.data) {
        char *to = p.state.acc.at(item.seq, position, head, 0, channel);
        as<float>(to) = acc.x;
        as<float>(to + p.state.acc.step[4]) = acc.y;
    }
    if (channel == 0) {
        if (p.lse.data) as<float>(p.lse.at(item.seq, position, head)) = (m + log2f(l)) * LN_2;
        if (p.state.m.data) as<float>(p.state.m.at(item.seq, position, head)) = m * LN_2;
        if (p.state.l.data) as<float>(p.state.l.at(item.seq, position, head)) = l;
    }
}
// A row that sees nothing has weights of zero, whose products with NaN are NaN: its acc is zero instead.
__device__ inline float unless_empty(float acc, float l) { return l == 0.0f ? 0.0f : acc; }
__device__ inline float2 unless_empty(float2 acc, float l) { return {unless_empty(acc.x, l), unless_empty(acc.y, l)}; }
__device__ inline float4 unless_empty(float4 acc, float l) {
    return {unless_empty(acc.x, l), unless_empty(acc.y, l), unless_empty(acc.z, l), unless_empty(acc.w, l)};
}

// Writes two channels of all of a row's results.
__device__ inline void write_results(const AttentionParams &p, const WorkItem &item, uint32 row, uint32 channel, float2 acc, float m, float l) {
    const RowPlace place = place_of_row(p, item, row);
    if (!is_written(p, item, place.position)) return;
    acc = unless_empty(acc, l);
    if (p.out.data) {
        const float norm = norm_of(p, place.head, m, l);
        write_out(p, p.out.at(item.seq, place.position, place.head, channel), acc, norm);
    }
    write_state(p, item, place, channel, acc, m, l);
}

// m and l of each warp's rows.
struct Sums {
    float m[WARPS][WARP_ROWS], l[WARPS][WARP_ROWS];
    bool is_last;
};

// acc of a warp's rows in shared memory. Rows are padded so that lanes hit different banks.
struct WarpAcc {
    float *data;
    uint32 row_pitch;
    __device__ float *at(uint32 row, uint32 channel) const { return data + row * row_pitch + channel; }
};
// acc of a warp lies in its team's ring, which is free after the last tile. With partials it lies behind the queries: the total of all units of
// each warp, then the state of one unit of each.
__device__ inline WarpAcc acc_of(const AttentionParams &p, char *shared, uint32 warp) {
    const uint32 row_pitch = p.value_dim + 4, bytes = p.warp_rows * row_pitch * sizeof(float);
    const uint32 team = warp >> p.log_members, member = warp - (team << p.log_members);
    const uint32 begin = p.partials.acc.data ? p.totals_offset + warp * bytes : team * p.stages * p.stage_bytes + member * bytes;
    return {reinterpret_cast<float *>(shared + begin), row_pitch};
}

// The state of one chunk in scratch: acc [rows][Dv], then m and l [rows].
struct StoredState {
    float *data;
    uint32 rows, channels;
    uint32 pitch;  // floats from one chunk's state to the next

    __device__ StoredState(const AttentionParams &p, uint32 slot) : rows(min(p.rows, WARP_ROWS << p.log_members)), channels(p.value_dim) {
        pitch = rows * (channels + 2);
        data = reinterpret_cast<float *>(p.scratch) + uint64(slot) * pitch;
    }
    __device__ float *acc(uint32 row, uint32 channel) const { return data + row * channels + channel; }
    __device__ float *m(uint32 row) const { return data + rows * channels + row; }
    __device__ float *l(uint32 row) const { return m(row) + rows; }
};

// Two channels of a row, joined from several states.
struct Joined {
    float2 acc;
    float m, l;

    __device__ Joined() : acc{0.0f, 0.0f}, m(minus_infinity()), l(0.0f) {}
    // Joins N states, of which the first `count` exist.
    template <uint32 N>
    __device__ void add(const float2 (&other)[N], const float (&other_m)[N], const float (&other_l)[N], uint32 count) {
        float top = m;
#pragma unroll
        for (uint32 i = 0; i < N; i++)
            if (i < count) top = fmaxf(top, other_m[i]);
        const float keep = weight(m, top);
        acc = {acc.x * keep, acc.y * keep};
        l *= keep;
        m = top;
#pragma unroll
        for (uint32 i = 0; i < N; i++) {
            if (i >= count) continue;
            const float take = weight(other_m[i], top);
            acc.x += take * other[i].x;
            acc.y += take * other[i].y;
            l += take * other_l[i];
        }
    }
};

__device__ inline Joined join_warps(const AttentionParams &p, const Sums &sums, char *shared, uint32 row, uint32 channel) {
    const uint32 count = WARPS >> p.log_members, within = row % WARP_ROWS, first = row / WARP_ROWS, step = 1 << p.log_members;
    const float *from = acc_of(p, shared, first).at(within, channel);
    const uint32 pitch = acc_of(p, shared, first + step).at(within, channel) - from;
    float2 acc[WARPS];
    float m[WARPS], l[WARPS];
#pragma unroll
    for (uint32 i = 0; i < WARPS; i++) {
        if (i >= count) continue;
        acc[i] = *reinterpret_cast<const float2 *>(from + i * pitch);
        m[i] = sums.m[first + i * step][within];
        l[i] = sums.l[first + i * step][within];
    }
    Joined joined;
    joined.add(acc, m, l, count);
    return joined;
}

// Chunks whose loads are under way together.
constexpr uint32 JOINED_AT_ONCE = 8;

__device__ inline Joined join_chunks(const StoredState &first, uint32 chunks, uint32 row, uint32 channel) {
    Joined joined;
#pragma unroll 1
    for (uint32 begin = 0; begin < chunks; begin += JOINED_AT_ONCE) {
        const uint32 count = min(chunks - begin, JOINED_AT_ONCE);
        const float *const from = first.acc(row, channel) + uint64(begin) * first.pitch, *const sums = first.m(row) + uint64(begin) * first.pitch;
        float2 acc[JOINED_AT_ONCE];
        float m[JOINED_AT_ONCE], l[JOINED_AT_ONCE];
#pragma unroll
        for (uint32 i = 0; i < JOINED_AT_ONCE; i++) {
            if (i >= count) continue;
            acc[i] = __ldcg(reinterpret_cast<const float2 *>(from + i * first.pitch));
            m[i] = __ldcg(sums + i * first.pitch);
            l[i] = __ldcg(sums + i * first.pitch + first.rows);
        }
        joined.add(acc, m, l, count);
    }
    return joined;
}

// Counts this CTA's chunk as stored; true where all chunks of the work item are.
__device__ inline bool is_last(const AttentionParams &p, const CtaShare &cta_share, Sums &sums) {
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32 *const counter = p.counters + counter_of(p, cta_share);
        sums.is_last = count_up(counter) == cta_share.chunks - 1;
        if (sums.is_last) *counter = 0;
    }
    __syncthreads();
    return sums.is_last;
}

__device__ inline void join_start(const AttentionParams &p, const WorkItem &item, uint32 row, uint32 channel, Joined &joined) {
    const auto [position, head] = place_of_row(p, item, row);
    const char *const from = p.start.acc.at(item.seq, position, head, 0, channel);
    const float2 acc[1] = {{as<float>(from), as<float>(from + p.start.acc.step[4])}};
    const float m[1] = {as<float>(p.start.m.at(item.seq, position, head)) * LOG2_E}, l[1] = {as<float>(p.start.l.at(item.seq, position, head))};
    joined.add(acc, m, l, l[0] == 0.0f ? 0 : 1);
}

// The last phase of mma and general. Every warp's state is in shared memory: joins these, then the chunks of the work item, and writes results.
__device__ inline void join(const AttentionParams &p, const CtaShare &cta_share, const WorkItem &item, Sums &sums, char *shared) {
    const uint32 rows = rows_of(p, item), half = p.value_dim / 2;
    // The CTA arrives early: the answer takes long.
    uint32 arrived = 0;
    if (threadIdx.x == 0 && cta_share.chunks == 1) arrived = arrive_at_end(p);
    __syncthreads();
#pragma unroll 1
    for (bool stored = false;; stored = true) {
        const StoredState state(p, cta_share.slot + (stored ? 0 : cta_share.chunk));
        const bool is_final = stored || cta_share.chunks == 1;
#pragma unroll 1
        for (uint32 n = threadIdx.x; n < rows * half; n += THREADS) {
            const uint32 row = p.half_value.divide(n), channel = (n - row * half) * 2;
            Joined joined = stored ? join_chunks(state, cta_share.chunks, row, channel) : join_warps(p, sums, shared, row, channel);
            if (is_final) {
                const uint32 item_row = first_row(p, item) + row;
                if (p.start.acc.data) join_start(p, item, item_row, channel, joined);
                write_results(p, item, item_row, channel, joined.acc, joined.m, joined.l);
                continue;
            }
            *reinterpret_cast<float2 *>(state.acc(row, channel)) = joined.acc;
            if (channel) continue;
            *state.m(row) = joined.m;
            *state.l(row) = joined.l;
        }
        if (is_final) break;
        const bool joins = is_last(p, cta_share, sums);
        if (threadIdx.x == 0) arrived = arrive_at_end(p);
        if (!joins) break;
    }
    if (threadIdx.x < WARP) clear_counters(p, arrived);
}
