// Compaction: the rows of accepted tree nodes move to where a sequence's tokens follow each other, in place and in all caches at once.
//
//   row(base + path[j]) → row(base + j) for j = 0, 1, … as long as 0 ≤ path[0] < path[1] < …; rows with path[j] = j stay
//
// Bytes: each moved row is read and written once: B = 32 with 3 rows of 128 KiB 12.6 MB each way, 5 µs at 4.8 TB/s.
//
// Work split: a tile is 64 units of up to 16 bytes of a row of one cache, two for each lane. A warp takes some tiles of one sequence, each in all
// rows that move, with up to 4 KiB under way, so that all CTAs run at once. What a warp does not move at all costs it one look at the path.
//
//   tile and cache ─ [kernel before] ─ path, pages of the two positions of each j (a lane for each) ─ load up to 4 rows ─ store them ─ load the next 4 …
//
// Order: path[j] ≥ j, and path ascends. The rows that are loaded later lie at positions above all that are stored before: no row is written
// before it is read. Other warps move other units.
//
// On entry: caches do not overlap; rows from base on belong to one sequence alone.
//
// targets: compute_80, compute_90

#include "common/view.cuh"

constexpr uint32 WARPS = 4, LANE_UNITS = 2, TILE_UNITS = LANE_UNITS * WARP, AT_ONCE = 4;

// A cache. A row is units of 2^log_unit bytes: `run` adjacent ones at each point of three dimensions, the inner two of which have so many
// points. Strides are in bytes.
struct Cache {
    char *data;
    int64 page, row;
    int64 steps[3];
    Divisor run, inner, middle;
    uint32 units, log_unit;
    uint32 unused;

    __device__ int64 at(uint32 unit) const {
        const uint32 point = run.divide(unit), line = inner.divide(point), plane = middle.divide(line);
        return (int64(unit - point * run.value) << log_unit) + (point - line * inner.value) * steps[2] + (line - plane * middle.value) * steps[1] +
               plane * steps[0];
    }
};
struct Tile {
    uint32 cache, first;
};

struct CompactParams {
    const Cache *caches;
    const Tile *tiles;
    View<2> page_table;  // [B, max_pages] int32, or null: sequence i has page i
    View<1> bases;       // [B] integers of base_bytes
    View<2> path;        // [B, M] int32
    View<1> accepted;    // [B] int32, or null
    uint32 tile_count;
    uint32 base_bytes;
    uint32 places;       // M
    uint32 pages;
    Divisor rows;        // P
    uint32 capacity;     // positions that pages can hold
    Divisor ctas;        // of a sequence
    uint32 unused;
};
#include "compact/layout.cuh"

// Page and row of token position t; false where no page holds it.
__device__ inline bool find(const CompactParams &p, uint32 seq, int64 t, uint32 &page, uint32 &row) {
    if (t < 0 || t >= p.capacity) return false;
    const uint32 n = p.rows.divide(uint32(t));
    row = uint32(t) - n * p.rows.value;
    page = p.page_table ? as<uint32>(p.page_table.at(seq, n)) : seq;
    return page < p.pages;
}

// A lane's units of a tile.
struct Units {
    char *data[LANE_UNITS];
    uint32 count;  // of them that the row has

    __device__ Units(const Cache &cache, uint32 first) : count(0) {
#pragma unroll
        for (uint32 k = 0; k < LANE_UNITS; ++k) {
            const uint32 unit = first + k * WARP + threadIdx.x % WARP;
            const bool is_unit = unit < cache.units;
            data[k] = cache.data + (is_unit ? cache.at(unit) : 0);
            count += is_unit;
        }
    }
    // Moves the units of the rows that lanes of `moves` name, in ascending order.
    template <typename Unit> __device__ void move(uint32 moves, int64 from, int64 to) const {
        while (moves) {
            Unit units[AT_ONCE][LANE_UNITS];
            uint32 loaded = moves;
#pragma unroll
            for (uint32 s = 0; s < AT_ONCE; ++s) {
                if (!loaded) break;
                const int64 offset = __shfl_sync(FULL_WARP, from, __ffs(loaded) - 1);
#pragma unroll
                for (uint32 k = 0; k < LANE_UNITS; ++k)
                    if (k < count) units[s][k] = as<Unit>(data[k] + offset);
                loaded &= loaded - 1;
            }
#pragma unroll
            for (uint32 s = 0; s < AT_ONCE; ++s) {
                if (!moves) break;
                const int64 offset = __shfl_sync(FULL_WARP, to, __ffs(moves) - 1);
#pragma unroll
                for (uint32 k = 0; k < LANE_UNITS; ++k)
                    if (k < count) as<Unit>(data[k] + offset) = units[s][k];
                moves &= moves - 1;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS *WARP, 4) compact(const __grid_constant__ CompactParams p) {
    const uint32 seq = p.ctas.divide(blockIdx.x), lane = threadIdx.x % WARP;
    const uint32 n = (blockIdx.x - seq * p.ctas.value) * WARPS + threadIdx.x / WARP;
    const uint32 step = p.ctas.value * WARPS;  // between the tiles of a warp
    allow_next_kernel();
    if (n >= p.tile_count) return wait_for_previous_kernel();
    // The plan does not change.
    Tile tile = p.tiles[n];
    Cache cache = p.caches[tile.cache];
    wait_for_previous_kernel();
    const int64 base = load_integer(p.bases.at(seq), p.base_bytes);
    if (base < 0 || base >= p.capacity) return;
    uint32 length = p.places;
    if (p.accepted) length = min(length, uint32(max(as<int32>(p.accepted.at(seq)), -1)) + 1);
    int32 before = -1;
    for (uint32 first = 0; first < length; first += WARP) {
        const uint32 j = first + lane;
        const int32 node = j < length ? as<int32>(p.path.at(seq, j)) : -1;
        int32 previous = __shfl_up_sync(FULL_WARP, node, 1);
        if (lane == 0) previous = before;
        const uint32 ends = __ballot_sync(FULL_WARP, node <= previous);
        const bool is_inside = !(ends & (2u << lane) - 1);
        uint32 from_page = 0, from_row = 0, to_page = 0, to_row = 0;
        const bool is_move = is_inside && uint32(node) != j && find(p, seq, base + node, from_page, from_row) && find(p, seq, base + j, to_page, to_row) &&
                             (from_page != to_page || from_row != to_row);
        const uint32 moves = __ballot_sync(FULL_WARP, is_move);
        for (uint32 at = n; moves && at < p.tile_count; at += step) {
            if (at != n || first) tile = p.tiles[at], cache = p.caches[tile.cache];
            const Units units(cache, tile.first);
            const int64 from = is_move ? from_page * cache.page + from_row * cache.row : 0;
            const int64 to = is_move ? to_page * cache.page + to_row * cache.row : 0;
            switch (cache.log_unit) {
            case 0: units.move<uint8>(moves, from, to); break;
            case 1: units.move<uint16>(moves, from, to); break;
            case 2: units.move<uint32>(moves, from, to); break;
            case 3: units.move<uint2>(moves, from, to); break;
            default: units.move<uint4>(moves, from, to);
            }
        }
        if (ends) return;
        before = __shfl_sync(FULL_WARP, node, WARP - 1);
    }
}
