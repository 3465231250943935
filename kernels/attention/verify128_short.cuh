// Attention for up to 64 rows to few short lists (variant verify128_short): verify128.cuh where a CTA has few stages of a list, so that what is done once
// counts. A cluster of up to 9 CTAs takes each list by itself. Where lists are few, half of the multiprocessors are left to CTAs of the kernel that follows,
// which begin while those of this one run. Each CTA has two halves, which share the queries and nothing else until they join. Half h of CTA r takes stages of 64 tokens
// 2·r + h, 2·(r + ctas) + h, …:
//
//   copies    a warpgroup ── keys [64 tokens × channels], then values [64 × channels], in rings of SHORT_STAGES each
//   products  a warpgroup ── S [64 rows × 64 tokens] = Q · Kᵀ ── running softmax ── O [64 × channels] += P · V
//   join      (verify128_join.cuh) both halves in shared memory ── the cluster, each CTA a part of the rows
//
// Entries of lists are read beside lengths, the first keys are requested before these are known (those of all stages of the ring, where tiles are copied as boxes), and S of
// a stage is computed beside O of the one before. Each half has four warps that copy: where tiles are not boxes, the instructions of these warps bound it, and whole tiles take
// fewer of them.
#pragma once

#include "attention/verify128.cuh"

constexpr uint32 HALVES = GROUPS, SHORT_THREADS = 2 * COMPUTE_THREADS;
// What a thread that computes has, and one that copies; together those of two threads.
constexpr uint32 SHORT_REGISTERS = 160, SHORT_COPY_REGISTERS = 256 - SHORT_REGISTERS;
// Keys of a stage are overwritten before its values. So what is said of its tokens stays for a turn longer than they do.
constexpr uint32 SHORT_PLACES = 2 * SHORT_STAGES;
static_assert(SHORT_PLACES <= STAGES, "barriers of keys, then those of values; positions");
static_assert(HALVES * SHORT_STAGES <= STAGES, "shared memory is shared out as in verify128");

// A half's ring of stages, whose keys and values arrive and are given up each by themselves.
struct ShortRing {
    const VerifyShared &s;
    uint32 at;  // in shared memory

    __device__ const Barrier &full_keys(uint32 stage) const { return s.full[stage]; }
    __device__ const Barrier &full_values(uint32 stage) const { return s.full[SHORT_STAGES + stage]; }
    __device__ const Barrier &empty_keys(uint32 stage) const { return s.empty[stage]; }
    __device__ const Barrier &empty_values(uint32 stage) const { return s.empty[SHORT_STAGES + stage]; }
    __device__ uint32 keys_at(uint32 stage) const { return at + stage * STAGE_BYTES; }
    __device__ uint32 values_at(uint32 stage) const { return keys_at(stage) + VALUES_OFFSET; }
};

// What every thread of a half knows: `s` is the half's own, and `rank` and `ctas` count halves.
struct ShortJob : VerifyJob {
    uint32 half;

    __device__ ShortRing ring() const { return {s, shared_address(shared) + half * SHORT_STAGES * STAGE_BYTES}; }
    // Stages whose keys the half requests before it knows lengths: those of a list as long as lists may be, if the ring has room.
    __device__ uint32 early_stages() const {
        const uint32 all = p.ids.data ? (p.list_capacity * p.block.value + STAGE_TOKENS - 1) / STAGE_TOKENS : 0;
        return all > rank ? min(p.ctas.divide(all - rank - 1) + 1, SHORT_STAGES > WARP / TILE ? min(SHORT_STAGES, WARP >> (LOG_TILE - p.log_granule)) : SHORT_STAGES) : 0;
    }
    // Stages that the half computes, at least one, of which some may be without tokens.
    __device__ uint32 all_stages() const { return max(max(stages(), early_stages()), 1u); }
    // A barrier of all threads of the CTA, which do different things before and after it.
    __device__ static void meet() { sync_some(3, SHORT_THREADS); }
};

template <typename Rows>
struct ShortCopies : VerifyCopies<Rows> {
    using Base = VerifyCopies<Rows>;
    using Base::arrive, Base::boxes, Base::cta_share, Base::item, Base::key, Base::lane, Base::p, Base::place, Base::reach, Base::s, Base::shared, Base::value;

    const ShortJob &job;
    // Where the listed tokens of the first tiles lie if lists and sequences are as long as they may be.
    uint32 first_x;
    Place first_place;

