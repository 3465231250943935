// Selection params blocks by AXIS in INT4 from long lists, in two launches: the kernels params axis_two_launches.cuh.
//
// targets: compute_90

#include "select/axis_two_launches.cuh"

// Two CTAs share a multiprocessor's registers, so that both kernels have a place. 16 heads take more registers: the second kernel waits.
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_multiply_4_128(const __grid_constant__ AxisTwoLaunchesParams p) { multiply_lists<1, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_multiply_8_128(const __grid_constant__ AxisTwoLaunchesParams p) { multiply_lists<2, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axis_multiply_16_128(const __grid_constant__ AxisTwoLaunchesParams p) { multiply_lists<4, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_multiply_4(const __grid_constant__ AxisTwoLaunchesParams p) { multiply_lists<1, 0>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axis_multiply_16(const __grid_constant__ AxisTwoLaunchesParams p) { multiply_lists<4, 0>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_weigh_4(const __grid_constant__ AxisTwoLaunchesParams p) { select_lists<1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_weigh_8(const __grid_constant__ AxisTwoLaunchesParams p) { select_lists<2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_weigh_16(const __grid_constant__ AxisTwoLaunchesParams p) { select_lists<4>(p); }
