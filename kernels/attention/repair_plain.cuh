// Repair in one launch, of up to 8 rows, with keys and values of 128 channels whose tokens lie side by side in tiles, where each block has
// a partial of its own: the common case of repair.cu, in which nothing counts but how often memory is waited for.
//
// Bytes, and what a cluster's CTAs send each other, as there. A thread has an entry of either list. Which blocks they name are bits in
// shared memory: whether a partial serves, and whether a block is missed, is one word of them. What lies where parameters alone say is
// asked for before the kernel waits for the one before: into the L2 cache; page tables, which seldom change, as a guess. A warp's first
// states are asked for with the lists, whether they will serve or not. Tiles go round the CTAs of the cluster, then round their warps,
// from those on that have no states to join. A CTA that starts late has all of its addresses still to find: what lists do not hang on is
// found while those are on their way. Clusters are of any size.
//
//   one round trip: lists, lengths, counts ─ bits ─┬─ tiles of missed blocks asked for ───────────────────── attended to ─┬─ joined
//     and the first states that were kept          └─ pages compared with the guess, states that serve joined meanwhile ──┘
//   in the CTA ─ sent to that CTA of the cluster that has these channels ─ joined, two channels a thread ─ results
#pragma once

#include "attention/plain.cuh"
#include "attention/repair_cluster.cuh"

// Mirrored in src/ops/repair/cuda/at_once.rs.
constexpr uint32 MOST_ENTRIES = THREADS, MOST_BLOCKS = 8192;
constexpr uint16 NO_BLOCK = 0xffff;
constexpr uint32 LARGEST_CLUSTER = 8;
constexpr uint32 HINTS = 8;        // of a thread
constexpr uint32 LATE = WARP / 2;  // states that a warp asks for at a time once it knows which serve

struct Blocks {
    uint32 words[MOST_BLOCKS / 32];
    __device__ void add(uint32 id) { atomicOr(words + id / 32, 1u << id % 32); }
    __device__ bool has(uint32 id) const { return words[id / 32] >> id % 32 & 1; }
};
struct MissedBlock {
    int32 page;
    uint32 id;
};
// A warp's states take the place of its tiles: that of each row it attended for, and the one that it joined of what was kept.
constexpr uint32 KEPT_SLOT = WARP_ROWS, SLOTS = WARP_ROWS + 1, SLOT_PITCH = 128 + 4;

// Of a CTA, beside its tiles. Entries that name no block that its pair's rows may see are NO_BLOCK.
struct PlainShared {
    Arrival from_cluster;
    uint64 padding;
    Blocks of_predicted, of_selected;
    MissedBlock missed[MOST_ENTRIES];     // those of each word of 32 entries side by side
    alignas(16) uint32 up_to[WARPS];      // missed blocks of the words up to here
    uint16 predicted[MOST_ENTRIES], selected[MOST_ENTRIES];
    float tops[WARPS][SLOTS], sums[WARPS][SLOTS];  // m and l of states
};
static_assert(sizeof(PlainShared) == 5744, "of at_once.rs");

