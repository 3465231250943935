// Summaries of keys: the kernels of update.cuh.
//
// targets: compute_80, compute_90

#include "index/update.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 3) index_minmax_8(const __grid_constant__ UpdateParams p, const __grid_constant__ Layers layers) {
    update_minmax<1>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 3) index_minmax_16(const __grid_constant__ UpdateParams p, const __grid_constant__ Layers layers) {
    update_minmax<2>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) index_minmax_32(const __grid_constant__ UpdateParams p, const __grid_constant__ Layers layers) {
    update_minmax<4>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) index_means_8(const __grid_constant__ UpdateParams p, const __grid_constant__ Layers layers) {
    update_means<1>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) index_means_16(const __grid_constant__ UpdateParams p, const __grid_constant__ Layers layers) {
    update_means<2>(p, layers);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) index_means_32(const __grid_constant__ UpdateParams p, const __grid_constant__ Layers layers) {
    update_means<4>(p, layers);
}
