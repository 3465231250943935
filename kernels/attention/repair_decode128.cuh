// Repair in one launch, 8 rows at a time, with keys and values of 128 channels whose tokens lie side by side in tiles, where each block has a
// partial of its own (repair variant decode128). It is the common case of repair_one_launch.cu; its time is the number of round trips to memory.
//
// Runs where lists have up to 256 entries and sequences up to 8192 blocks: src/ops/attention/device/choose.rs. Clusters are of any size up to 8.
// Bytes, and what a cluster's CTAs send each other, are as in repair_one_launch.cu. Of more rows, as several query positions have, each 8 are a work item,
// for which the missed blocks are read once more, from the L2 cache: rows and their kept states are spread over more CTAs than a cluster for each list has.
//
// Each thread has one entry of either list. The blocks that the lists name are bits in shared memory: whether a partial serves, and whether a
// block is missed, takes one word of them. What parameters alone locate is requested before the wait for the previous kernel: into the L2 cache,
// and pages, which seldom change, as a guess. A warp's first kept states are requested with the lists, before it is known whether they serve.
// Missed tiles are dealt out to the CTAs of the cluster, then to their warps, beginning with the warps that have no states to join. A CTA that
// starts late computes the addresses that do not depend on lists while lists are on their way.
//
//   one round trip: lists, lengths, counts ─ bits ─┬─ tiles of missed blocks requested ─────────────────────── attended to ─┬─ joined
//     and the first kept states                    └─ pages compared with the guess, states that serve joined meanwhile ────┘
//   in the CTA ─ sent to the CTA of the cluster that joins these channels ─ joined, two channels a thread ─ results
#pragma once

#include "attention/decode128_tiles.cuh"
#include "attention/repair_cluster.cuh"

// Mirrored in src/ops/repair/cuda/decode128.rs, and the limits in src/ops/attention/device/choose.rs.
constexpr uint32 MOST_ENTRIES = THREADS, MOST_BLOCKS = 8192;
constexpr uint16 NO_BLOCK = 0xffff;
constexpr uint32 LARGEST_CLUSTER = 8;
constexpr uint32 HINTS = 8;        // guessed pages of one thread
constexpr uint32 LATE = WARP / 2;  // states that a warp requests at a time once it knows which serve

struct Blocks {
    uint32 words[MOST_BLOCKS / 32];
    __device__ void add(uint32 id) { atomicOr(words + id / 32, 1u << id % 32); }
    __device__ bool has(uint32 id) const { return words[id / 32] >> id % 32 & 1; }
};
struct MissedBlock {
    int32 page;
    uint32 id;
};
// A warp's states take the place of its ring: one of each row, and in slot KEPT_SLOT the sum of the kept states that it has joined.
constexpr uint32 KEPT_SLOT = WARP_ROWS, SLOTS = WARP_ROWS + 1, SLOT_PITCH = 128 + 4;

// Shared memory of a CTA, apart from rings. Entries that name no block that any row sees are NO_BLOCK.
struct RepairDecode128Shared {
    Arrival from_cluster;
    uint64 padding;
    Blocks of_predicted, of_selected;
    MissedBlock missed[MOST_ENTRIES];  // each word of 32 entries fills its part from the front
    alignas(16) uint32 up_to[WARPS];   // missed blocks of the words up to this one
    uint16 predicted[MOST_ENTRIES], selected[MOST_ENTRIES];
    float tops[WARPS][SLOTS], sums[WARPS][SLOTS];  // m and l of the states
};
static_assert(sizeof(RepairDecode128Shared) == 5744, "of src/ops/repair/cuda/decode128.rs");

