// Append: writes the rows of new tokens to the tails of their sequences.
//
//   cache_spill    before long appends: copies a partial block, whose tail page the append needs for a later block, to its host run
//   cache_append   CTAs for each row, a warp for each token and KV head: copies the token to the tail page of its block, or to the block's
//                  host run if a later block has that page when the append ends
//   cache_append_decoded  the same where slots hold what codes stand for: a kernel of its own, since copies and decoding in one spill registers
//
// A block that leaves the tail, because a block begins two places after it, gets a slot for each KV head, and its page is copied there: the next
// resolve finds it resident. A slot may be taken if no list that is in use can name it, and no copy to it can be under way: what it holds is
// resident, or it has never held anything. If there is none among those that are looked at, the block gets a slot when a list names it.
//
// Bytes: each row is read once and written once; once in S tokens, a page of each sequence is read and written, too: as its codes where it is coded,
// which are decoded on the way where slots hold what codes stand for (cache/decode.cuh).
//
// Phases of cache_append: find the tokens that have a place ─ count the CTAs of the row that have read where its tail ends ─ copy tokens ─ a CTA for
// each KV head: find a slot for the block that leaves, copy its page ─ the CTA that was counted last moves the tail and lists the full pages for
// cache_write_back. So tokens are copied while the count is on its way. An append of more than S tokens may write to the page of the block that
// leaves: there the CTAs are counted when they have copied, and the last one copies that page.
//
// No resolve of the layer runs at the same time. A fetch may: it changes no word of a slot whose content is resident, nor of an empty slot.
//
// On entry: sequences are distinct; T · Hk < 2^30.
//
// targets: compute_80, compute_90

#include "cache/decode.cuh"
#include "cache/params.cuh"
#include "cache/units.cuh"

#include "cache/layout.cuh"

constexpr uint32 THREADS = 128, WARPS = THREADS / WARP;
constexpr uint32 CTAS = 7;  // of a multiprocessor: at eight the compiler would spill registers for 8.0

// The tokens of a row: the token positions from … past − 1 have a place.
struct Span {
    uint32 sequence;
    int32 from, past, newest;  // newest: the newest block after the append
    int32 leaving;             // the block that leaves the tail and still has its page, or −1. The three newest blocks have pages
    int32 begin, dropped;      // the position of the first given token, and how many tokens have no place

    __device__ bool is_empty() const { return from >= past; }
};
constexpr uint32 ALL = ~0u;

