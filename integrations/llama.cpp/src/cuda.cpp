#include "cuda.h"

#include <dlfcn.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

namespace vanward {

CudaCalls cuda;

namespace {

const char *find() {
    void *library = nullptr;
    for (const char *name : {"libcuda.so.1", "libcuda.so"}) {
        library = library != nullptr ? library : dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) {
        return "library libcuda.so.1";
    }
#define X(name, arguments)                                                                                                     \
    cuda.name = reinterpret_cast<decltype(cuda.name)>(dlsym(library, #name));                                                  \
    if (cuda.name == nullptr) {                                                                                                \
        return #name;                                                                                                          \
    }
    VANWARD_CUDA_CALLS(X)
#undef X
#define X(name, arguments) cuda.name = reinterpret_cast<decltype(cuda.name)>(dlsym(library, #name));
    VANWARD_CUDA_GRAPH_CALLS(X)
#undef X
    cuda.cuDeviceGetByPCIBusId = reinterpret_cast<decltype(cuda.cuDeviceGetByPCIBusId)>(dlsym(library, "cuDeviceGetByPCIBusId"));
    return cuda.cuInit(0) == 0 ? nullptr : "a device";
}

}  // namespace

void must(int status, const char *call) {
    if (status != 0) {
        throw std::runtime_error(std::string(call) + " failed with CUDA's error " + std::to_string(status));
    }
}

const char *find_cuda() {
    static const char *missing = find();
    return missing;
}

}  // namespace vanward