__device__ inline void store_shared(uint32 to, int32 x) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
// Loads four floats; zeros where nothing is to be read.
__device__ inline float4 load_four_if(const char *address, uint32 is_there) {
    float4 x;
    asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %5, 0;\n\t"
                 "mov.f32 %0, 0f00000000;\n\tmov.f32 %1, 0f00000000;\n\tmov.f32 %2, 0f00000000;\n\tmov.f32 %3, 0f00000000;\n\t"
                 "@there ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w) : "l"(address), "r"(is_there) : "memory");
    return x;
}
// The maximum over the lanes, none of which has NaN.
__device__ inline float warp_max(float x) {
    const auto turned = [](int32 bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(turned(__reduce_max_sync(FULL_WARP, turned(__float_as_int(x)))));
}
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

// This CTA of a work item's cluster, which may be of any size.
struct Decode128ClusterCta {
    uint32 rank;
    Divisor ctas;
    __device__ explicit Decode128ClusterCta(const AttentionParams &p) : rank(cluster_rank()), ctas(p.ctas) {}
    __device__ bool is_alone() const { return ctas.value == 1; }
    // The most that any CTA has of n, split evenly.
    __device__ uint32 share_of(uint32 n) const { return ctas.divide(n + ctas.value - 1); }
    // How many of 0 … n − 1 this CTA has, which takes rank, rank + ctas, …
    __device__ uint32 turns_of(uint32 n) const { return n > rank ? ctas.divide(n - rank - 1) + 1 : 0; }
};

// The warp's share of the kept states of one row, 32 at a time: a lane has m and l of one state, and four channels of acc of all. The first EARLY
// states are requested before it is known which serve.
template <uint32 EARLY>
struct KeptPartials {
    KeptRow row;
    uint32 lane, first, end;  // the states first … end − 1
    int32 acc_step, m_step, l_step;
    const char *early_at[AT_ONCE], *m_at, *l_at;
    float lane_m, lane_l;
    const float4 *early;  // the first states, in shared memory
    // The sum of the states that serve.
    float4 acc;
    float m, l;

    // `other` is an address that is read where there is no state.
    __device__ KeptPartials(const RepairParams &r, const WorkItem &item, const KeptShare &share, const Decode128ClusterCta &cta, const char *other)
        : row(r, item, min(share.row(), share.rows - 1)), lane(threadIdx.x % WARP), acc{}, m(minus_infinity()), l(0.0f) {
        // The capacity of the list is split evenly, not its count, which is not known yet.
        const bool has_some = share.row() < share.rows && share.turn() >> share.log_turns() == 0;
        const uint32 all = has_some ? states(r) : 0, of_turn = (all + (1 << share.log_turns()) - 1) >> share.log_turns();
        const uint32 part = cta.share_of(of_turn);
        first = pin_in_register(((cta.rank << share.log_turns()) + share.turn()) * part);
        end = pin_in_register(min(first + part, all));
        row.acc = pin_in_register(row.acc);
        row.m = pin_in_register(row.m);
        row.l = pin_in_register(row.l);
        acc_step = pin_in_register(int32(r.kept.acc.step[3]));
        m_step = pin_in_register(int32(r.kept.m.step[3]));
        l_step = pin_in_register(int32(r.kept.l.step[3]));
        m_at = pin_in_register(first < end ? row.m + offset(min(first + lane, end - 1), m_step) : other);
        l_at = pin_in_register(first < end ? row.l + offset(min(first + lane, end - 1), l_step) : other);
        if (first >= end) return;
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) early_at[i] = pin_in_register(acc_of(i));
    }
    __device__ static uint32 states(const RepairParams &r) { return r.exact ? r.predicted_capacity : 1; }
    // As few turns as leave each warp EARLY states: other warps begin with tiles.
    __device__ static KeptShare share(const RepairParams &r, uint32 rows, const Decode128ClusterCta &cta) {
        return KeptShare(rows, log2_ceil((cta.share_of(states(r)) + EARLY - 1) / EARLY));
    }
    // acc of the warp's n-th state; past the last, of the last.
    __device__ const char *acc_of(uint32 n) const { return row.acc + offset(min(first + n, end - 1), acc_step); }
    __device__ void prefetch_first_reads(uint32 n) const {
        // Line by line: bulk requests of several lanes would follow each other.
        const char *const at = row.acc - lane * sizeof(float4) + offset(n, acc_step);
#pragma unroll
        for (uint32 line = 0; line < WARP * sizeof(float4); line += 128) prefetch(at + line);
    }
    // Asks the L2 cache for the states that are read whether they serve or not.
    __device__ void prefetch_first_reads() const {
        if (first + lane >= end) return;
        prefetch(m_at);
        prefetch(l_at);
        if (acc_step != WARP * sizeof(float4)) {
            if (lane < EARLY) prefetch_first_reads(first + lane);
        } else if (lane == 0) {
            prefetch_bulk(row.acc + offset(first, acc_step), min(end - first, EARLY) * WARP * sizeof(float4));
        }
    }
    __device__ void request(char *to) {
        early = reinterpret_cast<const float4 *>(to) + lane;
        lane_m = __int_as_float(load_word(m_at));
        lane_l = __int_as_float(load_word(l_at));
        if (first >= end) return;
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) copy_16(shared_address(early + i * WARP), early_at[i]);
#pragma unroll 1
        for (uint32 n = AT_ONCE; n < EARLY && first + n < end; n += AT_ONCE) {
#pragma unroll
            for (uint32 i = n; i < n + AT_ONCE; i++) copy_16(shared_address(early + i * WARP), acc_of(i));
        }
    }
    // Joins the states n for which serves(n).
    template <typename Serves>
    __device__ void join(Serves serves) {
#pragma unroll 1
        for (uint32 begin = 0; first + begin < end; begin += WARP) {
            const uint32 n = first + begin + lane;
            if (begin) {
                lane_m = __int_as_float(load_word(row.m + offset(min(n, end - 1), m_step)));
                lane_l = __int_as_float(load_word(row.l + offset(min(n, end - 1), l_step)));
            }
            const bool takes = serves(min(n, end - 1)) & (n < end) & (lane_l != 0.0f);
            uint32 left = __ballot_sync(FULL_WARP, takes);
            // The first LATE states are loaded right away.
            if (takes && lane >= LATE && (begin || EARLY < LATE)) prefetch_first_reads(n);
            const float own = takes ? lane_m * LOG2_E : minus_infinity(), top = fmaxf(m, warp_max(own));
            const float keep = weight(m, top), take = weight(own, top);
            m = top;
            l = l * keep + warp_sum(takes ? lane_l * take : 0.0f);
            acc = {acc.x * keep, acc.y * keep, acc.z * keep, acc.w * keep};
            // Weights and states of several are under way together: none stands in a branch of its own.
            const auto add = [&](const float4 &one, float weight) {
                acc = {fmaf(one.x, weight, acc.x), fmaf(one.y, weight, acc.y), fmaf(one.z, weight, acc.z), fmaf(one.w, weight, acc.w)};
            };
            bool has_early = begin == 0;
            const uint32 early_left = left;
            if (has_early) left &= ~0u << EARLY;
            uint32 from = left & ((1u << LATE) - 1) ? 0 : LATE;
#pragma unroll 1
            do {
                const uint32 late = left >> from;
                float4 one[LATE];
                if (late) {
                    const char *at = row.acc + offset(first + begin + from, acc_step);
#pragma unroll
                    for (uint32 i = 0; i < LATE; i++, at += acc_step) one[i] = load_four_if(at, late & 1u << i);
                }
                if (has_early) {
                    // While the late states are on their way.
                    has_early = false;
#pragma unroll
                    for (uint32 n = 0; n < EARLY; n += AT_ONCE) {
                        if (early_left >> n == 0) continue;
                        float4 x[AT_ONCE];
                        float weights[AT_ONCE];
#pragma unroll
                        for (uint32 i = 0; i < AT_ONCE; i++) {
                            x[i] = early[(n + i) * WARP];
                            weights[i] = __shfl_sync(FULL_WARP, take, n + i);
                        }
#pragma unroll
                        for (uint32 i = 0; i < AT_ONCE; i++) {
                            // A state that does not serve may be anything: zeros take its place.
                            const int32 mask = int32(early_left << (31 - n - i)) >> 31;
                            const auto masked = [&](float y) { return __int_as_float(__float_as_int(y) & mask); };
                            add({masked(x[i].x), masked(x[i].y), masked(x[i].z), masked(x[i].w)}, weights[i]);
                        }
                    }
                }
                if (late) {
                    float weights[LATE];
#pragma unroll
                    for (uint32 i = 0; i < LATE; i++) weights[i] = __shfl_sync(FULL_WARP, take, from + i);
#pragma unroll
                    for (uint32 i = 0; i < LATE; i++) add(one[i], weights[i]);
                }
                from += LATE;
            } while (from < WARP);
        }
    }
};

