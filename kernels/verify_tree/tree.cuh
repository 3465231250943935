// The tree of a request whose walk samples, and where its rows lie.
#pragma once

#include "verify_tree/early.cuh"
#include "verify_tree/end.cuh"

// The tree of a request.
struct Tree {
    const SampledTreeParams &p;
    uint32 request;
    int32 given, count;  // node_counts, as it is and clamped
    float temperature;
    EarlyStops early;

    __device__ Tree(const SampledTreeParams &p, uint32 request) : p(p), request(request), early(p.end, request) {
        given = p.node_counts ? as<int32>(p.node_counts.at(request)) : p.nodes;
        count = min(max(given, 0), int32(p.nodes));
        temperature = p.sampling.temperature_of(request);
    }
    __device__ bool is_greedy() const { return ::is_greedy(temperature); }
    __device__ bool tries_children() const { return p.rule != COUPLED && !is_greedy(); }
    __device__ int32 parent(int32 c) const { return as<int32>(p.parents.at(request, c)); }
    __device__ int64 token(int32 c) const { return load_integer(p.tokens.at(request, c), p.token_bytes); }

    // Slots count the nodes, then the rows that their children were drawn from. Whether the row in this slot may be looked at; the whole CTA asks.
    __device__ bool needs(uint32 slot) const {
        if (slot < p.nodes) return int32(slot) < count;
        const int32 node = slot - p.nodes;
        if (node >= count || !tries_children()) return false;
        bool has_child = false;
        for (int32 c = node + 1 + int32(threadIdx.x); c < count && !has_child; c += blockDim.x) has_child = parent(c) == node;
        return __syncthreads_or(has_child);
    }
    // The depth of the node in a slot, counted no further than to `most` and to where stop tokens are allowed, as they are in rows of drafts.
    __device__ uint32 depth(uint32 slot, uint32 most) const {
        return slot < p.nodes ? depth_of(p.parents, request, slot, max(most, early.least)) : early.least;
    }
    // The row in a slot, without these tokens.
    __device__ Source source(uint32 slot, const Forbidden &forbidden) const {
        const SamplingParams &sampling = p.sampling;
        const bool is_draft = slot >= p.nodes;
        const char *data = is_draft ? sampling.draft_rows.at(request, slot - p.nodes) : sampling.target.at(request, slot);
        return {sampling, request, temperature, is_draft, data, forbidden};
    }
};

// The nodes of a tree in shared memory.
struct Nodes {
    static constexpr uint32 NO_PARENT = 0xffff;
    int32 token[MOST_NODES];    // -1: none of the vocabulary
    uint16 parent[MOST_NODES];  // NO_PARENT: none that is sound

    // Whether a link is broken. A CTA of so many threads asks.
    template <uint32 THREADS = DRAW_THREADS> __device__ bool load(const Tree &tree) {
        const int64 tokens = tree.p.sampling.tokens;
        bool is_broken = false;
        for (int32 c = int32(threadIdx.x); c < tree.count; c += THREADS) {
            const int32 above = c ? tree.parent(c) : -1;
            const int64 mine = tree.token(c);
            const bool is_sound = above >= 0 && above < c;
            is_broken |= c && !is_sound;
            token[c] = mine >= 0 && mine < tokens ? int32(mine) : -1;
            parent[c] = is_sound ? above : NO_PARENT;
        }
        return __syncthreads_or(is_broken);
    }
    // The lowest child of a node above `after` which `wanted` takes; NONE if there is none. The whole CTA looks for it.
    template <typename Wanted> __device__ int32 child(DrawShared &shared, int32 count, int32 node, int32 after, const Wanted &wanted) const {
        int32 found = NONE;
        for (int32 c = max(node, after) + 1 + int32(threadIdx.x); c < count && found == NONE; c += DRAW_THREADS)
            if (parent[c] == node && wanted(c)) found = c;
        return cta_min(shared, found);
    }
};

// Writes what a walk of so many nodes gives beside its path and its tokens, which the CTA has written, and cuts it.
__device__ inline void end_sampled_walk(const SampledTreeParams &p, uint32 request, uint32 places, int64 next, uint32 status) {
    if (threadIdx.x == 0) {
        as<int32>(p.accepted.at(request)) = places ? places - 1 : 0;
        store_integer(p.next_token.at(request), p.token_bytes, next);
        if (p.status) as<uint32>(p.status.at(request)) = status;
    }
    if (!p.has_end) return;
    if (p.token_bytes == 8) end_walk<int64>(p, p.end, request, false);
    else end_walk<int32>(p, p.end, request, false);
}
