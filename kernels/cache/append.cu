// Append: writes the rows of new tokens to the tails of their sequences.
//
//   cache_spill    before long appends: copies a partial block, whose tail page the append needs for a later block, to its host run
//   cache_append   CTAs for each row, a warp for each token and KV head: copies the token to the tail page of its block, or to the block's
//                  host run if a later block has that page when the append ends
//
// Bytes: each row is read once and written once.
//
// Phases of cache_append: find the tokens that have a place ─ copy tokens ─ count the CTAs of the row that are done ─ the last one moves the
// tail and lists the full pages for cache_write_back.
//
// On entry: sequences are distinct; T · Hk < 2^30.
//
// targets: compute_80, compute_90

#include "cache/params.cuh"

#include "cache/layout.cuh"

constexpr uint32 THREADS = 128, WARPS = THREADS / WARP;

// The tokens of a row: the token positions from … past − 1 have a place.
struct Span {
    uint32 sequence;
    int32 from, past, newest;  // newest: the newest block after the append
    int64 begin, given;        // the position of the first given token, and the number of given tokens
    Tail tail;                 // before the append

    __device__ bool is_empty() const { return from >= past; }
};

__device__ inline Span span_of(const AppendParams &p, uint32 i) {
    Span s = {as<uint32>(p.sequences + i * p.sequences_seq), 0, 0, -1, as<int32>(p.begin + i * p.begin_seq), p.most, {-1, 0, 0, 0}};
    if (p.lens) s.given = min(max(as<int32>(p.lens + i * p.lens_seq), 0), int32(p.most));
    const int32 blocks = s.sequence < p.cache.max_sequences ? p.cache.lens[s.sequence] : -1;
    if (blocks < 0) return s;
    s.tail = p.layer.tails[s.sequence];
    const int32 size = p.cache.size.value;
    const int64 end = s.begin + s.given, at = min(max(s.begin, 0ll), end);
    const int64 past = max(min(end, int64(blocks) * size), at);
    // The beginning of the first block in the tail. No token has a place where tokens before the given ones are missing.
    const int64 in_tail = int64(min(max(s.tail.first, s.tail.newest - 1), s.tail.newest + 1)) * size;
    const int64 from = min(at <= s.tail.tokens ? max(at, in_tail) : past, past);
    s.newest = s.tail.newest;
    if (from >= past) return s;
    s.from = from, s.past = past;
    s.newest = max(s.newest, int32(p.cache.size.divide(s.past - 1)));
    return s;
}

// Whether block n is in the tail when the append ends.
__device__ inline bool stays(const Span &s, int32 n) { return n + 3 > s.newest; }

extern "C" __global__ void __launch_bounds__(THREADS) cache_spill(const __grid_constant__ AppendParams p) {
    const uint32 i = p.cache.heads.divide(blockIdx.x), g = blockIdx.x - i * p.cache.heads.value;
    const Span s = span_of(p, i);
    if (s.is_empty()) return;
    const int32 n = p.cache.size.divide(s.from);
    if (n * int32(p.cache.size.value) == s.from || stays(s, n)) return;
    const uint4 *from = reinterpret_cast<const uint4 *>(p.cache.tail(p.layer, s.sequence, n, g));
    uint4 *to = reinterpret_cast<uint4 *>(p.cache.stored(p.layer, p.cache.table[uint64(s.sequence) * p.cache.max_blocks + n], g));
    for (uint64 u = threadIdx.x; u < p.cache.run / 16; u += THREADS) to[u] = from[u];
}

template <typename Unit>
__device__ inline void copy_row(const char *from, int64 step, char *to, uint32 units, uint32 lane) {
#pragma unroll 1
    for (uint32 u = lane; u < units; u += WARP) as<Unit>(to + u * sizeof(Unit)) = as<Unit>(from + u * step);
}

// Copies all parts of one token and KV head to their places in a run.
__device__ inline void copy_token(const AppendParams &p, uint32 i, uint32 t, uint32 g, char *run, uint32 within, uint32 lane) {
#pragma unroll 1
    for (uint32 part = 0; part < 4; ++part) {
        const PartRows &rows = p.rows[part];
        if (!rows.data) continue;
        const char *from = rows.data + i * rows.seq + t * rows.token + g * rows.head;
        const uint32 bytes = p.cache.token[part];
        char *to = run + p.cache.parts[part] + uint64(within) * bytes;
        const uint32 log_unit = p.log_unit[part];
        if (log_unit == 4)
            copy_row<uint4>(from, 16, to, bytes / 16, lane);
        else if (log_unit == 2)
            copy_row<uint32>(from, rows.channel, to, bytes / 4, lane);
        else if (log_unit == 1)
            copy_row<uint16>(from, rows.channel, to, bytes / 2, lane);
        else
            copy_row<uint8>(from, rows.channel, to, bytes, lane);
    }
}

// Moves the tail, lists the full pages for cache_write_back, and adds to the layer's counters.
__device__ inline void finish_row(const AppendParams &p, const Span &s) {
    Clock &clock = *p.layer.clock;
    const int64 dropped = s.given - (s.past - s.from);
    if (dropped) atomicAdd(&clock.totals.dropped, uint64(dropped));
    if (s.is_empty()) return;
    p.layer.tails[s.sequence].newest = s.newest;
    p.layer.tails[s.sequence].tokens = s.past;
    const int32 first = p.cache.size.divide(s.from), past = p.cache.size.divide(s.past);
    if (first == past) return;
    atomicAdd(&clock.totals.written, uint64(past - first) * p.cache.heads.value * p.cache.run);
    const int32 *row = p.cache.table + uint64(s.sequence) * p.cache.max_blocks;
    for (int32 n = max(first, s.newest - 2); n < past; ++n)
        p.layer.full[atomicAdd(&clock.full, 1u)] = {p.cache.tail_page(s.sequence, n), uint32(row[n])};
}

extern "C" __global__ void __launch_bounds__(THREADS, 8) cache_append(const __grid_constant__ AppendParams p) {
    wait_for_previous_kernel();
    const uint32 i = blockIdx.x / p.per_row, part = blockIdx.x - i * p.per_row;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = p.cache.heads.value;
    const Span s = span_of(p, i);
    const uint32 cells = s.is_empty() ? 0 : uint32(s.past - s.from) * heads;
    for (uint32 cell = part * WARPS + warp; cell < cells; cell += p.per_row * WARPS) {
        const uint32 t = p.cache.heads.divide(cell), g = cell - t * heads, token = s.from + t;
        const int32 n = p.cache.size.divide(token);
        const uint32 within = token - n * p.cache.size.value;
        char *run = stays(s, n) ? p.cache.tail(p.layer, s.sequence, n, g)
                                : p.cache.stored(p.layer, p.cache.table[uint64(s.sequence) * p.cache.max_blocks + n], g);
        copy_token(p, i, token - s.begin, g, run, within, lane);
    }
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (p.per_row > 1) {
        if (atomicAdd(p.layer.arrived + i, 1u) + 1 < p.per_row) return;
        __threadfence();  // after what the other CTAs did
        p.layer.arrived[i] = 0;
    }
    finish_row(p, s);
}
