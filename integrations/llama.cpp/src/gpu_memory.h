// A GPU of ggml's that the wrapper shows as its own, and its memory.
#pragma once

#include "ggml-backend.h"
#include "memory.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace vanward {

/** One wrapped device. It lives as long as the process. */
class Gpu {
  public:
    Gpu(ggml_backend_dev_t inner, std::string name);

    ggml_backend_dev_t inner() const { return inner_; }
    const char *name() const { return name_.c_str(); }
    const char *description() const { return description_.c_str(); }
    ggml_backend_buffer_type_t buffer_type() const;
    /** Whether the host reads its memory, as where the CPU is wrapped for tests. */
    bool is_host() const;

    /** The share of free memory that summaries take at most if the rest becomes a cache. */
    size_t reserved_of(size_t free) const;
    /** Notes an operation that a context may give to this device: the heads of its attentions decide how summaries are kept. */
    void note(const ggml_tensor *op);

    /** The session of all its contexts, made when first asked for. NULL where there is none; the log says why. */
    vwd_session *session();
    /** Valid once there is a session. */
    int ordinal() const { return ordinal_; }
    void *context() const { return context_; }

    /** Lets kernels touch a buffer of the host's memory. */
    void reach(ggml_backend_buffer_t buffer);

  private:
    std::string make_session();

    ggml_backend_dev_t inner_;
    std::string name_, description_;
    /** Whether heads were noted, and whether summaries of some are of 16 bits. */
    std::atomic<bool> knows_heads_{false}, has_wide_summaries_{false};
    std::mutex mutex_;
    bool has_tried_ = false;
    vwd_session *session_ = nullptr;
    int ordinal_ = 0;
    void *context_ = nullptr;
    std::map<uintptr_t, uintptr_t> reached_;  // begin → end
};

/** The devices that the options name; found when first asked for. */
const std::vector<Gpu *> &gpus();

/** Memory of a GPU, in buffers of ggml's, and a stream of its own. */
class GpuMemory : public Memory {
  public:
    /** Throws std::runtime_error. */
    explicit GpuMemory(Gpu &gpu);
    ~GpuMemory() override;

    void *allocate(size_t bytes) override;
    void release(void *data) override;
    void put(void *to, const void *from, size_t bytes) override;
    void copy(void *to, const void *from, size_t bytes) override;
    void wait() override;
    const void *read(const void *data, size_t bytes, std::vector<char> &copy) override;

    /** Enqueues a copy to the host. What it returns is written once `wait` has returned, and is the caller's until the second `next_step`. */
    const void *get(const void *from, size_t bytes);
    /** So many bytes from each of these places, one behind the other. */
    const void *get(const std::vector<const void *> &from, size_t bytes);
    /** Forgets what `get` and `put` had on the host two steps ago. The stream was waited for since. */
    void next_step();

    ggml_backend_buffer_t buffer_of(void *data) const { return buffers_.at(data); }

  private:
    void *stage(size_t bytes);

    Gpu &gpu_;
    std::unordered_map<void *, ggml_backend_buffer_t> buffers_;
    struct Piece {
        char *data;
        size_t size, used;
    };
    std::vector<Piece> staging_, last_staging_;
};

}  // namespace vanward
