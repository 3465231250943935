// Attention to latents (multi-head latent attention) for 16 rows at a time (variant mla16): keys of up to 576 channels, the first of which, up
// to 512, are the values.
//
// Runs with 16-bit keys wider than 256 channels, for calls of one query position without q_lens, window, soft cap or partials, of up to 32
// rows a list; and of more rows where mla64 cannot run: src/ops/attention/device/choose.rs. Bytes: each token once, 2 · D.
//
// A CTA takes tiles r, r + ctas, … of a list. Its ring has five slots of two tiles each. A token is one bulk copy, wherever it lies; each warp
// requests four tokens of every slot. A step is two slots:
//
//   warp w ── S [16 rows × 8 tokens] = Q · Kᵀ of its tokens, Q in registers ── maxima of all warps ── weights, for all warps
//          ── O [16 rows × 64 channels] += P [16 × 64 tokens] · V of its channels
//
// Then states join, 32 KiB from each CTA. The CTAs of a cluster send each other slices of the channels, and barriers count the bytes; slices of
// several clusters join through scratch, in the CTA that ends last.
//
// How a row's tokens are split depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention/early_reads.cuh"
#include "attention/mma.cuh"
#include "common/barrier.cuh"

constexpr uint32 MLA16_ROWS = 16, MLA16_SLOTS = 5;
constexpr uint32 SLOT_TOKENS = 2 * TILE, STEP_SLOTS = 2, STEP_TILES = 4;
constexpr uint32 KEY_CHANNELS = 576, WARP_CHANNELS = 64;
constexpr uint32 MLA16_PITCH = KEY_CHANNELS * 2 + 16;  // an odd number of 16 bytes, so that eight rows hit different banks
constexpr uint32 SLOT_BYTES = SLOT_TOKENS * MLA16_PITCH;
// Shared memory: the ring, the weights of a step, queries. Slices that CTAs send take the place of the queries.
constexpr uint32 WEIGHTS_OFFSET = MLA16_SLOTS * SLOT_BYTES, QUERIES_OFFSET = WEIGHTS_OFFSET + STEP_TILES * WARP * sizeof(uint4);

__device__ inline void write_zeros(char *row, uint32 begin, uint32 end) {
    for (uint32 at = begin + threadIdx.x % WARP * 16; at < end; at += WARP * 16) *reinterpret_cast<uint4 *>(row + at) = uint4{0, 0, 0, 0};
}

struct Mla16Shared {
    Barrier full[MLA16_SLOTS], queries, sent;
    alignas(16) float top[MLA16_ROWS][WARPS];
    float l[WARPS][MLA16_ROWS];
    alignas(8) uint8 there[MLA16_SLOTS][WARPS];  // bits of the tokens that a warp has requested
    bool is_last;
};

// Finds tokens and requests them. A warp requests four tokens of each slot. Slots form groups, of which each lane finds one token: group 0 is
// the ring as it starts, later groups have eight slots each.
struct Mla16Source {
    static constexpr uint32 GROUP = 8, TOKENS = SLOT_TOKENS / WARPS;

    const AttentionParams &p;
    const WorkItem &item;
    Mla16Shared &s;
    char *shared;
    uint32 rank, lane, warp, row, group = 0;
    Reach reach;
    uint32 entries, slots;
    // What this lane has: its token of the current group; the place of its token of the next group, whose page may still be on its way; and what
    // the list says of its token of the group after that.
    const char *token;
    bool is_there;
    Place next;
    Listed listed;

