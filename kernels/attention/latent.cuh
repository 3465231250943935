// Attention to latents (MLA): keys of up to 576 channels whose first, up to 512, are the values, for 16 rows at a time.
//
// A CTA takes tiles r, r + ctas, … of a list, two of them in a slot of its ring. A token is one bulk copy, wherever it lies; each warp asks
// for four of every slot. A step is two slots:
//
//   warp w ── S [16 rows × 8 tokens] = Q · Kᵀ of its tokens, Q in registers ── maxima of all warps ── weights, for all warps
//          ── O [16 rows × 64 channels] += P [16 × 64 tokens] · V of its channels
//
// Then states join, 32 KiB from each CTA: the CTAs of a cluster read from each other, each a slice of the channels; the slices of several
// clusters join through scratch, in the CTA that ends last. Bytes: each token once, 2 · D.
//
// How a row's tokens are cut depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention/mma.cuh"
#include "common/barrier.cuh"

constexpr uint32 LATENT_ROWS = 16, LATENT_SLOTS = 5;
constexpr uint32 SLOT_TOKENS = 2 * TILE, STEP_SLOTS = 2, STEP_TILES = 4;
constexpr uint32 KEY_CHANNELS = 576, WARP_CHANNELS = 64;
constexpr uint32 LATENT_PITCH = KEY_CHANNELS * 2 + 16;  // an odd number of 16 bytes, so that eight rows hit different banks
constexpr uint32 SLOT_BYTES = SLOT_TOKENS * LATENT_PITCH;
// Of shared memory: the ring, the weights of a step, queries.
constexpr uint32 WEIGHTS_OFFSET = LATENT_SLOTS * SLOT_BYTES, QUERIES_OFFSET = WEIGHTS_OFFSET + STEP_TILES * WARP * sizeof(uint4);

__device__ inline void write_zeros(char *row, uint32 begin, uint32 end) {
    for (uint32 at = begin + threadIdx.x % WARP * 16; at < end; at += WARP * 16) *reinterpret_cast<uint4 *>(row + at) = uint4{0, 0, 0, 0};
}

struct LatentShared {
    Barrier full[LATENT_SLOTS], queries;
    alignas(16) float top[LATENT_ROWS][WARPS];
    float l[WARPS][LATENT_ROWS];
    alignas(8) uint8 there[LATENT_SLOTS][WARPS];  // bits of the tokens that a warp asked for
    bool is_last;
};

// Finds tokens and asks for them. A warp does so for four of each slot, a lane for one of a slot of each group of eight.
struct LatentSource {
    static constexpr uint32 GROUP = 8, TOKENS = SLOT_TOKENS / WARPS;
    struct Token {
        const char *from;
        bool is_there;
    };

    const AttentionParams &p;
    const Pair &pair;
    LatentShared &s;
    char *shared;
    uint32 rank, lane, warp, row, group = 0;
    Reach reach;
    uint32 entries, slots;
    Token token, next;
    Listed listed;  // of the group after these

