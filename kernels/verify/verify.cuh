// Greedy acceptance for a tile of tokens, by one warp. verify.cu and verify_pack.cu include it.
#pragma once

#include "verify/end.cuh"

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

// Drafts that lie one after the other, a parameter of its own. Mirrored by FlatParams in src/ops/verify/cuda.rs.
struct FlatParams {
    View<1> ends;   // [B] int32: past the last token of each draft; null where drafts are rows
    View<1> bonus;  // [B] Token
    uint32 tokens;  // N
    uint32 unused;
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

    const char *draft_row, *target_row, *length_at;

    // Finds this lane's place in tile `tile` of a batch: one long row, or several short ones.
    template <typename Params>
    __device__ void place(const Params &p, uint32 tile) {
        const uint32 lane = threadIdx.x % WARP;
        place(p, SLOTS == 1 ? (tile << (5 - p.log_lanes)) + (lane >> p.log_lanes) : tile, SLOTS == 1 ? lane & ((1u << p.log_lanes) - 1) : lane);
    }
    template <typename Params>
    __device__ void place(const Params &p, uint32 row, uint32 pos) {
        this->row = row;
        this->pos = pos;
        const uint32 read_row = min(row, p.batch - 1);  // tokens of a row past the last are loaded but not used
        draft_row = p.draft + offset(read_row, p.draft_seq), target_row = p.target + offset(read_row, p.target_seq);
        length_at = p.draft_lens + offset(read_row, p.draft_lens_seq);
    }
    // Brings what load() will request into the L2 cache.
    template <typename Params>
    __device__ void prefetch(const Params &p) const {
#pragma unroll
        for (uint32 u = 0; u < SLOTS; ++u)
            if (pos % PREFETCHED == 0 && pos + u * WARP < p.gamma) {
                ::prefetch(&token<Token>(p, draft_row, pos + u * WARP, p.draft_pos));
                ::prefetch(&token<Token>(p, target_row, pos + u * WARP, p.target_pos));
            }
        if (p.draft_lens && pos == 0) ::prefetch(length_at);
    }
    // The addresses are computed before this.
    __device__ void know() { draft_row = known(draft_row), target_row = known(target_row), length_at = known(length_at); }
    // The tile has its place.
    template <typename Params>
    __device__ void load(const Params &p) {
#pragma unroll
        for (uint32 u = 0; u < SLOTS; ++u) {
            drafts[u] = targets[u] = -1;
            if (pos + u * WARP < p.gamma) {
                drafts[u] = token<Token>(p, draft_row, pos + u * WARP, p.draft_pos);
                targets[u] = token<Token>(p, target_row, pos + u * WARP, p.target_pos);
            }
        }
        length = p.gamma;
        if (p.draft_lens) length = as<int32>(length_at);
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

// What ends the rows of a tile. Without an end there is nothing to load, and all tokens up to the next one are committed. Up to STOPS stop tokens
// are requested together with all else.
template <typename Token, uint32 SLOTS, typename Ends, uint32 STOPS = 4>
struct TileEnd {
    End end;
    SomeStops<STOPS> stops;
    Token bonus = -1;
    const char *bonus_at, *stop_at[STOPS];

    // Finds what load() will request: its addresses are computed here.
    template <typename Params>
    __device__ void place(const Params &p, const Ends &ends, uint32 row) {
        if constexpr (Ends::IS_GIVEN) {
            const uint32 read_row = min(row, p.batch - 1);
            const char *targets = p.target + offset(read_row, p.target_seq);
            bonus_at = reinterpret_cast<const char *>(&token<Token>(p, targets, p.gamma, p.target_pos));
            end.place(ends, read_row);
            stops.place(ends, read_row, 0, stop_at);
#pragma unroll
            for (uint32 s = 0; s < STOPS; ++s)
                if (!ends.stops) stop_at[s] = targets;  // is loaded and not looked at, so that no branch comes before the other requests
        }
    }
    // Brings it into the L2 cache, by one lane of a row. Of stop tokens that all rows share, and of numbers of neighbouring rows, one request is
    // enough: many to one place would hold up the kernel before this one.
    __device__ void prefetch(const Ends &ends, uint32 row) {
        if constexpr (Ends::IS_GIVEN) {
            ::prefetch(bonus_at);
            if (row % PREFETCHED == 0) end.prefetch(ends);
            if (ends.stops && (row == 0 || ends.stop.step[0])) ::prefetch(stop_at[0]);
        }
    }
    // The addresses are computed before this.
    __device__ void know() {
        if constexpr (Ends::IS_GIVEN) {
            bonus_at = known(bonus_at);
            end.know();
#pragma unroll
            for (uint32 s = 0; s < STOPS; ++s) stop_at[s] = known(stop_at[s]);
        }
    }
    // Requests what the tile's own tokens do not tell.
    __device__ void load(const Ends &ends) {
        if constexpr (Ends::IS_GIVEN) {
            stops.load(ends, stop_at);
            end.load(ends);
            bonus = as<Token>(bonus_at);
        }
    }
    // Requests it of a row that has no place, with fewer addresses at once.
    template <typename Params>
    __device__ void load(const Params &p, const Ends &ends, uint32 row) {
        if constexpr (Ends::IS_GIVEN) {
            const uint32 read_row = min(row, p.batch - 1);
            bonus = token<Token>(p, p.target + offset(read_row, p.target_seq), p.gamma, p.target_pos);
            end.load(ends, read_row);
            stops.load(ends, read_row, 0);
        }
    }
    // The same in all lanes of a row.
    template <typename Params>
    __device__ Cut cut(const Params &p, const Ends &ends, const TokenTile<Token, SLOTS> &tile) const {
        if constexpr (!Ends::IS_GIVEN) {
            const uint32 k = tile.first_mismatch(p);
            return {k, k + 1, GOES_ON};
        } else {
            const uint32 k = tile.first_mismatch(p), from = end.first_to_stop();
            // Stop tokens are looked for up to the bonus token, so that this does not wait for k. Behind k they change nothing.
            Token tokens[SLOTS + 1];
#pragma unroll
            for (uint32 u = 0; u < SLOTS; ++u) tokens[u] = tile.targets[u];
            tokens[SLOTS] = bonus;
            const uint32 bits = stop_bits(ends, min(tile.row, p.batch - 1), stops, tokens);
            // The first slot whose position counts.
            const uint32 slot = from > tile.pos ? (from - tile.pos - 1) / WARP + 1 : 0;
            const uint32 counts = bits & (1u << SLOTS) - 1 & FULL_WARP << min(slot, SLOTS);
            uint32 first = bits >> SLOTS && p.gamma >= from ? p.gamma : NEVER;
            if (counts) first = tile.pos + (__ffs(counts) - 1) * WARP;
            if constexpr (SLOTS == 1) {
                const uint32 lanes = 1u << p.log_lanes, leader = threadIdx.x % WARP & -lanes;
                const uint32 stops = __ballot_sync(FULL_WARP, first < p.gamma) >> leader & FULL_WARP >> (WARP - lanes);
                return end.cut(k, k + 1, stops ? __ffs(stops) - 1 : first);
            } else {
                return end.cut(k, k + 1, __reduce_min_sync(FULL_WARP, first));
            }
        }
    }
};

// The tokens of one sequence whose draft is a row. If this CTA has loaded the row, the target's tokens come from L1.
template <typename Token, typename Params>
struct PaddedRow {
    const Params &p;
    uint32 seq;
    const char *row;

    __device__ PaddedRow(const Params &p, uint32 seq) : p(p), seq(seq), row(p.target + offset(seq, p.target_seq)) {}
    __device__ Token target(uint32 pos) const { return token<Token>(p, row, pos, p.target_pos); }
    __device__ uint32 length() const {
        return p.draft_lens ? clamped(p, as<int32>(p.draft_lens + offset(seq, p.draft_lens_seq))) : p.gamma;
    }
};

// Writes the results of one sequence, by one thread.
template <typename Token, typename Params, typename Ends, typename Row>
__device__ inline void write_result(const Params &p, const Ends &ends, const Row &row, const Cut &cut) {
    const bool has_next = !Ends::IS_GIVEN || cut.has_next();
    const Token next = has_next ? row.target(cut.accepted) : Token(-1);
    as<int32>(p.accepted + offset(row.seq, p.accepted_seq)) = cut.accepted;
    as<Token>(p.next_token + offset(row.seq, p.next_token_seq)) = next;
    write_end(ends, row.seq, cut);
    if (!p.mismatch) return;
    char *mismatch = p.mismatch + offset(row.seq, p.mismatch_seq);
    const bool refused = has_next && cut.accepted < row.length();
    if (p.mismatch_bytes == 1) as<uint8>(mismatch) = refused;
    else as<int32>(mismatch) = refused;
}

// Writes the committed row of one sequence, by `lanes` lanes, of which this is number `lane`. Accepted draft tokens equal the target's, so
// the committed row is the beginning of the target's row.
template <typename Token, typename Params, typename Row>
__device__ inline void write_committed(const Params &p, const Row &row, const Cut &cut, uint32 lane, uint32 lanes) {
    char *committed = p.committed + offset(row.seq, p.committed_seq);
    for (uint32 pos = lane; pos <= p.gamma; pos += lanes)
        as<Token>(committed + offset(pos, p.committed_pos)) = pos < cut.committed ? row.target(pos) : Token(-1);
}
