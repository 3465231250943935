// What the attention kernels share: their parameters, which tokens a CTA attends to, and where those tokens lie.
//
// A work item is one list and a block of its rows: the list of a sequence and KV head (where each query position has a list of its own: of
// that position), and as many of the rows that read it, query heads and positions, as one CTA takes. The tokens of a list are split into
// units, the units into chunks. A CTA share is what one CTA does: in mma and general one chunk of a work item, whose units its warps take
// in turn.
#pragma once

#include "common/elements.cuh"

constexpr uint32 WARPS = 8, LOG_WARPS = 3;
constexpr uint32 THREADS = WARPS * WARP;
constexpr uint32 WARP_ROWS = 8;  // rows that one warp attends for
constexpr uint32 TILE = 16;      // tokens that a warp attends to at once
constexpr uint32 LOG_TILE = 4;
constexpr uint32 MAX_ROWS = WARPS * WARP_ROWS;
constexpr uint32 CLEARED_COUNTERS = 256;  // that the last CTA of a launch makes zero (counters.cuh), where CTAs find their shares themselves
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

// A state, or several a row (partials), in float32: acc [B, Q, Hq, states, Dv], m and l [B, Q, Hq, states].
struct StateView {
    View<5> acc;
    View<4> m, l;
};

// Mirrored in src/ops/attention/device/params.rs, as RepairParams and MergeParams are.
struct AttentionParams {
    // Every CTA reads these first.
    uint32 work_items;
    Divisor row_blocks, kv_heads, list_positions;  // work item n = ((seq · list_positions + position) · kv_heads + head) · row_blocks + row_block
    Divisor group;                                 // G: query heads of a KV head
    uint32 positions;                              // Q
    uint32 rows;                                   // that read one list
    uint32 own_lists;                              // 1: each query position has a list of its own
    uint32 window;
    uint32 token_capacity;  // tokens that a sequence can have
    uint32 list_capacity;   // entries that a list can have
    uint32 pages;
    Divisor block, page;    // S, P
    uint32 log_granule;     // 2^log_granule tokens surely lie side by side: at most a tile
    uint32 unit_tokens;     // a tile's; with partials, those of the entries that share a partial
    uint32 least_units;     // fewest units of a chunk
    Divisor target_chunks;  // the units of all work items are split into about so many chunks, where octave_chunks is 0
    Divisor unit_tiles;     // tiles of a unit; in decode128, of the part of one that a warp takes
    uint32 most_units;      // units of a full list
    Divisor half_value;     // Dv / 2
    uint32 dim, value_dim;
    float scale, soft_cap;
    uint32 out_type;
    // Shared memory: a ring of stages, each of which has a tile of keys and values and its TokenInfo; then queries; then totals of partials.
    uint32 log_members;  // 2^log_members warps share a tile; each has 8 of the rows
    uint32 warp_rows;    // of the 8 rows of a warp, those that exist
    uint32 stages;
    uint32 log_share;              // mla16: a CTA joins 2^log_share groups of 8 channels; decode128: 2^log_share warps share a unit
    uint32 v_offset, stage_bytes;  // v_offset 0: the values are the first channels of the keys
    uint32 q_offset, q_pitch, totals_offset;
    uint32 q_type, kv_type;
    uint32 scales_per_token;  // 1: k_scale and v_scale have pages
    Divisor unit_entries;     // entries that share a partial
    Divisor ctas;             // CTAs of a work item, in decode128, mla16 and mla64; those of a cluster, in verify128
    const char *cta_shares;   // [CTAs] CtaShare, in scratch, where there are more than 32 work items and chunks are not fixed
    char *scratch;            // states that CTAs leave for each other: StoredState, Stored or Mla64State
    uint32 *counters;         // chunks or slices that are done; 0 before and after a launch
    View<1> seq_lens, q_lens;
    View<3> counts;  // [B, Q, Hk]
    View<4> ids;     // [B, Q, Hk, list_capacity]; NULL: every token is attended to
    View<2> table;   // [B, max_pages]
    View<4> q;       // [B, Q, Hq, D]
    View<4> k, v;    // [pages, P, Hk, D], [pages, P, Hk, Dv]
    View<4> out;     // [B, Q, Hq, Dv]
    View<3> lse;     // [B, Q, Hq]
    View<1> sinks;   // [Hq]
    StateView state, partials;
    StateView start;           // a state that is joined to the results; NULL: none
    View<4> slots;             // [B, Q, Hk, list_capacity]: the page of each entry
    View<3> k_scale, v_scale;  // [pages, P, Hk]
    View<1> kept_past;         // q_lens, where results of rows from it on stay as they are; NULL: they are those of no tokens
    // Slots that name pages from near_pages on: these lie in other memory, `far` bytes from where the steps of k and v say (decode128).
    int64 far;
    uint32 near_pages;
    uint32 octave_chunks;  // not 0, a power of two: chunks begin at units that depend on no length (FixedChunks)
};

