// Records of the segments of many rows, as `record_segments` of sampling.cuh makes them, by warps that copy ahead (compute capability 9.0).
//
// Bytes: each row once. A multiprocessor needs some 25 KiB in flight to load at the memory's rate, which CTAs that load, compute and end do not keep
// up. Here each warp has segments of its own, one after another, and two stages in shared memory: while it computes one segment, a bulk copy brings
// the next. A segment of 32-bit numbers takes the room of both: other warps compute then. No warp waits for another.
//
//   for each segment: wait ─ largest number ─ [without what cannot be drawn, largest number again] ─ weights, sum ─ record ─ request the next but one
//
// The rows' first numbers lie on 16 bytes, and numbers of a row side by side.
#pragma once

#include "common/barrier.cuh"
#include "common/sampling.cuh"

constexpr uint32 STREAM_STAGES = 2, LANE_STRIPS = SEGMENT / STRIP / WARP;
static_assert(STREAM_WARPS * STREAM_STAGES * SEGMENT * 2 == STREAM_BYTES);

// A row of a launch.
struct StreamedRow {
    const Source &source;
    uint32 number;  // in the launch
    bool is_greedy, wants_plain;
    bool leaves_sums;  // of its groups, in scratch
};

// The warp's segments, and what it does with one of them.
struct SegmentStream {
    const SamplingParams &p;
    uint32 stages;           // this warp's stages, in shared memory
    const Barrier *arrived;  // one of each stage
    uint32 log_stages;       // log2 of how many of them
    uint32 lane;
    uint32 begin, end;       // the warp's part of the segments of all rows
    uint32 taken = 0;        // segments that the warp has been through: their stages are taken in turn

    // `barriers` has one for each stage of the CTA.
    __device__ SegmentStream(const SamplingParams &p, char *shared, Barrier *barriers) : p(p), lane(threadIdx.x % WARP) {
        const uint32 warp = threadIdx.x / WARP;
        log_stages = p.segments_at_once - 1;
        stages = shared_address(shared) + warp * (STREAM_BYTES / STREAM_WARPS);
        Barrier *const own = barriers + warp * STREAM_STAGES;
        if (lane == 0)
            for (uint32 n = 0; n < STREAM_STAGES; ++n) own[n].open(1);
        __syncwarp();
        arrived = own;
        share_out();
    }

    // Goes through the warp's part of the segments of all rows: record(row, first segment, past the last) for each row that it has a part of.
    template <typename Record> __device__ void run(const Record &record) const {
        const uint32 per_row = p.per_row.value;
        for (uint32 at = begin; at < end;) {
            const uint32 row = p.per_row.divide(at), s = at - row * per_row, past = min(per_row, s + (end - at));
            record(row, s, past);
            at += past - s;
        }
    }
    template <bool ANY> __device__ void record(const StreamedRow &row, uint32 first, uint32 past) {
        past = min(past, row.source.segments());
        if (row.source.row.type == FLOAT32) record_row<FLOAT32, ANY>(row, first, past);
        else if (row.source.row.type == FLOAT16) record_row<FLOAT16, ANY>(row, first, past);
        else record_row<BFLOAT16, ANY>(row, first, past);
    }

private:
    // Finds the warp's part. Where warps have few segments, these are neighbours in one row, unless a warp would have more of them for that: at a row's end a
    // warp has nothing on its way.
    __device__ void share_out() {
        constexpr uint32 FEW = 8;
        const uint32 warps = gridDim.x * (blockDim.x / WARP), warp = threadIdx.x / WARP * gridDim.x + blockIdx.x, per_row = p.per_row.value;
        const uint64 all = uint64(p.launch_rows) * per_row;
        if (all <= uint64(FEW) * warps) {
            const uint32 most = (uint32(all) + warps - 1) / warps, parts = (per_row + most - 1) / most;
            if (p.launch_rows * parts <= warps) {
                const uint32 row = warp / parts, part = warp - row * parts;
                begin = row * per_row + per_row * part / parts;
                end = row < p.launch_rows ? row * per_row + per_row * (part + 1) / parts : begin;
                return;
            }
        }
        begin = uint32(all * warp / warps), end = uint32(all * (warp + 1) / warps);
    }
    // The tokens of segment s.
    __device__ static uint32 tokens_of(const Row &row, uint32 s) { return min(row.tokens - s * SEGMENT, SEGMENT); }
    __device__ static uint32 place(uint32 h, uint32 lane) { return (h * WARP + lane) * STRIP; }

