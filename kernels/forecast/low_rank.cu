// The forecast's projection through a map of low rank: q̂ = RoPE(up·(down·[x / rms(x), previous, 1])).
//
//   forecast_inner_*     computes the products of down and each slice of the inputs, and Σ x² of each slice; other CTAs compute the cos and
//                        sin of each pair
//   forecast_sums        sums the slices' products, times 1 / rms
//   forecast_joined_*    replaces inner and sums for up to 16 rows: a cluster has a CTA for each slice, and its first CTA sums
//   forecast_outputs_*   multiplies the sums by up, rotates, writes q; forecast_outputs_adding also sums the slices, for up to 16 rows
//                        on devices without clusters
//
// Variants: *_16 for inputs of 16 bits, *_32 for any; forecast_outputs_32 and _64 take so many channels per CTA.
//
// Bytes: the map, once; 4096 → 4096 of rank 128 has 4.2 MB, 1 µs. Kernels load their weights into registers before they wait for the previous
// kernel, so that in a chain of kernels each costs one round trip to the L2 cache, a few hundred instructions and a launch. Their register
// limits let the next kernel's CTAs start on the same multiprocessor.
//
// Work split: a CTA of forecast_inner_* takes eight rows of down and a slice of the inputs, whose length follows from the map's shape alone; a
// CTA of forecast_outputs_* takes 32 or 64 channels, in pairs that rotate together, and the whole rank. A warp takes an eighth of the columns,
// so that it loads its operands straight into registers; then the sums of the warps are added. All kernels take 16 rows of the batch at a time.
//
// targets: compute_80, compute_90

#include "common/cluster.cuh"
#include "forecast/products.cuh"

constexpr uint32 CHUNKS = 2, STEP = CHUNKS * CHUNK;  // down: chunks and columns that a warp takes at once
constexpr uint32 INNER = 16 * WARPS;                 // up: columns that a CTA takes at once; lane (g, t) takes four of its warp's 16
constexpr uint32 MOST_SLICES = 8, MOST_CTAS = 2 * MOST_SLICES, ROWS = 16;  // slices of a kind of inputs; CTAs of a cluster; rows at a time
// Registers of a thread. Kernels that are resident on a multiprocessor together share 65536 / THREADS; on devices where kernels run one after
// the other, a kernel may take more.
#if __CUDA_ARCH__ >= 900
constexpr uint32 INNER_REGISTERS = 128, OUTPUT_REGISTERS = 128;
#else
constexpr uint32 INNER_REGISTERS = 168, OUTPUT_REGISTERS = 168;
#endif

// --- inner ---------------------------------------------------------------------------------------------------------------------------------------

struct SharedSlice {
    float product[WARPS][ROWS][8];
    uint32 exponent[WARPS][ROWS];  // the exponent of the power of two by which a warp divided the inputs of a row
    float squares[WARPS][ROWS];

    __device__ uint32 most(uint32 row) const {
        uint32 most = 0;
#pragma unroll
        for (uint32 w = 0; w < WARPS; w++) most = max(most, exponent[w][row]);
        return most;
    }
    // The factor that converts a warp's products of a row to the CTA's largest exponent.
    __device__ float factor(uint32 w, uint32 row, uint32 most) const { return power_of_two(int32(127 + exponent[w][row] - most)); }
};

// In the cluster's first CTA: the products of a tile of all CTAs of the cluster, one for each slice.
struct SharedSlices {
    Mailbox mailbox;
    float product[MOST_CTAS][ROWS][8];
    float2 measured[MOST_CTAS][ROWS];
};

