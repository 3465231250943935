// Attention on tensor cores to keys and values in INT4, for heads of any width and rows of any number (variant int4_mma): attention/mma.cuh, with tiles that are
// of 16 bits or coded, in any order.
//
//   q·key = q·mean + s·(Σ t_c·c − 7.5·Σ t_c) with t = H·(w∘q), which is made once a CTA, divided by a power of two a row, in float16
//   Σ p·value = H·Σ p·s·(c − 7.5): a sum of its own beside that of values of 16 bits, to which it is turned back at the end, once a warp or unit
//
// Codes are copied to the ring as they lie in memory and are operands as they lie in their byte (coded.cuh). Tokens are M of m16n8k16, query rows N:
//
//   keys    lane (t = lane / 4, j = lane % 4) has the codes of channels 8j … 8j + 7 of each 32, of tokens t and t + 8
//   values  a word is four codes of a token and of the next one, as ldmatrix transposes them: lane (u = lane / 4, t = lane % 4) has those of channels
//           32c + 4u … 32c + 4u + 3 of tokens 2t and 2t + 1 of eight, for each c
#pragma once

#include "attention_int4/coded.cuh"
#include "attention_int4/tokens.cuh"

template <uint32 BYTES>
__device__ inline void copy_codes(uint32 to, const char *from) {
    if constexpr (BYTES == 16) copy_16(to, from);
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// A coded tile in a stage of the ring, of heads of up to WIDTH channels.
template <uint32 WIDTH>
struct CodedTile {
    static constexpr uint32 PITCH = WIDTH / 2 + 16;  // an odd number of 16 bytes, so that eight rows hit different banks
    TokenInfo info;            // its scales are words that have the token's scale in a byte
    uint32 scale_byte[WARP];   // of keys, then of values: which byte
    char mean[WIDTH * 2], keys[TILE * PITCH], values[TILE * PITCH];
};

template <typename Type, uint32 WIDTH>
struct Int4MmaCompute : MmaCompute<Type, WIDTH, WIDTH> {
    using Base = MmaCompute<Type, WIDTH, WIDTH>;
    using Base::acc, Base::lane, Base::log_members, Base::m, Base::member, Base::p, Base::team, Base::warp;
    using Base::K_STEPS, Base::QUERY_PITCH;
    using Tile = CodedTile<WIDTH>;
    static constexpr uint32 PIECES = WIDTH / 64;  // of values
    static_assert(sizeof(Tile) <= sizeof(TokenInfo) + TILE * Base::PITCH);

    // Turned queries of wide heads are read from shared memory wherever they are multiplied.
    static constexpr bool TURNED_IN_REGISTERS = WIDTH <= 128;
    uint32 turned[TURNED_IN_REGISTERS ? K_STEPS : 1][2];
    // The sum of coded values, and the sums of their weights, by which it has too much: CODE_OFFSET times as much.
    float coded[PIECES * 4][4], sums[2];
    // The mean of the granule that this lane has found, if it is coded: `page` is −1 otherwise.
    const char *mean;

    __device__ Int4MmaCompute(const AttentionParams &p, char *shared, uint32 log_members) : Base(p, shared, log_members) { clear_coded(); }
    __device__ void clear_coded() {
#pragma unroll
        for (uint32 n = 0; n < PIECES * 16; n++) coded[n / 4][n % 4] = 0.0f;
        sums[0] = sums[1] = 0.0f;
    }
    __device__ void clear() {
        Base::clear();
        clear_coded();
    }
    __device__ const Int4Params &int4() const { return reinterpret_cast<const Int4Params &>(p); }

    // Queries that are turned lie behind the others. Behind each row: its unit, by which its products are multiplied, and CODE_OFFSET · Σ of it.
    __device__ char *turned_of(uint32 row) const { return this->query_of((WARP_ROWS << log_members) + row); }
    __device__ void turn_query(const WorkItem &item, uint32 row) const {
        constexpr uint32 COUNT = WIDTH / WARP;
        float x[COUNT], top = 0x1p-100f, sum = 0.0f;
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            const uint32 channel = lane + i * WARP, bits = as<uint16>(this->query_of(row) + channel * 2);
            x[i] = channel < p.dim ? (p.kv_type == FLOAT16 ? widen_float16(bits) : widen_bfloat16(bits)) * weight_of_channel(int4(), item.head, channel) : 0.0f;
        }
        turn<COUNT>(x, p.dim);
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) top = fmaxf(top, fabsf(x[i]));
#pragma unroll
        for (uint32 step = 1; step < WARP; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
        const float power = __uint_as_float(__float_as_uint(top) & 0x7f800000), inverse = 1.0f / power;
        char *const to = turned_of(row);
#pragma unroll
        for (uint32 i = 0; i < COUNT; i++) {
            // Eight channels are four words, of codes n and n + 4. Those of even n make up for the smaller unit of their codes.
            const uint32 channel = lane + i * WARP, n = channel % 4;
            const float ratio = n % 2 ? 1.0f : code_unit(1) / code_unit(0);
            const uint16 bits = narrow_float16(x[i] * inverse * ratio);
            as<uint16>(to + channel / 8 * 16 + n * 4 + channel % 8 / 4 * 2) = bits;
            sum += widen_float16(bits) * (1.0f / ratio);
        }
#pragma unroll
        for (uint32 step = 1; step < WARP; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        if (lane == 0) as<float2>(to + WIDTH * 2) = {power / code_unit(1), sum * (CODE_OFFSET * code_unit(1))};
    }
    // Turns the queries, which have arrived, and reads them.
    __device__ void open_queries(const WorkItem &item, const Reach &reach) {
#pragma unroll 1
        for (uint32 row = warp; row < WARP_ROWS << log_members; row += WARPS) turn_query(item, row);
        __syncthreads();
        const uint32 first = member * WARP_ROWS;
        if constexpr (TURNED_IN_REGISTERS) {
#pragma unroll
            for (uint32 s = 0; s < K_STEPS; s += 2) {
                uint32 x[4];
                read_turned(x, s);
                turned[s][0] = x[0], turned[s][1] = x[1], turned[s + 1][0] = x[2], turned[s + 1][1] = x[3];
            }
        }
        this->read_reach(item, reach, first);
    }
    // Reads 32 channels of a turned query, in the order in which the lane meets those of the keys.
    __device__ void read_turned(uint32 (&to)[4], uint32 s) const {
        load_four_words(shared_address(turned_of(member * WARP_ROWS + lane / 4)) + lane % 4 * 16 + s * 32, to);
    }

    // Remembers where the lane's granule lies.
    __device__ void remember(const WorkItem &item, const Int4Reach<Reach> &reach, const Place &place) {
        if (place.position < 0 || !reach.is_coded(place)) {
            this->remember_granule(item, place);
            this->page = -1;
            return;
        }
        const uint32 page = place.page - p.pages;
        this->position = place.position;
        this->page = page;
        this->row_in_page = place.row;
        this->key = int4().k.at(page, place.row, item.head);
        this->value = int4().v.at(page, place.row, item.head);
        mean = mean_of_token(p, int4(), item, place.position, page);
    }
    // Requests a coded tile, of which the team's warps share the rows.
    __device__ void load_coded(const WorkItem &item, const Reach &reach, uint32 from, char *to) const {
        const int32 granule = __shfl_sync(FULL_WARP, this->position, from);
        Tile &tile = as<Tile>(to);
        const uint32 last = (1 << log_members) - 1;
        load_codes(int4().k, this->from_lane(this->key, from), p.dim / 2, member, tile.keys);
        load_codes(int4().v, this->from_lane(this->value, from), p.value_dim / 2, last - member, tile.values);
        const char *const from_mean = this->from_lane(mean, from);
        if (member == last && lane < p.dim / 8) copy_16(shared_address(tile.mean) + lane * 16, from_mean ? from_mean + lane * 16 : p.q.data, from_mean);
        const int32 page = __shfl_sync(FULL_WARP, this->page, from), row = __shfl_sync(FULL_WARP, this->row_in_page, from);
        if (member) return;
        const uint32 token = lane % TILE;
        const bool of_keys = lane < TILE, is_there = is_reached(reach, granule, token);
        const char *const scale = (of_keys ? int4().k_scale : int4().v_scale).at(page, row + token, item.head);
        const uint32 byte = uint32(uint64(scale)) % 4;
        copy_4(shared_address((of_keys ? tile.info.k_scale : tile.info.v_scale) + token), scale - byte, is_there);
        tile.scale_byte[lane] = byte;
        if (of_keys) tile.info.position[token] = is_there ? granule + int32(token) : -1;
    }
    __device__ void load_codes(const View<4> &codes, const char *from, uint32 bytes, uint32 member, char *to) const {
        const bool in_16 = ((uint32(uint64(from)) | uint32(codes.step[1]) | bytes) & 15) == 0;
        if (in_16) load_codes<16>(from, codes.step[1], bytes, member, to);
        else load_codes<8>(from, codes.step[1], bytes, member, to);
    }
    template <uint32 BYTES>
    __device__ void load_codes(const char *from, int64 step, uint32 bytes, uint32 member, char *to) const {
        constexpr uint32 LANES = WIDTH / 2 / BYTES, ROWS = WARP / LANES;
        const uint32 at = lane % LANES * BYTES;
        if (at >= bytes) return;
#pragma unroll
        for (uint32 n = 0; n < TILE / ROWS; n++) {
            const uint32 row = n * ROWS + lane / LANES;
            if (n % (1 << log_members) == member) copy_codes<BYTES>(shared_address(to) + row * Tile::PITCH + at, from + row * step + at);
        }
    }

    // The scores of a tile of 16 bits. Its padding is not read.
    __device__ void multiply_exact(float (&c)[4], const char *tile) const {
        float sum[2][4] = {};
        const uint32 matrix = lane / 8, line = lane % 8;
        const uint32 keys = shared_address(tile) + sizeof(TokenInfo) + (line + matrix % 2 * 8) * Base::PITCH + matrix / 2 * 16;
        const uint32 queries = shared_address(this->query_of(member * WARP_ROWS + line)) + matrix * 16;
#pragma unroll
        for (uint32 s = 0; s < K_STEPS; s += 2) {
            if (s * 16 >= p.dim) break;
            uint32 q[4], k[4];
            load_matrices(q, queries + s * 32);
            load_matrices(k, keys + s * 32);
            Type::multiply(sum[0], k, q[0], q[1]);
            if (s * 16 + 16 >= p.dim) break;
            load_matrices(k, keys + s * 32 + 32);
            Type::multiply(sum[1], k, q[2], q[3]);
        }
#pragma unroll
        for (uint32 e = 0; e < 4; e++) c[e] = sum[0][e] + sum[1][e];
    }
    // The products of the lane's rows with the mean of a tile's block, which stands in for all tokens.
    __device__ void multiply_mean(float (&c)[2], const Tile &tile) const {
        float sum[2][4] = {};
        const uint32 mean = shared_address(tile.mean) + lane / 8 * 16, queries = shared_address(this->query_of(member * WARP_ROWS + lane % 8)) + lane / 8 * 16;
#pragma unroll
        for (uint32 s = 0; s < K_STEPS; s += 2) {
            if (s * 16 >= p.dim) break;
            uint32 a[4], q[4];
            load_matrices(a, mean + s * 32);
            load_matrices(q, queries + s * 32);
            Type::multiply(sum[0], {a[0], a[0], a[1], a[1]}, q[0], q[1]);
            if (s * 16 + 16 < p.dim) Type::multiply(sum[1], {a[2], a[2], a[3], a[3]}, q[2], q[3]);
        }
#pragma unroll
        for (uint32 i = 0; i < 2; i++) c[i] = sum[0][i] + sum[1][i];
    }
    // The scores of a coded tile. Channels past the last have queries of zero.
    __device__ void multiply_codes(float (&c)[4], const Tile &tile, const float (&of_key)[2]) const {
        float of_mean[2], unit[2], sum[2][4] = {};
        multiply_mean(of_mean, tile);
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const float2 of_row = as<float2>(turned_of(member * WARP_ROWS + this->row(i)) + WIDTH * 2);
            unit[i] = of_row.x;
            sum[0][i] = sum[0][2 + i] = -of_row.y;
        }
        const char *const keys = tile.keys + lane / 4 * Tile::PITCH + lane % 4 * 4;
#pragma unroll
        for (uint32 s = 0; s < K_STEPS; s += 2) {
            if (s * 16 >= p.dim) break;
            const uint32 low = as<uint32>(keys + s * 8), high = as<uint32>(keys + 8 * Tile::PITCH + s * 8);
            uint32 q[4];
            if (!TURNED_IN_REGISTERS) read_turned(q, s);
#pragma unroll
            for (uint32 n = 0; n < 2; n++) {
                const uint32 a[4] = {widen_codes(low, n * 2), widen_codes(high, n * 2), widen_codes(low, n * 2 + 1), widen_codes(high, n * 2 + 1)};
                if constexpr (TURNED_IN_REGISTERS) Float16::multiply(sum[n], a, turned[s + n][0], turned[s + n][1]);
                else Float16::multiply(sum[n], a, q[n * 2], q[n * 2 + 1]);
            }
        }
#pragma unroll
        for (uint32 e = 0; e < 4; e++) c[e] = fmaf((sum[0][e] + sum[1][e]) * unit[e % 2], of_key[e / 2], of_mean[e % 2]);
    }
    // coded[4j + n] gets channels 64j + 4u + n, and those 32 further: the former are of row lane / 4 of the product, the latter of row + 8.
    __device__ void add_codes(const Tile &tile, const uint32 (&weights)[2]) {
        // All rows of this product are the same.
        float sum[4] = {sums[0], sums[1], sums[0], sums[1]};
        Float16::multiply(sum, {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES}, weights[0], weights[1]);
        sums[0] = sum[0];
        sums[1] = sum[1];
        const uint32 from = shared_address(tile.values) + (lane / 16 * 8 + lane % 8) * Tile::PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (uint32 j = 0; j < PIECES; j++) {
            if (j * 64 >= p.value_dim) break;
            uint32 codes[4];
            load_transposed(codes, from + j * 32);
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                uint32 a[4];
#pragma unroll
                for (uint32 i = 0; i < 4; i++) a[i] = widen_codes(codes[i], n);
                Float16::multiply(coded[j * 4 + n], a, weights[0], weights[1]);
            }
        }
    }
    __device__ void attend(const char *at, bool is_coded) {
        const Tile &tile = as<Tile>(at);
        float c[4], of_key[2], of_value[2];
        if (is_coded) {
            const uint32 word = __float_as_uint((lane < TILE ? tile.info.k_scale : tile.info.v_scale)[lane % TILE]);
            const float scale = widen_float8(word >> tile.scale_byte[lane] * 8 & 0xff, true);
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                of_key[half] = __shfl_sync(FULL_WARP, scale, half * 8 + lane / 4);
                of_value[half] = __shfl_sync(FULL_WARP, scale, TILE + half * 8 + lane / 4) * WEIGHT_UNIT;
            }
            multiply_codes(c, tile, of_key);
        } else {
            multiply_exact(c, at);
        }
        const float before[2] = {m[0][0], m[0][1]};
        uint32 weights[1][2];
        this->template update_softmax<false>(0, c, false, false, tile.info, 1.0f, 1.0f, weights[0]);
        if (__any_sync(FULL_WARP, before[0] != m[0][0] || before[1] != m[0][1])) {
            const float keep[2] = {weight(before[0], m[0][0]), weight(before[1], m[0][1])};
#pragma unroll
            for (uint32 n = 0; n < PIECES * 16; n++) coded[n / 4][n % 4] *= keep[n % 2];
            sums[0] *= keep[0];
            sums[1] *= keep[1];
        }
        if (is_coded) {
#pragma unroll
            for (uint32 half = 0; half < 2; half++) weights[0][half] = transpose(Float16::pack(c[half * 2] * of_value[half], c[half * 2 + 1] * of_value[half]));
            add_codes(tile, weights[0]);
        } else {
            // Matrices: the first 16 bytes and the next of tokens 0–7, then of 8–15.
            const uint32 values = shared_address(at) + sizeof(TokenInfo) + p.v_offset;
            this->template add_values<false>(values + (lane % 8 + lane / 16 * 8) * Base::PITCH + lane / 8 % 2 * 16, weights);
        }
    }

    // Turns the sum of coded values back, into the order of channels of acc, and adds it.
    __device__ void finish() {
        turn_row<0>();
        turn_row<1>();
        Base::finish();
    }
    // Bits of x's index and of the lane: of channels, 7 6 5 1 0 and 4 3 2; then 7 6 5 3 4 and 2 1 0. Channels are turned by as many as
    // the largest power of two that divides the width.
    template <uint32 I>
    __device__ void turn_row() {
        constexpr uint32 COUNT = WIDTH / 8;
        const uint32 together = p.value_dim & (0 - p.value_dim);
        float x[COUNT];
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) x[n] = fmaf(coded[n / 8 * 4 + n % 4][n / 4 % 2 * 2 + I], n % 2 ? 1.0f / code_unit(1) : 1.0f / code_unit(0), -CODE_OFFSET * sums[I]);
        butterflies(x, 1);
        butterflies(x, 2);
