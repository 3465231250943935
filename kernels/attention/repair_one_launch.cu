// Repair in one launch (repair variant one_launch): attention to what was missed, joined with what was kept (see repair_lists.cuh).
//
// Runs where mma takes the tensors, heads have up to 128 channels, rows of kept states are whole 16-byte units, and repair_decode128.cuh does not
// run: src/ops/attention/device/choose.rs. Bytes: both lists, keys and values of what is attended to, and a state of Dv + 2 floats for each
// partial that serves. A cluster of CTAs takes a work item. Each CTA goes through both lists, then takes its share of the missed tiles and of
// the partials; orders follow from the lists, so that a repeated call gives the same bits.
//
//   lists ─ search ─┬─ tiles of missed blocks requested ──── attended to ─┬─ joined in the CTA ─ sent to the CTA of the cluster that joins
//                   └─ partials that serve, joined in registers ──────────┘  these channels ─ joined ─ results
//
// Where it is known that nothing was missed (r.counts), results are those of the attention before: the cluster ends.
//
// A call takes a few microseconds, in which nearly every instruction runs once: code is short rather than unrolled.
//
// targets: compute_90

#include "attention/repair_cluster.cuh"

// Sums of kept states of a CTA: acc [turns][rows][Dv], then m and l [turns][rows].
struct KeptStates {
    float *acc, *m, *l;
    uint32 rows, channels;
    __device__ KeptStates(float *data, const KeptShare &share, uint32 channels) : acc(data), rows(share.rows), channels(channels) {
        m = acc + ((rows * channels) << share.log_turns());
        l = m + (rows << share.log_turns());
    }
};

// Joins the CTA's share of the `count` states that serve. `from` is the warp's first row.
template <uint32 MAX_VALUE_DIM>
__device__ inline void join_kept(const RepairParams &r, const WorkItem &item, const Reach &reach, const ClusterCta &cta, const int32 *partials, uint32 count,
                                 const KeptShare &share, KeptRow from, const KeptStates &to) {
    static_assert(MAX_VALUE_DIM <= VECTOR_CHANNELS);
    const AttentionParams &p = r.to;
    const uint32 lane = threadIdx.x % WARP, log_step = share.log_turns() + cta.log_ctas, channel = lane * LANE_CHANNELS;
    const uint32 first = (cta.rank << share.log_turns()) + share.turn();
#pragma unroll 1
    for (uint32 row = share.row(); row < share.rows; row += WARPS) {
        if (row >= WARPS) from = KeptRow(r, item, row);
        int32 begin;
        uint32 seen;
        reach.row(p, from.position, begin, seen);
        // A row that sees nothing starts from nothing, whatever was kept.
        const uint32 states = seen ? count : 0;
        float4 sum{};
        float m = minus_infinity(), l = 0.0f;
#pragma unroll 1
        for (uint32 n = first; n < states; n += AT_ONCE << log_step) {
            // Loads without a branch between them do not wait for each other. Past the last state, the last is loaded again.
            float4 one[AT_ONCE];
            float one_m[AT_ONCE], one_l[AT_ONCE], top = m;
#pragma unroll
            for (uint32 i = 0; i < AT_ONCE; i++) {
                const uint32 state = min(n + (i << log_step), states - 1), partial = r.exact ? partials[state] : 0;
                one[i] = as<float4>(from.acc + offset(partial, int32(r.kept.acc.step[3])));
                one_m[i] = as<float>(from.m + offset(partial, int32(r.kept.m.step[3])));
                one_l[i] = as<float>(from.l + offset(partial, int32(r.kept.l.step[3])));
            }
#pragma unroll
            for (uint32 i = 0; i < AT_ONCE; i++) {
                const bool is_there = n + (i << log_step) < states && one_l[i] != 0.0f;
                one_m[i] = is_there ? one_m[i] * LOG2_E : minus_infinity();
                top = fmaxf(top, one_m[i]);
            }
            const float keep = weight(m, top);
            m = top;
            l *= keep;
            sum = {sum.x * keep, sum.y * keep, sum.z * keep, sum.w * keep};
#pragma unroll
            for (uint32 i = 0; i < AT_ONCE; i++) {
                // Where all scores are NaN, there is no maximum, and l is NaN.
                if (one_m[i] == minus_infinity() && one_l[i] == one_l[i]) continue;
                const float take = exp2_fast(one_m[i] - top);
                l += one_l[i] * take;
                sum = {fmaf(one[i].x, take, sum.x), fmaf(one[i].y, take, sum.y), fmaf(one[i].z, take, sum.z), fmaf(one[i].w, take, sum.w)};
            }
        }
        const uint32 at = share.turn() * to.rows + row;
        if (channel < p.value_dim) *reinterpret_cast<float4 *>(to.acc + at * to.channels + channel) = sum;
        if (lane == 0) {
            to.m[at] = m;
            to.l[at] = l;
        }
    }
}