    __device__ Mla16Source(const AttentionParams &p, const WorkItem &item, Mla16Shared &s, char *shared, uint32 rank)
        : p(p), item(item), s(s), shared(shared), rank(rank), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP),
          row(warp * TOKENS + lane % TOKENS) {}

    // The slot of the lane's token of a group, and the token's number along the list.
    __device__ uint32 slot_of(uint32 group) const { return (group ? MLA16_SLOTS + (group - 1) * GROUP : 0) + lane / TOKENS; }
    __device__ uint32 number(uint32 group) const {
        return ((slot_of(group) * 2 + row / TILE) * p.ctas.value + rank) * TILE + row % TILE;
    }
    // Addresses that are known before the wait for the previous kernel: list entries of the first two groups, and the warp's two rows of queries,
    // of which a lane requests one.
    struct Start {
        static constexpr uint32 ROWS = MLA16_ROWS / WARPS;
        Entry first, second;
        Lengths lengths;
        const char *query = nullptr;
        uint32 rows, to;  // rows of queries, and where in shared memory they go

        __device__ Start(const Mla16Source &own)
            : first(own.p, own.item, own.number(0)), second(own.p, own.item, own.number(1)), lengths(own.p, own.item) {
            const AttentionParams &p = own.p;
            const uint32 begin = own.warp * ROWS;
            char *const place = own.shared + QUERIES_OFFSET + begin * MLA16_PITCH;
            rows = min(max(int32(rows_of(p, own.item) - begin), 0), ROWS);
            for (uint32 row = rows; row < ROWS; row++) write_zeros(place + row * MLA16_PITCH, 0, p.dim * 2);
            const auto [position, head] = place_of_row(p, own.item, first_row(p, own.item) + begin + own.lane);
            if (own.lane < rows) query = p.q.at(own.item.seq, position, head);
            to = shared_address(place) + own.lane * MLA16_PITCH;
            pin_address(query);
            prefetch_lists(p, own.item, own.warp, first, lengths);
        }
    };
    // The first phase: reads list and lengths, requests queries, finds the tokens of two groups and requests the first.
    __device__ void open(const Start &start) {
        const Listed first = start.first.read(p), second = start.second.read(p);
        start.lengths.read(p, item, reach, entries);
        if (lane == 0) s.queries.expect(start.rows * p.dim * 2);
        __syncwarp();
        if (start.query) copy_bulk(start.to, start.query, p.dim * 2, s.queries);
        __syncwarp();
        const Place own = find(0, first);
        const uint32 tiles = units_of(p, reach, entries);
        slots = tiles > rank ? p.ctas.divide(tiles - rank - 1) / 2 + 1 : 0;
        next = find(1, second);
        take(own);
        fill(0, MLA16_SLOTS);
        listed = ::listed(p, item, number(2));
    }
    // Finds the lane's token of a group, as place_of() does. The page table's entry is requested and not waited for.
    __device__ Place find(uint32 group, const Listed &listed) const {
        const uint32 x = number(group), e = p.block.divide(x);
        const int64 position = p.ids.data ? int64(listed.id) * p.block.value + (x - e * p.block.value) : x;
        const bool is_listed = !p.ids.data || (e < entries && listed.id >= 0 && listed.id != listed.previous);
        const bool is_there = is_listed && position < reach.end, is_in_table = is_there && p.table.data && !p.slots.data;
        const int32 at = is_there ? int32(position) : 0, page = p.page.divide(at);
        Place place{is_there ? at : -1, p.slots.data ? listed.slot : int32(item.seq), at};
        if (p.slots.data || p.table.data) place.row -= page * int32(p.page.value);
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "setp.ne.u32 p, %2, 0;\n\t"
                     "@p ld.global.b32 %0, [%1];\n\t}"
                     : "+r"(place.page) : "l"(p.table.at(item.seq, page)), "r"(uint32(is_in_table)) : "memory");
        return place;
    }
    __device__ void take(const Place &place) {
        token = p.k.at(place.page, place.row, item.head);
        is_there = place.position >= 0 && uint32(place.page) < p.pages;
    }
    // Requests the slots of a step once it is done, in the order of the ring. What a later group needs is requested long before.
    __device__ void refill(uint32 slot) {
        const uint32 within = (slot - MLA16_SLOTS) % GROUP;
        if (within == 0) take(next), group++;
        fill(slot, STEP_SLOTS);
        if (within != GROUP / 2) return;
        next = find(group + 1, listed);
        listed = ::listed(p, item, number(group + 2));
    }
    // Requests the warp's tokens of `count` slots of the group from `slot` on.
    __device__ void fill(uint32 slot, uint32 count) const {
        const uint32 own = slot_of(group), at = own % MLA16_SLOTS, to = at * SLOT_BYTES + row * MLA16_PITCH;
        const bool is_requested = own - slot < count && own < slots;
        const uint32 there = __ballot_sync(FULL_WARP, is_requested && is_there), load_word = __ballot_sync(FULL_WARP, is_requested);
        // A token that is not there becomes zeros: NaN would stay NaN under a weight of zero.
        if (there != load_word) {
            for (uint32 rest = load_word & ~there; rest; rest &= rest - 1)
                write_zeros(shared + __shfl_sync(FULL_WARP, to, __ffs(rest) - 1), 0, p.dim * 2);
            fence_copies();
            __syncwarp();
        }
        if (is_requested && lane % TOKENS == 0) {
            const uint32 of_slot = there >> lane & ((1 << TOKENS) - 1);
            s.there[at][warp] = of_slot;
            s.full[at].expect(__popc(of_slot) * p.dim * 2);
        }
        __syncwarp();
        if (is_requested && is_there) copy_bulk(shared_address(shared) + to, token, p.dim * 2, s.full[at]);
    }
};

