// What the kernels of a tiered KV cache share: a layer's memory and bookkeeping, and what each kernel is given. src/kv/cuda/mod.rs says how
// they work together.
#pragma once

#include "common/types.cuh"

// The newest block of a sequence, and the first that lies in its tail; no more than two do.
struct Tail {
    int32 newest, first;
};

// Which slot a block of one KV head is in, and since which resolve; or, of a slot, which block it holds.
struct Home {
    uint32 slot;   // or key: block and KV head
    uint32 since;  // 2 · the resolve that gave it; odd once the block is there

    __device__ bool is_there() const { return since & 1; }
};
constexpr uint32 CLAIMED = 0xfffffffeu;  // this or more in place of a slot: one is being looked for, or none yet
constexpr uint64 NO_HOME = 0xffffffffffffffffull, CLAIMED_HOME = 0xfffffffffffffffeull, THERE = 1ull << 32;

__device__ inline uint64 pack(Home home) { return uint64(home.since) << 32 | home.slot; }
__device__ inline Home unpack(uint64 bits) { return {uint32(bits), uint32(bits >> 32)}; }

// What a resolve and copies that run beside it read and write of each other's.
template <typename T> __device__ inline T fresh(const T *at) { return *static_cast<const volatile T *>(at); }
template <typename T> __device__ inline void tell(T *at, T x) { *static_cast<volatile T *>(at) = x; }

// When a slot was last named: resolve << 2 | IN_USE << 1 | PASSED_OVER, in 30 bits of resolves.
constexpr uint32 IN_USE = 2;   // named since its block was there
constexpr uint32 CHANCE = 1;   // named since the hand went by
__device__ inline uint32 named_at(uint32 resolve) { return resolve << 2; }
__device__ inline uint32 age(uint32 now, uint32 named) { return (now - (named >> 2)) & 0x3fffffffu; }

// Of one layer since the cache was created.
struct Totals {
    uint64 hits, misses, fetched, written, evictions, unused, waits, dropped;
};

// What calls of one layer leave to the next.
struct Clock {
    uint64 passed, before;     // slots that the hand went over, a slot once for each time; those before the last resolve
    uint64 searched;           // of these, the first that copies have yet to look for
    uint64 searching;          // what it will be when the copies under way have ended
    uint32 claimed, waiting;   // of a resolve: entries in `claims`, and in `others`
    uint32 hits, misses;       // of a resolve
    uint32 now, hand;          // resolves so far; the slot that the next search begins with
    uint32 due;                // of copies: runs in `travels`
    uint32 tickets, is_set, left;  // of copies: CTAs that began, whether `due` is told, CTAs that ended
    uint32 full, written;      // pages to write back; CTAs that ended
    Totals totals;
};

// An entry without a slot: where that goes, and the block that it waits for.
struct alignas(16) Missed {
    int32 *cell;
    uint32 key;
};
struct Full {
    uint32 page, block;
};
// A copy: the slot, and what it holds.
struct Travel {
    uint32 slot, key, since;
};

struct Layer {
    char *pool;          // [total_slots] runs
    char *host;          // [host_blocks, Hk] runs
    Clock *clock;
    Tail *tails;         // [max_sequences]
    uint64 *homes;       // [host_blocks, Hk]
    uint64 *holds;       // [slots]
    uint32 *named;       // [slots]
    Travel *travels;     // [slots]: what the copies under way are
    Missed *claims;      // [largest selection]: the first entry of each block that needs a slot
    Missed *others;      // [largest selection]: its other entries
    Full *full;          // [3·max_sequences]
    uint32 *arrived;     // [max_sequences]: CTAs of an append that ended
};

// What is fixed when a cache is created.
struct Cache {
    Layer *layers;
    int32 *table;  // [max_sequences, max_blocks]
    int32 *lens;   // [max_sequences]: blocks; −1 where there is no sequence
    uint64 run;    // bytes, a multiple of 64
    uint32 parts[4], token[4];  // of keys, values and scales: where they begin in a run, bytes of a token
    Divisor size, heads;        // S, Hk
    uint32 layer_count, max_sequences, max_blocks, first_slot, slots, hold;

    __device__ uint32 tail_page(uint32 sequence, uint32 number) const { return sequence * 3 + number % 3; }
    __device__ char *tail(const Layer &layer, uint32 sequence, uint32 number, uint32 head) const {
        return layer.pool + (uint64(tail_page(sequence, number)) * heads.value + head) * run;
    }
    __device__ char *stored(const Layer &layer, uint32 block, uint32 head) const {
        return layer.host + (uint64(block) * heads.value + head) * run;
    }
};

__device__ inline bool holds(Tail tail, int32 number) { return number >= max(tail.first, tail.newest - 1) && number <= tail.newest; }

// --- append ---------------------------------------------------------------------------------------------------------------

// Strides in bytes. `data` is NULL where there is no such part.
struct PartRows {
    const char *data;
    int64 seq, token, head, channel;
};
struct AppendParams {
    Layer layer;
    Cache cache;
    const char *sequences, *begin, *lens;
    int64 sequences_seq, begin_seq, lens_seq;
    PartRows rows[4];
    uint32 most;      // T
    uint32 per_row;   // CTAs of a row
    uint32 log_unit[4];  // of a copy: 16 bytes where rows are packed and aligned, else a channel
};

// --- resolve --------------------------------------------------------------------------------------------------------------

// Strides in bytes; `ids` is NULL where there is no such list.
struct ListRows {
    char *ids, *counts, *slots;
    int64 ids_seq, ids_position, ids_head, ids_entry;
    int64 counts_seq, counts_position, counts_head;
    int64 slots_seq, slots_position, slots_head, slots_entry;
};
struct ResolveParams {
    Layer layer;
    Cache cache;
    const char *sequences;
    int64 sequences_seq;
    ListRows wanted, resident;
    char *missed;
    int64 missed_seq, missed_position, missed_head;
    Divisor heads, positions, cap;
    uint32 entries;  // of all lists
};

// --- copies ---------------------------------------------------------------------------------------------------------------

struct FetchParams {
    Layer layer;
    Cache cache;
    uint32 is_wait;
};

// --- sequences ------------------------------------------------------------------------------------------------------------

struct Blocks {
    static constexpr uint32 MOST = 900;
    uint32 of[MOST];
    uint32 count;
};
// Blocks of a sequence from number `first` on, and how many it has then.
struct TableParams {
    Cache cache;
    uint32 sequence, first;
    int32 len;
    uint32 begins;  // whether the sequence is new
};
// A sequence with the first `whole` blocks of another, or of itself; `is_opened`: and the first tokens of the next, which are in its tail or
// in block `content`.
struct CutParams {
    Cache cache;
    uint32 from, to, whole, is_opened, content;
};
