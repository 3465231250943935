// Attention to latents (MLA), as in latent.cuh, of 64 rows at a time: matrix products of warpgroups.
//
// A CTA takes tiles r, r + ctas, … of 64 tokens of a list. Its ring holds two of them, in quarters of 32 tokens that are filled and freed
// alone. A warpgroup does one thing:
//
//   copies   a warp ── one quarter of the ring: 32 tokens, wherever they lie
//   weights  S [64 × 64 tokens] = Q · Kᵀ ── running softmax ── P [64 × 64], in shared memory
//   two of   O [64 × 256 channels] += P · V
//
// so that the tensor cores multiply the weights of one tile while the next is softened. Maxima lag: a row is scaled anew where its maximum
// has grown by more than 2^LEAP, and at the end.
//
// Where a list is cut among several CTAs, each leaves its state in scratch, and a kernel of its own joins them.
//
//   Work of a tile: 64 · 64 · (576 + 512) products, 2200 cycles of a multiprocessor. Shared memory delivers about as fast.
//
// How a row's tokens are cut depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention/mma.cuh"
#include "common/warpgroup.cuh"

constexpr uint32 GROUP_THREADS = 4 * WARP, MANY_THREADS = 4 * GROUP_THREADS;
constexpr uint32 MANY_ROWS = 64, MANY_TOKENS = 64;  // of a tile
constexpr uint32 QUARTERS = 4, QUARTER_TOKENS = 32, RING_TOKENS = QUARTERS * QUARTER_TOKENS;
constexpr uint32 MANY_VALUES = 512, OWN_VALUES = MANY_VALUES / 2;
constexpr uint32 SLABS = 9;  // of 576 channels
constexpr uint32 RING_SLAB = RING_TOKENS * SLAB_WIDTH, QUERY_SLAB = MANY_ROWS * SLAB_WIDTH;
// Of shared memory: the ring, queries, the weights of a tile.
constexpr uint32 MANY_QUERIES_OFFSET = SLABS * RING_SLAB, MANY_WEIGHTS_OFFSET = MANY_QUERIES_OFFSET + SLABS * QUERY_SLAB;
// Rows of results, in the place of the ring: half-warps of float2 hit different banks.
constexpr uint32 RESULT_PITCH = MANY_VALUES + 8;
static_assert(MANY_ROWS * RESULT_PITCH * sizeof(float) <= MANY_QUERIES_OFFSET);
constexpr float LEAP = 8.0f;

struct ManyShared {
    Barrier full[QUARTERS], empty[QUARTERS], weighed, used;  // `weighed`: weights are there; `used`: they are no longer needed
    uint32 there[QUARTERS];                                  // bits of tokens
    float keep[MANY_ROWS];                                   // what a tile's weights leave of what is summed so far
    float m[MANY_ROWS], l[MANY_ROWS], norm[MANY_ROWS];       // at the end
};

// The state of a CTA in scratch: acc [64][512], then m and l [64].
struct ManyState {
    float *data;

    __device__ ManyState(const AttentionParams &p, uint32 n)
        : data(reinterpret_cast<float *>(p.scratch) + uint64(n) * (MANY_ROWS * (MANY_VALUES + 2))) {}
    __device__ float *acc(uint32 row, uint32 channel) const { return data + row * MANY_VALUES + channel; }
    __device__ float *m(uint32 row) const { return data + MANY_ROWS * MANY_VALUES + row; }
    __device__ float *l(uint32 row) const { return m(row) + MANY_ROWS; }
};

// Eight neighbouring channels of a row's results.
__device__ inline void write_octet(const AttentionParams &p, const Pair &pair, uint32 row, uint32 channel, const float (&x)[8], float m, float l, float norm) {
    const RowPlace place = place_of_row(p, pair, row);
    if (p.out.data) {
        char *const to = p.out.at(pair.seq, place.position, place.head, channel);
        if (p.out_type != FLOAT32 && p.out.step[3] == 2 && uint64(to) % 16 == 0) {
            const auto two = [&](uint32 n) {
                const float low = x[n] * norm, high = x[n + 1] * norm;
                return p.out_type == FLOAT16 ? Float16::pack(low, high) : Bfloat16::pack(low, high);
            };
            as<uint4>(to) = uint4{two(0), two(2), two(4), two(6)};
        } else {
#pragma unroll
            for (uint32 n = 0; n < 8; n += 2) write_out(p, to + n * p.out.step[3], {x[n], x[n + 1]}, norm);
        }
    }
    if (!p.state.acc.data && channel) return;
#pragma unroll
    for (uint32 n = 0; n < 8; n += 2) write_state(p, pair, place, channel + n, {x[n], x[n + 1]}, m, l);
}

