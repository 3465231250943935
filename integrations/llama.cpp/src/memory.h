// The memory that attention is computed in: the host's, or a device's.
#pragma once

#include "vanward.h"

#include <cstddef>
#include <utility>
#include <vector>

namespace vanward {

class Memory {
  public:
    virtual ~Memory() = default;

    /** At least `bytes` bytes of undefined contents. Throws std::bad_alloc. */
    virtual void *allocate(size_t bytes);
    virtual void release(void *data);
    /** Copies from the host, or inside this memory, before what is called later. The bytes at `from` may change on return. */
    virtual void put(void *to, const void *from, size_t bytes);
    virtual void copy(void *to, const void *from, size_t bytes);
    /** Waits for what was called on the stream. */
    virtual void wait() {}
    /** Where the host reads these bytes, once what was called on the stream is over: there, or in `copy`. */
    virtual const void *read(const void *data, size_t bytes, std::vector<char> &copy);

    /** For tensors and calls of Vanward. */
    int device_type = 1, device_id = 0;
    vwd_stream stream = nullptr;
};

/** The host's memory. */
Memory &host_memory();

/** Elements in some memory. */
template <typename T> class Array {
  public:
    explicit Array(Memory &memory) : memory_(&memory) {}
    Array(Array &&other) noexcept : memory_(other.memory_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Array &operator=(Array &&other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Array() {
        if (data_ != nullptr) {
            memory_->release(data_);
        }
    }

    T *data() const { return data_; }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }

    /** Room for `size` elements at least; those that are there stay. */
    void grow(size_t size) {
        if (size <= size_) {
            return;
        }
        T *room = static_cast<T *>(memory_->allocate(size * sizeof(T)));
        if (data_ != nullptr) {
            memory_->copy(room, data_, size_ * sizeof(T));
            memory_->release(data_);
        }
        data_ = room;
        size_ = size;
    }

    void put(size_t at, const T *from, size_t count) { memory_->put(data_ + at, from, count * sizeof(T)); }

  private:
    Memory *memory_;
    T *data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace vanward
