// Attention to latents (multi-head latent attention) for 64 rows at a time (variant mla64), by matrix products of warpgroups (wgmma): keys of up
// to 576 channels, the first of which, up to 512, are the values.
//
// Runs for the calls of mla16.cuh that have more than 32 rows a list, on compute capability 9.0 itself: src/ops/attention/device/choose.rs.
//
// A CTA takes tiles r, r + ctas, … of 64 tokens of a list. Its ring has two tiles, in quarters of 32 tokens that are filled and freed one by
// one. Each warpgroup does one thing:
//
//   source   a warp ── one quarter of the ring: 32 tokens, wherever they lie ── what comes into it next, into the L2 cache
//   weights  S [64 × 64 tokens] = Q · Kᵀ ── running softmax ── P [64 × 64], in shared memory
//   values   two warpgroups ── O [64 × 256 channels] += P · V
//
// so that the tensor cores multiply the weights of one tile while the scores of the next become weights. Maxima lag: a row is scaled anew only
// where its maximum has grown by more than 2^LEAP, and at the end.
//
// Where several CTAs take a list, each leaves its state in scratch, and the kernel join_mla64 joins them.
//
//   Work of a tile: 64 · 64 · (576 + 512) products, 2200 cycles of a multiprocessor. Shared memory delivers about as fast.
//
// How a row's tokens are split depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention/early_reads.cuh"
#include "attention/mma.cuh"
#include "common/warpgroup.cuh"

constexpr uint32 GROUP_THREADS = 4 * WARP, MLA64_THREADS = 4 * GROUP_THREADS;
constexpr uint32 MLA64_ROWS = 64, MLA64_TOKENS = 64;  // rows of a work item; tokens of a tile
constexpr uint32 QUARTERS = 4, QUARTER_TOKENS = 32, RING_TOKENS = QUARTERS * QUARTER_TOKENS;
constexpr uint32 MLA64_VALUES = 512, OWN_VALUES = MLA64_VALUES / 2;
constexpr uint32 SLABS = 9;  // of 64 channels: all 576
constexpr uint32 RING_SLAB = RING_TOKENS * SLAB_WIDTH, QUERY_SLAB = MLA64_ROWS * SLAB_WIDTH;
// Shared memory: the ring, queries, the weights of a tile.
constexpr uint32 MLA64_QUERIES_OFFSET = SLABS * RING_SLAB, MLA64_WEIGHTS_OFFSET = MLA64_QUERIES_OFFSET + SLABS * QUERY_SLAB;
// Bytes from one row of results to the next, in the place of the ring: eight rows hit different banks.
constexpr uint32 RESULT_PITCH = MLA64_VALUES * 2 + 16;
static_assert(MLA64_ROWS * MLA64_VALUES * sizeof(float) <= MLA64_QUERIES_OFFSET);
constexpr float LEAP = 8.0f;

struct Mla64Shared {
    Barrier full[QUARTERS], empty[QUARTERS], weighed, used;  // weighed: weights are written; used: they have been read
    uint32 there[QUARTERS];                                  // bits of the tokens that are there
    float keep[MLA64_ROWS];                                  // the factor of the sums so far, before a tile is added
    float last[MLA64_ROWS];                                  // the factor of the sums at the end
    float m[MLA64_ROWS], l[MLA64_ROWS], norm[MLA64_ROWS];    // of each row, at the end
};

// The state of a CTA in scratch, as its threads keep it: for each channel group (8 channels) and 16 rows, a lane's two channels of two rows; then
// m and l [64].
struct Mla64State {
    float *data;

    __device__ Mla64State(const AttentionParams &p, uint32 n)
        : data(reinterpret_cast<float *>(p.scratch) + uint64(n) * (MLA64_ROWS * (MLA64_VALUES + 2))) {}
    __device__ float4 *acc(uint32 channel_group, uint32 rows) const {
        return reinterpret_cast<float4 *>(data) + (channel_group * 4 + rows) * WARP + threadIdx.x % WARP;
    }
    __device__ float *m(uint32 row) const { return data + MLA64_ROWS * MLA64_VALUES + row; }
    __device__ float *l(uint32 row) const { return m(row) + MLA64_ROWS; }
};

