// Verification of sampled draft tokens, and sampling: the mathematics is in src/ops/sample/mod.rs, that of a draw in src/ops/draw.
//
// Bytes: each row of logits is read once, (γ+1)·V of a request and γ·Vd of its draft rows. What follows reads from the L2 cache: a segment for
// each draw, a whole row for each pass of a filter, and one row of a request for the residual.
//
// Work split: sample_segments has a CTA for each segment of 4096 tokens of each row. It writes the segment's largest number and the sums of its
// weights relative to that. sample_rows has a CTA for each row: it finds the bounds of filters, the sum of the row, and the token that a
// greedy or coupled row gives. The last CTA of a request walks its rows, draws where rejection sampling has to, cuts, and writes the results.
//
//   sample_segments   load 16 numbers a thread ─ largest of the CTA ─ weights, sums ─ record
//   sample_rows       records ─ [bounds by digits of keys, records anew] ─ sum of the row ─ segment ─ strip ─ token ─ record
//                     └ last of a request: accept or refuse every row at once ─ first refusal ─ [residual] ─ cut ─ results
//
// On entry: γ ≤ 64; 1 ≤ V, Vd ≤ 2^20; a counter of each request is 0; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "sample/params.cuh"

__device__ inline int64 integer(const char *p, bool is_wide) { return is_wide ? as<int64>(p) : int64(as<int32>(p)); }

// What a request asks for.
struct Turn {
    uint32 request;   // in the batch
    uint32 len;       // draft tokens
    int64 remaining;  // tokens
    uint32 least;     // rows that cannot commit a stop token
    bool stops;       // stop tokens count
    float temperature;

    __device__ Turn(const SampleParams &p, uint32 i) : request(i) {
        len = p.draft_lens.data ? min(max(as<int32>(p.draft_lens.at(i)), 0), int32(p.gamma)) : p.gamma;
        remaining = p.remaining.data ? max(as<int32>(p.remaining.at(i)), 0) : int64(1) << 40;
        least = p.min_remaining.data ? max(as<int32>(p.min_remaining.at(i)), 0) : 0;
        stops = p.stops && !(p.ignore_stop.data && as<uint8>(p.ignore_stop.at(i)));
        temperature = p.rule == GREEDY ? 0.0f : p.temperature.data ? as<float>(p.temperature.at(i)) : 1.0f;
    }
    __device__ bool is_greedy() const { return !(temperature >= 1e-5f); }
    // The draft tokens that may be looked at.
    __device__ uint32 steps() const { return uint32(min(int64(len), remaining)); }
    // Whether the row in this slot may be looked at: the target's rows come first, then those of the draft.
    __device__ bool needs(const SampleParams &p, uint32 slot) const {
        if (slot <= p.gamma) return slot <= len && slot < remaining;
        return !is_greedy() && slot - p.gamma - 1 < steps();
    }
    __device__ int64 stop(const SampleParams &p, uint32 n) const { return integer(p.stop.at(request, n), p.wide & WIDE_STOP); }
    __device__ bool is_stop(const SampleParams &p, uint32 row, int64 token) const {
        if (!stops || token < 0 || row < least) return false;
        for (uint32 n = 0; n < p.stops; ++n)
            if (stop(p, n) == token) return true;
        return false;
    }
    __device__ int64 draft(const SampleParams &p, uint32 row) const { return integer(p.draft.at(request, row), p.wide & WIDE_DRAFT); }
    __device__ uint64 seed(const SampleParams &p) const { return as<uint64>(p.seeds.at(request)); }
    __device__ int64 position(const SampleParams &p, uint32 row) const {
        return int64(uint64(integer(p.positions.at(request), p.wide & WIDE_POSITION)) + row);
    }
};

// The numbers of a row, without what cannot be drawn. Slots count the target's rows, then those of the draft.
struct Source {
    const SampleParams &p;
    const Turn &turn;
    Row row;
    Scale scale;       // at the request's temperature
    bool forbids;      // stop tokens are dropped
    bool is_there;
    bool filters;
    Kept kept;

