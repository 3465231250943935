#include "gpu_memory.h"

#include "attention.h"
#include "counters.h"
#include "cuda.h"
#include "ggml_calls.h"
#include "options.h"
#include "session.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace vanward {

namespace {

constexpr unsigned NON_BLOCKING = 1;
constexpr size_t PIECE = 1 << 20;

bool is_wanted(const std::string &name) {
    return std::any_of(options.devices.begin(), options.devices.end(), [&](const std::string &wanted) {
        const bool begins = !wanted.empty() && wanted.back() == '*';
        return begins ? name.compare(0, wanted.size() - 1, wanted, 0, wanted.size() - 1) == 0 : name == wanted;
    });
}

/** The devices of a backend that ggml has not loaded. */
std::vector<ggml_backend_dev_t> devices_of(const std::string &path) {
    std::vector<ggml_backend_dev_t> result;
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    auto init = library == nullptr ? nullptr : reinterpret_cast<ggml_backend_reg_t (*)()>(dlsym(library, "ggml_backend_init"));
    ggml_backend_reg_t registry = init == nullptr ? nullptr : init();
    if (registry == nullptr) {
        const char *error = dlerror();
        log(GGML_LOG_LEVEL_ERROR, "vanward: VANWARD_GGML_BACKEND: %s", error != nullptr ? error : "the backend refuses to be loaded");
        return result;
    }
    for (size_t i = 0; i < ggml.ggml_backend_reg_dev_count(registry); ++i) {
        result.push_back(ggml.ggml_backend_reg_dev_get(registry, i));
    }
    return result;
}

std::vector<Gpu *> find_gpus() {
    std::vector<ggml_backend_dev_t> all;
    if (!options.backend.empty()) {
        all = devices_of(options.backend);
    } else {
        for (size_t i = 0; i < ggml.ggml_backend_dev_count(); ++i) {
            all.push_back(ggml.ggml_backend_dev_get(i));
        }
    }
    std::vector<Gpu *> result;
    for (ggml_backend_dev_t device : all) {
        if (is_wanted(ggml.ggml_backend_dev_name(device))) {
            result.push_back(new Gpu(device, "VANWARD" + std::to_string(result.size())));
        }
    }
    return result;
}

}  // namespace

const std::vector<Gpu *> &gpus() {
    static const std::vector<Gpu *> found = find_gpus();
    return found;
}

Gpu::Gpu(ggml_backend_dev_t inner, std::string name)
    : inner_(inner), name_(std::move(name)), description_(std::string(ggml.ggml_backend_dev_description(inner)) + ", decode attention by Vanward") {}

ggml_backend_buffer_type_t Gpu::buffer_type() const { return ggml.ggml_backend_dev_buffer_type(inner_); }

bool Gpu::is_host() const { return ggml.ggml_backend_buft_is_host(buffer_type()); }

size_t Gpu::reserved_of(size_t free) const {
    // Two rows of 16 bits for each block of keys, which are half of the cache; by AXIS in INT4 a third of that. Until a context shows what heads
    // it has, they may be of any size.
    const bool int4 = options.method == Method::axis && knows_heads_ && !has_wide_summaries_;
    const int share = options.block * (int4 ? 3 : 1);
    return options.enabled && options.sparse ? free / static_cast<size_t>(share + 1) : 0;
}

void Gpu::note(const ggml_tensor *op) {
    Node node;
    if (strcmp(ggml.ggml_op_name(op->op), "FLASH_ATTN_EXT") == 0 && take_apart(op, node) == nullptr) {
        if (!are_summaries_int4(node.head_dim)) {
            has_wide_summaries_ = true;
        }
        knows_heads_ = true;
    }
}

std::string Gpu::make_session() {
    const char *missing = find_cuda();
    if (missing != nullptr) {
        return std::string("CUDA's driver has no ") + missing;
    }
    ggml_backend_dev_props properties = {};
    ggml.ggml_backend_dev_get_props(inner_, &properties);
    int device = 0;
    if (properties.device_id != nullptr && cuda.cuDeviceGetByPCIBusId != nullptr && !is_host()) {
        if (cuda.cuDeviceGetByPCIBusId(&device, properties.device_id) != 0) {
            return std::string("CUDA has no device ") + properties.device_id;
        }
        for (int same = -1; cuda.cuDeviceGet(&same, ordinal_) == 0 && same != device; ++ordinal_) {
        }
    } else if (cuda.cuDeviceGet(&device, 0) != 0) {
        return "CUDA has no device";
    }
    if (cuda.cuDevicePrimaryCtxRetain(&context_, device) != 0) {
        return "CUDA's device has no context";
    }
    vwd_session_options settings = VWD_SESSION_OPTIONS_INIT;
    settings.device = VWD_DEVICE_CUDA;
    settings.device_id = ordinal_;
    if (vwd_session_create(&settings, &session_) != VWD_OK) {
        session_ = nullptr;
        return last_error();
    }
    return "";
}

