// How well points of a grid would have predicted histories of score rows; docs/predictor.md has the formulas.
//
//   calibrate_targets    of each step and head: c, the best finite score outside the true selection, and the sum of the weights max(s − c, 0)
//   calibrate_rate       a point's Holt predictor along a history of a head: the sum of the shares that its lists hit
//
// Bytes: 4 for each score and 4 for each score and point, and 16 for each score and point of the states, which the cache mostly holds.
// A top-k for each step and head, and one for each of their points, take the time.
//
// Work split: calibrate_targets has a CTA for each (history, step, KV head). calibrate_rate has one for each (point, history, KV head), which
// goes through the steps one after the other: its predictor needs them in that order.
//
// Weights are whole numbers, so that their sums have the bits of the CPU's in any order.
//
// targets: compute_80

#include "predictor/params.cuh"

constexpr uint32 CALIBRATE_WARPS = CALIBRATE_THREADS / WARP;
// The exponents, with their bias, of the largest weight and of the unit add up to this where one weight takes 63 bits.
constexpr uint64 UNIT_EXPONENT = 2108;

using Digits = ClusterTopKShared<CALIBRATE_THREADS>;

// The blocks of one step of a history and head. Those from `init` to `end` are not forced.
struct Step {
    const CalibrateParams &p;
    const char *row;
    uint32 n, init, end;

    __device__ Step(const CalibrateParams &p, uint32 history, uint32 t, uint32 head)
        : p(p), row(p.scores + history * p.scores_history + t * p.scores_step + head * p.scores_head),
          n(min(uint32(max(as<int32>(p.counts + history * p.counts_history + t * p.counts_step), 0)), p.blocks)), init(min(p.init, n)),
          end(n - min(p.local, n - init)) {}

    __device__ uint32 candidates() const { return end - init; }
    // How many blocks that are not forced a selection of k takes.
    __device__ uint32 wanted(uint32 k) const {
        const uint32 forced = n - candidates();
        return min(k - min(k, forced), candidates());
    }
    __device__ float score(uint32 j) const { return as<float>(row + j * p.scores_block); }
};

// The largest of a value of each thread. Leaves `of` in use until the next barrier.
__device__ inline uint32 cta_max(uint32 value, uint32 (&of)[CALIBRATE_WARPS]) {
    value = __reduce_max_sync(FULL_WARP, value);
    if (threadIdx.x % WARP == 0) of[threadIdx.x / WARP] = value;
    __syncthreads();
    return __reduce_max_sync(FULL_WARP, of[threadIdx.x % WARP % CALIBRATE_WARPS]);
}

// The sum of a value of each thread, for thread 0. Leaves `of` in use until the next barrier.
__device__ inline uint64 cta_sum(uint64 value, uint64 (&of)[CALIBRATE_WARPS]) {
#pragma unroll
    for (uint32 step = WARP / 2; step > 0; step /= 2) value += __shfl_down_sync(FULL_WARP, value, step);
    if (threadIdx.x % WARP == 0) of[threadIdx.x / WARP] = value;
    __syncthreads();
    uint64 sum = 0;
    if (threadIdx.x == 0)
        for (uint32 warp = 0; warp < CALIBRATE_WARPS; warp++) sum += of[warp];
    return sum;
}

// A power of two: that many times the weights of up to `candidates` blocks, `most` at most, add up to 2^63 at most.
__device__ inline double unit(double most, uint32 candidates) {
    const uint64 exponent = uint64(__double_as_longlong(most)) >> 52;
    const uint32 bits = candidates > 1 ? 32 - __clz(candidates - 1) : 0;
    return __longlong_as_double(int64((UNIT_EXPONENT - bits - exponent) << 52));
}

// A score's weight in units; 0 for one that does not exceed c or is not finite.
__device__ inline uint64 weight(const Target &target, float score) {
    if (!(score > target.best_left_out) || !is_finite(score)) return 0;
    return uint64(__dmul_rn(__dsub_rn(double(score), double(target.best_left_out)), target.unit));
}

extern "C" __global__ void __launch_bounds__(CALIBRATE_THREADS) calibrate_targets(const __grid_constant__ CalibrateParams p) {
    __shared__ Digits shared;
    __shared__ uint32 left_out[CALIBRATE_WARPS], highest[CALIBRATE_WARPS];
    __shared__ uint64 sums[CALIBRATE_WARPS];
    const uint32 head = blockIdx.x % p.heads, row = blockIdx.x / p.heads, t = row % p.steps;
    const Step step(p, row / p.steps, t, head);
    const uint32 wanted = step.wanted(p.k), candidates = step.candidates();
    Target target = {0.0, 0, 0.0f, 0};
    // A history's first step predicts nothing, and a selection of all or none says nothing.
    if (t > 0 && wanted > 0 && wanted < candidates) {
        open(shared);
        const auto quads = [&](uint32 i, uint32 last, uint32 (&x)[QUADS][4]) {
#pragma unroll
            for (uint32 q = 0; q < QUADS; q++)
#pragma unroll
                for (uint32 m = 0; m < 4; m++) {
                    const uint32 key = i + q * STEP + m;
                    x[q][m] = key < last ? sort_key(step.score(step.init + key)) : 0;
                }
        };
        ClusterTopK<CALIBRATE_THREADS, decltype(quads)> top(shared, nullptr, 0, candidates, quads);
        top.find_threshold(wanted, DIGITS);
        // Where not all keys at the threshold are selected, the threshold is left out, too.
        const bool ties_are_left = top.ties < shared.count;
        uint32 most_left = 0, most = 0;
        for (uint32 j = step.init + threadIdx.x; j < step.end; j += CALIBRATE_THREADS) {
            const float score = step.score(j);
            if (!is_finite(score)) continue;
            const uint32 key = sort_key(score), upper = key >> top.shift;
            most = max(most, key);
            if (upper < top.prefix || (upper == top.prefix && ties_are_left)) most_left = max(most_left, key);
        }
        most_left = cta_max(most_left, left_out), most = cta_max(most, highest);
        // No finite score has key 0.
        if (most_left != 0 && most > most_left) {
            target.best_left_out = score_of(most_left);
            target.unit = unit(__dsub_rn(double(score_of(most)), double(target.best_left_out)), candidates);
            uint64 sum = 0;
            for (uint32 j = step.init + threadIdx.x; j < step.end; j += CALIBRATE_THREADS) sum += weight(target, step.score(j));
            target.total = cta_sum(sum, sums);
        }
    }
    if (threadIdx.x == 0) p.targets[blockIdx.x] = target;
}