// Finds the factors of the products of each slice of a kind of inputs. `measured` is a slice's power of two, and its Σ x² divided by the square of
// that; both are 0 for a slice that does not exist. The factors of x include 1 / rms.
__device__ inline void find_factors(const ProjectParams &p, bool is_x, const float2 (&measured)[MOST_SLICES], float (&factors)[MOST_SLICES]) {
    uint32 most = 0;
#pragma unroll
    for (uint32 s = 0; s < MOST_SLICES; s++) factors[s] = measured[s].x, most = max(most, __float_as_uint(factors[s]) >> 23);
    if (is_x) {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // four sums, so that chains of dependent additions are short
#pragma unroll
        for (uint32 s = 0; s < MOST_SLICES; s++) {
            factors[s] = power_of_two(int32(127 + (__float_as_uint(factors[s]) >> 23) - most));
            sums[s % 4] = fmaf(measured[s].y, factors[s] * factors[s], sums[s % 4]);
        }
        const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        const float root = rsqrtf(sum), better = root * fmaf(-0.5f * sum * root, root, 1.5f), scale = sum == 0.0f ? 0.0f : better * p.root_count;
#pragma unroll
        for (uint32 s = 0; s < MOST_SLICES; s++) factors[s] *= scale;
    }
}

// The exponent of the largest of a row's inputs in four lanes, at least `before`, at most MOST_EXPONENT.
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

// The pairs of all rows are dealt from the last CTA on, because the first CTAs have more work. A thread loads the position of its first pair early.
__device__ inline uint32 first_pair() { return (gridDim.x - 1 - blockIdx.x) * THREADS + threadIdx.x; }
__device__ inline int32 position_of(const ProjectParams &p, uint32 pair) { return as<int32>(p.positions + pair / p.pairs * p.positions_row); }
__device__ inline int32 first_position(const ProjectParams &p) { return first_pair() < p.batch * p.pairs ? position_of(p, first_pair()) : 0; }

__device__ inline void turn_pairs(const ProjectParams &p, int32 position) {
#pragma unroll 1
    for (uint32 at = first_pair(), step = gridDim.x * THREADS; at < p.batch * p.pairs; at += step) {
        const uint32 c = at % p.pairs;
        if (at >= step) position = position_of(p, at);
        const double frequency = p.inv_freq ? as<float>(p.inv_freq + c * p.inv_freq_pair) : exp2(-(double(c) / p.pairs) * p.log2_theta);
        // Splits the angle into quarter turns and a rest. Adding WITHOUT_FRACTION, beside which a double has no bits for a fraction, rounds the
        // number of quarter turns. π/2 is subtracted in two parts, so that the rest keeps all its bits.
        constexpr double WITHOUT_FRACTION = 6755399441055744.0;
        const double angle = position * frequency, shifted = fma(angle, 0.63661977236758134, WITHOUT_FRACTION);
        const double quarters = shifted - WITHOUT_FRACTION;
        const float rest = fma(quarters, -6.123233995736766e-17, fma(quarters, -1.5707963267948966, angle));
        // The rest is at most an eighth of a turn, unless the angle is so large that it has no fraction itself.
        const float r = rest > 1.0f ? 1.0f : rest < -1.0f ? -1.0f : rest, square = r * r;
        const float sine = fmaf(fmaf(fmaf(-1.9515296e-4f, square, 8.3321609e-3f), square, -1.6666655e-1f), square * r, r);
        const float cosine =
            fmaf(fmaf(fmaf(2.4433157e-5f, square, -1.3887316e-3f), square, 4.1666646e-2f), square * square, fmaf(-0.5f, square, 1.0f));
        const uint32 quarter = __double2loint(shifted);
        const float x = quarter & 1 ? sine : cosine, y = quarter & 1 ? cosine : sine, factor = p.attention_factor;
        reinterpret_cast<float2 *>(p.turns)[at] = make_float2((quarter + 1 & 2 ? -x : x) * factor, (quarter & 2 ? -y : y) * factor);
    }
}