// What every thread of a CTA knows.
struct ManyJob {
    const AttentionParams &p;
    const Pair &pair;
    ManyShared &s;
    char *shared;
    uint32 rank, lane, warp;  // warp of the warpgroup

    // Bytes of a row or token which the lane copies: 16 from each slab, those of every fourth row.
    __device__ void copy_four(char *to, uint32 slab_step, uint32 row, const char *from, bool is_there) const {
        const uint32 at = shared_address(to) + place_in_slab(row, lane % 8), begin = lane % 8 * 16;
#pragma unroll
        for (uint32 n = 0; n < SLABS; n++)
            copy_16(at + n * slab_step, from + n * SLAB_WIDTH + begin, is_there && n * SLAB_WIDTH + begin < p.dim * 2);
    }
    // The CTA's tiles.
    __device__ uint32 tiles(const Reach &reach, uint32 entries) const {
        const uint32 all = (units_of(p, reach, entries) + MANY_TOKENS / TILE - 1) / (MANY_TOKENS / TILE);
        return all > rank ? p.ctas.divide(all - rank - 1) + 1 : 0;
    }
    __device__ uint32 tiles() const { return tiles(Reach::load(p, pair), count_of(p, pair)); }
    // By a warp, once all its lanes are there.
    __device__ void arrive(const Barrier &barrier) const {
        __syncwarp();
        if (lane == 0) barrier.expect(0);
    }
};

// A warp that fills a quarter of the ring. A lane finds a token.
struct ManySource : ManyJob {
    struct Token {
        const char *from;
        bool is_there;
    };
    Reach reach;
    uint32 entries;

    // The lane's token of a quarter, counted along the list.
    __device__ uint32 number(uint32 quarter) const {
        return (quarter / 2 * p.ctas.value + rank) * MANY_TOKENS + quarter % 2 * QUARTER_TOKENS + lane;
    }
    // Of what is read once the kernel waits no longer.
    __device__ void announce() const {
        constexpr uint32 ENTRIES = 128 / sizeof(int32);
        const uint32 entry = p.block.divide(number(warp));
        if (p.ids.data && entry < p.cap) prefetch(p.ids.at(pair.seq, pair.position, pair.head, entry));
        if (warp) return;
        if (p.table.data && uint64(lane * ENTRIES) * p.page.value < p.capacity) prefetch(p.table.at(pair.seq, lane * ENTRIES));
        if (lane == 0) prefetch(p.seq_lens.at(pair.seq));
        if (lane == 1 && p.ids.data) prefetch(p.counts.at(pair.seq, pair.position, pair.head));
    }
    __device__ Token find(uint32 quarter, const Listed &listed) const {
        const Place place = place_of(p, pair, reach, entries, number(quarter), listed);
        return {p.k.at(place.page, place.row, pair.head), place.position >= 0};
    }
    __device__ void fill(const Token &token) const {
        const uint32 there = __ballot_sync(FULL_WARP, token.is_there);
        if (lane == 0) s.there[warp] = there;
        const uint64 address = uint64(token.from);
#pragma unroll 1
        for (uint32 n = 0; n < QUARTER_TOKENS; n += 4) {
            const uint32 t = n + lane / 8;
            const char *const from = reinterpret_cast<const char *>(__shfl_sync(FULL_WARP, address, t));
            // What is not there is zeros, since NaN would stay NaN under a weight of zero.
            const bool is_there = there >> t & 1;
            copy_four(shared, RING_SLAB, warp * QUARTER_TOKENS + t, is_there ? from : p.k.data, is_there);
        }
        end_copies();
    }
    __device__ void run() {
        const Listed first = listed(p, pair, number(warp));
        Listed next = listed(p, pair, number(warp + QUARTERS));
        reach = Reach::load(p, pair);
        entries = count_of(p, pair);
        const uint32 quarters = tiles(reach, entries) * 2;
        Token token = find(warp, first);
#pragma unroll 1
        for (uint32 quarter = warp; quarter < quarters; quarter += QUARTERS) {
            const uint32 turn = quarter / QUARTERS;
            if (turn) s.empty[warp].wait(turn - 1);
            fill(token);
            token = find(quarter + QUARTERS, next);
            next = listed(p, pair, number(quarter + 2 * QUARTERS));
            wait_copies<0>();
            fence_copies();
            arrive(s.full[warp]);
        }
    }
};

