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
    // The last CTA multiplies heads with the centre: what a lane has of a query and of the centre is requested before the CTA's tiles are multiplied.
    struct Common {
        static constexpr uint32 OWN = GROUPS ? GROUPS * GROUP / WARP : 1;
        float of_query[OWN], of_centre[OWN];
    };
    __device__ bool has_common() const { return slice == s.slices - 1 && warp < this->heads(); }
    __device__ Common load_common() const {
        Common x = {};
        if (!has_common() || !mass->centre) return x;
        const char *query = s.q + list.at.seq * s.q_seq + list.at.position * s.q_pos + (list.at.head * this->heads() + warp) * s.q_head + lane * s.q_channel;
        const char *centre = mass->centre + list.at.head * mass->centre_head + lane * mass->centre_channel;
#pragma unroll
        for (uint32 n = 0; n < Common::OWN; n++) {
            x.of_query[n] = load_query(query + n * WARP * s.q_channel, s.q_type);
            x.of_centre[n] = as<float>(centre + n * WARP * mass->centre_channel);
        }
        return x;
    }
    // The products go to the first CTA.
    __device__ void send_common(const Common &x) const {
        if (!has_common()) return;
        float sum = 0.0f;
        if (mass->centre) {
#pragma unroll
            for (uint32 n = 0; n < Common::OWN; n++) sum = fmaf(x.of_query[n] * s.scale, x.of_centre[n], sum);
            sum = Weights::sum_of_lanes(sum, WARP);
        }
        if (lane == 0) send(0, reinterpret_cast<uint32 *>(shared.common + warp), shared.masses, __float_as_uint(sum));
    }
    // Adds up the masses of the CTA's blocks that are whole and not selected, two tiles of a warp at a time: 16 lanes have a tile, four of them a head of each
    // quartet. The partials go to the first CTA. Those of its own tiles are there once its threads have met.
    __device__ void add_masses() const {
        __syncthreads();  // the CTA's keys are there
        if (slice > 0) shared.threshold.wait(0);
        const uint32 own = this->own_tiles(), span = span_of(list.tiles * BLOCKS, WARPS);  // keys of a warp of the first CTA
#pragma unroll 1
        for (uint32 both = warp * 2; both < own; both += WARPS * 2) {
            const uint32 n = both + lane / 16, number = this->tile(n), first = number * BLOCKS;
            const bool exists = n < own;
            const uint2 chosen = this->chosen()[exists ? first / span : 0];
            bool counts[4];
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                const uint32 block = lane / 4 % 4 + i * 4, j = first + block;
                counts[i] = exists && j < list.whole && !list.is_forced(j) && own_keys()[n * BLOCKS + block] <= chosen.x - (j < chosen.y);
            }
#pragma unroll
            for (uint32 m = 0; m < QUARTETS; m++) {
                float product[4], most = minus_infinity(), sum = 0.0f;
#pragma unroll
                for (uint32 i = 0; i < 4; i++) {
                    product[i] = counts[i] ? masses()[(n * BLOCKS + lane / 4 % 4 + i * 4) * PITCH + m * 4 + lane % 4] : minus_infinity();
                    most = fmaxf(most, product[i]);
                }
                most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 4)), most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 8));
                if (most > minus_infinity())
                    sum = (exp2_fast(product[0] - most) + exp2_fast(product[1] - most)) + (exp2_fast(product[2] - most) + exp2_fast(product[3] - most));
                sum += __shfl_xor_sync(FULL_WARP, sum, 4), sum += __shfl_xor_sync(FULL_WARP, sum, 8);
                if (exists && lane % 16 < 4) put_mass_sums(number, m * 4 + lane % 4, most, sum);
            }
        }
    }
    __device__ void put_mass_sums(uint32 number, uint32 h, float most, float sum) const {
        float2 *const to = mass_sums() + h / 2 * p.most_tiles * 2 + number * 2 + h % 2;
        if (slice == 0) *to = make_float2(most, sum);
        else send_two<false>(0, to, make_uint2(__float_as_uint(most), __float_as_uint(sum)), shared.masses);
    }
    // The first CTA joins the partials of masses. Sums of runs take the place of masses.
    __device__ void write_masses() const {
        if (!is_alone()) shared.masses.wait(0);
        __syncthreads();
        const Weights joined(shared.head_weight, reinterpret_cast<float2 *>(masses()), mass_sums(), p.most_tiles, s.group);
        if (list.tiles <= TILES_AT_ONCE) {
            // One run: the warp that joins a head's partials writes its mass.
            if (warp >= this->heads()) return;
            float2 of = make_float2(minus_infinity(), 0.0f);
            if (list.tiles <= Weights::OWN / 2 * WARP) of = joined.template join_run<Weights::OWN / 2>(warp, list.tiles);
            else of = joined.template join_run<Weights::OWN>(warp, list.tiles);
            if (lane == 0) write_mass(warp, of.x, log2_of(of.y), of.y > 0.0f);
            return;
        }
        weigh_all(joined);
        __syncthreads();
        if (thread >= this->heads()) return;
        const float2 of = shared.head_weight[thread];  // the sum's reciprocal
        write_mass(thread, of.x, -log2_of(of.y), of.y > 0.0f);
    }
    __device__ void write_mass(uint32 h, float most, float log_sum, bool exists) const {
        constexpr float LN_2 = 0.693147181f;
        float value = minus_infinity();
        if (exists && !shared.tiles.nan) value = (most + log_sum) * LN_2 + shared.common[h] + logf(0.5f * float(s.block_size));
        char *const to = mass->log_mass + list.at.seq * mass->mass_seq + list.at.position * mass->mass_pos;
        as<float>(to + (list.at.head * this->heads() + h) * mass->mass_head) = value;
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
        if constexpr (MASS) {
            const Common common = load_common();
            multiply();
            send_common(common);
        } else {
            multiply();
        }
        weigh();
        make_room();
        send_keys();  // phase 5
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
        if constexpr (MASS) add_masses();
        report();
        if constexpr (MASS) write_masses();
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
