#include "memory.h"

#include <cstring>
#include <new>

namespace vanward {

void *Memory::allocate(size_t bytes) { return ::operator new(bytes, std::align_val_t{64}); }

void Memory::release(void *data) { ::operator delete(data, std::align_val_t{64}); }

void Memory::put(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

void Memory::copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

const void *Memory::read(const void *data, size_t, std::vector<char> &) { return data; }

Memory &host_memory() {
    static Memory memory;
    return memory;
}

}  // namespace vanward
