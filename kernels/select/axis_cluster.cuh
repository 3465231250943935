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
// Kernels _mass also write log_mass (mass.cuh), for D = 128: a tile's products with shorter axes stay in shared memory, too. The first CTA tells the
// others which of their blocks it has selected, and gets from them the partials of tiles over all other blocks.
//
//   select ─ bits to the blocks' CTAs ─ barrier of the cluster ─ partials of tiles to the first CTA ─ barrier ─ join, log_mass
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
    float common[MOST_HEADS];       // in the first CTA: products of heads with the centre, where masses are added up
};

template <uint32 QUARTETS, uint32 GROUPS, bool OWNS_MULTIPROCESSOR, bool MASS = false>
struct AxisCluster : AxisTiles<QUARTETS, GROUPS, OWNS_MULTIPROCESSOR> {
    static constexpr bool HAS_MASS = MASS;
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
    template <uint32 COUNT> __device__ void weigh_heads() const {
        float2 x[COUNT];
        weights.load(weights.task(warp, list.tiles), x);
        weights.join(list.tiles, x);
    }

    __device__ uint32 *keys() const { return reinterpret_cast<uint32 *>(room + p.keys); }
    __device__ bool shares_room() const { return !is_alone() && p.keys == 0; }
    // Sends the CTA's keys to the first CTA, those of four lanes together.
    __device__ void send_keys() const {
        const uint32 own = this->own_tiles() * BLOCKS;
#pragma unroll 1
        for (uint32 begin = warp * WARP; begin < own; begin += THREADS) {
            const uint32 n = begin + lane, j = this->tile(n / BLOCKS) * BLOCKS + n % BLOCKS;
            uint32 key = 0;
            if (n < own) {
                const float score = weights.score(reinterpret_cast<const float4 *>(products()) + n * QUARTETS);
                this->write_score(j, score), key = list.key(j, score);
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
        char *const to = this->ids() + list.init * s.selected.ids_entry;
        top.take([&](uint32 place, uint32 j, uint32) {
            this->emit(to, place, j);
            if constexpr (MASS) mark(j);
        });
    }

    // [own tiles, blocks, PITCH]: products with shorter axes.
    __device__ float *masses() const { return reinterpret_cast<float *>(room + mass->masses); }
    // [own tiles]: bit b says that block b of the tile was selected for its score.
    __device__ uint32 *listed() const { return reinterpret_cast<uint32 *>(room + mass->listed); }
    __device__ void put_mass(uint32 n, uint32 block, uint32 h, float product) const { masses()[(n * BLOCKS + block) * PITCH + h] = product; }
    // Tells the CTA of a block that the block is selected. Each is once.
    __device__ void mark(uint32 j) const {
        const uint32 tile = j / BLOCKS, n = s.by_slices.divide(tile);
        add_word_in(tile - n * s.slices, listed() + n, 1u << j % BLOCKS);
    }
    __device__ void clear_listed() const {
        const uint32 most = s.by_slices.divide(p.most_tiles + s.slices - 1);
        for (uint32 n = thread; n < most; n += THREADS) listed()[n] = 0;
    }
    // Products of heads with the centre go to the first CTA.
    __device__ void send_common() const {
        if (warp >= this->heads()) return;
        const char *const query = s.q + list.at.seq * s.q_seq + list.at.position * s.q_pos + (list.at.head * this->heads() + warp) * s.q_head;
        const char *const centre = mass->centre + list.at.head * mass->centre_head;
        float sum = 0.0f;
        for (uint32 c = lane; c < this->dim() && mass->centre; c += WARP)
            sum = fmaf(load_query(query + c * s.q_channel, s.q_type) * s.scale, as<float>(centre + c * mass->centre_channel), sum);
        sum = Weights::sum_of_lanes(sum, WARP);
        if (lane == 0) store_word_to(0, reinterpret_cast<uint32 *>(shared.common + warp), __float_as_uint(sum));
    }
    // Takes the partials of masses.
    struct MassSink {
        const AxisCluster &of;
        __device__ void put_sums(uint32 number, uint32 quartet, float most, float sum) const {
            const uint32 h = quartet * 4 + of.lane % 4;
            uint32 *const to = reinterpret_cast<uint32 *>(of.partials() + h / 2 * of.p.most_tiles + number) + h % 2 * 2;
            if (of.lane < 4) store_two_to(0, to, make_uint2(__float_as_uint(most), __float_as_uint(sum)));
        }
    };
    // Adds up the masses of the CTA's blocks that are whole and not selected, a tile at a time.
    __device__ void add_masses() const {
        const uint32 own = this->own_tiles();
#pragma unroll 1
        for (uint32 n = warp; n < own; n += WARPS) {
            const uint32 bits = listed()[n], first = this->tile(n) * BLOCKS;
            bool counts[2];
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const uint32 block = lane / 4 + i * 8;
                counts[i] = first + block < list.whole && !(bits >> block & 1) && !list.is_forced(first + block);
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
    // Called by the CTAs of the cluster once the first has selected.
    __device__ void write_masses() const {
        constexpr float LN_2 = 0.693147181f;
        cluster_arrive();
        cluster_wait();
        add_masses();
        cluster_arrive();
        cluster_wait();
        if (slice > 0) return;
        if (list.tiles > 0) weigh_all();
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
        }
        weights.open();
        if constexpr (MASS) {
            // What the first CTA marks is 0 before.
            clear_listed();
            cluster_arrive();
        } else {
            __syncwarp();
            cluster_start();
        }
    }
    // Phase 2: says how many bytes each barrier awaits, once the list is known.
    __device__ void expect() const {
        if (!is_alone()) shared.sums.expect(list.tiles * 2 * QUARTETS * sizeof(uint4));
        if (shares_room()) shared.room.expect(sizeof(uint32));
        if (!is_alone() && slice == 0) shared.keys.expect((list.tiles * BLOCKS + s.slices * WARPS) * sizeof(uint32));
    }
    // Phase 3: multiplies the CTA's tiles. Products stay here, partials go to all CTAs, status bits to the first.
    __device__ void multiply() const {
        const uint32 saw = this->multiply_tiles(*this);
        if (lane == 0) send(0, &shared.saw[slice * WARPS + warp], shared.keys, saw);
    }
    // Phase 4: joins the partials of the whole list.
    __device__ void weigh() const {
        receive(shared.sums);
        weigh_all();
    }
    __device__ void weigh_all() const {
        if (list.tiles <= Weights::OWN / 2 * WARP)
            weigh_heads<Weights::OWN / 2>();
        else
            weigh_heads<Weights::OWN>();
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
        if constexpr (MASS) {
            cluster_wait();
        } else {
            __syncwarp();
            cluster_started();
        }
        wait_for_previous_kernel();
        this->load_inputs(early, [&] { expect(); });
        multiply();
        weigh();
        make_room();
        send_keys();  // phase 5
        if (slice == s.slices - 1) this->write_forced();  // by the CTA that has the time
        if constexpr (MASS) {
            if (slice == s.slices - 1) send_common();
            if (slice > 0) return write_masses();
        }
        if (slice > 0) return;
        __syncthreads();  // all products are read
        CtaTopKShared<THREADS> &top = *reinterpret_cast<CtaTopKShared<THREADS> *>(products());
        open(top);
        receive(shared.keys);
        if (list.of_stored > 0 && !list.takes_all()) select_best(top);
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