// Parameters of repair's kernels. In `to`, ids, slots and counts are those of the selected list.
struct RepairParams {
    AttentionParams to;
    View<4> predicted;         // [B, Q, Hk, predicted_capacity]
    View<3> predicted_counts;  // [B, Q, Hk]
    View<3> missed;            // [B, Q, Hk], out: how many blocks were missed
    StateView kept;            // the predicted state (SUPERSET), or the predicted partials (EXACT)
    // Results of repair_find_missed, in scratch: the list to attend to, [lists][list_capacity], its counts, and the state to start from (to.start).
    // one_launch: `counts` is null, or [B, Hk]: where it is 0 nothing was missed, and the results of attention to the predicted list stay.
    int32 *ids, *slots, *counts;
    uint32 exact;
    uint32 predicted_capacity;
    Divisor entries;  // entries that share a partial
    // one_launch and decode128: where in shared memory lie the states that a CTA has joined, what its cluster sends it, and lists.
    uint32 kept_offset, received_offset, lists_offset;
};

constexpr uint32 MAX_INPUTS = 16;

// Parameters of merge.cu.
struct MergeParams {
    AttentionParams to;  // sinks, out, lse, state and the sizes
    uint32 inputs;
    uint32 heads;  // Hq
    StateView input[MAX_INPUTS];
};

#include "attention/layout.cuh"

// tanh x, relatively exact to some 3e−6 in few instructions.
__device__ inline float tanh_fast(float x) {
    const float square = x * x, small = fmaf(x * square, fmaf(square, 2.0f / 15, -1.0f / 3), x);
    return fabsf(x) < 0.05f ? small : 1.0f - __fdividef(2.0f, exp2_fast(x * (2 * LOG2_E)) + 1.0f);
}

struct WorkItem {
    uint32 seq, position, head, row_block;
};

__device__ inline WorkItem work_item_of(const AttentionParams &p, uint32 n) {
    const uint32 a = p.row_blocks.divide(n), b = p.kv_heads.divide(a), c = p.list_positions.divide(b);
    return {c, b - c * p.list_positions.value, a - b * p.kv_heads.value, n - a * p.row_blocks.value};
}

__device__ inline int32 clamped(int32 value, uint32 most) { return min(max(value, 0), int32(most)); }

// The lengths of a work item's sequence, and the tokens begin … end − 1 that any of its rows sees.
struct Reach {
    int32 length, queries;
    int32 begin, end;

    __device__ static Reach load(const AttentionParams &p, const WorkItem &item) {
        const int32 length = as<int32>(p.seq_lens.at(item.seq)), queries = p.q_lens.data ? as<int32>(p.q_lens.at(item.seq)) : int32(p.positions);
        return of(p, item, clamped(length, p.token_capacity), clamped(queries, p.positions));
    }
    __device__ static Reach of(const AttentionParams &p, const WorkItem &item, int32 length, int32 queries) {
        const int32 first = length - queries + int32(p.own_lists ? item.position : 0);
        const int32 end = p.own_lists ? (int32(item.position) < queries ? first + 1 : 0) : length;
        return {length, queries, p.window ? max(first + 1 - int32(p.window), 0) : 0, max(end, 0)};
    }
    // The row at a query position sees `count` tokens from `first` on.
    __device__ void row(const AttentionParams &p, uint32 position, int32 &first, uint32 &count) const {
        const int32 last = int32(position) < queries ? length - queries + int32(position) + 1 : 0;
        first = p.window ? max(last - int32(p.window), 0) : 0;
        count = max(last - first, 0);
    }
};

