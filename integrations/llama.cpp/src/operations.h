// What the nodes of a graph do, as far as a wrapped GPU needs to know.
#pragma once

#include "ggml.h"

#include <cstdint>

namespace vanward {

enum class Kind : uint8_t { unknown, attention, write, rotation, experts, view, other };

Kind kind_of(const ggml_tensor *op);

/** Whether a tensor is there before the graph is computed. */
bool is_input(const ggml_tensor *tensor);

/** Index behind the last of these nodes that writes queries; 0 where there is none, or nothing but views follows it. */
int end_of_queries(ggml_tensor **nodes, int from, int to, const ggml_tensor *q);

}  // namespace vanward
