// Draft tokens of one position that are tried in turn: src/ops/draw/rejection.rs has the mathematics and computes the same bits.
//
// After a refusal max(p − b·q, 0) is summed over the vocabulary. Segments are summed apart from each other: by the CTAs of a grid, which leave the
// sums in memory, or by those of a cluster, which exchange them (`Trial::refuse`).
#pragma once

#include "common/cluster.cuh"
#include "common/sampling.cuh"

// Brings a segment of a row into the L2 cache, a line a thread. Half of a CTA does so.
__device__ inline void prefetch_lines(const Row &row, uint32 s) {
    constexpr uint32 LINE = 128;
    static_assert(SEGMENT * sizeof(float) <= LINE * DRAW_THREADS / 2);
    const uint32 bytes = row.type == FLOAT32 ? 4 : 2, at = threadIdx.x % (DRAW_THREADS / 2) * LINE, token = s * SEGMENT + at / bytes;
    if (row.is_adjacent && at < SEGMENT * bytes && token < row.tokens) prefetch(row.data + uint64(token) * bytes);
}

// What makes the weights of a segment probabilities: they are relative to its largest number. The factor is 0 where no token can be drawn.
struct SegmentFactor {
    float largest, factor;
};
struct alignas(16) SegmentFactors {
    SegmentFactor target, draft;
};

// A row, of the target or of the draft, that was summed.
struct SummedRow {
    Source source;
    SegmentRecord *records;
    RowSum sum;

    __device__ SummedRow(const Source &source, SegmentRecord *records, const RowRecord &record)
        : source(source), records(records), sum{record.largest, record.total} {
        this->source.set(record);
    }
    __device__ SegmentSum segment(uint32 s) const { return sum_of(records, s, source.segments()); }
    __device__ double probability(uint32 token) const {
        return probability_of(source.kept_number(token), segment(token / SEGMENT), source.scale, sum);
    }
    __device__ SegmentFactor factor(uint32 s) const {
        const SegmentSum found = segment(s);
        return {found.largest, sum.total && found.sum ? __double2float_rn(factor_of(found, source.scale, sum)) : 0.0f};
    }
    // Probabilities of a segment's tokens from what was loaded of it. ANY: tokens may be weights or forbidden, or be left out by min-p. Otherwise
    // tokens below a bound are left out and no others.
    template <bool ANY> __device__ void probabilities(uint32 s, const StoredNumbers &stored, const SegmentFactor &of, Numbers &numbers) const {
        if (ANY && !(of.factor > 0.0f)) {
            numbers = {};
            return;
        }
        if (ANY) source.take(s, stored, numbers);
        else stored.widen(source.row.type, numbers.x);
        const Scale scale = {ANY && source.scale.is_weights, source.scale.c};
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h) {
            if (!ANY && scale.has_powers(of.largest)) scale.weigh_powers(numbers.x[h], of.largest, source.kept.bound);
            else scale.weigh(numbers.x[h], of.largest);
        }
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h)
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) numbers.x[h][e] = __fmul_rn(numbers.x[h][e], of.factor);
    }
};

// Whether a token is accepted: u·q < r, with r = max(p − b·q, 0) / Z.
__device__ inline bool accepts(uint64 number, double p, double q, double b, double mass) {
    const double r = __ddiv_rn(fmax(__dsub_rn(p, __dmul_rn(b, q)), 0.0), mass);
    return __dmul_rn(unit(number), q) < r;
}

// What the warps of a CTA have of COUNT segments.
template <uint32 COUNT> struct RestShared {
    uint32 largest[COUNT][DRAW_WARPS];  // keys
    uint64 sum[COUNT][DRAW_WARPS];

    __device__ float largest_of(uint32 n) const {
        uint32 key = 0;
#pragma unroll
        for (uint32 w = 0; w < DRAW_WARPS; ++w) key = max(key, largest[n][w]);
        return number_of(key);
    }
    __device__ SegmentSum of(uint32 n) const {
        SegmentSum made = {largest_of(n), 0};
#pragma unroll
        for (uint32 w = 0; w < DRAW_WARPS; ++w) made.sum += sum[n][w];
        return made;
    }
};

// The same of one segment. Two take turns: one is written while slower warps read the other.
struct RestTurn {
    uint32 largest[DRAW_WARPS];  // keys
    uint64 sum[DRAW_WARPS];
};

// Segments that a CTA of a cluster sums at once.
constexpr uint32 RESTS_AT_ONCE = 2;