template <uint32 TYPE, bool JOINS>
__device__ inline void multiply_slice(const ProjectParams &p, const Inputs &in, uint32 slice, uint32 tile, uint32 group, SharedSlice &shared,
                                      SharedSlices &slices) {
    constexpr uint32 BYTES = TYPE == FLOAT32 ? 4 : 2;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const bool is_x = slice < p.x.slices, measures = JOINS || tile == 0;
    const uint32 width = in.share / WARPS, steps = width / STEP;
    const uint32 begin = (is_x ? slice : slice - p.x.slices) * in.share + warp * width + 8 * t;
    const float *weights = p.first + (tile * 8 + g) * uint64(p.columns) + (is_x ? 0 : p.x.slices * p.x.share) + begin;
    Loaded<CHUNKS> loaded;
    Weights<CHUNKS> w;
    loaded.load(weights, CHUNKS);
    w.split(loaded);
#pragma unroll 1
    for (uint32 n = CHUNKS; n < steps * CHUNKS; n++) prefetch(weights + n * CHUNK);
    // The addresses of the inputs of each row and chunk of a step. Rows past the batch load its last row again; their products are not read.
    const char *places[2][CHUNKS];
    const auto find_places = [&](uint32 first_row, uint32 step) {
#pragma unroll
        for (uint32 half = 0; half < 2; half++)
#pragma unroll
            for (uint32 m = 0; m < CHUNKS; m++)
                places[half][m] =
                    pin_in_register(place_of_inputs(in, min(first_row + 8 * half + g, p.batch - 1), begin + step * STEP + m * CHUNK));
    };
    find_places(ROWS * group, 0);
    bool is_ready = true;  // whether the weights and places of the step are loaded, as those of the first step are
    const uint32 row = threadIdx.x / 8, n = threadIdx.x % 8, measured = threadIdx.x - ROWS * 8, column = tile * 8 + n;
    float bias = 0.0f;
    if (JOINS) {
        bias = p.bias[column];
        slices.mailbox.join((p.x.slices + p.previous.slices) * p.batch * (8 * sizeof(float) + sizeof(float2)));
    }
    wait_for_previous_kernel();
    const int32 position = JOINS ? first_position(p) : 0;
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
                for (uint32 m = 0; m < CHUNKS; m++) {
                    eight[half][m].clear();
                    if (begin + step * STEP + m * CHUNK < in.count) eight[half][m].load(places[half][m]);
                }
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
                    if (!measures) continue;
#pragma unroll
                    for (uint32 i = 0; i < 8; i++) squares[half] = fmaf(x[half][i], x[half][i], squares[half]);
                }
                products[m].template add<TYPE == FLOAT32>(w.whole[m], w.rest[m], x[0], x[1]);
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
            squares[half] += __shfl_xor_sync(FULL_WARP, squares[half], 1);
            squares[half] += __shfl_xor_sync(FULL_WARP, squares[half], 2);
            if (t == 0) shared.exponent[warp][row] = exponents[half], shared.squares[warp][row] = squares[half];
        }
        __syncthreads();
        const uint64 place = uint64(slice) * p.batch + first_row;
        if (row < ROWS && first_row + row < p.batch) {
            const uint32 most = shared.most(row);
            float sum = 0.0f;
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) sum = fmaf(shared.product[w][row][n], shared.factor(w, row, most), sum);
            if (JOINS)
                slices.mailbox.send(reinterpret_cast<uint32 *>(&slices.product[slice][row][n]), __float_as_uint(sum));
            else
                p.products[(place + row) * p.rows + column] = sum;
        } else if (measures && measured < ROWS && first_row + measured < p.batch) {
            const uint32 most = shared.most(measured);
            float sum = 0.0f;
#pragma unroll
            for (uint32 w = 0; w < WARPS; w++) {
                const float factor = shared.factor(w, measured, most);
                sum = fmaf(shared.squares[w][measured], factor * factor, sum);
            }
            if (JOINS) {
                uint32 *to = reinterpret_cast<uint32 *>(&slices.measured[slice][measured]);
                slices.mailbox.send(to, __float_as_uint(power_of_two(most))), slices.mailbox.send(to + 1, __float_as_uint(sum));
            } else {
                reinterpret_cast<float2 *>(p.factors)[place + measured] = make_float2(power_of_two(most), sum);
            }
        }
        if (JOINS) break;  // the batch has no more than 16 rows
        if (first_row + ROWS * p.inner_groups < p.batch) __syncthreads();  // all threads have read `shared`
    }
    if (!JOINS) return;
    turn_pairs(p, position);
    if (slice > 0) return;
    slices.mailbox.receive();
    if (row >= min(ROWS, p.batch)) return;
    const auto add = [&](uint32 first, uint32 count) {
        float2 measured[MOST_SLICES];
        float parts[MOST_SLICES], factors[MOST_SLICES];
#pragma unroll
        for (uint32 s = 0; s < MOST_SLICES; s++) {
            measured[s] = s < count ? slices.measured[first + s][row] : make_float2(0.0f, 0.0f);
            parts[s] = s < count ? slices.product[first + s][row][n] : 0.0f;
        }
        find_factors(p, first == 0, measured, factors);
#pragma unroll
        for (uint32 s = 0; s < MOST_SLICES; s++) bias = fmaf(factors[s], parts[s], bias);
    };
    add(0, p.x.slices);
    if (p.previous.slices) add(p.x.slices, p.previous.slices);
    p.sums[row * p.rows + column] = bias;
}

