// Attention of queries of every type to keys and values of every type and stride, in float32 (variant general).
//
// Runs where no other variant takes the tensors: float32 queries or keys, channels that do not lie side by side, rows that are not whole 16-byte
// units, heads wider than mma takes: src/ops/attention/device/choose.rs. It is slow: a warp attends for eight rows to one token at a time, its
// lanes side by side along the channels. Splitting, joining and writing are those of mma (attend_share.cuh, join.cuh).
//
// targets: compute_80, compute_90

#include "attention/general.cuh"

ATTENTION_KERNEL(attention_general, GeneralCompute)
