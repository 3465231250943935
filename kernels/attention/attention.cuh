// What the attention kernels share: their parameters, which tokens a CTA attends to, and where those lie.
//
// A pair is what has a list of its own: a sequence (with own lists a query position of it) and a KV head, and of its rows, the query
// heads and positions that read this KV head, as many as a CTA takes. Its tokens are cut into units, its units into chunks: a CTA takes
// one chunk, its warps take turns at the units.
#pragma once

#include "common/elements.cuh"

constexpr uint32 WARPS = 8, LOG_WARPS = 3;
constexpr uint32 THREADS = WARPS * WARP;
constexpr uint32 WARP_ROWS = 8;  // rows that a warp attends for
constexpr uint32 TILE = 16;      // tokens that it attends to at once
constexpr uint32 LOG_TILE = 4;
constexpr uint32 MAX_ROWS = WARPS * WARP_ROWS;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// A tensor: the address of its first element, NULL where it is absent, and its strides in bytes.
template <uint32 N>
struct View {
    char *data;
    int64 step[N];

    template <typename... Index>
    __device__ char *at(Index... index) const {
        static_assert(sizeof...(Index) <= N);
        char *address = data;
        uint32 d = 0;
        ((address += int64(index) * step[d++]), ...);
        return address;
    }
};

// float32: acc [B, Q, Hq, groups, Dv], m and l [B, Q, Hq, groups].
struct StateView {
    View<5> acc;
    View<4> m, l;
};

// Mirrored, as the two after it, in src/ops/attention/device/params.rs.
struct AttentionParams {
    // What every CTA reads comes first.
    uint32 pairs;
    Divisor row_blocks, kv_heads, list_positions;  // of which pairs are numbered
    Divisor group;           // G
    uint32 positions;        // Q
    uint32 rows;             // of a sequence and KV head, or of a position of it
    uint32 own_lists;        // 1: each position has a list
    uint32 window;
    uint32 capacity;         // most tokens of a sequence
    uint32 cap;              // of a list
    uint32 pages;
    Divisor block, page;     // S, P
    uint32 log_granule;      // tokens that surely lie side by side: a power of two up to a tile
    uint32 unit_tokens;      // a tile's, or those of the entries that share a partial
    uint32 least_units;      // of a chunk
    Divisor cut;             // chunks that the units of all pairs are cut into, about
    Divisor unit_tiles;      // in plain.cuh those of a warp
    uint32 most_units;       // of a list that is full
    Divisor half_value;      // Dv / 2
    uint32 dim, value_dim;
    float scale, soft_cap;
    uint32 out_type;
    // Shared memory. A stage holds a tile of keys and values and what is known of its tokens.
    uint32 log_members;      // 2^log_members warps share a tile, each for 8 rows
    uint32 kept_rows;        // rows of a warp that exist
    uint32 stages;
    uint32 log_octets;       // in latent.cuh: a CTA of a cluster joins 2^log_octets times 8 channels; in plain.cuh: so many warps share a unit
    uint32 v_offset, stage_bytes;  // v_offset 0: values are the first channels of keys
    uint32 q_offset, q_pitch, totals_offset;
    uint32 q_type, kv_type;
    uint32 scales_per_token; // 1: k_scale and v_scale have pages
    Divisor unit_entries;    // where partials are kept
    Divisor ctas;            // of a pair, in plain.cuh and latent.cuh
    const char *items;       // what each CTA does, where there are more than 32 pairs
    char *scratch;           // states of chunks; see StoredState
    uint32 *counters;        // chunks of a pair that are done; zero before and after
    View<1> seq_lens, q_lens;
    View<3> counts;    // [B, Q, Hk]
    View<4> ids;       // [B, Q, Hk, cap]; absent: every token
    View<2> table;     // [B, max_pages]
    View<4> q;         // [B, Q, Hq, D]
    View<4> k, v;      // [pages, P, Hk, D], [pages, P, Hk, Dv]
    View<4> out;       // [B, Q, Hq, Dv]
    View<3> lse;       // [B, Q, Hq]
    View<1> sinks;     // [Hq]
    StateView state, partials;
    StateView start;   // joined to the results, where it is given
    View<4> slots;     // as ids
    View<3> k_scale, v_scale;  // [pages, P, Hk]
};

// Of repair. ids, slots, counts, seq_lens and q_lens are those of `to`, whose list is the selected.
struct RepairParams {
    AttentionParams to;
    View<4> predicted;         // [B, Q, Hk, cap]
    View<3> predicted_counts;  // [B, Q, Hk]
    View<3> missed;            // [B, Q, Hk]
    StateView kept;            // the predicted state (SUPERSET), or the predicted partials (EXACT)
    // Out, in scratch: the list of what to attend to, [lists][cap], and the state to start from.
    int32 *ids, *slots, *counts;
    uint32 exact;
    uint32 predicted_cap;
    Divisor entries;           // that share a partial
    // Shared memory of repair in one launch: states that a CTA has joined, what its cluster sends it, lists.
    uint32 kept_offset, received_offset, lists_offset;
};

