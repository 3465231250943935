// Attention of up to eight rows to keys and values of 128 channels, whose tokens lie side by side in tiles: the common case, in which as
// much time goes by before the first key is there and after the last as between. As many CTAs take a list as have a multiprocessor each.
// What does not depend on memory is computed before the kernel waits for the one before, and parameters are not looked for later.
//
//   warp w of CTA r ── units r + ctas · (w + warps · n): nothing is divided by a count, so that entries can be asked for before
//                      the length of their list is known
//   one round trip: the entries of all of a warp's tiles, lengths, counts ── one: pages, queries ── one: tiles
//   warps join in shared memory, a slice of the channels each ── slices of the CTAs, through scratch, in the warp that ends last
//
// Where partials are kept and there are warps enough, 2^log_octets of them share a unit, and none has a second one: the unit's state is
// there once the warps join. Elsewhere a warp has units of its own, and adds up their states beside its queries.
//
// How a row's tokens are cut depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention/mma.cuh"

// Whatever constant memory has to be read for it is read.
__device__ inline void touch(const void *address) { asm volatile("" ::"l"(address)); }
// A word, waited for where it is used. Of ordinary loads, some of them under conditions, the compiler lets one wait for the other.
__device__ inline int32 asked(const char *address) {
    int32 x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

// What hangs on it is computed where that is needed, and does not keep tiles waiting before a loop.
__device__ inline Pair here(Pair pair) {
    pair.seq = held(pair.seq);
    pair.position = held(pair.position);
    pair.head = held(pair.head);
    pair.row_block = held(pair.row_block);
    return pair;
}

// Where a warp's tiles lie, 32 of them: a tile a lane.
struct PlainTiles {
    const AttentionParams &p;
    const Pair &pair;
    uint32 lane, first, step;  // unit, and units from one to the next
    uint32 begin;              // of the warp's tiles, in each unit
    uint32 entry, within;  // of the list, of the entry
    // Of what is not to be read that of the length, so that nothing is read under a condition.
    const char *listed, *before, *slot;
    const char *length, *table, *k, *v;
    int32 table_step, k_page, v_page, k_row, v_row;
    bool is_asked;
    int32 id, previous, slot_page, page;
    int64 at;    // the tile's first token, whatever the list says
    uint32 row;  // of its page
    // What is found.
    int32 position;  // −1: nobody sees it
    int64 key, value;

    __device__ PlainTiles(const AttentionParams &p, const Pair &pair, uint32 first, uint32 step, uint32 member)
        : p(p), pair(pair), lane(threadIdx.x % WARP), first(first), step(step), begin(member * p.unit_tiles.value), length(held(p.seq_lens.at(pair.seq))) {
        aim(0);
        table = held(p.table.at(pair.seq));
        table_step = held(int32(p.table.step[1]));
        k = p.k.at(0, 0, pair.head) + lane / 8 * p.k.step[1] + lane % 8 * 16;
        v = p.v.at(0, 0, pair.head) + lane / 8 * p.v.step[1] + lane % 8 * 16;
        k = held(k);
        v = held(v);
        k_page = held(int32(p.k.step[0]));
        v_page = held(int32(p.v.step[0]));
        k_row = held(int32(p.k.step[1]));
        v_row = held(int32(p.v.step[1]));
    }
    // At tiles `tile` and on.
    __device__ void aim(uint32 tile) {
        const Pair pair = here(this->pair);
        const uint32 n = p.unit_tiles.divide(tile + lane), unit = first + n * step;
        const uint32 x = ((unit * p.unit_tiles.value << p.log_octets) + begin + tile + lane - n * p.unit_tiles.value) * TILE;
        entry = p.block.divide(x);
        within = x - entry * p.block.value;
        // The last of units of several entries may be longer than the list's room.
        is_asked = unit < p.most_units && (!p.ids.data || entry < p.cap);
        const bool is_listed = is_asked && p.ids.data;
        listed = held(is_listed ? p.ids.at(pair.seq, pair.position, pair.head, entry) : length);
        before = held(is_listed && entry ? listed - p.ids.step[3] : length);
        slot = is_listed ? p.slots.at(pair.seq, pair.position, pair.head, entry) : length;
    }
    // Of what is read once the kernel waits no longer, what comes before tiles; of a page table a warp's worth of lines.
    __device__ void announce(uint32 warp) const {
        prefetch(listed);
        if (warp) return;
        constexpr uint32 ENTRIES = 128 / sizeof(int32);
        if (p.table.data && uint64(lane * ENTRIES) * p.page.value < p.capacity) prefetch(p.table.at(pair.seq, lane * ENTRIES));
        if (lane == 0) prefetch(length);
        if (lane == 1 && p.ids.data) prefetch(p.counts.at(pair.seq, pair.position, pair.head));
    }
    __device__ void ask() {
        id = asked(listed);
        previous = asked(before);
        if (p.slots.data) slot_page = asked(slot);
    }
    // Before it is known who sees the tile: what lies within the capacity has a page.
    __device__ void ask_page(const Reach &reach) {
        const int32 block = p.block.value;
        at = (p.ids.data ? offset(id, block) : (reach.begin & ~int32(TILE - 1)) + offset(entry, block)) + within;
        const uint32 number = p.slots.data || p.table.data ? p.page.divide(at) : 0;
        row = at - number * p.page.value;
        page = p.slots.data ? slot_page : pair.seq;
        if (!p.slots.data && p.table.data) page = asked(is_asked && uint64(at) < p.capacity ? table + offset(number, table_step) : length);
    }
    __device__ void find(const Reach &reach, uint32 entries) {
        bool exists = is_asked && at < reach.end && at + TILE > reach.begin && uint32(page) < p.pages;
        if (p.ids.data) exists &= entry < entries && id >= 0 && (entry == 0 || id != previous);
        position = exists ? int32(at) : -1;
        key = offset(page, k_page) + offset(row, k_row);
        value = offset(page, v_page) + offset(row, v_row);
    }
};

// Where units are kept apart: the state of all of a warp's, in the form in which its lanes hold it.
template <typename Engine>
struct Total {
    static constexpr uint32 BLOCKS = Engine::ROW_BLOCKS, ACC = Engine::ACC;
    float *acc;
    float m[BLOCKS][2], l[BLOCKS][2];

    // In the warp's memory.
    __device__ explicit Total(char *memory) : acc(reinterpret_cast<float *>(memory) + threadIdx.x % WARP) {}
    __device__ void clear() {
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
            m[b][0] = m[b][1] = minus_infinity();
            l[b][0] = l[b][1] = 0.0f;
        }
#pragma unroll
        for (uint32 n = 0; n < BLOCKS * ACC; n++) acc[n * WARP] = 0.0f;
    }
    // Adds the unit that the engine has, or becomes what the engine has.
    template <bool TO_ENGINE>
    __device__ void add(Engine &engine) {
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
            float keep[2], take[2];
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const float top = fmaxf(m[b][i], engine.m[b][i]);
                keep[i] = weight(m[b][i], top);
                take[i] = weight(engine.m[b][i], top);
                m[b][i] = top;
                l[b][i] = l[b][i] * keep[i] + engine.l[b][i] * take[i];
            }
#pragma unroll
            for (uint32 n = 0; n < ACC; n++) {
                float &sum = acc[(b * ACC + n) * WARP], &one = engine.acc[b][n / 4][n % 4];
                const float joined = sum * keep[Engine::row_of(n % 4)] + one * take[Engine::row_of(n % 4)];
                (TO_ENGINE ? one : sum) = joined;
            }
            if constexpr (TO_ENGINE) {
#pragma unroll
                for (uint32 i = 0; i < 2; i++) {
                    engine.m[b][i] = m[b][i];
                    engine.l[b][i] = l[b][i];
                }
            }
        }
    }
};

