// Attention of nine to sixteen rows in the common case of plain.cuh, whose way it goes; its rows are the other side of the products.
//
//   scores  S [16 rows × 16 tokens] = Q [16 × D]  · Kᵀ [D × 16]     rows are M of m16n8k16, tokens twice N
//   acc     O [16 rows × Dv]       += P [16 × 16] · V  [16 × Dv]    a lane's scores are what it needs of this product's operand
//
// Two blocks of eight rows (mma.cuh) take as many products; but here four lanes have a row's scores and not eight, a lane has parts of two
// rows and not of four, and nothing is turned. Queries are there once a CTA, not once a warp, which leaves room for longer rings.
#pragma once

#include "attention/plain.cuh"

// Queries of sixteen rows as a CTA asks for them, once for all of its warps: a thread copies 16 bytes.
template <uint32 QUERY_PITCH>
struct RowsQueries {
    static constexpr uint32 CHUNKS = 128 * 2 / 16;
    static_assert(2 * WARP_ROWS * CHUNKS == THREADS);
    const char *from;

    __device__ RowsQueries(const AttentionParams &p, const Pair &pair) {
        // Rows that do not exist are copies of the first.
        const uint32 row = threadIdx.x / CHUNKS;
        const auto [position, head] = place_of_row(p, pair, first_row(p, pair) + (row < rows_of(p, pair) ? row : 0));
        from = p.q.at(pair.seq, position, head) + threadIdx.x % CHUNKS * 16;
        asm volatile("" ::"l"(from));
    }
    __device__ void announce() const {
        if (threadIdx.x % 8 == 0) prefetch(from);
    }
    // `there` counts THREADS arrivals.
    __device__ void ask(uint32 to, const Barrier &there) const {
        copy_16(to + threadIdx.x / CHUNKS * QUERY_PITCH + threadIdx.x % CHUNKS * 16, from);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&there)) : "memory");
    }
};

// Channels of a row that lie side by side in a lane.
template <bool IS_FP8> struct Side {
    using Type = float2;
};
template <> struct Side<true> {
    using Type = float4;
};

// Keys, values and queries of 128 channels.
template <typename Type>
struct RowsEngine {
    static constexpr bool IS_FP8 = Type::BYTES == 1;
    static constexpr uint32 ROW_BLOCKS = 1, CHANNELS = 128, STEPS = CHANNELS / 16, TILES = CHANNELS / 8;
    static constexpr uint32 ACC = TILES * 4;  // floats of acc that a lane has
    // As in MmaEngine.
    static constexpr uint32 PITCH = CHANNELS * Type::BYTES + 16, QUERY_PITCH = CHANNELS * 2 + 16, V_OFFSET = TILE * PITCH;

    const AttentionParams &p;
    uint32 lane, warp;
    uint32 query[STEPS][4];
    float acc[1][TILES][4];
    float m[1][2], l[1][2];
    // Tokens that the lane's rows see.
    int32 first[2];
    uint32 count[2];
    // FP8: what a product is multiplied by; the scale of values.
    float key_unit[2], v_scale;

    bool is_clear;