    __device__ LatentSource(const AttentionParams &p, const Pair &pair, LatentShared &s, char *shared, uint32 rank)
        : p(p), pair(pair), s(s), shared(shared), rank(rank), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), row(warp * TOKENS + lane % TOKENS) {}

    // The lane's token of a group, counted along the list.
    __device__ uint32 number(uint32 group) const {
        return (((group * GROUP + lane / TOKENS) * 2 + row / TILE) * p.ctas.value + rank) * TILE + row % TILE;
    }
    // Of what is read once the kernel waits no longer.
    __device__ void announce() const {
        constexpr uint32 ENTRIES = 128 / sizeof(int32);
        const uint32 entry = p.block.divide(number(0));
        if (p.ids.data && entry < p.cap) prefetch(p.ids.at(pair.seq, pair.position, pair.head, entry));
        if (warp) return;
        if (p.table.data && uint64(lane * ENTRIES) * p.page.value < p.capacity) prefetch(p.table.at(pair.seq, lane * ENTRIES));
        if (lane == 0) prefetch(p.seq_lens.at(pair.seq));
        if (lane == 1 && p.ids.data) prefetch(p.counts.at(pair.seq, pair.position, pair.head));
    }
    __device__ void ask_queries() const {
        const uint32 rows = rows_of(p, pair);
        char *const to = shared + QUERIES_OFFSET;
        for (uint32 row = rows; row < LATENT_ROWS; row++) write_zeros(to + row * LATENT_PITCH, 0, p.dim * 2);
        __syncwarp();
        if (lane == 0) s.queries.expect(rows * p.dim * 2);
        __syncwarp();
        if (lane >= rows) return;
        const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + lane);
        copy_bulk(shared_address(to) + lane * LATENT_PITCH, p.q.at(pair.seq, position, head), p.dim * 2, s.queries);
    }
    // What the list says, and where the tokens of the first group lie.
    __device__ void open() {
        const Listed first = ::listed(p, pair, number(0));
        listed = ::listed(p, pair, number(1));
        reach = Reach::load(p, pair);
        entries = count_of(p, pair);
        const uint32 tiles = units_of(p, reach, entries);
        slots = tiles > rank ? p.ctas.divide(tiles - rank - 1) / 2 + 1 : 0;
        token = find(0, first);
    }
    __device__ Token find(uint32 group, const Listed &listed) const {
        const Place place = place_of(p, pair, reach, entries, number(group), listed);
        return {p.k.at(place.page, place.row, pair.head), place.position >= 0};
    }
    // Asks for the warp's tokens of a slot. Slots come in order; what finding waits for is asked for long before.
    __device__ void fill(uint32 slot) {
        if (slot >= slots) return;
        if (slot % GROUP == GROUP / 2) next = find(group + 1, listed);
        if (slot && slot % GROUP == 0) {
            token = next;
            listed = ::listed(p, pair, number(++group + 1));
        }
        const uint32 at = slot % LATENT_SLOTS, first = slot % GROUP * TOKENS;
        const bool is_asked = lane / TOKENS == slot % GROUP && token.is_there;
        const uint32 there = __ballot_sync(FULL_WARP, is_asked) >> first;
        char *const to = shared + at * SLOT_BYTES + warp * TOKENS * LATENT_PITCH;
        // What is not there is zeros, since NaN would stay NaN under a weight of zero.
        for (uint32 n = 0; there != (1 << TOKENS) - 1 && n < TOKENS; n++) {
            if (there >> n & 1) continue;
            write_zeros(to + n * LATENT_PITCH, 0, p.dim * 2);
            fence_copies();
        }
        if (lane == 0) s.there[at][warp] = there;
        __syncwarp();
        if (lane == 0) s.full[at].expect(__popc(there) * p.dim * 2);
        __syncwarp();
        if (is_asked) copy_bulk(shared_address(to) + lane % TOKENS * LATENT_PITCH, token.from, p.dim * 2, s.full[at]);
    }
};

// A warp that attends. Its lane has rows lane / 4 and 8 more, and of these two neighbouring columns of each eight.
template <typename Type>
struct Latent {
    static constexpr uint32 K_STEPS = KEY_CHANNELS / 16, OCTETS = WARP_CHANNELS / 8;

    const AttentionParams &p;
    LatentShared &s;
    char *shared;
    uint32 lane, warp;
    uint32 query[K_STEPS][4];
    float acc[OCTETS][4] = {}, m[2], l[2];

