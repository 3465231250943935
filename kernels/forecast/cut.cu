// The forecast's projection through a map that is cut: q̂ = RoPE(up·(down·[x / rms(x), previous, 1])).
//
//   forecast_inner_*     products of down with each slice of the inputs, Σ x² of each slice; beside them cos and sin of each pair
//   forecast_sums        batches of more than 16 rows: slices added up ─ · 1 / rms, once for all
//   forecast_outputs_*   slices added up ─ · 1 / rms ─ up · ─ turned ─ q
//
// Bytes: the map, once; 4096 → 4096 of rank 128 has 4.2 MB, 1 µs. Kernels hold their weights in registers before they wait for the kernel before
// them, so that in a chain of kernels what remains of each is one round trip to the L2 cache, a few hundred instructions and a launch. Their registers
// leave room on a multiprocessor for the next kernel's.
//
// A CTA of forecast_inner_* takes eight rows of down and a slice of the inputs, whose length follows from the map's shape alone; one of
// forecast_outputs_* 32 or 64 channels, in pairs that turn together, and all of the rank. A warp takes an eighth of the columns, so that it reads
// what it multiplies straight into registers; then sums of the warps are added up. All take 16 rows of the batch at a time.
//
// targets: compute_80, compute_90

#include "forecast/products.cuh"

constexpr uint32 CHUNKS = 2, STEP = CHUNKS * CHUNK;  // of forecast_inner_*: chunks and columns that a warp takes at once
constexpr uint32 INNER = 16 * WARPS;                 // of the others: columns that a CTA takes at once; lane (g, t) has four of its warp's 16
constexpr uint32 MOST_SLICES = 8, ROWS = 16;
// Of two CTAs that run on one multiprocessor at once: 65536 / THREADS. Where kernels run one after the other it does not matter.
#if __CUDA_ARCH__ >= 900
constexpr uint32 INNER_REGISTERS = 112, OUTPUT_REGISTERS = 144;
#else
constexpr uint32 INNER_REGISTERS = 168, OUTPUT_REGISTERS = 168;
#endif

// --- inner ---------------------------------------------------------------------------------------------------------------------------------------

struct SharedSlice {
    float product[WARPS][ROWS][8];
    uint32 exponent[WARPS][ROWS];  // of the power of two by which a warp divided the inputs of a row
    float squares[WARPS][ROWS];

    __device__ uint32 most(uint32 row) const {
        uint32 most = 0;
#pragma unroll
        for (uint32 w = 0; w < WARPS; w++) most = max(most, exponent[w][row]);
        return most;
    }
    // What a warp's products of a row lack in the CTA's.
    __device__ float factor(uint32 w, uint32 row, uint32 most) const { return power_of_two(int32(127 + exponent[w][row] - most)); }
};

// Of the largest of some numbers of a row, which four lanes share; or the one before, if that is larger.
template <uint32 TYPE, uint32 BYTES> __device__ inline uint32 exponent_of(const Eight<BYTES> (&x)[CHUNKS], uint32 before) {
    uint32 most = 0;
#pragma unroll
    for (uint32 m = 0; m < CHUNKS; m++)
#pragma unroll
        for (uint32 i = 0; i < Eight<BYTES>::WORDS; i++)
            most = TYPE == FLOAT32 ? max(most, x[m].word[i] & 0x7fffffff) : __vmaxu2(most, x[m].word[i] & 0x7fff7fff);
    if (TYPE != FLOAT32) most = max(most >> 16, most & 0xffff);
    most = max(most, __shfl_xor_sync(FULL_WARP, most, 1));
    most = max(most, __shfl_xor_sync(FULL_WARP, most, 2));
    if (TYPE != FLOAT32) most = __float_as_uint(TYPE == FLOAT16 ? widen_float16(most) : widen_bfloat16(most));
    return min(max(most >> 23, before), MOST_EXPONENT);
}

