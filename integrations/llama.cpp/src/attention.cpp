#include "attention.h"

#include "ggml_calls.h"
#include "options.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

namespace vanward {

namespace {

/** Blocks that are selected whatever they score: the first, and those that hold the last tokens. */
constexpr int64_t INIT_BLOCKS = 1;
/** Updates of one call of `vwd_index_update_layers`. */
constexpr size_t MOST_UPDATES = 256;
constexpr int64_t LOCAL_TOKENS = 32;

/** Stands for unsigned bytes, which no tensor of a graph has. */
constexpr ggml_type BYTES = GGML_TYPE_I8;

bool is_half(ggml_type type) { return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; }

bool is_head_dim(int64_t dim) { return dim % 8 == 0 && dim >= 16 && dim <= 576; }

/** Whether `view` is [dim, cells, heads, streams] of a cache's tensor, with a token's heads beside each other. */
bool is_cache_view(const ggml_tensor *view, const ggml_tensor *root, int64_t dim, int64_t heads) {
    const size_t element = root->nb[0];
    return view->type == root->type && view->nb[0] == element && view->nb[2] == element * static_cast<size_t>(dim) &&
           view->nb[1] == root->nb[1] && (view->ne[3] == 1 || view->nb[3] == root->nb[2]) && root->ne[0] >= dim * heads &&
           view->ne[1] <= root->ne[1];
}

}  // namespace

int64_t Attention::local_blocks() const { return 1 + (LOCAL_TOKENS - 1) / block_; }

/** Blocks to select of a sequence. */
int64_t Attention::budget_of(int64_t tokens) const {
    const int64_t blocks = blocks_of(tokens);
    const int64_t wanted = options.budget_tokens > 0 ? blocks_of(options.budget_tokens)
                                                     : static_cast<int64_t>(std::ceil(static_cast<double>(blocks) * options.budget_share));
    return std::min(blocks, std::max(wanted, INIT_BLOCKS + local_blocks()));
}

vwd_tensor Attention::view(const void *data, ggml_type type, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) const {
    vwd_tensor view = VWD_TENSOR_INIT;
    view.data = const_cast<void *>(data);
    view.device_type = memory_.device_type;
    view.device_id = memory_.device_id;
    view.dtype_code = type == GGML_TYPE_I32 ? 0 : type == BYTES ? 1 : type == GGML_TYPE_BF16 ? 4 : 2;
    view.dtype_bits = type == GGML_TYPE_I32 || type == GGML_TYPE_F32 ? 32 : type == BYTES ? 8 : 16;
    view.lanes = 1;
    view.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), view.shape);
    std::copy(strides.begin(), strides.end(), view.strides);
    return view;
}

vwd_tensor Attention::ints(const int32_t *data, std::initializer_list<int64_t> shape) const {
    vwd_tensor ints = view(data, GGML_TYPE_I32, shape, {});
    for (int32_t i = ints.ndim; i-- > 0;) {
        ints.strides[i] = i + 1 == ints.ndim ? 1 : ints.strides[i + 1] * ints.shape[i + 1];
    }
    return ints;
}

void Node::find_stream() {
    const ptrdiff_t ahead = static_cast<const char *>(k->data) - static_cast<const char *>(keys->data);
    first_stream = keys->ne[2] == 1 ? 0 : static_cast<int>(static_cast<size_t>(ahead) / keys->nb[2]);
}