// IS_NARROW: inputs have 16 bits; otherwise any dtype. JOINS: a cluster sums the slices. CTAs that do not multiply compute cos and sin of pairs.
template <bool IS_NARROW, bool JOINS> __device__ inline void project_inputs(const ProjectParams &p) {
    __shared__ SharedSlice shared;
    __shared__ SharedSlices joined;
    allow_next_kernel();
    const uint32 slices = p.x.slices + p.previous.slices, ctas = JOINS ? cluster_ctas() : slices;
    const uint32 unit = blockIdx.x / p.inner_groups, group = blockIdx.x - unit * p.inner_groups;
    const uint32 tile = unit / ctas, slice = unit - tile * ctas;
    if (JOINS) joined.mailbox.open();
    if (JOINS ? slice >= slices : blockIdx.x >= p.multiplying) {
        if (JOINS) joined.mailbox.start();
        wait_for_previous_kernel();
        return turn_pairs(p, first_position(p));
    }
    const Inputs &in = slice < p.x.slices ? p.x : p.previous;
    if (!IS_NARROW && in.dtype == FLOAT32) return multiply_slice<FLOAT32, JOINS>(p, in, slice, tile, group, shared, joined);
    if (in.dtype == FLOAT16) return multiply_slice<FLOAT16, JOINS>(p, in, slice, tile, group, shared, joined);
    multiply_slice<BFLOAT16, JOINS>(p, in, slice, tile, group, shared, joined);
}

extern "C" __global__ void __maxnreg__(INNER_REGISTERS) forecast_inner_16(const __grid_constant__ ProjectParams p) {
    project_inputs<true, false>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) forecast_inner_32(const __grid_constant__ ProjectParams p) {
    project_inputs<false, false>(p);
}
extern "C" __global__ void __maxnreg__(INNER_REGISTERS) forecast_joined_16(const __grid_constant__ ProjectParams p) {
    project_inputs<true, true>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) forecast_joined_32(const __grid_constant__ ProjectParams p) {
    project_inputs<false, true>(p);
}

// --- outputs -------------------------------------------------------------------------------------------------------------------------------------

// Four columns of a row of `up` or of the sums, split into whole and rest.
struct Quad {
    float whole[4], rest[4];

    template <bool FINITE> __device__ void split(const float4 &x) {
        const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (uint32 i = 0; i < 4; i++)
            whole[i] = whole_of(values[i]), rest[i] = FINITE ? rest_of_finite(values[i]) : rest_of(values[i]);
    }
};

template <uint32 TILES> struct SharedOutputs {
    static constexpr uint32 PITCH = TILES * 8 + 8;  // the padding of 8 puts four rows in different banks
    float product[WARPS][ROWS][PITCH];
};

