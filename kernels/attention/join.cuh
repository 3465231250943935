// How states become results: those of a CTA's warps join in shared memory; those of a pair's chunks in the CTA that ends last, in the
// order of the chunks. Maxima are those of s · log2 e in here, and natural logarithms outside.
#pragma once

#include "attention/attention.cuh"

// 2^(m − to); 0 where m is −inf, whatever `to` is.
__device__ inline float weight(float m, float to) { return m == minus_infinity() ? 0.0f : exp2_fast(m - to); }

// A row as the caller counts: a query position and a query head.
struct RowPlace {
    uint32 position, head;
};
__device__ inline RowPlace place_of_row(const AttentionParams &p, const Pair &pair, uint32 row) {
    const uint32 position = p.own_lists ? pair.position : p.group.divide(row);
    const uint32 within = p.own_lists ? row : row - position * p.group.value;
    return {position, pair.head * p.group.value + within};
}
// Rows of a pair begin with this one, and are so many.
__device__ inline uint32 first_row(const AttentionParams &p, const Pair &pair) { return pair.row_block * (WARP_ROWS << p.log_members); }
__device__ inline uint32 rows_of(const AttentionParams &p, const Pair &pair) {
    return min(p.rows - first_row(p, pair), WARP_ROWS << p.log_members);
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

// What a row's acc is multiplied by: 1 / l, or less of it where the head has a sink.
__device__ inline float norm_of(const AttentionParams &p, uint32 head, float m, float l) {
    float norm = l == 0.0f ? 0.0f : 1.0f / l;
    if (p.sinks.data && l != 0.0f) {
        const float sink = as<float>(p.sinks.at(head)) * LOG2_E, top = fmaxf(m, sink), keep = weight(m, top);
        norm = keep / (l * keep + (sink == top ? 1.0f : weight(sink, top)));
    }
    return norm;
}
// Writes two channels of `out`, the first of which lies there.
__device__ inline void write_out(const AttentionParams &p, char *to, float2 acc, float norm) {
    write_element(to, p.out_type, acc.x * norm);
    write_element(to + p.out.step[3], p.out_type, acc.y * norm);
}
// Writes two channels of a row's state, and what else is told of the row.
__device__ inline void write_state(const AttentionParams &p, const Pair &pair, const RowPlace &place, uint32 channel, float2 acc, float m, float l) {
    const auto [position, head] = place;
    if (p.state.acc.data) {
        char *to = p.state.acc.at(pair.seq, position, head, 0, channel);
        as<float>(to) = acc.x;
        as<float>(to + p.state.acc.step[4]) = acc.y;
    }
    if (channel == 0) {
        if (p.lse.data) as<float>(p.lse.at(pair.seq, position, head)) = (m + log2f(l)) * LN_2;
        if (p.state.m.data) as<float>(p.state.m.at(pair.seq, position, head)) = m * LN_2;
        if (p.state.l.data) as<float>(p.state.l.at(pair.seq, position, head)) = l;
    }
}
// Writes two channels of a row's results.
__device__ inline void write_results(const AttentionParams &p, const Pair &pair, uint32 row, uint32 channel, float2 acc, float m, float l) {
    const RowPlace place = place_of_row(p, pair, row);
    if (p.out.data) {
        const float norm = norm_of(p, place.head, m, l);
        write_out(p, p.out.at(pair.seq, place.position, place.head, channel), acc, norm);
    }
    write_state(p, pair, place, channel, acc, m, l);
}

// m and l of the warps' rows.
struct Sums {
    float m[WARPS][WARP_ROWS], l[WARPS][WARP_ROWS];
    bool is_last;
};

// acc of a warp's rows, in shared memory; rows are padded so that lanes hit different banks.
struct WarpAcc {
    float *data;
    uint32 row_pitch;
    __device__ float *at(uint32 row, uint32 channel) const { return data + row * row_pitch + channel; }
};
// Lies in its team's memory for tiles, which is free once the last is seen; or, where units are kept apart, in memory of its own, the state
// of one unit behind that of all.
__device__ inline WarpAcc acc_of(const AttentionParams &p, char *shared, uint32 warp) {
    const uint32 row_pitch = p.value_dim + 4, bytes = p.kept_rows * row_pitch * sizeof(float);
    const uint32 team = warp >> p.log_members, member = warp - (team << p.log_members);
    const uint32 begin = p.partials.acc.data ? p.totals_offset + warp * bytes : team * p.stages * p.stage_bytes + member * bytes;
    return {reinterpret_cast<float *>(shared + begin), row_pitch};
}

// The state of one chunk in scratch: acc [rows][Dv], then m and l [rows].
struct StoredState {
    float *data;
    uint32 rows, channels;
    uint32 pitch;  // to that of the next chunk

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
    // Joins N states, of which `count` exist.
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

// Their loads wait for nothing but each other's places.
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

// This CTA's chunk is stored; is it the last of its pair?
__device__ inline bool is_last(const AttentionParams &p, const Item &item, Sums &sums) {
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32 before;
        asm volatile("fence.acq_rel.gpu;\n\t"
                     "atom.relaxed.gpu.global.add.u32 %0, [%1], 1;\n\t"
                     "fence.acq_rel.gpu;"
                     : "=r"(before) : "l"(p.counters + item.slot) : "memory");
        sums.is_last = before == item.chunks - 1;
        if (sums.is_last) p.counters[item.slot] = 0;
    }
    __syncthreads();
    return sums.is_last;
}

__device__ inline void join_start(const AttentionParams &p, const Pair &pair, uint32 row, uint32 channel, Joined &joined) {
    const auto [position, head] = place_of_row(p, pair, row);
    const char *const from = p.start.acc.at(pair.seq, position, head, 0, channel);
    const float2 acc[1] = {{as<float>(from), as<float>(from + p.start.acc.step[4])}};
    const float m[1] = {as<float>(p.start.m.at(pair.seq, position, head)) * LOG2_E}, l[1] = {as<float>(p.start.l.at(pair.seq, position, head))};
    joined.add(acc, m, l, l[0] == 0.0f ? 0 : 1);
}

// Every warp's state is in shared memory: joins them, and the chunks of the pair, to results.
__device__ inline void join(const AttentionParams &p, const Item &item, const Pair &pair, Sums &sums, char *shared) {
    const uint32 rows = rows_of(p, pair), half = p.value_dim / 2;
    __syncthreads();
#pragma unroll 1
    for (bool stored = false;; stored = true) {
        const StoredState state(p, item.slot + (stored ? 0 : item.chunk));
        const bool is_final = stored || item.chunks == 1;
#pragma unroll 1
        for (uint32 n = threadIdx.x; n < rows * half; n += THREADS) {
            const uint32 row = p.half_value.divide(n), channel = (n - row * half) * 2;
            Joined joined = stored ? join_chunks(state, item.chunks, row, channel) : join_warps(p, sums, shared, row, channel);
            if (is_final) {
                const uint32 of_pair = first_row(p, pair) + row;
                if (p.start.acc.data) join_start(p, pair, of_pair, channel, joined);
                write_results(p, pair, of_pair, channel, joined.acc, joined.m, joined.l);
                continue;
            }
            *reinterpret_cast<float2 *>(state.acc(row, channel)) = joined.acc;
            if (channel) continue;
            *state.m(row) = joined.m;
            *state.l(row) = joined.l;
        }
        if (is_final || !is_last(p, item, sums)) return;
    }
}