std::atomic<uint64_t> *take_apart(const ggml_tensor *op, Node &node) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    if (q == nullptr || k == nullptr || v == nullptr || mask == nullptr) {
        return &counters.declined_type;
    }
    const ggml_tensor *keys = k->view_src, *values = v->view_src;
    if (layer_number(keys, 'k') < 0 || layer_number(values, 'v') < 0) {
        return &counters.declined_type;
    }
    float bias = 0;
    memcpy(&node.scale, op->op_params, 4);
    memcpy(&bias, op->op_params + 1, 4);
    memcpy(&node.soft_cap, op->op_params + 2, 4);
    if (op->op_params[4] > 0) {
        return &counters.declined_trained;
    }
    node = {const_cast<ggml_tensor *>(op), q, k, v, mask, sinks, keys, values, k->ne[0], v->ne[0], q->ne[2], k->ne[2],
            static_cast<int>(q->ne[1]), static_cast<int>(q->ne[3]), 0, node.scale, node.soft_cap};
    const bool types = is_half(keys->type) && values->type == keys->type && q->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32 &&
                       mask->type == GGML_TYPE_F16 && (sinks == nullptr || (sinks->type == GGML_TYPE_F32 && sinks->nb[0] == 4));
    const bool shapes = is_head_dim(node.head_dim) && is_head_dim(node.value_dim) && q->ne[0] == node.head_dim &&
                        node.query_heads % node.kv_heads == 0 && v->ne[2] == node.kv_heads && v->ne[1] == k->ne[1] &&
                        k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] && mask->ne[0] == k->ne[1] && mask->ne[1] >= q->ne[1] &&
                        mask->ne[2] == 1 && (mask->ne[3] == 1 || mask->ne[3] == q->ne[3]);
    const bool layouts = is_cache_view(k, keys, node.head_dim, node.kv_heads) && is_cache_view(v, values, node.value_dim, node.kv_heads) &&
                         values->ne[1] == keys->ne[1] && values->ne[2] == keys->ne[2] && q->nb[0] == 4 && q->nb[1] % 4 == 0 &&
                         q->nb[2] % 4 == 0 && (q->ne[3] == 1 || q->nb[3] == q->nb[1] * static_cast<size_t>(q->ne[1])) && mask->nb[0] == 2;
    const bool is_softmax = bias == 0 && node.scale > 0 && std::isfinite(node.scale) && node.soft_cap >= 0;
    return types && shapes && layouts && is_softmax ? nullptr : &counters.declined_type;
}

vwd_tensor Attention::cache_view(const ggml_tensor *root, const ggml_tensor *view, const Batch &batch) const {
    const int64_t row = static_cast<int64_t>(root->nb[1] / root->nb[0]), head = static_cast<int64_t>(view->nb[2] / root->nb[0]);
    const int64_t heads = view->ne[2], dim = view->ne[0];
    if (batch.table != nullptr) {
        return this->view(root->data, root->type, {root->ne[1] * root->ne[2], 1, heads, dim}, {row, row, head, 1});
    }
    const char *first = static_cast<const char *>(root->data) + static_cast<size_t>(batch.first_cell) * root->nb[1];
    return this->view(first, root->type, {static_cast<int64_t>(batch.groups.size()), batch.longest, heads, dim},
                      {row * batch.cell_step, row, head, 1});
}

bool Attention::is_sparse(const Layer &layer) const { return options.sparse && !layer.blind && !options.is_dense(layer.number); }

std::vector<Batch> Attention::batches(const Node &node, bool sparse_layer, const std::vector<Placed> &placed) const {
    std::vector<Batch> result;
    for (const Placed &group : placed) {
        const int64_t size = group.sequence->size();
        const bool sparse = sparse_layer && size > dense_up_to() && !group.sequence->slides();
        const int64_t row = static_cast<int64_t>(group.stream) * node.rows + group.first_row;
        bool joins = false;
        if (!result.empty()) {
            Batch &last = result.back();
            const int64_t step = row - last.first_row - static_cast<int64_t>(last.groups.size() - 1) * last.row_step;
            joins = last.sparse == sparse && last.rows == group.rows && (last.groups.size() == 1 || step == last.row_step);
            if (joins) {
                last.row_step = step;
                last.groups.push_back(group);
            }
        }
        if (!joins) {
            Batch batch = {};
            batch.groups = {group};
            batch.rows = group.rows;
            batch.sparse = sparse;
            batch.first_row = row;
            batch.row_step = group.rows;
            result.push_back(std::move(batch));
        }
    }
    return result;
}