// Four columns of a row, summed over the slices, the slices of x times 1 / rms. `sum` is the bias at first.
__device__ inline float4 add_slices(const ProjectParams &p, uint32 row, uint32 column, float4 sum) {
#pragma unroll 1
    for (uint32 first = 0, count = p.x.slices; count > 0; count = first == 0 ? p.previous.slices : 0, first = p.x.slices) {
        float2 measured[MOST_SLICES];
        float4 parts[MOST_SLICES];
#pragma unroll
        for (uint32 s = 0; s < MOST_SLICES; s++) {
            const uint64 place = uint64(first + s) * p.batch + row;
            measured[s] = make_float2(0.0f, 0.0f), parts[s] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (s >= count) continue;
            measured[s] = __ldcg(reinterpret_cast<const float2 *>(p.factors) + place);
            parts[s] = __ldcg(reinterpret_cast<const float4 *>(p.products + place * p.rows + column));
        }
        float factors[MOST_SLICES];
        find_factors(p, first == 0, measured, factors);
#pragma unroll
        for (uint32 s = 0; s < MOST_SLICES; s++) {
            sum.x = fmaf(factors[s], parts[s].x, sum.x), sum.y = fmaf(factors[s], parts[s].y, sum.y);
            sum.z = fmaf(factors[s], parts[s].z, sum.z), sum.w = fmaf(factors[s], parts[s].w, sum.w);
        }
    }
    return sum;
}

// A thread takes four columns of a row.
extern "C" __global__ void __launch_bounds__(THREADS) forecast_sums(const __grid_constant__ ProjectParams p) {
    allow_next_kernel();
    const uint32 quads = p.rows / 4, at = blockIdx.x * THREADS + threadIdx.x, row = at / quads, column = 4 * (at - row * quads);
    const float4 bias = *reinterpret_cast<const float4 *>(p.bias + column);
    wait_for_previous_kernel();
    if (row < p.batch) *reinterpret_cast<float4 *>(p.sums + uint64(row) * p.rows + column) = add_slices(p, row, column, bias);
}

template <bool ADDS> __device__ inline void load_sums(const ProjectParams &p, uint32 first_row, uint32 column, float4 (&sums)[2]) {
#pragma unroll
    for (uint32 half = 0; half < 2; half++) {
        const uint32 row = first_row + 8 * half + threadIdx.x % WARP / 4;
        sums[half] = make_float4(0, 0, 0, 0);
        if (row >= p.batch || column >= p.rows) continue;
        if (ADDS)
            sums[half] = add_slices(p, row, column, *reinterpret_cast<const float4 *>(p.bias + column));
        else
            sums[half] = __ldcg(reinterpret_cast<const float4 *>(p.sums + uint64(row) * p.rows + column));
    }
}