    __device__ explicit RowsEngine(const AttentionParams &p) : p(p), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP) { clear(); }
    __device__ void clear() {
        is_clear = true;
#pragma unroll
        for (uint32 n = 0; n < ACC; n++) acc[0][n / 4][n % 4] = 0.0f;
        m[0][0] = m[0][1] = minus_infinity();
        l[0][0] = l[0][1] = 0.0f;
    }
    // The lane's rows, and which of them an element of acc is of.
    __device__ uint32 row(uint32 i) const { return lane / 4 + i * WARP_ROWS; }
    __device__ static constexpr uint32 row_of(uint32 e) { return e / 2; }

    __device__ void read_reach(const Pair &pair, const Reach &reach) {
        const uint32 rows = rows_of(p, pair);
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            first[i] = 0;
            count[i] = 0;
            if (row(i) < rows) reach.row(p, place_of_row(p, pair, first_row(p, pair) + row(i)).position, first[i], count[i]);
        }
        if constexpr (IS_FP8) {
            const float k_scale = p.k_scale.data ? as<float>(p.k_scale.at(0, 0, pair.head)) : 1.0f;
            key_unit[0] = key_unit[1] = k_scale * (p.kv_type == FLOAT8_E5M2 ? 1.0f : E4M3_UNIT);
            v_scale = p.v_scale.data ? as<float>(p.v_scale.at(0, 0, pair.head)) : 1.0f;
        }
    }

    // After read_reach(). Of FP8 queries are divided by a power of two, so that float16 holds what bfloat16 did.
    __device__ void take_queries(uint32 from) {
        if constexpr (!IS_FP8) {
            // Matrices: rows 0–7 and 8–15 of the first 16 bytes, then of the next.
            const uint32 address = from + lane % 16 * QUERY_PITCH + lane / 16 * 16;
#pragma unroll
            for (uint32 s = 0; s < STEPS; s++) load_matrices(query[s], address + s * 32);
        } else {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                // In the order in which a lane meets the channels of the keys.
                const uint32 address = from + row(i) * QUERY_PITCH + lane % 4 * 8;
#pragma unroll
                for (uint32 s = 0; s < STEPS; s++)
                    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(query[s][i]), "=r"(query[s][i + 2]) : "r"(address + s * 32) : "memory");
                key_unit[i] *= divide_row<Type, STEPS * 2>(p, [&](uint32 n) -> uint32 & { return query[n / 2][i + n % 2 * 2]; });
            }
        }
    }
    // `is_whole`: every row sees every token of the tile.
    __device__ void attend(const char *tile, bool is_whole) {
        if (IS_FP8 && p.kv_type == FLOAT8_E5M2) attend<true>(tile, is_whole);
        else attend<false>(tile, is_whole);
    }
    template <bool IS_E5M2>
    __device__ void attend(const char *tile, bool is_whole) {
        const uint32 matrix = lane / 8, line = lane % 8, keys = shared_address(tile) + sizeof(Facts);
        float c[2][4];
        uint32 weights[4];
        // Matrices, two for a product: the first 16 bytes and the next of tokens 0–7, then of 8–15.
        score<IS_E5M2>(c, keys + (line + matrix / 2 * 8) * PITCH + matrix % 2 * 16);
        soften(c, is_whole, as<Facts>(tile), weights);
        // Transposed: tokens 0–7 and 8–15 of the first 16 bytes, then of the next.
        weigh<IS_E5M2>(keys + V_OFFSET + (line + matrix % 2 * 8) * PITCH + matrix / 2 * 16, weights);
    }
    template <bool IS_E5M2>
    __device__ void score(float (&c)[2][4], uint32 keys) const {
        float sum[2][2][4] = {};
#pragma unroll
        for (uint32 s = 0; s < STEPS; s += IS_FP8 ? 2 : 1) {
            uint32 k[4];
            load_matrices(k, keys + s * 16 * Type::BYTES);
            if constexpr (IS_FP8) {
#pragma unroll
                for (uint32 half = 0; half < 2; half++) {
#pragma unroll
                    for (uint32 t = 0; t < 2; t++) {
                        uint32 b[2];
                        widen_fp8<IS_E5M2>(k[t * 2 + half], b[0], b[1]);
                        Type::multiply(sum[half][t], query[s + half], b[0], b[1]);
                    }
                }
            } else {
#pragma unroll
                for (uint32 t = 0; t < 2; t++) Type::multiply(sum[s % 2][t], query[s], k[t * 2], k[t * 2 + 1]);
            }
        }
#pragma unroll
        for (uint32 n = 0; n < 8; n++) c[n / 4][n % 4] = sum[0][n / 4][n % 4] + sum[1][n / 4][n % 4];
    }
    // The running softmax: products with the queries become weights of the values.
    __device__ void soften(float (&c)[2][4], bool is_whole, const Facts &facts, uint32 (&weights)[4]) {
        // s · log2 e = c · factor.
        float factor = p.scale * LOG2_E;
        if constexpr (IS_FP8) {
#pragma unroll
            for (uint32 n = 0; n < 8; n++) c[n / 4][n % 4] *= key_unit[row_of(n % 4)];
        }
        if (p.soft_cap != 0.0f) {
#pragma unroll
            for (uint32 n = 0; n < 8; n++) c[n / 4][n % 4] = p.soft_cap * tanhf(c[n / 4][n % 4] * p.scale / p.soft_cap);
            factor = LOG2_E;
        }
        if (!is_whole) {
#pragma unroll
            for (uint32 n = 0; n < 8; n++) {
                const int32 token = facts.position[n / 4 * 8 + lane % 4 * 2 + n % 2];
                if (uint32(token - first[row_of(n % 4)]) >= count[row_of(n % 4)]) c[n / 4][n % 4] = minus_infinity();
            }
        }
        float (&m)[2] = this->m[0], (&l)[2] = this->l[0];
        float next[2];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) next[i] = fmaxf(fmaxf(c[0][i * 2], c[0][i * 2 + 1]), fmaxf(c[1][i * 2], c[1][i * 2 + 1]));
