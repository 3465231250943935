// The form of decode128.cuh for nine to sixteen rows: query rows are the 16 rows of the tensor cores' products, tokens their columns.
//
//   scores  S [16 rows × 16 tokens] = Q [16 × D]  · Kᵀ [D × 16]     rows are M of m16n8k16, tokens twice N
//   acc     O [16 rows × Dv]       += P [16 × 16] · V  [16 × Dv]    a lane's scores are its part of this product's operand
//
// Two blocks of eight rows (mma.cuh) take as many products. In this form four lanes share a row's scores instead of eight, a lane has parts of
// two rows instead of four, and no matrix is transposed. Queries are in shared memory once a CTA, not once a warp, which leaves room for more
// stages.
#pragma once

#include "attention/decode128_partials.cuh"

// Queries of sixteen rows, which a CTA copies once for all of its warps: a thread copies 16 bytes. Type is that of the keys.
template <uint32 QUERY_PITCH, typename Type = Float8>
struct Rows16Queries {
    static constexpr uint32 CHUNKS = 128 * 2 / 16;
    static constexpr bool SHARED_BY_WARPS = true;
    static_assert(2 * WARP_ROWS * CHUNKS == THREADS);
    const AttentionParams &p;
    const char *from;
    uint32 to;

    // Counts the copies of all threads.
    __device__ static Barrier &arrival() {
        __shared__ Barrier all_copied;
        return all_copied;
    }
    __device__ static void open() {
        if (threadIdx.x == 0) arrival().open(THREADS);
    }
    __device__ Rows16Queries(const AttentionParams &p, const WorkItem &item, uint32, char *memory)
        : p(p), to(pin_in_register(shared_address(memory))) {
        // Rows that do not exist are copies of the first.
        const uint32 row = threadIdx.x / CHUNKS;
        const auto [position, head] = place_of_row(p, item, first_row(p, item) + (row < rows_of(p, item) ? row : 0));
        from = p.q.at(item.seq, position, head) + query_bytes<Type>(p, threadIdx.x % CHUNKS * 8);
        asm volatile("" ::"l"(from));
    }
    __device__ void prefetch(uint32) const {
        if (threadIdx.x % 8 == 0) ::prefetch(from);
    }
    __device__ void request() const {
        request_query<Type>(p, to + threadIdx.x / CHUNKS * QUERY_PITCH + threadIdx.x % CHUNKS * 16, from);
        if (is_wide<Type>(p)) return arrival().expect(0);
        arrive_after_copies(shared_address(&arrival()));
    }
    template <typename Compute>
    __device__ void to_registers(Compute &compute) const {
        arrival().wait(0);
        compute.queries_to_registers(to);
    }
};

// Channels of a row that lie side by side in one lane.
template <bool IS_FP8> struct Side {
    using Type = float2;
};
template <> struct Side<true> {
    using Type = float4;
};

// One warp's products and softmax: keys, values and queries of 128 channels.
template <typename Type>
struct Rows16Compute {
    static constexpr bool IS_FP8 = Type::BYTES == 1;
    static constexpr uint32 ROW_BLOCKS = 1, CHANNELS = 128, STEPS = CHANNELS / 16, TILES = CHANNELS / 8;
    static constexpr uint32 ACC = TILES * 4;  // floats of acc in a lane
    // As in MmaCompute.
    static constexpr uint32 PITCH = CHANNELS * Type::BYTES + 16, QUERY_PITCH = CHANNELS * 2 + 16, V_OFFSET = TILE * PITCH;

    const AttentionParams &p;
    uint32 lane, warp;
    uint32 query[STEPS][4];
    float acc[1][TILES][4];
    float m[1][2], l[1][2];
    // The tokens first … first + count − 1 that each of the lane's rows sees.
    int32 first[2];
    uint32 count[2];
    // FP8: the factors of scores of the lane's rows, and the scale of values.
    float key_unit[2], v_scale;

