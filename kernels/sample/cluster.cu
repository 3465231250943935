// Verification of sampled draft tokens, and sampling, in one launch (variant cluster, compute capability 9.0): rows of logits without filters, whose
// tokens are greedy or coupled. The same bits as by sample.cu, which takes all others.
//
// Bytes: each row is read once, into shared memory. Two launches cost more where rows are few: the second loads records and a segment of each
// row anew, and waits for each.
//
// Work split: a cluster of CTAs has a row. A CTA has two, four or eight segments, and a team of its warps each of them. Every warp tells all CTAs of the
// cluster what it has found. Each CTA then knows the row's sum; the one that has the drawn token's segment finds the token. The last row of a
// request ends it.
//
//   copy of a segment ─ largest number of the team ─ weights, sum ─ tell ═ sum of the row ─ segment ─ warp ─ lane ─ strip ─ token ─ record
//                                                                          └ last of a request: walk ─ cut ─ results
//
// What decides how a CTA goes on comes from its first thread, and how the cluster goes on from its first CTA: settings that change during a call
// spoil its results, and nothing else.
//
// On entry: as for sample.cu; rows of at most MOST_ROW_CTAS · segments_at_once and MOST_ROW_SEGMENTS segments begin on 16 bytes.
//
// targets: compute_90

#include "sample/row_cluster.cuh"

// Asks for the segments of the row that this CTA has, each by the first thread of so many.
__device__ inline void copy_segments(RowShared &shared, char *stages, const char *row, uint32 tokens, uint32 teams, uint32 number_bytes) {
    if (threadIdx.x >= teams) return;
    const uint32 first = (cluster_rank() * teams + threadIdx.x) * SEGMENT;
    if (first >= tokens) return;
    const uint32 bytes = min(tokens - first, SEGMENT) * number_bytes / 16 * 16;
    const Barrier &copied = shared.copied[threadIdx.x];
    copied.expect(bytes);
    if (bytes) copy_bulk(shared_address(stages) + threadIdx.x * SEGMENT * number_bytes, row + uint64(first) * number_bytes, bytes, copied);
}

template <uint32 TYPE> __device__ inline void take_row(const SampleParams &p, RowShared &shared, char *stages, uint32 i, const Turn &turn, uint32 slot,
                                                       Source &source) {
    const SamplingParams &sampling = p.sampling;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, ctas = cluster_ctas(), rank = cluster_rank();
    const uint32 teams = sampling.segments_at_once, team_warps = DRAW_WARPS >> log2_of(teams), team = warp >> log2_of(team_warps);
    const uint32 within = warp & (team_warps - 1), segments = source.segments();  // as this thread sees it
    constexpr uint32 BYTES = Strip<TYPE>::BYTES;
    if (threadIdx.x == 0) shared.tokens = source.row.tokens, shared.c = source.scale.c, shared.is_greedy = turn.is_greedy();
    cluster_started();
    if (rank == 0 && warp == 0) {
        const uint32 to = threadIdx.x;
        const bool draws = segments && !turn.is_greedy();
        const uint64 number = draws ? turn.number(p, slot, DRAW) : 0;
        if (to < ctas) {
            const Need need = segments ? IS_THERE : turn.needs(p, slot) ? IS_MISSING : NOT_NEEDED;
            send_four(to, &shared.order, uint4{__float_as_uint(source.scale.c), need, turn.is_greedy(), 0}, shared.told);
            send_two(to, &shared.number, {uint32(number), uint32(number >> 32)}, shared.told);
        }
    }
    __syncthreads();
    source.row.tokens = shared.tokens, source.scale.c = shared.c;
    const uint32 s = rank * teams + team;
    const WarpPart<TYPE> part = {source, {false, source.scale.c}, shared_address(stages) + warp * (SEGMENT >> log2_of(team_warps)) * BYTES,
                                 s * SEGMENT + within * (SEGMENT >> log2_of(team_warps)), SEGMENT / STRIP / WARP >> log2_of(team_warps)};
    take_part<TYPE>(shared, part, shared.copied[team], s < source.segments(), min(s * SEGMENT + SEGMENT, source.row.tokens), shared.is_greedy, team_warps);
    if (warp == 0) {
        shared.told.wait(0);
        sum_and_find(shared, source, team_warps);
    } else {
        ask_for_end(p, turn);
    }
    __syncthreads();
    if (shared.finisher != rank) return;
    // As decide_plain_row of cluster_filtered.cu, which, called here, would take more registers than five CTAs have. Here the warp that finds the token
    // goes on, or the first one.
    const Drawn &drawn = shared.drawn;
    uint32 token = shared.found.token;
    if (shared.draws) {
        const uint32 begin = (drawn.segment & (teams - 1)) * team_warps;
        const uint64 own = lane < team_warps ? shared.parts[rank * DRAW_WARPS + begin + lane].sum : 0, through = warp_sum_through(own);
        const uint32 beyond = __ballot_sync(FULL_WARP, drawn.target < through), holder = beyond ? __ffs(beyond) - 1 : 0;
        if (warp != begin + holder) return;
        token = drawn.segment * SEGMENT;
        // Where settings change during the call there may be none.
        if (beyond) token = part.draw(shared.sum[threadIdx.x], drawn.largest, drawn.target - __shfl_sync(FULL_WARP, through - own, holder));
        token = min(token, sampling.tokens - 1);
    } else if (warp) {
        return;
    }
    const Turn ending(p, turn.request);
    say_row(p, ending, i, slot, SaidRow::of(token, shared.found.status), ending.drafted(p, lane), reinterpret_cast<RowRecord *>(stages));
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 5) sample_cluster(const __grid_constant__ SampleParams p) {
    extern __shared__ __align__(128) char stages[];
    __shared__ RowShared shared;
    begin(p);
    const SamplingParams &sampling = p.sampling;
    if (threadIdx.x < sampling.segments_at_once) shared.copied[threadIdx.x].open(1);
    if (threadIdx.x == 0) {
        shared.told.open(1);
        shared.told.expect(cluster_ctas() * DRAW_WARPS * sizeof(Part) + sizeof(Order) + sizeof(uint64));
    }
    __syncwarp();
    cluster_start();
    const uint32 n = sampling.per_row_ctas.divide(blockIdx.x), i = sampling.per_request.divide(n), slot = n - i * sampling.per_request.value;
    wait_for_previous_kernel();
    allow_next_kernel();
    const Turn turn(p, sampling.first + i);
    bool is_there = false;
    const char *const row = turn.row(p, slot, is_there);
    const uint32 tokens = is_there && turn.needs(p, slot) ? sampling.tokens : 0;
    // Before anything waits for the temperature.
    copy_segments(shared, stages, row, tokens, sampling.segments_at_once, sampling.target_type == FLOAT32 ? 4 : 2);
    Source source = turn.source(p, slot, row);
    source.row.tokens = tokens;
    // The compiler leaves out what others need.
    source.scale.is_weights = source.filters = false;
    if (source.row.type == FLOAT32) take_row<FLOAT32>(p, shared, stages, i, turn, slot, source);
    else if (source.row.type == FLOAT16) take_row<FLOAT16>(p, shared, stages, i, turn, slot, source);
    else take_row<BFLOAT16>(p, shared, stages, i, turn, slot, source);
}