#pragma unroll
        for (uint32 step = 1; step < 4; step *= 2) {
            next[0] = fmaxf(next[0], __shfl_xor_sync(FULL_WARP, next[0], step));
            next[1] = fmaxf(next[1], __shfl_xor_sync(FULL_WARP, next[1], step));
        }
        next[0] = fmaxf(m[0], next[0] * factor);
        next[1] = fmaxf(m[1], next[1] * factor);
        if (__any_sync(FULL_WARP, next[0] != m[0] || next[1] != m[1])) {
            if (!is_clear) {
                const float keep[2] = {weight(m[0], next[0]), weight(m[1], next[1])};
                l[0] *= keep[0];
                l[1] *= keep[1];
#pragma unroll
                for (uint32 n = 0; n < ACC; n++) acc[0][n / 4][n % 4] *= keep[row_of(n % 4)];
            }
            m[0] = next[0];
            m[1] = next[1];
            is_clear = false;
        }
        // Where nothing has been seen yet, −inf − 0 and not −inf + inf.
        const float shift[2] = {m[0] == minus_infinity() ? 0.0f : m[0], m[1] == minus_infinity() ? 0.0f : m[1]};
#pragma unroll
        for (uint32 n = 0; n < 8; n++) {
            float &x = c[n / 4][n % 4];
            x = exp2_fast(fmaf(x, factor, -shift[row_of(n % 4)]));
            l[row_of(n % 4)] += x;
        }
#pragma unroll
        for (uint32 n = 0; n < 4; n++) weights[n] = Type::pack(c[n / 2][n % 2 * 2], c[n / 2][n % 2 * 2 + 1]);
    }
    template <bool IS_E5M2>
    __device__ void weigh(uint32 values, const uint32 (&weights)[4]) {
#pragma unroll
        for (uint32 j = 0; j < STEPS; j += IS_FP8 ? 2 : 1) {
            uint32 v[4];
            load_transposed(v, values + j * 16 * Type::BYTES);
            if constexpr (IS_FP8) {
#pragma unroll
                for (uint32 half = 0; half < 2; half++) {
                    // A word is two channels of two tokens: one of them is the first product's, the other the second's.
                    uint32 low[2], high[2];
                    widen_fp8<IS_E5M2>(__byte_perm(v[half * 2], 0, 0x3120), low[0], low[1]);
                    widen_fp8<IS_E5M2>(__byte_perm(v[half * 2 + 1], 0, 0x3120), high[0], high[1]);
#pragma unroll
                    for (uint32 t = 0; t < 2; t++) Type::multiply(acc[0][(j + half) * 2 + t], weights, low[t], high[t]);
                }
            } else {
#pragma unroll
                for (uint32 t = 0; t < 2; t++) Type::multiply(acc[0][j * 2 + t], weights, v[t * 2], v[t * 2 + 1]);
            }
        }
    }

    // After the last tile of a unit or a chunk: l of the lane's rows is complete, acc is in the values' own units.
    __device__ void finish() {
#pragma unroll
        for (uint32 step = 1; step < 4; step *= 2) {
            l[0][0] += __shfl_xor_sync(FULL_WARP, l[0][0], step);
            l[0][1] += __shfl_xor_sync(FULL_WARP, l[0][1], step);
        }
        if constexpr (IS_FP8) {
            const float factor = (p.kv_type == FLOAT8_E5M2 ? 1.0f : E4M3_UNIT) * v_scale;
#pragma unroll
            for (uint32 n = 0; n < ACC; n++) acc[0][n / 4][n % 4] *= factor;
        }
    }

    // Of the lanes that have a row, one speaks for it.
    __device__ bool speaks() const { return lane % 4 == 0; }
    // Hands over row i's acc, as many channels at once as lie side by side: write(the first of them, two or four).
    static constexpr uint32 AT_ONCE = IS_FP8 ? 2 : 1;  // products whose channels alternate
    using Channels = typename Side<IS_FP8>::Type;
    __device__ Channels channels(uint32 i, uint32 n) const {
        const float (&x)[4] = acc[0][n], (&y)[4] = acc[0][n + AT_ONCE - 1];
        if constexpr (IS_FP8) return {x[i * 2], y[i * 2], x[i * 2 + 1], y[i * 2 + 1]};
        else return {x[i * 2], x[i * 2 + 1]};
    }
    template <typename Write>
    __device__ void each(uint32, uint32 i, const Write &write) const {
#pragma unroll
        for (uint32 n = 0; n < TILES; n += AT_ONCE) write(n * 8 + lane % 4 * 2 * AT_ONCE, channels(i, n));
    }
    // Leaves acc in shared memory, [rows][channels] in units of four channels, which are turned so that lanes hit different banks: a row's
    // as well as one unit of eight rows.
    static constexpr uint32 ROW_BYTES = CHANNELS * sizeof(float);
    __device__ static uint32 place(uint32 row, uint32 unit) { return row * ROW_BYTES + (unit ^ __brev(row) >> 29) * 16; }
    __device__ void leave(char *to) const {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const uint32 at = place(row(i), lane % 4 * AT_ONCE / 2);
#pragma unroll
            for (uint32 n = 0; n < TILES; n += AT_ONCE) as<Channels>(to + (at ^ n * 32) + (IS_FP8 ? 0 : lane % 2 * 8)) = channels(i, n);
        }
    }
};

