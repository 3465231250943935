// What path.cu keeps of a node and of its rows, and how a thread loads its strip of a row.
#pragma once

#include "verify_tree/tree.cuh"

constexpr uint32 TARGET = 0, DRAFT = 1;
constexpr uint32 PATH_WARPS = PATH_THREADS / WARP;
constexpr uint32 LAST = PATH_THREADS - 1;  // of the random numbers of a node: that of its draw
// A thread has a strip of a segment; a lane sends to each CTA.
static_assert(PATH_THREADS * STRIP == SEGMENT && MOST_PATH_CTAS <= WARP);
// What the first warp decides after: the rows of a node were summed, what a refusal left, or a segment of the draft anew.
enum class After { ROWS, REST, ANEW };

// Children whose probabilities are found together: a lane has one, of the target or of the draft, or a factor of a segment.
constexpr uint32 FIRST_CHILD_LANE = 2 * MOST_CTA_PATH_SEGMENTS, CHILDREN_AT_ONCE = (WARP - FIRST_CHILD_LANE) / 2;

// What a segment comes to: its largest number and the sum of its weights, or its lowest token with that number where the request is greedy.
struct alignas(16) PathSum {
    float largest;
    uint32 saw_nan;
    uint64 sum;
};

// The sum over a warp of numbers below 2^54.
__device__ inline uint64 wide_warp_sum(uint64 value) {
    const uint32 low = uint32(value) & 0x7ffffff, high = uint32(value >> 27);
    return (uint64(__reduce_add_sync(FULL_WARP, high)) << 27) + __reduce_add_sync(FULL_WARP, low);
}

// A row that was summed, as a warp sees it: a lane has the segments with its number, plus 32 for the second.
struct PathRow {
    static constexpr uint32 EACH = MOST_PATH_SEGMENTS / WARP;
    SegmentSum mine[EACH];
    RowSum sum;

    // Whether there was something that is no number.
    __device__ bool load(const PathSum *segments, uint32 count) {
        bool saw_nan = false;
#pragma unroll
        for (uint32 n = 0; n < EACH; ++n) {
            const uint32 s = threadIdx.x % WARP + n * WARP;
            mine[n] = {minus_infinity(), 0};
            if (s < count) mine[n] = {segments[s].largest, segments[s].sum}, saw_nan |= segments[s].saw_nan != 0;
        }
        return saw_nan;
    }
    __device__ void find_largest() {
        uint32 key = 0;
#pragma unroll
        for (uint32 n = 0; n < EACH; ++n) key = max(key, key_of(mine[n].largest));
        sum.largest = number_of(__reduce_max_sync(FULL_WARP, key));
    }
    __device__ void add_up(const Scale &scale) {
        uint64 share = 0;
#pragma unroll
        for (uint32 n = 0; n < EACH; ++n) share += share_of(mine[n], scale, sum.largest);
        sum.total = wide_warp_sum(share);
    }
    // The same by the weights of the segments' largest numbers.
    __device__ void add_up_weighed(const float *weights) {
        uint64 share = 0;
#pragma unroll
        for (uint32 n = 0; n < EACH; ++n) share += __double2ull_rz(__dmul_rn(double(mine[n].sum), double(weights[n])));
        sum.total = wide_warp_sum(share);
    }
    // What a random number below 2^53 draws.
    __device__ Drawn draw(const Scale &scale, uint64 number) const {
        const uint64 at = target_of(number, sum.total);
        Drawn drawn = {};
        uint64 before = 0;
        bool is_found = false;
#pragma unroll
        for (uint32 n = 0; n < EACH; ++n) {
            const uint64 share = share_of(mine[n], scale, sum.largest), through = before + warp_sum_through(share);
            const uint32 beyond = __ballot_sync(FULL_WARP, at < through);
            if (!is_found && (beyond || n + 1 == EACH)) {
                const uint32 owner = beyond ? __ffs(beyond) - 1 : 0;
                uint64 target = 0;
                if (threadIdx.x % WARP == owner) target = target_inside(mine[n], scale, sum.largest, at - (through - share));
                drawn = {n * WARP + owner, __shfl_sync(FULL_WARP, mine[n].largest, owner), __shfl_sync(FULL_WARP, target, owner)};
                is_found = true;
            }
            before = __shfl_sync(FULL_WARP, through, WARP - 1);
        }
        return drawn;
    }
};

