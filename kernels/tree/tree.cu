// The form of draft trees: parents, depths, positions, order of siblings and mask bits.
//
//   A link from v to c is sound where 0 ≤ v < c < count. parent(c) = the lowest v with a sound link to c; depth(c) = depth(parent(c)) + 1.
//   mask(c) = the bits of c and of its ancestors · rank(c) = the number of siblings before c · position(c) = base + depth(c)
//
// Bytes: 4·N of links are read, up to 16·N + N·⌈N/32⌉·4 written for each tree: at N = 64 less than 2 KB. The launch is the floor.
//
// Work split: CTA i takes the tree of sequence i; a thread takes every 128th node.
//
//   load links ─ find parents ─ count the steps to the root ─ rank among siblings ─ write
//
// A walk goes to ever lower nodes, so that it ends in whatever links there are.
//
// On entry: 1 ≤ N ≤ MOST_NODES; no output overlaps an input.
//
// targets: compute_80

#include "common/view.cuh"

constexpr uint32 MOST_NODES = 1024, THREADS = 128;
constexpr uint32 BROKEN_LINK = 1u << 16, CLAMPED = 1u << 17;
constexpr int32 NONE = -1, UNLINKED = 0x7fffffff;

struct TreeParams {
    View<2> parents;                   // [B, N] int32, or null
    View<2> first_child, next_sibling; // [B, N] integers of link_bytes, or null
    View<1> node_counts;               // [B] int32, or null: N
    View<1> bases;                     // [B] integers of base_bytes, or null
    View<2> tree_parents, depths;      // [B, N] int32, or null
    View<2> positions;                 // [B, N] integers of base_bytes, or null
    View<2> ranks;                     // [B, N] int32, or null
    View<3> mask;                      // [B, N, ⌈N/32⌉] uint32, or null
    View<1> status;                    // [B] uint32, or null
    uint32 nodes;                      // N
    uint32 link_bytes, base_bytes;
    uint32 unused;
};
#include "tree/layout.cuh"

struct Tree {
    int32 parent[MOST_NODES];  // NONE for the root and for nodes that no sound link reaches
    int32 next[MOST_NODES];
    short depth[MOST_NODES];
};

// A link as int32: what does not fit names no node in either form.
__device__ inline int32 narrow(int64 link) { return link < 0 ? NONE : link > UNLINKED ? UNLINKED : int32(link); }

// Sets the parents that chains of siblings say; true where a link is broken.
__device__ inline bool follow_chains(const TreeParams &p, Tree &tree, uint32 seq, int32 count) {
    bool broken = false;
    for (int32 c = threadIdx.x; c < count; c += THREADS) {
        tree.next[c] = narrow(load_integer(p.next_sibling.at(seq, c), p.link_bytes));
        tree.parent[c] = UNLINKED;
    }
    __syncthreads();
    for (int32 v = threadIdx.x; v < count; v += THREADS) {
        int32 before = v, c = narrow(load_integer(p.first_child.at(seq, v), p.link_bytes));
        while (c > before && c < count) {
            broken |= atomicMin(&tree.parent[c], v) != UNLINKED;
            before = c;
            c = tree.next[c];
        }
        broken |= c >= 0;
    }
    __syncthreads();
    for (int32 c = threadIdx.x; c < count; c += THREADS)
        if (tree.parent[c] == UNLINKED) tree.parent[c] = NONE;
    return broken;
}

extern "C" __global__ void __launch_bounds__(THREADS) tree_prepare(const __grid_constant__ TreeParams p) {
    __shared__ Tree tree;
    const uint32 seq = blockIdx.x;
    const int32 nodes = p.nodes, given = p.node_counts ? as<int32>(p.node_counts.at(seq)) : nodes;
    const int32 count = min(max(given, 0), nodes);
    bool broken = false;
    if (p.parents) {
        for (int32 c = threadIdx.x; c < count; c += THREADS) {
            const int32 parent = as<int32>(p.parents.at(seq, c));
            tree.parent[c] = parent >= 0 && parent < c ? parent : NONE;
        }
    } else {
        broken = follow_chains(p, tree, seq, count);
    }
    __syncthreads();
    for (int32 c = threadIdx.x; c < count; c += THREADS) {
        broken |= c > 0 && tree.parent[c] == NONE;
        int32 steps = 0, node = c;
        for (; node > 0; node = tree.parent[node]) ++steps;
        tree.depth[c] = node == 0 ? steps : NONE;
    }
    broken = __syncthreads_or(broken);
    if (p.status && threadIdx.x == 0) as<uint32>(p.status.at(seq)) = (broken ? BROKEN_LINK : 0) | (given > nodes ? CLAMPED : 0);

    const int64 base = p.bases ? load_integer(p.bases.at(seq), p.base_bytes) : 0;
    for (int32 c = threadIdx.x; c < nodes; c += THREADS) {
        const int32 depth = c < count ? tree.depth[c] : NONE;
        const int32 parent = depth > 0 ? tree.parent[c] : NONE;
        if (p.tree_parents) as<int32>(p.tree_parents.at(seq, c)) = parent;
        if (p.depths) as<int32>(p.depths.at(seq, c)) = depth;
        if (p.positions) store_integer(p.positions.at(seq, c), p.base_bytes, base + max(depth, 0));
        if (p.ranks) {
            int32 rank = depth < 0 ? NONE : 0;
            if (parent >= 0)
                for (int32 b = parent + 1; b < c; ++b) rank += tree.parent[b] == parent;
            as<int32>(p.ranks.at(seq, c)) = rank;
        }
    }
    if (!p.mask) return;
    const int32 words = (nodes + 31) / 32;
    for (int32 at = threadIdx.x; at < nodes * words; at += THREADS) {
        const int32 c = at / words, word = at % words;
        uint32 bits = c / 32 == word ? 1u << c % 32 : 0;
        if (c < count && tree.depth[c] > 0)
            for (int32 node = tree.parent[c]; node >= 0; node = tree.parent[node])
                if (node / 32 == word) bits |= 1u << node % 32;
        as<uint32>(p.mask.at(seq, c, word)) = bits;
    }
}
