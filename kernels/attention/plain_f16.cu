// Decode attention to float16 keys and values of 128 channels in blocks and pages of whole tiles: plain.cuh of up
// to eight rows, rows.cuh of up to sixteen.
// targets: compute_90

#include "attention/rows.cuh"

PLAIN_KERNEL(attention_plain_f16_4, Float16, 4)
PLAIN_KERNEL(attention_plain_f16_8, Float16, 8)
ROWS_KERNEL(attention_plain_f16_16, Float16)
