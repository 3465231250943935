#include "watch.h"

#include "cache.h"
#include "ggml-backend-impl.h"

#include <mutex>
#include <unordered_map>

namespace vanward {

namespace {

struct Watched {
    /** The buffer's functions before it was watched. */
    ggml_backend_buffer_i calls;
    std::shared_ptr<Inputs> inputs;
};

class WatchedBuffers {
  public:
    Watched of(ggml_backend_buffer_t buffer) {
        std::lock_guard<std::mutex> guard(mutex_);
        return buffers_.at(buffer);
    }
    /** Without functions where it is not watched. */
    Watched find(ggml_backend_buffer_t buffer) {
        std::lock_guard<std::mutex> guard(mutex_);
        auto found = buffers_.find(buffer);
        return found == buffers_.end() ? Watched() : found->second;
    }
    void keep(ggml_backend_buffer_t buffer) {
        std::lock_guard<std::mutex> guard(mutex_);
        buffers_[buffer] = {buffer->iface, nullptr};
    }
    std::shared_ptr<Inputs> inputs_of(ggml_backend_buffer_t buffer) {
        std::lock_guard<std::mutex> guard(mutex_);
        std::shared_ptr<Inputs> &inputs = buffers_.at(buffer).inputs;
        inputs = inputs == nullptr ? std::make_shared<Inputs>() : inputs;
        return inputs;
    }

  private:
    std::mutex mutex_;
    // ggml-cuda knows its buffers by the function that frees them, which stays as it is: so nobody says here when a buffer is freed. What is kept of it
    // stays until another buffer is watched at its address.
    std::unordered_map<ggml_backend_buffer_t, Watched> buffers_;
};

WatchedBuffers &watched() {
    static auto *all = new WatchedBuffers;  // never destroyed: buffers outlive main
    return *all;
}

/** `data` is what was written, or NULL where that is not known. */
void tell(ggml_backend_buffer_t buffer, const Watched &here, const ggml_tensor *tensor, size_t offset, size_t bytes, const void *data = nullptr) {
    const char *begin = static_cast<const char *>(tensor->data) + offset;
    if (std::shared_ptr<Cache> cache = find_cache(buffer)) {
        std::lock_guard<std::mutex> guard(cache->mutex);
        cache->overwritten(begin, bytes);
    }
    if (here.inputs != nullptr) {
        data != nullptr ? here.inputs->written(tensor, data, offset, bytes) : here.inputs->overwritten(begin, bytes);
    }
}

size_t bytes_of(const ggml_tensor *tensor) {
    size_t bytes = tensor->nb[0];
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        bytes += static_cast<size_t>(tensor->ne[i] - 1) * tensor->nb[i];
    }
    return bytes;
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, uint8_t value, size_t offset, size_t size) {
    const Watched here = watched().of(buffer);
    here.calls.memset_tensor(buffer, tensor, value, offset, size);
    tell(buffer, here, tensor, offset, size);
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    const Watched here = watched().of(buffer);
    here.calls.set_tensor(buffer, tensor, data, offset, size);
    tell(buffer, here, tensor, offset, size, data);
}

void set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset, size_t size, size_t copies, size_t stride_tensor,
                   size_t stride_data) {
    const Watched here = watched().of(buffer);
    here.calls.set_tensor_2d(buffer, tensor, data, offset, size, copies, stride_tensor, stride_data);
    tell(buffer, here, tensor, offset, copies == 0 ? 0 : (copies - 1) * stride_tensor + size);
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *from, ggml_tensor *to) {
    const Watched here = watched().of(buffer);
    const bool done = here.calls.cpy_tensor(buffer, from, to);
    tell(buffer, here, to, 0, bytes_of(to));  // whether it is done or not: then ggml copies in another way
    return done;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const Watched here = watched().of(buffer);
    here.calls.clear(buffer, value);
    if (std::shared_ptr<Cache> cache = find_cache(buffer)) {
        std::lock_guard<std::mutex> guard(cache->mutex);
        cache->forget();
    }
    if (here.inputs != nullptr) {
        here.inputs->expire();
    }
}

}  // namespace

void watch(ggml_backend_buffer_t buffer) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> guard(one_at_a_time);
    ggml_backend_buffer_i &calls = buffer->iface;
    if (calls.clear == clear) {
        return;
    }
    watched().keep(buffer);
    auto replace = [](auto &call, auto ours) { call = call == nullptr ? nullptr : ours; };
    replace(calls.memset_tensor, memset_tensor);
    replace(calls.set_tensor, set_tensor);
    replace(calls.set_tensor_2d, set_tensor_2d);
    replace(calls.cpy_tensor, cpy_tensor);
    replace(calls.clear, clear);
}

std::shared_ptr<Inputs> inputs_of(ggml_backend_buffer_t buffer) {
    watch(buffer);
    return watched().inputs_of(buffer);
}

void overwritten(const ggml_tensor *tensor, size_t offset, size_t bytes) {
    ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    tell(buffer, watched().find(buffer), tensor, offset, bytes);
}

void overwritten(const ggml_tensor *tensor) { overwritten(tensor, 0, bytes_of(tensor)); }

}  // namespace vanward
