// Selection of blocks by AXIS in INT4, in one launch: the exact top k of the scores of axis_tiles.cuh.
//
// Runs where the index is INT4 in rows of 16-byte units, D is 64, 128, 192 or 256, a list has one query position and up to 16 heads, the
// device has clusters, and axis_two_launches is not chosen. Kernel _alone: D = 128, up to 4 heads, one CTA a multiprocessor.
//
// Split: a cluster of CTAs for each list. Products stay in shared memory. The partials of tiles go to all CTAs of the cluster. Scores go to the
// first CTA as keys. Whatever one CTA sends another tells a barrier there of its bytes, so nothing is fenced. The first CTA selects.
//
//   look ahead ─ load inputs, first tiles ─ multiply tiles ─ partials to all CTAs ─ weigh heads ─ keys to the first CTA ─ select ─ status
//
// Kernels _mass also write log_mass (mass.cuh), for D = 128: a tile's products with shorter axes stay in shared memory, too. As soon as the first CTA
// knows the threshold of its top k, it tells it to the others, which know by it which of their blocks are selected, and get from each the partials of
// tiles over all other blocks while it writes the list. These travel as all else does, and no barrier of the cluster is waited for.
//
//   threshold to all CTAs ─ take ┄ partials of tiles to the first CTA ─ join, log_mass
#pragma once

#include "common/cta_topk.cuh"
#include "select/axis_tiles.cuh"

constexpr uint32 MOST_CTAS = 16;

// Dynamic shared memory holds, in this order: the ring of tiles; the partials of the whole list; queries, whose place run_sums takes; products,
// whose place the top k takes; and in the first CTA the list's keys. Where there is no room for keys, they take the place of what lies before
// products, and are sent once the first CTA has joined the partials.
struct AxisClusterShared {
    TilesShared tiles;
    float2 head_weight[MOST_HEADS];
    uint32 saw[MOST_CTAS * WARPS];  // in the first CTA: status bits of each warp of the cluster
    Barrier sums, keys, room;       // bytes still to arrive
    uint32 has_room;                // the first CTA has room for keys
    // Where masses are added up: products of heads with the centre, in the first CTA; bytes still to arrive.
    float common[MOST_HEADS];
    Barrier threshold, masses;
};

template <uint32 QUARTETS, uint32 GROUPS, bool OWNS_MULTIPROCESSOR, bool MASS = false>
struct AxisCluster : AxisTiles<QUARTETS, GROUPS, OWNS_MULTIPROCESSOR> {
    static constexpr bool HAS_MASS = MASS;
    static_assert(WARPS * sizeof(uint2) <= sizeof(TilesShared::sum));
    using Tiles = AxisTiles<QUARTETS, GROUPS, OWNS_MULTIPROCESSOR>;
    using Tiles::lane, Tiles::list, Tiles::p, Tiles::PITCH, Tiles::room, Tiles::s, Tiles::slice, Tiles::thread, Tiles::warp;
    using Weights = HeadWeights<QUARTETS, 2>;
    AxisClusterShared &shared;
    const Weights weights;
    const AxisMassParams *const mass;  // where masses are added up

    __device__ AxisCluster(const AxisTileParams &p, AxisClusterShared &shared, const AxisMassParams *mass = nullptr)
        : Tiles(p, shared.tiles), shared(shared),
          weights(shared.head_weight, reinterpret_cast<float2 *>(room + p.queries), reinterpret_cast<float2 *>(partials()), p.most_tiles, p.select.group),
          mass(mass) {}

    // [pairs of heads, tiles]
    __device__ uint4 *partials() const { return reinterpret_cast<uint4 *>(room + p.partials); }
    __device__ float *products() const { return reinterpret_cast<float *>(room + p.products); }