// Whether rows of `out` are runs of 16-byte units of a 16-bit type.
__device__ inline bool is_packed_out(const AttentionParams &p) {
    const bool is_aligned = (uint64(p.out.data) | p.out.step[0] | p.out.step[1] | p.out.step[2]) % 16 == 0;
    return p.out.data && p.out_type != FLOAT32 && p.out.step[3] == 2 && is_aligned;
}

// Transposes four words of four lanes: word n of lane q becomes word q of lane n.
__device__ inline void transpose_four(uint32 (&word)[4]) {
    const bool second = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (uint32 n = 0; n < 2; n++) {
        const uint32 other = __shfl_xor_sync(FULL_WARP, upper ? word[n] : word[n + 2], 2);
        (upper ? word[n] : word[n + 2]) = other;
    }
#pragma unroll
    for (uint32 n = 0; n < 4; n += 2) {
        const uint32 other = __shfl_xor_sync(FULL_WARP, second ? word[n] : word[n + 1], 1);
        (second ? word[n] : word[n + 1]) = other;
    }
}

// What every thread of a CTA knows.
struct Mla64Job {
    const AttentionParams &p;
    const WorkItem &item;
    Mla64Shared &s;
    char *shared;
    uint32 rank, lane, warp;  // warp: within the warpgroup

    // Copies a lane's part of four rows: 16 bytes of each slab of one row.
    __device__ void copy_four(char *to, uint32 slab_step, uint32 row, const char *from, bool is_there) const {
        const uint32 at = shared_address(to) + place_in_slab(row, lane % 8), begin = lane % 8 * 16;
#pragma unroll
        for (uint32 n = 0; n < SLABS; n++)
            copy_16(at + n * slab_step, from + n * SLAB_WIDTH + begin, is_there && n * SLAB_WIDTH + begin < p.dim * 2);
    }
    // Tiles of this CTA.
    __device__ uint32 tiles(const Reach &reach, uint32 entries) const {
        const uint32 all = (units_of(p, reach, entries) + MLA64_TOKENS / TILE - 1) / (MLA64_TOKENS / TILE);
        return all > rank ? p.ctas.divide(all - rank - 1) + 1 : 0;
    }
    __device__ uint32 tiles() const { return tiles(Reach::load(p, item), count_of(p, item)); }
    // Arrives for the warp, once all its lanes have come here.
    __device__ void arrive(const Barrier &barrier) const {
        __syncwarp();
        if (lane == 0) barrier.expect(0);
    }
};

// A warp of the source: it fills one quarter of the ring, a token a lane.
struct Mla64Source : Mla64Job {
    struct Token {
        const char *from;
        bool is_there;
    };
    Reach reach;
    uint32 entries;

