// What minmax, means and axis_general share: a row of scores, and how a CTA selects from it.
//
// A row is a list to be made: of (sequence, KV head), or of (sequence, query position, KV head) where every position has its own list. `slices`
// CTAs score a row's blocks. They are a cluster and send the scores to shared memory of its first CTA, which selects from them. Where there are
// no clusters, or scores do not fit, or a cluster of its own selects sooner, the CTAs write the scores to `scratch_scores`, and a second
// kernel selects (top_cta.cu, top_cluster.cu).
#pragma once

#include "common/cluster.cuh"
#include "common/eight.cuh"
#include "common/parameters.cuh"
#include "common/quad_topk.cuh"
#include "select/params.cuh"

enum Status : uint32 { SAW_NAN = 1, NO_SUMMARY = 2, CLAMPED = 4 };

// The lengths of a sequence as the caller gives them: tokens, and query positions.
struct Lengths {
    int32 tokens, queries;

    Lengths() = default;
    __device__ Lengths(int32 tokens, int32 queries) : tokens(tokens), queries(queries) {}
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
    uint32 queries;   // query positions that the sequence has
    uint32 first, last;  // the query positions that share this list: first … last−1
    uint32 tokens, n;    // tokens that the last of these positions sees, and their blocks
    bool clamped;

    Row() = default;
    __device__ Row(const SelectParams &p, uint32 number) : Row(p, number, Lengths(p, p.by_lists.divide(p.by_heads.divide(number)))) {}
    __device__ Row(const SelectParams &p, uint32 number, const Lengths &lengths) : number(number) {
        const uint32 heads = p.by_heads.divide(number);
        head = number - heads * p.kv_heads;
        seq = p.by_lists.divide(heads), list = heads - seq * p.lists;
        const int32 given = lengths.tokens, found = lengths.queries;
        len = max(given, 0), queries = min(max(found, 0), int32(p.positions));
        clamped = given < 0 || uint32(found) != queries;
        const bool shares = p.lists == 1;
        first = shares ? 0 : min(list, queries), last = shares ? queries : min(list + 1, queries);
        tokens = first < last ? max(position(last - 1) + 1, 0) : 0;
        n = tokens == 0 ? 0 : p.by_block.divide(tokens - 1) + 1;
    }
    // The token position of a query: it sees the keys up to there.
    __device__ int32 position(uint32 query) const { return len - int32(queries) + int32(query); }
};

// The budget of a sequence, as the caller gives it.
__device__ inline int32 budget_of(const SelectParams &p, uint32 seq) { return p.budgets ? as<int32>(p.budgets + seq * p.budgets_seq) : int32(p.k); }

// The inputs that decide how many blocks are selected for a sequence's lists.
struct ListInputs {
    int32 tokens, queries, budget;

    __device__ static ListInputs of(const SelectParams &p, uint32 seq) {
        const Lengths lengths(p, seq);
        return {lengths.tokens, lengths.queries, budget_of(p, seq)};
    }
    // Reads the inputs while the kernel before may still write them.
    __device__ static ListInputs hint(const SelectParams &p, uint32 seq) {
        return {load_hint(p.seq_lens + seq * p.seq_lens_seq), p.q_lens ? load_hint(p.q_lens + seq * p.q_lens_seq) : int32(p.positions),
                p.budgets ? load_hint(p.budgets + seq * p.budgets_seq) : int32(p.k)};
    }
    __device__ ListInputs known() const { return {pin_in_register(tokens), pin_in_register(queries), pin_in_register(budget)}; }
    __device__ Lengths lengths() const { return {tokens, queries}; }
    __device__ bool operator!=(const ListInputs &other) const {
        return tokens != other.tokens || queries != other.queries || budget != other.budget;
    }
};

// How many blocks of a row are selected, given its budget.
struct Quota {
    uint32 stored;               // the first blocks, which have a score; the others are worth −inf
    uint32 init, local, wanted;  // first and last blocks, which are forced; how many others are selected
    uint32 end, of_stored;       // `of_stored` of the wanted blocks are among blocks init … end−1, the rest follow block end−1
    bool clamped;