    __device__ Tiles tiles_of_any_list() const { return {this->first_tile(0), STAGE_TILES * this->ctas, WARP}; }
    __device__ Reach longest_reach() const { return {0, 0, 0, int32(p.token_capacity)}; }
    // Looks the first tiles up in the list.
    __device__ void find_early() {
        first_x = tiles_of_any_list().token(p, 0);
        first_place = place_of(p, item, longest_reach(), p.list_capacity, first_x, listed(p, item, first_x));
    }
    // Requests keys of one of the first stages. Those of tokens that are not there are masked later.
    __device__ void request_early(uint32 stage) const {
        const ShortRing ring = job.ring();
        const Barrier &full = ring.full_keys(stage);
        const Tiles tiles = tiles_of_any_list();
        const uint32 row = lane % TILE, within = row & ((1 << p.log_granule) - 1);
        const int32 granule = __shfl_sync(FULL_WARP, first_place.position, tiles.lane_of(p, stage, 0) + (row >> p.log_granule));
        // The last granule of a cache without pages may end past the cache.
        const uint32 are_there = __ballot_sync(FULL_WARP, is_reached(longest_reach(), granule, within));
        if (this->takes_boxes(are_there)) {
            const Place at = Base::of_lane(first_place, tiles.lane_of(p, stage, 0));
            const uint32 head = this->find_head();
            if (!is_elected()) return;
            await_bytes(full, Base::TILE_BYTES);
            this->request_boxes(boxes->keys, at, head, ring.keys_at(stage), full);
            return;
        }
        this->template copy_tile<1, true>(tiles, stage, are_there, p.k.at(first_place.page, first_place.row, item.head), p.k.step[1], ring.keys_at(stage));
        await_copies(full);
    }
    // Stages whose keys are requested before lengths are known: one, where that takes many instructions.
    __device__ uint32 soonest_stages() const { return boxes->exist ? job.early_stages() : min(job.early_stages(), 1u); }
    // Requests keys or values of a tile, and arrives for the warp at the barrier that tells of them. Boxes lie at `at`.
    __device__ void request(const Tiles &tiles, uint32 tile, uint32 are_there, const Place &at, const TensorMap &map, const char *address, int64 step, uint32 to,
                            const Barrier &full) const {
        if (this->takes_boxes(are_there)) {
            __syncwarp();  // what is said of the tile is written
            if (!is_elected()) return;
            full.expect(Base::TILE_BYTES);
            this->request_boxes(map, at, this->head_in_boxes, to, full);
            return;
        }
        this->template copy_tile<1, true>(tiles, tile, are_there, address, step, to);
        await_copies(full);
        arrive(full);
    }
    // The place of the lane's first granule, once lengths are known.
    __device__ Place find_first(const Tiles &tiles) const {
        const uint32 x = tiles.token(p, 0);
        if (x == Tiles::NOWHERE) return {-1, 0, 0};
        if (!p.ids.data) return place_of(p, item, reach, cta_share.entries, x, Listed{});
        const int32 position = first_place.position;
        const bool exists = p.block.divide(x) < cta_share.entries && position < reach.end && position + (1 << p.log_granule) > reach.begin;
        return exists ? first_place : Place{-1, 0, 0};
    }
    __device__ void run() {
        const ShortRing ring = job.ring();
        const Tiles tiles = this->begin();
        const uint32 count = job.all_stages(), early = job.early_stages(), at_once = this->found_at_once();
        Place next = find_first(tiles);
#pragma unroll 1
        for (uint32 step = 0; step < count; step++) {
            const uint32 stage = step % SHORT_STAGES, turn = step / SHORT_STAGES;
            if (step < tiles.count && tiles.begins(p, step)) this->keep_place(next);
            if (turn) ring.empty_keys(stage).wait(turn - 1);
            const uint32 are_there = this->note_tile(tiles, step, step % SHORT_PLACES);
            const Place at = Base::of_lane(place, tiles.lane_of(p, step, 0));
            if (step >= early) request(tiles, step, are_there, at, boxes->keys, key, p.k.step[1], ring.keys_at(stage), ring.full_keys(stage));
            else arrive(ring.full_keys(stage));
            if (step + 1 < early && soonest_stages() < 2) request_early(step + 1);
            if (turn) ring.empty_values(stage).wait(turn - 1);
            request(tiles, step, are_there, at, boxes->values, value, p.v.step[1], ring.values_at(stage), ring.full_values(stage));
            // While copies are under way.
            if (step + at_once < tiles.count && tiles.begins(p, step)) {
                const uint32 x = tiles.token(p, step + at_once);
                next = x == Tiles::NOWHERE ? Place{-1, 0, 0} : place_of(p, item, reach, cta_share.entries, x, listed(p, item, x));
            }
        }
    }
};

template <typename Type, bool IS_BFLOAT16, typename Rows>
struct ShortProducts : VerifyProducts<Type, IS_BFLOAT16, Rows> {
    using Base = VerifyProducts<Type, IS_BFLOAT16, Rows>;
    using Base::acc, Base::arrive, Base::shared;

    const ShortJob &job;