__device__ inline Span span_of(const AppendParams &p, uint32 i) {
    Span s = {as<uint32>(p.sequences + i * p.sequences_seq), 0, 0, -1, -1, as<int32>(p.begin + i * p.begin_seq), int32(p.most)};
    if (p.lens) s.dropped = min(max(as<int32>(p.lens + i * p.lens_seq), 0), int32(p.most));
    const int32 size = p.cache.size.value;
    int64 first = s.begin, end = first + s.dropped;
    const int64 end_of_row = end;
    if (p.window != ALL) {
        const int64 block = int64(p.cache.size.divide(max(s.begin, 0))) + p.window;
        if (p.window) first = min(max(first, block * size), end);
        end = max(min(end, (block + 1) * size), first);
        s.dropped = end - first;
    }
    const int32 blocks = s.sequence < p.cache.max_sequences ? p.cache.lens[s.sequence] : -1;
    if (blocks < 0) return s;
    const Tail tail = p.layer.tails[s.sequence];
    const int64 at = min(max(first, 0ll), end), past = max(min(end, int64(blocks) * size), at);
    // The beginning of the first block in the tail. No token has a place where tokens before the given ones are missing.
    const int64 in_tail = int64(min(max(tail.first, tail.newest - 1), tail.newest + 1)) * size;
    const int64 from = min(at <= tail.tokens ? max(at, in_tail) : past, past);
    s.newest = tail.newest;
    if (from >= past) return s;
    s.from = from, s.past = past, s.dropped -= past - from;
    s.newest = max(s.newest, int32(p.cache.size.divide(s.past - 1)));
    // The block leaves in the last window that has tokens with a place.
    const bool is_last = past == min(end_of_row, int64(blocks) * size);
    if (is_last && s.newest > tail.newest && s.newest - 2 >= tail.first && !p.cache.is_first(s.newest - 2)) s.leaving = s.newest - 2;
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

// The slots that a lane looks at in a round, and the rounds.
constexpr uint32 LOOKED_AT = 4, ROUNDS = 8;

// What a slot holds, and when it was named.
struct Seen {
    uint64 holds;
    uint32 named;
};
// Whether a slot may be given to a run that leaves the tail. Those that this append has given are not given again.
__device__ inline bool may_go(const AppendParams &p, const Seen &seen, uint32 now) {
    const Home content = unpack(seen.holds);
    const bool is_new = content.since == (now << 1 | 1);
    return seen.holds != DROPPED && content.is_resident() && !is_new && age(now, seen.named) >= p.cache.hold;
}

// Takes a slot for a run, which is resident there from now on; returns the slot, or NO_SLOT. It takes one that the clock's hand would come to
// soon, and leaves the hand where it is. The slot may be given away by the next resolve, so that each resolve finds as many slots as it is
// promised; but the hand spares it once. A warp calls it; `turn` is another number for each run of an append.
constexpr uint32 NO_SLOT = 0xffffffffu;
__device__ inline uint32 take_slot(const AppendParams &p, uint32 host_run, uint32 turn) {
    const Layer &layer = p.layer;
    Clock &clock = *layer.clock;
    const uint32 lane = threadIdx.x % WARP, slots = p.layer.slots, now = clock.now;
    // Warps begin apart, so that they seldom try to take the same slot.
    const uint32 begin = (clock.hand + turn * WARP) % slots;
    const auto slot_at = [&](uint32 n) { return begin + n - (begin + n >= slots ? slots : 0); };
    const auto look = [&](uint32 s) { return Seen{load_volatile(layer.holds + s), load_volatile(layer.named + s)}; };
#pragma unroll 1
    for (uint32 first = lane; first < min(ROUNDS * LOOKED_AT * WARP, slots + lane); first += LOOKED_AT * WARP) {
        // A bit for each of the lane's slots that may go: in the first byte, or in the second if a resolve named it since the hand passed.
        uint32 due = 0;
#pragma unroll
        for (uint32 k = 0; k < LOOKED_AT; ++k) {
            const uint32 n = first + k * WARP;
            if (n >= slots) break;
            const Seen seen = look(slot_at(n));
            if (may_go(p, seen, now)) due |= 1u << (seen.named & CHANCE ? 8 + k : k);
        }
        for (;;) {
            uint32 willing = __ballot_sync(FULL_WARP, due & 0xff);
            if (!willing) willing = __ballot_sync(FULL_WARP, due);
            if (!willing) break;
            const uint32 taker = __ffs(willing) - 1, bit = __ffs(due | 1u << 31) - 1, s = slot_at(first + bit % 8 * WARP);
            bool is_taken = false;
            if (lane == taker) {
                due &= due - 1;
                // Another warp may have taken it meanwhile.
                const Seen seen = look(s);
                const Home evicted = unpack(seen.holds);
                is_taken = may_go(p, seen, now) && atomicCAS(layer.holds + s, seen.holds, pack({host_run, now << 1 | 1})) == seen.holds;
                if (is_taken) {
                    if (evicted.slot < CLAIMED) {
                        store_volatile(layer.homes + evicted.slot, NO_HOME);
                        atomicAdd(&clock.totals.evictions, uint64(1));
                        if (!(seen.named & IN_USE)) atomicAdd(&clock.totals.unused, uint64(1));
                    }
                    store_volatile(layer.named + s, named_at(now - p.cache.hold) | CHANCE | IN_USE);
                    store_volatile(layer.homes + host_run, pack({s, now << 1 | 1}));
                }
            }
            if (__any_sync(FULL_WARP, is_taken)) return __shfl_sync(FULL_WARP, s, taker);
        }
    }
    return NO_SLOT;
}

// Gives the run of a block that leaves the tail a slot. All threads of a CTA call it.
template <bool DECODES> __device__ inline void settle(const AppendParams &p, const Span &s, uint32 i, uint32 g) {
    __shared__ uint32 taken;
    const int32 n = s.leaving;
    const uint32 heads = p.cache.heads.value, block = p.cache.table[uint64(s.sequence) * p.cache.max_blocks + n];
    if (threadIdx.x < WARP) {
        const uint32 slot = take_slot(p, block * heads + g, i * heads + g);
        if (threadIdx.x == 0) taken = slot;
    }
    __syncthreads();
    const uint32 slot = taken;
    __syncthreads();  // before the next call writes it
    if (slot == NO_SLOT) return;
    // Its codes were made when it became whole, by an append before this one.
    const char *from = p.cache.is_coded ? p.cache.coded_tail(p.layer, s.sequence, n, g) : p.cache.tail(p.layer, s.sequence, n, g);
    if constexpr (DECODES)
        decode_run<THREADS>(p.cache, p.coding, p.layer.weights + g * p.coding.dim, from, p.cache.slot(p.layer, slot));
    else
        copy_units<THREADS, 4>(from, p.cache.slot(p.layer, slot), p.cache.run, threadIdx.x);
}

// Moves the tail, lists the full pages for cache_write_back, and adds to the layer's counters.
__device__ inline void finish_row(const AppendParams &p, const Span &s) {
    Clock &clock = *p.layer.clock;
    if (s.dropped) atomicAdd(&clock.totals.dropped, uint64(s.dropped));
    if (s.is_empty()) return;
    p.layer.tails[s.sequence].newest = s.newest;
    p.layer.tails[s.sequence].tokens = s.past;
    const int32 begun = p.cache.size.divide(s.from), past = p.cache.size.divide(s.past), first = begun + p.cache.is_first(begun);
    if (first >= past) return;
    atomicAdd(&clock.totals.written, uint64(past - first) * p.cache.heads.value * p.cache.run);
    const int32 *row = p.cache.table + uint64(s.sequence) * p.cache.max_blocks;
    for (int32 n = max(first, s.newest - 2); n < past; ++n)
        p.layer.full[atomicAdd(&clock.full, 1u)] = {p.cache.tail_page(s.sequence, n), uint32(row[n])};
}

template <bool DECODES> __device__ inline void append(const AppendParams &p) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const uint32 i = blockIdx.x / p.per_row, part = blockIdx.x - i * p.per_row;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = p.cache.heads.value;
    const Span s = span_of(p, i);
    // Where blocks are coded an append of more tokens has windows.
    const bool leaves = !s.is_empty() && s.leaving >= 0, is_long = !DECODES && p.most > p.cache.size.value && p.window == ALL;
    // Thread 0 of the CTA that is counted last learns so. What the CTAs do before, the last one sees.
    uint32 counted = 0;
    const auto count = [&] {
        __syncthreads();
        if (threadIdx.x || p.per_row == 1) return;
        __threadfence();
        counted = atomicAdd(p.layer.arrived + i, 1u);
    };
    if (!is_long) count();
    const uint32 cells = s.is_empty() ? 0 : uint32(s.past - s.from) * heads;
    for (uint32 cell = part * WARPS + warp; cell < cells; cell += p.per_row * WARPS) {
        const uint32 t = p.cache.heads.divide(cell), g = cell - t * heads, token = s.from + t;
        const int32 n = p.cache.size.divide(token);
        const uint32 within = token - n * p.cache.size.value;
        char *run = stays(s, n) ? p.cache.tail(p.layer, s.sequence, n, g)
                                : p.cache.stored(p.layer, p.cache.table[uint64(s.sequence) * p.cache.max_blocks + n], g);
        copy_token(p, i, token - s.begin, g, run, within, lane);
    }
    for (uint32 g = part; leaves && !is_long && g < heads; g += p.per_row) settle<DECODES>(p, s, i, g);
    if (is_long) {
        count();
        __shared__ bool is_last;
        if (threadIdx.x == 0) {
            is_last = counted + 1 == p.per_row;
            __threadfence();  // after what the other CTAs did
        }
        __syncthreads();
        if (!is_last) return;
        for (uint32 g = 0; leaves && g < heads; ++g) settle<DECODES>(p, s, i, g);
    }
    if (threadIdx.x || counted + 1 < p.per_row) return;
    __threadfence();  // after what the other CTAs read
    p.layer.arrived[i] = 0;
    finish_row(p, s);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) cache_append(const __grid_constant__ AppendParams p) { append<false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) cache_append_decoded(const __grid_constant__ AppendParams p) { append<true>(p); }
