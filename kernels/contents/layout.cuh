// Where the fields of src/ops/contents/cuda.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(Number, 112)
VWD_FIELD(Number, of, 0, 40)
VWD_FIELD(Number, less, 40, 40)
VWD_FIELD(Number, per_position, 80, 8)
VWD_FIELD(Number, plus, 88, 8)
VWD_FIELD(Number, divisor, 96, 8)
VWD_FIELD(Number, most, 104, 8)

VWD_SIZE(Report, 24)
VWD_FIELD(Report, element, 0, 8)
VWD_FIELD(Report, value, 8, 8)
VWD_FIELD(Report, other, 16, 8)

VWD_SIZE(RuleParams, 664)
VWD_FIELD(RuleParams, tensor, 0, 40)
VWD_FIELD(RuleParams, shape, 40, 32)
VWD_FIELD(RuleParams, applies, 72, 224)
VWD_FIELD(RuleParams, from, 296, 112)
VWD_FIELD(RuleParams, to, 408, 112)
VWD_FIELD(RuleParams, below, 520, 112)
VWD_FIELD(RuleParams, least, 632, 8)
VWD_FIELD(RuleParams, along, 640, 4)
VWD_FIELD(RuleParams, last, 644, 4)
VWD_FIELD(RuleParams, is, 648, 4)
VWD_FIELD(RuleParams, padding, 652, 4)
VWD_FIELD(RuleParams, report, 656, 8)

VWD_CONSTANT(THREADS, 256)
VWD_CONSTANT(WITHIN, 0)
VWD_CONSTANT(ASCENDING, 1)
VWD_CONSTANT(DISTINCT, 2)
VWD_CONSTANT(FACTOR, 3)
VWD_CONSTANT(FINITE, 4)
VWD_CONSTANT(NUMBER, 5)