// Multiplies the sums by `up`, for TILES times four units of channels. If ADDS, it first sums the slices.
template <uint32 TILES, bool ADDS> __device__ inline void project_outputs(const ProjectParams &p) {
    __shared__ SharedOutputs<TILES> shared;
    constexpr uint32 UNITS = TILES * 4;
    constexpr bool SPLITS_EARLY = TILES <= 4;  // split weights of more tiles would take the registers of a second CTA
    allow_next_kernel();
    const uint32 cta = blockIdx.x / p.output_groups, group = blockIdx.x - cta * p.output_groups;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, first_column = 16 * warp + 4 * t;
    // Each lane finds the channels of one unit, which it also writes.
    const Unit unit(p, cta * UNITS + lane % UNITS);
    const uint32 channel = unit.head * p.head_dim, first = channel + unit.first, second = channel + unit.second;
    uint32 channels[TILES];
#pragma unroll
    for (uint32 tile = 0; tile < TILES; tile++) {
        const uint32 even = __shfl_sync(FULL_WARP, unit.exists ? first : 0, 4 * tile + g / 2);  // units that do not exist are not written
        const uint32 odd = __shfl_sync(FULL_WARP, unit.exists && unit.has_second ? second : 0, 4 * tile + g / 2);
        channels[tile] = g % 2 ? odd : even;
    }
    float4 loaded[TILES];
    Quad w[TILES];
    // The loads are not __ldg, which the assembler would move past the wait.
    const auto load = [&](uint32 column) {
        const uint32 place = column < p.second_row ? column : 0;  // the sums past the rank are 0
#pragma unroll
        for (uint32 tile = 0; tile < TILES; tile++)
            loaded[tile] = *reinterpret_cast<const float4 *>(p.second + uint64(channels[tile]) * p.second_row + place);
#pragma unroll
        for (uint32 tile = 0; tile < TILES && SPLITS_EARLY; tile++) w[tile].template split<true>(loaded[tile]);
    };
    load(first_column);
    wait_for_previous_kernel();
#pragma unroll 1
    for (uint32 first_row = ROWS * group; first_row < p.batch; first_row += ROWS * p.output_groups) {
        // A thread takes a unit of a row.
        constexpr uint32 AT_ONCE = THREADS / UNITS, TURNS = ROWS / AT_ONCE;
        const uint32 thread_row = first_row + threadIdx.x / UNITS;
        float2 turns[TURNS];
#pragma unroll
        for (uint32 n = 0; n < TURNS; n++) {
            const uint32 row = thread_row + n * AT_ONCE;
            turns[n] = unit.number < p.pairs && row < p.batch ? __ldcg(unit.turn(p, row)) : make_float2(1.0f, 0.0f);
        }
#pragma unroll 1
        for (uint32 base = 0; base < p.rank; base += INNER) {
            float4 sums[2];
            load_sums<ADDS>(p, first_row, base + first_column, sums);
            Quad low, high;
            low.split<false>(sums[0]), high.split<false>(sums[1]);
#pragma unroll
            for (uint32 tile = 0; tile < TILES; tile++) {
                float whole[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (!SPLITS_EARLY) w[tile].template split<true>(loaded[tile]);
#pragma unroll
                for (uint32 i = 0; i < 4; i += 2) {
                    const float a[4] = {low.whole[i], high.whole[i], low.whole[i + 1], high.whole[i + 1]};
                    const float a_rest[4] = {low.rest[i], high.rest[i], low.rest[i + 1], high.rest[i + 1]};
                    multiply_tf32(whole, a, w[tile].whole[i], w[tile].whole[i + 1]);
                    multiply_tf32(rest, a, w[tile].rest[i], w[tile].rest[i + 1]);
                    multiply_tf32(rest, a_rest, w[tile].whole[i], w[tile].whole[i + 1]);
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
            const uint32 row = thread_row + n * AT_ONCE;
            if (row >= p.batch || !unit.exists) break;
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (uint32 from = 0; from < WARPS; from++) {
                const float2 x = *reinterpret_cast<const float2 *>(&shared.product[from][row - first_row][2 * (threadIdx.x % UNITS)]);
                sum.x += x.x, sum.y += x.y;
            }
            unit.write(p, row, sum.x, sum.y, turns[n]);
        }
        if (first_row + ROWS * p.output_groups < p.batch) __syncthreads();  // all threads have read `shared`
    }
}

extern "C" __global__ void __maxnreg__(OUTPUT_REGISTERS) forecast_outputs_32(const __grid_constant__ ProjectParams p) {
    project_outputs<4, false>(p);
}
extern "C" __global__ void __maxnreg__(OUTPUT_REGISTERS) forecast_outputs_64(const __grid_constant__ ProjectParams p) {
    project_outputs<8, false>(p);
}
extern "C" __global__ void __maxnreg__(OUTPUT_REGISTERS) forecast_outputs_adding(const __grid_constant__ ProjectParams p) {
    project_outputs<4, true>(p);
}
