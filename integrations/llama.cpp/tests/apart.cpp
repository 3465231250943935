// A backend of ggml for the tests: APART0 and APART1 compute on the CPU, each in memory of the emulated GPU that ggml does not take for the host's, so
// that the scheduler copies the inputs of their graphs as it does for a GPU. ggml and the CPU's backend are loaded already. As ggml-cuda with
// GGML_CUDA_GRAPH_OPT=1 they change the order of graphs, and remember where streams would fork and join: a graph fails where they would not join.

#include "ggml-backend-impl.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <unordered_set>

namespace {

template <typename Function> Function driver(const char *name) {
    static void *library = dlopen("libcuda.so", RTLD_NOW);
    return reinterpret_cast<Function>(dlsym(library, name));
}

ggml_backend_dev_t cpu() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

char *at(const ggml_tensor *tensor, size_t offset) { return static_cast<char *>(tensor->data) + offset; }

bool is_ours(const ggml_tensor *tensor);

/** As ggml-cuda: from its own memory alone. */
bool copy(const ggml_tensor *from, ggml_tensor *to) {
    if (is_ours(from)) {
        memcpy(to->data, from->data, ggml_nbytes(from));
    }
    return is_ours(from);
}

// --- memory ---------------------------------------------------------------------------------------------------------------------

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    uint64_t address = 0;
    if (driver<int (*)(unsigned)>("cuInit")(0) != 0 || driver<int (*)(uint64_t *, size_t)>("cuMemAlloc_v2")(&address, size) != 0) {
        return nullptr;
    }
    ggml_backend_buffer_i calls = {};
    calls.free_buffer = [](ggml_backend_buffer_t buffer) { driver<int (*)(void *)>("cuMemFree_v2")(buffer->context); };
    calls.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    calls.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t value, size_t offset, size_t bytes) {
        memset(at(tensor, offset), value, bytes);
    };
    calls.set_tensor = [](ggml_backend_buffer_t, ggml_tensor *tensor, const void *data, size_t offset, size_t bytes) {
        memcpy(at(tensor, offset), data, bytes);
    };
    calls.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor *tensor, void *data, size_t offset, size_t bytes) {
        memcpy(data, at(tensor, offset), bytes);
    };
    calls.cpy_tensor = [](ggml_backend_buffer_t, const ggml_tensor *from, ggml_tensor *to) { return copy(from, to); };
    calls.clear = [](ggml_backend_buffer_t buffer, uint8_t value) { memset(buffer->context, value, buffer->size); };
    return ggml_backend_buffer_init(type, calls, reinterpret_cast<void *>(address), size);
}

/** A device's name, which is its context, and its memory. */
const char *name_of(ggml_backend_dev_t device) { return static_cast<const char *>(device->context); }

ggml_backend_buffer_type make_type(ggml_backend_dev_t device) {
    ggml_backend_buffer_type type = {};
    type.iface.get_name = [](ggml_backend_buffer_type_t self) { return name_of(self->device); };
    type.iface.alloc_buffer = allocate;
    type.iface.get_alignment = [](ggml_backend_buffer_type_t) -> size_t { return 64; };
    type.device = device;
    return type;
}

extern ggml_backend_device devices[2];
ggml_backend_buffer_type types[2] = {make_type(&devices[0]), make_type(&devices[1])};

ggml_backend_buffer_type_t type_of(ggml_backend_dev_t device) { return &types[device - devices]; }
bool is_ours(const ggml_tensor *tensor) { return tensor->buffer->buft == &types[0] || tensor->buffer->buft == &types[1]; }

// --- streams --------------------------------------------------------------------------------------------------------------------

/** What a backend computes with, and what it knows of graphs that it was shown. */
struct Context {
    ggml_backend_t cpu;
    /** Where streams fork in the last graph that was shown, and the attention in which they join. */
    std::map<const ggml_tensor *, const ggml_tensor *> joins;
    /** Forks of any graph that was shown, and the nodes that were moved behind them. */
    std::map<const ggml_tensor *, ggml_tensor *> moved;
};

Context *context_of(ggml_backend_t backend) { return static_cast<Context *>(backend->context); }

bool is(const ggml_tensor *node, const char *operation) { return strcmp(ggml_op_name(node->op), operation) == 0; }

/** The normed input of a layer's attention: queries, keys and values are made of it. */
bool forks(const ggml_tensor *node) { return strncmp(node->name, "attn_norm-", 10) == 0; }

/** Streams fork at each layer's input and join at its attention. The second product is moved to the first one's place. */
void optimize(ggml_backend_t backend, ggml_cgraph *graph, ggml_backend_graph_optimize_params *) {
    Context &context = *context_of(backend);
    ggml_tensor **nodes = ggml_graph_nodes(graph);
    context.joins.clear();
    for (int fork = 0; fork < ggml_graph_n_nodes(graph); ++fork) {
        if (!forks(nodes[fork])) {
            continue;
        }
        int products = 0;
        for (int i = fork + 1; i < ggml_graph_n_nodes(graph); ++i) {
            if (is(nodes[i], "FLASH_ATTN_EXT")) {
                context.joins[nodes[fork]] = nodes[i];
                break;
            }
            products += nodes[i]->src[1] == nodes[fork];
            if (products == 2 && nodes[i]->src[1] == nodes[fork]) {
                ggml_tensor *second = nodes[i];
                std::move_backward(nodes + fork + 1, nodes + i, nodes + i + 1);
                nodes[fork + 1] = context.moved[nodes[fork]] = second;
            }
        }
    }
}