// Channels of a row of acc that lie side by side are written at once where the caller's do, and on as many bytes.
template <typename Channels>
__device__ inline bool lies_packed(const View<5> &acc, const char *row) {
    return acc.step[4] == sizeof(float) && uint64(row) % sizeof(Channels) == 0;
}
template <bool IS_PACKED, typename Channels>
__device__ inline void write_channels(const View<5> &acc, char *row, uint32 channel, const Channels &x) {
    if constexpr (IS_PACKED) {
        as<Channels>(row + channel * sizeof(float)) = x;
    } else {
        const float *const each = reinterpret_cast<const float *>(&x);
#pragma unroll
        for (uint32 n = 0; n < sizeof(Channels) / sizeof(float); n++) as<float>(row + (channel + n) * acc.step[4]) = each[n];
    }
}

// Writes the state of a unit to the caller's partials.
template <typename Engine>
__device__ inline void write_partial(const AttentionParams &p, const Pair &pair, const Engine &engine, uint32 number) {
    using Channels = typename Engine::Channels;
    const uint32 rows = rows_of(p, pair);
#pragma unroll
    for (uint32 b = 0; b < Engine::ROW_BLOCKS; b++) {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const uint32 row = b * WARP_ROWS + engine.row(i);
            if (row >= rows) continue;
            const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + row);
            char *const to = p.partials.acc.at(pair.seq, position, head, number);
            const auto write = [&](uint32 channel, const Channels &x) { write_channels<true>(p.partials.acc, to, channel, x); };
            const auto write_apart = [&](uint32 channel, const Channels &x) { write_channels<false>(p.partials.acc, to, channel, x); };
            if (lies_packed<Channels>(p.partials.acc, to)) engine.each(b, i, write);
            else engine.each(b, i, write_apart);
            if (!engine.speaks()) continue;
            as<float>(p.partials.m.at(pair.seq, position, head, number)) = engine.m[b][i] * LN_2;
            as<float>(p.partials.l.at(pair.seq, position, head, number)) = engine.l[b][i];
        }
    }
}

