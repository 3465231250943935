#include "device.h"

#include "counters.h"
#include "ggml_calls.h"
#include "options.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace vanward {

namespace {

/** The threads of the context that computed last. */
std::atomic<int> latest_threads{1};

/**
 * A ggml that has threads of its own starts them anew, or lets them spin, for each part of a graph that is cut: with several of them
 * the parts cost more than attention saves.
 */
bool leaves_to_ggml() { return options.threads == 0 && latest_threads > 1 && !shares_threads(); }
/** Whether it is certain that none is left to ggml for its threads, even in a context that has not computed yet. */
bool never_leaves_to_ggml() { return options.threads > 0 || shares_threads(); }

/** Names, not numbers: the numbers of operations differ between releases. */
bool is_op(const ggml_tensor *op, const char *name) { return strcmp(ggml.ggml_op_name(op->op), name) == 0; }

/** Whether the node writes rows of a cache's keys (k) or values (v) that are stored as the device reads them. */
bool writes_rows(const ggml_tensor *op, char kind) {
    return is_op(op, "SET_ROWS") && layer_number(op->view_src, kind) >= 0;
}

bool can_write(const ggml_tensor *op) {
    const ggml_tensor *rows = op->src[0], *numbers = op->src[1], *root = op->view_src;
    return rows != nullptr && numbers != nullptr && rows->type == GGML_TYPE_F32 && rows->nb[0] == 4 && rows->ne[2] == 1 && rows->ne[3] == 1 &&
           numbers->type == GGML_TYPE_I64 && numbers->nb[0] == 8 && numbers->ne[1] == 1 && numbers->ne[0] >= rows->ne[1] &&
           (op->type == GGML_TYPE_F16 || op->type == GGML_TYPE_BF16) && op->type == root->type && op->ne[0] == root->ne[0] &&
           rows->ne[0] == op->ne[0] && op->nb[1] == root->nb[1] && op->ne[2] == 1 && op->ne[3] == 1 && op->data == root->data;
}

/**
 * Which writes are followed: all of a new cache, whose first keys say that it is in use, and those of a cache in which tokens are
 * selected. Where no attention can be taken, as of MLA or with ALiBi, they are left to ggml after a few graphs, which they would only cut.
 */
bool takes_write(const ggml_tensor *op, char kind) {
    std::shared_ptr<Cache> cache = find_cache(op->view_src);
    if (kind == 'v' && op->ne[0] == 1 && cache != nullptr) {
        std::lock_guard<std::mutex> guard(cache->mutex);
        cache->no_attention = true;
    }
    if (!can_write(op)) {
        return false;
    }
    if (cache == nullptr) {
        return true;
    }
    std::lock_guard<std::mutex> guard(cache->mutex);
    cache->writes_alone += 1;
    if (!cache->no_attention && !cache->is_unread() && !leaves_to_ggml() && cache->rows_in_use > options.dense_below_on(false)) {
        return true;
    }
    if (kind == 'k') {
        Layer *layer = cache->find_layer(op->view_src);
        if (layer != nullptr) {
            layer->blind = true;
            layer->forget();
        }
    }
    return false;
}

/**
 * Whether keys lie in a cache that no graph was seen to write: a state was restored into it. llama.cpp clears a new cache, and asks
 * then whether flash attention is the CPU's.
 */
bool is_restored(const Node &node) {
    const ggml_tensor *keys = node.keys;
    if (keys->data == nullptr || keys->buffer == nullptr || !ggml.ggml_backend_buft_is_host(ggml.ggml_backend_buffer_get_type(keys->buffer))) {
        return false;
    }
    const char *first = static_cast<const char *>(node.k->data);
    for (int stream = 0; stream < node.streams; ++stream, first += node.k->nb[3]) {
        if (std::any_of(first, first + node.k->nb[1], [](char byte) { return byte != 0; })) {
            return true;
        }
    }
    return false;
}

bool takes_attention(const ggml_tensor *op) {
    Node node;
    std::atomic<uint64_t> *reason = take_apart(op, node);
    if (reason == nullptr) {
        std::shared_ptr<Cache> cache = find_cache(node.keys);
        if (cache != nullptr) {
            std::lock_guard<std::mutex> guard(cache->mutex);
            cache->rows_in_use = node.k->ne[1];
            cache->writes_alone = 0;
        }
        const bool is_early = cache == nullptr && !(never_leaves_to_ggml() && is_restored(node));
        reason = node.rows * node.streams > options.rows           ? &counters.declined_rows
                 : is_early                                        ? &counters.declined_early
                 : node.k->ne[1] <= options.dense_below_on(false)  ? &counters.declined_short
                 : leaves_to_ggml()                                ? &counters.declined_threads
                                                                   : nullptr;
    }
    if (reason != nullptr) {
        *reason += 1;
    }
    return reason == nullptr;
}

}  // namespace

bool takes(const ggml_tensor *op) {
    if (!options.enabled) {
        return false;
    }
    if (is_op(op, "FLASH_ATTN_EXT")) {
        return takes_attention(op);
    }
    for (char kind : {'k', 'v'}) {
        if (writes_rows(op, kind)) {
            return takes_write(op, kind);
        }
    }
    // The rotation of keys in their cache, by which llama.cpp moves a sequence: ggml's, but every key is another one after it.
    if (is_op(op, "ROPE") && (layer_number(op->view_src, 'k') >= 0)) {
        std::shared_ptr<Cache> cache = find_cache(op->view_src);
        if (cache != nullptr) {
            std::lock_guard<std::mutex> guard(cache->mutex);
            cache->forget();
            counters.shifts += 1;
        }
    }
    return false;
}

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type_t type = nullptr;
    if (type == nullptr) {
        ggml_backend_dev_t cpu = ggml.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        type = cpu == nullptr ? nullptr : ggml.ggml_backend_dev_buffer_type(cpu);
    }
    return type;
}