    __device__ Source(const SampleParams &p, const Turn &turn, uint32 slot) : p(p), turn(turn) {
        const bool is_draft = slot > p.gamma;
        is_there = true;
        if (is_draft) {
            row = {p.draft_rows.at(turn.request, slot - p.gamma - 1), p.draft_rows.step[2], p.draft_tokens, p.draft_type, p.draft_adjacent != 0};
        } else {
            int64 n = turn.request, r = slot;
            if (p.is_flat) {
                r = p.target_begin.data ? integer(p.target_begin.at(turn.request), p.wide & WIDE_BEGIN) : turn.request;
                // No sum of a number of rows and a slot overflows.
                is_there = r < p.target_rows && r >= -int64(slot) && (r += slot) < p.target_rows;
                if (!is_there) r = 0;
            }
            row = {p.target.at(n, r), p.target.step[2], p.tokens, p.target_type, p.target_adjacent != 0};
        }
        scale = Scale::of(p.flags & (is_draft ? DRAFT_WEIGHTS : TARGET_WEIGHTS), turn.temperature);
        forbids = !is_draft && slot < turn.least && turn.stops;
        kept = {p.flags & TEMPERATURE_LAST ? plain() : scale, 0.0f, 0.0f, minus_infinity()};
        filters = false;
        // Probabilities of the draft are what it was drawn from.
        if (turn.is_greedy() || (is_draft && scale.is_weights)) return;
        if (p.min_p.data) kept.min_p = as<float>(p.min_p.at(turn.request));
        filters = kept.min_p > 0.0f || top_k() || top_p() < 1.0f;
    }
    __device__ Scale plain() const { return Scale::of(scale.is_weights, 1.0f); }
    // 0: off.
    __device__ uint32 top_k() const {
        const int32 k = p.top_k.data ? as<int32>(p.top_k.at(turn.request)) : 0;
        return k > 0 && uint32(k) < row.tokens ? k : 0;
    }
    // 1: off.
    __device__ float top_p() const {
        const float top_p = p.top_p.data ? as<float>(p.top_p.at(turn.request)) : 1.0f;
        return top_p < 1.0f ? top_p : 1.0f;
    }
    __device__ uint32 segments() const { return (row.tokens + SEGMENT - 1) / SEGMENT; }

