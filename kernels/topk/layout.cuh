// Where the fields of src/ops/topk/cuda.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(TopKParams, 144)
VWD_FIELD(TopKParams, scores, 0, 8)
VWD_FIELD(TopKParams, lens, 8, 8)
VWD_FIELD(TopKParams, budgets, 16, 8)
VWD_FIELD(TopKParams, ids, 24, 8)
VWD_FIELD(TopKParams, counts, 32, 8)
VWD_FIELD(TopKParams, values, 40, 8)
VWD_FIELD(TopKParams, scores_row, 48, 8)
VWD_FIELD(TopKParams, scores_entry, 56, 8)
VWD_FIELD(TopKParams, lens_row, 64, 8)
VWD_FIELD(TopKParams, budgets_row, 72, 8)
VWD_FIELD(TopKParams, ids_row, 80, 8)
VWD_FIELD(TopKParams, ids_entry, 88, 8)
VWD_FIELD(TopKParams, counts_row, 96, 8)
VWD_FIELD(TopKParams, values_row, 104, 8)
VWD_FIELD(TopKParams, values_entry, 112, 8)
VWD_FIELD(TopKParams, n, 120, 4)
VWD_FIELD(TopKParams, k, 124, 4)
VWD_FIELD(TopKParams, cap, 128, 4)
VWD_FIELD(TopKParams, dtype, 132, 4)
VWD_FIELD(TopKParams, adjacent, 136, 4)
VWD_FIELD(TopKParams, chunks, 140, 4)
