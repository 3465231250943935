// Verification of sampled draft tokens, and sampling: the mathematics is in src/ops/sample/mod.rs, that of a draw in src/ops/draw.
//
// Bytes: each row of logits is read once, (γ+1)·V of a request and γ·Vd of its draft rows. What follows reads from the L2 cache: a segment for
// each draw, the groups of tokens that a filter may keep, and one row of target and draft for a refused draft token.
//
// Work split: sample_segments has a CTA for some segments of 4096 tokens of a row. It writes each segment's largest number and the sums of its
// weights relative to that; where filters are given, the largest numbers of its groups of 256 tokens in place of sums. sample_rows has a CTA
// for each row: it finds the sum of the row, and the token that a greedy or coupled row gives. sample_rows_filtered does so where filters are
// given, and finds their bounds first. The last CTA of a request walks its rows, draws, cuts, and writes the results. But if rejection
// sampling has refused a draft token, it leaves that to sample_residual: a CTA for some segments sums what the target has more than the
// draft, and the last one of the request draws, cuts and writes.
//
//   sample_segments   load 32 numbers a thread ─ largest of the CTA ─ weights, sums ─ record
//   sample_rows       records ─ [bounds of filters, records anew] ─ sum of the row ─ segment ─ strip ─ token ─ record
//                     └ last of a request: accept or refuse every row at once ─ first refusal ─ [note it, end] ─ [token] ─ cut ─ results
//   sample_residual   segments of target and draft ─ difference, sum
//                     └ last of a request: segment ─ strip ─ token ─ cut ─ results
//
// On entry: γ ≤ 64; 1 ≤ V, Vd ≤ 2^20; a counter of each request is 0; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "sample/turn.cuh"

template <bool ANY> __device__ inline void record_rows(const SampleParams &p) {
    __shared__ SegmentShared shared;
    wait_for_previous_kernel();
    allow_next_kernel();  // which reads arguments before it waits: they are final now
    const SamplingParams &sampling = p.sampling;
    const uint32 n = sampling.per_row_ctas.divide(blockIdx.x), cta = blockIdx.x - n * sampling.per_row_ctas.value;
    const uint32 i = sampling.per_request.divide(n), slot = n - i * sampling.per_request.value;
    const Turn turn(p, sampling.first + i);
    if (!turn.needs(p, slot)) return;
    bool is_there;
    const Source source = turn.source(p, slot, is_there);
    if (is_there) record_segments<ANY>(shared, source, n, cta, turn.is_greedy(), p.logprobs && slot <= p.gamma);
}

extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, SEGMENT_CTAS) sample_segments(const __grid_constant__ SampleParams p) {
    record_rows<false>(p);
}
extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, ANY_SEGMENT_CTAS) sample_segments_any(const __grid_constant__ SampleParams p) {
    record_rows<true>(p);
}

// --- rows ------------------------------------------------------------------------------------------------------------------------

constexpr uint32 MOST_ROWS = 65;  // of the target in a request

// The rows of a request that were decided.
struct Decided {
    const SampleParams &p;
    const Turn &turn;
    SegmentRecord *segments;
    const RowRecord *all;   // the draft's rows included
    const RowRecord *rows;  // the target's, in shared memory
    int64 drafted;          // the draft token of the row with this thread's number, if it may be looked at

    // Thread r loads row r of `rows`.
    __device__ Decided(const SampleParams &p, const Turn &turn, uint32 first, RowRecord (&rows)[MOST_ROWS], int64 drafted)
        : p(p), turn(turn), segments(p.sampling.segments + uint64(first) * p.sampling.per_row.value), all(p.sampling.rows + first), rows(rows),
          drafted(drafted) {
        if (threadIdx.x <= p.gamma) rows[threadIdx.x] = all[threadIdx.x];
        __syncthreads();
    }
    __device__ SummedRow row(uint32 slot) const {
        return {turn.source(p, slot), segments + slot * p.sampling.per_row.value, slot <= p.gamma ? rows[slot] : all[slot]};
    }
    // Whether rejection sampling tries the draft token of this row.
    __device__ bool tries(uint32 r) const {
        if (turn.is_greedy() || p.rule != REJECTION || r >= turn.steps() || rows[r].status & (NO_TOKEN | NO_ROW)) return false;
        const int64 token = turn.draft(p, r);
        return token >= 0 && token < p.sampling.tokens;
    }
};

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

