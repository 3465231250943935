// Packing accepted rows: the offsets and the copy. pack.cu and verify_pack.cu include it.
#pragma once

#include "common/types.cuh"

constexpr uint32 MAX_TENSORS = 256;
constexpr uint32 MAX_LAYOUTS = 8;
constexpr uint32 MAX_SUMMED_BATCH = 1024;  // the largest batch whose counts a CTA itself sums to find an offset
constexpr uint32 SLOTS = 4;                // the number of units that a lane keeps in registers

// How the rows of some tensors lie in memory, and how they are split into tiles. A row is `units` units of 16, 8, 4, 2 or 1 bytes, the
// largest size that divides every address, in runs of `run` consecutive units: unit c is at (c / run / inner) · outer stride
// + (c / run mod inner) · inner stride + (c mod run) units. Strides are in bytes. Fields are ordered by when they are read, as in
// VerifyParams.
//
// A tile is the work of one warp at a time. 2^log_lanes lanes take adjacent units of a row; the lanes of a warp together take
// 2^log_lane_pos positions of 2^(5 − log_lanes − log_lane_pos) sequences. Each lane takes one column of 2^log_slots ≤ SLOTS positions,
// 2^log_lane_pos apart.
template <typename Form>
struct RowLayout {
    using Stride = typename Form::Stride;
    uint32 tiles;
    uint32 units;
    uint32 log_lanes, log_lane_pos, log_slots;
    Divisor col_tiles;    // tiles of a row
    Divisor inner_tiles;  // tiles along the batch or, if by_sequence, along the positions
    Divisor tensors;      // tensors of this layout
    Stride src_seq, src_pos, dst_row;
    // Only General reads the fields below.
    uint32 log_unit;
    Divisor run, inner;
    Stride src_outer, src_inner, dst_outer, dst_inner;
};

// Mirrored by PackParams in src/ops/pack/cuda/tiles.rs.
template <typename Form>
struct PackParams {
    using Stride = typename Form::Stride;
    uint32 batch;
    uint32 gamma;
    uint32 cap;             // rows of packed, at most B·γ
    uint32 layouts;
    uint32 by_sequence;     // 1: the tiles of a sequence follow each other; 0: the tiles of a position follow each other
    uint32 early_ctas;      // CTAs of pack.cu that load their first tiles before they know the counts
    const char *accepted;   // [B] int32
    char *offsets;          // [B+1] int32 or int64 (offsets_bytes)
    Stride accepted_seq, offsets_seq;
    uint32 offsets_bytes;   // 4 or 8
    RowLayout<Form> layout[MAX_LAYOUTS];
};

// The addresses of the tensors' rows and packed rows, a separate kernel parameter: tensors of layout 0, then of layout 1, …
struct Ends {
    const char *src;  // [B, γ, ...]
    char *dst;        // [cap, ...]
};
struct Tensors {
    Ends of[MAX_TENSORS];
};

#include "pack/layout.cuh"

template <typename Params>
__device__ inline void write_offset(const Params &p, uint32 i, uint32 value) {
    char *address = p.offsets + offset(i, p.offsets_seq);
    if (p.offsets_bytes == 8) as<int64>(address) = value;
    else as<int32>(address) = value;
}

template <uint32 LOG_BYTES> struct Unit;
template <> struct Unit<4> { using type = uint4; };
template <> struct Unit<3> { using type = uint2; };
template <> struct Unit<2> { using type = uint32; };
template <> struct Unit<1> { using type = uint16; };
template <> struct Unit<0> { using type = uint8; };

__device__ inline uint4 widen(uint4 v) { return v; }
__device__ inline uint4 widen(uint2 v) { return {v.x, v.y, 0, 0}; }
__device__ inline uint4 widen(uint32 v) { return {v, 0, 0, 0}; }
__device__ inline void narrow(uint4 v, uint4 &unit) { unit = v; }
__device__ inline void narrow(uint4 v, uint2 &unit) { unit = {v.x, v.y}; }
template <typename T> __device__ inline void narrow(uint4 v, T &unit) { unit = T(v.x); }

