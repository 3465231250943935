// What ends a request: stop tokens and the number of tokens that it may still have. verify.cuh includes it.
//
//   The committed tokens t_0 … t_{n−1} of a call are cut to n' = min(n, remaining, r + 1), where r is the first that is a stop token, not before
//   min_remaining. The cut is a STOP where t_{n'−1} is that stop token, else a LENGTH where n' = remaining.
#pragma once

#include "common/view.cuh"

// Mirrored by EndParams in src/ops/verify/cuda.rs. Tensors that are not given are null.
struct EndParams {
    static constexpr bool IS_GIVEN = true;
    View<2> stop;                      // [B, S] int32 or int64 (stop_bytes)
    View<1> ignore_stop;               // [B] uint8
    View<1> remaining, min_remaining;  // [B] int32
    View<1> committed_len;             // [B] int32
    View<1> finish;                    // [B] uint8
    uint32 stops;                      // S; 0 where stop is null
    uint32 stop_bytes;                 // 4 or 8
};

// A call without such arguments.
struct NoEnd {
    static constexpr bool IS_GIVEN = false;
};

// Of so many neighbouring tokens that kernels prefetch, one is enough.
constexpr uint32 PREFETCHED = 8;

// Values of finish: VWD_FINISH_*.
constexpr uint32 GOES_ON = 0, STOPPED = 1, FULL = 2;
constexpr uint32 NEVER = 0xffffffff;

// What a request commits: draft tokens, those and the next token, and why no more.
struct Cut {
    uint32 accepted, committed, finish;
    __device__ bool has_next() const { return committed > accepted; }
};

// The end of one request. Its numbers are requested here, and first used by cut().
struct End {
    int32 remaining = 0x7fffffff, least = 0;
    uint32 ignores = 0;

    __device__ void load(const NoEnd &, uint32) {}
    __device__ void load(const EndParams &p, uint32 seq) {
        if (p.remaining) remaining = as<int32>(p.remaining.at(seq));
        if (p.min_remaining) least = as<int32>(p.min_remaining.at(seq));
        if (p.ignore_stop) ignores = as<uint8>(p.ignore_stop.at(seq));
    }
    // The first position at which a stop token counts.
    __device__ uint32 first_to_stop() const { return ignores ? NEVER : max(least, 0); }
    // k draft tokens agree, and n tokens would be committed; `stop` is the first position that counts with a stop token, or NEVER.
    __device__ Cut cut(uint32 k, uint32 n, uint32 stop) const {
        const uint32 most = max(remaining, 0);
        n = min(n, most);
        if (stop < n) return {min(k, stop + 1), stop + 1, STOPPED};
        return {min(k, n), n, n == most && n ? FULL : GOES_ON};
    }
};

// Brings what End and SomeStops load of a request into the L2 cache.
__device__ inline void prefetch_end(const NoEnd &, uint32) {}
__device__ inline void prefetch_end(const EndParams &p, uint32 seq) {
    if (p.stop) prefetch(p.stop.at(seq));
    if (p.remaining) prefetch(p.remaining.at(seq));
    if (p.min_remaining) prefetch(p.min_remaining.at(seq));
    if (p.ignore_stop) prefetch(p.ignore_stop.at(seq));
}

// Some stop tokens of a request: requested by load(), and waited for where they are looked at. No branch and nothing that waits comes before the
// last request. The upper words of tokens of 32 bits are 0 here.
template <uint32 COUNT = 4> struct SomeStops {
    uint32 low[COUNT], high[COUNT];

    __device__ void load(const EndParams &p, uint32 seq, uint32 first) {
        const char *at = p.stop.at(seq, first);
        const bool is_wide = p.stop_bytes == 8;
#pragma unroll
        for (uint32 s = 0; s < COUNT; ++s, at += p.stop.step[1]) {
            low[s] = 0xffffffff, high[s] = is_wide ? 0xffffffff : 0;
            if (first + s < p.stops) low[s] = as<uint32>(at);
            if (first + s < p.stops && is_wide) high[s] = as<uint32>(at + 4);
        }
    }
    // Bit u says whether tokens[u] is one of them. None is negative.
    template <uint32 N, typename Token> __device__ uint32 bits(const EndParams &p, const Token (&tokens)[N]) const {
        uint32 bits = 0;
#pragma unroll
        for (uint32 u = 0; u < N; ++u) {
            // What `low` and `high` are of a stop token that is this token.
            const uint32 word = uint32(tokens[u]), upper = p.stop_bytes == 8 ? uint32(int64(tokens[u]) >> 32) : 0;
            const bool can_stop = tokens[u] >= 0 && (sizeof(Token) == 4 || p.stop_bytes == 8 || int64(tokens[u]) <= 0x7fffffff);
            bool stops = false;
#pragma unroll
            for (uint32 s = 0; s < COUNT; ++s) stops |= (low[s] == word) & (high[s] == upper);
            if (stops && can_stop) bits |= 1u << u;
        }
        return bits;
    }
};

// Bit u says whether tokens[u] is a stop token of a request, whose first stop tokens are here.
template <uint32 COUNT, uint32 N, typename Token>
__device__ inline uint32 stop_bits(const EndParams &p, uint32 seq, SomeStops<COUNT> stops, const Token (&tokens)[N]) {
    uint32 bits = stops.bits(p, tokens);
#pragma unroll 1
    for (uint32 first = COUNT; first < p.stops; first += COUNT) {
        stops.load(p, seq, first);
        bits |= stops.bits(p, tokens);
    }
    return bits;
}

// Writes the end of a request, by one thread.
__device__ inline void write_end(const NoEnd &, uint32, const Cut &) {}
__device__ inline void write_end(const EndParams &p, uint32 seq, const Cut &cut) {
    if (p.committed_len) as<int32>(p.committed_len.at(seq)) = cut.committed;
    if (p.finish) as<uint8>(p.finish.at(seq)) = cut.finish;
}
