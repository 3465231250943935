// A graph of ggml's.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace vanward {

/** ggml_cgraph, which backends are given and no public header declares: as ggml 0.25 … 0.27 have it. */
struct Graph {
    int size, n_nodes, n_leafs;
    ggml_tensor **nodes, **grads, **grad_accs, **leafs;
    int32_t *use_counts;
    struct {
        size_t size;
        void *used, *keys;
    } visited;
    int order;
    uint64_t uid;
};

}  // namespace vanward