// Where the missed blocks' tiles lie that this warp takes, 32 at a time: each lane finds one.
struct MissedTiles {
    const AttentionParams &p;
    const RepairDecode128Shared &lists;
    const char *table;
    int32 table_step;
    uint32 first, step;  // the warp's first tile, and from one to the next
    uint32 up_to[WARPS];
    int32 position = -1;  // of the first token; −1: no row sees the tile
    uint32 page = 0, row = 0;

    __device__ MissedTiles(const AttentionParams &p, const RepairDecode128Shared &lists, const char *table, int32 table_step, uint32 first,
                           uint32 step)
        : p(p), lists(lists), table(table), table_step(table_step), first(first), step(step) {
        // Each lane reads for itself: for what a warp has in common the compiler would use uniform registers, which are slow to fill.
        const uint32 none = pin_in_register(threadIdx.x & 0);
#pragma unroll
        for (uint32 w = 0; w < WARPS; w += 4) {
            const uint4 four = *reinterpret_cast<const uint4 *>(&lists.up_to[none + w]);
            up_to[w] = four.x, up_to[w + 1] = four.y, up_to[w + 2] = four.z, up_to[w + 3] = four.w;
        }
    }
    __device__ uint32 missed() const { return up_to[WARPS - 1]; }
    __device__ void find(const Reach &reach, uint32 tile) {
        const uint32 x = (first + (tile + threadIdx.x % WARP) * step) * TILE, n = p.block.divide(x);
        position = -1;
        page = row = 0;
        if (n >= missed()) return;
        // Places that stay free in the words before.
        uint32 free = 0;
#pragma unroll
        for (uint32 w = 0; w < WARPS - 1; w++) free = max(free, n >= up_to[w] ? (w + 1) * WARP - up_to[w] : 0);
        const MissedBlock block = lists.missed[n + free];
        const int32 at = int32(block.id * p.block.value + (x - n * p.block.value));
        const bool has_pages = p.slots.data || p.table.data;
        const uint32 number = has_pages ? p.page.divide(at) : 0;
        page = block.page;
        // A block of several pages: this tile is in another page than the block's first token.
        const bool has_other = has_pages && !p.slots.data && p.block.value > p.page.value;
        if (has_other && uint32(at) < p.token_capacity) page = load_word(table + offset(number, table_step));
        row = at - number * p.page.value;
        if (at < reach.end && at + int32(TILE) > reach.begin && page < p.pages) position = at;
    }
};

