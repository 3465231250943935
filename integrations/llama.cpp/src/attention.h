// Decode attention of one node of llama.cpp's graph through Vanward.
#pragma once

#include "cache.h"
#include "counters.h"
#include "session.h"

#include <vector>

namespace vanward {

/** A FLASH_ATTN_EXT node over a KV cache, taken apart. */
struct Node {
    ggml_tensor *out;
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    /** The cache's tensors. */
    const ggml_tensor *keys, *values;
    int64_t head_dim, value_dim, query_heads, kv_heads;
    int rows, streams, first_stream;
    float scale, soft_cap;
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
    /** Tokens → rows of the cache, [groups, max len]; NULL where sequences are ranges of rows. */
    const int32_t *table;
    int64_t longest;
    /** Pages of summaries, [groups, max pages]. */
    const int32_t *pages;
    int64_t most_pages;
    /** Rows in one sequence's range: where there is no table, the first row and the distance of the next sequence's. */
    int64_t first_cell, cell_step;
};

/** What one context computes attention with. */
class Attention {
  public:
    explicit Attention(Session &session) : session_(session) {}

    /** Computes the node. Returns false, having written nothing that counts, where ggml has to: `node` is then whole. */
    bool compute(const Node &node, Cache &cache, Layer &layer, int threads);

  private:
    bool attend(const Node &node, Layer &layer, Batch &batch, vwd_session *session);
    bool failed(const char *call);
    std::vector<Batch> batches(const Node &node, Layer &layer, const std::vector<Placed> &placed) const;
    void lay_tables(const Node &node, Cache &cache, Layer &layer, Batch &batch);
    vwd_index index_of(const Node &node, const Layer &layer, const Batch &batch) const;
    void check(const Node &node, Layer &layer, const Batch &batch, vwd_session *session);

    Session &session_;
    bool has_failed_ = false;
    std::vector<int32_t> table_, page_table_, ids_, counts_;
    int64_t most_blocks_ = 0;
    /** Names, versions and sizes of the sequences in `table_`. */
    std::vector<uint64_t> table_of_;
};

/** Views of memory for Vanward. Strides are in elements. */
vwd_tensor int32_view(const int32_t *data, std::initializer_list<int64_t> shape);
vwd_tensor rows_view(const void *data, ggml_type type, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides);

/** Keys or values of a batch, [pages, P, Hk, dim]. */
vwd_tensor cache_view(const ggml_tensor *root, const ggml_tensor *view, const Batch &batch);

}  // namespace vanward
