// Decode attention to float16 keys and values of 128 channels (variant decode128): decode128.cuh.
// targets: compute_90

#include "attention/decode128.cuh"

DECODE128_KERNEL(attention_decode128_f16_4, Rows8Form<Float16, 4>)
DECODE128_KERNEL(attention_decode128_f16_8, Rows8Form<Float16, 8>)
DECODE128_KERNEL(attention_decode128_f16_16, Rows16Form<Float16>)
