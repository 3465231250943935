#include "visible.h"

#include <utility>

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

bool read_row(const uint16_t *entries, int64_t cells, Bits &row) {
    bool other = false;
    int64_t whole = cells / 64 * 64;
    for (int64_t i = 0; i < whole; i += 64) {
        row.word(static_cast<size_t>(i / 64)) = visible_of_64(entries + i, other);
    }
    for (int64_t i = whole; i < cells; ++i) {
        bool visible = (entries[i] & 0x7fff) == 0;
        other |= !visible && entries[i] != MINUS_INFINITY;
        if (visible) {
            row.add(static_cast<size_t>(i));
        }
    }
    return !other;
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

bool split_rows(const ggml_tensor *mask, int rows, int streams, int64_t cells, std::vector<RowGroup> &groups) {
    groups.clear();
    for (int s = 0; s < streams; ++s) {
        for (int r = 0; r < rows; ++r) {
            const char *at = static_cast<const char *>(mask->data) + static_cast<size_t>(r) * mask->nb[1] +
                             static_cast<size_t>(s % mask->ne[3]) * mask->nb[3];
            Bits row(static_cast<size_t>(cells));
            if (!read_row(reinterpret_cast<const uint16_t *>(at), cells, row)) {
                return false;
            }
            if (r > 0) {
                RowGroup &group = groups.back();
                int32_t added = cell_added(group.last, row);
                if (added >= 0) {
                    group.rows += 1;
                    group.last = std::move(row);
                    group.added.push_back(added);
                    continue;
                }
            }
            RowGroup group;
            group.stream = s;
            group.first_row = r;
            group.rows = 1;
            group.first = row;
            group.last = std::move(row);
            groups.push_back(std::move(group));
        }
    }
    return true;
}

}  // namespace vanward
