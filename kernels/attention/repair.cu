// Repair in one launch: attention to what was missed, joined with what was kept (see repair.cuh).
//
// Bytes: both lists, keys and values of what is attended to, and a state of Dv + 2 floats for each partial that serves. Cut: a cluster of
// CTAs takes a pair. Each of them goes through both lists, and then has its share of the missed tiles and of the partials; orders follow
// from the lists, so that a call repeated gives the same bits.
//
//   lists ─┬─ tiles of missed blocks asked for ─────────────┬─ attended to ─┐
//          └─ partials that serve, joined in registers ─────┘               ├─ joined in the CTA ─ sent to the CTA of the cluster
//                                                                           ┘    that has these channels ─ joined ─ results
//
// targets: compute_90

#include "attention/mma.cuh"
#include "attention/repair.cuh"
#include "common/cluster.cuh"

__device__ inline void arrive_in_cluster_first() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Writes to the same place in the shared memory of another CTA of the cluster.
__device__ inline void send(void *to, uint32 rank, float4 x) {
    asm volatile("{\n\t.reg .b32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n\t}" ::"r"(shared_address(to)),
                 "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ inline uint32 log2_ceil(uint32 n) { return n <= 1 ? 0 : 32 - __clz(n - 1); }

// A CTA of a pair's cluster.
struct Member {
    uint32 rank, log_ctas;
    __device__ Member() : rank(cluster_rank()), log_ctas(__ffs(cluster_ctas()) - 1) {}
    __device__ uint32 ctas() const { return 1 << log_ctas; }
};

// Tiles of what is attended to: a CTA's list, in shared memory.
struct MissedTiles : Tiles {
    const int32 *ids, *pages;  // of each block, and of its first token

    __device__ MissedTiles(const AttentionParams &p, const Item &item, uint32 team, uint32 teams, const int32 *ids, const int32 *pages)
        : Tiles(p, item, team, teams), ids(ids), pages(pages) {}
    __device__ Place find(const AttentionParams &p, const Pair &pair, const Reach &reach, uint32 entries, uint32 tile) const {
        const uint32 lane = threadIdx.x % WARP, log_granules = LOG_TILE - p.log_granule, mine = tile + (lane >> log_granules);
        const uint32 x = (first + mine * step) * TILE + ((lane & ((1 << log_granules) - 1)) << p.log_granule), e = p.block.divide(x);
        if (mine >= count || e >= entries) return {-1, 0, 0};
        const int32 position = ids[e] * int32(p.block.value) + int32(x - e * p.block.value);
        if (position >= reach.end || position + (1 << p.log_granule) <= reach.begin) return {-1, 0, 0};
        if (!p.slots.data && !p.table.data) return {position, int32(pair.seq), position};
        const uint32 number = p.page.divide(position);
        const bool of_block = p.slots.data || p.block.value <= p.page.value;
        const int32 page = of_block ? pages[e] : as<int32>(p.table.at(pair.seq, number));
        if (uint32(page) >= p.pages) return {-1, 0, 0};
        return {position, page, position - int32(number * p.page.value)};
    }
};

// Where a warp of the cluster has its share of kept states: of its row, every `step`-th from `first` on. Rows go round the warps, and warps
// that are left over take turns at a row.
struct KeptShare {
    uint32 rows, log_rows;  // up to WARPS
    __device__ explicit KeptShare(uint32 rows) : rows(rows), log_rows(min(log2_ceil(rows), 3u)) {}
    __device__ uint32 turns() const { return WARPS >> log_rows; }
    __device__ uint32 turn() const { return threadIdx.x / WARP >> log_rows; }
    __device__ uint32 row() const { return threadIdx.x / WARP & ((1 << log_rows) - 1); }
};

// Kept states of a CTA: acc [turns][rows][Dv], then m and l [turns][rows].
struct KeptStates {
    float *acc, *m, *l;
    uint32 rows, channels;
    __device__ KeptStates(float *data, uint32 turns, uint32 rows, uint32 channels) : acc(data), rows(rows), channels(channels) {
        m = acc + turns * rows * channels;
        l = m + turns * rows;
    }
};

constexpr uint32 LANE_CHANNELS = 4, VECTOR_CHANNELS = LANE_CHANNELS * WARP;
constexpr uint32 AT_ONCE = 4;  // states that a warp asks for before it joins them

__device__ inline void add(float4 &sum, float4 x, float weight) {
    sum.x += x.x * weight;
    sum.y += x.y * weight;
    sum.z += x.z * weight;
    sum.w += x.w * weight;
}

// Joins the CTA's share of the `count` states that serve.
template <uint32 MAX_VALUE_DIM>
__device__ inline void join_kept(const RepairParams &r, const Pair &pair, const Reach &reach, const Member &cta, const int32 *partials, uint32 count,
                                 const KeptShare &share, const KeptStates &to) {
    constexpr uint32 VECTORS = (MAX_VALUE_DIM + VECTOR_CHANNELS - 1) / VECTOR_CHANNELS;
    const AttentionParams &p = r.to;
    const uint32 lane = threadIdx.x % WARP, step = share.turns() << cta.log_ctas;
#pragma unroll 1
    for (uint32 row = share.row(); row < share.rows; row += WARPS) {
        const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + row);
        int32 first;
        uint32 seen;
        reach.row(p, position, first, seen);
        // A row that sees nothing starts from nothing, whatever was kept.
        const uint32 states = seen == 0 ? 0 : count;
        float4 sum[VECTORS] = {};
        float m = minus_infinity(), l = 0.0f;
#pragma unroll 1
        for (uint32 n = cta.rank * share.turns() + share.turn(); n < states; n += step * AT_ONCE) {
            float4 one[AT_ONCE][VECTORS];
            float one_m[AT_ONCE], one_l[AT_ONCE], top = m;
#pragma unroll
            for (uint32 k = 0; k < AT_ONCE; k++) {
                one_m[k] = minus_infinity();
                one_l[k] = 0.0f;
                if (n + k * step >= states) continue;
                const uint32 partial = r.exact ? partials[n + k * step] : 0;
                const char *const from = r.kept.acc.at(pair.seq, position, head, partial);
#pragma unroll
                for (uint32 i = 0; i < VECTORS; i++) {
                    const uint32 channel = i * VECTOR_CHANNELS + lane * LANE_CHANNELS;
                    if (channel < p.value_dim) one[k][i] = as<float4>(from + channel * sizeof(float));
                }
                one_l[k] = as<float>(r.kept.l.at(pair.seq, position, head, partial));
                one_m[k] = as<float>(r.kept.m.at(pair.seq, position, head, partial)) * LOG2_E;
            }
#pragma unroll
            for (uint32 k = 0; k < AT_ONCE; k++)
                if (one_l[k] != 0.0f) top = fmaxf(top, one_m[k]);
            const float keep = weight(m, top);
            m = top;
            l *= keep;
#pragma unroll
            for (uint32 i = 0; i < VECTORS; i++) sum[i] = {sum[i].x * keep, sum[i].y * keep, sum[i].z * keep, sum[i].w * keep};
#pragma unroll
            for (uint32 k = 0; k < AT_ONCE; k++) {
                if (one_l[k] == 0.0f) continue;
                const float take = weight(one_m[k], top);
                l += one_l[k] * take;
#pragma unroll
                for (uint32 i = 0; i < VECTORS; i++) add(sum[i], one[k][i], take);
            }
        }
        const uint32 at = share.turn() * to.rows + row;
#pragma unroll
        for (uint32 i = 0; i < VECTORS; i++) {
            const uint32 channel = i * VECTOR_CHANNELS + lane * LANE_CHANNELS;
            if (channel < p.value_dim) *reinterpret_cast<float4 *>(to.acc + at * to.channels + channel) = sum[i];
        }
        if (lane == 0) {
            to.m[at] = m;
            to.l[at] = l;
        }
    }
}

// A row's two channels, of the CTA's kept states and of its first `teams` teams.
__device__ inline Joined join_cta(const AttentionParams &p, const KeptStates &kept, uint32 turns, const Sums &sums, char *shared, uint32 teams, uint32 row, uint32 channel) {
    Joined joined;
    float2 acc[WARPS];
    float m[WARPS], l[WARPS];
#pragma unroll
    for (uint32 i = 0; i < WARPS; i++) {
        if (i >= turns) continue;
        const uint32 at = i * kept.rows + row;
        acc[i] = *reinterpret_cast<const float2 *>(kept.acc + at * kept.channels + channel);
        m[i] = kept.m[at];
        l[i] = kept.l[at];
    }
    joined.add(acc, m, l, turns);
    const uint32 within = row % WARP_ROWS, member = row / WARP_ROWS;
#pragma unroll
    for (uint32 i = 0; i < WARPS; i++) {
        if (i >= teams) continue;
        const uint32 warp = (i << p.log_members) + member;
        acc[i] = *reinterpret_cast<const float2 *>(acc_of(p, shared, warp).at(within, channel));
        m[i] = sums.m[warp][within];
        l[i] = sums.l[warp][within];
    }
    joined.add(acc, m, l, teams);
    return joined;
}

// What each CTA of the cluster has of two channels: x, y, m, l.
__device__ inline Joined join_received(const float4 *received, const Member &cta, uint32 pitch) {
    Joined joined;
#pragma unroll 1
    for (uint32 begin = 0; begin < cta.ctas(); begin += JOINED_AT_ONCE) {
        const uint32 count = min(cta.ctas() - begin, JOINED_AT_ONCE);
        float2 acc[JOINED_AT_ONCE];
        float m[JOINED_AT_ONCE], l[JOINED_AT_ONCE];
#pragma unroll
        for (uint32 i = 0; i < JOINED_AT_ONCE; i++) {
            if (i >= count) continue;
            const float4 x = received[(begin + i) * pitch];
            acc[i] = {x.x, x.y};
            m[i] = x.z;
            l[i] = x.w;
        }
        joined.add(acc, m, l, count);
    }
    return joined;
}

template <typename Engine, uint32 MAX_VALUE_DIM>
__device__ inline void repair_at_once(const RepairParams &r) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Sums sums;
    __shared__ uint32 words[THREADS];
    const AttentionParams &p = r.to;
    const uint32 word = ask_for_parameters(r);
    allow_next_kernel();
    wait_for_previous_kernel();
    const Member cta;
    if (cta.log_ctas) arrive_in_cluster_first();
    const Pair pair = pair_of(p, blockIdx.x >> cta.log_ctas);

    // Both lists, from which the search reads; then what it finds.
    int32 *const predicted = reinterpret_cast<int32 *>(shared + r.lists_offset), *const selected = predicted + r.predicted_cap;
    int32 *const partials = selected + p.cap, *const missed = partials + p.cap, *const pages = missed + p.cap;
    const auto predicted_id = [&](uint32 j) { return as<int32>(r.predicted.at(pair.seq, pair.position, pair.head, j)); };
    const auto selected_id = [&](uint32 j) { return as<int32>(p.ids.at(pair.seq, pair.position, pair.head, j)); };
    // The first entries are asked for beside their counts.
    const int32 first_predicted = threadIdx.x < r.predicted_cap ? predicted_id(threadIdx.x) : 0;
    const int32 first_selected = threadIdx.x < p.cap ? selected_id(threadIdx.x) : 0;
    const Reach reach = Reach::load(p, pair);
    const uint32 predicted_count = clamped(as<int32>(r.predicted_counts.at(pair.seq, pair.position, pair.head)), r.predicted_cap);
    const Lists lists{predicted, selected, predicted_count, count_of(p, pair)};
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    Engine engine(p, shared);
    engine.load_queries(pair);
    end_copies();
    engine.zero_padding();
    const KeptShare share(rows_of(p, pair));
    if (threadIdx.x < lists.predicted_count) predicted[threadIdx.x] = first_predicted;
    if (threadIdx.x < lists.count) selected[threadIdx.x] = first_selected;
    for (uint32 j = threadIdx.x + THREADS; j < max(lists.count, lists.predicted_count); j += THREADS) {
        if (j < lists.predicted_count) predicted[j] = predicted_id(j);
        if (j < lists.count) selected[j] = selected_id(j);
    }
    __syncthreads();
    const auto page = [&](uint32 j) {
        if (p.slots.data) return as<int32>(p.slots.at(pair.seq, pair.position, pair.head, j));
        const int64 begin = int64(selected[j]) * p.block.value;
        return p.table.data && begin >= 0 && begin < reach.end ? as<int32>(p.table.at(pair.seq, p.page.divide(begin))) : 0;
    };
    const Found found = find_parts(
        r, reach, lists, page,
        [&](uint32 j, uint32 at, int32 page) {
            missed[at] = selected[j];
            pages[at] = page;
        },
        [&](int32 partial, uint32 at) { partials[at] = partial; });
    if (r.missed.data && cta.rank == 0 && pair.row_block == 0 && threadIdx.x == 0)
        as<int32>(r.missed.at(pair.seq, pair.position, pair.head)) = found.missed;

    // Its share of the tiles is asked for, its share of what was kept joined meanwhile.
    Item item{};
    item.chunk = cta.rank;
    item.chunks = cta.ctas();
    item.take((found.attended * p.block.value + TILE - 1) / TILE);
    const uint32 teams = WARPS >> p.log_members;
    const MissedTiles tiles(p, item, engine.team, teams, missed, pages);
#pragma unroll 1
    for (uint32 n = 0; n < p.stages; n++) {
        if (n < tiles.count) engine.load(tiles, pair, reach, found.attended, n, engine.stage(n));
        end_copies();
    }
    const KeptStates kept(reinterpret_cast<float *>(shared + r.kept_offset), share.turns(), share.rows, p.value_dim);
    join_kept<MAX_VALUE_DIM>(r, pair, reach, cta, partials, r.exact ? found.joined : 1, share, kept);
    wait_copies(p.stages - 1);
    __syncthreads();
    if (tiles.count) {
        engine.read_queries(pair, reach);
#pragma unroll 1
        for (uint32 n = 0, at = 0; n < tiles.count; n++) {
            wait_copies(p.stages - 1);
            engine.sync_team();
            if (Engine::IS_FP8 && p.kv_type == FLOAT8_E5M2) engine.template attend<true>(engine.stage(at));
            else engine.template attend<false>(engine.stage(at));
            engine.sync_team();
            if (n + p.stages < tiles.count) engine.load(tiles, pair, reach, found.attended, n + p.stages, engine.stage(at));
            end_copies();
            at = at + 1 == p.stages ? 0 : at + 1;
        }
        engine.finish();
        engine.store(WarpState{acc_of(p, shared, engine.warp), sums.m[engine.warp], sums.l[engine.warp]});
    }
    __syncthreads();

    // Two channels a thread. A state that nothing joins is the first CTA's.
    const uint32 half = p.value_dim / 2, pairs = share.rows * half, joined_teams = min(teams, item.end - item.begin);
    const bool alone = cta.log_ctas == 0 || (!r.exact && found.attended == 0);
    const uint32 log_received = max(log2_ceil(pairs), cta.log_ctas) - cta.log_ctas;
    float4 *const received = reinterpret_cast<float4 *>(shared + r.received_offset);
    if (cta.log_ctas) wait_for_cluster();
    if (alone && cta.rank) return;
    for (uint32 n = threadIdx.x; n < pairs; n += THREADS) {
        const uint32 row = p.half_value.divide(n), channel = (n - row * half) * 2;
        const Joined joined = join_cta(p, kept, share.turns(), sums, shared, joined_teams, row, channel);
        if (alone) {
            write_results(p, pair, first_row(p, pair) + row, channel, joined.acc, joined.m, joined.l);
        } else {
            const uint32 owner = n >> log_received, at = n - (owner << log_received);
            send(received + (cta.rank << log_received) + at, owner, {joined.acc.x, joined.acc.y, joined.m, joined.l});
        }
    }
    if (alone) return;
    arrive_in_cluster();
    wait_for_cluster();
    for (uint32 at = threadIdx.x; at < 1u << log_received; at += THREADS) {
        const uint32 n = (cta.rank << log_received) + at;
        if (n >= pairs) break;
        const uint32 row = p.half_value.divide(n), channel = (n - row * half) * 2;
        const Joined joined = join_received(received + at, cta, 1 << log_received);
        write_results(p, pair, first_row(p, pair) + row, channel, joined.acc, joined.m, joined.l);
    }
}

#define REPAIR_KERNEL(name, Type, MAX_DIM)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const __grid_constant__ RepairParams p) { \
        repair_at_once<MmaEngine<Type, MAX_DIM, MAX_DIM>, MAX_DIM>(p);                                           \
    }

REPAIR_KERNEL(repair_bf16_128, Bfloat16, 128)
REPAIR_KERNEL(repair_f16_128, Float16, 128)
REPAIR_KERNEL(repair_fp8_128, Float8, 128)
