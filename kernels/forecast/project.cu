// The forecast's projection: q̂ = RoPE(W·[x / rms(x), previous, 1]), W whole or cut to up·down.
//
//   forecast_pack       inputs that do not lie in aligned units of eight, side by side in float32
//   forecast_inputs_*   products of W or down with each slice of the inputs; 1 / rms(x), cos and sin of each row
//   forecast_outputs    cut:   slices added up ─ up · ─ turned ─ q
//   forecast_turn       whole: slices added up ─ turned ─ q
//
// Bytes: the map, once. A map 4096 → 4096 of rank 128 has 4.2 MB, 1 µs. Both kernels ask for their weights before they wait for the kernel before
// them, so that in a chain of kernels what remains is two round trips to the L2 cache and two hand-overs.
//
// Cut: a CTA of forecast_inputs_* takes eight rows of the map and a slice of the inputs, whose length follows from the map's shape alone; a warp an
// eighth of the slice, for 16 rows of the batch at a time. In forecast_outputs a warp takes eight pairs of channels that turn together.
//
// Products are those of TF32, m16n8k8: rows of the batch are M, rows of the map N. A weight is the sum of two TF32 numbers but for its last bits, a
// 16-bit input is one; a float32 input is split, too, and the product of the two rests left out. Inputs of a slice are scaled by a
// power of two, so that nothing overflows before 1 / rms is known.
//
// targets: compute_80, compute_90

#include "common/eight.cuh"
#include "forecast/params.cuh"

constexpr uint32 THREADS = 256, WARPS = THREADS / WARP;
constexpr uint32 CHUNK = 32, GROUP = 4;  // columns of a step: lane (g, t) has 8·t … 8·t + 7 of each chunk, of row g
constexpr uint32 OUTPUT_WARPS = 4, TILES = 2;  // of forecast_outputs: a tile is four pairs
constexpr uint32 LEAST_EXPONENT = 27, MOST_EXPONENT = 227;  // of the power of two by which a slice is divided

// --- products ------------------------------------------------------------------------------------------------------------------------------------

// x = whole + rest, but for the rest's last bits: the tensor cores read 11 of each. Of an infinity no rest is left.
__device__ inline float whole_of(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
__device__ inline float rest_of(float x) {
    const float whole = whole_of(x), rest = x == whole ? 0.0f : x - whole;
    return __uint_as_float(__float_as_uint(rest) + 0x1000u & 0xffffe000u);
}

__device__ inline void multiply_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// A row's weights in a group of chunks, as they come. Loads here and below are under no condition, so that all are on their way together.
struct Loaded {
    float4 four[GROUP][2];

    // The first of the group's chunks again for those past `chunks`.
    __device__ void load(const float *from, uint32 chunks) {
#pragma unroll
        for (uint32 n = 0; n < GROUP; n++) {
            const float4 *chunk = reinterpret_cast<const float4 *>(from + (n < chunks ? n * CHUNK : 0));
            four[n][0] = __ldg(chunk), four[n][1] = __ldg(chunk + 1);
        }
    }
};

struct Weights {
    float whole[GROUP][8], rest[GROUP][8];

    __device__ void split(const Loaded &loaded) {
#pragma unroll
        for (uint32 n = 0; n < GROUP; n++)
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                const float4 four = loaded.four[n][half];
                const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (uint32 i = 0; i < 4; i++) whole[n][4 * half + i] = whole_of(w[i]), rest[n][4 * half + i] = rest_of(w[i]);
            }
    }
};

// Lane (g, t): rows g and g + 8 of the batch, rows 2t and 2t + 1 of the map.
struct Products {
    float whole[4], rest[4];  // of the whole parts; with a rest of either side