    // Without filters; whether there was something that is no number.
    __device__ bool load_all(uint32 s, Numbers &numbers) const {
        numbers.load(row, s, scale.none());
        const bool found = numbers.clean(scale);
        if (forbids)
            for (uint32 n = 0; n < p.stops; ++n) {
                const int64 at = turn.stop(p, n) - int64(s) * SEGMENT;
                if (at >= 0 && at < SEGMENT) numbers.set(uint32(at), scale.none());
            }
        return found;
    }
    __device__ void load(uint32 s, Numbers &numbers) const {
        load_all(s, numbers);
        if (filters) kept.apply(numbers, scale.none());
    }
    // The number of one token, without filters.
    __device__ float number(uint32 token) const {
        const float x = row.at(token);
        if (!scale.is_number(x)) return scale.none();
        if (forbids)
            for (uint32 n = 0; n < p.stops; ++n)
                if (turn.stop(p, n) == token) return scale.none();
        return x;
    }
    // As the filters of a row that was decided leave it.
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

extern "C" __global__ void __launch_bounds__(DRAW_THREADS) sample_segments(const __grid_constant__ SampleParams p) {
    __shared__ DrawShared shared;
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 n = p.per_row.divide(blockIdx.x), s = blockIdx.x - n * p.per_row.value;
    const uint32 i = p.per_request.divide(n), slot = n - i * p.per_request.value;
    const Turn turn(p, p.first + i);
    if (!turn.needs(p, slot)) return;
    const Source source(p, turn, slot);
    if (!source.is_there || s >= source.segments()) return;
    Numbers numbers;
    const bool saw = source.load_all(s, numbers);
    const uint32 found = __syncthreads_or(saw);
    const float largest = cta_largest(shared, numbers.largest());
    uint32 first = 0;
    uint64 sum = 0, plain_sum = 0;
    if (largest > source.scale.none()) {
        if (turn.is_greedy()) {
            first = s * SEGMENT + cta_min(shared, numbers.first(largest));
        } else if (!source.filters) {
            sum = cta_sum(shared, numbers.sum(0, source.scale, largest) + numbers.sum(1, source.scale, largest));
        }
        if (p.logprobs.data && slot <= p.gamma) {
            const Scale plain = source.plain();
            const bool same = sum && plain.c == source.scale.c;
            plain_sum = same ? sum : cta_sum(shared, numbers.sum(0, plain, largest) + numbers.sum(1, plain, largest));
        }
    }
    if (threadIdx.x == 0) p.segments[blockIdx.x] = {largest, first | (found ? SAW_NAN << 31 : 0), sum, plain_sum, 0};
}

// --- rows ------------------------------------------------------------------------------------------------------------------------

struct RowsShared {
    DrawShared draw;
    bool is_last;
    float largest[MOST_SEGMENTS];  // of the residual's segments
    uint64 sum[MOST_SEGMENTS];
    union {
        uint64 counts[DIGITS];
        float of_draft[SEGMENT];  // probabilities of a segment's tokens in the draft
    };
};

// Decides one row, but for what rejection sampling draws.
__device__ inline void decide_row(const SampleParams &p, RowsShared &shared, const Turn &turn, uint32 slot, SegmentRecord *records,
                                  RowRecord &record) {
    Source source(p, turn, slot);
    RowRecord found = {minus_infinity(), minus_infinity(), 0, source.is_there ? 0 : NO_ROW, 0, 0};
    if (source.is_there) {
        const uint32 segments = source.segments(), s = threadIdx.x;
        SegmentRecord mine = {minus_infinity(), 0, 0, 0, 0};
        if (s < segments) mine = records[s];
        found.largest = cta_largest(shared.draw, mine.largest);
        found.status |= cta_or(shared.draw, mine.first >> 31);
        if (!(found.largest > source.scale.none())) {
            found.status |= NO_TOKEN;
        } else {
            uint64 before, share;
            if (p.logprobs.data && slot <= p.gamma)
                found.plain_total = sum_of_row(shared.draw, {mine.largest, mine.plain_sum}, source.plain(), before, share).total;
            if (source.filters) {
                Kept &kept = source.kept;
                kept.largest = found.largest;
                const bool is_short = source.row.type != FLOAT32;
                if (const uint32 k = source.top_k())
                    kept.bound = reaching<false>(shared.draw, shared.counts, source, segments, kept.scale, kept.largest, 1.0f, k, is_short);
                if (source.top_p() < 1.0f)
                    kept.bound = reaching<true>(shared.draw, shared.counts, source, segments, kept.scale, kept.largest, source.top_p(), 0, is_short);
                found.bound = kept.bound;
                for (uint32 n = 0; n < segments; ++n) {
                    Numbers numbers;
                    source.load(n, numbers);
                    const float largest = cta_largest(shared.draw, numbers.largest());
                    uint64 sum = 0;
                    if (largest > source.scale.none())
                        sum = cta_sum(shared.draw, numbers.sum(0, source.scale, largest) + numbers.sum(1, source.scale, largest));
                    if (threadIdx.x == n) {
                        mine.largest = largest, mine.sum = sum;
                        records[n].largest = largest, records[n].sum = sum;
                    }
                }
            }
            const SegmentSum segment = {mine.largest, mine.sum};
            if (turn.is_greedy()) {
                found.token = cta_min(shared.draw, s < segments && mine.largest == found.largest ? mine.first & 0x7fffffffu : 0xffffffffu);
            } else {
                found.total = sum_of_row(shared.draw, segment, source.scale, before, share).total;
                if (p.rule == COUPLED)
                    found.token = draw(shared.draw, source, segment, source.scale, uniform(turn.seed(p), turn.position(p, slot), DRAW, 0));
            }
        }
    }
    if (threadIdx.x == 0) record = found;
}

// The column of draft_rows for a token, or the number of columns if there is none.
__device__ inline uint32 column_of(const SampleParams &p, int64 token) {
    if (!p.draft_map.data) return token < p.draft_tokens ? uint32(token) : p.draft_tokens;
    uint32 low = 0, high = p.draft_tokens;
    while (low < high) {
        const uint32 middle = (low + high) / 2;
        if (as<int32>(p.draft_map.at(middle)) < token) low = middle + 1;
        else high = middle;
    }
    return low;
}
__device__ inline bool has_column(const SampleParams &p, uint32 column, int64 token) {
    return column < p.draft_tokens && (!p.draft_map.data || as<int32>(p.draft_map.at(column)) == token);
}

// A row of the draft that was decided.
struct DraftRow {
    Source source;
    const SegmentRecord *records;
    RowSum sum;