__device__ inline void store_shared(uint32 to, int32 x) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
// Zeros where nothing is to be read.
__device__ inline float4 asked_four(const char *address, uint32 is_there) {
    float4 x;
    asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %5, 0;\n\t"
                 "mov.f32 %0, 0f00000000;\n\tmov.f32 %1, 0f00000000;\n\tmov.f32 %2, 0f00000000;\n\tmov.f32 %3, 0f00000000;\n\t"
                 "@there ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w) : "l"(address), "r"(is_there) : "memory");
    return x;
}
// Of no NaN.
__device__ inline float warp_max(float x) {
    const auto turned = [](int32 bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(turned(__reduce_max_sync(FULL_WARP, turned(__float_as_int(x)))));
}
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

// A CTA of a pair's cluster.
struct PlainMember {
    uint32 rank;
    Divisor ctas;
    __device__ explicit PlainMember(const AttentionParams &p) : rank(cluster_rank()), ctas(p.ctas) {}
    __device__ bool is_alone() const { return ctas.value == 1; }
    // The most that one of them has of `n`, cut evenly.
    __device__ uint32 share_of(uint32 n) const { return ctas.divide(n + ctas.value - 1); }
    // Those among `n` that go round, from this one's first on.
    __device__ uint32 turns_of(uint32 n) const { return n > rank ? ctas.divide(n - rank - 1) + 1 : 0; }
};

// The warp's share of the states that were kept of a row, 32 at a time: a lane knows m and l of one, and four channels of acc of all.
// EARLY of them are asked for before it is known which serve.
template <uint32 EARLY>
struct PlainKept {
    KeptRow row;
    uint32 lane, first, end;  // states, side by side
    int32 acc_step, m_step, l_step;
    const char *early_at[AT_ONCE], *m_at, *l_at;
    float lane_m, lane_l;
    const float4 *early;  // the first states, in shared memory
    // What they have come to.
    float4 acc;
    float m, l;

    // `other` is read where there is nothing.
    __device__ PlainKept(const RepairParams &r, const Pair &pair, const KeptShare &share, const PlainMember &cta, const char *other)
        : row(r, pair, min(share.row(), share.rows - 1)), lane(threadIdx.x % WARP), acc{}, m(minus_infinity()), l(0.0f) {
        // What there is room for is cut evenly.
        const bool has_some = share.row() < share.rows && share.turn() >> share.log_turns() == 0;
        const uint32 all = has_some ? states(r) : 0, of_turn = (all + (1 << share.log_turns()) - 1) >> share.log_turns();
        const uint32 part = cta.share_of(of_turn);
        first = held(((cta.rank << share.log_turns()) + share.turn()) * part);
        end = held(min(first + part, all));
        row.acc = held(row.acc);
        row.m = held(row.m);
        row.l = held(row.l);
        acc_step = held(int32(r.kept.acc.step[3]));
        m_step = held(int32(r.kept.m.step[3]));
        l_step = held(int32(r.kept.l.step[3]));
        m_at = held(first < end ? row.m + offset(min(first + lane, end - 1), m_step) : other);
        l_at = held(first < end ? row.l + offset(min(first + lane, end - 1), l_step) : other);
        if (first >= end) return;
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) early_at[i] = held(acc_of(i));
    }
    __device__ static uint32 states(const RepairParams &r) { return r.exact ? r.predicted_cap : 1; }
    // As few turns as have but their first states to join: other warps begin with tiles.
    __device__ static KeptShare share(const RepairParams &r, uint32 rows, const PlainMember &cta) {
        return KeptShare(rows, log2_ceil((cta.share_of(states(r)) + EARLY - 1) / EARLY));
    }
    // Past the last state, the last.
    __device__ const char *acc_of(uint32 n) const { return row.acc + offset(min(first + n, end - 1), acc_step); }
    __device__ void announce(uint32 n) const {
        // Line by line: in bulk, lanes would ask one after the other.
        const char *const at = row.acc - lane * sizeof(float4) + offset(n, acc_step);
#pragma unroll
        for (uint32 line = 0; line < WARP * sizeof(float4); line += 128) prefetch(at + line);
    }
    // What is asked for whether it serves or not.
    __device__ void announce() const {
        if (first + lane >= end) return;
        prefetch(m_at);
        prefetch(l_at);
        if (acc_step != WARP * sizeof(float4)) {
            if (lane < EARLY) announce(first + lane);
        } else if (lane == 0) {
            prefetch_bulk(row.acc + offset(first, acc_step), min(end - first, EARLY) * WARP * sizeof(float4));
        }
    }
    __device__ void ask(char *to) {
        early = reinterpret_cast<const float4 *>(to) + lane;
        lane_m = __int_as_float(asked(m_at));
        lane_l = __int_as_float(asked(l_at));
        if (first >= end) return;
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) copy_16(shared_address(early + i * WARP), early_at[i]);
#pragma unroll 1
        for (uint32 n = AT_ONCE; n < EARLY && first + n < end; n += AT_ONCE) {
#pragma unroll
            for (uint32 i = n; i < n + AT_ONCE; i++) copy_16(shared_address(early + i * WARP), acc_of(i));
        }
    }
    // Joins those of which `serves` says so.
    template <typename Serves>
    __device__ void join(Serves serves) {
#pragma unroll 1
        for (uint32 begin = 0; first + begin < end; begin += WARP) {
            const uint32 n = first + begin + lane;
            if (begin) {
                lane_m = __int_as_float(asked(row.m + offset(min(n, end - 1), m_step)));
                lane_l = __int_as_float(asked(row.l + offset(min(n, end - 1), l_step)));
            }
            const bool takes = serves(min(n, end - 1)) & (n < end) & (lane_l != 0.0f);
            uint32 left = __ballot_sync(FULL_WARP, takes);
            // The first of them are asked for right away.
            if (takes && lane >= LATE && (begin || EARLY < LATE)) announce(n);
            const float own = takes ? lane_m * LOG2_E : minus_infinity(), top = fmaxf(m, warp_max(own));
            const float keep = weight(m, top), take = weight(own, top);
            m = top;
            l = l * keep + warp_sum(takes ? lane_l * take : 0.0f);
            acc = {acc.x * keep, acc.y * keep, acc.z * keep, acc.w * keep};
            // Weights and states of several are on their way at once: none has a branch to itself.
            const auto add = [&](const float4 &one, float its) {
                acc = {fmaf(one.x, its, acc.x), fmaf(one.y, its, acc.y), fmaf(one.z, its, acc.z), fmaf(one.w, its, acc.w)};
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
                    for (uint32 i = 0; i < LATE; i++, at += acc_step) one[i] = asked_four(at, late & 1u << i);
                }
                if (has_early) {
                    // While those come.
                    has_early = false;
#pragma unroll
                    for (uint32 n = 0; n < EARLY; n += AT_ONCE) {
                        if (early_left >> n == 0) continue;
                        float4 x[AT_ONCE];
                        float its[AT_ONCE];
#pragma unroll
                        for (uint32 i = 0; i < AT_ONCE; i++) {
                            x[i] = early[(n + i) * WARP];
                            its[i] = __shfl_sync(FULL_WARP, take, n + i);
                        }
#pragma unroll
                        for (uint32 i = 0; i < AT_ONCE; i++) {
                            // What does not serve may be anything: zeros in its place.
                            const int32 mask = int32(early_left << (31 - n - i)) >> 31;
                            const auto masked = [&](float y) { return __int_as_float(__float_as_int(y) & mask); };
                            add({masked(x[i].x), masked(x[i].y), masked(x[i].z), masked(x[i].w)}, its[i]);
                        }
                    }
                }
                if (late) {
                    float its[LATE];
#pragma unroll
                    for (uint32 i = 0; i < LATE; i++) its[i] = __shfl_sync(FULL_WARP, take, from + i);
#pragma unroll
                    for (uint32 i = 0; i < LATE; i++) add(one[i], its[i]);
                }
                from += LATE;
            } while (from < WARP);
        }
    }
};

