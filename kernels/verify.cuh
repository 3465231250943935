// Greedy acceptance for a range of sequences, by one CTA. Used by verify.cu and verify_pack.cu.
#pragma once

#include "types.cuh"

// Tokens of a long row that a lane holds at once, so requested before the first is looked at.
constexpr uint32 LOG_TOKEN_SLOTS = 2, TOKEN_SLOTS = 1 << LOG_TOKEN_SLOTS;

// Mirrored by VerifyParams in src/ops/verify/cuda.rs. Strides are in bytes.
//
// A token tile is what one warp looks at. If γ > 32 (a long row) it is TOKEN_SLOTS·32 tokens of one row, those of a lane 32 positions apart.
// Else it is tile_rows whole rows, each on 2^log_lanes lanes, a token each.
struct VerifyParams {
    const char *draft;         // [B, γ]    Token
    const char *target;        // [B, γ+1]  Token
    int64 draft_seq, draft_pos;
    int64 target_seq, target_pos;
    int64 draft_slot, target_slot;  // 32 positions on
    uint32 batch;
    uint32 gamma;
    uint32 tiles;              // of the whole batch
    uint32 log_lanes;          // min(5, ⌈log2 γ⌉)
    uint32 log_row_tiles;      // tiles along a row: γ > 32 alone can have more than one
    uint32 tile_rows;          // rows of a tile
    uint32 mismatch_bytes;     // 1 or 4
    const char *draft_lens;    // [B] int32, or null: every row is γ long
    int64 draft_lens_seq;
    char *accepted;            // [B] int32
    int64 accepted_seq;
    char *next_token;          // [B] Token
    int64 next_token_seq;
    char *mismatch;            // [B] int32 or uint8 (mismatch_bytes), or null
    int64 mismatch_seq;
    char *committed;           // [B, γ+1] Token, or null
    int64 committed_seq, committed_pos;
};

__device__ inline uint32 row_length(const VerifyParams &p, uint32 seq) {
    return p.draft_lens ? min(max(at<int32>(p.draft_lens, seq * p.draft_lens_seq), 0), int32(p.gamma)) : p.gamma;
}

// One lane's share of a token tile: SLOTS is TOKEN_SLOTS where rows may be long, 1 where they are not.
template <typename Token, uint32 SLOTS>
struct TokenTile {
    uint32 row, pos;
    Token guessed[SLOTS], wanted[SLOTS];

    __device__ void load(const VerifyParams &p, uint32 tile) {
        const uint32 lane = threadIdx.x % WARP;
        row = (tile >> p.log_row_tiles) * p.tile_rows + (lane >> p.log_lanes);
        pos = ((tile & ((1u << p.log_row_tiles) - 1)) << (5 + LOG_TOKEN_SLOTS)) + (lane & ((1u << p.log_lanes) - 1));
        const char *draft = p.draft + row * p.draft_seq + pos * p.draft_pos;
        const char *target = p.target + row * p.target_seq + pos * p.target_pos;
#pragma unroll
        for (uint32 u = 0; u < SLOTS; ++u) {
            guessed[u] = wanted[u] = 0;
            if (row < p.batch && pos + u * WARP < p.gamma) {
                guessed[u] = at<Token>(draft, u * p.draft_slot);
                wanted[u] = at<Token>(target, u * p.target_slot);
            }
        }
    }
    // Calls found(row, k) for each row of the tile, by one lane: k is the position of the tile's first mismatch, or γ.
    template <typename Found>
    __device__ void compare(const VerifyParams &p, Found found) const {
        const uint32 lane = threadIdx.x % WARP, lanes = 1u << p.log_lanes, leader = lane & -lanes;
        const uint32 row_lanes = FULL_WARP >> (WARP - lanes) << leader;
        uint32 k = p.gamma;
#pragma unroll
        for (uint32 u = SLOTS; u-- > 0;) {
            const uint32 differ = row_lanes & __ballot_sync(FULL_WARP, guessed[u] != wanted[u] || guessed[u] < 0);
            if (differ) k = pos + u * WARP - lane + __ffs(differ) - 1;
        }
        if (lane == leader && row < p.batch) found(row, k);
    }
};

// accepted[i] = k of every sequence, in shared memory, by one CTA. Between request() and finish() the first tokens travel: time for other
// loads. After finish() every thread may read the result.
template <typename Token>
struct Acceptance {
    static constexpr uint32 TILES = 8 / sizeof(Token);  // of a warp in flight
    const VerifyParams &p;
    TokenTile<Token, TOKEN_SLOTS> held[TILES];

    __device__ void load(uint32 tile) {
        const uint32 warps = blockDim.x / WARP;
#pragma unroll
        for (uint32 t = 0; t < TILES; ++t)
            if (tile + t * warps < p.tiles) held[t].load(p, tile + t * warps);
    }
    __device__ void request() { load(threadIdx.x / WARP); }
    __device__ void finish(int32 *accepted) {
        const uint32 warps = blockDim.x / WARP;
        if (p.log_row_tiles) {
            for (uint32 i = threadIdx.x; i < p.batch; i += blockDim.x) accepted[i] = p.gamma;
            __syncthreads();
        }
        for (uint32 tile = threadIdx.x / WARP; tile < p.tiles;) {
#pragma unroll
            for (uint32 t = 0; t < TILES; ++t)
                if (tile + t * warps < p.tiles) held[t].compare(p, [&](uint32 row, int32 k) {
                    if (p.log_row_tiles) atomicMin(&accepted[row], k);
                    else accepted[row] = k;
                });
            tile += TILES * warps;
            load(tile);
        }
        __syncthreads();
        if (!p.draft_lens) return;
        for (uint32 i = threadIdx.x; i < p.batch; i += blockDim.x) accepted[i] = min(uint32(accepted[i]), row_length(p, i));
        __syncthreads();
    }
};

// The per-sequence results of one sequence, by one thread. The target token was read by this CTA a moment ago: it comes from L1.
template <typename Token>
__device__ inline void write_result(const VerifyParams &p, uint32 seq, uint32 accepted, uint32 length) {
    at<int32>(p.accepted, seq * p.accepted_seq) = accepted;
    at<Token>(p.next_token, seq * p.next_token_seq) = at<Token>(p.target, seq * p.target_seq + accepted * p.target_pos);
    if (p.mismatch) {
        const bool differs = accepted < length;
        if (p.mismatch_bytes == 1)
            at<uint8>(p.mismatch, seq * p.mismatch_seq) = differs;
        else
            at<int32>(p.mismatch, seq * p.mismatch_seq) = differs;
    }
}

// Positions first, first + step, … of the committed row of one sequence. Accepted draft tokens equal the target's, so the row is the
// target's up to and with k.
template <typename Token>
__device__ inline void write_committed(const VerifyParams &p, uint32 seq, uint32 accepted, uint32 first, uint32 step) {
    for (uint32 pos = first; pos <= p.gamma; pos += step)
        at<Token>(p.committed, seq * p.committed_seq + pos * p.committed_pos) =
            pos <= accepted ? at<Token>(p.target, seq * p.target_seq + pos * p.target_pos) : Token(-1);
}
