// Compaction: the tokens of accepted tree nodes move to where a sequence's tokens follow each other, in the tails of all layers.
//
//   token base + path[j] → token base + j for j = 0, 1, …, as long as path ascends; then the sequence ends
//
// path[j] ≥ j, and both tokens lie in the tail's last two blocks. A block that is whole then, and has tokens that moved, is copied to host
// memory, coded where blocks are; it was written there when other nodes filled it.
//
// Bytes: 2 · (keys, values and scales of a token) for each token that moves; once in S tokens a run, twice. Most calls move a few tokens.
//
// Work split: a CTA for each layer, row and KV head. All find the length of the path and the first node that moves; a thread has 4 bytes of all
// tokens and takes the tokens in ascending order, up to AT_ONCE of them read before the first is written, so that no token is written before it
// is read. The last CTA of a row ends its sequence.
//
// On entry: sequences are distinct; no write-back is under way.
//
// targets: compute_80

#include "cache/code_block.cuh"
#include "cache/params.cuh"
#include "cache/units.cuh"

#include "cache/layout.cuh"

constexpr uint32 AT_ONCE = 4;

extern "C" __global__ void __launch_bounds__(THREADS) cache_compact(const __grid_constant__ CompactPathsParams p) {
    __shared__ Shared codes_of;
    __shared__ uint32 valid, in_place;
    const Cache &cache = p.cache;
    const uint32 cell = cache.heads.divide(blockIdx.x), g = blockIdx.x - cell * cache.heads.value;
    const uint32 l = p.batch.divide(cell), i = cell - l * p.batch.value;
    const uint32 sequence = as<uint32>(p.sequences + i * p.sequences_seq);
    if (sequence >= cache.max_sequences || cache.lens[sequence] < 0) return;
    const Layer &layer = cache.layers[l];
    const Tail tail = layer.tails[sequence];
    const char *const base_at = p.bases + i * p.bases_seq;
    const int64 base = p.base_bytes == 8 ? as<int64>(base_at) : as<int32>(base_at);
    const int64 in_tail = int64(max(tail.first, tail.newest - 1)) * cache.size.value;
    if (base < in_tail || base >= tail.tokens) return;

    // The path ascends, so that its place j is below what is left of the tokens.
    const int32 left = tail.tokens - int32(base), last = p.accepted ? as<int32>(p.accepted + i * p.accepted_seq) : 0x7fffffff;
    const uint32 most = min(p.places, uint32(left));
    const auto node = [&](uint32 j) { return as<int32>(p.path + i * p.path_seq + j * p.path_place); };
    if (threadIdx.x == 0) valid = in_place = most;
    __syncthreads();
    for (uint32 j = threadIdx.x; j < most; j += THREADS) {
        const int32 n = node(j), before = j ? node(j - 1) : -1;
        if (n <= before || n >= left || int32(j) > last) atomicMin(&valid, j);
        else if (n != int32(j)) atomicMin(&in_place, j);
    }
    __syncthreads();
    const uint32 len = valid, moved = min(in_place, len), begin = base;
    if (len == 0) return;

    const auto run_of = [&](uint32 token, uint32 &within) {
        const uint32 n = cache.size.divide(token);
        within = token - n * cache.size.value;
        return cache.tail(layer, sequence, n, g);
    };
    uint32 words = 0;
    for (uint32 part = 0; part < 4; ++part) words += cache.token[part] / 4;
    for (uint32 w = threadIdx.x; moved < len && w < words; w += THREADS) {
        uint32 part = 0, at = w;
        for (; at >= cache.token[part] / 4; ++part) at -= cache.token[part] / 4;
        const uint32 bytes = cache.token[part], offset = cache.parts[part] + 4 * at;
        const auto place = [&](uint32 token) -> uint32 & {
            uint32 within;
            char *const run = run_of(token, within);
            return as<uint32>(run + offset + uint64(within) * bytes);
        };
        for (uint32 j = moved; j < len; j += AT_ONCE) {
            uint32 values[AT_ONCE];
#pragma unroll
            for (uint32 k = 0; k < AT_ONCE; ++k)
                if (j + k < len) values[k] = place(begin + node(j + k));
#pragma unroll
            for (uint32 k = 0; k < AT_ONCE; ++k)
                if (j + k < len) place(begin + j + k) = values[k];
        }
    }
    __syncthreads();

    const uint32 past = cache.size.divide(begin + len);
    uint32 first = cache.size.divide(begin + moved);
    first += first < past && cache.is_first(first);
    const int32 *const blocks = cache.table + uint64(sequence) * cache.max_blocks;
    for (uint32 n = first; n < past; ++n) {
        const char *whole = cache.tail(layer, sequence, n, g);
        if (cache.is_coded) {
            char *const codes = cache.coded_tail(layer, sequence, n, g);
            code_block(cache, p.coding, codes_of, layer.weights + g * p.coding.dim, whole, codes);
            whole = codes;
        }
        copy_units<THREADS>(whole, cache.stored(layer, blocks[n], g), cache.run, threadIdx.x);
        __syncthreads();
    }
    if (threadIdx.x) return;
    __threadfence();  // the last one writes the tail, which all have read
    if (cache.heads.value > 1 && atomicAdd(layer.arrived + i, 1u) + 1 < cache.heads.value) return;
    layer.arrived[i] = 0;
    layer.tails[sequence].tokens = begin + len;
    if (first < past) atomicAdd(&layer.clock->totals.written, uint64(past - first) * cache.heads.value * cache.run);
}
