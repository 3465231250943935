// Blocks of a cache that are coded in INT4.
//
//   cache_code            codes the pages of the tails that became whole, to runs of codes beside the tails, and copies these to host memory
//   cache_fetch_decoded   brings missed runs from host memory to their slots, where slots hold what codes stand for
//   cache_reopen          the tokens of the block that a sequence goes on with after a fork or a truncation, to its tail: from a tail, or decoded
//                         from host memory; after a fork also the first block, which is never coded
//
// Coding is that of quantize/quantize.cu, to the bit: quantize/code.cuh. Decoding: cache/decode.cuh.
//
// Bytes: a block's keys are read twice (the second time from L1 or L2) and its values once, its codes are written twice and read once. Work
// split of cache_code: a CTA takes a KV head of a page; in the mean a thread has a channel, then a warp has a token. What cache_reopen takes
// does not matter: calls between steps launch it.
//
// cache_fetch_decoded: each run of codes crosses the bus once, which is the floor, and four times its bytes are written to the device's memory. A CTA
// takes a run, and the next one travels to its other stage meanwhile. At 128 channels and blocks of 64 tokens a run has 16,384 numbers; some 250
// instructions of a warp make 512 of them, 8,000 a run: where a multiprocessor issues two or three a cycle, a bus of 50 GB/s brings ten runs
// meanwhile.
//
//   stage a   run n ─ decode ─ mark   run n + 2 travels …
//   stage b   run n + 1 travels ………   decode ─ mark
//
// On entry: write-backs of a layer follow each other. D and Dv are multiples of 16, at most MOST_CHANNELS.
//
// targets: compute_80

#include "cache/code_block.cuh"
#include "cache/decode.cuh"
#include "cache/due.cuh"
#include "cache/params.cuh"
#include "cache/units.cuh"
#include "cache/written.cuh"
#include "common/barrier.cuh"
#include "common/copies.cuh"

#include "cache/layout.cuh"

constexpr uint32 DECODE_THREADS = 256;

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

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
    end_coding(clock);
}

// Few CTAs, so that kernels on other streams have the rest of the device. Its dynamic shared memory has two stages of a run.
extern "C" __global__ void __launch_bounds__(DECODE_THREADS) cache_fetch_decoded(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) char stages[];
    const Layer &layer = p.fetch.layer;
    const Cache &cache = p.fetch.cache;
    if (!may_be_due(p.fetch)) return;
    const uint32 due = find_due<DECODE_THREADS>(p.fetch), bytes = cache.run;
    const auto request = [&](uint32 n, uint32 stage) {
        if (n < due) {
            const char *const source = layer.host + load(layer.to_copy + n).host_run * cache.run;
            const uint32 to = shared_address(stages) + stage * bytes;
            for (uint32 at = threadIdx.x * 16; at < bytes; at += DECODE_THREADS * 16) copy_16(to + at, source + at);
        }
        end_copies();
    };
    request(blockIdx.x, 0);
    uint32 stage = 0;
    for (uint32 n = blockIdx.x; n < due; n += gridDim.x, stage ^= 1) {
        request(n + gridDim.x, stage ^ 1);
        const ToCopy copy = load(layer.to_copy + n);
        const uint32 g = copy.host_run - cache.heads.divide(copy.host_run) * cache.heads.value;
        wait_copies<1>();
        __syncthreads();
        decode_run<DECODE_THREADS>(cache, p.coding, layer.weights + g * p.coding.dim, stages + stage * bytes, cache.slot(layer, copy.slot));
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) mark(layer, copy);
    }
    wait_copies<0>();
    end_fetch(p.fetch, due);
}

// A CTA for each layer and KV head.
KERNEL cache_reopen(const __grid_constant__ OpenParams p) {
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
        decode_run<THREADS>(cache, p.coding, layer.weights + g * p.coding.dim, cache.stored(layer, fork.content, g), cache.tail(layer, fork.to, n, g));
    } else if (is_fork) {
        copy_page(n);
    }
}