// Requests the warp's share of a tile. A lane finds one row of keys or of values; 16 lanes then copy a row.
template <typename Compute>
__device__ inline void request(const Compute &compute, const Missed &missed, const WorkItem &item, const Reach &reach, uint32 tile, char *to) {
    const AttentionParams &p = compute.p;
    const uint32 t = compute.lane % TILE, half = compute.lane / TILE;
    const Place place = missed.place_of(p, item, reach, tile * TILE + t);
    const View<4> &of = half ? p.v : p.k;
    const bool is_there = place.position >= 0;
    const uint64 row = reinterpret_cast<uint64>(is_there ? of.at(place.page, place.row, item.head) : of.data);
    const uint32 there = __ballot_sync(FULL_WARP, is_there), to_keys = shared_address(to) + sizeof(TokenInfo) + t * 16;
    const bool has_key = t * 16 < p.dim * Compute::BYTES, has_value = p.v_offset && t * 16 < p.value_dim * Compute::BYTES;
    TokenInfo &info = as<TokenInfo>(to);
    if (compute.member == 0 && half == 0) info.position[t] = place.position;
    if constexpr (Compute::IS_FP8) {
        const View<3> &scale = half ? p.v_scale : p.k_scale;
        if (compute.member == 0 && p.scales_per_token)
            (half ? info.v_scale : info.k_scale)[t] = !is_there ? 0.0f : scale.data ? as<float>(scale.at(place.page, place.row, item.head)) : 1.0f;
    }
#pragma unroll 1
    for (uint32 n = compute.member; n < TILE / 2; n += 1 << p.log_members) {
        const uint32 token = n * 2 + half;
        const char *const key = reinterpret_cast<const char *>(__shfl_sync(FULL_WARP, row, token)) + t * 16;
        const char *const value = reinterpret_cast<const char *>(__shfl_sync(FULL_WARP, row, token + TILE)) + t * 16;
        const bool copies = there >> token & 1;
        if (has_key) copy_16(to_keys + token * Compute::PITCH, key, copies);
        if (has_value) copy_16(to_keys + token * Compute::PITCH + p.v_offset, value, copies);
    }
}

// load_queries() for 16-bit keys: a warp copies a row.
template <typename Compute>
__device__ inline void request_queries(const Compute &compute, const WorkItem &item, uint32 rows) {
    const AttentionParams &p = compute.p;
#pragma unroll 1
    for (uint32 row = compute.warp; row < WARP_ROWS << p.log_members; row += WARPS) {
        const bool exists = row < rows && compute.lane * 8 < p.dim;
        const auto [position, head] = place_of_row(p, item, first_row(p, item) + (exists ? row : 0));
        const char *const from = p.q.at(item.seq, position, head) + (exists ? compute.lane * 16 : 0);
        if (compute.lane * 16 < Compute::QUERY_PITCH - 16) copy_16(shared_address(compute.query_of(row)) + compute.lane * 16, from, exists);
    }
}

// Joins two channels of a row: the CTA's sums of kept states, and the states of its first `teams` teams.
__device__ inline Joined join_cta(const AttentionParams &p, const KeptStates &kept, uint32 turns, const Sums &sums, char *shared, uint32 teams,
                                  uint32 row, uint32 channel) {
    Joined joined;
    const auto add = [&](const float *acc, float m, float l) {
        const float2 state_acc[1] = {*reinterpret_cast<const float2 *>(acc)};
        const float state_m[1] = {m}, state_l[1] = {l};
        joined.add(state_acc, state_m, state_l, 1);
    };
#pragma unroll 1
    for (uint32 i = 0, at = row; i < turns; i++, at += kept.rows) add(kept.acc + at * kept.channels + channel, kept.m[at], kept.l[at]);
    const uint32 within = row % WARP_ROWS;
#pragma unroll 1
    for (uint32 i = 0, warp = row / WARP_ROWS; i < teams; i++, warp += 1 << p.log_members)
        add(acc_of(p, shared, warp).at(within, channel), sums.m[warp][within], sums.l[warp][within]);
    return joined;
}

// Joins what 2^log_parts neighbouring lanes have of two channels: x and y, m, l. All lanes of the warp take part.
__device__ inline Joined join_lanes(float4 x, uint32 log_parts) {
    Joined joined;
    joined.m = x.z;
#pragma unroll 1
    for (uint32 step = 1; step < 1u << log_parts; step *= 2) joined.m = fmaxf(joined.m, __shfl_xor_sync(FULL_WARP, joined.m, step));
    const float take = weight(x.z, joined.m);
    joined.acc = {x.x * take, x.y * take};
    joined.l = x.w * take;
#pragma unroll 1
    for (uint32 step = 1; step < 1u << log_parts; step *= 2) {
        joined.acc.x += __shfl_xor_sync(FULL_WARP, joined.acc.x, step);
        joined.acc.y += __shfl_xor_sync(FULL_WARP, joined.acc.y, step);
        joined.l += __shfl_xor_sync(FULL_WARP, joined.l, step);
    }
    return joined;
}

