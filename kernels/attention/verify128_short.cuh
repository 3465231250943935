// Attention for up to 64 rows to few short lists (variant verify128_short): verify128.cuh with CTAs half as large, of which two share a multiprocessor.
//
// So a cluster of up to 16 CTAs takes each list by itself, of which more run at once than if a CTA had a multiprocessor, and a CTA begins while those
// of the kernel before still run. CTA r of a cluster takes stages of 64 tokens r, r + ctas, …:
//
//   copies    a warpgroup ── keys [64 tokens × 128], then values [64 × 128], in rings of two each
//   products  a warpgroup ── queries in registers ── S [64 rows × 64 tokens] = Q · Kᵀ ── running softmax ── O [64 × 128] += P · V
//   join      each CTA sends its sums to the CTAs that join them, a part of the rows each
//
// A list takes a CTA few stages, so that what is done once counts: entries of lists are read beside lengths, the first keys are requested before
// these are known, and S of a stage is computed beside O of the one before.
#pragma once

#include "attention/verify128.cuh"

constexpr uint32 SHORT_THREADS = 2 * GROUP_THREADS, SHORT_STAGES = 2;
// What a thread that computes has, and one that copies; together those of two threads of half a multiprocessor.
constexpr uint32 SHORT_REGISTERS = 192, SHORT_COPY_REGISTERS = 256 - SHORT_REGISTERS;
constexpr uint32 SHORT_RECEIVED_OFFSET = SHORT_STAGES * STAGE_BYTES;
// Keys of a stage are overwritten before its values. So what is said of its tokens stays for a turn longer than they do.
constexpr uint32 SHORT_PLACES = 2 * SHORT_STAGES;
static_assert(SHORT_PLACES <= STAGES, "barriers of keys, then those of values; positions");

// A ring of two stages, whose keys and values arrive and are given up each by themselves.
struct ShortRing {
    const VerifyShared &s;

    __device__ const Barrier &full_keys(uint32 stage) const { return s.full[stage]; }
    __device__ const Barrier &full_values(uint32 stage) const { return s.full[SHORT_STAGES + stage]; }
    __device__ const Barrier &empty_keys(uint32 stage) const { return s.empty[stage]; }
    __device__ const Barrier &empty_values(uint32 stage) const { return s.empty[SHORT_STAGES + stage]; }
};

struct ShortJob : VerifyJob {
    // Stages whose keys the CTA requests before it knows lengths: those of a list as long as lists may be, if the ring has room.
    __device__ uint32 early_stages() const {
        const uint32 all = p.ids.data ? (p.list_capacity * p.block.value + STAGE_TOKENS - 1) / STAGE_TOKENS : 0;
        return all > rank ? min(p.ctas.divide(all - rank - 1) + 1, SHORT_STAGES) : 0;
    }
    // Stages that the CTA computes, at least one, of which some may be without tokens.
    __device__ uint32 all_stages() const { return max(max(stages(), early_stages()), 1u); }
    // A barrier of all threads of the CTA, which do different things before and after it.
    __device__ static void meet() { sync_some(3, SHORT_THREADS); }
    // Sends each CTA of the cluster its part of the rows from where the ring was. Called by all threads once the sums are there. How much is sent
    // does not depend on contents of the call's tensors.
    __device__ void send() const {
        const uint32 rows = VerifyShared::most_rows(p), share = VerifyShared::share_rows(p);
#pragma unroll 1
        for (uint32 cta = pin_in_register(threadIdx.x) / WARP; cta * share < rows; cta += SHORT_THREADS / WARP) {
            const float *const from = reinterpret_cast<const float *>(shared) + cta * share * ROW_PITCH;
            float *const own = received_from(rank, share);
            const uint32 to = address_in(cta, own), arrived = address_in(cta, &s.received);
#pragma unroll 4
            for (uint32 n = 0; n < min(share, rows - cta * share); n++) {
                send_four_to(to + (n * ROW_PITCH + lane * 4) * sizeof(float), *reinterpret_cast<const uint4 *>(from + n * ROW_PITCH + lane * 4), arrived);
                const uint2 sums = *reinterpret_cast<const uint2 *>(from + n * ROW_PITCH + VERIFY_CHANNELS);
                if (lane == 0) send_two<false>(cta, own + n * ROW_PITCH + VERIFY_CHANNELS, sums, s.received);
            }
        }
    }
    // Joins what the cluster sent of this CTA's rows, a row a warp, four channels a lane.
    __device__ void join() const {
        const uint32 share = VerifyShared::share_rows(p), rows = rows_of(p, item), begin = min(rank * share, rows), end = min(begin + share, rows);
        constexpr uint32 MOST_CTAS = 16, AT_ONCE = 4;
        static_assert(VERIFY_CHANNELS / 4 == WARP);
#pragma unroll 1
        for (uint32 row = begin + warp; row < end; row += GROUP_THREADS / WARP) {
            const float *const from = received_from(0, share) + (row - begin) * ROW_PITCH;
            const uint32 pitch = share * ROW_PITCH;
            // A lane for each CTA. acc of a CTA whose tokens the row does not see is not used: it may hold NaN.
            const float2 sums = lane < ctas ? *reinterpret_cast<const float2 *>(from + lane * pitch + VERIFY_CHANNELS) : float2{minus_infinity(), 0.0f};
            float top = sums.x;
#pragma unroll
            for (uint32 step = 1; step < MOST_CTAS; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
            top = __shfl_sync(FULL_WARP, top, 0);
            const float take = weight(sums.x, top);
            float total = take * sums.y;
#pragma unroll
            for (uint32 step = 1; step < MOST_CTAS; step *= 2) total += __shfl_xor_sync(FULL_WARP, total, step);
            const uint32 counts = __ballot_sync(FULL_WARP, take != 0.0f);
            JoinedFour joined;
            joined.m = top, joined.l = __shfl_sync(FULL_WARP, total, 0);
#pragma unroll 1
            for (uint32 first = 0; first < ctas; first += AT_ONCE) {
                float4 x[AT_ONCE];
#pragma unroll
                for (uint32 n = 0; n < AT_ONCE; n++) x[n] = *reinterpret_cast<const float4 *>(from + min(first + n, ctas - 1) * pitch + lane * 4);
#pragma unroll
                for (uint32 n = 0; n < AT_ONCE; n++) {
                    const float by = __shfl_sync(FULL_WARP, take, first + n);
                    if (counts >> (first + n) & 1) joined.add_scaled(x[n], by);
                }
            }
            VerifyJoin{*this, threadIdx.x}.write(row, lane, joined);
        }
    }
};

template <typename Rows>
struct ShortCopies : VerifyCopies<Rows> {
    using Base = VerifyCopies<Rows>;
    using Base::arrive, Base::cta_share, Base::item, Base::key, Base::lane, Base::p, Base::reach, Base::s, Base::shared, Base::value;