    __device__ bool is_alone() const { return s.slices == 1; }
    __device__ void send(uint32 cta, uint4 *to, const Barrier &barrier, const uint4 &x) const {
        if (is_alone())
            *to = x;
        else
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                             address_in(cta, to)),
                         "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(address_in(cta, &barrier)) : "memory");
    }
    __device__ void send(uint32 cta, uint32 *to, const Barrier &barrier, uint32 x) const {
        if (is_alone())
            *to = x;
        else
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in(cta, to)),
                         "r"(x), "r"(address_in(cta, &barrier)) : "memory");
    }
    __device__ void receive(const Barrier &barrier) const {
        if (is_alone())
            __syncthreads();
        else
            barrier.wait(0);
    }

    // Products stay in this CTA. Partials go to all CTAs, those of two heads together: two lanes have the same pair, and the even lane sends to
    // even CTAs.
    __device__ void put(uint32 n, uint32 block, uint32 h, float product) const { products()[(n * BLOCKS + block) * PITCH + h] = product; }
    __device__ void put_sums(uint32 number, uint32 quartet, float most, float sum) const {
        const float other_most = __shfl_xor_sync(FULL_WARP, most, 1), other_sum = __shfl_xor_sync(FULL_WARP, sum, 1);
        const bool is_odd = lane & 1;
        const uint4 both = make_uint4(__float_as_uint(is_odd ? other_most : most), __float_as_uint(is_odd ? other_sum : sum),
                                      __float_as_uint(is_odd ? most : other_most), __float_as_uint(is_odd ? sum : other_sum));
        const uint32 cta = lane / 4 * 2 + lane % 2, pair = quartet * 2 + lane % 4 / 2;
        if (cta < s.slices) send(cta, partials() + pair * p.most_tiles + number, shared.sums, both);
    }
    // COUNT: the most tiles that a lane has.
    template <uint32 COUNT> __device__ void weigh_heads(const Weights &weights) const {
        float2 x[COUNT];
        weights.load(weights.task(warp, list.tiles), x);
        weights.join(list.tiles, x);
    }

    __device__ uint32 *keys() const { return reinterpret_cast<uint32 *>(room + p.keys); }
    __device__ bool shares_room() const { return !is_alone() && p.keys == 0; }
    // Sends the CTA's keys to the first CTA, those of four lanes together. Where masses are added up, it keeps them, too.
    __device__ void send_keys() const {
        const uint32 own = this->own_tiles() * BLOCKS;
#pragma unroll 1
        for (uint32 begin = warp * WARP; begin < own; begin += THREADS) {
            const uint32 n = begin + lane, j = this->tile(n / BLOCKS) * BLOCKS + n % BLOCKS;
            uint32 key = 0;
            if (n < own) {
                const float score = weights.score(reinterpret_cast<const float4 *>(products()) + n * QUARTETS);
                this->write_score(j, score), key = list.key(j, score);
                if constexpr (MASS) own_keys()[n] = key;
            }
            const uint4 four = make_uint4(key, __shfl_down_sync(FULL_WARP, key, 1), __shfl_down_sync(FULL_WARP, key, 2),
                                          __shfl_down_sync(FULL_WARP, key, 3));
            if (n >= own || lane % 4 != 0) continue;
            wait_for_room();
            send(0, reinterpret_cast<uint4 *>(keys() + j), shared.keys, four);
        }
        wait_for_room();  // no CTA may end before what is sent to it has arrived
    }
    // The first CTA has room for keys once it has joined all partials.
    __device__ void make_room() const {
        if (shares_room() && slice == 0 && thread < s.slices) send(thread, &shared.has_room, shared.room, 1u);
    }
    __device__ void wait_for_room() const {
        if (shares_room()) shared.room.wait(0);
    }

    template <uint32 COUNT> __device__ void select(CtaTopKShared<THREADS> &top_shared) const {
        CtaTopK<THREADS, COUNT> top(top_shared, list.tiles * BLOCKS, keys());
        top.load();
        top.find_threshold(list.of_stored, list.end - list.init);
        if constexpr (MASS) send_chosen(make_uint2(top.key, top.last));
        char *const to = this->ids() + list.init * s.selected.ids_entry;
        top.take([&](uint32 place, uint32 j, uint32) { this->emit(to, place, j); });
    }

    // [own tiles, blocks, PITCH]: products with shorter axes.
    __device__ float *masses() const { return reinterpret_cast<float *>(room + mass->masses); }
    // [own tiles, blocks]
    __device__ uint32 *own_keys() const { return reinterpret_cast<uint32 *>(room + mass->own_keys); }
    // [pairs of heads, tiles]: partials of masses, in the first CTA.
    __device__ float2 *mass_sums() const { return reinterpret_cast<float2 *>(room + mass->sums); }
    // What each warp of the first CTA selects of its keys: those above x, and those that equal it before index y. In the place of sums of queries, which
    // no CTA needs once it has sent its keys.
    __device__ uint2 *chosen() const { return reinterpret_cast<uint2 *>(shared.tiles.sum); }
    __device__ void put_mass(uint32 n, uint32 block, uint32 h, float product) const { masses()[(n * BLOCKS + block) * PITCH + h] = product; }
    // A warp of the first CTA tells all CTAs what it selects, which also says that the CTA has joined the partials of products.
    __device__ void send_chosen(const uint2 &of_warp) const {
        uint2 *const to = chosen() + warp;
        if (lane == 0) *to = of_warp;
        else if (lane < s.slices) send_two<false>(lane, to, of_warp, shared.threshold);
    }
    // Asks the L2 cache for the centre of a KV head, for send_common.
    __device__ void prefetch_centre(uint32 head) const {
        if (slice == s.slices - 1 && warp == 0 && lane % 8 == 0 && mass->centre) prefetch(mass->centre + head * mass->centre_head + lane * 4 * mass->centre_channel);
    }
    // Products of heads with the centre go to the first CTA.
    __device__ void send_common() const {
        if (warp >= this->heads()) return;
        const char *query = s.q + list.at.seq * s.q_seq + list.at.position * s.q_pos + (list.at.head * this->heads() + warp) * s.q_head + lane * s.q_channel;
        const char *centre = mass->centre + list.at.head * mass->centre_head + lane * mass->centre_channel;
        constexpr uint32 OWN = GROUPS * GROUP / WARP;
        float of_query[OWN], of_centre[OWN], sum = 0.0f;
#pragma unroll
        for (uint32 n = 0; n < OWN; n++) {
            of_query[n] = load_query(query + n * WARP * s.q_channel, s.q_type);
            of_centre[n] = mass->centre ? as<float>(centre + n * WARP * mass->centre_channel) : 0.0f;
        }
#pragma unroll
        for (uint32 n = 0; n < OWN; n++)
            if (mass->centre) sum = fmaf(of_query[n] * s.scale, of_centre[n], sum);
        sum = Weights::sum_of_lanes(sum, WARP);
        if (lane == 0) send(0, reinterpret_cast<uint32 *>(shared.common + warp), shared.masses, __float_as_uint(sum));
    }
    // Takes the partials of masses. Those of the first CTA's tiles are there once its threads have met.
    struct MassSink {
        const AxisCluster &of;
        __device__ void put_sums(uint32 number, uint32 quartet, float most, float sum) const {
            if (of.lane >= 4) return;
            const uint32 h = quartet * 4 + of.lane;
            float2 *const to = of.mass_sums() + h / 2 * of.p.most_tiles * 2 + number * 2 + h % 2;
            if (of.slice == 0) *to = make_float2(most, sum);
            else send_two<false>(0, to, make_uint2(__float_as_uint(most), __float_as_uint(sum)), of.shared.masses);
        }
    };
    // Adds up the masses of the CTA's blocks that are whole and not selected, a tile at a time.
    __device__ void add_masses() const {
        __syncthreads();  // the CTA's keys are there
        if (slice > 0) shared.threshold.wait(0);
        const uint32 own = this->own_tiles(), span = span_of(list.tiles * BLOCKS, WARPS);  // keys of a warp of the first CTA
#pragma unroll 1
        for (uint32 n = warp; n < own; n += WARPS) {
            const uint32 first = this->tile(n) * BLOCKS;
            const uint2 chosen = this->chosen()[first / span];
            bool counts[2];
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const uint32 block = lane / 4 + i * 8, j = first + block;
                counts[i] = j < list.whole && !list.is_forced(j) && own_keys()[n * BLOCKS + block] <= chosen.x - (j < chosen.y);
            }
#pragma unroll
            for (uint32 m = 0; m < QUARTETS; m++) {
                float product[2];
#pragma unroll
                for (uint32 i = 0; i < 2; i++)
                    product[i] = counts[i] ? masses()[(n * BLOCKS + lane / 4 + i * 8) * PITCH + m * 4 + lane % 4] : minus_infinity();
                this->reduce_tile(m, this->tile(n), product, MassSink{*this});
            }
        }
    }
    // The first CTA joins the partials of masses.
    __device__ void write_masses() const {
        constexpr float LN_2 = 0.693147181f;
        if (!is_alone()) shared.masses.wait(0);
        __syncthreads();
        if (list.tiles > 0) weigh_all({shared.head_weight, reinterpret_cast<float2 *>(room + p.queries), mass_sums(), p.most_tiles, s.group});
        __syncthreads();
        if (thread >= this->heads()) return;
        const float2 of = list.tiles > 0 ? shared.head_weight[thread] : make_float2(0.0f, 0.0f);
        float value = minus_infinity();
        if (of.y > 0.0f && !shared.tiles.nan) value = (of.x - log2_of(of.y)) * LN_2 + shared.common[thread] + logf(0.5f * float(s.block_size));
        char *const to = mass->log_mass + list.at.seq * mass->mass_seq + list.at.position * mass->mass_pos;
        as<float>(to + (list.at.head * this->heads() + thread) * mass->mass_head) = value;
    }

    // Phase 1: opens the barriers. The CTAs of the cluster start while addresses are computed and the kernel before still runs.
    __device__ void open_barriers() {
        if (thread == 0) {
            shared.tiles.nan = 0;
            shared.sums.open(1), shared.keys.open(1), shared.room.open(1);
            if constexpr (MASS) shared.threshold.open(1), shared.masses.open(1);
        }
        weights.open();
        __syncwarp();
        cluster_start();
    }
    // Phase 2: says how many bytes each barrier awaits, once the list is known.
    __device__ void expect() const {
        if (!is_alone()) shared.sums.expect(list.tiles * 2 * QUARTETS * sizeof(uint4));
        if (shares_room()) shared.room.expect(sizeof(uint32));
        if (!is_alone() && slice == 0) shared.keys.expect((list.tiles * BLOCKS + s.slices * WARPS) * sizeof(uint32));
        if constexpr (MASS) {
            if (slice > 0) shared.threshold.expect(WARPS * sizeof(uint2));
            if (!is_alone() && slice == 0) shared.masses.expect((list.tiles - this->own_tiles()) * PITCH * sizeof(float2) + this->heads() * sizeof(float));
        }
    }
    // Phase 3: multiplies the CTA's tiles. Products stay here, partials go to all CTAs, status bits to the first.
    __device__ void multiply() const {
        const uint32 saw = this->multiply_tiles(*this);
        if (lane == 0) send(0, &shared.saw[slice * WARPS + warp], shared.keys, saw);
    }
    // Phase 4: joins the partials of the whole list.
    __device__ void weigh() const {
        receive(shared.sums);
        weigh_all(weights);
    }
    __device__ void weigh_all(const Weights &weights) const {
        if (list.tiles <= Weights::OWN / 2 * WARP)
            weigh_heads<Weights::OWN / 2>(weights);
        else
            weigh_heads<Weights::OWN>(weights);
    }
    // Phase 6: the first CTA selects from the keys of all CTAs.
    __device__ void select_best(CtaTopKShared<THREADS> &top) const {
        const uint32 count = list.tiles * BLOCKS;
        if (count <= CtaTopK<THREADS, 1>::MOST)
            select<1>(top);
        else if (count <= CtaTopK<THREADS, 4>::MOST)
            select<4>(top);
        else
            select<0>(top);
    }
    // Phase 7: the first CTA reports what all warps of the cluster saw.
    __device__ void report() const {
        if (warp > 0 || !s.status) return;
        uint32 seen = 0;
#pragma unroll 1
        for (uint32 i = lane; i < s.slices * WARPS; i += WARP) seen |= shared.saw[i];
        seen = __reduce_or_sync(FULL_WARP, seen);
        if (lane == 0) this->write_status(seen);
    }

    __device__ void run() {
        open_barriers();
        const auto early = this->look_ahead();
        if constexpr (MASS) prefetch_centre(early.at.head);
        __syncwarp();
        cluster_started();
        wait_for_previous_kernel();
        this->load_inputs(early, [&] { expect(); });
        multiply();
        weigh();
        make_room();
        send_keys();  // phase 5
        if constexpr (MASS) {
            if (slice == s.slices - 1) send_common();
        }
        if (slice == s.slices - 1) this->write_forced();  // by the CTA that has the time
        if constexpr (MASS) {
            if (slice > 0) return add_masses();
        }
        if (slice > 0) return;
        __syncthreads();  // all products are read
        CtaTopKShared<THREADS> &top = *reinterpret_cast<CtaTopKShared<THREADS> *>(products());
        open(top);
        receive(shared.keys);
        if (list.of_stored > 0 && !list.takes_all()) select_best(top);
        else if constexpr (MASS) send_chosen(make_uint2(~0u, 0));  // no key decides
        report();
        if constexpr (MASS) {
            add_masses();
            write_masses();
        }
    }
};

template <uint32 QUARTETS, uint32 GROUPS, bool OWNS_MULTIPROCESSOR = false> __device__ inline void select_lists(const AxisTileParams &p) {
    __shared__ AxisClusterShared shared;
    allow_next_kernel();
    AxisCluster<QUARTETS, GROUPS, OWNS_MULTIPROCESSOR>(p, shared).run();
}

// The kernels that write log_mass, too.
template <uint32 QUARTETS, bool OWNS_MULTIPROCESSOR = false> __device__ inline void select_lists_and_masses(const AxisMassParams &p) {
    __shared__ AxisClusterShared shared;
    allow_next_kernel();
    AxisCluster<QUARTETS, 4, OWNS_MULTIPROCESSOR, true>(p.axes, shared, &p).run();
}