// As Joined::add, without a branch: weights do not wait for each other.
template <uint32 N>
__device__ inline void join_branch_free(Joined &joined, const float2 (&acc)[N], const float (&m)[N], const float (&l)[N], uint32 count) {
    float own[N], top = joined.m;
#pragma unroll
    for (uint32 i = 0; i < N; i++) {
        own[i] = i < count ? m[i] : minus_infinity();
        top = fmaxf(top, own[i]);
    }
    // Where nothing is seen, −∞ − 0 and not −∞ + ∞.
    const float shift = top == minus_infinity() ? 0.0f : top, keep = exp2_fast(joined.m - shift);
#pragma unroll
    for (uint32 i = 0; i < N; i++) own[i] = exp2_fast(own[i] - shift);
    joined.m = top;
    joined.acc = {joined.acc.x * keep, joined.acc.y * keep};
    joined.l *= keep;
#pragma unroll
    for (uint32 i = 0; i < N; i++) {
        if (i >= count) continue;
        joined.acc = {fmaf(acc[i].x, own[i], joined.acc.x), fmaf(acc[i].y, own[i], joined.acc.y)};
        joined.l = fmaf(l[i], own[i], joined.l);
    }
}

template <typename Type>
__device__ inline void repair_decode128(const RepairParams &r) {
    using Compute = MmaCompute<Type, 128, 128>;
    constexpr uint32 PITCH = Compute::PITCH, V_OFFSET = TILE * PITCH, STAGE = sizeof(TokenInfo) + 2 * V_OFFSET, CHUNKS = 128 * Type::BYTES / 128;
    constexpr uint32 STAGES = Type::BYTES == 2 ? 3 : 4, EARLY = Type::BYTES == 2 ? 24 : 16, HALF = 128 / 2;
    // A warp's first states lie where its later stages will be: before they are joined it requests this many tiles.
    constexpr uint32 AHEAD = STAGES - (EARLY * WARP * sizeof(float4) + STAGE - 1) / STAGE;
    static_assert(AHEAD >= 1 && EARLY % AT_ONCE == 0 && HINTS * THREADS * sizeof(int32) <= AHEAD * STAGE);
    static_assert(SLOTS * SLOT_PITCH * sizeof(float) <= STAGES * STAGE);
    extern __shared__ __align__(128) char shared[];
    __shared__ uint32 words[WARP];

    // Everything that parameters alone decide precedes the wait for the previous kernel.
    const AttentionParams &p = r.to;
    const uint32 word = request_parameters(r);
    allow_next_kernel();
    Compute compute(p, shared, 0);
    const uint32 thread = pin_in_register(threadIdx.x), lane = thread % WARP, warp = thread / WARP;
    RepairDecode128Shared &lists = as<RepairDecode128Shared>(shared + r.lists_offset);
    const Decode128ClusterCta cta(p);
    const WorkItem item = work_item_of(p, cta.ctas.divide(blockIdx.x));
    // Guessed pages: the page table as it is before the wait, kept where tiles will be. It seldom changes. Tiles are requested where the guess
    // says, and once more where what is read after the wait differs.
    const bool has_slots = p.slots.data, has_table = !has_slots && p.table.data;
    const char *const table = pin_in_register(p.table.at(item.seq));
    const int32 table_step = pin_in_register(int32(p.table.step[1])), block = pin_in_register(int32(p.block.value));
    const uint32 table_entries = has_table && p.token_capacity ? p.page.divide(p.token_capacity - 1) + 1 : 0;
    const uint32 hinted = p.block.value <= p.page.value ? min(table_entries, HINTS * THREADS) : 0;
    int32 *const hints = reinterpret_cast<int32 *>(shared), hint[HINTS];
#pragma unroll
    for (uint32 i = 0; i < HINTS; i++) {
        if (i * THREADS >= hinted) break;
        hint[i] = load_hint(table + offset(min(i * THREADS + thread, hinted - 1), table_step));
    }
    // Two channels a thread: those that this CTA joins, from each CTA of the cluster.
    const uint32 row_begin = pin_in_register(first_row(p, item)), rows = pin_in_register(rows_of(p, item)), channel_pairs = rows * HALF, log_channel_pairs = log2_ceil(channel_pairs), most_own = cta.share_of(1 << log_channel_pairs);
    const auto begin_of = [&](uint32 rank) { return min(cta.share_of(rank << log_channel_pairs), channel_pairs); };
    const uint32 begin = begin_of(cta.rank), own = begin_of(cta.rank + 1) - begin;
    if (thread == 0 && !cta.is_alone()) {
        lists.from_cluster.open(1);
        lists.from_cluster.expect(own * sizeof(float4) * cta.ctas.value);
    }
    __syncwarp();
    if (!cta.is_alone()) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    lists.of_predicted.words[thread] = lists.of_selected.words[thread] = 0;
    if (thread < WARPS) lists.up_to[thread] = 0;
    static_assert(MOST_BLOCKS == THREADS * 32 && MOST_ENTRIES == THREADS);
    float4 *const received = reinterpret_cast<float4 *>(shared + pin_in_register(r.received_offset));
    char *const ring = shared + warp * STAGES * STAGE, *const queries = shared + pin_in_register(p.q_offset);

    // Where nothing is to be read, the address is the length's, so that no load stands under a condition.
    const char *const length_at = pin_in_register(p.seq_lens.at(item.seq)), *const rows_at = pin_in_register(p.q_lens.data ? p.q_lens.at(item.seq) : length_at);
    const char *const selected_count_at = pin_in_register(p.counts.at(item.seq, item.position, item.head));
    const char *const predicted_count_at = pin_in_register(r.predicted_counts.at(item.seq, item.position, item.head));
    // Lane n requests the n-th of the four for its warp. A load that is the same for all lanes would go through a uniform register, and be waited
    // for before the rest is requested.
    const char *const fact_at = pin_in_register(lane == 0 ? length_at : lane == 1 ? rows_at : lane == 2 ? selected_count_at : predicted_count_at);
    const char *const selected_at = pin_in_register(thread < p.list_capacity ? p.ids.at(item.seq, item.position, item.head, thread) : length_at);
    const bool has_predicted = thread < r.predicted_capacity;
    const char *const predicted_at = pin_in_register(has_predicted ? r.predicted.at(item.seq, item.position, item.head, thread) : length_at);
    const bool has_rows_seen = pin_in_register(uint32(p.q_lens.data != nullptr));
    const char *const slot_at = pin_in_register(has_slots && thread < p.list_capacity ? p.slots.at(item.seq, item.position, item.head, thread) : length_at);
    const uint32 hint_to = pin_in_register(shared_address(hints + thread));
    prefetch(selected_at);
    prefetch(predicted_at);
    if (warp == 0 && lane < 4) prefetch(fact_at);
    const KeptShare share = KeptPartials<EARLY>::share(r, rows, cta);
    KeptPartials<EARLY> kept(r, item, share, cta, length_at);
    kept.prefetch_first_reads();
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    wait_for_previous_kernel();

    int32 selected_id, predicted_id, fact, slot;
    // A loop of one turn, since each block has a partial of its own, which the compiler cannot know: it puts no instruction that waits for one of
    // these loads between them.
    uint32 turns_left = pin_in_register(r.entries.value);
#pragma unroll 1
    do {
        selected_id = load_word(selected_at);
        predicted_id = load_word(predicted_at);
        fact = load_word(fact_at);
        slot = load_word(slot_at);
    } while (--turns_left);
    // What depends on none of these loads is computed while they are on their way.
    // A warp copies a row; rows that do not exist are copies of the first.
    const RowPlace query_place = place_of_row(p, item, row_begin + (warp < rows ? warp : 0));
    const char *const query = pin_in_register(p.q.at(item.seq, query_place.position, query_place.head) + lane % 16 * 16);
    if (lane < 16) copy_16(shared_address(queries) + warp * Compute::QUERY_PITCH + lane * 16, query);
    end_copies();
    kept.request(ring + AHEAD * STAGE);
    end_copies();
    const char *const keys = pin_in_register(p.k.at(0, 0, item.head) + lane / 8 * p.k.step[1] + lane % 8 * 16);
    const char *const values = pin_in_register(p.v.at(0, 0, item.head) + lane / 8 * p.v.step[1] + lane % 8 * 16);
    const int32 k_page = pin_in_register(int32(p.k.step[0])), k_row = pin_in_register(int32(p.k.step[1]));
    const int32 v_page = pin_in_register(int32(p.v.step[0])), v_row = pin_in_register(int32(p.v.step[1]));
    preload_parameter(p.out.data);
    preload_parameter(p.lse.data);
    preload_parameter(p.sinks.data);
    preload_parameter(p.state.l.data);
    preload_parameter(r.missed.data);
    __syncthreads();
    if (!cta.is_alone()) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    const int32 length = __shfl_sync(FULL_WARP, fact, 0), rows_seen = __shfl_sync(FULL_WARP, fact, 1);
    const int32 selected_count = __shfl_sync(FULL_WARP, fact, 2), predicted_count = __shfl_sync(FULL_WARP, fact, 3);
    const Reach reach = Reach::of(p, item, clamped(length, p.token_capacity), has_rows_seen ? clamped(rows_seen, p.positions) : p.positions);
    const uint32 blocks = blocks_of(p, reach);
    const bool is_selected = thread < uint32(clamped(selected_count, p.list_capacity)) && uint32(selected_id) < blocks;
    const bool is_predicted = thread < uint32(clamped(predicted_count, r.predicted_capacity)) && uint32(predicted_id) < blocks;
    // The guesses were requested at the very start; this is their first use.
#pragma unroll
    for (uint32 i = 0; i < HINTS; i++) {
        if (i * THREADS >= hinted) break;
        store_shared(hint_to + i * THREADS * sizeof(int32), hint[i]);
    }
    // Pages are requested before it is known which blocks are missed.
    int32 page = has_slots ? slot : item.seq, guess = page;
    const uint32 number = is_selected && has_table ? p.page.divide(selected_id * block) : 0;
    if (has_table) page = load_word(is_selected ? table + offset(number, table_step) : length_at);
    const bool is_guessed = !has_table || number < hinted;
    if (is_selected) lists.of_selected.add(selected_id);
    if (is_predicted) lists.of_predicted.add(predicted_id);
    lists.selected[thread] = is_selected ? selected_id : NO_BLOCK;
    lists.predicted[thread] = is_predicted ? predicted_id : NO_BLOCK;
    wait_copies<1>();
    __syncthreads();
    if (has_table) guess = hints[min(number, HINTS * THREADS - 1)];
    const bool is_again = lists.selected[thread ? thread - 1 : 0] == selected_id && thread;
    const bool is_missed = is_selected & !is_again & !lists.of_predicted.has(is_selected ? selected_id : 0);
    const uint32 bits = __ballot_sync(FULL_WARP, is_missed);
    if (lane >= warp && lane < WARPS) atomicAdd(&lists.up_to[lane], __popc(bits));
    MissedBlock &own_block = lists.missed[warp * WARP + __popc(bits & ((1u << lane) - 1))];
    if (is_missed) own_block = {guess, uint32(selected_id)};
    if (__any_sync(FULL_WARP, is_missed && !is_guessed)) {
        // Only here the page is waited for.
        __syncwarp();
        if (is_missed && !is_guessed) own_block.page = page;
    }
    __syncthreads();
    // Tiles are dealt out to the CTAs, and then to their warps from the last on: the first warps have states to join.
    const uint32 number_of_warp = WARPS - 1 - warp;
    MissedTiles tiles(p, lists, table, table_step, number_of_warp * cta.ctas.value + cta.rank, WARPS * cta.ctas.value);
    const uint32 missed = tiles.missed(), attended = cta.turns_of(missed * block / TILE);
    const uint32 count = (attended + WARPS - 1 - number_of_warp) / WARPS;

    // Tokens that every row sees.
    const bool has_rows = p.own_lists || reach.queries == int32(p.positions);
    const int32 seen_end = p.own_lists ? reach.end : has_rows ? reach.length - reach.queries + 1 : 0;
    const int32 seen_begin = p.window ? max((p.own_lists ? reach.end : reach.length) - int32(p.window), 0) : 0;
    uint32 is_fully_seen = 0;  // bit n: stage n
    const auto load = [&](uint32 tile, uint32 at) {
        if (tile % WARP == 0) tiles.find(reach, tile);
        const uint32 from = tile % WARP, row = __shfl_sync(FULL_WARP, tiles.row, from);
        const int32 position = __shfl_sync(FULL_WARP, tiles.position, from), page = __shfl_sync(FULL_WARP, int32(tiles.page), from);
        const char *from_key = keys + offset(page, k_page) + offset(row, k_row);
        const char *from_value = values + offset(page, v_page) + offset(row, v_row);
        char *const to = ring + at * STAGE;
        const uint32 k_to = keys_of_lane<Compute>(to, lane);
        const bool fully_seen = position >= seen_begin && position + int32(TILE) <= seen_end;
        is_fully_seen = (is_fully_seen & ~(1u << at)) | uint32(fully_seen) << at;
        if (fully_seen) {
            load_fully_seen_tile<Compute>(k_to, from_key, from_value, k_row, v_row);
            return;
        }
#pragma unroll 1
        for (uint32 n = lane / 8; n < TILE; n += 4) {
            const bool is_there = is_reached(reach, position, n);
            const uint32 row_to = k_to + (n - lane / 8) * PITCH;
#pragma unroll
            for (uint32 j = 0; j < CHUNKS; j++) {
                copy_16(row_to + j * 128, is_there ? from_key + j * 128 : p.k.data, is_there);
                copy_16(row_to + V_OFFSET + j * 128, is_there ? from_value + j * 128 : p.v.data, is_there);
            }
            if (lane % 8 == 0) as<TokenInfo>(to).position[n] = is_there ? position + int32(n) : -1;
            from_key += 4 * int64(k_row);
            from_value += 4 * int64(v_row);
        }
    };
#pragma unroll 1
    for (bool is_unsure = missed && hinted;; is_unsure = false) {
#pragma unroll 1
        for (uint32 step = 0; step < AHEAD; step++) {
            if (step < count) load(step, step);
            end_copies();
        }
        if (!is_unsure) break;
        const bool is_wrong = is_missed && is_guessed && pin_in_register(page) != guess;
        if (is_wrong) own_block.page = page;
        if (!__syncthreads_or(is_wrong)) break;
        wait_copies<0>();
        __syncwarp();
    }
    wait_copies<AHEAD>();
    int32 from;
    uint32 seen;
    reach.row(p, kept.row.position, from, seen);
    // A row that sees nothing starts from nothing, whatever was kept.
    if (seen)
        kept.join([&](uint32 n) {
            if (!r.exact) return true;
            const uint32 id = lists.predicted[n], before = lists.predicted[n ? n - 1 : 0];
            return bool(id != NO_BLOCK & (before != id || n == 0) & lists.of_selected.has(id != NO_BLOCK ? id : 0));
        });
    if (count) {
        compute.read_reach(item, reach, 0);
        compute.template queries_to_registers<WARP_ROWS>(shared_address(queries));
    }
#pragma unroll 1
    for (uint32 step = AHEAD, at = AHEAD % STAGES;; step++) {
        if (step >= STAGES) {
            if (step - STAGES >= count) break;
            wait_copies<STAGES - 1>();
            __syncwarp();
            compute.attend(ring + at * STAGE, is_fully_seen >> at & 1, step == STAGES);
            __syncwarp();
        }
        if (step < count) load(step, at);
        end_copies();
        at = at + 1 == STAGES ? 0 : at + 1;
    }
    if (count) {
        compute.finish();
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            if (compute.row(i) >= rows) continue;
            float *const to = reinterpret_cast<float *>(ring) + compute.row(i) * SLOT_PITCH + compute.channel(0, 0);
#pragma unroll
            for (uint32 n = 0; n < Compute::CHANNELS / 8; n++)
                to[compute.channel(n / 2, n % 2) - compute.channel(0, 0)] = compute.acc[0][n / 2][n % 2 * 2 + i];
            if (lane >= 4) continue;
            lists.tops[warp][compute.row(i)] = compute.m[0][i];
            lists.sums[warp][compute.row(i)] = compute.l[0][i];
        }
    }
    reinterpret_cast<float4 *>(ring)[KEPT_SLOT * SLOT_PITCH / 4 + lane] = kept.acc;
    if (lane == 0) {
        lists.tops[warp][KEPT_SLOT] = kept.m;
        lists.sums[warp][KEPT_SLOT] = kept.l;
    }
    __syncthreads();

    // Each turn has one sum of kept states, each warp with tiles one state of missed blocks: up to ten states of four rows, joined five at a time.
    constexpr uint32 JOINED_AT_ONCE = 5;
    const uint32 turns = 1 << share.log_turns(), states = turns + min(attended, WARPS);
