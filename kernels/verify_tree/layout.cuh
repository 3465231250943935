// Where the fields of src/ops/verify_tree/cuda.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(VerifyTreeParams, 208)
VWD_FIELD(VerifyTreeParams, tokens, 0, 24)
VWD_FIELD(VerifyTreeParams, parents, 24, 24)
VWD_FIELD(VerifyTreeParams, target, 48, 24)
VWD_FIELD(VerifyTreeParams, node_counts, 72, 16)
VWD_FIELD(VerifyTreeParams, accepted, 88, 16)
VWD_FIELD(VerifyTreeParams, path, 104, 24)
VWD_FIELD(VerifyTreeParams, next_token, 128, 16)
VWD_FIELD(VerifyTreeParams, committed, 144, 24)
VWD_FIELD(VerifyTreeParams, status, 168, 16)
VWD_FIELD(VerifyTreeParams, nodes, 184, 4)
VWD_FIELD(VerifyTreeParams, places, 188, 4)
VWD_FIELD(VerifyTreeParams, largest, 192, 8)
VWD_FIELD(VerifyTreeParams, slices, 200, 4)
VWD_FIELD(VerifyTreeParams, unused, 204, 4)

VWD_SIZE(LargestParams, 96)
VWD_FIELD(LargestParams, logits, 0, 32)
VWD_FIELD(LargestParams, node_counts, 32, 16)
VWD_FIELD(LargestParams, largest, 48, 8)
VWD_FIELD(LargestParams, nodes, 56, 12)
VWD_FIELD(LargestParams, slices, 68, 12)
VWD_FIELD(LargestParams, tokens, 80, 4)
VWD_FIELD(LargestParams, slice, 84, 4)
VWD_FIELD(LargestParams, dtype, 88, 4)
VWD_FIELD(LargestParams, is_adjacent, 92, 4)

VWD_CONSTANT(MOST_NODES, 1024)