    __device__ void run() {
        const ShortRing ring = job.ring();
        const uint32 count = job.all_stages(), queries_at = shared_address(shared) + QUERIES_OFFSET;
        float c[32], keep[2];
        ring.full_keys(0).wait(0);
        fence_copies();
        this->template begin_keys<IS_BFLOAT16>(c, queries_at, ring.keys_at(0));
        wait_products<0>(c);
        arrive(ring.empty_keys(0));
        this->raise_maxima(c, 0, keep);
        this->weigh_scores(c, keep);
#pragma unroll 1
        for (uint32 step = 1; step < count; step++) {
            const uint32 stage = step % SHORT_STAGES, before = (step - 1) % SHORT_STAGES;
            uint32 weights[STAGE_TOKENS / 16][4];
            this->template pack_weights<Type>(c, weights);
            ring.full_keys(stage).wait(step / SHORT_STAGES);
            ring.full_values(before).wait((step - 1) / SHORT_STAGES);
            fence_copies();
            this->template begin_keys<IS_BFLOAT16>(c, queries_at, ring.keys_at(stage));
            this->template begin_values<IS_BFLOAT16>(weights, ring.values_at(before));
            wait_products<1>(c);
            arrive(ring.empty_keys(stage));
            const bool grew = this->raise_maxima(c, step % SHORT_PLACES, keep);
            wait_products<0>(acc);
            arrive(ring.empty_values(before));
            if (grew) this->scale_sums(keep);
            this->weigh_scores(c, keep);
        }
        const uint32 last = (count - 1) % SHORT_STAGES;
        ring.full_values(last).wait((count - 1) / SHORT_STAGES);
        fence_copies();
        this->template add_values<Type, IS_BFLOAT16>(c, ring.values_at(last));
        this->store_sums();
    }
};

template <typename Type, bool IS_BFLOAT16, typename Rows>
__device__ inline void attention_verify128_short(const AttentionParams &p, const Boxes &boxes) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ VerifyShared of_halves[HALVES];
    __shared__ uint32 words[WARP];
    __shared__ WorkItem item;  // would take registers that the products need
    VerifyShared &s = of_halves[0];  // and what the CTA has once
    request_parameters(p, words);
    of_halves[1].open_ring(STAGE_TILES);
    s.open(p, STAGE_TILES);
    const uint32 number = blockIdx.x / cluster_ctas();
    if (threadIdx.x == 0) item = work_item_of(p, number);
    Reach reach;
    // Found anew where it is needed, and in no registers between.
    const auto job_of_thread = [&] {
        // The shuffle lets the compiler see that lanes of a warp go the same way.
        const uint32 thread = pin_in_register(threadIdx.x), warp = __shfl_sync(FULL_WARP, thread / WARP, 0), half = warp / 4 % HALVES;
        const VerifyJob job{p, s.cta_share, item, reach, of_halves[half], shared, shared + RECEIVED_OFFSET, thread % WARP, warp % 4,
                            cluster_rank() * HALVES + half, cluster_ctas() * HALVES};
        return ShortJob{job, half};
    };
    const auto know_lengths = [&] {
        ShortJob::meet();
        reach = Rows::reach_of(p, item, Reach::of(p, item, s.cta_share.length, s.cta_share.queries));
    };
    allow_next_kernel();
    if (threadIdx.x < WARP && p.ids.data) prefetch_likely_list(p, cluster_ctas());
    __syncthreads();  // the barriers are open, and the work item is known
    if (threadIdx.x >= COMPUTE_THREADS) {
        give_registers<SHORT_COPY_REGISTERS>();
        const ShortJob job = job_of_thread();
        ShortCopies<Rows> copies{{job, &boxes}, job};
        if (threadIdx.x == COMPUTE_THREADS) boxes.prefetch();
        wait_for_previous_kernel();
        if (job.early_stages() > 0) copies.find_early();
#pragma unroll 1
        for (uint32 stage = 0; stage < copies.soonest_stages(); stage++) copies.request_early(stage);
        know_lengths();
        copies.run();
        cluster_started();
    } else {
        take_registers<SHORT_REGISTERS>();
        const ShortJob job = job_of_thread();
        ShortProducts<Type, IS_BFLOAT16, Rows> products{{job, job.half, Rows(job)}, job};
        wait_for_previous_kernel();
        products.request_queries();
        if (threadIdx.x == 0) {
            CtaShare found{};
            const uint32 units = describe_work_item(p, number, found);
            found.chunks = 1;
            found.take(units);
            s.cta_share = found;
        }
        know_lengths();
        products.await_queries();
        products.clear();
        products.run();
        cluster_started();
        const VerifyJob of_cta{p, s.cta_share, item, reach, s, shared, shared + RECEIVED_OFFSET, threadIdx.x % WARP, threadIdx.x / WARP % 4, cluster_rank(), cluster_ctas()};
        VerifyJoin{of_cta, threadIdx.x}.join_chunk();
    }
}
