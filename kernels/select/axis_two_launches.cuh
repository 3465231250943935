// Selection of blocks by AXIS in INT4 from few long lists, in two launches: the exact top k of the scores of axis_tiles.cuh.
//
// Runs where axis_cluster could, the index has room for 8192 blocks or more, and each list has four multiprocessors or more. Clusters of one
// list each would leave multiprocessors idle, and a list's first CTA would take long to select from so many keys.
//
// Split: the first kernel has one independent CTA on each multiprocessor, which multiplies tiles and writes products and partials to memory.
// The second kernel has a cluster for each list: it joins the partials, each CTA makes keys of its share of the products, and the cluster
// selects (cluster_prefilter.cuh). It starts next to the first kernel's CTAs, and waits there.
//
// Bytes: summaries once, 160 a block for D = 128, then a tenth of that twice for products.
#pragma once

#include "common/cluster_prefilter.cuh"
#include "select/axis_tiles.cuh"

// The first kernel: multiplies tiles.
template <uint32 QUARTETS, uint32 GROUPS> struct AxisMultiply : AxisTiles<QUARTETS, GROUPS> {
    using Tiles = AxisTiles<QUARTETS, GROUPS>;
    using Tiles::lane, Tiles::p, Tiles::PITCH, Tiles::s, Tiles::shared, Tiles::warp;
    const AxisTwoLaunchesParams &params;
    const uint32 row;  // tiles of the lists before this one

    __device__ AxisMultiply(const AxisTwoLaunchesParams &params, TilesShared &shared)
        : Tiles(params.axes, shared), params(params), row(s.by_slices.divide(blockIdx.x) * params.axes.most_tiles) {}

    __device__ void put(uint32 n, uint32 block, uint32 h, float product) const {
        params.products[(uint64(row + this->tile(n)) * BLOCKS + block) * PITCH + h] = product;
    }
    __device__ void put_sums(uint32 number, uint32 quartet, float most, float sum) const {
        if (lane < 4) params.partials[uint64(row) * PITCH + (quartet * 4 + lane) * p.most_tiles + number] = make_float2(most, sum);
    }

    __device__ void run() const {
        if (threadIdx.x == 0) shared.nan = 0;
        const auto early = this->look_ahead();
        __syncthreads();
        wait_for_previous_kernel();
        this->load_inputs(early, [] {});
        allow_next_kernel();  // not before: the next kernel reads lengths early, and its start would delay this kernel's
        const uint32 saw = this->multiply_tiles(*this);
        if (lane == 0) params.seen[blockIdx.x * WARPS + warp] = saw;
    }
};

struct AxisSelectShared {
    ClusterPrefilterShared<THREADS> prefilter;
    float2 head_weight[MOST_HEADS];
    alignas(16) Selection list;
};

