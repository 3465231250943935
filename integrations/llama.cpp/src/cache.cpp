#include "cache.h"

#include "counters.h"
#include "options.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace vanward {

Counters counters;

namespace {

/** More groups than this are not worth a call each. */
constexpr size_t MOST_GROUPS = 128;
/** Sequences that no row saw for this many steps give their room back. */
constexpr uint64_t STEPS_KEPT = 4096;
constexpr size_t SEQUENCES_KEPT = 64;

std::mutex caches_mutex;
std::unordered_map<const void *, std::shared_ptr<Cache>> &caches() {
    static auto *map = new std::unordered_map<const void *, std::shared_ptr<Cache>>;  // never destroyed: contexts outlive main
    return *map;
}

/** Numbers of cells and streams of keys or values. */
int64_t cells_of(const ggml_tensor *root) { return root->ne[1]; }
int64_t streams_of(const ggml_tensor *root) { return root->ne[2]; }

}  // namespace

int layer_number(const ggml_tensor *root, char kind) {
    if (root == nullptr || strncmp(root->name, "cache_", 6) != 0 || root->name[6] != kind || strncmp(root->name + 7, "_l", 2) != 0) {
        return -1;
    }
    char *end = nullptr;
    long number = strtol(root->name + 9, &end, 10);
    return end != root->name + 9 && *end == '\0' && number >= 0 && number < 100000 ? static_cast<int>(number) : -1;
}

uint64_t print_of(const char *row) {
    uint64_t a, b;
    memcpy(&a, row, 8);
    memcpy(&b, row + 8, 8);
    return (a ^ (b * 0x9e3779b97f4a7c15u) ^ (b >> 29)) * 0xbf58476d1ce4e5b9u;
}

Layer::Layer(const ggml_tensor *keys, Memory &memory)
    : number(layer_number(keys, 'k')),
      tensor(keys),
      data(static_cast<const char *>(keys->data)),
      type(keys->type),
      width(keys->ne[0]),
      cells(keys->ne[1]),
      streams(keys->ne[2]),
      row_bytes(keys->nb[1]),
      stream_bytes(keys->nb[2]),
      first(memory),
      second(memory) {}

bool Layer::is(const ggml_tensor *keys) const {
    return tensor == keys && data == keys->data && type == keys->type && width == keys->ne[0] && cells == keys->ne[1] &&
           streams == keys->ne[2];
}

Known &Layer::of(const Sequence &sequence) {
    Known &result = known[sequence.name];
    if (result.name != sequence.name) {
        result = Known();
        result.name = sequence.name;
        result.version = sequence.version();
    }
    result.summarised = std::min(result.summarised, sequence.unchanged_since(result.version));
    result.version = sequence.version();
    return result;
}

void Layer::forget() {
    for (auto &[name, each] : known) {
        each.summarised = 0;
    }
}

Layer *Cache::find_layer(const ggml_tensor *keys) {
    for (auto &each : layers_) {
        if (each->tensor == keys) {
            return each.get();
        }
    }
    return nullptr;
}

Layer &Cache::layer(const ggml_tensor *keys) {
    Layer *found = find_layer(keys);
    if (found != nullptr && found->is(keys)) {
        return *found;
    }
    if (found != nullptr) {
        *found = Layer(keys, memory_);
        return *found;
    }
    layers_.push_back(std::make_unique<Layer>(keys, memory_));
    std::sort(layers_.begin(), layers_.end(), [](const auto &a, const auto &b) { return a->number < b->number; });
    return *find_layer(keys);
}

int64_t Cache::written(Layer &layer, int64_t first, int64_t count) {
    int64_t lost = 0;
    for (auto &sequence : sequences_) {
        const int64_t base = sequence->stream() * cells_, end = std::min(first + count, base + cells_);
        int32_t oldest = INT32_MAX;
        for (int64_t row = std::max(first, base); row < end; ++row) {
            const int32_t token = sequence->token_in(row - base);
            oldest = token < 0 ? oldest : std::min(oldest, token);
        }
        auto known = oldest == INT32_MAX ? layer.known.end() : layer.known.find(sequence->name);
        if (known != layer.known.end() && known->second.summarised > oldest) {
            lost += known->second.summarised - oldest;
            known->second.summarised = oldest;
        }
    }
    return lost;
}