// The units of a work item whose list has `count` entries.
__device__ inline uint32 units_of(const AttentionParams &p, const Reach &reach, uint32 count) {
    if (!p.ids.data) {
        const int32 begin = reach.begin & ~int32(TILE - 1);
        return reach.queries && reach.end > begin ? (reach.end - begin + TILE - 1) / TILE : 0;
    }
    if (p.partials.acc.data) return p.unit_entries.divide(count + p.unit_entries.value - 1);
    return reach.queries && reach.end > reach.begin ? (count * p.block.value + TILE - 1) / TILE : 0;
}

__device__ inline uint32 count_of(const AttentionParams &p, const WorkItem &item) {
    return p.ids.data ? clamped(as<int32>(p.counts.at(item.seq, item.position, item.head)), p.list_capacity) : 0;
}

// What one CTA does in mma and general: a chunk of a work item; nothing where `chunks` is 0.
struct alignas(16) CtaShare {
    uint32 item;
    int32 length, queries;
    uint32 entries;        // of the work item's list
    uint32 chunk, chunks;  // this chunk, and all chunks of the work item
    uint32 begin, end;     // units of the chunk
    uint32 slot;           // where scratch has the state of the work item's first chunk

    __device__ void take(uint32 units) {
        const uint32 share = units / chunks, more = units - share * chunks;
        begin = chunk * share + min(chunk, more);
        end = begin + share + (chunk < more);
    }
};

// Chunks that begin at the same units in every list, so that a row's sums are added up in one order whatever else the call has: `octave` chunks
// of least_units, then as many whenever the number of units has doubled, of twice as many units each time.
struct FixedChunks {
    uint32 least, octave;

    __device__ explicit FixedChunks(const AttentionParams &p) : least(p.least_units), octave(p.octave_chunks) {}
    __device__ uint32 begin(uint32 chunk) const {
        return chunk < octave ? chunk * least : (octave + chunk % octave) * least << (chunk / octave - 1);
    }
    // How many chunks a list of so many units has, at least one.
    __device__ uint32 count(uint32 units) const {
        const uint32 smallest = (units + least - 1) / least;
        if (smallest <= octave) return max(smallest, 1u);
        const uint32 doublings = 31 - __clz((smallest - 1) / octave), size = least << doublings;
        return doublings * octave + (units + size - 1) / size;
    }
};

// Fills in what a share says of work item n, and counts the units of that item.
__device__ inline uint32 describe_work_item(const AttentionParams &p, uint32 n, CtaShare &cta_share) {
    const WorkItem item = work_item_of(p, n);
    const Reach reach = Reach::load(p, item);
    cta_share.item = n;
    cta_share.length = reach.length;
    cta_share.queries = reach.queries;
    cta_share.entries = count_of(p, item);
    return units_of(p, reach, cta_share.entries);
}

// The units of a chunk, where all work items together have `total` units. Splits follow from the sum and a work item's own units, never from
// its place in the batch.
__device__ inline uint32 chunk_units(const AttentionParams &p, uint32 total) {
    return max(p.least_units, p.target_chunks.divide(total + p.target_chunks.value - 1));
}
__device__ inline uint32 chunks_of(uint32 units, uint32 chunk) { return max(1u, (units + chunk - 1) / chunk); }

// Finds share `number` where there are up to 32 work items. One warp of a CTA calls it and tells the others, so that all warps agree even
// where lengths and counts change meanwhile, which is the caller's mistake.
__device__ inline CtaShare find_share(const AttentionParams &p, uint32 number) {
    const uint32 lane = threadIdx.x % WARP;
    CtaShare cta_share{};
    const uint32 units = lane < p.work_items ? describe_work_item(p, lane, cta_share) : 0;
    const uint32 chunk = chunk_units(p, __reduce_add_sync(FULL_WARP, units));
    const uint32 chunks = lane < p.work_items ? chunks_of(units, chunk) : 0, end = warp_inclusive_sum(chunks);
    const uint32 after = __ballot_sync(FULL_WARP, number < end), from = __ffs(after) - 1;
    if (!after) return CtaShare{};
    cta_share.item = from;
    cta_share.length = __shfl_sync(FULL_WARP, cta_share.length, from);
    cta_share.queries = __shfl_sync(FULL_WARP, cta_share.queries, from);
    cta_share.entries = __shfl_sync(FULL_WARP, cta_share.entries, from);
    cta_share.chunks = __shfl_sync(FULL_WARP, chunks, from);
    cta_share.slot = __shfl_sync(FULL_WARP, end, from) - cta_share.chunks;
    cta_share.chunk = number - cta_share.slot;
    cta_share.take(__shfl_sync(FULL_WARP, units, from));
    return cta_share;
}

