// The form of decode128.cuh for up to eight rows: tokens are M of m16n8k16, query rows N, as in attention/mma.cuh.
//
//   keys    lane (t = lane / 4, j = lane % 4) has the codes of channels 32j … 32j + 31 of tokens t and t + 8 of a tile: 16 bytes each
//   values  a word is four codes of a token and of the next one, as ldmatrix transposes them: lane (u = lane / 4, t = lane % 4) has those of channels
//           32c + 4u … 32c + 4u + 3 of tokens 2t and 2t + 1 of eight, for each of four c
#pragma once

#include "attention_int4/coded.cuh"

template <typename Type, uint32 ROWS>
struct Int4Rows8Compute : MmaCompute<Type, 128, 128> {
    using Base = MmaCompute<Type, 128, 128>;
    using Base::acc, Base::lane, Base::first, Base::count, Base::p;
    using Turned = TurnedQueries;
    static constexpr uint32 STEPS = 8;

    uint32 turned[STEPS][2];
    // The product of queries with the mean of block `mean_of`, of the lane's two rows.
    int32 mean_of;
    float of_mean[2];
    bool is_clear;
    // Sums of the weights of values, by which acc has too much: CODE_OFFSET times as much.
    float sums[4];

    __device__ Int4Rows8Compute(const AttentionParams &p, char *shared) : Base(p, shared, 0), mean_of(-1), is_clear(true), sums{} {}

    __device__ void turned_to_registers(const char *from) {
        const uint32 address = shared_address(from) + lane / 4 % ROWS * TurnedQueries::PITCH + lane % 4 * 64;
#pragma unroll
        for (uint32 s = 0; s < STEPS; s += 2) {
            uint32 x[4];
            load_four_words(address + s * 8, x);
            turned[s][0] = x[0], turned[s][1] = x[1], turned[s + 1][0] = x[2], turned[s + 1][1] = x[3];
        }
    }
    __device__ void queries_to_registers(uint32 queries) { Base::template queries_to_registers<ROWS>(queries); }
    // A tile of 16 bits.
    __device__ void attend(const char *tile, bool is_fully_seen) {
        Base::attend(tile, is_fully_seen, is_clear);
        is_clear = false;
    }

