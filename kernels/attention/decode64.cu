// Decode attention to keys and values of 64 channels in 16 bits or FP8 (variant decode64): decode128.cuh.
// targets: compute_90

#include "attention/decode128.cuh"

DECODE128_KERNEL(attention_decode64_f16_4, Rows8Form<Float16, 4, 64>)
DECODE128_KERNEL(attention_decode64_f16_8, Rows8Form<Float16, 8, 64>)
DECODE128_KERNEL(attention_decode64_bf16_4, Rows8Form<Bfloat16, 4, 64>)
DECODE128_KERNEL(attention_decode64_bf16_8, Rows8Form<Bfloat16, 8, 64>)
DECODE128_KERNEL(attention_decode64_fp8_4, Rows8Form<Float8, 4, 64>)
DECODE128_KERNEL(attention_decode64_fp8_8, Rows8Form<Float8, 8, 64>)