int64_t Attention::dense_up_to() const { return std::max(options.dense_below_on(on_gpu()), options.budget_tokens); }

bool Attention::pays(const Node &node, bool sparse_layer, const std::vector<Placed> &placed) const {
    int64_t tokens = 0;
    for (Batch &batch : batches(node, sparse_layer, placed)) {
        if (batch.sparse || find_ranges(node, batch)) {
            return true;
        }
        for (const Placed &group : batch.groups) {
            tokens += group.sequence->size();
        }
    }
    // Where the sequences were the whole cache, tables of single cells cost a few per cent; from which share of it on they do was not measured.
    return 4 * tokens < 3 * node.k->ne[1] * node.streams;
}

/** Whether the sequences are ranges of rows at equal distances: `first_cell` and `cell_step` then say which. */
bool Attention::find_ranges(const Node &node, Batch &batch) const {
    auto first_of = [](const Placed &group) { return group.sequence->size() > 0 ? group.sequence->cells()[0] : 0; };
    batch.first_cell = first_of(batch.groups[0]);
    batch.cell_step = node.keys->ne[1];
    int64_t first = batch.first_cell;
    return std::all_of(batch.groups.begin(), batch.groups.end(), [&](const Placed &group) {
        const int64_t expected = std::exchange(first, first + batch.cell_step);
        return group.sequence->is_range() && first_of(group) == expected;
    });
}

void Attention::lay_tables(const Node &node, const Cache &cache, Batch &batch, TokenTable &tokens) {
    const std::vector<Placed> &groups = batch.groups;
    const size_t count = groups.size();
    const bool ranges = find_ranges(node, batch);
    for (const Placed &group : groups) {
        batch.longest = std::max(batch.longest, group.sequence->size());
        batch.most_pages = std::max(batch.most_pages, static_cast<int64_t>(group.sequence->pages.size()));
    }
    if (on_gpu()) {
        // Room to grow, so that the sizes of a captured graph stay what they are for a while.
        const int64_t page = PAGE_BLOCKS * block_, first = ranges ? batch.first_cell % batch.cell_step : 0;
        batch.longest = std::min((std::max<int64_t>(batch.longest, 1) + page - 1) / page * page, node.k->ne[1] - first);
        batch.most_pages = (blocks_of(batch.longest) + PAGE_BLOCKS - 1) / PAGE_BLOCKS;
        batch.most_blocks = budget_of(batch.longest);
    } else if (batch.sparse) {
        batch.most_blocks = *std::max_element(batch.budgets.begin(), batch.budgets.end());
    }
    const bool alone = count == 1 && !on_gpu();
    batch.table = ranges ? nullptr : alone ? groups[0].sequence->cells().data() : tokens.show(groups, static_cast<size_t>(batch.longest));
    if (batch.sparse) {
        lay_pages(cache, batch);
    }
    batch.at = {batch.lens.data(), batch.begins.data(), batch.budgets.data(), batch.pages};
}

void Attention::lay_pages(const Cache &cache, Batch &batch) {
    const int64_t count = static_cast<int64_t>(batch.groups.size()), most = batch.most_pages;
    auto pages_of = [&](int64_t i) -> const std::vector<int32_t> & { return batch.groups[static_cast<size_t>(i)].sequence->pages; };
    batch.first_page = pages_of(0)[0];
    batch.page_step = count > 1 ? pages_of(1)[0] - batch.first_page : most;
    bool ranges = batch.page_step >= most && batch.first_page + (count - 1) * batch.page_step + most <= cache.page_count();
    for (int64_t i = 0; i < count; ++i) {
        for (size_t p = 0; p < pages_of(i).size() && ranges; ++p) {
            ranges = pages_of(i)[p] == batch.first_page + i * batch.page_step + static_cast<int64_t>(p);
        }
    }
    if (ranges) {
        return;
    }
    batch.first_page = batch.page_step = 0;
    page_table_.assign(static_cast<size_t>(count * most), -1);
    for (int64_t i = 0; i < count; ++i) {
        const size_t shown = std::min(pages_of(i).size(), static_cast<size_t>(most));
        std::copy_n(pages_of(i).begin(), shown, page_table_.begin() + static_cast<std::ptrdiff_t>(i * most));
    }
    batch.pages = page_table_.data();
}

