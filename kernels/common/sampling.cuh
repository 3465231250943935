// Rows of logits as requests sample from them: what the kernels of sample/ and verify_tree/ share. src/ops/draw has the mathematics, in
// mod.rs and filter.rs that of draws and filters, in rejection.rs that of draft tokens which are tried in turn.
//
// A row is taken in two launches. CTAs of SEGMENT_THREADS record the largest number and the sums of each segment, or, where the row has
// filters, the largest number of each group in place of sums (`record_segments`). A CTA of DRAW_THREADS for each row then finds the bounds of
// filters and the row's sum (`sum_row`). Records lie in scratch.
#pragma once

#include "common/counter.cuh"
#include "common/filter.cuh"
#include "common/parameters.cuh"
#include "common/relaxed.cuh"
#include "common/view.cuh"

// Bits of SamplingParams::flags.
constexpr uint32 TARGET_WEIGHTS = 1, DRAFT_WEIGHTS = 2, TEMPERATURE_LAST = 4;
// Bits of a request's status: VWD_SAMPLE_*.
constexpr uint32 SAW_NAN = 1, NO_TOKEN = 2, NO_RESIDUAL = 4, NO_ROW = 8;

constexpr uint32 NO_REFUSAL = 0xffffffff;

// What is recorded of a segment.
struct alignas(16) SegmentRecord {
    float largest;
    uint32 first;       // the lowest token with that number, and SAW_NAN << 31
    uint64 sum;         // at the request's temperature
    uint64 plain_sum;   // at temperature 1
    uint64 unused;
};

// What a row's CTA finds.
struct alignas(16) RowRecord {
    float largest;
    float bound;        // numbers below it are dropped by top-k and top-p
    uint32 token;       // that the row gives where it is greedy or coupled
    uint32 status;
    uint64 total;       // of what filters keep, at the request's temperature
    uint64 plain_total; // of all, at temperature 1
};

// Strides are in bytes; tensors that are not given are null.
struct SamplingParams {
    View<3> target;            // [B, rows, V]
    View<3> draft_rows;        // [B, rows, Vd]
    View<1> draft_map;         // [Vd]
    View<1> temperature, top_k, top_p, min_p, seeds, positions;  // [B]
    SegmentRecord *segments;   // [rows, segments of a row]
    RowRecord *rows;
    uint32 *groups;            // [rows, GROUPS · segments of a row]: with filters keys of the groups' largest numbers; see sums_of
    SegmentSum *rest;          // [requests, segments of a row], for refused draft tokens: what segments have left
    uint32 *refused;           // [requests]: the row whose draft token was refused, or NO_REFUSAL
    uint32 *counters;          // one of each request of this launch, then one of each row; 0 on entry and at the end
    Divisor per_request;       // rows of a request, those of its draft included
    Divisor per_row;           // segments of a row
    Divisor per_row_ctas;      // CTAs that record them
    Divisor rest_ctas;         // CTAs of a request that sum what a refusal leaves
    uint32 launch_rows;        // rows of this launch
    uint32 first;              // request of this launch
    uint32 tokens, draft_tokens;  // V, Vd
    uint32 flags, position_bytes;
    uint32 target_type, draft_type, target_adjacent, draft_adjacent;
    uint32 is_greedy;          // every request
    uint32 segments_at_once;   // of a CTA where a cluster takes a row, of a warp that streams them

    __device__ float temperature_of(uint32 request) const { return is_greedy ? 0.0f : temperature ? as<float>(temperature.at(request)) : 1.0f; }
    // Sums of the groups of the segment whose record is the one so numbered, where one launch does all.
    __device__ uint64 *sums_of(uint64 segment) const { return reinterpret_cast<uint64 *>(groups) + segment * GROUPS; }
    // A random number for a row of a request.
    __device__ uint64 number(uint32 request, uint32 row, Purpose purpose, uint32 index) const {
        const int64 position = int64(uint64(load_integer(positions.at(request), position_bytes)) + row);
        return uniform(as<uint64>(seeds.at(request)), position, purpose, index);
    }
    // The column of draft_rows for a token, or the number of columns if there is none.
    __device__ uint32 column_of(int64 token) const {
        if (!draft_map) return token < draft_tokens ? uint32(token) : draft_tokens;
        uint32 low = 0, high = draft_tokens;
        while (low < high) {
            const uint32 middle = (low + high) / 2;
            if (as<int32>(draft_map.at(middle)) < token) low = middle + 1;
            else high = middle;
        }
        return low;
    }
    __device__ bool has_column(uint32 column, int64 token) const {
        return column < draft_tokens && (!draft_map || as<int32>(draft_map.at(column)) == token);
    }
};

