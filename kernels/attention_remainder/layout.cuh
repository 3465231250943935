// Where the fields of src/ops/attention/device/term.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(TermParams, 1376)
VWD_FIELD(TermParams, to, 0, 1112)
VWD_FIELD(TermParams, rows, 1112, 16)
VWD_FIELD(TermParams, tokens, 1128, 24)
VWD_FIELD(TermParams, mean_v, 1152, 32)
VWD_FIELD(TermParams, covariance, 1184, 40)
VWD_FIELD(TermParams, log_mass, 1224, 32)
VWD_FIELD(TermParams, m, 1256, 32)
VWD_FIELD(TermParams, l, 1288, 32)
VWD_FIELD(TermParams, lse, 1320, 32)
VWD_FIELD(TermParams, count, 1352, 4)
VWD_FIELD(TermParams, fours, 1356, 4)
VWD_FIELD(TermParams, strips, 1360, 4)
VWD_FIELD(TermParams, scale, 1364, 4)
VWD_FIELD(TermParams, adjacent, 1368, 4)
VWD_FIELD(TermParams, unused, 1372, 4)

VWD_SIZE(ListTermParams, 1272)
VWD_FIELD(ListTermParams, to, 0, 1112)
VWD_FIELD(ListTermParams, rows, 1112, 16)
VWD_FIELD(ListTermParams, tokens, 1128, 24)
VWD_FIELD(ListTermParams, mean_v, 1152, 32)
VWD_FIELD(ListTermParams, covariance, 1184, 40)
VWD_FIELD(ListTermParams, log_mass, 1224, 32)
VWD_FIELD(ListTermParams, count, 1256, 4)
VWD_FIELD(ListTermParams, keys, 1260, 4)
VWD_FIELD(ListTermParams, offset, 1264, 4)
VWD_FIELD(ListTermParams, scale, 1268, 4)

VWD_CONSTANT(TERM_THREADS, 128)
VWD_CONSTANT(HEADS, 4)
VWD_CONSTANT(STRIP, 64)
VWD_CONSTANT(TERM_ROW_BYTES, 512)
