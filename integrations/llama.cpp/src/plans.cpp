// What the wrapper finds in a graph: attentions, writes into caches, and the sequences whose rows a step has.

#include "counters.h"
#include "ggml_calls.h"
#include "graph.h"
#include "operations.h"
#include "options.h"
#include "watch.h"
#include "wrapper.h"

#include <algorithm>

namespace vanward {

namespace {

/** Most rows of a product with chosen experts' quantised weights that ggml-cuda never waits in, on any GPU. */
constexpr int64_t EXPERT_ROWS = 4;

/** Whether ggml-cuda may wait for the GPU in a node, so that it captures no such graph either: products that ask which experts were chosen. */
bool waits(const ggml_tensor *node) {
    return kind_of(node) == Kind::experts && (!ggml.ggml_is_quantized(node->src[0]->type) || node->src[1]->type != GGML_TYPE_F32 ||
                                              node->type != GGML_TYPE_F32 || node->ne[2] > EXPERT_ROWS);
}

}  // namespace

bool Wrapper::is_known(const ggml_cgraph *graph) const {
    const Graph &found = *reinterpret_cast<const Graph *>(graph);
    return found.uid != 0 && found.uid == known_graph_.uid && found.nodes == known_graph_.nodes && found.n_nodes == known_graph_.count &&
           known_graph_.enabled == options.enabled && known_graph_.rows == options.rows && known_graph_.dense_below == options.dense_below_on(true);
}

void Wrapper::know(const ggml_cgraph *graph) {
    const Graph &found = *reinterpret_cast<const Graph *>(graph);
    known_graph_ = {0, found.nodes, found.n_nodes, options.enabled, options.rows, options.dense_below_on(true), {}, {}, false};
    cuts_.clear();
    for (int i = 0; i < found.n_nodes; ++i) {
        ggml_tensor *op = found.nodes[i];
        const Kind kind = kind_of(op);
        known_graph_.waits |= waits(op);
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
                known_graph_.reasons.push_back(reason);
                continue;
            }
            node.find_stream();
            const int from = cuts_.empty() ? 0 : cuts_.back().index + 1;
            cuts_.push_back({i, node, end_of_queries(found.nodes, from, i, node.q), 0, nullptr});
        } else if ((kind == Kind::write || kind == Kind::rotation) && layer_number(op->view_src, 'k') >= 0) {
            known_graph_.changes.push_back(op);
        }
    }
    known_graph_.uid = found.uid;
}

bool Wrapper::look_through(const ggml_cgraph *graph) {
    const Timed timed(counters.plan_ns);
    plans_.clear();
    writes_.clear();
    masks_.clear();
    if (!is_known(graph)) {
        know(graph);
        counters.looked_through += 1;
    }
    for (std::atomic<uint64_t> *reason : known_graph_.reasons) {
        *reason += 1;
    }
    for (const ggml_tensor *op : known_graph_.changes) {
        std::shared_ptr<Cache> cache = find_cache(op->view_src);
        if (cache == nullptr || !cache->has_sequences()) {
            continue;
        }
        if (kind_of(op) == Kind::rotation || op->src[1]->type != GGML_TYPE_I64 || !is_input(op->src[1])) {  // every key is another one after it
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

}  // namespace vanward