    bool is_clear;

    __device__ Rows16Compute(const AttentionParams &p, char *, uint32) : p(p), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP) { clear(); }
    __device__ void clear() {
        is_clear = true;
#pragma unroll
        for (uint32 n = 0; n < ACC; n++) acc[0][n / 4][n % 4] = 0.0f;
        m[0][0] = m[0][1] = minus_infinity();
        l[0][0] = l[0][1] = 0.0f;
    }
    // The lane's rows among 16, and the row of element e of acc.
    __device__ uint32 row(uint32 i) const { return lane / 4 + i * WARP_ROWS; }
    __device__ static constexpr uint32 row_of(uint32 e) { return e / 2; }

    __device__ void read_reach(const WorkItem &item, const Reach &reach, uint32) {
        const uint32 rows = rows_of(p, item);
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            first[i] = 0;
            count[i] = 0;
            if (row(i) < rows) reach.row(p, place_of_row(p, item, first_row(p, item) + row(i)).position, first[i], count[i]);
        }
        if constexpr (IS_FP8) {
            const float k_scale = p.k_scale.data ? as<float>(p.k_scale.at(0, 0, item.head)) : 1.0f;
            key_unit[0] = key_unit[1] = k_scale * (p.kv_type == FLOAT8_E5M2 ? 1.0f : E4M3_UNIT);
            v_scale = p.v_scale.data ? as<float>(p.v_scale.at(0, 0, item.head)) : 1.0f;
        }
    }

    // Follows read_reach(). With FP8 keys, queries are divided by a power of two, so that float16 has room for bfloat16's range.
    __device__ void queries_to_registers(uint32 from) {
        if constexpr (!IS_FP8) {
            // Matrices: rows 0–7 and 8–15 of the first 16 bytes, then of the next.
            const uint32 address = from + lane % 16 * QUERY_PITCH + lane / 16 * 16;
#pragma unroll
            for (uint32 s = 0; s < STEPS; s++) load_matrices(query[s], address + s * 32);
        } else {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                // In the order in which the lane meets the channels of keys.
                const uint32 address = from + row(i) * QUERY_PITCH + lane % 4 * 8;
#pragma unroll
                for (uint32 s = 0; s < STEPS; s++)
                    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(query[s][i]), "=r"(query[s][i + 2]) : "r"(address + s * 32) : "memory");
                key_unit[i] *= divide_row<Type, STEPS * 2>(p, [&](uint32 n) -> uint32 & { return query[n / 2][i + n % 2 * 2]; });
            }
        }
    }
    // is_fully_seen: every row sees every token of the tile.
    __device__ void attend(const char *tile, bool is_fully_seen) {
        if (IS_FP8 && p.kv_type == FLOAT8_E5M2) attend<true>(tile, is_fully_seen);
        else attend<false>(tile, is_fully_seen);
    }
    template <bool IS_E5M2>
    __device__ void attend(const char *tile, bool is_fully_seen) {
        const uint32 matrix = lane / 8, line = lane % 8, keys = shared_address(tile) + sizeof(TokenInfo);
        float c[2][4];
        uint32 weights[4];
        // Matrices, two for a product: the first 16 bytes and the next of tokens 0–7, then of 8–15.
        multiply_keys<IS_E5M2>(c, keys + (line + matrix / 2 * 8) * PITCH + matrix % 2 * 16);
        update_softmax(c, is_fully_seen, [&](uint32, uint32 t) { return as<TokenInfo>(tile).position[t]; }, [](const float(&)[2]) {});
#pragma unroll
        for (uint32 n = 0; n < 4; n++) weights[n] = Type::pack(c[n / 2][n % 2 * 2], c[n / 2][n % 2 * 2 + 1]);
        // Transposed: tokens 0–7 and 8–15 of the first 16 bytes, then of the next.
        add_values<IS_E5M2>(keys + V_OFFSET + (line + matrix % 2 * 8) * PITCH + matrix / 2 * 16, weights);
    }
    template <bool IS_E5M2>
    __device__ void multiply_keys(float (&c)[2][4], uint32 keys) const {
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
    // The running softmax: scores of one tile or several, two products each, become weights of the values. position_of(tile, token) is where
    // the token of a tile stands. Where acc is multiplied by `keep`, for each of the lane's rows, also_keep(keep) is called. Products from `there` on
    // are of no token.
    template <uint32 PRODUCTS, typename Position, typename Keep>
    __device__ void update_softmax(float (&c)[PRODUCTS][4], bool is_fully_seen, const Position &position_of, const Keep &also_keep, uint32 there = PRODUCTS) {
        // s · log2 e = c · factor.
        float factor = p.scale * LOG2_E;
        if constexpr (IS_FP8) {
#pragma unroll
            for (uint32 n = 0; n < PRODUCTS * 4; n++) c[n / 4][n % 4] *= key_unit[row_of(n % 4)];
        }
        if (p.soft_cap != 0.0f) {
#pragma unroll
            for (uint32 n = 0; n < PRODUCTS * 4; n++) c[n / 4][n % 4] = p.soft_cap * tanhf(c[n / 4][n % 4] * p.scale / p.soft_cap);
            factor = LOG2_E;
        }
#pragma unroll
        for (uint32 n = 0; n < PRODUCTS * 4; n++) {
            if (n / 4 >= there) c[n / 4][n % 4] = minus_infinity();
        }
        if (!is_fully_seen) {
#pragma unroll
            for (uint32 n = 0; n < PRODUCTS * 4; n++) {
                const int32 token = position_of(n / 8, n / 4 % 2 * 8 + lane % 4 * 2 + n % 2);
                if (uint32(token - first[row_of(n % 4)]) >= count[row_of(n % 4)]) c[n / 4][n % 4] = minus_infinity();
            }
        }
        float (&m)[2] = this->m[0], (&l)[2] = this->l[0];
        float next[2];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            next[i] = fmaxf(fmaxf(c[0][i * 2], c[0][i * 2 + 1]), fmaxf(c[1][i * 2], c[1][i * 2 + 1]));
#pragma unroll
            for (uint32 n = 2; n < PRODUCTS; n++) next[i] = fmaxf(next[i], fmaxf(c[n][i * 2], c[n][i * 2 + 1]));
        }
#pragma unroll
        for (uint32 step = 1; step < 4; step *= 2) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) next[i] = fmaxf(next[i], __shfl_xor_sync(FULL_WARP, next[i], step));
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
                also_keep(keep);
            }
            m[0] = next[0];
            m[1] = next[1];
            is_clear = false;
        }
        // Where nothing is seen yet, −∞ − 0 and not −∞ + ∞.
        const float shift[2] = {m[0] == minus_infinity() ? 0.0f : m[0], m[1] == minus_infinity() ? 0.0f : m[1]};
