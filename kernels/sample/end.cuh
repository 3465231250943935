// The end of a request of vwd_verify_sample: the walk over its decided rows, the cut, and the results.
#pragma once

#include "sample/turn.cuh"

constexpr uint32 MOST_ROWS = 65;  // of the target in a request

// The threads that end a request: those of a CTA, or of a warp. They take its rows in turn.
struct CtaTeam {
    static constexpr uint32 THREADS = DRAW_THREADS;
    static constexpr bool HAS_ALL = THREADS >= MOST_ROWS;  // it has a thread for each row
    DrawShared &shared;

    __device__ static uint32 thread() { return threadIdx.x; }
    __device__ static void sync() { __syncthreads(); }
    __device__ uint32 least(uint32 value) const { return cta_min(shared, value); }
    __device__ uint32 any(uint32 bits) const { return cta_or(shared, bits); }
};
struct WarpTeam {
    static constexpr uint32 THREADS = WARP;
    static constexpr bool HAS_ALL = false;
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

    __device__ Decided(const Team &team, const SampleParams &p, const Turn &turn, uint32 first, const RowRecord *rows, int64 drafted)
        : team(team), p(p), turn(turn), segments(p.sampling.segments + uint64(first) * p.sampling.per_row.value), all(p.sampling.rows + first),
          rows(rows), drafted(drafted) {}
    // Loads the rows that were recorded in scratch.
    __device__ void load(RowRecord *rows) const {
        for (uint32 r = team.thread(); r <= p.gamma; r += Team::THREADS) rows[r] = all[r];
        team.sync();
    }
    __device__ int64 drafted_of(uint32 r) const { return r < Team::THREADS ? drafted : turn.drafted(p, r); }
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
    // The first row that ends the walk: 2r without its draft token, 2r + 1 with it, which is a stop token.
    constexpr uint32 NO_END = 0xfffffffe;
    const uint32 steps = turn.steps();
    uint32 end = NO_END;
    for (uint32 r = decided.team.thread(); r < steps; r += Team::THREADS) {
        const int64 token = decided.drafted_of(r);
        const RowRecord &row = decided.rows[r];
        bool accepts = false;
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
        if (!accepts) end = min(end, 2 * r);
        else if (turn.is_stop(p, r, token)) end = min(end, 2 * r + 1);
        if (Team::HAS_ALL) break;
    }
    end = decided.team.least(end);
    return {min(end / 2 + end % 2, steps), end % 2 != 0};
}

// Cuts what a request commits, and writes it. `next` gives the token of row walked.accepted, and may add to the status. ANY: with log-probabilities and
// rows of a draft.
template <bool ANY, typename Team, typename Next>
__device__ inline void conclude(const Decided<Team> &decided, const Walked &walked, const Next &next) {
    const SampleParams &p = decided.p;
    const Turn &turn = decided.turn;
    const RowRecord *rows = decided.rows;
    const uint32 accepted = walked.accepted;
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
    uint32 of_rows = 0;
    for (uint32 r = decided.team.thread(); r < looked_at; r += Team::THREADS) {
        of_rows |= rows[r].status;
        if (ANY && p.sampling.draft_rows && decided.tries(r)) of_rows |= decided.all[p.gamma + 1 + r].status & SAW_NAN;
        if (Team::HAS_ALL) break;
    }
    status |= decided.team.any(of_rows);
    const uint32 i = turn.request;
    for (uint32 r = decided.team.thread(); r <= p.gamma; r += Team::THREADS) {
        const int64 mine = r >= n ? -1 : r < accepted ? decided.drafted_of(r) : token;
        if (p.committed) store_token(p.committed.at(i, r), p.wide & WIDE_NEXT, mine);
        if (ANY && p.logprobs) {
            float ln = 0.0f;
            if (mine >= 0) {
                const Source target = turn.source(p, r);
                ln = ln_probability(target.number(uint32(mine)), target.plain(), rows[r]);
            }
            as<float>(p.logprobs.at(i, r)) = ln;
        }
        if (Team::HAS_ALL) break;
    }
    if (decided.team.thread()) return;
    store_token(p.next_token.at(i), p.wide & WIDE_NEXT, token);
    if (p.accepted) as<int32>(p.accepted.at(i)) = accepted;
    if (p.committed_len) as<int32>(p.committed_len.at(i)) = n;
    if (p.finish) as<uint8>(p.finish.at(i)) = reason;
    if (p.status) as<uint32>(p.status.at(i)) = status;
}

// --- requests whose rows are decided by warps in one launch -----------------------------------------------------------------------

// What a row gives, in the word that is its counter in scratch, which is 0 before and after: a token below 2^20, its status, and that it is known.
struct SaidRow {
    static constexpr uint32 IS_KNOWN = 0x80000000;
    uint32 word;

    __device__ static SaidRow of(uint32 token, uint32 status) { return {IS_KNOWN | status << 24 | min(token, 0xfffffu)}; }
    __device__ bool is_known() const { return word & IS_KNOWN; }
    __device__ RowRecord record() const { return {minus_infinity(), minus_infinity(), word & 0xfffff, word >> 24 & 0x7f, 0, 0}; }
};

// Says what a row of the launch's request i gives; the last of the request's rows ends it. Called by a warp, with room for the records of all rows in
// shared memory.
//
// Nothing is fenced: a row's word has all that is needed of it. The word that a row counts in may be seen before the word of the row is, and so the warp
// that is last asks for words until they are known: they are on their way. It asks a first time while it counts.
__device__ inline void say_row(const SampleParams &p, const Turn &turn, uint32 i, uint32 slot, SaidRow own, int64 drafted, RowRecord *rows) {
    const SamplingParams &sampling = p.sampling;
    const uint32 lane = threadIdx.x % WARP, count = sampling.per_request.value;
    uint32 *const counter = sampling.counters + i;
    uint32 *const words = sampling.counters + sampling.per_request.divide(sampling.launch_rows) + i * count;
    SaidRow said = own;
    if (count > 1) {
        uint32 before = 0;
        if (lane == 0) {
            store_relaxed(words + slot, own.word);
            before = add_relaxed(counter, 1);
        }
        if (lane < count && lane != slot) said.word = load_relaxed(words + lane);
        if (__shfl_sync(FULL_WARP, before, 0) + 1 != count) return;
        // The word that lane 0 wrote is made zero by another lane: after it.
        __syncwarp();
    }
    for (uint32 r = lane; r < count; r += WARP) {
        if (r >= WARP) said = r == slot ? own : SaidRow{0};
        while (!said.is_known()) said.word = load_relaxed(words + r);
        rows[r] = said.record();
        if (count > 1) store_relaxed(words + r, 0);
    }
    if (lane == 0 && count > 1) store_relaxed(counter, 0);
    __syncwarp();
    const Decided decided(WarpTeam(), p, turn, i * count, rows, drafted);
    const Walked walked = walk<false>(decided);
    conclude<false>(decided, walked, [&](uint32 &) -> int64 { return rows[walked.accepted].token; });
}