template <uint32 TYPE>
__device__ inline void multiply_slice(const ProjectParams &p, const Inputs &in, uint32 slice, uint32 tile, uint32 group, SharedSlice &shared) {
    constexpr uint32 BYTES = TYPE == FLOAT32 ? 4 : 2;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const bool is_x = slice < p.x.slices, measures = is_x && tile == 0;
    const uint32 width = in.share / WARPS, steps = width / STEP;
    const uint32 begin = (is_x ? slice : slice - p.x.slices) * in.share + warp * width + 8 * t;
    const float *weights = p.first + (tile * 8 + g) * uint64(p.columns) + (is_x ? 0 : p.x.slices * p.x.share) + begin;
    Loaded<CHUNKS> loaded;
    Weights<CHUNKS> w;
    loaded.load(weights, CHUNKS);
    w.split(loaded);
#pragma unroll 1
    for (uint32 n = CHUNKS; n < steps * CHUNKS; n++) prefetch(weights + n * CHUNK);
    // Of each row and chunk of a step. Rows past the batch are its last one again: nobody reads what becomes of them.
    const char *places[2][CHUNKS];
    const auto find_places = [&](uint32 first_row, uint32 step) {
#pragma unroll
        for (uint32 half = 0; half < 2; half++)
#pragma unroll
            for (uint32 m = 0; m < CHUNKS; m++)
                places[half][m] = held(place_of_inputs(in, min(first_row + 8 * half + g, p.batch - 1), begin + step * STEP + m * CHUNK));
    };
    find_places(ROWS * group, 0);
    bool is_ready = true;  // weights and places of the first step
    wait_for_previous_kernel();
#pragma unroll 1
    for (uint32 first_row = ROWS * group; first_row < p.batch; first_row += ROWS * p.inner_groups) {
        Products products[CHUNKS];
        uint32 exponents[2] = {LEAST_EXPONENT, LEAST_EXPONENT};
        float squares[2] = {0.0f, 0.0f};
#pragma unroll
        for (uint32 m = 0; m < CHUNKS; m++) products[m].clear();
#pragma unroll 1
        for (uint32 step = 0; step < steps; step++) {
            if (!is_ready) find_places(first_row, step);
            Eight<BYTES> eight[2][CHUNKS];
#pragma unroll
            for (uint32 half = 0; half < 2; half++)
#pragma unroll
                for (uint32 m = 0; m < CHUNKS; m++)
                    eight[half][m].load(places[half][m]);
            if (!is_ready && steps > 1) loaded.load(weights + step * STEP, CHUNKS), w.split(loaded);
            is_ready = false;
            float scales[2];
#pragma unroll
            for (uint32 half = 0; half < 2; half++) {
                const uint32 before = exponents[half], now = exponent_of<TYPE>(eight[half], before);
                const float shrink = power_of_two(int32(127 + before - now));
                scales[half] = power_of_two(int32(254 - now)), exponents[half] = now;
                if (step == 0) continue;
                squares[half] *= shrink * shrink;
#pragma unroll
                for (uint32 m = 0; m < CHUNKS; m++)
#pragma unroll
                    for (uint32 i = 2 * half; i < 2 * half + 2; i++) products[m].whole[i] *= shrink, products[m].rest[i] *= shrink;
            }
#pragma unroll
            for (uint32 m = 0; m < CHUNKS; m++) {
                float x[2][8];
#pragma unroll
                for (uint32 half = 0; half < 2; half++) {
                    eight[half][m].widen(x[half], TYPE);
#pragma unroll
                    for (uint32 i = 0; i < 8; i++) x[half][i] *= scales[half];
                }
                products[m].template add<TYPE == FLOAT32>(w.whole[m], w.rest[m], x[0], x[1]);
            }
            if (measures)
#pragma unroll
                for (uint32 m = 0; m < CHUNKS; m++)
#pragma unroll
                    for (uint32 half = 0; half < 2; half++) {
                        if (begin + step * STEP + m * CHUNK >= in.count) break;
                        float x[8];
                        eight[half][m].widen(x, TYPE);
#pragma unroll
                        for (uint32 i = 0; i < 8; i++) x[i] *= scales[half], squares[half] = fmaf(x[i], x[i], squares[half]);
                    }
        }
#pragma unroll
        for (uint32 half = 0; half < 2; half++) {
            const uint32 row = 8 * half + g;
            float sums[2];
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const uint32 at = 2 * half + i;
                sums[i] = products[0].whole[at] + products[1].whole[at] + (products[0].rest[at] + products[1].rest[at]);
            }
            *reinterpret_cast<float2 *>(&shared.product[warp][row][2 * t]) = make_float2(sums[0], sums[1]);
            if (measures) {
                squares[half] += __shfl_xor_sync(FULL_WARP, squares[half], 1);
                squares[half] += __shfl_xor_sync(FULL_WARP, squares[half], 2);
            }
            if (t == 0) shared.exponent[warp][row] = exponents[half], shared.squares[warp][row] = squares[half];
        }
        __syncthreads();
        const uint32 row = threadIdx.x / 8, n = threadIdx.x % 8, measured = threadIdx.x - ROWS * 8;
        if (row < ROWS && first_row + row < p.batch) {
            const uint32 most = shared.most(row);
            float sum = 0.0f;
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) sum = fmaf(shared.product[w][row][n], shared.factor(w, row, most), sum);
            p.products[(uint64(slice) * p.batch + first_row + row) * p.rows + tile * 8 + n] = sum;
        } else if (tile == 0 && measured < ROWS && first_row + measured < p.batch) {
            const uint32 most = shared.most(measured);
            float sum = 0.0f;
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) {
                const float factor = shared.factor(w, measured, most);
                sum = fmaf(shared.squares[w][measured], factor * factor, sum);
            }
            reinterpret_cast<float2 *>(p.factors)[uint64(slice) * p.batch + first_row + measured] = make_float2(power_of_two(most), sum);
        }
        if (first_row + ROWS * p.inner_groups < p.batch) __syncthreads();  // what was there is read
    }
}