#pragma unroll 1
    for (uint32 n = thread; n < channel_pairs; n += THREADS) {
        const uint32 row = n / HALF, channel = n % HALF * 2;
        Joined joined;
#pragma unroll 1
        for (uint32 i = 0; i < states; i += JOINED_AT_ONCE) {
            float2 acc[JOINED_AT_ONCE];
            float m[JOINED_AT_ONCE], l[JOINED_AT_ONCE];
#pragma unroll
            for (uint32 k = 0; k < JOINED_AT_ONCE; k++) {
                const uint32 state = min(i + k, states - 1);
                const bool was_kept = state < turns;
                const uint32 from = was_kept ? (state << share.log_rows) + row : WARPS - 1 - (state - turns);
                const uint32 slot = was_kept ? KEPT_SLOT : row;
                acc[k] = *reinterpret_cast<const float2 *>(shared + from * STAGES * STAGE + (slot * SLOT_PITCH + channel) * sizeof(float));
                m[k] = lists.tops[from][slot];
                l[k] = lists.sums[from][slot];
            }
            join_branch_free(joined, acc, m, l, states - i);
        }
        const uint32 owner = n * cta.ctas.value >> log_channel_pairs;
        const float4 x{joined.acc.x, joined.acc.y, joined.m, joined.l};
        if (!cta.is_alone()) lists.from_cluster.send(received + cta.rank * most_own + n - begin_of(owner), owner, x);
        else received[n] = x;
    }
    if (cta.is_alone()) __syncthreads();
    // Written here, where nothing waits for it.
    if (r.missed.data && cta.rank == 0 && thread == 0 && item.row_block == 0) as<int32>(r.missed.at(item.seq, item.position, item.head)) = missed;
