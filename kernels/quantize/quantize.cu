// Coding of keys and values in INT4, for many layers at once, and the weights of key channels.
//
//   mean = Σ_t k_t / S as stored · y = H·((k_t − mean) / w) of keys, H·v_t of values · scale = e4m3(max|y| / 7.5)
//   code = 8 + clamp(⌊y / scale⌋, −8, 7) · coded_lens = whole blocks
//   weight = √(σ_c / q̄_c) over the mean of all channels
//
// Bytes: a block's keys twice (the second time from L1 or L2) and its values once; (D + Dv) / 2 + 2 for each token and a mean are written.
//
// Work split: a CTA takes every `slices`th block of one layer, sequence and KV head. In the mean a thread has a channel; then a warp has a
// token.
//
//   find pages ─ mean of the block ─ for each token: load ─ butterflies ─ largest ─ codes and scale, of the key and of the value
//
// Every float32 operation is rounded on its own and in the order of src/ops/quantize/cpu.rs, whose bits these are.
//
// On entry: D and Dv are multiples of 16, at most MOST_CHANNELS (for weights MOST_WEIGHTS); S is at most MOST_TOKENS.
//
// targets: compute_80

#include "quantize/code.cuh"
#include "quantize/params.cuh"

constexpr uint32 THREADS = 128, WARPS = THREADS / WARP;

struct Shared {
    float mean[MOST_CHANNELS], weight[MOST_CHANNELS];
    float row[WARPS][MOST_CHANNELS];
    int64 place[MOST_TOKENS];                 // of a token, for all channels of a key
    int32 page[MOST_TOKENS], coded[MOST_TOKENS];
};