#pragma unroll
        for (uint32 step = 4; step < COUNT; step *= 2)
            if (together >= step * 16) butterflies(x, step);
        exchange<1, 4>(x, lane);
        exchange<2, 8>(x, lane);
        butterflies(x, 1);
        butterflies(x, 2);
        exchange<1, 16>(x, lane);
        if (together >= 32) butterflies(x, 1);
        const float factor = 1.0f / (WEIGHT_UNIT * sqrtf(together));
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) acc[0][n / 4 * 2 + n % 2][n / 2 % 2 * 2 + I] += x[n] * factor;
    }

    // Attends to a chunk, as a team of the CTA: as MmaCompute does, but stages are of either kind.
    template <typename Close>
    __device__ void run(const CtaShare &cta_share, const WorkItem &item, const Reach &reach, Close close_unit) {
        const Tiles tiles(p, cta_share.begin + team, cta_share.end, LOG_WARPS - log_members);
        const Int4Reach<Reach> places{{reach}, int4(), coded_end(int4(), as<int32>(int4().coded_lens.at(item.seq)), reach.length)};
        const uint32 stages = p.stages, unit_tiles = p.partials.acc.data ? p.unit_tiles.value : ~0u;
        this->load_queries(item);
        uint32 at = 0, part = 0, unit = tiles.first, coded_stages = 0;
#pragma unroll 1
        for (uint32 step = 0;; step++) {
            if (step >= stages) {
                wait_copies(stages - 1);
                if (step == stages) {
                    __syncthreads();
                    open_queries(item, reach);
                }
                const bool exists = tiles.count, ends = step - stages + 1 >= tiles.count;
                if (exists) {
                    this->sync_team();
                    attend(this->stage(at), coded_stages >> at & 1);
                }
                this->sync_team();
                if (ends || ++part == unit_tiles) {
                    close_unit(unit, exists);
                    part = 0;
                    unit += tiles.step;
                }
                if (ends) break;
            }
            if (step < tiles.count) {
                if (tiles.begins(p, step)) remember(item, places, find_granule(p, places, item, cta_share.entries, tiles, step));
                const uint32 from = tiles.lane_of(p, step, 0);
                const bool has_codes = __shfl_sync(FULL_WARP, this->page, from) >= 0;
                coded_stages = (coded_stages & ~(1u << at)) | has_codes << at;
                if (has_codes) load_coded(item, reach, from, this->stage(at));
                else this->load(tiles, item, reach, step, this->stage(at));
            }
            end_copies();
            at = at + 1 == stages ? 0 : at + 1;
        }
    }
};

#define INT4_MMA_KERNEL(name, ...)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Int4Params p) {                   \
        attention<__VA_ARGS__>(p.to);                                                                                       \
    }