// How the warps of a CTA join, then the CTAs of a pair. Each warp takes a slice: 16 of the channels, of all rows; a lane of it four channels
// of rows r and r + 8.
template <typename Engine>
struct RowsJoin {
    static constexpr bool BY_ROW = true;
    static constexpr uint32 ROWS = 2 * WARP_ROWS, SLICE = 128 / WARPS;
    struct alignas(16) Shared {
        float m[ROWS][WARPS], l[ROWS][WARPS];
    };
    // A slice of a CTA's state, in scratch [pairs][WARPS][ctas]: what each lane has, and what it has of sums, once for lanes of the same rows.
    struct Stored {
        float4 acc[2][WARP];
        float4 sums[WARP_ROWS];  // m, l
    };
    static constexpr uint32 AT_ONCE = 8;  // CTAs whose slices are asked for before they are joined

    const AttentionParams &p;
    Shared &shared;
    char *tiles;
    uint32 ctas, rank;  // of the pair
    uint32 lane, warp, row, unit;
    Stored *stored;   // the slice's, of all CTAs
    uint32 *counter;  // of those that are there
    float m[2], l[2];
    float4 acc[2];
    // Of what the lane writes in the end: of two lanes one has a row of the channels of both, the other the other.
    bool has_row, is_second;
    uint32 of_list, channel;
    RowPlace place;
    char *out;

    __device__ RowsJoin(const AttentionParams &p, const Pair &pair, Shared &shared, char *tiles, uint32 ctas, uint32 rank, uint32 number)
        : p(p), shared(shared), tiles(tiles), ctas(ctas), rank(rank), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), row(lane % WARP_ROWS),
          unit(warp * (SLICE / 4) + lane / WARP_ROWS) {
        const uint32 slice = number * WARPS + warp;
        stored = held(reinterpret_cast<Stored *>(p.scratch) + slice * ctas);
        counter = held(p.counters + slice);
        is_second = unit % 2;
        channel = unit / 2 * 8;
        const uint32 of_pair = row + is_second * WARP_ROWS;
        has_row = of_pair < rows_of(p, pair);
        of_list = first_row(p, pair) + (has_row ? of_pair : 0);
        const auto [position, head] = place_of_row(p, pair, of_list);
        place = {held(position), held(head)};
        out = held(p.out.at(pair.seq, position, head, channel));
    }

    // A warp leaves its state where its own tiles were, and waits for no other to do so; who takes it finds what it weighs.
    __device__ char *state_of(uint32 w) const { return tiles + w * (p.q_offset / WARPS); }
    __device__ float m_of(uint32 w, uint32 n) const { return shared.m[n][w]; }
    __device__ float l_of(uint32 w, uint32 n) const { return shared.l[n][w]; }
    // The n-th of four channels.
    __device__ float acc_of(uint32 w, uint32 of_pair, uint32 n) const { return as<float>(state_of(w) + Engine::place(of_pair, lane) + n * sizeof(float)); }
    __device__ void join_warps(const Engine &engine) {
        if (engine.speaks()) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                shared.m[engine.row(i)][warp] = engine.m[0][i];
                shared.l[engine.row(i)][warp] = engine.l[0][i];
            }
        }
        engine.leave(state_of(warp));
        __syncthreads();
        const char *const from = state_of(0) + Engine::place(row, unit);
        const uint32 warp_bytes = state_of(1) - state_of(0);
        float take[2][WARPS];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const uint32 of_pair = row + i * WARP_ROWS;
            float its_l[WARPS];
