// Decode attention to keys and values in INT4 of 128 channels beside float16 (variant int4_128): decode128.cuh.
// targets: compute_90

#include "attention_int4/decode128.cuh"

INT4_KERNEL(attention_int4_128_f16_4, Int4Rows4<Float16>)
INT4_KERNEL(attention_int4_128_f16_8, Int4Rows8<Float16>)
INT4_KERNEL(attention_int4_128_f16_16, Int4Rows16<Float16>)