    // The stage of the warp's segment `number`, and where it is.
    __device__ uint32 stage_of(uint32 number) const { return number & ((1u << log_stages) - 1); }
    __device__ uint32 place_of(uint32 number) const { return stages + stage_of(number) * (STREAM_BYTES / STREAM_WARPS / STREAM_STAGES); }

    // Requests segment s, the warp's `number`, without what is left of it past the last 16 bytes.
    template <uint32 BYTES> __device__ void request(const Row &row, uint32 s, uint32 number) const {
        if (lane) return;
        const Barrier &barrier = arrived[stage_of(number)];
        const uint32 bytes = tokens_of(row, s) * BYTES / 16 * 16;
        barrier.expect(bytes);
        if (bytes) copy_bulk(place_of(number), row.data + uint64(s) * SEGMENT * BYTES, bytes, barrier);
    }
    template <uint32 TYPE, bool ANY> __device__ void record_row(const StreamedRow &row, uint32 first, uint32 past) {
        constexpr uint32 BYTES = Strip<TYPE>::BYTES;
        const uint32 count = 1 << log_stages;
        if (first < past) request<BYTES>(row.source.row, first, taken);
#pragma unroll 1
        for (uint32 s = first; s < past; ++s, ++taken) {
            arrived[stage_of(taken)].wait(taken >> log_stages);
            // The second is requested now, so that the first segments of all warps come before it.
            if (s == first && count > 1 && s + 1 < past) request<BYTES>(row.source.row, s + 1, taken + 1);
            record_segment<TYPE, ANY>(row, s, place_of(taken));
            __syncwarp();
            if (s + count < past) request<BYTES>(row.source.row, s + count, taken + count);
        }
    }
    // Strip h of those that this lane has of the segment in a stage: 256 neighbouring tokens, a group, are in the strips h of all lanes.
    template <uint32 TYPE> __device__ uint32 place_in(uint32 stage, uint32 h) const {
        return stage + (h * WARP + lane) * uint32(sizeof(Strip<TYPE>));
    }
    template <uint32 TYPE> __device__ Strip<TYPE> strip(uint32 stage, uint32 h) const {
        Strip<TYPE> loaded;
        loaded.load_shared(place_in<TYPE>(stage, h));
        return loaded;
    }
    // The largest number of a segment, NaN if there is one; with filters, also the keys of its groups' largest numbers.
    template <uint32 TYPE> __device__ float largest_of(uint32 stage, uint32 *groups) const {
        if (groups) {
            float all = minus_infinity();
#pragma unroll 4
            for (uint32 h = 0; h < GROUPS; ++h) {
                const float best = strip<TYPE>(stage, h).largest();
                const uint32 key = __reduce_max_sync(FULL_WARP, key_of(best));
                if (lane == h) groups[h] = key;
                all = larger_or_nan(all, best);
            }
            return all;
        }
        Strip<TYPE> best = strip<TYPE>(stage, 0);
#pragma unroll 5
        for (uint32 h = 1; h < GROUPS; ++h) best.raise(strip<TYPE>(stage, h));
        return best.largest();
    }
    template <uint32 TYPE, bool ANY> __device__ void record_segment(const StreamedRow &row, uint32 s, uint32 stage) const {
        const Source &source = row.source;
        const Scale scale = {ANY && source.scale.is_weights, source.scale.c};
        const uint32 none = none_bits<TYPE>(scale.is_weights), tokens = tokens_of(source.row, s);
        bool is_written = false;
        if (tokens < SEGMENT) {
#pragma unroll 1
            for (uint32 h = 0; h < GROUPS; ++h) {
                if (place(h, lane) + STRIP <= tokens) continue;
                Strip<TYPE> rest;
                rest.load(source.row, s * SEGMENT + place(h, lane), none);
                rest.store_shared(place_in<TYPE>(stage, h));
                is_written = true;
            }
        }
        const uint64 at = uint64(row.number) * p.per_row.value + s;
        uint32 *const groups = source.filters ? p.groups + at * GROUPS : nullptr;
        float all = largest_of<TYPE>(stage, groups);
        bool found = false;
        if (scale.is_weights || source.forbidden.count || __any_sync(FULL_WARP, all != all)) {
#pragma unroll 1
            for (uint32 h = 0; h < GROUPS; ++h) {
                float x[STRIP];
                Strip<TYPE> cleaned = strip<TYPE>(stage, h);
                cleaned.widen(x);
                found |= source.clean(s * SEGMENT + place(h, lane), x);
#pragma unroll
                for (uint32 e = 0; e < STRIP; ++e)
                    if (x[e] == scale.none()) cleaned.set(e, none);
                cleaned.store_shared(place_in<TYPE>(stage, h));
            }
            is_written = true;
            all = largest_of<TYPE>(stage, groups);
        }
        const float largest = number_of(__reduce_max_sync(FULL_WARP, key_of(all)));
        const bool has_some = largest > scale.none();
        SegmentRecord made = {largest, __any_sync(FULL_WARP, found) ? SAW_NAN << 31 : 0, 0, 0, 0};
        if (row.is_greedy && has_some) {
            uint32 first = SEGMENT;
#pragma unroll 1
            for (uint32 h = 0; h < GROUPS && first == SEGMENT; ++h) {
                const Strip<TYPE> looked_at = strip<TYPE>(stage, h);
#pragma unroll
                for (uint32 e = STRIP; e-- > 0;)
                    if (looked_at.at(e) == largest) first = place(h, lane) + e;
            }
            made.first |= s * SEGMENT + __reduce_min_sync(FULL_WARP, first);
        }
        // At the request's temperature, and at 1.
        const Scale plain = {scale.is_weights, source.plain().c};
        const bool wants_sum = has_some && !row.is_greedy && !source.filters, wants_plain = ANY && row.wants_plain && has_some;
        __syncwarp();
        if (wants_sum) {
            const uint64 of_lane = sum_of_lane<TYPE>(stage, scale, largest), of_group = of_lane + __shfl_xor_sync(FULL_WARP, of_lane, 1);
            if (row.leaves_sums && lane % 2 == 0) p.sums_of(at)[lane / 2] = of_group;
            made.sum = warp_sum(of_lane);
        }
        if (wants_plain) made.plain_sum = wants_sum && plain.c == scale.c ? made.sum : warp_sum(sum_of_lane<TYPE>(stage, plain, largest));
        if (lane == 0) p.segments[at] = made;
        if (is_written) fence_copies();
    }
    // The sum of the lane's part of a segment, half a group: neighbouring strips, in an order in which lanes of 16-bit rows read from different banks.
    template <uint32 TYPE> __device__ uint64 sum_of_lane(uint32 stage, const Scale &scale, float largest) const {
        const auto numbers = [&](uint32 n, float (&x)[STRIP]) {
            Strip<TYPE> loaded;
            loaded.load_shared(stage + (lane * LANE_STRIPS + (n ^ lane % LANE_STRIPS)) * uint32(sizeof(Strip<TYPE>)));
            loaded.widen(x);
        };
        uint64 sum = 0;
        if (scale.has_powers(largest)) {
#pragma unroll 2
            for (uint32 n = 0; n < LANE_STRIPS; ++n) {
                float x[STRIP];
                numbers(n, x);
                sum += scale.sum_powers(x, largest);
            }
        } else {
#pragma unroll 1
            for (uint32 n = 0; n < LANE_STRIPS; ++n) {
                float x[STRIP];
                numbers(n, x);
                sum += scale.sum(x, largest);
            }
        }
        return sum;
    }
};
