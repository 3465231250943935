// The device's tables of sequences: their blocks, their tails, and the slots of dropped blocks. Calls between steps launch these kernels, whose
// time does not matter; a step of a decoder launches cache_rows once.
//
// targets: compute_80

#include "cache/params.cuh"

#include "cache/layout.cuh"

constexpr uint32 THREADS = 256;

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

// Writes the blocks of a sequence and their number, and empties the tails of a sequence that begins. One CTA.
KERNEL cache_table(const __grid_constant__ TableParams p, const __grid_constant__ Blocks blocks) {
    int32 *row = p.cache.table + uint64(p.sequence) * p.cache.max_blocks + p.first;
    for (uint32 n = threadIdx.x; n < blocks.count; n += THREADS) row[n] = blocks.of[n];
    if (threadIdx.x == 0) p.cache.lens[p.sequence] = p.len;
    for (uint32 l = threadIdx.x; p.begins && l < p.cache.layer_count; l += THREADS) p.cache.layers[l].tails[p.sequence] = {-1, 0, 0, 0};
}

// Copies the first tokens of a partial block to the tail of the sequence that continues it. A CTA for each layer and KV head.
KERNEL cache_open(const __grid_constant__ ForkParams p) {
    const uint32 l = p.cache.heads.divide(blockIdx.x), g = blockIdx.x - l * p.cache.heads.value;
    const Layer &layer = p.cache.layers[l];
    const Tail tail = layer.tails[p.from];
    const int32 n = p.whole;
    if (n > tail.newest || (holds(tail, n) && p.from == p.to)) return;
    const char *source = holds(tail, n) ? p.cache.tail(layer, p.from, n, g) : p.cache.stored(layer, p.content, g);
    const uint4 *from = reinterpret_cast<const uint4 *>(source);
    uint4 *to = reinterpret_cast<uint4 *>(p.cache.tail(layer, p.to, n, g));
    for (uint64 u = threadIdx.x; u < p.cache.run / 16; u += THREADS) to[u] = from[u];
}

// Writes the table and the tails of a sequence that was forked, and the tails of its parent. One CTA.
KERNEL cache_fork(const __grid_constant__ ForkParams p) {
    const int32 *from = p.cache.table + uint64(p.from) * p.cache.max_blocks;
    int32 *to = p.cache.table + uint64(p.to) * p.cache.max_blocks;
    for (uint32 n = threadIdx.x; n < p.whole; n += THREADS) to[n] = from[n];
    const int32 whole = p.whole;
    for (uint32 l = threadIdx.x; l < p.cache.layer_count; l += THREADS) {
        Tail *tails = p.cache.layers[l].tails;
        const Tail tail = tails[p.from];
        // The parent does not write to shared blocks any more.
        tails[p.from].first = max(tail.first, whole);
        tails[p.to] = {p.is_opened && whole <= tail.newest ? whole : min(tail.newest, whole - 1), whole, min(tail.tokens, int32(p.tokens)), 0};
    }
}

// Moves the tails of a truncated sequence. One CTA.
KERNEL cache_truncate(const __grid_constant__ ForkParams p) {
    const int32 whole = p.whole;
    for (uint32 l = threadIdx.x; l < p.cache.layer_count; l += THREADS) {
        Tail &tail = p.cache.layers[l].tails[p.to];
        tail.tokens = min(tail.tokens, int32(p.tokens));
        if (tail.newest >= whole) tail = {p.is_opened ? whole : whole - 1, whole, tail.tokens, 0};
    }
}

// Frees the slots of dropped blocks: they are the first to be given away.
KERNEL cache_drop(const __grid_constant__ Cache cache, const __grid_constant__ Blocks blocks) {
    const uint32 heads = cache.heads.value, of_layer = blocks.count * heads;
    const uint64 all = uint64(of_layer) * cache.layer_count;
    for (uint64 n = uint64(blockIdx.x) * THREADS + threadIdx.x; n < all; n += uint64(gridDim.x) * THREADS) {
        const uint32 l = n / of_layer, rest = n - uint64(l) * of_layer, b = cache.heads.divide(rest), g = rest - b * heads;
        const Layer &layer = cache.layers[l];
        const Home home = unpack(atomicExch(layer.homes + blocks.of[b] * heads + g, NO_HOME));
        if (home.slot >= CLAIMED) continue;
        layer.holds[home.slot] = home.is_resident() ? NO_HOME : DROPPED;
        layer.named[home.slot] &= ~CHANCE;
    }
}

// Writes the blocks and the tail pages of the sequence of each row of a step. A CTA for each row.
KERNEL cache_rows(const __grid_constant__ RowParams p) {
    const uint32 i = blockIdx.x, sequence = as<uint32>(p.sequences + i * p.sequences_seq);
    const bool exists = sequence < p.cache.max_sequences;
    const int32 len = exists ? p.cache.lens[sequence] : 0;
    const int32 *row = p.cache.table + uint64(exists ? sequence : 0) * p.cache.max_blocks;
    const uint64 to = uint64(i) * p.cache.max_blocks;
    __shared__ int32 first;
    if (threadIdx.x == 0) first = 0;
    __syncthreads();
    for (uint32 l = threadIdx.x; exists && l < p.cache.layer_count; l += THREADS) {
        const Tail tail = p.cache.layers[l].tails[sequence];
        atomicMax(&first, max(tail.first, tail.newest - 1));
    }
    __syncthreads();
    if (threadIdx.x == 0) p.floors[i] = min(uint64(first) * p.cache.size.value, uint64(0x7fffffff));
    for (uint32 n = threadIdx.x; n < p.cache.max_blocks; n += THREADS) {
        const bool is_block = int32(n) < len;
        p.blocks[to + n] = is_block ? row[n] : -1;
        p.tails[to + n] = is_block ? int32(p.cache.tail_page(sequence, n)) : -1;
    }
}
