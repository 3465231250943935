#include "visible.h"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace vanward {

namespace {

constexpr uint16_t MINUS_INFINITY = 0xfc00;

/** The visible cells among 64 of a row, as bits; `other` becomes true where an entry is neither 0 nor −∞. */
uint64_t visible_of_64(const uint16_t *entries, bool &other) {
#ifdef __SSE2__
    const __m128i zero = _mm_setzero_si128(), sign = _mm_set1_epi16(0x7fff), masked = _mm_set1_epi16(static_cast<short>(MINUS_INFINITY));
    uint64_t bits = 0, known = 0;
    for (int i = 0; i < 4; ++i) {
        __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(entries + 16 * i));
        __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(entries + 16 * i + 8));
        __m128i visible = _mm_packs_epi16(_mm_cmpeq_epi16(_mm_and_si128(a, sign), zero), _mm_cmpeq_epi16(_mm_and_si128(b, sign), zero));
        __m128i hidden = _mm_packs_epi16(_mm_cmpeq_epi16(a, masked), _mm_cmpeq_epi16(b, masked));
        bits |= static_cast<uint64_t>(static_cast<uint16_t>(_mm_movemask_epi8(visible))) << (16 * i);
        known |= static_cast<uint64_t>(static_cast<uint16_t>(_mm_movemask_epi8(_mm_or_si128(visible, hidden)))) << (16 * i);
    }
    other |= known != ~uint64_t{0};
    return bits;
#else
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) {
        bool visible = (entries[i] & 0x7fff) == 0;
        other |= !visible && entries[i] != MINUS_INFINITY;
        bits |= static_cast<uint64_t>(visible) << i;
    }
    return bits;
#endif
}

/** Entries that are compared at once. */
constexpr int64_t PIECE = 4096;

/**
 * Takes over the entries of a row that differ from those before, and whether their cells are visible. Returns whether some did. `may_differ` says
 * whether so many entries from one on may.
 */
template <typename MayDiffer> bool follow_row(const uint16_t *entries, uint16_t *before, int64_t cells, Bits &row, bool &other, MayDiffer may_differ) {
    bool changed = false;
    auto differs = [&](int64_t i, int64_t count) { return memcmp(entries + i, before + i, static_cast<size_t>(count) * sizeof *entries) != 0; };
    for (int64_t piece = 0; piece < cells; piece += PIECE) {
        const int64_t end = std::min(piece + PIECE, cells);
        if (!may_differ(piece, end - piece) || !differs(piece, end - piece)) {
            continue;
        }
        changed = true;
        for (int64_t i = piece; i < end; i += 64) {
            uint16_t word[64];
            const int64_t count = std::min<int64_t>(64, end - i);
            if (!differs(i, count)) {
                continue;
            }
            std::fill_n(word, 64, MINUS_INFINITY);
            std::copy_n(entries + i, count, word);
            std::copy_n(entries + i, count, before + i);
            row.word(static_cast<size_t>(i / 64)) = visible_of_64(word, other);
        }
    }
    return changed;
}

/** The one cell that `next` has beyond `row`, or −1 where it is not one or where it lacks one of `row`. */
int32_t cell_added(const Bits &row, const Bits &next) {
    int32_t added = -1;
    for (size_t w = 0; w < row.word_count(); ++w) {
        uint64_t more = next.word(w) & ~row.word(w);
        if ((row.word(w) & ~next.word(w)) != 0 || (more & (more - 1)) != 0 || (more != 0 && added >= 0)) {
            return -1;
        }
        if (more != 0) {
            added = static_cast<int32_t>(w * 64) + __builtin_ctzll(more);
        }
    }
    return added;
}

}  // namespace

bool Visible::follow(const ggml_tensor *mask, int rows, int streams, int64_t cells, const Kept *kept) {
    const int planes = static_cast<int>(std::min<int64_t>(streams, mask->ne[3]));
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(planes);
    bool changed = false;
    bool goes_on = kept != nullptr && kept->name() == kept_name_ && mask->nb[1] == kept_strides_[0] && mask->nb[3] == kept_strides_[1];
    if (!is_known_ || rows != rows_of_plane_ || planes != planes_ || cells != cells_) {
        rows_of_plane_ = rows;
        planes_ = planes;
        cells_ = cells;
        entries_.assign(count * static_cast<size_t>(cells), MINUS_INFINITY);
        rows_.assign(count, Bits(static_cast<size_t>(cells)));
        changed = true;
        goes_on = false;
    }
    bool other = false;
    for (int p = 0; p < planes; ++p) {
        for (int r = 0; r < rows; ++r) {
            const size_t offset = static_cast<size_t>(r) * mask->nb[1] + static_cast<size_t>(p) * mask->nb[3];
            const uint16_t *entries = reinterpret_cast<const uint16_t *>(static_cast<const char *>(mask->data) + offset);
            const size_t n = static_cast<size_t>(p * rows + r);
            uint16_t *before = entries_.data() + n * static_cast<size_t>(cells);
            changed |= follow_row(entries, before, cells, rows_[n], other, [&](int64_t first, int64_t some) {
                const size_t begin = offset + static_cast<size_t>(first) * sizeof *entries, bytes = static_cast<size_t>(some) * sizeof *entries;
                return !goes_on || kept->has_changed(begin, bytes, kept_version_);
            });
        }
    }
    is_known_ = !other;
    kept_name_ = kept == nullptr ? 0 : kept->name();
    kept_version_ = kept == nullptr ? 0 : kept->version();
    kept_strides_[0] = mask->nb[1];
    kept_strides_[1] = mask->nb[3];
    return changed;
}

std::vector<RowGroup> Visible::groups(int streams) const {
    std::vector<RowGroup> groups;
    for (int s = 0; s < streams; ++s) {
        for (int r = 0; r < rows_of_plane_; ++r) {
            const Bits &row = rows_[static_cast<size_t>(s % planes_ * rows_of_plane_ + r)];
            const int32_t added = r > 0 ? cell_added(*groups.back().last, row) : -1;
            if (added >= 0) {
                groups.back().rows += 1;
                groups.back().last = &row;
                groups.back().added.push_back(added);
            } else {
                groups.push_back({s, r, 1, &row, &row, {}});
            }
        }
    }
    return groups;
}

}  // namespace vanward
