// A cluster of CTAs that has a row of logits in its shared memory: what the kernels of cluster.cu and cluster_filtered.cu share.
#pragma once

#include "common/cluster.cuh"
#include "sample/end.cuh"

// What a warp finds in its part of a segment.
struct alignas(16) Part {
    uint32 largest;  // key of the segment's largest number
    uint32 first;    // the lowest token with that number, and SAW_NAN << 31
    uint64 sum;
};

// What the first CTA says of the row.
struct alignas(16) Order {
    uint32 c;        // bits of Scale::c
    uint32 needs;    // a Need
    uint32 is_greedy;
    uint32 filters;  // the row has some
};
// Whether a row may be looked at, and whether there is one.
enum Need : uint32 { NOT_NEEDED, IS_MISSING, IS_THERE };

struct RowShared {
    // What warps tell of the row.
    alignas(16) Part parts[MOST_ROW_CTAS * DRAW_WARPS];
    uint64 sum[DRAW_THREADS];  // of each lane
    union {
        uint32 groups[MOST_ROW_SEGMENTS * GROUPS];  // keys of their largest numbers, where the row has filters
        SegmentRecord records[MOST_ROW_SEGMENTS];   // once the groups are no longer needed
    };
    Order order;
    alignas(16) uint64 number[2];  // the first draws
    Barrier copied[MOST_CTA_SEGMENTS], told;
    uint32 largest[DRAW_WARPS];
    // What the first thread reads of the settings.
    uint32 tokens;  // 0: the row is not looked at
    float c;        // Scale::c
    bool is_greedy;
    RowRecord found;
    Drawn drawn;
    uint32 finisher;  // the CTA that goes on
    bool draws;
    DrawShared draw;
};

// A warp's part of a segment, which a copy brings to shared memory: neighbouring tokens, and for each lane some strips of them.
template <uint32 TYPE> struct WarpPart {
    const Source &source;
    Scale scale;
    uint32 place;   // in shared memory
    uint32 first;   // token
    uint32 strips;  // of a lane: 4, 8 or 16

    __device__ uint32 token(uint32 lane, uint32 n) const { return first + (lane * strips + n) * STRIP; }
    __device__ uint32 place_of(uint32 lane, uint32 n) const { return place + (lane * strips + n) * uint32(sizeof(Strip<TYPE>)); }
    __device__ Strip<TYPE> strip(uint32 lane, uint32 n) const {
        Strip<TYPE> loaded;
        loaded.load_shared(place_of(lane, n));
        return loaded;
    }
    // The n-th strip in an order in which lanes of 16-bit rows read from different banks, and of 32-bit rows two from one.
    __device__ uint32 turn(uint32 lane, uint32 n) const { return ((strips < 8 ? lane * strips / 8 : lane) + n) & (strips - 1); }
    // Hands this lane's strips to visit(strip), in that order.
    template <typename Visit> __device__ void each(const Visit &visit) const {
        const uint32 lane = threadIdx.x % WARP, begin = turn(lane, 0);
#pragma unroll 1
        for (uint32 n = 0; n < strips; n += 4)
#pragma unroll
            for (uint32 u = 0; u < 4; ++u) visit(strip(lane, (begin + n + u) & (strips - 1)));
    }
    // Loads what the copy left: the rest past its last 16 bytes, and nothing past the row's end.
    __device__ void complete(uint32 past) const {
        const uint32 lane = threadIdx.x % WARP;
#pragma unroll 1
        for (uint32 n = 0; n < strips; ++n) {
            if (token(lane, n) + STRIP <= past) continue;
            Strip<TYPE> rest;
            rest.load(source.row, token(lane, n), none_bits<TYPE>(false));
            rest.store_shared(place_of(lane, n));
        }
    }
    // Makes what cannot be drawn `none`; whether there was something that is no number.
    __device__ bool clean() const {
        const uint32 lane = threadIdx.x % WARP;
        bool found = false;
#pragma unroll 1
        for (uint32 n = 0; n < strips; ++n) {
            float x[STRIP];
            Strip<TYPE> cleaned = strip(lane, n);
            cleaned.widen(x);
            found |= source.clean(token(lane, n), x);
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e)
                if (x[e] == minus_infinity()) cleaned.set(e, none_bits<TYPE>(false));
            cleaned.store_shared(place_of(lane, n));
        }
        return found;
    }
    // NaN if there is one.
    __device__ float largest() const {
        Strip<TYPE> best = strip(threadIdx.x % WARP, 0);
        each([&](const Strip<TYPE> &other) { best.raise(other); });
        return best.largest();
    }
    __device__ uint64 sum(float m) const {
        uint64 sum = 0;
        each([&](const Strip<TYPE> &strip) {
            float x[STRIP];
            strip.widen(x);
            sum += scale.sum(x, m);
        });
        return sum;
    }
    // The lowest token with a number.
    __device__ uint32 lowest(float number) const {
        uint32 found = 0x7fffffff;
#pragma unroll 1
        for (uint32 n = strips; n-- > 0;) {
            const Strip<TYPE> looked_at = strip(threadIdx.x % WARP, n);
#pragma unroll
            for (uint32 e = STRIP; e-- > 0;)
                if (looked_at.at(e) == number) found = token(threadIdx.x % WARP, n) + e;
        }
        return __reduce_min_sync(FULL_WARP, found);
    }
    // The token for a target below the sum of the lanes' sums.
    __device__ uint32 draw(uint64 of_lane, float m, uint64 target) const {
        const uint32 lane = threadIdx.x % WARP;
        const uint64 through = warp_sum_through(of_lane);
        const uint32 owner = __ffs(__ballot_sync(FULL_WARP, target < through)) - 1;
        target -= __shfl_sync(FULL_WARP, through - of_lane, owner);
        // A lane for each strip of the owner.
        float x[STRIP];
        strip(owner, min(lane, strips - 1)).widen(x);
        uint32 some;
        const uint64 of_strip = scale.sum_and_weigh(x, m, some), own = lane < strips ? of_strip : 0, up_to = warp_sum_through(own);
        const uint32 holder = __ffs(__ballot_sync(FULL_WARP, target < up_to)) - 1;
        return __shfl_sync(FULL_WARP, token(owner, lane) + pick_weight(x, some, target - (up_to - own)), holder);
    }
};

