// Where the fields of src/ops/tree/cuda.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(TreeParams, 264)
VWD_FIELD(TreeParams, parents, 0, 24)
VWD_FIELD(TreeParams, first_child, 24, 24)
VWD_FIELD(TreeParams, next_sibling, 48, 24)
VWD_FIELD(TreeParams, node_counts, 72, 16)
VWD_FIELD(TreeParams, bases, 88, 16)
VWD_FIELD(TreeParams, tree_parents, 104, 24)
VWD_FIELD(TreeParams, depths, 128, 24)
VWD_FIELD(TreeParams, positions, 152, 24)
VWD_FIELD(TreeParams, ranks, 176, 24)
VWD_FIELD(TreeParams, mask, 200, 32)
VWD_FIELD(TreeParams, status, 232, 16)
VWD_FIELD(TreeParams, nodes, 248, 4)
VWD_FIELD(TreeParams, link_bytes, 252, 4)
VWD_FIELD(TreeParams, base_bytes, 256, 4)
VWD_FIELD(TreeParams, unused, 260, 4)

VWD_CONSTANT(MOST_NODES, 1024)