// Both arrays are kept twice: one half is written while slower warps, or other CTAs, may still read the other.
struct ClusterShared {
    RestShared<RESTS_AT_ONCE> rests[2];
    SegmentSum sums[2][MOST_SEGMENTS];  // what the segments have left, from all CTAs
};

// The CTAs of a cluster, which walk the same way and share the segments of each refusal.
struct Cluster {
    ClusterShared &shared;
    uint32 rank, ctas;
    uint32 refusals, rounds;

    __device__ explicit Cluster(ClusterShared &shared) : shared(shared), rank(cluster_rank()), ctas(cluster_ctas()), refusals(0), rounds(0) {}
};

// Draft tokens of one position, which the whole CTA tries in turn. ANY: as for probabilities, and a map may give the draft's columns their tokens.
template <bool ANY> struct Trial {
    DrawShared &shared;
    float (&taken)[ANY ? SEGMENT : 1];  // off a segment's tokens
    SegmentFactors (&factors)[MOST_SEGMENTS];  // from the first refusal on
    const SummedRow &target;
    SummedRow draft;
    bool has_draft;       // else the target's row stands for it
    uint32 *refused;      // tokens, in shared memory
    uint32 count;         // of them
    double b, mass;       // of r; mass is Z
    bool has_rest;        // max(p − b·q, 0) has mass: the token is drawn from it
    SegmentSum rest;      // thread s has what segment s of it sums to

    __device__ Trial(DrawShared &shared, float (&taken)[ANY ? SEGMENT : 1], SegmentFactors (&factors)[MOST_SEGMENTS], const SummedRow &target,
                     const SummedRow &draft, bool has_draft, uint32 *refused)
        : shared(shared), taken(taken), factors(factors), target(target), draft(draft), has_draft(has_draft), refused(refused), count(0), b(0.0),
          mass(1.0), has_rest(false), rest{minus_infinity(), 0} {}

    __device__ bool is_refused(uint32 token) const {
        for (uint32 n = 0; n < count; ++n)
            if (refused[n] == token) return true;
        return false;
    }
    // q of a token.
    __device__ double of_draft(uint32 token) const {
        if (!has_draft) return 1.0;
        const SamplingParams &p = draft.source.p;
        const uint32 column = p.column_of(token);
        return p.has_column(column, token) ? draft.probability(column) : 0.0;
    }
    __device__ bool accepts_token(uint32 token, uint64 number) const {
        return !is_refused(token) && accepts(number, target.probability(token), of_draft(token), b, mass);
    }
    // Goes on to the next token; false if no token has more of p than of what is taken off. All CTAs of the cluster do so.
    __device__ bool refuse(Cluster &cluster, uint32 token, bool without_replacement) {
        take_off(token, without_replacement);
        const uint32 segments = target.source.segments(), ctas = cluster.ctas, t = threadIdx.x;
        SegmentSum *sums = cluster.shared.sums[cluster.refusals++ % 2];
        for (uint32 s = cluster.rank; s < segments; s += RESTS_AT_ONCE * ctas) {
            RestShared<RESTS_AT_ONCE> &rests = cluster.shared.rests[cluster.rounds++ % 2];
            sum_rests(rests, s, ctas);
            const uint32 n = t / ctas, at = s + n * ctas;
            if (n >= RESTS_AT_ONCE || at >= segments) continue;
            const SegmentSum sum = rests.of(n);
            uint32 *to = reinterpret_cast<uint32 *>(&sums[at]);
            store_two_to(t % ctas, to, {__float_as_uint(sum.largest), 0});
            store_two_to(t % ctas, to + 2, {uint32(sum.sum), uint32(sum.sum >> 32)});
        }
        __syncthreads();
        cluster_arrive();
        cluster_wait();
        return set_rest(t < segments ? sums[t] : SegmentSum{minus_infinity(), 0});
    }
    // The three parts of `refuse`: takes the token off, sums what segments s, s + step, … have left, and takes these sums; thread s has that of
    // segment s.
    __device__ void take_off(uint32 token, bool without_replacement) {
        const uint32 t = threadIdx.x;
        __syncthreads();
        if (t == 0) refused[count] = token;
        if (count++ == 0) {
            factors[t].target = target.factor(t);
            if (has_draft) factors[t].draft = draft.factor(t);
        }
        __syncthreads();
        if (!has_draft) return;
        b = __dadd_rn(b, mass);
        if (!without_replacement) return;
        const SamplingParams &p = draft.source.p;
        const uint32 column = p.column_of(token);
        if (!p.has_column(column, token)) return;
        b = __dmul_rn(b, forget(column));
        factors[t].draft = draft.factor(t);
        __syncthreads();
    }
    // Sums what segments s, s + step, … have left, with one barrier for each: take(s, sum) is called by one thread.
    template <typename Take> __device__ void sum_each(RestTurn (&turns)[2], uint32 s, uint32 step, const Take &take_sum) const {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, segments = target.source.segments();
        const Scale scale = Scale::of(true, 1.0f);
        float before = 0.0f;  // what was the largest of segment s − step
        const auto take_turn = [&](const RestTurn &turn, uint32 of) {
            if (warp) return;
            const uint64 sum = warp_sum(lane < DRAW_WARPS ? turn.sum[lane] : 0);
            if (lane == 0) take_sum(of, SegmentSum{before, sum});
        };
        uint32 n = 0;
#pragma unroll 1
        for (; s < segments; s += step, ++n) {
            RestTurn &turn = turns[n % 2];
            StoredRest stored;
            request(s, stored);
            prefetch_segment(s + step);
            Numbers numbers;
            take(s, stored, numbers);
            const uint32 key = __reduce_max_sync(FULL_WARP, key_of(numbers.largest()));
            if (lane == 0) turn.largest[warp] = key;
            __syncthreads();
            if (n) take_turn(turns[(n - 1) % 2], s - step);
            before = number_of(__reduce_max_sync(FULL_WARP, turn.largest[lane % DRAW_WARPS]));
            uint64 sum = 0;
            if (before > 0.0f) sum = warp_sum(numbers.sum(0, scale, before) + numbers.sum(1, scale, before));
            if (lane == 0) turn.sum[warp] = sum;
        }
        __syncthreads();
        if (n) take_turn(turns[(n - 1) % 2], s - step);
    }
    template <uint32 COUNT> __device__ void sum_rests(RestShared<COUNT> &sums, uint32 s, uint32 step) const {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const Scale scale = Scale::of(true, 1.0f);
        StoredRest stored[COUNT];
        Numbers numbers[COUNT];
#pragma unroll
        for (uint32 n = 0; n < COUNT; ++n) request(s + n * step, stored[n]);
#pragma unroll
        for (uint32 n = 0; n < COUNT; ++n) {
            take(s + n * step, stored[n], numbers[n]);
            const uint32 key = __reduce_max_sync(FULL_WARP, key_of(numbers[n].largest()));
            if (lane == 0) sums.largest[n][warp] = key;
        }
        __syncthreads();
#pragma unroll
        for (uint32 n = 0; n < COUNT; ++n) {
            const float largest = sums.largest_of(n);
            uint64 sum = 0;
            if (largest > 0.0f) sum = warp_sum(numbers[n].sum(0, scale, largest) + numbers[n].sum(1, scale, largest));
            if (lane == 0) sums.sum[n][warp] = sum;
        }
        __syncthreads();
    }
    __device__ bool set_rest(const SegmentSum &mine) {
        rest = mine;
        uint64 before, share;
        const RowSum sum = sum_of_row(shared, rest, Scale::of(true, 1.0f), before, share);
        mass = __dmul_rn(double(sum.largest), __ddiv_rn(double(sum.total), double(ONE)));
        return has_rest = sum.total != 0;
    }
    // The token where none was accepted.
    __device__ uint32 draw_rest(uint64 number) const {
        if (has_rest) return draw(shared, *this, rest, Scale::of(true, 1.0f), number);
        return draw_from_row(shared, target.source, target.records, target.sum, number);
    }

    // The same from what segments have left, of which thread s has that of segment s.
    __device__ uint32 draw_rest_of(const SegmentSum &mine, uint64 number) {
        const Scale scale = Scale::of(true, 1.0f);
        uint64 before, share;
        const RowSum sum = sum_of_row(shared, mine, scale, before, share);
        has_rest = sum.total != 0;
        if (!has_rest) return draw_from_row(shared, target.source, target.records, target.sum, number);
        draw_segment(shared, mine, scale, sum, before, share, number);
        return draw_inside(shared, *this, scale, shared.segment, __uint_as_float(shared.word[0]), shared.target);
    }

    // Takes a column out of the draft's row; what part of the row is left.
    __device__ double forget(uint32 column) {
        const SamplingParams &p = draft.source.p;
        const Scale &scale = draft.source.scale;
        const uint32 s = column / SEGMENT;
        Numbers numbers;
        draft.source.load(s, numbers);
        for (uint32 n = 0; n < count; ++n) {
            const uint32 other = p.column_of(refused[n]);
            if (other / SEGMENT == s && p.has_column(other, refused[n])) numbers.set(other % SEGMENT, scale.none());
        }
        const SegmentSum sum = sum_segment(shared, numbers, scale);
        if (threadIdx.x == 0) draft.records[s].largest = sum.largest, draft.records[s].sum = sum.sum;
        __syncthreads();
        const RowSum whole = draft.sum;
        uint64 before, share;
        draft.sum = sum_of_row(shared, draft.segment(threadIdx.x), scale, before, share);
        if (draft.sum.total == 0) return 0.0;
        return __ddiv_rn(__dmul_rn(double(draft.sum.total), double(scale.weight(draft.sum.largest, whole.largest))), double(whole.total));
    }

    // Weights max(p − b·q, 0) of a segment's tokens, 0 for those that were refused.
    __device__ void load(uint32 s, Numbers &numbers) const {
        StoredRest stored;
        request(s, stored);
        take(s, stored, numbers);
    }

private:
    // The rows of target and draft as they lie in memory.
    struct StoredRest {
        StoredNumbers target, draft;
    };
    __device__ bool is_mapped() const { return ANY && draft.source.p.draft_map.data; }
    __device__ void request(uint32 s, StoredRest &stored) const {
        stored.target.load(target.source.row, s, target.source.scale.is_weights);
        if (has_draft && !is_mapped()) stored.draft.load(draft.source.row, s, draft.source.scale.is_weights);
    }
    // Brings a segment of each row into the L2 cache, a line a thread.
    __device__ void prefetch_segment(uint32 s) const {
        if (threadIdx.x < DRAW_THREADS / 2) prefetch_lines(target.source.row, s);
        else if (has_draft && !is_mapped()) prefetch_lines(draft.source.row, s);
    }
    __device__ void take(uint32 s, const StoredRest &stored, Numbers &numbers) const {
        Numbers off;
        if (!has_draft) off = {};
        else if (is_mapped()) load_mapped(s, off);
        else take_adjacent(s, stored.draft, off);
        for (uint32 n = 0; n < count; ++n)
            if (refused[n] / SEGMENT == s) off.set(refused[n] % SEGMENT, infinity());
        target.probabilities<ANY>(s, stored.target, factors[s].target, numbers);
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h)
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) numbers.x[h][e] = fmaxf(__fsub_rn(numbers.x[h][e], off.x[h][e]), 0.0f);
    }
    // b·q of a segment's tokens, whose columns have their numbers.
    __device__ void take_adjacent(uint32 s, const StoredNumbers &stored, Numbers &off) const {
        draft.probabilities<ANY>(s, stored, factors[s].draft, off);
        const float times = __double2float_rn(b);
        if (times == 1.0f) return;
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h)
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) off.x[h][e] = __fmul_rn(times, off.x[h][e]);
    }
    // The same where a map gives the columns their tokens.
    __device__ void load_mapped(uint32 s, Numbers &off) const {
        const SamplingParams &p = draft.source.p;
        const uint32 begin = s * SEGMENT, first = p.column_of(begin), end = p.column_of(int64(begin) + SEGMENT);
        const float times = __double2float_rn(b);
        __syncthreads();
        for (uint32 n = threadIdx.x; n < SEGMENT; n += DRAW_THREADS) taken[n] = 0.0f;
        __syncthreads();
        for (uint32 n = first / SEGMENT; n * SEGMENT < end; ++n) {
            const SegmentFactor of = factors[n].draft;
            if (!(of.factor > 0.0f)) continue;
            for (uint32 column = max(first, n * SEGMENT) + threadIdx.x; column < min(end, (n + 1) * SEGMENT); column += DRAW_THREADS) {
                const int64 at = int64(as<int32>(p.draft_map.at(column))) - begin;
                // Only a map that does not ascend has others here.
                if (at >= 0 && at < SEGMENT)
                    taken[at] = __fmul_rn(times, __fmul_rn(draft.source.scale.weight(draft.source.kept_number(column), of.largest), of.factor));
            }
        }
        __syncthreads();
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h)
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) off.x[h][e] = taken[Numbers::place(h) + e];
    }
};
