// Greedy verification of draft trees.
//
//   The walk begins at the root. At node v with the target's token a(v) it goes on to the lowest child c with tokens[c] = a(v) ≥ 0; where there
//   is none, or M − 1 nodes are accepted, it ends. path = the nodes of the walk · committed = a of them · next_token = a of the last.
//
// Bytes: N parents, tokens and target tokens are read for each tree, 2·M numbers written: at N = 64 less than 1 KB. The launch is the floor.
//
// Work split: a warp takes a tree of up to 64 nodes whose target tokens are given (warp.cuh). CTA i takes the tree of sequence i otherwise. Which
// child a node goes on to does not depend on the walk, so that each node finds at once whether its parent goes on to it. One thread then follows
// the walk through shared memory.
//
//   load links and tokens ─ lowest matching child of each node ─ walk ─ write path and tokens
//
// From logits: verify_tree_largest goes first. It reads N·V logits for each tree, 16.4 MB at N = 64 of 128256 bfloat16, 3.4 µs at 4.8 TB/s. Its
// CTAs take a slice of a row each, as many as keep the device busy, and leave the largest logit of the slice with its token. A thread requests
// eight units of 16 bytes before it compares the first. A unit with a NaN, and stop tokens that min_remaining forbids at the node's depth (early.cuh)
// where one would be the largest, make the thread look at each of its logits. The kernel that walks may start once all CTAs of the search have begun:
// it brings links and tokens into the L2 cache, and waits.
//
// On entry: 1 ≤ N ≤ MOST_NODES, M ≥ 1; the CTA has whole warps, and a thread for each node or MOST_THREADS; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "verify_tree/params.cuh"

constexpr uint32 MOST_THREADS = 256;

#include "verify_tree/early.cuh"
#include "verify_tree/end.cuh"
#include "verify_tree/warp.cuh"

// A logit with its token, so that the larger one is the larger logit, of equal logits the lower token. NO_LOGIT: NaN or −∞. The bit WITH_NAN says
// that there was a NaN among the logits of which it is the largest, and does not count when they are compared.
constexpr uint64 NO_LOGIT = 0, WITH_NAN = 1u << 31;
__device__ inline uint64 ranked(float logit, uint32 token) {
    const uint32 bits = __float_as_uint(logit + 0.0f);  // −0 is 0
    const uint32 key = int32(bits) < 0 ? ~bits : bits | 0x80000000u;
    if (logit != logit) return NO_LOGIT | WITH_NAN;
    return logit > minus_infinity() ? uint64(key) << 32 | (~token & ~uint32(WITH_NAN)) : NO_LOGIT;
}
__device__ inline uint64 without_nan(uint64 ranked) { return ranked & ~WITH_NAN; }
__device__ inline uint64 higher(uint64 a, uint64 b) { return max(without_nan(a), without_nan(b)) | ((a | b) & WITH_NAN); }

// The higher of two; FORBIDS: `other` counts only where its token is allowed.
template <bool FORBIDS> __device__ inline uint64 higher(uint64 best, uint64 other, const Forbidden &forbidden) {
    if (FORBIDS && without_nan(other) > without_nan(best))
        for (uint32 n = 0; n < forbidden.count; ++n)
            if (forbidden.at(n) == int64(~uint32(other) & ~uint32(WITH_NAN))) return best | (other & WITH_NAN);
    return higher(best, other);
}

// The highest of a warp's. Its upper word is written as a maximum, which `top` is: of `uint64(top) << 32` ptxas 12.4 moves the reduction's result into the
// wrong register.
__device__ inline uint64 highest_of_warp(uint64 ranked) {
    const uint32 key = ranked >> 32, top = __reduce_max_sync(FULL_WARP, key);
    const uint32 token = __reduce_max_sync(FULL_WARP, key == top ? uint32(without_nan(ranked)) : 0);
    return uint64(max(key, top)) << 32 | token | (__any_sync(FULL_WARP, (ranked & WITH_NAN) != 0) ? WITH_NAN : 0);
}

