#include "inputs.h"

#include "options.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

namespace vanward {

namespace {

/** Bytes that are compared at once. */
constexpr size_t PIECE = 4096;

}  // namespace

Kept::Kept() {
    static std::atomic<uint64_t> names{0};
    name_ = ++names;
}

bool Kept::has_changed(size_t offset, size_t bytes, uint64_t since) const {
    const size_t end = std::min((offset + bytes + PIECE - 1) / PIECE, versions_.size());
    return offset + bytes > bytes_.size() || std::any_of(versions_.begin() + static_cast<std::ptrdiff_t>(std::min(offset / PIECE, end)),
                                                         versions_.begin() + static_cast<std::ptrdiff_t>(end), [&](uint64_t each) { return each > since; });
}

void Kept::take(const void *data, size_t bytes) {
    version_ += 1;
    const char *from = static_cast<const char *>(data);
    if (bytes != bytes_.size()) {
        bytes_.assign(from, from + bytes);
        versions_.assign((bytes + PIECE - 1) / PIECE, version_);
        return;
    }
    // From step to step few entries of a mask change: reading both takes less time than writing one.
    for (size_t i = 0; i < versions_.size(); ++i) {
        const size_t at = i * PIECE, count = std::min(PIECE, bytes - at);
        if (memcmp(bytes_.data() + at, from + at, count) != 0) {
            memcpy(bytes_.data() + at, from + at, count);
            versions_[i] = version_;
        }
    }
}

const Kept *Inputs::find(const ggml_tensor *tensor, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    const char *begin = static_cast<const char *>(tensor->data);
    for (auto &each : all_) {
        if (each->begin == begin) {
            each->asked = graphs_;
            return each->is_fresh && each->kept.size() >= bytes ? &each->kept : nullptr;
        }
    }
    if (all_.size() == FOLLOWED) {
        auto oldest = std::min_element(all_.begin(), all_.end(), [](const auto &a, const auto &b) { return a->asked < b->asked; });
        if ((*oldest)->asked == graphs_) {  // its bytes may be in use
            return nullptr;
        }
        all_.erase(oldest);
    }
    all_.push_back(std::make_unique<Input>());
    all_.back()->begin = begin;
    all_.back()->asked = graphs_;
    return nullptr;
}

void Inputs::written(const ggml_tensor *tensor, const void *data, size_t offset, size_t bytes) {
    const char *begin = static_cast<const char *>(tensor->data) + offset;
    overwritten(begin, bytes);
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = std::find_if(all_.begin(), all_.end(), [&](const auto &each) { return each->begin == begin; });
    // The mask of a prompt has more rows, and nobody reads it.
    if (found == all_.end() || tensor->ne[1] * tensor->ne[2] * tensor->ne[3] > options.rows) {
        return;
    }
    Input &input = **found;
    try {
        if (make_room(input, bytes)) {
            input.kept.take(data, bytes);
            input.is_fresh = true;
        }
    } catch (const std::bad_alloc &) {  // ggml's caller expects none
        input.kept = Kept();
    }
}

bool Inputs::make_room(const Input &input, size_t bytes) {
    size_t others = 0;
    for (auto &each : all_) {
        others += each.get() == &input ? 0 : each->kept.size();
    }
    while (others + bytes > MOST_BYTES) {
        Input *oldest = nullptr;
        for (auto &each : all_) {
            const bool is_older = each->asked < (oldest == nullptr ? input : *oldest).asked;
            oldest = is_older && each->kept.size() > 0 ? each.get() : oldest;
        }
        if (oldest == nullptr) {
            return false;
        }
        others -= oldest->kept.size();
        oldest->kept = Kept();
        oldest->is_fresh = false;
    }
    return true;
}

void Inputs::overwritten(const char *begin, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto &each : all_) {
        each->is_fresh &= bytes == 0 || begin + bytes <= each->begin || each->begin + each->kept.size() <= begin;
    }
}

void Inputs::expire() {
    std::lock_guard<std::mutex> guard(mutex_);
    graphs_ += 1;
    for (auto &each : all_) {
        each->is_fresh = false;
    }
}

void Inputs::forget() {
    std::lock_guard<std::mutex> guard(mutex_);
    all_.clear();
}

size_t Inputs::bytes() {
    std::lock_guard<std::mutex> guard(mutex_);
    size_t sum = 0;
    for (auto &each : all_) {
        sum += each->kept.size();
    }
    return sum;
}

}  // namespace vanward
