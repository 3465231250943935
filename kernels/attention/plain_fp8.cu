// Decode attention to FP8 keys and values of 128 channels in blocks and pages of whole tiles, up to 16 rows: plain.cuh.
// targets: compute_90

#include "attention/plain.cuh"

PLAIN_KERNEL(attention_plain_fp8_4, Float8, 4)
PLAIN_KERNEL(attention_plain_fp8_8, Float8, 8)
PLAIN_KERNEL(attention_plain_fp8_16, Float8, 16)
