// A sequence as Vanward sees it: the visible cells of a stream of a KV cache, in an order that does not change.
#pragma once

#include "visible.h"

#include <deque>

namespace vanward {

/**
 * The tokens that one sequence's rows see. Token t lies in cell `cells[t]`. New cells go to the end, whatever their number, so that
 * the summaries of earlier tokens stay good; what disappears closes up, and summaries from there on are made anew.
 */
class Sequence {
  public:
    Sequence(int stream, int64_t stream_cells) : stream_(stream), stream_cells_(stream_cells), position_(static_cast<size_t>(stream_cells), -1) {}

    int stream() const { return stream_; }
    const Bits &visible() const { return visible_; }
    /** Token → row of the cache, counted over all streams. */
    const std::vector<int32_t> &cells() const { return cells_; }
    int64_t size() const { return static_cast<int64_t>(cells_.size()); }
    /** The token in a cell of the stream, or −1. */
    int32_t token_in(int64_t cell) const { return position_[static_cast<size_t>(cell)]; }

    /** Whether the cells follow each other, so that the tokens are a range of rows. */
    bool is_range() const { return in_a_row_ == cells_.size(); }

    /** Whether the oldest token disappears at nearly every step, as in a sliding window: summaries would not live for a step. */
    bool slides() const { return slides_ >= 4; }

    /** Becomes what the rows of `group` see, the last row's own cells last. */
    void follow(const RowGroup &group);

    /** Changes so far that were more than new cells at the end. */
    uint64_t version() const { return version_; }
    /** Tokens that are where they were at `version`, and have been since. */
    int64_t unchanged_since(uint64_t version) const;

    /** Pages of every layer's summaries, in the order of the tokens. */
    std::vector<int32_t> pages;
    /** Step at which rows saw it last. */
    uint64_t used = 0;
    /** What layers know it by: another one in each sequence of the process. */
    uint64_t name = 0;
    /** On a GPU: version and size when its keys were last compared with prints, or known to be as they were. */
    uint64_t seen_version = UINT64_MAX;
    int64_t seen_size = 0;

  private:
    void append(int64_t cell);
    /** Removes what `keeps` refuses. */
    template <typename Keeps> void remove(Keeps keeps);

    struct Edit {
        uint64_t version;
        int64_t first;
    };

    int stream_;
    int64_t stream_cells_;
    std::vector<int32_t> cells_;
    std::vector<int32_t> position_;
    Bits visible_;
    size_t in_a_row_ = 0;
    int slides_ = 0;
    uint64_t version_ = 0;
    std::deque<Edit> edits_;
};

}  // namespace vanward
