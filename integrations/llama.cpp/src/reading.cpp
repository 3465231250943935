// What the wrapper reads of a step: the inputs of its graph, and keys that are compared with their prints.

#include "counters.h"
#include "ggml_calls.h"
#include "options.h"
#include "watch.h"
#include "wrapper.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace vanward {

namespace {

/** Channels of a key that its print is made of, and the bytes that they take in a cache. */
constexpr int64_t PRINTED = 8;
constexpr size_t PRINTED_BYTES = PRINTED * 2;
/** Most keys that are copied one by one: the wrapped backend's stream, on which it copies logits behind the step, does not wait for them. */
constexpr size_t MOST_COPIES = 8;
/** Buffers whose inputs are followed. A context has one; where ggml makes it anew, the old one's are forgotten in time. */
constexpr size_t MOST_BUFFERS = 4;

bool is_on_host(const ggml_tensor *tensor) { return ggml.ggml_backend_buft_is_host(ggml.ggml_backend_buffer_get_type(tensor->buffer)); }

}  // namespace

// --- inputs -----------------------------------------------------------------------------------------------------------------------

const void *Wrapper::read(const ggml_tensor *tensor, size_t bytes) {
    if (is_on_host(tensor)) {
        return tensor->data;
    }
    counters.read_inputs += 1;
    return memory_->get(tensor->data, bytes);
}

const Kept *Wrapper::known(const ggml_tensor *tensor, size_t bytes) {
    if (is_on_host(tensor)) {
        return nullptr;
    }
    std::shared_ptr<Inputs> inputs = inputs_of(tensor->buffer);
    if (std::find(inputs_.begin(), inputs_.end(), inputs) == inputs_.end()) {
        inputs_.push_back(inputs);
    }
    const Kept *kept = inputs->find(tensor, bytes);
    if (kept != nullptr) {
        counters.kept_inputs += 1;
        known_.push_back({tensor, kept, bytes});
    }
    return kept;
}

void Wrapper::check_known() {
    for (const KnownInput &each : known_) {
        std::vector<char> copy;
        counters.wrong_inputs += memcmp(memory_->read(each.tensor->data, each.bytes, copy), each.kept->data(), each.bytes) != 0;
    }
}

void Wrapper::read_inputs() {
    memory_->next_step();
    known_.clear();
    while (inputs_.size() > MOST_BUFFERS) {
        inputs_.front()->forget();
        inputs_.erase(inputs_.begin());
    }
    bool has_entered = false;
    auto find = [&](const ggml_tensor *tensor, size_t bytes, const Kept *&kept) {
        kept = known(tensor, bytes);
        if (kept != nullptr) {
            return static_cast<const void *>(kept->data());
        }
        if (!has_entered) {  // what the wrapped backend does comes first
            enter();
            has_entered = true;
        }
        return read(tensor, bytes);
    };
    for (Write &write : writes_) {
        const Kept *kept = nullptr;
        write.rows = static_cast<const int64_t *>(find(write.numbers, static_cast<size_t>(write.numbers->ne[0]) * 8, kept));
    }
    for (const Cut &cut : cuts_) {
        const ggml_tensor *mask = cut.node.mask;
        if (std::none_of(masks_.begin(), masks_.end(), [&](const Mask &each) { return each.tensor == mask; })) {
            Mask shown = {mask, *mask, nullptr};
            const size_t planes = static_cast<size_t>(mask->ne[3] - 1) * mask->nb[3];
            shown.shown.data = const_cast<void *>(find(mask, planes + static_cast<size_t>(cut.node.rows) * mask->nb[1], shown.kept));
            masks_.push_back(shown);
        }
    }
    if (options.check && !known_.empty()) {
        enter();
        check_known();
    }
    memory_->wait();  // for the step before, at least: what it had on the host is given out again
    keep_prints();
    for (const Write &write : writes_) {
        std::lock_guard<std::mutex> guard(write.cache->mutex);
        for (int64_t i = 0; i < write.numbers->ne[0]; ++i) {
            write.cache->written(write.rows[i]);
        }
    }
}

// --- prints of keys -------------------------------------------------------------------------------------------------------------

Layer *Wrapper::witness(const Plan &plan) const {
    // The middle one: the first layer's keys hold no context.
    return plan.sparse_layers.empty() ? nullptr : plan.sparse_layers[plan.sparse_layers.size() / 2];
}

uint64_t Wrapper::Keys::print(int64_t index) const {
    char key[PRINTED_BYTES];
    if (!are_floats) {
        memcpy(key, static_cast<const char *>(data) + static_cast<size_t>(index) * PRINTED_BYTES, PRINTED_BYTES);
    } else {  // they were elements of the cache, so that nothing is rounded
        const float *floats = static_cast<const float *>(data) + index * PRINTED;
        if (type == GGML_TYPE_BF16) {
            ggml.ggml_fp32_to_bf16_row(floats, reinterpret_cast<ggml_bf16_t *>(key), PRINTED);
        } else {
            ggml.ggml_fp32_to_fp16_row(floats, reinterpret_cast<ggml_fp16_t *>(key), PRINTED);
        }
    }
    return print_of(key);
}

