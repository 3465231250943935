// Attention for up to 64 rows to 16-bit keys and values of 256 channels (variant verify256): verify128.cuh.
// targets: compute_90a

#include "attention/verify256_width.cuh"
#include "attention/verify128.cuh"

extern "C" __global__ void __launch_bounds__(VERIFY_THREADS, 1) attention_verify256_f16(const __grid_constant__ AttentionParams p, const __grid_constant__ Boxes boxes) {
    attention_verify128<Float16, false, ChainRows>(p, boxes);
}
extern "C" __global__ void __launch_bounds__(VERIFY_THREADS, 1) attention_verify256_bf16(const __grid_constant__ AttentionParams p, const __grid_constant__ Boxes boxes) {
    attention_verify128<Bfloat16, true, ChainRows>(p, boxes);
}
