// The functions of CUDA's driver that the wrapper of a GPU calls, found at run time: there is no library to link where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#define VANWARD_CUDA_CALLS(X)                                                                                                  \
    X(cuInit, (unsigned flags))                                                                                                \
    X(cuDeviceGet, (int *device, int ordinal))                                                                                 \
    X(cuDevicePrimaryCtxRetain, (void **context, int device))                                                                  \
    X(cuCtxPushCurrent_v2, (void *context))                                                                                    \
    X(cuCtxPopCurrent_v2, (void **context))                                                                                    \
    X(cuStreamCreate, (void **stream, unsigned flags))                                                                         \
    X(cuStreamDestroy_v2, (void *stream))                                                                                      \
    X(cuStreamSynchronize, (void *stream))                                                                                     \
    X(cuStreamWaitEvent, (void *stream, void *event, unsigned flags))                                                          \
    X(cuEventRecord, (void *event, void *stream))                                                                              \
    X(cuMemcpyHtoDAsync_v2, (uint64_t to, const void *from, size_t bytes, void *stream))                                       \
    X(cuMemcpyDtoHAsync_v2, (void *to, uint64_t from, size_t bytes, void *stream))                                             \
    X(cuMemcpyDtoDAsync_v2, (uint64_t to, uint64_t from, size_t bytes, void *stream))                                          \
    X(cuMemHostRegister_v2, (void *data, size_t bytes, unsigned flags))                                                        \
    X(cuMemHostUnregister, (void *data))

// For graphs; each may be absent, and then there are none.
#define VANWARD_CUDA_GRAPH_CALLS(X)                                                                                            \
    X(cuStreamBeginCapture_v2, (void *stream, int mode))                                                                       \
    X(cuStreamEndCapture, (void *stream, void **graph))                                                                        \
    X(cuGraphInstantiateWithFlags, (void **made, void *graph, unsigned long long flags))                                       \
    X(cuGraphExecUpdate_v2, (void *made, void *graph, CudaGraphUpdate *result))                                                \
    X(cuGraphGetNodes, (void *graph, void **nodes, size_t *count))                                                             \
    X(cuGraphNodeGetType, (void *node, int *type))                                                                             \
    X(cuGraphKernelNodeGetParams_v2, (void *node, CudaKernelNode *kernel))                                                     \
    X(cuGraphKernelNodeGetAttribute, (void *node, int attribute, CudaLaunchAttribute *value))                                  \
    X(cuGraphLaunch, (void *made, void *stream))                                                                               \
    X(cuGraphExecDestroy, (void *made))                                                                                        \
    X(cuGraphDestroy, (void *graph))

namespace vanward {

/** CUgraphExecUpdateResultInfo. */
struct CudaGraphUpdate {
    int result;
    void *node, *node_before;
};

/** CUDA_KERNEL_NODE_PARAMS_v2. */
struct CudaKernelNode {
    void *function;
    unsigned grid[3], block[3], shared_bytes;
    void **parameters, **extra;
    void *kernel, *context;
};

/** CUlaunchAttributeValue, as far as it is read. */
union CudaLaunchAttribute {
    unsigned cluster[3];
    char bytes[64];
};

struct CudaCalls {
#define X(name, arguments) int(*name) arguments = nullptr;
    VANWARD_CUDA_CALLS(X)
    VANWARD_CUDA_GRAPH_CALLS(X)
#undef X
    /** May be absent. */
    int (*cuDeviceGetByPCIBusId)(int *device, const char *id) = nullptr;
};

/** The functions; valid once `find_cuda` has returned NULL. */
extern CudaCalls cuda;

/** Finds the driver. Returns NULL, or what is missing. */
const char *find_cuda();

/** Throws std::runtime_error, which names the call, unless its status is 0. */
void must(int status, const char *call);

/** Makes a context the thread's current one while it lives. */
class InContext {
  public:
    explicit InContext(void *context) { cuda.cuCtxPushCurrent_v2(context); }
    ~InContext() {
        void *popped = nullptr;
        cuda.cuCtxPopCurrent_v2(&popped);
    }
    InContext(const InContext &) = delete;
    InContext &operator=(const InContext &) = delete;
};

}  // namespace vanward
