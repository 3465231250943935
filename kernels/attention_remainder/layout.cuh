// Where the fields of src/ops/attention/device/term.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(TermParams, 1392)
VWD_FIELD(TermParams, to, 0, 1128)
VWD_FIELD(TermParams, rows, 1128, 16)
VWD_FIELD(TermParams, tokens, 1144, 24)
VWD_FIELD(TermParams, mean_v, 1168, 32)
VWD_FIELD(TermParams, covariance, 1200, 40)
VWD_FIELD(TermParams, log_mass, 1240, 32)
VWD_FIELD(TermParams, m, 1272, 32)
VWD_FIELD(TermParams, l, 1304, 32)
VWD_FIELD(TermParams, lse, 1336, 32)
VWD_FIELD(TermParams, count, 1368, 4)
VWD_FIELD(TermParams, fours, 1372, 4)
VWD_FIELD(TermParams, strips, 1376, 4)
VWD_FIELD(TermParams, scale, 1380, 4)
VWD_FIELD(TermParams, adjacent, 1384, 4)
VWD_FIELD(TermParams, unused, 1388, 4)

VWD_SIZE(ListTermParams, 1288)
VWD_FIELD(ListTermParams, to, 0, 1128)
VWD_FIELD(ListTermParams, rows, 1128, 16)
VWD_FIELD(ListTermParams, tokens, 1144, 24)
VWD_FIELD(ListTermParams, mean_v, 1168, 32)
VWD_FIELD(ListTermParams, covariance, 1200, 40)
VWD_FIELD(ListTermParams, log_mass, 1240, 32)
VWD_FIELD(ListTermParams, count, 1272, 4)
VWD_FIELD(ListTermParams, keys, 1276, 4)
VWD_FIELD(ListTermParams, offset, 1280, 4)
VWD_FIELD(ListTermParams, scale, 1284, 4)

VWD_CONSTANT(TERM_THREADS, 128)
VWD_CONSTANT(HEADS, 4)
VWD_CONSTANT(STRIP, 64)
VWD_CONSTANT(TERM_ROW_BYTES, 512)
