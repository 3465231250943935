// Repair in one launch of up to 64 rows with 128 channels in 16 bits (repair variant verify128): repair_verify128.cuh.
// targets: compute_90a

#include "attention/verify128_width.cuh"
#include "attention/repair_verify128.cuh"

REPAIR_VERIFY128_KERNEL(repair_verify128_f16, Float16, false)
REPAIR_VERIFY128_KERNEL(repair_verify128_bf16, Bfloat16, true)