// A thread's pair of a row.
__device__ inline void turn_pair(const ProjectParams &p, uint32 at) {
    const uint32 row = at / p.pairs, c = at - row * p.pairs;
    double frequency = p.inv_freq ? 0.0 : exp2(-(double(c) / p.pairs) * p.log2_theta);
    wait_for_previous_kernel();
    if (row >= p.batch) return;
    if (p.inv_freq) frequency = as<float>(p.inv_freq + c * p.inv_freq_pair);
    // An angle of many turns as quarter turns, which the number that a double has no fraction beside rounds, and the rest, of which π/2 in two
    // parts leaves all bits.
    constexpr double WITHOUT_FRACTION = 6755399441055744.0;
    const double angle = as<int32>(p.positions + row * p.positions_row) * frequency, shifted = fma(angle, 0.63661977236758134, WITHOUT_FRACTION);
    const double quarters = shifted - WITHOUT_FRACTION;
    const float rest = fma(quarters, -6.123233995736766e-17, fma(quarters, -1.5707963267948966, angle));
    // Of at most an eighth of a turn, unless the angle has no fraction either.
    const float r = rest > 1.0f ? 1.0f : rest < -1.0f ? -1.0f : rest, square = r * r;
    const float sine = fmaf(fmaf(fmaf(-1.9515296e-4f, square, 8.3321609e-3f), square, -1.6666655e-1f), square * r, r);
    const float cosine = fmaf(fmaf(fmaf(2.4433157e-5f, square, -1.3887316e-3f), square, 4.1666646e-2f), square * square, fmaf(-0.5f, square, 1.0f));
    const uint32 quarter = __double2loint(shifted);
    const float x = quarter & 1 ? sine : cosine, y = quarter & 1 ? cosine : sine, factor = p.attention_factor;
    reinterpret_cast<float2 *>(p.turns)[at] = make_float2((quarter + 1 & 2 ? -x : x) * factor, (quarter & 2 ? -y : y) * factor);
}

// Of inputs of 16 bits, or of any.
template <bool IS_NARROW> __device__ inline void project_inputs(const ProjectParams &p) {
    __shared__ SharedSlice shared;
    allow_next_kernel();
    if (blockIdx.x >= p.multiplying) return turn_pair(p, (blockIdx.x - p.multiplying) * THREADS + threadIdx.x);
    const uint32 slices = p.x.slices + p.previous.slices, unit = blockIdx.x / p.inner_groups, group = blockIdx.x - unit * p.inner_groups;
    const uint32 tile = unit / slices, slice = unit - tile * slices;
    const Inputs &in = slice < p.x.slices ? p.x : p.previous;
    if (!IS_NARROW && in.dtype == FLOAT32) return multiply_slice<FLOAT32>(p, in, slice, tile, group, shared);
    if (in.dtype == FLOAT16) return multiply_slice<FLOAT16>(p, in, slice, tile, group, shared);
    multiply_slice<BFLOAT16>(p, in, slice, tile, group, shared);
}

