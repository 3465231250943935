// Greedy verification of draft tokens.
//
//   k[i] = first j < len[i] with draft[i, j] ≠ target[i, j] or draft[i, j] < 0, else len[i]
//   accepted[i] = k[i] · next_token[i] = target[i, k[i]] · mismatch[i] = k[i] < len[i] · committed[i, :] = target[i, 0…k], −1, …
//
// Bytes: 2·B·γ tokens are read, a few numbers per sequence written. At the sizes of decoding this is one memory round trip, and the
// launch is the floor.
//
// Work split: a warp takes one tile of tokens. Up to γ = 128 a tile holds whole rows, so warps share nothing and there is no barrier.
//
// Variants: verify_* for tensors of the common form (types.cuh) up to γ = 128, verify_general_* for other forms up to γ = 128,
// verify_long_* for longer rows, which are split into tiles that the warps of one CTA take.
//
// Phases of a warp: load tokens and lengths ─ find the first mismatch of each row ─ write results
//
// On entry: B < 2^29; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "verify/verify.cuh"

constexpr uint32 THREADS = 128, LONG_THREADS = 256;

template <typename Token, uint32 SLOTS, typename Params>
__device__ inline void verify_tile(const Params &p, uint32 tile) {
    TokenTile<Token, SLOTS> tokens;
    tokens.load(p, tile);
    const uint32 k = tokens.first_mismatch(p);
    if (tokens.row >= p.batch) return;
    if (tokens.pos == 0) write_result<Token>(p, tokens.row, k);
    if (p.committed) write_committed<Token>(p, tokens.row, k, tokens.pos, SLOTS == 1 ? 1u << p.log_lanes : WARP);
}

template <typename Token, typename Params>
__device__ inline void verify(const Params &p) {
    allow_next_kernel();
    const uint32 tile = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (p.gamma > WARP)
        verify_tile<Token, TOKEN_SLOTS>(p, tile);
    else
        verify_tile<Token, 1>(p, tile);
}

// CTA i takes sequence i.
template <typename Token, typename Params>
__device__ inline void verify_long(const Params &p) {
    allow_next_kernel();
    constexpr uint32 TILE = TOKEN_SLOTS * WARP, STEP = LONG_THREADS * TOKEN_SLOTS;
    __shared__ uint32 accepted;
    uint32 pos = threadIdx.x / WARP * TILE + threadIdx.x % WARP;
    TokenTile<Token, TOKEN_SLOTS> tokens;
    tokens.load(p, blockIdx.x, pos);
    if (threadIdx.x == 0) accepted = p.gamma;
    __syncthreads();
    while (true) {
        const uint32 k = tokens.first_mismatch(p);
        if (threadIdx.x % WARP == 0) atomicMin(&accepted, k);
        pos += STEP;
        if (pos - threadIdx.x % WARP >= p.gamma) break;
        tokens.load(p, blockIdx.x, pos);
    }
    __syncthreads();
    if (threadIdx.x == 0) write_result<Token>(p, blockIdx.x, accepted);
    if (p.committed) write_committed<Token>(p, blockIdx.x, accepted, threadIdx.x, LONG_THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS) verify_i32(const __grid_constant__ VerifyParams<Common> p) { verify<int32>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) verify_i64(const __grid_constant__ VerifyParams<Common> p) { verify<int64>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) verify_general_i32(const __grid_constant__ VerifyParams<General> p) {
    verify<int32>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS) verify_general_i64(const __grid_constant__ VerifyParams<General> p) {
    verify<int64>(p);
}
extern "C" __global__ void __launch_bounds__(LONG_THREADS) verify_long_i32(const __grid_constant__ VerifyParams<General> p) {
    verify_long<int32>(p);
}
extern "C" __global__ void __launch_bounds__(LONG_THREADS) verify_long_i64(const __grid_constant__ VerifyParams<General> p) {
    verify_long<int64>(p);
}