// Finds share `number` of `shares` where chunks are fixed: as many for each work item as the longest list has, of which some have nothing to do.
// The longest chunks of all work items come first, so that none of them is begun when the others end.
__device__ inline CtaShare fixed_share(const AttentionParams &p, uint32 number, uint32 shares) {
    const uint32 most = shares / p.work_items, before = number / p.work_items;
    CtaShare cta_share{};
    const uint32 units = describe_work_item(p, number - before * p.work_items, cta_share);
    const FixedChunks fixed(p);
    cta_share.chunks = fixed.count(units);
    cta_share.chunk = most - 1 - before;
    if (cta_share.chunk >= cta_share.chunks) return CtaShare{};
    cta_share.slot = cta_share.item * most;
    cta_share.begin = fixed.begin(cta_share.chunk);
    cta_share.end = min(units, fixed.begin(cta_share.chunk + 1));
    return cta_share;
}

// The share of CTA or cluster `number` of `shares`. A warp calls it.
__device__ inline CtaShare share_of(const AttentionParams &p, uint32 number, uint32 shares) {
    if (p.cta_shares) return reinterpret_cast<const CtaShare *>(p.cta_shares)[number];
    return p.octave_chunks ? fixed_share(p, number, shares) : find_share(p, number);
}

// Where a granule of tokens lies. position −1: it lies nowhere, or no row sees it.
struct Place {
    int32 position, page, row;
};

// What a list says of one entry.
struct Listed {
    int32 id = -1, previous = -1, slot = 0;
};

// Reads the list's entry of token x, counted along the list. The entry may lie past the list's count: place_of() checks that.
__device__ inline Listed listed(const AttentionParams &p, const WorkItem &item, uint32 x) {
    Listed listed;
    const uint32 e = p.block.divide(x);
    if (!p.ids.data || e >= p.list_capacity) return listed;
    const char *const ids = p.ids.at(item.seq, item.position, item.head, e);
    listed.id = as<int32>(ids);
    if (e) listed.previous = as<int32>(ids - p.ids.step[3]);
    if (p.slots.data) listed.slot = as<int32>(p.slots.at(item.seq, item.position, item.head, e));
    return listed;
}

// Finds the granule that begins with token x.
__device__ inline Place place_of(const AttentionParams &p, const WorkItem &item, const Reach &reach, uint32 entries, uint32 x, const Listed &listed) {
    Place place{-1, 0, 0};
    int32 position, page = p.slots.data ? listed.slot : item.seq;
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
        if (!p.slots.data) page = as<int32>(p.table.at(item.seq, number));
    }
    if (uint32(page) >= p.pages) return place;
    return {position, page, row};
}

// The tiles of a chunk that one team of warps takes.
struct Tiles {
    uint32 first, step;  // the team's first unit, and from one to the next
    uint32 count;        // of tiles

    static constexpr uint32 NOWHERE = ~0u;

    __device__ Tiles(uint32 first, uint32 step, uint32 count) : first(first), step(step), count(count) {}
    __device__ Tiles(const AttentionParams &p, uint32 first, uint32 end, uint32 log_step)
        : first(first), step(1u << log_step), count(first < end ? (((end - first - 1) >> log_step) + 1) * p.unit_tiles.value : 0) {}
    // Whether a warp has to find granules before it requests this tile: its 32 lanes find one granule each, for as many tiles as that covers.
    __device__ bool begins(const AttentionParams &p, uint32 tile) const { return (tile << (LOG_TILE - p.log_granule)) % WARP == 0; }
    // The first token of this lane's granule; NOWHERE past the last.
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
    __device__ Place find(const AttentionParams &p, const WorkItem &item, const Reach &reach, uint32 entries, uint32 tile) const {
        const uint32 x = token(p, tile);
        return x == NOWHERE ? Place{-1, 0, 0} : place_of(p, item, reach, entries, x, listed(p, item, x));
    }
    // The lane that has found token t of a tile.
    __device__ uint32 lane_of(const AttentionParams &p, uint32 tile, uint32 t) const {
        return ((tile << (LOG_TILE - p.log_granule)) + (t >> p.log_granule)) % WARP;
    }
};

__device__ inline bool is_reached(const Reach &reach, int32 granule, uint32 within) {
    const int32 position = granule + int32(within);
    return granule >= 0 && position >= reach.begin && position < reach.end;
}