// Where the missed blocks' tiles lie: those of a warp, 32 of them, a tile a lane.
struct MissedTiles {
    const AttentionParams &p;
    const PlainShared &lists;
    const char *table;
    int32 table_step;
    uint32 first, step;         // tile, from one to the next
    uint32 up_to[WARPS];
    int32 position = -1;        // −1: nobody sees it
    uint32 page = 0, row = 0;

    __device__ MissedTiles(const AttentionParams &p, const PlainShared &lists, const char *table, int32 table_step, uint32 first,
                           uint32 step)
        : p(p), lists(lists), table(table), table_step(table_step), first(first), step(step) {
        // Each lane's own: of what a warp has in common the compiler would make uniform registers, which are slow to fill.
        const uint32 none = held(threadIdx.x & 0);
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
        // Entries without one in the words before.
        uint32 free = 0;
#pragma unroll
        for (uint32 w = 0; w < WARPS - 1; w++) free = max(free, n >= up_to[w] ? (w + 1) * WARP - up_to[w] : 0);
        const MissedBlock block = lists.missed[n + free];
        const int32 at = int32(block.id * p.block.value + (x - n * p.block.value));
        const bool has_pages = p.slots.data || p.table.data;
        const uint32 number = has_pages ? p.page.divide(at) : 0;
        page = block.page;
        // A block of several pages: here it is another one.
        const bool has_other = has_pages && !p.slots.data && p.block.value > p.page.value;
        if (has_other && uint32(at) < p.capacity) page = asked(table + offset(number, table_step));
        row = at - number * p.page.value;
        if (at < reach.end && at + int32(TILE) > reach.begin && page < p.pages) position = at;
    }
};

