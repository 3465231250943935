// Attention of up to ROWS rows to keys and values of 128 channels, whose tokens lie side by side in tiles, by a cluster of CTAs for each
// pair: the common case, in which as much time goes by before the first key is there and after the last as between. What does not depend
// on memory is computed before the kernel waits for the one before, and parameters are not looked for later.
//
//   warp w of CTA r ── units r + ctas · (w + warps · n): nothing is divided by a count, so that entries can be asked for before
//                      the length of their list is known
//   one round trip: the entries of all of a warp's tiles, lengths, queries ── one: their pages ── one: tiles ── exchange.cuh
//
// How a row's tokens are cut depends on its own list and on the size of the cluster, and on nothing else.
#pragma once

#include "attention/exchange.cuh"

// In a register from here on.
template <typename T> __device__ inline T held(T x) {
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
    return x;
}
// Whatever constant memory has to be read for it is read.
__device__ inline void touch(const void *address) { asm volatile("" ::"l"(address)); }

// Where a warp's tiles lie, 32 of them: a tile a lane.
struct PlainTiles {
    const AttentionParams &p;
    const Pair &pair;
    uint32 lane, first, log_step;  // unit, and units from one to the next
    uint32 entry, within;  // of the list, of the entry
    const char *listed, *slot;
    const char *table, *k, *v;
    int32 table_step, k_page, v_page, k_row, v_row;
    bool is_asked;
    int32 id, previous, page;
    // What is found.
    int32 position;  // −1: nobody sees it
    int64 key, value;

    __device__ PlainTiles(const AttentionParams &p, const Pair &pair, uint32 first, uint32 log_step)
        : p(p), pair(pair), lane(threadIdx.x % WARP), first(first), log_step(log_step) {
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
        const uint32 n = p.unit_tiles.divide(tile + lane), unit = first + (n << log_step);
        const uint32 x = (unit * p.unit_tiles.value + tile + lane - n * p.unit_tiles.value) * TILE;
        entry = p.block.divide(x);
        within = x - entry * p.block.value;
        is_asked = unit < p.most_units;
        listed = held(p.ids.at(pair.seq, pair.position, pair.head, entry));
        slot = p.slots.at(pair.seq, pair.position, pair.head, entry);
    }
    __device__ void ask() {
        id = previous = -1;
        page = pair.seq;
        if (!is_asked || !p.ids.data) return;
        id = as<int32>(listed);
        if (entry) previous = as<int32>(listed - p.ids.step[3]);
        if (p.slots.data) page = as<int32>(slot);
    }
    __device__ void find(const Reach &reach, uint32 entries) {
        bool exists = is_asked;
        position = (reach.begin & ~int32(TILE - 1)) + int32(entry * p.block.value + within);
        if (p.ids.data) {
            exists &= entry < entries && id >= 0 && id != previous && offset(id, int32(p.block.value)) < reach.end;
            position = id * int32(p.block.value) + int32(within);
        }
        exists &= position < reach.end && position + int32(TILE) > reach.begin;
        uint32 row = position;
        if (p.slots.data || p.table.data) {
            const uint32 number = p.page.divide(position);
            row = position - number * p.page.value;
            if (!p.slots.data && exists) page = as<int32>(table + offset(number, table_step));
        }
        exists &= uint32(page) < p.pages;
        if (!exists) position = -1;
        key = offset(page, k_page) + offset(row, k_row);
        value = offset(page, v_page) + offset(row, v_row);
    }
};

// Where a warp's state goes.
template <typename Engine, uint32 ROWS>
struct PlainPlaces {
    static constexpr uint32 COUNT = Engine::CHANNELS / 8;
    uint32 to[COUNT], there[COUNT], sums[2], sums_there[2];
    bool has_rows, has_sums[2];

    __device__ PlainPlaces(const Exchange &exchange, const Engine &engine) {
        const uint32 mine = shared_address(exchange.received(exchange.rank, engine.warp)) + engine.row(0) * sizeof(float);
        const uint32 barrier = shared_address(exchange.arrived), log_octets = exchange.log_octets;
        has_rows = engine.row(0) < ROWS;
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) {
            const uint32 channel = engine.channel(n / 2, n % 2), owner = channel >> 3 >> log_octets, within = channel - (owner << log_octets << 3);
            there[n] = Exchange::address_in(owner, barrier);
            to[n] = held(there[n] + (mine - barrier) + within * ROWS * uint32(sizeof(float)));
        }
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const uint32 owner = engine.lane / 4 + i * 8;
            has_sums[i] = owner >> exchange.log_ctas == 0;
            sums_there[i] = Exchange::address_in(has_sums[i] ? owner : 0, barrier);
            sums[i] = held(sums_there[i] + (mine - barrier) + (8 << log_octets) * ROWS * uint32(sizeof(float)));
        }
    }
    __device__ void send(const Engine &engine) const {
        if (!has_rows) return;
#pragma unroll
        for (uint32 b = 0; b < Engine::ROW_BLOCKS; b++) {
            constexpr uint32 BLOCK_BYTES = WARP_ROWS * sizeof(float);
#pragma unroll
            for (uint32 n = 0; n < COUNT; n++)
                Exchange::send(to[n] + b * BLOCK_BYTES, there[n], engine.acc[b][n / 2][n % 2 * 2], engine.acc[b][n / 2][n % 2 * 2 + 1]);
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                if (!has_sums[i]) continue;
                Exchange::send(sums[i] + b * BLOCK_BYTES, sums_there[i], engine.m[b][0], engine.m[b][1]);
                Exchange::send(sums[i] + b * BLOCK_BYTES + ROWS * uint32(sizeof(float)), sums_there[i], engine.l[b][0], engine.l[b][1]);
            }
        }
    }
};

