// The form of decode128.cuh for up to four rows: as rows8.cuh, but a row has two of a product's eight columns.
//
//   keys    a turned query is a row of whole numbers of 15 bits, 256 · upper + lower byte: columns 2r and 2r + 1 of bytes. Codes are multiplied as
//           they lie, four of a word at a time, those of even channels and 16 times those of odd ones
//   values  weights of float16: in columns 2r those of tokens 0–7 of a tile, in columns 2r + 1 those of tokens 8–15
//
// So a lane has scores of one row, and half as many.
#pragma once

#include "attention_int4/rows8.cuh"

// As TurnedQueries.
struct TurnedBytes {
    static constexpr uint32 PITCH = TurnedQueries::PITCH;
    // Behind each row: what its products with 16 times the codes are multiplied by, 16 · CODE_OFFSET · Σ of the row, and 1 / unit.
    struct Row {
        float unit;
        int32 offset;
        float inverse;
    };
    __device__ static Row row_of(const char *turned, uint32 row) {
        uint32 words[4];
        load_four_words(shared_address(turned) + row * PITCH + 256, words);
        return {__uint_as_float(words[0]), int32(words[1]), __uint_as_float(words[2])};
    }

    template <uint32 ROWS>
    __device__ static void turn(const Int4Params &p, const float (&w)[4], const char *from, uint32 from_pitch, char *to) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        static_assert(ROWS <= WARPS);
        if (warp >= ROWS) return;
        float x[4];
        TurnedQueries::read_and_turn(p, w, from + warp * from_pitch, x);
        const float top = TurnedQueries::top_of(x);
        // A row that is not finite has a unit that is no number.
        const bool is_finite = x[0] - x[0] == 0.0f && x[1] - x[1] == 0.0f && x[2] - x[2] == 0.0f && x[3] - x[3] == 0.0f;
        constexpr float MOST = 0x1p13f;  // that a power of two becomes: whole numbers are below twice as much
        const float power = __uint_as_float(__float_as_uint(fmaxf(top, 0x1p-100f)) & 0x7f800000);
        const float inverse = MOST / power, unit = __all_sync(FULL_WARP, is_finite) ? power * (1.0f / (MOST * 16.0f)) : __uint_as_float(0x7fc00000);
        // Each part has four words for channels 16n … 16n + 15 of a quarter: two of even ones, then two of odd ones.
        char *const at = to + warp * PITCH + lane / 4 * 16 + lane % 4 * 2;
        int32 sum = 0;
#pragma unroll
        for (uint32 odd = 0; odd < 2; odd++) {
            const int32 low = __float2int_rn(x[odd] * inverse), high = __float2int_rn(x[odd + 2] * inverse);
            sum += low + high;
            const auto upper = [](int32 x) { return uint32((x + 128) >> 8) & 0xff; };
            as<uint16>(at + odd * 8) = uint16(upper(low) | upper(high) << 8);
            as<uint16>(at + odd * 8 + 128) = uint16((uint32(low) & 0xff) | (uint32(high) & 0xff) << 8);
        }
#pragma unroll
        for (uint32 step = 1; step < WARP; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        if (lane == 0) as<Row>(to + warp * PITCH + 256) = {unit, sum * int32(16.0f * CODE_OFFSET), inverse * 16.0f};
    }
};

template <typename Type>
struct Int4Rows4Compute : Int4Rows8Compute<Type, 4> {
    using Base = Int4Rows8Compute<Type, 4>;
    using Base::acc, Base::lane, Base::first, Base::count, Base::p, Base::turned, Base::mean_of, Base::of_mean, Base::is_clear, Base::sums;
    using Turned = TurnedBytes;

    __device__ Int4Rows4Compute(const AttentionParams &p, char *shared) : Base(p, shared) {}

    // While tiles are coded, m[0][0] and l[0][0] are those of this row, of which acc has two columns.
    __device__ uint32 own_row() const { return lane % 4; }