    __device__ Latent(const AttentionParams &p, LatentShared &s, char *shared)
        : p(p), s(s), shared(shared), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), m{minus_infinity(), minus_infinity()}, l{} {}

    // Of 16 rows and twice 16 bytes, in the order of an operand of m16n8k16: the lane's row of its matrix.
    __device__ uint32 place(uint32 rows) const { return rows + (lane % 8 + lane / 8 % 2 * 8) * LATENT_PITCH + lane / 16 * 16; }

    __device__ void take_queries() {
        const uint32 from = place(shared_address(shared + QUERIES_OFFSET));
#pragma unroll
        for (uint32 k = 0; k < K_STEPS; k++) load_matrices(query[k], from + k * 32);
    }
    // Products of all rows with the warp's eight tokens of the slot.
    __device__ void multiply(float (&c)[4], uint32 at) const {
        const uint32 keys = shared_address(shared + at * SLOT_BYTES) + (warp % 4 * 8 + lane % 8) * LATENT_PITCH + lane / 8 * 16;
        float sum[4][4] = {};
#pragma unroll
        for (uint32 k = 0; k < K_STEPS; k += 2) {
            uint32 key[4];
            load_matrices(key, keys + k * 32);
            Type::multiply(sum[k % 4], query[k], key[0], key[1]);
            Type::multiply(sum[k % 4 + 1], query[k + 1], key[2], key[3]);
        }
        const uint32 there = s.there[at][warp % 4 * 2 + lane % 4 / 2] >> lane % 2 * 2;
#pragma unroll
        for (uint32 e = 0; e < 4; e++) c[e] = there >> e % 2 & 1 ? sum[0][e] + sum[1][e] + (sum[2][e] + sum[3][e]) : minus_infinity();
    }
    // The running softmax: products of a step's tokens become weights, in shared memory.
    __device__ void soften(float (&c)[4]) {
        const float factor = p.scale * LOG2_E;
        float keep[2];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float top = fmaxf(c[i * 2], c[i * 2 + 1]);
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
            if (lane % 4 == 0) s.top[lane / 4 + i * 8][warp] = top;
        }
        __syncthreads();
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const float4 *const tops = reinterpret_cast<const float4 *>(s.top[lane / 4 + i * 8]), a = tops[0], b = tops[1];
            const float top = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
            const float next = fmaxf(m[i], top * factor), shift = next == minus_infinity() ? 0.0f : next;
            keep[i] = weight(m[i], next);
            m[i] = next;
            // −inf times a factor too small for a float32 would be NaN.
#pragma unroll
            for (uint32 e = i * 2; e < i * 2 + 2; e++) c[e] = c[e] == minus_infinity() ? 0.0f : exp2_fast(fmaf(c[e], factor, -shift));
            l[i] = l[i] * keep[i] + c[i * 2] + c[i * 2 + 1];
        }
        uint2 *const weights = reinterpret_cast<uint2 *>(shared + WEIGHTS_OFFSET);
        weights[(warp / 2 * WARP + lane) * 2 + warp % 2] = {Type::pack(c[0], c[1]), Type::pack(c[2], c[3])};
        __syncthreads();
        if (__all_sync(FULL_WARP, keep[0] == 1.0f && keep[1] == 1.0f)) return;
