#include "wrapper.h"

#include "capture.h"
#include "counters.h"
#include "cuda.h"
#include "ggml-backend-impl.h"
#include "ggml_calls.h"
#include "operations.h"
#include "options.h"
#include "watch.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace vanward {

namespace {

/** Tensors of our own in a step: three for each attention, and some. */
constexpr size_t OWN_TENSORS = 4096;
/** Most rows of a product with chosen experts' quantised weights that ggml-cuda never waits in, on any GPU. */
constexpr int64_t EXPERT_ROWS = 4;

/** ggml_cgraph, which backends are given and no public header declares: as ggml 0.25 … 0.27 have it. */
struct Graph {
    int size, n_nodes, n_leafs;
    ggml_tensor **nodes, **grads, **grad_accs, **leafs;
    int32_t *use_counts;
    struct {
        size_t size;
        void *used, *keys;
    } visited;
    int order;
    uint64_t uid;
};

/** Whether this ggml has it so: a graph's array of nodes follows the struct, whose fields say the same as ggml's functions. */
bool has_graphs_so(ggml_context *memory) {
    ggml_cgraph *made = ggml.ggml_new_graph_custom(memory, 8, false);
    const Graph *graph = reinterpret_cast<const Graph *>(made);
    return reinterpret_cast<char *>(ggml.ggml_graph_nodes(made)) == reinterpret_cast<const char *>(graph) + sizeof(Graph) &&
           graph->size == 8 && graph->n_nodes == 0 && graph->nodes == ggml.ggml_graph_nodes(made) && graph->uid == 0;
}

/** Adds the time in which it lives to a counter. */
class Timed {
  public:
    explicit Timed(std::atomic<uint64_t> &ns) : ns_(ns) {}
    ~Timed() { ns_ += static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count()); }
    Timed(const Timed &) = delete;
    Timed &operator=(const Timed &) = delete;

