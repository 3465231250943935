// What the rows of a draft tree see: the tokens before the tree, and their own path in it.
#pragma once

#include "attention/attention.cuh"

struct TreeAttentionParams {
    AttentionParams to;
    View<3> tree;  // [B, Q, ⌈Q/32⌉] uint32
};
#include "attention_tree/layout.cuh"

// The tree of a call, for kernels whose parameter is a TreeAttentionParams.
__device__ inline const View<3> &tree_of(const AttentionParams &p) { return reinterpret_cast<const TreeAttentionParams &>(p).tree; }

// What the rows of a sequence see.
struct TreeReach : Reach {
    const View<3> &tree;
    uint32 seq;

    // `chain` says what any row of a work item would see of a chain.
    __device__ TreeReach(const AttentionParams &p, const WorkItem &item, const Reach &chain, const View<3> &tree) : Reach(chain), tree(tree), seq(item.seq) {
        // A list of one row: what the row sees begins at its depth, not at its place among the rows.
        uint32 count;
        if (p.own_lists) row(p, item.position, begin, count);
    }
    __device__ int32 root() const { return length - queries; }
    __device__ uint32 word(uint32 row, uint32 n) const { return as<uint32>(tree.at(seq, row, n)); }
    __device__ bool has(uint32 row, uint32 node) const { return word(row, node / 32) >> node % 32 & 1; }
    __device__ int32 depth(uint32 row) const {
        int32 nodes = 0;
        for (uint32 n = 0; n < row / 32; n++) nodes += __popc(word(row, n));
        nodes += __popc(word(row, row / 32) & ((2u << row % 32) - 1));
        return max(nodes - 1, 0);
    }
    __device__ void row(const AttentionParams &p, uint32 position, int32 &first, uint32 &count) const {
        const int32 last = int32(position) < queries ? root() + int32(position) + 1 : 0;
        first = p.window && last > 0 ? max(root() + depth(position) + 1 - int32(p.window), 0) : 0;
        count = max(last - first, 0);
    }
};

// The token lies within the row's reach, so that its node is not above the row's.
__device__ inline bool is_seen(const AttentionParams &p, const TreeReach &reach, uint32 row, int32 token) {
    const int32 node = token - reach.root();
    if (node < 0) return true;
    return reach.has(row, node) && (!p.window || reach.depth(node) + int32(p.window) > reach.depth(row));
}