// Neighbouring logits, 16 bytes.
template <uint32 TYPE> struct Unit {
    static constexpr uint32 COUNT = TYPE == FLOAT32 ? 4 : 8;
    uint32 words[4];

    __device__ static Unit none() {
        const uint32 none = none_bits<TYPE>(false) * (TYPE == FLOAT32 ? 1 : 0x10001);
        return {{none, none, none, none}};
    }
    __device__ void load(const char *from) {
        const uint4 four = as<uint4>(from);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
    __device__ float at(uint32 n) const {
        if (TYPE == FLOAT32) return __uint_as_float(words[n]);
        const uint32 bits = n % 2 ? words[n / 2] >> 16 : words[n / 2] & 0xffff;
        return TYPE == FLOAT16 ? widen_float16(bits) : widen_bfloat16(bits);
    }
    // NaN if there is one.
    __device__ float largest() const { return largest_of<TYPE>(words); }
    // The first that is `value`, or COUNT.
    __device__ uint32 first(float value) const {
        uint32 found = COUNT;
#pragma unroll
        for (uint32 n = COUNT; n-- > 0;)
            if (at(n) == value) found = n;
        return found;
    }
};

// The largest logit that a thread finds in `units` units of a row, every MOST_THREADS-th of them, and whether there is a NaN among them, which stands
// in for a unit's other logits. `first`: the token with which the thread's first unit begins. Which logit of a unit it is, is looked for in the best
// unit alone.
template <uint32 TYPE> __device__ inline uint64 largest_of_units(const char *logits, uint32 units, uint32 first, bool &has_nan) {
    constexpr uint32 COUNT = Unit<TYPE>::COUNT, AT_ONCE = 8;
    float best = minus_infinity();
    Unit<TYPE> kept = Unit<TYPE>::none();
    uint32 kept_at = 0;
    for (uint32 at = 0; at < units; at += AT_ONCE, logits += AT_ONCE * MOST_THREADS * 16) {
        Unit<TYPE> loaded[AT_ONCE];
#pragma unroll
        for (uint32 u = 0; u < AT_ONCE; ++u) {
            loaded[u] = Unit<TYPE>::none();
            if (at + u < units) loaded[u].load(logits + u * MOST_THREADS * 16);
        }
#pragma unroll
        for (uint32 u = 0; u < AT_ONCE; ++u) {
            const float largest = loaded[u].largest();
            has_nan |= largest != largest;
            if (largest > best) best = largest, kept = loaded[u], kept_at = at + u;
        }
    }
    return ranked(best, first + kept_at * MOST_THREADS * COUNT + kept.first(best));
}

// The largest logit that a thread finds in tokens `begin` to `end` of a row.
template <bool FORBIDS>
__device__ inline uint64 largest_of(const LargestParams &p, const char *logits, uint32 begin, uint32 end, const Forbidden &forbidden) {
    uint64 best = NO_LOGIT;
    const auto take = [&](uint32 token, int64 step) {
        best = higher<FORBIDS>(best, ranked(load_element(logits + token * step, p.dtype), token), forbidden);
    };
    if (p.is_adjacent) {
        const uint32 bytes = p.dtype == FLOAT32 ? 4 : 2, count = 16 / bytes, whole = begin < end ? begin + (end - begin) / count * count : begin;
        const uint32 first = begin + threadIdx.x * count, units = first < whole ? (whole - first - 1) / (MOST_THREADS * count) + 1 : 0;
        const char *from = logits + uint64(first) * bytes;
        bool has_nan = false;
        uint64 of_units;
        if (p.dtype == FLOAT32) of_units = largest_of_units<FLOAT32>(from, units, first, has_nan);
        else if (p.dtype == FLOAT16) of_units = largest_of_units<FLOAT16>(from, units, first, has_nan);
        else of_units = largest_of_units<BFLOAT16>(from, units, first, has_nan);
        best = higher<FORBIDS>(NO_LOGIT, of_units, forbidden);
        if (has_nan || best != of_units)  // or it is forbidden
            for (uint32 unit = first; unit < whole; unit += MOST_THREADS * count)
                for (uint32 n = 0; n < count; ++n) take(unit + n, bytes);
        for (uint32 token = whole + threadIdx.x; token < end; token += MOST_THREADS) take(token, bytes);
    } else {
        for (uint32 token = begin + threadIdx.x; token < end; token += MOST_THREADS) take(token, p.logits.step[2]);
    }
    return best;
}

// CTA (i·N + v)·slices + s takes slice s of node v of sequence i.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 4) verify_tree_largest(const __grid_constant__ LargestParams p) {
    constexpr uint32 WARPS = MOST_THREADS / WARP;
    __shared__ uint64 of_warp[WARPS];
    const uint32 row = p.slices.divide(blockIdx.x), seq = p.nodes.divide(row), node = row - seq * p.nodes.value;
    const char *logits = p.logits.at(seq, node);
    const uint32 begin = (blockIdx.x - row * p.slices.value) * p.slice, end = min(begin + p.slice, p.tokens);
    wait_for_previous_kernel();
    allow_next_kernel();
    if (p.node_counts && int32(node) >= as<int32>(p.node_counts.at(seq))) return;
    const EarlyStops early(p.end, seq);
    const Forbidden forbidden = early.at(depth_of(p.parents, seq, node, early.least));
    const uint64 best = highest_of_warp(forbidden.count ? largest_of<true>(p, logits, begin, end, forbidden) : largest_of<false>(p, logits, begin, end, forbidden));
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) of_warp[warp] = best;
    __syncthreads();
    if (warp > 0) return;
    const uint64 of_cta = highest_of_warp(lane < WARPS ? of_warp[lane] : NO_LOGIT);
    if (lane == 0) p.largest[blockIdx.x] = of_cta;
}