#pragma unroll
        for (uint32 n = 0; n < PRODUCTS * 4; n++) {
            float &x = c[n / 4][n % 4];
            x = exp2_fast(fmaf(x, factor, -shift[row_of(n % 4)]));
            l[row_of(n % 4)] += x;
        }
    }
    template <bool IS_E5M2>
    __device__ void add_values(uint32 values, const uint32 (&weights)[4]) {
#pragma unroll
        for (uint32 j = 0; j < STEPS; j += IS_FP8 ? 2 : 1) {
            uint32 v[4];
            load_transposed(v, values + j * 16 * Type::BYTES);
            if constexpr (IS_FP8) {
#pragma unroll
                for (uint32 half = 0; half < 2; half++) {
                    // A word is two channels of two tokens: one channel is of the first product, the other of the second.
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

    // Follows the last tile of a unit or of all: completes l of the lane's rows, and applies the values' scale to acc.
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

    // One of the four lanes of a row writes its m and l.
    __device__ bool writes_sums() const { return lane % 4 == 0; }
    // Calls write(first channel, channels) for acc of row i, with two or four channels that lie side by side.
    static constexpr uint32 AT_ONCE = IS_FP8 ? 2 : 1;  // products whose channels alternate
    using Channels = typename Side<IS_FP8>::Type;
    __device__ Channels channels(uint32 i, uint32 n) const {
        const float (&x)[4] = acc[0][n], (&y)[4] = acc[0][n + AT_ONCE - 1];
        if constexpr (IS_FP8) return {x[i * 2], y[i * 2], x[i * 2 + 1], y[i * 2 + 1]};
        else return {x[i * 2], x[i * 2 + 1]};
    }
    template <typename Write>
    __device__ void for_each_channel(uint32, uint32 i, const Write &write) const {
#pragma unroll
        for (uint32 n = 0; n < TILES; n += AT_ONCE) write(n * 8 + lane % 4 * 2 * AT_ONCE, channels(i, n));
    }
    // Leaves acc in shared memory, [rows][channels] in units of four channels, whose order is permuted so that lanes hit different banks, both along
    // a row and along one unit of eight rows.
    static constexpr uint32 ROW_BYTES = CHANNELS * sizeof(float);
    __device__ static uint32 place(uint32 row, uint32 unit) { return row * ROW_BYTES + (unit ^ __brev(row) >> 29) * 16; }
    __device__ void store_in_shared(char *to) const {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const uint32 at = place(row(i), lane % 4 * AT_ONCE / 2);
#pragma unroll
            for (uint32 n = 0; n < TILES; n += AT_ONCE) as<Channels>(to + (at ^ n * 32) + (IS_FP8 ? 0 : lane % 2 * 8)) = channels(i, n);
        }
    }
};

// How the warps of a CTA join, then the CTAs of a work item. Each warp joins one slice: 16 of the channels, of all rows; a lane has four channels
// of rows r and r + 8.
template <typename Compute>
struct Rows16Join {
    static constexpr bool BY_ROW = true;
    static constexpr uint32 LANE_CHANNELS = 4;
    static constexpr uint32 ROWS = 2 * WARP_ROWS, SLICE = 128 / WARPS;
    struct alignas(16) Shared {
        float m[ROWS][WARPS], l[ROWS][WARPS];
    };
    // One CTA's slice in scratch, [work items][WARPS][ctas]: acc of each lane; m and l once for lanes of the same rows.
    struct Stored {
        float4 acc[2][WARP];
        float4 sums[WARP_ROWS];  // m of both rows, then l
    };
    static constexpr uint32 AT_ONCE = 8;  // CTAs whose slices are requested before they are joined

    const AttentionParams &p;
    Shared &shared;
    char *tiles;
    uint32 ctas, rank;  // CTAs of the work item, and this one's place among them
    uint32 lane, warp, row, unit;
    Stored *stored;   // this slice of all CTAs
    uint32 *counter;  // CTAs that have stored the slice
    float m[2], l[2];
    float4 acc[2];
    // What the lane writes in the end: of two lanes, one writes row r of the channels of both, the other row r + 8.
    bool has_row, is_second;
    uint32 list_row, channel;
    RowPlace place;
    char *out;

    __device__ Rows16Join(const AttentionParams &p, const WorkItem &item, Shared &shared, char *tiles, uint32 ctas, uint32 rank, uint32 number)
        : p(p), shared(shared), tiles(tiles), ctas(ctas), rank(rank), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), row(lane % WARP_ROWS),
          unit(warp * (SLICE / 4) + lane / WARP_ROWS) {
        const uint32 slice = number * WARPS + warp;
        stored = pin_in_register(reinterpret_cast<Stored *>(p.scratch) + slice * ctas);
        counter = pin_in_register(p.counters + slice);
        is_second = unit % 2;
        channel = unit / 2 * 8;
        const uint32 item_row = row + is_second * WARP_ROWS;
        has_row = item_row < rows_of(p, item);
        list_row = first_row(p, item) + (has_row ? item_row : 0);
        const auto [position, head] = place_of_row(p, item, list_row);
        place = {pin_in_register(position), pin_in_register(head)};
        out = pin_in_register(p.out.at(item.seq, position, head, channel));
    }

    // Leaves the warp's state in the place of its own ring: no other warp has to be waited for. The weights are computed by the warps that join.
    __device__ char *state_of(uint32 w) const { return tiles + w * (p.q_offset / WARPS); }
    __device__ float m_of(uint32 w, uint32 n) const { return shared.m[n][w]; }
    __device__ float l_of(uint32 w, uint32 n) const { return shared.l[n][w]; }
    // The n-th of the lane's four channels.
    __device__ float acc_of(uint32 w, uint32 item_row, uint32 n) const { return as<float>(state_of(w) + Compute::place(item_row, lane) + n * sizeof(float)); }
    __device__ void join_warps(const Compute &compute) {
        if (compute.writes_sums()) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                shared.m[compute.row(i)][warp] = compute.m[0][i];
                shared.l[compute.row(i)][warp] = compute.l[0][i];
            }
        }
        compute.store_in_shared(state_of(warp));
        __syncthreads();
        const char *const from = state_of(0) + Compute::place(row, unit);
        const uint32 warp_bytes = state_of(1) - state_of(0);
        float take[2][WARPS];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const uint32 item_row = row + i * WARP_ROWS;
            float warp_l[WARPS];
#pragma unroll
            for (uint32 w = 0; w < WARPS; w += 4) {
                const float4 some_m = *reinterpret_cast<const float4 *>(&shared.m[item_row][w]), some_l = *reinterpret_cast<const float4 *>(&shared.l[item_row][w]);
                take[i][w] = some_m.x, take[i][w + 1] = some_m.y, take[i][w + 2] = some_m.z, take[i][w + 3] = some_m.w;
                warp_l[w] = some_l.x, warp_l[w + 1] = some_l.y, warp_l[w + 2] = some_l.z, warp_l[w + 3] = some_l.w;
            }
            m[i] = take[i][0];
#pragma unroll
            for (uint32 w = 1; w < WARPS; w++) m[i] = fmaxf(m[i], take[i][w]);
            // Where nothing is seen yet, −∞ − 0 and not −∞ + ∞.
            const float shift = m[i] == minus_infinity() ? 0.0f : m[i];
            l[i] = 0.0f;
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) {
                take[i][w] = exp2_fast(take[i][w] - shift);
                l[i] = fmaf(warp_l[w], take[i][w], l[i]);
            }
            acc[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        }
