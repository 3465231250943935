// Decode attention to 16-bit keys of up to 576 channels, whose first are the values (MLA): latent.cuh.
// targets: compute_90

#include "attention/latent.cuh"

LATENT_KERNEL(attention_latent_f16, Float16)
LATENT_KERNEL(attention_latent_bf16, Bfloat16)