    static constexpr uint32 UNROLLED = 1;  // more would take registers that there are not

    const ShortJob &job;
    // Where the listed tokens of the first tiles lie if lists and sequences are as long as they may be.
    uint32 first_x;
    Place first_place;

    __device__ uint32 keys_at(uint32 stage) const { return shared_address(shared) + stage * STAGE_BYTES; }
    __device__ Tiles tiles_of_any_list() const { return {this->first_tile(0), STAGE_TILES * this->ctas, WARP}; }
    // Looks the first tiles up in the list.
    __device__ void find_early() {
        first_x = tiles_of_any_list().token(p, 0);
        first_place = place_of(p, item, Reach{0, 0, 0, int32(p.token_capacity)}, p.list_capacity, first_x, listed(p, item, first_x));
    }
    // Requests keys of one of the first stages. Those of tokens that are not there are masked later.
    __device__ void request_early(uint32 stage) const {
        const Tiles tiles = tiles_of_any_list();
        const uint32 granules = __ballot_sync(FULL_WARP, first_place.position >= 0), granule = tiles.lane_of(p, stage, 0) + (lane % TILE >> p.log_granule);
        const uint32 are_there = __ballot_sync(FULL_WARP, granules >> granule & 1);
        this->template copy_tile<UNROLLED>(tiles, stage, are_there, p.k.at(first_place.page, first_place.row, item.head), p.k.step[1], keys_at(stage));
        arrive_after_copies(shared_address(&ShortRing{s}.full_keys(stage)));
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
        const ShortRing ring{s};
        const Tiles tiles = this->begin();
        const uint32 count = job.all_stages(), early = job.early_stages(), at_once = this->found_at_once();
        Place next = find_first(tiles);
#pragma unroll 1
        for (uint32 step = 0; step < count; step++) {
            const uint32 stage = step % SHORT_STAGES, turn = step / SHORT_STAGES;
            if (step < tiles.count && tiles.begins(p, step)) this->keep_place(next);
            if (turn) ring.empty_keys(stage).wait(turn - 1);
            const uint32 are_there = this->note_tile(tiles, step, step % SHORT_PLACES);
            if (step >= early) {
                this->template copy_tile<UNROLLED>(tiles, step, are_there, key, p.k.step[1], keys_at(stage));
                arrive_after_copies(shared_address(&ring.full_keys(stage)));
            }
            arrive(ring.full_keys(stage));
            if (step == 0 && early > 1) request_early(1);
            // The first to lie where the second stage's values will are the queries.
            if (turn + stage) ring.empty_values(stage).wait(turn + stage - 1);
            this->template copy_tile<UNROLLED>(tiles, step, are_there, value, p.v.step[1], keys_at(stage) + VALUES_OFFSET);
            arrive_after_copies(shared_address(&ring.full_values(stage)));
            arrive(ring.full_values(stage));
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
    using Base::acc, Base::arrive, Base::item, Base::lane, Base::p, Base::rank, Base::s, Base::shared, Base::warp;

    static constexpr uint32 STEPS = VERIFY_CHANNELS / 16;
    const ShortJob &job;
    uint32 queries[STEPS][4];  // of the thread's two rows, four channels of each 16

    // Queries come by way of the place of the second stage's values.
    __device__ uint32 query_at(uint32 row, uint32 chunk) const {
        return shared_address(shared) + STAGE_BYTES + VALUES_OFFSET + chunk / 8 * SLAB_BYTES + place_in_slab(row, chunk % 8);
    }
    // Rows that do not exist stay what they are: nothing follows from their sums.
    __device__ void request_queries() const {
        constexpr uint32 CHUNKS = VERIFY_CHANNELS * 2 / 16;
        const uint32 chunk = threadIdx.x % CHUNKS, rows = rows_of(p, item);
#pragma unroll 1  // instructions come from memory, too
        for (uint32 row = threadIdx.x / CHUNKS; row < rows; row += GROUP_THREADS / CHUNKS) {
            const auto [position, head] = place_of_row(p, item, first_row(p, item) + row);
            request_query<Type>(p, query_at(row, chunk), p.q.at(item.seq, position, head) + query_bytes<Type>(p, chunk * 8));
        }
        end_copies();
    }
    __device__ void receive_queries() {
        wait_copies<0>();
        sync_some(1, GROUP_THREADS);
#pragma unroll
        for (uint32 k = 0; k < STEPS; k++) load_matrices(queries[k], query_at(warp * 16 + lane % 16, 2 * k + lane / 16));
        arrive(ShortRing{s}.empty_values(1));
    }
    // Begins to multiply queries and a stage's keys.
    __device__ void begin_keys(float (&c)[32], uint32 keys_at) const {
        const uint64 keys = operand(keys_at);
#pragma unroll
        for (uint32 n = 0; n < 32; n++) c[n] = 0.0f;
        begin_products(c);
#pragma unroll
        for (uint32 k = 0; k < STEPS; k++) multiply<IS_BFLOAT16>(c, queries[k], keys + k / 4 * (SLAB_BYTES >> 4) + k % 4 * ALONG_SLAB, k > 0);
        end_group();
    }
    __device__ void run() {
        const ShortRing ring{s};
        const uint32 count = job.all_stages(), ring_at = shared_address(shared);
        float c[32], keep[2];
        ring.full_keys(0).wait(0);
        fence_copies();
        begin_keys(c, ring_at);
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
            begin_keys(c, ring_at + stage * STAGE_BYTES);
            this->template begin_values<IS_BFLOAT16>(weights, ring_at + before * STAGE_BYTES + VALUES_OFFSET);
            wait_products<1>(c);
            arrive(ring.empty_keys(stage));
            const bool grew = this->raise_maxima(c, step % SHORT_PLACES, keep);
            wait_products<0>(acc);
            arrive(ring.empty_values(before));
            if (grew) this->scale_sums(keep);
            this->weigh_scores(c, keep);
        }
        ring.full_values((count - 1) % SHORT_STAGES).wait((count - 1) / SHORT_STAGES);
        fence_copies();
        this->template add_values<Type, IS_BFLOAT16>(c, ring_at + (count - 1) % SHORT_STAGES * STAGE_BYTES + VALUES_OFFSET);
    }
};

template <typename Type, bool IS_BFLOAT16, typename Rows>
__device__ inline void attention_verify128_short(const AttentionParams &p) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ VerifyShared s;
    __shared__ uint32 words[WARP];
    __shared__ WorkItem item;  // would take registers that the products need
    request_parameters(p, words);
    s.open(p, GROUP_THREADS + STAGE_TILES);
    const uint32 number = p.ctas.divide(blockIdx.x);
    if (threadIdx.x == 0) item = work_item_of(p, number);
    Reach reach;
    // Found anew where it is needed, and in no registers between.
    const auto job_of_thread = [&] {
        const uint32 thread = pin_in_register(threadIdx.x);
        return ShortJob{{p, s.cta_share, item, reach, s, shared, shared + SHORT_RECEIVED_OFFSET, thread % WARP, thread / WARP % 4, cluster_rank(), cluster_ctas()}};
    };
    const auto know_lengths = [&] {
        ShortJob::meet();
        reach = Rows::reach_of(p, item, Reach::of(p, item, s.cta_share.length, s.cta_share.queries));
    };
    const auto finish = [&] {
        cluster_started();
        ShortJob::meet();
        job_of_thread().send();
    };
    allow_next_kernel();
    if (threadIdx.x < WARP && p.ids.data) prefetch_likely_list(p, cluster_ctas());
    __syncthreads();  // the barriers are open, and the work item is known
    if (threadIdx.x >= GROUP_THREADS) {
        give_registers<SHORT_COPY_REGISTERS>();
        const ShortJob job = job_of_thread();
        ShortCopies<Rows> copies{{job}, job};
        wait_for_previous_kernel();
        if (job.early_stages() > 0) copies.find_early(), copies.request_early(0);
        know_lengths();
        copies.run();
        finish();
    } else {
        take_registers<SHORT_REGISTERS>();
        const ShortJob job = job_of_thread();
        ShortProducts<Type, IS_BFLOAT16, Rows> products{{job, 0, Rows(job)}, job};
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
        products.receive_queries();
        products.clear();
        products.run();
        products.template store_sums<GROUP_THREADS>();
        finish();
        s.received.wait(0);
        job_of_thread().join();
    }
}
