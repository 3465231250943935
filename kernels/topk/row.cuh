// A row of scores, its keys, and where its selected scores go.
#pragma once

#include "topk/params.cuh"

// Four neighbouring scores.
template <uint32 BYTES> struct alignas(4 * BYTES) Four {
    uint32 word[BYTES];
    __device__ uint32 bits(uint32 n) const { return BYTES == 4 ? word[n] : word[n / 2] >> n % 2 * 16 & 0xffff; }
};

constexpr uint32 UNKNOWN = 0;  // a key that no score has

struct Row {
    const TopKParams &p;
    const uint32 number;
    const char *scores;
    uint32 len, wanted;

    __device__ Row(const TopKParams &p, uint32 number) : p(p), number(number), scores(p.scores + number * p.scores_row) {
        int32 given = p.n, k = p.k;
        if (p.lens) given = as<int32>(p.lens + number * p.lens_row);
        if (p.budgets) k = as<int32>(p.budgets + number * p.budgets_row);
        len = min(uint32(max(given, 0)), p.n), wanted = min(min(uint32(max(k, 0)), p.capacity), len);
    }
    // Loads the quads of keys that begin at at[n], multiples of four; keys from `end` on are 0.
    template <uint32 BYTES> __device__ void load(const uint32 (&at)[QUADS], uint32 end, uint32 (&x)[QUADS][4]) const {
        Four<BYTES> four[QUADS];
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            if (p.adjacent && at[n] + 4 <= end) {
                four[n] = as<Four<BYTES>>(scores + BYTES * uint64(at[n]));
                continue;
            }
            uint32 bits[4];
#pragma unroll
            for (uint32 m = 0; m < 4; m++) bits[m] = at[n] + m < end ? stored<BYTES>(at[n] + m) : 0;
#pragma unroll
            for (uint32 m = 0; m < BYTES; m++) four[n].word[m] = BYTES == 4 ? bits[m] : bits[2 * m] | bits[2 * m + 1] << 16;
        }
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++)
#pragma unroll
            for (uint32 m = 0; m < 4; m++) x[n][m] = at[n] + m < end ? sort_key(widen<BYTES>(four[n].bits(m))) : 0;
    }
    // Loads the quads of keys that begin at first + n · STEP.
    template <uint32 BYTES> __device__ void load(uint32 first, uint32 end, uint32 (&x)[QUADS][4]) const {
        uint32 at[QUADS];
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) at[n] = first + n * STEP;
        load<BYTES>(at, end, x);
    }
    // Brings the scores of these quads to the L2 cache.
    template <uint32 BYTES> __device__ void prefetch_scores(uint32 first, uint32 end) const {
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++)
            if (p.adjacent && first + n * STEP + 4 <= end) prefetch(scores + BYTES * uint64(first + n * STEP));
    }
    template <uint32 BYTES> __device__ uint32 stored(uint32 j) const {
        const char *from = scores + j * p.scores_entry;
        return BYTES == 4 ? as<uint32>(from) : as<uint16>(from);
    }
    template <uint32 BYTES> __device__ float widen(uint32 bits) const {
        if (BYTES == 4) return __uint_as_float(bits);
        return p.dtype == BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits);
    }
    // The score as it is stored. It follows from the key, and is read again where the key is unknown or stands for several scores.
    template <uint32 BYTES> __device__ uint32 value_of(uint32 key, uint32 j) const {
        constexpr uint32 ZERO = 0x80000000u, LEAST = 0x007fffffu;  // the key of −0 and +0, and of −inf and NaN
        if (key == UNKNOWN || key == ZERO || key == LEAST) return stored<BYTES>(j);
        const uint32 bits = key >> 31 ? key & 0x7fffffffu : ~key;
        if (BYTES == 4) return bits;
        return p.dtype == BFLOAT16 ? bits >> 16 : narrow_float16(__uint_as_float(bits));
    }
    __device__ int32 &id(uint32 place) const { return as<int32>(p.ids + number * p.ids_row + place * p.ids_entry); }
    template <uint32 BYTES> __device__ void write(uint32 place, uint32 j, uint32 key) const {
        id(place) = j;
        if (!p.values) return;
        char *to = p.values + number * p.values_row + place * p.values_entry;
        if (BYTES == 4)
            as<uint32>(to) = value_of<4>(key, j);
        else
            as<uint16>(to) = value_of<2>(key, j);
    }
    __device__ void write_count() const { as<int32>(p.counts + number * p.counts_row) = wanted; }
};

constexpr uint32 TOO_MANY = ~0u;  // stands for a count above MOST_KEPT