// Sums the keys of a block, and stores their mean; what is subtracted of keys is the mean as it is stored.
__device__ inline void find_mean(const QuantizeParams &p, const LayerData &layer, Shared &s, uint32 seq, uint32 head, uint32 j) {
    const uint32 column = p.mean_rows == 0 ? 0 : j / p.mean_rows, at = p.mean_rows == 0 ? 0 : j % p.mean_rows;
    const bool has_row = p.mean_rows > 0 && column < p.mean_columns;
    const int32 page = has_row ? find_page(p.mean_table, seq, column, p.mean_pages) : -1;
    for (uint32 c = threadIdx.x; c < p.dim; c += THREADS) {
        float mean = 0.0f;
        if (page >= 0) {
            for (uint32 t = 0; t < p.block; t++) mean = __fadd_rn(mean, load_query(layer.k + s.place[t] + c * p.k[3], p.dtype));
            char *const to = layer.means + page * p.means[0] + at * p.means[1] + head * p.means[2] + c * p.means[3];
            mean = __fdiv_rn(mean, float(p.block));
            store_number(to, p.mean_type, mean);
            mean = round_number(mean, p.mean_type);
        }
        s.mean[c] = mean;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) kv_quantize(const __grid_constant__ QuantizeParams p) {
    __shared__ Shared s;
    uint32 rest = blockIdx.x;
    const uint32 slice = rest % p.slices;
    rest /= p.slices;
    const uint32 head = rest % p.heads;
    rest /= p.heads;
    const uint32 seq = rest % p.batch;
    const LayerData &layer = p.layer[rest / p.batch];
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    const Blocks blocks(p, seq);
    if (slice == 0 && head == 0 && rest / p.batch == 0 && threadIdx.x == 0) blocks.store_length(p, seq);
    for (uint32 c = threadIdx.x; c < p.dim; c += THREADS)
        s.weight[c] = weight_of(layer.weights ? as<float>(layer.weights + head * p.weights[0] + c * p.weights[1]) : 1.0f);
    for (uint32 j = blocks.first + slice; j < blocks.last; j += p.slices) {
        __syncthreads();
        bool has_pages = true;
        for (uint32 n = threadIdx.x; n < p.block; n += THREADS) {
            const uint32 t = j * p.block + n;
            s.page[n] = find_page(p.table, seq, t / p.page_size, p.pages);
            s.coded[n] = find_page(p.coded_table, seq, t / p.coded_page_size, p.coded_pages);
            s.place[n] = s.page[n] * p.k[0] + t % p.page_size * p.k[1] + head * p.k[2];
            has_pages &= s.page[n] >= 0 && s.coded[n] >= 0;
        }
        if (!__syncthreads_and(has_pages)) continue;
        find_mean(p, layer, s, seq, head, j);
        __syncthreads();
        for (uint32 n = warp; n < p.block; n += WARPS) {
            const uint32 t = j * p.block + n, at = t % p.page_size, coded_at = t % p.coded_page_size;
            const int64 page = s.page[n], coded = s.coded[n];
            float *const row = s.row[warp];
            for (uint32 c = lane; c < p.dim; c += WARP)
                row[c] = __fdiv_rn(__fsub_rn(load_query(layer.k + s.place[n] + c * p.k[3], p.dtype), s.mean[c]), s.weight[c]);
            code_row(row, p.dim, p.factor, layer.codes_k + coded * p.codes_k[0] + coded_at * p.codes_k[1] + head * p.codes_k[2], p.codes_k[3],
                     layer.k_scale + coded * p.k_scale[0] + coded_at * p.k_scale[1] + head * p.k_scale[2]);
            const char *const value = layer.v + page * p.v[0] + at * p.v[1] + head * p.v[2];
            for (uint32 c = lane; c < p.value_dim; c += WARP) row[c] = load_query(value + c * p.v[3], p.dtype);
            code_row(row, p.value_dim, p.value_factor, layer.codes_v + coded * p.codes_v[0] + coded_at * p.codes_v[1] + head * p.codes_v[2],
                     p.codes_v[3], layer.v_scale + coded * p.v_scale[0] + coded_at * p.v_scale[1] + head * p.v_scale[2]);
        }
    }
}

// A CTA has a KV head, a thread its channels. It runs once for a model, so it is simple.
extern "C" __global__ void __launch_bounds__(THREADS) kv_weights(const __grid_constant__ WeightsParams p) {
    __shared__ float root[MOST_WEIGHTS];
    const uint32 head = blockIdx.x;
    const auto load = [&](const Sample &x, int64 t, uint32 h, uint32 c) {
        return load_query(x.data + t * x.step[0] + h * x.step[1] + c * x.step[2], p.dtype);
    };
    const auto is_defined = [](float x) { return x > 0.0f && x <= 3.402823466e38f; };
    for (uint32 c = threadIdx.x; c < p.dim; c += THREADS) {
        float asked = 0.0f, spread = 0.0f;
        for (uint32 h = head * p.group; h < (head + 1) * p.group && p.q_tokens > 0; h++)
            for (uint32 t = 0; t < p.q_tokens; t++) asked = __fadd_rn(asked, fabsf(load(p.q, t, h, c)));
        for (uint32 first = 0; first < p.k_tokens; first += p.block) {
            const uint32 end = p.k_tokens - first < p.block ? p.k_tokens : first + p.block;
            float mean = 0.0f;
            for (uint32 t = first; t < end; t++) mean = __fadd_rn(mean, load(p.k, t, head, c));
            mean = __fdiv_rn(mean, float(end - first));
            for (uint32 t = first; t < end; t++) {
                const float x = __fsub_rn(load(p.k, t, head, c), mean);
                spread = __fadd_rn(spread, __fmul_rn(x, x));
            }
        }
        root[c] = __fsqrt_rn(__fdiv_rn(__fsqrt_rn(__fdiv_rn(spread, p.tokens)), __fdiv_rn(asked, p.asked)));
    }
    __syncthreads();
    float sum = 0.0f;
    uint32 defined = 0;
    for (uint32 c = 0; c < p.dim; c++)
        if (is_defined(root[c])) {
            sum = __fadd_rn(sum, root[c]);
            defined++;
        }
    const float mean = __fdiv_rn(sum, float(defined));
    for (uint32 c = threadIdx.x; c < p.dim; c += THREADS)
        as<float>(p.weights + head * p.weights_step[0] + c * p.weights_step[1]) = is_defined(root[c]) ? __fdiv_rn(root[c], mean) : 1.0f;
}
