// Means and axes of blocks: the kernels of axis.cuh.
//
// targets: compute_80, compute_90

#include "index/axis.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2) index_axis_8(const __grid_constant__ AxisParams p, const __grid_constant__ Layers layers) {
    update_axes<1, false>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) index_axis_16(const __grid_constant__ AxisParams p, const __grid_constant__ Layers layers) {
    update_axes<2, false>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_axis_32(const __grid_constant__ AxisParams p, const __grid_constant__ Layers layers) {
    update_axes<4, false>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_axis_wide_8(const __grid_constant__ AxisParams p, const __grid_constant__ Layers layers) {
    update_axes<1, true>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_axis_wide_16(const __grid_constant__ AxisParams p, const __grid_constant__ Layers layers) {
    update_axes<2, true>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_axis_wide_32(const __grid_constant__ AxisParams p, const __grid_constant__ Layers layers) {
    update_axes<4, true>(p, layers);
}