template <typename Compute, uint32 MAX_VALUE_DIM>
__device__ inline void repair_one_launch(const RepairParams &r) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Sums sums;
    __shared__ uint32 words[THREADS];
    __shared__ Arrival from_cluster;
    __shared__ WorkItemLengths lengths;
    // What parameters alone decide precedes the wait for the previous kernel.
    const AttentionParams &p = r.to;
    const uint32 word = request_parameters(r);
    allow_next_kernel();
    const ClusterCta cta;
    const WorkItem item = work_item_of(p, blockIdx.x >> cta.log_ctas);
    const KeptShare share(rows_of(p, item));
    // Two channels a thread: those that this CTA joins, from each CTA of the cluster.
    const uint32 half = p.value_dim / 2, channel_pairs = share.rows * half, log_received = max(log2_ceil(channel_pairs), cta.log_ctas) - cta.log_ctas;
    if (threadIdx.x == 0 && cta.log_ctas) {
        const uint32 begin = min(cta.rank << log_received, channel_pairs), end = min(begin + (1 << log_received), channel_pairs);
        from_cluster.open(1);
        from_cluster.expect(((end - begin) * sizeof(float4)) << cta.log_ctas);
    }
    __syncwarp();
    if (cta.log_ctas) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

    // Shared memory of both lists, which the search reads, and of what it finds. The first entries are requested together with their counts.
    int32 *const predicted = reinterpret_cast<int32 *>(shared + r.lists_offset), *const selected = predicted + r.predicted_capacity;
    int32 *const partials = selected + p.list_capacity, *const missed = partials + p.list_capacity, *const pages = missed + p.list_capacity;
    const char *const from_predicted = r.predicted.at(item.seq, item.position, item.head);
    const char *const from_selected = p.ids.at(item.seq, item.position, item.head);
    const KeptRow kept_row(r, item, min(share.row(), share.rows - 1));
    asm volatile("" ::"l"(from_predicted), "l"(from_selected), "l"(kept_row.acc), "l"(kept_row.m), "l"(kept_row.l));
    wait_for_previous_kernel();
    const auto predicted_id = [&](uint32 j) { return as<int32>(from_predicted + j * r.predicted.step[3]); };
    const auto selected_id = [&](uint32 j) { return as<int32>(from_selected + j * p.ids.step[3]); };
    const int32 first_predicted = threadIdx.x < r.predicted_capacity ? predicted_id(threadIdx.x) : 0;
    const int32 first_selected = threadIdx.x < p.list_capacity ? selected_id(threadIdx.x) : 0;
    const WorkItemLengths own_lengths = WorkItemLengths::load(r, item);
    const int32 may_miss = r.counts ? r.counts[item.seq * p.kv_heads.value + item.head] : 1;
    if (may_miss == 0) {
        if (r.missed.data && cta.rank == 0 && item.row_block == 0 && threadIdx.x == 0) as<int32>(r.missed.at(item.seq, item.position, item.head)) = 0;
        if (cta.log_ctas) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        return;
    }
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    Compute compute(p, shared, p.log_members);
    if constexpr (Compute::IS_FP8) compute.load_queries(item);
    else request_queries(compute, item, share.rows);
    end_copies();
    compute.zero_padding();
    if (threadIdx.x < own_lengths.predicted) predicted[threadIdx.x] = first_predicted;
    if (threadIdx.x < own_lengths.selected) selected[threadIdx.x] = first_selected;
#pragma unroll 1
    for (uint32 j = threadIdx.x + THREADS; j < own_lengths.predicted; j += THREADS) predicted[j] = predicted_id(j);
