// ggml's functions, found in the library that loads this one. Releases name ggml's libraries differently, so that none can be
// linked; the loader's own functions are the right ones in each of them.
#pragma once

#include "ggml-backend.h"

#define VANWARD_GGML_CALLS(X)                                                                                                  \
    X(ggml_backend_buffer_free)                                                                                                \
    X(ggml_backend_buffer_get_base)                                                                                            \
    X(ggml_backend_buffer_get_size)                                                                                            \
    X(ggml_backend_buffer_get_type)                                                                                            \
    X(ggml_backend_buft_alloc_buffer)                                                                                          \
    X(ggml_backend_buft_is_host)                                                                                               \
    X(ggml_backend_dev_backend_reg)                                                                                            \
    X(ggml_backend_dev_buffer_type)                                                                                            \
    X(ggml_backend_dev_by_type)                                                                                                \
    X(ggml_backend_dev_count)                                                                                                  \
    X(ggml_backend_dev_description)                                                                                            \
    X(ggml_backend_dev_get)                                                                                                    \
    X(ggml_backend_dev_get_props)                                                                                              \
    X(ggml_backend_dev_init)                                                                                                   \
    X(ggml_backend_dev_name)                                                                                                   \
    X(ggml_backend_event_free)                                                                                                 \
    X(ggml_backend_event_new)                                                                                                  \
    X(ggml_backend_event_record)                                                                                               \
    X(ggml_backend_event_wait)                                                                                                 \
    X(ggml_backend_free)                                                                                                       \
    X(ggml_backend_graph_compute)                                                                                              \
    X(ggml_backend_graph_compute_async)                                                                                        \
    X(ggml_backend_reg_count)                                                                                                  \
    X(ggml_backend_reg_dev_count)                                                                                              \
    X(ggml_backend_reg_dev_get)                                                                                                \
    X(ggml_backend_reg_get)                                                                                                    \
    X(ggml_backend_reg_get_proc_address)                                                                                       \
    X(ggml_backend_synchronize)                                                                                                \
    X(ggml_fp32_to_bf16_row)                                                                                                   \
    X(ggml_fp32_to_fp16_row)                                                                                                   \
    X(ggml_free)                                                                                                               \
    X(ggml_get_rows)                                                                                                           \
    X(ggml_graph_add_node)                                                                                                     \
    X(ggml_graph_clear)                                                                                                        \
    X(ggml_graph_n_nodes)                                                                                                      \
    X(ggml_graph_nodes)                                                                                                        \
    X(ggml_graph_overhead_custom)                                                                                              \
    X(ggml_init)                                                                                                               \
    X(ggml_is_quantized)                                                                                                       \
    X(ggml_log_get)                                                                                                            \
    X(ggml_new_graph_custom)                                                                                                   \
    X(ggml_new_tensor_1d)                                                                                                      \
    X(ggml_op_name)                                                                                                            \
    X(ggml_reset)                                                                                                              \
    X(ggml_type_name)                                                                                                          \
    X(ggml_version)                                                                                                            \
    X(ggml_view_2d)

namespace vanward {

struct GgmlCalls {
#define X(name) decltype(&::name) name = nullptr;
    VANWARD_GGML_CALLS(X)
#undef X
};

/** The functions; valid once `find_ggml` has succeeded. */
extern GgmlCalls ggml;

/**
 * Finds the functions in the library that holds the address `caller`, or in those that it links.
 * Returns NULL, or the name of a function that is missing.
 */
const char *find_ggml(const void *caller);

/** Writes one line to ggml's log; to stderr where ggml has none. */
void log(enum ggml_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace vanward
