// Attention for up to 64 rows to 16-bit keys and values of 128 channels (variant verify128): verify128.cuh.
// targets: compute_90a

#include "attention/verify128.cuh"

VERIFY128_KERNEL(attention_verify128_f16, Float16, false)
VERIFY128_KERNEL(attention_verify128_bf16, Bfloat16, true)