// What a kernel does first: it asks for its parameters.
template <typename Params> __device__ inline void begin(const Params &p) {
    __shared__ uint32 words[WARP];
    request_parameters(p, words);
}

__device__ inline bool is_greedy(float temperature) { return !(temperature >= 1e-5f); }

// Tokens that a row cannot give.
struct Forbidden {
    View<1> tokens;
    uint32 count, bytes;

    __device__ int64 at(uint32 n) const { return load_integer(tokens.at(n), bytes); }
};

// The numbers of a row, without what cannot be drawn.
struct Source {
    const SamplingParams &p;
    Row row;
    uint32 request;
    Scale scale;       // at the request's temperature
    Forbidden forbidden;
    bool filters;
    Kept kept;

    __device__ Source(const SamplingParams &p, uint32 request, float temperature, bool is_draft, const char *data, const Forbidden &forbidden)
        : p(p), request(request), forbidden(forbidden) {
        if (is_draft) row = {data, p.draft_rows.step[2], p.draft_tokens, p.draft_type, p.draft_adjacent != 0};
        else row = {data, p.target.step[2], p.tokens, p.target_type, p.target_adjacent != 0};
        scale = Scale::of(p.flags & (is_draft ? DRAFT_WEIGHTS : TARGET_WEIGHTS), temperature);
        kept = {p.flags & TEMPERATURE_LAST ? plain() : scale, 0.0f, 0.0f, minus_infinity()};
        filters = false;
        // Probabilities of the draft are what it was drawn from.
        if (is_greedy(temperature) || (is_draft && scale.is_weights)) return;
        if (p.min_p) kept.min_p = as<float>(p.min_p.at(request));
        filters = kept.min_p > 0.0f || top_k() || top_p() < 1.0f;
    }
    __device__ Scale plain() const { return Scale::of(scale.is_weights, 1.0f); }
    // 0: off.
    __device__ uint32 top_k() const {
        const int32 k = p.top_k ? as<int32>(p.top_k.at(request)) : 0;
        return k > 0 && uint32(k) < row.tokens ? k : 0;
    }
    // 1: off.
    __device__ float top_p() const {
        const float top_p = p.top_p ? as<float>(p.top_p.at(request)) : 1.0f;
        return top_p < 1.0f ? top_p : 1.0f;
    }
    __device__ uint32 segments() const { return (row.tokens + SEGMENT - 1) / SEGMENT; }

    // Makes what cannot be drawn of a strip `none`, without filters; whether there was something that is no number.
    __device__ bool clean(uint32 first, float (&x)[STRIP]) const {
        bool found = false;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e)
            if (!scale.is_number(x[e])) x[e] = scale.none(), found = true;
        for (uint32 n = 0; n < forbidden.count; ++n) {
            const uint64 past = uint64(forbidden.at(n)) - first;
            const uint32 at = past < STRIP ? uint32(past) : STRIP;
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e)
                if (at == e) x[e] = scale.none();
        }
        return found;
    }
    __device__ void load(uint32 s, Numbers &numbers) const {
        StoredNumbers stored;
        stored.load(row, s, scale.is_weights);
        take(s, stored, numbers);
    }
    // The numbers of segment s from what was loaded of it.
    __device__ void take(uint32 s, const StoredNumbers &stored, Numbers &numbers) const {
        stored.widen(row.type, numbers.x);
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h) {
            clean(s * SEGMENT + Numbers::place(h), numbers.x[h]);
            if (filters) kept.apply(numbers.x[h], scale.none());
        }
    }
    // The number of one token, without filters.
    __device__ float number(uint32 token) const {
        const float x = row.at(token);
        if (!scale.is_number(x)) return scale.none();
        for (uint32 n = 0; n < forbidden.count; ++n)
            if (forbidden.at(n) == token) return scale.none();
        return x;
    }
    // As the filters of a row that was summed leave it.
    __device__ float kept_number(uint32 token) const {
        const float x = number(token);
        return filters && kept.drops(x) ? scale.none() : x;
    }
    __device__ void set(const RowRecord &record) { kept.largest = record.largest, kept.bound = record.bound; }
};

