// Selection of blocks by the bounds of their keys: the kernels of minmax.cuh.
//
// targets: compute_80, compute_90

#include "select/minmax.cuh"

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) select_minmax_16(const __grid_constant__ MinMaxParams p) { select_minmax<2>(p); }
extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) select_minmax_32(const __grid_constant__ MinMaxParams p) { select_minmax<4>(p); }
