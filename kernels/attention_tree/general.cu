// Attention of the rows of a draft tree to tensors of every type and stride, in float32 (variant general).
//
//   The last q_lens tokens of a sequence are the nodes of a tree, a row for each. Row r sees the tokens before the tree, and of its own token
//   and the tree's tokens before that one those whose bit is set: bit j of tree[i, r]. Its depth is the number of them, less one. With a
//   window w it sees what is less than w above it: tokens of the tree by their depth.
//
// Bytes: those of general.cu, and ⌈Q/32⌉ words a row, which stay in the L1 cache.
//
// targets: compute_80, compute_90

#include "attention/general.cuh"
#include "attention_tree/reach.cuh"

struct TreeCompute : GeneralCompute {
    using GeneralCompute::GeneralCompute;

    template <typename Close>
    __device__ void run(const CtaShare &cta_share, const WorkItem &item, const Reach &reach, Close close_unit) {
        run_with(cta_share, item, TreeReach(p, item, reach, tree_of(p)), close_unit);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_general_tree(const __grid_constant__ TreeAttentionParams p) {
    attention<TreeCompute>(p.to);
}