__device__ inline SegmentSum sum_of(const SegmentRecord *records, uint32 s, uint32 segments) {
    if (s >= segments) return {minus_infinity(), 0};
    return {records[s].largest, records[s].sum};
}

// The largest number of a segment, and the sum of its weights; 0 where no token can be drawn.
__device__ inline SegmentSum sum_segment(DrawShared &shared, const Numbers &numbers, const Scale &scale) {
    const float largest = cta_largest(shared, numbers.largest());
    if (!(largest > scale.none())) return {largest, 0};
    return {largest, cta_sum(shared, numbers.sum(0, scale, largest) + numbers.sum(1, scale, largest))};
}

// --- segments --------------------------------------------------------------------------------------------------------------------

// CTAs that a multiprocessor has registers for, where all rows are logits and no log-probability is wanted, and in general.
constexpr uint32 SEGMENT_CTAS = 4, ANY_SEGMENT_CTAS = 3;
constexpr uint32 SEGMENT_THREADS = 256, SEGMENT_WARPS = SEGMENT_THREADS / WARP, SEGMENT_STRIPS = SEGMENT / STRIP / SEGMENT_THREADS;

// Of segment_stream.cuh: shared memory of a CTA, and its warps.
constexpr uint32 STREAM_BYTES = 192 << 10, STREAM_WARPS = 12;

// Of sample/cluster.cu: CTAs of the largest cluster, segments that each of them has at most, and segments of a row.
constexpr uint32 MOST_ROW_CTAS = 16, MOST_CTA_SEGMENTS = 8, MOST_ROW_SEGMENTS = 64;

struct alignas(16) SegmentShared {
    uint32 largest[SEGMENT_WARPS], first[SEGMENT_WARPS];
    uint64 sum[2][SEGMENT_WARPS];
};

// Records segment s of a row; `groups` gets the keys of its groups where the row has filters. Numbers are float32 one strip at a time. ANY: the row
// may be one of weights, and `wants_plain` may be true.
template <uint32 TYPE, bool ANY>
__device__ inline void record_of(SegmentShared &shared, const Source &source, uint32 s, bool is_greedy, bool wants_plain, uint32 *groups,
                                 SegmentRecord &record) {
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Scale scale = {ANY && source.scale.is_weights, source.scale.c};
    wants_plain &= ANY;
    Strip<TYPE> strips[SEGMENT_STRIPS];
    const auto place = [](uint32 h) { return (h * SEGMENT_THREADS + threadIdx.x) * STRIP; };
    const uint32 none = none_bits<TYPE>(scale.is_weights);
#pragma unroll
    for (uint32 h = 0; h < SEGMENT_STRIPS; ++h) strips[h].load(source.row, s * SEGMENT + place(h), none);
    float best[SEGMENT_STRIPS];
    float all = minus_infinity();
#pragma unroll
    for (uint32 h = 0; h < SEGMENT_STRIPS; ++h) best[h] = strips[h].largest(), all = larger_or_nan(all, best[h]);
    bool found = false;
    if (scale.is_weights || source.forbidden.count || all != all) {
#pragma unroll
        for (uint32 h = 0; h < SEGMENT_STRIPS; ++h) {
            float x[STRIP];
            strips[h].widen(x);
            found |= source.clean(s * SEGMENT + place(h), x);
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e)
                if (x[e] == scale.none()) strips[h].set(e, none);
            best[h] = strips[h].largest();
        }
    }
    if (source.filters) {
#pragma unroll
        for (uint32 h = 0; h < SEGMENT_STRIPS; ++h) {
            const uint32 key = __reduce_max_sync(FULL_WARP, key_of(best[h]));
            if (lane == 0) groups[h * SEGMENT_WARPS + warp] = key;
        }
    }
    all = best[0];
#pragma unroll
    for (uint32 h = 1; h < SEGMENT_STRIPS; ++h) all = fmaxf(all, best[h]);
    uint32 key = __reduce_max_sync(FULL_WARP, key_of(all));
    if (lane == 0) shared.largest[warp] = key;
    const uint32 status = __syncthreads_or(found) ? SAW_NAN << 31 : 0;
