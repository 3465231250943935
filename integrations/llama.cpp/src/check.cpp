// VANWARD_GGML_CHECK: summaries, visible tokens and results against plain loops.

#include "attention.h"
#include "ggml_calls.h"
#include "options.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

namespace vanward {

namespace {

double half_of(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 0    ? std::ldexp(fraction, -24)
                        : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                         : std::ldexp(fraction + 1024, exponent - 25);
    return (bits >> 15) != 0 ? -size : size;
}

double element(const char *row, int64_t i, ggml_type type) {
    if (type == GGML_TYPE_F32) {
        float value;
        memcpy(&value, row + 4 * i, 4);
        return static_cast<double>(value);
    }
    uint16_t bits;
    memcpy(&bits, row + 2 * i, 2);
    if (type == GGML_TYPE_F16) {
        return half_of(bits);
    }
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return static_cast<double>(value);
}

/** A node whose tensors the host reads, once what was called is over. */
class Shown {
  public:
    Shown(const Node &node, Memory &memory) : memory_(memory), shown_(node) {
        shown_.q = show(node.q);
        shown_.mask = show(node.mask, ggml.ggml_backend_buft_is_host(ggml.ggml_backend_buffer_get_type(node.mask->buffer)));
        shown_.sinks = node.sinks == nullptr ? nullptr : show(node.sinks);
        shown_.keys = show(node.keys);
        shown_.values = show(node.values);
        shown_.out = show(node.out);
    }

    const Node &node() const { return shown_; }

  private:
    ggml_tensor *show(const ggml_tensor *tensor, bool is_on_host = false) {
        size_t bytes = tensor->nb[0];
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            bytes += static_cast<size_t>(tensor->ne[i] - 1) * tensor->nb[i];
        }
        ggml_tensor &copy = tensors_[used_];
        copy = *tensor;
        if (!is_on_host) {
            copy.data = const_cast<void *>(memory_.read(tensor->data, bytes, data_[used_]));
        }
        ++used_;
        return &copy;
    }

    Memory &memory_;
    Node shown_;
    ggml_tensor tensors_[6];
    std::vector<char> data_[6];
    int used_ = 0;
};

/** Address of a head in a row of a tensor. */
const char *at(const ggml_tensor *tensor, int64_t row, size_t row_bytes, int64_t head, size_t head_bytes) {
    return static_cast<const char *>(tensor->data) + static_cast<size_t>(row) * row_bytes + static_cast<size_t>(head) * head_bytes;
}

/** Largest difference between the row's results and attention in double precision, over the largest result. */
double error_of_row(const Node &node, int64_t row, int64_t head, const std::vector<int32_t> &cells) {
    const char *q = at(node.q, row, node.q->nb[1], head, node.q->nb[2]);
    const float *out = static_cast<const float *>(node.out->data) + (row * node.query_heads + head) * node.value_dim;
    const int64_t kv_head = head / (node.query_heads / node.kv_heads);
    std::vector<double> scores, sum(static_cast<size_t>(node.value_dim), 0.0);
    const double sink = node.sinks == nullptr ? -INFINITY : static_cast<double>(static_cast<const float *>(node.sinks->data)[head]);
    double top = sink;
    for (int32_t cell : cells) {
        const char *key = at(node.keys, cell, node.keys->nb[1], kv_head, node.k->nb[2]);
        double s = 0;
        for (int64_t c = 0; c < node.head_dim; ++c) {
            s += element(q, c, node.q->type) * element(key, c, node.keys->type);
        }
        s *= static_cast<double>(node.scale);
        if (node.soft_cap != 0) {
            s = static_cast<double>(node.soft_cap) * std::tanh(s / static_cast<double>(node.soft_cap));
        }
        scores.push_back(s);
        top = std::max(top, s);
    }
    double total = node.sinks == nullptr ? 0 : std::exp(sink - top);
    for (size_t t = 0; t < cells.size(); ++t) {
        const char *value = at(node.values, cells[t], node.values->nb[1], kv_head, node.v->nb[2]);
        const double weight = std::exp(scores[t] - top);
        total += weight;
        for (int64_t c = 0; c < node.value_dim; ++c) {
            sum[static_cast<size_t>(c)] += weight * element(value, c, node.values->type);
        }
    }
    double largest = 1e-6, difference = 0;
    for (int64_t c = 0; c < node.value_dim; ++c) {
        const double expected = total == 0 ? 0 : sum[static_cast<size_t>(c)] / total;
        largest = std::max(largest, std::abs(expected));
        difference = std::max(difference, std::abs(expected - static_cast<double>(out[c])));
    }
    return difference / largest;
}

/** The cells that the mask shows to a row of the node. */
std::vector<int32_t> masked_cells(const Node &node, int stream, int row) {
    std::vector<int32_t> cells;
    const char *entries = at(node.mask, row, node.mask->nb[1], stream % node.mask->ne[3], node.mask->nb[3]);
    for (int64_t c = 0; c < node.k->ne[1]; ++c) {
        uint16_t entry;
        memcpy(&entry, entries + 2 * c, 2);
        if ((entry & 0x7fff) == 0) {
            cells.push_back(static_cast<int32_t>((node.first_stream + stream) * node.keys->ne[1] + c));
        }
    }
    return cells;
}

}  // namespace

