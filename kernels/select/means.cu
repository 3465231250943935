// Selection of blocks by mean keys, and by AXIS in every form: the kernels of means.cuh. The masses of what AXIS leaves out: those of mass.cuh.
//
// targets: compute_80, compute_90

#include "select/mass.cuh"

extern "C" __global__ void __launch_bounds__(SCORING_THREADS, 1) select_means_score_16(const __grid_constant__ MeanParams p) { score<2, false>(p); }
extern "C" __global__ void __launch_bounds__(SCORING_THREADS, 1) select_means_score_32(const __grid_constant__ MeanParams p) { score<4, false>(p); }
extern "C" __global__ void __launch_bounds__(SCORING_THREADS, 1) select_axis_general_score_4(const __grid_constant__ MeanParams p) { score<0, true>(p); }
extern "C" __global__ void __launch_bounds__(SCORING_THREADS, 1) select_axis_general_score_16(const __grid_constant__ MeanParams p) { score<2, true>(p); }
extern "C" __global__ void __launch_bounds__(SCORING_THREADS, 1) select_axis_general_score_32(const __grid_constant__ MeanParams p) { score<4, true>(p); }
extern "C" __global__ void __launch_bounds__(SCORING_THREADS, 1) select_mass_4(const __grid_constant__ MassParams p) { add_masses<0>(p); }
extern "C" __global__ void __launch_bounds__(SCORING_THREADS, 1) select_mass_16(const __grid_constant__ MassParams p) { add_masses<2>(p); }
extern "C" __global__ void __launch_bounds__(SCORING_THREADS, 1) select_mass_32(const __grid_constant__ MassParams p) { add_masses<4>(p); }