// Waits for the warps of a team, if it is team NUMBER - 1.
template <uint32 NUMBER> __device__ inline void sync_if(uint32 team, uint32 warps) {
    asm volatile("{\n\t.reg .pred own;\n\t"
                 "setp.eq.u32 own, %0, %1;\n\t"
                 "@own barrier.sync.aligned %2, %3;\n\t}" ::"r"(team), "n"(NUMBER - 1), "n"(NUMBER), "r"(warps * WARP) : "memory");
}
// Waits for the warps of a team: those of others may still wait for their segments. A barrier's number is a constant, since a kernel that computes one
// takes all 16 barriers of a CTA: a multiprocessor has 64, and would run four CTAs at once instead of five. A team of one warp, one of eight, needs none.
__device__ inline void sync_team(uint32 team, uint32 warps) {
    static_assert(MOST_CTA_SEGMENTS == DRAW_WARPS);
    if (warps == 1) return __syncwarp();
    sync_if<1>(team, warps), sync_if<2>(team, warps), sync_if<3>(team, warps), sync_if<4>(team, warps);
}

// Finds what a warp has of its segment, and tells the cluster.
template <uint32 TYPE> __device__ inline void take_part(RowShared &shared, const WarpPart<TYPE> &part, const Barrier &copied, bool is_there, uint32 past,
                                                          bool is_greedy, uint32 team_warps) {
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    bool found = false;
    float largest = minus_infinity();
    if (is_there) {
        copied.wait(0);
        if (part.token(WARP, 0) > past) part.complete(past);
        largest = part.largest();
        if (part.source.forbidden.count || __any_sync(FULL_WARP, largest != largest)) found = part.clean(), largest = part.largest();
    }
    uint32 key = __reduce_max_sync(FULL_WARP, key_of(largest));
    if (lane == 0) shared.largest[warp] = key;
    sync_team(warp >> log2_of(team_warps), team_warps);
    key = __reduce_max_sync(FULL_WARP, shared.largest[(warp & ~(team_warps - 1)) | (lane & (team_warps - 1))]);
    largest = number_of(key);
    uint64 sum = 0;
    uint32 first = 0x7fffffff;
    if (largest > minus_infinity()) {
        if (is_greedy) first = part.lowest(largest);
        else sum = part.sum(largest);
    }
    shared.sum[threadIdx.x] = sum;
    const uint64 of_warp = warp_sum(sum);
    if (__any_sync(FULL_WARP, found)) first |= SAW_NAN << 31;
    const uint4 said = {key, first, uint32(of_warp), uint32(of_warp >> 32)};
    if (lane < cluster_ctas()) send_four(lane, &shared.parts[cluster_rank() * DRAW_WARPS + warp], said, shared.told);
}

