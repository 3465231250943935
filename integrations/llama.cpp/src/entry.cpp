// Compiled once for each version of the backend API, with VANWARD_REGISTRY naming its function: fills that version's tables.

#include "device.h"
#include "entry.h"
#include "exports.h"
#include "ggml-backend-impl.h"
#include "ggml_calls.h"
#include "options.h"
#include "watch.h"
#include "wrapper.h"

#include <cstddef>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

namespace vanward {

// watch.cpp, which is compiled once, replaces functions of buffers as version 2 has them.
static_assert(offsetof(ggml_backend_buffer, iface) == 0 && offsetof(ggml_backend_buffer_i, memset_tensor) == 3 * sizeof(void *) &&
                  offsetof(ggml_backend_buffer_i, set_tensor_2d) == 6 * sizeof(void *) && offsetof(ggml_backend_buffer_i, cpy_tensor) == 8 * sizeof(void *) &&
                  sizeof(ggml_backend_buffer_i) == 11 * sizeof(void *),
              "buffers of this version are laid out in another way");

namespace {

// --- the device for the CPU -----------------------------------------------------------------------------------------------------

Context *context_of(ggml_backend_t backend) { return static_cast<Context *>(backend->context); }

ggml_backend_t open(ggml_backend_dev_t device, const char *) {
    static const ggml_guid guid = {0x76, 0x61, 0x6e, 0x77, 0x61, 0x72, 0x64, 0x2d, 0x63, 0x70, 0x75, 0x2d, 0x61, 0x63, 0x63, 0x31};
    ggml_backend_i calls = {};
    calls.get_name = [](ggml_backend_t) { return "Vanward"; };
    calls.free = [](ggml_backend_t backend) {
        delete context_of(backend);
        delete backend;
    };
    calls.graph_compute = [](ggml_backend_t backend, ggml_cgraph *graph) {
        try {
            return context_of(backend)->compute(graph);
        } catch (const std::exception &error) {
            log(GGML_LOG_LEVEL_ERROR, "vanward: %s", error.what());
            return GGML_STATUS_ALLOC_FAILED;
        }
    };
    try {
        return new ggml_backend{const_cast<ggml_guid_t>(&guid), calls, device, new Context};
    } catch (const std::exception &error) {
        log(GGML_LOG_LEVEL_ERROR, "vanward: %s", error.what());
        return nullptr;
    }
}

ggml_backend_device make_device(ggml_backend_reg_t registry) {
    ggml_backend_device_i calls = {};
    calls.get_name = [](ggml_backend_dev_t) { return "VANWARD"; };
    calls.get_description = [](ggml_backend_dev_t) { return "Vanward decode attention on the CPU"; };
    calls.get_memory = [](ggml_backend_dev_t, size_t *free, size_t *total) { *free = *total = 0; };
    calls.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
    calls.get_props = [](ggml_backend_dev_t device, ggml_backend_dev_props *properties) {
        *properties = {};
        properties->name = device->iface.get_name(device);
        properties->description = device->iface.get_description(device);
        properties->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
    };
    calls.init_backend = open;
    calls.get_buffer_type = [](ggml_backend_dev_t) { return buffer_type(); };
    calls.supports_op = [](ggml_backend_dev_t, const ggml_tensor *op) {
        try {
            return takes(op);
        } catch (const std::exception &error) {
            log(GGML_LOG_LEVEL_ERROR, "vanward: %s", error.what());
            return false;
        }
    };
    calls.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return ggml.ggml_backend_buft_is_host(type); };
    return {calls, registry, nullptr};
}

// --- devices that wrap others ---------------------------------------------------------------------------------------------------

Gpu &gpu_of(ggml_backend_dev_t device) { return *static_cast<Gpu *>(device->context); }
ggml_backend_dev_t inner_of(ggml_backend_dev_t device) { return gpu_of(device).inner(); }
ggml_backend_t inner_of(ggml_backend_t backend) { return static_cast<Wrapper *>(backend->context)->inner(); }

bool is_wrapper(ggml_backend_t backend);

/** A wrapper's call that is the wrapped backend's, or device's. */
template <auto member> struct Forward;
template <typename Calls, typename Self, typename Result, typename... Arguments, Result (*Calls::*member)(Self, Arguments...)>
struct Forward<member> {
    static Result call(Self self, Arguments... arguments) {
        auto inner = inner_of(self);
        return (inner->iface.*member)(inner, arguments...);
    }
    /** Absent where the wrapped one has none. */
    static void set(Calls &calls, const Calls &wrapped) { calls.*member = wrapped.*member == nullptr ? nullptr : call; }
};

template <auto... members, typename Calls> void forward(Calls &calls, const Calls &wrapped) { (Forward<members>::set(calls, wrapped), ...); }

ggml_backend_t open_wrapper(ggml_backend_dev_t device, const char *parameters) {
    static const ggml_guid guid = {0x76, 0x61, 0x6e, 0x77, 0x61, 0x72, 0x64, 0x2d, 0x67, 0x70, 0x75, 0x2d, 0x77, 0x72, 0x61, 0x70};
    ggml_backend_dev_t wrapped = inner_of(device);
    ggml_backend_t inner = wrapped->iface.init_backend(wrapped, parameters);
    if (inner == nullptr) {
        return nullptr;
    }
    using Self = ggml_backend_t;
    ggml_backend_i calls = {};
    calls.get_name = [](Self self) { return gpu_of(self->device).name(); };
    calls.free = [](Self self) {
        delete static_cast<Wrapper *>(self->context);
        delete self;
    };
    forward<&ggml_backend_i::get_tensor_async, &ggml_backend_i::get_tensor_2d_async, &ggml_backend_i::synchronize, &ggml_backend_i::event_record,
            &ggml_backend_i::event_wait>(calls, inner->iface);
    if (inner->iface.graph_optimize != nullptr) {
        calls.graph_optimize = [](Self self, ggml_cgraph *graph, ggml_backend_graph_optimize_params *parameters) {
            try {
                static_cast<Wrapper *>(self->context)->optimize(graph, [&](ggml_cgraph *shown) {
                    inner_of(self)->iface.graph_optimize(inner_of(self), shown, parameters);
                });
            } catch (const std::exception &error) {  // the graph is what it was
                log(GGML_LOG_LEVEL_ERROR, "vanward: %s", error.what());
            }
        };
    }
    // These go past the functions of a buffer.
    if (inner->iface.set_tensor_async != nullptr) {
        calls.set_tensor_async = [](Self self, ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
            inner_of(self)->iface.set_tensor_async(inner_of(self), tensor, data, offset, size);
            overwritten(tensor, offset, size);
        };
    }
    if (inner->iface.set_tensor_2d_async != nullptr) {
        calls.set_tensor_2d_async = [](Self self, ggml_tensor *tensor, const void *data, size_t offset, size_t size, size_t copies, size_t stride_tensor,
                                       size_t stride_data) {
            inner_of(self)->iface.set_tensor_2d_async(inner_of(self), tensor, data, offset, size, copies, stride_tensor, stride_data);
            overwritten(tensor, offset, copies == 0 ? 0 : (copies - 1) * stride_tensor + size);
        };
    }
    if (inner->iface.cpy_tensor_async != nullptr) {
        calls.cpy_tensor_async = [](Self from, Self to, const ggml_tensor *source, ggml_tensor *copy) {
            ggml_backend_t inner_to = inner_of(to);
            const bool done = inner_to->iface.cpy_tensor_async(is_wrapper(from) ? inner_of(from) : from, inner_to, source, copy);
            overwritten(copy);
            return done;
        };
    }
    calls.graph_compute = [](Self self, ggml_cgraph *graph) {
        try {
            return static_cast<Wrapper *>(self->context)->compute(graph);
        } catch (const std::exception &error) {
            log(GGML_LOG_LEVEL_ERROR, "vanward: %s", error.what());
            return GGML_STATUS_FAILED;
        }
    };
    try {
        return new ggml_backend{const_cast<ggml_guid_t>(&guid), calls, device, new Wrapper(gpu_of(device), inner)};
    } catch (const std::exception &error) {
        log(GGML_LOG_LEVEL_ERROR, "vanward: %s", error.what());
        return nullptr;
    }
}

bool is_wrapper(ggml_backend_t backend) { return backend->device != nullptr && backend->device->iface.init_backend == open_wrapper; }

ggml_backend_device wrap(Gpu &gpu, ggml_backend_reg_t registry) {
    using Self = ggml_backend_dev_t;
    ggml_backend_device_i calls = {};
    calls.get_name = [](Self self) { return gpu_of(self).name(); };
    calls.get_description = [](Self self) { return gpu_of(self).description(); };
    calls.get_type = [](Self self) -> enum ggml_backend_dev_type {
        const auto type = inner_of(self)->iface.get_type(inner_of(self));
        return type == GGML_BACKEND_DEVICE_TYPE_IGPU ? type : GGML_BACKEND_DEVICE_TYPE_GPU;
    };
    calls.get_props = [](Self self, ggml_backend_dev_props *properties) {
        inner_of(self)->iface.get_props(inner_of(self), properties);
        properties->name = gpu_of(self).name();
        properties->description = gpu_of(self).description();
        properties->type = self->iface.get_type(self);
    };
    calls.init_backend = open_wrapper;
    calls.get_memory = [](Self self, size_t *free, size_t *total) {
        inner_of(self)->iface.get_memory(inner_of(self), free, total);
        *free -= gpu_of(self).reserved_of(*free);
    };
    // llama.cpp asks for the operations of a context before it fits the context's size to the memory.
    calls.supports_op = [](Self self, const ggml_tensor *op) {
        gpu_of(self).note(op);
        return inner_of(self)->iface.supports_op(inner_of(self), op);
    };
    forward<&ggml_backend_device_i::get_buffer_type, &ggml_backend_device_i::get_host_buffer_type,
            &ggml_backend_device_i::buffer_from_host_ptr, &ggml_backend_device_i::supports_buft,
            &ggml_backend_device_i::offload_op, &ggml_backend_device_i::event_new, &ggml_backend_device_i::event_free,
            &ggml_backend_device_i::event_synchronize>(calls, gpu.inner()->iface);
    return {calls, registry, &gpu};
}

// --- the registry ---------------------------------------------------------------------------------------------------------------

void set_threads(ggml_backend_t backend, int threads) {
    if (!is_wrapper(backend)) {
        context_of(backend)->set_threads(threads);
        return;
    }
    ggml_backend_t inner = inner_of(backend);
    auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml.ggml_backend_reg_get_proc_address(inner->device->reg, "ggml_backend_set_n_threads"));
    if (set != nullptr) {
        set(inner, threads);
    }
}

