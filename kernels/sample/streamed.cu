// Many rows of sampled requests, by warps that stream their segments (variant streamed): segment_stream.cuh has a warp's work on segments, sample.cu
// what follows where it is a launch of its own.
//
// Where nothing but tokens is wanted, and they are greedy or coupled, sample_streamed does all in one launch: the warp that completes a row decides it,
// and the warp that completes a request ends it, while others go on. A launch for that would begin when the last segment is recorded.
//
//   for each row of the warp: record its segments ─ count them ─ [last of the row: sum ─ segment ─ group ─ strip ─ token ─ record ─ count]
//                                                                └ [last of the request: walk ─ cut ─ results]
//
// targets: compute_90

#include "common/segment_stream.cuh"
#include "sample/end.cuh"

extern __shared__ __align__(128) char stages[];

// Records segments `first` to `past` of row n of the launch, if it is looked at.
template <bool ANY> __device__ inline void record_part(SegmentStream &stream, const SampleParams &p, const Turn &turn, uint32 n, uint32 slot, uint32 first,
                                                       uint32 past, bool leaves_sums) {
    if (!turn.needs(p, slot)) return;
    bool is_there;
    const Source source = turn.source(p, slot, is_there);
    if (is_there) stream.record<ANY>({source, n, turn.is_greedy(), p.logprobs && slot <= p.gamma, leaves_sums}, first, past);
}

template <bool ANY> __device__ inline void stream_rows(const SampleParams &p) {
    __shared__ Barrier arrived[STREAM_STAGES * STREAM_WARPS];
    SegmentStream stream(p.sampling, stages, arrived);
    wait_for_previous_kernel();
    allow_next_kernel();  // which reads arguments before it waits: they are final now
    const SamplingParams &sampling = p.sampling;
    stream.run([&](uint32 n, uint32 first, uint32 past) {
        const uint32 i = sampling.per_request.divide(n), slot = n - i * sampling.per_request.value;
        const Turn turn(p, sampling.first + i);
        record_part<ANY>(stream, p, turn, n, slot, first, past, false);
    });
}

extern "C" __global__ void __launch_bounds__(STREAM_WARPS * WARP, 1) sample_segments_streamed(const __grid_constant__ SampleParams p) {
    stream_rows<false>(p);
}
extern "C" __global__ void __launch_bounds__(STREAM_WARPS * WARP, 1) sample_segments_streamed_any(const __grid_constant__ SampleParams p) {
    stream_rows<true>(p);
}

// --- one launch ------------------------------------------------------------------------------------------------------------------

// The token that is drawn from a segment, whose groups have these sums. Where numbers change during the call it is some token of the row.
__device__ inline uint32 draw_from_groups(const Source &source, const uint64 *sums, const Drawn &drawn) {
    const auto first_of = [](uint32 lanes) { return lanes ? __ffs(lanes) - 1 : 0; };
    const uint32 lane = threadIdx.x % WARP;
    const uint64 sum = lane < GROUPS ? sums[lane] : 0, through = warp_sum_through(sum);
    const uint32 group = first_of(__ballot_sync(FULL_WARP, drawn.target < through));
    const uint64 target = drawn.target - __shfl_sync(FULL_WARP, through - sum, group);
    // A lane for each strip of the group.
    const uint32 first = drawn.segment * SEGMENT + (group * WARP + lane) * STRIP;
    AnyStrip strip;
    strip.load(source.row, first, false);
    float x[STRIP];
    strip.widen(source.row.type, x);
    source.clean(first, x);
    uint32 some;
    const uint64 own = source.scale.sum_and_weigh(x, drawn.largest, some), up_to = warp_sum_through(own);
    const uint32 holder = first_of(__ballot_sync(FULL_WARP, target < up_to));
    const uint32 token = first + pick_weight(x, some, target - (up_to - own));
    return min(__shfl_sync(FULL_WARP, token, holder), source.row.tokens - 1);
}

// Decides row n of the launch from the records of its segments.
__device__ inline RowRecord decide(const SampleParams &p, const Turn &turn, uint32 n, uint32 slot) {
    const SamplingParams &sampling = p.sampling;
    const uint64 segments = uint64(n) * sampling.per_row.value;
    const SegmentRecord *records = sampling.segments + segments;
    const SegmentRecord first = record_of_lane(records, sampling.per_row.value);
    const bool draws = !turn.is_greedy();
    const uint64 number = draws ? turn.number(p, slot, DRAW) : 0;
    bool is_there;
    Source source = turn.source(p, slot, is_there);
    if (!is_there) return {minus_infinity(), minus_infinity(), 0, NO_ROW, 0, 0};
    // The compiler leaves out what others need.
    source.scale.is_weights = source.filters = false;
    LaneShare own;
    RowRecord found = sum_row(source, first, records, !draws, false, own);
    if (!draws || found.status & NO_TOKEN) return found;
    const Drawn drawn = find_segment(source, records, {found.largest, found.total}, own, number);
    found.token = draw_from_groups(source, sampling.sums_of(segments + drawn.segment), drawn);
    return found;
}

extern "C" __global__ void __launch_bounds__(STREAM_WARPS * WARP, 1) sample_streamed(const __grid_constant__ SampleParams p) {
    __shared__ Barrier arrived[STREAM_STAGES * STREAM_WARPS];
    __shared__ RowRecord rows[STREAM_WARPS][WARP];
    begin(p);
    const SamplingParams &sampling = p.sampling;
    SegmentStream stream(sampling, stages, arrived);
    uint32 *const of_rows = sampling.counters + sampling.per_request.divide(sampling.launch_rows);
    wait_for_previous_kernel();
    allow_next_kernel();
    stream.run([&](uint32 n, uint32 first, uint32 past) {
        const uint32 per_row = sampling.per_row.value, count = sampling.per_request.value, i = sampling.per_request.divide(n), slot = n - i * count;
        // What the end of the row and the request asks for is here by then.
        const Turn turn(p, sampling.first + i);
        const int64 drafted = turn.drafted(p, threadIdx.x % WARP);
        record_part<false>(stream, p, turn, n, slot, first, past, true);
        // Rows that are not looked at are counted, too: settings that change during a call spoil its results, and no later call's.
        if (!warp_completes(of_rows + n, past - first, per_row, n * per_row + past == stream.end)) return;
        SaidRow said = SaidRow::of(0, NO_ROW);
        if (turn.needs(p, slot)) {
            const RowRecord found = decide(p, turn, n, slot);
            said = SaidRow::of(found.token, found.status);
        }
        say_row(p, turn, i, slot, said, drafted, rows[threadIdx.x / WARP]);
    });
}
