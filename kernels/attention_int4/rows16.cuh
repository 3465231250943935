// The form of decode128.cuh for nine to sixteen rows: query rows are M of m16n8k16, as in attention/decode128_rows16.cuh.
//
//   keys    lane (t = lane / 4, j = lane % 4) has the codes of channels 32j … 32j + 31 of tokens t and t + 8: 16 bytes each
//   values  a word is four codes of a token and of the next one, as ldmatrix transposes them: lane (u = lane / 4, t = lane % 4) has those of channels
//           32c + 4u … 32c + 4u + 3 of tokens 2t and 2t + 1 of eight, for each of four c
#pragma once

#include "attention_int4/coded.cuh"

template <typename Type>
struct Int4Rows16Compute : Rows16Compute<Type> {
    using Base = Rows16Compute<Type>;
    using Base::acc, Base::lane, Base::STEPS;
    static_assert(!Base::IS_FP8);
    using Turned = TurnedQueries;

    uint32 turned[STEPS][4];

    __device__ Int4Rows16Compute(const AttentionParams &p, char *shared) : Base(p, shared, 0), mean_of(-1), sums{} {}

    __device__ void turned_to_registers(const char *from) {
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const uint32 address = shared_address(from) + this->row(i) * TurnedQueries::PITCH + lane % 4 * 64;
#pragma unroll
            for (uint32 s = 0; s < STEPS; s += 2) {
                uint32 x[4];
                load_four_words(address + s * 8, x);
                turned[s][i] = x[0], turned[s][i + 2] = x[1], turned[s + 1][i] = x[2], turned[s + 1][i + 2] = x[3];
            }
        }
    }

    // The product of queries with the mean of block `mean_of`, of the lane's two rows.
    int32 mean_of;
    float of_mean[2];
    // Sums of the weights of values, by which acc has too much: CODE_OFFSET times as much.
    float sums[4];

    // `queries` is where queries lie as they are. count: tiles of the group, of which two are attended to together.
    __device__ void attend_coded(const CodedGroup &group, uint32 count, uint32 queries, const char *turned_queries, bool is_fully_seen) {
        if (group.block != mean_of) multiply_mean(group, queries);
#pragma unroll 1
        for (uint32 begin = 0; begin < count; begin += 2) attend_two(group, begin, begin + 1 < count, turned_queries, is_fully_seen);
    }
    __device__ void attend_two(const CodedGroup &group, uint32 begin, bool has_second, const char *turned_queries, bool is_fully_seen) {
        const uint32 scales = weight_unit_in(scales_of_token(group, begin * TILE + lane));
        const float of_key = widen_float16(scales & 0xffff), of_value = widen_float16(scales >> 16);
        float c[4][4];
        multiply_keys(c, group.keys + begin * TILE * CodedGroup::PITCH, turned_queries, of_key);
        const auto keep_sums = [&](const float(&keep)[2]) {
            sums[0] *= keep[0];
            sums[2] *= keep[1];
        };
        this->update_softmax(c, is_fully_seen, [&](uint32 tile, uint32 t) { return group.position[(begin + tile) * TILE + t]; }, keep_sums, has_second ? 4 : 2);
#pragma unroll
        for (uint32 tile = 0; tile < 2; tile++) {
            uint32 weights[4];
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                const uint32 token = tile * TILE + half * 8;
                const float low = scale_of(of_value, token), high = scale_of(of_value, token + 1);
                const float(&x)[4] = c[tile * 2 + half];
#pragma unroll
                for (uint32 i = 0; i < 2; i++) weights[half * 2 + i] = Float16::pack(x[i * 2] * low, x[i * 2 + 1] * high);
            }
            add_values(group.values + (begin + tile) * TILE * CodedGroup::PITCH, weights);
        }
    }
    // The scale of token `first` + 2 · (lane % 4).
    __device__ float scale_of(float scale, uint32 first) const { return __shfl_sync(FULL_WARP, scale, first + lane % 4 * 2); }

    // The mean stands in for eight tokens.
    __device__ void multiply_mean(const CodedGroup &group, uint32 queries) {
        mean_of = group.block;
        float sum[2][4] = {};
        const uint32 mean = shared_address(group.mean) + lane / 8 * 16, from = queries + lane % 16 * Base::QUERY_PITCH + lane / 16 * 16;
#pragma unroll
        for (uint32 s = 0; s < STEPS; s += 2) {
            uint32 a[2][4], b[4];
            load_matrices(b, mean + s * 32);
            load_matrices(a[0], from + s * 32);
            load_matrices(a[1], from + s * 32 + 32);
            Type::multiply(sum[0], a[0], b[0], b[1]);
            Type::multiply(sum[1], a[1], b[2], b[3]);
        }
        of_mean[0] = sum[0][0] + sum[1][0];
        of_mean[1] = sum[0][2] + sum[1][2];
    }
    __device__ void multiply_keys(float (&c)[4][4], const char *keys, const char *turned_queries, float scale) const {
        const TurnedQueries::Row rows[2] = {TurnedQueries::row_of(turned_queries, this->row(0)), TurnedQueries::row_of(turned_queries, this->row(1))};
        float sum[4][2][4] = {};
#pragma unroll
        for (uint32 half = 0; half < 4; half++) {
            uint32 codes[4];
            load_four_words(shared_address(keys) + half * 8 * CodedGroup::PITCH + lane * 16, codes);
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                Float16::multiply(sum[half][0], turned[n * 2], widen_codes(codes[n], 0), widen_codes(codes[n], 1));
                Float16::multiply(sum[half][1], turned[n * 2 + 1], widen_codes(codes[n], 2), widen_codes(codes[n], 3));
            }
        }
