// A GPU of ggml's with its decode attention computed by Vanward: each graph is cut at the attentions that qualify, what lies between them goes
// to the wrapped backend as it is.
#pragma once

#include "attention.h"
#include "ggml-backend.h"
#include "gpu_memory.h"
#include "inputs.h"
#include "step.h"

#include <exception>
#include <functional>
#include <memory>

namespace vanward {

/** Steps after which keys are compared with their prints, and masks are read, whatever happened. */
constexpr uint64_t STEPS_BETWEEN_CHECKS = 256;

/** Integers of the host, shown to a GPU: what did not change is not copied again. */
class Mirror {
  public:
    explicit Mirror(Memory &memory) : there_(memory) {}
    const int32_t *show(const int32_t *values, size_t count);

  private:
    Array<int32_t> there_;
    std::vector<int32_t> here_;
};

/** The arrays of a batch where a GPU reads them: those of a step's n-th batch lie where those of the step before lay. */
struct Mirrors {
    explicit Mirrors(Memory &memory) : lens(memory), begins(memory), budgets(memory), pages(memory), tokens(memory) {}
    Mirror lens, begins, budgets, pages;
    TokenTable tokens;
};

/** What one context computes with. ggml calls it from one thread at a time. */
class Wrapper {
  public:
    /** Takes the backend of the wrapped device. */
    Wrapper(Gpu &gpu, ggml_backend_t inner);
    ~Wrapper();
    Wrapper(const Wrapper &) = delete;
    Wrapper &operator=(const Wrapper &) = delete;

    ggml_backend_t inner() const { return inner_; }
    ggml_status compute(ggml_cgraph *graph);
    /** Shows a graph to the wrapped backend, which `show` asks to optimize it. Its order stays, and the backend plans no streams for it. */
    void optimize(ggml_cgraph *graph, const std::function<void(ggml_cgraph *)> &show);

  private:
    /** The attentions of a graph that have the same rows of the same cache. */
    struct Plan {
        std::shared_ptr<Cache> cache;
        Node node;  ///< the first of them
        std::vector<Placed> placed;
        std::vector<Batch> sparse, dense;
        std::vector<Layer *> sparse_layers;
        bool has_dense_layers;
        std::vector<int64_t> begins;  ///< of each placed sequence
    };
    /** An attention that Vanward computes. */
    struct Cut {
        int index;
        Node node;
        /** Behind the node that makes the queries, if the attention waits for others that follow it; otherwise 0. */
        int queries_end;
        size_t plan;
        Layer *layer;
    };
    /** The first channels of keys that are being read back: elements of a cache, or the same as floats. */
    struct Keys {
        const void *data = nullptr;
        ggml_type type = GGML_TYPE_F16;
        bool are_floats = false;
        uint64_t print(int64_t index) const;
    };
    /** Keys whose prints are kept. */
    struct Reading {
        std::shared_ptr<Cache> cache;
        uint64_t sequence;
        int64_t first_block, blocks, tokens;
        Keys keys;
        int64_t first_key;
        const ggml_tensor *layer;
    };
    /** Plans the step. Returns false where it is the wrapped backend's as a whole. */
    bool prepare();
    /** Counts an error, says the first one, and returns false. */
    bool failed(const std::exception &error);
    /** Forgets the summaries of the step's caches, as what it did to them is not known. */
    void forget();
    ggml_status pass(ggml_cgraph *graph, int from, int to);
    ggml_status pass_whole(ggml_cgraph *graph);
    /** Passes nodes on as a graph of their own. */
    ggml_status pass_nodes(const ggml_cgraph *like, ggml_tensor **nodes, int count);
    /** Enqueues the parts one by one. */
    ggml_status run(ggml_cgraph *graph);
    /** Enqueues the step by a graph. Returns false, having enqueued nothing, where `run` has to. */
    bool run_captured(ggml_cgraph *graph);
    bool can_be_captured() const;
    Description describe_calls() const;
    /** What the graph does with caches. Returns false where it is the wrapped backend's as a whole. */
    bool look_through(const ggml_cgraph *graph);
    /** Whether its nodes were looked at before, with the options that matter for it. */
    bool is_known(const ggml_cgraph *graph) const;
    /** Looks at its nodes. */
    void know(const ggml_cgraph *graph);
    void read_inputs();
    /** What a tensor holds, if the host wrote it since the last graph; otherwise NULL. From then on it is known when the host writes it. */
    const Kept *known(const ggml_tensor *tensor, size_t bytes);
    void check_known();
    /** Which rows are of which sequences. Returns false where none is known. */
    bool make_plans();
    bool place(Plan &plan);
    void lay_out(Plan &plan);
    /** Whether the step is ggml's, as all sequences are short: as far as is known without reading inputs, and by the plans. */
    bool is_left_unseen();
    bool is_left();
    /** Whether the attention's selection can begin before the layer's keys and values are there. */
    bool selects_beside(const Cut &cut) const;
    /** Enqueues it, for which the wrapped backend does not wait. */
    bool select_beside(const Cut &cut);
    bool attend(const Cut &cut, bool is_selected);
    /** Whether the step updates summaries at its end. */
    bool is_late() const;
    /** Enqueues these updates. */
    bool update_late();
    const std::vector<Batch> &batches_of(const Cut &cut) const;
    void look_for_changes(Plan &plan);
    void take_prints();
    void keep_prints();
    Keys read_keys(const Layer &layer, const std::vector<int32_t> &cells);
    Layer *witness(const Plan &plan) const;
    const void *read(const ggml_tensor *tensor, size_t bytes);
    bool compute_alone(ggml_tensor *node);

