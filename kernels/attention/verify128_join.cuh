// How verify128 joins states of rows: parameters of its shared memory, then the join of warpgroups, of a cluster, and of chunks. The source has
// included a width: verify64_width.cuh, verify128_width.cuh or verify256_width.cuh.
#pragma once

#include "attention/counters.cuh"
#include "attention/mma.cuh"
#include "common/warpgroup.cuh"

constexpr uint32 GROUP_THREADS = 4 * WARP, GROUPS = 2, COMPUTE_THREADS = GROUPS * GROUP_THREADS, VERIFY_THREADS = COMPUTE_THREADS + GROUP_THREADS;
constexpr uint32 VERIFY_ROWS = 64;
constexpr uint32 STAGE_TILES = STAGE_TOKENS / TILE;
// Shared memory: stages, each of which has keys and values in slabs of 64 channels; queries; states of rows that the cluster sends.
constexpr uint32 SLABS = VERIFY_CHANNELS / SLAB_ELEMENTS, SLAB_BYTES = STAGE_TOKENS * SLAB_WIDTH, QUERY_SLAB_BYTES = VERIFY_ROWS * SLAB_WIDTH;
constexpr uint32 VALUES_OFFSET = SLABS * SLAB_BYTES, STAGE_BYTES = 2 * VALUES_OFFSET;
constexpr uint32 QUERIES_OFFSET = STAGES * STAGE_BYTES, RECEIVED_OFFSET = QUERIES_OFFSET + VERIFY_ROWS * VERIFY_CHANNELS * 2;
// Floats of a row's state in shared memory: acc, m, l, and padding so that lanes hit different banks.
constexpr uint32 ROW_PITCH = VERIFY_CHANNELS + 4;
// The sums of both warpgroups take the place of the ring, and of 256 channels that of queries.
static_assert(GROUPS * VERIFY_ROWS * ROW_PITCH * sizeof(float) <= RECEIVED_OFFSET);

struct VerifyShared {
    Barrier full[STAGES], empty[STAGES];
    int32 position[STAGES][STAGE_TOKENS];  // of each token; −1: not there
    uint32 is_whole[STAGES][STAGE_TILES];  // 1: every row sees every token of the tile
    Barrier received;                      // the cluster's states of this CTA's rows are here
    CtaShare cta_share;
    bool is_last;

    // Rows of a work item, some of which may not exist, and how many of them a CTA of the cluster joins.
    __device__ static uint32 most_rows(const AttentionParams &p) { return min(p.rows, VERIFY_ROWS); }
    __device__ static uint32 share_rows(const AttentionParams &p) { return (most_rows(p) + cluster_ctas() - 1) / cluster_ctas(); }
    // `arrivals` fill a stage.
    __device__ void open_ring(uint32 arrivals) {
        if (threadIdx.x > 0) return;
        for (uint32 n = 0; n < STAGES; n++) {
            full[n].open(arrivals);
            empty[n].open(4);
        }
    }
    // Opens the barriers. The CTAs of the cluster start between this and cluster_started().
    __device__ void open(const AttentionParams &p, uint32 arrivals) {
        open_ring(arrivals);
        if (threadIdx.x == 0) {
            const uint32 before = min(cluster_rank() * share_rows(p), most_rows(p)), own = min(share_rows(p), most_rows(p) - before);
            received.open(1);
            received.expect(cluster_ctas() * own * (VERIFY_CHANNELS + 2) * sizeof(float));
        }
        __syncwarp();
        cluster_start();
    }
};

// What every thread of the CTA knows.
struct VerifyJob {
    const AttentionParams &p;
    const CtaShare &cta_share;  // of the cluster
    const WorkItem &item;
    const Reach &reach;
    VerifyShared &s;
    char *shared, *received;  // received: the states of rows that the cluster sends
    uint32 lane, warp;        // warp: within the warpgroup
    uint32 rank, ctas;        // of the cluster

