// Sets of cells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace vanward {

class Bits {
  public:
    Bits() = default;
    explicit Bits(size_t size) : words((size + 63) / 64) {}

    size_t word_count() const { return words.size(); }
    uint64_t &word(size_t i) { return words[i]; }
    uint64_t word(size_t i) const { return words[i]; }

    bool has(size_t i) const { return i / 64 < words.size() && (words[i / 64] >> (i % 64) & 1) != 0; }
    void add(size_t i) { words[i / 64] |= uint64_t{1} << (i % 64); }
    void remove(size_t i) { words[i / 64] &= ~(uint64_t{1} << (i % 64)); }

    size_t count() const {
        size_t sum = 0;
        for (uint64_t word : words) {
            sum += static_cast<size_t>(__builtin_popcountll(word));
        }
        return sum;
    }

    /** Whether `other` has every element of this set. */
    bool is_within(const Bits &other) const {
        bool within = true;
        each_word_beyond(other, [&](size_t, uint64_t) { return within = false; });
        return within;
    }

    /** Elements that are not in `other`, counted as far as `enough`. */
    size_t count_not_in(const Bits &other, size_t enough) const {
        size_t sum = 0;
        each_word_beyond(other, [&](size_t, uint64_t rest) { return (sum += static_cast<size_t>(__builtin_popcountll(rest))) < enough; });
        return sum;
    }

    /** Calls `take` with each element that is in this set and not in `other`, ascending. */
    template <typename Take> void each_not_in(const Bits &other, Take take) const {
        each_word_beyond(other, [&](size_t w, uint64_t rest) {
            for (; rest != 0; rest &= rest - 1) {
                take(w * 64 + static_cast<size_t>(__builtin_ctzll(rest)));
            }
            return true;
        });
    }

  private:
    /**
     * Calls `look` with each word that has elements which are not in `other`, and these elements, as long as it returns true. Sets that are compared mostly
     * differ in a word or two: what is equal is passed over by memcmp.
     */
    template <typename Look> void each_word_beyond(const Bits &other, Look look) const {
        constexpr size_t PIECE = 64;
        for (size_t begin = 0; begin < words.size(); begin += PIECE) {
            const size_t end = begin + PIECE < words.size() ? begin + PIECE : words.size();
            if (end <= other.words.size() && memcmp(&words[begin], &other.words[begin], (end - begin) * sizeof words[0]) == 0) {
                continue;
            }
            for (size_t w = begin; w < end; ++w) {
                const uint64_t rest = words[w] & ~(w < other.words.size() ? other.words[w] : 0);
                if (rest != 0 && !look(w, rest)) {
                    return;
                }
            }
        }
    }

    std::vector<uint64_t> words;
};

/** Numbers of elements that both sets have, and that one alone has. */
struct Overlap {
    size_t both = 0, first_alone = 0, second_alone = 0;
};

inline Overlap overlap(const Bits &a, const Bits &b) {
    Overlap result;
    size_t words = a.word_count() > b.word_count() ? a.word_count() : b.word_count();
    for (size_t w = 0; w < words; ++w) {
        uint64_t x = w < a.word_count() ? a.word(w) : 0, y = w < b.word_count() ? b.word(w) : 0;
        if (x == ~uint64_t{0} && y == x) {  // most words of a long sequence, where counting bits takes many instructions
            result.both += 64;
            continue;
        }
        result.both += static_cast<size_t>(__builtin_popcountll(x & y));
        result.first_alone += static_cast<size_t>(__builtin_popcountll(x & ~y));
        result.second_alone += static_cast<size_t>(__builtin_popcountll(y & ~x));
    }
    return result;
}

}  // namespace vanward