// How the warps of a CTA join, then the CTAs of a pair. Each warp takes a slice: 16 of the channels, of all rows. A word of its lane is two
// rows of a channel.
template <uint32 ROWS, uint32 RING>
struct PlainJoin {
    static constexpr bool BY_ROW = false;  // a lane's channels lie side by side
    static constexpr uint32 SLICE = 128 / WARPS, ROW_PAIRS = ROWS / 2, WORDS = SLICE * ROW_PAIRS / WARP;
    static constexpr uint32 STATES = 8;                   // that are joined at once: of warps, of CTAs
    static constexpr uint32 ITS = ROWS * STATES / WARP;   // rows of one of them of which a lane finds what they weigh
    static_assert(STATES == WARPS && 128 * ROWS * sizeof(float) <= RING && RING % 128 == 0);
    // What a warp's lanes tell each other of the states that they join.
    struct Weights {
        float take[ROWS][STATES], l[ROWS][STATES], keep[ROWS];
    };
    struct alignas(16) Shared {
        float m[ROWS][WARPS], l[ROWS][WARPS];
        Weights weights[WARPS];
    };
    // A slice of a CTA's state, in scratch [pairs][WARPS][ctas].
    struct Stored {
        float2 acc[SLICE][ROW_PAIRS];
        float m[ROWS], l[ROWS];
    };
    static constexpr uint32 M = SLICE * ROW_PAIRS * sizeof(float2), L = M + ROWS * sizeof(float);

    const AttentionParams &p;
    Shared &shared;
    float2 *acc;  // [channels][row pairs] where each warp's ring is
    uint32 ctas, rank;  // of the pair
    uint32 lane, warp, row_pair;
    char *stored, *mine;  // the slice's, of all CTAs; the lane's own
    uint32 *counter;      // of those that are there
    float2 word[WORDS], l;
    float m[ITS];  // of rows of its()
    // Of what the lane writes in the end, which nothing but a long way to its address keeps waiting.
    bool has_row;
    uint32 row;  // of the list
    RowPlace row_place;
    char *out;

    __device__ PlainJoin(const AttentionParams &p, const Pair &pair, Shared &shared, char *tiles, uint32 ctas, uint32 rank, uint32 number)
        : p(p), shared(shared), acc(reinterpret_cast<float2 *>(tiles)), ctas(ctas), rank(rank), lane(threadIdx.x % WARP),
          warp(threadIdx.x / WARP), row_pair(lane % ROW_PAIRS) {
        const uint32 slice = number * WARPS + warp;
        stored = held(p.scratch + uint64(slice * ctas) * uint32(sizeof(Stored)));
        mine = held(stored + rank * uint32(sizeof(Stored)) + lane * uint32(sizeof(float2)));
        counter = held(p.counters + slice);
        has_row = held(uint32(of_pair() < rows_of(p, pair)));
        row = first_row(p, pair) + (has_row ? of_pair() : 0);
        const auto [position, head] = place_of_row(p, pair, row);
        row_place = {held(position), held(head)};
        out = held(p.out.at(pair.seq, position, head, channel(0)));
    }

