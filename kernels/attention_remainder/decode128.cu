// Decode attention to 16-bit keys and values of 128 channels that a list names, and the term of those that it leaves out: decode128.cuh.
// targets: compute_90

#include "attention_remainder/decode128.cuh"

DECODE128_TERM_KERNEL(attention_decode128_term_f16_4, Float16, 4)
DECODE128_TERM_KERNEL(attention_decode128_term_f16_8, Float16, 8)
DECODE128_TERM_KERNEL(attention_decode128_term_f16_16, Float16, 16)
DECODE128_TERM_KERNEL(attention_decode128_term_bf16_4, Bfloat16, 4)
DECODE128_TERM_KERNEL(attention_decode128_term_bf16_8, Bfloat16, 8)
DECODE128_TERM_KERNEL(attention_decode128_term_bf16_16, Bfloat16, 16)