// The warpgroup whose products become weights.
template <typename Type, bool IS_BFLOAT16>
struct ManyWeights : ManyJob {
    static constexpr uint32 OCTETS = MANY_TOKENS / 8;

    float m[2], highest[2], l[2];  // `highest` is the maximum, m what weights are relative to

    __device__ uint32 row(uint32 i) const { return warp * 16 + lane / 4 + i * 8; }

    __device__ void load_queries() const {
        const uint32 rows = rows_of(p, pair);
#pragma unroll 1
        for (uint32 n = warp * 4; n < MANY_ROWS; n += 16) {
            const uint32 row = n + lane / 8;
            const bool exists = row < rows;
            const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + (exists ? row : 0));
            copy_four(shared + MANY_QUERIES_OFFSET, QUERY_SLAB, row, p.q.at(pair.seq, position, head), exists);
        }
        end_copies();
        wait_copies<0>();
        fence_copies();
        sync_some(1, GROUP_THREADS);
    }
    __device__ void multiply_keys(float (&c)[32], uint32 tile) const {
        const uint64 queries = operand(shared_address(shared + MANY_QUERIES_OFFSET));
        const uint64 keys = operand(shared_address(shared + tile % 2 * MANY_TOKENS * SLAB_WIDTH));
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
    // Products become weights; `keep` is what they leave of what is summed so far.
    __device__ void soften(float (&c)[32], float (&keep)[2]) {
        const float factor = p.scale * LOG2_E;
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float top = minus_infinity(), sum = 0.0f;
#pragma unroll
            for (uint32 j = 0; j < OCTETS; j++) top = fmaxf(top, fmaxf(c[j * 4 + i * 2], c[j * 4 + i * 2 + 1]));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
            highest[i] = fmaxf(highest[i], top * factor);
            const float next = highest[i] > m[i] + LEAP ? highest[i] : m[i], shift = next == minus_infinity() ? 0.0f : next;
            keep[i] = weight(m[i], next);
            m[i] = next;
            // −inf times a factor too small for a float32 would be NaN.
#pragma unroll
            for (uint32 n = i * 2; n < 32; n += 4) {
#pragma unroll
                for (uint32 e = n; e < n + 2; e++) {
                    c[e] = c[e] == minus_infinity() ? 0.0f : exp2_fast(fmaf(c[e], factor, -shift));
                    sum += c[e];
                }
            }
            l[i] = l[i] * keep[i] + sum;
        }
    }
    __device__ void leave(const float (&c)[32], const float (&keep)[2]) const {
        char *const weights = shared + MANY_WEIGHTS_OFFSET + lane % 4 * 4;
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            if (lane % 4 == 0) s.keep[row(i)] = keep[i];
#pragma unroll
            for (uint32 j = 0; j < OCTETS; j++) as<uint32>(weights + place_in_slab(row(i), j)) = Type::pack(c[j * 4 + i * 2], c[j * 4 + i * 2 + 1]);
        }
        fence_copies();
        arrive(s.weighed);
    }
    // What is told of rows: states are relative to maxima.
    __device__ void finish() const {
        const uint32 rows = rows_of(p, pair);
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const float keep = weight(m[i], highest[i]);
            float sum = l[i];
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            sum *= keep;
            if (lane % 4) continue;
            s.keep[row(i)] = keep;
            s.m[row(i)] = highest[i];
            s.l[row(i)] = sum;
            s.norm[row(i)] = row(i) < rows ? norm_of(p, place_of_row(p, pair, first_row(p, pair) + row(i)).head, highest[i], sum) : 0.0f;
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
            soften(c, keep);
            if (tile) s.used.wait(tile - 1);
            leave(c, keep);
        }
        if (count) s.used.wait(count - 1);
        finish();
        sync_some(2, 3 * GROUP_THREADS);
    }
};

