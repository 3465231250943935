#include "wrapper.h"

#include "capture.h"
#include "counters.h"
#include "cuda.h"
#include "ggml-backend-impl.h"
#include "ggml_calls.h"
#include "graph.h"
#include "operations.h"
#include "options.h"
#include "watch.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace vanward {

namespace {

/** Tensors of our own in a step: three for each attention, and some. */
constexpr size_t OWN_TENSORS = 4096;

/** Whether this ggml has it so: a graph's array of nodes follows the struct, whose fields say the same as ggml's functions. */
bool has_graphs_so(ggml_context *memory) {
    ggml_cgraph *made = ggml.ggml_new_graph_custom(memory, 8, false);
    const Graph *graph = reinterpret_cast<const Graph *>(made);
    return reinterpret_cast<char *>(ggml.ggml_graph_nodes(made)) == reinterpret_cast<const char *>(graph) + sizeof(Graph) &&
           graph->size == 8 && graph->n_nodes == 0 && graph->nodes == ggml.ggml_graph_nodes(made) && graph->uid == 0;
}

}  // namespace

const int32_t *Mirror::show(const int32_t *values, size_t count) {
    if (there_.size() < count) {
        there_.grow(2 * count);
        here_.clear();
    }
    if (!std::equal(values, values + count, here_.begin(), here_.end())) {
        there_.put(0, values, count);  // throws where nothing was copied
        here_.assign(values, values + count);
    }
    return there_.data();
}

Wrapper::Wrapper(Gpu &gpu, ggml_backend_t inner) : gpu_(gpu), inner_(inner) {
    if (!options.enabled) {
        return;
    }
    try {
        memory_ = std::make_unique<GpuMemory>(gpu);
        attention_ = std::make_unique<Attention>(*memory_);
        numbers_ = std::make_unique<Array<int32_t>>(*memory_);
        keys_ = std::make_unique<Array<float>>(*memory_);
        ggml_init_params parameters = {OWN_TENSORS * (sizeof(ggml_tensor) + 64) + ggml.ggml_graph_overhead_custom(8, false), nullptr, true};
        tensors_ = ggml.ggml_init(parameters);
        if (tensors_ == nullptr || !has_graphs_so(tensors_)) {
            throw std::runtime_error("this ggml's graphs are laid out in another way");
        }
        entered_ = ggml.ggml_backend_event_new(gpu.inner());
        left_ = ggml.ggml_backend_event_new(gpu.inner());
    } catch (const std::exception &error) {
        log(GGML_LOG_LEVEL_ERROR, "vanward: %s is left to ggml: %s", gpu.name(), error.what());
        memory_ = nullptr;
    }
}

Wrapper::~Wrapper() {
    ggml.ggml_backend_synchronize(inner_);
    plans_.clear();
    cuts_.clear();
    writes_.clear();
    readings_.clear();
    for (const auto &each : inputs_) {
        each->forget();
    }
    if (memory_ != nullptr) {
        InContext current(gpu_.context());
        cuda.cuStreamSynchronize(memory_->stream);
        steps_.clear();
        release_caches(this);
        mirrors_.clear();
        numbers_ = nullptr;
        keys_ = nullptr;
        attention_ = nullptr;
        memory_ = nullptr;
    }
    for (ggml_backend_event_t event : {entered_, left_}) {
        if (event != nullptr) {
            ggml.ggml_backend_event_free(event);
        }
    }
    if (tensors_ != nullptr) {
        ggml.ggml_free(tensors_);
    }
    ggml.ggml_backend_free(inner_);
}

// --- order, and what goes to the wrapped backend ----------------------------------------------------------------------------

void Wrapper::enter() {
    if (entered_ == nullptr) {
        ggml.ggml_backend_synchronize(inner_);
        return;
    }
    ggml.ggml_backend_event_record(entered_, inner_);
    must(cuda.cuStreamWaitEvent(memory_->stream, entered_->context, 0), "cuStreamWaitEvent");
}

void Wrapper::leave() {
    if (left_ == nullptr) {
        memory_->wait();
        return;
    }
    must(cuda.cuEventRecord(left_->context, memory_->stream), "cuEventRecord");
    ggml.ggml_backend_event_wait(inner_, left_);
}

