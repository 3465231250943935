// Attention to latents (MLA): keys of up to 576 channels whose first, up to 512, are the values, for 16 rows at a time.
//
// A CTA takes tiles r, r + ctas, … of a list, two of them in a slot of its ring. A token is one bulk copy, wherever it lies; each warp asks
// for four of every slot. A step is two slots:
//
//   warp w ── S [16 rows × 8 tokens] = Q · Kᵀ of its tokens, Q in registers ── maxima of all warps ── weights, for all warps
//          ── O [16 rows × 64 channels] += P [16 × 64 tokens] · V of its channels
//
// Then states join, 32 KiB from each CTA: the CTAs of a cluster send each other slices of the channels, with the news of their arrival; the
// slices of several clusters join through scratch, in the CTA that ends last. Bytes: each token once, 2 · D.
//
// How a row's tokens are cut depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention/ahead.cuh"
#include "attention/mma.cuh"
#include "common/barrier.cuh"

constexpr uint32 LATENT_ROWS = 16, LATENT_SLOTS = 5;
constexpr uint32 SLOT_TOKENS = 2 * TILE, STEP_SLOTS = 2, STEP_TILES = 4;
constexpr uint32 KEY_CHANNELS = 576, WARP_CHANNELS = 64;
constexpr uint32 LATENT_PITCH = KEY_CHANNELS * 2 + 16;  // an odd number of 16 bytes, so that eight rows hit different banks
constexpr uint32 SLOT_BYTES = SLOT_TOKENS * LATENT_PITCH;
// Of shared memory: the ring, the weights of a step, queries; in their place, what CTAs are sent.
constexpr uint32 WEIGHTS_OFFSET = LATENT_SLOTS * SLOT_BYTES, QUERIES_OFFSET = WEIGHTS_OFFSET + STEP_TILES * WARP * sizeof(uint4);

__device__ inline void write_zeros(char *row, uint32 begin, uint32 end) {
    for (uint32 at = begin + threadIdx.x % WARP * 16; at < end; at += WARP * 16) *reinterpret_cast<uint4 *>(row + at) = uint4{0, 0, 0, 0};
}

struct LatentShared {
    Barrier full[LATENT_SLOTS], queries, sent;
    alignas(16) float top[LATENT_ROWS][WARPS];
    float l[WARPS][LATENT_ROWS];
    alignas(8) uint8 there[LATENT_SLOTS][WARPS];  // bits of the tokens that a warp asked for
    bool is_last;
};

// Finds tokens and asks for them. A warp does so for four of each slot, a lane for one of a slot of each group: that of the first group is
// in the ring as it begins, later groups are of eight slots each.
struct LatentSource {
    static constexpr uint32 GROUP = 8, TOKENS = SLOT_TOKENS / WARPS;

    const AttentionParams &p;
    const Pair &pair;
    LatentShared &s;
    char *shared;
    uint32 rank, lane, warp, row, group = 0;
    Reach reach;
    uint32 entries, slots;
    // Of the lane: the group's token, that of the next, whose page may be on its way, and what the list says of the one after.
    const char *token;
    bool is_there;
    Place next;
    Listed listed;

