// Decode attention of many rows to 16-bit keys of up to 576 channels, whose first are the values (MLA): latent_many.cuh.
// targets: compute_90a

#include "attention/latent_many.cuh"

LATENT_MANY_KERNEL(attention_latent_many_f16, Float16, false)
LATENT_MANY_KERNEL(attention_latent_many_bf16, Bfloat16, true)

extern "C" __global__ void __launch_bounds__(MOST_PARTS *PART_THREADS, 4) join_latent_many(const __grid_constant__ AttentionParams p) {
    join_many(p);
}
