// Greedy verification of draft tokens.
//
//   k[i] = first j < len[i] with draft[i, j] ≠ target[i, j] or draft[i, j] < 0, else len[i]
//   accepted[i] = k[i] · next_token[i] = target[i, k[i]] · mismatch[i] = k[i] < len[i] · committed[i, :] = target[i, 0…k], −1, …
//
// end.cuh cuts what is committed at a stop token and a length; where that drops the next token, it is −1 and no draft token was refused.
//
// Bytes: 2·B·γ tokens are read, a few numbers per sequence written. At the sizes of decoding this is one memory round trip, and the
// launch is the floor. A cut adds S stop tokens and three numbers per sequence, requested together with the tokens. A dependent launch brings all
// that into the L2 cache before it waits for the kernel before it.
//
// Work split: a warp takes one tile of tokens. Up to γ = 128 a tile holds whole rows, so warps share nothing and there is no barrier.
//
// Variants: verify_* for tensors of the common form (types.cuh) up to γ = 128, verify_general_* for other forms up to γ = 128,
// verify_long_* for longer rows, which are split into tiles that the warps of one CTA take. With an end verify_end_* is verify_*; verify_rows_*
// takes all else, and drafts that lie one after the other: a warp for each row, 128 positions at a time.
//
// Phases of a warp: prefetch ─ wait for the kernel before ─ load tokens and lengths ─ find the first mismatch of each row ─ write results
//
// On entry: B < 2^29; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "verify/verify.cuh"

constexpr uint32 THREADS = 128, LONG_THREADS = 256;

template <typename Token, uint32 SLOTS, typename Params, typename Ends>
__device__ inline void verify_tile(const Params &p, const Ends &ends, uint32 tile) {
    TokenTile<Token, SLOTS> tokens;
    TileEnd<Token, SLOTS, Ends> end;
    tokens.place(p, tile);
    end.place(p, ends, tokens.row);
    tokens.prefetch(p);
    if (tokens.pos == 0) end.prefetch(ends, tokens.row);
    tokens.know();
    end.know();
    wait_for_previous_kernel();
    end.load(ends);
    tokens.load(p);
    const Cut cut = end.cut(p, ends, tokens);
    if (tokens.row >= p.batch) return;
    const PaddedRow<Token, Params> row(p, tokens.row);
    if (tokens.pos == 0) write_result<Token>(p, ends, row, cut);
    if (p.committed) write_committed<Token>(p, row, cut, tokens.pos, SLOTS == 1 ? 1u << p.log_lanes : WARP);
}

template <typename Token, typename Params, typename Ends = NoEnd>
__device__ inline void verify(const Params &p, const Ends &ends = {}) {
    allow_next_kernel();
    const uint32 tile = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (p.gamma > WARP)
        verify_tile<Token, TOKEN_SLOTS>(p, ends, tile);
    else
        verify_tile<Token, 1>(p, ends, tile);
}

// CTA i takes sequence i.
template <typename Token, typename Params>
__device__ inline void verify_long(const Params &p) {
    allow_next_kernel();
    constexpr uint32 TILE = TOKEN_SLOTS * WARP, STEP = LONG_THREADS * TOKEN_SLOTS;
    __shared__ uint32 accepted;
    uint32 pos = threadIdx.x / WARP * TILE + threadIdx.x % WARP;
    TokenTile<Token, TOKEN_SLOTS> tokens;
    tokens.place(p, blockIdx.x, pos);
    wait_for_previous_kernel();
    tokens.load(p);
    if (threadIdx.x == 0) accepted = p.gamma;
    __syncthreads();
    while (true) {
        const uint32 k = tokens.first_mismatch(p);
        if (threadIdx.x % WARP == 0) atomicMin(&accepted, k);
        pos += STEP;
        if (pos - threadIdx.x % WARP >= p.gamma) break;
        tokens.place(p, blockIdx.x, pos);
        tokens.load(p);
    }
    __syncthreads();
    const PaddedRow<Token, Params> row(p, blockIdx.x);
    const Cut cut = {accepted, accepted + 1, GOES_ON};
    if (threadIdx.x == 0) write_result<Token>(p, NoEnd{}, row, cut);
    if (p.committed) write_committed<Token>(p, row, cut, threadIdx.x, LONG_THREADS);
}

