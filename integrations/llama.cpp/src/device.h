// The device: what it takes of a graph, and how it computes that. The entry objects give it to ggml.
#pragma once

#include "attention.h"
#include "ggml-backend.h"

namespace vanward {

/** What one context computes with. ggml calls it from one thread at a time. */
class Context {
  public:
    Context();
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    void set_threads(int threads);
    ggml_status compute(ggml_cgraph *graph);

  private:
    bool write(ggml_tensor *op);
    bool attend(ggml_tensor *op);
    bool pass_to_ggml(ggml_tensor *op);

    int threads_ = 1;
    Session session_;
    Attention attention_;
    ggml_backend_t cpu_ = nullptr;
    ggml_context *memory_ = nullptr;
    ggml_cgraph *alone_ = nullptr;
};

/** Whether the device takes this node. Called while a graph is split, possibly without data. Thread-safe. */
bool takes(const ggml_tensor *op);

/** The buffer type of the CPU, which is the device's, too. */
ggml_backend_buffer_type_t buffer_type();

/** Writes what was counted to ggml's log. */
void log_counters(ggml_log_level level);

}  // namespace vanward