// How far a request goes without another token.
struct Walked {
    uint32 accepted;  // draft tokens
    bool is_stopped;  // the last of them is a stop token
};

// Accepts or refuses every row at once.
__device__ inline Walked walk(const Decided &decided, DrawShared &shared) {
    const SampleParams &p = decided.p;
    const Turn &turn = decided.turn;
    const uint32 r = threadIdx.x, steps = turn.steps();
    bool accepts = false, stops = false;
    if (r < steps) {
        const int64 token = decided.drafted;
        const RowRecord &row = decided.rows[r];
        stops = turn.is_stop(p, r, token);
        if (token >= 0 && token < p.sampling.tokens && !(row.status & (NO_TOKEN | NO_ROW))) {
            if (turn.is_greedy() || p.rule == COUPLED) {
                accepts = row.token == token;
            } else {
                double of_draft = 1.0;
                if (p.sampling.draft_rows) {
                    const uint32 column = p.sampling.column_of(token);
                    of_draft = p.sampling.has_column(column, token) ? decided.row(p.gamma + 1 + r).probability(column) : 0.0;
                }
                accepts = ::accepts(turn.number(p, r, ACCEPT), decided.row(r).probability(uint32(token)), of_draft, 0.0, 1.0);
            }
        }
    }
    // The first row that ends the walk: 2r without its draft token, 2r + 1 with it, which is a stop token.
    constexpr uint32 NO_END = 0xfffffffe;
    const uint32 end = cta_min(shared, r >= steps ? NO_END : accepts ? stops ? 2 * r + 1 : NO_END : 2 * r);
    return {min(end / 2 + end % 2, steps), end % 2 != 0};
}

// Cuts what a request commits, and writes it. `next` gives the token of row walked.accepted, and may add to the status.
template <typename Next> __device__ inline void conclude(const Decided &decided, DrawShared &shared, const Walked &walked, const Next &next) {
    const SampleParams &p = decided.p;
    const Turn &turn = decided.turn;
    const RowRecord *rows = decided.rows;
    const uint32 r = threadIdx.x, accepted = walked.accepted;
    // Rows that count for the status: those that committed, and the one that ended the walk.
    uint32 n = accepted, reason = GOES_ON, looked_at = accepted, status = 0;
    int64 token = -1;
    if (walked.is_stopped) {
        reason = STOPPED;
    } else if (accepted < turn.remaining) {
        looked_at = accepted + 1;
        if (!(rows[accepted].status & (NO_TOKEN | NO_ROW))) {
            token = next(status);
            n = accepted + 1;
            if (turn.is_stop(p, accepted, token)) reason = STOPPED;
        }
    }
    if (reason == GOES_ON && n && n == turn.remaining) reason = FULL;
    // Rows of the draft count where they were looked at.
    uint32 of_row = r < looked_at ? rows[r].status : 0;
    if (p.sampling.draft_rows && r < looked_at && decided.tries(r)) of_row |= decided.all[p.gamma + 1 + r].status & SAW_NAN;
    status |= cta_or(shared, of_row);
    const uint32 i = turn.request;
    if (r <= p.gamma) {
        const int64 mine = r >= n ? -1 : r < accepted ? decided.drafted : token;
        if (p.committed) store_token(p.committed.at(i, r), p.wide & WIDE_NEXT, mine);
        if (p.logprobs) {
            float ln = 0.0f;
            if (mine >= 0) {
                const Source target = turn.source(p, r);
                ln = ln_probability(target.number(uint32(mine)), target.plain(), rows[r]);
            }
            as<float>(p.logprobs.at(i, r)) = ln;
        }
    }
    if (threadIdx.x) return;
    store_token(p.next_token.at(i), p.wide & WIDE_NEXT, token);
    if (p.accepted) as<int32>(p.accepted.at(i)) = accepted;
    if (p.committed_len) as<int32>(p.committed_len.at(i)) = n;
    if (p.finish) as<uint8>(p.finish.at(i)) = reason;
    if (p.status) as<uint32>(p.status.at(i)) = status;
}

