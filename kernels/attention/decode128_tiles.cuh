// The tiles of decode128.cuh: where a warp's tiles lie, which is found before their list's length is known, and the copies of one.
#pragma once

#include "attention/early_reads.cuh"
#include "attention/mma.cuh"

// Makes the compiler read the parameter here, so that no later instruction waits for constant memory.
__device__ inline void preload_parameter(const void *address) { asm volatile("" ::"l"(address)); }

// A copy whose fields the compiler takes for new: what depends on it is computed after this point, and delays nothing before it.
__device__ inline WorkItem pinned(WorkItem item) {
    item.seq = pin_in_register(item.seq);
    item.position = pin_in_register(item.position);
    item.head = pin_in_register(item.head);
    item.row_block = pin_in_register(item.row_block);
    return item;
}

// Where a token lies. Row −1: nowhere.
struct TokenPlace {
    int32 page, row;
};

// Where a warp's next 32 tiles lie: each lane finds one.
struct Decode128Tiles {
    const AttentionParams &p;
    const WorkItem &item;
    uint32 lane, first, step;  // the warp's first unit, and from one to the next
    uint32 unit_begin;         // the warp's first tile within each unit
    uint32 entry, within;      // the list's entry, and the tile's first token within it
    // Addresses in the list. Where nothing is to be read they are the length's address, so that no load stands under a condition.
    const char *id_at, *previous_at, *slot_at;
    const char *length, *table, *k, *v;
    int32 table_step, k_page, v_page, k_row, v_row;
    bool is_requested;
    int32 id, previous, slot_page, page;
    int64 at;    // the tile's first token, whether or not any row sees it
    uint32 row;  // its row within the page
    // Where pages end within tiles, those of the single tokens of two tiles, and of the next two: a lane has one token of each two.
    TokenPlace place, next_place;
    // Results of locate().
    int32 position;  // of the first token; −1: no row sees the tile
    int64 key, value;

    // `row_lanes` lanes copy a row.
    __device__ Decode128Tiles(const AttentionParams &p, const WorkItem &item, uint32 first, uint32 step, uint32 member, uint32 row_lanes)
        : p(p), item(item), lane(threadIdx.x % WARP), first(first), step(step), unit_begin(member * p.unit_tiles.value), length(pin_in_register(p.seq_lens.at(item.seq))) {
        locate_entries(0);
        table = pin_in_register(p.table.at(item.seq));
        table_step = pin_in_register(int32(p.table.step[1]));
        k = p.k.at(0, 0, item.head) + lane / row_lanes * p.k.step[1] + lane % row_lanes * 16;
        v = p.v.at(0, 0, item.head) + lane / row_lanes * p.v.step[1] + lane % row_lanes * 16;
        k = pin_in_register(k);
        v = pin_in_register(v);
        k_page = pin_in_register(int32(p.k.step[0]));
        v_page = pin_in_register(int32(p.v.step[0]));
        k_row = pin_in_register(int32(p.k.step[1]));
        v_row = pin_in_register(int32(p.v.step[1]));
    }
    // Finds the entries of tiles `tile` … `tile` + 31.
    __device__ void locate_entries(uint32 tile) {
        const WorkItem item = pinned(this->item);
        const uint32 n = p.unit_tiles.divide(tile + lane), unit = first + n * step;
        const uint32 x = ((unit * p.unit_tiles.value << p.log_share) + unit_begin + tile + lane - n * p.unit_tiles.value) * TILE;
        entry = p.block.divide(x);
        within = x - entry * p.block.value;
        // The last unit of several entries may reach past the list's capacity.
        is_requested = unit < p.most_units && (!p.ids.data || entry < p.list_capacity);
        const bool is_listed = is_requested && p.ids.data;
        id_at = pin_in_register(is_listed ? p.ids.at(item.seq, item.position, item.head, entry) : length);
        previous_at = pin_in_register(is_listed && entry ? id_at - p.ids.step[3] : length);
        slot_at = is_listed ? p.slots.at(item.seq, item.position, item.head, entry) : length;
    }
    // Asks the L2 cache for what the warp reads first after the wait; warp 0 also for lengths and for 32 lines of the page table.
    __device__ void prefetch_first_reads(uint32 warp) const {
        prefetch(id_at);
        if (warp) return;
        constexpr uint32 ENTRIES = 128 / sizeof(int32);
        if (p.table.data && uint64(lane * ENTRIES) * p.page.value < p.token_capacity) prefetch(p.table.at(item.seq, lane * ENTRIES));
        if (lane == 0) prefetch(length);
        if (lane == 1 && p.ids.data) prefetch(p.counts.at(item.seq, item.position, item.head));
    }
    __device__ void request() {
        id = load_word(id_at);
        previous = load_word(previous_at);
        if (p.slots.data) slot_page = load_word(slot_at);
    }
    // Requests the page before it is known which rows see the tile. Every token within the capacity has one.
    __device__ void request_page(const Reach &reach) {
        const int32 block = p.block.value;
        at = (p.ids.data ? offset(id, block) : (reach.begin & ~int32(TILE - 1)) + offset(entry, block)) + within;
        const uint32 number = p.slots.data || p.table.data ? p.page.divide(at) : 0;
        row = at - number * p.page.value;
        page = p.slots.data ? slot_page : item.seq;
        if (p.log_granule < LOG_TILE) page = 0;  // of each token: request_places
        else if (!p.slots.data && p.table.data) page = load_word(is_requested && uint64(at) < p.token_capacity ? table + offset(number, table_step) : length);
    }
    __device__ void locate(const Reach &reach, uint32 entries) {
        bool exists = is_requested && at < reach.end && at + TILE > reach.begin && uint32(page) < p.pages;
        if (p.ids.data) exists &= entry < entries && id >= 0 && (entry == 0 || id != previous);
        position = exists ? int32(at) : -1;
        key = offset(page, k_page) + offset(row, k_row);
        value = offset(page, v_page) + offset(row, v_row);
        if (uint32(page) >= p.near_pages) key += p.far, value += p.far;
    }
    // Requests the places of the tokens of tiles `tile` and `tile` + 1, which have been located. Every token within the capacity has a page.
    __device__ TokenPlace request_places(uint32 tile) const {
        const int32 position = __shfl_sync(FULL_WARP, this->position, (tile + lane / TILE) % WARP), token = position + int32(lane % TILE);
        const bool exists = position >= 0 && uint32(token) < p.token_capacity;
        const uint32 number = exists ? p.page.divide(token) : 0;
        return {load_word(exists ? table + offset(number, table_step) : length), exists ? int32(token - number * p.page.value) : -1};
    }
    // Finds the places of a tile's tokens, which were requested two tiles before, and requests those of the tiles that follow.
    __device__ void turn_to(uint32 tile) {
        if (tile % 2) return;
        place = tile % WARP ? next_place : request_places(tile);
        if ((tile + 2) % WARP) next_place = request_places(tile + 2);
        if (uint32(place.page) >= p.pages) place.row = -1;
    }
};