extern "C" __global__ void __maxnreg__(INNER_REGISTERS) forecast_inner_16(const __grid_constant__ ProjectParams p) { project_inputs<true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) forecast_inner_32(const __grid_constant__ ProjectParams p) { project_inputs<false>(p); }

// --- outputs -------------------------------------------------------------------------------------------------------------------------------------

// Four columns of a row of the map or of the inner numbers, split.
struct Quad {
    float whole[4], rest[4];

    template <bool FINITE> __device__ void split(const float4 &x) {
        const float of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (uint32 i = 0; i < 4; i++) whole[i] = whole_of(of[i]), rest[i] = FINITE ? rest_of_finite(of[i]) : rest_of(of[i]);
    }
};

template <uint32 TILES> struct SharedOutputs {
    static constexpr uint32 PITCH = TILES * 8 + 8;  // 8: four rows hit different banks
    float product[WARPS][ROWS][PITCH];
};

// Where a lane's part of the first slice of a kind of inputs lies: what was measured of rows g and g + 8, and four columns of products.
struct Places {
    const float2 *measured[2];
    const float *products[2];

    __device__ void find(const ProjectParams &p, uint32 first, uint32 first_row, uint32 column) {
#pragma unroll
        for (uint32 half = 0; half < 2; half++) {
            const uint32 lane = threadIdx.x % WARP;
            const uint64 row = uint64(first) * p.batch + first_row + 8 * half + lane / 4;
            measured[half] = held(reinterpret_cast<const float2 *>(p.factors) + row + lane % 4 * p.batch);
            products[half] = held(p.products + row * p.rows + column);
        }
    }
};

// The numbers of four columns of rows g and g + 8, of one kind of inputs, whose slices begin at `first`: slices added up, and times 1 / rms if they
// are x. Nothing of rows past the batch is read.
__device__ inline void add_slices(const ProjectParams &p, const Places &places, uint32 first, uint32 first_row, uint32 column, float4 (&sums)[2]) {
    const bool is_x = first == 0;
    const uint32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, slices = is_x ? p.x.slices : p.previous.slices;
    constexpr uint32 OWN = MOST_SLICES / 4;  // lane (g, t) measures slices t, t + 4, …
    float2 measures[2][OWN];
    float4 parts[2][MOST_SLICES];
#pragma unroll
    for (uint32 half = 0; half < 2; half++) {
        const uint32 row = first_row + 8 * half + g;
        const bool exists = row < p.batch;
        const uint64 step = uint64(p.batch) * p.rows;
#pragma unroll
        for (uint32 n = 0; n < OWN; n++) {
            measures[half][n] = make_float2(0.0f, 0.0f);
            if (exists && t + 4 * n < slices) measures[half][n] = __ldcg(places.measured[half] + 4 * n * p.batch);
        }
#pragma unroll
        for (uint32 s = 0; s < MOST_SLICES; s++) {
            parts[half][s] = make_float4(0, 0, 0, 0);
            if (exists && s < slices && column < p.rows) parts[half][s] = __ldcg(reinterpret_cast<const float4 *>(places.products[half] + s * step));
        }
    }
#pragma unroll
    for (uint32 half = 0; half < 2; half++) {
        float factors[OWN];
        uint32 most = 0;
#pragma unroll
        for (uint32 n = 0; n < OWN; n++) factors[n] = measures[half][n].x, most = max(most, __float_as_uint(factors[n]) >> 23);
        if (is_x) {
            most = max(most, __shfl_xor_sync(FULL_WARP, most, 1));
            most = max(most, __shfl_xor_sync(FULL_WARP, most, 2));
            float sum = 0.0f;
#pragma unroll
            for (uint32 n = 0; n < OWN; n++) {
                factors[n] = power_of_two(int32(127 + (__float_as_uint(factors[n]) >> 23) - most));
                sum = fmaf(measures[half][n].y, factors[n] * factors[n], sum);
            }
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            const float root = rsqrtf(sum), better = root * fmaf(-0.5f * sum * root, root, 1.5f), scale = sum == 0.0f ? 0.0f : better * p.root_count;
#pragma unroll
            for (uint32 n = 0; n < OWN; n++) factors[n] *= scale;
        }
#pragma unroll
        for (uint32 s = 0; s < MOST_SLICES; s++) {
            const float factor = __shfl_sync(FULL_WARP, factors[s / 4], s % 4, 4);
            if (s >= slices) break;
            const float4 &part = parts[half][s];
            sums[half].x = fmaf(factor, part.x, sums[half].x), sums[half].y = fmaf(factor, part.y, sums[half].y);
            sums[half].z = fmaf(factor, part.z, sums[half].z), sums[half].w = fmaf(factor, part.w, sums[half].w);
        }
    }
}

