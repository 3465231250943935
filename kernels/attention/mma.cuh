// Attention on tensor cores for rows of any number, keys of up to 576 and values of up to 512 channels (variant mma). A warp attends for eight
// rows to a tile of 16 tokens at a time.
//
// Runs where 16-bit queries meet keys and values of 16 bits or FP8 whose rows are whole 16-byte units, and no variant with a narrower task takes
// the call: src/ops/attention/device/choose.rs. decode128 and repair use MmaCompute, too.
//
//   scores  Sᵀ [16 tokens × 8 rows]   = K  [16 × D]  · Qᵀ [D × 8]      keys are M of m16n8k16, rows are N
//   acc     Oᵀ [Dv × 8 rows]         += Vᵀ [Dv × 16] · Pᵀ [16 × 8]     movmatrix turns scores into this product's operand
//
// A team of 1, 2, 4 or 8 warps shares a tile, each warp for eight of the rows, so that keys and values are read once for all rows.
//
//   list entries ─ page table ─┐                       (one granule a lane, for many tiles at once)
//   cp.async ring of `stages` tiles a team, each row padded by 16 bytes against bank conflicts
//   wait for the oldest ─ scores ─ mask ─ running softmax ─ acc ─ request the tile after the youngest
#pragma once

#include "attention/attend_share.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"

__device__ inline void copy_4(uint32 to, const char *from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}
__device__ inline void wait_copies(uint32 most) {
    switch (most) {
        case 0: wait_copies<0>(); break;
        case 1: wait_copies<1>(); break;
        case 2: wait_copies<2>(); break;
        case 3: wait_copies<3>(); break;
        case 4: wait_copies<4>(); break;
        case 5: wait_copies<5>(); break;
        case 6: wait_copies<6>(); break;
        default: wait_copies<7>();
    }
}
__device__ inline void load_matrices(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ inline void load_transposed(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ inline uint32 transpose(uint32 x) {
    uint32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

struct Float16 {
    static constexpr uint32 BYTES = 2;
    __device__ static void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    __device__ static uint32 pack(float low, float high) {
        uint32 x;
        asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(low), "f"(high));
        return x;
    }
};
struct Bfloat16 {
    static constexpr uint32 BYTES = 2;
    __device__ static void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    __device__ static uint32 pack(float low, float high) {
        uint32 x;
        asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(low), "f"(high));
        return x;
    }
};
// Two channels of `out`, of a 16-bit type.
__device__ inline uint32 pack_out(const AttentionParams &p, float low, float high) {
    return p.out_type == FLOAT16 ? Float16::pack(low, high) : Bfloat16::pack(low, high);
}

// FP8 is multiplied as float16, whose range and precision both FP8 types fit.
struct Float8 : Float16 {
    static constexpr uint32 BYTES = 1;
};

// Queries of keys of a 16-bit type may be float32.
template <typename Type>
__device__ inline bool is_wide(const AttentionParams &p) { return Type::BYTES == 2 && p.q_type == FLOAT32; }
// Bytes of so many channels of a query.
template <typename Type>
__device__ inline uint32 query_bytes(const AttentionParams &p, uint32 channels) { return channels << (is_wide<Type>(p) ? 2 : 1); }
// Requests eight channels of a query, as copy_16 does. Those of float32 are read here and written at once, rounded to the type of the keys.
template <typename Type>
__device__ inline void request_query(const AttentionParams &p, uint32 to, const char *from, bool is_there = true) {
    if (!is_wide<Type>(p)) return copy_16(to, from, is_there);
    const float4 none{}, low = is_there ? as<float4>(from) : none, high = is_there ? as<float4>(from + 16) : none;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(Type::pack(low.x, low.y)), "r"(Type::pack(low.z, low.w)), "r"(Type::pack(high.x, high.y)), "r"(Type::pack(high.z, high.w))
                 : "memory");
}

// Widens four FP8 values to float16: the first two, and the last two. Widened e4m3 lacks a factor of E4M3_UNIT.
#if __CUDA_ARCH__ >= 890
constexpr float E4M3_UNIT = 1.0f;
#else
constexpr float E4M3_UNIT = 256.0f;
#endif
template <bool IS_E5M2>
__device__ inline void widen_fp8(uint32 x, uint32 &first, uint32 &last) {
#if __CUDA_ARCH__ >= 890
    if constexpr (!IS_E5M2) {
        asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\tcvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
            : "=r"(first), "=r"(last) : "r"(x));
        return;
    }