constexpr uint32 MAX_INPUTS = 16;

// Of merge.cu.
struct MergeParams {
    AttentionParams to;  // sinks, out, lse, state and the sizes
    uint32 inputs;
    uint32 heads;        // Hq
    StateView input[MAX_INPUTS];
};

#include "attention/layout.cuh"

struct Pair {
    uint32 seq, position, head, row_block;
};

__device__ inline Pair pair_of(const AttentionParams &p, uint32 n) {
    const uint32 a = p.row_blocks.divide(n), b = p.kv_heads.divide(a), c = p.list_positions.divide(b);
    return {c, b - c * p.list_positions.value, a - b * p.kv_heads.value, n - a * p.row_blocks.value};
}

__device__ inline int32 clamped(int32 value, uint32 most) { return min(max(value, 0), int32(most)); }

// Lengths of a pair's sequence, and the tokens that any of its rows may see.
struct Reach {
    int32 length, queries;
    int32 begin, end;

    __device__ static Reach load(const AttentionParams &p, const Pair &pair) {
        const int32 length = as<int32>(p.seq_lens.at(pair.seq)), queries = p.q_lens.data ? as<int32>(p.q_lens.at(pair.seq)) : int32(p.positions);
        return of(p, pair, clamped(length, p.capacity), clamped(queries, p.positions));
    }
    __device__ static Reach of(const AttentionParams &p, const Pair &pair, int32 length, int32 queries) {
        const int32 first = length - queries + int32(p.own_lists ? pair.position : 0);
        const int32 end = p.own_lists ? (int32(pair.position) < queries ? first + 1 : 0) : length;
        return {length, queries, p.window ? max(first + 1 - int32(p.window), 0) : 0, max(end, 0)};
    }
    // Tokens that a row sees begin here; there are `count` of them.
    __device__ void row(const AttentionParams &p, uint32 position, int32 &first, uint32 &count) const {
        const int32 last = int32(position) < queries ? length - queries + int32(position) + 1 : 0;
        first = p.window ? max(last - int32(p.window), 0) : 0;
        count = max(last - first, 0);
    }
};

// Units of a pair with `count` list entries.
__device__ inline uint32 units_of(const AttentionParams &p, const Reach &reach, uint32 count) {
    if (!p.ids.data) {
        const int32 begin = reach.begin & ~int32(TILE - 1);
        return reach.queries && reach.end > begin ? (reach.end - begin + TILE - 1) / TILE : 0;
    }
    if (p.partials.acc.data) return p.unit_entries.divide(count + p.unit_entries.value - 1);
    return reach.queries && reach.end > reach.begin ? (count * p.block.value + TILE - 1) / TILE : 0;
}

__device__ inline uint32 count_of(const AttentionParams &p, const Pair &pair) {
    return p.ids.data ? clamped(as<int32>(p.counts.at(pair.seq, pair.position, pair.head)), p.cap) : 0;
}

// What a CTA does: a chunk of a pair. `chunks` 0: nothing.
struct alignas(16) Item {
    uint32 pair;
    int32 length, queries;
    uint32 entries;        // of the pair's list
    uint32 chunk, chunks;  // of the pair
    uint32 begin, end;     // units
    uint32 slot;           // of the state of the pair's first chunk

    __device__ void take(uint32 units) {
        const uint32 share = units / chunks, more = units - share * chunks;
        begin = chunk * share + min(chunk, more);
        end = begin + share + (chunk < more);
    }
};

// Describes pair `n`, and counts its units.
__device__ inline uint32 describe(const AttentionParams &p, uint32 n, Item &item) {
    const Pair pair = pair_of(p, n);
    const Reach reach = Reach::load(p, pair);
    item.pair = n;
    item.length = reach.length;
    item.queries = reach.queries;
    item.entries = count_of(p, pair);
    return units_of(p, reach, item.entries);
}

// Units of a chunk, where there are so many in all. Cuts follow from the sum and a pair's own units, never from its place in the batch.
__device__ inline uint32 chunk_units(const AttentionParams &p, uint32 total) {
    return max(p.least_units, p.cut.divide(total + p.cut.value - 1));
}
__device__ inline uint32 chunks_of(uint32 units, uint32 chunk) { return max(1u, (units + chunk - 1) / chunk); }