#pragma unroll
    for (uint32 w = 0; w < SEGMENT_WARPS; ++w) key = max(key, shared.largest[w]);
    const float largest = number_of(key);
    const bool has_some = largest > scale.none();
    uint32 first = SEGMENT;
    if (is_greedy) {
#pragma unroll
        for (uint32 h = SEGMENT_STRIPS; h-- > 0;)
#pragma unroll
            for (uint32 e = STRIP; e-- > 0;)
                if (strips[h].at(e) == largest) first = place(h) + e;
        first = __reduce_min_sync(FULL_WARP, first);
        if (lane == 0) shared.first[warp] = first;
    }
    // At the request's temperature, and at 1.
    const Scale plain = source.plain();
    const bool wants_sum = has_some && !is_greedy && !source.filters, is_same = wants_sum && plain.c == scale.c;
    wants_plain &= has_some;
#pragma unroll 1
    for (uint32 n = 0; n < 2; ++n) {
        if (n == 0 ? !wants_sum : !wants_plain || is_same) continue;
        const Scale at = n ? plain : scale;
        uint64 sum = 0;
        if (at.has_powers(largest)) {
#pragma unroll
            for (uint32 h = 0; h < SEGMENT_STRIPS; ++h) {
                float x[STRIP];
                strips[h].widen(x);
                sum += at.sum_powers(x, largest);
            }
        } else {
#pragma unroll
            for (uint32 h = 0; h < SEGMENT_STRIPS; ++h) {
                float x[STRIP];
                strips[h].widen(x);
                sum += at.sum(x, largest);
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) shared.sum[n][warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x) return;
    SegmentRecord made = {largest, status, 0, 0, 0};
    if (is_greedy && has_some) {
#pragma unroll
        for (uint32 w = 0; w < SEGMENT_WARPS; ++w) first = min(first, shared.first[w]);
        made.first |= s * SEGMENT + first;
    }
#pragma unroll
    for (uint32 w = 0; w < SEGMENT_WARPS; ++w) {
        if (wants_sum) made.sum += shared.sum[0][w];
        if (wants_plain && !is_same) made.plain_sum += shared.sum[1][w];
    }
    if (wants_plain && is_same) made.plain_sum = made.sum;
    record = made;
}

// Records the segments of row n of the launch that this CTA takes: it is one of `per_row_ctas`, which take them in turn.
template <bool ANY>
__device__ inline void record_segments(SegmentShared &shared, const Source &source, uint32 n, uint32 cta, bool is_greedy, bool wants_plain) {
    const SamplingParams &p = source.p;
    for (uint32 s = cta, segments = source.segments(); s < segments; s += p.per_row_ctas.value) {
        if (s != cta) __syncthreads();
        const uint64 at = uint64(n) * p.per_row.value + s;
        SegmentRecord &record = p.segments[at];
        uint32 *groups = p.groups + at * GROUPS;
        if (source.row.type == FLOAT32) record_of<FLOAT32, ANY>(shared, source, s, is_greedy, wants_plain, groups, record);
        else if (source.row.type == FLOAT16) record_of<FLOAT16, ANY>(shared, source, s, is_greedy, wants_plain, groups, record);
        else record_of<BFLOAT16, ANY>(shared, source, s, is_greedy, wants_plain, groups, record);
    }
}

// --- rows ------------------------------------------------------------------------------------------------------------------------

__device__ inline RowRecord row_without_token(float largest, uint32 status) { return {largest, minus_infinity(), 0, status | NO_TOKEN, 0, 0}; }

// The segment with the lane's number, its share in the row, and the share of those up to it.
struct LaneShare {
    SegmentSum segment;
    uint64 share, through;
};

// The record of the segment with the lane's number, or what stands for one past the row's end.
__device__ inline SegmentRecord record_of_lane(const SegmentRecord *records, uint32 segments) {
    const uint32 lane = threadIdx.x % WARP;
    return lane < segments ? records[lane] : SegmentRecord{minus_infinity(), 0x7fffffff, 0, 0, 0};
}
// Sums a row without filters from the records of its segments, of which each lane has that with its number. Each warp does so by itself, without a barrier.
__device__ inline RowRecord sum_row(const Source &source, const SegmentRecord &first, const SegmentRecord *records, bool is_greedy, bool wants_plain,
                                    LaneShare &own) {
    const uint32 lane = threadIdx.x % WARP, segments = source.segments();
    own.segment = {first.largest, first.sum};
    uint32 key = key_of(first.largest), status = first.first >> 31;
    for (uint32 s = lane + WARP; s < segments; s += WARP) key = max(key, key_of(records[s].largest)), status |= records[s].first >> 31;
    RowRecord found = {number_of(__reduce_max_sync(FULL_WARP, key)), minus_infinity(), 0, __reduce_or_sync(FULL_WARP, status), 0, 0};
    if (!(found.largest > source.scale.none())) return row_without_token(found.largest, found.status);
    const Scale plain = source.plain();
    uint32 token = first.largest == found.largest ? first.first & 0x7fffffffu : 0x7fffffffu;
    own.share = is_greedy ? 0 : share_of(own.segment, source.scale, found.largest);
    own.through = warp_sum_through(own.share);
    uint64 more = 0;  // of the segments past the first 32
    if (wants_plain) found.plain_total = share_of({first.largest, first.plain_sum}, plain, found.largest);
    for (uint32 s = lane + WARP; s < segments; s += WARP) {
        const SegmentRecord mine = records[s];
        if (is_greedy && mine.largest == found.largest) token = min(token, mine.first & 0x7fffffffu);
        if (!is_greedy) more += share_of({mine.largest, mine.sum}, source.scale, found.largest);
        if (wants_plain) found.plain_total += share_of({mine.largest, mine.plain_sum}, plain, found.largest);
    }
    if (is_greedy) found.token = __reduce_min_sync(FULL_WARP, token);
    else found.total = __shfl_sync(FULL_WARP, own.through, WARP - 1);
    if (!is_greedy && segments > WARP) found.total += __shfl_sync(FULL_WARP, warp_sum_through(more), WARP - 1);
    if (wants_plain) found.plain_total = __shfl_sync(FULL_WARP, warp_sum_through(found.plain_total), WARP - 1);
    return found;
}

// The same where the row has filters: they leave records anew. The row's token, too, if `draws`.
__device__ inline RowRecord decide_filtered_row(DrawShared &shared, FilterShared &filter_shared, Source &source, uint32 n, bool wants_plain, bool draws,
                                                uint64 number) {
    const uint64 first = uint64(n) * source.p.per_row.value;
    SegmentRecord *records = source.p.segments + first;
    const uint32 segments = source.segments(), s = threadIdx.x;
    SegmentRecord mine = {minus_infinity(), 0, 0, 0, 0};
    if (s < segments) mine = records[s];
    // No barrier that combines (__syncthreads_or): where settings change during the call, some warps may be at an ordinary one.
    RowRecord found = {cta_largest(shared, mine.largest), minus_infinity(), 0, cta_or(shared, mine.first >> 31), 0, 0};
    if (!(found.largest > source.scale.none())) return row_without_token(found.largest, found.status);
    uint64 before, share;
    if (wants_plain) found.plain_total = sum_of_row(shared, {mine.largest, mine.plain_sum}, source.plain(), before, share).total;
    source.kept.largest = found.largest;
    Filter<Source> filter(shared, filter_shared, source);
    const SegmentSum segment = filter.run(source.p.groups + first * GROUPS);
    found.bound = source.kept.bound;
    if (s < segments) records[s].largest = segment.largest, records[s].sum = segment.sum;
    const RowSum row = sum_of_row(shared, segment, source.scale, before, share);
    found.total = row.total;
    if (!draws) return found;
    draw_segment(shared, segment, source.scale, row, before, share, number);
    const float largest = __uint_as_float(shared.word[0]);
    if (filter.has_strips()) found.token = filter.draw_from_strips(shared.segment, largest, shared.target);
    else found.token = draw_inside(shared, source, source.scale, shared.segment, largest, shared.target);
    return found;
}

// What is drawn from a row: a segment, its largest number, and a target below its sum.
struct Drawn {
    uint32 segment;
    float largest;
    uint64 target;
};

// What a random number below 2^53 draws from a row that was summed. Each warp finds it by itself. `own` is of the first 32 segments.
__device__ inline Drawn find_segment(const Source &source, const SegmentRecord *records, const RowSum &row, LaneShare own, uint64 number) {
    const uint32 lane = threadIdx.x % WARP, segments = source.segments();
    const Scale &scale = source.scale;
    const uint64 at = target_of(number, row.total);
    for (uint32 base = 0;;) {
        const uint32 beyond = __ballot_sync(FULL_WARP, at < own.through);
        if (beyond || base + WARP >= segments) {
            // Some lane is beyond, unless the temperature changes during the call.
            const uint32 owner = beyond ? __ffs(beyond) - 1 : 0;
            uint64 target = lane == owner ? target_inside(own.segment, scale, row.largest, at - (own.through - own.share)) : 0;
            target = __shfl_sync(FULL_WARP, target, owner);
            return {base + owner, __shfl_sync(FULL_WARP, own.segment.largest, owner), target};
        }
        base += WARP;
        own.segment = sum_of(records, base + lane, segments);
        own.share = share_of(own.segment, scale, row.largest);
        own.through = __shfl_sync(FULL_WARP, own.through, WARP - 1) + warp_sum_through(own.share);
    }
}
// The token that it draws.
__device__ inline uint32 draw_from_row(DrawShared &shared, const Source &source, const SegmentRecord *records, const RowSum &row,
                                       const LaneShare &own, uint64 number) {
    const Drawn drawn = find_segment(source, records, row, own, number);
    return draw_inside(shared, source, source.scale, drawn.segment, drawn.largest, drawn.target);
}
__device__ inline uint32 draw_from_row(DrawShared &shared, const Source &source, const SegmentRecord *records, const RowSum &row, uint64 number) {
    const SegmentSum segment = sum_of(records, threadIdx.x % WARP, source.segments());
    const uint64 share = share_of(segment, source.scale, row.largest);
    return draw_from_row(shared, source, records, row, {segment, share, warp_sum_through(share)}, number);
}

// Sums row n of the launch, and draws its token by `number` if `draws` and the row is not greedy. FILTERS: the row may have some, and `filter` is
// not null.
template <bool FILTERS>
__device__ inline RowRecord decide_row(DrawShared &shared, FilterShared *filter, Source &source, uint32 n, bool is_greedy, bool wants_plain,
                                       bool draws, uint64 number) {
    if constexpr (FILTERS) {
        if (source.filters) return decide_filtered_row(shared, *filter, source, n, wants_plain, draws && !is_greedy, number);
    }
    const SegmentRecord *records = source.p.segments + uint64(n) * source.p.per_row.value;
    LaneShare own;
    RowRecord found = sum_row(source, record_of_lane(records, source.segments()), records, is_greedy, wants_plain, own);
    if (draws && !is_greedy && !(found.status & NO_TOKEN))
        found.token = draw_from_row(shared, source, records, {found.largest, found.total}, own, number);
    return found;
}

// Whether this CTA is the last of a request's `ctas` to come here; it then sees what the others wrote.
__device__ inline bool is_last_of_request(DrawShared &shared, uint32 &counter, uint32 ctas) {
    __syncthreads();
    if (ctas == 1) return true;
    if (threadIdx.x == 0) {
        shared.is_last = count_up(&counter) + 1 == ctas;
        if (shared.is_last) counter = 0;
    }
    __syncthreads();
    return shared.is_last;
}

// Adds to a counter for this warp. Whether it has come to `all` by that: then it is 0 again, and what the others wrote before they added is visible.
// `asks`: it looks first whether the others have added, and then need not wait for what it has written itself; if they have not, that was for nothing.
__device__ inline bool warp_completes(uint32 *counter, uint32 count, uint32 all, bool asks) {
    __syncwarp();
    uint32 before = 0;
    if (threadIdx.x % WARP == 0) {
        if (asks) before = load_acquire(counter);
        if (before + count != all)
            asm volatile("fence.acq_rel.gpu;\n\t"
                         "atom.relaxed.gpu.global.add.u32 %0, [%1], %2;\n\t"
                         "fence.acq_rel.gpu;"
                         : "=r"(before) : "l"(counter), "r"(count) : "memory");
        if (before + count == all) store_relaxed(counter, 0);
    }
    const bool completes = __shfl_sync(FULL_WARP, before, 0) + count == all;
    __syncwarp();
    return completes;
}
