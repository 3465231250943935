// A backend of ggml for the tests: APART0 computes on the CPU, in memory of the emulated GPU that ggml does not take for the host's, so that the
// scheduler copies the inputs of its graphs as it does for a GPU. ggml and the CPU's backend are loaded already.

#include "ggml-backend-impl.h"

#include <dlfcn.h>

#include <cstring>

namespace {

template <typename Function> Function driver(const char *name) {
    static void *library = dlopen("libcuda.so", RTLD_NOW);
    return reinterpret_cast<Function>(dlsym(library, name));
}

ggml_backend_dev_t cpu() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

char *at(const ggml_tensor *tensor, size_t offset) { return static_cast<char *>(tensor->data) + offset; }

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
    calls.cpy_tensor = [](ggml_backend_buffer_t buffer, const ggml_tensor *from, ggml_tensor *to) {
        const bool is_ours = from->buffer->buft == buffer->buft;
        if (is_ours) {
            memcpy(to->data, from->data, ggml_nbytes(from));
        }
        return is_ours;
    };
    calls.clear = [](ggml_backend_buffer_t buffer, uint8_t value) { memset(buffer->context, value, buffer->size); };
    return ggml_backend_buffer_init(type, calls, reinterpret_cast<void *>(address), size);
}

extern ggml_backend_device device;

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = {};
    type.iface.get_name = [](ggml_backend_buffer_type_t) { return "APART0"; };
    type.iface.alloc_buffer = allocate;
    type.iface.get_alignment = [](ggml_backend_buffer_type_t) -> size_t { return 64; };
    type.device = &device;
    return &type;
}

// --- the device -----------------------------------------------------------------------------------------------------------------

ggml_backend_t open(ggml_backend_dev_t self, const char *) {
    static ggml_guid guid = {0x76, 0x61, 0x6e, 0x77, 0x61, 0x72, 0x64, 0x2d, 0x61, 0x70, 0x61, 0x72, 0x74, 0x2d, 0x30, 0x31};
    ggml_backend_i calls = {};
    calls.get_name = [](ggml_backend_t) { return "APART0"; };
    calls.free = [](ggml_backend_t backend) {
        ggml_backend_free(static_cast<ggml_backend_t>(backend->context));
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
    // As ggml-cuda: from its own memory alone.
    calls.cpy_tensor_async = [](ggml_backend_t, ggml_backend_t, const ggml_tensor *from, ggml_tensor *to) {
        const bool is_ours = from->buffer->buft == buffer_type();
        if (is_ours) {
            memcpy(to->data, from->data, ggml_nbytes(from));
        }
        return is_ours;
    };
    calls.graph_compute = [](ggml_backend_t backend, ggml_cgraph *graph) {
        return ggml_backend_graph_compute(static_cast<ggml_backend_t>(backend->context), graph);
    };
    ggml_backend_t inner = ggml_backend_dev_init(cpu(), nullptr);
    // One thread: llama.cpp tells a GPU of no number, and ggml's own threads spin.
    void *set = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu()), "ggml_backend_set_n_threads");
    reinterpret_cast<ggml_backend_set_n_threads_t>(set)(inner, 1);
    return new ggml_backend{&guid, calls, self, inner};
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

ggml_backend_device make_device() {
    using Self = ggml_backend_dev_t;
    ggml_backend_device_i calls = {};
    calls.get_name = [](Self) { return "APART0"; };
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
    calls.get_buffer_type = [](Self) { return buffer_type(); };
    calls.supports_op = computes;
    calls.supports_buft = [](Self, ggml_backend_buffer_type_t type) { return type == buffer_type(); };
    return {calls, nullptr, nullptr};
}

ggml_backend_device device = make_device();

}  // namespace

extern "C" ggml_backend_reg_t ggml_backend_init();

ggml_backend_reg_t ggml_backend_init() {
    static ggml_backend_reg registry = {};
    registry.api_version = GGML_BACKEND_API_VERSION;
    registry.iface.get_name = [](ggml_backend_reg_t) { return "Apart"; };
    registry.iface.get_device_count = [](ggml_backend_reg_t) -> size_t { return 1; };
    registry.iface.get_device = [](ggml_backend_reg_t, size_t) { return &device; };
    device.reg = &registry;
    return &registry;
}
