// What is written into buffers of a GPU outside of graphs: into a cache, as when a state is restored, and into the inputs of graphs.
#pragma once

#include "ggml-backend.h"
#include "inputs.h"

#include <memory>

namespace vanward {

/**
 * From now on a write by ggml_backend_tensor_set and its like into the buffer also tells the cache and the inputs that lie in it: the buffer's table of
 * functions gets ours, which call those that it had. Does nothing where the buffer is watched. Thread-safe.
 */
void watch(ggml_backend_buffer_t buffer);

/** The inputs in a buffer, which is watched from now on. A buffer that another one's memory was given to has others. Thread-safe. */
std::shared_ptr<Inputs> inputs_of(ggml_backend_buffer_t buffer);

/** Tells of a write that did not go through the buffer's functions. Thread-safe. */
void overwritten(const ggml_tensor *tensor, size_t offset, size_t bytes);
/** The same of a whole tensor. */
void overwritten(const ggml_tensor *tensor);

}  // namespace vanward
