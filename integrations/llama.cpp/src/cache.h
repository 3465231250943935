// What is known about a KV cache of llama.cpp: its sequences, and the summaries of each layer's keys.
#pragma once

#include "ggml-backend.h"
#include "memory.h"
#include "sequence.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace vanward {

/** Blocks of a page of summaries. */
constexpr int64_t PAGE_BLOCKS = 64;

/** What a layer knows of one sequence. */
struct Known {
    uint64_t name = 0;
    uint64_t version = 0;
    /** Tokens whose blocks are summarised. */
    int64_t summarised = 0;
    /** Tokens that the summaries were made with: more than `summarised` where some changed or were taken back since. On a GPU. */
    int64_t reached = 0;
    /** Prints of the keys of each summarised token; on a GPU, of the last one in each block when `printed` tokens were summarised. */
    std::vector<uint64_t> prints;
    int64_t printed = 0;
};

/** One layer's keys, `cache_k_l%d` [Hk·D, cells, streams], and their summaries. */
struct Layer {
    Layer(const ggml_tensor *keys, Memory &memory);

    /** Whether `keys` is the tensor that this was made for. */
    bool is(const ggml_tensor *keys) const;

    int number = 0;
    const ggml_tensor *tensor;
    const char *data;
    ggml_type type;
    int64_t width, cells, streams;
    size_t row_bytes, stream_bytes;

    /** No key was seen written since ggml wrote some itself: nothing is known of the keys. */
    bool blind = false;
    /** MINMAX: largest keys, then smallest keys; AXIS: `axes`, and their range in INT4. Room for `pages` pages. */
    Array<uint16_t> first, second;
    int64_t pages = 0;
    std::unordered_map<uint64_t, Known> known;

    /** What is known of a sequence, without what changed since. */
    Known &of(const Sequence &sequence);
    /** Forgets the summaries of all sequences. */
    void forget();
    const char *row(int64_t number) const { return data + static_cast<size_t>(number) * row_bytes; }
};

/** A group of rows and the sequence that it belongs to. */
struct Placed {
    Sequence *sequence;
    int stream;  ///< among those of the node
    int first_row;
    int rows;
};

/** The layers of one `llama_kv_cache` in one buffer, which share cells and mask. */
class Cache {
  public:
    Cache(int64_t cells, int64_t streams, Memory &memory) : cells_(cells), streams_(streams), memory_(memory) {}

    std::mutex mutex;
    /** The context that used it last. */
    const void *owner = nullptr;
    /** Rows of the cache that the last attention offered can see; decides whether writes are followed. */
    int64_t rows_in_use = INT64_MAX;
    /** Values are stored transposed: attention never comes. */
    bool no_attention = false;
    /** Writes offered since the last attention that the library can take. */
    size_t writes_alone = 0;
    /** Whether those were of two graphs or more. A graph's writes of keys and values are offered once, and before its attentions. */
    bool is_unread() const { return writes_alone > 4 * std::max<size_t>(layers_.size(), 1); }

    bool fits(int64_t cells, int64_t streams, const Memory &memory) const {
        return cells == cells_ && streams == streams_ && &memory == &memory_;
    }
    bool on_gpu() const { return memory_.device_type == 2; }
    bool has_sequences() const { return !sequences_.empty(); }
    /** Tokens of the longest sequence. */
    int64_t longest() const;
    /** Attentions so far whose masks were different ones. */
    uint64_t steps() const { return steps_; }

    /** The layer of this tensor of keys; made, if need be. */
    Layer &layer(const ggml_tensor *keys);
    Layer *find_layer(const ggml_tensor *keys);

    /** Notes that keys were written, in rows that are counted over all streams. Returns how many tokens are summarised no more. */
    int64_t written(Layer &layer, int64_t first, int64_t count);
    /** Notes that a row was written in each layer. */
    void written(int64_t row);
    /** Notes that these bytes of the cache were written outside of graphs. */
    void overwritten(const char *begin, size_t bytes);
    /** Forgets all summaries. */
    void forget();

    /**
     * Which sequences the rows of an attention belong to. The first of its streams is `first_stream` of the cache. NULL where the
     * mask is no matter of visibility, or its rows are of too many sequences. `kept`: what the mask lies in, or NULL.
     */
    const std::vector<Placed> *place(const ggml_tensor *mask, int rows, int first_stream, int streams, int64_t cells, const Kept *kept = nullptr);

    /** The page of every summary of a sequence of `blocks` blocks, and room for them in each layer. */
    void reserve_pages(Sequence &sequence, int64_t blocks);
    int64_t page_count() const { return page_count_; }

    /** The layer whose prints tell whether keys changed unseen: the middle one, since the first layer's keys hold no context. */
    Layer *witness();
    /** Whether `layer` is the first of the sparse layers in a step. */
    bool is_first(const Layer &layer) const;
    /** Compares the witness's keys with their prints, and forgets summaries, of every layer, from the first difference on. */
    void look_for_changes(Sequence &sequence);

    const std::vector<std::unique_ptr<Layer>> &layers() const { return layers_; }

  private:
    Sequence *best_match(const RowGroup &group, int stream);
    void drop_unused();

    int64_t cells_, streams_;
    Memory &memory_;
    std::vector<std::unique_ptr<Layer>> layers_;
    std::vector<std::unique_ptr<Sequence>> sequences_;
    uint64_t steps_ = 0;

    Visible visible_;
    int first_stream_ = 0, streams_of_node_ = 0;
    bool placeable_ = false;
    std::vector<Placed> placed_;

    std::vector<int32_t> free_pages_;
    int64_t page_count_ = 0;
};

/** The cache that holds a tensor, by its buffer. Thread-safe. */
std::shared_ptr<Cache> find_cache(const ggml_tensor *root);
std::shared_ptr<Cache> find_cache(ggml_backend_buffer_t buffer);
/** The same; made, if need be, for keys or values of this many cells and streams. */
std::shared_ptr<Cache> cache_of(const ggml_tensor *root, const void *owner, Memory &memory);
/** Forgets the caches that a context used last. */
void release_caches(const void *owner);
/** Forgets the summaries of every cache. */
void forget_all();

/** A print of the key of one row: of its first 16 bytes. */
uint64_t print_of(const char *row);

/** The layer in a name such as `cache_k_l12`, or −1. `kind` is k or v. */
int layer_number(const ggml_tensor *root, char kind);

}  // namespace vanward
