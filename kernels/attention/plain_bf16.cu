// Decode attention to bfloat16 keys and values of 128 channels in blocks and pages of whole tiles, up to 16 rows: plain.cuh.
// targets: compute_90

#include "attention/plain.cuh"

PLAIN_KERNEL(attention_plain_bf16_4, Bfloat16, 4)
PLAIN_KERNEL(attention_plain_bf16_8, Bfloat16, 8)
PLAIN_KERNEL(attention_plain_bf16_16, Bfloat16, 16)