void Cache::written(int64_t row) {
    for (auto &layer : layers_) {
        written(*layer, row, 1);
    }
}

void Cache::overwritten(const char *begin, size_t bytes) {
    const Layer *counted = witness();
    for (auto &layer : layers_) {
        const char *end = std::min(begin + bytes, layer->row(cells_ * streams_));
        if (begin >= end || end <= layer->data) {
            continue;
        }
        const size_t first = begin <= layer->data ? 0 : static_cast<size_t>(begin - layer->data) / layer->row_bytes;
        const size_t last = static_cast<size_t>(end - 1 - layer->data) / layer->row_bytes;
        const int64_t lost = written(*layer, static_cast<int64_t>(first), static_cast<int64_t>(last - first + 1));
        counters.stale += layer.get() == counted ? static_cast<uint64_t>(lost) : 0;
    }
}

int64_t Cache::longest() const {
    int64_t longest = 0;
    for (const auto &each : sequences_) {
        longest = std::max(longest, each->size());
    }
    return longest;
}

void Cache::forget() {
    for (auto &each : layers_) {
        each->forget();
    }
}

Sequence *Cache::best_match(const RowGroup &group, int stream) {
    auto is_free = [&](const Sequence &each) { return each.stream() == stream && each.used != steps_; };
    // In most steps a sequence has only grown by its rows' own cells, which takes no counting of all others.
    Sequence *grown = nullptr;
    for (auto &each : sequences_) {
        if (is_free(*each) && (grown == nullptr || grown->size() < each->size()) && each->visible().is_within(*group.last)) {
            grown = each.get();
        }
    }
    const size_t rows = static_cast<size_t>(group.rows);
    if (grown != nullptr && group.last->count_not_in(grown->visible(), rows + 1) <= rows) {
        return grown;
    }
    Sequence *best = nullptr;
    size_t most = 0;
    for (auto &each : sequences_) {
        if (!is_free(*each)) {
            continue;
        }
        Overlap both = overlap(each->visible(), *group.last);
        // A sequence that would lose much is another one's, which shares a prefix with these rows.
        bool loses_much = both.first_alone > 64 && both.first_alone > both.both / 8 && !each->slides();
        if (both.both > most && !loses_much) {
            most = both.both;
            best = each.get();
        }
    }
    return best;
}

void Cache::drop_unused() {
    auto drop = [&](size_t i) {
        Sequence &sequence = *sequences_[i];
        free_pages_.insert(free_pages_.end(), sequence.pages.begin(), sequence.pages.end());
        for (auto &layer : layers_) {
            layer->known.erase(sequence.name);
        }
        sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(i));
    };
    for (size_t i = sequences_.size(); i-- > 0;) {
        if (steps_ - sequences_[i]->used > STEPS_KEPT) {
            drop(i);
        }
    }
    while (sequences_.size() > SEQUENCES_KEPT) {
        auto oldest = std::min_element(sequences_.begin(), sequences_.end(), [](const auto &a, const auto &b) { return a->used < b->used; });
        if ((*oldest)->used == steps_) {
            break;
        }
        drop(static_cast<size_t>(oldest - sequences_.begin()));
    }
}