    // The lane's token of a quarter, counted along the list.
    __device__ uint32 number(uint32 quarter) const {
        return (quarter / 2 * p.ctas.value + rank) * MLA64_TOKENS + quarter % 2 * QUARTER_TOKENS + lane;
    }
    __device__ Token find(uint32 quarter, const Listed &listed) const {
        const Place place = place_of(p, item, reach, entries, number(quarter), listed);
        const bool is_there = place.position >= 0;
        return {is_there ? p.k.at(place.page, place.row, item.head) : p.k.data, is_there};
    }
    // Slabs are so far apart that every destination is a constant away from one of two addresses: copies follow each other without arithmetic.
    __device__ void fill(const Token &token) const {
        const uint32 there = __ballot_sync(FULL_WARP, token.is_there);
        if (lane == 0) s.there[warp] = there;
        const uint32 begin = lane % 8 * 16, slabs = p.dim * 2 > begin ? (p.dim * 2 - begin + SLAB_WIDTH - 1) / SLAB_WIDTH : 0;
        const uint32 row = warp * QUARTER_TOKENS + lane / 8, to = shared_address(shared);
        const uint32 at[2] = {to + place_in_slab(row, lane % 8), to + place_in_slab(row + 4, lane % 8)};
#pragma unroll
        for (uint32 n = 0; n < QUARTER_TOKENS / 4; n++) {
            const uint32 t = n * 4 + lane / 8;
            const char *const from = reinterpret_cast<const char *>(__shfl_sync(FULL_WARP, uint64(token.from), t)) + begin;
            // A token that is not there becomes zeros: NaN would stay NaN under a weight of zero.
            const uint32 own = there >> t & 1 ? slabs : 0;
#pragma unroll
            for (uint32 i = 0; i < SLABS; i++)
                copy_16(at[n % 2] + (n / 2 * 8 * SLAB_WIDTH + i * RING_SLAB), from + i * SLAB_WIDTH, i < own);
        }
        end_copies();
    }
    // Asks the L2 cache for a quarter: one request for tokens that lie one after the other.
    __device__ void prefetch_first_reads(const Token &token) const {
        const uint32 bytes = p.dim * 2;
        const uint64 before = __shfl_up_sync(FULL_WARP, uint64(token.from), 1);
        const uint32 there = __ballot_sync(FULL_WARP, token.is_there);
        const bool begins = lane == 0 || !(there >> (lane - 1) & 1) || before + bytes != uint64(token.from);
        // The next lane that begins a run, or whose token is not there, ends this lane's run.
        const uint32 ends = (__ballot_sync(FULL_WARP, begins || !token.is_there) >> lane) >> 1, run = ends ? __ffs(ends) : WARP - lane;
        if (begins && token.is_there) prefetch_bulk(token.from, run * bytes);
    }
    __device__ void run() {
        const Entry own(p, item, number(warp)), after(p, item, number(warp + QUARTERS));
        const Lengths lengths(p, item);
        prefetch_lists(p, item, warp, own, lengths);
        wait_for_previous_kernel();
        const Listed first = own.read(p);
        Listed next = after.read(p);
        lengths.read(p, item, reach, entries);
        const uint32 quarters = tiles(reach, entries) * 2;
        Token token = find(warp, first);
#pragma unroll 1
        for (uint32 quarter = warp; quarter < quarters; quarter += QUARTERS) {
            const uint32 turn = quarter / QUARTERS;
            if (turn) s.empty[warp].wait(turn - 1);
            fill(token);
            wait_copies<0>();
            fence_copies();
            arrive(s.full[warp]);
            // The ring is smaller than what has to be under way: while it is read, the L2 cache fetches what follows.
            token = find(quarter + QUARTERS, next);
            prefetch_first_reads(token);
            next = listed(p, item, number(quarter + 2 * QUARTERS));
        }
    }
};

// The warpgroup that turns scores into weights.
template <typename Type, bool IS_BFLOAT16>
struct Mla64Weights : Mla64Job {
    static constexpr uint32 CHANNEL_GROUPS = MLA64_TOKENS / 8;

    float m[2], highest[2], l[2];  // highest: the maximum; m: what weights are relative to

    __device__ uint32 row(uint32 i) const { return warp * 16 + lane / 4 + i * 8; }