Form Attention::form_of(const Node &node) const {
    const int64_t dim = node.head_dim;
    if (options.method == Method::minmax) {
        return {false, false, dim, dim};
    }
    return on_gpu() && are_summaries_int4(dim) ? Form{true, true, dim / 2, dim / 8} : Form{true, false, 2 * dim, 0};
}

void Attention::make_room(const Node &node, const Cache &cache, Layer &layer) const {
    if (layer.pages < cache.page_count()) {
        const Form form = form_of(node);
        const int64_t rows = cache.page_count() * PAGE_BLOCKS * node.kv_heads;
        layer.first.grow(static_cast<size_t>(rows * form.first));
        layer.second.grow(static_cast<size_t>(rows * form.second));
        layer.pages = cache.page_count();
    }
}

vwd_index Attention::index_of(const Node &node, const Layer &layer, const Batch &batch) const {
    vwd_index index = VWD_INDEX_INIT;
    const Form form = form_of(node);
    const int64_t heads = node.kv_heads, count = static_cast<int64_t>(batch.groups.size());
    // Each block and KV head has `words` words of 16 bits.
    auto summaries = [&](const Array<uint16_t> &data, int64_t words, ggml_type type) {
        const int64_t dim = words * (type == BYTES ? 2 : 1), row = heads * dim, page = PAGE_BLOCKS * row;
        return batch.pages != nullptr ? view(data.data(), type, {layer.pages, PAGE_BLOCKS, heads, dim}, {page, row, dim, 1})
                                      : view(data.data() + batch.first_page * PAGE_BLOCKS * heads * words, type,
                                             {count, batch.most_pages * PAGE_BLOCKS, heads, dim}, {batch.page_step * page, row, dim, 1});
    };
    index.kind = form.is_axis ? VWD_INDEX_AXIS : VWD_INDEX_MINMAX;
    index.block_size = static_cast<uint32_t>(block_);
    if (batch.pages != nullptr) {
        index.table = ints(batch.at.pages, {count, batch.most_pages});
    }
    if (form.is_int4) {
        index.axes = summaries(layer.first, form.first, BYTES);
        index.axis_range = summaries(layer.second, form.second, GGML_TYPE_F16);
    } else if (form.is_axis) {
        index.axes = summaries(layer.first, form.first, layer.type);
    } else {
        index.key_max = summaries(layer.first, form.first, layer.type);
        index.key_min = summaries(layer.second, form.second, layer.type);
    }
    return index;
}

bool Attention::failed(const char *call) {
    counters.errors += 1;
    if (!has_failed_) {
        has_failed_ = true;
        log(GGML_LOG_LEVEL_ERROR, "vanward: %s failed, ggml computes this attention: %s", call, last_error().c_str());
    }
    return false;
}

bool Attention::can_be_late(const Batch &batch) const {
    // The last block is selected whatever its summary says. By AXIS that has its share in the others' scores, so that it must be there.
    return batch.sparse && std::equal(batch.begins.begin(), batch.begins.end(), batch.lens.begin(), [&](int64_t begin, int64_t len) {
        return begin < len && begin % block_ != 0 && begin / block_ == (len - 1) / block_;
    });
}

bool Batch::is_behind() const { return !std::equal(begins.begin(), begins.end(), lens.begin(), std::greater_equal<>()); }

