// What the selecting kernels share: what a row of scores is, and how a CTA selects from it.
//
// A row is a list to be made: of (sequence, KV head), or of (sequence, query position, KV head) where every position has its own. `slices`
// CTAs score a row's blocks and leave the scores in `held`. Either the one that arrives last at the row's counter selects from them, or a
// kernel that follows does (select_top).
#pragma once

#include "common/eight.cuh"
#include "select/params.cuh"
#include "common/topk.cuh"

enum Status : uint32 { SAW_NAN = 1, NO_SUMMARY = 2, CLAMPED = 4, NOT_LAST = ~0u };

// What a CTA adds to its row's counter: itself, and what it saw. There are fewer than 1024.
constexpr uint32 ARRIVED = 1, ARRIVED_NAN = 1 << 10, ARRIVED_MISSING = 1 << 20;

__device__ inline uint32 arrive(uint32 *counter, uint32 news) {
    uint32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(news) : "memory");
    return before;
}

// What is given of a sequence: tokens, and query positions.
struct Lengths {
    int32 tokens, queries;

    __device__ Lengths(const SelectParams &p, uint32 seq) {
        tokens = as<int32>(p.seq_lens + seq * p.seq_lens_seq);
        queries = p.positions;
        if (p.q_lens) queries = as<int32>(p.q_lens + seq * p.q_lens_seq);
    }
};

// One list to be made.
struct Row {
    uint32 number, seq, head, list;
    int32 len;        // tokens of the sequence
    uint32 queries;   // positions of the sequence that are there
    uint32 first, last;  // those that this list is for: first … last−1
    uint32 tokens, n;    // that the last of them sees, and their blocks
    bool clamped;

    __device__ Row(const SelectParams &p, uint32 number) : Row(p, number, Lengths(p, number / (p.kv_heads * p.lists))) {}
    __device__ Row(const SelectParams &p, uint32 number, const Lengths &lengths) : number(number) {
        head = number % p.kv_heads;
        list = number / p.kv_heads % p.lists;
        seq = number / (p.kv_heads * p.lists);
        const int32 given = lengths.tokens, found = lengths.queries;
        len = max(given, 0), queries = min(max(found, 0), int32(p.positions));
        clamped = given < 0 || uint32(found) != queries;
        const bool shares = p.lists == 1;
        first = shares ? 0 : min(list, queries), last = shares ? queries : min(list + 1, queries);
        tokens = first < last ? max(position(last - 1) + 1, 0) : 0;
        n = (tokens + p.block_size - 1) / p.block_size;
    }
    // Where the query stands; it sees the keys up to there.
    __device__ int32 position(uint32 query) const { return len - int32(queries) + int32(query); }
};

// The row's CTA that is last goes on, and knows what the others saw: `seen` is in shared memory, and has what this CTA did.
__device__ inline bool is_last(const SelectParams &p, uint32 row, uint32 active, uint32 &seen) {
    __syncthreads();  // all scores of this CTA are written
    if (threadIdx.x == 0) {
        uint32 sum = ARRIVED + (seen & SAW_NAN ? ARRIVED_NAN : 0) + (seen & NO_SUMMARY ? ARRIVED_MISSING : 0);
        if (active > 1) {
            sum += arrive(&p.arrived[row], sum);
            if (sum % ARRIVED_NAN == active) p.arrived[row] = 0;
        }
        seen = sum % ARRIVED_NAN == active ? (sum / ARRIVED_NAN % 1024 ? SAW_NAN : 0) | (sum / ARRIVED_MISSING ? NO_SUMMARY : 0) : NOT_LAST;
    }
    __syncthreads();
    return seen != NOT_LAST;
}

// Selects among n blocks of which the first `stored` have a score(j), and writes the list and its status. The others are worth −inf.
template <typename Score>
__device__ void finish(const SelectParams &p, const Row &row, uint32 stored, uint32 seen, TopKShared &shared, const Score &score) {
    int32 given = p.k;
    if (p.budgets) given = as<int32>(p.budgets + row.seq * p.budgets_seq);
    const uint32 n = row.n, k = min(uint32(max(given, 0)), p.cap), init = min(p.init, n), local = min(p.local, n - init);
    const uint32 forced = init + local, wanted = min(k > forced ? k - forced : 0, n - forced);
    const uint32 end = max(min(n - local, stored), init), of_stored = min(wanted, end - init);
    const uint32 thread = threadIdx.x;

    char *ids = p.selected.ids + row.seq * p.selected.ids_seq + row.list * p.selected.ids_pos + row.head * p.selected.ids_head;
    const auto emit = [&](uint32 place, uint32 j) { as<int32>(ids + place * p.selected.ids_entry) = j; };
    if (of_stored > 0) {
        const auto key = [&](uint32 j) { return sort_key(score(j)); };
        TopK<decltype(key)> top(shared, init, end, key);
        top.take(top.cut(of_stored), [&](uint32 place, uint32 j) { emit(init + place, j); });
    }
    for (uint32 j = thread; j < init; j += TOPK_THREADS) emit(j, j);
    for (uint32 j = thread; j < wanted - of_stored; j += TOPK_THREADS) emit(init + of_stored + j, end + j);
    for (uint32 j = thread; j < local; j += TOPK_THREADS) emit(init + wanted + j, n - local + j);
    if (p.scores) {
        char *scores = p.scores + row.seq * p.scores_seq + row.list * p.scores_pos + row.head * p.scores_head;
        for (uint32 j = stored + thread; j < min(n, p.max_blocks); j += TOPK_THREADS) as<float>(scores + j * p.scores_block) = minus_infinity();
    }
    if (thread == 0) {
        as<int32>(p.selected.counts + row.seq * p.selected.counts_seq + row.list * p.selected.counts_pos + row.head * p.selected.counts_head) =
            forced + wanted;
        if (p.status) {
            const bool clamped = row.clamped || given != int32(k) || (p.scores && n > p.max_blocks);
            as<uint32>(p.status + row.seq * p.status_seq + row.list * p.status_pos + row.head * p.status_head) =
                seen | (clamped ? CLAMPED : 0);
        }
    }
}
