// What the host wrote into the inputs of a GPU's graphs, masks and numbers of rows, so that nobody has to read them back.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace vanward {

/** Bytes, and when they changed. */
class Kept {
  public:
    Kept();

    /** Another one in each object of the process. */
    uint64_t name() const { return name_; }
    /** Grows when bytes may have changed. */
    uint64_t version() const { return version_; }
    const char *data() const { return bytes_.data(); }
    size_t size() const { return bytes_.size(); }

    /** Whether one of these bytes may have changed after that version. */
    bool has_changed(size_t offset, size_t bytes, uint64_t since) const;
    /** Becomes these bytes. */
    void take(const void *data, size_t bytes);

  private:
    uint64_t name_, version_ = 0;
    std::vector<char> bytes_;
    std::vector<uint64_t> versions_;  // of each piece
};

/**
 * The inputs in one buffer. Those that a graph asked for are followed: what is written there later is kept, for the next graph alone, since a graph may
 * write over its inputs. Thread-safe.
 */
class Inputs {
  public:
    /** Most inputs that are followed, and most bytes that are kept of all of them: masks of 32 rows over four times 131,072 cells. */
    static constexpr size_t FOLLOWED = 16, MOST_BYTES = 32 << 20;

    /**
     * What is in the first `bytes` bytes of a tensor, if all of it was written at once since the last graph; otherwise NULL. It stays as it is until the
     * tensor is written again.
     */
    const Kept *find(const ggml_tensor *tensor, size_t bytes);

    /** The host wrote these bytes into a tensor; `data` is read before this returns. */
    void written(const ggml_tensor *tensor, const void *data, size_t offset, size_t bytes);
    /** These bytes became others, which are not known. */
    void overwritten(const char *begin, size_t bytes);
    /** Whatever was written before is not known any more: a graph was computed, or the buffer was cleared. */
    void expire();
    /** Follows nothing any more. */
    void forget();
    /** How many bytes are kept. */
    size_t bytes();

  private:
    struct Input {
        const char *begin;
        uint64_t asked;  ///< after how many graphs it was asked for last
        bool is_fresh;   ///< whether `kept` is what is there
        Kept kept;
    };

    /** Forgets what was asked for before `input` was, as far as so many bytes of that need it. Returns whether there is room. */
    bool make_room(const Input &input, size_t bytes);

    std::mutex mutex_;
    std::vector<std::unique_ptr<Input>> all_;
    uint64_t graphs_ = 0;
};

}  // namespace vanward
