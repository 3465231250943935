// How many blocks are selected for a list, which follows from lengths and budget alone, where each query position has its own list.
#pragma once

#include "select/rows.cuh"
#include "select/tiles.cuh"

// Which list a CTA makes.
struct ListNumber {
    uint32 seq, position, head;
};

// How many blocks are selected for the list.
struct Selection {
    ListNumber at;
    uint32 n, stored, tiles;     // blocks that the list sees; the first of them, which have a summary; tiles of these
    uint32 init, local, wanted;  // first and last blocks, which are forced; how many others are selected
    uint32 end, of_stored;       // `of_stored` of the wanted blocks are among blocks init … end−1, the rest follow block end−1
    uint32 is_there, clamped;    // is_there: the sequence has this query position
    uint32 whole;                // of the stored blocks, those that are whole for the position

    __device__ void compute(const SelectParams &s, const ListNumber &number, const Lengths &given, int32 budget) {
        at = number;
        const int32 queries = min(max(given.queries, 0), int32(s.positions)), last = min(int32(at.position) + 1, queries);
        is_there = int32(at.position) < last;
        const int32 tokens = is_there ? max(max(given.tokens, 0) - queries + last, 0) : 0;
        n = tokens == 0 ? 0 : s.by_block.divide(tokens - 1) + 1, stored = min(n, s.place.capacity), tiles = (stored + BLOCKS - 1) / BLOCKS;
        whole = min(s.by_block.divide(tokens), stored);
        const uint32 k = min(uint32(max(budget, 0)), s.capacity);
        init = min(s.init, n), local = min(s.local, n - init);
        const uint32 forced = init + local;
        wanted = min(k > forced ? k - forced : 0, n - forced);
        end = max(min(n - local, stored), init), of_stored = min(wanted, end - init);
        clamped = given.tokens < 0 || given.queries != queries || budget != int32(k) || (s.scores && n > s.max_blocks);
    }
    // Whether all candidates are selected, so that no score decides.
    __device__ bool takes_all() const { return of_stored == end - init; }
    // Whether block j is selected whatever its score is.
    __device__ bool is_forced(uint32 j) const {
        return j < (takes_all() ? end : init) || j >= n - local || (j >= end && j < end + (wanted - of_stored));
    }
    // The block's key: 0 if it is forced, and otherwise a number that sorts as the score does, which is −inf or not negative.
    __device__ uint32 key(uint32 j, float score) const { return key(j, score, init, end); }
    __device__ static uint32 key(uint32 j, float score, uint32 init, uint32 end) {
        const uint32 key = score < 0.0f ? 1 : __float_as_uint(score) + 2;
        return j - init < end - init ? key : 0;
    }
};
