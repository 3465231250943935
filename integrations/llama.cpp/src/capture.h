// Work of a stream captured into a CUDA graph.
#pragma once

#include <memory>

namespace vanward {

/** A capture of what is enqueued on a stream, and on those that wait for its events. Over, whatever happened, when this is gone. */
class Capture {
  public:
    /** Whether the driver has the functions. */
    static bool is_possible();

    /** Begins. The stream's context is current. Throws std::runtime_error. */
    explicit Capture(void *stream);
    ~Capture();
    Capture(const Capture &) = delete;
    Capture &operator=(const Capture &) = delete;

    enum class Made { anew, updated };
    /**
     * Ends. `graph` becomes what was captured: updated where the kernels are the same, in clusters of the same sizes, and the driver can;
     * otherwise made anew. Throws std::runtime_error.
     */
    Made end(std::shared_ptr<void> &graph);

  private:
    void *stream_;
    bool is_under_way_ = false;
};

/** Enqueues a graph. Throws std::runtime_error. */
void launch(const std::shared_ptr<void> &graph, void *stream);

}  // namespace vanward