    __device__ LatentSource(const AttentionParams &p, const Pair &pair, LatentShared &s, char *shared, uint32 rank)
        : p(p), pair(pair), s(s), shared(shared), rank(rank), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP),
          row(warp * TOKENS + lane % TOKENS) {}

    // The slot of the lane's token of a group; and its number along the list.
    __device__ uint32 slot_of(uint32 group) const { return (group ? LATENT_SLOTS + (group - 1) * GROUP : 0) + lane / TOKENS; }
    __device__ uint32 number(uint32 group) const {
        return ((slot_of(group) * 2 + row / TILE) * p.ctas.value + rank) * TILE + row % TILE;
    }
    // What is known before the kernel waits: where the lists of the first two groups lie, and the warp's two rows of queries, of which a
    // lane asks for one.
    struct Start {
        static constexpr uint32 ROWS = LATENT_ROWS / WARPS;
        Entry first, second;
        Lengths lengths;
        const char *query = nullptr;
        uint32 rows, to;  // of queries: so many, to there

        __device__ Start(const LatentSource &own)
            : first(own.p, own.pair, own.number(0)), second(own.p, own.pair, own.number(1)), lengths(own.p, own.pair) {
            const AttentionParams &p = own.p;
            const uint32 begin = own.warp * ROWS;
            char *const place = own.shared + QUERIES_OFFSET + begin * LATENT_PITCH;
            rows = min(max(int32(rows_of(p, own.pair) - begin), 0), ROWS);
            for (uint32 row = rows; row < ROWS; row++) write_zeros(place + row * LATENT_PITCH, 0, p.dim * 2);
            const auto [position, head] = place_of_row(p, own.pair, first_row(p, own.pair) + begin + own.lane);
            if (own.lane < rows) query = p.q.at(own.pair.seq, position, head);
            to = shared_address(place) + own.lane * LATENT_PITCH;
            pin(query);
            announce_lists(p, own.pair, own.warp, first, lengths);
        }
    };
    // What the list says, and where the tokens of two groups lie. Queries are asked for meanwhile; then the ring is.
    __device__ void open(const Start &start) {
        const Listed first = start.first.read(p), second = start.second.read(p);
        start.lengths.read(p, pair, reach, entries);
        if (lane == 0) s.queries.expect(start.rows * p.dim * 2);
        __syncwarp();
        if (start.query) copy_bulk(start.to, start.query, p.dim * 2, s.queries);
        __syncwarp();
        const Place own = find(0, first);
        const uint32 tiles = units_of(p, reach, entries);
        slots = tiles > rank ? p.ctas.divide(tiles - rank - 1) / 2 + 1 : 0;
        next = find(1, second);
        take(own);
        fill(0, LATENT_SLOTS);
        listed = ::listed(p, pair, number(2));
    }
    // Where the lane's token of a group lies, as place_of() says. What the page table says of it is asked for, and nothing waits for that.
    __device__ Place find(uint32 group, const Listed &listed) const {
        const uint32 x = number(group), e = p.block.divide(x);
        const int64 position = p.ids.data ? int64(listed.id) * p.block.value + (x - e * p.block.value) : x;
        const bool is_listed = !p.ids.data || (e < entries && listed.id >= 0 && listed.id != listed.previous);
        const bool is_there = is_listed && position < reach.end, is_in_table = is_there && p.table.data && !p.slots.data;
        const int32 at = is_there ? int32(position) : 0, page = p.page.divide(at);
        Place place{is_there ? at : -1, p.slots.data ? listed.slot : int32(pair.seq), at};
        if (p.slots.data || p.table.data) place.row -= page * int32(p.page.value);
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "setp.ne.u32 p, %2, 0;\n\t"
                     "@p ld.global.b32 %0, [%1];\n\t}"
                     : "+r"(place.page) : "l"(p.table.at(pair.seq, page)), "r"(uint32(is_in_table)) : "memory");
        return place;
    }
    __device__ void take(const Place &place) {
        token = p.k.at(place.page, place.row, pair.head);
        is_there = place.position >= 0 && uint32(place.page) < p.pages;
    }
    // Asks for the slots of a step once others are free: those behind the ring, in order. What finding waits for is asked for long before.
    __device__ void refill(uint32 slot) {
        const uint32 within = (slot - LATENT_SLOTS) % GROUP;
        if (within == 0) take(next), group++;
        fill(slot, STEP_SLOTS);
        if (within != GROUP / 2) return;
        next = find(group + 1, listed);
        listed = ::listed(p, pair, number(group + 2));
    }
    // Asks for the warp's tokens of so many slots of the group.
    __device__ void fill(uint32 slot, uint32 count) const {
        const uint32 own = slot_of(group), at = own % LATENT_SLOTS, to = at * SLOT_BYTES + row * LATENT_PITCH;
        const bool is_asked = own - slot < count && own < slots;
        const uint32 there = __ballot_sync(FULL_WARP, is_asked && is_there), asked = __ballot_sync(FULL_WARP, is_asked);
        // What is not there is zeros, since NaN would stay NaN under a weight of zero.
        if (there != asked) {
            for (uint32 rest = asked & ~there; rest; rest &= rest - 1)
                write_zeros(shared + __shfl_sync(FULL_WARP, to, __ffs(rest) - 1), 0, p.dim * 2);
            fence_copies();
            __syncwarp();
        }
        if (is_asked && lane % TOKENS == 0) {
            const uint32 of_slot = there >> lane & ((1 << TOKENS) - 1);
            s.there[at][warp] = of_slot;
            s.full[at].expect(__popc(of_slot) * p.dim * 2);
        }
        __syncwarp();
        if (is_asked && is_there) copy_bulk(shared_address(shared) + to, token, p.dim * 2, s.full[at]);
    }
};