    __device__ void turned_to_registers(const char *from) {
        const uint32 column = lane / 4, address = shared_address(from) + column / 2 * Turned::PITCH + column % 2 * 128 + lane % 4 * 32;
#pragma unroll
        for (uint32 s = 0; s < 2; s++) {
            uint32 x[4];
            load_four_words(address + s * 16, x);
            turned[s * 2][0] = x[0], turned[s * 2][1] = x[1], turned[s * 2 + 1][0] = x[2], turned[s * 2 + 1][1] = x[3];
        }
    }
    __device__ void attend_coded(const CodedGroup &group, uint32 count, uint32 queries, const char *turned_queries, bool is_fully_seen) {
        if (group.block != mean_of) Base::multiply_mean(group, queries + lane % 8 / 2 * Base::QUERY_PITCH);
        if (count <= 2) attend_tiles<2>(group, count, turned_queries, is_fully_seen);
        else attend_tiles<4>(group, count, turned_queries, is_fully_seen);
        is_clear = false;
    }
    template <uint32 TILES>
    __device__ void attend_tiles(const CodedGroup &group, uint32 count, const char *turned_queries, bool is_fully_seen) {
        const TurnedBytes::Row row = Turned::row_of(turned_queries, own_row());
        const float mean = of_mean[0] * row.inverse;
        uint32 scales[TILES / 2];
#pragma unroll
        for (uint32 n = 0; n < TILES / 2; n++) scales[n] = weight_unit_in(scales_of_token(group, n * WARP + lane));
        float c[TILES][2], of_value[TILES][2];
        const uint32 keys = shared_address(group.keys) + lane * 16;
#pragma unroll
        for (uint32 tile = 0; tile < TILES; tile++) {
            int32 products[2];
            multiply_keys(products, keys + tile * TILE * CodedGroup::PITCH, -row.offset);
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                const uint32 scale = __shfl_sync(FULL_WARP, scales[tile / 2], tile % 2 * TILE + half * 8 + lane / 4);
                of_value[tile][half] = widen_float16(scale >> 16);
                c[tile][half] = fmaf(widen_float16(scale & 0xffff), float(products[half]), mean);
            }
        }
        update_softmax(c, count, row.unit, is_fully_seen, group);
        const uint32 of_first = lane / 4 % 2 ? 0 : ~0u, values = shared_address(group.values), from[2] = {values + Base::value_of_lane(0), values + Base::value_of_lane(1)};
#pragma unroll
        for (uint32 tile = 0; tile < TILES; tile++) {
            const uint32 both = transpose(Float16::pack(c[tile][0] * of_value[tile][0], c[tile][1] * of_value[tile][1]));
            Base::add_values(from, tile, {both & of_first, both & ~of_first});
        }
    }
    // 16 times the products of the row with the codes of tokens lane / 4 and lane / 4 + 8, and `offset`.
    __device__ void multiply_keys(int32 (&products)[2], uint32 keys, int32 offset) const {
        uint32 codes[2][4];
#pragma unroll
        for (uint32 half = 0; half < 2; half++) load_four_words(keys + half * 8 * CodedGroup::PITCH, codes[half]);
        // Sums over even channels, and 16 times those over odd ones.
        int32 even[4] = {}, odd[4] = {};
#pragma unroll
        for (uint32 s = 0; s < 2; s++) {
            const auto multiply = [&](int32 (&sum)[4], uint32 mask, const uint32 (&of_query)[2]) {
                multiply_bytes(sum, {codes[0][s * 2] & mask, codes[1][s * 2] & mask, codes[0][s * 2 + 1] & mask, codes[1][s * 2 + 1] & mask}, of_query[0], of_query[1]);
            };
            multiply(even, 0x0f0f0f0f, turned[s * 2]);
            multiply(odd, 0xf0f0f0f0, turned[s * 2 + 1]);
        }
#pragma unroll
        for (uint32 half = 0; half < 2; half++)
            products[half] = (even[half * 2] * 16 + odd[half * 2]) * 256 + (even[half * 2 + 1] * 16 + odd[half * 2 + 1]) + offset;
    }
    __device__ static void multiply_bytes(int32 (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    template <uint32 TILES>
    __device__ void update_softmax(float (&c)[TILES][2], uint32 tiles, float unit, bool is_fully_seen, const CodedGroup &group) {
        float factor = unit * (p.scale * LOG2_E);  // s · log2 e = c · factor
        if (p.soft_cap != 0.0f) {
            const float inverse = p.scale / p.soft_cap;
#pragma unroll
            for (uint32 n = 0; n < TILES * 2; n++) c[n / 2][n % 2] = p.soft_cap * tanh_fast(c[n / 2][n % 2] * unit * inverse);
            factor = LOG2_E;
        }
#pragma unroll
        for (uint32 n = 0; n < TILES * 2; n++) {
            if (n / 2 >= tiles) c[n / 2][n % 2] = minus_infinity();
        }
        if (!is_fully_seen) {
            const int32 own_first = of_own_row(first[0]), own_count = of_own_row(count[0]);
#pragma unroll
            for (uint32 n = 0; n < TILES * 2; n++) {
                if (uint32(group.position[n * 8 + lane / 4] - own_first) >= uint32(own_count)) c[n / 2][n % 2] = minus_infinity();
            }
        }
        float &m = this->m[0][0], &l = this->l[0][0], next = c[0][0];
#pragma unroll
        for (uint32 n = 1; n < TILES * 2; n++) next = fmaxf(next, c[n / 2][n % 2]);
#pragma unroll
        for (uint32 step = 4; step < WARP; step *= 2) next = fmaxf(next, __shfl_xor_sync(FULL_WARP, next, step));
        next = fmaxf(m, next * factor);
        if (__any_sync(FULL_WARP, next != m)) {
            if (!is_clear) {
                const float keep = weight(m, next);
                l *= keep;
#pragma unroll
                for (uint32 n = 0; n < 32; n++) acc[0][n / 4][n % 4] *= keep;
#pragma unroll
                for (uint32 n = 0; n < 4; n++) sums[n] *= keep;
            }
            m = next;
        }
        // Where nothing is seen yet, −∞ − 0 and not −∞ + ∞.
        const float shift = m == minus_infinity() ? 0.0f : m;
#pragma unroll
        for (uint32 n = 0; n < TILES * 2; n++) {
            float &x = c[n / 2][n % 2];
            x = exp2_fast(fmaf(x, factor, -shift));
            l += x;
        }
    }
    // Lanes have x for each of the two rows of MmaCompute; returns what belongs to the lane's own row.
    template <typename T>
    __device__ int32 of_own_row(const T (&x)[2]) const {
        const uint32 from = (lane & ~3u) | own_row() / 2;
        const int32 even = __shfl_sync(FULL_WARP, int32(x[0]), from), odd = __shfl_sync(FULL_WARP, int32(x[1]), from);
        return own_row() % 2 ? odd : even;
    }
    // The other way; lanes of rows from the fourth on get rows that there are.
    __device__ float of_base_row(float own, uint32 i) const { return __shfl_sync(FULL_WARP, own, (lane & ~3u) | (this->row(i) & 3u)); }

    __device__ void turn_acc() {
        const float of_codes = sums[0] + sums[1];
        float x[16];
#pragma unroll
        for (uint32 n = 0; n < 16; n++) {
            const float *const columns = acc[0][n / 8 * 4 + n % 4] + n / 4 % 2 * 2;
            x[n] = fmaf(columns[0] + columns[1], 1.0f / code_unit(n), -CODE_OFFSET * of_codes);
        }
        Base::turn_row(x, lane);
#pragma unroll
        for (uint32 n = 0; n < 16; n++) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) acc[0][n / 4 * 2 + n % 2][n / 2 % 2 * 2 + i] = of_base_row(x[n], i);
        }
        const float m = this->m[0][0], l = this->l[0][0];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            this->m[0][i] = of_base_row(m, i);
            this->l[0][i] = of_base_row(l, i);
        }
        mean_of = -1;
    }
};

template <typename Type>
struct Int4Rows4 {
    using Compute = Int4Rows4Compute<Type>;
    static constexpr uint32 ROWS = 4, STAGES = 2, CTAS = 1;
    static constexpr uint32 WARP_BYTES = (STAGES * sizeof(CodedGroup) + KEPT_BYTES + 127) / 128 * 128;
    using Join = Rows8Join<ROWS, WARP_BYTES>;
};
