// Attention of up to 64 rows of draft trees, nodes times query heads of a KV head, to 16-bit keys and values of 256 channels (variant verify256):
// attention/verify128.cuh, and rows.cuh. Tiles before the tree cost what they cost for a chain.
//
// targets: compute_90a

#include "attention/verify256_width.cuh"
#include "attention_tree/rows.cuh"

extern "C" __global__ void __launch_bounds__(VERIFY_THREADS, 1) attention_verify256_tree_f16(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Boxes boxes) {
    attention_verify128<Float16, false, TreeRows<TreeAttentionParams, 216>>(p.to, boxes);
}
extern "C" __global__ void __launch_bounds__(VERIFY_THREADS, 1) attention_verify256_tree_bf16(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Boxes boxes) {
    attention_verify128<Bfloat16, true, TreeRows<TreeAttentionParams, 216>>(p.to, boxes);
}