// A warp that attends. Its lane has rows lane / 4 and 8 more, and of these two neighbouring columns of each eight.
template <typename Type>
struct Latent {
    static constexpr uint32 K_STEPS = KEY_CHANNELS / 16, OCTETS = WARP_CHANNELS / 8, AHEAD = 3;

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
        // Some are asked for ahead.
        uint32 key[AHEAD][4];
#pragma unroll
        for (uint32 n = 0; n < AHEAD - 1; n++) load_matrices(key[n], keys + n * 64);
#pragma unroll
        for (uint32 k = 0; k < K_STEPS; k += 2) {
            const uint32 n = k / 2 + AHEAD - 1;
            if (n < K_STEPS / 2) load_matrices(key[n % AHEAD], keys + n * 64);
            const uint32(&own)[4] = key[k / 2 % AHEAD];
            Type::multiply(sum[k % 4], query[k], own[0], own[1]);
            Type::multiply(sum[k % 4 + 1], query[k + 1], own[2], own[3]);
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
    // Adds the values of a step's slots, weighed, in the warp's channels: of 16 tokens, 32 channels at a time, the next of them asked for.
    template <uint32 SLOTS>
    __device__ void weigh(uint32 slot) {
        constexpr uint32 PARTS = SLOTS * SLOT_TOKENS / TILE * 2;
        uint32 value[2][2][4];
        uint4 weights[2];
        const auto load = [&](uint32 part) {
            const uint32 at = (slot + part / 4) % LATENT_SLOTS;
            const char *const tile = shared + at * SLOT_BYTES + part / 2 % 2 * TILE * LATENT_PITCH;
            const uint32 values = place(shared_address(tile)) + warp * WARP_CHANNELS * 2;
            if (part % 2 == 0) weights[part / 2 % 2] = reinterpret_cast<const uint4 *>(shared + WEIGHTS_OFFSET)[part / 2 * WARP + lane];
#pragma unroll
            for (uint32 j = 0; j < 2; j++) load_transposed(value[part % 2][j], values + part % 2 * 64 + j * 32);
        };
        load(0);
#pragma unroll
        for (uint32 part = 0; part < PARTS; part++) {
            if (part + 1 < PARTS) load(part + 1);
            const uint4 four = weights[part / 2 % 2];
            const uint32 own[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (uint32 j = 0; j < 2; j++) {
                const uint32(&two)[4] = value[part % 2][j];
                float(*const sum)[4] = acc + part % 2 * 4 + j * 2;
                Type::multiply(sum[0], own, two[0], two[1]);
                Type::multiply(sum[1], own, two[2], two[3]);
            }
        }
    }
    // `source` has asked for the queries, and for the ring.
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
            // Queries are in registers: others may send states.
            if (slot == 0) announce_start();
            const uint32 other = slot + 1 - warp / 4;
            if (other < source.slots) s.full[other % LATENT_SLOTS].wait(other / LATENT_SLOTS);
            if (slot + 1 < source.slots) weigh<2>(slot);
            else weigh<1>(slot);
            if (slot + LATENT_SLOTS >= source.slots) continue;
            __syncthreads();
            source.refill(slot + LATENT_SLOTS);
        }
        if (source.slots == 0) announce_start();
    }
    // Between this and sending, the CTAs of the cluster have come as far.
    __device__ static void announce_start() {
        if (cluster_ctas() > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
};

// How the CTAs of a list join. Each CTA of a cluster joins a slice, which is 2^log_octets octets of channels of all rows; the others send
// it theirs, as a warp's lanes hold them: of each octet a lane has two channels of row lane / 4 and of 8 more. With it go m and l.
struct LatentJoin {
    static constexpr uint32 AT_ONCE = 8;                        // states whose loads wait for nothing but each other
    static constexpr uint32 CLUSTER_CTAS = 8;                   // at most; 1, 2, 4 or 8
    static constexpr uint32 SUMS = 8;                           // float4 of m and l: m of a row and of 8 more, then l
    static constexpr uint32 ALL_OCTETS = 64, SENT_BYTES = ALL_OCTETS * WARP * sizeof(float4);
    static constexpr uint32 OWN_OCTETS = ALL_OCTETS / WARPS;    // of a warp of a CTA that is alone

    const AttentionParams &p;
    LatentShared &s;
    uint32 lane, warp, number, ctas, rank, clusters, cluster;  // of the list: its number, CTAs of a cluster, clusters
    uint32 log_octets, slice;                                  // float4 of a slice
    float4 *slices, *sums;                                     // that CTAs of the cluster have sent

    __device__ LatentJoin(const AttentionParams &p, LatentShared &s, char *shared, uint32 number, uint32 of_list)
        : p(p), s(s), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), number(number), ctas(cluster_ctas()), rank(cluster_rank()),
          log_octets(p.log_octets), slice(WARP << p.log_octets), slices(reinterpret_cast<float4 *>(shared + QUERIES_OFFSET)),
          sums(slices + ALL_OCTETS * WARP) {
        const uint32 log_ctas = log2_of(ctas);
        clusters = p.ctas.value >> log_ctas;
        cluster = of_list >> log_ctas;
    }
    // Once, early, by one thread. What a CTA has of its own slice it is not sent.
    __device__ static void open(LatentShared &s) {
        const uint32 ctas = cluster_ctas();
        s.sent.open(1);
        s.sent.expect(SENT_BYTES - (SENT_BYTES >> log2_of(ctas)) + ctas * SUMS * sizeof(float4));
    }

    // To an address of a CTA of the cluster, which its barrier `sent` counts.
    __device__ static void send(uint32 to, uint32 sent, const float4 &x) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x.x),
                     "f"(x.y), "f"(x.z), "f"(x.w), "r"(sent) : "memory");
    }
    template <typename Type>
    __device__ void exchange(const Latent<Type> &latent) const {
        // All warps of the cluster have their queries, in whose place this goes.
        if (ctas > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        else __syncthreads();
        // A warp's octets are of one slice: of eight CTAs, one has eight.
        const uint32 begin = warp * Latent<Type>::OCTETS, to = begin >> log_octets;
        float4 *const own = slices + rank * slice + (begin - (to << log_octets)) * WARP + lane;
        if (to == rank) {
#pragma unroll
            for (uint32 j = 0; j < Latent<Type>::OCTETS; j++) {
                const float(&x)[4] = latent.acc[j];
                own[j * WARP] = {x[0], x[1], x[2], x[3]};
            }
        } else {
            const uint32 there = address_in(to, own), sent = address_in(to, &s.sent);
#pragma unroll
            for (uint32 j = 0; j < Latent<Type>::OCTETS; j++) {
                const float(&x)[4] = latent.acc[j];
                send(there + j * uint32(WARP * sizeof(float4)), sent, {x[0], x[1], x[2], x[3]});
            }
        }
        // Meanwhile sums are added up. A warp tells them to one CTA, a lane of each four of two rows.
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float l = latent.l[i];
            l += __shfl_xor_sync(FULL_WARP, l, 1);
            l += __shfl_xor_sync(FULL_WARP, l, 2);
            if (lane % 4 == 0) s.l[warp][lane / 4 + i * 8] = l;
        }
        __syncthreads();
        if (warp < ctas && lane % 4 == 0) {
            float l[2] = {};
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) l[0] += s.l[w][lane / 4], l[1] += s.l[w][lane / 4 + 8];
            const float4 x = {latent.m[0], latent.m[1], l[0], l[1]};
            float4 *const own_sums = sums + rank * SUMS + lane / 4;
            if (ctas == 1) *own_sums = x;
            else send(address_in(warp, own_sums), address_in(warp, &s.sent), x);
        }
    }
    __device__ void wait() const {
        if (ctas > 1) s.sent.wait(0);
        else __syncthreads();
    }

    // Where a lane's results go. Found while states are under way, and kept.
    struct Target {
        char *to[2];  // the first of its channels
        uint32 exists[2], octets, is_plain, is_float16;
    };
    __device__ Target target(const Pair &pair) const {
        Target t;
        // Two neighbouring channels are a word of their own.
        t.is_plain = held(uint32(p.out.data && p.out_type != FLOAT32 && p.out.step[3] == 2 && !p.state.acc.data &&
                                 (uint64(p.out.data) | p.out.step[0] | p.out.step[1] | p.out.step[2]) % 4 == 0));
        t.is_float16 = held(uint32(p.out_type == FLOAT16));
        t.octets = held(owned());
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const RowPlace place = this->place(pair, i);
            t.exists[i] = held(uint32(lane / 4 + i * 8 < rows_of(p, pair)));
            t.to[i] = p.out.at(pair.seq, place.position, place.head, channel(0));
            pin(t.to[i]);
        }
        return t;
    }
    __device__ uint32 row(const Pair &pair, uint32 i) const { return first_row(p, pair) + lane / 4 + i * 8; }
    __device__ RowPlace place(const Pair &pair, uint32 i) const { return place_of_row(p, pair, row(pair, i)); }
    __device__ uint32 channel(uint32 octet) const { return ((rank << log_octets) + octet) * 8 + lane % 4 * 2; }
    // Octets of the slice, as far as there are values. A warp has octets n, n + WARPS, …
    __device__ uint32 owned() const { return min(max(int32(p.value_dim / 8) - int32(rank << log_octets), 0), 1 << log_octets); }

    // What the lane's rows are multiplied by. Of rows that do not exist l is 0.
    __device__ float2 norm(const Pair &pair, const Target &t, const float4 &sums) const {
        if (p.sinks.data)
            return {t.exists[0] ? norm_of(p, place(pair, 0).head, sums.x, sums.z) : 0.0f,
                    t.exists[1] ? norm_of(p, place(pair, 1).head, sums.y, sums.w) : 0.0f};
        return {sums.z == 0.0f ? 0.0f : 1.0f / sums.z, sums.w == 0.0f ? 0.0f : 1.0f / sums.w};
    }
    __device__ static void store_if(bool exists, char *to, uint32 x) {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "setp.ne.u32 p, %2, 0;\n\t"
                     "@p st.global.b32 [%0], %1;\n\t}" ::"l"(to), "r"(x), "r"(uint32(exists)) : "memory");
    }
    __device__ void write(const Target &t, const float2 &norm, uint32 octet, const float4 &acc) const {
        const float low[2] = {acc.x * norm.x, acc.y * norm.x}, high[2] = {acc.z * norm.y, acc.w * norm.y};
        const auto pack = [&](const float (&x)[2]) { return t.is_float16 ? Float16::pack(x[0], x[1]) : Bfloat16::pack(x[0], x[1]); };
        store_if(t.exists[0], t.to[0] + octet * 16, pack(low));
        store_if(t.exists[1], t.to[1] + octet * 16, pack(high));
    }
    // What is not plain is left in shared memory first, where the lane had it from.
    __device__ void leave(uint32 octet, const float4 &acc) const { slices[octet * WARP + lane] = acc; }
    // Then that is written; and m and l of the rows.
    __device__ void tell(const Pair &pair, const Target &t, const float4 &sums) const {
        const float m[2] = {sums.x, sums.y}, l[2] = {sums.z, sums.w};
        if (t.is_plain) {
            if (rank || warp || lane % 4) return;
#pragma unroll
            for (uint32 i = 0; i < 2; i++)
                if (t.exists[i]) write_state(p, pair, place(pair, i), 0, {}, m[i], l[i]);
            return;
        }
#pragma unroll 1
        for (uint32 octet = warp; octet < t.octets; octet += WARPS) {
            const float4 x = slices[octet * WARP + lane];
            const float2 acc[2] = {{x.x, x.y}, {x.z, x.w}};
#pragma unroll
            for (uint32 i = 0; i < 2; i++)
                if (t.exists[i]) write_results(p, pair, row(pair, i), channel(octet), acc[i], m[i], l[i]);
        }
    }

    // Joins the states of the cluster's CTAs, in their order, to octets warp, warp + WARPS, … of the slice, and returns m and l of the
    // lane's rows. All is asked for at the beginning.
    template <uint32 CTAS>
    __device__ float4 join_cluster(float4 (&acc)[OWN_OCTETS]) const {
        constexpr uint32 OCTETS = OWN_OCTETS / CTAS;
        float4 x[OCTETS][CTAS], one[CTAS], all = {minus_infinity(), minus_infinity(), 0.0f, 0.0f};
#pragma unroll
        for (uint32 n = 0; n < CTAS; n++) one[n] = sums[n * SUMS + lane / 4];
#pragma unroll
        for (uint32 j = 0; j < OCTETS; j++) {
#pragma unroll
            for (uint32 n = 0; n < CTAS; n++) x[j][n] = slices[(n * OCTETS + j) * THREADS + threadIdx.x];
        }
#pragma unroll
        for (uint32 n = 0; n < CTAS; n++) all.x = fmaxf(all.x, one[n].x), all.y = fmaxf(all.y, one[n].y);
#pragma unroll
        for (uint32 j = 0; j < OCTETS; j++) acc[j] = {};
#pragma unroll
        for (uint32 n = 0; n < CTAS; n++) {
            const float low = weight(one[n].x, all.x), high = weight(one[n].y, all.y);
            all.z = fmaf(low, one[n].z, all.z);
            all.w = fmaf(high, one[n].w, all.w);
#pragma unroll
            for (uint32 j = 0; j < OCTETS; j++) {
                const float4 y = x[j][n], sum = acc[j];
                acc[j] = {fmaf(low, y.x, sum.x), fmaf(low, y.y, sum.y), fmaf(high, y.z, sum.z), fmaf(high, y.w, sum.w)};
            }
        }
        return all;
    }

    // Two channels of two rows; and m and l of these.
    struct Part {
        float4 acc, sums;
    };
    // From scratch. Predicates: between branches, loads would wait for each other.
    __device__ static void load_if(bool is_there, Part &part, const float4 *acc, const float4 *sums) {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "setp.ne.u32 p, %10, 0;\n\t"
                     "@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%8];\n\t"
                     "@p ld.global.cg.v4.f32 {%4, %5, %6, %7}, [%9];\n\t}"
                     : "+f"(part.acc.x), "+f"(part.acc.y), "+f"(part.acc.z), "+f"(part.acc.w), "+f"(part.sums.x), "+f"(part.sums.y),
                       "+f"(part.sums.z), "+f"(part.sums.w)
                     : "l"(acc), "l"(sums), "r"(uint32(is_there)) : "memory");
    }
    __device__ static Part empty() { return {{0.0f, 0.0f, 0.0f, 0.0f}, {minus_infinity(), minus_infinity(), 0.0f, 0.0f}}; }
    // Where a lane's part of the first AT_ONCE states lies in scratch, and their m and l.
    struct Stored {
        const float4 *acc[AT_ONCE], *sums[AT_ONCE];
    };
    // Of states from `begin` on.
    __device__ void ask(Part (&one)[AT_ONCE], const Stored &at, uint32 begin, uint32 record, bool exists) const {
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) {
            one[n] = empty();
            load_if(exists && begin + n < clusters, one[n], at.acc[n] + begin * record, at.sums[n] + begin * record);
        }
    }
    // Joins the states of the clusters, in their order, of which the first are asked for.
    __device__ Part joined(Part (&one)[AT_ONCE], const Stored &at, uint32 record) const {
        Part sum = empty();
#pragma unroll 1
        for (uint32 begin = AT_ONCE;; begin += AT_ONCE) {
            float low = sum.sums.x, high = sum.sums.y;
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) low = fmaxf(low, one[n].sums.x), high = fmaxf(high, one[n].sums.y);
            raise(sum, low, high);
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) add(sum, one[n]);
            if (begin >= clusters) return sum;
            ask(one, at, begin, record, true);
        }
    }
    // A sum whose maxima are raised to these; and one more state in it, whose are no higher.
    __device__ static void raise(Part &sum, float low, float high) {
        const float keep[2] = {weight(sum.sums.x, low), weight(sum.sums.y, high)};
        sum.acc = {sum.acc.x * keep[0], sum.acc.y * keep[0], sum.acc.z * keep[1], sum.acc.w * keep[1]};
        sum.sums = {low, high, sum.sums.z * keep[0], sum.sums.w * keep[1]};
    }
    __device__ static void add(Part &sum, const Part &one) {
        const float low = weight(one.sums.x, sum.sums.x), high = weight(one.sums.y, sum.sums.y);
        const float4 x = one.acc, y = sum.acc;
        sum.acc = {fmaf(low, x.x, y.x), fmaf(low, x.y, y.y), fmaf(high, x.z, y.z), fmaf(high, x.w, y.w)};
        sum.sums.z = fmaf(low, one.sums.z, sum.sums.z);
        sum.sums.w = fmaf(high, one.sums.w, sum.sums.w);
    }
    template <typename Each>
    __device__ void for_octets(const Target &t, const float4 (&acc)[OWN_OCTETS], const Each &each) const {
#pragma unroll
        for (uint32 j = 0; j < OWN_OCTETS; j++) {
            if (warp + j * WARPS >= t.octets) return;
            each(warp + j * WARPS, acc[j]);
        }
    }
    __device__ void join(const Pair &pair) const {
        const Target t = target(pair);
        const uint32 record = slice + SUMS;
        float4 *const stored = reinterpret_cast<float4 *>(p.scratch) + uint64((number * ctas + rank) * clusters) * record;
        wait();
        float4 acc[OWN_OCTETS];
        const float4 all = ctas > 4   ? join_cluster<8>(acc)
                           : ctas > 2 ? join_cluster<4>(acc)
                           : ctas > 1 ? join_cluster<2>(acc)
                                      : join_cluster<1>(acc);
        if (clusters > 1) {
            float4 *const to = stored + cluster * record;
            if (warp == 0 && lane % 4 == 0) __stcg(to + slice + lane / 4, all);
            for_octets(t, acc, [&](uint32 octet, const float4 &x) { __stcg(to + octet * WARP + lane, x); });
            join_clusters(pair, t, stored, record);
            return;
        }
        if (t.is_plain) {
            const float2 norm = this->norm(pair, t, all);
            for_octets(t, acc, [&](uint32 octet, const float4 &x) { write(t, norm, octet, x); });
        } else {
            for_octets(t, acc, [&](uint32 octet, const float4 &x) { leave(octet, x); });
        }
        tell(pair, t, all);
    }
    // What the clusters have left, in the CTA that ends last.
    __device__ void join_clusters(const Pair &pair, const Target &t, const float4 *stored, uint32 record) const {
        Stored at;
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) {
            at.acc[n] = stored + n * record + warp * WARP + lane;
            at.sums[n] = stored + n * record + slice + lane / 4;
            pin(at.acc[n]);
            pin(at.sums[n]);
        }
        if (!is_last()) return;
        Part one[AT_ONCE];
        float4 all = {};
        ask(one, at, 0, record, warp < t.octets);
