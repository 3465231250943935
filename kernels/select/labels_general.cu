// Selection by labels of every list: the kernels of labels_general.cuh.
//
// targets: compute_80, compute_90

#include "select/labels_general.cuh"