// A warpgroup that sums values, weighed: the first or the last 256 channels.
template <typename Type, bool IS_BFLOAT16>
struct ManyValues : ManyJob {
    static constexpr uint32 OCTETS = OWN_VALUES / 8;

    uint32 half;
    float acc[2][OCTETS * 2];

    __device__ uint32 row(uint32 i) const { return warp * 16 + lane / 4 + i * 8; }
    // The lane's two of an octet begin with this channel, and are these of a row.
    __device__ uint32 channel(uint32 j) const { return half * OWN_VALUES + j * 8 + lane % 4 * 2; }
    __device__ float2 two(uint32 j, uint32 i) const { return {acc[j / 16][j % 16 * 4 + i * 2], acc[j / 16][j % 16 * 4 + i * 2 + 1]}; }

    __device__ void scale() {
        const float keep[2] = {s.keep[row(0)], s.keep[row(1)]};
        if (__all_sync(FULL_WARP, keep[0] == 1.0f && keep[1] == 1.0f)) return;
#pragma unroll
        for (uint32 n = 0; n < OCTETS * 4; n++) acc[n / 64][n % 64] *= keep[n / 2 % 2];
    }
    __device__ void add(uint32 tile) {
        const uint64 weights = operand(shared_address(shared + MANY_WEIGHTS_OFFSET));
        const char *const from = shared + half * (OWN_VALUES / SLAB_ELEMENTS) * RING_SLAB + tile % 2 * MANY_TOKENS * SLAB_WIDTH;
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
    __device__ void store(const ManyState &state) const {
        const uint32 rows = rows_of(p, pair);
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            if (row(i) >= rows) continue;
#pragma unroll
            for (uint32 j = 0; j < OCTETS; j++) {
                if (channel(j) < p.value_dim)
                    __stcg(reinterpret_cast<float2 *>(state.acc(row(i), channel(j))), two(j, i));
            }
            if (half || lane % 4) continue;
            __stcg(state.m(row(i)), s.m[row(i)]);
            __stcg(state.l(row(i)), s.l[row(i)]);
        }
    }
    // Through shared memory, which is free: all products are summed.
    __device__ void write() const {
        float *const results = reinterpret_cast<float *>(shared);
#pragma unroll
        for (uint32 n = 0; n < OCTETS * 2; n++)
            *reinterpret_cast<float2 *>(results + row(n % 2) * RESULT_PITCH + channel(n / 2)) = two(n / 2, n % 2);
        sync_some(3, 2 * GROUP_THREADS);
        const uint32 rows = rows_of(p, pair), thread = half * GROUP_THREADS + warp * WARP + lane;
        const uint32 channel = thread % (MANY_VALUES / 8) * 8;
        if (channel >= p.value_dim) return;
#pragma unroll 1
        for (uint32 row = thread / (MANY_VALUES / 8); row < rows; row += 2 * GROUP_THREADS / (MANY_VALUES / 8)) {
            const float4 *const from = reinterpret_cast<const float4 *>(results + row * RESULT_PITCH + channel), a = from[0], b = from[1];
            const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            write_octet(p, pair, first_row(p, pair) + row, channel, x, s.m[row], s.l[row], s.norm[row]);
        }
    }
    __device__ void run(uint32 number) {
#pragma unroll
        for (uint32 n = 0; n < OCTETS * 4; n++) acc[n / 64][n % 64] = 0.0f;
        const uint32 count = tiles();
#pragma unroll 1
        for (uint32 tile = 0; tile < count; tile++) {
            s.weighed.wait(tile);
            scale();
            add(tile);
        }
        sync_some(2, 3 * GROUP_THREADS);
        scale();
        if (p.ctas.value > 1) store(ManyState(p, number * p.ctas.value + rank));
        else write();
    }
};