// Up to 32 pairs: every warp finds the CTA's item alone.
__device__ inline Item find_item(const AttentionParams &p) {
    const uint32 lane = threadIdx.x % WARP;
    Item item{};
    const uint32 units = lane < p.pairs ? describe(p, lane, item) : 0;
    const uint32 chunk = chunk_units(p, __reduce_add_sync(FULL_WARP, units));
    const uint32 chunks = lane < p.pairs ? chunks_of(units, chunk) : 0, end = warp_inclusive_sum(chunks);
    const uint32 after = __ballot_sync(FULL_WARP, blockIdx.x < end), from = __ffs(after) - 1;
    if (!after) return Item{};
    item.pair = from;
    item.length = __shfl_sync(FULL_WARP, item.length, from);
    item.queries = __shfl_sync(FULL_WARP, item.queries, from);
    item.entries = __shfl_sync(FULL_WARP, item.entries, from);
    item.chunks = __shfl_sync(FULL_WARP, chunks, from);
    item.slot = __shfl_sync(FULL_WARP, end, from) - item.chunks;
    item.chunk = blockIdx.x - item.slot;
    item.take(__shfl_sync(FULL_WARP, units, from));
    return item;
}

// Where a granule of tokens lies; position −1: nowhere, or nobody sees it.
struct Place {
    int32 position, page, row;
};

// What a list says of an entry.
struct Listed {
    int32 id = -1, previous = -1, slot = 0;
};

// Of the entry of token `x` of a pair, counted along its list; whether the list is that long is asked later.
__device__ inline Listed listed(const AttentionParams &p, const Pair &pair, uint32 x) {
    Listed listed;
    const uint32 e = p.block.divide(x);
    if (!p.ids.data || e >= p.cap) return listed;
    const char *const ids = p.ids.at(pair.seq, pair.position, pair.head, e);
    listed.id = as<int32>(ids);
    if (e) listed.previous = as<int32>(ids - p.ids.step[3]);
    if (p.slots.data) listed.slot = as<int32>(p.slots.at(pair.seq, pair.position, pair.head, e));
    return listed;
}

// The granule that begins with token `x`.
__device__ inline Place place_of(const AttentionParams &p, const Pair &pair, const Reach &reach, uint32 entries, uint32 x, const Listed &listed) {
    Place place{-1, 0, 0};
    int32 position, page = p.slots.data ? listed.slot : pair.seq;
    if (p.ids.data) {
        const uint32 e = p.block.divide(x), within = x - e * p.block.value;
        if (e >= entries || listed.id < 0 || listed.id == listed.previous || int64(listed.id) * p.block.value >= reach.end) return place;
        position = listed.id * int32(p.block.value) + int32(within);
    } else {
        position = (reach.begin & ~int32(TILE - 1)) + int32(x);
    }
    if (position >= reach.end || position + (1 << p.log_granule) <= reach.begin) return place;
    int32 row = position;
    if (p.slots.data || p.table.data) {
        const uint32 number = p.page.divide(position);
        row = position - number * p.page.value;
        if (!p.slots.data) page = as<int32>(p.table.at(pair.seq, number));
    }
    if (uint32(page) >= p.pages) return place;
    return {position, page, row};
}

// A team's share of a chunk, in tiles.
struct Tiles {
    uint32 first, step;  // unit, and units from one to the next
    uint32 count;        // tiles

    static constexpr uint32 NOWHERE = ~0u;

    __device__ Tiles(const AttentionParams &p, uint32 first, uint32 end, uint32 log_step)
        : first(first), step(1u << log_step), count(first < end ? (((end - first - 1) >> log_step) + 1) * p.unit_tiles.value : 0) {}
    // Are the places of granules to be found before this tile is asked for? A lane finds one, for as many tiles as that covers.
    __device__ bool begins(const AttentionParams &p, uint32 tile) const { return (tile << (LOG_TILE - p.log_granule)) % WARP == 0; }
    // The token that the lane's granule begins with; NOWHERE past the last.
    __device__ uint32 token(const AttentionParams &p, uint32 tile) const {
        const uint32 lane = threadIdx.x % WARP, log_granules = LOG_TILE - p.log_granule, mine = tile + (lane >> log_granules);
        if (mine >= count) return NOWHERE;
        uint32 unit = mine, within = (lane & ((1 << log_granules) - 1)) << p.log_granule;
        if (p.unit_tiles.value > 1) {
            unit = p.unit_tiles.divide(mine);
            within += (mine - unit * p.unit_tiles.value) * TILE;
        }
        return within < p.unit_tokens ? (first + unit * step) * p.unit_tokens + within : NOWHERE;
    }
    __device__ Place find(const AttentionParams &p, const Pair &pair, const Reach &reach, uint32 entries, uint32 tile) const {
        const uint32 x = token(p, tile);
        return x == NOWHERE ? Place{-1, 0, 0} : place_of(p, pair, reach, entries, x, listed(p, pair, x));
    }
    // The lane that knows of token `t` of a tile.
    __device__ uint32 lane_of(const AttentionParams &p, uint32 tile, uint32 t) const {
        return ((tile << (LOG_TILE - p.log_granule)) + (t >> p.log_granule)) % WARP;
    }
};

__device__ inline bool is_reached(const Reach &reach, int32 granule, uint32 within) {
    const int32 position = granule + int32(within);
    return granule >= 0 && position >= reach.begin && position < reach.end;
}