// The target's tokens of a tree, from the largest logits of the slices of each node's row, and which rows have a NaN: neighbouring threads look at
// neighbouring slices. Those of nodes past the last are not read by any walk.
template <typename Token>
__device__ inline void find_targets(const VerifyTreeParams &p, uint32 seq, Token *target, bool *has_nan) {
    constexpr uint32 AT_ONCE = 4;
    const uint32 lanes = 1u << p.log_slices, slice = threadIdx.x & (lanes - 1), step = blockDim.x >> p.log_slices;
    const uint64 *of_tree = p.largest + uint64(seq) * p.nodes * p.slices;
    for (uint32 first = 0; first < p.nodes; first += AT_ONCE * step) {
        uint64 best[AT_ONCE];
#pragma unroll
        for (uint32 u = 0; u < AT_ONCE; ++u) {
            const uint32 node = first + u * step + (threadIdx.x >> p.log_slices);
            best[u] = NO_LOGIT;
            if (node < p.nodes && slice < p.slices) best[u] = of_tree[uint64(node) * p.slices + slice];
        }
#pragma unroll
        for (uint32 u = 0; u < AT_ONCE; ++u) {
            const uint32 node = first + u * step + (threadIdx.x >> p.log_slices);
            if (lanes == WARP) best[u] = highest_of_warp(best[u]);
            else
                for (uint32 other = 1; other < lanes; other *= 2) best[u] = higher(best[u], __shfl_xor_sync(FULL_WARP, best[u], other));
            if (node >= p.nodes || slice > 0) continue;
            target[node] = without_nan(best[u]) == NO_LOGIT ? Token(-1) : Token(~uint32(best[u]) & ~uint32(WITH_NAN));
            has_nan[node] = (best[u] & WITH_NAN) != 0;
        }
    }
}

