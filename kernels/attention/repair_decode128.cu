// Repair in one launch, of rows with 128 channels (repair variant decode128): repair_decode128.cuh.
// targets: compute_90

#include "attention/repair_decode128.cuh"

REPAIR_DECODE128_KERNEL(repair_decode128_f16, Float16)
REPAIR_DECODE128_KERNEL(repair_decode128_bf16, Bfloat16)
REPAIR_DECODE128_KERNEL(repair_decode128_fp8, Float8)