#pragma unroll 1
        for (uint32 octet = warp; octet < t.octets; octet += WARPS) {
            const Part sum = joined(one, at, record);
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) at.acc[n] += WARPS * WARP;
            if (octet + WARPS < t.octets) ask(one, at, 0, record, true);
            all = sum.sums;
            if (t.is_plain) write(t, norm(pair, t, all), octet, sum.acc);
            else leave(octet, sum.acc);
        }
        tell(pair, t, all);
    }
    // Of the clusters of the list, as far as the CTAs of this slice go.
    __device__ bool is_last() const {
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32 *const counter = p.counters + number * ctas + rank, before;
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
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
        s.queries.open(WARPS);
        LatentJoin::open(s);
    }
    // Channels that no copy writes, of keys and queries.
    for (uint32 row = warp; p.dim < KEY_CHANNELS && row < LATENT_SLOTS * SLOT_TOKENS + LATENT_ROWS; row += WARPS) {
        const uint32 at = row * LATENT_PITCH + (row < LATENT_SLOTS * SLOT_TOKENS ? 0 : QUERIES_OFFSET - WEIGHTS_OFFSET);
        write_zeros(shared + at, p.dim * 2, KEY_CHANNELS * 2);
    }
    LatentSource source(p, pair, s, shared, rank);
    const LatentSource::Start start(source);
    __syncthreads();
    allow_next_kernel();
    wait_for_previous_kernel();
    source.open(start);
    Latent<Type> latent(p, s, shared);
    latent.run(source);
    const LatentJoin join(p, s, shared, number, rank);
    join.exchange(latent);
    join.join(pair);
}

#define LATENT_KERNEL(name, ...)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention_latent<__VA_ARGS__>(p); }