void Attention::describe(const Layer &layer, const Batch &batch, Description &description) const {
    const Batch &b = batch;
    auto add = [&](auto... words) { (description.add(words), ...); };
    add(layer.tensor->data, b.sparse, b.at.lens, b.table, static_cast<int64_t>(b.groups.size()), b.rows, b.first_row, b.row_step, b.longest, b.first_cell,
        b.cell_step);
    if (b.sparse) {
        add(layer.first.data(), layer.second.data(), layer.pages, ids_.data(), counts_.data(), b.at.begins, b.at.budgets, b.at.pages, b.first_page,
            b.page_step, b.most_pages, b.most_blocks, b.is_behind(), b.is_late);
    }
}

vwd_index_update_args Attention::update_of(const vwd_index &index, const Node &node, const Batch &batch) const {
    const int64_t count = static_cast<int64_t>(batch.groups.size());
    vwd_index_update_args update = VWD_INDEX_UPDATE_ARGS_INIT;
    update.index = &index;
    update.k = cache_view(node.keys, node.k, batch);
    if (batch.table != nullptr) {
        update.page_table = ints(batch.table, {count, batch.longest});
    }
    update.seq_lens = ints(batch.at.lens, {count});
    update.begin = ints(batch.at.begins, {count});
    return update;
}

bool Attention::update_late(const std::vector<std::pair<const Node *, const Layer *>> &layers, const Batch &batch, vwd_session *session) {
    std::vector<vwd_index> indexes;
    std::vector<vwd_index_update_args> updates;
    std::vector<const vwd_index_update_args *> pointers;
    indexes.reserve(layers.size());
    updates.reserve(layers.size());
    for (const auto &[node, layer] : layers) {
        indexes.push_back(index_of(*node, *layer, batch));
        updates.push_back(update_of(indexes.back(), *node, batch));
        pointers.push_back(&updates.back());
    }
    for (size_t at = 0; at < pointers.size(); at += MOST_UPDATES) {
        const size_t count = std::min(MOST_UPDATES, pointers.size() - at);
        if (vwd_index_update_layers(session, pointers.data() + at, static_cast<uint32_t>(count), memory_.stream) != VWD_OK) {
            return failed("vwd_index_update_layers");
        }
    }
    return true;
}

vwd_tensor Attention::queries_of(const Node &node, const Batch &batch) const {
    const int64_t element = static_cast<int64_t>(node.q->nb[0]);
    const int64_t row = static_cast<int64_t>(node.q->nb[1]) / element, head = static_cast<int64_t>(node.q->nb[2]) / element;
    const char *data = static_cast<const char *>(node.q->data) + batch.first_row * row * element;
    return view(data, node.q->type, {static_cast<int64_t>(batch.groups.size()), batch.rows, node.query_heads, node.head_dim},
                {row * batch.row_step, row, head, 1});
}

bool Attention::select(const Node &node, const Layer &layer, const Batch &batch, vwd_session *session) {
    const int64_t count = static_cast<int64_t>(batch.groups.size()), cap = batch.most_blocks;
    const vwd_index index = index_of(node, layer, batch);
    ids_.grow(static_cast<size_t>(count * node.kv_heads * cap));
    counts_.grow(static_cast<size_t>(count * node.kv_heads));
    vwd_select_blocks_args select = VWD_SELECT_BLOCKS_ARGS_INIT;
    select.method = options.method == Method::axis ? VWD_SELECT_AXIS : VWD_SELECT_MINMAX;
    select.block_size = static_cast<uint32_t>(block_);
    select.k = static_cast<uint32_t>(cap);
    select.init_blocks = static_cast<uint32_t>(std::min(INIT_BLOCKS, cap));
    select.local_blocks = static_cast<uint32_t>(std::min(local_blocks(), cap - select.init_blocks));
    select.scale = node.scale;
    select.index = &index;
    select.q = queries_of(node, batch);
    select.seq_lens = ints(batch.at.lens, {count});
    select.budgets = ints(batch.at.budgets, {count});
    select.selected.ids = ints(ids_.data(), {count, node.kv_heads, cap});
    select.selected.counts = ints(counts_.data(), {count, node.kv_heads});
    return vwd_select_blocks(session, &select, memory_.stream) == VWD_OK || failed("vwd_select_blocks");
}

