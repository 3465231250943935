// Decode attention to FP8 (e4m3 or e5m2) keys and values on tensor cores (variant mma): out = Σ softmax(scale · q · k) v over a list of blocks, or over everything.
//
// Bytes: keys and values of what is listed, once for all heads of a group and all query positions that share the list: D + Dv a token and KV head.
// When it runs, and its pipeline: mma.cuh; parameters and how work is split: attention.cuh; joins: join.cuh.
//
// The kernels differ in the largest D and Dv that they take; narrower heads are padded in shared memory.
//
// targets: compute_80, compute_90

#include "attention/mma.cuh"

ATTENTION_KERNEL(attention_mma_fp8_128, MmaCompute<Float8, 128, 128>)
ATTENTION_KERNEL(attention_mma_fp8_256, MmaCompute<Float8, 256, 256>)
ATTENTION_KERNEL(attention_mma_fp8_576, MmaCompute<Float8, 576, 512>)
