// The memory and bookkeeping of a layer of a tiered KV cache, and the kernels' parameters. src/kv/cuda/mod.rs says how the kernels work
// together.
//
// A run is the memory of one block of one KV head of one layer: keys, values, scales. The number of a run in host memory is
// block · Hk + KV head.
#pragma once

#include "common/types.cuh"

// The newest block of a sequence, the first block that may lie in its tail, and the number of its tokens: where its last append ended. The tail
// has at most the two newest blocks.
struct Tail {
    int32 newest, first, tokens, unused;
};

// The slot of a host run (`homes`), or the host run that a slot holds (`holds`), and the resolve that gave the slot to the run.
struct Home {
    uint32 slot;   // in `holds`: the host run
    uint32 since;  // 2 · the resolve that gave the slot; odd once the run has been copied

    __device__ bool is_resident() const { return since & 1; }
};
constexpr uint32 CLAIMED = 0xfffffffeu;  // a slot of this or more: the run has none (NO_HOME), or a resolve is finding one
constexpr uint64 NO_HOME = 0xffffffffffffffffull, CLAIMED_HOME = 0xfffffffffffffffeull, RESIDENT = 1ull << 32;
// In `holds`: the slot holds no run, but a copy of the run that it held last may be under way.
constexpr uint64 DROPPED = CLAIMED_HOME;

__device__ inline uint64 pack(Home home) { return uint64(home.since) << 32 | home.slot; }
__device__ inline Home unpack(uint64 bits) { return {uint32(bits), uint32(bits >> 32)}; }

// Loads and stores of words that a resolve and concurrent copies share.
template <typename T> __device__ inline T load_volatile(const T *at) { return *static_cast<const volatile T *>(at); }
template <typename T> __device__ inline void store_volatile(T *at, T x) { *static_cast<volatile T *>(at) = x; }

// When a slot was last named: resolve << 2 | IN_USE | CHANCE, with 30 bits of the number of the resolve.
constexpr uint32 IN_USE = 2;   // a resolve has named the run since it was copied
constexpr uint32 CHANCE = 1;   // a resolve has named the slot since the clock's hand last passed it
__device__ inline uint32 named_at(uint32 resolve) { return resolve << 2; }
__device__ inline uint32 age(uint32 now, uint32 named) { return (now - (named >> 2)) & 0x3fffffffu; }

// The counters of one layer since the cache was created.
struct Totals {
    uint64 hits, misses, fetched, written, evictions, unused, waits, dropped;
};

// The state that calls of one layer leave to the next call.
struct Clock {
    uint64 passed, before;     // the number of slots that the hand has passed, each time counted; the number before the last resolve
    uint64 searched;           // the count of `passed` at which the next search for runs to copy begins
    uint64 searching;          // the value of `searched` when the current copies have ended
    uint32 claimed, waiting;   // a resolve's number of entries in `claims` and in `others`
    uint32 hits, misses;       // a resolve's counts
    uint32 now, hand;          // the number of resolves so far; the slot at which the hand stands
    uint32 due;                // a fetch's number of runs in `to_copy`
    uint32 tickets, is_set, left;  // a fetch's CTAs that began, whether `due` is written, and its CTAs that ended
    uint32 full, written;      // the number of pages to write back, and the CTAs of a write-back that ended
    Totals totals;
};

// An entry whose run has no slot yet: the address of the entry's slot, and the run.
struct alignas(16) Missed {
    int32 *cell;
    uint32 host_run;
};
// A full tail page, and the block that it holds.
struct Full {
    uint32 page, block;
};
// A copy to make: the slot, the run, and the resolve that gave the slot.
struct ToCopy {
    uint32 slot, host_run, since;
};

struct Layer {
    char *pool;          // slots of the tails: runs as they are appended
    char *slots_at;      // [slots] runs as they lie on the host, or what their codes stand for
    char *coded_tails;   // [max_sequences, 3, Hk] runs of codes, of blocks in tails; where blocks are coded
    float *weights;      // [Hk, D] of key channels; where blocks are coded
    char *host;          // [host_blocks, Hk] runs
    Clock *clock;
    Tail *tails;         // [max_sequences]
    uint64 *homes;       // [host_blocks, Hk]: the slot of each host run, as Home
    uint64 *holds;       // [slots]: the host run in each slot, as Home
    uint32 *named;       // [slots]: when each slot was last named
    ToCopy *to_copy;     // [slots]: the copies of the current fetch
    Missed *claims;      // [largest selection]: the first entry of each run that needs a slot
    Missed *others;      // [largest selection]: the further entries of these runs
    Full *full;          // [3·max_sequences]
    uint32 *arrived;     // [max_sequences]: the CTAs of an append's row that ended
    uint32 slots, unused;  // slots that blocks are fetched into
};

// Constants of a cache.
struct Cache {
    Layer *layers;
    int32 *table;  // [max_sequences, max_blocks]
    int32 *lens;   // [max_sequences]: the number of blocks; −1 if there is no sequence
    uint64 run, tail_run, slot_run;  // bytes of a run on the host, in a tail, and in a slot that it is fetched into: multiples of 64
    uint32 parts[4], token[4];  // keys, values and their scales: offset in a run of a tail, bytes of a token
    Divisor size, heads;        // S, Hk
    uint32 layer_count, max_sequences, max_blocks, first_slot, hold;
    uint32 is_coded;  // whether blocks are coded as they become whole; then the first block of a sequence has a tail page of its own for good