#pragma unroll
        for (uint32 w = 0; w < WARPS; w++) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) add(acc[i], as<float4>(from + w * warp_bytes + i * (WARP_ROWS * Compute::ROW_BYTES)), take[i][w]);
        }
    }
    __device__ static void add(float4 &sum, const float4 &x, float take) {
        sum = {fmaf(x.x, take, sum.x), fmaf(x.y, take, sum.y), fmaf(x.z, take, sum.z), fmaf(x.w, take, sum.w)};
    }
    // Joins the CTAs of the work item. True in the warp that ends last in its slice, which then has all of it. It calls meanwhile() while the slices
    // of other CTAs are on their way.
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
    // Joins the slices of up to AT_ONCE CTAs from `begin` on to those joined before.
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
            // Where nothing is seen yet, −∞ − 0 and not −∞ + ∞.
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
    // The last phase: results are written by the warp that ends last in a slice; partials of shared units by every warp, while it waits for slices.
    __device__ void join_and_write(const Compute &compute, const WorkItem &item, bool writes_units, uint32 log_share, uint32 units) {
        join_warps(compute);
        // Where no units are left to write, nothing of how that is done delays the rest.
        if (!writes_units) {
            if (join_ctas([] {})) write(item);
            return;
        }
        const auto write_units = [&] { write_unit(p, item, *this, log_share, units); };
        const bool has_all = join_ctas(write_units);
        if (has_all) write(item);
        if (!has_all || ctas == 1) write_units();
    }
    // Writes the results of the slice.
    __device__ void write(const WorkItem &item) const {
        const float4 give = is_second ? acc[0] : acc[1], own = is_second ? acc[1] : acc[0];
        const auto other = [](float x) { return __shfl_xor_sync(FULL_WARP, x, WARP_ROWS); };
        const float4 got{other(give.x), other(give.y), other(give.z), other(give.w)}, low = is_second ? got : own, high = is_second ? own : got;
        if (!has_row || !is_written(p, item, place.position)) return;
        constexpr uint32 PAIRS = 4;
        float2 two[PAIRS] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
        Joined joined;
#pragma unroll
        for (uint32 n = 0; n < PAIRS; n++) {
            joined.acc = two[n];
            joined.m = is_second ? m[1] : m[0];
            joined.l = is_second ? l[1] : l[0];
            if (p.start.acc.data) join_start(p, item, list_row, channel + n * 2, joined);
            two[n] = unless_empty(joined.acc, joined.l);
        }
        if (p.out.data) {
            const float norm = norm_of(p, place.head, joined.m, joined.l);
            if (p.out_type != FLOAT32 && p.out.step[3] == 2 && uint64(out) % 16 == 0) {
                uint32 packed[PAIRS];
#pragma unroll
                for (uint32 n = 0; n < PAIRS; n++) {
                    const float x = two[n].x * norm, y = two[n].y * norm;
                    packed[n] = p.out_type == FLOAT16 ? Float16::pack(x, y) : Bfloat16::pack(x, y);
                }
                as<uint4>(out) = uint4{packed[0], packed[1], packed[2], packed[3]};
            } else {
#pragma unroll
                for (uint32 n = 0; n < PAIRS; n++) write_out(p, out + n * 2 * p.out.step[3], two[n], norm);
            }
        }
        if (!p.state.acc.data && channel) return;
#pragma unroll
        for (uint32 n = 0; n < PAIRS; n++) write_state(p, item, place, channel + n * 2, two[n], joined.m, joined.l);
    }
};

