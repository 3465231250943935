// Decode attention to latents of 16 bits, 16 rows at a time (variant mla16): mla16.cuh.
// targets: compute_90

#include "attention/mla16.cuh"

MLA16_KERNEL(attention_mla16_f16, Float16)
MLA16_KERNEL(attention_mla16_bf16, Bfloat16)