Wrapper::Keys Wrapper::read_keys(const Layer &layer, const std::vector<int32_t> &cells) {
    const int64_t count = static_cast<int64_t>(cells.size());
    enter();
    if (cells.size() <= MOST_COPIES) {
        std::vector<const void *> rows;
        for (int32_t cell : cells) {
            rows.push_back(layer.row(cell));
        }
        return {memory_->get(rows, PRINTED_BYTES), layer.type, false};
    }
    if (static_cast<int64_t>(numbers_->size()) < count) {
        numbers_->grow(static_cast<size_t>(2 * count));
        keys_->grow(static_cast<size_t>(2 * count * PRINTED));
    }
    numbers_->put(0, cells.data(), cells.size());
    ggml_tensor *root = const_cast<ggml_tensor *>(layer.tensor);
    ggml_tensor *rows = ggml.ggml_view_2d(tensors_, root, PRINTED, layer.cells * layer.streams, layer.row_bytes, 0);
    rows->buffer = root->buffer;
    ggml_tensor *numbers = ggml.ggml_new_tensor_1d(tensors_, GGML_TYPE_I32, count);
    numbers->data = numbers_->data();
    numbers->buffer = memory_->buffer_of(numbers->data);
    ggml_tensor *keys = ggml.ggml_get_rows(tensors_, rows, numbers);
    keys->data = keys_->data();
    keys->buffer = memory_->buffer_of(keys->data);
    leave();
    if (!compute_alone(keys)) {
        return {};
    }
    enter();
    return {memory_->get(keys->data, cells.size() * PRINTED * sizeof(float)), layer.type, true};
}

void Wrapper::look_for_changes(Plan &plan) {
    Layer *layer = witness(plan);
    for (const Placed &group : plan.placed) {
        Sequence &sequence = *group.sequence;
        const bool grew = sequence.seen_version == sequence.version() && sequence.seen_size + group.rows == sequence.size();
        sequence.seen_version = sequence.version();
        sequence.seen_size = sequence.size();
        if (layer == nullptr || (grew && plan.cache->steps() % STEPS_BETWEEN_CHECKS != 0)) {
            continue;
        }
        Known &known = layer->of(sequence);
        std::vector<int32_t> cells;
        const int64_t block = attention_->block();
        for (size_t j = 0; j < known.prints.size(); ++j) {
            const int64_t end = std::min(static_cast<int64_t>(j + 1) * block, known.printed);
            if (end > known.summarised) {
                break;
            }
            cells.push_back(sequence.cells()[static_cast<size_t>(end - 1)]);
        }
        if (cells.empty()) {
            continue;
        }
        const Keys keys = read_keys(*layer, cells);
        memory_->wait();
        size_t same = 0;
        while (keys.data != nullptr && same < cells.size() && keys.print(static_cast<int64_t>(same)) == known.prints[same]) {
            ++same;
        }
        if (same < cells.size()) {
            const int64_t good = static_cast<int64_t>(same) * block;
            counters.stale += static_cast<uint64_t>(known.summarised - good);
            for (Layer *each : plan.sparse_layers) {
                Known &its = each->of(sequence);
                its.summarised = std::min(its.summarised, good);
            }
        }
    }
}

void Wrapper::take_prints() {
    for (Plan &plan : plans_) {
        Layer *layer = plan.placed.empty() ? nullptr : witness(plan);
        if (layer == nullptr) {
            continue;
        }
        std::lock_guard<std::mutex> guard(plan.cache->mutex);
        std::vector<int32_t> cells;
        std::vector<Reading> readings;
        size_t at = 0;
        for (const Batch &batch : plan.sparse) {
            for (size_t i = 0; batch.sparse && i < batch.groups.size(); ++i) {
                const Sequence &sequence = *batch.groups[i].sequence;
                const int64_t first = plan.begins[at++] / attention_->block(), blocks = attention_->blocks_of(sequence.size()) - first;
                for (int64_t j = first; j < first + blocks; ++j) {
                    cells.push_back(sequence.cells()[static_cast<size_t>(std::min((j + 1) * attention_->block(), sequence.size()) - 1)]);
                }
                readings.push_back({plan.cache, sequence.name, first, blocks, sequence.size(), {}, 0, nullptr});
            }
        }
        const Keys keys = cells.empty() ? Keys{} : read_keys(*layer, cells);
        int64_t first_key = 0;
        for (Reading &reading : readings) {
            reading.keys = keys;
            reading.first_key = std::exchange(first_key, first_key + reading.blocks);
            reading.layer = layer->tensor;
            readings_.push_back(reading);
        }
    }
}

void Wrapper::keep_prints() {
    for (const Reading &reading : readings_) {
        std::lock_guard<std::mutex> guard(reading.cache->mutex);
        Layer *layer = reading.cache->find_layer(reading.layer);
        auto found = layer == nullptr || reading.keys.data == nullptr ? decltype(layer->known.find(0)){} : layer->known.find(reading.sequence);
        if (layer == nullptr || reading.keys.data == nullptr || found == layer->known.end()) {
            continue;
        }
        Known &known = found->second;
        known.prints.resize(static_cast<size_t>(reading.first_block + reading.blocks));
        for (int64_t j = 0; j < reading.blocks; ++j) {
            known.prints[static_cast<size_t>(reading.first_block + j)] = reading.keys.print(reading.first_key + j);
        }
        known.printed = reading.tokens;
    }
    readings_.clear();
}

}  // namespace vanward