    // The row that the lane writes.
    __device__ uint32 of_pair() const { return row_pair * 2 + (lane & ROW_PAIRS ? 1 : 0); }
    // Of a word, within the slice.
    __device__ uint32 channel_of(uint32 n) const { return (n * WARP + lane) / ROW_PAIRS; }
    // Of two words of neighbouring lanes the first one's.
    __device__ uint32 channel(uint32 n) const { return warp * SLICE + (channel_of(n) & ~1u); }
    // Of the states that are joined the lane finds what this one's rows weigh.
    __device__ uint32 its_state() const { return lane % STATES; }
    __device__ uint32 its(uint32 i) const { return i * (WARP / STATES) + lane / STATES; }

    // Leaves the warp's state where its own tiles were, and waits for no other to do so; who takes it finds what it weighs.
    template <typename Engine>
    __device__ void leave(const Engine &engine) {
        static_assert(Engine::ROW_BLOCKS == 1);
        if (engine.row(0) >= ROWS) return;
        if (engine.speaks()) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                shared.m[engine.row(i)][warp] = engine.m[0][i];
                shared.l[engine.row(i)][warp] = engine.l[0][i];
            }
        }
        const uint32 first = engine.channel(0, 0);
        float2 *const to = acc + place(warp, first, lane % 4);