#pragma unroll
            for (uint32 w = 0; w < WARPS; w += 4) {
                const float4 some_m = *reinterpret_cast<const float4 *>(&shared.m[of_pair][w]), some_l = *reinterpret_cast<const float4 *>(&shared.l[of_pair][w]);
                take[i][w] = some_m.x, take[i][w + 1] = some_m.y, take[i][w + 2] = some_m.z, take[i][w + 3] = some_m.w;
                its_l[w] = some_l.x, its_l[w + 1] = some_l.y, its_l[w + 2] = some_l.z, its_l[w + 3] = some_l.w;
            }
            m[i] = take[i][0];
#pragma unroll
            for (uint32 w = 1; w < WARPS; w++) m[i] = fmaxf(m[i], take[i][w]);
            // Where nothing is seen, −inf − 0 and not −inf + inf.
            const float shift = m[i] == minus_infinity() ? 0.0f : m[i];
            l[i] = 0.0f;
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) {
                take[i][w] = exp2_fast(take[i][w] - shift);
                l[i] = fmaf(its_l[w], take[i][w], l[i]);
            }
            acc[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        }
#pragma unroll
        for (uint32 w = 0; w < WARPS; w++) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) add(acc[i], as<float4>(from + w * warp_bytes + i * (WARP_ROWS * Engine::ROW_BYTES)), take[i][w]);
        }
    }
    __device__ static void add(float4 &sum, const float4 &x, float take) {
        sum = {fmaf(x.x, take, sum.x), fmaf(x.y, take, sum.y), fmaf(x.z, take, sum.z), fmaf(x.w, take, sum.w)};
    }
    // Joins the CTAs of the pair; true in the warp that has the slice of all of them, which does meanwhile() while it waits for those of others.
    template <typename Meanwhile>
    __device__ bool join_ctas(const Meanwhile &meanwhile) {
        if (ctas == 1) return true;
#pragma unroll
        for (uint32 i = 0; i < 2; i++) __stcg(&stored[rank].acc[i][lane], acc[i]);
        if (lane < WARP_ROWS) __stcg(&stored[rank].sums[lane], {m[0], m[1], l[0], l[1]});
        __syncwarp();
        uint32 before = 0;
        if (lane == 0) {
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
            if (before == ctas - 1) *counter = 0;
        }
        if (__shfl_sync(FULL_WARP, before, 0) != ctas - 1) return false;
        __syncwarp();
        m[0] = m[1] = minus_infinity();
        l[0] = l[1] = 0.0f;
        acc[0] = acc[1] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (uint32 begin = 0; begin < ctas; begin += AT_ONCE) join_stored(begin, meanwhile);
        return true;
    }
    // Joins the slices of some CTAs to what is joined of those before.
    template <typename Meanwhile>
    __device__ void join_stored(uint32 begin, const Meanwhile &meanwhile) {
        float4 sums[AT_ONCE], one[AT_ONCE][2];
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) {
            sums[n] = {minus_infinity(), minus_infinity(), 0.0f, 0.0f};
            one[n][0] = one[n][1] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (begin + n >= ctas) continue;
            sums[n] = __ldcg(&stored[begin + n].sums[row]);
            one[n][0] = __ldcg(&stored[begin + n].acc[0][lane]);
            one[n][1] = __ldcg(&stored[begin + n].acc[1][lane]);
        }
        if (begin == 0) meanwhile();
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float top = m[i];
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) top = fmaxf(top, i ? sums[n].y : sums[n].x);
            // Where nothing is seen, −inf − 0 and not −inf + inf.
            const float shift = top == minus_infinity() ? 0.0f : top, keep = exp2_fast(m[i] - shift);
            m[i] = top;
            l[i] *= keep;
            acc[i] = {acc[i].x * keep, acc[i].y * keep, acc[i].z * keep, acc[i].w * keep};
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                const float take = exp2_fast((i ? sums[n].y : sums[n].x) - shift);
                l[i] = fmaf(i ? sums[n].w : sums[n].z, take, l[i]);
                add(acc[i], one[n][i], take);
            }
        }
    }
    // Writes the results of the slice.
    __device__ void write(const Pair &pair) const {
        const float4 give = is_second ? acc[0] : acc[1], own = is_second ? acc[1] : acc[0];
        const auto other = [](float x) { return __shfl_xor_sync(FULL_WARP, x, WARP_ROWS); };
        const float4 got{other(give.x), other(give.y), other(give.z), other(give.w)}, low = is_second ? got : own, high = is_second ? own : got;
        if (!has_row) return;
        constexpr uint32 PAIRS = 4;
        float2 its[PAIRS] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
        Joined joined;
#pragma unroll
        for (uint32 n = 0; n < PAIRS; n++) {
            joined.acc = its[n];
            joined.m = is_second ? m[1] : m[0];
            joined.l = is_second ? l[1] : l[0];
            if (p.start.acc.data) join_start(p, pair, of_list, channel + n * 2, joined);
            its[n] = joined.acc;
        }
        if (p.out.data) {
            const float norm = norm_of(p, place.head, joined.m, joined.l);
            if (p.out_type != FLOAT32 && p.out.step[3] == 2 && uint64(out) % 16 == 0) {
                uint32 packed[PAIRS];
#pragma unroll
                for (uint32 n = 0; n < PAIRS; n++) {
                    const float x = its[n].x * norm, y = its[n].y * norm;
                    packed[n] = p.out_type == FLOAT16 ? Float16::pack(x, y) : Bfloat16::pack(x, y);
                }
                as<uint4>(out) = uint4{packed[0], packed[1], packed[2], packed[3]};
            } else {
#pragma unroll
                for (uint32 n = 0; n < PAIRS; n++) write_out(p, out + n * 2 * p.out.step[3], its[n], norm);
            }
        }
        if (!p.state.acc.data && channel) return;
#pragma unroll
        for (uint32 n = 0; n < PAIRS; n++) write_state(p, pair, place, channel + n * 2, its[n], joined.m, joined.l);
    }
};

