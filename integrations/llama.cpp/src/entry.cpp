// Compiled once for each version of the backend API, with VANWARD_REGISTRY naming its function: fills that version's tables.

#include "device.h"
#include "entry.h"
#include "exports.h"
#include "ggml-backend-impl.h"
#include "ggml_calls.h"

#include <cstring>
#include <exception>

namespace vanward {

namespace {

Context *context_of(ggml_backend_t backend) { return static_cast<Context *>(backend->context); }

void set_threads(ggml_backend_t backend, int threads) { context_of(backend)->set_threads(threads); }

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

}  // namespace

ggml_backend_reg_t VANWARD_REGISTRY() {
    static ggml_backend_reg registry = {};
    static ggml_backend_device device = make_device(&registry);
    registry.api_version = GGML_BACKEND_API_VERSION;
    registry.iface.get_name = [](ggml_backend_reg_t) { return "Vanward"; };
    registry.iface.get_device_count = [](ggml_backend_reg_t) -> size_t { return 1; };
    registry.iface.get_device = [](ggml_backend_reg_t, size_t index) { return index == 0 ? &device : nullptr; };
    registry.iface.get_proc_address = [](ggml_backend_reg_t, const char *name) {
        return strcmp(name, "ggml_backend_set_n_threads") == 0     ? reinterpret_cast<void *>(set_threads)
               : strcmp(name, "vanward_ggml_counter") == 0         ? reinterpret_cast<void *>(vanward_ggml_counter)
               : strcmp(name, "vanward_ggml_forget_summaries") == 0 ? reinterpret_cast<void *>(vanward_ggml_forget_summaries)
                                                                   : nullptr;
    };
    return &registry;
}

}  // namespace vanward
