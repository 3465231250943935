// The forecast's projection through a map of full rank: q̂ = RoPE(W·[x / rms(x), previous, 1]). Maps of low rank are in low_rank.cu.
//
//   forecast_pack       copies inputs that are not in aligned units of eight to rows of float32 (for maps of low rank, too)
//   forecast_inputs_*   computes the products of W and each slice of the inputs, and for each row 1 / rms(x) and the pairs' cos and sin
//   forecast_turn       sums the slices, rotates, writes q
//
// Bytes: the map, once. forecast_inputs_* loads its first weights before it waits for the previous kernel.
//
// Work split: a CTA of forecast_inputs_* takes eight rows of the map and a slice of the inputs, whose length follows from the map's shape alone;
// a warp takes an eighth of the slice, for 16 rows of the batch at a time. Further CTAs take a row of the batch each (prepare_row).
//
// Variants: forecast_inputs_16 for up to 16 rows of the batch, forecast_inputs_32 for more (32 at a time).
//
// targets: compute_80, compute_90

#include "forecast/products.cuh"

constexpr uint32 GROUP = 4;  // the number of chunks of a step

// --- inputs --------------------------------------------------------------------------------------------------------------------------------------

// The exponent of the largest of a row's inputs in four lanes, within bounds.
__device__ inline uint32 exponent_of(const float (&x)[GROUP][8]) {
    uint32 most = 0;
#pragma unroll
    for (uint32 n = 0; n < GROUP; n++)
#pragma unroll
        for (uint32 i = 0; i < 8; i++) most = max(most, __float_as_uint(x[n][i]) & 0x7fffffff);
    most = max(most, __shfl_xor_sync(FULL_WARP, most, 1));
    most = max(most, __shfl_xor_sync(FULL_WARP, most, 2));
    return min(max(most >> 23, LEAST_EXPONENT), MOST_EXPONENT);
}

template <uint32 BATCH_TILES> struct SharedProducts {
    float product[WARPS][16 * BATCH_TILES][8];
    uint32 exponent[WARPS][16 * BATCH_TILES];
};

// Multiplies a warp's part of a slice. Rows past the batch load its last row again; their products are not read.
template <uint32 BATCH_TILES, uint32 BYTES>
__device__ inline void multiply_slice(const ProjectParams &p, const Inputs &in, uint32 begin, uint32 chunks, const float *weights, uint32 first_row,
                                      SharedProducts<BATCH_TILES> &shared) {
    const uint32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    Products products[BATCH_TILES];
    uint32 exponents[BATCH_TILES][2];
#pragma unroll
    for (uint32 b = 0; b < BATCH_TILES; b++) products[b].clear(), exponents[b][0] = exponents[b][1] = LEAST_EXPONENT;
    Loaded<GROUP> loaded;
    Weights<GROUP> w;
    loaded.load(weights, chunks);
    w.split(loaded);
    constexpr bool AHEAD = BATCH_TILES == 1;  // loads the next group's weights early; more batch tiles leave no registers for that
    if (AHEAD && chunks > GROUP) loaded.load(weights + GROUP * CHUNK, chunks - GROUP);
    wait_for_previous_kernel();
#pragma unroll 1
    for (uint32 n = 0; n < chunks; n += GROUP) {
        if (n > 0) {
            if (!AHEAD) loaded.load(weights + n * CHUNK, chunks - n);
            w.split(loaded);
            if (AHEAD && n + GROUP < chunks) loaded.load(weights + (n + GROUP) * CHUNK, chunks - n - GROUP);
        }
#pragma unroll
        for (uint32 b = 0; b < BATCH_TILES; b++) {
            if (first_row + 16 * b >= p.batch) break;
            Eight<BYTES> eight[2][GROUP];
#pragma unroll
            for (uint32 half = 0; half < 2; half++)
#pragma unroll
                for (uint32 m = 0; m < GROUP; m++) {
                    const uint32 row = min(first_row + 16 * b + 8 * half + g, p.batch - 1);
                    eight[half][m].load(place_of_inputs(in, row, begin + (n + m < chunks ? n + m : n) * CHUNK + 8 * t));
                }
            float x[2][GROUP][8];
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
#pragma unroll
                for (uint32 m = 0; m < GROUP; m++) eight[half][m].widen(x[half][m], in.dtype);
                const uint32 before = exponents[b][half], now = max(before, exponent_of(x[half]));
                const float shrink = power_of_two(int32(127 + before - now)), scale = power_of_two(int32(254 - now));
                exponents[b][half] = now;
#pragma unroll
                for (uint32 i = 2 * half; i < 2 * half + 2; i++) products[b].whole[i] *= shrink, products[b].rest[i] *= shrink;
#pragma unroll
                for (uint32 m = 0; m < GROUP; m++)
#pragma unroll
                    for (uint32 i = 0; i < 8; i++) x[half][m][i] *= scale;
            }
#pragma unroll
            for (uint32 m = 0; m < GROUP; m++)
                if (n + m < chunks) products[b].template add<BYTES == 4>(w.whole[m], w.rest[m], x[0][m], x[1][m]);
        }
    }
    const uint32 warp = threadIdx.x / WARP;