    __device__ DraftRow(const SampleParams &p, const Turn &turn, uint32 row, const SegmentRecord *records, const RowRecord &record)
        : source(p, turn, p.gamma + 1 + row), records(records), sum{record.largest, record.total} {
        source.set(record);
    }
    __device__ double probability(uint32 column) const {
        return probability_of(source.kept_number(column), sum_of(records, column / SEGMENT, source.segments()), source.scale, sum);
    }
    // As the residual has it.
    __device__ float rounded(uint32 column) const {
        const SegmentSum segment = sum_of(records, column / SEGMENT, source.segments());
        if (sum.total == 0 || segment.sum == 0) return 0.0f;
        return __fmul_rn(source.scale.weight(source.kept_number(column), segment.largest), __double2float_rn(factor_of(segment, source.scale, sum)));
    }
};

// Weights max(p − q, 0) of the tokens of a row.
struct Residual {
    const SampleParams &p;
    const Source &target;
    const SegmentRecord *records;
    RowSum sum;
    const DraftRow &draft;
    bool has_draft;  // else q is 1 at `token`
    int64 token;
    RowsShared &shared;

    __device__ void load(uint32 s, Numbers &numbers) const {
        __syncthreads();
        const uint32 begin = s * SEGMENT;
        for (uint32 n = threadIdx.x; n < SEGMENT; n += DRAW_THREADS) shared.of_draft[n] = !has_draft && begin + n == token ? 1.0f : 0.0f;
        __syncthreads();
        if (has_draft) {
            const uint32 first = column_of(p, begin), end = column_of(p, int64(begin) + SEGMENT);
            for (uint32 column = first + threadIdx.x; column < end; column += DRAW_THREADS) {
                const int64 at = (p.draft_map.data ? int64(as<int32>(p.draft_map.at(column))) : int64(column)) - begin;
                // Only a map that does not ascend has others here.
                if (at >= 0 && at < SEGMENT) shared.of_draft[at] = draft.rounded(column);
            }
        }
        __syncthreads();
        const SegmentSum segment = sum_of(records, s, target.segments());
        const float factor = segment.sum ? __double2float_rn(factor_of(segment, target.scale, sum)) : 0.0f;
        target.load(s, numbers);
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h)
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) {
                const float w = segment.sum ? target.scale.weight(numbers.x[h][e], segment.largest) : 0.0f;
                numbers.x[h][e] = w > 0.0f ? fmaxf(__fsub_rn(__fmul_rn(w, factor), shared.of_draft[Numbers::place(h) + e]), 0.0f) : 0.0f;
            }
    }
};