// The second kernel: selects. Dynamic shared memory holds, in this order: run_sums, whose place CtaTopK takes; the CTA's keys; its products, and
// once all CTAs have read their products, what the first CTA receives.
template <uint32 QUARTETS> struct AxisSelect : AxisList {
    using Weights = HeadWeights<QUARTETS, 1>;
    const AxisTwoLaunchesParams &p;
    AxisSelectShared &shared;
    const uint32 number;  // the list
    const uint32 before;  // blocks of earlier lists for which there is room
    ClusterPrefilter<THREADS> prefilter;
    const Weights weights;

    __device__ AxisSelect(const AxisTwoLaunchesParams &p, AxisSelectShared &shared)
        : AxisList(p.axes.select, shared.list), p(p), shared(shared), number(blockIdx.x >> log2_of(cluster_ctas())),
          before(pin_in_register(number * p.axes.most_tiles * BLOCKS)),
          prefilter(shared.prefilter, *reinterpret_cast<CtaTopKShared<THREADS> *>(room), reinterpret_cast<uint32 *>(room + p.keys),
                reinterpret_cast<uint32 *>(room + p.room)),
          weights(shared.head_weight, reinterpret_cast<float2 *>(room), p.partials + before / BLOCKS * (4 * QUARTETS), p.axes.most_tiles,
                  p.axes.select.group) {}

    __device__ bool is_last() const { return prefilter.cta == prefilter.ctas - 1; }

    // Each thread copies the products that it reads itself.
    __device__ void copy_products() const {
        const char *const from = reinterpret_cast<const char *>(p.products);
        const uint32 to = pin_in_register(shared_address(prefilter.inbox)), first = before + prefilter.first;
        prefilter.each([&](uint32 i) {
#pragma unroll
            for (uint32 m = 0; m < QUARTETS; m++)
                copy_16(to + (i * QUARTETS + m) * 16, from + uint64((first + i) * QUARTETS + m) * 16);
        });
        end_copies();
    }
    __device__ uint32 seen_by_this() const {
        uint32 seen = 0;
#pragma unroll 1
        for (uint32 i = thread; i < s.slices * WARPS && is_last() && s.status; i += THREADS) seen |= p.seen[number * s.slices * WARPS + i];
        return seen;
    }

    __device__ void run() {
        weights.open();
        prefilter.open();
        const ListNumber at = list_number(number);
        const uint32 expected = (expected_blocks(at) + BLOCKS - 1) / BLOCKS;
        // The address of the first load after the wait is computed before it.
        typename Weights::Task task = weights.task(warp, expected);
        task = {pin_in_register(task.first), pin_in_register(task.left)};
        prefilter.divide(expected * BLOCKS);
        // One thread computes the list early, and again if its inputs have changed.
        const bool computes = thread == THREADS - 1;
        ListInputs early, given;
        if (computes) early = ListInputs::hint(s, at.seq), shared.list.compute(s, at, early.lengths(), early.budget);
        __syncwarp();
        cluster_started();
        wait_for_previous_kernel();
        if (computes) given = ListInputs::of(s, at.seq);
        // Partials are joined as if the expected length were right, and once more if it was not; the barrier between tiles and runs tells.
        uint32 tiles = expected, seen = 0;
#pragma unroll 1
        for (bool is_first = true;; is_first = false) {
            float2 x[Weights::OWN];
            weights.load(task, x);
            __syncwarp();  // otherwise partials would be loaded after the products
            copy_products();
            if (is_first) seen = seen_by_this();
            if (is_first && computes) {
                // Not before the loop: later loads would wait for the inputs.
                const ListInputs now = given.known();
                if (now != early) shared.list.compute(s, at, now.lengths(), now.budget);
            }
            weights.join_tiles(tiles, x);
            __syncthreads();
            if (list.tiles == tiles) break;
            tiles = list.tiles;
            task = weights.task(warp, tiles), prefilter.divide(tiles * BLOCKS);
            wait_copies<0>();
            __syncthreads();  // the next copies overwrite what these brought
        }
        weights.join_runs(tiles);
        wait_copies<0>();
        const float4 *const products = reinterpret_cast<const float4 *>(prefilter.inbox);
        const uint32 init = pin_in_register(list.init), end = pin_in_register(list.end), wanted = pin_in_register(list.of_stored);
        prefilter.each([&](uint32 i) {
            const uint32 j = prefilter.first + i;
            const float score = weights.score(products + i * QUARTETS);
            write_score(j, score), prefilter.put(i, Selection::key(j, score, init, end));
        });
        char *to;
        // What does not depend on keys is written while these are in flight, mostly by the last CTA, which has the time.
        const auto write_others = [&] {
            to = ids() + list.init * s.selected.ids_entry;
            if (!is_last()) return;
            write_forced();
            const uint32 saw = (__syncthreads_or(seen & SAW_NAN) ? SAW_NAN : 0) | (__syncthreads_or(seen & NO_SUMMARY) ? NO_SUMMARY : 0);
            if (thread == 0 && s.status) write_status(saw);
        };
        if (wanted == 0 || wanted == end - init) return write_others();
        prefilter.take(wanted, end - init, [&](uint32 place, uint32 j) { emit(to, place, j); }, write_others);
    }
};

template <uint32 QUARTETS, uint32 GROUPS> __device__ inline void multiply_lists(const AxisTwoLaunchesParams &p) {
    __shared__ TilesShared shared;
    AxisMultiply<QUARTETS, GROUPS>(p, shared).run();
}
template <uint32 QUARTETS> __device__ inline void select_lists(const AxisTwoLaunchesParams &p) {
    __shared__ AxisSelectShared shared;
    allow_next_kernel();
    AxisSelect<QUARTETS>(p, shared).run();
}

