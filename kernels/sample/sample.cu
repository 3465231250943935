// Verification of sampled draft tokens, and sampling: the mathematics is in src/ops/sample/mod.rs, that of a draw in src/ops/draw.
//
// Bytes: each row of logits is read once, (γ+1)·V of a request and γ·Vd of its draft rows. What follows reads from the L2 cache: a segment for
// each draw, the groups of tokens that a filter may keep, and one row of target and draft for a refused draft token.
//
// Where nothing but the tokens of unfiltered rows is wanted, cluster.cu does all in one launch if they are few, and streamed.cu if they are many.
//
// Work split: sample_segments has a CTA for some segments of 4096 tokens of a row. It writes each segment's largest number and the sums of its
// weights relative to that; where filters are given, the largest numbers of its groups of 256 tokens in place of sums. sample_rows has a CTA
// for each row: it finds the sum of the row, and the token that a greedy or coupled row gives. sample_rows_filtered does so where filters are
// given, and finds their bounds first. The last CTA of a request walks its rows, draws, cuts, and writes the results. But if rejection
// sampling has refused a draft token, it leaves that to sample_residual (residual.cu).
//
//   sample_segments   load 32 numbers a thread ─ largest of the CTA ─ weights, sums ─ record
//   sample_rows       records ─ [bounds of filters, records anew] ─ sum of the row ─ segment ─ strip ─ token ─ record
//                     └ last of a request: accept or refuse every row at once ─ first refusal ─ [note it, end] ─ [token] ─ cut ─ results
//
// On entry: γ ≤ 64; 1 ≤ V, Vd ≤ 2^20; a counter of each request is 0; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "sample/end.cuh"

template <bool ANY> __device__ inline void record_rows(const SampleParams &p) {
    __shared__ SegmentShared shared;
    begin(p);
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

// FILTERS: rows may have some. If p.skips_rows, CTAs take them in the order row of its request, request: a row past the end of its request's walk is then often
// known to be that, and is not decided. Nothing waits for it; what a skipped row gives has no part in the walk. ANY: rows may be weights, have log-probabilities,
// and be verified by rejection; the compiler leaves that out elsewhere, half of the code or more.
template <bool FILTERS, bool ANY> __device__ inline void take_row(const SampleParams &p, DrawShared &shared, FilterShared *filter) {
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
        if (is_there && !is_past) found = decide_row<FILTERS>(shared, filter, source, n, turn.is_greedy(), ANY && p.logprobs && slot <= p.gamma, draws, number);
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

template <bool ANY> __device__ inline void take_filtered_row(const SampleParams &p) {
    __shared__ DrawShared shared;
    __shared__ FilterShared filter;
    take_row<true, ANY>(p, shared, &filter);
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 3) sample_rows(const __grid_constant__ SampleParams p) {
    __shared__ DrawShared shared;
    take_row<false, false>(p, shared, nullptr);
}
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 3) sample_rows_any(const __grid_constant__ SampleParams p) {
    __shared__ DrawShared shared;
    take_row<false, true>(p, shared, nullptr);
}
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) sample_rows_filtered(const __grid_constant__ SampleParams p) {
    take_filtered_row<false>(p);
}
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) sample_rows_filtered_any(const __grid_constant__ SampleParams p) {
    take_filtered_row<true>(p);
}