template <typename Type>
struct Rows16Form {
    using Compute = Rows16Compute<Type>;
    using Queries = Rows16Queries<Compute::QUERY_PITCH, Type>;
    using Join = Rows16Join<Compute>;
    static constexpr bool KEYS_ARE_A_GROUP = false;
    static constexpr uint32 LEAST_STAGES = 4 / Type::BYTES, MOST_STAGES = LEAST_STAGES < 3 ? 3 : LEAST_STAGES;
    static constexpr uint32 STAGE = sizeof(TokenInfo) + 2 * TILE * Compute::PITCH;

    // Queries lie behind the ring; behind them, for each warp, the total of its units.
    __device__ static char *warp_memory(const AttentionParams &p, char *shared, uint32 warp) {
        return shared + pin_in_register(p.q_offset + Join::ROWS * Compute::QUERY_PITCH + warp * p.q_pitch);
    }
    __device__ static char *queries_memory(const AttentionParams &p, char *shared, char *) { return shared + p.q_offset; }
    __device__ static const WorkItem &late(const WorkItem &item) { return item; }
    __device__ static void wait_for_keys(uint32 stages) {
        if (MOST_STAGES > LEAST_STAGES && stages == 3) wait_copies<2>();
        else wait_copies<LEAST_STAGES - 1>();
    }
    __device__ static void attend(Compute &compute, const char *tile, bool is_fully_seen, bool) { compute.attend(tile, is_fully_seen); }
};