#pragma unroll
        for (uint32 n = 0; n < OCTETS * 4; n++) acc[n / 4][n % 4] *= keep[n / 2 % 2];
    }
    // Adds the values of a slot, weighed, in the warp's channels.
    __device__ void weigh(uint32 at, uint32 first_tile) {
#pragma unroll
        for (uint32 t = 0; t < SLOT_TOKENS / TILE; t++) {
            if (*reinterpret_cast<const uint32 *>(s.there[at] + t * 4) == 0) continue;
            const uint4 four = reinterpret_cast<const uint4 *>(shared + WEIGHTS_OFFSET)[(first_tile + t) * WARP + lane];
            const uint32 weights[4] = {four.x, four.y, four.z, four.w};
            const uint32 values = place(shared_address(shared + at * SLOT_BYTES + t * TILE * LATENT_PITCH)) + warp * WARP_CHANNELS * 2;
#pragma unroll
            for (uint32 j = 0; j < OCTETS; j += 2) {
                uint32 value[4];
                load_transposed(value, values + j * 16);
                Type::multiply(acc[j], weights, value[0], value[1]);
                Type::multiply(acc[j + 1], weights, value[2], value[3]);
            }
        }
    }
    // `source` has asked for the queries, and for as many slots as there is room for.
    __device__ void run(LatentSource &source) {
        s.queries.wait(0);
        take_queries();
#pragma unroll 1
        for (uint32 slot = 0; slot < source.slots; slot += STEP_SLOTS) {
            const uint32 own = slot + warp / 4;
            float c[4] = {minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity()};
            if (own < source.slots) {
                s.full[own % LATENT_SLOTS].wait(own / LATENT_SLOTS);
                multiply(c, own % LATENT_SLOTS);
            }
            soften(c);
#pragma unroll
            for (uint32 n = 0; n < STEP_SLOTS; n++) {
                const uint32 other = slot + n, at = other % LATENT_SLOTS;
                if (other >= source.slots) continue;
                s.full[at].wait(other / LATENT_SLOTS);
                weigh(at, n * 2);
            }
            if (slot + LATENT_SLOTS >= source.slots) continue;
            __syncthreads();
#pragma unroll
            for (uint32 n = 0; n < STEP_SLOTS; n++) source.fill(slot + LATENT_SLOTS + n);
        }
    }
};

// How the CTAs of a list join. A CTA leaves its state in its shared memory, in the place of tiles: for each CTA of the cluster a slice, which
// is 8 · 2^log_octets channels of all rows, then m and l of each row.
struct LatentJoin {
    static constexpr uint32 AT_ONCE = 8;  // states whose loads wait for nothing but each other

    const AttentionParams &p;
    LatentShared &s;
    char *shared;
    uint32 lane, warp, number, ctas, rank, clusters, cluster;  // of the list: its number, CTAs of a cluster, clusters
    uint32 log_octets, slice;                                  // floats of a slice

    __device__ LatentJoin(const AttentionParams &p, LatentShared &s, char *shared, uint32 number, uint32 of_list)
        : p(p), s(s), shared(shared), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), number(number), ctas(cluster_ctas()), rank(cluster_rank()),
          log_octets(p.log_octets) {
        const uint32 log_ctas = __ffs(ctas) - 1;
        clusters = p.ctas.value >> log_ctas;
        cluster = of_list >> log_ctas;
        slice = (8 << log_octets) * LATENT_ROWS;
    }
    // Where eight channels of a row lie in a slice: turned, so that rows hit different banks.
    __device__ uint32 octet(uint32 row, uint32 n) const { return (row << log_octets | (n ^ (row & 7 & ((1 << log_octets) - 1)))) * 8; }
    __device__ float *sums() const { return reinterpret_cast<float *>(shared) + (slice << (__ffs(ctas) - 1)); }

    template <typename Type>
    __device__ void leave(Latent<Type> &latent) const {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float l = latent.l[i];
            l += __shfl_xor_sync(FULL_WARP, l, 1);
            l += __shfl_xor_sync(FULL_WARP, l, 2);
            if (lane % 4 == 0) s.l[warp][lane / 4 + i * 8] = l;
        }
        // All warps are done with tiles, too.
        __syncthreads();
