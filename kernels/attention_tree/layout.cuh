// Where the fields of src/ops/attention/device/tree.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(TreeAttentionParams, 1160)
VWD_FIELD(TreeAttentionParams, to, 0, 1128)
VWD_FIELD(TreeAttentionParams, tree, 1128, 32)
