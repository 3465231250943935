// What is written into a cache outside of graphs: a state that is restored, a stream that is copied, a buffer that is cleared.
#pragma once

#include "ggml-backend.h"

namespace vanward {

/**
 * From now on a write by ggml_backend_tensor_set and its like into the buffer also tells the cache that lies in it: the buffer's table of functions
 * gets ours, which call those that it had. Does nothing where the buffer is watched. Thread-safe.
 */
void watch(ggml_backend_buffer_t buffer);

}  // namespace vanward
