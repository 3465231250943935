// Where the fields of src/ops/attention/device/int4_128.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(Int4Params, 1480)
VWD_FIELD(Int4Params, to, 0, 1112)
VWD_FIELD(Int4Params, exact_tokens, 1112, 4)
VWD_FIELD(Int4Params, token_capacity, 1116, 4)
VWD_FIELD(Int4Params, block, 1120, 12)
VWD_FIELD(Int4Params, page, 1132, 12)
VWD_FIELD(Int4Params, pages, 1144, 4)
VWD_FIELD(Int4Params, mean_rows, 1148, 12)
VWD_FIELD(Int4Params, mean_pages, 1160, 4)
VWD_FIELD(Int4Params, most_mean_pages, 1164, 4)
VWD_FIELD(Int4Params, mean_type, 1168, 4)
VWD_FIELD(Int4Params, coded_lens, 1176, 16)
VWD_FIELD(Int4Params, table, 1192, 24)
VWD_FIELD(Int4Params, k, 1216, 40)
VWD_FIELD(Int4Params, v, 1256, 40)
VWD_FIELD(Int4Params, k_scale, 1296, 32)
VWD_FIELD(Int4Params, v_scale, 1328, 32)
VWD_FIELD(Int4Params, means, 1360, 40)
VWD_FIELD(Int4Params, mean_table, 1400, 24)
VWD_FIELD(Int4Params, weights, 1424, 24)
VWD_FIELD(Int4Params, tree, 1448, 32)
