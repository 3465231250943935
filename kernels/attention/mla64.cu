// Decode attention to latents of 16 bits, 64 rows at a time (variant mla64): mla64.cuh.
// targets: compute_90a

#include "attention/mla64.cuh"

MLA64_KERNEL(attention_mla64_f16, Float16, false)
MLA64_KERNEL(attention_mla64_bf16, Bfloat16, true)

extern "C" __global__ void __launch_bounds__(MOST_PARTS *PART_THREADS, 4) join_mla64(const __grid_constant__ AttentionParams p) {
    join_mla64_states(p);
}
