// Decode attention to float16 keys and values of 128 channels in blocks and pages of whole tiles, up to 16 rows: plain.cuh.
// targets: compute_90

#include "attention/plain.cuh"

PLAIN_KERNEL(attention_plain_f16_4, Float16, 4)
PLAIN_KERNEL(attention_plain_f16_8, Float16, 8)
PLAIN_KERNEL(attention_plain_f16_16, Float16, 16)