    __device__ void clear() {
#pragma unroll
        for (uint32 i = 0; i < 4; i++) whole[i] = rest[i] = 0.0f;
    }
    // Those of a chunk. `low` and `high` are rows g and g + 8.
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

// --- inputs --------------------------------------------------------------------------------------------------------------------------------------

__device__ inline const char *input(const Inputs &in, uint32 row, uint32 i) {
    const uint32 head = in.dim.divide(i);
    return in.data + row * in.row + head * in.head + (i - head * in.dim.value) * in.channel;
}

// Inputs i … i + 7 of a row, for i a multiple of eight; past the last the first ones again, whose weights are 0.
template <uint32 BYTES> __device__ inline void load_inputs(const Inputs &in, uint32 row, uint32 i, Eight<BYTES> &x) {
    x.load(input(in, row, i < in.count ? i : 0));
}

__device__ inline float power_of_two(int32 exponent) { return __uint_as_float(uint32(max(exponent, 0)) << 23); }

// Of the largest of some numbers of a row, which four lanes share.
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

// Rows past the batch are its last one again: nobody reads what becomes of them.
template <uint32 BATCH_TILES, uint32 BYTES>
__device__ inline void multiply_slice(const ProjectParams &p, const Inputs &in, uint32 begin, uint32 chunks, const float *weights, uint32 first_row,
                                      SharedProducts<BATCH_TILES> &shared) {
    const uint32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    Products products[BATCH_TILES];
    uint32 exponents[BATCH_TILES][2];
#pragma unroll
    for (uint32 b = 0; b < BATCH_TILES; b++) products[b].clear(), exponents[b][0] = exponents[b][1] = LEAST_EXPONENT;
    Loaded loaded;
    Weights w;
    loaded.load(weights, chunks);
    w.split(loaded);
    constexpr bool AHEAD = BATCH_TILES == 1;  // the next group's weights are on their way; registers hold no more of them
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
                    load_inputs<BYTES>(in, row, begin + (n + m < chunks ? n + m : n) * CHUNK + 8 * t, eight[half][m]);
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

// A thread's part of Σ x².
template <uint32 BYTES> __device__ inline double sum_squares(const Inputs &in, uint32 row) {
    constexpr uint32 AT_ONCE = 2;
    double sum = 0.0;
#pragma unroll 1
    for (uint32 first = threadIdx.x * 8; first < in.count; first += AT_ONCE * THREADS * 8) {
        Eight<BYTES> eight[AT_ONCE];
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) load_inputs<BYTES>(in, row, first + n * THREADS * 8, eight[n]);
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

// A CTA's row of the batch: 1 / rms, and how each pair turns.
__device__ inline void prepare_row(const ProjectParams &p, uint32 row, double (&sum_of_warp)[WARPS]) {
    const auto frequency_of = [&](uint32 c) {
        return p.inv_freq ? double(as<float>(p.inv_freq + c * p.inv_freq_pair)) : exp2(-(double(c) / p.pairs) * p.log2_theta);
    };
    // The last warps turn, since the first one ends the sum.
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
        // An angle of many turns as quarter turns and the rest, of which π/2 in two parts leaves all bits.
        const double angle = position * frequency, quarters = rint(angle * 0.63661977236758134);
        const double rest = fma(quarters, -6.123233995736766e-17, fma(quarters, -1.5707963267948966, angle));
        double sine, cosine;
        sincospi(rest * 0.31830988618379067 + 0.5 * (int64(quarters) & 3), &sine, &cosine);
        reinterpret_cast<float2 *>(p.turns)[uint64(row) * p.pairs + c] = make_float2(cosine * p.attention_factor, sine * p.attention_factor);
    }
}

// For 16 · BATCH_TILES rows of the batch at a time.
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

// A thread copies an input of a row.
extern "C" __global__ void __launch_bounds__(THREADS) forecast_pack(const __grid_constant__ PackParams p) {
    allow_next_kernel();
    const uint32 ctas = (p.width + THREADS - 1) / THREADS, row = blockIdx.x / ctas, i = (blockIdx.x - row * ctas) * THREADS + threadIdx.x;
    wait_for_previous_kernel();
    if (i < p.width) p.to[uint64(row) * p.width + i] = i < p.from.count ? load_query(input(p.from, row, i), p.from.dtype) : 0.0f;
}

// --- outputs -------------------------------------------------------------------------------------------------------------------------------------

// What a slice's products of a row lack.
__device__ inline float factor_of(const ProjectParams &p, uint32 slice, uint32 row) {
    const double factor = __ldcg(&p.factors[uint64(slice) * p.batch + row]), scale = __ldcg(&p.scales[row]);
    return slice < p.x.slices ? factor * scale : factor;
}

// Two channels of a head, which turn together or not at all.
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
    // x and y are its values before they turn.
    __device__ void write(const ProjectParams &p, uint32 row, float x, float y) const {
        float cosine = 1.0f, sine = 0.0f;
        if (number < p.pairs) {
            const float2 turn = __ldcg(reinterpret_cast<const float2 *>(p.turns) + uint64(row) * p.pairs + number);
            cosine = turn.x, sine = turn.y;
        }
        char *q = p.q + row * p.q_row + head * p.q_head;
        const bool turns = number < p.pairs;
        store_element(q + first * p.q_channel, p.q_type, turns ? x * cosine - y * sine : x);
        if (has_second) store_element(q + second * p.q_channel, p.q_type, turns ? x * sine + y * cosine : y);
    }
};

extern "C" __global__ void __launch_bounds__(OUTPUT_WARPS *WARP, 1) forecast_outputs(const __grid_constant__ ProjectParams p) {
    constexpr uint32 OUTPUT_THREADS = OUTPUT_WARPS * WARP, WIDTH = CHUNK * GROUP, PITCH = WIDTH + 4;  // 4: eight rows hit different banks
    constexpr uint32 STEP = OUTPUT_THREADS / (WIDTH / 4), PARTS = 16 / STEP;                          // rows of the batch that are added up at once
    __shared__ alignas(16) float inner[16][PITCH];
    allow_next_kernel();
    const uint32 groups = (p.batch + 15) / 16, cta = blockIdx.x / groups, first_row = (blockIdx.x - cta * groups) * 16;
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const uint32 first_unit = (cta * OUTPUT_WARPS + warp) * TILES * 4;
    const float *weights[TILES];
    Loaded loaded[TILES];
    Weights w[TILES];
#pragma unroll
    for (uint32 tile = 0; tile < TILES; tile++) {
        const Unit unit(p, first_unit + 4 * tile + g / 2);
        const bool exists = unit.exists && (g % 2 == 0 || unit.has_second);
        const uint32 channel = unit.head * p.head_dim + (g % 2 ? unit.second : unit.first);
        weights[tile] = p.second + uint64(exists ? channel : 0) * p.second_row + 8 * t;  // nobody writes what is not there
        loaded[tile].load(weights[tile], p.second_row / CHUNK);
    }
#pragma unroll
    for (uint32 tile = 0; tile < TILES; tile++) w[tile].split(loaded[tile]);
    wait_for_previous_kernel();
    Products products[TILES];
#pragma unroll
    for (uint32 tile = 0; tile < TILES; tile++) products[tile].clear();
    const uint32 part = threadIdx.x / (WIDTH / 4), column = threadIdx.x % (WIDTH / 4) * 4, slices = p.x.slices + p.previous.slices;
#pragma unroll 1
    for (uint32 base = 0; base < p.rank; base += WIDTH) {
        float4 sums[PARTS];
        const bool is_there = base + column < p.rows;
        const uint32 place = is_there ? base + column : 0;
#pragma unroll
        for (uint32 n = 0; n < PARTS; n++) sums[n] = __ldg(reinterpret_cast<const float4 *>(p.bias + place));
#pragma unroll 4
        for (uint32 slice = 0; slice < slices; slice++)
#pragma unroll
            for (uint32 n = 0; n < PARTS; n++) {
                const uint32 row = min(first_row + part + n * STEP, p.batch - 1);
                const float factor = factor_of(p, slice, row);
                const float4 x = __ldcg(reinterpret_cast<const float4 *>(p.products + (uint64(slice) * p.batch + row) * p.rows + place));
                sums[n].x = fmaf(factor, x.x, sums[n].x), sums[n].y = fmaf(factor, x.y, sums[n].y);
                sums[n].z = fmaf(factor, x.z, sums[n].z), sums[n].w = fmaf(factor, x.w, sums[n].w);
            }
        if (!is_there)
#pragma unroll
            for (uint32 n = 0; n < PARTS; n++) sums[n] = make_float4(0, 0, 0, 0);
        if (base > 0) __syncthreads();  // what was there is read
#pragma unroll
        for (uint32 n = 0; n < PARTS; n++) *reinterpret_cast<float4 *>(&inner[part + n * STEP][column]) = sums[n];
        __syncthreads();
        const uint32 chunks = (p.second_row - base) / CHUNK;
        if (base > 0)
#pragma unroll
            for (uint32 tile = 0; tile < TILES; tile++) loaded[tile].load(weights[tile] + base, chunks), w[tile].split(loaded[tile]);
#pragma unroll
        for (uint32 m = 0; m < GROUP; m++) {
            if (m >= chunks) break;
            float x[2][8];
#pragma unroll
            for (uint32 half = 0; half < 2; half++)
#pragma unroll
                for (uint32 i = 0; i < 8; i += 4) {
                    const float4 four = *reinterpret_cast<const float4 *>(&inner[8 * half + g][m * CHUNK + 8 * t + i]);
                    x[half][i] = four.x, x[half][i + 1] = four.y, x[half][i + 2] = four.z, x[half][i + 3] = four.w;
                }
#pragma unroll
            for (uint32 tile = 0; tile < TILES; tile++) products[tile].add<true>(w[tile].whole[m], w[tile].rest[m], x[0], x[1]);
        }
    }
#pragma unroll
    for (uint32 tile = 0; tile < TILES; tile++) {
        const Unit unit(p, first_unit + 4 * tile + t);
        if (!unit.exists) continue;
#pragma unroll
        for (uint32 half = 0; half < 2; half++) {
            const uint32 row = first_row + 8 * half + g;
            const Products &sum = products[tile];
            if (row < p.batch) unit.write(p, row, sum.whole[2 * half] + sum.rest[2 * half], sum.whole[2 * half + 1] + sum.rest[2 * half + 1]);
        }
    }
}

// A thread takes a unit of a row.
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
    unit.write(p, row, x, y);
}
