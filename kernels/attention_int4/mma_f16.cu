// Attention to keys and values in INT4 beside float16 on tensor cores (variant int4_mma): mma.cuh. The kernels differ in the largest D and Dv that they take.
//
// targets: compute_80, compute_90

#include "attention_int4/mma.cuh"

INT4_MMA_KERNEL(attention_int4_mma_f16_64, Int4MmaCompute<Float16, 64>)
INT4_MMA_KERNEL(attention_int4_mma_f16_128, Int4MmaCompute<Float16, 128>)
INT4_MMA_KERNEL(attention_int4_mma_f16_256, Int4MmaCompute<Float16, 256>)