ggml_status Wrapper::pass(ggml_cgraph *graph, int from, int to) {
    return from == to ? GGML_STATUS_SUCCESS : pass_nodes(graph, ggml.ggml_graph_nodes(graph) + from, to - from);
}

ggml_status Wrapper::pass_nodes(const ggml_cgraph *like, ggml_tensor **nodes, int count) {
    // As ggml cuts graphs itself: without leafs and gradients, with the whole graph's counts of uses, by which operations are fused.
    Graph slice = *reinterpret_cast<const Graph *>(like);
    slice.size = slice.n_leafs = 0;
    slice.grads = slice.grad_accs = slice.leafs = nullptr;
    slice.nodes = nodes;
    slice.n_nodes = count;
    slice.uid = 0;
    if (is_capturing_) {
        nothing_.op_params[0] += 1;
        with_nothing_.assign(1, &nothing_);
        with_nothing_.insert(with_nothing_.end(), nodes, nodes + count);
        slice.nodes = with_nothing_.data();
        slice.n_nodes += 1;
    }
    return ggml.ggml_backend_graph_compute_async(inner_, reinterpret_cast<ggml_cgraph *>(&slice));
}

ggml_status Wrapper::pass_whole(ggml_cgraph *graph) { return ggml.ggml_backend_graph_compute_async(inner_, graph); }

void Wrapper::optimize(ggml_cgraph *graph, const std::function<void(ggml_cgraph *)> &show) {
    if (memory_ == nullptr) {  // graphs are passed on whole
        show(graph);
        return;
    }
    // What the backend says about memory is about tensors, and holds in any order. With GGML_CUDA_GRAPH_OPT=1 ggml-cuda also changes the order, and
    // remembers nodes at which streams fork and join. They join at attentions, which are not passed on: so the order is restored, and the
    // forks give way to those of a graph that has none, as ggml-cuda remembers the last graph's alone.
    Graph &known = *reinterpret_cast<Graph *>(graph);
    const Graph before = known;
    const std::vector<ggml_tensor *> nodes(known.nodes, known.nodes + known.n_nodes);
    show(graph);
    known = before;
    std::copy(nodes.begin(), nodes.end(), known.nodes);
    ggml_tensor *nothing = &nothing_;
    Graph without = before;
    without.nodes = &nothing;
    without.n_nodes = 1;
    without.uid = 0;
    show(reinterpret_cast<ggml_cgraph *>(&without));
}

bool Wrapper::compute_alone(ggml_tensor *node) {
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    ggml.ggml_graph_clear(alone_);
    ggml.ggml_graph_add_node(alone_, node);
    return pass_nodes(alone_, &node, 1) == GGML_STATUS_SUCCESS;
}

// --- attention ----------------------------------------------------------------------------------------------------------------

const std::vector<Batch> &Wrapper::batches_of(const Cut &cut) const {
    const Plan &plan = plans_[cut.plan];
    return attention_->is_sparse(*cut.layer) ? plan.sparse : plan.dense;
}

bool Wrapper::selects_beside(const Cut &cut) const {
    const std::vector<Batch> &batches = batches_of(cut);
    // Several batches would write their lists to the same memory.
    return options.beside && cut.queries_end > 0 && batches.size() == 1 && batches[0].is_late;
}

bool Wrapper::select_beside(const Cut &cut) {
    std::lock_guard<std::mutex> guard(plans_[cut.plan].cache->mutex);
    try {
        enter();
        const bool done = attention_->select(cut.node, *cut.layer, batches_of(cut)[0], gpu_.session());
        counters.selected_beside += done;
        return done;
    } catch (const std::exception &error) {
        return failed(error);
    }
}

bool Wrapper::attend(const Cut &cut, bool is_selected) {
    Plan &plan = plans_[cut.plan];
    if (plan.placed.empty()) {
        return false;
    }
    bool done = true;
    std::lock_guard<std::mutex> guard(plan.cache->mutex);
    try {
        enter();
        for (const Batch &batch : batches_of(cut)) {
            done = done && attention_->attend(cut.node, *cut.layer, batch, gpu_.session(), is_selected);
            if (options.check && done) {
                attention_->check_results(cut.node, batch);
                if (!batch.is_late) {
                    attention_->check_summaries(cut.node, *cut.layer, batch, gpu_.session());
                }
            }
        }
    } catch (const std::exception &error) {
        done = failed(error);
    }
    leave();  // ggml waits for what was enqueued before a failure, too
    if (!done) {
        plan.cache->forget();
    }
    return done;
}