template <bool FILTERS> __device__ inline void take_row(const SampleParams &p, DrawShared &shared, FilterShared *filter) {
    __shared__ RowRecord decided_rows[MOST_ROWS];
    const SamplingParams &sampling = p.sampling;
    const uint32 n = blockIdx.x, i = sampling.per_request.divide(n), count = sampling.per_request.value, slot = n - i * count;
    const Turn turn(p, sampling.first + i);
    const bool needs = turn.needs(p, slot), draws = needs && p.rule == COUPLED && !turn.is_greedy();
    const uint64 number = draws ? turn.number(p, slot, DRAW) : 0;
    const int64 drafted = turn.drafted(p);
    bool is_there;
    Source source = turn.source(p, needs ? slot : 0, is_there);
    allow_next_kernel();
    wait_for_previous_kernel();
    if (needs) {
        RowRecord found = {minus_infinity(), minus_infinity(), 0, NO_ROW, 0, 0};
        if (is_there) found = decide_row<FILTERS>(shared, filter, source, n, turn.is_greedy(), p.logprobs && slot <= p.gamma, draws, number);
        if (threadIdx.x == 0) sampling.rows[n] = found;
    }
    if (!is_last_of_request(shared, sampling.counters[i], count)) return;
    const Decided decided(p, turn, n - slot, decided_rows, drafted);
    const Walked walked = walk(decided, shared);
    const uint32 row = walked.accepted;
    if (p.rule == REJECTION && p.gamma) {
        const bool is_refused = !walked.is_stopped && decided.tries(row);
        if (threadIdx.x == 0) sampling.refused[i] = is_refused ? row : NO_REFUSAL;
        if (is_refused) return;
    }
    conclude(decided, shared, walked, [&](uint32 &) -> int64 {
        if (turn.is_greedy() || p.rule == COUPLED) return decided.rows[row].token;
        const SummedRow target = decided.row(row);
        return draw_from_row(shared, target.source, target.records, target.sum, turn.number(p, row, DRAW));
    });
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 3) sample_rows(const __grid_constant__ SampleParams p) {
    __shared__ DrawShared shared;
    take_row<false>(p, shared, nullptr);
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 1) sample_rows_filtered(const __grid_constant__ SampleParams p) {
    __shared__ DrawShared shared;
    __shared__ FilterShared filter;
    take_row<true>(p, shared, &filter);
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) sample_residual(const __grid_constant__ SampleParams p) {
    __shared__ DrawShared shared;
    __shared__ float taken[SEGMENT];
    __shared__ uint32 refused[1];
    __shared__ RestShared<1> rests;
    __shared__ RowRecord decided_rows[MOST_ROWS];
    allow_next_kernel();
    wait_for_previous_kernel();
    const SamplingParams &sampling = p.sampling;
    const uint32 i = sampling.rest_ctas.divide(blockIdx.x), row = sampling.refused[i];
    if (row == NO_REFUSAL) return;
    const uint32 first = i * sampling.per_request.value;
    const bool has_rows = sampling.draft_rows.data;
    const Turn turn(p, sampling.first + i);
    const auto summed = [&](uint32 slot) -> SummedRow {
        return {turn.source(p, slot), sampling.segments + uint64(first + slot) * sampling.per_row.value, sampling.rows[first + slot]};
    };
    const SummedRow target = summed(row);
    Trial trial(shared, taken, target, summed(has_rows ? p.gamma + 1 + row : row), has_rows, refused);
    trial.take_off(uint32(turn.draft(p, row)), false);
    const auto segments = [&] { return (sampling.tokens + SEGMENT - 1) / SEGMENT; };
    const auto rest = [&](uint32 s) -> SegmentSum & { return sampling.rest[i * sampling.per_row.value + s]; };
#pragma unroll 1
    for (uint32 s = blockIdx.x - i * sampling.rest_ctas.value; s < segments(); s += sampling.rest_ctas.value) {
        trial.sum_rests(rests, s, 1);
        if (threadIdx.x == 0) rest(s) = rests.of(0);
        __syncthreads();
    }
    if (!is_last_of_request(shared, sampling.counters[i], sampling.rest_ctas.value)) return;
    // What ends the request is asked for again: registers are few while segments are summed.
    const Turn ending(p, sampling.first + i);
    const Decided decided(p, ending, first, decided_rows, ending.drafted(p));
    conclude(decided, shared, {row, false}, [&](uint32 &status) -> int64 {
        if (!trial.set_rest(threadIdx.x < segments() ? rest(threadIdx.x) : SegmentSum{minus_infinity(), 0})) status |= NO_RESIDUAL;
        return trial.draw_rest(ending.number(p, row, DRAW));
    });
}
