// Where the fields of src/ops/attention/device/int4_128.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(Int4Params, 1496)
VWD_FIELD(Int4Params, to, 0, 1128)
VWD_FIELD(Int4Params, exact_tokens, 1128, 4)
VWD_FIELD(Int4Params, token_capacity, 1132, 4)
VWD_FIELD(Int4Params, block, 1136, 12)
VWD_FIELD(Int4Params, page, 1148, 12)
VWD_FIELD(Int4Params, pages, 1160, 4)
VWD_FIELD(Int4Params, mean_rows, 1164, 12)
VWD_FIELD(Int4Params, mean_pages, 1176, 4)
VWD_FIELD(Int4Params, most_mean_pages, 1180, 4)
VWD_FIELD(Int4Params, mean_type, 1184, 4)
VWD_FIELD(Int4Params, coded_lens, 1192, 16)
VWD_FIELD(Int4Params, table, 1208, 24)
VWD_FIELD(Int4Params, k, 1232, 40)
VWD_FIELD(Int4Params, v, 1272, 40)
VWD_FIELD(Int4Params, k_scale, 1312, 32)
VWD_FIELD(Int4Params, v_scale, 1344, 32)
VWD_FIELD(Int4Params, means, 1376, 40)
VWD_FIELD(Int4Params, mean_table, 1416, 24)
VWD_FIELD(Int4Params, weights, 1440, 24)
VWD_FIELD(Int4Params, tree, 1464, 32)
