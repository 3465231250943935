// Decode attention to FP8 keys and values of 128 channels (variant decode128): decode128.cuh.
// targets: compute_90

#include "attention/decode128.cuh"

DECODE128_KERNEL(attention_decode128_fp8_4, Rows8Form<Float8, 4>)
DECODE128_KERNEL(attention_decode128_fp8_8, Rows8Form<Float8, 8>)
DECODE128_KERNEL(attention_decode128_fp8_16, Rows16Form<Float8>)