template <typename Type, uint32 ROWS>
__device__ inline void attention_plain(const AttentionParams &p) {
    using Engine = MmaEngine<Type, 128, 128, (ROWS + WARP_ROWS - 1) / WARP_ROWS>;
    constexpr uint32 PITCH = Engine::PITCH, V_OFFSET = TILE * PITCH, STAGE = sizeof(Facts) + 2 * V_OFFSET, CHUNKS = 128 * Type::BYTES / 128;
    extern __shared__ __align__(128) char shared[];
    __shared__ alignas(8) uint64 arrived;
    __shared__ uint32 words[WARP];
    const uint32 word = ask_for_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    const Exchange exchange(p, shared, &arrived, ROWS, held(__ffs(blockDim.x / WARP) - 1));
    Engine engine(p, shared, 0);
    const PlainPlaces<Engine, ROWS> places(exchange, engine);
    const Pair pair = pair_of(p, blockIdx.x >> exchange.log_ctas);
    const uint32 first = (engine.warp << exchange.log_ctas) + exchange.rank, log_step = exchange.log_states + exchange.log_ctas, lane = engine.lane;
    PlainTiles tiles(p, pair, first, log_step);
    Total<Engine> total(p, shared, engine);
    const uint32 stages = held(p.stages), unit_tiles = p.partials.acc.data ? held(p.unit_tiles.value) : ~0u;
    char *const ring = shared + engine.warp * stages * STAGE;
    touch(p.out.data);
    touch(p.lse.data);
    touch(p.sinks.data);
    touch(p.state.l.data);
    touch(p.start.acc.data);
    allow_next_kernel();
    exchange.open();
    wait_for_previous_kernel();

    tiles.ask();
    engine.ask_queries(pair);
    const Reach reach = Reach::load(p, pair);
    const uint32 entries = count_of(p, pair), units = units_of(p, reach, entries);
    const uint32 count = units > first ? (((units - first - 1) >> log_step) + 1) * p.unit_tiles.value : 0;
    engine.read_reach(pair, reach, 0);
    // Tokens that every row sees.
    const bool has_rows = p.own_lists || reach.queries == int32(p.positions);
    const int32 seen_end = p.own_lists ? reach.end : has_rows ? reach.length - reach.queries + 1 : 0;
    const int32 seen_begin = p.window ? max((p.own_lists ? reach.end : reach.length) - int32(p.window), 0) : 0;
    uint32 whole = 0, is_whole = 0;  // bits of tiles, of stages
    const auto load = [&](uint32 tile, uint32 at) {
        if (tile % WARP == 0) {
            if (tile) {
                tiles.aim(tile);
                tiles.ask();
            }
            tiles.find(reach, entries);
            whole = __ballot_sync(FULL_WARP, tiles.position >= seen_begin && tiles.position + int32(TILE) <= seen_end);
        }
        const uint32 from = tile % WARP;
        const char *from_key = tiles.k + __shfl_sync(FULL_WARP, tiles.key, from), *from_value = tiles.v + __shfl_sync(FULL_WARP, tiles.value, from);
        char *const to = ring + at * STAGE;
        const uint32 k_to = shared_address(to) + sizeof(Facts) + lane / 8 * PITCH + lane % 8 * 16;
        is_whole = (is_whole & ~(1u << at)) | (whole >> from & 1) << at;
        if (whole >> from & 1) {
#pragma unroll
            for (uint32 quarter = 0; quarter < 4; quarter++) {
#pragma unroll
                for (uint32 j = 0; j < CHUNKS; j++) copy_16(k_to + quarter * 4 * PITCH + j * 128, from_key + j * 128);
                from_key += 4 * int64(tiles.k_row);
            }
#pragma unroll
            for (uint32 quarter = 0; quarter < 4; quarter++) {
#pragma unroll
                for (uint32 j = 0; j < CHUNKS; j++) copy_16(k_to + V_OFFSET + quarter * 4 * PITCH + j * 128, from_value + j * 128);
                from_value += 4 * int64(tiles.v_row);
            }
            return;
        }
        const int32 position = __shfl_sync(FULL_WARP, tiles.position, from);
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
            from_key += 4 * int64(tiles.k_row);
            from_value += 4 * int64(tiles.v_row);
        }
    };
    uint32 part = 0, unit = first;
#pragma unroll 1
    for (uint32 step = 0, at = 0; step < count + stages; step++) {
        if (step == stages) engine.take_queries();
        if (step >= stages) {
            wait_copies(stages - 1);
            __syncwarp();
            engine.attend(ring + at * STAGE, is_whole >> at & 1);
            __syncwarp();
            if (++part == unit_tiles) {
                engine.finish();
                write_partial(p, pair, engine, unit);
                total.template add<false>(engine);
                engine.clear();
                part = 0;
                unit += 1 << log_step;
            }
        }
        if (step < count) load(step, at);
        end_copies();
        at = at + 1 == stages ? 0 : at + 1;
    }
    if (p.partials.acc.data) total.template add<true>(engine);
    else engine.finish();
    places.send(engine);
    exchange.join(pair);
}

#define PLAIN_KERNEL(name, ...)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention_plain<__VA_ARGS__>(p); }
