// Decode attention of one node of llama.cpp's graph through Vanward.
#pragma once

#include "cache.h"
#include "counters.h"
#include "options.h"
#include "session.h"
#include "step.h"
#include "token_table.h"

#include <vector>

namespace vanward {

/** A FLASH_ATTN_EXT node over a KV cache, taken apart. */
struct Node {
    ggml_tensor *out;
    /** [D, rows, Hq, streams], of float32; on a GPU a copy in the type of the cache. */
    const ggml_tensor *q;
    const ggml_tensor *k, *v, *mask, *sinks;
    /** The cache's tensors. */
    const ggml_tensor *keys, *values;
    int64_t head_dim, value_dim, query_heads, kv_heads;
    int rows, streams, first_stream;
    float scale, soft_cap;

    /** Finds the first of the node's streams in the cache, whose tensors have memory by now. */
    void find_stream();
};

/** Takes a node apart. Returns NULL, or the counter of the reason why Vanward does not take it. Contents of tensors are not read. */
std::atomic<uint64_t> *take_apart(const ggml_tensor *op, Node &node);

/** Sequences whose rows go in one call: equally many rows each, at equal distances. */
struct Batch {
    std::vector<Placed> groups;
    int rows;
    bool sparse;
    /** Row of the node in which the first group begins, and rows from one group to the next. */
    int64_t first_row, row_step;
    std::vector<int32_t> lens, begins, budgets;
    /** Tokens → rows of the cache, [groups, longest], where the calls read it; NULL where sequences are ranges of rows. */
    const int32_t *table;
    /** Room for tokens of each sequence. */
    int64_t longest;
    /** Pages of summaries, [groups, most_pages]; NULL where those of each sequence follow each other, from one sequence to the next at equal distances. */
    const int32_t *pages;
    int64_t first_page, page_step;
    int64_t most_pages;
    /** Room for blocks of each list. */
    int64_t most_blocks;
    /** Rows in one sequence's range: where there is no table, the first row and the distance of the next sequence's. */
    int64_t first_cell, cell_step;
    /** Whether some sequence has tokens that are not summarised. */
    bool is_behind() const;
    /** Whether summaries are brought up to date at the end of the step, those of all layers at once. */
    bool is_late;
    /** The other arrays above, where the calls read them. */
    struct {
        const int32_t *lens, *begins, *budgets, *pages;
    } at;
};

/** How summaries are kept: words of 16 bits of each block and KV head, in `Layer::first` and `Layer::second`. */
struct Form {
    bool is_axis, is_int4;
    int64_t first, second;
};

/** Whether summaries by AXIS of such heads are in INT4 on a GPU, whose fast kernels read it in these dimensions. */
inline bool are_summaries_int4(int64_t head_dim) { return head_dim % 64 == 0 && head_dim <= 256; }

/** What one context computes attention with, in one memory. */
class Attention {
  public:
    explicit Attention(Memory &memory)
        : memory_(memory), block_(options.block), tokens_(memory), ids_(memory), counts_(memory), fresh_first_(memory), fresh_second_(memory),
          fresh_ints_(memory) {}

    /** The whole of it, where the host reads the cache. Returns false, having written nothing that counts, where ggml has to. */
    bool compute(const Node &node, Cache &cache, Layer &layer, vwd_session *session);

    // Its parts.

    bool is_sparse(const Layer &layer) const;
    /** The calls that these rows need; `sparse` says whether blocks may be selected. */
    std::vector<Batch> batches(const Node &node, bool sparse, const std::vector<Placed> &placed) const;
    /** Whether this is expected to take less time than ggml's attention of a GPU, which reads all cells at once for all rows. */
    bool pays(const Node &node, bool sparse, const std::vector<Placed> &placed) const;
    /** Tokens up to which a sequence is attended to whole. */
    int64_t dense_up_to() const;
    /** Fills the arrays of a batch, `tokens` among them if need be. `begin_of` tells how many tokens of a sequence are summarised. */
    template <typename Begin> void lay_out(const Node &node, Cache &cache, Batch &batch, TokenTable &tokens, Begin begin_of);
    /** Whether blocks can be selected before the new tokens are summarised, if the other summaries are up to date. */
    bool can_be_late(const Batch &batch) const;
    /** Room for the summaries of as many pages as the cache has. */
    void make_room(const Node &node, const Cache &cache, Layer &layer) const;
    /** Enqueues selection into the lists that the next `attend` reads. */
    bool select(const Node &node, const Layer &layer, const Batch &batch, vwd_session *session);
    /** Enqueues update, unless it is late, selection, unless it is enqueued already, and attention. */
    bool attend(const Node &node, const Layer &layer, const Batch &batch, vwd_session *session, bool is_selected = false);
    /** Enqueues the late update of a batch in these layers. */
    bool update_late(const std::vector<std::pair<const Node *, const Layer *>> &layers, const Batch &batch, vwd_session *session);
    /** What both would enqueue, but for what the node says. */
    void describe(const Layer &layer, const Batch &batch, Description &description) const;
    /** Compares what was computed with plain loops. */
    void check_summaries(const Node &node, const Layer &layer, const Batch &batch, vwd_session *session);
    void check_results(const Node &node, const Batch &batch);

    int64_t block() const { return block_; }
    int64_t blocks_of(int64_t tokens) const { return (tokens + block_ - 1) / block_; }

  private:
    int64_t local_blocks() const;
    int64_t budget_of(int64_t tokens) const;
    bool on_gpu() const { return memory_.device_type == 2; }
    bool find_ranges(const Node &node, Batch &batch) const;
    void lay_tables(const Node &node, const Cache &cache, Batch &batch, TokenTable &tokens);
    void lay_pages(const Cache &cache, Batch &batch);
    void note_summaries(Layer &layer, const Batch &batch) const;
    bool failed(const char *call);

    vwd_tensor view(const void *data, ggml_type type, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) const;
    vwd_tensor ints(const int32_t *data, std::initializer_list<int64_t> shape) const;
    /** Keys or values of a batch, [pages, P, Hk, dim]. */
    vwd_tensor cache_view(const ggml_tensor *root, const ggml_tensor *view, const Batch &batch) const;
    Form form_of(const Node &node) const;
    vwd_index index_of(const Node &node, const Layer &layer, const Batch &batch) const;
    vwd_tensor queries_of(const Node &node, const Batch &batch) const;
    /** The update of an index; the struct refers to it. */
    vwd_index_update_args update_of(const vwd_index &index, const Node &node, const Batch &batch) const;

    Memory &memory_;
    int64_t block_;
    bool has_failed_ = false;
    std::vector<int32_t> page_table_;
    TokenTable tokens_;
    Array<int32_t> ids_, counts_;
    /** Summaries that a check makes, and what it makes them by. */
    Array<uint16_t> fresh_first_, fresh_second_;
    Array<int32_t> fresh_ints_;
};

template <typename Begin> void Attention::lay_out(const Node &node, Cache &cache, Batch &batch, TokenTable &tokens, Begin begin_of) {
    for (const Placed &group : batch.groups) {
        Sequence &sequence = *group.sequence;
        batch.lens.push_back(static_cast<int32_t>(sequence.size()));
        if (batch.sparse) {
            cache.reserve_pages(sequence, blocks_of(sequence.size()));
            batch.begins.push_back(static_cast<int32_t>(begin_of(sequence)));
            batch.budgets.push_back(static_cast<int32_t>(budget_of(sequence.size())));
        }
    }
    lay_tables(node, cache, batch, tokens);
}

}  // namespace vanward
