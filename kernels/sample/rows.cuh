// The CTA of a row that was recorded: it decides the row, and the last of a request ends it (sample.cu, top_p.cu).
#pragma once

#include "sample/end.cuh"

// Where the walk of the launch's request i ends, as far as its rows have said, in a word that is 0 before and after: MOST_ROWS less the first row past which it
// does not go, or 0. It is the word of the request's first row among the counters.
struct End {
    uint32 *word;

    __device__ End(const SamplingParams &p, uint32 i) : word(p.counters + p.per_request.divide(p.launch_rows) + i * p.per_request.value) {}
    __device__ uint32 ask() const { return load_relaxed(word); }
    __device__ static bool is_before(uint32 slot, uint32 said) { return said && slot > MOST_ROWS - said; }
    __device__ void say(uint32 slot) const {
        asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(word), "r"(MOST_ROWS - slot) : "memory");
    }
};

// `decide` gives the record of a row of the launch: (source, number of the row, is greedy, wants log-probabilities, draws, random number).
//
// FILTERS: rows may have some. If p.skips_rows, CTAs take them in the order row of its request, request: a row past the end of its request's walk is then often
// known to be that, and is not decided. Nothing waits for it; what a skipped row gives has no part in the walk. ANY: rows may be weights, have log-probabilities,
// and be verified by rejection; the compiler leaves that out elsewhere, half of the code or more.
template <bool FILTERS, bool ANY, typename Decide> __device__ inline void take_row(const SampleParams &p, DrawShared &shared, const Decide &decide) {
    __shared__ RowRecord decided_rows[MOST_ROWS];
    begin(p);
    const SamplingParams &sampling = p.sampling;
    const uint32 count = sampling.per_request.value, requests = sampling.per_request.divide(sampling.launch_rows);
    const bool may_skip = FILTERS && p.skips_rows;
    const uint32 i = may_skip ? blockIdx.x % requests : sampling.per_request.divide(blockIdx.x);
    const uint32 slot = may_skip ? blockIdx.x / requests : blockIdx.x - i * count, n = i * count + slot;
    const uint32 said = may_skip && threadIdx.x == 0 ? End(sampling, i).ask() : 0;
    const Turn turn(p, sampling.first + i);
    const bool needs = turn.needs(p, slot), draws = needs && p.rule == COUPLED && !turn.is_greedy();
    const uint64 number = draws ? turn.number(p, slot, DRAW) : 0;
    const int64 drafted = turn.drafted(p, threadIdx.x);
    bool is_there;
    Source source = turn.source(p, needs ? slot : 0, is_there);
    if (!ANY) source.scale.is_weights = source.kept.scale.is_weights = false;
    allow_next_kernel();
    wait_for_previous_kernel();
    // One thread has asked: all go the same way.
    bool is_past = false;
    if (may_skip) {
        __shared__ bool ends_before;
        if (threadIdx.x == 0) ends_before = End::is_before(slot, said);
        __syncthreads();
        is_past = ends_before;
    }
    if (needs) {
        RowRecord found = {minus_infinity(), minus_infinity(), 0, NO_ROW, 0, 0};
        if (is_there && !is_past) found = decide(source, n, turn.is_greedy(), ANY && p.logprobs && slot <= p.gamma, draws, number);
        if (threadIdx.x == 0) sampling.rows[n] = found;
        // The thread that has the row's draft token.
        if (may_skip && slot <= p.gamma && threadIdx.x == slot) {
            const bool goes_on = drafted == int64(found.token) && !(found.status & (NO_TOKEN | NO_ROW)) && !turn.is_stop(p, slot, drafted);
            if (!goes_on) End(sampling, i).say(slot);
        }
    }
    if (!is_last_of_request(shared, sampling.counters[i], count)) return;
    if (may_skip && threadIdx.x == 0) store_relaxed(End(sampling, i).word, 0);
    const Decided decided(CtaTeam{shared}, p, turn, n - slot, decided_rows, drafted);
    decided.load(decided_rows);
    const Walked walked = walk<ANY>(decided);
    const uint32 row = walked.accepted;
    if (ANY && p.rule == REJECTION && p.gamma) {
        const bool is_refused = !walked.is_stopped && decided.tries(row);
        if (threadIdx.x == 0) sampling.refused[i] = is_refused ? row : NO_REFUSAL;
        if (is_refused) return;
    }
    conclude<ANY>(decided, walked, [&](uint32 &) -> int64 {
        if (!ANY || turn.is_greedy() || p.rule == COUPLED) return decided.rows[row].token;
        const SummedRow target = decided.row(row);
        return draw_from_row(shared, target.source, target.records, target.sum, turn.number(p, row, DRAW));
    });
}