    Quota() = default;
    __device__ Quota(const SelectParams &p, const Row &row, int32 given) {
        const uint32 n = row.n, k = min(uint32(max(given, 0)), p.capacity);
        stored = min(n, p.scored_blocks);
        init = min(p.init, n), local = min(p.local, n - init);
        const uint32 forced = init + local;
        wanted = min(k > forced ? k - forced : 0, n - forced);
        end = max(min(n - local, stored), init), of_stored = min(wanted, end - init);
        clamped = row.clamped || given != int32(k) || (p.scores && n > p.max_blocks);
    }
};

// Writes a block to its place in a row's list.
struct Emit {
    char *ids;
    int64 stride;

    __device__ Emit from(uint32 place) const { return {ids + place * stride, stride}; }
    __device__ void operator()(uint32 place, uint32 j) const { as<int32>(ids + place * stride) = j; }
};

__device__ inline Emit list_of(const SelectParams &p, const Row &row) {
    return {p.selected.ids + row.seq * p.selected.ids_seq + row.list * p.selected.ids_pos + row.head * p.selected.ids_head, p.selected.ids_entry};
}

// Writes what no score decides: the count, forced blocks, and selected blocks without a score.
__device__ inline void write_forced(const SelectParams &p, const Row &row, const Quota &quota) {
    const uint32 thread = threadIdx.x, n = row.n, init = quota.init, wanted = quota.wanted, local = quota.local;
    const Emit emit = list_of(p, row);
#pragma unroll 1
    for (uint32 j = thread; j < init; j += TOPK_THREADS) emit(j, j);
#pragma unroll 1
    for (uint32 j = thread; j < wanted - quota.of_stored; j += TOPK_THREADS) emit(init + quota.of_stored + j, quota.end + j);
#pragma unroll 1
    for (uint32 j = thread; j < local; j += TOPK_THREADS) emit(init + wanted + j, n - local + j);
    if (p.scores) {
        char *scores = p.scores + row.seq * p.scores_seq + row.list * p.scores_pos + row.head * p.scores_head;
#pragma unroll 1
        for (uint32 j = quota.stored + thread; j < min(n, p.max_blocks); j += TOPK_THREADS) as<float>(scores + j * p.scores_block) = minus_infinity();
    }
    if (thread == 0)
        as<int32>(p.selected.counts + row.seq * p.selected.counts_seq + row.list * p.selected.counts_pos + row.head * p.selected.counts_head) =
            init + local + wanted;
}
__device__ inline char *status_of(const SelectParams &p, const Row &row) {
    return p.status ? p.status + row.seq * p.status_seq + row.list * p.status_pos + row.head * p.status_head : nullptr;
}

// Writes a row's list and its status. choose(emit) emits place, from 0 on, and number of each selected block that has a score.
template <typename Choose>
__device__ void finish(const SelectParams &p, const Row &row, const Quota &quota, uint32 seen, const Choose &choose) {
    if (quota.of_stored > 0) choose(list_of(p, row).from(quota.init));
    write_forced(p, row, quota);
    if (threadIdx.x == 0 && p.status) as<uint32>(status_of(p, row)) = seen | (quota.clamped ? CLAMPED : 0);
}

constexpr uint32 MOST_SLICES = 16;  // most CTAs of a row's cluster

extern __shared__ __align__(16) float row_scores[];  // the row's scores, in the cluster's first CTA

struct SinkShared {
    Mailbox mailbox;
    uint32 saw[MOST_SLICES * TOPK_WARPS];  // status bits of each warp of the cluster
    uint32 seen;                           // status bits of this CTA
};

// Carries a row's scores to the CTA or the kernel that selects from them. Calls: open() ─ join() ─ put() of each stored block, report() of each
// warp ─ finish().
struct RowSink {
    const SelectParams &p;
    SinkShared &shared;
    uint32 number, slice;  // the row, and this CTA's number among the row's CTAs

    __device__ RowSink(const SelectParams &p, SinkShared &shared)
        : p(p), shared(shared), number(p.by_slices.divide(blockIdx.x)), slice(blockIdx.x - number * p.slices) {}

