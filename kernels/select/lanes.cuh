// Products of summaries with queries by the lanes of a warp. A group of lanes has a summary, eight channels in each lane.
#pragma once

#include "common/eight.cuh"
#include "common/place.cuh"

// Channels c … c + 7 of COUNT summaries of a sequence and head: first, first + step, … below end.
template <uint32 BYTES, uint32 COUNT> struct Summaries {
    Eight<BYTES> eight[COUNT];
    uint32 exist;  // bit n: summary n exists

    __device__ void load(const Place &place, const Summary &s, uint32 seq, uint32 head, uint32 first, uint32 step, uint32 end, uint32 c, uint32 dim) {
        exist = 0;
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) {
            const uint32 j = first + n * step;
            uint32 page, row;
            eight[n].clear();
            if (j >= end || !place.find(seq, j, page, row)) continue;
            exist |= 1 << n;
            const char *at = s.at(page, row, head) + c * s.channel;
            if (c >= dim) continue;
            // With COUNT = 1 channels may have any stride.
            if (COUNT > 1)
                eight[n].load(at);
            else
                eight[n].gather(at, s.channel);
        }
    }
    __device__ void widen(uint32 dtype, float (&wide)[COUNT][8]) const {
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) eight[n].widen(wide[n], dtype);
    }
    // x[n] += the channels of summary n times the query's channels.
    __device__ static void multiply(const float (&wide)[COUNT][8], const float4 *of, float (&x)[COUNT]) {
        const float4 low = of[0], high = of[1];
        const float q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) {
#pragma unroll
            for (uint32 i = 0; i < 8; i++) x[n] = fmaf(wide[n][i], q[i], x[n]);
        }
    }
};

// Adds x over the lanes of a group, at least COUNT lanes. Lane l gets the sum of x[own_of<COUNT>(l)].
template <uint32 COUNT> __device__ inline float add_lanes(float (&x)[COUNT], uint32 lanes) {
    const uint32 lane = threadIdx.x % WARP;
    uint32 bit = 1;
#pragma unroll
    for (uint32 half = COUNT / 2; half > 0; half /= 2, bit *= 2) {
#pragma unroll
        for (uint32 i = 0; i < half; i++) {
            const float given = lane & bit ? x[i] : x[i + half], kept = lane & bit ? x[i + half] : x[i];
            x[i] = kept + __shfl_xor_sync(FULL_WARP, given, bit);
        }
    }
    float sum = x[0];
    for (; bit < lanes; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
    return sum;
}
template <uint32 COUNT> __device__ inline uint32 own_of(uint32 lane) {
    uint32 n = 0;
#pragma unroll
    for (uint32 bit = 1, half = COUNT / 2; half > 0; half /= 2, bit *= 2) n += lane & bit ? half : 0;
    return n;
}
