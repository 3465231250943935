#include "token_table.h"

#include <utility>

namespace vanward {

const int32_t *TokenTable::show(const std::vector<Placed> &groups, size_t length) {
    const size_t count = groups.size();
    if (there_.size() < count * length) {
        there_.grow(2 * count * length);
        rows_.clear();
    }
    if (length != std::exchange(length_, length)) {
        rows_.clear();
    }
    rows_.resize(count);
    for (size_t i = 0; i < count; ++i) {
        const Sequence &sequence = *groups[i].sequence;
        const std::vector<int32_t> &cells = sequence.cells();
        Row &row = rows_[i];
        const bool has_grown = row.name == sequence.name && row.version == sequence.version() && row.size <= cells.size();
        const size_t from = has_grown ? row.size : 0;
        if (from < cells.size()) {
            there_.put(i * length + from, cells.data() + from, cells.size() - from);
        }
        row = {sequence.name, sequence.version(), cells.size()};
    }
    return there_.data();
}

}  // namespace vanward
