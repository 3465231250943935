// Whether a step may be launched as the CUDA graph that an earlier one was captured in: the decision alone, without the driver.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace vanward {

/** What a step enqueues, in words that are equal where the same kernels get the same arguments. */
class Description {
  public:
    void add(uint64_t word) { words_.push_back(word); }
    void add(int64_t word) { words_.push_back(static_cast<uint64_t>(word)); }
    void add(int word) { add(static_cast<int64_t>(word)); }
    void add(bool word) { add(static_cast<uint64_t>(word)); }
    void add(const void *address) { words_.push_back(reinterpret_cast<uintptr_t>(address)); }
    /** A node of a graph: its operation with the parameters, and where it and its sources lie. What they hold may differ. */
    void add(const ggml_tensor &node);

    bool operator==(const Description &other) const { return words_ == other.words_; }
    bool operator!=(const Description &other) const { return words_ != other.words_; }

  private:
    void add_place(const ggml_tensor &tensor);

    std::vector<uint64_t> words_;
};

enum class Way {
    eager,    ///< enqueued one by one
    capture,  ///< the same, into a graph, which is launched
    replay,   ///< the graph of the step before is launched
};

/** What a graph of llama.cpp keeps when it is built anew, as for every 256 tokens: by it the captured graph is found that is brought up to date. */
struct Shape {
    int nodes, attentions, first_layer, rows;
    /** Summaries are brought up to date at its end: in most steps, but not in those that begin a block. */
    bool is_late;
    bool operator==(const Shape &other) const {
        return nodes == other.nodes && attentions == other.attentions && first_layer == other.first_layer && rows == other.rows &&
               is_late == other.is_late;
    }
};

/** The steps of one shape. */
class Step {
  public:
    explicit Step(const Shape &shape) : shape_(shape) {}

    const Shape &shape() const { return shape_; }

    /**
     * How the next step is computed. A step is captured once an equal one was computed eagerly, which has by then allocated and loaded what it
     * needs. `uid` is that of the graph, by which ggml says that its nodes are the same ones; 0 says nothing, and then, and where it is another
     * one, `describe` describes the nodes.
     */
    template <typename Describe> Way decide(uint64_t uid, Description calls, Describe describe) {
        if (refused_) {
            return Way::eager;
        }
        bool same = calls == calls_;
        if (uid == 0 || uid != uid_) {
            Description nodes;
            describe(nodes);
            same = same && nodes == nodes_;
            nodes_ = std::move(nodes);
        }
        uid_ = uid;
        calls_ = std::move(calls);
        is_captured_ = is_captured_ && same;
        return !same ? Way::eager : is_captured_ ? Way::replay : Way::capture;
    }
    /** The step was captured: equal ones are replayed. */
    void captured() { is_captured_ = true; }
    /** Steps of this shape cannot be captured: all are eager. */
    void refuse() {
        refused_ = true;
        graph = nullptr;
    }

    /** The captured graph, if there is one; of an earlier step, where `decide` says capture. */
    std::shared_ptr<void> graph;

  private:
    Shape shape_;
    uint64_t uid_ = 0;
    Description nodes_, calls_;
    bool is_captured_ = false, refused_ = false;
};

/** The steps of a context. */
class Steps {
  public:
    /** That of a shape. Made, if need be, in place of the one that was not asked for longest. */
    Step &of(const Shape &shape);
    void clear() { steps_.clear(); }
    size_t size() const { return steps_.size(); }

    /** Shapes that are kept: rows of drafts, parts of a model. */
    static constexpr size_t KEPT = 16;

  private:
    std::vector<std::unique_ptr<Step>> steps_;  // the last used one first
};

}  // namespace vanward