#pragma unroll
        for (uint32 n = 0; n < Engine::CHANNELS / 8; n++) {
            const float *const its = &engine.acc[0][n / 2][n % 2 * 2];
            to[(engine.channel(n / 2, n % 2) - first) * ROW_PAIRS] = {its[0], its[1]};
        }
    }
    // Joins the warps of the CTA, then in the same way the CTAs of the pair; true in the warp that has the slice of all of them, which does
    // meanwhile() while it waits for those of others.
    template <typename Engine, typename Meanwhile>
    __device__ bool join(const Engine &engine, const Meanwhile &meanwhile) {
        leave(engine);
        __syncthreads();
        Weights &weights = shared.weights[warp];
        clear();
#pragma unroll 1
        for (uint32 begin = ~0u;;) {  // of the CTAs whose slices are joined; before them the warps
            float2 one[STATES][WORDS];
            float its_m[ITS];
            const float *all_l = weights.l[0];
            if (begin == ~0u) {
#pragma unroll
                for (uint32 i = 0; i < ITS; i++) its_m[i] = shared.m[its(i)][its_state()];
                all_l = shared.l[0];
                // Within a slice words lie as lanes do.
                const float2 *const from = acc + held(warp * (WORDS * WARP) + lane);
#pragma unroll
                for (uint32 w = 0; w < WARPS; w++) {
#pragma unroll
                    for (uint32 n = 0; n < WORDS; n++) one[w][n] = from[place(w, 0, n * WARP)];
                }
            } else {
                const char *const from = stored + begin * uint32(sizeof(Stored));
                const char *const words = held(from + lane * uint32(sizeof(float2)));
                const char *const sums = held(from + (its_state() * uint32(sizeof(Stored)) + M + its(0) * uint32(sizeof(float))));
                const bool exists = begin + its_state() < ctas;
                float its_l[ITS];
#pragma unroll
                for (uint32 i = 0; i < ITS; i++) {
                    its_m[i] = minus_infinity();
                    its_l[i] = 0.0f;
                    const float *const its_sums = reinterpret_cast<const float *>(sums) + (its(i) - its(0));
                    if (exists) its_m[i] = __ldcg(its_sums);
                    if (exists) its_l[i] = __ldcg(its_sums + ROWS);
                }
#pragma unroll
                for (uint32 i = 0; i < STATES; i++) {
#pragma unroll
                    for (uint32 n = 0; n < WORDS; n++) {
                        one[i][n] = {0.0f, 0.0f};
                        if (begin + i < ctas) one[i][n] = __ldcg(reinterpret_cast<const float2 *>(words + i * sizeof(Stored)) + n * WARP);
                    }
                }
                if (begin == 0) meanwhile();
#pragma unroll
                for (uint32 i = 0; i < ITS; i++) weights.l[its(i)][its_state()] = its_l[i];
            }
            add(weights, its_m, all_l, one);
            if (begin == ~0u) {
                if (ctas == 1) return true;
                if (!store()) return false;
                clear();
                begin = 0;
            } else {
                begin += STATES;
                if (begin >= ctas) return true;
            }
        }
    }
    __device__ void clear() {
        l = {0.0f, 0.0f};
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) word[n] = {0.0f, 0.0f};
#pragma unroll
        for (uint32 i = 0; i < ITS; i++) m[i] = minus_infinity();
    }
    // Joins states to what is joined of those before. A lane finds what one of them weighs in one row; all of the warp take that from there.
    __device__ void add(Weights &weights, const float (&its_m)[ITS], const float *all_l, const float2 (&one)[STATES][WORDS]) {
#pragma unroll
        for (uint32 i = 0; i < ITS; i++) {
            float top = fmaxf(m[i], its_m[i]);
#pragma unroll
            for (uint32 step = 1; step < STATES; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
            // Where nothing is seen, −inf − 0 and not −inf + inf.
            const float shift = top == minus_infinity() ? 0.0f : top;
            weights.take[its(i)][its_state()] = exp2_fast(its_m[i] - shift);
            const float keep = exp2_fast(m[i] - shift);
            if (its_state() == 0) weights.keep[its(i)] = keep;
            m[i] = top;
        }
        __syncwarp();
        float take[2][STATES], its_l[2][STATES];
        load_of_states(weights.take[0], take);
        load_of_states(all_l, its_l);
        const float2 keep = *reinterpret_cast<const float2 *>(&weights.keep[row_pair * 2]);
        l = {l.x * keep.x, l.y * keep.y};
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) word[n] = {word[n].x * keep.x, word[n].y * keep.y};
#pragma unroll
        for (uint32 i = 0; i < STATES; i++) {
            l = {fmaf(its_l[0][i], take[0][i], l.x), fmaf(its_l[1][i], take[1][i], l.y)};
#pragma unroll
            for (uint32 n = 0; n < WORDS; n++)
                word[n] = {fmaf(one[i][n].x, take[0][i], word[n].x), fmaf(one[i][n].y, take[1][i], word[n].y)};
        }
        // Others have them before they change.
        __syncwarp();
    }
    // Of the lane's two rows.
    __device__ void load_of_states(const float *from, float (&x)[2][STATES]) const {
        from += row_pair * 2 * STATES;
#pragma unroll
        for (uint32 n = 0; n < 2 * STATES; n += 4) {
            const float4 four = *reinterpret_cast<const float4 *>(from + n);
            float *const to = &x[n / STATES][n % STATES];
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
    }
    // Stores the slice of this CTA; true where all others are stored.
    __device__ bool store() const {
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) __stcg(reinterpret_cast<float2 *>(mine) + n * WARP, word[n]);
        char *const sums = mine + M - lane * uint32(sizeof(float2));
#pragma unroll
        for (uint32 i = 0; i < ITS; i++)
            if (its_state() == 0) __stcg(reinterpret_cast<float *>(sums) + its(i), m[i]);
        if (lane < ROW_PAIRS) __stcg(reinterpret_cast<float2 *>(mine + L), l);
        __syncwarp();
        uint32 before = 0;
        if (lane == 0) {
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
            if (before == ctas - 1) *counter = 0;
        }
        if (__shfl_sync(FULL_WARP, before, 0) != ctas - 1) return false;
        __syncwarp();
        return true;
    }
    // Of what warp w has left; of acc the lane's n-th channel of four.
    __device__ float m_of(uint32 w, uint32 row) const { return shared.m[row][w]; }
    __device__ float l_of(uint32 w, uint32 row) const { return shared.l[row][w]; }
    __device__ float acc_of(uint32 w, uint32 row, uint32 n) const {
        return reinterpret_cast<const float *>(acc + place(w, lane + n * WARP, row / 2))[row % 2];
    }
    __device__ static uint32 place(uint32 warp, uint32 channel, uint32 pair) {
        return warp * (RING / sizeof(float2)) + channel * ROW_PAIRS + pair;
    }
    // Writes the results of the slice: of two channels next to each other a lane has one row each.
    __device__ void write(const Pair &pair) const {
        const bool is_odd = lane & ROW_PAIRS;
        float own_m = 0.0f, norm = 0.0f;
#pragma unroll
        for (uint32 i = 0; i < ITS; i++) {
            const float its_m = __shfl_sync(FULL_WARP, m[i], of_pair() * STATES % WARP);
            if (of_pair() / (WARP / STATES) == i) own_m = its_m;
        }
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) {
            const float other = __shfl_xor_sync(FULL_WARP, is_odd ? word[n].x : word[n].y, ROW_PAIRS);
            if (!has_row) continue;
            Joined joined;
            joined.acc = is_odd ? float2{other, word[n].y} : float2{word[n].x, other};
            joined.m = own_m;
            joined.l = is_odd ? l.y : l.x;
            if (p.start.acc.data) join_start(p, pair, row, channel(n), joined);
            if (p.out.data) {
                if (n == 0) norm = norm_of(p, row_place.head, joined.m, joined.l);
                write_out(p, out + (channel(n) - channel(0)) * p.out.step[3], joined.acc, norm);
            }
            write_state(p, pair, row_place, channel(n), joined.acc, joined.m, joined.l);
        }
    }
};