// Sums the row from what the warps of the cluster have said, and finds what is drawn from it. Called by a warp.
__device__ inline void sum_and_find(RowShared &shared, Source &source, uint32 team_warps) {
    // From here on every CTA goes by what all have been told, and by parameters.
    source.row.tokens = source.p.tokens;
    const uint32 lane = threadIdx.x % WARP, segments = source.segments();
    // From what the team of a segment has said, all of whose warps know its largest number.
    const auto record_of = [&](uint32 s) -> SegmentRecord {
        SegmentRecord made = {minus_infinity(), 0x7fffffff, 0, 0, 0};
        if (s >= segments) return made;
        constexpr uint32 MOST = DRAW_WARPS / 2;
        Part said[MOST];
#pragma unroll
        for (uint32 n = 0; n < MOST; ++n) said[n] = shared.parts[s * team_warps + min(n, team_warps - 1)];
        uint32 seen = 0;
#pragma unroll
        for (uint32 n = 0; n < MOST; ++n) {
            seen |= said[n].first >> 31, made.first = min(made.first, said[n].first & 0x7fffffff);
            if (n < team_warps) made.sum += said[n].sum;
        }
        made.largest = number_of(said[0].largest), made.first |= seen << 31;
        return made;
    };
    const SegmentRecord first = record_of(lane);
#pragma unroll 1
    for (uint32 s = lane + WARP; s < segments; s += WARP) shared.records[s] = record_of(s);
    if (segments > WARP) __syncwarp();
    const Order &order = shared.order;
    source.scale.c = __uint_as_float(order.c);
    RowRecord found = {minus_infinity(), minus_infinity(), 0, NO_ROW, 0, 0};
    LaneShare own;
    if (order.needs == IS_THERE) found = sum_row(source, first, shared.records, order.is_greedy, false, own);
    const bool draws = !order.is_greedy && !(found.status & (NO_TOKEN | NO_ROW));
    Drawn drawn = {0, 0, 0};
    if (draws) drawn = find_segment(source, shared.records, {found.largest, found.total}, own, shared.number[0]);
    if (lane) return;
    found.token = min(found.token, source.p.tokens - 1);
    shared.found = found, shared.drawn = drawn, shared.draws = draws;
    shared.finisher = drawn.segment >> log2_of(source.p.segments_at_once);
    shared.draw.token = drawn.segment * SEGMENT;
}

// Loads what the end of a request asks for, so that it is in the cache of the multiprocessor by then.
__device__ inline void ask_for_end(const SampleParams &p, const Turn &turn) {
    const uint32 lane = threadIdx.x % WARP;
    if (threadIdx.x / WARP != 1) return;
    int64 asked = 0;
    if (lane < turn.steps()) asked = turn.draft(p, lane);
    if (turn.stops && lane < p.stops) asked += turn.stop(p, lane);
    asm volatile("" ::"l"(asked));
}

// What the first thread has put into shared.found: says it, and ends the request if it is the last row. The stages are free.
__device__ inline void end_row(const SampleParams &p, RowShared &shared, char *stages, uint32 n) {
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    const uint32 i = p.sampling.per_request.divide(n), slot = n - i * p.sampling.per_request.value;
    // What ends the request is asked for again: registers are few while rows are summed.
    const Turn ending(p, p.sampling.first + i);
    say_row(p, ending, i, slot, SaidRow::of(shared.found.token, shared.found.status), ending.drafted(p, threadIdx.x), reinterpret_cast<RowRecord *>(stages));
}
