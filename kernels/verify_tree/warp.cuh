// The greedy walk of a small tree by one warp, in registers: verify_tree.cu has the walk's definition.
//
// A lane has two nodes, of which it requests all numbers at once. A node with its parent's target token points to its parent, every other node to
// itself. When each pointer has been replaced by that of the node that it points to, and so again until it has come as far as a path can be
// long, the nodes that point to the root are those that the root reaches by matching tokens. They are the path, in ascending order, unless
// siblings with equal tokens are among them; then the path is walked node by node.
#pragma once

#include "verify_tree/params.cuh"

constexpr uint32 NODE_SLOTS = WARP_NODES / WARP;  // node lane + s · WARP is in slot s of a lane

// What a lane has in the slot of a node. All lanes ask.
template <typename T> __device__ inline T of_node(const T (&values)[NODE_SLOTS], int32 node) {
    const T low = __shfl_sync(FULL_WARP, values[0], node), high = __shfl_sync(FULL_WARP, values[1], node);
    return node & int32(WARP) ? high : low;
}
// The nodes for which it holds, a bit each.
__device__ inline uint64 nodes_where(const bool (&holds)[NODE_SLOTS]) {
    return __ballot_sync(FULL_WARP, holds[0]) | uint64(__ballot_sync(FULL_WARP, holds[1])) << WARP;
}
__device__ inline uint64 below(int32 node) { return (uint64(1) << node) - 1; }
__device__ inline int32 lowest(uint64 nodes) {
    const uint32 low = nodes;
    return low ? __ffs(low) - 1 : 31 + __ffs(nodes >> WARP);
}
// −1 where there is none.
__device__ inline int32 highest(uint64 nodes) {
    const uint32 high = nodes >> WARP;
    return high ? 63 - __clz(high) : 31 - __clz(uint32(nodes));
}
__device__ inline uint32 count_of(uint64 nodes) { return __popc(uint32(nodes)) + __popc(nodes >> WARP); }

// The nodes of the walk that begins at the root, of which a node's matching children point to it.
__device__ inline uint64 walk_nodes(const int32 (&up)[NODE_SLOTS]) {
    uint64 path = 1;
    for (int32 node = 0;;) {
        const uint64 children = nodes_where({up[0] == node, up[1] == node}) & ~(uint64(1) << node);
        if (!children) return path;
        node = lowest(children);
        path |= uint64(1) << node;
    }
}

// The path of a tree of at most `nodes` nodes: a bit for each of its nodes.
__device__ inline uint64 find_path(const int32 (&up)[NODE_SLOTS], int32 nodes) {
    const int32 lane = threadIdx.x;
    int32 from[NODE_SLOTS] = {up[0], up[1]};
    for (int32 steps = 1; steps < nodes - 1; steps *= 2) {
        const int32 next[NODE_SLOTS] = {of_node(from, from[0]), of_node(from, from[1])};
        from[0] = next[0], from[1] = next[1];
    }
    const uint64 reached = nodes_where({from[0] == 0, from[1] == 0});
    bool forks = false;  // a node does not follow the one before it
#pragma unroll
    for (int32 s = 0; s < int32(NODE_SLOTS); ++s) {
        const int32 c = lane + s * WARP, before = highest(reached & below(c));
        forks |= (c > 0) & (from[s] == 0) & (up[s] != before);
    }
    return __any_sync(FULL_WARP, forks) ? walk_nodes(up) : reached;
}