#pragma unroll
        for (uint32 j = 0; j < Latent<Type>::OCTETS; j++) {
            const uint32 n = warp * Latent<Type>::OCTETS + j;
            float *const to = reinterpret_cast<float *>(shared) + (n >> log_octets) * slice + lane % 4 * 2;
#pragma unroll
            for (uint32 i = 0; i < 2; i++)
                *reinterpret_cast<float2 *>(to + octet(lane / 4 + i * 8, n & ((1 << log_octets) - 1))) = {latent.acc[j][i * 2], latent.acc[j][i * 2 + 1]};
        }
        if (warp) return;
        if (lane % 4 == 0) sums()[lane / 4] = latent.m[0], sums()[lane / 4 + 8] = latent.m[1];
        if (lane >= LATENT_ROWS) return;
        float l = 0.0f;
        for (uint32 w = 0; w < WARPS; w++) l += s.l[w][lane];
        sums()[LATENT_ROWS + lane] = l;
    }

    // Four channels of a row.
    struct Quad {
        float4 acc;
        float m, l;
    };
    // From the shared memory of a CTA of the cluster, or from scratch. Predicates: between branches, loads would wait for each other.
    __device__ static void load_if(bool is_there, Quad &quad, uint32 acc, uint32 sums) {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "setp.ne.u32 p, %8, 0;\n\t"
                     "@p ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%6];\n\t"
                     "@p ld.shared::cluster.f32 %4, [%7];\n\t"
                     "@p ld.shared::cluster.f32 %5, [%7 + 64];\n\t}"
                     : "+f"(quad.acc.x), "+f"(quad.acc.y), "+f"(quad.acc.z), "+f"(quad.acc.w), "+f"(quad.m), "+f"(quad.l)
                     : "r"(acc), "r"(sums), "r"(uint32(is_there)) : "memory");
    }
    __device__ static void load_if(bool is_there, Quad &quad, const float *acc, const float *sums) {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "setp.ne.u32 p, %8, 0;\n\t"
                     "@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%6];\n\t"
                     "@p ld.global.cg.f32 %4, [%7];\n\t"
                     "@p ld.global.cg.f32 %5, [%7 + 64];\n\t}"
                     : "+f"(quad.acc.x), "+f"(quad.acc.y), "+f"(quad.acc.z), "+f"(quad.acc.w), "+f"(quad.m), "+f"(quad.l)
                     : "l"(acc), "l"(sums), "r"(uint32(is_there)) : "memory");
    }
    // Joins `count` states, in their order, of which load(n, is_there, quad) reads one.
    template <typename Load>
    __device__ static Quad joined(uint32 count, const Load &load) {
        Quad sum{{0.0f, 0.0f, 0.0f, 0.0f}, minus_infinity(), 0.0f};
#pragma unroll 1
        for (uint32 begin = 0; begin < count; begin += AT_ONCE) {
            Quad one[AT_ONCE];
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                one[n] = {{0.0f, 0.0f, 0.0f, 0.0f}, minus_infinity(), 0.0f};
                load(begin + n, begin + n < count, one[n]);
            }
            float top = sum.m;
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) top = fmaxf(top, one[n].m);
            const float keep = weight(sum.m, top);
            sum = {{sum.acc.x * keep, sum.acc.y * keep, sum.acc.z * keep, sum.acc.w * keep}, top, sum.l * keep};
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                const float take = weight(one[n].m, top);
                const float4 x = one[n].acc;
                sum.acc = {fmaf(take, x.x, sum.acc.x), fmaf(take, x.y, sum.acc.y), fmaf(take, x.z, sum.acc.z), fmaf(take, x.w, sum.acc.w)};
                sum.l = fmaf(take, one[n].l, sum.l);
            }
        }
        return sum;
    }
    __device__ void write(const Pair &pair, uint32 row, uint32 channel, const Quad &quad) const {
        if (row >= rows_of(p, pair)) return;
        const uint32 of_pair = first_row(p, pair) + row;
        write_results(p, pair, of_pair, channel, {quad.acc.x, quad.acc.y}, quad.m, quad.l);
        write_results(p, pair, of_pair, channel + 2, {quad.acc.z, quad.acc.w}, quad.m, quad.l);
    }
    // A thread has quads n, n + THREADS, …
    template <typename Each>
    __device__ void for_quads(const Each &each) const {
        const uint32 owned = min(max(int32(p.value_dim / 8) - int32(rank << log_octets), 0), 1 << log_octets);
#pragma unroll 1
        for (uint32 n = threadIdx.x; n < LATENT_ROWS << (1 + log_octets); n += THREADS) {
            const uint32 row = n >> (1 + log_octets), quad = n & ((2 << log_octets) - 1);
            if (quad < owned * 2) each(row, quad, octet(row, quad / 2) + quad % 2 * 4);
        }
    }
    __device__ void join(const Pair &pair) const {
        const uint32 begin = (rank << log_octets) * 8, record = slice + 2 * LATENT_ROWS;
        const float *const left = reinterpret_cast<const float *>(shared) + rank * slice;
        float *const stored = reinterpret_cast<float *>(p.scratch) + uint64((number * ctas + rank) * clusters) * record;
        for_quads([&](uint32 row, uint32 quad, uint32 at) {
            const Quad sum = joined(ctas, [&](uint32 n, bool is_there, Quad &one) {
                load_if(is_there, one, address_in(n, left + at), address_in(n, sums() + row));
            });
            if (clusters == 1) return write(pair, row, begin + quad * 4, sum);
            float *const to = stored + cluster * record;
            __stcg(reinterpret_cast<float4 *>(to + at), sum.acc);
            if (quad) return;
            __stcg(to + slice + row, sum.m);
            __stcg(to + slice + LATENT_ROWS + row, sum.l);
        });
        // Others may still read what this CTA left.
        cluster_arrive();
        if (clusters > 1 && is_last()) {
            for_quads([&](uint32 row, uint32 quad, uint32 at) {
                const Quad sum = joined(clusters, [&](uint32 n, bool is_there, Quad &one) {
                    load_if(is_there, one, stored + n * record + at, stored + n * record + slice + row);
                });
                write(pair, row, begin + quad * 4, sum);
            });
        }
        cluster_wait();
    }
    // Of the clusters of the list, as far as the CTAs of this slice go.
    __device__ bool is_last() const {
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32 *const counter = p.counters + number * ctas + rank, before;
            asm volatile("fence.acq_rel.gpu;\n\t"
                         "atom.relaxed.gpu.global.add.u32 %0, [%1], 1;\n\t"
                         "fence.acq_rel.gpu;"
                         : "=r"(before) : "l"(counter) : "memory");
            s.is_last = before == clusters - 1;
            if (s.is_last) *counter = 0;
        }
        __syncthreads();
        return s.is_last;
    }
};

