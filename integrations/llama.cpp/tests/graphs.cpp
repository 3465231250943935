// The decision which steps are captured and replayed, where a graph's queries are ready, and CUDA graphs on the emulated GPU:
// `llama-graphs decisions|queries|captures`.

#include "capture.h"
#include "check.h"
#include "cuda.h"
#include "ggml_calls.h"
#include "operations.h"
#include "step.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

using namespace vanward;

namespace {

// --- decisions ------------------------------------------------------------------------------------------------------------------

/** A graph of two nodes and the calls between them. */
struct Example {
    ggml_tensor source = {}, nodes[2] = {};
    uint64_t uid = 0;
    int64_t call = 7;

    Example() {
        int place = 0;
        for (ggml_tensor *tensor : {&source, nodes, nodes + 1}) {
            tensor->data = reinterpret_cast<void *>(uintptr_t(4096) * static_cast<uintptr_t>(++place));
            for (int i = 0; i < GGML_MAX_DIMS; ++i) {
                tensor->ne[i] = 8 + i;
                tensor->nb[i] = size_t(4) << i;
            }
        }
        nodes[0].src[0] = &source;
        nodes[1].src[0] = &nodes[0];
        nodes[1].src[2] = &source;
    }
    Way decide(Step &step) const {
        Description calls;
        calls.add(call);
        return step.decide(uid, calls, [&](Description &description) {
            description.add(nodes[0]);
            description.add(nodes[1]);
        });
    }
    /** The decision for equal steps until one is replayed. */
    void settle(Step &step) const {
        CHECK(decide(step) == Way::eager);
        CHECK(decide(step) == Way::capture);
        step.captured();
        CHECK(decide(step) == Way::replay);
        CHECK(decide(step) == Way::replay);
    }
};

void decisions() {
    // Eager, then captured, then replayed.
    {
        Step step({2, 1, 0, 1, false});
        Example example;
        example.settle(step);
        // A capture that did not come about is tried again.
        Step other({2, 1, 0, 1, false});
        CHECK(example.decide(other) == Way::eager);
        CHECK(example.decide(other) == Way::capture);
        CHECK(example.decide(other) == Way::capture);
    }
    // Whatever kernels or arguments depend on: the step is eager again, then captured again.
    const std::function<void(Example &)> changes[] = {
        [](Example &e) { e.call += 1; },
        [](Example &e) { e.nodes[1].op = static_cast<ggml_op>(3); },
        [](Example &e) { e.nodes[0].type = GGML_TYPE_F16; },
        [](Example &e) { e.nodes[0].flags = 1; },
        [](Example &e) { e.nodes[1].data = &e; },
        [](Example &e) { e.nodes[1].ne[3] += 1; },
        [](Example &e) { e.nodes[0].nb[1] += 1; },
        [](Example &e) { e.nodes[0].op_params[0] = 1; },
        [](Example &e) { e.nodes[0].op_params[GGML_MAX_OP_PARAMS / 4 - 1] = 1; },
        [](Example &e) { e.source.data = &e; },
        [](Example &e) { e.source.ne[0] += 256; },
        [](Example &e) { e.source.nb[2] += 1; },
        [](Example &e) { e.source.type = GGML_TYPE_BF16; },
        [](Example &e) { e.nodes[1].src[2] = nullptr; },
        [](Example &e) { std::swap(e.nodes[1].src[2], e.nodes[1].src[3]); },
    };
    int number = 0;
    for (const auto &change : changes) {
        printf("change %d\n", number++);
        Step step({2, 1, 0, 1, false});
        Example example;
        example.settle(step);
        change(example);
        example.settle(step);
        // The change before the capture delays it.
        Step early({2, 1, 0, 1, false});
        Example before;
        CHECK(before.decide(early) == Way::eager);
        change(before);
        before.settle(early);
    }
    // Names, and nodes at other addresses with the same contents, change nothing: llama.cpp builds the same graph anew.
    {
        Step step({2, 1, 0, 1, false});
        Example example;
        example.uid = 5;
        example.settle(step);
        Example again;
        again.uid = 6;
        strcpy(again.nodes[0].name, "another");
        CHECK(again.decide(step) == Way::replay);
    }
    // The number of a graph says that its nodes are the same ones: they are not looked at. The calls are.
    {
        Step step({2, 1, 0, 1, false});
        Example example;
        example.uid = 5;
        example.settle(step);
        example.nodes[0].data = &example;
        CHECK(example.decide(step) == Way::replay);
        example.call += 1;
        CHECK(example.decide(step) == Way::eager);
        CHECK(example.decide(step) == Way::capture);
        step.captured();
        // Without a number they are.
        example.uid = 0;
        example.settle(step);
    }
    // Refused for good, whatever comes, and the graph is gone.
    {
        Step step({2, 1, 0, 1, false});
        Example example;
        example.settle(step);
        bool freed = false;
        step.graph = std::shared_ptr<void>(&freed, [](void *flag) { *static_cast<bool *>(flag) = true; });
        step.refuse();
        CHECK(freed);
        for (int i = 0; i < 4; ++i) {
            CHECK(example.decide(step) == Way::eager);
            example.call += i / 2;
        }
    }
    // Steps of different shapes do not disturb each other; the one unused longest makes room.
    {
        Steps steps;
        Example example;
        for (int rows = 1; rows <= static_cast<int>(Steps::KEPT); ++rows) {
            example.settle(steps.of({2, 1, 0, rows, false}));
        }
        CHECK(example.decide(steps.of({2, 1, 0, 1, false})) == Way::replay);
        CHECK(example.decide(steps.of({3, 1, 0, 1, false})) == Way::eager);  // in place of that of two rows
        CHECK(steps.size() == Steps::KEPT);
        CHECK(example.decide(steps.of({2, 1, 0, 1, false})) == Way::replay);
        CHECK(example.decide(steps.of({2, 1, 0, 3, false})) == Way::replay);
        CHECK(example.decide(steps.of({2, 1, 0, 2, false})) == Way::eager);
        CHECK(steps.of({2, 1, 4, 1, false}).shape() == (Shape{2, 1, 4, 1, false}));
        CHECK(example.decide(steps.of({2, 2, 0, 1, false})) == Way::eager);
        CHECK(example.decide(steps.of({2, 1, 0, 1, true})) == Way::eager);
    }
}

// --- captures -------------------------------------------------------------------------------------------------------------------

template <typename Function> Function driver(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    library = library != nullptr ? library : dlopen("libcuda.so", RTLD_NOW);
    auto found = reinterpret_cast<Function>(dlsym(library, name));
    CHECK(found != nullptr);
    return found;
}

/** Words of a device. */
struct Words {
    uint64_t address = 0;