#endif
    // e5m2 is the upper byte of a float16.
    first = __byte_perm(x, 0, 0x1404);
    last = __byte_perm(x, 0, 0x3424);
    if constexpr (IS_E5M2) return;
    const auto shifted = [](uint32 two) {
        const uint32 magnitude = two & 0x7f007f00, nan = (magnitude + 0x01000100) & 0x80008000;
        return (two & 0x80008000) | magnitude >> 1 | (nan - (nan >> 15));
    };
    first = shifted(first);
    last = shifted(last);
}

// Divides a row's queries by a power of two, so that float16 has room for bfloat16's range, and returns that power. Each of the row's four lanes
// has COUNT words of two channels.
template <typename Type, uint32 COUNT, typename WordOf>
__device__ inline float divide_row(const AttentionParams &p, const WordOf &word_of) {
    const auto at = [&](uint32 word, uint32 half) {
        const uint32 bits = half ? word >> 16 : word & 0xffff;
        if (p.q_type == BFLOAT16) return __uint_as_float(bits << 16);
        float x;
        asm("{\n\t.reg .b16 h;\n\tcvt.u16.u32 h, %1;\n\tcvt.f32.f16 %0, h;\n\t}" : "=f"(x) : "r"(bits));
        return x;
    };
    float top = 0x1p-100f;
#pragma unroll
    for (uint32 n = 0; n < COUNT * 2; n++) top = fmaxf(top, fabsf(at(word_of(n / 2), n % 2)));
    top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
    const float power = __uint_as_float(__float_as_uint(top) & 0x7f800000), inverse = 1.0f / power;
#pragma unroll
    for (uint32 n = 0; n < COUNT; n++) {
        uint32 &x = word_of(n);
        x = Type::pack(at(x, 0) * inverse, at(x, 1) * inverse);
    }
    return power;
}

struct Nothing {
    __device__ void operator()() const {}
};

// What is known of a tile's tokens.
struct TokenInfo {
    int32 position[TILE];  // −1: no row sees the token, or it is not there
    float k_scale[TILE], v_scale[TILE];
};

// One warp's products and softmax: keys, values and queries of Type, of up to MAX_DIM and MAX_VALUE_DIM channels, for BLOCKS times eight rows.
template <typename Type, uint32 MAX_DIM, uint32 MAX_VALUE_DIM, uint32 BLOCKS = 1>
struct MmaCompute {
    static constexpr uint32 BYTES = Type::BYTES;
    static constexpr bool IS_FP8 = BYTES == 1;
    static constexpr uint32 ROW_BLOCKS = BLOCKS, CHANNELS = MAX_VALUE_DIM, ACC = CHANNELS / 4;  // ACC: floats of acc that a lane has of one block of rows
    static constexpr uint32 K_STEPS = MAX_DIM / 16, V_STEPS = MAX_VALUE_DIM / 16;
    static constexpr bool QUERIES_IN_REGISTERS = MAX_DIM <= 256;
    // Bytes from row to row in shared memory: an odd number of 16 bytes, so that eight rows hit different banks.
    static constexpr uint32 PITCH = MAX_DIM * Type::BYTES + 16, QUERY_PITCH = MAX_DIM * 2 + 16;

    const AttentionParams &p;
    char *shared;
    uint32 lane, warp, log_members, team, member;
    uint32 query[BLOCKS][QUERIES_IN_REGISTERS ? K_STEPS : 1][2];
    float acc[BLOCKS][V_STEPS][4];
    float m[BLOCKS][2], l[BLOCKS][2];
    // The tokens first … first + count − 1 that each of the lane's rows sees.
    int32 first[BLOCKS][2];
    uint32 count[BLOCKS][2];
    // FP8: the powers of two that queries were divided by; the head's scales; the unit of acc where values have a scale per token.
    float query_unit[BLOCKS][2];
    float k_scale, v_scale, value_unit;
    // Where the granule lies that this lane has found.
    int32 position, page, row_in_page;
    const char *key, *value;