template <typename Token, typename Ends = NoEnd>
__device__ inline void verify(const VerifyTreeParams &p, const Ends &ends = {}) {
    constexpr int32 SLOTS = MOST_NODES / MOST_THREADS;  // nodes of a thread: c = thread + s · threads
    __shared__ Token target[MOST_NODES];
    __shared__ int32 follower[MOST_NODES], path[MOST_NODES];
    __shared__ bool has_nan[MOST_NODES];
    __shared__ int32 accepted;
    allow_next_kernel();
    const uint32 seq = blockIdx.x;
    const int32 nodes = p.nodes, threads = blockDim.x, places = p.places;
    for (int32 c = threadIdx.x * PREFETCHED; c < nodes; c += threads * PREFETCHED) prefetch(p.parents.at(seq, c)), prefetch(p.tokens.at(seq, c));
    wait_for_previous_kernel();
    Token token[SLOTS], given_target[SLOTS];
    int32 parent[SLOTS], given = nodes;
#pragma unroll
    for (int32 s = 0; s < SLOTS; ++s) {
        const int32 c = threadIdx.x + s * threads;
        if (c >= nodes) continue;
        parent[s] = as<int32>(p.parents.at(seq, c));
        token[s] = as<Token>(p.tokens.at(seq, c));
        if (!p.largest) given_target[s] = as<Token>(p.target.at(seq, c));
    }
    if (p.node_counts) given = as<int32>(p.node_counts.at(seq));
    const int32 count = min(max(given, 0), nodes);
    if (p.largest) find_targets(p, seq, target, has_nan);
#pragma unroll
    for (int32 s = 0; s < SLOTS; ++s) {
        const int32 c = threadIdx.x + s * threads;
        if (c >= count) continue;
        if (!p.largest) target[c] = given_target[s];
        follower[c] = NONE;
    }
    __syncthreads();
    bool broken = false;
#pragma unroll
    for (int32 s = 0; s < SLOTS; ++s) {
        const int32 c = threadIdx.x + s * threads;
        if (c < 1 || c >= count) continue;
        if (parent[s] < 0 || parent[s] >= c) broken = true;
        else if (token[s] >= 0 && token[s] == target[parent[s]]) atomicMin(&follower[parent[s]], c);
    }
    broken = __syncthreads_or(broken);
    if (threadIdx.x == 0) {
        int32 node = 0, k = 0;
        path[0] = 0;
        bool saw_nan = p.largest && count > 0 && has_nan[0];
        if (count > 0)
            while (k + 1 < places && follower[node] != NONE) {
                node = follower[node];
                path[++k] = node;
                if (p.largest) saw_nan |= has_nan[node];
            }
        accepted = k;
        as<int32>(p.accepted.at(seq)) = k;
        const Token next = count > 0 ? target[node] : Token(-1);
        as<Token>(p.next_token.at(seq)) = next;
        const bool has_none = p.largest && count > 0 && next < 0;
        const uint32 of_rows = (saw_nan ? SAW_NAN : 0) | (has_none ? NODE_WITHOUT_TOKEN : 0);
        if (p.status) as<uint32>(p.status.at(seq)) = (broken ? BROKEN_LINK : 0) | (given > nodes ? CLAMPED : 0) | of_rows;
    }
    __syncthreads();
    const int32 length = count > 0 ? accepted + 1 : 0;
    for (int32 j = threadIdx.x; j < places; j += threads) {
        as<int32>(p.path.at(seq, j)) = j < length ? path[j] : -1;
        if (p.committed) as<Token>(p.committed.at(seq, j)) = j < length ? target[path[j]] : Token(-1);
    }
    end_walk<Token>(p, ends, seq, p.target.data != nullptr);
}

#define PARAMETERS const __grid_constant__ VerifyTreeParams p
#define END_PARAMETERS const __grid_constant__ VerifyTreeParams p, const __grid_constant__ EndParams end
#define CTA_KERNEL extern "C" __global__ void __launch_bounds__(MOST_THREADS)
#define WARP_KERNEL extern "C" __global__ void __launch_bounds__(WARP)

CTA_KERNEL verify_tree_i32(PARAMETERS) { verify<int32>(p); }
CTA_KERNEL verify_tree_i64(PARAMETERS) { verify<int64>(p); }
CTA_KERNEL verify_tree_end_i32(END_PARAMETERS) { verify<int32>(p, end); }
CTA_KERNEL verify_tree_end_i64(END_PARAMETERS) { verify<int64>(p, end); }
WARP_KERNEL verify_tree_warp_i32(PARAMETERS) { verify_by_warp<int32>(p); }
WARP_KERNEL verify_tree_warp_i64(PARAMETERS) { verify_by_warp<int64>(p); }
WARP_KERNEL verify_tree_warp_end_i32(END_PARAMETERS) { verify_by_warp<int32>(p, end); }
WARP_KERNEL verify_tree_warp_end_i64(END_PARAMETERS) { verify_by_warp<int64>(p, end); }