void Attention::check_summaries(const Node &node, const Layer &layer, const Batch &batch, vwd_session *session) {
    if (!batch.sparse) {
        return;
    }
    const Form form = form_of(node);
    for (const Placed &group : batch.groups) {
        // Made at once of all keys, they have the bits of those that were kept.
        const std::vector<int32_t> &cells = group.sequence->cells();
        const int64_t tokens = static_cast<int64_t>(cells.size()), blocks = blocks_of(tokens), pages = (blocks + PAGE_BLOCKS - 1) / PAGE_BLOCKS;
        const int32_t len = static_cast<int32_t>(tokens);
        Layer fresh(layer.tensor, memory_);
        fresh.pages = pages;
        std::swap(fresh.first, fresh_first_);
        std::swap(fresh.second, fresh_second_);
        fresh.first.grow(static_cast<size_t>(pages * PAGE_BLOCKS * node.kv_heads * form.first));
        fresh.second.grow(static_cast<size_t>(pages * PAGE_BLOCKS * node.kv_heads * form.second));
        Batch alone = batch;
        alone.groups = {group};
        Array<int32_t> &all = fresh_ints_;
        all.grow(static_cast<size_t>(1 + tokens));
        all.put(0, &len, 1);
        all.put(1, cells.data(), static_cast<size_t>(tokens));
        alone.table = all.data() + 1;
        alone.at.lens = all.data();
        alone.at.begins = nullptr;
        alone.longest = tokens;
        alone.pages = nullptr;
        alone.first_page = 0;
        alone.page_step = alone.most_pages = pages;
        const vwd_index index = index_of(node, fresh, alone);
        const vwd_index_update_args update = update_of(index, node, alone);
        std::vector<char> is_wrong(static_cast<size_t>(blocks), 0), kept_copy, made_copy;
        const bool is_made = vwd_index_update(session, &update, memory_.stream) == VWD_OK;
        for (const auto &[kept, made, words] : {std::tuple(&layer.first, &fresh.first, form.first), std::tuple(&layer.second, &fresh.second, form.second)}) {
            const size_t row = static_cast<size_t>(node.kv_heads * words);
            for (int64_t page = 0; page < pages && is_made && row > 0; ++page) {
                const int64_t first = page * PAGE_BLOCKS, count = std::min(PAGE_BLOCKS, blocks - first);
                auto read = [&](const Array<uint16_t> &from, int64_t block, std::vector<char> &copy) {
                    return static_cast<const uint16_t *>(
                        memory_.read(from.data() + static_cast<size_t>(block) * row, static_cast<size_t>(count) * row * 2, copy));
                };
                const uint16_t *expected = read(*made, first, made_copy);
                const uint16_t *found = read(*kept, group.sequence->pages[static_cast<size_t>(page)] * PAGE_BLOCKS, kept_copy);
                for (int64_t block = 0; block < count; ++block) {
                    const size_t at = static_cast<size_t>(block) * row;
                    is_wrong[static_cast<size_t>(first + block)] |= memcmp(found + at, expected + at, row * 2) != 0;
                }
            }
        }
        if (!is_made) {
            failed("vwd_index_update of a check");  // there is nothing to compare with
        }
        counters.wrong_summaries += static_cast<uint64_t>(std::count(is_wrong.begin(), is_wrong.end(), 1));
        std::swap(fresh.first, fresh_first_);
        std::swap(fresh.second, fresh_second_);
    }
}

void Attention::check_results(const Node &computed, const Batch &batch) {
    counters.checked += 1;
    const Shown shown(computed, memory_);
    const Node &node = shown.node();
    std::vector<char> ids_copy, counts_copy;
    const size_t lists = batch.sparse ? batch.groups.size() * static_cast<size_t>(node.kv_heads) : 0;
    auto *all_ids = static_cast<const int32_t *>(memory_.read(ids_.data(), lists * static_cast<size_t>(batch.most_blocks) * sizeof(int32_t), ids_copy));
    auto *all_counts = static_cast<const int32_t *>(memory_.read(counts_.data(), lists * sizeof(int32_t), counts_copy));
    for (size_t i = 0; i < batch.groups.size(); ++i) {
        const Placed &group = batch.groups[i];
        const std::vector<int32_t> &cells = group.sequence->cells();
        for (int r = 0; r < group.rows; ++r) {
            std::vector<int32_t> expected = masked_cells(node, group.stream, group.first_row + r);
            std::vector<int32_t> seen(cells.begin(), cells.end() - (group.rows - 1 - r));
            std::vector<int32_t> sorted = seen;
            std::sort(sorted.begin(), sorted.end());
            counters.wrong_tokens += sorted != expected;
            // One head of each row, another one in each step.
            const int64_t head = static_cast<int64_t>(counters.checked) % node.query_heads;
            std::vector<int32_t> chosen = seen;
            if (batch.sparse) {
                const int64_t list = static_cast<int64_t>(i) * node.kv_heads + head / (node.query_heads / node.kv_heads);
                const int32_t *ids = all_ids + list * batch.most_blocks;
                chosen.clear();
                for (int32_t n = 0; n < all_counts[list]; ++n) {
                    const size_t begin = static_cast<size_t>(ids[n]) * static_cast<size_t>(block_);
                    for (size_t t = begin; t < begin + static_cast<size_t>(block_) && t < seen.size(); ++t) {
                        chosen.push_back(seen[t]);
                    }
                }
            }
            const int64_t node_row = static_cast<int64_t>(group.stream) * node.rows + group.first_row + r;
            // Vanward sums in float32: a few units in its last place for every term. A GPU's matrix units take weights of 16 bits.
            const double tolerance = !on_gpu() ? 1e-4 : node.keys->type == GGML_TYPE_F16 ? 4e-3 : 3e-2;
            counters.wrong_outputs += !(error_of_row(node, node_row, head, chosen) < tolerance);
        }
    }
}

}  // namespace vanward