bool Wrapper::is_late() const {
    return std::any_of(plans_.begin(), plans_.end(), [](const Plan &plan) {
        return std::any_of(plan.sparse.begin(), plan.sparse.end(), [](const Batch &batch) { return batch.is_late; });
    });
}

bool Wrapper::update_late() {
    bool done = true;
    for (size_t i = 0; i < plans_.size(); ++i) {
        Plan &plan = plans_[i];
        std::vector<std::pair<const Node *, const Layer *>> layers;
        for (const Cut &cut : cuts_) {
            const bool is_new = std::none_of(layers.begin(), layers.end(), [&](const auto &each) { return each.second == cut.layer; });
            if (cut.plan == i && is_new && attention_->is_sparse(*cut.layer)) {
                layers.emplace_back(&cut.node, cut.layer);
            }
        }
        std::lock_guard<std::mutex> guard(plan.cache->mutex);
        for (const Batch &batch : plan.sparse) {
            if (!batch.is_late) {
                continue;
            }
            bool is_updated = false;
            try {
                is_updated = attention_->update_late(layers, batch, gpu_.session());
                if (is_updated && options.check) {
                    for (const auto &[node, layer] : layers) {
                        attention_->check_summaries(*node, *layer, batch, gpu_.session());
                    }
                }
            } catch (const std::exception &error) {
                is_updated = failed(error);
            }
            if (!is_updated) {
                plan.cache->forget();
                done = false;
            }
        }
    }
    return done;
}

// --- a step as a CUDA graph -----------------------------------------------------------------------------------------------------

bool Wrapper::can_be_captured() const {
    return options.graphs && !options.check && entered_ != nullptr && left_ != nullptr && Capture::is_possible() && !known_graph_.waits &&
           std::none_of(plans_.begin(), plans_.end(), [](const Plan &plan) { return plan.placed.empty(); });
}

Description Wrapper::describe_calls() const {
    Description calls;
    for (const Cut &cut : cuts_) {
        calls.add(cut.index);
        calls.add(cut.node.q->data);
        calls.add(cut.node.values->data);
        calls.add(selects_beside(cut));
        for (const Batch &batch : batches_of(cut)) {
            attention_->describe(*cut.layer, batch, calls);
        }
    }
    return calls;
}

bool Wrapper::run_captured(ggml_cgraph *graph) {
    if (!can_be_captured()) {
        return false;
    }
    const int count = ggml.ggml_graph_n_nodes(graph);
    const Node &first = cuts_[0].node;
    Step &step = steps_.of({count, static_cast<int>(cuts_.size()), cuts_[0].layer->number, first.rows * first.streams, is_late()});
    const Way way = step.decide(reinterpret_cast<const Graph *>(graph)->uid, describe_calls(), [&](Description &nodes) {
        for (int i = 0; i < count; ++i) {
            nodes.add(*ggml.ggml_graph_nodes(graph)[i]);
        }
    });
    if (way == Way::eager) {
        return false;
    }
    try {
        enter();
        if (way == Way::capture) {
            Capture capture(memory_->stream);
            is_capturing_ = true;
            leave();  // the wrapped backend's stream joins the capture
            const bool done = run(graph) == GGML_STATUS_SUCCESS;
            enter();
            is_capturing_ = false;
            if (!done) {
                throw std::runtime_error("a part of it failed");
            }
            (capture.end(step.graph) == Capture::Made::updated ? counters.updated : counters.captured) += 1;
            step.captured();
        }
        launch(step.graph, memory_->stream);
        leave();
    } catch (const std::exception &error) {
        is_capturing_ = false;
        step.refuse();
        log(GGML_LOG_LEVEL_WARN, "vanward: steps of this shape go without a CUDA graph: %s", error.what());
        return false;
    }
    if (way == Way::replay) {
        counters.replayed += 1;
        for (const Cut &cut : cuts_) {
            counters.selected_beside += selects_beside(cut);
            for (const Batch &batch : batches_of(cut)) {
                (batch.sparse ? counters.sparse : counters.dense) += 1;
            }
        }
    }
    return true;
}

