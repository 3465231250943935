// The end of a request of vwd_verify_sample: the walk over its decided rows, the cut, and the results.
#pragma once

#include "sample/turn.cuh"

constexpr uint32 MOST_ROWS = 65;  // of the target in a request

// The threads that end a request, one at least for each of its rows: those of a CTA, or of a warp.
struct CtaTeam {
    DrawShared &shared;

    __device__ static uint32 thread() { return threadIdx.x; }
    __device__ static void sync() { __syncthreads(); }
    __device__ uint32 least(uint32 value) const { return cta_min(shared, value); }
    __device__ uint32 any(uint32 bits) const { return cta_or(shared, bits); }
};
struct WarpTeam {
    __device__ static uint32 thread() { return threadIdx.x % WARP; }
    __device__ static void sync() { __syncwarp(); }
    __device__ uint32 least(uint32 value) const { return __reduce_min_sync(FULL_WARP, value); }
    __device__ uint32 any(uint32 bits) const { return __reduce_or_sync(FULL_WARP, bits); }
};

// The rows of a request that were decided.
template <typename Team> struct Decided {
    const Team team;
    const SampleParams &p;
    const Turn &turn;
    SegmentRecord *segments;
    const RowRecord *all;   // the draft's rows included
    const RowRecord *rows;  // the target's, in shared memory
    int64 drafted;          // the draft token of the row with this thread's number, if it may be looked at

    // Thread r loads row r of `rows`.
    __device__ Decided(const Team &team, const SampleParams &p, const Turn &turn, uint32 first, RowRecord *rows, int64 drafted)
        : team(team), p(p), turn(turn), segments(p.sampling.segments + uint64(first) * p.sampling.per_row.value), all(p.sampling.rows + first),
          rows(rows), drafted(drafted) {
        if (team.thread() <= p.gamma) rows[team.thread()] = all[team.thread()];
        team.sync();
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

// Accepts or refuses every row at once. REJECTS: the rule may be rejection.
template <bool REJECTS, typename Team> __device__ inline Walked walk(const Decided<Team> &decided) {
    const SampleParams &p = decided.p;
    const Turn &turn = decided.turn;
    const uint32 r = decided.team.thread(), steps = turn.steps();
    bool accepts = false, stops = false;
    if (r < steps) {
        const int64 token = decided.drafted;
        const RowRecord &row = decided.rows[r];
        stops = turn.is_stop(p, r, token);
        if (token >= 0 && token < p.sampling.tokens && !(row.status & (NO_TOKEN | NO_ROW))) {
            if (!REJECTS || turn.is_greedy() || p.rule == COUPLED) {
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
    const uint32 end = decided.team.least(r >= steps ? NO_END : accepts ? stops ? 2 * r + 1 : NO_END : 2 * r);
    return {min(end / 2 + end % 2, steps), end % 2 != 0};
}

// Cuts what a request commits, and writes it. `next` gives the token of row walked.accepted, and may add to the status. ANY: with log-probabilities and
// rows of a draft.
template <bool ANY, typename Team, typename Next>
__device__ inline void conclude(const Decided<Team> &decided, const Walked &walked, const Next &next) {
    const SampleParams &p = decided.p;
    const Turn &turn = decided.turn;
    const RowRecord *rows = decided.rows;
    const uint32 r = decided.team.thread(), accepted = walked.accepted;
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
    if (ANY && p.sampling.draft_rows && r < looked_at && decided.tries(r)) of_row |= decided.all[p.gamma + 1 + r].status & SAW_NAN;
    status |= decided.team.any(of_row);
    const uint32 i = turn.request;
    if (r <= p.gamma) {
        const int64 mine = r >= n ? -1 : r < accepted ? decided.drafted : token;
        if (p.committed) store_token(p.committed.at(i, r), p.wide & WIDE_NEXT, mine);
        if (ANY && p.logprobs) {
            float ln = 0.0f;
            if (mine >= 0) {
                const Source target = turn.source(p, r);
                ln = ln_probability(target.number(uint32(mine)), target.plain(), rows[r]);
            }
            as<float>(p.logprobs.at(i, r)) = ln;
        }
    }
    if (r) return;
    store_token(p.next_token.at(i), p.wide & WIDE_NEXT, token);
    if (p.accepted) as<int32>(p.accepted.at(i)) = accepted;
    if (p.committed_len) as<int32>(p.committed_len.at(i)) = n;
    if (p.finish) as<uint8>(p.finish.at(i)) = reason;
    if (p.status) as<uint32>(p.status.at(i)) = status;
}
