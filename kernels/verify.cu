// Greedy verification of draft tokens.
//
//   k[i] = first j < len[i] with draft[i, j] ≠ target[i, j] or draft[i, j] < 0, else len[i]
//   accepted[i] = k[i] · next_token[i] = target[i, k[i]] · mismatch[i] = k[i] < len[i] · committed[i, :] = target[i, 0…k], −1, …
//
// Bytes: 2·B·γ tokens in, a few per sequence out; at the sizes of decoding this is one memory round trip, and the launch is the floor.
//
// Cut: a warp takes one tile of tokens. Up to γ = 128 a tile holds whole rows: nothing is shared, no barrier. A longer row is cut into
// tiles that the warps of one CTA take (verify_long).
//
//   request tokens and lengths ─ ballot ─ leader lane: write results ─ row's lanes: write committed
//
// On entry: B < 2^29; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "verify.cuh"

constexpr uint32 THREADS = 128, LONG_THREADS = 256;

template <typename Token, uint32 SLOTS>
__device__ inline void verify_tile(const VerifyParams &p, uint32 tile) {
    TokenTile<Token, SLOTS> tokens;
    tokens.load(p, tile);
    const uint32 length = row_length(p, min(tokens.row, p.batch - 1));
    tokens.compare(p, [&](uint32 row, uint32 k) { write_result<Token>(p, row, min(k, length), length); });
    if (!p.committed) return;
    __syncwarp();
    const uint32 first = tile * p.tile_rows;
    for (uint32 row = first; row < min(first + p.tile_rows, p.batch); ++row)
        write_committed<Token>(p, row, at<int32>(p.accepted, row * p.accepted_seq), threadIdx.x % WARP, WARP);
}

template <typename Token>
__device__ inline void verify(const VerifyParams &p) {
    allow_next_kernel();
    const uint32 tile = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (tile >= p.tiles) return;
    if (p.gamma > WARP)
        verify_tile<Token, TOKEN_SLOTS>(p, tile);
    else
        verify_tile<Token, 1>(p, tile);
}

// CTA i owns sequence i.
template <typename Token>
__device__ inline void verify_long(const VerifyParams &p) {
    allow_next_kernel();
    __shared__ int32 accepted;
    const uint32 row_tiles = 1u << p.log_row_tiles, first = blockIdx.x * row_tiles;
    uint32 tile = threadIdx.x / WARP;
    TokenTile<Token, TOKEN_SLOTS> tokens;
    if (tile < row_tiles) tokens.load(p, first + tile);
    if (threadIdx.x == 0) accepted = row_length(p, blockIdx.x);
    __syncthreads();
    while (tile < row_tiles) {
        tokens.compare(p, [&](uint32, int32 k) { atomicMin(&accepted, k); });
        tile += LONG_THREADS / WARP;
        if (tile < row_tiles) tokens.load(p, first + tile);
    }
    __syncthreads();
    if (threadIdx.x == 0) write_result<Token>(p, blockIdx.x, accepted, row_length(p, blockIdx.x));
    if (p.committed) write_committed<Token>(p, blockIdx.x, accepted, threadIdx.x, LONG_THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS) verify_i32(const __grid_constant__ VerifyParams p) { verify<int32>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) verify_i64(const __grid_constant__ VerifyParams p) { verify<int64>(p); }

extern "C" __global__ void __launch_bounds__(LONG_THREADS) verify_long_i32(const __grid_constant__ VerifyParams p) {
    verify_long<int32>(p);
}
extern "C" __global__ void __launch_bounds__(LONG_THREADS) verify_long_i64(const __grid_constant__ VerifyParams p) {
    verify_long<int64>(p);
}