    __device__ void load_queries() const {
        const uint32 rows = rows_of(p, item);
#pragma unroll 1
        for (uint32 n = warp * 4; n < MLA64_ROWS; n += 16) {
            const uint32 row = n + lane / 8;
            const bool exists = row < rows;
            const auto [position, head] = place_of_row(p, item, first_row(p, item) + (exists ? row : 0));
            copy_four(shared + MLA64_QUERIES_OFFSET, QUERY_SLAB, row, p.q.at(item.seq, position, head), exists);
        }
        end_copies();
        wait_copies<0>();
        fence_copies();
        sync_some(1, GROUP_THREADS);
    }
    __device__ void multiply_keys(float (&c)[32], uint32 tile) const {
        const uint64 queries = operand(shared_address(shared + MLA64_QUERIES_OFFSET));
        const uint64 keys = operand(shared_address(shared + tile % 2 * MLA64_TOKENS * SLAB_WIDTH));
        begin_products(c);
#pragma unroll
        for (uint32 n = 0; n < SLABS; n++) {
#pragma unroll
            for (uint32 k = 0; k < 4; k++)
                multiply<IS_BFLOAT16>(c, queries + (n * QUERY_SLAB >> 4) + k * ALONG_SLAB, keys + (n * RING_SLAB >> 4) + k * ALONG_SLAB, n + k > 0);
        }
        end_group();
        wait_products<0>(c);
    }
    __device__ void mask(float (&c)[32], uint32 tile) const {
        const uint32 first = tile % 2 * 2, low = s.there[first], high = s.there[first + 1];
        if ((low & high) == FULL_WARP) return;
        const uint32 there[2] = {low >> lane % 4 * 2, high >> lane % 4 * 2};
#pragma unroll
        for (uint32 n = 0; n < 32; n++)
            if (!(there[n / 16] >> (n / 4 % 4 * 8 + n % 2) & 1)) c[n] = minus_infinity();
    }
    // Scores become weights; `keep` is the factor of what has been summed so far.
    __device__ void update_softmax(float (&c)[32], float (&keep)[2]) {
        // Never zero: −∞ times zero would be NaN.
        const float factor = fmaxf(p.scale * LOG2_E, __int_as_float(1));
        float top[2], other[2];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            top[i] = c[i * 2], other[i] = c[i * 2 + 1];
#pragma unroll
            for (uint32 n = i * 2 + 4; n < 32; n += 4) top[i] = fmaxf(top[i], c[n]), other[i] = fmaxf(other[i], c[n + 1]);
            top[i] = fmaxf(top[i], other[i]);
        }
#pragma unroll
        for (uint32 step = 1; step < 4; step *= 2) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], step));
        }
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            highest[i] = fmaxf(highest[i], top[i] * factor);
            const float next = highest[i] > m[i] + LEAP ? highest[i] : m[i], shift = next == minus_infinity() ? 0.0f : next;
            keep[i] = weight(m[i], next);
            m[i] = next;
            float sum = 0.0f;
#pragma unroll
            for (uint32 n = i * 2; n < 32; n += 4) {
#pragma unroll
                for (uint32 e = n; e < n + 2; e++) {
                    c[e] = exp2_fast(fmaf(c[e], factor, -shift));
                    sum += c[e];
                }
            }
            l[i] = l[i] * keep[i] + sum;
        }
    }
    __device__ void leave_weights(const float (&c)[32], const float (&keep)[2]) const {
        char *const weights = shared + MLA64_WEIGHTS_OFFSET + lane % 4 * 4;
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            if (lane % 4 == 0) s.keep[row(i)] = keep[i];
#pragma unroll
            for (uint32 j = 0; j < CHANNEL_GROUPS; j++) as<uint32>(weights + place_in_slab(row(i), j)) = Type::pack(c[j * 4 + i * 2], c[j * 4 + i * 2 + 1]);
        }
        fence_copies();
        arrive(s.weighed);
    }
    // Writes m, l and 1 / l of each row while the last tile's values are summed. States are relative to `highest`.
    __device__ void finish() const {
        const uint32 rows = rows_of(p, item);
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const float keep = weight(m[i], highest[i]);
            float sum = l[i];
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            sum *= keep;
            if (lane % 4) continue;
            s.last[row(i)] = keep;
            s.m[row(i)] = highest[i];
            s.l[row(i)] = sum;
            s.norm[row(i)] = row(i) < rows ? norm_of(p, place_of_row(p, item, first_row(p, item) + row(i)).head, highest[i], sum) : 0.0f;
        }
    }
    __device__ void run() {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) m[i] = highest[i] = minus_infinity(), l[i] = 0.0f;
        const uint32 count = tiles();
        load_queries();
