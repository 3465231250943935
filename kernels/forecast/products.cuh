// The parts that the kernels for maps of full and of low rank share: products in split TF32, addresses of inputs, and output units.
//
// Products are TF32 mma m16n8k8: rows of the batch are M, rows of the map are N. A float32 weight is, except for its last bits, the sum of two
// TF32 numbers, whole and rest. A 16-bit input is one TF32 number. A float32 input is split likewise, and the product of the two rests is left
// out. Inputs are scaled by a power of two, so that products do not overflow before 1 / rms is known.
#pragma once

#include "common/eight.cuh"
#include "forecast/params.cuh"

constexpr uint32 THREADS = 256, WARPS = THREADS / WARP;
constexpr uint32 CHUNK = 32;  // columns of a chunk: lane (g, t) takes columns 8·t … 8·t + 7 of row g
constexpr uint32 LEAST_EXPONENT = 27, MOST_EXPONENT = 227;  // bounds of the exponent of the power of two by which inputs are divided

// Pins a value in a register: the compiler does not compute it again later.
template <typename T> __device__ inline T pin_in_register(T x) {
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
    return x;
}

// x = whole + rest, except for the rest's last bits: the tensor cores read the upper 11 bits of each mantissa. The rest of an infinity is 0;
// weights are finite.
__device__ inline float whole_of(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
__device__ inline float rest_of_finite(float x) { return __uint_as_float(__float_as_uint(x - whole_of(x)) + 0x1000u); }
__device__ inline float rest_of(float x) { return x == whole_of(x) ? 0.0f : rest_of_finite(x); }

__device__ inline void multiply_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// A lane's weights in CHUNKS chunks, as loaded. Loads here and below are unconditional, so that all of them are in flight together.
template <uint32 CHUNKS> struct Loaded {
    float4 four[CHUNKS][2];

    // Chunks past `chunks` load the first chunk again.
    __device__ void load(const float *from, uint32 chunks) {
#pragma unroll
        for (uint32 n = 0; n < CHUNKS; n++) {
            const float4 *chunk = reinterpret_cast<const float4 *>(from + (n < chunks ? n * CHUNK : 0));
            four[n][0] = chunk[0], four[n][1] = chunk[1];  // __ldg would be moved past the wait by the assembler
        }
    }
};

template <uint32 CHUNKS> struct Weights {
    float whole[CHUNKS][8], rest[CHUNKS][8];

    __device__ void split(const Loaded<CHUNKS> &loaded) {
#pragma unroll
        for (uint32 n = 0; n < CHUNKS; n++)
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                const float4 four = loaded.four[n][half];
                const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (uint32 i = 0; i < 4; i++) whole[n][4 * half + i] = whole_of(w[i]), rest[n][4 * half + i] = rest_of_finite(w[i]);
            }
    }
};

// A lane's products. Lane (g, t) has rows g and g + 8 of the batch and rows 2t and 2t + 1 of the map.
struct Products {
    float whole[4], rest[4];  // whole · whole, and whole · rest of either side

    __device__ void clear() {
#pragma unroll
        for (uint32 i = 0; i < 4; i++) whole[i] = rest[i] = 0.0f;
    }
    // Adds the products of a chunk. `low` and `high` are the inputs of rows g and g + 8.
    template <bool SPLITS> __device__ void add(const float (&w)[8], const float (&w_rest)[8], const float (&low)[8], const float (&high)[8]) {
#pragma unroll
        for (uint32 i = 0; i < 8; i += 2) {
            float a[4] = {low[i], high[i], low[i + 1], high[i + 1]};
            if constexpr (SPLITS) {
                float a_rest[4];
#pragma unroll
                for (uint32 m = 0; m < 4; m++) a_rest[m] = rest_of(a[m]), a[m] = whole_of(a[m]);
                multiply_tf32(rest, a_rest, w[i], w[i + 1]);
            }
            multiply_tf32(whole, a, w[i], w[i + 1]);
            multiply_tf32(rest, a, w_rest[i], w_rest[i + 1]);
        }
    }
};

__device__ inline const char *input(const Inputs &in, uint32 row, uint32 i) {
    const uint32 head = in.dim.divide(i);
    return in.data + row * in.row + head * in.head + (i - head * in.dim.value) * in.channel;
}

// The address of inputs i … i + 7 of a row, for i a multiple of eight. Past the last input it is that of the first, whose weights are then 0.
__device__ inline const char *place_of_inputs(const Inputs &in, uint32 row, uint32 i) { return input(in, row, i < in.count ? i : 0); }

__device__ inline float power_of_two(int32 exponent) { return __uint_as_float(uint32(max(exponent, 0)) << 23); }

// Two channels of a head: a pair that rotates, or two channels that do not.
struct Unit {
    uint32 head, number, first, second;
    bool exists, has_second;

    __device__ Unit(const ProjectParams &p, uint32 at) {
        exists = at < p.q_heads * p.units.value;
        head = p.units.divide(at), number = at - head * p.units.value;
        const uint32 tail = 2 * p.pairs + 2 * (number - p.pairs);
        const bool turns = number < p.pairs;
        first = !turns ? tail : p.interleaved ? 2 * number : number;
        second = !turns ? tail + 1 : p.interleaved ? 2 * number + 1 : number + p.pairs;
        has_second = second < p.head_dim;
    }
    // The cosine and sine of a pair.
    __device__ const float2 *turn(const ProjectParams &p, uint32 row) const {
        return reinterpret_cast<const float2 *>(p.turns) + uint64(row) * p.pairs + number;
    }
    // Rotates the two values x and y if the unit is a pair, and writes them.
    __device__ void write(const ProjectParams &p, uint32 row, float x, float y, const float2 &turn) const {
        char *q = p.q + row * p.q_row + head * p.q_head;
        const bool turns = number < p.pairs;
        store_element(q + first * p.q_channel, p.q_type, turns ? fmaf(x, turn.x, -y * turn.y) : x);
        if (has_second) store_element(q + second * p.q_channel, p.q_type, turns ? fmaf(x, turn.y, y * turn.x) : y);
    }
};
