// Decode attention to bfloat16 keys and values on tensor cores (variant mma): out = Σ softmax(scale · q · k) v over a list of blocks, or over everything.
//
// Bytes: keys and values of what is listed, once for all heads of a group and all query positions that share the list: 2 · (D + Dv) a token and KV head.
// When it runs, and its pipeline: mma.cuh; parameters and how work is split: attention.cuh; joins: join.cuh.
//
// The kernels differ in the largest D and Dv that they take; narrower heads are padded in shared memory.
//
// targets: compute_80, compute_90

#include "attention/mma.cuh"

ATTENTION_KERNEL(attention_mma_bf16_128, MmaCompute<Bfloat16, 128, 128>)
ATTENTION_KERNEL(attention_mma_bf16_256, MmaCompute<Bfloat16, 256, 256>)
ATTENTION_KERNEL(attention_mma_bf16_576, MmaCompute<Bfloat16, 576, 512>)
