// Attention of up to 64 rows of draft trees to few short lists (variant verify128_short): attention/verify128_short.cuh, and rows.cuh.
//
// targets: compute_90a

#include "attention/verify128_width.cuh"
#include "attention/verify128_short.cuh"
#include "attention_tree/rows.cuh"

extern "C" __global__ void __launch_bounds__(SHORT_THREADS, 1) attention_verify128_short_tree_f16(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Boxes boxes) {
    attention_verify128_short<Float16, false, TreeRows<TreeAttentionParams, SHORT_REGISTERS>>(p.to, boxes);
}
extern "C" __global__ void __launch_bounds__(SHORT_THREADS, 1) attention_verify128_short_tree_bf16(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Boxes boxes) {
    attention_verify128_short<Bfloat16, true, TreeRows<TreeAttentionParams, SHORT_REGISTERS>>(p.to, boxes);
}
