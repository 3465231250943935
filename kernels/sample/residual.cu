// The token in place of a refused draft token: the mathematics is in src/ops/draw/rejection.rs. sample.cu says which row was refused.
//
// Bytes: one row of the target and one of the draft for each request, 2·V numbers.
//
// Work split: some CTAs for each request, which take the segments of its two rows in turn. Each sums what the target has more than the draft in its
// segments. The last one of a request draws, cuts and writes.
//
// sample_residual takes logits of which tokens below a bound are left out and no others, sample_residual_any all rows.
//
//   load 16 numbers a thread of each row ─ weights ─ difference ─ largest of the CTA ─ sum ─ …
//   └ last of a request: segment ─ strip ─ token ─ cut ─ results
//
// On entry: as for sample.cu, which ran before.
//
// targets: compute_80, compute_90

#include "sample/end.cuh"

template <bool ANY> __device__ inline void take_residual(const SampleParams &p) {
    __shared__ DrawShared shared;
    __shared__ float taken[ANY ? SEGMENT : 1];
    __shared__ SegmentFactors factors[MOST_SEGMENTS];
    __shared__ uint32 refused[1];
    __shared__ RestTurn turns[2];
    __shared__ RowRecord decided_rows[MOST_ROWS];
    begin(p);
    allow_next_kernel();
    wait_for_previous_kernel();
    const SamplingParams &sampling = p.sampling;
    const uint32 ctas = sampling.rest_ctas.value, i = sampling.rest_ctas.divide(blockIdx.x), row = sampling.refused[i];
    if (row == NO_REFUSAL) return;
    const uint32 first = i * sampling.per_request.value;
    const bool has_rows = sampling.draft_rows.data;
    const Turn turn(p, sampling.first + i);
    const auto summed = [&](uint32 slot) -> SummedRow {
        Source source = turn.source(p, slot);
        if (!ANY) source.scale.is_weights = source.kept.scale.is_weights = false, source.forbidden.count = 0, source.kept.min_p = 0.0f;
        return {source, sampling.segments + uint64(first + slot) * sampling.per_row.value, sampling.rows[first + slot]};
    };
    const SummedRow target = summed(row);
    Trial<ANY> trial(shared, taken, factors, target, summed(has_rows ? p.gamma + 1 + row : row), has_rows, refused);
    trial.take_off(uint32(turn.draft(p, row)), false);
    SegmentSum *const rest = sampling.rest + i * sampling.per_row.value;
    trial.sum_each(turns, blockIdx.x - i * ctas, ctas, [&](uint32 s, const SegmentSum &sum) { rest[s] = sum; });
    if (!is_last_of_request(shared, sampling.counters[i], ctas)) return;
    const uint32 segments = (sampling.tokens + SEGMENT - 1) / SEGMENT;
    const SegmentSum mine = threadIdx.x < segments ? rest[threadIdx.x] : SegmentSum{minus_infinity(), 0};
    // What ends the request is asked for again: registers are few while segments are summed.
    const Turn ending(p, sampling.first + i);
    const Decided decided(CtaTeam{shared}, p, ending, first, decided_rows, ending.drafted(p, threadIdx.x));
    decided.load(decided_rows);
    conclude<true>(decided, {row, false}, [&](uint32 &status) -> int64 {
        const uint32 token = trial.draw_rest_of(mine, ending.number(p, row, DRAW));
        if (!trial.has_rest) status |= NO_RESIDUAL;
        return token;
    });
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 3) sample_residual(const __grid_constant__ SampleParams p) { take_residual<false>(p); }
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) sample_residual_any(const __grid_constant__ SampleParams p) { take_residual<true>(p); }
