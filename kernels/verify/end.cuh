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

// One prefetch is enough for so many neighbouring tokens.
constexpr uint32 PREFETCHED = 8;

// Values of finish: VWD_FINISH_*.
constexpr uint32 GOES_ON = 0, STOPPED = 1, FULL = 2;
constexpr uint32 NEVER = 0xffffffff;

// What a request commits: draft tokens, those and the next token, and why no more.
struct Cut {
    uint32 accepted, committed, finish;
    __device__ bool has_next() const { return committed > accepted; }
};

// An address in global memory that is computed here, and not where it is used.
template <typename Char> __device__ inline Char *known(Char *address) {
    asm volatile("" : "+l"(address));
    __builtin_assume(__isGlobal(address));
    return address;
}

// The end of one request. Its numbers are found by place(), requested by load(), and first used by cut().
struct End {
    const char *remaining_at, *least_at, *ignores_at;  // computed before they are loaded
    int32 remaining = 0x7fffffff, least = 0;
    uint32 ignores = 0;

    __device__ void place(const EndParams &p, uint32 seq) {
        remaining_at = p.remaining.at(seq), least_at = p.min_remaining.at(seq), ignores_at = p.ignore_stop.at(seq);
    }
    __device__ void know() { remaining_at = known(remaining_at), least_at = known(least_at), ignores_at = known(ignores_at); }
    // Brings the numbers into the L2 cache.
    __device__ void prefetch(const EndParams &p) const {
        if (p.remaining) ::prefetch(remaining_at);
        if (p.min_remaining) ::prefetch(least_at);
        if (p.ignore_stop) ::prefetch(ignores_at);
    }
    __device__ void load(const EndParams &p) {
        if (p.remaining) remaining = as<int32>(remaining_at);
        if (p.min_remaining) least = as<int32>(least_at);
        if (p.ignore_stop) ignores = as<uint8>(ignores_at);
    }
    __device__ void load(const NoEnd &, uint32) {}
    __device__ void load(const EndParams &p, uint32 seq) { place(p, seq), load(p); }
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
    End end;
    end.place(p, seq);
    end.prefetch(p);
}

// Some stop tokens of a request: requested by load(), and waited for where they are looked at. Where there are fewer the last one stands in their
// places, so that all are requested together and none waits for a comparison.
template <uint32 COUNT = 4> struct SomeStops {
    uint32 low[COUNT] = {}, high[COUNT] = {};  // `high` of tokens of 64 bits alone

    // Those from the `first` on.
    __device__ void load(const EndParams &p, uint32 seq, uint32 first) {
        if (first >= p.stops) return;
        const char *at[COUNT];
        place(p, seq, first, at);
        load(p, at);
    }
    // Where those from the `first` on are. There is one.
    __device__ static void place(const EndParams &p, uint32 seq, uint32 first, const char *(&at)[COUNT]) {
#pragma unroll
        for (uint32 s = 0; s < COUNT; ++s) at[s] = p.stop.at(seq, min(first + s, p.stops - 1));
    }
    __device__ void load(const EndParams &p, const char *const (&at)[COUNT]) {
#pragma unroll
        for (uint32 s = 0; s < COUNT; ++s) low[s] = as<uint32>(at[s]);
        if (p.stop_bytes != 8) return;
#pragma unroll
        for (uint32 s = 0; s < COUNT; ++s) high[s] = as<uint32>(at[s] + 4);
    }
    // Bit u says whether tokens[u] is one of them. None is negative.
    template <uint32 N, typename Token> __device__ uint32 bits(const EndParams &p, const Token (&tokens)[N]) const {
        const bool is_wide = p.stop_bytes == 8;
        Token stops[COUNT];  // those that Token cannot hold are −1
#pragma unroll
        for (uint32 s = 0; s < COUNT; ++s) {
            const uint32 upper = is_wide ? high[s] : 0;
            if (sizeof(Token) == 4) stops[s] = upper ? Token(-1) : Token(low[s]);
            else stops[s] = is_wide ? Token(uint64(upper) << 32 | low[s]) : Token(int32(low[s]));
        }
        uint32 bits = 0;
#pragma unroll
        for (uint32 u = 0; u < N; ++u) {
            bool is_stop = false;
#pragma unroll
            for (uint32 s = 0; s < COUNT; ++s) is_stop |= tokens[u] == stops[s];
            if (is_stop && tokens[u] >= 0) bits |= 1u << u;
        }
        return bits;
    }
};

// Bit u says whether tokens[u] is a stop token of a request, whose first stop tokens are here, if it has any.
template <uint32 COUNT, uint32 N, typename Token>
__device__ inline uint32 stop_bits(const EndParams &p, uint32 seq, SomeStops<COUNT> stops, const Token (&tokens)[N]) {
    uint32 bits = stops.bits(p, tokens) & (p.stops ? FULL_WARP : 0);
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