bool Attention::attend(const Node &node, const Layer &layer, const Batch &batch, vwd_session *session, bool is_selected) {
    const int64_t count = static_cast<int64_t>(batch.groups.size()), rows = batch.rows;
    const int64_t out_row = node.query_heads * node.value_dim;
    float *out_data = static_cast<float *>(node.out->data) + batch.first_row * out_row;

    vwd_paged_kv kv = VWD_PAGED_KV_INIT;
    kv.k = cache_view(node.keys, node.k, batch);
    kv.v = cache_view(node.values, node.v, batch);
    if (batch.table != nullptr) {
        kv.page_table = ints(batch.table, {count, batch.longest});
    }
    kv.seq_lens = ints(batch.at.lens, {count});

    vwd_attention_args args = VWD_ATTENTION_ARGS_INIT;
    args.kv = &kv;
    args.scale = node.scale;
    args.soft_cap = node.soft_cap;
    args.q = queries_of(node, batch);
    args.out = view(out_data, GGML_TYPE_F32, {count, rows, node.query_heads, node.value_dim},
                    {out_row * batch.row_step, out_row, node.value_dim, 1});
    if (node.sinks != nullptr) {
        args.sinks = view(node.sinks->data, GGML_TYPE_F32, {node.query_heads}, {1});
    }

    if (batch.sparse) {
        if (batch.is_behind() && !batch.is_late) {
            const vwd_index index = index_of(node, layer, batch);
            const vwd_index_update_args update = update_of(index, node, batch);
            if (vwd_index_update(session, &update, memory_.stream) != VWD_OK) {
                return failed("vwd_index_update");
            }
        }
        if (!is_selected && !select(node, layer, batch, session)) {
            return false;
        }
        args.block_size = static_cast<uint32_t>(block_);
        args.list.ids = ints(ids_.data(), {count, node.kv_heads, batch.most_blocks});
        args.list.counts = ints(counts_.data(), {count, node.kv_heads});
    }
    if (vwd_attention(session, &args, memory_.stream) != VWD_OK) {
        return failed("vwd_attention");
    }
    (batch.sparse ? counters.sparse : counters.dense) += 1;
    return true;
}

void Attention::note_summaries(Layer &layer, const Batch &batch) const {
    for (const Placed &group : batch.groups) {
        Known &known = layer.of(*group.sequence);
        const std::vector<int32_t> &cells = group.sequence->cells();
        known.prints.resize(cells.size());
        counters.summarised += cells.size() - static_cast<size_t>(known.summarised);
        for (size_t t = static_cast<size_t>(known.summarised); t < cells.size(); ++t) {
            known.prints[t] = print_of(layer.row(cells[t]));
        }
        known.summarised = static_cast<int64_t>(cells.size());
    }
}

bool Attention::compute(const Node &node, Cache &cache, Layer &layer, vwd_session *session) {
    const std::vector<Placed> *placed = cache.place(node.mask, node.rows, node.first_stream, node.streams, node.k->ne[1]);
    if (placed == nullptr) {
        return false;
    }
    if (cache.is_first(layer)) {
        for (const Placed &group : *placed) {
            cache.look_for_changes(*group.sequence);
        }
    }
    for (Batch &batch : batches(node, is_sparse(layer), *placed)) {
        lay_out(node, cache, batch, tokens_, [&](const Sequence &sequence) { return layer.of(sequence).summarised; });
        if (batch.sparse) {
            make_room(node, cache, layer);
        }
        if (!attend(node, layer, batch, session)) {
            return false;
        }
        if (batch.sparse) {
            note_summaries(layer, batch);
        }
        if (options.check) {
            check_summaries(node, layer, batch, session);
            check_results(node, batch);
        }
    }
    return true;
}

}  // namespace vanward
