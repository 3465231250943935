// The term of a list beside attention to its tokens (variant decode128), in one launch.
//
//   t = mean_v + ½·scale·covarianceᵀ·q · the state m = log_mass, l = 1, acc = t joins those of the list's tokens
//
// Bytes: the covariance of a list's sequence and KV head once, beside its keys and values. Nothing is launched or joined for it, and nothing goes through
// scratch: the states of the list's warps begin with it. A warp has some of the key channels of the covariance, adds up their products with the
// queries, and begins with m = log_mass and acc = this part of t; the first warp of a list also has mean_v and l = 1. States are joined
// as ever, and with them the parts, which have the same m.
//
//   one round trip: the row of `rows`, log_mass, beside lengths and entries ── one: rows of the covariance, beside pages
//   products on tensor cores, while the first tiles are on their way
//
// A covariance is two numbers for the tensor cores, of 11 bits each; queries have no more bits than that. Products are added up in float32.
//
// On entry: as for decode128.cuh, of 16 bits; rows of the covariance and of mean_v are single runs of 16-byte units.
#pragma once

#include "attention/decode128.cuh"
#include "attention_remainder/params.cuh"

// c += a · b, where a is read as its upper 11 bits.
__device__ inline void multiply_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

template <typename Type> constexpr bool IS_BFLOAT16 = false;
template <> constexpr bool IS_BFLOAT16<Bfloat16> = true;

// ROWS: rows of queries in shared memory. Up to eight are the columns of products whose rows are channels of values; sixteen are the rows of
// products whose columns are channels. Either way a lane has channels lane / 4 of each eight, of key channels lane % 4 and 4 + lane % 4 of each
// product.
template <typename Form, typename Type, uint32 ROWS>
struct ListTerm {
    using Params = ListTermParams;
    using Compute = typename Form::Compute;
    static constexpr bool EXISTS = true;
    static constexpr uint32 CHANNELS = 128, STEP = 8;  // key channels of a product
    static constexpr bool ROWS_ARE_ROWS = ROWS == 16;
    static_assert(Type::BYTES == 2 && Form::LEAST_STAGES == 2 && Form::KEYS_ARE_A_GROUP != ROWS_ARE_ROWS);

    const ListTermParams &p;
    const WorkItem &item;
    uint32 lane, warp, first, keys;  // the warp's number among those of the list; its key channels
    char *memory;                    // [keys][CHANNELS]; of a row, 16-byte units are permuted so that lanes hit different banks
    char *mean;                      // [CHANNELS], of the first warp
    const char *row_at, *mass_at[2];
    int32 row, tokens, log_mass[2];

    __device__ ListTerm(const ListTermParams &p, const WorkItem &item, uint32 rank, char *shared)
        : p(p), item(item), lane(threadIdx.x % WARP), warp(rank * WARPS + threadIdx.x / WARP), first(warp * p.keys),
          keys(first < CHANNELS ? min(p.keys, CHANNELS - first) : 0), memory(shared + pin_in_register(p.offset + threadIdx.x / WARP * p.keys * TERM_ROW_BYTES)),
          mean(shared + p.offset + WARPS * p.keys * TERM_ROW_BYTES), row(item.seq), tokens(0) {
        row_at = pin_in_register(p.rows.data ? p.rows.at(item.seq) : p.to.seq_lens.at(item.seq));
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const RowPlace place = place_of_lane(i);
            mass_at[i] = pin_in_register(p.log_mass.at(item.seq, place.position, place.head));
        }
    }
    // Where the caller counts the lane's row i of acc. A row that does not exist is a copy of the first.
    __device__ RowPlace place_of_lane(uint32 i) const {
        const uint32 row = ROWS_ARE_ROWS ? lane / 4 + i * WARP_ROWS : lane % 4 * 2 + i;
        return place_of_row(p.to, item, first_row(p.to, item) + (row < rows_of(p.to, item) ? row : 0));
    }
    __device__ bool has_row() const { return row >= 0 && uint32(row) < p.count; }

    // Asks the L2 cache for the covariance, where its place follows from parameters.
    __device__ void prefetch_first_reads() const {
        constexpr uint32 LINE = 128 / sizeof(float), LINES = CHANNELS / LINE;
        if (p.rows.data) {
            if (lane == 0) prefetch(row_at);
            return;
        }
        if (!has_row()) return;
#pragma unroll 1
        for (uint32 n = lane; n < keys * LINES; n += WARP) prefetch(p.covariance.at(row, item.head, first + n / LINES, n % LINES * LINE));
        if (lane == 0) prefetch(mass_at[0]);
        if (lane == 1) prefetch(p.tokens.at(row, item.head));
        if (warp == 0 && lane < LINES) prefetch(p.mean_v.at(row, item.head, lane * LINE));
    }
    __device__ void request_row() {
        const int32 read = load_word(row_at);
        if (p.rows.data) row = read;
#pragma unroll
        for (uint32 i = 0; i < 2; i++) log_mass[i] = load_word(mass_at[i]);
    }
    // Requests the warp's rows of the covariance; with queries that were requested before they are a group of copies.
    __device__ void request() {
        if (has_row()) {
            tokens = load_word(p.tokens.at(row, item.head));
            const char *from = p.covariance.at(row, item.head, first) + lane * 16;
#pragma unroll 1
            for (uint32 k = 0; k < keys; k++, from += p.covariance.step[2]) copy_16(shared_address(memory + k * TERM_ROW_BYTES + (lane ^ k % 4 * 2) * 16), from);
            if (warp == 0) copy_16(shared_address(mean + lane * 16), p.mean_v.at(row, item.head) + lane * 16);
        }
        end_copies();
    }
    // Begins the warp's state, which is clear. All stages of tiles have been requested since.
    __device__ void begin(Compute &compute, const typename Form::Queries &queries, const Reach &reach) const {
        uint32 of_queries;
        if constexpr (ROWS_ARE_ROWS) {
            of_queries = queries.to;
            if (p.to.stages == 3) wait_copies<3>();
            else wait_copies<2>();
            Form::Queries::arrival().wait(0);
        } else {
            of_queries = shared_address(queries.memory);
            wait_copies<2 * Form::LEAST_STAGES>();  // of each, two groups
        }
        __syncwarp();
        if (!has_row() || tokens <= 0) return;
#pragma unroll 1
        for (uint32 k = 0; k < keys; k += STEP) multiply(compute.acc[0], of_queries, k);
        finish(compute, reach);
    }
    // Adds the products of key channels k … k + 7 of the warp.
    template <uint32 PRODUCTS>
    __device__ void multiply(float (&acc)[PRODUCTS][4], uint32 queries, uint32 k) const {
        const uint32 column = lane % 4, line = lane / 4, words = shared_address(memory) + (k + column) * TERM_ROW_BYTES + line % 4 * 4;
        const uint32 unit = (column * 2 | line / 4) * 16, query = queries + line % ROWS * Compute::QUERY_PITCH + (first + k + column) * 2;
        bool exists[2];
        float q[4];  // of rows `line`, then of rows `line` + 8
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            exists[i] = k + column + i * 4 < keys;
#pragma unroll
            for (uint32 n = 0; n < (ROWS_ARE_ROWS ? 2 : 1); n++) {
                float &x = q[ROWS_ARE_ROWS ? i * 2 + n : i];
                x = exists[i] ? query_at(query + n * WARP_ROWS * Compute::QUERY_PITCH + i * 8) : 0.0f;
            }
        }
        // Channels n · 8 + line of two key channels.
        const auto load = [&](uint32 n, float *whole, float *rest, uint32 step) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const float x = exists[i] ? __uint_as_float(load_shared(words + i * 4 * TERM_ROW_BYTES + (unit ^ n * 32))) : 0.0f;
                whole[i * step] = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
                rest[i * step] = __uint_as_float(__float_as_uint(x - whole[i * step]) + 0x1000u);  // rounded
            }
        };
        float whole[4], rest[4];