    // 2^log_members warps share a tile.
    __device__ MmaCompute(const AttentionParams &p, char *shared, uint32 log_members) : p(p), shared(shared), log_members(log_members) {
        lane = threadIdx.x % WARP;
        warp = threadIdx.x / WARP;
        team = warp >> log_members;
        member = warp & ((1 << log_members) - 1);
        clear();
    }
    __device__ void clear() {
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
#pragma unroll
            for (uint32 j = 0; j < V_STEPS; j++)
#pragma unroll
                for (uint32 e = 0; e < 4; e++) acc[b][j][e] = 0.0f;
            m[b][0] = m[b][1] = minus_infinity();
            l[b][0] = l[b][1] = 0.0f;
        }
        value_unit = 0x1p-100f;
    }
    // The lane's rows among eight, and its channels: of each pair of channels, a lane has two rows.
    __device__ uint32 row(uint32 i) const { return lane % 4 * 2 + i; }
    __device__ static constexpr uint32 row_of(uint32 e) { return e % 2; }
    // One of the eight lanes of a row writes its m and l.
    __device__ bool writes_sums() const { return lane < 4; }
    // Calls write(channel, acc) for row i of block b.
    using Channels = float;
    template <typename Write>
    __device__ void for_each_channel(uint32 b, uint32 i, const Write &write) const {
#pragma unroll
        for (uint32 n = 0; n < CHANNELS / 8; n++) write(channel(n / 2, n % 2), acc[b][n / 2][n % 2 * 2 + i]);
    }
    __device__ uint32 channel(uint32 j, uint32 half) const { return j * 16 + (IS_FP8 ? lane / 4 * 2 + half : lane / 4 + half * 8); }
    // Stores block 0.
    __device__ void store(const WarpState &to) const {
#pragma unroll
        for (uint32 j = 0; j < V_STEPS; j++) {
#pragma unroll
            for (uint32 e = 0; e < 4; e++)
                if (row(e % 2) < p.warp_rows && channel(j, e / 2) < p.value_dim) *to.acc.at(row(e % 2), channel(j, e / 2)) = acc[0][j][e];
        }
        if (lane >= 4) return;
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            to.m[row(i)] = m[0][i];
            to.l[row(i)] = l[0][i];
        }
    }
    __device__ void sync_team() const {
        if (log_members == 0) __syncwarp();
        else asm volatile("barrier.sync.aligned %0, %1;" ::"r"(team + 1), "r"(WARP << log_members) : "memory");
    }
    // A stage of the team's ring: TokenInfo, keys, values.
    __device__ char *stage(uint32 n) const { return shared + (team * p.stages + n) * p.stage_bytes; }
    __device__ char *query_of(uint32 row) const { return shared + p.q_offset + row * QUERY_PITCH; }

    // Requests the queries, or writes them where they have to be converted; rows and channels that do not exist become zeros.
    __device__ void load_queries(const WorkItem &item) {
        const uint32 rows = rows_of(p, item);
#pragma unroll 1
        for (uint32 row = warp; row < WARP_ROWS << log_members; row += WARPS) {
            const bool exists = row < rows;
            const auto [position, head] = place_of_row(p, item, first_row(p, item) + (exists ? row : 0));
            const char *from = p.q.at(item.seq, position, head);
            char *const to = query_of(row);
            if constexpr (!IS_FP8) {
                for (uint32 d = lane * 8; d < MAX_DIM; d += 8 * WARP) {
                    const bool is_there = exists && d < p.dim;
                    request_query<Type>(p, shared_address(to) + d * 2, is_there ? from + query_bytes<Type>(p, d) : p.q.data, is_there);
                }
            } else {
                // Divided by a power of two, so that float16 has room for bfloat16's range.
                const auto at = [&](uint32 d) {
                    const uint32 bits = exists && d < p.dim ? as<uint16>(from + d * 2) : 0;
                    if (p.q_type == BFLOAT16) return __uint_as_float(bits << 16);
                    float x;
                    asm("{\n\t.reg .b16 h;\n\tcvt.u16.u32 h, %1;\n\tcvt.f32.f16 %0, h;\n\t}" : "=f"(x) : "r"(bits));
                    return x;
                };
                float top = 0x1p-100f;
                for (uint32 d = lane; d < p.dim; d += WARP) top = fmaxf(top, fabsf(at(d)));
#pragma unroll
                for (uint32 step = 1; step < WARP; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
                const float power = __uint_as_float(__float_as_uint(top) & 0x7f800000), inverse = 1.0f / power;
                for (uint32 d = lane * 2; d < MAX_DIM; d += 2 * WARP) as<uint32>(to + d * 2) = Type::pack(at(d) * inverse, at(d + 1) * inverse);
                if (lane == 0) as<float>(to + MAX_DIM * 2) = power;
            }
        }
    }
    __device__ void read_queries(const WorkItem &item, const Reach &reach) {
        if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
            for (uint32 s = 0; s < K_STEPS; s++) read_query(query[0][s], s);
        }
        if constexpr (IS_FP8) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) query_unit[0][i] = as<float>(query_of(member * WARP_ROWS + row(i)) + MAX_DIM * 2);
        }
        read_reach(item, reach, member * WARP_ROWS);
    }
    // Reads 16 channels of a query, in the order in which the lane meets those of the keys.
    __device__ void read_query(uint32 (&to)[2], uint32 s) const {
        const char *from = query_of(member * WARP_ROWS + lane / 4) + s * 32 + lane % 4 * (IS_FP8 ? 8 : 4);
        to[0] = as<uint32>(from);
        to[1] = as<uint32>(from + (IS_FP8 ? 4 : 16));
    }
    // Finds what each of the warp's rows sees (rows of the work item from `begin` on), and reads the scales of its head.
    __device__ void read_reach(const WorkItem &item, const Reach &reach, uint32 begin) {
        const uint32 rows = rows_of(p, item);
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const uint32 n = begin + b * WARP_ROWS + row(i);
                first[b][i] = 0;
                count[b][i] = 0;
                if (n < rows) reach.row(p, place_of_row(p, item, first_row(p, item) + n).position, first[b][i], count[b][i]);
            }
        }
        if constexpr (IS_FP8) {
            const bool of_head = !p.scales_per_token;
            k_scale = of_head && p.k_scale.data ? as<float>(p.k_scale.at(0, 0, item.head)) : 1.0f;
            v_scale = of_head && p.v_scale.data ? as<float>(p.v_scale.at(0, 0, item.head)) : 1.0f;
        }
    }

    // Queries that one warp copies alone: ROWS of them side by side, in shared memory of its own. The constructor finds what each lane copies.
    template <uint32 ROWS>
    struct WarpQueries {
        static constexpr uint32 CHUNKS = MAX_DIM * 2 / 16, COPIES = ROWS * CHUNKS / WARP;
        const char *from[COPIES];

        __device__ WarpQueries(const AttentionParams &p, const WorkItem &item, uint32 lane) {
            const uint32 rows = rows_of(p, item);
#pragma unroll
            for (uint32 n = 0; n < COPIES; n++) {
                // Rows that do not exist are copies of the first.
                const uint32 row = (n * WARP + lane) / CHUNKS;
                const auto [position, head] = place_of_row(p, item, first_row(p, item) + (row < rows ? row : 0));
                from[n] = p.q.at(item.seq, position, head) + query_bytes<Type>(p, lane % CHUNKS * 8);
                asm volatile("" ::"l"(from[n]));
            }
        }
        __device__ void prefetch_first_reads(uint32 lane) const {
#pragma unroll
            for (uint32 n = 0; n < COPIES; n++)
                if (lane % 8 == 0) prefetch(from[n]);
        }
        __device__ void request(const AttentionParams &p, uint32 to, uint32 lane) const {
#pragma unroll
            for (uint32 n = 0; n < COPIES; n++) request_query<Type>(p, to + (n * WARP + lane) / CHUNKS * QUERY_PITCH + lane % CHUNKS * 16, from[n]);
        }
    };
    template <uint32 ROWS> using Queries = WarpQueries<ROWS>;
    // Reads the queries of WarpQueries from shared memory. With FP8 keys they are divided by a power of two.
    template <uint32 ROWS>
    __device__ void queries_to_registers(uint32 from) {
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
            if constexpr (!IS_FP8) {
                const uint32 address = from + (b * WARP_ROWS + lane % WARP_ROWS) % ROWS * QUERY_PITCH + lane / 8 * 16;
#pragma unroll
                for (uint32 s = 0; s < K_STEPS; s += 2) {
                    uint32 x[4];
                    load_matrices(x, address + s * 32);
                    query[b][s][0] = x[0], query[b][s][1] = x[1], query[b][s + 1][0] = x[2], query[b][s + 1][1] = x[3];
                }
            } else {
                const uint32 address = from + (b * WARP_ROWS + lane / 4) % ROWS * QUERY_PITCH + lane % 4 * 8;
#pragma unroll
                for (uint32 s = 0; s < K_STEPS; s++)
                    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(query[b][s][0]), "=r"(query[b][s][1]) : "r"(address + s * 32) : "memory");
                divide_queries(b);
            }
        }
    }
    __device__ void divide_queries(uint32 b) {
        const float power = divide_row<Type, K_STEPS * 2>(p, [&](uint32 n) -> uint32 & { return query[b][n / 2][n % 2]; });
#pragma unroll
        for (uint32 i = 0; i < 2; i++) query_unit[b][i] = __shfl_sync(FULL_WARP, power, row(i) * 4);
    }

    // Remembers where the lane's granule lies.
    __device__ void remember_granule(const WorkItem &item, const Place &place) {
        position = place.position;
        page = place.page;
        row_in_page = place.row;
        key = p.k.at(place.page, place.row, item.head);
        value = p.v.at(place.page, place.row, item.head);
    }
    // Requests a tile: eight lanes copy a row, and the team's warps share the rows. Writes its TokenInfo.
    __device__ void load(const Tiles &tiles, const WorkItem &item, const Reach &reach, uint32 tile, char *to) const {
        if (p.log_granule == LOG_TILE) load_adjacent(tiles, item, reach, tile, to);
        else load_scattered(tiles, item, reach, tile, to);
    }
    // A tile whose tokens lie side by side.
    __device__ void load_adjacent(const Tiles &tiles, const WorkItem &item, const Reach &reach, uint32 tile, char *to) const {
        const uint32 from = tiles.lane_of(p, tile, 0);
        const int32 granule = __shfl_sync(FULL_WARP, position, from);
        const char *from_key = from_lane(key, from), *from_value = from_lane(value, from);
        if (log_members == 0 && !IS_FP8 && p.dim == MAX_DIM && p.value_dim == MAX_VALUE_DIM && p.v_offset && is_fully_seen(reach, granule))
            return load_fully_seen(granule, from_key, from_value, to);
        int32 token_page = 0, token_row = 0;
        if constexpr (IS_FP8) {
            token_page = __shfl_sync(FULL_WARP, page, from);
            token_row = __shfl_sync(FULL_WARP, row_in_page, from);
        }
#pragma unroll
        for (uint32 quarter = 0; quarter < 4; quarter++) {
            if (quarter % (1 << log_members) != member) continue;
            const uint32 r = lane / 8 + quarter * 4;
            request_token(item, reach, granule, r, from_key + r * p.k.step[1], from_value + r * p.v.step[1], token_page, token_row + int32(r), r, to);
        }
    }
    __device__ static bool is_fully_seen(const Reach &reach, int32 granule) { return granule >= reach.begin && granule + int32(TILE) <= reach.end; }
    // A tile of which every token is seen, with heads as wide as MAX_DIM.
    __device__ void load_fully_seen(int32 granule, const char *from_key, const char *from_value, char *to) const {
        const uint32 k_to = shared_address(to) + sizeof(TokenInfo) + lane / 8 * PITCH + lane % 8 * 16;
        from_key += lane / 8 * p.k.step[1] + lane % 8 * 16;
        from_value += lane / 8 * p.v.step[1] + lane % 8 * 16;
#pragma unroll
        for (uint32 quarter = 0; quarter < 4; quarter++) {
#pragma unroll
            for (uint32 j = 0; j < MAX_DIM * Type::BYTES / 128; j++) copy_16(k_to + quarter * 4 * PITCH + j * 128, from_key + j * 128);
            from_key += 4 * p.k.step[1];
        }
#pragma unroll
        for (uint32 quarter = 0; quarter < 4; quarter++) {
#pragma unroll
            for (uint32 j = 0; j < MAX_VALUE_DIM * Type::BYTES / 128; j++) copy_16(k_to + p.v_offset + quarter * 4 * PITCH + j * 128, from_value + j * 128);
            from_value += 4 * p.v.step[1];
        }
        if (lane < TILE) as<TokenInfo>(to).position[lane] = granule + int32(lane);
    }
    __device__ void load_scattered(const Tiles &tiles, const WorkItem &item, const Reach &reach, uint32 tile, char *to) const {
#pragma unroll 1
        for (uint32 quarter = member; quarter < 4; quarter += 1 << log_members) {
            const uint32 r = lane / 8 + quarter * 4, from = tiles.lane_of(p, tile, r), within = r & ((1 << p.log_granule) - 1);
            const int32 granule = __shfl_sync(FULL_WARP, position, from);
            const char *const from_key = from_lane(key, from) + within * p.k.step[1], *const from_value = from_lane(value, from) + within * p.v.step[1];
            int32 token_page = 0, token_row = 0;
            if constexpr (IS_FP8) {
                token_page = __shfl_sync(FULL_WARP, page, from);
                token_row = __shfl_sync(FULL_WARP, row_in_page, from) + int32(within);
            }
            request_token(item, reach, granule, within, from_key, from_value, token_page, token_row, r, to);
        }
    }
    __device__ static const char *from_lane(const char *address, uint32 lane) {
        return reinterpret_cast<const char *>(__shfl_sync(FULL_WARP, reinterpret_cast<uint64>(address), lane));
    }
    // Requests token `within` of a granule, as row r of a tile.
    __device__ void request_token(const WorkItem &item, const Reach &reach, int32 granule, uint32 within, const char *from_key, const char *from_value,
                              int32 token_page, int32 token_row, uint32 r, char *to) const {
        const uint32 column = lane % 8, k_chunks = p.dim * Type::BYTES / 16, v_chunks = p.v_offset ? p.value_dim * Type::BYTES / 16 : 0;
        const uint32 k_to = shared_address(to) + sizeof(TokenInfo) + r * PITCH + column * 16, v_to = k_to + p.v_offset;
        const bool is_there = is_reached(reach, granule, within);
        TokenInfo &info = as<TokenInfo>(to);
        from_key += column * 16;
        from_value += column * 16;
#pragma unroll
        for (uint32 j = 0; j < (MAX_DIM * Type::BYTES + 127) / 128; j++)
            if (column + j * 8 < k_chunks) copy_16(k_to + j * 128, from_key + j * 128, is_there);
#pragma unroll
        for (uint32 j = 0; j < (MAX_VALUE_DIM * Type::BYTES + 127) / 128; j++)
            if (column + j * 8 < v_chunks) copy_16(v_to + j * 128, from_value + j * 128, is_there);
        if (column == 0) info.position[r] = is_there ? granule + int32(within) : -1;
        if constexpr (IS_FP8) {
            if (!p.scales_per_token || column > 1) return;
            const View<3> &scale = column == 0 ? p.k_scale : p.v_scale;
            float *const scale_to = (column == 0 ? info.k_scale : info.v_scale) + r;
            if (!scale.data) *scale_to = 1.0f;
            else copy_4(shared_address(scale_to), is_there ? scale.at(token_page, token_row, item.head) : scale.data, is_there);
        }
    }

    template <bool IS_E5M2>
    __device__ void multiply_keys(float (&c)[BLOCKS][4], uint32 keys) const {
        float sum[2][BLOCKS][4] = {};
        // Where registers suffice, all keys are loaded before the first product.
        constexpr bool IS_AHEAD = MAX_DIM <= 128 && BLOCKS == 1;
        uint32 all[IS_AHEAD ? K_STEPS : 1][4];
#pragma unroll
        for (uint32 s = 0; IS_AHEAD && s < K_STEPS; s += IS_FP8 ? 2 : 1) load_matrices(all[s], keys + s * 16 * Type::BYTES);
#pragma unroll
        for (uint32 s = 0; s < K_STEPS; s += IS_FP8 ? 2 : 1) {
            uint32 (&k)[4] = all[IS_AHEAD ? s : 0];
            if (!IS_AHEAD) load_matrices(k, keys + s * 16 * Type::BYTES);
            if constexpr (IS_FP8) {
#pragma unroll
                for (uint32 half = 0; half < 2; half++) {
                    uint32 a[4];
                    widen_fp8<IS_E5M2>(k[half * 2], a[0], a[2]);
                    widen_fp8<IS_E5M2>(k[half * 2 + 1], a[1], a[3]);
                    multiply_query(sum[half], a, s + half);
                }
            } else {
                multiply_query(sum[s % 2], k, s);
            }
        }
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++)
#pragma unroll
            for (uint32 e = 0; e < 4; e++) c[b][e] = sum[0][b][e] + sum[1][b][e];
    }
    __device__ void multiply_query(float (&c)[BLOCKS][4], const uint32 (&a)[4], uint32 s) const {
        if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
            for (uint32 b = 0; b < BLOCKS; b++) Type::multiply(c[b], a, query[b][s][0], query[b][s][1]);
        } else {
            uint32 q[2];
            read_query(q, s);
            Type::multiply(c[0], a, q[0], q[1]);
        }
    }
    template <bool IS_E5M2>
    __device__ void add_values(uint32 values, const uint32 (&weights)[BLOCKS][2]) {
#pragma unroll
        for (uint32 j = 0; j < V_STEPS; j += IS_FP8 ? 2 : 1) {
            uint32 v[4];
            load_transposed(v, values + j * 16 * Type::BYTES);
#pragma unroll
            for (uint32 half = 0; half < (IS_FP8 ? 2 : 1); half++) {
                uint32 a[4] = {v[0], v[1], v[2], v[3]};
                if constexpr (IS_FP8) {
                    // A word is two channels of two tokens: the channels become rows r and r + 8.
                    widen_fp8<IS_E5M2>(__byte_perm(v[half * 2], 0, 0x3120), a[0], a[1]);
                    widen_fp8<IS_E5M2>(__byte_perm(v[half * 2 + 1], 0, 0x3120), a[2], a[3]);
                }
#pragma unroll
                for (uint32 b = 0; b < BLOCKS; b++) Type::multiply(acc[b][j + half], a, weights[b][0], weights[b][1]);
            }
        }
    }

    // is_fully_seen: every row sees every token of the tile. is_first: the first tile since clear(). await_values() returns once values are there.
    template <typename Await = Nothing>
    __device__ void attend(const char *tile, bool is_fully_seen = false, bool is_first = false, const Await &await_values = {}) {
        if (IS_FP8 && p.kv_type == FLOAT8_E5M2) attend<true>(tile, is_fully_seen, is_first, await_values);
        else attend<false>(tile, is_fully_seen, is_first, await_values);
    }
    template <bool IS_E5M2, typename Await>
    __device__ void attend(const char *tile, bool is_fully_seen, bool is_first, const Await &await_values) {
        const TokenInfo &info = as<TokenInfo>(tile);
        const uint32 matrix = lane / 8, line = lane % 8, keys = shared_address(tile) + sizeof(TokenInfo);
        float c[BLOCKS][4];
        // Matrices: tokens 0–7 and 8–15 of the first 16 bytes, then of the next.
        multiply_keys<IS_E5M2>(c, keys + (line + matrix % 2 * 8) * PITCH + matrix / 2 * 16);

        float inverse = 1.0f, shrink = 1.0f;
        if constexpr (IS_FP8) {
            if (p.scales_per_token) shrink = raise_value_unit(info, inverse);
        }
        uint32 weights[BLOCKS][2];
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) update_softmax<IS_E5M2>(b, c[b], is_fully_seen, is_first, info, shrink, inverse, weights[b]);
        await_values();
        // Transposed. FP8: matrices as for keys; 16 bits: the first 16 bytes and the next of tokens 0–7, then of 8–15.
        const uint32 token_half = IS_FP8 ? matrix % 2 : matrix / 2, column = IS_FP8 ? matrix / 2 : matrix % 2;
        add_values<IS_E5M2>(keys + p.v_offset + (line + token_half * 8) * PITCH + column * 16, weights);
    }
    // The running softmax of a block of rows: scores become weights of the values.
    template <bool IS_E5M2>
    __device__ void update_softmax(uint32 b, float (&c)[4], bool is_fully_seen, bool is_first, const TokenInfo &info, float shrink, float inverse,
                           uint32 (&weights)[2]) {
        // s · log2 e = c · factor.
        float factor = p.scale * LOG2_E;
        if constexpr (IS_FP8) {
            const float widened = IS_E5M2 ? 1.0f : E4M3_UNIT;
#pragma unroll
            for (uint32 e = 0; e < 4; e++)
                c[e] *= query_unit[b][e % 2] * widened * (p.scales_per_token ? info.k_scale[lane / 4 + e / 2 * 8] : k_scale);
        }
        if (p.soft_cap != 0.0f) {
#pragma unroll
            for (uint32 e = 0; e < 4; e++) c[e] = p.soft_cap * tanhf(c[e] * p.scale / p.soft_cap);
            factor = LOG2_E;
        }
        if (!is_fully_seen) {
            const int32 tokens[2] = {info.position[lane / 4], info.position[lane / 4 + 8]};
#pragma unroll
            for (uint32 e = 0; e < 4; e++)
                if (uint32(tokens[e / 2] - first[b][e % 2]) >= count[b][e % 2]) c[e] = minus_infinity();
        }

        float next[2] = {fmaxf(c[0], c[2]), fmaxf(c[1], c[3])};
#pragma unroll
        for (uint32 step = 4; step < WARP; step *= 2) {
            next[0] = fmaxf(next[0], __shfl_xor_sync(FULL_WARP, next[0], step));
            next[1] = fmaxf(next[1], __shfl_xor_sync(FULL_WARP, next[1], step));
        }
        float (&m)[2] = this->m[b], (&l)[2] = this->l[b];
        next[0] = fmaxf(m[0], next[0] * factor);
        next[1] = fmaxf(m[1], next[1] * factor);
        if (__any_sync(FULL_WARP, next[0] != m[0] || next[1] != m[1] || shrink != 1.0f)) {
            // Before the first tile acc is zero and needs no factor.
            if (!is_first) {
                const float keep[2] = {weight(m[0], next[0]), weight(m[1], next[1])};
                l[0] *= keep[0];
                l[1] *= keep[1];
#pragma unroll
                for (uint32 j = 0; j < V_STEPS; j++)
#pragma unroll
                    for (uint32 e = 0; e < 4; e++) acc[b][j][e] *= keep[e % 2] * shrink;
            }
            m[0] = next[0];
            m[1] = next[1];
        }
        // Where nothing is seen yet, −∞ − 0 and not −∞ + ∞.
        const float shift[2] = {m[0] == minus_infinity() ? 0.0f : m[0], m[1] == minus_infinity() ? 0.0f : m[1]};
#pragma unroll
        for (uint32 e = 0; e < 4; e++) {
            c[e] = exp2_fast(fmaf(c[e], factor, -shift[e % 2]));
            l[e % 2] += c[e];
        }
        if constexpr (IS_FP8) {
            if (p.scales_per_token) {
#pragma unroll
                for (uint32 e = 0; e < 4; e++) c[e] *= info.v_scale[lane / 4 + e / 2 * 8] * inverse;
            }
        }
        weights[0] = transpose(Type::pack(c[0], c[1]));
        weights[1] = transpose(Type::pack(c[2], c[3]));
    }
    // Raises value_unit to at least the tile's largest scale. Returns the factor by which acc shrinks.
    __device__ float raise_value_unit(const TokenInfo &info, float &inverse) {
        float top = fabsf(info.v_scale[lane % TILE]);
#pragma unroll
        for (uint32 step = 1; step < TILE; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
        const float raised = fmaxf(value_unit, 2.0f * __uint_as_float(__float_as_uint(top) & 0x7f800000)), shrink = value_unit / raised;
        value_unit = raised;
        inverse = 1.0f / raised;
        return shrink;
    }

    // Follows the last tile of a unit or of all: completes l of the lane's rows, and applies the values' scale to acc.
    __device__ void finish() {
#pragma unroll
        for (uint32 b = 0; b < BLOCKS; b++) {
#pragma unroll
            for (uint32 step = 4; step < WARP; step *= 2) {
                l[b][0] += __shfl_xor_sync(FULL_WARP, l[b][0], step);
                l[b][1] += __shfl_xor_sync(FULL_WARP, l[b][1], step);
            }
            if constexpr (IS_FP8) {
                const float factor = (p.kv_type == FLOAT8_E5M2 ? 1.0f : E4M3_UNIT) * (p.scales_per_token ? value_unit : v_scale);
#pragma unroll
                for (uint32 j = 0; j < V_STEPS; j++)
#pragma unroll
                    for (uint32 e = 0; e < 4; e++) acc[b][j][e] *= factor;
            }
        }
    }

    // Attends to a chunk, as a team of the CTA: requests queries, streams the team's tiles.
    template <typename Close>
    __device__ void run(const CtaShare &cta_share, const WorkItem &item, const Reach &reach, Close close_unit) {
        const Tiles tiles(p, cta_share.begin + team, cta_share.end, LOG_WARPS - log_members);
        load_queries(item);
        const auto find = [&](uint32 tile) { return tiles.find(p, item, reach, cta_share.entries, tile); };
        run(tiles, item, reach, find, [&] {
            wait_copies(p.stages - 1);
            __syncthreads();
            read_queries(item, reach);
        }, close_unit);
    }
    // Streams the team's tiles. begin() precedes the first. With partials, close_unit(unit, true) follows the last tile of each unit; without, the last
    // tile of all. Where there is none, close_unit(unit, false).
    template <typename Find, typename Begin, typename Close>
    __device__ void run(const Tiles &tiles, const WorkItem &item, const Reach &reach, Find find, Begin begin, Close close_unit) {
        const uint32 stages = p.stages, unit_tiles = p.partials.acc.data ? p.unit_tiles.value : ~0u;
        zero_padding();
        uint32 at = 0, part = 0, unit = tiles.first;
        for (uint32 step = 0;; step++) {
            if (step >= stages) {
                if (step == stages) begin();
                wait_copies(stages - 1);
                const bool exists = tiles.count, ends = step - stages + 1 >= tiles.count;
                if (exists) {
                    sync_team();
                    attend(stage(at));
                }
                sync_team();
                if (ends || ++part == unit_tiles) {
                    close_unit(unit, exists);
                    part = 0;
                    unit += tiles.step;
                }
                if (ends) break;
            }
            if (step < tiles.count) {
                if (tiles.begins(p, step)) remember_granule(item, find(step));
                load(tiles, item, reach, step, stage(at));
            }
            end_copies();
            at = at + 1 == stages ? 0 : at + 1;
        }
    }
    // Zeros in the channels of keys that no copy writes; each member of the team writes a part.
    __device__ void zero_padding() const {
        const uint32 bytes = p.dim * Type::BYTES, chunks = (MAX_DIM * Type::BYTES - bytes) / 16;
        if (chunks == 0) return;
        for (uint32 n = member * WARP + lane; n < p.stages * TILE * chunks; n += WARP << log_members) {
            const uint32 row = n / chunks;
            *reinterpret_cast<uint4 *>(stage(row / TILE) + sizeof(TokenInfo) + row % TILE * PITCH + bytes + n % chunks * 16) = uint4{0, 0, 0, 0};
        }
    }
};