void log_counters(ggml_log_level level) {
#define X(name, meaning)                                                                                                       \
    if (counters.name != 0) {                                                                                                  \
        log(level, "vanward: %10llu %s", static_cast<unsigned long long>(counters.name), meaning);                             \
    }
    VANWARD_GGML_COUNTERS(X)
#undef X
}

Context::Context() : attention_(host_memory()) {
    ggml_backend_dev_t cpu = ggml.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    cpu_ = cpu == nullptr ? nullptr : ggml.ggml_backend_dev_init(cpu, nullptr);
    ggml_init_params parameters = {ggml.ggml_graph_overhead_custom(8, false) + 1024, nullptr, true};
    memory_ = ggml.ggml_init(parameters);
    alone_ = memory_ == nullptr ? nullptr : ggml.ggml_new_graph_custom(memory_, 8, false);
}

Context::~Context() {
    release_caches(this);
    if (memory_ != nullptr) {
        ggml.ggml_free(memory_);
    }
    if (cpu_ != nullptr) {
        ggml.ggml_backend_free(cpu_);
    }
    log_counters(GGML_LOG_LEVEL_DEBUG);
}

void Context::set_threads(int threads) {
    threads_ = threads;
    latest_threads = threads;
}

bool Context::pass_to_ggml(ggml_tensor *op) {
    if (cpu_ == nullptr || alone_ == nullptr) {
        return false;
    }
    ggml_backend_reg_t registry = ggml.ggml_backend_dev_backend_reg(ggml.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(ggml.ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
    if (set != nullptr) {
        set(cpu_, threads_);
    }
    ggml.ggml_graph_clear(alone_);
    ggml.ggml_graph_add_node(alone_, op);
    return ggml.ggml_backend_graph_compute(cpu_, alone_) == GGML_STATUS_SUCCESS;
}

bool Context::write(ggml_tensor *op) {
    const ggml_tensor *rows = op->src[0], *root = op->view_src;
    const int64_t *numbers = static_cast<const int64_t *>(op->src[1]->data);
    const int64_t places = op->ne[1];
    for (int64_t i = 0; i < rows->ne[1]; ++i) {
        if (numbers[i] < 0 || numbers[i] >= places) {
            return false;
        }
        const float *from = reinterpret_cast<const float *>(static_cast<const char *>(rows->data) + static_cast<size_t>(i) * rows->nb[1]);
        char *to = static_cast<char *>(root->data) + static_cast<size_t>(numbers[i]) * root->nb[1];
        if (op->type == GGML_TYPE_F16) {
            ggml.ggml_fp32_to_fp16_row(from, reinterpret_cast<ggml_fp16_t *>(to), rows->ne[0]);
        } else {
            ggml.ggml_fp32_to_bf16_row(from, reinterpret_cast<ggml_bf16_t *>(to), rows->ne[0]);
        }
    }
    std::shared_ptr<Cache> cache = cache_of(root, this, host_memory());
    std::lock_guard<std::mutex> guard(cache->mutex);
    if (layer_number(root, 'k') >= 0) {
        Layer &layer = cache->layer(root);
        layer.blind = false;
        for (int64_t i = 0; i < rows->ne[1]; ++i) {
            cache->written(layer, numbers[i], 1);
        }
    }
    counters.writes += 1;
    return true;
}

bool Context::attend(ggml_tensor *op) {
    Node node;
    if (take_apart(op, node) == nullptr) {
        node.find_stream();
        std::shared_ptr<Cache> cache = cache_of(node.keys, this, host_memory());
        std::lock_guard<std::mutex> guard(cache->mutex);
        Layer &layer = cache->layer(node.keys);
        std::string error;
        vwd_session *session = session_.use(options.threads > 0 ? options.threads : threads_, error);
        if (session == nullptr) {
            counters.errors += 1;
            log(GGML_LOG_LEVEL_ERROR, "vanward: no session, ggml computes attention: %s", error.c_str());
        } else if (attention_.compute(node, *cache, layer, session)) {
            return true;
        }
    }
    counters.passed += 1;
    return pass_to_ggml(op);
}

ggml_status Context::compute(ggml_cgraph *graph) {
    ggml_tensor **nodes = ggml.ggml_graph_nodes(graph);
    const int count = ggml.ggml_graph_n_nodes(graph);
    for (int i = 0; i < count; ++i) {
        ggml_tensor *op = nodes[i];
        bool done = true;
        if (is_op(op, "FLASH_ATTN_EXT")) {
            done = attend(op);
        } else if (is_op(op, "SET_ROWS")) {
            done = write(op);
        } else if (!is_op(op, "VIEW") && !is_op(op, "RESHAPE") && !is_op(op, "PERMUTE") && !is_op(op, "TRANSPOSE") && !is_op(op, "NONE")) {
            done = pass_to_ggml(op);
        }
        if (!done) {
            log(GGML_LOG_LEVEL_ERROR, "vanward: node %s (%s) could not be computed", op->name, ggml.ggml_op_name(op->op));
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

}  // namespace vanward