// CTA i, of one warp, walks the tree of sequence i.
template <typename Token, typename Ends = NoEnd> __device__ inline void verify_by_warp(const VerifyTreeParams &p, const Ends &ends = {}) {
    allow_next_kernel();
    const uint32 seq = blockIdx.x, lane = threadIdx.x;
    const int32 nodes = p.nodes;
    const char *token_at[NODE_SLOTS], *parent_at[NODE_SLOTS], *target_at[NODE_SLOTS];
#pragma unroll
    for (uint32 s = 0; s < NODE_SLOTS; ++s) {
        const uint32 c = min(lane + s * WARP, p.nodes - 1);  // past the last node its numbers are loaded but not used
        parent_at[s] = p.parents.at(seq, c), token_at[s] = p.tokens.at(seq, c), target_at[s] = p.target.at(seq, c);
        if (lane % PREFETCHED == 0) prefetch(parent_at[s]), prefetch(token_at[s]), prefetch(target_at[s]);
    }
    if (lane == 0) prefetch_end(ends, seq);
    wait_for_previous_kernel();
    Token token[NODE_SLOTS], target[NODE_SLOTS];
    int32 parent[NODE_SLOTS], given = nodes;
#pragma unroll
    for (uint32 s = 0; s < NODE_SLOTS; ++s) {
        parent[s] = as<int32>(parent_at[s]);
        token[s] = as<Token>(token_at[s]);
        target[s] = as<Token>(target_at[s]);
    }
    if (p.node_counts) given = as<int32>(p.node_counts.at(seq));
    End end;
    end.load(ends, seq);
    SomeStops<> stops;
    if constexpr (Ends::IS_GIVEN) stops.load(ends, seq, 0);
    // While they are on their way:
    char *path = known(p.path.at(seq)), *committed = known(p.committed.at(seq)), *next_token = known(p.next_token.at(seq));
    char *accepted = known(p.accepted.at(seq)), *status = known(p.status.at(seq));

    const int32 count = min(max(given, 0), nodes);
    int32 up[NODE_SLOTS];
    bool broken = false;
#pragma unroll
    for (int32 s = 0; s < int32(NODE_SLOTS); ++s) {
        const int32 c = lane + s * WARP;
        const Token wanted = of_node(target, parent[s]);
        const bool is_draft = c > 0 && c < count, is_sound = parent[s] >= 0 && parent[s] < c;
        broken |= is_draft && !is_sound;
        up[s] = is_draft && is_sound && token[s] >= 0 && token[s] == wanted ? parent[s] : c;
    }
    uint32 stop_slots = 0;  // slots whose target token is a stop token
    if constexpr (Ends::IS_GIVEN) stop_slots = stop_bits(ends, seq, stops, target);
    const uint64 walked = count > 0 ? find_path(up, nodes) : 0;

    // The path's places, as far as there are any.
    const uint32 length = min(count_of(walked), p.places), k = length ? length - 1 : 0;
    uint32 place[NODE_SLOTS];
    bool stops_here[NODE_SLOTS];
#pragma unroll
    for (int32 s = 0; s < int32(NODE_SLOTS); ++s) {
        const int32 c = lane + s * WARP;
        const uint32 before = count_of(walked & below(c));
        place[s] = walked >> c & 1 && before < length ? before : NEVER;
        stops_here[s] = stop_slots >> s & 1 && place[s] != NEVER && place[s] >= end.first_to_stop();
    }
    uint32 stop = NEVER;
    if constexpr (Ends::IS_GIVEN) {
        const uint64 nodes_that_stop = nodes_where(stops_here);
        if (nodes_that_stop) stop = count_of(walked & below(lowest(nodes_that_stop)));
    }
    const Cut cut = end.cut(k, length, stop);
    const uint32 kept = length && end.remaining > 0 ? cut.accepted + 1 : 0;  // nodes that stay on the path

    const bool has_next = cut.committed > k;
#pragma unroll
    for (int32 s = 0; s < int32(NODE_SLOTS); ++s) {
        if (place[s] < kept) as<int32>(path + place[s] * p.path.step[1]) = lane + s * WARP;
        if (p.committed && place[s] < cut.committed) as<Token>(committed + place[s] * p.committed.step[1]) = target[s];
        if (has_next && place[s] == k) as<Token>(next_token) = target[s];
    }
#pragma unroll 1
    for (uint32 j = kept + lane; j < p.places; j += WARP) as<int32>(path + j * p.path.step[1]) = -1;
    if (p.committed)
#pragma unroll 1
        for (uint32 j = cut.committed + lane; j < p.places; j += WARP) as<Token>(committed + j * p.committed.step[1]) = -1;
    broken = __any_sync(FULL_WARP, broken);
    if (lane > 0) return;
    as<int32>(accepted) = cut.accepted;
    if (!has_next) as<Token>(next_token) = -1;
    if (p.status) as<uint32>(status) = (broken ? BROKEN_LINK : 0) | (given > nodes ? CLAMPED : 0);
    write_end(ends, seq, cut);
}