// Writes the state of a unit that 2^log_sharing warps share to the caller's partials, each of them some of the rows: what they have left for
// the join, which has taken it by then. Nothing waits for what is written here; COUNT rows are on their way at once.
template <uint32 COUNT, typename Join>
__device__ inline void write_rows(const AttentionParams &p, const Pair &pair, const Join &join, uint32 log_sharing, uint32 unit) {
    const uint32 sharing = 1 << log_sharing, first = join.warp >> log_sharing << log_sharing, rows = rows_of(p, pair);
#pragma unroll 1
    for (uint32 begin = join.warp - first; begin < rows; begin += COUNT * sharing) {
        uint32 row[COUNT];
        char *to[COUNT];
        float top[COUNT], sum[COUNT] = {}, its[COUNT][4] = {};
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            row[i] = min(begin + i * sharing, rows - 1);
            const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + row[i]);
            to[i] = p.partials.acc.at(pair.seq, position, head, unit);
            top[i] = join.m_of(first, row[i]);
        }
#pragma unroll 1
        for (uint32 w = 1; w < sharing; w++) {
#pragma unroll
            for (uint32 i = 0; i < COUNT; i++) top[i] = fmaxf(top[i], join.m_of(first + w, row[i]));
        }
#pragma unroll 1
        for (uint32 w = first; w < first + sharing; w++) {
#pragma unroll
            for (uint32 i = 0; i < COUNT; i++) {
                const float take = weight(join.m_of(w, row[i]), top[i]);
                sum[i] = fmaf(join.l_of(w, row[i]), take, sum[i]);
#pragma unroll
                for (uint32 n = 0; n < 4; n++) its[i][n] = fmaf(join.acc_of(w, row[i], n), take, its[i][n]);
            }
        }
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            if (begin + i * sharing >= rows) break;
            if (Join::BY_ROW && lies_packed<float4>(p.partials.acc, to[i])) {
                write_channels<true>(p.partials.acc, to[i], join.lane * 4, float4{its[i][0], its[i][1], its[i][2], its[i][3]});
            } else {
#pragma unroll
                for (uint32 n = 0; n < 4; n++)
                    write_channels<false>(p.partials.acc, to[i], Join::BY_ROW ? join.lane * 4 + n : join.lane + n * WARP, its[i][n]);
            }
        }
        // A lane has a row's sums.
        const uint32 its_row = begin + join.lane * sharing;
        if (join.lane >= COUNT || its_row >= rows) continue;
        float its_top = 0.0f, its_sum = 0.0f;
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            // In registers, of which none is chosen by its number.
            const uint32 one_top = held(__float_as_uint(top[i])), one_sum = held(__float_as_uint(sum[i]));
            its_top = join.lane == i ? __uint_as_float(one_top) : its_top;
            its_sum = join.lane == i ? __uint_as_float(one_sum) : its_sum;
        }
        const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + its_row);
        as<float>(p.partials.m.at(pair.seq, position, head, unit)) = its_top * LN_2;
        as<float>(p.partials.l.at(pair.seq, position, head, unit)) = its_sum;
    }
}
template <typename Join>
__device__ inline void write_unit(const AttentionParams &p, const Pair &pair, const Join &join, uint32 log_sharing, uint32 units) {
    const uint32 unit = (join.warp >> log_sharing) * join.ctas + join.rank, of_warp = rows_of(p, pair) >> log_sharing;
    if (unit >= units) return;
    if (of_warp > 2) write_rows<4>(p, pair, join, log_sharing, unit);
    else if (of_warp == 2) write_rows<2>(p, pair, join, log_sharing, unit);
    else write_rows<1>(p, pair, join, log_sharing, unit);
}