    // Called early, by all threads.
    __device__ void open() const {
        if (threadIdx.x == 0) shared.seen = 0;
        shared.mailbox.open();
    }
    // Called after open() and __syncthreads(), by all threads. start() and expect() are the halves of join(); start() needs no quota.
    __device__ void start() const { shared.mailbox.start(); }
    __device__ void expect(const Quota &quota) const { shared.mailbox.expect(4 * (quota.stored + p.slices * TOPK_WARPS)); }
    __device__ void join(const Quota &quota) const { start(), expect(quota); }

    __device__ void put(const Quota &quota, uint32 j, float score) const {
        if (p.scratch_scores)
            p.scratch_scores[uint64(number) * p.scored_blocks + j] = score;
        else
            shared.mailbox.send(reinterpret_cast<uint32 *>(row_scores) + j, __float_as_uint(quota.init <= j && j < quota.end ? score : absent_score()));
    }
    __device__ void report(uint32 saw) const {
        saw = __reduce_or_sync(FULL_WARP, saw);
        if (threadIdx.x % WARP > 0) return;
        if (!p.scratch_scores)
            shared.mailbox.send(&shared.saw[slice * TOPK_WARPS + threadIdx.x / WARP], saw);
        else if (saw)
            atomicOr(&shared.seen, saw);
    }
    __device__ void finish(const Row &row, const Quota &quota, TopKShared &top_shared) const {
        if (p.scratch_scores) {
            __syncthreads();
            if (threadIdx.x == 0) p.cta_status[blockIdx.x] = shared.seen;
            return;
        }
        if (slice == p.slices - 1) write_forced(p, row, quota);  // the last CTA has the time
        if (slice > 0) return;
        // What does not depend on scores is done while these arrive.
        reinterpret_cast<uint4 *>(top_shared.bin)[threadIdx.x] = make_uint4(0, 0, 0, 0);
        const Emit list = list_of(p, row).from(quota.init), emit = {pin_in_register(list.ids), pin_in_register(list.stride)};
        char *const status = pin_in_register(status_of(p, row));
        const uint32 clamped = pin_in_register(uint32(quota.clamped ? CLAMPED : 0)), reports = pin_in_register(p.slices * TOPK_WARPS);
        const uint32 wanted = pin_in_register(quota.of_stored);
        const SharedScores scores = {row_scores, pin_in_register(quota.stored)};
        const auto present = [&]() { return quota.end - quota.init; };
        bool is_done = wanted == 0 || wanted == present();
        for (uint32 n = threadIdx.x; is_done && n < wanted; n += TOPK_THREADS) emit(n, quota.init + n);
        shared.mailbox.receive();
        if (threadIdx.x / WARP == TOPK_WARPS - 1) write_status(status, reports, clamped);
        if (is_done) return;
        if (scores.count <= QuadTopK<1>::MOST)
            is_done = QuadTopK<1>(top_shared, scores).take(wanted, emit);
        else if (scores.count <= QuadTopK<4>::MOST)
            is_done = QuadTopK<4>(top_shared, scores).take(wanted, emit);
#if __CUDA_ARCH__ >= 900  // on earlier devices two CTAs of a multiprocessor lack the registers
        else if (scores.count <= QuadTopK<8>::MOST)
            is_done = QuadTopK<8>(top_shared, scores).take(wanted, emit);
#endif
        if (is_done) return;
        TopK<SharedScores> top(top_shared, scores, present());
        top.take(top.find_threshold(wanted), emit);
    }
    // Called by one warp: writes what all warps of the cluster saw.
    __device__ void write_status(char *status, uint32 reports, uint32 clamped) const {
        const uint32 lane = threadIdx.x % WARP;
        uint32 saw = 0;
#pragma unroll
        for (uint32 i = lane; i < MOST_SLICES * TOPK_WARPS; i += WARP)
            if (i < reports) saw |= shared.saw[i];
        saw = __reduce_or_sync(FULL_WARP, saw);
        if (lane == 0 && status) as<uint32>(status) = saw | clamped;
    }
};