#pragma unroll 1
    for (uint32 j = threadIdx.x + THREADS; j < own_lengths.selected; j += THREADS) selected[j] = selected_id(j);
    if (threadIdx.x == 0) lengths = own_lengths;
    __syncthreads();
    const Reach reach = lengths.reach(r, item);
    const Lists lists{predicted, selected, lengths.predicted, lengths.selected, blocks_of(p, reach)};
    const auto page = [&](uint32 j) {
        if (p.slots.data) return as<int32>(p.slots.at(item.seq, item.position, item.head, j));
        const uint32 id = selected[j];
        return p.table.data && id < lists.blocks ? as<int32>(p.table.at(item.seq, p.page.divide(id * p.block.value))) : 0;
    };
    const Found found = find_parts(
        r, lists, page,
        [&](uint32 j, uint32 at, int32 page) {
            missed[at] = selected[j];
            pages[at] = page;
        },
        [&](int32 partial, uint32 at) { partials[at] = partial; });
    if (r.missed.data && cta.rank == 0 && item.row_block == 0 && threadIdx.x == 0)
        as<int32>(r.missed.at(item.seq, item.position, item.head)) = found.missed;

    // Requests the CTA's share of the tiles, and joins its share of the kept states meanwhile.
    CtaShare cta_share{};
    cta_share.chunk = cta.rank;
    cta_share.chunks = 1 << cta.log_ctas;
    cta_share.take((found.attended * p.block.value + TILE - 1) / TILE);
    const uint32 teams = WARPS >> p.log_members, first = cta_share.begin + compute.team, own = first < cta_share.end ? (cta_share.end - first - 1) / teams + 1 : 0;
    const Missed list{missed, pages, found.attended};
    const bool is_double = p.stages > 1;
    const auto stage_of = [&](uint32 tile) { return compute.stage(is_double ? tile & 1 : 0); };
    const auto request_tile = [&](uint32 tile) {
        if (tile < own) request(compute, list, item, reach, first + tile * teams, stage_of(tile));
        end_copies();
    };
#pragma unroll 1
    for (uint32 tile = 0; tile < p.stages; tile++) request_tile(tile);
    const KeptStates kept(reinterpret_cast<float *>(shared + r.kept_offset), share, p.value_dim);
    join_kept<MAX_VALUE_DIM>(r, item, reach, cta, partials, r.exact ? found.joined : 1, share, kept_row, kept);
    // Queries were requested before the tiles.
    if (is_double) wait_copies<2>();
    else wait_copies<1>();
    __syncthreads();
    if (own) {
        compute.read_queries(item, reach);
#pragma unroll 1
        for (uint32 tile = 0; tile < own; tile++) {
            if (is_double) wait_copies<1>();
            else wait_copies<0>();
            compute.sync_team();
            compute.attend(stage_of(tile));
            compute.sync_team();
            request_tile(tile + p.stages);
        }
        compute.finish();
        compute.store(WarpState{acc_of(p, shared, compute.warp), sums.m[compute.warp], sums.l[compute.warp]});
    }
    __syncthreads();

    // A work item that needs no other CTA goes the same way, without the cluster.
    const bool alone = cta.log_ctas == 0 || (!r.exact && found.attended == 0);
    float4 *const received = reinterpret_cast<float4 *>(shared + r.received_offset);
    if (cta.log_ctas) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (alone && cta.rank) return;
#pragma unroll 1
    for (uint32 n = threadIdx.x; n < channel_pairs; n += THREADS) {
        const uint32 row = p.half_value.divide(n), channel = (n - row * half) * 2;
        const Joined joined = join_cta(p, kept, 1 << share.log_turns(), sums, shared, min(teams, cta_share.end - cta_share.begin), row, channel);
        const float4 x{joined.acc.x, joined.acc.y, joined.m, joined.l};
        const uint32 owner = n >> log_received;
        if (alone) received[n] = x;
        else from_cluster.send(received + (cta.rank << log_received) + n - (owner << log_received), owner, x);
    }
    if (alone) __syncthreads();
    const uint32 log_parts = alone ? 0 : cta.log_ctas, begin = alone ? 0 : cta.rank << log_received;
    const uint32 end = alone ? channel_pairs : min(begin + (1 << log_received), channel_pairs);
    const uint32 part = threadIdx.x & ((1 << log_parts) - 1);
#pragma unroll 1
    for (uint32 first = begin; first < end; first += THREADS >> log_parts) {
        const uint32 n = first + (threadIdx.x >> log_parts), row = p.half_value.divide(n), channel = (n - row * half) * 2;
        // Computed while the states are on their way.
        const auto [position, head] = place_of_row(p, item, first_row(p, item) + row);
        asm volatile("" ::"l"(p.out.at(item.seq, position, head, channel)));
        if (!alone) from_cluster.wait(0);
        const float4 x = n < end ? received[(part << log_received) + n - begin] : float4{0.0f, 0.0f, minus_infinity(), 0.0f};
        const Joined joined = join_lanes(x, log_parts);
        if (n >= end || part) continue;
        write_results(p, item, first_row(p, item) + row, channel, joined.acc, joined.m, joined.l);
    }
}

#define REPAIR_ONE_LAUNCH_KERNEL(name, Type, MAX_DIM)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ RepairParams p) { \
        repair_one_launch<MmaCompute<Type, MAX_DIM, MAX_DIM>, MAX_DIM>(p);                                     \
    }

REPAIR_ONE_LAUNCH_KERNEL(repair_one_launch_bf16_128, Bfloat16, 128)
REPAIR_ONE_LAUNCH_KERNEL(repair_one_launch_f16_128, Float16, 128)
REPAIR_ONE_LAUNCH_KERNEL(repair_one_launch_fp8_128, Float8, 128)
