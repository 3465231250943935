// Selection of blocks by AXIS in INT4 from long lists, in two launches: the exact top k of the scores of axes.cuh.
//
// Clusters of one list each have no place on all multiprocessors, and a list's first CTA would take long to select from its keys. So a list's
// tiles are multiplied by CTAs that know nothing of each other, one on each multiprocessor, which leave products and the sums of tiles in
// memory. Then a cluster for each list joins the sums, each CTA makes keys of its share of the products, and they sieve them. It has its
// place beside the first kernel's CTAs, and waits there.
//
// Bytes: summaries once, 160 a block of D = 128, then a tenth of that twice for products.
//
// targets: compute_90

#include "common/sieve.cuh"
#include "select/axes.cuh"

// Multiplies.
template <uint32 QUARTETS, uint32 GROUPS> struct LongAxes : AxesTiles<QUARTETS, GROUPS> {
    using Tiles = AxesTiles<QUARTETS, GROUPS>;
    using Tiles::lane, Tiles::p, Tiles::PITCH, Tiles::s, Tiles::shared, Tiles::warp;
    const LongAxesParams &of;
    const uint32 row;  // tiles of the lists before this one

    __device__ LongAxes(const LongAxesParams &of, TilesShared &shared)
        : Tiles(of.axes, shared), of(of), row(s.by_slices.divide(blockIdx.x) * of.axes.parts) {}

    __device__ void put(uint32 n, uint32 block, uint32 h, float product) const {
        of.products[(uint64(row + this->tile(n)) * BLOCKS + block) * PITCH + h] = product;
    }
    __device__ void put_sums(uint32 number, uint32 quartet, float most, float sum) const {
        if (lane < 4) of.partials[uint64(row) * PITCH + (quartet * 4 + lane) * p.parts + number] = make_float2(most, sum);
    }

    __device__ void run() const {
        if (threadIdx.x == 0) shared.nan = 0;
        const auto early = this->look_ahead();
        __syncthreads();
        wait_for_previous_kernel();
        this->begin(early, [] {});
        allow_next_kernel();  // not before: it looks for lengths early, and its beginning would be in the way of this one's
        const uint32 saw = this->multiply_all(*this);
        if (lane == 0) of.seen[blockIdx.x * WARPS + warp] = saw;
    }
};

struct LongTopShared {
    SieveShared<THREADS> sieve;
    float2 of_head[MOST_HEADS];
    alignas(16) Selection list;
};