/** Of the wrapped devices' registry: what asks about devices or makes buffers, and nothing that is done to a backend, which is another one here. */
void *wrapped_address(const char *name) {
    const std::string text = name;
    if (gpus().empty() || gpus()[0]->is_host() || text.find("set_") != std::string::npos || text.find("threadpool") != std::string::npos) {
        return nullptr;
    }
    return ggml.ggml_backend_reg_get_proc_address(gpus()[0]->inner()->reg, name);
}

/** The devices: the wrapped ones, and that for the CPU; which stands back where the CPU itself is wrapped. */
std::vector<ggml_backend_device> &devices(ggml_backend_reg_t registry = nullptr) {
    static std::vector<ggml_backend_device> all = [&] {
        std::vector<ggml_backend_device> made;
        bool wraps_cpu = false;
        for (Gpu *gpu : gpus()) {
            made.push_back(wrap(*gpu, registry));
            wraps_cpu = wraps_cpu || gpu->is_host();
        }
        if (!wraps_cpu) {
            made.push_back(make_device(registry));
        }
        return made;
    }();
    return all;
}

}  // namespace

ggml_backend_reg_t VANWARD_REGISTRY() {
    static ggml_backend_reg registry = {};
    devices(&registry);
    registry.api_version = GGML_BACKEND_API_VERSION;
    registry.iface.get_name = [](ggml_backend_reg_t) { return "Vanward"; };
    registry.iface.get_device_count = [](ggml_backend_reg_t) -> size_t { return devices().size(); };
    registry.iface.get_device = [](ggml_backend_reg_t, size_t index) { return index < devices().size() ? &devices()[index] : nullptr; };
    registry.iface.get_proc_address = [](ggml_backend_reg_t, const char *name) {
        return strcmp(name, "ggml_backend_set_n_threads") == 0     ? reinterpret_cast<void *>(set_threads)
               : strcmp(name, "vanward_ggml_counter") == 0         ? reinterpret_cast<void *>(vanward_ggml_counter)
               : strcmp(name, "vanward_ggml_read_options") == 0    ? reinterpret_cast<void *>(vanward_ggml_read_options)
               : strcmp(name, "vanward_ggml_forget_summaries") == 0 ? reinterpret_cast<void *>(vanward_ggml_forget_summaries)
                                                                   : wrapped_address(name);
    };
    return &registry;
}

}  // namespace vanward