    Words() { must(driver<int (*)(uint64_t *, size_t)>("cuMemAlloc_v2")(&address, 64), "cuMemAlloc"); }
    void set(int value, void *stream) {
        must(cuda.cuMemcpyHtoDAsync_v2(address, &value, sizeof value, stream), "cuMemcpyHtoDAsync");
        must(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize");
    }
    int get(void *stream) const {
        int value = -1;
        must(cuda.cuMemcpyDtoHAsync_v2(&value, address, sizeof value, stream), "cuMemcpyDtoHAsync");
        must(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize");
        return value;
    }
    void copy(const Words &from, void *stream) { must(cuda.cuMemcpyDtoDAsync_v2(address, from.address, sizeof(int), stream), "cuMemcpyDtoDAsync"); }
};

/** The second CTA writes its number in its cluster. */
const char KERNEL[] = R"(
.version 7.8
.target sm_90
.address_size 64
.visible .entry clusters(.param .u64 to)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<3>;
    .reg .b32 %r<3>;
    ld.param.u64 %rd1, [to];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %cluster_ctarank;
    mov.u32 %r2, %ctaid.x;
    setp.eq.u32 %p1, %r2, 1;
    @%p1 st.global.u32 [%rd2], %r1;
    ret;
}
)";

/** Two CTAs of the kernel, in clusters of `ctas`. */
void enqueue_cluster(void *function, const Words &to, unsigned ctas, void *stream) {
    struct {
        int id, pad;
        CudaLaunchAttribute value;
    } attribute = {4, 0, {{ctas, 1, 1}}};
    struct {
        unsigned grid[3], block[3], shared_bytes;
        void *stream, *attributes;
        unsigned count;
    } config = {{2, 1, 1}, {1, 1, 1}, 0, stream, &attribute, 1};
    uint64_t address = to.address;
    void *parameters[] = {&address};
    must(driver<int (*)(void *, void *, void **, void **)>("cuLaunchKernelEx")(&config, function, parameters, nullptr), "cuLaunchKernelEx");
}

void captures() {
    CHECK(find_cuda() == nullptr);
    CHECK(Capture::is_possible());
    int device = 0;
    void *context = nullptr, *stream = nullptr, *other = nullptr, *event = nullptr;
    must(cuda.cuDeviceGet(&device, 0), "cuDeviceGet");
    must(cuda.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    InContext current(context);
    must(cuda.cuStreamCreate(&stream, 1), "cuStreamCreate");
    must(cuda.cuStreamCreate(&other, 1), "cuStreamCreate");
    must(driver<int (*)(void **, unsigned)>("cuEventCreate")(&event, 2), "cuEventCreate");
    auto join = [&](void *behind, void *ahead) {
        must(cuda.cuEventRecord(event, ahead), "cuEventRecord");
        must(cuda.cuStreamWaitEvent(behind, event, 0), "cuStreamWaitEvent");
    };
    Words a, b, c, d;
    a.set(1, stream);
    b.set(2, stream);
    c.set(0, stream);
    d.set(0, stream);

    // Work of two streams, captured: nothing happens before it is launched, and each launch reads what is there then.
    std::shared_ptr<void> graph;
    {
        Capture capture(stream);
        join(other, stream);
        c.copy(a, other);
        join(stream, other);
        d.copy(c, stream);
        CHECK(capture.end(graph) == Capture::Made::anew);
    }
    CHECK(graph != nullptr && c.get(stream) == 0 && d.get(stream) == 0);
    launch(graph, stream);
    CHECK(c.get(stream) == 1 && d.get(stream) == 1);
    a.set(5, stream);
    launch(graph, stream);
    CHECK(d.get(stream) == 5);

    // The same kernels with other arguments: updated.
    const void *before = graph.get();
    {
        Capture capture(stream);
        join(other, stream);
        c.copy(b, other);
        join(stream, other);
        d.copy(c, stream);
        CHECK(capture.end(graph) == Capture::Made::updated);
    }
    CHECK(graph.get() == before);
    launch(graph, stream);
    CHECK(d.get(stream) == 2);

    // Other work: made anew.
    {
        Capture capture(stream);
        c.copy(a, stream);
        CHECK(capture.end(graph) == Capture::Made::anew);
    }
    c.set(0, stream);
    d.set(0, stream);
    launch(graph, stream);
    CHECK(c.get(stream) == 5 && d.get(stream) == 0);

    // A capture that is given up leaves both streams as they were, and the graph.
    {
        Capture capture(stream);
        join(other, stream);
        d.copy(a, other);
    }
    d.copy(b, other);
    CHECK(d.get(other) == 2);
    launch(graph, stream);
    CHECK(c.get(stream) == 5);

    // A stream that did not join again is an error, after which captures go on.
    bool thrown = false;
    try {
        Capture capture(stream);
        join(other, stream);
        d.copy(a, other);
        capture.end(graph);
    } catch (const std::runtime_error &error) {
        thrown = strstr(error.what(), "cuStreamEndCapture failed") != nullptr;
    }
    CHECK(thrown);
    d.copy(a, other);
    CHECK(d.get(other) == 5);
    {
        Capture capture(stream);
        c.copy(b, stream);
        CHECK(capture.end(graph) == Capture::Made::updated);
    }
    launch(graph, stream);
    CHECK(c.get(stream) == 2);

    // Clusters of another size: made anew, as an update to other clusters is not relied on. The same size: updated.
    void *module = nullptr, *function = nullptr;
    must(driver<int (*)(void **, const void *)>("cuModuleLoadData")(&module, KERNEL), "cuModuleLoadData");
    must(driver<int (*)(void **, void *, const char *)>("cuModuleGetFunction")(&function, module, "clusters"), "cuModuleGetFunction");
    graph = nullptr;
    const struct {
        unsigned ctas;
        Words *to;
        Capture::Made made;
    } steps[] = {{1, &c, Capture::Made::anew}, {1, &d, Capture::Made::updated}, {2, &d, Capture::Made::anew}, {2, &c, Capture::Made::updated}};
    for (const auto &step : steps) {
        step.to->set(7, stream);
        {
            Capture capture(stream);
            enqueue_cluster(function, *step.to, step.ctas, stream);
            CHECK(capture.end(graph) == step.made);
        }
        launch(graph, stream);
        CHECK(step.to->get(stream) == static_cast<int>(step.ctas) - 1);
    }
    graph = nullptr;

    // What this driver does with the size of clusters, for whoever reads the output.
    void *captured[2] = {}, *made = nullptr;
    for (unsigned ctas : {1u, 2u}) {
        must(cuda.cuStreamBeginCapture_v2(stream, 2), "cuStreamBeginCapture");
        enqueue_cluster(function, c, ctas, stream);
        must(cuda.cuStreamEndCapture(stream, &captured[ctas - 1]), "cuStreamEndCapture");
    }
    must(cuda.cuGraphInstantiateWithFlags(&made, captured[0], 0), "cuGraphInstantiate");
    CudaGraphUpdate update = {};
    const int status = cuda.cuGraphExecUpdate_v2(made, captured[1], &update);
    must(cuda.cuGraphLaunch(made, stream), "cuGraphLaunch");
    printf("updated from clusters of one CTA to clusters of two: status %d, and then clusters have %d\n", status, c.get(stream) + 1);
    cuda.cuGraphExecDestroy(made);
    cuda.cuGraphDestroy(captured[0]);
    cuda.cuGraphDestroy(captured[1]);
}

// --- where queries are ready ------------------------------------------------------------------------------------------------------

void queries() {
    ggml.ggml_op_name = [](ggml_op op) { return op == GGML_OP_VIEW ? "VIEW" : op == GGML_OP_PERMUTE ? "PERMUTE" : op == GGML_OP_ROPE ? "ROPE" : "MUL_MAT"; };
    ggml_tensor product = {}, rotated = {}, view = {}, key = {}, scaled = {};
    product.op = key.op = GGML_OP_MUL_MAT;
    rotated.op = GGML_OP_ROPE;
    view.op = GGML_OP_PERMUTE;
    view.view_src = scaled.view_src = &rotated;
    scaled.op = GGML_OP_SCALE;  // in place
    auto end_of = [](std::vector<ggml_tensor *> nodes, int from, const ggml_tensor *q) { return end_of_queries(nodes.data(), from, static_cast<int>(nodes.size()), q); };
    CHECK(end_of({&product, &rotated, &key, &view}, 0, &view) == 2);
    CHECK(end_of({&product, &rotated, &key, &view}, 1, &view) == 2);
    CHECK(end_of({&product, &key, &view}, 0, &product) == 1);
    CHECK(end_of({&rotated, &scaled, &key, &view}, 0, &view) == 2);
    // Those of another part of the graph, queries behind the keys, and none.
    CHECK(end_of({&product, &rotated, &key, &view}, 2, &view) == 0);
    CHECK(end_of({&key, &product, &rotated, &view}, 0, &view) == 0);
    CHECK(end_of({}, 0, &view) == 0);
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        return 2;
    }
    strcmp(argv[1], "captures") == 0 ? captures() : strcmp(argv[1], "queries") == 0 ? queries() : decisions();
    return 0;
}