// The units of a tile that one lane copies: one column of positions pos, pos + 2^log_lane_pos, … of one sequence.
template <typename Form>
struct Lane {
    const RowLayout<Form> &layout;
    const char *src;  // the unit of the lane's column and sequence at position 0
    char *dst;        // the unit of the lane's column in row 0
    uint32 warp_seq;  // the first sequence of the tile
    uint32 seq, pos;
    uint32 end;       // the end of the tile's positions; 0 if there is no such sequence or column

    __device__ Lane(const PackParams<Form> &p, const Tensors &tensors, const RowLayout<Form> &g, uint32 first_tensor, uint32 tile) : layout(g) {
        // Columns change fastest, so that tiles copied together touch whole rows. If there are few rows, positions change slowest, because
        // the first positions of a sequence are the likeliest to be accepted. If there are many rows (by_sequence), sequences change
        // slowest, so that rows copied together are adjacent.
        const uint32 by_inner = g.col_tiles.divide(tile), by_tensor = g.inner_tiles.divide(by_inner), outer = g.tensors.divide(by_tensor);
        const uint32 col_tile = tile - by_inner * g.col_tiles.value, inner = by_inner - by_tensor * g.inner_tiles.value;
        const uint32 tensor = by_tensor - outer * g.tensors.value;
        const uint32 seq_tile = p.by_sequence ? outer : inner, pos_tile = p.by_sequence ? inner : outer;
        const uint32 row = threadIdx.x % WARP >> g.log_lanes;
        const uint32 col = (col_tile << g.log_lanes) + (threadIdx.x & ((1u << g.log_lanes) - 1));
        warp_seq = seq_tile << (5 - g.log_lanes - g.log_lane_pos);
        seq = warp_seq + (row >> g.log_lane_pos);
        pos = (pos_tile << (g.log_slots + g.log_lane_pos)) + (row & ((1u << g.log_lane_pos) - 1));
        end = seq < p.batch && col < g.units ? (pos_tile + 1) << (g.log_slots + g.log_lane_pos) : 0;
        seq = min(seq, p.batch - 1);

        const auto &pointers = tensors.of[first_tensor + tensor];
        src = pointers.src + offset(seq, g.src_seq);
        dst = pointers.dst;
        if constexpr (Form::IS_GENERAL) {
            const uint32 run = g.run.divide(col), outer = g.inner.divide(run), inner = run - outer * g.inner.value;
            const uint64 in_run = uint64(col - run * g.run.value) << g.log_unit;
            src += offset(outer, g.src_outer) + offset(inner, g.src_inner) + in_run;
            dst += offset(outer, g.dst_outer) + offset(inner, g.dst_inner) + in_run;
        } else {
            src += uint64(col) * sizeof(uint4);
            dst += uint64(col) * sizeof(uint4);
        }
    }

    // The position of the lane's unit u.
    __device__ uint32 position(uint32 u) const { return pos + (u << layout.log_lane_pos); }
    __device__ const char *source(uint32 u) const { return src + offset(position(u), layout.src_pos); }

    // Loads the units of positions below `limit`.
    template <uint32 LOG_BYTES>
    __device__ void load_as(uint32 limit, uint4 (&units)[SLOTS]) const {
        using T = typename Unit<LOG_BYTES>::type;
#pragma unroll
        for (uint32 u = 0; u < SLOTS; ++u) {
            const T &unit = as<T>(source(u));
            if (position(u) < limit) units[u] = widen(__ldcs(&unit));
        }
    }
    template <uint32 LOG_BYTES>
    __device__ void store_as(uint32 first_row, uint32 limit, const uint4 (&units)[SLOTS]) const {
        using T = typename Unit<LOG_BYTES>::type;
#pragma unroll
        for (uint32 u = 0; u < SLOTS; ++u) {
            T &unit = as<T>(dst + offset(first_row + position(u), layout.dst_row)), value;
            narrow(units[u], value);
            if (position(u) < limit) __stcs(&unit, value);
        }
    }
    __device__ void load(uint32 limit, uint4 (&units)[SLOTS]) const {
        limit = min(limit, end);
        if (!Form::IS_GENERAL || layout.log_unit == 4) load_as<4>(limit, units);
        else if (layout.log_unit == 3) load_as<3>(limit, units);
        else if (layout.log_unit == 2) load_as<2>(limit, units);
        else if (layout.log_unit == 1) load_as<1>(limit, units);
        else load_as<0>(limit, units);
    }
    __device__ void store(uint32 first_row, uint32 limit, const uint4 (&units)[SLOTS]) const {
        limit = min(limit, end);
        if (!Form::IS_GENERAL || layout.log_unit == 4) store_as<4>(first_row, limit, units);
        else if (layout.log_unit == 3) store_as<3>(first_row, limit, units);
        else if (layout.log_unit == 2) store_as<2>(first_row, limit, units);
        else if (layout.log_unit == 1) store_as<1>(first_row, limit, units);
        else store_as<0>(first_row, limit, units);
    }
};