// The numbers, where each is read by few CTAs but slices by many: a CTA takes 16 rows and 128 of them.
extern "C" __global__ void __launch_bounds__(THREADS) forecast_sums(const __grid_constant__ ProjectParams p) {
    allow_next_kernel();
    const uint32 ctas = (p.rows + INNER - 1) / INNER, group = blockIdx.x / ctas, first_row = ROWS * group;
    const uint32 lane = threadIdx.x % WARP, column = (blockIdx.x - group * ctas) * INNER + threadIdx.x / WARP * 16 + lane % 4 * 4;
    const float4 bias = column < p.rows ? __ldg(reinterpret_cast<const float4 *>(p.bias + column)) : make_float4(0, 0, 0, 0);
    float4 sums[2] = {bias, bias};
    Places places;
    places.find(p, 0, first_row, column);
    wait_for_previous_kernel();
    add_slices(p, places, 0, first_row, column, sums);
    if (p.previous.slices) {
        places.find(p, p.x.slices, first_row, column);
        add_slices(p, places, p.x.slices, first_row, column, sums);
    }
#pragma unroll
    for (uint32 half = 0; half < 2; half++) {
        const uint32 row = first_row + 8 * half + lane / 4;
        if (row < p.batch && column < p.rows) *reinterpret_cast<float4 *>(p.sums + uint64(row) * p.rows + column) = sums[half];
    }
}

__device__ inline void load_sums(const ProjectParams &p, uint32 first_row, uint32 column, float4 (&sums)[2]) {
#pragma unroll
    for (uint32 half = 0; half < 2; half++) {
        const uint32 row = first_row + 8 * half + threadIdx.x % WARP / 4;
        sums[half] = make_float4(0, 0, 0, 0);
        if (row < p.batch && column < p.rows) sums[half] = __ldcg(reinterpret_cast<const float4 *>(p.sums + uint64(row) * p.rows + column));
    }
}

