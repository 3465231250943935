// Attention for up to 64 rows to few short lists of 16-bit keys and values of 64 channels (variant verify64_short): verify128_short.cuh.
// targets: compute_90a

#include "attention/verify64_width.cuh"
#include "attention/verify128_short.cuh"

extern "C" __global__ void __launch_bounds__(SHORT_THREADS, 1) attention_verify64_short_f16(const __grid_constant__ AttentionParams p, const __grid_constant__ Boxes boxes) {
    attention_verify128_short<Float16, false, ChainRows>(p, boxes);
}
extern "C" __global__ void __launch_bounds__(SHORT_THREADS, 1) attention_verify64_short_bf16(const __grid_constant__ AttentionParams p, const __grid_constant__ Boxes boxes) {
    attention_verify128_short<Bfloat16, true, ChainRows>(p, boxes);
}