#pragma unroll
        for (uint32 j = 0; j < PRODUCTS; j++) {
            if constexpr (ROWS_ARE_ROWS) {
                load(j, whole, rest, 1);
                multiply_tf32(acc[j], q, whole[0], whole[1]);
                multiply_tf32(acc[j], q, rest[0], rest[1]);
            } else {
                load(j * 2, whole, rest, 2), load(j * 2 + 1, whole + 1, rest + 1, 2);
                multiply_tf32(acc[j], whole, q[0], q[1]);
                multiply_tf32(acc[j], rest, q[0], q[1]);
            }
        }
    }
    // Makes of sums of products the states of the rows that have a term; the others stay clear.
    __device__ void finish(Compute &compute, const Reach &reach) const {
        const bool is_first = warp == 0;
        bool has_term[2];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            const float mass = __int_as_float(log_mass[i]);
            has_term[i] = int32(place_of_lane(i).position) < reach.queries && fabsf(mass) < -minus_infinity();
            if (!has_term[i]) continue;
            constexpr float MOST = 3.402823466e38f;
            compute.m[0][i] = fminf(fmaxf(mass * LOG2_E, -MOST), MOST);
            // The lanes of a row add up their parts of l.
            if (is_first && (ROWS_ARE_ROWS ? lane % 4 : lane / 4) == 0) compute.l[0][i] = 1.0f;
        }
#pragma unroll
        for (uint32 n = 0; n < Compute::ACC; n++) {
            float &x = compute.acc[0][n / 4][n % 4];
            x *= p.scale;
            if (is_first) x += as<float>(mean + channel(n / 4, n % 4) * sizeof(float));
            if (!has_term[Compute::row_of(n % 4)]) x = 0.0f;
        }
        if constexpr (ROWS_ARE_ROWS) compute.is_clear = false;
    }
    __device__ uint32 channel(uint32 j, uint32 e) const { return ROWS_ARE_ROWS ? j * 8 + lane % 4 * 2 + e % 2 : j * 16 + lane / 4 + e / 2 * 8; }
    __device__ static float query_at(uint32 address) {
        uint16 bits;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
        if constexpr (IS_BFLOAT16<Type>) return widen_bfloat16(bits);
        else return widen_float16(bits);
    }
    __device__ static uint32 load_shared(uint32 address) {
        uint32 x;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
        return x;
    }
};

template <typename Type, uint32 ROWS> struct FormOfRows {
    using Of = Rows8Form<Type, ROWS>;
};
template <typename Type> struct FormOfRows<Type, 16> {
    using Of = Rows16Form<Type>;
};

#define DECODE128_TERM_KERNEL(name, Type, rows)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ ListTermParams p) {                         \
        using Form = FormOfRows<Type, rows>::Of;                                                                                      \
        attention_decode128<Form, ListTerm<Form, Type, rows>>(p.to, p);                                                               \
    }