    // `queries` is where queries lie as they are. count: tiles of the group.
    __device__ void attend_coded(const CodedGroup &group, uint32 count, uint32 queries, const char *turned_queries, bool is_fully_seen) {
        if (group.block != mean_of) multiply_mean(group, queries + lane % ROWS * Base::QUERY_PITCH);
        if (count <= 2) attend_tiles<2>(group, count, turned_queries, is_fully_seen);
        else attend_tiles<4>(group, count, turned_queries, is_fully_seen);
        is_clear = false;
    }
    // Scores are in units of their row: a power of two.
    template <uint32 TILES>
    __device__ void attend_tiles(const CodedGroup &group, uint32 count, const char *turned_queries, bool is_fully_seen) {
        const TurnedQueries::Row rows[2] = {TurnedQueries::row_of(turned_queries, this->row(0) % ROWS), TurnedQueries::row_of(turned_queries, this->row(1) % ROWS)};
        const float mean[2] = {of_mean[0] * rows[0].inverse, of_mean[1] * rows[1].inverse}, unit[2] = {rows[0].unit, rows[1].unit};
        uint32 scales[TILES / 2];
#pragma unroll
        for (uint32 n = 0; n < TILES / 2; n++) scales[n] = weight_unit_in(scales_of_token(group, n * WARP + lane));
        float c[TILES][4], of_value[TILES][2];
        const uint32 keys = shared_address(group.keys) + lane * 16, values = shared_address(group.values), from[2] = {values + value_of_lane(0), values + value_of_lane(1)};
#pragma unroll
        for (uint32 tile = 0; tile < TILES; tile++) multiply_keys<TILES == 2>(c[tile], keys + tile * TILE * CodedGroup::PITCH, {-rows[0].offset, -rows[1].offset});
#pragma unroll
        for (uint32 tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                const uint32 scale = __shfl_sync(FULL_WARP, scales[tile / 2], tile % 2 * TILE + half * 8 + lane / 4);
                const float of_key = widen_float16(scale & 0xffff);
                of_value[tile][half] = widen_float16(scale >> 16);
#pragma unroll
                for (uint32 i = 0; i < 2; i++) {
                    float &x = c[tile][half * 2 + i];
                    x = fmaf(of_key, x, mean[i]);
                }
            }
        }
        update_softmax(c, count, unit, is_fully_seen, group);
#pragma unroll
        for (uint32 tile = 0; tile < TILES; tile++) {
            uint32 weights[2];
#pragma unroll
            for (uint32 half = 0; half < 2; half++)
                weights[half] = transpose(Float16::pack(c[tile][half * 2] * of_value[tile][half], c[tile][half * 2 + 1] * of_value[tile][half]));
            add_values(from, tile, weights);
        }
    }

    // The mean stands in for eight tokens of each half of the product: of every 64 channels, even eights meet rows 0–7, odd ones rows 8–15.
    // `query` is where the query of row lane % 8 of the operand lies.
    __device__ void multiply_mean(const CodedGroup &group, uint32 query) {
        mean_of = group.block;
        float even[4] = {}, odd[4] = {};
        const uint32 matrix = lane / 8, mean = shared_address(group.mean) + matrix * 16;
        const uint32 from = query + (matrix % 2 * 2 + matrix / 2) * 16;
#pragma unroll
        for (uint32 s = 0; s < STEPS; s += 2) {
            uint32 a[4], b[4];
            load_matrices(a, mean + s * 32);
            load_matrices(b, from + s * 32);
            Type::multiply(even, a, b[0], b[1]);
            Type::multiply(odd, a, b[2], b[3]);
        }
#pragma unroll
        for (uint32 i = 0; i < 2; i++) of_mean[i] = even[i] + odd[2 + i];
    }
    // Adds the products of a tile to `offset`.
    template <bool IN_TWO_CHAINS>
    __device__ void multiply_keys(float (&c)[4], uint32 keys, const float (&offset)[2]) const {
        float sum[2][4] = {{offset[0], offset[1], offset[0], offset[1]}, {}};
        uint32 codes[2][4];
#pragma unroll
        for (uint32 half = 0; half < 2; half++) load_four_words(keys + half * 8 * CodedGroup::PITCH, codes[half]);
#pragma unroll
        for (uint32 n = 0; n < 4; n++) {
#pragma unroll
            for (uint32 s = 0; s < 2; s++) {
                const uint32 a[4] = {widen_codes(codes[0][n], s * 2), widen_codes(codes[1][n], s * 2), widen_codes(codes[0][n], s * 2 + 1),
                                     widen_codes(codes[1][n], s * 2 + 1)};
                Float16::multiply(sum[IN_TWO_CHAINS ? s : 0], a, turned[n * 2 + s][0], turned[n * 2 + s][1]);
            }
        }
#pragma unroll
        for (uint32 e = 0; e < 4; e++) c[e] = IN_TWO_CHAINS ? sum[0][e] + sum[1][e] : sum[0][e];
    }
    // The running softmax, as in MmaCompute: scores of a group, which has so many tiles, become weights.
    template <uint32 TILES>
    __device__ void update_softmax(float (&c)[TILES][4], uint32 tiles, const float (&unit)[2], bool is_fully_seen, const CodedGroup &group) {
        float factor[2];  // s · log2 e = c · factor
#pragma unroll
        for (uint32 i = 0; i < 2; i++) factor[i] = unit[i] * (p.scale * LOG2_E);
        if (p.soft_cap != 0.0f) {
            const float inverse = p.scale / p.soft_cap;
#pragma unroll
            for (uint32 n = 0; n < TILES * 4; n++) c[n / 4][n % 4] = p.soft_cap * tanh_fast(c[n / 4][n % 4] * unit[n % 2] * inverse);
            factor[0] = factor[1] = LOG2_E;
        }
        // What is no token has no score, also where scores are capped.
#pragma unroll
        for (uint32 n = 0; n < TILES * 4; n++) {
            if (n / 4 >= tiles) c[n / 4][n % 4] = minus_infinity();
        }
        if (!is_fully_seen) {
#pragma unroll
            for (uint32 n = 0; n < TILES * 4; n++) {
                const int32 token = group.position[n / 2 * 8 + lane / 4];
                if (uint32(token - first[0][n % 2]) >= count[0][n % 2]) c[n / 4][n % 4] = minus_infinity();
            }
        }
        float (&m)[2] = this->m[0], (&l)[2] = this->l[0], next[2];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            next[i] = c[0][i];
#pragma unroll
            for (uint32 n = 1; n < TILES * 2; n++) next[i] = fmaxf(next[i], c[n / 2][n % 2 * 2 + i]);
        }