// What the first warp says is next: to go on to a node, to take a token off the rows, to sum a segment of the draft anew, to draw, or that the walk has ended.
struct PathStep {
    enum Kind : uint32 { ACCEPT, REFUSE, ANEW, DRAW, END };
    uint32 kind;
    int32 child;   // ACCEPT: the node to go on to. REFUSE: the child to try next, or NONE
    uint32 token;  // that was refused, or with which the walk ends
    uint32 count;  // tokens that were refused
    bool has_rest;
    float times, factors[2 * MOST_CTA_PATH_SEGMENTS];  // REFUSE, DRAW: b, and those of the segments of this CTA, target and draft in turn
    Drawn drawn;
};

// What the first warp knows of a node.
struct PathState {
    RowSum target, draft, rest;
    double b, mass, values[WARP];
    uint32 status, children, tried, count;
    bool has_rest;
};

struct PathShared {
    Nodes nodes;
    float number[2][MOST_NODES];  // of a node's token in the rows of its parent
    uint16 path[MOST_NODES], children[MOST_NODES];
    uint32 refused[MOST_NODES];
    uint64 random[PATH_THREADS];  // numbers of the first children of a node, and of its draw
    uint32 largest[2][MOST_CTA_PATH_SEGMENTS][PATH_WARPS];  // keys, of target and draft
    uint64 sum[2][MOST_CTA_PATH_SEGMENTS][PATH_WARPS];
    bool saw_nan[2][MOST_CTA_PATH_SEGMENTS][PATH_WARPS];
    PathStep step;
    PathState state;
    uint32 token;
    // One half is written, by other CTAs, while the first warp reads the other.
    PathSum rows[2][2][MOST_PATH_SEGMENTS];  // of target and draft
    PathSum rest[2][MOST_PATH_SEGMENTS];
    Barrier arrived[2];
};

// --- strips ---

__device__ inline void set_number(uint32 at, float value, float (&x)[STRIP]) {
#pragma unroll
    for (uint32 e = 0; e < STRIP; ++e)
        if (at == e) x[e] = value;
}
__device__ inline float largest_of_strip(const float (&x)[STRIP]) {
    float best = minus_infinity();
#pragma unroll
    for (uint32 e = 0; e < STRIP; ++e) best = fmaxf(best, x[e]);
    return best;
}
// The number of a token, or that of one which cannot be drawn.
__device__ inline float number_of_token(const Row &row, uint32 token) {
    const float x = row.at(token);
    return x == x ? x : minus_infinity();
}
// Whether a strip can be loaded at once, and whether its numbers have to be loaded one by one. Past the row's end there is nothing to load.
__device__ inline bool is_whole(const Row &row, uint32 first) { return row.is_adjacent && first + STRIP <= row.tokens; }
__device__ inline bool is_broken(const Row &row, uint32 first) { return first < row.tokens && !is_whole(row, first); }
__device__ inline float number_at(const Row &row, uint32 token) { return token < row.tokens ? row.at(token) : minus_infinity(); }
// Requests a strip that is not broken. Numbers of 16 bits stay packed until widen_strip().
__device__ inline void request_strip(const Row &row, uint32 first, float (&x)[STRIP]) {
#pragma unroll
    for (uint32 e = 0; e < STRIP; ++e) x[e] = minus_infinity();
    if (!is_whole(row, first)) return;
    const char *from = row.data + uint64(first) * (row.type == FLOAT32 ? 4 : 2);
    const float4 low = as<float4>(from);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    if (row.type != FLOAT32) return;
    const float4 high = as<float4>(from + sizeof(low));
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}
__device__ inline void widen_strip(const Row &row, uint32 first, float (&x)[STRIP]) {
    if (!is_whole(row, first) || row.type == FLOAT32) return;
#pragma unroll
    for (uint32 n = STRIP / 2; n-- > 0;) {
        const uint32 word = __float_as_uint(x[n]);
        x[2 * n + 1] = row.type == FLOAT16 ? widen_float16(word >> 16) : __uint_as_float(word & 0xffff0000);
        x[2 * n] = row.type == FLOAT16 ? widen_float16(word & 0xffff) : __uint_as_float(word << 16);
    }
}
// Loads a strip without what is no number.
__device__ inline void load_strip(const Row &row, uint32 first, float (&x)[STRIP]) {
    request_strip(row, first, x);
    widen_strip(row, first, x);
    if (is_broken(row, first)) {
#pragma unroll 1
        for (uint32 e = 0; e < STRIP; ++e) set_number(e, number_at(row, first + e), x);
    }
#pragma unroll
    for (uint32 e = 0; e < STRIP; ++e)
        if (x[e] != x[e]) x[e] = minus_infinity();
}