#pragma unroll 1
    for (uint32 n = thread; n < own; n += THREADS) {
        const uint32 row = (begin + n) / HALF, channel = (begin + n) % HALF * 2;
        // Computed while the states are on their way.
        const RowPlace place = place_of_row(p, item, row_begin + row);
        char *const out = pin_in_register(p.out.at(item.seq, place.position, place.head, channel));
        if (!cta.is_alone()) lists.from_cluster.wait(0);
        float2 acc[LARGEST_CLUSTER];
        float m[LARGEST_CLUSTER], l[LARGEST_CLUSTER];
#pragma unroll
        for (uint32 i = 0; i < LARGEST_CLUSTER; i++) {
            const float4 x = received[min(i, cta.ctas.value - 1) * most_own + n];
            acc[i] = {x.x, x.y};
            m[i] = x.z;
            l[i] = x.w;
        }
        Joined joined;
        join_branch_free(joined, acc, m, l, cta.ctas.value);
        if (!is_written(p, item, place.position)) continue;
        joined.acc = unless_empty(joined.acc, joined.l);
        if (p.out.data) write_out(p, out, joined.acc, norm_of(p, place.head, joined.m, joined.l));
        write_state(p, item, place, channel, joined.acc, joined.m, joined.l);
    }
}

#define REPAIR_DECODE128_KERNEL(name, Type) \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ RepairParams p) { repair_decode128<Type>(p); }
