#include "watch.h"

#include "cache.h"
#include "ggml-backend-impl.h"

#include <mutex>
#include <unordered_map>

namespace vanward {

namespace {

/** A buffer's functions before it was watched. */
class Originals {
  public:
    ggml_backend_buffer_i of(ggml_backend_buffer_t buffer) {
        std::lock_guard<std::mutex> guard(mutex_);
        return calls_.at(buffer);
    }
    void keep(ggml_backend_buffer_t buffer) {
        std::lock_guard<std::mutex> guard(mutex_);
        calls_[buffer] = buffer->iface;
    }

  private:
    std::mutex mutex_;
    // ggml-cuda knows its buffers by the function that frees them, which stays as it is: so nobody says here when a buffer is freed. What is kept of it
    // stays until another buffer is watched at its address.
    std::unordered_map<ggml_backend_buffer_t, ggml_backend_buffer_i> calls_;
};

Originals &originals() {
    static auto *all = new Originals;  // never destroyed: buffers outlive main
    return *all;
}

void tell(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, size_t offset, size_t bytes) {
    if (std::shared_ptr<Cache> cache = find_cache(buffer)) {
        std::lock_guard<std::mutex> guard(cache->mutex);
        cache->overwritten(static_cast<const char *>(tensor->data) + offset, bytes);
    }
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, uint8_t value, size_t offset, size_t size) {
    originals().of(buffer).memset_tensor(buffer, tensor, value, offset, size);
    tell(buffer, tensor, offset, size);
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    originals().of(buffer).set_tensor(buffer, tensor, data, offset, size);
    tell(buffer, tensor, offset, size);
}

void set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset, size_t size, size_t copies, size_t stride_tensor,
                   size_t stride_data) {
    originals().of(buffer).set_tensor_2d(buffer, tensor, data, offset, size, copies, stride_tensor, stride_data);
    tell(buffer, tensor, offset, copies == 0 ? 0 : (copies - 1) * stride_tensor + size);
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *from, ggml_tensor *to) {
    const bool done = originals().of(buffer).cpy_tensor(buffer, from, to);
    size_t bytes = to->nb[0];
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        bytes += static_cast<size_t>(to->ne[i] - 1) * to->nb[i];
    }
    tell(buffer, to, 0, bytes);  // whether it is done or not: then ggml copies in another way
    return done;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    originals().of(buffer).clear(buffer, value);
    if (std::shared_ptr<Cache> cache = find_cache(buffer)) {
        std::lock_guard<std::mutex> guard(cache->mutex);
        cache->forget();
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
    originals().keep(buffer);
    auto replace = [](auto &call, auto ours) { call = call == nullptr ? nullptr : ours; };
    replace(calls.memset_tensor, memset_tensor);
    replace(calls.set_tensor, set_tensor);
    replace(calls.set_tensor_2d, set_tensor_2d);
    replace(calls.cpy_tensor, cpy_tensor);
    replace(calls.clear, clear);
}

}  // namespace vanward