#pragma unroll 1
        for (uint32 tile = 0; tile < count; tile++) {
            float c[32], keep[2];
#pragma unroll
            for (uint32 n = 0; n < 32; n++) c[n] = 0.0f;
            const uint32 first = tile % 2 * 2;
            s.full[first].wait(tile / 2);
            s.full[first + 1].wait(tile / 2);
            multiply_keys(c, tile);
            mask(c, tile);
            update_softmax(c, keep);
            if (tile) s.used.wait(tile - 1);
            leave_weights(c, keep);
        }
        finish();
        sync_some(2, 3 * GROUP_THREADS);
    }
};

// A warpgroup that sums weighed values: the first or the last 256 channels. Both run the same code; code for each was slower.
template <typename Type, bool IS_BFLOAT16>
struct Mla64Values : Mla64Job {
    static constexpr uint32 CHANNEL_GROUPS = OWN_VALUES / 8;

    uint32 half;
    float acc[2][CHANNEL_GROUPS * 2];

    __device__ uint32 row(uint32 i) const { return warp * 16 + lane / 4 + i * 8; }
    // The first of the lane's two channels of a channel group, and those two of row i.
    __device__ uint32 channel(uint32 j) const { return half * OWN_VALUES + j * 8 + lane % 4 * 2; }
    __device__ float2 two(uint32 j, uint32 i) const { return {acc[j / 16][j % 16 * 4 + i * 2], acc[j / 16][j % 16 * 4 + i * 2 + 1]}; }

    __device__ void scale(const float (&of_rows)[MLA64_ROWS]) {
        const float keep[2] = {of_rows[row(0)], of_rows[row(1)]};
        if (__all_sync(FULL_WARP, keep[0] == 1.0f && keep[1] == 1.0f)) return;
#pragma unroll
        for (uint32 n = 0; n < CHANNEL_GROUPS * 4; n++) acc[n / 64][n % 64] *= keep[n / 2 % 2];
    }
    __device__ void add(uint32 tile) {
        const uint64 weights = operand(shared_address(shared + MLA64_WEIGHTS_OFFSET));
        const char *const from = shared + half * (OWN_VALUES / SLAB_ELEMENTS) * RING_SLAB + tile % 2 * MLA64_TOKENS * SLAB_WIDTH;
        const uint64 values = operand(shared_address(from), RING_SLAB);
        const uint32 first = tile % 2 * 2;
        begin_products(acc);
#pragma unroll
        for (uint32 k = 0; k < 4; k++) {
#pragma unroll
            for (uint32 n = 0; n < 2; n++)
                multiply<IS_BFLOAT16>(acc[n], weights + k * ALONG_SLAB, values + n * (2 * RING_SLAB >> 4) + k * ALONG_ROWS);
            if (k % 2) end_group();
        }
        wait_products<1>(acc);
        arrive(s.empty[first]);
        wait_products<0>(acc);
        arrive(s.empty[first + 1]);
        if (lane == 0) s.used.expect(0);
    }
    __device__ void store(const Mla64State &state) const {
#pragma unroll
        for (uint32 j = 0; j < CHANNEL_GROUPS; j++) {
            const float2 low = two(j, 0), high = two(j, 1);
            __stcg(state.acc(half * CHANNEL_GROUPS + j, warp), float4{low.x, low.y, high.x, high.y});
        }
        if (half || lane % 4) return;
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            __stcg(state.m(row(i)), s.m[row(i)]);
            __stcg(state.l(row(i)), s.l[row(i)]);
        }
    }
    // Writes packed results. A warp leaves its 16 rows in shared memory, which is free after the last product; each row is a bulk copy from there.
    __device__ void write_packed() const {
        char *const results = shared + warp * 16 * RESULT_PITCH;
        const float norm[2] = {s.norm[row(0)], s.norm[row(1)]};
#pragma unroll
        for (uint32 n = 0; n < CHANNEL_GROUPS * 2; n++) {
            const float2 x = two(n / 2, n % 2);
            char *const to = results + (lane / 4 + n % 2 * 8) * RESULT_PITCH + channel(n / 2) * 2;
            as<uint32>(to) = pack_out(p, x.x * norm[n % 2], x.y * norm[n % 2]);
        }
        fence_copies();
        __syncwarp();
        const uint32 first = half * OWN_VALUES, own = warp * 16 + lane;
        if (lane >= 16 || own >= rows_of(p, item)) return;
        const RowPlace place = place_of_row(p, item, first_row(p, item) + own);
        if (first < p.value_dim) {
            const char *const from = results + lane * RESULT_PITCH + first * 2;
            char *const to = p.out.at(item.seq, place.position, place.head, first);
            store_bulk(to, shared_address(from), min(p.value_dim - first, OWN_VALUES) * 2);
        }
        if (half == 0) write_state(p, item, place, 0, {}, s.m[own], s.l[own]);
        wait_stores();
    }
    __device__ void write() const {
        if (is_packed_out(p) && !p.state.acc.data) return write_packed();
        float *const results = reinterpret_cast<float *>(shared);
#pragma unroll
        for (uint32 n = 0; n < CHANNEL_GROUPS * 2; n++)
            *reinterpret_cast<float2 *>(results + row(n % 2) * MLA64_VALUES + channel(n / 2)) = two(n / 2, n % 2);
        sync_some(3, 2 * GROUP_THREADS);
        const uint32 rows = rows_of(p, item), of_half = (warp * WARP + lane) * 2 + half * OWN_VALUES;
#pragma unroll 1
        for (uint32 row = 0; row < rows && of_half < p.value_dim; row++) {
            const float2 x = *reinterpret_cast<const float2 *>(results + row * MLA64_VALUES + of_half);
            write_results(p, item, first_row(p, item) + row, of_half, x, s.m[row], s.l[row]);
        }
    }
    __device__ void run(uint32 number) {
#pragma unroll
        for (uint32 n = 0; n < CHANNEL_GROUPS * 4; n++) acc[n / 64][n % 64] = 0.0f;
        const uint32 count = tiles();
#pragma unroll 1
        for (uint32 tile = 0; tile < count; tile++) {
            s.weighed.wait(tile);
            scale(s.keep);
            add(tile);
        }
        sync_some(2, 3 * GROUP_THREADS);
        scale(s.last);
        if (p.ctas.value > 1) store(Mla64State(p, number * p.ctas.value + rank));
        else write();
    }
};