template <typename Type>
__device__ inline void attention_latent(const AttentionParams &p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ LatentShared s;
    __shared__ uint32 words[WARP];
    const uint32 word = ask_for_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    const uint32 number = p.ctas.divide(blockIdx.x), rank = blockIdx.x - number * p.ctas.value, warp = threadIdx.x / WARP;
    const Pair pair = pair_of(p, number);
    if (threadIdx.x == 0) {
        for (uint32 n = 0; n < LATENT_SLOTS; n++) s.full[n].open(WARPS);
        s.queries.open(1);
    }
    // Channels that no copy writes, of keys and queries.
    for (uint32 row = warp; p.dim < KEY_CHANNELS && row < LATENT_SLOTS * SLOT_TOKENS + LATENT_ROWS; row += WARPS) {
        const uint32 at = row * LATENT_PITCH + (row < LATENT_SLOTS * SLOT_TOKENS ? 0 : QUERIES_OFFSET - WEIGHTS_OFFSET);
        write_zeros(shared + at, p.dim * 2, KEY_CHANNELS * 2);
    }
    LatentSource source(p, pair, s, shared, rank);
    source.announce();
    __syncthreads();
    allow_next_kernel();
    wait_for_previous_kernel();
    if (warp == WARPS - 1) source.ask_queries();
    source.open();
#pragma unroll
    for (uint32 slot = 0; slot < LATENT_SLOTS; slot++) source.fill(slot);
    Latent<Type> latent(p, s, shared);
    latent.run(source);
    const LatentJoin join(p, s, shared, number, rank);
    join.leave(latent);
    cluster_arrive();
    cluster_wait();
    join.join(pair);
}

#define LATENT_KERNEL(name, ...)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention_latent<__VA_ARGS__>(p); }