// Selects. In dynamic shared memory: what counts keys, and before that the sums of runs; the CTA's keys; its products, and when all CTAs have
// read theirs what comes to the first.
template <uint32 QUARTETS> struct LongTop : AxesList {
    using Weights = HeadWeights<QUARTETS, 1>;
    const LongAxesParams &p;
    LongTopShared &shared;
    const uint32 number;  // of the list
    const uint32 before;  // blocks that lists before it have room for
    Sieve<THREADS> sieve;
    const Weights weights;

    __device__ LongTop(const LongAxesParams &p, LongTopShared &shared)
        : AxesList(p.axes.select, shared.list), p(p), shared(shared), number(blockIdx.x >> log2_of(cluster_ctas())),
          before(held(number * p.axes.parts * BLOCKS)),
          sieve(shared.sieve, *reinterpret_cast<CtaTopKShared<THREADS> *>(room), reinterpret_cast<uint32 *>(room + p.keys),
                reinterpret_cast<uint32 *>(room + p.room)),
          weights(shared.of_head, reinterpret_cast<float2 *>(room), p.partials + before / BLOCKS * (4 * QUARTETS), p.axes.parts,
                  p.axes.select.group) {}

    __device__ bool is_last() const { return sieve.cta == sieve.ctas - 1; }

    // A thread copies what it reads.
    __device__ void copy_products() const {
        const char *const from = reinterpret_cast<const char *>(p.products);
        const uint32 to = held(shared_address(sieve.room)), first = before + sieve.first;
        sieve.each([&](uint32 i) {
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
        sieve.open();
        const ListNumber at = list_number(number);
        const uint32 expected = (expected_blocks(at) + BLOCKS - 1) / BLOCKS;
        // What is asked for after the wait has its address by then.
        typename Weights::Task task = weights.task(warp, expected);
        task = {held(task.first), held(task.left)};
        sieve.divide(expected * BLOCKS);
        // The list is cut early, too, and again where what is given has changed.
        const bool cuts = thread == THREADS - 1;
        Given early, given;
        if (cuts) early = Given::hint(s, at.seq), shared.list.cut(s, at, early.lengths(), early.budget);
        __syncwarp();
        cluster_started();
        wait_for_previous_kernel();
        if (cuts) given = Given::of(s, at.seq);
        // Sums are joined as if the length were known, once more if it was another: the barrier between tiles and runs tells.
        uint32 tiles = expected, seen = 0;
#pragma unroll 1
        for (bool is_first = true;; is_first = false) {
            float2 x[Weights::OWN];
            weights.load(task, x);
            __syncwarp();  // or they would be asked for after the products
            copy_products();
            if (is_first) seen = seen_by_this();
            if (is_first && cuts) {
                // Not before the loop: loads that follow would wait for what is given.
                const Given now = given.known();
                if (now != early) shared.list.cut(s, at, now.lengths(), now.budget);
            }
            weights.join_tiles(tiles, x);
            __syncthreads();
            if (list.tiles == tiles) break;
            tiles = list.tiles;
            task = weights.task(warp, tiles), sieve.divide(tiles * BLOCKS);
            wait_copies<0>();
            __syncthreads();  // what is copied now takes the place of what was copied
        }
        weights.join_runs(tiles);
        wait_copies<0>();
        const float4 *const products = reinterpret_cast<const float4 *>(sieve.room);
        const uint32 init = held(list.init), end = held(list.end), wanted = held(list.of_stored);
        sieve.each([&](uint32 i) {
            const uint32 j = sieve.first + i;
            const float score = weights.score(products + i * QUARTETS);
            write_score(j, score), sieve.put(i, Selection::key(j, score, init, end));
        });
        char *to;
        // While keys are on their way; the others by the last CTA, which has the time.
        const auto write_others = [&] {
            to = ids() + list.init * s.selected.ids_entry;
            if (!is_last()) return;
            write_forced();
            const uint32 saw = (__syncthreads_or(seen & SAW_NAN) ? SAW_NAN : 0) | (__syncthreads_or(seen & NO_SUMMARY) ? NO_SUMMARY : 0);
            if (thread == 0 && s.status) write_status(saw);
        };
        if (wanted == 0 || wanted == end - init) return write_others();
        sieve.take(wanted, end - init, [&](uint32 place, uint32 j) { emit(to, place, j); }, write_others);
    }
};

template <uint32 QUARTETS, uint32 GROUPS> __device__ inline void multiply_axes(const LongAxesParams &p) {
    __shared__ TilesShared shared;
    LongAxes<QUARTETS, GROUPS>(p, shared).run();
}
template <uint32 QUARTETS> __device__ inline void select_products(const LongAxesParams &p) {
    __shared__ LongTopShared shared;
    allow_next_kernel();
    LongTop<QUARTETS>(p, shared).run();
}

// Half of the registers, so that there is a place for both kernels; of 16 heads, which take more of them, the second waits.
extern "C" __global__ void __launch_bounds__(THREADS, 2) multiply_axes_4_128(const __grid_constant__ LongAxesParams p) { multiply_axes<1, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) multiply_axes_8_128(const __grid_constant__ LongAxesParams p) { multiply_axes<2, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_axes_16_128(const __grid_constant__ LongAxesParams p) { multiply_axes<4, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) multiply_axes_4(const __grid_constant__ LongAxesParams p) { multiply_axes<1, 0>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_axes_16(const __grid_constant__ LongAxesParams p) { multiply_axes<4, 0>(p); }

extern "C" __global__ void __launch_bounds__(THREADS, 2) select_products_4(const __grid_constant__ LongAxesParams p) { select_products<1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_products_8(const __grid_constant__ LongAxesParams p) { select_products<2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_products_16(const __grid_constant__ LongAxesParams p) { select_products<4>(p); }