// As Joined::add, without a branch: weights do not wait for each other.
template <uint32 N>
__device__ inline void join_at_once(Joined &joined, const float2 (&acc)[N], const float (&m)[N], const float (&l)[N], uint32 count) {
    float own[N], top = joined.m;
#pragma unroll
    for (uint32 i = 0; i < N; i++) {
        own[i] = i < count ? m[i] : minus_infinity();
        top = fmaxf(top, own[i]);
    }
    // Where nothing is seen, −inf − 0 and not −inf + inf.
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
__device__ inline void repair_plain(const RepairParams &r) {
    using Engine = MmaEngine<Type, 128, 128>;
    constexpr uint32 PITCH = Engine::PITCH, V_OFFSET = TILE * PITCH, STAGE = sizeof(Facts) + 2 * V_OFFSET, CHUNKS = 128 * Type::BYTES / 128;
    constexpr uint32 STAGES = Type::BYTES == 2 ? 3 : 4, EARLY = Type::BYTES == 2 ? 24 : 16, HALF = 128 / 2;
    // A warp's first states lie where the later stages will be: before they are joined it asks for this many tiles.
    constexpr uint32 AHEAD = STAGES - (EARLY * WARP * sizeof(float4) + STAGE - 1) / STAGE;
    static_assert(AHEAD >= 1 && EARLY % AT_ONCE == 0 && HINTS * THREADS * sizeof(int32) <= AHEAD * STAGE);
    static_assert(SLOTS * SLOT_PITCH * sizeof(float) <= STAGES * STAGE);
    extern __shared__ __align__(128) char shared[];
    __shared__ uint32 words[WARP];

    // What parameters alone decide comes before the wait for the kernel before.
    const AttentionParams &p = r.to;
    const uint32 word = ask_for_parameters(r);
    allow_next_kernel();
    Engine engine(p, shared, 0);
    const uint32 thread = held(threadIdx.x), lane = thread % WARP, warp = thread / WARP;
    PlainShared &lists = as<PlainShared>(shared + r.lists_offset);
    const PlainMember cta(p);
    const Pair pair = pair_of(p, cta.ctas.divide(blockIdx.x));
    // Pages as they are now, kept where tiles will be. They seldom change: tiles are asked for where these say, and once more where what is
    // read after the wait says otherwise.
    const bool has_slots = p.slots.data, has_table = !has_slots && p.table.data;
    const char *const table = held(p.table.at(pair.seq));
    const int32 table_step = held(int32(p.table.step[1])), block = held(int32(p.block.value));
    const uint32 table_entries = has_table && p.capacity ? p.page.divide(p.capacity - 1) + 1 : 0;
    const uint32 hinted = p.block.value <= p.page.value ? min(table_entries, HINTS * THREADS) : 0;
    int32 *const hints = reinterpret_cast<int32 *>(shared), hint[HINTS];
#pragma unroll
    for (uint32 i = 0; i < HINTS; i++) {
        if (i * THREADS >= hinted) break;
        hint[i] = load_hint(table + offset(min(i * THREADS + thread, hinted - 1), table_step));
    }
    // Two channels a thread: those of each CTA of the cluster that this one joins.
    const uint32 rows = held(p.rows), pairs = rows * HALF, log_pairs = log2_ceil(pairs), most_own = cta.share_of(1 << log_pairs);
    const auto begin_of = [&](uint32 rank) { return min(cta.share_of(rank << log_pairs), pairs); };
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
    float4 *const received = reinterpret_cast<float4 *>(shared + held(r.received_offset));
    char *const ring = shared + warp * STAGES * STAGE, *const queries = shared + held(p.q_offset);

    // Of what is not to be read that of the length, so that nothing is read under a condition.
    const char *const length_at = held(p.seq_lens.at(pair.seq)), *const rows_at = held(p.q_lens.data ? p.q_lens.at(pair.seq) : length_at);
    const char *const selected_count_at = held(p.counts.at(pair.seq, pair.position, pair.head));
    const char *const predicted_count_at = held(r.predicted_counts.at(pair.seq, pair.position, pair.head));
    // A lane asks for one of the four for its warp. What is the same for all lanes would be moved to where the warp has it once, and waited
    // for on the way, before the rest is asked for.
    const char *const fact_at = held(lane == 0 ? length_at : lane == 1 ? rows_at : lane == 2 ? selected_count_at : predicted_count_at);
    const char *const selected_at = held(thread < p.cap ? p.ids.at(pair.seq, pair.position, pair.head, thread) : length_at);
    const bool has_predicted = thread < r.predicted_cap;
    const char *const predicted_at = held(has_predicted ? r.predicted.at(pair.seq, pair.position, pair.head, thread) : length_at);
    const bool has_rows_seen = held(uint32(p.q_lens.data != nullptr));
    const char *const slot_at = held(has_slots && thread < p.cap ? p.slots.at(pair.seq, pair.position, pair.head, thread) : length_at);
    const uint32 hint_to = held(shared_address(hints + thread));
    prefetch(selected_at);
    prefetch(predicted_at);
    if (warp == 0 && lane < 4) prefetch(fact_at);
    const KeptShare share = PlainKept<EARLY>::share(r, rows, cta);
    PlainKept<EARLY> kept(r, pair, share, cta, length_at);
    kept.announce();
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    wait_for_previous_kernel();

    int32 selected_id, predicted_id, fact, slot;
    // A loop of one turn, of which the compiler does not know that: nothing that waits for one of these comes between them.
    uint32 turns_left = held(p.row_blocks.value);
#pragma unroll 1
    do {
        selected_id = asked(selected_at);
        predicted_id = asked(predicted_at);
        fact = asked(fact_at);
        slot = asked(slot_at);
    } while (--turns_left);
    // While those come, what nothing before them needs.
    // A warp copies a row; rows that do not exist are copies of the first.
    const RowPlace query_place = place_of_row(p, pair, warp < rows ? warp : 0);
    const char *const query = held(p.q.at(pair.seq, query_place.position, query_place.head) + lane % 16 * 16);
    if (lane < 16) copy_16(shared_address(queries) + warp * Engine::QUERY_PITCH + lane * 16, query);
    end_copies();
    kept.ask(ring + AHEAD * STAGE);
    end_copies();
    const char *const keys = held(p.k.at(0, 0, pair.head) + lane / 8 * p.k.step[1] + lane % 8 * 16);
    const char *const values = held(p.v.at(0, 0, pair.head) + lane / 8 * p.v.step[1] + lane % 8 * 16);
    const int32 k_page = held(int32(p.k.step[0])), k_row = held(int32(p.k.step[1]));
    const int32 v_page = held(int32(p.v.step[0])), v_row = held(int32(p.v.step[1]));
    touch(p.out.data);
    touch(p.lse.data);
    touch(p.sinks.data);
    touch(p.state.l.data);
    touch(r.missed.data);
    __syncthreads();
    if (!cta.is_alone()) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    const int32 length = __shfl_sync(FULL_WARP, fact, 0), rows_seen = __shfl_sync(FULL_WARP, fact, 1);
    const int32 selected_count = __shfl_sync(FULL_WARP, fact, 2), predicted_count = __shfl_sync(FULL_WARP, fact, 3);
    const Reach reach = Reach::of(p, pair, clamped(length, p.capacity), has_rows_seen ? clamped(rows_seen, p.positions) : p.positions);
    const uint32 blocks = blocks_of(p, reach);
    const bool is_selected = thread < uint32(clamped(selected_count, p.cap)) && uint32(selected_id) < blocks;
    const bool is_predicted = thread < uint32(clamped(predicted_count, r.predicted_cap)) && uint32(predicted_id) < blocks;
    // The guesses were asked for at the very start, but nothing needs them before this.
#pragma unroll
    for (uint32 i = 0; i < HINTS; i++) {
        if (i * THREADS >= hinted) break;
        store_shared(hint_to + i * THREADS * sizeof(int32), hint[i]);
    }
    // Pages are asked for before it is known who is missed.
    int32 page = has_slots ? slot : pair.seq, guess = page;
    const uint32 number = is_selected && has_table ? p.page.divide(selected_id * block) : 0;
    if (has_table) page = asked(is_selected ? table + offset(number, table_step) : length_at);
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
        // Here alone the page is waited for.
        __syncwarp();
        if (is_missed && !is_guessed) own_block.page = page;
    }
    __syncthreads();
    // Tiles go round the CTAs, and then their warps, from the last: the first ones have states to join.
    const uint32 number_of_warp = WARPS - 1 - warp;
    MissedTiles tiles(p, lists, table, table_step, number_of_warp * cta.ctas.value + cta.rank, WARPS * cta.ctas.value);
    const uint32 missed = tiles.missed(), attended = cta.turns_of(missed * block / TILE);
    const uint32 count = (attended + WARPS - 1 - number_of_warp) / WARPS;

    // Tokens that every row sees.
    const bool has_rows = p.own_lists || reach.queries == int32(p.positions);
    const int32 seen_end = p.own_lists ? reach.end : has_rows ? reach.length - reach.queries + 1 : 0;
    const int32 seen_begin = p.window ? max((p.own_lists ? reach.end : reach.length) - int32(p.window), 0) : 0;
    uint32 is_whole = 0;  // bits of stages
    bool is_unsure = missed && hinted;
    const auto load = [&](uint32 tile, uint32 at) {
        if (tile % WARP == 0) tiles.find(reach, tile);
        const uint32 from = tile % WARP, row = __shfl_sync(FULL_WARP, tiles.row, from);
        const int32 position = __shfl_sync(FULL_WARP, tiles.position, from), page = __shfl_sync(FULL_WARP, int32(tiles.page), from);
        const char *from_key = keys + offset(page, k_page) + offset(row, k_row);
        const char *from_value = values + offset(page, v_page) + offset(row, v_row);
        char *const to = ring + at * STAGE;
        const uint32 k_to = keys_of_lane<Engine>(to, lane);
        const bool whole = position >= seen_begin && position + int32(TILE) <= seen_end;
        is_whole = (is_whole & ~(1u << at)) | uint32(whole) << at;
        if (whole) {
            load_whole_tile<Engine>(k_to, from_key, from_value, k_row, v_row);
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
            if (lane % 8 == 0) as<Facts>(to).position[n] = is_there ? position + int32(n) : -1;
            from_key += 4 * int64(k_row);
            from_value += 4 * int64(v_row);
        }
    };
#pragma unroll 1
    for (uint32 step = 0, at = 0;; step++) {
        if (step == AHEAD) {
            if (is_unsure) {
                is_unsure = false;
                const bool is_wrong = is_missed && is_guessed && held(page) != guess;
                if (is_wrong) own_block.page = page;
                if (__syncthreads_or(is_wrong)) {
                    wait_copies<0>();
                    __syncwarp();
                    step = ~0u;
                    at = 0;
                    continue;
                }
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
                engine.read_reach(pair, reach, 0);
                engine.template take_queries<WARP_ROWS>(shared_address(queries));
            }
        }
        if (step >= STAGES) {
            if (step - STAGES >= count) break;
            wait_copies<STAGES - 1>();
            __syncwarp();
            engine.attend(ring + at * STAGE, is_whole >> at & 1, step == STAGES);
            __syncwarp();
        }
        if (step < count) load(step, at);
        end_copies();
        at = at + 1 == STAGES ? 0 : at + 1;
    }
    if (count) {
        engine.finish();
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            if (engine.row(i) >= rows) continue;
            float *const to = reinterpret_cast<float *>(ring) + engine.row(i) * SLOT_PITCH + engine.channel(0, 0);
#pragma unroll
            for (uint32 n = 0; n < Engine::CHANNELS / 8; n++)
                to[engine.channel(n / 2, n % 2) - engine.channel(0, 0)] = engine.acc[0][n / 2][n % 2 * 2 + i];
            if (lane >= 4) continue;
            lists.tops[warp][engine.row(i)] = engine.m[0][i];
            lists.sums[warp][engine.row(i)] = engine.l[0][i];
        }
    }
    reinterpret_cast<float4 *>(ring)[KEPT_SLOT * SLOT_PITCH / 4 + lane] = kept.acc;
    if (lane == 0) {
        lists.tops[warp][KEPT_SLOT] = kept.m;
        lists.sums[warp][KEPT_SLOT] = kept.l;
    }
    __syncthreads();

    // Of what was kept each turn is a state, of what was missed each warp that had tiles: up to ten of four rows, in two steps.
    constexpr uint32 JOINED_AT_ONCE = 5;
    const uint32 turns = 1 << share.log_turns(), states = turns + min(attended, WARPS);