// A warp's products and softmax. A lane has rows lane / 4 and lane / 4 + 8, and two neighbouring columns of each eight.
template <typename Type>
struct Mla16Compute {
    static constexpr uint32 K_STEPS = KEY_CHANNELS / 16, CHANNEL_GROUPS = WARP_CHANNELS / 8, AHEAD = 3;

    const AttentionParams &p;
    Mla16Shared &s;
    char *shared;
    uint32 lane, warp;
    uint32 query[K_STEPS][4];
    float acc[CHANNEL_GROUPS][4] = {}, m[2], l[2];

    __device__ Mla16Compute(const AttentionParams &p, Mla16Shared &s, char *shared)
        : p(p), s(s), shared(shared), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), m{minus_infinity(), minus_infinity()}, l{} {}

    // The address that a lane gives to ldmatrix for 16 rows and 32 bytes, in the order of an operand of m16n8k16.
    __device__ uint32 place(uint32 rows) const { return rows + (lane % 8 + lane / 8 % 2 * 8) * MLA16_PITCH + lane / 16 * 16; }

    __device__ void queries_to_registers() {
        const uint32 from = place(shared_address(shared + QUERIES_OFFSET));
#pragma unroll
        for (uint32 k = 0; k < K_STEPS; k++) load_matrices(query[k], from + k * 32);
    }
    // Scores of all rows with the warp's eight tokens of the slot.
    __device__ void multiply(float (&c)[4], uint32 at) const {
        const uint32 keys = shared_address(shared + at * SLOT_BYTES) + (warp % 4 * 8 + lane % 8) * MLA16_PITCH + lane / 8 * 16;
        float sum[4][4] = {};
        // AHEAD − 1 loads are under way.
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
    // The running softmax: scores of a step's tokens become weights, in shared memory.
    __device__ void update_softmax(float (&c)[4]) {
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
            // −∞ times a factor that is too small for float32 would be NaN.
#pragma unroll
            for (uint32 e = i * 2; e < i * 2 + 2; e++) c[e] = c[e] == minus_infinity() ? 0.0f : exp2_fast(fmaf(c[e], factor, -shift));
            l[i] = l[i] * keep[i] + c[i * 2] + c[i * 2 + 1];
        }
        uint2 *const weights = reinterpret_cast<uint2 *>(shared + WEIGHTS_OFFSET);
        weights[(warp / 2 * WARP + lane) * 2 + warp % 2] = {Type::pack(c[0], c[1]), Type::pack(c[2], c[3])};
        __syncthreads();
        if (__all_sync(FULL_WARP, keep[0] == 1.0f && keep[1] == 1.0f)) return;
#pragma unroll
        for (uint32 n = 0; n < CHANNEL_GROUPS * 4; n++) acc[n / 4][n % 4] *= keep[n / 2 % 2];
    }
    // Adds the values of a step's slots by their weights, in the warp's channels: 16 tokens and 32 channels at a time, while the next are loaded.
    template <uint32 SLOTS>
    __device__ void add_values(uint32 slot) {
        constexpr uint32 PARTS = SLOTS * SLOT_TOKENS / TILE * 2;
        uint32 value[2][2][4];
        uint4 weights[2];
        const auto load = [&](uint32 part) {
            const uint32 at = (slot + part / 4) % MLA16_SLOTS;
            const char *const tile = shared + at * SLOT_BYTES + part / 2 % 2 * TILE * MLA16_PITCH;
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
    // The second phase: streams the ring. `source` has requested the queries and the first slots.
    __device__ void run(Mla16Source &source) {
        s.queries.wait(0);
        queries_to_registers();
#pragma unroll 1
        for (uint32 slot = 0; slot < source.slots; slot += STEP_SLOTS) {
            const uint32 own = slot + warp / 4;
            float c[4] = {minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity()};
            if (own < source.slots) {
                s.full[own % MLA16_SLOTS].wait(own / MLA16_SLOTS);
                multiply(c, own % MLA16_SLOTS);
            }
            update_softmax(c);
            // Queries are in registers: other CTAs may send states to their place.
            if (slot == 0) arrive_started();
            const uint32 other = slot + 1 - warp / 4;
            if (other < source.slots) s.full[other % MLA16_SLOTS].wait(other / MLA16_SLOTS);
            if (slot + 1 < source.slots) add_values<2>(slot);
            else add_values<1>(slot);
            if (slot + MLA16_SLOTS >= source.slots) continue;
            __syncthreads();
            source.refill(slot + MLA16_SLOTS);
        }
        if (source.slots == 0) arrive_started();
    }
    // Arrives at the cluster's barrier, whose second half precedes the sending of states.
    __device__ static void arrive_started() {
        if (cluster_ctas() > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
};

// The last phases: how the CTAs of a list join. Each CTA of a cluster joins one slice, 2^log_share channel groups (of 8 channels) of all rows,
// which the others send as their lanes keep it: of each channel group a lane has two channels of rows lane / 4 and lane / 4 + 8. m and l go
// with it.
struct Mla16Join {
    static constexpr uint32 AT_ONCE = 8;       // states whose loads are under way together
    static constexpr uint32 CLUSTER_CTAS = 8;  // at most; 1, 2, 4 or 8
    static constexpr uint32 SUMS = 8;          // float4 of m and l: m of rows r and r + 8, then l of both
    static constexpr uint32 ALL_CHANNEL_GROUPS = 64, SENT_BYTES = ALL_CHANNEL_GROUPS * WARP * sizeof(float4);
    static constexpr uint32 OWN_CHANNEL_GROUPS = ALL_CHANNEL_GROUPS / WARPS;  // of a warp of a CTA that is alone

    const AttentionParams &p;
    Mla16Shared &s;
    uint32 lane, warp, number, ctas, rank, clusters, cluster;  // the list's number; CTAs of a cluster; clusters of the list, and this one's place among them
    uint32 log_share, slice;                                   // slice: float4 that a slice has
    float4 *slices, *sums;                                     // what CTAs of the cluster have sent

    __device__ Mla16Join(const AttentionParams &p, Mla16Shared &s, char *shared, uint32 number, uint32 list_rank)
        : p(p), s(s), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), number(number), ctas(cluster_ctas()), rank(cluster_rank()),
          log_share(p.log_share), slice(WARP << p.log_share), slices(reinterpret_cast<float4 *>(shared + QUERIES_OFFSET)),
          sums(slices + ALL_CHANNEL_GROUPS * WARP) {
        const uint32 log_ctas = log2_of(ctas);
        clusters = p.ctas.value >> log_ctas;
        cluster = list_rank >> log_ctas;
    }
    // One thread opens the barrier early. A CTA is not sent its own part of its slice.
    __device__ static void open(Mla16Shared &s) {
        const uint32 ctas = cluster_ctas();
        s.sent.open(1);
        s.sent.expect(SENT_BYTES - (SENT_BYTES >> log2_of(ctas)) + ctas * SUMS * sizeof(float4));
    }

    // Sends to an address of a CTA of the cluster, whose barrier `sent` counts the bytes.
    __device__ static void send(uint32 to, uint32 sent, const float4 &x) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x.x),
                     "f"(x.y), "f"(x.z), "f"(x.w), "r"(sent) : "memory");
    }
    template <typename Type>
    __device__ void exchange(const Mla16Compute<Type> &compute) const {
        // Every warp of the cluster has its queries in registers, whose place the slices take.
        if (ctas > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        else __syncthreads();
        // A warp's channel groups belong to one slice: in a cluster of eight, a slice is eight groups.
        const uint32 begin = warp * Mla16Compute<Type>::CHANNEL_GROUPS, to = begin >> log_share;
        float4 *const own = slices + rank * slice + (begin - (to << log_share)) * WARP + lane;
        if (to == rank) {
#pragma unroll
            for (uint32 j = 0; j < Mla16Compute<Type>::CHANNEL_GROUPS; j++) {
                const float(&x)[4] = compute.acc[j];
                own[j * WARP] = {x[0], x[1], x[2], x[3]};
            }
        } else {
            const uint32 there = address_in(to, own), sent = address_in(to, &s.sent);
#pragma unroll
            for (uint32 j = 0; j < Mla16Compute<Type>::CHANNEL_GROUPS; j++) {
                const float(&x)[4] = compute.acc[j];
                send(there + j * uint32(WARP * sizeof(float4)), sent, {x[0], x[1], x[2], x[3]});
            }
        }
        // Meanwhile the warps' l are added up. Warp w sends them to CTA w; a lane sends m and l of two rows.
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float l = compute.l[i];
            l += __shfl_xor_sync(FULL_WARP, l, 1);
            l += __shfl_xor_sync(FULL_WARP, l, 2);
            if (lane % 4 == 0) s.l[warp][lane / 4 + i * 8] = l;
        }
        __syncthreads();
        if (warp < ctas && lane % 4 == 0) {
            float l[2] = {};
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) l[0] += s.l[w][lane / 4], l[1] += s.l[w][lane / 4 + 8];
            const float4 x = {compute.m[0], compute.m[1], l[0], l[1]};
            float4 *const own_sums = sums + rank * SUMS + lane / 4;
            if (ctas == 1) *own_sums = x;
            else send(address_in(warp, own_sums), address_in(warp, &s.sent), x);
        }
    }
    __device__ void wait() const {
        if (ctas > 1) s.sent.wait(0);
        else __syncthreads();
    }

    // Where a lane's results go. Computed while states are under way, and kept in registers.
    struct Target {
        char *to[2];  // the lane's first channel of rows r and r + 8
        uint32 exists[2], channel_groups, is_packed, is_float16;
    };
    __device__ Target target(const WorkItem &item) const {
        Target t;
        // Packed: two neighbouring channels of `out` are one word, and no other output has channels.
        t.is_packed = pin_in_register(uint32(p.out.data && p.out_type != FLOAT32 && p.out.step[3] == 2 && !p.state.acc.data &&
                                 (uint64(p.out.data) | p.out.step[0] | p.out.step[1] | p.out.step[2]) % 4 == 0));
        t.is_float16 = pin_in_register(uint32(p.out_type == FLOAT16));
        t.channel_groups = pin_in_register(owned());
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const RowPlace place = this->place(item, i);
            t.exists[i] = pin_in_register(uint32(lane / 4 + i * 8 < rows_of(p, item)));
            t.to[i] = p.out.at(item.seq, place.position, place.head, channel(0));
            pin_address(t.to[i]);
        }
        return t;
    }
    __device__ uint32 row(const WorkItem &item, uint32 i) const { return first_row(p, item) + lane / 4 + i * 8; }
    __device__ RowPlace place(const WorkItem &item, uint32 i) const { return place_of_row(p, item, row(item, i)); }
    __device__ uint32 channel(uint32 channel_group) const { return ((rank << log_share) + channel_group) * 8 + lane % 4 * 2; }
    // Channel groups of the slice that have values. A warp writes groups n, n + WARPS, …
    __device__ uint32 owned() const { return min(max(int32(p.value_dim / 8) - int32(rank << log_share), 0), 1 << log_share); }

    // 1 / l of the lane's rows, sinks included; l of rows that do not exist is 0.
    __device__ float2 norm(const WorkItem &item, const Target &t, const float4 &sums) const {
        if (p.sinks.data)
            return {t.exists[0] ? norm_of(p, place(item, 0).head, sums.x, sums.z) : 0.0f,
                    t.exists[1] ? norm_of(p, place(item, 1).head, sums.y, sums.w) : 0.0f};
        return {sums.z == 0.0f ? 0.0f : 1.0f / sums.z, sums.w == 0.0f ? 0.0f : 1.0f / sums.w};
    }
    __device__ static void store_if(bool exists, char *to, uint32 x) {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "setp.ne.u32 p, %2, 0;\n\t"
                     "@p st.global.b32 [%0], %1;\n\t}" ::"l"(to), "r"(x), "r"(uint32(exists)) : "memory");
    }
    __device__ void write(const Target &t, const float2 &norm, uint32 channel_group, const float4 &acc) const {
        const float low[2] = {acc.x * norm.x, acc.y * norm.x}, high[2] = {acc.z * norm.y, acc.w * norm.y};
        const auto pack = [&](const float (&x)[2]) { return t.is_float16 ? Float16::pack(x[0], x[1]) : Bfloat16::pack(x[0], x[1]); };
        store_if(t.exists[0], t.to[0] + channel_group * 16, pack(low));
        store_if(t.exists[1], t.to[1] + channel_group * 16, pack(high));
    }
    // Results that are not packed are left in shared memory, where the lane has them from.
    __device__ void leave_in_shared(uint32 channel_group, const float4 &acc) const { slices[channel_group * WARP + lane] = acc; }
    // Writes what write() has not: results that are not packed; else m, l and lse of the rows.
    __device__ void write_rest(const WorkItem &item, const Target &t, const float4 &sums) const {
        const float m[2] = {sums.x, sums.y}, l[2] = {sums.z, sums.w};
        if (t.is_packed) {
            if (rank || warp || lane % 4) return;
#pragma unroll
            for (uint32 i = 0; i < 2; i++)
                if (t.exists[i]) write_state(p, item, place(item, i), 0, {}, m[i], l[i]);
            return;
        }
#pragma unroll 1
        for (uint32 channel_group = warp; channel_group < t.channel_groups; channel_group += WARPS) {
            const float4 x = slices[channel_group * WARP + lane];
            const float2 acc[2] = {{x.x, x.y}, {x.z, x.w}};
#pragma unroll
            for (uint32 i = 0; i < 2; i++)
                if (t.exists[i]) write_results(p, item, row(item, i), channel(channel_group), acc[i], m[i], l[i]);
        }
    }

    // Joins the states of the cluster's CTAs, in their order, for channel groups warp, warp + WARPS, … of the slice. Returns m and l of the lane's
    // rows. All loads precede all arithmetic.
    template <uint32 CTAS>
    __device__ float4 join_cluster(float4 (&acc)[OWN_CHANNEL_GROUPS]) const {
        constexpr uint32 CHANNEL_GROUPS = OWN_CHANNEL_GROUPS / CTAS;
        float4 x[CHANNEL_GROUPS][CTAS], one[CTAS], all = {minus_infinity(), minus_infinity(), 0.0f, 0.0f};
#pragma unroll
        for (uint32 n = 0; n < CTAS; n++) one[n] = sums[n * SUMS + lane / 4];
#pragma unroll
        for (uint32 j = 0; j < CHANNEL_GROUPS; j++) {
#pragma unroll
            for (uint32 n = 0; n < CTAS; n++) x[j][n] = slices[(n * CHANNEL_GROUPS + j) * THREADS + threadIdx.x];
        }
#pragma unroll
        for (uint32 n = 0; n < CTAS; n++) all.x = fmaxf(all.x, one[n].x), all.y = fmaxf(all.y, one[n].y);
#pragma unroll
        for (uint32 j = 0; j < CHANNEL_GROUPS; j++) acc[j] = {};
#pragma unroll
        for (uint32 n = 0; n < CTAS; n++) {
            const float low = weight(one[n].x, all.x), high = weight(one[n].y, all.y);
            all.z = fmaf(low, one[n].z, all.z);
            all.w = fmaf(high, one[n].w, all.w);
#pragma unroll
            for (uint32 j = 0; j < CHANNEL_GROUPS; j++) {
                const float4 y = x[j][n], sum = acc[j];
                acc[j] = {fmaf(low, y.x, sum.x), fmaf(low, y.y, sum.y), fmaf(high, y.z, sum.z), fmaf(high, y.w, sum.w)};
            }
        }
        return all;
    }

    // Two channels of two rows, and m and l of these rows.
    struct Part {
        float4 acc, sums;
    };
    // Loads from scratch if `is_there`. A predicate, not a branch: loads in branches wait for each other.
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
    // Where scratch has the lane's part of the first AT_ONCE states.
    struct Stored {
        const float4 *acc[AT_ONCE], *sums[AT_ONCE];
    };
    // Requests AT_ONCE states from `begin` on.
    __device__ void request(Part (&one)[AT_ONCE], const Stored &at, uint32 begin, uint32 record, bool exists) const {
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) {
            one[n] = empty();
            load_if(exists && begin + n < clusters, one[n], at.acc[n] + begin * record, at.sums[n] + begin * record);
        }
    }
    // Joins the states of all clusters, in their order. The first AT_ONCE are requested.
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
            request(one, at, begin, record, true);
        }
    }
    // Raises the maxima of a sum; adds a state whose maxima are no higher.
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
    __device__ void for_channel_groups(const Target &t, const float4 (&acc)[OWN_CHANNEL_GROUPS], const Each &for_each_channel) const {
#pragma unroll
        for (uint32 j = 0; j < OWN_CHANNEL_GROUPS; j++) {
            if (warp + j * WARPS >= t.channel_groups) return;
            for_each_channel(warp + j * WARPS, acc[j]);
        }
    }
    __device__ void join(const WorkItem &item) const {
        const Target t = target(item);
        const uint32 record = slice + SUMS;
        float4 *const stored = reinterpret_cast<float4 *>(p.scratch) + uint64((number * ctas + rank) * clusters) * record;
        wait();
        float4 acc[OWN_CHANNEL_GROUPS];
        const float4 all = ctas > 4   ? join_cluster<8>(acc)
                           : ctas > 2 ? join_cluster<4>(acc)
                           : ctas > 1 ? join_cluster<2>(acc)
                                      : join_cluster<1>(acc);
        if (clusters > 1) {
            float4 *const to = stored + cluster * record;
            if (warp == 0 && lane % 4 == 0) __stcg(to + slice + lane / 4, all);
            for_channel_groups(t, acc, [&](uint32 channel_group, const float4 &x) { __stcg(to + channel_group * WARP + lane, x); });
            join_clusters(item, t, stored, record);
            return;
        }
        if (t.is_packed) {
            const float2 norm = this->norm(item, t, all);
            for_channel_groups(t, acc, [&](uint32 channel_group, const float4 &x) { write(t, norm, channel_group, x); });
        } else {
            for_channel_groups(t, acc, [&](uint32 channel_group, const float4 &x) { leave_in_shared(channel_group, x); });
        }
        write_rest(item, t, all);
    }
    // Joins what the clusters have left in scratch, in the CTA that ends last.
    __device__ void join_clusters(const WorkItem &item, const Target &t, const float4 *stored, uint32 record) const {
        Stored at;
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) {
            at.acc[n] = stored + n * record + warp * WARP + lane;
            at.sums[n] = stored + n * record + slice + lane / 4;
            pin_address(at.acc[n]);
            pin_address(at.sums[n]);
        }
        if (!is_last()) return;
        Part one[AT_ONCE];
        float4 all = {};
        request(one, at, 0, record, warp < t.channel_groups);
