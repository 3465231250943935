// Decode attention to bfloat16 keys and values of 128 channels in blocks and pages of whole tiles: plain.cuh of up
// to eight rows, rows.cuh of up to sixteen.
// targets: compute_90

#include "attention/rows.cuh"

PLAIN_KERNEL(attention_plain_bf16_4, Bfloat16, 4)
PLAIN_KERNEL(attention_plain_bf16_8, Bfloat16, 8)
ROWS_KERNEL(attention_plain_bf16_16, Bfloat16)
