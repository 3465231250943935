// Where the calls read which row of the cache holds each token of a batch's sequences.
#pragma once

#include "cache.h"

namespace vanward {

/** Tokens → rows of the cache, [sequences, length]. From step to step most sequences only grow: what they had is not copied again. */
class TokenTable {
  public:
    explicit TokenTable(Memory &memory) : there_(memory) {}

    /** Shows these sequences, none longer than `length`. What lies beyond a sequence's tokens is undefined. */
    const int32_t *show(const std::vector<Placed> &groups, size_t length);

  private:
    /** What a row shows. */
    struct Row {
        uint64_t name = 0, version = 0;
        size_t size = 0;
    };

    Array<int32_t> there_;
    size_t length_ = 0;
    std::vector<Row> rows_;
};

}  // namespace vanward
