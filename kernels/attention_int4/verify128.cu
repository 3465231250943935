// Attention for up to 64 rows to keys and values in INT4 of 128 channels (variant int4_verify128): verify128.cuh.
// targets: compute_90a

#include "attention/verify128_width.cuh"
#include "attention_int4/verify128.cuh"

extern "C" __global__ void __launch_bounds__(CODED_THREADS, 1) attention_int4_verify128_f16(const __grid_constant__ Int4Params p) {
    attention_int4_verify128<Float16, false, ChainRows>(p);
}
extern "C" __global__ void __launch_bounds__(CODED_THREADS, 1) attention_int4_verify128_bf16(const __grid_constant__ Int4Params p) {
    attention_int4_verify128<Bfloat16, true, ChainRows>(p);
}