    __device__ uint32 tail_page(uint32 sequence, uint32 number) const {
        return sequence * (3 + is_coded) + (is_coded && number == 0 ? 3 : number % 3);
    }
    __device__ bool is_first(int32 number) const { return is_coded && number == 0; }
    __device__ char *tail(const Layer &layer, uint32 sequence, uint32 number, uint32 head) const {
        return layer.pool + (uint64(tail_page(sequence, number)) * heads.value + head) * tail_run;
    }
    // The codes of a block in the tail, once it is whole.
    __device__ char *coded_tail(const Layer &layer, uint32 sequence, uint32 number, uint32 head) const {
        return layer.coded_tails + (uint64(sequence * 3 + number % 3) * heads.value + head) * run;
    }
    // Whether slots hold what codes stand for.
    __device__ bool is_decoded() const { return slot_run != run; }
    __device__ char *slot(const Layer &layer, uint32 slot) const { return layer.slots_at + slot * slot_run; }
    __device__ char *stored(const Layer &layer, uint32 block, uint32 head) const {
        return layer.host + (uint64(block) * heads.value + head) * run;
    }
};

// Whether tokens of a block are written to the tail.
__device__ inline bool holds(Tail tail, int32 number) { return number >= max(tail.first, tail.newest - 1) && number <= tail.newest; }
// Whether a block is read from the tail.
__device__ inline bool is_in_tail(const Cache &cache, Tail tail, int32 number) {
    return holds(tail, number) || (cache.is_first(number) && tail.newest >= 0);
}

// --- codes ----------------------------------------------------------------------------------------------------------------

// How a block is coded, and where its codes lie in a run.
struct Coding {
    uint32 parts[4];  // codes of keys and of values, their scales: offset in a run
    uint32 mean;      // the mean key's
    uint32 dim, value_dim, dtype;
    float factor, value_factor;  // of a rotated key and value
};

// --- append ---------------------------------------------------------------------------------------------------------------

// The rows of a part, [B, T, Hk, …]. Strides are in bytes. `data` is null if there is no such part.
struct PartRows {
    const char *data;
    int64 seq, token, head, channel;
};
struct AppendParams {
    Layer layer;
    Cache cache;
    const char *sequences, *begin, *lens;  // [B] int32; lens may be null
    int64 sequences_seq, begin_seq, lens_seq;
    PartRows rows[4];
    uint32 most;         // T
    uint32 per_row;      // CTAs of a row
    // ALL, or of each row the tokens in this block of those that its tokens lie in: blocks are coded one after the other
    uint32 window, unused;
    uint32 log_unit[4];  // the unit of copies: 16 bytes if rows are packed and aligned, else a channel
    Coding coding;       // where slots hold what codes stand for
};

// --- resolve --------------------------------------------------------------------------------------------------------------

// Lists, [B, Q, Hk, cap] and [B, Q, Hk]. Strides are in bytes; `ids` is null if there is no such list.
struct ListRows {
    char *ids, *counts, *slots;
    int64 ids_seq, ids_position, ids_head, ids_entry;
    int64 counts_seq, counts_position, counts_head;
    int64 slots_seq, slots_position, slots_head, slots_entry;
};
struct ResolveParams {
    Layer layer;
    Cache cache;
    const char *sequences;  // [B] int32
    int64 sequences_seq;
    ListRows wanted, resident;
    char *missed;           // [B, Q, Hk] int32, or null
    int64 missed_seq, missed_position, missed_head;
    Divisor heads, positions, cap;
    uint32 entries;  // the capacity of all lists together
    uint32 first_far;  // unless 0, entries whose host run n is not resident name slot first_far + n
    char *missed_again;  // as `missed`, of the same strides
};

// --- copies ---------------------------------------------------------------------------------------------------------------

struct FetchParams {
    Layer layer;
    Cache cache;
    uint32 is_wait;
    uint32 is_in_order;  // no resolve of the layer runs at the same time: the launch follows the last one on its stream
};
struct DecodeParams {
    FetchParams fetch;
    Coding coding;
};

// --- sequences ------------------------------------------------------------------------------------------------------------

struct Blocks {
    static constexpr uint32 MOST = 900;
    uint32 of[MOST];
    uint32 count;
};
// Blocks of a sequence from number `first` on, and the number of its blocks.
struct TableParams {
    Cache cache;
    uint32 sequence, first;
    int32 len;
    uint32 begins;  // whether the sequence is new
};
// The beginning of sequence `to` from the first `whole` blocks of sequence `from` (to = from: a truncation). If `is_opened`, the next block
// is partial; its first tokens are in the tail of `from` or in block `content`.
// A step's rows, whose sequences are [B] int32, in bytes apart.
struct RowParams {
    Cache cache;
    const char *sequences;
    int64 sequences_seq;
    int32 *blocks, *tails;  // [B, max_blocks]
    int32 *floors;          // [B]: the first token of the blocks that every layer's tail has
};
struct ForkParams {
    Cache cache;
    uint32 from, to, whole, is_opened, content, tokens;
};

// --- coding ---------------------------------------------------------------------------------------------------------------

struct CodeParams {
    Layer layer;
    Cache cache;
    Coding coding;
};
struct OpenParams {
    ForkParams fork;
    Coding coding;
};

// --- compaction -----------------------------------------------------------------------------------------------------------

// The paths of draft trees, [B, M] int32, and for each its sequence, the position of its root, int32 or int64, and how many nodes were accepted.
// Strides are in bytes; `accepted` may be null.
struct CompactPathsParams {
    Cache cache;
    Coding coding;  // where blocks are coded
    const char *sequences, *bases, *path, *accepted;
    int64 sequences_seq, bases_seq, path_seq, path_place, accepted_seq;
    Divisor batch;  // B
    uint32 places;  // M
    uint32 base_bytes, unused;
};