// The token after a refusal, or after a draft's end: the whole CTA draws it.
__device__ inline uint32 draw_next(const SampleParams &p, RowsShared &shared, const Turn &turn, uint32 row, const SegmentRecord *segments,
                                   const RowRecord *rows, bool is_refused, int64 token, uint32 &status) {
    Source target(p, turn, row);
    target.set(rows[row]);
    const SegmentRecord *records = segments + row * p.per_row.value;
    const RowSum sum = {rows[row].largest, rows[row].total};
    const uint64 number = uniform(turn.seed(p), turn.position(p, row), DRAW, 0);
    if (is_refused) {
        const uint32 slot = p.gamma + 1 + row;
        const DraftRow draft(p, turn, row, segments + slot * p.per_row.value, rows[p.draft_rows.data ? slot : row]);
        const Residual residual = {p, target, records, sum, draft, p.draft_rows.data != nullptr, token, shared};
        const Scale scale = Scale::of(true, 1.0f);
        for (uint32 s = 0; s < target.segments(); ++s) {
            Numbers numbers;
            residual.load(s, numbers);
            const float largest = cta_largest(shared.draw, numbers.largest());
            const uint64 sum = largest > 0.0f ? cta_sum(shared.draw, numbers.sum(0, scale, largest) + numbers.sum(1, scale, largest)) : 0;
            if (threadIdx.x == s) shared.largest[s] = largest, shared.sum[s] = sum;
        }
        const uint32 s = threadIdx.x;
        const SegmentSum segment = s < target.segments() ? SegmentSum{shared.largest[s], shared.sum[s]} : SegmentSum{minus_infinity(), 0};
        uint64 before, share;
        if (sum_of_row(shared.draw, segment, scale, before, share).total) return draw(shared.draw, residual, segment, scale, number);
        status |= NO_RESIDUAL;
    }
    return draw(shared.draw, target, sum_of(records, threadIdx.x, target.segments()), target.scale, number);
}

__device__ inline void store_token(char *p, bool is_wide, int64 token) {
    if (is_wide) as<int64>(p) = token;
    else as<int32>(p) = int32(token);
}

// ln p of a token whose number is x, at temperature 1 and without filters.
__device__ inline float ln_probability(float x, const Scale &plain, const RowRecord &row) {
    // log2 of the total: its exponent, and an approximation for what is left, from 1 to 2.
    const int64 bits = __double_as_longlong(double(row.plain_total)), fraction = (int64(1) << 52) - 1;
    const int32 exponent = int32(bits >> 52) - 1023;
    const float rest = __log2f(__double2float_rn(__longlong_as_double((bits & fraction) | int64(1023) << 52)));
    const double ln2 = 0.693147180559945309, ln_total = (exponent - 40 + double(rest)) * ln2;
    if (row.largest == infinity()) return x == row.largest ? float(-ln_total) : minus_infinity();
    if (plain.is_weights) return float(double(__log2f(__fdiv_rn(x, row.largest))) * ln2 - ln_total);
    return float((double(x) - double(row.largest)) - ln_total);
}