template <typename Type, bool IS_BFLOAT16>
__device__ inline void attention_mla64(const AttentionParams &p) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ Mla64Shared s;
    __shared__ uint32 words[WARP];
    request_parameters(p, words);
    const uint32 number = p.ctas.divide(blockIdx.x), rank = blockIdx.x - number * p.ctas.value, group = threadIdx.x / GROUP_THREADS;
    const WorkItem item = work_item_of(p, number);
    const Mla64Job job{p, item, s, shared, rank, threadIdx.x % WARP, threadIdx.x / WARP % 4};
    if (threadIdx.x == 0) {
        for (uint32 n = 0; n < QUARTERS; n++) {
            s.full[n].open(1);
            s.empty[n].open(8);
        }
        s.weighed.open(4);
        s.used.open(8);
    }
    __syncthreads();
    allow_next_kernel();
    // The 512 threads share the registers for 128 each.
    if (group == 3) {
        give_registers<80>();
        Mla64Source source{job};
        source.run();
    } else if (group == 2) {
        give_registers<96>();
        wait_for_previous_kernel();
        Mla64Weights<Type, IS_BFLOAT16> weights{job};
        weights.run();
    } else {
        take_registers<168>();
        wait_for_previous_kernel();
        Mla64Values<Type, IS_BFLOAT16> values{job, group};
        values.run(number);
    }
}

// The kernel join_mla64 joins the states of a list's CTAs. A CTA joins 16 rows and 32 channels. Each of its warps (parts) adds up every
// parts-th state; then the parts join.
constexpr uint32 PART_THREADS = WARP, MOST_PARTS = 4, MOST_STATES = 64;

