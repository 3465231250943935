#include "sequence.h"

#include <algorithm>

namespace vanward {

namespace {
constexpr size_t EDITS_KEPT = 64;
}

void Sequence::append(int64_t cell) {
    int32_t row = static_cast<int32_t>(stream_ * stream_cells_ + cell);
    if (in_a_row_ == cells_.size() && (cells_.empty() || row == cells_.back() + 1)) {
        in_a_row_ += 1;
    }
    position_[static_cast<size_t>(cell)] = static_cast<int32_t>(cells_.size());
    cells_.push_back(row);
}

template <typename Keeps> void Sequence::remove(Keeps keeps) {
    const int64_t base = stream_ * stream_cells_;
    size_t first = 0;
    while (first < cells_.size() && keeps(cells_[first] - base)) {
        ++first;
    }
    if (first == cells_.size()) {
        return;
    }
    std::vector<int32_t> rest(cells_.begin() + static_cast<std::ptrdiff_t>(first), cells_.end());
    cells_.resize(first);
    in_a_row_ = std::min(in_a_row_, first);
    for (int32_t row : rest) {
        position_[static_cast<size_t>(row - base)] = -1;
    }
    for (int32_t row : rest) {
        if (keeps(row - base)) {
            append(row - base);
        }
    }
    version_ += 1;
    edits_.push_back({version_, static_cast<int64_t>(first)});
    if (edits_.size() > EDITS_KEPT) {
        edits_.pop_front();
    }
}

void Sequence::follow(const RowGroup &group) {
    const int64_t before = size();
    const bool oldest_goes = before > 0 && !group.last->has(static_cast<size_t>(cells_.front() - stream_ * stream_cells_));
    if (!visible_.is_within(*group.last)) {
        remove([&](int64_t cell) { return group.last->has(static_cast<size_t>(cell)); });
    }
    slides_ = !oldest_goes ? std::max(slides_ - (before > 0 ? 1 : 0), 0) : std::min(slides_ + 4, 64);

    // Row r sees the tokens before the last rows − 1 − r: what only later rows see has to be at the end, in the order of the rows.
    std::vector<int64_t> seen_by_first;
    group.first->each_not_in(visible_, [&](size_t cell) { seen_by_first.push_back(static_cast<int64_t>(cell)); });
    size_t there = 0;  // added cells that are tokens already
    for (int32_t cell : group.added) {
        there += position_[static_cast<size_t>(cell)] >= 0;
    }
    bool in_order = there == 0 || seen_by_first.empty();
    for (size_t i = 0; in_order && i < there; ++i) {
        in_order = position_[static_cast<size_t>(group.added[i])] == static_cast<int32_t>(cells_.size() - there + i);
    }
    if (!in_order) {
        Bits own(static_cast<size_t>(stream_cells_));
        for (int32_t cell : group.added) {
            own.add(static_cast<size_t>(cell));
        }
        remove([&](int64_t cell) { return !own.has(static_cast<size_t>(cell)); });
    }
    for (int64_t cell : seen_by_first) {
        append(cell);
    }
    for (int32_t cell : group.added) {
        if (position_[static_cast<size_t>(cell)] < 0) {
            append(cell);
        }
    }
    visible_ = *group.last;
}

int64_t Sequence::unchanged_since(uint64_t version) const {
    if (version == version_) {
        return size();
    }
    if (edits_.empty() || edits_.front().version > version + 1) {
        return 0;
    }
    int64_t first = size();
    for (const Edit &edit : edits_) {
        if (edit.version > version) {
            first = std::min(first, edit.first);
        }
    }
    return first;
}

}  // namespace vanward
