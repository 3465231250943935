// Where the fields of src/ops/contents/cuda.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(Number, 120)
VWD_FIELD(Number, of, 0, 40)
VWD_FIELD(Number, less, 40, 40)
VWD_FIELD(Number, per_position, 80, 8)
VWD_FIELD(Number, plus, 88, 8)
VWD_FIELD(Number, divisor, 96, 8)
VWD_FIELD(Number, times, 104, 8)
VWD_FIELD(Number, most, 112, 8)

VWD_SIZE(Report, 24)
VWD_FIELD(Report, element, 0, 8)
VWD_FIELD(Report, value, 8, 8)
VWD_FIELD(Report, other, 16, 8)

VWD_SIZE(RuleParams, 704)
VWD_FIELD(RuleParams, tensor, 0, 40)
VWD_FIELD(RuleParams, shape, 40, 32)
VWD_FIELD(RuleParams, applies, 72, 240)
VWD_FIELD(RuleParams, from, 312, 120)
VWD_FIELD(RuleParams, to, 432, 120)
VWD_FIELD(RuleParams, below, 552, 120)
VWD_FIELD(RuleParams, least, 672, 8)
VWD_FIELD(RuleParams, along, 680, 4)
VWD_FIELD(RuleParams, last, 684, 4)
VWD_FIELD(RuleParams, is, 688, 4)
VWD_FIELD(RuleParams, padding, 692, 4)
VWD_FIELD(RuleParams, report, 696, 8)

VWD_CONSTANT(THREADS, 256)
VWD_CONSTANT(WITHIN, 0)
VWD_CONSTANT(ASCENDING, 1)
VWD_CONSTANT(DISTINCT, 2)
VWD_CONSTANT(FACTOR, 3)
VWD_CONSTANT(FINITE, 4)
VWD_CONSTANT(NUMBER, 5)
