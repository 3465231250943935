// The form of decode128.cuh for up to eight rows: tokens are M of m16n8k16, query rows N, as in attention/mma.cuh.
//
// Lanes have the same codes as in rows16.cuh: what is an operand's column there is a row here. Two CTAs are on a multiprocessor.
#pragma once

#include "attention_int4/coded.cuh"

template <typename Type, uint32 ROWS>
struct Int4Rows8Compute : MmaCompute<Type, 128, 128> {
    using Base = MmaCompute<Type, 128, 128>;
    using Base::acc, Base::lane, Base::first, Base::count, Base::p;
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

    // `queries` is where queries lie as they are. has_second: whether the pair has a second tile.
    __device__ void attend_coded(const CodedPair &pair, uint32 queries, const char *turned_queries, bool is_fully_seen, bool has_second) {
        float c[2][4], scale[2];
#pragma unroll
        for (uint32 n = 0; n < 2; n++) scale[n] = widen_e4m3(pair.scale[n][lane] >> pair.scale_shift[n][lane]);
#pragma unroll
        for (uint32 tile = 0; tile < 2; tile++) multiply_keys(c[tile], pair, tile, queries, turned_queries, scale[0]);
        if (!has_second) c[1][0] = c[1][1] = c[1][2] = c[1][3] = minus_infinity();
        update_softmax(c, is_fully_seen, pair);
#pragma unroll
        for (uint32 tile = 0; tile < 2; tile++) {
            uint32 weights[2];
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                const float of_value = scale_of(scale[1], tile, half) * WEIGHT_UNIT;
                weights[half] = transpose(Float16::pack(c[tile][half * 2] * of_value, c[tile][half * 2 + 1] * of_value));
            }
            add_values(pair.values + tile * TILE * CodedPair::VALUE_PITCH, weights);
        }
    }
    // The scale of the lane's token of a half of a tile.
    __device__ float scale_of(float scale, uint32 tile, uint32 half) const { return __shfl_sync(FULL_WARP, scale, tile * TILE + half * 8 + lane / 4); }

    // The mean stands in for sixteen tokens.
    __device__ void multiply_mean(const CodedPair &pair, uint32 tile, uint32 queries) {
        mean_of = pair.block[tile];
        float sum[2][4] = {};
        const uint32 mean = shared_address(pair.mean[tile]) + lane / 8 * 16, from = queries + lane % ROWS * Base::QUERY_PITCH + lane / 8 * 16;
#pragma unroll
        for (uint32 s = 0; s < STEPS; s += 2) {
            uint32 a[4], b[4];
            load_matrices(a, mean + s * 32);
            load_matrices(b, from + s * 32);
            Type::multiply(sum[0], {a[0], a[0], a[1], a[1]}, b[0], b[1]);
            Type::multiply(sum[1], {a[2], a[2], a[3], a[3]}, b[2], b[3]);
        }
#pragma unroll
        for (uint32 i = 0; i < 2; i++) of_mean[i] = sum[0][i] + sum[1][i];
    }
    __device__ void multiply_keys(float (&c)[4], const CodedPair &pair, uint32 tile, uint32 queries, const char *turned_queries, float scale) {
        float sum[2][4] = {};
        uint32 codes[2][4];
#pragma unroll
        for (uint32 half = 0; half < 2; half++)
            load_four_words(shared_address(pair.keys) + (tile * TILE + half * 8 + lane / 4) * CodedPair::KEY_PITCH + lane % 4 * 16, codes[half]);
#pragma unroll
        for (uint32 n = 0; n < 4; n++) {
#pragma unroll
            for (uint32 s = 0; s < 2; s++) {
                const uint32 a[4] = {widen_codes(codes[0][n], s * 2), widen_codes(codes[1][n], s * 2), widen_codes(codes[0][n], s * 2 + 1),
                                     widen_codes(codes[1][n], s * 2 + 1)};
                Float16::multiply(sum[s], a, turned[n * 2 + s][0], turned[n * 2 + s][1]);
            }
        }
        if (pair.block[tile] != mean_of) multiply_mean(pair, tile, queries);
        const TurnedQueries::Row rows[2] = {TurnedQueries::row_of(turned_queries, this->row(0) % ROWS), TurnedQueries::row_of(turned_queries, this->row(1) % ROWS)};
#pragma unroll
        for (uint32 half = 0; half < 2; half++) {
            const float of_key = scale_of(scale, tile, half);
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const uint32 e = half * 2 + i;
                c[e] = fmaf(of_key * rows[i].unit, sum[0][e] + sum[1][e] - rows[i].offset, of_mean[i]);
            }
        }
    }
    // The running softmax, as in MmaCompute: scores of a pair become weights.
    __device__ void update_softmax(float (&c)[2][4], bool is_fully_seen, const CodedPair &pair) {
        float factor = p.scale * LOG2_E;  // s · log2 e = c · factor
        if (p.soft_cap != 0.0f) {
#pragma unroll
            for (uint32 n = 0; n < 8; n++) c[n / 4][n % 4] = p.soft_cap * tanhf(c[n / 4][n % 4] * p.scale / p.soft_cap);
            factor = LOG2_E;
        }
        if (!is_fully_seen) {
#pragma unroll
            for (uint32 n = 0; n < 8; n++) {
                const int32 token = pair.position[n / 2 * 8 + lane / 4];
                if (uint32(token - first[0][n % 2]) >= count[0][n % 2]) c[n / 4][n % 4] = minus_infinity();
            }
        }
        float (&m)[2] = this->m[0], (&l)[2] = this->l[0], next[2];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            next[i] = fmaxf(fmaxf(c[0][i], c[0][i + 2]), fmaxf(c[1][i], c[1][i + 2]));
#pragma unroll
            for (uint32 step = 4; step < WARP; step *= 2) next[i] = fmaxf(next[i], __shfl_xor_sync(FULL_WARP, next[i], step));
            next[i] = fmaxf(m[i], next[i] * factor);
        }
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
        is_clear = false;
        // Where nothing is seen yet, −∞ − 0 and not −∞ + ∞.
        const float shift[2] = {m[0] == minus_infinity() ? 0.0f : m[0], m[1] == minus_infinity() ? 0.0f : m[1]};