#pragma unroll 1
    for (uint32 n = thread; n < pairs; n += THREADS) {
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
            join_at_once(joined, acc, m, l, states - i);
        }
        const uint32 owner = n * cta.ctas.value >> log_pairs;
        const float4 x{joined.acc.x, joined.acc.y, joined.m, joined.l};
        if (!cta.is_alone()) lists.from_cluster.send(received + cta.rank * most_own + n - begin_of(owner), owner, x);
        else received[n] = x;
    }
    if (cta.is_alone()) __syncthreads();
    // Here nothing waits for it.
    if (r.missed.data && cta.rank == 0 && thread == 0) as<int32>(r.missed.at(pair.seq, pair.position, pair.head)) = missed;
#pragma unroll 1
    for (uint32 n = thread; n < own; n += THREADS) {
        const uint32 row = (begin + n) / HALF, channel = (begin + n) % HALF * 2;
        // Found while the states are on their way.
        const RowPlace place = place_of_row(p, pair, row);
        char *const out = held(p.out.at(pair.seq, place.position, place.head, channel));
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
        join_at_once(joined, acc, m, l, cta.ctas.value);
        if (p.out.data) write_out(p, out, joined.acc, norm_of(p, place.head, joined.m, joined.l));
        write_state(p, pair, place, channel, joined.acc, joined.m, joined.l);
    }
}

#define REPAIR_PLAIN_KERNEL(name, Type) \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ RepairParams p) { repair_plain<Type>(p); }