// Where a lane's first 16 bytes of a tile go: eight lanes have a row, of which each copies 16 bytes at a time.
template <typename Engine>
__device__ inline uint32 keys_of_lane(const char *tile, uint32 lane) {
    return shared_address(tile) + sizeof(Facts) + lane / 8 * Engine::PITCH + lane % 8 * 16;
}
// Asks for the keys, then the values of a tile that every row sees: a lane's first of either to `k_to` and behind all keys. ARE_APART:
// the keys are a group of copies of their own, which ends here.
template <typename Engine, bool ARE_APART = false>
__device__ inline void load_whole_tile(uint32 k_to, const char *from_key, const char *from_value, int32 k_row, int32 v_row) {
    constexpr uint32 PITCH = Engine::PITCH, V_OFFSET = TILE * PITCH, CHUNKS = PITCH / 128;
#pragma unroll
    for (uint32 quarter = 0; quarter < 4; quarter++) {
#pragma unroll
        for (uint32 j = 0; j < CHUNKS; j++) copy_16(k_to + quarter * 4 * PITCH + j * 128, from_key + j * 128);
        from_key += 4 * int64(k_row);
    }
    if constexpr (ARE_APART) end_copies();
#pragma unroll
    for (uint32 quarter = 0; quarter < 4; quarter++) {
#pragma unroll
        for (uint32 j = 0; j < CHUNKS; j++) copy_16(k_to + V_OFFSET + quarter * 4 * PITCH + j * 128, from_value + j * 128);
        from_value += 4 * int64(v_row);
    }
}
// Asks for a tile. Of one that is not whole position_of() tells where it begins: what no row sees of it becomes zeros, and where keys are
// apart, values come with them.
template <typename Engine, bool ARE_APART = false, typename Position>
__device__ inline void load_tile(uint32 lane, char *to, uint32 k_to, const char *from_key, const char *from_value, int32 k_row, int32 v_row,
                                 bool is_whole, const Reach &reach, const Position &position_of) {
    if (is_whole) {
        load_whole_tile<Engine, ARE_APART>(k_to, from_key, from_value, k_row, v_row);
        return;
    }
    constexpr uint32 PITCH = Engine::PITCH, V_OFFSET = TILE * PITCH, CHUNKS = PITCH / 128;
    const int32 position = position_of();
#pragma unroll 1
    for (uint32 r = lane / 8; r < TILE; r += 4) {
        const bool is_there = is_reached(reach, position, r);
        const uint32 row_to = k_to + (r - lane / 8) * PITCH;
#pragma unroll
        for (uint32 j = 0; j < CHUNKS; j++) {
            copy_16(row_to + j * 128, from_key + j * 128, is_there);
            copy_16(row_to + V_OFFSET + j * 128, from_value + j * 128, is_there);
        }
        if (lane % 8 == 0) as<Facts>(to).position[r] = is_there ? position + int32(r) : -1;
        from_key += 4 * int64(k_row);
        from_value += 4 * int64(v_row);
    }
    if constexpr (ARE_APART) end_copies();
}

