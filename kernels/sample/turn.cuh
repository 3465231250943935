// What a request of vwd_verify_sample asks for, and where its rows lie.
#pragma once

#include "sample/params.cuh"

__device__ inline int64 integer(const char *p, bool is_wide) { return load_integer(p, is_wide ? 8 : 4); }

// What a request asks for.
struct Turn {
    uint32 request;   // in the batch
    uint32 len;       // draft tokens
    int64 remaining;  // tokens
    uint32 least;     // rows that cannot commit a stop token
    bool stops;       // stop tokens count
    float temperature;

    __device__ Turn(const SampleParams &p, uint32 i) : request(i) {
        len = p.draft_lens ? min(max(as<int32>(p.draft_lens.at(i)), 0), int32(p.gamma)) : p.gamma;
        remaining = p.remaining ? max(as<int32>(p.remaining.at(i)), 0) : int64(1) << 40;
        least = p.min_remaining ? max(as<int32>(p.min_remaining.at(i)), 0) : 0;
        stops = p.stops && !(p.ignore_stop && as<uint8>(p.ignore_stop.at(i)));
        temperature = p.sampling.temperature_of(i);
    }
    __device__ bool is_greedy() const { return ::is_greedy(temperature); }
    // The draft tokens that may be looked at.
    __device__ uint32 steps() const { return uint32(min(int64(len), remaining)); }
    // Whether the row in this slot may be looked at: the target's rows come first, then those of the draft.
    __device__ bool needs(const SampleParams &p, uint32 slot) const {
        if (slot <= p.gamma) return slot <= len && slot < remaining;
        return !is_greedy() && slot - p.gamma - 1 < steps();
    }
    __device__ int64 stop(const SampleParams &p, uint32 n) const { return integer(p.stop.at(request, n), p.wide & WIDE_STOP); }
    __device__ bool is_stop(const SampleParams &p, uint32 row, int64 token) const {
        if (!stops || token < 0 || row < least) return false;
        for (uint32 n = 0; n < p.stops; ++n)
            if (stop(p, n) == token) return true;
        return false;
    }
    __device__ int64 draft(const SampleParams &p, uint32 row) const { return integer(p.draft.at(request, row), p.wide & WIDE_DRAFT); }
    // The draft token of a row, if it may be looked at.
    __device__ int64 drafted(const SampleParams &p, uint32 row) const { return row < steps() ? draft(p, row) : -1; }
    __device__ uint64 number(const SampleParams &p, uint32 row, Purpose purpose) const { return p.sampling.number(request, row, purpose, 0); }

    // Where the row in a slot of target lies, and whether target has it.
    __device__ const char *row(const SampleParams &p, uint32 slot, bool &is_there) const {
        is_there = true;
        int64 n = request, r = slot;
        if (p.is_flat) {
            r = p.target_begin ? integer(p.target_begin.at(request), p.wide & WIDE_BEGIN) : request;
            // No sum of a number of rows and a slot overflows.
            is_there = r < p.target_rows && r >= -int64(slot) && (r += slot) < p.target_rows;
            if (!is_there) r = 0;
        }
        return p.sampling.target.at(n, r);
    }
    // The row in a slot, and whether target has it. Slots count the target's rows, then those of the draft.
    __device__ Source source(const SampleParams &p, uint32 slot, bool &is_there) const {
        const SamplingParams &sampling = p.sampling;
        if (slot <= p.gamma) {
            const char *const data = row(p, slot, is_there);
            return source(p, slot, data);
        }
        is_there = true;
        return {sampling, request, temperature, true, sampling.draft_rows.at(request, slot - p.gamma - 1), {}};
    }
    // The row in a slot of target, which lies there.
    __device__ Source source(const SampleParams &p, uint32 slot, const char *data) const {
        const bool forbids = slot < least && stops;
        const Forbidden forbidden = {{p.stop.at(request), {p.stop.step[1]}}, forbids ? p.stops : 0, p.wide & WIDE_STOP ? 8u : 4u};
        return {p.sampling, request, temperature, false, data, forbidden};
    }
    __device__ Source source(const SampleParams &p, uint32 slot) const {
        bool is_there;
        return source(p, slot, is_there);
    }
};