/** Whether streams that fork in a graph join in it, in the order that was made for them, and without them the order is the caller's. */
bool joins(const Context &context, ggml_cgraph *graph) {
    ggml_tensor **nodes = ggml_graph_nodes(graph);
    const int count = ggml_graph_n_nodes(graph);
    const std::unordered_set<const ggml_tensor *> all(nodes, nodes + count);
    for (int i = 0; i < count; ++i) {
        const auto moved = context.moved.find(nodes[i]);
        const auto join = context.joins.find(nodes[i]);
        if (forks(nodes[i]) && moved == context.moved.end()) {
            fprintf(stderr, "%s was not shown before it is computed\n", nodes[i]->name);
            return false;
        }
        if (join != context.joins.end() && all.count(join->second) == 0) {
            fprintf(stderr, "streams fork at %s and do not join\n", nodes[i]->name);
            return false;
        }
        if (moved != context.moved.end() && join == context.joins.end() && i + 1 < count && nodes[i + 1] == moved->second) {
            fprintf(stderr, "behind %s nodes have an order that was made for streams\n", nodes[i]->name);
            return false;
        }
    }
    return true;
}

// --- the device -----------------------------------------------------------------------------------------------------------------

ggml_backend_t open(ggml_backend_dev_t self, const char *) {
    static ggml_guid guid = {0x76, 0x61, 0x6e, 0x77, 0x61, 0x72, 0x64, 0x2d, 0x61, 0x70, 0x61, 0x72, 0x74, 0x2d, 0x30, 0x31};
    ggml_backend_i calls = {};
    calls.get_name = [](ggml_backend_t backend) { return name_of(backend->device); };
    calls.free = [](ggml_backend_t backend) {
        ggml_backend_free(context_of(backend)->cpu);
        delete context_of(backend);
        delete backend;
    };
    calls.set_tensor_async = [](ggml_backend_t, ggml_tensor *tensor, const void *data, size_t offset, size_t bytes) {
        memcpy(at(tensor, offset), data, bytes);
    };
    calls.set_tensor_2d_async = [](ggml_backend_t, ggml_tensor *tensor, const void *data, size_t offset, size_t bytes, size_t copies,
                                   size_t stride_tensor, size_t stride_data) {
        for (size_t i = 0; i < copies; ++i) {
            memcpy(at(tensor, offset + i * stride_tensor), static_cast<const char *>(data) + i * stride_data, bytes);
        }
    };
    calls.cpy_tensor_async = [](ggml_backend_t, ggml_backend_t, const ggml_tensor *from, ggml_tensor *to) { return copy(from, to); };
    calls.graph_compute = [](ggml_backend_t backend, ggml_cgraph *graph) {
        return joins(*context_of(backend), graph) ? ggml_backend_graph_compute(context_of(backend)->cpu, graph) : GGML_STATUS_FAILED;
    };
    calls.graph_optimize = optimize;
    ggml_backend_t inner = ggml_backend_dev_init(cpu(), nullptr);
    // One thread: llama.cpp tells a GPU of no number, and ggml's own threads spin.
    void *set = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu()), "ggml_backend_set_n_threads");
    reinterpret_cast<ggml_backend_set_n_threads_t>(set)(inner, 1);
    return new ggml_backend{&guid, calls, self, new Context{inner, {}, {}}};
}

/** The CPU's device is asked about tensors that have no buffer yet, as it would refuse ours. */
bool computes(ggml_backend_dev_t, const ggml_tensor *op) {
    ggml_tensor copy = *op, sources[GGML_MAX_SRC];
    copy.buffer = nullptr;
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (op->src[i] != nullptr) {
            sources[i] = *op->src[i];
            sources[i].buffer = nullptr;
            copy.src[i] = &sources[i];
        }
    }
    return ggml_backend_dev_supports_op(cpu(), &copy);
}

ggml_backend_device make_device(const char *name) {
    using Self = ggml_backend_dev_t;
    ggml_backend_device_i calls = {};
    calls.get_name = name_of;
    calls.get_description = [](Self) { return "the CPU, with memory apart"; };
    calls.get_memory = [](Self, size_t *free, size_t *total) { ggml_backend_dev_memory(cpu(), free, total); };
    calls.get_type = [](Self) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    calls.get_props = [](Self self, ggml_backend_dev_props *properties) {
        *properties = {};
        properties->name = self->iface.get_name(self);
        properties->description = self->iface.get_description(self);
        properties->type = self->iface.get_type(self);
        self->iface.get_memory(self, &properties->memory_free, &properties->memory_total);
    };
    calls.init_backend = open;
    calls.get_buffer_type = type_of;
    calls.supports_op = computes;
    calls.supports_buft = [](Self self, ggml_backend_buffer_type_t type) { return type == type_of(self); };
    return {calls, nullptr, const_cast<char *>(name)};
}

ggml_backend_device devices[2] = {make_device("APART0"), make_device("APART1")};

}  // namespace

extern "C" ggml_backend_reg_t ggml_backend_init();

ggml_backend_reg_t ggml_backend_init() {
    static ggml_backend_reg registry = {};
    registry.api_version = GGML_BACKEND_API_VERSION;
    registry.iface.get_name = [](ggml_backend_reg_t) { return "Apart"; };
    registry.iface.get_device_count = [](ggml_backend_reg_t) -> size_t { return 2; };
    registry.iface.get_device = [](ggml_backend_reg_t, size_t index) { return &devices[index]; };
    devices[0].reg = devices[1].reg = &registry;
    return &registry;
}
