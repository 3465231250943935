// Decode attention to keys and values in INT4 of 128 channels beside bfloat16 (variant int4_128): decode128.cuh.
// targets: compute_90

#include "attention_int4/decode128.cuh"

INT4_KERNEL(attention_int4_128_bf16_4, Int4Rows4<Bfloat16>)
INT4_KERNEL(attention_int4_128_bf16_8, Int4Rows8<Bfloat16>)
INT4_KERNEL(attention_int4_128_bf16_16, Int4Rows16<Bfloat16>)