// How the lanes of a warp copy rows of keys or values: up to eight a row, 16 bytes each at a time, CHUNKS times; ROWS rows at once, TURNS times for a tile.
template <typename Compute>
struct RowCopies {
    static constexpr uint32 PITCH = Compute::PITCH, V_OFFSET = TILE * PITCH, BYTES = PITCH - 16;
    static constexpr uint32 LANES = BYTES < 128 ? BYTES / 16 : 8, CHUNKS = BYTES / 16 / LANES, ROWS = WARP / LANES, TURNS = TILE / ROWS;
};
// Where a lane's first 16 bytes of a tile go.
template <typename Compute>
__device__ inline uint32 keys_of_lane(const char *tile, uint32 lane) {
    return shared_address(tile) + sizeof(TokenInfo) + lane / RowCopies<Compute>::LANES * Compute::PITCH + lane % RowCopies<Compute>::LANES * 16;
}
// Requests the keys, then the values of a tile that every row sees. k_to is where the lane's first 16 bytes of keys go; values lie behind all
// keys. KEYS_ARE_A_GROUP: the keys are a group of copies of their own, which ends here.
template <typename Compute, bool KEYS_ARE_A_GROUP = false>
__device__ inline void load_fully_seen_tile(uint32 k_to, const char *from_key, const char *from_value, int32 k_row, int32 v_row) {
    using Rows = RowCopies<Compute>;
#pragma unroll
    for (uint32 n = 0; n < Rows::TURNS; n++) {
#pragma unroll
        for (uint32 j = 0; j < Rows::CHUNKS; j++) copy_16(k_to + n * Rows::ROWS * Rows::PITCH + j * 128, from_key + j * 128);
        from_key += Rows::ROWS * int64(k_row);
    }
    if constexpr (KEYS_ARE_A_GROUP) end_copies();
#pragma unroll
    for (uint32 n = 0; n < Rows::TURNS; n++) {
#pragma unroll
        for (uint32 j = 0; j < Rows::CHUNKS; j++) copy_16(k_to + Rows::V_OFFSET + n * Rows::ROWS * Rows::PITCH + j * 128, from_value + j * 128);
        from_value += Rows::ROWS * int64(v_row);
    }
}
// Requests a tile whose tokens lie in pages of their own, or in several. Tokens that no row sees, or that lie nowhere, become zeros. Returns
// whether every row sees every token.
template <typename Compute, bool KEYS_ARE_A_GROUP = false>
__device__ inline bool load_scattered_tile(const Decode128Tiles &tiles, uint32 tile, char *to, uint32 k_to, bool is_fully_seen, const Reach &reach) {
    using Rows = RowCopies<Compute>;
    const uint32 lane = tiles.lane, first = tile % 2 * TILE, row = lane / Rows::LANES;
    const int32 position = __shfl_sync(FULL_WARP, tiles.position, tile % WARP);
    is_fully_seen &= (__ballot_sync(FULL_WARP, tiles.place.row >= 0) >> first & 0xffff) == 0xffff;
    int32 page[Rows::TURNS], of_page[Rows::TURNS];
    bool is_there[Rows::TURNS];
#pragma unroll
    for (uint32 n = 0; n < Rows::TURNS; n++) {
        const uint32 token = n * Rows::ROWS + row;
        page[n] = __shfl_sync(FULL_WARP, tiles.place.page, first + token);
        of_page[n] = __shfl_sync(FULL_WARP, tiles.place.row, first + token);
        is_there[n] = of_page[n] >= 0 && is_reached(reach, position, token);
        // tiles.k and tiles.v are of the row that the lane copies first where tokens lie side by side.
        of_page[n] -= row;
        if (!is_there[n]) page[n] = of_page[n] = 0;
        if (!is_fully_seen && lane % Rows::LANES == 0) as<TokenInfo>(to).position[token] = is_there[n] ? position + int32(token) : -1;
    }
#pragma unroll
    for (uint32 n = 0; n < Rows::TURNS; n++) {
        const char *const from = tiles.k + offset(page[n], tiles.k_page) + offset(of_page[n], tiles.k_row);
#pragma unroll
        for (uint32 j = 0; j < Rows::CHUNKS; j++) copy_16(k_to + n * Rows::ROWS * Rows::PITCH + j * 128, from + j * 128, is_there[n]);
    }
    if constexpr (KEYS_ARE_A_GROUP) end_copies();
#pragma unroll
    for (uint32 n = 0; n < Rows::TURNS; n++) {
        const char *const from = tiles.v + offset(page[n], tiles.v_page) + offset(of_page[n], tiles.v_row);
#pragma unroll
        for (uint32 j = 0; j < Rows::CHUNKS; j++) copy_16(k_to + Rows::V_OFFSET + n * Rows::ROWS * Rows::PITCH + j * 128, from + j * 128, is_there[n]);
    }
    return is_fully_seen;
}
// Requests a tile. Where it is not fully seen, position_of() says which token it begins with: tokens that no row sees become zeros, and keys
// and values are one group of copies even where KEYS_ARE_A_GROUP.
template <typename Compute, bool KEYS_ARE_A_GROUP = false, typename Position>
__device__ inline void load_tile(uint32 lane, char *to, uint32 k_to, const char *from_key, const char *from_value, int32 k_row, int32 v_row,
                                 bool is_fully_seen, const Reach &reach, const Position &position_of) {
    if (is_fully_seen) {
        load_fully_seen_tile<Compute, KEYS_ARE_A_GROUP>(k_to, from_key, from_value, k_row, v_row);
        return;
    }
    using Rows = RowCopies<Compute>;
    const int32 position = position_of();
#pragma unroll 1
    for (uint32 r = lane / Rows::LANES; r < TILE; r += Rows::ROWS) {
        const bool is_there = is_reached(reach, position, r);
        const uint32 row_to = k_to + (r - lane / Rows::LANES) * Rows::PITCH;
#pragma unroll
        for (uint32 j = 0; j < Rows::CHUNKS; j++) {
            copy_16(row_to + j * 128, from_key + j * 128, is_there);
            copy_16(row_to + Rows::V_OFFSET + j * 128, from_value + j * 128, is_there);
        }
        if (lane % Rows::LANES == 0) as<TokenInfo>(to).position[r] = is_there ? position + int32(r) : -1;
        from_key += Rows::ROWS * int64(k_row);
        from_value += Rows::ROWS * int64(v_row);
    }
    if constexpr (KEYS_ARE_A_GROUP) end_copies();
}