#pragma unroll
    for (uint32 b = 0; b < BATCH_TILES; b++)
#pragma unroll
        for (uint32 half = 0; half < 2; half++) {
            const uint32 row = 16 * b + 8 * half + g;
#pragma unroll
            for (uint32 i = 0; i < 2; i++) shared.product[warp][row][2 * t + i] = products[b].whole[2 * half + i] + products[b].rest[2 * half + i];
            if (t == 0) shared.exponent[warp][row] = exponents[b][half];
        }
}

// A thread's part of Σ x² of a row.
template <uint32 BYTES> __device__ inline double sum_squares(const Inputs &in, uint32 row) {
    constexpr uint32 AT_ONCE = 2;
    double sum = 0.0;
#pragma unroll 1
    for (uint32 first = threadIdx.x * 8; first < in.count; first += AT_ONCE * THREADS * 8) {
        Eight<BYTES> eight[AT_ONCE];
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) eight[n].load(place_of_inputs(in, row, first + n * THREADS * 8));
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) {
            float x[8];
            eight[n].widen(x, in.dtype);
            if (first + n * THREADS * 8 >= in.count) break;
#pragma unroll
            for (uint32 c = 0; c < 8; c++) sum = fma(double(x[c]), double(x[c]), sum);
        }
    }
    return sum;
}

// Writes 1 / rms and the cos and sin of each pair of one row of the batch, by a CTA.
__device__ inline void prepare_row(const ProjectParams &p, uint32 row, double (&sum_of_warp)[WARPS]) {
    const auto frequency_of = [&](uint32 c) {
        return p.inv_freq ? double(as<float>(p.inv_freq + c * p.inv_freq_pair)) : exp2(-(double(c) / p.pairs) * p.log2_theta);
    };
    // Pairs are dealt from the last thread on, because the first warp finishes the sum.
    const uint32 first_pair = THREADS - 1 - threadIdx.x;
    const double ahead = p.inv_freq ? 0.0 : frequency_of(first_pair);
    wait_for_previous_kernel();
    const double position = as<int32>(p.positions + row * p.positions_row);
    double sum = p.x.dtype == FLOAT32 ? sum_squares<4>(p.x, row) : sum_squares<2>(p.x, row);
#pragma unroll
    for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
    if (threadIdx.x % WARP == 0) sum_of_warp[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0;
#pragma unroll
        for (uint32 warp = 0; warp < WARPS; warp++) sum += sum_of_warp[warp];
        p.scales[row] = sum == 0.0 ? 0.0 : rsqrt(sum / p.x.count);
    }
#pragma unroll 1
    for (uint32 c = first_pair; c < p.pairs; c += THREADS) {
        const double frequency = c == first_pair && !p.inv_freq ? ahead : frequency_of(c);
        // Splits the angle into quarter turns and a rest. π/2 is subtracted in two parts, so that the rest keeps all its bits.
        const double angle = position * frequency, quarters = rint(angle * 0.63661977236758134);
        const double rest = fma(quarters, -6.123233995736766e-17, fma(quarters, -1.5707963267948966, angle));
        double sine, cosine;
        sincospi(rest * 0.31830988618379067 + 0.5 * (int64(quarters) & 3), &sine, &cosine);
        reinterpret_cast<float2 *>(p.turns)[uint64(row) * p.pairs + c] = make_float2(cosine * p.attention_factor, sine * p.attention_factor);
    }
}