// Walks the rows of a request, cuts and writes.
__device__ inline void finish(const SampleParams &p, RowsShared &shared, const Turn &turn, const SegmentRecord *segments, const RowRecord *rows) {
    const uint32 r = threadIdx.x, steps = turn.steps();
    bool accepts = false;
    if (r < steps) {
        const int64 token = turn.draft(p, r);
        const RowRecord row = rows[r];
        if (token >= 0 && token < p.tokens && !(row.status & (NO_TOKEN | NO_ROW))) {
            if (turn.is_greedy() || p.rule == COUPLED) {
                accepts = row.token == token;
            } else {
                Source target(p, turn, r);
                target.set(row);
                const SegmentSum segment = sum_of(segments + r * p.per_row.value, uint32(token) / SEGMENT, target.segments());
                const double of_target = probability_of(target.kept_number(uint32(token)), segment, target.scale, {row.largest, row.total});
                double of_draft = 1.0;
                if (p.draft_rows.data) {
                    const uint32 slot = p.gamma + 1 + r, column = column_of(p, token);
                    const DraftRow draft(p, turn, r, segments + slot * p.per_row.value, rows[slot]);
                    of_draft = has_column(p, column, token) ? draft.probability(column) : 0.0;
                }
                accepts = __dmul_rn(unit(uniform(turn.seed(p), turn.position(p, r), ACCEPT, 0)), of_draft) < of_target;
            }
        }
    }
    const uint32 k = min(cta_min(shared.draw, r < steps && !accepts ? r : 0xffffffffu), steps);
    const bool ends_here = r < k && turn.is_stop(p, r, turn.draft(p, r));
    const uint32 stop = cta_min(shared.draw, ends_here ? r : 0xffffffffu);
    // Rows that count for the status: those that committed, and the one that ended the walk.
    uint32 accepted = k, n = k, reason = GOES_ON, decided = k, status = 0;
    int64 next = -1;
    if (stop < k) {
        accepted = n = decided = stop + 1, reason = STOPPED;
    } else if (k < turn.remaining) {
        decided = k + 1;
        if (!(rows[k].status & (NO_TOKEN | NO_ROW))) {
            const bool draws = !turn.is_greedy() && p.rule == REJECTION;
            const int64 token = k < turn.len ? turn.draft(p, k) : -1;
            next = draws ? draw_next(p, shared, turn, k, segments, rows, token >= 0 && token < p.tokens, token, status) : rows[k].token;
            n = k + 1;
            if (turn.is_stop(p, k, next)) reason = STOPPED;
        }
    }
    if (reason == GOES_ON && n && n == turn.remaining) reason = FULL;
    // Rows of the draft count where they were looked at.
    const bool is_rejection = !turn.is_greedy() && p.rule == REJECTION && p.draft_rows.data;
    uint32 of_row = r < decided ? rows[r].status : 0;
    if (is_rejection && r < min(decided, steps) && !(rows[r].status & (NO_TOKEN | NO_ROW))) {
        const int64 token = turn.draft(p, r);
        if (token >= 0 && token < p.tokens) of_row |= rows[p.gamma + 1 + r].status & SAW_NAN;
    }
    status |= cta_or(shared.draw, of_row);
    const uint32 i = turn.request;
    if (r <= p.gamma) {
        const int64 token = r >= n ? -1 : r < accepted ? turn.draft(p, r) : next;
        if (p.committed.data) store_token(p.committed.at(i, r), p.wide & WIDE_NEXT, token);
        if (p.logprobs.data) {
            float ln = 0.0f;
            if (token >= 0) {
                const Source target(p, turn, r);
                ln = ln_probability(target.number(uint32(token)), target.plain(), rows[r]);
            }
            as<float>(p.logprobs.at(i, r)) = ln;
        }
    }
    if (threadIdx.x) return;
    store_token(p.next_token.at(i), p.wide & WIDE_NEXT, next);
    if (p.accepted.data) as<int32>(p.accepted.at(i)) = accepted;
    if (p.committed_len.data) as<int32>(p.committed_len.at(i)) = n;
    if (p.finish.data) as<uint8>(p.finish.at(i)) = reason;
    if (p.status.data) as<uint32>(p.status.at(i)) = status;
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 1) sample_rows(const __grid_constant__ SampleParams p) {
    __shared__ RowsShared shared;
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 n = blockIdx.x, i = p.per_request.divide(n), slot = n - i * p.per_request.value, rows = p.per_request.value;
    const Turn turn(p, p.first + i);
    if (turn.needs(p, slot)) decide_row(p, shared, turn, slot, p.segments + uint64(n) * p.per_row.value, p.rows[n]);
    if (rows > 1) {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            shared.is_last = atomicAdd(p.counters + i, 1u) + 1 == rows;
            if (shared.is_last) {
                __threadfence();  // after what the other CTAs did
                p.counters[i] = 0;
            }
        }
        __syncthreads();
        if (!shared.is_last) return;
        __threadfence();
    } else {
        __syncthreads();
    }
    finish(p, shared, turn, p.segments + uint64(n - slot) * p.per_row.value, p.rows + (n - slot));
}
