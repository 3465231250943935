// Selection of blocks by AXIS in INT4, in one launch: the kernels of axis_cluster.cuh.
//
// targets: compute_90

#include "select/axis_cluster.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axis_cluster_alone_128(const __grid_constant__ AxisTileParams p) { select_lists<1, 4, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_cluster_4_128(const __grid_constant__ AxisTileParams p) { select_lists<1, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_cluster_8_128(const __grid_constant__ AxisTileParams p) { select_lists<2, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axis_cluster_16_128(const __grid_constant__ AxisTileParams p) { select_lists<4, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axis_cluster_4(const __grid_constant__ AxisTileParams p) { select_lists<1, 0>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axis_cluster_16(const __grid_constant__ AxisTileParams p) { select_lists<4, 0>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axis_mass_4_128(const __grid_constant__ AxisMassParams p) { select_lists_and_masses<1, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axis_mass_8_128(const __grid_constant__ AxisMassParams p) { select_lists_and_masses<2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axis_mass_16_128(const __grid_constant__ AxisMassParams p) { select_lists_and_masses<4>(p); }