template <typename Type, bool IS_BFLOAT16>
__device__ inline void attention_latent_many(const AttentionParams &p) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ ManyShared s;
    __shared__ uint32 words[WARP];
    const uint32 word = ask_for_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    const uint32 number = p.ctas.divide(blockIdx.x), rank = blockIdx.x - number * p.ctas.value, group = threadIdx.x / GROUP_THREADS;
    const Pair pair = pair_of(p, number);
    const ManyJob job{p, pair, s, shared, rank, threadIdx.x % WARP, threadIdx.x / WARP % 4};
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
    // Of registers that 512 threads share: 128 each.
    if (group == 3) {
        give_registers<64>();
        ManySource source{job};
        source.announce();
        wait_for_previous_kernel();
        source.run();
    } else if (group == 2) {
        give_registers<112>();
        wait_for_previous_kernel();
        ManyWeights<Type, IS_BFLOAT16> weights{job};
        weights.run();
    } else {
        take_registers<168>();
        wait_for_previous_kernel();
        ManyValues<Type, IS_BFLOAT16> values{job, group};
        values.run(number);
    }
}

// Joins the states of a row's CTAs, in their order: four parts of them, then the parts.
constexpr uint32 JOIN_PARTS = 4, PART_THREADS = MANY_VALUES / 8, MOST_STATES = 2 * WARP;

__device__ inline void join_many(const AttentionParams &p) {
    __shared__ float4 sums[JOIN_PARTS - 1][2][PART_THREADS];
    constexpr uint32 AT_ONCE = 4;
    const uint32 number = blockIdx.x / MANY_ROWS, row = blockIdx.x % MANY_ROWS, lane = threadIdx.x % WARP;
    const uint32 part = threadIdx.x / PART_THREADS, thread = threadIdx.x % PART_THREADS, channel = thread * 8, count = p.ctas.value;
    const Pair pair = pair_of(p, number);
    allow_next_kernel();
    wait_for_previous_kernel();
    if (row >= rows_of(p, pair)) return;
    const ManyState first(p, number * count);
    constexpr uint32 PITCH = MANY_ROWS * (MANY_VALUES + 2);
    // A lane knows two states' maxima.
    float m[2], l[2];
#pragma unroll
    for (uint32 i = 0; i < 2; i++) {
        const uint32 n = i * WARP + lane;
        m[i] = n < count ? __ldcg(first.m(row) + uint64(n) * PITCH) : minus_infinity();
        l[i] = n < count ? __ldcg(first.l(row) + uint64(n) * PITCH) : 0.0f;
    }
    float top = fmaxf(m[0], m[1]);
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
    const float take[2] = {weight(m[0], top), weight(m[1], top)};
    float sum = take[0] * l[0] + take[1] * l[1];
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    float x[8] = {};
#pragma unroll 1
    for (uint32 begin = part; begin < count; begin += AT_ONCE * JOIN_PARTS) {
        float4 one[AT_ONCE][2];
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) {
            const uint32 n = begin + i * JOIN_PARTS;
            one[i][0] = one[i][1] = float4{0.0f, 0.0f, 0.0f, 0.0f};
            if (n >= count || channel >= p.value_dim) continue;
            const float4 *const from = reinterpret_cast<const float4 *>(first.acc(row, channel) + uint64(n) * PITCH);
            one[i][0] = __ldcg(from), one[i][1] = __ldcg(from + 1);
        }
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) {
            const uint32 n = begin + i * JOIN_PARTS;
            const float low = __shfl_sync(FULL_WARP, take[0], n % WARP), high = __shfl_sync(FULL_WARP, take[1], n % WARP);
            const float factor = n < WARP ? low : high;
            const float4 a = one[i][0], b = one[i][1];
            const float y[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (uint32 e = 0; e < 8; e++) x[e] = fmaf(factor, y[e], x[e]);
        }
    }
    if (part) {
        sums[part - 1][0][thread] = {x[0], x[1], x[2], x[3]};
        sums[part - 1][1][thread] = {x[4], x[5], x[6], x[7]};
    }
    __syncthreads();
    if (part || channel >= p.value_dim) return;
#pragma unroll
    for (uint32 n = 0; n < JOIN_PARTS - 1; n++) {
        const float4 a = sums[n][0][thread], b = sums[n][1][thread];
        const float y[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (uint32 e = 0; e < 8; e++) x[e] += y[e];
    }
    const uint32 of_pair = first_row(p, pair) + row;
    write_octet(p, pair, of_pair, channel, x, top, sum, norm_of(p, place_of_row(p, pair, of_pair).head, top, sum));
}

#define LATENT_MANY_KERNEL(name, ...)                                                                                               \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 1) name(const __grid_constant__ AttentionParams p) {                 \
        attention_latent_many<__VA_ARGS__>(p);                                                                                      \
    }