__device__ inline void join_mla64_states(const AttentionParams &p) {
    constexpr uint32 AT_ONCE = 4, CHANNEL_GROUPS = 4;  // states and channel groups that a thread loads together
    __shared__ float tops[MOST_STATES][16], totals[MOST_STATES][16];
    __shared__ float4 sums[MOST_PARTS - 1][CHANNEL_GROUPS][PART_THREADS];
    const uint32 number = blockIdx.x / 64, rows = blockIdx.x / 16 % 4, lane = threadIdx.x % WARP, count = p.ctas.value;
    const uint32 parts = blockDim.x / PART_THREADS, part = threadIdx.x / PART_THREADS, thread = threadIdx.x % PART_THREADS;
    const uint32 channel_group = blockIdx.x % 16 * CHANNEL_GROUPS;
    const WorkItem item = work_item_of(p, number);
    const Mla64State first(p, number * count);
    constexpr uint32 PITCH = MLA64_ROWS * (MLA64_VALUES + 2);
    const bool is_packed = is_packed_out(p);
    bool exists[2];
    RowPlace place[2];
    char *to[2];  // a lane writes one of four channel groups
#pragma unroll
    for (uint32 r = 0; r < 2; r++) {
        const uint32 row = rows * 16 + lane / 4 + r * 8;
        exists[r] = row < rows_of(p, item);
        place[r] = place_of_row(p, item, first_row(p, item) + row);
        to[r] = p.out.at(item.seq, place[r].position, place[r].head, (channel_group + lane % 4) * 8);
        pin_address(to[r]);
    }
    // Addresses of what the CTA reads first.
    uint32 own[2];
    const float *own_m[2];
    const float4 *from[AT_ONCE];
#pragma unroll
    for (uint32 i = 0; i < 2; i++) {
        own[i] = min(threadIdx.x + i * blockDim.x, count * 16 - 1);
        own_m[i] = first.m(rows * 16 + own[i] % 16) + uint64(own[i] / 16) * PITCH;
        pin_address(own_m[i]);
    }
#pragma unroll
    for (uint32 i = 0; i < AT_ONCE; i++) {
        from[i] = first.acc(channel_group, rows) + uint64(part + i * parts) * (PITCH / 4);
        pin_address(from[i]);
    }
    allow_next_kernel();
    wait_for_previous_kernel();
    if (rows * 16 >= rows_of(p, item)) return;
    float4 one[AT_ONCE][CHANNEL_GROUPS];
    const auto load = [&](uint32 begin) {
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) {
            const uint32 n = begin + i * parts;
#pragma unroll
            for (uint32 j = 0; j < CHANNEL_GROUPS; j++) {
                one[i][j] = float4{0.0f, 0.0f, 0.0f, 0.0f};
                if (n < count) one[i][j] = __ldcg(from[i] + uint64(begin - part) * (PITCH / 4) + j * (4 * WARP));
            }
        }
    };
    // m and l are requested before acc: mostly two of each a thread.
    const auto leave_weights = [&](uint32 n, float m, float l) { tops[n / 16][n % 16] = m, totals[n / 16][n % 16] = l; };
    const auto m_of = [&](uint32 n) { return __ldcg(first.m(rows * 16 + n % 16) + uint64(n / 16) * PITCH); };
    const auto l_of = [&](uint32 n) { return __ldcg(first.l(rows * 16 + n % 16) + uint64(n / 16) * PITCH); };
    float m[2], l[2];
#pragma unroll
    for (uint32 i = 0; i < 2; i++) m[i] = __ldcg(own_m[i]), l[i] = __ldcg(own_m[i] + MLA64_ROWS);
    load(part);
#pragma unroll
    for (uint32 i = 0; i < 2; i++)
        if (own[i] == threadIdx.x + i * blockDim.x) leave_weights(own[i], m[i], l[i]);
#pragma unroll 1
    for (uint32 n = threadIdx.x + 2 * blockDim.x; n < count * 16; n += blockDim.x) leave_weights(n, m_of(n), l_of(n));
    __syncthreads();
    // The four lanes of a row take every fourth state each.
    float top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};
    for (uint32 n = lane % 4; n < count; n += 4) {
#pragma unroll
        for (uint32 r = 0; r < 2; r++) top[r] = fmaxf(top[r], tops[n][lane / 4 + r * 8]);
    }
