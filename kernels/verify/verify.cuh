// Greedy acceptance for a tile of tokens, by one warp. verify.cu and verify_pack.cu include it.
#pragma once

#include "common/types.cuh"

// The number of tokens of a long row that a lane keeps in registers: it requests all of them before it compares the first.
constexpr uint32 TOKEN_SLOTS = 4;

// Mirrored by VerifyParams in src/ops/verify/cuda.rs. Strides are in bytes. Fields are ordered by when they are read: every further 64
// bytes of parameters cost some 60 of the thousand or so cycles of a whole call.
//
// A tile of tokens is the work of one warp. If γ > 32 (a long row) a tile is TOKEN_SLOTS·32 tokens of one row, and the tokens of a lane
// are 32 positions apart. Otherwise a tile is whole rows, each on 2^log_lanes lanes with a token per lane.
template <typename Form>
struct VerifyParams {
    using Stride = typename Form::Stride;
    const char *draft;         // [B, γ]    Token
    const char *target;        // [B, γ+1]  Token
    Stride draft_seq, target_seq;
    Stride draft_pos, target_pos;  // only General reads them
    uint32 batch;
    uint32 gamma;
    uint32 log_lanes;          // ⌈log2 γ⌉, at least 1 and at most 5
    uint32 share;              // verify_pack: rows that each CTA of a cluster verifies
    const char *draft_lens;    // [B] int32, or null: every row is γ long
    char *accepted;            // [B] int32
    char *next_token;          // [B] Token
    char *mismatch;            // [B] int32 or uint8 (mismatch_bytes), or null
    char *committed;           // [B, γ+1] Token, or null
    Stride draft_lens_seq;
    Stride accepted_seq;
    Stride next_token_seq;
    Stride mismatch_seq;
    Stride committed_seq, committed_pos;
    uint32 mismatch_bytes;     // 1 or 4
};
#include "verify/layout.cuh"

template <typename Params>
__device__ inline uint32 clamped(const Params &p, int32 draft_len) {
    return min(max(draft_len, 0), int32(p.gamma));
}

// Token `pos` of a row.
template <typename Token>
__device__ inline const Token &token(const VerifyParams<Common> &, const char *row, uint32 pos, int32) {
    return reinterpret_cast<const Token *>(row)[pos];
}
template <typename Token>
__device__ inline const Token &token(const VerifyParams<General> &, const char *row, uint32 pos, int64 stride) {
    return as<Token>(row + offset(pos, stride));
}

// One lane's share of a tile: SLOTS is TOKEN_SLOTS for a long row, 1 for short ones.
template <typename Token, uint32 SLOTS>
struct TokenTile {
    uint32 row, pos;
    int32 length;  // of the row; clamped only where it is used, so that the load of the tokens does not wait for it
    Token drafts[SLOTS], targets[SLOTS];

    // Loads tile `tile` of a batch: one long row, or several short ones.
    template <typename Params>
    __device__ void load(const Params &p, uint32 tile) {
        const uint32 lane = threadIdx.x % WARP;
        if (SLOTS == 1)
            load(p, (tile << (5 - p.log_lanes)) + (lane >> p.log_lanes), lane & ((1u << p.log_lanes) - 1));
        else
            load(p, tile, lane);
    }
    template <typename Params>
    __device__ void load(const Params &p, uint32 row, uint32 pos) {
        this->row = row;
        this->pos = pos;
        const uint32 read_row = min(row, p.batch - 1);  // tokens of a row past the last are loaded but not used
        const char *draft = p.draft + offset(read_row, p.draft_seq), *target = p.target + offset(read_row, p.target_seq);
#pragma unroll
        for (uint32 u = 0; u < SLOTS; ++u) {
            drafts[u] = targets[u] = 0;
            if (pos + u * WARP < p.gamma) {
                drafts[u] = token<Token>(p, draft, pos + u * WARP, p.draft_pos);
                targets[u] = token<Token>(p, target, pos + u * WARP, p.target_pos);
            }
        }
        const int32 &draft_len = as<int32>(p.draft_lens + offset(read_row, p.draft_lens_seq));
        length = p.gamma;
        if (p.draft_lens) length = draft_len;
    }

    // The position of the tile's first mismatch, or the row's length if it has none; the same in all lanes of a row.
    template <typename Params>
    __device__ uint32 first_mismatch(const Params &p) const {
        const uint32 length = clamped(p, this->length);
        if constexpr (SLOTS == 1) {
            const uint32 lanes = 1u << p.log_lanes, leader = threadIdx.x % WARP & -lanes;
            const uint32 differ = __ballot_sync(FULL_WARP, drafts[0] != targets[0] || drafts[0] < 0) >> leader & FULL_WARP >> (WARP - lanes);
            return differ ? min(__ffs(differ) - 1, length) : length;
        } else {
            uint32 first = length;
#pragma unroll
            for (uint32 u = SLOTS; u-- > 0;)
                if (drafts[u] != targets[u] || drafts[u] < 0) first = min(pos + u * WARP, length);
            return __reduce_min_sync(FULL_WARP, first);
        }
    }
};

// Writes the results of one sequence, by one thread. If this CTA has loaded the row, the target's token comes from L1.
template <typename Token, typename Params>
__device__ inline void write_result(const Params &p, uint32 seq, uint32 k) {
    const Token &next = token<Token>(p, p.target + offset(seq, p.target_seq), k, p.target_pos);
    as<int32>(p.accepted + offset(seq, p.accepted_seq)) = k;
    as<Token>(p.next_token + offset(seq, p.next_token_seq)) = next;
    if (!p.mismatch) return;
    char *mismatch = p.mismatch + offset(seq, p.mismatch_seq);
    const uint32 length = p.draft_lens ? clamped(p, as<int32>(p.draft_lens + offset(seq, p.draft_lens_seq))) : p.gamma;
    if (p.mismatch_bytes == 1) as<uint8>(mismatch) = k < length;
    else as<int32>(mismatch) = k < length;
}

// Writes the committed row of one sequence, by `lanes` lanes, of which this is number `lane`. Accepted draft tokens equal the target's, so
// the committed row is the target's row up to and including k.
template <typename Token, typename Params>
__device__ inline void write_committed(const Params &p, uint32 seq, uint32 k, uint32 lane, uint32 lanes) {
    const char *target = p.target + offset(seq, p.target_seq);
    char *committed = p.committed + offset(seq, p.committed_seq);
    for (uint32 pos = lane; pos <= p.gamma; pos += lanes)
        as<Token>(committed + offset(pos, p.committed_pos)) = pos <= k ? token<Token>(p, target, pos, p.target_pos) : Token(-1);
}
