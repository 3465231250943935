// VANWARD_GGML_CHECK: summaries, visible tokens and results against plain loops.

#include "attention.h"
#include "ggml_calls.h"
#include "options.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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
        fresh.first.grow(static_cast<size_t>(pages * PAGE_BLOCKS * node.kv_heads * form.first));
        fresh.second.grow(static_cast<size_t>(pages * PAGE_BLOCKS * node.kv_heads * form.second));
        Batch alone = batch;
        alone.groups = {group};
        Array<int32_t> all(memory_);
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
        if (vwd_index_update(session, &update, memory_.stream) != VWD_OK) {
            failed("vwd_index_update of a check");
            continue;  // there is nothing to compare with
        }
        memory_.wait();
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t page = group.sequence->pages[static_cast<size_t>(block / PAGE_BLOCKS)];
            const int64_t kept = page * PAGE_BLOCKS + block % PAGE_BLOCKS;
            auto is_same = [&](const Array<uint16_t> &all, const Array<uint16_t> &made, int64_t words) {
                const int64_t row = node.kv_heads * words;
                return row == 0 || memcmp(all.data() + kept * row, made.data() + block * row, static_cast<size_t>(row) * 2) == 0;
            };
            counters.wrong_summaries += !is_same(layer.first, fresh.first, form.first) || !is_same(layer.second, fresh.second, form.second);
        }
    }
}

void Attention::check_results(const Node &node, const Batch &batch) {
    counters.checked += 1;
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
                const int32_t *ids = ids_.data() + list * batch.most_blocks;
                chosen.clear();
                for (int32_t n = 0; n < counts_.data()[list]; ++n) {
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