#pragma unroll 1
        for (uint32 channel_group = warp; channel_group < t.channel_groups; channel_group += WARPS) {
            const Part sum = joined(one, at, record);
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) at.acc[n] += WARPS * WARP;
            if (channel_group + WARPS < t.channel_groups) request(one, at, 0, record, true);
            all = sum.sums;
            if (t.is_packed) write(t, norm(item, t, all), channel_group, sum.acc);
            else leave_in_shared(channel_group, sum.acc);
        }
        write_rest(item, t, all);
    }
    // Counts this cluster as done with the slice; true in the last of the list.
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
__device__ inline void attention_mla16(const AttentionParams &p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Mla16Shared s;
    __shared__ uint32 words[WARP];
    request_parameters(p, words);
    const uint32 number = p.ctas.divide(blockIdx.x), rank = blockIdx.x - number * p.ctas.value, warp = threadIdx.x / WARP;
    const WorkItem item = work_item_of(p, number);
    if (threadIdx.x == 0) {
        for (uint32 n = 0; n < MLA16_SLOTS; n++) s.full[n].open(WARPS);
        s.queries.open(WARPS);
        Mla16Join::open(s);
    }
    // Zeros in the channels of keys and queries that no copy writes.
    for (uint32 row = warp; p.dim < KEY_CHANNELS && row < MLA16_SLOTS * SLOT_TOKENS + MLA16_ROWS; row += WARPS) {
        const uint32 at = row * MLA16_PITCH + (row < MLA16_SLOTS * SLOT_TOKENS ? 0 : QUERIES_OFFSET - WEIGHTS_OFFSET);
        write_zeros(shared + at, p.dim * 2, KEY_CHANNELS * 2);
    }
    Mla16Source source(p, item, s, shared, rank);
    const Mla16Source::Start start(source);
    __syncthreads();
    allow_next_kernel();
    wait_for_previous_kernel();
    source.open(start);
    Mla16Compute<Type> compute(p, s, shared);
    compute.run(source);
    const Mla16Join join(p, s, shared, number, rank);
    join.exchange(compute);
    join.join(item);
}

#define MLA16_KERNEL(name, ...)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention_mla16<__VA_ARGS__>(p); }