// The tokens of one sequence, whose draft is a row or lies behind that of the sequence before it.
template <typename Token>
struct AnyRow {
    const VerifyParams<General> &p;
    uint32 seq;
    const char *drafts, *targets;
    uint32 draft_len;         // draft tokens that are looked at
    uint32 bonus_at = NEVER;  // the position that the bonus token decides, where it is not among the target's
    Token bonus = -1;

    __device__ AnyRow(const VerifyParams<General> &p, const FlatParams &flat, uint32 seq) : p(p), seq(seq) {
        if (!flat.ends) {
            const PaddedRow<Token, VerifyParams<General>> row(p, seq);
            drafts = p.draft + offset(seq, p.draft_seq);
            targets = row.row;
            draft_len = row.length();
            return;
        }
        const uint32 begin = seq ? end(flat, seq - 1) : 0;
        bonus_at = max(end(flat, seq), begin) - begin;
        draft_len = min(bonus_at, p.gamma);
        drafts = p.draft + offset(begin, p.draft_pos);
        targets = p.target + offset(begin, p.target_pos);
        bonus = as<Token>(flat.bonus.at(seq));
    }
    __device__ static uint32 end(const FlatParams &flat, uint32 seq) {
        return min(max(as<int32>(flat.ends.at(seq)), 0), int32(flat.tokens));
    }
    __device__ Token draft(uint32 pos) const { return token<Token>(p, drafts, pos, p.draft_pos); }
    __device__ Token target(uint32 pos) const { return pos == bonus_at ? bonus : token<Token>(p, targets, pos, p.target_pos); }
    __device__ uint32 length() const { return draft_len; }
};

// Warp i takes sequence i. At position draft_len there is no draft token, and so the search ends there.
template <typename Token>
__device__ inline void verify_rows(const VerifyParams<General> &p, const FlatParams &flat, const EndParams &ends) {
    allow_next_kernel();
    const uint32 seq = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    wait_for_previous_kernel();
    if (seq >= p.batch) return;
    const AnyRow<Token> row(p, flat, seq);
    End end;
    SomeStops<> stops;
    end.load(ends, seq);
    stops.load(ends, seq, 0);
    uint32 k = NEVER, stop = NEVER;
    for (uint32 first = lane; k == NEVER; first += TOKEN_SLOTS * WARP) {
        Token drafts[TOKEN_SLOTS], targets[TOKEN_SLOTS];
#pragma unroll
        for (uint32 u = 0; u < TOKEN_SLOTS; ++u) {
            const uint32 pos = first + u * WARP;
            drafts[u] = pos < row.draft_len ? row.draft(pos) : Token(-1);
            targets[u] = pos <= row.draft_len ? row.target(pos) : Token(-1);
        }
#pragma unroll
        for (uint32 u = 0; u < TOKEN_SLOTS; ++u) {
            const uint32 pos = first + u * WARP;
            if (pos <= row.draft_len && (drafts[u] != targets[u] || drafts[u] < 0)) k = min(k, pos);
        }
        k = __reduce_min_sync(FULL_WARP, k);
        // What may be committed and counts.
#pragma unroll
        for (uint32 u = 0; u < TOKEN_SLOTS; ++u) {
            const uint32 pos = first + u * WARP;
            if (pos < end.first_to_stop() || pos > min(k, row.draft_len)) targets[u] = -1;
        }
        const uint32 bits = stop_bits(ends, seq, stops, targets);
        if (bits) stop = first + (__ffs(bits) - 1) * WARP;
        stop = __reduce_min_sync(FULL_WARP, stop);
    }
    const Cut cut = end.cut(k, k + 1, stop);
    if (lane == 0) write_result<Token>(p, ends, row, cut);
    if (p.committed) write_committed<Token>(p, row, cut, lane, WARP);
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

#define END_KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define END_PARAMETERS const __grid_constant__ VerifyParams<Common> p, const __grid_constant__ EndParams end
#define ROWS_PARAMETERS \
    const __grid_constant__ VerifyParams<General> p, const __grid_constant__ FlatParams flat, const __grid_constant__ EndParams end

END_KERNEL verify_end_i32(END_PARAMETERS) { verify<int32>(p, end); }
END_KERNEL verify_end_i64(END_PARAMETERS) { verify<int64>(p, end); }
END_KERNEL verify_rows_i32(ROWS_PARAMETERS) { verify_rows<int32>(p, flat, end); }
END_KERNEL verify_rows_i64(ROWS_PARAMETERS) { verify_rows<int64>(p, flat, end); }