#pragma unroll
    for (uint32 step = 1; step < 4; step *= 2) {
#pragma unroll
        for (uint32 r = 0; r < 2; r++) top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], step));
    }
    for (uint32 n = lane % 4; n < count; n += 4) {
#pragma unroll
        for (uint32 r = 0; r < 2; r++) sum[r] = fmaf(weight(tops[n][lane / 4 + r * 8], top[r]), totals[n][lane / 4 + r * 8], sum[r]);
    }
#pragma unroll
    for (uint32 step = 1; step < 4; step *= 2) {
#pragma unroll
        for (uint32 r = 0; r < 2; r++) sum[r] += __shfl_xor_sync(FULL_WARP, sum[r], step);
    }
    float4 x[CHANNEL_GROUPS] = {};
#pragma unroll 1
    for (uint32 begin = part; begin < count; begin += AT_ONCE * parts) {
        if (begin != part) load(begin);
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) {
            const uint32 n = min(begin + i * parts, count - 1);
            const float low = weight(tops[n][lane / 4], top[0]), high = weight(tops[n][lane / 4 + 8], top[1]);
#pragma unroll
            for (uint32 j = 0; j < CHANNEL_GROUPS; j++) {
                const float4 y = one[i][j];
                x[j] = {fmaf(low, y.x, x[j].x), fmaf(low, y.y, x[j].y), fmaf(high, y.z, x[j].z), fmaf(high, y.w, x[j].w)};
            }
        }
    }
    if (part) {
#pragma unroll
        for (uint32 j = 0; j < CHANNEL_GROUPS; j++) sums[part - 1][j][thread] = x[j];
    }
    __syncthreads();
    if (part) return;
#pragma unroll
    for (uint32 n = 0; n < MOST_PARTS - 1; n++) {
        if (n + 1 >= parts) break;
#pragma unroll
        for (uint32 j = 0; j < CHANNEL_GROUPS; j++) {
            const float4 y = sums[n][j][thread];
            x[j] = {x[j].x + y.x, x[j].y + y.y, x[j].z + y.z, x[j].w + y.w};
        }
    }
#pragma unroll
    for (uint32 r = 0; r < 2; r++) {
        const float norm = exists[r] ? norm_of(p, place[r].head, top[r], sum[r]) : 0.0f;
        if (is_packed) {
            // Four lanes have two channels of each of four channel groups; transposed, each lane has one whole group.
            uint32 word[CHANNEL_GROUPS];
#pragma unroll
            for (uint32 j = 0; j < CHANNEL_GROUPS; j++)
                word[j] = pack_out(p, (r ? x[j].z : x[j].x) * norm, (r ? x[j].w : x[j].y) * norm);
            transpose_four(word);
            if (exists[r] && (channel_group + lane % 4) * 8 < p.value_dim) as<uint4>(to[r]) = uint4{word[0], word[1], word[2], word[3]};
        }
        if (!exists[r]) continue;
#pragma unroll
        for (uint32 j = 0; j < CHANNEL_GROUPS; j++) {
            const uint32 channel = (channel_group + j) * 8 + lane % 4 * 2;
            const float2 two = r ? float2{x[j].z, x[j].w} : float2{x[j].x, x[j].y};
            if (channel >= p.value_dim) continue;
            if (!is_packed && p.out.data) write_out(p, p.out.at(item.seq, place[r].position, place[r].head, channel), two, norm);
            if (p.state.acc.data || channel == 0) write_state(p, item, place[r], channel, two, top[r], sum[r]);
        }
    }
}

#define MLA64_KERNEL(name, ...)                                                                                               \
    extern "C" __global__ void __launch_bounds__(MLA64_THREADS, 1) name(const __grid_constant__ AttentionParams p) {                 \
        attention_mla64<__VA_ARGS__>(p);                                                                                      \
    }
