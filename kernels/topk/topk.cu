// The exact top k of rows of scores: the kernels of topk.cuh.
//
// targets: compute_80, compute_90

#include "topk/topk.cuh"

extern "C" __global__ void __launch_bounds__(SHORT, 2) topk_short_ascending_16(const __grid_constant__ TopKParams p) { select_short<2, false>(p); }
extern "C" __global__ void __launch_bounds__(SHORT, 2) topk_short_ascending_32(const __grid_constant__ TopKParams p) { select_short<4, false>(p); }
extern "C" __global__ void __launch_bounds__(SHORT, 2) topk_short_best_first_16(const __grid_constant__ TopKParams p) { select_short<2, true>(p); }
extern "C" __global__ void __launch_bounds__(SHORT, 2) topk_short_best_first_32(const __grid_constant__ TopKParams p) { select_short<4, true>(p); }
extern "C" __global__ void __launch_bounds__(LONG, 1) topk_long_ascending_16(const __grid_constant__ TopKParams p) { select_long<2, false>(p); }
extern "C" __global__ void __launch_bounds__(LONG, 1) topk_long_ascending_32(const __grid_constant__ TopKParams p) { select_long<4, false>(p); }
extern "C" __global__ void __launch_bounds__(LONG, 1) topk_long_best_first_16(const __grid_constant__ TopKParams p) { select_long<2, true>(p); }
extern "C" __global__ void __launch_bounds__(LONG, 1) topk_long_best_first_32(const __grid_constant__ TopKParams p) { select_long<4, true>(p); }
