#include "capture.h"

#include "cuda.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace vanward {

namespace {

/** Other threads may go on allocating. */
constexpr int RELAXED = 2;
/** CU_GRAPH_NODE_TYPE_KERNEL, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION. */
constexpr int KERNEL = 0, CLUSTER_DIMENSION = 4;

/**
 * What of a node an update has to find as it was. After an update to clusters of other sizes, which succeeded, replayed steps gave other results
 * than eager ones on an H100; why is not known. Graphs that are made anew gave the same results on an H200.
 */
struct Fixed {
    int type = -1;
    void *function = nullptr, *kernel = nullptr;
    unsigned cluster[3] = {};

    bool operator==(const Fixed &other) const {
        return type == other.type && function == other.function && kernel == other.kernel && std::equal(cluster, cluster + 3, other.cluster);
    }
};

/** That of each node; nothing where the driver does not tell. */
std::vector<Fixed> fixed_of(void *graph) {
    size_t count = 0;
    if (cuda.cuGraphGetNodes(graph, nullptr, &count) != 0) {
        return {};
    }
    std::vector<void *> nodes(count);
    if (cuda.cuGraphGetNodes(graph, nodes.data(), &count) != 0) {
        return {};
    }
    std::vector<Fixed> all(count);
    for (size_t i = 0; i < count; ++i) {
        Fixed &fixed = all[i];
        if (cuda.cuGraphNodeGetType(nodes[i], &fixed.type) != 0) {
            return {};
        }
        if (fixed.type == KERNEL) {
            CudaKernelNode node = {};
            CudaLaunchAttribute value = {};
            if (cuda.cuGraphKernelNodeGetParams_v2(nodes[i], &node) != 0 ||
                cuda.cuGraphKernelNodeGetAttribute(nodes[i], CLUSTER_DIMENSION, &value) != 0) {
                return {};
            }
            fixed.function = node.function;
            fixed.kernel = node.kernel;
            std::copy_n(value.cluster, 3, fixed.cluster);
        }
    }
    return all;
}

struct CudaGraph {
    explicit CudaGraph(std::vector<Fixed> fixed_nodes) : fixed(std::move(fixed_nodes)) {}
    ~CudaGraph() {
        if (made != nullptr) {
            cuda.cuGraphExecDestroy(made);
        }
    }
    CudaGraph(const CudaGraph &) = delete;
    CudaGraph &operator=(const CudaGraph &) = delete;

    void *made = nullptr;
    const std::vector<Fixed> fixed;
};

}  // namespace

bool Capture::is_possible() {
#define X(name, arguments)                                                                                                     \
    if (cuda.name == nullptr) {                                                                                                \
        return false;                                                                                                          \
    }
    VANWARD_CUDA_GRAPH_CALLS(X)
#undef X
    return true;
}

Capture::Capture(void *stream) : stream_(stream) {
    must(cuda.cuStreamBeginCapture_v2(stream, RELAXED), "cuStreamBeginCapture");
    is_under_way_ = true;
}

Capture::~Capture() {
    if (is_under_way_) {
        void *captured = nullptr;
        is_under_way_ = false;
        cuda.cuStreamEndCapture(stream_, &captured);
        if (captured != nullptr) {
            cuda.cuGraphDestroy(captured);
        }
    }
}

Capture::Made Capture::end(std::shared_ptr<void> &graph) {
    void *ended = nullptr;
    is_under_way_ = false;
    must(cuda.cuStreamEndCapture(stream_, &ended), "cuStreamEndCapture");
    const std::unique_ptr<void, int (*)(void *)> captured(ended, cuda.cuGraphDestroy);
    std::vector<Fixed> fixed = fixed_of(ended);
    auto before = std::static_pointer_cast<CudaGraph>(graph);
    CudaGraphUpdate update = {};
    if (before != nullptr && !fixed.empty() && before->fixed == fixed && cuda.cuGraphExecUpdate_v2(before->made, ended, &update) == 0) {
        return Made::updated;
    }
    graph = before = nullptr;
    auto anew = std::make_shared<CudaGraph>(std::move(fixed));
    must(cuda.cuGraphInstantiateWithFlags(&anew->made, ended, 0), "cuGraphInstantiate");
    graph = anew;
    return Made::anew;
}

void launch(const std::shared_ptr<void> &graph, void *stream) {
    must(cuda.cuGraphLaunch(std::static_pointer_cast<CudaGraph>(graph)->made, stream), "cuGraphLaunch");
}

}  // namespace vanward