vwd_session *Gpu::session() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!has_tried_) {
        has_tried_ = true;
        const std::string error = make_session();
        if (!error.empty()) {
            counters.errors += 1;
            log(GGML_LOG_LEVEL_ERROR, "vanward: %s is left to ggml: %s", name(), error.c_str());
        }
    }
    return session_;
}

void Gpu::reach(ggml_backend_buffer_t buffer) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(ggml.ggml_backend_buffer_get_base(buffer));
    const uintptr_t end = begin + ggml.ggml_backend_buffer_get_size(buffer);
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = reached_.find(begin);
    if (found != reached_.end() && found->second == end) {
        return;
    }
    // Buffers come and go unseen: what overlaps is gone.
    for (auto each = reached_.begin(); each != reached_.end();) {
        if (each->first < end && begin < each->second) {
            cuda.cuMemHostUnregister(reinterpret_cast<void *>(each->first));
            each = reached_.erase(each);
        } else {
            ++each;
        }
    }
    must(cuda.cuMemHostRegister_v2(reinterpret_cast<void *>(begin), end - begin, 0), "cuMemHostRegister");
    reached_[begin] = end;
}

GpuMemory::GpuMemory(Gpu &gpu) : gpu_(gpu) {
    if (gpu.session() == nullptr) {
        throw std::runtime_error("no session");
    }
    device_type = 2;
    device_id = gpu.ordinal();
    InContext current(gpu.context());
    must(cuda.cuStreamCreate(&stream, NON_BLOCKING), "cuStreamCreate");
}

GpuMemory::~GpuMemory() {
    InContext current(gpu_.context());
    cuda.cuStreamSynchronize(stream);
    for (const std::vector<Piece> &pieces : {staging_, last_staging_}) {
        for (const Piece &piece : pieces) {
            vwd_pinned_free(gpu_.session(), piece.data, stream);
        }
    }
    for (auto &[data, buffer] : buffers_) {
        ggml.ggml_backend_buffer_free(buffer);
    }
    vwd_session_forget_stream(gpu_.session(), stream);
    cuda.cuStreamDestroy_v2(stream);
}

void *GpuMemory::allocate(size_t bytes) {
    ggml_backend_buffer_t buffer = ggml.ggml_backend_buft_alloc_buffer(gpu_.buffer_type(), std::max<size_t>(bytes, 256));
    if (buffer == nullptr) {
        throw std::bad_alloc();
    }
    if (gpu_.is_host()) {
        try {
            gpu_.reach(buffer);
        } catch (...) {
            ggml.ggml_backend_buffer_free(buffer);
            throw;
        }
    }
    void *data = ggml.ggml_backend_buffer_get_base(buffer);
    buffers_[data] = buffer;
    return data;
}

void GpuMemory::release(void *data) {
    cuda.cuStreamSynchronize(stream);  // called by destructors, which must not throw
    ggml.ggml_backend_buffer_free(buffers_.at(data));
    buffers_.erase(data);
}

void *GpuMemory::stage(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    for (Piece &piece : staging_) {
        if (piece.size - piece.used >= bytes) {
            piece.used += bytes;
            return piece.data + piece.used - bytes;
        }
    }
    void *data = nullptr;
    const size_t size = std::max(bytes, PIECE);
    if (vwd_pinned_alloc(gpu_.session(), size, &data) != VWD_OK) {
        throw std::bad_alloc();
    }
    staging_.push_back({static_cast<char *>(data), size, bytes});
    return data;
}

void GpuMemory::put(void *to, const void *from, size_t bytes) {
    void *staged = stage(bytes);
    memcpy(staged, from, bytes);
    must(cuda.cuMemcpyHtoDAsync_v2(reinterpret_cast<uint64_t>(to), staged, bytes, stream), "cuMemcpyHtoDAsync");
}

void GpuMemory::copy(void *to, const void *from, size_t bytes) {
    must(cuda.cuMemcpyDtoDAsync_v2(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes, stream), "cuMemcpyDtoDAsync");
}

void GpuMemory::wait() { must(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize"); }

const void *GpuMemory::read(const void *data, size_t bytes, std::vector<char> &copy) {
    copy.resize(bytes);
    if (bytes > 0) {
        must(cuda.cuMemcpyDtoHAsync_v2(copy.data(), reinterpret_cast<uint64_t>(data), bytes, stream), "cuMemcpyDtoHAsync");
    }
    wait();
    return copy.data();
}

const void *GpuMemory::get(const void *from, size_t bytes) { return get(std::vector<const void *>{from}, bytes); }

const void *GpuMemory::get(const std::vector<const void *> &from, size_t bytes) {
    char *staged = static_cast<char *>(stage(from.size() * bytes));
    for (size_t i = 0; i < from.size(); ++i) {
        must(cuda.cuMemcpyDtoHAsync_v2(staged + i * bytes, reinterpret_cast<uint64_t>(from[i]), bytes, stream), "cuMemcpyDtoHAsync");
    }
    return staged;
}

void GpuMemory::next_step() {
    std::swap(staging_, last_staging_);
    for (Piece &piece : staging_) {
        piece.used = 0;
    }
}

}  // namespace vanward
