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
    // Whether a stop token at a position counts.
    __device__ bool stops_at(uint32 pos) const { return !ignores && int64(pos) >= least; }
    // k draft tokens agree, and n tokens would be committed; `stop` is the first position that counts with a stop token, or NEVER.
    __device__ Cut cut(uint32 k, uint32 n, uint32 stop) const {
        const uint32 most = max(remaining, 0);
        n = min(n, most);
        if (stop < n) return {min(k, stop + 1), stop + 1, STOPPED};
        return {min(k, n), n, n == most && n ? FULL : GOES_ON};
    }
};

// Bit u says whether tokens[u] is a stop token of a request. Stop tokens are of one type; four are under way at a time.
template <typename Stop, uint32 N, typename Token>
__device__ inline uint32 stop_bits_of(const EndParams &p, uint32 seq, const Token (&tokens)[N]) {
    constexpr uint32 AT_ONCE = 4;
    uint32 bits = 0;
    for (uint32 first = 0; first < p.stops; first += AT_ONCE) {
        Stop stops[AT_ONCE];
#pragma unroll
        for (uint32 s = 0; s < AT_ONCE; ++s) stops[s] = first + s < p.stops ? as<Stop>(p.stop.at(seq, first + s)) : Stop(-1);
#pragma unroll
        for (uint32 s = 0; s < AT_ONCE; ++s)
#pragma unroll
            for (uint32 u = 0; u < N; ++u)
                if (stops[s] == tokens[u] && stops[s] >= 0) bits |= 1u << u;
    }
    return bits;
}
// The same for stop tokens of either type.
template <uint32 N, typename Token>
__device__ inline uint32 stop_bits(const EndParams &p, uint32 seq, const Token (&tokens)[N]) {
    return p.stop_bytes == 8 ? stop_bits_of<int64>(p, seq, tokens) : stop_bits_of<int32>(p, seq, tokens);
}

// Writes the end of a request, by one thread.
__device__ inline void write_end(const NoEnd &, uint32, const Cut &) {}
__device__ inline void write_end(const EndParams &p, uint32 seq, const Cut &cut) {
    if (p.committed_len) as<int32>(p.committed_len.at(seq)) = cut.committed;
    if (p.finish) as<uint8>(p.finish.at(seq)) = cut.finish;
}