    // Stages of this CTA.
    __device__ uint32 stages() const {
        const uint32 all = (cta_share.end - cta_share.begin + STAGE_TILES - 1) / STAGE_TILES;
        return all > rank ? p.ctas.divide(all - rank - 1) + 1 : 0;
    }
    // A thread has two of the 16 rows that its warp has of a sum, 8 apart.
    __device__ uint32 row(uint32 i) const { return warp * 16 + lane / 4 + i * 8; }
    // The tokens of a thread's scores j · 4 to j · 4 + 3, for each of its two rows.
    __device__ int2 tokens_of(uint32 stage, uint32 j) const { return *reinterpret_cast<const int2 *>(&s.position[stage][j * 8 + lane % 4 * 2]); }
    // Where this CTA receives what CTA `from` of the cluster, which may be itself, sends of its rows, `share` of them.
    __device__ float *received_from(uint32 from, uint32 share) const { return reinterpret_cast<float *>(received) + from * share * ROW_PITCH; }
    // Called by the warp that counts the CTA's chunk and by one that copies, which waits for that.
    __device__ void chunk_counted() const { sync_some(2, 2 * WARP); }
    // Arrives for the warp, once all its lanes have come here.
    __device__ void arrive(const Barrier &barrier) const {
        __syncwarp();
        if (lane == 0) barrier.expect(0);
    }
};

// Four channels of a row, joined from several states.
struct JoinedFour {
    float4 acc{0.0f, 0.0f, 0.0f, 0.0f};
    float m = minus_infinity(), l = 0.0f;

    __device__ void add_scaled(const float4 &x, float by) {
        acc.x = fmaf(by, x.x, acc.x);
        acc.y = fmaf(by, x.y, acc.y);
        acc.z = fmaf(by, x.z, acc.z);
        acc.w = fmaf(by, x.w, acc.w);
    }
    template <uint32 N>
    __device__ void add(const float4 (&other)[N], const float (&other_m)[N], const float (&other_l)[N]) {
        float top = m;
#pragma unroll
        for (uint32 i = 0; i < N; i++) top = fmaxf(top, other_m[i]);
        const float keep = weight(m, top);
        acc = {acc.x * keep, acc.y * keep, acc.z * keep, acc.w * keep};
        l *= keep;
        m = top;
#pragma unroll
        for (uint32 i = 0; i < N; i++) {
            // acc of a row that saw nothing is not used: it may hold NaN. Where all scores are NaN, there is no maximum either, and l is NaN.
            if (other_m[i] == minus_infinity() && other_l[i] == other_l[i]) continue;
            const float take = exp2_fast(other_m[i] - top);
            add_scaled(other[i], take);
            l = fmaf(take, other_l[i], l);
        }
    }
};

// The state of a chunk in scratch: acc [rows][VERIFY_CHANNELS], then m and l [rows]. The number of rows is even, so that states begin on 16 bytes.
struct VerifyState {
    float *data;
    uint32 rows, pitch;

    __device__ VerifyState(const AttentionParams &p, uint32 slot) : rows(min((p.rows + 1) & ~1u, VERIFY_ROWS)), pitch(rows * (VERIFY_CHANNELS + 2)) {
        data = reinterpret_cast<float *>(p.scratch) + uint64(slot) * pitch;
    }
    __device__ float4 *acc(uint32 row, uint32 quad) const { return reinterpret_cast<float4 *>(data + row * VERIFY_CHANNELS + quad * 4); }
    __device__ float *m(uint32 row) const { return data + rows * VERIFY_CHANNELS + row; }
    __device__ float *l(uint32 row) const { return m(row) + rows; }
};

// Joins the sums that both warpgroups have written to shared memory, those of the cluster's CTAs, and those of the work item's chunks.
struct VerifyJoin : VerifyJob {
    static constexpr uint32 QUADS = VERIFY_CHANNELS / 4, AT_ONCE = 8, ROWS_AT_ONCE = 2;

    uint32 thread;  // within both warpgroups that compute

