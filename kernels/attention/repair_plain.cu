// Repair in one launch of the common case: repair_plain.cuh.
// targets: compute_90

#include "attention/repair_plain.cuh"

REPAIR_PLAIN_KERNEL(repair_plain_f16, Float16)
REPAIR_PLAIN_KERNEL(repair_plain_bf16, Bfloat16)
REPAIR_PLAIN_KERNEL(repair_plain_fp8, Float8)