// The offset and count of a sequence. A warp sums the counts of the sequences before it, from `begin` on if it knows their sum before `begin`.
template <typename Counts>
struct SummedOffsets {
    Counts counts;
    uint32 begin, before;
    __device__ uint32 sum_before(uint32 seq) const {
        const bool known = seq >= begin;
        return (known ? before : 0) + counts.sum(known ? begin : 0, seq);
    }
    template <typename Lane>
    __device__ uint32 count(const Lane &lane) const {
        return lane.end ? counts(lane.seq) : 0;
    }
    template <typename Lane>
    __device__ uint32 offset(const Lane &lane) const {
        uint32 sum = sum_before(lane.warp_seq);
        for (uint32 i = lane.warp_seq; i < lane.seq; ++i) sum += counts(i);  // the tile's sequences before the lane's
        return sum;
    }
};
template <typename Counts> SummedOffsets(Counts, uint32, uint32) -> SummedOffsets<Counts>;

// Writes the offsets of sequences begin … end − 1 and, after the batch's last sequence, the total; by `warps` warps, 32 sequences at a
// time, of which this is number `warp`.
template <typename Params, typename Counts>
__device__ inline void write_offsets(const Params &p, const SummedOffsets<Counts> &offsets, uint32 begin, uint32 end, uint32 warp, uint32 warps) {
    for (uint32 first = begin + warp * WARP; first < end; first += warps * WARP) {
        const uint32 seq = first + threadIdx.x % WARP, count = seq < end ? offsets.counts(seq) : 0;
        const uint32 base = offsets.sum_before(first);
        const uint32 upto = warp_inclusive_sum(count);
        if (seq >= end) continue;
        write_offset(p, seq, base + upto - count);
        if (seq + 1 == p.batch) write_offset(p, p.batch, base + upto);
    }
}

template <typename Params, typename Lane, typename Offsets>
__device__ inline void store_tile(const Params &p, const Lane &lane, const Offsets &offsets, const uint4 (&units)[SLOTS]) {
    const uint32 offset = offsets.offset(lane);
    lane.store(offset, min(offsets.count(lane), max(p.cap, offset) - offset), units);
}

// Copies the accepted rows of every tensor by `warps` warps, of which this is number `warp`. Each warp has already copied `begun` tiles of
// layout 0.
template <typename Form, typename Offsets>
__device__ inline void copy_rows(const PackParams<Form> &p, const Tensors &tensors, uint32 warp, uint32 warps, uint32 begun,
                                 const Offsets &offsets) {
    uint32 first_tensor = 0;
    for (uint32 l = 0; l < p.layouts; ++l) {
        const RowLayout<Form> &g = p.layout[l];
        // Every other layout is dealt from the last warp on, so that two small layouts share the device.
        uint32 tile = l == 0 ? warp + begun * warps : l % 2 ? warps - 1 - warp : warp;
        for (; tile < g.tiles; tile += warps) {
            const Lane<Form> lane(p, tensors, g, first_tensor, tile);
            const uint32 count = offsets.count(lane);
            if (!__any_sync(FULL_WARP, lane.pos < count)) continue;
            uint4 units[SLOTS];
            lane.load(count, units);
            store_tile(p, lane, offsets, units);
        }
        first_tensor += g.tensors.value;
    }
}
