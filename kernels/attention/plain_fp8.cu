// Decode attention to FP8 keys and values of 128 channels in blocks and pages of whole tiles: plain.cuh of up
// to eight rows, rows.cuh of up to sixteen.
// targets: compute_90

#include "attention/rows.cuh"

PLAIN_KERNEL(attention_plain_fp8_4, Float8, 4)
PLAIN_KERNEL(attention_plain_fp8_8, Float8, 8)
ROWS_KERNEL(attention_plain_fp8_16, Float8)