#pragma unroll
        for (uint32 n = 0; n < 8; n++) {
            float &x = c[n / 4][n % 4];
            x = exp2_fast(fmaf(x, factor, -shift[n % 2]));
            l[n % 2] += x;
        }
    }
    // acc[0][j] gets channels j, j + 8, j + 16 …, turned: of each pair that are 8 apart, one is of row lane / 4 of the product, the other of row + 8.
    __device__ void add_values(const char *values, const uint32 (&weights)[2]) {
        const char *const from = values + lane % 4 * 2 * CodedPair::VALUE_PITCH + lane / 4 * 8;
        Float16::multiply(sums, {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES}, weights[0], weights[1]);
        uint2 codes[4];
#pragma unroll
        for (uint32 n = 0; n < 4; n++) codes[n] = as<uint2>(from + (n / 2 * 8 + n % 2) * CodedPair::VALUE_PITCH);
#pragma unroll
        for (uint32 four = 0; four < 2; four++) {
            const uint32 halves = four ? 0x7632 : 0x5410;
            uint32 both[4];  // four codes of tokens of the first eight, then 8 channels on; the same of the last eight tokens
#pragma unroll
            for (uint32 n = 0; n < 2; n++) {
                both[n * 2] = __byte_perm(codes[n * 2].x, codes[n * 2 + 1].x, halves);
                both[n * 2 + 1] = __byte_perm(codes[n * 2].y, codes[n * 2 + 1].y, halves);
            }
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                uint32 a[4];
#pragma unroll
                for (uint32 i = 0; i < 4; i++) a[i] = widen_codes(both[i], n);
                Float16::multiply(acc[0][four * 4 + n], a, weights[0], weights[1]);
            }
        }
    }

    // Turns acc back, and into the order of channels of MmaCompute.
    __device__ void turn_acc() {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            // Bits of x's index and of the lane: of channels, 3 | 2 1 0, and 6 5 4.
            float x[16];
#pragma unroll
            for (uint32 n = 0; n < 16; n++) x[n] = fmaf(acc[0][n % 8][n / 8 * 2 + i], 1.0f / code_unit(n), -CODE_OFFSET * sums[i]);
#pragma unroll
            for (uint32 step = 1; step < 16; step *= 2) butterflies(x, step);
            exchange<4, 16>(x, lane);
            exchange<2, 8>(x, lane);
            exchange<1, 4>(x, lane);
#pragma unroll
            for (uint32 step = 1; step < 8; step *= 2) butterflies(x, step);
#pragma unroll
            for (uint32 n = 0; n < 16; n++) acc[0][n % 8][n / 8 * 2 + i] = x[n] * (HADAMARD_128 / WEIGHT_UNIT);
        }
    }
};

template <typename Type, uint32 ROW_COUNT>
struct Int4Rows8 {
    using Compute = Int4Rows8Compute<Type, ROW_COUNT>;
    static constexpr uint32 ROWS = ROW_COUNT, STAGES = 2, CTAS = 1;
    // A tile of 16 bits takes the place of the ring.
    static constexpr bool EXACT_IS_APART = false;
    static constexpr uint32 WARP_BYTES = (STAGES * sizeof(CodedPair) + KEPT_BYTES + 127) / 128 * 128;
    using Join = Rows8Join<ROW_COUNT, WARP_BYTES>;
};
