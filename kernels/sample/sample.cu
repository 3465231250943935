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
// given, and finds their bounds first; top_p.cu has a kernel for top-p alone. The last CTA of a request walks its rows, draws, cuts, and writes
// the results. But if rejection sampling has refused a draft token, it leaves that to sample_residual (residual.cu).
//
//   sample_segments   load 32 numbers a thread ─ largest of the CTA ─ weights, sums ─ record
//   sample_rows       records ─ [bounds of filters, records anew] ─ sum of the row ─ segment ─ strip ─ token ─ record
//                     └ last of a request: accept or refuse every row at once ─ first refusal ─ [note it, end] ─ [token] ─ cut ─ results
//
// On entry: γ ≤ 64; 1 ≤ V, Vd ≤ 2^20; a counter of each request is 0; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "sample/rows.cuh"

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

template <bool ANY> __device__ inline void take_plain_row(const SampleParams &p) {
    __shared__ DrawShared shared;
    take_row<false, ANY>(p, shared, [&](Source &source, uint32 n, bool is_greedy, bool wants_plain, bool draws, uint64 number) {
        return decide_row<false>(shared, nullptr, source, n, is_greedy, wants_plain, draws, number);
    });
}
template <bool ANY> __device__ inline void take_filtered_row(const SampleParams &p) {
    __shared__ DrawShared shared;
    __shared__ FilterShared filter;
    take_row<true, ANY>(p, shared, [&](Source &source, uint32 n, bool is_greedy, bool wants_plain, bool draws, uint64 number) {
        return decide_row<true>(shared, &filter, source, n, is_greedy, wants_plain, draws, number);
    });
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 3) sample_rows(const __grid_constant__ SampleParams p) {
    take_plain_row<false>(p);
}
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 3) sample_rows_any(const __grid_constant__ SampleParams p) {
    take_plain_row<true>(p);
}
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) sample_rows_filtered(const __grid_constant__ SampleParams p) {
    take_filtered_row<false>(p);
}
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) sample_rows_filtered_any(const __grid_constant__ SampleParams p) {
    take_filtered_row<true>(p);
}
