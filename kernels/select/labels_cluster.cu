// Selection by labels of lists that fit in a cluster: the kernels of labels_cluster.cuh.
//
// targets: compute_90

#include "select/labels_cluster.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_labels_cluster_tokens_32(const __grid_constant__ LabelClusterParams p) { select_labels<1, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_labels_cluster_tokens_64(const __grid_constant__ LabelClusterParams p) { select_labels<2, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_labels_cluster_tokens_128(const __grid_constant__ LabelClusterParams p) { select_labels<4, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_labels_cluster_blocks_32(const __grid_constant__ LabelClusterParams p) { select_labels<1, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_labels_cluster_blocks_64(const __grid_constant__ LabelClusterParams p) { select_labels<2, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_labels_cluster_blocks_128(const __grid_constant__ LabelClusterParams p) { select_labels<4, true>(p); }
