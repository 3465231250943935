// Decode attention to FP8 (e4m3 or e5m2) keys and values on tensor cores: out = Σ softmax(scale·q·k) v over a list of blocks, or over everything.
//
// Bytes: keys and values of what is listed once for all heads of a group and all query positions that share the list, 2·D a token and KV
// head of 16-bit elements; the rest is small. Cut and parameters: attention.cuh; pipeline: mma.cuh; joins: join.cuh.
//
// Kernels differ in the largest D and Dv that they take; a head of fewer channels is padded in shared memory.
//
// targets: compute_80, compute_90

#include "attention/mma.cuh"

ATTENTION_KERNEL(attention_fp8_128, MmaEngine<Float8, 128, 128>)
ATTENTION_KERNEL(attention_fp8_256, MmaEngine<Float8, 256, 256>)
ATTENTION_KERNEL(attention_fp8_576, MmaEngine<Float8, 576, 512>)
