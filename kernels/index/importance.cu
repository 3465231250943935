// The channels that decide the scores of each KV head.
//
//   importance[g, c] = Σ_h max_t |q[t, h, c]| / G · max_t |k[t, g, c]|, h over the heads of g in their order · the r largest, ascending
//   weights[g, c] = Σ_h Σ_t |q[t, h, c]| / (G·T) · centre[g, c] = Σ_t k[t, g, c] / T, NaN as 0
//
// Bytes: the samples, once. The kernel runs once for a model or a prompt, so it is simple: one CTA for each KV head.
//
// On entry: D ≤ MOST_CHANNELS.
//
// targets: compute_80

#include "common/topk.cuh"
#include "index/params.cuh"

constexpr uint32 MOST_CHANNELS = 576;

// peak[c] = max_t |x[t, head, c]|, as bits, which sort as numbers of one sign do. NaN is ignored.
__device__ inline void find_peaks(const Sample &x, uint32 head, uint32 dim, uint32 dtype, uint32 *peak) {
    for (uint32 c = threadIdx.x; c < dim; c += TOPK_THREADS) peak[c] = 0;
    __syncthreads();
    const uint32 together = max(TOPK_THREADS / dim, 1u);  // tokens that the CTA looks at side by side
    for (uint32 n = threadIdx.x; n < together * dim; n += TOPK_THREADS) {
        const uint32 c = n % dim;
        float largest = 0.0f;
        for (uint32 t = n / dim; t < x.tokens; t += together) {
            const float value = fabsf(load_query(x.data + t * x.token + head * x.head + c * x.channel, dtype));
            largest = value > largest ? value : largest;
        }
        atomicMax(&peak[c], __float_as_uint(largest));
    }
    __syncthreads();
}

// sum[c] += Σ_t of x[t, head, c], or of its absolute value. Of the `together` threads of a channel, thread t mod `together` adds token t; their
// sums are added in order.
__device__ inline void add_up(const Sample &x, uint32 head, uint32 dim, uint32 dtype, bool absolute, float *part, float *sum) {
    const uint32 together = max(TOPK_THREADS / dim, 1u);
    for (uint32 n = threadIdx.x; n < together * dim; n += TOPK_THREADS) {
        const uint32 c = n % dim;
        float all = 0.0f;
        for (uint32 t = n / dim; t < x.tokens; t += together) {
            const float value = load_query(x.data + t * x.token + head * x.head + c * x.channel, dtype);
            all += value == value ? absolute ? fabsf(value) : value : 0.0f;
        }
        part[n] = all;
    }
    __syncthreads();
    for (uint32 c = threadIdx.x; c < dim; c += TOPK_THREADS)
        for (uint32 n = 0; n < together; n++) sum[c] += part[n * dim + c];
    __syncthreads();
}

// Writes the mean over tokens and heads first … last − 1; without tokens it is 0.
__device__ inline void write_means(const ImportanceParams &p, const Sample &x, uint32 first, uint32 last, bool absolute, float *part, float *sum, char *to,
                                   int64 to_channel) {
    for (uint32 c = threadIdx.x; c < p.dim; c += TOPK_THREADS) sum[c] = 0.0f;
    __syncthreads();
    for (uint32 h = first; h < last; h++) add_up(x, h, p.dim, p.dtype, absolute, part, sum);
    const uint64 count = uint64(last - first) * x.tokens;
    for (uint32 c = threadIdx.x; c < p.dim; c += TOPK_THREADS) as<float>(to + c * to_channel) = count == 0 ? 0.0f : sum[c] / float(count);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(TOPK_THREADS) index_importance(const __grid_constant__ ImportanceParams p) {
    __shared__ uint32 peak[MOST_CHANNELS];
    __shared__ float importance[MOST_CHANNELS];
    __shared__ TopKShared shared;
    __shared__ float part[MOST_CHANNELS];
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 g = blockIdx.x;
    if (p.weights) write_means(p, p.q, g * p.group, (g + 1) * p.group, true, part, importance, p.weights + g * p.weights_head, p.weights_channel);
    if (p.centre) write_means(p, p.k, g, g + 1, false, part, importance, p.centre + g * p.centre_head, p.centre_channel);
    if (!p.channels && !p.importance) return;
    for (uint32 c = threadIdx.x; c < p.dim; c += TOPK_THREADS) importance[c] = 0.0f;
    for (uint32 h = g * p.group; h < (g + 1) * p.group; h++) {
        find_peaks(p.q, h, p.dim, p.dtype, peak);
        for (uint32 c = threadIdx.x; c < p.dim; c += TOPK_THREADS) importance[c] += __uint_as_float(peak[c]);
        __syncthreads();
    }
    find_peaks(p.k, g, p.dim, p.dtype, peak);
    for (uint32 c = threadIdx.x; c < p.dim; c += TOPK_THREADS) {
        importance[c] = importance[c] / float(p.group) * __uint_as_float(peak[c]);
        if (p.importance) as<float>(p.importance + g * p.importance_head + c * p.importance_channel) = importance[c];
    }
    __syncthreads();
    if (!p.channels) return;
    for (uint32 c = threadIdx.x; c < p.dim; c += TOPK_THREADS)
        if (importance[c] != importance[c]) importance[c] = minus_infinity();
    __syncthreads();
    const SharedScores scores = {importance, p.dim};
    TopK<SharedScores> top(shared, scores, p.dim);
    top.take(top.find_threshold(p.kept), [&](uint32 place, uint32 c) { as<int32>(p.channels + g * p.channels_head + place * p.channels_place) = c; });
}