extern "C" __global__ void __launch_bounds__(CALIBRATE_THREADS) calibrate_rate(const __grid_constant__ CalibrateParams p) {
    __shared__ Digits shared;
    __shared__ uint64 sums[CALIBRATE_WARPS];
    __shared__ Rating rating;
    const uint32 run = blockIdx.x % p.runs, head = run % p.heads, history = run / p.heads;
    const Holt holt = p.grid[blockIdx.x / p.runs];
    const float keep = __fsub_rn(1.0f, holt.alpha), follow = __fsub_rn(1.0f, holt.beta);
    float *const level = p.states + 2 * uint64(blockIdx.x) * p.row, *const trend = level + p.row;
    // A block is updated by one thread, always the same; the top-k reads the blocks of all threads.
    for (uint32 j = threadIdx.x; j < p.row; j += CALIBRATE_THREADS) level[j] = minus_infinity(), trend[j] = 0.0f;
    if (threadIdx.x == 0) rating = {0.0, 0};
#pragma unroll 1
    for (uint32 t = 0; t < p.steps; t++) {
        const Step step(p, history, t, head);
        const Target target = p.targets[(uint64(history) * p.steps + t) * p.heads + head];
        if (target.total > 0) {
            open(shared);  // with a barrier behind it: the last step's updates are there
            const uint32 wanted = step.wanted(p.predicted), first = step.init & ~3u;
            const auto quads = [&](uint32 i, uint32 last, uint32 (&x)[QUADS][4]) {
                const uint32 before = step.init - first;
#pragma unroll
                for (uint32 q = 0; q < QUADS; q++) {
                    const uint32 key = i + q * STEP;
                    float4 levels, trends;
                    if (key < last) levels = *reinterpret_cast<float4 *>(level + first + key), trends = *reinterpret_cast<float4 *>(trend + first + key);
                    const float scores[4] = {forecast(levels.x, trends.x, holt.gamma), forecast(levels.y, trends.y, holt.gamma),
                                             forecast(levels.z, trends.z, holt.gamma), forecast(levels.w, trends.w, holt.gamma)};
#pragma unroll
                    for (uint32 m = 0; m < 4; m++) x[q][m] = key + m - before < last - before ? sort_key(scores[m]) : 0;
                }
            };
            uint64 hit = 0;
            if (wanted > 0) {
                ClusterTopK<CALIBRATE_THREADS, decltype(quads)> top(shared, nullptr, 0, step.end - first, quads);
                top.find_threshold(wanted, DIGITS);
                // The first `ties` of the blocks at the threshold are taken, which are all but where more share it.
                const bool shares = wanted < top.count && top.ties < shared.count;
                const auto key_of = [&](uint32 j) { return sort_key(forecast(level[j], trend[j], holt.gamma)); };
                for (uint32 j = step.init + threadIdx.x; j < step.end; j += CALIBRATE_THREADS) {
                    const uint32 upper = key_of(j) >> top.shift;
                    if (upper > top.prefix || (upper == top.prefix && !shares)) hit += weight(target, step.score(j));
                }
                if (shares && threadIdx.x < WARP) {
                    uint32 left = top.ties;
                    for (uint32 begin = step.init; begin < step.end && left > 0; begin += WARP) {
                        const uint32 j = begin + threadIdx.x;
                        const bool is_equal = j < step.end && key_of(j) == top.prefix;
                        const uint32 equal = __ballot_sync(FULL_WARP, is_equal);
                        if (is_equal && __popc(equal & ((1u << threadIdx.x) - 1)) < left) hit += weight(target, step.score(j));
                        left -= min(left, uint32(__popc(equal)));
                    }
                }
            }
            hit = cta_sum(hit, sums);
            if (threadIdx.x == 0) rating.hits = __dadd_rn(rating.hits, __ddiv_rn(double(hit), double(target.total))), rating.steps++;
        }
        for (uint32 j = threadIdx.x; j < step.n; j += CALIBRATE_THREADS) smooth(level[j], trend[j], step.score(j), holt.alpha, keep, holt.beta, follow);
        __syncthreads();
    }
    if (threadIdx.x == 0) p.ratings[blockIdx.x] = rating;
}
