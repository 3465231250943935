// Decode attention to keys and values of 256 channels in 16 bits (variant decode256): decode128.cuh.
// targets: compute_90

#include "attention/decode128.cuh"

DECODE128_KERNEL(attention_decode256_f16_4, Rows8Form<Float16, 4, 256>)
DECODE128_KERNEL(attention_decode256_f16_8, Rows8Form<Float16, 8, 256>)
DECODE128_KERNEL(attention_decode256_bf16_4, Rows8Form<Bfloat16, 4, 256>)
DECODE128_KERNEL(attention_decode256_bf16_8, Rows8Form<Bfloat16, 8, 256>)
