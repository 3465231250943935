// Blocks of a cache that are coded in INT4.
//
//   cache_code    codes the pages of the tails that became whole, to runs of codes beside the tails, and copies these to host memory
//   cache_reopen  the tokens of the block that a sequence goes on with after a fork or a truncation, to its tail: from a tail, or decoded from
//                 host memory; after a fork also the first block, which is never coded
//
// Coding is that of quantize/quantize.cu, to the bit: quantize/code.cuh. Decoding: key = w·(H·y) + mean, value = H·y, y = s·(c − 7.5),
// rounded to the type of keys and values; every float32 operation is rounded on its own, in the order of src/ops/quantize/block.rs.
//
// Bytes: a block's keys are read twice (the second time from L1 or L2) and its values once, its codes are written twice and read once. Work
// split of cache_code: a CTA takes a KV head of a page; in the mean a thread has a channel, then a warp has a token. What cache_reopen takes
// does not matter: calls between steps launch it.
//
// On entry: write-backs of a layer follow each other. D and Dv are multiples of 16, at most MOST_CHANNELS.
//
// targets: compute_80

#include "cache/code_block.cuh"
#include "cache/params.cuh"
#include "cache/units.cuh"

#include "cache/layout.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

// Decodes a block to a run of a tail. All threads of a CTA call it.
__device__ inline void decode_block(const Cache &cache, const Coding &coding, Shared &s, const float *weights, const char *from, char *to) {
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, bytes = element_bytes(coding.dtype);
    for (uint32 c = threadIdx.x; c < coding.dim; c += THREADS) s.mean[c] = load_query(from + coding.mean + c * bytes, coding.dtype);
    __syncthreads();
    float *const row = s.row[warp];
    for (uint32 t = warp; t < cache.size.value; t += WARPS) {
#pragma unroll 1
        for (uint32 part = 0; part < 2; part++) {
            const uint32 dim = part ? coding.value_dim : coding.dim;
            const float factor = part ? coding.value_factor : coding.factor;
            const char *const codes = from + coding.parts[part] + t * (dim / 2);
            const float scale = widen_float8(as<uint8>(from + coding.parts[part + 2] + t), true);
            for (uint32 c = lane; c < dim; c += WARP)
                row[c] = __fmul_rn(__fsub_rn(float(as<uint8>(codes + c / 2) >> c % 2 * 4 & 15), 7.5f), scale);
            butterflies(row, dim);
            for (uint32 c = lane; c < dim; c += WARP) {
                float x = __fmul_rn(row[c], factor);
                if (!part) x = __fadd_rn(__fmul_rn(x, weights[c]), s.mean[c]);
                store_number(to + cache.parts[part] + t * cache.token[part] + c * bytes, coding.dtype, x);
            }
            __syncwarp();
        }
    }
}

KERNEL cache_code(const __grid_constant__ CodeParams p) {
    __shared__ Shared s;
    Clock &clock = *p.layer.clock;
    const uint32 heads = p.cache.heads.value, items = clock.full * heads;
    for (uint32 item = blockIdx.x; item < items; item += gridDim.x) {
        const uint32 n = p.cache.heads.divide(item), g = item - n * heads;
        const Full full = p.layer.full[n];
        const uint32 sequence = full.page / 4, place = full.page % 4;
        char *const codes = p.cache.coded_tail(p.layer, sequence, place, g);
        code_block(p.cache, p.coding, s, p.layer.weights + g * p.coding.dim, p.layer.pool + (uint64(full.page) * heads + g) * p.cache.tail_run, codes);
        copy_units<THREADS>(codes, p.cache.stored(p.layer, full.block, g), p.cache.run, threadIdx.x);
        __syncthreads();
    }
    __syncthreads();  // all threads have read how many pages there are
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&clock.written, 1u) + 1 < gridDim.x) return;
    __threadfence();  // after what the other CTAs did
    clock.full = clock.written = 0;
}

// A CTA for each layer and KV head.
KERNEL cache_reopen(const __grid_constant__ OpenParams p) {
    __shared__ Shared s;
    const ForkParams &fork = p.fork;
    const Cache &cache = fork.cache;
    const uint32 l = cache.heads.divide(blockIdx.x), g = blockIdx.x - l * cache.heads.value;
    const Layer &layer = cache.layers[l];
    const Tail tail = layer.tails[fork.from];
    const int32 n = fork.whole;
    const auto copy_page = [&](uint32 number) {
        copy_units<THREADS>(cache.tail(layer, fork.from, number, g), cache.tail(layer, fork.to, number, g), cache.tail_run, threadIdx.x);
    };
    const bool is_fork = fork.from != fork.to;
    if (is_fork && n > 0 && tail.newest >= 0) copy_page(0);
    if (!fork.is_opened || n > tail.newest) return;
    if (!is_in_tail(cache, tail, n)) {
        decode_block(cache, p.coding, s, layer.weights + g * p.coding.dim, cache.stored(layer, fork.content, g), cache.tail(layer, fork.to, n, g));
    } else if (is_fork) {
        copy_page(n);
    }
}