    // Joins N states of a row in shared memory, `pitch` floats apart, of which the first `count` exist.
    template <uint32 N>
    __device__ static void add_rows(JoinedFour &joined, const float *from, uint32 pitch, uint32 quad, uint32 count = N) {
        float4 acc[N];
        float m[N], l[N];
#pragma unroll
        for (uint32 n = 0; n < N; n++) {
            const float *const one = from + min(n, count - 1) * pitch;
            const float2 sums = *reinterpret_cast<const float2 *>(one + VERIFY_CHANNELS);
            acc[n] = *reinterpret_cast<const float4 *>(one + quad * 4);
            m[n] = n < count ? sums.x : minus_infinity(), l[n] = sums.y;
        }
        joined.add(acc, m, l);
    }
    // Sends each CTA of the cluster its part of the rows, `share` of them. How much is sent does not depend on contents of the call's tensors,
    // so that no CTA waits for bytes that never come. HAS_KEPT: a kept state of each of this CTA's own rows lies where the CTA's sum of the row
    // will be, and is joined to that.
    template <bool HAS_KEPT>
    __device__ void send(uint32 rows, uint32 share) const {
        const float *const sums = reinterpret_cast<const float *>(shared);
        float *const own = received_from(rank, share);
#pragma unroll 2
        for (uint32 n = thread; n < rows * QUADS; n += COMPUTE_THREADS) {
            const uint32 row = n / QUADS, quad = n % QUADS, cta = row / share;
            JoinedFour joined;
            add_rows<GROUPS>(joined, sums + row * ROW_PITCH, VERIFY_ROWS * ROW_PITCH, quad);
            float *const to = own + (row - cta * share) * ROW_PITCH;
            if (HAS_KEPT && cta == rank) {
                add_rows<1>(joined, to, 0, quad);
                __syncwarp();  // the warp's lanes have read m and l, which the first one replaces
            }
            const float4 x = joined.acc;
            if (ctas == 1) {
                *reinterpret_cast<float4 *>(to + quad * 4) = x;
                if (quad == 0) *reinterpret_cast<float2 *>(to + VERIFY_CHANNELS) = float2{joined.m, joined.l};
                continue;
            }
            send_four<false>(cta, to + quad * 4, {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)}, s.received);
            if (quad == 0) send_two<false>(cta, to + VERIFY_CHANNELS, {__float_as_uint(joined.m), __float_as_uint(joined.l)}, s.received);
        }
    }
    // Waits until all that the cluster sends this CTA is here.
    __device__ void receive() const {
        if (ctas == 1) sync_some(1, COMPUTE_THREADS);
        else s.received.wait(0);
    }
    __device__ JoinedFour join_received(uint32 row, uint32 share, uint32 quad) const {
        const float *const from = received_from(0, share) + row * ROW_PITCH;
        const uint32 pitch = share * ROW_PITCH;
        JoinedFour joined;
        if (ctas == 1) add_rows<1>(joined, from, pitch, quad);
        else if (ctas == 2) add_rows<2>(joined, from, pitch, quad);
        else for (uint32 cta = 0; cta < ctas; cta += 4) add_rows<4>(joined, from + cta * pitch, pitch, quad, ctas - cta);
        return joined;
    }
    // Joins the work item's chunks for ROWS rows at once: the latency of their loads is paid once.
    template <uint32 ROWS>
    __device__ void join_chunks(JoinedFour (&joined)[ROWS], const VerifyState &state, const uint32 (&row)[ROWS], uint32 quad) const {
#pragma unroll 1
        for (uint32 begin = 0; begin < cta_share.chunks; begin += AT_ONCE) {
            float4 acc[ROWS][AT_ONCE];
            float m[ROWS][AT_ONCE], l[ROWS][AT_ONCE];
#pragma unroll
            for (uint32 r = 0; r < ROWS; r++) {
#pragma unroll
                for (uint32 i = 0; i < AT_ONCE; i++) {
                    const bool exists = begin + i < cta_share.chunks;
                    const uint64 at = uint64(exists ? begin + i : begin) * state.pitch;
                    m[r][i] = exists ? __ldcg(state.m(row[r]) + at) : minus_infinity();
                    l[r][i] = __ldcg(state.l(row[r]) + at);
                    acc[r][i] = __ldcg(state.acc(row[r], quad) + at / 4);
                }
            }
#pragma unroll
            for (uint32 r = 0; r < ROWS; r++) joined[r].add(acc[r], m[r], l[r]);
        }
    }
    // Whether this CTA is the last of those that have its part of the rows. The counter is zero again afterwards.
    __device__ bool is_last() const {
        sync_some(1, COMPUTE_THREADS);
        if (thread == 0) {
            uint32 *const counter = p.counters + counter_of(p, cta_share) * ctas + rank;
            s.is_last = count_up(counter) == cta_share.chunks - 1;
            if (s.is_last) *counter = 0;
        }
        if (thread < WARP) chunk_counted();
        sync_some(1, COMPUTE_THREADS);
        return s.is_last;
    }
    __device__ void write(uint32 row, uint32 quad, const JoinedFour &joined) const {
        const uint32 of_item = first_row(p, item) + row, channel = quad * 4;
        const RowPlace place = place_of_row(p, item, of_item);
        if (!is_written(p, item, place.position)) return;
        Joined first, second;
        first.acc = {joined.acc.x, joined.acc.y}, second.acc = {joined.acc.z, joined.acc.w};
        first.m = second.m = joined.m, first.l = second.l = joined.l;
        if (p.start.acc.data) {
            join_start(p, item, of_item, channel, first);
            join_start(p, item, of_item, channel + 2, second);
        }
        if (p.out.data) {
            const float norm = norm_of(p, place.head, first.m, first.l);
            char *const to = p.out.at(item.seq, place.position, place.head, channel);
            if (p.out.step[3] == 2 && p.out_type != FLOAT32 && uint64(to) % 8 == 0) {
                const uint32 low = pack_out(p, first.acc.x * norm, first.acc.y * norm), high = pack_out(p, second.acc.x * norm, second.acc.y * norm);
                as<uint2>(to) = uint2{low, high};
            } else {
                write_out(p, to, first.acc, norm);
                write_out(p, to + 2 * p.out.step[3], second.acc, norm);
            }
        }
        write_state(p, item, place, channel, first.acc, first.m, first.l);
        if (p.state.acc.data) write_state(p, item, place, channel + 2, second.acc, second.m, second.l);
    }
    // Joins the cluster's states of this CTA's rows begin … end − 1: to results, or to the chunk's state in scratch.
    __device__ void join_cluster(uint32 begin, uint32 end, uint32 share) const {
        const VerifyState state(p, cta_share.slot + cta_share.chunk);
#pragma unroll 2
        for (uint32 n = begin * QUADS + thread; n < end * QUADS; n += COMPUTE_THREADS) {
            const uint32 row = n / QUADS, quad = n % QUADS;
            const JoinedFour joined = join_received(row - begin, share, quad);
            if (cta_share.chunks == 1) {
                write(row, quad, joined);
                continue;
            }
            __stcg(state.acc(row, quad), joined.acc);
            if (quad == 0) __stcg(state.m(row), joined.m), __stcg(state.l(row), joined.l);
        }
    }
    // The last CTA joins the states of all chunks to results.
    __device__ void finish(uint32 begin, uint32 end) const {
        if (cta_share.chunks <= 1 || !is_last()) return;
        const VerifyState all(p, cta_share.slot);
        constexpr uint32 STEP = COMPUTE_THREADS / QUADS;
        const uint32 quad = thread % QUADS;
#pragma unroll 1
        for (uint32 first = begin + thread / QUADS; first < end; first += ROWS_AT_ONCE * STEP) {
            JoinedFour joined[ROWS_AT_ONCE];
            const uint32 row[ROWS_AT_ONCE] = {first, min(first + STEP, end - 1)};
            join_chunks(joined, all, row, quad);
            write(first, quad, joined[0]);
            if (first + STEP < end) write(first + STEP, quad, joined[1]);
        }
    }
    // What join() does of a work item that is one chunk, for a cluster of several CTAs.
    __device__ void join_chunk() const {
        const uint32 share = VerifyShared::share_rows(p), rows = rows_of(p, item), begin = min(rank * share, rows), end = min(begin + share, rows);
        send<false>(VerifyShared::most_rows(p), share);
        s.received.wait(0);
#pragma unroll 1
        for (uint32 n = begin * QUADS + thread; n < end * QUADS; n += COMPUTE_THREADS) {
            const uint32 row = n / QUADS, quad = n % QUADS;
            write(row, quad, join_received(row - begin, share, quad));
        }
    }
    // All of the above. The CTA joins its part of the work item's rows.
    template <bool HAS_KEPT>
    __device__ void join() const {
        const uint32 share = VerifyShared::share_rows(p), rows = cta_share.chunks ? rows_of(p, item) : 0;
        const uint32 begin = min(rank * share, rows), end = min(begin + share, rows);
        send<HAS_KEPT>(VerifyShared::most_rows(p), share);
        receive();
        join_cluster(begin, end, share);
        finish(begin, end);
    }
};