    /** Vanward's stream goes on after the wrapped backend's work so far, and the other way round. */
    void enter();
    void leave();

    Gpu &gpu_;
    ggml_backend_t inner_;
    std::unique_ptr<GpuMemory> memory_;
    std::unique_ptr<Attention> attention_;
    ggml_backend_event_t entered_ = nullptr, left_ = nullptr;
    ggml_context *tensors_ = nullptr;
    ggml_cgraph *alone_ = nullptr;
    Steps steps_;
    bool is_capturing_ = false, has_failed_ = false;
    /** Stands before whatever is passed on during a capture, and is another one each time: ggml captures nothing itself then. */
    ggml_tensor nothing_ = {};
    std::vector<ggml_tensor *> with_nothing_;

    /** The last step that was left to ggml by its plans. Steps like it are left, too, until a sequence may have become long. */
    struct Short {
        int rows = 0;
        size_t attentions = 0;
        int64_t longest = 0;  ///< at most, with what was written since
        uint64_t steps = 0;
    };
    Short short_;

    /** What the nodes of the last graph say. ggml gives a graph a number, another one where nodes are others; llama.cpp keeps it for many steps. */
    struct KnownGraph {
        uint64_t uid = 0;
        ggml_tensor *const *nodes = nullptr;
        int count = 0;
        bool enabled = false;
        int64_t rows = 0, dense_below = 0;
        /** Counters of attentions that are left to ggml, and the nodes that change keys. */
        std::vector<std::atomic<uint64_t> *> reasons;
        std::vector<const ggml_tensor *> changes;
        /** Whether the wrapped backend may wait for the GPU in it. */
        bool waits = false;
    };
    KnownGraph known_graph_;
    std::vector<Plan> plans_;
    /** Its attentions that are taken. */
    std::vector<Cut> cuts_;
    struct Write {
        const ggml_tensor *numbers;
        std::shared_ptr<Cache> cache;
        const int64_t *rows;
    };
    std::vector<Write> writes_;
    struct Mask {
        const ggml_tensor *tensor;
        ggml_tensor shown;
        const Kept *kept;
    };
    std::vector<Mask> masks_;
    /** Those in the buffers that inputs lay in, the newest buffer at the end. */
    std::vector<std::shared_ptr<Inputs>> inputs_;
    /** Of this step's inputs those that are known, and how much of them is read. */
    struct KnownInput {
        const ggml_tensor *tensor;
        const Kept *kept;
        size_t bytes;
    };
    std::vector<KnownInput> known_;
    std::vector<Mirrors> mirrors_;
    size_t mirrors_used_ = 0;
    std::vector<Reading> readings_;
    std::unique_ptr<Array<int32_t>> numbers_;
    std::unique_ptr<Array<float>> keys_;
};

}  // namespace vanward