#pragma unroll
        for (uint32 half = 0; half < 4; half++) {
            const float low = scale_of(scale, half * 8), high = scale_of(scale, half * 8 + 1);
#pragma unroll
            for (uint32 e = 0; e < 4; e++) {
                const uint32 i = Base::row_of(e);
                c[half][e] = fmaf((e % 2 ? high : low) * rows[i].unit, sum[half][0][e] + sum[half][1][e] - rows[i].offset, of_mean[i]);
            }
        }
    }
    // acc[0][4c + n] gets channels 32c + 4u + n, turned; u: columns of the product.
    __device__ void add_values(const char *values, const uint32 (&weights)[4]) {
        Float16::multiply(sums, weights, TWO_ONES, TWO_ONES);
        // Matrices: tokens 0–7, then 8–15 of sixteen bytes, then of the next.
        const uint32 from = shared_address(values);
#pragma unroll
        for (uint32 j = 0; j < 2; j++) {
            uint32 codes[4];
            load_transposed(codes, from + CodedGroup::value_at(lane % 16, j * 2 + lane / 16));
#pragma unroll
            for (uint32 i = 0; i < 8; i++)
                Float16::multiply(acc[0][j * 8 + i], weights, widen_codes(codes[i / 4 * 2], i % 4), widen_codes(codes[i / 4 * 2 + 1], i % 4));
        }
    }

    // Turns acc back, and into the order of channels of Rows16Compute.
    __device__ void turn_acc() {
        turn_rows<0>();
        turn_rows<1>();
        mean_of = -1;
    }
    template <uint32 I>
    __device__ void turn_rows() {
        // Bits of x's index and of the lane: of channels, 6 5 1 0 2 and 4 3.
        float x[32];
#pragma unroll
        for (uint32 n = 0; n < 32; n++) x[n] = fmaf(acc[0][n / 2][I * 2 + n % 2], 1.0f / code_unit(n / 2), -CODE_OFFSET * sums[I * 2]);
#pragma unroll
        for (uint32 step = 1; step < 32; step *= 2) butterflies(x, step);
        exchange<1, 2>(x, lane);
        exchange<4, 1>(x, lane);
        butterflies(x, 1);
        butterflies(x, 4);
        constexpr float FACTOR = HADAMARD_128 / WEIGHT_UNIT;
#pragma unroll
        for (uint32 n = 0; n < 32; n++) {
            // Now 6 5 3 0 4 and 2 1; those of acc's index: 6 5 4 3 | 0.
            const uint32 tile = (n >> 4 & 1) * 8 + (n >> 3 & 1) * 4 + (n & 1) * 2 + (n >> 2 & 1);
            acc[0][tile][I * 2 + (n >> 1 & 1)] = x[n] * FACTOR;
        }
    }
};

template <typename Type>
struct Int4Rows16 {
    using Compute = Int4Rows16Compute<Type>;
    using Join = Rows16Join<Rows16Compute<Type>>;
    static constexpr uint32 ROWS = 16, STAGES = 2, CTAS = 1;
    static constexpr uint32 WARP_BYTES = (STAGES * sizeof(CodedGroup) + KEPT_BYTES + 127) / 128 * 128;
};
