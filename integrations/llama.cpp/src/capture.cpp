#include "capture.h"

#include "cuda.h"

#include <utility>

namespace vanward {

namespace {

/** Other threads may go on allocating. */
constexpr int RELAXED = 2;

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
    CudaGraphUpdate update = {};
    if (graph != nullptr && cuda.cuGraphExecUpdate_v2(graph.get(), captured.get(), &update) == 0) {
        return Made::updated;
    }
    graph = nullptr;
    void *made = nullptr;
    must(cuda.cuGraphInstantiateWithFlags(&made, captured.get(), 0), "cuGraphInstantiate");
    graph.reset(made, cuda.cuGraphExecDestroy);
    return Made::anew;
}

void launch(const std::shared_ptr<void> &graph, void *stream) { must(cuda.cuGraphLaunch(graph.get(), stream), "cuGraphLaunch"); }

}  // namespace vanward