const std::vector<Placed> *Cache::place(const ggml_tensor *mask, int rows, int first_stream, int streams, int64_t cells, const Kept *kept) {
    // Every layer of a step has the same mask.
    const bool same = first_stream == first_stream_ && streams == streams_of_node_;
    if (!visible_.follow(mask, rows, streams, cells, kept) && same) {
        return placeable_ ? &placed_ : nullptr;
    }
    first_stream_ = first_stream;
    streams_of_node_ = streams;
    placed_.clear();
    std::vector<RowGroup> groups = visible_.is_known() ? visible_.groups(streams) : std::vector<RowGroup>();
    placeable_ = visible_.is_known() && groups.size() <= MOST_GROUPS;
    if (!placeable_) {
        return nullptr;
    }
    steps_ += 1;
    for (const RowGroup &group : groups) {
        const int stream = first_stream + group.stream;
        Sequence *sequence = best_match(group, stream);
        if (sequence == nullptr) {
            sequences_.push_back(std::make_unique<Sequence>(stream, cells_));
            sequence = sequences_.back().get();
            static std::atomic<uint64_t> names{0};
            sequence->name = ++names;
            counters.sequences += 1;
        }
        sequence->follow(group);
        sequence->used = steps_;
        placed_.push_back({sequence, group.stream, group.first_row, group.rows});
    }
    drop_unused();
    return &placed_;
}

void Cache::reserve_pages(Sequence &sequence, int64_t blocks) {
    while (static_cast<int64_t>(sequence.pages.size()) * PAGE_BLOCKS < blocks) {
        if (free_pages_.empty()) {
            // A GPU has room for the whole cache at once: captured addresses stay what they are.
            const int64_t whole = (cells_ / options.block / PAGE_BLOCKS + 1) * streams_;
            int64_t more = std::max<int64_t>({4, page_count_ / 2, on_gpu() ? whole - page_count_ : 0});
            for (int64_t page = page_count_ + more; page-- > page_count_;) {
                free_pages_.push_back(static_cast<int32_t>(page));
            }
            page_count_ += more;
        }
        sequence.pages.push_back(free_pages_.back());
        free_pages_.pop_back();
    }
}

Layer *Cache::witness() {
    for (size_t i = 0; i < layers_.size(); ++i) {
        Layer *layer = layers_[(layers_.size() / 2 + i) % layers_.size()].get();
        if (!options.is_dense(layer->number)) {
            return layer;
        }
    }
    return nullptr;
}

bool Cache::is_first(const Layer &layer) const {
    for (auto &each : layers_) {
        if (!options.is_dense(each->number)) {
            return each.get() == &layer;
        }
    }
    return false;
}

void Cache::look_for_changes(Sequence &sequence) {
    Layer *layer = witness();
    if (layer == nullptr) {
        return;
    }
    Known &known = layer->of(sequence);
    int64_t same = 0;
    auto is_as_printed = [&](size_t token) { return print_of(layer->row(sequence.cells()[token])) == known.prints[token]; };
    while (same < known.summarised && is_as_printed(static_cast<size_t>(same))) {
        ++same;
    }
    if (same == known.summarised) {
        return;
    }
    counters.stale += static_cast<uint64_t>(known.summarised - same);
    for (auto &each : layers_) {
        Known &its = each->of(sequence);
        its.summarised = std::min(its.summarised, same);
    }
}

std::shared_ptr<Cache> find_cache(const ggml_tensor *root) { return find_cache(root->buffer); }

std::shared_ptr<Cache> find_cache(ggml_backend_buffer_t buffer) {
    std::lock_guard<std::mutex> guard(caches_mutex);
    auto found = caches().find(buffer);
    return found == caches().end() ? nullptr : found->second;
}

std::shared_ptr<Cache> cache_of(const ggml_tensor *root, const void *owner, Memory &memory) {
    std::lock_guard<std::mutex> guard(caches_mutex);
    std::shared_ptr<Cache> &cache = caches()[root->buffer];
    if (cache == nullptr || !cache->fits(cells_of(root), streams_of(root), memory)) {
        cache = std::make_shared<Cache>(cells_of(root), streams_of(root), memory);
    }
    cache->owner = owner;
    return cache;
}

void release_caches(const void *owner) {
    std::lock_guard<std::mutex> guard(caches_mutex);
    for (auto each = caches().begin(); each != caches().end();) {
        each = each->second->owner == owner ? caches().erase(each) : std::next(each);
    }
}

void forget_all() {
    std::lock_guard<std::mutex> guard(caches_mutex);
    for (auto &[buffer, cache] : caches()) {
        std::lock_guard<std::mutex> inner(cache->mutex);
        cache->forget();
    }
}

}  // namespace vanward