// --- a graph --------------------------------------------------------------------------------------------------------------------

ggml_status Wrapper::compute(ggml_cgraph *graph) {
    // A graph may write over its inputs, and what it writes nobody says.
    struct Expiry {
        const std::vector<std::shared_ptr<Inputs>> &all;
        ~Expiry() {
            for (const auto &each : all) {
                each->expire();
            }
        }
    } expiry = {inputs_};
    if (memory_ == nullptr || !look_through(graph)) {
        return pass_whole(graph);
    }
    if (is_left_unseen()) {
        counters.declined_short += cuts_.size();
        return pass_whole(graph);
    }
    InContext current(gpu_.context());
    bool is_ours = false;
    try {
        is_ours = prepare();
    } catch (const std::exception &error) {  // nothing of the graph is computed yet
        failed(error);
        forget();
        counters.passed += cuts_.size();
    }
    if (!is_ours) {
        return pass_whole(graph);
    }
    const Timed timed(counters.launch_ns);
    ggml_status status = GGML_STATUS_FAILED;
    try {
        if (run_captured(graph)) {
            status = GGML_STATUS_SUCCESS;
        } else {
            counters.eager += 1;
            status = run(graph);
        }
    } catch (const std::exception &error) {
        failed(error);
    }
    if (status != GGML_STATUS_SUCCESS) {
        forget();
        return status;
    }
    try {
        take_prints();
    } catch (const std::exception &error) {
        failed(error);
        forget();
    }
    return status;
}

bool Wrapper::prepare() {
    ggml.ggml_reset(tensors_);
    alone_ = ggml.ggml_new_graph_custom(tensors_, 8, false);
    {
        const Timed timed(counters.read_ns);
        read_inputs();
    }
    const Timed timed(counters.plan_ns);
    if (cuts_.empty() || !make_plans()) {
        counters.passed += cuts_.size();
        return false;
    }
    if (is_left()) {
        counters.declined_short += cuts_.size();
        return false;
    }
    mirrors_used_ = 0;
    for (Plan &plan : plans_) {
        std::lock_guard<std::mutex> guard(plan.cache->mutex);
        if (!plan.placed.empty()) {
            lay_out(plan);
        }
    }
    return true;
}

bool Wrapper::failed(const std::exception &error) {
    counters.errors += 1;
    if (!has_failed_) {
        has_failed_ = true;
        log(GGML_LOG_LEVEL_ERROR, "vanward: a step failed and is left to ggml where that is possible: %s", error.what());
    }
    return false;
}

void Wrapper::forget() {
    readings_.clear();
    auto forget_one = [](Cache &cache) {
        std::lock_guard<std::mutex> guard(cache.mutex);
        cache.forget();
    };
    for (const Plan &plan : plans_) {
        forget_one(*plan.cache);
    }
    for (const Write &write : writes_) {
        forget_one(*write.cache);
    }
}

ggml_status Wrapper::run(ggml_cgraph *graph) {
    int next = 0;
    for (const Cut &cut : cuts_) {
        ggml_status status = GGML_STATUS_SUCCESS;
        bool is_selected = false;
        if (selects_beside(cut)) {
            status = pass(graph, next, cut.queries_end);
            next = cut.queries_end;
            is_selected = status == GGML_STATUS_SUCCESS && select_beside(cut);
        }
        if (status == GGML_STATUS_SUCCESS) {
            status = pass(graph, next, cut.index);
        }
        next = cut.index + 1;
        if (status == GGML_STATUS_SUCCESS && !attend(cut, is_selected)) {
            if (is_capturing_) {
                return GGML_STATUS_FAILED;
            }
            counters.passed += 1;
            status = pass(graph, cut.index, next);
        }
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
    if (is_late() && !update_late() && is_capturing_) {
        return GGML_STATUS_FAILED;
    }
    // What follows the last attention runs beside the update.
    const ggml_status status = pass(graph, next, ggml.ggml_graph_n_nodes(graph));
    if (is_late()) {
        leave();
    }
    return status;
}

}  // namespace vanward