#pragma unroll
        for (uint32 step = 4; step < WARP; step *= 2) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) next[i] = fmaxf(next[i], __shfl_xor_sync(FULL_WARP, next[i], step));
        }
#pragma unroll
        for (uint32 i = 0; i < 2; i++) next[i] = fmaxf(m[i], next[i] * factor[i]);
        if (__any_sync(FULL_WARP, next[0] != m[0] || next[1] != m[1])) {
            if (!is_clear) {
                const float keep[2] = {weight(m[0], next[0]), weight(m[1], next[1])};
                l[0] *= keep[0];
                l[1] *= keep[1];
#pragma unroll
                for (uint32 n = 0; n < 32; n++) acc[0][n / 4][n % 4] *= keep[n % 2];
#pragma unroll
                for (uint32 n = 0; n < 4; n++) sums[n] *= keep[n % 2];
            }
            m[0] = next[0];
            m[1] = next[1];
        }
        // Where nothing is seen yet, −∞ − 0 and not −∞ + ∞.
        const float shift[2] = {m[0] == minus_infinity() ? 0.0f : m[0], m[1] == minus_infinity() ? 0.0f : m[1]};
#pragma unroll
        for (uint32 n = 0; n < TILES * 4; n++) {
            float &x = c[n / 4][n % 4];
            x = exp2_fast(fmaf(x, factor[n % 2], -shift[n % 2]));
            l[n % 2] += x;
        }
    }
    // Where the lane's row of half j of a tile's values lies. Matrices: two sixteens of bytes of tokens 0–7, then of 8–15.
    __device__ uint32 value_of_lane(uint32 j) const { return CodedGroup::value_at(lane / 16 * 8 + lane % 8, j * 2 + lane / 8 % 2); }
    // acc[0][4j + n] gets channels 64j + 4u + n, turned, and those 32 further: the former are of row lane / 4 of the product, the latter of row + 8.
    __device__ void add_values(const uint32 (&from)[2], uint32 tile, const uint32 (&weights)[2]) {
        Float16::multiply(sums, {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES}, weights[0], weights[1]);
#pragma unroll
        for (uint32 j = 0; j < 2; j++) {
            uint32 codes[4];
            load_transposed(codes, from[j] + tile * TILE * CodedGroup::PITCH);
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                uint32 a[4];
#pragma unroll
                for (uint32 i = 0; i < 4; i++) a[i] = widen_codes(codes[i], n);
                Float16::multiply(acc[0][j * 4 + n], a, weights[0], weights[1]);
            }
        }
    }

    // Turns acc back, and into the order of channels of MmaCompute.
    __device__ void turn_acc() {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float x[16];
#pragma unroll
            for (uint32 n = 0; n < 16; n++) x[n] = fmaf(acc[0][n / 8 * 4 + n % 4][n / 4 % 2 * 2 + i], 1.0f / code_unit(n), -CODE_OFFSET * sums[i]);
            turn_row(x, lane);
#pragma unroll
            for (uint32 n = 0; n < 16; n++) acc[0][n / 4 * 2 + n % 2][n / 2 % 2 * 2 + i] = x[n];
        }
        mean_of = -1;
    }
    // Bits of x's index and of the lane: of channels, 6 5 1 0 and 4 3 2; then 6 5 3 4 and 2 1 0.
    __device__ static void turn_row(float (&x)[16], uint32 lane) {
#pragma unroll
        for (uint32 step = 1; step < 16; step *= 2) butterflies(x, step);
        exchange<1, 4>(x, lane);
        exchange<2, 8>(x, lane);
        butterflies(x, 1);
        butterflies(x, 2);
        exchange<1, 16>(x, lane);
        butterflies(x, 1);
#pragma unroll
        for (uint32 n = 0; n < 16; n++) x[n] *= HADAMARD_128 / WEIGHT_UNIT;
    }
};

template <typename Type>
struct Int4Rows8 {
    using Compute = Int4Rows8Compute<Type, 8>;
    static constexpr uint32 ROWS = 8, STAGES = 2, CTAS = 1;
    static constexpr uint32 WARP_BYTES = (STAGES * sizeof(CodedGroup) + KEPT_BYTES + 127) / 128 * 128;
    using Join = Rows8Join<ROWS, WARP_BYTES>;
};