template <typename Type, uint32 ROWS>
__device__ inline void attention_plain(const AttentionParams &p) {
    using Engine = MmaEngine<Type, 128, 128>;
    using Queries = typename Engine::template WarpQueries<ROWS>;
    constexpr uint32 STAGE = sizeof(Facts) + 2 * TILE * Engine::PITCH, STAGES = 4 / Type::BYTES;
    using Join = PlainJoin<ROWS, STAGES * STAGE>;
    extern __shared__ __align__(128) char shared[];
    __shared__ typename Join::Shared states;
    __shared__ uint32 words[WARP];
    const uint32 word = ask_for_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    Engine engine(p, shared, 0);
    const uint32 number = p.ctas.divide(blockIdx.x), ctas = held(p.ctas.value), rank = blockIdx.x - number * ctas, lane = engine.lane;
    const Pair pair = pair_of(p, number);
    Join join(p, pair, states, shared, ctas, rank, number);
    const uint32 log_sharing = p.log_octets, log_teams = LOG_WARPS - log_sharing;
    const uint32 first = (engine.warp >> log_sharing) * ctas + rank, step_units = ctas << log_teams;
    PlainTiles tiles(p, pair, first, step_units, engine.warp & ((1 << log_sharing) - 1));
    // A warp's queries; once they are taken, what its units have come to.
    char *const memory = shared + held(p.q_offset + engine.warp * p.q_pitch);
    Total<Engine> total(memory);
    const Queries queries(p, pair, lane);
    const char *const q_len = held(p.q_lens.data ? p.q_lens.at(pair.seq) : tiles.length);
    const char *const list_count = held(p.ids.data ? p.counts.at(pair.seq, pair.position, pair.head) : tiles.length);
    const bool keeps = p.partials.acc.data, keeps_apart = keeps && p.most_units > step_units;
    const uint32 unit_tiles = keeps_apart ? held(p.unit_tiles.value) : ~0u;
    char *const ring = shared + engine.warp * STAGES * STAGE;
    touch(p.out.data);
    touch(p.lse.data);
    touch(p.sinks.data);
    touch(p.state.l.data);
    touch(p.start.acc.data);
    tiles.announce(engine.warp);
    if (engine.warp == 0) queries.announce(lane);
    allow_next_kernel();
    wait_for_previous_kernel();

    tiles.ask();
    const int32 length = asked(tiles.length), rows_seen = asked(q_len), listed = asked(list_count);
    const Reach reach = Reach::of(p, pair, clamped(length, p.capacity), p.q_lens.data ? clamped(rows_seen, p.positions) : p.positions);
    tiles.ask_page(reach);
    queries.ask(shared_address(memory), lane);
    const uint32 entries = p.ids.data ? clamped(listed, p.cap) : 0, units = units_of(p, reach, entries);
    const uint32 count = units > first ? (p.ctas.divide((units - first - 1) >> log_teams) + 1) * p.unit_tiles.value : 0;
    // Tokens that every row sees.
    const bool has_rows = p.own_lists || reach.queries == int32(p.positions);
    const int32 seen_end = p.own_lists ? reach.end : has_rows ? reach.length - reach.queries + 1 : 0;
    const int32 seen_begin = p.window ? max((p.own_lists ? reach.end : reach.length) - int32(p.window), 0) : 0;
    uint32 whole = 0, is_whole = 0;  // bits of tiles, of stages
    const auto find = [&] {
        tiles.find(reach, entries);
        whole = __ballot_sync(FULL_WARP, tiles.position >= seen_begin && tiles.position + int32(TILE) <= seen_end);
    };
    const auto load = [&](uint32 tile, uint32 at) {
        if (tile % WARP == 0 && tile) {
            tiles.aim(tile);
            tiles.ask();
            tiles.ask_page(reach);
            find();
        }
        const uint32 from = tile % WARP;
        const char *from_key = tiles.k + __shfl_sync(FULL_WARP, tiles.key, from), *from_value = tiles.v + __shfl_sync(FULL_WARP, tiles.value, from);
        char *const to = ring + at * STAGE;
        const uint32 k_to = keys_of_lane<Engine>(to, lane);
        is_whole = (is_whole & ~(1u << at)) | (whole >> from & 1) << at;
        load_tile<Engine, true>(lane, to, k_to, from_key, from_value, tiles.k_row, tiles.v_row, whole >> from & 1, reach,
                                [&] { return __shfl_sync(FULL_WARP, tiles.position, from); });
    };
    find();
    uint32 part = 0, unit = first;
#pragma unroll 1
    for (uint32 step = 0, at = 0; step < count + STAGES; step++) {
        if (step >= STAGES) {
            if (step == STAGES) engine.read_reach(here(pair), reach, 0);
            // Two groups a step: keys, and values.
            wait_copies<2 * STAGES - 1>();
            __syncwarp();
            if (step == STAGES) {
                engine.template take_queries<ROWS>(shared_address(memory));
                if (keeps_apart) total.clear();
            }
            engine.attend(ring + at * STAGE, is_whole >> at & 1, part == 0, [] {
                wait_copies<2 * STAGES - 2>();
                __syncwarp();
            });
            __syncwarp();
        }
        if (step < count) load(step, at);
        else end_copies();
        end_copies();
        at = (at + 1) % STAGES;
        // The ring is full again before a unit is done with.
        if (step >= STAGES && ++part == unit_tiles) {
            engine.finish();
            write_partial(p, here(pair), engine, unit);
            part = 0;
            unit += step_units;
            if (step + 1 == count + STAGES) break;
            total.template add<false>(engine);
            engine.clear();
        }
    }
    if (count && !keeps_apart) engine.finish();
    else if (count) total.template add<true>(engine);
    const bool writes_units = keeps && !keeps_apart;
    const auto write_units = [&] {
        // Nothing of how that is done is computed before.
        Join its = join;
        its.lane = held(join.lane);
        its.warp = held(join.warp);
        write_unit(p, here(pair), its, held(log_sharing), units);
    };
    const bool has_all = join.join(engine, [&] {
        if (writes_units) write_units();
    });
    if (has_all) join.write(pair);
    if (writes_units && (!has_all || ctas == 1)) write_units();
}

#define PLAIN_KERNEL(name, ...)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention_plain<__VA_ARGS__>(p); }