template <typename Type>
__device__ inline void attention_rows(const AttentionParams &p) {
    using Engine = RowsEngine<Type>;
    using Join = RowsJoin<Engine>;
    constexpr uint32 STAGE = sizeof(Facts) + 2 * TILE * Engine::PITCH, LEAST_STAGES = 4 / Type::BYTES;
    constexpr bool MAY_HAVE_THREE = LEAST_STAGES < 3;
    extern __shared__ __align__(128) char shared[];
    __shared__ typename Join::Shared states;
    __shared__ uint32 words[WARP];
    __shared__ Barrier queries_there;
    if (threadIdx.x == 0) queries_there.open(THREADS);
    const uint32 word = ask_for_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    Engine engine(p);
    const uint32 number = p.ctas.divide(blockIdx.x), ctas = held(p.ctas.value), rank = blockIdx.x - number * ctas, lane = engine.lane;
    const Pair pair = pair_of(p, number);
    Join join(p, pair, states, shared, ctas, rank, number);
    const uint32 log_sharing = p.log_octets, log_teams = LOG_WARPS - log_sharing;
    const uint32 first = (engine.warp >> log_sharing) * ctas + rank, step_units = ctas << log_teams;
    PlainTiles tiles(p, pair, first, step_units, engine.warp & ((1 << log_sharing) - 1));
    // Queries; behind them what each warp's units have come to.
    const uint32 queries_to = held(shared_address(shared + p.q_offset));
    Total<Engine> total(shared + held(p.q_offset + Join::ROWS * Engine::QUERY_PITCH + engine.warp * p.q_pitch));
    const RowsQueries<Engine::QUERY_PITCH> queries(p, pair);
    const char *const q_len = held(p.q_lens.data ? p.q_lens.at(pair.seq) : tiles.length);
    const char *const list_count = held(p.ids.data ? p.counts.at(pair.seq, pair.position, pair.head) : tiles.length);
    const bool keeps = p.partials.acc.data, keeps_apart = keeps && p.most_units > step_units;
    const uint32 unit_tiles = keeps_apart ? held(p.unit_tiles.value) : ~0u;
    const uint32 stages = MAY_HAVE_THREE ? held(p.stages) : LEAST_STAGES;
    char *const ring = shared + engine.warp * stages * STAGE;
    touch(p.out.data);
    touch(p.lse.data);
    touch(p.sinks.data);
    touch(p.state.l.data);
    touch(p.start.acc.data);
    tiles.announce(engine.warp);
    queries.announce();
    __syncthreads();  // the barrier is open
    allow_next_kernel();
    wait_for_previous_kernel();

    tiles.ask();
    const int32 length = asked(tiles.length), rows_seen = asked(q_len), listed = asked(list_count);
    queries.ask(queries_to, queries_there);
    const Reach reach = Reach::of(p, pair, clamped(length, p.capacity), p.q_lens.data ? clamped(rows_seen, p.positions) : p.positions);
    tiles.ask_page(reach);
    const uint32 entries = p.ids.data ? clamped(listed, p.cap) : 0, units = units_of(p, reach, entries);
    const uint32 count = units > first ? (p.ctas.divide((units - first - 1) >> log_teams) + 1) * p.unit_tiles.value : 0;
    // Tokens that every row sees.
    const bool has_rows = p.own_lists || reach.queries == int32(p.positions);
    const int32 seen_end = p.own_lists ? reach.end : has_rows ? reach.length - reach.queries + 1 : 0;
    const int32 seen_begin = p.window ? max((p.own_lists ? reach.end : reach.length) - int32(p.window), 0) : 0;
    uint32 whole = 0, is_whole = 0;  // bits of tiles, of stages
    const auto find = [&] {
        tiles.find(reach, entries);
        whole = __ballot_sync(FULL_WARP, tiles.position >= seen_begin && tiles.position + int32(TILE) <= seen_end);
    };
    const auto load = [&](uint32 tile, uint32 at) {
        if (tile % WARP == 0 && tile) {
            tiles.aim(tile);
            tiles.ask();
            tiles.ask_page(reach);
            find();
        }
        const uint32 from = tile % WARP;
        const char *from_key = tiles.k + __shfl_sync(FULL_WARP, tiles.key, from), *from_value = tiles.v + __shfl_sync(FULL_WARP, tiles.value, from);
        char *const to = ring + at * STAGE;
        const uint32 k_to = keys_of_lane<Engine>(to, lane);
        is_whole = (is_whole & ~(1u << at)) | (whole >> from & 1) << at;
        load_tile<Engine>(lane, to, k_to, from_key, from_value, tiles.k_row, tiles.v_row, whole >> from & 1, reach,
                          [&] { return __shfl_sync(FULL_WARP, tiles.position, from); });
    };
    find();
    uint32 part = 0, unit = first;
#pragma unroll 1
    for (uint32 step = 0, at = 0; step < count + stages; step++) {
        if (step >= stages) {
            if (step == stages) engine.read_reach(pair, reach);
            if (MAY_HAVE_THREE && stages == 3) wait_copies<2>();
            else wait_copies<LEAST_STAGES - 1>();
            __syncwarp();
            if (step == stages) {
                queries_there.wait(0);
                engine.take_queries(queries_to);
                if (keeps_apart) total.clear();
            }
            engine.attend(ring + at * STAGE, is_whole >> at & 1);
            __syncwarp();
        }
        if (step < count) load(step, at);
        end_copies();
        at = at + 1 == stages ? 0 : at + 1;
        // The ring is full again before a unit is done with.
        if (step >= stages && ++part == unit_tiles) {
            engine.finish();
            write_partial(p, pair, engine, unit);
            part = 0;
            unit += step_units;
            if (step + 1 == count + stages) break;
            total.template add<false>(engine);
            engine.clear();
        }
    }
    if (count && !keeps_apart) engine.finish();
    else if (count) total.template add<true>(engine);
    join.join_warps(engine);
    // Where no units are left to write, nothing of how that is done keeps the rest waiting.
    if (!keeps || keeps_apart) {
        if (join.join_ctas([] {})) join.write(pair);
        return;
    }
    const auto write_units = [&] { write_unit(p, pair, join, log_sharing, units); };
    const bool has_all = join.join_ctas(write_units);
    if (has_all) join.write(pair);
    if (!has_all || ctas == 1) write_units();
}

#define ROWS_KERNEL(name, Type)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { attention_rows<Type>(p); }
