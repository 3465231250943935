// Rows of vwd_verify_sample that have no filter but top-p, after their segments were recorded (sample.cu): what sample_rows_filtered does, by other passes.
//
// Bytes: each row is read once, and some thousand strips of it twice. Where rows are few they come from the L2 cache.
//
//   sample_rows_top_p   records ─ [bound of top-p (top_p.cuh) ─ records anew] ─ sum of the row ─ segment ─ strip ─ token ─ record
//                       └ last of a request: as in sample.cu
//
// On entry: as in sample.cu; top_k and min_p are not given, no tokens are forbidden, rows are logits that begin on 16 bytes and lie side by side, and
// neither log-probabilities, draft rows nor rejection ask for more.
//
// targets: compute_90

#include "common/top_p.cuh"
#include "sample/rows.cuh"

constexpr uint32 TOP_P_BYTES = 104 << 10;
static_assert(sizeof(TopPShared) <= TOP_P_BYTES);

extern __shared__ __align__(128) char memory[];

// As decide_filtered_row.
__device__ inline RowRecord decide_row_by_top_p(DrawShared &shared, TopPShared &top_p_shared, Source &source, uint32 n, bool draws, uint64 number) {
    const uint64 first = uint64(n) * source.p.per_row.value;
    SegmentRecord *records = source.p.segments + first;
    const uint32 segments = source.segments(), s = threadIdx.x;
    SegmentRecord mine = {minus_infinity(), 0, 0, 0, 0};
    if (s < segments) mine = records[s];
    RowRecord found = {cta_largest(shared, mine.largest), minus_infinity(), 0, cta_or(shared, mine.first >> 31), 0, 0};
    if (!(found.largest > minus_infinity())) return row_without_token(found.largest, found.status);
    source.kept.largest = found.largest;
    TopP<Source>(shared, top_p_shared, source, source.p.groups + first * GROUPS).run();
    found.bound = source.kept.bound;
    const SegmentSum segment = top_p_shared.segment(s);
    if (s < segments) records[s].largest = segment.largest, records[s].sum = segment.sum;
    uint64 before, share;
    const RowSum row = sum_of_row(shared, segment, source.scale, before, share);
    found.total = row.total;
    if (!draws) return found;
    draw_segment(shared, segment, source.scale, row, before, share, number);
    found.token = draw_inside(shared, source, source.scale, shared.segment, __uint_as_float(shared.word[0]), shared.target);
    return found;
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) sample_rows_top_p(const __grid_constant__ SampleParams p) {
    __shared__ DrawShared shared;
    take_row<true, false>(p, shared, [&](Source &source, uint32 n, bool is_greedy, bool wants_plain, bool draws, uint64 number) {
        if (!source.filters) return decide_row<false>(shared, nullptr, source, n, is_greedy, wants_plain, draws, number);
        return decide_row_by_top_p(shared, *reinterpret_cast<TopPShared *>(memory), source, n, draws, number);
    });
}