// Takes 16 · BATCH_TILES rows of the batch at a time.
template <uint32 BATCH_TILES> __device__ inline void project_inputs(const ProjectParams &p) {
    __shared__ SharedProducts<BATCH_TILES> shared;
    __shared__ double sum_of_warp[WARPS];
    allow_next_kernel();
    if (blockIdx.x >= p.multiplying) return prepare_row(p, blockIdx.x - p.multiplying, sum_of_warp);
    constexpr uint32 ROWS = 16 * BATCH_TILES;
    const uint32 groups = (p.batch + ROWS - 1) / ROWS, slices = p.x.slices + p.previous.slices;
    const uint32 unit = blockIdx.x / groups, first_row = (blockIdx.x - unit * groups) * ROWS, tile = unit / slices, slice = unit - tile * slices;
    const bool is_x = slice < p.x.slices;
    const Inputs &in = is_x ? p.x : p.previous;
    const uint32 width = in.share / WARPS, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32 begin = (is_x ? slice : slice - p.x.slices) * in.share + warp * width;
    const uint64 column = begin + (is_x ? 0 : p.x.slices * p.x.share) + lane % 4 * 8;
    const float *weights = p.first + (tile * 8 + lane / 4) * uint64(p.columns) + column;
    const uint32 chunks = width / CHUNK;
    if (in.dtype == FLOAT32)
        multiply_slice<BATCH_TILES, 4>(p, in, begin, chunks, weights, first_row, shared);
    else
        multiply_slice<BATCH_TILES, 2>(p, in, begin, chunks, weights, first_row, shared);
    __syncthreads();
#pragma unroll
    for (uint32 at = threadIdx.x; at < ROWS * 8; at += THREADS) {
        const uint32 row = at / 8, n = at % 8;
        if (first_row + row >= p.batch) break;
        uint32 most = 0;
#pragma unroll
        for (uint32 w = 0; w < WARPS; w++) most = max(most, shared.exponent[w][row]);
        float sum = 0.0f;
#pragma unroll
        for (uint32 w = 0; w < WARPS; w++) sum += shared.product[w][row][n] * power_of_two(int32(127 + shared.exponent[w][row] - most));
        const uint64 place = uint64(slice) * p.batch + first_row + row;
        p.products[place * p.rows + tile * 8 + n] = sum;
        if (tile == 0 && n == 0) p.factors[place] = power_of_two(most);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forecast_inputs_16(const __grid_constant__ ProjectParams p) { project_inputs<1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) forecast_inputs_32(const __grid_constant__ ProjectParams p) { project_inputs<2>(p); }

// A thread copies one input of a row.
extern "C" __global__ void __launch_bounds__(THREADS) forecast_pack(const __grid_constant__ PackParams p) {
    allow_next_kernel();
    const uint32 ctas = (p.width + THREADS - 1) / THREADS, row = blockIdx.x / ctas, i = (blockIdx.x - row * ctas) * THREADS + threadIdx.x;
    wait_for_previous_kernel();
    if (i < p.width) p.to[uint64(row) * p.width + i] = i < p.from.count ? load_query(input(p.from, row, i), p.from.dtype) : 0.0f;
}

// --- outputs -------------------------------------------------------------------------------------------------------------------------------------

// The factor by which a slice's products of a row are still to be multiplied.
__device__ inline float factor_of(const ProjectParams &p, uint32 slice, uint32 row) {
    const double factor = __ldcg(&p.factors[uint64(slice) * p.batch + row]), scale = __ldcg(&p.scales[row]);
    return slice < p.x.slices ? factor * scale : factor;
}

// A thread takes one unit of a row.
extern "C" __global__ void __launch_bounds__(THREADS) forecast_turn(const __grid_constant__ ProjectParams p) {
    allow_next_kernel();
    const uint32 all = p.q_heads * p.units.value, ctas = (all + THREADS - 1) / THREADS;
    const uint32 row = blockIdx.x / ctas, at = (blockIdx.x - row * ctas) * THREADS + threadIdx.x, slices = p.x.slices + p.previous.slices;
    wait_for_previous_kernel();
    const Unit unit(p, at);
    if (!unit.exists) return;
    const uint32 channel = unit.head * p.head_dim, first = channel + unit.first, second = channel + (unit.has_second ? unit.second : unit.first);
    float x = __ldg(p.bias + first), y = __ldg(p.bias + second);
#pragma unroll 4
    for (uint32 slice = 0; slice < slices; slice++) {
        const float factor = factor_of(p, slice, row), *products = p.products + (uint64(slice) * p.batch + row) * p.rows;
        x = fmaf(factor, __ldcg(products + first), x), y = fmaf(factor, __ldcg(products + second), y);
    }
    unit.write(p, row, x, y, unit.number < p.pairs ? __ldcg(unit.turn(p, row)) : make_float2(1.0f, 0.0f));
}