  private:
    std::atomic<uint64_t> &ns_;
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

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

// --- what a graph does --------------------------------------------------------------------------------------------------------

bool Wrapper::look_through(ggml_cgraph *graph) {
    plans_.clear();
    cuts_.clear();
    writes_.clear();
    masks_.clear();
    ggml_tensor **nodes = ggml.ggml_graph_nodes(graph);
    const int count = ggml.ggml_graph_n_nodes(graph);
    for (int i = 0; i < count; ++i) {
        ggml_tensor *op = nodes[i];
        const Kind kind = kind_of(op);
        if (kind == Kind::attention) {
            if (!options.enabled) {
                continue;
            }
            Node node;
            std::atomic<uint64_t> *reason = take_apart(op, node);
            reason = reason != nullptr                                     ? reason
                     : !is_input(node.mask)                                ? &counters.declined_type
                     : node.rows * node.streams > options.rows             ? &counters.declined_rows
                     : node.k->ne[1] <= options.dense_below_on(true)       ? &counters.declined_short
                                                                           : nullptr;
            if (reason != nullptr) {
                *reason += 1;
                continue;
            }
            node.find_stream();
            const int from = cuts_.empty() ? 0 : cuts_.back().index + 1;
            cuts_.push_back({i, node, end_of_queries(nodes, from, i, node.q), 0, nullptr});
        } else if ((kind == Kind::write || kind == Kind::rotation) && layer_number(op->view_src, 'k') >= 0) {
            std::shared_ptr<Cache> cache = find_cache(op->view_src);
            if (cache == nullptr || !cache->has_sequences()) {
                continue;
            }
            if (kind == Kind::rotation || op->src[1]->type != GGML_TYPE_I64 || !is_input(op->src[1])) {  // every key is another one after it
                std::lock_guard<std::mutex> guard(cache->mutex);
                cache->forget();
                counters.shifts += 1;
            } else if (std::none_of(writes_.begin(), writes_.end(), [&](const Write &each) {
                           return each.numbers == op->src[1] && each.cache == cache;
                       })) {
                writes_.push_back({op->src[1], cache, nullptr});
                counters.writes += 1;
            }
        }
    }
    return !cuts_.empty() || !writes_.empty();
}

bool Wrapper::make_plans() {
    for (Cut &cut : cuts_) {
        Node &node = cut.node;
        std::shared_ptr<Cache> cache = cache_of(node.keys, this, *memory_);
        size_t i = 0;
        for (; i < plans_.size(); ++i) {
            const Node &other = plans_[i].node;
            if (plans_[i].cache == cache && other.mask == node.mask && other.rows == node.rows && other.streams == node.streams &&
                other.first_stream == node.first_stream && other.k->ne[1] == node.k->ne[1]) {
                break;
            }
        }
        if (i == plans_.size()) {
            plans_.push_back({cache, node, {}, {}, {}, {}, false, {}});
        }
        cut.plan = i;
        std::lock_guard<std::mutex> guard(cache->mutex);
        cut.layer = &cache->layer(node.keys);
        if (attention_->is_sparse(*cut.layer)) {
            watch(node.keys->buffer);
            plans_[i].sparse_layers.push_back(cut.layer);
        } else {
            plans_[i].has_dense_layers = true;
        }
        if (gpu_.is_host()) {
            for (const ggml_tensor *tensor : {node.keys, node.values, static_cast<const ggml_tensor *>(node.out), node.sinks}) {
                if (tensor != nullptr) {
                    gpu_.reach(tensor->buffer);
                }
            }
        }
    }
    bool any = false;
    for (Plan &plan : plans_) {
        std::lock_guard<std::mutex> guard(plan.cache->mutex);
        any |= place(plan);
    }
    return any;
}

bool Wrapper::place(Plan &plan) {
    const Node &node = plan.node;
    const auto mask = std::find_if(masks_.begin(), masks_.end(), [&](const Mask &each) { return each.tensor == node.mask; });
    const std::vector<Placed> *placed = plan.cache->place(&mask->shown, node.rows, node.first_stream, node.streams, node.k->ne[1], mask->kept);
    if (placed != nullptr) {
        plan.placed = *placed;
    }
    return placed != nullptr;
}

bool Wrapper::is_left_unseen() {
    int64_t written = 0;
    for (const Write &write : writes_) {
        written = std::max(written, write.numbers->ne[0]);
    }
    short_.longest += written;
    const bool is_like_it = !cuts_.empty() && short_.rows == cuts_[0].node.rows * cuts_[0].node.streams && short_.attentions == cuts_.size();
    return is_like_it && options.sparse && short_.longest <= attention_->dense_up_to() && ++short_.steps < STEPS_BETWEEN_CHECKS;
}

bool Wrapper::is_left() {
    short_ = {};
    for (Plan &plan : plans_) {
        std::lock_guard<std::mutex> guard(plan.cache->mutex);
        short_.longest = std::max(short_.longest, plan.cache->longest());
        if (!options.sparse || plan.placed.empty() || (!plan.sparse_layers.empty() && attention_->pays(plan.node, true, plan.placed)) ||
            (plan.has_dense_layers && attention_->pays(plan.node, false, plan.placed))) {
            return false;
        }
    }
    short_.rows = cuts_[0].node.rows * cuts_[0].node.streams;
    short_.attentions = cuts_.size();
    if (short_.longest <= attention_->dense_up_to()) {
        forget();  // steps like it are not looked at, and what they write is not followed; short sequences need no summaries
    }
    return true;
}

void Wrapper::lay_out(Plan &plan) {
    const Node &node = plan.node;
    look_for_changes(plan);
    auto begin_of = [&](const Sequence &sequence) {
        int64_t begin = sequence.size();
        for (Layer *layer : plan.sparse_layers) {
            begin = std::min(begin, layer->of(sequence).summarised);
        }
        return begin;
    };
    for (bool sparse : {true, false}) {
        if (sparse ? plan.sparse_layers.empty() : !plan.has_dense_layers) {
            continue;
        }
        std::vector<Batch> &batches = sparse ? plan.sparse : plan.dense;
        batches = attention_->batches(node, sparse, plan.placed);
        for (Batch &batch : batches) {
            if (mirrors_used_ == mirrors_.size()) {
                mirrors_.emplace_back(*memory_);
            }
            Mirrors &mirrors = mirrors_[mirrors_used_++];
            attention_->lay_out(node, *plan.cache, batch, mirrors.tokens, begin_of);
            const size_t count = batch.groups.size();
            batch.at.lens = mirrors.lens.show(batch.lens.data(), count);
            if (batch.sparse) {
                batch.at.begins = mirrors.begins.show(batch.begins.data(), count);
                batch.at.budgets = mirrors.budgets.show(batch.budgets.data(), count);
                batch.at.pages = batch.pages == nullptr ? nullptr : mirrors.pages.show(batch.pages, count * static_cast<size_t>(batch.most_pages));
                batch.is_late = attention_->can_be_late(batch);
                for (size_t i = 0; i < count; ++i) {
                    for (Layer *layer : plan.sparse_layers) {
                        // Otherwise results would depend on tokens that were taken back.
                        batch.is_late &= layer->of(*batch.groups[i].sequence).reached == batch.begins[i];
                    }
                }
                for (const Placed &group : batch.groups) {
                    plan.begins.push_back(begin_of(*group.sequence));
                    counters.summarised += static_cast<uint64_t>(group.sequence->size() - plan.begins.back());
                }
            }
        }
    }
    for (Layer *layer : plan.sparse_layers) {
        attention_->make_room(node, *plan.cache, *layer);
    }
    for (const Batch &batch : plan.sparse) {
        for (size_t i = 0; batch.sparse && i < batch.groups.size(); ++i) {
            for (Layer *layer : plan.sparse_layers) {
                Known &known = layer->of(*batch.groups[i].sequence);
                known.summarised = known.reached = batch.groups[i].sequence->size();
            }
        }
    }
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

bool Wrapper::can_be_captured(ggml_cgraph *graph) const {
    if (!options.graphs || options.check || entered_ == nullptr || left_ == nullptr || !Capture::is_possible() ||
        std::any_of(plans_.begin(), plans_.end(), [](const Plan &plan) { return plan.placed.empty(); })) {
        return false;
    }
    // What ggml does not capture either: products that ask the GPU which experts were chosen.
    ggml_tensor **nodes = ggml.ggml_graph_nodes(graph);
    return std::none_of(nodes, nodes + ggml.ggml_graph_n_nodes(graph), [](const ggml_tensor *node) {
        return kind_of(node) == Kind::experts && (!ggml.ggml_is_quantized(node->src[0]->type) || node->src[1]->type != GGML_TYPE_F32 ||
                                                  node->type != GGML_TYPE_F32 || node->ne[2] > EXPERT_ROWS);
    });
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
    if (!can_be_captured(graph)) {
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
