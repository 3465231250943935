// A bound among the keys of a row's numbers, found digit by digit by a CTA of DRAW_THREADS threads: the largest key from which on the numbers have as much as is
// wanted. What the numbers with each value of a digit have is added up in shared memory.
#pragma once

#include "common/draw.cuh"

constexpr uint32 DIGITS = 2048;

// Sums in two words: atomics of 64 bits in shared memory are loops.
template <uint32 COUNT> struct WideSums {
    uint32 low[COUNT], high[COUNT];

    __device__ void add(uint32 n, uint64 value) {
        const uint32 word = uint32(value), more = uint32(value >> 32) + (atomicAdd(&low[n], word) + word < word);
        if (more) atomicAdd(&high[n], more);
    }
    __device__ uint64 at(uint32 n) const { return uint64(high[n]) << 32 | low[n]; }
    __device__ void clear(uint32 n) { low[n] = high[n] = 0; }
};
using DigitSums = WideSums<DIGITS>;

struct Digits {
    uint32 key, known;   // digits of the bound's key, and which of its bits are known
    uint32 place, bits;  // the digit: its lowest bit, and how many it has; 0 before the first one

    // Goes to before the first digit of the keys between two. It begins where these differ, so that few numbers share a value of it: threads that add to the same
    // word wait for each other.
    __device__ void begin(uint32 low, uint32 high) {
        place = WARP - __clz(low ^ high);
        known = place < WARP ? 0xffffffffu << place : 0, key = high & known;
    }
    // Sets the next digit, of up to 11 bits, and that nothing is counted of it.
    __device__ void next(DigitSums &sums) {
        bits = min(place, 11u), place -= bits;
        for (uint32 n = threadIdx.x; n < DIGITS; n += DRAW_THREADS) sums.clear(n);
    }
    // Whether a number has the digits that are known.
    __device__ bool has(uint32 number) const { return (number & known) == key; }
    __device__ void count(DigitSums &sums, uint32 number, uint64 has) const { sums.add(number >> place & ((1u << bits) - 1), has); }
    // What the numbers that have all known digits have, the last that was taken among them.
    __device__ uint64 taken(const DigitSums &sums) const { return sums.at(key >> place & ((1u << bits) - 1)); }
    // Takes the value of the digit with which the numbers from it on have what is wanted, which becomes what is wanted of those that have the digit. False where
    // all have less. Called after a barrier.
    __device__ bool take(DrawShared &draw, const DigitSums &sums, uint64 &wanted) {
        // A thread has eight digits; thread 0 has the largest.
        uint64 mine = 0, total;
        const uint32 top = DIGITS - 1 - threadIdx.x * 8;
#pragma unroll
        for (uint32 n = 0; n < 8; ++n) mine += sums.at(top - n);
        uint64 before = cta_sum_before(draw, mine, total);
        if (total < wanted) return false;
        if (before < wanted && wanted <= before + mine) {
            uint32 digit = top;
            while (sums.at(digit) < wanted - before) before += sums.at(digit--);
            draw.token = digit;
            draw.target = wanted - before;
        }
        __syncthreads();
        key |= draw.token << place;
        known |= ((1u << bits) - 1) << place;
        wanted = draw.target;
        return true;
    }
};