// For TILES times four pairs of channels. If IS_SUMMED, forecast_sums was before.
template <uint32 TILES, bool IS_SUMMED> __device__ inline void project_inner(const ProjectParams &p) {
    __shared__ SharedOutputs<TILES> shared;
    constexpr uint32 UNITS = TILES * 4;
    allow_next_kernel();
    const uint32 cta = blockIdx.x / p.output_groups, group = blockIdx.x - cta * p.output_groups, slices = p.x.slices + p.previous.slices;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, first_column = 16 * warp + 4 * t;
    // Each lane knows one unit, which it writes, too.
    const Unit unit(p, cta * UNITS + lane % UNITS);
    const uint32 channel = unit.head * p.head_dim, first = channel + unit.first, second = channel + unit.second;
    uint32 channels[TILES];
#pragma unroll
    for (uint32 tile = 0; tile < TILES; tile++) {
        const uint32 even = __shfl_sync(FULL_WARP, unit.exists ? first : 0, 4 * tile + g / 2);  // nobody writes what is not there
        const uint32 odd = __shfl_sync(FULL_WARP, unit.exists && unit.has_second ? second : 0, 4 * tile + g / 2);
        channels[tile] = g % 2 ? odd : even;
    }
    float4 loaded[TILES], bias;
    const auto load = [&](uint32 column) {
        const uint32 place = column < p.second_row ? column : 0;  // past the rank inner numbers are 0
#pragma unroll
        for (uint32 tile = 0; tile < TILES; tile++)
            loaded[tile] = __ldg(reinterpret_cast<const float4 *>(p.second + uint64(channels[tile]) * p.second_row + place));
        bias = column < p.rows ? __ldg(reinterpret_cast<const float4 *>(p.bias + column)) : make_float4(0, 0, 0, 0);
    };
    load(first_column);
    Places places;
    places.find(p, 0, ROWS * group, first_column);
    bool is_placed = true;
    wait_for_previous_kernel();
#pragma unroll 1
    for (uint32 first_row = ROWS * group; first_row < p.batch; first_row += ROWS * p.output_groups) {
        // A row takes a thread for each unit.
        constexpr uint32 AT_ONCE = THREADS / UNITS, TURNS = ROWS / AT_ONCE;
        const uint32 own_row = first_row + threadIdx.x / UNITS;
        float2 turns[TURNS];
#pragma unroll
        for (uint32 n = 0; n < TURNS; n++) {
            const uint32 row = own_row + n * AT_ONCE;
            turns[n] = unit.number < p.pairs && row < p.batch ? __ldcg(unit.turn(p, row)) : make_float2(1.0f, 0.0f);
        }
#pragma unroll 1
        for (uint32 base = 0; base < p.rank; base += INNER) {
            float4 sums[2] = {bias, bias};
            if constexpr (IS_SUMMED) {
                load_sums(p, first_row, base + first_column, sums);
            } else {
#pragma unroll 1
                for (uint32 first = 0; first < slices; first += first == 0 ? p.x.slices : p.previous.slices) {
                    if (!is_placed) places.find(p, first, first_row, base + first_column);
                    is_placed = false;
                    add_slices(p, places, first, first_row, base + first_column, sums);
                }
            }
            Quad low, high;
            low.split<false>(sums[0]), high.split<false>(sums[1]);
#pragma unroll
            for (uint32 tile = 0; tile < TILES; tile++) {
                float whole[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                Quad w;  // split here: registers hold no more before
                w.split<true>(loaded[tile]);
#pragma unroll
                for (uint32 i = 0; i < 4; i += 2) {
                    const float a[4] = {low.whole[i], high.whole[i], low.whole[i + 1], high.whole[i + 1]};
                    const float a_rest[4] = {low.rest[i], high.rest[i], low.rest[i + 1], high.rest[i + 1]};
                    multiply_tf32(whole, a, w.whole[i], w.whole[i + 1]);
                    multiply_tf32(rest, a, w.rest[i], w.rest[i + 1]);
                    multiply_tf32(rest, a_rest, w.whole[i], w.whole[i + 1]);
                }
#pragma unroll
                for (uint32 half = 0; half < 2; half++) {
                    if (first_row + 8 * half >= p.batch) break;
                    float2 &to = *reinterpret_cast<float2 *>(&shared.product[warp][8 * half + g][8 * tile + 2 * t]);
                    float2 sum = make_float2(whole[2 * half] + rest[2 * half], whole[2 * half + 1] + rest[2 * half + 1]);
                    if (base > 0) sum.x += to.x, sum.y += to.y;
                    to = sum;
                }
            }
            if (p.rank > INNER) load((base + INNER < p.rank ? base + INNER : 0) + first_column);
        }
        __syncthreads();
#pragma unroll
        for (uint32 n = 0; n < TURNS; n++) {
            const uint32 row = own_row + n * AT_ONCE;
            if (row >= p.batch || !unit.exists) break;
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (uint32 from = 0; from < WARPS; from++) {
                const float2 x = *reinterpret_cast<const float2 *>(&shared.product[from][row - first_row][2 * (threadIdx.x % UNITS)]);
                sum.x += x.x, sum.y += x.y;
            }
            unit.write(p, row, sum.x, sum.y, turns[n]);
        }
        if (first_row + ROWS * p.output_groups < p.batch) __syncthreads();  // what was there is read
    }
}

extern "C" __global__ void __maxnreg__(OUTPUT_REGISTERS) forecast_outputs_32(const __grid_constant__ ProjectParams p) { project_inner<4, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) forecast_outputs_64(const __grid_constant__ ProjectParams p) { project_inner<8, true>(p); }
